"""What a restore holds beside the arrays that it reads into."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import checkrun_format as crf

ROWS, COLUMNS = 1_700_000, 32
"""218 MB of float32."""


@pytest.mark.parametrize("bits", [None, 4])
def test_a_chain_is_restored_in_bounded_memory(tmp_path: Path, bits: int | None) -> None:
    """Less than the table takes: chunks on their way, those that are kept, and which rows are decided."""
    rng = np.random.default_rng(1)
    weight = rng.random((ROWS, COLUMNS), np.float32)
    run = crf.open_run(tmp_path / "run", "a", durable=False, policy="consecutive", bits=bits, encoder="minmax")
    run.save(crf.State(tables={"t": crf.Table({"weight": weight})}))
    for number in range(3):
        changed = np.flatnonzero(rng.random(ROWS, np.float32) < 0.1)
        weight[changed] += number
        run.save(crf.State(tables={"t": crf.Table({"weight": weight}, changed=changed)}))
    out = crf.State(tables={"t": crf.Table({"weight": np.ones((ROWS, COLUMNS), np.float32)})})
    ids = np.sort(rng.choice(ROWS, 1000, replace=False))
    peaks, taken = [], np.zeros(0)
    tracemalloc.start()
    try:
        for what in ("load", "take"):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            if what == "load":
                state = crf.open_run(tmp_path / "run").load(out=out)
            else:
                taken = crf.open_run(tmp_path / "run").latest().table("t").take(ids)["weight"]
            peaks.append((tracemalloc.get_traced_memory()[1] - before) / 2**20)
    finally:
        tracemalloc.stop()
    found = np.asarray(state.tables["t"]["weight"])
    assert np.abs(found - weight).max() <= (0 if bits is None else 0.6 / (2**bits - 1))
    assert np.array_equal(found[ids], taken)
    assert peaks[0] < 192
    assert peaks[1] < 64
    shutil.rmtree(tmp_path / "run")  # the second reader would take its time
