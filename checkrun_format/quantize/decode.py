"""From codes to values, and what an encoder must know about it (FORMAT.md section 7.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.packing import U8, checked_bits, checked_columns, checked_out, packed_width, row_pieces, unpack
from checkrun_format.quantize import engine
from checkrun_format.quantize.record import QPARAMS_DTYPES, Array, Quantized
from checkrun_format.rows import as_array

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Index = npt.NDArray[np.integer[Any]]
Numbers = npt.NDArray[np.int64]
Rows = slice | npt.NDArray[np.integer[Any]]


def decode(quantized: Quantized, out: Array | None = None, rows: Rows | None = None) -> Array:
    """The values of the rows, exact rows included.

    Parameters
    ----------
    quantized : Quantized
        The rows as stored.
    out : array (n, columns) of `quantized.dtype`, optional
        Receives the values; any strides.
    rows : slice or integer array (k,), optional
        Which rows, in which order; default all. An array may repeat rows, but not count them from the end.

    Returns
    -------
    array (n or k, columns) of `quantized.dtype`
        `out` if given.

    Raises
    ------
    InvalidInputError
        If `out` has another shape or dtype, or `rows` names a row that is not there.

    Examples
    --------
    >>> from checkrun_format.quantize import encode
    >>> q = encode(np.array([[0, 1, 3], [0, 1, np.inf]], np.float32), bits=2)
    >>> decode(q, rows=np.array([1, 0])).tolist()
    [[0.0, 1.0, inf], [0.0, 1.0, 3.0]]
    """
    picked = _picked(rows, quantized.rows)
    values = checked_out(out, (len(picked), quantized.columns), dtypes.logical(quantized.dtype))
    if isinstance(picked, range) and picked.step == 1:
        _decode_run(quantized, picked, values)
    else:
        _decode_listed(quantized, _numbers(picked), values)
    return values


def decode_affine(
    codes: U8,
    qparams: Array,
    bits: int,
    columns: int,
    out: Array,
    *,
    rows: Index | None = None,
    dest: Index | None = None,
) -> None:
    """Write `code * scale + bias` into `out` (DEC-1), cast to its dtype (DEC-2).

    Product and sum are each rounded to float32. Exact rows become NaN: their qparams are (EXA-1).

    Parameters
    ----------
    codes : uint8 array (n, packed_width(columns, bits))
        Packed codes (PCK-1).
    qparams : float16 or float32 array (n, 2)
        Scale and bias.
    bits, columns : int
        Width of a code; codes in a row.
    out : array (n, columns) of float16, bfloat16, float32 or float64
        Receives the values; any strides.
    rows : integer array (k,), optional
        Decode these rows only, in this order, into the k rows of `out`.
    dest : integer array (n or k,), optional
        The rows of `out`, of which there may be more, that receive them, in this order; all different.

    Raises
    ------
    InvalidInputError
        If shapes or dtypes contradict one another, or `rows` or `dest` name a row that is not there.

    Examples
    --------
    >>> out = np.empty((1, 3), np.float32)
    >>> decode_affine(np.array([[0x34]], np.uint8), np.array([[0.5, -1]], np.float16), 2, 3, out)
    >>> out
    array([[-1. , -0.5,  0.5]], dtype=float32)
    """
    bits, columns = checked_bits(bits), checked_columns(columns)
    _check_affine(codes, qparams, bits, columns)
    picked = None if rows is None else _numbers(_picked(rows, len(codes)))
    count = len(codes) if picked is None else len(picked)
    _check_array(out, "out")
    target = _checked_dest(dest, out, count)
    _check_out(out, count if dest is None else len(out), columns)
    out, qparams = np.asarray(out), _aligned(qparams)

    def decode_piece(piece: slice) -> None:
        some = piece if picked is None else picked[piece]
        at = piece if target is None else target[piece]
        scatter_affine(codes, qparams, bits, columns, out, rows=some, dest=at)

    engine.spread(decode_piece, count, columns)


def scatter_affine(
    codes: U8,
    qparams: Array,
    bits: int,
    columns: int,
    out: Array,
    *,
    rows: slice | Numbers,
    dest: slice | Numbers,
    kept: npt.NDArray[np.bool_] | None = None,
) -> None:
    """`decode_affine` on this thread, for a caller who has checked what it gives: nothing is looked at twice.

    Parameters
    ----------
    codes, qparams, bits, columns, out
        As of `decode_affine`.
    rows, dest : slice or int64 array (k,)
        Which rows, and which rows of `out` they go to; slices have a start, a stop, and step 1.
    kept : bool array (k,), optional
        Which of them go; default all.
    """
    count = dest.stop - dest.start if isinstance(dest, slice) else dest.size
    if not count:
        return
    kernels = engine.kernels(count * columns)
    place = None if kernels is None else _place(out)
    if kernels is not None and place is not None:
        if isinstance(rows, slice) or not (codes.flags.c_contiguous and qparams.flags.c_contiguous):
            codes, qparams, rows = np.ascontiguousarray(codes[rows]), np.ascontiguousarray(qparams[rows]), _NOTHING
        halves, singles = _by_dtype(qparams)
        begin, places = (place.step * dest.start, _NOTHING) if isinstance(dest, slice) else (0, dest)
        kernels.compiled(kernels.decode_rows)(
            codes.reshape(-1),
            halves,
            singles,
            np.ascontiguousarray(rows),
            _ALL if kept is None else kept,
            columns,
            bits,
            (place.begin + begin, place.step),
            np.ascontiguousarray(places),
            *place.flats,
            place.dtype == "bfloat16",
        )
        return
    if kept is not None:
        rows, dest = as_array(rows)[kept], as_array(dest)[kept]
        count = dest.size
    with np.errstate(all="ignore"):
        for piece in row_pieces(count, columns):
            some, at = _part(rows, piece), _part(dest, piece)
            out[at] = _affine(unpack(codes[some], bits, columns), qparams[some])


def _part(selection: slice | Numbers, piece: slice) -> slice | Numbers:
    if isinstance(selection, slice):
        return slice(selection.start + piece.start, selection.start + piece.stop)
    return selection[piece]


_NOTHING: Numbers = np.zeros(0, np.int64)
_ALL: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
_KINDS: dict[str, tuple[int, type[Any]]] = {"float32": (0, np.float32), "float64": (1, np.float64)}
_NO_HALVES, _NO_SINGLES, _NO_DOUBLES = np.empty(0, np.uint16), np.empty(0, np.float32), np.empty(0, np.float64)


@dataclass(frozen=True, slots=True)
class _Place:
    """An array of rows as one run of memory."""

    flat: Array
    dtype: str
    begin: int
    step: int

    @property
    def flats(self) -> list[Array]:
        """The run as the one of three kinds that it is of, and nothing of the others."""
        kind, viewed = _KINDS.get(self.dtype, (2, np.uint16))
        flats: list[Array] = [_NO_SINGLES, _NO_DOUBLES, _NO_HALVES]
        flats[kind] = self.flat.view(viewed)
        return flats


def _place(out: Array) -> _Place | None:
    """None where the rows of `out` are not runs of aligned numbers in the machine's order."""
    size, (across, along), flags = out.itemsize, out.strides, out.flags
    regular = along == size or out.shape[1] == 1
    if not regular or across % size or not flags.aligned or not out.dtype.isnative or not out.size:
        return None
    if flags.c_contiguous:
        return _Place(out.reshape(-1), dtypes.name_of(out.dtype), 0, out.shape[1])
    upright = out if across >= 0 else out[::-1]
    span = (len(out) - 1) * abs(across) // size
    flat = np.lib.stride_tricks.as_strided(upright, (span + out.shape[1],), (size,))
    return _Place(flat, dtypes.name_of(out.dtype), 0 if across >= 0 else span, across // size)


def _by_dtype(qparams: Array) -> tuple[Array, Array]:
    """The bits of float16, and float32: one of them is empty."""
    flat = qparams.reshape(-1)
    if flat.dtype == np.float16:
        return flat.view(np.uint16), _NO_SINGLES
    return _NO_HALVES, flat


def nearest_codes(values: F32, qparams: Array, bits: int) -> U8:
    """The code whose value is nearest to each of `values` (n, columns): uint8 (n, columns).

    Rows with scale 0 get codes 0. Where a value or its qparams are not finite, or the scale has no reciprocal
    (`is_invertible`), the code means nothing.
    """
    scale, bias = _widened(qparams)
    steps = values - bias[:, None]
    steps *= np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)[:, None]
    np.rint(steps, out=steps)
    np.clip(steps, 0, (1 << bits) - 1, out=steps)
    return steps.astype(np.uint8)


def is_invertible(scale: F32) -> npt.NDArray[np.bool_]:
    """Whether a scale is 0, or it and its reciprocal are normal float32 numbers."""
    invertible: npt.NDArray[np.bool_] = (scale == 0) | ((scale >= 2.0**-126) & (scale <= 2.0**126))
    return invertible


def reach(low: F32, high: F32, qparams: Array, bits: int) -> F64:
    """How far a value between `low` and `high` (n,) may be from the nearest that its row's qparams can express.

    The larger of half a scale and of what lies outside the first or beyond the last code, in exact arithmetic.
    """
    scale, bias = qparams.astype(np.float64).T
    top = bias + scale * ((1 << bits) - 1)
    farthest: F64 = np.maximum(0.5 * scale, np.maximum(bias - low, high - top))
    return farthest


def _affine(codes: U8, qparams: Array) -> F32:
    scale, bias = _widened(qparams)
    values = codes.astype(np.float32)
    values *= scale[:, None]
    values += bias[:, None]
    return values


def _widened(qparams: Array) -> tuple[F32, F32]:
    return qparams[:, 0].astype(np.float32), qparams[:, 1].astype(np.float32)


def _aligned(array: Array) -> Array:
    """In the machine's order of bytes, each number where the machine wants it: kernels take nothing else."""
    return np.require(array, array.dtype.newbyteorder("="), ["ALIGNED", "ENSUREARRAY"])


def _check_affine(codes: U8, qparams: Array, bits: int, columns: int) -> None:
    _check_array(codes, "codes")
    _check_array(qparams, "qparams")
    rows = len(codes)
    if codes.shape != (rows, packed_width(columns, bits)) or codes.dtype != np.uint8:
        raise InvalidInputError(f"codes of {columns} columns at {bits} bits cannot be {codes.dtype} {codes.shape}")
    if qparams.shape != (rows, 2) or qparams.dtype.name not in QPARAMS_DTYPES:
        raise InvalidInputError(f"qparams of {rows} rows cannot be {qparams.dtype} {qparams.shape}")


def _check_array(array: object, what: str) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 2:
        raise InvalidInputError(f"{what} must be a numpy array of two dimensions")


def _check_out(out: Array, rows: int, columns: int) -> None:
    if out.shape != (rows, columns) or dtypes.name_of(out.dtype) not in dtypes.FLOATING or not out.flags.writeable:
        raise InvalidInputError(f"out for {rows} rows of {columns} columns cannot be {out.dtype} {out.shape}")


def _checked_dest(dest: Index | None, out: Array, count: int) -> Numbers | None:
    if dest is None:
        return None
    target = _numbers(_picked(dest, len(out)))
    if len(target) != count:
        raise InvalidInputError(f"dest must name a row of out for each of {count} rows, not {len(target)}")
    return target


def _picked(rows: object, count: int) -> range | Numbers:
    if rows is None:
        return range(count)
    if isinstance(rows, slice):
        try:
            return range(*rows.indices(count))
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"rows={rows}: {error}") from None
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise InvalidInputError("rows must be a slice or an integer array of one dimension")
    beyond = rows[(rows < 0) | (rows >= count)]
    if beyond.size:
        raise InvalidInputError(f"rows must be from 0 to {count - 1}, found {beyond[0]}")
    return rows.astype(np.int64, copy=False)


def _numbers(picked: range | Numbers) -> Numbers:
    if not isinstance(picked, range):
        return picked
    return np.arange(picked.start, picked.stop, picked.step) if picked else np.zeros(0, np.int64)


def _decode_run(quantized: Quantized, run: range, out: Array) -> None:
    q, stored = quantized, slice(run.start, run.start + len(run))
    decode_affine(q.codes[stored], q.qparams[stored], q.bits, q.columns, out)
    first, last = np.searchsorted(q.exact_index, (stored.start, stored.stop))
    out[q.exact_index[first:last] - stored.start] = q.exact_values[first:last]


def _decode_listed(quantized: Quantized, rows: Numbers, out: Array) -> None:
    q = quantized
    decode_affine(q.codes, q.qparams, q.bits, q.columns, out, rows=rows)
    if len(q.exact_index):
        at = np.minimum(np.searchsorted(q.exact_index, rows), len(q.exact_index) - 1)
        exact = q.exact_index[at] == rows
        out[exact] = q.exact_values[at[exact]]
