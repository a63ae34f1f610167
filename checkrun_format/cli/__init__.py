"""The command `checkrun`. One module per command; none imports another."""

from __future__ import annotations

import click

from checkrun_format.cli.demo import demo
from checkrun_format.versions import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="checkrun")
def main() -> None:
    """Checkpoints of recommendation models, incremental and quantized, in an open format."""


main.add_command(demo)
