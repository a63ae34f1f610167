"""Tables whose values are asked for by row: what is asked for, what is refused, and sizes beyond 32 bits."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

import checkrun_format as crf
from checkrun_format import ALL, Run, State, Table, chunks, layout
from checkrun_format.commit import Claim, Content, commit, open_attempt, seal
from checkrun_format.errors import InvalidInputError
from checkrun_format.manifest import (
    BlockEntry,
    BlockField,
    Field,
    PartFile,
    PolicyNote,
    TableEntry,
    digest_of,
)
from checkrun_format.partfile import least_bytes, pack_parts
from checkrun_format.stores import LocalStore
from checkrun_format.writer import Objects, PartList
from tests.property.strategies import SlowStore

Array = npt.NDArray[Any]
Fetched = Mapping[str, Any]

SPEC: Mapping[str, Any] = {"weight": (np.float32, 4), "sum": ("float64", None), "half": ("bfloat16", 2)}


def values_of(ids: Array, salt: int = 0) -> dict[str, Array]:
    """Values that follow from the row or key alone."""
    base = (ids.astype(np.float64) % 1009) + salt
    return {
        "weight": (base[:, None] * [1, 2, 3, 4]).astype(np.float32),
        "sum": base / 3,
        "half": base[:, None].astype(ml_dtypes.bfloat16) * np.ones(2, ml_dtypes.bfloat16),
    }


class Source:
    """A function that remembers what it was asked."""

    def __init__(self, answer: Callable[[Array], Fetched] = values_of) -> None:
        self.asked: list[Array] = []
        self._answer = answer

    def __call__(self, ids: Array) -> Fetched:
        assert ids.dtype == np.int64 and ids.ndim == 1
        assert (ids[1:] > ids[:-1]).all(), "ascending"
        self.asked.append(ids.copy())
        return self._answer(ids)

    @property
    def rows(self) -> list[int]:
        return sorted({row for ids in self.asked for row in ids.tolist()})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return crf.open_run(tmp_path, "a", durable=False, policy="consecutive", chunk_bytes=100)


def assert_same(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    assert {name: (values.dtype, values.tobytes()) for name, values in found.items()} == {
        name: (values.dtype, values.tobytes()) for name, values in wanted.items()
    }


class TestAsking:
    """Only rows that are stored are ever gathered."""

    def test_a_base_asks_for_every_row(self, run: Run) -> None:
        source = Source()
        made = run.save(State(tables={"t": Table.from_function(source, rows=30, fields=SPEC)}))
        assert source.rows == list(range(30))
        assert_same(made.table("t").read(), values_of(np.arange(30)))

    @pytest.mark.parametrize(
        ("changed", "rows"),
        [
            ([], []),
            ([29], [29]),
            ([5, 0, 29], [0, 5, 29]),
            (np.arange(30) % 7 == 0, [0, 7, 14, 21, 28]),
            (ALL, list(range(30))),
            (range(4, 12), list(range(4, 12))),
        ],
        ids=["none", "the last", "unsorted", "mask", "all", "a run"],
    )
    def test_an_increment_asks_for_what_changed(self, run: Run, changed: Any, rows: list[int]) -> None:
        run.save(State(tables={"t": Table.from_function(values_of, rows=30, fields=SPEC)}))
        source = Source(lambda ids: values_of(ids, salt=5))
        made = run.save(State(tables={"t": Table.from_function(source, rows=30, fields=SPEC, changed=changed)}))
        assert source.rows == rows
        wanted = values_of(np.arange(30))
        for name, values in values_of(np.array(rows, np.int64), salt=5).items():
            wanted[name][rows] = values
        assert_same(made.table("t").read(), wanted)

    def test_a_table_that_grew_asks_for_its_new_rows(self, run: Run) -> None:
        run.save(State(tables={"t": Table.from_function(values_of, rows=10, fields=SPEC)}))
        source = Source()
        made = run.save(State(tables={"t": Table.from_function(source, rows=13, fields=SPEC, changed=[2])}))
        assert source.rows == [2, 10, 11, 12]
        assert_same(made.table("t").read(), values_of(np.arange(13)))

    def test_over_an_older_parent_it_asks_for_all_since_then(self, run: Run) -> None:
        for number, changed in ((0, None), (1, [3]), (2, [7])):
            source = Source(functools.partial(values_of, salt=number))
            table = Table.from_function(source, rows=10, fields=SPEC, changed=changed)
            made = run.save(State(tables={"t": table}), parent=1 if number else None)
        assert source.rows == [3, 7]
        assert made.table("t").take([3, 7])["sum"].tolist() == values_of(np.array([3, 7]), 2)["sum"].tolist()

    def test_a_large_base_is_asked_for_in_pieces(self, tmp_path: Path) -> None:
        """Memory is bounded by the piece, not by the table."""
        run = crf.open_run(tmp_path, "a", durable=False, bits=1)
        source = Source(lambda ids: {"weight": np.zeros((len(ids), 512), np.float32)})
        rows = 9_000
        run.save(State(tables={"t": Table.from_function(source, rows=rows, fields={"weight": ("float32", 512)})}))
        assert [int(ids[0]) for ids in source.asked][1:] == [int(ids[-1]) + 1 for ids in source.asked][:-1]
        assert sum(map(len, source.asked)) == rows and max(map(len, source.asked)) * 2048 <= 16 << 20

    def test_the_function_may_use_its_arrays_again(self) -> None:
        """What it gave is stored, though it is stored later."""
        run = crf.open_run(SlowStore(), "a", chunk_bytes=16 << 10)
        buffer = np.empty(10_000, np.float32)

        def fetch(ids: Array) -> Fetched:
            buffer[: len(ids)] = ids
            return {"sum": buffer[: len(ids)], "half": np.zeros(len(ids), np.float32)}

        spec: Mapping[str, Any] = {"sum": ("float32", None), "half": ("float32", None)}
        table = Table.from_function(fetch, rows=1_000_000, fields=spec, store_as={"half": "float16"})
        made = run.save(State(tables={"t": table}))
        assert np.array_equal(made.table("t").read()["sum"], np.arange(1_000_000, dtype=np.float32))

    def test_without_rows(self, run: Run) -> None:
        source = Source()
        made = run.save(State(tables={"t": Table.from_function(source, rows=0, fields=SPEC)}))
        assert source.asked == [] and len(made.table("t")) == 0
        assert [values.shape for values in made.table("t").read().values()] == [(0, 4), (0,), (0, 2)]

    def test_a_failed_save_asks_again(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        run.save(State(tables={"t": Table.from_function(values_of, rows=10, fields=SPEC)}))
        monkeypatch.setattr(LocalStore, "sync", Mock(side_effect=crf.StorageError(5, "injected")))
        with pytest.raises(crf.StorageError):
            run.save(State(tables={"t": Table.from_function(values_of, rows=10, fields=SPEC, changed=[4])}))
        monkeypatch.undo()
        source = Source(lambda ids: values_of(ids, 1))
        run.save(State(tables={"t": Table.from_function(source, rows=10, fields=SPEC, changed=[6])}))
        assert source.rows == [4, 6]
        assert run.load().tables["t"]["sum"][[4, 6]].tolist() == values_of(np.array([4, 6]), 1)["sum"].tolist()

    @pytest.mark.parametrize("dtype", ["int64", "uint64"])
    def test_keyed(self, run: Run, dtype: str) -> None:
        """Asked by key, ascending as int64, whatever the order of `keys`."""
        keys = np.array([9, 2**63 - 1, 3, 2**62], dtype)
        if dtype == "uint64":
            keys[2] = 2**64 - 3
        source = Source()
        run.save(State(tables={"t": Table.from_function(source, keys=keys, fields=SPEC)}))
        assert source.rows == sorted(keys.view(np.int64).tolist())
        later = Source(lambda ids: values_of(ids, 1))
        table = Table.from_function(later, keys=keys[[2, 1, 0]], fields=SPEC, changed=keys[[2]], deleted=keys[[3]])
        made = run.save(State(tables={"t": table}))
        assert later.rows == [keys.view(np.int64).tolist()[2]]
        assert_same(made.table("t").take(keys[[2]]), values_of(keys[[2]].view(np.int64), 1))
        assert_same(made.table("t").take(keys[[0, 1]]), values_of(keys[[0, 1]].view(np.int64)))
        assert len(made.table("t")) == 3
        mask = Source(lambda ids: values_of(ids, 2))
        table = Table.from_function(mask, keys=keys[[2, 1, 0]], fields=SPEC, changed=np.array([False, False, True]))
        assert run.save(State(tables={"t": table})).table("t").stored_rows == 1
        assert mask.rows == [9]

    def test_values_in_any_form(self, run: Run) -> None:
        def answer(ids: Array) -> Fetched:
            wanted = values_of(ids)
            half = torch.from_numpy(wanted["half"].view(np.uint16)).view(torch.bfloat16)
            return {
                "half": half,
                "sum": wanted["sum"].astype(">f8"),
                "weight": np.asfortranarray(wanted["weight"]),
                "more": 1.0 * ids,
            }

        made = run.save(State(tables={"t": Table.from_function(answer, rows=8, fields=SPEC)}))
        assert_same(made.table("t").read(), values_of(np.arange(8)))


class TestRefused:
    """A wrong answer of the function is one error, and nothing of the save stays."""

    @pytest.mark.parametrize(
        ("answer", "told"),
        [
            (
                lambda v: {**v, "weight": v["weight"][:-1]},
                "'weight': the function gave float32 .1, 4. for float32 .2, 4.",
            ),
            (lambda v: {**v, "weight": v["weight"][:, :3]}, "field 'weight': the function gave float32 .2, 3."),
            (lambda v: {**v, "weight": v["weight"].T}, "field 'weight': the function gave float32 .4, 2."),
            (lambda v: {**v, "weight": v["weight"].astype("f8")}, "field 'weight': the function gave float64"),
            (lambda v: {**v, "weight": v["weight"][0]}, "field 'weight': the function gave float32 .4,."),
            (lambda v: {**v, "sum": v["sum"][:, None]}, "'sum': the function gave float64 .2, 1. for float64 .2,."),
            (lambda v: {**v, "sum": v["sum"].astype(complex)}, "field 'sum': the function gave complex128"),
            (lambda v: {**v, "sum": ["a", "b"]}, "field 'sum': dtype <U1 cannot be stored"),
            (lambda v: {**v, "sum": None}, "field 'sum': dtype object"),
            (lambda v: {**v, "sum": 3.0}, "field 'sum': shape .."),
            (lambda v: {"sum": v["sum"], "half": v["half"]}, "field 'weight': the function gave nothing"),
            (lambda v: {**v, "Weight": v["sum"]}, "field name 'Weight'"),
            (lambda v: v["weight"], "no fields; give a mapping"),
            (lambda v: None, "no fields; give a mapping"),
            (lambda v: {}, "no fields; give a mapping"),
        ],
    )
    def test_answers(self, tmp_path: Path, run: Run, answer: Callable[[Any], Any], told: str) -> None:
        run.save(State(tables={"t": Table.from_function(values_of, rows=9, fields=SPEC)}))
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        table = Table.from_function(lambda ids: answer(values_of(ids)), rows=9, fields=SPEC, changed=[3, 4])
        with pytest.raises(InvalidInputError, match=f"table 't'.*{told}"):
            run.save(State(tables={"t": table}))
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert not (tmp_path / "00000002").exists()
        assert_same(run.load().tables["t"].fields, values_of(np.arange(9)))

    def test_an_error_of_the_function_is_the_callers(self, tmp_path: Path, run: Run) -> None:
        def broken(ids: Array) -> Fetched:
            raise ZeroDivisionError(f"{len(ids)} rows")

        with pytest.raises(ZeroDivisionError, match="9 rows"):
            run.save(State(tables={"t": Table.from_function(broken, rows=9, fields=SPEC)}))
        assert [path.name for path in tmp_path.iterdir()] == ["zarr.json"]

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({}, "either rows= or keys="),
            ({"rows": 3, "keys": [1, 2, 3]}, "either rows= or keys="),
            ({"keys": 3}, "keys: 0 dimensions where a list of ids is wanted"),
            ({"rows": -1}, "rows=-1 is no number of rows"),
            ({"rows": 3.0}, "rows=3.0 is no number of rows"),
            ({"rows": True}, "rows=True is no number"),
            ({"rows": "3"}, "rows='3' is no number"),
            ({"rows": 3, "changed": [3]}, "changed: row 3 is not in a table of 3 rows"),
            ({"rows": 3, "changed": [True]}, "changed: a mask of shape .1,. for 3 rows"),
            ({"rows": 3, "deleted": [1]}, "only a keyed table has deleted keys"),
            ({"rows": 3, "fields": {}}, "no fields"),
            ({"rows": 3, "fields": {"Weight": ("f4", 2)}}, "field name 'Weight'"),
            ({"rows": 3, "fields": {"w": "f4"}}, "field 'w': give .dtype, columns., not 'f4'"),
            ({"rows": 3, "fields": {"w": ("f4",)}}, "field 'w': give"),
            (
                {"rows": 3, "fields": {"w": ("f4", 0)}},
                "field 'w': columns 0; give None or a number from 1 to 134217727",
            ),
            (
                {"rows": 3, "fields": {"w": ("f4", 2**27)}},
                "field 'w': columns 134217728; give None or a number from 1 to",
            ),
            ({"rows": 3, "fields": {"w": ("f4", -3)}}, "field 'w': columns -3"),
            ({"rows": 3, "fields": {"w": ("f4", 1.0)}}, "field 'w': columns 1.0"),
            ({"rows": 3, "fields": {"w": ("f4", True)}}, "field 'w': columns True"),
            ({"rows": 3, "fields": {"w": ("float7", 2)}}, "field 'w': 'float7' is no dtype"),
            ({"rows": 3, "fields": {"w": (object, 2)}}, "field 'w': dtype object cannot be stored"),
            ({"rows": 3, "fields": {"w": (torch.float32, 2)}}, "field 'w': torch.float32 is no dtype of numpy"),
            ({"rows": 3, "fields": {"w": (None, 2)}}, "field 'w': no dtype"),
            ({"rows": 3, "store_as": {"sum": "float16"}}, "store_as 'sum': a float32 field"),
            ({"rows": 3, "bits": {"sum": 4}}, "field 'sum': only floating-point fields .rows, columns."),
        ],
    )
    def test_descriptions(self, tmp_path: Path, run: Run, options: dict[str, Any], told: str) -> None:
        source = Source()
        with pytest.raises(InvalidInputError, match=f"table 't'.*{told}"):
            run.save(State(tables={"t": Table.from_function(source, **{"fields": SPEC, **options})}))
        assert source.asked == []
        assert [path.name for path in tmp_path.iterdir()] == ["zarr.json"]


class TestBeyond32Bits:
    """FORMAT.md section 11: 2^25 rows of 128 columns are 2^32 values; nothing of that size is ever in memory.

    The base is written by hand: its chunks all have the same bytes, so one file is linked many times.
    """

    ROWS, COLUMNS, CHUNK_ROWS = 2**25 + 3, 128, 2**20

    @classmethod
    def base(cls, path: Path) -> Run:
        """Codes of 1 bit, all of them 1; scale 2, bias 3: every value is 5. And `sum`, all of them 7."""
        store = LocalStore(path, durable=False)
        run = crf.open_run(store, "a")
        claim = Claim.of(1)
        group_bytes = open_attempt(store, claim)
        objects = Objects(store, claim.prefix)
        objects.put("block-0-0/zarr.json", [layout.group_document()])
        pattern: dict[str, Array] = {
            "weight.codes": np.full((1, 16), 255, np.uint8),
            "weight.qparams": np.array([[2, 3]], np.float16),
            "sum.values": np.array([7], np.uint8),
        }
        arrays = {}
        for name, values in pattern.items():
            shape = (cls.ROWS, *values.shape[1:])
            whole = chunks.entry_for(values.dtype.name, shape, cls.CHUNK_ROWS, "zstd")
            arrays[name] = objects.put_array(f"block-0-0/{name}", whole)
            chunk = np.broadcast_to(values, (cls.CHUNK_ROWS, *values.shape[1:]))
            objects.put_chunk(f"block-0-0/{name}", arrays[name], 0, chunk)
            objects.wait()
            checksums = arrays[name].checksums
            assert isinstance(checksums, list)
            checksums[:] = checksums[:1] * len(checksums)
            first = path / claim.prefix / "block-0-0" / name / layout.chunk_name(0, len(shape))
            for index in range(1, layout.chunk_count(cls.ROWS, cls.CHUNK_ROWS)):
                link = path / claim.prefix / "block-0-0" / name / layout.chunk_name(index, len(shape))
                link.parent.mkdir(exist_ok=True)
                link.hardlink_to(first)
        fields = [
            BlockField(name="weight", encoding="affine", columns=cls.COLUMNS, bits=1, dtype=None),
            BlockField(name="sum", encoding="raw", columns=None, bits=None, dtype="uint8"),
        ]
        document = PartFile(
            writer=0,
            attempt=claim.attempt,
            tables=["t"],
            blocks=[BlockEntry(rows=cls.ROWS, fields=fields, arrays=arrays)],
            parts=[[0, 0, 0, cls.ROWS, 0, 1, 0, 0, 0, 0]],
            dense={},
        )
        data = pack_parts(document)
        objects.put("parts-0.json.gz", [data])
        part_list = PartList(
            file=digest_of(data),
            document=document,
            stored_bytes=objects.wait() + least_bytes(document),
            tensors=[],
            blobs=[],
            tables=[],
            statistics={},
        )
        entry = TableEntry(
            name="t",
            requires=[],
            addressing="dense",
            key_dtype=None,
            rows=cls.ROWS,
            storage="full",
            fields=[
                Field(name="weight", dtype="float32", columns=cls.COLUMNS, encoder=None),
                Field(name="sum", dtype="uint8", columns=None, encoder=None),
            ],
        )
        content = Content(step=None, tables=[entry], policy=PolicyNote(name="hand", reason="written by hand"))
        commit(store, claim, seal(store, claim, content, [part_list], group_bytes))
        assert run.latest().sequence == 1
        return run

    @classmethod
    def source(cls, salt: int) -> Source:
        def answer(ids: Array) -> Fetched:
            columns = np.arange(cls.COLUMNS) % 2
            weight = (ids[:, None] % 512 + salt + columns).astype(np.float32)
            return {"weight": weight, "sum": (ids % 100 + salt).astype(np.uint8)}

        return Source(answer)

    def check(self, view: Any, changed: Mapping[int, int], others: Array) -> None:
        """Rows that a salt gave, exactly: two values a row need one bit; and the untouched ones."""
        ids = np.array(sorted(changed), np.int64)
        salts = np.array([changed[row] for row in ids.tolist()])
        found = view.take(ids)
        assert (found["weight"] == (ids % 512 + salts)[:, None] + np.arange(self.COLUMNS) % 2).all()
        assert found["sum"].tolist() == (ids % 100 + salts).tolist()
        rest = view.take(np.setdiff1d(others, ids))
        assert (rest["weight"] == 5).all() and (rest["sum"] == 7).all()

    def test_saved_resolved_and_followed(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """In a folder that no second reader looks at: it would read all of it."""
        rows, folder = self.ROWS, tmp_path_factory.mktemp("large")
        self.base(folder)
        tracemalloc.start()
        run = crf.open_run(folder, "a", durable=False, bits=1, policy="consecutive")
        run._saver.ledger.restored_from(1)
        spec: dict[str, Any] = {"weight": (np.float32, self.COLUMNS), "sum": ("uint8", None)}
        picked = [0, 2**24, 2**24 + 1, 2**25 - 1, 2**25, rows - 1]
        source = self.source(1)
        run.save(State(tables={"t": Table.from_function(source, rows=rows, fields=spec, changed=picked)}))
        assert source.rows == picked
        grown = self.source(2)
        table = Table.from_function(grown, rows=rows + 2, fields=spec, changed=[2**24 + 1, 77])
        made = run.save(State(tables={"t": table}))
        assert grown.rows == [77, 2**24 + 1, rows, rows + 1]
        given = dict.fromkeys(picked, 1) | dict.fromkeys(grown.rows, 2)
        others = np.array([1, 76, 78, 2**20, 2**24 - 1, 2**24 + 2, 2**25 - 2, 2**25 + 1, rows - 2])
        view = made.table("t")
        assert (len(view), view.stored_rows) == (rows + 2, 4)
        self.check(view, given, others)
        self.check(run[2].table("t"), dict.fromkeys(picked, 1), np.append(others, 77))
        end = view.read(rows=slice(-4, None), columns=slice(127, 128))
        last = np.arange(rows - 2, rows + 2)
        assert end["weight"][:, 0].tolist() == [5, *(last[1:] % 512 + [1, 2, 2] + 1).tolist()]
        batches = list(made.changes_since(1))
        assert np.concatenate([batch.rows for batch in batches]).tolist() == sorted({*picked, *grown.rows})
        assert made.table("t").read(rows=slice(2**25 - 1, 2**25 + 1))["sum"].tolist() == [
            (2**25 - 1) % 100 + 1,
            2**25 % 100 + 1,
        ]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 256 << 20, "a byte for each row, and a chunk"

    @pytest.mark.parametrize("shape", [(2**25, 128), (2**31 - 1, 1), (2**31 + 1, 1), (2**40, 2**13)])
    def test_addresses(self, shape: tuple[int, int]) -> None:
        """Bytes, chunk counts and chunk names of arrays that no machine could hold."""
        rows, columns = shape
        for dtype, size in (("uint8", 1), ("float32", 4), ("complex128", 16)):
            chunk_rows = layout.balanced_chunk_rows(rows, columns * size, 16 << 20)
            entry = chunks.entry_for(dtype, shape, chunk_rows)
            assert chunks.row_bytes(entry) == columns * size
            count = layout.chunk_count(rows, chunk_rows)
            assert count == -(-rows * columns * size // (16 << 20)) or chunk_rows == 1
            assert (count - 1) * chunk_rows < rows <= count * chunk_rows
