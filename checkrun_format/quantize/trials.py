"""Which ranges the searches try, and when they leave a row as `minmax` has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NARROWEST = np.float32(2.0**-100)
"""Range of a row up to which it is left as `minmax` has it."""

RISK = np.float32(0.125)
"""Steps by which the rounding of the qparams may move a value unless the row is then compared with `minmax`."""

WIDE = 160
"""Columns above which rows get the longer search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The trials of a search.

    Attributes
    ----------
    margin : float
        The first trial leaves out this part of the range at both ends.
    spread : float
        The second trial spans as many standard deviations around the mean, within the range.
    moves : float32 array (k, 2)
        Every other trial shifts the best range so far by a part of its width, and multiplies its width.
    """

    margin: float
    spread: float
    moves: npt.NDArray[np.float32]


def _plan(margin: float, spread: float, *moves: tuple[str, float]) -> Plan:
    """`low` and `high` move an end inwards, `both` move both ends, `shift` moves all upwards; by parts of the width."""
    rows = [(0.0 if end == "high" else p, 1 - {"both": 2 * p, "shift": 0.0}.get(end, p)) for end, p in moves]
    return Plan(margin=margin, spread=spread, moves=np.array(rows, np.float32))


_PLANS = {
    2: _plan(0.08, 3.1, ("both", 0.06), ("shift", -0.06), ("shift", 0.04), ("shift", -0.02), ("shift", 0.02)),
    3: _plan(0.06, 4.5, ("high", 0.04), ("shift", 0.02), ("shift", -0.01), ("shift", 0.01), ("low", -0.04)),
    4: _plan(0.02, 5.0, ("shift", 0.02), ("high", 0.015), ("low", 0.007), ("low", -0.01), ("high", -0.007)),
    8: _plan(0.0, 8.0, ("high", -0.004), ("both", -0.004), ("shift", 0.0), ("low", -0.001)),
}


def plan(bits: int, columns: int) -> Plan:
    """The search for rows of so many columns."""
    chosen = _PLANS[min(known for known in _PLANS if known >= bits)]
    again = 2 if columns > WIDE else 1
    return Plan(margin=chosen.margin, spread=chosen.spread, moves=np.tile(chosen.moves, (again, 1)))
