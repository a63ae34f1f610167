"""Copies of what is stored, taken while training waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from checkrun_format.arranging import Stored
from checkrun_format.blocks import FieldPlan
from checkrun_format.quantize import Quantized, encode
from checkrun_format.quantize.engine import each
from checkrun_format.quantize.record import join
from checkrun_format.rows import Ids, Selection, as_slice, length
from checkrun_format.torch.memory import StagingMemory, room_for

Tensor = torch.Tensor

_SMALL_BYTES = 4 << 20
_PIECE_BYTES = 64 << 20
_BATCH_BYTES = 2 << 20

Gather: TypeAlias = tuple[npt.NDArray[np.void], Ids, npt.NDArray[np.void]]
"""Items, which of them, and where they go."""


class Copier:
    """Copies rows and tensors into memory that is used again by the next save."""

    def __init__(self, *, encode_on: Callable[[torch.device], bool] = lambda device: device.type != "cpu") -> None:
        self._encode_on = encode_on
        self._of_tables = StagingMemory()
        self._of_tensors = StagingMemory()

    def release(self) -> None:
        """Say that the copies are not needed any more."""
        self._of_tables.release()
        self._of_tensors.release()

    def tensors(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of dense tensors."""
        self._of_tensors.begin(sum(room_for(t.nbytes) for t in given.values()), _device(given.values()))
        with torch.no_grad(), _finished():
            return {name: _copied(self._of_tensors, tensor) for name, tensor in given.items()}

    def rows(
        self, stored: Mapping[str, Stored], fields: Callable[[str], Mapping[str, Tensor]]
    ) -> dict[str, dict[str, Tensor | Quantized]]:
        """The rows that are stored, by table and field; on a device, those to be quantized stay there."""
        given = {name: fields(name) for name in stored}
        parts = [
            (what, plan, given[name][plan.name])
            for name, what in stored.items()
            for plan in what.fields
            if not self._encodes(plan, given[name][plan.name])
        ]
        size = sum(room_for(what.count * _row_bytes(values)) for what, _, values in parts)
        self._of_tables.begin(size, _device(values for _, _, values in parts))
        later: list[Gather] = []
        with torch.no_grad(), _finished():
            taken = {
                name: {plan.name: self._taken(what, plan, given[name][plan.name], later) for plan in what.fields}
                for name, what in stored.items()
            }
            each(_gather, list(_batches(later)))
        return taken

    def _encodes(self, plan: FieldPlan, values: Tensor) -> bool:
        """Whether rows are quantized where they are: elsewhere they may get other codes."""
        return plan.bits is not None and self._encode_on(values.device)

    def _taken(self, what: Stored, plan: FieldPlan, values: Tensor, later: list[Gather]) -> Tensor | Quantized:
        """The rows of a field; those that the CPU gathers are there once all of `later` is done."""
        if not self._encodes(plan, values):
            return self._gathered(values, what.rows, later)
        if what.count * sum(f.row_bytes for f in what.fields) <= _SMALL_BYTES:  # they share a block with other tables'
            return _selected(values, what.rows).clone()
        pieces: list[Quantized] = []
        step = max(1, _PIECE_BYTES // _row_bytes(values))
        qparams = plan.qparams
        for low in range(0, what.count, step):
            some = _selected(values, _part(what.rows, low, min(low + step, what.count)))
            pieces.append(encode(some, plan.bits or 0, plan.encoder, qparams))
            qparams = pieces[0].qparams.dtype.name
        return join(pieces)

    def _gathered(self, values: Tensor, rows: Selection, later: list[Gather]) -> Tensor:
        chosen = as_slice(rows)
        count, out_of = length(chosen), self._of_tables.tensor
        if isinstance(chosen, slice):
            return _copied(self._of_tables, values[chosen])
        out, ids = out_of((count, *values.shape[1:]), values.dtype), np.ascontiguousarray(chosen)
        if values.device.type == "cpu" and values.is_contiguous() and values.numel():
            later.append((_as_items(values), ids, _as_items(out)))
            return out
        return out.copy_(_selected(values, ids), non_blocking=True)


def _selected(values: Tensor, rows: Selection) -> Tensor:
    """Rows, gathered where they are."""
    if isinstance(rows, slice):
        return values[rows]
    return values.index_select(0, torch.from_numpy(np.ascontiguousarray(rows)).to(values.device))


def _part(rows: Selection, low: int, high: int) -> Selection:
    return slice(rows.start + low, rows.start + high) if isinstance(rows, slice) else rows[low:high]


def _copied(memory: StagingMemory, tensor: Tensor) -> Tensor:
    return memory.tensor(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def _as_items(values: Tensor) -> npt.NDArray[np.void]:
    """The rows of a contiguous tensor as items of one array, so that each is copied as a whole."""
    bytes_ = np.from_dlpack(values.reshape(-1).view(torch.uint8))  # `numpy()` would forbid to resize them
    return bytes_.view(f"V{_row_bytes(values)}")


def _batches(gathers: Iterable[Gather]) -> Iterator[list[Gather]]:
    """The same in lists of some megabytes: large ones are cut, small ones go together."""
    batch: list[Gather] = []
    size = 0
    for items, ids, out in gathers:
        step = max(1, _BATCH_BYTES // items.itemsize)
        for low in range(0, len(ids), step):
            batch.append((items, ids[low : low + step], out[low : low + step]))
            size += batch[-1][2].nbytes
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _gather(batch: list[Gather]) -> None:
    """By numpy: where cores are busy, torch takes twice as long on its own threads."""
    for items, ids, out in batch:
        np.take(items, ids, out=out, mode="clip")


def _row_bytes(values: Tensor) -> int:
    return math.prod(values.shape[1:]) * values.element_size()


def _device(tensors: Any) -> torch.device:
    """The first device among those of some tensors that is no CPU."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))


@contextmanager
def _finished() -> Iterator[None]:
    """Leave once copies from devices have arrived."""
    yield
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
