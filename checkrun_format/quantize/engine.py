"""Where the compiled kernels run: from which size on, and on how many threads."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import ModuleType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from checkrun_format.integers import whole

P = TypeVar("P")
T = TypeVar("T")

KERNELS = "checkrun_format.quantize.kernels"

COMPILED_FROM = 1 << 16
"""Elements from which on it pays to load the compiled kernels, if nothing has loaded them yet."""

_TASK_ELEMENTS = 1 << 19
"""Most elements of one task, unless one row has more: 2 MiB of float32."""

_own = threading.local()
_threads: int | None = None
_pool: ThreadPoolExecutor | None = None


def set_threads(count: int | None) -> None:
    """How many threads encode and decode, and read and write local files, taken together.

    Parameters
    ----------
    count : int or None
        None: as many as the process may use processors, and a few more for files. 1: whoever saves or loads does one
        thing at a time, so that a save in the background takes one core.

    Raises
    ------
    InvalidInputError
        If it is not a whole number from 1 on.
    """
    global _threads, _pool
    if count is not None:
        count = whole(count, f"threads must be a whole number from 1 on, or None, not {count!r}", least=1)
    former, _threads, _pool = _pool, count, None
    if former is not None:
        former.shutdown(wait=False)


def allowed_threads() -> int | None:
    """What `set_threads` said."""
    return _threads


def threads() -> int:
    """How many threads encode and decode."""
    return _threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def kernels(elements: int) -> ModuleType | None:
    """The compiled kernels, if they are loaded or `elements` are worth it; None without numba."""
    return _load() if elements >= COMPILED_FROM or KERNELS in sys.modules else None


@functools.cache
def _load() -> ModuleType | None:
    try:  # importing waits for another thread that is at it; what stands in `sys.modules` meanwhile is incomplete
        import checkrun_format.quantize.kernels as loaded
    except ImportError:
        return None
    return loaded


def spread(task: Callable[[slice], T], rows: int, columns: int) -> list[T]:
    """`task` of slices that cut `rows` rows of `columns` elements, on several threads; the results in order."""
    step = max(1, _TASK_ELEMENTS // (columns + 16))
    if rows > step:  # as many for each thread, or some would wait for the others
        count = threads()
        rounds = -(-rows // (step * count))
        step = -(-rows // (rounds * count))
    return each(task, [slice(start, min(start + step, rows)) for start in range(0, rows, step)])


def each(task: Callable[[P], T], pieces: Sequence[P]) -> list[T]:
    """`task` of each piece, on several threads; the results in order."""
    if len(pieces) <= 1 or threads() == 1:
        return [task(piece) for piece in pieces]
    futures: list[Future[T]] = []
    try:
        _submit(task, pieces, futures)
        rest = [task(piece) for piece in pieces[len(futures) :]]
        wait(futures)
    except BaseException:  # an interrupt, too: nobody writes into the caller's memory after this returns
        for future in futures:
            future.cancel()
        wait(futures)
        raise
    return [*(future.result() for future in futures), *rest]


def _submit(task: Callable[[P], T], pieces: Sequence[P], futures: list[Future[T]]) -> None:
    """Have threads do the first pieces: all of them, unless there are no more threads."""
    pool = _executor()
    try:
        for piece in pieces:
            futures.append(pool.submit(task, piece))  # noqa: PERF401 - those before an error are needed
    except RuntimeError:  # their number is limited, `set_threads` was called, the interpreter ends
        pool.shutdown()  # waits for the piece, too, that it took although it raised
        _forget_pool(pool)


def scratch(elements: int) -> npt.NDArray[np.float32]:
    """Memory for so many float32 numbers, good until this thread's next call; new memory would cost its first touch."""
    if getattr(_own, "scratch", np.empty(0)).size < elements:
        _own.scratch = np.empty(elements, np.float32)
    found: npt.NDArray[np.float32] = _own.scratch[:elements]
    return found


def _executor() -> ThreadPoolExecutor:
    global _pool  # noqa: PLW0603 - made with the first large array, and anew in a forked process
    pool = _pool  # which `set_threads` may take away meanwhile
    if pool is None:
        _pool = pool = ThreadPoolExecutor(threads(), thread_name_prefix="checkrun-quantize")
    return pool


def _forget_pool(which: ThreadPoolExecutor | None = None) -> None:
    global _pool  # noqa: PLW0603 - after a fork its threads stay with the parent
    if which in (None, _pool):
        _pool = None


os.register_at_fork(after_in_child=_forget_pool)
