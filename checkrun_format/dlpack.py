"""Array exchange: whatever the caller has in, as views without a copy where that is possible.

Arrays on the CPU are numpy views. Those on a device are `DeviceArray`, which the functions here make look alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes, movement, quantize
from checkrun_format.errors import InvalidInputError
from checkrun_format.rows import Moves, length

if TYPE_CHECKING:
    from checkrun_format.devices import DeviceArray

Array: TypeAlias = "npt.NDArray[Any] | DeviceArray"
"""On the CPU, or on a device."""

_ON_CPU = (1, 3, 11)
"""kDLCPU, kDLCUDAHost, kDLROCMHost."""


def to_array(array: object, what: str) -> Array:
    """A view of an array, where it is.

    Parameters
    ----------
    array : object
        A numpy array, anything with `__dlpack__` (torch, jax, cupy, ...), or anything that numpy itself reads
        (lists, scalars). bfloat16 and float8 come as the dtypes of `ml_dtypes`.
    what : str
        How messages name it.

    Raises
    ------
    InvalidInputError
        Not an array, on a device that cannot be reached, or of a dtype that the format cannot store.
    """
    return _storable(_viewed(array, what), what)


def _viewed(array: object, what: str) -> Array:
    masked = sys.modules.get("numpy.ma")  # numpy imports it when it is first asked for, which takes longer than a read
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise InvalidInputError(f"{what}: a masked array; fill it first")
    return np.asarray(array) if isinstance(array, np.ndarray) else _import(array, what)  # no matrix, no memmap


def _storable(view: Array, what: str) -> Array:
    try:
        dtypes.name_of(view.dtype)
    except InvalidInputError as error:
        raise InvalidInputError(f"{what}: {error}") from error
    return view


def to_device_array(array: object, what: str, device: str) -> DeviceArray:
    """The same for a tensor that must be on a device; on "cpu" too it is then treated as one on a device.

    Raises
    ------
    InvalidInputError
        Also if it is elsewhere.
    """
    found: DeviceArray = _devices(f"{what} is to be on {device}").adopted(array, what)
    if found.device != device:
        raise InvalidInputError(f"{what}: it is on {found.device}, not on {device}")
    return found


def checked_device(device: object) -> str:
    """The full name of a device that is there, as torch tells it.

    Raises
    ------
    InvalidInputError
        There is no such device, or no torch.
    """
    return str(_devices(f"device={device!r}").checked_device(device))


def to_numpy(array: object, what: str) -> npt.NDArray[Any]:
    """The same for what is needed here: ids, keys and masks. A copy of what is on a device."""
    view = _viewed(array, what)
    if view.dtype.kind in "OSTU":
        raise InvalidInputError(f"{what}: dtype {view.dtype} where integers of at most 64 bits, or a mask, are wanted")
    return on_host(_storable(view, what))


def to_writable(array: object, what: str) -> Array:
    """The same for a destination: a view whose writes reach `array`."""
    if not isinstance(array, np.ndarray) and not hasattr(array, "__dlpack__"):
        raise InvalidInputError(f"{what}: {type(array).__name__} is no array that can be written to")
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):
        raise InvalidInputError(f"{what}: jax's arrays cannot be written to; leave it out and give framework='jax'")
    view = to_array(array, what)
    if isinstance(view, np.ndarray) and not view.flags.writeable:
        raise InvalidInputError(f"{what} is read-only")
    steps = (view.strides, view.itemsize) if isinstance(view, np.ndarray) else (view.tensor.stride(), 1)
    if view.size and _overlaps(view.shape, *steps):
        raise InvalidInputError(f"{what} overlaps itself: several of its elements share one place in memory")
    return view


def _overlaps(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether an axis steps less far than what lies within it reaches, so that elements may share places."""
    reach = itemsize
    for stride, count in sorted((abs(stride), count) for stride, count in zip(strides, shape, strict=True)):
        if count > 1 and stride < reach:
            return True
        reach += stride * (count - 1)
    return False


def on_host(array: Array) -> npt.NDArray[Any]:
    """The values here: the array itself, or a copy of what is on a device."""
    return array if isinstance(array, np.ndarray) else array.host()


def device_of(array: Array) -> str | None:
    """The device of an array; None: the CPU."""
    return None if isinstance(array, np.ndarray) else array.device


def as_quantized(array: Array) -> Any:
    """What `quantize` takes: the numpy array, or the tensor."""
    return array if isinstance(array, np.ndarray) else array.tensor


def copied(array: Array) -> Array:
    """The values in memory of their own, where they are."""
    return np.array(array) if isinstance(array, np.ndarray) else array.copy()


def concatenated(arrays: Sequence[Array]) -> Array:
    """Arrays of one place and dtype, one after another."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)  # type: ignore[arg-type]
    return arrays[0].joined(arrays[1:])  # type: ignore[arg-type]


def flat(array: Array) -> Array:
    """All elements as one dimension of the dtype that stores them; a view if that is possible."""
    return dtypes.to_stored(array).reshape(-1) if isinstance(array, np.ndarray) else array.stored()


def empty_like(array: Array, shape: tuple[int, ...]) -> Array:
    """Memory of another shape, for what is on its way to an array."""
    return np.empty(shape, array.dtype.newbyteorder("=")) if isinstance(array, np.ndarray) else array.empty(shape)


def run_of(array: Array) -> Array | None:
    """A destination as one dimension of the dtype that stores its values; None if that is not the same memory."""
    if not isinstance(array, np.ndarray):
        return array.run()
    stored = dtypes.as_stored(array)
    return None if stored is None or not stored.flags.c_contiguous else stored.reshape(-1)


def decode_affine(
    codes: npt.NDArray[np.uint8],
    qparams: npt.NDArray[Any],
    bits: int,
    out: Array,
    moves: Moves,
) -> None:
    """`quantize.scatter_affine`: some rows, decoded, to some rows of `out` (n, columns), where that is."""
    if isinstance(out, np.ndarray):
        columns = out.shape[1]
        quantize.scatter_affine(codes, qparams, bits, columns, out, rows=moves.given, dest=moves.to, kept=moves.kept)
        return
    positions, places = movement.listed(moves)
    if length(positions):
        out.decode_affine(codes, qparams, bits, positions, places)


def scatter(values: npt.NDArray[Any], out: Array, moves: Moves) -> None:
    """`out[places] = values[positions]`, cast to the dtype of `out`, where that is."""
    positions, places = movement.listed(moves)
    if not length(positions):
        return
    if isinstance(out, np.ndarray):
        movement.scatter(values, positions, out, places)
    else:
        out[places] = values[positions].astype(out.dtype, copy=False)


def receive(run: Array, read: Callable[[npt.NDArray[Any]], object]) -> None:
    """Have a piece of `run_of` filled by what reads into memory of the host."""
    if isinstance(run, np.ndarray):
        read(run)
    else:
        run.receive(..., read)


def _import(array: object, what: str) -> Array:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _from_torch(torch, array, what)
    if hasattr(array, "__dlpack__"):
        if not _is_on_cpu(array, what):
            return _adopted(array, what)
        try:
            return np.from_dlpack(array)
        except (RuntimeError, BufferError, TypeError, ValueError):
            pass  # a dtype that DLPack or numpy does not carry: try the array protocol
    try:
        return np.asarray(array)
    except Exception as error:
        raise InvalidInputError(f"{what}: {type(array).__name__} cannot be read as an array: {error}") from error


def _is_on_cpu(array: Any, what: str) -> bool:
    try:
        return int(array.__dlpack_device__()[0]) in _ON_CPU
    except Exception as error:
        raise InvalidInputError(f"{what}: {error}") from error


def _adopted(array: Any, what: str) -> DeviceArray:
    found: DeviceArray = _devices(f"{what} is on a device").adopted(array, what)
    if found.device == "cpu":
        raise InvalidInputError(f"{what}: its DLPack names a device and gives memory of the CPU")
    return found


def _devices(what: str) -> Any:
    try:
        from checkrun_format import devices
    except ImportError as error:
        raise InvalidInputError(f"{what}: devices are reached by torch, which is not installed ({error})") from error
    return devices


def _from_torch(torch: Any, tensor: Any, what: str) -> Array:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        raise InvalidInputError(f"{what}: a {tensor.layout} tensor; give a strided one (to_dense())")
    if not _is_on_cpu(tensor, what):
        return _adopted(tensor, what)
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
