"""What holds for every test: hypothesis profiles; every run that a test leaves behind is read by the second reader."""

from __future__ import annotations

import functools
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import checkrun_format as crf
from checkrun_format.stores import S3Store
from checkrun_format.testing import servers

settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True, print_blob=True, database=None)
settings.register_profile("nightly", deadline=None, max_examples=5000, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
settings.load_profile(PROFILE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hours are meant: no test of the nightly profile is stopped for the time that it takes."""
    if PROFILE == "nightly":
        for item in items:
            item.add_marker(pytest.mark.timeout(0), append=False)


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


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where on an S3 server a test may build a run."""

    url: str
    server: servers.Server
    endpoint_url: str

    @property
    def options(self) -> dict[str, Any]:
        """What `open_run` takes as `storage_options`."""
        return servers.storage_options(self.endpoint_url)

    @property
    def environment(self) -> dict[str, str]:
        """What a command takes from its environment."""
        return servers.environment(self.endpoint_url)

    def store(self, **options: Any) -> S3Store:
        return S3Store(self.url, **{"storage_options": self.options, **options})

    def open(self, mode: str = "a", **options: Any) -> crf.Run:
        return crf.open_run(self.url, mode, storage_options=self.options, **options)


def _running(server: type[servers.Server]) -> Iterator[servers.Server]:
    try:
        servers.found_program(server.program)
    except FileNotFoundError as error:
        pytest.skip(f"{error}: it is a package of the extra 'test'")
    with tempfile.TemporaryDirectory() as folder:
        running = _started(server, Path(folder))
        try:
            yield running
        finally:
            running.kill()


def _started(server: type[servers.Server], folder: Path) -> servers.Server:
    """A server that answers; its ports may have been taken between finding and using them."""
    for attempt in range(3):
        running = server(folder / str(attempt))
        try:
            running.start()
        except OSError:
            running.kill()
        else:
            return running
    raise RuntimeError((folder / "2" / "log").read_text()[-2000:])


@pytest.fixture(scope="session")
def seaweed() -> Iterator[servers.Server]:
    """A real S3 server, which honours conditions."""
    yield from _running(servers.SeaweedFS)


@pytest.fixture(scope="session")
def rclone() -> Iterator[servers.Server]:
    """A real S3 server, which ignores conditions."""
    yield from _running(servers.Rclone)


@pytest.fixture(scope="session")
def seaweed_bucket(seaweed: servers.Server) -> str:
    return seaweed.bucket()


@pytest.fixture
def s3(seaweed: servers.Server, seaweed_bucket: str) -> Place:
    """A new prefix, of a name that is not simple."""
    url = f"s3://{seaweed_bucket}/a team/r\u00fcn {secrets.token_hex(4)}"
    return Place(url=url, server=seaweed, endpoint_url=seaweed.endpoint_url)
