"""What holds for every test: hypothesis profiles; every run that a test leaves behind is read by the second reader."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

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


ALTERS_RUNS = {"test_damage", "test_zarr_reads", "test_manifest", "test_cli", "test_independent_reader_selfcheck"}
"""Modules whose tests leave runs behind that they damaged on purpose."""


@pytest.fixture(autouse=True)
def independent_reader_agrees(request: pytest.FixtureRequest) -> Iterator[None]:
    """The reader that was written from FORMAT.md alone resolves every run that a test builds to the same bits."""
    builds = "tmp_path" in request.fixturenames and request.module.__name__.rpartition(".")[2] not in ALTERS_RUNS
    folder: Path | None = request.getfixturevalue("tmp_path") if builds else None
    yield
    if folder is not None:
        from tests.conformance.agreement import assert_agreement, runs_below

        for run in runs_below(folder):
            assert_agreement(run)
