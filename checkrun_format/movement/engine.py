"""When the compiled kernels are worth it."""

from __future__ import annotations

import sys
from types import ModuleType

from checkrun_format.quantize import engine

_FROM_ROWS = 1 << 10
"""Rows from which on a call of a kernel takes less than numpy's passes."""

_LOAD_FROM_BYTES = 1 << 27
"""What has to be read for it to pay to load the kernels, which takes most of a second, if nothing has loaded them."""


def prepare(size: int) -> None:
    """Load the compiled kernels, if they will be worth it for reading `size` bytes."""
    if size >= _LOAD_FROM_BYTES:
        engine.kernels(engine.COMPILED_FROM)


def kernels(rows: int) -> ModuleType | None:
    """The compiled kernels, if they are there and `rows` are worth a call."""
    if rows < _FROM_ROWS or engine.KERNELS not in sys.modules or engine.kernels(0) is None:
        return None
    import checkrun_format.movement.kernels as loaded

    return loaded
