"""A run under random saves, failures, ways back and prunes, against a dictionary of numpy arrays.

The model holds what the trainer has (`Held`) and, for every committed number, what it had then (`Snapshot`). It knows
nothing of layers, parts or blocks. After each step every new checkpoint must read as its snapshot, and after a prune
every one that no rule lets go.

Another implementation subclasses `ChainMachine` and gives `open_writer` and `open_reader` (and `knows`, where it keeps
its books elsewhere); what these return has the methods of `checkrun_format.Run` that the rules call. For pytest:

    TestMine = MyMachine.TestCase
    TestMine.settings = machine_settings(MyMachine)
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.errors import (
    ConcurrentCommitError,
    HistoryPrunedError,
    InvalidInputError,
    PrunedError,
    StorageError,
)
from checkrun_format.manifest import Commit, Pruned, parse_occupant
from checkrun_format.retention import Keep, Plan
from checkrun_format.stores import Store
from checkrun_format.testing.model import (
    Held,
    Rows,
    Snapshot,
    applied,
    check_narrowed,
    check_quantized,
    check_raw_changes,
    loaded,
)
from checkrun_format.testing.stores import EVERY_CALL, WRITES, Fault, FaultStore, MemoryStore
from checkrun_format.testing.tables import KEYS, Array, Kind, kinds, same_bits, same_fields, seeds, taken

NAMES = ("user", "ä/b", "", "zarr.json")
"""What the tables are called."""

MOST_ROWS = 15
"""How far a dense table grows."""


def machine_settings(machine: type[RuleBasedStateMachine], **options: Any) -> settings:
    """Settings for a machine's test case: those of the profile, and longer histories."""
    return settings(machine.TestCase.settings, **{"stateful_step_count": 30, **options})


class Interrupted(BaseException):
    """A KeyboardInterrupt that cannot be confused with a real one."""


def _disk_full() -> StorageError:
    return StorageError(errno.ENOSPC, "the disk is full")


def faults() -> st.SearchStrategy[Fault]:
    """A call fails, before or after it took effect or halfway; the store is gone; or an acknowledgement is lost."""
    at, error = st.integers(1, 12) | st.integers(1, 150), st.sampled_from([_disk_full, Interrupted])
    calls = st.sampled_from([EVERY_CALL, WRITES])
    some = st.builds(Fault, at=at, how=st.sampled_from(["before", "after", "down"]), calls=calls, error=error)
    halves = st.builds(Fault, at=at, how=st.just("truncate"), calls=st.just(frozenset({"put"})), error=error)
    return some | halves | st.just(Fault(how="late"))


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What a writer believes of its run."""

    head: int
    latest: int | None
    origin: int | None
    restored: bool
    """A restore waits to be counted by the next commit."""
    lossy: frozenset[str]
    """Tables that it stored otherwise than the trainer has them since its last restore."""
    tables: frozenset[str]
    """Tables of the latest checkpoint that it knows; none if it has been pruned, and the writer has noticed."""


@dataclass(frozen=True, kw_only=True)
class How:
    """The choices of one save."""

    force_full: bool
    parent: str | int | None
    changed: str
    more: int
    bits: int | None
    store_as: str | None
    lazy: bool
    seed: int


def hows() -> st.SearchStrategy[How]:
    """Any choices."""
    return st.builds(
        How,
        force_full=st.sampled_from([False] * 9 + [True]),
        parent=st.sampled_from(["auto", "latest", None, 0, 1, 2, 3, -1]),
        changed=st.sampled_from(["ids", "ids", "mask", "set", "all"]),
        more=st.integers(0, 3),
        bits=st.sampled_from([None, 1, 2, 3, 4, 5, 8]),
        store_as=st.sampled_from([None, "float16", "bfloat16"]),
        lazy=st.booleans(),
        seed=seeds(),
    )


def keeps() -> st.SearchStrategy[Keep]:
    """Rules of retention that let go of much."""
    last, every = st.integers(1, 3), st.integers(2, 9)
    some = st.builds(Keep, last=last) | st.builds(Keep, every=every) | st.builds(Keep, last=last, every=every)
    return some | st.just(Keep(newer_than=0)) | st.just(Keep(newer_than=1e9))


Edit = tuple[str, int, int, int]


def edits() -> st.SearchStrategy[list[Edit]]:
    """What happens to the tables between two saves: operation, table, how many rows, seed."""
    operations = ["update", "update", "grow", "grow", "shrink", "shrink", "new", "drop", "kind"]
    edit = st.tuples(st.sampled_from(operations), st.integers(0, 3), st.integers(0, 6), seeds())
    return st.lists(edit, max_size=4)


class ChainMachine(RuleBasedStateMachine):
    """Everything that the requirements promise of histories.

    LAY-1 to LAY-7, RES-1, CHG-1 to CHG-3, RBK-1, RBK-2, CMP-1, CMP-2, HEA-1 to HEA-3, COM-6, TEN-1, TYP-1,
    PRU-1, PRU-2, TAG-2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = FaultStore(self.make_store())
        self.held: dict[str, Held] = {}
        self.told: dict[str, tuple[Kind, set[int]]] = {}
        self.committed: dict[int, Snapshot] = {}
        self.pruned: dict[int, Snapshot] = {}
        self.tags: dict[str, int] = {}
        self.commits: dict[int, Commit] = {}
        self.coarsest: dict[str, int | None] = {}
        self.named: dict[str, set[int] | None] = {}
        self.kept: Snapshot | None = None
        self.lossless = False
        self.clean = True
        self.origin: int | None = None
        self.lags = False
        self.fenced = False
        self.lost = False
        self.restored = False
        self.counter = 0
        self.unchecked: list[int] = []
        self.zombie: Any = None
        self.author: Any = None
        self.run: Any = None

    # What another implementation overrides ----------------------------------------------------------------------------

    def make_store(self) -> Store:
        """Where the run is."""
        return MemoryStore()

    def open_writer(self, policy: str, chunk_bytes: int) -> Any:
        """The run on `self.store`, to be saved to: with the methods of `checkrun_format.Run`."""
        return crf.open_run(self.store, mode="a", policy=policy, chunk_bytes=chunk_bytes)

    def open_reader(self) -> Any:
        """The run on `self.store`, to be read, by somebody who has read nothing of it yet."""
        return crf.open_run(self.store)

    def knows(self) -> Knowledge:
        """What `self.run` itself believes; asked only where it may know less than this model."""
        ledger = self.run._saver.ledger
        return Knowledge(
            head=ledger.head,
            latest=None if ledger.latest is None else ledger.latest.sequence,
            origin=ledger.origin,
            restored=ledger.restored,
            lossy=frozenset(ledger.lossy),
            tables=frozenset(entry.name for entry in ledger.latest_tables()),
        )

    def saves(self, state: crf.State, options: dict[str, Any]) -> Any:
        """Save a state."""
        return self.run.save(state, **options)

    # Setting up -------------------------------------------------------------------------------------------------------

    @initialize(
        chunk_bytes=st.sampled_from([1, 24, 64, 64, 200, 200, 4096]),
        policy=st.sampled_from(["intermittent", "full", "one-shot", "consecutive", "consecutive"]),
        lossless=st.booleans(),
        first=st.lists(st.tuples(kinds(), st.integers(0, 8), seeds()), min_size=1, max_size=3),
    )
    def start(self, *, chunk_bytes: int, policy: str, lossless: bool, first: list[tuple[Kind, int, int]]) -> None:
        """Create the run, and the tables that the trainer begins with."""
        self.open(policy, chunk_bytes)
        self.lossless = lossless  # then it is known exactly what is recent
        for name, (kind, count, seed) in zip(NAMES, first, strict=False):
            self.held[name] = Held.fresh(kind, count, seed)

    def open(self, policy: str, chunk_bytes: int) -> None:
        """Open the run anew; who wrote it before is a zombie from now on."""
        self.zombie = self.run if self.run is not None and self.knows().latest is not None else None
        self.run = self.open_writer(policy, chunk_bytes)
        self.origin, self.lags, self.fenced, self.lost, self.restored = None, False, False, False, False

    def teardown(self) -> None:
        """Every number is there, and what changed between some of them is told."""
        if not self.committed:
            return
        fresh = self.open_reader()
        numbers = sorted(self.committed)
        assert [checkpoint.sequence for checkpoint in fresh.log()] == numbers
        assert fresh.tags() == self.tags
        self.check_facts()
        if len(numbers) % 3 == 0 or len(numbers) < 5:  # it reads everything: a part of the examples has to do
            assert {problem.kind for problem in fresh.verify()} <= {"litter"}
        for lower in range(0, len(numbers), 3):
            state = self.check_checkpoint(fresh, numbers[lower])
            upper = lower + 2 if lower % 2 else (lower + len(numbers)) // 2
            self.check_changes(fresh, numbers[lower], numbers[min(upper, len(numbers) - 1)], state)

    # What the trainer does --------------------------------------------------------------------------------------------

    def edit(self, edits: Iterable[Edit]) -> None:
        for operation, pick, count, seed in edits:
            absent = [name for name in NAMES if name not in self.held]
            if operation == "new" and absent:
                kind = Kind(key_dtype=[None, "int64", "uint64"][seed % 3], columns=1 + seed % 5, moments=seed % 2 > 0)
                self.held[absent[pick % len(absent)]] = Held.fresh(kind, count, seed)
            elif self.held:
                self.edit_table(sorted(self.held)[pick % len(self.held)], operation, count, seed)

    def edit_table(self, name: str, operation: str, count: int, seed: int) -> None:
        held, rng = self.held[name], np.random.default_rng(seed)
        some = rng.permutation(held.ids)[:count]
        if operation == "drop":
            del self.held[name]
        elif operation == "kind":
            self.held[name] = self.other_kind(held, seed)
        elif operation == "grow" and held.kind.keyed:
            held.put(np.sort(rng.permutation(np.array(KEYS))[:count]), seed)
        elif operation == "grow":
            held.put(np.arange(len(held.ids), min(len(held.ids) + count, MOST_ROWS)), seed)
        elif operation == "shrink" and held.kind.keyed:
            held.keep(~np.isin(held.ids, some))
        elif operation == "shrink":
            held.keep(slice(0, max(0, len(held.ids) - count)))
            held.gone = set()
        else:
            held.put(np.sort(some), seed)

    def other_kind(self, held: Held, seed: int) -> Held:
        """The table with other columns, dtype or addressing, all its values new."""
        old = held.kind
        which = seed % 4
        kind = Kind(
            key_dtype=(None if old.keyed else "int64") if which == 0 else old.key_dtype,
            weight=("float16" if old.weight == "float32" else "float32") if which == 1 else old.weight,
            columns=old.columns % 5 + 1 if which == 2 else old.columns,
            moments=not old.moments if which == 3 else old.moments,
        )
        fresh = Held.fresh(kind, len(held.ids), seed)
        if which:
            fresh.ids = held.ids
            fresh.touched, fresh.gone = set(held.ids.tolist()), held.gone
        return fresh

    # Saving -----------------------------------------------------------------------------------------------------------

    @rule(edits=edits(), how=hows())
    def save(self, edits: list[Edit], how: How) -> None:
        self.edit(edits)
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
        self.edit(edits)
        self.try_to_save(how, fault)
        self.edit(more)
        if between is not None and self.knows().latest is not None:
            self.copy_latest(fault=None, take_over=between == "take_over")
        self.try_to_save(again, None)

    @rule(edits=edits(), how=hows(), fault=faults())
    def fail(self, edits: list[Edit], how: How, fault: Fault) -> None:
        self.edit(edits)
        self.try_to_save(how, fault)

    @rule(edits=edits(), how=hows(), more=edits(), again=hows())
    def land_and_go_on(self, edits: list[Edit], how: How, more: list[Edit], again: How) -> None:
        """HEA-3: a save that seemed to fail is there when the next one claims its number."""
        self.edit(edits)
        self.try_to_save(how, Fault(how="late"))
        self.edit(more)
        if self.store.kept is not None:
            self.land()
        self.try_to_save(again, None)

    @precondition(lambda self: self.held and not self.lags)
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
        name = sorted(self.held)[pick % len(self.held)]
        before = self.held[name]
        former = Held(kind=before.kind, ids=before.ids.copy(), fields=copy.deepcopy(before.fields))
        self.edit_table(name, operation, count, seed)
        kept = self.held[name].ids if operation == "shrink" else former.ids[:0]
        self.try_to_save(how, Fault(at=1, calls=WRITES))
        former.put(np.setdiff1d(former.ids, kept), seed + 1)
        self.held[name] = former
        self.try_to_save(again, None)

    @property
    def latest(self) -> int | None:
        return max(self.committed, default=None)

    @property
    def legal(self) -> bool:
        """HEA-2, as far as this model knows."""
        return self.origin is not None and self.origin == self.latest and not self.lags

    def chain_of(self, number: int) -> list[int]:
        found = [number]
        while (parent := self.commit_of(found[-1]).parent) is not None:
            found.append(parent)
        return found

    def commit_of(self, number: int) -> Commit:
        return self.commits[number]

    def snapshot(self, number: int) -> Snapshot:
        """What a number held, be it pruned since."""
        return self.committed[number] if number in self.committed else self.pruned[number]

    def parent_of(self, how: How) -> str | int | None:
        if isinstance(how.parent, int) and self.legal:
            assert self.latest is not None
            numbers = self.chain_of(self.latest)
            return numbers[how.parent % len(numbers)]
        return "auto" if isinstance(how.parent, int) or self.lags else how.parent

    def try_to_save(self, how: How, fault: Fault | None) -> None:
        """Save what the trainer holds; look at what was decided if it is committed."""
        if self.lossless:
            how = replace(how, bits=None, store_as=None)
        state, snapshot, options = self.handed_over(how)
        parent, legal, before, lagged, clean = options["parent"], self.legal, self.latest, self.lags, self.clean
        if parent == "latest" and not legal and not self.lost:
            refused(InvalidInputError, lambda: self.saves(state, options))
            return
        for name, held in self.held.items():
            held.touched, held.gone = set(), set()
            if how.bits is not None:
                self.coarsest[name] = min(how.bits, self.coarsest.get(name) or 8)
        self.told = {name: (held.kind, set(held.ids.tolist())) for name, held in self.held.items()}
        saved = self.attempt(lambda: self.saves(state, options), snapshot, fault)
        self.clean = saved is not None
        if saved is None:
            return
        self.origin = saved.sequence
        if not lagged:
            self.check_save(saved, None if how.force_full else parent, before, legal=legal)
        if not lagged and before is not None:
            if how.force_full:
                self.check_all_changed(saved, before)
            elif clean and legal:
                self.check_exactly_recent(saved, before)

    def handed_over(self, how: How) -> tuple[crf.State, Snapshot, dict[str, Any]]:
        """The state as it is handed to a save, what must then be read, and the save's options."""
        known = set() if self.latest is None else set(self.committed[self.latest].tables)
        self.counter += 1
        rest: dict[str, Any] = {
            "tensors": {"t": np.arange(self.counter % 7, dtype=np.float32)},
            "extra": {"counter": self.counter},
        }
        tables = {name: self.table(name, held, how) for name, held in self.held.items()}
        options = {
            "step": self.counter,
            "parent": "auto" if how.force_full else self.parent_of(how),
            "dropped": self.dropped_as_the_run_sees() if self.lags else sorted(known - set(self.held)),
        }
        if how.force_full:
            options["force_full"] = True
            for table in tables.values():
                table.changed = None  # nothing need be named
        snapshot = Snapshot(
            tables={name: Rows.of(held) for name, held in self.held.items()}, step=self.counter, **copy.deepcopy(rest)
        )
        return crf.State(tables=tables, **rest), snapshot, options

    def dropped_as_the_run_sees(self) -> list[str]:
        """A run that lags behind knows the tables of its own latest checkpoint."""
        return sorted(self.knows().tables - set(self.held))

    def table(self, name: str, held: Held, how: How) -> crf.Table:
        """The table as it is handed to a save: rows in any order if keyed, changed rows in one of their forms."""
        rng = np.random.default_rng(how.seed)
        order = rng.permutation(len(held.ids)) if held.kind.keyed else np.arange(len(held.ids))
        keys = held.ids[order] if held.kind.keyed else None
        return crf.Table(
            taken(copy.deepcopy(held.fields), order),
            keys=keys.view(held.kind.key_dtype) if keys is not None else None,
            changed=self.changed(name, held, how, order, rng),
            deleted=self.deleted(held, how, rng),
            bits=how.bits,
            store_as={} if how.store_as is None else {"slow": how.store_as},
        )

    def changed(self, name: str, held: Held, how: How, order: Array, rng: np.random.Generator) -> Any:
        must = set(held.touched)
        told = self.told.get(name)
        if told is None or told[0] != held.kind:
            must = set(rng.permutation(list(must))[: how.more].tolist())  # all is new to a save: nothing need be named
        elif how.lazy:
            must &= told[1]  # new rows and keys need not be named
        more = rng.permutation(held.ids)[: how.more].tolist()
        named = np.array(sorted(must | set(more)), np.int64)
        self.named[name] = None if how.changed == "all" else set(named.tolist())
        if how.changed == "all":
            return crf.ALL
        if how.changed == "mask":
            return np.isin(held.ids, named)[order]
        if how.changed == "set" and held.kind.key_dtype != "uint64":
            return set(named.tolist())
        shuffled = rng.permutation(named)
        return shuffled.view(np.uint64) if held.kind.key_dtype == "uint64" else shuffled

    def deleted(self, held: Held, how: How, rng: np.random.Generator) -> Any:
        if not held.kind.keyed or how.lazy:
            return None  # that keys are gone is seen
        return rng.permutation(np.array(sorted(held.gone), np.int64)).view(held.kind.key_dtype)

    # The other ways to commit, and to go on ---------------------------------------------------------------------------

    @precondition(lambda self: self.knows().latest is not None)
    @rule(pick=st.integers(0, 30), fault=st.none() | faults(), restores=st.booleans())
    def rollback(self, pick: int, fault: Fault | None, restores: bool) -> None:
        number = sorted(self.committed)[pick % len(self.committed)]
        done = self.attempt(lambda: self.run.rollback(number), self.committed[number], fault)
        if done is not None:
            self.origin = None
            assert done.commit.rollback_to == number
            assert all(done.table(name).storage == "unchanged" for name in done.tables) or done.parent is None
            assert done.parent in (None, number)
            if restores:
                self.restore_latest()

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
        self.origin = done.sequence if legal else self.knows().origin
        assert done.parent == (latest if take_over else None)
        assert done.commit.predecessor == latest
        assert done.commit.restores == self.commit_of(latest).restores
        assert list(done.changes_since(latest)) == [] or not take_over
        for change in done.changes_since(latest):
            assert (change.rows.size, change.deleted.size, change.dropped) == (0, 0, False)

    @precondition(lambda self: self.committed)
    @rule(pick=st.integers(0, 30))
    def restore(self, pick: int) -> None:
        self.take_up(self.run.restore(number := sorted(self.committed)[pick % len(self.committed)]), number)

    @precondition(lambda self: self.committed)
    @rule()
    def restore_latest(self) -> None:
        assert self.latest is not None
        self.take_up(self.run.restore(), self.latest)

    def take_up(self, state: crf.State, number: int) -> None:
        snapshot = self.committed[number]
        self.origin, self.restored, self.held, self.told, self.clean = number, True, {}, {}, True
        self.check_state(state, snapshot)
        for name, rows in snapshot.tables.items():
            table = state.tables[name]
            weight = table["weight"]
            kind = Kind(
                key_dtype=rows.key_dtype,
                weight=weight.dtype.name,
                columns=weight.shape[1],
                moments="moments" in table.fields,
            )
            self.held[name] = Held(kind=kind, ids=rows.ids.copy(), fields=dict(table.fields))
            self.told[name] = (kind, set(rows.ids.tolist()))

    @rule(
        restores=st.booleans(),
        policy=st.sampled_from(["intermittent", "one-shot", "consecutive"]),
        chunk_bytes=st.sampled_from([40, 100, 500]),
    )
    def reopen(self, restores: bool, policy: str, chunk_bytes: int) -> None:
        self.open(policy, chunk_bytes)
        if restores and self.committed:
            self.restore_latest()

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

    @precondition(lambda self: self.committed and not self.lags)
    @rule(way=st.sampled_from(["take_over", "compact", "rollback"]), pick=st.integers(0, 30))
    def another_writer_commits(self, way: str, pick: int) -> None:
        """HEA-3: this run's next save is refused, and has lost nothing."""
        number = self.latest
        assert number is not None
        other = self.open_writer("consecutive", 64)
        if way == "rollback":
            number = sorted(self.committed)[pick % len(self.committed)]
            done = other.rollback(number)
        else:
            done = getattr(other, way)()
        self.note_commit(done.sequence, self.committed[number])
        self.fenced, self.lags, self.author = True, True, other

    @precondition(lambda self: self.zombie is not None and self.author is self.run)
    @rule()
    def a_zombie_wakes(self) -> None:
        """HEA-3: its number is taken by now."""
        refused(ConcurrentCommitError, self.zombie.compact)
        assert not self.is_committed((self.latest or 0) + 1)
        self.zombie = None

    # Retention --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.committed)
    @rule(pick=st.integers(0, 30), name=st.sampled_from(["best", "0.1-rc"]), fault=st.none() | faults())
    def tag(self, pick: int, name: str, fault: Fault | None) -> None:
        """TAG-2: what has a name stays; when naming fails, the name is where it was, or where it should be."""
        number = sorted(self.committed)[pick % len(self.committed)]
        done = self.do(lambda: self.run.tag(name, number), fault)
        tags = self.open_reader().tags()
        new = {**self.tags, name: number}
        assert tags == new or (not done and tags == self.tags)
        self.tags = tags

    @precondition(lambda self: self.tags)
    @rule(pick=st.integers(0, 1))
    def untag(self, pick: int) -> None:
        name = sorted(self.tags)[pick % len(self.tags)]
        self.run.untag(name)
        del self.tags[name]

    @precondition(lambda self: len(self.committed) > 1)
    @rule(keep=keeps(), fault=st.none() | faults(), by_another=st.booleans())
    def prune(self, keep: Keep, fault: Fault | None, by_another: bool) -> None:
        """PRU-1, PRU-2: what may go goes; when a prune fails, some of it."""
        run = self.open_writer("consecutive", 64) if by_another else self.run
        plan = self.planned(run, keep)
        done = self.do(lambda: run.prune(plan), fault)
        gone = self.note_pruned(plan)
        assert not done or gone == plan.goes
        for number in gone if done else ():
            assert not self.store.store.list(layout.attempt_prefix(number, self.commit_of(number).attempt))

    @precondition(lambda self: len(self.committed) > 1)
    @rule(
        edits=edits(),
        how=st.none() | hows(),
        keep=keeps(),
        at=st.integers(1, 20) | st.integers(1, 80),
        plans_early=st.booleans(),
    )
    def save_during_a_prune(
        self, *, edits: list[Edit], how: How | None, keep: Keep, at: int, plans_early: bool
    ) -> None:
        """PRU-2: another process prunes between two calls of a save, or of a compaction; its chain stays whole."""
        other = self.open_writer("consecutive", 64)
        plans = [self.planned(other, keep)] if plans_early else []
        gone: list[list[int]] = []

        def meanwhile() -> None:
            plan = plans[0] if plans else self.planned(other, keep)
            other.prune(plan)
            gone.append(self.note_pruned(plan))
            assert gone[0] == plan.goes

        fault = Fault(at=at, how="delay", meanwhile=meanwhile)
        if how is None:
            self.copy_latest(fault=fault, take_over=False)
        else:
            self.edit(edits)
            self.try_to_save(how, fault)

    def planned(self, run: Any, keep: Keep) -> Plan:
        """What a prune would do: what the rules say, and planning writes nothing."""
        self.store.arm(Fault(at=1, calls=WRITES))
        plan: Plan = run.plan_prune(keep)
        self.store.arm(None)
        commits = {number: self.commit_of(number) for number in sorted(self.committed)}
        if self.is_committed(head := max(commits) + 1):  # just now, by a save that is not over yet
            commits[head] = self.read_commit(head)
        stays = must_stay(keep, commits, self.tags.values())
        assert set(plan.stays) == stays
        assert set(plan.goes) == commits.keys() - stays
        return plan

    def note_pruned(self, plan: Plan) -> list[int]:
        """The numbers that a prune has removed: some of those that it may."""
        fresh = self.open_reader()
        gone = [number for number in sorted(self.committed) if self.is_pruned(number)]
        assert set(gone) <= set(plan.goes)
        for number in gone:
            refused(PrunedError, partial(fresh.__getitem__, number))
            self.pruned[number] = self.committed.pop(number)
        if gone:
            self.unchecked = sorted(self.committed)
        return gone

    def is_pruned(self, number: int) -> bool:
        data = self.store.store.get(layout.commit_key(number))
        return data is not None and isinstance(parse_occupant(data, number), Pruned)

    def do(self, action: Callable[[], object], fault: Fault | None) -> bool:
        """Do what commits nothing; whether it came to its end."""
        self.store.arm(fault)
        try:
            action()
        except (Interrupted, StorageError) as error:
            note(f"failed: {error!r}")
            assert fault is not None
            return False
        finally:
            self.store.arm(None)
        return True

    # What is committed ------------------------------------------------------------------------------------------------

    def attempt(self, action: Callable[[], Any | None], snapshot: Snapshot, fault: Fault | None) -> Any | None:
        """Do what commits; afterwards the store tells what is committed, whether the call failed or not."""
        head = max(self.committed, default=0)
        lagged = self.lags
        kept = self.store.kept
        self.store.arm(fault)
        try:
            done = action()
        except (Interrupted, StorageError) as error:
            note(f"failed: {error!r}")
            assert fault is not None
            done = None
        except ConcurrentCommitError:
            assert self.lags
            self.lost = True
            done = None
        finally:
            self.store.arm(None)
            if self.store.kept is not kept:
                self.kept = snapshot
        if done is not None:
            assert not self.fenced
            assert done.sequence == head + 1
            assert done.commit.predecessor == (head or None)
            if done.commit.policy.name not in ("compact", "takeover"):  # these two are no answer to a restore
                before = 0 if head == 0 else self.commit_of(head).restores
                assert lagged or done.commit.restores == before + self.restored
                self.restored = False
            self.note_commit(done.sequence, snapshot)
            self.author = self.run
        elif self.is_committed(head + 1):
            self.note_commit(head + 1, snapshot)
            lagged = True  # or what failed was the reading of it afterwards
        known = self.knows()
        self.lags = known.head < max(self.committed, default=0)
        if known.origin is None:
            self.origin = None  # what failed was the reading of it
        if lagged:  # what an adopted attempt leaves is up to the run; what it then saves is not
            self.origin, self.restored = known.origin, known.restored
        return done

    def is_committed(self, number: int) -> bool:
        """Whether the store holds a commit, or anything in its place."""
        return self.store.store.get(layout.commit_key(number)) is not None

    def note_commit(self, number: int, snapshot: Snapshot) -> None:
        """A number was committed with this state."""
        self.committed[number], self.commits[number] = snapshot, self.read_commit(number)
        self.unchecked.append(number)

    def read_commit(self, number: int) -> Commit:
        data = self.store.store.get(layout.commit_key(number))
        assert data is not None
        commit = parse_occupant(data, number)
        assert isinstance(commit, Commit)
        return commit

    # What must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def new_checkpoints_read_as_their_snapshots(self) -> None:
        if self.lost:
            self.reopen(restores=False, policy="consecutive", chunk_bytes=64)
        if self.unchecked:
            fresh = self.open_reader()
            assert fresh.latest().sequence == self.latest
            for number in self.unchecked:
                self.check_checkpoint(fresh, number)
            self.unchecked = []

    @precondition(lambda self: self.committed)
    @rule(one=st.integers(0, 30), other=st.integers(0, 30), max_bytes=st.sampled_from([1, 60, 64 << 20]))
    def changes(self, one: int, other: int, max_bytes: int) -> None:
        """CHG-1, CHG-2, LAY-7: what changed since p, applied on what is read at p, gives what is read at c."""
        numbers = sorted(self.committed)
        low, high = sorted((numbers[one % len(numbers)], numbers[other % len(numbers)]))
        run = self.open_reader()
        self.check_changes(run, low, high, run[low].load(), max_bytes)
        if self.is_told(low, high):
            check_raw_changes(run[high], low, max_bytes)

    @precondition(lambda self: self.committed)
    @rule(pick=st.integers(0, 30), seed=seeds())
    def read_some(self, pick: int, seed: int) -> None:
        """RES-1: slices and takes agree with the whole."""
        number = sorted(self.committed)[pick % len(self.committed)]
        checkpoint = self.open_reader()[number]
        rng = np.random.default_rng(seed)
        for name in checkpoint.tables:
            view = checkpoint.table(name)
            whole = view.read()
            low, high = sorted(rng.integers(0, len(view) + 1, 2).tolist())
            left, right = sorted(rng.integers(0, 9, 2).tolist())
            for field_name, found in view.read(slice(low, high), columns=slice(left, right)).items():
                wanted = whole[field_name][low:high]
                assert same_bits(found, wanted if wanted.ndim == 1 else wanted[:, left:right])
            places = rng.integers(0, len(view), int(rng.integers(0, 6))) if len(view) else np.zeros(0, np.int64)
            ids = view.keys()[places] if view.addressing == "keyed" else places
            for field_name, found in view.take(ids).items():
                assert same_bits(found, whole[field_name][places])

    def check_checkpoint(self, run: Any, number: int) -> crf.State:
        snapshot = self.committed[number]
        checkpoint = run[number]
        assert checkpoint.step == snapshot.step
        state: crf.State = checkpoint.load()
        self.check_state(state, snapshot)
        return state

    def check_state(self, state: crf.State, snapshot: Snapshot) -> None:
        assert state.extra == snapshot.extra
        assert state.tensors.keys() == snapshot.tensors.keys()
        for name, tensor in snapshot.tensors.items():
            assert same_bits(state.tensors[name], tensor)
        assert set(state.tables) == set(snapshot.tables)
        for name, rows in snapshot.tables.items():
            self.check_rows(name, loaded(state.tables[name]), rows)

    def check_rows(self, name: str, found: Rows, wanted: Rows) -> None:
        assert found.spec == wanted.spec
        assert same_bits(found.ids, wanted.ids), (name, found.ids, wanted.ids)
        for field_name, values_wanted in wanted.fields.items():
            got = found.fields[field_name]
            if field_name == "weight" and self.coarsest.get(name) is not None:
                check_quantized(got, values_wanted, self.coarsest[name] or 8)
            elif field_name == "slow":
                check_narrowed(got, values_wanted)
            else:
                assert same_bits(got, values_wanted), (name, field_name, got, values_wanted)

    def is_told(self, low: int, high: int) -> bool:
        """CHG-1, CHG-3: whether all checkpoints on the way are still there."""
        ways, met = [(low, high)], set[int]()
        while ways:
            low, high = ways.pop()
            for number in set(range(low + 1, high + 1)) - met:  # each is the predecessor of the next
                met.add(number)
                commit = self.commit_of(number)
                if commit.rollback_to is not None:
                    ways.append((commit.rollback_to, commit.predecessor or 0))
        return met <= self.committed.keys()

    def check_changes(self, run: Any, low: int, high: int, before: crf.State, max_bytes: int = 64 << 20) -> None:
        if not self.is_told(low, high):
            refused(HistoryPrunedError, lambda: list(run[high].changes_since(low, max_bytes=max_bytes)))
            return
        state = {name: loaded(table) for name, table in before.tables.items()}
        after = applied(state, run[high].changes_since(low, max_bytes=max_bytes))
        wanted = {name: loaded(table) for name, table in run[high].load().tables.items()}
        assert set(after) == set(wanted)
        for name, rows in wanted.items():
            assert same_bits(after[name].ids, rows.ids), (name, after[name].ids, rows.ids)
            assert same_fields(after[name].fields, rows.fields), (name, after[name].fields, rows.fields)

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
            below, named = self.snapshot(before).tables.get(name), self.named[name]
            if below is None or below.spec != rows.spec or named is None:
                continue
            found = {row for change in changes if change.table == name for row in change.rows.view(np.int64).tolist()}
            wanted = named | (set(rows.ids.tolist()) - set(below.ids.tolist()))
            lossy = name in self.knows().lossy  # rows that are encoded again may be reported (LAY-7)
            assert found >= wanted if lossy else found == wanted
            assert not any(change.dropped for change in changes if change.table == name)

    def check_facts(self) -> None:
        """COM-6 and 5.2, from the commits alone."""
        last: int | None = None
        for number, commit in sorted(self.commits.items()):
            assert commit.predecessor == last
            assert commit.parent is None or commit.parent in self.chain_of(last or 0)
            restores = 0 if last is None else self.commits[last].restores
            assert restores <= commit.restores <= restores + 1
            last = number


def must_stay(keep: Keep, commits: dict[int, Commit], tagged: Iterable[int]) -> set[int]:
    """What a prune has to keep of these commits, in ascending order; told in another way than the library's."""
    numbers = list(commits)
    stays = {numbers[-1], *tagged, *numbers[-(keep.last or 1) :]}
    steps = {number: commit.step or 0 for number, commit in commits.items()}
    if keep.every is not None:
        for multiple in range(0, max(steps.values()) + 1, keep.every):
            there = [n for n in numbers if multiple <= steps[n] < multiple + keep.every]
            stays |= set([n for n in there if all(steps[m] >= multiple for m in numbers if m > n)][:1])
    if keep.newer_than:
        stays = set(numbers)
    for number in reversed(numbers):
        parent = commits[number].parent
        if number in stays and parent is not None:
            stays.add(parent)
    return stays


def refused(error: type[Exception], action: Callable[[], object]) -> None:
    """An action must raise this error."""
    try:
        action()
    except error:
        return
    raise AssertionError(f"no {error.__name__} was raised")
