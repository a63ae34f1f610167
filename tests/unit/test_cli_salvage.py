"""Reading around rows that are damaged."""

from __future__ import annotations

import numpy as np
import pytest

from checkrun_format.cli import salvage
from checkrun_format.cli.salvage import Salvage
from checkrun_format.cli.values import Arrays
from checkrun_format.errors import DamagedError, UnsupportedFeatureError


class Reader:
    """Reads rows whose value is their number; some cannot be read."""

    def __init__(self, *damaged: int) -> None:
        self.damaged = set(damaged)
        self.calls: list[tuple[int, int]] = []

    def __call__(self, low: int, high: int) -> Arrays:
        self.calls.append((low, high))
        hit = self.damaged & set(range(low, high))
        if hit:
            raise DamagedError(f"chunk-{min(hit) // 100}", "missing")
        return {"n": np.arange(low, high)}


def read(reader: Reader, count: int, step: int) -> tuple[list[int], list[tuple[int, int, str]]]:
    """Rows that were read in their order, and spans that were not."""
    rows, failed = [], []
    for piece in Salvage(reader).pieces(count, step):
        if piece.arrays is None:
            failed.append((piece.low, piece.high, str(piece.error)))
        else:
            rows += piece.arrays["n"].tolist()
    return rows, failed


def test_whole_rows_are_read_in_steps() -> None:
    reader = Reader()
    assert read(reader, 25, 10) == (list(range(25)), [])
    assert reader.calls == [(0, 10), (10, 20), (20, 25)]
    assert read(reader, 0, 10) == ([], [])


def test_only_the_damaged_rows_are_lost() -> None:
    rows, failed = read(Reader(3, 4, 17), 25, 10)
    assert rows == [n for n in range(25) if n not in (3, 4, 17)]
    assert failed == [(3, 5, "chunk-0: missing"), (17, 18, "chunk-0: missing")]


def test_neighbours_that_fail_for_one_reason_are_one_piece() -> None:
    rows, failed = read(Reader(*range(150, 250)), 300, 50)
    assert rows == [*range(150), *range(250, 300)]
    assert failed == [(150, 200, "chunk-1: missing"), (200, 250, "chunk-2: missing")]


def test_a_large_piece_is_not_read_row_by_row() -> None:
    reader = Reader(50_000)
    rows, failed = read(reader, 100_000, 100_000)
    assert len(reader.calls) == 15
    assert len(rows) > 99_000 and len(failed) == 1
    assert sorted([*rows, *range(*failed[0][:2])]) == list(range(100_000))


def test_where_everything_is_damaged_it_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(salvage, "_HALVINGS", 10)
    reader = Reader(*range(0, 10_000, 100))
    _, failed = read(reader, 10_000, 100)
    assert len(reader.calls) < 130
    assert {high for _, high, _ in failed} >= {10_000}


def test_other_errors_pass() -> None:
    def refuse(low: int, high: int) -> Arrays:
        raise UnsupportedFeatureError(f"{low} to {high}")

    with pytest.raises(UnsupportedFeatureError, match="0 to 10"):
        list(Salvage(refuse).pieces(10, 10))
