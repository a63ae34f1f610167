"""Copying a run from one store to another, so that it may be interrupted, repeated, and read from meanwhile.

Any plain copy of a run is the same run (FORMAT.md STO-4); this one lets each checkpoint appear when it is whole.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from io import BytesIO, RawIOBase

import numpy as np

from checkrun_format import layout, manifest
from checkrun_format.chain import History
from checkrun_format.chunks import CheckedFile, altered, missing
from checkrun_format.errors import CheckrunError, InvalidInputError, PrunedError
from checkrun_format.manifest import Commit, Pruned
from checkrun_format.partfile import CHECKSUM_BYTES
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.stores import AlreadyExistsError, Buffer, Store, open_store
from checkrun_format.tags import Tags
from checkrun_format.versions import FORMAT_VERSION
from checkrun_format.workers import Workers
from checkrun_format.writer import objects_of

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy did.

    Attributes
    ----------
    checkpoints : tuple of int
        The checkpoints that were committed at the destination, in this order.
    present : tuple of int
        Those of them that were meant and that the destination had already.
    objects, bytes : int
        What was written of them; less than they hold when an earlier copy had begun.
    tags : tuple of str
        The tags that were set.
    """

    checkpoints: tuple[int, ...]
    present: tuple[int, ...]
    objects: int
    bytes: int
    tags: tuple[str, ...]


def copy_run(
    source: str | os.PathLike[str] | Store,
    destination: str | os.PathLike[str] | Store,
    *,
    checkpoint: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> Copied:
    """Copy the checkpoints of a run, and its tags, to another place.

    Each checkpoint appears at the destination when all of it is there; chunks are checked against their checksums, and
    documents against their digests, on the way. What the destination has already is not copied again, so that a copy
    that was interrupted goes on, and one that is repeated brings what is new. Nothing is removed.

    Parameters
    ----------
    source, destination : str, path or Store
        As of `open_run`. The destination is a run that was copied from the source before, or empty, or nothing yet.
    checkpoint : int
        Copy this checkpoint and those that it needs, and mark the other numbers below it as pruned. By default all.
    advance : callable
        Is told, now and then, how many bytes have been copied since the last time.

    Raises
    ------
    InvalidInputError
        The destination holds another run, or is ahead of the source; nothing has been written.
    RunNotFoundError, NotARunError, CheckpointNotFoundError, PrunedError, BurntError, DamagedError
        The source is not there, or not whole. What was copied before stays.
    StorageError
    """
    return _Copy(open_store(source), open_store(destination), checkpoint, advance).carry_out()


class _Copy:
    def __init__(
        self, source: Store, destination: Store, checkpoint: int | None, advance: Callable[[int], None] | None
    ) -> None:
        self._source = History(source)
        self._destination = History(destination)
        self._checkpoint = checkpoint
        self._advance = advance or (lambda count: None)
        self._objects = 0
        self._bytes = 0
        self._lock = threading.Lock()

    def carry_out(self) -> Copied:
        self._source.check_run()
        commits = {commit.sequence: commit for commit in self._commits()}
        present = self._present(commits.values())
        self._destination.create_run(self._source.store.get(layout.RUN_KEY))
        self._destination.check_run()
        copied = []
        for number in self._source.numbers():
            if number in present or (self._checkpoint is not None and number > self._checkpoint):
                continue
            if number in commits:
                self._copy_objects(self._source.get(number))
                copied.append(number)
            self._occupy(number, is_copied=number in commits)
        there = [number for number in commits if isinstance(self._destination.occupant(number), Commit)]
        return Copied(
            checkpoints=tuple(copied),
            present=tuple(sorted(set(there) - set(copied))),
            objects=self._objects,
            bytes=self._bytes,
            tags=tuple(self._copy_tags()),
        )

    # What is to be copied ---------------------------------------------------------------------------------------------

    def _commits(self) -> Iterator[Commit]:
        """The checkpoints that are to be there."""
        if self._checkpoint is None:
            return self._source.commits()
        return (below.commit for below in self._source.chain(self._source.get(self._checkpoint)))

    def _present(self, commits: Collection[Commit]) -> set[int]:
        """The numbers that are occupied at the destination, if it is of the same run."""
        present, pruned = set(), set()
        for number in self._destination.numbers():
            found = self._destination.store.get(layout.commit_key(number))
            if found is None:
                continue
            present.add(number)
            if isinstance(self._destination.occupant(number), Pruned):
                pruned.add(number)
            elif found != (original := self._source.store.get(layout.commit_key(number))):
                self._check_pruned_since(number, original)
        for commit in commits:
            if commit.sequence not in present and commit.parent in pruned:
                raise InvalidInputError(
                    f"checkpoint {commit.parent} was pruned, or left out, at {self._destination.store.url}, and "
                    f"checkpoint {commit.sequence} needs it: give an empty destination"
                )
        return present

    def _check_pruned_since(self, number: int, original: bytes | None) -> None:
        """Refuse a destination that holds something else than the source held at this number."""
        if original is None or not isinstance(_read(original, number), Pruned):
            raise InvalidInputError(
                f"{self._destination.store.url} holds a checkpoint {number} that {self._source.store.url} does not "
                "hold: it is no copy of this run; give an empty destination"
            )

    # Copying ----------------------------------------------------------------------------------------------------------

    def _copy_objects(self, stored: StoredCheckpoint) -> None:
        """Copy all objects of an attempt that are not there yet, and make them durable."""
        source, destination = self._source.store, self._destination.store
        sizes, there = source.list(stored.prefix), destination.list(stored.prefix)
        files = [stored.part_file(writer) for writer in range(len(stored.manifest.writers))]
        names = ["zarr.json", "manifest.json", *(layout.part_file(document.writer) for document in files)]
        chunks = {stored.place(name) for document in files for name in objects_of(document) if "/c/" in name}
        names += [name for document in files for name in objects_of(document)]
        with Workers.of(max((source, destination), key=lambda store: store.parallel)) as workers:
            for key in map(stored.place, names):
                if key not in sizes:
                    raise missing(source, key)
                if there.get(key) != sizes[key]:
                    size, state = sizes[key], {"is_chunk": key in chunks, "begun": key in there}
                    workers.submit(size, functools.partial(self._copy_object, key, size, **state))
        destination.sync(stored.prefix)

    def _copy_object(self, key: str, size: int, *, is_chunk: bool, begun: bool) -> None:
        if begun:  # cut off by the end of an earlier copy
            self._destination.store.delete(key)
        file = self._source.store.open(key)
        if file is None:
            raise missing(self._source.store, key)
        with file:
            self._destination.store.put(key, _pieces(file, size, key, is_chunk=is_chunk))
        with self._lock:
            self._objects += 1
            self._bytes += size
            self._advance(size)

    def _occupy(self, number: int, *, is_copied: bool) -> None:
        """Put at a number what stands there at the source, or a marker if its checkpoint is left out."""
        key = layout.commit_key(number)
        data = self._source.store.get(key)
        if data is None:
            return
        if is_copied and isinstance(_read(data, number), Pruned):
            raise PrunedError(f"checkpoint {number} was pruned while it was copied: copy again")
        if not is_copied and self._checkpoint is not None:
            marker = Pruned(kind="pruned", format_version=FORMAT_VERSION, sequence=number)
            data = layout.group_document(manifest.as_object(marker))
        try:
            self._destination.store.create(key, data)
        except AlreadyExistsError as error:
            if self._destination.store.get(key) != data:
                raise InvalidInputError(
                    f"somebody else wrote checkpoint {number} at {self._destination.store.url} meanwhile"
                ) from error

    def _copy_tags(self) -> Iterator[str]:
        tags, there = Tags(self._source), Tags(self._destination)
        for name, number in tags.read().items():
            occupied = isinstance(self._destination.occupant(number), Commit)
            if occupied and there.get(name) != number:
                there.put(name, number)
                yield name


def _read(data: bytes, number: int) -> Commit | Pruned | manifest.Burnt | None:
    """What a document at a number is; None if that cannot be told."""
    try:
        return manifest.parse_occupant(data, number)
    except CheckrunError:
        return None


def _pieces(file: RawIOBase | BytesIO, size: int, key: str, *, is_chunk: bool) -> Iterator[Buffer]:
    """The bytes of an object; the last ones follow once the others are known to be sound: no altered copy is whole."""
    checked, body = CheckedFile(file, key), size - CHECKSUM_BYTES if is_chunk else size
    for low in range(0, max(body, 0), _PIECE_BYTES):
        piece = np.empty(min(_PIECE_BYTES, body - low), np.uint8)
        checked.fill(piece)
        yield piece
    if is_chunk:
        yield checked.finish().to_bytes(CHECKSUM_BYTES, "little")
    elif file.read(1):
        raise altered(key)
