"""Writing a chain again as one base, without decoding (FORMAT.md 9.5)."""

from __future__ import annotations

import numpy as np

from checkrun_format.blocks import EncodedRows
from checkrun_format.chain import History
from checkrun_format.manifest import Field, TableEntry
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.resolver import Layers, Piece, as_stored, live_keys, pieces
from checkrun_format.rows import Ids, Wanted, WantedIds, WantedRange
from checkrun_format.writer import Writer


def copy_table(history: History, checkpoint: StoredCheckpoint, name: str, writer: Writer) -> TableEntry:
    """Store a table's resolved rows again, as they are encoded; return its entry in the new checkpoint."""
    layers = history.layers(checkpoint, name)
    entry = layers[0][1]
    wanted: Wanted = WantedIds(live_keys(layers)) if entry.rows is None else WantedRange(0, entry.rows)
    fields = {f.name: f for f in entry.fields}
    exact_rows = dict.fromkeys(fields, 0)
    for piece in pieces(layers, wanted):
        encoded, first_row = _encoded(piece, fields, wanted)
        for f in encoded.fields:
            exact_rows[f.layout.name] += f.exact_index.size
        writer.put_encoded(name, encoded, first_row, piece.part.columns)
    return TableEntry(
        name=entry.name,
        requires=entry.requires,
        addressing=entry.addressing,
        key_dtype=entry.key_dtype,
        rows=entry.rows,
        storage="full",
        fields=[_retold(f, layers, exact_rows[f.name]) for f in entry.fields],
    )


def _retold(field: Field, layers: Layers, exact_rows: int) -> Field:
    """A field, with what its encoders in all layers together say (5.4)."""
    told = [f.encoder for _, entry in layers for f in entry.fields if f.name == field.name and f.encoder is not None]
    if not told:
        return field
    bounds = [encoder["error_bound"] for encoder in told if "error_bound" in encoder]
    first = {key: value for key, value in told[0].items() if key not in ("l2_error", "relative_l2_error")}
    encoder = {**first, "exact_rows": exact_rows} | ({"error_bound": max(bounds)} if bounds else {})
    return Field(name=field.name, dtype=field.dtype, columns=field.columns, encoder=encoder)


def _encoded(piece: Piece, fields: dict[str, Field], wanted: Wanted) -> tuple[EncodedRows, int]:
    """The rows of a piece as they are stored; and their first number, -1 if they are listed."""
    encoded = [as_stored(piece, f, fields[f.name]) for f in piece.block.entry.fields]
    count = len(next(iter(encoded[0].arrays.values())))
    if isinstance(wanted, WantedRange) and isinstance(piece.places, slice):
        return EncodedRows(count=count, fields=encoded, rows=None), piece.places.start
    rows: Ids = wanted.ids()[piece.places] if isinstance(wanted, WantedIds) else np.asarray(piece.places, np.int64)
    return EncodedRows(count=count, fields=encoded, rows=rows), -1
