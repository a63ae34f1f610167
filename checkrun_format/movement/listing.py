"""The rows of a chunk that go somewhere, listed a few at a time."""

from __future__ import annotations

import numpy as np

from checkrun_format.movement import engine
from checkrun_format.rows import Ids, Moves, Selection

_NOTHING: Ids = np.zeros(0, np.int64)


def within(moves: Moves, low: int, high: int) -> tuple[Selection, Selection]:
    """`Moves.within`, compiled."""
    kernels = None if moves.kept is None else engine.kernels(high - low)
    if kernels is None or moves.kept is None or not isinstance(moves.given, slice):
        return moves.within(low, high)
    start = moves.given.start
    first, stop = max(low, start), min(high, moves.given.stop)
    kept = moves.kept[first - start : max(first, stop) - start]
    positions, places = np.empty(kept.size, np.int64), np.empty(kept.size, np.int64)
    run = isinstance(moves.to, slice)
    given = _NOTHING if isinstance(moves.to, slice) else moves.to[first - start : stop - start]
    begin = moves.to.start + first - start if isinstance(moves.to, slice) else 0
    count = kernels.compiled(kernels.list_kept)(kept, first - low, given, begin, positions, places)
    if count and positions[count - 1] - positions[0] == count - 1:
        first = int(positions[0])
        return slice(first, first + count), _run(places, count) if run else places[:count]
    return positions[:count], places[:count]


def _run(places: Ids, count: int) -> slice:
    return slice(int(places[0]), int(places[0]) + count)
