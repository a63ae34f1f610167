"""A run: open it, save, restore, go back, and say what is kept."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, SupportsFloat

from checkrun_format.arranging import Stage
from checkrun_format.blocks import FieldPlan
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.checkpoints import Checkpoints, number_of
from checkrun_format.errors import InvalidInputError
from checkrun_format.fields import checked_encoder
from checkrun_format.forecast import SavePlan
from checkrun_format.integers import whole
from checkrun_format.manifest import Commit
from checkrun_format.policy import BaseRule, BitRule, Bits, Policy
from checkrun_format.pruning import Pruner, Pruning
from checkrun_format.quantize import Method
from checkrun_format.retention import Keep, Plan
from checkrun_format.saving import Options, Saver
from checkrun_format.staging import JoinedSave, Save, Token, join_save
from checkrun_format.state import State
from checkrun_format.stores import LocalStore, Store, open_store
from checkrun_format.tags import Tags
from checkrun_format.workers import Budget
from checkrun_format.writer import CHUNK_BYTES


def open_run(
    url: str | os.PathLike[str] | Store,
    mode: str = "r",
    *,
    policy: str | Policy = "intermittent",
    every: int | None = None,
    bits: Bits = None,
    expected_restores: SupportsFloat | None = None,
    encoder: str | Method | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    durable: bool = True,
    takeover: bool = False,
    keep: Keep | None = None,
    max_host_bytes: int = Budget().max_host_bytes,
    storage_options: Mapping[str, Any] | None = None,
    single_writer: bool | None = None,
) -> Run:
    """Open a run.

    Parameters
    ----------
    url : str, path or Store
        A local path, or `file://` and a path; `s3://bucket/prefix`, or another address that fsspec knows.
    mode : "r" or "a"
        "r" reads and never creates anything; "a" saves too, and creates the run if there is none.
    policy : "intermittent", "full", "one-shot", "consecutive", or a callable
        When a save takes a base: see `checkrun_format.policy`, which also tells how a policy of one's own looks.
    every : int
        Most checkpoints from one base to the next, whatever the policy: no chain grows longer.
    bits : None, 1..8, "auto", or mapping
        How fields are quantized; to be given at each opening. None: raw. A plain number: the field `weight` of every
        table, no other. A mapping: field names, as in `{"weight": 4, "exp_avg": 8}`, or table names or patterns (`*`,
        `?`) to None, a number, or a mapping of field names to these, as in `{"emb*": {"weight": 4, "exp_avg": 8}}`;
        what is said of the table goes first. "auto": by `expected_restores`, as Check-N-Run does: 2 bits up to 1
        restore, 3 up to 3, 4 up to 20, else 8; and 8 as soon as there were more restores than expected.
    expected_restores : number or Failures
        For bits="auto": how many restores are expected over the whole run, or figures of failures that tell.
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
    keep : Keep
        After each commit, prune what these rules do not keep, in the background. By default nothing is ever removed.
        Who follows a run by `changes_since` has to keep up: what changed across a pruned checkpoint is not known.
    max_host_bytes : int
        About how much memory a read may use beside the arrays that it reads into, see `Checkpoint.load`.
    storage_options : mapping
        Credentials, endpoint and the like of a remote store: see `checkrun_format.stores.S3Store`. Without them the
        environment and the usual files are asked. Nothing of it is ever stored or shown.
    single_writer : bool
        No other process ever writes this run: needed on a server that cannot create exactly, which is found out when
        the run is opened for writing.

    Raises
    ------
    RunNotFoundError, NotARunError, UnsupportedVersionError, InvalidInputError, StorageError
    """
    if mode not in ("r", "a"):
        raise InvalidInputError(f"mode {mode!r}; 'r' to read, 'a' to save too")
    refusal = f"chunk_bytes {chunk_bytes!r}; a number of bytes from 1 to 1 << 30"
    chunk_bytes = whole(chunk_bytes, refusal, least=1, most=1 << 30)
    if keep is not None and (mode != "a" or not isinstance(keep, Keep)):
        raise InvalidInputError(f"keep={keep!r}; give a checkrun_format.Keep, and mode='a'")
    budget = Budget(max_host_bytes)
    rule = BitRule(bits=bits, expected_restores=expected_restores)
    store = open_store(url, durable=durable, storage_options=storage_options, single_writer=single_writer)
    method = None if encoder is None else checked_encoder(encoder, "encoder")
    base_rule = BaseRule(policy=policy, every=every)
    options = Options(base_rule=base_rule, rule=rule, encoder=method, chunk_bytes=int(chunk_bytes))
    run = Run(store, mode, options, keep, budget)
    if takeover:
        run.take_over()
    return run


class Run(Checkpoints):
    """One training history; from `open_run`."""

    def __init__(
        self, store: Store, mode: str, options: Options, keep: Keep | None = None, budget: Budget | None = None
    ) -> None:
        super().__init__(store, budget)
        if mode == "a":
            self._history.create_run()
        self._history.check_run()
        self._mode = mode
        self._writing = Saver(self._history, options) if mode == "a" else None
        self._keep = keep
        self._pruner = None if keep is None else Pruner(self._history, keep)

    def __repr__(self) -> str:
        return f"<run {self._store.url}, mode {self._mode!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for a prune that goes on in the background, and warn of one that failed; there is no more to it."""
        if self._pruner is not None:
            self._pruner.settle()

    @property
    def mode(self) -> str:
        """How it was opened: "r" or "a"."""
        return self._mode

    @property
    def origin(self) -> int | None:
        """The number of the checkpoint that the next save goes on from; None if that will be a base."""
        return None if self._writing is None else self._writing.ledger.origin

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(
        self,
        state: State,
        *,
        step: int | None = None,
        parent: int | str | None = "auto",
        dropped: Sequence[str] = (),
        force_full: bool = False,
        stage: Stage | None = None,
        check: Callable[[], None] = lambda: None,
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
        force_full : bool
            Any row of any table may have changed, whatever `changed` says: the optimizer moves rows that no batch
            touched (weight decay, a dense Adam). Saves a base, every row of it recent. If it is so for some tables
            only, give these `changed=ALL` instead.
        stage : callable, optional
            For a state that goes on changing while it is saved. Called once it is decided what is stored, before
            anything is written: takes, for each table of which rows are stored, which ones and how
            (`arranging.Stored`); gives, for each of its fields, an array of just these rows, in their order, that stays
            as it is until the save ends; or, of a field that is to be quantized, the rows as `quantize.Quantized`. Of
            tables on a device, raw fields may come to the CPU; what is to be quantized stays there, where it may get
            other codes. Tables are not read afterwards; tensors have to be copies already. It is called once more if
            the save has to be laid over another checkpoint than was thought.
        check : callable, optional
            Called now and then, last of all before the commit; what it raises abandons the save.

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
            committed = self._saver.save(state, step, parent, dropped, force_full=force_full, stage=stage, check=check)
            return self._committed(committed)

    def plan_save(
        self,
        state: State,
        *,
        step: int | None = None,
        parent: int | str | None = "auto",
        dropped: Sequence[str] = (),
        force_full: bool = False,
    ) -> SavePlan:
        """What `save` would do with the same arguments: base or increment, why, how many bytes, whether they fit.

        Writes nothing, and counts as never called: rows named by `changed` are to be named again to the save. Only row
        numbers and shapes are looked at; no value of a table is encoded, and no function of `Table.from_function`
        called.

        Raises
        ------
        InvalidInputError, ConcurrentCommitError
            As the save would.
        """
        with self._saver.lock:
            return self._saver.plan(state, step, parent, dropped, force_full=force_full)

    def begin(self, *, step: int | None = None, writers: int, parent: int | str | None = "auto") -> Save:
        """Begin a save by several writers; see `staging.Save`.

        Parameters
        ----------
        writers : int
            How many, numbered from 0. Each stores parts and finishes, in this process or, by `join(save.token)`, in
            another.
        parent : "auto", None, "latest" or a number
            As of `save`. Parts of `changed` tables list every row that changed since it: `Save.token["parent"]`.
        """
        return self._saver.begin(step, writers, parent, self._committed)

    def join(self, token: Token) -> JoinedSave:
        """Take part in a save that another process began, by the store that this run was opened with; in any mode.

        A local folder is synced if the token says so, however this run was opened.

        Parameters
        ----------
        token : dict
            `Save.token` of the process that began it.
        """
        return join_save(token, self.url if isinstance(self._store, LocalStore) else self._store)

    def restore(
        self,
        checkpoint: int | Checkpoint | None = None,
        *,
        tables: Sequence[str] | None = None,
        out: State | None = None,
        framework: str | None = None,
        device: object = None,
        skip_damaged: bool = False,
        fallback: bool = False,
        max_host_bytes: int | None = None,
    ) -> State:
        """Read a checkpoint and make it the origin of this run's next saves; counts as a restore.

        Parameters
        ----------
        checkpoint : number or Checkpoint
            By default the latest. After restoring an older one, the next save is a base.
        tables : names
            Read only these; the trainer's state has to equal the checkpoint in the others as well, unless the next
            save says that they changed.
        out, framework, device
            Existing arrays to read into, and what new ones are, as of `Checkpoint.load`.
        skip_damaged : bool
            Pass over damaged commits above the latest readable one, as of `latest`.
        fallback : bool
            Verify, and take the newest checkpoint whose whole chain is sound. Those that it passes over are named in a
            FallbackWarning and in the log.
        max_host_bytes : int
            As of `Checkpoint.load`.

        Raises
        ------
        DamagedError
            Of what is read something is damaged; with `fallback`, no checkpoint is sound. `out` may hold anything then,
            as after any error in reading: the next save is a base.
        """
        if fallback and checkpoint is not None:
            raise InvalidInputError("fallback=True looks for the checkpoint itself: give no number")
        saver = self._saver
        with saver.lock:
            if fallback:
                chosen = self.newest_sound()
            elif checkpoint is None:
                chosen = self.latest(skip_damaged=skip_damaged)
            else:
                chosen = self[number_of(checkpoint, "restore")]
            try:
                state = chosen.load(
                    tables=tables, out=out, framework=framework, device=device, max_host_bytes=max_host_bytes
                )
            except InvalidInputError:  # nothing has been read
                raise
            except BaseException:
                if out is not None:
                    saver.ledger.origin = None
                raise
            saver.ledger.restored_from(chosen.sequence)
            return state

    def restored_from(self, checkpoint: int | Checkpoint) -> None:
        """Make a checkpoint the origin of the next save, as `restore` does, after the state was read by other means.

        As several ranks do it, each of which reads its own rows. Counts as a restore.
        """
        with self._saver.lock:
            self._saver.ledger.restored_from(self[number_of(checkpoint, "restored_from")].sequence)

    def continue_from(
        self, checkpoint: int | Checkpoint, *, settled: Mapping[str, Sequence[FieldPlan]] | None = None
    ) -> None:
        """Make a checkpoint the origin of the next save without reading it; for a state that was compared with it.

        Counts as no restore. The next save must name every row that differs, and of quantized fields every row that
        would be encoded to other bits than it is stored in.

        Parameters
        ----------
        checkpoint : number or Checkpoint
            After any but the latest, the next save is a base.
        settled : mapping
            Tables of which every other row is known to encode to the bits that are stored, and by which plans:
            only of these are rows that are stored again, but did not change, not told as changed.
        """
        with self._saver.lock:
            plans = {name: list(fields) for name, fields in (settled or {}).items()}
            self._saver.ledger.compared_with(self[number_of(checkpoint, "continue_from")].sequence, plans)

    def rollback(self, sequence: int) -> Checkpoint:
        """Commit a checkpoint with the state of an earlier one, so that the latest is always the one to resume from.

        The run has no origin afterwards: restore before the next increment.
        """
        with self._saver.lock:
            return self._committed(self._saver.rollback(number_of(sequence, "rollback")))

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

    # Retention --------------------------------------------------------------------------------------------------------

    def tag(self, name: str, checkpoint: int | Checkpoint) -> None:
        """Name a checkpoint; no prune removes one that has a name. A name that was another's moves.

        Parameters
        ----------
        name : str
            1 to 64 of `a-z 0-9 . _ -`, the first a letter or digit; no number.

        Raises
        ------
        InvalidInputError, CheckpointNotFoundError, PrunedError, BurntError, DamagedError
            There is no such checkpoint, or its chain is not whole.
        """
        self._check_may_write()
        Tags(self._history).put(name, number_of(checkpoint, "tag"))

    def untag(self, name: str) -> None:
        """Forget a name; the checkpoint itself stays until a prune.

        Raises
        ------
        NotFoundError
        """
        self._check_may_write()
        Tags(self._history).delete(name)

    def plan_prune(self, keep: Keep | None = None, *, abandoned: dt.timedelta | float | None = None) -> Plan:
        """What a prune would remove, what would stay and why; writes nothing.

        Parameters
        ----------
        keep : Keep
            By default that of `open_run`.
        abandoned : timedelta or seconds
            Remove also attempts at numbers that are free or burnt, if nothing of them was written for so long. The save
            that writes one may still be going on: choose more than any save takes.

        Raises
        ------
        InvalidInputError, DamagedError
        """
        chosen = self._keep if keep is None else keep
        if not isinstance(chosen, Keep):
            raise InvalidInputError(f"keep={chosen!r}; give a checkrun_format.Keep")
        return Pruning(self._history).plan(chosen, abandoned=abandoned)

    def prune(self, plan: Plan) -> None:
        """Carry out a plan of `plan_prune`.

        Safe while others read, save, tag and prune. When it is interrupted, what should stay is whole, and the next
        prune removes the rest.

        Raises
        ------
        InvalidInputError
            Something was committed or tagged since that needs what the plan removes: plan again.
        """
        self._check_may_write()
        if not isinstance(plan, Plan):
            raise InvalidInputError(f"a {type(plan).__name__} where a plan of plan_prune() belongs")
        Pruning(self._history).prune(plan)

    def _check_may_write(self) -> None:
        if self._writing is None:
            raise InvalidInputError("the run is open for reading; mode='a' is for tags and prunes, too")

    @property
    def _saver(self) -> Saver:
        if self._writing is None:
            raise InvalidInputError(
                "the run is open for reading; mode='a' is for saving and restoring, load() only reads"
            )
        return self._writing

    def _committed(self, commit: Commit) -> Checkpoint:
        checkpoint = self[commit.sequence]
        if self._pruner is not None:
            self._pruner.start()
        return checkpoint


__all__ = ["Run", "open_run"]
