"""torch.distributed.checkpoint over a run, in real processes: scenarios of torch's own tests of storages, and ours."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

import checkrun_format as crf
from tests.conformance.agreement import assert_agreement, runs_below
from tests.integration.dcp_scenarios import KINDS, SCENARIOS
from tests.integration.ranks import Told, run_group

WORLD = 4

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    return run_group("dcp_scenarios.py", folder, WORLD)


def the_same(values: list[Any]) -> Any:
    """What all ranks say."""
    assert [values[0]] * len(values) == values
    return values[0]


def test_every_scenario_ran(told: Told) -> None:
    assert list(told) == list(SCENARIOS)
    assert {len(values) for values in told.values()} == {WORLD}


@pytest.mark.parametrize("kind", KINDS)
def test_any_world_loads_what_any_world_saved(told: Told, kind: str) -> None:
    """Base and increment, bit for bit, cut as they were saved and cut in another way."""
    found = {key: right for rank in told["reshard"] for key, right in rank.items() if key.startswith(f"{kind} ")}
    other = KINDS[(KINDS.index(kind) + 1) % len(KINDS)]
    worlds = range(1, WORLD + 1)
    assert set(found) == {
        f"{kind} {saving} -> {now} {loading}, checkpoint {number}"
        for saving, loading in itertools.product(worlds, worlds)
        for now, number in ((kind, 1), (other, 2))
    }
    wrong = {key for rank in told["reshard"] for key, right in rank.items() if not right}
    assert wrong == set()


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_checkpoint_holds_the_changed_rows(told: Told, folder: Path, kind: str) -> None:
    assert told
    for world in range(1, WORLD + 1):
        run = crf.open_run(folder / "reshard" / f"{kind}-{world}")
        assert [run[2].parent, run[2].table("user.weight").storage] == [1, "changed"]
        assert run[2].table("user.weight").stored_rows == run[2].table("item.weight").stored_rows == 4
        assert [f.name for f in run[2].table("user.weight").fields] == ["weight", "exp_avg"]
        assert run[2].tensors == ["top"]
        assert "optim.param_groups.0.lr" in run[2].blobs


def test_dtensors_of_every_placement(told: Told) -> None:
    """Rows that only one of several replicas knows of are stored by whichever stores the table."""
    right = {name: value for rank in told["dtensors"] for name, value in rank["right"].items()}
    assert right == dict.fromkeys(("row", "column", "replica", "hybrid", "grid", "plain", "dense"), True)
    names = ("row", "column", "replica", "hybrid", "grid")
    assert the_same([rank["stored"] for rank in told["dtensors"]]) == [dict.fromkeys(names, n) for n in (11, 4, 0)]


def test_what_changes_after_async_save_is_not_stored(told: Told) -> None:
    assert the_same(told["asynchronous"]) == {"right": [True, True], "step": 1, "stored": 4}


def test_a_failure_anywhere_is_named_everywhere_and_loses_nothing(told: Told) -> None:
    found = the_same(told["failures"])
    assert found["seen"] == {
        call: f"[{rank}] RuntimeError('broken {call}')"
        for call, rank in (("local", 1), ("global", 0), ("write", 2), ("finish", 0), ("set_up", 3))
    }
    assert found["committed"] == [1]
    assert (found["kind"], found["stored"], found["right"]) == ("changed", 4, True)


def test_refusals_name_what_is_wrong(told: Told) -> None:
    seen = the_same(told["mismatch"])
    assert re.search(r"Missing key .*absent", seen["key"])
    assert re.search(r"Size mismatch .*\[3, 2\].*\[4\].* top", seen["shape"])
    assert seen["number"] == (
        "InvalidInputError('the ranks opened checkpoints [1, 2]: give all of them the same number')"
    )
    assert "no tensor 'usr.weight' in the state dict" in seen["table"]


def test_a_run_goes_on_after_a_load(told: Told) -> None:
    """[storage, stored rows, restores]: a load of one tensor is no restore, one of everything is."""
    assert the_same(told["restored"]) == {"kinds": [["full", 11, 0], ["changed", 4, 1]]}


def test_tables_are_quantized_and_their_state_is_not(told: Told) -> None:
    assert the_same(told["bits"]) == {"exact": False, "near": True, "state": True}


def test_more_ranks_than_rows(told: Told) -> None:
    assert the_same(told["few_rows"]) == {"kinds": [["full", "full"], ["unchanged", "unchanged"]], "right": True}


def test_increments_over_one_base(told: Told) -> None:
    """Rows since the base are stored; only those that changed since the checkpoint before are told as changed."""
    assert the_same(told["one_shot"]) == {"stored": [11, 1, 2, 3], "recent": [[0], [4], [10]]}


def test_the_second_reader_agrees_and_nothing_is_damaged(told: Told, folder: Path) -> None:
    assert told
    runs = list(runs_below(folder))
    assert len(runs) > 20
    for run in runs:
        assert [p for p in crf.open_run(run).verify() if p.kind != "litter"] == []
        assert_agreement(run)
