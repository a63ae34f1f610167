"""How the states of two checkpoints differ, whatever their history: values are compared, not layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes
from checkrun_format.chain import History
from checkrun_format.manifest import Field, TableEntry
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.resolver import Layers, live_keys, read_rows, stored_ids, tombstones
from checkrun_format.rows import Ids, Wanted, WantedIds, WantedRange, union

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """How many of the values of a field, or of a tensor, differ.

    Attributes
    ----------
    differ : int
        Rows of the field, or elements of the tensor, of which any bit differs.
    max_difference : int or float
        Largest absolute difference of two values; infinite where NaN or an infinity is one of two that differ. It is 0
        if only signs of zero differ.
    """

    differ: int = 0
    max_difference: float = 0

    def __add__(self, other: ValueDifference) -> ValueDifference:
        return ValueDifference(
            differ=self.differ + other.differ, max_difference=max(self.max_difference, other.max_difference)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDifference:
    """How a table differs.

    Attributes
    ----------
    table : str
    rows : (int or None, int or None)
        Rows or keys in either checkpoint; None where it has no such table.
    removed, added : int
        Rows or keys in the first only, in the second only.
    differ : int
        Rows in both of which any bit of a field in both differs.
    fields : mapping
        Of the fields in both.
    other_fields : tuple of text
        Fields in one only, or of another dtype or number of columns in the other.
    """

    table: str
    rows: tuple[int | None, int | None]
    removed: int = 0
    added: int = 0
    differ: int = 0
    fields: Mapping[str, ValueDifference]
    other_fields: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether the table is the same in both, bit for bit."""
        is_in_both = None not in self.rows
        return is_in_both and not (self.removed or self.added or self.differ or self.other_fields)


def compare_tables(
    history: History, one: StoredCheckpoint, other: StoredCheckpoint, name: str, max_bytes: int
) -> TableDifference:
    """Compare a table of two checkpoints, some rows at a time.

    Rows that both have from the same layers are the same, and are not read.

    Parameters
    ----------
    max_bytes : int
        Decoded bytes that are held at a time, about.
    """
    first, second = (_Side(history, checkpoint, name) if checkpoint.has(name) else None for checkpoint in (one, other))
    if first is None or second is None or not first.is_addressed_as(second):
        return _nothing_in_common(name, first, second)
    common, others = _fields_of_both(first.entry, second.entry)
    shared = _shared(first, second)
    total, found = 0, {f.name: ValueDifference() for f in common}
    width = 2 * sum(dtypes.logical(f.dtype).itemsize * (f.columns or 1) for f in common) or 1
    for some in _batches(_suspects(first, second, shared), max(1, max_bytes // width)):
        mine, theirs = (read_rows(side.layers, some, common) for side in (first, second))
        any_field = np.zeros(len(some), np.bool_)
        for f in common:
            mask = differing_rows(mine[f.name], theirs[f.name])
            found[f.name] += difference(mine[f.name][mask], theirs[f.name][mask], rows=True)
            any_field |= mask
        total += int(any_field.sum())
    return TableDifference(
        table=name,
        rows=(first.count, second.count),
        removed=first.count - len(shared),
        added=second.count - len(shared),
        differ=total,
        fields=found,
        other_fields=others,
    )


class _Side:
    """A table at one of the two checkpoints."""

    def __init__(self, history: History, checkpoint: StoredCheckpoint, name: str) -> None:
        self.layers: Layers = history.layers(checkpoint, name)
        self.entry = self.layers[0][1]
        self.keys = live_keys(self.layers) if self.entry.rows is None else None
        self.count: int = (self.entry.rows or 0) if self.keys is None else self.keys.size

    def is_addressed_as(self, other: _Side) -> bool:
        """Whether a row number or key means the same in both."""
        return (self.entry.addressing, self.entry.key_dtype) == (other.entry.addressing, other.entry.key_dtype)


def _nothing_in_common(name: str, one: _Side | None, other: _Side | None) -> TableDifference:
    """A table that only one of the two has, or whose rows have other names in the other."""
    rows = (None if one is None else one.count, None if other is None else other.count)
    fields = () if one is None or other is None else tuple(f.name for f in one.entry.fields)
    return TableDifference(
        table=name, rows=rows, removed=rows[0] or 0, added=rows[1] or 0, fields={}, other_fields=fields
    )


def _shared(one: _Side, other: _Side) -> Wanted:
    """The rows or keys that both have."""
    if one.keys is None or other.keys is None:
        return WantedRange(0, min(one.count, other.count))
    return WantedIds(np.intersect1d(one.keys, other.keys, assume_unique=True))


def _suspects(one: _Side, other: _Side, shared: Wanted) -> Wanted:
    """Of the rows or keys that both have, those that may differ: not all from a layer that both have."""
    numbers = [{layer.commit.sequence for layer, _ in side.layers} for side in (one, other)]
    common = numbers[0] & numbers[1]
    if not common:
        return shared
    stored: list[Ids] = []
    for layer, entry in [*one.layers, *other.layers]:
        if layer.commit.sequence not in common:
            stored += [ids for _, ids in stored_ids(layer, entry)]
            stored += tombstones(layer, entry)
    found = union(*stored)
    if isinstance(shared, WantedRange):
        found = found[found < shared.stop]
        return shared if found.size > len(shared) // 2 else WantedIds(found)
    return WantedIds(np.intersect1d(shared.ids(), found, assume_unique=True))


def _fields_of_both(one: TableEntry, other: TableEntry) -> tuple[list[Field], tuple[str, ...]]:
    """Fields that can be compared, and the names of all others."""
    mine, theirs = ({f.name: f for f in entry.fields} for entry in (one, other))
    alike = [
        f
        for f in one.fields
        if f.name in theirs and (f.dtype, f.columns) == (theirs[f.name].dtype, theirs[f.name].columns)
    ]
    return alike, tuple(sorted((mine.keys() | theirs.keys()) - {f.name for f in alike}))


def _batches(wanted: Wanted, step: int) -> Iterator[Wanted]:
    if isinstance(wanted, WantedRange):
        for low in range(wanted.first, wanted.stop, step):
            yield WantedRange(low, min(low + step, wanted.stop))
    else:
        ids = wanted.ids()
        for start in range(0, ids.size, step):
            yield WantedIds(ids[start : start + step])


def differing_rows(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows of two arrays of the same shape and dtype differ in any bit: a NaN equals itself, the zeros differ."""
    if not one.size:
        return np.zeros(len(one), np.bool_)
    bits = [np.ascontiguousarray(dtypes.to_stored(array)).reshape(len(array), -1) for array in (one, other)]
    word = "u1" if bits[0].dtype.itemsize > 8 else f"u{bits[0].dtype.itemsize}"
    differ: npt.NDArray[np.bool_] = (bits[0].view(word) != bits[1].view(word)).any(axis=1)
    return differ


def difference(one: npt.NDArray[Any], other: npt.NDArray[Any], *, rows: bool = False) -> ValueDifference:
    """Compare two arrays of the same shape and dtype.

    Parameters
    ----------
    rows : bool
        They are rows that differ: count them, and not their elements.
    """
    if not one.size:
        return ValueDifference()
    flat = np.ascontiguousarray(one).reshape(-1), np.ascontiguousarray(other).reshape(-1)
    mask = differing_rows(*flat)
    return ValueDifference(
        differ=len(one) if rows else int(mask.sum()), max_difference=_largest(flat[0][mask], flat[1][mask])
    )


def _largest(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """The largest absolute difference of values that differ."""
    if not one.size:
        return 0
    if one.dtype == np.bool_:
        return 1
    if one.dtype.kind in "iu":  # their difference always fits the unsigned dtype of the same size
        distance = np.maximum(one, other) - np.minimum(one, other)
        return int(distance.view(f"u{one.dtype.itemsize}").max())
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        distance = np.abs(one.astype(wide) - other.astype(wide))
    return float("inf") if np.isnan(distance).any() else float(distance.max())
