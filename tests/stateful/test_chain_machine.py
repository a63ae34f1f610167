"""A run under random saves, failures and ways back, against a dictionary of numpy arrays.

The model holds what the trainer has (`Held`) and, for every committed number, what it had then (`Snapshot`). It knows
nothing of layers, parts or blocks. After each step every new checkpoint must read as its snapshot.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import checkrun_format as crf
from checkrun_format import chain, reader, writer
from checkrun_format.changes import Changes
from checkrun_format.errors import ConcurrentCommitError, InvalidInputError, StorageError
from checkrun_format.ledger import Ledger
from checkrun_format.manifest import Commit, parse_occupant
from checkrun_format.stores import Buffer
from tests.property.strategies import (
    KEYS,
    Array,
    Fields,
    Ids,
    Kind,
    MemoryStore,
    joined,
    kinds,
    same_bits,
    same_fields,
    seeds,
    taken,
    values,
)

NAMES = ("user", "ä/b", "", "zarr.json")
MOST_ROWS = 15
NARROWED = 2.0**-8
"""The coarsest relative error of a narrowed value (RAW-1)."""


class Interrupted(BaseException):
    """A KeyboardInterrupt that cannot be confused with a real one."""


class FaultyStore(MemoryStore):
    """Fails at the k-th call, before or after it took effect; or keeps a commit back, to land later."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        self.reads = True
        self.after = False
        self.error: BaseException = Interrupted()
        self.keeps_commit = False
        self.kept: tuple[str, bytes, Snapshot] | None = None
        self.snapshot: Snapshot | None = None

    def arm(self, fault: Fault | None, snapshot: Snapshot | None = None) -> None:
        self.snapshot = snapshot
        fault = fault or Fault()
        self.left, self.reads, self.after, self.keeps_commit = fault.at, fault.reads, fault.after, fault.late
        self.error = Interrupted() if fault.interrupts else StorageError(errno.ENOSPC, "the disk is full")

    def _failing(self, effect: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise self.error
        result = effect()
        if self.left == 0:
            raise self.error
        return result

    def get(self, key: str) -> bytes | None:
        data: bytes | None = (
            self._failing(lambda: super(FaultyStore, self).get(key)) if self.reads else super().get(key)
        )
        return data

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        size: int = self._failing(lambda: super(FaultyStore, self).put(key, buffers))
        return size

    def create(self, key: str, data: bytes) -> None:
        if self.keeps_commit and key not in self.objects:
            assert self.snapshot is not None
            self.kept = (key, data, self.snapshot)
            raise self.error
        self._failing(lambda: super(FaultyStore, self).create(key, data))

    def sync(self, prefix: str) -> None:
        self._failing(lambda: super(FaultyStore, self).sync(prefix))

    def delete(self, key: str) -> None:
        self._failing(lambda: super(FaultyStore, self).delete(key))

    def land(self) -> tuple[int, Snapshot] | None:
        """Let the commit that was kept back take effect, unless its number is taken by now."""
        assert self.kept is not None
        (key, data, snapshot), self.kept = self.kept, None
        if key in self.objects:
            return None
        self.objects[key] = data
        return int(key.partition("/")[0]), snapshot


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The store fails at its `at`-th call, or write; or (late) keeps the commit back and loses the acknowledgement."""

    at: int = 0
    reads: bool = True
    after: bool = False
    interrupts: bool = False
    late: bool = False


def faults() -> st.SearchStrategy[Fault]:
    at = st.integers(1, 12) | st.integers(1, 150)
    some = st.builds(Fault, at=at, reads=st.booleans(), after=st.booleans(), interrupts=st.booleans())
    return some | st.just(Fault(late=True))


@dataclass(kw_only=True)
class Held:
    """A table as the trainer holds it: rows by number or key, ascending; and what it has yet to tell a save."""

    kind: Kind
    ids: Ids
    fields: Fields
    touched: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    @classmethod
    def fresh(cls, kind: Kind, count: int, seed: int) -> Held:
        ids = np.sort(np.random.default_rng(seed).permutation(KEYS)[:count]) if kind.keyed else np.arange(count)
        held = cls(kind=kind, ids=ids, fields=values(kind, len(ids), seed))
        held.touched = set(ids.tolist())
        return held

    def keep(self, places: Any) -> None:
        """Keep these places only; the others are gone."""
        kept = self.ids[places]
        self.gone |= set(self.ids.tolist()) - set(kept.tolist())
        self.touched -= self.gone
        self.ids, self.fields = kept, taken(self.fields, places)

    def put(self, ids: Ids, seed: int) -> None:
        """Give rows new values; those that are not there are added."""
        fresh = values(self.kind, len(ids), seed)
        old = ~np.isin(self.ids, ids)
        everything = np.concatenate([self.ids[old], ids])
        order = np.argsort(everything)
        self.ids = everything[order]
        self.fields = taken(joined([taken(self.fields, old), fresh]), order)
        self.touched |= set(ids.tolist())
        self.gone -= set(ids.tolist())


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A table at one checkpoint."""

    key_dtype: str | None
    ids: Ids
    fields: Fields

    @classmethod
    def of(cls, held: Held) -> Rows:
        return cls(key_dtype=held.kind.key_dtype, ids=held.ids.copy(), fields=copy.deepcopy(held.fields))

    @property
    def spec(self) -> object:
        """What LAY-2 compares."""
        return self.key_dtype, {name: (array.dtype.name, array.shape[1:]) for name, array in self.fields.items()}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that a checkpoint must hold."""

    tables: dict[str, Rows]
    tensors: dict[str, Array]
    extra: Any
    step: int | None


@dataclass(frozen=True, kw_only=True)
class How:
    """The choices of one save."""

    parent: str | int | None
    changed: str
    more: int
    bits: int | None
    store_as: str | None
    lazy: bool
    seed: int


def hows() -> st.SearchStrategy[How]:
    return st.builds(
        How,
        parent=st.sampled_from(["auto", "latest", None, 0, 1, 2, 3, -1]),
        changed=st.sampled_from(["ids", "ids", "mask", "set", "all"]),
        more=st.integers(0, 3),
        bits=st.sampled_from([None, 1, 2, 3, 4, 5, 8]),
        store_as=st.sampled_from([None, "float16", "bfloat16"]),
        lazy=st.booleans(),
        seed=seeds(),
    )


Edit = tuple[str, int, int, int]


def edits() -> st.SearchStrategy[list[Edit]]:
    """What happens to the tables between two saves: operation, table, how many rows, seed."""
    operations = ["update", "update", "grow", "grow", "shrink", "shrink", "new", "drop", "kind"]
    edit = st.tuples(st.sampled_from(operations), st.integers(0, 3), st.integers(0, 6), seeds())
    return st.lists(edit, max_size=4)


class ChainMachine(RuleBasedStateMachine):
    """LAY-1 to LAY-7, RES-1, CHG-1, CHG-2, RBK-1, RBK-2, CMP-1, CMP-2, HEA-1 to HEA-3, COM-6, TEN-1, TYP-1."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FaultyStore()
        self.held: dict[str, Held] = {}
        self.told: dict[str, tuple[Kind, set[int]]] = {}
        self.committed: dict[int, Snapshot] = {}
        self.commits: dict[int, Commit] = {}
        self.coarsest: dict[str, int | None] = {}
        self.named: dict[str, set[int] | None] = {}
        self.clean = True
        self.origin: int | None = None
        self.lags = False
        self.lost = False
        self.restored = False
        self.counter = 0
        self.unchecked: list[int] = []
        self.run: crf.Run
        self.patch = pytest.MonkeyPatch()

    # Setting up -------------------------------------------------------------------------------------------------------

    @initialize(
        small=st.sampled_from([0, 64, 256, 4 << 20]),
        pool=st.sampled_from([1, 100, 1000, 64 << 20]),
        piece=st.sampled_from([1, 40, 200, 16 << 20]),
        kept=st.sampled_from([1, 2, 64]),
        scatter=st.sampled_from([1, 30, 4 << 20]),
        chunk_bytes=st.sampled_from([1, 24, 64, 64, 200, 200, 4096]),
        policy=st.sampled_from(["intermittent", "full", "one-shot", "consecutive", "consecutive"]),
        first=st.lists(st.tuples(kinds(), st.integers(0, 8), seeds()), min_size=1, max_size=3),
    )
    def start(
        self,
        *,
        small: int,
        pool: int,
        piece: int,
        kept: int,
        scatter: int,
        chunk_bytes: int,
        policy: str,
        first: list[tuple[Kind, int, int]],
    ) -> None:
        self.patch.setattr(writer, "_SMALL_BYTES", small)
        self.patch.setattr(writer, "_POOL_BYTES", pool)
        self.patch.setattr(writer, "_PIECE_BYTES", piece)
        self.patch.setattr(chain, "_KEPT", kept)
        self.patch.setattr(reader, "_SCATTER_BYTES", scatter)
        self.open(policy, chunk_bytes)
        for name, (kind, count, seed) in zip(NAMES, first, strict=False):
            self.held[name] = Held.fresh(kind, count, seed)

    @property
    def ledger(self) -> Ledger:
        """What the run itself believes; looked at only where it may know less than this model."""
        return self.run._saver.ledger

    def open(self, policy: str, chunk_bytes: int) -> None:
        self.run = crf.open_run(self.store, mode="a", policy=policy, chunk_bytes=chunk_bytes)
        self.origin, self.lags, self.lost, self.restored = None, False, False, False

    def teardown(self) -> None:
        self.patch.undo()
        if not self.committed:
            return
        fresh = crf.open_run(self.store)
        numbers = sorted(self.committed)
        assert [checkpoint.sequence for checkpoint in fresh.log()] == numbers
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
        if between is not None and self.ledger.latest is not None:
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
        self.try_to_save(how, Fault(late=True))
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
        self.try_to_save(how, Fault(at=1, reads=False))
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

    def parent_of(self, how: How) -> str | int | None:
        if isinstance(how.parent, int) and self.legal:
            assert self.latest is not None
            numbers = self.chain_of(self.latest)
            return numbers[how.parent % len(numbers)]
        return "auto" if isinstance(how.parent, int) or self.lags else how.parent

    def try_to_save(self, how: How, fault: Fault | None) -> None:
        parent = self.parent_of(how)
        known = set() if self.latest is None else set(self.committed[self.latest].tables)
        dropped = sorted(known - set(self.held))
        self.counter += 1
        state = crf.State(
            tables={name: self.table(name, held, how) for name, held in self.held.items()},
            tensors={"t": np.arange(self.counter % 7, dtype=np.float32)},
            extra={"counter": self.counter},
        )
        snapshot = Snapshot(
            tables={name: Rows.of(held) for name, held in self.held.items()},
            tensors={"t": np.arange(self.counter % 7, dtype=np.float32)},
            extra={"counter": self.counter},
            step=self.counter,
        )
        if parent == "latest" and not self.legal and not self.lost:
            with pytest.raises(InvalidInputError):
                self.run.save(state, step=self.counter, parent=parent, dropped=dropped)
            return
        if self.lags:
            dropped = self.dropped_as_the_run_sees()
        legal, before, lagged, clean = self.legal, self.latest, self.lags, self.clean
        for name, held in self.held.items():
            held.touched, held.gone = set(), set()
            if how.bits is not None:
                self.coarsest[name] = min(how.bits, self.coarsest.get(name) or 8)
        self.told = {name: (held.kind, set(held.ids.tolist())) for name, held in self.held.items()}
        saved = self.attempt(
            lambda: self.run.save(state, step=self.counter, parent=parent, dropped=dropped), snapshot, fault
        )
        self.clean = saved is not None
        if saved is not None:
            self.origin = saved.sequence
            if not lagged:
                self.check_save(saved, parent, before, legal=legal)
            if not lagged and clean and legal and before is not None:
                self.check_exactly_recent(saved, before)

    def dropped_as_the_run_sees(self) -> list[str]:
        """A run that lags behind knows the tables of its own latest checkpoint."""
        latest = self.ledger.latest
        known = set() if latest is None else set(self.committed[latest.sequence].tables)
        return sorted(known - set(self.held))

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

    @precondition(lambda self: self.ledger.latest is not None)
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

    @precondition(lambda self: self.ledger.latest is not None)
    @rule(fault=st.none() | faults(), take_over=st.booleans())
    def copy_latest(self, fault: Fault | None, take_over: bool) -> None:
        """Compaction and takeover: the state stays, so do origin and pending rows."""
        latest, legal = self.latest, self.legal
        assert latest is not None
        action = self.run.take_over if take_over else self.run.compact
        done = self.attempt(action, self.committed[latest], fault)
        if done is None:
            return
        self.origin = done.sequence if legal else self.ledger.origin
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
        landed = self.store.land()
        if landed is not None:
            self.note_commit(*landed)
            self.lags = True

    def attempt(
        self, action: Callable[[], crf.Checkpoint | None], snapshot: Snapshot, fault: Fault | None
    ) -> crf.Checkpoint | None:
        """Do what commits; afterwards the store tells what is committed, whether the call failed or not."""
        head = max(self.committed, default=0)
        lagged = self.lags
        self.store.arm(fault, snapshot)
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
        if done is not None:
            assert done.sequence == head + 1
            assert done.commit.predecessor == (head or None)
            if done.commit.policy.name not in ("compact", "takeover"):  # these two are no answer to a restore
                before = 0 if head == 0 else self.commit_of(head).restores
                assert lagged or done.commit.restores == before + self.restored
                self.restored = False
            self.note_commit(done.sequence, snapshot)
        elif self.is_committed(head + 1):
            self.note_commit(head + 1, snapshot)
            lagged = True  # or what failed was the reading of it afterwards
        self.lags = self.ledger.head < max(self.committed, default=0)
        if self.ledger.origin is None:
            self.origin = None  # what failed was the reading of it
        if lagged:  # what an adopted attempt leaves is up to the run; what it then saves is not
            self.origin, self.restored = self.ledger.origin, self.ledger.restored
        return done

    def is_committed(self, number: int) -> bool:
        return f"{number:08d}/zarr.json" in self.store.objects

    def note_commit(self, number: int, snapshot: Snapshot) -> None:
        commit = parse_occupant(self.store.objects[f"{number:08d}/zarr.json"], number)
        assert isinstance(commit, Commit)
        self.committed[number], self.commits[number] = snapshot, commit
        self.unchecked.append(number)

    # What must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def new_checkpoints_read_as_their_snapshots(self) -> None:
        if self.lost:
            self.reopen(restores=False, policy="consecutive", chunk_bytes=64)
        if self.unchecked:
            fresh = crf.open_run(self.store)
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
        run = crf.open_run(self.store)
        self.check_changes(run, low, high, run[low].load(), max_bytes)

    @precondition(lambda self: self.committed)
    @rule(pick=st.integers(0, 30), seed=seeds())
    def read_some(self, pick: int, seed: int) -> None:
        """RES-1: slices and takes agree with the whole."""
        number = sorted(self.committed)[pick % len(self.committed)]
        checkpoint = crf.open_run(self.store)[number]
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

    def check_checkpoint(self, run: crf.Run, number: int) -> crf.State:
        snapshot = self.committed[number]
        checkpoint = run[number]
        assert checkpoint.step == snapshot.step
        state = checkpoint.load()
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
                self.check_quantized(got, values_wanted, self.coarsest[name] or 8)
            elif field_name == "slow":
                check_narrowed(got, values_wanted)
            else:
                assert same_bits(got, values_wanted), (name, field_name, got, values_wanted)

    def check_quantized(self, found: Array, wanted: Array, bits: int) -> None:
        """DEC-5, EXA-2: within the bound; rows that are not finite to the last bit."""
        exact = ~np.isfinite(wanted.astype(np.float64)).all(axis=1)
        assert same_bits(found[exact], wanted[exact])
        old, new = wanted[~exact].astype(np.float64), found[~exact].astype(np.float64)
        if old.size:
            spread = old.max(axis=1, keepdims=True) - old.min(axis=1, keepdims=True)
            rounding = np.abs(old).max(axis=1, keepdims=True) * (2.0**-8 if found.dtype.itemsize == 2 else 2.0**-20)
            bound = 0.505 * spread / (2**bits - 1) + rounding
            assert (np.abs(old - new) <= bound * 1.01).all(), (bits, old, new)

    def check_changes(self, run: crf.Run, low: int, high: int, before: crf.State, max_bytes: int = 64 << 20) -> None:
        state = {name: loaded(table) for name, table in before.tables.items()}
        after = applied(state, run[high].changes_since(low, max_bytes=max_bytes))
        wanted = {name: loaded(table) for name, table in run[high].load().tables.items()}
        assert set(after) == set(wanted)
        for name, rows in wanted.items():
            assert same_bits(after[name].ids, rows.ids), (name, after[name].ids, rows.ids)
            assert same_fields(after[name].fields, rows.fields), (name, after[name].fields, rows.fields)

    def check_save(self, saved: crf.Checkpoint, parent: str | int | None, before: int | None, *, legal: bool) -> None:
        """What a save decides: its parent, LAY-2, LAY-3, HEA-2; what is new to the predecessor is recent (LAY-7)."""
        if parent is None or not legal:
            assert saved.parent is None
        elif parent != "auto":
            assert saved.parent == (before if parent == "latest" else parent)
        below = {} if before is None else self.committed[before].tables
        for name in saved.tables:
            rows = self.committed[saved.sequence].tables[name]
            parts = saved._stored.parts(name)
            if not legal or name not in below or below[name].spec != rows.spec:
                assert saved.table(name).storage == "full"
                assert all(part.recent == 1 for part in parts if part.count)

    def check_exactly_recent(self, saved: crf.Checkpoint, before: int) -> None:
        """CHG-2: no row is reported but those that the save named, and new ones."""
        changes = list(saved.changes_since(before))
        for name, rows in self.committed[saved.sequence].tables.items():
            below, named = self.committed[before].tables.get(name), self.named[name]
            if below is None or below.spec != rows.spec or named is None:
                continue
            found = {row for change in changes if change.table == name for row in change.rows.view(np.int64).tolist()}
            wanted = named | (set(rows.ids.tolist()) - set(below.ids.tolist()))
            lossy = name in self.run._saver.ledger.lossy  # rows that are encoded again may be reported (LAY-7)
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


def loaded(table: crf.Table) -> Rows:
    fields = dict(table.fields)
    count = len(next(iter(fields.values())))
    if table.keys is None:
        return Rows(key_dtype=None, ids=np.arange(count), fields=fields)
    keys = np.asarray(table.keys)
    return Rows(key_dtype=keys.dtype.name, ids=keys.view(np.int64), fields=fields)


def applied(state: dict[str, Rows], changes: Iterable[Changes]) -> dict[str, Rows]:
    """A state after batches of changes, as a follower would apply them."""
    state = dict(state)
    met: set[tuple[str, int]] = set()
    for change in changes:
        if change.dropped:
            assert (change.rows.size, change.deleted.size) == (0, 0)
            state.pop(change.table, None)
            continue
        ids = change.rows.view(np.int64)
        assert not met & {(change.table, row) for row in ids.tolist()}, "a row is in two batches"
        met |= {(change.table, row) for row in ids.tolist()}
        given = Rows(key_dtype=change.key_dtype, ids=ids, fields=change.fields)
        known = state.get(change.table)
        if known is None or known.spec != given.spec:  # another table: start over
            known = Rows(key_dtype=given.key_dtype, ids=ids[:0], fields=taken(given.fields, slice(0, 0)))
        state[change.table] = merged(known, given, change)
    return state


def merged(known: Rows, given: Rows, change: Changes) -> Rows:
    stays = ~np.isin(known.ids, np.concatenate([given.ids, change.deleted.view(np.int64)]))
    if change.table_rows is not None:
        stays &= known.ids < change.table_rows
    ids = np.concatenate([known.ids[stays], given.ids])
    order = np.argsort(ids)
    fields = taken(joined([taken(known.fields, stays), given.fields]), order)
    return Rows(key_dtype=given.key_dtype, ids=ids[order], fields=fields)


def check_narrowed(found: Array, wanted: Array) -> None:
    error = np.abs(found.astype(np.float64) - wanted)
    assert (error <= NARROWED * np.abs(wanted.astype(np.float64))).all()


TestChain = ChainMachine.TestCase
TestChain.settings = settings(TestChain.settings, stateful_step_count=30)


def dense(rows: int, changed: list[int] | None = None) -> crf.State:
    return crf.State(tables={"t": crf.Table({"w": np.arange(float(rows))}, changed=changed)})


@pytest.mark.parametrize(("now", "storage"), [(4, "full"), (3, "full"), (5, "changed"), (6, "changed")])
def test_a_follower_learns_of_rows_that_are_gone(now: int, storage: str) -> None:
    """CHG-2: also where the table, over a parent with as few rows, would have nothing to store (LAY-3)."""
    run = crf.open_run(MemoryStore(), mode="a")
    run.save(dense(3))
    run.save(dense(5, []), parent=1)
    done = run.save(dense(now, []), parent=1)
    assert done.table("t").storage == storage
    after = applied({"t": loaded(run[2].load().tables["t"])}, done.changes_since(2))
    assert same_bits(after["t"].fields["w"], np.arange(float(now)))


@pytest.mark.parametrize("changed", ["ids", "all"])
def test_nested_rollbacks(changed: str) -> None:
    """CHG-1: a way back over a way back; rows that shrank away, keys that went, tables that came on the way."""
    run = crf.open_run(MemoryStore(), mode="a")
    states: dict[int, crf.State] = {}

    def save(rows: int, keys: list[int], *, extra: bool) -> None:
        told: Any = crf.ALL if changed == "all" else []
        number = len(states) + 1
        tables = {
            "dense": crf.Table({"w": np.full(rows, float(number))}, changed=crf.ALL),
            "keyed": crf.Table({"w": np.array(keys, np.float64)}, keys=keys, changed=told),
        }
        if extra:
            tables["extra"] = crf.Table({"w": np.ones(2)}, changed=crf.ALL)
        known = set() if not states else set(run.latest().tables)
        done = run.save(crf.State(tables=tables), dropped=sorted(known - set(tables)))
        states[done.sequence] = done.load()

    def back(number: int) -> None:
        states[run.rollback(number).sequence] = states[number]
        run.restore()

    save(5, [1, 2, 3], extra=False)  # 1
    save(3, [2, 3, 9], extra=True)  # 2
    save(8, [3], extra=True)  # 3
    back(2)  # 4
    save(6, [2, 3, 4, 9], extra=False)  # 5
    back(1)  # 6
    save(7, [1, 7], extra=True)  # 7
    back(3)  # 8
    back(5)  # 9
    for upper, state in states.items():
        for lower in range(1, upper + 1):
            before = {name: loaded(table) for name, table in states[lower].tables.items()}
            after = applied(before, run[upper].changes_since(lower))
            wanted = {name: loaded(table) for name, table in state.tables.items()}
            assert after.keys() == wanted.keys(), (lower, upper)
            for name, rows in wanted.items():
                assert same_bits(after[name].ids, rows.ids), (lower, upper, name)
                assert same_bits(after[name].fields["w"], rows.fields["w"]), (lower, upper, name)


def test_what_was_told_to_a_save_that_could_not_read() -> None:
    """HEA-2: the store fails before the changed rows are noted; the next save stores everything."""
    store = FaultyStore()
    run = crf.open_run(store, mode="a")
    run.save(dense(5))
    run.restore()
    state = dense(5, [2])
    state.tables["t"].fields["w"][2] = -1
    run._history._checkpoints.clear()
    store.arm(Fault(at=1))
    with pytest.raises(StorageError):
        run.save(state, parent="latest")
    store.arm(None)
    state.tables["t"].changed = []
    assert run.save(state).table("t").read()["w"].tolist() == [0, 1, -1, 3, 4]
