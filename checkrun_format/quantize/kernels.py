"""Compiled counterparts of the reference: one pass over memory, the same bits. Imported with the first large array.

Rows go in blocks that stay in the first-level cache. What made numba fast: one-dimensional slices, casts after every
operation on int32 (else it becomes int64), codes by `uint8(int32(rint(float32)))`, no fastmath. Without fastmath
nothing is contracted to a fused multiply-add (DEC-1) nor summed in another order.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import register_jitable

from checkrun_format import packing
from checkrun_format.quantize import decoding, lanes, lines, stored, trials, vectors
from checkrun_format.quantize.decoding import BLOCK, decode_rows, widen_rows
from checkrun_format.quantize.lanes import LANES, WIDTH
from checkrun_format.quantize.stored import pack_rows, store, stored_biases, stored_scales
from checkrun_format.quantize.trials import MOVING_BITS, NARROWEST, SHIFTS, risk
from checkrun_format.quantize.vectors import (
    HAS_HALVES,
    ROWS,
    codes_of_brains,
    codes_of_halves,
    codes_of_row,
    extremes_of_row,
    singles_of_brains,
    singles_of_halves,
)

I16, I32, U8, U16, U32, U64 = np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64
F32, F64 = np.float32, np.float64


def given(dtype: Any) -> types.Array:
    """The type of an array that a kernel reads."""
    return types.Array(dtype, 1, "C", readonly=True)


def filled(dtype: Any) -> types.Array:
    """The type of an array that a kernel writes."""
    return types.Array(dtype, 1, "C")


_SINGLE, _BYTE, _SIZE = types.float32, types.uint8, types.int64
_SOURCE = given(_SINGLE), given(types.uint16), types.boolean


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `_SIGNATURES`, compiled."""
    return compiled_as(function, [_SIGNATURES[function]])


def compiled_as(function: Callable[..., Any], signatures: Sequence[tuple[Any, ...]]) -> Callable[..., Any]:
    """A function compiled for these types, by way of the cache on disk where there is room for one."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        function.__qualname__ = f"{function.__name__}_{_digest()}"  # by which numba finds it in the cache
        return numba.njit(list(signatures), cache=True, **options)(function)
    except (OSError, RuntimeError):  # no folder for the cache, or none that can be written
        return numba.njit(list(signatures), **options)(function)


@functools.cache
def _digest() -> str:
    """Of what the kernels are made of besides their own module, which is all that numba looks at for changes."""
    texts = [inspect.getsource(module) for module in (decoding, lanes, lines, packing, stored, trials, vectors)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


lanes_greedy, lanes_moves, lanes_squared_error = lanes.greedy, lanes.moves, lanes.squared_error
lanes_waves, lanes_normalize = lanes.waves, lanes.normalize

_RANGE = 2 + len(SHIFTS)
"""Numbers of a trial above 4 bits."""

_RISKS = tuple(float(risk(bits)) for bits in range(1, 9))


def reads_halves(columns: int, brain: bool) -> bool:  # noqa: FBT001
    """Whether `measure_rows`, `search_rows` and `write_rows` read rows of so many float16 or bfloat16 themselves."""
    return columns >= ROWS and (brain or HAS_HALVES)


def measure_rows(flat, halves, brain, columns, bits, symmetric, half, low, high, scale, bias, negative, exact):
    """The extremes of rows, and what `minmax` or `symmetric` makes of them.

    Parameters
    ----------
    flat : float32 array (n * columns,)
    halves : uint16 array (n * columns,)
        That of them which is not empty has the values, as float32 or as the bits of float16 or bfloat16; the latter
        only for rows of at least ROWS columns, and float16 only if HAS_HALVES.
    brain : bool
        Which of the two.
    columns, bits : int
    symmetric, half : bool
        Which encoder; whether the qparams are float16.
    low, high, scale, bias : float32 array (n,)
        Are filled.
    negative, exact : uint8 array (n,)
        Are filled with 1 for rows that are all -0.0; that break DEC-5.
    """
    if halves.size:
        _extremes_of_halves(halves, brain, columns, low, high, negative)
    else:
        _extremes(flat.view(I32), columns, low, high, negative)
    step, first = np.empty(exact.size, F64), np.empty(exact.size, F64)
    steps = F64(max((1 << bits) - 2, 1) if symmetric else (1 << bits) - 1)
    for r in range(exact.size):
        a, b = low[r], high[r]
        largest = F32((b if b > -a else -a) + F32(0))
        a = F32(F32(0) - largest) if symmetric else a
        b = largest if symmetric else b
        first[r] = F64(a)
        step[r] = (F64(b) - F64(a)) / steps
    stored_scales(step, half, scale)
    stored_biases(first, half, bias)
    top = F64((1 << bits) - 1)
    for r in range(exact.size):
        reached = _reach(F64(low[r]), F64(high[r]), F64(scale[r]), F64(bias[r]), top)
        exact[r] = U8(0) if reached <= 0.505 * step[r] else U8(1)


def write_rows(
    flat, halves, brain, columns, bits, cast, low, high, scale, bias, negative, exact, codes, pairs, singles
):
    """Codes, packed, and qparams as they are stored; rows that must be exact (EXA-2).

    Parameters
    ----------
    flat, halves, brain, columns, bits, low, high, scale, bias, negative, exact
        As `measure_rows` has them, or with better scales and biases. `scale` and `bias` are used up.
    cast : tuple of four floats
        Half a unit in the last place of the cast of DEC-2, relative and absolute; what a float64 source adds to the
        bound; the smallest magnitude that overflows in the cast.
    codes : uint8 array (n * packed width,)
        Receives the packed codes.
    pairs, singles : uint32 and uint64 array (n,)
        That of them which is not empty receives the bits of scale and, above them, bias.

    Returns
    -------
    float
        The error bound of the rows that are not exact.
    """
    top, rows = F32((1 << bits) - 1), exact.size
    _inexpressible(low, high, negative, scale, bias, top, F32(cast[3]), exact)
    bound = _bound(low, high, scale, bias, F64(top), cast, exact)
    store(scale, bias, exact, pairs, singles)
    if bits == 8:
        _codes(flat, halves, brain, 0, columns, scale, bias, top, codes, columns)
        return bound
    size = max(1, min(rows, BLOCK // columns))
    width = (columns * bits + 7) // 8
    stride = width * (8 // bits) if 8 % bits == 0 else (columns + 7) // 8 * 8
    buffer = np.zeros(size * stride, U8)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        stop = start + count
        _codes(flat, halves, brain, start, columns, scale[start:stop], bias[start:stop], top, buffer, stride)
        pack_rows(buffer, stride, count, columns, bits, codes[start * width : stop * width], width)
    return bound


@register_jitable
def _extremes(ints, columns, low, high, negative):
    """The extremes of each row, zeros as +0.0; NaN if it has one; and whether all of a row is -0.0.

    The bits of floats are mapped to integers of the same order, -0.0 below +0.0, NaN at the ends.
    """
    least, most = low.view(I32), high.view(I32)
    for r in range(low.size):
        row = ints[r * columns : (r + 1) * columns]
        a, b = I32(0x7FFFFFFF), I32(-0x80000000)
        for j in range(columns):
            v = row[j]
            ordered = I32(v ^ I32(I32(v >> I32(31)) & I32(0x7FFFFFFF)))
            a = min(a, ordered)
            b = max(b, ordered)
        least[r] = a
        most[r] = b
    for r in range(low.size):
        a, b = least[r], most[r]
        negative[r] = (a == -1) & (b == -1)
        least[r] = I32(a ^ I32(I32(a >> I32(31)) & I32(0x7FFFFFFF)))
        most[r] = I32(b ^ I32(I32(b >> I32(31)) & I32(0x7FFFFFFF)))
    for r in range(low.size):
        low[r] += F32(0)
        high[r] += F32(0)


@register_jitable
def _extremes_of_halves(halves, brain, columns, low, high, negative):
    """`_extremes` of float16 or bfloat16, by their bits."""
    rows, ints = low.size, halves.view(I16)
    ends, wide = np.zeros(2 * rows + ROWS, I16), np.empty(2 * rows + ROWS, F32)
    least, most = ends[:rows], ends[rows:]
    for r in range(rows):
        extremes_of_row(ints, r * columns, columns, least, most, r)
    for r in range(rows):
        negative[r] = (least[r] == -1) & (most[r] == -1)
    for n in range(ends.size):
        ends[n] = I16(ends[n] ^ I16(I16(ends[n] >> I16(15)) & I16(0x7FFF)))
    _singles(ends.view(U16), 0, ends.size, brain, wide, 0)
    for r in range(rows):
        low[r], high[r] = wide[r] + F32(0), wide[rows + r] + F32(0)


@register_jitable
def _singles(halves, start, count, brain, out, begin):
    """At least ROWS float16 or bfloat16, by their bits, as float32."""
    none = F32(0)
    if brain:
        singles_of_brains(halves, start, count, none, none, none, out, begin)
    elif HAS_HALVES:
        singles_of_halves(halves, start, count, none, none, none, out, begin)


@register_jitable
def _reach(low, high, scale, bias, top):
    below, above = bias - low, high - (bias + scale * top)
    farthest = 0.5 * scale
    farthest = below if below > farthest else farthest
    return above if above > farthest else farthest


def search_rows(flat, halves, brain, columns, bits, half, greedily, options, low, high, scale, bias, exact):
    """`refine` or `greedy`: better scale and bias for those rows where it finds them; many rows at a time.

    Parameters are those of `measure_rows`, and `options`: for `refine` the trials, for `greedy` the step and the number
    of steps.
    """
    rows, top = exact.size, F32((1 << bits) - 1)
    padded = (rows + LANES - 1) // LANES * LANES
    values, wide = np.empty(columns * LANES, F32), np.empty(columns * LANES if halves.size else 0, F32)
    first, inverse, starts = np.empty(padded, F32), np.empty(padded, F32), np.empty(LANES, np.int64)
    found = np.empty(4 * padded, F32)
    for r in range(padded):
        n = min(r, rows - 1)
        first[r] = low[n]
        inverse[r] = F32(top / F32(high[n] - low[n]))
    for start in range(0, padded, LANES):
        for l in range(LANES):
            starts[l] = min(start + l, rows - 1) * columns
        _normalize(flat, halves, brain, columns, starts, first[start:], inverse[start:], wide, values)
        if greedily:
            lanes_greedy(values, columns, top, options, np.int64(options[1]), found[start:], padded)
        elif bits <= MOVING_BITS:
            lanes_moves(values, columns, top, options, options.size // 2, found[start:], padded)
        else:
            lanes_waves(values, columns, top, options, options.size // _RANGE, found[start:], padded)
    origin, width, error, pivot = found[:rows], found[padded:], found[2 * padded :], found[3 * padded :]
    scales, biases = np.empty(rows, F64), np.empty(rows, F64)
    new_scale, new_bias, better = np.empty(rows, F32), np.empty(rows, F32), np.empty(rows, U8)
    for r in range(rows):
        scales[r] = F64(width[r]) * ((F64(high[r]) - F64(low[r])) / F64(top))
    stored_scales(scales, half, new_scale)
    for r in range(rows):
        turned = F64(new_scale[r]) / scales[r]
        origin[r] = F32(F64(pivot[r]) + F64(F32(origin[r] - pivot[r])) * turned)
        biases[r] = F64(low[r]) + F64(origin[r]) * ((F64(high[r]) - F64(low[r])) / F64(top))
    stored_biases(biases, half, new_bias)
    for r in range(rows):
        new_bias[r] = F32(0) if (low[r] >= 0) & (new_bias[r] <= 0) else new_bias[r]
    risks, share = 0, F32(_RISKS[bits - 1])
    for r in range(rows):
        s, b = F32(new_scale[r] * inverse[r]), F32(F32(new_bias[r] - low[r]) * inverse[r])
        moved = F32(abs(F32(b - origin[r])) + F32(top * abs(F32(s - width[r]))))
        fits = (exact[r] == 0) & (F32(high[r] - low[r]) > NARROWEST) & (width[r] > 0)
        better[r] = (
            U8(0) if not fits else U8(1) if F32(F32(moved * moved) * F32(columns)) < F32(share * error[r]) else U8(2)
        )
        risks += better[r] == 2
    if risks:
        _compare(
            flat, halves, brain, columns, top, low, inverse, scale, bias, new_scale, new_bias, better, wide, values
        )
    for r in range(rows):
        scale[r] = new_scale[r] if better[r] else scale[r]
        bias[r] = new_bias[r] if better[r] else bias[r]


@register_jitable
def _normalize(flat, halves, brain, columns, starts, low, inverse, wide, values):
    """LANES rows, from `starts` on, to lanes, in steps of `minmax`; `starts` of rows of 16 bits are used up."""
    if halves.size:
        for l in range(LANES):
            _singles(halves, starts[l], columns, brain, wide, l * columns)
            starts[l] = l * columns
    for begin in range(0, LANES, WIDTH):
        part = values[begin * columns :]
        if halves.size:
            lanes_normalize(wide, starts[begin:], columns, low[begin:], inverse[begin:], part)
        elif columns >= WIDTH:
            lanes_normalize(flat, starts[begin:], columns, low[begin:], inverse[begin:], part)
        else:
            for j in range(columns):
                for l in range(WIDTH):
                    n = begin + l
                    part[j * WIDTH + l] = F32(F32(flat[starts[n] + j] - low[n]) * inverse[n])


@register_jitable
def _compare(flat, halves, brain, columns, top, low, inverse, scale, bias, new_scale, new_bias, better, wide, values):
    """Where `better` is 2, whether the new scale and bias have at most the squared error of the old."""
    given, errors, ends = np.empty(2 * LANES, F32), np.empty(2 * LANES, F32), np.empty(2 * LANES, F32)
    these, starts = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    count = 0
    for r in range(better.size):
        if better[r] == 2:
            these[count] = r
            count += 1
        if count == 0 or (count < LANES and r < better.size - 1):
            continue
        for l in range(LANES):
            n = these[l if l < count else 0]
            starts[l] = n * columns
            ends[l], ends[LANES + l] = low[n], inverse[n]
        _normalize(flat, halves, brain, columns, starts, ends, ends[LANES:], wide, values)
        for which in range(2):
            for l in range(LANES):
                n = these[l if l < count else 0]
                given[l] = F32(F32((new_bias[n] if which else bias[n]) - low[n]) * inverse[n])
                given[LANES + l] = F32((new_scale[n] if which else scale[n]) * inverse[n])
            lanes_squared_error(values, columns, top, given, 0, errors[which * LANES :], LANES)
        for l in range(count):
            better[these[l]] = U8(errors[LANES + l] <= errors[l])
        count = 0


@register_jitable
def _inexpressible(low, high, negative, scale, bias, top, limit, exact):
    """Rows that must be exact whatever the encoder (EXA-2, DEC-2, DEC-3, `is_invertible`)."""
    for r in range(exact.size):
        end = F32(F32(scale[r] * top) + bias[r])
        fits = abs(F32(high[r] - min(low[r], bias[r]))) < F32(np.inf)
        fits &= (abs(bias[r]) < limit) & (abs(end) < limit)
        fits &= (scale[r] == 0) | ((scale[r] >= F32(2.0**-126)) & (scale[r] <= F32(2.0**126)))
        exact[r] |= U8((not fits) | (negative[r] != 0))


@register_jitable
def _bound(low, high, scale, bias, top, cast, exact):
    """The largest of `_error_bounds` over the rows that are not exact."""
    bounds = np.empty(exact.size, F64)
    relative, absolute, wide, _ = cast
    unit = 2.0**-20
    for r in range(exact.size):
        s, b = F64(scale[r]), F64(bias[r])
        largest = F64(max(high[r], -low[r]))
        bound = _reach(F64(low[r]), F64(high[r]), s, b, top) * (1 + unit)
        bound += unit * max(largest, abs(b)) if (s > 0) | (wide > 0) else 0.0
        bound += wide
        bound += min(bound, relative * (largest + bound) + absolute) if absolute > 0 else 0.0
        bounds[r] = 0.0 if exact[r] else bound
    largest_bits = np.int64(0)
    ordered = bounds.view(np.int64)  # of numbers from 0 on, the bits have the same order
    for r in range(exact.size):
        largest_bits = max(largest_bits, ordered[r])
    bounds.view(np.int64)[0] = largest_bits
    return bounds[0]


@register_jitable
def _codes(flat, halves, brain, first, columns, scale, bias, top, out, stride):
    """The codes of rows from `first` on, as many as there are scales, by their reciprocals."""
    if columns >= ROWS:
        for r in range(scale.size):
            begin = (first + r) * columns
            if halves.size == 0:
                codes_of_row(flat, begin, columns, scale[r], bias[r], top, out, r * stride)
            elif brain:
                codes_of_brains(halves, begin, columns, scale[r], bias[r], top, out, r * stride)
            elif HAS_HALVES:
                codes_of_halves(halves, begin, columns, scale[r], bias[r], top, out, r * stride)
        return
    for r in range(scale.size):
        row = flat[(first + r) * columns : (first + r + 1) * columns]
        line = out[r * stride : r * stride + columns]
        s, b = scale[r], bias[r]
        for j in range(columns):
            t = F32(F32(row[j] - b) * s)
            t = t if t > F32(0) else F32(0)
            t = t if t < top else top
            line[j] = U8(I32(np.rint(t)))


_SIGNATURES: dict[Callable[..., Any], tuple[Any, ...]] = {
    measure_rows: (
        *_SOURCE, _SIZE, _SIZE, types.boolean, types.boolean, *[filled(_SINGLE)] * 4, *[filled(_BYTE)] * 2,
    ),
    search_rows: (
        *_SOURCE, _SIZE, _SIZE, types.boolean, types.boolean, given(_SINGLE), *[filled(_SINGLE)] * 4, filled(_BYTE),
    ),
    write_rows: (
        *_SOURCE, _SIZE, _SIZE, types.UniTuple(types.float64, 4), *[filled(_SINGLE)] * 4,
        *[filled(_BYTE)] * 3, filled(types.uint32), filled(types.uint64),
    ),
    decode_rows: (
        given(_BYTE), given(types.uint16), given(_SINGLE), given(_SIZE), given(types.boolean), _SIZE, _SIZE,
        types.UniTuple(_SIZE, 2), given(_SIZE),
        filled(_SINGLE), filled(types.float64), filled(types.uint16), types.boolean,
    ),
    widen_rows: (given(types.uint16), types.boolean, filled(_SINGLE)),
}  # fmt: skip
