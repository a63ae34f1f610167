"""What `refine` tries, and when the encoders that search leave a row as `minmax` has it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NARROWEST = np.float32(2.0**-100)
"""Range of a row up to which it is left as `minmax` has it."""

RISK = np.float32(0.02)
"""Part of its squared error that the rounding of the qparams may add unless the row is compared with `minmax`."""

_Move = tuple[str, float]

_MOVES: dict[int, dict[int, tuple[_Move, ...]]] = {
    2: {
        0: (("both", 0.13), ("shift", -0.09), ("high", -0.02), ("shift", 0.06), ("shift", -0.02), ("shift", 0.02)),
        96: (
            *(("both", 0.13), ("shift", -0.09), ("high", -0.02), ("shift", 0.06)),
            *(("shift", -0.02), ("shift", 0.02), ("shift", -0.01)),
        ),
    },
    3: {
        0: (
            *(("both", 0.04), ("high", 0.06), ("low", 0.04), ("shift", -0.01)),
            *(("shift", 0.01), ("high", 0.01), ("high", -0.08)),
        ),
        64: (
            *(("both", 0.06), ("high", 0.09), ("low", 0.09), ("shift", -0.02)),
            *(("shift", 0.02), ("shift", -0.006), ("shift", 0.003)),
        ),
        160: (
            *(("both", 0.06), ("high", 0.09), ("low", 0.09), ("shift", -0.02), ("shift", 0.02)),
            *(("shift", -0.006), ("shift", 0.003), ("shift", 0.09), ("high", 0.04)),
        ),
        400: (
            *(("both", 0.05), ("both", 0.09), ("high", 0.09), ("high", 0.09), ("shift", 0.04), ("shift", -0.02)),
            *(("shift", 0.01), ("low", -0.01), ("shift", 0.09), ("low", 0.003)),
        ),
    },
    4: {
        0: (
            *(("both", 0.02), ("high", 0.03), ("shift", 0.01), ("high", 0.01)),
            *(("low", 0.007), ("low", -0.03), ("both", -0.007)),
        ),
        144: (
            *(("both", 0.03), ("high", 0.03), ("low", 0.02), ("shift", -0.005), ("shift", 0.005)),
            *(("shift", -0.003), ("high", -0.003), ("low", -0.03), ("high", -0.02)),
        ),
        240: (
            *(("both", 0.03), ("high", 0.05), ("low", 0.03), ("high", 0.02), ("shift", 0.005)),
            *(("low", -0.01), ("both", 0.01), ("shift", 0.05), ("shift", 0.003)),
        ),
        600: (
            *(("both", 0.08), ("both", 0.03), ("high", 0.05), ("low", -0.02), ("shift", 0.01), ("high", 0.08)),
            *(("shift", -0.005), ("low", 0.005), ("shift", 0.05), ("high", -0.01)),
        ),
    },
    8: {0: (("high", -0.004), ("both", -0.004), ("shift", 0.0), ("low", -0.001), ("high", 0.001))},
}
"""By width, and above how many columns: move the `low` or the `high` end inwards, `both` ends, or `shift` the range up,
by a part of its width.

Chosen by beam searches for the sequences of least error, over normal, Laplace, Student-t, uniform and skewed rows of 16
to 1024 columns and a real table of 384, relative to `greedy` with 45 bins. More moves gain less and less.
"""

NARROW = 12
"""Up to how many columns rows get more trials: they have many ways to be coded, and cost little."""

_PARTS = {2: (0.24, 4), 3: (0.24, 5), 4: (0.24, 6), 8: (0.002, 3)}
"""The largest of these moves, and how many there are, each half of the last: by each every end is moved, in and out."""


def moves(bits: int, columns: int) -> npt.NDArray[np.float32]:
    """The trials after the first, for rows of so many columns: pairs of shift and factor of the width, (k, 2)."""
    width = min(known for known in _MOVES if known >= bits)
    chosen = _MOVES[width][max(above for above in _MOVES[width] if above < columns)]
    if columns <= NARROW:
        largest, count = _PARTS[width]
        parts = [sign * largest / 2**halved for halved in range(count) for sign in (1, -1)]
        chosen += tuple((end, part) for part in parts for end in ("shift", "low", "high", "both"))
    pairs = [(0.0 if end == "high" else p, 1 - {"both": 2 * p, "shift": 0.0}.get(end, p)) for end, p in chosen]
    return np.array(pairs, np.float32)
