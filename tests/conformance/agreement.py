"""The independent reader and the library resolve a run to the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import checkrun_format as crf
from tests.conformance import independent_reader

T = TypeVar("T")


def some(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of them, spread evenly, the last among them."""
    step = max(1, -(-len(items) // count))
    return list(items[::-1][::step])


def runs_below(folder: Path) -> list[Path]:
    """Every run that a test left behind."""
    return [path.parent for path in folder.glob("**/zarr.json") if path.read_bytes().find(b'"kind":"run"') >= 0]


def assert_agreement(run: Path, *, checkpoints: int = 5, tables: int = 40) -> int:
    """Compare tables, tensors, blobs and extra; return how many tables were compared."""
    compared = 0
    ours = crf.open_run(run)
    states = independent_reader.sequences(run)
    for number in some([n for n, state in states.items() if state == "committed"], checkpoints):
        theirs = independent_reader.Checkpoint(run, number)
        mine = ours[number]
        assert mine.tables == theirs.tables()
        for name in some(mine.tables, tables):
            assert_same_table(mine.table(name), theirs.table(name))
            compared += 1
        for name in some(mine.tensors, tables):
            assert_same_array(mine.tensor(name), theirs.tensor(name))
        assert {name: mine.blob(name) for name in mine.blobs} == {name: theirs.blob(name) for name in mine.blobs}
        assert mine.extra == theirs.extra()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", crf.BurntNumberWarning)
        latest = ours.latest(default=None)
    assert (None if latest is None else latest.sequence) == independent_reader.latest(run)
    return compared


def assert_same_table(mine: crf.TableView, theirs: dict[str, np.ndarray[Any, Any]]) -> None:
    values = mine.read()
    if mine.addressing == "keyed":
        values[""] = mine.keys()
    assert values.keys() == theirs.keys()
    for name, value in values.items():
        assert_same_array(value, theirs[name])


def assert_same_array(mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert mine.tobytes() == theirs.tobytes()
