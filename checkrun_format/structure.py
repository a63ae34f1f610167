"""Whether the documents of a checkpoint fit one another: tables, parts, blocks and their arrays (FORMAT.md 5.4 to 6).

Pure. What is known and contradicts itself is damage; what is unknown refuses the tables that need it (TAB-1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkrun_format import dtypes, layout, packing, versions
from checkrun_format.errors import DamagedError, UnsupportedFeatureError
from checkrun_format.manifest import ArrayEntry, BlockEntry, BlockField, Field, TableEntry

COMPRESSIONS = (None, "zstd", "blosc")
MAX_CHUNK_BYTES = 2**31 - 1
"""Of a decoded chunk (ZAR-2)."""

_NARROWED = {("float32", "float16"), ("float32", "bfloat16")}
"""Logical dtypes of a field, and of the narrowed values that stand for it (RAW-1)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part, as its part file says (5.5)."""

    writer: int
    block: int
    offset: int
    count: int
    first_row: int
    recent: int
    deleted_offset: int
    deleted_count: int
    columns: tuple[int, ...]


def check_table(entry: TableEntry, sequence: int, place: str) -> None:
    """Refuse a table that this library cannot read (TAB-1); `place` is that of the manifest."""
    what = f"table {entry.name!r} of checkpoint {sequence}"
    versions.check_features(entry.requires, what)
    for name, value, known in (
        ("addressing", entry.addressing, ("dense", "keyed")),
        ("storage", entry.storage, ("full", "changed", "unchanged")),
        ("key_dtype", entry.key_dtype, (None, "int64", "uint64")),
    ):
        if value not in known:
            raise UnsupportedFeatureError(f"{what}: unknown {name} {value!r}")
    for f in entry.fields:
        if f.dtype not in dtypes.STORED:
            raise UnsupportedFeatureError(f"{what}: unknown dtype {f.dtype!r} of field {f.name!r}")
        check_size([entry.rows or 1, f.columns or 1], f.dtype, f"{what}, field {f.name!r}", place)


def part_problem(entry: TableEntry, part: Part, block: BlockEntry) -> str | None:
    """What contradicts the table's entry in a part, None if nothing does (PRT-2, PRT-3, PRT-4, RAW-1)."""
    fields = {f.name: f for f in entry.fields}
    for f, start in zip(block.fields, part.columns, strict=True):
        field = fields.get(f.name)
        if field is None:
            return f"a part has field {f.name!r}, which the table has not (PRT-4)"
        if (f.columns is None) != (field.columns is None) or start + (f.columns or 0) > (field.columns or 0):
            return f"columns {start} to {start + (f.columns or 0)} of field {f.name!r} are outside the table's (PRT-4)"
        problem = _dtype_problem(f, field, block)
        if problem:
            return f"field {f.name!r}: {problem}"
    return _rows_problem(entry, part)


def _rows_problem(entry: TableEntry, part: Part) -> str | None:
    if entry.addressing == "keyed" and part.count and part.first_row != -1:
        return "a part of a keyed table does not list its keys (PRT-2)"
    if entry.addressing == "dense" and part.deleted_count:
        return "a dense table has tombstones (PRT-3)"
    if entry.addressing == "dense" and part.first_row + part.count > (entry.rows or 0):
        return f"a part reaches row {part.first_row + part.count}, the table has {entry.rows} (PRT-3)"
    return None


def _dtype_problem(f: BlockField, field: Field, block: BlockEntry) -> str | None:
    exact = block.arrays.get(f"{f.name}.exact_values")
    if exact is not None and exact.dtype != dtypes.STORED[field.dtype]:
        return f"{exact.dtype} in exact_values where {dtypes.STORED[field.dtype]} belongs (BLK-1)"
    if f.encoding == "affine":
        return None if field.dtype in dtypes.FLOATING else f"codes for {field.dtype} (PRT-4)"
    if f.dtype != field.dtype:
        return None if (field.dtype, f.dtype) in _NARROWED else f"{f.dtype} for {field.dtype} (RAW-1)"
    return None if exact is None else "exact rows, but it is not narrowed (RAW-1)"


def check_block(block: BlockEntry, group: str) -> None:
    """Check a block's fields and arrays (BLK-1, BLK-2); `group` is its place.

    Raises
    ------
    DamagedError
        Naming an array, or the block.
    UnsupportedFeatureError
        An encoding, compression or dtype that this library does not know.
    """
    arrays = dict(_beside_fields(block, group))
    for f in block.fields:
        _check_known(f, group)
        arrays |= dict(_of_field(f, block, group))
    for name, (known, shape) in arrays.items():
        entry = block.arrays.get(name)
        if entry is None:
            raise DamagedError(f"{group}/{name}", "the part file does not know this array (BLK-1)")
        if entry.dtype not in known or entry.shape != shape:
            belongs = f"{' or '.join(known)} {shape}"
            raise DamagedError(f"{group}/{name}", f"{entry.dtype} {entry.shape} where {belongs} belongs (BLK-1)")
        check_array(entry, f"{group}/{name}")
    aligned = [name for name in arrays if name == "rows" or name.endswith((".codes", ".qparams", ".values"))]
    cuts = {block.arrays[name].chunk_rows for name in aligned}
    if len(cuts) > 1:
        raise DamagedError(group, f"its row-aligned arrays are cut at {sorted(cuts)} rows (BLK-2)")


_Arrays = Iterator[tuple[str, tuple[tuple[str, ...], list[int]]]]
"""Names of arrays; the dtypes that each may have, and its shape."""


def _beside_fields(block: BlockEntry, group: str) -> _Arrays:
    """`rows`, `rows_first`, `recent` and `deleted`, where they are present (PRT-2)."""
    rows = block.arrays.get("rows")
    if rows is not None:
        yield "rows", (("int64",), [block.rows])
        yield "rows_first", (("int64",), [layout.chunk_count(block.rows, rows.chunk_rows)])
    elif "rows_first" in block.arrays:
        raise DamagedError(f"{group}/rows_first", "there is no array `rows` (BLK-1)")
    if "recent" in block.arrays:
        yield "recent", (("uint8",), [-(-block.rows // 8)])
    if "deleted" in block.arrays:
        yield "deleted", (("int64",), block.arrays["deleted"].shape[:1])


def _check_known(f: BlockField, group: str) -> None:
    if f.encoding not in ("raw", "affine"):
        raise UnsupportedFeatureError(f"{group}: unknown encoding {f.encoding!r} of field {f.name!r}")
    if f.encoding == "raw" and f.dtype not in dtypes.STORED:
        raise UnsupportedFeatureError(f"{group}: unknown dtype {f.dtype!r} of field {f.name!r}")


def _of_field(f: BlockField, block: BlockEntry, group: str) -> _Arrays:
    width = [] if f.columns is None else [f.columns]
    if f.encoding == "affine":
        packed = packing.packed_width(f.columns or 0, f.bits or 0)
        yield f"{f.name}.codes", (("uint8",), [block.rows, packed])
        yield f"{f.name}.qparams", (("float16", "float32"), [block.rows, 2])
    else:
        yield f"{f.name}.values", ((dtypes.STORED[f.dtype or ""],), [block.rows, *width])
    for name in {f"{f.name}.exact_index", f"{f.name}.exact_values"} & block.arrays.keys():
        count = block.arrays[name].shape[0]
        if count > block.rows:
            raise DamagedError(f"{group}/{name}", f"{count} exact rows of {block.rows} (BLK-5)")
        yield f"{f.name}.exact_index", (("int64",), [count])
        yield f"{f.name}.exact_values", (tuple(set(dtypes.STORED.values())), [count, *width])


def check_array(entry: ArrayEntry, place: str) -> None:
    """Refuse an array that this library cannot read, or whose chunks are too large (ZAR-2, TAB-1)."""
    if entry.compression not in COMPRESSIONS:
        raise UnsupportedFeatureError(f"{place}: unknown compression {entry.compression!r}")
    if entry.dtype not in dtypes.STORED.values():
        raise UnsupportedFeatureError(f"{place}: unknown dtype {entry.dtype!r}")
    size = entry.chunk_rows * math.prod(entry.shape[1:]) * dtypes.logical(entry.dtype).itemsize
    if size > MAX_CHUNK_BYTES:
        raise DamagedError(place, f"a chunk of {size} bytes; at most {MAX_CHUNK_BYTES} (ZAR-2)")


def check_dense(name: str, entry: ArrayEntry, place: str) -> None:
    """Check an array of dense tensors of one dtype, or of blobs (TEN-2)."""
    stored = "uint8" if name == "blob" else dtypes.STORED.get(name)
    if stored is None:
        raise UnsupportedFeatureError(f"{place}: unknown dtype {name!r}")
    if entry.dtype != stored or len(entry.shape) != 1:
        raise DamagedError(place, f"{entry.dtype} {entry.shape} where {stored} of one dimension belongs (TEN-2)")
    check_array(entry, place)


def check_size(shape: Sequence[int], dtype: str, what: str, place: str) -> None:
    """Refuse what no array can be: byte counts have 64 bits (section 11)."""
    if len(shape) > 64 or math.prod(max(1, size) for size in shape) * dtypes.logical(dtype).itemsize >= 2**63:
        raise DamagedError(place, f"{what}: no array has shape {list(shape)} (section 11)")
