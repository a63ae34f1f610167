"""Whether a trainer is alone or one of several ranks: what that makes of its model, its optimizers and its run."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from checkrun_format.run import Run, open_run
from checkrun_format.torch.content import merged
from checkrun_format.torch.optimizers import Optimizers, named_optimizers

if TYPE_CHECKING:
    from checkrun_format.torch.distributed.ranked import RankedRun
    from checkrun_format.torch.torchrec import ShardedModel

_T = TypeVar("_T")


class Alone:
    """What `RankedRun` does with the other ranks, where there are none."""

    rank = 0
    ranks = 1

    def agreed(self, value: _T) -> _T:
        """The value."""
        return value

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 - as of several ranks
        """Nothing."""
        return contextlib.nullcontext()


def taken_apart(
    model: nn.Module, optimizer: Optimizers
) -> tuple[ShardedModel | None, nn.Module, Mapping[str, torch.optim.Optimizer]]:
    """What TorchRec cut over the ranks, the model without its wrapper, and the other optimizers."""
    if not (hasattr(model, "fused_optimizer") and hasattr(model, "plan")):
        return None, model, named_optimizers(optimizer)
    from checkrun_format.torch.torchrec import ShardedModel, plain_optimizers

    sharded = ShardedModel(model)
    return sharded, sharded.module, plain_optimizers(optimizer)


def opened(
    run: Run | str | os.PathLike[str],
    options: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
    timeout: dt.timedelta,
    sharded: ShardedModel | None,
) -> Run | RankedRun:
    """The run of this trainer, or of all ranks; an address is opened."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1
    if several or sharded is not None:
        from checkrun_format.torch.distributed.ranked import RankedRun

        return RankedRun(run, options, process_group, timeout, sharded=sharded, merge=merged)
    return run if isinstance(run, Run) else open_run(run, "a", **options)
