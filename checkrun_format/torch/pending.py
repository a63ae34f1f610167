"""A save that goes on in the background while training does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np

from checkrun_format.arranging import Stage, Stored
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import SaveCancelledError, StorageError
from checkrun_format.rows import Ids, Selection, is_in_sorted

Staged: TypeAlias = Mapping[str, Mapping[str, Any]]
Save: TypeAlias = Callable[[Stage, Callable[[], None]], Checkpoint]
"""Saves, with a `stage` and a `check` as of `Run.save`."""


class PendingSave:
    """A save in the background; from `Checkpointer.save_async`.

    Attributes
    ----------
    step : int or None
    staged : Future
        Done as soon as all that is stored has been copied: training may go on.
    """

    def __init__(self, step: int | None, save: Save, stage: Callable[[Mapping[str, Stored]], Staged]) -> None:
        self.step = step
        self.staged: Future[None] = Future()
        self.reported = False
        self._stage = stage
        self._stored: Mapping[str, Stored] = {}
        self._values: Staged = {}
        self._cancelled = threading.Event()
        self._requests: queue.SimpleQueue[Mapping[str, Stored] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Staged | None] = queue.SimpleQueue()
        self._result: Future[Checkpoint] = Future()
        # No daemon: the interpreter waits for it, so that the end of a program leaves no save behind.
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkrun-save")

    def start(self) -> None:
        """Begin, and return once all is staged, by the calling thread: the one that trains.

        Raises
        ------
        CheckrunError
            The save was refused, or failed before anything was written.
        """
        try:
            self._thread.start()
            wanted = self._requests.get()
            if wanted is None:
                self.result()
                return
            self._stored, self._values = wanted, self._stage(wanted)
            self.staged.set_result(None)
            self._answers.put(self._values)
        except BaseException:
            self._cancelled.set()
            self._answers.put(None)
            raise

    def _run(self, save: Save) -> None:
        try:
            checkpoint = save(self._ask, self._check)
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._result.set_exception(error)
        else:
            self._result.set_result(checkpoint)
        finally:
            self._values, self._stored = {}, {}
            self._requests.put(None)

    def _ask(self, wanted: Mapping[str, Stored]) -> Staged:
        """Have the training thread copy what is to be stored; called again, take it from these copies."""
        if self.staged.done():
            return _some_of(self._stored, self._values, wanted)
        self._requests.put(wanted)
        values = self._answers.get()
        self._check()
        assert values is not None
        return values

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise SaveCancelledError(f"the save of step {self.step} was cancelled; its changed rows are kept")

    # What its owner asks ----------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Give up the save, unless it is about to commit: `result` tells which."""
        self._cancelled.set()

    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self._result.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Return once it has ended, or after `timeout` seconds; whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The committed checkpoint, once it is there.

        Raises
        ------
        TimeoutError
            It is not there after `timeout` seconds.
        CheckrunError
            Why the save failed; SaveCancelledError if it was cancelled.
        """
        try:
            return self._result.result(timeout)
        finally:
            self.reported = self.reported or self._result.done()

    def failure(self) -> BaseException | None:
        """Why it failed, None if it did not, or goes on."""
        return self._result.exception() if self._result.done() else None


def _some_of(stored: Mapping[str, Stored], values: Staged, wanted: Mapping[str, Stored]) -> Staged:
    """What is wanted by now, from what was staged for another plan."""
    found = {}
    for name, what in wanted.items():
        staged = stored[name].rows if name in stored else slice(0, 0)
        places = _places(what.rows, staged)
        if places is None:
            raise StorageError(
                f"table {name!r}: an earlier attempt of this Run had landed after all, and what is to be saved over it "
                "was not staged; the next save stores it"
            )
        found[name] = {f: array[places] for f, array in values[name].items()}
    return found


def _places(wanted: Selection, staged: Selection) -> Ids | None:
    """Where the wanted rows are among the staged ones; None unless all are there."""
    ids, known = (np.arange(s.start, s.stop) if isinstance(s, slice) else s for s in (wanted, staged))
    if not bool(is_in_sorted(ids, known).all()):
        return None
    return np.searchsorted(known, ids)
