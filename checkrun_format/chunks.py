"""One array's chunks as objects: payload, codecs, checksum (FORMAT.md section 4).

Under the codecs `bytes`, `crc32c` a chunk object is exactly its elements followed by their CRC-32C, so uncompressed
chunks go from the array to the file, and back, without a codec pipeline. Any Zarr library reads the same objects.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from io import BytesIO, RawIOBase
from typing import Any, Self

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes, layout
from checkrun_format.errors import DamagedError, PrunedError, UnsupportedFeatureError
from checkrun_format.manifest import ArrayEntry, Pruned, parse_occupant
from checkrun_format.partfile import CHECKSUM_BYTES
from checkrun_format.stores import Buffer, Store
from checkrun_format.workers import Budget, ProcessLock

_SLICE_BYTES = 1 << 20
"""Bytes that are checksummed at a time: while they are in the cache, and while another thread writes or reads."""

_BUFFER_BYTES = 4 << 20
"""Of memory that is read into again and again."""


def row_bytes(entry: ArrayEntry) -> int:
    """Bytes of one row of an array."""
    return dtypes.logical(entry.dtype).itemsize * math.prod(entry.shape[1:])


def encode(
    values: npt.NDArray[Any], entry: ArrayEntry, told: Callable[[int], None] = lambda checksum: None
) -> Iterator[Buffer]:
    """The object of one chunk, as buffers to be written one after another.

    Parameters
    ----------
    values : array
        The chunk's rows, in the dtype that is stored; fewer than `chunk_rows` in the last chunk, which is filled up
        with zeros (ZAR-4). They are read while the buffers are taken.
    told : callable
        Is given the checksum in the end.
    """
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    payload = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
    padding = bytes((entry.chunk_rows - len(values)) * row_bytes(entry))
    if entry.compression is not None:
        compressed = compress(payload.tobytes() + padding, entry.compression, values.itemsize)
        payload, padding = np.frombuffer(compressed, np.uint8), b""
    checksum = 0
    for low in range(0, payload.size, _SLICE_BYTES):
        piece = payload[low : low + _SLICE_BYTES]
        checksum = google_crc32c.extend(checksum, piece)
        yield piece
    yield padding
    checksum = google_crc32c.extend(checksum, padding)
    told(checksum)
    yield checksum.to_bytes(CHECKSUM_BYTES, "little")


def required(store: Store, key: str) -> bytes:
    """An object of a checkpoint.

    Raises
    ------
    PrunedError
        It is gone, and so is its checkpoint (PRU-1).
    DamagedError
        It is missing (ZAR-4).
    """
    data = store.get(key)
    if data is None:
        raise missing(store, key)
    return data


def missing(store: Store, key: str) -> PrunedError | DamagedError:
    """The error of an object that is not there; see `required`."""
    sequence = layout.parse_folder(key.partition("/")[0])
    marker = None if sequence is None else store.get(layout.commit_key(sequence))
    if sequence is not None and marker is not None and isinstance(parse_occupant(marker, sequence), Pruned):
        return PrunedError(f"checkpoint {sequence} was pruned")
    return DamagedError(key, "the object is missing")


def decode(data: bytes, entry: ArrayEntry, index: int, place: str) -> npt.NDArray[Any]:
    """The rows of one chunk, read-only, those beyond the array's end cut off.

    Raises
    ------
    DamagedError
        The object is truncated or altered (ZAR-3, ZAR-4).
    UnsupportedFeatureError
        An unknown compression.
    """
    payload = np.frombuffer(data, np.uint8)[:-CHECKSUM_BYTES]
    checksum = google_crc32c.value(payload)
    if len(data) < CHECKSUM_BYTES or checksum != int.from_bytes(data[-CHECKSUM_BYTES:], "little"):
        raise altered(place)
    check_place(checksum, entry, index, place)
    size = entry.chunk_rows * row_bytes(entry)
    if entry.compression is not None:
        payload = _decompress(payload, entry.compression, size, place)
    if payload.size != size:
        raise DamagedError(place, f"a chunk of {payload.size} bytes where {size} belong")
    rows = payload.view(dtypes.logical(entry.dtype).newbyteorder("<")).reshape(entry.chunk_rows, *entry.shape[1:])
    return rows[: entry.shape[0] - index * entry.chunk_rows]


def altered(place: str) -> DamagedError:
    """The error of an object whose checksum is wrong."""
    return DamagedError(place, "its CRC-32C does not match: the object is truncated or altered")


def check_place(checksum: int, entry: ArrayEntry, index: int, place: str) -> None:
    """Refuse a chunk that is whole, but not the one that the part file means (ZAR-5)."""
    if entry.checksums is not msgspec.UNSET and entry.checksums[index : index + 1] != [checksum]:
        raise DamagedError(place, "another chunk is in its place: its CRC-32C is not the one in the part file (ZAR-5)")


def compress(payload: bytes, compression: str, itemsize: int) -> bytes:
    """Compress as ZAR-6 says: `zstd` at level 1, `blosc` as zstd 5 with byte shuffle."""
    blosc, zstd = _codecs()
    if compression == "zstd":
        return bytes(zstd.compress(payload, 1))
    typed = np.frombuffer(payload, f"V{itemsize}")
    return bytes(blosc.compress(typed, b"zstd", 5, blosc.SHUFFLE, 0, itemsize))


@functools.cache
def _codecs() -> tuple[Any, Any]:
    """The modules `blosc` and `zstd` of numcodecs."""
    import numcodecs.blosc
    import numcodecs.zstd

    numcodecs.blosc.use_threads = False  # as zarr does: they wait for one another wherever processors are busy
    return numcodecs.blosc, numcodecs.zstd


def _decompress(payload: npt.NDArray[np.uint8], compression: str, size: int, place: str) -> npt.NDArray[np.uint8]:
    """The `size` bytes of a chunk, of a frame that says so itself: decoders believe it (ZAR-3)."""
    blosc, zstd = _codecs()
    codecs = {"blosc": (blosc, _of_blosc), "zstd": (zstd, _of_zstd)}
    if compression not in codecs:
        raise UnsupportedFeatureError(f"{place}: unknown compression {compression!r}")
    codec, told = codecs[compression]
    if told(payload) != size:
        raise DamagedError(place, f"it is not one {compression} frame of a chunk of {size} bytes (ZAR-3)")
    out = np.empty(size, np.uint8)
    try:
        codec.decompress(payload, out)
    except (RuntimeError, ValueError) as error:
        raise DamagedError(place, f"{compression} cannot decompress it: {error}") from error
    out.flags.writeable = False
    return out


_BLOSC_ZSTD = 4
"""The code of zstd in the header of Blosc."""


def _of_blosc(frame: npt.NDArray[np.uint8]) -> int | None:
    """How many bytes a frame of Blosc 1 decodes to; None if it is none, of another length, or not with zstd inside."""
    header = frame[:16].tobytes()
    if len(header) < 16 or int.from_bytes(header[12:], "little") != frame.size or header[2] >> 5 != _BLOSC_ZSTD:
        return None
    return int.from_bytes(header[4:8], "little")


def _of_zstd(frame: npt.NDArray[np.uint8]) -> int | None:
    """How many bytes a frame of Zstandard decodes to (RFC 8878, 3.1.1); None if it is none, or does not tell."""
    header = frame[:18].tobytes()
    if len(header) < 6 or header[:4] != b"\x28\xb5\x2f\xfd":
        return None
    whole, width = header[4] >> 5 & 1, header[4] >> 6
    size_bytes = 1 << width if width or whole else 0
    start = 6 - whole + (0, 1, 2, 4)[header[4] & 3]
    size = int.from_bytes(header[start : start + size_bytes], "little")
    return size + 256 * (width == 1) if size_bytes else None


def smaller_compression(values: npt.NDArray[Any]) -> str:
    """`blosc`, which is read several times as fast, or `zstd` if it saves a sixteenth of the bytes (ZAR-6)."""
    payload = np.ascontiguousarray(values).tobytes()
    blosc, zstd = (len(compress(payload, name, values.itemsize)) for name in ("blosc", "zstd"))
    return "zstd" if zstd <= blosc * 15 / 16 else "blosc"


class Readahead:
    """Objects that are read before they are asked for.

    Parameters
    ----------
    store : Store
    window_bytes : int
        How many bytes are read ahead at a time.
    """

    def __init__(self, store: Store, window_bytes: int = 32 << 20) -> None:
        self._store = store
        self._window_bytes = window_bytes
        self._waiting: deque[tuple[str, int]] = deque()
        self._begun: dict[str, tuple[Callable[[], bytes | None], int]] = {}
        self._process = 0
        self._lock = ProcessLock()

    @contextlib.contextmanager
    def expecting(self, objects: Iterable[tuple[str, int]]) -> Iterator[None]:
        """Read these, key and bytes each, ahead of the reading that goes on meanwhile."""
        with self._lock:
            self._process = os.getpid()
            self._waiting.extend(objects)
            self._begin()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.clear()
                self._begun.clear()

    def get(self, key: str) -> bytes | None:
        """An object, None if there is none."""
        begun = self._taken(key)
        return self._store.get(key) if begun is None else begun()

    def open(self, key: str) -> RawIOBase | BytesIO | None:
        """An object as a file, None if there is none."""
        begun = self._taken(key)
        if begun is None:
            return self._store.open(key)
        data = begun()
        return None if data is None else BytesIO(data)

    def _taken(self, key: str) -> Callable[[], bytes | None] | None:
        if self._process != os.getpid():
            return None
        with self._lock:
            begun = self._begun.pop(key, None)
            self._begin()
        return None if begun is None else begun[0]

    def _begin(self) -> None:
        while self._waiting and sum(size for _, size in self._begun.values()) < self._window_bytes:
            key, size = self._waiting.popleft()
            result = self._store.ahead(key)
            if result is None:
                self._waiting.clear()
            else:
                self._begun[key] = (result, size)


class ChunkReader:
    """Reads chunks of a run; keeps the last ones that are shared by many parts or tensors.

    Parameters
    ----------
    store : Store
    cache_bytes : int
        How much it may keep.
    """

    def __init__(self, store: Store, cache_bytes: int = Budget().kept) -> None:
        self._store = store
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[str, npt.NDArray[Any]] = OrderedDict()
        self._read: dict[tuple[int, str], Future[npt.NDArray[Any]]] = {}
        self._ahead = Readahead(store)
        self._lock = ProcessLock()

        self._free: list[npt.NDArray[np.uint8]] = []

    def expecting(self, objects: Iterable[tuple[str, int]]) -> AbstractContextManager[None]:
        """Read chunk objects, key and bytes each, before they are asked for, in this order and not too many of them."""
        return self._ahead.expecting(objects)

    @property
    def streams(self) -> bool:
        """Whether the store reads an object piece by piece; one that is far holds it as a whole."""
        return not self._store.is_far and type(self._store).open is not Store.open

    def chunk(self, array_key: str, entry: ArrayEntry, index: int, *, shared: bool) -> npt.NDArray[Any]:
        """Chunk `index` of the array at `array_key`; errors as of `required` and `decode`."""
        key = f"{array_key}/{layout.chunk_name(index, len(entry.shape))}"
        if not shared:
            return decode(self._required(key), entry, index, key)
        place = (os.getpid(), key)  # a child has no use for what its parent is reading
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            reading = self._read.get(place)
            if reading is None:
                mine = self._read[place] = Future()
        return self._fetched(place, mine, entry, index) if reading is None else reading.result()

    def _fetched(
        self, place: tuple[int, str], mine: Future[npt.NDArray[Any]], entry: ArrayEntry, index: int
    ) -> npt.NDArray[Any]:
        """Read a chunk for everybody who waits for it by now."""
        key = place[1]
        try:
            values = decode(self._required(key), entry, index, key)
        except BaseException as error:
            with self._lock:
                del self._read[place]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._read[place]
            self._kept[key] = values
            self._forget()
        mine.set_result(values)
        return values

    def _required(self, key: str) -> bytes:
        data = self._ahead.get(key)
        if data is None:
            raise missing(self._store, key)
        return data

    def keep(self, cache_bytes: int) -> None:
        """Keep so many bytes from now on."""
        with self._lock:
            self._cache_bytes = cache_bytes
            self._forget()

    def _forget(self) -> None:
        while sum(kept.nbytes for kept in self._kept.values()) > self._cache_bytes:
            self._kept.popitem(last=False)

    def slices(
        self, array_key: str, entry: ArrayEntry, index: int, span: tuple[int, int], step: int, *, shared: bool
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Rows of chunk `index`, at most `step` at a time: whatever is read is still in the cache when it is used.

        The checksum is known to match once the last slice has been taken; errors as of `required` and `decode`.

        Parameters
        ----------
        span : tuple of two int
            Rows within the chunk that are needed; slices without them are passed over.

        Yields
        ------
        int, array
            The first row of a slice within the chunk, a multiple of `step`; the rows, which may change with the next
            slice.
        """
        exist = min(entry.chunk_rows, entry.shape[0] - index * entry.chunk_rows)
        if shared or entry.compression is not None or sys.byteorder != "little":
            values = self.chunk(array_key, entry, index, shared=shared)
            for low in range(span[0] // step * step, span[1], step):
                yield low, values[low : low + step]
            return
        width, dtype = row_bytes(entry), dtypes.logical(entry.dtype)
        key = f"{array_key}/{layout.chunk_name(index, len(entry.shape))}"
        with self._checked(key) as file:
            with self._buffer(step * width) as buffer:
                for low in range(0, exist, step):
                    count = min(step, exist - low)
                    file.fill(buffer[: count * width])
                    if low < span[1] and low + step > span[0]:
                        yield low, buffer[: count * width].view(dtype).reshape(count, *entry.shape[1:])
            check_place(file.finish((entry.chunk_rows - exist) * width), entry, index, key)

    @contextlib.contextmanager
    def _buffer(self, size: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Memory that is used again: the first touch of new memory takes as long as several copies."""
        if size > _BUFFER_BYTES:
            yield np.empty(size, np.uint8)
            return
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(_BUFFER_BYTES, np.uint8)
        yield buffer
        self._free.append(buffer)

    def into(
        self, array_key: str, entry: ArrayEntry, index: int, rows: slice, out: npt.NDArray[Any], *, shared: bool
    ) -> None:
        """Rows of chunk `index` into `out`: straight from the store, if it is all of them and no compression.

        Errors as of `required` and `decode`; `out` may then hold anything.

        Parameters
        ----------
        rows : slice
            Within the chunk, and within the array.
        out : array
            In the dtype that is stored.
        """
        exist = min(entry.chunk_rows, entry.shape[0] - index * entry.chunk_rows)
        direct = rows == slice(0, exist) and entry.compression is None and out.flags.c_contiguous
        if direct and sys.byteorder == "little":
            self._straight(f"{array_key}/{layout.chunk_name(index, len(entry.shape))}", entry, index, out)
        else:
            out[...] = self.chunk(array_key, entry, index, shared=shared)[rows]

    def _straight(self, key: str, entry: ArrayEntry, index: int, out: npt.NDArray[Any]) -> None:
        payload = out.reshape(-1).view(np.uint8)
        with self._checked(key) as file:
            file.fill(payload)
            check_place(file.finish(entry.chunk_rows * row_bytes(entry) - payload.size), entry, index, key)

    def _checked(self, key: str) -> CheckedFile:
        file = self._ahead.open(key)
        if file is None:
            raise missing(self._store, key)
        return CheckedFile(file, key)

    def rows(self, array_key: str, entry: ArrayEntry, start: int, stop: int, *, shared: bool) -> npt.NDArray[Any]:
        """Rows start..stop-1 of an array, from as few chunks as hold them."""
        first, last = start // entry.chunk_rows, max(start, stop - 1) // entry.chunk_rows
        pieces = [self.chunk(array_key, entry, index, shared=shared) for index in range(first, last + 1)]
        rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return rows[start - first * entry.chunk_rows : stop - first * entry.chunk_rows]


class CheckedFile:
    """The object of a chunk, read from its beginning to its end: what is compressed, if it is, and the checksum."""

    def __init__(self, file: RawIOBase | BytesIO, place: str) -> None:
        self._file = file
        self._place = place
        self._checksum = 0

    def fill(self, piece: npt.NDArray[np.uint8]) -> None:
        """Read the next bytes."""
        for low in range(0, piece.size, _SLICE_BYTES):
            some = piece[low : low + _SLICE_BYTES]
            self._read(some)
            self._checksum = google_crc32c.extend(self._checksum, some)

    def finish(self, padding: int = 0) -> int:
        """Read so many bytes more, then the checksum, and refuse what does not match it."""
        self.fill(np.empty(padding, np.uint8))
        checksum = np.empty(CHECKSUM_BYTES, np.uint8)
        self._read(checksum)
        if self._checksum != int.from_bytes(checksum.tobytes(), "little") or self._file.read(1):
            raise altered(self._place)
        return self._checksum

    def _read(self, piece: npt.NDArray[np.uint8]) -> None:
        view = memoryview(piece)  # type: ignore[arg-type]
        while view.nbytes:
            count = self._file.readinto(view)
            if not count:
                raise altered(self._place)
            view = view[count:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def object_names(array: str, entry: ArrayEntry) -> list[str]:
    """Every object of an array: its metadata and its chunks."""
    count = layout.chunk_count(entry.shape[0], entry.chunk_rows)
    return [f"{array}/zarr.json", *(f"{array}/{layout.chunk_name(i, len(entry.shape))}" for i in range(count))]


def entry_for(dtype: str, shape: Sequence[int], chunk_rows: int, compression: str | None = None) -> ArrayEntry:
    """An array entry (5.5)."""
    return ArrayEntry(dtype=dtype, shape=list(shape), chunk_rows=chunk_rows, compression=compression)
