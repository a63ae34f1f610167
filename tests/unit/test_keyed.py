"""Keyed tables against a dictionary: keys of 64 bits in any order, deleted, added again, through chains and copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

import checkrun_format as crf
from checkrun_format import ALL, Checkpoint, Run, State, Table, TableView
from checkrun_format.errors import InvalidInputError, RowNotFoundError
from checkrun_format.stores import LocalStore
from tests.property.strategies import check_raw_changes

Array = npt.NDArray[Any]
Model = dict[int, Array]

INT64 = [-(2**63), -(2**63) + 1, -5, -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63 - 1]
UINT64 = [0, 1, 7, 2**31, 2**40, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 2, 2**64 - 1]
KEYS = {"int64": INT64, "uint64": UINT64}
COLUMNS = 3


def row(seed: int) -> Array:
    return np.random.default_rng(seed & (2**64 - 1)).normal(size=COLUMNS).astype(np.float32)


def signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key


def arrays_of(model: Model, dtype: str, *, shuffled: int | None = None) -> tuple[Array, dict[str, Array]]:
    """Keys and fields of a model, in an order of its own."""
    keys = sorted(model, key=signed)
    if shuffled is not None:
        keys = np.random.default_rng(shuffled).permutation(np.array(keys, dtype)).tolist()
    weight = np.array([model[key] for key in keys], np.float32).reshape(-1, COLUMNS)
    return np.array(keys, dtype), {"weight": weight, "sum": weight[:, 0].astype(np.float64)}


def assert_holds(view: TableView, model: Model, dtype: str) -> None:
    keys, fields = arrays_of(model, dtype)
    assert view.addressing == "keyed" and len(view) == len(model)
    assert view.keys().dtype == np.dtype(dtype) and view.keys().tolist() == keys.tolist()
    assert {name: values.tobytes() for name, values in view.read().items()} == {
        name: values.tobytes() for name, values in fields.items()
    }
    order = np.random.default_rng(1).permutation(len(keys))
    assert view.take(keys[order])["weight"].tobytes() == fields["weight"][order].tobytes()


def followed(run: Run, since: int, until: int, name: str, dtype: str) -> Model:
    """What somebody holds who loaded one checkpoint and applied what changed up to another."""
    held: Model = {}
    if name in run[since].tables:
        view = run[since].table(name)
        if view.addressing == "keyed":
            held = dict(zip(view.keys().tolist(), view.read()["weight"], strict=True))
    check_raw_changes(run[until], since, 64)
    seen: list[int] = []
    for batch in run[until].changes_since(since, max_bytes=64):
        if batch.table != name:
            continue
        if batch.dropped:
            held = {}
            continue
        assert batch.key_dtype == dtype and batch.table_rows is None
        for key in batch.deleted.view(dtype).tolist():
            held.pop(key, None)
        held |= dict(zip(batch.rows.view(dtype).tolist(), batch.fields["weight"], strict=True))
        seen += batch.rows.tolist()
    assert seen == sorted(set(seen)), "each row is in one batch only, ascending"
    return held


class Story:
    """A run with one keyed table, and what each of its checkpoints must hold."""

    def __init__(self, path: Path, dtype: str = "int64", **options: Any) -> None:
        self.path, self.dtype = path, dtype
        self.run = crf.open_run(path, "a", durable=False, **{"policy": "consecutive", **options})
        self.model: Model = {}
        self.told: dict[int, Model] = {}

    def save(
        self,
        changed: Iterable[int] = (),
        deleted: Sequence[int] = (),
        *,
        masked: bool = False,
        named: bool = True,
        **options: Any,
    ) -> Checkpoint:
        """Give new values to some keys, which may be new ones, after deleting others.

        Unless `named`, the run is told only of those that were there before and stay.
        """
        changed = list(changed)
        stay = [key for key in changed if key in self.model and key not in deleted]
        for key in deleted:
            self.model.pop(key, None)
        self.model |= {key: row(hash((key, len(self.told)))) for key in changed}
        keys, fields = arrays_of(self.model, self.dtype, shuffled=len(self.told))
        again = [key for key in deleted if key in self.model]
        given = np.array(changed if named else [*stay, *again], self.dtype)
        told: Any = np.isin(keys, given) if masked else given
        table = Table(fields, keys=keys, changed=told, deleted=np.array(deleted if named else [], self.dtype))
        return self.tell(self.run.save(State(tables={"t": table}), **options), self.model)

    def tell(self, checkpoint: Checkpoint, model: Model) -> Checkpoint:
        self.told[checkpoint.sequence] = dict(model)
        return checkpoint

    def check(self) -> None:
        run = crf.open_run(self.path)
        for number, model in self.told.items():
            assert_holds(run[number].table("t"), model, self.dtype)
            for since in (n for n in self.told if n < number):
                held = followed(run, since, number, "t", self.dtype)
                assert {k: v.tobytes() for k, v in held.items()} == {k: v.tobytes() for k, v in model.items()}
        assert run.verify() == []


@pytest.fixture(params=KEYS)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestKeys:
    @pytest.mark.parametrize("chunk_bytes", [8, 16 << 20])
    def test_are_any_64_bits_in_the_order_of_int64(self, tmp_path: Path, dtype: str, chunk_bytes: int) -> None:
        """RES-1: its order is that of signed int64; 5.4: uint64 reinterprets the bits."""
        story = Story(tmp_path, dtype, chunk_bytes=chunk_bytes)
        made = story.save(KEYS[dtype])
        stored = [signed(key) for key in made.table("t").keys().tolist()]
        assert stored == sorted(stored)
        story.save(KEYS[dtype][::3])
        story.check()

    @pytest.mark.parametrize("given", ["int8", "int16", "int32", "uint8", "uint16", "uint32", ">i8", ">u8", "list"])
    def test_come_in_any_integer_dtype(self, tmp_path: Path, given: str) -> None:
        keys: Any = [7, 3, 100] if given == "list" else np.array([7, 3, 100], given)
        run = crf.open_run(tmp_path, "a", durable=False)
        values = np.arange(3.0)
        run.save(State(tables={"t": Table({"w": values}, keys=keys)}))
        view = run.latest().table("t")
        assert view.keys().dtype == (np.uint64 if given == ">u8" else np.int64)
        assert (view.keys().tolist(), view.read()["w"].tolist()) == ([3, 7, 100], [1, 0, 2])
        run.save(State(tables={"t": Table({"w": values + 9}, keys=keys, changed=keys[:1])}), parent="latest")
        assert run.latest().table("t").read()["w"].tolist() == [1, 9, 2]

    def test_of_torch(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        keys, values = torch.tensor([9, -4, 2]), torch.arange(3.0)
        run.save(State(tables={"t": Table({"w": values}, keys=keys)}))
        run.save(
            State(tables={"t": Table({"w": values[1:] + 5}, keys=keys[1:], changed=keys[1:2], deleted=keys[:1])}),
            parent="latest",
        )
        view = run.latest().table("t")
        assert (view.keys().tolist(), view.read()["w"].tolist()) == ([-4, 2], [6, 2])

    def test_belong_to_the_reader(self, tmp_path: Path) -> None:
        story = Story(tmp_path)
        story.save([1, 2])
        view = story.run.latest().table("t")
        view.keys()[:] = 77
        assert view.keys().tolist() == [1, 2] and view.take([2])["weight"].tobytes() == story.model[2].tobytes()

    def test_are_read_by_place(self, tmp_path: Path, dtype: str) -> None:
        story = Story(tmp_path, dtype, chunk_bytes=32)
        story.save(KEYS[dtype])
        view = story.save(KEYS[dtype][2:4]).table("t")
        keys, fields = arrays_of(story.model, dtype)
        for rows in (slice(None), slice(2, 5), slice(-3, None), slice(4, 4), slice(8, 99)):
            assert view.read(rows=rows)["weight"].tobytes() == fields["weight"][rows].tobytes()
            assert (
                view.read(rows=rows, columns=slice(1, 2))["weight"].tobytes() == fields["weight"][rows, 1:2].tobytes()
            )
        assert view.take(keys[[5, 5, 0]])["sum"].tolist() == fields["sum"][[5, 5, 0]].tolist()

    def test_that_are_missing_are_named(self, tmp_path: Path, dtype: str) -> None:
        story = Story(tmp_path, dtype)
        story.save(KEYS[dtype][:-1])
        last = KEYS[dtype][-1]
        with pytest.raises(RowNotFoundError, match=f"table 't' has no key {last} .1 are missing"):
            story.run.latest().table("t").take(np.array([KEYS[dtype][0], last], dtype))

    def test_dense_and_keyed_loads_tell_them(self, tmp_path: Path, dtype: str) -> None:
        story = Story(tmp_path, dtype)
        story.save(KEYS[dtype])
        keys, fields = arrays_of(story.model, dtype)
        out = np.zeros((len(keys), COLUMNS), np.float32)
        state = story.run.latest().load(out=State(tables={"t": Table({"weight": out})}))
        loaded: Any = state.tables["t"].keys
        assert loaded.tolist() == keys.tolist() and out.tobytes() == fields["weight"].tobytes()

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"keys": [1, 2, 1]}, "table 't', keys: 1 is there more than once"),
            ({"keys": np.array([2**64 - 1, 0, 2**64 - 1], np.uint64)}, "table 't', keys: .* more than once"),
            ({"keys": [1, 2]}, "table 't': 2 keys for 3 rows"),
            ({"keys": [1.0, 2.0, 3.0]}, "table 't', keys: float64 where integers"),
            ({"keys": [[1], [2], [3]]}, "table 't', keys: 2 dimensions"),
            ({"keys": [1, 2, 3], "changed": [1, 1]}, "table 't', changed: 1 is there more than once"),
            ({"keys": [1, 2, 3], "changed": [True, False]}, "table 't', changed: a mask of shape .2,. for 3 rows"),
            ({"keys": [1, 2, 3], "deleted": [4, 4]}, "table 't', deleted: 4 is there more than once"),
            ({"keys": [1, 2, 3], "deleted": ["4"]}, "table 't', deleted: dtype"),
            ({"deleted": [1]}, "table 't': only a keyed table has deleted keys"),
        ],
    )
    def test_refused(self, tmp_path: Path, options: dict[str, Any], told: str) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        with pytest.raises(InvalidInputError, match=told):
            run.save(State(tables={"t": Table({"w": np.zeros(3)}, **options)}))
        assert run.latest(default=None) is None


class TestChanges:
    def test_by_keys_and_by_mask_are_the_same(self, tmp_path: Path, dtype: str) -> None:
        """A mask is aligned with `keys` in the order given, whatever that is."""
        stories = [Story(tmp_path / name, dtype) for name in ("keys", "mask")]
        for story, masked in zip(stories, (False, True), strict=True):
            story.save(KEYS[dtype])
            for changed in (KEYS[dtype][::2], KEYS[dtype][1:2], []):
                increment = story.save(changed, masked=masked)
                assert increment.table("t").stored_rows == len(changed)
            story.check()
        assert stories[0].model.keys() == stories[1].model.keys()

    def test_everything(self, tmp_path: Path) -> None:
        """Keys that went need not be named then: who follows starts the table anew."""
        story = Story(tmp_path)
        story.save([1, 2, 3])
        story.model = {2: row(9), 7: row(8)}
        keys, fields = arrays_of(story.model, "int64")
        made = story.run.save(State(tables={"t": Table(fields, keys=keys, changed=ALL)}))
        story.tell(made, story.model)
        assert made.table("t").storage == "full"
        assert [batch.dropped for batch in made.changes_since(1)] == [True, False]
        story.save([7])
        story.check()

    def test_tombstones_only(self, tmp_path: Path, dtype: str) -> None:
        """5.5: a part of tombstones only has no rows."""
        story = Story(tmp_path, dtype)
        story.save(KEYS[dtype])
        increment = story.save(deleted=KEYS[dtype][3:5])
        assert (increment.table("t").storage, increment.table("t").stored_rows) == ("changed", 0)
        story.check()

    def test_deleted_and_added_again(self, tmp_path: Path, dtype: str) -> None:
        """LAY-5: tombstones apply to the state below the layer, before its rows."""
        keys = KEYS[dtype]
        story = Story(tmp_path, dtype)
        story.save(keys)
        story.save(deleted=[keys[0], keys[5]])
        story.save([keys[5]])
        story.save([keys[0], keys[1]], deleted=[keys[0], keys[1], keys[2]])
        story.save([keys[2]], deleted=[keys[2]])
        story.save(deleted=[keys[2]])
        story.check()
        base = story.tell(story.run.compact(), story.model)
        assert base.parent is None
        story.check()

    @pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
    def test_keys_that_came_or_went_need_not_be_named(self, tmp_path: Path, dtype: str, policy: str) -> None:
        """LAY-2: a `changed` table holds at least the rows that differ from the parent."""
        keys = KEYS[dtype]
        story = Story(tmp_path, dtype, policy=policy)
        story.save(keys[:5])
        made = story.save([keys[0], keys[7]], named=False)
        assert (made.table("t").storage, made.table("t").stored_rows) == ("changed", 2)
        story.save(deleted=[keys[7], keys[1]], named=False)
        story.save([keys[1]], named=False)
        story.run.restore()
        story.save([keys[8]], deleted=[keys[2]], named=False)
        story.check()

    def test_what_was_never_there_is_deleted_without_harm(self, tmp_path: Path) -> None:
        """LAY-5: deleting a key that is not there is harmless."""
        story = Story(tmp_path)
        story.save([1, 2])
        story.save(deleted=[50, -7, 2])
        story.save(deleted=[50, 2])
        story.check()

    def test_all_keys_go_and_come_back(self, tmp_path: Path, dtype: str) -> None:
        story = Story(tmp_path, dtype)
        story.save(KEYS[dtype])
        story.save(deleted=KEYS[dtype])
        assert len(story.run.latest().table("t")) == 0
        story.save()
        story.save(KEYS[dtype][:2])
        story.check()

    def test_an_empty_table_fills_up(self, tmp_path: Path, dtype: str) -> None:
        story = Story(tmp_path, dtype)
        story.save()
        story.save(KEYS[dtype][:1])
        story.save(KEYS[dtype][1:])
        story.check()

    @pytest.mark.parametrize("policy", ["one-shot", "intermittent", "full"])
    def test_over_a_base(self, tmp_path: Path, dtype: str, policy: str) -> None:
        """An increment over the base repeats rows and tombstones of those between; only its own are recent (LAY-7)."""
        keys = KEYS[dtype]
        story = Story(tmp_path, dtype, policy=policy)
        story.save(keys[:8])
        story.save([keys[0], keys[8]], deleted=[keys[3]])
        story.save([keys[3]], deleted=[keys[0]])
        story.save([], deleted=[keys[8]])
        last = story.save([keys[1]])
        story.check()
        assert [batch.rows.view(dtype).tolist() for batch in last.changes_since(4) if batch.rows.size] == [[keys[1]]]
        if policy == "one-shot":
            assert [c.parent for c in story.run.log()] == [None, 1, 1, 1, 1]
            assert last.table("t").stored_rows == 2

    @pytest.mark.parametrize("bits", [1, 4])
    def test_quantized(self, tmp_path: Path, dtype: str, bits: int) -> None:
        keys = np.array(KEYS[dtype], dtype)
        values = np.random.default_rng(1).normal(size=(len(keys), 5)).astype(np.float32)
        values[2] = np.nan
        run = crf.open_run(tmp_path, "a", durable=False, bits=bits, chunk_bytes=16, policy="consecutive")
        run.save(State(tables={"t": Table({"weight": values}, keys=keys)}))
        values[[2, 4]] = values[[4, 2]]
        made = run.save(State(tables={"t": Table({"weight": values}, keys=keys, changed=keys[[4, 2]])}))
        found = made.table("t").take(keys)["weight"]
        raw = np.isfinite(values).all(1)
        bound = 0.505 * (values.max(1) - values.min(1)) / (2**bits - 1) + 2.0**-20 * np.abs(values).max(1)
        assert (np.abs(found - values).max(1) <= bound)[raw].all()
        assert found[~raw].tobytes() == values[~raw].tobytes() and raw.sum() == len(keys) - 1

    @pytest.mark.parametrize("named", [True, False])
    def test_kept_through_failed_saves(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, named: bool) -> None:
        story = Story(tmp_path)
        story.save([1, 2, 3, 4])
        monkeypatch.setattr(LocalStore, "sync", Mock(side_effect=crf.StorageError(5, "injected")))
        changes: list[tuple[list[int], list[int]]] = [([1, 9], [2]), ([2], [3]), ([], [9])]
        for changed, deleted in changes:
            with pytest.raises(crf.StorageError):
                story.save(changed, deleted, named=named)
        monkeypatch.undo()
        made = story.save([4])
        assert sorted(story.model) == [1, 2, 4]
        assert made.table("t").stored_rows == 3
        assert [batch.deleted.tolist() for batch in made.changes_since(1)] == [[3, 9]]
        story.check()


class TestHistories:
    @pytest.mark.parametrize("target", [1, 2, 3, 4, 5])
    def test_rollback(self, tmp_path: Path, dtype: str, target: int) -> None:
        """RBK-1; CHG-1: across a rollback also what it undoes."""
        keys = KEYS[dtype]
        story = Story(tmp_path, dtype)
        story.save(keys[:6])
        story.save([keys[0], keys[6]], deleted=[keys[1]])
        story.save([keys[1]], deleted=[keys[2]])
        story.save(keys[:3], parent=None)
        story.save([keys[9]], deleted=[keys[0]])
        made = story.tell(story.run.rollback(target), story.told[target])
        assert made.parent == (target if target > 3 else None)
        story.run.restore()
        story.model = dict(story.told[target])
        story.save([keys[7]], deleted=[keys[3]])
        story.check()

    def test_becoming_another_table(self, tmp_path: Path, dtype: str) -> None:
        """LAY-2: with another addressing or key_dtype it is stored full; CHG-2: who follows starts it anew."""
        other = "uint64" if dtype == "int64" else "int64"
        run = crf.open_run(tmp_path, "a", durable=False, policy="consecutive")
        model = {key: row(key) for key in (5, 100, 7)}
        smaller = {key: row(-key) for key in (7,)}
        keys, fields = arrays_of(model, dtype)
        seven, few = arrays_of(smaller, dtype)
        history: list[tuple[dict[str, Table], list[str]]] = [
            ({"t": Table(fields, keys=keys)}, []),
            ({"t": Table(fields, changed=[])}, []),
            ({"t": Table(few, keys=seven, changed=[])}, []),
            ({"t": Table(few, keys=seven.astype(other), changed=[])}, []),
            ({"t": Table(fields, keys=keys, changed=[])}, []),
            ({}, ["t"]),
            ({"t": Table(few, keys=seven)}, []),
        ]
        for tables, dropped in history:
            run.save(State(tables=tables), dropped=dropped)
        for number, wanted, key_dtype in (
            (1, model, dtype),
            (3, smaller, dtype),
            (4, smaller, other),
            (5, model, dtype),
        ):
            assert_holds(run[number].table("t"), wanted, key_dtype)
            assert run[number].table("t").storage == "full"
            for since in range(1, number):
                held = followed(run, since, number, "t", key_dtype)
                assert {k: v.tobytes() for k, v in held.items()} == {k: v.tobytes() for k, v in wanted.items()}
        assert run[2].table("t").read()["weight"].tobytes() == fields["weight"].tobytes()
        for since in range(1, 7):
            assert followed(run, since, 7, "t", dtype).keys() == {7}
        assert run.verify() == []

    def test_a_dense_table_between_two_keyed_ones_with_negative_keys(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        run.save(State(tables={"t": Table({"w": np.arange(3.0)})}))
        run.save(State(tables={"t": Table({"w": np.arange(3.0)}, keys=[-5, 100, 1], changed=ALL)}))
        run.save(State(tables={"t": Table({"w": np.arange(4.0)}, changed=ALL)}))
        batches = list(run.latest().changes_since(1))
        assert [batch.dropped for batch in batches] == [True, False]
        assert batches[1].rows.tolist() == [0, 1, 2, 3] and batches[1].fields["w"].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("policy", ["consecutive", "one-shot", "intermittent"])
    def test_at_random(self, tmp_path: Path, dtype: str, policy: str) -> None:
        """Changes, deletions, both at once, compactions and rollbacks; LAY-5, LAY-7, CHG-1, CMP-1, RBK-1."""
        random = np.random.default_rng(len(dtype + policy))
        pool = KEYS[dtype] + list(range(20, 40))
        story = Story(tmp_path, dtype, policy=policy, chunk_bytes=int(random.choice([30, 200, 16 << 20])))
        story.save(random.choice(np.array(pool, dtype), 15, replace=False).tolist())
        for _ in range(9):
            action = random.random()
            if action < 0.15:
                story.tell(story.run.compact(), story.told[max(story.told)])
            elif action < 0.3:
                target = int(random.choice(list(story.told)))
                story.tell(story.run.rollback(target), story.told[target])
                story.run.restore()
                story.model = dict(story.told[target])
            else:
                live = list(story.model)
                gone = [key for key in live if random.random() < 0.2]
                changed = [key for key in pool if random.random() < 0.15 and (key not in gone or random.random() < 0.3)]
                story.save(changed, gone, masked=random.random() < 0.3, named=random.random() < 0.7)
        story.check()
