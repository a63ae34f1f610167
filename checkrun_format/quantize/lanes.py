"""The searches of `refine` and `greedy` for eight rows at a time, rows as lanes of vectors; for `kernels`.

Sums over the columns of a row must not be reordered, so it is rows that are computed side by side. numba would keep
the sums of such loops in memory; written as vectors of LLVM they stay in registers, which is twice as fast and
compiles several times faster. LLVM splits vectors that are wider than the machine's, on any machine. The formulas are
those of `refine` and `greedy`, which explain them; nothing is contracted.

numba keeps what it compiled until kernels.py changes: touch that file after a change in this one, or in `trials`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8

_INDEX, _INT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_UNDEFINED = ir.Constant(_VECTOR, ir.Undefined)


@dataclass(frozen=True, slots=True)
class _Vector:
    """Eight float32 numbers, one of each row."""

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
    """Eight rows, column after column, and 2^bits - 1."""

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

    def count(self) -> _Vector:
        return self.everywhere(self.builder.sitofp(self.columns, _FLOAT))

    def codes(self, value: _Vector, origin: _Vector, inverse: _Vector) -> _Vector:
        """The nearest codes; 0 for NaN."""
        return ((value - origin) * inverse).at_least(0.0).at_most(self.top).called("rint")

    def sums(self, body: Callable[[_Vector], Sequence[_Vector]], count: int) -> list[_Vector]:
        """The sums of what `body` makes of each column."""
        totals = [_Variable.of(self.constant(0.0)) for _ in range(count)]
        with cgutils.for_range(self.builder, self.columns) as loop:
            place = self.builder.gep(self.data, [loop.index])
            for total, value in zip(
                totals, body(_Vector(self.builder, self.builder.load(place, align=4))), strict=True
            ):
                total.set(total.get() + value)
        return [total.get() for total in totals]

    def squared_error(self, origin: _Vector, width: _Vector) -> _Vector:
        inverse = width.reciprocal()

        def body(value: _Vector) -> Sequence[_Vector]:
            error = value - (self.codes(value, origin, inverse) * width + origin)
            return [error * error]

        return self.sums(body, 1)[0]


def _refine(rows: _Rows, options: Any, moves: Any) -> Sequence[_Vector]:
    b, top, n = rows.builder, rows.top, rows.count()

    def option(index: Any) -> _Vector:
        return rows.everywhere(b.load(b.gep(options, [index])))

    (total,) = rows.sums(lambda value: [value], 1)
    mean = total / n
    origin, width, best = (_Variable.of(rows.constant(start)) for start in (0.0, 1.0, float("inf")))

    def attempt(start: _Vector, size: _Vector) -> None:
        inverse = size.reciprocal()

        def body(value: _Vector) -> Sequence[_Vector]:
            code = rows.codes(value, start, inverse)
            rest = value - code
            return code, code * code, rest * code, rest * rest

        codes, codes_squared, rests_codes, rests_squared = rows.sums(body, 4)
        rests = total - codes
        mean_code = codes / n
        variance = codes_squared - codes * mean_code
        covariance = rests_codes - rests * mean_code
        varied = rows.constant(0.0).less(variance)
        slope = (covariance / variance).where(varied, 0.0)
        error = rests_squared - rests * (rests / n) - covariance * slope
        fitted = (rows.constant(1.0) + slope).where(varied, size)
        less = error.less(best.get())
        best.set(error.where(less, best.get()))
        origin.set((mean - fitted * mean_code).where(less, origin.get()))
        width.set(fitted.where(less, width.get()))

    attempt(origin.get(), width.get())
    with cgutils.for_range(b, moves) as loop:
        at = b.shl(loop.index, ir.Constant(_INDEX, 1))
        shift, factor = option(at), option(b.add(at, ir.Constant(_INDEX, 1)))
        attempt(origin.get() + shift * (top * width.get()), width.get() * factor)
    return origin.get(), width.get(), best.get()


def _greedy(rows: _Rows, options: Any, steps: Any) -> Sequence[_Vector]:
    b, top = rows.builder, rows.top
    step = rows.everywhere(b.load(options))
    low, high = _Variable.of(rows.constant(0.0)), _Variable.of(top)
    best_low, best_width = _Variable.of(rows.constant(0.0)), _Variable.of(rows.constant(1.0))
    best = _Variable.of(rows.squared_error(best_low.get(), best_width.get()))
    with cgutils.for_range(b, steps):
        raised, lowered = low.get() + step, high.get() - step
        without_low = rows.squared_error(raised, (high.get() - raised) / top)
        without_high = rows.squared_error(low.get(), (lowered - low.get()) / top)
        up = without_low.less(without_high)
        low.set(raised.where(up, low.get()))
        high.set(_Vector(b, b.select(up, high.get().value, lowered.value)))
        error = without_low.where(up, without_high)
        less = error.less(best.get())
        best.set(error.where(less, best.get()))
        best_low.set(low.get().where(less, best_low.get()))
        best_width.set(((high.get() - low.get()) / top).where(less, best_width.get()))
    return best_low.get(), best_width.get(), best.get()


def _search(find: Callable[[_Rows, Any, Any], Sequence[_Vector]]) -> Any:
    """A function `f(values, columns, top, options, count, found)`.

    `values` is a float32 array (columns * LANES,), `options` one of what `find` takes from it, `count` the number of
    its moves; `found` (3 * LANES,) receives origin and width of a step, and the squared error.
    """

    def search(_: Any, values: Any, columns: Any, top: Any, options: Any, count: Any, found: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            def data(index: int, kind: Any = _VECTOR) -> Any:
                array = context.make_array(signature.args[index])(context, builder, arguments[index])
                return builder.bitcast(array.data, kind.as_pointer())

            rows = _Rows(builder, data(0), arguments[1], _Vector(builder, _UNDEFINED))
            rows = _Rows(builder, data(0), arguments[1], rows.everywhere(arguments[2]))
            for index, vector in enumerate(find(rows, data(3, _FLOAT), arguments[4])):
                place = builder.gep(data(5), [ir.Constant(_INDEX, index)])
                builder.store(vector.value, place, align=4)
            return context.get_dummy_value()

        return types.void(values, columns, top, options, count, found), generate

    return intrinsic(search)


refine = _search(_refine)
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
def normalize(_: Any, flat: Any, start: Any, columns: Any, blocks: Any, given: Any, values: Any) -> Any:
    """The first LANES * `blocks` columns of rows, the first of which begins at `start`: (x - low) * inverse.

    `given` holds low and inverse of each row, `values` receives column after column.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        def data(index: int) -> Any:
            return context.make_array(signature.args[index])(context, builder, arguments[index]).data

        def vectors(pointer: Any) -> Any:
            return builder.bitcast(pointer, _VECTOR.as_pointer())

        def loaded(index: int) -> _Vector:
            place = builder.gep(vectors(data(4)), [ir.Constant(_INDEX, index)])
            return _Vector(builder, builder.load(place, align=4))

        source, target, low, inverse = data(0), vectors(data(5)), loaded(0), loaded(1)
        with cgutils.for_range(builder, arguments[3]) as loop:
            column = builder.mul(loop.index, ir.Constant(_INDEX, LANES))
            first = builder.add(arguments[1], column)
            rows = []
            for row in range(LANES):
                at = builder.add(first, builder.mul(arguments[2], ir.Constant(_INDEX, row)))
                rows.append(builder.load(vectors(builder.gep(source, [at])), align=4))
            for index, vector in enumerate(_transposed(builder, rows)):
                place = builder.gep(target, [builder.add(column, ir.Constant(_INDEX, index))])
                builder.store(((_Vector(builder, vector) - low) * inverse).value, place, align=4)
        return context.get_dummy_value()

    return types.void(flat, start, columns, blocks, given, values), generate


def _transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """Swap, for each bit of an index, what lies apart by it in rows and in lanes."""
    distance = LANES // 2
    while distance:
        near = [n if not n & distance else LANES + (n ^ distance) for n in range(LANES)]
        far = [n | distance if not n & distance else LANES + n for n in range(LANES)]
        masks = [ir.Constant(ir.VectorType(_INT, LANES), mask) for mask in (near, far)]
        swapped = list(vectors)
        for row in range(LANES):
            if not row & distance:
                pair = vectors[row], vectors[row | distance]
                swapped[row] = builder.shuffle_vector(*pair, masks[0])
                swapped[row | distance] = builder.shuffle_vector(*pair, masks[1])
        vectors, distance = swapped, distance // 2
    return vectors
