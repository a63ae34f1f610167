"""Values of every dtype as cells for people and as JSON."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from checkrun_format import dtypes
from checkrun_format.cli.page import Page
from checkrun_format.cli.values import Grid, objects, plain


@pytest.mark.parametrize("name", [name for name in dtypes.STORED if not name.startswith("datetime64_")])
def test_every_dtype_becomes_json_with_its_exact_values(name: str) -> None:
    values = np.array([[1, 2], [1, 1]]).astype(dtypes.logical(name))
    made = json.loads(json.dumps(plain(values), allow_nan=False))
    if values.dtype.kind == "c":
        assert made == [[[1, 0], [2, 0]], [[1, 0], [1, 0]]]
    else:
        assert made == values.astype(np.float64).tolist()


def test_times_become_iso_8601_spans_become_numbers_and_none_becomes_null() -> None:
    assert plain(np.array(["2026-11-30T01:02", "NaT"], "M8[ms]")) == ["2026-11-30T01:02:00.000", None]
    assert plain(np.array([["2026"], ["1969"]], "M8[Y]")) == [["2026"], ["1969"]]
    assert plain(np.array([[3, "NaT"], [-(2**63) + 1, 0]], "m8[s]")) == [[3, None], [-(2**63) + 1, 0]]
    assert plain(np.zeros((0, 2), "M8[s]")) == []


@pytest.mark.parametrize("name", [name for name in dtypes.STORED if name.startswith("datetime64_")])
def test_any_bits_of_a_time_become_json(name: str) -> None:
    values = np.array([2**62, -(2**62), 2**63 - 1, -(2**63)]).view(dtypes.logical(name))
    made = plain(values)
    assert made[3] is None and all(isinstance(text, str) for text in made[:3]) and len(set(made)) == 4


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_numbers_in_json_are_exact(dtype: npt.DTypeLike) -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(dtype)
    back = np.array(json.loads(json.dumps(plain(values)))).astype(dtype)
    assert back.tobytes() == values.tobytes()


def test_integers_in_json_keep_64_bits() -> None:
    assert plain(np.array([2**64 - 1], np.uint64)) == [2**64 - 1]
    assert plain(np.array([-(2**63)], np.int64)) == [-(2**63)]
    assert plain(np.array([True, False])) == [True, False]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_nan_and_infinities_become_words(dtype: npt.DTypeLike) -> None:
    values = np.array([[np.nan, 1], [np.inf, -np.inf]]).astype(dtype)
    assert plain(values) == [["NaN", 1.0], ["Infinity", "-Infinity"]]
    assert plain(np.array([complex(np.nan, -np.inf)])) == [["NaN", "-Infinity"]]


def test_a_row_is_an_object() -> None:
    arrays = {"weight": np.array([[1, 2], [3, 4]], np.float32), "row": np.array([5, 6])}
    assert list(objects("row", [7, 9], arrays)) == [
        {"row": 7, "fields": {"weight": [1.0, 2.0], "row": 5}},
        {"row": 9, "fields": {"weight": [3.0, 4.0], "row": 6}},
    ]


def test_a_grid_prints_every_digit_and_the_first_rows_settle_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    grid = Grid(Page(), "row", {"weight": 6})
    grid.add([5], {"weight": np.array([[0.1, -1.1754944e-38]], np.float32), "sum": np.array([np.nan])})
    grid.add(range(16, 17), {"weight": np.array([[1 / 3, 2]], np.float32), "sum": np.array([1e300])})
    assert capsys.readouterr().out.splitlines() == [
        "row  weight[6]       weight[7]  sum",
        "  5        0.1  -1.1754944e-38  nan",
        " 16  0.33333334             2.0  1e+300",
    ]


def test_a_grid_without_rows_or_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Grid(Page(), "key").add([], {"weight": np.zeros((0, 2), np.float32)})
    Grid(Page(), "row").add([3], {"weight": np.zeros((1, 0), np.float32), "sum": np.zeros(1, np.int8)})
    assert capsys.readouterr().out.splitlines() == ["key  weight[0]  weight[1]", "row  sum", "  3    0"]
