"""One writer of one attempt: parts, tensors and blobs in, objects and a part list out (FORMAT.md 5.5, 6)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from checkrun_format import blocks, chunks, dlpack, dtypes, layout, quantize
from checkrun_format.blocks import BlockLayout, EncodedRows, FieldLayout, FieldPlan, Member, PlainRows, Pool
from checkrun_format.dlpack import Array
from checkrun_format.manifest import (
    ArrayEntry,
    BlockEntry,
    BlockField,
    Digest,
    PartFile,
    Record,
    digest_of,
)
from checkrun_format.partfile import pack_parts
from checkrun_format.rows import Ids, Mask
from checkrun_format.stores import Buffer, Store
from checkrun_format.workers import Workers

CHUNK_BYTES = 16 << 20
"""Default size of the largest chunk of a block."""

_SMALL_BYTES = 4 << 20
"""Source bytes up to which a part shares a block with others."""

_POOL_BYTES = 64 << 20
"""Bytes that wait in pools together, before the block of the largest is written."""

_PIECE_BYTES = 16 << 20
"""Source bytes that are gathered and encoded at a time."""

Fetch: TypeAlias = Callable[[int, int], Mapping[str, Any]]
"""Rows low..high-1 of a part, by field."""


class PartList(Record, frozen=True, kw_only=True):
    """What one writer tells the coordinator: its part file, and what follows from it. JSON-able."""

    file: Digest
    document: PartFile
    stored_bytes: int
    tensors: list[dict[str, Any]]
    blobs: list[dict[str, Any]]
    tables: list[dict[str, Any]]
    statistics: dict[str, dict[str, dict[str, Any]]]
    extra: dict[str, int] | None = None
    """Where the trainer's state stands, if this writer stored it."""


class Objects:
    """The objects of one attempt: stored by a few threads, counted. What `put` is given is read until `wait`."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self.workers = Workers.of(store)
        self._sizes: list[int] = []

    def put(self, name: str, buffers: Iterable[Buffer], held_bytes: int = 0) -> None:
        """Store one object under the attempt, soon."""
        key = f"{self.prefix}/{name}"
        self.workers.submit(held_bytes, lambda: self._sizes.append(self.store.put(key, buffers)))

    def wait(self) -> int:
        """Return once everything is stored; how many bytes it is."""
        self.workers.wait()
        return sum(self._sizes)

    def put_array(self, name: str, entry: ArrayEntry) -> ArrayEntry:
        """Store an array's metadata; its entry, with room for the checksums of its chunks."""
        document = layout.array_document(
            name.rpartition("/")[2], entry.dtype, tuple(entry.shape), entry.chunk_rows, entry.compression
        )
        self.put(f"{name}/zarr.json", [document])
        return msgspec.structs.replace(entry, checksums=[0] * layout.chunk_count(entry.shape[0], entry.chunk_rows))

    def put_chunk(self, name: str, entry: ArrayEntry, index: int, values: npt.NDArray[Any]) -> None:
        """Store one chunk of an array; its checksum is in the entry after `wait`."""
        assert entry.checksums is not msgspec.UNSET
        buffers = chunks.encode(values, entry, functools.partial(entry.checksums.__setitem__, index))
        self.put(f"{name}/{layout.chunk_name(index, len(entry.shape))}", buffers, values.nbytes)

    def put_whole(self, name: str, values: npt.NDArray[Any], chunk_bytes: int, compression: str | None) -> ArrayEntry:
        """Store an array that is in memory, cut on its own."""
        size = int(values.itemsize * np.prod(values.shape[1:], dtype=object))
        chunk_rows = layout.balanced_chunk_rows(len(values), size, chunk_bytes)
        entry = self.put_array(name, chunks.entry_for(values.dtype.name, values.shape, chunk_rows, compression))
        for index in range(layout.chunk_count(len(values), chunk_rows)):
            self.put_chunk(name, entry, index, values[index * chunk_rows : (index + 1) * chunk_rows])
        return entry


class BlockWriter:
    """Writes the arrays of one block of n rows, chunk by chunk."""

    def __init__(self, objects: Objects, group: str, block: BlockLayout, rows: int, chunk_bytes: int) -> None:
        self._objects = objects
        self._group = group
        self._layout = block
        self._rows = rows
        self._chunk_bytes = chunk_bytes
        self.chunk_rows = layout.balanced_chunk_rows(rows, block.widest, chunk_bytes) if rows else 0
        self._arrays: dict[str, ArrayEntry] = {}
        self._written = 0
        self._first_rows: list[int] = []
        self._exact: dict[str, list[tuple[Ids, npt.NDArray[Any]]]] = {f.name: [] for f in block.fields}
        objects.put(f"{group}/zarr.json", [layout.group_document()])

    def add(self, encoded: EncodedRows) -> None:
        """Write the next chunk: `chunk_rows` rows, fewer only in the last one."""
        if encoded.rows is not None:
            self._first_rows.append(int(encoded.rows[0]))
            self._put("rows", encoded.rows)
        for f in encoded.fields:
            for name, values in f.arrays.items():
                self._put(f"{f.layout.name}.{name}", values, f.layout)
            if f.exact_index.size:
                self._exact[f.layout.name].append((f.exact_index + self._written, f.exact_values))
        self._written += encoded.count

    def _put(self, name: str, values: npt.NDArray[Any], of: FieldLayout | None = None) -> None:
        if name not in self._arrays:
            shape = (self._rows, *values.shape[1:])
            compression = chunks.smaller_compression(values) if of is None else _compression_of(of, name)
            entry = chunks.entry_for(values.dtype.name, shape, self.chunk_rows, compression)
            self._arrays[name] = self._objects.put_array(f"{self._group}/{name}", entry)
        index = self._written // self.chunk_rows
        self._objects.put_chunk(f"{self._group}/{name}", self._arrays[name], index, values)

    def _put_whole(self, name: str, values: npt.NDArray[Any], compression: str | None = None) -> None:
        self._arrays[name] = self._objects.put_whole(f"{self._group}/{name}", values, self._chunk_bytes, compression)

    def finish(self, recent: Mask | None, deleted: Ids) -> BlockEntry:
        """Write what is cut on its own; return the block's entry."""
        if self._first_rows:
            self._put_whole("rows_first", np.array(self._first_rows, np.int64))
        for name, exact in self._exact.items():
            if exact:
                self._put_whole(f"{name}.exact_index", np.concatenate([index for index, _ in exact]))
                self._put_whole(f"{name}.exact_values", np.concatenate([values for _, values in exact]))
        if recent is not None:
            self._put_whole("recent", np.packbits(recent, bitorder="little"))
        if deleted.size:
            self._put_whole("deleted", deleted, chunks.smaller_compression(deleted[: 1 << 20]))
        return BlockEntry(rows=self._rows, fields=[_block_field(f) for f in self._layout.fields], arrays=self._arrays)


def _compression_of(of: FieldLayout, array: str) -> str | None:
    """ZAR-6."""
    return "zstd" if array.endswith(".codes") and (of.bits or 8) <= 2 else None


def _block_field(f: FieldLayout) -> BlockField:
    return BlockField(name=f.name, encoding=f.encoding, columns=f.columns, bits=f.bits, dtype=f.stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSource:
    """One part to be stored.

    `first_row` or `rows` (ascending) says which rows; `fetch` gives their values, which change with the next call if
    they are `transient`, and of which some may be `quantized` already; `recent` is one flag for all rows or a mask;
    `deleted` are tombstones, ascending.
    """

    table: str
    plans: Sequence[FieldPlan]
    count: int
    fetch: Fetch
    transient: bool = False
    quantized: bool = False
    first_row: int = -1
    rows: Ids | None = None
    recent: bool | Mask = True
    deleted: Ids = field(default_factory=lambda: np.zeros(0, np.int64))


class Writer:
    """Stores parts, tensors and blobs of one attempt under one writer's number.

    Parameters
    ----------
    store, prefix
        Where; `prefix` is the attempt's.
    number : int
        The writer's number w, from 0.
    chunk_bytes : int
        Size of the largest chunk.
    """

    def __init__(self, store: Store, prefix: str, number: int, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._objects = Objects(store, prefix)
        self._prefix = prefix
        self._number = number
        self._chunk_bytes = chunk_bytes
        self._tables: dict[str, int] = {}
        self._blocks: list[BlockEntry] = []
        self._parts: list[list[int]] = []
        self._pools: dict[Hashable, Pool] = {}
        self._waiting = 0
        self._dense: dict[str, list[Array]] = {}
        self._dense_sizes: dict[str, int] = {}
        self._tensors: list[dict[str, Any]] = []
        self._blobs: list[dict[str, Any]] = []
        self._extra: dict[str, int] | None = None
        self._statistics: dict[str, dict[str, dict[str, Any]]] = {}

    def __enter__(self) -> Self:
        self._objects.workers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave when nothing of it is being stored any more."""
        self._objects.workers.__exit__(kind, error, trace)

    def wait(self) -> None:
        """Return once no memory of a caller is read any more, tensors apart."""
        self._objects.wait()

    def put_part(self, part: PartSource) -> None:
        """Store one part; small ones wait in pools, so many bytes of them, or until `finish`.

        The arrays that the part's `fetch` gives are read until `wait` or `finish`.
        """
        if part.count == 0 and part.deleted.size == 0:
            return
        size = part.count * sum(plan.row_bytes for plan in part.plans)
        if size > _SMALL_BYTES or part.quantized:
            self._put_large(part)
            return
        plans = part.plans if part.count else ()
        key = (part.rows is not None and part.count > 0, *(plan.having(start=0) for plan in plans))
        pool = self._pools.setdefault(key, Pool(plans=plans))
        if part.count:
            values = {name: dlpack.copied(array) for name, array in part.fetch(0, part.count).items()}
            pool.plain.append(PlainRows(count=part.count, values=values, rows=part.rows))
        self._add_member(pool, member_of(part), size + part.deleted.nbytes)

    def put_encoded(self, table: str, encoded: EncodedRows, first_row: int, columns: Sequence[int]) -> None:
        """Store rows that are already encoded, none of them recent (CMP-2)."""
        pool = self._pools.setdefault(encoded.layout, Pool(plans=()))
        pool.encoded.append(blocks.copied(encoded))
        nothing = np.zeros(0, np.int64)
        member = Member(
            table=table, first_row=first_row, count=encoded.count, columns=columns, recent=False, deleted=nothing
        )
        self._add_member(pool, member, encoded.nbytes)

    def _add_member(self, pool: Pool, member: Member, size: int) -> None:
        pool.members.append(member)
        pool.bytes += size
        self._waiting += size
        while self._waiting >= _POOL_BYTES:
            largest = max(self._pools, key=lambda key: self._pools[key].bytes)
            self._waiting -= self._pools[largest].bytes
            self._flush(self._pools.pop(largest))

    def put_tensor(self, name: str, values: Array) -> None:
        """Store a dense tensor; its memory is read until `finish`."""
        dtype = dtypes.name_of(values.dtype)
        flat = dlpack.flat(values)
        offset = self._append(dtype, flat) if flat.size else 0
        writer = self._number if flat.size else 0
        shape = [int(n) for n in values.shape]
        self._tensors.append({"name": name, "dtype": dtype, "shape": shape, "writer": writer, "offset": offset})

    def put_blob(self, name: str, data: bytes) -> None:
        """Store opaque bytes."""
        self._blobs.append({"name": name, **self.put_span(data)})

    def put_extra(self, data: bytes) -> None:
        """Store the trainer's state that is too large for the manifest."""
        self._extra = self.put_span(data)

    def put_span(self, data: bytes) -> dict[str, int]:
        """Store bytes in the `blob` array; return where."""
        offset = self._append("blob", np.frombuffer(data, np.uint8)) if data else 0
        return {"writer": self._number if data else 0, "offset": offset, "bytes": len(data)}

    def _append(self, array: str, values: Array) -> int:
        offset = self._dense_sizes.get(array, 0)
        self._dense.setdefault(array, []).append(values)
        self._dense_sizes[array] = offset + values.size
        return offset

    def finish(self, tables: Sequence[dict[str, Any]] = ()) -> PartList:
        """Write what still waits, then the part file; make all of it durable.

        Parameters
        ----------
        tables : sequence
            Table entries to be handed to the coordinator.
        """
        for pool in self._pools.values():
            self._flush(pool)
        self._pools = {}
        document = PartFile(
            writer=self._number,
            attempt=self._prefix.rpartition("/")[2],
            tables=list(self._tables),
            blocks=self._blocks,
            parts=self._parts,
            dense=self._write_dense(),
        )
        self._objects.wait()  # for the checksums
        data = pack_parts(document)
        self._objects.put(layout.part_file(self._number), [data])
        stored_bytes = self._objects.wait()
        self._objects.store.sync(self._prefix)
        return PartList(
            file=digest_of(data),
            document=document,
            stored_bytes=stored_bytes,
            tensors=self._tensors,
            blobs=self._blobs,
            tables=list(tables),
            statistics=self._statistics,
            extra=self._extra,
        )

    def _put_large(self, part: PartSource) -> None:
        """A part with a block of its own, encoded chunk by chunk."""
        encoder = blocks.Encoder(plans=part.plans)
        widest = BlockLayout(fields=tuple(plan.layout() for plan in part.plans), listed=part.rows is not None).widest
        chunk_rows = layout.balanced_chunk_rows(part.count, widest, self._chunk_bytes)
        block: BlockWriter | None = None
        for low in range(0, part.count, chunk_rows):
            encoded = blocks.join(list(_pieces(part, encoder, low, min(low + chunk_rows, part.count))))
            self._tell(part.table, part.plans, encoded, 0, encoded.count)
            block = block or self._open_block(encoded.layout, part.count)
            block.add(encoded)
        assert block is not None
        self._close_block(block, [member_of(part)])

    def _open_block(self, block: BlockLayout, rows: int) -> BlockWriter:
        group = layout.block_group(self._number, len(self._blocks))
        return BlockWriter(self._objects, group, block, rows, self._chunk_bytes)

    def _flush(self, pool: Pool) -> None:
        """Write the parts of a pool as one block."""
        if pool.encoded:
            block = self._open_block(pool.encoded[0].layout, sum(member.count for member in pool.members))
            self._add_rows(block, pool.taken())
        else:
            whole = pool.whole()
            block = self._open_block(whole.layout, whole.count)
            self._add_rows(block, [whole])
            offset = 0
            for member in pool.members:
                self._tell(member.table, pool.plans, whole, offset, offset + member.count)
                offset += member.count
        self._close_block(block, pool.members)

    def _add_rows(self, block: BlockWriter, pieces: Iterable[EncodedRows]) -> None:
        for chunk in blocks.recut(pieces, block.chunk_rows or 1):
            block.add(chunk)

    def _close_block(self, block: BlockWriter, members: Sequence[Member]) -> None:
        offset = deleted_offset = 0
        for member in members:
            table = self._tables.setdefault(member.table, len(self._tables))
            where = [table, len(self._blocks), offset, member.count, member.first_row, member.code]
            self._parts.append([*where, deleted_offset, int(member.deleted.size), *member.columns])
            offset += member.count
            deleted_offset += int(member.deleted.size)
        self._blocks.append(block.finish(_recent_bits(members), np.concatenate([m.deleted for m in members])))

    def _tell(self, table: str, plans: Sequence[FieldPlan], encoded: EncodedRows, low: int, high: int) -> None:
        """Count exact rows among rows low..high-1, and add up errors, for the encoder's entry in the manifest."""
        for plan, f in zip(plans, encoded.fields, strict=False):
            if plan.bits is None and plan.store_as is None:
                continue
            first, last = np.searchsorted(f.exact_index, [low, high])
            method = {"name": plan.stored} if plan.bits is None else quantize.method(plan.encoder, plan.bits).told()
            told = self._statistics.setdefault(table, {}).setdefault(plan.name, {**method, "bits": plan.bits})
            begin, end = np.searchsorted(f.sampled, [low, high])
            more: dict[str, Any] = {"exact_rows": int(last - first)}
            if plan.bits is not None:
                told["qparams"] = f.layout.qparams
                more["error_bound"] = f.error_bound
                error, norm = (float(n) for n in f.l2[begin:end].sum(0))
                more["sample"] = {"rows": int(end - begin), "l2_error": error, "l2": norm}
            add_statistics(told, more)

    def _write_dense(self) -> dict[str, ArrayEntry]:
        group = layout.dense_group(self._number)
        if self._dense:
            self._objects.put(f"{group}/zarr.json", [layout.group_document()])
        entries = {}
        for name, arrays in self._dense.items():
            entries[name] = self._write_flat(f"{group}/{name}", arrays, self._dense_sizes[name])
        return entries

    def _write_flat(self, name: str, arrays: Sequence[Array], total: int) -> ArrayEntry:
        chunk_rows = layout.balanced_chunk_rows(total, arrays[0].itemsize, self._chunk_bytes)
        entry = self._objects.put_array(name, chunks.entry_for(arrays[0].dtype.name, (total,), chunk_rows))
        for index, values in enumerate(_recut(arrays, chunk_rows)):
            self._objects.put_chunk(name, entry, index, values)
        return entry


def add_statistics(told: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add to what is told of an encoder: exact rows and sums over a sample of rows add up, bounds do not."""
    told["exact_rows"] = told.get("exact_rows", 0) + more["exact_rows"]
    if "error_bound" in more:
        told["error_bound"] = max(told.get("error_bound", 0.0), more["error_bound"])
        sums = told.get("sample", {})
        told["sample"] = {name: sums.get(name, 0) + value for name, value in more["sample"].items()}


def member_of(part: PartSource) -> Member:
    """A part as its block's entry knows it; one of tombstones only has no rows and no columns."""
    return Member(
        table=part.table,
        first_row=part.first_row if part.count else -1,
        count=part.count,
        columns=[plan.start for plan in part.plans] if part.count else [],
        recent=part.recent if part.count else False,
        deleted=part.deleted,
    )


def _pieces(part: PartSource, encoder: blocks.Encoder, low: int, high: int) -> Iterator[EncodedRows]:
    """Rows low..high-1, encoded in pieces where that takes memory beside theirs; raw rows are not cut."""
    in_memory = part.rows is None and not part.transient and all(plan.device is None for plan in part.plans)
    source = max(1, sum(plan.row_bytes for plan in part.plans if plan.bits is not None))
    step = high - low if in_memory else max(1, _PIECE_BYTES // source)
    for start in range(low, high, step):
        stop = min(start + step, high)
        rows = None if part.rows is None else part.rows[start:stop]
        yield encoder.encode(_fetched(part, start, stop), rows)


def _fetched(part: PartSource, low: int, high: int) -> Mapping[str, Any]:
    """Values of some rows that stay as they are until they are stored; what is on a device is copied by encoding it."""
    values = dict(part.fetch(low, high))
    if part.transient:
        as_given = [plan.name for plan in part.plans if not plan.lossy and plan.device is None]
        values = values | {name: dlpack.copied(values[name]) for name in as_given}
    return values


def _recent_bits(members: Sequence[Member]) -> Mask | None:
    """The `recent` bits of a block, None if no part says 2 (PRT-2, BLK-4)."""
    if all(member.code != 2 for member in members):
        return None
    bits = [np.asarray(m.recent) if m.code == 2 else np.zeros(m.count, np.bool_) for m in members]
    return np.concatenate(bits)


def _recut(arrays: Sequence[Array], size: int) -> Iterator[npt.NDArray[Any]]:
    """The concatenation of flat arrays in pieces of `size` elements; views where a piece lies in one array here."""
    waiting: list[npt.NDArray[Any]] = []
    held = 0
    for array in arrays:
        start = 0
        while start < array.size:
            take = dlpack.on_host(array[start : start + size - held])
            waiting.append(take)
            held += take.size
            start += take.size
            if held == size:
                yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
                waiting, held = [], 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)


def objects_of(document: PartFile) -> list[str]:
    """Every object that a part file implies, itself apart, relative to the attempt."""
    names = []
    for index, block in enumerate(document.blocks):
        group = layout.block_group(document.writer, index)
        names.append(f"{group}/zarr.json")
        for array, entry in block.arrays.items():
            names.extend(chunks.object_names(f"{group}/{array}", entry))
    if document.dense:
        group = layout.dense_group(document.writer)
        names.append(f"{group}/zarr.json")
        for array, entry in document.dense.items():
            names.extend(chunks.object_names(f"{group}/{array}", entry))
    return names
