"""Files of `torch.save`: state dicts, nested or not. torch is imported here, and only when such a file is asked for."""

from __future__ import annotations

import errno
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from checkrun_format import dlpack, dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.interchange.contents import Contents, Entry

_LABEL = "checkrun"


def read(path: Path, _stack: ExitStack) -> Contents:
    """The tensors of a file, mapped, by their names with dots between; what else it holds is `extra`.

    Only what `torch.load(weights_only=True)` admits is loaded: tensors and plain values, never other objects.
    """
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is what a file cut short may give
            raise
        raise InvalidInputError(_refusal(error)) from error
    if not isinstance(loaded, dict):
        raise InvalidInputError(f"it holds a {type(loaded).__name__}; a state dict is wanted")
    arrays, extra = {}, {}
    for name, value in _leaves(loaded, torch.Tensor, ""):
        if name in arrays or name in extra:
            raise InvalidInputError(f"the name {name!r} is there twice, once its parts are joined with dots")
        if isinstance(value, torch.Tensor):
            arrays[name] = dlpack.on_host(dlpack.to_array(value, f"tensor {name!r}"))
        elif _is_not_finite(value):
            arrays[name] = np.array(value)  # JSON cannot carry it
        else:
            extra[name] = value
    label = (getattr(loaded, "_metadata", None) or {}).get(_LABEL)
    return Contents(arrays=arrays, label=label, extra=extra or None, file_bytes=path.stat().st_size)


def _refusal(error: Exception) -> str:
    inner = str(error.__context__)
    if "GLOBAL" in inner:
        what = inner.partition(" was not ")[0]
        return f"it holds other objects than tensors and plain values ({what}): save model.state_dict()"
    reason = str(error).partition("\n")[0]
    return f"not a state dict that torch.load(weights_only=True, mmap=True) reads, or a truncated one: {reason}"


def _leaves(value: Any, tensor: type, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values with their names; a list of values that JSON can carry is one value."""
    inner = None
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list | tuple) and _holds(value, tensor):
        inner = list(enumerate(value))
    if not inner:
        yield name, value
        return
    for key, item in inner:
        yield from _leaves(item, tensor, f"{name}.{key}" if name else str(key))


def _holds(value: Any, tensor: type) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(_holds(item, tensor) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, tensor) or _is_not_finite(value)


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def write(out: BinaryIO, entries: Sequence[Entry], label: str) -> None:
    """Write a state dict. All of it is in memory at once: torch writes no tensor piece by piece."""
    import torch

    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    for entry in entries:
        dtype = getattr(torch, entry.dtype, None)
        if dtype is None:
            raise InvalidInputError(f"tensor {entry.name!r}: a state dict cannot hold {entry.dtype}; npz can")
        stored = np.empty(entry.shape, dtypes.STORED[entry.dtype]).reshape(-1)
        start = 0
        for piece in entry.stored():
            stored[start : start + piece.size] = piece.reshape(-1)
            start += piece.size
        state[entry.name] = torch.from_numpy(stored.reshape(entry.shape)).view(dtype)
    setattr(state, "_metadata", {_LABEL: label})  # noqa: B010  # where state dicts keep versions of modules
    try:
        torch.save(state, out)
    except RuntimeError as error:  # it hides what the system said
        raise OSError(f"torch.save, perhaps for want of space: {str(error).partition(chr(10))[0]}") from error
