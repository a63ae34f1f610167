"""A checkpoint as a file of tensors: tables are resolved, decoded and written some megabytes at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from checkrun_format import dtypes
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import InvalidInputError, UnsupportedFeatureError
from checkrun_format.interchange import kinds
from checkrun_format.interchange.contents import PIECE_BYTES, Array, Entry
from checkrun_format.interchange.inventory import Label, TableLabel, label_table, to_text
from checkrun_format.manifest import Field
from checkrun_format.view import TableView

Advance: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote: bytes of the file, and how many tensors, tables and blobs are in it."""

    file_bytes: int
    tensors: int
    tables: int
    blobs: int


def export_checkpoint(
    checkpoint: Checkpoint,
    file: str | os.PathLike[str],
    *,
    kind: str | None = None,
    overwrite: bool = False,
    advance: Advance = lambda count: None,
) -> Exported:
    """Write a checkpoint as a file of tensors; `import_file` makes the same state of it.

    A table of one field is a tensor of the table's name; the other names are told in `inventory`. Tables and the
    trainer's state are described in a label: the metadata of a safetensors file, the `_metadata` of a state dict, the
    array `__checkrun__` of an npz. A state dict needs as much memory as the file has bytes; the other kinds are
    written piece by piece.

    Parameters
    ----------
    kind : "safetensors", "torch" or "npz"
        By default as the suffix of the file says.
    overwrite : bool
        Whether a file of this name may be replaced, once the new one is complete.
    advance : function
        Is told the bytes that were written, as it goes.

    Raises
    ------
    InvalidInputError
        The file exists, two tensors would have one name, or this kind of file cannot hold one of them.
    DamagedError, StorageError
    """
    path = Path(file)
    kind = kinds.kind_of(path, kind)
    tables = {name: checkpoint.table(name) for name in checkpoint.tables}
    labels = {name: label_table(name, view.fields, keyed=view.addressing == "keyed") for name, view in tables.items()}
    blobs = {name: f"blobs.{name}" for name in checkpoint.blobs}
    entries = [entry for name, view in tables.items() for entry in table_entries(view, labels[name])]
    entries += dense_entries(checkpoint)
    entries += [_blob(checkpoint, name, tensor) for name, tensor in blobs.items()]
    label = Label(
        tables=labels, blobs=blobs, extra=checkpoint.extra, step=checkpoint.step, checkpoint=checkpoint.sequence
    )
    size = write(path, kind, entries, label, overwrite=overwrite, advance=advance)
    return Exported(file_bytes=size, tensors=len(checkpoint.tensors), tables=len(tables), blobs=len(blobs))


def write(path: Path, kind: str, entries: Sequence[Entry], label: Label, *, overwrite: bool, advance: Advance) -> int:
    """Write entries and their label; return the bytes of the file."""
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise InvalidInputError(f"two of its tables, tensors and blobs would be called {entry.name!r} in a file")
        seen.add(entry.name)
    watched = [_watched(entry, advance) for entry in entries]
    return kinds.write(path, kind, watched, to_text(label), overwrite=overwrite)


def _watched(entry: Entry, advance: Advance) -> Entry:
    def pieces() -> Iterator[Array]:
        for piece in entry.pieces():
            yield piece
            advance(piece.nbytes)

    return Entry(name=entry.name, dtype=entry.dtype, shape=entry.shape, pieces=pieces)


def dense_entries(checkpoint: Checkpoint) -> list[Entry]:
    """The dense tensors of a checkpoint."""
    return [_tensor(checkpoint, name, *told) for name, told in checkpoint.tensor_shapes.items()]


def _tensor(checkpoint: Checkpoint, name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    if dtype not in dtypes.STORED:
        raise UnsupportedFeatureError(f"tensor {name!r}: unknown dtype {dtype!r}")
    return Entry(name=name, dtype=dtype, shape=shape, pieces=lambda: [checkpoint.tensor(name)])


def _blob(checkpoint: Checkpoint, name: str, tensor: str) -> Entry:
    data = checkpoint.blob(name)
    return Entry(name=tensor, dtype="uint8", shape=(len(data),), pieces=lambda: [np.frombuffer(data, np.uint8)])


def table_entries(view: TableView, label: TableLabel) -> list[Entry]:
    """The fields and keys of a table."""
    entries = [_field(view, f, label.fields[f.name]) for f in view.fields]
    return entries if label.keys is None else [*entries, keys_entry(view, label.keys)]


def keys_entry(view: TableView, tensor: str) -> Entry:
    """The keys of a keyed table, in the order of its rows."""
    keys = view.keys()
    return Entry(name=tensor, dtype=keys.dtype.name, shape=keys.shape, pieces=lambda: [keys])


def _field(view: TableView, f: Field, tensor: str) -> Entry:
    shape = (len(view),) if f.columns is None else (len(view), f.columns)
    step = rows_at_a_time(f)

    def pieces() -> Iterator[Array]:
        for low in range(0, len(view), step):
            yield view.read(slice(low, low + step), fields=[f.name])[f.name]

    return Entry(name=tensor, dtype=f.dtype, shape=shape, pieces=pieces)


def rows_at_a_time(f: Field) -> int:
    """Rows of a field that are decoded and written at a time."""
    return max(1, PIECE_BYTES // (dtypes.logical(f.dtype).itemsize * (f.columns or 1)))
