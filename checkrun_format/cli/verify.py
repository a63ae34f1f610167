"""`checkrun verify`: everything that is wrong with a run, or with one checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from checkrun_format import layout
from checkrun_format.chain import History
from checkrun_format.cli import document, endings
from checkrun_format.cli.address import address_argument, parse
from checkrun_format.cli.census import open_history
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Page
from checkrun_format.cli.text import folded
from checkrun_format.manifest import Problem
from checkrun_format.verify import Auditor, verify_checkpoint

_LITTER = "litter"


@click.command(
    epilog=epilog(
        """
        Kinds: damaged, burnt, pruned (and yet needed), unsupported_version,
        unsupported_feature, storage, not_a_run; and litter, which no checkpoint
        needs: it is harmless and does not change the exit code.
        """,
        """
        With --json: {"run", "sequence", "fast", "problems": [{"place", "kind",
        "message"}], "checked", "counts", "safe", "affected": [{"sequence",
        "broken_at"}]}; the last two are null if only one checkpoint is checked.
        """,
        examples="""
        checkrun verify my-run
        checkrun verify my-run@42 --json | jq '.problems[].place'
        """,
    )
)
@address_argument
@click.option("--fast", is_flag=True, help="Only look whether all objects are there; read documents, but no values.")
@json_option
def verify(address: str, *, fast: bool, as_json: bool) -> None:
    """Check everything that is stored.

    That is: every requirement of the format that can be checked on the stored bytes of a run, or of checkpoint SEQ.
    Each problem is a line, PLACE: KIND: MESSAGE; litter is one for each folder. Then it says which checkpoints are
    affected, by what is wrong in them or in their chains, and which are safe. Exit code 1 if there is any problem but
    litter.
    """
    where = parse(address)
    history, problems = open_history(where.url)
    page, auditor = Page(), Auditor(history.store, fast=fast) if where.sequence is None else None
    numbers = [_existing(history, where.sequence or 0)] if auditor is None else auditor.numbers
    with _watched(numbers, _console(page, as_json=as_json)) as watched:
        if auditor is not None:
            found = auditor.problems(watched)
        else:
            found = (problem for number in watched for problem in verify_checkpoint(history.store, number, fast=fast))
        findings = Findings(itertools.chain(problems, found))
        if as_json:
            head = {"run": history.store.url, "sequence": where.sequence, "fast": fast}
            items = (document.problem(problem) for problem in findings)
            document.listing(head, "problems", items, lambda: _totals(findings, len(numbers), auditor))
        else:
            for problem in _without_crowds(findings):
                style = "dim" if problem.kind == _LITTER else "red"
                page.line(problem.place, ": ", (problem.kind, style), f": {problem.message}")
    if not as_json:
        page.line(_conclusion(findings.counts, len(numbers)))
        if auditor is not None:
            _show_affected(page, *auditor.verdict())
    if findings.counts.keys() - {_LITTER}:
        raise click.exceptions.Exit(endings.DAMAGED)


def _without_crowds(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The same, but the litter of one folder, which may be all that a killed save wrote, as one problem."""
    for (kind, message), found in itertools.groupby(problems, lambda problem: (problem.kind, problem.message)):
        if kind != _LITTER:
            yield from found
            continue
        for place, objects in folded(problem.place for problem in found):
            more = f" ({objects:,} objects)" if objects > 1 else ""
            yield Problem(place=place, kind=kind, message=message + more)


def _existing(history: History, sequence: int) -> int:
    """The same number; an error if there is nothing of this number, not even litter."""
    if not history.store.list(layout.folder(sequence)):
        history.get(sequence)
    return sequence


def _console(page: Page, *, as_json: bool) -> Console | None:
    """Where progress can be drawn without disturbing what is printed."""
    if page.console is not None:
        return None if as_json else page.console
    return Console(stderr=True) if sys.stderr.isatty() else None


@contextlib.contextmanager
def _watched(numbers: Sequence[int], console: Console | None) -> Iterator[Iterable[int]]:
    """The same numbers; how far they are is drawn while they are taken."""
    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Rich would send what is printed meanwhile to where it draws progress.
    with Progress(
        *columns,
        console=console,
        disable=console is None,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        yield progress.track(numbers)


class Findings:
    """Problems, counted by kind while they pass.

    A damaged object is met again by every checkpoint whose chain needs it: the same problem passes once.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self._problems = problems
        self.counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Problem]:
        seen: set[Problem] = set()
        for problem in self._problems:
            if problem not in seen:
                self.counts[problem.kind] += 1
                yield problem
            if problem.kind != _LITTER:
                seen.add(problem)


def _totals(findings: Findings, numbers: int, auditor: Auditor | None) -> dict[str, Any]:
    told: dict[str, Any] = {"checked": numbers, "counts": dict(findings.counts), "safe": None, "affected": None}
    if auditor is not None:
        safe, affected = auditor.verdict()
        told |= {"safe": safe, "affected": [{"sequence": n, "broken_at": at} for n, at in affected.items()]}
    return told


def _show_affected(page: Page, safe: list[int], affected: dict[int, int]) -> None:
    if not affected:
        return
    told = [str(number) if at == number else f"{number} (by {at})" for number, at in affected.items()]
    page.line(f"Affected: {', '.join(told)}.")
    page.line(f"Safe: {_ranges(safe) or 'none'}.")


def _ranges(numbers: list[int]) -> str:
    """Numbers in ascending order, neighbours as 4-7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _conclusion(counts: Counter[str], numbers: int) -> str:
    checked = f"{numbers:,} number{'s' * (numbers != 1)} checked"
    found = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
    return f"{checked}: {found or 'no problem'}."
