"""Import and export: what becomes of tensors, which rows are found to have changed, and that nothing gets lost."""

from __future__ import annotations

import importlib
import shutil
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkrun_format as crf
from checkrun_format.errors import CheckrunError, DamagedError, InvalidInputError, NotARunError, NotFoundError
from checkrun_format.interchange import KINDS, RAW, Imported, export_checkpoint, export_fused, import_file
from checkrun_format.interchange.contents import Array
from checkrun_format.quantize.minmax import minmax

SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt", "npz": ".npz"}


class Series:
    """A series of full files, imported into one run one after another."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.url = folder / "run"
        self.options = options

    def add(self, arrays: Mapping[str, Array], **options: Any) -> Imported:
        file = self.folder / "model.safetensors"
        save_file(dict(arrays), file)
        return import_file(file, self.url, durable=False, **self.options | options)

    def changed(self, since: int) -> dict[str, list[int]]:
        """The rows told as changed, which must be all that differ."""
        run = crf.open_run(self.url)
        found: dict[str, list[int]] = {}
        for change in run.latest().changes_since(since):
            found.setdefault(change.table, []).extend(change.rows.tolist())
        for name in set(run[since].tables) & set(run.latest().tables):
            before, after = (checkpoint.table(name).read()["weight"] for checkpoint in (run[since], run.latest()))
            if before.shape[1:] == after.shape[1:]:
                common = min(len(before), len(after))
                differ = np.flatnonzero((before[:common] != after[:common]).any(axis=1)).tolist()
                assert set(differ) <= set(found.get(name, []))
        return found


@pytest.fixture
def series(tmp_path: Path) -> Series:
    return Series(tmp_path, tables=["emb*"])


def random(rows: int, columns: int = 8, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(dtype)


def weight(checkpoint: crf.Checkpoint, table: str) -> Array:
    values: Array = checkpoint.table(table).read()["weight"]
    return values


class TestWhatBecomesOfTensors:
    def test_many_rows_make_a_table(self, tmp_path: Path) -> None:
        arrays = {
            "emb": random(10_001, 2),
            "small": random(10_000, 2),
            "bias": np.zeros(20_000, np.float32),
            "conv": np.zeros((10_001, 1, 1), np.float32),
            "empty": np.zeros((10_001, 0), np.float32),
        }
        done = Series(tmp_path).add(arrays)
        assert done.checkpoint.tables == ["emb"]
        assert sorted(done.checkpoint.tensors) == ["bias", "conv", "empty", "small"]
        assert done.tensors == 4
        for name in done.checkpoint.tensors:
            assert done.checkpoint.tensor(name).tobytes() == arrays[name].tobytes()
            assert done.checkpoint.tensor(name).shape == arrays[name].shape

    def test_patterns_and_what_is_a_table_already(self, tmp_path: Path) -> None:
        series = Series(tmp_path)
        arrays = {name: random(5) for name in ("a.x", "a.y", "b[0]", "c")} | {"a.bias": np.ones(5, np.float32)}
        first = series.add(arrays, tables=["a.*", "b[0]"])
        assert sorted(first.checkpoint.tables) == ["a.x", "a.y", "b[0]"]
        second = series.add(arrays | {"c": random(5) + 1}, tables=["c"])
        assert sorted(second.checkpoint.tables) == ["a.x", "a.y", "b[0]", "c"]
        assert sorted(second.checkpoint.tensors) == ["a.bias"]
        assert {t.name: t.changed for t in second.tables} == {"a.x": 0, "a.y": 0, "b[0]": 0, "c": 5}

    def test_bits(self, tmp_path: Path) -> None:
        arrays = {"emb": random(50), "ids": np.arange(100).reshape(50, 2)}
        done = Series(tmp_path, tables=["*"]).add(arrays, bits=np.int64(4))
        assert {t.name: t.bits for t in done.tables} == {"emb": 4, "ids": None}
        assert weight(done.checkpoint, "ids").tolist() == arrays["ids"].tolist()
        assert 0 < np.abs(weight(done.checkpoint, "emb") - arrays["emb"]).max() < 0.3

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"tables": ["nothing*"]}, "--table 'nothing*' matches no tensor; tensors (rows, columns) are "),
         ({"tables": ["bias"]}, "--table 'bias': tensor 'bias' has shape (5,)"),
         ({"tables": ["emb", "bias"]}, "--table 'bias': tensor 'bias'"),
         ({"bits": 4}, "4 bits: no table (rows, columns) of floating-point numbers; tables are: none"),
         ({"bits": 4, "tables": ["ids"]}, "tables are: 'ids' (int64)"),
         ({"bits": 9}, "bits 9; 1 to 8"),
         ({"bits": True}, "bits True; 1 to 8"),
         ({"step": -1}, "step -1"),
         ({"kind": "hdf5"}, "unknown kind of file 'hdf5'")],
    )  # fmt: skip
    def test_refused_before_there_is_a_run(self, options: Any, message: str, tmp_path: Path) -> None:
        series = Series(tmp_path)
        arrays = {"emb": random(5), "ids": np.zeros((5, 2), np.int64), "bias": np.ones(5, np.float32)}
        with pytest.raises(InvalidInputError) as raised:
            series.add(arrays, **options)
        assert message in str(raised.value)
        assert not series.url.exists()

    def test_what_the_format_lacks(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", fine=np.ones(2), text=np.array(["a", "b"]))
        with pytest.raises(InvalidInputError, match=r"a\.npz: tensor 'text': dtype <U1 cannot be stored"):
            import_file(tmp_path / "a.npz", tmp_path / "run")
        import torch

        torch.save({"bad\ud800name": torch.ones(2)}, tmp_path / "a.pt")
        with pytest.raises(InvalidInputError, match=r"a\.pt: tensor name .* cannot be written as UTF-8"):
            import_file(tmp_path / "a.pt", tmp_path / "run")
        torch.save({"seen": {1, 2}, "a": torch.ones(2)}, tmp_path / "a.pt")
        with pytest.raises(InvalidInputError, match=r"a\.pt: extra\['seen'\] is of type set, which JSON cannot carry"):
            import_file(tmp_path / "a.pt", tmp_path / "run")
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("tables", "committed", "message"),
        [(["emb.a", "emb.b"], 0, "it again when it is complete"), (["emb.a"], 1, "checkpoint 1 may hold a mixture")],
    )
    def test_a_file_that_is_written_to_meanwhile(
        self, tables: list[str], committed: int, message: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "model.safetensors"
        save_file({name: random(50) for name in tables}, file)

        def write(_: int) -> None:
            with file.open("ab") as out:
                out.write(b"x")

        with pytest.raises(InvalidInputError, match=f"model.safetensors was written to while it was read.*{message}"):
            import_file(file, tmp_path / "run", tables=tables, advance=write)
        assert len(list(crf.open_run(tmp_path / "run").log())) == committed

    def test_a_file_that_is_replaced_meanwhile(self, tmp_path: Path) -> None:
        file, arrays = tmp_path / "model.safetensors", {"emb.a": random(50), "emb.b": random(50, seed=1)}
        save_file(arrays, file)
        save_file({name: array + 1 for name, array in arrays.items()}, tmp_path / "next.safetensors")

        def replaced(_: int) -> None:
            (tmp_path / "next.safetensors").rename(file) if (tmp_path / "next.safetensors").exists() else None

        done = import_file(file, tmp_path / "run", tables=["*"], advance=replaced)
        assert not (tmp_path / "next.safetensors").exists()
        for name, array in arrays.items():
            assert weight(done.checkpoint, name).tobytes() == array.tobytes()

    def test_a_run_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "thesis.txt").write_text("mine")
        (tmp_path / "run" / "more").mkdir()
        with pytest.raises(NotARunError):
            Series(tmp_path).add({"a": np.ones(2, np.float32)})
        with pytest.raises(NotFoundError, match="no such file"):
            import_file(tmp_path / "nothing.npz", tmp_path / "run")


class TestWhatChanged:
    @pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8, RAW])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
    def test_exactly_the_rows_that_changed(self, bits: Any, dtype: Any, series: Series) -> None:
        values = random(300, 5, dtype)
        first = series.add({"emb": values}, bits=bits)
        assert first.checkpoint.parent is None
        values[[3, 7, 299]] *= dtype(-3)
        second = series.add({"emb": values})
        assert (second.checkpoint.parent, second.tables[0].changed) == (1, 3)
        assert series.changed(1) == {"emb": [3, 7, 299]}
        values[[7, 8]] *= dtype(-3)
        third = series.add({"emb": values})
        assert third.checkpoint.table("emb").stored_rows == 4  # over the base, as the policy says
        assert series.changed(2) == {"emb": [7, 8]}
        assert crf.open_run(series.url).verify() == []

    def test_nothing_changed(self, series: Series) -> None:
        arrays = {"emb": random(50), "dense": np.ones(3, np.float32)}
        series.add(arrays, bits=4, step=5)
        for options in ({}, {"step": 5}, {"bits": 4}):
            done = series.add(arrays, **options)
            assert (done.committed, done.checkpoint.sequence, done.tables[0].changed) == (False, 1, 0)
        moved = series.add(arrays, step=6)
        assert (moved.committed, moved.checkpoint.step, moved.checkpoint.table("emb").storage) == (True, 6, "unchanged")
        trained = series.add(arrays | {"dense": np.array([1, 1, -0.0], np.float32)})
        assert trained.committed
        assert trained.checkpoint.tensor("dense").tobytes() == np.array([1, 1, -0.0], np.float32).tobytes()
        assert series.changed(1) == {}

    def test_raw_rows_are_compared_bit_by_bit(self, series: Series) -> None:
        bits = np.zeros((6, 2), np.uint32)
        bits[1] = 0x7FC00001
        values = bits.view(np.float32)
        series.add({"emb": values})
        assert not series.add({"emb": values}).committed
        bits[1, 0] = 0x7FC00002  # another NaN
        bits[4, 1] = 0x80000000  # -0.0
        done = series.add({"emb": values})
        assert done.tables[0].changed == 2
        (change,) = done.checkpoint.changes_since(1)
        assert change.rows.tolist() == [1, 4]
        assert change.fields["weight"].tobytes() == values[[1, 4]].tobytes()

    def test_exact_rows(self, series: Series) -> None:
        values = random(60)
        values[5, 0], values[6], values[7] = np.nan, -0.0, 1e30
        series.add({"emb": values}, bits=4)
        assert not series.add({"emb": values}).committed
        values[5, 1] += 1  # exact before and after
        values[6] = 1  # no longer exact
        values[20, 3] = np.inf  # exact now
        done = series.add({"emb": values})
        (change,) = done.checkpoint.changes_since(1)
        assert change.rows.tolist() == [5, 6, 20]
        np.testing.assert_array_equal(weight(done.checkpoint, "emb")[[5, 7, 20]], values[[5, 7, 20]])

    def test_a_table_that_grew_and_shrank(self, series: Series) -> None:
        values = random(100)
        series.add({"emb": values}, bits=8)
        grown = np.concatenate([values, random(20, seed=1)])
        grown[4] += 1
        done = series.add({"emb": grown})
        assert (done.tables[0].rows, done.tables[0].changed) == (120, 21)
        assert done.checkpoint.table("emb").storage == "changed"
        assert series.changed(1) == {"emb": [4, *range(100, 120)]}
        shrunk = grown[:90].copy()
        shrunk[80] += 1
        done = series.add({"emb": shrunk})
        assert (done.tables[0].rows, done.tables[0].changed) == (90, 1)
        assert done.checkpoint.table("emb").storage == "full"
        assert series.changed(2) == {"emb": [80]}
        assert not series.add({"emb": shrunk}).committed
        cut = series.add({"emb": shrunk[:80]})
        assert (cut.committed, cut.tables[0].changed, len(cut.checkpoint.table("emb"))) == (True, 0, 80)

    def test_tables_that_appear_vanish_and_become_others(self, series: Series) -> None:
        series.add({"emb": random(30), "emb2": random(30)}, bits=4)
        done = series.add({"emb": random(30), "emb3": random(30)})
        assert (done.dropped, sorted(done.checkpoint.tables)) == (["emb2"], ["emb", "emb3"])
        assert {t.name: (t.changed, t.bits) for t in done.tables} == {"emb": (0, 4), "emb3": (30, None)}
        wider = series.add({"emb": random(30, 9), "emb3": random(30, dtype=np.float64)})
        assert {t.name: (t.changed, t.replaced) for t in wider.tables} == {"emb": (30, True), "emb3": (30, True)}
        assert {t.name: t.bits for t in wider.tables} == {"emb": 4, "emb3": None}  # as before, whatever they became
        half = series.add({"emb": random(30, 9, dtype=np.float16), "emb3": random(30, dtype=np.float64)})
        assert {t.name: t.bits for t in half.tables} == {"emb": 4, "emb3": None}
        whole = series.add({"emb": np.ones((30, 9), np.int32), "emb3": random(30, dtype=np.float64)})
        assert {t.name: t.bits for t in whole.tables} == {"emb": None, "emb3": None}
        assert weight(wider.checkpoint, "emb3").tobytes() == random(30, dtype=np.float64).tobytes()
        flat = series.add({"emb": np.ones(30, np.float32), "emb3": random(30)})
        assert (flat.dropped, flat.checkpoint.tables, flat.checkpoint.tensors) == (["emb"], ["emb3"], ["emb"])
        assert crf.open_run(series.url).verify() == []

    def test_other_bits_store_the_table_anew(self, series: Series) -> None:
        values = random(40)
        series.add({"emb": values}, bits=4)
        eight = series.add({"emb": values}, bits=8)
        assert (eight.committed, eight.tables[0].changed, eight.tables[0].bits) == (True, 40, 8)
        raw = series.add({"emb": values}, bits=RAW)
        assert (raw.tables[0].changed, raw.tables[0].bits) == (40, None)
        assert weight(raw.checkpoint, "emb").tobytes() == values.tobytes()
        assert series.add({"emb": values}).committed is False

    def test_an_import_is_no_restore(self, series: Series) -> None:
        values = random(40)
        for number in range(4):
            values[number] += 1
            assert series.add({"emb": values}, bits=4).checkpoint.commit.restores == 0
        run = crf.open_run(series.url, mode="a", durable=False)
        run.restore()
        run.save(crf.State(tables={"emb": crf.Table({"weight": values}, changed=[1])}))
        values[9] += 1
        assert series.add({"emb": values}).checkpoint.commit.restores == 1

    def test_a_trainers_run_with_mixed_encodings(self, series: Series) -> None:
        """Rows that are stored anew in other bits than before are told as changed (LAY-7)."""
        values = random(40)
        four = crf.open_run(series.url, mode="a", bits=4, durable=False)
        four.save(crf.State(tables={"emb": crf.Table({"weight": values})}))
        raw = crf.open_run(series.url, mode="a", policy="consecutive", durable=False)
        raw.continue_from(1)
        raw.save(crf.State(tables={"emb": crf.Table({"weight": values}, changed=[3])}))
        values[5] += 1
        done = series.add({"emb": values})
        assert (done.tables[0].changed, done.tables[0].bits) == (1, None)
        assert set(series.changed(2)["emb"]) >= {3, 5}
        whole = crf.open_run(series.url, mode="a", policy="full", durable=False)
        whole.continue_from(3)
        whole.save(crf.State(tables={"emb": crf.Table({"weight": values}, changed=[])}))
        assert series.changed(3) == {"emb": list(range(40))}

    def test_values_that_were_read_back_may_encode_to_other_bits(
        self, series: Series, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They have not changed; but when they are stored again, they are told as changed (LAY-7)."""

        def wide(values: Any, low: Any, high: Any, *how: Any) -> Any:  # the first code and the last are not used
            return minmax(values, low - 1, high + 1, *how)

        with monkeypatch.context() as patched:
            patched.setitem(crf.quantize.ENCODERS, "minmax", wide)
            first = series.add({"emb": random(400)}, bits=4)
        values = weight(first.checkpoint, "emb")
        assert not series.add({"emb": values}).committed
        values[20:] += 1  # so many that the policy takes a base next
        assert series.add({"emb": values}).tables[0].changed == 380
        values[399] += 1
        done = series.add({"emb": values})
        assert (done.checkpoint.parent, done.tables[0].changed) == (None, 1)
        assert len(series.changed(2)["emb"]) == 400

    def test_an_encoder_that_is_unknown_here(self, series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
        values = random(40)
        series.add({"emb": values}, bits=4)
        monkeypatch.setattr(importlib.import_module("checkrun_format.quantize.encode"), "VERSION", 2)
        assert series.add({"emb": values}).tables[0].changed == 40

    def test_narrowed_fields_go_on(self, series: Series) -> None:
        values = random(40)
        values[3, 0] = 1e30
        run = crf.open_run(series.url, mode="a", durable=False)
        run.save(crf.State(tables={"emb": crf.Table({"weight": values}, store_as={"weight": "bfloat16"})}))
        assert not series.add({"emb": values}).committed
        values[8] *= 2
        done = series.add({"emb": values})
        assert done.tables[0].changed == 1
        assert weight(done.checkpoint, "emb")[8].tolist() == values[8].astype(ml_dtypes.bfloat16).tolist()

    def test_a_burnt_number_is_told_once(self, series: Series) -> None:
        series.add({"emb": random(4)})
        (series.url / "00000002").mkdir()
        (series.url / "00000002" / "zarr.json").touch()
        with pytest.warns(crf.BurntNumberWarning) as warned:
            done = series.add({"emb": random(4) + 1})
        assert (done.checkpoint.sequence, done.checkpoint.parent, len(warned)) == (3, 1, 1)

    def test_a_damaged_run_is_not_continued(self, series: Series) -> None:
        values = random(40)
        series.add({"emb": values}, bits=4)
        (codes,) = series.url.glob("00000001/*/block-0-0/weight.codes/c/0/0")
        codes.write_bytes(codes.read_bytes()[:-1] + b"?")
        with pytest.raises(DamagedError, match=r"weight\.codes"):
            series.add({"emb": values})
        shutil.rmtree(series.url)


class TestContinueFrom:
    def test_another_than_the_latest_gives_a_base(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "run", mode="a", durable=False)
        values = random(10)
        for _ in range(2):
            run.save(crf.State(tables={"t": crf.Table({"weight": values}, changed=[1])}))
        run.continue_from(run[1])
        assert run.save(crf.State(tables={"t": crf.Table({"weight": values}, changed=[])})).parent is None

    def test_it_is_for_writers_and_reads_no_rows(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "run", mode="a", durable=False)
        values = random(10)
        run.save(crf.State(tables={"t": crf.Table({"weight": values})}))
        for chunk in (tmp_path / "run").glob("00000001/*/block-0-0/*/c/**/0"):
            if chunk.is_file():
                chunk.unlink()
        other = crf.open_run(tmp_path / "run", mode="a", durable=False)
        other.continue_from(1)
        state = crf.State(tables={"t": crf.Table({"weight": values}, changed=[2])})
        assert other.save(state, parent="latest").parent == 1
        with pytest.raises(InvalidInputError, match="open for reading"):
            crf.open_run(tmp_path / "run").continue_from(1)
        shutil.rmtree(tmp_path / "run")


def everything(folder: Path) -> crf.Checkpoint:
    """A checkpoint with tables of every shape, blobs and extra."""
    rng = np.random.default_rng(3)
    run = crf.open_run(folder, mode="a", bits={"user": 4}, durable=False)
    keys = np.array([2**63 + 5, 7, 2**64 - 1, 0], np.uint64)
    tables = {
        "user": crf.Table({"weight": random(30), "sum": np.arange(30.0)}),
        "one": crf.Table({"vector": random(7, 3, ml_dtypes.bfloat16)}),
        "flat": crf.Table({"count": rng.integers(0, 9, 5)}),
        "hashed": crf.Table({"weight": random(4, 2), "n": np.arange(4)}, keys=keys),
        "signed": crf.Table({"weight": random(3, 2)}, keys=np.array([-5, 2, 9])),
    }
    state = crf.State(
        tables=tables,
        tensors={"user.bias": random(11_000, 2), "half": np.ones(3, np.float16), "scalar": np.array([[True]])[0, 0]},
        extra={"batch": 5, "nested": [1, {"a": None}]},
        blobs={"rng": b"\0\1\2", "nothing": b""},
    )
    return run.save(state, step=77)


def assert_same(one: crf.Checkpoint, other: crf.Checkpoint) -> None:
    assert (one.step, one.extra) == (other.step, other.extra)
    assert sorted(one.tables) == sorted(other.tables)
    for name in one.tables:
        ours, theirs = one.table(name), other.table(name)
        assert (ours.addressing, len(ours)) == (theirs.addressing, len(theirs))
        if ours.addressing == "keyed":
            assert ours.keys().dtype == theirs.keys().dtype
            assert ours.keys().tolist() == theirs.keys().tolist()
        values = ours.read(), theirs.read()
        assert values[0].keys() == values[1].keys()
        for field, array in values[0].items():
            assert array.dtype == values[1][field].dtype
            assert array.tobytes() == values[1][field].tobytes()
    assert one.tensor_shapes == other.tensor_shapes
    assert all(one.tensor(name).tobytes() == other.tensor(name).tobytes() for name in one.tensors)
    assert {name: one.blob(name) for name in one.blobs} == {name: other.blob(name) for name in other.blobs}


class TestExport:
    @pytest.mark.parametrize("kind", KINDS)
    def test_importing_an_export_gives_the_same(self, kind: str, tmp_path: Path) -> None:
        checkpoint = everything(tmp_path / "run")
        file = tmp_path / f"x{SUFFIXES[kind]}"
        done = export_checkpoint(checkpoint, file)
        assert (done.tables, done.tensors, done.blobs, done.file_bytes) == (5, 3, 2, file.stat().st_size)
        again = import_file(file, tmp_path / "copy", durable=False)
        assert_same(checkpoint, again.checkpoint)
        same = import_file(file, tmp_path / "run", durable=False)
        assert (same.committed, same.checkpoint.sequence) == (False, 1)
        assert import_file(file, tmp_path / "copy", durable=False).committed is False

    def test_keys_that_come_and_go(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "a", mode="a", durable=False)
        values = random(4, 2)
        run.save(crf.State(tables={"t": crf.Table({"weight": values}, keys=np.array([1, 5, -7, 9]))}))
        export_checkpoint(run.latest(), tmp_path / "x.npz")
        import_file(tmp_path / "x.npz", tmp_path / "b", durable=False)
        values[1] += 1
        run.save(crf.State(tables={"t": crf.Table({"weight": values}, keys=np.array([1, 5, -8, 9]), changed=[5])}))
        export_checkpoint(run.latest(), tmp_path / "x.npz", overwrite=True)
        done = import_file(tmp_path / "x.npz", tmp_path / "b", durable=False)
        assert done.tables[0].changed == 2
        (change,) = done.checkpoint.changes_since(1)
        assert (change.rows.tolist(), change.deleted.tolist()) == ([-8, 5], [-7])
        assert_same(run.latest(), done.checkpoint)

    def test_names_in_the_file(self, tmp_path: Path) -> None:
        export_checkpoint(everything(tmp_path / "run"), tmp_path / "x.npz")
        with np.load(tmp_path / "x.npz") as file:
            assert sorted(file) == [
                "__checkrun__", "blobs.nothing", "blobs.rng", "flat", "half", "hashed.keys", "hashed.n",
                "hashed.weight", "one", "scalar", "signed", "signed.keys", "user.bias", "user.sum", "user.weight",
            ]  # fmt: skip

    def test_what_the_file_says_is_a_table_or_not(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "a", mode="a", durable=False)
        tensors = {"x": random(3), "y": random(3)}
        checkpoint = run.save(crf.State(tables={"t": crf.Table({"weight": random(4)})}, tensors=tensors))
        export_checkpoint(checkpoint, tmp_path / "x.npz")
        save_file(tensors, tmp_path / "x.safetensors")
        import_file(tmp_path / "x.safetensors", tmp_path / "b", tables=["x"], durable=False)
        done = import_file(tmp_path / "x.npz", tmp_path / "b", tables=["t", "y"], durable=False)
        assert (sorted(done.checkpoint.tables), done.checkpoint.tensors, done.dropped) == (["t", "y"], ["x"], ["x"])
        done = import_file(tmp_path / "x.npz", tmp_path / "b", durable=False)
        assert (done.checkpoint.tables, sorted(done.checkpoint.tensors)) == (["t"], ["x", "y"])

    def test_two_of_one_name(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "run", mode="a", durable=False)
        tables = {"a": crf.Table({"x": np.ones(2), "y": np.ones(2)}), "a.x": crf.Table({"x": np.ones(2)})}
        checkpoint = run.save(crf.State(tables=tables))
        with pytest.raises(InvalidInputError, match=r"would be called 'a\.x' in a file"):
            export_checkpoint(checkpoint, tmp_path / "x.npz")

    def test_an_increment_is_resolved(self, series: Series) -> None:
        values = random(100)
        series.add({"emb": values}, bits=4)
        values[50:60] += 1
        done = series.add({"emb": values})
        export_checkpoint(done.checkpoint, series.folder / "x.npz")
        with np.load(series.folder / "x.npz") as file:
            assert file["emb"].tobytes() == weight(done.checkpoint, "emb").tobytes()

    @pytest.mark.parametrize(
        ("label", "message"),
        [("{", "what `checkrun export` wrote about its tensors is damaged"),
         ('{"tables": 5}', "is damaged"),
         ('{"tables": {"t": {"fields": {}}}}', "table 't': no fields"),
         ('{"tables": {"t": {"fields": {"w": "gone"}}}}', "table 't', field 'w': tensor 'gone' is not in the file"),
         ('{"tables": {"t": {"fields": {"w": "a", "v": "b"}}}}', "its fields have different numbers of rows"),
         ('{"tables": {"t": {"fields": {"w": "c"}}}}', "table 't', field 'w': shape ()"),
         ('{"tables": {"t": {"fields": {"w": "a"}, "keys": "b"}}}', "table 't', keys: 2 dimensions"),
         ('{"blobs": {"t": "gone"}}', "blob 't': tensor 'gone'"),
         ('{"tables": {"t": {"fields": {"W": "a"}}}}', "field name 'W'"),
         ('{"step": -4}', "x.safetensors: step -4"),
         ('{"fbgemm": {"t": {}}}', "it was exported for FBGEMM")],
    )  # fmt: skip
    def test_a_label_that_is_wrong(self, label: str, message: str, tmp_path: Path) -> None:
        arrays = {"a": np.ones((2, 2)), "b": np.ones((3, 2)), "c": np.array(1.0)}
        save_file(arrays, tmp_path / "x.safetensors", {"checkrun": label})
        with pytest.raises(CheckrunError) as raised:
            import_file(tmp_path / "x.safetensors", tmp_path / "run")
        assert message in str(raised.value)
        assert str(tmp_path / "x.safetensors") in str(raised.value)
        assert not (tmp_path / "run").exists()


ROWS, COLUMNS = 1_000_000, 64


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "big.safetensors"
    save_file({"emb": np.arange(ROWS, dtype=np.float32)[:, None] + np.arange(COLUMNS, dtype=np.float32)}, path)
    assert path.stat().st_size > 256_000_000
    return path


@pytest.mark.parametrize("bits", [4, RAW])
def test_what_is_held_at_a_time_is_far_below_a_tables_size(bits: Any, big: Path) -> None:
    folder = big.parent / str(bits)
    peaks = {}
    crf.quantize.decode(crf.quantize.encode(np.zeros((2000, COLUMNS), np.float32), 4))  # loads what is compiled
    tracemalloc.start()
    try:
        for number, (run, committed) in enumerate((("run", True), ("run", False))):
            tracemalloc.reset_peak()
            done = import_file(big, folder / run, bits=bits, durable=False)
            assert done.committed is committed
            peaks[f"import {number}"] = tracemalloc.get_traced_memory()[1]
        for kind in ("safetensors", "npz"):
            tracemalloc.reset_peak()
            export_checkpoint(done.checkpoint, folder / "out", kind=kind, overwrite=True)
            peaks[kind] = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        export_fused(done.checkpoint, folder / "out.npz", bits=4)
        peaks["fused"] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        shutil.rmtree(folder)
    assert {name: peak for name, peak in peaks.items() if peak > 100 << 20} == {}
