"""What a run must hold, by a model's books; and committing, whatever fails (see `machine`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, invariant

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.comparison import compare_tables
from checkrun_format.errors import ConcurrentCommitError, HistoryPrunedError, StorageError
from checkrun_format.manifest import Commit, parse_occupant
from checkrun_format.stores import Store
from checkrun_format.testing.background import save_in_the_background
from checkrun_format.testing.choices import Interrupted
from checkrun_format.testing.model import Rows, Snapshot, applied, check_narrowed, check_quantized, loaded
from checkrun_format.testing.stores import Fault, FaultStore, MemoryStore
from checkrun_format.testing.tables import same_bits, same_fields
from checkrun_format.testing.trainer import Some, Trainer


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


class Books(RuleBasedStateMachine):
    """A run on a store that may fail, its trainer, and what every committed number must read as."""

    has_background_saves: ClassVar[bool] = True
    has_several_writers: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.store = FaultStore(self.make_store())
        self.trainer = Trainer()
        self.committed: dict[int, Snapshot] = {}
        self.pruned: dict[int, Snapshot] = {}
        self.tags: dict[str, int] = {}
        self.commits: dict[int, Commit] = {}
        self.stored: dict[int, dict[str, Some]] = {}  # which rows a checkpoint holds, where that is known
        self.kept: Snapshot | None = None
        self.lossless = False
        self.clean = True
        self.origin: int | None = None
        self.lags = False
        self.fenced = False
        self.lost = False
        self.restored = False
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

    def saves_in_the_background(
        self, state: crf.State, options: dict[str, Any], train: Callable[[], object], cancel_at: int
    ) -> Any:
        """Save a state that changes once all that is to be stored was copied: `train` is called then, or not at all.

        It is given up, by an `Interrupted`, at its `cancel_at`-th look whether it is to be given up; 0: never.
        """
        return save_in_the_background(self.run, state, options, train, cancel_at)

    def plans(self, state: crf.State, options: dict[str, Any]) -> Any:
        """What a save would do: `kind`, `sequence`, `parent` and `tables` of a `SavePlan`."""
        return self.run.plan_save(state, **options)

    def differences(self, run: Any, one: int, other: int, name: str) -> tuple[int, int, int]:
        """Rows or keys of a table of one kind that are in one checkpoint only, in the other only, and that differ."""
        history, (first, second) = run._history, (run[number]._stored for number in (one, other))
        found = compare_tables(history, first, second, name, 100)
        return found.removed, found.added, found.differ

    # Setting up -------------------------------------------------------------------------------------------------------

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

    # What the model knows of the numbers ------------------------------------------------------------------------------

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

    # What is committed ------------------------------------------------------------------------------------------------

    def attempt(
        self,
        action: Callable[[], Any | None],
        snapshot: Snapshot,
        fault: Fault | None,
        *,
        adopts_by_refusing: bool = False,
    ) -> Any | None:
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
            self.lost = self.fenced or not adopts_by_refusing
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

    # What must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def new_checkpoints_read_as_their_snapshots(self) -> None:
        if self.lost:
            self.open("consecutive", 64)
        if self.unchecked:
            fresh = self.open_reader()
            assert fresh.latest().sequence == self.latest
            for number in self.unchecked:
                self.check_checkpoint(fresh, number)
            self.unchecked = []

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
            if field_name == "weight" and name in self.trainer.coarsest:
                check_quantized(got, values_wanted, self.trainer.coarsest[name])
            elif field_name == "slow":
                check_narrowed(got, values_wanted)
            else:
                assert same_bits(got, values_wanted), (name, field_name, got, values_wanted)

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

    def check_facts(self) -> None:
        """COM-6 and 5.2, from the commits alone."""
        last: int | None = None
        for number, commit in sorted(self.commits.items()):
            assert commit.predecessor == last
            assert commit.parent is None or commit.parent in self.chain_of(last or 0)
            restores = 0 if last is None else self.commits[last].restores
            assert restores <= commit.restores <= restores + 1
            last = number


def refused(error: type[Exception], action: Callable[[], object]) -> None:
    """An action must raise this error."""
    try:
        action()
    except error:
        return
    raise AssertionError(f"no {error.__name__} was raised")
