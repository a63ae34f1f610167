"""Copies of what is stored, taken while training waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from checkrun_format.rows import Selection, as_slice, length
from checkrun_format.saving import Stored
from checkrun_format.torch.memory import StagingMemory, room_for

Tensor = torch.Tensor


class Copier:
    """Copies rows and tensors into memory that is used again by the next save."""

    def __init__(self) -> None:
        self._of_tables = StagingMemory()
        self._of_tensors = StagingMemory()

    def tensors(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of dense tensors."""
        self._of_tensors.begin(sum(room_for(t.nbytes) for t in given.values()), _device(given.values()))
        with torch.no_grad(), _finished():
            return {name: _copied(self._of_tensors, tensor) for name, tensor in given.items()}

    def rows(
        self, stored: Mapping[str, Stored], fields: Callable[[str], Mapping[str, Tensor]]
    ) -> dict[str, dict[str, Tensor]]:
        """Copies of the rows that are stored, gathered where they are, by table and field."""
        given = {name: fields(name) for name in stored}
        sizes = [
            room_for(what.count * _row_bytes(values)) for n, what in stored.items() for values in given[n].values()
        ]
        self._of_tables.begin(sum(sizes), _device(v for table in given.values() for v in table.values()))
        with torch.no_grad(), _finished():
            return {
                name: {field: self._gathered(values, what.rows) for field, values in given[name].items()}
                for name, what in stored.items()
            }

    def _gathered(self, values: Tensor, rows: Selection) -> Tensor:
        chosen = as_slice(rows)
        if isinstance(chosen, slice):
            return _copied(self._of_tables, values[chosen])
        out = self._of_tables.tensor((length(chosen), *values.shape[1:]), values.dtype)
        ids = torch.from_numpy(np.ascontiguousarray(chosen)).to(values.device)
        if values.device.type == "cpu":
            return torch.index_select(values, 0, ids, out=out)
        return out.copy_(values.index_select(0, ids), non_blocking=True)


def _copied(memory: StagingMemory, tensor: Tensor) -> Tensor:
    return memory.tensor(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def _row_bytes(values: Tensor) -> int:
    return values[:1].numel() * values.element_size() if len(values) else 0


def _device(tensors: Any) -> torch.device:
    """The first device among those of some tensors that is no CPU."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))


@contextmanager
def _finished() -> Iterator[None]:
    """Leave once copies from devices have arrived."""
    yield
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
