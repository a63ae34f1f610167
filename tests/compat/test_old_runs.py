"""Runs written by earlier versions of the library, committed as folders, read as they were (VER-1, STO-4).

`0.9-worked-example` was written by `spec/worked_example.py` of release 0.9.0. These files are never written again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import checkrun_format as crf
from tests.conformance.agreement import assert_agreement

RUNS = Path(__file__).parent / "runs"
NAN = np.float32(np.nan)
WEIGHTS = {
    1: [[0, 5, 15], [-7.5, -2.5, 0], [1, 1, 1], [NAN, 0, 0]],
    2: [[0, 5, 15], [0, 16, 30], [1, 1, 1], [2, 3, 17], [-15, 0, 0]],
    3: [[0, 5, 15], [0, 16, 30], [1, 1, 1], [0, 0, 60], [-15, 0, 0]],
}
SUMS = {1: [1, 2, 3, 4], 2: [1, 20, 3, 40, 5], 3: [1, 20, 3, 400, 5]}


def test_the_runs_are_there() -> None:
    assert sorted(folder.name for folder in RUNS.iterdir()) == ["0.9-worked-example"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_values(number: int) -> None:
    state = crf.open_run(RUNS / "0.9-worked-example")[number].load()
    np.testing.assert_array_equal(state.tables["user"]["weight"], np.array(WEIGHTS[number], np.float32))
    np.testing.assert_array_equal(state.tables["user"]["sum"], np.array(SUMS[number], np.float32))


def test_nothing_is_wrong_with_them_and_both_readers_agree() -> None:
    assert crf.open_run(RUNS / "0.9-worked-example").verify() == []
    assert assert_agreement(RUNS / "0.9-worked-example") == 3
