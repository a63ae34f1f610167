"""Files of the package `safetensors`: a header in JSON, then the values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.interchange.contents import Array, Contents, Entry, named

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}
_METADATA, _LABEL = "__metadata__", "checkrun"
_LONGEST_HEADER = 100_000_000
"""Bytes; what the package accepts."""
_MOST_DIMENSIONS = 64
"""Of an array in numpy."""


def read(path: Path, _stack: ExitStack) -> Contents:
    """The tensors of a file, mapped.

    The package checks the header; its numpy arrays lack float8, so the values are mapped here.
    """
    _check(path)
    data: Array = np.asarray(np.memmap(path, np.uint8, "r"))
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes(), object_pairs_hook=named)
    metadata = dict(header.pop(_METADATA, None) or {})
    label = metadata.pop(_LABEL, None)
    metadata.pop("format", None)
    return Contents(
        arrays={name: _array(name, entry, data[start:]) for name, entry in header.items()},
        label=label,
        extra={"metadata": metadata} if metadata else None,
        file_bytes=data.size,
    )


def _check(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise InvalidInputError(f"not a safetensors file, or a truncated one: {error}") from error


def _array(name: str, entry: dict[str, Any], values: Array) -> Array:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise InvalidInputError(f"tensor {name!r}: dtype {entry['dtype']} cannot be stored")
    if (dimensions := len(entry["shape"])) > _MOST_DIMENSIONS:
        raise InvalidInputError(f"tensor {name!r}: {dimensions} dimensions; at most {_MOST_DIMENSIONS} can be stored")
    low, high = entry["data_offsets"]
    little = dtypes.logical(dtypes.STORED[dtype]).newbyteorder("<")
    return dtypes.from_stored(values[low:high].view(little).reshape(entry["shape"]), dtype)


def write(out: BinaryIO, entries: Sequence[Entry], label: str) -> None:
    """Write a file: the header, then tensor after tensor, piece by piece."""
    ordered = sorted(entries, key=lambda entry: (-dtypes.logical(entry.dtype).itemsize, entry.name))  # all are aligned
    header: dict[str, Any] = {_METADATA: {"format": "pt", _LABEL: label}}
    offset = 0
    for entry in ordered:
        header[entry.name] = _described(entry, offset)
        offset += entry.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise InvalidInputError(f"names and the trainer's state take {len(text)} bytes; a header has {_LONGEST_HEADER}")
    out.write(len(text).to_bytes(8, "little") + text)
    for entry in ordered:
        out.writelines(entry.buffers())


def _described(entry: Entry, offset: int) -> dict[str, Any]:
    if entry.dtype not in _NAMES:
        raise InvalidInputError(f"tensor {entry.name!r}: a safetensors file cannot hold {entry.dtype}; npz can")
    if entry.name == _METADATA:
        raise InvalidInputError(f"a safetensors file cannot hold a tensor of the name {entry.name!r}; npz can")
    return {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [offset, offset + entry.nbytes]}
