"""The independent reader and the library resolve a run to the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pytest

import checkrun_format as crf
from tests.conformance import independent_reader

T = TypeVar("T")
U = TypeVar("U")
Fields: TypeAlias = dict[str, np.ndarray[Any, Any]]


def some(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of them, spread evenly, the last among them."""
    step = max(1, -(-len(items) // count))
    return list(items[::-1][::step])


def runs_below(folder: Path) -> list[Path]:
    """Every run that a test left behind."""
    return [path.parent for path in folder.glob("**/zarr.json") if path.read_bytes().find(b'"kind":"run"') >= 0]


def both(mine: Callable[[], T], theirs: Callable[[], U]) -> tuple[T, U] | None:
    """What both readers give; None if both refuse."""
    try:
        value = mine()
    except crf.CheckrunError:
        with pytest.raises(independent_reader.FormatError):
            theirs()
        return None
    return value, theirs()


def assert_agreement(run: Path, *, checkpoints: int = 5, tables: int = 40) -> int:
    """Compare tables, tensors, blobs and extra; return how many tables were compared.

    What the library refuses (pruned, damaged, of another version), the second reader must refuse too.
    """
    compared = 0
    ours = crf.open_run(run)
    states = independent_reader.sequences(run)
    for number in some([n for n, state in states.items() if state == "committed"], checkpoints):
        opened = both(partial(ours.__getitem__, number), partial(independent_reader.Checkpoint, run, number))
        if opened is not None:
            compared += assert_same_checkpoint(*opened, tables)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", crf.BurntNumberWarning)
        latest = both(lambda: ours.latest(default=None), lambda: newest(run))
    if latest is not None:
        assert (None if latest[0] is None else latest[0].sequence) == latest[1]
    return compared


def newest(run: Path) -> int | None:
    """The latest checkpoint by the second reader, once it could be opened."""
    number = independent_reader.latest(run)
    return None if number is None else independent_reader.Checkpoint(run, number).n


def assert_same_checkpoint(mine: crf.Checkpoint, theirs: independent_reader.Checkpoint, tables: int) -> int:
    compared = 0
    assert mine.tables == theirs.tables()
    for name in some(mine.tables, tables):
        read = both(partial(read_table, mine, name), partial(theirs.table, name))
        if read is not None:
            assert_same_table(*read)
            compared += 1
    for name in some(mine.tensors, tables):
        assert_same_array(mine.tensor(name), theirs.tensor(name))
    assert {name: mine.blob(name) for name in mine.blobs} == {name: theirs.blob(name) for name in mine.blobs}
    assert mine.extra == theirs.extra()
    return compared


def read_table(checkpoint: crf.Checkpoint, name: str) -> Fields:
    """All fields of a table, and its keys as the second reader gives them."""
    view = checkpoint.table(name)
    keys = {"": view.keys()} if view.addressing == "keyed" else {}
    return view.read() | keys


def assert_same_table(mine: Fields, theirs: Fields) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert_same_array(value, theirs[name])


def assert_same_array(mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert mine.tobytes() == theirs.tobytes()
