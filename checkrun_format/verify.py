"""Everything that is wrong with a run: all requirements of FORMAT.md that can be checked on stored bytes.

Nothing here raises for damage: each problem is a record with the object's key, a kind and a message. Kinds are those of
the error tree, and `litter` for objects that no checkpoint needs (harmless; every reader ignores them).
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from checkrun_format import layout
from checkrun_format.chain import History
from checkrun_format.chunks import ChunkReader, object_names, row_bytes
from checkrun_format.contents import check_contents
from checkrun_format.errors import CheckrunError, DamagedError, PrunedError
from checkrun_format.manifest import ArrayEntry, Burnt, Commit, PartFile, Problem, Pruned, TableEntry
from checkrun_format.partfile import arrays_of
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.resolver import live_keys, pieces
from checkrun_format.rows import WantedIds, WantedRange
from checkrun_format.stores import Store
from checkrun_format.structure import check_array, check_dense
from checkrun_format.succession import check_succession
from checkrun_format.tags import Tags
from checkrun_format.workers import Workers
from checkrun_format.writer import objects_of

HARMLESS = frozenset({"litter", "burnt"})
"""Kinds of problems that keep no checkpoint from being read."""


_MANY_MISSING = 1 << 20
"""Objects that are named one by one if they are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What a run was found to be.

    Attributes
    ----------
    problems : list of Problem
        All of them.
    safe : list of int
        The checkpoints that are sound, and so are those that they need.
    affected : dict
        For each other one, and for each number that may have been one, the number at which its chain is not sound.
    """

    problems: list[Problem]
    safe: list[int]
    affected: dict[int, int]


class Auditor:
    """Looks at all of a run: its problems one after another, and in the end what they affect.

    Parameters
    ----------
    store : Store
    fast : bool
        Only read documents and list objects: presence and sizes, no values.

    Attributes
    ----------
    numbers : list of int
        What is looked at, apart from the run document and the tags.
    """

    def __init__(self, store: Store, *, fast: bool = False) -> None:
        self._history = History(store)
        self._fast = fast
        self._unsound: set[int] = set()
        self.numbers = self._history.numbers()

    def problems(self, numbers: Iterable[int] | None = None) -> Iterator[Problem]:
        """Every problem of the run; `numbers` are its own, given by somebody who watches how far they are."""
        history = self._history
        yield from _caught(history.check_run, layout.RUN_KEY) or _caught(
            partial(_no_key_twice, history.store, layout.RUN_KEY), layout.RUN_KEY
        )
        for number in self.numbers if numbers is None else numbers:
            found = _number(history, number, fast=self._fast)
            if is_unsound(found):
                self._unsound.add(number)
            yield from found
        for number, problem in _vanished(history).items():
            self._unsound.add(number)
            yield problem
        yield from verify_tags(history.store)

    def verdict(self) -> tuple[list[int], dict[int, int]]:
        """Once all problems are known: which checkpoints are safe, and which are `affected`, as of `Audit`."""
        affected = {number: number for number in sorted(self._unsound)}
        safe = []
        for number in self._history.numbers():
            occupant = _occupant(self._history, number)
            if isinstance(occupant, Commit) and number not in affected:
                if occupant.parent in affected:
                    affected[number] = affected[occupant.parent]
                else:
                    safe.append(number)
        return safe, dict(sorted(affected.items()))


def verify_run(store: Store, *, fast: bool = False) -> Audit:
    """Every problem of a run, and which checkpoints they affect; `fast` as of `Auditor`."""
    auditor = Auditor(store, fast=fast)
    problems = _each_once(auditor.problems())
    safe, affected = auditor.verdict()
    return Audit(problems=problems, safe=safe, affected=affected)


def verify_checkpoint(store: Store, sequence: int, *, fast: bool = False) -> list[Problem]:
    """Every problem of one number: of what occupies it, and of what lies beside that."""
    return _number(History(store), sequence, fast=fast)


def verify_tags(store: Store) -> list[Problem]:
    """Every problem of the tags of a run (TAG-1, TAG-2)."""
    tags = Tags(History(store))
    problems = []
    for key in sorted(store.list(layout.TAGS)):
        name = layout.parse_tag_key(key)
        if name is None:
            problems.append(Problem(place=key, kind="litter", message="no tag has such a name"))
        else:
            problems += _caught(partial(tags.check, name), key) or _caught(partial(_no_key_twice, store, key), key)
    return problems


def is_unsound(problems: Iterable[Problem]) -> bool:
    """Whether problems of a number keep it from being read."""
    return any(problem.kind not in HARMLESS for problem in problems)


def newest_sound(store: Store) -> tuple[int | None, dict[int, Problem]]:
    """The newest checkpoint whose whole chain verifies, and for each newer one what is wrong with it.

    What this library cannot read for another reason than damage is not passed over.
    """
    history, known, passed = History(store), dict[int, Problem | None](), dict[int, Problem]()
    for number in reversed(history.numbers()):
        try:
            occupant = history.occupant(number)
        except DamagedError as error:
            passed[number] = Problem.of(error, error.place)
            continue
        if not isinstance(occupant, Commit):
            continue
        problem = _problem_of_chain(history, occupant, known)
        if problem is None:
            return number, passed
        passed[number] = problem
    return None, passed


def _problem_of_chain(history: History, commit: Commit | None, known: dict[int, Problem | None]) -> Problem | None:
    """The first thing that is wrong in a chain; `known` are those found in numbers that were looked at."""
    while commit is not None:
        number = commit.sequence
        if number not in known:
            found = (problem for problem in _number(history, number) if problem.kind in ("damaged", "pruned"))
            known[number] = next(found, None)
        if known[number] is not None or commit.parent is None:
            return known[number]
        below = history.occupant(commit.parent)
        commit = below if isinstance(below, Commit) else None
    return None


def _number(history: History, sequence: int, *, fast: bool = False) -> list[Problem]:
    problems = _problems(history, sequence, fast=fast)
    if is_unsound(problems) and isinstance(_occupant(history, sequence), Pruned):
        return []  # meanwhile
    return _each_once(problems)


def _each_once(problems: Iterable[Problem]) -> list[Problem]:
    """Without what was met on several ways: a parent by each of its children, and by each of their tables."""
    return list(dict.fromkeys(problems))


def _vanished(history: History) -> dict[int, Problem]:
    """Numbers that a commit names as its predecessor and that nothing occupies: even a prune leaves a marker."""
    found: dict[int, Problem] = {}
    for number in history.numbers():
        commit = _occupant(history, number)
        if not isinstance(commit, Commit) or commit.predecessor is None:
            continue
        with contextlib.suppress(CheckrunError):  # told elsewhere
            if history.occupant(commit.predecessor) is None:
                message = f"the commit is missing: checkpoint {number} follows it"
                key = layout.commit_key(commit.predecessor)
                found.setdefault(commit.predecessor, Problem(place=key, kind="damaged", message=message))
    return found


def _occupant(history: History, sequence: int) -> Commit | Pruned | Burnt | None:
    """What occupies a number, None also if that cannot be read."""
    try:
        return history.occupant(sequence)
    except CheckrunError:
        return None


def _problems(history: History, sequence: int, *, fast: bool) -> list[Problem]:
    key = layout.commit_key(sequence)
    try:
        occupant = history.occupant(sequence)
    except CheckrunError as error:
        return [Problem.of(error, key)]
    listing = history.store.list(layout.folder(sequence))
    if isinstance(occupant, Commit):
        try:
            stored = history.get(sequence)
        except PrunedError as error:  # since
            return [Problem.of(error, key)]
        below = _caught(lambda: history.parent(stored), key) or _caught(lambda: check_succession(history, stored), key)
        return below + list(_checkpoint(history, stored, listing, fast=fast))
    problems = [Problem(place=name, kind="litter", message="no checkpoint needs it") for name in listing if name != key]
    if isinstance(occupant, Burnt):
        problems.append(Problem(place=key, kind="burnt", message="it is no commit: the number is burnt"))
    if occupant is None and not listing:
        return []
    return problems


def _checkpoint(
    history: History, stored: StoredCheckpoint, listing: dict[str, int], *, fast: bool
) -> Iterator[Problem]:
    documents = _caught(lambda: stored.manifest, stored.place("manifest.json"))
    documents += [] if documents else _caught(stored.stored_parts, stored.place("parts"))
    yield from documents
    if documents:
        return
    files = [stored.part_file(writer) for writer in range(len(stored.manifest.writers))]
    count = sum(layout.chunk_count(e.shape[0], e.chunk_rows) for document in files for _, _, e in arrays_of(document))
    if count > len(listing) + _MANY_MISSING:
        message = f"its arrays have {count} chunks, and only {len(listing)} objects are there (ZAR-4)"
        yield Problem(place=stored.place("manifest.json"), kind="damaged", message=message)
        return
    yield from _objects(stored, files, listing)
    if fast:
        return
    yield from _groups(stored, files)
    names = ["manifest.json", *(layout.part_file(writer) for writer in range(len(files)))]
    for key in [layout.commit_key(stored.commit.sequence), *map(stored.place, names)]:
        yield from _caught(partial(_no_key_twice, stored.store, key), key)
    yield from _shared_blocks(stored)
    for document in files:
        yield from _part_file(stored, document)
    place = stored.place("manifest.json")
    for entry in stored.manifest.tables:
        yield from _caught(partial(_table, history, stored, entry), place)
    for tensor in stored.manifest.tensors:
        yield from _caught(partial(stored.tensor, tensor.name), place)
    for blob in stored.manifest.blobs:
        yield from _caught(partial(stored.blob, blob), place)
    yield from _caught(stored.extra, place)


def _objects(stored: StoredCheckpoint, files: list[PartFile], listing: dict[str, int]) -> Iterator[Problem]:
    """What must be there and what must not; ZAR-4, and the sum of all sizes (5.2)."""
    expected = {stored.place(name) for document in files for name in objects_of(document)}
    expected |= {stored.place(layout.part_file(writer)) for writer in range(len(files))}
    expected |= {stored.place("zarr.json")}
    for key in sorted(expected - listing.keys()):
        yield Problem(place=key, kind="damaged", message="the object is missing")
    kept = {layout.commit_key(stored.commit.sequence), stored.place("manifest.json")}
    for key in sorted(listing.keys() - expected - kept):
        yield Problem(place=key, kind="litter", message="no checkpoint needs it")
    size = sum(listing.get(key, 0) for key in expected)
    if size != stored.commit.stored_bytes:
        message = f"the objects take {size} bytes, stored_bytes says {stored.commit.stored_bytes}"
        yield Problem(place=layout.commit_key(stored.commit.sequence), kind="damaged", message=message)


def _groups(stored: StoredCheckpoint, files: list[PartFile]) -> Iterator[Problem]:
    groups = [layout.block_group(d.writer, b) for d in files for b in range(len(d.blocks))]
    groups += [layout.dense_group(d.writer) for d in files if d.dense]
    for group in ["", *(f"{name}/" for name in groups)]:
        yield from _caught(partial(_group, stored, stored.place(f"{group}zarr.json")), "")


def _part_file(stored: StoredCheckpoint, document: PartFile) -> Iterator[Problem]:
    arrays = [(f"{group}/{name}", entry) for group, name, entry in arrays_of(document)]
    for name, entry in document.dense.items():
        place = stored.place(f"{layout.dense_group(document.writer)}/{name}")
        yield from _caught(partial(check_dense, name, entry, place), place)
    reader = ChunkReader(stored.store)
    found: list[list[Problem]] = []
    with Workers.of(stored.store) as workers:
        for name, entry in arrays:
            place = stored.place(name)
            found.append(_caught(partial(check_array, entry, place), place))
            if found[-1]:
                continue
            found.append(_caught(partial(_metadata, stored, place, entry), place))
            held = entry.chunk_rows * row_bytes(entry) * (1 if entry.compression is None else 3)
            for index in range(len(object_names(name, entry)) - 1):
                found.append([])
                workers.run(held, partial(_note, found[-1], partial(_chunk, reader, place, entry, index), place))
    yield from itertools.chain(*found)


def _note(found: list[Problem], check: Callable[[], object], place: str) -> None:
    found += _caught(check, place)


def _chunk(reader: ChunkReader, place: str, entry: ArrayEntry, index: int) -> None:
    """A chunk is there and sound, and its elements beyond the array's end are zero (ZAR-4)."""
    shape = [(index + 1) * entry.chunk_rows, *entry.shape[1:]]
    whole = reader.chunk(place, msgspec.structs.replace(entry, shape=shape), index, shared=False)
    if whole[max(0, entry.shape[0] - index * entry.chunk_rows) :].any():
        raise DamagedError(place, f"elements of chunk {index} beyond the array's end are not zero (ZAR-4)")


def _no_key_twice(store: Store, key: str) -> None:
    """No object of a document has a key twice (DOC-1)."""

    def told(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DamagedError(key, f"key {twice!r} stands twice in one object (DOC-1)")
        return found

    data = store.get(key)
    if data is None:
        return  # pruned meanwhile
    try:
        json.loads(gzip.decompress(data) if key.endswith(".gz") else data, object_pairs_hook=told)
    except (ValueError, RecursionError, EOFError, OSError, zlib.error) as error:
        raise DamagedError(key, f"altered since it was read: {error}") from error


def _shared_blocks(stored: StoredCheckpoint) -> Iterator[Problem]:
    """All parts of a block belong to fields of the same logical dtypes (PRT-4)."""
    met: dict[tuple[int, int], list[str | None]] = {}
    for entry in stored.manifest.tables:
        dtype_of = {f.name: f.dtype for f in entry.fields}
        for part in stored.stored_parts()[entry.name]:
            block = stored.part_file(part.writer).blocks[part.block]
            mine = [dtype_of.get(f.name) for f in block.fields]
            if met.setdefault((part.writer, part.block), mine) != mine:
                place = stored.place(layout.part_file(part.writer))
                message = f"parts of block {part.block} belong to fields of several logical dtypes (PRT-4)"
                yield Problem(place=place, kind="damaged", message=message)


def _group(stored: StoredCheckpoint, key: str) -> None:
    document = _json(stored, key)
    if (document.get("zarr_format"), document.get("node_type")) != (3, "group"):
        raise DamagedError(key, "not a Zarr v3 group (ZAR-1)")
    _check_keys(document, {"zarr_format", "node_type", "attributes"}, key)


def _metadata(stored: StoredCheckpoint, array: str, entry: ArrayEntry) -> None:
    """An array's own metadata must say what the part file says (ZAR-2, ZAR-3, ZAR-5)."""
    key = f"{array}/zarr.json"
    found = _json(stored, key)
    wanted = json.loads(
        layout.array_document(array, entry.dtype, tuple(entry.shape), entry.chunk_rows, entry.compression)
    )
    for name in ("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value"):
        if found.get(name) != wanted[name]:
            raise DamagedError(key, f"{name} is {found.get(name)}, the part file means {wanted[name]} (ZAR-5)")
    codecs = found.get("codecs")
    if not isinstance(codecs, list) or not _same_codecs(codecs, wanted["codecs"]):
        raise DamagedError(key, f"codecs {codecs}, the part file means {wanted['codecs']} (ZAR-5)")
    if found.get("storage_transformers"):
        raise DamagedError(key, "it has storage transformers (ZAR-2)")
    names = found.get("dimension_names", [])
    if not isinstance(names, list) or len(names) not in (0, len(entry.shape)):
        raise DamagedError(key, f"dimension_names {names} of an array of {len(entry.shape)} dimensions")
    _check_keys(found, wanted.keys() | {"storage_transformers"}, key)


def _check_keys(document: dict[str, Any], known: AbstractSet[str], key: str) -> None:
    """Refuse what a Zarr reader refuses: keys that it does not know and may not ignore."""
    for name in document.keys() - known:
        if not isinstance(document[name], dict) or document[name].get("must_understand") is not False:
            raise DamagedError(key, f"unknown key {name!r}")
    if not isinstance(document.get("attributes", {}), dict):
        raise DamagedError(key, "its attributes are not a JSON object")


_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "endian": lambda value: value == "little",
    "level": lambda value: type(value) is int and -(2**17) <= value <= 22,
    "checksum": lambda value: isinstance(value, bool),
    "cname": lambda value: value == "zstd",
    "clevel": lambda value: type(value) is int and 0 <= value <= 9,
    "shuffle": lambda value: value in ("noshuffle", "shuffle", "bitshuffle"),
    "typesize": lambda value: type(value) is int and 1 <= value <= 255,
    "blocksize": lambda value: type(value) is int and 0 <= value < 2**31,
}
"""Settings of codecs, and which values they may have (ZAR-3); most matter to encoders only."""


def _same_codecs(found: list[Any], wanted: list[dict[str, Any]]) -> bool:
    """Whether codecs decode as those that are wanted; a setting that ours lacks may be there, if it changes nothing."""
    if [codec.get("name") if isinstance(codec, dict) else None for codec in found] != [c["name"] for c in wanted]:
        return False
    for codec, ours in zip(found, wanted, strict=True):
        settings, needed = codec.get("configuration", {}), ours.get("configuration", {}).keys()
        allowed = needed | {"endian"} if codec["name"] == "bytes" else needed
        if codec.keys() - {"name", "configuration"} or not isinstance(settings, dict):
            return False
        if not needed <= settings.keys() <= allowed or not all(_SETTINGS[name](settings[name]) for name in settings):
            return False
    return True


def _json(stored: StoredCheckpoint, key: str) -> dict[str, Any]:
    data = stored.store.get(key)
    if data is None:
        raise DamagedError(key, "the object is missing")
    try:
        document = json.loads(data)
    except ValueError as error:
        raise DamagedError(key, f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DamagedError(key, "not a JSON object")
    return document


def _table(history: History, stored: StoredCheckpoint, entry: TableEntry) -> None:
    """A table's parts, and that its layers supply every row (sections 6 to 8)."""
    stored.entry(entry.name)
    for part in stored.parts(entry.name):
        if part.count:
            check_contents(stored.block(part), part, entry)
    layers = history.layers(stored, entry.name)
    wanted = WantedRange(0, entry.rows) if entry.rows is not None else WantedIds(live_keys(layers))
    for _ in pieces(layers, wanted):
        pass


def _caught(check: Callable[[], object], place: str) -> list[Problem]:
    try:
        check()
    except CheckrunError as error:
        return [Problem.of(error, place)]
    return []
