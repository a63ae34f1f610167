"""Bad input gets one clear error before anything is written, and every earlier checkpoint stays."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

import checkrun_format as crf
from checkrun_format import ALL, Run, State, Table
from checkrun_format.errors import (
    CheckrunError,
    ConcurrentCommitError,
    DamagedError,
    InvalidInputError,
    NotARunError,
    RunNotFoundError,
    StorageError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)

Array = npt.NDArray[Any]

WEIGHT = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
SUM = np.arange(6.0)
KEYS = [5, -9, 30]


def listing(path: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, and every folder."""
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def tables(
    *, weight: Any = WEIGHT, total: Any = SUM, changed: Any = (2,), keys: Any = KEYS, **options: Any
) -> dict[str, Any]:
    return {
        "user": Table({"weight": weight, "sum": total}, changed=changed, **options),
        "item": Table({"weight": WEIGHT[:3]}, keys=keys, changed=[5]),
    }


def assert_intact(path: Path) -> None:
    """Checkpoints 1 and 2 are what `run` saved, bit for bit."""
    run = crf.open_run(path)
    for number in (1, 2):
        state = run[number].load()
        assert state.tables["user"]["weight"].tobytes() == (WEIGHT * number).tobytes()
        assert state.tables["user"]["sum"].tolist() == SUM.tolist()
        assert state.tables["item"]["weight"].tobytes() == WEIGHT[[1, 0, 2]].tobytes()
        assert (state.tensors["x"].tolist(), state.extra) == ([number], {"number": number})


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not pytest's `tmp_path`: what is altered on purpose in here is not for a second reader."""
    return tmp_path_factory.mktemp("folder")


@pytest.fixture
def run(folder: Path) -> Run:
    run = crf.open_run(folder / "run", "a", durable=False)
    for number in (1, 2):
        state = State(
            tables=tables(weight=WEIGHT * number, changed=ALL), tensors={"x": [number]}, extra={"number": number}
        )
        run.save(state, step=number)
    return run


NUMBERED: Any = {1: SUM}
LOOP: list[Any] = []
LOOP.append(LOOP)


def state(**parts: Any) -> State:
    """A state in which only `parts` differ from what is well."""
    return State(**{"tables": tables(), **parts})


def user(**options: Any) -> State:
    """A state whose table `user` is special."""
    return State(tables=tables(**options))


STATES: dict[str, tuple[Callable[[], Any], str]] = {
    # rows that changed
    "changed twice": (
        lambda: user(changed=[3, 1, 3]),
        "table 'user', changed: 3 is there more than once",
    ),
    "changed below 0": (
        lambda: user(changed=[2, -1]),
        "table 'user', changed: row -1 is not in a table of 6",
    ),
    "changed too large": (
        lambda: user(changed=[6]),
        "table 'user', changed: row 6 is not in a table of 6 rows",
    ),
    "changed far too large": (lambda: user(changed=[2**40]), f"'user', changed: row {2**40} is not in"),
    "changed beyond int64": (lambda: user(changed=[2**64]), "changed: dtype object where integers of at most 64"),
    "changed of floats": (lambda: user(changed=[1.0]), "'user', changed: float64 where integers"),
    "changed of text": (lambda: user(changed=["1"]), "'user', changed: dtype <U1"),
    "changed a number": (lambda: user(changed=3), "'user', changed: 0 dimensions"),
    "changed of two dimensions": (lambda: user(changed=[[1]]), "'user', changed: 2 dimensions"),
    "mask too short": (
        lambda: user(changed=[True] * 5),
        "'user', changed: a mask of shape .5,. for 6 rows",
    ),
    "mask too long": (lambda: user(changed=np.ones(7, bool)), "'user', changed: a mask of shape .7,."),
    "changed a slice": (lambda: user(changed=slice(0, 2)), "'user', changed: dtype object where integers"),
    "changed mixed": (lambda: user(changed={1, "a"}), "table 'user', changed: dtype <U"),
    "changed forgotten": (
        lambda: user(changed=None),
        "table 'user' has been saved before: give changed=",
    ),
    # shapes and dtypes
    "rows differ": (
        lambda: user(total=SUM[:5]),
        "'user': its fields have different numbers of rows: .*6.*5",
    ),
    "three dimensions": (lambda: user(weight=WEIGHT[None]), "'user', field 'weight': shape .1, 6, 3."),
    "no dimension": (lambda: user(total=1.0), "'user', field 'sum': shape .."),
    "no columns": (
        lambda: user(weight=WEIGHT[:, :0]),
        "'user', field 'weight': shape .6, 0. has no columns",
    ),
    "masked": (
        lambda: user(total=np.ma.masked_array(SUM, SUM > 2)),
        "table 'user', field 'sum': a masked array; fill it first",
    ),
    "too many columns": (
        lambda: user(weight=np.broadcast_to(np.int8(1), (6, 2**27))),
        "'user', field 'weight': 134217728 columns; at most 134217727 can be stored",
    ),
    "objects": (
        lambda: user(total=SUM.astype(object)),
        "'user', field 'sum': dtype object cannot be stored",
    ),
    "text": (lambda: user(total=list("abcdef")), "'user', field 'sum': dtype <U1"),
    "dates": (lambda: user(total=SUM.astype("M8[25s]")), "'user', field 'sum': dtype datetime64"),
    "records": (lambda: user(total=np.zeros(6, "f4,i4")), "'user', field 'sum': dtype"),
    "long double": (
        lambda: user(total=SUM.astype("longdouble")),
        "'user', field 'sum': dtype float128",
    ),
    "4-bit integers": (
        lambda: user(total=SUM.astype(ml_dtypes.int4)),
        "'user', field 'sum': dtype int4",
    ),
    "ragged": (lambda: user(weight=[[1.0], [1.0, 2.0]]), "'user', field 'weight': list cannot be read"),
    "nothing": (lambda: user(total=None), "'user', field 'sum': dtype object"),
    "sparse": (
        lambda: user(weight=torch.eye(6).to_sparse()),
        "'user', field 'weight': a torch.sparse_coo",
    ),
    "on a device": (
        lambda: user(weight=torch.empty(6, 3, device="meta")),
        "'user', field 'weight': .*meta",
    ),
    # fields
    "field name": (
        lambda: state(tables={**tables(), "user": Table({"Weight": WEIGHT})}),
        "'user': field name 'Weight' does not",
    ),
    "field name a number": (
        lambda: state(tables={**tables(), "user": Table(NUMBERED)}),
        "'user': field name 1 does not",
    ),
    "long field name": (
        lambda: state(tables={**tables(), "user": Table({"a" * 65: SUM})}),
        "'user': field name 'a{65}'",
    ),
    "no fields": (lambda: state(tables={**tables(), "user": Table({})}), "table 'user': no fields"),
    "no table": (
        lambda: state(tables={**tables(), "user": {"weight": WEIGHT}}),
        "table 'user': a dict where a .*Table",
    ),
    "an array for a table": (lambda: state(tables={**tables(), "user": WEIGHT}), "table 'user': a ndarray where"),
    # bits and store_as
    "0 bits": (lambda: user(bits=0), "table 'user', bits: 0; give None or a number from 1 to 8"),
    "9 bits": (lambda: user(bits=9), "table 'user', bits: 9"),
    "half a bit": (lambda: user(bits=4.5), "table 'user', bits: 4.5"),
    "true bits": (lambda: user(bits=True), "table 'user', bits: True"),
    "bits of a field": (lambda: user(bits={"weight": 0}), "table 'user', bits, field 'weight': 0"),
    "bits of no field": (
        lambda: user(bits={"nope": 4}),
        "table 'user', bits: the table has no field 'nope'",
    ),
    "bits of one value": (
        lambda: user(bits={"sum": 4}),
        "'user', field 'sum': only floating-point fields",
    ),
    "bits and store_as": (
        lambda: user(bits=4, store_as={"weight": "float16"}),
        "'user', field 'weight': both bits and store_as",
    ),
    "store_as of no field": (
        lambda: user(store_as={"x": "float16"}),
        "'user', store_as 'x': the table has no",
    ),
    "store_as wider": (
        lambda: user(store_as={"weight": "float64"}),
        "'user', store_as 'weight': .*'float64'",
    ),
    "store_as of float64": (
        lambda: user(store_as={"sum": "float16"}),
        "'user', store_as 'sum': a float32 field",
    ),
    "store_as a list": (lambda: user(store_as=["weight"]), "'user', store_as: a list where a mapping"),
    # keys
    "key twice": (lambda: user(keys=[1, 2, 1]), "table 'item', keys: 1 is there more than once"),
    "keys too few": (lambda: user(keys=[1, 2]), "table 'item': 2 keys for 3 rows"),
    "keys of floats": (lambda: user(keys=[1.5, 2, 3]), "table 'item', keys: float64"),
    "deleted from a dense table": (
        lambda: user(deleted=[1]),
        "table 'user': only a keyed table has deleted",
    ),
    # tables
    "table forgotten": (
        lambda: state(tables={"user": tables()["user"]}),
        "table 'item' of the latest checkpoint is not in the state; .* .tables missing in all: 1.$",
    ),
    "table misspelt": (
        lambda: state(tables={"user": tables()["user"], "itm": tables()["item"]}),
        "table 'item' of the latest checkpoint is not in the state; .* or is it what the state calls 'itm'[?]$",
    ),
    "all tables forgotten": (
        lambda: state(tables={}),
        "table 'item' .* name it in dropped=.* .tables missing in all: 2.$",
    ),
    "name no text": (lambda: state(tables={**tables(), 3: tables()["user"]}), "table name 3 is not text"),
    "name no UTF-8": (
        lambda: state(tables={**tables(), "\ud800": tables()["user"]}),
        "table name '.ud800' cannot be written",
    ),
    "tables a list": (lambda: state(tables=[tables()]), "tables: a list where a mapping belongs"),
    "tables None": (lambda: state(tables=None), "tables: a NoneType where"),
    "no state": (lambda: {"tables": tables()}, "a dict where a checkrun_format.State belongs"),
    # tensors and blobs
    "tensor of objects": (lambda: state(tensors={"x": [None]}), "tensor 'x': dtype object"),
    "tensor name": (lambda: state(tensors={"\udfff": 1}), "tensor name '.udfff' cannot be written"),
    "tensors a list": (lambda: state(tensors=[1]), "tensors: a list where a"),
    "sparse tensor": (
        lambda: state(tensors={"x": torch.eye(2).to_sparse()}),
        "tensor 'x': a torch.sparse",
    ),
    "blob of text": (lambda: state(blobs={"b": "text"}), "blob 'b': a str where bytes"),
    "blob name": (lambda: state(blobs={5: b""}), "blob name 5 is not text"),
    "blobs None": (lambda: state(blobs=None), "blobs: a NoneType where"),
    # extra
    "extra NaN": (
        lambda: state(extra={"a": [1, float("nan")]}),
        r"extra\['a'\]\[1\] is nan, which JSON",
    ),
    "extra infinite": (lambda: state(extra=-np.inf), "extra is -inf, which JSON"),
    "extra bytes": (lambda: state(extra={"a": b"x"}), r"extra\['a'\] is of type bytes, .*; blobs= takes bytes"),
    "extra array": (lambda: state(extra={"a": SUM}), r"extra\['a'\] is of type ndarray"),
    "extra numpy number": (lambda: state(extra=[np.int64(3)]), r"extra\[0\] is of type int64, .* convert it: int"),
    "extra set": (lambda: state(extra={1, 2}), "extra is of type set"),
    "extra object": (lambda: state(extra=object()), "extra is of type object"),
    "extra keys": (lambda: state(extra={"a": {1: 2}}), r"extra\['a'\]: key 1 is not text"),
    "extra no UTF-8": (lambda: state(extra=["\ud800"]), "extra is not JSON"),
    "extra key no UTF-8": (lambda: state(extra={"\ud800": 1}), "extra is not JSON"),
    "extra in itself": (
        lambda: state(extra=LOOP),
        "is nested deeper than 200 levels, or contains itself",
    ),
    "extra huge number": (lambda: state(extra=10**5000), "extra is not JSON"),
}


class TestStates:
    @pytest.mark.parametrize(("state", "told"), STATES.values(), ids=STATES)
    def test_refused_before_anything_is_written(
        self, run: Run, folder: Path, state: Callable[[], Any], told: str
    ) -> None:
        before = listing(folder)
        with pytest.raises(CheckrunError, match=told) as caught:
            run.save(state())
        assert type(caught.value) is InvalidInputError and isinstance(caught.value, ValueError)
        assert caught.value.kind == "invalid_input"
        assert listing(folder) == before
        assert_intact(folder / "run")
        made = run.save(State(tables=tables(weight=WEIGHT * 3, changed=range(6))), step=3)
        assert made.sequence == 3 and made.load().tables["user"]["weight"].tobytes() == (WEIGHT * 3).tobytes()

    @pytest.mark.parametrize(("state", "told"), STATES.values(), ids=STATES)
    def test_refused_in_an_empty_run(self, folder: Path, state: Callable[[], Any], told: str) -> None:
        """All but what only a latest checkpoint makes wrong."""
        run = crf.open_run(folder, "a", durable=False)
        before = listing(folder)
        if told.startswith(("table 'user' has been saved", "table 'item' ")) and "keys" not in told:
            assert run.save(state()).sequence == 1
            return
        with pytest.raises(InvalidInputError, match=told):
            run.save(state())
        assert listing(folder) == before and list(before) == ["zarr.json"]


class TestOptionsOfSave:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"step": -1}, "step -1; a number from 0 on"),
            ({"step": 2**63}, f"step {2**63}"),
            ({"step": 1.0}, "step 1.0"),
            ({"step": "1"}, "step '1'"),
            ({"step": True}, "step True"),
            ({"parent": 3}, "parent=3 is not in the chain of the latest checkpoint"),
            ({"parent": 0}, "parent=0 is not in the chain"),
            ({"parent": "first"}, "parent='first' is not in the chain"),
            ({"dropped": ["user"]}, "dropped: table 'user' is in the state"),
            ({"dropped": ["nope"]}, "dropped: table 'nope' is not in the latest checkpoint"),
            ({"dropped": "item"}, "dropped: a str where a list of names belongs"),
            ({"dropped": None}, "dropped: a NoneType where a list of names belongs"),
            ({"dropped": [3]}, "dropped: table 3 is not in the latest checkpoint"),
        ],
    )
    def test_refused(self, run: Run, folder: Path, options: dict[str, Any], told: str) -> None:
        before = listing(folder)
        with pytest.raises(InvalidInputError, match=told):
            run.save(State(tables=tables()), **options)
        assert listing(folder) == before
        assert_intact(folder / "run")

    def test_too_large_for_a_commit_is_refused_and_removed(self, run: Run, folder: Path) -> None:
        """COM-3: whatever would make a commit larger than 8192 bytes; nothing a caller gives does today."""
        state = State(tables={**tables(), "n" * 10_000: tables()["user"]}, extra="x" * 100_000)
        made = run.save(state)
        assert (folder / "run/00000003/zarr.json").stat().st_size < 2048
        assert made.extra == "x" * 100_000


class TestOpening:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"mode": "w"}, "mode 'w'"),
            ({"mode": None}, "mode None"),
            ({"policy": "daily"}, "policy 'daily'"),
            ({"policy": ["full"]}, r"policy \['full'\]"),
            ({"every": 0}, "every=0; a number of checkpoints from 1 on"),
            ({"every": True}, "every=True"),
            ({"every": 2.0}, "every=2.0"),
            ({"bits": 0}, "bits: 0; give None or a number from 1 to 8"),
            ({"bits": 9}, "bits: 9"),
            ({"bits": "4"}, "bits: '4'"),
            ({"bits": [4]}, r"bits: \[4\]"),
            ({"bits": {"user": 9}}, r"bits\['user'\]: 9"),
            ({"bits": {"user": {"weight": -1}}}, r"bits\['user'\], field 'weight': -1"),
            ({"bits": {"*": "auto"}}, r"bits\['[*]'\]: 'auto'"),
            ({"bits": {3: 4}}, "bits: 3 is no table name or pattern"),
            ({"bits": "auto"}, "bits='auto' needs expected_restores="),
            ({"bits": "auto", "expected_restores": -1}, "needs expected_restores=, not -1: a number from 0 on"),
            ({"bits": "auto", "expected_restores": float("nan")}, "not nan"),
            ({"bits": "auto", "expected_restores": "2"}, "not '2'"),
            ({"chunk_bytes": 0}, "chunk_bytes 0; a number of bytes from 1 to 1 << 30"),
            ({"chunk_bytes": 2**30 + 1}, "chunk_bytes 1073741825; a number of bytes from 1"),
            ({"chunk_bytes": -5}, "chunk_bytes -5"),
            ({"chunk_bytes": 1.5}, "chunk_bytes 1.5"),
            ({"chunk_bytes": True}, "chunk_bytes True"),
            ({"mode": "r", "takeover": True}, "open for reading"),
        ],
    )
    def test_options(self, run: Run, folder: Path, options: dict[str, Any], told: str) -> None:
        before = listing(folder)
        with pytest.raises(InvalidInputError, match=told):
            crf.open_run(run.url, **{"mode": "a", **options})
        with pytest.raises((InvalidInputError, RunNotFoundError)):
            crf.open_run(folder / "new", **{"mode": "a", **options})
        assert listing(folder) == before

    @pytest.mark.parametrize(
        "address",
        [
            "",
            "s3://",
            "nonsense://x/run",
            "s3:/bucket/run",
            Path("gs://b"),
            "file://relative/run",
            "a\0b",
            b"bytes",
            None,
            3,
            ["run"],
        ],
    )
    @pytest.mark.parametrize("mode", ["r", "a"])
    def test_addresses(self, folder: Path, monkeypatch: pytest.MonkeyPatch, address: Any, mode: str) -> None:
        monkeypatch.chdir(folder)
        with pytest.raises(InvalidInputError, match=r"is no address of a run|an address of S3 is|no store here serves"):
            crf.open_run(address, mode)
        assert list(folder.iterdir()) == []

    def test_a_path_that_does_not_exist(self, folder: Path) -> None:
        """RUN-1: reading creates nothing."""
        with pytest.raises(RunNotFoundError, match=r"typo/run does not exist") as caught:
            crf.open_run(folder / "typo/run")
        assert caught.value.kind == "run_not_found" and isinstance(caught.value, LookupError)
        assert list(folder.iterdir()) == []

    @pytest.mark.parametrize("content", [{}, {"readme.txt": b"x"}, {"data/x": b""}, {"00000001/zarr.json": b""}])
    def test_a_folder_that_is_no_run(self, folder: Path, content: dict[str, bytes]) -> None:
        for name, data in content.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        before = listing(folder)
        with pytest.raises(NotARunError, match="holds no run") as caught:
            crf.open_run(folder)
        assert caught.value.kind == "not_a_run"
        if content:
            with pytest.raises(
                NotARunError, match=f"holds no run but other things .{next(iter(before)).split('/')[0]}"
            ):
                crf.open_run(folder, "a")
        assert listing(folder) == before

    def test_a_run_that_lost_its_document(self, run: Run, folder: Path) -> None:
        """The way out is no empty folder; the document of any new run will do."""
        (folder / "run/zarr.json").rename(folder / "lost.json")
        for mode in ("r", "a"):
            with pytest.raises(NotARunError, match=r"holds no run.* lost its zarr\.json, put that of a copy back, or"):
                crf.open_run(run.url, mode)
        crf.open_run(folder / "new", "a", durable=False)
        assert (folder / "new/zarr.json").read_bytes() == (folder / "lost.json").read_bytes()
        (folder / "new/zarr.json").rename(folder / "run/zarr.json")
        assert crf.open_run(run.url).latest().load().extra == {"number": 2}

    def test_a_store_that_cannot_be_opened(self, folder: Path) -> None:
        (folder / "full").mkdir()
        (folder / "full/x").write_bytes(b"")
        with pytest.raises(crf.StorageError, match=r"zip://run: the store cannot be opened .*Is a directory"):
            crf.open_run("zip://run", storage_options={"fo": str(folder / "full")})

    def test_a_checkpoint_is_no_run(self, run: Run) -> None:
        for mode in ("r", "a"):
            with pytest.raises(NotARunError, match="is that of a checkpoint: give the folder above it"):
                crf.open_run(f"{run.url}/00000001", mode)

    def test_a_damaged_latest_number_is_not_passed_over(self, run: Run, folder: Path) -> None:
        """COM-5: neither a compaction nor a takeover brings an older state back in silence; a rollback may."""
        commit = folder / "run/00000002/zarr.json"
        commit.write_bytes(commit.read_bytes().replace(b'"checkrun":{', b'"checkruo":{'))
        opened = crf.open_run(run.url, "a", durable=False)
        before = listing(folder)
        for act in (opened.compact, opened.take_over, lambda: crf.open_run(run.url, "a", takeover=True)):
            with pytest.raises(DamagedError, match=r"It may have been checkpoint 2: .*older one \(rollback\)"):
                act()
        assert listing(folder) == before
        assert opened.rollback(1).sequence == 3
        assert opened.compact().sequence == 4
        assert opened.latest().load().extra == {"number": 1}

    def test_a_file(self, folder: Path) -> None:
        (folder / "file").write_bytes(b"x")
        for mode in ("r", "a"):
            with pytest.raises(NotARunError, match="file is a file; a run is a folder"):
                crf.open_run(folder / "file", mode)
        assert listing(folder) == {"file": b"x"}

    @pytest.mark.parametrize(
        ("document", "error"),
        [
            (b"", NotARunError),
            (b"{}", (NotARunError, DamagedError)),
            (b'{"zarr_format": 3, "node_type": "group", "attributes": {}}', NotARunError),
            (b'{"zarr_format": 3, "node_type": "array"}', (NotARunError, DamagedError)),
            (b"not json", DamagedError),
            (b"\xff\xfe", DamagedError),
        ],
    )
    def test_another_zarr_hierarchy(self, folder: Path, document: bytes, error: Any) -> None:
        (folder / "zarr.json").write_bytes(document)
        for mode in ("r", "a"):
            with pytest.raises(error, match=r"zarr\.json") as raised:
                crf.open_run(folder, mode)
            if isinstance(raised.value, NotARunError):
                assert f"{folder} holds no run" in str(raised.value)
        assert listing(folder) == {"zarr.json": document}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the `checkrun` object of a document."""
    document = json.loads(path.read_bytes())
    change(document["attributes"]["checkrun"])
    path.write_text(json.dumps(document))


def edit_manifest(path: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and the commit so that it fits (MAN-1)."""
    commit = path / f"{number:08d}/zarr.json"
    attempt = json.loads(commit.read_bytes())["attributes"]["checkrun"]["attempt"]
    manifest = commit.parent / attempt / "manifest.json"
    document = json.loads(manifest.read_bytes())
    change(document)
    data = json.dumps(document).encode()
    manifest.write_bytes(data)
    edit(commit, lambda c: c.update(manifest={"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}))
    edit(commit, lambda c: c.update({k: v for k, v in document["commit"].items() if k != "manifest"}))


class TestOtherVersions:
    """VER-1, VER-2."""

    @pytest.mark.parametrize("version", ["1.0", "2.3", "0.8", "0.10", "10.9"])
    def test_a_run_of_another_version(self, run: Run, folder: Path, version: str) -> None:
        edit(folder / "run/zarr.json", lambda c: c.update(format_version=version))
        before = listing(folder)
        for mode in ("r", "a"):
            with pytest.raises(UnsupportedVersionError, match=f"format version {version}"):
                crf.open_run(run.url, mode)
        assert listing(folder) == before

    @pytest.mark.parametrize("version", ["1.0", "0.10"])
    def test_a_checkpoint_of_another_version(self, run: Run, folder: Path, version: str) -> None:
        """The other checkpoints are read as usual, and nothing is laid over what cannot be read."""
        edit(folder / "run/00000002/zarr.json", lambda c: c.update(format_version=version))
        again = crf.open_run(run.url)
        assert again[1].load().tables["user"]["weight"].tobytes() == WEIGHT.tobytes()
        before = listing(folder)
        for refused in (lambda: again[2], again.latest, lambda: list(again.log()), lambda: crf.open_run(run.url, "a")):
            with pytest.raises(UnsupportedVersionError, match=rf"00000002/zarr.json .* format version {version}"):
                refused()
        assert listing(folder) == before

    def test_a_run_that_requires_a_feature(self, run: Run, folder: Path) -> None:
        edit(folder / "run/zarr.json", lambda c: c.update(requires=["codebook"]))
        with pytest.raises(UnsupportedFeatureError, match="requires codebook, unknown to checkrun-format"):
            crf.open_run(run.url)

    def test_a_checkpoint_that_requires_a_feature(self, run: Run, folder: Path) -> None:
        edit(folder / "run/00000002/zarr.json", lambda c: c.update(requires=["x", "codebook"]))
        again = crf.open_run(run.url)
        assert again[1].extra == {"number": 1}
        with pytest.raises(UnsupportedFeatureError, match="requires codebook, x"):
            again[2]

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"requires": ["codebook"]}, "table 'user' of checkpoint 2 requires codebook"),
            ({"addressing": "hashed"}, "table 'user' of checkpoint 2: unknown addressing 'hashed'"),
            ({"storage": "sparse"}, "table 'user' of checkpoint 2: unknown storage 'sparse'"),
            ({"key_dtype": "int128"}, "table 'user' of checkpoint 2: unknown key_dtype 'int128'"),
            (
                {"fields": [{"name": "weight", "dtype": "float4", "columns": 3, "encoder": None}]},
                "table 'user' of checkpoint 2: unknown dtype 'float4' of field 'weight'",
            ),
        ],
    )
    def test_one_table_that_cannot_be_read(self, run: Run, folder: Path, change: dict[str, Any], told: str) -> None:
        """TAB-1: that table only, by name; the others are read as usual."""

        def apply(manifest: dict[str, Any]) -> None:
            next(table for table in manifest["tables"] if table["name"] == "user").update(change)

        edit_manifest(folder / "run", 2, apply)
        latest = crf.open_run(run.url).latest()
        assert latest.tables == ["user", "item"]
        for refused in (lambda: latest.table("user"), latest.load, lambda: latest.load(tables=["user"])):
            with pytest.raises(UnsupportedFeatureError, match=told):
                refused()
        state = latest.load(tables=["item"])
        assert state.tables["item"]["weight"].tobytes() == WEIGHT[[1, 0, 2]].tobytes()
        assert (state.extra, state.tensors["x"].tolist()) == ({"number": 2}, [2])
        writer = crf.open_run(run.url, "a", durable=False)
        made = writer.save(State(tables={"item": tables()["item"]}), dropped=["user"])
        assert made.tables == ["item"] and made.sequence == 3

    @pytest.mark.usefixtures("run")
    def test_keys_that_are_not_known_are_ignored(self, folder: Path) -> None:
        """DOC-1."""
        edit(folder / "run/zarr.json", lambda c: c.update(colour="green"))

        def apply(manifest: dict[str, Any]) -> None:
            manifest["colour"] = "green"
            manifest["commit"]["colour"] = ["green"]
            for table in manifest["tables"]:
                table["colour"] = {"a": None}

        edit_manifest(folder / "run", 2, apply)
        assert_intact(folder / "run")


class Disk:
    """`os.writev` of a disk that has room for some writes only, and perhaps for half of the next."""

    def __init__(self, kind: int, *, partial: bool) -> None:
        self.calls = 0
        self._kind, self._partial = kind, partial
        self._room = 0
        self._writev = os.writev

    def __call__(self, descriptor: int, buffers: Sequence[Any]) -> int:
        self.calls += 1
        if self.calls <= self._room:
            return self._writev(descriptor, buffers)
        if self._partial and self.calls == self._room + 1:
            half = memoryview(buffers[0])[: max(1, len(buffers[0]) // 2)]
            return self._writev(descriptor, [half])
        raise OSError(self._kind, os.strerror(self._kind))

    @contextlib.contextmanager
    def patched(self, room: int) -> Iterator[None]:
        self.calls, self._room = 0, room
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "writev", self)
            yield


class TestFullDisk:
    """One error that says what to do; earlier checkpoints stay, the attempt is removed, changed rows are kept."""

    @pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
    @pytest.mark.parametrize("partial", [False, True], ids=["nothing", "half"])
    def test_at_every_write(self, run: Run, folder: Path, kind: int, partial: bool) -> None:
        after = State(tables=tables(weight=WEIGHT * 3, changed=range(6)), extra={"number": 3})
        disk = Disk(kind, partial=partial)
        shutil.copytree(run.url, folder / "copy")
        copy = crf.open_run(folder / "copy", "a", durable=False)
        copy.restore()
        with disk.patched(room=1000):
            copy.save(after)
        writes = disk.calls
        before = listing(Path(run.url))
        for room in range(writes):
            with disk.patched(room), pytest.raises(StorageError, match="00000003") as caught:
                run.save(after)
            assert caught.value.errno == kind
            assert ("free some space" in str(caught.value)) == (kind != errno.EIO)
            if room < writes - 1:
                assert listing(Path(run.url)) == before, "litter only where the commit itself failed"
            assert_intact(folder / "run")
        assert writes > 10
        assert run.save(after).load().tables["user"]["weight"].tobytes() == (WEIGHT * 3).tobytes()
        assert_intact(folder / "run")

    def test_creating_a_run(self, folder: Path) -> None:
        message = r"zarr\.json.*the disk is full: free some space"
        with Disk(errno.ENOSPC, partial=True).patched(room=0), pytest.raises(StorageError, match=message):
            crf.open_run(folder / "run", "a")
        assert [path for path in folder.rglob("*") if path.is_file()] == []
        assert crf.open_run(folder / "run", "a").save(State(extra=1)).extra == 1


CHILD = """
import json, os, resource, signal, sys
import numpy as np
import checkrun_format as crf
from checkrun_format import State, Table

folder, what = sys.argv[1:]
values = np.zeros((200_000, 4), np.float32)
changed = State(tables={"t": Table({"weight": values + 1}, changed=crf.ALL)}, extra=3)
warm = crf.open_run(folder + "/warm", "a", durable=False)
warm.save(State(tables={"t": Table({"weight": values[:9]})}))
warm.save(State(tables={"t": Table({"weight": values[:9]}, changed=[1])}))
warm.load()
if what == "limit":
    run = crf.open_run(folder + "/run", "a", durable=False)
    run.restore()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
elif os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
told = {"user": os.getuid()}
try:
    run = run if what == "limit" else crf.open_run(folder + "/run", "a", durable=False)
    told["opened"] = run.latest().extra
    run.save(changed)
except crf.CheckrunError as error:
    told["error"] = [error.kind, str(error), getattr(error, "errno", None)]
told["loaded"] = float(crf.open_run(folder + "/run").load().tables["t"]["weight"].sum())
try:
    crf.open_run(folder + "/new", "a")
except crf.CheckrunError as error:
    told["new"] = [error.kind, str(error)]
if what == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    told["later"] = run.save(changed).extra
print(json.dumps(told))
"""


class TestTheSystemRefuses:
    """In a child process: of a user without rights, and with a limit on the size of files."""

    @pytest.fixture
    def shared(self) -> Iterator[Path]:
        """Where any user can look, other than in pytest's own folders."""
        shared = Path(tempfile.mkdtemp())
        shared.chmod(0o755)
        run = crf.open_run(shared / "run", "a", durable=False)
        run.save(State(tables={"t": Table({"weight": np.ones((200_000, 4), np.float32)})}, extra=2))
        yield shared
        for path in (shared, *shared.rglob("*")):
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(shared)

    @staticmethod
    def child(shared: Path, what: str) -> dict[str, Any]:
        printed = subprocess.run(
            [sys.executable, "-c", CHILD, str(shared), what],
            check=True,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            timeout=60,
        )
        told: dict[str, Any] = json.loads(printed.stdout)
        return told

    def test_a_read_only_folder(self, shared: Path) -> None:
        (shared / "warm").mkdir()
        for path in (shared, *(shared / "run").rglob("*"), shared / "run"):
            if path.is_dir():
                path.chmod(0o555)
        before = listing(shared / "run")
        told = self.child(shared, "user")
        assert told["user"] != 0
        assert (told["opened"], told["loaded"]) == (2, 800_000.0)
        kind, message, number = told["error"]
        assert (kind, number) == ("storage", errno.EACCES)
        assert "run/00000002" in message and "permission denied: check the owner and mode" in message
        assert told["new"][0] == "storage" and "new" in told["new"][1]
        assert listing(shared / "run") == before and not (shared / "new").exists()

    def test_a_limit_on_the_size_of_files(self, shared: Path) -> None:
        before = listing(shared / "run")
        told = self.child(shared, "limit")
        kind, message, number = told["error"]
        assert (kind, number) == ("storage", errno.EFBIG)
        assert "run/00000002" in message and os.strerror(errno.EFBIG) in message
        assert (told["loaded"], told["later"]) == (800_000.0, 3)
        after = listing(shared / "run")
        assert before.items() <= after.items()
        assert len([name for name in after if name.endswith("manifest.json")]) == 2, "the attempt that failed is gone"
        assert crf.open_run(shared / "run").load().tables["t"]["weight"].sum() == 800_000.0


class TestTooLate:
    def test_a_run_that_lost_its_number_says_so_before_it_looks_at_the_state(self, run: Run, folder: Path) -> None:
        crf.open_run(run.url, "a", durable=False).save(State(tables=tables()))
        with pytest.raises(ConcurrentCommitError, match="number 3 is taken"):
            run.save(State(tables=tables()))
        with pytest.raises(ConcurrentCommitError, match="may not save any more"):
            run.save(State(extra=float("nan")))
        assert_intact(folder / "run")
