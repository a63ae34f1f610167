"""What ranks do with TorchRec; `test_torchrec.py` says what must come of it."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import io
import logging
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

import checkrun_format as crf
from checkrun_format.errors import TrackingWarning
from checkrun_format.torch import Checkpointer
from checkrun_format.torch.distributed import CheckrunReader, CheckrunWriter, RankSave
from checkrun_format.torch.torchrec import ShardedModel, TrackedRows, sharded_tables
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


def rectangles(model: Any) -> dict[str, Any]:
    """The bits of what a rank holds, by table, field, rows and columns of the weight."""
    found = {}
    for shard in sharded_tables(model)[1].values():
        for name, values in shard.fields.items():
            (low, high), (left, right) = shard.rows, shard.columns
            found[f"{shard.table.name}|{name}|{low}|{high}|{left}|{right}"] = values.numpy().copy()
    return found


def steps_of(model: Any) -> list[int]:
    """How many steps the fused optimizers of this rank say that they have done."""
    return [int(module.iter) for module in ShardedModel(model)._modules]


def over(model: Any) -> list[float]:
    values: list[float] = model.state_dict()["over.weight"].flatten()[:3].tolist()
    return values


def killed(rank: Rank) -> dict[str, Any]:
    """Train, save a base, an increment and one in the background; rank 1 is killed in the middle of the next save."""
    model = build(rank.world)
    optimizer = dense(model)
    path = rank.folder.parent / "run"
    timeout = dt.timedelta(seconds=5)
    checkpointer = Checkpointer(path, model, optimizer, policy="consecutive", timeout=timeout)
    found: dict[str, Any] = {"stored": [], "tables": checkpointer.tables}
    for step in range(2):
        train(model, optimizer, step, rank)
        done = checkpointer.save(step, extra={"step": step, "rank": rank.number})
        found["stored"].append([done.table(key).stored_rows for key in KEYS])
    train(model, optimizer, 2, rank)
    model.fused_optimizer.param_groups[0]["lr"] = 0.2
    before = rectangles(model)
    np.savez(rank.folder.parent / f"expected-{rank.number}.npz", **before)
    found["over"] = over(model)
    pending = checkpointer.save_async(2, extra={"step": 2, "rank": rank.number})
    for step in range(3, 6):  # whatever is copied is what was there: all of it moves on meanwhile
        train(model, optimizer, step, rank)
    assert pending is not None
    done = pending.result()
    found["moved"] = not np.array_equal(rectangles(model)[next(iter(before))], next(iter(before.values())))
    found["stored"].append([done.table(key).stored_rows for key in KEYS])
    found["kinds"] = {f.name: f.columns for f in done.table(KEYS[2]).fields}

    if rank.number == 1:
        RankSave._store = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    found["seen"] = outcome(lambda: checkpointer.save(6))
    return found


def restored(rank: Rank) -> dict[str, Any]:
    """Restore what two processes saved; compare with what they had; go on with increments."""
    expected: dict[str, Any] = {}
    for path in sorted(rank.folder.parent.glob("expected-*.npz")):
        with np.load(path) as found:
            expected |= dict(found)
    model = build(rank.world)
    optimizer = dense(model)
    path = rank.folder.parent / "run"
    checkpointer = Checkpointer(path, model, optimizer, policy="consecutive")
    back = checkpointer.restore()
    assert back is not None
    now = rectangles(model)
    told: dict[str, Any] = {
        "wrong": [key for key, values in now.items() if not np.array_equal(values, wanted(expected, key))],
        "held": len(now), "number": back.checkpoint.sequence, "extra": back.extra, "extras": back.extras,
        "over": over(model), "adam": float(optimizer.state[next(iter(optimizer.state))]["step"]),
        "steps": steps_of(model), "rates": sorted({group["lr"] for group in model.fused_optimizer.param_groups}),
    }  # fmt: skip
    train(model, optimizer, 9, rank)
    after = checkpointer.save(9)
    told |= {"storage": [after.table(key).storage for key in KEYS], "restores": after.commit.restores}
    told["clean"] = [checkpointer.save(10).table(key).stored_rows for key in KEYS]
    checkpointer.mark(KEYS[0], [3, 29])
    checkpointer.mark(KEYS[1], np.array([3, 29]))  # of any rank
    told["marked"] = [checkpointer.save(11).table(key).stored_rows for key in KEYS]
    told["refused"] = outcome(lambda: checkpointer.mark(KEYS[1], [30]))
    with contextlib.redirect_stdout(io.StringIO()) as printed, checkpointer.check() as inspection:
        train(model, optimizer, 10, rank)
    told["missed"] = [list(inspection.missed), printed.getvalue()]
    checkpointer.save(12)
    mine = rectangles(model)
    checkpointer.close()
    again = build(rank.world)
    with Checkpointer(path, again, wrapped(again)) as other:
        told["misfit"] = outcome(other.restore)
        other.restore(strict=False)
    told["same_again"] = all(np.array_equal(values, mine[key]) for key, values in rectangles(again).items())
    return told


def wrapped(model: Any) -> Any:
    """The dense optimizer as TorchRec's examples have it."""
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    named = {name: value for name, value in model.named_parameters() if name.startswith("over")}
    over: Any = KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=0.1))
    return CombinedOptimizer([model.fused_optimizer, over])


def outcome(act: Callable[[], Any]) -> str:
    """What came of it."""
    try:
        act()
    except crf.CheckrunError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


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
    mine = rectangles(model)
    train(model, optimizer, 5, rank)
    state = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict()}
    state_dict_loader.load(state, storage_reader=CheckrunReader(rank.folder / "run"))
    latest = crf.open_run(rank.folder / "run").latest()
    return {
        "same": all(np.array_equal(values, mine[key]) for key, values in rectangles(model).items()),
        "fields": [[f.name for f in latest.table(f"model.{key}").fields] for key in KEYS],
        "storage": [latest.table(f"model.{key}").storage for key in KEYS],
    }


def elementwise(rank: Rank) -> dict[str, Any]:
    """Adagrad keeps a sum for each weight: what is restored trains on to the same bits."""
    model = build(rank.world, "EXACT_ADAGRAD")
    optimizer = dense(model)
    with Checkpointer(rank.folder / "run", model, optimizer) as checkpointer:
        for step in range(2):
            train(model, optimizer, step, rank)
        done = checkpointer.save(2)
    train(model, optimizer, 2, rank)
    straight = rectangles(model)
    other = build(rank.world, "EXACT_ADAGRAD")
    again = dense(other)
    with Checkpointer(rank.folder / "run", other, again) as checkpointer:
        checkpointer.restore()
        train(other, again, 2, rank)
        after = checkpointer.save(3)
    return {
        "fields": [f.name for f in done.table(KEYS[0]).fields],
        "same": all(np.array_equal(values, straight[key]) for key, values in rectangles(other).items()),
        "storage": [after.table(key).storage for key in KEYS],
        "refused": outcome(lambda: Checkpointer(rank.folder / "no", model, torch.optim.Adam(model.parameters()))),
    }


class Mixed(nn.Module):
    """A table of two features, one of a sequence, one whose replicas each rank has, and a plain one."""

    def __init__(self) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

        super().__init__()
        bags = [
            EmbeddingBagConfig(name="two", embedding_dim=8, num_embeddings=ROWS, feature_names=["a", "b"]),
            EmbeddingBagConfig(name="copies", embedding_dim=8, num_embeddings=ROWS, feature_names=["c"]),
        ]
        words = [EmbeddingConfig(name="words", embedding_dim=8, num_embeddings=ROWS, feature_names=["a"])]
        meta = torch.device("meta")
        self.ebc = EmbeddingBagCollection(device=meta, tables=bags)
        self.ec = EmbeddingCollection(device=meta, tables=words)
        self.plain = nn.EmbeddingBag(ROWS, 8, mode="sum")

    def forward(self, features: Any) -> torch.Tensor:
        bags = self.ebc(features).values().sum()
        words = self.ec(features)["a"].values().sum()
        total: torch.Tensor = bags + words + self.plain(features["a"].values(), features["a"].offsets()[:-1]).sum()
        return total


def mixed(rank: Rank) -> dict[str, Any]:
    """Rows of each kind of table; forwards whose backward has not come yet; the end of a forward without one."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    torch.manual_seed(0)
    model: Any = DistributedModelParallel(Mixed(), device=torch.device("cpu"), plan=mixed_plan(rank))
    optimizer = torch.optim.Adagrad([p for n, p in model.named_parameters() if n in PLAIN], lr=0.1)

    def forward(a: list[int], b: list[int]) -> Any:
        keys, lengths = ["a", "b", "c"], torch.tensor([len(a), len(b), 1])
        return model(KeyedJaggedTensor.from_lengths_sync(keys, torch.tensor([*a, *b, 7]), lengths))

    checkpointer = Checkpointer(rank.folder / "run", model, optimizer, policy="consecutive")
    told: dict[str, Any] = {"tables": sorted(checkpointer.tables), "rows": []}

    def saved() -> None:
        done = checkpointer.save()
        changes = {c.table: c.rows.tolist() for c in done.changes_since(done.sequence - 1) if len(c.rows)}
        told["rows"].append([changes.get(name, []) for name in MIXED])

    checkpointer.save()
    with checkpointer.check() as inspection:
        loss = forward([1, 2], [2, 3, 4])
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    told["missed"] = list(inspection.missed)
    saved()
    one, two = forward([10], [11]), forward([12], [13])
    saved()  # both are still to come
    one.backward()
    saved()  # one is
    two.backward()
    optimizer.step()
    optimizer.zero_grad()
    saved()
    del one, two, loss
    last = forward([20], [21])  # never to come
    saved()
    del last
    gc.collect()
    saved()
    with torch.no_grad():
        forward([22], [23])
    saved()
    checkpointer.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracked = TrackedRows(model)
    told["shared"] = sorted(str(one.message).partition(":")[0] for one in caught if one.category is TrackingWarning)
    told["all"] = [tracked(name) is crf.ALL for name in MIXED[:2]]
    told["refused"] = refused(rank, model, optimizer)
    told["right"] = crf.open_run(rank.folder / "run").verify() == []
    return told


def refused(rank: Rank, model: Any, optimizer: torch.optim.Optimizer) -> list[str]:
    """A wrapper that has a state of its own; a table that no fused kernel trains."""
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.warmup import WarmupOptimizer

    named: dict[str, Any] = {name: value for name, value in model.named_parameters() if name in PLAIN}
    wrapper: Any = WarmupOptimizer(KeyedOptimizerWrapper(named, lambda _: optimizer), [])
    path = rank.folder / "refused"
    told = [outcome(lambda: Checkpointer(path, model, wrapper))]
    # On CPUs TorchRec has no table that is cut, and not fused.
    with mock.patch("checkrun_format.torch.torchrec._fused_modules", return_value=()):
        return [*told, outcome(lambda: Checkpointer(path, model, optimizer))]


PLAIN = ("plain.weight", "ebc.embedding_bags.copies.weight")
MIXED = ("ebc.embedding_bags.two.weight", "ec.embeddings.words.weight", "plain.weight")


def mixed_plan(rank: Rank) -> Any:
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.sharding_plan import get_default_sharders

    kinds = {"two": "table_wise", "words": "table_wise", "copies": "data_parallel"}
    constraints = {
        name: ParameterConstraints(
            sharding_types=[kind], compute_kernels=["dense" if kind == "data_parallel" else "fused"]
        )
        for name, kind in kinds.items()
    }
    topology = Topology(world_size=rank.world, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    return planner.collective_plan(Mixed(), get_default_sharders(), dist.group.WORLD)


SCENARIOS = {f.__name__: f for f in (restored, dcp, elementwise, mixed, killed)}

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(SCENARIOS, quiet=True)
