"""The vectors of section 7 of FORMAT.md, against this library, numpy alone, and the independent reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from checkrun_format import dtypes, packing, quantize
from checkrun_format.versions import FORMAT_VERSION
from tests.conformance.independent_reader import Block

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "spec/vectors/decoding.json"
DOCUMENT = json.loads(VECTORS.read_text("utf-8"))
AFFINE, NARROWED = DOCUMENT["affine"], DOCUMENT["narrowed"]

Array = npt.NDArray[Any]


def array(text: str, dtype: Any, *shape: int) -> Array:
    return np.frombuffer(bytes.fromhex(text), dtype).reshape(shape)


def record(vector: dict[str, Any]) -> quantize.Quantized:
    logical, columns, exact = dtypes.logical(vector["dtype"]), vector["columns"], vector["exact_index"]
    return quantize.Quantized(
        codes=array(vector["codes"], np.uint8, vector["rows"], -1),
        qparams=array(vector["qparams"], vector["qparams_dtype"], vector["rows"], 2),
        exact_index=np.array(exact, np.int64),
        exact_values=array(vector["exact_values"], logical, len(exact), columns),
        bits=vector["bits"],
        columns=columns,
        dtype=vector["dtype"],
        encoder="of a vector",
        error_bound=0.0,
    )


def test_they_are_what_exact_fractions_give(tmp_path: Path) -> None:
    """DEC-1, DEC-2: the committed file is what its script writes, which knows no decoder."""
    subprocess.run([sys.executable, ROOT / "spec/make_vectors.py", tmp_path], check=True, cwd=ROOT)
    assert (tmp_path / "decoding.json").read_text("utf-8") == VECTORS.read_text("utf-8")
    assert DOCUMENT["format_version"] == FORMAT_VERSION


def test_they_reach_every_width_and_dtype() -> None:
    assert {vector["bits"] for vector in AFFINE} == set(range(1, 9))
    assert {vector["dtype"] for vector in AFFINE} == dtypes.FLOATING
    assert {vector["qparams_dtype"] for vector in AFFINE} == {"float16", "float32"}
    assert {vector["stored_dtype"] for vector in NARROWED} == {"float16", "bfloat16"}


def test_a_fused_multiply_add_would_be_seen() -> None:
    """DEC-1: product and sum are rounded apart."""
    (vector,) = (vector for vector in AFFINE if vector["name"] == "product and sum are rounded apart")
    scale, bias = array(vector["qparams"], np.float32, 2).astype(np.float64)
    fused = (np.arange(8) * scale + bias).astype(np.float32)  # exact in float64, rounded once
    assert np.flatnonzero(fused != array(vector["values"], np.float32, 8)).tolist() == [3, 6]


@pytest.mark.parametrize("vector", AFFINE, ids=lambda vector: vector["name"])
def test_affine(vector: dict[str, Any]) -> None:
    """PCK-1, DEC-1 to DEC-3, EXA-1."""
    stored = record(vector)
    unpacked = packing.unpack(stored.codes, stored.bits, stored.columns)
    assert unpacked.tolist() == vector["unpacked"]
    assert packing.pack(unpacked, stored.bits).tobytes().hex() == vector["codes"]
    assert packing.padding_is_zero(stored.codes, stored.bits, stored.columns)
    assert quantize.decode(stored).tobytes().hex() == vector["values"]


@pytest.mark.parametrize("vector", AFFINE, ids=lambda vector: vector["name"])
def test_affine_by_the_independent_reader(vector: dict[str, Any]) -> None:
    stored = record(vector)
    arrays: dict[str, Array] = {"weight.codes": stored.codes, "weight.qparams": stored.qparams}
    if vector["exact_index"]:
        bits = f"uint{8 * stored.exact_values.itemsize}"
        arrays |= {"weight.exact_index": stored.exact_index, "weight.exact_values": stored.exact_values.view(bits)}
    field = {"name": "weight", "encoding": "affine", "bits": stored.bits, "dtype": None, "columns": stored.columns}
    block = Block(Path("block"), {"rows": stored.rows, "fields": [field], "arrays": dict.fromkeys(arrays)})
    vars(block)["array"] = lambda name, *_: arrays[name]
    assert block.decode("weight", vector["dtype"]).tobytes().hex() == vector["values"]


@pytest.mark.parametrize("vector", NARROWED, ids=lambda vector: vector["name"])
def test_narrowed(vector: dict[str, Any]) -> None:
    """RAW-1: widening is exact."""
    stored = array(vector["stored"], dtypes.logical(vector["stored_dtype"]), -1)
    assert stored.astype(np.float32).tobytes().hex() == vector["values"]
