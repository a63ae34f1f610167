"""What holds for every test: hypothesis profiles, and tests of a GPU are skipped where there is none."""

from __future__ import annotations

import functools
import os

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True, print_blob=True, database=None)
settings.register_profile("nightly", deadline=None, max_examples=5000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("needs a CUDA device")
