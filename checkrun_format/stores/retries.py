"""Trying again what may pass: exponential backoff with full jitter, up to a deadline."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long one call of a store is tried again.

    Parameters
    ----------
    seconds : float
        No attempt begins later than so long after the first failure.
    at_first : float
        The same as long as the server has never answered: its address may be wrong.
    """

    seconds: float = 120.0
    at_first: float = 20.0


async def persist(
    attempt: Callable[[], Awaitable[_T]], passes: Callable[[Exception], bool], most: Callable[[], float]
) -> _T:
    """What an attempt returns, be it not the first.

    Parameters
    ----------
    attempt : callable
        To be awaited once for each attempt; doing it twice must be as good as once.
    passes : callable
        Whether a failure is one that may pass.
    most : callable
        Seconds from the first failure after which no attempt begins, as is known by now. A pause is random, from none
        to the longest, which doubles (Exponential Backoff And Jitter, AWS Architecture Blog, 2015: "full jitter").
    """
    began: float | None = None
    for number in itertools.count():
        try:
            return await attempt()
        except Exception as error:
            if not passes(error):
                raise
            now = time.monotonic()
            began = now if began is None else began
            longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(number, 30))
            pause = min(random.uniform(0, longest), began + most() - now)  # noqa: S311 - keeps no secret
            if pause <= 0:
                raise
        await asyncio.sleep(pause)
    raise AssertionError
