"""Where a run is stored: the operations that the format needs, and the stores that offer them (FORMAT.md section 2)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from checkrun_format.errors import InvalidInputError
from checkrun_format.stores.filesystem import FilesystemStore
from checkrun_format.stores.interface import AlreadyExistsError, Buffer, Store
from checkrun_format.stores.local import LocalStore
from checkrun_format.stores.s3 import S3Store

__all__ = ["AlreadyExistsError", "Buffer", "FilesystemStore", "LocalStore", "S3Store", "Store", "open_store"]

_ONE_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")

SINGLE_WRITER = "CHECKRUN_SINGLE_WRITER"
"""Environment variable: "1" stands for `single_writer=True` where it is not given, as in commands."""


def open_store(
    url: str | os.PathLike[str] | Store,
    *,
    durable: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    single_writer: bool | None = None,
) -> Store:
    """The store at an address.

    Parameters
    ----------
    url : str, path or Store
        A local path, `file://` and a path; `s3://bucket/prefix`; any other address that fsspec knows; or a store
        (returned as it is).
    durable : bool
        False skips every sync: a crash of the machine (not of the process) may then lose the newest checkpoints.
    storage_options : mapping
        Of the file system of fsspec that serves the address, see `S3Store`; nothing of it is ever stored or shown.
    single_writer : bool
        Nobody else writes the run: needed where a store cannot create exactly (STO-2). By default, what the
        environment variable `CHECKRUN_SINGLE_WRITER` says.

    Raises
    ------
    InvalidInputError
        For a scheme that no store here serves.
    """
    if isinstance(url, Store):
        _refuse_options(storage_options, "a store that is open")
        return url
    path = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidInputError(f"{url!r} is no address of a run: give a path, s3://bucket/prefix, or one of fsspec")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise InvalidInputError(f"storage_options: a {type(storage_options).__name__}; give a dict")
    scheme, separator, rest = path.partition("://")
    if _ONE_SLASH.match(path):
        raise InvalidInputError(
            f"{path!r} is no address of a run: write two slashes, and give an address as text, as a Path loses one of "
            f"them; a local folder of this name is {'./' + path!r}"
        )
    if not separator or scheme == "file":
        _refuse_options(storage_options, "a local folder")
    if not separator:
        return LocalStore(path, durable=durable)
    if scheme == "file":
        if not rest.startswith("/"):
            raise InvalidInputError(f"{path!r} is no address of a run: give a path or file:// and an absolute path")
        return LocalStore(_from_file_url(path), durable=durable)
    alone = os.environ.get(SINGLE_WRITER) == "1" if single_writer is None else single_writer
    if scheme in ("s3", "s3a"):
        return S3Store(path, storage_options=storage_options, single_writer=alone)
    return FilesystemStore(path, storage_options=storage_options, single_writer=alone)


def _refuse_options(storage_options: Mapping[str, Any] | None, what: str) -> None:
    if storage_options:
        raise InvalidInputError(f"storage_options are of no use to {what}")


def _from_file_url(url: str) -> str:
    from fsspec.core import url_to_fs

    path: str = url_to_fs(url)[1]
    return path
