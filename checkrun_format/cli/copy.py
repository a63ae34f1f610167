"""`checkrun copy`: a run, or one checkpoint and what it needs, to another place."""

from __future__ import annotations

import click

from checkrun_format.chain import History
from checkrun_format.cli import document
from checkrun_format.cli.address import NameType, number_of, parse_run
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Page
from checkrun_format.cli.progress import progress
from checkrun_format.copying import Copied, copy_run
from checkrun_format.stores import open_store
from checkrun_format.tags import Tags


@click.command(
    epilog=epilog(
        """
        SRC and DST are addresses of runs, as RUN in `checkrun --help`: folders,
        s3://BUCKET/PREFIX, ... A run that was copied by any other tool, object
        by object, is the same run as well; but such a copy may show a checkpoint
        before all of it is there.
        """,
        """
        With --json: {"source", "destination", "checkpoints", "present", "tags",
        "objects", "bytes"}: the numbers that were copied, those that were there
        already, the tags that were set, and what was written.
        """,
        examples="""
        checkrun copy my-run s3://bucket/backup
        checkrun copy my-run serving --checkpoint best
        """,
    )
)
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("destination", metavar="DST", type=click.Path())
@click.option("--checkpoint", type=NameType(), help="Only this number or tag, and the checkpoints that it needs.")
@json_option
def copy(*, source: str, destination: str, checkpoint: int | str | None, as_json: bool) -> None:
    """Copy the checkpoints of a run to another place.

    DST is a new run, or an earlier copy of SRC: it gets what it lacks, and nothing is removed. Interrupted, it goes on
    when it is run again. Each checkpoint appears at DST when it is whole; checksums are checked on the way.
    """
    url = parse_run(source)
    number = None if checkpoint is None else number_of(Tags(History(open_store(url))), checkpoint)
    with progress("copy") as advance:
        copied = copy_run(url, destination, checkpoint=number, advance=advance)
    if as_json:
        document.whole({"source": url, "destination": destination} | _as_object(copied))
    else:
        Page().line(_told(copied, destination))


def _as_object(copied: Copied) -> dict[str, object]:
    return {name: getattr(copied, name) for name in ("checkpoints", "present", "tags", "objects", "bytes")}


def _told(copied: Copied, destination: str) -> str:
    number = len(copied.checkpoints)
    what = f"{number:,} checkpoint{'s' * (number != 1)} copied to {destination}"
    there = f"; {len(copied.present):,} there already" if copied.present else ""
    return f"{what}: {copied.objects:,} objects, {copied.bytes:,} bytes{there}."
