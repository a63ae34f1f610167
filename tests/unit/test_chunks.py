"""Chunks that several readers want at once, and objects that are read ahead."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from checkrun_format.chunks import ChunkReader, encode, entry_for
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
