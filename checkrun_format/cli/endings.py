"""How a command ends: its exit code, and one line on standard error if something is wrong."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

import click

from checkrun_format import errors
from checkrun_format.cli import stream
from checkrun_format.cli.text import escaped
from checkrun_format.manifest import Problem

DAMAGED, USAGE, NOT_FOUND, UNSUPPORTED, STORAGE, INTERRUPTED, UNREAD = 1, 2, 3, 4, 5, 130, 141

_CODE_OF: dict[type[errors.CheckrunError], int] = {
    errors.DamagedError: DAMAGED,
    errors.InvalidInputError: USAGE,
    errors.NotFoundError: NOT_FOUND,
    errors.PrunedError: NOT_FOUND,
    errors.BurntError: NOT_FOUND,
    errors.HistoryPrunedError: NOT_FOUND,
    errors.UnsupportedVersionError: UNSUPPORTED,
    errors.UnsupportedFeatureError: UNSUPPORTED,
    errors.ConcurrentCommitError: STORAGE,
    errors.RankError: STORAGE,
    errors.SaveCancelledError: INTERRUPTED,
    errors.StorageError: STORAGE,
}

_TOLD = (errors.BurntNumberWarning, errors.FallbackWarning, errors.PruneWarning)
"""Warnings of the library."""


def code_of(error: errors.CheckrunError) -> int:
    """The exit code of a command that an error ends."""
    return next(code for kind, code in _CODE_OF.items() if isinstance(error, kind))


def tell(message: str) -> None:
    """One line on standard error, after all that was printed so far."""
    stream.flush()
    with contextlib.suppress(OSError):  # if nobody can be told, the exit code still says it
        click.echo(f"checkrun: {escaped(message)}", err=True)


def conclude(problems: Iterable[Problem], *, unreadable: int = 0) -> None:
    """Tell the problems that a command has met; if there is one, end with the exit code of damage.

    Parameters
    ----------
    unreadable : int
        How many numbers it has shown as damaged.
    """
    lines = [f"{problem.place}: {problem.kind}: {problem.message}" for problem in problems]
    if unreadable:
        lines.append(f"{unreadable:,} of these numbers cannot be read")
    for line in lines:
        tell(line)
    if lines:
        raise click.exceptions.Exit(DAMAGED)


class Shell(click.Group):
    """A group of commands that end in this way: errors of the library as one line, all others as they are."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the arguments; `--help` and `--version` are printed here."""
        stream.prepare()
        with _ended():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        with _ended(), _warned():
            return super().invoke(ctx)


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    try:
        try:
            yield
        finally:
            stream.flush()
    except errors.CheckrunError as error:
        tell(_message(error))
        raise click.exceptions.Exit(code_of(error)) from error
    except BrokenPipeError:
        stream.abandon()
        raise click.exceptions.Exit(UNREAD) from None
    except OSError as error:  # of click, which prints the help
        stream.abandon()
        tell(f"{error.filename or 'standard output'}: {error.strerror}")
        raise click.exceptions.Exit(STORAGE) from error
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None


def _message(error: errors.CheckrunError) -> str:
    if isinstance(error, errors.StorageError) and error.strerror:
        return error.strerror  # without the number of the error
    return str(error)


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    """Warnings of the library as one line, each time."""
    with warnings.catch_warnings():
        for category in _TOLD:
            warnings.simplefilter("always", category)
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, _TOLD):
                tell(f"warning: {message}")
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
