"""`checkrun compact`: the latest state again, as one base."""

from __future__ import annotations

import click

from checkrun_format.cli import document
from checkrun_format.cli.address import parse_run, run_argument
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import WRITES, epilog
from checkrun_format.cli.page import Page
from checkrun_format.cli.successor import AS_OBJECT, Successor


@click.command(
    epilog=epilog(
        WRITES,
        AS_OBJECT,
        examples="""
        checkrun compact my-run
        """,
    )
)
@run_argument
@json_option
def compact(run: str, *, as_json: bool) -> None:
    """Commit the latest state again as one base.

    The new checkpoint holds the same values, bit for bit, without the chain of the latest one; nothing is decoded. It
    is quick to restore, and lets the chain be pruned. All other checkpoints stay as they are.
    """
    made = Successor.make(parse_run(run), lambda opened: opened.compact())
    if as_json:
        document.whole(made.as_object())
    else:
        Page().line(f"Checkpoint {made.committed.sequence}: {made.description()}.")
