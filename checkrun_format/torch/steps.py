"""Hooks on the steps of an optimizer, within all others: what those do, and closures, is not the optimizer's doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def uncompiled(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same, run as it is where what calls it is compiled."""
    told: Callable[..., Any] = torch.compiler.disable(work)  # type: ignore[no-untyped-call]
    return told


class StepHooks:
    """Tells what an optimizer does itself from what else is done in its steps.

    Parameters
    ----------
    optimizer : Optimizer
    look : callable
        Called when everything that was written so far is not its doing: where it begins, and after its closure.
    done : callable
        Called when it is done, before any other hook.
    """

    def __init__(
        self, optimizer: Optimizer, look: Callable[[Optimizer], None], done: Callable[[Optimizer], None]
    ) -> None:
        self._look = look
        self._before = optimizer.register_step_pre_hook(uncompiled(self._begin))
        self._after = optimizer.register_step_post_hook(uncompiled(lambda optimizer, *_: done(optimizer)))

    def move_in(self, optimizer: Optimizer) -> None:
        """Come after those that other hooks have before a step, and before those that they have after it."""
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before.id)  # type: ignore[attr-defined] # noqa: SLF001 - the only way
        optimizer._optimizer_step_post_hooks.move_to_end(self._after.id, last=False)  # type: ignore[attr-defined] # noqa: SLF001

    def remove(self) -> None:
        """Take them off."""
        self._before.remove()
        self._after.remove()

    def _begin(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._look(optimizer)
        if len(arguments) > 1 and callable(arguments[1]):  # the first is the optimizer
            return (arguments[0], self._looking(optimizer, arguments[1]), *arguments[2:]), named
        if callable(named.get("closure")):
            return arguments, {**named, "closure": self._looking(optimizer, named["closure"])}
        return None

    def _looking(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure, and a look when it is first done; later the optimizer has written something itself."""
        looks = [uncompiled(self._look)]

        def run() -> Any:
            loss = closure()
            while looks:
                looks.pop()(optimizer)
            return loss

        return run
