"""Which optimizers move rows that no gradient reached, and what of their state is one value per row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from checkrun_format.errors import InvalidInputError
from checkrun_format.torch.values import from_json, to_json

Reason: TypeAlias = Callable[[Mapping[str, Any]], str | None]
"""Takes a parameter group; tells why a step moves rows (or their state) whose gradient is zero, None if it does not."""

Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None"

_FIELD = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")


def _decay(group: Mapping[str, Any]) -> str | None:
    return "weight decay moves every row" if group.get("weight_decay") else None


def _momentum(group: Mapping[str, Any]) -> str | None:
    return "momentum moves rows of earlier batches" if group.get("momentum") else _decay(group)


_REASONS: dict[type[Optimizer], Reason] = {SGD: _momentum, Adagrad: _decay, SparseAdam: lambda group: None}


def register_optimizer(kind: type[Optimizer], reason: Reason = lambda group: None) -> None:
    """Say of an optimizer class that it leaves rows without gradient, and their state, as they are.

    Parameters
    ----------
    reason : callable
        Takes a parameter group; if that group moves such rows after all, tells why.
    """
    _REASONS[kind] = reason


def why_all_rows(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """Why a step of an optimizer may change rows whose gradient is zero; None if it does not."""
    name = type(optimizer).__name__
    reason = _REASONS.get(type(optimizer))
    if reason is not None:
        told = reason(group)
        return None if told is None else f"{name}: {told}"
    if type(optimizer).__module__.startswith("torch.optim"):
        return f"{name} changes the state of every row in each step"
    return f"{name} is not known to leave rows without gradient as they are (register_optimizer says so)"


def named_optimizers(given: Optimizers) -> dict[str, Optimizer]:
    """The optimizers by name.

    Raises
    ------
    InvalidInputError
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        named = dict(given)
    elif isinstance(given, Sequence):
        named = {f"optimizer-{place}": optimizer for place, optimizer in enumerate(given)}
    else:
        named = {"optimizer": given}
    for name, optimizer in named.items():
        if not isinstance(name, str) or not isinstance(optimizer, Optimizer):
            raise InvalidInputError(
                f"optimizer {name!r}: a {type(optimizer).__name__} where a torch.optim.Optimizer belongs"
            )
    return named


class OptimizerState:
    """The state of optimizers, taken apart: fields of tables, dense tensors, and the rest as JSON.

    Parameters
    ----------
    optimizers : mapping of name to Optimizer
    names : mapping of nn.Parameter to text
        The name of each parameter of the model.
    tables : set of text
        Which of these are tables.
    """

    def __init__(
        self, optimizers: Mapping[str, Optimizer], names: Mapping[nn.Parameter, str], tables: Iterable[str]
    ) -> None:
        self.optimizers = optimizers
        self._names = names
        self._tables = frozenset(tables)
        self.check()

    def check(self) -> None:
        """Refuse optimizers that hold a parameter which is not in the model."""
        for label, optimizer in self.optimizers.items():
            for parameter in _parameters(optimizer):
                if parameter not in self._names:
                    raise InvalidInputError(
                        f"{label} holds a parameter {tuple(parameter.shape)} that is not in the model, so its values "
                        "would not be saved: give a model that contains it"
                    )

    def fields(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The row-aligned state of a table, by field."""
        found: dict[str, torch.Tensor] = {}
        for label, optimizer in self.optimizers.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if _is_field(key, value, parameter):
                    if key in found:
                        raise InvalidInputError(
                            f"table {self._names[parameter]!r}: two optimizers ({label} is one) have a state {key!r}"
                        )
                    found[key] = value
        return found

    def state_of(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        """All tensors of a parameter's state."""
        states = (optimizer.state.get(parameter, {}) for optimizer in self.optimizers.values())
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All other tensors: `PARAMETER:OPTIMIZER.KEY`."""
        found: dict[str, torch.Tensor] = {}
        for label, parameter, state in self._states():
            for key, value in state.items():
                name = _tensor_name(label, self._names[parameter], key)
                if isinstance(value, torch.Tensor) and not self._is_in_table(key, value, parameter):
                    if value.layout == torch.sparse_coo:
                        found[f"{name}.indices"], found[f"{name}.values"] = value._indices(), value._values()  # noqa: SLF001 - of an uncoalesced one, too
                    else:
                        found[name] = value
        return found

    def document(self) -> dict[str, Any]:
        """All the rest as JSON: classes, options of the groups, which state each parameter has, and plain values."""
        document: dict[str, Any] = {}
        for label, optimizer in self.optimizers.items():
            groups = [
                {
                    "parameters": [self._names[p] for p in group["params"]],
                    "options": {k: to_json(v, f"{label}, {k}") for k, v in group.items() if k != "params"},
                }
                for group in optimizer.param_groups
            ]
            document[label] = {"kind": type(optimizer).__name__, "groups": groups, "state": {}}
        for label, parameter, state in self._states():
            told = {key: self._told(key, value, parameter) for key, value in state.items()}
            document[label]["state"][self._names[parameter]] = told
        return document

    def _states(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        for label, optimizer in self.optimizers.items():
            for parameter in _parameters(optimizer):
                if optimizer.state.get(parameter):
                    yield label, parameter, optimizer.state[parameter]

    def _is_in_table(self, key: str, value: torch.Tensor, parameter: nn.Parameter) -> bool:
        return self._names[parameter] in self._tables and _is_field(key, value, parameter)

    def _told(self, key: str, value: Any, parameter: nn.Parameter) -> Any:
        """Where a value is: `field`, `tensor`, `sparse`, or here."""
        if not isinstance(value, torch.Tensor):
            return {"value": to_json(value, f"the state {key!r} of {self._names[parameter]!r}")}
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        if self._is_in_table(key, value, parameter):
            return {"field": dtype, "shape": shape}
        if value.layout == torch.sparse_coo:
            return {"sparse": dtype, "shape": shape, "coalesced": value.is_coalesced()}
        return {"tensor": dtype, "shape": shape}

    # Back again -------------------------------------------------------------------------------------------------------

    def differences(self, document: Mapping[str, Any]) -> list[str]:
        """Why a stored document does not fit these optimizers; an empty list if it does."""
        told = [f"{label} is not in the checkpoint" for label in self.optimizers if label not in document]
        told += [f"the checkpoint's {label} was not given" for label in document if label not in self.optimizers]
        for label in self.optimizers.keys() & document.keys():
            told += self._misfits(label, document[label])
        return told

    def _misfits(self, label: str, stored: Mapping[str, Any]) -> list[str]:
        optimizer = self.optimizers[label]
        if stored["kind"] != type(optimizer).__name__:
            return [f"{label} is a {type(optimizer).__name__}, in the checkpoint a {stored['kind']}"]
        ours = [[self._names[p] for p in group["params"]] for group in optimizer.param_groups]
        if [group["parameters"] for group in stored["groups"]] != ours:
            return [f"the parameter groups of {label} hold other parameters than in the checkpoint"]
        return []

    def prepare(self, document: Mapping[str, Any]) -> None:
        """Make the optimizers' state what a fitting document tells, keeping tensors that exist; values come after."""
        for label, optimizer in self.optimizers.items():
            stored = document.get(label)
            if stored is None or self._misfits(label, stored):
                continue
            for group, told in zip(optimizer.param_groups, stored["groups"], strict=True):
                for key, value in told["options"].items():
                    _put_option(group, key, from_json(value))
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._prepare_state(optimizer, group, parameter, stored["state"].get(self._names[parameter], {}))

    def _prepare_state(
        self, optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter, told: Mapping[str, Any]
    ) -> None:
        if not told:
            optimizer.state.pop(parameter, None)
            return
        if not all(_fits(where, parameter) for where in told.values()):
            return  # the parameter has another shape than in the checkpoint, and is left as it is, too
        state = optimizer.state[parameter]
        for key in state.keys() - told.keys():
            del state[key]
        for key, where in told.items():
            if "value" in where:
                state[key] = from_json(where["value"])
            elif "sparse" not in where:
                shape, dtype = tuple(where["shape"]), getattr(torch, where.get("field") or where["tensor"])
                known = state.get(key)
                if where.get("field") is not None:
                    shape = (len(parameter), *shape[1:])
                if not isinstance(known, torch.Tensor) or (tuple(known.shape), known.dtype) != (shape, dtype):
                    on_host = not shape and not (group.get("capturable") or group.get("fused"))
                    state[key] = torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)

    def finish(self, document: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        """Put together what is not read into tensors that exist: sparse state."""
        for label, optimizer in self.optimizers.items():
            for parameter in _parameters(optimizer):
                told = document.get(label, {"state": {}})["state"].get(self._names[parameter], {})
                for key, where in told.items():
                    name = _tensor_name(label, self._names[parameter], key)
                    if "sparse" in where and f"{name}.indices" in tensors:
                        indices, values = (torch.as_tensor(tensors[f"{name}.{part}"]) for part in ("indices", "values"))
                        optimizer.state[parameter][key] = torch.sparse_coo_tensor(
                            indices.to(parameter.device),
                            values.to(parameter.device),
                            where["shape"],
                            is_coalesced=where["coalesced"],
                            check_invariants=True,
                        )


def _tensor_name(label: str, parameter: str, key: str) -> str:
    return f"{parameter}:{label}.{key}"


def stored_tensors(document: Mapping[str, Any]) -> set[str]:
    """The names of the tensors that a document of `OptimizerState` tells of."""
    names = set()
    for label, told in document.items():
        for parameter, state in told["state"].items():
            for key, where in state.items():
                name = _tensor_name(label, parameter, key)
                names |= {name} if "tensor" in where else set()
                names |= {f"{name}.indices", f"{name}.values"} if "sparse" in where else set()
    return names


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_field(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """Whether a state is one value, or one row of values, for each row of a parameter."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not 1 <= value.ndim <= 2:
        return False
    widths = (parameter.shape[1:], (1,), ())
    return len(value) == len(parameter) and value.shape[1:] in widths and key != "weight" and bool(_FIELD.match(key))


def _fits(where: Mapping[str, Any], parameter: nn.Parameter) -> bool:
    """Whether a stored state can be one of a parameter of this shape."""
    shape = tuple(where.get("shape", ()))
    if "field" in where:
        return shape[1:] in (parameter.shape[1:], (1,), ())
    return len(shape) != parameter.ndim or all(n in (1, wide) for n, wide in zip(shape, parameter.shape, strict=True))


def _put_option(group: dict[str, Any], key: str, value: Any) -> None:
    known = group.get(key)
    if isinstance(known, torch.Tensor) and not isinstance(value, torch.Tensor):
        known.fill_(value)
    elif isinstance(known, torch.Tensor):
        known.copy_(value)
    else:
        group[key] = value
