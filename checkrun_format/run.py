"""A run: open it, save, restore, go back, and look at its history."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from checkrun_format import layout
from checkrun_format.chain import History
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import CheckpointNotFoundError, InvalidInputError, NotARunError
from checkrun_format.manifest import Commit, Problem
from checkrun_format.policy import BitRule, Bits, check_policy
from checkrun_format.quantize import Method
from checkrun_format.saving import Options, Saver
from checkrun_format.staging import Save
from checkrun_format.state import State, checked_encoder
from checkrun_format.stores import AlreadyExistsError, Store, open_store
from checkrun_format.verify import verify_checkpoint, verify_run
from checkrun_format.versions import FORMAT_VERSION
from checkrun_format.writer import CHUNK_BYTES

_REQUIRED: Final = object()


def open_run(
    url: str | os.PathLike[str] | Store,
    mode: str = "r",
    *,
    policy: str = "intermittent",
    bits: Bits = None,
    expected_restores: float | None = None,
    encoder: str | Method | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    durable: bool = True,
    takeover: bool = False,
) -> Run:
    """Open a run.

    Parameters
    ----------
    url : str, path or Store
        A local path, or `file://` and a path.
    mode : "r" or "a"
        "r" reads and never creates anything; "a" saves too, and creates the run if there is none.
    policy : "intermittent", "full", "one-shot" or "consecutive"
        When a save takes a base.
    bits : None, 1..8, "auto", or mapping
        How fields are quantized; to be given at each opening. None: raw. A plain number: the field `weight` of every
        table, no other. A mapping: table name or pattern (`*`, `?`) to None, a number, or a mapping of field names to
        these, as in `{"emb*": {"weight": 4, "exp_avg": 8}}`. "auto": by `expected_restores`, as Check-N-Run does.
    expected_restores : float
        For bits="auto": how many restores are expected over the whole run.
    encoder : str or Method, optional
        How fields are quantized: `refine`, `minmax`, `symmetric`, `greedy` or `torch_compat`, by its name alone or as
        `quantize.Method` with parameters. By default `refine` up to 4 bits, `minmax` above. What is written by one can
        be read without knowing which.
    chunk_bytes : int
        Size of the largest chunk; smaller suits reading single rows.
    durable : bool
        False skips every sync: a crash of the machine may lose the newest checkpoints.
    takeover : bool
        Commit an unchanged checkpoint at once, so that another process that still writes this run finds its number
        taken.

    Raises
    ------
    RunNotFoundError, NotARunError, UnsupportedVersionError, InvalidInputError, StorageError
    """
    if mode not in ("r", "a"):
        raise InvalidInputError(f"mode {mode!r}; 'r' to read, 'a' to save too")
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise InvalidInputError(f"chunk_bytes {chunk_bytes!r}; a positive number of bytes")
    rule = BitRule(bits=bits, expected_restores=expected_restores)
    store = open_store(url, durable=durable)
    method = None if encoder is None else checked_encoder(encoder, "encoder")
    run = Run(store, mode, Options(policy=check_policy(policy), rule=rule, encoder=method, chunk_bytes=chunk_bytes))
    if takeover:
        run.take_over()
    return run


def _create_run(store: Store) -> None:
    """Create the run document if there is none (RUN-1)."""
    if store.get(layout.RUN_KEY) is None:
        strangers = [name for name in store.folders() or () if not name.startswith(".")]
        if strangers and store.get(layout.RUN_KEY) is None:
            raise NotARunError(
                f"{store.url} holds no run but other things ({', '.join(sorted(strangers)[:3])}): give an empty folder"
            )
        document = layout.group_document({"kind": "run", "format_version": FORMAT_VERSION, "requires": []})
        with contextlib.suppress(AlreadyExistsError):  # another process created it just now: it is read next
            store.create(layout.RUN_KEY, document)


class Run:
    """One training history; from `open_run`."""

    def __init__(self, store: Store, mode: str, options: Options) -> None:
        self._store = store
        self._history = History(store)
        if mode == "a":
            _create_run(store)
        self._history.check_run()
        self._mode = mode
        self._writing = Saver(store, self._history, options) if mode == "a" else None

    def __repr__(self) -> str:
        return f"<run {self._store.url}, mode {self._mode!r}>"

    # Reading ----------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the run is."""
        return self._store.url

    def __getitem__(self, sequence: int) -> Checkpoint:
        """The checkpoint of a number; reads its commit and its manifest, which must agree (OPN-1).

        Raises
        ------
        CheckpointNotFoundError, PrunedError, BurntError, DamagedError
        """
        stored = self._history.get(_checked_number(sequence, "run[...]"))
        stored.check()
        return Checkpoint(self._history, stored)

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

    def at(self, *, step: int) -> Checkpoint:
        """The newest checkpoint of a step (steps repeat after going back).

        What is passed over on the way down is opened too, so that an altered step is found (OPN-1).
        """
        for number in reversed(self._history.numbers()):
            if isinstance(self._history.occupant(number), Commit) and self[number].step == step:
                return self[number]
        raise CheckpointNotFoundError(f"{self.url} has no checkpoint of step {step}")

    def log(self) -> Iterator[Checkpoint]:
        """The checkpoints from the lowest number to the highest; reads commits only, so that MAN-1 is not checked."""
        for commit_record in self._history.commits():
            yield Checkpoint(self._history, self._history.get(commit_record.sequence))

    def load(self, **options: Any) -> State:
        """Read the latest checkpoint; options as of `Checkpoint.load`. Does not count as a restore."""
        state: State = self.latest().load(**options)
        return state

    def verify(self, sequence: int | None = None) -> list[Problem]:
        """Every problem of the run, or of one checkpoint; an empty list if there is none."""
        if sequence is None:
            return verify_run(self._store)
        return verify_checkpoint(self._store, sequence)

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(
        self,
        state: State,
        *,
        step: int | None = None,
        parent: int | str | None = "auto",
        dropped: Sequence[str] = (),
    ) -> Checkpoint:
        """Save a state and commit it.

        Parameters
        ----------
        state : State
            All tables and tensors. Rows named by `changed` are remembered until a save commits, also when this one
            fails; one that is refused (InvalidInputError) counts as never called.
        step : int
        parent : "auto", None, "latest" or a number
            "auto": as the policy decides. None: a base. Else over the latest checkpoint, or one of its chain.
        dropped : names
            Tables of the latest checkpoint that the state has no longer; every other one must be in the state.

        Raises
        ------
        InvalidInputError
            Before anything is written.
        ConcurrentCommitError
            Another process committed; this Run saves no more.
        StorageError
            Earlier checkpoints are untouched, changed rows are kept for the next save.
        """
        with self._saver.lock:
            return self._committed(self._saver.save(state, step, parent, dropped))

    def begin(self, *, step: int | None = None, writers: int, parent: int | str | None = "auto") -> Save:
        """Begin a save by several writers; see `staging.Save`.

        Parameters
        ----------
        writers : int
            How many, numbered from 0. Each stores parts and finishes, in this process or, by `join_save(save.token)`,
            in another.
        parent : "auto", None, "latest" or a number
            As of `save`. Parts of `changed` tables list every row that changed since it: `Save.token["parent"]`.
        """
        return self._saver.begin(step, writers, parent, self._committed)

    def restore(
        self,
        checkpoint: int | Checkpoint | None = None,
        *,
        out: State | None = None,
        skip_damaged: bool = False,
    ) -> State:
        """Read a checkpoint and make it the origin of this run's next saves; counts as a restore.

        Parameters
        ----------
        checkpoint : number or Checkpoint
            By default the latest. After restoring an older one, the next save is a base.
        out : State
            Existing arrays to read into, as of `Checkpoint.load`.
        """
        saver = self._saver
        with saver.lock:
            if isinstance(checkpoint, Checkpoint):
                checkpoint = checkpoint.sequence
            chosen = self.latest(skip_damaged=skip_damaged) if checkpoint is None else self[checkpoint]
            state: State = chosen.load(out=out)
            saver.ledger.restored_from(chosen.sequence)
            return state

    def rollback(self, sequence: int) -> Checkpoint:
        """Commit a checkpoint with the state of an earlier one, so that the latest is always the one to resume from.

        The run has no origin afterwards: restore before the next increment.
        """
        with self._saver.lock:
            return self._committed(self._saver.rollback(_checked_number(sequence, "rollback")))

    def compact(self) -> Checkpoint:
        """Commit the latest state again as one base, without decoding; origin and pending rows move along."""
        with self._saver.lock:
            return self._committed(self._saver.compact())

    def take_over(self) -> Checkpoint | None:
        """Commit an unchanged checkpoint, so that another process still writing this run finds its number taken.

        None in an empty run.
        """
        with self._saver.lock:
            return None if self._saver.ledger.latest is None else self._committed(self._saver.take_over())

    @property
    def _saver(self) -> Saver:
        if self._writing is None:
            raise InvalidInputError(
                "the run is open for reading; mode='a' is for saving and restoring, load() only reads"
            )
        return self._writing

    def _committed(self, commit: Commit) -> Checkpoint:
        return self[commit.sequence]


def _checked_number(sequence: object, call: str) -> int:
    if isinstance(sequence, bool) or not isinstance(sequence, int | np.integer):
        raise InvalidInputError(f"{call}: {sequence!r} is not the number of a checkpoint; run.at(step=) finds a step")
    return int(sequence)


__all__ = ["Run", "open_run"]
