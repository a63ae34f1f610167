"""What changed between two checkpoints (FORMAT.md 9.4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes
from checkrun_format.chain import History
from checkrun_format.manifest import TableEntry
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.resolver import fill, live_keys, stored_ids, tombstones
from checkrun_format.rows import Ids, WantedIds, is_in_sorted
from checkrun_format.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """A batch of changed rows of one table.

    Attributes
    ----------
    table : str
    rows : int64 array (n,)
        Row numbers, or keys, ascending; each row is in one batch only.
    fields : mapping
        Field name to the newest values, (n, columns) or (n,).
    deleted : int64 array
        Keys that are gone. Apply them before `rows`. In the table's first batch only.
    table_rows : int or None
        Number of rows that a dense table now has; rows beyond are gone.
    dropped : bool
        The table is gone as a whole, or is another one now, whose rows all follow; this batch has no rows.
    key_dtype : str or None
        `uint64`: the bits of `rows` and `deleted` are to be read so.
    """

    table: str
    rows: Ids
    fields: dict[str, npt.NDArray[Any]]
    deleted: Ids
    table_rows: int | None
    dropped: bool = False
    key_dtype: str | None = None


@dataclass(slots=True)
class _Found:
    """Changed ids of one table, collected along the way."""

    rows: list[Ids] = field(default_factory=list)
    deleted: list[Ids] = field(default_factory=list)
    everything: bool = False
    full: bool = False
    """Stored full on the way: its number of rows may have changed, even if no row did."""


def changes(history: History, checkpoint: StoredCheckpoint, since: int, max_bytes: int) -> Iterator[Changes]:
    """Batches of all that changed since checkpoint `since` (CHG-1, CHG-2).

    Raises
    ------
    HistoryPrunedError
        Before the first batch, if it cannot be told (CHG-3).
    """
    walk = _Walk(history)
    for layer in history.predecessors(checkpoint, since):
        walk.visit(layer)
    for name in walk.dropped:
        if checkpoint.has(name):
            walk.found.setdefault(name, _Found()).everything = True
    return _batches(history, checkpoint, walk.found, walk.dropped, max_bytes)


class _Walk:
    """Collects what the checkpoints on the way say has changed."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._seen: set[int] = set()
        self.found: dict[str, _Found] = {}
        self.dropped: set[str] = set()

    def visit(self, layer: StoredCheckpoint) -> None:
        """Add one checkpoint, and what it undoes if it is a rollback."""
        if layer.commit.sequence in self._seen:
            return
        self._seen.add(layer.commit.sequence)
        self.dropped.update(layer.manifest.dropped)
        for entry in layer.manifest.tables:
            if entry.storage != "unchanged":
                self._collect(layer, layer.entry(entry.name))
        if layer.commit.rollback_to is not None:
            for undone in itertools.islice(self._history.predecessors(layer, layer.commit.rollback_to), 1, None):
                self._compare(layer, undone)
                self.visit(undone)

    def _collect(self, layer: StoredCheckpoint, entry: TableEntry) -> None:
        found = self.found.setdefault(entry.name, _Found())
        found.full |= entry.storage == "full"
        found.deleted.extend(tombstones(layer, entry))
        if any(part.recent for part in layer.parts(entry.name)):
            for part, ids in stored_ids(layer, entry):
                if part.recent:
                    found.rows.append(ids[layer.block(part).recent(part)])

    def _compare(self, restored: StoredCheckpoint, undone: StoredCheckpoint) -> None:
        """Tables to which a rollback gives another number of rows, or which it takes away (CHG-2)."""
        others = {entry.name: entry for entry in undone.manifest.tables}
        for entry in restored.manifest.tables:
            other = others.pop(entry.name, None)
            if other is not None and entry.rows != other.rows:
                self.found.setdefault(entry.name, _Found()).everything = True
        self.dropped.update(others)


def _batches(
    history: History, checkpoint: StoredCheckpoint, found: dict[str, _Found], dropped: set[str], max_bytes: int
) -> Iterator[Changes]:
    nothing = np.zeros(0, np.int64)
    for name in sorted(dropped | {name for name in found if not checkpoint.has(name)}):
        yield Changes(table=name, rows=nothing, fields={}, deleted=nothing, table_rows=None, dropped=True)
    for name in sorted(found):
        if checkpoint.has(name):
            yield from _table_batches(history, checkpoint, name, found[name], max_bytes)


def _table_batches(
    history: History, checkpoint: StoredCheckpoint, name: str, found: _Found, max_bytes: int
) -> Iterator[Changes]:
    layers = history.layers(checkpoint, name)
    entry = layers[0][1]
    live = live_keys(layers) if entry.addressing == "keyed" else None
    rows, deleted = _split(found, entry.rows, live)
    width = sum(dtypes.logical(f.dtype).itemsize * (f.columns or 1) for f in entry.fields) + 8
    step = max(1, max_bytes // width)
    for start in range(0, max(rows.size, 1), step):
        some = rows[start : start + step]
        if not some.size and not deleted.size and not found.everything and not found.full:
            return
        yield Changes(
            table=name,
            rows=some,
            fields=read_fields(layers, WantedIds(some)),
            deleted=deleted,
            table_rows=entry.rows,
            key_dtype=entry.key_dtype,
        )
        deleted = deleted[:0]


def _split(found: _Found, rows: int | None, live: Ids | None) -> tuple[Ids, Ids]:
    """Rows to be read, and keys that are gone."""
    touched = np.unique(np.concatenate([np.zeros(0, np.int64), *found.rows, *found.deleted]))
    if live is None:
        assert rows is not None
        return (np.arange(rows) if found.everything else touched[touched < rows]), touched[:0]
    if found.everything:
        return live, touched[:0]
    lives = is_in_sorted(touched, live)
    return touched[lives], touched[~lives]


def read_fields(layers: list[tuple[StoredCheckpoint, TableEntry]], wanted: WantedIds) -> dict[str, npt.NDArray[Any]]:
    """All fields of the wanted rows, in new arrays."""
    out = {
        f.name: np.empty((len(wanted), f.columns) if f.columns else len(wanted), dtypes.logical(f.dtype))
        for f in layers[0][1].fields
    }
    with Workers(layers[0][0].store.parallel) as workers:
        fill(layers, wanted, out, {f.name: (0, f.columns or 1) for f in layers[0][1].fields}, workers)
    return out
