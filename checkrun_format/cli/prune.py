"""`checkrun prune`: what a rule of retention removes, and removing it."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from typing import Any

import click

from checkrun_format.cli import document
from checkrun_format.cli.address import parse_run, run_argument
from checkrun_format.cli.census import kind_of
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Column, Page, Sheet, style_of
from checkrun_format.cli.text import count, folded
from checkrun_format.retention import Decision, Keep, Leftover, Plan
from checkrun_format.run import open_run

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class AgeType(click.ParamType[dt.timedelta]):
    """7d, 12h, 30m."""

    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dt.timedelta:
        """A time span."""
        if isinstance(value, dt.timedelta):
            return value
        match = re.fullmatch(r"([0-9]{1,9})([smhdw])", value, re.ASCII)
        if match is None:
            self.fail(f"{value!r} is no age, such as 7d, 12h, 30m, 45s or 2w", param, ctx)
        return dt.timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


@click.command(
    epilog=epilog(
        """
        What stays: what a rule says; the latest checkpoint; what has a tag; what
        one of these needs; and what a save that may be going on, or a number that
        cannot be read, may need. What is not known for what it is stays, too.
        AGE is a number and one of s, m, h, d, w.
        """,
        """
        With --json: {"run", "done", "bytes", "checkpoints": [{"sequence", "kind",
        "step", "created", "bytes", "goes", "reasons"}], "leftovers": [{"place",
        "objects", "bytes", "goes", "reason"}], "unknown"}.
        """,
        examples="""
        checkrun prune my-run --keep-last 5 --keep-every 10000
        checkrun prune my-run --keep-newer-than 7d --yes
        """,
    )
)
@run_argument
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the last N checkpoints.")
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Keep the first checkpoint from each multiple of so many steps on.",
)
@click.option("--keep-newer-than", type=AgeType(), help="Keep checkpoints committed in this time.")
@click.option(
    "--abandoned",
    is_flag=True,
    help="Remove what saves left that never committed, too. One may still be going on: give --older-than.",
)
@click.option("--older-than", type=AgeType(), help="With --abandoned: if nothing of it was written for so long.")
@click.option("--yes", is_flag=True, help="Do it. Without it, only show what would be done.")
@json_option
def prune(
    *,
    run: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_newer_than: dt.timedelta | None,
    abandoned: bool,
    older_than: dt.timedelta | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove checkpoints that no rule keeps.

    Shows what would be removed, what would stay and why; removes it only with --yes. Give at least one rule; what any
    of them keeps stays. Safe while others read and save.
    """
    if abandoned != (older_than is not None):
        raise click.UsageError("give --abandoned and --older-than together, or neither")
    if keep_last is None and keep_every is None and keep_newer_than is None:
        raise click.UsageError(
            "give --keep-last, --keep-every or --keep-newer-than; --keep-last 1 keeps the latest only"
        )
    keep = Keep(last=keep_last, every=keep_every, newer_than=keep_newer_than)
    url = parse_run(run)
    opened = open_run(url)
    plan = opened.plan_prune(keep, abandoned=older_than)
    if yes:
        open_run(url, "a").prune(plan)
    if as_json:
        document.whole(_as_object(plan, done=yes))
    else:
        _show(Page(), plan, done=yes)


def _as_object(plan: Plan, *, done: bool) -> dict[str, Any]:
    return {
        "run": plan.url,
        "done": done,
        "bytes": plan.bytes,
        "checkpoints": [_checkpoint(decision) for decision in plan.checkpoints],
        "leftovers": [_leftover(leftover) for leftover in plan.leftovers],
        "unknown": list(plan.unknown),
    }


def _checkpoint(decision: Decision) -> dict[str, Any]:
    return {
        "sequence": decision.sequence,
        "kind": kind_of(decision.commit),
        "step": decision.commit.step,
        "created": decision.commit.created,
        "bytes": decision.bytes,
        "goes": decision.goes,
        "reasons": list(decision.reasons),
    }


def _leftover(leftover: Leftover) -> dict[str, Any]:
    return {name: getattr(leftover, name) for name in ("place", "objects", "bytes", "goes", "reason")}


def _show(page: Page, plan: Plan, *, done: bool) -> None:
    columns = [Column("number", right=True), Column("kind"), Column("step", right=True), Column("bytes", right=True)]
    sheet = Sheet(page, [*columns, Column("fate"), Column("why")])
    rows = [_cells(decision, done=done) for decision in plan.checkpoints]
    sheet.fit([[*row[:-1], ""] for row in rows])
    sheet.header()
    for decision, row in zip(plan.checkpoints, rows, strict=True):
        sheet.row(row, "red" if decision.goes else style_of(row[1]))
    for line in _lines(plan, done=done):
        page.line(line)


def _fate(*, goes: bool, done: bool) -> str:
    return ("removed" if done else "goes") if goes else "stays"


def _cells(decision: Decision, *, done: bool) -> list[str]:
    return [
        str(decision.sequence),
        kind_of(decision.commit),
        count(decision.commit.step),
        count(decision.bytes),
        _fate(goes=decision.goes, done=done),
        ", ".join(decision.reasons) or "no rule keeps it",
    ]


def _lines(plan: Plan, *, done: bool) -> Iterator[str]:
    if plan.leftovers or plan.unknown:
        yield ""
    for leftover in plan.leftovers:
        fate = _fate(goes=leftover.goes, done=done)
        size = f"{_plural(leftover.objects, 'object')} of {leftover.bytes:,} bytes"
        yield f"{leftover.place}: {fate}, {size}: {leftover.reason}"
    for place, objects in folded(plan.unknown):
        more = f" ({objects:,} objects)" if objects > 1 else ""
        yield f"{place}: stays: nobody knows what it is{more}"
    swept = sum(leftover.goes for leftover in plan.leftovers)
    what = _plural(len(plan.goes), "checkpoint") + (f" and {_plural(swept, 'leftover')}" if swept else "")
    yield ""
    yield f"{'Removed' if done else 'Would remove'} {what}: {plan.bytes:,} bytes. Stays: {len(plan.stays):,}."
    if not done and (plan.goes or swept):
        yield "Nothing was removed; --yes does it."


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
