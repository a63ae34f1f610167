"""A run as a `Checkpointer` sees it under a process group: each rank stores some rows, of replicas or of its shards."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import distributed as dist

from checkrun_format import dlpack, dtypes
from checkrun_format.arranging import Stage, Stored
from checkrun_format.blocks import FieldPlan
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import InvalidInputError, RankError
from checkrun_format.rows import Ids
from checkrun_format.run import Run
from checkrun_format.sources import table_sources
from checkrun_format.state import ALL, All, FieldSpec, State, TableSource
from checkrun_format.torch.distributed.ranks import Changed, by_first, opened
from checkrun_format.torch.distributed.saver import Agreed, RankSave, RankSaver, row_slice
from checkrun_format.torch.distributed.shards import Shard

if TYPE_CHECKING:
    from checkrun_format.torch.torchrec import LocalShard, ShardedModel

_REQUIRED: Final = object()


class RankedRun:
    """What a `Checkpointer` needs of a run, done by all ranks of a group.

    A table that several ranks hold is the same on all of them; each of these stores a range of its rows, whichever rank
    saw them change. A table that is cut over the ranks is stored by shards. A dense tensor is stored by the lowest rank
    that has it. Rank 0 commits.

    Parameters
    ----------
    run : Run, or address of one
        An address is opened with `options`: by rank 0 with mode "a", by others to read.
    process_group : ProcessGroup, optional
    timeout : timedelta
        How long a rank waits for another.
    sharded : ShardedModel, optional
        What is cut over the ranks: what is saved as a table of the name of a local shard is a part of another.
    merge : callable
        Makes one `extra` of those of all ranks, in their order.
    """

    def __init__(
        self,
        run: Run | str | os.PathLike[str],
        options: Mapping[str, Any],
        process_group: dist.ProcessGroup | None,
        timeout: dt.timedelta,
        *,
        sharded: ShardedModel | None,
        merge: Callable[[Sequence[Any]], Any],
    ) -> None:
        self._group = process_group
        self._sharded = sharded
        self._local: Mapping[str, LocalShard] = {} if sharded is None else sharded.local
        self._merge = merge
        self.rank = dist.get_rank(process_group)
        self.ranks = dist.get_world_size(process_group)
        self._opened = not isinstance(run, Run)

        def open_first() -> None:
            nonlocal run
            run = run if isinstance(run, Run) else opened(run, options, commits=True)

        by_first(self._group, open_first)
        self._run = run if isinstance(run, Run) else opened(run, options, commits=False)
        self._saver = RankSaver(self._run, process_group=process_group, timeout=timeout)

    def agreed(self, value: Any) -> Any:
        """Rank 0's value, where those of the ranks may differ. A collective."""
        return by_first(self._group, lambda: value)

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

        number = by_first(self._group, found)
        return default if number is None else self._run[number]

    def newest_sound(self) -> Checkpoint:
        """The newest checkpoint that is sound, as rank 0 finds. A collective."""
        return self._run[by_first(self._group, lambda: self._run.newest_sound().sequence)]

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Whatever is raised in here on one rank is raised on all. A collective.

        Raises
        ------
        RankError
            Another rank failed.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
            failure = error
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, failure and f"{type(failure).__name__}: {failure}", group=self._group)
        if failure is not None:
            raise failure
        for rank, why in enumerate(told):
            if why is not None:
                raise RankError(f"rank {rank} failed to {what}: {why}")

    def restored_from(self, checkpoint: Checkpoint) -> None:
        """Say that all ranks have read a checkpoint into what they train: the next save goes on from it."""
        self._saver.restored(checkpoint)

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
            As of `Run.save`; `changed` are the rows that this rank saw change. Of a shard, both are counted from its
            first row.

        Raises
        ------
        RankError
            Another rank failed, or did not answer in time; nothing was committed.
        InvalidInputError
            For a keyed table, too.
        """
        sources = table_sources(state.tables)
        agreed = self._saver.agree(
            [shard for source in sources.values() for shard in self._shards(source)],
            self._changed(sources),
            tensors=state.tensors,
            check=lambda _: _refuse_keyed(sources),
            extra=state.extra,
            merge=self._merge,
            step=step,
            dropped=dropped,
        )
        with self._saver.failing(agreed.number):
            held = self._held(agreed, sources, stage)
        blobs = state.blobs if self.rank == 0 else {}
        save = RankSave(self._saver, agreed, held=held, tensors=agreed.own(state.tensors), blobs=blobs)
        return save.finish(check)

    def _shards(self, source: TableSource) -> list[Shard]:
        """What this rank holds, without values."""
        local = self._local.get(source.name)
        return _whole(source) if local is None else [local.shard(field) for field in local.fields]

    def _changed(self, sources: Mapping[str, TableSource]) -> dict[str, Ids | All]:
        """The rows of whole tables that this rank saw change."""
        found: dict[str, Changed] = {}
        for name, source in sources.items():
            rows = ALL if source.changed is None else source.changed
            local = self._local.get(name)
            table, first = (name, 0) if local is None else (local.table.name, local.rows[0])
            found.setdefault(table, Changed()).add(rows if isinstance(rows, All) else rows + first)
        for table, rows in ({} if self._sharded is None else self._sharded.taken).items():
            found.setdefault(table, Changed()).add(rows)
        return {table: ALL if changed.everything else changed.rows for table, changed in found.items()}

    def _held(self, agreed: Agreed, sources: Mapping[str, TableSource], stage: Stage | None) -> list[Shard]:
        """The rows that this rank stores, with their values."""
        mine: dict[str, tuple[int, int]] = {}
        wanted: dict[str, Stored] = {}
        for name, source in sources.items():
            local = self._local.get(name)
            table, first = (name, 0) if local is None else (local.table.name, local.rows[0])
            holders = agreed.order.holders[table]
            whole = row_slice(source.rows, holders.index(self.rank), len(holders))
            low, high = mine[name] = whole if local is None else local.rows
            ids = agreed.choices[table].within(low, high)
            rows = slice(low - first, high - first) if ids is None else ids - first
            # Asked for as they are: the writer of this rank quantizes them.
            fields = [FieldPlan(name=f.name, dtype=f.dtype, columns=f.columns) for f in source.fields]
            wanted[name] = Stored(rows=rows, count=high - low if ids is None else ids.size, fields=fields)
        wanted = {name: what for name, what in wanted.items() if what.count}
        if stage is not None:
            values = stage(wanted)
        else:
            values = {
                name: {field: dlpack.on_host(array) for field, array in sources[name].fetch(what.rows).items()}
                for name, what in wanted.items()
            }
        return [
            shard
            for name, source in sources.items()
            for shard in self._with_values(source, mine[name], values.get(name, {}))
        ]

    def _with_values(self, source: TableSource, rows: tuple[int, int], values: Mapping[str, Any]) -> Iterator[Shard]:
        local = self._local.get(source.name)
        if local is not None:
            for field in source.fields:
                yield local.shard(field.name, values.get(field.name, _no_rows(field)), cut=True)
            return
        for field, shard in zip(source.fields, _whole(source), strict=True):
            yield replace(shard, rows=rows, values=values.get(field.name, _no_rows(field)), cut=True)


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


def _no_rows(field: FieldSpec) -> np.ndarray[Any, Any]:
    return np.zeros((0,) if field.columns is None else (0, field.columns), dtypes.logical(field.dtype))
