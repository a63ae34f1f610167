"""Threads that move bytes: order, bounds, failures, and that nothing outlives them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.errors import InvalidInputError
from checkrun_format.stores import LocalStore
from checkrun_format.testing import MemoryStore
from checkrun_format.workers import Budget, Workers

LARGE = 1 << 20


def raising(error: BaseException) -> Callable[[], None]:
    def task() -> None:
        raise error

    return task


def test_a_budget_is_cut_in_quarters() -> None:
    for given in (1 << 30, np.int64(1 << 30)):
        budget = Budget(given)  # type: ignore[arg-type]
        assert (budget.kept, budget.rows) == (1 << 28, 1 << 28)
    least = Budget(1)
    assert (least.kept, least.rows) == (0, 1 << 16)
    assert Budget().max_host_bytes == 256 << 20
    with pytest.raises(InvalidInputError, match="max_host_bytes 0"):
        Budget(0)


def test_every_task_has_run_when_the_context_ends() -> None:
    done: list[int] = []
    with Workers(3) as workers:
        for number in range(200):
            workers.submit(10, lambda number=number: done.append(number))  # type: ignore[misc]
    assert sorted(done) == list(range(200))


def test_one_thread_runs_them_in_order() -> None:
    done: list[int] = []
    with Workers(1) as workers:
        for number in range(50):
            workers.submit(0, lambda number=number: done.append(number))  # type: ignore[misc]
        workers.wait()
        assert done == list(range(50))
        workers.submit(0, lambda: done.append(50))
    assert done == list(range(51))


def test_tasks_run_at_the_same_time() -> None:
    together, met = threading.Barrier(4, timeout=10), list[int]()
    with Workers(4) as workers:
        for _ in range(8):
            workers.submit(0, lambda: met.append(together.wait()))
    assert sorted(met) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_waiting_tasks_hold_no_more_than_the_budget() -> None:
    held, most, lock = [0], [0], threading.Lock()

    def task() -> None:
        time.sleep(0.001)
        with lock:
            held[0] -= 40

    with Workers(8, budget_bytes=100) as workers:
        for _ in range(60):
            workers.submit(40, task)
            with lock:
                held[0] += 40
                most[0] = max(most[0], held[0])
    assert most[0] <= 80 and held[0] == 0


def test_a_task_beyond_the_budget_runs_alone() -> None:
    done: list[str] = []
    with Workers(2, budget_bytes=100) as workers:
        workers.submit(1000, lambda: done.append("large"))
        workers.submit(1000, lambda: done.append("large"))
    assert done == ["large", "large"]


@pytest.mark.parametrize("error", [OSError(5, "broken"), KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_a_failure_reaches_the_caller(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, Workers(2) as workers:  # noqa: PT012
        workers.submit(0, raising(error))
        workers.wait()
    assert caught.value is error
    with pytest.raises(type(error)) as caught, Workers(2) as workers:
        workers.submit(0, raising(error))
    assert caught.value is error


def test_after_a_failure_nothing_begins() -> None:
    done: list[int] = []
    with pytest.raises(ValueError, match="first"), Workers(1) as workers:  # noqa: PT012
        workers.submit(0, raising(ValueError("first")))
        for number in range(1000):
            workers.submit(0, lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []


def test_of_several_failures_the_earliest_task_is_named() -> None:
    second_failed = threading.Event()

    def first() -> None:
        second_failed.wait(10)
        raise ValueError("first")

    def second() -> None:
        second_failed.set()
        raise ValueError("second")

    with pytest.raises(ValueError, match="first"), Workers(2) as workers:  # noqa: PT012
        workers.submit(0, first)
        workers.submit(0, second)


def test_without_threads_the_caller_runs_each_task_itself() -> None:
    by = list[int]()
    with Workers(0) as workers:
        workers.submit(1 << 40, lambda: by.append(threading.get_ident()))
        assert by == [threading.get_ident()]
        with pytest.raises(ValueError, match="mine"):
            workers.submit(0, raising(ValueError("mine")))


def test_set_threads_bounds_what_local_files_take(tmp_path: Path) -> None:
    """One thread: the caller's; of three, two are left beside it. What is far waits for answers, not for a core."""
    weight = np.arange(80_000, dtype=np.float32).reshape(5000, 16)
    try:
        crf.set_threads(1)
        before = threading.active_count()
        run = crf.open_run(tmp_path, "a", durable=False, chunk_bytes=1 << 16)
        seen = set[str]()
        put = LocalStore.put

        def noting(store: LocalStore, key: str, buffers: Any) -> int:
            seen.add(threading.current_thread().name)
            return put(store, key, buffers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStore, "put", noting)
            run.save(crf.State(tables={"t": crf.Table({"weight": weight})}))
        assert np.array_equal(run.load().tables["t"]["weight"], weight)
        assert seen == {threading.current_thread().name}
        assert threading.active_count() <= before  # those of earlier tests may end meanwhile
        assert Workers.of(LocalStore(tmp_path))._threads == 0
        crf.set_threads(3)
        assert Workers.of(LocalStore(tmp_path))._threads == 2
        far = MemoryStore()
        far.inline_bytes, far.parallel = 0, 32
        assert Workers.of(far)._threads == 32
    finally:
        crf.set_threads(None)
    assert Workers.of(LocalStore(tmp_path))._threads == LocalStore(tmp_path).parallel


def test_an_error_of_the_caller_waits_for_what_runs_and_drops_the_rest() -> None:
    started, done = threading.Event(), list[str]()

    def slow() -> None:
        started.set()
        time.sleep(0.05)
        done.append("slow")

    with pytest.raises(ZeroDivisionError), Workers(1) as workers:  # noqa: PT012
        workers.submit(0, slow)
        workers.submit(0, lambda: done.append("dropped"))
        started.wait(10)
        raise ZeroDivisionError
    assert done == ["slow"]


def test_no_thread_is_left_and_none_is_started_without_work() -> None:
    before = threading.active_count()
    with Workers(4) as workers:
        workers.run(10, lambda: None)
        assert threading.active_count() <= before  # those of earlier tests may end meanwhile
        workers.run(LARGE, lambda: None)
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_small_tasks_run_here_and_large_ones_elsewhere() -> None:
    where: dict[str, int] = {}
    with Workers(1) as workers:
        workers.run(10, lambda: where.update(small=threading.get_ident()))
        workers.run(LARGE, lambda: where.update(large=threading.get_ident()))
    assert where["small"] == threading.get_ident() != where["large"]


def test_a_failure_while_a_task_is_handed_over_ends_the_wait() -> None:
    """The task that was counted just before is not waited for in vain."""

    class Failing(dict[int, BaseException]):
        """Empty when the task is counted, not so a moment later."""

        looks = 0

        def __bool__(self) -> bool:
            self.looks += 1
            if self.looks == 3:
                self[0] = OSError("injected")
            return len(self) > 0

    for after in range(1, 4):
        workers = Workers(1)
        failures = Failing()
        failures.looks = 3 - after
        workers._failures = failures
        with pytest.raises(OSError, match="injected"):
            submit_three(workers)
        workers.__exit__(OSError, OSError(), None)


def submit_three(workers: Workers) -> None:
    for _ in range(3):
        workers.submit(0, lambda: None)
