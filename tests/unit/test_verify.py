"""Audits: which checkpoints are affected and which are safe; and a restore that falls back to a sound one."""

from __future__ import annotations

import logging
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.errors import InvalidInputError
from checkrun_format.stores import LocalStore

BASES = (1, 4)


def state(number: int) -> crf.State:
    weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    weight[0] += number
    return crf.State(tables={"t": crf.Table({"weight": weight}, changed=[0])}, extra=number)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """1 a base, 2 and 3 over it in a row, 4 a base, 5 and 6 over it in a row."""
    run = crf.open_run(tmp_path / "run", "a", durable=False, policy="consecutive")
    for number in range(1, 7):
        run.save(state(number), step=number, parent=None if number in BASES else "latest")
    return tmp_path / "run"


def chunk(folder: Path, number: int) -> Path:
    (found,) = (p for p in folder.glob(f"{number:08d}/*/block-*/weight.values/c/**/0") if p.is_file())
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def manifest_of(folder: Path, number: int) -> Path:
    (found,) = folder.glob(f"{number:08d}/*/manifest.json")
    return found


DAMAGE: dict[str, tuple[Callable[[Path], object], bool]] = {
    "a bit of a chunk": (lambda folder: flip(chunk(folder, 2)), False),
    "a chunk": (lambda folder: chunk(folder, 2).unlink(), True),
    "half a chunk": (lambda folder: (p := chunk(folder, 2)).write_bytes(p.read_bytes()[:5]), True),
    "a bit of a manifest": (lambda folder: flip(manifest_of(folder, 2)), True),
    "a manifest": (lambda folder: manifest_of(folder, 2).unlink(), True),
    "a commit": (lambda folder: (folder / "00000002/zarr.json").write_bytes(b"{"), True),
    "no commit": (lambda folder: (folder / "00000002/zarr.json").unlink(), True),
}
"""What is damaged in checkpoint 2, and whether a fast audit sees it."""


def test_each_problem_is_told_once(tmp_path: Path) -> None:
    """Both increments and each of their tables need the base that is gone."""
    run = crf.open_run(tmp_path, "a", durable=False, policy="one-shot")
    for number in range(3):
        table = crf.Table({"weight": np.full((4, 2), number, np.float32)}, changed=[0])
        run.save(crf.State(tables={"a": table, "b": table}))
    shutil.rmtree(tmp_path / "00000001")
    audit = crf.open_run(tmp_path).audit()
    place = "00000001/zarr.json"
    assert [(p.place, p.kind, p.message) for p in audit.problems] == [
        (place, "damaged", "missing, but checkpoint 2 needs it"),
        (place, "damaged", "missing, but checkpoint 3 needs it"),
        (place, "damaged", "the commit is missing: checkpoint 2 follows it"),
    ]
    assert crf.open_run(tmp_path).verify(3) == audit.problems[1:2]
    assert (audit.safe, sorted(audit.affected)) == ([], [1, 2, 3])


def test_a_commit_that_is_gone_and_that_no_chain_needs(folder: Path) -> None:
    """A later one names it, and a prune would have left a marker (PRU-1)."""
    (folder / "00000003/zarr.json").unlink()
    audit = crf.open_run(folder).audit()
    (problem,) = (problem for problem in audit.problems if problem.kind != "litter")
    assert (problem.place, problem.kind) == ("00000003/zarr.json", "damaged")
    assert problem.message == "the commit is missing: checkpoint 4 follows it"
    assert (audit.safe, audit.affected) == ([1, 2, 4, 5, 6], {3: 3})


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_affected_and_what_is_safe(folder: Path, what: str) -> None:
    damage, is_seen_fast = DAMAGE[what]
    damage(folder)
    run = crf.open_run(folder)
    audit = run.audit()
    broken_at = {2: 2, 3: 3} if 3 in by_number(audit) else {2: 2, 3: 2}
    assert (audit.safe, audit.affected) == ([1, 4, 5, 6], broken_at)
    assert audit.problems == run.verify() and audit.problems
    fast = run.audit(fast=True)
    assert fast.safe == ([1, 4, 5, 6] if is_seen_fast else [1, 2, 3, 4, 5, 6])
    assert set(fast.problems) <= set(audit.problems)
    assert bool(run.verify(2, fast=True)) == is_seen_fast


def by_number(audit: crf.Audit) -> set[int]:
    """The numbers in whose own check something was found; 3 is checked against its parent's commit and manifest."""
    return {number for number, at in audit.affected.items() if number == at}


@pytest.mark.parametrize("what", ["00000004/zarr.json", "00000004/*/manifest.json", "00000006/*/manifest.json"])
def test_going_back_from_a_chain_that_is_damaged(folder: Path, what: str) -> None:
    """RBK-1: to a checkpoint that is sound; to one that is not is refused before anything is written."""
    (path,) = folder.glob(what)
    path.unlink()
    run = crf.open_run(folder, "a", durable=False)
    before = {p for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(crf.DamagedError, match=what[:8]):
        run.rollback(6)
    assert {p for p in folder.rglob("*") if p.is_file()} == before
    made = run.rollback(3)
    assert (made.sequence, made.parent, made.step) == (7, None, 3)
    assert crf.open_run(folder, "a").restore().tables["t"]["weight"].tolist()[0] == [3, 4]
    assert run.save(state(9), step=9).table("t").storage == "full"
    assert {7, 8} <= set(run.audit().safe)


def test_a_number_that_is_free(folder: Path) -> None:
    run = crf.open_run(folder, "a", durable=False)
    for number in (0, 7, 99):
        with pytest.raises(crf.CheckpointNotFoundError, match=f"no checkpoint {number}"):
            run.verify(number)
    with pytest.raises(InvalidInputError, match="verify: '6' is not the number of a checkpoint"):
        run.verify("6")  # type: ignore[arg-type]
    run.prune(run.plan_prune(crf.Keep(last=1)))
    assert run.verify(1) == run.verify(6) == []


def test_a_sound_run_and_litter(folder: Path) -> None:
    (folder / "00000003/left").write_text("litter")
    (folder / "00000009").mkdir()
    (folder / "00000009/zarr.json").touch()
    audit = crf.open_run(folder).audit()
    assert (audit.safe, audit.affected) == ([1, 2, 3, 4, 5, 6], {})
    assert [problem.kind for problem in audit.problems] == ["litter", "burnt"]


def test_a_fast_audit_reads_no_values(folder: Path) -> None:
    run = crf.open_run(folder)
    reads: list[str] = []
    get = run._store.get

    def counted(key: str) -> bytes | None:
        reads.append(key)
        return get(key)

    run._store.get = counted  # type: ignore[method-assign]
    assert run.audit(fast=True).problems == []
    assert reads and not [key for key in reads if "/block-" in key or "/dense-" in key]


class TestFallback:
    def test_the_newest_whose_chain_is_sound(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        flip(chunk(folder, 4))
        run = crf.open_run(folder, "a", durable=False)
        with pytest.raises(crf.DamagedError):
            run.restore()
        with (
            caplog.at_level(logging.WARNING, "checkrun_format"),
            pytest.warns(crf.FallbackWarning, match="restoring checkpoint 3; newer ones") as caught,
        ):
            restored = run.restore(fallback=True)
        (warning,) = caught
        place = str(chunk(folder, 4).relative_to(folder))
        for number in (4, 5, 6):
            assert f"{number}: damaged: {place}" in str(warning.message)
        assert warning.filename == __file__
        assert [record.getMessage() for record in caplog.records] == [str(warning.message)]
        assert restored.extra == 3
        assert np.array_equal(restored.tables["t"]["weight"], state(3).tables["t"]["weight"])
        checkpoint = run.save(state(7), step=7)
        assert (checkpoint.sequence, checkpoint.parent, checkpoint.commit.restores) == (7, None, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert crf.open_run(folder, "a").restore(fallback=True).extra == 7

    def test_it_passes_over_damaged_commits_and_what_is_none(self, folder: Path) -> None:
        (folder / "00000006/zarr.json").write_bytes(b"{")
        manifest_of(folder, 5).unlink()
        run = crf.open_run(folder, "a")
        with pytest.warns(crf.FallbackWarning, match=r"checkpoint 4;.* 6: damaged: 00000006/zarr\.json.*; 5: damaged"):
            assert run.restore(fallback=True).extra == 4

    def test_a_sound_run_is_restored_without_a_word(self, folder: Path) -> None:
        run = crf.open_run(folder, "a")
        assert run.restore(fallback=True).extra == 6

    def test_none_is_sound(self, folder: Path, tmp_path: Path) -> None:
        for number in BASES:
            chunk(folder, number).unlink()
        run = crf.open_run(folder, "a")
        with pytest.raises(crf.DamagedError, match=r"no checkpoint of .* is sound") as caught:
            run.restore(fallback=True)
        assert caught.value.place.startswith("00000004/")
        with pytest.raises(crf.CheckpointNotFoundError):
            crf.open_run(tmp_path / "empty", "a").restore(fallback=True)
        with pytest.raises(InvalidInputError, match="give no number"):
            run.restore(3, fallback=True)

    def test_what_this_release_cannot_read_is_not_passed_over(self, folder: Path) -> None:
        commit = folder / "00000006/zarr.json"
        commit.write_bytes(commit.read_bytes().replace(b'"format_version":"0.9"', b'"format_version":"1.0"'))
        run = crf.open_run(folder)
        audit = run.audit()
        assert (audit.safe, audit.affected) == ([1, 2, 3, 4, 5], {6: 6})
        with pytest.raises(crf.UnsupportedVersionError):
            crf.open_run(folder, "a")


class CountingStore(LocalStore):
    """Counts reads of chunks that go on at the same time; until two did, each waits for a second one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, durable=False)
        self.changed = threading.Condition()
        self.reading = self.most = 0

    def get(self, key: str) -> bytes | None:
        if "/c/" not in key:
            return super().get(key)
        with self.changed:
            self.reading += 1
            self.most = max(self.most, self.reading)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most > 1, timeout=20)
        try:
            return super().get(key)
        finally:
            with self.changed:
                self.reading -= 1


def test_large_chunks_are_checked_by_a_few_threads(tmp_path: Path) -> None:
    """As many at a time as the store gains from; problems are in the order of the chunks, whoever was first."""
    run = crf.open_run(tmp_path, "a", durable=False, chunk_bytes=1 << 18)
    run.save(crf.State(tables={"t": crf.Table({"weight": np.ones((12 << 12, 16), np.float32)})}))
    (values,) = tmp_path.glob("00000001/*/block-0-0/weight.values/c")
    damaged = [values / str(index) / "0" for index in (1, 2, 5, 10)]
    for path in damaged:
        flip(path)
    store = CountingStore(tmp_path)
    found = [problem for problem in crf.open_run(store).verify() if "CRC-32C" in problem.message]
    assert [problem.place for problem in found[:4]] == [str(path.relative_to(tmp_path)) for path in damaged]
    assert {problem.place for problem in found[4:]} <= {found[0].place}  # met again by the check of the table
    assert 2 <= store.most <= store.parallel
