"""`Checkpointer` under a process group: replicas in real processes, each of which stores some of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkrun_format as crf
from checkrun_format.torch import Checkpointer
from tests.conformance.agreement import assert_agreement, runs_below
from tests.integration.ranks import Told, run_group
from tests.integration.replica_scenarios import Model

WORLD = 3

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    return run_group("replica_scenarios.py", folder, WORLD)


def the_same(values: list[Any]) -> Any:
    """What all ranks say."""
    assert [values[0]] * len(values) == values
    return values[0]


def test_replicas_save_and_go_on_as_one(told: Told) -> None:
    """A step touches a row of its own and one for each rank; those of the latest may still change, and come again."""
    for number, rank in enumerate(told["replicas"]):  # what each gave, and its own again
        assert rank.pop("extra") == {"of": number, "large": "x" * 40_000}
        assert rank.pop("own") == number
    found = the_same(told["replicas"])
    assert found["blocks"] == ["block-0-0", "block-1-0", "block-2-0"]
    assert found["same"] == [True, True]
    assert found["changes"] == [2, 3, 4, 5, 12, 13, 14, 15, 22, 23, 24, 25, 32, 33, 34, 35]
    assert found["rows"] == [50, 12, 16, 4]
    assert found["extras"] == [0, 1, 2]
    assert found["misfit"] == ["InvalidInputError"] + 2 * ["RankError: rank 0 failed to restore: InvalidInputError"]
    assert found["restored"] == [6, True]
    assert found["resumed"]
    assert found["restores"] == 1


def test_ranks_decide_as_one(told: Told) -> None:
    for rank in told["busy"]:
        assert (rank["saved"], rank["agreed"], rank["cancelled"], rank["right"]) == (True, True, True, True)


def test_recent_rows_of_quantized_tables_are_exact(told: Told) -> None:
    """LAY-7."""
    found = the_same(told["quantized"])
    assert found["stored"] == [4, 8, 12]
    assert found["recent"] == [[0, 10, 20, 30], [1, 11, 21, 31], [2, 12, 22, 32]]
    assert found["differing"] == found["recent"]


def test_one_process_restores_what_three_saved(told: Told, folder: Path) -> None:
    assert told
    model = Model(9)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with Checkpointer(folder / "replicas/run", model, optimizer) as checkpointer:
        restored = checkpointer.restore(strict=False)
    assert restored is not None
    assert restored.problems == ("the checkpoint's state of 'own' was not asked for",)
    assert restored.step == 7
    assert (restored.extra, [extra["of"] for extra in restored.extras]) == ({"of": 0}, [0, 1, 2])
    latest = crf.open_run(folder / "replicas/run").latest()
    assert np.array_equal(latest.table("user.weight").read()["weight"], model.user.weight.detach().numpy())


def test_the_second_reader_agrees(told: Told, folder: Path) -> None:
    assert told
    assert len(runs_below(folder)) == 3
    for run in runs_below(folder):
        assert [p for p in crf.open_run(run).verify() if p.kind != "litter"] == []
        assert_agreement(run)
