"""Chunks that go straight from an array to a file are those that zarr-python writes under the same `zarr.json`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.buffer import cpu
from zarr.storage import MemoryStore

from checkrun_format import chunks, dtypes, layout
from checkrun_format.errors import DamagedError
from checkrun_format.manifest import ArrayEntry
from tests.property import strategies
from tests.property.strategies import Array, same_bits

STORED = sorted(set(dtypes.STORED.values()))


@st.composite
def arrays(draw: st.DrawFn) -> tuple[Array, ArrayEntry]:
    """Values of one array, any bits, and its entry in a part file."""
    dtype = np.dtype(draw(st.sampled_from(STORED)))
    shape = draw(st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 20), st.integers(1, 6))))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    data = rng.bytes(int(np.prod(shape)) * dtype.itemsize)
    values = np.frombuffer(data, dtype).reshape(shape)
    if draw(st.booleans()):
        values = np.zeros_like(values)
    compression = draw(st.sampled_from([None, None, "zstd", "blosc"]))
    return values, chunks.entry_for(dtype.name, shape, draw(st.integers(1, shape[0] + 3)), compression)


def document(entry: ArrayEntry) -> bytes:
    return layout.array_document("x.values", entry.dtype, tuple(entry.shape), entry.chunk_rows, entry.compression)


def opened(objects: dict[str, bytes], entry: ArrayEntry) -> tuple[zarr.Array[Any], dict[str, Any]]:
    """An array of these chunk objects, and the store in which zarr-python sees it."""
    store: dict[str, Any] = {key: cpu.Buffer.from_bytes(data) for key, data in objects.items()}
    store["zarr.json"] = cpu.Buffer.from_bytes(document(entry))
    array = zarr.open_array(MemoryStore(store), mode="r+", zarr_format=3)
    return array, store


def written_by_zarr(values: Array, entry: ArrayEntry) -> dict[str, bytes]:
    """The chunk objects that zarr-python makes of the values, by their keys."""
    with zarr.config.set({"array.write_empty_chunks": True}):
        array, store = opened({}, entry)
        array[...] = values
    return {key: buffer.to_bytes() for key, buffer in store.items() if key != "zarr.json"}


def written_by_us(values: Array, entry: ArrayEntry) -> dict[str, bytes]:
    count, step = layout.chunk_count(entry.shape[0], entry.chunk_rows), entry.chunk_rows
    return {
        layout.chunk_name(index, len(entry.shape)): b"".join(
            bytes(buffer) for buffer in chunks.encode(values[index * step : (index + 1) * step], entry)
        )
        for index in range(count)
    }


def read_by_us(objects: dict[str, bytes], entry: ArrayEntry) -> Array:
    count = layout.chunk_count(entry.shape[0], entry.chunk_rows)
    names = [layout.chunk_name(index, len(entry.shape)) for index in range(count)]
    return np.concatenate([chunks.decode(objects[name], entry, i, name) for i, name in enumerate(names)])


def read_straight(objects: dict[str, bytes], entry: ArrayEntry, *, columns_first: bool = False) -> Array:
    """All rows into one array that was there before: straight from the objects where that is possible."""
    store = strategies.MemoryStore()
    store.objects = {f"x/{name}": data for name, data in objects.items()}
    reader = chunks.ChunkReader(store)
    out = np.full(entry.shape, 7, entry.dtype, order="F" if columns_first else "C")
    for index in range(layout.chunk_count(entry.shape[0], entry.chunk_rows)):
        target = out[index * entry.chunk_rows : (index + 1) * entry.chunk_rows]
        reader.into("x", entry, index, slice(0, len(target)), target, shared=False)
    return out


class TestSameDocumentSameChunks:
    """ZAR-2, ZAR-3, ZAR-4: the direct path and a codec pipeline are two ways to one format."""

    @given(arrays())
    def test_written(self, given_array: tuple[Array, ArrayEntry]) -> None:
        """Byte for byte without compression; compressed, where the bytes are the compressor's, to the same values."""
        values, entry = given_array
        mine, theirs = written_by_us(values, entry), written_by_zarr(values, entry)
        assert mine.keys() == theirs.keys()
        if entry.compression is None:
            assert mine == theirs
        assert same_bits(read_by_us(mine, entry), values)

    @given(arrays())
    def test_theirs_read_by_us(self, given_array: tuple[Array, ArrayEntry]) -> None:
        values, entry = given_array
        theirs = written_by_zarr(values, entry)
        assert same_bits(read_by_us(theirs, entry), values)
        assert same_bits(read_straight(theirs, entry), values)
        assert same_bits(read_straight(theirs, entry, columns_first=True), values)

    @given(arrays())
    def test_ours_read_by_them(self, given_array: tuple[Array, ArrayEntry]) -> None:
        values, entry = given_array
        array, _ = opened(written_by_us(values, entry), entry)
        assert same_bits(np.asarray(array[...]), values)


@given(arrays(), st.data())
def test_an_altered_chunk_is_an_error_on_every_way(given_array: tuple[Array, ArrayEntry], data: st.DataObject) -> None:
    """ZAR-3, ZAR-4: flipped, cut, made longer or missing."""
    values, entry = given_array
    objects = written_by_us(values, entry)
    name = data.draw(st.sampled_from(sorted(objects)))
    place = data.draw(st.integers(0, len(objects[name]) - 1))
    flipped = objects[name][:place] + bytes([objects[name][place] ^ 4]) + objects[name][place + 1 :]
    for altered in (flipped, objects[name][:place], objects[name] + b"x", None):
        broken = {key: altered if key == name else value for key, value in objects.items()}
        left = {key: value for key, value in broken.items() if value is not None}
        with pytest.raises(DamagedError, match=rf"x/{name}"):
            read_straight(left, entry)


@given(arrays())
def test_the_document_is_one_that_zarr_python_would_write(given_array: tuple[Array, ArrayEntry]) -> None:
    """ZAR-2, ZAR-3: nothing of it is lost or altered when zarr-python parses and writes it again."""
    _, entry = given_array
    array, _ = opened({}, entry)
    theirs = json.loads(json.dumps(array.metadata.to_dict()))
    assert theirs.pop("storage_transformers") == []
    assert theirs == json.loads(document(entry))
