"""The documents of a run as frozen records, and their parsers (FORMAT.md section 5). Pure: bytes in, records out.

For each document there is `parse_x`, which gives the record or raises, and `validate_x`, which lists every problem.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from checkrun_format import layout, versions
from checkrun_format.errors import CheckrunError, DamagedError, NotARunError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Sequence53 = Annotated[int, msgspec.Meta(ge=1, le=layout.MAX_SEQUENCE)]
# Python's `$` also matches before a newline at the end: `(?!\n)` makes it mean what JSON Schema means.
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]
Attempt = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16,64}(?!\n)$")]
TagName = Annotated[str, msgspec.Meta(pattern=r"^(?![0-9]+$)[a-z0-9][a-z0-9._-]{0,63}(?!\n)$")]
Version = Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})(?!\n)$")]
FieldName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}(?!\n)$")]
ArrayName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}(\.[a-z0-9_]{1,63})?(?!\n)$")]
Columns = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Checksum = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Part = Annotated[list[Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]], msgspec.Meta(min_length=8)]
"""A part: table, block, offset, count, first_row, recent, deleted_offset, deleted_count, then a column per field."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records: frozen, slotted, keyword-only. Unknown keys are ignored (DOC-1)."""


class Problem(Record, frozen=True, kw_only=True):
    """One thing that is wrong, and where."""

    place: str
    kind: str
    message: str

    @classmethod
    def of(cls, error: CheckrunError, place: str) -> Problem:
        """An error as a problem; at `place` if the error does not know better."""
        if isinstance(error, DamagedError):
            return cls(place=error.place, kind=error.kind, message=error.problem)
        return cls(place=place, kind=error.kind, message=str(error))


class RunDocument(Record, frozen=True, kw_only=True):
    """`run/zarr.json` (5.1)."""

    kind: Literal["run"]
    format_version: Version
    requires: list[str]


class PolicyNote(Record, frozen=True, kw_only=True):
    """Who decided base or increment, and why; and what came before (COM-7)."""

    name: str
    reason: str
    increments: Count | msgspec.UnsetType = msgspec.UNSET
    increments_bytes: Count | msgspec.UnsetType = msgspec.UNSET


class Digest(Record, frozen=True, kw_only=True):
    """Size and SHA-256 of an object, over its raw bytes."""

    bytes: Count
    sha256: Sha256


class Commit(Record, frozen=True, kw_only=True):
    """`run/<sequence>/zarr.json`: the commit of a checkpoint (5.2)."""

    kind: Literal["checkpoint"]
    format_version: Version
    requires: list[str]
    sequence: Sequence53
    step: Count | None
    created: str
    attempt: Attempt
    parent: Sequence53 | None
    predecessor: Sequence53 | None
    rollback_to: Sequence53 | None
    restores: Count
    policy: PolicyNote
    stored_bytes: Count
    manifest: Digest

    @property
    def prefix(self) -> str:
        """Where the objects of its attempt are."""
        return layout.attempt_prefix(self.sequence, self.attempt)

    @property
    def bytes(self) -> int:
        """Bytes of all objects of the checkpoint, the manifest included, the commit apart."""
        return self.stored_bytes + self.manifest.bytes


class Pruned(Record, frozen=True, kw_only=True):
    """The marker that stays where a checkpoint was pruned (5.3)."""

    kind: Literal["pruned"]
    format_version: Version
    sequence: Sequence53


class Tag(Record, frozen=True, kw_only=True):
    """`tags/<name>.json`: a name of a checkpoint (5.6)."""

    kind: Literal["tag"]
    format_version: Version
    name: TagName
    sequence: Sequence53


class Burnt(Record, frozen=True, kw_only=True):
    """What is not in the format: a number occupied by no commit (COM-2)."""

    sequence: int


class Field(Record, frozen=True, kw_only=True):
    """One field of a table (5.4)."""

    name: FieldName
    dtype: str
    columns: Columns | None
    encoder: dict[str, Any] | None


TableKind: TypeAlias = tuple[str, str | None, frozenset[tuple[str, str, int | None]]]
"""Addressing, key dtype, and the fields: name, logical dtype and columns of each."""


class TableEntry(Record, frozen=True, kw_only=True):
    """One table of a manifest (5.4)."""

    name: str
    requires: list[str]
    addressing: str
    key_dtype: str | None
    rows: Count | None
    storage: str
    fields: Annotated[list[Field], msgspec.Meta(min_length=1)]

    @property
    def kind(self) -> TableKind:
        """What its layers have in common (LAY-2)."""
        return self.addressing, self.key_dtype, frozenset((f.name, f.dtype, f.columns) for f in self.fields)


class TensorEntry(Record, frozen=True, kw_only=True):
    """One dense tensor of a manifest (5.4)."""

    name: str
    dtype: str
    shape: list[Count]
    writer: Count
    offset: Count


class Span(Record, frozen=True, kw_only=True):
    """A slice of a writer's `blob` array."""

    writer: Count
    offset: Count
    bytes: Count


class BlobEntry(Record, frozen=True, kw_only=True):
    """One named blob of a manifest (5.4)."""

    name: str
    writer: Count
    offset: Count
    bytes: Count


class Manifest(Record, frozen=True, kw_only=True):
    """`manifest.json` (5.4)."""

    commit: dict[str, Any]
    parent_sha256: Sha256 | None
    predecessor_sha256: Sha256 | None
    writers: list[Digest]
    tables: list[TableEntry]
    dropped: list[str]
    tensors: list[TensorEntry]
    blobs: list[BlobEntry]
    extra: Any
    extra_blob: Span | None


class ArrayEntry(Record, frozen=True, kw_only=True):
    """Shape, dtype and cut of one stored array, and the checksum of each chunk (5.5)."""

    dtype: str
    shape: Annotated[list[Columns], msgspec.Meta(min_length=1, max_length=2)]
    chunk_rows: Columns
    compression: str | None
    checksums: list[Checksum] | msgspec.UnsetType = msgspec.UNSET


class BlockField(Record, frozen=True, kw_only=True):
    """One field of a block (5.5)."""

    name: FieldName
    encoding: str
    columns: Columns | None
    bits: Count | None
    dtype: str | None


class BlockEntry(Record, frozen=True, kw_only=True):
    """One block of a part file (5.5)."""

    rows: Count
    fields: list[BlockField]
    arrays: dict[ArrayName, ArrayEntry]


class PartFile(Record, frozen=True, kw_only=True):
    """`parts-<w>.json.gz` (5.5)."""

    writer: Count
    attempt: Attempt
    tables: list[str]
    blocks: list[BlockEntry]
    parts: list[Part]
    dense: dict[ArrayName, ArrayEntry]


class _Attributes(Record, frozen=True, kw_only=True):
    checkrun: msgspec.Raw
    zarr_conventions: list[Any]


class _Group(Record, frozen=True, kw_only=True):
    zarr_format: Literal[3]
    node_type: Literal["group"]
    attributes: _Attributes


class _Kind(Record, frozen=True, kw_only=True):
    kind: str
    format_version: str = ""


R = TypeVar("R", bound=Record)

DOCUMENTS: dict[str, type[Record]] = {
    "run": RunDocument,
    "commit": Commit,
    "pruned": Pruned,
    "manifest": Manifest,
    "parts": PartFile,
    "tag": Tag,
}
"""Document name -> its record. `spec/schemas/<name>.schema.json` describes each."""


_MALFORMED = (msgspec.DecodeError, ValueError, RecursionError)
"""What a parser raises for bytes that it cannot read; the last one for JSON that is nested too deep."""


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a document, as shipped with the format."""
    packaged = resources.files("checkrun_format") / "_schemas"
    folder = packaged if packaged.is_dir() else Path(__file__).parent.parent / "spec" / "schemas"
    found: dict[str, Any] = json.loads((folder / f"{name}.schema.json").read_text("utf-8"))
    return found


def validate(name: str, data: bytes, place: str) -> list[Problem]:
    """Every problem of a document: that it is no JSON, and all that its schema refuses."""
    import jsonschema  # only ever needed to explain damage

    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        return [Problem(place=place, kind="json", message=f"not JSON: {error}")]
    validator = jsonschema.Draft202012Validator(schema(name))
    return [
        Problem(place=f"{place}#{error.json_path}", kind=str(error.validator), message=error.message[:300])
        for error in validator.iter_errors(document)
    ]


def decode(name: str, data: bytes, place: str) -> Any:
    """A document as its record; DamagedError tells what is wrong with it."""
    try:
        return msgspec.json.decode(data, type=DOCUMENTS[name])
    except _MALFORMED as error:
        problems = validate(name, data, place)
        explained = "; ".join(f"{p.place.partition('#')[2]} {p.message}".strip() for p in problems[:5])
        raise DamagedError(place, f"not a {name} document: {explained or error}") from error


def _checkrun_of(data: bytes, place: str) -> bytes:
    """The `checkrun` object of a `zarr.json`, once its frame is checked (DOC-3)."""
    try:
        group = msgspec.json.decode(data, type=_Group)
        json.loads(data)  # also what is under keys that nobody knows: MAN-1 compares all of it
    except _MALFORMED as error:
        raise DamagedError(place, f"not a Zarr v3 group with a checkrun document: {error}") from error
    uuids = [entry.get("uuid") for entry in group.attributes.zarr_conventions if isinstance(entry, dict)]
    if layout.CONVENTION["uuid"] not in uuids:
        raise DamagedError(place, "zarr_conventions does not name the checkrun convention")
    return bytes(group.attributes.checkrun)


def _kind_of(body: bytes, place: str) -> str:
    try:
        head = msgspec.json.decode(body, type=_Kind)
    except _MALFORMED as error:
        raise DamagedError(place, f"no kind in its checkrun document: {error}") from error
    versions.check_version(head.format_version, place)
    return head.kind


def parse_run(data: bytes, place: str = layout.RUN_KEY) -> RunDocument:
    """Parse `run/zarr.json`.

    Raises
    ------
    NotARunError, DamagedError, UnsupportedVersionError, UnsupportedFeatureError
        It is no such document, malformed, of another version, or needs an unknown feature.
    """
    if _is_burnt(data) or _is_stranger(data):
        raise NotARunError(f"{place} is not that of a run")
    body = _checkrun_of(data, place)
    kind = _kind_of(body, place)
    if kind == "checkpoint":
        raise NotARunError(f"{place} is that of a checkpoint: give the folder above it, which is the run")
    if kind != "run":
        raise DamagedError(place, f"its kind is {kind!r}, not 'run'")
    document: RunDocument = decode("run", body, place)
    versions.check_features(document.requires, "the run")
    return document


def parse_occupant(data: bytes, sequence: int) -> Commit | Pruned | Burnt:
    """Tell what occupies a number (COM-2).

    Raises
    ------
    DamagedError
        The object is neither a commit, nor a pruned marker, nor the remains of something that never was one.
    UnsupportedVersionError, UnsupportedFeatureError
        A commit that this library cannot read.
    """
    place = layout.commit_key(sequence)
    if _is_burnt(data):
        return Burnt(sequence=sequence)
    body = _checkrun_of(data, place)
    kind = _kind_of(body, place)
    if kind not in ("checkpoint", "pruned"):
        raise DamagedError(place, f"its kind is {kind!r}, neither 'checkpoint' nor 'pruned'")
    record: Commit | Pruned = decode("commit" if kind == "checkpoint" else "pruned", body, place)
    if record.sequence != sequence:
        raise DamagedError(place, f"it says sequence {record.sequence}")
    if isinstance(record, Commit):
        if len(data) > layout.MAX_COMMIT_BYTES:
            raise DamagedError(place, f"{len(data)} bytes; a commit has at most {layout.MAX_COMMIT_BYTES} (COM-3)")
        versions.check_features(record.requires, f"checkpoint {sequence}")
        _check_order(record, place)
    return record


def parse_tag(data: bytes, name: str) -> Tag:
    """Parse `tags/<name>.json` (5.6).

    Raises
    ------
    DamagedError, UnsupportedVersionError
    """
    place = layout.tag_key(name)
    kind = _kind_of(data, place)
    if kind != "tag":
        raise DamagedError(place, f"its kind is {kind!r}, not 'tag'")
    tag: Tag = decode("tag", data, place)
    if tag.name != name:
        raise DamagedError(place, f"it says name {tag.name!r}")
    return tag


def _plain(data: bytes) -> Any:
    """JSON as it is; None for what is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _is_burnt(data: bytes) -> bool:
    """Nothing, or the implicit group of a Zarr library."""
    document = _plain(data)
    return not data or (
        isinstance(document, dict)
        and document.keys() <= {"zarr_format", "node_type", "consolidated_metadata", "attributes"}
        and (document.get("zarr_format"), document.get("node_type")) == (3, "group")
        and not document.get("attributes")
    )


def _is_stranger(data: bytes) -> bool:
    """A Zarr array, or a group with attributes of others only."""
    document = _plain(data)
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        return False
    attributes = document.get("attributes", {})
    return isinstance(attributes, dict) and not attributes.keys() & {"checkrun", "zarr_conventions"}


def _check_order(commit: Commit, place: str) -> None:
    """COM-6."""
    predecessor = commit.predecessor or 0
    for name in ("parent", "rollback_to"):
        number = getattr(commit, name)
        if number is not None and number > predecessor:
            raise DamagedError(place, f"{name} {number} is above its predecessor {commit.predecessor} (COM-6)")
    if predecessor >= commit.sequence:
        raise DamagedError(place, f"predecessor {predecessor} is not below its sequence {commit.sequence} (COM-6)")


def commit_object(data: bytes) -> dict[str, Any]:
    """The `checkrun` object of a commit as plain JSON values, without its key `manifest` (MAN-1)."""
    checkrun: dict[str, Any] = json.loads(data)["attributes"]["checkrun"]
    return {key: value for key, value in checkrun.items() if key != "manifest"}


def check_repeated(repeated: dict[str, Any], commit: dict[str, Any], place: str) -> None:
    """Refuse a commit that its manifest repeats otherwise (MAN-1); 1, 1.0 and true are three values."""
    try:
        one, other = (json.dumps(document, sort_keys=True) for document in (repeated, commit))
    except RecursionError as error:
        raise DamagedError(place, "it is nested too deep") from error
    if one != other:
        raise DamagedError(place, "it differs from what its manifest repeats (MAN-1)")


def check_digest(data: bytes, digest: Digest, place: str) -> None:
    """Refuse bytes that are not those that a digest was taken of (MAN-1)."""
    if len(data) != digest.bytes:
        raise DamagedError(place, f"{len(data)} bytes where {digest.bytes} were written")
    if hashlib.sha256(data).hexdigest() != digest.sha256:
        raise DamagedError(place, "its SHA-256 is not the one recorded when it was written")


def digest_of(data: bytes) -> Digest:
    """Size and SHA-256 of bytes."""
    return Digest(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def parse_manifest(data: bytes, place: str) -> Manifest:
    """Parse `manifest.json`; its digest is the caller's to check.

    Raises
    ------
    DamagedError
        Malformed, or it contradicts itself.
    """
    manifest: Manifest = decode("manifest", data, place)
    for what, names in (
        ("table", [table.name for table in manifest.tables]),
        ("tensor", [tensor.name for tensor in manifest.tensors]),
        ("blob", [blob.name for blob in manifest.blobs]),
    ):
        check_unique(what, names, place)
    for table in manifest.tables:
        check_unique(f"field of table {table.name!r}", [field.name for field in table.fields], place)
        if table.addressing in ("dense", "keyed"):
            _check_addressing(table, place)
    for name in ("parent", "predecessor"):
        number, sha256 = manifest.commit.get(name), getattr(manifest, f"{name}_sha256")
        if (number is None) != (sha256 is None):
            raise DamagedError(place, f"{name} is {number} and {name}_sha256 {sha256} (5.4)")
    if manifest.extra is not None and manifest.extra_blob is not None:
        raise DamagedError(place, "it has extra and extra_blob (5.4)")
    return manifest


def copied(value: Any, place: str) -> Any:
    """A copy of a document's JSON values, for somebody to change."""
    try:
        return copy.deepcopy(value)
    except RecursionError as error:
        raise DamagedError(place, "it is nested too deep") from error


def _check_addressing(table: TableEntry, place: str) -> None:
    """Known values that contradict one another (TAB-1)."""
    is_keyed = table.addressing == "keyed"
    if (table.rows is None) != is_keyed or table.key_dtype in ((None,) if is_keyed else ("int64", "uint64")):
        told = f"rows {table.rows} and key_dtype {table.key_dtype}"
        raise DamagedError(place, f"table {table.name!r}: {told} in a {table.addressing} table (TAB-1)")


def check_unique(what: str, names: Sequence[str], place: str) -> None:
    """Refuse names of which one stands there twice."""
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DamagedError(place, f"{what} {twice!r} stands there twice")


def as_object(record: Record) -> dict[str, Any]:
    """A record as plain JSON values."""
    return msgspec.to_builtins(record)  # type: ignore[no-any-return]
