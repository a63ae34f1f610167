"""What several writers tell the coordinator of their save: read, made one, checked against one another (9.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from checkrun_format.errors import InvalidInputError
from checkrun_format.manifest import Field, TableEntry
from checkrun_format.writer import PartList, add_statistics


def parsed_part_lists(part_lists: Sequence[Mapping[str, Any]], attempt: str, count: int) -> list[PartList]:
    """The part lists of `count` writers as records, in the order of their writers; all there, all of this attempt."""
    try:
        parsed = [msgspec.convert(part_list, PartList) for part_list in part_lists]
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidInputError(f"not a part list: {error}") from error
    writers = sorted(part.document.writer for part in parsed)
    if writers != list(range(count)):
        raise InvalidInputError(f"part lists of writers {writers}; there are writers 0 to {count - 1}")
    for part in parsed:
        if part.document.attempt != attempt:
            raise InvalidInputError(f"the part list of writer {part.document.writer} is of another attempt")
    _check_unique("tensor", [tensor["name"] for part in parsed for tensor in part.tensors])
    _check_unique("blob", [blob["name"] for part in parsed for blob in part.blobs])
    return sorted(parsed, key=lambda part: part.document.writer)


def _check_unique(what: str, names: Sequence[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise InvalidInputError(f"{what} {twice[0]!r} is stored twice; names are unique over all writers")


def add_table(tables: dict[str, dict[str, Any]], told: Mapping[str, Any], who: str) -> None:
    """Add what is told of a table, its fields as name to (dtype, end of columns), to what was; both must agree."""
    name = told["name"]
    known = tables.setdefault(name, {**told, "fields": {}})
    for key in ("storage", "rows", "key_dtype"):
        if known[key] != told[key]:
            raise InvalidInputError(f"table {name!r}: {key} is {told[key]!r} {who} and {known[key]!r} in another")
    for field, (dtype, end) in told["fields"].items():
        so_far = known["fields"].setdefault(field, [dtype, end])
        if so_far[0] != dtype or (so_far[1] is None) != (end is None):
            raise InvalidInputError(f"table {name!r}, field {field!r}: its parts differ in dtype or dimensions")
        if end is not None:
            so_far[1] = max(so_far[1], end)


def merged_tables(part_lists: Sequence[PartList]) -> list[dict[str, Any]]:
    """What all writers told of each table, as one."""
    merged: dict[str, dict[str, Any]] = {}
    for part_list in part_lists:
        for table in part_list.tables:
            add_table(merged, table, f"in the parts of writer {part_list.document.writer}")
    return list(merged.values())


def table_entry(told: Mapping[str, Any], statistics: Mapping[str, Mapping[str, Any]]) -> TableEntry:
    """The manifest's entry of a table."""
    return TableEntry(
        name=told["name"],
        requires=[],
        addressing="dense" if told["key_dtype"] is None else "keyed",
        key_dtype=told["key_dtype"],
        rows=told["rows"],
        storage=told["storage"],
        fields=[
            Field(name=name, dtype=dtype, columns=end, encoder=dict(statistics[name]) if name in statistics else None)
            for name, (dtype, end) in told["fields"].items()
        ],
    )


def merged_statistics(part_lists: Sequence[PartList]) -> dict[str, dict[str, dict[str, Any]]]:
    """Encoder statistics of each table and field over all writers."""
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for part in part_lists:
        for table, fields in part.statistics.items():
            for name, told in fields.items():
                first = {
                    key: value for key, value in told.items() if key not in ("exact_rows", "error_bound", "sample")
                }
                add_statistics(merged.setdefault(table, {}).setdefault(name, first), told)
    for fields in merged.values():
        for told in fields.values():
            sample = told.pop("sample", {"rows": 0})
            if sample["rows"]:
                told["l2_error"] = sample["l2_error"] / sample["rows"]
                told["relative_l2_error"] = sample["l2_error"] / sample["l2"] if sample["l2"] else 0.0
    return merged


def check_coverage(entries: Sequence[TableEntry], part_lists: Sequence[PartList]) -> None:
    """Refuse parts that do not hold each row and column of a full dense table once (LAY-1), of others in all fields.

    Ranges are checked exactly, listed rows by their number: which they are is seen when they are read back.

    Raises
    ------
    InvalidInputError
    """
    cells: dict[tuple[str, str], int] = {}
    spans: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
    for document in (part_list.document for part_list in part_lists):
        for part in document.parts:
            for f, start in zip(document.blocks[part[1]].fields, part[8:], strict=True):
                key, width = (document.tables[part[0]], f.name), f.columns or 1
                cells[key] = cells.get(key, 0) + part[3] * width
                if part[4] >= 0:
                    spans.setdefault(key, []).append((part[4], part[4] + part[3], start, start + width))
    for entry in entries:
        if entry.storage != "unchanged":
            _check_counts(entry, {f.name: cells.get((entry.name, f.name), 0) for f in entry.fields})
    for (table, name), rectangles in spans.items():
        _check_disjoint(table, name, rectangles)


def _check_counts(entry: TableEntry, cells: Mapping[str, int]) -> None:
    rows = {f.name: cells[f.name] / (f.columns or 1) for f in entry.fields}
    wanted = float(entry.rows) if entry.storage == "full" and entry.rows is not None else max(rows.values())
    for name, count in rows.items():
        if count != wanted:
            raise InvalidInputError(
                f"table {entry.name!r}, field {name!r}: the parts hold {count:g} rows where {wanted:g} belong (LAY-1)"
            )


def _check_disjoint(table: str, name: str, spans: list[tuple[int, int, int, int]]) -> None:
    """Refuse rectangles of rows and columns that overlap: sweep over the rows, keep the open column ranges."""
    open_spans: list[tuple[int, int, int, int]] = []
    for span in sorted(spans):
        open_spans = [other for other in open_spans if other[1] > span[0]]
        for other in open_spans:
            if other[2] < span[3] and span[2] < other[3]:
                raise InvalidInputError(
                    f"table {table!r}, field {name!r}: rows from {span[0]} on are given by two parts (LAY-1)"
                )
        open_spans.append(span)
