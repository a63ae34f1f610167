"""The ways to save: at once, in the background, by several writers; and what fails meanwhile (see `machine`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from checkrun_format import layout
from checkrun_format.errors import InvalidInputError
from checkrun_format.testing.books import Books, refused
from checkrun_format.testing.choices import Edit, How, edits, faults, hows
from checkrun_format.testing.model import Held, Rows, Snapshot
from checkrun_format.testing.staged import PartsOfTable, put_tables
from checkrun_format.testing.stores import WRITES, Fault
from checkrun_format.testing.tables import same_bits, seeds
from checkrun_format.testing.trainer import Some


class Saves(Books):
    """The rules that save what the trainer holds."""

    @rule(edits=edits(), how=hows())
    def save(self, edits: list[Edit], how: How) -> None:
        self.trainer.edit(edits)
        self.try_to_save(how, None)

    @rule(
        edits=edits(),
        how=hows(),
        fault=faults(),
        between=st.sampled_from([None, None, "compact", "take_over"]),
        more=edits(),
        again=hows(),
    )
    def fail_and_retry(
        self, *, edits: list[Edit], how: How, fault: Fault, between: str | None, more: list[Edit], again: How
    ) -> None:
        """A save that fails keeps its changed rows for the next one, whatever is committed in between (CMP-1)."""
        self.trainer.edit(edits)
        self.try_to_save(how, fault)
        self.trainer.edit(more)
        if between is not None and self.knows().latest is not None:
            self.copy_latest(fault=None, take_over=between == "take_over")
        self.try_to_save(again, None)

    @rule(edits=edits(), how=hows(), fault=faults())
    def fail(self, edits: list[Edit], how: How, fault: Fault) -> None:
        self.trainer.edit(edits)
        self.try_to_save(how, fault)

    @rule(edits=edits(), how=hows(), more=edits(), again=hows())
    def land_and_go_on(self, edits: list[Edit], how: How, more: list[Edit], again: How) -> None:
        """HEA-3: a save that seemed to fail is there when the next one claims its number."""
        self.trainer.edit(edits)
        self.try_to_save(how, Fault(how="late"))
        self.trainer.edit(more)
        if self.store.kept is not None:
            self.land()
        self.try_to_save(again, None)

    @precondition(lambda self: self.trainer.held and not self.lags)
    @rule(
        pick=st.integers(0, 3),
        operation=st.sampled_from(["shrink", "drop", "kind"]),
        count=st.integers(1, 6),
        seed=seeds(),
        how=hows(),
        again=hows(),
    )
    def fail_and_turn_back(self, *, pick: int, operation: str, count: int, seed: int, how: How, again: How) -> None:
        """A save fails that was told of another table; then the table is again what it was before, with new values."""
        name = sorted(self.trainer.held)[pick % len(self.trainer.held)]
        before = self.trainer.held[name]
        former = Held(kind=before.kind, ids=before.ids.copy(), fields=copy.deepcopy(before.fields))
        self.trainer.edit_table(name, operation, count, seed)
        kept = self.trainer.held[name].ids if operation == "shrink" else former.ids[:0]
        self.try_to_save(how, Fault(at=1, calls=WRITES))
        former.put(np.setdiff1d(former.ids, kept), seed + 1)
        self.trainer.held[name] = former
        self.try_to_save(again, None)

    @precondition(lambda self: self.has_background_saves)
    @rule(
        edits=edits(),
        how=hows(),
        meanwhile=edits(),
        fault=st.none() | faults(),
        cancel_at=st.sampled_from([0, 0, 1, 2, 3, 9]),
        again=st.none() | hows(),
    )
    def save_in_the_background(
        self,
        *,
        edits: list[Edit],
        how: How,
        meanwhile: list[Edit],
        fault: Fault | None,
        cancel_at: int,
        again: How | None,
    ) -> None:
        """The trainer goes on while its state is saved; if that fails, the next save holds what it was told."""
        self.trainer.edit(edits)
        self.try_to_save(how, fault, train=lambda: self.trainer.edit(meanwhile), cancel_at=cancel_at)
        if again is not None:
            self.try_to_save(again, None)

    @precondition(lambda self: self.has_several_writers)
    @rule(
        edits=edits(),
        how=hows(),
        writers=st.integers(1, 3),
        fault=st.none() | st.none() | faults(),
        again=st.none() | hows(),
    )
    def save_by_several_writers(
        self, *, edits: list[Edit], how: How, writers: int, fault: Fault | None, again: How | None
    ) -> None:
        """Each writer stores some rows, or some columns; a save that fails was told nothing."""
        self.trainer.edit(edits)
        self.try_to_save_by(writers, how, fault)
        if again is not None:
            self.try_to_save(again, None)

    @precondition(lambda self: self.knows().latest is not None)
    @rule(fault=st.none() | faults(), take_over=st.booleans())
    def copy_latest(self, fault: Fault | None, take_over: bool) -> None:
        """Compaction and takeover: the state stays, so do origin and pending rows."""
        latest, legal = self.latest, self.legal
        assert latest is not None
        action = self.run.take_over if take_over else self.run.compact
        done = self.attempt(action, self.committed[latest], fault)
        if done is None:
            return
        self.stored[done.sequence] = {}
        self.origin = done.sequence if legal else self.knows().origin
        assert done.parent == (latest if take_over else None)
        assert done.commit.predecessor == latest
        assert done.commit.restores == self.commit_of(latest).restores
        assert list(done.changes_since(latest)) == [] or not take_over
        for change in done.changes_since(latest):
            assert (change.rows.size, change.deleted.size, change.dropped) == (0, 0, False)

    @precondition(lambda self: self.store.kept is not None)
    @rule()
    def land(self) -> None:
        """A commit whose acknowledgement never came takes effect after all."""
        key = self.store.land()
        assert self.kept is not None
        if key is not None:
            number = layout.parse_folder(key.partition("/")[0])
            assert number is not None
            self.note_commit(number, self.kept)
            self.lags, self.author = True, None

    # All at once, or in the background --------------------------------------------------------------------------------

    def parent_of(self, how: How) -> str | int | None:
        if isinstance(how.parent, int) and self.legal:
            assert self.latest is not None
            numbers = self.chain_of(self.latest)
            return numbers[how.parent % len(numbers)]
        return "auto" if isinstance(how.parent, int) or self.lags else how.parent

    def dropped(self) -> list[str]:
        """Tables to be named as dropped; a run that lags behind knows those of its own latest checkpoint."""
        if self.lags:
            known: Any = self.knows().tables
        else:
            known = set() if self.latest is None else set(self.committed[self.latest].tables)
        return sorted(known - set(self.trainer.held))

    def try_to_save(
        self, how: How, fault: Fault | None, train: Callable[[], object] | None = None, cancel_at: int = 0
    ) -> None:
        """Save what the trainer holds; look at what was decided if it is committed."""
        if self.lossless:
            how = replace(how, bits=None, store_as=None)
        state, snapshot = self.trainer.hand_over(how)
        options: dict[str, Any] = {
            "step": snapshot.step,
            "parent": "auto" if how.force_full else self.parent_of(how),
            "dropped": self.dropped(),
        }
        if how.force_full:
            options["force_full"] = True
        parent, legal, before, lagged, clean = options["parent"], self.legal, self.latest, self.lags, self.clean
        if parent == "latest" and not legal and not self.lost:
            refused(InvalidInputError, lambda: self.saves(state, options))
            return
        plan = self.planned_save(state, options) if how.lazy and not lagged else None
        self.trainer.is_told(how, () if before is None else self.snapshot(before).tables)
        if train is None:
            saved = self.attempt(lambda: self.saves(state, options), snapshot, fault)
        else:
            act = lambda: self.saves_in_the_background(state, options, train, cancel_at)  # noqa: E731
            saved = self.attempt(act, snapshot, fault or (Fault() if cancel_at else None))
        self.clean = saved is not None
        if saved is None:
            return
        self.note_saved(saved)
        if plan is not None:
            self.check_plan(plan, saved)
        if not lagged:
            self.check_save(saved, None if how.force_full else parent, before, legal=legal)
            if before is not None and how.force_full:
                self.check_all_changed(saved, before)
            elif before is not None and clean and legal:
                self.check_exactly_recent(saved, before)

    def planned_save(self, state: Any, options: dict[str, Any]) -> Any:
        """Planning writes nothing, and is no save."""
        self.store.arm(Fault(at=1, calls=WRITES))
        plan = self.plans(state, options)
        self.store.arm(None)
        return plan

    def check_plan(self, plan: Any, saved: Any) -> None:
        """What was planned was done."""
        assert (plan.sequence, plan.parent) == (saved.sequence, saved.parent)
        assert plan.kind == ("base" if saved.parent is None else "increment")
        stored = {name: (saved.table(name).storage, saved.table(name).stored_rows) for name in saved.tables}
        assert {table.name: (table.storage, table.stored_rows) for table in plan.tables} == stored

    def note_saved(self, saved: Any) -> None:
        """The trainer's state has been committed."""
        self.origin = saved.sequence
        full = {name for name in saved.tables if saved.table(name).storage == "full"}
        self.stored[saved.sequence] = {**self.trainer.owed, **dict.fromkeys(full)}
        self.trainer.owed = {}

    # By several writers -----------------------------------------------------------------------------------------------

    def try_to_save_by(self, writers: int, how: How, fault: Fault | None) -> None:
        """Save what the trainer holds, part by part; look at what was decided if it is committed."""
        how = replace(how, force_full=False)
        if self.lossless:
            how = replace(how, bits=None, store_as=None)
        legal, before, lagged = self.legal, self.latest, self.lags
        parent = None if lagged else self.parent_of(how)
        if parent == "latest" and not legal:
            refused(InvalidInputError, lambda: self.run.begin(writers=writers, parent=parent))
            return
        _, snapshot = self.trainer.hand_over(how)
        self.trainer.named = {name: set() for name in self.trainer.held}
        self.trainer.note_bits(how)
        changed = {name: self.since_last(name) for name in self.trainer.held}
        act = lambda: self.save_by_writers(writers, how, parent, snapshot)  # noqa: E731
        saved = self.attempt(act, snapshot, fault, adopts_by_refusing=True)
        if saved is None:
            return
        self.trainer.is_told(how, () if before is None else self.snapshot(before).tables)
        self.note_saved(saved)
        self.clean = True
        self.check_save(saved, parent, before, legal=legal)
        if before is not None:
            fresh = self.open_reader()
            self.check_changes(fresh, before, saved.sequence, fresh[before].load())
        if before is not None and legal:
            live = {name: set(held.ids.tolist()) for name, held in self.trainer.held.items()}
            self.trainer.named = {name: some if some is None else some & live[name] for name, some in changed.items()}
            self.check_exactly_recent(saved, before)

    def save_by_writers(self, writers: int, how: How, parent: Any, snapshot: Snapshot) -> Any:
        save = self.run.begin(step=snapshot.step, writers=writers, parent=parent)
        tables = {name: self.parts_of(name, save.token["parent"], how) for name in self.trainer.held}
        lists = put_tables(self.run, save, tables, self.trainer.held, how, snapshot.tensors)
        unchanged = [name for name, parts in tables.items() if parts.storage == "unchanged"]
        return save.commit(lists, unchanged=unchanged, dropped=self.dropped(), extra=copy.deepcopy(snapshot.extra))

    def since_last(self, name: str) -> Some:
        """The rows of a table that changed since the latest checkpoint; None: any, or it continues none."""
        held, latest, owed = self.trainer.held[name], self.latest, self.trainer.owed.get(name, set())
        told = self.trainer.changes(name)
        below = None if latest is None else self.snapshot(latest).tables.get(name)
        if not self.legal or below is None or owed is None or told is None or below.spec != Rows.of(held).spec:
            return None
        return owed | told | (set(below.ids.tolist()) ^ set(held.ids.tolist()))

    def parts_of(self, name: str, parent: int | None, how: How) -> PartsOfTable:
        """What writers have to store of a table over a parent, and what of it changed since the latest checkpoint."""
        held, recent = self.trainer.held[name], self.since_last(name)
        live = set(held.ids.tolist())
        lossy = how.bits is not None or how.store_as is not None or name in self.knows().lossy
        gone = (recent or set()) - live if held.kind.keyed else set[int]()
        full = PartsOfTable(storage="full", ids=live, recent=None if lossy else recent, deleted=gone)
        since = recent
        below = None if parent is None else self.snapshot(parent).tables.get(name)
        if parent is None or since is None or below is None or below.spec != Rows.of(held).spec:
            return full
        for number in range(parent + 1, (self.latest or 0) + 1):
            stored = self.stored.get(number, {name: None}).get(name, set())
            if stored is None:
                return full
            since = since | stored
        since = since | (set(below.ids.tolist()) ^ live)
        if not held.kind.keyed and len(live) < max(
            len(below.ids), len(self.snapshot(self.latest or 0).tables[name].ids)
        ):
            return full
        deleted = since - live if held.kind.keyed else set[int]()
        storage = "changed" if since & live or deleted else "unchanged"
        return PartsOfTable(storage=storage, ids=since & live, recent=full.recent, deleted=deleted)

    # What a save decides ----------------------------------------------------------------------------------------------

    def check_save(self, saved: Any, parent: str | int | None, before: int | None, *, legal: bool) -> None:
        """What a save decides: its parent, LAY-2, LAY-3, HEA-2; what is new to the predecessor is recent (LAY-7)."""
        if parent is None or not legal:
            assert saved.parent is None
        elif parent != "auto":
            assert saved.parent == (before if parent == "latest" else parent)
        below = {} if before is None else self.snapshot(before).tables
        for name in saved.tables:
            rows = self.committed[saved.sequence].tables[name]
            if not legal or name not in below or below[name].spec != rows.spec:
                assert saved.table(name).storage == "full"
                self.check_all_recent(saved, name)

    def check_all_recent(self, saved: Any, name: str) -> None:
        """LAY-7: every row of a table that continues none is recent; for those who can look at parts."""

    def check_all_changed(self, saved: Any, before: int) -> None:
        """LAY-7: after `force_full` every row is reported, once."""
        changes = list(saved.changes_since(before))
        for name, rows in self.committed[saved.sequence].tables.items():
            found = [change.rows.view(np.int64) for change in changes if change.table == name]
            assert same_bits(np.sort(np.concatenate([rows.ids[:0], *found])), rows.ids), name

    def check_exactly_recent(self, saved: Any, before: int) -> None:
        """CHG-2: no row is reported but those that the save named, and new ones."""
        changes = list(saved.changes_since(before))
        for name, rows in self.committed[saved.sequence].tables.items():
            below, named = self.snapshot(before).tables.get(name), self.trainer.named[name]
            if below is None or below.spec != rows.spec or named is None:
                continue
            found = {row for change in changes if change.table == name for row in change.rows.view(np.int64).tolist()}
            wanted = named | (set(rows.ids.tolist()) - set(below.ids.tolist()))
            lossy = name in self.knows().lossy  # rows that are encoded again may be reported (LAY-7)
            assert found >= wanted if lossy else found == wanted
            assert not any(change.dropped for change in changes if change.table == name)
