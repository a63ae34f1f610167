"""Whole numbers that a caller gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from checkrun_format.errors import InvalidInputError
from checkrun_format.integers import whole
from checkrun_format.policy import BaseRule


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), np.array(7)], ids=repr)
def test_whole_numbers_of_any_kind(value: Any) -> None:
    found = whole(value, "never", 7, 7)
    assert (found, type(found)) == (7, int)


def test_bounds() -> None:
    assert whole(-(2**70), "never") == -(2**70)
    assert whole(np.uint64(2**63), "never", least=0) == 2**63
    for value, least, most in ((0, 1, None), (9, None, 8), (-1, 0, 8)):
        with pytest.raises(InvalidInputError, match=r"^so many\?$"):
            whole(value, "so many?", least, most)


NO_NUMBERS = [True, np.True_, 5.0, np.float32(5), "5", None, [5], np.array([5]), np.timedelta64(5, "h")]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_none(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^a number, please$"):
        whole(value, "a number, please")


def test_a_span_of_time_is_no_number_of_checkpoints() -> None:
    every: Any = np.timedelta64(24, "h")
    with pytest.raises(InvalidInputError, match="a number of checkpoints from 1 on"):
        BaseRule(policy="full", every=every)
