"""Several writers that encode a quantized table alike can tell exactly which of its stored rows are recent (LAY-7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.testing import MemoryStore

ROWS, COLUMNS = 40, 8
FIELDS: dict[str, tuple[str, int | None]] = {"weight": ("float32", COLUMNS), "sum": ("float32", None)}


class Writers:
    """Two writers of a run at 4 bits; each stores half of the rows."""

    def __init__(self, **options: Any) -> None:
        self.run = crf.open_run(MemoryStore(), mode="a", bits=4, policy="one-shot", **options)
        random = np.random.default_rng(0)
        self.values = {"weight": random.random((ROWS, COLUMNS), np.float32), "sum": random.random(ROWS, np.float32)}
        self.since_base: set[int] = set()

    def change(self, row: int) -> None:
        self.values["weight"][row] += 1

    def save(
        self, changed: list[int], puts: Mapping[int, Mapping[str, Any]] | None = None, parent: Any = "auto"
    ) -> tuple[crf.Checkpoint, Any]:
        """What the save becomes, and what it was told to expect."""
        self.since_base |= set(changed)
        with self.run.begin(writers=2, parent=parent) as save:
            outlook = save.outlook("t", rows=ROWS, fields=FIELDS)
            part_lists = []
            for rank, (low, high) in enumerate(((0, 20), (20, ROWS))):
                writer = save.writer(rank)
                stored = (
                    range(low, high) if outlook.storage == "full" else sorted(self.since_base & {*range(low, high)})
                )
                ids = np.array(stored, np.int64)
                recent: Any = np.isin(ids, changed) if outlook.continues else True
                options = {"storage": outlook.storage, "recent": recent, **(puts or {}).get(rank, {})}
                if ids.size:
                    fields = {name: values[ids] for name, values in self.values.items()}
                    writer.put("t", fields, rows=ids, of=ROWS, **options)
                part_lists.append(writer.finish())
            has_parts = any(part_list["tables"] for part_list in part_lists)
            done = save.commit(part_lists, unchanged=[] if has_parts else ["t"])
        if outlook.storage == "full":
            self.since_base = set()
        return done, outlook


def recent(done: crf.Checkpoint) -> list[int]:
    return sorted(int(row) for change in done.changes_since(done.sequence - 1) for row in change.rows)


def test_rows_that_are_stored_again_keep_their_bits() -> None:
    writers = Writers()
    _, first = writers.save([])
    assert (first.storage, first.continues, first.quantized) == ("full", False, True)
    for row in (3, 25, 7):
        writers.change(row)
        done, outlook = writers.save([row])
        assert (outlook.storage, outlook.continues) == ("changed", True)
        assert recent(done) == [row]
        before, now = (writers.run[number].table("t").read()["weight"] for number in (done.sequence - 1, done.sequence))
        assert (before != now).any(1).nonzero()[0].tolist() == [row]
    assert done.table("t").stored_rows == 3
    base, outlook = writers.save([], parent=None)  # a base again: the same bits
    assert (outlook.continues, base.parent, base.table("t").storage) == (True, None, "full")
    assert recent(base) == []
    assert np.array_equal(base.table("t").read()["weight"], now)


def test_a_plain_save_goes_on_from_writers() -> None:
    writers = Writers()
    writers.save([])
    writers.change(3)
    table = crf.Table(dict(sorted(writers.values.items())), changed=[3])
    done = writers.run.save(crf.State(tables={"t": table}))
    assert recent(done) == [3]
    writers.change(4)
    table = crf.Table(dict(sorted(writers.values.items())), changed=[4])
    done = writers.run.save(crf.State(tables={"t": table}))
    assert (recent(done), done.table("t").stored_rows) == ([4], 2)


@pytest.mark.parametrize(
    "puts",
    [{1: {"bits": 8}}, {1: {"encoder": "minmax"}}, {1: {"bits": None}}, {0: {"store_as": {"sum": "float16"}}}],
)
def test_a_writer_of_its_own_ways(puts: Mapping[int, Mapping[str, Any]]) -> None:
    writers = Writers()
    writers.save([], puts)
    writers.change(3)
    done, outlook = writers.save([3])
    assert not outlook.continues
    assert recent(done) == [3]  # all that is stored
    writers.change(4)
    done, _ = writers.save([4])
    assert recent(done) == [3, 4]


def test_writers_that_chose_other_qparams() -> None:
    writers = Writers()
    writers.values["weight"][20:] *= 1e30  # beyond what halves hold
    writers.save([])
    assert not writers.save([])[1].continues


def test_after_a_restore_what_was_decoded_is_encoded_anew() -> None:
    writers = Writers()
    writers.save([])
    assert writers.save([])[1].continues
    writers.run.restore()
    assert not writers.save([])[1].continues


def test_rows_cut_by_columns() -> None:
    """Each piece has qparams of its own: the next writers may cut elsewhere."""
    writers = Writers()
    values = writers.values
    with writers.run.begin(writers=2) as save:
        part_lists = []
        for rank in range(2):
            writer = save.writer(rank)
            half = slice(4 * rank, 4 * rank + 4)
            fields = {"weight": values["weight"][:, half], **({"sum": values["sum"]} if rank else {})}
            writer.put("t", fields, rows=(0, ROWS), of=ROWS, columns={"weight": (half.start, half.stop)})
            part_lists.append(writer.finish())
        save.commit(part_lists)
    assert not writers.save([])[1].continues
