"""What several property tests draw from: stores in memory, kinds of tables, their values, and ways to cut rows."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import checkrun_format as crf
from checkrun_format import dtypes
from checkrun_format.errors import StorageError
from checkrun_format.stores import AlreadyExistsError, Buffer, Store

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Fields = dict[str, Array]

KEYS = (*range(-4, 12), -(2**63), 2**63 - 1, 2**62, -(2**40))
"""The keys that keyed tables of tests are made of: few, so that the same ones come and go."""


class MemoryStore(Store):
    """A store in memory (STO-1, STO-2)."""

    def __init__(self) -> None:
        self.url = "memory"
        self.durable = False
        self.objects: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        if key in self.objects:
            raise StorageError(errno.EEXIST, f"{key} is there already")
        self.objects[key] = b"".join(bytes(buffer) for buffer in buffers)
        return len(self.objects[key])

    def create(self, key: str, data: bytes) -> None:
        if key in self.objects:
            raise AlreadyExistsError(key)
        self.objects[key] = data

    def replace(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def folders(self) -> list[str] | None:
        return list({key.partition("/")[0] for key in self.objects})

    def list(self, prefix: str) -> dict[str, int]:
        return {key: len(data) for key, data in self.objects.items() if key.startswith(f"{prefix}/")}

    def sync(self, prefix: str) -> None:
        """Memory survives nothing; there is nothing to do."""

    def dump(self, folder: Path) -> None:
        """Write all objects as files: the same run (STO-4), for readers of files."""
        for key, data in self.objects.items():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(data)


class SlowStore(MemoryStore):
    """Takes an object's bytes a while after it was given them."""

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        time.sleep(0.003)
        return super().put(key, buffers)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a table is: its addressing and its fields.

    `weight` may be quantized, `slow` stored narrower; `sum` and `moments` are always raw.
    """

    key_dtype: str | None = None
    weight: str = "float32"
    columns: int = 3
    moments: bool = False

    @property
    def keyed(self) -> bool:
        return self.key_dtype is not None


def kinds() -> st.SearchStrategy[Kind]:
    return st.builds(
        Kind,
        key_dtype=st.sampled_from([None, None, "int64", "uint64"]),
        weight=st.sampled_from(["float32", "float32", "float16", "bfloat16", "float64"]),
        columns=st.sampled_from([1, 3, 8]),
        moments=st.booleans(),
    )


def seeds() -> st.SearchStrategy[int]:
    """Seeds of random values: what they are matters less than where they go."""
    return st.integers(0, 2**16)


def values(kind: Kind, count: int, seed: int) -> Fields:
    """Random rows: moderate numbers, rows that cannot be quantized, and any bits at all in the raw fields."""
    rng = np.random.default_rng(seed)
    fields = {
        "weight": _weights(rng, count, kind.columns).astype(dtypes.logical(kind.weight)),
        "sum": rng.integers(0, 2**32, count, np.uint32).view(np.float32),
        "slow": (rng.normal(size=count) * 10.0 ** rng.integers(-6, 6, count)).astype(np.float32),
    }
    if kind.moments:
        fields["moments"] = rng.integers(-(2**15), 2**15, (count, 2), np.int16)
    return fields


def _weights(rng: np.random.Generator, count: int, columns: int) -> Array:
    rows = rng.normal(size=(count, columns))
    special = rng.integers(0, 12, count)
    rows[special == 0, 0] = np.nan
    rows[special == 1, -1] = np.inf
    rows[special == 2] = -0.0
    rows[special == 3] = 0.25
    rows[special == 4] = rows[special == 4] * 1e-3 + 900.0
    return rows


def joined(parts: Sequence[Fields]) -> Fields:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def taken(fields: Fields, at: Any) -> Fields:
    return {name: array[at] for name, array in fields.items()}


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays are the same to the last bit, NaN payloads and signs of zero included (TYP-1)."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def same_fields(one: Fields, other: Fields) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


@st.composite
def cuts(draw: st.DrawFn, size: int, most: int) -> list[tuple[int, int]]:
    """Ranges that follow one another and cover 0..size-1; some may be empty."""
    inner = sorted(draw(st.lists(st.integers(0, size), max_size=most - 1)))
    bounds = [0, *inner, size]
    return list(itertools.pairwise(bounds))


def check_raw_changes(checkpoint: crf.Checkpoint, since: int, max_bytes: int = 64 << 20) -> None:
    """What changed, as it is stored, decodes to what changed: the same rows, bits, tombstones and dropped tables."""
    plain = list(checkpoint.changes_since(since, max_bytes=max_bytes))
    stored = list(checkpoint.changes_since(since, raw=True, max_bytes=max_bytes))
    assert _told(plain) == _told(stored)
    assert _cells((c.table, c.rows, name, 0, values) for c in plain for name, values in c.fields.items()) == _cells(
        (c.table, c.rows, name, field.start, field.decode()) for c in stored for name, field in c.fields.items()
    )


def _told(batches: Sequence[crf.Changes]) -> dict[str, Any]:
    """What is known of each table apart from its rows, and in which order."""
    told: dict[str, Any] = {}
    for batch in batches:
        first = (batch.dropped, batch.table_rows, batch.key_dtype, batch.deleted.tolist())
        told.setdefault(f"{batch.table} {batch.dropped}", first)
    return told


def _cells(found: Iterable[tuple[str, Ids, str, int, Array]]) -> dict[str, tuple[list[Any], bytes]]:
    """Rows, columns and bits of the values of each field, by row and column; none twice."""
    gathered: dict[str, list[tuple[Ids, Ids, Array]]] = {}
    for table, rows, name, start, values in found:
        width = values.shape[1] if values.ndim == 2 else 1
        columns = np.tile(np.arange(start, start + width), len(rows))
        cells = np.repeat(rows, width), columns, np.ascontiguousarray(values).reshape(-1)
        gathered.setdefault(f"{table} {name} {values.dtype}", []).append(cells)
    sorted_cells = {}
    for name, pieces in gathered.items():
        rows, columns, values = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        order = np.lexsort((columns, rows))
        places = np.stack([rows[order], columns[order]], axis=1)
        assert (places[1:] != places[:-1]).any(axis=1).all()
        if len(rows):
            sorted_cells[name] = places.tolist(), values[order].tobytes()
    return sorted_cells
