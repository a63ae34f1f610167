"""What one rank holds of a table, and the parts that it makes of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.rows import Ids, Mask
from checkrun_format.staging import StagedWriter


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The logical name of a dtype of torch.

    Raises
    ------
    InvalidInputError
        The format cannot store it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in dtypes.STORED:
        raise InvalidInputError(f"{what}: torch dtype {name} cannot be stored")
    return name


def on_host(values: Any) -> Any:
    """A tensor on the CPU, without its history; anything else as it is."""
    return values.detach().cpu() if isinstance(values, torch.Tensor) else values


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rectangle of a field that this rank holds.

    Parameters
    ----------
    rows, columns : (low, high)
        Which of the whole field; `columns` None if it has one value per row.
    of : int
        Rows of the whole table.
    width : int or None
        Columns of the whole field.
    dtype : str
        Logical name.
    values : tensor or array, optional
        (high - low, columns) or (high - low,), on any device; needed where parts are made.
    cut : bool
        Whether `values` are those of the rows to be stored alone.
    """

    table: str
    field: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    of: int
    width: int | None
    dtype: str
    values: Any = None
    cut: bool = False

    @property
    def empty(self) -> bool:
        """Whether it holds nothing."""
        return self.rows[0] >= self.rows[1] or (self.columns is not None and self.columns[0] >= self.columns[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which rows of a table a save stores, and which of them are recent."""

    storage: str
    of: int
    rows: Ids | None
    """Ascending; None: every row."""
    recent: Ids | None
    """Ascending; None: all that are stored."""

    def within(self, low: int, high: int) -> Ids | None:
        """The rows to be stored of a range; None: all."""
        if self.rows is None:
            return None
        first, last = np.searchsorted(self.rows, [low, high])
        return self.rows[first:last]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartValues:
    """One part, its values at hand."""

    table: str
    choice: Choice
    rows: tuple[int, int] | Ids
    columns: dict[str, tuple[int, int]]
    fields: dict[str, Any]

    def put(self, writer: StagedWriter) -> None:
        """Store it."""
        fields = {name: on_host(values) for name, values in self.fields.items()}
        recent: bool | Mask = True
        if self.choice.recent is not None:
            held = np.arange(*self.rows) if isinstance(self.rows, tuple) else self.rows
            recent = np.isin(held, self.choice.recent, assume_unique=True)
        writer.put(
            self.table,
            fields,
            rows=self.rows,
            of=self.choice.of,
            columns=self.columns,
            storage=self.choice.storage,
            recent=recent,
        )


def parts(shards: Iterable[Shard], choices: dict[str, Choice]) -> Iterator[PartValues]:
    """The parts that a rank stores; fields that it holds of the same rows share a part.

    What is stored whole is a view of the shard, changed rows are gathered on its device.
    """
    for table, rows, group in _together(shards):
        choice = choices[table]
        ids = choice.within(*rows)
        if ids is not None and not ids.size:
            continue
        held: tuple[int, int] | Ids = rows if ids is None else ids
        yield PartValues(
            table=table,
            choice=choice,
            rows=held,
            columns={shard.field: shard.columns for shard in group if shard.columns is not None},
            fields={shard.field: _taken(shard, ids) for shard in group},
        )


def _together(shards: Iterable[Shard]) -> Iterator[tuple[str, tuple[int, int], list[Shard]]]:
    """Shards of one table and the same rows, each field once."""
    groups: dict[tuple[str, tuple[int, int], int], list[Shard]] = {}
    seen: dict[tuple[str, str, tuple[int, int]], int] = {}
    for shard in shards:
        if shard.empty and shard.of:
            continue
        again = seen.get((shard.table, shard.field, shard.rows), 0)
        seen[shard.table, shard.field, shard.rows] = again + 1
        groups.setdefault((shard.table, shard.rows, again), []).append(shard)
    for (table, rows, _), group in groups.items():
        yield table, rows, group


def staged(shard: Shard, choice: Choice) -> Shard:
    """A shard whose values to be stored lie in memory of their own, on the CPU: training may go on."""
    assert shard.values is not None
    values = _taken(shard, choice.within(*shard.rows))
    alone = values.untyped_storage().data_ptr() != shard.values.untyped_storage().data_ptr()
    return replace(shard, values=values.to("cpu", copy=not alone), cut=True)


def _taken(shard: Shard, ids: Ids | None) -> Any:
    assert shard.values is not None
    if shard.cut:
        return shard.values
    values: torch.Tensor = shard.values.detach()
    if values.layout != torch.strided:
        raise InvalidInputError(f"table {shard.table!r}, field {shard.field!r}: a {values.layout} tensor")
    if ids is None:
        return values
    return values.index_select(0, torch.from_numpy(ids - shard.rows[0]).to(values.device))


def shared_tables(held: Sequence[Sequence[Shard]]) -> set[str]:
    """The tables of which some row is held by more than one rank: replicas, columns, fields that are cut apart.

    Parameters
    ----------
    held : for each rank, its shards
    """
    spans: dict[str, set[tuple[int, int, int]]] = {}
    for rank, shards in enumerate(held):
        for shard in shards:
            if not shard.empty:
                spans.setdefault(shard.table, set()).add((*shard.rows, rank))
    return {table for table, found in spans.items() if _overlap(sorted(found))}


def _overlap(spans: Sequence[tuple[int, int, int]]) -> bool:
    highest: dict[int, int] = {}
    for low, high, rank in spans:
        if any(end > low for other, end in highest.items() if other != rank):
            return True
        highest[rank] = max(high, highest.get(rank, 0))
    return False


def held_rows(shards: Iterable[Shard]) -> dict[str, list[tuple[int, int]]]:
    """The ranges of rows that a rank holds anything of, by table."""
    found: dict[str, set[tuple[int, int]]] = {}
    for shard in shards:
        if not shard.empty:
            found.setdefault(shard.table, set()).add(shard.rows)
    return {table: sorted(ranges) for table, ranges in found.items()}


def inside(ids: Ids, ranges: Sequence[tuple[int, int]]) -> Mask:
    """For each id, whether it is in one of the ranges."""
    hits = [(ids >= low) & (ids < high) for low, high in ranges]
    return functools.reduce(np.logical_or, hits, np.zeros(ids.size, np.bool_))
