"""Claiming a number, and the single atomic write that makes a checkpoint exist (FORMAT.md 9.1)."""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from checkrun_format import layout, manifest
from checkrun_format.errors import CheckrunError, ConcurrentCommitError, DamagedError, InvalidInputError
from checkrun_format.manifest import Commit, Manifest, PolicyNote, Span, TableEntry
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.stores import AlreadyExistsError, Store
from checkrun_format.versions import FORMAT_VERSION
from checkrun_format.writer import PartList, objects_of

_MAX_REASON = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A number that a save wants, and the attempt under which it writes."""

    sequence: int
    attempt: str

    @classmethod
    def of(cls, sequence: int) -> Claim:
        """A fresh attempt at a number (TRE-2)."""
        if sequence > layout.MAX_SEQUENCE:
            raise InvalidInputError(f"number {sequence} is beyond 2^53 - 1")
        return cls(sequence=sequence, attempt=secrets.token_hex(16))

    @property
    def prefix(self) -> str:
        """Where the attempt's objects go."""
        return layout.attempt_prefix(self.sequence, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a checkpoint says beside its part files."""

    step: int | None
    tables: Sequence[TableEntry]
    policy: PolicyNote
    parent: StoredCheckpoint | None = None
    predecessor: Commit | None = None
    rollback_to: int | None = None
    restores: int = 0
    dropped: Sequence[str] = ()
    extra: Any = None
    extra_blob: Mapping[str, int] | None = None


def open_attempt(store: Store, claim: Claim) -> int:
    """Write the attempt's own group; return its size."""
    return store.put(f"{claim.prefix}/zarr.json", [layout.group_document()])


def seal(store: Store, claim: Claim, content: Content, part_lists: Sequence[PartList], group_bytes: int) -> bytes:
    """Write the manifest and make the attempt durable; return the commit, which is yet to be created."""
    body = _commit_body(claim, content, sum(part.stored_bytes for part in part_lists) + group_bytes)
    data = _manifest_bytes(content, part_lists, body)
    store.put(f"{claim.prefix}/manifest.json", [data])
    store.sync(claim.prefix)
    digest = manifest.digest_of(data)
    document = layout.group_document({**body, "manifest": manifest.as_object(digest)})
    if len(document) > layout.MAX_COMMIT_BYTES:
        raise InvalidInputError(f"the commit takes {len(document)} bytes, more than {layout.MAX_COMMIT_BYTES} (COM-3)")
    return document


def check_ground(store: Store, parent: StoredCheckpoint | None) -> None:
    """Refuse to commit where the run, or the checkpoint to be laid over, was removed or damaged since it was opened.

    Raises
    ------
    DamagedError
    """
    key = layout.RUN_KEY if parent is None else layout.commit_key(parent.commit.sequence)
    found = store.get(key)
    if found is None:
        raise DamagedError(key, f"it is gone from {store.url}: was the run removed? Open it anew to save a base")
    if parent is not None and not _is_still_there(found, parent.commit):
        raise DamagedError(key, "it is not what it was, and nothing is laid over it: save a base (parent=None)")


def _is_still_there(data: bytes, commit: Commit) -> bool:
    """Whether this is the commit that it was; one that is pruned by now is no damage: its chain is needed no more."""
    try:
        occupant = manifest.parse_occupant(data, commit.sequence)
    except DamagedError:
        return False
    return isinstance(occupant, manifest.Pruned) or occupant == commit


def commit(store: Store, claim: Claim, document: bytes) -> Commit:
    """Create the commit that `seal` returned.

    Raises
    ------
    NumberTakenError
        Another attempt holds the number.
    StorageError
        The store failed; whether the commit landed is then unknown only if reading it back failed too.
    """
    _create(store, claim, document)
    committed = manifest.parse_occupant(document, claim.sequence)
    assert isinstance(committed, Commit)
    return committed


class NumberTakenError(Exception):
    """The claimed number is occupied by something else than the claimed attempt."""

    def __init__(self, attempt: str | None, what: str) -> None:
        super().__init__(what)
        self.attempt = attempt


def _create(store: Store, claim: Claim, document: bytes) -> None:
    """Create the commit; when that fails, read back what is there and decide (HEA-3)."""
    key = layout.commit_key(claim.sequence)
    try:
        store.create(key, document)
    except (AlreadyExistsError, CheckrunError, OSError) as error:
        found = store.get(key)
        if found == document:
            return
        if found is None and not isinstance(error, AlreadyExistsError):
            raise
        attempt, what = _describe(found, claim.sequence)
        raise NumberTakenError(attempt, what) from error


def taken(store: Store, claim: Claim) -> NumberTakenError | None:
    """Who holds the claimed number by now, None if it is free."""
    found = store.get(layout.commit_key(claim.sequence))
    return None if found is None else NumberTakenError(*_describe(found, claim.sequence))


def _describe(data: bytes | None, sequence: int) -> tuple[str | None, str]:
    if data is None:
        return None, "an object that is gone again"
    try:
        occupant = manifest.parse_occupant(data, sequence)
    except CheckrunError as error:
        return None, f"a damaged object ({error})"
    if isinstance(occupant, Commit):
        return occupant.attempt, f"attempt {occupant.attempt}, committed at {occupant.created}"
    return None, "a pruned marker" if isinstance(occupant, manifest.Pruned) else "an object that is no commit"


def _commit_body(claim: Claim, content: Content, stored_bytes: int) -> dict[str, Any]:
    predecessor = content.predecessor
    return {
        "kind": "checkpoint",
        "format_version": FORMAT_VERSION,
        "requires": [],
        "sequence": claim.sequence,
        "step": content.step,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "attempt": claim.attempt,
        "parent": None if content.parent is None else content.parent.commit.sequence,
        "predecessor": None if predecessor is None else predecessor.sequence,
        "rollback_to": content.rollback_to,
        "restores": content.restores,
        "policy": manifest.as_object(
            msgspec.structs.replace(content.policy, reason=content.policy.reason[:_MAX_REASON])
        ),
        "stored_bytes": stored_bytes,
    }


def _manifest_bytes(content: Content, part_lists: Sequence[PartList], body: dict[str, Any]) -> bytes:
    predecessor = content.predecessor
    span = content.extra_blob
    document = Manifest(
        commit=body,
        parent_sha256=None if content.parent is None else content.parent.commit.manifest.sha256,
        predecessor_sha256=None if predecessor is None else predecessor.manifest.sha256,
        writers=[part.file for part in part_lists],
        tables=list(content.tables),
        dropped=list(content.dropped),
        tensors=[manifest.TensorEntry(**tensor) for part in part_lists for tensor in part.tensors],
        blobs=[manifest.BlobEntry(**blob) for part in part_lists for blob in part.blobs],
        extra=content.extra,
        extra_blob=None if span is None else Span(**span),
    )
    return layout.to_json(manifest.as_object(document))


def check_objects(store: Store, claim: Claim, part_lists: Sequence[PartList]) -> None:
    """One listing of the attempt must show every object that a part list implies (9.1, step 3).

    Raises
    ------
    DamagedError
        An object is not there, or a part file has another size.
    """
    listing = store.list(claim.prefix)
    for part in part_lists:
        key = f"{claim.prefix}/{layout.part_file(part.document.writer)}"
        if listing.get(key) != part.file.bytes:
            raise DamagedError(key, f"writer {part.document.writer} finished, but its part file is not there")
        for name in objects_of(part.document):
            if f"{claim.prefix}/{name}" not in listing:
                raise DamagedError(f"{claim.prefix}/{name}", f"writer {part.document.writer} did not store this object")


def lost_to(claim: Claim, taken: NumberTakenError) -> ConcurrentCommitError:
    """The error of a save that lost its number to somebody else."""
    return ConcurrentCommitError(
        f"number {claim.sequence} is taken by {taken}: another process writes this run. Nothing of it was changed and "
        "the changed rows are kept; open the run anew (and restore) to go on from what was committed"
    )
