"""What a save would store, and how large that would be, before anything is encoded or written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkrun_format import chunks, dtypes, layout, packing, quantize
from checkrun_format.blocks import BlockLayout, FieldPlan, Pool
from checkrun_format.dlpack import Array
from checkrun_format.manifest import ArrayEntry
from checkrun_format.rows import Ids
from checkrun_format.stores import Buffer, Store
from checkrun_format.writer import BlockWriter, PartSource, Writer, member_of

_SAMPLE = 1 << 17
"""Row numbers that are compressed to learn how small all of them get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlanned:
    """How a save would store one table."""

    name: str
    storage: str
    """`full`, `changed` or `unchanged`."""
    rows: int
    """Rows of the table, or live keys."""
    stored_rows: int
    """Rows that would be stored."""
    deleted: int
    """Tombstones that would be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What a save would do; from `Run.plan_save`."""

    kind: str
    """`base` or `increment`."""
    sequence: int
    """The number that it would claim."""
    parent: int | None
    policy: str
    """Who decides: the policy, or `caller`."""
    reason: str
    tables: tuple[TablePlanned, ...]
    stored_bytes: int
    """As of `Checkpoint.stored_bytes`, but for what only encoding tells: exact rows are left out, codes of 1 and 2 bits
    are taken as incompressible, long lists of rows are judged by a sample."""
    objects: int
    """Objects that would be created, the commit included; exact up to arrays of exact rows."""
    free_bytes: int | None
    """What the store has left, None if it cannot tell."""

    @property
    def fits(self) -> bool | None:
        """Whether the store has room for it, None if it cannot tell."""
        return None if self.free_bytes is None else self.stored_bytes <= self.free_bytes


class Scale(Store):
    """Weighs what it is given and keeps nothing."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, key: str) -> bytes | None:  # noqa: ARG002
        """Nothing."""
        return None

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:  # noqa: ARG002
        """Weigh the object."""
        return sum(len(buffer) for buffer in buffers)

    def create(self, key: str, data: bytes) -> None:
        """Never called: a plan is not committed."""
        raise NotImplementedError

    def replace(self, key: str, data: bytes) -> None:
        """Never called."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        """Never called."""
        raise NotImplementedError

    def folders(self) -> list[str] | None:
        """Nothing."""
        return []

    def list(self, prefix: str) -> dict[str, int]:  # noqa: ARG002
        """Nothing."""
        return {}

    def sync(self, prefix: str) -> None:
        """Nothing is there to be synced."""


class Absent:
    """So many bytes, which are not there."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class Forecaster(Writer):
    """Cuts parts into blocks as a writer does, and weighs the blocks by the widths of their arrays.

    No value of a table or tensor is asked for.
    """

    def put_part(self, part: PartSource) -> None:
        """Count one part."""
        super().put_part(dataclasses.replace(part, fetch=_nothing))

    def _put_large(self, part: PartSource) -> None:
        self._foresee(part.table, part.plans)
        block = self._expect(part.plans, part.count, [] if part.rows is None else [part.rows])
        self._close_block(block, [member_of(part)])

    def _write_flat(self, name: str, arrays: Sequence[Array], total: int) -> ArrayEntry:
        chunk_rows = layout.balanced_chunk_rows(total, arrays[0].itemsize, self._chunk_bytes)
        entry = self._objects.put_array(name, chunks.entry_for(arrays[0].dtype.name, (total,), chunk_rows))
        size = entry.chunk_rows * arrays[0].itemsize + 4
        for index in range(layout.chunk_count(total, entry.chunk_rows)):
            self._objects.put(f"{name}/c/{index}", [Absent(size)])  # type: ignore[list-item]
        return entry

    def _flush(self, pool: Pool) -> None:
        for member in pool.members:
            self._foresee(member.table, pool.plans)
        listed = [plain.rows for plain in pool.plain if plain.rows is not None]
        block = self._expect(pool.plans, sum(plain.count for plain in pool.plain), listed)
        self._close_block(block, pool.members)

    def _expect(self, plans: Sequence[FieldPlan], count: int, listed: Sequence[Ids]) -> BlockForecaster:
        fields = tuple(plan.layout() for plan in plans)
        block = BlockLayout(fields=fields, listed=bool(listed))
        group = layout.block_group(self._number, len(self._blocks))
        made = BlockForecaster(self._objects, group, block, count, self._chunk_bytes)
        made.expect(np.concatenate(listed) if listed else None)
        return made

    def _foresee(self, table: str, plans: Sequence[FieldPlan]) -> None:
        """What the encoders will tell for the manifest, as far as its length goes."""
        for plan in plans:
            if plan.lossy:
                method = {"name": plan.stored} if plan.bits is None else quantize.method(plan.encoder, plan.bits).told()
                told: dict[str, Any] = {**method, "bits": plan.bits, "exact_rows": 0}
                if plan.bits is not None:
                    told |= {"qparams": plan.qparams or "float16", "error_bound": 1 / 3}
                    told["sample"] = {"rows": 3, "l2_error": 1.0, "l2": 1.0}
                self._statistics.setdefault(table, {})[plan.name] = told


class BlockForecaster(BlockWriter):
    """Weighs the row-aligned arrays of a block of n rows without having them."""

    def expect(self, rows: Ids | None) -> None:
        """Count the arrays of all fields, and the list of rows."""
        for f in self._layout.fields:
            if f.encoding == "affine":
                width = packing.packed_width(f.columns or 1, f.bits or 8)
                self._weigh(f"{f.name}.codes", "uint8", (width,), "zstd" if (f.bits or 8) <= 2 else None)
                self._weigh(f"{f.name}.qparams", f.qparams or "float16", (2,))
            else:
                stored = dtypes.STORED[f.stored or f.dtype]
                self._weigh(f"{f.name}.values", stored, () if f.columns is None else (f.columns,))
        if rows is not None:
            self._first_rows = rows[:: self.chunk_rows].tolist()
            compression = chunks.smaller_compression(rows[: self.chunk_rows][:_SAMPLE])
            self._weigh("rows", "int64", (), compression, _compressed_share(rows, compression))

    def _weigh(
        self, name: str, dtype: str, width: tuple[int, ...], compression: str | None = None, share: float = 1.0
    ) -> None:
        entry = chunks.entry_for(dtype, (self._rows, *width), self.chunk_rows, compression)
        self._arrays[name] = self._objects.put_array(f"{self._group}/{name}", entry)
        count = layout.chunk_count(self._rows, self.chunk_rows)
        payload = self._rows if share < 1 else count * self.chunk_rows  # padding compresses to nearly nothing
        size = round(payload * chunks.row_bytes(entry) * share) + 4 * count
        self._objects.put(f"{self._group}/{name}/c", [Absent(size)])  # type: ignore[list-item]


def _compressed_share(rows: Ids, compression: str) -> float:
    sample = np.ascontiguousarray(rows[:_SAMPLE])
    return len(chunks.compress(sample.tobytes(), compression, sample.itemsize)) / sample.nbytes


def _nothing(low: int, high: int) -> dict[str, Any]:  # noqa: ARG001 - as every fetch
    return {}
