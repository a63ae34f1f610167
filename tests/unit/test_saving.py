"""Saves of a state that goes on changing: staged once it is decided what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkrun_format as crf
from checkrun_format import quantize
from checkrun_format.arranging import Stored
from checkrun_format.blocks import FieldPlan
from checkrun_format.errors import InvalidInputError
from checkrun_format.rows import Selection
from checkrun_format.torch.snapshot import Copier

ROWS = 100
SPEC = {"weight": ("float32", 8), "sum": ("float32", None)}


def values(salt: int = 0) -> dict[str, Any]:
    drawn = np.random.default_rng(salt)
    return {"weight": drawn.random((ROWS, 8), np.float32), "sum": drawn.random(ROWS, np.float32)}


def never(ids: Any) -> Mapping[str, Any]:
    raise AssertionError(ids)


def state(changed: Any = None) -> crf.State:
    return crf.State(tables={"t": crf.Table.from_function(never, rows=ROWS, fields=SPEC, changed=changed)})


class Stage:
    """Gives rows of a state, and notes what was asked for."""

    def __init__(self, of: dict[str, Any], bits: int | None = None) -> None:
        self.of = of
        self.bits = bits
        self.asked: list[Selection] = []

    def __call__(self, stored: Mapping[str, Stored]) -> dict[str, dict[str, Any]]:
        given = {}
        for name, what in stored.items():
            self.asked.append(what.rows)
            given[name] = {field: array[what.rows].copy() for field, array in self.of.items()}
            assert {plan.name: plan.bits for plan in what.fields} == {"weight": self.bits, "sum": None}
        return given


def test_only_what_is_stored_is_staged(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path, "a", durable=False)
    first, second = Stage(values(0)), Stage(values(1))
    run.save(state(), stage=first)
    made = run.save(state(changed=[3, 5, 99]), stage=second)
    assert first.asked == [slice(0, ROWS)]
    assert [np.asarray(rows).tolist() for rows in second.asked] == [[3, 5, 99]]
    wanted = values(0)
    for name, array in wanted.items():
        array[[3, 5, 99]] = values(1)[name][[3, 5, 99]]
        assert np.array_equal(made.table("t").read()[name], array)
    nothing = Stage(values(2))
    run.save(state(changed=[]), parent="latest", stage=nothing)
    assert nothing.asked == [], "no row of the table is stored"


@pytest.mark.parametrize("lazy", [False, True], ids=["arrays", "a function"])
def test_rows_are_those_of_the_table_as_it_was_given(tmp_path: Path, *, lazy: bool) -> None:
    """Keys come in any order, and so do the rows that the caller is asked for."""
    run = crf.open_run(tmp_path, "a", durable=False)
    keys = np.random.default_rng(4).permutation(ROWS) - 50
    held = {**values(), "sum": keys.astype(np.float32)}

    def save(changed: Any) -> crf.Checkpoint:
        table = crf.Table(held, keys=keys, changed=changed)
        if lazy:
            table = crf.Table.from_function(never, keys=keys, fields=SPEC, changed=changed)
        return run.save(crf.State(tables={"t": table}), stage=Stage(held))

    def check(made: crf.Checkpoint) -> None:
        at = np.argsort(keys)
        found = made.table("t").read()
        assert {name: array.tobytes() for name, array in found.items()} == {n: a[at].tobytes() for n, a in held.items()}

    check(save(None))
    some = keys[[70, 3, 12]]
    held = {name: array.copy() for name, array in held.items()}
    held["weight"][[70, 3, 12]] += 1
    made = save(some)
    assert made.table("t").stored_rows == 3
    check(made)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_that_are_quantized_already(tmp_path: Path, bits: int) -> None:
    """As what is stored of the same codes when the rows are given, in pieces of a chunk."""
    runs = [crf.open_run(tmp_path / name, "a", durable=False, bits=bits, chunk_bytes=100) for name in "ab"]
    given = values()
    given["weight"][7] = np.nan
    plain = runs[0].save(state(), stage=Stage(given, bits))

    encoded = {"weight": quantize.encode(given["weight"], bits), "sum": given["sum"]}
    made = runs[1].save(state(), stage=lambda _: {"t": encoded})
    for name, array in plain.table("t").read().items():
        assert array.tobytes() == made.table("t").read()[name].tobytes()
    assert runs[1].verify() == []
    told = {f.name: f.encoder for f in made.table("t").fields}["weight"]
    assert told is not None
    assert (told["bits"], told["exact_rows"]) == (bits, 1)


def encoded(rows: int, bits: int) -> dict[str, Any]:
    return {"weight": quantize.encode(np.zeros((rows, 8), np.float32), bits), "sum": np.zeros(ROWS, np.float32)}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "no fields"),
        ({"weight": np.zeros((ROWS, 8)), "sum": np.zeros(ROWS, np.float32)}, "float64"),
        ({"weight": np.zeros((3, 8), np.float32), "sum": np.zeros(3, np.float32)}, r"\(3, 8\) for float32 \(100, 8\)"),
        (encoded(ROWS, 2), "2 bits"),
        (
            {"weight": quantize.encode(np.zeros((9, 8), np.float32), 4), "sum": np.zeros(ROWS, np.float32)},
            "9 rows of 8",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, given: dict[str, Any], match: str) -> None:
    run = crf.open_run(tmp_path, "a", durable=False, bits=4)
    with pytest.raises(InvalidInputError, match=match):
        run.save(state(), stage=lambda _: {"t": given})
    assert [path.name for path in tmp_path.iterdir()] == ["zarr.json"]


def test_a_check_abandons_the_save(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path, "a", durable=False, chunk_bytes=100)
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    run.save(state(), stage=Stage(values()), check=count)
    assert calls >= 2
    for last in range(1, calls + 1):
        left = last

        def check() -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run.save(state(changed=[1]), stage=Stage(values(1)), check=check)
        assert {path.name for path in tmp_path.iterdir()} == {"zarr.json", "00000001"}
    made = run.save(state(changed=[]), stage=Stage(values(1)))
    assert made.table("t").stored_rows == 1, "its changed row was kept"


def test_rows_are_quantized_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a device does, done by the CPU: the same codes, whatever the pieces."""
    monkeypatch.setattr("checkrun_format.torch.snapshot._SMALL_BYTES", 100)
    monkeypatch.setattr("checkrun_format.torch.snapshot._PIECE_BYTES", 1000)
    weight, sums = torch.from_numpy(values()["weight"]), torch.arange(ROWS, dtype=torch.float32)
    weight[7] = torch.inf
    copier = Copier(encode_on=lambda device: True)
    run = crf.open_run(tmp_path, "a", durable=False, bits=4, encoder="minmax", chunk_bytes=100)
    kinds: list[type] = []

    def stage(stored: Mapping[str, Stored]) -> Any:
        staged = copier.rows(stored, lambda _: {"weight": weight, "sum": sums})
        kinds.extend(type(array) for array in staged["t"].values())
        return staged

    for changed in (None, [3, 5, 7, 99]):
        made = run.save(state(changed), stage=stage)
        assert kinds[-2:] == [quantize.Quantized, torch.Tensor]
        expected = quantize.decode(quantize.encode(weight.numpy(), 4, "minmax"))
        assert np.array_equal(made.table("t").read()["weight"], expected)
        assert np.array_equal(made.table("t").read()["sum"], sums.numpy())


def test_rows_on_a_device_are_staged_elsewhere(tmp_path: Path) -> None:
    """Raw rows come to the CPU; those to be quantized stay, so that they get the same codes as in any other save."""
    given = values()

    def saved(name: str, staged: Any) -> crf.Checkpoint:
        table = crf.Table.from_function(never, rows=ROWS, fields=SPEC, device="cpu")
        run = crf.open_run(tmp_path / name, "a", durable=False, bits={"*": {"weight": 4}}, encoder="minmax")
        return run.save(crf.State(tables={"t": table}), stage=lambda _: {"t": staged})

    made = saved("a", {"weight": torch.from_numpy(given["weight"]), "sum": given["sum"]})
    wanted = quantize.decode(quantize.encode(given["weight"], 4, "minmax"))
    assert np.array_equal(made.table("t").read()["weight"], wanted)
    assert np.array_equal(made.table("t").read()["sum"], given["sum"])
    with pytest.raises(InvalidInputError, match="'weight'"):
        saved("b", {"weight": given["weight"].tolist(), "sum": given["sum"]})


def test_few_rows_to_be_quantized_stay_where_they_are() -> None:
    weight = torch.from_numpy(values()["weight"])
    plan = FieldPlan(name="weight", dtype="float32", columns=8, bits=4)
    for rows in (slice(3, 6), np.array([3, 4, 5])):
        stored = {"t": Stored(rows=rows, count=3, fields=[plan])}
        staged = Copier(encode_on=lambda device: True).rows(stored, lambda _: {"weight": weight})["t"]["weight"]
        assert isinstance(staged, torch.Tensor)
        assert torch.equal(staged, weight[3:6])
        assert staged.data_ptr() != weight[3:].data_ptr(), "a copy"
