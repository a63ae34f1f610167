"""Which rows a save takes: those noted since the last one, and all where that cannot be relied upon."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from checkrun_format.errors import InvalidInputError, TrackingWarning
from checkrun_format.rows import as_ids, union
from checkrun_format.state import ALL, Table
from checkrun_format.torch.inspection import Sample
from checkrun_format.torch.tracker import Taken, Tracker

if TYPE_CHECKING:
    from checkrun_format.torch.torchrec import ShardedModel


class Changes:
    """The rows that changed since the last save, and those that the save that goes on has taken.

    Parameters
    ----------
    tracker : Tracker
    sharded : ShardedModel, optional
        The tables that are cut over the ranks: the tracker has records of the local shards.
    fields : callable
        Gives the fields of a table, or of a local shard, by name.
    """

    def __init__(
        self, tracker: Tracker, sharded: ShardedModel | None, fields: Callable[[str], Mapping[str, torch.Tensor]]
    ) -> None:
        self._tracker = tracker
        self._sharded = sharded
        self._fields = fields
        self._taken: dict[str, Taken] = {}
        self._sample: Sample | None = None
        self._sampled = False
        self._continues = False
        self._warned: set[str] = set()

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""
        if self._sharded is None:
            return list(self._tracker.tables)
        return [*(name for name in self._tracker.tables if name not in self._sharded.local), *self._sharded.tables]

    def mark(self, table: str, rows: Any) -> None:
        """See `Checkpointer.mark`."""
        if table not in self.tables:
            raise InvalidInputError(f"mark: there is no table {table!r}; there are {', '.join(self.tables) or 'none'}")
        sharded = self._sharded if table not in self._tracker.tables else None
        if rows is ALL:
            if sharded is not None:
                sharded.mark(table, ALL)
            else:
                self._tracker.tables[table].mark_all("mark() said so")
            return
        try:
            given = torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidInputError(f"table {table!r}, mark: no row numbers: {error}") from error
        given = given if given.numel() else given.to(torch.int64)
        if sharded is not None:
            sharded.mark(table, union(as_ids(given.cpu().numpy().ravel(), f"table {table!r}, mark")))
        else:
            self._tracker.tables[table].mark(given)

    def take(self, tables: Mapping[str, Table]) -> None:
        """Take what changed since the last save, and tell the tables."""
        if self._sharded is not None:
            self._sharded.take()
        self._taken = self._tracker.changed()
        self._tracker.clear(self._taken)  # whatever interrupts this: all of it is put back
        if self._sample is not None:
            for name in self._sample.missed(self._taken, self._fields):
                reason = "a sample of its rows changed without being noted; Checkpointer.check() tells more"
                self._taken[name] = dataclasses.replace(self._taken[name], whole=reason)
            self._sample, self._sampled = None, True
        elif not self._sampled:
            self._sample = Sample(self._tracker.tables, self._fields)
        for name, table in tables.items():
            taken = self._taken[name]
            table.changed = ALL if taken.whole is not None else taken.rows.cpu().numpy()
        if self._continues:
            self._warn()

    def _warn(self) -> None:
        """Say, once for each reason, which tables are stored full."""
        tables: dict[str, list[str]] = {}
        for name, taken in self._taken.items():
            if taken.whole is not None and self._tracker.tables[name].tracking != "all":
                tables.setdefault(taken.whole, []).append(name)
        for reason, names in tables.items():
            if reason not in self._warned:
                self._warned.add(reason)
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                warnings.warn(
                    f"stored full, table {', '.join(map(repr, names[:3]))}{more}: {reason}",
                    TrackingWarning,
                    stacklevel=5,
                )

    def warn_of_strangers(self, known: Iterable[torch.optim.Optimizer]) -> None:
        """Say, once for each, which optimizers have state that is not saved."""
        for kind, name in self._tracker.strangers(known):
            reason = f"{kind} trains table {name!r} and was not given to the Checkpointer: its state is not saved"
            if reason not in self._warned:
                self._warned.add(reason)
                warnings.warn(reason, TrackingWarning, stacklevel=5)

    def put_back(self) -> None:
        """What was taken was not saved."""
        self._tracker.put_back(self._taken)
        self._taken = {}
        if self._sharded is not None:
            self._sharded.put_back()

    def saved(self) -> None:
        """What was taken is committed: go on from there."""
        self._continues, self._taken = True, {}

    def restored(self, partial: Iterable[str]) -> None:
        """All was just read from a checkpoint, apart from some tables, which were not read as a whole."""
        for table in self._tracker.tables.values():
            table.forget()
        if self._sharded is not None:
            self._sharded.forget()
        for name in partial:
            self.mark(name, ALL)
        self._sample, self._sampled = Sample(self._tracker.tables, self._fields), False
        self._continues = True
