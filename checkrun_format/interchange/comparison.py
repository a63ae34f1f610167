"""Which rows of a table in a file differ from a checkpoint: what encodes to the stored bits has not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from checkrun_format import blocks, dtypes, quantize
from checkrun_format.blocks import EncodedField, EncodedRows, FieldPlan
from checkrun_format.comparison import differing_rows
from checkrun_format.interchange.contents import PIECE_BYTES, Array
from checkrun_format.interchange.inventory import FileTable
from checkrun_format.manifest import TableEntry
from checkrun_format.resolver import Layers, Piece, as_stored, live_keys, pieces
from checkrun_format.rows import Ids, Mask, Selection, Wanted, WantedIds, WantedRange, length, pick


@dataclass(slots=True)
class Comparison:
    """A table beside the same one in a checkpoint.

    Attributes
    ----------
    changed : int64 array
        Rows or keys, ascending, that both have and that differ.
    new, gone : int
        How many rows or keys the file has more, and less.
    plans : list of FieldPlan, or None
        How every other row was encoded; None if they were encoded in several ways, or by an encoder unknown here.
    """

    changed: Ids
    new: int
    gone: int
    plans: list[FieldPlan] | None


def recorded_plans(layers: Layers, table: FileTable) -> dict[str, FieldPlan]:
    """How the newest rows of each field were encoded; none of a table without rows."""
    found: dict[str, FieldPlan] = {}
    for layer, entry in layers:
        told = {f.name: f.encoder for f in entry.fields}
        for part in layer.parts(entry.name):
            block = layer.block(part)
            for f in block.entry.fields:
                columns = next(known.columns for known in entry.fields if known.name == f.name)
                dtype = dtypes.name_of(table.fields[f.name].dtype)
                stored = None if f.dtype in (None, dtype) else f.dtype
                encoder = None if f.bits is None else quantize.recorded_method(told[f.name], f.bits)
                plan = FieldPlan(
                    name=f.name, dtype=dtype, columns=columns, bits=f.bits, encoder=encoder, store_as=stored
                )
                found.setdefault(f.name, plan)
    return found


def recorded_bits(layers: Layers, field: str) -> int | None:
    """The bits of the newest rows of a field; None if they are raw, or if there are none."""
    found = (
        f.bits
        for layer, entry in layers
        for part in layer.parts(entry.name)
        for f in layer.block(part).entry.fields
        if f.name == field
    )
    return next(found, None)


def compare(layers: Layers, table: FileTable, advance: Callable[[int], None]) -> Comparison:
    """Compare a table with the same one, of the same fields, in a checkpoint; a few megabytes at a time.

    A row has not changed if it encodes, as the stored row was encoded, to the same codes, qparams and exact values (raw
    fields: has the same bits); or if the stored row reads as just the values of the file.

    Parameters
    ----------
    layers : sequence
        Of the table in the checkpoint.
    advance : function
        Is told the bytes that were compared.
    """
    entry = layers[0][1]
    there: Wanted = WantedIds(live_keys(layers)) if entry.rows is None else WantedRange(0, entry.rows)
    wanted = _common(there, table)
    differs: Mask = np.zeros(len(wanted), np.bool_)
    plans = _Plans()
    for piece in pieces(layers, wanted):
        for places, some in _compared(piece, entry, table, wanted, plans):
            differs[places] |= some
            advance(len(some) * table.row_bytes)
    return Comparison(
        changed=np.flatnonzero(differs) if isinstance(wanted, WantedRange) else wanted.wanted[differs],
        new=table.rows - len(wanted),
        gone=len(there) - len(wanted),
        plans=plans.of(table),
    )


def _common(there: Wanted, table: FileTable) -> Wanted:
    """The rows or keys that the file has too."""
    if isinstance(there, WantedIds):
        return WantedIds(np.intersect1d(there.wanted, table.sorted_keys()))
    return WantedRange(0, min(there.stop, table.rows))


@dataclass(slots=True)
class _Plans:
    """The ways in which the rows of each field were encoded."""

    found: dict[str, set[FieldPlan]] = field(default_factory=dict)
    alike: bool = True

    def of(self, table: FileTable) -> list[FieldPlan] | None:
        if not self.alike or any(len(self.found.get(name, ())) != 1 for name in table.fields):
            return None
        return [next(iter(self.found[name])) for name in table.fields]


def _compared(
    piece: Piece, entry: TableEntry, table: FileTable, wanted: Wanted, plans: _Plans
) -> Iterator[tuple[Selection, Mask]]:
    """Places among the wanted rows, some at a time, and which of them differ."""
    fields = {f.name: f for f in entry.fields}
    stored = [as_stored(piece, f, fields[f.name]) for f in piece.block.entry.fields]
    told = {f.name: f.encoder or {} for f in piece.checkpoint.entry(table.name).fields}
    ways = [_plan(s, start, told[s.layout.name]) for s, start in zip(stored, piece.part.columns, strict=True)]
    for way, s in zip(ways, stored, strict=True):
        plans.found.setdefault(s.layout.name, set()).add(way)
        plans.alike &= _is_known(way) and way.columns == fields[way.name].columns
    count = length(piece.places)
    step = max(1, PIECE_BYTES // max(1, table.row_bytes))
    for low in range(0, count, step):
        high = min(low + step, count)
        places = pick(piece.places, slice(low, high))
        values = table.fetch(places if isinstance(wanted, WantedRange) else wanted.wanted[places])
        part = blocks.cut(EncodedRows(count=count, fields=stored, rows=None), low, high)
        differs: Mask = np.zeros(high - low, np.bool_)
        for way, s in zip(ways, part.fields, strict=True):
            differs |= _differing(way, s, _columns(values[way.name], way), plans)
        yield places, differs


def _plan(stored: EncodedField, start: int, told: dict[str, object]) -> FieldPlan:
    """How a field of a part was encoded, by its arrays; the encoder is in the manifest."""
    of = stored.layout
    plan = FieldPlan(
        name=of.name,
        dtype=of.dtype,
        columns=of.columns,
        start=start,
        bits=of.bits,
        store_as=None if of.stored in (None, of.dtype) else of.stored,
        qparams=of.qparams,
    )
    return plan if of.bits is None else replace(plan, encoder=quantize.recorded_method(told, of.bits))


def _is_known(way: FieldPlan) -> bool:
    return way.bits is None or way.encoder is not None


def _columns(values: Array, way: FieldPlan) -> Array:
    return values if way.columns is None else values[:, way.start : way.start + way.columns]


def _differing(way: FieldPlan, stored: EncodedField, values: Array, plans: _Plans) -> Mask:
    """Which rows of one field differ from the stored ones."""
    differs: Mask = np.ones(len(values), np.bool_)
    if _is_known(way):
        fresh = blocks.Encoder(plans=[way]).encode({way.name: values}, None).fields[0]
        differs = _other_bits(stored, fresh, len(values))
    if way.lossy and differs.any():
        places = np.flatnonzero(differs)
        same = ~differing_rows(_decoded(way, stored, places), values[places])
        if same.any():  # such a row may encode to other bits than it is stored in
            plans.alike = False
            differs[places[same]] = False
    return differs


def _other_bits(stored: EncodedField, fresh: EncodedField, count: int) -> Mask:
    exact = [np.zeros(count, np.bool_), np.zeros(count, np.bool_)]
    for mask, encoded in zip(exact, (stored, fresh), strict=True):
        mask[encoded.exact_index] = True
    both = exact[0] & exact[1]
    differs: Mask = exact[0] ^ exact[1]
    for name, array in stored.arrays.items():
        differs |= differing_rows(array, fresh.arrays[name]) & ~both
    if both.any():
        values = [encoded.exact_values[both[encoded.exact_index]] for encoded in (stored, fresh)]
        differs[both] = differing_rows(*values)
    return differs


def _decoded(way: FieldPlan, stored: EncodedField, places: Ids) -> Array:
    """The values of some rows, as a reader sees them."""
    if way.bits is None:
        values = dtypes.from_stored(stored.arrays["values"], way.stored)[places].astype(dtypes.logical(way.dtype))
    else:
        values = np.empty((places.size, way.columns or 0), dtypes.logical(way.dtype))
        codes, qparams = stored.arrays["codes"][places], stored.arrays["qparams"][places]
        quantize.decode_affine(codes, qparams, way.bits, way.columns or 0, values)
    found = np.isin(places, stored.exact_index)
    entries = np.searchsorted(stored.exact_index, places[found])
    values[found] = dtypes.from_stored(stored.exact_values[entries], way.dtype)
    return values


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays have the same dtype, shape and bits."""
    if one.shape != other.shape or dtypes.name_of(one.dtype) != dtypes.name_of(other.dtype):
        return False
    flat = one.reshape(-1, 1), other.reshape(-1, 1)
    step = max(1, PIECE_BYTES // one.dtype.itemsize)
    return not any(
        differing_rows(*(array[low : low + step] for array in flat)).any() for low in range(0, len(flat[0]), step)
    )
