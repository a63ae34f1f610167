"""What stands below the options in the help of each command."""

from __future__ import annotations

import textwrap

CODES = """
    Exit codes:
      0    fine
      1    something is damaged; what can be read is shown
           (verify: there is any problem but litter)
      2    wrong usage, or a value or file that is refused
      3    not found: no such run, checkpoint, table, row, key or file; or it
           is pruned or burnt
      4    written in a format version, or with a feature, that this release
           does not read
      5    the store failed: permission, space, network; or another process
           committed meanwhile
      130  interrupted
      141  nobody reads the output any more
"""

ADDRESSES = """
    RUN is a folder, s3://BUCKET/PREFIX, or another address that fsspec knows;
    RUN@SEQ is its checkpoint SEQ, RUN@TAG the one that has this tag. Where a
    folder has such a name itself, RUN/@SEQ is always the checkpoint and
    NAME@SEQ/ always the folder; what may mean either is refused.

    Remote stores are configured by the environment: AWS_ENDPOINT_URL,
    AWS_ACCESS_KEY_ID and the like; CHECKRUN_SINGLE_WRITER=1 says that nobody
    else writes the run, where a server cannot create exactly.
"""

JSON = """
    With --json, standard output is JSON and nothing else. Errors and
    warnings are lines on standard error.
"""

JSON_VALUES = """
    Numbers in JSON are exact: a float32 is written as the double that it
    equals. NaN and infinities are the texts "NaN", "Infinity" and
    "-Infinity"; a complex number is [real, imaginary].
"""


WRITES = """
    A process that has the run open to save may not save any more after this:
    it is told so, and is to be started again.
"""


def epilog(*paragraphs: str, examples: str, pointer: bool = True) -> str:
    """Paragraphs that are printed as they are, then examples, then where the exit codes are explained."""
    shown = [*paragraphs, "Example:\n" + textwrap.indent(textwrap.dedent(examples).strip("\n"), "  ")]
    if pointer:
        shown.append("Exit codes: see `checkrun --help`.")
    return "\n\n".join("\b\n" + textwrap.dedent(paragraph).strip("\n") for paragraph in shown)
