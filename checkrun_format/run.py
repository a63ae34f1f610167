"""A run: open it, save, restore, go back, and look at its history."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from checkrun_format import layout
from checkrun_format import policy as policies
from checkrun_format.chain import History, same_kind
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.commit import Claim, Content, NumberTakenError, check_objects, commit, lost_to, open_attempt, seal
from checkrun_format.compaction import copy_table
from checkrun_format.errors import (
    CheckpointNotFoundError,
    CheckrunError,
    ConcurrentCommitError,
    DamagedError,
    InvalidInputError,
    NotARunError,
    PrunedError,
)
from checkrun_format.manifest import Commit, Field, PolicyNote, Problem, TableEntry
from checkrun_format.planning import Below, TablePlan, plan_table, resembles
from checkrun_format.policy import BitRule, Bits
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.rows import Selection
from checkrun_format.staging import (
    Save,
    Token,
    check_coverage,
    field_plans,
    merged_statistics,
    merged_tables,
    table_entry,
)
from checkrun_format.state import State, TableSource, blob_bytes, extra_json, parse_json, table_sources, tensor_arrays
from checkrun_format.stores import AlreadyExistsError, Store, open_store
from checkrun_format.tracking import Touched, of_ids, stored_by
from checkrun_format.verify import verify_checkpoint, verify_run
from checkrun_format.versions import FORMAT_VERSION
from checkrun_format.writer import CHUNK_BYTES, PartList, PartSource, Writer

_REQUIRED: Final = object()


def open_run(
    url: str | os.PathLike[str] | Store,
    mode: str = "r",
    *,
    policy: str = "intermittent",
    bits: Bits = None,
    expected_restores: float | None = None,
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
        How fields are quantized, see `policy.BitRule`. None: raw. A plain number: the field `weight` of every table.
    expected_restores : float
        For bits="auto": how many restores are expected over the whole run.
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
    run = Run(store, mode, policy=policy, rule=rule, chunk_bytes=chunk_bytes)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A checkpoint whose state is committed again: over itself, or as a base."""

    target: StoredCheckpoint
    over: bool
    note: PolicyNote


class Run:
    """One training history; from `open_run`."""

    def __init__(self, store: Store, mode: str, *, policy: str, rule: BitRule, chunk_bytes: int) -> None:
        self._store = store
        self._mode = mode
        self._policy = _checked_policy(policy)
        self._rule = rule
        self._chunk_bytes = chunk_bytes
        self._history = History(store)
        if mode == "a":
            _create_run(store)
        self._history.check_run()
        self._head = 0
        self._latest: Commit | None = None
        self._origin: int | None = None
        self._pending: dict[str, Touched] = {}
        self._layers: dict[int, dict[str, Touched]] = {}
        self._attempts: dict[str, bool] = {}
        self._restored = False
        self._lost: str | None = None
        if mode == "a":
            self._head = self._history.head()
            latest = self._history.latest(skip_damaged=True)
            self._latest = None if latest is None else self._history.get(latest).commit

    def __repr__(self) -> str:
        return f"<run {self._store.url}, mode {self._mode!r}>"

    # Reading ----------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the run is."""
        return self._store.url

    def __getitem__(self, sequence: int) -> Checkpoint:
        """The checkpoint of a number.

        Raises
        ------
        CheckpointNotFoundError, PrunedError, BurntError, DamagedError
        """
        return Checkpoint(self._history, self._history.get(_checked_number(sequence, "run[...]")))

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
        """The newest checkpoint of a step (steps repeat after going back)."""
        for number in reversed(self._history.numbers()):
            occupant = self._history.occupant(number)
            if isinstance(occupant, Commit) and occupant.step == step:
                return self[number]
        raise CheckpointNotFoundError(f"{self.url} has no checkpoint of step {step}")

    def log(self) -> Iterator[Checkpoint]:
        """The checkpoints from the lowest number to the highest; reads nothing but commits."""
        for commit_record in self._history.commits():
            yield self[commit_record.sequence]

    def load(self, **options: Any) -> State:
        """Read the latest checkpoint; options as of `Checkpoint.load`. Does not count as a restore."""
        state: State = self.latest().load(**options)
        return state

    def verify(self, sequence: int | None = None) -> list[Problem]:
        """Every problem of the run, or of one checkpoint; an empty list if there is none."""
        if sequence is None:
            return verify_run(self._history)
        return verify_checkpoint(self._history, sequence)

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
        self._check_may_save()
        step = _checked_step(step)
        if not isinstance(state, State):
            raise InvalidInputError(f"a {type(state).__name__} where a checkrun_format.State belongs")
        sources = table_sources(state.tables)
        tensors, blobs, extra = tensor_arrays(state.tensors), blob_bytes(state.blobs), extra_json(state.extra)
        restores = self._restores()
        plans = {
            name: field_plans(
                name,
                source.fields,
                {},
                rule=self._rule,
                bits=source.bits,
                store_as=source.store_as,
                restores=restores,
            )
            for name, source in sources.items()
        }
        origin = self._legal_origin()
        self._check_tables(sources, dropped, origin)
        self._check_parent(parent, origin)
        self._note(sources, dropped, origin)

        def write(claim: Claim) -> tuple[list[PartList], Content]:
            origin = self._legal_origin()
            below, note = self._decide(parent, origin)
            writer = Writer(self._store, claim.prefix, 0, chunk_bytes=self._chunk_bytes)
            entries, stored = self._put_tables(writer, sources, plans, origin, below)
            for name, values in tensors.items():
                writer.put_tensor(name, values)
            for name, data in blobs.items():
                writer.put_blob(name, data)
            inline = len(extra) <= layout.MAX_INLINE_EXTRA
            span = None if inline else writer.put_span(extra)
            part_list = writer.finish()
            statistics = merged_statistics([part_list])
            self._layers[claim.sequence] = stored
            return [part_list], Content(
                step=step,
                tables=[_with_statistics(entry, statistics.get(entry.name, {})) for entry in entries],
                policy=note,
                parent=below,
                predecessor=self._latest,
                restores=restores,
                dropped=self._dropped(entries if origin is not None else ()),
                extra=parse_json(extra) if inline else None,
                extra_blob=span,
            )

        return self._commit(write, sets_origin=True)

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
        self._check_may_save()
        step = _checked_step(step)
        if isinstance(writers, bool) or not isinstance(writers, int) or writers < 1:
            raise InvalidInputError(f"writers={writers!r}; at least 1")
        origin = self._legal_origin()
        self._check_parent(parent, origin)
        below, note = self._decide(parent, origin)
        claim = Claim.of(self._head + 1)
        self._attempts[claim.attempt] = False
        token = self._token(claim, writers, below)
        group_bytes = open_attempt(self._store, claim)

        def finish(
            part_lists: list[PartList], unchanged: Sequence[str], dropped: Sequence[str], extra: Any
        ) -> Checkpoint:
            return self._commit_staged(claim, group_bytes, part_lists, (step, note, below, unchanged, dropped, extra))

        return Save(self._store, token, finish)

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
        if self._mode == "r":
            raise InvalidInputError("the run is open for reading; use load(), or open it with mode='a'")
        if isinstance(checkpoint, Checkpoint):
            checkpoint = checkpoint.sequence
        chosen = self.latest(skip_damaged=skip_damaged) if checkpoint is None else self[checkpoint]
        state: State = chosen.load(out=out)
        self._origin = chosen.sequence
        self._pending = {}
        self._layers = {}
        self._restored = True
        return state

    def rollback(self, sequence: int) -> Checkpoint:
        """Commit a checkpoint with the state of an earlier one, so that the latest is always the one to resume from.

        The run has no origin afterwards: restore before the next increment.
        """
        self._check_may_save()
        target = self._history.get(_checked_number(sequence, "rollback"))
        if self._latest is None:
            raise InvalidInputError("nothing was committed when this run was opened; open it anew")
        back_to = target.commit.sequence

        def choose(latest: StoredCheckpoint) -> Copy:
            over = any(below.commit.sequence == back_to for below in self._history.chain(latest))
            reason = f"back to checkpoint {back_to}" + ("" if over else ", which is not in the latest chain: copied")
            return Copy(target=target, over=over, note=PolicyNote(name="rollback", reason=reason))

        return self._copy(choose, rollback_to=back_to)

    def compact(self) -> Checkpoint:
        """Commit the latest state again as one base, without decoding; origin and pending rows move along."""
        self._check_may_save()
        if self._latest is None:
            raise InvalidInputError("nothing is committed, there is nothing to compact")

        def choose(latest: StoredCheckpoint) -> Copy:
            note = PolicyNote(name="compact", reason=f"checkpoint {latest.commit.sequence} as one base")
            return Copy(target=latest, over=False, note=note)

        return self._copy(choose, rollback_to=None)

    def take_over(self) -> Checkpoint | None:
        """Commit an unchanged checkpoint, so that another process still writing this run finds its number taken.

        None in an empty run.
        """
        self._check_may_save()
        if self._latest is None:
            return None
        note = PolicyNote(name="takeover", reason="unchanged, to fence off a process that may still write")
        return self._copy(lambda latest: Copy(target=latest, over=True, note=note), rollback_to=None)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _check_may_save(self) -> None:
        if self._mode == "r":
            raise InvalidInputError("the run is open for reading; open it with mode='a' to save")
        if self._lost is not None:
            raise ConcurrentCommitError(f"this Run may not save any more: {self._lost}")

    def _legal_origin(self) -> StoredCheckpoint | None:
        """The origin, if it is the latest checkpoint (HEA-2)."""
        if self._origin is None or self._latest is None or self._origin != self._latest.sequence:
            return None
        return self._history.get(self._origin)

    def _restores(self) -> int:
        before = 0 if self._latest is None else self._latest.restores
        return before + (1 if self._restored else 0)

    def _check_tables(
        self, sources: Mapping[str, TableSource], dropped: Sequence[str], origin: StoredCheckpoint | None
    ) -> None:
        known = {entry.name for entry in self._latest_tables()}
        wrong = [name for name in dropped if name in sources or name not in known]
        if wrong:
            where = "is in the state" if wrong[0] in sources else "is not in the latest checkpoint"
            raise InvalidInputError(f"dropped: table {wrong[0]!r} {where}")
        forgotten = sorted(known - set(sources) - set(dropped))
        if forgotten:
            raise InvalidInputError(
                f"table {forgotten[0]!r} of the latest checkpoint is not in the state; if it is gone for good, name it "
                f"in dropped=[...] ({len(forgotten)} such tables in all)"
            )
        for name, source in sources.items():
            if origin is not None and origin.has(name) and source.changed is None:
                raise InvalidInputError(
                    f"table {name!r} has been saved before: give changed= (row ids, a mask, or checkrun_format.ALL)"
                )

    def _latest_tables(self) -> list[TableEntry]:
        """Tables of the latest checkpoint; none if they cannot be read (then the save is a base)."""
        if self._latest is None:
            return []
        try:
            return self._history.get(self._latest.sequence).manifest.tables
        except (DamagedError, PrunedError):
            return []

    def _dropped(self, entries: Sequence[TableEntry]) -> list[str]:
        """Tables of the predecessor that these entries do not continue (5.4)."""
        ours = {entry.name: entry for entry in entries}
        before = self._latest_tables()
        return [entry.name for entry in before if entry.name not in ours or not same_kind(entry, ours[entry.name])]

    def _check_parent(self, parent: int | str | None, origin: StoredCheckpoint | None) -> None:
        if parent is None or parent == "auto":
            return
        if origin is None:
            raise InvalidInputError(
                f"parent={parent!r}: this Run's state does not stem from the latest checkpoint; restore it first, or "
                "save a base"
            )
        if parent == "latest":
            return
        chain = [below.commit.sequence for below in self._history.chain(origin)]
        if parent not in chain:
            raise InvalidInputError(f"parent={parent!r} is not in the chain of the latest checkpoint: {chain}")

    def _note(
        self, sources: Mapping[str, TableSource], dropped: Sequence[str], origin: StoredCheckpoint | None
    ) -> None:
        """Remember what changed, until a save commits: all of a table that does not continue the origin's."""
        if origin is None:
            return
        for name in dropped:
            self._pending[name] = Touched.whole("dense")
        for name, source in sources.items():
            entry = origin.entry(name) if origin.has(name) else None
            noted = Touched.nothing(source.addressing)
            if entry is None or not resembles(source, entry):
                noted.everything = True
            else:
                noted.note(source)
                noted.rows.add(np.arange(source.rows, entry.rows or 0))  # gone for now: new if the table grows again
            if name in self._pending:
                noted.update(self._pending[name])
            self._pending[name] = noted

    def _decide(
        self, parent: int | str | None, origin: StoredCheckpoint | None
    ) -> tuple[StoredCheckpoint | None, PolicyNote]:
        """Over which checkpoint to save, and why."""
        if origin is None:
            why = "nothing is committed" if self._latest is None else "this Run does not continue the latest checkpoint"
            return None, PolicyNote(name=self._policy, reason=f"a base: {why}")
        if parent == "auto":
            return self._decide_by_policy(origin)
        if parent is None:
            return None, PolicyNote(name="caller", reason="a base, as the caller said")
        number = origin.commit.sequence if parent == "latest" else int(parent)
        chain = {below.commit.sequence: below for below in self._history.chain(origin)}
        if number not in chain:
            raise InvalidInputError(f"parent={parent!r} is not in the chain of the latest checkpoint")
        return chain[number], PolicyNote(name="caller", reason=f"over checkpoint {number}, as the caller said")

    def _decide_by_policy(self, origin: StoredCheckpoint) -> tuple[StoredCheckpoint | None, PolicyNote]:
        chain = list(self._history.chain(origin))
        base = chain[-1]
        increments = [_size(c) for c in self._since(base.commit)]
        decision = policies.decide(self._policy, _size(base.commit), increments)
        below = {None: None, "base": base, "latest": origin}[decision.parent]
        return below, PolicyNote(name=self._policy, reason=decision.reason)

    def _since(self, base: Commit) -> list[Commit]:
        """The commits of the increments over a base, oldest first."""
        found = []
        below = self._latest
        while below is not None and below.sequence > base.sequence:
            if below.parent is not None:
                found.append(below)
            number = below.predecessor
            try:
                below = None if number is None else self._history.get(number).commit
            except CheckrunError:
                break  # pruned or damaged: what is left of the history decides
        return found[::-1]

    def _put_tables(
        self,
        writer: Writer,
        sources: Mapping[str, TableSource],
        plans: Mapping[str, Any],
        origin: StoredCheckpoint | None,
        below: StoredCheckpoint | None,
    ) -> tuple[list[TableEntry], dict[str, Touched]]:
        entries, stored = [], {}
        for name, source in sources.items():
            plan = plan_table(source, self._below(name, source, origin, below))
            writer.put_part(_part_source(source, plan, plans[name]))
            entries.append(_entry(source, plan))
            stored[name] = _touched(source, plan)
        return entries, stored

    def _below(
        self, name: str, source: TableSource, origin: StoredCheckpoint | None, parent: StoredCheckpoint | None
    ) -> Below | None:
        if origin is None:
            return None
        in_origin = origin.entry(name) if origin.has(name) else None
        in_parent = parent.entry(name) if parent is not None and parent.has(name) else None
        since = Touched.nothing(source.addressing)
        if in_parent is not None and parent is not None:
            since = self._since_parent(name, source, origin, parent)
        pending = self._pending.get(name, Touched.nothing(source.addressing))
        return Below(parent=in_parent, origin=in_origin, since_parent=since, pending=pending)

    def _since_parent(
        self, name: str, source: TableSource, origin: StoredCheckpoint, parent: StoredCheckpoint
    ) -> Touched:
        """The rows that the layers above the parent hold: those in which the origin may differ from it."""
        touched = Touched.nothing(source.addressing)
        for layer in self._history.chain(origin):
            if layer.commit.sequence == parent.commit.sequence or touched.everything:
                break
            known = self._layers.setdefault(layer.commit.sequence, {})
            if name not in known:
                known[name] = stored_by(layer, name) if layer.has(name) else Touched.whole(source.addressing)
            touched.update(known[name])
        return touched

    def _commit(self, write: Callable[[Claim], tuple[list[PartList], Content]], *, sets_origin: bool) -> Checkpoint:
        """Stage and commit at the next number; again at the one after, if an earlier attempt of ours holds it."""
        while True:
            claim = Claim.of(self._head + 1)
            try:
                group_bytes = open_attempt(self._store, claim)
                part_lists, content = write(claim)
                document = seal(self._store, claim, content, part_lists, group_bytes)
            except BaseException:
                self._discard(claim)
                raise
            self._attempts[claim.attempt] = sets_origin
            try:
                committed = commit(self._store, claim, document)
            except NumberTakenError as taken:
                self._discard(claim)
                if taken.attempt not in self._attempts:
                    self._lost = str(lost_to(claim, taken))
                    raise lost_to(claim, taken) from taken
                self._adopt(claim.sequence, was_a_save=self._attempts[taken.attempt])
                continue
            self._advance(committed, sets_origin=sets_origin)
            return self[committed.sequence]

    def _discard(self, claim: Claim) -> None:
        """Remove what an attempt stored that is not committed and never will be."""
        self._layers.pop(claim.sequence, None)
        try:
            for key in self._store.list(claim.prefix):
                self._store.delete(key)
        except (CheckrunError, OSError):
            pass  # it stays as litter, which every reader ignores

    def _adopt(self, sequence: int, *, was_a_save: bool) -> None:
        """An attempt that was given up has landed after all (HEA-3): its rows stay pending."""
        landed = self._history.get(sequence).commit
        origin = self._legal_origin()
        self._move_head(landed)
        self._origin = sequence if was_a_save and origin is not None else None
        self._layers = {}

    def _move_head(self, committed: Commit) -> None:
        """Go on from a commit of ours; a restore that it counts is counted."""
        if committed.restores > (0 if self._latest is None else self._latest.restores):
            self._restored = False
        self._head, self._latest = committed.sequence, committed

    def _advance(self, committed: Commit, *, sets_origin: bool) -> None:
        self._move_head(committed)
        self._attempts = {}
        if sets_origin:
            self._origin = committed.sequence
            self._pending = {}
            chain = {below.commit.sequence for below in self._history.chain(self._history.get(committed.sequence))}
            self._layers = {number: rows for number, rows in self._layers.items() if number in chain}

    def _copy(self, choose: Callable[[StoredCheckpoint], Copy], *, rollback_to: int | None) -> Checkpoint:
        """Commit the state of a checkpoint again: over it, all unchanged; or copied as a base (RBK-1, CMP-1)."""

        def write(claim: Claim) -> tuple[list[PartList], Content]:
            assert self._latest is not None
            chosen = choose(self._history.get(self._latest.sequence))
            target, over = chosen.target, chosen.over
            writer = Writer(self._store, claim.prefix, 0, chunk_bytes=self._chunk_bytes)
            names = [entry.name for entry in target.manifest.tables]
            if over:
                entries = [_unchanged(target.entry(name)) for name in names]
            else:
                entries = [copy_table(self._history, target, name, writer) for name in names]
            for tensor in target.manifest.tensors:
                writer.put_tensor(tensor.name, target.tensor(tensor.name))
            for blob in target.manifest.blobs:
                writer.put_blob(blob.name, target.blob(blob))
            span = target.manifest.extra_blob
            return [writer.finish()], Content(
                step=target.commit.step,
                tables=entries,
                policy=chosen.note,
                parent=target if over else None,
                predecessor=self._latest,
                rollback_to=rollback_to,
                restores=self._restores() if rollback_to is not None else target.commit.restores,
                dropped=self._dropped(entries),
                extra=target.manifest.extra,
                extra_blob=None if span is None else writer.put_span(target.blob(span)),
            )

        checkpoint = self._commit(write, sets_origin=False)
        continues = rollback_to is None and self._origin == checkpoint.commit.predecessor
        self._origin = checkpoint.sequence if continues else None
        self._pending = self._pending if continues else {}
        self._layers = {}
        return checkpoint

    def _token(self, claim: Claim, writers: int, below: StoredCheckpoint | None) -> Token:
        return {
            "url": self.url,
            "durable": getattr(self._store, "durable", True),
            "sequence": claim.sequence,
            "attempt": claim.attempt,
            "writers": writers,
            "parent": None if below is None else below.commit.sequence,
            "predecessor": None if self._latest is None else self._latest.sequence,
            "chunk_bytes": self._chunk_bytes,
            "bits": self._rule.bits,
            "expected_restores": self._rule.expected_restores,
            "restores": self._restores(),
        }

    def _commit_staged(
        self, claim: Claim, group_bytes: int, part_lists: list[PartList], content: tuple[Any, ...]
    ) -> Checkpoint:
        """Check what the writers of a staged save stored, and commit it."""
        step, note, below, unchanged, dropped, extra = content
        self._check_may_save()
        if claim.sequence != self._head + 1:
            raise InvalidInputError(f"checkpoint {self._head} was committed since this save began: begin it anew")
        statistics = merged_statistics(part_lists)
        entries = [table_entry(told, statistics.get(told["name"], {})) for told in merged_tables(part_lists)]
        entries += [self._unchanged_entry(name, below, entries) for name in unchanged]
        self._check_staged(entries, below, dropped)
        check_coverage(entries, part_lists)
        data = extra_json(extra)
        if len(data) > layout.MAX_INLINE_EXTRA:
            raise InvalidInputError(f"extra takes {len(data)} bytes; in a save by several writers put it in a blob")
        check_objects(self._store, claim, part_lists)
        told = Content(
            step=step,
            tables=entries,
            policy=note,
            parent=below,
            predecessor=self._latest,
            restores=self._restores(),
            dropped=self._dropped(entries),
            extra=parse_json(data),
        )
        try:
            committed = commit(self._store, claim, seal(self._store, claim, told, part_lists, group_bytes))
        except NumberTakenError as taken:
            if taken.attempt in self._attempts:
                self._adopt(claim.sequence, was_a_save=self._attempts[taken.attempt])
                raise ConcurrentCommitError(
                    f"number {claim.sequence} is taken by an earlier attempt of this Run, which had landed after all: "
                    "begin the save anew"
                ) from taken
            self._lost = str(lost_to(claim, taken))
            raise lost_to(claim, taken) from taken
        self._layers = {}
        self._advance(committed, sets_origin=True)
        return self[committed.sequence]

    def _unchanged_entry(self, name: str, below: StoredCheckpoint | None, entries: Sequence[TableEntry]) -> TableEntry:
        if below is None or not below.has(name) or any(entry.name == name for entry in entries):
            raise InvalidInputError(f"unchanged: table {name!r} is not in the parent, or was given as parts too")
        return _unchanged(below.entry(name))

    def _check_staged(
        self, entries: Sequence[TableEntry], below: StoredCheckpoint | None, dropped: Sequence[str]
    ) -> None:
        names = {entry.name for entry in entries}
        forgotten = sorted({entry.name for entry in self._latest_tables()} - names - set(dropped))
        if forgotten:
            raise InvalidInputError(
                f"table {forgotten[0]!r} of the latest checkpoint has no part; name it in unchanged= or dropped="
            )
        for entry in entries:
            if entry.storage != "changed":
                continue
            lower = None if below is None or not below.has(entry.name) else below.entry(entry.name)
            if lower is None or not same_kind(entry, lower) or (entry.rows or 0) < (lower.rows or 0):
                raise InvalidInputError(
                    f"table {entry.name!r} is new, shrank, or has other fields than in the parent: store it full"
                )


def _checked_policy(name: object) -> str:
    return policies.check_policy(name)


def _checked_step(step: object) -> int | None:
    if step is None:
        return None
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= int(step) < 2**63:
        raise InvalidInputError(f"step {step!r}; a number from 0 on, or None")
    return int(step)


def _checked_number(sequence: object, call: str) -> int:
    if isinstance(sequence, bool) or not isinstance(sequence, int | np.integer):
        raise InvalidInputError(f"{call}: {sequence!r} is not the number of a checkpoint; run.at(step=) finds a step")
    return int(sequence)


def _size(commit_record: Commit) -> int:
    return commit_record.stored_bytes + commit_record.manifest.bytes


def _part_source(source: TableSource, plan: TablePlan, plans: Sequence[Any]) -> PartSource:
    positions: Selection = plan.positions

    def fetch(low: int, high: int) -> dict[str, Any]:
        if isinstance(positions, slice):
            return source.fetch(slice(positions.start + low, positions.start + high))
        return source.fetch(positions[low:high])

    return PartSource(
        table=source.name,
        plans=plans,
        count=plan.count,
        fetch=fetch,
        first_row=0 if plan.ids is None else -1,
        rows=plan.ids,
        recent=plan.recent,
        deleted=plan.deleted,
    )


def _entry(source: TableSource, plan: TablePlan) -> TableEntry:
    return TableEntry(
        name=source.name,
        requires=[],
        addressing=source.addressing,
        key_dtype=source.key_dtype,
        rows=source.rows if source.keys is None else None,
        storage=plan.storage,
        fields=[Field(name=f.name, dtype=f.dtype, columns=f.columns, encoder=None) for f in source.fields],
    )


def _with_statistics(entry: TableEntry, statistics: Mapping[str, dict[str, Any]]) -> TableEntry:
    fields = [
        Field(name=f.name, dtype=f.dtype, columns=f.columns, encoder=statistics.get(f.name)) for f in entry.fields
    ]
    return TableEntry(**{**{name: getattr(entry, name) for name in entry.__struct_fields__}, "fields": fields})


def _touched(source: TableSource, plan: TablePlan) -> Touched:
    if plan.storage == "full" or plan.ids is None:
        return Touched.whole(source.addressing)
    return of_ids(source.addressing, plan.ids, plan.deleted)


def _unchanged(entry: TableEntry) -> TableEntry:
    fields = [Field(name=f.name, dtype=f.dtype, columns=f.columns, encoder=None) for f in entry.fields]
    values = {name: getattr(entry, name) for name in entry.__struct_fields__}
    return TableEntry(**{**values, "storage": "unchanged", "fields": fields})


__all__ = ["Run", "open_run"]
