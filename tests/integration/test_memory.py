"""What a restore holds beside the arrays that it reads into, and what a compaction holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.stores import LocalStore

MANY = 20_000_000
"""Rows of two float32: as many as make which rows are decided, and which rows a chunk lists, as large as values."""

ROWS, COLUMNS = 1_700_000, 32
"""218 MB of float32."""

LARGE = 2 * ROWS


@pytest.mark.parametrize("bits", [None, 4])
def test_a_chain_is_restored_and_compacted_in_bounded_memory(tmp_path: Path, bits: int | None) -> None:
    """Less than the table takes: chunks on their way, those that are kept, and which rows are decided."""
    rng = np.random.default_rng(1)
    weight = rng.random((LARGE, COLUMNS), np.float32)
    run = crf.open_run(tmp_path / "run", "a", durable=False, policy="consecutive", bits=bits, encoder="minmax")
    run.save(crf.State(tables={"t": crf.Table({"weight": weight})}))
    for number in range(3):
        changed = np.flatnonzero(rng.random(LARGE, np.float32) < 0.1)
        weight[changed] += number
        run.save(crf.State(tables={"t": crf.Table({"weight": weight}, changed=changed)}))
    out = crf.State(tables={"t": crf.Table({"weight": np.ones((LARGE, COLUMNS), np.float32)})})
    ids = np.sort(rng.choice(LARGE, 1000, replace=False))
    peaks, taken = [], np.zeros(0)
    tracemalloc.start()
    try:
        for what in ("load", "take", "compact"):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            if what == "load":
                state = crf.open_run(tmp_path / "run").load(out=out)
            elif what == "compact":
                crf.open_run(tmp_path / "run", "a", durable=False).compact()
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
    assert peaks[2] < 224  # 64 each: what waits for its block, what is on its way to the store, chunks that are kept
    compacted = crf.open_run(tmp_path / "run").latest()
    assert (compacted.sequence, compacted.parent) == (5, None)
    assert np.array_equal(compacted.table("t").read()["weight"], found)
    shutil.rmtree(tmp_path / "run")  # the second reader would take its time


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A base and three increments of 10 % of many short rows; and a digest of the state."""
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(2)
    weight = rng.random((MANY, 2), np.float32)
    run = crf.open_run(folder / "run", "a", durable=False, policy="consecutive")
    run.save(crf.State(tables={"t": crf.Table({"weight": weight})}))
    for number in range(3):
        changed = np.flatnonzero(rng.random(MANY, np.float32) < 0.1)
        weight[changed] += number + 1
        run.save(crf.State(tables={"t": crf.Table({"weight": weight}, changed=changed)}))
    weight.tofile(folder / "weight")
    return folder / "run", str(folder / "weight")


PEAK = """
import json, sys
from pathlib import Path
import numpy as np
import checkrun_format as crf
from checkrun_format.movement import prepare
from checkrun_format.testing import MemoryStore

folder, wanted, rows, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what + ":"))

out = np.ones((rows, 2), np.float32)
state = crf.State(tables={"t": crf.Table({"weight": out})})
prepare(1 << 40)                                     # code that is loaded once: it is no part of a read
small, values = crf.open_run(MemoryStore(), "a", policy="consecutive"), np.ones((50_000, 2), np.float32)
for changed in (None, np.arange(0, 50_000, 3)):
    small.save(crf.State(tables={"t": crf.Table({"weight": values}, changed=changed)}))
small.load()
run = crf.open_run(folder)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")        # the peak begins anew
run.load(out=state, max_host_bytes=limit)
peak = memory("VmHWM") - before
same = all(np.array_equal(out[n : n + 1000], np.fromfile(wanted, np.float32, 2000, offset=8 * n).reshape(-1, 2))
           for n in [*range(0, rows - 1000, 999_983), rows - 1000])
print(json.dumps({"peak": peak, "same": same}))
"""


@pytest.mark.parametrize("limit", [72 << 20, 256 << 20])
def test_the_peak_of_a_process_is_bounded(many_rows: tuple[Path, str], limit: int) -> None:
    """Resident memory above the destination, with all that Python and the C libraries take."""
    folder, wanted = many_rows
    argv = [sys.executable, "-c", PEAK, str(folder), wanted, str(MANY), str(limit)]
    printed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    told = json.loads(printed)
    assert told["same"]
    assert told["peak"] < limit


class CountingStore(LocalStore):
    """Counts how often each object is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: Counter[str] = Counter()
        self._counting = threading.Lock()

    def get(self, key: str) -> bytes | None:
        self._count(key)
        return super().get(key)

    def open(self, key: str) -> RawIOBase | None:
        self._count(key)
        return super().open(key)

    def _count(self, key: str) -> None:
        with self._counting:
            self.reads[key] += 1


def test_each_chunk_is_read_once_or_twice(many_rows: tuple[Path, str]) -> None:
    """Once if which rows are decided fits as a whole; else a chunk is read in each section that its rows are in."""
    folder, wanted = many_rows
    for limit, most in ((256 << 20, 1), (72 << 20, 2)):
        store = CountingStore(folder)
        view = crf.open_run(store, max_host_bytes=limit).latest().table("t")
        found = view.read()["weight"]
        assert np.array_equal(found, np.fromfile(wanted, np.float32).reshape(-1, 2))
        chunks = {key: count for key, count in store.reads.items() if "/c/" in key}
        assert {key.split("/")[0] for key in chunks} == {f"0000000{n}" for n in (1, 2, 3, 4)}
        assert max(chunks.values()) == most
    shutil.rmtree(folder)


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "256M"])
def test_a_limit_is_a_positive_number_of_bytes(tmp_path: Path, wrong: object) -> None:
    run = crf.open_run(tmp_path / "run", "a", durable=False)
    run.save(crf.State(tables={"t": crf.Table({"weight": np.ones((3, 2), np.float32)})}))
    checkpoint = run.latest()
    limit: dict[str, Any] = {"max_host_bytes": wrong}
    for call in (
        lambda: crf.open_run(tmp_path / "run", **limit),
        lambda: checkpoint.load(**limit),
        lambda: run.restore(**limit),
        lambda: checkpoint.table("t").read(**limit),
        lambda: checkpoint.table("t").take([1], **limit),
    ):
        with pytest.raises(crf.InvalidInputError, match="max_host_bytes") as caught:
            call()
        assert repr(wrong) in str(caught.value)
