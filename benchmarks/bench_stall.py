"""What saving costs the training: stall, throughput beside a save, memory, and the cost of noting rows.

    python benchmarks/bench_stall.py [--mib 1024] [--quick] [--folder DIR] [--no-results]

One state of float32: an embedding table of 64 columns, and one sum for each row. 26 % of its rows change between two
saves. Stall is the time until training may go on: until `Checkpointer.save_async` returns, and until `async_save` of
`torch.distributed.checkpoint` does, which copies the whole state; as it is called by default, and with a stager of
one's own that keeps its memory. All in one process, in turn. Memory is resident memory above the level before the
save began, without what the system may take at any time; the first save of each, into fresh memory, is told apart.
Throughput: steps of a small matrix product per second on one thread, while a save of one thread (`set_threads(1)`)
encodes and writes, against without; and beside that, what another process that does the same product leaves of them:
the most that this machine gives. Noting rows: a training step of a DLRM-like model with hooks and without, in turn.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import checkrun_format as crf
from checkrun_format.torch import Checkpointer, Tracker, register_optimizer
from checkrun_format.torch.lookups import find_tables

COLUMNS = 64
CHANGED = 0.26
TARGETS = {"increment": 0.3, "base": 0.6}


class Trainer:
    """A table of some size, its row-wise sums, and batches that change a share of its rows."""

    def __init__(self, rows: int) -> None:
        self.model = nn.Embedding(rows, COLUMNS, sparse=True)
        self.optimizer = RowWise(self.model.parameters())
        self._draw = torch.Generator().manual_seed(0)
        self.optimizer.state[self.model.weight]["sum"] = torch.zeros(rows)

    def change(self, share: float) -> torch.Tensor:
        """Change some rows; which."""
        rows = len(self.model.weight)
        some = torch.randperm(rows, generator=self._draw)[: int(rows * share)]
        with torch.no_grad():
            self.model.weight.data[some] += 0.01
            self.optimizer.state[self.model.weight]["sum"].data[some] += 1
        return some

    def state(self) -> dict[str, Any]:
        """As `torch.distributed.checkpoint` takes it."""
        return {"weight": self.model.weight.detach(), "sum": self.optimizer.state[self.model.weight]["sum"]}


class RowWise(torch.optim.Optimizer):
    """Holds state; its step, after which rows count as changed, does nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


register_optimizer(RowWise)


def stalls(folder: Path, rows: int, repeats: int) -> dict[str, Any]:
    """Seconds until training may go on, and memory, of each way to save; medians."""
    trainer = Trainer(rows)
    size = trainer.model.weight.nbytes + rows * 4
    kept_stager = DefaultStager(StagingOptions(*[False] * 4))
    found: dict[str, list[dict[str, float]]] = {}
    run = crf.open_run(folder / "run", "a", policy=every_other, bits=4, durable=False)
    with Checkpointer(run, trainer.model, trainer.optimizer) as checkpointer:
        for turn in range(repeats + 1):  # the first one warms up
            costs = {kind: stall_of_ours(checkpointer, trainer, kind, size) for kind in ("base", "increment")}
            for name, options in (("dcp", {}), ("dcp, memory kept", {"async_stager": kept_stager})):
                costs[name] = stall_of_dcp(trainer, folder / f"{name}-{turn}", options, size)
            for kind, cost in costs.items():
                found.setdefault(kind if turn else f"{kind}, the first", []).append(cost)
    medians = {kind: {n: statistics.median(c[n] for c in costs) for n in costs[0]} for kind, costs in found.items()}
    return {"bytes": size, "saves": dict(sorted(medians.items(), key=lambda item: ", the first" in item[0]))}


def stall_of_ours(checkpointer: Checkpointer, trainer: Trainer, kind: str, size: int) -> dict[str, float]:
    """What one save costs."""
    checkpointer.mark("weight", trainer.change(CHANGED))
    trainer.optimizer.step()
    level = measure.resident_mib()  # looks at every page: not between `warm_memory` and what is timed
    measure.warm_memory(size * 2 / 2**30)
    measure.reset_peak()
    begin = time.perf_counter()
    pending = checkpointer.save_async()
    stall = time.perf_counter() - begin
    assert pending is not None
    unused = measure.memory_kib("LazyFree", "smaps_rollup") / 1024  # of an earlier, larger save
    saved = pending.result()
    peak = max(0.0, measure.memory_kib("VmHWM") / 1024 - level - unused)
    assert (saved.parent is None) == (kind == "base")
    staged = saved.table("weight").stored_rows * (COLUMNS + 1) * 4 / 2**20
    return {"seconds": stall, "peak_mib": peak, "staged_mib": staged}


def stall_of_dcp(trainer: Trainer, folder: Path, options: dict[str, Any], size: int) -> dict[str, float]:
    """What one save by `torch.distributed.checkpoint` costs."""
    measure.warm_memory(size * 2 / 2**30)
    begin = time.perf_counter()
    future = dcp.async_save(trainer.state(), checkpoint_id=folder, **options)
    stall = time.perf_counter() - begin
    (future if hasattr(future, "result") else future.upload_completion).result()
    shutil.rmtree(folder)
    return {"seconds": stall}


def every_other(past: crf.policy.Past) -> crf.policy.Decision:
    """A base, an increment, a base ..."""
    return crf.policy.Decision(parent=None if past.increments else "base", reason="in turn")


def throughput(folder: Path, rows: int) -> dict[str, float]:
    """Steps per second while a save goes on, and while another process computes, over those alone."""
    trainer = Trainer(rows)
    torch.set_num_threads(1)
    crf.set_threads(1)
    a = torch.rand(256, 256)

    def steps(until: Callable[[], bool]) -> float:
        count, begin = 0, time.perf_counter()
        while not until():
            torch.mm(a, a)
            count += 1
        return count / (time.perf_counter() - begin)

    def a_second() -> float:
        end = time.perf_counter() + 1
        return steps(lambda: time.perf_counter() > end)

    found: dict[str, list[float]] = {"save": [], "process": []}
    with Checkpointer(
        folder / "beside", trainer.model, trainer.optimizer, bits=4, durable=False, policy="full"
    ) as checkpointer:
        for turn in range(8):
            checkpointer.mark("weight", trainer.change(CHANGED))
            trainer.optimizer.step()
            alone = a_second()
            pending = checkpointer.save_async(turn)
            assert pending is not None
            beside = {"save": steps(pending.done)}
            with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE) as other:
                assert other.stdout is not None
                other.stdout.read(1)
                beside["process"] = a_second()
                other.kill()
            for kind, speed in beside.items():
                found[kind] += [speed / alone] * (turn > 0)
    torch.set_num_threads(2)
    crf.set_threads(None)
    return {kind: statistics.median(ratios) for kind, ratios in found.items()}


OTHER = """
import torch
torch.set_num_threads(1)
a = torch.rand(256, 256)
print(end=".", flush=True)
while True:
    torch.mm(a, a)
"""


def noting(tables: int, rows: int, batch: int, steps: int) -> dict[str, float]:
    """Seconds of a training step with hooks and without, in turn; and of what the hooks do alone."""
    model = nn.ModuleDict(
        {
            "tables": nn.ModuleList(nn.EmbeddingBag(rows, COLUMNS, mode="sum", sparse=True) for _ in range(tables)),
            "top": nn.Sequential(nn.Linear(COLUMNS * tables, 256), nn.ReLU(), nn.Linear(256, 1)),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(ids: torch.Tensor | None = None) -> float:
        ids = torch.randint(rows, (tables, batch, 4)) if ids is None else ids
        begin = time.perf_counter()
        optimizer.zero_grad()
        looked_up = [table(some) for table, some in zip(model["tables"], ids, strict=True)]
        model["top"](torch.cat(looked_up, 1)).mean().backward()
        optimizer.step()
        return time.perf_counter() - begin

    found: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(12):
        for kind in found:
            tracker = Tracker(find_tables(model)) if kind == "with" else None
            for _ in range(4):  # audited, or warming up
                train()
            some = [train() for _ in range(steps)]
            if turn:
                found[kind] += some
            if tracker is not None:
                tracker.close()
    told = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    tracker = Tracker(find_tables(model))
    for _ in range(4):
        train()
    ids, noted = torch.randint(rows, (tables, batch, 4)), []
    train(ids)
    for _ in range(50):  # what the hooks do in each step with these ids, and with these gradients
        begin = time.perf_counter()
        for table, some in zip(tracker.tables.values(), ids, strict=True):
            table.touch(some)
        tracker._before_step(optimizer)  # noqa: SLF001 - what the hooks call
        tracker._after_step(optimizer)  # noqa: SLF001
        noted.append(time.perf_counter() - begin)
    tracker.close()
    bitmap = sum(t.bitmap.nbytes for t in tracker.tables.values()) / sum(t.weight.nbytes for t in model["tables"])
    return told | {"noting": statistics.median(noted), "bitmap": bitmap}


def page(told: dict[str, Any]) -> str:
    """The results as a page."""
    saves, noting_ = told["stall"]["saves"], told["noting"]
    rows = []
    for kind, cost in saves.items():
        target = TARGETS.get(kind)
        memory = [f"{cost[n]:.0f}" if n in cost else "" for n in ("peak_mib", "staged_mib")]
        to_dcp = [f"{cost['seconds'] / saves[other]['seconds']:.2f}" for other in ("dcp", "dcp, memory kept")]
        rows.append((kind, f"{cost['seconds']:.3f}", *to_dcp, "" if target is None else f"<= {target}", *memory))
    titles = (
        "save",
        "stall, s",
        "over dcp's",
        "over dcp's with memory kept",
        "target",
        "peak above, MiB",
        "staged, MiB",
    )
    share = noting_["noting"] / noting_["without"]
    size, machine = told["stall"]["bytes"] / 2**20, told["machine"]
    paragraphs = [
        "# What saving costs the training",
        (
            f"A state of {size:.0f} MiB, {CHANGED:.0%} of rows changed, 4 bits, files not synced; medians. "
            f"{machine['cpu']}, {machine['cores']} cores."
        ),
        measure.table(titles, rows),
        (
            f"Throughput beside a save, one thread each: {told['throughput']['save']:.2f}x (target >= 0.9x); "
            f"beside another process of one thread, one that only computes: {told['throughput']['process']:.2f}x."
        ),
        (
            f"Noting rows takes {noting_['noting'] * 1e3:.3f} ms of a step of {noting_['without'] * 1e3:.1f} ms: "
            f"{share:.2%} (target < 1 %); whole steps with hooks take {noting_['with'] / noting_['without'] - 1:+.1%}. "
            f"The bitmaps take 1/{1 / noting_['bitmap']:.0f} of the tables."
        ),
    ]
    return "\n\n".join(paragraphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-results", action="store_true")
    options = parser.parse_args()
    rows = (64 if options.quick else options.mib) * 2**20 // (4 * (COLUMNS + 1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        told = {
            "machine": measure.machine(["torch", "numpy", "zarr"]),
            "noting": noting(8, 1 << 18, 2048, 5 if options.quick else 10),
            "stall": stalls(Path(folder), rows, 2 if options.quick else 5),
            "throughput": throughput(Path(folder), rows),
        }
    dist.destroy_process_group()
    print(page(told))
    if not options.no_results and not options.quick:
        measure.keep("stall", told, page(told))


if __name__ == "__main__":
    main()
