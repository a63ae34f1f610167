"""A save that ends in the middle, by SIGKILL or by an exception, at random times and at every call of the store."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

import checkrun_format as crf
from checkrun_format.stores import AlreadyExistsError, Buffer, LocalStore, Store
from checkrun_format.verify import verify_checkpoint
from tests.forks import ended, fork

ROWS, KEYS, COLUMNS = 40, 24, 4
ROUNDS = 50

Ids = npt.NDArray[np.int64]
Fault = Callable[[str, int, str, tuple[Any, ...]], None]
"""Called `before` and `after` each call of the store, with its number, name and arguments."""


# What is saved: all of it follows from the step -----------------------------------------------------------------------


def changed_at(step: int) -> Ids:
    return np.flatnonzero((np.arange(ROWS) + 2 * step) % 5 == 0)


def keys_at(step: int) -> Ids:
    """Every key is away in one step of four."""
    return np.flatnonzero((np.arange(KEYS) + step) % 4 != 0)


def values(ids: Ids, steps: Ids, columns: int) -> npt.NDArray[np.float32]:
    """Bits that only this row had, and only since this step; NaN and -0.0 among them."""
    cells = (ids[:, None] * 1_000 + steps[:, None]) * 64 + np.arange(columns)
    found = (cells.astype(np.uint32) * np.uint32(2654435761)).view(np.float32)
    found[(ids + steps) % 11 == 0] = -0.0
    return found


def state(step: int) -> crf.State:
    """The state after a step; `changed` and `deleted` are since the step before."""
    rows, keys = np.arange(ROWS), keys_at(step)
    row_steps = np.max([np.where((rows + 2 * s) % 5 == 0, s, 0) for s in range(step + 1)], axis=0)
    key_steps = np.max([np.where((keys + s) % 4 == 1, s, 0) for s in range(step + 1)], axis=0)
    return crf.State(
        tables={
            "rows": crf.Table(
                {"weight": values(rows, row_steps, COLUMNS), "sum": values(rows, row_steps, 1)[:, 0]},
                changed=changed_at(step),
            ),
            "keys": crf.Table(
                {"weight": values(keys, key_steps, COLUMNS)},
                keys=keys,
                changed=keys[key_steps == step],
                deleted=np.flatnonzero((np.arange(KEYS) + step) % 4 == 0) if step else None,
            ),
        },
        tensors={"dense": values(np.arange(3), np.full(3, step), 5)},
        blobs={"rng": bytes([step % 256]) * 9},
        extra={"step": step},
    )


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def as_set(ids: Any) -> set[int]:
    return set(ids.tolist())


def assert_same(loaded: crf.State, expected: crf.State) -> None:
    """Bit for bit (TYP-1)."""
    assert loaded.tables.keys() == expected.tables.keys()
    for name, table in expected.tables.items():
        assert bits(loaded.tables[name].keys) == bits(table.keys)
        assert loaded.tables[name].fields.keys() == table.fields.keys()
        for field, array in table.fields.items():
            assert bits(loaded.tables[name][field]) == bits(array), (name, field)
    assert {name: bits(array) for name, array in loaded.tensors.items()} == {
        name: bits(array) for name, array in expected.tensors.items()
    }
    assert loaded.blobs == expected.blobs
    assert loaded.extra == expected.extra


def test_the_states_are_worth_saving() -> None:
    """Each step changes some rows and not others, deletes keys and brings others back."""
    for step in range(1, 12):
        before, after = state(step - 1).tables, state(step).tables
        differ = np.flatnonzero(
            (before["rows"]["weight"].view(np.uint32) != after["rows"]["weight"].view(np.uint32)).any(axis=1)
        )
        assert differ.size == ROWS // 5
        assert np.array_equal(differ, changed_at(step))
        assert as_set(before["keys"].keys) - as_set(after["keys"].keys) == as_set(after["keys"].deleted)
        assert as_set(after["keys"].keys) - as_set(before["keys"].keys) <= as_set(after["keys"].changed)
        assert len(as_set(after["keys"].deleted)) == KEYS // 4


# Stores that fail -----------------------------------------------------------------------------------------------------


class MemoryStore(Store):
    """Objects in a dictionary."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = dict(objects)
        self.url = "memory"

    def get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        assert key not in self.objects
        self.objects[key] = b"".join(bytes(buffer) for buffer in buffers)
        return len(self.objects[key])

    def create(self, key: str, data: bytes) -> None:
        if key in self.objects:
            raise AlreadyExistsError(key)
        self.put(key, [data])

    def replace(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def folders(self) -> list[str]:
        return list({key.partition("/")[0] for key in self.objects.copy()})

    def list(self, prefix: str) -> dict[str, int]:
        return {key: len(data) for key, data in self.objects.copy().items() if key.startswith(f"{prefix}/")}

    def sync(self, prefix: str) -> None:
        assert self.list(prefix)


class FaultStore(Store):
    """Another store, and what happens before and after each call of it while it is armed."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls: list[str] = []
        self.fault: Fault | None = None

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.fault is None:
            return getattr(self.inner, name)(*arguments)
        self.calls.append(name)
        number = len(self.calls)
        self.fault("before", number, name, arguments)
        result = getattr(self.inner, name)(*arguments)
        self.fault("after", number, name, arguments)
        return result

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._call("get", key)
        return found

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        return int(self._call("put", key, buffers))

    def create(self, key: str, data: bytes) -> None:
        self._call("create", key, data)

    def replace(self, key: str, data: bytes) -> None:
        self._call("replace", key, data)

    def delete(self, key: str) -> None:
        self._call("delete", key)

    def folders(self) -> list[str] | None:
        found: list[str] | None = self._call("folders")
        return found

    def list(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = self._call("list", prefix)
        return found

    def sync(self, prefix: str) -> None:
        self._call("sync", prefix)


# What must hold afterwards --------------------------------------------------------------------------------------------


def litter_in(folder: Path, numbers: Sequence[int]) -> set[str]:
    """The files under these numbers that are neither a commit nor of the attempt that it names (TRE-2)."""
    found = set()
    for number in numbers:
        below = folder / f"{number:08d}"
        commit = below / "zarr.json"
        attempt = json.loads(commit.read_bytes())["attributes"]["checkrun"]["attempt"] if commit.exists() else None
        found |= {
            str(path.relative_to(folder))
            for path in below.rglob("*")
            if path.is_file() and path != commit and attempt not in path.parts
        }
    return found


def check_run(folder: Path, above: int = 0) -> int:
    """All that must hold of the checkpoints above a number, whenever the writer died; return the head."""
    run = crf.open_run(folder)
    numbers = [int(path.name) for path in folder.glob("[0-9]*") if int(path.name) > above]
    litter: set[str] = set()
    for number in numbers:
        problems = verify_checkpoint(run._store, number)  # there may be nothing, not even litter
        assert {problem.kind for problem in problems} <= {"litter"}
        litter |= {problem.place for problem in problems}
    assert litter == litter_in(folder, numbers)
    committed = [checkpoint for checkpoint in run.log() if checkpoint.sequence > above]
    for checkpoint in committed:
        assert checkpoint.step is not None
        assert_same(checkpoint.load(), state(checkpoint.step))
    newest = run.latest(None)
    assert [checkpoint.step for checkpoint in run.log()] == list(range(0 if newest is None else (newest.step or 0) + 1))
    return 0 if newest is None else int(newest.sequence)


def train(folder: Path, told: int, *, durable: bool) -> NoReturn:
    """Go on from where the run is, saving after every step, until killed; a byte to `told` before each save."""
    run = crf.open_run(folder, "a", durable=durable)
    step = 0
    if run.latest(None) is not None:
        restored = run.restore()
        assert_same(restored, state(restored.extra["step"]))
        step = restored.extra["step"] + 1
    while True:
        os.write(told, b"!")
        run.save(state(step), step=step)
        step += 1


def kill_in_call(number: int, folder: Path, work: Callable[[Store], object], chance: random.Random) -> None:
    """SIGKILL a child at a random time after its call of this number began; it gets no leave to begin another."""
    leave, told = os.pipe(), os.pipe()
    os.write(leave[1], b"." * number)

    def ask(when: str, _number: int, _name: str, _arguments: tuple[Any, ...]) -> None:
        if when == "before":
            os.write(told[1], b"!")
            os.read(leave[0], 1)

    def obey() -> None:
        store = FaultStore(LocalStore(folder, durable=False))
        store.fault = ask
        work(store)

    child = fork(obey)
    for _ in range(number):
        assert select.select([told[0]], [], [], 60)[0], "the child does not get on"
        assert os.read(told[0], 1) == b"!"
    time.sleep(chance.uniform(0, 0.002))
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    for end in (*leave, *told):
        os.close(end)


def seconds_of_a_save(folder: Path) -> float:
    """How long a save takes here and now."""
    run = crf.open_run(folder, "a", durable=False)
    start = time.monotonic()
    for step in range(4):
        run.save(state(step), step=step)
    return (time.monotonic() - start) / 4


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_killed_at_a_random_time(tmp_path: Path) -> None:
    """COM-1, COM-4, TRE-2: 50 kills; what was committed loads bit for bit, and the next process goes on from it."""
    chance = random.Random(20)
    a_save = seconds_of_a_save(tmp_path / "timed")
    folder, head = tmp_path / "0", 0
    left_litter = grew = 0
    for round_ in range(ROUNDS):
        if round_ % 12 == 11:
            folder, head = tmp_path / str(round_), 0
        ready, told = os.pipe()
        child = fork(partial(train, folder, told, durable=round_ % 5 == 0))
        for _ in range(round_ % 4):  # none: the child is killed while it starts; n: in its save n, or a later one
            assert select.select([ready], [], [], 60)[0], "the child does not get on"
            assert os.read(ready, 1) == b"!"
        time.sleep(chance.uniform(0, a_save))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        os.close(ready)
        os.close(told)
        if (folder / "zarr.json").exists():
            before, head = head, check_run(folder, head)
            grew += head > before
            left_litter += bool(litter_in(folder, [head + 1]))
    assert grew >= ROUNDS // 2 - 1  # each of 2 or 3 bytes told of a commit
    assert left_litter > 0
    check_run(folder)


@pytest.mark.timeout(60)
def test_killed_while_the_run_is_created(tmp_path: Path) -> None:
    """RUN-1: whatever is left before the run document exists, the next process creates the run."""
    for number, files in enumerate([[], [".0123456789abcdef.tmp"]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in files:
            (folder / name).write_bytes(b'{"zarr_form')
        with pytest.raises(crf.NotARunError, match=r"zarr\.json"):
            crf.open_run(folder)
        crf.open_run(folder, "a").save(state(0), step=0)
        assert check_run(folder) == 1


# At every call of the store -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints, steps 0 and 1."""
    folder = tmp_path_factory.mktemp("before") / "run"
    run = crf.open_run(folder, "a", durable=False, policy="consecutive")
    for step in range(2):
        run.save(state(step), step=step)
    return folder


def objects_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def opened(store: Store) -> crf.Run:
    run = crf.open_run(store, "a", policy="consecutive")
    assert run.restore().extra == {"step": 1}
    return run


def calls_of_a_save(before: Path) -> list[str]:
    store = FaultStore(MemoryStore(objects_in(before)))
    run = opened(store)
    store.fault = lambda *_: None
    run.save(state(2), step=2)
    return store.calls


def test_a_save_has_the_calls_that_the_tests_below_strike(before: Path) -> None:
    calls = calls_of_a_save(before)
    assert calls.count("create") == 1
    assert calls.count("put") > 15
    assert {"get", "sync"} <= set(calls)
    assert set(calls[calls.index("create") + 1 :]) <= {"get"}


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def kill_at(call: int, store: LocalStore, *, halfway: bool) -> Fault:
    """Die before a call, or in the middle of what it writes."""

    def fault(when: str, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if when != "before" or number != call:
            return
        if halfway:
            key, data = arguments
            half = data[: len(data) // 2] if name == "create" else halved(data)
            if name == "put":
                store.put(key, [half])
            else:
                store._write_temporary(store._path(key), half)
        die()

    return fault


def halved(buffers: Iterable[Buffer]) -> bytes:
    data = b"".join(bytes(buffer) for buffer in buffers)
    return data[: len(data) // 2]


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("halfway", [False, True], ids=["before", "halfway"])
def test_killed_at_every_call_of_the_store(before: Path, tmp_path: Path, *, halfway: bool) -> None:
    """COM-1, COM-4: SIGKILL before each call of a save in turn, or in the middle of each write."""
    calls = calls_of_a_save(before)
    create = calls.index("create") + 1
    chosen = [n for n, name in enumerate(calls, 1) if not halfway or name in ("put", "create")]
    assert len(chosen) > 15
    for call in chosen:
        folder = tmp_path / str(call)
        shutil.copytree(before, folder)
        assert ended(fork(partial(saved_until, folder, call, halfway=halfway))) == -signal.SIGKILL
        committed = call > create
        assert check_run(folder, 2) == (3 if committed else 2)
        assert bool(litter_in(folder, [3])) == (calls[: call - 1].count("put") + halfway > 0 and not committed)
        if call % 3 == 0:
            run = crf.open_run(folder, "a", durable=False, policy="consecutive")
            step = run.restore().extra["step"] + 1
            checkpoint = run.save(state(step), step=step)
            assert (checkpoint.sequence, checkpoint.parent) == (step + 1, step)
            assert checkpoint.commit.restores == 1 + committed
            assert check_run(folder, 2) == step + 1


def saved_until(folder: Path, call: int, *, halfway: bool) -> None:
    inner = LocalStore(folder, durable=False)
    store = FaultStore(inner)
    run = opened(store)
    store.fault = kill_at(call, inner, halfway=halfway)
    run.save(state(2), step=2)


class Interruption(BaseException):
    """Neither an Exception nor anything that the library knows."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "StorageError": lambda: crf.StorageError(errno.EIO, "struck"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "BaseException": Interruption,
}


def strike(when: str, call: int, error: Callable[[], BaseException], *, and_on: bool = False) -> Fault:
    def fault(now: str, number: int, _name: str, _arguments: tuple[Any, ...]) -> None:
        if now == when and (number == call or (and_on and number > call)):
            raise error()

    return fault


def check_objects(store: MemoryStore, step: int) -> None:
    """The latest checkpoint is of this step and loads what was saved then; nothing is wrong but litter."""
    run = crf.open_run(store)
    latest = run.latest()
    assert [checkpoint.step for checkpoint in run.log()][-1] == latest.step == step
    assert_same(latest.load(), state(step))
    for number in range(3, latest.sequence + 2):
        assert {problem.kind for problem in verify_checkpoint(store, number)} <= {"litter"}


def check_changes(store: MemoryStore) -> None:
    """LAY-7, CHG-2: what changed since checkpoint 2 turns the state of step 1 into that of the latest checkpoint.

    And it is no more than what changed, as long as no save had to be a base.
    """
    run = crf.open_run(store)
    latest = run.latest()
    expected = state(latest.step or 0).tables
    table, keys = dict(enumerate(state(1).tables["rows"]["weight"])), dict.fromkeys(keys_at(1).tolist())
    for batch in latest.changes_since(2):
        known: dict[int, Any] = table if batch.table == "rows" else keys
        if batch.dropped:
            known.clear()
            continue
        for key in batch.deleted.tolist():
            known.pop(key, None)
        known.update(zip(batch.rows.tolist(), batch.fields["weight"], strict=True))
        if batch.table == "rows" and all(checkpoint.parent for checkpoint in run.log() if checkpoint.sequence > 2):
            steps = range(2, (latest.step or 0) + 1)
            assert as_set(batch.rows) == {row for step in steps for row in changed_at(step).tolist()}
    assert bits([table[row] for row in range(ROWS)]) == bits(expected["rows"]["weight"])
    assert sorted(keys) == np.asarray(expected["keys"].keys).tolist()


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("and_on", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", ERRORS)
def test_struck_at_every_call_of_the_store(before: Path, error: str, when: str, *, and_on: bool) -> None:
    """HEA-3, COM-4: an error before or after any call takes effect; all that was committed stays, and no row is lost.

    "A failed save leaves every earlier checkpoint readable and its changed rows pending."
    """
    objects, calls = objects_in(before), calls_of_a_save(before)
    create = calls.index("create") + 1
    for call in range(1, len(calls) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        run = opened(store)
        store.fault = strike(when, call, ERRORS[error], and_on=and_on)
        returned = False
        with contextlib.suppress(type(ERRORS[error]())):
            returned = run.save(state(2), step=2).sequence == 3
        store.fault = None
        if (error, when, and_on, call) == ("StorageError", "after", False, create):
            assert returned, "a lost acknowledgement is a success"
        else:
            assert not returned or (error == "StorageError" and calls[call - 1] == "get")
        committed = returned or call > create or (call == create and when == "after")
        check_objects(inner, 2 if committed else 1)
        if not committed and call < create and not and_on:
            assert inner.objects == objects, "a save that failed before its commit leaves nothing behind"
        run.save(state(3), step=3)
        check_objects(inner, 3)
        check_changes(inner)


COPIES: dict[str, tuple[Callable[[crf.Run], object], int]] = {
    "rollback": (lambda run: run.rollback(1), 0),
    "compact": (lambda run: run.compact(), 1),
    "takeover": (lambda run: run.take_over(), 1),
}
"""What commits a state again, and the step of that state."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", ["StorageError", "KeyboardInterrupt"])
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_struck_at_every_call_of_the_store(before: Path, copy: str, error: str, when: str) -> None:
    """HEA-3, RBK-1, CMP-1: rollback, compaction and takeover, which stage and commit as a save does."""
    objects, (act, step) = objects_in(before), COPIES[copy]
    store = FaultStore(inner := MemoryStore(objects))
    run = opened(store)
    store.fault = lambda *_: None
    act(run)
    create = store.calls.index("create") + 1
    assert create > 5
    for call in range(1, len(store.calls) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        run = opened(store)
        store.fault = strike(when, call, ERRORS[error])
        if (error, when, call) == ("StorageError", "after", create):
            act(run)
        else:
            with pytest.raises(type(ERRORS[error]())):
                act(run)
        store.fault = None
        committed = call > create or (call == create and when == "after")
        assert crf.open_run(inner).latest().sequence == 2 + committed
        check_objects(inner, step if committed else 1)
        run.save(state(2), step=2)
        check_objects(inner, 2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_killed_at_a_random_time(before: Path, tmp_path: Path, copy: str) -> None:
    """COM-1, RBK-1, CMP-1: SIGKILL in a compaction, a rollback, a takeover; it is there as a whole or not at all."""
    chance, (act, step) = random.Random(8), COPIES[copy]
    store = FaultStore(MemoryStore(objects_in(before)))
    store.fault = lambda *_: None
    act(opened(store))
    create, calls = store.calls.index("create") + 1, len(store.calls)
    chosen = sorted({*range(1, calls, max(1, calls // 12)), create - 1, create, create + 1, calls - 1})
    for number in chosen:
        folder = tmp_path / str(number)
        shutil.copytree(before, folder)
        kill_in_call(number, folder, lambda store: act(opened(store)), chance)
        run = crf.open_run(folder, "a", durable=False, policy="consecutive")
        committed = run.latest().sequence == 3
        assert committed == (number > create) or number == create
        assert [checkpoint.step for checkpoint in run.log()] == [0, 1, *[step] * committed]
        for checkpoint in run.log():
            assert_same(checkpoint.load(), state(checkpoint.step or 0))
        problems = run.verify()
        assert {problem.place for problem in problems} == litter_in(folder, [1, 2, 3])
        assert {problem.kind for problem in problems} <= {"litter"}
        restored = run.restore()
        assert_same(restored, state(run.latest().step or 0))
        act(run)
        assert_same(run.latest().load(), state(step))
        assert run.latest().sequence == 3 + committed


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", ["StorageError", "KeyboardInterrupt"])
def test_a_first_save_is_struck_at_every_call_of_the_store(error: str, when: str) -> None:
    """HEA-1: nothing is there before; opening and creating the run included."""
    store = FaultStore(MemoryStore({}))
    store.fault = lambda *_: None
    crf.open_run(store, "a").save(state(0), step=0)
    created = [number for number, name in enumerate(store.calls, 1) if name == "create"]
    assert len(created) == 2
    for call in range(1, len(store.calls) + 1):
        store = FaultStore(inner := MemoryStore({}))
        store.fault = strike(when, call, ERRORS[error])
        if (error, when, call) == ("StorageError", "after", created[1]):
            crf.open_run(store, "a").save(state(0), step=0)
        else:
            with pytest.raises(type(ERRORS[error]())):
                crf.open_run(store, "a").save(state(0), step=0)
        committed = call > created[1] or (call == created[1] and when == "after")
        run = crf.open_run(inner, "a")
        assert [checkpoint.step for checkpoint in run.log()] == [0] * committed
        if committed:
            assert run.restore().extra == {"step": 0}
        step = int(committed)
        run.save(state(step), step=step)
        check_objects(inner, step)


@pytest.mark.timeout(60)
def test_a_save_struck_again_and_again_loses_no_row(before: Path) -> None:
    """Failing saves one after another, each at another call: their rows are all in the one that commits."""
    objects, calls = objects_in(before), calls_of_a_save(before)
    create = calls.index("create") + 1
    store = FaultStore(inner := MemoryStore(objects))
    run = opened(store)
    steps = range(2, 2 + create)
    for step, call in zip(steps, range(1, create + 1), strict=True):
        store.calls.clear()
        store.fault = strike("before", call, ERRORS["StorageError"])
        with contextlib.suppress(crf.StorageError):
            run.save(state(step), step=step)
    store.fault = None
    run.save(state(steps.stop), step=steps.stop)
    assert run.latest().sequence < 3 + create // 2, "most of these saves failed"
    check_objects(inner, steps.stop)
    check_changes(inner)
