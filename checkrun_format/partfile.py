"""Part files: bytes to records and back, and what must be true of one on its own (FORMAT.md 5.5). Pure."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator

import msgspec

from checkrun_format import dtypes, layout
from checkrun_format.errors import DamagedError
from checkrun_format.manifest import ArrayEntry, BlockEntry, PartFile, check_unique, decode

CHECKSUM_BYTES = 4
"""At the end of each chunk object (ZAR-3)."""


def parse_parts(data: bytes, place: str) -> PartFile:
    """Parse `parts-<w>.json.gz` and check it on its own (PRT-1, PRT-2); its digest is the caller's to check.

    Raises
    ------
    DamagedError
        Not one member of gzip, malformed, or its parts do not cut its blocks.
    """
    document: PartFile = decode("parts", _unpacked(data, place), place)
    check_unique("table", document.tables, place)
    _check_parts(document, place)
    _check_checksums(document, place)
    return document


def _unpacked(data: bytes, place: str) -> bytes:
    """What stands in the one member of gzip."""
    member = zlib.decompressobj(wbits=31)
    try:
        text = member.decompress(data)
    except zlib.error as error:
        raise DamagedError(place, f"not gzip: {error}") from error
    if not member.eof or member.unused_data:
        raise DamagedError(place, "not one whole member of gzip, with nothing after it (5.5)")
    return text


def _check_parts(document: PartFile, place: str) -> None:
    met = [[0, 0, False] for _ in document.blocks]
    for number, part in enumerate(document.parts):
        table, index, offset, count, first_row, recent, deleted_offset, deleted_count = part[:8]
        if not 0 <= table < len(document.tables) or not 0 <= index < len(document.blocks):
            raise DamagedError(place, f"part {number} names table {table} or block {index}, which do not exist")
        block = document.blocks[index]
        if len(part) != 8 + len(block.fields) or min(part[8:], default=0) < 0:
            raise DamagedError(place, f"part {number} has not one column for each field of its block")
        if [offset, deleted_offset] != met[index][:2] or min(count, deleted_count) < 0 or not 0 <= recent <= 2:
            raise DamagedError(place, f"part {number} does not continue its block (PRT-1)")
        if (first_row == -1) != ("rows" in block.arrays) and count:
            raise DamagedError(place, f"part {number} lists its rows but its block does not, or the reverse (PRT-2)")
        if not count and (first_row != -1 or recent or block.rows):
            raise DamagedError(place, f"part {number} has no rows but says more than its tombstones (PRT-2)")
        met[index] = [offset + count, deleted_offset + deleted_count, met[index][2] or recent == 2]
    for number, (block, (rows, deleted, has_bits)) in enumerate(zip(document.blocks, met, strict=True)):
        stored = block.arrays["deleted"].shape[0] if "deleted" in block.arrays else 0
        if rows != block.rows or deleted != stored:
            raise DamagedError(place, f"the parts of block {number} do not cover it (PRT-1)")
        problem = _block_problem(block, has_bits=bool(has_bits))
        if problem:
            raise DamagedError(place, f"block {number}: {problem}")


def _block_problem(block: BlockEntry, *, has_bits: bool) -> str | None:
    names = [f.name for f in block.fields]
    if len(set(names)) != len(names):
        return f"of its fields {', '.join(names)} one stands there twice (PRT-4)"
    if block.rows and not names:
        return f"{block.rows} rows without a field (PRT-2)"
    if not block.rows and (names or block.arrays.keys() - {"deleted"}):
        return "no rows, but more than tombstones (PRT-2)"
    for f in block.fields:
        is_affine = f.encoding == "affine" and f.columns is not None and f.dtype is None and 1 <= (f.bits or 0) <= 8
        is_raw = f.encoding == "raw" and f.dtype is not None and f.bits is None
        if f.encoding in ("affine", "raw") and not is_affine and not is_raw:
            told = f"{f.columns} columns, {f.bits} bits and dtype {f.dtype}"
            return f"{f.encoding} field {f.name!r} of {told} (5.5)"
    if has_bits != ("recent" in block.arrays):
        return "a part has bits in `recent` and the block has no such array, or the reverse (PRT-2)"
    return None


def arrays_of(document: PartFile) -> Iterator[tuple[str, str, ArrayEntry]]:
    """Group and name of each array, and its entry."""
    for index, block in enumerate(document.blocks):
        for name, entry in block.arrays.items():
            yield layout.block_group(document.writer, index), name, entry
    for name, entry in document.dense.items():
        yield layout.dense_group(document.writer), name, entry


def _check_checksums(document: PartFile, place: str) -> None:
    for _, name, entry in arrays_of(document):
        count = layout.chunk_count(entry.shape[0], entry.chunk_rows)
        if entry.checksums is not msgspec.UNSET and len(entry.checksums) != count:
            raise DamagedError(place, f"array {name!r} of {count} chunks has {len(entry.checksums)} checksums (ZAR-5)")


def least_bytes(document: PartFile) -> int:
    """What the chunk objects take at least: a bound of what is listed or allocated before any of them is seen (5.5)."""
    found = 0
    for _, _, entry in arrays_of(document):
        chunk = 0
        if entry.compression is None and entry.dtype in dtypes.STORED:
            chunk = entry.chunk_rows * math.prod(entry.shape[1:]) * dtypes.logical(entry.dtype).itemsize
        found += layout.chunk_count(entry.shape[0], entry.chunk_rows) * (chunk + CHECKSUM_BYTES)
    return found


def pack_parts(document: PartFile) -> bytes:
    """The bytes of a part file; the same document gives the same bytes."""
    return gzip.compress(msgspec.json.encode(document), compresslevel=6, mtime=0)
