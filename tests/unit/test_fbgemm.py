"""Rows for FBGEMM: PyTorch's own operators unpack what was stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import checkrun_format as crf
from checkrun_format.errors import InvalidInputError
from checkrun_format.interchange import Fused, export_fused, import_file
from checkrun_format.interchange.contents import Array

UNPACK = {
    2: torch.ops.quantized.embedding_bag_2bit_unpack,
    4: torch.ops.quantized.embedding_bag_4bit_unpack,
    8: torch.ops.quantized.embedding_bag_byte_unpack,
}


def unpacked(rows: Array, bits: int) -> Array:
    values: Array = UNPACK[bits](torch.from_numpy(rows)).numpy()
    return values


def random(rows: int = 200, columns: int = 16, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


class Model:
    """One table `emb` in a run."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.run = crf.open_run(folder / "run", mode="a", durable=False, policy="consecutive", **options)

    def save(self, values: Array, changed: Any = None, **options: Any) -> crf.Checkpoint:
        table = crf.Table({"weight": values}, changed=changed, **options)
        return self.run.save(crf.State(tables={"emb": table}, tensors={"bias": np.ones(3, np.float32)}))

    def export(self, **options: Any) -> tuple[Fused, Mapping[str, Array]]:
        done = export_fused(self.run.latest(), self.folder / "x.safetensors", overwrite=True, **options)
        return done, load_file(self.folder / "x.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def decoded(checkpoint: crf.Checkpoint) -> Array:
    values: Array = checkpoint.table("emb").read()["weight"]
    return values


@pytest.mark.parametrize(("stored", "wanted"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 8), (6, 8), (7, 8), (8, 8)])
def test_codes_are_copied_and_unpack_to_the_same_bits(stored: int, wanted: int, model: Model) -> None:
    values = random()
    model.save(values, bits=stored)
    values[[3, 70]] += 1
    checkpoint = model.save(values, bits=stored, changed=[3, 70])
    assert checkpoint.parent == 1
    done, file = model.export()
    fusion = done.tables["emb"]
    assert (fusion.bits, fusion.copied, fusion.encoded) == (wanted, 200, 0)
    assert (len(fusion.exact), len(fusion.recoded), len(fusion.lost)) == (0, 0, 0)
    assert file["emb"].shape == (200, 16 * wanted // 8 + (8 if wanted == 8 else 4))
    assert file["bias"].tolist() == [1, 1, 1]
    assert unpacked(file["emb"], wanted).tobytes() == decoded(checkpoint).tobytes()


def test_the_bytes_of_a_row(model: Model) -> None:
    """Even elements in the low half of a byte, then scale and bias."""
    values = np.arange(16, dtype=np.float32)[None] * 2 - 1
    model.save(values, bits=4)
    _, file = model.export()
    assert file["emb"].tobytes().hex() == "1032547698badcfe" + "0040" + "00bc"
    _, file = model.export(bits=8)
    assert file["emb"].tobytes().hex() == bytes(range(16)).hex() + "00000040" + "000080bf"


def test_widths_that_differ_from_layer_to_layer(model: Model) -> None:
    values = random()
    model.save(values, bits=2)
    values[5:9] += 1
    checkpoint = model.save(values, bits=3, changed=np.arange(5, 9))
    done, file = model.export()
    assert (done.tables["emb"].bits, done.tables["emb"].copied) == (4, 200)
    assert unpacked(file["emb"], 4).tobytes() == decoded(checkpoint).tobytes()
    done, file = model.export(bits=2)
    assert (done.tables["emb"].copied, list(done.tables["emb"].recoded)) == (196, [5, 6, 7, 8])
    others = np.delete(np.arange(200), [5, 6, 7, 8])
    assert unpacked(file["emb"], 2)[others].tobytes() == decoded(checkpoint)[others].tobytes()
    step = np.ptp(decoded(checkpoint), axis=1, keepdims=True) / 3
    assert (np.abs(unpacked(file["emb"], 2) - decoded(checkpoint)) <= 0.51 * step + 1e-3).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_exact_rows_are_reported_and_encoded(bits: int, model: Model) -> None:
    values = random(600)
    values[7] = 60_017 + np.arange(16)  # an offset that swamps the spread
    values[9, 3] = np.nan
    values[11] = -0.0
    values[12, 0] = 1e30
    checkpoint = model.save(values, bits=bits)
    done, file = model.export()
    fusion = done.tables["emb"]
    assert (fusion.copied, list(fusion.exact), list(fusion.recoded)) == (596, [7, 9, 11, 12], [])
    assert list(fusion.lost) == ([9, 12] if bits == 4 else [9])
    found = unpacked(file["emb"], bits)
    assert np.isnan(found[list(fusion.lost)]).all()
    kept = np.delete(np.arange(600), [7, 9, 11, 12])
    assert found[kept].tobytes() == decoded(checkpoint)[kept].tobytes()
    assert np.abs(found[7] - values[7]).max() <= (32 if bits == 4 else 0.1)
    assert (found[11] == 0).all()


def test_qparams_that_float16_lacks(model: Model) -> None:
    """At 4 bits float32 qparams cannot be expressed: those rows are encoded anew, and wider ones hold them."""
    values = random() * np.float32(1e6)
    checkpoint = model.save(values, bits=4)
    encoder = checkpoint.table("emb").fields[0].encoder
    assert encoder is not None
    assert encoder["qparams"] == "float32"
    done, file = model.export(bits=8)
    assert done.tables["emb"].copied == 200
    assert unpacked(file["emb"], 8).tobytes() == decoded(checkpoint).tobytes()
    done, _ = model.export()
    fusion = done.tables["emb"]
    assert (fusion.bits, fusion.copied, len(fusion.recoded)) == (4, 0, 200)
    assert fusion.lost == fusion.recoded  # 1e6 is beyond float16


def test_float32_scales_of_sixteen_bits_survive_the_fused_multiply_add(model: Model) -> None:
    values = random(5000) * np.float32(1e5)
    checkpoint = model.save(values, bits=8)
    done, file = model.export()
    assert done.tables["emb"].copied == 5000
    assert unpacked(file["emb"], 8).tobytes() == decoded(checkpoint).tobytes()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_raw_tables_need_a_width(bits: int, model: Model) -> None:
    values = random()
    model.save(values)
    with pytest.raises(InvalidInputError, match="no table is quantized: --bits"):
        model.export()
    done, file = model.export(bits=bits)
    fusion = done.tables["emb"]
    assert (fusion.copied, fusion.encoded, len(fusion.exact), len(fusion.recoded)) == (0, 200, 0, 0)
    step = np.ptp(values, axis=1, keepdims=True) / (2**bits - 1)
    assert (np.abs(unpacked(file["emb"], bits) - values) <= 0.51 * step + 1e-3).all()
    with pytest.raises(InvalidInputError, match="the fused layout has 2, 4 or 8"):
        model.export(bits=3)


def test_tables_of_other_shapes(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a", bits=4, durable=False)
    keys = np.array([9, -4, 7])
    values = random(3, 4)
    tables = {
        "user": crf.Table({"weight": random(6, 8), "sum": np.arange(6.0)}),
        "keyed": crf.Table({"weight": values}, keys=keys),
        "counts": crf.Table({"n": np.arange(5)}),
    }
    checkpoint = run.save(crf.State(tables=tables))
    done = export_fused(checkpoint, tmp_path / "x.npz")
    assert (list(done.tables), done.plain, done.left_out) == (["user", "keyed"], ["counts"], ["user.sum"])
    with np.load(tmp_path / "x.npz") as file:
        assert sorted(file) == ["__checkrun__", "counts", "keyed", "keyed.keys", "user"]
        assert file["keyed.keys"].tolist() == [-4, 7, 9]
        assert unpacked(file["keyed"], 4).tobytes() == checkpoint.table("keyed").read()["weight"].tobytes()
        assert file["counts"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidInputError, match="it was exported for FBGEMM"):
        import_file(tmp_path / "x.npz", tmp_path / "other")
    strange = crf.Table({"a": random(3, 2), "b": random(3, 2)}, bits={"a": 4})
    checkpoint = run.save(crf.State(tables={"t": strange}), dropped=list(tables))
    with pytest.raises(InvalidInputError, match="table 't' has several fields, none of which is 'weight'"):
        export_fused(checkpoint, tmp_path / "y.npz")


def test_unsigned_keys_that_are_exact(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a", bits=8, durable=False)
    values = random(300)
    values[5] = np.inf
    keys = np.arange(300, dtype=np.uint64) + np.uint64(2**63)
    checkpoint = run.save(crf.State(tables={"t": crf.Table({"weight": values}, keys=keys)}))
    fusion = export_fused(checkpoint, tmp_path / "x.npz").tables["t"]
    assert (list(fusion.exact), list(fusion.lost), fusion.copied) == ([2**63 + 5], [2**63 + 5], 299)


def test_column_parts(tmp_path: Path) -> None:
    """Codes of half a row are no codes of the row: such rows are encoded anew."""
    run = crf.open_run(tmp_path / "run", mode="a", bits=8, durable=False)
    values = random(20, 8)
    with run.begin(writers=1) as save:
        writer = save.writer(0)
        writer.put("emb", {"weight": values[:, :4]}, rows=(0, 20), of=20, columns=(0, 4))
        writer.put("emb", {"weight": values[:, 4:]}, rows=(0, 20), of=20, columns=(4, 8))
        checkpoint = save.commit([writer.finish()])
    done = export_fused(checkpoint, tmp_path / "x.npz")
    assert (done.tables["emb"].copied, list(done.tables["emb"].recoded)) == (0, list(range(20)))
    with np.load(tmp_path / "x.npz") as file:
        assert np.abs(unpacked(file["emb"], 8) - values).max() < 0.02
    np.savez(tmp_path / "same.npz", emb=values)
    assert import_file(tmp_path / "same.npz", tmp_path / "run", durable=False).committed is False
