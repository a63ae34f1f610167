"""`checkrun demo`: train, save, crash, restore, finish, and show what was stored."""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import checkrun_format as crf
from checkrun_format.cli._demo import page, report
from checkrun_format.cli._demo.corpus import Corpus, read_corpus
from checkrun_format.cli._demo.folder import Folder, FolderError
from checkrun_format.cli._demo.plan import KILLED_IN, STEPS
from checkrun_format.cli._demo.processes import told, training

_INTERRUPTED = 130


class RefusedError(click.ClickException):
    """The folder cannot be used."""

    exit_code = 2


@click.command(
    epilog="""\b
    Exit codes:
      0    complete, and everything lossless came back bit for bit
      1    training failed, or what was stored is damaged
      2    DIR holds something else, or cannot be used
      130  interrupted; the same command continues

    \b
    Example:
      checkrun demo /tmp/my-demo"""
)
@click.argument("folder", metavar="[DIR]", default="checkrun-demo", type=click.Path(path_type=Path))
def demo(folder: Path) -> None:
    """Train, save, crash, restore, finish; show what was stored.

    Trains word embeddings on the help text of Python itself and saves them into the run DIR/run (by default
    checkrun-demo/run): a base and increments, weights at 4 bits, optimizer sums lossless. One training process is
    killed in the middle of a save; a second one restores and goes on. Takes about a minute, without a network.

    The same command in the same DIR continues an unfinished demo, and shows a finished one again.
    """
    home, on = Folder(folder), page.console()
    try:
        corpus = _corpus()
        home.claim(corpus.digest())
        _run(home, corpus, on)
    except FolderError as error:
        raise RefusedError(str(error)) from error
    except (crf.CheckrunError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("\nInterrupted. The same command continues from the latest checkpoint.", err=True)
        raise click.exceptions.Exit(_INTERRUPTED) from None


def _corpus() -> Corpus:
    try:
        return read_corpus()
    except ImportError as error:
        raise click.ClickException(f"this Python was installed without its help text ({error})") from error


def _run(home: Folder, corpus: Corpus, on: Console) -> None:
    again = report.is_complete(home)
    if again:
        on.print(f"{home.path} is complete. This is what was stored:\n", soft_wrap=True)
    else:
        _train(home, corpus, on)
    found = report.collect(home, corpus)
    page.show(found, home.run, on)
    if again:
        on.print(f"To start afresh: name another DIR, or delete {home.path}.", soft_wrap=True)
    if found.altered:
        raise click.ClickException("the last checkpoint is not what the trainer had")


def _train(home: Folder, corpus: Corpus, on: Console) -> None:
    on.print(
        f"Training {len(corpus.names):,} vectors of words and word pairs on {len(corpus.word_at):,} words of Python's "
        f"help text.\nSaving into {home.run}.",
        soft_wrap=True,
    )
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    with ExitStack() as stack:
        without = None
        if home.reference() is None:
            without = stack.enter_context(training(home, "--without-run"))
        progress = stack.enter_context(Progress(*columns, console=on, transient=True, disable=not on.is_terminal))
        _train_to_the_end(home, progress)
        if without is not None:
            _check(without)
    on.print()


def _train_to_the_end(home: Folder, progress: Progress) -> None:
    """Start training processes until one is not killed as planned."""
    task = progress.add_task("training", total=STEPS, loss="")
    while True:
        planned = [] if home.events("killed") else ["--killed-in", str(KILLED_IN)]
        with training(home, *planned) as process:
            for event in told(process):
                if event["event"] == "trained":
                    progress.update(task, completed=event["step"], loss=f"loss {event['loss']:.3f}")
                else:
                    progress.console.print(_sentence(event))
            killed = process.wait() == -signal.SIGKILL and planned and home.events("killed")
        if not killed:
            _check(process)
            return
        progress.console.print(f"Killed with SIGKILL in the middle of save {KILLED_IN}. Starting a new process.")


def _sentence(event: dict[str, Any]) -> str:
    if event["event"] == "restored":
        return f"Restored checkpoint {event['sequence']}; training goes on at step {event['step']:,}."
    kind = "a base" if event["parent"] is None else f"an increment over {event['parent']}"
    return f"Saved checkpoint {event['sequence']}, {kind}, at step {event['step']:,} in {event['seconds']:.2f} s."


def _check(process: subprocess.Popen[str]) -> None:
    code = process.wait()
    if code < 0:
        raise click.ClickException(
            f"a training process was killed by {signal.Signals(-code).name}; the same command continues"
        )
    if code > 0:
        raise click.ClickException("a training process failed (see above); the same command tries again")
