"""Options and other small state as JSON and back: what `state_dict` of a scheduler or an optimizer's group holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from checkrun_format.errors import InvalidInputError

_LARGEST = 1 << 16


def to_json(value: Any, what: str) -> Any:
    """A value as JSON that `from_json` gives back in the same type.

    Carried are None, truth values, numbers (infinities and NaN too), text, lists, tuples, mappings with keys of text or
    numbers, and tensors of up to 65,536 elements.

    Raises
    ------
    InvalidInputError
        Naming `what` cannot be carried.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [to_json(inner, what) for inner in value]
    if isinstance(value, tuple):
        return {"tuple": [to_json(inner, what) for inner in value]}
    if isinstance(value, Mapping):
        return {"items": [[to_json(key, what), to_json(inner, what)] for key, inner in value.items()]}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() <= _LARGEST:
        dtype = str(value.dtype).removeprefix("torch.")
        wide = value.detach().cpu().to(torch.float64 if value.is_floating_point() else value.dtype)
        return {"tensor": to_json(wide.flatten().tolist(), what), "dtype": dtype, "shape": list(value.shape)}
    raise InvalidInputError(f"{what}: a {type(value).__name__} cannot be saved as JSON")


def from_json(told: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(told, list):
        return [from_json(inner) for inner in told]
    if not isinstance(told, dict):
        return told
    if "float" in told:
        return float(told["float"])
    if "tuple" in told:
        return tuple(from_json(inner) for inner in told["tuple"])
    if "items" in told:
        return {from_json(key): from_json(inner) for key, inner in told["items"]}
    dtype = getattr(torch, told["dtype"])
    return torch.tensor(from_json(told["tensor"]), dtype=dtype).reshape(told["shape"])
