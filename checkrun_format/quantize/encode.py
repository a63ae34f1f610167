"""Values to codes, qparams and exact rows, by a named encoder (FORMAT.md section 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.packing import U8, checked_bits, checked_columns, checked_out, pack, packed_width, row_pieces
from checkrun_format.quantize import engine
from checkrun_format.quantize.decode import F32, F64, is_invertible, reach
from checkrun_format.quantize.greedy import greedy, steps_of
from checkrun_format.quantize.method import VERSION, Method, method
from checkrun_format.quantize.minmax import minmax, symmetric
from checkrun_format.quantize.record import QPARAMS_DTYPES, Array, Quantized, nan_rows
from checkrun_format.quantize.refine import refine
from checkrun_format.quantize.torch_compat import ADDED, narrow_reach, torch_compat
from checkrun_format.quantize.trials import trials

Mask = npt.NDArray[np.bool_]


class Encoder(Protocol):
    """An encoder: a function like `minmax`, which see for parameters and results.

    It returns the nearest code to each value, the qparams, and which rows break the encoder's own bound. `encode` adds
    the rows that no qparams can represent, so an encoder need not look for them and may return anything there.
    """

    def __call__(
        self, values: F32, low: F32, high: F32, bits: int, qparams_dtype: str
    ) -> tuple[U8, Array, npt.NDArray[np.bool_]]:
        """Codes uint8 (n, columns), not packed; qparams (n, 2); exact bool (n,)."""
        ...


ENCODERS: dict[str, Callable[..., Any]] = {
    "greedy": greedy,
    "minmax": minmax,
    "refine": refine,
    "symmetric": symmetric,
    "torch_compat": torch_compat,
}
"""The encoders by name; some have parameters (`Method`) besides those of `Encoder`."""


def recorded_method(told: Mapping[str, Any] | None, bits: int) -> Method | None:
    """The method that a manifest tells of, None if it is not known here (another name, version or parameter)."""
    told = told or {}
    if told.get("name") not in ENCODERS or told.get("version") != VERSION:
        return None
    try:
        return Method(told["name"], told.get("num_bins"), told.get("ratio")).filled(bits)
    except InvalidInputError:
        return None


_COMPILED = ("greedy", "minmax", "refine", "symmetric")
"""Those that `kernels` has too."""

_SEARCHING = ("greedy", "refine")

_ROUNDING = 2.0**-20
_HALF_UNITS = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
_CAST_LIMITS = {"float16": 65520.0, "bfloat16": (2 - 2.0**-8) * 2.0**127}
"""Smallest magnitude that overflows in a cast (DEC-2)."""

_WIDEST_TRANSPOSED = 192


def encode(
    values: Any,
    bits: int,
    encoder: str | Method | None = None,
    qparams_dtype: str | None = None,
    codes: U8 | None = None,
) -> Quantized:
    """Quantize rows; those that codes cannot represent faithfully are kept exact (EXA-2).

    Exact are rows with NaN or infinities, all of -0.0, whose decoded values might overflow (DEC-2), whose scale is
    below 2^-126 (but not 0) or above 2^126, or that break the encoder's bound. For every other row `minmax` keeps
    (DEC-5)::

        |decoded - original| <= 0.505 * (max - min) / (2^bits - 1) + 2^-20 * max(|min|, |max|)

    The second term, 8 float32 units in the last place, covers the rounding to float32 of a float64 value, of the search
    for the nearest code, and of the decoded product and sum. A float64 value near 0 may be 2^-149 further off, for
    float32 ends there. For float16 and bfloat16, the cast of the decoded value adds half a unit in its last place at
    most, and at most doubles the error.

    Memory beyond the result does not grow with the number of rows.

    Parameters
    ----------
    values : array or torch tensor (n, columns) of float16, bfloat16, float32 or float64
        Any strides and byte order; columns at least 1. A tensor is encoded on its device (`encode_tensor`).
    bits : int
        1 to 8.
    encoder : str or Method, optional
        A name in `ENCODERS`, alone or with parameters. By default `refine` up to 4 bits, `minmax` above.
    qparams_dtype : str, optional
        "float16" or "float32". By default float16, unless more than one row in a hundred would have to be exact and
        float32 saves some of them from it; for `torch_compat`, as torch.

    codes : uint8 array (n, packed_width(columns, bits)), optional
        Receives the packed codes; in C order.

    Returns
    -------
    Quantized
        Its `error_bound` follows from the qparams and extremes of its rows and from each rounding named above.

    Raises
    ------
    InvalidInputError
        For values, bits, an encoder or a dtype that are none of these.

    Notes
    -----
    Encoding decoded rows again need not give the same codes, so copies are made of codes (CMP-2). With `minmax` it does
    for float32 and float64 rows that use the first code and the last, with float16 qparams and
    abs(bias) <= 2048 * scale.

    Examples
    --------
    >>> q = encode(np.linspace(-1, 1, 5, dtype=np.float32)[None], bits=8)
    >>> q.codes.tolist(), q.qparams.dtype.name, q.error_bound < 0.505 * 2 / 255 + 2**-20
    ([[0, 64, 128, 191, 255]], 'float16', True)
    """
    if qparams_dtype not in (None, *QPARAMS_DTYPES):
        raise InvalidInputError(f"qparams_dtype must be one of {', '.join(QPARAMS_DTYPES)}, not {qparams_dtype!r}")
    if type(values).__module__ == "torch" and codes is None:
        from checkrun_format.quantize.tensors import encode_tensor

        return encode_tensor(values, bits, encoder, qparams_dtype)
    job = _checked_job(values, bits, encoder)
    if job.method.name == "torch_compat":
        qparams_dtype = qparams_dtype or ("float32" if job.bits == 8 else "float16")
    rows, columns = job.values.shape
    codes = np.asarray(checked_out(codes, (rows, packed_width(columns, job.bits)), np.dtype(np.uint8)))
    if not codes.flags.c_contiguous:
        raise InvalidInputError("codes must be in C order, row after row")
    with np.errstate(all="ignore"):
        qparams, exact_rows, bound = _fill(codes, job, qparams_dtype or "float16", may_widen=qparams_dtype is None)
        exact_index = nan_rows(qparams[:, 0], exact_rows)
    return Quantized(
        codes=codes,
        qparams=qparams,
        exact_index=exact_index,
        exact_values=_taken(job.values, exact_index, job.dtype),
        bits=job.bits,
        columns=columns,
        dtype=job.dtype,
        encoder=job.method.name,
        error_bound=bound,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    values: Array
    bits: int
    dtype: str
    method: Method

    @property
    def encoder(self) -> Encoder:
        """With its parameters."""
        parameters = {"num_bins": self.method.num_bins, "ratio": self.method.ratio}
        given = {name: value for name, value in parameters.items() if value is not None}
        found: Encoder = partial(ENCODERS[self.method.name], **given) if given else ENCODERS[self.method.name]
        return found

    @property
    def options(self) -> F32:
        """What `kernels.search_rows` has to know."""
        if self.method.name == "greedy":
            return np.array(steps_of(self.bits, self.method.num_bins or 0, self.method.ratio or 0.0), np.float32)
        return trials(self.bits, self.values.shape[1]).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    values: F32
    low: F32
    high: F32

    def only(self, mask: Mask) -> _Rows:
        return _Rows(values=self.values[mask], low=self.low[mask], high=self.high[mask])


def _checked_job(values: object, bits: int, encoder: str | Method | None) -> _Job:
    chosen = method(encoder, checked_bits(bits))
    if chosen.name not in ENCODERS:
        raise InvalidInputError(f"unknown encoder {chosen.name!r}; known are {', '.join(sorted(ENCODERS))}")
    if not isinstance(values, np.ndarray) or values.ndim != 2:
        raise InvalidInputError("values must be a numpy array of two dimensions")
    checked_columns(values.shape[1])
    dtype = dtypes.name_of(values.dtype)
    if dtype not in dtypes.FLOATING:
        raise InvalidInputError(f"values must be one of {', '.join(sorted(dtypes.FLOATING))}, not {dtype}")
    return _Job(values=np.asarray(values), bits=checked_bits(bits), dtype=dtype, method=chosen)


def _fill(codes: U8, job: _Job, qparams_dtype: str, *, may_widen: bool) -> tuple[Array, int, float]:
    """Fill `codes`; the qparams, how many rows are exact, and the error bound."""
    total, columns = job.values.shape
    qparams = np.empty((total, 2), qparams_dtype)
    kernels = engine.kernels(job.values.size) if job.method.name in _COMPILED else None
    fill: Callable[[slice], tuple[int, float]] = (
        partial(_fill_piece, job, codes, qparams) if kernels is None else _compiled(kernels, job, codes, qparams)
    )
    told = engine.spread(fill, total, columns)
    exact_rows = sum(rows for rows, _ in told)
    if may_widen and exact_rows > total // 100 and _float32_saves_any(job, qparams):
        del qparams, fill
        return _fill(codes, job, "float32", may_widen=False)
    return qparams, exact_rows, max((bound for _, bound in told), default=0.0)


def _fill_piece(job: _Job, codes: U8, qparams: Array, rows: slice) -> tuple[int, float]:
    """Fill some rows; how many of them are exact, and the error bound of the others."""
    exact_rows, bound = 0, 0.0
    with np.errstate(all="ignore"):
        for piece in _pieces(rows, job.values.shape[1]):
            given = _rows_of(job.values[piece])
            raw, pairs, exact = _encoded(given, job, qparams.dtype.name)
            exact_rows += int(np.count_nonzero(exact))
            bound = max(bound, float(np.max(_error_bounds(given, pairs, job), where=~exact, initial=0)))
            raw[exact], pairs[exact] = 0, np.nan
            pack(raw, job.bits, out=codes[piece])
            qparams[piece] = pairs
    return exact_rows, bound


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompiledEncoding:
    """Fills some rows as `_fill_piece` does, with the compiled kernels; all are there before threads call it."""

    measure: Callable[..., None]
    search: Callable[..., None]
    write: Callable[..., float]
    widen: Callable[..., None]
    direct: bool
    job: _Job
    codes: U8
    qparams: Array

    def __call__(self, piece: slice) -> tuple[int, float]:
        job, pairs = self.job, self.qparams[piece].reshape(-1)
        rows, half = len(pairs) // 2, pairs.dtype == np.float16
        source, columns = self._source(job.values[piece]), job.values.shape[1]
        low, high, scale, bias = np.empty((4, rows), np.float32)
        negative, exact = np.empty((2, rows), np.uint8)
        name = job.method.name
        measured = (low, high, scale, bias)
        self.measure(*source, columns, job.bits, name == "symmetric", half, *measured, negative, exact)
        if name in _SEARCHING:
            greedily = name == "greedy"
            self.search(*source, columns, job.bits, half, greedily, job.options, *measured, exact)
        relative, absolute = _HALF_UNITS.get(job.dtype, (0.0, 0.0))
        wide = 2.0**-149 if job.dtype == "float64" else 0.0
        bound = self.write(
            *source,
            columns,
            job.bits,
            (relative, absolute, wide, _CAST_LIMITS.get(job.dtype, np.inf)),
            *measured,
            negative,
            exact,
            self.codes[piece].reshape(-1),
            pairs.view(np.uint32) if half else np.empty(0, np.uint32),
            np.empty(0, np.uint64) if half else pairs.view(np.uint64),
        )
        return int(np.count_nonzero(exact)), bound

    def _source(self, values: Array) -> tuple[F32, Array, bool]:
        """float32, the bits of 16 instead where the kernels read them, and whether those are of bfloat16."""
        brain = self.job.dtype == "bfloat16"
        if self.job.dtype not in _HALF_UNITS:
            if values.dtype != np.float32 or not values.flags.c_contiguous:
                converted = engine.scratch(values.size).reshape(values.shape)
                with np.errstate(all="ignore"):
                    converted[...] = values
                values = converted
            return values.reshape(-1), np.empty(0, np.uint16), brain
        halves = np.ascontiguousarray(values, dtype=dtypes.logical(self.job.dtype)).view(np.uint16).reshape(-1)
        if self.direct:
            return np.empty(0, np.float32), halves, brain
        wide = engine.scratch(values.size)
        self.widen(halves, brain, wide)
        return wide, np.empty(0, np.uint16), brain


def _compiled(kernels: ModuleType, job: _Job, codes: U8, qparams: Array) -> _CompiledEncoding:
    """Compiles what this job needs."""
    direct = job.dtype in _HALF_UNITS and kernels.reads_halves(job.values.shape[1], job.dtype == "bfloat16")
    widened = job.dtype in _HALF_UNITS and not direct
    names = {"measure": True, "search": job.method.name in _SEARCHING, "widen": widened, "write": True}
    found: dict[str, Any] = {
        n: kernels.compiled(getattr(kernels, f"{n}_rows")) if needed else None for n, needed in names.items()
    }
    return _CompiledEncoding(job=job, codes=codes, qparams=qparams, direct=direct, **found)


def _pieces(rows: slice, columns: int) -> Iterator[slice]:
    """The pieces of `rows` that stay in cache."""
    start = rows.start
    return (slice(start + p.start, start + p.stop) for p in row_pieces(rows.stop - start, columns))


def _float32_saves_any(job: _Job, qparams: Array) -> bool:
    """Whether one of the exact rows would not be exact with float32 qparams."""
    with np.errstate(all="ignore"):
        for piece in row_pieces(*job.values.shape):
            exact = np.isnan(qparams[piece, 0])
            if exact.any() and not _encoded(_rows_of(job.values[piece][exact]), job, "float32")[2].all():
                return True
    return False


def _rows_of(piece: Array) -> _Rows:
    values = np.ascontiguousarray(piece, dtype=np.float32)
    if values.shape[1] > _WIDEST_TRANSPOSED:
        low, high = values.min(axis=1), values.max(axis=1)
    else:  # reducing short rows one by one is up to ten times slower
        across = np.ascontiguousarray(values.T)
        low, high = across.min(axis=0), across.max(axis=0)
    low += np.float32(0)  # makes +0.0 of -0.0: which of a row's zeros is taken depends on the layout of memory
    high += np.float32(0)
    return _Rows(values=values, low=low, high=high)


def _encoded(rows: _Rows, job: _Job, qparams_dtype: str) -> tuple[U8, Array, Mask]:
    codes, qparams, exact = job.encoder(rows.values, rows.low, rows.high, job.bits, qparams_dtype)
    return codes, qparams, exact | _inexpressible(rows, qparams, job)


def _inexpressible(rows: _Rows, qparams: Array, job: _Job) -> Mask:
    """Rows that must be exact whatever the encoder: not finite, all of -0.0 (EXA-2), overflow (DEC-2), DEC-3.

    And those of a scale that has no reciprocal.
    """
    scale, bias = qparams.astype(np.float32).T
    top = scale * np.float32((1 << job.bits) - 1) + bias
    ends = np.stack([bias, top]).astype(dtypes.logical(job.dtype))
    expressible = np.isfinite(rows.high - np.minimum(rows.low, bias)) & np.isfinite(ends).all(axis=0)
    expressible &= is_invertible(scale) & ~np.signbit(scale)
    zero = (rows.low == 0) & (rows.high == 0)
    zero[zero] = np.signbit(rows.values[zero]).all(axis=1)
    unfit: Mask = ~expressible | zero
    return unfit


def _error_bounds(rows: _Rows, qparams: Array, job: _Job) -> F64:
    """An upper bound of |decoded - original| for each row that is not exact.

    With M the largest of its |values| and |bias|, and u = 2^-24, rounding moves a float64 value by u M, the search for
    its code by 6 u M, the product by 2 u M and the sum by u M: 2^-20 M covers them. Without a scale only the first
    occurs. The cast of the decoded value to 16 bits moves it no further than back to the original. Only torch's codes
    at 8 bits are not the nearest.
    """
    scale, bias = qparams.astype(np.float64).T
    largest = np.maximum(rows.high, -rows.low)
    of_torch = job.method.name == "torch_compat"
    bounds = (narrow_reach if of_torch else reach)(rows.low, rows.high, qparams, job.bits) * (1 + _ROUNDING)
    rounded = (scale > 0) | (job.dtype == "float64")
    bounds += np.where(rounded, _ROUNDING * np.maximum(largest, np.abs(bias)), 0)
    bounds += 2.0**-149 if job.dtype == "float64" else 0
    if of_torch and job.bits == 8:
        bounds += np.minimum(ADDED, rows.high.astype(np.float64) - rows.low)
    if job.dtype in _HALF_UNITS:
        relative, absolute = _HALF_UNITS[job.dtype]
        bounds += np.minimum(bounds, relative * (largest + bounds) + absolute)
    return bounds


def _taken(values: Array, index: npt.NDArray[np.int64], dtype: str) -> Array:
    taken = np.empty((len(index), values.shape[1]), dtypes.logical(dtype))
    for piece in row_pieces(*taken.shape):
        taken[piece] = values[index[piece]]
    return taken
