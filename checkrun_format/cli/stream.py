"""Standard output, whatever it is: a terminal, a pipe that may break, a disk that may be full."""

from __future__ import annotations

import io
import os
import sys

from checkrun_format.errors import StorageError


class _Nowhere(io.TextIOBase):
    """Takes every text and keeps none."""

    def write(self, text: str, /) -> int:
        return len(text)


def prepare() -> None:
    """Let characters that the encoding of standard output lacks be written as escapes instead of failing."""
    if sys.stdout is None:  # it was closed before the process began
        sys.stdout = _Nowhere()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """Write a text.

    Raises
    ------
    BrokenPipeError
        Nobody reads any more.
    StorageError
        It cannot be written.
    """
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _refused(error) from error


def flush() -> None:
    """Write what waits; errors as of `write`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _refused(error) from error


def abandon() -> None:
    """Forget what waits, so that the end of the process does not try to write it again."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def _refused(error: OSError) -> StorageError:
    abandon()
    return StorageError(error.errno, f"standard output: {error.strerror}")
