"""Alterations of a run: values of documents, bytes of chunks; and the digests made anew, as a faulty writer would."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
import msgspec
import numpy as np
from hypothesis import strategies as st

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.manifest import ArrayEntry
from checkrun_format.testing import MemoryStore

Json = Any
Path = tuple[str | int, ...]
Objects = Mapping[str, bytes]

ROWS, MANY, LAST = 12, 60, 5

VALUES: list[Json] = [
    None, True, False, [], {}, [0], [None], {"": 0}, "", "a", "x" * 70, "\n", "\x00", "é",
    0, 1, -1, 2, 3, 7, 8, 9, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**80, -(2**63),
    0.0, 1.0, 0.5, -0.0, 1e300,
    "raw", "affine", "codebook", "zstd", "blosc", "lz4", "full", "changed", "unchanged", "dense", "keyed",
    "int64", "uint64", "int32", "uint8", "bool", "float16", "bfloat16", "float32", "float64", "float8_e5m2", "float4",
    "complex64", "datetime64_ns", "blob", "rows", "rows_first", "recent", "deleted", "w.codes", "w.exact_index", "../x",
    "0.9", "0.10", "1.0", "checkpoint", "pruned", "run", "tag", "0" * 16, "0" * 64,
]  # fmt: skip
"""What is put in the place of a value, or, if it is text, of a key."""


# The run --------------------------------------------------------------------------------------------------------------


def build() -> Objects:
    """A base, increments by one writer and by two, growth, tombstones, a rollback, a copy as a base, a tag."""
    store = MemoryStore()
    run = crf.open_run(store, "a", chunk_bytes=100, durable=False)
    chance = np.random.default_rng(3)
    weight = chance.standard_normal((ROWS, 3), np.float32)
    weight[2, 1] = np.nan
    keys = np.array([-7, 3, 9])
    for step, changed in enumerate(([], [1, 5], [0, 12])):
        weight[changed[:1], 0] = np.inf
        if step == 2:
            weight, keys = np.vstack([weight, weight[:2]]), np.array([-7, 9, 11])
        fields = {"w": weight, "half": weight.astype(np.float16), "narrow": weight[:, 0] * np.float32(1 + 1e5 * step)}
        many = {"v": np.arange(MANY, dtype=np.uint16) * (step + 1), "w": np.ones((MANY, 2)) * np.arange(MANY)[:, None]}
        tables = {
            "dense": crf.Table(fields, bits={"w": 3}, store_as={"narrow": "float16"}, changed=changed),
            "keyed": crf.Table({"b": keys > 3}, keys=keys, changed=keys[:1], deleted=[3] if step == 2 else ()),
            "many": crf.Table(many, keys=np.arange(MANY) * 3 + 7, bits={"w": 2}, changed=[7, 10]),
            "empty": crf.Table({"x": np.zeros((0, 4), np.int8)}, changed=()),
        }
        tensors = {"t": weight[0], "z": np.array([True]), "none": np.zeros((0, 2))}
        extra = {"step": step, "text": "é" * 40}
        run.save(crf.State(tables=tables, tensors=tensors, blobs={"rng": bytes(range(9))}, extra=extra), step=step)
    save = run.begin(step=3, writers=2, parent="latest")
    first, second = save.writer(0), save.writer(1)
    common: dict[str, Any] = {"rows": [1, 13], "of": len(weight), "storage": "changed", "bits": {"w": 3}}
    half = weight[:2].astype(np.float16)
    left = {"w": weight[:2, :2], "half": half}
    recent, narrow = np.array([True, False]), {"narrow": "float16"}
    first.put("dense", left, columns={"w": (0, 2), "half": (0, 3)}, recent=recent, **common)
    right = {"w": weight[:2, 2:], "narrow": weight[:2, 0]}
    second.put("dense", right, columns={"w": (2, 3)}, recent=False, store_as=narrow, **common)
    second.put("keyed", {"b": np.array([True])}, keys=np.array([77]), deleted=[11], storage="changed")
    first.put_tensor("f", weight[4])
    save.commit([second.finish(), first.finish()], unchanged=["many"], dropped=["empty"], extra=[1, {"é": None}])
    run.rollback(2)
    run.tag("best", 4)
    assert run.verify() == []
    assert run.latest().sequence == LAST
    return dict(store.objects)


def prefix_of(objects: Objects, number: int) -> str:
    """Where the objects of a checkpoint's attempt are."""
    commit = json.loads(objects[layout.commit_key(number)])["attributes"]["checkrun"]
    return layout.attempt_prefix(number, commit["attempt"])


# Documents ------------------------------------------------------------------------------------------------------------

TWICE = "@twice@"


def parsed(key: str, data: bytes) -> Json:
    return json.loads(gzip.decompress(data) if key.endswith(".gz") else data)


def written(key: str, document: Json) -> bytes:
    """The bytes of a document; a key that ends with TWICE becomes the key itself."""
    text = json.dumps(document, ensure_ascii=False).replace(TWICE, "").encode()
    return gzip.compress(text, mtime=0) if key.endswith(".gz") else text


def paths(value: Json, path: Path = ()) -> Iterator[Path]:
    """The paths to every value inside."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in items:
        yield from paths(inner, (*path, step))


def at(document: Json, path: Path) -> Json:
    for step in path:
        document = document[step]
    return document


@st.composite
def altered_documents(draw: st.DrawFn, key: str, data: bytes) -> bytes:
    """A document in which one value is another, is missing, stands there twice, or has changed places with a second."""
    document = copy.deepcopy(parsed(key, data))
    places = list(paths(document))[1:]
    path = draw(st.sampled_from(places))
    parent, step = at(document, path[:-1]), path[-1]
    value = parent[step]
    what = draw(st.sampled_from(["value", "value", "near", "missing", "twice", "more", "renamed", "swapped"]))
    if what == "value":
        parent[step] = draw(st.sampled_from(VALUES))
    elif what == "near" and isinstance(value, int):
        parent[step] = value + draw(st.sampled_from([-1, 1, -value, value, 2**32]))
    elif what == "near" and isinstance(value, str) and value:
        place = draw(st.integers(0, len(value) - 1))
        parent[step] = value[:place] + draw(st.sampled_from("0fX\n")) + value[place + 1 :]
    elif what == "missing":
        del parent[step]
    elif what == "twice" and isinstance(parent, dict):
        parent[f"{step}{TWICE}"] = draw(st.sampled_from(VALUES))
    elif what == "twice" or (what == "more" and isinstance(parent, list)):
        parent.insert(step, copy.deepcopy(value))
    elif what == "more":
        parent[draw(st.sampled_from([v for v in VALUES if isinstance(v, str)]))] = copy.deepcopy(value)
    elif what == "renamed" and isinstance(parent, dict):
        parent[draw(st.sampled_from([v for v in VALUES if isinstance(v, str)]))] = parent.pop(step)
    else:
        alike = [p for p in places if type(at(document, p)) is type(value) and p[: len(path)] != path]
        other = draw(st.sampled_from([p for p in alike if path[: len(p)] != p] or [path]))
        parent[step] = copy.deepcopy(at(document, other))
        at(document, other[:-1])[other[-1]] = value
    return written(key, document)


@st.composite
def altered_bytes(draw: st.DrawFn, data: bytes) -> bytes | None:
    """An object of which bytes are others, missing or more; or none at all."""
    what = draw(st.sampled_from(["bit", "bit", "byte", "range", "less", "more", "none"]))
    if what == "none" or not data:
        return None
    place = draw(st.integers(0, len(data) - 1))
    if what == "bit":
        return data[:place] + bytes([data[place] ^ 1 << draw(st.integers(0, 7))]) + data[place + 1 :]
    if what == "byte":
        return data[:place] + bytes([draw(st.sampled_from([0, 1, 127, 128, 254, 255]))]) + data[place + 1 :]
    if what == "range":
        some = draw(st.binary(min_size=1, max_size=16))
        return data[:place] + some + data[place + len(some) :]
    return data[:place] if what == "less" else data + draw(st.binary(min_size=1, max_size=16))


def arrays_in(objects: Objects, prefix: str) -> Iterator[tuple[str, Json, str]]:
    """Key, entry and part file of each array of an attempt."""
    for key in [key for key in objects if re.fullmatch(rf"{prefix}/parts-[0-9]+\.json\.gz", key)]:
        document = parsed(key, objects[key])
        for index, block in enumerate(document["blocks"]):
            for name, entry in block["arrays"].items():
                yield f"{prefix}/block-{document['writer']}-{index}/{name}", entry, key
        for name, entry in document["dense"].items():
            yield f"{prefix}/dense-{document['writer']}/{name}", entry, key


@st.composite
def altered_chunks(draw: st.DrawFn, data: bytes, entry: Json) -> bytes:
    """A chunk with a right checksum and wrong contents: elements that are others, or any bytes."""
    payload = draw(altered_bytes(data[:-4])) or b""
    if draw(st.booleans()):
        from checkrun_format import chunks

        record = msgspec.convert({k: v for k, v in entry.items() if k != "checksums"}, ArrayEntry)
        alone = msgspec.structs.replace(record, shape=[entry["chunk_rows"], *entry["shape"][1:]])
        elements = chunks.decode(data, alone, 0, "here").copy()
        raw = elements.reshape(-1).view(np.uint8)
        some = np.frombuffer(draw(st.binary(min_size=1, max_size=elements.itemsize * 2)), np.uint8)
        start = draw(st.integers(0, raw.size - 1))
        raw[start : start + some.size] = some[: raw.size - start]
        return b"".join(bytes(buffer) for buffer in chunks.encode(elements, alone))
    checksum: int = google_crc32c.value(payload)
    return payload + checksum.to_bytes(4, "little")


# Digests --------------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> Json:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def sealed(objects: Objects, altered: str) -> dict[str, bytes]:
    """The run with checksums, digests and sizes that fit what was altered, as far as there are documents for it."""
    found = dict(objects)
    first = layout.parse_folder(altered.partition("/")[0])
    for number in range(first or LAST + 1, LAST + 1):
        try:
            _seal(found, number, altered)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            continue  # it is a document that was altered, and there is no place for a digest
    return found


def _seal(found: dict[str, bytes], number: int, altered: str) -> None:
    commit_key = layout.commit_key(number)
    frame = json.loads(found[commit_key])
    commit = frame["attributes"]["checkrun"]
    prefix = layout.attempt_prefix(number, commit["attempt"])
    manifest_key = f"{prefix}/manifest.json"
    if altered.startswith(f"{prefix}/") and "/c/" in altered and altered in found:
        _seal_chunk(found, prefix, altered)
    if altered != commit_key:
        kept = [key for key in found if key.startswith(f"{prefix}/") and key != manifest_key]
        commit["stored_bytes"] = sum(len(found[key]) for key in kept)
    if altered != manifest_key:
        manifest = json.loads(found[manifest_key])
        manifest["commit"] = {key: value for key, value in commit.items() if key != "manifest"}
        manifest["writers"] = [digest(found[f"{prefix}/parts-{w}.json.gz"]) for w in range(len(manifest["writers"]))]
        for name in ("parent", "predecessor"):
            manifest[f"{name}_sha256"] = _sha256_of(found, commit[name])
        found[manifest_key] = json.dumps(manifest, ensure_ascii=False).encode()
    commit["manifest"] |= digest(found[manifest_key])
    found[commit_key] = json.dumps(frame, ensure_ascii=False).encode()


def _sha256_of(found: Objects, number: int | None) -> str | None:
    if number is None:
        return None
    below = json.loads(found[layout.commit_key(number)])
    return str(below["attributes"]["checkrun"]["manifest"]["sha256"])


def _seal_chunk(found: dict[str, bytes], prefix: str, altered: str) -> None:
    for array, _, key in list(arrays_in(found, prefix)):
        if altered.startswith(f"{array}/c/"):
            document = parsed(key, found[key])
            index = int(altered.removeprefix(f"{array}/c/").partition("/")[0])
            _, _, *block = array.removeprefix(f"{prefix}/").partition("/")[0].split("-")
            name = array.rpartition("/")[2]
            arrays = document["blocks"][int(block[0])]["arrays"] if block else document["dense"]
            arrays[name]["checksums"][index] = int.from_bytes(found[altered][-4:], "little")
            found[key] = written(key, document)
