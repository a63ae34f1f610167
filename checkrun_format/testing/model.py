"""What a run must hold, as dictionaries of numpy arrays: it knows nothing of layers, parts or blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from checkrun_format.changes import Changes
from checkrun_format.state import Table
from checkrun_format.testing.tables import KEYS, Array, Fields, Ids, Kind, joined, same_bits, taken, values

NARROWED = 2.0**-8
"""The coarsest relative error of a narrowed value (RAW-1)."""


@dataclass(kw_only=True)
class Held:
    """A table as the trainer holds it: rows by number or key, ascending; and what it has yet to tell a save."""

    kind: Kind
    ids: Ids
    fields: Fields
    touched: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    @classmethod
    def fresh(cls, kind: Kind, count: int, seed: int) -> Held:
        """A table of so many rows, all of them new."""
        ids = np.sort(np.random.default_rng(seed).permutation(KEYS)[:count]) if kind.keyed else np.arange(count)
        held = cls(kind=kind, ids=ids, fields=values(kind, len(ids), seed))
        held.touched = set(ids.tolist())
        return held

    def keep(self, places: Any) -> None:
        """Keep these places only; the others are gone."""
        kept = self.ids[places]
        self.gone |= set(self.ids.tolist()) - set(kept.tolist())
        self.touched -= self.gone
        self.ids, self.fields = kept, taken(self.fields, places)

    def put(self, ids: Ids, seed: int) -> None:
        """Give rows new values; those that are not there are added."""
        fresh = values(self.kind, len(ids), seed)
        old = ~np.isin(self.ids, ids)
        everything = np.concatenate([self.ids[old], ids])
        order = np.argsort(everything)
        self.ids = everything[order]
        self.fields = taken(joined([taken(self.fields, old), fresh]), order)
        self.touched |= set(ids.tolist())
        self.gone -= set(ids.tolist())


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A table at one checkpoint."""

    key_dtype: str | None
    ids: Ids
    fields: Fields

    @classmethod
    def of(cls, held: Held) -> Rows:
        """A copy of what the trainer has."""
        return cls(key_dtype=held.kind.key_dtype, ids=held.ids.copy(), fields=copy.deepcopy(held.fields))

    @property
    def spec(self) -> object:
        """What LAY-2 compares."""
        return self.key_dtype, {name: (array.dtype.name, array.shape[1:]) for name, array in self.fields.items()}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that a checkpoint must hold."""

    tables: dict[str, Rows]
    tensors: dict[str, Array]
    extra: Any
    step: int | None


def loaded(table: Table) -> Rows:
    """A table as it was read."""
    fields = dict(table.fields)
    count = len(next(iter(fields.values())))
    if table.keys is None:
        return Rows(key_dtype=None, ids=np.arange(count), fields=fields)
    keys = np.asarray(table.keys)
    return Rows(key_dtype=keys.dtype.name, ids=keys.view(np.int64), fields=fields)


def applied(state: dict[str, Rows], changes: Iterable[Changes]) -> dict[str, Rows]:
    """A state after batches of changes, as a follower would apply them."""
    state = dict(state)
    met: set[tuple[str, int]] = set()
    for change in changes:
        if change.dropped:
            assert (change.rows.size, change.deleted.size) == (0, 0)
            state.pop(change.table, None)
            continue
        ids = change.rows.view(np.int64)
        assert not met & {(change.table, row) for row in ids.tolist()}, "a row is in two batches"
        met |= {(change.table, row) for row in ids.tolist()}
        given = Rows(key_dtype=change.key_dtype, ids=ids, fields=change.fields)
        known = state.get(change.table)
        if known is None or known.spec != given.spec:  # another table: start over
            known = Rows(key_dtype=given.key_dtype, ids=ids[:0], fields=taken(given.fields, slice(0, 0)))
        state[change.table] = merged(known, given, change)
    return state


def merged(known: Rows, given: Rows, change: Changes) -> Rows:
    """A table after one batch of changes."""
    stays = ~np.isin(known.ids, np.concatenate([given.ids, change.deleted.view(np.int64)]))
    if change.table_rows is not None:
        stays &= known.ids < change.table_rows
    ids = np.concatenate([known.ids[stays], given.ids])
    order = np.argsort(ids)
    fields = taken(joined([taken(known.fields, stays), given.fields]), order)
    return Rows(key_dtype=given.key_dtype, ids=ids[order], fields=fields)


def check_narrowed(found: Array, wanted: Array) -> None:
    """RAW-1: within the relative error."""
    error = np.abs(found.astype(np.float64) - wanted)
    assert (error <= NARROWED * np.abs(wanted.astype(np.float64))).all()


def check_quantized(found: Array, wanted: Array, bits: int) -> None:
    """DEC-5, EXA-2: within the bound of `minmax`; rows that are not finite to the last bit.

    Up to 4 bits encoders search for the least error of a row as a whole: that, not each value, is within the bound.
    """
    exact = ~np.isfinite(wanted.astype(np.float64)).all(axis=1)
    assert same_bits(found[exact], wanted[exact])
    old, new = wanted[~exact].astype(np.float64), found[~exact].astype(np.float64)
    if old.size:
        spread = old.max(axis=1, keepdims=True) - old.min(axis=1, keepdims=True)
        rounding = np.abs(old).max(axis=1, keepdims=True) * (2.0**-8 if found.dtype.itemsize == 2 else 2.0**-20)
        bound = 0.505 * spread / (2**bits - 1) + rounding
        error = np.abs(old - new) if bits > 4 else np.sqrt(np.mean((old - new) ** 2, axis=1, keepdims=True))
        assert (error <= bound * 1.01).all(), (bits, old, new)


def check_raw_changes(checkpoint: Any, since: int, max_bytes: int = 64 << 20) -> None:
    """What changed, as it is stored, decodes to what changed: the same rows, bits, tombstones and dropped tables."""
    plain = list(checkpoint.changes_since(since, max_bytes=max_bytes))
    stored = list(checkpoint.changes_since(since, raw=True, max_bytes=max_bytes))
    assert _told(plain) == _told(stored)
    assert _cells((c.table, c.rows, name, 0, values) for c in plain for name, values in c.fields.items()) == _cells(
        (c.table, c.rows, name, field.start, field.decode()) for c in stored for name, field in c.fields.items()
    )


def _told(batches: Sequence[Changes]) -> dict[str, Any]:
    """What is known of each table apart from its rows, and in which order."""
    told: dict[str, Any] = {}
    for batch in batches:
        first = (batch.dropped, batch.table_rows, batch.key_dtype, batch.deleted.tolist())
        told.setdefault(f"{batch.table} {batch.dropped}", first)
    return told


def _cells(found: Iterable[tuple[str, Ids, str, int, Array]]) -> dict[str, tuple[list[Any], bytes]]:
    """Rows, columns and bits of the values of each field, by row and column; none twice."""
    gathered: dict[str, list[tuple[Ids, Ids, Array]]] = {}
    for table, rows, name, start, array in found:
        width = array.shape[1] if array.ndim == 2 else 1
        columns = np.tile(np.arange(start, start + width), len(rows))
        cells = np.repeat(rows, width), columns, np.ascontiguousarray(array).reshape(-1)
        gathered.setdefault(f"{table} {name} {array.dtype}", []).append(cells)
    sorted_cells = {}
    for name, pieces in gathered.items():
        rows, columns, bits = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        order = np.lexsort((columns, rows))
        places = np.stack([rows[order], columns[order]], axis=1)
        assert (places[1:] != places[:-1]).any(axis=1).all()
        if len(rows):
            sorted_cells[name] = places.tolist(), bits[order].tobytes()
    return sorted_cells
