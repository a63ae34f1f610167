"""Decoding, compiled: one pass over memory, the same bits as the reference. Imported with the first large array.

Rows go in blocks that stay in the first-level cache; `kernels` tells how it is written.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from checkrun_format.quantize.lines import is_far, put_run, settle, whole_lines
from checkrun_format.quantize.vectors import (
    HAS_HALVES,
    ROWS,
    brains_of_row,
    halves_of_row,
    lines_of_rows,
    narrow_blocks,
    unpack3,
    unpack5,
    unpack6,
    unpack7,
    values_of_row,
    widen_blocks,
)

I32, U8, U16, U32, U64 = np.int32, np.uint8, np.uint16, np.uint32, np.uint64
F32, F64 = np.float32, np.float64

BLOCK = 4096
"""Elements of one block: 16 KiB of float32."""

LISTED = 1024
"""Rows of one block where only numbers of rows and qparams are kept near by."""


def decode_rows(codes, halves, singles, positions, kept, columns, bits, rows_out, places, single, double, half, brain):
    """Decode rows into that one of three destinations which is not empty (DEC-1, DEC-2).

    Parameters
    ----------
    codes : uint8 array (n * packed width,)
    halves, singles : uint16 and float32 array (2n,)
        That of them which is not empty has the qparams, as the bits of float16 or as float32.
    positions : int64 array
        Which of the n rows; empty: all, in order.
    kept : bool array
        Which of these are decoded; empty: all.
    columns, bits : int
    rows_out : tuple of two int
        Where the first row begins in the destination, and how far it is to the next.
    places : int64 array
        To which row of the destination each one goes, those that are not decoded, too; empty: in order.
    single, double : float32 and float64 array
    half : uint16 array
        The bits of float16, or of bfloat16.
    brain : bool
        Which of the two.
    """
    begin, step = rows_out
    in_lines = whole_lines(single, begin, step, columns)
    rows = kept.size or positions.size or (halves.size + singles.size) // 2
    size = max(1, min(rows, LISTED if in_lines else BLOCK // columns))
    some, at = np.empty(size, np.int64), np.empty(size, np.int64)
    pairs, wide = np.empty(2 * size, U16), np.empty(2 * size, F32)
    width, stride = (columns * bits + 7) // 8, (columns + 7) // 8 * 8
    if 8 % bits == 0:
        stride = columns if bits == 8 else width * (8 // bits)
    made = 0 if in_lines else size
    packed, buffer = np.empty((made * width + 7) // 8, U64).view(U8), np.empty(made * stride + ROWS, U8)
    values = np.empty(made * columns if half.size else columns, F32)
    lifted = np.empty(values.size, F32)
    all_of_them = positions.size == 0 and kept.size == 0
    run = all_of_them and places.size == 0 and step == columns and (is_far(single) or is_far(double))
    near_single = np.empty(min(made * columns, single.size), F32) if run else single
    near_double = np.empty(min(made * columns, double.size), F64) if run else double
    for start in range(0, rows, size):
        count = _chosen(kept, start, min(size, rows - start), some)
        for k in range(count):
            at[k] = begin + step * (places[some[k]] if places.size else some[k])
            some[k] = positions[some[k]] if positions.size else some[k]
        _gather_pairs(halves, some[:count], pairs)
        _gather_pairs(singles, some[:count], wide)
        if halves.size:
            widen(pairs[: 2 * count], brain=False, out=wide)
        if in_lines:
            lines_of_rows(codes, some, count, columns, bits, wide, single, at)
            continue
        if all_of_them:
            _unpack(codes[start * width : (start + count) * width], count, columns, bits, buffer)
        else:
            _gather(codes, width, some[:count], packed)
            _unpack(packed[: count * width], count, columns, bits, buffer)
        if run:
            for k in range(count):
                at[k] = columns * k
        if single.size:
            _affine_single(buffer, stride, columns, count, wide, at, near_single)
        elif double.size:
            _affine_double(buffer, stride, columns, count, wide, at, near_double)
        else:
            _affine_half(buffer, stride, columns, count, wide, at, half, brain, values, lifted)
        if run:
            to = begin + step * start
            put_run(near_single, min(near_single.size, count * columns), single, to)
            put_run(near_double, min(near_double.size, count * columns), double, to)
    settle()


@register_jitable
def _chosen(kept, start, count, out):
    """Which of some numbers are kept; how many."""
    if kept.size == 0:
        for k in range(count):
            out[k] = start + k
        return count
    found = 0
    for k in range(count):
        out[found] = start + k
        found += kept[start + k]
    return found


@register_jitable
def _gather(codes, width, positions, out):
    """Packed rows, one after another."""
    if width % 8 == 0:
        given_words, words, size = codes.view(U64), out.view(U64), width // 8
        for k in range(positions.size):
            row, line = given_words[positions[k] * size :], words[k * size : (k + 1) * size]
            for w in range(size):
                line[w] = row[w]
    else:
        for k in range(positions.size):
            row, line = codes[positions[k] * width :], out[k * width : (k + 1) * width]
            for w in range(width):
                line[w] = row[w]


@register_jitable
def _gather_pairs(pairs, positions, out):
    if pairs.size:
        for k in range(positions.size):
            out[2 * k], out[2 * k + 1] = pairs[2 * positions[k]], pairs[2 * positions[k] + 1]


@register_jitable
def _affine_single(codes, stride, columns, rows, pairs, at, out):
    if columns >= ROWS:
        for k in range(rows):
            values_of_row(codes, k * stride, columns, pairs[2 * k], pairs[2 * k + 1], F32(0), out, at[k])
        return
    for k in range(rows):
        row, line = codes[k * stride : k * stride + columns], out[at[k] : at[k] + columns]
        s, b = pairs[2 * k], pairs[2 * k + 1]
        for j in range(columns):
            line[j] = F32(F32(F32(row[j]) * s) + b)


@register_jitable
def _affine_double(codes, stride, columns, rows, pairs, at, out):
    for k in range(rows):
        row, line = codes[k * stride : k * stride + columns], out[at[k] : at[k] + columns]
        s, b = pairs[2 * k], pairs[2 * k + 1]
        for j in range(columns):
            line[j] = F64(F32(F32(F32(row[j]) * s) + b))


@register_jitable
def _affine_half(codes, stride, columns, rows, pairs, at, out, brain, values, lifted):
    finite = brain
    for n in range(2 * rows):
        finite &= abs(pairs[n]) < F32(np.inf)
    if finite and columns >= ROWS:
        for k in range(rows):
            brains_of_row(codes, k * stride, columns, pairs[2 * k], pairs[2 * k + 1], F32(0), out, at[k])
        return
    if HAS_HALVES and not brain and columns >= ROWS:
        for k in range(rows):
            halves_of_row(codes, k * stride, columns, pairs[2 * k], pairs[2 * k + 1], F32(0), out, at[k])
        return
    start = np.arange(rows) * columns
    _affine_single(codes, stride, columns, rows, pairs, start, values)
    together = True
    for k in range(1, rows):
        together &= at[k] - at[k - 1] == columns
    size = rows * columns if together else columns
    for k in range(1 if together else rows):
        _narrow(values[k * size : (k + 1) * size], brain, lifted, out[at[k] : at[k] + size])


@register_jitable
def _unpack(packed, rows, columns, bits, out):
    if bits == 8:
        for n in range(packed.size):
            out[n] = packed[n]
    elif bits == 4:
        pairs = out.view(U16)
        for n in range(packed.size):
            w = U16(packed[n])
            pairs[n] = U16(w | U16(w << U16(4))) & U16(0x0F0F)
    elif bits == 2:
        fours = out.view(U32)
        for n in range(packed.size):
            w = U32(packed[n])
            fours[n] = U32(w | U32(w << U32(6)) | U32(w << U32(12)) | U32(w << U32(18))) & U32(0x03030303)
    elif bits == 1:
        eights = out.view(U64)
        for n in range(packed.size):
            w = U64(packed[n])
            w |= w << U64(28)
            w |= w << U64(14)
            w |= w << U64(7)
            eights[n] = w & U64(0x0101010101010101)
    else:
        stride, width = (columns + 7) // 8 * 8, (columns * bits + 7) // 8
        if columns % 8 == 0:
            rows, stride, width = 1, rows * stride, rows * width
        for r in range(rows):
            start, begin = r * width, r * stride
            blocks = max(0, min((stride + ROWS - 1) // ROWS, (packed.size - start) // (2 * bits)))
            if bits == 3:
                unpack3(packed, start, blocks, out, begin)
            elif bits == 5:
                unpack5(packed, start, blocks, out, begin)
            elif bits == 6:
                unpack6(packed, start, blocks, out, begin)
            else:
                unpack7(packed, start, blocks, out, begin)
            if blocks * ROWS < stride:
                rest = packed[start + blocks * 2 * bits : start + width]
                _unpack_words(rest, bits, out[begin + blocks * ROWS : begin + stride].view(U64))


@register_jitable
def _unpack_words(packed, bits, words):
    b, size = U64(bits), U64(bits)
    whole = U64(packed.size) // size
    for g in range(whole):
        o = U64(g) * size
        w = U64(packed[o]) | (U64(packed[o + U64(1)]) << U64(8)) | (U64(packed[o + U64(2)]) << U64(16))
        if bits > 3:
            w |= (U64(packed[o + U64(3)]) << U64(24)) | (U64(packed[o + U64(4)]) << U64(32))
        if bits > 5:
            w |= U64(packed[o + U64(5)]) << U64(40)
        if bits > 6:
            w |= U64(packed[o + U64(6)]) << U64(48)
        words[g] = _spread(w, b)
    if whole < U64(words.size):
        part, w = packed[whole * size :], U64(0)
        for k in range(part.size):
            w |= U64(part[k]) << U64(8 * k)
        words[whole] = _spread(w, b)


@register_jitable
def _spread(w, b):
    ones = (U64(1) << (b + b + b + b)) - U64(1)
    w = (w & ones) | (((w >> (b + b + b + b)) & ones) << U64(32))
    ones = ((U64(1) << (b + b)) - U64(1)) * U64(0x0000000100000001)
    w = (w & ones) | (((w >> (b + b)) & ones) << U64(16))
    ones = ((U64(1) << b) - U64(1)) * U64(0x0001000100010001)
    return (w & ones) | (((w >> b) & ones) << U64(8))


@register_jitable
def _narrow(line, brain, lifted, out):
    """Round float32 to the bits of bfloat16 or float16, to nearest, ties to even."""
    bits = line.view(I32)
    if brain:
        for j in range(line.size):
            b = U32(bits[j])
            rounded = U32(U32(b + U32(0x7FFF)) + U32(U32(b >> U32(16)) & U32(1))) >> U32(16)
            quiet = U32(U32(b >> U32(16)) | U32(0x40))
            out[j] = U16(quiet if U32(b & U32(0x7FFFFFFF)) > U32(0x7F800000) else rounded)
        return
    if HAS_HALVES:
        done = line.size // ROWS * ROWS
        narrow_blocks(line, out, line.size // ROWS)
        line, bits, out = line[done:], bits[done:], out[done:]
    for j in range(line.size):
        lifted[j] = F32(abs(line[j]) + F32(0.5))  # floats there are 2^-24 apart, as are subnormal halves
    small = lifted.view(I32)
    for j in range(line.size):
        b = bits[j]
        m = I32(b & I32(0x7FFFFFFF))
        normal = I32(I32(I32(m - I32(112 << 23)) + I32(0xFFF)) + I32(I32(m >> I32(13)) & I32(1))) >> I32(13)
        h = I32(small[j] - I32(0x3F000000)) if m < I32(0x38800000) else I32(normal)
        h = I32(0x7C00) if m >= I32(0x477FF000) else h
        h = I32(0x7E00) if m > I32(0x7F800000) else h
        out[j] = U16(I32(h | I32(I32(b >> I32(16)) & I32(0x8000))))


def widen_rows(halves, brain, out):
    """float16 or bfloat16, by their bits, as float32."""
    widen(halves, brain, out)


@register_jitable
def widen(halves, brain, out):
    bits = out.view(I32)
    if brain:
        for j in range(halves.size):
            bits[j] = I32(halves[j]) << I32(16)
        return
    if HAS_HALVES:
        done = halves.size // ROWS * ROWS
        widen_blocks(halves, out, halves.size // ROWS)
        halves, bits, out = halves[done:], bits[done:], out[done:]
    for j in range(halves.size):
        h = I32(halves[j])
        bits[j] = I32(I32(h & I32(0x7FFF)) << I32(13))
    for j in range(halves.size):
        out[j] = F32(out[j] * F32(2.0**112))  # exact, subnormal ones too
    for j in range(halves.size):
        h = I32(halves[j])
        m = I32(h & I32(0x7FFF))
        special = I32(I32(0x7F800000) | I32(I32(m & I32(0x3FF)) << I32(13)))
        magnitude = special if m >= I32(0x7C00) else bits[j]
        bits[j] = I32(magnitude | I32(I32(h & I32(0x8000)) << I32(16)))
