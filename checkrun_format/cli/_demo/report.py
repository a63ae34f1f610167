"""What a complete demo shows, as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.cli._demo import snapshot
from checkrun_format.cli._demo.corpus import Corpus
from checkrun_format.cli._demo.folder import Folder
from checkrun_format.cli._demo.plan import INTERVAL, STEPS
from checkrun_format.cli._demo.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One save: a checkpoint, or the save that was killed. None where nobody could note it down."""

    sequence: int
    kind: str
    parent: int | None
    step: int | None
    changed: int | None
    stored_rows: int | None
    stored_bytes: int
    plain_bytes: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a complete demo shows.

    Attributes
    ----------
    rows : int
        Rows of both tables.
    loss, loss_without_crash, loss_restored : float
        Of the trainer at its end, of the trainer that was never killed, and of what the last checkpoint restores to.
    error : float
        Mean over the rows of the l2 norm of what quantization changed, relative to the row's own.
    altered : tuple of str
        Lossless arrays of the last checkpoint that differ from the trainer's; empty unless something is broken.
    attempt : str
        Key of the last checkpoint's arrays.
    """

    lines: tuple[Line, ...]
    rows: int
    loss: float
    loss_without_crash: float
    loss_restored: float
    error: float
    altered: tuple[str, ...]
    attempt: str


def is_complete(folder: Folder) -> bool:
    """Whether both runs have come to their end."""
    if folder.reference() is None or folder.result() is None:
        return False
    latest = crf.open_run(folder.run, mode="r").latest(default=None)
    return latest is not None and latest.step == STEPS


def collect(folder: Folder, corpus: Corpus) -> Report:
    """Read a complete demo's run, and compare its last checkpoint with the trainer's own values."""
    run = crf.open_run(folder.run, mode="r")
    latest = run.latest()
    restored = Trainer(corpus)
    snapshot.put_back(restored, latest.load())
    truth, stored = folder.truth(), snapshot.arrays(restored)
    result, reference = folder.result(), folder.reference()
    weights = {name for name in truth if name.endswith(".weight")}
    return Report(
        lines=_lines(folder, run, sum(array.nbytes for array in truth.values())),
        rows=sum(len(truth[name]) for name in weights),
        loss=result["loss"] if result else float("nan"),
        loss_without_crash=reference["loss"] if reference else float("nan"),
        loss_restored=restored.loss(),
        error=float(np.concatenate([relative_errors(stored[name], truth[name]) for name in sorted(weights)]).mean()),
        altered=tuple(name for name in truth if name not in weights and not identical(stored[name], truth[name])),
        attempt=latest.commit.prefix,
    )


def relative_errors(stored: npt.NDArray[Any], true: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """For each row, |stored - true| / |true| in the l2 norm; 0 where both are zero."""
    error = np.linalg.norm(stored.astype(np.float64) - true, axis=1)
    norm = np.linalg.norm(true.astype(np.float64), axis=1)
    relative: npt.NDArray[np.float64] = np.where(error > 0, np.inf, 0.0)
    np.divide(error, norm, out=relative, where=norm > 0)
    return relative


def identical(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _lines(folder: Folder, run: crf.Run, plain_bytes: int) -> tuple[Line, ...]:
    saved = {event["sequence"]: event for event in folder.events("saved")}
    found = [_killed(folder, run, event["sequence"]) for event in folder.events("killed")]
    for checkpoint in run.log():
        noted = saved.get(checkpoint.sequence, {})
        found.append(
            Line(
                sequence=checkpoint.sequence,
                kind="base" if checkpoint.parent is None else "increment",
                parent=checkpoint.parent,
                step=checkpoint.step,
                changed=noted.get("changed"),
                stored_rows=sum(checkpoint.table(name).stored_rows for name in ("in", "out")),
                stored_bytes=checkpoint.stored_bytes,
                plain_bytes=plain_bytes,
                seconds=noted.get("seconds"),
            )
        )
    return tuple(sorted(found, key=lambda line: (line.sequence, line.kind != "killed")))


def _killed(folder: Folder, run: crf.Run, sequence: int) -> Line:
    """The save that was killed: of its attempt only litter is left, beside the one that was committed later."""
    committed = run[sequence].commit.attempt
    attempts = [path for path in (folder.run / layout.folder(sequence)).iterdir() if path.is_dir()]
    return Line(
        sequence=sequence,
        kind="killed",
        parent=None,
        step=sequence * INTERVAL,
        changed=None,
        stored_rows=None,
        stored_bytes=sum(_size(path) for path in attempts if path.name != committed),
        plain_bytes=None,
        seconds=None,
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
