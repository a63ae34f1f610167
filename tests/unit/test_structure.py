"""Blocks and tables whose documents contradict one another; what only a faulty writer could store."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import checkrun_format as crf
from checkrun_format.manifest import BlockEntry, TableEntry
from checkrun_format.structure import Part, check_block, check_size, check_table, part_problem

Json = dict[str, Any]
MOST = 2**31 - 1


def array(dtype: str, *shape: int, chunk_rows: int = 4, compression: str | None = None) -> Json:
    return {"dtype": dtype, "shape": list(shape), "chunk_rows": chunk_rows, "compression": compression}


RAW: Json = {"name": "r", "encoding": "raw", "columns": None, "bits": None, "dtype": "float32"}
AFFINE: Json = {"name": "a", "encoding": "affine", "columns": 5, "bits": 3, "dtype": None}
ARRAYS: Json = {
    "r.values": array("float32", 9),
    "a.codes": array("uint8", 9, 2),
    "a.qparams": array("float16", 9, 2),
    "a.exact_index": array("int64", 2),
    "a.exact_values": array("float32", 2, 5),
    "rows": array("int64", 9, compression="blosc"),
    "rows_first": array("int64", 3),
    "recent": array("uint8", 2),
    "deleted": array("int64", 7),
}


def block(raw: Json | None = None, affine: Json | None = None, **arrays: Json | None) -> BlockEntry:
    """Nine listed rows of two fields; something in them is changed, or, if None, missing."""
    changed = {name.replace("__", "."): entry for name, entry in arrays.items()}
    kept = {name: entry for name, entry in (ARRAYS | changed).items() if entry is not None}
    return msgspec.convert(
        {"rows": 9, "fields": [RAW | (raw or {}), AFFINE | (affine or {})], "arrays": kept}, BlockEntry
    )


def test_a_block_as_it_should_be() -> None:
    check_block(block(), "group")
    check_block(block(a__exact_index=None, a__exact_values=None, rows=None, rows_first=None), "group")
    check_block(block(a__qparams=array("float32", 9, 2), stranger=array("float32", 1)), "group")


@pytest.mark.parametrize("name", ["r.values", "a.codes", "a.qparams", "rows_first", "a.exact_index", "a.exact_values"])
def test_every_array_is_there(name: str) -> None:
    """BLK-1: without exact_index, exact_values belong to nothing; without exact_values, exact rows are NaN."""
    with pytest.raises(crf.DamagedError, match=r"does not know this array \(BLK-1\)") as caught:
        check_block(block(**{name.replace(".", "__"): None}), "group")
    assert caught.value.place == f"group/{name}"


WRONG: list[tuple[str, Json, str]] = [
    ("r.values", array("float64", 9), "BLK-1"),
    ("r.values", array("float32", 8), "BLK-1"),
    ("r.values", array("float32", 9, 1), "BLK-1"),
    ("r.values", array("float4", 9), "BLK-1"),
    ("a.codes", array("uint8", 9, 3), "BLK-1"),
    ("a.codes", array("int8", 9, 2), "BLK-1"),
    ("a.qparams", array("float16", 9, 3), "BLK-1"),
    ("a.qparams", array("float64", 9, 2), "BLK-1"),
    ("a.exact_index", array("int32", 2), "BLK-1"),
    ("a.exact_values", array("float32", 2, 4), "BLK-1"),
    ("a.exact_index", array("int64", 10), "BLK-"),
    ("rows", array("int64", 10), "BLK-1"),
    ("rows", array("uint64", 9), "BLK-1"),
    ("rows_first", array("int64", 4), "BLK-1"),
    ("recent", array("uint8", 2**62), "BLK-1"),
    ("recent", array("bool", 2), "BLK-1"),
    ("deleted", array("int64", 7, 1), "BLK-1"),
    ("deleted", array("int32", 7), "BLK-1"),
    ("deleted", array("int64", 7, chunk_rows=2**28), "ZAR-2"),
    ("recent", array("uint8", 2, chunk_rows=MOST + 1), "ZAR-2"),
]


@pytest.mark.parametrize(("name", "entry", "rule"), WRONG, ids=repr)
def test_arrays_have_the_shape_and_dtype_of_their_block(name: str, entry: Json, rule: str) -> None:
    """BLK-1, ZAR-2: before anything is allocated or listed."""
    with pytest.raises(crf.DamagedError, match=rf"\({rule}") as caught:
        check_block(block(**{name.replace(".", "__"): entry}), "group")
    assert caught.value.place.startswith(f"group/{name[:2]}")


def test_the_largest_chunk() -> None:
    """ZAR-2: 2^31 - 1 bytes."""
    check_block(block(recent=array("uint8", 2, chunk_rows=MOST)), "group")


@pytest.mark.parametrize("name", ["r.values", "a.codes", "a.qparams", "rows"])
def test_row_aligned_arrays_are_cut_alike(name: str) -> None:
    """BLK-2; what is cut on its own does not count."""
    entry = {name.replace(".", "__"): ARRAYS[name] | {"chunk_rows": 5}}
    first = array("int64", 2 if name == "rows" else 3)
    with pytest.raises(crf.DamagedError, match=r"^group: its row-aligned arrays are cut at \[4, 5\] rows \(BLK-2\)"):
        check_block(block(**entry, rows_first=first), "group")
    check_block(block(recent=array("uint8", 2, chunk_rows=1), deleted=array("int64", 7, chunk_rows=6)), "group")


@pytest.mark.parametrize(
    ("raw", "affine", "arrays"),
    [
        ({"encoding": "codebook", "dtype": None}, {}, {}),
        ({"encoding": "codebook"}, {}, {}),
        ({"dtype": "float4"}, {}, {}),
        ({}, {}, {"rows": ARRAYS["rows"] | {"compression": "lz4"}}),
        ({}, {}, {"a__codes": ARRAYS["a.codes"] | {"compression": ""}}),
    ],
    ids=repr,
)
def test_what_is_unknown_is_unsupported(raw: Json, affine: Json, arrays: Json) -> None:
    """TAB-1: encodings, dtypes, compressions."""
    with pytest.raises(crf.UnsupportedFeatureError, match=r"group.*: unknown (encoding|dtype|compression) "):
        check_block(block(raw, affine, **arrays), "group")


# Tables and their parts -----------------------------------------------------------------------------------------------


def table(raw: Json | None = None, affine: Json | None = None, **changes: Any) -> TableEntry:
    fields = [
        {"name": "r", "dtype": "float32", "columns": None, "encoder": None} | (raw or {}),
        {"name": "a", "dtype": "float32", "columns": 7, "encoder": None} | (affine or {}),
    ]
    told: Json = {"name": "t", "requires": [], "addressing": "dense", "key_dtype": None, "rows": 9, "storage": "full"}
    return msgspec.convert(told | {"fields": fields} | changes, TableEntry)


def part(*columns: int, **changes: int) -> Part:
    told: dict[str, int] = {"writer": 0, "block": 0, "offset": 0, "count": 9, "first_row": -1, "recent": 1}
    return Part(**told | {"deleted_offset": 0, "deleted_count": 0} | changes, columns=columns or (0, 2))


PLAIN: Json = {"a__exact_index": None, "a__exact_values": None}
KEYED: Json = {"addressing": "keyed", "rows": None, "key_dtype": "int64"}
NARROW: Json = {"r__exact_index": array("int64", 1), "r__exact_values": array("float32", 1)}


@pytest.mark.parametrize(
    ("entry", "stored", "of"),
    [
        (table(), block(), part()),
        (table(affine={"dtype": "float64"}), block(**PLAIN), part()),
        (table(), block({"dtype": "float16"}, **NARROW), part()),
        (table(), block({"dtype": "bfloat16"}), part()),
        (table({"dtype": "bool"}), block({"dtype": "bool"}), part()),
        (table(**KEYED), block(), part(deleted_count=3)),
        (table(rows=12), block(), part(first_row=3)),
    ],
)
def test_parts_that_fit_their_table(entry: TableEntry, stored: BlockEntry, of: Part) -> None:
    assert part_problem(entry, of, stored) is None


@pytest.mark.parametrize(
    ("entry", "stored", "of", "rule"),
    [
        (table({"dtype": "float64"}), block(), part(), "RAW-1"),
        (table({"dtype": "int32"}), block(), part(), "RAW-1"),
        (table({"dtype": "float64"}), block({"dtype": "float16"}), part(), "RAW-1"),
        (table({"dtype": "bfloat16"}), block({"dtype": "float16"}), part(), "RAW-1"),
        (table({"dtype": "uint8"}), block({"dtype": "bool"}), part(), "RAW-1"),
        (table(), block(**NARROW), part(), "RAW-1"),
        (table(), block(r__exact_values=array("float32", 1)), part(), "RAW-1"),
        (table(affine={"dtype": "int32"}), block(**PLAIN), part(), "PRT-4"),
        (table(affine={"dtype": "bool"}), block(**PLAIN), part(), "PRT-4"),
        (table(affine={"dtype": "float64"}), block(), part(), "BLK-1"),
        (table(affine={"columns": None}), block(), part(), "PRT-4"),
        (table({"columns": 1}), block(), part(), "PRT-4"),
        (table(), block(), part(0, 3), "PRT-4"),
        (table(), block(), part(1, 0), "PRT-4"),
        (table({"name": "x"}), block(), part(), "PRT-4"),
        (table(**KEYED), block(), part(first_row=0), "PRT-2"),
        (table(), block(), part(deleted_count=1), "PRT-3"),
        (table(), block(), part(first_row=1), "PRT-3"),
    ],
)
def test_parts_that_do_not_fit_their_table(entry: TableEntry, stored: BlockEntry, of: Part, rule: str) -> None:
    """RAW-1: the bits of another dtype are other values, in silence."""
    assert f"({rule})" in str(part_problem(entry, of, stored))


def test_a_table_that_no_array_can_hold() -> None:
    """Section 11: byte counts have 64 bits."""
    check_table(table(rows=2**61 - 1, affine={"columns": 1}), 1, "m")
    with pytest.raises(crf.DamagedError, match="no array has shape"):
        check_table(table(rows=2**61, affine={"columns": 1}), 1, "m")
    with pytest.raises(crf.DamagedError, match="no array has shape"):
        check_table(table(rows=0, affine={"columns": 2**61}), 1, "m")


def test_a_shape_that_no_array_can_have() -> None:
    """Section 11; also of no elements."""
    check_size([0, 2**60], "float32", "x", "m")
    for shape in ([0, 2**61], [2**30, 2**31, 1], [1] * 65):
        with pytest.raises(crf.DamagedError, match=r"^m: x: no array has shape"):
            check_size(shape, "float32", "x", "m")
