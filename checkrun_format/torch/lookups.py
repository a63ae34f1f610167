"""Which parameters of a model are tables, and which of their rows a forward reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from checkrun_format.errors import InvalidInputError

Tracking: TypeAlias = Literal["lookups", "marked", "all", "dense"]
"""How it is known which rows of a parameter change.

`lookups`: those that its modules look up. `marked`: those that the trainer names with `Checkpointer.mark`. `all`: any,
always. `dense`: it is no table, but a dense tensor, stored whole in each checkpoint."""

Tables: TypeAlias = "Sequence[str] | Mapping[str, Tracking] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """What a module looks up.

    Parameters
    ----------
    parameters : mapping of text to nn.Parameter
        Its tables, (rows, columns) each, by name below the module, as in its state dict.
    rows : callable
        Takes the arguments and keyword arguments of a forward; gives for each of these names the rows that it reads:
        integers of any shape, repeats allowed, on the device of the parameter.
    renormalizes : bool
        Whether a forward itself changes the rows that it reads (`max_norm`), in evaluation too.
    """

    parameters: Mapping[str, nn.Parameter]
    rows: Callable[[tuple[Any, ...], dict[str, Any]], Mapping[str, torch.Tensor]]
    renormalizes: bool = False


Adapter: TypeAlias = Callable[[Any], Lookups]
"""Tells of a module what it looks up."""

_ADAPTERS: dict[type[nn.Module], Adapter] = {}


def register_lookups(kind: type[nn.Module], adapter: Adapter) -> None:
    """Have modules of a class found: `adapter` tells of each what it looks up.

    Subclasses count as long as they have the same `forward`.
    """
    _ADAPTERS[kind] = adapter


def _embedding(module: nn.Embedding | nn.EmbeddingBag) -> Lookups:
    weight = module.weight
    return Lookups(
        parameters={"weight": weight} if isinstance(weight, nn.Parameter) else {},
        rows=lambda arguments, named: {"weight": arguments[0] if arguments else named["input"]},
        renormalizes=module.max_norm is not None,
    )


register_lookups(nn.Embedding, _embedding)
register_lookups(nn.EmbeddingBag, _embedding)


def lookups_of(module: nn.Module) -> Lookups | None:
    """What a module looks up; None if it is of no known class, or does its lookups otherwise than that."""
    for kind in type(module).__mro__:
        adapter = _ADAPTERS.get(kind)
        if adapter is not None:
            return adapter(module) if getattr(type(module), "forward", 0) is getattr(kind, "forward", 1) else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTable:
    """A parameter that is a table.

    `name` is its name in the state dict, the first if it has several; `modules` are those that look its rows up, with
    its name below each.
    """

    name: str
    parameter: nn.Parameter
    tracking: Tracking
    modules: Sequence[tuple[nn.Module, str]]


def find_tables(model: nn.Module, tables: Tables = None) -> list[FoundTable]:
    """The tables of a model; see `Checkpointer`.

    Raises
    ------
    InvalidInputError
        A name that the model does not have, or a table of which rows could change without a lookup.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model: a {type(model).__name__} where a torch.nn.Module belongs")
    names = _names(model)
    by_name = {name: parameter for parameter, known in names.items() for name in known}
    modules = _looked_up(model)
    chosen = _chosen(tables, by_name, [names[p][0] for p in names if p in modules])
    found = []
    for name, tracking in chosen.items():
        parameter = by_name[name]
        looked_up = modules.get(parameter, {})
        if tracking == "dense":
            continue
        if tracking == "lookups":
            _refuse_other_readers(name, [known for known in names[parameter] if known not in looked_up], looked_up)
        _check_shape(name, parameter)
        below = list(looked_up.values()) if tracking == "lookups" else []
        found.append(FoundTable(name=names[parameter][0], parameter=parameter, tracking=tracking, modules=below))
    return found


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter, and all its names."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def _looked_up(model: nn.Module) -> dict[nn.Parameter, dict[str, tuple[nn.Module, str]]]:
    """For each parameter that modules look up, these modules by its name there."""
    found: dict[nn.Parameter, dict[str, tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        lookups = lookups_of(module)
        if lookups is None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            weight = module.weight
            if isinstance(weight, nn.Parameter):
                found.setdefault(weight, {})  # a forward of its own: which rows it reads is not known
        for local, parameter in ({} if lookups is None else lookups.parameters).items():
            found.setdefault(parameter, {})[f"{path}.{local}" if path else local] = (module, local)
    return found


def _chosen(tables: Tables, by_name: Mapping[str, nn.Parameter], found: Iterable[str]) -> dict[str, Tracking]:
    """The tables by name, and how each is tracked."""
    if isinstance(tables, str):
        raise InvalidInputError(f"tables={tables!r}: give a list of names, or a mapping of names to how they change")
    given: dict[str, Tracking] = dict(tables) if isinstance(tables, Mapping) else dict.fromkeys(tables or (), "lookups")
    for name, tracking in given.items():
        if name not in by_name:
            near = ", ".join(sorted(found)[:5]) or "none"
            raise InvalidInputError(f"tables: the model has no parameter {name!r}; its embeddings: {near}")
        if tracking not in get_args(Tracking):
            raise InvalidInputError(f"tables: {name!r}: {tracking!r}; one of {', '.join(get_args(Tracking))}")
    if tables is not None and not isinstance(tables, Mapping):
        return given
    parameters = {by_name[name] for name in given}
    others: dict[str, Tracking] = {name: "lookups" for name in found if by_name[name] not in parameters}
    return others | given


def _refuse_other_readers(name: str, others: Sequence[str], looked_up: Mapping[str, Any]) -> None:
    advice = (
        f"say how its rows change: tables={{{name!r}: 'marked'}} if you name them with Checkpointer.mark, 'all' if any "
        "may change in each step, 'dense' to store it whole as a dense tensor"
    )
    if not looked_up:
        raise InvalidInputError(
            f"table {name!r}: no known module looks its rows up with a forward of its own class, so which rows change "
            f"is not known; {advice}"
        )
    if others:
        raise InvalidInputError(
            f"table {name!r} is tied to {others[0]!r}, which is no lookup: its rows change by more than lookups; "
            f"{advice}"
        )


def _check_shape(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
        raise InvalidInputError(f"table {name!r} has no values yet: initialize the model first")
    if parameter.ndim not in (1, 2):
        raise InvalidInputError(
            f"table {name!r}: shape {tuple(parameter.shape)}; a table is (rows, columns) or (rows,)"
        )
