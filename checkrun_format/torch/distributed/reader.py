"""`CheckrunReader`: torch.distributed.checkpoint loads from a run."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from checkrun_format.checkpoint import Checkpoint, TableView
from checkrun_format.devices import tensor_of
from checkrun_format.errors import InvalidInputError
from checkrun_format.run import Run, open_run
from checkrun_format.torch.distributed.contents import Contents, metadata_of
from checkrun_format.torch.distributed.keys import names_step, step_named


class CheckrunReader(StorageReader):
    """Loads a checkpoint of a run by `torch.distributed.checkpoint`, into any world size and sharding.

    Parameters
    ----------
    run : Run, or address of a run
        A Run that is open with mode "a" (on rank 0) goes on from what was read, as after `Run.restore`, if every field
        of every table was asked for: its next save may be an increment.
    checkpoint : number, optional
        By default the latest one when the reader is made.

    Attributes
    ----------
    checkpoint : Checkpoint
        Its `extra` is the trainer's.

    Raises
    ------
    RunNotFoundError, CheckpointNotFoundError, DamagedError, PrunedError

    Notes
    -----
    DCP's metadata are built from the manifest. Nothing is unpickled here; what was handed over as bytes is given back
    to DCP, whose planner may unpickle it. Checkpoints that were saved without DCP are read too: their tables as
    `TABLE.FIELD`, where a table may be named after its weight or without its `.weight`.

    A row-wise sum of a TorchRec table that is cut by columns is, to DCP, a tensor of as many values as rows times
    shards: DCP refuses it (size mismatch) where columns are cut into another number of shards. A `Checkpointer`
    restores it into any, by the rule of `checkrun_format.torch.torchrec.ShardedModel`.
    """

    def __init__(self, run: Run | str | os.PathLike[str], checkpoint: int | None = None) -> None:
        self._run = run if isinstance(run, Run) else open_run(run)
        self._restores = isinstance(run, Run) and run.mode == "a"
        self._open(self._run.latest() if checkpoint is None else self._run[checkpoint])

    def _open(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._contents = Contents.of(checkpoint)
        self._load_id = uuid.uuid4().hex
        self._is_coordinator = True
        self._views: dict[str, TableView] = {}

    @property
    def checkpoint_id(self) -> str:
        """Address of the run."""
        return self._run.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a step."""
        return names_step(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin anew; `checkpoint_id` is the step of the checkpoint to be read."""
        if (step := step_named(checkpoint_id)) is not None:
            self._open(self._run.at(step=step))

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """DCP's metadata of the checkpoint."""
        return metadata_of(self.checkpoint, self._contents, self._load_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: ARG002, FBT001
        """Learn which rank this is."""
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell which checkpoint this rank has opened."""
        return dataclasses.replace(
            plan, storage_data=(self.checkpoint.sequence, {i.storage_index.fqn for i in plan.items})
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See that all ranks read the same checkpoint, and whether they read all of its tables."""
        numbers = {number for number, _ in (plan.storage_data for plan in plans)}
        if len(numbers) > 1:
            raise InvalidInputError(f"the ranks opened checkpoints {sorted(numbers)}: give all of them the same number")
        asked = set().union(*(keys for _, keys in (plan.storage_data for plan in plans)))
        self._restores = self._restores and self._fields_of_tables() <= asked
        return plans

    def _fields_of_tables(self) -> set[str]:
        return set(self._contents.fields)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan lists, into the tensors of the planner."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self.checkpoint.blob(item.storage_index.fqn)))
            else:
                self._read(item, planner)
        if self._is_coordinator and self._restores:
            self._run.restored_from(self.checkpoint)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(item).detach()
        spans = [slice(low, low + count) for low, count in zip(item.storage_offsets, item.lengths, strict=True)]
        if item.storage_index.fqn in self._contents.fields:
            values = self._field(*self._contents.fields[item.storage_index.fqn], spans)
        else:
            cut: Any = (*spans, ...)  # of no dimensions, too, an array
            values = self._tensor(item)[cut]
        if target.shape != values.shape:
            raise InvalidInputError(
                f"{item.dest_index.fqn!r}: {tuple(target.shape)} is wanted where {tuple(values.shape)} is read"
            )
        target.copy_(tensor_of(values))
        planner.commit_tensor(item, target)

    def _field(self, table: str, field: str, spans: Sequence[slice]) -> npt.NDArray[Any]:
        view = self._views.setdefault(table, self.checkpoint.table(table))
        columns = spans[1] if len(spans) == 2 else None
        found: npt.NDArray[Any] = view.read(spans[0], columns=columns, fields=[field])[field]
        return found

    def _tensor(self, item: ReadItem) -> npt.NDArray[Any]:
        key, offset = item.storage_index.fqn, item.storage_index.offset
        pieces = self._contents.pieces.get(key)
        if pieces is not None:
            key = next(piece for piece in pieces if torch.Size(piece.offsets) == offset).tensor
        found: npt.NDArray[Any] = self.checkpoint.tensor(key)
        return found
