"""The encoder `refine`: a short search in which every trial is a linear regression."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from checkrun_format.packing import U8
from checkrun_format.quantize.decode import F32, nearest_codes
from checkrun_format.quantize.minmax import span, stored_pairs
from checkrun_format.quantize.record import Array
from checkrun_format.quantize.trials import NARROWEST, RISK, Plan, plan


def refine(values: F32, low: F32, high: F32, bits: int, qparams_dtype: str) -> tuple[U8, Array, npt.NDArray[np.bool_]]:
    """Encode rows with the scale and bias that a search finds best by the sum of squared errors.

    Given the codes of a row, the best scale and bias are a linear regression of its values on them; which also tells
    the error that is left, so that a trial costs one pass over the row. Each trial takes the nearest codes in some
    range, and regresses; the best trial's range is where the next one starts. See `trials.Plan` for them, which were
    chosen by a beam search over rows of many distributions and widths (benchmarks/README.md).

    Computed in float32, in steps of `minmax` from `low` on, with sums over the columns from left to right. Exact are
    the rows that `minmax` would keep exact. Where rounding the qparams would move values by more than an eighth of a
    step the row gets the better of this and `minmax`; so the squared error of a row is never more than slightly above that of
    `minmax`.

    Parameters and results are those of `minmax`.
    """
    qparams, exact = span(low, high, bits, qparams_dtype)
    top = np.float32((1 << bits) - 1)
    inverse = top / (high - low)
    columns = np.ascontiguousarray(((values - low[:, None]) * inverse[:, None]).T)
    origin, width = _search(columns, top, plan(bits, values.shape[1]))
    step = (high.astype(np.float64) - low) / ((1 << bits) - 1)
    found = stored_pairs(width * step, low + origin * step, qparams_dtype)
    scale, bias = _in_steps(found, low, inverse)
    moved = np.abs(bias - origin) + top * np.abs(scale - width)
    fits = ~exact & (high - low > NARROWEST) & (width > 0)
    risky = ~(moved <= RISK)
    plain = squared_error(columns, *_in_steps(qparams, low, inverse), top)
    better = fits & (~risky | (squared_error(columns, scale, bias, top) <= plain))
    qparams[better] = found[better]
    return nearest_codes(values, qparams, bits), qparams, exact


def squared_error(columns: F32, scale: F32, bias: F32, top: np.float32) -> F32:
    """The sum over the columns (c, n) of the squared errors (n,)."""
    total = np.zeros_like(scale)
    inverse = np.reciprocal(scale)
    for column in columns:
        error = column - (codes_of(column, bias, inverse, top) * scale + bias)
        total += error * error
    return total


def codes_of(column: F32, origin: F32, inverse: F32, top: np.float32) -> F32:
    """The nearest codes, as float32; 0 for NaN."""
    steps = (column - origin) * inverse
    return np.rint(np.fmin(np.where(steps > 0, steps, np.float32(0)), top))


def _in_steps(qparams: Array, low: F32, inverse: F32) -> tuple[F32, F32]:
    """Scale and bias in steps of `minmax` from `low` on."""
    scale, bias = qparams.astype(np.float32).T
    return scale * inverse, (bias - low) * inverse


def _search(columns: F32, top: np.float32, trials: Plan) -> tuple[F32, F32]:
    """Origin and width of a step, in steps of `minmax`: where code c means origin + c * width."""
    count = np.float32(len(columns))
    total, squares = np.zeros((2, columns.shape[1]), np.float32)
    for column in columns:
        total += column
        squares += column * column
    mean = total / count

    def trial(origin: F32, width: F32) -> tuple[F32, F32, F32]:
        """Origin, width and squared error by the regression on the codes."""
        codes, codes_squared, rests_codes, rests_squared = np.zeros((4, len(mean)), np.float32)
        inverse = np.reciprocal(width)
        for column in columns:
            code = codes_of(column, origin, inverse, top)
            rest = column - code
            codes += code
            codes_squared += code * code
            rests_codes += rest * code
            rests_squared += rest * rest
        rests = total - codes
        mean_code = codes / count
        variance = codes_squared - codes * mean_code
        covariance = rests_codes - rests * mean_code
        slope = np.where(variance > 0, covariance / variance, np.float32(0))
        error = rests_squared - rests * (rests / count) - covariance * slope
        fitted = np.where(variance > 0, 1 + slope, width)
        return mean - fitted * mean_code, fitted, error

    margin = np.float32(trials.margin)
    first = margin * top
    best = trial(np.full_like(mean, first), np.full_like(mean, (top - first - first) / top))
    deviation = np.sqrt(np.maximum(squares / count - mean * mean, 0)) * np.float32(trials.spread / 2)
    start = np.maximum(mean - deviation, 0)
    best = _better(best, trial(start, (np.minimum(mean + deviation, top) - start) / top))
    for shift, factor in trials.moves:
        origin, width, _ = best
        best = _better(best, trial(origin + shift * (top * width), width * factor))
    return best[0], best[1]


def _better(best: tuple[F32, F32, F32], tried: tuple[F32, F32, F32]) -> tuple[F32, F32, F32]:
    less = tried[2] < best[2]
    origin, width, error = (np.where(less, new, old) for new, old in zip(tried, best, strict=True))
    return origin, width, error
