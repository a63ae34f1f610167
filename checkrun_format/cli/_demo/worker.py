"""The demo's training process: `python -m checkrun_format.cli._demo.worker FOLDER [--without-run] [--killed-in N]`.

It tells what it does on standard output, one JSON object a line, and ends when its standard input does: a demo that
is killed takes its training process with it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import checkrun_format as crf
from checkrun_format.cli._demo import snapshot
from checkrun_format.cli._demo.corpus import read_corpus
from checkrun_format.cli._demo.folder import Folder
from checkrun_format.cli._demo.plan import BITS, INTERVAL, STEPS
from checkrun_format.cli._demo.trainer import Trainer
from checkrun_format.stores import Buffer, LocalStore

_OBJECTS_BEFORE_KILL = 8  # of about twenty


class DeadlyStore(LocalStore):
    """A local store that kills its own process once it has stored a few objects of the save that is `armed`."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.run)
        self._folder = folder
        self._armed: int | None = None
        self._left = _OBJECTS_BEFORE_KILL
        self._lock = threading.Lock()

    def arm(self, sequence: int) -> None:
        """The next save, of this number, is the one that the process does not survive."""
        self._armed = sequence

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        size = super().put(key, buffers)
        with self._lock:
            self._left -= self._armed is not None
            if self._left == 0:
                self._folder.note("killed", sequence=self._armed)
                os.kill(os.getpid(), signal.SIGKILL)
        return size


def train_without_run(folder: Folder) -> None:
    """The same training, never saved and never killed: what its loss would have been."""
    trainer = Trainer(read_corpus())
    while trainer.step < STEPS:
        trainer.train()
    folder.write_reference({"loss": trainer.loss()})


def train(folder: Folder, killed_in: int | None) -> None:
    """Train from the latest checkpoint, if there is one, to the end."""
    trainer, store = Trainer(read_corpus()), DeadlyStore(folder)
    run = crf.open_run(store, mode="a", policy="intermittent", bits=BITS)
    if (latest := run.latest(default=None)) is not None:
        snapshot.put_back(trainer, run.restore())
        _tell("restored", sequence=latest.sequence, step=trainer.step)
    while trainer.step < STEPS:
        _train_until(trainer, trainer.step + INTERVAL - trainer.step % INTERVAL)
        if trainer.step == STEPS:  # before the last save: once that is committed, nothing is left to do
            folder.write_result({"loss": trainer.loss()}, snapshot.arrays(trainer))
        if (sequence := trainer.step // INTERVAL) == killed_in:
            store.arm(sequence)
        _save(trainer, run, folder)


def _train_until(trainer: Trainer, step: int) -> None:
    while trainer.step < step:
        loss = trainer.train()
        if trainer.step % 20 == 0:
            _tell("trained", step=trainer.step, loss=loss)


def _save(trainer: Trainer, run: crf.Run, folder: Folder) -> None:
    state, changed = snapshot.take(trainer)
    begin = time.perf_counter()
    saved = run.save(state, step=trainer.step)
    seconds = time.perf_counter() - begin
    folder.note("saved", sequence=saved.sequence, changed=changed, seconds=seconds)
    _tell("saved", sequence=saved.sequence, step=saved.step, parent=saved.parent, seconds=seconds)


def _tell(event: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Run one training process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without-run", action="store_true")
    parser.add_argument("--killed-in", type=int)
    options = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if options.without_run:
        train_without_run(Folder(options.folder))
    else:
        train(Folder(options.folder), options.killed_in)


if __name__ == "__main__":
    try:
        main()
    except crf.CheckrunError as error:
        sys.exit(f"checkrun demo: {error}")
    except BrokenPipeError:  # the parent is gone
        os._exit(1)
