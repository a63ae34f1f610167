"""What a save stores of a state, table by table: which rows, as which part and entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from checkrun_format.blocks import FieldPlan, Values
from checkrun_format.errors import InvalidInputError
from checkrun_format.fields import fetched
from checkrun_format.forecast import TablePlanned
from checkrun_format.manifest import Field, TableEntry
from checkrun_format.planning import TablePlan
from checkrun_format.quantize import Quantized
from checkrun_format.rows import Selection
from checkrun_format.state import ArrayLike, TableSource
from checkrun_format.tracking import Touched, of_ids
from checkrun_format.writer import PartList, PartSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a save stores of one table: which rows, by position in it as it was given, and how fields are encoded."""

    rows: Selection
    count: int
    fields: Sequence[FieldPlan]


Stage: TypeAlias = Callable[[Mapping[str, Stored]], Mapping[str, Mapping[str, ArrayLike]]]
"""Gives for each table and field the values of just the rows that are stored, in their order; see `Run.save`."""


def checked_staged(source: TableSource, stored: Stored, given: Mapping[str, Any]) -> dict[str, Values]:
    """The values that were staged of a table, checked."""
    quantized: dict[str, Values] = {}
    for plan in stored.fields:
        q = given.get(plan.name)
        if isinstance(q, Quantized):
            wanted = (stored.count, plan.columns, plan.bits, plan.dtype, plan.qparams or q.qparams.dtype.name)
            if (q.rows, q.columns, q.bits, q.dtype, q.qparams.dtype.name) != wanted:
                raise InvalidInputError(
                    f"table {source.name!r}, field {plan.name!r}: staged are {q.rows} rows of {q.columns} columns at "
                    f"{q.bits} bits of {q.dtype}, where {stored.count} rows at {plan.bits} bits belong"
                )
            quantized[plan.name] = q
    plain = [spec for spec in source.fields if spec.name not in quantized]
    rest = {name: values for name, values in given.items() if name not in quantized}
    raw = [plan.name for plan in stored.fields if not plan.lossy]  # others may have other bits when encoded elsewhere
    return {**(fetched(source.name, plain, rest, stored.count, raw) if plain else {}), **quantized}


def part_source(
    source: TableSource,
    plan: TablePlan,
    plans: Sequence[FieldPlan],
    staged: Mapping[str, Values] | None,
    check: Callable[[], None],
) -> PartSource:
    """The rows of a table that are stored, as one part. `check` is called before values are fetched."""
    positions: Selection = plan.positions

    def fetch(low: int, high: int) -> dict[str, Any]:
        check()
        if staged is not None:
            return {name: v.cut(low, high) if isinstance(v, Quantized) else v[low:high] for name, v in staged.items()}
        if isinstance(positions, slice):
            return source.fetch(slice(positions.start + low, positions.start + high))
        return source.fetch(positions[low:high])

    return PartSource(
        table=source.name,
        plans=plans,
        count=plan.count,
        fetch=fetch,
        transient=source.transient and staged is None,
        quantized=any(isinstance(values, Quantized) for values in (staged or {}).values()),
        first_row=0 if plan.ids is None else -1,
        rows=plan.ids,
        recent=plan.recent,
        deleted=plan.deleted,
    )


def entry_of(source: TableSource, plan: TablePlan) -> TableEntry:
    """The entry of a table in the manifest, without what the encoders tell."""
    return TableEntry(
        name=source.name,
        requires=[],
        addressing=source.addressing,
        key_dtype=source.key_dtype,
        rows=source.rows if source.keys is None else None,
        storage=plan.storage,
        fields=[Field(name=f.name, dtype=f.dtype, columns=f.columns, encoder=None) for f in source.fields],
    )


def planned(entry: TableEntry, source: TableSource, part_lists: Sequence[PartList]) -> TablePlanned:
    """What of a table the parts hold."""
    parts = [part for told in part_lists for part in told.document.parts if told.document.tables[part[0]] == entry.name]
    return TablePlanned(
        name=entry.name,
        storage=entry.storage,
        rows=source.rows,
        stored_rows=sum(part[3] for part in parts),
        deleted=sum(part[7] for part in parts),
    )


def touched_by(source: TableSource, plan: TablePlan) -> Touched:
    """What a save of a table touches."""
    if plan.storage == "full" or plan.ids is None:
        return Touched.whole(source.addressing)
    return of_ids(source.addressing, plan.ids, plan.deleted)


def as_given(source: TableSource, plan: TablePlan) -> Selection:
    """The rows that are stored, by position in the table that the caller gave."""
    return plan.positions if source.order is None else source.order[plan.positions]


def is_lossy(plans: Sequence[FieldPlan]) -> bool:
    """Whether any field may lose bits."""
    return any(plan.lossy for plan in plans)


def with_statistics(entry: TableEntry, statistics: Mapping[str, dict[str, Any]]) -> TableEntry:
    """An entry with what the encoders told."""
    fields = [msgspec.structs.replace(f, encoder=statistics.get(f.name)) for f in entry.fields]
    return msgspec.structs.replace(entry, fields=fields)


def unchanged_entry(entry: TableEntry) -> TableEntry:
    """The entry of a table of which nothing is stored."""
    return msgspec.structs.replace(with_statistics(entry, {}), storage="unchanged")
