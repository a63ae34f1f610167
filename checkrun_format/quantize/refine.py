"""The encoder `refine`: a short search in which trials are linear regressions."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from checkrun_format.packing import U8
from checkrun_format.quantize.decode import F32
from checkrun_format.quantize.record import Array
from checkrun_format.quantize.search import Found, codes_of, fused, searched
from checkrun_format.quantize.trials import COSINE, LEVEL, MOVING_BITS, SHIFTS, SINE, trials


def refine(values: F32, low: F32, high: F32, bits: int, qparams_dtype: str) -> tuple[U8, Array, npt.NDArray[np.bool_]]:
    """Encode rows with the scale and bias that a short search finds best by the sum of squared errors.

    Given the codes of a row, the best scale and bias are a linear regression of its values on them; which also tells
    the error that is left, so that a trial costs one pass over the row.

    Up to 4 bits the first trial is the full range, so the error is at most that of `minmax`. Each other one shifts the
    best range so far by a part of its width, or narrows it, takes the nearest codes, and regresses.

    Above, a row has many codes, and where they lie between the values matters more than where they end. In units of
    the codes, the squared distances of the values x to the nearest whole numbers sum up to a wave in their shift s::

        n / 12 + sum over k = 1, 2, ... of (-1)^k / (pi k)^2 * sum over x of cos(2 pi k (x + s))

    So the cosines and sines of a row, for k = 1 and 2 in one pass over it, tell the error at every shift. This is
    done for some widths of the range; the best width at its best shift is then regressed twice.

    `trials` has the moves and widths. What else is promised, `searched` tells; parameters and results are those of
    `minmax`.
    """
    find = partial(_by_moves if bits <= MOVING_BITS else _by_waves, trials=trials(bits, values.shape[1]))
    return searched(values, low, high, bits, qparams_dtype, search=find)


def _by_moves(columns: F32, top: np.float32, *, trials: F32) -> Found:
    total, squares = np.zeros((2, columns.shape[1]), np.float32)
    for column in columns:
        total = total + column
        squares = fused(column, column, squares)
    regressed = partial(_regressed, columns, top, total, squares)
    best = regressed(np.zeros_like(total), np.ones_like(total))
    for shift, factor in trials:
        origin, width, _ = best
        best = _better(best, regressed(origin + shift * (top * width), width * factor))
    return *best, total * np.reciprocal(np.float32(len(columns)))


def _by_waves(columns: F32, top: np.float32, *, trials: F32) -> Found:
    total = np.zeros(columns.shape[1], np.float32)
    for column in columns:
        total = total + column
    worst = np.full_like(total, np.inf)
    best = np.zeros_like(total), np.ones_like(total), worst
    for trial in trials:
        best = _better(best, _wave(columns, trial))
    origin, width, error = best[0], best[1], worst
    for _ in range(2):
        origin, width, error = _better((origin, width, error), _regressed(columns, top, total, None, origin, width))
    return origin, width, error, total * np.reciprocal(np.float32(len(columns)))


def _regressed(
    columns: F32, top: np.float32, total: F32, squares: F32 | None, origin: F32, width: F32
) -> tuple[F32, F32, F32]:
    """Origin and width by the regression of the values on their codes in a range, and the squared error.

    Without the sum of the squared values, the regression is of what is left of the values, which are near the codes:
    the squares of large codes would hide small errors in their rounding.
    """
    part = np.reciprocal(np.float32(len(columns)))
    codes, codes_squared, products, squared = np.zeros((4, columns.shape[1]), np.float32)
    inverse = np.reciprocal(width)
    shift = 0 - origin * inverse
    for column in columns:
        code = codes_of(fused(column, inverse, shift), top)
        other = column - code if squares is None else column
        codes = codes + code
        codes_squared = fused(code, code, codes_squared)
        products = fused(other, code, products)
        squared = fused(other, other, squared) if squares is None else squares
    mean_code = codes * part
    variance = codes_squared - codes * mean_code
    others = total - codes if squares is None else total
    covariance = products - others * mean_code
    slope = np.where(variance > 0, covariance / variance, np.float32(0))
    error = squared - others * (others * part) - covariance * slope
    fitted = np.where(variance > 0, 1 + slope if squares is None else slope, width)
    return total * part - fitted * mean_code, fitted, error


def _wave(columns: F32, trial: F32) -> tuple[F32, F32, F32]:
    """Origin and width of the best shift of a range, and the squared error to expect."""
    inverse, middle, *outside = trial
    cosines, sines, squares, products = np.zeros((4, columns.shape[1]), np.float32)
    for column in columns:
        step = fused(column, inverse, middle)
        rest = step - np.rint(step)
        square = rest * rest
        cosine = fused(fused(square, COSINE[2], COSINE[1]), square, COSINE[0])
        sine = fused(fused(square, SINE[2], SINE[1]), square, SINE[0]) * rest
        cosines, sines = cosines + cosine, sines + sine
        squares, products = fused(cosine, cosine, squares), fused(sine, cosine, products)
    squares = squares - np.float32(len(columns)) * np.float32(0.5)
    least, best = np.full_like(squares, np.inf), np.zeros_like(squares)
    for (shift, *factors), cut in zip(SHIFTS, outside, strict=True):
        error = cut
        for factor, amount in zip(factors, (products, squares, sines, cosines), strict=True):
            error = fused(amount, factor, error)
        less = error < least
        least, best = np.where(less, error, least), np.where(less, shift, best)
    width = np.reciprocal(inverse)
    expected = (least + np.float32(len(columns)) * LEVEL) * (width * width)
    return 0 - (best + middle) * width, np.full_like(least, width), expected


def _better(best: tuple[F32, F32, F32], tried: tuple[F32, F32, F32]) -> tuple[F32, F32, F32]:
    less = tried[2] < best[2]
    origin, width, error = (np.where(less, new, old) for new, old in zip(tried, best, strict=True))
    return origin, width, error
