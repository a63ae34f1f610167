"""How far decoded rows are from what was given, by a sample of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from checkrun_format.quantize.decode import F64, decode
from checkrun_format.quantize.record import Array, Quantized

SAMPLE = 1024
"""Rows of a sample, about; evenly spaced."""


def sampled_l2(values: Array, quantized: Quantized) -> tuple[npt.NDArray[np.int64], F64]:
    """Errors of evenly spaced rows, exact ones left out.

    Parameters
    ----------
    values : array (n, columns)
        What was given.
    quantized : Quantized
        What an encoder made of it.

    Returns
    -------
    rows : int64 array (k,)
        Which rows, ascending.
    l2 : float64 array (k, 2)
        Of each row, the l2 norm of decoded - original and of the original.
    """
    rows = np.arange(0, len(values), max(1, len(values) // SAMPLE))
    rows = rows[~np.isnan(quantized.qparams[rows, 0])]
    given = values[rows].astype(np.float64)
    error = decode(quantized, rows=rows).astype(np.float64) - given
    return rows, np.stack([np.sqrt((error**2).sum(1)), np.sqrt((given**2).sum(1))], axis=1)
