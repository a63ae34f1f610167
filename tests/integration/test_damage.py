"""Every object of a small run dropped, cut and flipped: an error that names it, or exactly the original values.

A run of every kind of object lies in memory. Reading is a function of the objects that it gets, so each operation on
each checkpoint (load a table, what changed, the commit's fields, ...) is done once, noting what it reads and what comes
of it; a changed object is then tried on those operations that read it.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import random
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import checkrun_format as crf
from checkrun_format import chunks, layout, verify
from checkrun_format.manifest import ArrayEntry, PartFile
from checkrun_format.partfile import parse_parts
from checkrun_format.stores import LocalStore, Store
from tests.property.strategies import MemoryStore

pytestmark = pytest.mark.timeout(150)

ROWS, COLUMNS, MANY, LAST = 21, 5, 199, 7
QUANTIZED = {"q1": 1, "q2": 2, "q3": 3, "q4": 4, "q8": 8}
SMALL = 4096
"""Size up to which every byte of a document is flipped."""

Objects = dict[str, bytes]


class AlteredStore(MemoryStore):
    """What is read is noted, and objects can be changed for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[str, bytes | None] = {}
        self.reads: set[str] = set()

    def now(self) -> Objects:
        return {key: data for key, data in (self.objects | self.changed).items() if data is not None}

    def get(self, key: str) -> bytes | None:
        self.reads.add(key)
        return self.changed[key] if key in self.changed else self.objects.get(key)

    def folders(self) -> list[str]:
        return sorted({key.partition("/")[0] for key in self.now()})

    def list(self, prefix: str) -> dict[str, int]:
        return {key: len(data) for key, data in self.now().items() if key.startswith(f"{prefix}/")}

    def sync(self, prefix: str) -> None:
        assert self.list(prefix)


# The run --------------------------------------------------------------------------------------------------------------


class Trainer:
    """A state that changes from save to save."""

    def __init__(self) -> None:
        self.chance = np.random.default_rng(3)
        self.weight = self.chance.standard_normal((ROWS, COLUMNS), np.float32)
        self.weight[2, 1] = np.nan
        self.keys = np.array([-7, 3, 2**40, 9])
        self.step = 0

    def change(self, rows: Sequence[int]) -> None:
        self.step += 10
        self.weight[list(rows)] = self.chance.standard_normal((len(rows), COLUMNS), np.float32)
        self.weight[rows[0], 0] = np.inf

    def fields(self, rows: slice | Sequence[int] = slice(None)) -> dict[str, npt.NDArray[Any]]:
        weight = self.weight[rows]
        whole = dict.fromkeys(QUANTIZED, weight)
        narrow = weight[:, 2] * np.where(np.arange(len(weight)) % 7 == 3, 1e6, 1).astype(np.float32)
        return {**whole, "raw": weight[:, :3].astype(ml_dtypes.bfloat16), "narrow": narrow}

    def many(self) -> dict[str, npt.NDArray[Any]]:
        """Enough rows for several row chunks."""
        w = np.arange(2 * MANY, dtype=np.float64).reshape(-1, 2) ** 2
        w[1] = self.step
        return {"w": w, "v": np.arange(MANY, dtype=np.uint16) * (self.step + 1)}

    def state(self, changed: Sequence[int] | None = None, deleted: Sequence[int] = (), extra: int = 5) -> crf.State:
        keyed = np.outer(self.keys % 97, np.arange(2)) + self.step
        return crf.State(
            tables={
                "dense": crf.Table(self.fields(), bits=QUANTIZED, store_as={"narrow": "float16"}, changed=changed),
                "keyed": crf.Table({"w": keyed}, keys=self.keys, changed=self.keys[:2], deleted=list(deleted)),
                "many": crf.Table(self.many(), keys=np.arange(MANY) * 3 + 7, bits={"w": 4}, changed=[7, 10, 40]),
            },
            tensors={
                "f": self.weight[0],
                "b": np.array([[True], [False]]),
                "e": self.weight[1].astype(ml_dtypes.bfloat16),
            },
            blobs={"rng": bytes(range(self.step))},
            extra={"step": self.step, "text": "é" * extra},
        )


def build(store: Store) -> crf.Run:
    """A base and two increments over it, growth, big extra, two writers, a rollback, and a copy as a base."""
    run = crf.open_run(store, "a", chunk_bytes=400, durable=False)
    trainer = Trainer()
    run.save(trainer.state(), step=0)
    trainer.change([5, 6, 11])
    run.save(trainer.state([5, 6, 11]), step=1, parent=1)
    trainer.change([1, 6])
    trainer.keys = np.array([-7, 9, 11])
    run.save(trainer.state([1, 6], deleted=[3, 2**40]), step=2, parent=1)
    trainer.change([0, 20])
    trainer.weight = np.vstack([trainer.weight, trainer.weight[:2]])
    run.save(trainer.state([0, 20], extra=300), step=3, parent=3)
    trainer.change([8, 9, 22])
    save_by_two_writers(run, trainer, [8, 9, 22])
    assert run.rollback(4).sequence == LAST - 1
    assert run.compact().sequence == LAST
    return run


def save_by_two_writers(run: crf.Run, trainer: Trainer, rows: list[int]) -> None:
    save = run.begin(step=4, writers=2, parent="latest")
    first, second = save.writer(0), save.writer(1)
    fields, count = trainer.fields(rows), len(trainer.weight)
    wide = dict.fromkeys(QUANTIZED, (0, 3))
    common: dict[str, Any] = {"rows": rows, "of": count, "storage": "changed", "bits": QUANTIZED}
    left = {
        name: array[:, :3] if name in QUANTIZED else array[:, :2] for name, array in fields.items() if name != "narrow"
    }
    right = {
        name: array[:, 3:] if name in QUANTIZED else array[:, 2:] for name, array in fields.items() if name != "narrow"
    }
    first.put("dense", left, columns=wide | {"raw": (0, 2)}, recent=np.array([True, False, True]), **common)
    right["narrow"] = fields["narrow"]
    columns = dict.fromkeys(QUANTIZED, (3, COLUMNS)) | {"raw": (2, 3)}
    second.put("dense", right, columns=columns, recent=False, store_as={"narrow": "float16"}, **common)
    second.put("keyed", {"w": np.array([[1, 2]])}, keys=np.array([77]), deleted=[11], storage="changed")
    first.put_tensor("f", trainer.weight[4])
    second.put_blob("late", b"0123456789")
    save.commit([second.finish(), first.finish()], unchanged=["many"], extra=[1, {"é": None}])


# What can be read -----------------------------------------------------------------------------------------------------


def frozen(value: Any) -> Any:
    """A value that compares by its bits, its dtype and its shape."""
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return tuple(sorted((name, frozen(inner)) for name, inner in value.items()))
    return repr(value)


def read_table(run: crf.Run, number: int, name: str) -> Any:
    table = run[number].load(tables=[name]).tables[name]
    view = run[number].table(name)
    return frozen(table.fields), frozen(table.keys), view.storage, view.stored_rows, len(view), frozen(view.fields)


def read_some(run: crf.Run, number: int) -> Any:
    """Few keys of many: chunks are passed over by `rows_first`."""
    return frozen(run[number].table("many").take([10, 7 + 3 * 77, 7]))


def read_small(run: crf.Run, number: int) -> Any:
    state = run[number].load(tables=[])
    return frozen(state.tensors), frozen(state.blobs), frozen(state.extra)


def read_names(run: crf.Run, number: int) -> Any:
    checkpoint = run[number]
    return checkpoint.tables, checkpoint.tensors, checkpoint.blobs


def read_commit(run: crf.Run, number: int) -> Any:
    checkpoint = run[number]
    return checkpoint.commit, checkpoint.step, checkpoint.parent, checkpoint.stored_bytes


def read_changes(run: crf.Run, number: int, since: int) -> Any:
    batches = run[number].changes_since(since)
    return [(b.table, frozen(b.rows), frozen(b.fields), frozen(b.deleted), b.table_rows, b.dropped) for b in batches]


def read_latest(run: crf.Run) -> Any:
    return run.latest().commit


Operation = Callable[[crf.Run], Any]


def operations(run: crf.Run) -> dict[str, Operation]:
    """Everything that a user may ask, by name."""
    found: dict[str, Operation] = {"latest": read_latest}
    for number in range(1, LAST + 1):
        for name in run[number].tables:
            found[f"table {name} of {number}"] = functools.partial(read_table, number=number, name=name)
        found[f"some of {number}"] = functools.partial(read_some, number=number)
        found[f"small of {number}"] = functools.partial(read_small, number=number)
        found[f"names of {number}"] = functools.partial(read_names, number=number)
        found[f"commit of {number}"] = functools.partial(read_commit, number=number)
        for since in sorted({1, number - 1} - {0}):
            if since < number:
                found[f"changes of {number} since {since}"] = functools.partial(
                    read_changes, number=number, since=since
                )
    return found


@dataclass(frozen=True, kw_only=True)
class Reading:
    """An operation, what came of it on the intact run, and what it read."""

    operation: Operation
    outcome: Any
    reads: frozenset[str]


class Fixture:
    """The run, and everything that can be read of it."""

    def __init__(self) -> None:
        self.store = AlteredStore()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "MAX_INLINE_EXTRA", 300)  # so that few chunks hold a large one
            run = build(self.store)
        self.readings: dict[str, Reading] = {}
        for name, operation in operations(run).items():
            self.store.reads = set()
            outcome = operation(crf.open_run(self.store))
            self.readings[name] = Reading(operation=operation, outcome=outcome, reads=frozenset(self.store.reads))
        self.keys = sorted(self.store.objects)
        self.part_files = {
            key: json.loads(gzip.decompress(data)) for key, data in self.store.objects.items() if key.endswith(".gz")
        }

    def arrays(self) -> dict[str, dict[str, Any]]:
        """Every array's entry, by the key of its metadata."""
        found = {}
        for key, document in self.part_files.items():
            attempt, writer = key.rpartition("/")[0], document["writer"]
            for index, block in enumerate(document["blocks"]):
                for name, entry in block["arrays"].items():
                    found[f"{attempt}/block-{writer}-{index}/{name}/zarr.json"] = entry
            for name, entry in document["dense"].items():
                found[f"{attempt}/dense-{writer}/{name}/zarr.json"] = entry
        return found

    def of_kind(self, kind: str) -> list[str]:
        return [key for key in self.keys if kind_of(key) == kind]

    def readers(self, key: str) -> list[str]:
        """The operations that read an object, those first that read least."""
        found = [name for name, reading in self.readings.items() if key in reading.reads]
        return sorted(found, key=lambda name: len(self.readings[name].reads))

    def attempt_of(self, number: int) -> str:
        commit = json.loads(self.store.objects[layout.commit_key(number)])
        return f"{number:08d}/{commit['attributes']['checkrun']['attempt']}"

    def tried(
        self, key: str, data: bytes | None, names: Container[str] | None = None
    ) -> Iterator[tuple[str, crf.CheckrunError | None]]:
        """What comes of (some) operations that read an object, once it is changed: an error, or the original values."""
        self.store.changed = {key: data}
        for name, reading in self.readings.items():
            if key not in reading.reads or (names is not None and name not in names):
                continue
            try:
                outcome = reading.operation(crf.open_run(self.store))
            except crf.CheckrunError as error:
                yield name, error
            else:
                assert outcome == reading.outcome, f"{name} is silently different with {key} changed to {data!r}"
                yield name, None
        self.store.changed = {}

    def verified(self, key: str, data: bytes | None) -> list[crf.Problem]:
        """What `verify` finds once an object is changed."""
        self.store.changed = {key: data}
        number = layout.parse_folder(key.partition("/")[0])
        problems = crf.open_run(self.store).verify(number) if number else verify.verify_run(self.store).problems
        self.store.changed = {}
        return problems


@pytest.fixture(scope="module")
def built() -> Fixture:
    return Fixture()


@pytest.fixture
def fixture(built: Fixture) -> Fixture:
    built.store.changed = {}
    return built


def kind_of(key: str) -> str:
    """What kind of object a key names."""
    if key == "zarr.json":
        return "run document"
    if re.fullmatch(r"[0-9]{8}/zarr\.json", key):
        return "commit"
    last = key.rpartition("/")[2]
    if last == "zarr.json":
        inside = key.split("/")[2:-1]
        return "array metadata" if len(inside) == 2 else "group"
    return {"manifest.json": "manifest"}.get(last, "part file" if last.endswith(".gz") else "chunk")


def flipped(data: bytes, offset: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def flips(data: bytes, count: int, seed: str) -> Iterator[tuple[int, bytes]]:
    """Offsets, all different, and the object with a bit flipped there; every offset if there are no more."""
    chance = random.Random(seed)
    for offset in chance.sample(range(len(data)), min(count, len(data))):
        yield offset, flipped(data, offset, chance.randrange(8))


def cuts(data: bytes) -> list[bytes]:
    return [data[:size] for size in sorted({0, len(data) // 2, len(data) - 1})]


def test_the_run_has_every_kind_of_object(fixture: Fixture) -> None:
    kinds = [kind_of(key) for key in fixture.keys]
    assert set(kinds) == {"run document", "commit", "manifest", "part file", "group", "array metadata", "chunk"}
    names = {key.split("/")[-2] for key in fixture.keys if kind_of(key) == "array metadata"}
    assert {f"{name}.{array}" for name in QUANTIZED for array in ("codes", "qparams")} <= names
    assert {"q4.exact_index", "q4.exact_values", "raw.values", "narrow.values", "narrow.exact_values"} <= names
    assert {"rows", "rows_first", "recent", "deleted", "blob", "float32", "bool", "bfloat16"} <= names
    compressions = {entry["compression"] for entry in fixture.arrays().values()}
    assert compressions == {None, "zstd", "blosc"}
    assert max(map(len, fixture.store.objects.values())) > 160 > min(map(len, fixture.store.objects.values()))
    assert crf.open_run(fixture.store).verify() == []


def test_the_operations_read_everything_but_zarr_metadata(fixture: Fixture) -> None:
    """ZAR-5, CHK-3: this reader relies on the part files alone; `rows_first` it uses only to pass over chunks."""
    unread = set(fixture.keys).difference(*(reading.reads for reading in fixture.readings.values()))
    metadata = {key for key in fixture.keys if kind_of(key) in ("group", "array metadata")}
    assert metadata < unread
    assert {key.rpartition("/")[2] for key in unread - metadata} == {"0"}
    assert {key.split("/")[-3] for key in unread - metadata} == {"rows_first"}
    assert len(fixture.readings) > 40
    assert len({repr(reading.outcome) for reading in fixture.readings.values()}) > 30


@pytest.mark.parametrize("kind", ["manifest", "part file", "chunk"])
def test_a_missing_or_truncated_object_is_named(fixture: Fixture, kind: str) -> None:
    """ZAR-4, MAN-1: whatever reads it raises DamagedError with the object's key; so does `verify`."""
    for number, key in enumerate(fixture.of_kind(kind)):
        assert_named(fixture, key, None, fixture.readers(key)[: 3 if number % 4 else None])
        assert_reported(fixture, key, None)
        for place, data in enumerate(cuts(fixture.store.objects[key])):
            assert_named(fixture, key, data, some_of(fixture.readers(key), place))
            if kind != "chunk":
                assert_reported(fixture, key, data)


def assert_named(fixture: Fixture, key: str, data: bytes | None, names: Sequence[str] | None = None) -> None:
    outcomes = list(fixture.tried(key, data, names))
    assert outcomes or "/rows_first/" in key
    for name, error in outcomes:
        assert isinstance(error, crf.DamagedError), (name, key, error)
        assert error.place == key, (name, key, error)


def some_of(readers: list[str], number: int) -> list[str]:
    """Two of the operations that read an object, others each time: what they do with it, they do alike."""
    turned = readers[2 * number % max(1, len(readers)) :] + readers
    return turned[:2]


def assert_reported(fixture: Fixture, key: str, data: bytes | None) -> None:
    problems = fixture.verified(key, data)
    assert (key, "damaged") in [(problem.place, problem.kind) for problem in problems], (key, problems)


@pytest.mark.parametrize("kind", ["manifest", "part file", "chunk"])
def test_a_flipped_bit_is_named(fixture: Fixture, kind: str) -> None:
    """MAN-1, ZAR-3: whatever reads the object raises DamagedError with its key."""
    for key in fixture.of_kind(kind):
        for place, (_, data) in enumerate(flips(fixture.store.objects[key], 2 if kind == "chunk" else 4, key)):
            assert_named(fixture, key, data, some_of(fixture.readers(key), place))
            if place == 0:
                assert_reported(fixture, key, data)


@pytest.mark.parametrize("kind", ["manifest", "part file", "chunk"])
def test_every_byte_counts(fixture: Fixture, kind: str) -> None:
    """MAN-1, ZAR-3: a bit of every byte, gzip header and all; the first thing that reads the object finds it."""
    for key in fixture.of_kind(kind):
        if not fixture.readers(key):
            assert "/rows_first/" in key
            continue
        reader = fixture.readings[fixture.readers(key)[0]]
        data = fixture.store.objects[key]
        count = SMALL if kind != "chunk" and len(data) <= SMALL else 8
        for _, changed in flips(data, count, key):
            fixture.store.changed = {key: changed}
            with pytest.raises(crf.DamagedError) as caught:
                reader.operation(crf.open_run(fixture.store))
            assert caught.value.place == key


# Commits --------------------------------------------------------------------------------------------------------------


def convention_name(data: bytes) -> range:
    """The bytes of `"name":"checkrun"` in `zarr_conventions`: for people, no rule looks at them."""
    start = data.index(b'"name":"checkrun"')
    return range(start + 1, start + len(b'"name":"checkrun"') - 1)


def is_about(error: crf.CheckrunError, key: str, manifest: str) -> bool:
    """Whether an error names a commit, or the manifest to which it no longer leads.

    Size, digest and name of the attempt may be altered in the commit as well as in what they lead to: nothing tells.
    """
    folder = key.partition("/")[0]
    if isinstance(error, crf.DamagedError):
        return (
            error.place in (key, manifest) or re.fullmatch(rf"{folder}/[^/]*/manifest\.json", error.place) is not None
        )
    if isinstance(error, crf.UnsupportedVersionError | crf.UnsupportedFeatureError | crf.HistoryPrunedError):
        return key in str(error)
    return False


def test_every_altered_byte_of_a_commit_is_found(fixture: Fixture) -> None:
    """COM-2, COM-5, MAN-1, OPN-1: nothing that is read of the checkpoint differs, no older one comes back in silence.

    Every byte is tried on what a user first does with the checkpoint, every 32nd on all that reads it.
    """
    for number in range(1, LAST + 1):
        key = layout.commit_key(number)
        data = fixture.store.objects[key]
        harmless = convention_name(data)
        manifest = f"{fixture.attempt_of(number)}/manifest.json"
        first = {f"commit of {number}", f"names of {number}"} | ({"latest"} if number == LAST else set())
        for offset, changed in flips(data, SMALL, key):
            outcomes = dict(fixture.tried(key, changed, None if offset % 32 == 5 else first))
            wrong = {name: error for name, error in outcomes.items() if error and not is_about(error, key, manifest)}
            assert not wrong, (offset, changed, wrong)
            assert first <= outcomes.keys()
            assert offset in harmless or all(outcomes[name] is not None for name in first), (offset, changed)


def test_verify_finds_every_altered_byte_of_a_commit(fixture: Fixture) -> None:
    key = layout.commit_key(3)
    data = fixture.store.objects[key]
    harmless = convention_name(data)
    manifest = f"{fixture.attempt_of(3)}/manifest.json"
    for offset, changed in flips(data, SMALL, "verify"):
        problems = fixture.verified(key, changed)
        assert problems or offset in harmless, (offset, changed)
        places = {problem.place for problem in problems if problem.kind != "litter"}
        assert all(place in (key, manifest) or place.endswith("/manifest.json") for place in places), (offset, problems)


def test_a_truncated_commit_is_found(fixture: Fixture) -> None:
    """COM-2: at every length but 0, it is damaged; of 0 bytes it is burnt, which a reader is warned of (COM-5)."""
    for number in (3, LAST):
        key = layout.commit_key(number)
        data = fixture.store.objects[key]
        for size in range(1, len(data)):
            fixture.store.changed = {key: data[:size]}
            with pytest.raises(crf.DamagedError) as caught:
                _ = crf.open_run(fixture.store)[number]
            assert caught.value.place == key
        for changed in cuts(data)[1:]:
            for name, error in fixture.tried(key, changed):
                if name == "latest" and number < LAST:
                    continue
                assert isinstance(error, crf.DamagedError)
                assert error.place == key
            assert_reported(fixture, key, changed)


def test_an_emptied_commit_is_burnt(fixture: Fixture) -> None:
    """COM-2, COM-5: an exclusive create that was cut short leaves an object of 0 bytes: a warning, not silence."""
    key = layout.commit_key(LAST)
    fixture.store.changed = {key: b""}
    run = crf.open_run(fixture.store)
    with pytest.raises(crf.BurntError, match=key):
        _ = run[LAST]
    with pytest.warns(crf.BurntNumberWarning, match=key):
        assert run.latest().sequence == LAST - 1
    assert (key, "burnt") in [(problem.place, problem.kind) for problem in run.verify(LAST)]
    fixture.store.changed = {layout.commit_key(4): b""}
    for name in ("table dense of 5", "changes of 5 since 1"):
        with pytest.raises(crf.CheckrunError, match=r"00000004/zarr\.json"):
            fixture.readings[name].operation(crf.open_run(fixture.store))
    problems = crf.open_run(fixture.store).verify()
    assert {"00000004/zarr.json"} <= {problem.place for problem in problems if problem.kind == "burnt"}
    assert {"00000004/zarr.json"} <= {problem.place for problem in problems if problem.kind == "damaged"}


def test_a_missing_commit(fixture: Fixture) -> None:
    """COM-1: without its commit a checkpoint does not exist; whoever needs it says so, and `verify` names the rest."""
    for number in range(1, LAST + 1):
        key = layout.commit_key(number)
        fixture.store.changed = {key: None}
        run = crf.open_run(fixture.store)
        with pytest.raises(crf.CheckpointNotFoundError):
            _ = run[number]
        assert run.latest().sequence == (LAST if number < LAST else LAST - 1)
        assert {c.sequence for c in run.log()} == set(range(1, LAST + 1)) - {number}
        problems = run.verify()
        litter = {problem.place for problem in problems if problem.kind == "litter"}
        assert litter == {k for k in fixture.keys if k.startswith(f"{fixture.attempt_of(number)}/")}
        for name, reading in fixture.readings.items():
            if key not in reading.reads or name == "latest" or f"of {number}" in name:
                continue
            kind = crf.HistoryPrunedError if name.startswith("changes") else crf.DamagedError
            with pytest.raises((crf.DamagedError, kind)):
                reading.operation(crf.open_run(fixture.store))
        damaged = {problem.place for problem in problems if problem.kind == "damaged"}
        assert (key in damaged) == (number < LAST)  # a later commit names it as parent or predecessor


def test_the_run_document(fixture: Fixture) -> None:
    """RUN-1, DOC-3: any byte of it; opening the run fails, or nothing differs."""
    data = fixture.store.objects["zarr.json"]
    harmless = convention_name(data)
    for bit in range(8):
        for offset in range(len(data)):
            fixture.store.changed = {"zarr.json": flipped(data, offset, bit)}
            if offset not in harmless:
                expected = (crf.DamagedError, crf.NotARunError, crf.UnsupportedVersionError)
                with pytest.raises(expected, match=r"zarr\.json"):
                    crf.open_run(fixture.store)
    for size in range(1, len(data)):
        fixture.store.changed = {"zarr.json": data[:size]}
        with pytest.raises(crf.DamagedError, match=r"zarr\.json"):
            crf.open_run(fixture.store)
        with pytest.raises(crf.DamagedError, match=r"zarr\.json"):
            crf.open_run(fixture.store, "a")
    for missing in (None, b""):
        fixture.store.changed = {"zarr.json": missing}
        with pytest.raises(crf.NotARunError, match=r"zarr\.json"):
            crf.open_run(fixture.store)
    problems = verify.verify_run(fixture.store).problems
    assert [(problem.place, problem.kind) for problem in problems] == [("zarr.json", "not_a_run")]


# Zarr metadata --------------------------------------------------------------------------------------------------------

HARMLESS_KEYS = {"attributes", "dimension_names"}
"""What an array's metadata may say as it likes: names for people. (`attributes` are empty here.)"""

HARMLESS_SETTINGS = {"level", "checksum", "clevel", "shuffle", "typesize", "blocksize"}
"""Settings of compressors that only an encoder needs: what they made says itself how it was made."""


def means_the_same(found: Any, original: dict[str, Any]) -> bool:
    """Whether metadata that `verify` let pass differs only where that is harmless."""
    if not isinstance(found, dict) or found.keys() != original.keys():
        return False
    names = found["dimension_names"]
    if not isinstance(names, list) or len(names) != len(original["shape"]):
        return False
    if any(found[key] != original[key] for key in found.keys() - HARMLESS_KEYS - {"codecs"}):
        return False
    for one, other in zip(found["codecs"], original["codecs"], strict=True):
        settings, others = one.get("configuration", {}), other.get("configuration", {})
        if one.keys() != other.keys() or one["name"] != other["name"] or settings.keys() != others.keys():
            return False
        if any(settings[key] != others[key] for key in settings.keys() - HARMLESS_SETTINGS):
            return False
    return True


def test_altered_metadata_of_an_array_is_reported(fixture: Fixture) -> None:
    """ZAR-2, ZAR-3, ZAR-5, CHK-3: it does not change what this reader returns; the audit finds all that has a meaning.

    Every byte of every array's metadata. What it lets pass, zarr-python reads as before (checked below).
    """
    passed = 0
    for key, entry in fixture.arrays().items():
        data = fixture.store.objects[key]
        original = json.loads(data)
        record = ArrayEntry(**entry)
        stored = crf.open_run(fixture.store)[int(key[:8])]._stored
        for offset, changed in flips(data, SMALL, key):
            fixture.store.changed = {key: changed}
            problems = verify._caught(
                functools.partial(verify._metadata, stored, key.removesuffix("/zarr.json"), record), "nowhere"
            )
            if problems:
                assert [(problem.place, problem.kind) for problem in problems] == [(key, "damaged")]
            else:
                assert means_the_same(json.loads(changed), original), (key, offset, changed)
                passed += 1
    assert passed > 50, "names of dimensions can be altered"


@pytest.mark.parametrize("kind", ["array metadata", "group"])
def test_missing_or_truncated_metadata_is_reported(fixture: Fixture, kind: str) -> None:
    """ZAR-1, ZAR-5: by the audit of the whole checkpoint, with its key."""
    keys = [key for key in fixture.keys if kind_of(key) == kind]
    assert len(keys) > 10
    for key in keys[:: 3 if kind == "group" else 9]:
        for data in (None, *cuts(fixture.store.objects[key])):
            assert_reported(fixture, key, data)
        for _, data in flips(fixture.store.objects[key], 2, key):
            if not verify_lets_pass(data, fixture.store.objects[key]):
                assert_reported(fixture, key, data)


def verify_lets_pass(changed: bytes, original: bytes) -> bool:
    try:
        found = json.loads(changed)
    except ValueError:
        return False
    return json.loads(original)["node_type"] == "array" and means_the_same(found, json.loads(original))


def test_altered_groups_are_reported(fixture: Fixture) -> None:
    """ZAR-1: every byte of a group's metadata has a meaning."""
    key = next(key for key in fixture.keys if kind_of(key) == "group")
    data = fixture.store.objects[key]
    for _, changed in flips(data, SMALL, key):
        assert_reported(fixture, key, changed)


def test_zarr_python_reads_what_the_audit_lets_pass(fixture: Fixture, tmp_path: Path) -> None:
    """Of each array, a few alterations that are not reported: zarr-python returns the same values."""
    import zarr

    chance = random.Random(8)
    tried = 0
    for key, entry in chance.sample(sorted(fixture.arrays().items()), 25):
        data = fixture.store.objects[key]
        prefix = key.removesuffix("zarr.json")
        for name in (name for name in fixture.keys if name.startswith(prefix)):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(fixture.store.objects[name])
        expected = np.asarray(zarr.open_array(tmp_path / prefix, mode="r")[:])
        assert expected.shape == tuple(entry["shape"])
        harmless = [changed for _, changed in flips(data, SMALL, key) if verify_lets_pass(changed, data)]
        for changed in chance.sample(harmless, min(2, len(harmless))):
            (tmp_path / key).write_bytes(changed)
            assert np.asarray(zarr.open_array(tmp_path / prefix, mode="r")[:]).tobytes() == expected.tobytes()
            tried += 1
    assert tried > 20


# More than one bit ----------------------------------------------------------------------------------------------------


def test_the_sizes_of_all_objects_are_checked(fixture: Fixture) -> None:
    """5.2: `stored_bytes` is their sum; an object that is longer than it was is damaged, a stranger is litter."""
    attempt = fixture.attempt_of(2)
    problems = fixture.verified(f"{attempt}/stranger", b"12345")
    assert [(problem.place, problem.kind) for problem in problems] == [(f"{attempt}/stranger", "litter")]
    problems = fixture.verified("00000002/0123456789abcdef/zarr.json", b"{}")
    assert [(p.place, p.kind) for p in problems] == [("00000002/0123456789abcdef/zarr.json", "litter")]
    key = next(key for key in fixture.keys if key.startswith(attempt) and kind_of(key) == "array metadata")
    problems = fixture.verified(key, fixture.store.objects[key] + b" ")
    assert [(problem.place, problem.kind) for problem in problems] == [("00000002/zarr.json", "damaged")]


def test_an_object_of_another_checkpoint_is_found(fixture: Fixture) -> None:
    """MAN-1, PRT-1: documents of one attempt in the place of another's, and one writer's part file for another's."""
    documents = [key for key in fixture.keys if kind_of(key) in ("manifest", "part file")]
    for key in documents:
        for other in documents:
            if other.rpartition("/")[2][:5] == key.rpartition("/")[2][:5] and other != key:
                assert_named(fixture, key, fixture.store.objects[other])


def test_a_checkpoint_that_was_exchanged_is_found(fixture: Fixture) -> None:
    """MAN-2: a commit and an attempt that are sound in themselves, but not the ones over which others were laid."""
    other = AlteredStore()
    build(other)
    mine, theirs = fixture.attempt_of(1), None
    commit = json.loads(other.objects[layout.commit_key(1)])
    theirs = f"00000001/{commit['attributes']['checkrun']['attempt']}"
    assert mine != theirs
    exchanged = {key: None for key in fixture.keys if key.startswith(mine)}
    fixture.store.changed = exchanged | {k: data for k, data in other.objects.items() if k.startswith("00000001/")}
    run = crf.open_run(fixture.store)
    assert frozen(run[1].load().tensors) == frozen(run[1].load().tensors)
    for name in ("table dense of 2", "table dense of 3", "table keyed of 5"):
        with pytest.raises(crf.DamagedError, match="MAN-2") as caught:
            fixture.readings[name].operation(crf.open_run(fixture.store))
        assert caught.value.place == "00000001/zarr.json"
    problems = crf.open_run(fixture.store).verify()
    assert ("00000001/zarr.json", "damaged") in [(problem.place, problem.kind) for problem in problems]


def test_verify_looks_at_what_is_there_now(fixture: Fixture) -> None:
    """A run that has read everything keeps what it read; its audit must not."""
    run = crf.open_run(fixture.store)
    for number in range(1, LAST + 1):
        run[number].load()
    assert run.verify() == []
    for key in [key for key in fixture.keys if kind_of(key) in ("commit", "manifest", "part file", "chunk")][::3]:
        data = fixture.store.objects[key]
        fixture.store.changed = {key: data[:-1] + bytes([data[-1] ^ 64])}
        assert run.verify(int(key[:8])) != [], key


def test_on_disk_it_is_the_same(tmp_path: Path) -> None:
    """The same, with files: each kind of object missing, cut short, altered."""
    folder = tmp_path / "run"
    run = build(LocalStore(folder, durable=False))
    expected = frozen(run[5].load().tables["dense"].fields)
    assert frozen(crf.open_run(folder)[5].load().tables["dense"].fields) == expected
    attempt = f"00000004/{run[4].commit.attempt}"
    for name in ("manifest.json", "parts-0.json.gz", "block-0-0/rows/c/0", "block-0-0/q4.codes/c/0/0"):
        path = folder / attempt / name
        data = path.read_bytes()
        for changed in (None, *cuts(data), flipped(data, len(data) // 2, 3)):
            path.unlink()
            if changed is not None:
                path.write_bytes(changed)
            with pytest.raises(crf.DamagedError) as caught:
                crf.open_run(folder)[5].load()
            assert caught.value.place == f"{attempt}/{name}"
            assert crf.open_run(folder)[3].load().extra["step"] == 20
            path.write_bytes(data)
    assert frozen(crf.open_run(folder)[5].load().tables["dense"].fields) == expected
    assert crf.open_run(folder).verify() == []


def rewritten(data: bytes, entry: Mapping[str, Any], change: Callable[[npt.NDArray[Any]], None]) -> bytes:
    """A chunk with other elements, those beyond the array's end included, and the checksum of these (ZAR-3)."""
    alone = ArrayEntry(**{**entry, "shape": [entry["chunk_rows"], *entry["shape"][1:]]})
    elements = chunks.decode(data, alone, 0, "here").reshape(-1).copy()
    change(elements)
    return b"".join(bytes(buffer) for buffer in chunks.encode(elements.reshape(alone.shape), alone))


def setting(index: int, value: Any) -> Callable[[npt.NDArray[Any]], None]:
    return lambda elements: elements.__setitem__(index, value)


SOUND_BUT_WRONG: dict[str, tuple[int, str, Callable[[npt.NDArray[Any]], None]]] = {
    "PCK-1: padding bits": (1, "block-0-0/q3.codes/c/0/0", lambda codes: np.bitwise_or.at(codes, 1, 128)),
    "ZAR-4: beyond the end": (7, "block-0-2/v.values/c/3", setting(-1, 1)),
    "DEC-3: a negative scale": (1, "block-0-0/q4.qparams/c/0/0", lambda qparams: np.negative.at(qparams, 0)),
    "DEC-3: NaN": (1, "block-0-0/q4.qparams/c/0/0", setting(1, np.nan)),
    "DEC-3: infinite": (1, "block-0-0/q4.qparams/c/0/0", setting(0, np.inf)),
    "EXA-1: codes of an exact row": (1, "block-0-0/q4.codes/c/0/0", setting(2 * 3, 1)),
    "EXA-1: qparams of an exact row": (1, "block-0-0/q4.qparams/c/0/0", setting(2 * 2, 1)),
    "RAW-1: NaN in a row that is not exact": (1, "block-0-0/narrow.values/c/0", setting(2, np.nan)),
    "RAW-1: a value in an exact row": (1, "block-0-0/narrow.values/c/0", setting(3, 1)),
    "BLK-3: the first of a row chunk": (1, "block-0-2/rows_first/c/0", setting(1, 158)),
    "BLK-4: beyond the last row": (3, "block-0-0/recent/c/0", lambda recent: np.bitwise_or.at(recent, -1, 128)),
    "BLK-5: positions out of range": (1, "block-0-0/q4.exact_index/c/0", setting(0, ROWS)),
    "PRT-3: row numbers out of order": (2, "block-0-0/rows/c/0", setting(1, 3)),
    "PRT-3: row numbers out of range": (2, "block-0-0/rows/c/0", setting(2, ROWS)),
    "PRT-3: tombstones out of order": (3, "block-0-1/deleted/c/0", setting(0, 2**50)),
}
"""What is wrong, and in which object of which checkpoint, though its checksum is right."""


@pytest.mark.parametrize("what", SOUND_BUT_WRONG)
def test_contents_that_no_checksum_finds(fixture: Fixture, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CHK-3: what a writer got wrong; the audit names the object, or the one beside it that it contradicts."""
    monkeypatch.setattr(chunks, "check_place", lambda *_: None)  # that writer's part file has this checksum
    number, name, change = SOUND_BUT_WRONG[what]
    key = f"{fixture.attempt_of(number)}/{name}"
    data = fixture.store.objects[key]
    changed = rewritten(data, fixture.arrays()[re.sub(r"/c/.*", "/zarr.json", key)], change)
    assert changed != data
    problems = fixture.verified(key, changed)
    array = re.sub(r"(codes|qparams)?/c/.*", "", key)
    found = [problem for problem in problems if problem.place.startswith(array)]
    assert [problem.kind for problem in found] == ["damaged"], problems
    assert what.partition(":")[0] in found[0].message


def test_recent_bits_of_parts_that_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLK-4: bits of parts that say 0 or 1 are zero; here of the second of two tables that share a block."""
    monkeypatch.setattr(chunks, "check_place", lambda *_: None)
    store = AlteredStore()
    run = crf.open_run(store, "a", policy="one-shot")
    weight = np.zeros((9, 2), np.float32)
    for step, changed in enumerate(([], [3, 4], [5])):
        tables = {
            "one": crf.Table({"w": weight}, changed=changed),
            "two": crf.Table({"w": weight}, changed=changed[:1]),
        }
        if step == 2:
            tables["two"].changed = []
        weight = weight + 1
        run.save(crf.State(tables=tables), step=step)
    key = next(key for key in store.objects if re.match(r"00000003/.*/recent/c/0", key))
    parts = json.loads(gzip.decompress(next(d for k, d in store.objects.items() if re.match(r"00000003/.*gz", k))))
    assert [part[:6] for part in parts["parts"]] == [[0, 0, 0, 3, -1, 2], [1, 0, 3, 1, -1, 0]]
    assert store.objects[key][0] == 0b0100
    assert run.verify() == []
    entry = parts["blocks"][0]["arrays"]["recent"]
    store.objects[key] = rewritten(store.objects[key], entry, setting(0, 0b1100))
    problems = run.verify(3)
    assert [(problem.kind, "BLK-4" in problem.message) for problem in problems] == [("damaged", True)]


def test_a_run_that_is_copied_by_any_tool_is_the_same_run(fixture: Fixture, tmp_path: Path) -> None:
    """STO-4, COM-1: object by object, in any order, with whatever times: to files, and back to memory (fault 10)."""
    folder, back = tmp_path / "copy", AlteredStore()
    for key in random.Random(1).sample(fixture.keys, len(fixture.keys)):
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fixture.store.objects[key])
        os.utime(path, (1e9, 1e9 + len(key)))
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            back.put(str(path.relative_to(folder)), [path.read_bytes()])
    for where in (LocalStore(folder), back):
        for name, reading in fixture.readings.items():
            assert reading.operation(crf.open_run(where)) == reading.outcome, name
        assert crf.open_run(where).verify() == []
        run = crf.open_run(where, "a", durable=False)
        run.restore()
        assert run.compact().sequence == LAST + 1


def test_chunks_of_one_array_that_changed_places(fixture: Fixture) -> None:
    """ZAR-5: each is whole, and its checksum is right; but it is not the one that the part file has."""
    prefix = f"{fixture.attempt_of(1)}/block-0-2"
    for array in ("rows", "w.codes", "w.qparams", "v.values"):
        names = [f"{prefix}/{array}/c/{chunk}" for chunk in (0, 2)]
        keys = [name if name in fixture.store.objects else f"{name}/0" for name in names]
        one, two = (fixture.store.objects[key] for key in keys)
        assert one != two
        assert array == "rows" or len(one) == len(two)  # compressed ones differ in size
        fixture.store.changed = {keys[0]: two, keys[1]: one}
        problems = crf.open_run(fixture.store).verify(1)
        assert {p.place for p in problems if p.kind == "damaged" and "ZAR-5" in p.message} == set(keys)
        with pytest.raises(crf.DamagedError, match="another chunk is in its place") as caught:
            fixture.readings["table many of 1"].operation(crf.open_run(fixture.store))
        assert caught.value.place in keys


def test_checksums_may_be_left_out_but_not_be_too_few(fixture: Fixture) -> None:
    """5.5, ZAR-5."""
    key = next(key for key in fixture.keys if re.match(rf"{fixture.attempt_of(1)}/parts-0", key))
    document = json.loads(gzip.decompress(fixture.store.objects[key]))
    entries = [entry for block in document["blocks"] for entry in block["arrays"].values()]
    assert all(len(entry["checksums"]) == -(-entry["shape"][0] // entry["chunk_rows"]) for entry in entries)
    del entries[0]["checksums"]
    assert parse_parts(gzip.compress(json.dumps(document).encode()), "here").blocks[0].rows > 0
    entries[-1]["checksums"].pop()
    with pytest.raises(crf.DamagedError, match=r"here: array '.*' of \d+ chunks has \d+ checksums \(ZAR-5\)"):
        parse_parts(gzip.compress(json.dumps(document).encode()), "here")


def test_the_part_files_are_records_that_can_be_read(fixture: Fixture) -> None:
    """What this module takes from part files by hand is what the library reads."""
    import msgspec

    assert len(fixture.part_files) == LAST + 1
    for document in fixture.part_files.values():
        assert msgspec.to_builtins(msgspec.convert(document, PartFile)) == document
