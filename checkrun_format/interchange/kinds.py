"""The kinds of files: which one a file is, and how it is read and written."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from checkrun_format.errors import InvalidInputError, NotFoundError, StorageError
from checkrun_format.interchange import npz, safetensors, shards, state_dict
from checkrun_format.interchange.contents import Contents, Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How files of one kind are recognized, read and written; which package that needs."""

    suffixes: tuple[str, ...]
    package: str
    read: Callable[[Path, contextlib.ExitStack], Contents]
    write: Callable[[BinaryIO, Sequence[Entry], str], None]


KINDS = {
    "safetensors": Kind(
        suffixes=(".safetensors",), package="safetensors", read=safetensors.read, write=safetensors.write
    ),
    "torch": Kind(
        suffixes=(".pt", ".pth", ".bin", ".ckpt"), package="torch", read=state_dict.read, write=state_dict.write
    ),
    "npz": Kind(suffixes=(".npz",), package="numpy", read=npz.read, write=npz.write),
}
"""The kinds by name."""

_INDEX = ".json"


def kind_of(path: Path, given: str | None = None) -> str:
    """The name of a file's kind: as given, or by its suffix.

    Raises
    ------
    InvalidInputError
    """
    if given is not None:
        if given not in KINDS:
            raise InvalidInputError(f"unknown kind of file {given!r}; known are {', '.join(KINDS)}")
        return given
    for name, kind in KINDS.items():
        if path.suffix.lower() in kind.suffixes:
            return name
    known = ", ".join(suffix for kind in KINDS.values() for suffix in kind.suffixes)
    raise InvalidInputError(
        f"{path}: the suffix does not tell what kind of file it is ({known}); --format (kind=) takes {', '.join(KINDS)}"
    )


@contextlib.contextmanager
def opened(path: Path, given: str | None = None) -> Iterator[Contents]:
    """What a file, or all files of an index, hold; valid inside the `with`.

    Raises
    ------
    NotFoundError
        There is no such file.
    InvalidInputError
        It is not of its kind, or holds what the format cannot store; names file and tensor.
    StorageError
    """
    with contextlib.ExitStack() as stack:
        if path.suffix.lower() == _INDEX:
            contents = _read_index(path, given, stack)
        else:
            contents = _read(path, kind_of(path, given), stack)
        yield contents


def _read_index(path: Path, given: str | None, stack: contextlib.ExitStack) -> Contents:
    with told(path):
        where = shards.weight_map(path)
        size = path.stat().st_size
    files = {shard: path.parent / shard for shard in sorted(set(where.values()))}
    read = {shard: _read(file, kind_of(file, given), stack) for shard, file in files.items()}
    with told(path):
        return shards.joined(where, read, size)


def _read(path: Path, kind: str, stack: contextlib.ExitStack) -> Contents:
    with told(path), _installed(kind):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InvalidInputError("not a regular file: it is read here and there, which a pipe is not")
        check = _watch(stack.enter_context(path.open("rb")), path)
        contents = replace(KINDS[kind].read(path, stack), check=check)
        check()
        return contents


def _watch(file: BinaryIO, path: Path) -> Callable[[], None]:
    """What raises once the file has been written to; another file in its place is none of this one's business."""

    def state() -> tuple[int, int]:
        found = os.fstat(file.fileno())
        return found.st_size, found.st_mtime_ns

    before = state()

    def check() -> None:
        if state() != before:
            raise InvalidInputError(f"{path} was written to while it was read: import it again when it is complete")

    return check


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Errors that name the file; what numpy, json and the system's codecs refuse in it is wrong with it."""
    try:
        yield
    except StorageError:
        raise
    except ValueError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    except RecursionError as error:
        raise InvalidInputError(f"{path}: what it holds is nested too deeply, or in itself") from error
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise InvalidInputError(f"{path} is a folder, not a file") from error
    except OSError as error:
        raise StorageError(error.errno, f"{path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _installed(kind: str) -> Iterator[None]:
    package = KINDS[kind].package
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InvalidInputError(
            f'{kind} files need the package {package}: pip install "checkrun-format[{package}]"'
        ) from error


def write(path: Path, kind: str, entries: Sequence[Entry], label: str, *, overwrite: bool) -> int:
    """Write a file of a kind; it appears under its name when it is complete.

    Returns
    -------
    int
        Its bytes.

    Raises
    ------
    InvalidInputError
        The file exists, or this kind cannot hold a tensor.
    StorageError
    """
    if not path.parent.is_dir():
        raise NotFoundError(f"{path.parent}: no such folder")
    _check_free(path, overwrite=overwrite)
    partial = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.partial")
    try:
        with told(path), _installed(kind):
            with partial.open("xb") as out:
                KINDS[kind].write(out, entries, label)
            size = partial.stat().st_size
        _check_free(path, overwrite=overwrite)
        with told(path):
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return size


def _check_free(path: Path, *, overwrite: bool) -> None:
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder, not a file")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InvalidInputError(f"{path} is a link or a device, which a file would replace: name a file")
    if not overwrite and path.exists():
        raise InvalidInputError(f"{path} exists already: name another file, or replace it by --force (overwrite=True)")
