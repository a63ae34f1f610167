"""The states of random generators as JSON, so that they fit into `extra`."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from checkrun_format.errors import InvalidInputError

Generator: TypeAlias = torch.Generator | np.random.Generator
Json: TypeAlias = dict[str, Any]


def capture_rng(generators: Mapping[str, Generator] | None = None) -> Json:
    """The states of the global generators of torch (CPU and every CUDA device), numpy and `random`, and of given ones.

    Parameters
    ----------
    generators : mapping of name to torch.Generator or numpy.random.Generator
        Others that the training draws from.

    Returns
    -------
    dict
        JSON, about 25 KB; for `restore_rng`.

    Examples
    --------
    >>> state = capture_rng()
    >>> before = torch.rand(1).item(), np.random.random(), random.random()
    >>> restore_rng(state)
    >>> before == (torch.rand(1).item(), np.random.random(), random.random())
    True
    """
    version, internal, gauss = random.getstate()
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": _plain(np.random.get_state(legacy=False)),  # noqa: NPY002 - the generator that trainers use
        "python": [version, list(internal), gauss],
        "generators": {name: _captured(name, generator) for name, generator in (generators or {}).items()},
    }


def restore_rng(state: Json, generators: Mapping[str, Generator] | None = None) -> None:
    """Put generators back into the states of `capture_rng`.

    Raises
    ------
    InvalidInputError
        The state is none of `capture_rng`'s, or other generators are given than were captured; then none is changed.
        CUDA devices that are not there any more are passed over.
    """
    given = generators or {}
    if not isinstance(state, dict) or {"torch", "cuda", "numpy", "python", "generators"} - state.keys():
        raise InvalidInputError("restore_rng: this is no state of capture_rng()")
    if given.keys() != state["generators"].keys():
        raise InvalidInputError(
            f"restore_rng: generators {sorted(given)} given, {sorted(state['generators'])} were captured"
        )
    before = capture_rng(given)
    try:
        _restore(state, given)
    except Exception as error:
        _restore(before, given)
        raise InvalidInputError(f"restore_rng: a state of another generator, or altered: {error}") from error


def _restore(state: Json, given: Mapping[str, Generator]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(_filled(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(_tensor(state["torch"]))
    for device, told in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_tensor(told), device)
    for name, generator in given.items():
        _put_back(generator, state["generators"][name])


def _captured(name: str, generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return _text(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    raise InvalidInputError(
        f"capture_rng: {name!r} is a {type(generator).__name__}; give torch.Generator or numpy.random.Generator"
    )


def _put_back(generator: Generator, told: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(told))
    else:
        generator.bit_generator.state = _filled(told)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _plain(state: Any) -> Any:
    """A state of numpy as JSON: arrays as lists with their dtype, large integers as text."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.name}
    if isinstance(state, int) and not isinstance(state, bool) and abs(state) >= 2**53:
        return {"integer": hex(state)}  # more than many JSON readers keep in a number
    return state.item() if isinstance(state, np.generic) else state


def _filled(told: Any) -> Any:
    if not isinstance(told, dict):
        return told
    if told.keys() == {"array", "dtype"}:
        return np.array(told["array"], told["dtype"])
    if told.keys() == {"integer"}:
        return int(told["integer"], 16)
    return {key: _filled(value) for key, value in told.items()}
