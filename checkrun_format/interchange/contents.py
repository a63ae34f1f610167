"""What a file of tensors holds, whatever its kind; and what is written into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError

Array: TypeAlias = npt.NDArray[Any]

PIECE_BYTES: Final = 16 << 20
"""Bytes of rows that are compared, or resolved and written, at a time, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors of a file, and what it says beside them.

    Attributes
    ----------
    arrays : mapping
        Name to a read-only array that is mapped from the file: its pages are read when they are touched.
    label : text or None
        What an export wrote about tables, blobs and the trainer's state: JSON (`inventory`).
    extra : JSON value
        What else the file holds that is no tensor; None for nothing.
    file_bytes : int
        Bytes of the file, or of all files of an index.
    check : function
        Raises InvalidInputError if somebody has written to the file since it was opened.
    """

    arrays: Mapping[str, Array]
    label: str | None = None
    extra: Any = None
    file_bytes: int = 0
    check: Callable[[], None] = field(default=lambda: None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor on its way into a file: its values come in pieces, one after another in C order."""

    name: str
    dtype: str
    """Logical dtype."""
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Array]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return dtypes.logical(self.dtype).itemsize * int(np.prod(self.shape, dtype=object))

    def buffers(self) -> Iterator[memoryview]:
        """The pieces as bytes, as they stand in a file."""
        return (piece.reshape(-1).view(np.uint8).data for piece in self.stored())

    def stored(self) -> Iterator[Array]:
        """The pieces as bits in the dtype that stores them, little endian, each in one run of memory."""
        for piece in self.pieces():
            bits = dtypes.to_stored(piece)
            yield np.ascontiguousarray(bits.astype(bits.dtype.newbyteorder("<"), copy=False))


def named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for `json.loads(object_pairs_hook=...)`; a name that is there twice is refused."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InvalidInputError(f"the name {twice!r} is there twice")
    return found
