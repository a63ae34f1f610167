"""Turning a state, or a stored checkpoint, into the next checkpoint of a run (FORMAT.md 9.1, 9.5)."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from checkrun_format import layout
from checkrun_format.alike import encoded_alike
from checkrun_format.arranging import (
    Stage,
    Stored,
    as_given,
    checked_staged,
    entry_of,
    is_lossy,
    part_source,
    planned,
    touched_by,
    unchanged_entry,
    with_statistics,
)
from checkrun_format.blocks import FieldPlan, Values
from checkrun_format.chain import History, same_kind
from checkrun_format.commit import (
    Claim,
    Content,
    NumberTakenError,
    check_ground,
    check_objects,
    commit,
    lost_to,
    open_attempt,
    seal,
    taken,
)
from checkrun_format.compaction import copy_table
from checkrun_format.dlpack import Array
from checkrun_format.errors import (
    CheckrunError,
    ConcurrentCommitError,
    DamagedError,
    InvalidInputError,
    PrunedError,
    StorageError,
)
from checkrun_format.forecast import Forecaster, SavePlan, Scale
from checkrun_format.judging import Overlay
from checkrun_format.ledger import TAKEOVER, Ledger
from checkrun_format.manifest import Commit, Field, PolicyNote, TableEntry, parse_occupant
from checkrun_format.planning import TablePlan, plan_table
from checkrun_format.policy import BaseRule, BitRule, Past
from checkrun_format.quantize import Method
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.staging import (
    Outlook,
    Save,
    Token,
    checked_integer,
    field_plans,
    merged_statistics,
)
from checkrun_format.state import (
    ALL,
    INHERIT,
    FieldSpec,
    Inherit,
    State,
    TableSource,
    blob_bytes,
    extra_json,
    parse_json,
    table_sources,
    tensor_arrays,
)
from checkrun_format.stores import Store
from checkrun_format.tracking import Touched
from checkrun_format.workers import Workers
from checkrun_format.writer import PartList, Writer, objects_of

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a run is written."""

    base_rule: BaseRule
    rule: BitRule
    encoder: Method | None
    chunk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A checkpoint whose state is committed again: over itself, or as a base."""

    target: StoredCheckpoint
    over: bool
    note: PolicyNote


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A state, checked: everything that can be refused has been."""

    step: int | None
    sources: Mapping[str, TableSource]
    plans: Mapping[str, Sequence[FieldPlan]]
    tensors: Mapping[str, Array]
    blobs: Mapping[str, bytes]
    extra: bytes
    parent: int | str | None
    force_full: bool = False
    stage: Stage | None = None
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Over which checkpoint to save, None for a base; and who decided so, and why."""

    below: StoredCheckpoint | None
    note: PolicyNote


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """A save before it writes: what it stores of each table, and values that were staged for it."""

    decided: Decided
    plans: Mapping[str, tuple[TablePlan, Sequence[FieldPlan]]]
    staged: Mapping[str, Mapping[str, Values]]


class Saver:
    """Commits checkpoints of one run, one after another."""

    def __init__(self, store: Store, history: History, options: Options) -> None:
        self.lock = threading.RLock()
        self._store = store
        self._history = history
        self._options = options
        self.ledger = Ledger(history)

    # A trainer's state ------------------------------------------------------------------------------------------------

    def save(
        self,
        state: State,
        step: object,
        parent: int | str | None,
        dropped: Sequence[str],
        *,
        force_full: bool = False,
        stage: Stage | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Commit:
        """Save a state; see `Run.save`."""
        self.ledger.check_may_save()
        prepared = replace(self._prepare(state, step, parent, force_full=force_full), stage=stage, check=check)
        self._tell(prepared, _checked_names(dropped, "dropped"))
        stored: dict[str, Touched] = {}
        settled: dict[str, list[FieldPlan]] = {}
        committed = self._commit(
            lambda: self._arrange(prepared),
            lambda claim, arranged: self._write(self._writer(claim), prepared, arranged, stored, settled),
            is_save=True,
        )
        keys = {name: source.keys.copy() for name, source in prepared.sources.items() if source.keys is not None}
        self.ledger.saved(committed, stored, settled, keys)
        self.ledger.lossy.update(name for name, plans in prepared.plans.items() if is_lossy(plans))
        return committed

    def plan(
        self, state: State, step: object, parent: int | str | None, dropped: Sequence[str], *, force_full: bool
    ) -> SavePlan:
        """Go the way of a save without its last steps, on copied books; see `Run.plan_save`."""
        trial = copy.copy(self)
        trial.ledger = self.ledger.copy()
        return trial.forecast(state, step, parent, dropped, force_full=force_full)

    def forecast(
        self, state: State, step: object, parent: int | str | None, dropped: Sequence[str], *, force_full: bool
    ) -> SavePlan:
        """Decide as a save does, and weigh what it would write; notes in the ledger what changed."""
        self.ledger.check_may_save()
        prepared = self._prepare(state, step, parent, force_full=force_full)
        self._tell(prepared, _checked_names(dropped, "dropped"))
        arranged = self._as_known(lambda: self._arrange(prepared))
        decided = arranged.decided
        claim, scale = Claim.of(self.ledger.head + 1), Scale(self._store.url)
        writer = Forecaster(scale, claim.prefix, 0, chunk_bytes=self._options.chunk_bytes)
        group_bytes = open_attempt(scale, claim)
        part_lists, content = self._write(writer, prepared, arranged, {}, {})
        sealed = parse_occupant(seal(scale, claim, content, part_lists, group_bytes), claim.sequence)
        assert isinstance(sealed, Commit)
        return SavePlan(
            kind="base" if decided.below is None else "increment",
            sequence=claim.sequence,
            parent=sealed.parent,
            policy=decided.note.name,
            reason=decided.note.reason,
            tables=tuple(planned(entry, prepared.sources[entry.name], part_lists) for entry in content.tables),
            stored_bytes=_size(sealed),
            objects=sum(1 + len(objects_of(part_list.document)) for part_list in part_lists) + 3,
            free_bytes=self._store.free_bytes(),
        )

    def _tell(self, prepared: Prepared, dropped: Sequence[str]) -> None:
        """Note what changed, unless the save is refused; where noting fails, nothing is known to be unchanged."""
        head = self.ledger.head
        try:
            with self._losing(Claim.of(head + 1)):
                self.ledger.check_tables(prepared.sources, dropped)
                self._parent(prepared.parent)
                self.ledger.note(prepared.sources, dropped)
        except InvalidInputError:
            raise
        except BaseException as error:
            self.ledger.origin = None
            is_gone = isinstance(error, PrunedError | DamagedError | StorageError)
            if not is_gone or self.ledger.head == head:  # else an attempt of ours had landed: everything is stored
                raise

    def _prepare(self, state: State, step: object, parent: int | str | None, *, force_full: bool) -> Prepared:
        if not isinstance(state, State):
            raise InvalidInputError(f"a {type(state).__name__} where a checkrun_format.State belongs")
        sources = table_sources(state.tables)
        if force_full:
            if parent not in (None, "auto"):
                raise InvalidInputError(f"force_full saves a base; parent={parent!r} says otherwise")
            sources = {name: replace(source, changed=ALL) for name, source in sources.items()}
        return Prepared(
            step=checked_step(step),
            sources=sources,
            plans={name: self._plans(source) for name, source in sources.items()},
            tensors=tensor_arrays(state.tensors),
            blobs=blob_bytes(state.blobs),
            extra=extra_json(state.extra),
            parent=parent,
            force_full=force_full,
        )

    def _plans_of(self, name: str, fields: Iterable[Field | FieldPlan]) -> list[FieldPlan]:
        """How the run encodes whole rows of a table that it knows these fields of; in the order of their names."""
        return field_plans(
            name,
            sorted((FieldSpec(name=f.name, dtype=f.dtype, columns=f.columns) for f in fields), key=lambda f: f.name),
            {},
            rule=self._options.rule,
            bits=INHERIT,
            encoders={},
            encoder=self._options.encoder,
            store_as={},
            restores=self.ledger.restores(),
        )

    def _plans(self, source: TableSource) -> list[FieldPlan]:
        if isinstance(source.bits, Inherit):
            self._options.rule.check_fields(source.name, [field.name for field in source.fields])
        return field_plans(
            source.name,
            source.fields,
            {},
            rule=self._options.rule,
            bits=source.bits,
            encoders=source.encoders,
            encoder=self._options.encoder,
            store_as=source.store_as,
            restores=self.ledger.restores(),
        )

    def _table_plan(
        self, source: TableSource, plans: Sequence[FieldPlan], below: StoredCheckpoint | None
    ) -> tuple[TablePlan, Sequence[FieldPlan]]:
        """What of a table is stored, and how it is encoded."""
        plan = plan_table(source, self.ledger.below(source, below))
        as_before = self.ledger.as_before(source.name, plans)
        if as_before is None and (source.name in self.ledger.lossy or is_lossy(plans)):
            plan = replace(plan, recent=True)  # rows that did not change may be encoded to other bits (LAY-7)
        return plan, as_before or plans

    def _arrange(self, prepared: Prepared) -> Arranged:
        """Decide what is stored, and have it staged if the caller wants that."""
        decided = self._decide(prepared.parent, force_full=prepared.force_full)
        plans = {
            name: self._table_plan(source, prepared.plans[name], decided.below)
            for name, source in prepared.sources.items()
        }
        staged: Mapping[str, Mapping[str, Values]] = {}
        if prepared.stage is not None:
            stored = {
                name: Stored(rows=as_given(prepared.sources[name], plan), count=plan.count, fields=fields)
                for name, (plan, fields) in plans.items()
                if plan.count
            }
            given = prepared.stage(stored)
            staged = {
                name: checked_staged(prepared.sources[name], what, given.get(name, {})) for name, what in stored.items()
            }
        return Arranged(decided=decided, plans=plans, staged=staged)

    def _write(
        self,
        writer: Writer,
        prepared: Prepared,
        arranged: Arranged,
        stored: dict[str, Touched],
        settled: dict[str, list[FieldPlan]],
    ) -> tuple[list[PartList], Content]:
        """Write all objects of a state; note which rows they are, and which tables are encoded alike ever since."""
        entries = []
        with writer:
            decided = arranged.decided
            for name, source in prepared.sources.items():
                plan, encodings = arranged.plans[name]
                writer.put_part(part_source(source, plan, encodings, arranged.staged.get(name), prepared.check))
                entries.append(entry_of(source, plan))
                stored[name] = touched_by(source, plan)
            for name, values in prepared.tensors.items():
                writer.put_tensor(name, values)
            for name, data in prepared.blobs.items():
                writer.put_blob(name, data)
            inline = len(prepared.extra) <= layout.MAX_INLINE_EXTRA
            span = None if inline else writer.put_span(prepared.extra)
            part_list = writer.finish()
        prepared.check()
        statistics = merged_statistics([part_list])
        settled.update(self._settled(entries, prepared, statistics))
        return [part_list], Content(
            step=prepared.step,
            tables=[with_statistics(entry, statistics.get(entry.name, {})) for entry in entries],
            policy=decided.note,
            parent=decided.below,
            predecessor=self.ledger.latest,
            restores=self.ledger.restores(),
            dropped=self.ledger.dropped(self.ledger.continuing(entries)),
            extra=parse_json(prepared.extra) if inline else None,
            extra_blob=span,
        )

    def _settled(
        self, entries: Sequence[TableEntry], prepared: Prepared, statistics: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, list[FieldPlan]]:
        """The tables that are encoded alike since they were stored full, by the qparams that were then chosen."""
        settled = {}
        for entry in entries:
            plans, told = prepared.plans[entry.name], statistics.get(entry.name, {})
            as_before = self.ledger.as_before(entry.name, plans)
            if entry.storage != "full":
                chosen = as_before
            else:
                chosen = [replace(f, qparams=told.get(f.name, {}).get("qparams")) for f in plans]
                if any(f.bits is not None and f.qparams is None for f in chosen):
                    chosen = None
            if chosen is not None:
                settled[entry.name] = chosen
        return settled

    def _writer(self, claim: Claim) -> Writer:
        return Writer(self._store, claim.prefix, 0, chunk_bytes=self._options.chunk_bytes)

    # Over which checkpoint --------------------------------------------------------------------------------------------

    def _parent(self, parent: int | str | None) -> StoredCheckpoint | None:
        """The checkpoint that the caller names; None for a base, or if the policy is to decide."""
        if parent is None or parent == "auto":
            return None
        origin = self.ledger.legal_origin()
        if origin is None:
            raise InvalidInputError(
                f"parent={parent!r}: this Run's state does not stem from the latest checkpoint; restore it first, or "
                "save a base"
            )
        chain = [below.sequence for below in self.ledger.chain(origin)]
        number = origin.commit.sequence if parent == "latest" else parent
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number not in chain:
            raise InvalidInputError(f"parent={parent!r} is not in the chain of the latest checkpoint: {chain}")
        return self._history.get(int(number))

    def _decide(self, parent: int | str | None, *, force_full: bool = False) -> Decided:
        """Over which checkpoint to save, and why."""
        below, name, reason = self._choose(parent, force_full=force_full)
        bits = self._options.rule.reason(self.ledger.restores())
        note = PolicyNote(name=name, reason=reason if bits is None else f"{reason}; {bits}")
        origin = self.ledger.legal_origin()
        if below is not None and origin is not None:
            chain = [commit for commit in self.ledger.chain(origin) if commit.sequence <= below.commit.sequence]
            spent = self._past(chain).increments
            note = msgspec.structs.replace(note, increments=len(spent), increments_bytes=sum(spent))
        return Decided(below=below, note=note)

    def _choose(self, parent: int | str | None, *, force_full: bool) -> tuple[StoredCheckpoint | None, str, str]:
        origin, rule = self.ledger.legal_origin(), self._options.base_rule
        if origin is None:
            first = self.ledger.latest is None
            why = "nothing is committed" if first else "this Run does not continue the latest checkpoint"
            return None, rule.name, f"a base: {why}"
        if force_full:
            return None, "caller", "a base: every row may have changed, as the caller said (force_full)"
        if parent is None:
            return None, "caller", "a base, as the caller said"
        named = self._parent(parent)
        if named is not None:
            return named, "caller", f"over checkpoint {named.commit.sequence}, as the caller said"
        chain = self.ledger.chain(origin)
        decision = rule.decide(self._past(chain))
        below = None if decision.parent is None else origin
        if decision.parent == "base":
            below = self._history.get(chain[-1].sequence)
        return below, rule.name, decision.reason

    def _past(self, chain: Sequence[Commit]) -> Past:
        base = chain[-1]
        known = self.ledger.increments(base)
        sizes = [_size(increment) for increment in known]
        return Past(base_bytes=_size(base), increments=(*_earlier(base, known), *sizes), layers=len(chain))

    # A stored checkpoint again ----------------------------------------------------------------------------------------

    def rollback(self, sequence: int) -> Commit:
        """Commit the state of an earlier checkpoint; see `Run.rollback`."""
        target = self._history.get(sequence)
        for below in self._history.chain(target):
            below.check()

        def choose(latest: StoredCheckpoint) -> Copy:
            over = self._is_below(sequence, latest)
            reason = f"back to checkpoint {sequence}" + ("" if over else ", which is not in the latest chain: copied")
            return Copy(target=target, over=over, note=PolicyNote(name="rollback", reason=reason))

        return self._copy(choose, rollback_to=sequence)

    def _is_below(self, sequence: int, latest: StoredCheckpoint) -> bool:
        """Whether a checkpoint is in a chain; below damage, which is gone back from, nothing is."""
        try:
            return any(below.commit.sequence == sequence for below in self._history.chain(latest))
        except DamagedError:
            return False

    def compact(self) -> Commit:
        """Commit the latest state as one base; see `Run.compact`."""

        def choose(latest: StoredCheckpoint) -> Copy:
            note = PolicyNote(name="compact", reason=f"checkpoint {latest.commit.sequence} as one base")
            return Copy(target=latest, over=False, note=note)

        return self._copy(choose, rollback_to=None)

    def take_over(self) -> Commit:
        """Commit the latest state unchanged; see `Run.take_over`."""
        note = PolicyNote(name=TAKEOVER, reason="unchanged, to fence off a process that may still write")
        return self._copy(lambda latest: Copy(target=latest, over=True, note=note), rollback_to=None)

    def _copy(self, choose: Callable[[StoredCheckpoint], Copy], *, rollback_to: int | None) -> Commit:
        """Commit the state of a checkpoint again: over it, all unchanged; or copied as a base (RBK-1, CMP-1)."""
        self.ledger.check_may_save()
        if self.ledger.latest is None:
            raise InvalidInputError("nothing was committed when this run was opened: nothing to commit again")
        if rollback_to is None:
            self._history.latest()  # fails at a damaged number above, which may hold a newer state (COM-5)

        def chosen() -> Copy:
            assert self.ledger.latest is not None
            return choose(self._history.get(self.ledger.latest.sequence))

        committed = self._commit(
            chosen, lambda claim, copied: self._write_copy(claim, copied, rollback_to), is_save=False
        )
        self.ledger.copied(committed)
        return committed

    def _write_copy(self, claim: Claim, chosen: Copy, rollback_to: int | None) -> tuple[list[PartList], Content]:
        target = chosen.target
        names = [entry.name for entry in target.manifest.tables]
        with self._writer(claim) as writer:
            if chosen.over:
                entries = [unchanged_entry(target.entry(name)) for name in names]
            else:
                entries = [copy_table(self._history, target, name, writer) for name in names]
            for tensor in target.manifest.tensors:
                writer.put_tensor(tensor.name, target.tensor(tensor.name))
            for blob in target.manifest.blobs:
                writer.put_blob(blob.name, target.blob(blob))
            span = target.manifest.extra_blob
            copied_span = None if span is None else writer.put_span(target.blob(span))
            part_list = writer.finish()
        return [part_list], Content(
            step=target.commit.step,
            tables=entries,
            policy=chosen.note,
            parent=target if chosen.over else None,
            predecessor=self.ledger.latest,
            rollback_to=rollback_to,
            restores=self.ledger.restores() if rollback_to is not None else target.commit.restores,
            dropped=self.ledger.dropped(entries),
            extra=target.manifest.extra,
            extra_blob=copied_span,
        )

    # The commit -------------------------------------------------------------------------------------------------------

    def _commit(
        self, decide: Callable[[], _T], write: Callable[[Claim, _T], tuple[list[PartList], Content]], *, is_save: bool
    ) -> Commit:
        """Decide, stage, commit at the next number; again at the one after, if an earlier attempt of ours holds it."""
        while True:
            claim = Claim.of(self.ledger.head + 1)
            try:
                with self._losing(claim):
                    decided = decide()
                    group_bytes = open_attempt(self._store, claim)
                    part_lists, content = write(claim, decided)
                    check_ground(self._store, content.parent)
                    document = seal(self._store, claim, content, part_lists, group_bytes)
            except BaseException:
                self._discard(claim)
                raise
            self.ledger.attempts[claim.attempt] = is_save
            try:
                return commit(self._store, claim, document)
            except NumberTakenError as loss:
                self._discard(claim)
                self._adopt_or_lose(claim, loss)

    @contextlib.contextmanager
    def _losing(self, claim: Claim) -> Iterator[None]:
        """Where a save fails whose number is taken by now, say so: its objects or its chain may have been pruned."""
        try:
            yield
        except (PrunedError, DamagedError, StorageError):
            loss = taken(self._store, claim)
            if loss is not None:
                self._adopt_or_lose(claim, loss)
            raise

    def _as_known(self, action: Callable[[], _T]) -> _T:
        """Do what reads the run as this writer knows it; again, if it has to go on from an attempt that had landed."""
        while True:
            head = self.ledger.head
            try:
                with self._losing(Claim.of(head + 1)):
                    return action()
            except (PrunedError, DamagedError, StorageError):
                if self.ledger.head == head:
                    raise

    def _adopt_or_lose(self, claim: Claim, loss: NumberTakenError) -> None:
        """HEA-3: go on from an attempt of ours that had landed after all; anything else is the end of this writer."""
        if loss.attempt in self.ledger.attempts:
            self.ledger.landed(self._history.get(claim.sequence).commit)
            return
        self.ledger.lost = str(lost_to(claim, loss))
        raise lost_to(claim, loss) from loss

    def _discard(self, claim: Claim) -> None:
        """Remove what an attempt stored that is not committed and never will be."""
        try:
            with Workers.of(self._store) as workers:
                for key in self._store.list(claim.prefix):
                    workers.run(0, partial(self._store.delete, key))
        except (CheckrunError, OSError):
            pass  # it stays as litter, which every reader ignores

    # Several writers --------------------------------------------------------------------------------------------------

    def begin(self, step: object, writers: object, parent: int | str | None, finished: Callable[[Commit], Any]) -> Save:
        """Begin a save by several writers; see `Run.begin`. `finished` makes of the commit what the caller gets."""
        self.ledger.check_may_save()
        count = checked_integer(writers, "writers")
        if count < 1:
            raise InvalidInputError(f"writers={writers!r}; at least 1")
        number = checked_step(step)
        self._as_known(lambda: self._parent(parent))
        decided = self._as_known(lambda: self._decide(parent))
        below = decided.below
        claim = Claim.of(self.ledger.head + 1)
        self.ledger.attempts[claim.attempt] = False
        token = self._token(claim, count, below)
        group_bytes = open_attempt(self._store, claim)
        overlay = Overlay(self._store, self.ledger, below)

        def finish(*given: Any) -> Any:
            with self.lock:
                with self._losing(claim):
                    committed = commit_staged(*given)
                return finished(committed)

        def commit_staged(
            part_lists: list[PartList], unchanged: Sequence[str], dropped: Sequence[str], extra: Any, step: object
        ) -> Commit:
            self._check_still_next(claim)
            named = (_checked_names(unchanged, "unchanged"), _checked_names(dropped, "dropped"))
            entries = overlay.entries(part_lists, *named)
            content = Content(
                step=number if step is None else checked_step(step),
                tables=entries,
                policy=decided.note,
                parent=below,
                predecessor=self.ledger.latest,
                restores=self.ledger.restores(),
                dropped=self.ledger.dropped(self.ledger.continuing(entries)),
                **_extra_of(extra, part_lists),
            )
            alike = self._encoded_alike(entries, part_lists)
            check_objects(self._store, claim, part_lists)
            check_ground(self._store, below)
            document = seal(self._store, claim, content, part_lists, group_bytes)
            overlay.check_rows(claim, document)
            try:
                committed = commit(self._store, claim, document)
            except NumberTakenError as loss:
                self._adopt_or_lose(claim, loss)
                raise ConcurrentCommitError(
                    f"number {claim.sequence} is taken by an earlier attempt of this Run, which had landed after all: "
                    "begin the save anew"
                ) from loss
            self.ledger.saved(committed, settled=alike)
            self.ledger.lossy.update(e.name for e in entries if any(f.encoder is not None for f in e.fields))
            return committed

        return Save(self._store, token, finish, lambda entry: self._outlook(entry, overlay))

    def _outlook(self, entry: TableEntry, overlay: Overlay) -> Outlook:
        """How a save over a parent may store a table of which only some rows changed."""
        before = {other.name: other for other in self.ledger.latest_tables()}.get(entry.name)
        plans = self._plans_of(entry.name, entry.fields)
        quantized = is_lossy(plans)
        keeps = not quantized and entry.name not in self.ledger.lossy
        continues = keeps or self.ledger.as_before(entry.name, plans) is not None
        continues = continues and bool(self.ledger.continuing([entry]))
        continues = continues and before is not None and same_kind(entry, before)
        known = 0 if before is None else before.rows or 0
        try:
            overlay.check_increment(entry, before)
            overlay.needed(entry)
        except InvalidInputError:
            return Outlook(storage="full", continues=continues, known_rows=known, quantized=quantized)
        return Outlook(storage="changed", continues=continues, known_rows=known, quantized=quantized)

    def _encoded_alike(
        self, entries: Sequence[TableEntry], part_lists: Sequence[PartList]
    ) -> dict[str, list[FieldPlan]]:
        """The tables that all writers encoded alike, and as they have been since they were stored full."""
        found = {}
        for entry in entries:
            plans: list[FieldPlan] | None = self._plans_of(entry.name, entry.fields)
            if entry.storage != "full":
                plans = self.ledger.as_before(entry.name, plans or ())
            plans = None if plans is None else encoded_alike(entry.name, plans, part_lists)
            if plans is not None:
                found[entry.name] = plans
        return found

    def _pinned(self) -> dict[str, dict[str, str]]:
        """The dtype of qparams by which writers encode rows to the same bits as before, by table and field."""
        found = {}
        for name, settled in self.ledger.settled.items():
            plans = self.ledger.as_before(name, self._plans_of(name, settled)) or ()
            found[name] = {plan.name: plan.qparams for plan in plans if plan.qparams is not None}
        return found

    def _token(self, claim: Claim, writers: int, below: StoredCheckpoint | None) -> Token:
        expected = self._options.rule.expected_restores
        return {
            "url": self._store.url,
            "durable": getattr(self._store, "durable", True),
            "sequence": claim.sequence,
            "attempt": claim.attempt,
            "writers": writers,
            "parent": None if below is None else below.commit.sequence,
            "predecessor": None if self.ledger.latest is None else self.ledger.latest.sequence,
            "chunk_bytes": self._options.chunk_bytes,
            "bits": self._options.rule.bits,
            "encoder": None if self._options.encoder is None else list(astuple(self._options.encoder)),
            "expected_restores": None if expected is None else float(expected),
            "restores": self.ledger.restores(),
            "qparams": self._pinned(),
        }

    def _check_still_next(self, claim: Claim) -> None:
        self.ledger.check_may_save()
        if claim.sequence != self.ledger.head + 1:
            raise InvalidInputError(f"checkpoint {self.ledger.head} was committed since this save began: begin it anew")


def checked_step(step: object) -> int | None:
    """Accept a step, or None."""
    if step is None:
        return None
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= int(step) < 2**63:
        raise InvalidInputError(f"step {step!r}; a number from 0 on, or None")
    return int(step)


def _checked_names(names: object, what: str) -> tuple[Any, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidInputError(f"{what}: a {type(names).__name__} where a list of names belongs")
    return tuple(names)


def _extra_of(extra: object, part_lists: Sequence[PartList]) -> dict[str, Any]:
    """The trainer's state of a save by several writers, or where one of them has stored it."""
    spans = [part_list.extra for part_list in part_lists if part_list.extra is not None]
    if len(spans) + (extra is not None) > 1:
        raise InvalidInputError("extra is given twice: by one writer (put_extra), or to commit()")
    data = extra_json(extra)
    if len(data) > layout.MAX_INLINE_EXTRA:
        raise InvalidInputError(f"extra takes {len(data)} bytes; let one of the writers store it, by put_extra()")
    return {"extra": parse_json(data), "extra_blob": spans[0] if spans else None}


def _earlier(base: Commit, known: Sequence[Commit]) -> list[int]:
    """Sizes of the increments before those that are known, which are pruned: they count as equally large (COM-7)."""
    if not known:
        return []
    count, total = known[0].policy.increments, known[0].policy.increments_bytes
    if not isinstance(count, int) or not isinstance(total, int) or not 0 < count < known[0].sequence - base.sequence:
        return []
    return [total // count + (place < total % count) for place in range(count)]


def _size(commit_record: Commit) -> int:
    return commit_record.stored_bytes + commit_record.manifest.bytes
