"""Readers read up to the next checkpoint, and no further."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from checkrun_format.errors import InvalidInputError
from checkrun_format.torch import Checkpointer, LimitedReader, ReaderBudget

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


class Numbers(IterableDataset[int]):
    """Each worker gives its own numbers: those that `parts` tells, else every so many; notes each that is read."""

    def __init__(self, log: Path, *, skip: int = 0, parts: list[list[int]] | None = None) -> None:
        self._log = log
        self._skip = skip
        self._parts = parts

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = itertools.count(self._skip + worker, workers) if self._parts is None else iter(self._parts[worker])
        for number in numbers:
            with self._log.open("a") as file:
                file.write(f"{number}\n")
            yield number

    def read(self) -> list[int]:
        """What was read by now, in order."""
        return sorted(int(line) for line in self._log.read_text().split()) if self._log.exists() else []


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_batch_is_in_flight_at_a_save(tmp_path: Path, workers: int) -> None:
    model, budget = nn.Embedding(10, 2), ReaderBudget()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = Numbers(tmp_path / "log")
    with Checkpointer(tmp_path / "run", model, optimizer, every=7, budget=budget, durable=False) as checkpointer:
        assert budget.allowed == 7
        loader = DataLoader(
            budget.limit(numbers),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4,
            multiprocessing_context="fork",
        )
        trained, read = [], []
        for step, number in enumerate(loader):
            trained.append(number)
            checkpointer.step_done(step, extra=lambda: read.append(numbers.read()))
            if step == 24:
                assert budget.allowed == 28
                budget.close()
                break
    assert trained == list(range(25))
    assert read == [list(range(7)), list(range(14)), list(range(21))]


@pytest.mark.parametrize("parts", [[[0, 3, 6, 8, 9, 10, 11], [1, 4], [2, 5, 7]], [[0], [], [1, 2, 3, 4]], [[], [], []]])
@pytest.mark.parametrize("every", [1, 3])
def test_workers_whose_part_ends_drop_out(tmp_path: Path, parts: list[list[int]], every: int) -> None:
    budget, numbers = ReaderBudget(), Numbers(tmp_path / "log", parts=parts)
    budget.allow(every)
    loader = DataLoader(budget.limit(numbers), batch_size=None, num_workers=3, multiprocessing_context="fork")
    trained = []
    for step, number in enumerate(loader, 1):
        trained.append(number)
        assert len(numbers.read()) <= budget.allowed
        if step % every == 0:
            assert numbers.read() == sorted(trained)
            budget.allow(step + every)
    assert sorted(trained) == sorted(itertools.chain(*parts))


def test_samples_of_which_the_loader_makes_batches(tmp_path: Path) -> None:
    budget, numbers = ReaderBudget(), Numbers(tmp_path / "log", skip=100)
    budget.allow(12)
    loader: Any = DataLoader(
        budget.limit(numbers, first=10, batch_size=4), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[100, 102, 104, 106], [101, 103, 105, 107]]
    assert numbers.read() == list(range(100, 108))
    budget.allow(13)
    assert next(batches).tolist() == [108, 110, 112, 114]
    budget.close()
    assert list(batches) == []


def test_waiting_for_oneself_is_an_error() -> None:
    budget = ReaderBudget()
    budget.allow(2)
    limited = iter(budget.limit(range(5)))
    assert [next(limited), next(limited)] == [0, 1]
    with pytest.raises(InvalidInputError, match="batch 2 is read before it is allowed"):
        next(limited)
    budget.allow(1)
    assert budget.allowed == 2, "what was allowed stays allowed"


def _read_too_far(limited: LimitedReader, answer: Any) -> None:
    batches = iter(limited)
    found: list[Any] = [next(batches)]
    try:
        found.append(next(batches))
    except InvalidInputError as error:
        found.append(str(error).partition(":")[0])
    answer.put(found)


def _train(answer: Any) -> None:
    budget = ReaderBudget()
    budget.allow(1)
    _read_too_far(budget.limit(range(5)), answer)


def test_a_trainer_that_another_process_began_waits_for_itself_neither() -> None:
    processes = multiprocessing.get_context("fork")
    answer = processes.Queue()
    trainer = processes.Process(target=_train, args=(answer,), daemon=True)
    trainer.start()
    assert answer.get(timeout=60) == [0, "batch 1 is read before it is allowed"]
    trainer.join()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_pass_is_refused(workers: int) -> None:
    """It would be numbered like the first, and not held back."""
    budget = ReaderBudget()
    budget.allow(12)
    context = "fork" if workers else None
    loader = DataLoader(budget.limit(range(5)), batch_size=None, num_workers=workers, multiprocessing_context=context)
    assert len(list(loader)) == 5 * max(1, workers)
    with pytest.raises(InvalidInputError, match="a LimitedReader is read once"):
        next(iter(loader))


def test_what_is_closed_stays_closed() -> None:
    budget = ReaderBudget()
    budget.close()
    budget.allow(5)
    assert list(budget.limit(range(5))) == []


def test_refused() -> None:
    with pytest.raises(InvalidInputError, match="first=-1"):
        ReaderBudget().limit([], first=-1)
