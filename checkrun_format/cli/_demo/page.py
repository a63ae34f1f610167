"""A report as a page: a table, the totals, and the commands to look further. Plain lines unless on a terminal."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from checkrun_format.cli import page
from checkrun_format.cli._demo.plan import BITS
from checkrun_format.cli._demo.report import Line, Report

_COLUMNS = ("check-\npoint", "kind", "over", "step", "rows\nchanged", "rows\nstored", "bytes\nstored",
            "bytes as\nplain fp32", "save\nseconds")  # fmt: skip
_TABLE_WIDTH = 79
_PIPE_WIDTH = 120  # columns, where no terminal tells


def console(stream: IO[str] | None = None) -> Console:
    """Where the demo speaks: without colours, control characters and wrapping unless it is a terminal."""
    out = sys.stdout if stream is None else stream
    return page.console(out, None if out.isatty() else _PIPE_WIDTH)


def show(report: Report, run: Path, on: Console) -> None:
    """Print the whole page."""
    on.width = max(on.width, _TABLE_WIDTH)  # a narrower terminal wraps lines; the table would leave out digits
    on.print(table(report.lines), crop=False)
    for line in (*totals(report), "", *commands(report, run)):
        on.print(line, soft_wrap=True)


def table(lines: Iterable[Line]) -> Table:
    """One row for each save."""
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title in _COLUMNS:
        made.add_column(title, justify="left" if title == "kind" else "right", no_wrap=True, vertical="bottom")
    for line in lines:
        made.add_row(*_cells(line), style="red" if line.kind == "killed" else None)
    return made


def _cells(line: Line) -> list[str]:
    counts = (line.step, line.changed, line.stored_rows, line.stored_bytes, line.plain_bytes)
    return [
        str(line.sequence),
        line.kind,
        "-" if line.parent is None else str(line.parent),
        *("-" if count is None else f"{count:,}" for count in counts),
        "-" if line.seconds is None else f"{line.seconds:.2f}",
    ]


def totals(report: Report) -> list[str]:
    """What the table adds up to, and what it cost in accuracy."""
    saved = [line for line in report.lines if line.kind != "killed"]
    stored, plain = sum(line.stored_bytes for line in saved), sum(line.plain_bytes or 0 for line in saved)
    difference = report.loss / report.loss_without_crash - 1
    return [
        "",
        *(_about_kill(line) for line in report.lines if line.kind == "killed"),
        f"Stored in all: {stored:,} bytes for {len(saved)} checkpoints.",
        f"Plain fp32 saves would take {plain:,} bytes, {plain / stored:.1f} times as many.",
        f"Weights at {BITS} bits: mean l2 error of a row {report.error:.2%} of its length.",
        _about_lossless(report.altered),
        f"Loss with the crash: {report.loss:.4f}. Without: {report.loss_without_crash:.4f} ({difference:+.2%}).",
        f"Loss of the last checkpoint as stored, at {BITS} bits: {report.loss_restored:.4f}.",
    ]


def _about_kill(line: Line) -> str:
    return (
        f"Killed: SIGKILL hit save {line.sequence} halfway. Its {line.stored_bytes:,} bytes are litter that no reader "
        f"looks at.\nTraining went on from checkpoint {line.sequence - 1}."
    )


def _about_lossless(altered: tuple[str, ...]) -> str:
    if altered:
        return f"NOT bit-identical to the trainer's: {', '.join(altered)}."
    return "Optimizer sums and dense tensors: bit-identical to the trainer's."


def commands(report: Report, run: Path) -> list[str]:
    """Commands that look at the result; each can be copied into a shell."""
    block = json.dumps(str(run / report.attempt / "block-0-0"), ensure_ascii=False)
    last = report.lines[-1].sequence
    return [
        "Look at it:",
        _line("checkrun", "ls", run),
        _line("checkrun", "tree", run),
        _line("checkrun", "cat", run, "in", "--rows", "0:5", "--columns", "0:4"),
        _line("checkrun", "changes", run, last - 1, last),
        _line("checkrun", "verify", run),
        "Without this library, any Zarr v3 reader:",
        _line("python", "-c", f'import zarr; print(zarr.open_group({block}, mode="r").tree())'),
    ]


def _line(*words: object) -> str:
    return "  " + shlex.join(map(str, words))
