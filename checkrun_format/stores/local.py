"""A run in a local folder: plain files, created with `link`, synced before every commit."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from checkrun_format.errors import NotARunError, StorageError
from checkrun_format.stores.interface import AlreadyExistsError, Buffer, Store

if TYPE_CHECKING:
    import zarr.abc.store

_MISSING = (FileNotFoundError, NotADirectoryError)
_NO_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
_PARALLEL = 4
"""Two threads write into the page cache twice as fast as one; syncs of several files share the disk's time.

Reads are bound by processors: more threads than these are in each other's way."""


class LocalStore(Store):
    """Objects as files below a folder.

    Parameters
    ----------
    path : str
        The run's folder; `~` is expanded. Nothing is created before the first write.
    durable : bool
        False skips every sync.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.fspath(path)))
        self.url = self.root
        self.durable = durable
        self.parallel = _PARALLEL
        self.readers = min(_PARALLEL, max(2, _processors()))
        self._unsynced: set[str] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    def _path(self, key: str) -> str:
        return os.path.join(self.root, *key.split("/")) if key else self.root

    def get(self, key: str) -> bytes | None:
        with _storage_errors(self._path(key)):
            try:
                with open(self._path(key), "rb", buffering=0) as file:
                    return file.readall()
            except (*_MISSING, IsADirectoryError):
                return None

    def open(self, key: str) -> io.RawIOBase | None:
        with _storage_errors(self._path(key)):
            try:
                return LocalFile(self._path(key))
            except (*_MISSING, IsADirectoryError):
                return None

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        path = self._path(key)
        with _storage_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            size = _write_new(path, buffers, durable=self.durable)
        with self._lock:
            self._unsynced.add(os.path.dirname(path))
        return size

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with _storage_errors(path):
            self._make_folder(os.path.dirname(path))
            temporary = self._write_temporary(path, data)
            try:
                self._link(temporary, path, data)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._sync_folder(os.path.dirname(path))

    def replace(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with _storage_errors(path):
            self._make_folder(os.path.dirname(path))
            temporary = self._write_temporary(path, data)
            try:
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            self._sync_folder(os.path.dirname(path))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _storage_errors(path), contextlib.suppress(*_MISSING):
            os.unlink(path)
            self._remove_empty_folders(os.path.dirname(path))

    def folders(self) -> list[str] | None:
        with _storage_errors(self.root):
            try:
                return os.listdir(self.root)
            except FileNotFoundError:
                return None
            except NotADirectoryError as error:
                raise NotARunError(f"{self.root} is a file; a run is a folder") from error

    def list(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with _storage_errors(self._path(prefix)):
            for folder, _, names in os.walk(self._path(prefix), onerror=_raise_unless_missing):
                for name in names:
                    path = os.path.join(folder, name)
                    with contextlib.suppress(*_MISSING):
                        found[os.path.relpath(path, self.root).replace(os.sep, "/")] = os.stat(path).st_size
        return found

    def modified(self, key: str) -> float | None:
        with _storage_errors(self._path(key)), contextlib.suppress(*_MISSING):
            return os.stat(self._path(key)).st_mtime
        return None

    def sync(self, prefix: str) -> None:
        """See `Store.sync`. Files are synced as they are written; the folders that hold them follow here."""
        path = self._path(prefix)
        with self._lock:
            waiting = {folder for folder in self._unsynced if folder == path or folder.startswith(path + os.sep)}
            self._unsynced -= waiting
        folders = {above for folder in waiting for above in _up_to(self.root, folder)}
        try:
            with _storage_errors(path):
                for folder in sorted(folders, key=len, reverse=True):
                    self._sync_folder(folder)
        except BaseException:
            with self._lock:
                self._unsynced |= waiting
            raise

    def free_bytes(self) -> int | None:
        with _storage_errors(self.root):
            there = self.root
            while not os.path.exists(there):
                there = os.path.dirname(there)
            found = os.statvfs(there)
            return found.f_bavail * found.f_frsize

    def zarr_store(self, prefix: str) -> zarr.abc.store.Store:
        from zarr.storage import LocalStore as ZarrStore

        return ZarrStore(self._path(prefix), read_only=True)

    def _make_folder(self, folder: str) -> None:
        """Create a folder and those above it, each durable in its own parent."""
        if os.path.isdir(folder):
            return
        self._make_folder(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        self._sync_folder(os.path.dirname(folder))

    def _write_temporary(self, path: str, data: bytes) -> str:
        temporary = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.tmp")
        try:
            _write_new(temporary, [data], durable=self.durable)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary

    def _link(self, temporary: str, path: str, data: bytes) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError as error:
            raise AlreadyExistsError(path) from error
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            self._create_exclusively(path, data)

    def _create_exclusively(self, path: str, data: bytes) -> None:
        """What remains where the file system has no `link`: a crash in here burns the number (COM-2)."""
        try:
            _write_new(path, [data], durable=self.durable)
        except FileExistsError as error:
            raise AlreadyExistsError(path) from error

    def _sync_folder(self, path: str) -> None:
        if not self.durable:
            return
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _remove_empty_folders(self, folder: str) -> None:
        while folder != self.root:
            try:
                os.rmdir(folder)
            except OSError:
                return
            with self._lock:
                self._unsynced.discard(folder)
            folder = os.path.dirname(folder)


class LocalFile(io.FileIO):
    """A file that is read; its errors are ours."""

    def readinto(self, buffer: Any, /) -> int | None:
        with _storage_errors(str(self.name)):
            return super().readinto(buffer)


def _processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2


def _up_to(root: str, folder: str) -> Iterator[str]:
    """A folder and those above it, up to the root."""
    while len(folder) >= len(root):
        yield folder
        folder = os.path.dirname(folder)


def _write_new(path: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        size = sum(_write_all(descriptor, buffer) for buffer in buffers)
        if durable:
            os.fsync(descriptor)
        return size
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, buffer: Buffer) -> int:
    waiting = memoryview(buffer)  # type: ignore[arg-type]
    while waiting.nbytes:
        waiting = waiting[os.writev(descriptor, [waiting]) :]
    return len(buffer)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, _MISSING):
        raise error


_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and save again",
    errno.EDQUOT: "the quota is used up: free some space and save again",
    errno.EACCES: "permission denied: check the owner and mode of the folder",
    errno.EPERM: "operation not permitted: check the owner and mode of the folder",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the path is too long for this file system",
}


@contextlib.contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
        raise StorageError(error.errno, f"{error.filename or path}: {advice}") from error
