"""Array exchange: whatever the caller has in, numpy views out, without a copy where that is possible."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError


def to_numpy(array: object, what: str) -> npt.NDArray[Any]:
    """A numpy view of a CPU array.

    Parameters
    ----------
    array : object
        A numpy array, anything with `__dlpack__` on the CPU (torch, jax, ...), or anything that numpy itself reads
        (lists, scalars). bfloat16 and float8 come as the dtypes of `ml_dtypes`.
    what : str
        How messages name it.

    Raises
    ------
    InvalidInputError
        Not an array, on another device, or of a dtype that the format cannot store.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidInputError(f"{what}: a masked array; fill it first")
    view = np.asarray(array) if isinstance(array, np.ndarray) else _import(array, what)  # no matrix, no memmap
    try:
        dtypes.name_of(view.dtype)
    except InvalidInputError as error:
        raise InvalidInputError(f"{what}: {error}") from error
    return view


def to_writable(array: object, what: str) -> npt.NDArray[Any]:
    """The same for a destination: a view whose writes reach `array`."""
    if not isinstance(array, np.ndarray) and not hasattr(array, "__dlpack__"):
        raise InvalidInputError(f"{what}: {type(array).__name__} is no array that can be written to")
    view = to_numpy(array, what)
    if not view.flags.writeable:
        raise InvalidInputError(f"{what} is read-only")
    if view.size and any(stride == 0 and count > 1 for stride, count in zip(view.strides, view.shape, strict=True)):
        raise InvalidInputError(f"{what} overlaps itself: several of its elements share one place in memory")
    return view


def _import(array: object, what: str) -> npt.NDArray[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _from_torch(torch, array, what)
    if hasattr(array, "__dlpack__"):
        _refuse_other_devices(array, what)
        try:
            return np.from_dlpack(array)
        except (RuntimeError, BufferError, TypeError, ValueError):
            pass  # a dtype that DLPack or numpy does not carry: try the array protocol
    try:
        return np.asarray(array)
    except Exception as error:
        raise InvalidInputError(f"{what}: {type(array).__name__} cannot be read as an array: {error}") from error


def _refuse_other_devices(array: Any, what: str) -> None:
    try:
        kind = array.__dlpack_device__()[0]
    except Exception as error:
        raise InvalidInputError(f"{what}: {error}") from error
    if int(kind) not in (1, 3, 11):  # kDLCPU, kDLCUDAHost, kDLROCMHost
        raise InvalidInputError(f"{what} is on a device (DLPack type {int(kind)}): copy it to the CPU first")


def _from_torch(torch: Any, tensor: Any, what: str) -> npt.NDArray[Any]:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        raise InvalidInputError(f"{what}: a {tensor.layout} tensor; give a strided one (to_dense())")
    _refuse_other_devices(tensor, what)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    stored = dtypes.STORED.get(name)
    if stored is None:
        raise InvalidInputError(f"{what}: torch dtype {name} cannot be stored")
    if stored == name:
        return np.from_dlpack(tensor)
    bits = torch.uint8 if stored == "uint8" else torch.uint16
    return dtypes.from_stored(np.from_dlpack(tensor.view(bits)), name)
