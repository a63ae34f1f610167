"""How far a long command is: bytes so far, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, FileSizeColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int], None]]:
    """A function that is told the bytes that were dealt with; they are shown on standard error."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    columns = (TextColumn(title), BarColumn(), FileSizeColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=None)
        yield lambda count: shown.advance(task, count)
