"""`python -m checkrun_format.cli` is `checkrun`."""

from __future__ import annotations

from checkrun_format.cli import main

main(prog_name="checkrun")
