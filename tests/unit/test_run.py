"""A run from the user's side: save, load, restore, go back, fail, and go on; always by value."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

import checkrun_format as crf
from checkrun_format import ALL, Checkpoint, Run, State, StorageError, Table, dlpack, dtypes, policy
from checkrun_format.blocks import EncodedRows, Pool
from checkrun_format.errors import (
    CheckpointNotFoundError,
    ConcurrentCommitError,
    DamagedError,
    InvalidInputError,
    PrunedError,
    RunNotFoundError,
    TableNotFoundError,
)
from checkrun_format.stores import Buffer, LocalStore
from tests.property.strategies import check_raw_changes

Array = npt.NDArray[Any]
Fields = dict[str, Array]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
POLICIES = ["consecutive", "one-shot", "intermittent", "full"]


def weights(rows: int = 12, columns: int = 5, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.1, (rows, columns)).astype(np.float32)


def random_bits(name: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Any bits of a logical dtype, NaN payloads among them; of bool the two that it has."""
    dtype = dtypes.logical(name)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, size, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def changed_at(values: Array, rows: Sequence[int], seed: int) -> Array:
    """A copy with other values in some rows."""
    changed = np.array(values)
    changed[list(rows)] = random_bits(dtypes.name_of(values.dtype), (len(rows), *values.shape[1:]), seed)
    return changed


def bits_of(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = dlpack.to_numpy(values, "values")
    native = np.ascontiguousarray(array, dtypes.logical(dtypes.name_of(array.dtype)))
    return dtypes.name_of(array.dtype), array.shape, native.tobytes()


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert {name: bits_of(values) for name, values in found.items()} == {
        name: bits_of(values) for name, values in wanted.items()
    }


def assert_within_bound(found: Array, wanted: Array, bits: int) -> None:
    """DEC-5, plus float32 rounding; exact rows bit for bit."""
    exact = ~np.isfinite(wanted.astype(np.float64)).all(axis=1)
    assert bits_of(found[exact]) == bits_of(wanted[exact])
    values = wanted[~exact].astype(np.float64)
    low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    step = 0.505 * (high - low) / ((1 << bits) - 1)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(wanted.dtype.name, 0)
    rounding = (2.0**-20 + unit) * np.maximum(np.abs(low), np.abs(high)) + (2.0**-25 if unit else 2.0**-149)
    assert (np.abs(found[~exact].astype(np.float64) - values) <= step * (1 + unit) + rounding).all()


def followed(run: Run, since: int, until: int, max_bytes: int) -> dict[str, Fields]:
    """What somebody holds who loaded one checkpoint and then applied what changed up to another (CHG-2)."""
    held = {name: dict(table.fields) for name, table in run[since].load().tables.items()}
    check_raw_changes(run[until], since, max_bytes)
    for batch in run[until].changes_since(since, max_bytes=max_bytes):
        if batch.dropped:
            held.pop(batch.table, None)
            continue
        assert batch.table_rows is not None
        fields = held.setdefault(batch.table, {})
        for name, values in batch.fields.items():
            before = fields.get(name, np.zeros((0, *values.shape[1:]), values.dtype))
            fields[name] = np.zeros((batch.table_rows, *values.shape[1:]), values.dtype)
            fields[name][: len(before)] = before[: batch.table_rows]
            fields[name][batch.rows] = values
    return held


class Story:
    """A run of dense raw tables, and what each of its checkpoints must hold."""

    def __init__(self, url: Path | LocalStore, **options: Any) -> None:
        self.url = url
        self.run = crf.open_run(url, "a", durable=False, **{"policy": "consecutive", **options})
        self.told: dict[int, dict[str, Fields]] = {}

    def save(self, tables: Mapping[str, Table], **options: Any) -> Checkpoint:
        checkpoint = self.run.save(State(tables=tables), **options)
        self.tell(checkpoint, {name: table.fields for name, table in tables.items()})
        return checkpoint

    def tell(self, checkpoint: Checkpoint, tables: Mapping[str, Mapping[str, Any]]) -> None:
        self.told[checkpoint.sequence] = {
            name: {field: np.array(dlpack.to_numpy(values, field)) for field, values in fields.items()}
            for name, fields in tables.items()
        }

    def check(self, max_bytes: int = 100) -> None:
        """Every checkpoint is what was saved, and what changed between any two leads from one to the other."""
        run = crf.open_run(self.url)
        for number, tables in self.told.items():
            state = run[number].load()
            assert list(state.tables) == list(tables)
            for name, fields in tables.items():
                assert_same(state.tables[name].fields, fields)
            for since in (n for n in self.told if n < number):
                held = followed(run, since, number, max_bytes)
                assert sorted(held) == sorted(tables)
                for name, fields in tables.items():
                    assert_same(held[name], fields)
        assert [problem for problem in run.verify() if problem.kind != "litter"] == []


class FaultyStore(LocalStore):
    """Fails at the k-th write, before it or after it; or lets a commit land without a word."""

    def __init__(self, path: Path, *, after: bool = False) -> None:
        super().__init__(path, durable=False)
        self._after = after
        self.arm(0)

    def arm(self, k: int) -> None:
        """Fail at the k-th write from here on; 0: never."""
        self.writes, self.fails_at = 0, k
        self._lands = self._down = False

    def land(self) -> None:
        """Be gone as soon as a commit has landed, until armed anew."""
        self.arm(0)
        self._lands = True

    def _write(self, call: Callable[[], Any]) -> Any:
        self.writes += 1
        fails = self.writes == self.fails_at
        result = None if fails and not self._after else call()
        if fails:
            raise StorageError(5, f"injected at write {self.writes}")
        return result

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        size: int = self._write(lambda: LocalStore.put(self, key, buffers))
        return size

    def create(self, key: str, data: bytes) -> None:
        self._write(lambda: LocalStore.create(self, key, data))
        if self._lands:
            self._down = True
            raise StorageError(5, "injected after a commit")

    def sync(self, prefix: str) -> None:
        self._write(lambda: LocalStore.sync(self, prefix))

    def get(self, key: str) -> bytes | None:
        if self._down:
            raise StorageError(5, "injected at a read")
        return super().get(key)


def listing(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def parents(run: Run) -> list[int | None]:
    return [checkpoint.parent for checkpoint in run.log()]


class TestRawFields:
    """TYP-1: a stored value has exactly the bits that the writer was given."""

    @pytest.mark.parametrize("name", sorted(dtypes.STORED))
    def test_every_dtype(self, tmp_path: Path, name: str) -> None:
        story = Story(tmp_path)
        shapes: dict[str, tuple[int, ...]] = {"weight": (20, 7), "one": (20, 1), "vector": (20,)}
        fields = {field: random_bits(name, shape) for field, shape in shapes.items()}
        story.save({"t": Table({**fields, "sum": weights(20, 1)[:, 0]})})
        fields = {field: changed_at(values, [0, 3, 19], 1) for field, values in fields.items()}
        increment = story.save({"t": Table({**fields, "sum": weights(20, 1)[:, 0]}, changed=[0, 3, 19])})
        assert (increment.table("t").storage, increment.table("t").stored_rows) == ("changed", 3)
        assert [f.dtype for f in increment.table("t").fields] == [name, name, name, "float32"]
        story.check()

    @pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "bool", "float8_e4m3fn", "uint16", "int64"])
    def test_of_torch(self, tmp_path: Path, name: str) -> None:
        def tensor(values: Array) -> torch.Tensor:
            return torch.from_numpy(values.view(np.uint8)).view(getattr(torch, name)).reshape(values.shape)

        story = Story(tmp_path)
        values = random_bits(name, (20, 6))
        story.save({"t": Table({"weight": tensor(values)})})
        after = changed_at(values, [1, 18], 1)
        mask = torch.zeros(20, dtype=torch.bool)
        mask[[18, 1]] = True
        assert story.save({"t": Table({"weight": tensor(after)}, changed=mask)}).table("t").stored_rows == 2
        ids = torch.tensor([5, 2], dtype=torch.int32)
        last = changed_at(after, [2, 5], 2)
        assert story.save({"t": Table({"weight": tensor(last)}, changed=ids)}).table("t").stored_rows == 2
        story.check()

    @pytest.mark.parametrize(
        "layout",
        [
            np.asfortranarray,
            lambda a: np.repeat(a, 2, axis=1)[:, ::2],
            lambda a: a[::-1].copy()[::-1],
            lambda a: a.astype(">f4"),
            lambda a: np.ascontiguousarray(a.T).T,
        ],
        ids=["fortran", "strided", "reversed", "big-endian", "transposed"],
    )
    @pytest.mark.parametrize("options", [{"chunk_bytes": 200}, {"bits": 4}], ids=["small chunks", "4 bits"])
    def test_layout_of_memory_does_not_matter(
        self, tmp_path: Path, layout: Callable[[Array], Array], options: dict[str, Any]
    ) -> None:
        plain, other = (crf.open_run(tmp_path / name, "a", durable=False, **options) for name in ("plain", "other"))
        for step, changed in enumerate((None, [0, 7, 8, 29])):
            values = weights(30, 6, step)
            plain.save(State(tables={"t": Table({"weight": values}, changed=changed)}))
            other.save(State(tables={"t": Table({"weight": layout(values)}, changed=changed)}))
            assert_same(other.load().tables["t"].fields, plain.load().tables["t"].fields)

    def test_several_tables_of_several_fields(self, tmp_path: Path) -> None:
        story = Story(tmp_path)
        fields: Fields = {
            "weight": random_bits("bfloat16", (30, 4)),
            "exp_avg": random_bits("float32", (30, 4)),
            "exp_avg_sq": random_bits("float64", (30, 4)),
            "sum": random_bits("float32", (30,)),
            "count": random_bits("uint64", (30,)),
            "seen": random_bits("bool", (30, 9)),
        }
        other: Fields = {"weight": random_bits("int8", (3, 2))}
        story.save({"a": Table(fields), "b": Table(other)})
        for seed, rows in enumerate(([2], [2, 5, 29], []), start=1):
            fields = {name: changed_at(values, rows, seed) for name, values in fields.items()}
            stored = story.save({"a": Table(fields, changed=rows), "b": Table(other, changed=[])})
            assert stored.table("b").storage == "unchanged"
            assert stored.table("a").storage == ("changed" if rows else "unchanged")
        story.check()

    def test_the_order_of_fields_does_not_matter(self, tmp_path: Path) -> None:
        """LAY-2: the same fields, whatever their order."""
        story = Story(tmp_path, policy="consecutive")
        one, two = random_bits("int32", (9, 2)), random_bits("float64", (9,))
        story.save({"t": Table({"one": one, "two": two})})
        one, two = changed_at(one, [4], 1), changed_at(two, [4], 1)
        assert story.save({"t": Table({"two": two, "one": one}, changed=[4])}).table("t").storage == "changed"
        story.check()

    @pytest.mark.parametrize("chunk_bytes", [1, 1000, 16 << 20])
    def test_any_number_of_columns_in_any_chunks(self, tmp_path: Path, chunk_bytes: int) -> None:
        story = Story(tmp_path, chunk_bytes=chunk_bytes)
        tables = {str(columns): random_bits("float32", (9, columns)) for columns in (1, 3, 5, 7, 801)}
        tables["small"] = random_bits("float32", (4, 5))
        story.save({name: Table({"weight": values}) for name, values in tables.items()})
        for seed, rows in ((1, [0, 3]), (2, [1, 2, 3])):
            tables = {name: changed_at(values, rows, seed) for name, values in tables.items()}
            story.save({name: Table({"weight": values}, changed=rows) for name, values in tables.items()})
        story.check()

    def test_what_is_saved_is_not_what_is_changed_later(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        values, extra = weights(), {"list": [1]}
        saved = np.array(values)
        run.save(State(tables={"t": Table({"weight": values})}, tensors={"x": values}, extra=extra))
        values[:] = 9
        extra["list"].append(2)
        state = run.load()
        assert_same({"t": state.tables["t"]["weight"], "x": state.tensors["x"]}, {"t": saved, "x": saved})
        assert state.extra == {"list": [1]}
        state.extra["list"].append(3)
        state.tensors["x"][:] = 8
        assert (run.load().extra, run.compact().extra) == ({"list": [1]}, {"list": [1]})


class TestStoreAs:
    """RAW-1: rows that do not fit are kept exactly, others rounded to nearest."""

    @pytest.mark.parametrize("store_as", ["float16", "bfloat16"])
    @pytest.mark.parametrize("columns", [(), (3,)], ids=str)
    @pytest.mark.parametrize("chunk_bytes", [60, 16 << 20])
    def test_rows_that_fit_and_rows_that_do_not(
        self, tmp_path: Path, store_as: str, columns: tuple[int, ...], chunk_bytes: int
    ) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, chunk_bytes=chunk_bytes, policy="consecutive")
        values = 1 + np.abs(weights(40, 3))
        values = values if columns else np.ascontiguousarray(values[:, 0])
        unfit = [0, 3, 4, 5, 17, 39]
        odd = [np.nan, np.inf, 3.4e38, -np.inf, 1e-45, 3.4028235e38]
        for row, value in zip(unfit, odd, strict=True):
            values[(row, *([1] if columns else []))] = value
        with np.errstate(over="ignore"):
            rounded = values.astype(store_as).astype(np.float32)
        wanted = np.where(np.isin(np.arange(40), unfit).reshape(-1, *(1 for _ in columns)), values, rounded)
        run.save(State(tables={"t": Table({"sum": values}, store_as={"sum": store_as})}))
        changed = np.array(values)
        changed[[3, 8]] = [[2, 3, 4], [np.nan, 0, 0]] if columns else [2, np.nan]
        again = np.array(wanted)
        again[[3, 8]] = changed[[3, 8]]
        run.save(State(tables={"t": Table({"sum": changed}, changed=[8, 3], store_as={"sum": store_as})}))
        for number, expected in ((1, wanted), (2, again)):
            found = run[number].table("t").read()["sum"]
            assert bits_of(found) == bits_of(expected)
            relative = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[store_as]
            fits = np.setdiff1d(np.arange(40), [*unfit, 3, 8])
            assert (np.abs(found[fits] - values[fits]) <= relative * values[fits]).all()
        assert run[1].table("t").take(unfit)["sum"].tobytes() == values[unfit].tobytes()

    def test_each_save_may_store_otherwise(self, tmp_path: Path) -> None:
        """LAY-6: encodings may differ from layer to layer."""
        run = crf.open_run(tmp_path, "a", durable=False, policy="consecutive")
        values = weights(8, 3)
        run.save(State(tables={"t": Table({"sum": values}, store_as={"sum": "bfloat16"})}))
        run.save(State(tables={"t": Table({"sum": values}, changed=[0, 1])}))
        run.save(State(tables={"t": Table({"sum": values}, changed=[1, 2], store_as={"sum": "float16"})}))
        wanted = values.astype(BFLOAT16).astype(np.float32)
        wanted[0] = values[0]
        wanted[[1, 2]] = values[[1, 2]].astype(np.float16)
        assert bits_of(run.load().tables["t"]["sum"]) == bits_of(wanted)


class TestQuantized:
    """DEC-5 and EXA-2: within the bound, or bit for bit."""

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_every_width_of_every_dtype(self, tmp_path: Path, bits: int) -> None:
        run = crf.open_run(
            tmp_path, "a", durable=False, encoder="minmax", bits=bits, chunk_bytes=64, policy="consecutive"
        )
        before, after = {}, {}
        for name in ("float32", "float64", "float16", "bfloat16"):
            before[name] = weights(30, 7).astype(dtypes.logical(name))
            before[name][[3, 4, 29], [2, 0, 6]] = [np.nan, np.inf, -np.inf]
            after[name] = np.array(before[name])
            after[name][[0, 3, 28]] = weights(3, 7, 1) * 5
            after[name][7] = np.nan
        run.save(State(tables={name: Table({"weight": values}) for name, values in before.items()}))
        rows = [28, 3, 0, 7]
        run.save(State(tables={name: Table({"weight": values}, changed=rows) for name, values in after.items()}))
        for number, tables in ((1, before), (2, after)):
            for name, wanted in tables.items():
                view = run[number].table(name)
                assert (view.fields[0].dtype, view.stored_rows) == (name, 30 if number == 1 else 4)
                assert_within_bound(view.read()["weight"], wanted, bits)
                assert bits_of(view.take([7, 29, 0])["weight"]) == bits_of(view.read()["weight"][[7, 29, 0]])

    @pytest.mark.parametrize("bits", [1, 3, 4, 8])
    def test_rows_that_no_codes_represent_are_exact(self, tmp_path: Path, bits: int) -> None:
        payload = np.array([0x7FC00123, 0xFFC45678, 0x7F800001, 0x00000001], np.uint32).view(np.float32)
        odd = np.array(
            [
                [-0.0, -0.0, -0.0, -0.0],
                [np.nan, 1, 2, 3],
                [np.inf, 1, 2, 3],
                [-np.inf, np.nan, -0.0, 0.0],
                [3.4028235e38, -3.4028235e38, 0, 1],
                [1e30, 1e30 + 1e23, 1e30, 1e30],
                [16777216, 16777217, 16777218, 16777220],
                payload,
            ],
            np.float32,
        )
        run = crf.open_run(tmp_path, "a", durable=False, bits=bits)
        run.save(State(tables={"t": Table({"weight": odd})}))
        found = run.load().tables["t"]["weight"]
        finite = [0, 4, 5, 6]
        for row in set(range(len(odd))) - {4, 5, 6}:
            assert found[row].tobytes() == odd[row].tobytes()
        step = (odd[finite].max(1).astype(float) - odd[finite].min(1)) / ((1 << bits) - 1)
        bound = 0.505 * step + 2.0**-20 * np.abs(odd[finite]).max(1).astype(float)
        assert (np.abs(found[finite].astype(float) - odd[finite]).max(1) <= bound).all()

    def test_constant_rows_and_tiny_rows(self, tmp_path: Path) -> None:
        values = np.array([[0, 0, 0], [0.5, 0.5, 0.5], [-2, -2, -2], [1e-45, 0, 3e-45], [0.0, -0.0, 0.0]], np.float32)
        run = crf.open_run(tmp_path, "a", durable=False, bits=2)
        run.save(State(tables={"t": Table({"weight": values})}))
        found = run.load().tables["t"]["weight"]
        assert found[:3].tolist() == values[:3].tolist() and found[4].tolist() == [0, 0, 0]
        assert np.isfinite(found).all() and np.abs(found[3] - values[3]).max() <= 1e-45

    def test_rows_of_an_increment_do_not_depend_on_their_neighbours(self, tmp_path: Path) -> None:
        """The same row has the same value whether it is stored in a base or in an increment."""
        values = weights(50, 7)
        run = crf.open_run(tmp_path, "a", durable=False, bits=3)
        run.save(State(tables={"t": Table({"weight": values})}))
        before = run.load().tables["t"]["weight"]
        run.save(State(tables={"t": Table({"weight": values}, changed=[3, 30, 31])}))
        assert bits_of(run.load().tables["t"]["weight"]) == bits_of(before)


class TestBits:
    """Which fields are quantized, and how."""

    @staticmethod
    def bits_used(checkpoint: Checkpoint) -> dict[str, int | None]:
        return {
            f"{name}/{f.name}": None if f.encoder is None else f.encoder["bits"]
            for name in checkpoint.tables
            for f in checkpoint.table(name).fields
        }

    @pytest.mark.parametrize(
        ("bits", "wanted"),
        [
            (None, [None] * 4),
            (3, [3, None, 3, 3]),
            ({"user": 2}, [2, None, None, None]),
            ({"user": {"weight": 2, "sum2": 5}}, [2, 5, None, None]),
            ({"item.*": 7}, [None, None, 7, 7]),
            ({"item.?": 7, "*": 1}, [1, None, 7, 7]),
            ({"*": 1, "item.a": 6}, [1, None, 1, 6]),
            ({"*": {"weight": 8}, "item.*": None}, [8, None, 8, 8]),
            ({"item.*": None, "*": 8}, [8, None, None, None]),
            ({"USER": 4, "item.": 4, "item.a": 2}, [None, None, None, 2]),
            ({"item.*": {"weight": None, "sum2": 4}, "*": {"sum2": 4}}, [None, 4, None, None]),
        ],
    )
    def test_rules(self, tmp_path: Path, bits: Any, wanted: list[int | None]) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, encoder="minmax", bits=bits)
        tables = {
            "user": Table({"weight": weights(), "sum2": weights(12, 2)}),
            "item.b": Table({"weight": weights()}),
            "item.a": Table({"weight": weights()}),
        }
        checkpoint = run.save(State(tables=tables))
        assert list(self.bits_used(checkpoint).values()) == wanted
        for (name, field), used in zip(
            (("user", "weight"), ("user", "sum2"), ("item.b", "weight"), ("item.a", "weight")), wanted, strict=True
        ):
            found = checkpoint.table(name).read()[field]
            if used is None:
                assert bits_of(found) == bits_of(tables[name][field])
            else:
                assert_within_bound(found, tables[name][field], used)

    @pytest.mark.parametrize(
        ("bits", "wanted"),
        [
            ({"weight": 4, "sum2": 8}, [4, 8, 4, 4]),
            ({"weight": 4, "sum2": None}, [4, None, 4, 4]),
            ({"sum2": 8}, [None, 8, None, None]),
            ({"*": 4, "sum2": 8}, [4, 8, 4, 4]),
            ({"user": None, "weight": 4, "sum2": 8}, [None, None, 4, 4]),
            ({"user": {"sum2": 2}, "weight": 4, "sum2": 8}, [4, 2, 4, 4]),
            ({"weight": 4, "item.*": {"weight": 3}, "item.b": 2}, [4, None, 2, 3]),
            ({"weight": {"sum2": 8}, "sum2": 1}, [None, 1, None, None]),
        ],
    )
    def test_fields_by_name(self, tmp_path: Path, bits: Any, wanted: list[int | None]) -> None:
        """What is said of a table goes before what is said of fields of any table."""
        run = crf.open_run(tmp_path, "a", durable=False, bits=bits)
        tables = {
            "user": Table({"weight": weights(), "sum2": weights(12, 2)}),
            "item.b": Table({"weight": weights()}),
            "item.a": Table({"weight": weights()}),
        }
        assert list(self.bits_used(run.save(State(tables=tables))).values()) == wanted

    def test_a_table_that_is_named_like_a_field(self, tmp_path: Path) -> None:
        """As that of a model which is one embedding."""
        run = crf.open_run(tmp_path, "a", durable=False, bits={"weight": 4, "exp_avg": 8})
        table = Table({"weight": weights(), "exp_avg": weights()})
        used = {"weight/weight": 4, "weight/exp_avg": 8}
        assert self.bits_used(run.save(State(tables={"weight": table}))) == used

    @pytest.mark.parametrize("bits", [4, "auto", {"user*": 4}, {"wieght": 4}, {"emb": None, "x": 4}])
    def test_bits_that_fit_nothing(self, tmp_path: Path, bits: Any) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, bits=bits, expected_restores=1 if bits == "auto" else None)
        state = State(tables={"t": Table({"emb": weights(), "ids": np.arange(12)})}, tensors={"x": weights()})
        with pytest.warns(crf.UnquantizedWarning, match=r"bits=.* fits no field of any table.*as in bits=.'emb': 8."):
            made = run.save(state)
        assert self.bits_used(made)["t/emb"] is None

    @pytest.mark.parametrize("bits", [None, {"emb": None}, {"*": {"emb": None}}, {}, {"emb": 3, "other": 4}])
    def test_bits_that_fit_something_or_ask_for_nothing(self, tmp_path: Path, bits: Any) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, bits=bits)
        made = run.save(State(tables={"t": Table({"emb": weights()})}))
        assert self.bits_used(made) == {"t/emb": (bits or {}).get("emb")}

    def test_tables_that_say_themselves_warn_of_nothing(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, bits=4)
        tables = {
            "t": Table({"emb": weights()}, bits=None),
            "half": Table({"emb": weights()}, store_as={"emb": "float16"}),
            "ids": Table({"ids": np.arange(4)}),
        }
        assert set(self.bits_used(run.save(State(tables=tables))).values()) == {None}

    def test_brackets_are_no_pattern(self, tmp_path: Path) -> None:
        """Names such as `emb[0]` are common; only `*` and `?` are special."""
        run = crf.open_run(tmp_path, "a", durable=False, bits={"emb[0].*": 4})
        tables = {name: Table({"weight": weights()}) for name in ("emb[0].user", "emb0.user")}
        assert self.bits_used(run.save(State(tables=tables))) == {"emb[0].user/weight": 4, "emb0.user/weight": None}

    def test_a_field_that_a_table_lacks(self, tmp_path: Path) -> None:
        """Named for the table itself it is a mistake, in a pattern it may be that of another table."""
        state = State(tables={"user": Table({"weight": weights()})})
        run = crf.open_run(tmp_path / "a", "a", durable=False, bits={"user": {"wieght": 4}, "u*": 4})
        with pytest.raises(crf.InvalidInputError, match=r"bits of table 'user': .* no field 'wieght'; it has weight"):
            run.save(state)
        assert run.latest(None) is None
        run = crf.open_run(tmp_path / "b", "a", durable=False, bits={"u*": {"weight": 3, "exp_avg": 8}})
        assert self.bits_used(run.save(state)) == {"user/weight": 3}
        overridden = State(tables={"user": Table({"weight": weights()}, bits=None)})
        run = crf.open_run(tmp_path / "c", "a", durable=False, bits={"user": {"wieght": 4}})
        assert self.bits_used(run.save(overridden)) == {"user/weight": None}

    def test_mixed_precision_keeps_sums_at_or_above_zero(self, tmp_path: Path) -> None:
        """By whatever default encoder: a sum below 0 is NaN under the root of an optimizer."""
        rng = np.random.default_rng(3)
        sums = (rng.random((3000, 24)) ** 12).astype(np.float32) * 10.0 ** rng.integers(-12, 4, (3000, 1))
        fields = {"weight": rng.normal(size=(3000, 24)).astype(np.float32), "exp_avg": sums.astype(np.float32)}
        fields["exp_avg_sq"] = fields["exp_avg"] ** 2
        for bits in range(1, 9):
            run = crf.open_run(
                tmp_path / str(bits),
                "a",
                durable=False,
                bits={"us*": {"weight": 4, "exp_avg": bits, "exp_avg_sq": None}},
            )
            checkpoint = run.save(State(tables={"user": Table(fields)}))
            used = {"user/weight": 4, "user/exp_avg": bits, "user/exp_avg_sq": None}
            assert self.bits_used(checkpoint) == used
            found = checkpoint.table("user").read()
            assert found["exp_avg"].min() >= 0
            assert bits_of(found["exp_avg_sq"]) == bits_of(fields["exp_avg_sq"])

    @pytest.mark.parametrize(
        ("override", "wanted"), [(None, None), (5, 5), ({"weight": 6}, 6), ({"weight": None}, None), ({}, None)]
    )
    def test_a_table_overrides_the_run(self, tmp_path: Path, override: Any, wanted: int | None) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, bits=2)
        tables = {"t": Table({"weight": weights()}, bits=override), "u": Table({"weight": weights()})}
        assert self.bits_used(run.save(State(tables=tables))) == {"t/weight": wanted, "u/weight": 2}

    @pytest.mark.parametrize(
        "values",
        [np.arange(12), np.arange(12.0), np.arange(24).reshape(12, 2), weights().astype(np.complex64)],
        ids=["ints", "one value per row", "wide ints", "complex"],
    )
    def test_a_plain_number_passes_over_what_cannot_be_quantized(self, tmp_path: Path, values: Array) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, bits=4)
        checkpoint = run.save(State(tables={"t": Table({"weight": values})}))
        assert self.bits_used(checkpoint) == {"t/weight": None}
        assert bits_of(checkpoint.table("t").read()["weight"]) == bits_of(values)

    @pytest.mark.parametrize(
        ("expected", "bits"), [(0, 2), (1, 2), (1.5, 3), (3, 3), (4, 4), (20, 4), (20.5, 8), (1e9, 8)]
    )
    def test_auto_follows_the_expected_restores(self, tmp_path: Path, expected: float, bits: int) -> None:
        """2 bits up to 1 restore, 3 up to 3, 4 up to 20, else 8 (Check-N-Run, section 4)."""
        run = crf.open_run(tmp_path, "a", durable=False, bits="auto", expected_restores=expected)
        assert self.bits_used(run.save(State(tables={"t": Table({"weight": weights()})}))) == {"t/weight": bits}

    def test_auto_goes_to_8_once_there_were_more_restores(self, tmp_path: Path) -> None:
        used = []
        for _ in range(4):
            run = crf.open_run(tmp_path, "a", durable=False, bits="auto", expected_restores=2)
            if run.latest(default=None) is not None:
                run.restore()
            checkpoint = run.save(State(tables={"t": Table({"weight": weights()}, changed=ALL)}))
            used.append((checkpoint.commit.restores, self.bits_used(checkpoint)["t/weight"]))
        assert used == [(0, 3), (1, 3), (2, 3), (3, 8)]

    def test_layers_of_many_widths(self, tmp_path: Path) -> None:
        """LAY-6: encodings may differ from layer to layer."""
        run = crf.open_run(tmp_path, "a", durable=False, policy="consecutive")
        values = weights(20, 5)
        run.save(State(tables={"t": Table({"weight": values}, bits=2)}))
        for bits, rows in ((8, [0, 1, 2]), (None, [1, 2]), (1, [2, 3])):
            run.save(State(tables={"t": Table({"weight": values}, changed=rows, bits=bits)}))
        found = run.load().tables["t"]["weight"]
        for bits, rows in ((2, list(range(4, 20))), (8, [0]), (1, [2, 3])):
            assert_within_bound(found[rows], values[rows], bits)
        assert bits_of(found[1]) == bits_of(values[1])
        base = run.compact()
        assert bits_of(base.table("t").read()["weight"]) == bits_of(found)
        encoder = base.table("t").fields[0].encoder
        assert encoder is not None and np.abs(found - values).max() <= encoder["error_bound"]

    def test_what_the_manifest_says_of_exact_rows_and_error_is_true(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, bits=3, chunk_bytes=100)
        values = weights(40, 6) * 10.0 ** np.arange(-20, 20)[:, None]
        values[[3, 39], 0] = np.nan
        for changed in (None, [2, 3, 4]):
            checkpoint = run.save(State(tables={"t": Table({"weight": values.astype(np.float32)}, changed=changed)}))
            rows = list(range(40)) if changed is None else changed
            found, given = checkpoint.table("t").take(rows)["weight"], values.astype(np.float32)[rows]
            encoder = checkpoint.table("t").fields[0].encoder
            assert encoder is not None
            error = np.abs(found.astype(np.float64) - given)[np.isfinite(given).all(1)]
            assert error.max() <= encoder["error_bound"]
            assert encoder["exact_rows"] >= int((~np.isfinite(given)).any(1).sum())
            assert (encoder["name"], encoder["bits"]) == ("refine", 3)


class TestTensors:
    """TEN-1: stored whole in every checkpoint, losslessly."""

    @pytest.mark.parametrize("name", sorted(dtypes.STORED))
    def test_every_dtype_and_shape(self, tmp_path: Path, name: str) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, chunk_bytes=500)
        values = random_bits(name, (6, 5, 4))
        given = {
            "whole": values,
            "none": values[:0],
            "no columns": np.zeros((3, 0), values.dtype),
            "one": values[1, 2, 3],
            "one of one": values[:1, :1, :1],
            "strided": values[::2, :, 1],
            "reversed": values[:, ::-1],
            "transposed": values.T,
            "fortran": np.asfortranarray(values),
            "read-only": np.broadcast_to(values[0], (3, 5, 4)),
        }
        checkpoint = run.save(State(tensors=given))
        assert checkpoint.tensors == list(given)
        assert_same(checkpoint.load().tensors, {n: np.asarray(v) for n, v in given.items()})
        assert checkpoint.tensor("one").shape == ()

    @pytest.mark.parametrize("dtype", [">f4", ">f8", ">i2", ">u8", ">c8", ">f2"])
    def test_big_endian(self, tmp_path: Path, dtype: str) -> None:
        values = np.arange(7).astype(dtype)
        found = crf.open_run(tmp_path, "a", durable=False).save(State(tensors={"x": values})).tensor("x")
        assert found.dtype == values.dtype.newbyteorder("=") and found.tolist() == values.tolist()

    def test_of_torch(self, tmp_path: Path) -> None:
        given = {
            "bf16": torch.randn(3, 4).to(torch.bfloat16).T,
            "fp8": torch.randn(5).to(torch.float8_e4m3fn),
            "parameter": torch.nn.Parameter(torch.randn(2, 2)),
            "step": torch.tensor(7),
            "mask": torch.tensor([True, False]),
            "complex": torch.randn(3, dtype=torch.complex64).conj(),
        }
        found = crf.open_run(tmp_path, "a", durable=False).save(State(tensors=given)).load().tensors
        assert_same(found, given)

    def test_every_checkpoint_has_its_own(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        for number in range(1, 4):
            run.save(State(tensors={f"x{number}": np.full(number, number), "same": np.ones(2)}))
        for number in range(1, 4):
            assert run[number].tensors == [f"x{number}", "same"]
            assert run[number].tensor(f"x{number}").tolist() == [number] * number

    def test_larger_than_a_chunk(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, chunk_bytes=1000)
        given = {f"x{n}": random_bits("float32", (n,), n) for n in (249, 1, 250, 251, 0, 1999)}
        checkpoint = run.save(State(tensors=given))
        assert_same({name: checkpoint.tensor(name) for name in reversed(given)}, given)


class TestExtraAndBlobs:
    EXTRAS: Mapping[str, Any] = {
        "none": None,
        "nested": {"reader": {"offset": 812, "files": ["a", "b"], "done": False}, "lr": 1e-3, "": []},
        "text": "é 🧨 \0 \u2028 \U0010ffff " + "x" * 300,
        "numbers": [0, -1, 2**63, -(2**70), 2**128 - 1, 0.1, -0.0, 1e308, 5e-324, True],
        "generator": np.random.default_rng(3).bit_generator.state,
        "long": list(range(20_000)),
        "long text": "é" * 200_000,
        "a number": 3,
        "deep": json.loads("[" * 150 + "]" * 150),
    }

    @pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
    def test_comes_back(self, tmp_path: Path, extra: Any) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        checkpoint = run.save(State(extra=extra))
        found = crf.open_run(tmp_path)[1].extra
        assert found == extra and json.dumps(found) == json.dumps(extra)
        assert (checkpoint._stored.manifest.extra_blob is not None) == (len(json.dumps(extra)) > 100_000)
        assert run.compact().extra == run.rollback(1).extra == extra

    @pytest.mark.parametrize("size", [65_533, 65_534, 65_535, 65_536])
    def test_around_64_kib(self, tmp_path: Path, size: int) -> None:
        """5.4: in the manifest up to 64 KiB as UTF-8 JSON, else in `extra_blob`."""
        checkpoint = crf.open_run(tmp_path, "a", durable=False).save(State(extra="x" * size))
        assert checkpoint.extra == "x" * size
        assert (checkpoint._stored.manifest.extra_blob is None) == (size + 2 <= 65_536)

    def test_tuples_come_back_as_lists(self, tmp_path: Path) -> None:
        extra = {"shape": (3, (4, ())), "np": (np.float64(0.5), np.str_("s"))}
        found = crf.open_run(tmp_path, "a", durable=False).save(State(extra=extra)).extra
        assert found == {"shape": [3, [4, []]], "np": [0.5, "s"]}

    def test_blobs(self, tmp_path: Path) -> None:
        """EXT-1: opaque bytes."""
        run = crf.open_run(tmp_path, "a", durable=False, chunk_bytes=10_000)
        blobs = {"": b"", "a/b": bytes(range(256)) * 3, "🧨": b"\x80\x04.", "one": b"\0"}
        given: dict[str, Any] = {**blobs, "view": memoryview(b"abcdef")[::2], "array": bytearray(b"xyz")}
        checkpoint = run.save(State(blobs=given, extra={"large": "x" * 70_000}))
        assert checkpoint.load().blobs == {**blobs, "view": b"ace", "array": b"xyz"}
        assert checkpoint.blob("a/b") == blobs["a/b"]
        assert run.compact().load().blobs == checkpoint.load().blobs


NAMES = {
    "empty": "",
    "slash": "a/b",
    "dot": "a.b",
    "backslash": "a\\b",
    "up": "../../etc/passwd",
    "absolute": "/etc/x",
    "zarr": "zarr.json",
    "reserved": "__x",
    "emoji": "🧨🇺🇳",
    "combining": "e\u0301",
    "composed": "\u00e9",
    "long": "n" * 300,
    "long emoji": "🧨" * 300,
    "lower": "user",
    "upper": "USER",
    "nul": "a\0b",
    "star": "*",
    "glob": "t[0-9]?{a,b}",
    "device": "CON",
    "newline": "a\nb\r\n",
    "percent": "%2e%2e%00",
    "quote": "\"'`$(x)",
    "space": " ",
}


class TestNames:
    """TRE-3: names stand in the manifest, never in paths; compared code point by code point."""

    def test_any_text(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        story = Story(path)
        tables = {name: {"weight": random_bits("int32", (4, 2), seed)} for seed, name in enumerate(NAMES.values())}
        story.save({name: Table(fields) for name, fields in tables.items()})
        tables = {name: {"weight": changed_at(fields["weight"], [2], 99)} for name, fields in tables.items()}
        story.save({name: Table(fields, changed=[2]) for name, fields in tables.items()})
        story.check()
        run = crf.open_run(path)
        for name, fields in tables.items():
            assert_same(run.latest().table(name).read(), fields)
        assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
        assert len(list(path.rglob("*"))) < 40, "small tables share blocks, whatever their names"

    def test_any_text_names_tensors_and_blobs(self, tmp_path: Path) -> None:
        tensors = {name: np.arange(number) for number, name in enumerate(NAMES.values())}
        blobs = {name: name.encode() for name in NAMES.values()}
        checkpoint = crf.open_run(tmp_path, "a", durable=False).save(State(tensors=tensors, blobs=blobs))
        assert_same(checkpoint.load().tensors, tensors)
        assert checkpoint.load().blobs == blobs

    def test_a_name_that_is_like_another_is_not_there(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        checkpoint = run.save(State(tables={"\u00e9": Table({"weight": weights()})}))
        for name in ("e\u0301", "\u00c9", "\u00e9 ", ""):
            with pytest.raises(TableNotFoundError, match="checkpoint 1 has no table"):
                checkpoint.table(name)


def _grown(rows: int, columns: int = 3, name: str = "float32", field: str = "weight", seed: int = 9) -> Fields:
    return {field: random_bits(name, (rows, columns), seed)}


CHANGES: Mapping[str, Fields | None] = {
    "grow by one": _grown(11),
    "grow": _grown(40),
    "shrink": _grown(4),
    "shrink to one": _grown(1),
    "to no rows": _grown(0),
    "wider": _grown(10, 4),
    "narrower": _grown(10, 1),
    "other dtype": _grown(10, 3, "float64"),
    "same size of dtype": _grown(10, 3, "int32"),
    "other field": _grown(10, 3, "float32", "w"),
    "one more field": {**_grown(10), "sum": random_bits("float32", (10,))},
    "a vector": {"weight": random_bits("float32", (10,))},
    "gone": None,
}


def changed_first(fields: Fields | None, seed: int) -> Fields | None:
    """Other values in the first row of every field."""
    if fields is None:
        return None
    return {name: changed_at(values, [0] if len(values) else [], seed) for name, values in fields.items()}


def rows_that_differ(fields: Fields, before: Fields | None) -> Any:
    """What a trainer knows: the rows that differ where the table continues, everything otherwise."""
    if before is None or {n: v.shape[1:] for n, v in fields.items()} != {n: v.shape[1:] for n, v in before.items()}:
        return ALL
    count = min(len(values) for values in (*fields.values(), *before.values()))
    return [row for row in range(count) if any(bits_of(fields[n][row]) != bits_of(before[n][row]) for n in fields)]


class TestChangingTables:
    """LAY-2, LAY-3, LAY-7: what cannot be laid over the parent is stored full; everything stays readable."""

    @pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
    @pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
    def test_and_back_again(self, tmp_path: Path, policy: str, changed: Fields | None) -> None:
        story = Story(tmp_path, policy=policy, chunk_bytes=200)
        steady = {"weight": random_bits("float32", (8, 2))}
        first = _grown(10, seed=1)
        history: list[Fields | None] = [first, changed_first(first, 2), changed, changed_first(changed, 3)]
        history += [changed_first(changed, 4), first, changed_first(first, 5), changed_first(first, 6)]
        before: Fields | None = None
        for fields in history:
            steady = {"weight": changed_at(steady["weight"], [7], 3)}
            tables = {"steady": Table(steady, changed=[7])}
            if fields is not None:
                tables["t"] = Table(fields, changed=rows_that_differ(fields, before))
            story.save(tables, dropped=["t"] if fields is None and before is not None else [])
            before = fields
        story.check()
        story.run.compact()
        assert_same(story.run.load().tables["t"].fields, story.told[8]["t"])

    @pytest.mark.parametrize("policy", POLICIES)
    def test_tables_that_appear_late(self, tmp_path: Path, policy: str) -> None:
        story = Story(tmp_path, policy=policy)
        story.save({})
        one = _grown(5)
        story.save({"one": Table(one)})
        story.save({"one": Table(one, changed=[]), "two": Table(_grown(3))})
        one = {"weight": changed_at(one["weight"], [1], 4)}
        story.save({"two": Table(_grown(3), changed=[]), "one": Table(one, changed=[1])})
        story.save({"two": Table(_grown(3), changed=[])}, dropped=["one"])
        story.save({}, dropped=["two"])
        story.save({"two": Table(_grown(3)), "one": Table(one)})
        story.check()

    def test_a_table_that_grew_lists_every_new_row(self, tmp_path: Path) -> None:
        """LAY-3, although the trainer named only what changed among the old ones."""
        story = Story(tmp_path, policy="consecutive")
        values = random_bits("float32", (5, 2))
        story.save({"t": Table({"weight": values})})
        values = np.concatenate([values, random_bits("float32", (3, 2), 4)])
        increment = story.save({"t": Table({"weight": values}, changed=[0])})
        assert (increment.table("t").storage, increment.table("t").stored_rows) == ("changed", 4)
        assert [batch.rows.tolist() for batch in increment.changes_since(1)] == [[0, 5, 6, 7]]
        story.check()

    def test_all_changed_is_full(self, tmp_path: Path) -> None:
        story = Story(tmp_path)
        values = random_bits("float32", (5, 2))
        story.save({"t": Table({"weight": values})})
        for seed, changed in enumerate((ALL, range(5), np.ones(5, bool)), start=1):
            values = random_bits("float32", (5, 2), seed)
            assert story.save({"t": Table({"weight": values}, changed=changed)}).table("t").storage == "full"
        story.check()

    @pytest.mark.parametrize(
        "changed",
        [
            [4, 1],
            (1, 4),
            {4, 1},
            frozenset({1, 4}),
            np.array([4, 1], np.uint8),
            np.array([1, 4], ">i8"),
            range(1, 5, 3),
        ],
        ids=lambda changed: f"{type(changed).__name__} {getattr(changed, 'dtype', '')}",
    )
    def test_rows_in_any_form(self, tmp_path: Path, changed: Any) -> None:
        story = Story(tmp_path)
        values = random_bits("float32", (6, 2))
        story.save({"t": Table({"weight": values})})
        increment = story.save({"t": Table({"weight": changed_at(values, [1, 4], 1)}, changed=changed)})
        assert increment.table("t").stored_rows == 2
        story.check()

    def test_rows_that_changed_are_recent_until_the_next_checkpoint(self, tmp_path: Path) -> None:
        """LAY-7: under a one-shot policy an increment repeats rows that are not recent."""
        story = Story(tmp_path, policy="one-shot")
        values = random_bits("float32", (30, 2))
        story.save({"t": Table({"weight": values})})
        for number, rows in enumerate(([3, 9], [9, 11], [], [29]), start=2):
            values = changed_at(values, rows, number)
            increment = story.save({"t": Table({"weight": values}, changed=rows)})
            assert [c.rows.tolist() for c in increment.changes_since(number - 1) if c.rows.size] == (
                [rows] if rows else []
            )
        assert [checkpoint.table("t").stored_rows for checkpoint in story.run.log()] == [30, 2, 3, 3, 4]
        story.check()

    def test_without_rows_at_all(self, tmp_path: Path) -> None:
        story = Story(tmp_path)
        none = random_bits("float32", (0, 3))
        story.save({"t": Table({"weight": none, "sum": none[:, 0]})})
        story.save({"t": Table({"weight": none, "sum": none[:, 0]}, changed=[])})
        assert len(story.run.latest().table("t")) == 0
        story.save({"t": Table({"weight": _grown(2)["weight"], "sum": np.ones(2, np.float32)}, changed=[])})
        story.check()


class TestParents:
    @staticmethod
    def story(path: Path, policy: str = "consecutive") -> Story:
        """Four checkpoints, each over the one before."""
        story = Story(path, policy=policy)
        values = random_bits("float32", (20, 2))
        story.save({"t": Table({"weight": values})})
        for number in range(2, 5):
            values = changed_at(values, [number], number)
            story.save({"t": Table({"weight": values}, changed=[number])}, parent="latest")
        return story

    @pytest.mark.parametrize(
        ("parent", "found", "stored"),
        [(None, None, 20), ("latest", 4, 1), (4, 4, 1), (3, 3, 2), (2, 2, 3), (1, 1, 4), (np.int64(2), 2, 3)],
    )
    def test_any_of_the_chain(self, tmp_path: Path, parent: Any, found: int | None, stored: int) -> None:
        """An increment over an older parent holds all that changed since then; COM-6."""
        story = self.story(tmp_path)
        values = changed_at(story.told[4]["t"]["weight"], [19], 9)
        checkpoint = story.save({"t": Table({"weight": values}, changed=[19])}, parent=parent)
        assert (checkpoint.parent, checkpoint.commit.predecessor) == (found, 4)
        assert checkpoint.table("t").stored_rows == stored
        assert [c.rows.tolist() for c in checkpoint.changes_since(4)] == [[19]]
        story.check()

    def test_over_an_older_parent_twice(self, tmp_path: Path) -> None:
        story = self.story(tmp_path)
        values = story.told[4]["t"]["weight"]
        for number, parent in ((5, 2), (6, 2), (7, 1), (8, "latest"), (9, 7)):
            values = changed_at(values, [number], number)
            story.save({"t": Table({"weight": values}, changed=[number])}, parent=parent)
        assert parents(story.run) == [None, 1, 2, 3, 2, 2, 1, 7, 7]
        assert [c.table("t").stored_rows for c in story.run.log()] == [20, 1, 1, 1, 3, 4, 6, 1, 2]
        story.check()

    @pytest.mark.parametrize("parent", [0, 5, -1, 99, "base", "", 3.5])
    def test_not_of_the_chain(self, tmp_path: Path, parent: Any) -> None:
        story = self.story(tmp_path)
        before = listing(tmp_path)
        with pytest.raises(InvalidInputError, match=r"parent=.* is not in the chain"):
            story.save({"t": Table(story.told[4]["t"], changed=[])}, parent=parent)
        assert listing(tmp_path) == before

    def test_of_an_abandoned_chain(self, tmp_path: Path) -> None:
        story = self.story(tmp_path)
        story.save({"t": Table(story.told[4]["t"], changed=[])}, parent=None)
        with pytest.raises(InvalidInputError, match=r"parent=2 is not in the chain of the latest checkpoint: \[5\]"):
            story.save({"t": Table(story.told[4]["t"], changed=[])}, parent=2)

    @pytest.mark.parametrize("parent", ["latest", 1])
    def test_without_an_origin_there_is_no_parent(self, tmp_path: Path, parent: Any) -> None:
        """HEA-2."""
        story = self.story(tmp_path)
        run = crf.open_run(tmp_path, "a", durable=False)
        with pytest.raises(InvalidInputError, match="does not stem from the latest checkpoint"):
            run.save(State(tables={"t": Table(story.told[4]["t"])}), parent=parent)
        assert [checkpoint.sequence for checkpoint in run.log()] == [1, 2, 3, 4]


class TestOrigin:
    """HEA-2: an increment only over what the trainer's state equals."""

    def test_reopening_gives_a_base(self, tmp_path: Path) -> None:
        story = TestParents.story(tmp_path)
        story.run = crf.open_run(tmp_path, "a", durable=False)
        values = changed_at(story.told[4]["t"]["weight"], [5], 5)
        checkpoint = story.save({"t": Table({"weight": values})})
        assert (checkpoint.parent, checkpoint.table("t").storage) == (None, "full")
        story.check()

    def test_a_forgotten_restore_is_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Once, by the save that begins anew over what is there; a save that means it says `parent=None`."""
        state = State(tables={"t": Table({"weight": weights()}, changed=[1])})

        def saved(run: Run, **options: Any) -> tuple[int, list[str]]:
            caplog.clear()
            return run.save(state, **options).sequence, [record.getMessage() for record in caplog.records]

        first = crf.open_run(tmp_path, "a", durable=False)
        assert [saved(first), saved(first)] == [(1, []), (2, [])]
        again = crf.open_run(tmp_path, "a", durable=False)
        again.plan_save(state)
        number, (message,) = saved(again)
        assert number == 3 and "did not restore checkpoint 2, so this save is a base" in message
        assert saved(again) == (4, [])
        assert saved(crf.open_run(tmp_path, "a", durable=False), parent=None) == (5, [])
        restored = crf.open_run(tmp_path, "a", durable=False)
        restored.restore(4)
        assert saved(restored) == (6, [])

    def test_a_restore_that_fails_in_reading_leaves_none(self, tmp_path: Path) -> None:
        """The arrays may hold anything: nothing that was known of them is laid an increment over."""
        run = crf.open_run(tmp_path, "a", durable=False, policy="consecutive")
        held = {name: weights(seed=number) for number, name in enumerate("ab")}
        state = State(tables={name: Table({"weight": values}, changed=[]) for name, values in held.items()})
        run.save(state)
        for values in held.values():
            values[:] = values + 1
        run.save(state, force_full=True)
        (path,) = tmp_path.glob("00000001/*/block*/weight.values/c/0/0")
        path.write_bytes(path.read_bytes()[:-1])
        origins: list[int | None] = []
        wrong = State(tables={"a": Table({"weight": weights(3)})})
        with pytest.raises(InvalidInputError):
            run.restore(1, out=wrong)
        origins.append(run.origin)
        with pytest.raises(DamagedError):
            run.restore(1)
        origins.append(run.origin)
        with pytest.raises(DamagedError):
            run.restore(1, out=state)
        assert [*origins, run.origin] == [2, 2, None]
        made = run.save(state)
        assert made.parent is None
        for name, values in held.items():
            assert np.array_equal(made.table(name).read()["weight"], values)

    def test_loading_sets_no_origin(self, tmp_path: Path) -> None:
        story = TestParents.story(tmp_path)
        story.run = crf.open_run(tmp_path, "a", durable=False)
        values = story.run.load().tables["t"]["weight"]
        checkpoint = story.save({"t": Table({"weight": values}, changed=[])})
        assert checkpoint.parent is None and checkpoint.commit.restores == 0
        story.check()

    @pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
    def test_restoring_the_latest_gives_an_increment(self, tmp_path: Path, policy: str) -> None:
        story = TestParents.story(tmp_path)
        story.run = crf.open_run(tmp_path, "a", durable=False, policy=policy)
        values = story.run.restore().tables["t"]["weight"]
        values = changed_at(values, [5], 5)
        checkpoint = story.save({"t": Table({"weight": values}, changed=[5])})
        assert checkpoint.parent == (4 if policy == "consecutive" else 1)
        assert checkpoint.table("t").stored_rows == (1 if policy == "consecutive" else 4)
        story.check()

    @pytest.mark.parametrize("by", ["number", "numpy number", "checkpoint"])
    def test_restoring_an_older_one_gives_a_base(self, tmp_path: Path, by: str) -> None:
        story = TestParents.story(tmp_path)
        chosen: Any = {"number": 2, "numpy number": np.int64(2), "checkpoint": story.run[2]}[by]
        values = story.run.restore(chosen).tables["t"]["weight"]
        assert_same({"weight": values}, story.told[2]["t"])
        checkpoint = story.save({"t": Table({"weight": changed_at(values, [6], 6)}, changed=[6])})
        assert (checkpoint.parent, checkpoint.commit.restores) == (None, 1)
        increment = story.save({"t": Table({"weight": changed_at(values, [6, 7], 7)}, changed=[6, 7])})
        assert (increment.parent, increment.commit.restores) == (5, 1)
        story.check()

    def test_restores_are_counted_with_the_next_commit(self, tmp_path: Path) -> None:
        """5.2: the predecessor's value, plus 1 if the writer started from a restore that no commit counts yet."""
        story = TestParents.story(tmp_path)
        story.run.restore()
        story.run.restore()
        for _ in range(2):
            story.save({"t": Table(story.told[4]["t"], changed=[])})
        run = crf.open_run(tmp_path, "a", durable=False)
        run.restore()
        run.compact()
        run.rollback(1)
        run.restore()
        run.save(State(tables={"t": Table(story.told[1]["t"], changed=[])}))
        assert [c.commit.restores for c in run.log()] == [0, 0, 0, 0, 1, 1, 1, 2, 3]

    def test_restoring_forgets_pending_rows(self, tmp_path: Path) -> None:
        store = FaultyStore(tmp_path)
        story = Story(store, policy="consecutive")
        values = random_bits("float32", (9, 2))
        story.save({"t": Table({"weight": values})})
        store.arm(1)
        with pytest.raises(StorageError):
            story.save({"t": Table({"weight": changed_at(values, [3], 1)}, changed=[3])})
        store.arm(0)
        restored = story.run.restore().tables["t"]["weight"]
        increment = story.save({"t": Table({"weight": changed_at(restored, [4], 1)}, changed=[4])})
        assert [c.rows.tolist() for c in increment.changes_since(1)] == [[4]]
        story.check()

    def test_restoring_into_existing_arrays(self, tmp_path: Path) -> None:
        story = TestParents.story(tmp_path)
        weight = torch.zeros(20, 2)
        state = story.run.restore(3, out=State(tables={"t": Table({"weight": weight})}))
        assert state.tables["t"]["weight"] is weight
        assert_same({"weight": weight}, story.told[3]["t"])

    def test_reading_needs_no_more_than_reading(self, tmp_path: Path) -> None:
        story = TestParents.story(tmp_path)
        before = listing(tmp_path)
        run = crf.open_run(tmp_path)
        for refused in (
            lambda: run.save(State()),
            run.restore,
            lambda: run.rollback(1),
            run.compact,
            run.take_over,
            lambda: run.begin(writers=1),
        ):
            with pytest.raises(InvalidInputError, match="open for reading"):
                refused()
        assert_same(run.load().tables["t"].fields, story.told[4]["t"])
        assert listing(tmp_path) == before

    def test_two_runs_of_one_process_are_two_writers(self, tmp_path: Path) -> None:
        """HEA-1, HEA-3: the one that did not commit may not save until it is opened anew."""
        story = TestParents.story(tmp_path)
        other = crf.open_run(tmp_path, "a", durable=False)
        other.restore()
        story.save({"t": Table(story.told[4]["t"], changed=[])})
        before = listing(tmp_path)
        for _ in range(2):
            with pytest.raises(ConcurrentCommitError, match="number 5 is taken"):
                other.save(State(tables={"t": Table(story.told[4]["t"], changed=[])}))
        assert listing(tmp_path) == before
        with pytest.raises(ConcurrentCommitError):
            other.rollback(1)
        assert_same(other.load().tables["t"].fields, story.told[4]["t"])


class TestFailedSaves:
    """Rows named by `changed` are remembered until a save commits; earlier checkpoints stay; HEA-3."""

    VALUES = random_bits("float32", (40, 3))

    @classmethod
    def base(cls, path: Path, *, policy: str = "consecutive", **faults: bool) -> tuple[FaultyStore, Story]:
        store = FaultyStore(path, **faults)
        story = Story(store, policy=policy)
        story.save({"t": Table({"weight": cls.VALUES})}, step=1)
        return store, story

    @pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
    def test_at_every_write(self, tmp_path: Path, policy: str) -> None:
        for k in itertools.count(1):
            store, story = self.base(tmp_path / str(k), policy=policy)
            store.arm(k)
            values, failed = changed_at(self.VALUES, [1, 39], k), False
            try:
                story.save({"t": Table({"weight": values}, changed=[1, 39])})
            except StorageError:
                failed = True
            assert story.run.latest().sequence == max(story.told)
            store.arm(0)
            last = story.save({"t": Table({"weight": changed_at(values, [5], 5)}, changed=[5])})
            assert last.sequence == (2 if failed else 3)
            assert {row for c in last.changes_since(1) for row in c.rows.tolist()} == {1, 5, 39}
            story.check()
            if not failed:
                break
        assert k > 10

    def test_what_was_stored_is_removed(self, tmp_path: Path) -> None:
        store, story = self.base(tmp_path)
        store.arm(0)
        story.save({"t": Table({"weight": self.VALUES}, changed=[1])})
        writes, before = store.writes, listing(tmp_path)
        for k in range(1, writes):
            store.arm(k)
            with pytest.raises(StorageError):
                story.save({"t": Table({"weight": self.VALUES}, changed=[1])})
            assert listing(tmp_path) == before
        assert not (tmp_path / "00000003").exists()

    def test_many_failures_in_a_row(self, tmp_path: Path) -> None:
        store, story = self.base(tmp_path)
        values = self.VALUES
        for k in range(1, 9):
            store.arm(k)
            values = changed_at(values, [k, 20 + k], k)
            with pytest.raises(StorageError):
                story.save({"t": Table({"weight": values}, changed=[20 + k, k])})
        store.arm(0)
        increment = story.save({"t": Table({"weight": values}, changed=[])})
        assert increment.table("t").stored_rows == 16
        story.check()

    @pytest.mark.parametrize(
        "between",
        [
            lambda values: ({"t": Table({"weight": values[:4]}, changed=[])}, []),
            lambda values: ({"t": Table({"weight": np.repeat(values, 2, axis=1)}, changed=[])}, []),
            lambda values: ({"t": Table({"weight": values}, keys=np.arange(40), changed=[])}, []),
            lambda values: ({"t": Table({"weight": values, "sum": values[:, 0]}, changed=[])}, []),
            lambda values: ({}, ["t"]),
        ],
        ids=["shorter", "wider", "keyed", "another field", "dropped"],
    )
    def test_a_table_was_another_one_in_between(
        self, tmp_path: Path, between: Callable[[Array], tuple[dict[str, Table], list[str]]]
    ) -> None:
        """After a save that failed, a table that comes back in its old form is new in the rows that it lost."""
        store, story = self.base(tmp_path)
        values = changed_at(self.VALUES, [1], 1)
        for tables, dropped in (({"t": Table({"weight": values}, changed=[1])}, []), between(values)):
            store.arm(1)
            with pytest.raises(StorageError):
                story.save(tables, dropped=dropped)
        store.arm(0)
        after = random_bits("float32", (40, 3), 7)
        after[[0, 2, 3]] = values[[0, 2, 3]]
        story.save({"t": Table({"weight": after}, changed=[])})
        story.check()

    def test_an_acknowledgement_is_lost(self, tmp_path: Path) -> None:
        """HEA-3: the number is occupied by this very attempt, the save has succeeded."""
        store, story = self.base(tmp_path, after=True)
        store.arm(0)
        story.save({"t": Table({"weight": self.VALUES}, changed=[0])})
        store.arm(store.writes)
        story.save({"t": Table({"weight": changed_at(self.VALUES, [1], 1)}, changed=[1])})
        assert store.writes == store.fails_at
        assert [checkpoint.sequence for checkpoint in story.run.log()] == [1, 2, 3]
        story.check()

    @staticmethod
    def land(store: FaultyStore, save: Callable[[], object]) -> None:
        """Let a save fail although its commit lands, so that the writer does not know."""
        store.land()
        with pytest.raises(StorageError, match="injected at a read"):
            save()
        store.arm(0)

    @pytest.mark.parametrize("policy", ["consecutive", "one-shot", "intermittent", "full"])
    def test_an_attempt_that_was_given_up_has_landed(self, tmp_path: Path, policy: str) -> None:
        """HEA-3: the head advances, the rows stay pending, the state is staged again at the next number."""
        store, story = self.base(tmp_path, policy=policy)
        values = changed_at(self.VALUES, [1], 1)
        self.land(store, lambda: story.save({"t": Table({"weight": values}, changed=[1])}, step=2))
        story.tell(crf.open_run(tmp_path)[2], {"t": {"weight": values}})
        after = changed_at(values, [2], 2)
        checkpoint = story.save({"t": Table({"weight": after}, changed=[2])}, step=3)
        assert (checkpoint.sequence, checkpoint.commit.predecessor) == (3, 2)
        assert [c.step for c in story.run.log()] == [1, 2, 3]
        story.check()

    @pytest.mark.parametrize("what", ["compact", "take_over", "save"])
    def test_what_it_went_on_from_is_pruned_after_an_attempt_has_landed(self, tmp_path: Path, what: str) -> None:
        """HEA-3: then, too, the writer goes on from its own attempt."""
        store, story = self.base(tmp_path)
        self.land(store, story.run.compact)
        story.tell(crf.open_run(tmp_path)[2], {"t": {"weight": self.VALUES}})
        other = crf.open_run(tmp_path, "a", durable=False)
        other.prune(other.plan_prune(crf.Keep(last=1)))
        assert [checkpoint.sequence for checkpoint in crf.open_run(tmp_path).log()] == [2]
        values = self.VALUES
        if what == "save":
            values = changed_at(values, [1], 1)
            made = story.save({"t": Table({"weight": values}, changed=[1])})
        else:
            made = getattr(story.run, what)()
            story.tell(made, {"t": {"weight": values}})
        assert (made.sequence, made.commit.predecessor) == (3, 2)
        assert made.parent == (2 if what == "take_over" else None)
        assert bits_of(crf.open_run(tmp_path).latest().table("t").read()["weight"]) == bits_of(values)

    def test_after_a_restore_what_landed_is_no_origin(self, tmp_path: Path) -> None:
        """HEA-2: the trainer's state stems from the checkpoint that it restored."""
        store, story = self.base(tmp_path)
        values = changed_at(self.VALUES, [1], 1)
        self.land(store, lambda: story.save({"t": Table({"weight": values}, changed=[1])}))
        story.tell(crf.open_run(tmp_path)[2], {"t": {"weight": values}})
        story.run.restore(1)
        made = story.save({"t": Table({"weight": changed_at(self.VALUES, [2], 2)}, changed=[2])})
        assert (made.sequence, made.parent) == (3, None)
        story.check()

    def test_a_table_of_an_attempt_that_landed_is_new_to_the_writer(self, tmp_path: Path) -> None:
        store, story = self.base(tmp_path)
        new = random_bits("float32", (5, 2))
        self.land(
            store, lambda: story.save({"t": Table({"weight": self.VALUES}, changed=[]), "new": Table({"w": new})})
        )
        story.tell(crf.open_run(tmp_path)[2], {"t": {"weight": self.VALUES}, "new": {"w": new}})
        story.save({"t": Table({"weight": self.VALUES}, changed=[]), "new": Table({"w": changed_at(new, [3], 3)})})
        assert parents(story.run) == [None, 1, 2]
        story.check()

    def test_a_parent_that_what_landed_left_behind(self, tmp_path: Path) -> None:
        store, story = self.base(tmp_path)
        table = {"t": Table({"weight": self.VALUES}, changed=[])}
        self.land(store, lambda: story.save(table, parent=None))
        with pytest.raises(InvalidInputError, match="parent=1 is not in the chain of the latest checkpoint"):
            story.save(table, parent=1)
        story.tell(crf.open_run(tmp_path)[2], {"t": {"weight": self.VALUES}})
        assert story.save(table, parent=2).sequence == 3
        story.check()

    @pytest.mark.parametrize("call", ["compact", "take_over", "rollback"])
    def test_what_landed_is_not_undone_by_a_copy(self, tmp_path: Path, call: str) -> None:
        """CMP-1: compaction is of the latest checkpoint's state; COM-6: a parent lies in the predecessor's chain."""
        store, story = self.base(tmp_path)
        values = random_bits("float32", (40, 3), 8)
        self.land(store, lambda: story.save({"t": Table({"weight": values}, changed=ALL)}, step=2, parent=None))
        story.tell(crf.open_run(tmp_path)[2], {"t": {"weight": values}})
        made = story.run.rollback(1) if call == "rollback" else getattr(story.run, call)()
        state = 1 if call == "rollback" else 2
        story.tell(made, story.told[state])
        assert (made.sequence, made.step, made.commit.predecessor) == (3, state, 2)
        assert made.parent == (2 if call == "take_over" else None)
        story.check()

    def test_a_restore_is_counted_once_by_what_landed(self, tmp_path: Path) -> None:
        store, story = self.base(tmp_path)
        story.run.restore()
        self.land(store, lambda: story.save({"t": Table({"weight": self.VALUES}, changed=[])}))
        story.run.rollback(1)
        story.run.compact()
        assert [c.commit.restores for c in story.run.log()] == [0, 1, 1, 1]

    def test_a_rollback_that_landed_leaves_no_origin(self, tmp_path: Path) -> None:
        """RBK-2."""
        store, story = self.base(tmp_path)
        values = changed_at(self.VALUES, [4], 4)
        story.save({"t": Table({"weight": values}, changed=[4])})
        self.land(store, lambda: story.run.rollback(1))
        story.tell(crf.open_run(tmp_path)[3], story.told[1])
        story.tell(story.run.compact(), story.told[1])
        checkpoint = story.save({"t": Table({"weight": changed_at(values, [5], 5)}, changed=[5])})
        assert checkpoint.parent is None
        story.check()

    def test_interrupted(self, tmp_path: Path) -> None:
        """KeyboardInterrupt is no Exception; rows stay pending all the same."""
        _, story = self.base(tmp_path)
        values = changed_at(self.VALUES, [7], 1)
        before = listing(tmp_path)

        def interrupt(_: Array) -> Fields:
            raise KeyboardInterrupt

        fields: dict[str, Any] = {"weight": (np.float32, 3)}
        with pytest.raises(KeyboardInterrupt):
            story.run.save(State(tables={"t": Table.from_function(interrupt, rows=40, fields=fields, changed=[7])}))
        assert listing(tmp_path) == before
        assert story.save({"t": Table({"weight": values}, changed=[])}).table("t").stored_rows == 1
        story.check()

    def test_a_refused_save_counts_as_never_called(self, tmp_path: Path) -> None:
        _, story = self.base(tmp_path)
        values = changed_at(self.VALUES, [7], 1)
        with pytest.raises(InvalidInputError, match="extra"):
            story.run.save(State(tables={"t": Table({"weight": values}, changed=[7])}, extra=float("nan")))
        increment = story.save({"t": Table({"weight": values}, changed=[7])})
        assert increment.table("t").stored_rows == 1
        story.check()


class TestPolicies:
    @pytest.mark.parametrize("name", POLICIES)
    def test_a_run_follows_them(self, tmp_path: Path, name: str) -> None:
        """The intermittent one recomputed from the sizes that the commits tell."""
        story = Story(tmp_path, policy=name)
        values = random_bits("float32", (1500, 4))
        random = np.random.default_rng(1)
        rows = np.zeros(0, np.int64)
        for number in range(1, 13):
            values = changed_at(values, rows.tolist(), number)
            story.save({"t": Table({"weight": values}, changed=None if number == 1 else rows)})
            rows = np.flatnonzero(random.random(1500) < 0.2)
        wanted: list[int | None] = [None]
        base, sizes = 1, {c.sequence: c.stored_bytes for c in story.run.log()}
        for number in range(2, 13):
            increments = tuple(sizes[n] for n in range(base + 1, number))
            decided = policy.POLICIES[name](policy.Past(base_bytes=sizes[base], increments=increments)).parent
            wanted.append({None: None, "base": base, "latest": number - 1}[decided])
            base = number if decided is None else base
        assert parents(story.run) == wanted
        if name == "intermittent":
            assert 2 <= wanted.count(None) <= 6
        story.check(max_bytes=1 << 20)

    def test_the_reason_is_told(self, tmp_path: Path) -> None:
        story = TestParents.story(tmp_path, policy="intermittent")
        story.save({"t": Table(story.told[4]["t"], changed=[])})
        notes = [(c.commit.policy.name, c.commit.policy.reason) for c in story.run.log()]
        assert [name for name, _ in notes] == ["intermittent", *["caller"] * 3, "intermittent"]
        assert notes[0][1] == "a base: nothing is committed"
        assert notes[1][1] == "over checkpoint 1, as the caller said"
        assert "1 + S1 + ... + S3 = " in notes[4][1]

    @pytest.mark.parametrize("name", ["", "Full", "always", None, 3])
    def test_unknown(self, tmp_path: Path, name: Any) -> None:
        with pytest.raises(InvalidInputError, match="one of full, one-shot, consecutive, intermittent"):
            crf.open_run(tmp_path / "run", "a", policy=name)
        assert not (tmp_path / "run").exists()


class TestGoingBack:
    """RBK-1, RBK-2, CMP-1, CMP-2."""

    @pytest.mark.parametrize("number", [1, 2, 3, 4])
    @pytest.mark.parametrize("chained", [True, False], ids=["in the chain", "before a base"])
    def test_rollback(self, tmp_path: Path, number: int, chained: bool) -> None:
        story = TestParents.story(tmp_path)
        if not chained:
            story.save({"t": Table({"weight": random_bits("float32", (20, 2), 77)}, changed=ALL)}, parent=None)
        head = max(story.told)
        made = story.run.rollback(number)
        story.tell(made, story.told[number])
        assert (made.sequence, made.commit.rollback_to, made.commit.predecessor) == (head + 1, number, head)
        assert (made.parent, made.table("t").storage) == ((number, "unchanged") if chained else (None, "full"))
        state = story.run.restore()
        values = changed_at(state.tables["t"]["weight"], [13], 13)
        story.save({"t": Table({"weight": values}, changed=[13])})
        story.save({"t": Table({"weight": changed_at(values, [14], 14)}, changed=[14])})
        assert parents(story.run)[-2:] == [head + 1, head + 2]
        story.check()

    def test_back_and_forth(self, tmp_path: Path) -> None:
        story = TestParents.story(tmp_path)
        for number in (2, 4, 5, 6, 1, 3):
            story.tell(story.run.rollback(number), story.told[number])
        story.check()

    @pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
    def test_over_a_table_that_became_another(self, tmp_path: Path, changed: Fields | None) -> None:
        story = Story(tmp_path, policy="consecutive")
        first = _grown(10, seed=1)
        story.save({"t": Table(first)})
        story.save({"t": Table(changed, changed=ALL)} if changed else {}, dropped=[] if changed else ["t"])
        story.tell(story.run.rollback(1), story.told[1])
        story.tell(story.run.rollback(2), story.told[2])
        story.check()

    def test_without_a_restore_the_next_save_is_a_base(self, tmp_path: Path) -> None:
        story = TestParents.story(tmp_path)
        story.tell(story.run.rollback(2), story.told[2])
        checkpoint = story.save({"t": Table({"weight": changed_at(story.told[4]["t"]["weight"], [5], 1)}, changed=[5])})
        assert checkpoint.parent is None
        story.check()

    def test_step_extra_tensors_and_blobs_go_back_too(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        for step in (10, 20):
            large = {"step": step, "text": "x" * 70_000 if step == 10 else ""}
            run.save(State(tensors={"x": np.full(3, step)}, extra=large, blobs={"b": bytes([step])}), step=step)
        for made in (run.rollback(1), run.rollback(2), run.rollback(1), run.compact(), run.take_over()):
            assert made is not None
            state = made.load()
            assert state.extra["step"] == made.step and len(state.extra["text"]) == (70_000 if made.step == 10 else 0)
            assert state.tensors["x"].tolist() == [made.step] * 3 and state.blobs == {"b": bytes([made.step or 0])}
        assert [c.step for c in run.log()] == [10, 20, 10, 20, 10, 10, 10]

    @pytest.mark.parametrize(("bits", "chunk_bytes"), [(None, 64), (1, 64), (4, 64), (4, 16 << 20)])
    def test_copies_are_of_codes(self, tmp_path: Path, bits: int | None, chunk_bytes: int) -> None:
        """CMP-2: never decoded and encoded again, so the values are the same bits however often it happens."""
        run = crf.open_run(tmp_path, "a", durable=False, bits=bits, chunk_bytes=chunk_bytes, policy="consecutive")
        values = weights(30, 5)
        values[[2, 29], 3] = np.nan
        sums = 1e6 * np.abs(values)
        for changed in (None, [2, 3], [0, 29], [3, 4, 5]):
            values = changed_at(values, changed or [], 1) if bits is None else values * 1.001
            table = Table({"weight": values, "sum": sums}, changed=changed, store_as={"sum": "float16"})
            run.save(State(tables={"t": table}))
        wanted = run.load().tables["t"].fields
        for made in (run.compact(), run.compact(), run.rollback(4), run.rollback(5)):
            assert_same(made.load().tables["t"].fields, wanted)
        assert parents(run)[4:] == [None, None, None, None]
        assert run.verify() == []

    def test_compaction_keeps_origin_and_pending_rows(self, tmp_path: Path) -> None:
        store = FaultyStore(tmp_path)
        story = Story(store, policy="consecutive")
        values = random_bits("float32", (20, 2))
        story.save({"t": Table({"weight": values})})
        values = changed_at(values, [1], 1)
        story.save({"t": Table({"weight": values}, changed=[1])})
        store.arm(1)
        with pytest.raises(StorageError):
            story.save({"t": Table({"weight": changed_at(values, [2], 2)}, changed=[2])})
        store.arm(0)
        story.tell(story.run.compact(), story.told[2])
        values = changed_at(values, [2, 3], 2)
        increment = story.save({"t": Table({"weight": values}, changed=[3])})
        assert (increment.parent, increment.table("t").stored_rows) == (3, 2)
        assert [c.rows.tolist() for c in increment.changes_since(2)] == [[2, 3]]
        story.check()

    def test_takeover_fences_off_another_writer(self, tmp_path: Path) -> None:
        """HEA-4: the predecessor finds its number taken."""
        story = TestParents.story(tmp_path)
        zombie = story.run
        story.run = crf.open_run(tmp_path, "a", durable=False, takeover=True, policy="consecutive")
        story.tell(story.run.latest(), story.told[4])
        assert (story.run.latest().sequence, story.run.latest().parent) == (5, 4)
        with pytest.raises(ConcurrentCommitError):
            zombie.save(State(tables={"t": Table(story.told[4]["t"], changed=[])}))
        story.run.restore()
        values = changed_at(story.told[4]["t"]["weight"], [8], 8)
        assert story.save({"t": Table({"weight": values}, changed=[8])}).parent == 5
        story.check()

    def test_nothing_to_go_back_to(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, takeover=True)
        assert run.latest(default=None) is None and run.take_over() is None
        with pytest.raises(InvalidInputError, match="nothing was committed"):
            run.compact()
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint 1"):
            run.rollback(1)
        assert list(run.log()) == []


class TestSizes:
    """The same results whichever way the writer takes: shared blocks, own blocks, many chunks, long chains."""

    @pytest.mark.parametrize(("small", "pooled"), [(0, 1), (0, 1 << 20), (1 << 20, 1), (1 << 20, 2000)])
    @pytest.mark.parametrize("bits", [None, 3])
    def test_own_blocks_and_shared_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int, pooled: int, bits: int | None
    ) -> None:
        """LAY-6: resolution goes by row number or key, never by part."""
        monkeypatch.setattr("checkrun_format.writer._SMALL_BYTES", small)
        monkeypatch.setattr("checkrun_format.writer._POOL_BYTES", pooled)
        monkeypatch.setattr("checkrun_format.writer._PIECE_BYTES", 100)
        run = crf.open_run(
            tmp_path, "a", durable=False, encoder="minmax", bits=bits, chunk_bytes=200, policy="consecutive"
        )
        tables = {f"t{n}": weights(20 + n, 3 + n % 2, n) for n in range(6)}
        for values in tables.values():
            values[[1, 19]] = np.nan
        keys = np.arange(25)[::-1] * 3
        for changed in (None, [0, 1, 9], [1, 19]):
            for seed, values in enumerate(tables.values()):
                values[changed or []] = weights(len(changed or []), values.shape[1], seed) * 9
            state = {name: Table({"weight": v, "sum": v[:, 0]}, changed=changed) for name, v in tables.items()}
            listed = None if changed is None else keys[changed]
            state["keyed"] = Table({"weight": tables["t5"]}, keys=keys, changed=listed)
            run.save(State(tables=state))
        for made in (run.latest(), run.compact()):
            for name, values in tables.items():
                found = made.table(name).read()
                assert bits_of(found["sum"]) == bits_of(values[:, 0])
                if bits is None:
                    assert bits_of(found["weight"]) == bits_of(values)
                else:
                    assert_within_bound(found["weight"], values, bits)
                    assert bits_of(made.table(name).take([19, 1])["weight"]) == bits_of(found["weight"][[19, 1]])
            assert bits_of(made.table("keyed").take(keys)["weight"]) == bits_of(made.table("t5").read()["weight"])
        assert run.verify() == []

    def test_what_waits_for_a_block_is_bounded_whatever_its_layouts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A compaction of four widths: rows of none wait for those of their own until the memory is full."""
        values = np.random.default_rng(0).random((3000, 8), np.float32)
        for number, bits in enumerate((4, 8, None, 2)):
            run = crf.open_run(
                tmp_path, "a", durable=False, encoder="minmax", bits=bits, chunk_bytes=500, policy="consecutive"
            )
            changed = None
            if number:
                run.restore()
                changed = np.arange(number, 3000, 4)
                values[changed] += 1
            run.save(State(tables={"t": Table({"weight": values}, changed=changed)}))
        waiting = []

        class Watched(Pool):
            def taken(self) -> Iterator[EncodedRows]:
                waiting.append(sum(rows.nbytes for rows in self.encoded))
                yield from super().taken()

        monkeypatch.setattr("checkrun_format.writer._POOL_BYTES", 4000)
        monkeypatch.setattr("checkrun_format.writer.Pool", Watched)
        chain = run.latest().table("t").read()["weight"]
        compacted = run.compact()
        assert bits_of(compacted.table("t").read()["weight"]) == bits_of(chain)
        assert len(compacted._stored.parts("t")) > 4
        assert sum(waiting) == 750 * (4 * 8 + 3 * 4 + 4 + 8 + 4 * 8 + 2)  # row numbers, qparams, codes, values
        assert max(waiting) < 4000 + 2000
        assert run.verify() == []

    def test_a_large_table_in_several_pieces(self, tmp_path: Path) -> None:
        """Rows of the first piece fit float16 qparams, those of later ones do not: within the bound all the same."""
        run = crf.open_run(
            tmp_path, "a", durable=False, encoder="minmax", bits=4, chunk_bytes=300_000, policy="consecutive"
        )
        values = weights(40_000, 40)
        values[30_000:] += 1e6
        values[39_999] = np.nan
        run.save(State(tables={"t": Table({"weight": values})}))
        assert_within_bound(run.load().tables["t"]["weight"], values, 4)
        changed = np.arange(40_000) % 10 != 3
        values[changed] = values[changed] * 2
        increment = run.save(State(tables={"t": Table({"weight": values}, changed=changed)}))
        assert (increment.table("t").storage, increment.table("t").stored_rows) == ("changed", 36_000)
        found = increment.table("t").read(rows=slice(29_000, 31_000))["weight"]
        assert_within_bound(found, values[29_000:31_000], 4)

    def test_a_long_chain(self, tmp_path: Path) -> None:
        """Longer than what is kept of a history in memory."""
        run = crf.open_run(tmp_path, "a", durable=False, policy="consecutive")
        values = random_bits("float32", (80, 2))
        run.save(State(tables={"t": Table({"weight": values})}))
        for row in range(80):
            values = changed_at(values, [row], row)
            run.save(State(tables={"t": Table({"weight": values}, changed=[row])}))
        assert run.latest().parent == 80
        assert bits_of(crf.open_run(tmp_path).load().tables["t"]["weight"]) == bits_of(values)
        assert np.concatenate([c.rows for c in run.latest().changes_since(1)]).tolist() == list(range(80))


class TestWhatChanged:
    """CHG-1, CHG-2; more of it wherever a story is checked."""

    @pytest.mark.parametrize("max_bytes", [1, 100, np.int64(64), 1 << 30])
    def test_comes_in_batches_that_are_bounded(self, tmp_path: Path, max_bytes: Any) -> None:
        story = TestParents.story(tmp_path)
        values = random_bits("float32", (20, 2), 9)
        made = story.save({"t": Table({"weight": values}, changed=range(3, 19))})
        batches = list(made.changes_since(4, max_bytes=max_bytes))
        rows = np.concatenate([batch.rows for batch in batches])
        assert rows.tolist() == list(range(3, 19))
        assert np.concatenate([batch.fields["weight"] for batch in batches]).tobytes() == values[3:19].tobytes()
        assert len(batches) == -(-16 // max(1, int(max_bytes) // 16))
        assert {batch.table_rows for batch in batches} == {20}

    @pytest.mark.parametrize("number", [1, 2, 3, 4])
    def test_since_in_any_form(self, tmp_path: Path, number: int) -> None:
        story = TestParents.story(tmp_path)
        latest = story.run.latest()
        wanted = [list(range(number + 1, 5))] if number < 4 else []
        forms: list[Any] = [number, np.int32(number), story.run[number]]
        for since in forms:
            assert [batch.rows.tolist() for batch in latest.changes_since(since)] == wanted

    @pytest.mark.parametrize(
        ("since", "max_bytes", "told"),
        [
            (0, 1, "changes since 0"),
            (5, 1, "changes since 5: give the number of a checkpoint up to 4"),
            (True, 1, "changes since True"),
            ("1", 1, "changes since '1'"),
            (None, 1, "changes since None"),
            (1, 0, "max_bytes 0; at least 1"),
            (1, 1.5, "max_bytes 1.5"),
            (1, None, "max_bytes None"),
            (1, True, "max_bytes True"),
        ],
    )
    def test_refused(self, tmp_path: Path, since: Any, max_bytes: Any, told: str) -> None:
        latest = TestParents.story(tmp_path).run.latest()
        with pytest.raises(InvalidInputError, match=told):
            latest.changes_since(since, max_bytes=max_bytes)
        assert [batch.rows.tolist() for batch in latest.changes_since(1)] == [[2, 3, 4]]


class TestLookingUp:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Run:
        run = crf.open_run(tmp_path, "a", durable=False)
        for step in (100, 200, None, 100, 50):
            run.save(State(extra=step), step=step)
        return run

    def test_by_number(self, run: Run) -> None:
        assert [run[number].extra for number in range(1, 6)] == [100, 200, None, 100, 50]
        number: Any = np.int32(2)
        assert run[number].sequence == 2

    @pytest.mark.parametrize("number", [0, 6, -1, 2**70])
    def test_no_such_number(self, run: Run, number: int) -> None:
        with pytest.raises(CheckpointNotFoundError, match=f"has no checkpoint {number}"):
            run[number]

    @pytest.mark.parametrize("number", ["1", None, 1.0, True, slice(1, 2), b"1"])
    def test_no_number(self, run: Run, number: Any) -> None:
        with pytest.raises(InvalidInputError, match="is not the number of a checkpoint"):
            run[number]
        with pytest.raises(InvalidInputError, match="is not the number of a checkpoint"):
            run.rollback(number)

    def test_by_step(self, run: Run) -> None:
        """Steps repeat after going back: the newest wins."""
        assert [run.at(step=step).sequence for step in (100, 200, 50)] == [4, 2, 5]
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 7"):
            run.at(step=7)

    def test_the_log_goes_up(self, run: Run) -> None:
        assert [(c.sequence, c.step) for c in run.log()] == [(1, 100), (2, 200), (3, None), (4, 100), (5, 50)]
        assert all(c.stored_bytes == c.commit.stored_bytes + c.commit.manifest.bytes > 0 for c in run.log())

    def test_numbers_go_beyond_eight_digits_and_are_compared_as_numbers(self, tmp_path: Path) -> None:
        """TRE-1: strangers in between are no checkpoints."""
        run = crf.open_run(tmp_path, "a", durable=False)
        run.save(State(extra=1))
        (tmp_path / "99999999").mkdir()
        (tmp_path / "99999999/zarr.json").write_bytes(b"")
        for name in ("handpicked", "0900000", "tags", "00000001.bak", "12345678901234567890"):
            (tmp_path / name).mkdir()
        with pytest.warns(crf.BurntNumberWarning, match="99999999/zarr.json"):
            run = crf.open_run(tmp_path, "a", durable=False)
        run.save(State(extra=2))
        run.save(State(extra=3))
        assert [c.sequence for c in run.log()] == [1, 100_000_000, 100_000_001]
        assert (tmp_path / "100000000/zarr.json").exists()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert crf.open_run(tmp_path).latest().extra == 3

    def test_an_empty_run_has_a_default(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "run", "a", durable=False)
        assert run.latest(default=None) is None and run.latest(default=3) == 3
        with pytest.raises(CheckpointNotFoundError, match="has no checkpoint yet"):
            run.latest()
        assert crf.open_run(tmp_path / "run").latest(default=None) is None

    @pytest.mark.parametrize("step", [0, 1, 2**63 - 1, np.int64(7), np.uint8(9)])
    def test_steps(self, tmp_path: Path, step: int) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        assert run.save(State(), step=step).step == step == run.at(step=step).step

    def test_addresses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        crf.open_run("a b é", "a", durable=False).save(State(extra=1))
        for address in ("a b é", tmp_path / "a b é", f"file://{tmp_path}/a b é", "~/a b é", LocalStore("a b é")):
            assert crf.open_run(address).latest().extra == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a b é"]

    def test_a_pruned_number_says_so(self, tmp_path: Path) -> None:
        """PRU-1."""
        run = crf.open_run(tmp_path, "a", durable=False)
        for number in (1, 2):
            run.save(State(extra=number))
        document = json.loads((tmp_path / "00000001/zarr.json").read_text())
        document["attributes"]["checkrun"] = {"kind": "pruned", "format_version": "0.9", "sequence": 1}
        (tmp_path / "00000001/zarr.json").write_text(json.dumps(document))
        again = crf.open_run(tmp_path)
        assert [c.extra for c in again.log()] == [2]
        with pytest.raises(PrunedError, match="checkpoint 1 was pruned"):
            again[1]

    def test_what_is_not_there_is_not_created(self, tmp_path: Path) -> None:
        """RUN-1: opening for reading creates nothing."""
        with pytest.raises(RunNotFoundError, match="typo"):
            crf.open_run(tmp_path / "typo")
        assert list(tmp_path.iterdir()) == []


class TestSeveralWriters:
    """Begin, put parts, finish, commit."""

    @staticmethod
    def rows(values: Array, low: int, high: int) -> dict[str, Any]:
        return {"fields": {"weight": values[low:high]}, "rows": (low, high), "of": len(values)}

    def test_rows_columns_and_nothing(self, tmp_path: Path) -> None:
        """LAY-1: the parts cover each (row, column) exactly once."""
        run = crf.open_run(tmp_path, "a", durable=False, chunk_bytes=50)
        values, wide = random_bits("float32", (30, 3)), random_bits("int16", (12, 7))
        save = run.begin(step=5, writers=4)
        token = json.loads(json.dumps(save.token))
        lists = []
        for rank, (low, high) in enumerate(((0, 10), (10, 10), (10, 30), (0, 0))):
            writer = crf.join_save(token).writer(rank) if rank else save.writer(rank)
            if low < high:
                writer.put("t", **self.rows(values, low, high))
                writer.put_tensor(f"x{rank}", np.full(2, rank))
            if rank in (1, 3):
                columns = (0, 4) if rank == 1 else (4, 7)
                part = {"weight": wide[:, slice(*columns)]}
                writer.put("wide", part, rows=(0, 12), of=12, columns=columns)
                writer.put_blob(f"b{rank}", bytes([rank]))
            lists.append(json.loads(json.dumps(writer.finish())))
        checkpoint = save.commit(lists[::-1], extra={"a": 1})
        assert (checkpoint.sequence, checkpoint.step, checkpoint.extra) == (1, 5, {"a": 1})
        assert_same(checkpoint.table("t").read(), {"weight": values})
        assert_same(checkpoint.table("wide").read(), {"weight": wide})
        assert_same(checkpoint.table("wide").read(columns=slice(3, 6)), {"weight": wide[:, 3:6]})
        assert_same(checkpoint.table("wide").take([11, 0, 5], columns=slice(5, 6)), {"weight": wide[[11, 0, 5], 5:6]})
        assert_same(checkpoint.load().tensors, {"x0": np.full(2, 0), "x2": np.full(2, 2)})
        assert checkpoint.load().blobs == {"b1": b"\1", "b3": b"\3"}
        assert run.verify() == []

    @pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
    def test_increments_over_them(self, tmp_path: Path, policy: str) -> None:
        """A plain save over a staged one and the other way round."""
        run = crf.open_run(tmp_path, "a", durable=False, policy=policy)
        values = random_bits("float32", (30, 3))
        save = run.begin(writers=2)
        writers = [save.writer(rank) for rank in range(2)]
        for writer, (low, high) in zip(writers, ((0, 17), (17, 30)), strict=True):
            writer.put("t", **self.rows(values, low, high))
        save.commit([writer.finish() for writer in writers])
        values = changed_at(values, [3, 20], 1)
        assert run.save(State(tables={"t": Table({"weight": values}, changed=[3, 20])})).parent == 1
        after = changed_at(values, [20, 4, 29], 2)
        save = run.begin(writers=2)
        assert save.token["parent"] == (2 if policy == "consecutive" else 1)
        listed = [[20, 4], [29]] if policy == "consecutive" else [[20, 4, 3], [29]]
        lists = []
        for rank, ids in enumerate(listed):
            writer = save.writer(rank)
            recent = [row in (20, 4, 29) for row in ids]
            writer.put("t", {"weight": after[ids]}, rows=ids, of=30, storage="changed", recent=recent)
            lists.append(writer.finish())
        increment = save.commit(lists)
        assert_same(increment.table("t").read(), {"weight": after})
        assert_same(run[2].table("t").read(), {"weight": values})
        assert [c.rows.tolist() for c in increment.changes_since(2)] == [[4, 20, 29]]
        last = changed_at(after, [0], 3)
        assert_same(
            run.save(State(tables={"t": Table({"weight": last}, changed=[0])})).table("t").read(), {"weight": last}
        )
        assert run.verify() == []

    def test_unchanged_and_dropped_tables(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, policy="consecutive")
        tables = {name: random_bits("float32", (4, 2), seed) for seed, name in enumerate("abc")}
        run.save(State(tables={name: Table({"weight": values}) for name, values in tables.items()}))
        save = run.begin(writers=1)
        writer = save.writer(0)
        writer.put("c", {"weight": tables["c"][[1]]}, rows=[1], of=4, storage="changed")
        with pytest.raises(InvalidInputError, match="table 'b' of the latest checkpoint has no part"):
            save.commit([part_list := writer.finish()], unchanged=["a"])
        checkpoint = save.commit([part_list], unchanged=["a"], dropped=["b"])
        assert sorted(checkpoint.tables) == ["a", "c"] and checkpoint.table("a").storage == "unchanged"
        assert_same(checkpoint.table("a").read(), {"weight": tables["a"]})
        assert [(c.table, c.dropped) for c in checkpoint.changes_since(1)] == [("b", True), ("c", False)]

    def test_rows_of_a_plain_save_that_failed_are_needed(self, tmp_path: Path) -> None:
        """Rows named by `changed` are remembered until a save commits, of whichever kind."""
        store = FaultyStore(tmp_path)
        run = crf.open_run(store, "a", policy="consecutive")
        values = random_bits("float32", (6, 2))
        run.save(State(tables={"t": Table({"weight": values}), "u": Table({"weight": values})}))
        values = changed_at(values, [1, 3], 1)
        store.arm(1)
        table = Table({"weight": values}, changed=[1])
        with pytest.raises(StorageError):
            run.save(State(tables={"t": table, "u": table}))
        store.arm(0)
        for table_u, told in (
            (None, "unchanged: table 'u' has rows that changed"),
            ([3], "table 'u': no part holds row 1"),
        ):
            save = run.begin(writers=1)
            writer = save.writer(0)
            writer.put("t", {"weight": values[[1, 3]]}, rows=[1, 3], of=6, storage="changed")
            if table_u:
                writer.put("u", {"weight": values[table_u]}, rows=table_u, of=6, storage="changed")
            with pytest.raises(InvalidInputError, match=told):
                save.commit([writer.finish()], unchanged=[] if table_u else ["u"])
        made = run.save(State(tables={"t": Table({"weight": values}, changed=[3]), "u": table}))
        assert_same(made.table("t").read(), {"weight": values})
        assert made.table("t").stored_rows == 2

    def test_abandoned(self, tmp_path: Path) -> None:
        """Leaving without a commit: what was stored is litter, and the number is free."""
        run = crf.open_run(tmp_path, "a", durable=False)
        values = random_bits("float32", (4, 2))
        with run.begin(writers=1) as save:
            save.writer(0).put("t", **self.rows(values, 0, 4))
        assert run.latest(default=None) is None
        assert run.save(State(tables={"t": Table({"weight": values})})).sequence == save.sequence == 1
        assert_same(crf.open_run(tmp_path).load().tables["t"].fields, {"weight": values})

    @pytest.mark.parametrize(
        "ranges", [[(0, 10), (10, 20)], [(0, 20), (10, 30)], [(0, 10), (20, 30)]], ids=["short", "overlap", "gap"]
    )
    def test_parts_that_do_not_fit_together(self, tmp_path: Path, ranges: list[tuple[int, int]]) -> None:
        """LAY-1."""
        run = crf.open_run(tmp_path, "a", durable=False)
        values = random_bits("float32", (30, 3))
        save = run.begin(writers=2)
        lists = []
        for rank, (low, high) in enumerate(ranges):
            writer = save.writer(rank)
            writer.put("t", **self.rows(values, low, high))
            lists.append(writer.finish())
        with pytest.raises(InvalidInputError, match=r"table 't', field 'weight': .*\(LAY-1\)"):
            save.commit(lists)
        with pytest.raises(InvalidInputError, match=r"part lists of writers \[0\]"):
            save.commit(lists[:1])
        assert run.latest(default=None) is None


@pytest.mark.parametrize("parent", [True, 1.0, "1", (1,)])
def test_a_parent_is_a_number(tmp_path: Path, parent: Any) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    table = crf.Table({"weight": np.zeros((3, 2), np.float32)}, changed=[])
    run.save(crf.State(tables={"t": table}))
    with pytest.raises(crf.InvalidInputError, match=r"parent=.* is not in the chain"):
        run.save(crf.State(tables={"t": table}), parent=parent)
    assert [c.sequence for c in run.log()] == [1]


def test_bits_may_be_a_numpy_integer(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a", bits=cast("int", np.int64(4)))
    saved = run.save(crf.State(tables={"t": crf.Table({"weight": np.array([[0, 5, 15]], np.float32)})}))
    encoder = saved.table("t").fields[0].encoder
    assert encoder is not None
    assert encoder["bits"] == 4
    assert saved.table("t").read()["weight"].tolist() == [[0, 5, 15]]
