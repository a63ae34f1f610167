"""Options and small state as JSON and back in the same types."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from checkrun_format.errors import InvalidInputError
from checkrun_format.torch.values import from_json, to_json


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.5,
        "a",
        2**70,
        [1, [2]],
        (0.9, 0.999),
        ((1,), []),
        {"a": (1, 2)},
        {3: {"float": 1}},
        {},
        math.inf,
    ],
    ids=repr,
)
def test_values_come_back(value: Any) -> None:
    told = json.loads(json.dumps(to_json(value, "it"), allow_nan=False))
    found = from_json(told)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_tensors_come_back(dtype: torch.dtype) -> None:
    for given in (
        torch.tensor(0.1).to(dtype),
        torch.tensor([[1.0, 0.0], [3.5, 1.0]]).to(dtype),
        torch.zeros(0, 2).to(dtype),
    ):
        found = from_json(json.loads(json.dumps(to_json(given, "it"))))
        assert found.dtype == dtype
        assert torch.equal(found, given)


def test_nan_and_numbers_of_numpy() -> None:
    assert math.isnan(from_json(to_json(math.nan, "it")))
    assert math.isnan(float(from_json(to_json(torch.tensor(math.nan), "it"))))
    assert (to_json(np.float64(0.1), "it"), to_json(np.int64(3), "it")) == (0.1, 3)


@pytest.mark.parametrize(
    "value", [object(), {"a": [print]}, torch.zeros(70_000), b"bytes"], ids=lambda v: type(v).__name__
)
def test_what_json_cannot_carry_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"group 3: a \w+ cannot be saved as JSON"):
        to_json(value, "group 3")
