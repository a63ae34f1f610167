"""Error against bytes and against time, drawn."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checkrun_format.errors import InvalidInputError, NotFoundError, StorageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What an encoder made of some rows at one width."""

    encoder: str
    bits: int
    error: float
    bytes: float
    nanoseconds: float


def check(path: Path) -> None:
    """Refuse what `draw` could not write, before anything is measured.

    Raises
    ------
    InvalidInputError, NotFoundError
    """
    if path.suffix.lower() != ".svg" or path.is_dir():
        raise InvalidInputError(f"--plot {str(path)!r}: it writes SVG; name a file that ends in .svg")
    if not path.parent.is_dir():
        raise NotFoundError(f"{path.parent}: no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInputError('--plot needs the package matplotlib: pip install "checkrun-format[plot]"')


def draw(panels: Sequence[tuple[str, Sequence[Point]]], path: Path) -> None:
    """Write an SVG: for each title a pair of panels, error against bytes and against time, a line for each encoder.

    Raises
    ------
    StorageError
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with warnings.catch_warnings(), rc_context({"svg.fonttype": "none", "svg.hashsalt": "checkrun"}):
        warnings.simplefilter("ignore")  # names may have characters that the font lacks
        figure = Figure(figsize=(11, 4 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 2, squeeze=False)
        for (title, points), (against_bytes, against_time) in zip(panels, axes, strict=True):
            _panel(against_bytes, points, "bytes", "bytes a row")
            _panel(against_time, points, "nanoseconds", "ns an element")
            against_bytes.set_title(title, parse_math=False)
            against_time.legend(title="numbers: bits")
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    try:
        path.write_bytes(text.getvalue())
    except OSError as error:
        raise StorageError(error.errno, f"{path}: {error.strerror}") from error


def _panel(axes: Axes, points: Sequence[Point], across: str, label: str) -> None:
    for number, encoder in enumerate(dict.fromkeys(point.encoder for point in points)):
        line = [(getattr(p, across), p.error, p.bits) for p in points if p.encoder == encoder]
        axes.plot([x for x, _, _ in line], [y for _, y, _ in line], "o-", ms=3, color=f"C{number}", label=encoder)
        for x, y, bits in line:
            axes.annotate(str(bits), (x, y), xytext=(3, 3), textcoords="offset points", color=f"C{number}", size=8)
    axes.set(xlabel=label, ylabel="mean l2 error / mean l2 norm")
    if any(point.error > 0 for point in points):
        axes.set_yscale("log")
    if across == "nanoseconds":
        axes.set_xscale("log")
