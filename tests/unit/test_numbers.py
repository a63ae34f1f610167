"""Numbers of numpy are numbers, wherever one is given: they come from lengths, shapes and other arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.quantize import Method

WEIGHT = np.arange(32, dtype=np.float32).reshape(8, 4)
N: Any = np.int64


def state(changed: Any = None) -> crf.State:
    return crf.State(tables={"t": crf.Table({"weight": WEIGHT}, changed=changed)})


def test_of_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"chunk_bytes": N(64), "every": N(2), "max_host_bytes": N(1 << 20), "bits": N(4)}
    run = crf.open_run(tmp_path / "run", "a", durable=False, keep=crf.Keep(last=N(3), every=N(10)), **options)
    for step in N(0), N(1), N(2):
        run.save(state(changed=[1]), step=step)
    assert [(c.sequence, c.step, c.parent) for c in run.log()] == [(1, 0, None), (2, 1, 1), (3, 2, None)]
    assert [c.sequence for c in (run.at(step=N(1)), run.rollback(N(2)))] == [2, 4]
    assert run[4].changes_since(N(3), max_bytes=N(1)) is not None


@pytest.mark.parametrize(
    ("bits", "plain"),
    [
        (N(4), 4),
        ({"t": np.uint8(4)}, {"t": 4}),
        ({"t*": {"weight": np.int8(4), "sum": None}}, {"t*": {"weight": 4, "sum": None}}),
    ],
)
def test_a_token_is_json(tmp_path: Path, bits: Any, plain: Any) -> None:
    """Whatever the run was opened with, other processes get it by any means."""
    method = Method("greedy", num_bins=N(20), ratio=np.float32(0.25))  # type: ignore[arg-type]
    run = crf.open_run(tmp_path / "run", "a", durable=False, bits=bits, encoder=method, chunk_bytes=N(64))
    save = run.begin(writers=N(1))
    token = json.loads(json.dumps(save.token))
    assert token["bits"] == plain
    assert token["chunk_bytes"] == 64
    assert token["encoder"] == ["greedy", 20, 0.25]
    writer = crf.join_save(token).writer(N(0))
    writer.put("t", {"weight": WEIGHT}, rows=(N(0), N(8)), of=N(8))
    told = save.commit([json.loads(json.dumps(writer.finish()))]).table("t").fields[0].encoder
    assert told is not None
    assert (told["bits"], told["num_bins"], told["ratio"]) == (4, 20, 0.25)


def test_what_is_given_as_bits_may_change_afterwards(tmp_path: Path) -> None:
    bits: dict[str, Any] = {"t": {"weight": 4}}
    run = crf.open_run(tmp_path / "run", "a", durable=False, bits=bits)
    bits["t"]["weight"] = 2
    told = run.save(state()).table("t").fields[0].encoder
    assert told is not None
    assert told["bits"] == 4


def test_of_a_function(tmp_path: Path) -> None:
    fields: Any = {"weight": (np.float32, N(4))}
    table = crf.Table.from_function(lambda ids: {"weight": WEIGHT[ids]}, rows=N(8), fields=fields)
    run = crf.open_run(tmp_path / "run", "a", durable=False)
    saved = run.save(crf.State(tables={"t": table}))
    assert saved.table("t").fields[0].columns == 4
    assert np.array_equal(saved.table("t").read()["weight"], WEIGHT)


def test_of_rules() -> None:
    assert crf.Keep(last=N(2)) == crf.Keep(last=2)
    assert crf.Keep(newer_than=N(60)).newer_than == 60
    assert Method("greedy", num_bins=N(10)) == Method("greedy", num_bins=10)


@pytest.mark.parametrize("value", [np.bool_(1), np.float64(2), np.int64(0), np.complex128(2)])
def test_what_is_no_number_of_checkpoints_is_refused(value: Any) -> None:
    with pytest.raises(crf.InvalidInputError, match="last="):
        crf.Keep(last=value)


@pytest.mark.parametrize("value", [np.bool_(1), np.float64("nan"), np.int64(-1), np.complex128(2)])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(crf.InvalidInputError, match="newer_than="):
        crf.Keep(newer_than=value)


def test_of_a_trainer(tmp_path: Path) -> None:
    import torch

    from checkrun_format.torch import Checkpointer

    model = torch.nn.EmbeddingBag(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "run", model, optimizer, every=N(3), durable=False) as checkpointer:
        assert checkpointer.until_save == 3
        assert [checkpointer.step_done(N(step)) is not None for step in range(3)] == [False, False, True]
