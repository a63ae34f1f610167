"""Raw float32 values stored in 16 bits (FORMAT.md section 7.3, RAW-1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.packing import checked_columns, row_pieces
from checkrun_format.quantize.record import PRECISIONS, Array, nan_rows


def narrow(values: Any, store_as: str) -> tuple[Array, npt.NDArray[np.int64]]:
    """Round rows to 16 bits, except those that do not fit (RAW-1).

    A row fits if all its values are finite and stay within the relative error 2^-11 (float16) or 2^-8 (bfloat16).

    Parameters
    ----------
    values : float32 array or torch tensor (n,) or (n, columns)
        Any strides and byte order; columns at least 1. A tensor is narrowed on its device.
    store_as : str
        "float16" or "bfloat16".

    Returns
    -------
    narrowed : array of `store_as`, of the shape of `values`
        Rounded to nearest, ties to even; NaN in rows that do not fit.
    exact_index : int64 array (m,)
        Positions of those rows, increasing.

    Raises
    ------
    InvalidInputError
        For another dtype or shape.

    Examples
    --------
    >>> narrowed, exact_index = narrow(np.array([0.5, 1e6, -0.0], np.float32), "float16")
    >>> narrowed.tolist(), exact_index.tolist()
    ([0.5, nan, -0.0], [1])
    """
    if store_as not in PRECISIONS:
        raise InvalidInputError(f"store_as must be one of {', '.join(PRECISIONS)}, not {store_as!r}")
    if type(values).__module__ == "torch":
        from checkrun_format.quantize.tensors import narrow_tensor

        return narrow_tensor(values, store_as)
    _check(values)
    wide = values.reshape(-1, 1) if values.ndim == 1 else values
    narrowed = np.empty(wide.shape, dtypes.logical(store_as))
    with np.errstate(all="ignore"):
        misfits = sum(_narrow_piece(wide[piece], narrowed[piece]) for piece in row_pieces(*wide.shape))
        exact_index = nan_rows(narrowed[:, 0], misfits)
    return narrowed.reshape(values.shape), exact_index


def _narrow_piece(values: Array, out: Array) -> int:
    """Fill `out`; how many rows do not fit. Their error is scaled up, not the allowed one down: that is exact."""
    given = values.astype(np.float32)
    out[...] = given
    error = np.abs(out.astype(np.float32) - given)
    error *= PRECISIONS[out.dtype.name]
    misfit = ~(error <= np.abs(given)).all(axis=1)
    out[misfit] = np.nan
    return int(np.count_nonzero(misfit))


def _check(values: object) -> None:
    if not isinstance(values, np.ndarray) or values.ndim not in (1, 2) or dtypes.name_of(values.dtype) != "float32":
        raise InvalidInputError("only float32 arrays of one or two dimensions are stored narrower")
    if values.ndim == 2:
        checked_columns(values.shape[1])
