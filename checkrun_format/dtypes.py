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

_UNITS = {"year": "Y", "month": "M", "week": "W", "day": "D", "hour": "h", "minute": "m"} | {
    unit: unit for unit in ("s", "ms", "us", "ns", "ps", "fs", "as")
}
"""Names that differ in more than case, for they are names of folders -> numpy's."""

_TIMES = {
    f"{kind}_{unit}": np.dtype(f"{kind}[{code}]")
    for kind in ("datetime64", "timedelta64")
    for unit, code in _UNITS.items()
}

STORED: dict[str, str] = (
    {name: name for name in _NATIVE} | {"bool": "uint8"} | _AS_BITS | dict.fromkeys(_TIMES, "int64")
)
"""Logical dtype name -> Zarr data type that stores it."""

_NUMPY: dict[str, np.dtype[Any]] = (
    {name: np.dtype(name) for name in (*_NATIVE, "bool")}
    | {name: np.dtype(getattr(ml_dtypes, name)) for name in _AS_BITS}
    | _TIMES
)

_NAMES = {dtype: name for name, dtype in _NUMPY.items()}

_WAY_OUT = {
    "O": "objects are never pickled",
    "S": "text and bytes belong in `extra` or in a blob",
    "U": "text and bytes belong in `extra` or in a blob",
    "T": "text and bytes belong in `extra` or in a blob",
    "V": "give each field of a record as an array of its own",
    "g": "its bits differ from machine to machine: give float64",
    "G": "its bits differ from machine to machine: give complex128",
    "M": "give one of the units of numpy, without a multiple",
    "m": "give one of the units of numpy, without a multiple",
}
"""What to do about a dtype that cannot be stored, by its numpy character."""

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
    name = None if given.char == "T" else _NAMES.get(given.newbyteorder("="))
    if name is None:
        known = ", ".join(sorted({text.partition("_")[0] if text in _TIMES else text for text in STORED}))
        advice = f"{_WAY_OUT[given.char]}; " if given.char in _WAY_OUT else ""
        raise InvalidInputError(f"dtype {given} cannot be stored; {advice}the format knows {known}")
    return name


def to_stored(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same bits under the dtype that stores them, little endian; no copy if avoidable."""
    name = name_of(array.dtype)
    native = array.astype(_NUMPY[name], copy=False)
    if name == "bool" and native.view(np.uint8).max(initial=0) > 1:
        native = native != np.False_  # numpy takes any byte but 0 for True, the format takes 1
    return native.view(STORED[name]) if STORED[name] != name else native


def as_stored(out: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """A destination under the dtype that stores its values: the same memory. None if its byte order is not native."""
    name = name_of(out.dtype)
    return out.view(STORED[name]) if out.dtype == _NUMPY[name] else None


def from_stored(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """The inverse of `to_stored`: a view of the same memory."""
    return array.view(_NUMPY[name]) if STORED[name] != name else array
