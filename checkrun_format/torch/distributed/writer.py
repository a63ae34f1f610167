"""`CheckrunWriter`: torch.distributed.checkpoint saves into a run."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor
from torch.futures import Future

from checkrun_format import dlpack
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import InvalidInputError
from checkrun_format.rows import Ids, sorted_ids
from checkrun_format.run import Run
from checkrun_format.state import ALL, All, ArrayLike
from checkrun_format.torch.distributed.contents import BLOB, Contents, Piece, piece_name
from checkrun_format.torch.distributed.keys import Keys, Tables, names_step, step_named
from checkrun_format.torch.distributed.ranks import Coordinator, Member, Order, Report, failed, opened
from checkrun_format.torch.distributed.shards import Choice, Shard, dtype_name, parts, staged

Changed: TypeAlias = Callable[[str], "ArrayLike | All | None"]

_STAGED: Final = "checkrun.staged"
"""A key that tells a plan of staged values from one of live values; it is never stored."""


@dataclass(slots=True)
class Staged:
    """What `stage` has copied."""

    mark: str
    order: Order
    choices: dict[str, Choice]
    shards: dict[MetadataIndex, Shard]

    def held(self, pairs: Iterable[tuple[Shard, WriteItem]]) -> list[Shard]:
        """The copies of what a plan lists."""
        missing = [item.index.fqn for _, item in pairs if item.index not in self.shards]
        if missing:
            raise InvalidInputError(
                f"{missing[0]!r} was not staged as part of a table: give tables= as a mapping of fields"
            )
        return [self.shards[item.index] for _, item in pairs]


class CheckrunWriter(AsyncStager, StorageWriter):
    """Saves a state dict of `torch.distributed.checkpoint` as the next checkpoint of a run.

    Every rank makes one; the coordinator of DCP (rank 0) begins and commits, each rank stores what it holds.

    Parameters
    ----------
    run : Run, or address of a run
        A Run must be open with mode "a" on rank 0. An address is opened with `options`, by other ranks to read.
    tables : list of keys, or mapping
        The weights that become tables, quantized as the run's `bits` say and saved in increments; their optimizer
        state joins them: see `Keys`. Everything else is a dense tensor or a blob.
    changed : callable, optional
        Takes the name of a table; gives the rows (of the whole table: ids, or a mask of all its rows) that changed on
        this rank and that it has not given before; `ALL` or None if it does not know. Called on every rank, once per
        table and save; what it gave is remembered until a save commits. Without it tables are stored full.
    step, extra
        Of the next save; attributes, to be set before each. `dcp.save(..., checkpoint_id=12000)` goes before `step`.
    parent, dropped
        As of `Run.begin` and `Save.commit`.
    process_group
        The one that is given to `dcp.async_save`: `stage` exchanges row numbers over it, on the calling thread.

    Notes
    -----
    * One save at a time: wait for the future of `dcp.async_save` before the next.
    * `dcp.async_save` stages on the calling thread: changed rows of tables and all dense tensors are copied, and the
      trainer may go on when it returns.
    * What DCP hands over as bytes (`lr`, `betas`) is a blob, given back to DCP as it is.
    * A dense tensor that is sharded is stored as one tensor per shard, `key[0:4,0:8]`.
    * A failure on any rank is DCP's `CheckpointException` on all of them; nothing is committed and no row is lost.

    Examples
    --------
    >>> writer = CheckrunWriter("runs/dlrm", tables=["model.user.weight"], changed=tracker, bits=4)  # doctest: +SKIP
    >>> dcp.save(state_dict, storage_writer=writer, checkpoint_id=12000)  # doctest: +SKIP
    """

    def __init__(
        self,
        run: Run | str | os.PathLike[str],
        *,
        tables: Tables = (),
        changed: Changed | None = None,
        step: int | None = None,
        extra: Any = None,
        parent: int | str | None = "auto",
        dropped: Sequence[str] = (),
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self._run = run if isinstance(run, Run) else None
        self._url = run.url if isinstance(run, Run) else os.fspath(run)
        if self._run is not None and options:
            raise InvalidInputError(f"{min(options)}= is an option of open_run: give it where the run is opened")
        self._options = options
        self._keys = Keys(tables)
        self._changed = changed
        self.step = step
        self.extra = extra
        self.parent = parent
        self.dropped = dropped
        self._group = process_group
        self._step_given: int | None = None
        self._member = Member()
        self._is_coordinator = True
        self._rank = 0
        self._coordinator: Coordinator | None = None
        self._staged: Staged | None = None
        self._using: Staged | None = None
        self.checkpoint: Checkpoint | None = None

    def __reduce__(self) -> Any:
        raise InvalidInputError("a CheckrunWriter stays in its process: use AsyncCheckpointerType.THREAD")

    # Where and what ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str:
        """Address of the run."""
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a step."""
        return names_step(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin anew; `checkpoint_id` is the step."""
        if (step := step_named(checkpoint_id)) is not None:
            self._step_given = step

    def storage_meta(self) -> StorageMeta | None:
        """The run."""
        return StorageMeta(checkpoint_id=self._url)

    @property
    def run(self) -> Run:
        """The run; on a rank that does not coordinate it may be open for reading only."""
        if self._run is None:
            self._run = opened(self._url, self._options, commits=self._is_coordinator)
        return self._run

    # Before the plan --------------------------------------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Learn which rank this is."""
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank") or 0
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            raise InvalidInputError("use_collectives=False: a checkpoint of several ranks has one commit, by rank 0")

    def _report(self, items: Sequence[WriteItem]) -> Report:
        """Ask which rows changed, and what this rank tells."""
        shards = [shard for shard, _ in self._shards(items, self._fields(items))]
        self._member.settle(self.run if self._member.waits else None)
        rows_of = {shard.table: shard.of for shard in shards}
        for table in self._keys.names:
            given = ALL if self._changed is None else self._changed(table)
            try:
                self._member.tell(table, _told(table, given, rows_of.get(table)))
            except InvalidInputError:
                self._member.tell(table, ALL)  # what it gave is lost to it
                raise
        return self._member.report(shards)

    def _fields(self, items: Iterable[WriteItem]) -> dict[str, tuple[str, str]]:
        """Key to (table, field)."""
        return self._keys.assign({item.index.fqn: item.tensor_data.size for item in items if item.tensor_data})

    def _shards(
        self, items: Iterable[WriteItem], fields: Mapping[str, tuple[str, str]]
    ) -> list[tuple[Shard, WriteItem]]:
        """What of tables is among the items of a plan."""
        return [(_shard(item, *fields[item.index.fqn]), item) for item in items if item.index.fqn in fields]

    def _begin(self, reports: Sequence[Report], keys: Iterable[str]) -> Order:
        """Decide, as the coordinator."""
        self._keys.check_complete(keys)
        self._coordinator = Coordinator.begin(
            self.run, reports, step=self.step, parent=self.parent, dropped=self.dropped, extra=self.extra
        )
        return self._coordinator.order

    # StorageWriter ----------------------------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell the coordinator what this rank holds and which rows changed."""
        if not plan.usable:
            raise InvalidInputError("plans are not cached here: enable_plan_caching=False, the default of the planner")
        marks = [item.index.fqn for item in plan.items if item.index.fqn.startswith(_STAGED)]
        if not marks:
            self._using = None
            return dataclasses.replace(plan, storage_data=self._report(plan.items))
        self._using = self._staged
        if self._using is None or self._using.mark != marks[0]:
            raise InvalidInputError("this state dict was staged by another writer, or staged before another was")
        return dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn != marks[0]])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save, and tell every rank."""
        contents = self._contents(plans)
        order = self._using.order if self._using is not None else None
        if order is None:
            keys = {item.index.fqn for plan in plans for item in plan.items}
            order = self._begin([plan.storage_data for plan in plans], keys)
        return [
            dataclasses.replace(plan, storage_data=(order, contents.fields, contents if rank == 0 else None))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store what this rank holds."""
        order, fields, contents = plan.storage_data
        mine = self._coordinator
        writer = self.run.join(order.token).writer(self._rank) if mine is None else mine.writer(0)
        pairs = self._shards(plan.items, fields)
        if self._using is None:
            held = [dataclasses.replace(shard, values=_local(planner.resolve_data(item))) for shard, item in pairs]
            choices = self._member.choices(order, held, self.run if order.token["predecessor"] else None)
        else:
            held, choices = self._using.held(pairs), self._using.choices
        for part in parts(held, choices):
            part.put(writer)
        for item in plan.items:
            if item.index.fqn not in fields:
                _put(writer, planner, item)
        if contents is not None:
            writer.put_blob(BLOB, contents.to_json())
        results = [WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items]
        index = MetadataIndex("checkrun.part_list")
        results.append(WriteResult(index=index, size_in_bytes=0, storage_data=writer.finish()))
        self._staged = self._using = None
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        """Commit: every rank has stored its part."""
        assert self._coordinator is not None
        part_lists = [result.storage_data for told in results for result in told if result.storage_data is not None]
        coordinator, self._coordinator = self._coordinator, None
        step, self._step_given = self._step_given, None
        self.checkpoint = coordinator.commit(part_lists, step=step)

    def _contents(self, plans: Sequence[SavePlan]) -> Contents:
        """What the manifest will not tell."""
        items = [item for plan in plans for item in plan.items]
        tensors = [item for item in items if item.tensor_data]
        sizes = {item.index.fqn: _data(item).size for item in tensors}
        fields = self._fields(tensors)
        pieces: dict[str, list[Piece]] = {}
        for item in tensors:
            key, chunk = item.index.fqn, _data(item).chunk
            if key not in fields and list(chunk.sizes) != list(sizes[key]):
                name = piece_name(key, chunk.offsets, chunk.sizes, sizes[key])
                piece = Piece(tensor=name, offsets=list(chunk.offsets), sizes=list(chunk.sizes))
                pieces.setdefault(key, []).append(piece)
        paths = {key: list(path) for plan in plans for key, path in (plan.planner_data or {}).items()}
        return Contents(
            fields=fields,
            pieces=pieces,
            sizes={key: list(sizes[key]) for key in pieces},
            opaque=[item.index.fqn for item in items if item.type == WriteItemType.BYTE_IO],
            paths={key: path for key, path in paths.items() if not key.startswith(_STAGED)},
        )

    # AsyncStager ------------------------------------------------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        """No: staging is over when `stage` returns."""
        return False

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Copy what the save will store: of tables the changed rows only; exchange what the ranks must agree on.

        Runs on the calling thread of every rank, and is a collective.
        """
        flat, paths = flatten_state_dict(state_dict)
        items = [item for key, value in flat.items() if _is_held(value) for item in _create_write_items(key, value)]
        order = self._agreed(items)
        pairs = self._shards(items, self._fields(items))
        held = {
            item.index: dataclasses.replace(shard, values=_local(find_state_dict_object(flat, item.index)))
            for shard, item in pairs
        }
        choices = self._member.choices(order, held.values(), self.run if order.token["predecessor"] else None)
        copied = {index: staged(shard, choices[shard.table]) for index, shard in held.items()}
        self._staged = Staged(mark=f"{_STAGED}.{uuid.uuid4().hex}", order=order, choices=choices, shards=copied)
        # Of tables only shapes are looked at from here on: their values are those that were copied.
        live = {index.fqn for index in copied}
        stager = DefaultStager(StagingOptions(False, False, False, False))  # noqa: FBT003
        copies = stager.stage({key: value for key, value in flat.items() if key not in live})
        stager.close()
        assert isinstance(copies, dict)
        both = {key: flat[key] if key in live else copies[key] for key in flat}
        return {**unflatten_state_dict(both, paths), self._staged.mark: True}

    def _agreed(self, items: Sequence[WriteItem]) -> Order:
        """What `prepare_local_plan` and `prepare_global_plan` do, before there is a plan."""
        alone = not dist.is_initialized()
        rank, ranks = (0, 1) if alone else (dist.get_rank(self._group), dist.get_world_size(self._group))
        self._rank, self._is_coordinator = rank, rank == 0
        told = _attempt(lambda: (self._report(items), [item.index.fqn for item in items]))
        all_told = [told]
        if not alone:
            all_told = [None] * ranks
            dist.all_gather_object(all_told, told, group=self._group)
        _raise_any(all_told)
        decided: list[Any] = [None]
        if rank == 0:
            keys = {key for _, keys in all_told for key in keys}
            decided = [_attempt(lambda: self._begin([report for report, _ in all_told], keys))]
        if not alone:
            dist.broadcast_object_list(decided, group=self._group, group_src=0)
        _raise_any(decided)
        order: Order = decided[0]
        return order

    def synchronize_staging(self) -> None:
        """Nothing: staging is over when `stage` returns."""

    def close(self) -> None:
        """Nothing is held open."""


def _attempt(act: Callable[[], Any]) -> Any:
    """A result, or the error that hindered it: the other ranks wait for either."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001
        return error


def _raise_any(told: Sequence[Any]) -> None:
    for rank, value in enumerate(told):
        if isinstance(value, Exception):
            raise failed(rank, value) from value


def _told(table: str, given: ArrayLike | All | None, rows: int | None) -> Ids | All:
    if given is None or isinstance(given, All):
        return ALL
    values = dlpack.to_numpy(given.cpu() if isinstance(given, torch.Tensor) else given, f"table {table!r}, changed")
    if values.dtype == bool:
        if rows is not None and values.shape != (rows,):
            raise InvalidInputError(f"table {table!r}, changed: a mask of shape {values.shape} for {rows} rows")
        values = values.nonzero()[0]
    ids = sorted_ids(np.unique(values), f"table {table!r}, changed")
    if ids.size and (ids[0] < 0 or (rows is not None and ids[-1] >= rows)):
        raise InvalidInputError(f"table {table!r}, changed: row {ids[0] if ids[0] < 0 else ids[-1]} of {rows} rows")
    return ids


def _is_held(value: Any) -> bool:
    """Whether this rank takes part in a value, as the planner of DCP sees it."""
    return not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None


def _data(item: WriteItem) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data


def _shard(item: WriteItem, table: str, field: str) -> Shard:
    data = _data(item)
    spans = [(low, low + size) for low, size in zip(data.chunk.offsets, data.chunk.sizes, strict=True)]
    wide = len(data.size) == 2
    return Shard(
        table=table,
        field=field,
        rows=spans[0],
        columns=spans[1] if wide else None,
        of=data.size[0],
        width=data.size[1] if wide else None,
        dtype=dtype_name(data.properties.dtype, f"table {table!r}, field {field!r}"),
    )


def _local(value: Any) -> torch.Tensor:
    tensor = value.to_local() if isinstance(value, DTensor) else value
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _put(writer: Any, planner: SavePlanner, item: WriteItem) -> None:
    """Store a dense tensor, a piece of one, or bytes."""
    value = planner.resolve_data(item)
    key = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(value, io.BytesIO)
        writer.put_blob(key, value.getvalue())
        return
    data = _data(item)
    name = piece_name(key, data.chunk.offsets, data.chunk.sizes, data.size)
    writer.put_tensor(name, _local(value).detach().cpu())
