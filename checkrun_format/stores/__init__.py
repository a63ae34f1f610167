"""Where a run is stored: the operations that the format needs, and the stores that offer them (FORMAT.md section 2)."""

from __future__ import annotations

import os

from checkrun_format.errors import InvalidInputError
from checkrun_format.stores.interface import AlreadyExistsError, Buffer, Store
from checkrun_format.stores.local import LocalStore

__all__ = ["AlreadyExistsError", "Buffer", "LocalStore", "Store", "open_store"]


def open_store(url: str | os.PathLike[str] | Store, *, durable: bool = True) -> Store:
    """The store at an address.

    Parameters
    ----------
    url : str, path or Store
        A local path, `file://` and a path, or a store (returned as it is).
    durable : bool
        False skips every sync: a crash of the machine (not of the process) may then lose the newest checkpoints.

    Raises
    ------
    InvalidInputError
        For a scheme that no store here serves.
    """
    if isinstance(url, Store):
        return url
    path = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidInputError(f"{url!r} is no address of a run: give a path or file:// and a path")
    scheme, separator, rest = path.partition("://")
    if not separator:
        return LocalStore(path, durable=durable)
    if scheme == "file" and rest.startswith("/"):
        return LocalStore(_from_file_url(path), durable=durable)
    raise InvalidInputError(f"{path!r}: this release stores runs in local folders only (a path, or file:///path)")


def _from_file_url(url: str) -> str:
    from fsspec.core import url_to_fs

    path: str = url_to_fs(url)[1]
    return path
