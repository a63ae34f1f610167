"""A trainer's tables, tensors and blobs, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dlpack, layout
from checkrun_format.dlpack import Array
from checkrun_format.errors import InvalidInputError
from checkrun_format.fields import (
    array_fetch,
    checked_encoders,
    checked_store_as,
    common_rows,
    fetched,
    field_arrays,
    spec_given,
    spec_of,
)
from checkrun_format.integers import whole
from checkrun_format.rows import (
    Ids,
    Selection,
    as_array,
    as_ids,
    ascending,
    check_bounds,
    check_sign,
    key_dtype_of,
    length,
    sorted_ids,
)
from checkrun_format.state import All, ArrayLike, FieldSpec, Function, Table, TableSource, as_dict


def table_sources(tables: Mapping[str, Table]) -> dict[str, TableSource]:
    """Check all tables of a state; by name."""
    return {str(name): table_source(name, table) for name, table in as_dict(tables, "tables").items()}


def table_source(name: object, table: object) -> TableSource:
    """Check a table.

    Raises
    ------
    InvalidInputError
        Naming the table, the field and what is wrong.
    """
    text = layout.check_name(name, "table")
    if not isinstance(table, Table):
        raise InvalidInputError(f"table {text!r}: a {type(table).__name__} where a checkrun_format.Table belongs")
    if table.function is None:
        arrays = field_arrays(text, table.fields)
        fields = tuple(spec_of(field_name, array) for field_name, array in arrays.items())
        rows = common_rows(text, arrays)
        keys, key_dtype, order = _keys(text, table, rows)
        fetch = array_fetch(arrays, order)
    else:
        fields, rows = _function_fields(text, table, table.function)
        keys, key_dtype, order = _keys(text, table, rows)
        fetch = _function_fetch(text, fields, table.function, keys)
    return TableSource(
        name=text,
        fields=fields,
        rows=rows,
        keys=keys,
        order=order,
        key_dtype=key_dtype,
        changed=_changed(text, table.changed, rows, keys, key_dtype, order),
        deleted=_deleted(text, table, key_dtype),
        bits=table.bits,
        encoders=checked_encoders(text, table.encoder, fields),
        store_as=checked_store_as(text, table.store_as, fields),
        fetch=fetch,
        transient=table.function is not None,
    )


def _function_fields(name: str, table: Table, function: Function) -> tuple[tuple[FieldSpec, ...], int]:
    device = None if function.device is None else dlpack.checked_device(function.device)
    specs = tuple(spec_given(name, field_name, spec, device) for field_name, spec in function.fields.items())
    if not specs:
        raise InvalidInputError(f"table {name!r}: no fields")
    if (function.rows is None) == (table.keys is None):
        raise InvalidInputError(f"table {name!r}: from_function takes either rows= or keys=")
    if function.rows is not None:
        return specs, whole(function.rows, f"table {name!r}: rows={function.rows!r} is no number of rows", least=0)
    what = f"table {name!r}, keys"
    return specs, as_ids(dlpack.to_numpy(table.keys, what), what).size


def _function_fetch(
    table: str, specs: Sequence[FieldSpec], function: Function, keys: Ids | None
) -> Callable[[Selection], dict[str, Array]]:
    def fetch(selection: Selection) -> dict[str, Array]:
        ids = as_array(selection) if keys is None else keys[selection]
        return fetched(table, specs, function.fetch(ids.copy()), length(selection))

    return fetch


def _keys(name: str, table: Table, rows: int) -> tuple[Ids | None, str | None, Ids | None]:
    """Keys in ascending order, their dtype, and the order that sorts them (None if they are sorted)."""
    if table.keys is None:
        return None, None, None
    given = dlpack.to_numpy(table.keys, f"table {name!r}, keys")
    keys = as_ids(given, f"table {name!r}, keys")
    if keys.size != rows:
        raise InvalidInputError(f"table {name!r}: {keys.size} keys for {rows} rows")
    ordered, order = ascending(keys, f"table {name!r}, keys")
    return ordered, key_dtype_of(given), order


def _changed(
    name: str, changed: ArrayLike | All | None, rows: int, keys: Ids | None, key_dtype: str | None, order: Ids | None
) -> Ids | All | None:
    if changed is None or isinstance(changed, All):
        return changed
    what = f"table {name!r}, changed"
    given = dlpack.to_numpy(list(changed) if isinstance(changed, set | frozenset) else changed, what)
    if given.dtype == np.bool_:
        return _from_mask(given, what, rows, keys, order)
    ids = _rows_or_keys(given, key_dtype, what)
    if keys is None:
        check_bounds(ids, rows, what)
    return ids


def _from_mask(mask: npt.NDArray[np.bool_], what: str, rows: int, keys: Ids | None, order: Ids | None) -> Ids:
    if mask.shape != (rows,):
        raise InvalidInputError(f"{what}: a mask of shape {mask.shape} for {rows} rows")
    if keys is None:
        return np.flatnonzero(mask)
    return keys[mask if order is None else mask[order]]


def _deleted(name: str, table: Table, key_dtype: str | None) -> Ids:
    if table.deleted is None:
        return np.zeros(0, np.int64)
    if key_dtype is None:
        raise InvalidInputError(f"table {name!r}: only a keyed table has deleted keys; rows of a dense one stay")
    what = f"table {name!r}, deleted"
    return _rows_or_keys(dlpack.to_numpy(table.deleted, what), key_dtype, what)


def _rows_or_keys(given: npt.NDArray[Any], key_dtype: str | None, what: str) -> Ids:
    """Those that are named, ascending, in memory of their own."""
    ids = sorted_ids(given, what)
    check_sign(given, as_ids(given, what), key_dtype, what)
    return ids.copy()


def tensor_arrays(tensors: Mapping[str, ArrayLike]) -> dict[str, Array]:
    """The dense tensors as arrays, where they are."""
    return {
        layout.check_name(name, "tensor"): dlpack.to_array(value, f"tensor {name!r}")
        for name, value in as_dict(tensors, "tensors").items()
    }


def blob_bytes(blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    """The blobs as bytes."""
    given = as_dict(blobs, "blobs")
    for name, value in given.items():
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidInputError(f"blob {name!r}: a {type(value).__name__} where bytes belong")
    return {layout.check_name(name, "blob"): bytes(value) for name, value in given.items()}
