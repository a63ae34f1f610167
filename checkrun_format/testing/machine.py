"""A run under random saves, failures, ways back and prunes, against a dictionary of numpy arrays.

The model holds what the trainer has (`trainer`) and, for every committed number, what it had then (`books`). It knows
nothing of layers, parts or blocks. After each step every new checkpoint must read as its snapshot, and after a prune
every one that no rule lets go.

Another implementation subclasses `ChainMachine` and gives `open_writer` and `open_reader` (and `knows`, where it keeps
its books elsewhere; `has_background_saves` and `has_several_writers`, where it has none); what these return has the
methods of `checkrun_format.Run` that the rules call. For pytest:

    TestMine = MyMachine.TestCase
    TestMine.settings = machine_settings(MyMachine)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.errors import ConcurrentCommitError, PrunedError
from checkrun_format.manifest import Commit, Pruned, parse_occupant
from checkrun_format.retention import Keep, Plan
from checkrun_format.testing.books import Knowledge, refused
from checkrun_format.testing.choices import Edit, How, edits, faults, hows, keeps
from checkrun_format.testing.model import Held, check_raw_changes, loaded
from checkrun_format.testing.saves import Saves
from checkrun_format.testing.stores import WRITES, Fault
from checkrun_format.testing.tables import Kind, kinds, same_bits, same_fields, seeds, taken
from checkrun_format.testing.trainer import NAMES

__all__ = ["ChainMachine", "Knowledge", "machine_settings"]


def machine_settings(machine: type[RuleBasedStateMachine], **options: Any) -> settings:
    """Settings for a machine's test case: those of the profile, and longer histories."""
    return settings(machine.TestCase.settings, **{"stateful_step_count": 30, **options})


class ChainMachine(Saves):
    """Everything that the requirements promise of histories.

    LAY-1 to LAY-7, RES-1, CHG-1 to CHG-3, RBK-1, RBK-2, CMP-1, CMP-2, HEA-1 to HEA-3, COM-6, TEN-1, TYP-1,
    PRU-1, PRU-2, TAG-2.
    """

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
            self.trainer.held[name] = Held.fresh(kind, count, seed)

    # Other ways to commit, and to go on -------------------------------------------------------------------------------

    @precondition(lambda self: self.knows().latest is not None)
    @rule(pick=st.integers(0, 30), fault=st.none() | faults(), restores=st.booleans())
    def rollback(self, pick: int, fault: Fault | None, restores: bool) -> None:
        number = sorted(self.committed)[pick % len(self.committed)]
        done = self.attempt(lambda: self.run.rollback(number), self.committed[number], fault)
        if done is not None:
            self.origin, self.stored[done.sequence] = None, {}
            assert done.commit.rollback_to == number
            assert all(done.table(name).storage == "unchanged" for name in done.tables) or done.parent is None
            assert done.parent in (None, number)
            if restores:
                self.restore_latest()

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
        self.origin, self.restored, self.clean = number, True, True
        self.check_state(state, self.committed[number])
        self.trainer.take_up(state, self.committed[number])

    @rule(
        restores=st.booleans(),
        policy=st.sampled_from(["intermittent", "one-shot", "consecutive"]),
        chunk_bytes=st.sampled_from([40, 100, 500]),
    )
    def reopen(self, restores: bool, policy: str, chunk_bytes: int) -> None:
        self.open(policy, chunk_bytes)
        if restores and self.committed:
            self.restore_latest()

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
        self.stored[done.sequence] = {}
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
            assert not self.store.store.list(self.commit_of(number).prefix)

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
            self.trainer.edit(edits)
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

    # Reading ----------------------------------------------------------------------------------------------------------

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
    @rule(one=st.integers(0, 30), other=st.integers(0, 30))
    def diff(self, one: int, other: int) -> None:
        """How two states differ, in either direction, whatever their history."""
        numbers, run = sorted(self.committed), self.open_reader()
        one, other = numbers[one % len(numbers)], numbers[other % len(numbers)]
        first, second = (run[number].load().tables for number in (one, other))
        for name in first.keys() & second.keys():
            mine, theirs = loaded(first[name]), loaded(second[name])
            if mine.spec == theirs.spec:
                shared = np.intersect1d(mine.ids, theirs.ids)
                pair = [taken(rows.fields, np.searchsorted(rows.ids, shared)) for rows in (mine, theirs)]
                differ = sum(not same_fields(taken(pair[0], [at]), taken(pair[1], [at])) for at in range(shared.size))
                counts = (mine.ids.size - shared.size, theirs.ids.size - shared.size, differ)
                assert self.differences(run, one, other, name) == counts

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
