"""A few threads that move bytes while the caller goes on, and a lock that survives a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from checkrun_format.integers import whole
from checkrun_format.quantize.engine import allowed_threads
from checkrun_format.stores import Store

Task: TypeAlias = Callable[[], object]


class ProcessLock:
    """A lock that a forked child finds free, whatever threads its parent had."""

    def __init__(self) -> None:
        self._of_process: dict[int, threading.Lock] = {}

    def __enter__(self) -> None:
        self._of_process.setdefault(os.getpid(), threading.Lock()).acquire()

    def __exit__(self, *_: object) -> None:
        self._of_process[os.getpid()].release()


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory that a read may hold beside the arrays that it reads into.

    A quarter each: chunks that are kept, since many small parts share them; which rows are decided; the row chunk whose
    turn it is; and tasks that wait or run, in proportion to the `budget_bytes` of the store: of one that is far, whose
    objects are held whole on their way, three quarters. A chunk is read whole: where one takes more, it is more.

    Attributes
    ----------
    max_host_bytes : int

    Raises
    ------
    InvalidInputError
        Not a positive number of bytes.
    """

    max_host_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        given = self.max_host_bytes
        whole(given, f"max_host_bytes {given!r}; a positive number of bytes, such as 256 << 20", least=1)

    @property
    def kept(self) -> int:
        """Bytes of chunks that are kept."""
        return int(self.max_host_bytes) // 4

    @property
    def rows(self) -> int:
        """How many wanted rows are resolved at a time."""
        return max(1 << 16, int(self.max_host_bytes) // 4)


class Workers:
    """Runs tasks on a few threads, so many bytes of them at a time.

    Tasks begin in the order in which they are submitted. After a failure no task begins any more; of several failures
    the one of the earliest task is raised, by `submit`, `wait` or the end of the context. No task outlives the context.

    Parameters
    ----------
    threads : int
        How many tasks run at a time. They are started when there is work. 0: each task is run by `submit`.
    budget_bytes : int
        How many bytes the tasks that wait or run may hold together; one task may hold more on its own.
    inline_bytes : int
        `run` starts no thread for fewer bytes.

    Examples
    --------
    >>> squares = [0, 0, 0]
    >>> with Workers(2) as workers:
    ...     for i in range(3):
    ...         workers.submit(8, lambda i=i: squares.__setitem__(i, i * i))
    >>> squares
    [0, 1, 4]
    """

    def __init__(
        self, threads: int, budget_bytes: int = Store.budget_bytes, inline_bytes: int = Store.inline_bytes
    ) -> None:
        self._threads = threads
        self._budget = budget_bytes
        self._inline_bytes = inline_bytes
        self._pool: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._submitted = 0
        self._unfinished = 0
        self._held = 0
        self._stopped = False
        self._failures: dict[int, BaseException] = {}

    @classmethod
    def of(cls, store: Store, budget: Budget | None = None) -> Self:
        """As many as a store gains from; with a budget, as its reads do, and so many bytes as that allows.

        Of a store that is not far no more than `set_threads` leaves beside the caller.
        """
        share = 1.0 if budget is None else budget.max_host_bytes / Budget().max_host_bytes
        threads = store.parallel if budget is None else store.readers or store.parallel
        allowed = allowed_threads()
        if allowed is not None and not store.is_far:
            threads = min(threads, allowed - 1)
        return cls(threads, int(store.budget_bytes * share), store.inline_bytes)

    def submit(self, held_bytes: int, task: Task) -> None:
        """Have a task run soon; wait while the budget is used up.

        Parameters
        ----------
        held_bytes : int
            Bytes of memory that the task holds until it has run.
        """
        if not self._threads:
            task()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failures or not self._held or self._held + held_bytes <= self._budget)
            failed = bool(self._failures)
            if not failed:
                number = self._submitted
                self._submitted += 1
                self._unfinished += 1
                self._held += held_bytes
        if failed:  # not a look at what failed since: this task is counted by now, and has to be handed over
            self.wait()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="checkrun")
        try:
            self._pool.submit(self._run, number, held_bytes, task)
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
            self._run(number, held_bytes, task)  # the interpreter is ending, and a save in the background goes on

    def run(self, held_bytes: int, task: Task) -> None:
        """Have a task run: here and now if it moves so few bytes that another thread is not worth its start."""
        if held_bytes < self._inline_bytes:
            task()
        else:
            self.submit(held_bytes, task)

    def wait(self) -> None:
        """Return once every task has run; raise what failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)
            if self._failures:
                raise self._failures[min(self._failures)]

    def _run(self, number: int, held_bytes: int, task: Task) -> None:
        try:
            if not self._stopped:
                task()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            self._stopped = True
            self._failures[number] = error
        finally:
            del task  # and what it holds
            with self._changed:
                self._unfinished -= 1
                self._held -= held_bytes
                self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stopped = True
        try:
            if error is None:
                self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
