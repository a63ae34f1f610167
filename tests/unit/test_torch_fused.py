"""Rows that the fused kernels of FBGEMM change; models that TorchRec cut are in tests/integration/test_torchrec.py."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from checkrun_format.torch.fused import FusedRows, Kernel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # FBGEMM's own

pytest.importorskip("fbgemm_gpu", reason="fbgemm-gpu-cpu is not installed: pip install -c constraints.txt .[torchrec]")

ROWS = (5, 300)


class Tables:
    """Two tables of one kernel: the first is read by two features."""

    def __init__(self, optimizer: str = "EXACT_ADAGRAD") -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        specs = [(rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS]
        self.module: Any = SplitTableBatchedEmbeddingBagsCodegen(
            specs, feature_table_map=[0, 0, 1], optimizer=EmbOptimType[optimizer], learning_rate=0.1
        )
        kernel = Kernel(self.module)
        states = self.module.split_optimizer_states()
        self.records = [FusedRows(f"t{n}", kernel, n, states[n]) for n in range(2)]
        self.module.register_forward_hook(kernel.after, with_kwargs=True)

    def forward(self, *ids: list[int]) -> Any:
        """Look up the ids of each feature, in one bag each."""
        offsets = torch.tensor([0, *(len(some) for some in ids)]).cumsum(0)
        return self.module(indices=torch.tensor([row for some in ids for row in some]), offsets=offsets)

    def train(self, *ids: list[int]) -> None:
        self.forward(*ids).sum().backward()

    def taken(self) -> list[list[int]]:
        """The rows that a snapshot takes of each table."""
        found = []
        for table in self.records:
            some = table.changed()
            assert some.whole is None
            table.clear(some)
            found.append(some.rows.tolist())
        return found


@pytest.fixture(params=["host", "device"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """As for tables in the host's memory, and as for those on a device, which runs on the CPU too."""
    if request.param == "device":
        monkeypatch.setattr(Kernel, "_touch_on_host", Kernel._touch_on_device)
    return Tables()


def test_rows_of_every_feature(tables: Tables) -> None:
    before = [weight.clone() for weight in tables.module.split_embedding_weights()]
    tables.train([0, 4], [4, 2, 2], [7])
    differing = [(a != b).any(1).nonzero().squeeze(1).tolist() for a, b in zip(before, weights(tables), strict=True)]
    assert differing == [[0, 2, 4], [7]]
    assert tables.taken() == differing
    assert tables.taken() == [[], []]


def test_bags_of_different_number(tables: Tables) -> None:
    """As with variable batches: how many bags each rank gave each feature."""
    kernel = next(hook.__self__ for hook in tables.module._forward_hooks.values())
    kernel._touch(torch.tensor([0, 1, 2, 2, 7]), torch.tensor([0, 1, 2, 2, 3, 4, 5]), [[1, 1], [1, 0], [2, 1]])
    assert tables.taken() == [[0, 1], [2, 7]]


def weights(tables: Tables) -> list[torch.Tensor]:
    found: list[torch.Tensor] = tables.module.split_embedding_weights()
    return found


def test_rows_wait_for_the_backward_of_their_forward(tables: Tables) -> None:
    first, second = tables.forward([1], [], [1]), tables.forward([2], [], [2])
    assert tables.taken() == [[1, 2], [1, 2]]
    second.sum().backward()
    assert tables.taken() == [[1, 2], [1, 2]]  # a row of the second may be one of the first
    first.sum().backward()
    assert tables.taken() == [[1, 2], [1, 2]]
    assert tables.taken() == [[], []]


def test_a_forward_that_is_gone_waits_no_more(tables: Tables) -> None:
    output = tables.forward([1], [3], [])
    assert tables.taken() == [[1, 3], []]
    del output
    assert tables.taken() == [[1, 3], []]
    assert tables.taken() == [[], []]


def test_without_gradients_nothing_changes(tables: Tables) -> None:
    with torch.no_grad():
        tables.forward([1], [3], [4])
    assert tables.taken() == [[], []]


def test_hundreds_of_forwards(tables: Tables) -> None:
    """A byte has 256 values: rows that wait do so all the same, others are told once."""
    waiting = tables.forward([0], [], [299])
    for row in range(290):
        tables.train([], [], [row])
    assert tables.taken() == [[0], [*range(290), 299]]
    waiting.sum().backward()
    tables.taken()
    for row in range(290):
        tables.train([], [], [row])
    assert tables.taken() == [[], [*range(290)]]
    assert tables.taken() == [[], []]
    tables.records[0].mark(torch.tensor([4]))
    assert tables.taken() == [[4], []]
    tables.train([], [], [5])
    assert tables.taken() == [[4], [5]]
    assert tables.taken() == [[], []]


def test_marked_rows_wait_for_the_next_forward(tables: Tables) -> None:
    tables.records[1].mark(torch.tensor([3, 8]))
    assert tables.taken() == [[], [3, 8]]
    assert tables.taken() == [[], [3, 8]]
    tables.train([1], [], [9])
    assert tables.taken() == [[1], [3, 8, 9]]
    assert tables.taken() == [[], []]


def test_rows_that_are_none_are_the_first(tables: Tables) -> None:
    """FBGEMM reads them so, with a warning."""
    tables.train([5], [], [300])
    assert tables.taken() == [[0], [0]]


def test_what_was_not_saved_is_put_back(tables: Tables) -> None:
    tables.train([1], [2], [3])
    some = [table.changed() for table in tables.records]
    for table, taken in zip(tables.records, some, strict=True):
        table.clear(taken)
    tables.train([4], [], [3])
    for table, taken in zip(tables.records, some, strict=True):
        table.put_back(taken)
    assert tables.taken() == [[1, 2, 4], [3]]


def test_writes_past_the_kernel_and_second_backwards_store_all(tables: Tables) -> None:
    with torch.no_grad():
        weights(tables)[0][2] = 1
    for table in tables.records:  # in memory they are one
        taken = table.changed()
        assert taken.whole == "it was written to outside of an optimizer step"
        table.clear(taken)
    assert tables.taken() == [[], []]
    output = tables.forward([1], [], []).sum()
    output.backward(retain_graph=True)
    output.backward()
    assert tables.records[1].changed().whole == "a second backward went through one forward"


def test_optimizers_that_move_other_rows() -> None:
    other = Tables()
    other.module.optimizer = "madgrad"
    kernel = Kernel(other.module)
    record = FusedRows("t", kernel, 1, ())
    for _ in range(2):
        taken = record.changed()
        assert taken.whole == "madgrad of FBGEMM is not known to leave rows without gradient as they are"
        record.clear(taken)


def test_the_bitmap_is_there_once(tables: Tables) -> None:
    """A shard's records are the kernel's: none of its own stay beside them."""
    for table in tables.records:
        assert table._host is not None
        assert np.shares_memory(table._host, table.bitmap.numpy())


def test_a_copy_of_the_module_notes_nothing(tables: Tables) -> None:
    kernel = next(hook.__self__ for hook in tables.module._forward_hooks.values())
    idle = copy.deepcopy(kernel)
    idle.after(tables.module, (), {"indices": torch.tensor([1]), "offsets": torch.tensor([0, 1, 1, 1])}, None)
    assert idle.bitmap is None
    assert tables.taken() == [[], []]
