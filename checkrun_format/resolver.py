"""Resolving: which layer supplies each row, and reading it from there (FORMAT.md 9.3)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format import dlpack, dtypes
from checkrun_format.blocks import EncodedField, FieldLayout
from checkrun_format.dlpack import Array
from checkrun_format.errors import DamagedError, UnsupportedFeatureError
from checkrun_format.manifest import BlockField, Field, TableEntry
from checkrun_format.movement import Claims, TwiceError, prepare
from checkrun_format.packing import aligned_empty
from checkrun_format.reader import Block, StoredCheckpoint, exact_among
from checkrun_format.rows import (
    Ids,
    Mask,
    Moves,
    Selection,
    Wanted,
    WantedIds,
    check_bounds,
    is_in_sorted,
    length,
    shifted,
    union,
)
from checkrun_format.structure import Part
from checkrun_format.workers import Budget, Workers

Layers: TypeAlias = Sequence[tuple[StoredCheckpoint, TableEntry]]

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one row chunk of one part that supply wanted rows."""

    checkpoint: StoredCheckpoint
    block: Block
    part: Part
    chunk: int
    moves: Moves
    """From the chunk to the wanted rows."""

    @property
    def positions(self) -> Selection:
        """Within the chunk, ascending."""
        return self.moves.positions

    @property
    def places(self) -> Selection:
        """Among the wanted rows."""
        return self.moves.places


class Coverage:
    """Checks that the parts of one layer hold each row's fields and columns exactly once (LAY-1, LAY-4).

    Parameters
    ----------
    layer, entry
        The layer.
    parts : list of Part
        All of its parts.
    claims : Claims
        What newer layers have supplied of the wanted rows.
    """

    def __init__(self, layer: StoredCheckpoint, entry: TableEntry, parts: Sequence[Part], claims: Claims) -> None:
        self._layer = layer
        self._entry = entry
        self._claims = claims
        self._cuts = {f.name: {0, f.columns or 1} for f in entry.fields}
        for part in parts:
            for name, low, high in _spans(layer.block(part), part):
                self._cuts[name] |= {low, high}
        whole = all(len(cuts) == 2 for cuts in self._cuts.values()) and all(
            len(layer.block(part).entry.fields) == len(entry.fields) for part in parts if part.count
        )
        self._masks: dict[tuple[str, int], Mask] | None = None
        claims.begin()
        if not whole:
            starts = [(name, low) for name, cuts in self._cuts.items() for low in sorted(cuts)[:-1]]
            self._undecided = claims.undecided()
            self._hit: Mask = np.zeros(self._undecided.size, np.bool_)
            self._masks = {start: np.zeros(self._undecided.size, np.bool_) for start in starts}

    def add(self, part: Part, places: Selection) -> Mask | None:
        """Note the wanted rows that a part holds; return which of them no newer layer supplies, None for all."""
        if self._masks is None:
            try:
                return self._claims.claim(places)
            except TwiceError:
                raise self._twice() from None
        for name, low, high in _spans(self._layer.block(part), part):
            for cut in self._cuts[name]:
                if low <= cut < high:
                    if bool(self._masks[name, cut][places].any()):
                        raise self._twice()
                    self._masks[name, cut][places] = True
        self._hit[places] = True
        return self._undecided[places]

    def check(self) -> None:
        """Once all parts are noted: every row that was hit was hit in all fields and columns."""
        if self._masks is None:
            return
        for (name, low), mask in self._masks.items():
            if not np.array_equal(mask, self._hit):
                raise self._damage(f"field {name!r}, column {low}, is missing in a row that other parts hold")
        self._claims.decide(self._hit)

    def _twice(self) -> DamagedError:
        return self._damage("a row is stored twice")

    def _damage(self, problem: str) -> DamagedError:
        place = self._layer.place("manifest.json")
        return DamagedError(place, f"table {self._entry.name!r}: {problem} (LAY-1, LAY-4)")


def _spans(block: Block, part: Part) -> Iterator[tuple[str, int, int]]:
    for f, start in zip(block.entry.fields, part.columns, strict=True):
        yield f.name, start, start + (f.columns or 1)


def pieces(layers: Layers, wanted: Wanted, at_a_time: int = Budget().rows) -> Iterator[Piece]:
    """The pieces that together supply every wanted row once, from the newest layer down.

    Row indices alone decide; values are not read. Layers and chunks without a surviving row are passed over.

    Parameters
    ----------
    at_a_time : int
        Of how many wanted rows to keep which are decided, a byte each. The fewer, the more often a chunk whose rows
        are far apart takes its turn.

    Raises
    ------
    DamagedError
        Rows are stored twice, or nowhere (RES-1).
    """
    for low in range(0, max(1, len(wanted)), at_a_time):  # of no rows, too, the newest layer is checked
        for piece in _pieces(layers, wanted.section(low, min(low + at_a_time, len(wanted)))):
            yield piece if low == 0 else replace(piece, moves=piece.moves.shifted(low))


def check_rows(layers: Layers) -> None:
    """Refuse a dense table of more rows than are stored: before there is memory for them (RES-1)."""
    checkpoint, entry = layers[0]
    stored = sum(part.count for layer, _ in layers for part in layer.parts(entry.name))
    if entry.rows is not None and entry.rows > stored:
        problem = f"table {entry.name!r}: {entry.rows} rows, of which at most {stored} are stored (RES-1)"
        raise DamagedError(checkpoint.place("manifest.json"), problem)


def _pieces(layers: Layers, wanted: Wanted) -> Iterator[Piece]:
    claims = Claims(len(wanted))
    for layer, entry in layers:
        if entry.storage == "unchanged":
            continue
        parts = layer.parts(entry.name)
        coverage = Coverage(layer, entry, parts, claims)
        for part in parts:
            yield from _pieces_of(layer, entry, part, wanted, coverage)
        coverage.check()
        for keys in tombstones(layer, entry):
            claims.decide(wanted.among_ids(keys)[1])
        if not claims.left:
            return
    place = claims.first_undecided()
    row = int(wanted.section(place, place + 1).ids()[0])
    layer, entry = layers[-1]
    raise DamagedError(layer.place("manifest.json"), f"table {entry.name!r}: row {row} is stored nowhere (RES-1)")


def _pieces_of(
    layer: StoredCheckpoint, entry: TableEntry, part: Part, wanted: Wanted, coverage: Coverage
) -> Iterator[Piece]:
    block = layer.block(part)
    for chunk, positions, places in _located(entry, block, part, wanted):
        kept = coverage.add(part, places)
        if kept is None or kept.any():
            yield Piece(layer, block, part, chunk, Moves(positions, places, kept))


def _located(entry: TableEntry, block: Block, part: Part, wanted: Wanted) -> Iterator[tuple[int, Selection, Selection]]:
    """The wanted rows that a part holds: chunk, positions in it, places among the wanted."""
    if part.count == 0:
        return
    last = _LOWEST
    for chunk, low, high in block.rows_of(part):
        start = low - chunk * block.chunk_rows
        if part.first_row >= 0:
            positions, places = wanted.among_range(part.first_row + low - part.offset, high - low)
        elif not _may_touch(block, part, chunk, low, high, wanted):
            continue
        else:
            ids = listed(entry, block, low, high, last)
            last = int(ids[-1])
            positions, places = wanted.among_ids(ids)
        if length(positions):
            yield chunk, shifted(positions, start), places


def listed(entry: TableEntry, block: Block, low: int, high: int, last: int) -> Ids:
    """The ids of block rows low..high-1, which follow `last` in their part (PRT-3)."""
    ids = block.listed(low, high)
    if last != _LOWEST and ids[0] <= last:
        raise DamagedError(block.place("rows"), "not strictly increasing within a part (PRT-3)")
    if entry.rows is not None:
        try:
            check_bounds(ids, entry.rows, f"table {entry.name!r}")
        except ValueError as error:
            raise DamagedError(block.place("rows"), f"{error} (PRT-3)") from error
    return ids


def _may_touch(block: Block, part: Part, chunk: int, low: int, high: int, wanted: Wanted) -> bool:
    """Whether a chunk of listed rows may hold wanted ones, as far as `rows_first` tells."""
    if block.chunk_rows >= block.entry.rows:
        return True
    starts, ends = low == chunk * block.chunk_rows, high == part.offset + part.count
    first = int(block.rows_first[chunk]) if starts else _LOWEST
    return wanted.touches(first, _HIGHEST if ends else int(block.rows_first[chunk + 1]) - 1)


def check_layer(layer: StoredCheckpoint, entry: TableEntry, needed: Ids) -> None:
    """Check one layer on its own: no row twice, none in parts only, and all that are needed (LAY-1, LAY-3, LAY-4).

    Parameters
    ----------
    needed : int64 array
        Rows that must be there; keys, as rows or as tombstones.

    Raises
    ------
    DamagedError
    """
    held = union(*(ids for _, ids in stored_ids(layer, entry)))
    parts = layer.parts(entry.name)
    coverage = Coverage(layer, entry, parts, Claims(held.size))
    for part in parts:
        for _, _, places in _located(entry, layer.block(part), part, WantedIds(held)):
            coverage.add(part, places)
    coverage.check()
    missing = needed[~is_in_sorted(needed, union(held, *tombstones(layer, entry)))]
    if missing.size:
        what = "row" if entry.addressing == "dense" else "key"
        raise DamagedError(
            layer.place("manifest.json"),
            f"table {entry.name!r}: no part holds {what} {missing[0]}, one of {missing.size} that are new, or were "
            "stored since the parent (LAY-1, LAY-2, LAY-3)",
        )


def tombstones(layer: StoredCheckpoint, entry: TableEntry) -> Iterator[Ids]:
    """The tombstones of a table in one layer, part by part (LAY-5)."""
    if entry.addressing == "keyed":
        for part in layer.parts(entry.name):
            if part.deleted_count:
                yield layer.block(part).deleted(part)


def stored_ids(layer: StoredCheckpoint, entry: TableEntry) -> Iterator[tuple[Part, Ids]]:
    """The rows or keys that each part of one layer holds."""
    for part in layer.parts(entry.name):
        if part.count == 0:
            continue
        if part.first_row >= 0:
            yield part, np.arange(part.first_row, part.first_row + part.count)
            continue
        block, last, found = layer.block(part), _LOWEST, []
        for _, low, high in block.rows_of(part):
            found.append(listed(entry, block, low, high, last))
            last = int(found[-1][-1])
        yield part, np.concatenate(found)


def live_keys(layers: Layers) -> Ids:
    """The keys of a keyed table, ascending as signed int64 (RES-1)."""
    decided: Ids = np.zeros(0, np.int64)
    live: list[Ids] = []
    for layer, entry in layers:
        if entry.storage == "unchanged":
            continue
        keys = union(*(ids for _, ids in stored_ids(layer, entry)))
        live.append(keys[~is_in_sorted(keys, decided)])
        decided = union(decided, keys, *tombstones(layer, entry))
    return np.sort(np.concatenate(live))


def living(layers: Layers, keys: Ids) -> Mask:
    """Which of some keys a keyed table has; goes down no further than it takes to tell (RES-1)."""
    lives, unknown = np.zeros(keys.size, np.bool_), np.arange(keys.size)
    for layer, entry in layers:
        if entry.storage == "unchanged":
            continue
        held = is_in_sorted(keys[unknown], union(*(ids for _, ids in stored_ids(layer, entry))))
        gone = is_in_sorted(keys[unknown], union(*tombstones(layer, entry)))
        lives[unknown[held]] = True
        unknown = unknown[~(held | gone)]
        if not unknown.size:
            break
    return lives


def fill(
    layers: Layers,
    wanted: Wanted,
    out: Mapping[str, Array],
    columns: Mapping[str, tuple[int, int]],
    workers: Workers,
    at_a_time: int = Budget().rows,
) -> None:
    """Read the wanted rows of some fields into arrays, which are filled when `workers` is done.

    Parameters
    ----------
    out : mapping
        Field name to an array (n, width) or (n,) of the field's logical dtype, on the CPU or on its way to a device.
    columns : mapping
        Field name to the range of columns that its array takes.
    at_a_time : int
        As of `pieces`.
    """
    fields = {f.name: f for f in layers[0][1].fields if f.name in out}
    if len(list(itertools.islice((layer for layer in layers if layer[1].storage != "unchanged"), 2))) > 1:
        prepare(sum(array.nbytes for array in out.values()))
    for piece in pieces(layers, wanted, at_a_time):
        for f, start in zip(piece.block.entry.fields, piece.part.columns, strict=True):
            if f.name not in fields:
                continue
            task = functools.partial(_fill_field, piece, f, fields[f.name], start, out[f.name], columns[f.name])
            workers.run(piece.block.held_bytes(f, piece.moves), task)


def read_rows(layers: Layers, wanted: Wanted, fields: Sequence[Field]) -> dict[str, npt.NDArray[Any]]:
    """The wanted rows of some fields, in new arrays."""
    count = len(wanted)
    shapes = {f.name: (count, f.columns) if f.columns else (count,) for f in fields}
    out = {f.name: aligned_empty(shapes[f.name], dtypes.logical(f.dtype)) for f in fields}
    with Workers.of(layers[0][0].store) as workers:
        fill(layers, wanted, out, {f.name: (0, f.columns or 1) for f in fields}, workers)
    return out


def _fill_field(piece: Piece, f: Any, field: Field, start: int, out: Array, columns: tuple[int, int]) -> None:
    decode = piece.block.decode
    if f.columns is None:
        decode(f, field, piece.chunk, piece.moves, out)
        return
    low, high = max(start, columns[0]), min(start + f.columns, columns[1])
    if low >= high:
        return
    target = out[:, low - columns[0] : high - columns[0]]
    if (low, high) == (start, start + f.columns):
        decode(f, field, piece.chunk, piece.moves, target)
        return
    positions = piece.positions
    count = length(positions)
    wide = dlpack.empty_like(out, (count, f.columns))
    decode(f, field, piece.chunk, Moves(positions, slice(0, count)), wide)
    target[piece.places] = wide[:, low - start : high - start]


def as_stored(piece: Piece, f: BlockField, field: Field) -> EncodedField:
    """The rows of a piece as they are stored, in one field of its block."""
    block, positions = piece.block, piece.positions
    if f.encoding == "affine":
        codes, qparams = block.affine(f, piece.chunk)
        arrays = {"codes": codes[positions], "qparams": qparams[positions]}
    elif f.encoding == "raw":
        arrays = {"values": block.values(f, piece.chunk)[positions]}
    else:
        raise UnsupportedFeatureError(f"{block.place(f.name)}: unknown encoding {f.encoding!r}")
    exact_index, exact_values = block.exact(f, field)
    places, found = exact_among(exact_index, piece.chunk * block.chunk_rows, positions)
    return EncodedField(
        layout=FieldLayout(
            name=f.name,
            dtype=field.dtype,
            encoding=f.encoding,
            columns=f.columns,
            bits=f.bits,
            stored=f.dtype,
            qparams=arrays["qparams"].dtype.name if "qparams" in arrays else None,
        ),
        arrays=arrays,
        exact_index=places,
        exact_values=exact_values[found] if found.size else np.zeros((0, *_row_shape(f)), dtypes.STORED[field.dtype]),
    )


def _row_shape(f: BlockField) -> tuple[int, ...]:
    return () if f.columns is None else (f.columns,)
