"""A trainer whose tables are on a CUDA device: rows are noted, gathered and quantized there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from checkrun_format import quantize
from checkrun_format.torch import Checkpointer

pytestmark = pytest.mark.gpu

ROWS = 200_000


@pytest.mark.parametrize("bits", [None, 4])
def test_saves_in_the_background(tmp_path: Path, bits: int | None) -> None:
    """What is stored is what the CPU makes of the same rows, however they change after staging."""
    torch.manual_seed(0)
    model = nn.EmbeddingBag(ROWS, 32, mode="sum", sparse=True).cuda()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer, bits=bits, encoder="minmax", durable=False) as checkpointer:
        bitmap = checkpointer.tracker.tables["weight"].bitmap
        assert (bitmap.device.type, bitmap.dtype, bitmap.shape) == ("cuda", torch.uint8, (ROWS,))
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randint(ROWS, (60_000, 2), device="cuda")).square().sum().backward()
            optimizer.step()
            weight, sums = model.weight.detach().cpu().numpy(), optimizer.state[model.weight]["sum"].cpu().numpy()
            pending = checkpointer.save_async(step)
            assert pending is not None
            before = model.weight.detach().clone()
            with torch.no_grad():
                model.weight.data.fill_(9)
            stored = pending.result(60).table("weight")
            model.weight.data.copy_(before)
            wanted = weight if bits is None else quantize.decode(quantize.encode(weight, bits, "minmax"))
            assert np.array_equal(stored.read()["weight"], wanted)
            assert np.array_equal(stored.read()["sum"], sums)
        assert stored.storage == "changed"


def test_a_model_that_moves_to_a_device(tmp_path: Path) -> None:
    model = nn.Embedding(100, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer, durable=False) as checkpointer:
        model.cuda()
        model(torch.tensor([3], device="cuda")).sum().backward()
        optimizer.step()
        assert np.array_equal(
            checkpointer.save(1).table("weight").read()["weight"], model.weight.detach().cpu().numpy()
        )
        assert checkpointer.tracker.tables["weight"].bitmap.device.type == "cuda"
