"""Lines for people: in colour on a terminal, plain elsewhere, never cut off."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from checkrun_format.cli import stream
from checkrun_format.cli.text import escaped

Span: TypeAlias = "str | tuple[str, str]"
"""A text, or a text and the style that a terminal gives it."""

_WIDTH = 80
_STYLES = {"base": "bold", "pruned": "dim", "burnt": "dim", "increment": ""}
"""How the kinds of numbers look on a terminal; all others are bad news."""


def console(out: IO[str], width: int | None = None) -> Console:
    """Where to draw; a terminal of which COLUMNS says that it has none is as wide as most."""
    found = Console(file=out, width=width, highlight=False, markup=False, emoji=False)
    if found.width < 1:
        found.width = _WIDTH
    return found


def style_of(kind: str) -> str:
    """How a number of a kind looks on a terminal."""
    return _STYLES.get(kind, "red")


class Page:
    """What a command prints for people.

    A terminal wraps long lines itself, so that a narrow one loses no digit.
    """

    def __init__(self) -> None:
        out = sys.stdout
        self.console = console(out) if out.isatty() else None
        """Where to draw on a terminal; None elsewhere."""

    def line(self, *spans: Span) -> None:
        """Print a line; characters that cannot be printed are escaped."""
        styled = [span if isinstance(span, tuple) else (span, "") for span in spans]
        parts = [(escaped(text), style) for text, style in styled]
        if self.console is None:
            stream.write("".join(text for text, _ in parts).rstrip() + "\n")
        else:
            self.console.print(Text.assemble(*parts), soft_wrap=True)


@dataclass(slots=True)
class Column:
    """One column of a sheet."""

    title: str
    right: bool = False
    width: int = 0


class Sheet:
    """Rows of aligned cells, printed one by one; a cell that is wider than its column moves the rest of its line."""

    def __init__(self, page: Page, columns: Sequence[Column]) -> None:
        self._page = page
        self._columns = columns
        self.fit([[column.title for column in columns]])

    def fit(self, rows: Iterable[Sequence[str]]) -> None:
        """Widen the columns so that these rows are aligned."""
        for row in rows:
            for column, cell in zip(self._columns, row, strict=True):
                column.width = max(column.width, cell_len(escaped(cell)))

    def header(self) -> None:
        """Print the titles."""
        self.row([column.title for column in self._columns], "bold")

    def row(self, cells: Sequence[str], style: str = "") -> None:
        """Print a row."""
        padded = map(_padded, self._columns, map(escaped, cells))
        self._page.line(("  ".join(padded).rstrip(), style))

    def rows(self, rows: Sequence[Sequence[str]]) -> None:
        """Print the titles and all rows, aligned."""
        self.fit(rows)
        self.header()
        for row in rows:
            self.row(row)


def _padded(column: Column, cell: str) -> str:
    padding = " " * (column.width - cell_len(cell))
    return padding + cell if column.right else cell + padding
