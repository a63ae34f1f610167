"""One array's chunks as objects: payload, codecs, checksum (FORMAT.md section 4).

Under the codecs `bytes`, `crc32c` a chunk object is exactly its elements followed by their CRC-32C, so uncompressed
chunks go from the array to the file, and back, without a codec pipeline. Any Zarr library reads the same objects.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from io import BytesIO, RawIOBase
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes, layout
from checkrun_format.errors import DamagedError, PrunedError, UnsupportedFeatureError
from checkrun_format.manifest import ArrayEntry, Pruned, parse_occupant
from checkrun_format.stores import Buffer, Store

CHECKSUM_BYTES = 4
"""At the end of each chunk object (ZAR-3)."""

_SLICE_BYTES = 2 << 20
"""Bytes that are checksummed at a time: while they are in the cache, and while another thread writes or reads."""


def row_bytes(entry: ArrayEntry) -> int:
    """Bytes of one row of an array."""
    return dtypes.logical(entry.dtype).itemsize * math.prod(entry.shape[1:])


def encode(values: npt.NDArray[Any], entry: ArrayEntry) -> Iterator[Buffer]:
    """The object of one chunk, as buffers to be written one after another.

    Parameters
    ----------
    values : array
        The chunk's rows, in the dtype that is stored; fewer than `chunk_rows` in the last chunk, which is filled up
        with zeros (ZAR-4). They are read while the buffers are taken.
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
    yield google_crc32c.extend(checksum, padding).to_bytes(CHECKSUM_BYTES, "little")


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
    if len(data) < CHECKSUM_BYTES or google_crc32c.value(payload) != int.from_bytes(data[-CHECKSUM_BYTES:], "little"):
        raise altered(place)
    if entry.compression is not None:
        payload = _decompress(payload, entry.compression, place)
    size = entry.chunk_rows * row_bytes(entry)
    if payload.size != size:
        raise DamagedError(place, f"a chunk of {payload.size} bytes where {size} belong")
    rows = payload.view(dtypes.logical(entry.dtype).newbyteorder("<")).reshape(entry.chunk_rows, *entry.shape[1:])
    return rows[: entry.shape[0] - index * entry.chunk_rows]


def altered(place: str) -> DamagedError:
    """The error of an object whose checksum is wrong."""
    return DamagedError(place, "its CRC-32C does not match: the object is truncated or altered")


def compress(payload: bytes, compression: str, itemsize: int) -> bytes:
    """Compress as ZAR-6 says: `zstd` at level 1, `blosc` as zstd 5 with byte shuffle."""
    import numcodecs.blosc
    import numcodecs.zstd

    if compression == "zstd":
        return bytes(numcodecs.zstd.compress(payload, 1))
    shuffle = numcodecs.blosc.SHUFFLE
    typed = np.frombuffer(payload, f"V{itemsize}")
    return bytes(numcodecs.blosc.compress(typed, b"zstd", 5, shuffle, 0, itemsize))


def _decompress(payload: npt.NDArray[np.uint8], compression: str, place: str) -> npt.NDArray[np.uint8]:
    import numcodecs.blosc
    import numcodecs.zstd

    decompressors = {"zstd": numcodecs.zstd.decompress, "blosc": numcodecs.blosc.decompress}
    if compression not in decompressors:
        raise UnsupportedFeatureError(f"{place}: unknown compression {compression!r}")
    try:
        return np.frombuffer(decompressors[compression](payload.tobytes()), np.uint8)
    except (RuntimeError, ValueError) as error:
        raise DamagedError(place, f"{compression} cannot decompress it: {error}") from error


def smaller_compression(values: npt.NDArray[Any]) -> str:
    """Which of `blosc` and `zstd` makes fewer bytes of these values (ZAR-6)."""
    payload = np.ascontiguousarray(values).tobytes()
    sizes = {name: len(compress(payload, name, values.itemsize)) for name in ("blosc", "zstd")}
    return min(sizes, key=lambda name: sizes[name])


class ChunkReader:
    """Reads chunks of a run; keeps the last ones that are shared by many parts or tensors.

    Parameters
    ----------
    store : Store
    cache_bytes : int
        How much it may keep.
    """

    def __init__(self, store: Store, cache_bytes: int = 64 << 20) -> None:
        self._store = store
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[str, npt.NDArray[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def chunk(self, array_key: str, entry: ArrayEntry, index: int, *, shared: bool) -> npt.NDArray[Any]:
        """Chunk `index` of the array at `array_key`; errors as of `required` and `decode`."""
        key = f"{array_key}/{layout.chunk_name(index, len(entry.shape))}"
        if not shared:
            return decode(required(self._store, key), entry, index, key)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        values = decode(required(self._store, key), entry, index, key)
        with self._lock:
            self._kept[key] = values
            while sum(kept.nbytes for kept in self._kept.values()) > self._cache_bytes:
                self._kept.popitem(last=False)
        return values

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
            self._straight(f"{array_key}/{layout.chunk_name(index, len(entry.shape))}", entry, out)
        else:
            out[...] = self.chunk(array_key, entry, index, shared=shared)[rows]

    def _straight(self, key: str, entry: ArrayEntry, out: npt.NDArray[Any]) -> None:
        payload = out.reshape(-1).view(np.uint8)
        rest = np.empty(entry.chunk_rows * row_bytes(entry) - payload.size + CHECKSUM_BYTES, np.uint8)
        checksum = 0
        with self._opened(key) as file:
            for low in range(0, payload.size, _SLICE_BYTES):
                piece = payload[low : low + _SLICE_BYTES]
                fill(file, piece, key)
                checksum = google_crc32c.extend(checksum, piece)
            fill(file, rest, key)
            checksum = google_crc32c.extend(checksum, rest[:-CHECKSUM_BYTES])
            if checksum != int.from_bytes(rest[-CHECKSUM_BYTES:].tobytes(), "little") or file.read(1):
                raise altered(key)

    def _opened(self, key: str) -> RawIOBase | BytesIO:
        file = self._store.open(key)
        if file is None:
            raise missing(self._store, key)
        return file

    def rows(self, array_key: str, entry: ArrayEntry, start: int, stop: int, *, shared: bool) -> npt.NDArray[Any]:
        """Rows start..stop-1 of an array, from as few chunks as hold them."""
        first, last = start // entry.chunk_rows, max(start, stop - 1) // entry.chunk_rows
        pieces = [self.chunk(array_key, entry, index, shared=shared) for index in range(first, last + 1)]
        rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return rows[start - first * entry.chunk_rows : stop - first * entry.chunk_rows]


def fill(file: RawIOBase | BytesIO, piece: npt.NDArray[np.uint8], place: str) -> None:
    """Read as many bytes as the piece holds; an object that ends before is damaged."""
    view = memoryview(piece)  # type: ignore[arg-type]
    while view.nbytes:
        count = file.readinto(view)
        if not count:
            raise altered(place)
        view = view[count:]


def object_names(array: str, entry: ArrayEntry) -> list[str]:
    """Every object of an array: its metadata and its chunks."""
    count = layout.chunk_count(entry.shape[0], entry.chunk_rows)
    return [f"{array}/zarr.json", *(f"{array}/{layout.chunk_name(i, len(entry.shape))}" for i in range(count))]


def entry_for(dtype: str, shape: Sequence[int], chunk_rows: int, compression: str | None = None) -> ArrayEntry:
    """An array entry (5.5)."""
    return ArrayEntry(dtype=dtype, shape=list(shape), chunk_rows=chunk_rows, compression=compression)
