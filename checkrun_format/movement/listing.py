"""Rows that go somewhere, listed."""

from __future__ import annotations

import numpy as np

from checkrun_format.movement import engine
from checkrun_format.rows import Ids, Moves, Selection, length

_NOTHING: Ids = np.zeros(0, np.int64)


def listed(moves: Moves) -> tuple[Selection, Selection]:
    """Positions and places, compiled."""
    kernels = None if moves.kept is None else engine.kernels(length(moves.given))
    if kernels is None or moves.kept is None or not isinstance(moves.given, slice):
        return moves.positions, moves.places
    positions, places = np.empty(moves.kept.size, np.int64), np.empty(moves.kept.size, np.int64)
    run = isinstance(moves.to, slice)
    given, begin = (_NOTHING, moves.to.start) if isinstance(moves.to, slice) else (moves.to, 0)
    count = kernels.compiled(kernels.list_kept)(moves.kept, moves.given.start, given, begin, positions, places)
    if count and positions[count - 1] - positions[0] == count - 1:
        first = int(positions[0])
        return slice(first, first + count), _run(places, count) if run else places[:count]
    return positions[:count], places[:count]


def _run(places: Ids, count: int) -> slice:
    return slice(int(places[0]), int(places[0]) + count)
