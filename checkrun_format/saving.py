"""Turning a state, or a stored checkpoint, into the next checkpoint of a run (FORMAT.md 9.1, 9.5)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkrun_format import layout
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
from checkrun_format.assembly import Assembly
from checkrun_format.attempts import Attempts, LandedError
from checkrun_format.blocks import FieldPlan, Values
from checkrun_format.chain import History
from checkrun_format.choosing import Chooser, Decided
from checkrun_format.commit import Claim, Content, open_attempt, seal
from checkrun_format.compaction import copy_table
from checkrun_format.dlpack import Array
from checkrun_format.encodings import Encodings
from checkrun_format.errors import DamagedError, InvalidInputError
from checkrun_format.extra import extra_json, parse_json
from checkrun_format.forecast import Forecaster, SavePlan, Scale
from checkrun_format.integers import whole
from checkrun_format.ledger import TAKEOVER, Ledger
from checkrun_format.manifest import Commit, PolicyNote, parse_occupant
from checkrun_format.partlists import merged_statistics
from checkrun_format.planning import TablePlan, plan_table
from checkrun_format.policy import BaseRule, BitRule
from checkrun_format.quantize import Method
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.sources import blob_bytes, table_sources, tensor_arrays
from checkrun_format.staging import Save
from checkrun_format.state import ALL, State, TableSource
from checkrun_format.writer import PartList, Writer, objects_of

_LOG = logging.getLogger("checkrun_format")


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
class Arranged:
    """A save before it writes: what it stores of each table, and values that were staged for it."""

    decided: Decided
    plans: Mapping[str, tuple[TablePlan, Sequence[FieldPlan]]]
    staged: Mapping[str, Mapping[str, Values]]


class Saver:
    """Commits checkpoints of one run, one after another."""

    def __init__(self, history: History, options: Options, ledger: Ledger | None = None) -> None:
        self.lock = threading.RLock()
        self.ledger = Ledger(history) if ledger is None else ledger
        self._history = history
        self._store = history.store
        self._options = options
        self._encodings = Encodings(self.ledger, options.rule, options.encoder)
        self._chooser = Chooser(history, self.ledger, options.base_rule, options.rule)
        self._attempts = Attempts(history, self.ledger)

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
        if parent is not None:
            self._tell_of_forgotten_restore()
        committed, arranged, content = self._attempts.commit(
            lambda: self._arrange(prepared),
            lambda claim, arranged: self._write(self._writer(claim), prepared, arranged),
            is_save=True,
        )
        stored = {name: touched_by(source, arranged.plans[name][0]) for name, source in prepared.sources.items()}
        settled = self._encodings.settled(content.tables, prepared.plans)
        keys = {name: source.keys.copy() for name, source in prepared.sources.items() if source.keys is not None}
        self.ledger.saved(committed, stored, settled, keys)
        self.ledger.lossy.update(name for name, plans in prepared.plans.items() if is_lossy(plans))
        return committed

    def _tell_of_forgotten_restore(self) -> None:
        latest = self.ledger.latest
        if latest is not None and self.ledger.origin is None:
            _LOG.warning(
                "%s: this Run did not restore checkpoint %d, so this save is a base that does not go on from it; to do "
                "so, restore() before training; to begin anew, use another folder (parent=None: it is meant)",
                self._store.url,
                latest.sequence,
            )

    def plan(
        self, state: State, step: object, parent: int | str | None, dropped: Sequence[str], *, force_full: bool
    ) -> SavePlan:
        """Go the way of a save without its last steps, on copied books; see `Run.plan_save`."""
        trial = Saver(self._history, self._options, self.ledger.copy())
        return trial.forecast(state, step, parent, dropped, force_full=force_full)

    def forecast(
        self, state: State, step: object, parent: int | str | None, dropped: Sequence[str], *, force_full: bool
    ) -> SavePlan:
        """Decide as a save does, and weigh what it would write; notes in the ledger what changed."""
        self.ledger.check_may_save()
        prepared = self._prepare(state, step, parent, force_full=force_full)
        self._tell(prepared, _checked_names(dropped, "dropped"))
        arranged = self._attempts.as_known(lambda: self._arrange(prepared))
        decided = arranged.decided
        claim, scale = Claim.of(self.ledger.head + 1), Scale(self._store.url)
        writer = Forecaster(scale, claim.prefix, 0, chunk_bytes=self._options.chunk_bytes)
        group_bytes = open_attempt(scale, claim)
        part_lists, content = self._write(writer, prepared, arranged)
        sealed = parse_occupant(seal(scale, claim, content, part_lists, group_bytes), claim.sequence)
        assert isinstance(sealed, Commit)
        return SavePlan(
            kind="base" if decided.below is None else "increment",
            sequence=claim.sequence,
            parent=sealed.parent,
            policy=decided.note.name,
            reason=decided.note.reason,
            tables=tuple(planned(entry, prepared.sources[entry.name], part_lists) for entry in content.tables),
            stored_bytes=sealed.bytes,
            objects=sum(1 + len(objects_of(part_list.document)) for part_list in part_lists) + 3,
            free_bytes=self._store.free_bytes(),
        )

    def _tell(self, prepared: Prepared, dropped: Sequence[str]) -> None:
        """Note what changed, unless the save is refused; where noting fails, nothing is known to be unchanged."""
        try:
            with self._attempts.losing(Claim.of(self.ledger.head + 1)):
                self.ledger.check_tables(prepared.sources, dropped)
                self._chooser.named(prepared.parent)
                self.ledger.note(prepared.sources, dropped)
        except InvalidInputError:
            raise
        except BaseException as error:
            self.ledger.origin = None
            if not isinstance(error, LandedError):  # else everything is stored
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
            plans=self._encodings.of_sources(sources),
            tensors=tensor_arrays(state.tensors),
            blobs=blob_bytes(state.blobs),
            extra=extra_json(state.extra),
            parent=parent,
            force_full=force_full,
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
        decided = self._chooser.decide(prepared.parent, force_full=prepared.force_full)
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

    def _write(self, writer: Writer, prepared: Prepared, arranged: Arranged) -> tuple[list[PartList], Content]:
        """Write all objects of a state."""
        decided, entries = arranged.decided, []
        with writer:
            for name, source in prepared.sources.items():
                plan, fields = arranged.plans[name]
                writer.put_part(part_source(source, plan, fields, arranged.staged.get(name), prepared.check))
                entries.append(entry_of(source, plan))
            for name, values in prepared.tensors.items():
                writer.put_tensor(name, values)
            for name, data in prepared.blobs.items():
                writer.put_blob(name, data)
            inline = len(prepared.extra) <= layout.MAX_INLINE_EXTRA
            span = None if inline else writer.put_span(prepared.extra)
            part_list = writer.finish()
        prepared.check()
        statistics = merged_statistics([part_list])
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

    def _writer(self, claim: Claim) -> Writer:
        return Writer(self._store, claim.prefix, 0, chunk_bytes=self._options.chunk_bytes)

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

        committed, _, _ = self._attempts.commit(
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

    # Several writers --------------------------------------------------------------------------------------------------

    def begin(self, step: object, writers: object, parent: int | str | None, finished: Callable[[Commit], Any]) -> Save:
        """Begin a save by several writers; see `Run.begin`. `finished` makes of the commit what the caller gets."""
        self.ledger.check_may_save()
        count = whole(writers, f"writers={writers!r}; a number from 1 on", least=1)
        number = checked_step(step)
        self._attempts.as_known(lambda: self._chooser.named(parent))
        decided = self._attempts.as_known(lambda: self._chooser.decide(parent))
        assembly = Assembly(self._store, self.ledger, self._attempts, self._encodings, decided=decided, step=number)

        def finish(
            part_lists: list[PartList], unchanged: Sequence[str], dropped: Sequence[str], extra: Any, step: object
        ) -> Any:
            kept, gone = _checked_names(unchanged, "unchanged"), _checked_names(dropped, "dropped")
            with self.lock:
                return finished(assembly.commit(part_lists, kept, gone, extra, checked_step(step)))

        return Save(self._store, assembly.token(count, self._options.chunk_bytes), finish, assembly.outlook)


def checked_step(step: object) -> int | None:
    """Accept a step, or None."""
    return None if step is None else whole(step, f"step {step!r}; a number from 0 on, or None", 0, 2**63 - 1)


def _checked_names(names: object, what: str) -> tuple[Any, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidInputError(f"{what}: a {type(names).__name__} where a list of names belongs")
    return tuple(names)
