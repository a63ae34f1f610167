"""Files of `numpy.savez`: a zip archive of `.npy` arrays. Nothing in them is ever unpickled."""

from __future__ import annotations

import errno
import json
import math
import shutil
import struct
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.lib import format as npy

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError, StorageError
from checkrun_format.interchange.contents import PIECE_BYTES, Array, Contents, Entry

_SUFFIX, _LABEL = ".npy", "__checkrun__"
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a zip member: all but the lengths of name and extra field, which stand between it and the data."""

_BITS = {"bfloat16", *(name for name in dtypes.STORED if name.startswith("float8"))}
"""Logical dtypes that numpy itself lacks: stored as bits, named in the label."""


class _Kept(msgspec.Struct, frozen=True):
    """Of the label, what is about this kind of file."""

    dtypes: dict[str, str] = {}


def read(path: Path, stack: ExitStack) -> Contents:
    """The arrays of a file, mapped; compressed ones from copies in a temporary folder that goes with `stack`.

    Each member is read once beforehand, so that its checksum is verified.
    """
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
    except zipfile.BadZipFile as error:
        raise InvalidInputError(f"not an npz file, or a truncated one: {error}") from error
    members = archive.infolist()
    twice = [name for name, count in Counter(member.filename for member in members).items() if count > 1]
    if twice:
        raise InvalidInputError(f"the name {twice[0]!r} is there twice")
    arrays = {}
    for member in members:
        if not member.filename.endswith(_SUFFIX):
            raise InvalidInputError(f"member {member.filename!r} is no array (.npy)")
        arrays[member.filename.removesuffix(_SUFFIX)] = _array(path, archive, member, stack)
    label = arrays.pop(_LABEL, None)
    text = None if label is None else label.tobytes().decode(errors="replace")  # refused below
    kept = {} if text is None else _kept(text)
    arrays |= {name: _from_bits(name, arrays[name], dtype) for name, dtype in kept.items() if name in arrays}
    return Contents(arrays=arrays, label=text, file_bytes=path.stat().st_size)


def _kept(label: str) -> dict[str, str]:
    """Logical dtypes of the arrays that are stored as bits, by name."""
    try:
        return msgspec.convert(json.loads(label), _Kept).dtypes
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise InvalidInputError(f"array {_LABEL!r} is not what `checkrun export` writes: {error}") from error


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, stack: ExitStack) -> Array:
    try:
        if member.compress_type == zipfile.ZIP_STORED:
            with archive.open(member) as data:
                while data.read(PIECE_BYTES):
                    pass
            return _mapped(path, _start(path, member), member)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkrun-")))
        _check_room(path, member, folder)
        with archive.open(member) as data, (folder / "array.npy").open("wb") as copy:
            shutil.copyfileobj(data, copy, PIECE_BYTES)
        return _mapped(folder / "array.npy", 0, member)
    except (InvalidInputError, MemoryError):
        raise
    except Exception as error:  # each codec has errors of its own
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidInputError(f"member {member.filename!r} is damaged, or cannot be read: {error}") from error


def _check_room(path: Path, member: zipfile.ZipInfo, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if member.file_size > free:
        what = f"{path}: member {member.filename!r} unpacks to {member.file_size} bytes"
        raise StorageError(errno.ENOSPC, f"{what}, and {folder.parent} has {free}; TMPDIR names another folder")


def _start(path: Path, member: zipfile.ZipInfo) -> int:
    """Where the data of a member begins."""
    with path.open("rb") as file:
        file.seek(member.header_offset)
        lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return int(member.header_offset + _LOCAL_HEADER.size + sum(lengths))


def _mapped(path: Path, start: int, member: zipfile.ZipInfo) -> Array:
    """The array whose `.npy` begins at `start`."""
    name = member.filename
    with path.open("rb") as file:
        file.seek(start)
        try:
            version = npy.read_magic(file)
            headers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            if version not in headers:
                raise InvalidInputError(f"member {name!r}: version {version} of .npy is not read")
            shape, fortran, dtype = headers[version](file)
        except ValueError as error:
            raise InvalidInputError(f"member {name!r} is no array: {error}") from error
        offset = file.tell()
    if dtype.hasobject:
        raise InvalidInputError(f"tensor {name.removesuffix(_SUFFIX)!r} holds Python objects: never unpickled")
    size = offset - start + dtype.itemsize * math.prod(shape)
    if size != member.file_size:
        raise InvalidInputError(f"member {name!r} has {member.file_size} bytes where its header wants {size}")
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.asarray(np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C"))


def _from_bits(name: str, array: Array, dtype: str) -> Array:
    if dtype not in _BITS or array.dtype.name != dtypes.STORED[dtype]:
        raise InvalidInputError(f"tensor {name!r}: {array.dtype} is not {dtype!r}, as the label of the file says")
    return dtypes.from_stored(array, dtype)


def write(out: BinaryIO, entries: Sequence[Entry], label: str) -> None:
    """Write a file, array after array, piece by piece; bfloat16 and float8 as their bits."""
    kept = {entry.name: entry.dtype for entry in entries if entry.dtype in _BITS}
    text = json.dumps(json.loads(label) | ({"dtypes": kept} if kept else {})).encode()
    about = Entry(name=_LABEL, dtype="uint8", shape=(len(text),), pieces=lambda: [np.frombuffer(text, np.uint8)])
    with zipfile.ZipFile(out, "w") as archive:
        for entry in [*entries, about]:
            if "\0" in entry.name or (entry.name == _LABEL and entry is not about):
                raise InvalidInputError(f"an npz file cannot hold an array of the name {entry.name!r}")
            with archive.open(entry.name + _SUFFIX, "w", force_zip64=True) as member:
                npy.write_array_header_1_0(member, _header(entry))
                for buffer in entry.buffers():
                    member.write(buffer)


def _header(entry: Entry) -> dict[str, Any]:
    dtype = dtypes.logical(dtypes.STORED[entry.dtype] if entry.dtype in _BITS else entry.dtype)
    return {"descr": npy.dtype_to_descr(dtype.newbyteorder("<")), "fortran_order": False, "shape": entry.shape}
