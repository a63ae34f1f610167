"""A save by the ranks of a process group, without torch.distributed.checkpoint."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist

from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import CheckrunError, InvalidInputError
from checkrun_format.rows import Ids
from checkrun_format.run import Run
from checkrun_format.saving import checked_step
from checkrun_format.state import All, extra_json
from checkrun_format.torch.distributed.exchange import Exchange
from checkrun_format.torch.distributed.ranks import Coordinator, Member, Order, Report, join
from checkrun_format.torch.distributed.shards import Choice, Shard, parts, staged

TIMEOUT = dt.timedelta(minutes=10)
"""How long a rank waits for another."""


class RankSave:
    """A save that all ranks have begun: what this one stores is decided, and copied if that was asked for."""

    def __init__(
        self,
        saver: RankSaver,
        *,
        number: int,
        order: Order,
        coordinator: Coordinator | None,
        held: Sequence[Shard],
        choices: dict[str, Choice],
        tensors: Mapping[str, torch.Tensor],
        blobs: Mapping[str, bytes],
    ) -> None:
        self._saver = saver
        self._number = number
        self._order = order
        self._coordinator = coordinator
        self._held = held
        self._choices = choices
        self._tensors = tensors
        self._blobs = blobs

    def finish(self, check: Callable[[], None] = lambda: None) -> Checkpoint:
        """Store what this rank holds, wait for the others, and return what rank 0 committed. On any thread.

        Parameters
        ----------
        check : callable
            Called now and then; what it raises ends the save.

        Raises
        ------
        RankError
            Another rank failed, or did not answer in time; nothing was committed.
        CheckrunError
            Why this rank failed.
        """
        exchange = self._saver.exchange
        try:
            part_list = self._store(check)
        except BaseException as error:
            exchange.send_failure(self._number, "parts", error)
            if exchange.rank == 0:
                exchange.send_failure(self._number, "result", error)
            raise
        exchange.send(self._number, "parts", part_list)
        if self._coordinator is None:
            return self._saver.run[exchange.receive(self._number, "result", int, times=3)]
        try:
            part_lists = exchange.gather(self._number, "parts", dict[str, Any])
            check()
            checkpoint = self._coordinator.commit(part_lists)
        except BaseException as error:
            exchange.send_failure(self._number, "result", error)
            raise
        exchange.send(self._number, "result", checkpoint.sequence)
        return checkpoint

    def _store(self, check: Callable[[], None]) -> dict[str, Any]:
        rank = self._saver.exchange.rank
        writer = self._coordinator.writer(rank) if self._coordinator else join(self._order, rank, self._saver.run.url)
        for part in parts(self._held, self._choices):
            check()
            part.put(writer)
        for name, values in self._tensors.items():
            check()
            writer.put_tensor(name, values.detach().cpu())
        for name, data in self._blobs.items():
            writer.put_blob(name, data)
        return writer.finish()


class RankSaver:
    """Saves by the ranks of a process group: each stores what it holds in its own blocks, rank 0 commits after all.

    Making one is a collective; `save` and `begin` are called by every rank, and exchange messages over the store of
    torch.distributed, never by collectives. `RankSave.finish` may be called on another thread.

    Parameters
    ----------
    run : Run
        Open with mode "a" on rank 0; on others it is only read.
    process_group : ProcessGroup, optional
        By default all ranks.
    timeout : timedelta
        How long a rank waits for another: longer than the slowest takes to store what it holds.

    Examples
    --------
    ::

        saver = RankSaver(run)
        shard = Shard(table="user", field="weight", rows=(0, 500), columns=None, of=1000, ...)
        saver.save([shard], {"user": rows_that_changed_here}, tensors=dense, step=1000)
    """

    def __init__(
        self, run: Run, *, process_group: dist.ProcessGroup | None = None, timeout: dt.timedelta = TIMEOUT
    ) -> None:
        self.run = run
        self._group = process_group
        self.exchange = Exchange(process_group, timeout)
        self._member = Member()
        if self.exchange.rank == 0 and run.mode != "a":
            raise InvalidInputError("the run is open for reading; rank 0 commits and needs mode='a'")

    def save(self, shards: Sequence[Shard], changed: Mapping[str, Ids | All], **options: Any) -> Checkpoint:
        """Save, and return once rank 0 has committed; options as of `begin`. Raises as `begin` and `finish`."""
        return self.begin(shards, changed, **options).finish()

    def begin(
        self,
        shards: Sequence[Shard],
        changed: Mapping[str, Ids | All],
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        own_tensors: Mapping[str, torch.Tensor] | None = None,
        blobs: Mapping[str, bytes] | None = None,
        extra: Any = None,
        step: int | None = None,
        parent: int | str | None = "auto",
        dropped: Sequence[str] = (),
        copy: bool = False,
    ) -> RankSave:
        """Agree with the other ranks on what is saved. On the thread that trains.

        Parameters
        ----------
        shards : sequence of Shard
            What this rank stores; all ranks' together hold each row and column of each table once.
        changed : mapping of table to rows
            Rows (of the whole table, ascending) that this rank saw change since it last named them, ALL if it does not
            know. Those of all ranks are joined. A table that is not here did not change.
        tensors, extra, step, parent, dropped
            What is the same on all ranks: rank 0's are taken.
        own_tensors, blobs : mapping
            What this rank alone has; names are unique over all ranks.
        copy : bool
            Copy all that is stored before returning, so that training may go on.

        Raises
        ------
        RankError
            Another rank failed, or did not answer in time.
        InvalidInputError
            What was given is refused; other ranks then raise RankError.
        """
        self._member.settle(self.run if self._member.waits else None)
        for table, rows in changed.items():
            self._member.tell(table, rows)
        number = self.exchange.announce() if self.exchange.rank == 0 else self.exchange.follow()
        coordinator, order = self._agree(number, shards, extra=extra, step=step, parent=parent, dropped=dropped)
        try:
            choices = self._member.choices(order, shards, self.run if order.token["predecessor"] else None)
            held = [staged(shard, choices[shard.table]) for shard in shards] if copy else list(shards)
            dense = {**(own_tensors or {}), **((tensors or {}) if self.exchange.rank == 0 else {})}
            if copy:
                dense = {name: values.detach().to("cpu", copy=True) for name, values in dense.items()}
        except BaseException as error:
            self.exchange.send_failure(number, "parts", error)
            if self.exchange.rank == 0:
                self.exchange.send_failure(number, "result", error)
            raise
        return RankSave(
            self,
            number=number,
            order=order,
            coordinator=coordinator,
            held=held,
            choices=choices,
            tensors=dense,
            blobs=blobs or {},
        )

    def _agree(self, number: int, shards: Sequence[Shard], **options: Any) -> tuple[Coordinator | None, Order]:
        """Tell rank 0 what this rank holds; rank 0 decides."""
        exchange = self.exchange
        try:
            report = self._report(shards)
            extra_json(options["extra"])
            checked_step(options["step"])
        except BaseException as error:
            exchange.send_failure(number, "report", error)
            if exchange.rank == 0:
                exchange.send_failure(number, "order", error)
                exchange.send_failure(number, "result", error)
            raise
        exchange.send(number, "report", report)
        if exchange.rank != 0:
            return None, exchange.receive(number, "order", Order)
        try:
            coordinator = Coordinator.begin(self.run, exchange.gather(number, "report", Report), **options)
        except BaseException as error:
            exchange.send_failure(number, "order", error)
            exchange.send_failure(number, "result", error)
            raise
        exchange.send(number, "order", coordinator.order)
        return coordinator, coordinator.order

    def _report(self, shards: Sequence[Shard]) -> Report:
        for shard in shards:
            if shard.values is None:
                raise InvalidInputError(f"table {shard.table!r}, field {shard.field!r}: a shard without values")
            high = [shard.rows, *([] if shard.columns is None else [shard.columns])]
            if tuple(shard.values.shape) != tuple(end - low for low, end in high):
                raise InvalidInputError(
                    f"table {shard.table!r}, field {shard.field!r}: values {tuple(shard.values.shape)} for rows "
                    f"{shard.rows} and columns {shard.columns}"
                )
        return self._member.report(shards)

    def chosen(self, checkpoint: int | None = None, *, missing_ok: bool = False) -> Checkpoint | None:
        """The checkpoint of a number, or rank 0's latest one; the same on all ranks. A collective.

        Raises
        ------
        CheckpointNotFoundError, DamagedError, PrunedError
            On every rank.
        """
        told: list[Any] = [checkpoint]
        if self.exchange.rank == 0 and checkpoint is None:
            try:
                latest = self.run.latest(default=None) if missing_ok else self.run.latest()
                told = [None if latest is None else latest.sequence]
            except CheckrunError as error:
                told = [error]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if isinstance(told[0], CheckrunError):
            raise told[0]
        return None if told[0] is None else self.run[told[0]]

    def restored(self, checkpoint: Checkpoint) -> None:
        """Say that all ranks have read a checkpoint into what they train: the next save goes on from it."""
        self._member.forget()
        if self.exchange.rank == 0:
            self.run.restored_from(checkpoint)


def row_slice(shard: Shard, rank: int, ranks: int) -> Shard:
    """What one of several replicas stores of a table that all of them hold: a range of its rows."""
    low, high = (shard.of * place // ranks for place in (rank, rank + 1))
    assert shard.values is not None
    return dataclasses.replace(shard, rows=(low, high), values=shard.values[low:high])
