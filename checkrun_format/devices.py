"""Arrays on a torch device, and the way of rows to it. Imported with the first of them.

What is read of a chunk goes, a slice at a time, into one of two buffers in pinned memory, is copied on a stream of its
own, and decoded on the device, while the next slice is read. Where there is no such stream (`device="cpu"`), the same
code copies and decodes at once.
"""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.quantize import tensors
from checkrun_format.rows import Selection, length

BUFFERS = 2
"""Slices on their way to one device at a time."""

_PIECE_BYTES = 1 << 20
"""Bytes of values that are copied to a device at a time."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By bytes of an element, what it is moved as: its bits stay as they are, and torch moves these on every device."""

_At: TypeAlias = "Selection | EllipsisType | tuple[slice, slice]"


def tensor_dtype(name: str) -> torch.dtype:
    """What torch calls a logical dtype; it has no times."""
    found: torch.dtype = getattr(torch, name)
    return found


def checked_device(device: object) -> torch.device:
    """A device that is there.

    Raises
    ------
    InvalidInputError
    """
    try:
        found: torch.device = torch.device(device)  # type: ignore[call-overload]
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError, ModuleNotFoundError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise InvalidInputError(f"device={device!r} is not there for torch {torch.__version__}: {reason}") from error
    if found.type == "meta":
        raise InvalidInputError("device='meta': tensors there hold no values")
    if str(found) == "cuda":
        found = torch.device("cuda", torch.cuda.current_device())
    return found


class _Buffer:
    """Pinned memory, and when the device has copied the last of it."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.emptied: torch.cuda.Event | None = None


class Way:
    """The way to one device: two buffers that are filled in turn, and a stream on which they are emptied.

    Several threads may use it. What they put on the way has arrived after `finish`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(_Buffer())

    def destination(self, tensor: torch.Tensor) -> DeviceArray:
        """A tensor on the device as one to be read into, once all that is asked of it so far has been done."""
        self.join()
        return DeviceArray(tensor, self)

    def join(self) -> None:
        """What goes this way from now on comes after all that this thread has asked of the device."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """What is asked of the device within goes one after another, beside all else."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextlib.contextmanager
    def buffer(self, size: int) -> Iterator[torch.Tensor]:
        """So many bytes of memory to be filled and copied from; it is used again when the device is done with it."""
        held = self._free.get()
        try:
            if held.emptied is not None:
                held.emptied.synchronize()
            if held.memory.numel() < size:
                held.memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._cuda)
            with self.stream():
                yield held.memory[:size]
        finally:
            held.emptied = None if self._stream is None else self._stream.record_event()
            self._free.put(held)

    def finish(self) -> None:
        """Return once everything has arrived."""
        if self._stream is not None:
            self._stream.synchronize()


class DeviceArray:
    """An array on a device, to be used where a numpy array may stand: rows are gathered and replaced over there.

    Parameters
    ----------
    tensor : strided torch tensor
        Of a dtype that the format stores. It is not copied.
    way : Way
        How values get there; only what is read into needs one.
    """

    def __init__(self, tensor: torch.Tensor, way: Way | None = None) -> None:
        self.tensor = tensor
        self._way = way

    @property
    def dtype(self) -> np.dtype[Any]:
        """The logical dtype, as numpy's."""
        return dtypes.logical(str(self.tensor.dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.tensor.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.tensor.numel()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.tensor.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def device(self) -> str:
        """Where it is."""
        return str(self.tensor.device)

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def bits(self) -> torch.Tensor:
        """The same memory as numbers that torch moves as they are."""
        return self.tensor.view(_BITS[self.itemsize])

    def _like(self, bits: torch.Tensor) -> DeviceArray:
        return DeviceArray(bits.view(self.tensor.dtype), self._way)

    def _index(self, at: _At) -> Any:
        return torch.from_numpy(np.array(at)).to(self.tensor.device) if isinstance(at, np.ndarray) else at

    def __getitem__(self, at: _At) -> DeviceArray:
        """Rows (and columns): slices are views; rows by number are gathered on the device."""
        return self._like(self.bits[self._index(at)])

    def copy(self) -> DeviceArray:
        """The same in memory of its own, on the device, row after row."""
        return DeviceArray(self.tensor.clone(memory_format=torch.contiguous_format), self._way)

    def joined(self, others: Sequence[DeviceArray]) -> DeviceArray:
        """Its rows and those of others of its device and dtype, one after another, in new memory."""
        return self._like(torch.cat([self.bits, *(other.bits for other in others)]))

    def empty(self, shape: tuple[int, ...]) -> DeviceArray:
        """Memory beside it, for what is on its way to it."""
        with self._on_the_way.stream():
            return DeviceArray(torch.empty(shape, dtype=self.tensor.dtype, device=self.tensor.device), self._way)

    def stored(self) -> DeviceArray:
        """All elements as one dimension of the dtype that stores them: what `dtypes.to_stored` is for numpy."""
        flat = self.tensor.reshape(-1)
        if flat.dtype == torch.bool:
            flat = flat.view(torch.uint8) != 0  # torch too takes any byte but 0 for True
        return DeviceArray(self._stored(flat), self._way)

    def run(self) -> DeviceArray | None:
        """The same, sharing its memory; None if it is not one run of it."""
        return DeviceArray(self._stored(self.tensor.view(-1)), self._way) if self.tensor.is_contiguous() else None

    def _stored(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(getattr(torch, dtypes.STORED[dtypes.name_of(self.dtype)]))

    def host(self) -> npt.NDArray[Any]:
        """A copy in the memory of the host, pinned where that is faster."""
        bits, device = self.bits.contiguous(), self.tensor.device
        if device.type == "cuda":
            memory = torch.empty(bits.shape, dtype=bits.dtype, device="cpu", pin_memory=True)
            memory.copy_(bits, non_blocking=True)
            torch.cuda.current_stream(device).synchronize()
        else:
            memory = bits.to("cpu", copy=True)
        found: npt.NDArray[Any] = memory.numpy().view(self.dtype)
        return found

    # A destination ----------------------------------------------------------------------------------------------------

    @property
    def _on_the_way(self) -> Way:
        assert self._way is not None, "only what a Way gave is read into"
        return self._way

    def __setitem__(self, at: _At, values: npt.NDArray[Any] | DeviceArray) -> None:
        """Replace rows: by numpy values, which may be changed afterwards, or by what is on the device."""
        if isinstance(values, DeviceArray):
            self._on_the_way.join()
            with self._on_the_way.stream():
                self.bits[self._index(at)] = values.bits
            return
        if values.nbytes <= _PIECE_BYTES or len(values) <= 1:
            self.receive(at, lambda target: np.copyto(target, dtypes.to_stored(values)))
            return
        places = np.arange(*at.indices(len(self))) if isinstance(at, slice) else at
        assert isinstance(places, np.ndarray)
        step = max(1, _PIECE_BYTES * len(values) // values.nbytes)
        for low in range(0, len(values), step):
            self[places[low : low + step]] = values[low : low + step]

    def receive(self, at: _At, read: Callable[[npt.NDArray[Any]], object]) -> None:
        """Have rows read into memory that the device copies from.

        Parameters
        ----------
        read : callable
            Fills the array that it is given: of the shape of these rows, in the dtype that stores them.
        """
        shape = self._shape_of(at)
        with self._on_the_way.buffer(math.prod(shape) * self.itemsize) as memory:
            read(memory.numpy().view(dtypes.STORED[dtypes.name_of(self.dtype)]).reshape(shape))
            given = memory.view(_BITS[self.itemsize]).reshape(shape)
            if isinstance(at, np.ndarray):
                self.bits[self._index(at)] = given.to(self.tensor.device, non_blocking=True)
            else:
                self.bits[at].copy_(given, non_blocking=True)

    def _shape_of(self, at: _At) -> tuple[int, ...]:
        return (len(at), *self.shape[1:]) if isinstance(at, np.ndarray) else tuple(self.tensor[at].shape)

    def decode_affine(
        self,
        codes: npt.NDArray[np.uint8],
        qparams: npt.NDArray[Any],
        bits: int,
        rows: Selection,
        dest: Selection,
    ) -> None:
        """`quantize.decode_affine` into it; what goes over are codes and qparams of the rows that are wanted.

        Parameters
        ----------
        rows, dest : slice or int64 array (k,)
            Which rows, and which rows of it they go to.
        """
        count = length(rows)
        ends = count * qparams.itemsize * 2
        with self._on_the_way.buffer(ends + count * codes.shape[1]) as memory:
            for part, source in ((memory[:ends], qparams), (memory[ends:], codes)):
                _take(source, rows, part.numpy().view(source.dtype.newbyteorder("=")).reshape(count, source.shape[1]))
            moved = memory.to(self.tensor.device, non_blocking=True)
            pairs = moved[:ends].view(tensor_dtype(qparams.dtype.name)).view(count, 2)
            packed = moved[ends:].view(count, codes.shape[1])
            out, places = (self.tensor[dest], None) if isinstance(dest, slice) else (self.tensor, self._index(dest))
            tensors.decode_affine(packed, pairs, bits, out, places)


def adopted(array: Any, what: str) -> DeviceArray:
    """An array of any library on a device, by DLPack; the same memory.

    Raises
    ------
    InvalidInputError
        torch cannot take it.
    """
    try:
        tensor = array.detach() if isinstance(array, torch.Tensor) else torch.utils.dlpack.from_dlpack(array)
    except Exception as error:
        raise InvalidInputError(f"{what}: torch cannot take it from its device, copy it to the CPU: {error}") from error
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if str(tensor.dtype).removeprefix("torch.") not in dtypes.STORED:
        raise InvalidInputError(f"{what}: {tensor.dtype} cannot be stored")
    return DeviceArray(tensor)


def tensor_of(values: npt.NDArray[Any]) -> torch.Tensor:
    """A numpy array of a logical dtype that torch has as a tensor: the same memory."""
    name = dtypes.name_of(values.dtype)
    bits = values.view({1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}.get(values.itemsize, values.dtype))
    return torch.from_numpy(bits).view(tensor_dtype(name))


def _take(values: npt.NDArray[Any], rows: Selection, out: npt.NDArray[Any]) -> None:
    if isinstance(rows, slice):
        np.copyto(out, values[rows])
    else:
        np.take(values, rows, axis=0, out=out, mode="clip")
