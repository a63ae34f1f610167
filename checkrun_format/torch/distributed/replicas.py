"""A run as a `Checkpointer` sees it under a process group: all ranks train replicas, each stores some of their rows."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from torch import distributed as dist

from checkrun_format import dlpack, dtypes
from checkrun_format.blocks import FieldPlan
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import CheckrunError, InvalidInputError
from checkrun_format.run import Run
from checkrun_format.saving import Stage, Stored
from checkrun_format.state import ALL, State, TableSource, table_sources
from checkrun_format.torch.distributed.ranks import opened
from checkrun_format.torch.distributed.saver import Agreed, RankSave, RankSaver, row_slice
from checkrun_format.torch.distributed.shards import Shard

_REQUIRED: Final = object()


class ReplicatedRun:
    """What a `Checkpointer` needs of a run, done by all ranks of a group.

    A table that several ranks hold is the same on all of them; each of these stores a range of its rows, whichever rank
    saw them change. A dense tensor is stored by the lowest rank that has it. Rank 0 commits; its `extra` is stored.

    Parameters
    ----------
    run : Run, or address of one
        An address is opened with `options`: by rank 0 with mode "a", by others to read.
    process_group : ProcessGroup, optional
    timeout : timedelta
        How long a rank waits for another.
    """

    def __init__(
        self,
        run: Run | str | os.PathLike[str],
        options: Mapping[str, Any],
        process_group: dist.ProcessGroup | None,
        timeout: dt.timedelta,
    ) -> None:
        self._group = process_group
        self._rank = dist.get_rank(process_group)
        self._opened = not isinstance(run, Run)

        def open_first() -> None:
            nonlocal run
            run = run if isinstance(run, Run) else opened(run, options, commits=True)

        self._by_first(open_first)
        self._run = run if isinstance(run, Run) else opened(run, options, commits=False)
        self._saver = RankSaver(self._run, process_group=process_group, timeout=timeout)

    def _by_first(self, act: Callable[[], Any]) -> Any:
        """What rank 0 finds, on every rank. A collective."""
        told: list[Any] = [None]
        if self._rank == 0:
            try:
                told = [act()]
            except CheckrunError as error:
                told = [error]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if isinstance(told[0], CheckrunError):
            raise told[0]
        return told[0]

    def agreed(self, value: Any) -> Any:
        """Rank 0's value, where those of the ranks may differ. A collective."""
        return self._by_first(lambda: value)

    # Reading ----------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the run is."""
        return self._run.url

    def __getitem__(self, sequence: int) -> Checkpoint:
        """The checkpoint of a number."""
        return self._run[sequence]

    def latest(self, default: Any = _REQUIRED, **options: Any) -> Any:
        """The latest checkpoint that rank 0 sees, as of `Run.latest`. A collective."""

        def found() -> Any:
            latest = self._run.latest(**options) if default is _REQUIRED else self._run.latest(None, **options)
            return None if latest is None else latest.sequence

        number = self._by_first(found)
        return default if number is None else self._run[number]

    def newest_sound(self) -> Checkpoint:
        """The newest checkpoint that is sound, as rank 0 finds. A collective."""
        return self._run[self._by_first(lambda: self._run.newest_sound().sequence)]

    def restore(
        self, checkpoint: Checkpoint, *, tables: Sequence[str] | None = None, out: State | None = None
    ) -> State:
        """Read a checkpoint on this rank; the next save goes on from it, once all ranks have."""
        state = checkpoint.load(tables=tables, out=out)
        self._saver.restored(checkpoint)
        return state

    def close(self) -> None:
        """As of `Run.close`, if it was opened here."""
        if self._opened:
            self._run.close()

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(
        self,
        state: State,
        *,
        step: int | None = None,
        dropped: Sequence[str] = (),
        stage: Stage | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Checkpoint:
        """Save a state that all ranks have, and return once rank 0 has committed; on every rank, on any thread.

        Parameters
        ----------
        state, step, dropped, stage, check
            As of `Run.save`; `changed` are the rows that this rank saw change.

        Raises
        ------
        RankError
            Another rank failed, or did not answer in time; nothing was committed.
        InvalidInputError
            For a keyed table, too.
        """
        sources = table_sources(state.tables)
        agreed = self._saver.agree(
            [shard for source in sources.values() for shard in _whole(source)],
            {name: ALL if source.changed is None else source.changed for name, source in sources.items()},
            tensors=state.tensors,
            check=lambda _: _refuse_keyed(sources),
            extra=state.extra,
            step=step,
            dropped=dropped,
        )
        with self._saver.failing(agreed.number):
            held = self._held(agreed, sources, stage)
        blobs = state.blobs if self._rank == 0 else {}
        save = RankSave(self._saver, agreed, held=held, tensors=agreed.own(state.tensors), blobs=blobs)
        return save.finish(check)

    def _held(self, agreed: Agreed, sources: Mapping[str, TableSource], stage: Stage | None) -> list[Shard]:
        """The rows that this rank stores, with their values."""
        mine: dict[str, tuple[int, int]] = {}
        wanted: dict[str, Stored] = {}
        for name, source in sources.items():
            holders = agreed.order.holders[name]
            low, high = mine[name] = row_slice(source.rows, holders.index(self._rank), len(holders))
            ids = agreed.choices[name].within(low, high)
            count = high - low if ids is None else ids.size
            # Asked for as they are: the writer of this rank quantizes them.
            fields = [FieldPlan(name=f.name, dtype=f.dtype, columns=f.columns) for f in source.fields]
            wanted[name] = Stored(rows=slice(low, high) if ids is None else ids, count=count, fields=fields)
        wanted = {name: what for name, what in wanted.items() if what.count}
        if stage is not None:
            values = stage(wanted)
        else:
            values = {
                name: {field: dlpack.on_host(array) for field, array in sources[name].fetch(what.rows).items()}
                for name, what in wanted.items()
            }
        return [
            _cut(shard, mine[name], values[name][shard.field] if name in values else _no_rows(shard))
            for name, source in sources.items()
            for shard in _whole(source)
        ]


def _refuse_keyed(sources: Mapping[str, TableSource]) -> None:
    for name, source in sources.items():
        if source.keys is not None:
            raise InvalidInputError(f"table {name!r} is keyed; several ranks save dense tables")


def _whole(source: TableSource) -> list[Shard]:
    return [
        Shard(
            table=source.name,
            field=field.name,
            rows=(0, source.rows),
            columns=None if field.columns is None else (0, field.columns),
            of=source.rows,
            width=field.columns,
            dtype=field.dtype,
        )
        for field in source.fields
    ]


def _no_rows(shard: Shard) -> np.ndarray[Any, Any]:
    return np.zeros((0,) if shard.width is None else (0, shard.width), dtypes.logical(shard.dtype))


def _cut(shard: Shard, rows: tuple[int, int], values: Any) -> Shard:
    return Shard(
        table=shard.table,
        field=shard.field,
        rows=rows,
        columns=shard.columns,
        of=shard.of,
        width=shard.width,
        dtype=shard.dtype,
        values=values,
        cut=True,
    )
