"""How two checkpoints differ: by value, whatever their layers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.chain import History
from checkrun_format.comparison import TableDifference, ValueDifference, compare_tables, difference
from checkrun_format.stores import LocalStore


def compare(folder: Path, one: int, other: int, table: str = "t", max_bytes: int = 64) -> TableDifference:
    history = History(LocalStore(folder))
    return compare_tables(history, history.get(one), history.get(other), table, max_bytes)


def counts(found: TableDifference) -> tuple[Any, ...]:
    return found.rows, found.removed, found.added, found.differ


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """1 base; 2 to 4 increments, in which the table grows; 5 the state of 2; 6 the state of 4, compacted."""
    run = crf.open_run(tmp_path / "run", "a", durable=False, policy="consecutive")
    weight, sums = np.arange(40, dtype=np.float32).reshape(20, 2), np.zeros(20, np.int16)
    keys, values = np.array([2, 3, 5, 7]), np.ones(4, np.float64)

    def save(*rows: int, changed: Any = (), deleted: Any = ()) -> None:
        tables = {
            "t": crf.Table({"weight": weight, "sum": sums}, changed=list(rows)),
            "k": crf.Table({"v": values}, keys=keys, changed=list(changed), deleted=list(deleted)),
        }
        run.save(crf.State(tables=tables))

    save()
    weight[3, 1] += 0.5
    sums[[3, 4]] = 7, -9
    save(3, 4, 5)
    weight[4], values[1], values[2] = np.nan, np.inf, -1
    save(4, changed=[3, 5])
    weight, sums = np.vstack([weight, np.ones((3, 2), np.float32)]), np.append(sums, [1, 2, 3]).astype(np.int16)
    keys, values = np.array([3, 5, 7, 11]), np.append(values[1:], 4)
    save(changed=[11], deleted=[2])
    run.rollback(2)
    run.rollback(4)
    run.compact()
    return tmp_path / "run"


def test_dense(folder: Path) -> None:
    found = compare(folder, 1, 2)
    assert counts(found) == ((20, 20), 0, 0, 2)
    assert found.fields == {
        "weight": ValueDifference(differ=1, max_difference=0.5),
        "sum": ValueDifference(differ=2, max_difference=9),
    }
    found = compare(folder, 4, 1)
    assert counts(found) == ((23, 20), 3, 0, 2)
    assert found.fields["weight"] == ValueDifference(differ=2, max_difference=math.inf)
    assert not found.equal


def test_keyed(folder: Path) -> None:
    found = compare(folder, 1, 4, "k")
    assert counts(found) == ((4, 4), 1, 1, 2)
    assert found.fields == {"v": ValueDifference(differ=2, max_difference=math.inf)}
    assert counts(compare(folder, 3, 4, "k")) == ((4, 4), 1, 1, 0)


@pytest.mark.parametrize("table", ["t", "k"])
def test_equal_states_over_other_layers(folder: Path, table: str) -> None:
    for one, other in ((2, 5), (4, 6), (4, 7), (6, 7), (3, 3)):
        for pair in ((one, other), (other, one)):
            found = compare(folder, *pair, table)
            assert found.equal and found.differ == 0
            assert {value.max_difference for value in found.fields.values()} == {0}


@pytest.mark.parametrize("max_bytes", [1, 100, 1 << 20])
def test_every_pair_against_numpy(folder: Path, max_bytes: int) -> None:
    run = crf.open_run(folder)
    states = {number: run[number].load() for number in range(1, 8)}
    for one, other in itertools.product(states, states):
        first, second = (states[number].tables["t"] for number in (one, other))
        shared = min(len(first["sum"]), len(second["sum"]))
        bits = [np.hstack([t["weight"][:shared].view(np.int32), t["sum"][:shared, None]]) for t in (first, second)]
        found = compare(folder, one, other, "t", max_bytes)
        assert found.differ == (bits[0] != bits[1]).any(axis=1).sum()
        assert found.fields["sum"].max_difference == np.abs(bits[0][:, 2] - bits[1][:, 2]).max()
        assert (found.removed, found.added) == (len(first["sum"]) - shared, len(second["sum"]) - shared)


def test_what_both_have_from_the_same_layers_is_not_read(folder: Path) -> None:
    """Even if it is damaged: it is the same damage."""
    for path in (folder / "00000001").glob("*/block-*/weight.values/c/**/0"):
        if path.is_file():
            path.write_bytes(b"damaged")
    assert counts(compare(folder, 2, 3)) == ((20, 20), 0, 0, 1)
    with pytest.raises(crf.DamagedError):
        compare(folder, 1, 2)
    next(folder.glob("00000001")).rename(folder.parent / "moved")


def test_tables_and_fields_that_only_one_has(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path, "a", durable=False)
    ones = np.ones(3, np.float32)

    def save(**tables: crf.Table) -> None:
        run.save(crf.State(tables=tables), dropped=[n for n in ("gone",) if run.latest(None) and n not in tables])

    save(gone=crf.Table({"x": ones}), t=crf.Table({"a": ones, "b": ones}), k=crf.Table({"x": ones}))
    other = crf.Table({"b": ones + 1, "a": ones.astype(np.int8)}, changed=crf.ALL)
    save(t=other, k=crf.Table({"x": ones}, keys=[1, 2, 3], changed=crf.ALL))
    assert counts(compare(tmp_path, 1, 2, "gone")) == ((3, None), 3, 0, 0)
    assert counts(compare(tmp_path, 2, 1, "gone")) == ((None, 3), 0, 3, 0)
    found = compare(tmp_path, 1, 2)
    assert (found.other_fields, list(found.fields), found.differ, found.equal) == (("a",), ["b"], 3, False)
    found = compare(tmp_path, 1, 2, "k")
    assert counts(found) == ((3, 3), 3, 3, 0) and found.other_fields == ("x",)


@pytest.mark.parametrize(
    ("dtype", "one", "other", "differ", "largest"),
    [
        ("int8", [-128, 5], [127, 5], 1, 255),
        ("uint64", [0, 1], [2**64 - 1, 1], 1, 2**64 - 1),
        ("int64", [-(2**63), 0], [2**63 - 1, 3], 2, 2**64 - 1),
        ("bool", [True, False], [True, True], 1, 1),
        ("float32", [0.0, np.inf], [-0.0, np.inf], 1, 0.0),
        ("float32", [np.nan, 1.0], [np.nan, 3.0], 1, 2.0),
        ("float64", [1.7e308, 0.0], [-1.7e308, 0.0], 1, math.inf),
        ("float16", [np.inf, 1], [1, 1], 1, math.inf),
        ("complex64", [3 + 4j, 0], [0, 0], 1, 5.0),
        ("bfloat16", [1.0, 2.0], [1.5, 2.0], 1, 0.5),
        ("int32", [], [], 0, 0),
    ],
)
def test_dtypes(dtype: str, one: list[Any], other: list[Any], differ: int, largest: float) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    found = difference(np.array(one, kind), np.array(other, kind))
    assert (found.differ, found.max_difference) == (differ, largest)
