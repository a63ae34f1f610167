"""Which rows the fused kernels of FBGEMM change: they do it in the backward, without a step of an optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from checkrun_format.torch.lookups import FoundTable
from checkrun_format.torch.tracker import TouchedRows

_LAST: Final = 254  # the next one is a byte, too
_KEEP_OTHERS: Final = frozenset(
    {
        "none", "sgd", "exact_sgd", "lars_sgd", "exact_adagrad", "row_wise_adagrad", "exact_row_wise_adagrad", "adam",
        "partial_row_wise_adam", "lamb", "partial_row_wise_lamb",
    }
)  # fmt: skip
"""Optimizers that change no rows, and no state, but those that a batch looked up."""


class Kernel:
    """A module of FBGEMM: holds shards of some tables, one after another, and notes which of their rows it looks up.

    A row's byte is 0 as long as nothing touched it, else the number of the forward that did so last. A forward waits
    until a gradient arrives at its output, or that output is gone: its rows are changed then, or never will be.

    Parameters
    ----------
    module : SplitTableBatchedEmbeddingBagsCodegen
        On whatever device.

    Attributes
    ----------
    bitmap : uint8 tensor
        Of the rows of all its shards.
    always : str or None
        Why any row may change in each step.
    """

    def __init__(self, module: Any) -> None:
        self.weights: list[torch.Tensor] = [weight.detach() for weight in module.split_embedding_weights()]
        device = self.weights[0].device
        counts = [len(weight) for weight in self.weights]
        self._starts = [0, *itertools.accumulate(counts)]
        self._tables: list[int] = list(module.feature_table_map)
        self._first = torch.tensor([self._starts[table] for table in self._tables]).to(device)
        self._counts = torch.tensor([counts[table] for table in self._tables]).to(device)
        self.bitmap: torch.Tensor | None = torch.zeros(self._starts[-1], dtype=torch.uint8, device=device)
        self.records: list[FusedRows] = []
        self.number = 1
        self.waiting: dict[int, int] = {}
        """The forwards that wait, and their numbers."""
        self._count = 0
        optimizer = str(getattr(module, "optimizer", "none"))
        known = optimizer in _KEEP_OTHERS
        self.always = (
            None if known else f"{optimizer} of FBGEMM is not known to leave rows without gradient as they are"
        )

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _idle, ()  # in a copy of the module, or one from a file

    def rows_of(self, place: int) -> torch.Tensor:
        """The bytes of a shard: a view."""
        assert self.bitmap is not None
        return self.bitmap[self._starts[place] : self._starts[place + 1]]

    def after(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        """The hook on its forward."""
        if self.bitmap is None or not output.requires_grad or torch.compiler.is_exporting():
            return
        given = dict(zip(("indices", "offsets"), arguments, strict=False)) | named
        self._advance()
        self._touch(given["indices"].detach(), given["offsets"], given.get("batch_size_per_feature_per_rank"))
        self._count += 1
        self.waiting[self._count] = self.number
        output.register_hook(_Waiting(self, self._count))

    def _touch(self, indices: torch.Tensor, offsets: torch.Tensor, batches: Sequence[Sequence[int]] | None) -> None:
        """Note what is looked up: the rows of one feature after another, as `offsets` of its first bags tell."""
        assert self.bitmap is not None
        features = len(self._tables)
        if batches is None:
            bags = [(len(offsets) - 1) // features * feature for feature in range(features + 1)]
        else:
            bags = [0, *itertools.accumulate(sum(batch) for batch in batches)]
        touch = self._touch_on_host if self.bitmap.device.type == "cpu" else self._touch_on_device
        touch(indices, offsets[torch.tensor(bags).to(offsets.device)])

    def _touch_on_host(self, indices: torch.Tensor, ends: torch.Tensor) -> None:
        """By numpy, which wakes no threads. What is no row, FBGEMM reads as the first, or not at all."""
        for table, (low, high) in zip(self._tables, itertools.pairwise(ends.tolist()), strict=True):
            bitmap, rows = self.rows_of(table).numpy(), np.from_dlpack(indices[low:high])
            if rows.size and (rows.min() < 0 or rows.max() >= bitmap.size):
                rows = np.where((rows < 0) | (rows >= bitmap.size), 0, rows)
            bitmap[rows] = self.number

    def _touch_on_device(self, indices: torch.Tensor, ends: torch.Tensor) -> None:
        """The same, without waiting for the device."""
        assert self.bitmap is not None
        places = torch.arange(len(indices), device=indices.device)
        of = torch.searchsorted(ends[1:].to(torch.int64), places, right=True).clamp_(max=len(self._tables) - 1)
        rows = indices.to(torch.int64)
        rows = torch.where((rows < 0) | (rows >= self._counts[of]), 0, rows) + self._first[of]
        self.bitmap.index_fill_(0, rows, self.number)

    def _advance(self) -> None:
        """Begin a forward: the next number. When they end, all that wait share one, and all that are done another."""
        assert self.bitmap is not None
        if self.number >= _LAST:
            older = self.bitmap.clamp(max=1)
            older[self.bitmap >= self.waits_from] = 2
            self.bitmap.copy_(older)
            self.number = 2 if self.waiting else 1
            self.waiting = dict.fromkeys(self.waiting, 2)
        self.number += 1

    @property
    def waits_from(self) -> int:
        """The lowest number of rows whose change is yet to come."""
        return min(list(self.waiting.values()), default=self.number + 1)

    def arrived(self, forward: int) -> None:
        """A gradient has come to the output of a forward: the backward that now goes on changes its rows."""
        if self.waiting.pop(forward, None) is None:
            for table in self.records:
                table.mark_all("a second backward went through one forward")


class _Waiting:
    """A hook on the output of a forward; gone with it."""

    def __init__(self, kernel: Kernel, forward: int) -> None:
        self._kernel = kernel
        self._forward = forward

    def __call__(self, gradient: torch.Tensor) -> None:  # noqa: ARG002 - as torch calls it
        self._kernel.arrived(self._forward)

    def __del__(self) -> None:
        self._kernel.waiting.pop(self._forward, None)


def _idle() -> Kernel:
    kernel = Kernel.__new__(Kernel)
    kernel.bitmap = None
    return kernel


class FusedRows(TouchedRows):
    """The records of a shard that a kernel holds; rows that are marked wait for its next forward.

    Parameters
    ----------
    name : str
    kernel, place
        Which of its shards.
    state : sequence of tensors
        The fused optimizer's, of these rows.
    """

    def __init__(self, name: str, kernel: Kernel, place: int, state: Sequence[torch.Tensor]) -> None:
        self._kernel = kernel
        self._place = place
        found = FoundTable(
            name=name,
            parameter=nn.Parameter(kernel.weights[place], requires_grad=False),
            tracking="lookups",
            modules=(),
        )
        super().__init__(found, lambda _: state, is_trained=True)
        self.always = kernel.always
        self.forget()
        kernel.records.append(self)

    def touch(self, rows: torch.Tensor) -> None:
        """Note rows that are marked, or of a gradient."""
        if rows.numel():
            self.bitmap.index_fill_(0, rows.reshape(-1).to(torch.int64), self._kernel.number + 1)

    @property
    def waits_from(self) -> int:
        """The lowest number of rows whose change is yet to come."""
        return self._kernel.waits_from

    def _follow(self) -> None:
        """Stay with the kernel's records."""
        self._hold(self._kernel.rows_of(self._place))
