"""`checkrun tag`: names of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from checkrun_format import layout
from checkrun_format.chain import History
from checkrun_format.cli import document, endings
from checkrun_format.cli.address import checkpoint_argument, number_of, parse_run, run_argument
from checkrun_format.cli.census import look_up, open_history
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Column, Page, Sheet
from checkrun_format.cli.text import count
from checkrun_format.errors import CheckrunError
from checkrun_format.manifest import Problem
from checkrun_format.tags import Tags


@click.command(
    epilog=epilog(
        """
        A name is 1 to 64 of a-z 0-9 . _ - and begins with a letter or digit; it
        is no number. Where RUN@SEQ names a checkpoint, RUN@NAME does so too.
        """,
        """
        With --json: {"run", "tags": [{"name", "sequence", "kind", "step"}],
        "problems"}, after what was done; "kind" as of `checkrun ls`.
        """,
        examples="""
        checkrun tag my-run best 42
        checkrun tag my-run
        checkrun tag my-run --delete best
        """,
    )
)
@run_argument
@click.argument("name", required=False)
@checkpoint_argument("checkpoint", "[SEQ]", required=False)
@click.option("--delete", metavar="NAME", help="Forget this name; its checkpoint stays until a prune.")
@json_option
def tag(run: str, name: str | None, checkpoint: int | str | None, *, delete: str | None, as_json: bool) -> None:
    """Name a checkpoint, or list the names.

    No prune removes a checkpoint that has a name, nor what it needs. SEQ is a number, or another name. A name that was
    another checkpoint's moves.
    """
    if (name is None) != (checkpoint is None) or (delete is not None and name is not None):
        raise click.UsageError("give NAME and SEQ, or --delete NAME, or neither")
    history, problems = open_history(parse_run(run))
    tags = Tags(history)
    if name is not None and checkpoint is not None:
        tags.put(name, number_of(tags, checkpoint))
    if delete is not None:
        tags.delete(delete)
    listed = list(_listed(history, tags, problems))
    if as_json:
        told = {"tags": listed, "problems": [document.problem(problem) for problem in problems]}
        document.whole({"run": history.store.url} | told)
    elif name is not None:
        Page().line(f"Checkpoint {tags.get(name)} is {name!r}.")
    elif delete is not None:
        Page().line(f"No checkpoint is {delete!r} any more.")
    else:
        _show(Page(), listed)
    endings.conclude(problems)


def _listed(history: History, tags: Tags, problems: list[Problem]) -> Iterator[dict[str, Any]]:
    """The tags as JSON values; what is wrong with one goes to the problems."""
    for name in tags.names():
        try:
            sequence = tags.get(name)
            if sequence is None:
                continue
            found = look_up(history, sequence)
            step = None if found is None or found.commit is None else found.commit.step
            kind = "missing" if found is None else found.kind
            yield {"name": name, "sequence": sequence, "kind": kind, "step": step}
            tags.check(name)
        except CheckrunError as error:
            problems.append(Problem.of(error, layout.tag_key(name)))


def _show(page: Page, listed: list[dict[str, Any]]) -> None:
    if not listed:
        page.line("No tags.")
        return
    columns = [Column("tag"), Column("number", right=True), Column("kind"), Column("step", right=True)]
    rows = [[tag["name"], str(tag["sequence"]), tag["kind"], count(tag["step"])] for tag in listed]
    Sheet(page, columns).rows(rows)
