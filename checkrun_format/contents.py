"""What stands in the chunks of a part, and what FORMAT.md says of it beyond what every reader checks (CHK-3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes, packing, quantize
from checkrun_format.errors import DamagedError
from checkrun_format.manifest import BlockField, Field, TableEntry
from checkrun_format.reader import Block
from checkrun_format.rows import Mask
from checkrun_format.structure import Part


def check_contents(block: Block, part: Part, entry: TableEntry) -> None:
    """Check the values of a part that has rows, beyond what reading them does (CHK-3).

    Raises
    ------
    DamagedError
    """
    fields = {f.name: f for f in entry.fields}
    _recent_bits(block, part)
    for f in block.entry.fields:
        block.exact(f, fields[f.name])
        for chunk, low, high in block.rows_of(part):
            if part.first_row < 0:
                _first_rows(block, chunk)
            if f.encoding == "affine":
                _affine(block, f, fields[f.name], chunk, low, high)
            else:
                _raw(block, f, fields[f.name], chunk, low, high)


def _first_rows(block: Block, chunk: int) -> None:
    start = chunk * block.chunk_rows
    if block.rows_first[chunk] != block.listed(start, start + 1)[0]:
        raise DamagedError(block.place("rows_first"), f"entry {chunk} is not the first of its row chunk (BLK-3)")


def _recent_bits(block: Block, part: Part) -> None:
    if "recent" not in block.entry.arrays:
        return
    whole = Part(0, 0, 0, -(-block.entry.rows // 8) * 8, -1, 2, 0, 0, ())
    bits = block.recent(whole)
    if bits[block.entry.rows :].any():
        raise DamagedError(block.place("recent"), "bits beyond the last row are set (BLK-4)")
    if part.recent != 2 and bits[part.offset : part.offset + part.count].any():
        raise DamagedError(block.place("recent"), f"bits of a part that says {part.recent} are set (BLK-4)")


def _affine(block: Block, f: BlockField, field: Field, chunk: int, low: int, high: int) -> None:
    """Padding, qparams and exact rows of one chunk of a part (PCK-1, DEC-3, EXA-1)."""
    start = chunk * block.chunk_rows
    codes, qparams = (array[low - start : high - start] for array in block.affine(f, chunk))
    if not packing.padding_is_zero(codes, f.bits or 0, f.columns or 0):
        raise DamagedError(block.place(f"{f.name}.codes"), "padding bits are set (PCK-1)")
    exact = _exact(block, f, field, low, high)
    if not np.isnan(qparams[exact]).all() or codes[exact].any():
        raise DamagedError(block.place(f"{f.name}.qparams"), "exact rows have codes or qparams (EXA-1)")
    scales = qparams[~exact, 0]
    if not np.isfinite(qparams[~exact]).all() or np.signbit(scales).any():
        raise DamagedError(block.place(f"{f.name}.qparams"), "qparams are not finite, or a scale is negative (DEC-3)")
    if _overflows(codes[~exact], qparams[~exact], f, field.dtype):
        raise DamagedError(
            block.place(f"{f.name}.qparams"), f"a row overflows when it is decoded to {field.dtype} (DEC-2)"
        )


def _overflows(codes: npt.NDArray[np.uint8], qparams: npt.NDArray[Any], f: BlockField, dtype: str) -> bool:
    """Whether a value is too large for its dtype; only rows whose largest code would be are decoded."""
    bits, wide = f.bits or 0, qparams.astype(np.float32)
    with np.errstate(over="ignore"):
        largest = np.float32(2**bits - 1) * wide[:, 0] + wide[:, 1]
        some = ~np.isfinite(largest.astype(dtypes.logical(dtype)).astype(np.float32))
        out = np.empty((np.count_nonzero(some), f.columns or 0), dtypes.logical(dtype))
        if out.size:
            quantize.decode_affine(codes[some], qparams[some], bits, f.columns or 0, out)
    return not np.isfinite(out.astype(np.float32) if dtype != "float64" else out).all()


def _raw(block: Block, f: BlockField, field: Field, chunk: int, low: int, high: int) -> None:
    """Bits of booleans, and exact rows beside narrowed values, of one chunk of a part (section 4, RAW-1)."""
    start = chunk * block.chunk_rows
    values = block.values(f, chunk)[low - start : high - start]
    if f.dtype == "bool" and values.max(initial=0) > 1:
        raise DamagedError(block.place(f"{f.name}.values"), "a bool that is neither 0 nor 1 (section 4)")
    if f.dtype == field.dtype:
        return
    exact = _exact(block, f, field, low, high)
    narrowed = dtypes.from_stored(values, f.dtype or "").astype(np.float32)
    if not np.isnan(narrowed[exact]).all() or not np.isfinite(narrowed[~exact]).all():
        raise DamagedError(block.place(f"{f.name}.values"), "NaN stands for exact rows, and they are not these (RAW-1)")


def _exact(block: Block, f: BlockField, field: Field, low: int, high: int) -> Mask:
    """Which of some rows of a block are exact."""
    index, _ = block.exact(f, field)
    exact = np.zeros(high - low, np.bool_)
    exact[index[(index >= low) & (index < high)] - low] = True
    return exact
