"""Several writers of one checkpoint: whoever stores which rows and columns, what is read is the whole (9.1, LAY-1)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.errors import (
    CheckpointNotFoundError,
    ConcurrentCommitError,
    DamagedError,
    InvalidInputError,
    StorageError,
)
from checkrun_format.stores import LocalStore
from tests.property.strategies import Fields, Ids, MemoryStore, SlowStore, cuts, same_bits, same_fields, taken

ROOT = Path(__file__).parents[2]
PartLists = list[dict[str, Any]]


def table(rows: int = 12, columns: int = 8, seed: int = 0) -> Fields:
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.normal(size=(rows, columns)).astype(np.float32),
        "sum": rng.integers(0, 2**32, rows, np.uint32).view(np.float32),
    }


def new_run(**options: Any) -> crf.Run:
    return crf.open_run(MemoryStore(), mode="a", **{"chunk_bytes": 64, **options})


def writers_of(save: crf.Save) -> list[crf.StagedWriter]:
    return [save.writer(rank) for rank in range(save.token["writers"])]


def finished(writers: Sequence[crf.StagedWriter]) -> PartLists:
    """Part lists as they arrive over a network."""
    part_lists: PartLists = json.loads(json.dumps([writer.finish() for writer in writers]))
    return part_lists


def first_save(run: crf.Run, tables: dict[str, Fields]) -> crf.Checkpoint:
    return run.save(crf.State(tables={name: crf.Table(fields) for name, fields in tables.items()}))


def put_rows(writer: crf.StagedWriter, name: str, fields: Fields, low: int, high: int, **options: Any) -> None:
    count = len(fields["weight"])
    writer.put(name, taken(fields, slice(low, high)), rows=(low, high), of=count, **options)


class TestCuts:
    """LAY-1: however a full table is cut over the writers, it is read as one."""

    def test_row_wise(self) -> None:
        run, fields = new_run(), table()
        with run.begin(step=3, writers=3) as save:
            writers = writers_of(save)
            for rank, writer in enumerate(writers):
                put_rows(writer, "t", fields, 4 * rank, 4 * rank + 4)
            done = save.commit(finished(writers), extra={"a": [1]})
        assert (done.sequence, done.step, done.extra, done.parent) == (1, 3, {"a": [1]}, None)
        assert same_fields(done.table("t").read(), fields)
        assert len(done.commit.manifest.sha256) == 64
        assert run.verify() == []

    def test_column_wise(self) -> None:
        """One scalar per row is stored by one writer; one per row and shard is a field of (rows, shards)."""
        run, fields = new_run(), table()
        fields["shards"] = np.arange(24, dtype=np.float32).reshape(12, 2)
        with run.begin(writers=2) as save:
            writers = writers_of(save)
            for rank, writer in enumerate(writers):
                part = {
                    "weight": fields["weight"][:, 4 * rank : 4 * rank + 4],
                    "shards": fields["shards"][:, rank : rank + 1],
                }
                if rank == 1:
                    part["sum"] = fields["sum"]
                columns = {"weight": (4 * rank, 4 * rank + 4), "shards": (rank, rank + 1)}
                writer.put("t", part, rows=(0, 12), of=12, columns=columns)
            done = save.commit(finished(writers))
        assert same_fields(done.table("t").read(), fields)
        found = done.table("t").read(slice(2, 9), columns=slice(3, 5), fields=["weight"])
        assert same_fields(found, {"weight": fields["weight"][2:9, 3:5]})
        assert done.table("t").stored_rows == 12

    def test_table_wise(self) -> None:
        run, fields = new_run(), {f"t{rank}": table(seed=rank) for rank in range(3)}
        with run.begin(writers=3) as save:
            writers = writers_of(save)
            for rank, writer in enumerate(writers):
                put_rows(writer, f"t{rank}", fields[f"t{rank}"], 0, 12)
            done = save.commit(finished(writers[::-1]))
        assert {name: set(done.table(name).read()) for name in done.tables} == {
            name: {"weight", "sum"} for name in fields
        }
        assert all(same_fields(done.table(name).read(), fields[name]) for name in fields)

    def test_grid(self) -> None:
        run, fields = new_run(), table()
        with run.begin(writers=4) as save:
            writers = writers_of(save)
            for rank, writer in enumerate(writers):
                low, left = 6 * (rank // 2), 4 * (rank % 2)
                part = {"weight": fields["weight"][low : low + 6, left : left + 4]}
                if rank % 2:
                    part["sum"] = fields["sum"][low : low + 6]
                writer.put("t", part, rows=(low, low + 6), of=12, columns={"weight": (left, left + 4)})
            done = save.commit(finished(writers))
        assert same_fields(done.table("t").read(), fields)
        assert same_fields(done.table("t").take([11, 0, 5, 5]), taken(fields, [11, 0, 5, 5]))

    @pytest.mark.parametrize("as_list", [False, True])
    def test_listed_rows(self, as_list: bool) -> None:
        """Row r at writer r % 3, in any order."""
        run, fields = new_run(), table()
        with run.begin(writers=3) as save:
            writers = writers_of(save)
            for rank, writer in enumerate(writers):
                ids = np.arange(12)[::-1][rank::3]
                writer.put("t", taken(fields, ids), rows=ids.tolist() if as_list else ids, of=12)
            done = save.commit(finished(writers))
        assert same_fields(done.table("t").read(), fields)

    @pytest.mark.parametrize(("rows", "writers"), [(6, 4), (1, 4), (0, 3), (3, 8)])
    def test_uneven(self, rows: int, writers: int) -> None:
        """6 rows over 4 ranks are 2, 2, 2, 0; some ranks hold nothing at all."""
        run, fields = new_run(), table(rows)
        step = -(-rows // writers)
        with run.begin(writers=writers) as save:
            staged = writers_of(save)
            for rank, writer in enumerate(staged):
                low, high = min(rank * step, rows), min((rank + 1) * step, rows)
                put_rows(writer, "t", fields, low, high)
            done = save.commit(finished(staged))
        assert same_fields(done.table("t").read(), fields)
        assert len(done.table("t")) == rows
        assert run.verify() == []

    def test_writers_that_store_nothing(self) -> None:
        run, fields = new_run(), table()
        with run.begin(writers=3) as save:
            writers = writers_of(save)
            put_rows(writers[1], "t", fields, 0, 12)
            done = save.commit(finished(writers))
        assert same_fields(done.table("t").read(), fields)
        names = [key.rpartition("/")[2] for key in run._store.list("00000001")]
        assert sorted(name for name in names if name.startswith("parts")) == [f"parts-{n}.json.gz" for n in range(3)]

    def test_widths_differ_from_part_to_part(self) -> None:
        """LAY-6; DEC-5 in each."""
        run, fields = new_run(bits=4), table()
        bits: list[Any] = [1, 8, None, {"weight": 3}]
        with run.begin(writers=4) as save:
            writers = writers_of(save)
            for rank, writer in enumerate(writers):
                put_rows(writer, "t", fields, 3 * rank, 3 * rank + 3, bits=bits[rank])
            done = save.commit(finished(writers))
        found = done.table("t").read()
        assert same_bits(found["sum"], fields["sum"])
        assert same_bits(found["weight"][6:9], fields["weight"][6:9])
        for low, width in ((0, 1), (3, 8), (9, 3)):
            rows = fields["weight"][low : low + 3].astype(np.float64)
            spread = rows.max(axis=1, keepdims=True) - rows.min(axis=1, keepdims=True)
            error = np.abs(found["weight"][low : low + 3] - rows)
            assert (error <= 0.506 * spread / (2**width - 1)).all()
            assert width == 8 or error.max() > 0

    def test_small_tables_of_all_writers(self) -> None:
        """Their parts share one block per writer."""
        run, fields = new_run(chunk_bytes=1 << 20), {f"{n}": table(5, seed=n) for n in range(40)}
        with run.begin(writers=2) as save:
            writers = writers_of(save)
            for name, values in fields.items():
                put_rows(writers[0], name, values, 0, 3)
                put_rows(writers[1], name, values, 3, 5)
            done = save.commit(finished(writers))
        assert all(same_fields(done.table(name).read(), values) for name, values in fields.items())
        groups = {key.split("/")[2] for key in run._store.list("00000001") if "/block-" in key}
        assert groups == {"block-0-0", "block-1-0"}

    def test_tensors_and_blobs_of_all_writers(self) -> None:
        """TEN-1: names are unique over all writers."""
        run = new_run()
        with run.begin(writers=2) as save:
            writers = writers_of(save)
            writers[0].put_tensor("a", np.arange(30.0))
            writers[1].put_tensor("b", np.arange(6, dtype=np.int16).reshape(2, 3))
            writers[1].put_tensor("none", np.zeros((0, 3), np.float32))
            writers[0].put_blob("x", b"one")
            writers[1].put_blob("y", b"two")
            done = save.commit(finished(writers))
        assert same_bits(done.tensor("a"), np.arange(30.0))
        assert same_bits(done.tensor("b"), np.arange(6, dtype=np.int16).reshape(2, 3))
        assert done.tensor("none").shape == (0, 3)
        assert (done.blob("x"), done.blob("y")) == (b"one", b"two")

    def test_a_large_extra(self) -> None:
        """One writer stores what does not fit into the manifest."""
        run, extra = new_run(), {"rng": ["é" * 40_000, 7]}
        with run.begin(writers=2) as save:
            writers = writers_of(save)
            writers[1].put_extra(extra)
            done = save.commit(finished(writers))
        assert run.latest().extra == done.extra == extra
        assert done._stored.manifest.extra is None
        for other, told in ((extra, r"takes \d+ bytes; let one"), (1, "given twice")):
            with run.begin(writers=2) as save:
                writers = writers_of(save)
                if other == 1:
                    writers[0].put_extra(extra)
                with pytest.raises(InvalidInputError, match=told):
                    save.commit(finished(writers), extra=other)
        with run.begin(writers=1) as save, pytest.raises(InvalidInputError, match="cannot carry"):
            save.writer(0).put_extra({1, 2})


def test_keyed_over_several_writers() -> None:
    """LAY-5: tombstones of a layer, in whichever part, apply before its rows."""
    run, fields = new_run(), table(10)
    keys = np.array([-5, 3, 2**62, 7, -(2**63), 11, 12, 13, 14, 15])
    with run.begin(writers=2) as save:
        writers = writers_of(save)
        for rank, writer in enumerate(writers):
            writer.put("t", taken(fields, slice(rank, None, 2)), keys=keys[rank::2])
        done = save.commit(finished(writers))
    order = np.argsort(keys)
    assert same_bits(done.table("t").keys(), keys[order])
    assert same_fields(done.table("t").read(), taken(fields, order))

    fresh = table(3, seed=1)
    with run.begin(writers=3, parent="latest") as save:
        writers = writers_of(save)
        writers[0].put("t", taken(fresh, [0]), keys=[100], storage="changed", deleted=[3, 7])
        writers[1].put("t", taken(fresh, [1]), keys=[3], storage="changed", deleted=[11])
        writers[2].put("t", {}, keys=[], storage="changed", deleted=[-(2**63), 999])
        writers[1].put("t", taken(fresh, [2]), keys=[2**62], storage="changed")
        done = save.commit(finished(writers))
    assert done.table("t").storage == "changed"
    assert done.table("t").keys().tolist() == [-5, 3, 12, 13, 14, 15, 100, 2**62]
    assert same_fields(done.table("t").take([3, 100, 2**62]), taken(fresh, [1, 0, 2]))
    (change,) = done.changes_since(1)
    assert (change.rows.tolist(), change.deleted.tolist()) == ([3, 100, 2**62], [-(2**63), 7, 11, 999])
    assert run.verify() == []


def test_nothing_but_tombstones() -> None:
    """LAY-5: an increment in which keys go and no row comes needs no field; a first table does."""
    run = new_run()
    with run.begin(writers=1) as save:
        writers = writers_of(save)
        writers[0].put("t", {}, keys=[], deleted=[1])
        with pytest.raises(InvalidInputError, match="field"):
            save.commit(finished(writers))
    run.save(crf.State(tables={"t": crf.Table(table(3), keys=[1, 2, 3])}))
    with run.begin(writers=2, parent="latest") as save:
        writers = writers_of(save)
        writers[1].put("t", {}, keys=[], storage="changed", deleted=[1, 3])
        done = save.commit(finished(writers))
    assert done.table("t").keys().tolist() == [2]
    assert same_fields(done.table("t").read(), taken(table(3), [1]))
    assert [(c.rows.tolist(), c.deleted.tolist()) for c in done.changes_since(1)] == [([], [1, 3])]


def test_numbers_of_numpy() -> None:
    """Also a numpy integer is a number of rows, a writer, a column."""
    run, fields = new_run(), table()
    n: Any = np.int64
    with run.begin(writers=n(2), step=n(5)) as save:
        writers = [save.writer(n(0)), save.writer(n(1))]
        where: dict[str, Any] = {"rows": (n(0), n(12)), "of": n(12)}
        writers[0].put("t", {"weight": fields["weight"][:, :3]}, columns=(n(0), n(3)), **where)
        writers[1].put("t", {"weight": fields["weight"][:, 3:]}, columns={"weight": (n(3), n(8))}, **where)
        writers[1].put("t", {"sum": fields["sum"]}, rows=slice(None, None), of=12)
        done = save.commit(finished(writers))
    assert same_fields(done.table("t").read(), fields)
    assert done.step == 5


def test_a_token_that_is_none() -> None:
    tokens: list[Any] = [None, {"url": "x"}, []]
    for token in tokens:
        with pytest.raises(InvalidInputError, match="token"):
            crf.join_save(token)


def test_another_run_joins_by_its_own_store(tmp_path: Path) -> None:
    """Nothing but it has the store, or the credentials; a folder is as durable as the token says."""
    store, fields = MemoryStore(), table()
    run = crf.open_run(store, mode="a", chunk_bytes=64)
    with run.begin(writers=2) as save:
        token = json.loads(json.dumps(save.token))
        writers = [save.writer(0), crf.open_run(store).join(token).writer(1)]
        for rank, writer in enumerate(writers):
            put_rows(writer, "t", fields, 6 * rank, 6 * rank + 6)
        done = save.commit(finished(writers))
    assert same_fields(done.table("t").read(), fields)

    for durable in (True, False):
        first = crf.open_run(tmp_path / str(durable), mode="a", durable=durable)
        with first.begin(writers=1) as save:
            joined = crf.open_run(first.url, durable=not durable).join(save.token)
            assert isinstance(joined._store, LocalStore)
            assert joined._store.durable == durable


def test_uint64_keys() -> None:
    run, fields = new_run(), table(3)
    keys = np.array([1, 2**63 + 1, 2**64 - 1], np.uint64)
    with run.begin(writers=1) as save:
        writers = writers_of(save)
        writers[0].put("t", fields, keys=keys)
        done = save.commit(finished(writers))
    assert same_bits(done.table("t").keys(), keys[[1, 2, 0]])
    assert same_fields(done.table("t").take(keys), fields)


class TestIncrements:
    """LAY-2 to LAY-4: layers of several writers over those of another number of writers, and over plain saves."""

    def test_cut_otherwise_from_layer_to_layer(self) -> None:
        """A base by rows, an increment by columns, another by rows, then a plain save: the dense oracle is met."""
        run, fields = new_run(), table()
        with run.begin(writers=4) as save:
            writers = writers_of(save)
            for rank, writer in enumerate(writers):
                put_rows(writer, "t", fields, 3 * rank, 3 * rank + 3)
            save.commit(finished(writers))
        ids = np.array([1, 4, 9])
        fields["weight"][ids] += 1
        fields["sum"][ids] = 7
        with run.begin(writers=2, parent="latest") as save:
            writers = writers_of(save)
            for rank, writer in enumerate(writers):
                left = 3 * rank
                part = {"weight": fields["weight"][ids][:, left : [3, 8][rank]]}
                if rank == 0:
                    part["sum"] = fields["sum"][ids]
                where = {"weight": (left, [3, 8][rank])}
                writer.put("t", part, rows=ids, of=12, columns=where, storage="changed", recent=rank == 0)
            done = save.commit(finished(writers))
        assert same_fields(done.table("t").read(), fields)
        assert [change.rows.tolist() for change in done.changes_since(1)] == [[1, 4, 9]]

        grown = {name: np.concatenate([values, values[:2]]) for name, values in fields.items()}
        grown["sum"][4] = 3
        with run.begin(writers=2, parent="latest") as save:
            writers = writers_of(save)
            writers[1].put("t", taken(grown, [4, 13]), rows=[4, 13], of=14, storage="changed")
            writers[0].put("t", taken(grown, [12]), rows=(12, 13), of=14, storage="changed")
            done = save.commit(finished(writers))
        assert same_fields(done.table("t").read(), grown)
        assert [c.rows.tolist() for c in done.changes_since(1)] == [[1, 4, 9, 12, 13]]

        grown["sum"][0] = 5
        done = run.save(crf.State(tables={"t": crf.Table(grown, changed=[0])}), parent="latest")
        assert (done.table("t").stored_rows, done.parent) == (1, 3)
        assert same_fields(done.table("t").read(), grown)
        assert run.verify() == []

    def test_unchanged_and_dropped(self) -> None:
        run, fields = new_run(), table()
        first_save(run, {"a": fields, "b": fields, "c": fields})
        with run.begin(writers=1, parent="latest") as save:
            writers = writers_of(save)
            put_rows(writers[0], "c", fields, 0, 12)
            done = save.commit(finished(writers), unchanged=["a"], dropped=["b"])
        assert (done.tables, done.table("a").storage) == (["c", "a"], "unchanged")
        assert same_fields(done.table("a").read(), fields)
        assert [(c.table, c.dropped) for c in done.changes_since(1) if c.dropped] == [("b", True)]

    def test_unchanged_means_since_the_parent(self) -> None:
        """What changed between the parent and the latest checkpoint must not fall back unnoticed."""
        run, fields = new_run(), table()
        first_save(run, {"t": fields})
        changed = {name: values.copy() for name, values in fields.items()}
        changed["sum"][3] = 1
        run.save(crf.State(tables={"t": crf.Table(changed, changed=[3])}), parent=1)
        with run.begin(writers=1, parent=1) as save, pytest.raises(InvalidInputError, match="since the parent"):
            save.commit(finished(writers_of(save)), unchanged=["t"])
        assert same_fields(run.load().tables["t"].fields, changed)

    def test_changed_means_since_the_parent(self) -> None:
        run, fields = new_run(), table()
        first_save(run, {"t": fields})
        changed = {name: values.copy() for name, values in fields.items()}
        changed["sum"][3] = 1
        run.save(crf.State(tables={"t": crf.Table(changed, changed=[3])}), parent=1)
        with run.begin(writers=1, parent=1) as save:
            writers = writers_of(save)
            writers[0].put("t", taken(fields, [4]), rows=[4], of=12, storage="changed")
            with pytest.raises(InvalidInputError, match="row 3"):
                save.commit(finished(writers))
        assert same_fields(run.load().tables["t"].fields, changed)

    def test_what_a_failed_save_was_told_is_pending(self) -> None:
        """Rows named to a plain save that failed must be among those of a staged one that follows."""
        store = LosingStore()
        run, fields = crf.open_run(store, mode="a"), table()
        first_save(run, {"t": fields})
        store.loses, fields["sum"][3] = True, 1
        with pytest.raises(StorageError):
            run.save(crf.State(tables={"t": crf.Table(fields, changed=[3])}))
        for rows, match in (([4], "row 3"), ([], "unchanged")):
            with run.begin(writers=1, parent="latest") as save:
                writers = writers_of(save)
                if rows:
                    writers[0].put("t", taken(fields, rows), rows=rows, of=12, storage="changed")
                with pytest.raises(InvalidInputError, match=match):
                    save.commit(finished(writers), unchanged=[] if rows else ["t"])
        with run.begin(writers=1, parent="latest") as save:
            writers = writers_of(save)
            writers[0].put("t", taken(fields, [3, 4]), rows=[3, 4], of=12, storage="changed")
            done = save.commit(finished(writers))
        assert same_fields(done.table("t").read(), fields)

    def test_a_table_that_shrank_is_stored_full(self) -> None:
        """LAY-3, and its number of rows must reach who follows (CHG-2)."""
        run, fields = new_run(), table(5)
        first_save(run, {"t": taken(fields, slice(0, 3))})
        run.save(crf.State(tables={"t": crf.Table(fields, changed=[])}), parent=1)
        with run.begin(writers=1, parent=1) as save:
            writers = writers_of(save)
            writers[0].put("t", taken(fields, [3]), rows=[3], of=4, storage="changed")
            with pytest.raises(InvalidInputError, match="full"):
                save.commit(finished(writers))
        assert run.latest().sequence == 2

    def test_without_an_origin_all_is_new(self) -> None:
        """HEA-2: a writer that has not restored replaces every table."""
        store = MemoryStore()
        first_save(crf.open_run(store, mode="a"), {"t": table()})
        run = crf.open_run(store, mode="a")
        with run.begin(writers=1) as save:
            assert save.token["parent"] is None
            writers = writers_of(save)
            put_rows(writers[0], "t", table(seed=1), 0, 12)
            done = save.commit(finished(writers))
        assert [c.dropped for c in done.changes_since(1)] == [True, False]
        assert list(done.changes_since(1))[1].rows.tolist() == list(range(12))

    def test_a_changed_table_needs_a_parent(self) -> None:
        run = new_run()
        with run.begin(writers=1) as save:
            writers = writers_of(save)
            writers[0].put("t", taken(table(), [1]), rows=[1], of=12, storage="changed")
            with pytest.raises(InvalidInputError, match="store it full"):
                save.commit(finished(writers))


class TestRefused:
    """What does not fit together is refused before the commit; nothing is committed (kind invalid_input)."""

    def refused(self, puts: Callable[[list[crf.StagedWriter]], object], match: str, **commit: Any) -> None:
        run = new_run()
        with run.begin(writers=2) as save:
            writers = writers_of(save)
            puts(writers)
            with pytest.raises(InvalidInputError, match=match):
                save.commit(finished(writers), **commit)
        assert run.latest(default=None) is None
        first_save(run, {"t": table()})
        assert run.latest().sequence == 1

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            pytest.param((0, 5), (6, 12), id="gap"),
            pytest.param((0, 6), (5, 12), id="overlap"),
            pytest.param((0, 6), (5, 11), id="gap and overlap of one size"),
        ],
    )
    def test_ranges_that_are_not_the_table(self, first: tuple[int, int], second: tuple[int, int]) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            put_rows(writers[0], "t", table(), *first)
            put_rows(writers[1], "t", table(), *second)

        self.refused(puts, "LAY-1")

    def test_listed_gap_and_overlap_of_one_size(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            fields = table()
            writers[0].put("t", taken(fields, slice(0, 6)), rows=np.arange(6), of=12)
            writers[1].put("t", taken(fields, slice(5, 11)), rows=np.arange(5, 11), of=12)

        self.refused(puts, "LAY-1")

    def test_one_row_listed_and_in_a_range(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            put_rows(writers[0], "t", table(), 0, 8)
            writers[1].put("t", taken(table(), [7, 8, 9, 10]), rows=[7, 8, 9, 10], of=12)

        self.refused(puts, "LAY-1")

    def test_a_key_at_two_writers(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            writers[0].put("t", table(3), keys=[1, 2, 3])
            writers[1].put("t", table(3), keys=[3, 4, 5])

        self.refused(puts, "LAY-1")

    def test_a_column_twice_and_another_never(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            weight = table()["weight"]
            writers[0].put("t", {"weight": weight[:, :4]}, rows=(0, 12), of=12, columns=(0, 4))
            writers[1].put("t", {"weight": weight[:, 4:]}, rows=(0, 12), of=12, columns=(2, 6))

        self.refused(puts, "LAY-1")

    def test_columns_of_other_rows(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            weight = table()["weight"]
            writers[0].put("t", {"weight": weight[:6]}, keys=np.arange(6), columns=(0, 8))
            writers[1].put("t", {"weight": weight[6:]}, keys=np.arange(6, 12), columns=(8, 16))

        self.refused(puts, "LAY-")

    def test_a_field_is_missing_in_some_rows(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            put_rows(writers[0], "t", table(), 0, 6)
            writers[1].put("t", {"weight": table()["weight"][6:]}, rows=(6, 12), of=12)

        self.refused(puts, "'sum'")

    def test_dtypes_differ(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            put_rows(writers[0], "t", table(), 0, 6)
            other = table() | {"sum": table()["sum"].astype(np.float64)}
            put_rows(writers[1], "t", other, 6, 12)

        with np.errstate(invalid="ignore"):
            self.refused(puts, "'sum'")

    def test_dimensions_differ(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            put_rows(writers[0], "t", table(), 0, 6)
            put_rows(writers[1], "t", table() | {"sum": table()["sum"].reshape(12, 1)}, 6, 12)

        self.refused(puts, "'sum'")

    def test_numbers_of_rows_differ(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            put_rows(writers[0], "t", table(), 0, 6)
            writers[1].put("t", taken(table(), slice(6, 12)), rows=(6, 12), of=13)

        self.refused(puts, "rows is 13")

    def test_addressing_differs(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            put_rows(writers[0], "t", table(), 0, 12)
            writers[1].put("t", taken(table(), [0]), keys=[5])

        self.refused(puts, "'t'")

    def test_a_tensor_at_two_writers(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            for writer in writers:
                writer.put_tensor("a", np.ones(3))

        self.refused(puts, "tensor 'a'")

    def test_a_blob_twice(self) -> None:
        def puts(writers: list[crf.StagedWriter]) -> None:
            writers[0].put_blob("a", b"1")
            writers[0].put_blob("a", b"2")

        self.refused(puts, "blob 'a'")

    def test_extra_that_is_not_json(self) -> None:
        self.refused(lambda writers: put_rows(writers[0], "t", table(), 0, 12), "extra", extra={"a": {1, 2}})

    def test_a_table_that_never_was_is_not_unchanged(self) -> None:
        self.refused(lambda writers: put_rows(writers[0], "t", table(), 0, 12), "'u'", unchanged=["u"])

    def test_part_lists_that_are_missing_or_strange(self) -> None:
        run = new_run()
        with run.begin(writers=2) as save, run.begin(writers=2) as other:
            strangers = finished(writers_of(other))
            writers = writers_of(save)
            put_rows(writers[0], "t", table(), 0, 12)
            part_lists = finished(writers)
            for wrong, match in (
                (part_lists[:1], "writers 0 to 1"),
                ([part_lists[0], part_lists[0]], "writers 0 to 1"),
                ([part_lists[0], strangers[1]], "another attempt"),
                ([part_lists[0], {"file": 1}], "part list"),
                (None, "part list"),
                ([part_lists[0], part_lists[1] | {"document": None}], "part list"),
            ):
                with pytest.raises(InvalidInputError, match=match):
                    save.commit(wrong)  # type: ignore[arg-type]
            assert run.latest(default=None) is None
            assert same_fields(save.commit(part_lists).table("t").read(), table())

    def test_a_forgotten_table_and_one_named_twice(self) -> None:
        run = new_run()
        first_save(run, {"a": table(), "b": table()})
        with run.begin(writers=1, parent="latest") as save:
            writers = writers_of(save)
            put_rows(writers[0], "b", table(), 0, 12)
            part_lists = finished(writers)
            for named, match in (
                ({}, "'a'"),
                ({"unchanged": ["b"], "dropped": ["a"]}, "'b'"),
                ({"unchanged": ["a", "a"]}, "'a'"),
                ({"unchanged": ["a"], "dropped": ["a"]}, "'a'"),
                ({"unchanged": ["a"], "dropped": ["b"]}, "'b'"),
                ({"unchanged": ["a"], "dropped": ["zz"]}, "'zz'"),
                ({"unchanged": "a"}, "list of names"),
                ({"unchanged": ["a"], "dropped": 3}, "list of names"),
            ):
                with pytest.raises(InvalidInputError, match=match):
                    save.commit(part_lists, **named)
            assert save.commit(part_lists, unchanged=["a"]).tables == ["b", "a"]

    def test_new_rows_that_nobody_lists(self) -> None:
        """LAY-3."""
        run = new_run()
        first_save(run, {"t": table()})
        with run.begin(writers=1, parent="latest") as save:
            writers = writers_of(save)
            writers[0].put("t", taken(table(), [0]), rows=[13], of=14, storage="changed")
            with pytest.raises(InvalidInputError, match="LAY-3"):
                save.commit(finished(writers))
        assert run.latest().sequence == 1

    @pytest.mark.parametrize(
        "wrong",
        [
            {"rows": (0, 12)},
            {"of": 12},
            {"rows": (0, 11), "of": 12},
            {"rows": (1, 13), "of": 12},
            {"rows": (-1, 11), "of": 12},
            {"rows": np.arange(1, 13), "of": 12},
            {"rows": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10], "of": 12},
            {"rows": np.arange(12.0), "of": 12},
            {"rows": (0, 12), "of": 12, "keys": np.arange(12)},
            {"keys": np.arange(11)},
            {"keys": [*range(11), 0]},
            {"rows": (0, 12), "of": 12, "storage": "unchanged"},
            {"rows": (0, 12), "of": 12, "columns": (0, 7)},
            {"rows": (0, 12), "of": 12, "columns": {"sum": (0, 1)}},
            {"rows": (0, 12), "of": 12, "columns": {"weight": (-1, 7)}},
            {"rows": (0, 12), "of": 12, "deleted": [3]},
            {"rows": (0, 12), "of": 12, "recent": np.zeros(11, bool)},
            {"rows": (0, 12), "of": 12, "recent": np.zeros(12, int)},
            {"rows": (0, 12), "of": 12, "bits": 9},
            {"rows": (0, 12), "of": 12, "bits": {"sum": 4}},
            {"rows": (0, 12), "of": 12, "bits": {"other": 4}},
            {"rows": (0, 12), "of": 12, "store_as": {"sum": "float64"}},
            {"rows": (0, 12), "of": 12, "store_as": {"other": "float16"}},
            {"rows": (0, 12), "of": 12.0},
            {"rows": (0, 6, 12), "of": 12},
            {"rows": ("0", "12"), "of": 12},
            {"rows": (0.0, 12.0), "of": 12},
            {"rows": slice(0, 12, 2), "of": 12},
            {"rows": (0, 12), "of": 12, "columns": (0,)},
            {"rows": (0, 12), "of": 12, "columns": "08"},
            {"rows": (0, 12), "of": 12, "columns": {"weight": 8}},
        ],
        ids=str,
    )
    def test_a_part_that_makes_no_sense(self, wrong: dict[str, Any]) -> None:
        run = new_run()
        with run.begin(writers=1) as save:
            writers = writers_of(save)
            with pytest.raises(InvalidInputError):
                writers[0].put("t", table(), **wrong)
            put_rows(writers[0], "t", table(), 0, 12)
            assert same_fields(save.commit(finished(writers)).table("t").read(), table())

    def test_a_table_of_less_than_no_rows(self) -> None:
        with new_run().begin(writers=1) as save, pytest.raises(InvalidInputError, match="'t', of: -1 is no number of"):
            save.writer(0).put("t", taken(table(), []), rows=[], of=-1)

    def test_writers_are_numbered(self) -> None:
        run = new_run()
        for count in (0, -1, True, 1.5, "2", None):
            with pytest.raises(InvalidInputError):
                run.begin(writers=count)  # type: ignore[arg-type]
        save = run.begin(writers=2)
        for rank in (2, -1, True, 0.0, "0", None):
            with pytest.raises(InvalidInputError):
                save.writer(rank)  # type: ignore[arg-type]
        writer = save.writer(0)
        writer.finish()
        with pytest.raises(InvalidInputError):
            writer.finish()
        with pytest.raises(InvalidInputError):
            put_rows(writer, "t", table(), 0, 12)


class TestValuesMayChangeAfterPut:
    """What is stored is what the arrays held when `put` was called, whichever way the part takes."""

    @pytest.mark.parametrize("small", [0, 4 << 20])
    @pytest.mark.parametrize("order", ["sorted", "reversed", "strided"])
    def test_keyed(self, monkeypatch: pytest.MonkeyPatch, small: int, order: str) -> None:
        monkeypatch.setattr("checkrun_format.writer._SMALL_BYTES", small)
        whole: Ids = np.repeat(np.array([2, 5, 9, 40]), 2)
        keys = {"sorted": whole[::2].copy(), "reversed": whole[::-2].copy(), "strided": whole[::2]}[order]
        fields, deleted, recent = table(4), np.array([7, 8]), np.array([True, False, True, True])
        wanted, wanted_keys = {name: values.copy() for name, values in fields.items()}, keys.copy()
        run = crf.open_run(SlowStore(), mode="a", chunk_bytes=64)
        with run.begin(writers=1) as save:
            writers = writers_of(save)
            writers[0].put("t", fields, keys=keys, deleted=deleted, recent=recent)
            for array in (*fields.values(), keys, deleted):
                array[...] = 1
            recent[...] = False
            done = save.commit(finished(writers))
        places = np.argsort(wanted_keys)
        assert same_bits(done.table("t").keys(), wanted_keys[places])
        assert same_fields(done.table("t").read(), taken(wanted, places))
        (part,) = done._stored.parts("t")
        mask = np.array([True, False, True, True])[places]
        assert done._stored.block(part).recent(part).tolist() == mask.tolist()
        assert done._stored.block(part).deleted(part).tolist() == [7, 8]

    @pytest.mark.parametrize("small", [0, 4 << 20])
    @pytest.mark.parametrize("bits", [None, 4])
    def test_dense(self, monkeypatch: pytest.MonkeyPatch, small: int, bits: int | None) -> None:
        monkeypatch.setattr("checkrun_format.writer._SMALL_BYTES", small)
        fields, rows = table(), np.arange(12)
        tensor, blob = np.arange(5.0), bytearray(b"abc")
        wanted = run_of(fields, bits)
        run = crf.open_run(SlowStore(), mode="a", chunk_bytes=64, bits=bits)
        with run.begin(writers=1) as save:
            writers = writers_of(save)
            writers[0].put("t", fields, rows=rows, of=12, store_as={"sum": "float16"})
            writers[0].put_tensor("a", tensor)
            writers[0].put_blob("b", bytes(blob))
            for array in (*fields.values(), rows, tensor):
                array[...] = 1
            done = save.commit(finished(writers))
        assert same_fields(done.table("t").read(), wanted)
        assert same_bits(done.tensor("a"), np.arange(5.0))
        assert done.blob("b") == b"abc"


def run_of(fields: Fields, bits: int | None) -> Fields:
    """What a plain save makes of a table."""
    run = new_run(bits=bits)
    done = run.save(crf.State(tables={"t": crf.Table(fields, store_as={"sum": "float16"})}))
    return done.table("t").read()


@given(st.data())
def test_random_cuts_equal_the_dense_oracle(data: st.DataObject) -> None:
    """LAY-1, PRT-4: save from W writers in a random grid, load everything and any slice."""
    rows, columns = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 17))
    fields = table(rows, columns, seed=data.draw(st.integers(0, 99)))
    count = data.draw(st.integers(1, 5))
    run = new_run(chunk_bytes=data.draw(st.sampled_from([1, 50, 200, 4096])))
    with run.begin(writers=count) as save:
        writers = writers_of(save)
        writers[0].put("t", taken(fields, slice(0, 0)), rows=(0, 0), of=rows)
        for low, high in data.draw(cuts(rows, 4)):
            grid = data.draw(cuts(columns, 3))
            for index, (left, right) in enumerate(grid):
                part = {"weight": fields["weight"][low:high, left:right]} if left < right else {}
                if index == len(grid) - 1:
                    part["sum"] = fields["sum"][low:high]
                where: dict[str, Any] = {"columns": {"weight": (left, right)} if left < right else None}
                ids = data.draw(st.sampled_from([(low, high), np.arange(low, high)]))
                if part:
                    writers[data.draw(st.integers(0, count - 1))].put("t", part, rows=ids, of=rows, **where)
        done = save.commit(finished(writers))
    assert same_fields(done.table("t").read(), fields)
    low, high = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    assert same_fields(done.table("t").read(slice(low, high)), taken(fields, slice(low, high)))
    assert run.verify() == []


PROGRAM = """
import json, sys
import numpy as np
import checkrun_format as crf

token, rank = json.loads(sys.argv[1]), int(sys.argv[2])
writer = crf.join_save(token).writer(rank)
low, high = 4 * rank, 4 * rank + 4
values = np.arange(12 * 8, dtype=np.float32).reshape(12, 8)
writer.put("t", {"weight": values[low:high]}, rows=(low, high), of=12)
writer.put_tensor(f"rank{rank}", np.full(3, rank))
print(json.dumps(writer.finish()))
"""


@pytest.mark.parametrize("bits", [None, {"t*": {"weight": 8}}, "auto"])
def test_writers_in_other_processes(tmp_path: Path, bits: Any) -> None:
    """A token and part lists go as JSON; `bits` of the run hold in every process."""
    run = crf.open_run(tmp_path / "run", mode="a", chunk_bytes=64, bits=bits, expected_restores=100)
    save = run.begin(writers=3, step=1)
    token = json.dumps(save.token)
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, token, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in (0, 2)
    ]
    writer = crf.join_save(json.loads(token), url=str(tmp_path / "run")).writer(1)
    values = np.arange(12 * 8, dtype=np.float32).reshape(12, 8)
    writer.put("t", {"weight": values[4:8]}, rows=(4, 8), of=12)
    part_lists = [writer.finish(), *(json.loads(process.communicate()[0]) for process in processes)]
    assert [process.returncode for process in processes] == [0, 0]
    done = save.commit(part_lists)
    found = done.table("t").read()["weight"]
    if bits is None:
        assert same_bits(found, values)
    else:
        assert 0 < np.abs(found - values).max() <= 0.51 * 7 / 255
    assert done.tensor("rank2").tolist() == [2, 2, 2]
    assert sorted(done.tensors) == ["rank0", "rank2"]
    assert run.verify() == []


def test_an_object_that_is_not_there(tmp_path: Path) -> None:
    """9.1, step 3: one listing of the attempt must show every object; else nothing is committed."""
    run = crf.open_run(tmp_path, mode="a", durable=False)
    with run.begin(writers=2) as save:
        writers = writers_of(save)
        put_rows(writers[0], "t", table(), 0, 6)
        put_rows(writers[1], "t", table(), 6, 12)
        part_lists = finished(writers)
        for name in ("block-1-0/weight.values/c/0/0", "block-0-0/zarr.json", "parts-1.json.gz"):
            path = tmp_path / "00000001" / save.token["attempt"] / name
            data = path.read_bytes()
            path.unlink()
            with pytest.raises(DamagedError) as caught:
                save.commit(part_lists)
            assert caught.value.place.endswith(name)
            path.write_bytes(data)
        assert run.latest(default=None) is None
        assert same_fields(save.commit(part_lists).table("t").read(), table())


def test_an_attempt_that_was_left_is_litter() -> None:
    """TRE-2: a relaunch is a new attempt and never mixes with the one before."""
    run = new_run()
    with run.begin(writers=1) as save:
        put_rows(save.writer(0), "t", table(seed=5), 0, 12)
        save.writer(0).finish()
    assert run.latest(default=None) is None
    with pytest.raises(CheckpointNotFoundError):
        run[1]
    with run.begin(writers=1) as again:
        assert again.sequence == save.sequence == 1
        assert again.token["attempt"] != save.token["attempt"]
        writers = writers_of(again)
        put_rows(writers[0], "t", table(), 0, 12)
        done = again.commit(finished(writers))
    assert same_fields(done.table("t").read(), table())
    assert {problem.kind for problem in run.verify()} == {"litter"}


def test_two_coordinators() -> None:
    """HEA-3: one of them commits, the other is told."""
    store = MemoryStore()
    one, other = crf.open_run(store, mode="a"), crf.open_run(store, mode="a")
    saves = [one.begin(writers=1), other.begin(writers=1)]
    part_lists = []
    for seed, save in enumerate(saves):
        writers = writers_of(save)
        put_rows(writers[0], "t", table(seed=seed), 0, 12)
        part_lists.append(finished(writers))
    assert saves[1].commit(part_lists[1]).sequence == 1
    with pytest.raises(ConcurrentCommitError):
        saves[0].commit(part_lists[0])
    assert same_fields(one.load().tables["t"].fields, table(seed=1))
    with pytest.raises(ConcurrentCommitError):
        one.begin(writers=1)


def test_a_save_begun_before_another_commit() -> None:
    run = new_run()
    save = run.begin(writers=1)
    writers = writers_of(save)
    put_rows(writers[0], "t", table(), 0, 12)
    part_lists = finished(writers)
    first_save(run, {"t": table(seed=1)})
    with pytest.raises(InvalidInputError):
        save.commit(part_lists)
    assert same_fields(run.load().tables["t"].fields, table(seed=1))
    run.save(crf.State(tables={"t": crf.Table(table(), changed=crf.ALL)}))
    assert run.latest().sequence == 2


class LosingStore(MemoryStore):
    """A store whose next commit is refused, and takes effect when it `lands`."""

    def __init__(self) -> None:
        super().__init__()
        self.loses = False
        self.lost: tuple[str, bytes] | None = None

    def create(self, key: str, data: bytes) -> None:
        if self.loses:
            self.loses, self.lost = False, (key, data)
            raise StorageError(110, "timed out")
        super().create(key, data)

    def land(self) -> None:
        assert self.lost is not None
        self.objects.__setitem__(*self.lost)


def test_what_a_staged_save_lies_over_is_gone_after_an_attempt_has_landed() -> None:
    """HEA-3: it says that it must begin anew, and does then go on from what has landed."""
    store = LosingStore()
    run = crf.open_run(store, mode="a")
    first_save(run, {"t": table()})
    store.loses = True
    with pytest.raises(StorageError):
        run.compact()
    with run.begin(writers=1, parent="latest") as save:
        store.land()
        store.delete(layout.commit_key(1))
        with pytest.raises(ConcurrentCommitError, match=r"number 2 is taken by an earlier attempt .* begin .* anew"):
            save.commit([writer.finish() for writer in writers_of(save)], unchanged=["t"])
    with run.begin(writers=1, parent=None) as save:
        writers = writers_of(save)
        put_rows(writers[0], "t", table(seed=2), 0, 12)
        done = save.commit(finished(writers))
    assert (done.sequence, done.commit.predecessor) == (3, 2)
    assert same_fields(run[2].table("t").read(), table())
    assert same_fields(done.table("t").read(), table(seed=2))


@pytest.mark.parametrize("staged_first", [False, True])
@pytest.mark.parametrize("staged_then", [False, True])
def test_an_attempt_that_lands_after_all(staged_first: bool, staged_then: bool) -> None:
    """HEA-3: it is adopted; a plain save goes on at the next number, a staged one says that it must begin anew."""
    store = LosingStore()
    run = crf.open_run(store, mode="a")
    first_save(run, {"t": table()})

    def staged(fields: Fields) -> crf.Checkpoint:
        with run.begin(writers=1, parent=None) as save:
            writers = writers_of(save)
            put_rows(writers[0], "t", fields, 0, 12)
            return save.commit(finished(writers))

    def plain(fields: Fields) -> crf.Checkpoint:
        return run.save(crf.State(tables={"t": crf.Table(fields, changed=crf.ALL)}))

    store.loses = True
    with pytest.raises(StorageError):
        (staged if staged_first else plain)(table(seed=1))
    assert run.latest().sequence == 1
    store.land()
    if staged_then:
        with pytest.raises(ConcurrentCommitError, match="begin the save anew"):
            staged(table(seed=2))
    done = (staged if staged_then else plain)(table(seed=2))
    assert (done.sequence, done.commit.predecessor) == (3, 2)
    for number in (1, 2, 3):
        assert same_fields(run[number].table("t").read(), table(seed=number - 1))
    for since in (1, 2):
        rows = [change.rows.tolist() for change in done.changes_since(since) if not change.dropped]
        assert rows == [list(range(12))]
