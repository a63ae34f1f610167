"""The store fails at each single call of a save, a compaction and a prune, in every way that the fault store knows."""

from __future__ import annotations

import copy
import itertools
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format import Checkpoint, Run, State, StorageError, Table
from checkrun_format.errors import ConcurrentCommitError, DamagedError, NotFoundError, PrunedError
from checkrun_format.stores import LocalStore
from checkrun_format.testing import Fault, FaultStore, MemoryStore
from checkrun_format.testing.model import Rows, loaded
from checkrun_format.testing.tables import same_bits, same_fields
from tests.forks import ended, fork

ACTIONS = ["save", "compact"]
LOST = ([5, 39], [7], 0)
"""What the save that fails is told: rows, keys, and a key that is gone."""


@dataclass
class Story:
    """A trainer with a dense and a keyed table, the run that it saves to, and what every checkpoint must hold."""

    store: FaultStore
    policy: str = "consecutive"
    told: dict[int, dict[str, Rows]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weight = np.arange(120, dtype=np.float32).reshape(40, 3)
        self.values = {key: float(key) for key in range(-5, 12)}
        self.run: Run = self.open()
        self.commit(self.save([], []))
        for number in (2, 3):
            self.commit(self.train_and_save([number, 30 + number], [number - 4]))

    def copy(self) -> Story:
        """The same story in a store of its own, opened anew."""
        store = MemoryStore()
        assert isinstance(self.store.store, MemoryStore)
        store.objects = dict(self.store.store.objects)
        other = copy.copy(self)
        other.store, other.told, other.values = FaultStore(store), dict(self.told), dict(self.values)
        other.run = other.open()
        return other

    def open(self) -> Run:
        return crf.open_run(self.store, "a", policy=self.policy, chunk_bytes=400)

    def train(self, rows: list[int], keys: list[int], gone: int | None = None) -> None:
        self.weight = self.weight.copy()
        self.weight[rows] += 1000
        self.values |= {key: self.values[key] - 0.5 for key in keys}
        if gone is not None:
            del self.values[gone]

    def train_and_save(self, *what: Any) -> Checkpoint:
        self.train(*what)
        return self.save(what[0], what[1])

    def save(self, rows: list[int], keys: list[int]) -> Checkpoint:
        return self.run.save(self.state(rows, keys))

    def state(self, rows: list[int], keys: list[int]) -> State:
        live = np.array(sorted(self.values))
        tables = {
            "dense": Table({"weight": self.weight}, changed=rows),
            "keyed": Table({"value": np.array([self.values[key] for key in live])}, keys=live, changed=keys),
        }
        return State(tables=tables, tensors={"bias": np.ones(5)}, extra={"rows": rows})

    def held(self) -> dict[str, Rows]:
        """What the trainer has, as it must be read."""
        return {name: loaded(table) for name, table in self.state([], []).tables.items()}

    def commit(self, made: Checkpoint) -> None:
        self.told[made.sequence] = self.held()

    def check(self) -> None:
        """Every checkpoint reads as it must, to somebody who has read nothing yet; and there is no other."""
        fresh = crf.open_run(self.store.store)
        assert [number for number in range(1, 9) if self.is_committed(number)] == sorted(self.told)
        for number, wanted in self.told.items():
            state = fresh[number].load()
            for name, rows in wanted.items():
                found = loaded(state.tables[name])
                assert same_bits(found.ids, rows.ids) and same_fields(found.fields, rows.fields), (number, name)

    def is_committed(self, number: int) -> bool:
        try:
            crf.open_run(self.store.store)[number]
        except (NotFoundError, DamagedError, PrunedError):
            return False
        return True

    def forget(self) -> set[int]:
        """Expect no more what is no longer there; its numbers."""
        gone = {number for number in self.told if not self.is_committed(number)}
        self.told = {number: rows for number, rows in self.told.items() if number not in gone}
        return gone

    def damaged(self) -> list[int]:
        """Numbers at which half a document stands."""
        return [int(p.place[:8]) for p in crf.open_run(self.store.store).verify(fast=True) if p.kind == "damaged"]

    def act(self, action: str) -> Checkpoint:
        if action == "compact":
            return self.run.compact()
        return self.train_and_save(*LOST)

    def go_on(self, action: str) -> None:
        """The next save, which is told of little, holds all that the failed one was told."""
        before = max(number for number in self.told)
        made = self.train_and_save([20], [9])
        self.commit(made)
        changed: dict[str, set[int]] = {"dense": set(), "keyed": set()}
        gone: set[int] = set()
        for change in made.changes_since(before):
            if not change.dropped:
                changed[change.table] |= set(change.rows.tolist())
                gone |= set(change.deleted.tolist())
        if made.parent is not None:
            missed = action == "save" and self.told[before]["keyed"].ids.size == 17
            assert changed["dense"] == ({5, 20, 39} if missed else {20})
            assert changed["keyed"] == ({7, 9} if missed else {9})
            assert gone == {0} if missed else gone <= {0}  # repeating a tombstone is harmless (LAY-5)
        self.check()


@pytest.mark.parametrize(
    ("action", "policy"), [("save", "consecutive"), ("save", "one-shot"), ("compact", "consecutive")]
)
@pytest.mark.parametrize("how", ["before", "after", "truncate", "down"])
def test_a_call_fails(how: Any, action: str, policy: str) -> None:
    outcomes = set()
    for k in itertools.count(1):
        story = Story(FaultStore(MemoryStore()), policy)
        story.store.arm(Fault(at=k, how=how))
        outcome = attempt(story, action)
        fired = story.store.fired
        story.store.arm(None)
        outcomes.add(outcome)
        if story.is_committed(4):
            story.told[4] = story.held()
        story.check()
        if outcome == "refused":
            story.run = story.open()
        story.go_on(action)
        if not fired:
            break
    assert k > 20
    assert {"saved", "failed"} <= outcomes
    assert ("refused" in outcomes) == (how == "truncate")  # half a commit: the number is damaged, and passed over


def attempt(story: Story, action: str) -> str:
    try:
        story.act(action)
    except ConcurrentCommitError:
        return "refused"
    except (StorageError, DamagedError):
        return "failed"
    return "saved"


def save_by_two(story: Story) -> Checkpoint:
    """Store over the latest checkpoint what changed since then, each writer some of it."""
    rows, keys, gone = LOST
    save = story.run.begin(writers=2, parent="latest")
    first, second = save.writer(0), story.run.join(save.token).writer(1)
    for writer, row in ((first, rows[0]), (second, rows[1])):
        writer.put("dense", {"weight": story.weight[[row]]}, rows=[row], of=40, storage="changed")
    values = np.array([story.values[key] for key in keys])
    second.put("keyed", {"value": values}, keys=np.array(keys), storage="changed", deleted=np.array([gone]))
    first.put_tensor("bias", np.ones(5))
    return save.commit([second.finish(), first.finish()], extra={"rows": rows})


@pytest.mark.parametrize("how", ["before", "after", "truncate", "down"])
def test_a_call_of_a_save_by_several_writers_fails(how: Any) -> None:
    """COM-4, HEA-3: it is there as a whole or not at all; begun anew, it commits."""
    outcomes = set()
    for k in itertools.count(1):
        story = Story(FaultStore(MemoryStore()))
        story.train(*LOST)
        story.store.arm(Fault(at=k, how=how))
        try:
            story.commit(save_by_two(story))
            outcome = "saved"
        except ConcurrentCommitError:
            outcome = "refused"
        except (StorageError, DamagedError):
            outcome = "failed"
        fired = story.store.fired
        story.store.arm(None)
        outcomes.add(outcome)
        if outcome == "refused":  # half a commit: the number is damaged, and passed over
            story.run = story.open()
            story.commit(story.save([], []))
        elif story.is_committed(4):
            story.told[4] = story.held()
        else:
            story.check()
            story.commit(save_by_two(story))
        story.check()
        story.go_on("")
        if not fired:
            break
    assert k > 20
    assert outcomes == {"saved", "failed"} | ({"refused"} if how == "truncate" else set())


@pytest.mark.parametrize("how", ["before", "after", "truncate", "down"])
def test_a_call_of_a_prune_fails(how: Any) -> None:
    """PRU-1, PRU-2: what should stay is whole, and the next prune removes the rest; half a marker keeps those below."""
    outcomes, leaves = set(), set()
    before = Story(FaultStore(MemoryStore()))
    for parent in (None, "auto"):  # 4 is a base, 5 lies over it
        before.commit(before.run.save(before.state([], []), parent=parent))
    before.run.tag("best", 1)
    for k in itertools.count(1):
        story = before.copy()
        story.store.arm(Fault(at=k, how=how))
        outcomes.add(prune(story))
        fired = story.store.fired
        story.store.arm(None)
        assert story.forget() <= {2, 3}
        story.check()
        leaves.add(tuple(story.told))
        story.run = story.open()
        assert prune(story) == "pruned"
        halves = {3: {1, 2}, 2: {1}}.get(next(iter(story.damaged()), 0), set())
        story.forget()
        assert set(story.told) == {1, 4, 5} | halves
        story.check()
        story.run.restore()
        story.go_on("prune")
        if not fired:
            break
    assert k > 20
    assert outcomes == {"pruned", "failed"}
    assert leaves == {(1, 2, 3, 4, 5), (1, 2, 4, 5), (1, 4, 5)}


def prune(story: Story) -> str:
    try:
        story.run.prune(story.run.plan_prune(crf.Keep(last=1)))
    except (StorageError, DamagedError):
        return "failed"
    return "pruned"


@pytest.mark.parametrize("action", ACTIONS)
def test_another_writer_commits_meanwhile(action: str) -> None:
    """Exactly one of the two has number 4, and the one that is refused has lost no rows."""
    outcomes = []
    for k in itertools.count(1):
        story = Story(FaultStore(MemoryStore()))
        before, others = story.held(), list[int]()

        def meanwhile(story: Story = story, others: list[int] = others) -> None:
            others.append(crf.open_run(story.store.store, "a", takeover=True).latest().sequence)

        story.store.arm(Fault(at=k, how="delay", meanwhile=meanwhile))
        outcome = attempt(story, action)
        fired = story.store.fired
        story.store.arm(None)
        outcomes.append(outcome)
        ours = [] if outcome == "refused" else [4]
        assert sorted(ours + others) == list(range(4, 4 + len(ours + others)))
        for number in ours:
            story.told[number] = story.held()
        for number in others:
            story.told[number] = story.held() if ours and number == 5 else before
        story.check()
        story.run = story.open()
        story.go_on(action)
        if not fired:
            break
    assert outcomes.count("refused") > 20
    assert outcomes[-1] == "saved"


@pytest.mark.parametrize("action", ACTIONS)
def test_the_process_is_stopped(tmp_path: Path, action: str) -> None:
    """Killed before one of the calls: the checkpoint is there as a whole or not at all, and training goes on."""
    calls = calls_of(action)
    exits, committed = [], []
    for k in sorted({*range(1, calls, 9), *range(calls - 3, calls + 2)}):
        story = Story(FaultStore(LocalStore(tmp_path / str(k), durable=False)))

        def work(story: Story = story, k: int = k) -> None:
            story.store.arm(Fault(at=k, how="stop"))
            story.act(action)

        exits.append(ended(fork(work)))
        committed.append(story.is_committed(4))
        if committed[-1]:
            if action == "save":  # what the child did to its own copy of the tables
                story.train(*LOST)
            story.told[4] = story.held()
        story.check()
        story.run = story.open()
        story.run.restore()
        story.go_on("")
        shutil.rmtree(tmp_path / str(k))
    assert exits == [-signal.SIGKILL] * (len(exits) - 1) + [0]
    assert committed == sorted(committed) and set(committed) == {False, True}


def test_the_process_is_stopped_in_a_prune(tmp_path: Path) -> None:
    """PRU-1: killed before any call of it: what should stay is whole, and the next prune removes the rest."""
    exits, pruned = [], []
    before = Story(FaultStore(MemoryStore()))
    for parent in (None, "auto"):  # 4 is a base, 5 lies over it
        before.commit(before.run.save(before.state([], []), parent=parent))
    for k in itertools.count(1, 5):
        story = before.copy()
        assert isinstance(story.store.store, MemoryStore)
        story.store.store.dump(tmp_path / str(k))
        story.store = FaultStore(LocalStore(tmp_path / str(k), durable=False))
        story.run = story.open()

        def work(story: Story = story, k: int = k) -> None:
            story.store.arm(Fault(at=k, how="stop"))
            assert prune(story) == "pruned"

        exits.append(ended(fork(work)))
        pruned.append(story.forget())
        story.check()
        story.run = story.open()
        assert prune(story) == "pruned"
        story.forget()
        assert set(story.told) == {4, 5}
        story.run.restore()
        story.go_on("")
        shutil.rmtree(tmp_path / str(k))
        if exits[-1] == 0:
            break
    assert exits == [-signal.SIGKILL] * (len(exits) - 1) + [0]
    assert [len(gone) for gone in pruned] == sorted(map(len, pruned)) and pruned[0] == set() and pruned[-1] == {1, 2, 3}


def calls_of(action: str) -> int:
    """How many calls an action makes of its store."""
    story = Story(FaultStore(MemoryStore()))
    story.store.arm(None)
    story.act(action)
    return story.store.calls
