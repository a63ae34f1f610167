"""Chunks that several readers want at once, objects that are read ahead, and frames that lie."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import google_crc32c
import msgspec
import numpy as np
import pytest

from checkrun_format.chunks import ChunkReader, compress, decode, encode, entry_for
from checkrun_format.errors import DamagedError
from checkrun_format.testing import MemoryStore
from checkrun_format.workers import ProcessLock

ENTRY = entry_for("int64", (40,), 10)


class Far(MemoryStore):
    """Answers when it is allowed to, and counts; reads ahead."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(4):
            values = np.arange(index * 10, index * 10 + 10)
            self.put(f"a/c/{index}", encode(values, ENTRY))
        self.gets: list[str] = []
        self.begun: list[str] = []
        self.allowed = threading.Event()
        self.allowed.set()

    def get(self, key: str) -> bytes | None:
        self.gets.append(key)
        self.allowed.wait()
        return super().get(key)

    def ahead(self, key: str) -> Callable[[], bytes | None]:
        self.begun.append(key)
        return lambda: self.objects.get(key)


def test_a_shared_chunk_is_read_once() -> None:
    store = Far()
    reader = ChunkReader(store)
    store.allowed.clear()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(reader.chunk, "a", ENTRY, 1, shared=True) for _ in range(8)]
        store.allowed.set()
        assert all(one.result().tolist() == list(range(10, 20)) for one in waiting)
    assert store.gets == ["a/c/1"]


def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    store = Far()
    reader = ChunkReader(store)
    good = store.objects["a/c/0"]
    store.objects["a/c/0"] = good[:-1]
    store.allowed.clear()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(reader.chunk, "a", ENTRY, 0, shared=True) for _ in range(4)]
        store.allowed.set()
        for one in waiting:
            with pytest.raises(DamagedError, match="CRC-32C"):
                one.result()
    store.objects["a/c/0"] = good
    assert reader.chunk("a", ENTRY, 0, shared=True).tolist() == list(range(10))


def test_objects_are_read_ahead_within_a_window() -> None:
    store = Far()
    reader = ChunkReader(store)
    expected = [(f"a/c/{index}", 20 << 20) for index in range(4)]
    with reader.expecting(expected):
        assert store.begun == ["a/c/0", "a/c/1"]  # the window is 32 MiB
        assert reader.chunk("a", ENTRY, 0, shared=True).tolist() == list(range(10))
        assert store.begun == ["a/c/0", "a/c/1", "a/c/2"]
        out = np.zeros(10, np.int64)
        reader.into("a", ENTRY, 1, slice(0, 10), out, shared=True)
        assert out.tolist() == list(range(10, 20))
        assert store.begun == ["a/c/0", "a/c/1", "a/c/2", "a/c/3"]
        assert reader.chunk("a", ENTRY, 3, shared=False).tolist() == list(range(30, 40))
    assert store.gets == []
    assert reader.chunk("a", ENTRY, 2, shared=True).tolist() == list(range(20, 30))
    assert store.gets == ["a/c/2"]  # what nobody asked for is forgotten


def test_a_lock_is_free_in_a_forked_child() -> None:
    lock = ProcessLock()
    with lock:
        child = os.fork()
        if child == 0:
            with lock:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def object_of(payload: bytes) -> bytes:
    """A chunk object of these compressed bytes, its checksum right."""
    checksum: int = google_crc32c.value(payload)
    return payload + checksum.to_bytes(4, "little")


def overwritten(payload: bytes, offset: int, value: int, width: int = 4) -> bytes:
    return payload[:offset] + value.to_bytes(width, "little") + payload[offset + width :]


WHOLE = entry_for("int64", (1000,), 1000, "zstd")
ROWS = np.arange(1000) * 3
ZSTD, BLOSC = (compress(ROWS.tobytes(), name, 8) for name in ("zstd", "blosc"))


FRAMES: dict[str, tuple[str, bytes]] = {
    "more bytes than there are": ("blosc", overwritten(BLOSC, 12, 2**31 - 1)),
    "fewer bytes than there are": ("blosc", overwritten(BLOSC, 12, 16)),
    "more bytes after it": ("blosc", BLOSC + b"\0"),
    "less than its header": ("blosc", BLOSC[:12]),
    "a larger chunk": ("blosc", overwritten(BLOSC, 4, 8001)),
    "a smaller chunk": ("blosc", compress(ROWS[:999].tobytes(), "blosc", 8)),
    "lz4 inside": ("blosc", overwritten(BLOSC, 2, 1 << 5 | BLOSC[2] & 31, 1)),
    "a huge chunk of zstd": ("zstd", bytes.fromhex("28b52ffde0ffffffffffffff7f") + ZSTD[7:]),
    "a larger chunk of zstd": ("zstd", compress(bytes(8001), "zstd", 8)),
    "a frame of no told size": ("zstd", overwritten(ZSTD, 4, 0, 1)),
    "two frames": ("zstd", compress(ROWS[:500].tobytes(), "zstd", 8) + compress(ROWS[500:].tobytes(), "zstd", 8)),
    "another frame after it": ("zstd", ZSTD * 2),
    "no frame": ("zstd", bytes(100)),
    "nothing": ("zstd", b""),
    "half of its bytes": ("zstd", ZSTD[: len(ZSTD) // 2]),
}


@pytest.mark.parametrize("what", FRAMES)
def test_a_frame_that_tells_other_lengths_is_not_decoded(what: str) -> None:
    """ZAR-3: decoders believe the header of a frame: they read beyond its end, or allocate what it says."""
    compression, payload = FRAMES[what]
    entry = msgspec.structs.replace(WHOLE, compression=compression)
    with pytest.raises(DamagedError, match=r"^there: .*(ZAR-3|cannot decompress it)"):
        decode(object_of(payload), entry, 0, "there")


@pytest.mark.parametrize("compression", ["zstd", "blosc"])
@pytest.mark.parametrize("rows", [1, 31, 32, 40, 5000, 9000, 70_000])
def test_frames_of_every_size_are_decoded(compression: str, rows: int) -> None:
    """RFC 8878: a content size of one, two, four bytes; Blosc as it is, and as a plain copy of what does not shrink."""
    noise = np.random.default_rng(rows).integers(0, 256, rows, np.uint8)
    for values in (np.zeros(rows, np.uint8), noise):
        entry = entry_for("uint8", (rows,), rows, compression)
        data = b"".join(bytes(buffer) for buffer in encode(values, entry))
        found = decode(data, entry, 0, "there")
        assert np.array_equal(found, values)
        assert not found.flags.writeable  # several readers share it
