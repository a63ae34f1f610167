"""Which rows of a table its gradient reaches."""

from __future__ import annotations

import math
import weakref
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version

from checkrun_format.quantize.engine import spread

Tensor = torch.Tensor

_PIECE_BYTES: Final = 8 << 20
_CHEAP_BYTES: Final = 1 << 20
_MARK: Final = 64


def gradient_rows(parameter: nn.Parameter) -> Tensor:
    """Rows, ascending or not, of which any element of the gradient that is there now is not zero; int64."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(0, dtype=torch.int64, device=parameter.device)
    if gradient.layout == torch.sparse_coo:
        return gradient._indices()[0]  # noqa: SLF001 - of an uncoalesced one, too
    return torch.nonzero(reached(gradient)).squeeze(1)


def reached(gradient: Tensor) -> Tensor:
    """For each row of a dense gradient whether any element of it is not zero."""
    flat = gradient.detach().reshape(len(gradient), math.prod(gradient.shape[1:]))
    if flat.device.type == "cpu" and flat.is_contiguous() and flat.numel():
        return _reached_on_host(flat)
    step = max(1, _PIECE_BYTES // (flat.shape[1] * flat.element_size() or 1))
    pieces = [(flat[low : low + step] != 0).any(1) for low in range(0, len(flat), step)]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.bool, device=flat.device)


def is_cheap(gradient: Tensor) -> bool:
    """Whether finding the rows that it reaches takes next to nothing of a step."""
    return gradient.layout != torch.strided or gradient.nbytes <= _CHEAP_BYTES


def _reached_on_host(flat: Tensor) -> Tensor:
    """Whether any bit is set but the signs'. By numpy: with torch it takes ten times as long."""
    size, bytes_ = flat.element_size(), np.from_dlpack(flat.view(torch.uint8))
    wide = next(n for n in (8, 4, 2, 1) if bytes_.shape[1] % n == 0)
    words, signs = bytes_.view(f"u{wide}"), (b"\0" * (size - 1) + b"\x80") * (wide // size)
    values, found = ~np.frombuffer(signs, f"u{wide}"), np.empty(len(words), np.bool_)
    spread(
        lambda some: np.not_equal(np.bitwise_or.reduce(words[some], axis=1) & values, 0, out=found[some]),
        len(words),
        max(1, bytes_.shape[1] // 4),
    )
    return torch.from_numpy(found)


class LookedUp:
    """Tells whether lookups by modules made all of a parameter's dense gradient: their rows are noted already.

    Autograd adds up what the uses of a parameter in one backward made, in the memory of one of these, and each addition
    counts as a write. So a gradient in such memory, written to once less than there were lookups, is theirs alone; not
    one of several backward passes, nor one that was clipped. What they made is marked by many writes that were none, so
    that no new tensor where one of them was is taken for it. Writes through `.data` and collectives are not counted.

    Parameters
    ----------
    parameter : nn.Parameter
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)
        self._handle: Any = None
        self._steps = 0
        self._noted_from = 0
        self._backward = -1
        self._parts: list[tuple[int, int] | None] = []
        self._made: tuple[weakref.ref[Tensor], tuple[int, int]] | None = None

    def expect(self, output: Any) -> None:
        """Learn of the gradient that will come of a module's output, if that is a lookup in the parameter itself."""
        parameter, node = self._parameter(), getattr(output, "grad_fn", None)
        sources = [] if node is None else [getattr(source, "variable", None) for source, _ in node.next_functions]
        place = next((place for place, source in enumerate(sources) if source is parameter), None)
        if parameter is not None and node is not None and place is not None:
            when = self._steps
            node.register_hook(lambda gradients, _: self._add(gradients[place], when))
            if self._handle is None:
                self._handle = parameter.register_post_accumulate_grad_hook(self._see)  # type: ignore[no-untyped-call]

    def _add(self, part: Tensor | None, when: int) -> None:
        """Note what a lookup made; it is not held, or it would not be added to in place."""
        if (backward := _this_backward()) != self._backward:
            self._backward, self._parts = backward, []
        is_known = part is not None and part.layout == torch.strided and when >= self._noted_from
        if part is None or not is_known or torch.is_grad_enabled():  # then nothing is added in place
            self._parts.append(None)
        else:
            increment_version([part] * _MARK)
            self._parts.append(_identity(part))

    def _see(self, parameter: nn.Parameter) -> None:
        """Look at what a backward has just made of the gradient."""
        gradient, self._made = parameter.grad, None
        if gradient is not None and self._backward == _this_backward() and None not in self._parts:
            address, version = identity = _identity(gradient)
            if (address, version - len(self._parts) + 1) in self._parts:
                self._made = weakref.ref(gradient), identity

    def made(self, gradient: Tensor) -> bool:
        """Whether they made all of it."""
        return self._made is not None and self._made[0]() is gradient and self._made[1] == _identity(gradient)

    def stepped(self) -> None:
        """An optimizer has done a step."""
        self._steps += 1

    def forget(self, *, all_rows: bool = False) -> None:
        """Rows looked up before the last step, or all, are not noted any more."""
        self._steps += all_rows
        self._noted_from = self._steps
        self._made = None

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()


def _identity(tensor: Tensor) -> tuple[int, int]:
    """Where a strided tensor is, and how often it was written to."""
    return (tensor.data_ptr(), tensor._version) if tensor.layout == torch.strided else (0, 0)  # noqa: SLF001 - the only way


def _this_backward() -> int:
    return torch._C._current_graph_task_id()  # noqa: SLF001 - there is no other way to tell passes apart
