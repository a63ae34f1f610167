"""Indexes of sharded files, `*.index.json`: which file holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from checkrun_format.errors import InvalidInputError
from checkrun_format.interchange.contents import Array, Contents, named


def weight_map(path: Path) -> dict[str, str]:
    """For each tensor the file that holds it, which lies beside the index or below."""
    try:
        document = json.loads(path.read_bytes(), object_pairs_hook=named)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"not JSON, as an index is: {error}") from error
    where = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise InvalidInputError('not an index: it has no "weight_map" of tensor names to file names')
    for shard in where.values():
        parts = PurePosixPath(shard).parts
        if not parts or ".." in parts or parts[0].startswith("/") or "\0" in shard:
            raise InvalidInputError(f"it names the file {shard!r}, which is not beside it or below")
    return where


def joined(where: Mapping[str, str], shards: Mapping[str, Contents], index_bytes: int) -> Contents:
    """The tensors of all files of an index as those of one, which they must be exactly."""
    arrays: dict[str, Array] = {}
    for name, contents in shards.items():
        if contents.label is not None:
            raise InvalidInputError(f"file {name!r} was written by `checkrun export`: import it by itself")
        expected = {tensor for tensor, holder in where.items() if holder == name}
        _check_names(name, expected, set(contents.arrays))
        arrays |= contents.arrays

    def check() -> None:
        for contents in shards.values():
            contents.check()

    extra = {name: contents.extra for name, contents in shards.items() if contents.extra is not None}
    return Contents(
        arrays={name: arrays[name] for name in where},
        extra=extra or None,
        file_bytes=index_bytes + sum(contents.file_bytes for contents in shards.values()),
        check=check,
    )


def _check_names(shard: str, expected: set[str], found: set[str]) -> None:
    for names, problem in ((expected - found, "lacks tensor"), (found - expected, "is not said to hold tensor")):
        if names:
            raise InvalidInputError(f"file {shard!r} {problem} {min(names)!r} ({len(names)} such tensors in all)")
