"""Host memory that is used again from save to save: fresh pages cost several times what a copy costs."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

_PAGE = 2 << 20
_ALIGNMENT = 64
_SPARE_BYTES = 128 << 20


class StagingMemory:
    """One piece of memory that the tensors of one save are cut from; on huge pages where the system offers them.

    For a device its memory is pinned.

    Parameters
    ----------
    keep : bool
        Keep all that it ever used; else only as much as the save at hand needs, and 128 MiB.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._memory: torch.Tensor | None = None
        self._map: mmap.mmap | None = None
        self._used = 0

    def begin(self, size: int, device: torch.device) -> None:
        """Give way to the tensors of the next save, of `size` bytes together (see `room_for`).

        Tensors of earlier saves must not be used any more.
        """
        self._used = 0
        if self._memory is None or self._memory.numel() < size or self._memory.is_pinned() != (device.type == "cuda"):
            self._memory = self._map = None  # before the new piece is made
            self._memory = self._fresh(math.ceil(size / _PAGE) * _PAGE, device)
        elif self._map is not None and not self._keep:
            end = math.ceil((size + _SPARE_BYTES) / _PAGE) * _PAGE
            if hasattr(mmap, "MADV_DONTNEED") and end < len(self._map):
                self._map.madvise(mmap.MADV_DONTNEED, end)

    def _fresh(self, size: int, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._map = mmap.mmap(-1, max(size, _PAGE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor; its values are what happens to be there."""
        assert self._memory is not None
        size = math.prod(shape) * dtype.itemsize
        start = self._used
        self._used += room_for(size)
        return self._memory[start : start + size].view(dtype).view(tuple(shape))


def room_for(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes."""
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT
