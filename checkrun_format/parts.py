"""One part of a table as a writer gives it, checked: which rows and columns, which are recent, which keys are gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkrun_format import dlpack
from checkrun_format.dlpack import Array
from checkrun_format.errors import InvalidInputError
from checkrun_format.integers import whole
from checkrun_format.rows import Ids, Mask, as_ids, ascending, check_bounds, check_sign, key_dtype_of, union
from checkrun_format.state import All, ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Which rows of a table a part holds: a range, or rows or keys."""

    of: int | None
    """Rows of the whole table; None if it is keyed."""
    first: int = -1
    """Of a range, its first row."""
    ids: Ids | None = None
    """Ascending; None: a range."""
    order: Ids | None = None
    """Which of the caller's rows each of these is; None if they came in this order."""
    key_dtype: str | None = None


def held_rows(table: str, rows: Any, of: object, keys: ArrayLike | None, count: int) -> Held:
    """The rows of a part that has `count` rows of values."""
    if keys is not None:
        if rows is not None or of is not None:
            raise InvalidInputError(f"table {table!r}: give either keys, or rows and of")
        given = dlpack.to_numpy(keys, f"table {table!r}, keys")
        ids, order = _listed(given, count, f"table {table!r}, keys")
        return Held(of=None, ids=ids, order=order, key_dtype=key_dtype_of(given))
    if rows is None or of is None:
        raise InvalidInputError(f"table {table!r}: give rows and of, or keys")
    total = whole(of, f"table {table!r}, of: {of!r} is no number of rows", least=0)
    if isinstance(rows, slice) and rows.step in (None, 1):
        rows = (rows.start or 0, total if rows.stop is None else rows.stop)
    if not isinstance(rows, tuple):
        what = f"table {table!r}, rows"
        ids, order = _listed(dlpack.to_numpy(rows, what), count, what)
        check_bounds(ids, total, f"table {table!r}")
        return Held(of=total, ids=ids, order=order)
    low, high = _pair(rows, f"table {table!r}, rows")
    if not 0 <= low <= high <= total or high - low != count:
        raise InvalidInputError(f"table {table!r}: {count} rows given for the range {low} to {high} of {total}")
    return Held(of=total, first=low)


def _listed(given: np.ndarray[Any, Any], count: int, what: str) -> tuple[Ids, Ids | None]:
    ids = as_ids(given, what)
    if ids.size != count:
        raise InvalidInputError(f"{what}: {ids.size} for {count} rows of values")
    return ascending(ids, what)


def first_columns(table: str, arrays: Mapping[str, Array], columns: Any) -> dict[str, int]:
    """The first column of each field of which columns are named."""
    if columns is None:
        return {}
    wide = {name: array.shape[1] for name, array in arrays.items() if array.ndim == 2}
    given = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(wide, columns)
    pairs = {name: _pair(pair, f"table {table!r}, columns of field {name!r}") for name, pair in given.items()}
    for name, (low, high) in pairs.items():
        if name not in wide or low < 0 or high - low != wide[name]:
            raise InvalidInputError(
                f"table {table!r}, field {name!r}: columns {low} to {high} given for {wide.get(name, 'no')} columns"
            )
    return {name: low for name, (low, _) in pairs.items()}


def _pair(value: object, what: str) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidInputError(f"{what}: {value!r}; give (low, high)")
    low, high = (whole(edge, f"{what}: {edge!r} is no whole number") for edge in value)
    return low, high


def recent_rows(table: str, recent: ArrayLike, count: int, order: Ids | None) -> bool | Mask:
    """Which of a part's rows are recent, in its order."""
    if isinstance(recent, All):
        return True
    if isinstance(recent, bool):
        return recent
    mask = dlpack.to_numpy(recent, f"table {table!r}, recent")
    if mask.dtype != np.bool_ or mask.shape != (count,):
        raise InvalidInputError(f"table {table!r}, recent: {mask.dtype} {mask.shape} where bool ({count},) belongs")
    return np.array(mask) if order is None else mask[order]


def deleted_keys(table: str, deleted: ArrayLike | None, key_dtype: str | None) -> Ids:
    """The tombstones of a part, ascending."""
    if deleted is None:
        return np.zeros(0, np.int64)
    if key_dtype is None:
        raise InvalidInputError(f"table {table!r}: only a keyed table has deleted keys")
    what = f"table {table!r}, deleted"
    given = dlpack.to_numpy(deleted, what)
    ids = as_ids(given, what)
    check_sign(given, ids, key_dtype, what)
    return union(ids)
