"""The documents: bytes to records, and what is refused (FORMAT.md section 5)."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from checkrun_format import layout, manifest, partfile
from checkrun_format.errors import (
    CheckrunError,
    DamagedError,
    NotARunError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)
from checkrun_format.manifest import Burnt, Commit, Pruned

UUID = "d5df0d53-d446-49ad-a4cd-95a3e6d6a63f"
SHA, OTHER_SHA, ATTEMPT = "0123456789abcdef" * 4, "f" * 64, "00ff" * 8
DEEP = 100_000
"""Levels of nesting that no parser follows."""

Json = dict[str, Any]


def run_document() -> Json:
    return {"kind": "run", "format_version": "0.9", "requires": []}


def commit_document() -> Json:
    return {
        "kind": "checkpoint",
        "format_version": "0.9",
        "requires": [],
        "sequence": 42,
        "step": 12_000,
        "created": "2026-05-04T03:02:01.123456Z",
        "attempt": ATTEMPT,
        "parent": 40,
        "predecessor": 41,
        "rollback_to": None,
        "restores": 3,
        "policy": {"name": "intermittent", "reason": "another increment pays"},
        "stored_bytes": 2**40,
        "manifest": {"bytes": 1234, "sha256": SHA},
    }


def pruned_document() -> Json:
    return {"kind": "pruned", "format_version": "0.9", "sequence": 42}


def tag_document() -> Json:
    return {"kind": "tag", "format_version": "0.9", "name": "best", "sequence": 42}


def field(name: str = "weight", columns: int | None = 8) -> Json:
    return {"name": name, "dtype": "float32", "columns": columns, "encoder": {"name": "minmax", "bits": 4}}


def table(name: str = "user", **changes: Any) -> Json:
    told = {
        "name": name,
        "requires": [],
        "addressing": "dense",
        "key_dtype": None,
        "rows": 100,
        "storage": "full",
        "fields": [field(), field("sum", None)],
    }
    return told | changes


def manifest_document() -> Json:
    commit = commit_document()
    del commit["manifest"]
    return {
        "commit": commit,
        "parent_sha256": SHA,
        "predecessor_sha256": OTHER_SHA,
        "writers": [{"bytes": 77, "sha256": OTHER_SHA}],
        "tables": [table(), table("keys", addressing="keyed", key_dtype="uint64", rows=None)],
        "dropped": ["old/💾 table"],
        "tensors": [{"name": "mlp", "dtype": "bfloat16", "shape": [3, 0], "writer": 0, "offset": 0}],
        "blobs": [{"name": "rng", "writer": 0, "offset": 5, "bytes": 6}],
        "extra": {"reader": [1, 2.5, None, {"é": True}]},
        "extra_blob": None,
    }


def array(shape: list[int], dtype: str = "uint8") -> Json:
    return {"dtype": dtype, "shape": shape, "chunk_rows": 4, "compression": None}


def block(**changes: Any) -> Json:
    """Ten listed rows of one quantized field, and three tombstones."""
    told = {
        "rows": 10,
        "fields": [{"name": "weight", "encoding": "affine", "columns": 8, "bits": 4, "dtype": None}],
        "arrays": {
            "weight.codes": array([10, 4]),
            "rows": array([10], "int64"),
            "recent": array([2]),
            "deleted": array([3], "int64"),
        },
    }
    return told | changes


def parts_document() -> Json:
    return {
        "writer": 0,
        "attempt": ATTEMPT,
        "tables": ["user", "keys"],
        "blocks": [block()],
        "parts": [[0, 0, 0, 4, -1, 1, 0, 0, 0], [1, 0, 4, 6, -1, 2, 0, 3, 0]],
        "dense": {"blob": array([11])},
    }


def framed(document: Any, **changes: Any) -> bytes:
    attributes = {"zarr_conventions": [{"uuid": UUID, "name": "checkrun"}], "checkrun": document}
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(group | changes).encode()


PACKED = gzip.compress(b"{}", mtime=0)  # workers must give the tests that it names the same names


def packed(document: Any) -> bytes:
    return gzip.compress(json.dumps(document).encode())


PARSERS: dict[str, tuple[Callable[[], Json], Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "run": (run_document, framed, manifest.parse_run),
    "commit": (commit_document, framed, lambda data: manifest.parse_occupant(data, 42)),
    "pruned": (pruned_document, framed, lambda data: manifest.parse_occupant(data, 42)),
    "manifest": (manifest_document, lambda d: json.dumps(d).encode(), lambda d: manifest.parse_manifest(d, "m")),
    "parts": (parts_document, packed, lambda data: partfile.parse_parts(data, "p")),
    "tag": (tag_document, lambda d: json.dumps(d).encode(), lambda data: manifest.parse_tag(data, "best")),
}
"""Document name -> a valid document, what makes bytes of it, and its parser."""


# Every document -------------------------------------------------------------------------------------------------------


def test_there_is_a_parser_for_every_document() -> None:
    assert PARSERS.keys() == manifest.DOCUMENTS.keys()


@pytest.mark.parametrize("name", PARSERS)
def test_a_valid_document_becomes_a_record_that_says_the_same(name: str) -> None:
    document, encode, parse = PARSERS[name]
    record = parse(encode(document()))
    assert type(record) is manifest.DOCUMENTS[name]
    assert manifest.as_object(record) == document()
    assert not hasattr(record, "__dict__")
    with pytest.raises(AttributeError):
        record.kind = "other"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PARSERS)
def test_unknown_keys_are_ignored(name: str) -> None:
    """DOC-1: readers MUST ignore keys that they do not know."""
    document, encode, parse = PARSERS[name]
    more = with_strangers(document())
    assert len(json.dumps(more)) > len(json.dumps(document()))
    assert manifest.as_object(parse(encode(more))) == document()


def with_strangers(value: Any, key: str = "") -> Any:
    """With an unknown key in every object whose keys the page tells."""
    if key in ("encoder", "extra", "commit"):
        return value
    if isinstance(value, dict):
        found = {name: with_strangers(inner, name) for name, inner in value.items()}
        return found if key in ("arrays", "dense") else {"Stranger": {"a": [1e300]}} | found
    return [with_strangers(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", PARSERS)
def test_every_key_is_required(name: str) -> None:
    """DOC-2: a required key that is absent makes the document damaged; the message names it."""
    document, encode, parse = PARSERS[name]
    for key in document():
        less = document()
        del less[key]
        with pytest.raises(DamagedError) as caught:
            parse(encode(less))
        assert key in str(caught.value)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("value", [None, True, 1, 1.5, "x", [], {}], ids=repr)
def test_no_document_is_another_value(name: str, value: Any) -> None:
    _, encode, parse = PARSERS[name]
    with pytest.raises(DamagedError):
        parse(encode(value))


@pytest.mark.parametrize("name", ["manifest", "parts", "tag"])
@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff", b"nul", b"{}{}", b'{"a":1,}', b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16"), b"NaN", b"\x00"],
    ids=repr,
)
def test_what_is_no_json_is_damaged(name: str, text: bytes) -> None:
    """RFC 8259 in UTF-8, without byte order mark."""
    with pytest.raises(DamagedError):
        PARSERS[name][2](gzip.compress(text) if name == "parts" else text)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("where", ["all of it", "an unknown key", "a known key"])
def test_nesting_without_end_is_damage_and_no_crash(name: str, where: str) -> None:
    """Legal JSON that no parser follows: one of our errors, never RecursionError."""
    document, _, parse = PARSERS[name]
    deep = "[" * DEEP + "]" * DEEP
    text = {
        "all of it": deep,
        "an unknown key": json.dumps(document() | {"stranger": 0})[:-2] + deep + "}",
        "a known key": json.dumps(document()).replace('"format_version": "0.9"', f'"format_version": {deep}', 1)
        if name in ("run", "commit", "pruned", "tag")
        else json.dumps(document()).replace('"attempt": ', f'"attempt": {deep}, "was": ', 1),
    }[where]
    assert deep in text
    data = framed("@").replace(b'"@"', text.encode()) if name in ("run", "commit", "pruned") else text.encode()
    with pytest.raises(DamagedError):
        parse(gzip.compress(data) if name == "parts" else data)


def test_nesting_at_the_limit_of_one_parser_or_the_other() -> None:
    """The commit goes through two parsers, which give up at different depths."""
    outcomes = set()
    for depth in (*range(1, 2_000, 7), 200_000):
        deep = "[" * depth + "]" * depth
        data = framed(commit_document() | {"stranger": "@"}).replace(b'"@"', deep.encode())
        try:
            manifest.parse_occupant(data, 42)
            manifest.commit_object(data)
            outcomes.add("read")
        except DamagedError:
            outcomes.add("damaged")
    assert outcomes == {"read", "damaged"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("commit", "sequence"),
        ("commit", "step"),
        ("pruned", "sequence"),
        ("tag", "sequence"),
        ("manifest", "rows"),
        ("parts", "chunk_rows"),
    ],
)
def test_integers_have_no_fraction(name: str, key: str) -> None:
    """Section 5: integers are written without fraction or exponent; another type is damage (DOC-2)."""
    document, encode, parse = PARSERS[name]
    text = json.dumps(document())
    for written in ("42.0", "4.2e1", '"42"', "42.5", "true", "[42]"):
        changed = re.sub(rf'"{key}": [0-9]+', f'"{key}": {written}', text, count=1)
        assert changed != text
        data = framed("@").replace(b'"@"', changed.encode()) if encode is framed else changed.encode()
        with pytest.raises(DamagedError):
            parse(gzip.compress(data) if encode is packed else data)


@pytest.mark.parametrize("name", ["run", "commit", "pruned", "tag"])
def test_other_versions_are_refused_whatever_else_they_say(name: str) -> None:
    """VER-1: another major version, and below 1.0 another minor one."""
    _, encode, parse = PARSERS[name]
    for version in ("0.8", "0.10", "1.0", "9.9"):
        with pytest.raises(UnsupportedVersionError, match=rf"{version}.*reads 0\.9"):
            parse(encode({"kind": "something new", "format_version": version}))


NO_VERSIONS = ["", "0", "0.9.1", "v0.9", "0.09", "00.9", "0.9\n", " 0.9", "0.9999999999", "\u0660.\u0669", None, 0.9]


@pytest.mark.parametrize("name", ["run", "commit", "pruned"])
@pytest.mark.parametrize("version", NO_VERSIONS, ids=repr)
def test_what_is_no_version_is_damage(name: str, version: Any) -> None:
    """VER-1: `MAJOR.MINOR`."""
    document, encode, parse = PARSERS[name]
    with pytest.raises(DamagedError):
        parse(encode(document() | {"format_version": version}))


@pytest.mark.parametrize("name", ["run", "commit"])
def test_unknown_features_are_refused_by_name(name: str) -> None:
    """VER-2: a reader that does not know one refuses what lists it."""
    document, encode, parse = PARSERS[name]
    with pytest.raises(UnsupportedFeatureError, match=r"requires sharding_indexed, zebra"):
        parse(encode(document() | {"requires": ["zebra", "sharding_indexed"]}))


# The frame of a `zarr.json` -------------------------------------------------------------------------------------------

FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "no group": lambda data: data.replace(b'"group"', b'"array"'),
    "Zarr 2": lambda data: data.replace(b'"zarr_format": 3', b'"zarr_format": 2'),
    "another convention": lambda data: data.replace(UUID.encode(), b"00000000-d446-49ad-a4cd-95a3e6d6a63f"),
    "no convention": lambda data: data.replace(b'"zarr_conventions"', b'"conventions"'),
    "no list of conventions": lambda data: data.replace(
        b'"zarr_conventions": [{', b'"zarr_conventions": {"a": [{}], "b": {', 1
    ).replace(b"}], ", b"}}, ", 1),
    "no attributes": lambda data: data.replace(b'"attributes"', b'"attributions"'),
    "document cut short": lambda data: data[:-2],
    "text after it": lambda data: data + b"x",
}


@pytest.mark.parametrize("name", ["run", "commit", "pruned"])
@pytest.mark.parametrize("frame", FRAMES)
def test_a_document_in_another_frame_is_damaged(name: str, frame: str) -> None:
    """DOC-3: `checkrun` present, but other parts not so."""
    document, encode, parse = PARSERS[name]
    changed = FRAMES[frame](encode(document()))
    assert changed != encode(document())
    stranger = (name, frame) == ("run", "no attributes")
    with pytest.raises(NotARunError if stranger else DamagedError):
        parse(changed)


def test_others_may_add_conventions_and_attributes() -> None:
    """DOC-3 wants an entry with this uuid, DOC-1 ignores the rest."""
    group = json.loads(framed(commit_document()))
    group["attributes"]["zarr_conventions"][:0] = [{"uuid": "1", "name": "proj:"}, {}, None, 7, "x", [{"uuid": UUID}]]
    group["attributes"]["multiscales"] = [1]
    group["consolidated_metadata"] = None
    assert isinstance(manifest.parse_occupant(json.dumps(group).encode(), 42), Commit)


# What occupies a number -----------------------------------------------------------------------------------------------

BURNT = [
    b"",
    b'{"zarr_format":3,"node_type":"group"}',
    b'{"zarr_format":3,"node_type":"group","attributes":{}}',
    b'{"attributes":{},"zarr_format":3,"consolidated_metadata":null,"node_type":"group"}',
]

DAMAGED = [
    b" ",
    b"{}",
    b"[]",
    b"null",
    b"\x00" * 700,
    b'{"zarr_format":3',
    b'{"zarr_format":2,"node_type":"group","attributes":{}}',
    b'{"zarr_format":3,"node_type":"array","attributes":{}}',
    b'{"zarr_format":3,"node_type":"group","attributes":{"multiscales":[]}}',
    b'{"zarr_format":3,"node_type":"group","attributes":{"zarr_conventions":[]}}',
    b'{"zarr_format":3,"node_type":"group","attributes":{},"stranger":1}',
    b'{"zarr_format":3,"node_type":"group","attributer":{"checkrun":{}}}',
    framed(run_document()),
    framed(commit_document() | {"kind": "Checkpoint"}),
    framed(commit_document() | {"sequence": 43}),
    framed(pruned_document() | {"sequence": 41}),
    framed(commit_document())[:-1],
]


@pytest.mark.parametrize("data", BURNT, ids=repr)
def test_burnt(data: bytes) -> None:
    """COM-2: an object of 0 bytes, or the implicit group of a Zarr library."""
    found = manifest.parse_occupant(data, 42)
    assert found == Burnt(sequence=42)


@pytest.mark.parametrize("data", DAMAGED, ids=lambda data: repr(data)[:60])
def test_damaged(data: bytes) -> None:
    """COM-2: anything else, be it the half of a commit or one of another number."""
    with pytest.raises(DamagedError) as caught:
        manifest.parse_occupant(data, 42)
    assert caught.value.place == "00000042/zarr.json"
    assert caught.value.kind == "damaged"


def test_no_part_of_a_commit_is_burnt() -> None:
    """COM-2: only nothing at all is the remains of an exclusive create."""
    data = framed(commit_document())
    for size in range(1, len(data)):
        with pytest.raises(DamagedError):
            manifest.parse_occupant(data[:size], 42)


def test_committed_and_pruned() -> None:
    assert isinstance(manifest.parse_occupant(framed(commit_document()), 42), Commit)
    assert isinstance(manifest.parse_occupant(framed(pruned_document()), 42), Pruned)


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": 42},
        {"predecessor": 42, "parent": None},
        {"predecessor": 43, "parent": None},
        {"rollback_to": 42},
        {"rollback_to": 100},
        {"parent": 41, "predecessor": 40},
        {"parent": 41, "predecessor": None},
        {"parent": 0},
        {"parent": -1},
        {"sequence": 0},
        {"sequence": 2**53},
        {"step": -1},
        {"step": 2**63},
        {"restores": None},
        {"stored_bytes": 2**63},
        {"attempt": ATTEMPT.upper()},
        {"attempt": "0" * 15},
        {"attempt": "0" * 65},
        {"attempt": "0" * 32 + "\n"},
        {"attempt": "../../etc/passwd0000"},
        {"policy": {"name": "x"}},
        {"policy": {"name": "x", "reason": "", "increments": -1}},
        {"policy": {"name": "x", "reason": "", "increments_bytes": None}},
        {"manifest": {"bytes": -1, "sha256": SHA}},
        {"manifest": {"bytes": 1, "sha256": SHA[1:]}},
        {"manifest": {"bytes": 1, "sha256": SHA + "\n"}},
        {"manifest": {"bytes": 1, "sha256": SHA.upper()}},
    ],
    ids=repr,
)
def test_commits_that_contradict_the_page(changes: Json) -> None:
    """COM-6, TRE-1, TRE-2, DOC-2."""
    with pytest.raises(DamagedError) as caught:
        manifest.parse_occupant(framed(commit_document() | changes), changes.get("sequence", 42))
    assert caught.value.place.endswith("/zarr.json")


@pytest.mark.parametrize("byte", [b"\xe5", b"\x01"])
def test_a_key_that_nobody_knows_has_to_be_json(byte: bytes) -> None:
    """DOC-1, MAN-1: its value is ignored, and compared with the manifest's all the same."""
    data = framed(commit_document() | {"stranger": "?"}).replace(b"?", byte)
    with pytest.raises(DamagedError):
        manifest.parse_occupant(data, 42)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": None},
        {"step": 2**63 - 1, "stored_bytes": 2**63 - 1, "restores": 2**63 - 1},
        {"policy": {"name": "x", "reason": "", "increments": 0, "increments_bytes": 2**63 - 1}},
        {"parent": None, "predecessor": None},
        {"parent": 41},
        {"rollback_to": 41},
        {"created": ""},
        {"sequence": 2**53 - 1},
        {"attempt": "0" * 16},
        {"attempt": "f" * 64},
    ],
    ids=repr,
)
def test_commits_at_the_edge_of_what_is_allowed(changes: Json) -> None:
    found = manifest.parse_occupant(framed(commit_document() | changes), changes.get("sequence", 42))
    assert manifest.as_object(found) == commit_document() | changes


def test_a_commit_has_at_most_8192_bytes() -> None:
    """COM-3; of another version it is taken for committed, whatever its size (COM-2)."""
    data = framed(commit_document() | {"padding": ""})
    most = data.replace(b'"padding": ""', b'"padding": "%s"' % (b"x" * (8192 - len(data))))
    assert len(most) == 8192
    assert isinstance(manifest.parse_occupant(most, 42), Commit)
    with pytest.raises(DamagedError, match=r"^00000042/zarr.json: 8193 bytes; .*COM-3"):
        manifest.parse_occupant(most + b" ", 42)
    with pytest.raises(UnsupportedVersionError):
        manifest.parse_occupant(most.replace(b'"0.9"', b'"1.9"') + b" ", 42)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0, False), (None, 0), ("a", "A"), ([1], [1.0])])
def test_a_commit_is_repeated_by_types_too(one: Any, other: Any) -> None:
    """MAN-1: as JSON values, of the same types, keys that a reader does not know included."""
    manifest.check_repeated({"b": 1, "future": one}, {"future": one, "b": 1}, "here")
    with pytest.raises(DamagedError, match=r"^here: it differs from what its manifest repeats"):
        manifest.check_repeated({"future": [one]}, {"future": [other]}, "here")


def test_the_object_of_a_commit_is_without_its_manifest() -> None:
    """MAN-1: as JSON values, keys that a reader does not know included."""
    document = commit_document() | {"future": [2**70, 0.1, None, "é"]}
    expected = {key: value for key, value in document.items() if key != "manifest"}
    assert manifest.commit_object(framed(document)) == expected
    again = manifest.parse_manifest(json.dumps(manifest_document() | {"commit": expected}).encode(), "m")
    assert again.commit == expected


# Digests --------------------------------------------------------------------------------------------------------------


def test_a_digest_is_of_all_bytes() -> None:
    """MAN-1: size and SHA-256, over raw bytes."""
    data = b"some bytes"
    digest = manifest.digest_of(data)
    assert (digest.bytes, digest.sha256) == (10, hashlib.sha256(data).hexdigest())
    manifest.check_digest(data, digest, "here")
    for changed in (b"", data[:-1], data + b" ", b"Some bytes"):
        with pytest.raises(DamagedError) as caught:
            manifest.check_digest(changed, digest, "here")
        assert caught.value.place == "here"


# Manifests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"tables": [table(), table()]},
        {"tensors": manifest_document()["tensors"] * 2},
        {"blobs": manifest_document()["blobs"] * 2},
        {"tables": [table(fields=[field(), field()])]},
        {"tables": [table(fields=[])]},
        {"tables": [table(fields=[field("Weight")])]},
        {"tables": [table(fields=[field("weight\n")])]},
        {"tables": [table(fields=[field("a" * 65)])]},
        {"tables": [table(fields=[field("../x")])]},
        {"tables": [table(fields=[field("weight", 0)])]},
        {"tables": [table(rows=None)]},
        {"tables": [table(key_dtype="int64")]},
        {"tables": [table(addressing="keyed", key_dtype="int64")]},
        {"tables": [table(addressing="keyed", rows=None)]},
        {"parent_sha256": None},
        {"predecessor_sha256": None},
        {"commit": {key: value for key, value in commit_document().items() if key != "predecessor"}},
        {"commit": commit_document() | {"parent": None}},
        {"extra_blob": {"writer": 0, "offset": 0, "bytes": 2}},
        {"tables": [table(rows=-1)]},
        {"tables": [table(rows=2**63)]},
        {"writers": [{"bytes": 1}]},
        {"dropped": [None]},
        {"parent_sha256": "x"},
        {"extra_blob": {"writer": 0, "offset": 0}},
        {"commit": []},
    ],
    ids=lambda changes: repr(changes)[:70],
)
def test_manifests_that_contradict_the_page(changes: Json) -> None:
    """5.4, TRE-3, DOC-2: names are unique, fields have names, dense tables have rows."""
    with pytest.raises(DamagedError) as caught:
        manifest.parse_manifest(json.dumps(manifest_document() | changes).encode(), "x/manifest.json")
    assert caught.value.place == "x/manifest.json"


@pytest.mark.parametrize(
    "changes",
    [
        {"tables": [table(storage="sparse")]},
        {"tables": [table(addressing="hashed", rows=None)]},
        {"tables": [table(addressing="keyed", key_dtype="int128", rows=None)]},
        {"tables": [table(key_dtype="int128")]},
        {"tables": [table(requires=["codebook"])]},
        {"tables": [table(fields=[field() | {"dtype": "float4"}])]},
        {"tensors": [{"name": "t", "dtype": "float4", "shape": [], "writer": 9, "offset": 2**62}]},
        {"tables": [table(name) for name in ("", "a/b", "..", "Ä", "ä", "\x00", "x" * 300)]},
        {"tables": [], "writers": [], "tensors": [], "blobs": [], "dropped": []},
        {"extra": None},
        {"extra": None, "extra_blob": {"writer": 0, "offset": 0, "bytes": 2}},
        {"extra": 1e300},
        {"tables": [table(rows=0)]},
        {"tables": [table(rows=2**63 - 1)]},
    ],
    ids=lambda changes: repr(changes)[:70],
)
def test_manifests_that_are_read(changes: Json) -> None:
    """TAB-1: what is unknown in a table or tensor refuses only that one, later and by name; TRE-3: any name."""
    document = manifest_document() | changes
    found = manifest.parse_manifest(json.dumps(document).encode(), "m")
    assert manifest.as_object(found) == document


def test_a_lone_surrogate_is_no_name() -> None:
    """TRE-3: any Unicode text that UTF-8 can carry."""
    text = json.dumps(manifest_document() | {"tables": [table("@")]}).replace('"@"', '"\\ud800"')
    with pytest.raises(DamagedError):
        manifest.parse_manifest(text.encode(), "m")


# Part files -----------------------------------------------------------------------------------------------------------


def test_packing_is_deterministic_and_undone_by_parsing() -> None:
    """The same document gives the same bytes; any gzip reads them."""
    record = partfile.parse_parts(packed(parts_document()), "p")
    data = partfile.pack_parts(record)
    assert data == partfile.pack_parts(record)
    assert json.loads(gzip.decompress(data)) == parts_document()
    assert partfile.parse_parts(data, "p") == record


@pytest.mark.parametrize(
    "data",
    [b"", b"\x1f\x8b", b"{}", PACKED[:-1], PACKED[:12], PACKED + b"x", PACKED + PACKED, PACKED + b"\0"],
    ids=repr,
)
def test_what_is_not_one_member_of_gzip_is_damaged(data: bytes) -> None:
    """5.5: with nothing after it."""
    with pytest.raises(DamagedError) as caught:
        partfile.parse_parts(data, "x/parts-0.json.gz")
    assert caught.value.place == "x/parts-0.json.gz"


def test_every_flipped_bit_of_gzip_is_damage_or_harmless() -> None:
    """Without the digest that is checked before: never another error than ours, never another document."""
    data = packed(parts_document())
    expected = partfile.parse_parts(data, "p")
    for offset in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[offset] ^= 1 << bit
            try:
                found = partfile.parse_parts(bytes(changed), "p")
            except CheckrunError as error:
                assert error.kind == "damaged"  # noqa: PT017 - either this or an equal document
            else:
                assert found == expected
                assert offset in {*range(1, 10), len(data) - 9}, "the header, and what fills up the last byte"


FIRST, SECOND = parts_document()["parts"]


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": [FIRST]},
        {"parts": [SECOND, FIRST]},
        {"parts": [FIRST, SECOND, [0, 0, 10, 1, -1, 1, 3, 0, 0]]},
        {"parts": [FIRST, [1, 0, 5, 6, -1, 2, 0, 3, 0]]},
        {"parts": [FIRST, [1, 0, 3, 7, -1, 2, 0, 3, 0]]},
        {"parts": [FIRST, [1, 0, 4, 5, -1, 2, 0, 3, 0]]},
        {"parts": [FIRST, [1, 0, 4, 6, -1, 2, 0, 2, 0]]},
        {"parts": [FIRST, [1, 0, 4, 6, -1, 2, 1, 2, 0]]},
        {"parts": [FIRST, [1, 0, 4, 6, -1, 3, 0, 3, 0]]},
        {"parts": [FIRST, [1, 0, 4, 6, -1, -1, 0, 3, 0]]},
        {"parts": [FIRST, [1, 0, 4, 6, 0, 2, 0, 3, 0]]},
        {"parts": [FIRST, [2, 0, 4, 6, -1, 2, 0, 3, 0]]},
        {"parts": [FIRST, [-1, 0, 4, 6, -1, 2, 0, 3, 0]]},
        {"parts": [FIRST, [1, 1, 4, 6, -1, 2, 0, 3, 0]]},
        {"parts": [FIRST, [1, -1, 4, 6, -1, 2, 0, 3, 0]]},
        {"parts": [FIRST, [1, 0, 4, 6, -1, 2, 0, 3]]},
        {"parts": [FIRST, [1, 0, 4, 6, -1, 2, 0, 3, 0, 0]]},
        {"parts": [FIRST, [1, 0, 4, 6, -1, 2, 0, 3, -1]]},
        {"parts": [FIRST, [1, 0, 4, 6, -1, 2, 0]]},
        {"parts": [FIRST, SECOND, [1, 0, 10, 0, -1, 0, 3, 0, 0]]},
        {"parts": [FIRST, [1, 0, 4, -1, -1, 2, 0, 3, 0], [1, 0, 3, 7, -1, 2, 3, 0, 0]]},
        {"parts": []},
        {"blocks": []},
        {"blocks": [block(rows=11)]},
        {"blocks": [block(arrays={"weight.codes": array([10, 4]), "rows": array([10], "int64")})]},
        {"blocks": [block(fields=block()["fields"] * 2)], "parts": [[*FIRST, 0], [*SECOND, 0]]},
        {"blocks": [block(fields=[])], "parts": [FIRST[:8], SECOND[:8]]},
        {"blocks": [block(), {"rows": 0, "fields": [], "arrays": {"weight.codes": array([10, 4])}}]},
        {"blocks": [block(), block(rows=0, arrays={})]},
        {"blocks": [block(arrays={name: a for name, a in block()["arrays"].items() if name != "recent"})]},
        {"parts": [FIRST, [1, 0, 4, 6, -1, 1, 0, 3, 0]]},
        {"tables": ["user", "user"]},
        *({"dense": {name: array([3])}} for name in ("", "../blob", "a/b", "Blob", "blob\n", "a.b.c", ".", "a" * 65)),
        {"blocks": [block(arrays={"weight.codes": array([10, 4]), "deleted": array([3], "int64")})]},
        {"blocks": [block(), block()]},
        {"blocks": [block(arrays=block()["arrays"] | {"rows": array([])})]},
        {"blocks": [block(arrays=block()["arrays"] | {"rows": array([1, 2, 3])})]},
        {"blocks": [block(arrays=block()["arrays"] | {"rows": array([0])})]},
        {"blocks": [block(arrays=block()["arrays"] | {"rows": array([10]) | {"chunk_rows": 0}})]},
        {"dense": {"blob": array([2**63])}},
        {"attempt": "x"},
        {"writer": -1},
        {"tables": [1, 2]},
    ],
    ids=lambda changes: repr(changes)[:80],
)
def test_part_files_that_contradict_the_page(changes: Json) -> None:
    """PRT-1: without gap or overlap; PRT-2: all parts of a block list their rows or none; ZAR-2; DOC-2."""
    with pytest.raises(DamagedError) as caught:
        partfile.parse_parts(packed(parts_document() | changes), "x/parts-0.json.gz")
    assert caught.value.place == "x/parts-0.json.gz"


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 0},
        {"bits": 9},
        {"bits": None},
        {"columns": None},
        {"dtype": "float32"},
        {"encoding": "raw"},
        {"encoding": "raw", "bits": None},
        {"encoding": "raw", "dtype": "float32"},
    ],
    ids=repr,
)
def test_fields_leave_null_what_belongs_to_the_other_encoding(changes: Json) -> None:
    """5.5: known values that contradict one another are damage; an unknown encoding may mean anything (TAB-1)."""
    fields = [block()["fields"][0] | changes]
    document = parts_document() | {"blocks": [block(fields=fields)]}
    with pytest.raises(DamagedError, match=r"^p: block 0: (raw|affine) field 'weight' of .*5\.5"):
        partfile.parse_parts(packed(document), "p")
    fields[0]["encoding"] = "codebook"
    assert partfile.parse_parts(packed(document), "p").blocks[0].fields[0].encoding == "codebook"


def test_a_block_of_tombstones_only() -> None:
    """PRT-2: a part of count 0 stands in a block without rows and fields."""
    tombstones = {"rows": 0, "fields": [], "arrays": {"deleted": array([3], "int64")}}
    document = parts_document() | {"blocks": [tombstones], "parts": [[1, 0, 0, 0, -1, 0, 0, 3]]}
    assert manifest.as_object(partfile.parse_parts(packed(document), "p")) == document
    for part in ([1, 0, 0, 0, 0, 0, 0, 3], [1, 0, 0, 0, -1, 1, 0, 3]):
        with pytest.raises(DamagedError, match="PRT-2"):
            partfile.parse_parts(packed(document | {"parts": [part]}), "p")


def test_numbers_are_64_bits_wide() -> None:
    """Section 11: all row numbers, counts, offsets and byte counts."""
    most = 2**63 - 1
    arrays = {"weight.codes": array([most, 4]), "deleted": array([2**40], "int64")}
    document = parts_document() | {
        "blocks": [block(rows=most, arrays=arrays)],
        "parts": [[0, 0, 0, 2**62, 2**61, 1, 0, 2**40, 0], [0, 0, 2**62, 2**62 - 1, most, 1, 2**40, 0, most]],
    }
    assert manifest.as_object(partfile.parse_parts(packed(document), "p")) == document


# What is said about damage --------------------------------------------------------------------------------------------


def test_validate_lists_every_problem_with_its_place() -> None:
    """House rule 8: report every problem with its place and kind."""
    document = commit_document() | {"step": -1, "attempt": "x", "policy": {"name": 1}}
    problems = manifest.validate("commit", json.dumps(document).encode(), "here")
    found = {problem.place: problem.kind for problem in problems}
    assert found.keys() >= {"here#$.step", "here#$.attempt", "here#$.policy", "here#$.policy.name"}
    assert found["here#$.attempt"] == "pattern"
    assert manifest.validate("commit", json.dumps(commit_document()).encode(), "here") == []
    (problem,) = manifest.validate("commit", b"{", "here")
    assert (problem.place, problem.kind) == ("here", "json")


def test_the_error_of_a_malformed_document_tells_all_problems() -> None:
    with pytest.raises(DamagedError, match=r"not a manifest document: .*\$\.writers.*\$\.dropped") as caught:
        manifest.parse_manifest(json.dumps(manifest_document() | {"writers": 1, "dropped": {}}).encode(), "m")
    assert isinstance(caught.value.__cause__, msgspec.ValidationError)


@pytest.mark.parametrize("name", manifest.DOCUMENTS)
def test_the_schema_of_every_document_is_found(name: str) -> None:
    found = manifest.schema(name)
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert found["$id"] == f"urn:checkrun-format:0.9:{name}"


# The run document -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        *BURNT,
        b'{"zarr_format":3,"node_type":"group","attributes":{"multiscales":[]}}',
        b'{"zarr_format":3,"node_type":"array","shape":[3]}',
    ],
    ids=repr,
)
def test_a_group_of_others_is_no_run(data: bytes) -> None:
    """RUN-1: missing, empty, or a Zarr group without a document of this format."""
    with pytest.raises(NotARunError):
        manifest.parse_run(data)


@pytest.mark.parametrize("document", [pruned_document(), {"kind": "Run", "format_version": "0.9"}])
def test_another_document_is_no_run_document(document: Json) -> None:
    with pytest.raises(DamagedError) as caught:
        manifest.parse_run(framed(document))
    assert caught.value.place == layout.RUN_KEY


def test_the_folder_of_a_checkpoint_is_no_run() -> None:
    with pytest.raises(NotARunError, match="is that of a checkpoint: give the folder above it"):
        manifest.parse_run(framed(commit_document()))


def test_floats_are_the_same_to_both_parsers() -> None:
    """MAN-1 compares what two parsers made of the same text: they round alike."""
    for text in ("0.1", "1e-320", "1.7976931348623157e308", "123456789.123456789e-5", "5e-324", "-0.0"):
        one, other = msgspec.json.decode(text.encode()), json.loads(text)
        assert one == other
        assert math.copysign(1, one) == math.copysign(1, other)
