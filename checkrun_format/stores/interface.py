"""The operations that the format needs of a store (FORMAT.md STO-1, STO-2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from io import BytesIO, RawIOBase
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format.errors import InvalidInputError

if TYPE_CHECKING:
    import zarr.abc.store

Buffer: TypeAlias = bytes | npt.NDArray[np.uint8]
"""What a store takes: bytes, or a contiguous array of bytes."""


class AlreadyExistsError(Exception):
    """`Store.create` found the key occupied. Never reaches the user: callers say what it means."""


class Store(ABC):
    """Byte strings under keys such as `00000041/zarr.json`, relative to the run.

    Every method raises `StorageError` when the store fails.
    """

    url: str
    """Where it is, for messages."""
    parallel: int = 1
    """How many calls at a time it gains from."""
    readers: int | None = None
    """How many reads at a time it gains from, if that is another number."""
    budget_bytes: int = 64 << 20
    """How many bytes the calls that wait or go on may hold together."""
    inline_bytes: int = 256 << 10
    """A call that moves fewer bytes is not worth another thread; 0 where each call waits for an answer."""

    @property
    def is_far(self) -> bool:
        """Whether each call waits for an answer, so that it pays to ask for much at a time, and for few objects."""
        return self.inline_bytes == 0

    def prepare(self) -> None:  # noqa: B027 - most stores are always ready
        """Make sure, before anything is written, that `create` is what the format needs (STO-2).

        Raises
        ------
        InvalidInputError
            It is not, and no other way was asked for.
        """

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The object, None if there is none."""

    def open(self, key: str) -> RawIOBase | BytesIO | None:
        """The object as a file to be read from its beginning to its end, None if there is none."""
        data = self.get(key)
        return None if data is None else BytesIO(data)

    def ahead(self, key: str) -> Callable[[], bytes | None] | None:
        """Begin to read an object that is needed soon; what is returned waits for it, and is `get` then.

        None where there is nothing to be gained.
        """
        del key
        return None

    @abstractmethod
    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        """Store a new object, the buffers one after another; return its size. Never overwrites."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Store an object atomically and durably if the key is free.

        Raises
        ------
        AlreadyExistsError
            The key is occupied.
        """

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Store an object atomically, over another if need be."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object; none is no error."""

    @abstractmethod
    def folders(self) -> list[str] | None:
        """Names directly below the run that hold anything, in no order; None if the run itself does not exist."""

    @abstractmethod
    def list(self, prefix: str) -> dict[str, int]:
        """Key and size of every object below a prefix."""

    def modified(self, key: str) -> float | None:
        """When an object was last written, in seconds since the epoch; None if that is not known.

        The format needs no such time (STO-3); only pruning asks for it, where it is told to remove what may be alive.
        """
        del key
        return None

    @abstractmethod
    def sync(self, prefix: str) -> None:
        """Return once every object that was put below a prefix, and the way to it, survives a crash of the machine."""

    def free_bytes(self) -> int | None:
        """Bytes that the store has left for this process, None if it cannot tell."""
        return None

    def zarr_store(self, prefix: str) -> zarr.abc.store.Store:
        """What lies below a prefix, as a read-only store of zarr-python; the caller imports zarr."""
        raise InvalidInputError(f"{self.url}: {type(self).__name__} offers zarr-python nothing below {prefix!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{type(self).__name__} cannot be pickled: open the run in each process")
