"""What a trainer hands over and gets back: tables, tensors, and its own small state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format import dlpack, dtypes, layout, quantize
from checkrun_format.dlpack import Array
from checkrun_format.errors import InvalidInputError
from checkrun_format.quantize import Method
from checkrun_format.rows import Ids, Selection, as_ids, check_bounds, check_sign, length, sorted_ids

ArrayLike: TypeAlias = Any
"""numpy, or anything with `__dlpack__` (torch, jax, cupy, ...), on the CPU or on a device."""


class All:
    """The type of `ALL`."""

    def __repr__(self) -> str:
        return "checkrun_format.ALL"


ALL: Final = All()
"""`changed=ALL`: every row may have changed."""


class Inherit:
    """The type of `INHERIT`."""

    def __repr__(self) -> str:
        return "checkrun_format.INHERIT"


EncoderChoice: TypeAlias = "str | Method | Mapping[str, str | Method] | None"

INHERIT: Final = Inherit()
"""`bits=INHERIT`: as the run says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """Name, logical dtype, columns (None for one value per row) and place of a field."""

    name: str
    dtype: str
    columns: int | None
    device: str | None = None
    """Where its values are; None: the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """Where a table's values come from when they are not in memory; see `Table.from_function`."""

    fetch: Callable[[Ids], Mapping[str, ArrayLike]]
    rows: int | None
    fields: Mapping[str, tuple[npt.DTypeLike, int | None]]
    device: str | None


class Table:
    """An embedding table: row-aligned fields, and which of their rows changed.

    Parameters
    ----------
    fields : mapping of text to array
        Field name (`[a-z][a-z0-9_]{0,63}`) to an array (rows, columns) or (rows,). All rows of the table. Of those on
        a device, rows are gathered and encoded there, piece by piece.
    changed : row ids, boolean mask of (rows,), or ALL
        The rows changed since the run's origin (its last committed save or restore) that no save was told yet.
        Required once the table has been saved. In a keyed table: keys, or a mask aligned with `keys`. New rows and
        keys need not be named.
    keys : array (rows,) of int64 or uint64
        Makes the table keyed: the key of each row. Together they are every live key.
    deleted : keys
        Keys deleted since the run's origin that no save was told yet; those that are not in `keys` need not be named.
    bits : None, 1..8, or mapping of field name to these
        Overrides the run's `bits` for this table. A plain number means the field `weight`.
    encoder : str, Method, or mapping of field name to these
        How fields are quantized that are, in place of the run's `encoder`.
    store_as : mapping of field name to "float16" or "bfloat16"
        Store a raw float32 field narrower; rows that do not fit are kept exactly.
    """

    def __init__(
        self,
        fields: Mapping[str, ArrayLike],
        *,
        changed: ArrayLike | All | None = None,
        keys: ArrayLike | None = None,
        deleted: ArrayLike | None = None,
        bits: int | Mapping[str, int | None] | Inherit | None = INHERIT,
        encoder: EncoderChoice = None,
        store_as: Mapping[str, str] | None = None,
    ) -> None:
        self.fields = _as_dict(fields, "fields of a table")
        self.changed = changed
        self.keys = keys
        self.deleted = deleted
        self.bits = bits
        self.encoder = encoder
        self.store_as = store_as
        self.function: Function | None = None

    @classmethod
    def from_function(
        cls,
        fetch: Callable[[Ids], Mapping[str, ArrayLike]],
        *,
        fields: Mapping[str, tuple[npt.DTypeLike, int | None]],
        rows: int | None = None,
        keys: ArrayLike | None = None,
        device: str | None = None,
        changed: ArrayLike | All | None = None,
        deleted: ArrayLike | None = None,
        bits: int | Mapping[str, int | None] | Inherit | None = INHERIT,
        encoder: EncoderChoice = None,
        store_as: Mapping[str, str] | None = None,
    ) -> Table:
        """A table whose values are asked for by row, so that only rows that are stored are ever gathered.

        Parameters
        ----------
        fetch : callable
            Takes row numbers (or keys), an int64 array (n,), in ascending order; gives for each field an array
            (n, columns) or (n,). It may be asked for the same rows again.
        fields : mapping
            Field name to (dtype, columns); columns None for one value per row.
        rows : int
            Number of rows of a dense table; or else `keys`.
        device : str
            The torch device that all answers are on, as in "cuda:0", to be encoded there; by default the CPU.
        """
        table = cls({}, changed=changed, keys=keys, deleted=deleted, bits=bits, encoder=encoder, store_as=store_as)
        table.function = Function(fetch=fetch, rows=rows, fields=_as_dict(fields, "fields of a table"), device=device)
        return table

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(np.shape(value))}" for name, value in self.fields.items())
        return f"Table({shapes}{', keyed' if self.keys is not None else ''})"


@dataclass(slots=True)
class State:
    """All that one checkpoint holds.

    Parameters
    ----------
    tables : mapping of text to Table
        Names are any text.
    tensors : mapping of text to array
        Dense tensors, of any dtype of numbers, truth values or times, bfloat16 and float8 included; stored losslessly
        in every checkpoint.
    extra : JSON value
        Trainer and reader state. Tuples come back as lists.
    blobs : mapping of text to bytes
        Opaque binary state. Never interpreted, never unpickled.
    """

    tables: Mapping[str, Table] = field(default_factory=dict)
    tensors: Mapping[str, ArrayLike] = field(default_factory=dict)
    extra: Any = None
    blobs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """A table, checked: what it is, and how to get at its values."""

    name: str
    fields: tuple[FieldSpec, ...]
    rows: int
    keys: Ids | None
    """Ascending; None in a dense table."""
    order: Ids | None
    """Which of the caller's rows each of these is; None if they came in this order."""
    key_dtype: str | None
    changed: Ids | All | None
    """Ascending row numbers or keys."""
    deleted: Ids
    bits: int | Mapping[str, int | None] | Inherit | None
    encoders: Mapping[str, Method]
    store_as: Mapping[str, str]
    fetch: Callable[[Selection], dict[str, Array]]
    """Values of rows by position: in the order of row numbers, or of `keys`."""
    transient: bool
    """Whether they may change with the next call."""

    @property
    def addressing(self) -> str:
        """`dense` or `keyed`."""
        return "dense" if self.keys is None else "keyed"


def _as_dict(given: Any, what: str) -> dict[Any, Any]:
    if not hasattr(given, "keys"):
        raise InvalidInputError(f"{what}: a {type(given).__name__} where a mapping belongs")
    return dict(given)


def table_sources(tables: Mapping[str, Table]) -> dict[str, TableSource]:
    """Check all tables of a state; by name."""
    return {str(name): table_source(name, table) for name, table in _as_dict(tables, "tables").items()}


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
        rows = _common_rows(text, arrays)
        keys, key_dtype, order = _keys(text, table, rows)
        fetch = _array_fetch(arrays, order)
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


def _common_rows(table: str, arrays: Mapping[str, Array]) -> int:
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise InvalidInputError(f"table {table!r}: its fields have different numbers of rows: {counts}")
    return next(iter(counts.values()))


def _array_fetch(arrays: Mapping[str, Array], order: Ids | None) -> Callable[[Selection], dict[str, Array]]:
    def fetch(selection: Selection) -> dict[str, Array]:
        at = selection if order is None else order[selection]
        return {name: array[at] for name, array in arrays.items()}

    return fetch


def _function_fetch(
    table: str, specs: Sequence[FieldSpec], function: Function, keys: Ids | None
) -> Callable[[Selection], dict[str, Array]]:
    def fetch(selection: Selection) -> dict[str, Array]:
        ids = _positions(selection) if keys is None else keys[selection]
        return fetched(table, specs, function.fetch(ids.copy()), length(selection))

    return fetch


def field_arrays(
    table: str, fields: Mapping[str, ArrayLike], devices: Mapping[str, str | None] | None = None
) -> dict[str, Array]:
    """The fields of a table as arrays of one or two dimensions, where they are; those of `devices` must be there."""
    if not isinstance(fields, Mapping) or not fields:
        raise InvalidInputError(f"table {table!r}: no fields; give a mapping of field names to arrays")
    arrays = {}
    for name, value in fields.items():
        what = f"table {table!r}, field {layout.check_field_name(name, table)!r}"
        device = (devices or {}).get(name)
        arrays[name] = dlpack.to_array(value, what) if device is None else dlpack.to_device_array(value, what, device)
        _check_shape(arrays[name].shape, what)
    return arrays


def _check_shape(shape: tuple[int, ...], what: str) -> None:
    if len(shape) not in (1, 2):
        raise InvalidInputError(f"{what}: shape {shape}; fields are (rows, columns) or (rows,)")
    if len(shape) == 2 and shape[1] == 0:
        raise InvalidInputError(f"{what}: shape {shape} has no columns")


def spec_of(name: str, array: Array) -> FieldSpec:
    """The spec of a field, from its array."""
    columns = int(array.shape[1]) if array.ndim == 2 else None
    return FieldSpec(name=name, dtype=dtypes.name_of(array.dtype), columns=columns, device=dlpack.device_of(array))


def _function_fields(name: str, table: Table, function: Function) -> tuple[tuple[FieldSpec, ...], int]:
    device = None if function.device is None else dlpack.checked_device(function.device)
    specs = tuple(_spec_given(name, field_name, spec, device) for field_name, spec in function.fields.items())
    if not specs:
        raise InvalidInputError(f"table {name!r}: no fields")
    if (function.rows is None) == (table.keys is None):
        raise InvalidInputError(f"table {name!r}: from_function takes either rows= or keys=")
    if function.rows is not None:
        return specs, _whole(function.rows, name)
    return specs, len(dlpack.to_numpy(table.keys, f"table {name!r}, keys"))


def _whole(rows: object, name: str) -> int:
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 0:
        raise InvalidInputError(f"table {name!r}: rows={rows!r} is no number of rows")
    return int(rows)


def _spec_given(table: str, name: str, spec: object, device: str | None) -> FieldSpec:
    layout.check_field_name(name, table)
    if not isinstance(spec, tuple) or len(spec) != 2:
        raise InvalidInputError(f"table {table!r}, field {name!r}: give (dtype, columns), not {spec!r}")
    dtype, columns = spec
    if columns is not None and (isinstance(columns, bool) or not isinstance(columns, int | np.integer) or columns < 1):
        raise InvalidInputError(f"table {table!r}, field {name!r}: columns {columns!r}; give None or at least 1")
    try:
        known = dtype if isinstance(dtype, str) and dtype in dtypes.STORED else dtypes.name_of(dtype)
    except InvalidInputError as error:
        raise InvalidInputError(f"table {table!r}, field {name!r}: {error}") from error
    return FieldSpec(name=name, dtype=known, columns=None if columns is None else int(columns), device=device)


def _positions(selection: Selection) -> Ids:
    return np.arange(selection.start, selection.stop) if isinstance(selection, slice) else selection


def fetched(
    table: str, specs: Sequence[FieldSpec], values: Mapping[str, ArrayLike], count: int, moved: Collection[str] = ()
) -> dict[str, Array]:
    """The arrays that a function gave for some rows, checked; those of the fields `moved` may be on any device."""
    devices = {spec.name: spec.device for spec in specs if spec.name not in moved}
    arrays = field_arrays(table, values, devices)
    for spec in specs:
        wanted = (count,) if spec.columns is None else (count, spec.columns)
        got = arrays.get(spec.name)
        if got is not None and spec.name in devices and dlpack.device_of(got) != spec.device:
            raise InvalidInputError(
                f"table {table!r}, field {spec.name!r}: the function gave values on {dlpack.device_of(got)}: say so by "
                "device= of Table.from_function"
            )
        if got is None or got.shape != wanted or dtypes.name_of(got.dtype) != spec.dtype:
            found = "nothing" if got is None else f"{got.dtype} {got.shape}"
            raise InvalidInputError(
                f"table {table!r}, field {spec.name!r}: the function gave {found} for {spec.dtype} {wanted}"
            )
    return {spec.name: arrays[spec.name] for spec in specs}


def _keys(name: str, table: Table, rows: int) -> tuple[Ids | None, str | None, Ids | None]:
    """Keys in ascending order, their dtype, and the order that sorts them (None if they are sorted)."""
    if table.keys is None:
        return None, None, None
    given = dlpack.to_numpy(table.keys, f"table {name!r}, keys")
    keys = as_ids(given, f"table {name!r}, keys")
    if keys.size != rows:
        raise InvalidInputError(f"table {name!r}: {keys.size} keys for {rows} rows")
    key_dtype = "uint64" if given.dtype.kind == "u" and given.dtype.itemsize == 8 else "int64"
    if keys.size < 2 or bool((keys[1:] > keys[:-1]).all()):
        return keys.copy(), key_dtype, None
    order = np.argsort(keys, kind="stable")
    return sorted_ids(keys, f"table {name!r}, keys"), key_dtype, order


def _changed(
    name: str, changed: ArrayLike | All | None, rows: int, keys: Ids | None, key_dtype: str | None, order: Ids | None
) -> Ids | All | None:
    if changed is None or isinstance(changed, All):
        return changed
    what = f"table {name!r}, changed"
    given = dlpack.to_numpy(list(changed) if isinstance(changed, set | frozenset) else changed, what)
    if given.dtype == np.bool_:
        return _from_mask(given, what, rows, keys, order)
    ids = sorted_ids(given, what)
    check_sign(given, as_ids(given, what), key_dtype, what)
    if keys is None:
        check_bounds(ids, rows, what)
    return ids.copy()


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
    given = dlpack.to_numpy(table.deleted, what)
    check_sign(given, as_ids(given, what), key_dtype, what)
    return sorted_ids(given, what).copy()


def checked_encoder(encoder: str | Method, what: str) -> Method:
    """Accept an encoder, or raise InvalidInputError."""
    chosen = encoder if isinstance(encoder, Method) else Method(encoder)
    if chosen.name not in quantize.ENCODERS:
        raise InvalidInputError(f"{what}: unknown {chosen.name!r}; known are {', '.join(sorted(quantize.ENCODERS))}")
    return chosen


def checked_encoders(name: str, given: EncoderChoice, fields: Iterable[FieldSpec]) -> Mapping[str, Method]:
    """Accept the encoders of a table, or raise InvalidInputError; by field."""
    names = [spec.name for spec in fields]
    if given is None or isinstance(given, str | Method):
        return {} if given is None else dict.fromkeys(names, checked_encoder(given, f"table {name!r}, encoder"))
    chosen = _as_dict(given, f"table {name!r}, encoder")
    if not set(chosen) <= set(names):
        raise InvalidInputError(f"table {name!r}, encoder: the table has no field {min(set(chosen) - set(names))!r}")
    return {field: checked_encoder(e, f"table {name!r}, encoder of {field!r}") for field, e in chosen.items()}


def checked_store_as(name: str, given: Mapping[str, str] | None, fields: Iterable[FieldSpec]) -> Mapping[str, str]:
    """Accept `store_as` of a table, or raise InvalidInputError."""
    by_name = {spec.name: spec for spec in fields}
    chosen = _as_dict(given or {}, f"table {name!r}, store_as")
    for field_name, dtype in chosen.items():
        what = f"table {name!r}, store_as {field_name!r}"
        if field_name not in by_name:
            raise InvalidInputError(f"{what}: the table has no such field")
        if dtype not in ("float16", "bfloat16") or by_name[field_name].dtype != "float32":
            raise InvalidInputError(f"{what}: a float32 field can be stored as 'float16' or 'bfloat16', not {dtype!r}")
    return chosen


def tensor_arrays(tensors: Mapping[str, ArrayLike]) -> dict[str, Array]:
    """The dense tensors as arrays, where they are."""
    return {
        layout.check_name(name, "tensor"): dlpack.to_array(value, f"tensor {name!r}")
        for name, value in _as_dict(tensors, "tensors").items()
    }


def blob_bytes(blobs: Mapping[str, bytes]) -> dict[str, bytes]:
    """The blobs as bytes."""
    given = _as_dict(blobs, "blobs")
    for name, value in given.items():
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidInputError(f"blob {name!r}: a {type(value).__name__} where bytes belong")
    return {layout.check_name(name, "blob"): bytes(value) for name, value in given.items()}


def extra_json(extra: object) -> bytes:
    """`extra` as UTF-8 JSON.

    Raises
    ------
    InvalidInputError
        Naming the place of the first value that JSON cannot carry.
    """
    _check_json(extra, "extra", 0)
    try:
        return layout.to_json(extra)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"extra is not JSON: {error}") from error


def _check_json(value: object, place: str, depth: int) -> None:
    if depth > 200:
        raise InvalidInputError(f"{place} is nested deeper than 200 levels, or contains itself")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InvalidInputError(f"{place}: key {key!r} is not text; JSON objects have text keys only")
            _check_json(inner, f"{place}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_json(inner, f"{place}[{index}]", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidInputError(f"{place} is {value}, which JSON cannot carry")
    elif not isinstance(value, str | int | float | None):
        advice = (
            "blobs= takes bytes" if isinstance(value, bytes | bytearray) else "convert it: int(), float(), tolist()"
        )
        raise InvalidInputError(f"{place} is of type {type(value).__name__}, which JSON cannot carry; {advice}")


def parse_json(data: bytes) -> Any:
    """The inverse of `extra_json`."""
    return json.loads(data)
