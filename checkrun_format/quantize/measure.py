"""How far decoded rows are from what was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format.packing import row_pieces
from checkrun_format.quantize.decode import F64, decode
from checkrun_format.quantize.record import Array, Quantized

SAMPLE = 512
"""Rows of a sample, about; evenly spaced."""


def sampled_l2(values: Any, quantized: Quantized) -> tuple[npt.NDArray[np.int64], F64]:
    """Errors of evenly spaced rows, exact ones left out.

    Parameters
    ----------
    values : array or torch tensor (n, columns)
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
    return rows, _norms(values, quantized, rows)


def mean_l2(values: Any, quantized: Quantized) -> tuple[float, float] | None:
    """The same two norms, means over all rows but the exact ones; None if all rows are exact.

    Memory does not grow with the number of rows.
    """
    sums, count = np.zeros(2), 0
    for piece in row_pieces(*values.shape):
        rows = np.flatnonzero(~np.isnan(quantized.qparams[piece, 0])) + piece.start
        sums, count = sums + _norms(values, quantized, rows).sum(0), count + len(rows)
    return (float(sums[0] / count), float(sums[1] / count)) if count else None


def _norms(values: Any, quantized: Quantized, rows: npt.NDArray[np.int64]) -> F64:
    given = _rows_of(values, rows).astype(np.float64)
    error = decode(quantized, rows=rows) - given
    squares = np.stack([np.einsum("ij,ij->i", each, each) for each in (error, given)], axis=1)
    return np.asarray(np.sqrt(squares))


def _rows_of(values: Any, rows: npt.NDArray[np.int64]) -> Array:
    if type(values).__module__ == "torch":
        from checkrun_format.quantize.tensors import taken_rows

        return taken_rows(values, rows)
    taken: Array = values[rows]
    return taken
