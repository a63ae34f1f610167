"""The searches of `refine` and `greedy` for many rows at a time, rows as lanes of vectors; for `kernels`.

Sums over the columns of a row must not be reordered, so it is rows that are computed side by side. numba would keep
the sums of such loops in memory; written as vectors of LLVM they stay in registers, which is twice as fast and
compiles several times faster. Vectors have the width of the machine's, for which there are just enough registers; LLVM
splits them where it has narrower ones. The formulas are those of `refine` and `greedy`, which explain them; what is
fused there is fused here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from checkrun_format.quantize.trials import COSINE, LEVEL, SHIFTS, SINE
from checkrun_format.quantize.vectors import has_any

WIDTH = 16 if has_any("avx512f") else 8
"""Elements of a vector."""

LANES = 2 * WIDTH
"""Rows of a search: while one half waits for its sums, the other one adds."""

_INDEX, _INT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_VECTOR, _HALF = ir.VectorType(_FLOAT, LANES), ir.VectorType(_FLOAT, WIDTH)
_UNDEFINED = ir.Constant(_VECTOR, ir.Undefined)


@dataclass(frozen=True, slots=True)
class _Vector:
    """float32 numbers, one of each row."""

    builder: Any
    value: Any

    def _with(self, operation: str, other: _Vector | float) -> _Vector:
        return _Vector(self.builder, getattr(self.builder, operation)(self.value, self._like(other).value))

    def _like(self, other: _Vector | float) -> _Vector:
        if isinstance(other, _Vector):
            return other
        return _Vector(self.builder, ir.Constant(_VECTOR, [float(other)] * LANES))

    def __add__(self, other: _Vector | float) -> _Vector:
        return self._with("fadd", other)

    def __sub__(self, other: _Vector | float) -> _Vector:
        return self._with("fsub", other)

    def __mul__(self, other: _Vector | float) -> _Vector:
        return self._with("fmul", other)

    def __truediv__(self, other: _Vector | float) -> _Vector:
        return self._with("fdiv", other)

    def less(self, other: _Vector | float) -> Any:
        return self.builder.fcmp_ordered("<", self.value, self._like(other).value)

    def where(self, mask: Any, other: _Vector | float) -> _Vector:
        """Itself where `mask` is true, else the other."""
        return _Vector(self.builder, self.builder.select(mask, self.value, self._like(other).value))

    def at_most(self, other: _Vector | float) -> _Vector:
        return self.where(self.less(other), other)

    def at_least(self, other: _Vector | float) -> _Vector:
        """The larger; the other for NaN."""
        return self.where(self._like(other).less(self), other)

    def called(self, name: str) -> _Vector:
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(_VECTOR, [_VECTOR]), f"llvm.{name}.v{LANES}f32"
        )
        return _Vector(self.builder, self.builder.call(function, [self.value]))

    def times_plus(self, factor: _Vector, added: _Vector) -> _Vector:
        """A fused multiply-add."""
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{LANES}f32")
        return _Vector(self.builder, self.builder.call(function, [self.value, factor.value, added.value]))

    def reciprocal(self) -> _Vector:
        return self._like(1.0) / self


@dataclass(frozen=True, slots=True)
class _Variable:
    """A vector that changes; LLVM makes a register of it."""

    builder: Any
    place: Any

    @classmethod
    def of(cls, vector: _Vector) -> _Variable:
        return cls(vector.builder, cgutils.alloca_once_value(vector.builder, vector.value))

    def get(self) -> _Vector:
        return _Vector(self.builder, self.builder.load(self.place))

    def set(self, vector: _Vector) -> None:
        self.builder.store(vector.value, self.place)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Two times WIDTH rows, each time column after column; and 2^bits - 1."""

    builder: Any
    data: Any
    columns: Any
    top: _Vector

    def constant(self, number: float) -> _Vector:
        return _Vector(self.builder, ir.Constant(_VECTOR, [number] * LANES))

    def everywhere(self, scalar: Any) -> _Vector:
        first = self.builder.insert_element(_UNDEFINED, scalar, ir.Constant(_INT, 0))
        zeros = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
        return _Vector(self.builder, self.builder.shuffle_vector(first, _UNDEFINED, zeros))

    def options(self, data: Any, index: Any, count: int) -> list[_Vector]:
        """So many numbers, those of a trial."""
        b = self.builder
        first = b.gep(data, [b.mul(index, ir.Constant(_INDEX, count))])
        return [self.everywhere(b.load(b.gep(first, [ir.Constant(_INDEX, n)]))) for n in range(count)]

    def count(self) -> _Vector:
        return self.everywhere(self.builder.sitofp(self.columns, _FLOAT))

    def codes(self, steps: _Vector) -> _Vector:
        """The nearest codes; 0 for NaN."""
        zero = self.top - self.top  # of the constant, LLVM would make two operations in place of one
        return steps.at_least(zero).at_most(self.top).called("rint")

    def _column(self, index: Any) -> _Vector:
        b = self.builder
        places = (b.gep(self.data, [at]) for at in (index, b.add(index, self.columns)))
        halves = [b.load(place, align=4) for place in places]
        every = ir.Constant(ir.VectorType(_INT, LANES), list(range(LANES)))
        return _Vector(b, b.shuffle_vector(*halves, every))

    def fold(self, body: Callable[[_Vector, list[_Vector]], Sequence[_Vector]], count: int) -> list[_Vector]:
        """Sums from 0 on, after `body` has made of each column and the sums so far the next ones."""
        sums = [_Variable.of(self.constant(0.0)) for _ in range(count)]
        with cgutils.for_range(self.builder, self.columns) as loop:
            value = self._column(loop.index)
            for old, new in zip(sums, body(value, [total.get() for total in sums]), strict=True):
                old.set(new)
        return [total.get() for total in sums]

    def squared_error(self, origin: _Vector, width: _Vector) -> _Vector:
        inverse = width.reciprocal()
        shift = self.constant(0.0) - origin * inverse

        def body(value: _Vector, sums: list[_Vector]) -> Sequence[_Vector]:
            step = value.times_plus(inverse, shift)
            rest = step - self.codes(step)
            return [rest.times_plus(rest, sums[0])]

        return self.fold(body, 1)[0] * (width * width)


@dataclass(slots=True)
class _Best:
    """The best origin, width and error so far."""

    origin: _Variable
    width: _Variable
    error: _Variable

    @classmethod
    def of(cls, rows: _Rows) -> _Best:
        """The full range, worse than any."""
        return cls(*(_Variable.of(rows.constant(start)) for start in (0.0, 1.0, float("inf"))))

    def offer(self, *found: _Vector) -> None:
        less = found[2].less(self.error.get())
        for variable, vector in zip((self.origin, self.width, self.error), found, strict=True):
            variable.set(vector.where(less, variable.get()))


def _moves(rows: _Rows, options: Any, count: Any) -> Sequence[_Vector]:
    total, squares = rows.fold(lambda value, sums: [sums[0] + value, value.times_plus(value, sums[1])], 2)
    best = _Best.of(rows)
    best.offer(*_regressed(rows, total, squares, best.origin.get(), best.width.get()))
    with cgutils.for_range(rows.builder, count) as loop:
        shift, factor = rows.options(options, loop.index, 2)
        width = best.width.get()
        best.offer(*_regressed(rows, total, squares, best.origin.get() + shift * (rows.top * width), width * factor))
    return best.origin.get(), best.width.get(), best.error.get(), total * rows.count().reciprocal()


def _waves(rows: _Rows, options: Any, count: Any) -> Sequence[_Vector]:
    (total,) = rows.fold(lambda value, sums: [sums[0] + value], 1)
    best = _Best.of(rows)
    with cgutils.for_range(rows.builder, count) as loop:
        best.offer(*_wave(rows, *rows.options(options, loop.index, 2 + len(SHIFTS))))
    best.error.set(rows.constant(float("inf")))
    for _ in range(2):
        best.offer(*_regressed(rows, total, None, best.origin.get(), best.width.get()))
    return best.origin.get(), best.width.get(), best.error.get(), total * rows.count().reciprocal()


def _regressed(
    rows: _Rows, total: _Vector, squares: _Vector | None, start: _Vector, size: _Vector
) -> tuple[_Vector, _Vector, _Vector]:
    part, inverse = rows.count().reciprocal(), size.reciprocal()
    shift = rows.constant(0.0) - start * inverse

    def body(value: _Vector, sums: list[_Vector]) -> Sequence[_Vector]:
        code = rows.codes(value.times_plus(inverse, shift))
        told = [sums[0] + code, code.times_plus(code, sums[1])]
        if squares is None:
            rest = value - code
            return [*told, rest.times_plus(code, sums[2]), rest.times_plus(rest, sums[3])]
        return [*told, value.times_plus(code, sums[2])]

    codes, codes_squared, products, *squared = rows.fold(body, 4 if squares is None else 3)
    mean_code = codes * part
    variance = codes_squared - codes * mean_code
    others = total - codes if squares is None else total
    covariance = products - others * mean_code
    varied = rows.constant(0.0).less(variance)
    slope = (covariance / variance).where(varied, 0.0)
    error = (squared[0] if squares is None else squares) - others * (others * part) - covariance * slope
    fitted = (rows.constant(1.0) + slope if squares is None else slope).where(varied, size)
    return total * part - fitted * mean_code, fitted, error


def _wave(rows: _Rows, inverse: _Vector, middle: _Vector, *outside: _Vector) -> tuple[_Vector, _Vector, _Vector]:
    def body(value: _Vector, sums: list[_Vector]) -> Sequence[_Vector]:
        step = value.times_plus(inverse, middle)
        rest = step - step.called("rint")
        square = rest * rest
        cosine, sine = (
            square.times_plus(rows.constant(float(third)), rows.constant(float(second)))
            .times_plus(square, rows.constant(float(first)))
            for first, second, third in (COSINE, SINE)
        )  # fmt: skip
        sine = sine * rest
        return (
            sums[0] + cosine, sums[1] + sine, cosine.times_plus(cosine, sums[2]), sine.times_plus(cosine, sums[3]),
        )  # fmt: skip

    cosines, sines, squares, products = rows.fold(body, 4)
    squares = squares - rows.count() * 0.5
    least, best = rows.constant(float("inf")), rows.constant(0.0)
    for (shift, *factors), cut in zip(SHIFTS.tolist(), outside, strict=True):
        error = cut
        for factor, amount in zip(factors, (products, squares, sines, cosines), strict=True):
            error = amount.times_plus(rows.constant(factor), error)
        less = error.less(least)
        least, best = error.where(less, least), rows.constant(shift).where(less, best)
    width = inverse.reciprocal()
    expected = (least + rows.count() * float(LEVEL)) * (width * width)
    return rows.constant(0.0) - (best + middle) * width, width, expected


def _greedy(rows: _Rows, options: Any, steps: Any) -> Sequence[_Vector]:
    b, top = rows.builder, rows.top
    step = rows.everywhere(b.load(options))
    low, high = _Variable.of(rows.constant(0.0)), _Variable.of(top)
    best = _Best.of(rows)
    best.error.set(rows.squared_error(best.origin.get(), best.width.get()))
    with cgutils.for_range(b, steps):
        raised, lowered = low.get() + step, high.get() - step
        without_low = rows.squared_error(raised, (high.get() - raised) / top)
        without_high = rows.squared_error(low.get(), (lowered - low.get()) / top)
        up = without_low.less(without_high)
        low.set(raised.where(up, low.get()))
        high.set(_Vector(b, b.select(up, high.get().value, lowered.value)))
        best.offer(low.get(), (high.get() - low.get()) / top, without_low.where(up, without_high))
    return best.origin.get(), best.width.get(), best.error.get(), best.origin.get()


def _search(find: Callable[[_Rows, Any, Any], Sequence[_Vector]]) -> Any:
    """A function `f(values, columns, top, options, count, found, apart)`.

    `values` is a float32 array (columns * LANES,), `options` one of what `find` takes from it, `count` the number of
    its trials or steps; `found` receives what it finds, LANES numbers each, so far `apart`.
    """

    def search(_: Any, values: Any, columns: Any, top: Any, options: Any, count: Any, found: Any, apart: Any) -> Any:  # noqa: PLR0917
        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            def data(index: int, kind: Any = _VECTOR) -> Any:
                array = context.make_array(signature.args[index])(context, builder, arguments[index])
                return builder.bitcast(array.data, kind.as_pointer())

            rows = _Rows(builder, data(0, _HALF), arguments[1], _Vector(builder, _UNDEFINED))
            rows = _Rows(builder, data(0, _HALF), arguments[1], rows.everywhere(arguments[2]))
            for index, vector in enumerate(find(rows, data(3, _FLOAT), arguments[4])):
                at = builder.mul(arguments[6], ir.Constant(_INDEX, index))
                place = builder.bitcast(builder.gep(data(5, _FLOAT), [at]), _VECTOR.as_pointer())
                builder.store(vector.value, place, align=4)
            return context.get_dummy_value()

        return types.void(values, columns, top, options, count, found, apart), generate

    return intrinsic(search)


moves = _search(_moves)
waves = _search(_waves)
greedy = _search(_greedy)
squared_error = _search(lambda rows, options, count: _given_error(rows, options))


def _given_error(rows: _Rows, options: Any) -> Sequence[_Vector]:
    """The squared error of the origins and widths in `options`."""
    vectors = rows.builder.bitcast(options, _VECTOR.as_pointer())
    origin, width = (
        _Vector(rows.builder, rows.builder.load(rows.builder.gep(vectors, [ir.Constant(_INDEX, n)]), align=4))
        for n in range(2)
    )
    return [rows.squared_error(origin, width)]


@intrinsic
def normalize(_: Any, flat: Any, starts: Any, columns: Any, low: Any, inverse: Any, values: Any) -> Any:
    """WIDTH rows of at least WIDTH columns, each of which begins at its entry of `starts`: (x - low) * inverse.

    `values` receives column after column. The last ones are dealt with twice where WIDTH does not divide their number.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        def data(index: int) -> Any:
            return context.make_array(signature.args[index])(context, builder, arguments[index]).data

        def vectors(pointer: Any) -> Any:
            return builder.bitcast(pointer, _HALF.as_pointer())

        source, target = data(0), vectors(data(5))
        low_ends, inverses = (builder.load(vectors(data(index)), align=4) for index in (3, 4))
        places = [builder.load(builder.gep(data(1), [ir.Constant(_INDEX, row)])) for row in range(WIDTH)]
        lanes = ir.Constant(_INDEX, WIDTH)
        blocks = builder.sdiv(builder.add(arguments[2], ir.Constant(_INDEX, WIDTH - 1)), lanes)
        last = builder.sub(arguments[2], lanes)
        with cgutils.for_range(builder, blocks) as loop:
            column = builder.mul(loop.index, lanes)
            column = builder.select(builder.icmp_signed("<", column, last), column, last)
            rows = [
                builder.load(vectors(builder.gep(source, [builder.add(place, column)])), align=4) for place in places
            ]
            for index, vector in enumerate(_transposed(builder, rows)):
                place = builder.gep(target, [builder.add(column, ir.Constant(_INDEX, index))])
                builder.store(builder.fmul(builder.fsub(vector, low_ends), inverses), place, align=4)
        return context.get_dummy_value()

    return types.void(flat, starts, columns, low, inverse, values), generate


def _transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """Swap, for each bit of an index, what lies apart by it in rows and in lanes."""
    distance = WIDTH // 2
    while distance:
        near = [n if not n & distance else WIDTH + (n ^ distance) for n in range(WIDTH)]
        far = [n | distance if not n & distance else WIDTH + n for n in range(WIDTH)]
        masks = [ir.Constant(ir.VectorType(_INT, WIDTH), mask) for mask in (near, far)]
        swapped = list(vectors)
        for row in range(WIDTH):
            if not row & distance:
                pair = vectors[row], vectors[row | distance]
                swapped[row] = builder.shuffle_vector(*pair, masks[0])
                swapped[row | distance] = builder.shuffle_vector(*pair, masks[1])
        vectors, distance = swapped, distance // 2
    return vectors
