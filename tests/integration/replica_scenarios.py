"""What ranks do with a `Checkpointer`; `test_replicas.py` says what must come of it."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import checkrun_format as crf
from checkrun_format.torch import Checkpointer
from tests.integration.ranks import Rank, main

ROWS, WIDTH = 50, 4


class Model(nn.Module):
    """A table with dense gradients and a layer over it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.user = nn.Embedding(ROWS, WIDTH)
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.over(self.user(rows))
        return found


def made(seed: int = 0) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(Model(seed))
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, step: int) -> None:
    """One step; each rank looks other rows up."""
    optimizer.zero_grad()
    rows = torch.tensor([step, step + 10 * (rank.number + 1)])
    (model(rows).sum() * (1 + rank.number)).backward()
    optimizer.step()


def values(model: Any, optimizer: torch.optim.Optimizer) -> list[np.ndarray[Any, Any]]:
    weight = model.module.user.weight
    state = [weight.detach(), optimizer.state[weight]["sum"], model.module.over.weight.detach()]
    return [value.numpy().copy() for value in state]


def stored(checkpoint: crf.Checkpoint) -> list[np.ndarray[Any, Any]]:
    table = checkpoint.table("user.weight").read()
    return [table["weight"], table["sum"], checkpoint.tensor("over.weight")]


def same(one: list[np.ndarray[Any, Any]], other: list[np.ndarray[Any, Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def alike(one: list[np.ndarray[Any, Any]], other: list[np.ndarray[Any, Any]]) -> bool:
    """Equal but for the last bits: gradients of several ranks are not always added in the same order."""
    return all(np.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(one, other, strict=True))


class Own:
    """A state that each rank has its own of."""

    value: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def misfit(checkpointer: Checkpointer, rank: Rank) -> list[str]:
    """A checkpoint that fits on all ranks but one: what each raises."""
    told: list[Any] = [None] * rank.world
    try:
        checkpointer.restore(strict=rank.number == 0)
    except crf.CheckrunError as error:
        dist.all_gather_object(told, f"{type(error).__name__}: {error}")
    return [
        "InvalidInputError" if one.startswith("InvalidInputError") else one.partition(": checkpoint")[0] for one in told
    ]


def replicas(rank: Rank) -> dict[str, Any]:
    """Save, save in the background while everything changes, restore into other objects, train on."""
    model, optimizer = made()
    path = rank.folder / "run"
    found: dict[str, Any] = {"rows": [], "same": []}
    with Checkpointer(path, model.module, optimizer, policy="consecutive") as checkpointer:
        train(model, optimizer, rank, 0)
        first = checkpointer.save(1, extra={"of": rank.number, "large": "x" * 40_000})
        found["same"].append(same(stored(first), values(model, optimizer)))
        for step in (1, 2):
            train(model, optimizer, rank, step)
        before = values(model, optimizer)
        pending = checkpointer.save_async(3)
        assert pending is not None
        for step in (3, 4, 5):
            train(model, optimizer, rank, step)  # collectives of the trainer, beside the save
        second = pending.result()
        found["same"].append(same(stored(second), before))
        third = checkpointer.save(6)
        found["rows"] = [c.table("user.weight").stored_rows for c in (first, second, third)]
        found["changes"] = sorted(int(r) for c in third.changes_since(2) for r in c.rows)
        files = (path / "00000001" / first.commit.attempt).iterdir()
        found["blocks"] = sorted(p.name for p in files if p.name.startswith("block"))
    straight = values(model, optimizer)
    other, again = made(seed=rank.number)
    own = Own()
    with Checkpointer(path, other.module, again, policy="consecutive", stateful={"own": own}) as checkpointer:
        back = checkpointer.restore(1, strict=False)
        assert back is not None
        found["extra"], found["extras"] = back.extra, [extra["of"] for extra in back.extras]
        found["misfit"] = misfit(checkpointer, rank)
        restored = checkpointer.restore(strict=False)
        assert restored is not None
        found["restored"] = [restored.step, same(values(other, again), straight)]
        for one, its in ((model, optimizer), (other, again)):
            train(one, its, rank, 6)
        own.value = rank.number
        fourth = checkpointer.save(7, extra={"of": rank.number})
        own.value = None
        checkpointer.restore()
        found["own"] = own.value
        found["resumed"] = alike(values(other, again), values(model, optimizer))
        found["rows"].append(fourth.table("user.weight").stored_rows)
        found["restores"] = fourth.commit.restores
    return found


def busy(rank: Rank) -> dict[str, Any]:
    """All ranks skip a save, or none; one that is cancelled is so on all; by time they save at the same step."""
    model, optimizer = made()
    path = rank.folder / "run"
    found: dict[str, Any] = {}
    with Checkpointer(path, model.module, optimizer, every=dt.timedelta(seconds=0.2)) as checkpointer:
        train(model, optimizer, rank, 0)
        saved = 0
        for step in range(12):
            train(model, optimizer, rank, step)
            time.sleep(0.02 * rank.number)
            pending = checkpointer.step_done(step)
            if pending is not None:
                pending.result()
                saved += 1
        found["saved"] = saved > 0
        first = checkpointer.save_async(20)
        second = checkpointer.save_async(21, on_busy="skip")
        dist.barrier()
        found["skipped"] = second is None
        if first is not None:
            first.wait()
        counts = [None] * rank.world
        dist.all_gather_object(counts, (saved, second is None))
        found["agreed"] = len(set(counts)) == 1
        found["cancelled"] = cancelled(checkpointer, rank)
    found["right"] = same(stored(crf.open_run(path).latest()), values(model, optimizer))
    return found


def cancelled(checkpointer: Checkpointer, rank: Rank) -> bool:
    """Two saves at once, the first of which is given up; or was committed just before, on all ranks alike."""
    first = checkpointer.save_async(30)
    second = checkpointer.save_async(31, on_busy="cancel")
    assert first is not None
    assert second is not None
    assert second.result().step == 31
    how: list[Any] = [None] * rank.world
    dist.all_gather_object(how, type(first.failure()).__name__)
    return len(set(how)) == 1 and how[0] in {"SaveCancelledError", "NoneType"}


def quantized(rank: Rank) -> dict[str, Any]:
    """Increments over one base store rows again; those that did not change since the predecessor keep their bits."""
    model, optimizer = made()
    path = rank.folder / "run"
    found: dict[str, Any] = {"stored": [], "recent": [], "differing": []}
    with Checkpointer(path, model.module, optimizer, bits=4, policy="one-shot") as checkpointer:
        checkpointer.save(0)
        for step in range(3):
            train(model, optimizer, rank, step)
            optimizer.zero_grad()
            done = checkpointer.save(step)
            number = done.sequence
            before, now = (checkpointer.run[n].table("user.weight").read()["weight"] for n in (number - 1, number))
            found["stored"].append(done.table("user.weight").stored_rows)
            found["recent"].append(sorted(int(r) for c in done.changes_since(number - 1) for r in c.rows))
            found["differing"].append((before != now).any(1).nonzero()[0].tolist())
    return found


SCENARIOS = {f.__name__: f for f in (replicas, busy, quantized)}

if __name__ == "__main__":
    main(SCENARIOS)
