"""The encoder `greedy`: Check-N-Run's adaptive asymmetric quantization."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from checkrun_format.packing import U8
from checkrun_format.quantize.decode import F32
from checkrun_format.quantize.record import Array
from checkrun_format.quantize.search import Found, searched, squared_error


def greedy(
    values: F32, low: F32, high: F32, bits: int, qparams_dtype: str, *, num_bins: int, ratio: float
) -> tuple[U8, Array, npt.NDArray[np.bool_]]:
    """Encode rows in the best range met while the full one is made smaller step by step (Check-N-Run, section 5.2).

    A step takes away range / num_bins at the lower or the upper end, whichever leaves the smaller error; at most
    `ratio` of the range goes. The best pair of ends seen is taken, not the first local optimum (as `torch_compat`).

    What else is promised, `searched` tells; parameters and results are those of `minmax`, and:

    num_bins : int
        Steps in the whole range.
    ratio : float
        Which part of the range may be taken away, from 0 to 1.
    """
    step, count = steps_of(bits, num_bins, ratio)
    return searched(values, low, high, bits, qparams_dtype, search=partial(_find, step=step, count=count))


def steps_of(bits: int, num_bins: int, ratio: float) -> tuple[np.float32, int]:
    """The length of a step, in steps of `minmax`, and how many there are; something is left of the range."""
    return np.float32(((1 << bits) - 1) / num_bins), min(int(num_bins * ratio + 1e-9), num_bins - 1)


def _find(columns: F32, top: np.float32, *, step: np.float32, count: int) -> Found:
    low = np.zeros(columns.shape[1], np.float32)
    high = np.full_like(low, top)
    best_low, best_width = low, np.ones_like(low)
    best = squared_error(columns, best_low, best_width, top)
    for _ in range(count):
        raised, lowered = low + step, high - step
        without_low = squared_error(columns, raised, (high - raised) / top, top)
        without_high = squared_error(columns, low, (lowered - low) / top, top)
        up = without_low < without_high
        low, high = np.where(up, raised, low), np.where(up, high, lowered)
        error = np.where(up, without_low, without_high)
        less = error < best
        best = np.where(less, error, best)
        best_low = np.where(less, low, best_low)
        best_width = np.where(less, (high - low) / top, best_width)
    return best_low, best_width, best, best_low
