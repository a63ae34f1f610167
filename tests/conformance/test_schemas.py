"""The JSON Schemas and the parsers agree: on documents of a run, and on hundreds of changes of them."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.manifest import DOCUMENTS, parse_manifest
from checkrun_format.partfile import parse_parts

ROOT = Path(__file__).parents[2]

WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "minus two": -2,
    "one": 1,
    "half": 1.5,
    "one, with a fraction": 1.0,
    "2^53 - 1": 2**53 - 1,
    "2^53": 2**53,
    "2^63 - 1": 2**63 - 1,
    "2^63": 2**63,
    "2^80": 2**80,
    "no text": "",
    "text": "a",
    "capitals": "Weight",
    "a digit": "7",
    "a path": "../x",
    "a newline": "a\n",
    "64 letters": "a" * 64,
    "64 letters and a newline": "a" * 64 + "\n",
    "65 letters": "a" * 65,
    "64 capitals": "A" * 64,
    "16 digits": "0" * 16,
    "15 digits": "0" * 15,
    "a version": "0.9",
    "a longer version": "0.9.1",
    "a newer version": "10.0",
    "a version with zeros": "00.9",
    "a kind": "pruned",
    "not ASCII": "٣é💾",
    "an empty list": [],
    "a list of null": [None],
    "a list of a number": [7],
    "a list of three numbers": [1, 2, 3],
    "eight numbers": [0] * 8,
    "an empty object": {},
    "an object": {"bytes": 1, "sha256": "0" * 64},
}
"""What is put in the place of every value."""


@functools.cache
def validator(name: str, *, integers_only: bool = True) -> Any:
    """The validator of a committed schema; by default 1.0 is no integer to it (section 5)."""
    schema = json.loads((ROOT / "spec/schemas" / f"{name}.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    if not integers_only:
        return jsonschema.Draft202012Validator(schema)
    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=checker)(schema)


def is_parsed(name: str, document: Any) -> bool:
    try:
        msgspec.json.decode(json.dumps(document).encode(), type=DOCUMENTS[name])
    except msgspec.ValidationError:
        return False
    return True


def is_damaged(name: str, document: Any) -> bool:
    """Whether the parser refuses a document whose values are, each on its own, as they should be."""
    data = json.dumps(document).encode()
    try:
        if name == "manifest":
            parse_manifest(data, "here")
        else:
            parse_parts(gzip.compress(data), "here")
    except crf.DamagedError:
        return True
    return False


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every document of a run: bases and increments, every encoding, two writers, a rollback, a pruned marker."""
    folder = tmp_path_factory.mktemp("schemas") / "run"
    build(folder)
    found: dict[str, list[Any]] = {name: [] for name in DOCUMENTS}
    found["run"].append(checkrun_of(folder / "zarr.json"))
    for path in sorted(folder.glob("0*/zarr.json")):
        found["commit"].append(checkrun_of(path))
    found["pruned"].append({"kind": "pruned", "format_version": "0.9", "sequence": 2**53 - 1})
    found["tag"].append(json.loads((folder / "tags/best-1.0.json").read_bytes()))
    for path in sorted(folder.glob("0*/*/manifest.json")):
        found["manifest"].append(json.loads(path.read_bytes()))
    for path in sorted(folder.glob("0*/*/parts-*.json.gz")):
        found["parts"].append(json.loads(gzip.decompress(path.read_bytes())))
    return found


def checkrun_of(path: Path) -> Any:
    return json.loads(path.read_bytes())["attributes"]["checkrun"]


def build(folder: Path) -> None:
    run = crf.open_run(folder, "a", durable=False, policy="consecutive")
    weight = np.arange(12, dtype=np.float32).reshape(6, 2)
    weight[1, 0] = np.nan
    keys = np.array([3, 4, 8, 11, 12, 40], np.uint64)
    for step, deleted in ((None, None), (7, [99])):
        dense = crf.Table({"weight": weight, "sum": weight[:, 0]}, bits=4, store_as={"sum": "float16"}, changed=[1, 2])
        keyed = crf.Table({"weight": weight}, keys=keys, changed=[4, 8], deleted=deleted)
        state = crf.State(
            tables={"dense": dense, "keyed/é": keyed}, tensors={"t": weight[:3]}, blobs={"b": b"1"}, extra={"a": [1.5]}
        )
        run.save(state, step=step)
    save, parts = run.begin(writers=2), []
    for rank, rows in enumerate([(0, 4), (4, 6)]):
        writer, some = save.writer(rank), weight[slice(*rows)]
        writer.put("dense", {"weight": some, "sum": some[:, 0]}, rows=rows, of=6)
        parts.append(writer.finish())
    save.commit(parts, dropped=["keyed/é"])
    run.rollback(1)
    run.tag("best-1.0", 2)


def changes_of(document: Any) -> Iterator[tuple[str, Any]]:
    """Every change of a document: what was done where, and the changed document."""
    for path in paths_in(document):
        where = "$" + "".join(f"[{step!r}]" for step in path)
        value = at(document, path)
        for what, wrong in WRONG.items():
            if not same(wrong, value):
                yield f"{where} is {what}", put(document, path, wrong)
        if isinstance(value, dict):
            yield f"{where} has one key more", put(document, path, value | {"Stranger": [None]})
            for key in value:
                yield f"{where} lacks {key}", put(document, path, {k: v for k, v in value.items() if k != key})
        if isinstance(value, list):
            yield f"{where} has null at its end", put(document, path, [*value, None])
            yield f"{where} twice", put(document, path, value * 2)
            yield f"{where} but its last", put(document, path, value[:-1])


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def trimmed(value: Any, key: str = "") -> Any:
    """Of every list but parts, and of the arrays of a block, the first and the last only: the others are alike."""
    if isinstance(value, dict):
        names = list(value)
        kept = {*names[:1], *names[-1:]} if key == "arrays" else set(names)
        return {name: trimmed(value[name], name) for name in names if name in kept}
    if isinstance(value, list) and not all(type(item) is int for item in value):
        return [trimmed(value[index]) for index in sorted({0, len(value) - 1})]
    return value


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to every value inside."""
    yield path
    for step in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths_in(value[step], (*path, step))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def test_the_run_has_documents_of_every_kind(documents: dict[str, list[Any]]) -> None:
    assert documents.keys() == DOCUMENTS.keys()
    assert {name: len(found) for name, found in documents.items()} == {
        "run": 1,
        "commit": 4,
        "pruned": 1,
        "manifest": 4,
        "parts": 5,
        "tag": 1,
    }
    assert any(block["arrays"].get("deleted") for parts in documents["parts"] for block in parts["blocks"])
    assert {table["storage"] for m in documents["manifest"] for table in m["tables"]} == {
        "full",
        "changed",
        "unchanged",
    }


@pytest.mark.parametrize("name", DOCUMENTS)
def test_both_accept_what_the_library_writes(documents: dict[str, list[Any]], name: str) -> None:
    assert documents[name]
    for document in documents[name]:
        assert [error.message for error in validator(name, integers_only=False).iter_errors(document)] == []
        assert is_parsed(name, document)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_both_agree_on_every_change(documents: dict[str, list[Any]], name: str) -> None:
    """DOC-1, DOC-2: keys dropped and added, every value replaced by others of every type, range and pattern.

    What keys demand of one another the schema says and the record does not: then it is the parser that refuses.
    """
    accepted = refused = together = 0
    chosen = trimmed(max(documents[name], key=lambda document: len(json.dumps(document))))
    assert validator(name).is_valid(chosen)
    for what, document in changes_of(chosen):
        expected, found = validator(name).is_valid(document), is_parsed(name, document)
        if found and not expected and name in ("manifest", "parts"):
            together += 1
            found = not is_damaged(name, document)
        assert found == expected, f"{what}: {'valid' if expected else 'not valid'} by the schema"
        accepted, refused = accepted + expected, refused + (not expected)
    assert accepted > 2
    assert refused > 80
    assert (together > 10) == (name in ("manifest", "parts"))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_refuses_a_document_of_another_kind(documents: dict[str, list[Any]], name: str) -> None:
    for other in DOCUMENTS.keys() - {name}:
        for document in documents[other]:
            assert not validator(name).is_valid(document)
            assert not is_parsed(name, document)


def test_to_a_schema_a_whole_float_is_an_integer(documents: dict[str, list[Any]]) -> None:
    """The one difference that cannot be avoided: JSON Schema calls 1.0 an integer, section 5 of FORMAT.md does not."""
    document = documents["commit"][0] | {"restores": 1.0}
    assert validator("commit", integers_only=False).is_valid(document)
    assert not validator("commit").is_valid(document)
    assert not is_parsed("commit", document)


def test_to_a_schema_a_lone_surrogate_is_text(documents: dict[str, list[Any]]) -> None:
    """TRE-3 wants text that UTF-8 can carry: JSON Schema cannot say so, the parser refuses it."""
    text = json.dumps(documents["manifest"][0] | {"dropped": ["\ud800"]})
    assert "\\ud800" in text
    assert validator("manifest").is_valid(json.loads(text))
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text.encode(), type=DOCUMENTS["manifest"])


def test_the_committed_schemas_are_those_of_the_records(tmp_path: Path) -> None:
    """Made anew by the script that made them, each is the same, byte for byte, and there is no other."""
    subprocess.run([sys.executable, ROOT / "spec/make_schemas.py", tmp_path], check=True, cwd=ROOT, timeout=60)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "spec/schemas").iterdir()}
    assert made.keys() == {f"{name}.schema.json" for name in DOCUMENTS}
    assert made == committed


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_key_of_a_document_is_required(documents: dict[str, list[Any]], name: str) -> None:
    """Section 5: all keys are required unless marked optional, and none is."""
    for document in documents[name]:
        for key in document:
            less = {other: value for other, value in document.items() if other != key}
            assert [error.validator for error in validator(name).iter_errors(less)] == ["required"]
