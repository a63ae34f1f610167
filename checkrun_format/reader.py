"""One stored checkpoint: its documents, checked, and its row chunks, decoded (FORMAT.md sections 5 to 7)."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dlpack, dtypes, layout
from checkrun_format import manifest as documents
from checkrun_format.chunks import ChunkReader, required, row_bytes
from checkrun_format.dlpack import Array
from checkrun_format.errors import (
    DamagedError,
    NotFoundError,
    TableNotFoundError,
    UnsupportedFeatureError,
)
from checkrun_format.manifest import (
    ArrayEntry,
    BlockEntry,
    BlockField,
    Commit,
    Field,
    PartFile,
    TableEntry,
    TensorEntry,
)
from checkrun_format.partfile import least_bytes, parse_parts
from checkrun_format.rows import Ids, Mask, Moves, Selection
from checkrun_format.stores import Store
from checkrun_format.structure import (
    Part,
    check_block,
    check_dense,
    check_size,
    check_table,
    part_problem,
)
from checkrun_format.workers import Workers

_READ_BYTES = 4 << 20
"""What is read at a time, and decoded while it is in the cache: less costs more calls than it saves misses."""

_READ_ROWS = 1 << 17


class StoredCheckpoint:
    """A committed checkpoint as it lies in the store. Documents are read and checked when first needed.

    Parameters
    ----------
    store : Store
    chunk_reader : ChunkReader
        Of the same store.
    commit : Commit
    commit_object : dict
        The commit's plain JSON values without `manifest` (MAN-1).
    """

    def __init__(self, store: Store, chunk_reader: ChunkReader, commit: Commit, commit_object: dict[str, Any]) -> None:
        self.store = store
        self._chunks = chunk_reader
        self.commit = commit
        self.prefix = layout.attempt_prefix(commit.sequence, commit.attempt)
        self._commit_object = commit_object

    def place(self, name: str) -> str:
        """Key of an object of the attempt."""
        return f"{self.prefix}/{name}"

    def check(self) -> None:
        """Read the manifest, so that nothing of an altered commit is believed (OPN-1, MAN-1)."""
        _ = self.manifest

    @functools.cached_property
    def manifest(self) -> documents.Manifest:
        """The manifest, checked against the commit (MAN-1)."""
        place = self.place("manifest.json")
        data = required(self.store, place)
        documents.check_digest(data, self.commit.manifest, place)
        document = documents.parse_manifest(data, place)
        documents.check_repeated(document.commit, self._commit_object, layout.commit_key(self.commit.sequence))
        return document

    @functools.cached_property
    def _entries(self) -> dict[str, TableEntry]:
        return {table.name: table for table in self.manifest.tables}

    def entry(self, table: str) -> TableEntry:
        """A table's entry.

        Raises
        ------
        TableNotFoundError
        UnsupportedFeatureError
            This table cannot be read by this library (TAB-1).
        """
        if table not in self._readable:
            if table not in self._entries:
                known = ", ".join(map(repr, list(self._entries)[:5])) or "none"
                raise TableNotFoundError(f"checkpoint {self.commit.sequence} has no table {table!r}; it has {known}")
            check_table(self._entries[table], self.commit.sequence, self.place("manifest.json"))
            self._readable[table] = self._entries[table]
        return self._readable[table]

    @functools.cached_property
    def _readable(self) -> dict[str, TableEntry]:
        return {}

    def has(self, table: str) -> bool:
        """Whether the checkpoint has a table of this name."""
        return table in self._entries

    def part_file(self, writer: int) -> PartFile:
        """A writer's part file, checked (MAN-1, PRT-1, PRT-2)."""
        return self._part_files[writer]

    @functools.cached_property
    def _part_files(self) -> list[PartFile]:
        return [self._read_part_file(writer) for writer in range(len(self.manifest.writers))]

    def _read_part_file(self, writer: int) -> PartFile:
        place = self.place(layout.part_file(writer))
        data = required(self.store, place)
        documents.check_digest(data, self.manifest.writers[writer], place)
        document = parse_parts(data, place)
        if (document.writer, document.attempt) != (writer, self.commit.attempt):
            raise DamagedError(place, f"it says writer {document.writer}, attempt {document.attempt} (PRT-1)")
        strangers = [name for name in document.tables if name not in self._entries]
        if strangers:
            raise DamagedError(place, f"it knows table {strangers[0]!r}, which the manifest does not know (PRT-1)")
        least = least_bytes(document)
        if least > self.commit.stored_bytes:
            raise DamagedError(place, f"its arrays take {least} bytes, stored_bytes says {self.commit.stored_bytes}")
        return document

    @functools.cached_property
    def _parts(self) -> dict[str, list[Part]]:
        parts: dict[str, list[Part]] = {name: [] for name in self._entries}
        for writer, document in enumerate(self._part_files):
            for values in document.parts:
                parts[document.tables[values[0]]].append(_part(writer, values))
        return parts

    @functools.cached_property
    def _checked(self) -> dict[str, list[Part]]:
        return {}

    def parts(self, table: str) -> list[Part]:
        """All parts of a table, checked against its entry (PRT-2, PRT-3, PRT-4), and the blocks that hold them."""
        if table not in self._checked:
            self._checked[table] = self._check_parts(self.entry(table), self._parts[table])
        return self._checked[table]

    def _check_parts(self, entry: TableEntry, parts: list[Part]) -> list[Part]:
        for part in parts:
            problem = part_problem(entry, part, self.block(part).entry)
            if problem:
                raise DamagedError(self.place(layout.part_file(part.writer)), f"table {entry.name!r}: {problem}")
        if entry.storage == "unchanged" and parts:
            raise DamagedError(self.place("manifest.json"), f"table {entry.name!r} is unchanged but has parts (PRT-2)")
        return parts

    def stored_parts(self) -> dict[str, list[Part]]:
        """All parts of all tables, by table; not yet checked against the tables' entries."""
        return self._parts

    def block(self, part: Part) -> Block:
        """The block that holds a part, its arrays checked (BLK-1, BLK-2)."""
        key = (part.writer, part.block)
        if key not in self._blocks:
            group = self.place(layout.block_group(*key))
            entry = self.part_file(part.writer).blocks[part.block]
            check_block(entry, group)
            self._blocks[key] = Block(self._chunks, group, entry, shared=part.count < entry.rows)
        return self._blocks[key]

    @functools.cached_property
    def _blocks(self) -> dict[tuple[int, int], Block]:
        return {}

    def stored_rows(self, table: str) -> int:
        """How many rows of a table this checkpoint itself stores; a row in several column parts counts once."""
        entry = self.entry(table)
        width = entry.fields[0].columns or 1
        cells = 0
        for part in self.parts(table):
            for f in self.block(part).entry.fields:
                if f.name == entry.fields[0].name:
                    cells += part.count * (f.columns or 1)
        return cells // width

    @functools.cached_property
    def _tensors(self) -> dict[str, TensorEntry]:
        return {tensor.name: tensor for tensor in self.manifest.tensors}

    def tensor_entry(self, name: str) -> TensorEntry:
        """The entry of a dense tensor, which the array of its writer holds (TEN-2)."""
        if name not in self._tensors:
            raise NotFoundError(f"checkpoint {self.commit.sequence} has no tensor {name!r}")
        entry = self._tensors[name]
        if entry.dtype not in dtypes.STORED:
            raise UnsupportedFeatureError(f"tensor {name!r}: unknown dtype {entry.dtype!r}")
        check_size(entry.shape, entry.dtype, f"tensor {name!r}", self.place("manifest.json"))
        if math.prod(entry.shape):
            self._dense(entry.writer, entry.dtype, entry.offset, math.prod(entry.shape))
        return entry

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """A dense tensor, as a new array."""
        entry = self.tensor_entry(name)
        out = np.empty(entry.shape, dtypes.logical(entry.dtype))
        with Workers.of(self.store) as workers:
            self.read_tensor(entry, out, workers)
        return out

    def read_tensor(self, entry: TensorEntry, out: Array, workers: Workers) -> None:
        """A dense tensor into an array of its shape and dtype, which is filled when `workers` is done."""
        target = dlpack.run_of(out)
        if target is None:
            whole = dlpack.empty_like(out, tuple(entry.shape))
            with Workers.of(self.store) as own:
                self.read_tensor(entry, whole, own)
            out[...] = whole
        elif target.size:
            self._read_dense(entry.writer, entry.dtype, entry.offset, target, workers)

    def blob(self, span: documents.Span | documents.BlobEntry) -> bytes:
        """The bytes of a blob."""
        if span.bytes:
            self._dense(span.writer, "blob", span.offset, span.bytes)
        out = np.empty(span.bytes, np.uint8)
        if span.bytes:
            with Workers.of(self.store) as workers:
                self._read_dense(span.writer, "blob", span.offset, out, workers)
        return out.tobytes()

    def _dense(self, writer: int, array: str, offset: int, count: int) -> ArrayEntry:
        """The entry of a dense array, which holds elements offset..offset+count-1 (TEN-2)."""
        place = self.place(f"{layout.dense_group(writer)}/{array}")
        entry = self.part_file(writer).dense.get(array) if writer < len(self.manifest.writers) else None
        if entry is None or offset + count > entry.shape[0]:
            raise DamagedError(place, f"elements {offset} to {offset + count} are not in this array (TEN-2)")
        check_dense(array, entry, place)
        return entry

    def _read_dense(self, writer: int, array: str, offset: int, out: Array, workers: Workers) -> None:
        place = self.place(f"{layout.dense_group(writer)}/{array}")
        entry = self._dense(writer, array, offset, out.size)
        for index in range(offset // entry.chunk_rows, (offset + out.size - 1) // entry.chunk_rows + 1):
            start = index * entry.chunk_rows
            low, high = max(offset, start), min(offset + out.size, start + entry.chunk_rows)
            target = out[low - offset : high - offset]
            read = functools.partial(
                self._chunks.into, place, entry, index, slice(low - start, high - start), shared=True
            )
            workers.run(target.nbytes, functools.partial(dlpack.receive, target, read))

    def extra(self) -> Any:
        """The trainer's state, as JSON values."""
        span = self.manifest.extra_blob
        if span is None:
            return documents.copied(self.manifest.extra, self.place("manifest.json"))
        try:
            return json.loads(self.blob(span))
        except (ValueError, RecursionError) as error:
            raise DamagedError(self.place("manifest.json"), f"extra_blob is no JSON: {error}") from error


def _part(writer: int, values: Sequence[int]) -> Part:
    block, offset, count, first_row, recent, deleted_offset, deleted_count = values[1:8]
    columns = tuple(values[8:])
    return Part(writer, block, offset, count, first_row, recent, deleted_offset, deleted_count, columns)


class Block:
    """One block, as `check_block` wants it: its arrays, read chunk by chunk."""

    def __init__(self, chunk_reader: ChunkReader, group: str, entry: BlockEntry, *, shared: bool) -> None:
        self._chunks = chunk_reader
        self._shared = shared
        self._group = group
        self.entry = entry
        self._exact: dict[str, tuple[Ids, npt.NDArray[Any]]] = {}

    def place(self, array: str) -> str:
        """Key of an array."""
        return f"{self._group}/{array}"

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Rows of a row chunk, the same in every row-aligned array (BLK-2)."""
        f = self.entry.fields[0]
        return self.entry.arrays[f"{f.name}.codes" if f.encoding == "affine" else f"{f.name}.values"].chunk_rows

    def held_bytes(self, f: BlockField, moves: Moves) -> int:
        """Bytes of memory that reading rows of a field from one chunk takes, about."""
        names = (f"{f.name}.{array}" for array in ("codes", "qparams", "values"))
        entries = [self.entry.arrays[name] for name in names if name in self.entry.arrays]
        width = sum(map(row_bytes, entries))
        chunk = self.chunk_rows * width
        if self._shared:
            low, high = moves.span
            return moves.nbytes + min(chunk, (high - low) * width)
        if all(entry.compression is None for entry in entries):
            return moves.nbytes + (min(chunk, _READ_BYTES) if self._chunks.streams else chunk)
        return moves.nbytes + 2 * chunk

    def _chunk(self, name: str, index: int) -> npt.NDArray[Any]:
        return self._chunks.chunk(self.place(name), self.entry.arrays[name], index, shared=self._shared)

    def _rows(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        return self._chunks.rows(self.place(name), self.entry.arrays[name], start, stop, shared=self._shared)

    def rows_of(self, part: Part) -> Iterator[tuple[int, int, int]]:
        """The row chunks of a part: index, and the slice of the block's rows that is in it and in the part."""
        end = part.offset + part.count
        for index in range(part.offset // self.chunk_rows, -(-end // self.chunk_rows)):
            start = index * self.chunk_rows
            yield index, max(part.offset, start), min(end, start + self.chunk_rows)

    def listed(self, low: int, high: int) -> Ids:
        """The row numbers or keys of block rows low..high-1, which lie in one part and one chunk (PRT-3)."""
        index = low // self.chunk_rows
        ids = self._chunk("rows", index)[low - index * self.chunk_rows : high - index * self.chunk_rows]
        if not bool((ids[1:] > ids[:-1]).all()):
            raise DamagedError(self.place("rows"), "not strictly increasing within a part (PRT-3)")
        return ids

    @functools.cached_property
    def rows_first(self) -> Ids:
        """The first entry of each row chunk (BLK-3)."""
        return self._rows("rows_first", 0, self.entry.arrays["rows_first"].shape[0])

    def deleted(self, part: Part) -> Ids:
        """The tombstones of a part (PRT-3)."""
        if part.deleted_count == 0:
            return np.zeros(0, np.int64)
        keys = self._rows("deleted", part.deleted_offset, part.deleted_offset + part.deleted_count)
        if not bool((keys[1:] > keys[:-1]).all()):
            raise DamagedError(self.place("deleted"), "not strictly increasing within a part (PRT-3)")
        return keys

    def recent(self, part: Part) -> Mask:
        """For each row of a part, whether it is recent (BLK-4)."""
        if part.recent != 2:
            return np.full(part.count, part.recent == 1)
        first, stop = part.offset // 8, -(-(part.offset + part.count) // 8)
        bits = self._rows("recent", first, stop)
        unpacked = np.unpackbits(bits, bitorder="little").view(np.bool_)
        return unpacked[part.offset - first * 8 : part.offset - first * 8 + part.count]

    def decode(self, f: BlockField, field: Field, index: int, moves: Moves, out: Array) -> None:
        """Put rows of one field into `out`.

        Parameters
        ----------
        index : int
            The row chunk.
        moves : Moves
            From that chunk to rows of `out`.
        out : array (n, columns) or (n,)
            The columns that the part holds, in the field's logical dtype; on the CPU or on its way to a device.
        """
        (self._decode_affine if f.encoding == "affine" else self._decode_raw)(f, index, moves, out)
        self._put_exact(f, field, index, moves, out)

    def _decode_raw(self, f: BlockField, index: int, moves: Moves, out: Array) -> None:
        name = f"{f.name}.values"
        entry = self.entry.arrays[name]
        positions, places = moves.given, moves.to
        run = moves.kept is None and isinstance(positions, slice) and isinstance(places, slice)
        if run and isinstance(out, np.ndarray) and f.dtype == dtypes.name_of(out.dtype):
            target = dtypes.as_stored(out[places])
            if target is not None:
                assert isinstance(positions, slice)
                self._chunks.into(self.place(name), entry, index, positions, target, shared=self._shared)
                return
        step = self._step(name)
        for low, values in self._chunks.slices(self.place(name), entry, index, moves.span, step, shared=self._shared):
            dlpack.scatter(dtypes.from_stored(values, f.dtype or ""), out, moves.within(low, low + step))

    def _decode_affine(self, f: BlockField, index: int, moves: Moves, out: Array) -> None:
        names = (f"{f.name}.codes", f"{f.name}.qparams")
        step, arrays = self._step(*names), self.entry.arrays
        codes_of, qparams_of = (
            self._chunks.slices(self.place(name), arrays[name], index, moves.span, step, shared=self._shared)
            for name in names
        )
        for (low, codes), (_, qparams) in zip(codes_of, qparams_of, strict=True):
            dlpack.decode_affine(codes, qparams, f.bits or 0, out, moves.within(low, low + step))

    def _step(self, *names: str) -> int:
        """Rows that are read at a time."""
        width = sum(row_bytes(self.entry.arrays[name]) for name in names)
        return max(1, min(_READ_ROWS, _READ_BYTES // width))

    def affine(self, f: BlockField, index: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
        """Codes and qparams of one row chunk."""
        return self._chunk(f"{f.name}.codes", index), self._chunk(f"{f.name}.qparams", index)

    def values(self, f: BlockField, index: int) -> npt.NDArray[Any]:
        """Values of a raw field of one row chunk, as stored."""
        return self._chunk(f"{f.name}.values", index)

    def exact(self, f: BlockField, field: Field) -> tuple[Ids, npt.NDArray[Any]]:
        """Positions and values of the exact rows of a field (BLK-5); values as stored."""
        if f"{f.name}.exact_index" not in self.entry.arrays:
            return np.zeros(0, np.int64), np.zeros(0, dtypes.STORED[field.dtype])
        if f.name not in self._exact:
            self._exact[f.name] = self._read_exact(f)
        return self._exact[f.name]

    def _read_exact(self, f: BlockField) -> tuple[Ids, npt.NDArray[Any]]:
        name = f"{f.name}.exact_index"
        count = self.entry.arrays[name].shape[0]
        index = self._rows(name, 0, count)
        if index[0] < 0 or index[-1] >= self.entry.rows or not bool((index[1:] > index[:-1]).all()):
            raise DamagedError(self.place(name), "not strictly increasing positions of the block (BLK-5)")
        return index, self._rows(f"{f.name}.exact_values", 0, count)

    def _put_exact(self, f: BlockField, field: Field, index: int, moves: Moves, out: Array) -> None:
        exact_index, exact_values = self.exact(f, field)
        if exact_index.size:
            places, found = exact_among(exact_index, index * self.chunk_rows, moves.positions)
            to = moves.places
            target = places + to.start if isinstance(to, slice) else to[places]
            out[target] = dtypes.from_stored(exact_values[found], field.dtype)


def exact_among(exact_index: Ids, chunk_start: int, positions: Selection) -> tuple[Ids, Ids]:
    """Which of the selected rows of a chunk are exact.

    Returns
    -------
    places, found : arrays
        Places among the selected rows, and the matching entries of `exact_index`.
    """
    if exact_index.size == 0:
        return exact_index, exact_index
    if isinstance(positions, slice):
        first, last = np.searchsorted(exact_index, [chunk_start + positions.start, chunk_start + positions.stop])
        return exact_index[first:last] - chunk_start - positions.start, np.arange(first, last)
    entries = np.searchsorted(exact_index, positions + chunk_start)
    inside = entries < exact_index.size
    inside[inside] = exact_index[entries[inside]] == positions[inside] + chunk_start
    return np.flatnonzero(inside), entries[inside]
