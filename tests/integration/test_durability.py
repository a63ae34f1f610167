"""The order of writes, syncs and links, on a recording file system: a killed process cannot show a missing sync."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.stores import local

pytestmark = pytest.mark.timeout(60)


class Event(NamedTuple):
    """One call of the system: what, and on which path; of a link the new name."""

    what: str
    path: str


class Recorder:
    """Records what the local store asks of the system, in order."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.events: list[Event] = []
        self.temporary: dict[str, str] = {}
        self.links = True
        self._open: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _note(self, what: str, path: str) -> None:
        self.events.append(Event(what, os.path.relpath(path, self.root)))

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        new = not Path(path).exists()
        descriptor = os.open(path, flags, mode)
        self._open[descriptor] = path
        if new:
            self._note("create", path)
        return descriptor

    def writev(self, descriptor: int, buffers: list[memoryview]) -> int:
        self._note("write", self._open[descriptor])
        return os.writev(descriptor, buffers)

    def fsync(self, descriptor: int) -> None:
        self._note("fsync", self._open[descriptor])

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]
        os.close(descriptor)

    def link(self, source: str, target: str) -> None:
        if not self.links:
            raise OSError(errno.EPERM, "no links here")
        os.link(source, target)
        self.temporary[os.path.relpath(target, self.root)] = os.path.relpath(source, self.root)
        self._note("link", target)

    def replace(self, source: str, target: str) -> None:
        Path(source).replace(target)
        self.temporary[os.path.relpath(target, self.root)] = os.path.relpath(source, self.root)
        self._note("replace", target)

    def unlink(self, path: str) -> None:
        Path(path).unlink()
        self._note("unlink", path)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        Path(path).mkdir(mode)
        self._note("mkdir", path)

    def makedirs(self, path: str, *, exist_ok: bool) -> None:
        missing = [p for p in [Path(path), *Path(path).parents] if not p.exists()]
        Path(path).mkdir(parents=True, exist_ok=exist_ok)
        for folder in reversed(missing):
            self._note("mkdir", str(folder))

    # What follows from the record

    def index(self, what: str, path: str) -> int:
        """When something happened, which happened once."""
        (index,) = [i for i, event in enumerate(self.events) if event == (what, path)]
        return index

    def last_change(self, path: str, before: int) -> int:
        """When a file was last written, or a folder last got an entry."""
        changes = [
            i
            for i, (what, where) in enumerate(self.events[:before])
            if (what in ("create", "write") and where == path)
            or (what in ("create", "mkdir", "link", "replace") and parent(where) == path)
        ]
        return max(changes, default=-1)

    def is_synced(self, path: str, at: int) -> bool:
        """Whether a file or folder would survive a crash of the machine at that time, as it is then."""
        syncs = [i for i, event in enumerate(self.events[:at]) if event == ("fsync", path)]
        return bool(syncs) and max(syncs) > self.last_change(path, at)

    def made(self, before: int) -> list[str]:
        """The files made until some time, temporary ones of other objects than commits included."""
        return [where for what, where in self.events[:before] if what in ("create", "link")]


def parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


def folders_up_to_the_run(path: str) -> Iterator[str]:
    """From a file's folder up to and including the run's."""
    while path != ".":
        path = parent(path)
        yield path


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(tmp_path / "run")
    monkeypatch.setattr(local, "os", recorder)
    return recorder


def state(step: int) -> crf.State:
    weight = np.random.default_rng(step).standard_normal((50, 6), np.float32)
    weight[7] = np.nan
    changed = np.arange(step % 3, 50, 4)
    return crf.State(
        tables={
            "raw": crf.Table({"weight": weight, "sum": weight[:, 0]}, changed=changed),
            "4-bit": crf.Table({"weight": weight}, bits=4, changed=changed),
            "keyed": crf.Table({"weight": weight[:20]}, keys=np.arange(20) * 3 + step, changed=[], deleted=[step + 99]),
        },
        tensors={"bias": weight[0]},
        blobs={"reader": b"state"},
        extra="x" * (70_000 if step == 0 else 7),
    )


def check_commit(recorder: Recorder, checkpoint: crf.Checkpoint, how: str = "link") -> list[str]:
    """STO-2, COM-4, and steps 2 to 6 of section 9.1; the files of the attempt, relative to it."""
    folder = f"{checkpoint.sequence:08d}"
    commit, attempt = f"{folder}/zarr.json", f"{folder}/{checkpoint.commit.attempt}"
    at = recorder.index(how, commit)
    data = [path for path in recorder.made(at) if path.startswith(f"{attempt}/")]
    stored = [path for path in Path(recorder.root, attempt).rglob("*") if path.is_file()]
    assert sorted(data) == sorted(str(path.relative_to(recorder.root)) for path in stored)
    assert [path for path in data if not recorder.is_synced(path, at)] == []
    folders = {above for path in data for above in folders_up_to_the_run(path)} - {folder}
    assert {attempt, "."} < folders
    assert [path for path in sorted(folders) if not recorder.is_synced(path, at)] == []
    check_entry(recorder, attempt, at)
    later = [event for event in recorder.events[at:] if event.what in ("create", "write", "mkdir", "link")]
    assert [event for event in later if event.path.startswith(f"{attempt}/")] == []
    if how == "link":
        check_temporary(recorder, commit, at)
    assert recorder.last_change(folder, len(recorder.events)) == at
    assert recorder.is_synced(folder, len(recorder.events))
    return [path.removeprefix(f"{attempt}/") for path in data]


def check_entry(recorder: Recorder, path: str, at: int) -> None:
    """The folder that holds a path was synced after the path was made in it."""
    made = recorder.index("mkdir", path)
    assert ("fsync", parent(path)) in recorder.events[made:at]


def check_temporary(recorder: Recorder, key: str, at: int) -> None:
    """The temporary file lies beside its object, was synced before the link, and is gone afterwards."""
    temporary = recorder.temporary[key]
    assert parent(temporary) == parent(key)
    assert recorder.is_synced(temporary, at)
    assert ("unlink", temporary) in recorder.events[at:]
    assert not Path(recorder.root, temporary).exists()


def test_the_run_document_is_durable_before_anything_else(recorder: Recorder) -> None:
    """RUN-1."""
    crf.open_run(recorder.root, "a")
    at = recorder.index("link", "zarr.json")
    check_temporary(recorder, "zarr.json", at)
    assert recorder.is_synced(".", len(recorder.events))
    assert ("fsync", "..") in recorder.events[recorder.index("mkdir", ".") : at]
    assert recorder.made(at) == [recorder.temporary["zarr.json"]]


def test_the_folders_above_the_run_are_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path / "new" / "newer" / "run")
    monkeypatch.setattr(local, "os", recorder)
    crf.open_run(recorder.root, "a")
    at = recorder.index("link", "zarr.json")
    for folder, above in (("../..", "../../.."), ("..", "../.."), (".", "..")):
        assert ("fsync", above) in recorder.events[recorder.index("mkdir", folder) : at]


def test_at_the_commit_all_that_it_names_is_durable(recorder: Recorder) -> None:
    """COM-4: a commit is created after every object of its attempt is durable; base and increments."""
    run = crf.open_run(recorder.root, "a", policy="consecutive", chunk_bytes=600)
    for step in range(3):
        recorder.events = []
        checkpoint = run.save(state(step), step=step)
        assert (checkpoint.parent is None) == (step == 0)
        names = check_commit(recorder, checkpoint)
        assert {"zarr.json", "manifest.json", "parts-0.json.gz", "block-0-0/weight.values/c/0/0"} <= set(names)
        assert ("dense-0/blob/c/1" in names) == (step == 0)
        assert ("block-0-0/rows/c/0" in names) == (step > 0)


ACTS: dict[str, Callable[[crf.Run], crf.Checkpoint | None]] = {
    "rollback": lambda run: run.rollback(1),
    "compact": lambda run: run.compact(),
    "takeover": lambda run: run.take_over(),
}


@pytest.mark.parametrize("act", ACTS)
def test_every_kind_of_commit_is_durable(recorder: Recorder, act: str) -> None:
    run = crf.open_run(recorder.root, "a", policy="consecutive")
    run.save(state(0), step=0)
    run.save(state(1), step=1)
    recorder.events = []
    checkpoint = ACTS[act](run)
    assert checkpoint is not None
    assert checkpoint.sequence == 3
    names = check_commit(recorder, checkpoint)
    assert ("block-0-0/weight.values/c/0/0" in names) == (act == "compact")


def test_at_the_commit_what_every_writer_stored_is_durable(recorder: Recorder) -> None:
    """Several writers: each makes what it stored durable before it has finished, the coordinator the rest."""
    run = crf.open_run(recorder.root, "a")
    save = run.begin(step=5, writers=3)
    part_lists = []
    for rank in range(3):
        writer = crf.join_save(save.token).writer(rank)
        if rank < 2:
            writer.put("t", {"weight": np.full((5, 4), rank, np.float32)}, rows=(5 * rank, 5 * rank + 5), of=10, bits=3)
            writer.put_tensor(f"tensor {rank}", np.arange(rank + 1))
        part_lists.append(writer.finish())
        now = len(recorder.events)
        mine = [path for path in recorder.made(now) if re.search(rf"/(parts|block|dense)-{rank}\b", path)]
        assert len(mine) == (9, 9, 1)[rank]
        assert [path for path in mine if not recorder.is_synced(path, now)] == []
    names = check_commit(recorder, save.commit(part_lists))
    assert {f"parts-{rank}.json.gz" for rank in range(3)} <= set(names)
    assert {"block-0-0/weight.codes/c/0/0", "block-1-0/weight.codes/c/0/0", "dense-1/int64/c/0"} <= set(names)
    check_entry(recorder, "00000001", recorder.index("link", "00000001/zarr.json"))


def test_where_link_is_refused_the_commit_is_synced_itself(recorder: Recorder) -> None:
    """STO-2: `open(O_CREAT|O_EXCL)`, write, `fsync`; and the folder afterwards."""
    recorder.links = False
    run = crf.open_run(recorder.root, "a")
    checkpoint = run.save(state(0), step=0)
    check_commit(recorder, checkpoint, how="create")
    written = recorder.index("write", "00000001/zarr.json")
    synced = recorder.index("fsync", "00000001/zarr.json")
    assert recorder.index("create", "00000001/zarr.json") < written < synced


def test_replacing_is_durable(recorder: Recorder) -> None:
    """PRU-1 replaces a commit by the marker and only then deletes: the marker must stay."""
    store = local.LocalStore(recorder.root)
    store.create("00000001/zarr.json", b"a commit")
    store.replace("00000001/zarr.json", b"a marker")
    at = recorder.index("replace", "00000001/zarr.json")
    assert recorder.is_synced(recorder.temporary["00000001/zarr.json"], at)
    assert recorder.is_synced("00000001", len(recorder.events))
    assert store.get("00000001/zarr.json") == b"a marker"


def test_without_durable_nothing_is_synced(recorder: Recorder) -> None:
    run = crf.open_run(recorder.root, "a", durable=False, policy="consecutive")
    for step in range(2):
        run.save(state(step), step=step)
    save = run.begin(writers=1, parent=None)
    assert save.token["durable"] is False
    writer = crf.join_save(save.token).writer(0)
    writer.put("t", {"weight": np.zeros((2, 2), np.float32)}, rows=(0, 2), of=2)
    save.commit([writer.finish()], dropped=["raw", "4-bit", "keyed"])
    whats = [event.what for event in recorder.events]
    assert whats.count("link") == 4
    assert whats.count("write") > 50
    assert "fsync" not in whats


def test_the_recorder_finds_a_missing_sync(tmp_path: Path) -> None:
    """A check of the check: what is written or named after the sync counts as lost."""
    recorder = Recorder(tmp_path)
    (tmp_path / "a").mkdir()
    recorder.events = [Event("create", "a/b"), Event("fsync", "a"), Event("write", "a/b"), Event("fsync", "a/b")]
    assert recorder.is_synced("a/b", 4)
    assert not recorder.is_synced("a/b", 3)
    assert recorder.is_synced("a", 4)
    recorder.events += [Event("mkdir", "a/c"), Event("write", "a/b")]
    assert not recorder.is_synced("a/b", 6)
    assert not recorder.is_synced("a", 6)
    assert not recorder.is_synced(".", 6)
