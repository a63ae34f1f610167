"""The command `checkrun`. One module per command; none imports another.

Beside them what they share: `address` (which run, checkpoint, rows), `census` and `lineage` (what the commits of a run
say), `description` (what the documents of a checkpoint say), `values` and `salvage` (rows, and reading around damage),
`sample` and `graph` (some rows of each table, and what encoders make of them, drawn),
`page`, `text` and `document` (print for people, safely, and for programs), `progress`, `stream`, `endings` and `manual`
(how far it is, standard output, exit codes, help).
"""

from __future__ import annotations

import click

from checkrun_format.cli.cat import cat
from checkrun_format.cli.changes import changes
from checkrun_format.cli.compact import compact
from checkrun_format.cli.copy import copy
from checkrun_format.cli.demo import demo
from checkrun_format.cli.diff import diff
from checkrun_format.cli.endings import Shell
from checkrun_format.cli.export import export
from checkrun_format.cli.import_ import import_
from checkrun_format.cli.info import info
from checkrun_format.cli.ls import ls
from checkrun_format.cli.manual import ADDRESSES, CODES, JSON, epilog
from checkrun_format.cli.prune import prune
from checkrun_format.cli.quantize_report import quantize_report
from checkrun_format.cli.rollback import rollback
from checkrun_format.cli.tag import tag
from checkrun_format.cli.tree import tree
from checkrun_format.cli.verify import verify
from checkrun_format.versions import __version__

__all__ = ["main"]


@click.group(
    cls=Shell,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=epilog(
        ADDRESSES,
        JSON,
        CODES,
        examples="""
        checkrun ls my-run
        checkrun cat my-run@42 user --rows 0:10
        """,
        pointer=False,
    ),
)
@click.version_option(__version__, prog_name="checkrun")
def main() -> None:
    """Checkpoints of recommendation models, incremental and quantized, in an open format."""


_COMMANDS = (
    *(cat, changes, compact, copy, demo, diff, export, import_, info),
    *(ls, prune, quantize_report, rollback, tag, tree, verify),
)
for _command in _COMMANDS:
    main.add_command(_command)
