"""What the encoders that search have in common: rows in steps of `minmax`, and when what was found is taken."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from checkrun_format.packing import U8
from checkrun_format.quantize.decode import F32, nearest_codes
from checkrun_format.quantize.minmax import span, stored_scale
from checkrun_format.quantize.record import Array
from checkrun_format.quantize.trials import NARROWEST, risk

Found = tuple[F32, F32, F32, F32]
"""Origin, width, squared error and pivot, each (n,), in steps of `minmax`.

A code means origin + code * width. When the width is rounded, the pivot keeps its place."""

Search = Callable[[F32, np.float32], Found]
"""From columns (c, n) in steps of `minmax`, and 2^bits - 1."""


def searched(
    values: F32, low: F32, high: F32, bits: int, qparams_dtype: str, *, search: Search
) -> tuple[U8, Array, npt.NDArray[np.bool_]]:
    """Encode rows with the scale and bias that `search` finds; parameters and results are those of `minmax`.

    Computed in float32, in steps of `minmax` from `low` on, with sums over the columns from left to right. Exact are
    the rows that `minmax` would keep exact. Rows of a range below 2^-100 are as `minmax` has them. The scale is rounded
    first, then the bias that fits it. Where that may add more than a fiftieth to the squared error, and above 4 bits
    always, the row gets the better of both; so the squared error of a row is never more than slightly above that of
    `minmax`. A row without negative values decodes to such a row.
    """
    qparams, exact = span(low, high, bits, qparams_dtype)
    top = np.float32((1 << bits) - 1)
    inverse = top / (high - low)
    columns = np.ascontiguousarray(((values - low[:, None]) * inverse[:, None]).T)
    origin, width, error, pivot = search(columns, top)
    step = (high.astype(np.float64) - low) / ((1 << bits) - 1)
    found = np.empty_like(qparams)
    found[:, 0] = stored_scale(width * step, qparams_dtype)
    origin = (pivot + (origin - pivot) * (found[:, 0] / (width * step))).astype(np.float32)
    found[:, 1] = low + origin * step
    found[(low >= 0) & (found[:, 1] <= 0), 1] = 0
    scale, bias = _in_steps(found, low, inverse)
    moved = np.abs(bias - origin) + top * np.abs(scale - width)
    fits = ~exact & (high - low > NARROWEST) & (width > 0)
    old_scale, old_bias = _in_steps(qparams, low, inverse)
    no_worse = squared_error(columns, bias, scale, top) <= squared_error(columns, old_bias, old_scale, top)
    better = fits & ((moved * moved * np.float32(len(columns)) < risk(bits) * error) | no_worse)
    qparams[better] = found[better]
    return nearest_codes(values, qparams, bits), qparams, exact


def squared_error(columns: F32, origin: Array, width: Array, top: np.float32) -> F32:
    """The sum over the columns (c, n) of the squared errors (n,)."""
    total = np.zeros_like(width)
    inverse = np.reciprocal(width)
    shift = 0 - origin * inverse
    for column in columns:
        step = fused(column, inverse, shift)
        rest = step - codes_of(step, top)
        total = fused(rest, rest, total)
    squared: F32 = total * (width * width)
    return squared


def codes_of(steps: F32, top: np.float32) -> F32:
    """The nearest codes, as float32; 0 for NaN."""
    return np.rint(np.fmin(np.where(steps > 0, steps, np.float32(0)), top))


def fused(one: F32, other: F32, added: F32) -> F32:
    """Multiply and add, rounded once.

    float64 holds the product of two float32 numbers; that the sum is rounded to float64 first changes the result once
    in 2^29 times.
    """
    return (one.astype(np.float64) * other + added).astype(np.float32)


def _in_steps(qparams: Array, low: F32, inverse: F32) -> tuple[F32, F32]:
    """Scale and bias in steps of `minmax` from `low` on."""
    scale, bias = qparams.astype(np.float32).T
    return scale * inverse, (bias - low) * inverse
