"""TorchRec: the tables of a model under `DistributedModelParallel`, and what of them is on this rank.

torchrec is not imported here: whatever has its interface will do.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.optim import Optimizer

from checkrun_format.checkpoint import Checkpoint, TableView
from checkrun_format.devices import tensor_of
from checkrun_format.errors import InvalidInputError, TrackingWarning
from checkrun_format.rows import Ids, check_bounds, union
from checkrun_format.state import ALL, All
from checkrun_format.torch.distributed.ranks import Changed
from checkrun_format.torch.distributed.shards import Shard, dtype_name
from checkrun_format.torch.fused import FusedRows, Kernel
from checkrun_format.torch.optimizers import Optimizers, named_optimizers

Told: TypeAlias = Mapping[str, Any]

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTable:
    """A table that is cut over the ranks.

    `name` is its key in the state dict; `cut` tells where it is cut by columns: 0, ..., `width`.
    """

    name: str
    rows: int
    width: int
    cut: Sequence[int]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A shard of a table on this rank: its weight, and the fused optimizer's state of the same rows and columns."""

    table: ShardedTable
    rows: tuple[int, int]
    columns: tuple[int, int]
    fields: Mapping[str, torch.Tensor]

    @property
    def name(self) -> str:
        """Which it is, in words."""
        return f"{self.table.name}[{self.rows[0]}:{self.rows[1]},{self.columns[0]}:{self.columns[1]}]"

    def shard(self, field: str, values: Any = None, *, cut: bool = False) -> Shard:
        """A field of it as what a rank stores; `values` as of `Shard`, but one value per row has one dimension."""
        held = self.fields[field]
        columns: tuple[int, int] | None = self.columns
        width: int | None = self.table.width
        if held.ndim == 1:
            columns, width = None, None
            if len(self.table.cut) > 2:
                place = self.table.cut.index(self.columns[0])
                columns, width = (place, place + 1), len(self.table.cut) - 1
                values = None if values is None else values.reshape(len(values), 1)
        return Shard(
            table=self.table.name,
            field=field,
            rows=self.rows,
            columns=columns,
            of=self.table.rows,
            width=width,
            dtype=dtype_name(held.dtype, f"table {self.table.name!r}, field {field!r}"),
            values=values,
            cut=cut,
        )


class ShardedModel:
    """The tables of a model that `DistributedModelParallel` cut by rows, columns or not at all, over the ranks.

    Each has its key in the state dict as its name (`ebc.embedding_bags.user.weight`), the field `weight`, and the state
    of its fused optimizer: `momentum1` and so on.

    Parameters
    ----------
    model : DistributedModelParallel

    Attributes
    ----------
    module : nn.Module
        The model without wrappers.
    tables : dict of text to ShardedTable
        On all ranks the same.
    local : dict of text to LocalShard
        What is on this rank, by `LocalShard.name`.
    records : dict of text to FusedRows
        Which rows of these changed.
    taken : dict of text to rows
        Rows of whole tables that were marked, and belong to the save that goes on.

    Raises
    ------
    InvalidInputError
        A table of which it is not known which rows change, or how they are trained.

    Notes
    -----
    State of one value per row and shard (row-wise Adagrad) of a table that is cut by columns is a field of shape (rows,
    shards). Restored into the same cut it keeps its bits. Into another cut, each new shard gets the mean of the old
    shards' values, weighted by the columns that it shares with each: what the mean of squared gradients over its
    columns would have been, if the columns of one old shard had equal ones.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.module: nn.Module = model.module
        self.tables, self.local = sharded_tables(model)
        self.taken: dict[str, Ids | All] = {}
        self._modules = list(_fused_modules(self.module))
        self._kernels = [Kernel(module) for module in self._modules]
        self.records = self._records()
        self._marked: dict[str, Changed] = {}

    def _records(self) -> dict[str, FusedRows]:
        places = {
            (weight.data_ptr(), len(weight)): (kernel, place)
            for kernel in self._kernels
            for place, weight in enumerate(kernel.weights)
        }
        records = {}
        for name, shard in self.local.items():
            weight = shard.fields["weight"]
            held = places.get((weight.data_ptr(), len(weight)))
            if held is None:
                raise InvalidInputError(
                    f"table {shard.table.name!r} is sharded, but no fused kernel of FBGEMM trains it: take the compute "
                    "kernel 'fused', or save by the plug-in for torch.distributed.checkpoint (CheckrunWriter)"
                )
            state = [values for field, values in shard.fields.items() if field != "weight"]
            records[name] = FusedRows(name, *held, state)
        return records

    def hooks(self) -> list[Any]:
        """Have the records kept from now on; the handles of the hooks that do it."""
        pairs = zip(self._modules, self._kernels, strict=True)
        return [module.register_forward_hook(kernel.after, with_kwargs=True) for module, kernel in pairs]

    def mark(self, table: str, rows: Ids | All) -> None:
        """Note that rows of a whole table changed, on whatever rank they are."""
        if not isinstance(rows, All):
            check_bounds(rows, self.tables[table].rows, f"table {table!r}, mark")
            for shard in self.of_table(table):
                inside = rows[(rows >= shard.rows[0]) & (rows < shard.rows[1])] - shard.rows[0]
                self.records[shard.name].mark(torch.from_numpy(inside))
        self._marked.setdefault(table, Changed()).add(rows)

    def take(self) -> None:
        """Hand what was marked to a save."""
        self.taken = {name: ALL if some.everything else some.rows for name, some in self._marked.items()}
        self._marked = {}

    def put_back(self) -> None:
        """Put back what was not saved."""
        for table, rows in self.taken.items():
            self._marked.setdefault(table, Changed()).add(rows)
        self.taken = {}

    def forget(self) -> None:
        """Nothing has changed: the model was just read from a checkpoint."""
        self._marked = {}

    def look(self) -> None:
        """Have the tables hold what was trained; refuse a model that was sharded anew."""
        for module in self._modules:
            if hasattr(module, "flush"):
                module.flush()  # what a cache in a device's memory holds of tables in the host's
        _, now = sharded_tables(self._model)
        if {n: _places(s) for n, s in now.items()} != {n: _places(s) for n, s in self.local.items()}:
            raise InvalidInputError("the model was sharded anew since the Checkpointer was made: make a new one")

    def of_table(self, table: str) -> list[LocalShard]:
        """The local shards of a table."""
        return [shard for shard in self.local.values() if shard.table.name == table]

    def document(self) -> dict[str, Any]:
        """What neither tables nor tensors tell, as JSON; of this rank.

        `cuts` has the columns where tables were cut by columns; `iterations` how many steps the fused optimizers have
        done (the bias correction of Adam needs them); `rates` the learning rate of each table that is here.
        """
        counts = [int(m.iter) for m in self._modules if isinstance(getattr(m, "iter", None), torch.Tensor)]
        return {
            "cuts": {table.name: list(table.cut) for table in self.tables.values() if len(table.cut) > 2},
            "iterations": max(counts, default=0),
            "rates": {name: float(group["lr"]) for name, group in self._groups() if "lr" in group},
        }

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each weight that a fused optimizer trains, and its parameter group."""
        fused = self._model.fused_optimizer
        names = {id(weight): name for name, weight in fused.params.items()}
        for group in fused.param_groups:
            yield from ((names[id(weight)], group) for weight in group["params"] if id(weight) in names)

    # Restoring --------------------------------------------------------------------------------------------------------

    def fit(self, checkpoint: Checkpoint, told: Told) -> dict[str, list[str]]:
        """For each table, what of a checkpoint does not fit."""
        cuts = told.get("cuts", {})
        return {name: self._misfits(table, checkpoint, cuts.get(name)) for name, table in self.tables.items()}

    def _misfits(self, table: ShardedTable, checkpoint: Checkpoint, cut: Sequence[int] | None) -> list[str]:
        if table.name not in checkpoint.tables:
            return [f"table {table.name!r} is not in the checkpoint"]
        view = checkpoint.table(table.name)
        stored = {field.name: (field.dtype, field.columns) for field in view.fields}
        wanted: dict[str, tuple[str, set[int | None]]] = {"weight": (table.dtype, {table.width})}
        for shard in self.of_table(table.name):
            for field, values in shard.fields.items():
                by_shard = {None if cut is None else len(cut) - 1}  # one value per row: whatever the cut was
                wanted[field] = (shard.shard(field).dtype, by_shard if values.ndim == 1 else {table.width})
        problems = []
        if view.addressing != "dense" or len(view) != table.rows:
            problems.append(f"table {table.name!r}: {len(view)} rows in the checkpoint, {table.rows} in the model")
        for field, (dtype, widths) in wanted.items():
            theirs = stored.get(field)
            if theirs is None or theirs[0] != dtype or theirs[1] not in widths:
                problems.append(f"table {table.name!r}: the checkpoint's field {field!r} is {theirs}, not {dtype}")
        return problems

    def restore(self, checkpoint: Checkpoint, tables: Collection[str], told: Sequence[Told]) -> None:
        """Read tables that fit; `told` is what each rank's `document` was."""
        cuts = told[0].get("cuts", {})
        rates = {name: rate for one in told for name, rate in one.get("rates", {}).items()}
        with torch.no_grad():
            for shard in self.local.values():
                name = shard.table.name
                if name in tables:
                    _read(shard, checkpoint.table(name), cuts.get(name, [0, shard.table.width]))
            for module in self._modules:
                for name in ("iter", "iter_cpu"):
                    if isinstance(getattr(module, name, None), torch.Tensor):
                        getattr(module, name).fill_(max(one.get("iterations", 0) for one in told))
                if hasattr(module, "reset_cache_states"):
                    module.reset_cache_states()
        for name, group in self._groups():
            group["lr"] = rates.get(name, group["lr"])
        self._model.fused_optimizer.zero_grad()  # hands the rates to the kernels


def sharded_tables(model: Any) -> tuple[dict[str, ShardedTable], dict[str, LocalShard]]:
    """The tables of a `DistributedModelParallel`, and what of them is on this rank; values are those that are trained.

    Raises
    ------
    InvalidInputError
    """
    state = model.fused_optimizer.state_dict()["state"]
    tables, local = {}, {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            tables[name] = _table(name, value)
            for shard in _local_shards(tables[name], value, state.get(name, {})):
                if shard.rows[0] < shard.rows[1]:
                    local[shard.name] = shard
    return tables, local


def _table(name: str, weight: ShardedTensor) -> ShardedTable:
    metadata = weight.metadata()
    if len(metadata.size) != 2:
        raise InvalidInputError(
            f"{name!r} is a ShardedTensor of shape {tuple(metadata.size)}, no table: save the model by the plug-in for "
            "torch.distributed.checkpoint, CheckrunWriter of checkrun_format.torch.distributed"
        )
    rows, width = metadata.size
    cut = sorted({shard.shard_offsets[1] for shard in metadata.shards_metadata} | {width})
    dtype = dtype_name(metadata.tensor_properties.dtype, f"table {name!r}")
    return ShardedTable(name=name, rows=rows, width=width, cut=cut, dtype=dtype)


def _local_shards(table: ShardedTable, weight: ShardedTensor, state: Mapping[str, Any]) -> Iterator[LocalShard]:
    """The shards of a weight on this rank; `state` of its fused optimizer has names `TABLE.NAME`."""
    for place, shard in enumerate(weight.local_shards()):
        (row, column), (count, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        if not isinstance(shard.tensor, torch.Tensor):
            raise InvalidInputError(
                f"table {table.name!r}: a {type(shard.tensor).__name__} (SSD or key-value), which is not saved"
            )
        fields = {
            key.rpartition(".")[2]: _state_of(table.name, key, value, place, count)
            for key, value in state.items()
            if isinstance(value, ShardedTensor)
        }
        yield LocalShard(
            table=table,
            rows=(row, row + count),
            columns=(column, column + columns),
            fields={"weight": shard.tensor.detach(), **fields},
        )


def _state_of(table: str, key: str, value: ShardedTensor, place: int, count: int) -> torch.Tensor:
    """The state of the weight's local shard at a place: they come in the same order."""
    shards = value.local_shards()
    if place >= len(shards) or len(shards[place].tensor) != count:
        raise InvalidInputError(f"table {table!r}: the state {key!r} is cut otherwise than the weight")
    return shards[place].tensor.detach()


def _fused_modules(module: nn.Module) -> Iterator[Any]:
    """The modules of FBGEMM that hold fused tables: sharded modules keep them in lists, out of sight of `modules()`."""
    seen = set()
    for sharded in module.modules():
        for lookup in getattr(sharded, "_lookups", ()):
            for inner in lookup.modules():
                if hasattr(inner, "split_optimizer_states") and inner not in seen:
                    seen.add(inner)
                    yield inner


def _places(shard: LocalShard) -> dict[str, int]:
    return {field: values.data_ptr() for field, values in shard.fields.items()}


def plain_optimizers(given: Optimizers) -> dict[str, Optimizer]:
    """The optimizers by name, out of TorchRec's wrappers; fused ones, which their tables hold, are left out.

    Raises
    ------
    InvalidInputError
        A wrapper that has a state of its own.
    """
    found: dict[str, Optimizer] = {}
    for name, optimizer in named_optimizers(given).items():
        inner = list(_unwrapped(optimizer))
        found |= {name: inner[0]} if len(inner) == 1 else {f"{name}-{n}": one for n, one in enumerate(inner)}
    return found


def _unwrapped(optimizer: Any) -> Iterator[Optimizer]:
    kind = type(optimizer)
    if not kind.__module__.startswith("torchrec."):
        yield optimizer
    elif kind.__name__ == "CombinedOptimizer":
        for _, inner in optimizer.optimizers:
            yield from _unwrapped(inner)
    elif kind.__name__ == "KeyedOptimizerWrapper":
        yield optimizer._optimizer  # noqa: SLF001 - there is no other way to it
    elif not any(base.__name__ == "FusedOptimizer" for base in kind.__mro__):
        raise InvalidInputError(
            f"optimizer: the state of a {kind.__name__} is not saved: give the optimizer that it wraps, and what else "
            "it knows by extra="
        )


def _read(shard: LocalShard, view: TableView, cut: Sequence[int]) -> None:
    """Read a local shard of a table that was stored when it was cut at `cut`."""
    rows, columns = slice(*shard.rows), slice(*shard.columns)
    wide = [name for name, values in shard.fields.items() if values.ndim == 2]
    found: dict[str, Any] = view.read(rows, columns=columns, fields=wide)
    for name, values in shard.fields.items():
        stored = found[name] if name in found else _of_shard(view.read(rows, fields=[name])[name], cut, shard.columns)
        values.copy_(tensor_of(stored))


def _of_shard(stored: np.ndarray[Any, Any], cut: Sequence[int], columns: tuple[int, int]) -> np.ndarray[Any, Any]:
    """One value per row for a shard of these columns, from one per row and old shard: see `ShardedModel`."""
    by_shard = stored if stored.ndim == 2 else stored[:, None]
    shared = [min(high, columns[1]) - max(low, columns[0]) for low, high in itertools.pairwise(cut)]
    parts = [(place, count) for place, count in enumerate(shared) if count > 0]
    if len(parts) == 1:
        return by_shard[:, parts[0][0]].copy()
    total = sum(by_shard[:, place].astype(np.float64) * count for place, count in parts)
    return np.asarray(total / (columns[1] - columns[0])).astype(stored.dtype)


class TrackedRows:
    """Rows that a `ModelDeltaTracker` of TorchRec has seen looked up, as rows of the whole table.

    For `changed=` of a `CheckrunWriter`, or for a `RankSaver`; a `Checkpointer` has hooks of its own. What it gave is
    kept by whoever asks until a save has committed: that is when it is acknowledged. The tracker itself may forget what
    was read (`delete_on_read`).

    Parameters
    ----------
    model : DistributedModelParallel
    tracker : ModelDeltaTracker, optional
        By default the model's own, made if there is none.
    consumer : str, optional
        Which of the tracker's consumers this is; no one else may read as the same.

    Notes
    -----
    Rows of the latest forward are told with the next save again: their gradients may not have been applied yet.
    Of a table of which the tracker does not tell all (it shares a feature with another, or its name with one of another
    collection, or is to be skipped) any row may have changed; a warning names it.
    """

    def __init__(self, model: Any, tracker: Any = None, *, consumer: str | None = None) -> None:
        self._model = model
        self._tracker = tracker or model.get_delta_tracker() or _new_tracker(model)
        self._exact = _told_exactly(self._tracker.fqn_to_feature_names())
        for name in sharded_tables(model)[0].keys() - self._exact:
            warnings.warn(
                f"stored full, table {name!r}: TorchRec's tracker does not tell all of its rows; a Checkpointer does",
                TrackingWarning,
                stacklevel=2,
            )
        self._consumer = consumer
        self._waiting: dict[str, Ids] = {}
        self._again: dict[str, Ids] = {}

    def __call__(self, table: str) -> Ids | All:
        """The rows of a table that were seen since they were last asked for, as far as `look` has seen."""
        if table not in self._exact:
            return ALL
        return self._waiting.pop(table, np.zeros(0, np.int64))

    def look(self) -> None:
        """Read the tracker."""
        tables, local = sharded_tables(self._model)
        starts = {name: _start(name, local.values()) for name in tables}
        latest = self._latest()
        seen = self._tracker.get_unique_ids(self._consumer)
        # Else what is looked up before the next forward of the model counts as read.
        self._tracker.step()
        for name, start in starts.items():
            found = [self._waiting.get(name), self._again.get(name), _global(seen, name, start)]
            self._waiting[name] = union(*(ids for ids in found if ids is not None))
            self._again[name] = _global(latest, name, start)

    def forget(self) -> None:
        """The model was restored: nothing has changed since."""
        self._tracker.get_unique_ids(self._consumer)
        self._tracker.step()
        self._waiting, self._again = {}, {}

    def _latest(self) -> dict[str, torch.Tensor]:
        now = self._tracker.curr_batch_idx
        found = self._tracker.store.get_indexed_lookups(now, now + 1)
        return {name: torch.cat([lookup.ids for lookup in lookups]) for name, lookups in found.items() if lookups}


def _new_tracker(model: Any) -> Any:
    from torchrec.distributed.model_tracker.types import DeltaTrackerConfig

    return model.init_torchrec_delta_tracker(DeltaTrackerConfig())


def _told_exactly(features: Mapping[str, Sequence[str]]) -> set[str]:
    """The weights of which a tracker tells all rows: it counts those of a shared feature to one table only."""
    times = Counter(name for names in features.values() for name in names)
    return {f"{table}{_WEIGHT}" for table, names in features.items() if all(times[name] == 1 for name in names)}


def _start(table: str, local: Iterable[LocalShard]) -> int:
    """The first row of a table on this rank: the tracker counts from there."""
    starts = {shard.rows[0] for shard in local if shard.table.name == table}
    if len(starts) > 1:
        raise InvalidInputError(f"table {table!r}: several ranges of rows on one rank; its tracker mixes them up")
    return min(starts, default=0)


def _global(seen: Mapping[str, torch.Tensor], table: str, start: int) -> Ids:
    ids = seen.get(table.removesuffix(_WEIGHT))
    if ids is None:
        return np.zeros(0, np.int64)
    return union(np.from_dlpack(ids.detach().cpu()).astype(np.int64)) + start


__all__ = ["LocalShard", "ShardedModel", "ShardedTable", "TrackedRows", "plain_optimizers"]
