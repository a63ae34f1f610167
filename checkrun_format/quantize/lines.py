"""Whole cache lines written past the cache; for the compiled kernels.

What is put into a large array goes to lines that are in no cache. An ordinary store first reads such a line from
memory, and prefetching reads the neighbours of a row, too. A non-temporal store of a whole line does neither: decoding
takes a third of the time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from checkrun_format.packing import FAR, LINE

_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, LINE // 8)


def past_cache(builder: Any, values: Any, place: Any) -> None:
    """Store a vector of a line where a line begins, past the cache."""
    store = builder.store(values, place, align=LINE)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


@intrinsic
def put_line(typing: Any, target: Any, to: Any, source: Any, begin: Any) -> Any:
    """Copy a line from element `begin` of an array to element `to` of another, which is aligned to a line."""
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = [
            builder.bitcast(
                builder.gep(cgutils.create_struct_proxy(kind)(context, builder, array).data, [index]),
                _VECTOR.as_pointer(),
            )
            for kind, array, index in zip(signature.args[::2], arguments[::2], arguments[1::2], strict=True)
        ]
        past_cache(builder, builder.load(places[1], align=1), places[0])
        return context.get_dummy_value()

    return types.void(target, to, source, begin), generate


@intrinsic
def settle(typing: Any) -> Any:
    """Order the lines before whatever this thread says next: it may be that they are there."""
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature, arguments
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@register_jitable
def whole_lines(target: Any, begin: int, step: int, size: int) -> bool:
    """Whether rows of `size` elements, `step` apart from `begin` on, are whole lines of an array beyond the caches."""
    line = LINE // target.itemsize
    start = target.ctypes.data // target.itemsize + begin
    return is_far(target) and start % line == 0 and step % line == 0 and size % line == 0


@register_jitable
def is_far(target: Any) -> bool:
    """Whether an array is so large that its lines are in no cache near by."""
    return target.size * target.itemsize >= FAR  # type: ignore[no-any-return]


@register_jitable
def put_run(source: Any, size: int, target: Any, to: int) -> None:
    """Copy elements from the beginning of an array to `to` and after of another, whole lines past the cache."""
    line = LINE // target.itemsize
    first = min(size, -(target.ctypes.data // target.itemsize + to) % line)
    last = first + (size - first) // line * line
    for n in range(first):
        target[to + n] = source[n]
    for n in range(first, last, line):
        put_line(target, to + n, source, n)  # type: ignore[call-arg]  # the first one is the compiler's
    for n in range(last, size):
        target[to + n] = source[n]
