"""Host memory that is used again from save to save: fresh pages cost several times what a copy costs."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

_PAGE = 2 << 20
_ALIGNMENT = 64
_KEPT_BYTES = 256 << 20


class StagingMemory:
    """One piece of memory that the tensors of one save are cut from; on huge pages where the system offers them.

    Between two saves all but 256 MiB of it are the system's to take, page by page, should memory run short (MADV_FREE);
    what has not been taken is written again without a page fault. For a device its memory is pinned, and kept.
    """

    def __init__(self) -> None:
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

    def _fresh(self, size: int, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._map = mmap.mmap(-1, max(size, _PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise("MADV_HUGEPAGE")
        self._advise("MADV_DONTFORK")  # a page shared with a child would be copied once more when it is written
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        """Let the system have the memory if it needs it, all but 256 MiB. Tensors must not be used any more."""
        self._advise("MADV_FREE", _KEPT_BYTES)

    def _advise(self, advice: str, start: int = 0) -> None:
        if self._map is not None and start < len(self._map) and hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # this system does not know it
                self._map.madvise(getattr(mmap, advice), start)

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
