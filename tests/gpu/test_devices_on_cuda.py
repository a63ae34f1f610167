"""Reading to and saving from a GPU: the bits of the CPU, in bounded memory, in the order of the caller's streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import checkrun_format as crf
from checkrun_format import State, Table, devices
from checkrun_format.quantize import encode
from checkrun_format.testing import MemoryStore
from tests.unit.test_devices import BITS, ROWS, bits_of, buffers_of, built, fields_of, objects, on_torch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[400, 16 << 20], ids=["small chunks", "one chunk"])
def run(request: pytest.FixtureRequest) -> crf.Run:
    return built(MemoryStore(), chunk_bytes=request.param)


def on_cuda(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in on_torch(fields).items()}


def test_load(run: crf.Run) -> None:
    """Every dtype, exact rows, a keyed table, a chain: what the CPU decodes, on the device that was asked for."""
    wanted, found = run.load(), run.load(device="cuda")
    for name, table in wanted.tables.items():
        for field, values in table.fields.items():
            assert found.tables[name][field].device == torch.device("cuda", 0)
            assert bits_of(found.tables[name][field]) == bits_of(values)
    for name, values in wanted.tensors.items():
        assert found.tensors[name].is_cuda and bits_of(found.tensors[name]) == bits_of(values)


def test_read_and_take(run: crf.Run) -> None:
    view, rng = run.latest().table("dense"), np.random.default_rng(4)
    some: list[dict[str, Any]] = [{}, {"columns": slice(1, 3), "rows": slice(3, 400)}]
    for options in some:
        wanted, found = view.read(**options), view.read(**options, device="cuda:0")
        assert {n: bits_of(v) for n, v in found.items()} == {n: bits_of(v) for n, v in wanted.items()}
    ids = rng.integers(0, ROWS, 90)
    wanted, found = view.take(ids), view.take(torch.from_numpy(ids).cuda(), device="cuda")
    assert {n: bits_of(v) for n, v in found.items()} == {n: bits_of(v) for n, v in wanted.items()}


def test_into_tensors_on_the_device(run: crf.Run) -> None:
    """Of any strides, parameters too, on several devices at once where there are some."""
    wanted = run.load()
    last = f"cuda:{torch.cuda.device_count() - 1}"
    fields: dict[str, Any] = {
        "weight": torch.zeros(ROWS, 30, device=last)[:, 3:27:2],
        "raw": torch.nn.Parameter(torch.zeros(ROWS, 5, device="cuda")),
        "half": torch.zeros(6, ROWS, dtype=torch.bfloat16, device="cuda").T,
        "sum": np.zeros(ROWS, np.float32),
        "count": torch.zeros(ROWS, dtype=torch.uint64, device="cuda"),
    }
    strided = torch.zeros(7, 30, device="cuda").T
    found = run.load(out=State(tables={"dense": Table(fields)}, tensors={"float32": strided}))
    for name, tensor in fields.items():
        assert found.tables["dense"][name] is tensor
        assert bits_of(tensor) == bits_of(wanted.tables["dense"][name])
    assert bits_of(strided) == bits_of(wanted.tensors["float32"])
    ids = np.random.default_rng(5).integers(0, ROWS, 50)
    out = {"weight": torch.zeros(50, 12, device="cuda")}
    run.latest().table("dense").take(ids, out=out)
    assert bits_of(out["weight"]) == bits_of(wanted.tables["dense"]["weight"][ids])


def test_what_was_asked_of_the_device_before_is_done_first(run: crf.Run) -> None:
    """Kernels that still read or write a destination do not meet what is read into it."""
    out = torch.zeros(ROWS, 12, device="cuda")
    busy = torch.randn(4000, 4000, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 4000
    before = out + busy[0, 0].abs() * 0
    out += 5
    run.latest().table("dense").read(out={"weight": out})
    assert bits_of(out) == bits_of(run.latest().table("dense").read()["weight"])
    assert before.abs().max().item() == 0


def test_memory() -> None:
    """The device holds the result and a few pieces, the host two pinned buffers of a chunk."""
    run = crf.open_run(MemoryStore(), "a", bits=4, chunk_bytes=1 << 20, encoder="minmax")
    rng = np.random.default_rng(0)
    fields = {"weight": rng.random((500_000, 64), np.float32), "raw": rng.random((500_000, 64), np.float32)}
    run.save(State(tables={"t": Table(fields)}))
    ways: list[devices.Way] = []
    with pytest.MonkeyPatch.context() as patch:
        begin = devices.Way.__init__

        def noted(self: devices.Way, device: torch.device) -> None:
            ways.append(self)
            begin(self, device)

        patch.setattr(devices.Way, "__init__", noted)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = run.load(device="cuda").tables["t"].fields
    peak = torch.cuda.max_memory_allocated() - before
    assert peak - sum(values.nbytes for values in fields.values()) < 128 << 20
    assert [buffer.memory.numel() <= 1 << 20 and buffer.memory.is_pinned() for buffer in buffers_of(ways[0])] == [
        True
    ] * 2
    assert bits_of(found["raw"]) == bits_of(fields["raw"])


def test_saving_stores_what_the_cpu_stores() -> None:
    """Changed rows are gathered and encoded over there: the same objects, byte for byte."""
    stores = [MemoryStore(), MemoryStore()]
    for store, convert in zip(stores, (on_torch, on_cuda), strict=True):
        run = crf.open_run(store, "a", bits=BITS, policy="consecutive", encoder="minmax", chunk_bytes=5000)
        fields = fields_of(1)
        for number in range(3):
            mask = np.arange(ROWS) % 7 == number
            for name, values in fields.items():
                values[mask] = fields_of(number + 2)[name][mask]
            there: Any = convert(fields)
            changed: Any = convert({"mask": mask})["mask"]
            told: dict[str, Any] = {"store_as": {"sum": "float16", "raw": "bfloat16"}}
            tables = {"t": Table(there, changed=changed, **told)}
            run.save(State(tables=tables, tensors={"mlp": there["weight"].T, "seen": there["seen"]}))
        assert run.verify() == []
    assert len(objects(stores[0])) > 20
    assert objects(stores[0]) == objects(stores[1])


def test_memory_of_a_save() -> None:
    """What is allocated beside a table of 1 GiB is a few pieces, when half of its rows are stored."""
    weight = torch.rand(4 << 20, 64, device="cuda")
    run = crf.open_run(MemoryStore(), "a", bits=4)
    changed = torch.zeros(4 << 20, dtype=torch.bool, device="cuda")
    run.save(State(tables={"t": Table({"weight": weight}, changed=changed)}))
    changed[::2] = True
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run.save(State(tables={"t": Table({"weight": weight}, changed=changed)}), parent="latest")
    assert torch.cuda.max_memory_allocated() - before < 1 << 29
    assert run.latest().table("t").stored_rows == 2 << 20


@pytest.mark.parametrize("encoder", ["refine", "greedy"])
def test_codes_do_not_depend_on_the_rows_beside(encoder: str) -> None:
    """LAY-7: a reduction of the device's own adds in another order when there are few rows."""
    values = torch.from_numpy(np.random.default_rng(1).standard_t(3, (3000, 200)).astype(np.float32)).cuda()
    whole = encode(values, 4, encoder)
    for low, high in ((0, 1), (17, 20), (100, 1033)):
        some = encode(values[low:high], 4, encoder, whole.qparams.dtype.name)
        assert some.codes.tobytes() == whole.codes[low:high].tobytes()
        assert some.qparams.tobytes() == whole.qparams[low:high].tobytes()


def test_cupy() -> None:
    """Its arrays are saved, come out, and are read into."""
    cupy: Any = pytest.importorskip("cupy")
    run = crf.open_run(MemoryStore(), "a", bits=4, encoder="minmax")
    values = fields_of(1)
    run.save(State(tables={"t": Table({"weight": cupy.asarray(values["weight"]), "sum": cupy.asarray(values["sum"])})}))
    wanted = run.load().tables["t"]
    assert bits_of(wanted["sum"]) == bits_of(values["sum"])
    found = run.load(framework="cupy").tables["t"]
    out = {"weight": cupy.zeros((ROWS, 12), cupy.float32)}
    run.latest().table("t").read(out=out)
    for array in (found["weight"], out["weight"]):
        assert isinstance(array, cupy.ndarray) and bits_of(cupy.asnumpy(array)) == bits_of(wanted["weight"])
