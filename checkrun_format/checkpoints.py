"""The checkpoints of a run, for whoever reads: by number, the latest, by step, all of them, and as they come."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Final, SupportsFloat, TypeVar, overload

from checkrun_format.chain import History
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import (
    CheckpointNotFoundError,
    DamagedError,
    FallbackWarning,
    InvalidInputError,
    PrunedError,
)
from checkrun_format.integers import whole
from checkrun_format.manifest import Commit, Problem
from checkrun_format.state import State
from checkrun_format.stores import Store
from checkrun_format.tags import Tags
from checkrun_format.verify import Audit, newest_sound, verify_checkpoint, verify_run
from checkrun_format.view import telling
from checkrun_format.workers import Budget

_T = TypeVar("_T")

_REQUIRED: Final = object()
_LOG = logging.getLogger("checkrun_format")


class Checkpoints:
    """Those of one run; a `Run` is them, and saves more."""

    def __init__(self, store: Store, budget: Budget | None = None) -> None:
        self._store = store
        self._history = History(store, budget)

    @property
    def url(self) -> str:
        """Where the run is."""
        return self._store.url

    @telling
    def __getitem__(self, sequence: int) -> Checkpoint:
        """The checkpoint of a number; reads its commit and its manifest, which must agree (OPN-1).

        Raises
        ------
        CheckpointNotFoundError, PrunedError, BurntError, DamagedError
        """
        stored = self._history.get(number_of(sequence, "run[...]"))
        stored.check()
        return Checkpoint(self._history, stored)

    @overload
    def latest(self, *, skip_damaged: bool = False) -> Checkpoint: ...
    @overload
    def latest(self, default: _T, *, skip_damaged: bool = False) -> Checkpoint | _T: ...
    def latest(self, default: Any = _REQUIRED, *, skip_damaged: bool = False) -> Any:
        """The latest checkpoint.

        Parameters
        ----------
        default
            What to return when nothing is committed; without it that is an error.
        skip_damaged : bool
            Pass over damaged commits above the latest readable one, instead of raising DamagedError.
        """
        number = self._history.latest(skip_damaged=skip_damaged)
        if number is not None:
            return self[number]
        if default is _REQUIRED:
            raise CheckpointNotFoundError(f"{self.url} has no checkpoint yet")
        return default

    def at(self, *, step: int, skip_damaged: bool = False) -> Checkpoint:
        """The newest checkpoint of a step (steps repeat after going back).

        What is passed over on the way down is opened too, so that an altered step is found (OPN-1).

        Parameters
        ----------
        step : int
        skip_damaged : bool
            Pass over damaged commits, as of `log`; one of them may have been newer and of this step.
        """
        for number in reversed(self._history.numbers()):
            occupant = self._history.found(number, skip_damaged=skip_damaged)
            if isinstance(occupant, Commit) and (checkpoint := self[number]).step == step:
                return checkpoint
        raise CheckpointNotFoundError(f"{self.url} has no checkpoint of step {step}")

    def log(self, *, skip_damaged: bool = False) -> Iterator[Checkpoint]:
        """The checkpoints from the lowest number to the highest; reads commits only, so that MAN-1 is not checked.

        Parameters
        ----------
        skip_damaged : bool
            Pass over commits that are damaged, of which `verify` tells, instead of raising DamagedError there.
        """
        for number in self._history.numbers():
            if not isinstance(self._history.found(number, skip_damaged=skip_damaged), Commit):
                continue
            try:
                stored = self._history.get(number)
            except PrunedError:
                continue  # since it was listed
            yield Checkpoint(self._history, stored)

    def follow(
        self, since: int | None = None, *, poll: float = 30.0, stop: threading.Event | None = None
    ) -> Iterator[Checkpoint]:
        """The latest checkpoint, whenever there is a new one; those that another one follows at once are passed over.

        Parameters
        ----------
        since : number
            The checkpoint that the caller has; None: nothing yet, so that the first one comes at once if there is one.
        poll : float
            Seconds between two looks; each is one listing and one object, more only if something is new.
        stop : threading.Event
            Ends the iteration once it is set.

        Examples
        --------
        A serving process, from the checkpoint that it loaded on::

            held = checkpoint.sequence
            for checkpoint in run.follow(held):
                for change in checkpoint.changes_since(held):
                    apply(change)
                held = checkpoint.sequence
        """
        if isinstance(poll, bool) or not isinstance(poll, SupportsFloat) or not float(poll) >= 0:
            raise InvalidInputError(f"poll {poll!r}; seconds, at least 0")
        held = 0 if since is None else number_of(since, "follow")
        return self._followed(held, min(float(poll), threading.TIMEOUT_MAX), stop or threading.Event())

    def _followed(self, held: int, poll: float, stop: threading.Event) -> Iterator[Checkpoint]:
        while not stop.is_set():
            number = self._history.latest()
            if number is None or number <= held:
                stop.wait(poll)
                continue
            with contextlib.suppress(PrunedError):  # there are newer ones already
                yield self[number]
                held = number

    def load(self, **options: Any) -> State:
        """Read the latest checkpoint; options as of `Checkpoint.load`. Does not count as a restore."""
        return self.latest().load(**options)

    def verify(self, sequence: int | None = None, *, fast: bool = False) -> list[Problem]:
        """Every problem of the run, or of one checkpoint; an empty list if there is none.

        Parameters
        ----------
        fast : bool
            Only look whether all objects are there, and read documents; no values.

        Raises
        ------
        CheckpointNotFoundError
            Nothing is stored under this number.
        """
        if sequence is None:
            return self.audit(fast=fast).problems
        number = number_of(sequence, "verify")
        found = verify_checkpoint(self._store, number, fast=fast)
        if not found and self._history.occupant(number) is None:
            raise CheckpointNotFoundError(f"{self.url} has no checkpoint {number}")
        return found

    def audit(self, *, fast: bool = False) -> Audit:
        """Every problem of the run, which checkpoints they affect, and which are safe; options as of `verify`."""
        return verify_run(self._store, fast=fast)

    def newest_sound(self) -> Checkpoint:
        """The newest checkpoint whose whole chain is sound; newer ones are named in a FallbackWarning and in the log.

        Raises
        ------
        DamagedError, CheckpointNotFoundError
        """
        number, passed = newest_sound(self._store)
        told = "; ".join(f"{n}: {p.kind}: {p.place}: {p.message}" for n, p in passed.items())
        if number is None and passed:
            newest = passed[max(passed)]
            raise DamagedError(newest.place, f"no checkpoint of {self.url} is sound. {told}")
        if number is None:
            raise CheckpointNotFoundError(f"{self.url} has no checkpoint yet")
        if passed:
            message = f"restoring checkpoint {number}; newer ones are not sound and are passed over: {told}"
            _LOG.warning("%s", message)
            warnings.warn(message, FallbackWarning, stacklevel=3)
        return self[number]

    def tags(self) -> dict[str, int]:
        """Name to number of every tag, by name.

        Raises
        ------
        DamagedError
            A tag cannot be read.
        """
        return Tags(self._history).read()


def number_of(checkpoint: object, call: str) -> int:
    """The number of a checkpoint that is given as such, or by its number."""
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.sequence
    return whole(checkpoint, f"{call}: {checkpoint!r} is not the number of a checkpoint; run.at(step=) finds a step")
