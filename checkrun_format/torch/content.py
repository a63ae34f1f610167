"""What a trainer holds: a model's tables and dense tensors, its optimizers' state, and other objects with a state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import InvalidInputError
from checkrun_format.state import State, Table
from checkrun_format.torch.lookups import FoundTable
from checkrun_format.torch.optimizers import OptimizerState, stored_tensors
from checkrun_format.torch.values import from_json, to_json

if TYPE_CHECKING:
    from checkrun_format.torch.torchrec import ShardedModel

Tensor = torch.Tensor

_EXTRA_STATE = "_extra_state"
"""How the names end of what modules add to a state dict by `get_extra_state`: in any shape."""

_OWN: Final = ("stateful", "sharded")
"""Which keys of a document each rank has its own value of."""


def merged(extras: Sequence[Any]) -> Any:
    """One `extra` of those of all ranks: rank 0's, and of the others what each has its own of."""
    others = [{"extra": told["extra"], **{key: told["torch"][key] for key in _OWN}} for told in extras[1:]]
    return {**extras[0], "others": others} if others else extras[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a checkpoint's `extra` tells a rank.

    Attributes
    ----------
    document : mapping
        As `Content.document`.
    extra
        The trainer's own, of this rank if as many ranks saved, else of rank 0.
    extras : tuple
        Of all ranks that saved.
    sharded : tuple of mapping
        What `ShardedModel.document` was on each.
    """

    document: Mapping[str, Any]
    extra: Any
    extras: tuple[Any, ...]
    sharded: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, extra: Any, rank: int, ranks: int) -> Told:
        """Of a checkpoint; of one of somebody else, that all of it is the trainer's."""
        if not (isinstance(extra, dict) and isinstance(extra.get("torch"), dict) and "optimizers" in extra["torch"]):
            return cls(document={}, extra=extra, extras=(extra,), sharded=({},))
        document = extra["torch"]
        all_ = [{"extra": extra.get("extra"), **document}, *extra.get("others", ())]
        own = all_[rank if len(all_) == ranks else 0]
        return cls(
            document={**document, "stateful": own.get("stateful", {})},
            extra=own["extra"],
            extras=tuple(one["extra"] for one in all_),
            sharded=tuple(one.get("sharded") or {} for one in all_),
        )


class Stateful(Protocol):
    """A scheduler, a gradient scaler, a metric."""

    def state_dict(self) -> Any:
        """Its state: what `values.to_json` carries."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a checkpoint fits a trainer.

    Attributes
    ----------
    problems : tuple of text
        What of either is not in the other.
    tables : mapping of text to int
        The tables that can be read, and how many of their rows are stored.
    sharded : tuple of text
        The tables cut over the ranks that can be read.
    tensors : tuple of text
        The dense tensors of the model that can be read.
    partial : tuple of text
        Tables that will not equal the checkpoint as a whole.
    """

    problems: tuple[str, ...]
    tables: Mapping[str, int]
    sharded: tuple[str, ...]
    tensors: tuple[str, ...]
    partial: tuple[str, ...]

    def refuse_problems(self, sequence: int) -> None:
        """Refuse the checkpoint of this number if there are any."""
        if self.problems:
            raise InvalidInputError(
                f"checkpoint {sequence} does not fit: {'; '.join(self.problems[:10])}"
                + (f"; and {len(self.problems) - 10} more" if len(self.problems) > 10 else "")
                + " (strict=False reads what fits)"
            )


class Content:
    """All that is saved and restored.

    Parameters
    ----------
    model : nn.Module
    optimizers : mapping of name to Optimizer
    found : sequence of FoundTable
        The tables of the model.
    stateful : mapping of name to Stateful
    sharded : ShardedModel, optional
        The tables that are cut over the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        found: list[FoundTable],
        stateful: Mapping[str, Stateful],
        sharded: ShardedModel | None = None,
    ) -> None:
        if not isinstance(stateful, Mapping):
            raise InvalidInputError(f"stateful: a {type(stateful).__name__}; give a mapping of names to objects")
        for name, other in stateful.items():
            if not hasattr(other, "state_dict") or not hasattr(other, "load_state_dict"):
                raise InvalidInputError(f"stateful: {name!r} is a {type(other).__name__}, which has no state_dict()")
        self._model = model
        self._parameters = {table.name: table.parameter for table in found}
        self._stateful = dict(stateful)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._all = {name: parameter for parameter, name in names.items()}
        self.optimizers = OptimizerState(optimizers, names, self._parameters)
        self._sharded = sharded
        trained = {names[p] for o in optimizers.values() for group in o.param_groups for p in group["params"]}
        for name in sorted(trained & self._sharded_tables.keys()):
            raise InvalidInputError(
                f"an optimizer holds {name!r}, which is sharded and trained by its fused optimizer: leave it out, as "
                "by in_backward_optimizer_filter of torchrec"
            )
        self._entries()

    def check(self) -> None:
        """Refuse a model of which a parameter was replaced: its hooks and its optimizer hold the former one."""
        now = dict(self._model.named_parameters())
        if now.keys() != self._all.keys() or any(now[name] is not self._all[name] for name in now):
            changed = next((n for n in {**self._all, **now} if now.get(n) is not self._all.get(n)), "?")
            raise InvalidInputError(
                f"parameter {changed!r} was replaced since the Checkpointer was made (load_state_dict(assign=True)?): "
                "make a new optimizer and a new Checkpointer"
            )
        self.optimizers.check()
        if self._sharded is not None:
            self._sharded.look()

    @property
    def _sharded_tables(self) -> Mapping[str, Any]:
        return {} if self._sharded is None else self._sharded.tables

    def fields(self, name: str) -> dict[str, Tensor]:
        """The fields of a table, or of a local shard of one: `weight`, and its row-aligned optimizer state."""
        if self._sharded is not None and name in self._sharded.local:
            return dict(self._sharded.local[name].fields)
        parameter = self._parameters[name]
        return {"weight": parameter.detach(), **self.optimizers.fields(parameter)}

    def tensors(self) -> dict[str, Tensor]:
        """All dense tensors: the rest of the state dict, and of the optimizers' state."""
        model = {name: value for name, value in self._entries().items() if isinstance(value, Tensor)}
        for name, value in model.items():
            if nn.parameter.is_lazy(value) or value.is_meta:
                raise InvalidInputError(f"tensor {name!r} has no values yet: initialize the model first")
            if value.layout != torch.strided:
                raise InvalidInputError(f"tensor {name!r} is a {value.layout} tensor; give a strided one (to_dense())")
        model = {name: value.detach() for name, value in model.items()}
        optimizers = self.optimizers.tensors()
        both = model.keys() & optimizers.keys()
        if both:
            raise InvalidInputError(f"{min(both)!r} is the name of a tensor of the model and of an optimizer's state")
        return model | optimizers

    def document(self) -> dict[str, Any]:
        """The rest, as JSON."""
        return {
            "optimizers": self.optimizers.document(),
            "stateful": {name: to_json(o.state_dict(), f"the state of {name!r}") for name, o in self._stateful.items()},
            "model": {n: to_json(v, f"{n!r}") for n, v in self._entries().items() if not isinstance(v, Tensor)},
            "sharded": None if self._sharded is None else self._sharded.document(),
        }

    def _entries(self) -> dict[str, Any]:
        """The state dict without the tables."""
        tables = set(self._parameters.values())
        entries = self._model.state_dict(keep_vars=True)
        entries = {name: value for name, value in entries.items() if name not in self._sharded_tables}
        for name, value in entries.items():
            if hasattr(value, "local_shards") or hasattr(value, "device_mesh"):
                raise InvalidInputError(
                    f"{name!r} is a {type(value).__name__}, cut over the ranks: save it by the plug-in for "
                    "torch.distributed.checkpoint, CheckrunWriter of checkrun_format.torch.distributed"
                )
        return {name: value for name, value in entries.items() if not (isinstance(value, Tensor) and value in tables)}

    def _made(self) -> set[str]:
        """Tensors that the model makes for its state dict (`get_extra_state`): it has to be given them."""
        held = {*self._model.parameters(), *self._model.buffers()}
        return {name for name, value in self._entries().items() if isinstance(value, Tensor) and value not in held}

    # Back again -------------------------------------------------------------------------------------------------------

    def fit(self, checkpoint: Checkpoint, told: Told) -> Fit:
        """Compare with a checkpoint; looks at names, shapes and dtypes only."""
        document = told.document
        problems = self.optimizers.differences(document.get("optimizers", {}))
        stateful = document.get("stateful", {})
        problems += [f"the state of {n!r} is not in the checkpoint" for n in self._stateful if n not in stateful]
        problems += [f"the checkpoint's state of {n!r} was not asked for" for n in stateful if n not in self._stateful]
        tables, partial = {}, []
        for name, parameter in self._parameters.items():
            found, rows = _fit_table(name, parameter, checkpoint)
            problems += found
            if rows is not None:
                tables[name] = rows
            if found:
                partial.append(name)
        misfits = {} if self._sharded is None else self._sharded.fit(checkpoint, told.sharded[0])
        problems += [problem for found in misfits.values() for problem in found]
        known = self._parameters.keys() | misfits.keys()
        problems += [f"table {n!r} is not in the model" for n in checkpoint.tables if n not in known]
        model = {name: value for name, value in self._entries().items() if isinstance(value, Tensor)}
        missing, tensors = _fit_tensors(model, checkpoint, stored_tensors(document.get("optimizers", {})))
        return Fit(
            problems=(*problems, *missing),
            tables=tables,
            sharded=tuple(name for name, found in misfits.items() if not found),
            tensors=tensors,
            partial=(*partial, *(name for name, found in misfits.items() if found)),
        )

    def restore(self, fit: Fit, checkpoint: Checkpoint, told: Told) -> None:
        """Read what fits."""
        out = self._prepare(fit, checkpoint, told.document)
        state = checkpoint.load(tables=list(out.tables), out=out)
        if self._sharded is not None:
            self._sharded.restore(checkpoint, fit.sharded, told.sharded)
        self._finish(state, told.document)

    def _prepare(self, fit: Fit, checkpoint: Checkpoint, document: Mapping[str, Any]) -> State:
        """Make the optimizers' state as a fitting document tells; what is to be read into."""
        self.optimizers.prepare(document.get("optimizers", {}))
        tables = {}
        for name, rows in fit.tables.items():
            stored = {f.name: (f.dtype, f.columns) for f in checkpoint.table(name).fields}
            fields = {n: v for n, v in self.fields(name).items() if stored.get(n) == _kind(v)}
            tables[name] = Table({field: values[:rows] for field, values in fields.items()})
        shapes, made = checkpoint.tensor_shapes, self._made()
        model = {
            name: _like(value, *shapes[name]) if name in made else value.detach()
            for name, value in self._entries().items()
            if name in fit.tensors
        }
        state = {
            name: value for name, value in self.optimizers.tensors().items() if shapes.get(name) == _shape_of(value)
        }
        return State(tables=tables, tensors=model | state)

    def _finish(self, state: State, document: Mapping[str, Any]) -> None:
        """Put back what was not read into tensors."""
        self.optimizers.finish(document.get("optimizers", {}), state.tensors)
        for name, told in document.get("stateful", {}).items():
            if name in self._stateful:
                self._stateful[name].load_state_dict(from_json(told))
        extra = {name: from_json(told) for name, told in document.get("model", {}).items()}
        extra |= {name: state.tensors[name] for name in self._made() if name in state.tensors}
        if extra:
            self._model.load_state_dict(extra, strict=False)


def _kind(values: Tensor) -> tuple[str, int | None]:
    return _dtype(values), values.shape[1] if values.ndim == 2 else None


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _like(values: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """An empty tensor on the same device."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device=values.device)


def _shape_of(values: Tensor) -> tuple[str, tuple[int, ...]]:
    return _dtype(values), tuple(values.shape)


def _fit_table(name: str, parameter: nn.Parameter, checkpoint: Checkpoint) -> tuple[list[str], int | None]:
    """What does not fit, and how many rows can be read, None if none can."""
    if name not in checkpoint.tables:
        return [f"table {name!r} is not in the checkpoint"], None
    view = checkpoint.table(name)
    stored = {f.name: (f.dtype, f.columns) for f in view.fields}
    if view.addressing != "dense" or stored.get("weight") != _kind(parameter) or len(view) > len(parameter):
        told = f"{view.addressing} {stored.get('weight')} of {len(view)} rows"
        return [f"table {name!r}: the checkpoint's is {told}, the model's {tuple(parameter.shape)}"], None
    if len(view) < len(parameter):
        return [f"table {name!r}: {len(view)} rows in the checkpoint, {len(parameter)} in the model"], len(view)
    return [], len(view)


def _fit_tensors(
    model: Mapping[str, Tensor], checkpoint: Checkpoint, of_optimizers: Collection[str]
) -> tuple[list[str], tuple[str, ...]]:
    """What does not fit of the model's tensors, and which can be read."""
    shapes, problems, fitting = checkpoint.tensor_shapes, [], []
    for name, value in model.items():
        if name not in shapes:
            problems.append(f"tensor {name!r} is not in the checkpoint")
        elif shapes[name] != _shape_of(value) and not name.endswith(_EXTRA_STATE):
            problems.append(f"tensor {name!r}: {shapes[name]} in the checkpoint, {_shape_of(value)} in the model")
        else:
            fitting.append(name)
    problems += [f"tensor {n!r} is not in the model" for n in shapes if n not in model and n not in of_optimizers]
    return problems, tuple(fitting)
