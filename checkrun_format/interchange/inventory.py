"""What the tensors of a file are in a checkpoint: tables, dense tensors, blobs; and what they are called in a file.

In a file that `checkrun export` writes, a table of one field is one tensor of the table's name; the fields of another
are `TABLE.FIELD`. The keys of a keyed table are `TABLE.keys`, blobs `blobs.NAME`. The file's label says all this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from checkrun_format import dtypes, layout
from checkrun_format.errors import InvalidInputError
from checkrun_format.interchange.contents import Array, Contents
from checkrun_format.manifest import Field, TableKind
from checkrun_format.rows import Ids, Selection, as_ids, as_slice, key_dtype_of
from checkrun_format.sources import table_source
from checkrun_format.state import Table

MANY_ROWS: Final = 10_000
"""A tensor (rows, columns) of more rows is a table, if no pattern says what is one."""

WEIGHT: Final = "weight"
"""The field of a table that a file without a label becomes."""


class TableLabel(msgspec.Struct, frozen=True, kw_only=True):
    """Which tensors are a table's fields and keys."""

    fields: dict[str, str]
    keys: str | None = None


class Label(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an export says of the tensors of its file; those that it does not name are dense tensors."""

    tables: dict[str, TableLabel] = {}
    blobs: dict[str, str] = {}
    extra: Any = None
    step: int | None = None
    checkpoint: int | None = None
    fbgemm: dict[str, dict[str, Any]] = {}


def to_text(label: Label) -> str:
    """A label as it stands in a file."""
    return json.dumps(msgspec.to_builtins(label))


def parse_label(text: object) -> Label:
    """A label from its text, or InvalidInputError."""
    try:
        if not isinstance(text, str):
            raise InvalidInputError(f"a {type(text).__name__} where text belongs")
        label = msgspec.convert(json.loads(text), Label)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise InvalidInputError(f"what `checkrun export` wrote about its tensors is damaged: {error}") from error
    if label.fbgemm:
        raise InvalidInputError("it was exported for FBGEMM; export the checkpoint without --fbgemm to import it")
    return label


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTable:
    """A table whose values lie in a file.

    Parameters
    ----------
    fields : mapping
        Field name to an array (rows, columns) or (rows,).
    keys : array (rows,) or None
        The keys of a keyed table, as they stand in the file.
    """

    name: str
    fields: Mapping[str, Array]
    keys: Array | None = None
    _order: list[tuple[Ids, Ids]] = field(default_factory=list, repr=False)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.fields.values())))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(a.dtype.itemsize * int(np.prod(a.shape[1:], dtype=object)) for a in self.fields.values())

    @property
    def main_field(self) -> str:
        """Its only field, or its field `weight`: what `--bits` is about."""
        return next(iter(self.fields)) if len(self.fields) == 1 else WEIGHT

    def spec(self) -> list[tuple[str, str, int | None]]:
        """Name, logical dtype and columns of each field."""
        return [
            (name, dtypes.name_of(array.dtype), int(array.shape[1]) if array.ndim == 2 else None)
            for name, array in self.fields.items()
        ]

    @property
    def kind(self) -> TableKind:
        """What a stored table must have in common with it, to go on from it (LAY-2)."""
        key_dtype = None if self.keys is None else key_dtype_of(self.keys)
        return "dense" if self.keys is None else "keyed", key_dtype, frozenset(self.spec())

    def sorted_keys(self) -> Ids:
        """The keys as int64, ascending."""
        return self._sorted()[0]

    def _sorted(self) -> tuple[Ids, Ids]:
        if not self._order:
            ids = as_ids(np.asarray(self.keys), f"table {self.name!r}, keys")
            order = np.argsort(ids, kind="stable")
            self._order.append((ids[order], order))
        return self._order[0]

    def fetch(self, ids: Selection) -> dict[str, Array]:
        """The rows of some ascending numbers, or keys; aligned, which arrays in a file need not be."""
        if self.keys is not None:
            assert not isinstance(ids, slice)
            keys, order = self._sorted()
            ids = order[np.searchsorted(keys, ids)]
        at = as_slice(ids)
        return {name: np.require(array[at], requirements="A") for name, array in self.fields.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The contents of a file as those of a checkpoint."""

    tables: Mapping[str, FileTable]
    tensors: Mapping[str, Array]
    blobs: Mapping[str, bytes]
    extra: Any
    step: int | None


def take(contents: Contents, patterns: Sequence[str], known: Collection[str]) -> Inventory:
    """Tell tables, tensors and blobs of a file apart.

    Parameters
    ----------
    patterns : texts
        `*`, `?`: tensors (rows, columns) that match are tables. None given: those of more than 10,000 rows; in a file
        that has a label, what it says.
    known : names
        Tables already: what has one of these names stays one, if it has two dimensions and no label says otherwise.

    Raises
    ------
    InvalidInputError
        A dtype that the format lacks, a pattern without a match, a label that is wrong.
    """
    for name, array in contents.arrays.items():
        _check(name, array)
    label = Label() if contents.label is None else parse_label(contents.label)
    rest = dict(contents.arrays)
    tables = {name: _labelled(name, table, rest) for name, table in label.tables.items()}
    blobs = {name: _taken(rest, tensor, f"blob {name!r}").tobytes() for name, tensor in label.blobs.items()}
    is_table = _chooser(rest, patterns, known if contents.label is None else None, tables)
    chosen = [name for name, array in rest.items() if _is_matrix(array) and is_table(name, array)]
    for name in chosen:
        if name in tables:
            raise InvalidInputError(f"table {name!r} is there twice")
        tables[name] = FileTable(name=name, fields={WEIGHT: rest.pop(name)})
    extra = contents.extra if contents.label is None else label.extra
    return Inventory(tables=tables, tensors=rest, blobs=blobs, extra=extra, step=label.step)


def _check(name: str, array: Array) -> None:
    layout.check_name(name, "tensor")
    try:
        dtypes.name_of(array.dtype)
    except InvalidInputError as error:
        raise InvalidInputError(f"tensor {name!r}: {error}") from error


def _chooser(
    arrays: Mapping[str, Array], patterns: Sequence[str], known: Collection[str] | None, labelled: Collection[str]
) -> Callable[[str, Array], bool]:
    """Which tensors (rows, columns) are tables; `known` is None in a file that itself says which others are."""
    for pattern in patterns:
        matching = [name for name in arrays if layout.matches(name, pattern)]
        of_label = [name for name in labelled if layout.matches(name, pattern)]
        if not of_label and not any(_is_matrix(arrays[name]) for name in matching):
            raise InvalidInputError(_no_table(pattern, arrays, matching))

    def is_table(name: str, array: Array) -> bool:
        if any(layout.matches(name, pattern) for pattern in patterns):
            return True
        return known is not None and (name in known or (not patterns and len(array) > MANY_ROWS))

    return is_table


def _is_matrix(array: Array) -> bool:
    return array.ndim == 2 and array.shape[1] > 0


def _no_table(pattern: str, arrays: Mapping[str, Array], matching: Sequence[str]) -> str:
    if matching:
        shape = arrays[matching[0]].shape
        return f"--table {pattern!r}: tensor {matching[0]!r} has shape {shape}; tables are made of (rows, columns)"
    two = [name for name, array in arrays.items() if _is_matrix(array)]
    known = ", ".join(map(repr, two[:5])) or "none"
    return f"--table {pattern!r} matches no tensor; tensors (rows, columns) are {known}{' ...' * (len(two) > 5)}"


def _labelled(name: str, label: TableLabel, arrays: dict[str, Array]) -> FileTable:
    what = f"table {name!r}"
    fields = {f: _taken(arrays, tensor, f"{what}, field {f!r}") for f, tensor in label.fields.items()}
    keys = None if label.keys is None else _taken(arrays, label.keys, f"{what}, keys")
    table_source(name, Table(fields, keys=keys))  # refuses what is no table
    return FileTable(name=name, fields=fields, keys=keys)


def _taken(arrays: dict[str, Array], tensor: str, what: str) -> Array:
    if tensor not in arrays:
        raise InvalidInputError(f"{what}: tensor {tensor!r} is not in the file")
    return arrays.pop(tensor)


def label_table(name: str, fields: Sequence[Field], *, keyed: bool) -> TableLabel:
    """What the fields and keys of a table are called in a file."""
    alone = len(fields) == 1
    return TableLabel(
        fields={f.name: name if alone else f"{name}.{f.name}" for f in fields}, keys=f"{name}.keys" if keyed else None
    )
