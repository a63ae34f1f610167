"""Train a small DLRM on a log of clicks, saving in the background; stop it or let it crash, and start it again.

    python examples/train_dlrm.py my-run --crash-at 700        # kills itself: no warning, no clean-up
    python examples/train_dlrm.py my-run --resume              # goes on from the last checkpoint to the end
    checkrun tree my-run

The log is generated: categories are drawn by Zipf's law, and a click depends on hidden vectors of the categories, so
that there is something to learn. `--log FILE` reads one instead: Criteo's files (a label, 13 numbers, 26 categories in
hexadecimal; by tabs, or by commas below a header), or MovieLens' ratings (a user, a film, a rating; `u.data` by tabs,
`ratings.csv`, `ratings.dat`, or `ml-100k.inter` of the package `recbole`), where four stars and more count as clicks.

Every sample is trained once, whatever happens: readers in other processes read up to the next checkpoint and no
further, and go on from the batch that the checkpoint was taken at.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from checkrun_format.torch import Checkpointer, ReaderBudget, capture_rng, restore_rng

CATEGORIES = (20_000, 10_000, 5_000, 1_000, 200, 50)
NUMBERS = 4
COLUMNS = 16


@dataclass(frozen=True)
class Batch:
    """`ids` number the samples; numbers (n, any), categories (n, tables) and clicks (n,) are what they hold."""

    ids: Tensor
    numbers: Tensor
    categories: Tensor
    clicks: Tensor


class GeneratedLog:
    """Clicks by a hidden rule. Any batch can be made on its own, so it takes nothing to skip some."""

    def __init__(self, batch_size: int, seed: int = 2022) -> None:
        self.batch_size = batch_size
        self.rows = CATEGORIES
        self.numbers = NUMBERS
        self._seed = seed
        hidden = torch.Generator().manual_seed(seed)
        self._vectors = [torch.randn(rows, 4, generator=hidden) for rows in CATEGORIES]
        self._weights = torch.randn(NUMBERS, generator=hidden)

    def __call__(self, number: int) -> Batch:
        """The batch of a number."""
        draw = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        uniform = torch.rand(self.batch_size, len(self.rows), generator=draw, dtype=torch.float64)
        sizes = torch.tensor(self.rows, dtype=torch.float64)
        categories = (torch.exp(uniform * torch.log(sizes + 1)) - 1).long()  # Zipf's law with exponent 1
        numbers = torch.randn(self.batch_size, NUMBERS, generator=draw)
        clicks = torch.bernoulli(torch.sigmoid(self.truth(numbers, categories)), generator=draw)
        return Batch(torch.arange(self.batch_size) + number * self.batch_size, numbers, categories, clicks)

    def truth(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """The logits that clicks are drawn from, (n,): no model can do better."""
        vectors = torch.stack([v[c] for v, c in zip(self._vectors, categories.T, strict=True)])
        return (vectors[0] * vectors[1] - vectors[2] * vectors[3]).sum(1) + numbers @ self._weights


class FileLog:
    """Samples of a file in its order; categories are hashed into the tables.

    Raises ValueError where the file is of neither format.
    """

    def __init__(self, path: Path, batch_size: int) -> None:
        self.batch_size = batch_size
        self._path = path
        with path.open() as file:
            first = next((line for line in file if line[:1].isdigit()), "")
        self._separator = next((s for s in ("\t", "::") if s in first), ",")
        self._width = len(first.split(self._separator))
        if self._width not in {3, 4, 40}:
            raise ValueError(f"{path} has {self._width} fields: Criteo's logs have 40, MovieLens' ratings 3 or 4")
        self.rows = (50_000,) * (26 if self._width == 40 else 2)
        self.numbers = 13 if self._width == 40 else 1

    def __iter__(self) -> Iterator[Batch]:
        with self._path.open() as file:
            samples = (self._parsed(line) for line in file if line[:1].isdigit())
            for number, some in enumerate(iter(lambda: list(itertools.islice(samples, self.batch_size)), [])):
                numbers, categories, clicks = zip(*some, strict=True)
                ids = torch.arange(len(some)) + number * self.batch_size
                yield Batch(ids, torch.tensor(numbers), torch.tensor(categories), torch.tensor(clicks))

    def _parsed(self, line: str) -> tuple[list[float], list[int], float]:
        fields = line.rstrip("\r\n").split(self._separator)
        if len(fields) != self._width:
            raise ValueError(f"{self._path} has a line of {len(fields)} fields, not {self._width}: {line!r}")
        if self._width == 40:  # Criteo
            numbers = [float(f or 0) for f in fields[1:14]]
            named, click = fields[14:], float(fields[0])
        else:  # MovieLens
            numbers, named, click = [0.0], fields[:2], float(float(fields[2]) >= 4)
        scaled = [min(max(n, 0.0), 1e4) ** 0.25 for n in numbers]
        return scaled, [zlib.crc32(name.encode()) % n for name, n in zip(named, self.rows, strict=True)], click


class Reader(IterableDataset[Batch]):
    """A worker's batches of a log, from one on."""

    def __init__(self, log: GeneratedLog | FileLog, first: int, last: int) -> None:
        self._log = log
        self._first = first
        self._last = last

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if isinstance(self._log, GeneratedLog):
            yield from map(self._log, range(self._first + start, self._last, step))
        else:
            yield from itertools.islice(self._log, self._first + start, self._last, step)


class DLRM(nn.Module):
    """Numbers through one network, categories as vectors, products of all pairs through another."""

    def __init__(self, rows: tuple[int, ...], numbers: int = NUMBERS) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, COLUMNS, mode="sum", sparse=True) for n in rows)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)  # products of rows of torch's N(0, 1) are noise that hides the rule
        self.bottom = nn.Sequential(nn.Linear(numbers, 32), nn.ReLU(), nn.Linear(32, COLUMNS), nn.ReLU())
        self.register_buffer("pairs", torch.combinations(torch.arange(len(rows) + 1)).T, persistent=False)
        self.top = nn.Sequential(nn.Linear(COLUMNS + self.pairs.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """The logits of clicks, (n,)."""
        dense = self.bottom(numbers)
        looked_up = [table(ids[:, None]) for table, ids in zip(self.tables, categories.T, strict=True)]
        vectors = torch.stack([dense, *looked_up], 1)
        left, right = self.pairs
        products = torch.bmm(vectors, vectors.mT)[:, left, right]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


class Trainer:
    """A model, its optimizers, and what they do with a batch."""

    def __init__(self, rows: tuple[int, ...], numbers: int = NUMBERS) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()  # else Adagrad warns that it could be enabled
        self.model = DLRM(rows, numbers)
        others = [*self.model.bottom.parameters(), *self.model.top.parameters()]
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "tables": torch.optim.Adagrad(self.model.tables.parameters(), lr=0.05),
            "others": torch.optim.Adam(others, lr=1e-3),
        }

    def train(self, batch: Batch) -> float:
        """One step; returns its loss."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        logits = self.model(batch.numbers, batch.categories)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.clicks)
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss.item()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument("--crash-at", type=int, metavar="STEP", help="kill this process after a step")
    parser.add_argument("--log", type=Path, help="a file of Criteo or MovieLens instead of a generated log")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200, help="steps between two checkpoints")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trained", type=Path, help="append the step and its samples to this file")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    log = GeneratedLog(options.batch_size) if options.log is None else FileLog(options.log, options.batch_size)
    trainer = Trainer(log.rows, log.numbers)
    budget, mean = ReaderBudget(), 0.0

    def trainer_state() -> dict[str, Any]:
        return {"rng": capture_rng(), "mean": mean}

    with Checkpointer(
        options.run,
        trainer.model,
        trainer.optimizers,
        policy="intermittent",
        bits=options.bits,
        every=options.every,
        budget=budget,
    ) as checkpointer:
        if options.resume and (restored := checkpointer.restore(missing_ok=True)) is not None:
            restore_rng(restored.extra["rng"])
            mean = restored.extra["mean"]
            _tell(f"step {restored.step}: restored from checkpoint {restored.checkpoint.sequence}")
        reader = budget.limit(Reader(log, checkpointer.step, options.steps), first=checkpointer.step)
        loader = DataLoader(reader, batch_size=None, num_workers=options.workers)
        for step, batch in enumerate(loader, checkpointer.step):
            mean += (trainer.train(batch) - mean) / min(step + 1, 100)
            if options.trained is not None:
                _append(options.trained, f"{step} {' '.join(map(str, batch.ids.tolist()))}\n")
            if checkpointer.step_done(step, extra=trainer_state) is not None:
                _tell(f"step {step + 1}: loss {mean:.4f}, saving in the background")
            if step + 1 == options.crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
        if checkpointer.step % options.every:
            checkpointer.save(extra=trainer_state)
        _tell(f"step {checkpointer.step}: done")


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line)


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
