"""The encoder `torch_compat`: the codes, scales and biases of torch's prepack operators, without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from checkrun_format.packing import U8
from checkrun_format.quantize.decode import F32, F64, nearest_codes, reach
from checkrun_format.quantize.record import Array
from checkrun_format.quantize.search import codes_of

ADDED = 1e-8
"""What torch adds to the range of a row at 8 bits; its codes are off by as much of a step."""


def torch_compat(
    values: F32,
    low: F32,
    high: F32,
    bits: int,
    qparams_dtype: str,
    *,
    num_bins: int | None = None,
    ratio: float | None = None,
) -> tuple[U8, Array, npt.NDArray[np.bool_]]:
    """Encode rows as `torch.ops.quantized` does, in float32, step by step.

    At 4 and 2 bits as `embedding_bag_4bit_prepack` and `embedding_bag_2bit_prepack`, with `optimized_qparams=True`,
    `nbins` and `ratio` if `num_bins` is given; at 8 bits as `embedding_bag_byte_prepack`, which does not search, and
    whose qparams are float32; float16 ones, which torch does not have there, get the nearest codes. The other widths,
    which torch does not have either, as 4 and 2.

    torch's search takes a range as best only where the error is less than at both of the next steps; so at 2 bits and
    its default ratio of .16 it mostly finds nothing. `greedy` takes the best that it has seen.

    Exact are rows of which a value might be further off than the range of the row: constants that are no float16,
    ranges that float16 cannot express. torch would lose them.

    Parameters and results are those of `minmax`, and:

    num_bins : int, optional
        Steps in the whole range.
    ratio : float, optional
        Which part of the range may be taken away.
    """
    if bits == 8:
        codes, qparams = _bytes(values, low, high)
        if qparams_dtype == "float16":  # which torch does not have at 8 bits
            qparams = qparams.astype(np.float16)
            codes = nearest_codes(values, qparams, bits)
    else:
        columns = np.ascontiguousarray(values.T)
        if num_bins is not None:
            low, high = _optimized(columns, low, high, bits, num_bins, ratio or 0.0)
        bias = _half(low)
        scale, inverse = _scale(high - bias, bits)
        codes = codes_of((columns - bias) * inverse, _top(bits)).T.astype(np.uint8)
        qparams = np.stack([scale, bias], axis=1)
    low, high = values.min(1), values.max(1)
    exact = ~(narrow_reach(low, high, qparams, bits) <= high - low)
    return codes, qparams.astype(qparams_dtype), exact


def narrow_reach(low: F32, high: F32, qparams: Array, bits: int) -> F64:
    """The same as `reach`, but not more than to the first code: torch gives rows without a range the scale 1."""
    bias = qparams[:, 1].astype(np.float64)
    narrow: F64 = np.minimum(reach(low, high, qparams, bits), np.maximum(bias - low, high - bias))
    return narrow


def _bytes(values: F32, low: F32, high: F32) -> tuple[U8, F32]:
    inverse = np.float32(255) / ((high - low) + np.float32(ADDED))
    codes = np.rint((values - low[:, None]) * inverse[:, None])
    return codes.astype(np.uint8), np.stack([(high - low) / np.float32(255), low], axis=1)


def _top(bits: int) -> np.float32:
    return np.float32((1 << bits) - 1)


def _half(values: F32) -> F32:
    return values.astype(np.float16).astype(np.float32)


def _scale(spread: F32, bits: int) -> tuple[F32, F32]:
    """Scale and its inverse; 1 where there is none."""
    scale = np.where(spread == 0, np.float32(1), _half(spread / _top(bits)))
    scale = np.where((scale == 0) | np.isinf(1 / scale), np.float32(1), scale)
    return scale, np.reciprocal(scale)


def _optimized(columns: F32, low: F32, high: F32, bits: int, num_bins: int, ratio: float) -> tuple[F32, F32]:
    """The ends that `choose_qparams_optimized` chooses, for all rows at once."""
    step = (high - low) / np.float32(num_bins)
    kept = np.float32(num_bins * (1 - np.float32(ratio))) * step
    best_low, best_high = low, high
    current = best = _loss(columns, low, high, bits)
    for _ in range(num_bins + 1):  # where the steps are too small for float32, torch does not end
        going = low + kept < high
        if not going.any():
            break
        raised, lowered = low + step, high - step
        without_low, without_high = _loss(columns, raised, high, bits), _loss(columns, low, lowered, bits)
        optimum = going & (current < without_low) & (current < without_high) & (current < best)
        best = np.where(optimum, current, best)
        best_low, best_high = np.where(optimum, low, best_low), np.where(optimum, high, best_high)
        up = going & (without_low < without_high)
        low, high = np.where(up, raised, low), np.where(going & ~up, lowered, high)
        current = np.where(going, np.where(up, without_low, without_high), current)
    return best_low, best_high


def _loss(columns: F32, low: F32, high: F32, bits: int) -> F32:
    bias = _half(low)
    scale, inverse = _scale(high - bias, bits)
    total = np.zeros_like(low)
    for column in columns:
        error = column - (codes_of((column - bias) * inverse, _top(bits)) * scale + bias)
        total += error * error
    return np.sqrt(total)
