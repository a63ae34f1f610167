"""What of a table a save stores: every row, the changed ones, or none; and which of them are recent (FORMAT.md 8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from checkrun_format.manifest import TableEntry
from checkrun_format.rows import Ids, Mask, RowSet, Selection, as_slice, union
from checkrun_format.state import TableSource
from checkrun_format.tracking import Touched

_NOTHING: Ids = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """How one table is stored.

    `positions` are the rows to be stored, by position in the table's source; `ids` their numbers or keys, None for the
    range 0..n-1.
    """

    storage: str
    positions: Selection
    ids: Ids | None
    recent: bool | Mask
    deleted: Ids

    @property
    def count(self) -> int:
        """Rows to be stored."""
        if isinstance(self.positions, slice):
            return int(self.positions.stop - self.positions.start)
        return int(self.positions.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """What a table is laid over.

    `parent` and `origin` are its entries there (None: not there); `since_parent` are the rows that the stored layers
    above the parent hold, `pending` those changed since the origin. The origin is the predecessor.
    """

    parent: TableEntry | None
    origin: TableEntry | None
    since_parent: Touched
    pending: Touched


def plan_table(source: TableSource, below: Below | None) -> TablePlan:
    """Plan one table; `below` is None in a checkpoint without an origin: all is stored, all is recent (HEA-2)."""
    if source.keys is None:
        return _plan_dense(source, below)
    return _plan_keyed(source, source.keys, below)


def _must_be_full(source: TableSource, below: Below) -> bool:
    """LAY-2 and LAY-3, and whether so much changed that a list of rows would be longer than all of them.

    A table that shrank since the origin is full too: that is how a follower learns its number of rows (CHG-2).
    """
    if below.parent is None or below.origin is None or source.kind != below.parent.kind:
        return True
    shrunk = source.rows < max(below.parent.rows or 0, below.origin.rows or 0)
    return shrunk or below.since_parent.everything or below.pending.everything


def _all_recent(source: TableSource, below: Below | None) -> bool:
    return below is None or below.origin is None or source.kind != below.origin.kind or below.pending.everything


def _plan_dense(source: TableSource, below: Below | None) -> TablePlan:
    recent: bool | Mask = True
    if below is not None and not _all_recent(source, below):
        recent = _changed_mask(source.rows, below.origin, below.pending)
    if below is None or _must_be_full(source, below):
        return _full(source, None, recent=recent, deleted=_NOTHING)
    assert below.parent is not None
    stored = _changed_mask(source.rows, below.parent, below.since_parent, below.pending)
    ids = np.flatnonzero(stored)
    if ids.size == source.rows and source.rows:
        return _full(source, None, recent=recent, deleted=_NOTHING)
    return _changed(ids, ids, recent=recent if isinstance(recent, bool) else recent[ids], deleted=_NOTHING)


def _changed_mask(rows: int, before: TableEntry | None, *touched: Touched) -> Mask:
    """The rows of a dense table that were touched, or were not there before."""
    assert before is not None
    mask = np.zeros(rows, np.bool_)
    for some in touched:
        assert isinstance(some.rows, RowSet)
        some.rows.add_to(mask)
    mask[before.rows or 0 :] = True
    return mask


def _plan_keyed(source: TableSource, keys: Ids, below: Below | None) -> TablePlan:
    if below is None:
        return _full(source, keys, recent=True, deleted=_NOTHING)
    recent: bool | Mask = True if _all_recent(source, below) else below.pending.rows.contains(keys)
    gone = _gone(keys, below.pending)
    if _must_be_full(source, below):
        return _full(source, keys, recent=recent, deleted=gone)
    stored = below.since_parent.copy()
    stored.update(below.pending)
    positions = np.flatnonzero(stored.rows.contains(keys))
    some = recent if isinstance(recent, bool) else recent[positions]
    return _changed(positions, keys[positions], recent=some, deleted=_gone(keys, stored))


def _gone(keys: Ids, touched: Touched) -> Ids:
    """Keys that were there at some time and are not among the live ones: the tombstones."""
    candidates = union(touched.deleted.ids(), touched.rows.ids())
    return np.setdiff1d(candidates, keys, assume_unique=True)


def _full(source: TableSource, keys: Ids | None, *, recent: bool | Mask, deleted: Ids) -> TablePlan:
    return TablePlan(storage="full", positions=slice(0, source.rows), ids=keys, recent=recent, deleted=deleted)


def _changed(positions: Ids, ids: Ids, *, recent: bool | Mask, deleted: Ids) -> TablePlan:
    storage = "changed" if ids.size or deleted.size else "unchanged"
    return TablePlan(storage=storage, positions=as_slice(positions), ids=ids, recent=recent, deleted=deleted)
