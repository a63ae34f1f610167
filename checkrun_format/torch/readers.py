"""How far data readers may read: up to the next checkpoint, so that no batch is in flight when it is taken."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from checkrun_format.errors import InvalidInputError

_MOST_WORKERS = 1024
_ENDLESS = 2**62
_BEGUN = _ENDLESS - 1
_CLOSED = -1
_LONGEST_NAP = 0.01


class ReaderBudget:
    """How many batches may be read in all, which the trainer tells its readers in other processes.

    `Checkpointer(budget=)` raises it after each save, to the step of the next one. Batches are numbered like steps,
    from 0 on over the whole run.

    Examples
    --------
    Nothing is read ahead of a checkpoint, however many workers read and prefetch::

        budget = ReaderBudget()
        checkpointer = Checkpointer(run, model, optimizer, every=1000, budget=budget)
        checkpointer.restore(missing_ok=True)
        log = budget.limit(ClickLog(skip=checkpointer.step), first=checkpointer.step)
        loader = DataLoader(log, batch_size=None, num_workers=4)
        for step, batch in enumerate(loader, checkpointer.step):
            train(batch)
            checkpointer.step_done(step)
    """

    def __init__(self) -> None:
        self._limit = multiprocessing.RawValue(ctypes.c_int64, 0)  # no lock, which a kill could leave taken
        self._trainer = os.getpid()

    @property
    def allowed(self) -> int:
        """How many batches may be read in all."""
        return int(self._limit.value)

    def allow(self, batches: int) -> None:
        """Let readers go on to `batches` batches in all; they are never held back again from what they were allowed."""
        if self.allowed != _CLOSED:
            self._limit.value = max(self._limit.value, batches)

    def limit(self, dataset: Iterable[Any], *, first: int = 0, batch_size: int = 1) -> LimitedReader:
        """A dataset that waits before each batch until it is allowed; see `LimitedReader`."""
        return LimitedReader(self, dataset, first=first, batch_size=batch_size)

    def close(self) -> None:
        """Have readers end that wait; `Checkpointer.close` does it.

        Whoever leaves a loop early calls it before, or a `DataLoader` waits some seconds for each of its workers.
        """
        self._limit.value = _CLOSED

    def wait(self, batch: Callable[[], int]) -> bool:
        """Return once the batch of the number that `batch` tells, which may fall meanwhile, may be read.

        Returns
        -------
        bool
            False if it never will be.

        Raises
        ------
        InvalidInputError
            In the process of the trainer itself, where waiting would last for ever.
        """
        nap, parent = 1e-4, multiprocessing.parent_process()
        while batch() >= self.allowed:
            if self.allowed == _CLOSED:
                return False
            if parent is None or os.getpid() == self._trainer:
                raise InvalidInputError(
                    f"batch {batch()} is read before it is allowed: step_done() allows as many as there are steps up "
                    "to the next save"
                )
            if not parent.is_alive():
                os._exit(1)  # the trainer was killed: nobody will ever allow more
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        return True


class LimitedReader(IterableDataset[Any]):
    """An iterable dataset whose workers wait before each batch until the trainer allows it; from `ReaderBudget.limit`.

    A `DataLoader` takes batches from its workers in turn, so each worker knows the numbers of its own. Workers whose
    part ends drop out, and the others move up. One pass only: make another for the next epoch.

    Parameters
    ----------
    budget : ReaderBudget
    dataset : iterable
        Gives samples; in a worker only that worker's own (`torch.utils.data.get_worker_info`), of which the ones that
        were trained before are left out.
    first : int
        Number of the first batch: the steps that were trained before.
    batch_size : int
        Samples of one batch, if the loader makes batches of them; 1 if the dataset gives batches (`batch_size=None`).
    """

    def __init__(self, budget: ReaderBudget, dataset: Iterable[Any], *, first: int, batch_size: int) -> None:
        super().__init__()
        if batch_size < 1 or first < 0:
            raise InvalidInputError(f"first={first}, batch_size={batch_size}: from 0, from 1 on")
        self._budget = budget
        self._dataset = dataset
        self._first = first
        self._batch_size = batch_size
        self._ends = multiprocessing.RawArray(ctypes.c_int64, [_ENDLESS] * _MOST_WORKERS)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self._ends[worker] != _ENDLESS:
            raise InvalidInputError(
                "a LimitedReader is read once, as its batches are numbered over the whole run: for another pass, make "
                "another by ReaderBudget.limit(dataset, first=steps done)"
            )
        self._ends[worker] = _BEGUN
        samples, count = iter(self._dataset), 0
        while True:
            if count % self._batch_size == 0:
                turn = count // self._batch_size
                if not self._budget.wait(functools.partial(self._number, turn, worker, workers)):
                    return
            try:
                sample = next(samples)
            except StopIteration:
                self._ends[worker] = -(-count // self._batch_size)
                return
            yield sample
            count += 1

    def _number(self, turn: int, worker: int, workers: int) -> int:
        """The number of a worker's batch; rather too high as long as others have not met their ends."""
        before = (min(self._ends[w], turn + (w < worker)) for w in range(workers) if w != worker)
        return self._first + turn + sum(before)
