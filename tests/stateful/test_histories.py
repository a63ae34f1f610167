"""Unusual histories, told one by one: what each checkpoint holds, what changed between any two, and both readers agree.

The machine finds such histories by chance; these are there each time, under every policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.testing.model import Rows, applied, check_quantized, loaded
from checkrun_format.testing.tables import same_bits, same_fields
from tests.conformance import independent_changes, independent_reader
from tests.conformance.agreement import assert_agreement

POLICIES: list[tuple[str, int | None]] = [
    ("full", None),
    ("one-shot", None),
    ("consecutive", None),
    ("intermittent", None),
    ("one-shot", 3),
    ("consecutive", 2),
]
"""Policies, and bits of the weights."""

Tables = dict[str, Rows]


class Story:
    """A trainer, its run in a folder, and what every committed checkpoint must read as."""

    def __init__(self, folder: Path, policy: str, bits: int | None) -> None:
        self.folder, self.policy, self.bits = folder, policy, bits
        self.held: Tables = {}
        self.told: dict[int, Tables] = {}
        self.changed: dict[str, Any] = {}
        self.counter = 0
        self.has_pruned = False
        self.run = self.open()

    def open(self, **options: Any) -> crf.Run:
        return crf.open_run(
            self.folder, "a", durable=False, policy=self.policy, bits=self.bits, chunk_bytes=60, **options
        )

    # What the trainer does --------------------------------------------------------------------------------------------

    def dense(self, name: str, rows: int, changed: list[int] | None = None, dtype: str = "float32") -> None:
        """Give a dense table so many rows; those that are new, and those named, get new values."""
        self._put(name, None, np.arange(rows), changed, dtype)

    def keyed(self, name: str, keys: list[int], changed: list[int] | None = None, key_dtype: str = "int64") -> None:
        """Give a keyed table these keys; those that are new, and those named, get new values."""
        self._put(name, key_dtype, np.sort(np.array(keys, np.int64)), changed, "float32")

    def _put(self, name: str, key_dtype: str | None, ids: Any, changed: list[int] | None, dtype: str) -> None:
        self.counter += 1
        fields = {
            "weight": (ids[:, None] + np.array([0.0, 0.25])).astype(dtype) * 64 + np.array(self.counter, dtype),
            "sum": ids.astype(np.float32) - self.counter,
        }
        before = self.held.get(name)
        new = Rows(key_dtype=key_dtype, ids=ids, fields=fields)
        if before is not None and before.spec == new.spec:
            stays = np.flatnonzero(np.isin(ids, before.ids) & ~np.isin(ids, changed or []))
            for field_name, values in fields.items():
                values[stays] = before.fields[field_name][np.searchsorted(before.ids, ids[stays])]
        self.held = {**self.held, name: new}
        self.changed[name] = changed or []

    def drop(self, name: str) -> None:
        self.held = {other: rows for other, rows in self.held.items() if other != name}

    def save(self, **options: Any) -> int:
        """Save, and name what changed and which tables are gone; the number."""
        known = self.told[max(self.told)] if self.told else {}
        tables = {
            name: crf.Table(
                {field_name: values.copy() for field_name, values in rows.fields.items()},
                keys=None if rows.key_dtype is None else rows.ids.view(rows.key_dtype),
                changed=self.named(name, rows),
            )
            for name, rows in self.held.items()
        }
        state = crf.State(tables=tables, extra=self.counter)
        made = self.run.save(state, step=self.counter, dropped=sorted(known.keys() - self.held.keys()), **options)
        self.told[made.sequence], self.changed = self.stored(made), {}
        return made.sequence

    def stored(self, made: crf.Checkpoint) -> Tables:
        """What a checkpoint must read as from now on: what was saved, or within its bound of it."""
        if self.bits is None:
            return self.held
        found = {name: loaded(table) for name, table in made.load().tables.items()}
        for name, rows in self.held.items():
            check_quantized(found[name].fields["weight"], rows.fields["weight"], self.bits)
        exact = {name: {**found[name].fields, "sum": rows.fields["sum"]} for name, rows in self.held.items()}
        return {name: replace(rows, fields=exact[name]) for name, rows in self.held.items()}

    def named(self, name: str, rows: Rows) -> Any:
        named = np.intersect1d(np.array(self.changed.get(name, []), np.int64), rows.ids)
        return named if rows.key_dtype is None else named.view(rows.key_dtype)

    def back(self, number: int, *, restore: bool = True) -> int:
        made = self.run.rollback(number)
        self.told[made.sequence] = self.told[number]
        if restore:
            self.restore()
        return made.sequence

    def again(self, call: str) -> int:
        """Compact or take over."""
        before = max(self.told)
        made = getattr(self.run, call)()
        self.told[made.sequence] = self.told[before]
        return int(made.sequence)

    def restore(self, number: int | None = None) -> None:
        state = self.run.restore(number)
        self.held = self.told[max(self.told) if number is None else number]
        self.changed = {}
        assert set(state.tables) == set(self.held)
        for name, rows in self.held.items():
            found = loaded(state.tables[name])
            assert same_bits(found.ids, rows.ids) and same_fields(found.fields, rows.fields)

    def restart(self, number: int | None = None, **options: Any) -> None:
        """Another process goes on, from an older checkpoint if one is named."""
        latest = max(self.told)
        self.run = self.open(**options)
        if options.get("takeover"):
            self.told[latest + 1] = self.told[latest]
        self.restore(number)

    def burn(self) -> None:
        """A write that did not finish leaves the next number burnt; who goes on opens the run anew."""
        folder = self.folder / f"{max(self.told) + 1:08d}"
        folder.mkdir()
        (folder / "zarr.json").touch()
        with pytest.warns(crf.BurntNumberWarning):
            self.restart()

    def prune(self, keep: crf.Keep) -> list[int]:
        self.check()
        plan = self.run.plan_prune(keep)
        self.run.prune(plan)
        self.has_pruned = True
        for number in plan.goes:
            del self.told[number]
        return plan.goes

    # What must hold ---------------------------------------------------------------------------------------------------

    def check(self) -> int:
        """Every checkpoint, and what changed between any two, by both readers; how many of these pairs are told."""
        fresh = crf.open_run(self.folder)
        assert [checkpoint.sequence for checkpoint in fresh.log()] == sorted(self.told)
        assert {problem.kind for problem in fresh.verify()} <= {"burnt"}
        assert_agreement(self.folder, checkpoints=99)
        for number, tables in self.told.items():
            state = {name: loaded(table) for name, table in fresh[number].load().tables.items()}
            assert same_tables(state, tables), number
        numbers = sorted(self.told)
        return sum(self.check_changes(fresh, p, c) for c in numbers for p in numbers if p <= c)

    def check_changes(self, run: crf.Run, p: int, c: int) -> bool:
        """What changed, applied on what was there, is what is there (CHG-1, CHG-2); whether it is told at all."""
        try:
            changes = list(run[c].changes_since(p))
        except crf.HistoryPrunedError:
            with pytest.raises(independent_reader.FormatError) as refused:
                independent_changes.changes(self.folder, p, c)
            assert refused.value.kind == "history_pruned"
            return False
        assert same_tables(applied(self.told[p], changes), self.told[c]), (p, c)
        answer, dropped = independent_changes.changes(self.folder, p, c)
        assert [change.table for change in changes if change.dropped] == dropped
        for name, (rows, deleted) in answer.items():
            ours = [change for change in changes if change.table == name and not change.dropped]
            assert same_bits(np.concatenate([rows[:0], *(change.rows.view(rows.dtype) for change in ours)]), rows)
            assert same_bits(
                np.concatenate([deleted[:0], *(change.deleted.view(rows.dtype) for change in ours)]), deleted
            )
        return True


def same_tables(found: Tables, wanted: Tables) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].key_dtype == rows.key_dtype
        and same_bits(found[name].ids, rows.ids)
        and same_fields(found[name].fields, rows.fields)
        for name, rows in wanted.items()
    )


def begin(story: Story) -> None:
    """Checkpoints 1 to 3, of two tables."""
    story.dense("d", 6)
    story.keyed("k", [-3, 1, 5, 2**62])
    story.save()
    for step in (1, 2):
        story.dense("d", 6 + step, [step])
        story.keyed("k", [-3, 1, 5 + step, 2**62], [1])
        story.save()


# The histories --------------------------------------------------------------------------------------------------------


def rollbacks_of_rollbacks(story: Story) -> None:
    begin(story)
    story.back(1)  # 4
    story.dense("d", 9, [0, 8])
    story.keyed("k", [7, 8], [7])
    story.save()  # 5
    story.back(4)  # 6, a rollback to a rollback
    story.back(3)  # 7, to what both abandoned
    story.dense("d", 8, [3])
    story.save()  # 8
    story.back(7, restore=False)  # 9
    story.back(9)  # 10, to the latest itself
    story.keyed("k", [1], [])
    story.save()  # 11


def rollbacks_across_pruned_numbers(story: Story) -> None:
    begin(story)
    story.run.tag("old", 1)
    story.save(parent=None)  # 4
    story.dense("d", 5, [2])
    story.save()  # 5
    assert set(story.prune(crf.Keep(last=1))) >= {2, 3}
    story.back(1)  # over numbers that are gone
    story.dense("d", 6, [4])
    story.keyed("k", [-3, 9], [9])
    story.save()
    assert story.check() == len(story.told) + 1 + (4 in story.told)  # 6 to 7, and 4 to 5; all else is over what is gone
    story.run.untag("old")
    story.again("compact")
    story.prune(crf.Keep(last=2))
    story.dense("d", 7, [1])
    story.save()


def compactions_after_rollbacks(story: Story) -> None:
    begin(story)
    story.back(2, restore=False)
    story.again("compact")
    story.restore()
    story.dense("d", 7, [0])
    story.save()
    story.back(3)  # of before the compaction
    story.again("compact")
    story.keyed("k", [5, 6], [5])
    story.save()
    story.again("take_over")
    story.again("compact")
    story.dense("d", 8, [7])
    story.save(parent="latest")


def tables_that_come_back_as_others(story: Story) -> None:
    begin(story)
    story.drop("d")
    story.save()
    story.dense("d", 4, dtype="float16")  # another dtype
    story.save()
    story.keyed("d", [0, 1, 2])  # another addressing
    story.dense("k", 3)
    story.save()
    story.drop("k")
    story.keyed("d", [0, 1, 2, -1], [2], key_dtype="uint64")
    story.save()
    story.dense("d", 7)
    story.keyed("k", [-3, 1], [])
    story.save()
    story.back(2)
    story.drop("k")
    story.save()
    story.keyed("k", [1, 5], [])  # as it was at 2, but for a key
    story.save()


def burnt_numbers_between(story: Story) -> None:
    begin(story)
    story.burn()  # 4
    story.dense("d", 8, [7])
    assert story.save() == 5
    story.burn()  # 6
    assert story.back(2, restore=False) == 7
    story.burn()  # 8
    story.keyed("k", [5, 9], [5])
    assert story.save() == 9
    assert story.again("compact") == 10


def takeovers_and_old_checkpoints(story: Story) -> None:
    begin(story)
    story.restart(takeover=True)
    story.dense("d", 8, [5])
    story.save()
    story.restart(2)  # an old one: the next save is a base, whatever the policy
    story.dense("d", 9, [1])
    assert story.run[story.save()].parent is None
    story.keyed("k", [6], [])
    story.save()
    story.restart(1, takeover=True)
    story.keyed("k", [1, 5, 6], [1])
    story.save()


def keys_that_come_back(story: Story) -> None:
    story.keyed("k", [-3, 1, 5, 2**62])
    story.keyed("u", [-1, -2, 3], key_dtype="uint64")
    story.save()
    for keys in ([-3, 5], [-3, 1, 5, 7], [], [1, 2**62], [2**62], [-3, 1, 2**62]):
        story.keyed("k", keys, keys[:1])
        story.keyed("u", keys[::-1], [], key_dtype="uint64")
        story.save()
    story.back(3)
    story.keyed("k", [7], [7])
    story.save()


def tables_without_rows(story: Story) -> None:
    story.dense("d", 0)
    story.keyed("k", [])
    story.save()
    story.save()
    story.dense("d", 3)
    story.keyed("k", [4, 9])
    story.save()
    story.dense("d", 0)
    story.keyed("k", [])
    story.save()
    story.again("compact")
    story.dense("d", 2)
    story.save()
    story.back(3)
    story.dense("d", 4, [])
    story.save()


def growth_that_is_rolled_back(story: Story) -> None:
    begin(story)
    story.dense("d", 30, [0])
    story.save()
    story.back(3)
    story.dense("d", 12, [])  # rows 8 to 11 are new again, and others than before
    story.save()
    story.dense("d", 5, [])
    story.save()
    story.dense("d", 30, [29])
    story.save()
    story.back(1)
    story.dense("d", 7, [])
    story.save()


def tags_on_pruned_numbers(story: Story) -> None:
    begin(story)
    story.run.tag("best", 2)
    story.save(parent=None)  # 4
    story.dense("d", 9, [0])
    story.save()
    goes = story.prune(crf.Keep(last=1))
    assert 2 not in goes and 3 in goes
    for name in ("best", "new"):
        with pytest.raises(crf.PrunedError, match="3"):
            story.run.tag(name, 3)
    assert story.run.tags() == {"best": 2}
    story.back(2)
    story.keyed("k", [-3, 1], [])
    story.save()
    story.run.tag("best", max(story.told))
    assert 2 in story.prune(crf.Keep(last=1))
    assert {problem.kind for problem in story.run.verify()} <= {"burnt"}
    story.dense("d", 9, [1])
    story.save()


HISTORIES: list[Callable[[Story], None]] = [
    rollbacks_of_rollbacks,
    rollbacks_across_pruned_numbers,
    compactions_after_rollbacks,
    tables_that_come_back_as_others,
    burnt_numbers_between,
    takeovers_and_old_checkpoints,
    keys_that_come_back,
    tables_without_rows,
    growth_that_is_rolled_back,
    tags_on_pruned_numbers,
]


@pytest.mark.parametrize(("policy", "bits"), POLICIES)
@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__.replace("_", " "))
def test_history(history: Callable[[Story], None], policy: str, bits: int | None, tmp_path: Path) -> None:
    """LAY-1 to LAY-7, RBK-1, CMP-1, PRU-1, CHG-1 to CHG-3: in each, both readers tell the same of every checkpoint."""
    story = Story(tmp_path / "run", policy, bits)
    history(story)
    told, pairs = story.check(), len(story.told) * (len(story.told) + 1) // 2
    assert told == pairs or (story.has_pruned and told >= len(story.told))
