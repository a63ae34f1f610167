"""What is sent to an HTTP server, and what comes from it: buffers one after another, without a copy of them."""

from __future__ import annotations

import functools
import io
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from checkrun_format.stores.interface import Buffer

_PIECE = 1 << 20


class Body:
    """Buffers as one object that can be read, measured and sent again.

    aiohttp would copy bytes on their way to the socket, and files through another thread in small pieces.

    Parameters
    ----------
    buffers : iterable of bytes or arrays of bytes
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        views = [memoryview(buffer) for buffer in buffers]  # type: ignore[arg-type]
        self._views = [view.cast("B") for view in views if view.nbytes]
        self._size = sum(view.nbytes for view in self._views)
        self._position = 0
        _register()

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        """Where `read` goes on."""
        return self._position

    def seek(self, position: int, whence: int = 0) -> int:
        """Have `read` go on elsewhere: from the beginning (0), from here (1) or from the end (2)."""
        self._position = (0, self._position, self._size)[whence] + position
        return self._position

    def read(self, size: int = -1) -> bytes:
        """The next bytes; botocore signs them."""
        stop = self._size if size < 0 else min(self._size, self._position + size)
        data = b"".join(self.pieces(self._position, stop))
        self._position = stop
        return data

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes start..stop-1, some at a time."""
        before = 0
        for view in self._views:
            low, high = max(0, start - before), min(view.nbytes, stop - before)
            for at in range(low, high, _PIECE):
                yield view[at : min(at + _PIECE, high)]
            before += view.nbytes


class Received(io.RawIOBase):
    """Pieces that have come, as a file to be read once; what has been read is let go."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = deque(memoryview(piece) for piece in pieces if piece)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """The next bytes, as many as lie together."""
        if not self._pieces:
            return 0
        piece, into = self._pieces.popleft(), memoryview(buffer)
        count = min(piece.nbytes, into.nbytes)
        into[:count] = piece[:count]
        if count < piece.nbytes:
            self._pieces.appendleft(piece[count:])
        return count


@functools.cache
def _register() -> None:
    """Tell aiohttp how a `Body` is sent."""
    from aiohttp import payload
    from aiohttp.abc import AbstractStreamWriter

    class BodyPayload(payload.Payload):
        _value: Body

        @property
        def size(self) -> int:
            return len(self._value)

        def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
            return self._value.read().decode(encoding, errors)

        async def write(self, writer: AbstractStreamWriter) -> None:
            await self.write_with_length(writer, None)

        async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
            size = len(self._value)
            for piece in self._value.pieces(0, size if content_length is None else min(size, content_length)):
                await writer.write(piece)

        async def as_bytes(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            del encoding, errors
            return b"".join(self._value.pieces(0, len(self._value)))

    payload.PAYLOAD_REGISTRY.register(BodyPayload, Body)
