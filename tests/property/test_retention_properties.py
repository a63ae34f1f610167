"""Histories of saves, rollbacks, compactions, tags and prunes: what the rules keep stays, bit for bit."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import checkrun_format as crf
from tests.integration.test_kill import MemoryStore

ROWS = 8

Step = tuple[str, int]

keeps = st.one_of(
    st.builds(lambda n: crf.Keep(last=n), st.integers(1, 4)),
    st.builds(lambda n: crf.Keep(every=n), st.integers(1, 40)),
    st.builds(lambda n, m: crf.Keep(last=n, every=m), st.integers(1, 3), st.integers(5, 40)),
    st.just(crf.Keep(newer_than=dt.timedelta(0))),
    st.just(crf.Keep(newer_than=dt.timedelta(days=1))),
)
acts = st.sampled_from(["save", "save", "save", "base", "parent", "rollback", "compact", "takeover", "tag", "reopen"])
histories = st.lists(st.tuples(acts, st.integers(0, 99)), min_size=1, max_size=14)


class Trainer:
    """A run in memory, and what each of its checkpoints holds."""

    def __init__(self) -> None:
        self.store = MemoryStore({})
        self.run = crf.open_run(self.store, "a", policy="consecutive")
        self.weight = np.zeros((ROWS, 2), np.float32)
        self.expected: dict[int, bytes] = {}
        self.parents: dict[int, int | None] = {}
        self.steps: dict[int, int] = {}
        self.tags: dict[str, int] = {}
        self.clock = 0.0

    def act(self, what: str, choice: int) -> None:
        if not self.expected:
            what = "save"
        getattr(self, f"do_{what}")(choice)

    def committed(self, checkpoint: crf.Checkpoint, weight: Any) -> None:
        self.expected[checkpoint.sequence] = np.asarray(weight).tobytes()
        self.parents[checkpoint.sequence] = checkpoint.parent
        self.steps[checkpoint.sequence] = checkpoint.step or 0

    def do_save(self, choice: int, **options: Any) -> None:
        self.clock += 1
        rows = np.array([choice % ROWS])
        self.weight[rows] = self.clock
        state = crf.State(tables={"t": crf.Table({"weight": self.weight}, changed=rows)}, extra=self.clock)
        step = max(self.steps.values(), default=0) + choice % 13
        self.committed(self.run.save(state, step=step, **options), self.weight)

    def do_base(self, choice: int) -> None:
        self.do_save(choice, parent=None)

    def do_parent(self, choice: int) -> None:
        chain = sorted(self.with_chains({max(self.expected)}))
        self.do_save(choice, parent=chain[choice % len(chain)])

    def do_rollback(self, choice: int) -> None:
        number = sorted(self.expected)[choice % len(self.expected)]
        checkpoint = self.run.rollback(number)
        self.weight = np.frombuffer(self.expected[number], np.float32).reshape(ROWS, 2).copy()
        self.committed(checkpoint, self.weight)
        self.do_reopen(choice)

    def do_compact(self, choice: int) -> None:
        del choice
        self.committed(self.run.compact(), self.weight)

    def do_takeover(self, choice: int) -> None:
        del choice
        checkpoint = self.run.take_over()
        assert checkpoint is not None
        self.committed(checkpoint, self.weight)

    def do_tag(self, choice: int) -> None:
        name = f"tag-{choice % 2}"
        self.tags[name] = sorted(self.expected)[choice % len(self.expected)]
        self.run.tag(name, self.tags[name])

    def do_reopen(self, choice: int) -> None:
        del choice
        self.run = crf.open_run(self.store, "a", policy="consecutive")
        self.weight = self.run.restore().tables["t"]["weight"]

    def named_by(self, keep: crf.Keep) -> set[int]:
        """What the rules say, told in another way than the library's."""
        numbers = sorted(self.expected)
        named = {numbers[-1], *self.tags.values(), *numbers[-(keep.last or 1) :]}
        every = keep.every or 1000
        for multiple in range(0, 1000, every) if keep.every else ():
            there = [n for n in numbers if multiple <= self.steps[n] < multiple + every]
            kept = [n for n in there if all(self.steps[m] >= multiple for m in numbers if m > n)]
            named |= set(kept[:1])
        return set(numbers) if keep.newer_than else named

    def with_chains(self, numbers: set[int]) -> set[int]:
        found = set()
        for number in numbers:
            below: int | None = number
            while below is not None:
                found.add(below)
                below = self.parents[below]
        return found

    def data_bytes(self) -> int:
        """Bytes of all objects but commits and markers."""
        return sum(len(data) for key, data in self.store.objects.items() if key.count("/") > 1)

    def check(self) -> None:
        """What is listed is what is expected, and loads to the same bits."""
        run = crf.open_run(self.store)
        assert [c.sequence for c in run.log()] == sorted(self.expected)
        assert run.verify() == []
        for number, weight in self.expected.items():
            assert run[number].load().tables["t"]["weight"].tobytes() == weight
        assert run.tags() == dict(sorted(self.tags.items()))


@given(history=histories, keep=keeps, then=histories, again=keeps)
def test_a_prune_removes_what_no_rule_keeps_and_no_other_needs(
    history: list[Step], keep: crf.Keep, then: list[Step], again: crf.Keep
) -> None:
    """PRU-1, PRU-2, TAG-2: never an ancestor of what stays; each survivor is the same bit for bit; training goes on."""
    trainer = Trainer()
    for steps, rules in ((history, keep), (then[:5], again)):
        for what, choice in steps:
            trainer.act(what, choice)
        before = set(trainer.expected)
        stays = trainer.with_chains(trainer.named_by(rules))
        plan = trainer.run.plan_prune(rules)
        assert set(plan.stays) == stays
        assert set(plan.goes) == before - stays
        held = trainer.data_bytes()
        trainer.run.prune(plan)
        assert held - trainer.data_bytes() == plan.bytes
        for number in plan.goes:
            del trainer.expected[number], trainer.parents[number], trainer.steps[number]
            with pytest.raises(crf.PrunedError):
                trainer.run[number]
            assert [key for key in trainer.store.objects if key.startswith(f"{number:08d}/")] == [
                f"{number:08d}/zarr.json"
            ]
        trainer.check()
        assert trainer.run.plan_prune(rules).goes == []
