"""Elements of a row as vectors of LLVM: codes to values and back, 16 bits to 32 and back, codes packed, extremes.

What numba makes of such loops depends on their lengths and on what else stands beside them; here it is one loop over
vectors of ROWS elements, whatever the row. LLVM splits vectors that are wider than the machine's, on any machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from checkrun_format.quantize.lines import past_cache

ROWS = 16
"""Elements of a vector, the widest of today's machines."""

_INDEX, _INT = ir.IntType(64), ir.IntType(32)
_SINGLES = ir.VectorType(ir.FloatType(), ROWS)
_BYTES, _SHORTS, _INTS = (ir.VectorType(ir.IntType(bits), ROWS) for bits in (8, 16, 32))


def has_any(*features: str) -> bool:
    """Whether what is compiled may use any of some features: of this machine, or of the one that numba is told of."""
    told: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]  # made as numba is imported
    if told is not None:
        return any(f"+{name}" in told.split(",") for name in features)
    return any(llvm.get_host_cpu_features().get(name, False) for name in features)


@contextlib.contextmanager
def _blocks(builder: Any, columns: Any) -> Iterator[Any]:
    """Loop over the columns at which vectors begin; the last ones come twice where ROWS does not divide them."""
    rows = ir.Constant(_INDEX, ROWS)
    count = builder.sdiv(builder.add(columns, ir.Constant(_INDEX, ROWS - 1)), rows)
    last = builder.sub(columns, rows)
    with cgutils.for_range(builder, count) as loop:
        column = builder.mul(loop.index, rows)
        yield builder.select(builder.icmp_signed("<", column, last), column, last)


def _by_row(convert: Callable[[Any, Any, Sequence[Any]], Any], given: Any, made: Any) -> Any:
    """A function `f(source, start, columns, one, two, three, target, begin)` of a row of at least ROWS columns.

    `convert` makes of ROWS elements, and of the three float32 numbers in vectors, those of the target.
    """

    def by_row(  # noqa: PLR0917
        _: Any, source: Any, start: Any, columns: Any, one: Any, two: Any, three: Any, target: Any, begin: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            def pointer(index: int, at: Any, kind: Any) -> Any:
                array = context.make_array(signature.args[index])(context, builder, arguments[index])
                return builder.bitcast(builder.gep(array.data, [at]), kind.as_pointer())

            numbers = [_spread(builder, arguments[n]) for n in (3, 4, 5)]
            with _blocks(builder, arguments[2]) as column:
                values = builder.load(pointer(0, builder.add(arguments[1], column), given), align=1)
                place = pointer(6, builder.add(arguments[7], column), made)
                builder.store(convert(builder, values, numbers), place, align=1)
            return context.get_dummy_value()

        return types.void(source, start, columns, one, two, three, target, begin), generate

    return intrinsic(by_row)


def _spread(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_SINGLES, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * ROWS))


def _code(builder: Any, values: Any, numbers: Sequence[Any]) -> Any:
    """The nearest code to each value, by the reciprocal of the scale, bias and 2^bits - 1; 0 for NaN."""
    inverse, bias, top = numbers
    zero = builder.fsub(top, top)  # of the constant, LLVM would make two operations in place of one
    steps = builder.fmul(builder.fsub(values, bias), inverse)
    steps = builder.select(builder.fcmp_ordered(">", steps, zero), steps, zero)
    steps = builder.select(builder.fcmp_ordered("<", steps, top), steps, top)
    kind = ir.FunctionType(_SINGLES, [_SINGLES])
    rint = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{ROWS}f32")
    return builder.trunc(builder.fptosi(builder.call(rint, [steps]), _INTS), _BYTES)


def _value(builder: Any, codes: Any, numbers: Sequence[Any]) -> Any:
    """float32(code) * scale, rounded, + bias, rounded (DEC-1)."""
    product = builder.fmul(builder.sitofp(builder.zext(codes, _INTS), _SINGLES), numbers[0])
    return builder.fadd(product, numbers[1])


HAS_HALVES = has_any("f16c", "fullfp16")
"""Whether the machine converts float16 itself; where it does not, LLVM would call what is not there."""

_HALVES = ir.VectorType(ir.HalfType(), ROWS)


def _converted(convert: Callable[[Any, Any], Any], given: Any, made: Any) -> Any:
    """A function `f(source, target, blocks)` that converts vectors of ROWS elements."""

    def converted(_: Any, source: Any, target: Any, blocks: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            def data(index: int, kind: Any) -> Any:
                array = context.make_array(signature.args[index])(context, builder, arguments[index])
                return builder.bitcast(array.data, kind.as_pointer())

            with cgutils.for_range(builder, arguments[2]) as loop:
                values = builder.load(builder.gep(data(0, given), [loop.index]), align=2)
                builder.store(convert(builder, values), builder.gep(data(1, made), [loop.index]), align=2)
            return context.get_dummy_value()

        return types.void(source, target, blocks), generate

    return intrinsic(converted)


widen_blocks = _converted(lambda builder, values: builder.fpext(values, _SINGLES), _HALVES, _SINGLES)
narrow_blocks = _converted(lambda builder, values: builder.fptrunc(values, _HALVES), _SINGLES, _HALVES)


def _from_brains(builder: Any, bits: Any) -> Any:
    lifted = builder.shl(builder.zext(bits, _INTS), ir.Constant(_INTS, [16] * ROWS))
    return builder.bitcast(lifted, _SINGLES)


def _to_brains(builder: Any, values: Any) -> Any:
    """Rounded to nearest, ties to even; none of them may be NaN."""
    bits = builder.bitcast(values, _INTS)
    half, one, size = (ir.Constant(_INTS, [number] * ROWS) for number in (0x7FFF, 1, 16))
    odd = builder.and_(builder.lshr(bits, size), one)
    rounded = builder.add(builder.add(bits, half), odd)
    return builder.trunc(builder.lshr(rounded, size), _SHORTS)


singles_of_halves = _by_row(lambda builder, halves, _: builder.fpext(halves, _SINGLES), _HALVES, _SINGLES)
singles_of_brains = _by_row(lambda builder, bits, _: _from_brains(builder, bits), _SHORTS, _SINGLES)
codes_of_row = _by_row(_code, _SINGLES, _BYTES)
codes_of_halves = _by_row(
    lambda builder, halves, numbers: _code(builder, builder.fpext(halves, _SINGLES), numbers), _HALVES, _BYTES
)
codes_of_brains = _by_row(
    lambda builder, bits, numbers: _code(builder, _from_brains(builder, bits), numbers), _SHORTS, _BYTES
)
values_of_row = _by_row(_value, _BYTES, _SINGLES)
halves_of_row = _by_row(
    lambda builder, codes, numbers: builder.fptrunc(_value(builder, codes, numbers), _HALVES), _BYTES, _HALVES
)
brains_of_row = _by_row(
    lambda builder, codes, numbers: _to_brains(builder, _value(builder, codes, numbers)), _BYTES, _SHORTS
)


def _codes_at(builder: Any, place: Any, bits: int) -> Any:
    """ROWS codes of 2 * bits bytes. Each lies within two bytes, which are put together, moved down and masked."""
    count = 2 * bits
    given = builder.load(builder.bitcast(place, ir.VectorType(ir.IntType(8), count).as_pointer()), align=1)
    if bits == 8:
        return given
    first = [lane * bits // 8 for lane in range(ROWS)]
    mask = ir.Constant(ir.VectorType(_INT, 2 * ROWS), [min(byte + n, count - 1) for byte in first for n in (0, 1)])
    pairs = builder.bitcast(builder.shuffle_vector(given, given, mask), _SHORTS)
    shifts = ir.Constant(_SHORTS, [lane * bits % 8 for lane in range(ROWS)])
    ones = ir.Constant(_SHORTS, [(1 << bits) - 1] * ROWS)
    return builder.trunc(builder.and_(builder.lshr(pairs, shifts), ones), _BYTES)


def _unpacked(bits: int) -> Any:
    """A function `f(packed, start, blocks, codes, begin)`: from byte `start` on, ROWS codes of each 2 * bits bytes."""

    def unpacked(_: Any, packed: Any, start: Any, blocks: Any, codes: Any, begin: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            def pointer(index: int, at: Any) -> Any:
                array = context.make_array(signature.args[index])(context, builder, arguments[index])
                return builder.gep(array.data, [at])

            with cgutils.for_range(builder, arguments[2]) as loop:
                at = builder.add(arguments[1], builder.mul(loop.index, ir.Constant(_INDEX, 2 * bits)))
                to = builder.add(arguments[4], builder.mul(loop.index, ir.Constant(_INDEX, ROWS)))
                found = _codes_at(builder, pointer(0, at), bits)
                builder.store(found, builder.bitcast(pointer(3, to), _BYTES.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(packed, start, blocks, codes, begin), generate

    return intrinsic(unpacked)


unpack3, unpack5, unpack6, unpack7 = (_unpacked(bits) for bits in (3, 5, 6, 7))


@intrinsic
def lines_of_rows(  # noqa: PLR0917
    _: Any, packed: Any, rows: Any, count: Any, columns: Any, bits: Any, pairs: Any, target: Any, at: Any
) -> Any:
    """Decode some rows of packed codes to whole lines that are written past the cache (`lines`).

    The first `count` of `rows` are decoded by scale and bias in `pairs`, to the elements of the target that `at` names.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        arrays = [
            context.make_array(kind)(context, builder, array).data if isinstance(kind, types.Array) else array
            for kind, array in zip(signature.args, arguments, strict=True)
        ]
        packed, rows, count, columns, bits, pairs, target, at = arrays

        def times(number: Any, size: int) -> Any:
            return builder.mul(number, ir.Constant(_INDEX, size))

        def element(array: Any, place: Any) -> Any:
            return builder.load(builder.gep(array, [place]))

        blocks = builder.sdiv(columns, ir.Constant(_INDEX, ROWS))
        end = builder.append_basic_block("end")
        choice = builder.switch(bits, end)
        for width in range(1, 9):
            block = builder.append_basic_block(f"bits{width}")
            choice.add_case(width, block)
            builder.position_at_end(block)
            with cgutils.for_range(builder, count) as row:
                first = times(row.index, 2)
                second = builder.add(first, ir.Constant(_INDEX, 1))
                numbers = [_spread(builder, element(pairs, place)) for place in (first, second)]
                start = times(builder.mul(element(rows, row.index), blocks), 2 * width)
                source, line = builder.gep(packed, [start]), builder.gep(target, [element(at, row.index)])
                with cgutils.for_range(builder, blocks) as column:
                    codes = _codes_at(builder, builder.gep(source, [times(column.index, 2 * width)]), width)
                    place = builder.gep(line, [times(column.index, ROWS)])
                    past_cache(builder, _value(builder, codes, numbers), builder.bitcast(place, _SINGLES.as_pointer()))
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(packed, rows, count, columns, bits, pairs, target, at), generate


_WORDS = ir.VectorType(_INDEX, 8)


def _packed(bits: int) -> Any:
    """A function `f(codes, blocks, packed)`: 8 * bits bytes of each 64 codes, which are given as 64-bit numbers."""

    def packed(_: Any, codes: Any, blocks: Any, packed: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            def data(index: int) -> Any:
                return context.make_array(signature.args[index])(context, builder, arguments[index]).data

            def every(number: int) -> Any:
                return ir.Constant(_WORDS, [number] * 8)

            source, target = builder.bitcast(data(0), _WORDS.as_pointer()), data(2)
            mask = ir.Constant(ir.VectorType(_INT, 8 * bits), [8 * word + n for word in range(8) for n in range(bits)])
            with cgutils.for_range(builder, arguments[1]) as loop:
                words = builder.load(builder.gep(source, [loop.index]), align=1)
                for count in (1, 2, 4):  # codes that stand side by side already
                    low = sum(((1 << count * 8) - 1) << at for at in range(0, 64, count * 16))
                    high = builder.and_(builder.lshr(words, every(count * 8)), every(low))
                    words = builder.or_(builder.and_(words, every(low)), builder.shl(high, every(count * bits)))
                octets = builder.bitcast(words, ir.VectorType(ir.IntType(8), 64))
                place = builder.gep(target, [builder.mul(loop.index, ir.Constant(_INDEX, 8 * bits))])
                made = builder.shuffle_vector(octets, octets, mask)
                builder.store(made, builder.bitcast(place, made.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(codes, blocks, packed), generate

    return intrinsic(packed)


pack3, pack5, pack6, pack7 = (_packed(bits) for bits in (3, 5, 6, 7))


@intrinsic
def extremes_of_row(_: Any, source: Any, start: Any, columns: Any, least: Any, most: Any, at: Any) -> Any:
    """The least and the largest of a row of at least ROWS columns go to element `at` of two arrays.

    The elements are the bits of floats, as int16. They are compared in the order of the floats, -0.0 below +0.0, NaN at
    the ends, and what is found stays as it is compared: negative ones have all bits but the sign turned.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        def pointer(index: int, place: Any) -> Any:
            array = context.make_array(signature.args[index])(context, builder, arguments[index])
            return builder.gep(array.data, [place])

        def called(name: str, result: Any, *given: Any) -> Any:
            function = ir.FunctionType(result, [_SHORTS] * len(given))
            made = cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.v{ROWS}i16")
            return builder.call(made, given)

        names = ("smin", "smax")
        found = [cgutils.alloca_once_value(builder, ir.Constant(_SHORTS, [n] * ROWS)) for n in (0x7FFF, -0x8000)]
        sign, rest = (ir.Constant(_SHORTS, [n] * ROWS) for n in (15, 0x7FFF))
        with _blocks(builder, arguments[2]) as column:
            place = builder.bitcast(pointer(0, builder.add(arguments[1], column)), _SHORTS.as_pointer())
            values = builder.load(place, align=1)
            ordered = builder.xor(values, builder.and_(builder.ashr(values, sign), rest))
            for name, so_far in zip(names, found, strict=True):
                builder.store(called(name, _SHORTS, builder.load(so_far), ordered), so_far)
        for name, so_far, index in zip(names, found, (3, 4), strict=True):
            end = called(f"vector.reduce.{name}", ir.IntType(16), builder.load(so_far))
            builder.store(end, pointer(index, arguments[5]))
        return context.get_dummy_value()

    return types.void(source, start, columns, least, most, at), generate
