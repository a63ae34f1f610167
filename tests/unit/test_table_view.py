"""Reading rows and columns of one table at one checkpoint, against numpy's own indexing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

import checkrun_format as crf
from checkrun_format import Checkpoint, State, Table, TableView, dlpack
from checkrun_format.errors import InvalidInputError, RowNotFoundError
from checkrun_format.reader import Block
from checkrun_format.rows import length

Array = npt.NDArray[Any]
Views = list[tuple[TableView, dict[str, Array]]]

ROWS = 23
COLUMNS = (1, 3, 5, 7, 801)
SLICES = [
    *(
        slice(None),
        slice(0, 5),
        slice(5, None),
        slice(-3, None),
        slice(None, -20),
        slice(-5, -2),
        slice(4, 4),
        slice(9, 3),
    ),
    *(slice(20, 99), slice(-99, 2), slice(50, 60), slice(22, 23), slice(0, 0), slice(2, 5, 1), slice(np.int64(3), 6)),
]


def bits_of(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = dlpack.to_numpy(values, "values")
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def fields_of(columns: int, seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    weight = random.normal(size=(ROWS, columns)).astype(np.float32)
    return {
        "weight": weight,
        "half": random.normal(size=(ROWS, columns)).astype(ml_dtypes.bfloat16),
        "sum": random.normal(size=ROWS),
        "seen": random.random((ROWS, 2)) < 0.5,
    }


@pytest.fixture(scope="module", params=[64, 16 << 20], ids=["small chunks", "one chunk"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A base and two increments; table `4 bits` is quantized, the others are raw."""
    run = crf.open_run(
        tmp_path_factory.mktemp("run"), "a", durable=False, chunk_bytes=request.param, bits={"4 bits": 4},
        policy="consecutive",
    )  # fmt: skip
    tables = {str(columns): fields_of(columns) for columns in COLUMNS} | {"4 bits": fields_of(5)}
    tables["4 bits"]["weight"][[2, 22], 1] = np.nan
    for seed, rows in enumerate((None, [0, 3, 4, 22], [3, 21])):
        for name, fields in tables.items():
            if rows is not None:
                newer = fields_of(fields["weight"].shape[1], seed)
                for field, values in fields.items():
                    values[rows] = newer[field][rows]
            tables[name] = fields
        made = run.save(State(tables={name: Table(fields, changed=rows) for name, fields in tables.items()}))
    return made


@pytest.fixture(params=[*map(str, COLUMNS), "4 bits"])
def view(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> TableView:
    return checkpoint.table(request.param)


@pytest.fixture
def whole(view: TableView) -> dict[str, Array]:
    return view.read()


@pytest.fixture(scope="module")
def views(checkpoint: Checkpoint) -> Views:
    """Every table, and all that it holds."""
    return [(view, view.read()) for view in map(checkpoint.table, checkpoint.tables)]


def wanted(view: TableView) -> dict[str, Array]:
    """What the three saves left behind."""
    found = fields_of(view.fields[0].columns or 0)
    if view.name == "4 bits":
        found["weight"][2, 1] = np.nan
    for seed, rows in ((1, [0, 3, 4, 22]), (2, [3, 21])):
        for field, values in fields_of(view.fields[0].columns or 0, seed).items():
            found[field][rows] = values[rows]
    return found


class TestRead:
    def test_everything(self, view: TableView, whole: dict[str, Array]) -> None:
        assert list(whole) == ["weight", "half", "sum", "seen"]
        assert len(view) == ROWS and view.storage == "changed" and view.stored_rows == 2
        for name, values in wanted(view).items():
            if view.name == "4 bits" and name == "weight":
                raw = np.isfinite(values).all(axis=1)
                step = (values.max(1) - values.min(1)) / 15
                assert (np.abs(whole[name] - values).max(1) <= 0.505 * step + 1e-5)[raw].all()
                assert whole[name][~raw].tobytes() == values[~raw].tobytes()
            else:
                assert bits_of(whole[name]) == bits_of(values)

    @pytest.mark.parametrize("rows", SLICES, ids=str)
    def test_rows(self, views: Views, rows: slice) -> None:
        for view, whole in views:
            found = view.read(rows=rows)
            assert {n: bits_of(v) for n, v in found.items()} == {n: bits_of(v[rows]) for n, v in whole.items()}

    @pytest.mark.parametrize("columns", [*SLICES, slice(790, 800)], ids=str)
    def test_columns(self, views: Views, columns: slice) -> None:
        """Of the fields that have columns; the others come whole."""
        for view, whole in views:
            found = view.read(rows=slice(1, 9), columns=columns)
            for name, values in whole.items():
                cut = values[1:9] if values.ndim == 1 else values[1:9, columns]
                assert bits_of(found[name]) == bits_of(cut)

    @pytest.mark.parametrize("names", [["sum"], ["half", "weight"], ["weight", "weight"], (), ["seen", "sum", "half"]])
    def test_fields(self, views: Views, names: list[str]) -> None:
        for view, whole in views:
            found = view.read(fields=names, rows=slice(3, 7))
            assert set(found) == set(names)
            assert {n: bits_of(v) for n, v in found.items()} == {n: bits_of(whole[n][3:7]) for n in names}

    def test_into_numpy(self, view: TableView, whole: dict[str, Array]) -> None:
        out = {name: np.zeros_like(values[4:20]) for name, values in whole.items() if name != "half"}
        found = view.read(rows=slice(4, 20), out=out)
        assert {n: bits_of(v) for n, v in out.items()} == {n: bits_of(whole[n][4:20]) for n in out}
        assert list(found) == list(out) and all(found[name] is out[name] for name in out)

    def test_into_a_part_of_a_larger_array(self, view: TableView, whole: dict[str, Array]) -> None:
        columns = whole["weight"].shape[1]
        for large in (
            np.full((40, columns + 4), 7, np.float32),
            np.full((80, 2 * columns + 4), 7, np.float32)[::2, ::2],
            np.full((columns + 4, 40), 7, np.float32).T,
        ):
            view.read(out={"weight": large[5 : 5 + ROWS, 1 : 1 + columns]})
            assert bits_of(large[5 : 5 + ROWS, 1 : 1 + columns]) == bits_of(whole["weight"])
            large[5 : 5 + ROWS, 1 : 1 + columns] = 7
            assert (large == 7).all()

    def test_into_torch(self, view: TableView, whole: dict[str, Array]) -> None:
        out = {
            "half": torch.zeros(whole["half"].shape, dtype=torch.bfloat16),
            "weight": torch.nn.Parameter(torch.zeros(whole["weight"].shape)),
            "seen": torch.zeros(2, ROWS, dtype=torch.bool).T,
        }
        view.read(out=out)
        assert {n: bits_of(v) for n, v in out.items()} == {n: bits_of(whole[n]) for n in out}

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"rows": slice(None, None, 2)}, "rows of table .* step 2; only consecutive ones"),
            ({"rows": slice(None, None, -1)}, "step -1"),
            ({"rows": 3}, "rows of table .*: give a slice; take"),
            ({"rows": [1, 2]}, "give a slice"),
            ({"rows": slice("a", None)}, "rows of table"),
            ({"rows": slice(0.5, 3)}, "rows of table"),
            ({"columns": slice(0, 1, 3)}, "columns of field 'weight': step 3"),
            ({"columns": 1}, "columns of field 'weight': give a slice"),
            ({"fields": ["weight", "nope"]}, "has no field 'nope'; it has weight, half, sum, seen"),
            ({"out": {"nope": np.zeros(3)}}, "has no field 'nope'"),
            ({"out": {"sum": np.zeros(ROWS, np.float32)}}, r"out\['sum'\] .* float32 .* where float64"),
            ({"out": {"sum": np.zeros(ROWS + 1)}}, r"out\['sum'\] of table"),
            ({"out": {"sum": np.zeros((ROWS, 1))}}, r"out\['sum'\] of table"),
            ({"out": {"sum": np.zeros(ROWS, ">f8")}}, r"out\['sum'\] .* >f8"),
            ({"out": {"sum": [0.0] * ROWS}}, r"out\['sum'\] .* list is no array"),
            ({"out": {"sum": np.broadcast_to(np.float64(0), ROWS)}}, r"out\['sum'\] .* is read-only"),
            ({"out": np.zeros(ROWS)}, "out: give a mapping"),
            ({"out": 3}, "out: give a mapping"),
            ({"out": ["sum"]}, "out: give a mapping"),
            ({"out": {"sum": np.zeros(ROWS)}, "rows": slice(0, 3)}, r"out\['sum'\]"),
        ],
    )
    def test_refused(self, checkpoint: Checkpoint, options: dict[str, Any], told: str) -> None:
        view = checkpoint.table("5")
        with pytest.raises(InvalidInputError, match=told):
            view.read(**options)
        assert bits_of(view.read(fields=["sum"])["sum"]) == bits_of(wanted(view)["sum"])


class TestTake:
    IDS: tuple[list[int], ...] = (
        [5, 9, 20],
        [22, 0, 11],
        [3, 3, 3],
        [21, 4, 21, 0, 3, 3],
        [],
        [22],
        list(range(ROWS)),
        list(range(ROWS))[::-1],
        [n % ROWS for n in range(100)],
    )

    @pytest.mark.parametrize("ids", IDS, ids=str)
    def test_any_order_and_repeats(self, views: Views, ids: list[int]) -> None:
        index = np.array(ids, np.int64)
        for view, whole in views:
            found = view.take(ids)
            assert {n: bits_of(v) for n, v in found.items()} == {n: bits_of(v[index]) for n, v in whole.items()}

    @pytest.mark.parametrize(
        "ids",
        [
            (5, 0),
            range(5, -1, -5),
            np.array([5, 0], np.uint8),
            np.array([5, 0], ">i4"),
            np.array([5, 9, 0, 9], np.uint64)[::2],
            torch.tensor([5, 0], dtype=torch.int16),
        ],
        ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}",
    )
    def test_ids_in_any_form(self, views: Views, ids: Any) -> None:
        for view, whole in views:
            assert bits_of(view.take(ids)["half"]) == bits_of(whole["half"][[5, 0]])

    @pytest.mark.parametrize("ids", IDS, ids=str)
    def test_columns_and_fields(self, views: Views, ids: list[int]) -> None:
        index = np.array(ids, np.int64)
        for view, whole in views:
            found = view.take(ids, columns=slice(1, 4), fields=["half", "sum"])
            assert list(found) == ["half", "sum"]
            assert bits_of(found["half"]) == bits_of(whole["half"][index, 1:4])
            assert bits_of(found["sum"]) == bits_of(whole["sum"][index])

    @pytest.mark.parametrize("ids", IDS, ids=str)
    def test_into_arrays(self, views: Views, ids: list[int]) -> None:
        index = np.array(ids, np.int64)
        for view, whole in views:
            weight, half = whole["weight"][index, -2:], whole["half"][index, -2:]
            into = torch.zeros(half.shape, dtype=torch.bfloat16)
            out: dict[str, Any] = {"weight": np.asfortranarray(np.zeros_like(weight)), "half": into}
            found = view.take(ids, columns=slice(-2, None), out=out)
            assert list(found) == ["weight", "half"]
            assert bits_of(out["weight"]) == bits_of(weight) and bits_of(into) == bits_of(half)

    @pytest.mark.parametrize(
        ("ids", "told"),
        [
            ([23], "table '5' has no row 23 .1 are missing"),
            ([-1], "has no row -1"),
            ([3, 99, 4, 98, -7], "has no row -7 .3 are missing"),
            ([2**40], f"has no row {2**40}"),
            (np.array([2**63 + 5], np.uint64), f"has no row or key {2**63 + 5}"),
        ],
        ids=str,
    )
    def test_missing_rows(self, checkpoint: Checkpoint, ids: Any, told: str) -> None:
        with pytest.raises(RowNotFoundError, match=told) as caught:
            checkpoint.table("5").take(ids)
        assert caught.value.kind == "row_not_found"

    @pytest.mark.parametrize(
        ("ids", "told"),
        [
            (3, "ids: 0 dimensions"),
            ([[1, 2]], "ids: 2 dimensions"),
            ([1.0], "ids: float64 where integers"),
            ([True] * ROWS, "ids: bool where integers"),
            ("123", "ids: dtype <U3"),
            (None, "ids: dtype object"),
            ([2**64], "ids: dtype object"),
        ],
        ids=str,
    )
    def test_what_are_no_ids(self, checkpoint: Checkpoint, ids: Any, told: str) -> None:
        with pytest.raises(InvalidInputError, match=told):
            checkpoint.table("5").take(ids)


class TestTheTable:
    def test_of_another_checkpoint_is_another(self, checkpoint: Checkpoint) -> None:
        for number, seed, row in ((1, 0, 3), (2, 1, 3), (3, 2, 3), (2, 0, 21), (3, 2, 21)):
            run_view = Checkpoint(checkpoint._history, checkpoint._history.get(number)).table("7")
            assert bits_of(run_view.take([row])["half"]) == bits_of(fields_of(7, seed)["half"][[row]])

    def test_tells_what_it_is(self, view: TableView) -> None:
        assert view.addressing == "dense"
        assert [(f.name, f.dtype) for f in view.fields] == [
            ("weight", "float32"),
            ("half", "bfloat16"),
            ("sum", "float64"),
            ("seen", "bool"),
        ]
        assert view.fields[2].columns is None and view.fields[3].columns == 2
        with pytest.raises(InvalidInputError, match="is dense: its rows are 0 to 22"):
            view.keys()

    def test_arrays_are_the_callers_own(self, view: TableView) -> None:
        first = view.read()
        for values in first.values():
            values[...] = 0
        assert bits_of(view.read()["sum"]) == bits_of(wanted(view)["sum"])

    def test_what_is_told_is_the_callers_own(self, tmp_path: Path) -> None:
        """A copy of the checkpoint is of what was stored, whatever was done to what was shown."""
        run = crf.open_run(tmp_path, "a", durable=False, bits=4)
        table = Table({"weight": np.arange(8, dtype=np.float32).reshape(2, 4)})
        saved = run.save(State(tables={"t": table}, extra={"files": ["a"]}))
        encoder = saved.table("t").fields[0].encoder
        assert encoder is not None
        told = dict(encoder)
        encoder["name"] = "altered"
        saved.extra["files"].append("b")
        saved.load().extra["files"].append("c")
        assert saved.table("t").fields[0].encoder == told
        compacted = run.compact().table("t").fields[0].encoder
        assert compacted is not None
        assert compacted["name"] == told["name"] == "refine"
        assert run.latest().extra == {"files": ["a"]}

    @pytest.mark.parametrize("read", [lambda v: v.read(), lambda v: v.take([]), lambda v: v.read(rows=slice(3, 9))])
    def test_without_rows(self, tmp_path: Path, read: Any) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, bits=2)
        none = np.zeros((0, 3), np.float32)
        run.save(State(tables={"t": Table({"weight": none, "sum": none[:, 0]})}))
        view = run.latest().table("t")
        assert {name: values.shape for name, values in read(view).items()} == {"weight": (0, 3), "sum": (0,)}
        assert (len(view), view.stored_rows) == (0, 0)
        with pytest.raises(RowNotFoundError, match="has no row 0"):
            view.take([0])

    def test_reads_only_the_chunks_that_hold_the_rows(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Rows that no chunk but one holds are read although every other chunk is gone (ZAR-4 names it when needed)."""
        folder = tmp_path_factory.mktemp("cut")
        run = crf.open_run(folder, "a", durable=False, chunk_bytes=40)
        values = np.arange(100, dtype=np.float32).reshape(20, 5)
        run.save(State(tables={"t": Table({"weight": values})}))
        chunks = sorted(folder.rglob("weight.values/c/*/0"), key=lambda path: int(path.parent.name))
        assert len(chunks) == 10
        for chunk in chunks[:4] + chunks[5:]:
            chunk.unlink()
        view = crf.open_run(folder).latest().table("t")
        assert view.read(rows=slice(8, 10))["weight"].tolist() == values[8:10].tolist()
        assert view.take([9, 8, 9])["weight"].tolist() == values[[9, 8, 9]].tolist()
        for damaged in (slice(7, 9), slice(9, 11)):
            with pytest.raises(crf.DamagedError, match=r"weight\.values/c/[35]/0: the object is missing"):
                view.read(rows=damaged)

    @pytest.mark.parametrize("bits", [None, 8])
    def test_what_newer_layers_supply_is_neither_read_nor_decoded(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bits: int | None
    ) -> None:
        """RES-1: each row is decoded once, though all chunks are gone of which no row is wanted."""
        folder, decoded = tmp_path_factory.mktemp("chain"), list[int]()
        columns = 10 if bits is None else 40  # two rows a chunk
        run = crf.open_run(folder, "a", durable=False, chunk_bytes=80, policy="consecutive", bits=bits)
        values = np.arange(20.0 * columns, dtype=np.float32).reshape(20, columns) % 256
        for changed in (None, [0, 1, 2, 3, 9], [2, 3, 4, 5, 9]):
            values[changed or []] = 255 - values[changed or []]
            run.save(State(tables={"t": Table({"weight": values}, changed=changed)}))
        wanted = run.latest().table("t").read()["weight"]
        assert np.abs(wanted - values).max() <= (0 if bits is None else 0.51)
        name = "weight.values" if bits is None else "weight.codes"
        for number, needed in ((1, {3, 4, 5, 6, 7, 8, 9}), (2, {0}), (3, {0, 1, 2})):
            chunks = {int(path.parent.name): path for path in (folder / f"{number:08d}").rglob(f"{name}/c/*/0")}
            assert len(chunks) == {1: 10, 2: 3, 3: 3}[number]
            for index in chunks.keys() - needed:
                chunks[index].unlink()
        decode = Block.decode

        def counted(block: Block, f: Any, field: Any, index: int, moves: Any, out: Any) -> None:
            decoded.append(length(moves.positions))
            decode(block, f, field, index, moves, out)

        monkeypatch.setattr(Block, "decode", counted)
        view = crf.open_run(folder).latest().table("t")
        assert view.read()["weight"].tolist() == wanted.tolist()
        assert sum(decoded) == 20
        assert view.take([9, 0, 2])["weight"].tolist() == wanted[[9, 0, 2]].tolist()
        assert sum(decoded) == 23


class TestLoadInto:
    """`Checkpoint.load(out=)`: existing arrays are filled, the rest is new."""

    @staticmethod
    def targets() -> Iterator[tuple[Any, Any]]:
        yield np.zeros((ROWS, 5), np.float32), np.zeros(4)
        yield torch.zeros(ROWS, 5), torch.zeros(4, dtype=torch.float64)
        yield torch.nn.Parameter(torch.zeros(5, ROWS).T), torch.zeros(8, dtype=torch.float64)[::2]

    def test_fills(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        fields, tensor = fields_of(5), np.arange(4.0)
        made = run.save(State(tables={"a": Table(fields), "b": Table(fields)}, tensors={"x": tensor, "y": tensor}))
        for weight, x in self.targets():
            state = made.load(out=State(tables={"a": Table({"weight": weight})}, tensors={"x": x}))
            assert state.tables["a"]["weight"] is weight and state.tensors["x"] is x
            assert bits_of(weight) == bits_of(fields["weight"]) and bits_of(x) == bits_of(tensor)
            assert list(state.tables["a"].fields) == ["weight"]
            assert bits_of(state.tables["b"]["half"]) == bits_of(fields["half"])
            assert bits_of(state.tensors["y"]) == bits_of(tensor)

    def test_some_tables(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        made = run.save(State(tables={"a": Table(fields_of(5)), "b": Table(fields_of(3))}, tensors={"x": np.ones(2)}))
        assert list(made.load(tables=["b"]).tables) == ["b"]
        assert made.load(tables=[]).tables == {} and made.load(tables=[]).tensors["x"].tolist() == [1, 1]
        with pytest.raises(crf.TableNotFoundError, match="no table 'c'; it has 'a', 'b'"):
            made.load(tables=["b", "c"])

    @pytest.mark.parametrize(
        ("out", "told"),
        [
            (State(tensors={"x": np.zeros(3)}), "out tensor 'x': float64 .3,. where float64 .4,."),
            (State(tensors={"x": np.zeros(4, np.float32)}), "out tensor 'x': float32"),
            (State(tensors={"x": [0.0] * 4}), "out tensor 'x': list is no array"),
            (State(tables={"a": Table({"weight": np.zeros((ROWS, 4), np.float32)})}), r"out\['weight'\] of table 'a'"),
            (State(tables={"a": Table({"w": np.zeros((ROWS, 5), np.float32)})}), "table 'a' has no field 'w'"),
        ],
    )
    def test_refuses_what_does_not_fit(self, tmp_path: Path, out: State, told: str) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        made = run.save(State(tables={"a": Table(fields_of(5))}, tensors={"x": np.arange(4.0)}))
        with pytest.raises(InvalidInputError, match=told):
            made.load(out=out)
        assert made.load().tensors["x"].tolist() == [0, 1, 2, 3]


def test_damage_is_told_with_what_was_read_and_the_ways_out(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path, "a", durable=False, policy="consecutive")
    weight = np.zeros((4, 2), np.float32)
    run.save(crf.State(tables={"user": crf.Table({"weight": weight})}, tensors={"bias": np.ones(3)}))
    run.save(crf.State(tables={"user": crf.Table({"weight": weight}, changed=[1])}, tensors={"bias": np.ones(3)}))
    for chunk in tmp_path.glob("*/*/*/weight.values/c/0/0"):
        chunk.unlink()
    run = crf.open_run(tmp_path, "a")
    view = run.latest().table("user")
    reads: list[tuple[Any, str]] = [
        (view.read, "<table 'user' of checkpoint 2: weight: float32 2>"),
        (lambda: view.take([0]), "<table 'user' of checkpoint 2: weight: float32 2>"),
        (run.load, f"<checkpoint 2, step None, of {tmp_path}>"),
        (run.restore, f"<checkpoint 2, step None, of {tmp_path}>"),
    ]
    for read, what in reads:
        with pytest.raises(crf.DamagedError, match=r"weight\.values/c/0/0: the object is missing") as caught:
            read()
        (note,) = caught.value.__notes__
        assert note.startswith(f"met in reading {what}; Run.verify() names all that is damaged, ")
        assert note.endswith("Run.restore(fallback=True) takes the newest checkpoint that is sound")
    (manifest,) = tmp_path.glob("00000002/*/manifest.json")
    manifest.unlink()
    with pytest.raises(crf.DamagedError, match=r"manifest\.json") as caught:
        crf.open_run(tmp_path).latest()
    assert "fallback=True" in caught.value.__notes__[0]
