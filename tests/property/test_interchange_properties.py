"""A series of files in one run: every row is faithful to the newest file, every row that reads otherwise is told."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import checkrun_format as crf
from checkrun_format.interchange import RAW, import_file
from checkrun_format.interchange.contents import Array

COLUMNS = 3
VALUES = np.array(
    [0, -0.0, 1, 1.001, -2, 1e-30, 1e30, 65504, 70000, 3.4e38, np.nan, np.inf, -np.inf], np.float32
)  # with offsets that swamp a spread, numbers beyond float16, and what no codes express

BITS = st.sampled_from([1, 2, 4, 8, RAW, None])
CHANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, COLUMNS - 1), st.sampled_from(range(len(VALUES)))))


def is_faithful(decoded: Array, values: Array, bits: int | None) -> bool:
    """DEC-5, or the same bits (EXA-2, RAW-1)."""
    same = (decoded.view(np.uint32) == values.view(np.uint32)).all(axis=1)
    if bits is None:
        return bool(same.all())
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
        step = np.ptp(wide, axis=1) / (2**bits - 1)
        bound = 0.505 * step + 2.0**-20 * np.abs(wide).max(axis=1)
        near = (np.abs(decoded.astype(np.float64) - wide) <= bound[:, None]).all(axis=1)
    return bool((same | near).all())


@given(
    rows=st.integers(1, 150),
    moves=st.lists(st.tuples(st.booleans(), CHANGES, st.integers(-20, 20), BITS), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_series(rows: int, moves: list[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, COLUMNS)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        file, url = Path(folder) / "a.npz", Path(folder) / "run"
        import_into(file, url, values, 4)
        for read_back, changes, growth, bits in moves:
            if read_back:  # what encodes to other bits than it was read from
                values = weight(crf.open_run(url).latest())
            for row, column, which in changes:
                values[row % len(values), column] = VALUES[which]
            more = rng.normal(size=(max(0, growth), COLUMNS)).astype(np.float32)
            values = np.concatenate([values[: max(1, len(values) + min(0, growth))], more])
            before = crf.open_run(url).latest()
            done = import_into(file, url, values, bits)
            assert (before.sequence == done.checkpoint.sequence) is not done.committed
            assert is_faithful(weight(done.checkpoint), values, done.tables[0].bits)
            assert_changes_are_told(before, done.checkpoint)
            assert import_into(file, url, values, None).committed is False


def import_into(file: Path, url: Path, values: Array, bits: Any) -> Any:
    np.savez(file, emb=values)
    return import_file(file, url, tables=["emb"], bits=bits, durable=False)


def weight(checkpoint: crf.Checkpoint) -> Array:
    values: Array = checkpoint.table("emb").read()["weight"]
    return values


def assert_changes_are_told(before: crf.Checkpoint, after: crf.Checkpoint) -> None:
    """What a follower has after applying the changes is what the checkpoint holds (CHG-2)."""
    held, wanted = weight(before), weight(after)
    follower = np.zeros_like(wanted)
    common = min(len(held), len(wanted))
    follower[:common] = held[:common]
    for change in after.changes_since(before):
        follower[change.rows] = change.fields["weight"]
    assert follower.tobytes() == wanted.tobytes()
