"""A trainer as a `State`, and back."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

import checkrun_format as crf
from checkrun_format.cli._demo.skipgram import Embedding
from checkrun_format.cli._demo.trainer import Trainer


def take(trainer: Trainer) -> tuple[crf.State, int]:
    """What a save is given, and how many rows it says have changed since the last one."""
    changed = {name: table.take_changed() for name, table in _tables(trainer).items()}
    tables = {
        name: crf.Table({"weight": table.weight, "sum": table.sum}, changed=changed[name])
        for name, table in _tables(trainer).items()
    }
    state = crf.State(tables=tables, tensors=_tensors(trainer), extra=trainer.position())
    return state, sum(int(mask.sum()) for mask in changed.values())


def put_back(trainer: Trainer, state: crf.State) -> None:
    """Make the trainer what it was when `state` was saved; no row counts as changed."""
    for name, table in _tables(trainer).items():
        table.weight[:] = state.tables[name].fields["weight"]
        table.sum[:] = state.tables[name].fields["sum"]
        table.take_changed()
    for name, tensor in _tensors(trainer).items():
        tensor[:] = state.tensors[name]
    trainer.go_to(state.extra)


def arrays(trainer: Trainer) -> dict[str, npt.NDArray[Any]]:
    """Every array of the trainer: `<table>.<field>`, and the dense tensors by name."""
    fields = {
        f"{name}.{field}": array
        for name, table in _tables(trainer).items()
        for field, array in (("weight", table.weight), ("sum", table.sum))
    }
    return {**fields, **_tensors(trainer)}


def _tables(trainer: Trainer) -> dict[str, Embedding]:
    return {"in": trainer.inputs, "out": trainer.outputs}


def _tensors(trainer: Trainer) -> dict[str, npt.NDArray[Any]]:
    return {"projection": trainer.projection, "projection.sum": trainer.projection_sum}
