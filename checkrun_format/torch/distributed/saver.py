"""A save by the ranks of a process group, without torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import InvalidInputError
from checkrun_format.extra import extra_json, parse_json
from checkrun_format.rows import Ids
from checkrun_format.run import Run
from checkrun_format.saving import checked_step
from checkrun_format.state import All
from checkrun_format.torch.distributed.exchange import Exchange
from checkrun_format.torch.distributed.ranks import Coordinator, Member, Order, Report, by_first
from checkrun_format.torch.distributed.shards import Choice, Shard, on_host, parts, staged

TIMEOUT = dt.timedelta(minutes=10)
"""How long a rank waits for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """A save that all ranks have begun."""

    number: int
    rank: int
    order: Order
    coordinator: Coordinator | None
    choices: dict[str, Choice]

    def own(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the dense tensors that this rank stores."""
        return {name: values for name, values in tensors.items() if self.order.owners.get(name, 0) == self.rank}


class RankSave:
    """A save of which all that this rank stores is at hand, copied if that was asked for."""

    def __init__(
        self,
        saver: RankSaver,
        agreed: Agreed,
        *,
        held: Sequence[Shard],
        tensors: Mapping[str, Any],
        blobs: Mapping[str, bytes],
    ) -> None:
        self._saver = saver
        self._agreed = agreed
        self._held = held
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
        saver, agreed, exchange = self._saver, self._agreed, self._saver.exchange
        with saver.failing(agreed.number):
            part_list = self._store(check)
        exchange.send(agreed.number, "parts", part_list)
        if agreed.coordinator is None:
            return saver.run[exchange.receive(agreed.number, "result", int, times=3)]
        with saver.failing(agreed.number):
            part_lists = exchange.gather(agreed.number, "parts", dict[str, Any])
            check()
            checkpoint = agreed.coordinator.commit(part_lists)
        exchange.send(agreed.number, "result", checkpoint.sequence)
        return checkpoint

    def _store(self, check: Callable[[], None]) -> dict[str, Any]:
        agreed = self._agreed
        if agreed.coordinator is not None:
            writer = agreed.coordinator.writer(agreed.rank)
        else:
            writer = self._saver.run.join(agreed.order.token).writer(agreed.rank)
        for part in parts(self._held, agreed.choices):
            check()
            part.put(writer)
        for name, values in self._tensors.items():
            check()
            writer.put_tensor(name, on_host(values))
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
        blobs: Mapping[str, bytes] | None = None,
        copy: bool = False,
        **options: Any,
    ) -> RankSave:
        """Agree with the other ranks on what is saved. On the thread that trains.

        Parameters
        ----------
        shards : sequence of Shard
            What this rank stores; all ranks' together hold each row and column of each table once.
        changed : mapping of table to rows
            Rows (of the whole table, ascending) that this rank saw change since it last named them, ALL if it does not
            know. Those of all ranks are joined. A table that is not here did not change.
        tensors : mapping
            Dense tensors; one that several ranks have is stored by the lowest of them.
        blobs : mapping
            Bytes; names are unique over all ranks.
        extra, step, parent, dropped
            As of `Run.save`; rank 0's are taken. Another rank's step has to be the same, if it gives one.
        copy : bool
            Copy all that is stored before returning, so that training may go on.

        Raises
        ------
        RankError
            Another rank failed, or did not answer in time.
        InvalidInputError
            What was given is refused; other ranks then raise RankError.
        """
        agreed = self.agree(shards, changed, tensors=tensors or {}, check=_check_values, **options)
        with self.failing(agreed.number):
            held = [staged(shard, agreed.choices[shard.table]) for shard in shards] if copy else list(shards)
            dense = agreed.own(tensors or {})
            if copy:
                dense = {name: values.detach().to("cpu", copy=True) for name, values in dense.items()}
        return RankSave(self, agreed, held=held, tensors=dense, blobs=blobs or {})

    def agree(
        self,
        shards: Sequence[Shard],
        changed: Mapping[str, Ids | All],
        *,
        tensors: Mapping[str, Any],
        check: Callable[[Sequence[Shard]], None] = lambda _: None,
        extra: Any = None,
        merge: Callable[[Sequence[Any]], Any] | None = None,
        step: int | None = None,
        parent: int | str | None = "auto",
        dropped: Sequence[str] = (),
    ) -> Agreed:
        """Tell rank 0 what this rank holds, and learn what of it is stored; options as of `begin`.

        With `merge`, what it makes of all ranks' `extra` is stored in place of rank 0's.

        Raises as `begin`.
        """
        exchange = self.exchange
        self._member.settle(self.run if self._member.waits else None)
        for table, rows in changed.items():
            self._member.tell(table, rows)
        number = exchange.announce() if exchange.rank == 0 else exchange.follow()
        with self.failing(number, "report", "order"):
            check(shards)
            told = extra_json(extra)
            report = self._member.report(shards, tensors, checked_step(step), None if merge is None else told)
        exchange.send(number, "report", report)
        coordinator = None
        if exchange.rank == 0:
            with self.failing(number, "order"):
                reports = exchange.gather(number, "report", Report)
                if merge is not None:
                    extra = merge([parse_json(report.extra or b"null") for report in reports])
                coordinator = Coordinator.begin(
                    self.run, reports, step=step, parent=parent, dropped=dropped, extra=extra
                )
            order = coordinator.order
            exchange.send(number, "order", order)
        else:
            order = exchange.receive(number, "order", Order)
        with self.failing(number):
            choices = self._member.choices(order, shards, self.run if order.token["predecessor"] else None)
        return Agreed(number=number, rank=exchange.rank, order=order, coordinator=coordinator, choices=choices)

    @contextlib.contextmanager
    def failing(self, number: int, *awaited: str) -> Iterator[None]:
        """Whatever is raised in here ends the save, and all ranks learn why."""
        try:
            yield
        except BaseException as error:
            for what in awaited or ("parts",):
                self.exchange.send_failure(number, what, error)
            if self.exchange.rank == 0:
                self.exchange.send_failure(number, "result", error)
            raise

    def chosen(self, checkpoint: int | None = None, *, missing_ok: bool = False) -> Checkpoint | None:
        """The checkpoint of a number, or rank 0's latest one; the same on all ranks. A collective.

        Raises
        ------
        CheckpointNotFoundError, DamagedError, PrunedError
            On every rank.
        """

        def found() -> int | None:
            if checkpoint is not None:
                return checkpoint
            latest = self.run.latest(default=None) if missing_ok else self.run.latest()
            return None if latest is None else latest.sequence

        number = by_first(self._group, found)
        return None if number is None else self.run[number]

    def restored(self, checkpoint: Checkpoint) -> None:
        """Say that all ranks have read a checkpoint into what they train: the next save goes on from it."""
        self._member.forget()
        if self.exchange.rank == 0:
            self.run.restored_from(checkpoint)


def _check_values(shards: Sequence[Shard]) -> None:
    for shard in shards:
        spans = [shard.rows, *([] if shard.columns is None else [shard.columns])]
        shape = None if shard.values is None else tuple(shard.values.shape)
        if shape != tuple(high - low for low, high in spans):
            raise InvalidInputError(
                f"table {shard.table!r}, field {shard.field!r}: values {shape} for rows {shard.rows} and columns "
                f"{shard.columns}"
            )


def row_slice(rows: int, place: int, among: int) -> tuple[int, int]:
    """The range of rows that one of several replicas stores."""
    return rows * place // among, rows * (place + 1) // among
