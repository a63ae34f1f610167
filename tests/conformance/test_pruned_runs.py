"""The independent reader reads what the library prunes and tags."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import checkrun_format as crf
from tests.conformance import independent_reader
from tests.conformance.agreement import assert_agreement


def test_a_pruned_run(tmp_path: Path) -> None:
    """PRU-1, TRE-1, TAG-1: markers and tags are told from checkpoints; what is left resolves to the same bits."""
    folder = tmp_path / "run"
    run = crf.open_run(folder, "a", durable=False, policy="consecutive", bits=4)
    weight = np.random.default_rng(3).normal(size=(30, 5)).astype(np.float32)
    for step in range(8):
        weight[step::8] += 1
        table = crf.Table({"weight": weight}, changed=np.arange(step, 30, 8))
        run.save(crf.State(tables={"t": table}), step=step, parent=None if step in (0, 4) else "latest")
    run.tag("best", 2)
    before = {number: run[number].load().tables["t"]["weight"].tobytes() for number in (1, 2, 5, 6, 7, 8)}
    run.prune(run.plan_prune(crf.Keep(last=1)))
    states = independent_reader.sequences(folder)
    assert states == {n: "committed" if n in before else "pruned" for n in range(1, 9)}
    assert independent_reader.latest(folder) == 8
    found = {n: independent_reader.Checkpoint(folder, n).table("t")["weight"].tobytes() for n in before}
    assert found == before
    assert assert_agreement(folder, checkpoints=9) == len(before)
