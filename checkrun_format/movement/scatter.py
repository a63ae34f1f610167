"""Rows of one array to rows of another, in one pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format.movement import engine
from checkrun_format.rows import Selection, length

Array = npt.NDArray[Any]

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def scatter(values: Array, positions: Selection, out: Array, places: Selection) -> None:
    """`out[places] = values[positions]`, values cast to the dtype of `out`.

    Parameters
    ----------
    values, out : array (n, columns) or (n,)
    positions, places : slice or int64 array
        Rows that there are; slices have a start, a stop, and step 1. All places differ.
    """
    kernels = None if isinstance(places, slice) else engine.kernels(length(places))
    if kernels is None or isinstance(places, slice) or values.dtype != out.dtype or not values.flags.c_contiguous:
        out[places] = values[positions].astype(out.dtype, copy=False)
        return
    row = math.prod(out.shape[1:]) * out.itemsize
    word = math.gcd(8, row, out.strides[0], out.ctypes.data, values.ctypes.data)
    if row == word or out.strides[0] < row or not out[:1].flags.c_contiguous or not out.dtype.isnative:
        out[places] = values[positions]
        return
    span = (len(out) - 1) * out.strides[0] + row
    if isinstance(positions, slice):
        values, listed = values[positions], np.zeros(0, np.int64)
    else:
        listed = np.ascontiguousarray(positions)
    kernels.compiled(kernels.move_rows)(
        _words(values, values.nbytes, word),
        listed,
        row // word,
        _words(out, span, word),
        (0, out.strides[0] // word),
        np.ascontiguousarray(places),
    )


def _words(array: Array, size: int, word: int) -> Array:
    """The `size` bytes from the beginning of an array on, in words."""
    flat = np.lib.stride_tricks.as_strided(array, (size // array.itemsize,), (array.itemsize,))
    return flat.view(_WORDS[word])
