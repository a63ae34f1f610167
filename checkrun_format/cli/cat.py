"""`checkrun cat`: the values of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from checkrun_format import dtypes
from checkrun_format.cli import document, endings
from checkrun_format.cli.address import IdsType, SliceType, address_argument, checkpoint_at
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import JSON_VALUES, epilog
from checkrun_format.cli.page import Page
from checkrun_format.cli.salvage import Piece, Salvage
from checkrun_format.cli.values import Arrays, Grid, objects
from checkrun_format.errors import InvalidInputError
from checkrun_format.manifest import Problem
from checkrun_format.view import TableView

_PIECE_BYTES = 4 << 20
"""Decoded bytes that are read at a time, about."""


@click.command(
    epilog=epilog(
        """
        With --json: JSON lines, one for each row:
        {"row": 5, "fields": {"weight": [...], "sum": 0.5}}; in a keyed table
        "key" stands in the place of "row".
        """,
        JSON_VALUES,
        examples="""
        checkrun cat my-run@42 user --rows 0:10 --field weight --columns 0:8
        checkrun cat my-run user --ids 5,999 --json
        """,
    )
)
@address_argument
@click.argument("table")
@click.option(
    "--rows", type=SliceType(), help="Consecutive rows, as in Python; in a keyed table places among its keys."
)
@click.option("--ids", type=IdsType(), help="Single rows by number, or by key, in this order.")
@click.option("--field", "fields", metavar="NAME", multiple=True, help="Only this field; may be repeated.")
@click.option("--columns", type=SliceType(), help="Only these columns, of fields that have columns.")
@json_option
def cat(
    *,
    address: str,
    table: str,
    rows: slice | None,
    ids: list[int] | None,
    fields: tuple[str, ...],
    columns: slice | None,
    as_json: bool,
) -> None:
    """Print rows of a table.

    The table is as it was at checkpoint SEQ, by default the latest. Quantized fields are decoded. Without --rows
    and --ids all rows are printed, a few at a time. Rows that are damaged are named on standard error, the others
    are printed, and the exit code is 1; --field reads the fields that are intact.
    """
    if rows is not None and ids is not None:
        raise click.UsageError("give --rows or --ids, not both")
    view = checkpoint_at(address).table(table)
    options = {"columns": columns, "fields": list(dict.fromkeys(fields)) or None}
    selection = _rows(view, rows, options) if ids is None else _ids(view, ids, options)
    endings.conclude(_print_json(view, selection) if as_json else _print_text(view, selection, columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows to print: how many, what they are called, and how to read some of them."""

    count: int
    ids: Callable[[int, int], Sequence[int]]
    read: Callable[[int, int], Arrays]


def _rows(view: TableView, rows: slice | None, options: dict[str, Any]) -> Selection:
    keys = view.keys() if view.addressing == "keyed" else None
    low, high, _ = (rows or slice(None)).indices(len(view))

    def ids(first: int, stop: int) -> Sequence[int]:
        places = slice(low + first, low + stop)
        return range(places.start, places.stop) if keys is None else keys[places].tolist()

    def read(first: int, stop: int) -> Arrays:
        return view.read(slice(low + first, low + stop), **options)

    return Selection(count=max(0, high - low), ids=ids, read=read)


def _ids(view: TableView, ids: list[int], options: dict[str, Any]) -> Selection:
    dtype = view.keys().dtype if view.addressing == "keyed" else np.dtype(np.int64)
    outside = [number for number in ids if not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max]
    if outside:
        raise InvalidInputError(f"--ids: {outside[0]} is no {dtype}, as the ids of table {view.name!r} are")
    wanted = np.array(ids, dtype)

    def read(first: int, stop: int) -> Arrays:
        return view.take(wanted[first:stop], **options)

    return Selection(count=len(ids), ids=lambda first, stop: ids[first:stop], read=read)


def _pieces(view: TableView, selection: Selection) -> Iterator[Piece]:
    width = sum(dtypes.logical(f.dtype).itemsize * (f.columns or 1) for f in view.fields)
    return Salvage(selection.read).pieces(selection.count, max(1, _PIECE_BYTES // width))


def _print_text(view: TableView, selection: Selection, columns: slice | None) -> Iterator[Problem]:
    starts = {f.name: columns.indices(f.columns)[0] for f in view.fields if f.columns and columns is not None}
    grid = Grid(Page(), _word(view), starts)
    if not selection.count:
        grid.add([], selection.read(0, 0))
    for piece in _pieces(view, selection):
        if piece.arrays is None:
            yield _problem(view, selection, piece)
        else:
            grid.add(selection.ids(piece.low, piece.high), piece.arrays)


def _print_json(view: TableView, selection: Selection) -> Iterator[Problem]:
    for piece in _pieces(view, selection):
        if piece.arrays is None:
            yield _problem(view, selection, piece)
            continue
        for row in objects(_word(view), selection.ids(piece.low, piece.high), piece.arrays):
            document.line(row)


def _word(view: TableView) -> str:
    return "key" if view.addressing == "keyed" else "row"


def _problem(view: TableView, selection: Selection, piece: Piece) -> Problem:
    assert piece.error is not None
    ids, word = selection.ids(piece.low, piece.high), _word(view)
    which = f"{word} {ids[0]}" if len(ids) == 1 else f"{len(ids):,} {word}s from {ids[0]} to {ids[-1]}"
    found = Problem.of(piece.error, view.name)
    return Problem(place=found.place, kind=found.kind, message=f"{found.message}; needed for {which}")
