"""Saves by the ranks of a gloo group without torch.distributed.checkpoint, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import checkrun_format as crf
from tests.conformance.agreement import assert_agreement, runs_below
from tests.integration.ranks import Told, collect, run_group, start
from tests.integration.saver_scenarios import SCENARIOS

WORLD = 4
TOGETHER = [name for name in SCENARIOS if name != "killed"]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saver")


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    return run_group("saver_scenarios.py", folder, WORLD, ",".join(TOGETHER))


def the_same(values: list[Any]) -> Any:
    """What all ranks say."""
    assert [values[0]] * len(values) == values
    return values[0]


def test_each_rank_stores_its_own_rows_in_its_own_blocks(told: Told) -> None:
    assert the_same(told["rows"]) == {
        "numbers": [1, 2, 1],
        "blocks": ["block-0-0", "block-1-0", "block-2-0", "block-3-0"],
        "stored": 4,
        "right": True,
        "top": [1.0, 1.0, 1.0],
        "own": [[0], [1], [2], [3]],
        "blobs": ["b0", "b1", "b2", "b3"],
        "extra": {"of": 0},
        "step": 8,
    }


def test_changed_rows_of_replicas_are_joined(told: Told) -> None:
    assert the_same(told["replicas"]) == {"changes": [1, 4, 8], "right": True}


def test_ranks_without_rows(told: Told) -> None:
    assert the_same(told["empty"]) == {
        "storage": [["full", "full"], ["unchanged", "unchanged"]],
        "few": [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]],
        "none": 0,
    }


def test_a_rank_that_raises_is_named_by_all_others_and_no_row_is_lost(told: Told) -> None:
    failures = [
        (2, "InvalidInputError: table 'user', field 'weight': values (2, 4) for rows (5, 8) and columns (0, 4)"),
        (1, "OSError: no space left"),
        (0, "InvalidInputError: step -1; a number from 0 on, or None"),
        (0, "InvalidInputError: rank 3 saves step 8, rank 0 step 7: call save at the same step on all ranks"),
    ]
    for number, rank in enumerate(told["raises"]):
        assert rank["seen"] == [
            told if number == failing else f"RankError: rank {failing} failed, nothing was committed: {told}"
            for failing, told in failures
        ]
        assert (rank["committed"], rank["stored"], rank["right"]) == ([1], 4, True)


def test_a_save_goes_on_in_a_thread_beside_collectives(told: Told) -> None:
    """What is stored is what was there when `begin` returned, on every rank."""
    assert the_same(told["background"]) == {"sum": 4.0, "first": [2.0] * 4, "top": [2.0, 2.0], "step": 2}


def test_a_rank_that_leaves_a_save_out_is_named_and_takes_part_in_the_next(told: Told) -> None:
    seen = [rank["seen"] for rank in told["absent"]]
    named = "RankError: rank 2 did not answer within 5 s: it died, hangs, or takes longer; nothing was committed"
    assert seen == [named, named, "absent", named]
    assert [(r["number"], r["stored"]) for r in told["absent"]] == [(2, 4)] * 4


def test_a_killed_rank_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    """Then rank 0 is killed, with the store that the others talk over."""
    found = collect(start("saver_scenarios.py", tmp_path, 3, "killed"), tmp_path, killed=(0, 2))["killed"]
    assert len(found) == 1
    first, second = found[0]["seen"]
    assert first.startswith("RankError: rank 2 did not answer within 5 s")
    assert second.startswith("RankError: the store of torch.distributed is gone, and with it probably rank 0")
    assert found[0]["committed"] == [1]
    assert crf.open_run(tmp_path / "killed/run").latest().sequence == 1


def test_the_second_reader_agrees(told: Told, folder: Path) -> None:
    assert list(told) == TOGETHER
    runs = runs_below(folder)
    assert len(runs) == len(TOGETHER)
    for run in runs:
        assert [p for p in crf.open_run(run).verify() if p.kind != "litter"] == []
        assert_agreement(run)
