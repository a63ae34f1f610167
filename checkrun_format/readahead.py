"""What a load will read in small pieces, told to the store beforehand (FORMAT.md section 6: parts share blocks)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from checkrun_format import layout
from checkrun_format.chain import History
from checkrun_format.chunks import row_bytes
from checkrun_format.errors import CheckrunError
from checkrun_format.manifest import BlockEntry
from checkrun_format.reader import StoredCheckpoint

_ROW_ALIGNED = ("codes", "qparams", "values", "exact_index", "exact_values")


@contextlib.contextmanager
def reading_ahead(history: History, checkpoint: StoredCheckpoint, tables: Collection[str]) -> Iterator[None]:
    """While a checkpoint is loaded: have its store read ahead what would else be read one object after another.

    That is: blocks that many parts share, and the row numbers that decide which layer supplies a row.
    """
    if not history.store.is_far:
        yield
        return
    objects: list[tuple[str, int]] = []
    with contextlib.suppress(CheckrunError):  # whoever needs what is broken finds it
        for layer, needed in _layers(history, checkpoint, set(tables)):
            objects += _objects(layer, needed)
    with history.chunks.expecting(objects):
        yield


def _layers(
    history: History, checkpoint: StoredCheckpoint, tables: set[str]
) -> Iterator[tuple[StoredCheckpoint, set[str]]]:
    """The layers that are read, newest first, and the tables that they are read for."""
    for layer in history.chain(checkpoint):
        yield layer, tables
        tables = tables - {entry.name for entry in layer.manifest.tables if entry.storage == "full"}
        if not tables:
            return


def _objects(layer: StoredCheckpoint, tables: Collection[str]) -> Iterator[tuple[str, int]]:
    """Key and bytes of each, in the order of the blocks."""
    shared: dict[tuple[int, int], bool] = {}
    for name in filter(layer.has, tables):
        for part in layer.parts(name):
            rows = layer.block(part).entry.rows
            shared[part.writer, part.block] = shared.get((part.writer, part.block), False) or part.count < rows
    for (writer, block), is_shared in sorted(shared.items()):
        group = layer.place(layout.block_group(writer, block))
        yield from _chunks_of(group, layer.part_file(writer).blocks[block], is_shared=is_shared)


def _chunks_of(group: str, block: BlockEntry, *, is_shared: bool) -> Iterator[tuple[str, int]]:
    arrays = [
        (name, entry, layout.chunk_count(entry.shape[0], entry.chunk_rows))
        for name, entry in block.arrays.items()
        if name == "rows" or (is_shared and name.rpartition(".")[2] in _ROW_ALIGNED)
    ]
    for index in range(max((count for _, _, count in arrays), default=0)):
        for name, entry, count in arrays:
            if index < count:
                key = f"{group}/{name}/{layout.chunk_name(index, len(entry.shape))}"
                yield key, entry.chunk_rows * row_bytes(entry)
