"""What ranks do with torch.distributed.checkpoint; `test_dcp.py` says what must come of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

import checkrun_format as crf
from checkrun_format.torch.distributed import CheckrunReader, CheckrunWriter
from tests.integration.ranks import Rank, main

ROWS, COLUMNS = 11, 6
KINDS = ("row", "column", "table", "grid")
WEIGHTS = ("user.weight", "item.weight")
STATE = {name: f"optim.state.{name}.{field}" for name in WEIGHTS for field in ("exp_avg",)}

Span = tuple[int, int]


def cut(length: int, pieces: int) -> list[Span]:
    """As torch cuts: the last pieces may be short or empty."""
    size = -(-length // pieces)
    return [(min(length, size * place), min(length, size * (place + 1))) for place in range(pieces)]


def rectangles(kind: str, ranks: int, table: int) -> list[tuple[int, Span, Span]]:
    """(rank, rows, columns) of every shard of a table."""
    if kind == "row":
        return [(rank, rows, (0, COLUMNS)) for rank, rows in enumerate(cut(ROWS, ranks))]
    if kind == "column":
        return [(rank, (0, ROWS), columns) for rank, columns in enumerate(cut(COLUMNS, ranks))]
    if kind == "table":
        return [(table % ranks, (0, ROWS), (0, COLUMNS))]
    top = max(1, ranks // 2)
    upper = [(rank, (0, 5), columns) for rank, columns in enumerate(cut(COLUMNS, top))]
    below = max(1, ranks - top)
    return upper + [((top + rank) % ranks, (5, ROWS), columns) for rank, columns in enumerate(cut(COLUMNS, below))]


def whole(seed: int, step: int = 0) -> torch.Tensor:
    """The value of a table; at step 1 some rows are others."""
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    if step:
        values[CHANGED] += 1
    return values


CHANGED = [0, 4, 5, 10]


def load(state_dict: dict[str, Any], reader: CheckrunReader, **options: Any) -> None:
    """As `dcp.load`; but the planner of torch 2.13 by default takes a rank without shards to read an old checkpoint."""
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    state_dict_loader.load(state_dict, storage_reader=reader, planner=planner, **options)


def sharded(value: torch.Tensor, places: list[tuple[int, Span, Span]], me: int, group: Any) -> ShardedTensor:
    """A ShardedTensor of a value, by rectangles."""
    shards = [
        Shard(
            value[rows[0] : rows[1], columns[0] : columns[1]].clone(),
            ShardMetadata(
                shard_offsets=[rows[0], columns[0]],
                shard_sizes=[rows[1] - rows[0], columns[1] - columns[0]],
                placement=f"rank:{me}/cpu",
            ),
        )
        for rank, rows, columns in places
        if rank == me and rows[0] < rows[1] and columns[0] < columns[1]
    ]
    return init_from_local_shards(shards, list(value.shape), process_group=group)


def held(places: list[tuple[int, Span, Span]], me: int) -> list[int]:
    """The changed rows that a rank sees: those it holds anything of."""
    return [row for row in CHANGED if any(r == me and lo <= row < hi for r, (lo, hi), _ in places)]


def state(kind: str, ranks: int, me: int, group: Any, step: int, *, blank: bool = False) -> dict[str, Any]:
    """A state dict; a blank one is to be loaded into."""
    found: dict[str, Any] = {"optim": {"param_groups": [{"lr": -1.0 if blank else 0.1 + step}]}}
    for table, name in enumerate(WEIGHTS):
        places = rectangles(kind, ranks, table)
        for seed, key in ((table, name), (10 + table, STATE[name])):
            value = torch.full((ROWS, COLUMNS), -1.0) if blank else whole(seed, step)
            found[key] = sharded(value, places, me, group)
    found["top"] = torch.full((3, 2), -1.0) if blank else torch.arange(6.0).reshape(3, 2) + step
    return found


def shards_equal(loaded: dict[str, Any], step: int) -> bool:
    """Whether every shard has the bits that were saved."""
    equal = torch.equal(loaded["top"], torch.arange(6.0).reshape(3, 2) + step)
    equal &= loaded["optim"]["param_groups"][0]["lr"] == 0.1 + step
    for table, name in enumerate(WEIGHTS):
        for seed, key in ((table, name), (10 + table, STATE[name])):
            for shard in loaded[key].local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                value = whole(seed, step)[row : row + rows, column : column + columns]
                equal &= torch.equal(shard.tensor.view(torch.int32), value.contiguous().view(torch.int32))
    return bool(equal)


def groups(rank: Rank) -> Iterator[tuple[int, Any]]:
    """Groups of the first 1, 2, ... ranks; all ranks make all of them."""
    for count in range(1, rank.world + 1):
        yield count, dist.new_group(list(range(count)))


def reshard(rank: Rank) -> dict[str, Any]:
    """Save with W ranks as a base and an increment, load each with V, as cut by the same kind and by the next."""
    all_groups = dict(groups(rank))
    right = {}
    for (place, kind), (saving, group) in itertools.product(enumerate(KINDS), all_groups.items()):
        folder = rank.folder / f"{kind}-{saving}"
        if rank.number < saving:
            told: dict[str, Any] = {}
            writer = CheckrunWriter(folder, tables=list(WEIGHTS), changed=told.get, policy="consecutive")
            state_dict_saver.save(
                state(kind, saving, rank.number, group, 0), storage_writer=writer, process_group=group
            )
            for table, name in enumerate(WEIGHTS):
                told[name] = held(rectangles(kind, saving, table), rank.number)
            state_dict_saver.save(
                state(kind, saving, rank.number, group, 1), storage_writer=writer, process_group=group
            )
        dist.barrier()
        ways = ((kind, 1), (KINDS[(place + 1) % len(KINDS)], 2))
        for (loading, other), (kind_now, number) in itertools.product(all_groups.items(), ways):
            if rank.number < loading:
                loaded = state(kind_now, loading, rank.number, other, 0, blank=True)
                load(loaded, CheckrunReader(folder, number), process_group=other)
                key = f"{kind} {saving} -> {kind_now} {loading}, checkpoint {number}"
                right[key] = shards_equal(loaded, number - 1)
    return right


def dtensors(rank: Rank) -> dict[str, Any]:
    """DTensors of every placement, saved by four ranks, loaded by two and by one; replicas tell different rows."""
    mesh = DeviceMesh("cpu", torch.arange(rank.world))
    pair = DeviceMesh("cpu", torch.arange(2))
    square = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    placements: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "row": (mesh, [Cut(0)]), "column": (mesh, [Cut(1)]), "replica": (mesh, [Replicate()]),
        "hybrid": (square, [Replicate(), Cut(0)]), "grid": (square, [Cut(0), Cut(1)]),
    }  # fmt: skip
    told: dict[str, Any] = {}
    writer = CheckrunWriter(
        rank.folder / "run", tables=[f"{name}.weight" for name in placements], changed=told.get, policy="consecutive"
    )
    stored = []
    for step in range(3):
        values = {name: whole(7, 1 if step else 0) for name in placements}
        state_dict = {
            f"{name}.weight": distribute_tensor(values[name], where, how) for name, (where, how) in placements.items()
        }
        state_dict["dense"] = distribute_tensor(torch.arange(24.0).reshape(2, 3, 4), mesh, [Cut(2)])
        state_dict_saver.save(state_dict, storage_writer=writer)
        latest = crf.open_run(rank.folder / "run").latest()
        stored.append({name: latest.table(f"{name}.weight").stored_rows for name in placements})
        # Each rank names one changed row, wherever it lies.
        told |= {f"{name}.weight": [CHANGED[rank.number]] for name in placements}
        if step:
            told |= {f"{name}.weight": [] for name in placements}
    right = {}
    for name, (where, how) in {
        "row": (pair, [Cut(1)]), "column": (pair, [Cut(0)]), "replica": (pair, [Cut(0)]), "hybrid": (mesh, [Cut(0)]),
        "grid": (mesh, [Cut(1)]),
    }.items():  # fmt: skip
        loaded = {f"{name}.weight": _blank(where, how)}
        load(loaded, CheckrunReader(rank.folder / "run"))
        if where.get_coordinate() is not None:
            right[name] = torch.equal(loaded[f"{name}.weight"].full_tensor(), whole(7, 1))
    plain = {"dense": torch.zeros(2, 3, 4), "row.weight": torch.zeros(ROWS, COLUMNS)}
    state_dict_loader.load(plain, storage_reader=CheckrunReader(rank.folder / "run"))
    right["plain"] = torch.equal(plain["row.weight"], whole(7, 1))
    right["dense"] = torch.equal(plain["dense"], torch.arange(24.0).reshape(2, 3, 4))
    return {"right": right, "stored": stored}


def _blank(mesh: DeviceMesh, placements: Any) -> DTensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset((ROWS, COLUMNS), mesh, placements)
    return DTensor.from_local(
        torch.zeros(shape), mesh, placements, run_check=False, shape=torch.Size((ROWS, COLUMNS)), stride=(COLUMNS, 1)
    )


def asynchronous(rank: Rank) -> dict[str, Any]:
    """Every tensor changes right after `async_save` returns; what was stored are the values before."""
    told: dict[str, Any] = {}
    writer = CheckrunWriter(rank.folder / "run", tables=list(WEIGHTS), changed=told.get, policy="one-shot")
    group = dist.group.WORLD
    right = []
    for step in (0, 1):
        live = state("grid", rank.world, rank.number, group, step)
        future = state_dict_saver.async_save(live, storage_writer=writer, checkpoint_id=str(step))
        for key in (*WEIGHTS, *STATE.values()):
            for shard in live[key].local_shards():
                shard.tensor.fill_(99)
        live["top"].fill_(99)
        assert isinstance(future, Future)
        future.result()
        loaded = state("row", rank.world, rank.number, group, 0, blank=True)
        load(loaded, CheckrunReader(rank.folder / "run"), checkpoint_id=str(step))
        right.append(shards_equal(loaded, step))
        for table, name in enumerate(WEIGHTS):
            told[name] = held(rectangles("grid", rank.world, table), rank.number)
    latest = crf.open_run(rank.folder / "run").latest()
    return {"right": right, "step": latest.step, "stored": latest.table(WEIGHTS[0]).stored_rows}


class Broken(CheckrunWriter):
    """Fails at one call on one rank."""

    broken: tuple[str, int] | None = None

    def _fail(self, call: str) -> None:
        if self.broken == (call, dist.get_rank()):
            raise RuntimeError(f"broken {call}")

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        self._fail("set_up")
        super().set_up_storage_writer(*args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        self._fail("local")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self._fail("global")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        found = super().write_data(plan, planner)
        self._fail("write")
        return found

    def finish(self, metadata: Any, results: Any) -> None:
        self._fail("finish")
        super().finish(metadata, results)


def failures(rank: Rank) -> dict[str, Any]:
    """A rank fails at each call in turn, while rows change; after all of it nothing is lost."""
    told: dict[str, Any] = {}
    path = rank.folder / "run"
    writer = Broken(path, tables=list(WEIGHTS), changed=lambda name: told.pop(name, []), policy="consecutive")
    told.update(dict.fromkeys(WEIGHTS, crf.ALL))
    group = dist.group.WORLD
    state_dict_saver.save(state("row", rank.world, rank.number, group, 0), storage_writer=writer)
    seen = {}
    for at, call in enumerate((("local", 1), ("global", 0), ("write", 2), ("finish", 0), ("set_up", 3))):
        # One row at a time is told, by the rank that holds it, and to a save that fails.
        for name in WEIGHTS:
            told[name] = (
                [CHANGED[at]] if at < 4 and held([*rectangles("row", 4, 0)], rank.number).count(CHANGED[at]) else []
            )
        writer.broken = call
        try:
            state_dict_saver.save(state("row", rank.world, rank.number, group, 1), storage_writer=writer)
            seen[call[0]] = "saved"
        except CheckpointException as error:
            seen[call[0]] = f"{sorted(error.failures)} {next(iter(error.failures.values()))[0]!r}"
        dist.barrier()
    committed = [c.sequence for c in crf.open_run(path).log()]
    writer.broken = None
    state_dict_saver.save(state("row", rank.world, rank.number, group, 1), storage_writer=writer)
    loaded = state("column", rank.world, rank.number, group, 0, blank=True)
    load(loaded, CheckrunReader(path))
    latest = crf.open_run(path).latest()
    return {
        "seen": seen, "committed": committed, "right": shards_equal(loaded, 1),
        "kind": latest.table(WEIGHTS[0]).storage, "stored": latest.table(WEIGHTS[0]).stored_rows,
    }  # fmt: skip


def mismatch(rank: Rank) -> dict[str, Any]:
    """What a load refuses, on every rank."""
    group = dist.group.WORLD
    path = rank.folder / "run"
    writer = CheckrunWriter(path, tables=list(WEIGHTS))
    for step in (0, 1):
        state_dict_saver.save(state("row", rank.world, rank.number, group, step), storage_writer=writer)
    wrong: dict[str, tuple[dict[str, Any], int]] = {
        "key": ({"absent": torch.zeros(1)}, 2),
        "shape": ({"top": torch.zeros(4)}, 2),
        "number": ({"top": torch.zeros(3, 2)}, 1 + rank.number % 2),
    }
    seen = {}
    for name, (state_dict, number) in wrong.items():
        try:
            state_dict_loader.load(state_dict, storage_reader=CheckrunReader(path, number))
            seen[name] = "loaded"
        except CheckpointException as error:
            seen[name] = repr(next(iter(error.failures.values()))[0])
    try:
        state_dict_saver.save(
            {"top": torch.zeros(1)}, storage_writer=CheckrunWriter(rank.folder / "other", tables=["usr.weight"])
        )
    except CheckpointException as error:
        seen["table"] = repr(next(iter(error.failures.values()))[0])
    return seen


def restored(rank: Rank) -> dict[str, Any]:
    """After a load the run goes on with an increment, in another world size; a partial load does not count."""
    path, group = rank.folder / "run", dist.group.WORLD
    pair = dist.new_group([0, 1])
    if rank.number < 2:
        writer = CheckrunWriter(path, tables=list(WEIGHTS), policy="consecutive")
        state_dict_saver.save(state("column", 2, rank.number, pair, 0), storage_writer=writer, process_group=pair)
    dist.barrier()
    run = crf.open_run(path, mode="a", policy="consecutive") if rank.number == 0 else crf.open_run(path)
    state_dict_loader.load({"top": torch.zeros(3, 2)}, storage_reader=CheckrunReader(run))
    told: dict[str, Any] = {}
    kinds = []
    for part in (True, False):
        writer = CheckrunWriter(run, tables=list(WEIGHTS), changed=told.get)
        if not part:
            loaded = state("row", rank.world, rank.number, group, 0, blank=True)
            load(loaded, CheckrunReader(run, 2))
        for name in WEIGHTS:
            told[name] = held(rectangles("row", rank.world, 0), rank.number)
        state_dict_saver.save(state("row", rank.world, rank.number, group, 1), storage_writer=writer)
        latest = crf.open_run(path).latest()
        kinds.append([latest.table(WEIGHTS[0]).storage, latest.table(WEIGHTS[0]).stored_rows, latest.commit.restores])
    return {"kinds": kinds}


def bits(rank: Rank) -> dict[str, Any]:
    """Quantized tables, sharded by columns: each part is quantized alone; the state stays raw."""
    path, group = rank.folder / "run", dist.group.WORLD
    writer = CheckrunWriter(path, tables=list(WEIGHTS), bits=8)
    state_dict_saver.save(state("column", rank.world, rank.number, group, 0), storage_writer=writer)
    loaded = {name: torch.zeros(ROWS, COLUMNS) for name in (*WEIGHTS, *STATE.values())}
    load(loaded, CheckrunReader(path))
    error = (loaded[WEIGHTS[0]] - whole(0)).abs().max()
    return {
        "exact": torch.equal(loaded[WEIGHTS[0]], whole(0)), "near": bool(error < 0.01),
        "state": torch.equal(loaded[STATE[WEIGHTS[0]]], whole(10)),
    }  # fmt: skip


def few_rows(rank: Rank) -> dict[str, Any]:
    """More ranks than rows; a table without rows; a rank without a table; nothing changed."""
    path, group = rank.folder / "run", dist.group.WORLD
    told: dict[str, Any] = {}
    names = ["two.weight", "none.weight"]
    writer = CheckrunWriter(path, tables=names, changed=told.get, policy="consecutive")
    mesh = DeviceMesh("cpu", torch.arange(rank.world))
    value = torch.arange(6.0).reshape(2, 3)
    kinds = []
    for _ in range(2):
        state_dict = {names[0]: distribute_tensor(value, mesh, [Cut(0)]), names[1]: torch.zeros(0, 3)}
        state_dict_saver.save(state_dict, storage_writer=writer)
        latest = crf.open_run(path).latest()
        kinds.append([latest.table(name).storage for name in names])
        told |= dict.fromkeys(names, np.zeros(0, np.int64))
    loaded = {names[0]: torch.zeros(2, 3), names[1]: torch.zeros(0, 3)}
    load(loaded, CheckrunReader(path))
    del group
    return {"kinds": kinds, "right": torch.equal(loaded[names[0]], value)}


def one_shot(rank: Rank) -> dict[str, Any]:
    """Increments over one base hold all rows since it, and tell as changed only those since the checkpoint before."""
    path, group = rank.folder / "run", dist.group.WORLD
    told: dict[str, Any] = {}
    writer = CheckrunWriter(path, tables=list(WEIGHTS), changed=told.get, policy="one-shot")
    stored, recent = [], []
    for number, row in enumerate([None, 0, 4, 10]):
        for name in WEIGHTS:
            told[name] = crf.ALL if row is None else [row] * held(rectangles("row", 4, 0), rank.number).count(row)
        state_dict_saver.save(state("row", rank.world, rank.number, group, 0), storage_writer=writer)
        latest = crf.open_run(path).latest()
        stored.append(latest.table(WEIGHTS[0]).stored_rows)
        if number:
            changes = [c for c in latest.changes_since(number) if c.table == WEIGHTS[0]]
            recent.append([int(r) for c in changes for r in c.rows])
    return {"stored": stored, "recent": recent}


SCENARIOS = {
    f.__name__: f for f in (reshard, dtensors, asynchronous, failures, mismatch, restored, bits, few_rows, one_shot)
}

if __name__ == "__main__":
    main(SCENARIOS)
