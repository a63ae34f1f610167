"""What a trainer hands over and gets back: tables, tensors, and its own small state; and a table once it is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format.dlpack import Array
from checkrun_format.errors import InvalidInputError
from checkrun_format.manifest import TableKind
from checkrun_format.quantize import Method
from checkrun_format.rows import Ids, Selection

ArrayLike: TypeAlias = Any
"""numpy, or anything with `__dlpack__` (torch, jax, cupy, ...), on the CPU or on a device."""

EncoderChoice: TypeAlias = "str | Method | Mapping[str, str | Method] | None"


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
        self.fields = as_dict(fields, "fields of a table")
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
        table.function = Function(fetch=fetch, rows=rows, fields=as_dict(fields, "fields of a table"), device=device)
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

    @property
    def kind(self) -> TableKind:
        """What a stored table must have in common with it, to be laid under it (LAY-2)."""
        return self.addressing, self.key_dtype, frozenset((f.name, f.dtype, f.columns) for f in self.fields)


def as_dict(given: Any, what: str) -> dict[Any, Any]:
    """Accept a mapping, or raise InvalidInputError."""
    if not hasattr(given, "keys"):
        raise InvalidInputError(f"{what}: a {type(given).__name__} where a mapping belongs")
    return dict(given)
