"""Which encoder, with which parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from checkrun_format.errors import InvalidInputError
from checkrun_format.integers import whole

VERSION = 1
"""Of the encoders: another one may choose other codes."""

_GREEDY = {1: (25, 0.5), 2: (25, 0.5), 3: (25, 0.2)}
_GREEDY_WIDE = (45, 0.2)
_TORCH_RATIO = 0.16


@dataclass(frozen=True, slots=True)
class Method:
    """An encoder by name, and its parameters.

    Parameters
    ----------
    name : str
        `refine`, `minmax`, `symmetric`, `greedy` or `torch_compat`.
    num_bins : int, optional
        For `greedy` and `torch_compat`: steps in the range, at least 2. By default `greedy` takes 25 at up to 3 bits
        and 45 above, as Check-N-Run does; `torch_compat` does not search.
    ratio : float, optional
        For the same: the part of the range that may be taken away, above 0 and up to 1. By default `greedy` takes .5 at
        up to 2 bits and .2 above, `torch_compat` .16 if it searches.

    Raises
    ------
    InvalidInputError
        For a parameter that the encoder does not have or that is out of range.

    Examples
    --------
    >>> Method("greedy").filled(4)
    Method(name='greedy', num_bins=45, ratio=0.2)
    """

    name: str
    num_bins: int | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidInputError(f"encoder {self.name!r}; give a name or a Method")
        given = [name for name in ("num_bins", "ratio") if getattr(self, name) is not None]
        if given and self.name not in {"greedy", "torch_compat"}:
            raise InvalidInputError(f"the encoder {self.name!r} has no {given[0]}")
        if self.name == "torch_compat" and self.num_bins is None and self.ratio is not None:
            raise InvalidInputError("torch_compat searches with num_bins only: give it, too, or no ratio")
        bins, ratio = self.num_bins, self.ratio
        if bins is not None:
            bins = whole(bins, f"num_bins must be a whole number of at least 2, not {bins!r}", least=2)
        if ratio is not None and not (isinstance(ratio, float | int | np.floating) and 0 < ratio <= 1):
            raise InvalidInputError(f"ratio must be above 0 and at most 1, not {self.ratio!r}")
        object.__setattr__(self, "num_bins", bins)
        object.__setattr__(self, "ratio", None if ratio is None else float(ratio))

    def filled(self, bits: int) -> Method:
        """The same with the default parameters of this width."""
        if self.name == "greedy":
            num_bins, ratio = _GREEDY.get(bits, _GREEDY_WIDE)
            return Method(self.name, self.num_bins or num_bins, self.ratio or ratio)
        if self.name == "torch_compat" and self.num_bins is not None:
            return Method(self.name, self.num_bins, self.ratio or _TORCH_RATIO)
        return self

    def told(self) -> dict[str, Any]:
        """What the manifest says of it."""
        parameters = {"num_bins": self.num_bins, "ratio": self.ratio}
        told = {name: value for name, value in parameters.items() if value is not None}
        return {"name": self.name, "version": VERSION, **told}


def method(encoder: str | Method | None, bits: int) -> Method:
    """The method that a caller chose, or else the default: `refine` up to 4 bits, `minmax` above."""
    if encoder is None:
        return Method("refine" if bits <= 4 else "minmax")
    return (encoder if isinstance(encoder, Method) else Method(encoder)).filled(bits)
