"""Which rows each layer supplies, from the newest down: those that it has and that none above it had."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from checkrun_format.movement import engine
from checkrun_format.rows import Mask, Selection, length

_HIGHEST = 255


class TwiceError(Exception):
    """A layer has a row twice; its reader says where."""


class Claims:
    """Some wanted rows, one byte each: the last layer that was seen to have it, 0 if none.

    Parameters
    ----------
    count : int
        How many rows are wanted.

    Examples
    --------
    >>> claims = Claims(5)
    >>> claims.begin()
    >>> claims.claim(np.array([1, 3]))
    >>> claims.begin()
    >>> claims.claim(slice(0, 4)).tolist()
    [True, False, True, False]
    >>> claims.left
    1
    """

    def __init__(self, count: int) -> None:
        self._seen = np.zeros(count, np.uint8)
        self._mark = 0
        self.left = count
        """How many rows no layer has supplied."""

    def begin(self) -> None:
        """Go on with the next older layer."""
        if self._mark == _HIGHEST:
            self._seen[self._seen > 0] = 1
            self._mark = 1
        self._mark += 1

    def undecided(self) -> Mask:
        """For each row, whether no layer has supplied it."""
        return np.asarray(self._seen == 0)

    def first_undecided(self) -> int:
        """The first row that no layer has supplied; there is one."""
        return int(np.argmin(self._seen))

    def decide(self, places: Selection | Mask) -> None:
        """These rows are decided from here on, whoever else has them."""
        self.left -= int(np.count_nonzero(self._seen[places] == 0))
        self._seen[places] = self._mark

    def claim(self, places: Selection) -> Mask | None:
        """Note which rows a part of the layer has.

        Parameters
        ----------
        places : slice or int64 array (n,)
            Ascending.

        Returns
        -------
        mask (n,) or None
            Which of them no layer had before; None: none of them had been had.

        Raises
        ------
        TwiceError
            The layer had one of them already.
        """
        if isinstance(places, slice) and not self._seen[places].any():  # of a base alone: nothing to be compiled
            self._seen[places] = self._mark
            self.left -= length(places)
            return None
        kernels = engine.kernels(length(places))
        kept, count = self._claim(places) if kernels is None else self._claim_compiled(kernels, places)
        self.left -= count
        return None if count == length(places) else kept

    def _claim(self, places: Selection) -> tuple[Mask, int]:
        before = self._seen[places]
        if bool((before == self._mark).any()):
            raise TwiceError
        kept = np.asarray(before == 0)
        self._seen[places] = self._mark
        return kept, int(np.count_nonzero(kept))

    def _claim_compiled(self, kernels: ModuleType, places: Selection) -> tuple[Mask, int]:
        kept = np.empty(length(places), np.bool_)
        if isinstance(places, slice):
            count = kernels.compiled(kernels.claim_run)(self._seen[places], self._mark, kept)
        else:
            count = kernels.compiled(kernels.claim_listed)(np.ascontiguousarray(places), self._seen, self._mark, kept)
        if count < 0:
            raise TwiceError
        return kept, count
