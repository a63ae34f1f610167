"""What ranks do with TorchRec; `test_torchrec.py` says what must come of it."""

from __future__ import annotations

import datetime as dt
import logging
import os
import signal
import time
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

import checkrun_format as crf
from checkrun_format.torch.distributed import CheckrunReader, CheckrunWriter, RankSaver
from checkrun_format.torch.torchrec import ShardedModel, TrackedRows
from tests.integration.ranks import Rank, main

ROWS, WIDTH = 30, 16
TABLES = ("whole", "rows", "columns")
KEYS = [f"ebc.embedding_bags.{name}.weight" for name in TABLES]
CUTS = {1: 16, 2: 8, 3: 4}
"""World to the width of a column shard."""


class Model(nn.Module):
    """Three tables and a layer over them."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.ebc = tables
        self.over = nn.Linear(len(TABLES) * WIDTH, 1)

    def forward(self, features: Any) -> torch.Tensor:
        found: torch.Tensor = self.over(self.ebc(features).values())
        return found


def build(world: int, optimizer: str = "EXACT_ROWWISE_ADAGRAD") -> Any:
    """The model, sharded over a world: one table on one rank, one by rows, one by columns."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
        def sharding_types(self, compute_device_type: str) -> list[str]:  # noqa: ARG002 - the stock one refuses row-wise
            return ["table_wise", "row_wise", "column_wise"]

    torch.manual_seed(world)
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[f"f-{name}"])
        for name in TABLES
    ]
    model = Model(EmbeddingBagCollection(device=torch.device("meta"), tables=configs))
    kinds = dict(zip(TABLES, ("table_wise", "row_wise", "column_wise"), strict=True))
    constraints = {
        name: ParameterConstraints(
            sharding_types=[kind], compute_kernels=["fused"],
            min_partition=CUTS[world] if kind == "column_wise" else None,
        )
        for name, kind in kinds.items()
    }  # fmt: skip
    sharder: Any = Sharder(fused_params={"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def train(model: Any, optimizer: torch.optim.Optimizer, step: int, rank: Rank) -> None:
    """One step on a few rows, others on each rank."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    rows = torch.tensor([(step + 7 * place + 3 * rank.number) % ROWS for place in range(6)])
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=[f"f-{name}" for name in TABLES], values=rows, lengths=torch.ones(6, dtype=torch.int32)
    )
    optimizer.zero_grad()
    (model(features).sum() * (step + 1)).backward()
    optimizer.step()


def dense(model: Any) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    return torch.optim.Adam([value for name, value in named.items() if name.startswith("over")])


def rectangles(sharded: ShardedModel) -> dict[str, Any]:
    """The bits of what a rank holds, by table, field, rows and columns of the weight."""
    found = {}
    for table in sharded.tables():
        for shard in table.local:
            for name, values in (("weight", shard.weight), *shard.state.items()):
                key = f"{table.name}|{name}|{shard.rows[0]}|{shard.rows[1]}|{shard.columns[0]}|{shard.columns[1]}"
                found[key] = values.numpy().copy()
    return found


def opened(rank: Rank) -> crf.Run:
    path = rank.folder.parent / "run"
    if rank.number == 0:
        return crf.open_run(path, mode="a", policy="consecutive")
    while not (path / "zarr.json").exists():
        time.sleep(0.01)
    return crf.open_run(path)


def killed(rank: Rank) -> dict[str, Any]:
    """Train, save a base and two increments; rank 1 is killed in the middle of the fourth save."""
    model = build(rank.world)
    optimizer = dense(model)
    sharded = ShardedModel(model, optimizer, tracker=TrackedRows(model))
    saver = RankSaver(opened(rank), timeout=dt.timedelta(seconds=5))
    stored = []
    for step in range(3):
        train(model, optimizer, step, rank)
        done = sharded.save(saver, step=step, extra={"step": step})
        stored.append([done.table(key).stored_rows for key in KEYS])
    np.savez(rank.folder.parent / f"expected-{rank.number}.npz", **rectangles(sharded))
    over = model.state_dict()["over.weight"].flatten()[:3].tolist()
    train(model, optimizer, 3, rank)
    save = sharded.begin(saver, step=3)

    def die() -> None:
        if rank.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        save.finish(die)
        seen = "saved"
    except crf.RankError as error:
        seen = str(error)
    kinds = {f.name: f.columns for f in done.table(KEYS[2]).fields}
    return {"stored": stored, "seen": seen, "kinds": kinds, "over": over, "step": done.step}


def restored(rank: Rank) -> dict[str, Any]:
    """Restore what two processes saved; compare with what they had; go on with an increment."""
    expected: dict[str, Any] = {}
    for path in sorted(rank.folder.parent.glob("expected-*.npz")):
        with np.load(path) as found:
            expected |= dict(found)
    model = build(rank.world)
    optimizer = dense(model)
    sharded = ShardedModel(model, optimizer, tracker=TrackedRows(model))
    saver = RankSaver(opened(rank))
    checkpoint = sharded.restore(saver)
    assert checkpoint is not None
    wrong = [key for key, values in rectangles(sharded).items() if not np.array_equal(values, wanted(expected, key))]
    held = sorted(rectangles(sharded))
    over = model.state_dict()["over.weight"].flatten()[:3].tolist()
    number = checkpoint.sequence
    train(model, optimizer, 9, rank)
    after = sharded.save(saver, step=9)
    mine = rectangles(sharded)
    again = build(rank.world)
    other = ShardedModel(again, dense(again))
    other.restore(saver)
    return {
        "wrong": wrong, "held": len(held), "number": number, "extra": checkpoint.extra, "over": over,
        "storage": [after.table(key).storage for key in KEYS], "restores": after.commit.restores,
        "same_again": all(np.array_equal(values, mine[key]) for key, values in rectangles(other).items()),
        "adam": float(dense_step(other)),
    }  # fmt: skip


def dense_step(sharded: ShardedModel) -> torch.Tensor:
    return next(value for name, value in sharded.tensors().items() if name.endswith("optimizer.step"))


def wanted(expected: dict[str, Any], key: str) -> np.ndarray[Any, Any]:
    """What a shard must hold, from the shards that were saved: cut out, or by the rule for sums of column shards."""
    table, field, *numbers = key.split("|")
    low, high, left, right = map(int, numbers)
    rows = high - low
    cells = np.full((rows, right - left), np.nan, np.float32)
    for other, values in expected.items():
        name, of, *its = other.split("|")
        if (name, of) != (table, field):
            continue
        top, bottom, start, end = map(int, its)
        wide = values if values.ndim == 2 else np.repeat(values[:, None], end - start, 1)
        for row in range(max(low, top), min(high, bottom)):
            a, b = max(left, start), min(right, end)
            if a < b:
                cells[row - low, a - left : b - left] = wide[row - top, a - start : b - start]
    if field == "weight":
        return cells
    means: np.ndarray[Any, Any] = cells.astype(np.float64).mean(1)
    return means.astype(np.float32)


def dcp(rank: Rank) -> dict[str, Any]:
    """The same model through torch.distributed.checkpoint: weights and fused state of whole tables find each other."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    model = build(rank.world)
    optimizer = dense(model)
    tracked = TrackedRows(model)
    sharded = ShardedModel(model)

    def changed(table: str) -> Any:
        if table == f"model.{KEYS[0]}":
            tracked.look()
        return tracked(table.removeprefix("model."))

    writer = CheckrunWriter(
        rank.folder / "run", tables=[f"model.{key}" for key in KEYS], changed=changed, policy="consecutive"
    )
    for step in range(2):
        train(model, optimizer, step, rank)
        state = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict()}
        state_dict_saver.save(state, storage_writer=writer)
    mine = rectangles(sharded)
    train(model, optimizer, 5, rank)
    state = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict()}
    state_dict_loader.load(state, storage_reader=CheckrunReader(rank.folder / "run"))
    latest = crf.open_run(rank.folder / "run").latest()
    return {
        "same": all(np.array_equal(values, mine[key]) for key, values in rectangles(sharded).items()),
        "fields": [[f.name for f in latest.table(f"model.{key}").fields] for key in KEYS],
        "storage": [latest.table(f"model.{key}").storage for key in KEYS],
    }


def elementwise(rank: Rank) -> dict[str, Any]:
    """Adagrad keeps a sum for each weight: what is restored trains on to the same bits."""
    model = build(rank.world, "EXACT_ADAGRAD")
    optimizer = dense(model)
    sharded = ShardedModel(model, optimizer)
    run = crf.open_run(rank.folder / "run", mode="a")
    saver = RankSaver(run)
    for step in range(2):
        train(model, optimizer, step, rank)
    done = sharded.save(saver, step=2)
    train(model, optimizer, 2, rank)
    straight = rectangles(sharded)
    other = build(rank.world, "EXACT_ADAGRAD")
    again = dense(other)
    resumed = ShardedModel(other, again)
    resumed.restore(saver)
    train(other, again, 2, rank)
    return {
        "fields": [f.name for f in done.table(KEYS[0]).fields],
        "same": all(np.array_equal(values, straight[key]) for key, values in rectangles(resumed).items()),
    }


SCENARIOS = {f.__name__: f for f in (restored, dcp, elementwise, killed)}

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(SCENARIOS, quiet=True)
