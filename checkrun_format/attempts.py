"""A writer's attempts at the next number, one after another, and what becomes of those that fail (FORMAT.md HEA-3)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from checkrun_format.chain import History
from checkrun_format.commit import (
    Claim,
    Content,
    NumberTakenError,
    check_ground,
    commit,
    lost_to,
    open_attempt,
    seal,
    taken,
)
from checkrun_format.errors import CheckrunError, DamagedError, PrunedError, StorageError
from checkrun_format.ledger import Ledger
from checkrun_format.manifest import Commit
from checkrun_format.workers import Workers
from checkrun_format.writer import PartList

_T = TypeVar("_T")


class LandedError(Exception):
    """An attempt of this writer had landed after all, and what failed had not known of it."""


class Attempts:
    """Makes attempts; notes in the ledger which there were, and that a number was lost to somebody else."""

    def __init__(self, history: History, ledger: Ledger) -> None:
        self._history = history
        self._store = history.store
        self._ledger = ledger

    def commit(
        self, decide: Callable[[], _T], write: Callable[[Claim, _T], tuple[list[PartList], Content]], *, is_save: bool
    ) -> tuple[Commit, _T, Content]:
        """Decide, stage, commit at the next number; again at the one after, if an earlier attempt of ours holds it.

        Parameters
        ----------
        decide : callable
            What to store: asked anew for each attempt, as the next one may be laid over another checkpoint.
        write : callable
            Stores it, under the claim that it is given.
        is_save : bool
            Whether it is the trainer's state.

        Returns
        -------
        Commit, what was decided, Content
            Of the attempt that was committed.
        """

        def stage() -> tuple[Claim, bytes, _T, Content]:
            claim = Claim.of(self._ledger.head + 1)
            try:
                decided = decide()
                group_bytes = open_attempt(self._store, claim)
                part_lists, content = write(claim, decided)
                check_ground(self._store, content.parent)
                return claim, seal(self._store, claim, content, part_lists, group_bytes), decided, content
            except BaseException:
                self._discard(claim)
                raise

        while True:
            claim, document, decided, content = self.as_known(stage)
            self._ledger.attempts[claim.attempt] = is_save
            try:
                return commit(self._store, claim, document), decided, content
            except NumberTakenError as loss:
                self._discard(claim)
                self.adopt_or_lose(claim, loss)

    @contextlib.contextmanager
    def losing(self, claim: Claim) -> Iterator[None]:
        """Where a save fails whose number is taken by now, say so: its objects or its chain may have been pruned.

        Raises
        ------
        ConcurrentCommitError
            By somebody else.
        LandedError
            By an attempt of this writer, from which it goes on.
        StorageError
            The store does not tell.
        """
        try:
            yield
        except (PrunedError, DamagedError, StorageError) as error:
            loss = None
            try:
                loss = taken(self._store, claim)
            except StorageError:
                if not isinstance(error, StorageError):  # what is missing may be missing for this: nobody knows
                    raise
            if loss is None:
                raise
            self.adopt_or_lose(claim, loss)
            raise LandedError from error

    def as_known(self, action: Callable[[], _T]) -> _T:
        """Do what reads the run as this writer knows it; again, if it has to go on from an attempt that had landed."""
        while True:
            try:
                with self.losing(Claim.of(self._ledger.head + 1)):
                    return action()
            except LandedError:
                pass

    def adopt_or_lose(self, claim: Claim, loss: NumberTakenError) -> None:
        """HEA-3: go on from an attempt of ours that had landed after all; anything else is the end of this writer."""
        if loss.attempt in self._ledger.attempts:
            self._ledger.landed(self._history.get(claim.sequence).commit)
            return
        self._ledger.lost = str(lost_to(claim, loss))
        raise lost_to(claim, loss) from loss

    def _discard(self, claim: Claim) -> None:
        """Remove what an attempt stored that is not committed and never will be."""
        try:
            with Workers.of(self._store) as workers:
                for key in self._store.list(claim.prefix):
                    workers.run(0, partial(self._store.delete, key))
        except (CheckrunError, OSError):
            pass  # it stays as litter, which every reader ignores
