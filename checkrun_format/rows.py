"""Sets of rows, and where stored rows fall among wanted ones. Arrays in, arrays out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format.errors import InvalidInputError

Ids: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Selection: TypeAlias = "slice | Ids"
"""Positions: a slice with step 1, or an array."""


def sorted_ids(values: npt.NDArray[Any], what: str) -> Ids:
    """Row ids or keys as a sorted array of int64; duplicates are refused.

    uint64 keys keep their bits: they are ordered as signed int64 (PRT-3).

    Raises
    ------
    InvalidInputError
        Not one-dimensional, no integers, too large for int64 (uint64 ids apart), or an id twice.
    """
    ids = as_ids(values, what)
    if ids.size > 1 and not bool((ids[1:] > ids[:-1]).all()):
        ids = np.sort(ids)
        twice = ids[1:][ids[1:] == ids[:-1]]
        if twice.size:
            raise InvalidInputError(f"{what}: {int(twice[0])} is there more than once; numpy.unique removes repeats")
    return ids


def ascending(ids: Ids, what: str) -> tuple[Ids, Ids | None]:
    """Ids in ascending order, in memory of their own, and the order that sorts them; None if they are sorted.

    Raises
    ------
    InvalidInputError
        An id is there twice.
    """
    if ids.size < 2 or bool((ids[1:] > ids[:-1]).all()):
        return ids.copy(), None
    order = np.argsort(ids, kind="stable")
    return sorted_ids(ids[order], what), order


def as_ids(values: npt.NDArray[Any], what: str) -> Ids:
    """Row ids or keys as int64 in the order given."""
    if values.ndim != 1:
        raise InvalidInputError(f"{what}: {values.ndim} dimensions where a list of ids is wanted")
    if values.size == 0:
        return np.zeros(0, np.int64)
    if values.dtype.kind not in "iu":
        raise InvalidInputError(f"{what}: {values.dtype} where integers are wanted")
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return native.view(np.int64) if native.dtype == np.uint64 else native.astype(np.int64, copy=False)


def key_dtype_of(keys: npt.NDArray[Any]) -> str:
    """The key dtype of a table with these keys: `uint64` if they may be too large for `int64`."""
    return "uint64" if keys.dtype.kind == "u" and keys.dtype.itemsize == 8 else "int64"


def union(*sets: Ids) -> Ids:
    """All ids of some arrays, ascending, each once.

    Arrays in ascending order are merged, in a hundredth of the time in which numpy.unique hashes them.
    """
    ids = np.sort(np.concatenate([np.zeros(0, np.int64), *sets]), kind="stable")
    is_first = np.ones(ids.size, np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
    return ids[is_first]


def of_other_sign(given: npt.NDArray[Any], ids: Ids, key_dtype: str | None) -> npt.NDArray[Any]:
    """Those of the given ids that no row or key of a table can be, although their bits as int64 may be one's.

    A negative number is no key of uint64; one of 2^63 and more is no key of int64, and no row.
    """
    unsigned = given.dtype.kind == "u"
    return given[ids < 0] if unsigned != (key_dtype == "uint64") else given[:0]


def check_sign(given: npt.NDArray[Any], ids: Ids, key_dtype: str | None, what: str) -> None:
    """Refuse ids of the other sign (`of_other_sign`)."""
    wrong = of_other_sign(given, ids, key_dtype)
    if wrong.size:
        raise InvalidInputError(f"{what}: {wrong[0]} is no {'row' if key_dtype is None else f'key of {key_dtype}'}")


def check_bounds(ids: Ids, rows: int, what: str) -> None:
    """Refuse sorted ids outside 0..rows-1."""
    if ids.size and (ids[0] < 0 or ids[-1] >= rows):
        wrong = int(ids[0] if ids[0] < 0 else ids[-1])
        raise InvalidInputError(f"{what}: row {wrong} is not in a table of {rows} rows")


class RowSet:
    """A growing set of rows of a dense table: one byte for each row up to the highest."""

    def __init__(self, mask: Mask | None = None) -> None:
        self._mask = np.zeros(0, np.bool_) if mask is None else mask

    def add(self, ids: Ids) -> None:
        """Add rows."""
        if ids.size:
            self._grow(int(ids.max()) + 1)
            self._mask[ids] = True

    def update(self, other: RowSet) -> None:
        """Add all rows of another set."""
        self._grow(other._mask.size)
        self._mask[: other._mask.size] |= other._mask

    def _grow(self, rows: int) -> None:
        if rows > self._mask.size:
            grown = np.zeros(rows, np.bool_)
            grown[: self._mask.size] = self._mask
            self._mask = grown

    def copy(self) -> RowSet:
        """An independent copy."""
        return RowSet(self._mask.copy())

    def add_to(self, mask: Mask) -> None:
        """Set the rows in a mask, those that it is long enough for."""
        mask[: self._mask.size] |= self._mask[: mask.size]

    def ids(self, rows: int | None = None) -> Ids:
        """The rows in ascending order, those below `rows` if given."""
        return np.flatnonzero(self._mask[:rows])

    def contains(self, ids: Ids) -> Mask:
        """For each id, whether it is in the set."""
        inside = ids < self._mask.size
        found = np.zeros(ids.size, np.bool_)
        found[inside] = self._mask[ids[inside]]
        return found

    def __len__(self) -> int:
        return int(np.count_nonzero(self._mask))


class KeySet:
    """A growing set of keys: a sorted array."""

    def __init__(self, keys: Ids | None = None) -> None:
        self._keys = np.zeros(0, np.int64) if keys is None else keys

    def add(self, ids: Ids) -> None:
        """Add keys."""
        self._keys = union(self._keys, ids)

    def update(self, other: KeySet) -> None:
        """Add all keys of another set."""
        self.add(other._keys)

    def copy(self) -> KeySet:
        """An independent copy (the arrays are never changed in place)."""
        return KeySet(self._keys)

    def ids(self) -> Ids:
        """The keys in ascending order."""
        return self._keys

    def contains(self, ids: Ids) -> Mask:
        """For each key, whether it is in the set."""
        return is_in_sorted(ids, self._keys)

    def __len__(self) -> int:
        return int(self._keys.size)


def is_in_sorted(ids: Ids, ordered: Ids) -> Mask:
    """For each id, whether it stands in a sorted array."""
    if ordered.size == 0:
        return np.zeros(ids.size, np.bool_)
    places = np.searchsorted(ordered, ids)
    places[places == ordered.size] = 0
    return np.asarray(ordered[places] == ids)


@dataclass(frozen=True, slots=True)
class WantedRange:
    """Rows first..stop-1 are wanted; row r goes to place r - first."""

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def among_range(self, first: int, count: int) -> tuple[Selection, Selection]:
        """Positions among `count` rows from `first` on that are wanted, and their places."""
        low, high = max(first, self.first), min(first + count, self.stop)
        high = max(low, high)
        return slice(low - first, high - first), slice(low - self.first, high - self.first)

    def among_ids(self, ids: Ids) -> tuple[Selection, Selection]:
        """The same among ascending ids."""
        low, high = np.searchsorted(ids, [self.first, self.stop])
        return slice(int(low), int(high)), ids[low:high] - self.first if self.first else ids[low:high]

    def touches(self, low: int, high: int) -> bool:
        """Whether any row of low..high (inclusive) is wanted."""
        return low < self.stop and high >= self.first

    def section(self, low: int, high: int) -> WantedRange:
        """Those of places low..high-1."""
        return WantedRange(self.first + low, self.first + high)

    def ids(self) -> Ids:
        """The wanted rows."""
        return np.arange(self.first, self.stop)


@dataclass(frozen=True, slots=True)
class WantedIds:
    """The rows or keys of an ascending array are wanted; each goes to its place in it."""

    wanted: Ids

    def __len__(self) -> int:
        return int(self.wanted.size)

    def among_range(self, first: int, count: int) -> tuple[Selection, Selection]:
        """Positions among `count` rows from `first` on that are wanted, and their places."""
        low, high = np.searchsorted(self.wanted, [first, first + count])
        return self.wanted[low:high] - first, slice(int(low), int(high))

    def among_ids(self, ids: Ids) -> tuple[Selection, Selection]:
        """The same among ascending ids."""
        if ids.size < self.wanted.size:
            found = is_in_sorted(ids, self.wanted)
            return np.flatnonzero(found), np.searchsorted(self.wanted, ids[found])
        found = is_in_sorted(self.wanted, ids)
        return np.searchsorted(ids, self.wanted[found]), np.flatnonzero(found)

    def touches(self, low: int, high: int) -> bool:
        """Whether any row of low..high (inclusive) is wanted."""
        start = int(np.searchsorted(self.wanted, low))
        return start < self.wanted.size and int(self.wanted[start]) <= high

    def section(self, low: int, high: int) -> WantedIds:
        """Those of places low..high-1."""
        return WantedIds(self.wanted[low:high])

    def ids(self) -> Ids:
        """The wanted rows or keys."""
        return self.wanted


Wanted: TypeAlias = WantedRange | WantedIds


def length(selection: Selection) -> int:
    """How many positions a selection has."""
    return selection.stop - selection.start if isinstance(selection, slice) else int(selection.size)


def as_array(selection: Selection) -> Ids:
    """The same positions one by one."""
    return np.arange(selection.start, selection.stop) if isinstance(selection, slice) else selection


def shifted(selection: Selection, by: int) -> Selection:
    """The same positions counted from elsewhere."""
    if isinstance(selection, slice):
        return slice(selection.start + by, selection.stop + by)
    return selection + by if by else selection


def as_slice(selection: Selection) -> Selection:
    """The same positions as a slice, if they follow one another."""
    if isinstance(selection, slice) or selection.size == 0:
        return selection
    first, last = int(selection[0]), int(selection[-1])
    if last - first + 1 == selection.size and bool((np.diff(selection) == 1).all()):
        return slice(first, last + 1)
    return selection


def pick(selection: Selection, kept: Selection) -> Selection:
    """Those of some positions that `kept` numbers, both ascending.

    Examples
    --------
    >>> pick(slice(10, 20), np.array([0, 3])).tolist(), pick(np.array([2, 4, 9]), slice(1, 3)).tolist()
    ([10, 13], [4, 9])
    """
    if not isinstance(selection, slice):
        return as_slice(selection[kept])
    return shifted(kept, selection.start)


def _within(positions: Selection, low: int, high: int) -> slice:
    """Which of some ascending positions are from `low` to `high` - 1.

    Examples
    --------
    >>> _within(slice(3, 9), 4, 60), _within(np.array([2, 4, 9]), 4, 9)
    (slice(1, 6, None), slice(1, 2, None))
    """
    if isinstance(positions, slice):
        first, stop = (min(max(edge, positions.start), positions.stop) - positions.start for edge in (low, high))
        return slice(first, stop)
    first, stop = np.searchsorted(positions, [low, high]).tolist()
    return slice(first, stop)


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows of a row chunk, and the places that they go to; about as small as what tells them.

    Examples
    --------
    >>> moves = Moves(slice(3, 9), np.array([0, 1, 5, 6, 7, 9]), np.array([1, 0, 1, 1, 1, 0], bool))
    >>> moves.positions.tolist(), moves.places.tolist()
    ([3, 5, 6, 7], [0, 5, 6, 7])
    >>> moves.within(5, 7).positions, moves.within(5, 7).places
    (slice(0, 2, None), slice(5, 7, None))
    """

    given: Selection
    """Ascending positions within the chunk."""
    to: Selection
    """The place of each, ascending."""
    kept: Mask | None = None
    """Which of them go; None: all."""

    @property
    def positions(self) -> Selection:
        """The positions of those that go."""
        return self._kept(self.given)

    @property
    def places(self) -> Selection:
        """Where they go."""
        return self._kept(self.to)

    @property
    def span(self) -> tuple[int, int]:
        """Positions between which all of them are."""
        if isinstance(self.given, slice):
            return self.given.start, self.given.stop
        return (int(self.given[0]), int(self.given[-1]) + 1) if self.given.size else (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes that they hold."""
        return sum(array.nbytes for array in (self.given, self.to, self.kept) if isinstance(array, np.ndarray))

    def _kept(self, selection: Selection) -> Selection:
        return selection if self.kept is None else pick(selection, as_slice(np.flatnonzero(self.kept)))

    def within(self, low: int, high: int) -> Moves:
        """Those of positions from `low` to `high` - 1, counted from `low`."""
        some = _within(self.given, low, high)
        kept = None if self.kept is None else self.kept[some]
        return Moves(shifted(pick(self.given, some), -low), pick(self.to, some), kept)

    def shifted(self, by: int) -> Moves:
        """The same with places counted from elsewhere."""
        return Moves(self.given, shifted(self.to, by), self.kept) if by else self
