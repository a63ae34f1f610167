"""Documents that contradict one another though every digest fits: reading and `verify` name the rule that is broken."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format import chunks, layout
from checkrun_format.manifest import ArrayEntry
from checkrun_format.testing import MemoryStore
from tests.property.alterations import TWICE, Objects, arrays_in, build, parsed, prefix_of, sealed, written

pytestmark = pytest.mark.timeout(60)

Json = Any
DENSE, KEYED, MANY, EMPTY = 0, 1, 2, 3
"""The tables of checkpoints 1 to 3, in the manifest."""


@functools.cache
def intact() -> Objects:
    return build()


def run_of(objects: Objects) -> crf.Run:
    store = MemoryStore()
    store.objects = dict(objects)
    return crf.open_run(store)


def changed(number: int, name: str, change: Callable[[Json], object]) -> dict[str, bytes]:
    """The run with another document in a checkpoint: `manifest.json`, a part file, or its commit; digests fit."""
    objects = dict(intact())
    key = layout.commit_key(number) if name == "commit" else f"{prefix_of(objects, number)}/{name}"
    document = parsed(key, objects[key])
    change(document)
    objects[key] = written(key, document)
    return sealed(objects, key)


def block_of(document: Json, array: str) -> Json:
    """The block that has an array."""
    return next(block for block in document["blocks"] if array in block["arrays"])


def to(value: Json, *path: Any) -> Callable[[Json], None]:
    """Another value at a place; in a block if the place begins with the name of one of its arrays."""

    def change(document: Json) -> None:
        place = block_of(document, path[0])["arrays"] if "blocks" in document and path[0] != "dense" else document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def without(*names: str) -> Callable[[Json], None]:
    def change(document: Json) -> None:
        arrays = block_of(document, names[0])["arrays"]
        for name in names:
            del arrays[name]

    return change


def field(array: str, index: int, **values: Json) -> Callable[[Json], None]:
    return lambda document: block_of(document, array)["fields"][index].update(values)


@dataclass(frozen=True)
class Fault:
    """What is altered, what is then refused, and what is said of it."""

    number: int
    name: str
    change: Callable[[Json], object]
    told: str
    tables: tuple[str, ...] = ("dense",)
    """Those that cannot be read."""


PARTS, MANIFEST = "parts-0.json.gz", "manifest.json"
HUGE = 2**62
ALL = ("dense", "keyed", "many", "empty")


def other_bits(document: Json) -> None:
    """A uint16 field whose values are said to be those of float16: as many bytes, and another value each."""
    field("v.values", 0, dtype="float16")(document)
    to("float16", "v.values", "dtype")(document)


def many_chunks(array: str, rows: int = HUGE) -> Callable[[Json], None]:
    def change(document: Json) -> None:
        entry = block_of(document, array)["arrays"][array]
        entry["shape"] = [rows]
        del entry["checksums"]

    return change


def no_fields(document: Json) -> None:
    for block in document["blocks"]:
        block["fields"] = []
    document["parts"] = [part[:8] for part in document["parts"]]


def twice(document: Json) -> None:
    document["tables"].append(document["tables"][0])


FAULTS = {
    "RAW-1: other bits": Fault(1, PARTS, field("half.values", 1, dtype="bfloat16"), "BLK-1"),
    "RAW-1: other bits, of an array that agrees": Fault(1, PARTS, other_bits, "RAW-1", ("many",)),
    "PRT-4: codes of integers": Fault(1, MANIFEST, to("int32", "tables", DENSE, "fields", 0, "dtype"), "BLK-1"),
    "5.5: more chunks than bytes": Fault(2, PARTS, many_chunks("rows"), "stored_bytes", ("dense", "keyed", "many")),
    "5.5: more bits than bytes": Fault(4, PARTS, many_chunks("recent"), "stored_bytes", ("dense", "keyed")),
    "BLK-1: no exact values": Fault(1, PARTS, without("w.exact_values"), "BLK-1"),
    "BLK-1: no exact index": Fault(1, PARTS, without("w.exact_index"), "BLK-1"),
    "BLK-1: no qparams": Fault(1, PARTS, without("w.qparams"), "BLK-1"),
    "5.5: a huge chunk": Fault(1, PARTS, to(2**40, "w.exact_index", "chunk_rows"), "stored_bytes", ALL),
    "PRT-2: a block without fields": Fault(1, PARTS, no_fields, "PRT-2", ALL),
    "5.5: raw without a dtype": Fault(1, PARTS, field("half.values", 1, dtype=None), "5.5", ALL),
    "5.5: affine with a dtype": Fault(1, PARTS, field("w.codes", 0, dtype="float32"), "5.5", ALL),
    "PRT-1: a stranger": Fault(1, PARTS, lambda document: document["tables"].append("stranger"), "PRT-1", ALL),
    "5.5: a table twice": Fault(1, PARTS, twice, "stands there twice", ALL),
    "RES-1: more rows than are stored": Fault(1, MANIFEST, to(2**50, "tables", DENSE, "rows"), "RES-1"),
    "section 11: more rows than bytes": Fault(1, MANIFEST, to(HUGE, "tables", DENSE, "rows"), "section 11"),
    "LAY-3: unchanged, with rows": Fault(2, MANIFEST, to(7, "tables", EMPTY, "rows"), "LAY-3", ("empty",)),
    "TAB-1: dense, with keys": Fault(1, MANIFEST, to("int64", "tables", EMPTY, "key_dtype"), "TAB-1", ALL),
    "TAB-1: keyed, without": Fault(1, MANIFEST, to(None, "tables", KEYED, "key_dtype"), "TAB-1", ALL),
    "5.4: a digest of no parent": Fault(1, MANIFEST, to("0" * 64, "parent_sha256"), "5.4", ALL),
    "5.4: extra twice": Fault(1, MANIFEST, to({"writer": 0, "offset": 0, "bytes": 1}, "extra_blob"), "5.4", ALL),
    "MAN-1: 1.0 for 1": Fault(2, MANIFEST, to(1.0, "commit", "step"), "MAN-1", ALL),
    "MAN-1: true for 1": Fault(2, MANIFEST, to(bool(1), "commit", "step"), "MAN-1", ALL),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_contradiction_is_damage(what: str) -> None:
    """CHK-1, CHK-2, DOC-2: in reading, before memory is taken; in `verify`; and the other tables are read as usual."""
    fault = FAULTS[what]
    run, sound = run_of(changed(fault.number, fault.name, fault.change)), run_of(intact())
    for name in run_of(intact())[fault.number].tables:
        if name in fault.tables:
            for read in (load, read_all):
                with pytest.raises(crf.DamagedError, match=re.escape(fault.told)):
                    read(run[fault.number], name)
        else:
            assert read_all(run[fault.number], name) == read_all(sound[fault.number], name)
    problems = [problem.message for problem in run.verify(fault.number) if problem.kind == "damaged"]
    assert any(fault.told in message for message in problems), problems


def load(checkpoint: crf.Checkpoint, name: str) -> dict[str, bytes]:
    return {field: array.tobytes() for field, array in checkpoint.load(tables=[name]).tables[name].fields.items()}


def read_all(checkpoint: crf.Checkpoint, name: str) -> dict[str, bytes]:
    return {field: array.tobytes() for field, array in checkpoint.table(name).read().items()}


UNKNOWN = {
    "compression": Fault(1, PARTS, to("lz4", "half.values", "compression"), "compression 'lz4'"),
    "encoding": Fault(1, PARTS, field("half.values", 1, encoding="codebook"), "encoding 'codebook'"),
    "dtype of values": Fault(1, PARTS, field("half.values", 1, dtype="float4"), "dtype 'float4'"),
    "dtype of a field": Fault(1, MANIFEST, to("float4", "tables", DENSE, "fields", 1, "dtype"), "dtype 'float4'"),
    "addressing": Fault(1, MANIFEST, to("hashed", "tables", DENSE, "addressing"), "addressing 'hashed'"),
    "storage": Fault(1, MANIFEST, to("sparse", "tables", DENSE, "storage"), "storage 'sparse'"),
    "key dtype": Fault(1, MANIFEST, to("int128", "tables", KEYED, "key_dtype"), "key_dtype 'int128'", ("keyed",)),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_unknown_refuses_one_table(what: str) -> None:
    """TAB-1: by name; the others are read as usual. `verify` tells it, too."""
    fault = UNKNOWN[what]
    run = run_of(changed(1, fault.name, fault.change))
    for name in ("dense", "keyed", "many", "empty"):
        if name in fault.tables:
            with pytest.raises(crf.UnsupportedFeatureError, match=fault.told):
                run[1].load(tables=[name])
        else:
            assert run[1].load(tables=[name]).tables[name].fields
    problems = run.verify(1)
    assert {problem.kind for problem in problems} == {"unsupported_feature"}
    assert any(fault.told in problem.message for problem in problems)


def test_other_conventions_are_of_any_type() -> None:
    """DOC-3: `zarr_conventions` holds an entry with this uuid, among others of whatever kind."""
    objects = changed(
        1, "commit", lambda d: d["attributes"]["zarr_conventions"].extend([None, 7, "x", [], {"uuid": []}])
    )
    assert run_of(objects)[1].load().extra["step"] == 0
    assert run_of(objects).verify() == []


TENSORS: dict[str, Json] = {
    "a huge shape": {"shape": [2**40]},
    "a shape beyond all bytes": {"shape": [2**62, 2**62]},
    "no elements of a huge shape": {"shape": [2**62, 0, 2**62]},
    "more dimensions than an array can have": {"shape": [1] * 65},
    "a huge offset": {"offset": 2**63 - 1},
    "a writer that is none": {"writer": 2**40},
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_and_blobs_that_are_not_there(what: str) -> None:
    """TEN-2, section 11: before memory is taken for them."""
    number, expected = 1, r"TEN-2|section 11"
    objects = changed(number, "manifest.json", lambda d: d["tensors"][0].update(TENSORS[what]))
    run = run_of(objects)
    name = json.loads(objects[f"{prefix_of(objects, 1)}/manifest.json"])["tensors"][0]["name"]
    for read in (lambda: run[1].tensor(name), run[1].load, lambda: run[1].load(tables=[])):
        with pytest.raises(crf.DamagedError, match=expected):
            read()
    assert any("TEN-2" in p.message or "section 11" in p.message for p in run.verify(1) if p.kind == "damaged")
    assert run[1].table("dense").take([1])["half"].shape == (1, 3)
    blob = {"writer": 0, "offset": 0, "bytes": 2**50}
    for change in (lambda d: d["blobs"][0].update(blob), lambda d: d.update(extra=None, extra_blob=blob)):
        run = run_of(changed(1, "manifest.json", change))
        with pytest.raises(crf.DamagedError, match="TEN-2"):
            run[1].load(tables=[])
        assert any("TEN-2" in problem.message for problem in run.verify(1))


def test_state_that_is_nested_too_deep() -> None:
    """Legal JSON that cannot be copied: one of our errors, never RecursionError; what does not need it is read."""
    deep: Json = 0
    for _ in range(500):
        deep = [deep]
    run = run_of(changed(1, MANIFEST, to(deep, "extra")))
    with pytest.raises(crf.DamagedError, match="nested too deep"):
        run[1].load()
    assert run[1].table("dense").take([1])["half"].shape == (1, 3)
    assert [problem.message for problem in run.verify(1)] == ["it is nested too deep"]
    encoder = {"name": "x", "deep": deep}
    run = run_of(changed(1, MANIFEST, to(encoder, "tables", DENSE, "fields", 0, "encoder")))
    with pytest.raises(crf.DamagedError, match="nested too deep"):
        _ = run[1].table("dense").fields


def test_a_commit_that_is_too_large() -> None:
    """COM-3."""
    run = run_of(changed(3, "commit", lambda d: d["attributes"]["checkrun"].update(created="x" * 8192)))
    with pytest.raises(crf.DamagedError, match="COM-3"):
        run[3].load()
    assert any("COM-3" in problem.message for problem in run.verify(3))


def test_chunks_that_only_the_store_could_count() -> None:
    """ZAR-4: `stored_bytes` may lie, too; an audit believes what is listed."""
    objects = changed(2, PARTS, many_chunks("rows", 2**60))
    key = layout.commit_key(2)
    frame = json.loads(objects[key])
    frame["attributes"]["checkrun"]["stored_bytes"] = 2**63 - 1
    run = run_of(sealed(objects | {key: json.dumps(frame).encode()}, key))
    with pytest.raises(crf.DamagedError, match="BLK-1"):
        run[2].load(tables=["dense"])
    assert any("ZAR-4" in problem.message for problem in run.verify(2))


# What an audit tells besides ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", PARTS, "commit", "run", "tag"])
def test_a_key_that_stands_twice(name: str) -> None:
    """DOC-1: readers may take the last; an audit tells it."""
    if name in ("run", "tag"):
        objects = dict(intact())
        key = {"run": "zarr.json", "tag": "tags/best.json"}[name]
        document = json.loads(objects[key])
        objects[key] = written(key, {f"again{TWICE}": 1, "again": 1} | document)
    else:
        objects = dict(intact())
        key = layout.commit_key(1) if name == "commit" else f"{prefix_of(objects, 1)}/{name}"
        document = parsed(key, objects[key])
        inner = document["attributes"]["checkrun"] if name == "commit" else document
        inner |= {f"again{TWICE}": 1, "again": 1}
        objects[key] = written(key, document)
        if name == "commit":
            objects = sealed(objects, key)
            frame = objects[key].replace(b'"again"', b'"again": 1, "again"')
            objects[key] = frame
        else:
            objects = sealed(objects, key)
    run = run_of(objects)
    assert run[1].load().extra["step"] == 0
    problems = run.verify()
    assert [(problem.place, problem.kind) for problem in problems] == [(key, "damaged")]
    assert "'again' stands twice in one object (DOC-1)" in problems[0].message


SUCCESSION: dict[str, tuple[int, Callable[[Json], object], str]] = {
    "a table that the predecessor has not": (2, lambda d: d["dropped"].append("stranger"), "dropped: its predecessor"),
    "a table that is gone": (4, lambda d: d["dropped"].clear(), "table 'empty' of the predecessor is not continued"),
    "a table that came back": (
        3,
        lambda d: d["tables"][DENSE].update(name="other"),
        "'dense' of the predecessor is not",
    ),
}


@pytest.mark.parametrize("what", SUCCESSION)
def test_what_a_checkpoint_says_of_its_predecessor(what: str) -> None:
    """5.4, LAY-3, LAY-7: followers would keep what is gone, or miss what changed."""
    number, change, told = SUCCESSION[what]
    run = run_of(changed(number, "manifest.json", change))
    assert any(told in problem.message for problem in run.verify(number))


def test_a_parent_of_another_chain() -> None:
    """COM-6: the predecessor, or a checkpoint of its chain; here of a chain that a rollback left."""
    store = MemoryStore()
    run = crf.open_run(store, "a", durable=False, policy="consecutive")
    for number in range(3):
        table = crf.Table({"w": np.full((4, 2), number, np.float32)}, changed=[0])
        run.save(crf.State(tables={"t": table}, extra=0), parent=None if number == 0 else "latest")
    run.rollback(1)
    run.restore()
    table = crf.Table({"w": np.full((4, 2), 7, np.float32)}, changed=[0])
    run.save(crf.State(tables={"t": table}, extra=0), parent="latest")
    assert (run[4].parent, run[5].parent) == (1, 4)
    assert run.verify() == []
    key = layout.commit_key(5)
    frame = json.loads(store.objects[key])
    frame["attributes"]["checkrun"]["parent"] = 3
    run = run_of(sealed(store.objects | {key: json.dumps(frame).encode()}, key))
    assert [p.message for p in run.verify(5)] == ["its parent 3 is not in the chain of its predecessor 4 (COM-6)"]


def test_a_predecessor_that_is_damaged_affects_nobody_else(tmp_path: Any) -> None:
    """A base needs no other checkpoint: what is wrong with its predecessor is told of that one."""
    run = crf.open_run(tmp_path, "a", durable=False, policy="full")
    for number in range(3):
        run.save(crf.State(tables={"t": crf.Table({"w": np.full(3, number)}, changed=[0])}))
    (tmp_path / "00000002/zarr.json").write_bytes(b"{")
    audit = crf.open_run(tmp_path).audit()
    assert (audit.safe, audit.affected) == ([1, 3], {2: 2})


@pytest.mark.parametrize(("scale", "fine"), [(1e3, True), (1.2e4, False)])
def test_a_row_that_overflows(scale: float, fine: bool) -> None:
    """DEC-2: in the product, the sum, or the cast to the field's dtype; here to float16."""
    store = MemoryStore()
    run = crf.open_run(store, "a", durable=False, bits=3)
    run.save(crf.State(tables={"t": crf.Table({"weight": np.arange(12, dtype=np.float16).reshape(4, 3)})}))
    key = next(key for key in store.objects if "weight.qparams/c/" in key)
    (entry,) = (
        entry for array, entry, _ in arrays_in(store.objects, prefix_of(store.objects, 1)) if key.startswith(array)
    )
    record = ArrayEntry(**{name: value for name, value in entry.items() if name != "checksums"})
    qparams = chunks.decode(store.objects[key], record, 0, "here").copy()
    qparams[2, 0] = scale
    data = b"".join(bytes(buffer) for buffer in chunks.encode(qparams, record))
    problems = run_of(sealed(store.objects | {key: data}, key)).verify()
    assert [problem.message for problem in problems] == (
        [] if fine else ["a row overflows when it is decoded to float16 (DEC-2)"]
    )
