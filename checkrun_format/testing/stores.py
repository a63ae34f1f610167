"""A store in memory, and a store that fails when it is told to."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from checkrun_format.errors import StorageError
from checkrun_format.stores import AlreadyExistsError, Buffer, Store

if TYPE_CHECKING:
    import zarr.abc.store

_T = TypeVar("_T")

WRITES = frozenset({"put", "create", "replace", "delete", "sync"})
"""The calls that change a store, or make sure of a change."""

EVERY_CALL = WRITES | {"get", "folders", "list"}
"""All calls of a store that reach storage."""

How = Literal["before", "after", "truncate", "delay", "down", "late", "stop"]
"""How a call fails."""


class MemoryStore(Store):
    """A store in memory (STO-1, STO-2), for any number of threads.

    Attributes
    ----------
    objects : dict
        Key to bytes; may be altered.
    """

    def __init__(self) -> None:
        self.url = "memory"
        self.durable = False
        self.objects: dict[str, bytes] = {}
        self._creating = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """The object, None if there is none."""
        return self.objects.get(key)

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        """Store a new object; one that is there is an error of the caller's."""
        if key in self.objects:
            raise StorageError(errno.EEXIST, f"{key} is there already")
        self.objects[key] = b"".join(bytes(buffer) for buffer in buffers)
        return len(self.objects[key])

    def create(self, key: str, data: bytes) -> None:
        """Store an object if the key is free."""
        with self._creating:
            if key in self.objects:
                raise AlreadyExistsError(key)
            self.objects[key] = data

    def replace(self, key: str, data: bytes) -> None:
        """Store an object, over another if need be."""
        self.objects[key] = data

    def delete(self, key: str) -> None:
        """Delete an object; none is no error."""
        self.objects.pop(key, None)

    def folders(self) -> list[str] | None:
        """Names directly below the run."""
        return list({key.partition("/")[0] for key in self.objects.copy()})

    def list(self, prefix: str) -> dict[str, int]:
        """Key and size of every object below a prefix."""
        return {key: len(data) for key, data in self.objects.copy().items() if key.startswith(f"{prefix}/")}

    def sync(self, prefix: str) -> None:
        """Memory survives nothing; there is nothing to do."""

    def dump(self, folder: Path) -> None:
        """Write all objects as files: the same run (STO-4), for readers of files."""
        for key, data in self.objects.items():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(data)


def _disk_full() -> BaseException:
    return StorageError(errno.ENOSPC, "the disk is full (injected)")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failure of a store.

    Parameters
    ----------
    at : int
        At which call from now on, counted from 1, among `calls`; 0: never. `late` takes the first commit after it.
    how : text
        `before`: the call raises and does nothing. `after`: it is done, and raises. `truncate`: half of the object is
        stored, and the call raises; a `get` returns half of the object and does not raise; others fail as `before`.
        `delay`: `meanwhile` is called first. `down`: this call and all later ones raise, as if the process had lost its
        store, or its life. `late`: a `create` is kept back and raises; `FaultStore.land` lets it happen after all.
        `stop`: the process is killed (SIGKILL) before the call.
    calls : set of text
        Names of the calls that count.
    error : callable
        Makes what is raised; by default a StorageError. An error that derives from BaseException alone is an interrupt.
    meanwhile : callable
        For `delay`: what happens before the call. By default 10 ms pass.
    """

    at: int = 0
    how: How = "before"
    calls: frozenset[str] = EVERY_CALL
    error: Callable[[], BaseException] = _disk_full
    meanwhile: Callable[[], object] = field(default=lambda: time.sleep(0.01))


class FaultStore(Store):
    """Any store, with a fault. One call at a time, so that the k-th is the same in every repetition.

    Attributes
    ----------
    store : Store
        The store itself; calls of it cannot fail.
    calls : int
        Calls that counted since a fault was armed.
    fired : bool
        The fault has happened.
    kept : tuple or None
        Key and bytes of the commit that is kept back (`late`).
    """

    def __init__(self, store: Store, fault: Fault | None = None) -> None:
        self.store = store
        self.url = store.url
        self.durable = getattr(store, "durable", True)
        self._counting = threading.Lock()
        self.kept: tuple[str, bytes] | None = None
        self.arm(fault)

    def arm(self, fault: Fault | None) -> None:
        """Fail so from here on; None: never."""
        self._fault = fault or Fault()
        self.calls, self.fired = 0, False

    def land(self) -> str | None:
        """Let the `create` that was kept back take effect; its key, None if the key is taken by now."""
        assert self.kept is not None, "no create was kept back"
        (key, data), self.kept = self.kept, None
        try:
            self.store.create(key, data)
        except AlreadyExistsError:
            return None
        return key

    def get(self, key: str) -> bytes | None:
        """The object; half of it where the fault says so."""

        def half() -> bytes | None:
            data = self.store.get(key)
            return None if data is None else data[: len(data) // 2]

        return self._call("get", lambda: self.store.get(key), half)

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        """Store a new object."""

        def half() -> int:
            data = b"".join(bytes(buffer) for buffer in buffers)
            return self.store.put(key, [data[: len(data) // 2]])

        return self._call("put", lambda: self.store.put(key, buffers), half)

    def create(self, key: str, data: bytes) -> None:
        """Store an object if the key is free."""
        if self._fault.how == "late" and not self.fired and self.store.get(key) is None:
            self.fired, self.kept = True, (key, data)
            raise self._fault.error()
        half = data[: len(data) // 2]
        self._call("create", lambda: self.store.create(key, data), lambda: self.store.create(key, half))

    def replace(self, key: str, data: bytes) -> None:
        """Store an object, over another if need be."""
        half = data[: len(data) // 2]
        self._call("replace", lambda: self.store.replace(key, data), lambda: self.store.replace(key, half))

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._call("delete", lambda: self.store.delete(key))

    def folders(self) -> list[str] | None:
        """Names directly below the run."""
        return self._call("folders", self.store.folders)

    def list(self, prefix: str) -> dict[str, int]:
        """Key and size of every object below a prefix."""
        return self._call("list", lambda: self.store.list(prefix))

    def sync(self, prefix: str) -> None:
        """Make objects survive a crash."""
        self._call("sync", lambda: self.store.sync(prefix))

    def modified(self, key: str) -> float | None:
        """When an object was last written; never fails."""
        return self.store.modified(key)

    def free_bytes(self) -> int | None:
        """Bytes that the store has left; never fails."""
        return self.store.free_bytes()

    def prepare(self) -> None:
        """Make sure of `create`; never fails on its own."""
        self.store.prepare()

    def zarr_store(self, prefix: str) -> zarr.abc.store.Store:
        """What lies below a prefix, for zarr-python; never fails on its own."""
        return self.store.zarr_store(prefix)

    def _call(self, name: str, effect: Callable[[], _T], half: Callable[[], _T] | None = None) -> _T:
        """Make a call, or let it fail; `half` does what a truncated one does."""
        fault = self._fault
        with self._counting:
            counts = name in fault.calls
            self.calls += counts
            down = self.fired and fault.how == "down"
            fires = counts and self.calls == fault.at and fault.how != "late"
            self.fired |= fires
        if down:
            raise fault.error()
        return self._fail(name, effect, half) if fires else effect()

    def _fail(self, name: str, effect: Callable[[], _T], half: Callable[[], _T] | None) -> _T:
        how = self._fault.how
        if how == "stop":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "delay":
            self._fault.meanwhile()
            return effect()
        if how == "truncate" and half is not None:
            result = half()
            if name == "get":
                return result
        if how == "after":
            effect()
        raise self._fault.error()
