"""Reading rows piece by piece, around those that are damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from checkrun_format.cli.values import Arrays
from checkrun_format.errors import CheckrunError, DamagedError, StorageError

_DEPTH = 7
"""How often a piece that cannot be read is halved: to 1/128 of it, or to single rows."""

_HALVINGS = 1000
"""How often in all, so that a run that is damaged everywhere does not take for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows low..high-1 of what is read; either their values or why they cannot be read."""

    low: int
    high: int
    arrays: Arrays | None = None
    error: CheckrunError | None = None


class Salvage:
    """Reads a number of rows in pieces.

    Parameters
    ----------
    read : function
        Gives the values of rows low..high-1.
    """

    def __init__(self, read: Callable[[int, int], Arrays]) -> None:
        self._read = read
        self._halvings = _HALVINGS

    def pieces(self, count: int, step: int) -> Iterator[Piece]:
        """All rows in order, at most `step` at a time; neighbours that fail for one reason are one piece."""
        failed: Piece | None = None
        for start in range(0, count, step):
            for piece in self._pieces(start, min(start + step, count), _DEPTH):
                if failed is not None and str(failed.error) != str(piece.error):
                    yield failed
                    failed = None
                if piece.error is None:
                    yield piece
                else:
                    failed = Piece(low=piece.low if failed is None else failed.low, high=piece.high, error=piece.error)
        if failed is not None:
            yield failed

    def _pieces(self, low: int, high: int, depth: int) -> Iterator[Piece]:
        try:
            arrays = self._read(low, high)
        except (DamagedError, StorageError) as error:
            failed = Piece(low=low, high=high, error=error)
        else:
            yield Piece(low=low, high=high, arrays=arrays)
            return
        if not depth or high - low == 1 or not self._halvings:
            yield failed
            return
        self._halvings -= 1
        middle = (low + high) // 2
        yield from self._pieces(low, middle, depth - 1)
        yield from self._pieces(middle, high, depth - 1)
