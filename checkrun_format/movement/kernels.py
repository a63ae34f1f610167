"""Compiled counterparts of `claims` and `scatter`; imported with the first large table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import types

from checkrun_format.packing import LINE
from checkrun_format.quantize.kernels import compiled_as, filled, given
from checkrun_format.quantize.lines import put_line, settle, whole_lines

WORDS = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}
"""What rows are copied in, by size."""

_SIZE, _BYTE = types.int64, types.uint8

_SIGNATURES: dict[str, list[tuple[Any, ...]]] = {
    "claim_listed": [(given(_SIZE), filled(_BYTE), _BYTE, filled(types.boolean))],
    "claim_run": [(filled(_BYTE), _BYTE, filled(types.boolean))],
    "list_kept": [(given(types.boolean), _SIZE, given(_SIZE), _SIZE, filled(_SIZE), filled(_SIZE))],
    "move_rows": [
        (given(word), given(_SIZE), _SIZE, filled(word), types.UniTuple(_SIZE, 2), given(_SIZE))
        for word in WORDS.values()
    ],
}


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of this module, compiled."""
    return compiled_as(function, _SIGNATURES[function.__name__])


def claim_listed(places, seen, mark, kept):
    """Mark places as seen by a layer, and tell which of them none had seen.

    Parameters
    ----------
    places : int64 array (n,)
    seen : uint8 array
        For each place the last layer that has it, 0 if none.
    mark : uint8
        The layer.
    kept : bool array (n,)
        Receives the answer.

    Returns
    -------
    int
        How many; -1 if this layer has a place twice.
    """
    count, twice = 0, False
    for i in range(places.size):
        before = seen[places[i]]
        twice |= before == mark
        seen[places[i]] = mark
        kept[i] = before == 0
        count += before == 0
    return -1 if twice else count


def claim_run(seen, mark, kept):
    """The same of places that follow one another, of which `seen` is the section."""
    count, twice = 0, False
    for i in range(seen.size):
        twice |= seen[i] == mark
        kept[i] = seen[i] == 0
        count += seen[i] == 0
    seen[:] = mark
    return -1 if twice else count


def list_kept(kept, low, places, first, positions, to):
    """Positions and places of what is kept of a run of positions.

    Parameters
    ----------
    kept : bool array (n,)
    low : int
        The first position.
    places : int64 array (n,)
        The place of each position; empty: from `first` on.
    first : int
    positions, to : int64 array (n,)
        Receive them.

    Returns
    -------
    int
        How many.
    """
    count = 0
    for i in range(kept.size):
        positions[count] = low + i
        to[count] = places[i] if places.size else first + i
        count += kept[i]
    return count


def move_rows(source, positions, words, target, rows_out, places):
    """Copy rows of `words` words.

    Parameters
    ----------
    source : array (n * words,)
    positions : int64 array (k,)
        Which rows; empty: the first k.
    target : array
    rows_out : tuple of two int
        Where row 0 begins in the target, and how far it is to the next.
    places : int64 array (k,)
        To which row each one goes.
    """
    begin, step = rows_out
    in_lines, line = whole_lines(target, begin, step, words), LINE // target.itemsize
    for k in range(places.size):
        a, b = words * (positions[k] if positions.size else k), begin + step * places[k]
        if in_lines:
            for w in range(0, words, line):
                put_line(target, b + w, source, a + w)
        else:
            row, to = source[a : a + words], target[b : b + words]
            for w in range(words):
                to[w] = row[w]
    settle()
