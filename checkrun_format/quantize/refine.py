"""The encoder `refine`: a short search in which every trial is a linear regression."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from checkrun_format.packing import U8
from checkrun_format.quantize.decode import F32
from checkrun_format.quantize.record import Array
from checkrun_format.quantize.search import codes_of, fused, searched
from checkrun_format.quantize.trials import moves


def refine(values: F32, low: F32, high: F32, bits: int, qparams_dtype: str) -> tuple[U8, Array, npt.NDArray[np.bool_]]:
    """Encode rows with the scale and bias that a short search finds best by the sum of squared errors.

    Given the codes of a row, the best scale and bias are a linear regression of its values on them; which also tells
    the error that is left, so that a trial costs one pass over the row. The first trial is the full range, so
    the error is at most that of `minmax`. Each other one shifts the best range so far by a part of its width, or
    narrows it, takes the nearest codes, and regresses. `trials` has these moves.

    What else is promised, `searched` tells; parameters and results are those of `minmax`.
    """
    find = partial(_find, trials=moves(bits, values.shape[1]))
    return searched(values, low, high, bits, qparams_dtype, search=find)


def _find(columns: F32, top: np.float32, *, trials: F32) -> tuple[F32, F32, F32]:
    """Origin and width of a step, and the squared error, in steps of `minmax`.

    Up to 4 bits the regression is of the values on the codes. The squares of larger codes would hide small errors in
    their rounding: there it is of what is left of the values, which are near the codes.
    """
    by_rests = top > 15
    part = np.reciprocal(np.float32(len(columns)))
    total, squares = np.zeros((2, columns.shape[1]), np.float32)
    for column in columns:
        total = total + column
        squares = fused(column, column, squares)
    mean = total * part

    def trial(origin: F32, width: F32) -> tuple[F32, F32, F32]:
        """Origin, width and squared error by the regression on the codes."""
        codes, codes_squared, products, squared = np.zeros((4, len(mean)), np.float32)
        inverse = np.reciprocal(width)
        shift = 0 - origin * inverse
        for column in columns:
            code = codes_of(fused(column, inverse, shift), top)
            other = column - code if by_rests else column
            codes = codes + code
            codes_squared = fused(code, code, codes_squared)
            products = fused(other, code, products)
            squared = fused(other, other, squared) if by_rests else squares
        mean_code = codes * part
        variance = codes_squared - codes * mean_code
        others = total - codes if by_rests else total
        covariance = products - others * mean_code
        slope = np.where(variance > 0, covariance / variance, np.float32(0))
        error = squared - others * (others * part) - covariance * slope
        fitted = np.where(variance > 0, 1 + slope if by_rests else slope, width)
        return mean - fitted * mean_code, fitted, error

    best = trial(np.full_like(mean, 0), np.full_like(mean, 1))
    for shift, factor in trials:
        origin, width, _ = best
        best = _better(best, trial(origin + shift * (top * width), width * factor))
    return best


def _better(best: tuple[F32, F32, F32], tried: tuple[F32, F32, F32]) -> tuple[F32, F32, F32]:
    less = tried[2] < best[2]
    origin, width, error = (np.where(less, new, old) for new, old in zip(tried, best, strict=True))
    return origin, width, error
