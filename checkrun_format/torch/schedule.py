"""When a trainer saves next."""

from __future__ import annotations

import datetime as dt
import time

from checkrun_format.errors import InvalidInputError
from checkrun_format.integers import whole
from checkrun_format.torch.readers import ReaderBudget


class Schedule:
    """When the next save is due, and how far readers may read until then.

    Parameters
    ----------
    every : int or timedelta, optional
        Steps, or time, between two saves.
    budget : ReaderBudget, optional

    Raises
    ------
    InvalidInputError
    """

    def __init__(self, every: int | dt.timedelta | None, budget: ReaderBudget | None) -> None:
        if every is not None and not isinstance(every, dt.timedelta):
            every = whole(every, f"every={every!r}; a number of steps from 1 on, a timedelta, or None", least=1)
        if budget is not None and not isinstance(every, int):
            raise InvalidInputError(
                "budget= needs every= in steps: readers are told how many batches there are until then"
            )
        self._every = every
        self._budget = budget
        self._saved_at = time.monotonic()

    @property
    def by_time(self) -> bool:
        """Whether it goes by a clock, which each rank has its own of."""
        return isinstance(self._every, dt.timedelta)

    def is_due(self, step: int) -> bool:
        """Whether there is a save after so many steps."""
        if isinstance(self._every, dt.timedelta):
            return time.monotonic() - self._saved_at >= self._every.total_seconds()
        return self._every is not None and step % self._every == 0

    def until_save(self, step: int) -> int | None:
        """Steps until the next save; None if that is not known."""
        return self._every - step % self._every if isinstance(self._every, int) else None

    def begun(self) -> None:
        """There is a save now, or a state that is saved already."""
        self._saved_at = time.monotonic()

    def allow(self, step: int) -> None:
        """Let readers go on to the next save."""
        until = self.until_save(step)
        if self._budget is not None and until is not None:
            self._budget.allow(step + until)

    def close(self) -> None:
        """Have readers end."""
        if self._budget is not None:
            self._budget.close()
