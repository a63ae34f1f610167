"""A run under random saves, failures and ways back: the kit's machine, with this library's limits made small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

import checkrun_format as crf
from checkrun_format import chain, writer
from checkrun_format.errors import StorageError
from checkrun_format.testing import Fault, FaultStore, MemoryStore
from checkrun_format.testing.machine import ChainMachine, machine_settings
from checkrun_format.testing.model import applied, loaded
from checkrun_format.testing.tables import same_bits


class SmallLimits(ChainMachine):
    """Blocks, pools and chunks of a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        small=st.sampled_from([0, 64, 256, 4 << 20]),
        pool=st.sampled_from([1, 100, 1000, 64 << 20]),
        piece=st.sampled_from([1, 40, 200, 16 << 20]),
        kept=st.sampled_from([1, 2, 64]),
    )
    def limit(self, *, small: int, pool: int, piece: int, kept: int) -> None:
        self.patch.setattr(writer, "_SMALL_BYTES", small)
        self.patch.setattr(writer, "_POOL_BYTES", pool)
        self.patch.setattr(writer, "_PIECE_BYTES", piece)
        self.patch.setattr(chain, "_KEPT", kept)

    def teardown(self) -> None:
        self.patch.undo()
        super().teardown()

    def check_all_recent(self, saved: crf.Checkpoint, name: str) -> None:
        assert all(part.recent == 1 for part in saved._stored.parts(name) if part.count)


TestChain = SmallLimits.TestCase
TestChain.settings = machine_settings(SmallLimits)


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
    store = FaultStore(MemoryStore())
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
