"""Arrays on a device, and what is read into them. Here the device is the CPU: the same code, without a stream.

`tests/gpu/test_devices_on_cuda.py` has what only a GPU can show.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import checkrun_format as crf
from checkrun_format import State, Table, devices, dlpack, dtypes
from checkrun_format.errors import InvalidInputError, RowNotFoundError
from checkrun_format.quantize import decode_affine, encode, tensors
from checkrun_format.rows import Moves
from checkrun_format.testing import MemoryStore

Array = npt.NDArray[Any]
CPU = torch.device("cpu")
TORCH = sorted(name for name in dtypes.STORED if not name.startswith(("datetime64_", "timedelta64_")))
IDS = np.array([4, 0, 3], np.int64)


def bits_of(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = dlpack.to_numpy(value, "value")
    return array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def random_of(name: str, shape: tuple[int, ...] = (6, 3), seed: int = 0) -> Array:
    """Any bits at all, NaN of every kind included; of bool the two that it has."""
    kind = dtypes.logical(name)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, size, dtype=np.uint8)
    return raw.view(kind).reshape(shape)


def destination(tensor: torch.Tensor) -> devices.DeviceArray:
    return devices.Way(CPU).destination(tensor)


class TestDeviceArray:
    """Whatever numpy does with an array here, a DeviceArray does over there, bit for bit."""

    @pytest.mark.parametrize("name", TORCH)
    @pytest.mark.parametrize("at", [slice(1, 4), IDS, slice(2, 2), IDS[:0]], ids=str)
    def test_rows_are_gathered_and_replaced(self, name: str, at: Any) -> None:
        values, newer = random_of(name), random_of(name, seed=1)
        array = destination(devices.tensor_of(values.copy()))
        assert (array.dtype, array.shape, array.ndim, len(array)) == (values.dtype, values.shape, 2, 6)
        assert (array.size, array.nbytes, array.itemsize) == (values.size, values.nbytes, values.itemsize)
        assert bits_of(array[at].host()) == bits_of(values[at])
        array[at] = newer[at]
        wanted = values.copy()
        wanted[at] = newer[at]
        assert bits_of(array.host()) == bits_of(wanted)
        array[at] = destination(devices.tensor_of(values))[at]
        assert bits_of(array.host()) == bits_of(values)

    @pytest.mark.parametrize("name", TORCH)
    @pytest.mark.parametrize("shape", [(), (0,), (5,), (4, 3), (2, 1, 3)], ids=str)
    def test_stored_bits(self, name: str, shape: tuple[int, ...]) -> None:
        values = random_of(name, shape)
        tensor = devices.tensor_of(values)
        assert bits_of(devices.DeviceArray(tensor).stored().host()) == bits_of(dtypes.to_stored(values).reshape(-1))
        run = destination(tensor.clone()).run()
        assert run is not None
        run[0 : run.size // 2] = dtypes.to_stored(values).reshape(-1)[: run.size // 2]
        assert bits_of(run.host()) == bits_of(dtypes.to_stored(values).reshape(-1))

    def test_any_byte_but_0_is_true(self) -> None:
        tensor = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
        assert devices.DeviceArray(tensor).stored().host().tolist() == [0, 1, 1, 1]

    def test_only_one_run_of_memory_is_a_run(self) -> None:
        assert destination(torch.zeros(4, 6)[:, ::2]).run() is None
        assert destination(torch.zeros(4, 6).T).run() is None

    def test_copies_do_not_share_memory(self) -> None:
        tensor = torch.arange(12.0).reshape(6, 2)
        array = devices.DeviceArray(tensor[1:4])
        copies = [array.copy(), array.joined([array])]
        host = array.host()
        tensor += 1
        assert [c.tensor.tolist() for c in copies] == [[[2, 3], [4, 5], [6, 7]], [[2, 3], [4, 5], [6, 7]] * 2]
        assert host.tolist() == [[2, 3], [4, 5], [6, 7]]

    def test_large_values_go_over_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "_PIECE_BYTES", 64)
        values = random_of("float32", (100, 5))
        for at in (slice(0, 100), np.random.default_rng(1).permutation(100)):
            way = devices.Way(CPU)
            array = way.destination(torch.zeros(100, 5))
            array[at] = values
            wanted = np.zeros_like(values)
            wanted[at] = values
            assert bits_of(array.host()) == bits_of(wanted)
            assert max(buffer.memory.numel() for buffer in buffers_of(way)) == 60

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
    @pytest.mark.parametrize("qparams_dtype", ["float16", "float32"])
    def test_decoding_gives_the_bits_of_the_cpu(self, dtype: str, qparams_dtype: str) -> None:
        """DEC-1, DEC-2: of any width and number of columns, chosen rows, to any places, of any strides."""
        rng = np.random.default_rng(3)
        for bits in range(1, 9):
            for columns in (1, 7, 16, 33):
                values = rng.standard_t(3, (40, columns)).astype(dtypes.logical(dtype))
                q = encode(values, bits, "minmax", qparams_dtype)
                for rows, dest in (
                    (slice(0, 40), slice(3, 43)),
                    (slice(5, 20), slice(0, 15)),
                    (np.sort(rng.permutation(40)[:11]), slice(20, 31)),
                    (slice(10, 30), rng.permutation(50)[:20]),
                    (np.sort(rng.permutation(40)[:9]), rng.permutation(50)[:9]),
                    (slice(3, 3), slice(1, 1)),
                ):
                    wanted = np.zeros((50, 2 * columns + 1), dtypes.logical(dtype))
                    tensor = devices.tensor_of(wanted.copy())
                    dlpack.decode_affine(q.codes, q.qparams, bits, wanted[:, 1::2], Moves(rows, dest))
                    dlpack.decode_affine(q.codes, q.qparams, bits, destination(tensor[:, 1::2]), Moves(rows, dest))
                    exact = np.isnan(wanted.astype(np.float32))
                    found = dlpack.to_numpy(tensor, "found").copy()
                    assert np.isnan(found.astype(np.float32))[exact].all()
                    found[exact] = wanted[exact]  # rows of NaN, which stand where exact rows come
                    assert bits_of(found) == bits_of(wanted)

    def test_a_fused_multiply_add_would_be_seen(self) -> None:
        """DEC-1: product and sum are each rounded, on whatever device."""
        qparams = np.array([[1 + 2**-23, -(1 + 2**-23) * 3]], np.float32)
        codes = np.arange(256, dtype=np.uint8)[None]
        wanted, fused = np.empty((1, 256), np.float32), qparams[0, 0].astype(np.float64) * codes + qparams[0, 1]
        decode_affine(codes, qparams, 8, 256, wanted)
        assert (wanted != fused.astype(np.float32)).any()
        tensor = torch.empty(1, 256)
        destination(tensor).decode_affine(codes, qparams, 8, slice(0, 1), slice(0, 1))
        assert tensor.numpy().tobytes() == wanted.tobytes()


def buffers_of(way: devices.Way) -> list[Any]:
    held = [way._free.get() for _ in range(devices.BUFFERS)]
    for buffer in held:
        way._free.put(buffer)
    return held


class TestWay:
    def test_two_buffers_are_in_flight(self) -> None:
        """A third chunk waits until the device has copied one of them."""
        way, entered, leave = devices.Way(CPU), threading.Semaphore(0), threading.Semaphore(0)
        addresses = []

        def put(size: int) -> None:
            with way.buffer(size) as memory:
                addresses.append(memory.data_ptr())
                entered.release()
                leave.acquire()

        threads = [threading.Thread(target=put, args=(1000,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert entered.acquire(timeout=60) and entered.acquire(timeout=60)
        assert not entered.acquire(timeout=0.2)
        leave.release()
        assert entered.acquire(timeout=60)
        leave.release(2)
        for thread in threads:
            thread.join(60)
        assert len(addresses) == 3 and len(set(addresses)) == 2

    def test_buffers_are_used_again_in_turn(self) -> None:
        way, addresses = devices.Way(CPU), []
        for size in (100, 100, 50, 100, 1):
            with way.buffer(size) as memory:
                addresses.append(memory.data_ptr())
                assert memory.numel() == size
        assert addresses[0] != addresses[1]
        assert addresses == [addresses[i % 2] for i in range(5)]

    def test_a_buffer_comes_back_after_an_error(self) -> None:
        way = devices.Way(CPU)
        array = way.destination(torch.zeros(4))
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                array.receive(..., lambda target: 1 // 0)
        array.receive(..., lambda target: target.fill(2))
        assert array.tensor.tolist() == [2, 2, 2, 2]


ROWS = 700


def fields_of(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(ROWS, 12)).astype(np.float32)
    weight[seed * 10 % ROWS] = np.inf
    return {
        "weight": weight,
        "raw": rng.normal(size=(ROWS, 5)).astype(np.float32),
        "half": rng.normal(size=(ROWS, 6)).astype(ml_dtypes.bfloat16),
        "f16": rng.normal(size=(ROWS, 3)).astype(np.float16),
        "wide": rng.normal(size=(ROWS, 4)),
        "sum": rng.exponential(1e6, ROWS).astype(np.float32),
        "seen": rng.random(ROWS) < 0.5,
        "count": rng.integers(0, 2**63, ROWS, np.uint64),
    }


BITS = {"*": {"weight": 4, "half": 3, "f16": 1, "wide": 8}}


def built(store: Any, **options: Any) -> crf.Run:
    """A base and three increments: quantized and raw fields, exact rows, a keyed table, dense tensors."""
    run = crf.open_run(store, "a", bits=BITS, policy="consecutive", encoder="minmax", **options)
    keys = np.random.default_rng(9).permutation(5 * ROWS)[:ROWS]
    fields, rng = fields_of(1), np.random.default_rng(2)
    changed: Any = None
    for number in range(4):
        newer = fields_of(number + 2)
        if number:
            changed = np.unique(rng.integers(0, ROWS, 60))
            for name, values in fields.items():
                values[changed] = newer[name][changed]
        told: dict[str, Any] = {"store_as": {"sum": "float16"}}
        tables = {
            "dense": Table(fields, changed=changed, **told),
            "keyed": Table(fields, keys=keys, changed=None if changed is None else keys[changed], **told),
        }
        dense = {name: random_of(name, (30, 7), number) for name in TORCH} | {"scalar": np.float32(number)}
        run.save(State(tables=tables, tensors=dense, extra={"n": number}))
    return run


@pytest.fixture(scope="module", params=[400, 16 << 20], ids=["small chunks", "one chunk"])
def run(request: pytest.FixtureRequest) -> crf.Run:
    return built(MemoryStore(), chunk_bytes=request.param)


@pytest.fixture(scope="module")
def wanted(run: crf.Run) -> State:
    return run.load()


PLACES: list[dict[str, Any]] = [{"framework": "torch"}, {"device": "cpu"}, {"framework": "torch", "device": CPU}]


class TestReading:
    @pytest.mark.parametrize("place", PLACES, ids=str)
    def test_load(self, run: crf.Run, wanted: State, place: dict[str, Any]) -> None:
        found = run.load(**place)
        for name, table in wanted.tables.items():
            assert {f: bits_of(v) for f, v in found.tables[name].fields.items()} == {
                f: bits_of(v) for f, v in table.fields.items()
            }
            assert all(type(v) is torch.Tensor and v.is_contiguous() for v in found.tables[name].fields.values())
        assert bits_of(found.tables["keyed"].keys) == bits_of(wanted.tables["keyed"].keys)
        assert {n: bits_of(v) for n, v in found.tensors.items()} == {n: bits_of(v) for n, v in wanted.tensors.items()}
        assert all(type(v) is torch.Tensor for v in found.tensors.values())
        assert found.tensors["scalar"].shape == () and found.extra == {"n": 3}

    @pytest.mark.parametrize("place", PLACES, ids=str)
    @pytest.mark.parametrize("name", ["dense", "keyed"])
    def test_read_and_take(self, run: crf.Run, name: str, place: dict[str, Any]) -> None:
        view = run.latest().table(name)
        ids = view.keys() if name == "keyed" else np.arange(ROWS)
        rng = np.random.default_rng(4)
        for rows, columns in ((slice(3, 400), slice(1, 3)), (slice(0, 0), None), (None, slice(2, 12))):
            found = view.read(rows, columns=columns, **place)
            assert {n: bits_of(v) for n, v in found.items()} == {
                n: bits_of(v) for n, v in view.read(rows, columns=columns).items()
            }
        for some in (ids[:0], ids[5:50], ids[rng.integers(0, ROWS, 90)]):
            found = view.take(some, fields=["weight", "sum", "count"], columns=slice(0, 5), **place)
            assert {n: bits_of(v) for n, v in found.items()} == {
                n: bits_of(v)
                for n, v in view.take(some, fields=["weight", "sum", "count"], columns=slice(0, 5)).items()
            }
        assert bits_of(view.take(torch.from_numpy(ids[:3]))["sum"]) == bits_of(view.take(ids[:3])["sum"])
        with pytest.raises(RowNotFoundError):
            view.take([-1], **place)

    @pytest.mark.parametrize("device", [None, "cpu"])
    def test_into_the_callers_tensors(self, run: crf.Run, wanted: State, device: str | None) -> None:
        """Of any strides; the rest comes in new ones."""
        fields = {n: devices.tensor_of(np.zeros_like(v)) for n, v in wanted.tables["dense"].fields.items()}
        fields["weight"] = torch.zeros(ROWS, 30)[:, 3:27:2]
        fields["half"] = torch.zeros(6, ROWS, dtype=torch.bfloat16).T
        parameter = torch.nn.Parameter(torch.zeros(ROWS, 5))
        fields["raw"] = parameter
        strided = torch.zeros(7, 30).T
        out = State(tables={"dense": Table(fields)}, tensors={"float32": strided, "int8": np.zeros((30, 7), np.int8)})
        found = run.load(out=out, framework="torch", device=device)
        for name, tensor in fields.items():
            assert found.tables["dense"][name] is tensor
            assert bits_of(tensor) == bits_of(wanted.tables["dense"][name])
        assert found.tensors["float32"] is strided and bits_of(strided) == bits_of(wanted.tensors["float32"])
        assert type(found.tensors["int8"]) is np.ndarray and type(found.tensors["int16"]) is torch.Tensor
        assert bits_of(found.tensors["int8"]) == bits_of(wanted.tensors["int8"])
        assert type(found.tables["keyed"]["sum"]) is torch.Tensor

    @pytest.mark.parametrize("device", [None, "cpu"])
    def test_take_with_repeats_into_the_callers_tensors(self, run: crf.Run, wanted: State, device: str | None) -> None:
        ids = np.random.default_rng(5).integers(0, ROWS, 50)
        out = {"weight": torch.zeros(50, 12), "count": torch.zeros(50, dtype=torch.uint64)}
        found = run.latest().table("dense").take(ids, out=out, device=device)
        for name, tensor in out.items():
            assert found[name] is tensor and bits_of(tensor) == bits_of(wanted.tables["dense"][name][ids])

    def test_restore_and_single_tensors(self, run: crf.Run, wanted: State) -> None:
        again = crf.open_run(run._store, "a", bits=BITS)
        state = again.restore(device="cpu")
        assert bits_of(state.tables["dense"]["weight"]) == bits_of(wanted.tables["dense"]["weight"])
        assert again._saver.ledger.origin == 4
        found = run.latest().tensor("bfloat16", device="cpu")
        assert found.dtype == torch.bfloat16 and bits_of(found) == bits_of(wanted.tensors["bfloat16"])

    def test_column_parts(self) -> None:
        """Several writers' parts, cut at other columns than those that are asked for."""
        values = fields_of(1)
        run = crf.open_run(MemoryStore(), "a", bits=4, encoder="minmax")
        with run.begin(writers=3) as save:
            lists = []
            for rank, (low, high) in enumerate([(0, 5), (5, 6), (6, 12)]):
                writer = save.writer(rank)
                sums = {"sum": values["sum"]} if rank == 1 else {}
                part = {"weight": devices.tensor_of(values["weight"])[:, low:high], **sums}
                writer.put("t", part, rows=(0, ROWS), of=ROWS, columns={"weight": (low, high)})
                lists.append(writer.finish())
            view = save.commit(lists).table("t")
        for columns in (None, slice(3, 8), slice(5, 6), slice(0, 0)):
            found = view.read(slice(2, 500), columns=columns, device="cpu")
            assert {n: bits_of(v) for n, v in found.items()} == {
                n: bits_of(v) for n, v in view.read(slice(2, 500), columns=columns).items()
            }

    def test_torch_takes_over_what_numpy_read(self, run: crf.Run) -> None:
        tensor = run.latest().table("dense").read(fields=["weight"], framework="torch")["weight"]
        tensor[0] = 7
        assert tensor[0].tolist() == [7] * 12

    def test_damage_is_found_on_the_way(self) -> None:
        store = MemoryStore()
        run = built(store, chunk_bytes=4000)
        key = next(k for k in sorted(store.objects) if "/weight.codes/c/" in k)
        store.objects[key] = store.objects[key][:9] + bytes([store.objects[key][9] ^ 1]) + store.objects[key][10:]
        with pytest.raises(crf.DamagedError, match=r"CRC-32C"):
            crf.open_run(store).load(device="cpu")
        assert run.latest().sequence == 4


class Counting(MemoryStore):
    """Counts what is read of row chunks and dense arrays."""

    asked = 0

    def get(self, key: str) -> bytes | None:
        self.asked += "/c/" in key
        return super().get(key)


class TestRefused:
    """One error, before any value is read."""

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"framework": "tensorflow"}, "framework='tensorflow'; known are numpy, torch, jax, cupy"),
            ({"framework": 3}, "framework=3; known are"),
            ({"device": "cdua"}, "device='cdua' is not there for torch .*: Expected one of cpu, cuda"),
            ({"device": "cuda:4711"}, "device='cuda:4711' is not there for torch"),
            ({"device": 1.5}, "device=1.5 is not there for torch"),
            ({"device": "meta"}, "device='meta': tensors there hold no values"),
            ({"framework": "cupy", "device": "cpu"}, "device='cpu': cupy has arrays on GPUs alone"),
            ({"framework": "numpy", "device": "cuda"}, "device='cuda': numpy has arrays on the CPU alone"),
            ({"framework": "torch"}, "tensor 'when': torch has no datetime64_s; read it with framework='numpy'"),
            ({"device": "cpu"}, "tensor 'when': torch has no datetime64_s"),
        ],
    )
    def test_places(self, options: dict[str, Any], told: str) -> None:
        store = Counting()
        run = crf.open_run(store, "a")
        when = np.zeros(3, "datetime64[s]")
        run.save(State(tables={"t": Table({"weight": np.ones((5, 2))})}, tensors={"when": when}))
        store.asked = 0
        for read in (run.load, run.restore, run.latest().load):
            with pytest.raises(InvalidInputError, match=told):
                read(**options)
        if "when" not in told:
            for call in (run.latest().table("t").read, lambda **o: run.latest().table("t").take([1], **o)):
                with pytest.raises(InvalidInputError, match=told):
                    call(**options)
        with pytest.raises(InvalidInputError, match=told):
            run.latest().tensor("when", **options)
        assert store.asked == 0
        assert run.load(framework="numpy", device="cpu").tensors["when"].tolist() == when.tolist()

    @pytest.mark.parametrize("framework", ["torch", "jax", "cupy"])
    def test_a_framework_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
        monkeypatch.setitem(sys.modules, framework, None)
        monkeypatch.delitem(sys.modules, "checkrun_format.devices")
        monkeypatch.delattr(crf, "devices")
        run = crf.open_run(Counting(), "a")
        run.save(State(tensors={"a": np.ones(3)}))
        with pytest.raises(InvalidInputError, match=f"framework='{framework}' is not installed"):
            run.load(framework=framework)
        if framework == "torch":
            with pytest.raises(InvalidInputError, match="framework='torch' is not installed"):
                run.load(device="cuda")
            with pytest.raises(InvalidInputError, match="device='cuda': devices are reached by torch, which is not"):
                dlpack.checked_device("cuda")

    def test_destinations(self, run: crf.Run) -> None:
        view = run.latest().table("dense")
        for out, told in (
            (torch.zeros(1).expand(ROWS, 12), "overlaps itself"),
            (torch.zeros(ROWS, 11), r"float32 .700, 11. where float32 .700, 12. is read"),
            (torch.zeros(ROWS, 12, dtype=torch.float64), "float64 .* where float32"),
            (torch.zeros(ROWS, 12, device="meta"), "meta"),
        ):
            with pytest.raises(InvalidInputError, match=f"out.'weight'. of table 'dense'.*{told}"):
                view.read(out={"weight": out}, device="cpu")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every torch tensor counts as one on a device; tells how many bytes of each came back as they are."""
    moved: list[int] = []
    host = devices.DeviceArray.host

    def counted(self: devices.DeviceArray) -> Array:
        moved.append(self.nbytes)
        return host(self)

    monkeypatch.setattr(dlpack, "_from_torch", lambda torch, tensor, what: devices.adopted(tensor, what))
    monkeypatch.setattr(devices.DeviceArray, "host", counted)
    return moved


def on_torch(fields: dict[str, Array]) -> dict[str, torch.Tensor]:
    return {name: devices.tensor_of(values.copy()) for name, values in fields.items()}


def objects(store: MemoryStore) -> list[bytes]:
    """What is stored of arrays, by the name of each without its attempt."""
    found = {key.split("/", 2)[0] + key.split("/", 2)[-1]: data for key, data in store.objects.items() if "/c/" in key}
    return [found[key] for key in sorted(found)]


class TestSaving:
    """What a state on a device is stored as, is what the same state on the CPU is stored as."""

    @pytest.mark.parametrize("chunk_bytes", [5000, 16 << 20])
    @pytest.mark.parametrize("small", [0, 4 << 20], ids=["blocks of their own", "pooled"])
    def test_the_same_objects(
        self, monkeypatch: pytest.MonkeyPatch, forced: list[int], chunk_bytes: int, small: int
    ) -> None:
        monkeypatch.setattr("checkrun_format.writer._SMALL_BYTES", small)
        stores = [MemoryStore(), MemoryStore()]
        conversions: list[Callable[[Any], Any]] = [dict, on_torch]
        for store, convert in zip(stores, conversions, strict=True):
            run = crf.open_run(store, "a", bits=BITS, policy="consecutive", encoder="minmax", chunk_bytes=chunk_bytes)
            keys = np.random.default_rng(9).permutation(5 * ROWS)[:ROWS]
            fields, rng = fields_of(1), np.random.default_rng(2)
            changed: Any = None
            for number in range(3):
                if number:
                    changed = np.sort(rng.permutation(ROWS)[:90])
                    for name, values in fields.items():
                        values[changed] = fields_of(number + 2)[name][changed]
                mask = np.zeros(ROWS, np.bool_)
                mask[changed if number else slice(None)] = True
                told: dict[str, Any] = {"store_as": {"sum": "float16", "raw": "bfloat16"}}
                tables = {
                    "dense": Table(convert(fields), changed=convert({"m": mask})["m"], **told),
                    "keyed": Table(convert(fields), keys=convert({"k": keys})["k"], changed=keys[mask], **told),
                }
                dense = {name: random_of(name, (30, 7), number) for name in TORCH} | {"scalar": np.array(number)}
                run.save(State(tables=tables, tensors=convert(dense)))
            assert run.verify() == []
        assert len(objects(stores[0])) > 20
        assert objects(stores[0]) == objects(stores[1])
        assert sum(forced) > 0

    def test_the_float_table_stays_where_it_is(self, monkeypatch: pytest.MonkeyPatch, forced: list[int]) -> None:
        """Of a quantized table codes, qparams and a sample leave the device, of a raw field its changed rows."""
        monkeypatch.setattr("checkrun_format.writer._SMALL_BYTES", 0)
        weight, sums = torch.randn(50_000, 8), torch.rand(50_000)
        run = crf.open_run(MemoryStore(), "a", bits=8, policy="consecutive", chunk_bytes=1 << 16)
        run.save(State(tables={"t": Table({"weight": weight, "sum": sums})}))
        assert sum(forced) == sums.nbytes and max(forced) <= 1 << 16
        forced.clear()
        changed = torch.zeros(50_000, dtype=torch.bool)
        changed[::4] = True
        run.plan_save(State(tables={"t": Table({"weight": weight, "sum": sums}, changed=changed)}))
        assert forced == [50_000], "the mask alone"
        forced.clear()
        run.save(State(tables={"t": Table({"weight": weight, "sum": sums}, changed=changed)}))
        assert sum(forced) == 50_000 + 4 * 12_500
        assert run.latest().table("t").stored_rows == 12_500

    def test_memory_is_bounded_by_the_piece(self, forced: list[int]) -> None:
        """What torch allocates for gathering and encoding does not grow with the table."""
        weight = torch.randn(100_000, 32)
        run = crf.open_run(MemoryStore(), "a", bits=4, encoder="minmax", chunk_bytes=1 << 16)
        run.save(State(tables={"t": Table({"weight": weight}, changed=[0])}))
        weight += 1
        allocated = allocations(
            lambda: run.save(
                State(tables={"t": Table({"weight": weight}, changed=np.arange(0, 100_000, 2))}), parent="latest"
            )
        )
        assert len(allocated) > 100
        assert max(allocated) < weight.nbytes / 16
        assert forced == []

    def test_dense_tensors_go_in_pieces(self, forced: list[int]) -> None:
        run = crf.open_run(MemoryStore(), "a", chunk_bytes=4096)
        state = State(tensors={"a": torch.randn(100, 100), "b": np.ones(7, np.float32), "c": torch.randn(18)[::2]})
        run.save(state)
        assert sum(forced) == 40_000 + 36 and max(forced) <= 4096
        for name, values in run.load().tensors.items():
            assert bits_of(values) == bits_of(state.tensors[name])

    def test_codes_of_searching_encoders_do_not_depend_on_the_rows_beside(self) -> None:
        """LAY-7: a row that did not change is encoded to the same bits in any piece."""
        values = torch.from_numpy(np.random.default_rng(1).standard_t(3, (500, 37)).astype(np.float32))
        for encoder in ("refine", "greedy"):
            for bits in (2, 4):
                whole = encode(values, bits, encoder)
                for low, high in ((0, 1), (17, 18), (100, 333)):
                    some = encode(values[low:high], bits, encoder, "float16")
                    assert some.codes.tobytes() == whole.codes[low:high].tobytes()
                    assert some.qparams.tobytes() == whole.qparams[low:high].tobytes()

    @pytest.mark.parametrize("moves", [False, True])
    def test_a_table_that_moved_is_told_as_changed(self, forced: list[int], moves: bool) -> None:
        """LAY-7: another implementation encodes it, so rows that are stored again may have other bits."""
        values = fields_of(1)["weight"]
        run = crf.open_run(MemoryStore(), "a", bits=4, policy="one-shot")
        for number, changed in enumerate((None, [1], [2])):
            there = on_torch({"weight": values}) if number < 2 or not moves else {"weight": values}
            run.save(State(tables={"t": Table(there, changed=changed)}))
        rows = [change.rows.tolist() for change in run.latest().changes_since(2)]
        assert rows == ([[1, 2]] if moves else [[2]])
        assert len(forced) == 0

    def test_from_function(self) -> None:
        """Declared to be on a device, answers are encoded there; here, on the CPU."""
        values = on_torch(fields_of(1))
        spec: dict[str, Any] = {"weight": ("float32", 12), "sum": ("float32", None), "half": ("bfloat16", 6)}

        def fetch(ids: Array) -> dict[str, torch.Tensor]:
            return {name: values[name][torch.from_numpy(ids)] for name in spec}

        made = []
        for device in (None, "cpu"):
            run = crf.open_run(MemoryStore(), "a", bits={"*": {"weight": 4, "half": 2}}, encoder="minmax")
            table = Table.from_function(fetch, rows=ROWS, fields=spec, device=device)
            made.append(run.save(State(tables={"t": table})).table("t").read())
        assert {n: bits_of(v) for n, v in made[0].items()} == {n: bits_of(v) for n, v in made[1].items()}

    @pytest.mark.usefixtures("forced")
    def test_refused_before_anything_is_written(self) -> None:
        store = MemoryStore()
        run = crf.open_run(store, "a", bits=4, encoder="torch_compat")
        before = dict(store.objects)
        weight = torch.ones(5, 4)

        def elsewhere(ids: Array) -> dict[str, torch.Tensor]:
            return {"weight": weight[torch.from_numpy(ids)]}

        spec: dict[str, Any] = {"weight": ("float32", 4)}
        for table, told in (
            (Table({"weight": weight}), "field 'weight': torch_compat encodes arrays on the CPU, not on cpu"),
            (
                Table.from_function(elsewhere, rows=5, fields=spec, encoder="minmax"),
                "field 'weight': the function gave values on cpu: say so by device=",
            ),
            (
                Table.from_function(elsewhere, rows=5, fields=spec, encoder="minmax", device="cuda:4711"),
                "device='cuda:4711' is not there",
            ),
            (Table({"weight": weight.to_sparse()}), "field 'weight'"),
        ):
            with pytest.raises(InvalidInputError, match=told):
                run.save(State(tables={"t": table}))
            assert store.objects == before
        run.save(State(tables={"t": Table({"weight": weight.numpy()})}))


def allocations(call: Callable[[], object]) -> list[int]:
    """Bytes of each piece of memory that torch allocates in this thread."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        call()
    events = measured.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


class TestMemory:
    def test_no_copy_of_a_table_on_the_host(self) -> None:
        """Of everything that torch allocates, the results alone are larger than what a chunk decodes to.

        Chunks are small enough to be read in this thread, the only one that is measured.
        """
        rng = np.random.default_rng(0)
        fields = {"weight": rng.random((200_000, 32), np.float32), "raw": rng.random((200_000, 32), np.float32)}
        run = crf.open_run(MemoryStore(), "a", bits=4, chunk_bytes=1 << 17, policy="consecutive", encoder="minmax")
        run.save(State(tables={"t": Table(fields)}))
        changed = np.flatnonzero(rng.random(200_000) < 0.2)
        fields["raw"][changed] += 1
        run.save(State(tables={"t": Table(fields, changed=changed)}, tensors={"mlp": rng.random((1000, 1000))}))
        found: list[State] = []
        allocated = allocations(lambda: found.append(run.load(device="cpu")))
        size = fields["raw"].nbytes
        large = sorted(n for n in allocated if n > 1 << 17)
        assert large == sorted([size, size, 8_000_000])
        assert len(allocated) > 400, "piece by piece"
        assert found[0].tables["t"]["raw"].numpy().tobytes() == fields["raw"].tobytes()

    def test_buffers_are_as_large_as_what_is_read_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ways: list[devices.Way] = []
        begin = devices.Way.__init__

        def noted(self: devices.Way, device: torch.device) -> None:
            ways.append(self)
            begin(self, device)

        monkeypatch.setattr(devices.Way, "__init__", noted)
        run = crf.open_run(MemoryStore(), "a")
        weight = np.random.default_rng(0).random((400_000, 32), np.float32)
        run.save(State(tables={"t": Table({"weight": weight})}))
        found = run.load(device="cpu").tables["t"]["weight"]
        assert found.numpy().tobytes() == weight.tobytes()
        [way] = ways
        assert [1 << 19 < buffer.memory.numel() <= 1 << 20 for buffer in buffers_of(way)] == [True, True]


@pytest.mark.usefixtures("forced")
def test_a_checkpoint_of_a_device_opens_without_torch(tmp_path: Path) -> None:
    fields = on_torch(fields_of(1))
    run = crf.open_run(tmp_path / "run", "a", bits=BITS, durable=False)
    run.save(State(tables={"t": Table(fields)}, tensors={"mlp": torch.ones(3, dtype=torch.bfloat16)}))
    program = (
        "import sys; sys.modules['torch'] = None; import checkrun_format as crf; s = crf.open_run(sys.argv[1]).load(); "
        "print(s.tables['t']['count'].tobytes().hex(), s.tensors['mlp'].tolist())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")], check=True, capture_output=True, text=True
    )
    assert printed.stdout.split() == [fields["count"].numpy().tobytes().hex(), "[1.0,", "1.0,", "1.0]"]
    assert tensors.on_host(fields["weight"]).shape == (ROWS, 12)
