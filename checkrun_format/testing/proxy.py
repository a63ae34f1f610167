"""A TCP proxy on loopback that delays, narrows, cuts and refuses: real connections, real resets."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Self

_PIECE = 64 << 10
_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
_REFUSAL = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: " + str(len(_SLOW_DOWN)).encode() + b"\r\n\r\n" + _SLOW_DOWN
)


class Proxy:
    """Listens at a free port, and passes on to another one of loopback.

    Parameters
    ----------
    port : int
        Where the server listens.
    latency : float
        Seconds that each answer comes late.
    bytes_per_second : float, optional
        What all connections pass on together, in each direction.

    Attributes
    ----------
    endpoint_url : str
    passed : list of two int
        Bytes passed on: to the server, from the server.
    cuts : int
        How many answers were cut.
    """

    def __init__(self, port: int, *, latency: float = 0.0, bytes_per_second: float | None = None) -> None:
        self._port = port
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self.passed = [0, 0]
        self.cuts = 0
        self._cut_after = [0, 0]
        self._to_cut = 0
        self._refuses_until = 0.0
        self._line_is_free = [0.0, 0.0]
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.endpoint_url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def cut(self, after: int, *, times: int = 1, upward: bool = False) -> None:
        """Reset the next connections, each once more than `after` bytes came down (or went up) through it."""
        self._cut_after = [after, -1] if upward else [-1, after]
        self._to_cut = times

    def refuse(self, seconds: float) -> None:
        """Answer everything with 503 SlowDown for a while."""
        self._refuses_until = time.monotonic() + seconds
        self.reset()

    def reset(self) -> None:
        """Reset all connections."""
        for writer in list(self._writers):
            self._loop.call_soon_threadsafe(_abort, writer)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(self._connected, sock=self._listening, limit=4 * _PIECE)

    async def _close(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            _abort(writer)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if time.monotonic() < self._refuses_until:
                await self._refused(reader, writer)
                return
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port, limit=4 * _PIECE)
            self._writers.add(up_writer)
            ways = [self._pass(reader, up_writer, 0, [writer]), self._pass(up_reader, writer, 1, [up_writer])]
            await asyncio.gather(*ways)
        except OSError:
            pass
        finally:
            _abort(writer)
            self._writers.discard(writer)

    async def _refused(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_REFUSAL)
        await writer.drain()
        writer.close()
        while await reader.read(_PIECE):  # a reset now would lose the answer
            pass

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        way: int,
        others: list[asyncio.StreamWriter],
    ) -> None:
        """One direction of one connection; pieces overlap, so that latency takes no bandwidth."""
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        sending = asyncio.create_task(self._deliver(line, writer, way, others))
        try:
            while piece := await reader.read(_PIECE):
                await line.put((self._due(len(piece), way), piece))
            await line.put((0.0, b""))
            await sending
        finally:
            sending.cancel()
            self._writers.discard(writer)
            writer.close()

    def _due(self, size: int, way: int) -> float:
        now = time.monotonic()
        if self.bytes_per_second:
            self._line_is_free[way] = max(now, self._line_is_free[way]) + size / self.bytes_per_second
            now = self._line_is_free[way]
        return now + (self.latency if way else 0.0)

    async def _deliver(
        self,
        line: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        way: int,
        others: list[asyncio.StreamWriter],
    ) -> None:
        sent = 0
        while True:
            due, piece = await line.get()
            if not piece:
                return
            wait = due - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            sent += len(piece)
            if self._to_cut and 0 <= self._cut_after[way] < sent:
                self._to_cut -= 1
                self.cuts += 1
                for one in (writer, *others):
                    _abort(one)
                return
            self.passed[way] += len(piece)
            writer.write(piece)
            await writer.drain()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset."""
    found = writer.get_extra_info("socket")
    if found is not None and not writer.transport.is_closing():
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
