"""What `refine` tries, and when the encoders that search leave a row as `minmax` has it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NARROWEST = np.float32(2.0**-100)
"""Range of a row up to which it is left as `minmax` has it."""

RISK = np.float32(0.02)
"""Part of its squared error that the rounding of the qparams may add unless the row is compared with `minmax`."""

NARROW, WIDE = 12, 160
"""Up to how many columns, and above how many, rows get a longer search."""

_Move = tuple[str, float]

_MOVES: dict[int, tuple[_Move, ...]] = {
    2: (("both", 0.08), ("high", 0.06), ("shift", 0.06), ("shift", -0.03), ("shift", 0.02), ("high", 0.02)),
    3: (
        *(("both", 0.04), ("high", 0.06), ("low", 0.04), ("shift", -0.01)),
        *(("shift", 0.01), ("high", 0.01), ("high", -0.08)),
    ),
    4: (
        *(("both", 0.02), ("high", 0.03), ("shift", 0.01), ("high", 0.01)),
        *(("low", 0.007), ("low", -0.03), ("both", -0.007)),
    ),
    8: (("high", -0.004), ("both", -0.004), ("shift", 0.0), ("low", -0.001), ("high", 0.001)),
}
"""By width: move the `low` or the `high` end inwards, `both` ends, or `shift` the range up, by a part of its width.

Chosen by a beam search for the sequences of least error, over normal, Laplace, Student-t, uniform and skewed rows of 16
to 128 columns and a real table of 384, relative to `greedy` with 45 bins. More moves gain less and less.
"""


_EXTRA = {2: 0.12, 3: 0.06, 4: 0.03, 8: 0.002}
"""Largest of the moves that short rows get as well."""


def moves(bits: int, columns: int) -> npt.NDArray[np.float32]:
    """The trials after the first, for rows of so many columns: pairs of shift and factor of the width, (k, 2)."""
    width = min(known for known in _MOVES if known >= bits)
    chosen = _MOVES[width]
    if columns <= NARROW:  # a short row has many ways to be coded, and costs little
        parts = [sign * part * _EXTRA[width] for part in (1, 0.5, 0.25) for sign in (1, -1)]
        chosen += tuple((end, part) for part in parts for end in ("shift", "low", "high", "both"))
    pairs = [(0.0 if end == "high" else p, 1 - {"both": 2 * p, "shift": 0.0}.get(end, p)) for end, p in chosen]
    if columns > WIDE:
        pairs = [(0.05, 0.9), *pairs, *pairs[:2]]  # the range of a long row is wide: the best one is far inside
    return np.array(pairs, np.float32)
