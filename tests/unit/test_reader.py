"""Blocks whose part file contradicts itself; what only a faulty writer could store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.chunks import ChunkReader
from checkrun_format.manifest import BlockEntry
from checkrun_format.reader import Block
from checkrun_format.stores import LocalStore


def block(path: Path, **arrays: dict[str, Any]) -> Block:
    """A block of four rows whose arrays are said to be these."""
    fields = [{"name": "w", "encoding": "raw", "columns": None, "bits": None, "dtype": "float32"}]
    entry = msgspec.convert({"rows": 4, "fields": fields, "arrays": arrays}, BlockEntry)
    return Block(ChunkReader(LocalStore(path)), "group", entry, shared=False)


def array(chunk_rows: int, dtype: str = "float32", shape: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "chunk_rows": chunk_rows, "compression": None}


def test_row_aligned_arrays_are_cut_alike(tmp_path: Path) -> None:
    """BLK-2; what is cut on its own does not count."""
    arrays = {"w.values": array(3), "rows": array(3, "int64"), "rows_first": array(2, "int64", (2,))}
    assert block(tmp_path, **arrays).chunk_rows == 3
    with pytest.raises(crf.DamagedError, match=r"^group: its row-aligned arrays are cut at \[2, 3\] rows \(BLK-2\)"):
        _ = block(tmp_path, **arrays | {"rows": array(2, "int64")}).chunk_rows


def test_arrays_have_the_shape_and_dtype_of_their_block(tmp_path: Path) -> None:
    """BLK-1."""
    one = block(tmp_path, **{"w.values": array(4)})
    assert one.array("w.values", "float32", (4,)).chunk_rows == 4
    with pytest.raises(crf.DamagedError, match=r"^group/w.values: float32 \[4\] where float32 \[5\] belongs \(BLK-1\)"):
        one.array("w.values", "float32", (5,))
    with pytest.raises(crf.DamagedError, match=r"^group/rows: the part file does not know this array \(BLK-1\)"):
        one.array("rows", "int64", (4,))


def test_the_caller_owns_what_is_read(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    run.save(crf.State(tables={"t": crf.Table({"w": np.arange(4, dtype=np.float32)})}, tensors={"x": np.zeros(2)}))
    view = run.latest().table("t")
    view.read()["w"][:] = 9
    run.latest().tensor("x")[:] = 9
    assert view.read()["w"].tolist() == [0, 1, 2, 3]
    assert run.latest().tensor("x").tolist() == [0, 0]
