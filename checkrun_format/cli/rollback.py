"""`checkrun rollback`: back to an earlier checkpoint."""

from __future__ import annotations

import click

from checkrun_format.cli import document
from checkrun_format.cli.address import checkpoint_argument, number_of, parse_run, run_argument
from checkrun_format.cli.census import open_history
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import WRITES, epilog
from checkrun_format.cli.page import Page
from checkrun_format.cli.successor import AS_OBJECT, Successor
from checkrun_format.tags import Tags


@click.command(
    epilog=epilog(
        WRITES,
        AS_OBJECT,
        examples="""
        checkrun rollback my-run 41
        checkrun rollback my-run best
        """,
    )
)
@run_argument
@checkpoint_argument("checkpoint", "SEQ")
@json_option
def rollback(run: str, checkpoint: int | str, *, as_json: bool) -> None:
    """Go back to an earlier checkpoint.

    SEQ is its number, or a tag. Its state is committed again as a new checkpoint, so that the latest one is always the
    one to resume from; nothing is removed, and what came after SEQ can be gone back to as well.
    """
    history, _ = open_history(url := parse_run(run))
    number = number_of(Tags(history), checkpoint)
    made = Successor.make(url, lambda opened: opened.rollback(number))
    if as_json:
        document.whole(made.as_object())
    else:
        Page().line(f"Checkpoint {made.committed.sequence}: {made.description()}.")
