"""A run on any other file system of fsspec: in memory, on Google Cloud Storage, on Azure, behind HTTP to be read."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from checkrun_format.errors import AccessDeniedError, CheckrunError, InvalidInputError, StorageError
from checkrun_format.stores.failures import scrubbed
from checkrun_format.stores.interface import AlreadyExistsError, Buffer, Store

if TYPE_CHECKING:
    import zarr.abc.store

_EXACT = {"abfs", "abfss", "adl", "az", "gcs", "gs"}
"""Their `pipe_file(mode="create")` has the server decide (gcsfs: generation 0; adlfs: no overwrite)."""
_LOCAL = {"memory"}
"""Where there is one process, so that one lock decides who is first."""
_ONE_PROCESS = threading.Lock()
_READ_ONLY = {"http", "https"}
_PARALLEL = 16
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_USERINFO = re.compile(r"[^/@]*:[^/@]*@")


class FilesystemStore(Store):
    """Objects as files of an fsspec file system.

    Parameters
    ----------
    url : str
        Any address that fsspec knows.
    storage_options : mapping
        Of the file system's class.
    single_writer : bool
        The caller sees to it that nobody else writes the run; needed where the file system does not create exactly.
    """

    parallel = _PARALLEL
    budget_bytes = 192 << 20
    inline_bytes = 0

    def __init__(
        self, url: str, *, storage_options: Mapping[str, Any] | None = None, single_writer: bool = False
    ) -> None:
        self._scheme, _, rest = url.partition("://")
        if _USERINFO.match(rest):
            raise InvalidInputError(f"an address of {self._scheme} holds no credentials: put them into storage_options")
        self.url = url.rstrip("/")
        self.single_writer = single_writer
        self._options = dict(storage_options or {})
        self._filesystems: dict[int, Any] = {}
        self._root = self._filesystem()._strip_protocol(self.url).rstrip("/")  # noqa: SLF001 - documented by fsspec

    def __repr__(self) -> str:
        return f"FilesystemStore({self.url!r})"

    def _filesystem(self) -> Any:
        """The file system of this process: that of a parent may be useless after a fork."""
        process = os.getpid()
        if process not in self._filesystems:
            self._filesystems.setdefault(process, self._made(asynchronous=False))
        return self._filesystems[process]

    def _made(self, *, asynchronous: bool) -> Any:
        import fsspec

        fixed = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            if asynchronous:
                fixed["asynchronous"] = True
            return fsspec.filesystem(self._scheme, **{**self._options, **fixed})
        except ImportError as error:
            raise InvalidInputError(f"{self._scheme}:// needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise InvalidInputError(f"{self.url}: no store here serves this address ({error})") from None
        except (KeyError, TypeError) as error:
            raise InvalidInputError(f"storage_options of {self.url} are refused ({type(error).__name__})") from None
        except OSError as error:  # as of an archive that is not there
            said = scrubbed(str(error), _texts(self._options))
            raise StorageError(error.errno or errno.EIO, f"{self.url}: the store cannot be opened ({said})") from None

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def get(self, key: str) -> bytes | None:
        with self._our_errors(key):
            try:
                data: bytes = self._filesystem().cat_file(self._path(key))
            except _MISSING:
                return None
            return bytes(data)

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        data = b"".join(buffers)  # type: ignore[arg-type]
        self._pipe(key, data, "overwrite")
        return len(data)

    def create(self, key: str, data: bytes) -> None:
        if self.single_writer and self.get(key) is not None:
            raise AlreadyExistsError(key)
        if self.single_writer:
            self._pipe(key, data, "overwrite")
        elif self._scheme in _LOCAL:
            with _ONE_PROCESS:
                self._pipe(key, data, "create")
        else:
            self._pipe(key, data, "create")

    def _pipe(self, key: str, data: bytes, mode: str) -> None:
        self._check_writable()
        with self._our_errors(key):
            try:
                self._filesystem().pipe_file(self._path(key), data, mode=mode)
            except FileExistsError as error:
                raise AlreadyExistsError(key) from error

    def replace(self, key: str, data: bytes) -> None:
        self._pipe(key, data, "overwrite")

    def delete(self, key: str) -> None:
        self._check_writable()
        with self._our_errors(key), contextlib.suppress(*_MISSING):
            self._filesystem().rm_file(self._path(key))

    def folders(self) -> list[str] | None:
        with self._our_errors(""):
            try:
                found = self._filesystem().ls(self._path(""), detail=False)
            except _MISSING:
                return None
            return [name.rstrip("/").rpartition("/")[2] for name in found] or None

    def list(self, prefix: str) -> dict[str, int]:
        with self._our_errors(prefix):
            found = self._filesystem().find(self._path(prefix), detail=True)
        return {path[len(self._root) + 1 :]: int(info.get("size") or 0) for path, info in found.items()}

    def modified(self, key: str) -> float | None:
        with self._our_errors(key):
            try:
                return float(self._filesystem().modified(self._path(key)).timestamp())
            except (*_MISSING, NotImplementedError, KeyError):
                return None

    def sync(self, prefix: str) -> None:
        """What such a store has acknowledged survives, as far as it says."""

    def prepare(self) -> None:
        """See `Store.prepare`. Whether a file system creates exactly is known of some of them (STO-2)."""
        self._check_writable()
        if not self.single_writer and self._scheme not in _EXACT | _LOCAL:
            raise InvalidInputError(
                f"{self.url}: it is not known that {self._scheme}:// creates an object only if there is none. Open the "
                "run with single_writer=True if no other process ever writes it"
            )

    def _check_writable(self) -> None:
        if self._scheme in _READ_ONLY:
            raise InvalidInputError(f"{self.url}: runs behind {self._scheme}:// can be read only")

    def zarr_store(self, prefix: str) -> zarr.abc.store.Store:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
        from zarr.storage import FsspecStore

        filesystem = self._filesystem()
        if filesystem.async_impl:
            filesystem = self._made(asynchronous=True)
        else:
            filesystem = AsyncFileSystemWrapper(filesystem, asynchronous=True)
        return FsspecStore(filesystem, path=self._path(prefix), read_only=True)

    @contextlib.contextmanager
    def _our_errors(self, key: str) -> Iterator[None]:
        place = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except (CheckrunError, AlreadyExistsError):
            raise
        except PermissionError as error:
            raise AccessDeniedError(errno.EACCES, f"{place}: access denied") from error
        except Exception as error:  # noqa: BLE001 - whatever a client raises, it is a failure of the store
            said = scrubbed(f"{type(error).__name__}: {error}", _texts(self._options))
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            raise StorageError(number, f"{place}: the store failed ({said})") from None


def _texts(options: Any) -> Iterator[str]:
    """Every text in some options: which of them is a secret is known to the file system alone."""
    if isinstance(options, Mapping):
        for value in options.values():
            yield from _texts(value)
    elif isinstance(options, str) and len(options) > 3:
        yield options
