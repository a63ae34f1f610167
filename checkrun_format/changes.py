"""What changed between two checkpoints (FORMAT.md 9.4)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes, quantize
from checkrun_format.blocks import EncodedField
from checkrun_format.chain import History
from checkrun_format.errors import HistoryPrunedError, PrunedError
from checkrun_format.manifest import TableEntry
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.resolver import (
    Layers,
    as_stored,
    check_rows,
    live_keys,
    living,
    pieces,
    read_rows,
    stored_ids,
    tombstones,
)
from checkrun_format.rows import Ids, WantedIds, union


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredField:
    """Rows of one field as they are stored: codes and qparams, or values; and the rows that are exact.

    Attributes
    ----------
    dtype : str
        Logical dtype of the field.
    start : int
        The first column that these rows have here; a table may be stored by columns (FORMAT.md LAY-1).
    columns : int or None
        How many columns; None for one value per row.
    bits : int or None
        Width of a code; None if the field is raw.
    codes : uint8 array (n, packed width), or None
        Packed (PCK-1).
    qparams : float16 or float32 array (n, 2), or None
        Scale and bias; NaN in rows that are exact.
    values : array (n, columns) or (n,), or None
        Of a raw field, in the dtype that it is stored in.
    exact_index : int64 array (m,)
        Which of the rows are exact, ascending.
    exact_values : array (m, columns) or (m,)
        Their values, in the field's dtype.
    """

    dtype: str
    start: int
    columns: int | None
    bits: int | None
    codes: npt.NDArray[np.uint8] | None
    qparams: npt.NDArray[Any] | None
    values: npt.NDArray[Any] | None
    exact_index: Ids
    exact_values: npt.NDArray[Any]

    def decode(self) -> npt.NDArray[Any]:
        """The values, (n, columns) or (n,), in the field's dtype."""
        if self.values is not None:
            out = self.values.astype(dtypes.logical(self.dtype))
        else:
            assert self.codes is not None
            assert self.qparams is not None
            assert self.bits is not None
            assert self.columns is not None
            out = np.empty((len(self.codes), self.columns), dtypes.logical(self.dtype))
            quantize.decode_affine(self.codes, self.qparams, self.bits, self.columns, out)
        out[self.exact_index] = self.exact_values
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """A batch of changed rows of one table.

    Attributes
    ----------
    table : str
    rows : int64 array (n,)
        Row numbers, or keys, ascending; each row is in one batch only; if raw, in one for each part that holds it.
    fields : mapping
        Field name to the newest values, (n, columns) or (n,); if raw, to a `StoredField`.
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
    fields: dict[str, Any]
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


def changes(
    history: History, checkpoint: StoredCheckpoint, since: int, max_bytes: int, *, raw: bool = False
) -> Iterator[Changes]:
    """Batches of all that changed since checkpoint `since` (CHG-1, CHG-2).

    Raises
    ------
    HistoryPrunedError
        It cannot be told (CHG-3): before the first batch, or when the checkpoint itself is pruned in between.
    """
    walk = _Walk(history)
    with _told(checkpoint, since):
        for layer in history.predecessors(checkpoint, since):
            walk.visit(layer)
    for name in walk.dropped:
        if checkpoint.has(name):
            walk.found.setdefault(name, _Found()).everything = True
    return _all_told(history, checkpoint, since, walk, max_bytes, raw=raw)


@contextlib.contextmanager
def _told(checkpoint: StoredCheckpoint, since: int) -> Iterator[None]:
    """What is found to be pruned only by its data is history that is pruned, too: its documents may be kept."""
    try:
        yield
    except PrunedError as error:
        raise HistoryPrunedError(
            f"what changed between {since} and {checkpoint.commit.sequence} is unknown: {error}; "
            "load the latest checkpoint as a whole"
        ) from error


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


def _all_told(
    history: History, checkpoint: StoredCheckpoint, since: int, walk: _Walk, max_bytes: int, *, raw: bool
) -> Iterator[Changes]:
    with _told(checkpoint, since):
        yield from _batches(history, checkpoint, walk.found, walk.dropped, max_bytes, raw=raw)


def _batches(
    history: History,
    checkpoint: StoredCheckpoint,
    found: dict[str, _Found],
    dropped: set[str],
    max_bytes: int,
    *,
    raw: bool,
) -> Iterator[Changes]:
    nothing = np.zeros(0, np.int64)
    for name in sorted(dropped | {name for name in found if not checkpoint.has(name)}):
        yield Changes(table=name, rows=nothing, fields={}, deleted=nothing, table_rows=None, dropped=True)
    for name in sorted(found):
        if checkpoint.has(name):
            layers = history.descent(checkpoint, name)
            yield from _table_batches(layers, found[name], max_bytes, raw=raw)


def _table_batches(layers: Layers, found: _Found, max_bytes: int, *, raw: bool) -> Iterator[Changes]:
    entry = layers[0][1]
    rows, deleted = _split(found, layers)
    if not rows.size and (deleted.size or found.everything or found.full):
        yield _batch(entry, rows, {} if raw else read_rows(layers, WantedIds(rows), layers[0][1].fields), deleted)
    width = sum(dtypes.logical(f.dtype).itemsize * (f.columns or 1) for f in entry.fields) + 8
    step = max(1, max_bytes // width)
    for start in range(0, rows.size, step):
        for some, fields in (_stored if raw else _decoded)(layers, rows[start : start + step]):
            yield _batch(entry, some, fields, deleted)
            deleted = deleted[:0]


def _batch(entry: TableEntry, rows: Ids, fields: dict[str, Any], deleted: Ids) -> Changes:
    return Changes(
        table=entry.name, rows=rows, fields=fields, deleted=deleted, table_rows=entry.rows, key_dtype=entry.key_dtype
    )


def _decoded(layers: Layers, rows: Ids) -> Iterator[tuple[Ids, dict[str, Any]]]:
    yield rows, read_rows(layers, WantedIds(rows), layers[0][1].fields)


def _stored(layers: Layers, rows: Ids) -> Iterator[tuple[Ids, dict[str, Any]]]:
    """The rows piece by piece: each has been stored by one layer, in one part and one chunk."""
    entries = {f.name: f for f in layers[0][1].fields}
    for piece in pieces(layers, WantedIds(rows)):
        fields = {}
        for f, start in zip(piece.block.entry.fields, piece.part.columns, strict=True):
            fields[f.name] = _stored_field(as_stored(piece, f, entries[f.name]), start)
        yield rows[piece.places], fields


def _stored_field(encoded: EncodedField, start: int) -> StoredField:
    layout, values = encoded.layout, encoded.arrays.get("values")
    return StoredField(
        dtype=layout.dtype,
        start=start,
        columns=layout.columns,
        bits=layout.bits,
        codes=encoded.arrays.get("codes"),
        qparams=encoded.arrays.get("qparams"),
        values=None if values is None else dtypes.from_stored(values, layout.stored or layout.dtype),
        exact_index=encoded.exact_index,
        exact_values=dtypes.from_stored(encoded.exact_values, layout.dtype),
    )


def _split(found: _Found, layers: Layers) -> tuple[Ids, Ids]:
    """Rows to be read, and keys that are gone."""
    touched = union(*found.rows, *found.deleted)
    rows = layers[0][1].rows
    if rows is not None:
        if found.everything:
            check_rows(layers)
        return (np.arange(rows) if found.everything else touched[touched < rows]), touched[:0]
    if found.everything:
        return live_keys(layers), touched[:0]
    lives = living(layers, touched)
    return touched[lives], touched[~lives]
