"""TorchRec's DistributedModelParallel on the CPU: two processes save and are killed, one and three restore."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.torch.torchrec import _of_shard
from tests.conformance.agreement import assert_agreement
from tests.integration.ranks import Told, collect, run_group, start
from tests.integration.torchrec_scenarios import KEYS

FILE = "torchrec_scenarios.py"

needs_torchrec = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None,
    reason="torchrec is not installed; its own requirements want the GPU build of FBGEMM: "
    "pip install --no-deps -c constraints.txt torchrec",
)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchrec")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Any]:
    """What two processes saved, before rank 1 was killed."""
    return dict(collect(start(FILE, folder, 2, "killed"), folder, killed=(1,))["killed"][0])


def in_world(folder: Path, world: int, names: str) -> Told:
    place = folder / f"world-{world}"
    place.mkdir()
    shutil.copytree(folder / "run", place / "run")
    for path in folder.glob("expected-*.npz"):
        shutil.copy(path, place)
    return run_group(FILE, place, world, names)


@needs_torchrec
def test_two_processes_save_and_one_is_killed(saved: dict[str, Any], folder: Path) -> None:
    """Increments hold the rows that the tracker saw, and those of the forward before."""
    assert saved["seen"].startswith("rank 1 did not answer within 5 s")
    assert saved["stored"] == [[30, 30, 30], [8, 8, 8], [8, 8, 8]]
    assert saved["kinds"] == {"weight": 16, "momentum1": 2}
    run = crf.open_run(folder / "run")
    assert [c.sequence for c in run.log()] == [1, 2, 3]
    assert sorted(run.latest().tables) == sorted(KEYS)
    assert_agreement(folder / "run")


@needs_torchrec
@pytest.mark.parametrize(("world", "shards"), [(3, [6, 6, 4]), (1, [6])])
def test_other_worlds_restore_the_same_bits(saved: dict[str, Any], folder: Path, world: int, shards: list[int]) -> None:
    """Sums of the table that is cut by columns follow the rule; a new cut is stored full, other tables go on."""
    told = in_world(folder, world, "restored,dcp" if world == 3 else "restored,elementwise")
    for rank, held in zip(told["restored"], shards, strict=True):
        assert rank["wrong"] == []
        assert rank["held"] == held
        assert (rank["number"], rank["extra"], rank["over"]) == (3, {"step": 2}, saved["over"])
        assert (rank["storage"], rank["restores"]) == (["changed", "changed", "full"], 1)
        assert (rank["same_again"], rank["adam"]) == (True, 4.0)
    assert_agreement(folder / f"world-{world}" / "run")
    for rank in told.get("dcp", []):
        assert rank["same"]
        assert rank["fields"] == [["weight", "momentum1"], ["weight", "momentum1"], ["weight"]]
        assert rank["storage"] == ["changed", "changed", "changed"]
    for rank in told.get("elementwise", []):
        assert rank == {"fields": ["weight", "momentum1"], "same": True}


def test_the_rule_for_sums_of_column_shards() -> None:
    stored = np.array([[1, 2, 6]], np.float32)
    cut = [0, 4, 8, 16]
    assert _of_shard(stored, cut, (4, 8)).tolist() == [2]  # the same shard
    assert _of_shard(stored, cut, (8, 12)).tolist() == [6]  # half of one
    assert _of_shard(stored, cut, (0, 8)).tolist() == [1.5]  # two
    assert _of_shard(stored, cut, (0, 16)).tolist() == [(4 * 1 + 4 * 2 + 8 * 6) / 16]
    assert _of_shard(stored, cut, (6, 10)).tolist() == [4]  # half of one, a quarter of another
    assert _of_shard(stored[:, 0], [0, 16], (8, 16)).tolist() == [1]  # it was not cut
    assert _of_shard(stored, cut, (0, 8)).dtype == np.float32
