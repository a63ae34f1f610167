"""The kit's stores: what each fault does, and that nothing of it is loaded but what is asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkrun_format import StorageError
from checkrun_format.stores import AlreadyExistsError, LocalStore
from checkrun_format.testing import EVERY_CALL, WRITES, Fault, FaultStore, MemoryStore

CALLS: dict[str, Callable[[FaultStore], Any]] = {
    "get": lambda store: store.get("a/b"),
    "put": lambda store: store.put("a/new", [b"1234", b"56"]),
    "create": lambda store: store.create("a/made", b"123456"),
    "replace": lambda store: store.replace("a/b", b"123456"),
    "delete": lambda store: store.delete("a/b"),
    "folders": lambda store: store.folders(),
    "list": lambda store: store.list("a"),
    "sync": lambda store: store.sync("a"),
}
BEFORE = {"a/b": b"abcdef"}
AFTER: dict[str, dict[str, bytes]] = {
    "get": BEFORE,
    "put": BEFORE | {"a/new": b"123456"},
    "create": BEFORE | {"a/made": b"123456"},
    "replace": {"a/b": b"123456"},
    "delete": {},
    "folders": BEFORE,
    "list": BEFORE,
    "sync": BEFORE,
}
HALF = {
    "put": BEFORE | {"a/new": b"123"},
    "create": BEFORE | {"a/made": b"123"},
    "replace": {"a/b": b"123"},
}


def stores(fault: Fault | None) -> tuple[MemoryStore, FaultStore]:
    memory = MemoryStore()
    memory.objects = dict(BEFORE)
    return memory, FaultStore(memory, fault)


def test_every_call_is_known() -> None:
    assert set(CALLS) == EVERY_CALL
    assert {"put", "create", "replace", "delete", "sync"} == WRITES


@pytest.mark.parametrize("name", CALLS)
def test_without_a_fault(name: str) -> None:
    memory, store = stores(None)
    wanted = CALLS[name](FaultStore(stores(None)[0]))
    assert CALLS[name](store) == wanted
    assert memory.objects == AFTER[name]
    assert (store.calls, store.fired) == (1, False)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("how", ["before", "after", "down"])
def test_a_call_raises(name: str, how: Any) -> None:
    memory, store = stores(Fault(at=2, how=how))
    assert store.get("nothing") is None
    with pytest.raises(StorageError, match="injected"):
        CALLS[name](store)
    assert memory.objects == (AFTER[name] if how == "after" else BEFORE)
    assert store.fired
    if how == "down":
        with pytest.raises(StorageError):
            store.get("a/b")
    else:
        assert store.get("x") is None
    store.arm(None)
    assert store.get("x") is None and not store.fired


@pytest.mark.parametrize("name", sorted(EVERY_CALL - {"get"}))
def test_a_call_is_cut_short(name: str) -> None:
    memory, store = stores(Fault(at=1, how="truncate"))
    with pytest.raises(StorageError):
        CALLS[name](store)
    assert memory.objects == HALF.get(name, BEFORE)


def test_a_read_is_cut_short() -> None:
    _, store = stores(Fault(at=1, how="truncate"))
    assert (store.get("a/b"), store.get("a/b")) == (b"abc", b"abcdef")
    store.arm(Fault(at=1, how="truncate"))
    assert store.get("nothing") is None


def test_only_some_calls_count() -> None:
    memory, store = stores(Fault(at=2, calls=frozenset({"put"}), error=KeyboardInterrupt))
    store.get("a/b")
    store.put("one", [b"1"])
    store.sync("a")
    with pytest.raises(KeyboardInterrupt):
        store.put("two", [b"2"])
    assert sorted(memory.objects) == ["a/b", "one"]


def test_something_happens_meanwhile() -> None:
    memory, store = stores(None)
    store.arm(Fault(at=1, how="delay", meanwhile=lambda: memory.create("a/made", b"another")))
    with pytest.raises(AlreadyExistsError):
        store.create("a/made", b"ours")
    assert memory.objects["a/made"] == b"another"
    store.arm(Fault(at=1, how="delay"))
    assert store.get("a/made") == b"another" and store.fired


def test_a_commit_comes_late() -> None:
    memory, store = stores(Fault(how="late"))
    store.put("a/new", [b"1"])
    with pytest.raises(StorageError):
        store.create("a/made", b"late")
    assert "a/made" not in memory.objects
    store.create("a/other", b"in time")
    assert store.land() == "a/made"
    assert memory.objects["a/made"] == b"late"
    store.arm(Fault(how="late"))
    with pytest.raises(StorageError):
        store.create("a/third", b"late")
    memory.create("a/third", b"taken")
    assert store.land() is None
    assert memory.objects["a/third"] == b"taken"


def test_the_process_stops(tmp_path: Path) -> None:
    store = FaultStore(LocalStore(tmp_path, durable=False), Fault(at=2, how="stop"))
    child = os.fork()
    if child == 0:
        store.put("a", [b"1"])
        store.put("b", [b"2"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_dump_is_the_same_objects(tmp_path: Path) -> None:
    """STO-4."""
    memory, _ = stores(None)
    memory.dump(tmp_path)
    assert (tmp_path / "a" / "b").read_bytes() == b"abcdef"
    assert LocalStore(tmp_path).list("a") == memory.list("a") == {"a/b": 6}


def test_the_stores_need_no_hypothesis() -> None:
    program = "import sys, checkrun_format.testing; print('hypothesis' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
