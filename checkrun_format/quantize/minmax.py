"""The encoders `minmax` and `symmetric`: the codes of a row span a range evenly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from checkrun_format.packing import U8
from checkrun_format.quantize.decode import F32, F64, nearest_codes, reach
from checkrun_format.quantize.record import Array

TOLERANCE = 0.505
"""Largest error of a row that is not exact, in ideal steps (DEC-5): half a step, and 1 % for rounded qparams."""

_SIGNIFICANT = 16


def minmax(values: F32, low: F32, high: F32, bits: int, qparams_dtype: str) -> tuple[U8, Array, npt.NDArray[np.bool_]]:
    """Encode rows with the step (high - low) / (2^bits - 1) from `low` on, each rounded to the qparams' dtype.

    Rows whose rounded qparams cannot keep every value within 0.505 steps (DEC-5) are to be exact: those of NaN,
    infinities, ranges beyond the dtype's, offsets that swamp the spread. A constant row needs a bias equal to it.

    Parameters
    ----------
    values : float32 array (n, columns)
        Rows in one run of memory.
    low, high : float32 arrays (n,)
        The extremes of each row; NaN if it has one. Zeros are +0.0.
    bits : int
        1 to 8.
    qparams_dtype : str
        "float16" or "float32". A float32 scale has at most 16 significant bits (DEC-4).

    Returns
    -------
    codes : uint8 array (n, columns)
        Not packed.
    qparams : array (n, 2) of `qparams_dtype`
        Scale and bias.
    exact : bool array (n,)
        The rows to keep exact.

    Examples
    --------
    >>> x = np.array([[0, 0.3, 1.5], [2, 2, 2]], np.float32)
    >>> codes, qparams, exact = minmax(x, x.min(1), x.max(1), 4, "float16")
    >>> codes.tolist(), qparams[1].tolist(), exact.tolist()
    ([[0, 3, 15], [0, 0, 0]], [0.0, 2.0], [False, False])
    """
    qparams, exact = span(low, high, bits, qparams_dtype)
    return nearest_codes(values, qparams, bits), qparams, exact


def symmetric(
    values: F32, low: F32, high: F32, bits: int, qparams_dtype: str
) -> tuple[U8, Array, npt.NDArray[np.bool_]]:
    """Encode rows between -m and m, m the largest magnitude, in 2^bits - 2 steps, so that one code means (about) 0.

    That is the symmetric quantization of Check-N-Run's section 5.2: the scale is m / (2^(bits-1) - 1), and one code is
    not used. At 1 bit, where this is no number, the codes mean -m and m. Parameters and results are those of
    `minmax`; the bound of 0.505 steps is one of the steps used here.
    """
    largest = np.maximum(high, -low) + np.float32(0)  # no -0.0
    steps = max((1 << bits) - 2, 1)
    qparams, exact = _span((low, high), (0 - largest, largest), steps, bits, qparams_dtype)
    return nearest_codes(values, qparams, bits), qparams, exact


def span(low: F32, high: F32, bits: int, qparams_dtype: str) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The qparams of `minmax`, and which rows are to be exact."""
    return _span((low, high), (low, high), (1 << bits) - 1, bits, qparams_dtype)


def stored_scale(scale: F64, qparams_dtype: str) -> F64:
    """Rounded to the qparams' dtype; float32 to 16 significant bits (DEC-4)."""
    return scale.astype(np.float16).astype(np.float64) if qparams_dtype == "float16" else _shortened(scale)


def _span(
    extremes: tuple[F32, F32], ends: tuple[F32, F32], steps: int, bits: int, qparams_dtype: str
) -> tuple[Array, npt.NDArray[np.bool_]]:
    first, last = ends
    step = (last.astype(np.float64) - first) / steps
    qparams = np.empty((len(step), 2), qparams_dtype)
    qparams[:, 0], qparams[:, 1] = stored_scale(step, qparams_dtype), first
    return qparams, ~(reach(*extremes, qparams, bits) <= TOLERANCE * step)


def _shortened(step: F64) -> F64:
    """The nearest number of 16 significant bits: its float32 product with a code is exact."""
    significand, exponent = np.frexp(step)
    shortened: F64 = np.ldexp(np.rint(np.ldexp(significand, _SIGNIFICANT)), exponent - _SIGNIFICANT)
    return shortened
