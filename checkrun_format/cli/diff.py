"""`checkrun diff`: how the states of two checkpoints differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from checkrun_format.chain import History
from checkrun_format.cli import document, endings
from checkrun_format.cli.address import checkpoint_argument, number_of, parse_run, run_argument
from checkrun_format.cli.census import open_history
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Column, Page, Sheet
from checkrun_format.cli.text import count, quoted
from checkrun_format.comparison import TableDifference, ValueDifference, compare_tables, difference
from checkrun_format.errors import CheckrunError, DamagedError, StorageError, TableNotFoundError
from checkrun_format.manifest import Problem
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.tags import Tags

_BATCH_BYTES = 32 << 20
"""Decoded bytes that are held at a time, about."""


@click.command(
    epilog=epilog(
        """
        Values are compared bit by bit, decoded, whatever the history of the two;
        `checkrun changes` tells what changed on the way from one to the other.
        The largest difference is Infinity where NaN or an infinity is involved.
        """,
        """
        With --json: {"run", "a", "b", "equal", "tables": [{"table", "equal",
        "rows_a", "rows_b", "only_a", "only_b", "differ", "fields": [{"field",
        "differ", "max_difference"}], "other_fields"}], "tensors": [{"tensor",
        "equal", "differ", "max_difference"}], "extra": {"equal", "keys"},
        "blobs": [{"blob", "equal"}], "problems"}. null: not comparable.
        """,
        examples="""
        checkrun diff my-run 41 42
        checkrun diff my-run best 42 --table user --json
        """,
    )
)
@run_argument
@checkpoint_argument("one", "A")
@checkpoint_argument("other", "B")
@click.option("--table", metavar="NAME", help="Compare this table only.")
@json_option
def diff(*, run: str, one: int | str, other: int | str, table: str | None, as_json: bool) -> None:
    """Compare the states of two checkpoints.

    For each table: rows or keys in only one of the two, rows that differ, and by how much; the same for tensors; and
    whether the trainer's state and the blobs are equal. A and B are numbers, or tags.
    """
    history, problems = open_history(parse_run(run))
    tags = Tags(history)
    pair = [history.get(number_of(tags, name)) for name in (one, other)]
    found = Comparison(history, pair[0], pair[1], problems)
    found.compare(table)
    if as_json:
        head = {"run": history.store.url, "a": pair[0].commit.sequence, "b": pair[1].commit.sequence}
        document.whole(document.finite(head | found.as_object()))
    else:
        _show(Page(), found, only_a_table=table is not None)
    endings.conclude(problems)


@dataclass(slots=True)
class Comparison:
    """What differs between two checkpoints; what is damaged goes to `problems` and is not compared."""

    history: History
    one: StoredCheckpoint
    other: StoredCheckpoint
    problems: list[Problem]
    tables: list[TableDifference] = field(default_factory=list)
    tensors: dict[str, ValueDifference | None] = field(default_factory=dict)
    blobs: dict[str, bool] = field(default_factory=dict)
    extra: list[str] | None = None
    """Keys of the trainer's state that differ; None if it does not differ, `[]` if it is no object."""

    def compare(self, table: str | None) -> None:
        """Compare one table, or everything."""
        names = [[entry.name for entry in side.manifest.tables] for side in (self.one, self.other)]
        if table is not None and table not in names[0] + names[1]:
            raise TableNotFoundError(f"neither checkpoint has a table {table!r}")
        for name in dict.fromkeys(names[0] + names[1]) if table is None else [table]:
            with _Noted(self.problems, self.one):
                self.tables.append(compare_tables(self.history, self.one, self.other, name, _BATCH_BYTES))
        if table is None:
            self._compare_rest()

    def _compare_rest(self) -> None:
        shapes = [{t.name: (t.dtype, t.shape) for t in side.manifest.tensors} for side in (self.one, self.other)]
        for name in dict.fromkeys([*shapes[0], *shapes[1]]):
            with _Noted(self.problems, self.one):
                alike = shapes[0].get(name) == shapes[1].get(name)
                self.tensors[name] = difference(self.one.tensor(name), self.other.tensor(name)) if alike else None
        blobs = [{blob.name: blob for blob in side.manifest.blobs} for side in (self.one, self.other)]
        for name in dict.fromkeys([*blobs[0], *blobs[1]]):
            with _Noted(self.problems, self.one):
                here = name in blobs[0] and name in blobs[1]
                self.blobs[name] = here and self.one.blob(blobs[0][name]) == self.other.blob(blobs[1][name])
        with _Noted(self.problems, self.one):
            self.extra = _differing_keys(self.one.extra(), self.other.extra())

    @property
    def equal(self) -> bool:
        """Whether all that was compared is the same, bit for bit."""
        tensors = all(found is not None and not found.differ for found in self.tensors.values())
        tables = all(table.equal for table in self.tables)
        return tables and tensors and all(self.blobs.values()) and self.extra is None and not self.problems

    def as_object(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "equal": self.equal,
            "tables": [_table(table) for table in self.tables],
            "tensors": [_tensor(name, found) for name, found in self.tensors.items()],
            "extra": {"equal": self.extra is None, "keys": self.extra or []},
            "blobs": [{"blob": name, "equal": equal} for name, equal in self.blobs.items()],
            "problems": [document.problem(problem) for problem in self.problems],
        }


class _Noted:
    """Damage that is met goes to the problems."""

    def __init__(self, problems: list[Problem], checkpoint: StoredCheckpoint) -> None:
        self._problems = problems
        self._place = checkpoint.place("manifest.json")

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, DamagedError | StorageError):
            return False
        assert isinstance(error, CheckrunError)
        self._problems.append(Problem.of(error, self._place))
        return True


def _differing_keys(one: Any, other: Any) -> list[str] | None:
    if document.encode(document.finite(one)) == document.encode(document.finite(other)):
        return None
    if not isinstance(one, dict) or not isinstance(other, dict):
        return []
    return [
        key for key in dict.fromkeys([*one, *other]) if key not in one or key not in other or one[key] != other[key]
    ]


def _table(table: TableDifference) -> dict[str, Any]:
    return {
        "table": table.table,
        "equal": table.equal,
        "rows_a": table.rows[0],
        "rows_b": table.rows[1],
        "only_a": table.removed,
        "only_b": table.added,
        "differ": table.differ,
        "fields": [{"field": name} | _values(found) for name, found in table.fields.items()],
        "other_fields": list(table.other_fields),
    }


def _values(found: ValueDifference) -> dict[str, Any]:
    return {"differ": found.differ, "max_difference": found.max_difference}


def _tensor(name: str, found: ValueDifference | None) -> dict[str, Any]:
    values = {"differ": None, "max_difference": None} if found is None else _values(found)
    return {"tensor": name, "equal": found is not None and not found.differ} | values


def _show(page: Page, found: Comparison, *, only_a_table: bool) -> None:
    titles = ("rows in A", "rows in B", "only in A", "only in B", "rows differ")
    columns = [Column("table"), *(Column(title, right=True) for title in titles)]
    columns += [Column("field"), Column("rows differ", right=True), Column("largest difference", right=True)]
    Sheet(page, [*columns, Column("")]).rows([row for table in found.tables for row in _table_rows(table)])
    if only_a_table:
        return
    if found.tensors:
        page.line()
        sheet = Sheet(page, [Column("tensor"), Column("differ", right=True), Column("largest difference", right=True)])
        sheet.rows([_tensor_row(name, tensor) for name, tensor in found.tensors.items()])
    page.line()
    for name, equal in found.blobs.items():
        page.line(f"blob {quoted(name)}: {'equal' if equal else 'differs'}")
    if found.extra is None:
        page.line("extra: equal")
    else:
        page.line("extra: differs" + (" in " + ", ".join(map(quoted, found.extra)) if found.extra else ""))
    if found.problems:
        page.line("What is damaged was not compared.")
    else:
        page.line("A and B are equal." if found.equal else "A and B differ.")


def _table_rows(table: TableDifference) -> Iterator[list[str]]:
    """A row for each field; what is said of the table stands in the first one."""
    counts = (*table.rows, table.removed, table.added, table.differ)
    note = "" if not table.other_fields else "not comparable: " + ", ".join(table.other_fields)
    first = [quoted(table.table), *map(count, counts)]
    for name, found in table.fields.items() or [("-", None)]:
        values = ["-", "-"] if found is None else [count(found.differ), _number(found.max_difference)]
        yield [*first, name, *values, note]
        first, note = [""] * len(first), ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _tensor_row(name: str, found: ValueDifference | None) -> list[str]:
    if found is None:
        return [quoted(name), "-", "not in both alike"]
    return [quoted(name), count(found.differ), _number(found.max_difference)]
