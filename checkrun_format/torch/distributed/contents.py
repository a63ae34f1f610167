"""What a checkpoint of torch.distributed.checkpoint holds: its metadata, from the manifest and one JSON blob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import DamagedError
from checkrun_format.manifest import Record

BLOB = "torch.distributed.checkpoint"
"""Name of the blob."""


class Piece(Record, frozen=True, kw_only=True):
    """A dense tensor that holds a rectangle of a value that was sharded."""

    tensor: str
    offsets: list[int]
    sizes: list[int]


class Contents(Record, frozen=True, kw_only=True):
    """What the manifest does not tell. JSON-able.

    Parameters
    ----------
    fields : key to (table, field)
    pieces : key to the dense tensors that together hold it; a key that is not here is a dense tensor itself
    sizes : key to the whole shape of what is in pieces
    opaque : keys that DCP handed over as bytes: blobs of the same names
    paths : key to the path in the nested state dict
    """

    fields: dict[str, tuple[str, str]]
    pieces: dict[str, list[Piece]]
    sizes: dict[str, list[int]]
    opaque: list[str]
    paths: dict[str, list[str | int]]

    def to_json(self) -> bytes:
        """As a blob."""
        return msgspec.json.encode(self)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Contents:
        """Of a checkpoint; of one that was written without DCP, what its names tell.

        Raises
        ------
        DamagedError
        """
        if BLOB in checkpoint.blobs:
            try:
                return msgspec.json.decode(checkpoint.blob(BLOB), type=cls)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise DamagedError(f"checkpoint {checkpoint.sequence}", f"blob {BLOB!r}: {error}") from error
        fields = {
            f"{table.removesuffix('.weight')}.{field.name}": (table, field.name)
            for table in checkpoint.tables
            for field in checkpoint.table(table).fields
        }
        return cls(fields=fields, pieces={}, sizes={}, opaque=[], paths={})


def piece_name(key: str, offsets: Sequence[int], sizes: Sequence[int], whole: Sequence[int]) -> str:
    """The name of the dense tensor that holds a rectangle: its key, and which it is unless it is all of it."""
    if list(sizes) == list(whole):
        return key
    return f"{key}[{','.join(f'{low}:{low + size}' for low, size in zip(offsets, sizes, strict=True))}]"


def metadata_of(checkpoint: Checkpoint, contents: Contents, load_id: str) -> Metadata:
    """DCP's metadata of a checkpoint: each field of a table is one chunk, wherever its parts lie."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    shapes = checkpoint.tensor_shapes
    of_pieces = {piece.tensor for pieces in contents.pieces.values() for piece in pieces}
    views = {table: checkpoint.table(table) for table in {table for table, _ in contents.fields.values()}}
    for key, (table, name) in contents.fields.items():
        field = next(f for f in views[table].fields if f.name == name)
        size = [len(views[table])] if field.columns is None else [len(views[table]), field.columns]
        found[key] = _tensor(field.dtype, size, [([0] * len(size), size)])
    for key, pieces in contents.pieces.items():
        dtype = shapes[pieces[0].tensor][0]
        found[key] = _tensor(dtype, contents.sizes[key], [(piece.offsets, piece.sizes) for piece in pieces])
    for name, (dtype, shape) in shapes.items():
        if name not in of_pieces:
            found[name] = _tensor(dtype, shape, [([0] * len(shape), shape)])
    found.update({key: BytesStorageMetadata() for key in contents.opaque})
    paths: Mapping[str, tuple[Any, ...]] = {key: tuple(path) for key, path in contents.paths.items()}
    return Metadata(
        state_dict_metadata=found,
        planner_data=dict(paths) if paths else {key: (key,) for key in found},
        storage_meta=StorageMeta(checkpoint_id=str(checkpoint.sequence), load_id=load_id),
    )


def _tensor(
    dtype: str, size: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, dtype)),
        size=torch.Size(size),
        chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks],
    )
