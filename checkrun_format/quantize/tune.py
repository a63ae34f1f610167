"""Parameters of `greedy` for given rows."""

from __future__ import annotations

import numpy as np

from checkrun_format.errors import InvalidInputError
from checkrun_format.quantize.decode import decode
from checkrun_format.quantize.encode import encode
from checkrun_format.quantize.method import Method
from checkrun_format.quantize.record import Array

BINS = (5, 10, 15, 20, 25, 30, 35, 45, 60, 90, 140, 200)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def tune(values: Array, bits: int, *, sample: int = 4096, gain: float = 0.005, seed: int = 0) -> Method:
    """The parameters of `greedy` from which on more of them gain little, as Check-N-Run finds them (its section 5.2).

    On a uniform sample of the rows, first the bins are raised at the largest ratio, then the ratio at these bins, until
    the next value would lower the mean l2 error by less than `gain` of it.

    Parameters
    ----------
    values : array (n, columns) of float16, bfloat16, float32 or float64
        Rows like those to be saved.
    bits : int
        1 to 8.
    sample : int
        Rows to look at.
    gain : float
        Relative gain that is worth going on.
    seed : int
        Of the sample.

    Returns
    -------
    Method
        `greedy` with these parameters, to be given as `encoder`.

    Raises
    ------
    InvalidInputError
        As `encode`, or if there is no row.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((2000, 32), np.float32)
    >>> tune(rows, 2).ratio > tune(rows, 4).ratio
    True
    """
    if not len(values):
        raise InvalidInputError("there is no row to tune the encoder by")
    chosen = np.random.default_rng(seed).choice(len(values), min(sample, len(values)), replace=False)
    rows = np.asarray(values[np.sort(chosen)])
    bins = _flattening(rows, bits, [Method("greedy", number, RATIOS[-1]) for number in BINS], gain).num_bins
    return _flattening(rows, bits, [Method("greedy", bins, ratio) for ratio in RATIOS], gain)


def _flattening(rows: Array, bits: int, methods: list[Method], gain: float) -> Method:
    """The first method after which the best one still to come gains less."""
    errors = np.array([_error(rows, bits, method) for method in methods])
    later = np.minimum.accumulate(errors[::-1])[::-1]
    return methods[int(np.argmax(errors <= later * (1 + gain)))]


def _error(rows: Array, bits: int, method: Method) -> float:
    quantized = encode(rows, bits, method)
    error = decode(quantized).astype(np.float64) - rows
    return float(np.sqrt((error**2).sum(1))[~np.isnan(quantized.qparams[:, 0])].sum())
