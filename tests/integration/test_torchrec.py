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
from tests.integration.torchrec_scenarios import KEYS, MIXED

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
    """Increments hold the rows that were looked up since the last save, each six of which some on both ranks."""
    assert saved["seen"] == (
        "RankError: rank 1 did not answer within 5 s: it died, hangs, or takes longer; nothing was committed"
    )
    assert saved["stored"] == [[30, 30, 30], [4, 4, 4], [4, 4, 4]]
    assert sorted(saved["tables"]) == sorted(KEYS)
    assert saved["kinds"] == {"weight": 16, "momentum1": 2}
    assert saved["moved"]
    run = crf.open_run(folder / "run")
    assert [c.sequence for c in run.log()] == [1, 2, 3]
    assert sorted(run.latest().tables) == sorted(KEYS)
    assert_agreement(folder / "run")


@needs_torchrec
@pytest.mark.parametrize(
    ("world", "shards", "others"), [(3, [6, 6, 4], "restored,dcp"), (1, [6], "restored,elementwise,mixed")]
)
def test_other_worlds_restore_the_same_bits(
    saved: dict[str, Any], folder: Path, world: int, shards: list[int], others: str
) -> None:
    """Sums of the table that is cut by columns follow the rule; a new cut is stored full, other tables go on."""
    told = in_world(folder, world, others)
    for rank, held in zip(told["restored"], shards, strict=True):
        assert rank["wrong"] == []
        assert rank["held"] == held
        assert (rank["number"], rank["over"]) == (3, saved["over"])
        assert rank["extra"] == {"step": 2, "rank": 0}  # another number of ranks saved: rank 0's
        assert rank["extras"] == [{"step": 2, "rank": 0}, {"step": 2, "rank": 1}]
        assert (rank["storage"], rank["restores"]) == (["changed", "changed", "full"], 1)
        assert (set(rank["steps"]), rank["rates"], rank["adam"]) == ({3}, [pytest.approx(0.1), 0.2], 3.0)
        assert rank["clean"] == [0, 0, 0]  # nothing was trained since
        assert rank["marked"] == [2, 2, 0]
        assert "row 30 is not in a table of 30 rows" in rank["refused"]
        assert rank["missed"] == [[], f"all rows that changed were noted, in {held // 2} tables\n"]
        assert "optimizer is a SGD, in the checkpoint a Adam" in rank["misfit"]
        assert rank["same_again"]
    assert_agreement(folder / f"world-{world}" / "run")
    for rank in told.get("dcp", []):
        assert rank["same"]
        assert rank["fields"] == [["weight", "momentum1"], ["weight", "momentum1"], ["weight"]]
        assert rank["storage"] == ["changed", "changed", "changed"]
    for rank in told.get("elementwise", []):
        assert rank["fields"] == ["weight", "momentum1"]
        assert (rank["same"], rank["storage"]) == (True, ["changed", "changed", "changed"])
        assert "an optimizer holds 'ebc.embedding_bags.columns.weight', which is sharded" in rank["refused"]
    for rank in told.get("mixed", []):
        assert rank["tables"] == sorted(MIXED)
        assert (rank["missed"], rank["right"]) == ([], True)
        assert rank["shared"] == [f"stored full, table {name!r}" for name in sorted(MIXED[:2])]
        assert rank["all"] == [True, True]
        assert "the state of a WarmupOptimizer is not saved" in rank["refused"][0]
        assert "is sharded, but no fused kernel of FBGEMM trains it: take the compute kernel" in rank["refused"][1]
        assert rank["rows"] == [
            [[1, 2, 3, 4], [1, 2], [1, 2]],
            [[10, 11, 12, 13], [10, 12], [10, 12]],  # two forwards
            [[10, 11, 12, 13], [10, 12], [10, 12]],  # both were waiting; now one is
            [[12, 13], [12], [10, 12]],  # a step of the plain table's optimizer has gone over both
            [[20, 21], [20], [20]],
            [[20, 21], [20], [20]],  # it was waiting; now it is gone
            [[], [], [20]],  # but the plain table's optimizer might still step
        ]


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
