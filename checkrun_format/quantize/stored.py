"""Scales, biases and codes as they are stored; for `kernels`."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from checkrun_format.quantize.vectors import pack3, pack5, pack6, pack7

I32, U8, U16, U32, U64 = np.int32, np.uint8, np.uint16, np.uint32, np.uint64
F32, F64 = np.float32, np.float64


@register_jitable
def stored_scales(scales, half, out):
    """`stored_scale`, as float32."""
    rounded = np.empty(scales.size, F64)
    if half:
        _to_halves(scales, rounded)
    else:
        bits, short = scales.view(U64), rounded.view(U64)
        for r in range(scales.size):
            b = bits[r]
            short[r] = (b + U64((1 << 36) - 1) + ((b >> U64(37)) & U64(1))) & U64(0xFFFFFFE000000000)
    for r in range(scales.size):
        out[r] = F32(rounded[r])


@register_jitable
def stored_biases(biases, half, out):
    """Biases as they are stored, as float32."""
    rounded = np.empty(biases.size if half else 0, F64)
    if half:
        _to_halves(biases, rounded)
    for r in range(biases.size):
        out[r] = F32(rounded[r] if half else biases[r])


@register_jitable
def _to_halves(values, out):
    """Round float64 to the nearest float16, ties to even; what is beyond the largest becomes infinite."""
    rounded = np.empty(values.size, F64)
    given, bits = values.view(U64), rounded.view(U64)
    for r in range(values.size):
        b = given[r] & U64(0x7FFFFFFFFFFFFFFF)
        bits[r] = (b + U64((1 << 41) - 1) + ((b >> U64(42)) & U64(1))) & U64(0xFFFFFC0000000000)
    for r in range(values.size):
        v = values[r]
        small = (abs(v) + 402653184.0) - 402653184.0  # 1.5 * 2^28: doubles there are 2^-24 apart
        magnitude = small if abs(v) < 2.0**-14 else rounded[r]
        magnitude = np.inf if magnitude > 65504.0 else magnitude
        out[r] = -magnitude if v < 0 else magnitude


@register_jitable
def store(scale, bias, exact, halves, singles):
    """Store pairs of scale and bias, NaN in exact rows.

    Of the scales their reciprocals are left; what is left of both gives codes 0 in exact rows, and at scale 0.
    """
    if halves.size:
        low, high = scale.view(I32), bias.view(I32)
        for r in range(exact.size):
            pair = U32(_half_bits(low[r], scale[r]) | U32(_half_bits(high[r], bias[r]) << U32(16)))
            halves[r] = U32(0x7E007E00) if exact[r] else pair
    else:
        ones, others = scale.view(U32), bias.view(U32)
        for r in range(exact.size):
            pair = U64(ones[r]) | (U64(others[r]) << U64(32))
            singles[r] = U64(0x7FC000007FC00000) if exact[r] else pair
    for r in range(exact.size):
        bias[r] = F32(0) if exact[r] else bias[r]
        inverse = F32(F32(1) / scale[r])
        scale[r] = F32(0) if (exact[r] != 0) | (scale[r] == 0) else inverse


@register_jitable
def _half_bits(bits, value):
    """The bits of a float32 value that is a float16."""
    m = I32(bits & I32(0x7FFFFFFF))
    small = I32(F32(abs(value) * F32(16777216)))
    h = small if m < I32(0x38800000) else I32(I32(m >> I32(13)) - I32(112 << 10))
    return U32(I32(h | I32(I32(bits >> I32(16)) & I32(0x8000))))


@register_jitable
def pack_rows(codes, stride, rows, columns, bits, out, width):
    """`pack` of rows that lie `stride` apart, with zeros up to a whole word."""
    if bits == 4:
        pairs = codes[: rows * stride].view(U16)
        for n in range(out.size):
            w = pairs[n]
            out[n] = U8(w | U16(w >> U16(4)))
    elif bits == 2:
        fours = codes[: rows * stride].view(U32)
        for n in range(out.size):
            w = fours[n]
            out[n] = U8(w | U32(w >> U32(6)) | U32(w >> U32(12)) | U32(w >> U32(18)))
    elif bits == 1:
        eights = codes[: rows * stride].view(U64)
        for n in range(out.size):
            w = eights[n]
            w |= w >> U64(7)
            w |= w >> U64(14)
            out[n] = U8(w | (w >> U64(28)))
    else:
        words = codes[: rows * stride].view(U64)
        per_row = stride // 8
        if columns % 8 == 0:
            blocks = out.size // (8 * bits)
            if bits == 3:
                pack3(words, blocks, out)
            elif bits == 5:
                pack5(words, blocks, out)
            elif bits == 6:
                pack6(words, blocks, out)
            else:
                pack7(words, blocks, out)
            _pack_words(words[8 * blocks :], bits, out[8 * blocks * bits :])
        else:
            for r in range(rows):
                _pack_words(words[r * per_row : (r + 1) * per_row], bits, out[r * width : (r + 1) * width])


@register_jitable
def _pack_words(words, bits, out):
    b, size = U64(bits), U64(bits)
    whole = U64(out.size) // size
    for g in range(whole):
        w, o = _folded(words[g], b), U64(g) * size
        out[o] = U8(w)
        out[o + U64(1)] = U8(w >> U64(8))
        out[o + U64(2)] = U8(w >> U64(16))
        if bits > 3:
            out[o + U64(3)] = U8(w >> U64(24))
            out[o + U64(4)] = U8(w >> U64(32))
        if bits > 5:
            out[o + U64(5)] = U8(w >> U64(40))
        if bits > 6:
            out[o + U64(6)] = U8(w >> U64(48))
    if whole < U64(words.size):
        w, part = _folded(words[whole], b), out[whole * size :]
        for k in range(part.size):
            part[k] = U8(w >> U64(8 * k))


@register_jitable
def _folded(w, b):
    w = (w & U64(0x00FF00FF00FF00FF)) | (((w >> U64(8)) & U64(0x00FF00FF00FF00FF)) << b)
    w = (w & U64(0x0000FFFF0000FFFF)) | (((w >> U64(16)) & U64(0x0000FFFF0000FFFF)) << (b + b))
    return (w & U64(0x00000000FFFFFFFF)) | ((w >> U64(32)) << (b + b + b + b))
