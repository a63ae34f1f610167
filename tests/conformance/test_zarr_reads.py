"""Plain zarr-python and tensorstore read every array that this library writes, to the same bits (ZAR-1 to ZAR-5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from zarr.errors import ZarrUserWarning
from zarr.storage import LocalStore

import checkrun_format as crf
from checkrun_format import dtypes, layout
from checkrun_format.chunks import ChunkReader
from checkrun_format.errors import DamagedError
from checkrun_format.manifest import ArrayEntry
from tests.property.strategies import Array, same_bits

RNG = np.random.default_rng(7)


def weights(rows: int, columns: int = 5, dtype: str = "float32") -> Array:
    values = RNG.normal(size=(rows, columns))
    values[3, 0] = np.nan
    values[5] = -0.0
    return values.astype(dtypes.logical(dtype))


def any_bits(name: str, shape: tuple[int, ...]) -> Array:
    """Random bits of a logical dtype; bool apart, where only 0 and 1 are values."""
    dtype = dtypes.logical(name)
    if name == "bool":
        return RNG.integers(0, 2, shape).astype(np.bool_)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(RNG.bytes(size), dtype).reshape(shape)


def first_state() -> crf.State:
    tables = {
        f"affine {bits}": crf.Table({"weight": weights(40), "sum": any_bits("float32", (40,))}, bits=bits)
        for bits in range(1, 9)
    }
    for name in ("float16", "bfloat16", "float64"):
        tables[f"affine {name}"] = crf.Table({"weight": weights(40, 3, name)}, bits=3)
    tables["raw"] = crf.Table({f"f_{name}": any_bits(name, (30, 3)) for name in dtypes.STORED})
    tables["narrow"] = crf.Table(
        {"sum": weights(40)[:, 0].copy(), "moment": weights(40)},
        store_as={"sum": "float16", "moment": "bfloat16"},
    )
    tables["far"] = crf.Table({"weight": weights(30) * np.float32(1e9)}, bits=4)
    tables["keyed"] = crf.Table({"weight": weights(60)}, keys=np.arange(60) * 1000 - 7, bits=2)
    tables["long"] = crf.Table({"tag": any_bits("int8", (2000,))})
    return crf.State(
        tables=tables,
        tensors={name: any_bits(name, (7, 9)) for name in dtypes.STORED} | {"one": np.float32(3), "none": np.zeros(0)},
        blobs={"opaque": bytes(range(256)) * 4},
        extra={"long": "ä" * 70_000},
    )


def second_state(state: crf.State, *changed: int) -> crf.State:
    """The same, some rows of each table named as changed; keys gone from the keyed one."""
    tables = {
        name: crf.Table(table.fields, changed=list(changed), bits=table.bits, store_as=table.store_as)
        for name, table in state.tables.items()
    }
    keyed = state.tables["keyed"]
    assert keyed.keys is not None
    gone = 10 + len(changed)
    tables["keyed"] = crf.Table(
        {"weight": keyed["weight"][gone:]}, keys=keyed.keys[gone:], changed=[gone * 1000 - 7], bits=2,
        deleted=keyed.keys[:gone],
    )  # fmt: skip
    return crf.State(tables=tables, tensors=state.tensors)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and two increments over it of which the second holds rows that are recent and rows that are not."""
    path = tmp_path_factory.mktemp("varied") / "run"
    run = crf.open_run(path, mode="a", chunk_bytes=100, durable=False)
    state = first_state()
    run.save(state)
    run.save(second_state(state, 2, 3, 9), parent=1)
    run.save(second_state(state, 4, 5, 20, 29), parent=1)
    again = crf.open_run(path, mode="a", chunk_bytes=1 << 14, durable=False)
    again.restore()
    fourth = second_state(state, 1)
    fourth.tables["long"].changed = np.flatnonzero(RNG.integers(0, 4, 2000) == 0)
    again.save(fourth, parent="latest")
    return path


def arrays_of(run: crf.Run) -> Iterator[tuple[str, ArrayEntry]]:
    """Key, relative to the run, and entry of every array of every checkpoint."""
    for checkpoint in run.log():
        stored = checkpoint._stored
        for writer in range(len(stored.manifest.writers)):
            document = stored.part_file(writer)
            for index, block in enumerate(document.blocks):
                for name, entry in block.arrays.items():
                    yield stored.place(f"{layout.block_group(writer, index)}/{name}"), entry
            for name, entry in document.dense.items():
                yield stored.place(f"{layout.dense_group(writer)}/{name}"), entry


def ours(run: crf.Run, key: str, entry: ArrayEntry) -> Array:
    return ChunkReader(run._store).rows(key, entry, 0, entry.shape[0], shared=False)


def by_zarr(path: Path) -> Array:
    return np.asarray(zarr.open_array(LocalStore(path, read_only=True), mode="r", zarr_format=3)[...])


def by_tensorstore(path: Path, **spec: Any) -> Array:
    opened = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, **spec}, read=True
    ).result()
    return np.asarray(opened.read().result())


def test_every_kind_of_array_is_there(path: Path) -> None:
    found = dict(arrays_of(crf.open_run(path)))
    names = {key.rpartition("/")[2].rpartition(".")[2] for key in found}
    assert {"codes", "qparams", "values", "exact_index", "exact_values"} <= names
    assert {"rows", "rows_first", "recent", "deleted", "blob", *dtypes.STORED} <= names
    assert {entry.compression for entry in found.values()} == {None, "zstd", "blosc"}
    assert {entry.dtype for entry in found.values()} == set(dtypes.STORED.values())
    qparams = {entry.dtype for key, entry in found.items() if key.endswith("qparams")}
    assert qparams == {"float16", "float32"}
    assert max(layout.chunk_count(entry.shape[0], entry.chunk_rows) for entry in found.values()) > 10


def test_zarr_python(path: Path) -> None:
    """ZAR-2 and ZAR-3 as zarr-python reads them, padding of the last chunk cut off (ZAR-4)."""
    run = crf.open_run(path)
    for key, entry in arrays_of(run):
        found = by_zarr(path / key)
        assert found.shape == tuple(entry.shape)
        assert same_bits(found, ours(run, key, entry)), key


def test_tensorstore(path: Path) -> None:
    run = crf.open_run(path)
    for key, entry in arrays_of(run):
        found = by_tensorstore(path / key)
        assert found.shape == tuple(entry.shape)
        assert same_bits(found, ours(run, key, entry)), key


def test_the_checkpoint_as_a_zarr_group(path: Path) -> None:
    """ZAR-1: every group and array has its own `zarr.json`; nothing but the part file is needed to find them."""
    run = crf.open_run(path)
    for checkpoint in run.log():
        group = checkpoint.zarr()
        assert group.read_only
        assert dict(group.attrs) == {}
        with pytest.warns(ZarrUserWarning, match=r"manifest\.json|parts-0\.json\.gz"):  # no Zarr objects: passed over
            members = dict(group.members(max_depth=None))
        prefix = f"{checkpoint._stored.prefix}/"
        entries = {key.removeprefix(prefix): entry for key, entry in arrays_of(run) if key.startswith(prefix)}
        arrays = {name: member for name, member in members.items() if isinstance(member, zarr.Array)}
        assert set(arrays) == set(entries)
        assert set(members) - set(arrays) == {name.partition("/")[0] for name in arrays}
        for name, array in arrays.items():
            assert same_bits(np.asarray(array[...]), ours(run, prefix + name, entries[name]))
            assert array.metadata.to_dict()["fill_value"] in (0, (0.0, 0.0))


def test_dense_tensors_are_slices_of_flat_arrays(path: Path) -> None:
    """5.4, TEN-1: with the manifest and any Zarr reader, a tensor's bits are at hand; those of bool are 0 and 1."""
    checkpoint = crf.open_run(path)[1]
    group = checkpoint.zarr()
    wanted = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    for entry in checkpoint._stored.manifest.tensors:
        size = int(np.prod(entry.shape))
        if size:
            array = group[f"dense-{entry.writer}/{entry.dtype}"]
            assert isinstance(array, zarr.Array)
            flat = np.asarray(array[entry.offset : entry.offset + size])
            assert flat.dtype == dtypes.STORED[entry.dtype]
            assert same_bits(flat.view(dtypes.logical(entry.dtype)).reshape(entry.shape), wanted[entry.name])
    assert wanted["bfloat16"].dtype == ml_dtypes.bfloat16
    assert wanted["one"] == 3
    assert wanted["none"].shape == (0,)


@pytest.fixture
def broken(tmp_path: Path) -> tuple[crf.Run, str]:
    """A small run, and the key of an array of several chunks."""
    run = crf.open_run(tmp_path, mode="a", chunk_bytes=64, durable=False)
    run.save(crf.State(tables={"t": crf.Table({"w": np.arange(80, dtype=np.float32).reshape(20, 4)})}))
    (key,) = [key for key, _ in arrays_of(run) if key.endswith("w.values")]
    return run, key


def test_an_altered_chunk_is_refused_by_all(broken: tuple[crf.Run, str], tmp_path: Path) -> None:
    """ZAR-3: the checksum is Zarr's own codec."""
    run, key = broken
    chunk = tmp_path / key / "c" / "1" / "0"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        by_zarr(tmp_path / key)
    with pytest.raises(ValueError, match="DATA_LOSS"):
        by_tensorstore(tmp_path / key)
    with pytest.raises(DamagedError) as caught:
        run[1].table("t").read()
    assert caught.value.place == f"{key}/c/1/0"


def test_a_missing_chunk_is_refused_by_ours_only(broken: tuple[crf.Run, str], tmp_path: Path) -> None:
    """ZAR-4: to Zarr it is all zeros, unless tensorstore is told otherwise; to a reader of this format it is damage."""
    run, key = broken
    (tmp_path / key / "c" / "1" / "0").unlink()
    assert (by_zarr(tmp_path / key)[4:8] == 0).all()
    assert (by_tensorstore(tmp_path / key)[4:8] == 0).all()
    with pytest.raises(ValueError, match="missing"):
        by_tensorstore(tmp_path / key, fill_missing_data_reads=False)
    with pytest.raises(DamagedError) as caught:
        run[1].table("t").read()
    assert caught.value.place == f"{key}/c/1/0"


def test_zeros_are_stored_too(tmp_path: Path) -> None:
    """ZAR-4: also a chunk of nothing but the fill value is there."""
    run = crf.open_run(tmp_path, mode="a", chunk_bytes=64, durable=False)
    run.save(crf.State(tables={"t": crf.Table({"w": np.zeros((20, 4), np.float32)})}, tensors={"z": np.zeros(100)}))
    for key, entry in arrays_of(run):
        chunks = [path for path in (tmp_path / key / "c").rglob("*") if path.is_file()]
        assert len(chunks) == layout.chunk_count(entry.shape[0], entry.chunk_rows)
        assert not by_tensorstore(tmp_path / key, fill_missing_data_reads=False).any()
