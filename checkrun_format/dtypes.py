"""Logical dtypes, and how each is stored (FORMAT.md section 4)."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from checkrun_format.errors import InvalidInputError

_NATIVE = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_AS_BITS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}

STORED: dict[str, str] = {name: name for name in _NATIVE} | {"bool": "uint8"} | _AS_BITS
"""Logical dtype name -> Zarr data type that stores it."""

_NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in (*_NATIVE, "bool")} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _AS_BITS
}

FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Logical dtypes whose fields may be quantized."""


def logical(name: str) -> np.dtype[Any]:
    """The numpy dtype of a logical dtype; bfloat16 and float8 are those of `ml_dtypes`."""
    return _NUMPY[name]


def name_of(dtype: npt.DTypeLike) -> str:
    """The logical name of a numpy dtype, whatever its byte order.

    Raises
    ------
    InvalidInputError
        If the format cannot store this dtype.
    """
    try:
        given = np.dtype(dtype)
    except TypeError as error:
        raise InvalidInputError(f"{dtype!r} is no dtype of numpy") from error
    if dtype is None:
        raise InvalidInputError("no dtype is given")
    return _name_of(given)


@functools.lru_cache(maxsize=256)
def _name_of(given: np.dtype[Any]) -> str:
    name = given.newbyteorder("=").name if given.kind in "iufcb" else given.name
    if _NUMPY.get(name) != given.newbyteorder("="):
        known = ", ".join(sorted(STORED))
        raise InvalidInputError(f"dtype {given} cannot be stored; the format knows {known}")
    return name


def to_stored(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same bits under the dtype that stores them, little endian; no copy if avoidable."""
    name = name_of(array.dtype)
    native = array.astype(_NUMPY[name], copy=False)
    if name == "bool" and native.view(np.uint8).max(initial=0) > 1:
        native = native != np.False_  # numpy takes any byte but 0 for True, the format takes 1
    return native.view(STORED[name]) if STORED[name] != name else native


def from_stored(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """The inverse of `to_stored`: a view of the same memory."""
    return array.view(_NUMPY[name]) if STORED[name] != name else array
