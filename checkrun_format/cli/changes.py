"""`checkrun changes`: what changed between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from checkrun_format.chain import History
from checkrun_format.changes import Changes
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.cli import document, endings
from checkrun_format.cli.address import checkpoint_argument, number_of, parse_run, run_argument
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import JSON_VALUES, epilog
from checkrun_format.cli.page import Column, Page, Sheet
from checkrun_format.cli.text import count, quoted
from checkrun_format.cli.values import Grid, objects
from checkrun_format.errors import DamagedError, StorageError
from checkrun_format.manifest import Problem
from checkrun_format.run import open_run
from checkrun_format.stores import open_store
from checkrun_format.tags import Tags

_BATCH_BYTES = 4 << 20
"""Decoded bytes that are read at a time, about."""


@click.command(
    epilog=epilog(
        """
        With --json: {"run", "since", "until", "tables", "problems"}, and for each
        table "table", "changed", "deleted", "table_rows" and "dropped".
        """,
        """
        With --json --values: JSON lines in the order in which to apply them, each
        with "table" and
          {"dropped": true}            it is gone, or another one follows
          {"table_rows": 1000}         its rows now (null in a keyed table)
          {"deleted": 17}              a key that is gone
          {"row": 5, "fields": {...}}  new values; in a keyed table "key"
        """,
        JSON_VALUES,
        examples="""
        checkrun changes my-run 41 42
        checkrun changes my-run best 42 --table user --values --json
        """,
    )
)
@run_argument
@checkpoint_argument("since", "A")
@checkpoint_argument("until", "B")
@click.option("--table", metavar="NAME", help="Only this table.")
@click.option("--values", is_flag=True, help="Print the rows, with their values at B, and not only how many.")
@json_option
def changes(*, run: str, since: int | str, until: int | str, table: str | None, values: bool, as_json: bool) -> None:
    """Show what changed between two checkpoints.

    That is: the rows that changed from checkpoint A to checkpoint B, and the keys that were deleted. A may be
    pruned by now, but no checkpoint in between; a rollback in between is followed to what it undid. A and B are
    numbers, or tags.
    """
    opened = open_run(parse_run(run))
    tags = Tags(History(open_store(opened.url)))
    first, last = number_of(tags, since), number_of(tags, until)
    feed = Feed(opened[last], first, table)
    if values and as_json:
        _print_lines(feed)
    elif values:
        _print_values(Page(), feed)
    elif as_json:
        _print_document(feed, {"run": opened.url, "since": first, "until": last})
    else:
        _print_counts(Page(), feed)
    endings.conclude(feed.problems)


@dataclass(slots=True, kw_only=True)
class Summary:
    """How much of a table changed."""

    table: str
    changed: int = 0
    deleted: int = 0
    table_rows: int | None = None
    dropped: bool = False
    is_there: bool = False

    def add(self, batch: Changes) -> None:
        """Count a batch."""
        self.changed += len(batch.rows)
        self.deleted += len(batch.deleted)
        self.dropped |= batch.dropped
        if not batch.dropped:
            self.is_there, self.table_rows = True, batch.table_rows

    def as_object(self) -> dict[str, Any]:
        """The same as JSON values."""
        names = ("table", "changed", "deleted", "table_rows", "dropped")
        return {name: getattr(self, name) for name in names}

    @property
    def note(self) -> str:
        """What is to be said of the table as a whole."""
        if not self.dropped:
            return ""
        return "dropped, and another one now" if self.is_there else "dropped"


class Feed:
    """Batches of changes, of one table or of all, as far as they can be read."""

    def __init__(self, checkpoint: Checkpoint, since: int, table: str | None) -> None:
        self._checkpoint = checkpoint
        self._table = table
        self._batches = checkpoint.changes_since(since, max_bytes=_BATCH_BYTES)
        self.problems: list[Problem] = []

    def __iter__(self) -> Iterator[Changes]:
        seen = False
        try:
            for batch in self._batches:
                if self._table is None or batch.table == self._table:
                    seen = True
                    yield batch
        except (DamagedError, StorageError) as error:
            found = Problem.of(error, "")
            message = f"{found.message}; what changed beyond is not shown"
            self.problems.append(Problem(place=found.place, kind=found.kind, message=message))
        if self._table is not None and not seen and not self.problems:
            self._checkpoint.table(self._table)  # raises if neither checkpoint nor changes know it

    def summaries(self) -> list[Summary]:
        """The counts of each table."""
        found: dict[str, Summary] = {}
        for batch in self:
            found.setdefault(batch.table, Summary(table=batch.table)).add(batch)
        return [found[name] for name in sorted(found)]


def _ids(batch: Changes) -> tuple[list[int], list[int]]:
    """Rows and deleted keys as numbers."""
    dtype = batch.key_dtype or "int64"
    return batch.rows.view(dtype).tolist(), batch.deleted.view(dtype).tolist()


def _word(batch: Changes) -> str:
    return "row" if batch.key_dtype is None else "key"


def _print_counts(page: Page, feed: Feed) -> None:
    columns = [Column("table"), *(Column(title, right=True) for title in ("changed", "deleted", "table rows"))]
    rows = [
        [quoted(s.table), count(s.changed), count(s.deleted), count(s.table_rows), s.note] for s in feed.summaries()
    ]
    Sheet(page, [*columns, Column("")]).rows(rows)


def _print_document(feed: Feed, head: dict[str, Any]) -> None:
    tables = [summary.as_object() for summary in feed.summaries()]
    document.whole(head | {"tables": tables, "problems": [document.problem(p) for p in feed.problems]})


def _print_values(page: Page, feed: Feed) -> None:
    table, grid = None, Grid(page, "row")
    for batch in feed:
        rows, deleted = _ids(batch)
        if batch.table != table:
            table, grid = None if batch.dropped else batch.table, Grid(page, _word(batch))
            page.line((_heading(batch), "bold"))
        for key in deleted:
            page.line(f"deleted {key}")
        if rows:
            grid.add(rows, batch.fields)


def _heading(batch: Changes) -> str:
    if batch.dropped:
        return f"table {quoted(batch.table)}: dropped"
    rows = "" if batch.table_rows is None else f", {batch.table_rows:,} rows now"
    return f"table {quoted(batch.table)}{rows}"


def _print_lines(feed: Feed) -> None:
    table = None
    for batch in feed:
        head = {"table": batch.table}
        rows, deleted = _ids(batch)
        if batch.dropped:
            document.line(head | {"dropped": True})
            continue
        if batch.table != table:
            table = batch.table
            document.line(head | {"table_rows": batch.table_rows})
        for key in deleted:
            document.line(head | {"deleted": key})
        for row in objects(_word(batch), rows, batch.fields):
            document.line(head | row)
