"""`checkrun ls`: the checkpoints of a run, from its commits alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import click

from checkrun_format.cli import document, endings
from checkrun_format.cli.address import parse_run, run_argument
from checkrun_format.cli.census import Number, census, open_history
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Column, Page, Sheet, style_of
from checkrun_format.cli.text import count


@click.command(
    epilog=epilog(
        """
        With --json: {"run", "problems", "numbers": [...], "unreadable"}, and for
        each number "sequence", "kind", "step", "parent", "predecessor",
        "rollback_to", "created", "restores", "attempt", "bytes", "policy",
        "broken_at" (where its chain breaks) and "problem"; null if not known.
        """,
        examples="""
        checkrun ls my-run
        checkrun ls my-run --json | jq '.numbers[] | select(.parent == null)'
        """,
    )
)
@run_argument
@json_option
def ls(run: str, *, as_json: bool) -> None:
    """List the checkpoints of a run.

    Reads commits only, one at a time, so that thousands of checkpoints are quick. Numbers that are pruned, burnt or
    damaged are listed too; a checkpoint whose chain is broken is marked UNREADABLE.
    """
    history, problems = open_history(parse_run(run))
    tally = Tally(census(history))
    if as_json:
        head = {"run": history.store.url, "problems": [document.problem(p) for p in problems]}
        items = (number.as_object() for number in tally)
        document.listing(head, "numbers", items, lambda: {"unreadable": tally.unreadable})
    else:
        _show(tally)
    endings.conclude(problems, unreadable=tally.unreadable)


class Tally:
    """Counts those of some numbers that cannot be read, while they pass."""

    def __init__(self, numbers: Iterable[Number]) -> None:
        self._numbers = numbers
        self.unreadable = 0

    def __iter__(self) -> Iterator[Number]:
        for number in self._numbers:
            self.unreadable += number.is_unreadable
            yield number


def _show(numbers: Iterable[Number]) -> None:
    sheet = Sheet(
        Page(),
        [
            Column("number", right=True),
            Column("kind", width=9),
            Column("step", right=True, width=9),
            Column("parent", right=True),
            Column("bytes", right=True, width=14),
            Column("created", width=20),
            Column("restores", right=True),
            Column("policy and reason"),
        ],
    )
    sheet.header()
    for number in numbers:
        sheet.row(_cells(number), "red" if number.is_unreadable else style_of(number.kind))


def _cells(number: Number) -> list[str]:
    commit = number.commit
    if commit is None:
        return [str(number.sequence), number.kind, "-", "-", "-", "-", "-", number.note]
    return [
        str(number.sequence),
        number.kind,
        count(commit.step),
        "-" if commit.parent is None else str(commit.parent),
        count(number.bytes),
        re.sub(r"\.[0-9]+Z$", "Z", commit.created),
        str(commit.restores),
        number.note,
    ]
