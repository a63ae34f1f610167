"""Some rows of each table of a file or of a checkpoint, evenly spread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes, layout
from checkrun_format.cli.address import checkpoint_at
from checkrun_format.errors import InvalidInputError
from checkrun_format.interchange import inventory, kinds
from checkrun_format.interchange.inventory import FileTable
from checkrun_format.rows import Ids
from checkrun_format.view import TableView


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A field that can be quantized: floating-point rows with columns, at least one.

    Attributes
    ----------
    rows : int
        Of the table.
    """

    table: str
    field: str
    dtype: str
    columns: int
    rows: int
    source: FileTable | TableView

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that is not quantized."""
        return self.columns * dtypes.logical(self.dtype).itemsize

    def sample(self, count: int) -> npt.NDArray[Any]:
        """Values (n, columns) of at most `count` evenly spread rows; no others are read."""
        chosen = np.linspace(0, self.rows - 1, min(count, self.rows)).astype(np.int64)
        if isinstance(self.source, FileTable):
            return np.require(self.source.fields[self.field][chosen], requirements="A")
        ids: Ids = self.source.keys()[chosen] if self.source.addressing == "keyed" else chosen
        taken: npt.NDArray[Any] = self.source.take(ids, fields=[self.field])[self.field]
        return taken


@contextlib.contextmanager
def places(source: str, patterns: Sequence[str], kind: str | None) -> Iterator[list[Place]]:
    """What can be quantized in a file of tensors, or else at RUN[@SEQ]; valid inside the `with`.

    Raises
    ------
    InvalidInputError
        There is nothing, or a pattern without a match.
    NotFoundError, DamagedError, UnsupportedVersionError, StorageError
        As `kinds.opened` or `checkpoint_at`.
    """
    with contextlib.ExitStack() as stack:
        if kind is not None or Path(source).is_file():
            contents = stack.enter_context(kinds.opened(Path(source), kind))
            found = list(_of_file(list(inventory.take(contents, patterns, ()).tables.values()), patterns))
        else:
            found = list(_of_run(source, patterns))
        if not found:
            raise InvalidInputError(
                f"{source}: no table of floating-point rows to quantize; in a file --table says which tensors "
                f"(rows, columns) are tables, by default those of more than {inventory.MANY_ROWS:,} rows"
            )
        yield found


def _of_file(tables: Sequence[FileTable], patterns: Sequence[str]) -> Iterator[Place]:
    for table in tables:
        if _is_meant(table.name, patterns):
            yield from _fields(table, table.spec(), table.rows, table.name)


def _of_run(address: str, patterns: Sequence[str]) -> Iterator[Place]:
    checkpoint = checkpoint_at(address)
    for pattern in patterns:
        if not any(layout.matches(name, pattern) for name in checkpoint.tables):
            known = ", ".join(map(repr, checkpoint.tables[:5])) or "none"
            raise InvalidInputError(
                f"--table {pattern!r} matches no table; checkpoint {checkpoint.sequence} has {known}"
            )
    for name in checkpoint.tables:
        if _is_meant(name, patterns):
            table = checkpoint.table(name)
            yield from _fields(table, [(f.name, f.dtype, f.columns) for f in table.fields], len(table), name)


def _is_meant(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(layout.matches(name, pattern) for pattern in patterns)


def _fields(
    source: FileTable | TableView, fields: Sequence[tuple[str, str, int | None]], rows: int, table: str
) -> Iterator[Place]:
    for name, dtype, columns in fields:
        if rows and columns is not None and dtype in dtypes.FLOATING:
            yield Place(table=table, field=name, dtype=dtype, columns=columns, rows=rows, source=source)
