"""TorchRec: the tables, fused optimizer state and changed rows of a model under `DistributedModelParallel`.

torchrec is not imported here: whatever has its interface will do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from checkrun_format.checkpoint import Checkpoint, TableView
from checkrun_format.devices import tensor_of
from checkrun_format.errors import InvalidInputError
from checkrun_format.manifest import Record
from checkrun_format.rows import Ids
from checkrun_format.state import ALL, All
from checkrun_format.torch.distributed.saver import RankSave, RankSaver
from checkrun_format.torch.distributed.shards import Shard, dtype_name
from checkrun_format.torch.optimizers import Optimizers, OptimizerState, named_optimizers

BLOB = "torchrec"
"""Name of the blob that says how tables were cut."""

_WEIGHT = ".weight"


class Told(Record, frozen=True, kw_only=True):
    """What the manifest does not tell.

    Parameters
    ----------
    cuts : mapping of table to columns
        Where each table was cut by columns: 0, ..., its width.
    iterations : int
        Steps that the fused optimizers have done (the bias correction of Adam needs them).
    optimizers : mapping
        Of the other optimizers, as `OptimizerState` tells it.
    """

    cuts: dict[str, list[int]]
    iterations: int
    optimizers: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A shard of a table on this rank: its weight, and the fused optimizer's state of the same rows and columns."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    weight: torch.Tensor
    state: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTable:
    """A table, and what of it is on this rank."""

    name: str
    rows: int
    width: int
    cut: Sequence[int]
    """Where it is cut by columns: 0, ..., width."""
    local: Sequence[LocalShard]

    def shards(self) -> Iterator[Shard]:
        """What this rank stores."""
        for shard in self.local:
            yield self._shard("weight", shard.rows, shard.columns, self.width, shard.weight)
            for name, values in shard.state.items():
                if values.ndim == 2:
                    yield self._shard(name, shard.rows, shard.columns, self.width, values)
                elif len(self.cut) == 2:
                    yield self._shard(name, shard.rows, None, None, values)
                else:
                    place = self.cut.index(shard.columns[0])
                    yield self._shard(name, shard.rows, (place, place + 1), len(self.cut) - 1, values.unsqueeze(1))

    def _shard(
        self,
        field: str,
        rows: tuple[int, int],
        columns: tuple[int, int] | None,
        width: int | None,
        values: torch.Tensor,
    ) -> Shard:
        what = f"table {self.name!r}, field {field!r}"
        return Shard(
            table=self.name,
            field=field,
            rows=rows,
            columns=columns,
            of=self.rows,
            width=width,
            dtype=dtype_name(values.dtype, what),
            values=values,
        )


class ShardedModel:
    """A model under `DistributedModelParallel`, whose tables are cut by rows, columns or not at all, over the ranks.

    Each table has its key in the state dict as its name (`ebc.embedding_bags.user.weight`), the field `weight`, and the
    state of its fused optimizer: `momentum1` and so on. Everything else in the state dict is a dense tensor, the same
    on all ranks.

    Parameters
    ----------
    model : DistributedModelParallel
    optimizer : Optimizer, sequence or mapping of them
        Those of the dense parameters.
    tracker : TrackedRows, optional
        Tells which rows changed. Without it any row may have, and tables are stored full.

    Notes
    -----
    State of one value per row and shard (row-wise Adagrad) of a table that is cut by columns is a field of shape (rows,
    shards). Restored into the same cut it keeps its bits. Into another cut, each new shard gets the mean of the old
    shards' values, weighted by the columns that it shares with each: what the mean of squared gradients over its
    columns would have been, if the columns of one old shard had equal ones.

    Examples
    --------
    ::

        sharded = ShardedModel(dmp, optimizer, tracker=TrackedRows(dmp))
        saver = RankSaver(run)
        sharded.restore(saver, missing_ok=True)
        sharded.save(saver, step=1000)
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers = None, *, tracker: TrackedRows | None = None) -> None:
        self._model = model
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._optimizers = OptimizerState(named_optimizers(optimizer), names, ())
        self._tracker = tracker

    # What there is ----------------------------------------------------------------------------------------------------

    def tables(self) -> list[ShardedTable]:
        """The tables as they are now; values are those that are trained, not copies."""
        self._flush()
        state = self._fused_state()
        return [
            _table(name, value, state.get(name, {}))
            for name, value in self._model.state_dict().items()
            if isinstance(value, ShardedTensor)
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The dense tensors: the rest of the state dict, and of the other optimizers' state."""
        rest = self._model.state_dict().items()
        return {
            **{name: value.detach() for name, value in rest if not isinstance(value, ShardedTensor)},
            **self._optimizers.tensors(),
        }

    def _fused_state(self) -> Mapping[str, Mapping[str, Any]]:
        """State of fused optimizers by key of the weight, then `TABLE.NAME`."""
        fused = getattr(self._model, "fused_optimizer", None)
        state: Mapping[str, Mapping[str, Any]] = {} if fused is None else fused.state_dict()["state"]
        return state

    def _batched(self) -> Iterator[Any]:
        """The modules of FBGEMM that hold the tables."""
        return (module for module in self._model.modules() if hasattr(module, "split_optimizer_states"))

    def _flush(self) -> None:
        """Write back what a cache in a device's memory holds of tables in the host's."""
        for module in self._batched():
            if hasattr(module, "flush"):
                module.flush()

    def _iterations(self) -> int:
        counts = [
            int(module.iter) for module in self._batched() if isinstance(getattr(module, "iter", None), torch.Tensor)
        ]
        return max(counts, default=0)

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(self, saver: RankSaver, *, step: int | None = None, extra: Any = None, **options: Any) -> Checkpoint:
        """Save, and return once rank 0 has committed; on every rank. Raises as `RankSaver.save`."""
        return self.begin(saver, step=step, extra=extra, copy=False, **options).finish()

    def begin(
        self, saver: RankSaver, *, step: int | None = None, extra: Any = None, copy: bool = True, **options: Any
    ) -> RankSave:
        """Begin a save of which `finish` may be called in another thread; see `RankSaver.begin`."""
        tables = self.tables()
        told = Told(
            cuts={table.name: list(table.cut) for table in tables if len(table.cut) > 2},
            iterations=self._iterations(),
            optimizers=self._optimizers.document(),
        )
        return saver.begin(
            [shard for table in tables for shard in table.shards()],
            self._changed(tables),
            tensors=self.tensors(),
            blobs={BLOB: msgspec.json.encode(told)} if saver.exchange.rank == 0 else {},
            step=step,
            extra=extra,
            copy=copy,
            **options,
        )

    def _changed(self, tables: Sequence[ShardedTable]) -> dict[str, Ids | All]:
        if self._tracker is None:
            return {table.name: ALL for table in tables}
        self._tracker.look(tables)
        return {table.name: self._tracker(table.name) for table in tables}

    # Restoring --------------------------------------------------------------------------------------------------------

    def restore(
        self, saver: RankSaver, checkpoint: int | None = None, *, missing_ok: bool = False
    ) -> Checkpoint | None:
        """Read a checkpoint into the model, as it is cut now; the next save goes on from it. On every rank.

        Parameters
        ----------
        checkpoint : number, optional
            By default the latest that rank 0 sees.
        missing_ok : bool
            Return None where there is no checkpoint yet.

        Raises
        ------
        InvalidInputError
            It does not fit; nothing was changed.
        CheckpointNotFoundError, DamagedError
        """
        chosen = saver.chosen(checkpoint, missing_ok=missing_ok)
        if chosen is None:
            return None
        told = _told(chosen)
        tables, tensors = self.tables(), self.tensors()
        differences = self._optimizers.differences(told.optimizers)
        if differences:
            raise InvalidInputError(f"checkpoint {chosen.sequence} does not fit: {'; '.join(differences[:5])}")
        self._optimizers.prepare(told.optimizers)
        tensors |= self._optimizers.tensors()
        views = {table.name: _fitting(table, chosen) for table in tables}
        _check_tensors(tensors, chosen)
        with torch.no_grad():
            for table in tables:
                _read(table, views[table.name], told.cuts.get(table.name, [0, table.width]))
            for name, values in tensors.items():
                values.copy_(tensor_of(chosen.tensor(name)))
            for module in self._batched():
                for name in ("iter", "iter_cpu"):
                    if isinstance(getattr(module, name, None), torch.Tensor):
                        getattr(module, name).fill_(told.iterations)
                if hasattr(module, "reset_cache_states"):
                    module.reset_cache_states()
        if self._tracker is not None:
            self._tracker.forget()
        saver.restored(chosen)
        return chosen


def _table(name: str, weight: ShardedTensor, state: Mapping[str, Any]) -> ShardedTable:
    """A table from its weight and the state of its fused optimizer; `state` has names `TABLE.NAME`."""
    rows, width = weight.metadata().size
    cut = sorted({shard.shard_offsets[1] for shard in weight.metadata().shards_metadata} | {width})
    local = []
    for place, shard in enumerate(weight.local_shards()):
        (row, column), (count, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        local.append(
            LocalShard(
                rows=(row, row + count),
                columns=(column, column + columns),
                weight=shard.tensor.detach(),
                state={
                    key.rpartition(".")[2]: _state_of(name, key, value, place, count)
                    for key, value in state.items()
                    if isinstance(value, ShardedTensor)
                },
            )
        )
    return ShardedTable(name=name, rows=rows, width=width, cut=cut, local=local)


def _state_of(table: str, key: str, value: ShardedTensor, place: int, count: int) -> torch.Tensor:
    """The state of the weight's local shard at a place: they come in the same order."""
    shards = value.local_shards()
    if place >= len(shards) or len(shards[place].tensor) != count:
        raise InvalidInputError(f"table {table!r}: the state {key!r} is cut otherwise than the weight")
    return shards[place].tensor.detach()


def _told(checkpoint: Checkpoint) -> Told:
    if BLOB not in checkpoint.blobs:
        return Told(cuts={}, iterations=0, optimizers={})
    return msgspec.json.decode(checkpoint.blob(BLOB), type=Told)


def _fitting(table: ShardedTable, checkpoint: Checkpoint) -> TableView:
    """The stored table, if it fits."""
    if table.name not in checkpoint.tables:
        raise InvalidInputError(f"table {table.name!r} is not in checkpoint {checkpoint.sequence}")
    view = checkpoint.table(table.name)
    stored = {f.name: (f.dtype, f.columns) for f in view.fields}
    for shard in table.shards():
        columns = shard.width
        by_shard = shard.field != "weight" and columns != table.width  # one value per row and shard: cuts may differ
        dtype, width = stored.get(shard.field, (None, None))
        if dtype != shard.dtype or len(view) != table.rows or (width != columns and not by_shard):
            raise InvalidInputError(
                f"table {table.name!r}, field {shard.field!r}: {shard.dtype} ({table.rows}, {columns}) in the model, "
                f"{dtype} ({len(view)}, {width}) in checkpoint {checkpoint.sequence}"
            )
    return view


def _check_tensors(tensors: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    shapes = checkpoint.tensor_shapes
    for name, values in tensors.items():
        ours = (dtype_name(values.dtype, name), tuple(values.shape))
        if shapes.get(name) != ours:
            raise InvalidInputError(
                f"tensor {name!r}: {ours} in the model, {shapes.get(name)} in checkpoint {checkpoint.sequence}"
            )


def _read(table: ShardedTable, view: TableView, cut: Sequence[int]) -> None:
    """Read the local shards of a table that was stored when it was cut at `cut`."""
    for shard in table.local:
        rows, columns = slice(*shard.rows), slice(*shard.columns)
        wide = ["weight", *(name for name, values in shard.state.items() if values.ndim == 2)]
        found = view.read(rows, columns=columns, fields=wide)
        shard.weight.copy_(tensor_of(found["weight"]))
        for name, values in shard.state.items():
            if values.ndim == 2:
                values.copy_(tensor_of(found[name]))
            else:
                stored = view.read(rows, fields=[name])[name]
                values.copy_(tensor_of(_of_shard(stored, cut, shard.columns)))


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

    What it gave is kept by whoever asks (`RankSaver`, `CheckrunWriter`) until a save has committed: that is when they
    are acknowledged. The tracker itself may forget what was read (`delete_on_read`).

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
    """

    def __init__(self, model: Any, tracker: Any = None, *, consumer: str | None = None) -> None:
        self._model = model
        self._tracker = tracker or model.get_delta_tracker() or _new_tracker(model)
        self._consumer = consumer
        self._waiting: dict[str, Ids] = {}
        self._again: dict[str, Ids] = {}

    def __call__(self, table: str) -> Ids:
        """The rows of a table that were seen since they were last asked for, as far as `look` has seen."""
        return self._waiting.pop(table, np.zeros(0, np.int64))

    def look(self, tables: Sequence[ShardedTable] | None = None) -> None:
        """Read the tracker."""
        given = ShardedModel(self._model).tables() if tables is None else tables
        starts = {table.name: _start(table) for table in given}
        latest = self._latest()
        seen = self._tracker.get_unique_ids(self._consumer)
        # Else what is looked up before the next forward of the model counts as read.
        self._tracker.step()
        for name, start in starts.items():
            found = [self._waiting.get(name), self._again.get(name), _global(seen, name, start)]
            self._waiting[name] = np.unique(np.concatenate([ids for ids in found if ids is not None]))
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


def _start(table: ShardedTable) -> int:
    """The first row of a table on this rank: the tracker counts from there."""
    starts = {shard.rows[0] for shard in table.local}
    if len(starts) > 1:
        raise InvalidInputError(f"table {table.name!r}: several ranges of rows on one rank; its tracker mixes them up")
    return min(starts, default=0)


def _global(seen: Mapping[str, torch.Tensor], table: str, start: int) -> Ids:
    ids = seen.get(table.removesuffix(_WEIGHT))
    if ids is None:
        return np.zeros(0, np.int64)
    return np.unique(np.from_dlpack(ids.detach().cpu()).astype(np.int64)) + start


__all__ = ["ShardedModel", "ShardedTable", "TrackedRows"]
