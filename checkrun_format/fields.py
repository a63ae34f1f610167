"""The fields of a table, checked: their arrays, and how they are asked to be stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from checkrun_format import dlpack, dtypes, layout, quantize
from checkrun_format.dlpack import Array
from checkrun_format.errors import InvalidInputError
from checkrun_format.integers import whole
from checkrun_format.quantize import Method
from checkrun_format.rows import Ids, Selection
from checkrun_format.state import ArrayLike, EncoderChoice, FieldSpec, as_dict

_MOST_COLUMNS = 2**27 - 1
"""A row of them, of whatever dtype, is within a chunk (ZAR-2)."""


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
    if len(shape) == 2 and shape[1] > _MOST_COLUMNS:
        raise InvalidInputError(f"{what}: {shape[1]} columns; at most {_MOST_COLUMNS} can be stored")


def common_rows(table: str, arrays: Mapping[str, Array]) -> int:
    """How many rows the fields of a table have, all of them the same."""
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise InvalidInputError(f"table {table!r}: its fields have different numbers of rows: {counts}")
    return next(iter(counts.values()))


def array_fetch(arrays: Mapping[str, Array], order: Ids | None) -> Callable[[Selection], dict[str, Array]]:
    """What gives the values of some rows, by position; in the order `order` if the arrays have another."""

    def fetch(selection: Selection) -> dict[str, Array]:
        at = selection if order is None else order[selection]
        return {name: array[at] for name, array in arrays.items()}

    return fetch


def spec_of(name: str, array: Array) -> FieldSpec:
    """The spec of a field, from its array."""
    columns = int(array.shape[1]) if array.ndim == 2 else None
    return FieldSpec(name=name, dtype=dtypes.name_of(array.dtype), columns=columns, device=dlpack.device_of(array))


def spec_given(table: str, name: str, spec: object, device: str | None) -> FieldSpec:
    """The spec of a field, from what a table of a function says of it: (dtype, columns)."""
    layout.check_field_name(name, table)
    if not isinstance(spec, tuple) or len(spec) != 2:
        raise InvalidInputError(f"table {table!r}, field {name!r}: give (dtype, columns), not {spec!r}")
    dtype, columns = spec
    if columns is not None:
        refusal = f"columns {columns!r}; give None or a number from 1 to {_MOST_COLUMNS}"
        columns = whole(columns, f"table {table!r}, field {name!r}: {refusal}", least=1, most=_MOST_COLUMNS)
    try:
        known = dtype if isinstance(dtype, str) and dtype in dtypes.STORED else dtypes.name_of(dtype)
    except InvalidInputError as error:
        raise InvalidInputError(f"table {table!r}, field {name!r}: {error}") from error
    return FieldSpec(name=name, dtype=known, columns=columns, device=device)


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
    chosen = as_dict(given, f"table {name!r}, encoder")
    if not set(chosen) <= set(names):
        raise InvalidInputError(f"table {name!r}, encoder: the table has no field {min(set(chosen) - set(names))!r}")
    return {field: checked_encoder(e, f"table {name!r}, encoder of {field!r}") for field, e in chosen.items()}


def checked_store_as(name: str, given: Mapping[str, str] | None, fields: Iterable[FieldSpec]) -> Mapping[str, str]:
    """Accept `store_as` of a table, or raise InvalidInputError."""
    by_name = {spec.name: spec for spec in fields}
    chosen = as_dict(given or {}, f"table {name!r}, store_as")
    for field_name, dtype in chosen.items():
        what = f"table {name!r}, store_as {field_name!r}"
        if field_name not in by_name:
            raise InvalidInputError(f"{what}: the table has no such field")
        if dtype not in ("float16", "bfloat16") or by_name[field_name].dtype != "float32":
            raise InvalidInputError(f"{what}: a float32 field can be stored as 'float16' or 'bfloat16', not {dtype!r}")
    return chosen
