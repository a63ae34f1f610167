"""What `refine` tries, and when the encoders that search leave a row as `minmax` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

NARROWEST = np.float32(2.0**-100)
"""Range of a row up to which it is left as `minmax` has it."""

MOVING_BITS = 4
"""Up to which width the trials are moves; above, they are waves."""


def risk(bits: int) -> np.float32:
    """Part of its squared error that the rounding of the qparams may add unless the row is compared with `minmax`."""
    return np.float32(0.02 if bits <= MOVING_BITS else 0.0)


_Move = tuple[str, float]

_MOVES: dict[int, dict[int, tuple[_Move, ...]]] = {
    2: {
        0: (("high", 0.09), ("shift", 0.09), ("low", 0.04), ("shift", -0.04), ("shift", 0.03)),
        32: (("both", 0.09), ("shift", -0.09), ("shift", 0.06), ("shift", -0.03), ("shift", 0.015), ("shift", 0.21)),
        96: (
            *(("both", 0.13), ("shift", -0.09), ("high", -0.02), ("shift", 0.06)),
            *(("shift", -0.02), ("shift", 0.02), ("shift", -0.01)),
        ),
        240: (
            *(("high", 0.21), ("shift", 0.21), ("high", 0.09), ("shift", 0.09), ("shift", -0.17), ("shift", -0.06)),
            *(("shift", 0.03), ("shift", -0.015), ("shift", 0.003)),
        ),
    },
    3: {
        0: (("low", 0.04), ("high", 0.06), ("shift", 0.015), ("shift", -0.01), ("low", -0.17)),
        32: (("both", 0.04), ("high", 0.08), ("shift", 0.03), ("shift", -0.02), ("shift", 0.01), ("shift", -0.006)),
        64: (
            *(("both", 0.06), ("high", 0.09), ("low", 0.09), ("shift", -0.02)),
            *(("shift", 0.02), ("shift", -0.006), ("shift", 0.003)),
        ),
        160: (
            *(("both", 0.06), ("high", 0.08), ("low", 0.1), ("low", -0.03), ("shift", 0.02)),
            *(("shift", -0.01), ("shift", 0.1), ("low", 0.006)),
        ),
        320: (
            *(("both", 0.06), ("high", 0.08), ("low", 0.1), ("high", 0.1), ("shift", 0.1), ("low", -0.03)),
            *(("shift", 0.04), ("both", -0.006), ("high", 0.03), ("low", 0.01)),
        ),
    },
    4: {
        0: (("high", 0.02), ("low", 0.02), ("high", -0.08), ("low", -0.01), ("high", -0.015)),
        32: (("low", 0.03), ("high", 0.03), ("shift", 0.01), ("shift", -0.005), ("shift", 0.002), ("low", -0.08)),
        64: (
            *(("high", 0.03), ("low", 0.04), ("high", 0.02), ("low", 0.015), ("shift", -0.007)),
            *(("shift", 0.002), ("high", -0.02), ("low", -0.003)),
        ),
        160: (
            *(("both", 0.02), ("low", 0.04), ("high", 0.04), ("shift", 0.007), ("shift", -0.007)),
            *(("shift", 0.003), ("shift", -0.06), ("high", 0.003)),
        ),
        320: (
            *(("high", 0.03), ("high", 0.08), ("low", 0.08), ("low", 0.03), ("high", 0.04), ("both", -0.02)),
            *(("shift", 0.06), ("low", 0.015), ("high", 0.015), ("high", -0.01), ("shift", -0.002)),
        ),
    },
}
"""By width, and above how many columns: move the `low` or the `high` end inwards, `both` ends, or `shift` the range up,
by a part of its width.

Chosen by beam searches for the sequences of least error, over normal, Laplace, Student-t, uniform and skewed rows of 16
to 1024 columns and a real table of 384, relative to `greedy` with 45 bins. More moves gain less and less.
"""

NARROW = 12
"""Up to how many columns rows get more trials: they have many ways to be coded, and cost little."""

_PARTS = {2: (0.24, 4), 3: (0.24, 5), 4: (0.24, 6)}
"""The largest of these moves, and how many there are, each half of the last: by each every end is moved, in and out."""

_WIDENED = (-0.25, 1.0, 3.0, 2.0, 5.0, -1.0, 0.4, 4.0, 1.5, 6.0)
_WIDENED_COUNTS = {0: 3, 128: 5, 256: 10}
"""Above 4 bits: by how many codes the range is wider than the row; and how many of these, above how many columns.

Wide rows have less to gain by where the codes lie, and it takes more to find it.
"""

_ANGLES = 2 * np.pi * ((np.arange(8) + 0.5) / 8 - 0.5)

SHIFTS = np.stack(
    [
        _ANGLES / (2 * np.pi),
        -np.sin(2 * _ANGLES) / (2 * np.pi**2),
        np.cos(2 * _ANGLES) / (2 * np.pi**2),
        np.sin(_ANGLES) / np.pi**2,
        -np.cos(_ANGLES) / np.pi**2,
    ],
    axis=1,
).astype(np.float32)
"""Shifts of a wave, in codes, each with the factors of the sums over a row of sin cos, cos^2 - 1/2, sin and cos.

What these products add up to is the part of the sum of squares that changes with the shift."""

LEVEL = np.float32(1 / 12)
"""The mean of the square of a distance to the nearest whole number."""

COSINE = np.array([0.96947484, -17.458116, 38.764692], np.float32)
SINE = np.array([6.1827851, -38.026513, 53.392573], np.float32)
"""Polynomials in x^2, for x up to 1/2, of cos(2 pi x) and sin(2 pi x) / x, to 3 and 1 percent."""


def trials(bits: int, columns: int) -> npt.NDArray[np.float32]:
    """What the search tries for rows of so many columns, a trial a row.

    Up to 4 bits a trial is a move: the shift and the factor of the width. Above it is a range: the reciprocal of its
    width; where in it the row begins, in codes, if the row is in its middle; and for each of `SHIFTS`, how much the end
    of the row that is outside adds to the sum of squares.
    """
    return _moves(bits, columns) if bits <= MOVING_BITS else _ranges(bits, columns)


def _for_columns(known: Mapping[int, T], columns: int) -> T:
    return known[max(above for above in known if above < columns)]


def _ranges(bits: int, columns: int) -> npt.NDArray[np.float32]:
    count = len(_WIDENED) if columns <= NARROW else _for_columns(_WIDENED_COUNTS, columns)
    top, widened = (1 << bits) - 1, np.array(_WIDENED[:count])[:, None]
    outside = np.maximum(2 * np.abs(SHIFTS[:, 0]) - 1 - widened, 0)
    return np.concatenate([(top - widened) / top, widened / 2, outside], axis=1).astype(np.float32)


def _moves(bits: int, columns: int) -> npt.NDArray[np.float32]:
    width = min(known for known in _MOVES if known >= bits)
    chosen = _for_columns(_MOVES[width], columns)
    if columns <= NARROW:
        largest, count = _PARTS[width]
        parts = [sign * largest / 2**halved for halved in range(count) for sign in (1, -1)]
        chosen += tuple((end, part) for part in parts for end in ("shift", "low", "high", "both"))
    pairs = [(0.0 if end == "high" else p, 1 - {"both": 2 * p, "shift": 0.0}.get(end, p)) for end, p in chosen]
    return np.array(pairs, np.float32)
