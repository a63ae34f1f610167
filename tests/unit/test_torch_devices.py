"""A trainer on a device, acted by the CPU: every tensor is told to be on a device named "cpu"."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import checkrun_format as crf
from checkrun_format import devices, dlpack
from checkrun_format.errors import InvalidInputError
from checkrun_format.torch import Checkpointer
from checkrun_format.torch.distributed import RankSaver
from checkrun_format.torch.distributed.ranked import RankedRun
from checkrun_format.torch.snapshot import Copier


@pytest.fixture(autouse=True)
def _on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    is_on_cpu = dlpack._is_on_cpu
    monkeypatch.setattr(dlpack, "_is_on_cpu", lambda a, what: not isinstance(a, torch.Tensor) and is_on_cpu(a, what))
    monkeypatch.setattr(dlpack, "_adopted", devices.adopted)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("rows", [200, 40_000])
def test_saves_in_the_foreground_and_in_the_background(tmp_path: Path, bits: int | None, rows: int) -> None:
    """Both store the same bits, few rows and many, whether they are quantized before they are copied or after."""
    torch.manual_seed(0)
    users, top = nn.EmbeddingBag(rows, 32, mode="sum"), nn.Linear(32, 2)
    model = nn.ModuleDict({"users": users, "top": top})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    trainers = [Checkpointer(tmp_path / name, model, optimizer, bits=bits, durable=False) for name in ("f", "b")]
    trainers[1]._copier = Copier(encode_on=lambda device: True)
    for step in range(3):
        optimizer.zero_grad()
        top(users(torch.randint(rows, (rows // 4, 2)))).square().sum().backward()
        optimizer.step()
        pending = trainers[1].save_async(step)
        assert pending is not None
        saved = [trainers[0].save(step), pending.result(60)]
        for checkpoint in saved:
            table = checkpoint.table("users.weight").read()
            assert np.array_equal(table["sum"], optimizer.state[users.weight]["sum"].numpy())
            assert np.array_equal(checkpoint.tensor("top.weight"), top.weight.detach().numpy())
            assert bits is not None or np.array_equal(table["weight"], users.weight.detach().numpy())
        values = [checkpoint.table("users.weight").read()["weight"] for checkpoint in saved]
        assert values[0].tobytes() == values[1].tobytes()
        assert {checkpoint.table("users.weight").storage for checkpoint in saved} == {"changed" if step else "full"}
    for trainer in trainers:
        trainer.close()
        assert crf.open_run(trainer.run.url).verify() == []


@pytest.fixture
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    address = (tmp_path_factory.mktemp("group") / "file").as_uri()
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_a_model_that_is_cut_otherwise_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Shard(0)]))
    with pytest.raises(InvalidInputError, match=r"'weight' is a DTensor, cut over .* CheckrunWriter"):
        Checkpointer(tmp_path / "run", model, torch.optim.SGD(model.parameters()))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_one_rank")
def test_replicas(tmp_path: Path) -> None:
    weight, sums = torch.rand(100, 8), torch.rand(100)
    run = RankedRun(
        tmp_path,
        {"durable": False, "bits": 4},
        None,
        dt.timedelta(seconds=20),
        sharded=None,
        merge=lambda told: told[0],
    )

    def saved(changed: Any) -> crf.Checkpoint:
        table = crf.Table({"weight": weight, "sum": sums}, changed=changed)
        return run.save(crf.State(tables={"t": table}, tensors={"bias": weight[0]}))

    saved(None)
    sums[5] = 9
    made = saved([5])
    assert np.array_equal(made.table("t").read()["sum"], sums.numpy())
    assert np.array_equal(made.tensor("bias"), weight[0].numpy())
    assert made.table("t").stored_rows == 1


@pytest.mark.usefixtures("_one_rank")
def test_the_checkpoint_that_all_ranks_choose(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path, "a", durable=False)
    saver = RankSaver(run)
    assert saver.chosen(missing_ok=True) is None
    with pytest.raises(crf.CheckpointNotFoundError):
        saver.chosen()
    for step in (10, 20):
        run.save(crf.State(extra=step), step=step)
    assert [(found := saver.chosen(number)) and found.step for number in (None, 1)] == [20, 10]
    with pytest.raises(crf.CheckpointNotFoundError):
        saver.chosen(3, missing_ok=True)
