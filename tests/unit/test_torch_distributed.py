"""The plug-in for torch.distributed.checkpoint in one process; several are in tests/integration/test_dcp.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner

import checkrun_format as crf
from checkrun_format.errors import InvalidInputError, RunNotFoundError
from checkrun_format.stores import LocalStore
from checkrun_format.testing import MemoryStore
from checkrun_format.torch.distributed import CheckrunReader, CheckrunWriter
from checkrun_format.torch.distributed.keys import Keys
from checkrun_format.torch.distributed.ranks import opened, pack, unpack
from checkrun_format.torch.distributed.shards import Shard, shared_tables

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

USER = "model.user.weight"
SUM = "optim.state.user.weight.sum"


def state(rows: int = 8, add: float = 0.0) -> dict[str, Any]:
    weight = torch.arange(float(rows * 3)).reshape(rows, 3) + add
    return {
        "model": {"user.weight": weight, "over": torch.ones(2, 2) + add},
        "optim": {
            "state": {"user.weight": {"sum": weight[:, 0].clone(), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
    }


def save(writer: CheckrunWriter, given: dict[str, Any], **options: Any) -> crf.Checkpoint:
    state_dict_saver.save(given, storage_writer=writer, **options)
    assert writer.checkpoint is not None
    return writer.checkpoint


def refused(act: Callable[[], Any]) -> str:
    """What the one rank there is says."""
    with pytest.raises(CheckpointException) as caught:
        act()
    error = caught.value.failures[0][0]
    assert isinstance(error, InvalidInputError)
    return str(error)


def test_every_rank_opens_the_run_by_the_same_options(tmp_path: Path) -> None:
    """Credentials too; but who only reads prunes nothing, and takes nothing over."""
    options: dict[str, Any] = {
        "bits": 4,
        "keep": crf.Keep(last=1),
        "takeover": True,
        "max_host_bytes": 1 << 20,
        "durable": False,
    }
    first, second = (opened(tmp_path / "run", options, commits=commits) for commits in (True, False))
    assert (first.mode, second.mode) == ("a", "r")
    for run in (first, second):
        assert isinstance(run._store, LocalStore)
        assert not run._store.durable
        assert run._history.budget(None).max_host_bytes == 1 << 20
    writer = CheckrunWriter(tmp_path / "run", **options)
    writer.set_up_storage_writer(False, rank=1)
    assert (writer.run.mode, writer.run._history.budget(None).max_host_bytes) == ("r", 1 << 20)


# Which keys are tables ------------------------------------------------------------------------------------------------


def test_optimizer_state_joins_its_weight() -> None:
    sizes = {
        "model.user.weight": (8, 4),
        "model.item.weight": (5, 4),
        "model.top.weight": (8, 4),
        "optim.state.user.weight.exp_avg": (8, 4),
        "optim.state.user.weight.sum": (8,),
        "optim.state.user.weight.step": (),
        "optim.state.item.weight.sum": (7,),
        "optim.state.0.sum": (8,),
        "fused.state.model.item.weight.item.momentum1": (5,),
    }
    assert Keys(["model.user.weight", "model.item.weight"]).assign(sizes) == {
        "model.user.weight": ("model.user.weight", "weight"),
        "model.item.weight": ("model.item.weight", "weight"),
        "optim.state.user.weight.exp_avg": ("model.user.weight", "exp_avg"),
        "optim.state.user.weight.sum": ("model.user.weight", "sum"),
        "fused.state.model.item.weight.item.momentum1": ("model.item.weight", "momentum1"),
    }
    explicit = Keys({"u": {"weight": "model.user.weight", "total": "optim.state.0.sum"}, "i": "model.item.weight"})
    assert explicit.assign(sizes) == {
        "model.user.weight": ("u", "weight"),
        "optim.state.0.sum": ("u", "total"),
        "model.item.weight": ("i", "weight"),
        "fused.state.model.item.weight.item.momentum1": ("i", "momentum1"),
    }


def test_keys_that_are_not_clear_are_refused() -> None:
    both = Keys(["a.user.weight", "b.user.weight"])
    with pytest.raises(InvalidInputError, match=r"may be optimizer state of 'a.user.weight' or 'b.user.weight'"):
        both.assign({"a.user.weight": (8, 4), "b.user.weight": (8, 4), "optim.state.user.weight.sum": (8,)})
    with pytest.raises(InvalidInputError, match=r"did you mean 'model.user.weight'"):
        Keys(["model.usr.weight"]).check_complete(["model.user.weight", "top"])
    with pytest.raises(InvalidInputError, match="has shape"):
        Keys(["cube"]).assign({"cube": (2, 2, 2)})
    with pytest.raises(InvalidInputError, match="give a list of names"):
        Keys("model.user.weight")


def test_ids_are_packed_and_unpacked() -> None:
    for ids in ([], [0], [5, 9, 2**40]):
        assert unpack(pack(np.array(ids, np.int64))).tolist() == ids


def test_rows_that_two_ranks_hold_are_found() -> None:
    def shard(low: int, high: int, table: str = "t") -> Shard:
        return Shard(table=table, field="weight", rows=(low, high), columns=(0, 2), of=9, width=2, dtype="float32")

    assert shared_tables([[shard(0, 4)], [shard(4, 9)]]) == set()
    assert shared_tables([[shard(0, 4), shard(2, 6)], [shard(6, 9)]]) == set()
    assert shared_tables([[shard(0, 5)], [shard(4, 9)], [shard(0, 9, "u")]]) == {"t"}
    assert shared_tables([[shard(0, 0)], [shard(0, 9)]]) == set()


# Saving and loading ---------------------------------------------------------------------------------------------------


def test_a_state_dict_goes_in_and_comes_out(tmp_path: Path) -> None:
    writer = CheckrunWriter(tmp_path / "run", tables=[USER], extra={"reader": 7})
    checkpoint = save(writer, state(), checkpoint_id="12")
    assert (checkpoint.step, checkpoint.extra) == (12, {"reader": 7})
    assert checkpoint.tables == [USER]
    assert sorted(checkpoint.tensors) == ["model.over", "optim.state.user.weight.step"]
    assert sorted(checkpoint.blobs)[:2] == ["optim.param_groups.0.betas", "optim.param_groups.0.lr"]
    loaded = state(add=-1.0)
    loaded["optim"]["param_groups"] = [{"lr": 0.0, "betas": None}]
    reader = CheckrunReader(tmp_path / "run")
    state_dict_loader.load(loaded, storage_reader=reader, checkpoint_id="12")
    assert torch.equal(loaded["model"]["user.weight"], state()["model"]["user.weight"])
    assert torch.equal(loaded["optim"]["state"]["user.weight"]["sum"], state()["model"]["user.weight"][:, 0])
    assert loaded["optim"]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]


def test_a_state_dict_is_built_from_the_metadata_alone(tmp_path: Path) -> None:
    """As the command that turns a checkpoint into a file of torch.save does."""
    save(CheckrunWriter(tmp_path / "run", tables=[USER]), state())
    built: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    state_dict_loader._load_state_dict(
        built, storage_reader=CheckrunReader(tmp_path / "run"), planner=planner, no_dist=True
    )
    assert torch.equal(built["model"]["user.weight"], state()["model"]["user.weight"])
    assert built["optim"]["state"]["user.weight"]["step"] == 3
    assert built["optim"]["param_groups"][0] == {"lr": 0.1, "betas": (0.9, 0.99)}


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    given = {
        "bfloat16": torch.randn(3, 4).bfloat16(),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "view": torch.arange(100.0)[10:12],
        "cube": torch.randn(2, 3, 4),
        "empty": torch.zeros(0, 3),
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    save(CheckrunWriter(tmp_path / "run"), dict(given))
    loaded = {name: torch.zeros_like(value) for name, value in given.items()}
    state_dict_loader.load(loaded, storage_reader=CheckrunReader(tmp_path / "run"))
    for name, value in given.items():
        assert loaded[name].contiguous().view(torch.uint8).equal(value.contiguous().view(torch.uint8)), name


def test_a_table_that_grows_and_shrinks(tmp_path: Path) -> None:
    told: dict[str, Any] = {USER: crf.ALL}
    writer = CheckrunWriter(tmp_path / "run", tables=[USER], changed=told.get, policy="consecutive")
    save(writer, state(8))
    told[USER] = np.array([2])
    grown = save(writer, state(10))
    assert [grown.table(USER).storage, grown.table(USER).stored_rows, len(grown.table(USER))] == ["changed", 3, 10]
    mask = np.zeros(9, bool)
    told[USER] = torch.from_numpy(mask)
    shrunk = save(writer, state(9))
    assert [shrunk.table(USER).storage, len(shrunk.table(USER))] == ["full", 9]
    assert shrunk.table(USER).read()["weight"].tolist() == state(9)["model"]["user.weight"].tolist()


def test_what_was_staged_for_a_save_that_never_came_is_not_stored(tmp_path: Path) -> None:
    told: dict[str, Any] = {USER: crf.ALL}
    writer = CheckrunWriter(tmp_path / "run", tables=[USER], changed=told.get, policy="consecutive")
    save(writer, state())
    told[USER] = np.array([1])
    abandoned = writer.stage(state(add=5.0))
    told[USER] = np.array([2])
    values = state(add=7.0)
    done = save(writer, values)
    assert done.table(USER).stored_rows == 2
    assert done.table(USER).take([1, 2])["weight"].tolist() == values["model"]["user.weight"][[1, 2]].tolist()
    assert "staged by another writer" in refused(lambda: save(writer, abandoned))


def test_rows_that_cannot_be_are_refused_and_make_the_next_save_full(tmp_path: Path) -> None:
    told: dict[str, Any] = {USER: crf.ALL}
    writer = CheckrunWriter(
        tmp_path / "run", tables=[USER], changed=lambda name: told.pop(name, []), policy="consecutive"
    )
    save(writer, state())
    told[USER] = np.array([3, 8])
    assert refused(lambda: save(writer, state())) == f"table {USER!r}, changed: row 8 of 8 rows"
    assert save(writer, state()).table(USER).storage == "full"
    assert save(writer, state()).table(USER).storage == "unchanged"


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    writer = CheckrunWriter(tmp_path / "run", tables=[USER])
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save(writer, state(), planner=planner)
    assert "enable_plan_caching=False" in refused(lambda: save(writer, state(), planner=planner))
    with pytest.raises(InvalidInputError, match=r"AsyncCheckpointerType.THREAD"):
        copy.copy(writer)  # as when it is sent to another process
    with pytest.raises(InvalidInputError, match="give the step"):
        writer.reset("runs/dlrm")
    with pytest.raises(InvalidInputError, match="bits= is an option of open_run"):
        CheckrunWriter(crf.open_run(tmp_path / "run", mode="a"), bits=4)
    with pytest.raises(RunNotFoundError):
        CheckrunReader(tmp_path / "typo")
    assert not (tmp_path / "typo").exists()
    two = {"user.weight": torch.zeros(2, 2), "optim": {"state": {"user.weight": {"sum": torch.zeros(2).to_sparse()}}}}
    with pytest.raises(CheckpointException):
        save(CheckrunWriter(tmp_path / "sparse", tables=["user.weight"]), two)
    assert list(crf.open_run(tmp_path / "sparse").log()) == []


def test_a_run_saved_without_dcp_is_loaded() -> None:
    run = crf.open_run(MemoryStore(), mode="a")
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    tables = {"user": crf.Table({"weight": weight, "sum": weight[:, 0]}), "item.weight": crf.Table({"weight": weight})}
    run.save(crf.State(tables=tables, tensors={"top": np.ones(2, np.float32)}))
    loaded = {
        "user.weight": torch.zeros(3, 2), "user.sum": torch.zeros(3), "item.weight": torch.zeros(3, 2),
        "top": torch.zeros(2),
    }  # fmt: skip
    state_dict_loader.load(loaded, storage_reader=CheckrunReader(run))
    assert loaded["user.weight"].tolist() == loaded["item.weight"].tolist() == weight.tolist()
    assert loaded["user.sum"].tolist() == [0, 2, 4]
    assert loaded["top"].tolist() == [1, 1]
    run.save(crf.State(tables={n: crf.Table(t.fields, changed=[1]) for n, t in tables.items()}))
    assert run.latest().table("user").storage == "changed"


def test_a_load_of_everything_is_a_restore(tmp_path: Path) -> None:
    save(CheckrunWriter(tmp_path / "run", tables=[USER]), state())
    run = crf.open_run(tmp_path / "run", mode="a", policy="consecutive")
    loaded = state(add=1.0)
    state_dict_loader.load(loaded, storage_reader=CheckrunReader(run))
    loaded["model"]["user.weight"][4] += 1
    done = save(CheckrunWriter(run, tables=[USER], changed=lambda _: [4]), loaded)
    assert (done.table(USER).storage, done.table(USER).stored_rows, done.commit.restores) == ("changed", 1, 1)
    assert done.stored_since(1, USER) is not None
    assert run[2].stored_since(1, USER).tolist() == [4]  # type: ignore[union-attr]
    assert run[2].stored_since(None, USER) is None
