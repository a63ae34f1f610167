"""Where values that are read go: into arrays of which framework, on which device."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from checkrun_format import dlpack, dtypes
from checkrun_format.dlpack import Array
from checkrun_format.errors import InvalidInputError
from checkrun_format.packing import aligned_empty

if TYPE_CHECKING:
    from checkrun_format.devices import DeviceArray, Way

FRAMEWORKS = ("numpy", "torch", "jax", "cupy")

_NARROWED_BY_JAX = ("float64", "int64", "uint64", "complex128")


class Placement:
    """Makes the arrays that are read into, and the way to those that are on a device; within a `with`.

    Parameters
    ----------
    framework : "numpy", "torch", "jax" or "cupy"
        Of new arrays. By default numpy, or torch where there is a device; cupy has no arrays but on a device.
    device : str or torch.device
        Where new arrays are, as torch names it: "cuda", "cuda:1". They are decoded there. "cpu" goes the same way, by
        torch; without a device numpy's arrays are filled, which is faster, and taken over by the framework.

    Raises
    ------
    InvalidInputError
        An unknown framework, one that is not installed, or a device that is not there.
    """

    def __init__(self, framework: str | None = None, device: object = None) -> None:
        if framework not in (None, *FRAMEWORKS):
            raise InvalidInputError(f"framework={framework!r}; known are {', '.join(FRAMEWORKS)}")
        if framework == "numpy" and device is not None and str(device) != "cpu":
            raise InvalidInputError(f"device={device!r}: numpy has arrays on the CPU alone; give framework='torch'")
        if framework == "cupy":
            device = "cuda" if device is None else device
            if str(device).partition(":")[0] != "cuda":
                raise InvalidInputError(f"device={device!r}: cupy has arrays on GPUs alone; give 'cuda'")
        self._framework = framework or ("numpy" if device is None else "torch")
        self._module: Any = None if self._framework == "numpy" else _imported(self._framework)
        self._device = None if device is None or framework == "numpy" else dlpack.checked_device(device)
        self._ways: dict[str, Way] = {}

    def check(self, dtype: str, what: str) -> None:
        """Refuse a logical dtype that the framework has not, or would make narrower."""
        if self._framework in ("torch", "cupy") or self._device is not None:
            known = dtype in dtypes.STORED and not dtype.startswith(("datetime64_", "timedelta64_"))
        else:
            known = self._framework == "numpy" or hasattr(self._module.numpy, "bool_" if dtype == "bool" else dtype)
        if not known:
            raise InvalidInputError(f"{what}: {self._framework} has no {dtype}; read it with framework='numpy'")
        if self._framework == "jax" and dtype in _NARROWED_BY_JAX and not self._module.config.jax_enable_x64:
            raise InvalidInputError(
                f"{what}: jax makes {dtype} narrower unless its option jax_enable_x64 is set; set it, or read with "
                "framework='numpy'"
            )

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A new array to be read into."""
        if self._device is not None:
            devices = _devices()
            tensor = devices.torch.empty(shape, dtype=devices.tensor_dtype(dtype), device=self._device)
            return self._destination(tensor)
        return aligned_empty(shape, dtypes.logical(dtype))

    def into(self, out: object, what: str) -> Array:
        """An array of the caller's to be read into, wherever it is.

        Raises
        ------
        InvalidInputError
            It cannot be written to.
        """
        view = dlpack.to_writable(out, what)
        if not isinstance(view, np.ndarray):
            return self._destination(view.tensor)
        if self._device == "cpu" and isinstance(out, _devices().torch.Tensor):
            return self._destination(dlpack.to_device_array(out, what, "cpu").tensor)
        return view

    def _destination(self, tensor: Any) -> DeviceArray:
        name = str(tensor.device)
        if name not in self._ways:
            self._ways[name] = _devices().Way(tensor.device)
        return self._ways[name].destination(tensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave when everything that was read is there; after an error too, so that memory may be given back."""
        for way in self._ways.values():
            way.finish()

    def given(self, array: Array) -> Any:
        """What the caller gets for an array of `empty`, once it is filled: the same memory."""
        if isinstance(array, np.ndarray):
            if self._framework == "torch":
                return _devices().tensor_of(array)
            if self._framework == "jax":
                return self._module.device_put(array, self._module.devices("cpu")[0], may_alias=True)
            return array
        if self._framework == "jax":
            return self._module.dlpack.from_dlpack(array.tensor)
        if self._framework == "cupy":
            return self._module.from_dlpack(array.tensor)
        return array.tensor


def _imported(framework: str) -> ModuleType:
    try:
        return importlib.import_module(framework)
    except ImportError as error:
        raise InvalidInputError(f"framework={framework!r} is not installed: {error}") from error


def _devices() -> Any:
    from checkrun_format import devices

    return devices
