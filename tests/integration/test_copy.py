"""`copy_run` and `checkrun copy`: the same run elsewhere, whatever happens on the way."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.testing import Fault, FaultStore, MemoryStore
from checkrun_format.testing.stores import EVERY_CALL, How
from tests.integration.test_cli import checkrun

WEIGHT = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)


def save(run: crf.Run, step: int, *rows: int) -> None:
    weight = WEIGHT.copy()
    weight[list(rows)] += step
    run.save(crf.State(tables={"user": crf.Table({"weight": weight}, changed=rows)}, extra={"step": step}), step=step)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """1 base; 2, 3 increments; 4 back to 1; 5, 6 over it. 2 is tagged."""
    folder = tmp_path / "source"
    run = crf.open_run(folder, "a", policy="consecutive", chunk_bytes=1024)
    save(run, 1)
    save(run, 2, 3, 4)
    save(run, 3, 5)
    run.rollback(1)
    run.restore()
    save(run, 5, 7)
    save(run, 6, 8)
    run.tag("best", 2)
    return folder


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def sequences(run: Path) -> list[int]:
    return [checkpoint.sequence for checkpoint in crf.open_run(run).log()]


def assert_same_values(one: Path, other: Path, number: int) -> None:
    mine, theirs = crf.open_run(one)[number].load(), crf.open_run(other)[number].load()
    assert np.array_equal(mine.tables["user"]["weight"], theirs.tables["user"]["weight"])
    assert mine.extra == theirs.extra


class TestWhole:
    def test_the_copy_has_the_same_bytes(self, source: Path, tmp_path: Path) -> None:
        copied = crf.copy_run(source, tmp_path / "copy")
        assert files(tmp_path / "copy") == files(source)
        assert copied.checkpoints == (1, 2, 3, 4, 5, 6)
        assert (copied.present, copied.tags) == ((), ("best",))
        kept = [name for name in files(source) if name != "zarr.json" and not name.startswith("tags")]
        assert copied.objects == len(kept) - 6
        assert copied.bytes == sum(c.stored_bytes for c in crf.open_run(source).log())
        assert crf.open_run(tmp_path / "copy").audit().problems == []

    def test_litter_and_pruned_checkpoints(self, source: Path, tmp_path: Path) -> None:
        run = crf.open_run(source, "a")
        run.tag("best", 6)
        run.prune(run.plan_prune(crf.Keep(last=1)))
        litter = source / "00000006" / ("0" * 16) / "manifest.json"
        litter.parent.mkdir()
        litter.write_bytes(b"{}")
        (source / "00000007").mkdir()
        (source / "00000007" / "zarr.json").write_bytes(b"")
        crf.copy_run(source, tmp_path / "copy")
        expected = files(source)
        del expected[str(litter.relative_to(source))]
        assert files(tmp_path / "copy") == expected
        assert sequences(tmp_path / "copy") == sequences(source) == [1, 4, 5, 6]

    def test_again_brings_what_is_new(self, source: Path, tmp_path: Path) -> None:
        crf.copy_run(source, tmp_path / "copy")
        run = crf.open_run(source, "a", policy="consecutive")
        run.restore()
        save(run, 7, 9)
        run.tag("best", 7)
        copied = crf.copy_run(source, tmp_path / "copy")
        assert (copied.checkpoints, copied.present, copied.tags) == ((7,), (1, 2, 3, 4, 5, 6), ("best",))
        assert files(tmp_path / "copy") == files(source)
        assert crf.copy_run(source, tmp_path / "copy").checkpoints == ()

    def test_what_the_source_pruned_stays_in_the_copy(self, source: Path, tmp_path: Path) -> None:
        crf.copy_run(source, tmp_path / "copy")
        run = crf.open_run(source, "a")
        run.untag("best")
        run.prune(run.plan_prune(crf.Keep(last=1)))
        assert sequences(source) == [1, 4, 5, 6]
        assert crf.copy_run(source, tmp_path / "copy").checkpoints == ()
        assert sequences(tmp_path / "copy") == [1, 2, 3, 4, 5, 6]

    def test_what_the_copy_pruned_stays_pruned(self, source: Path, tmp_path: Path) -> None:
        crf.copy_run(source, tmp_path / "copy")
        run = crf.open_run(tmp_path / "copy", "a")
        run.untag("best")
        run.prune(run.plan_prune(crf.Keep(last=1)))
        copied = crf.copy_run(source, tmp_path / "copy")
        assert (copied.checkpoints, copied.present, copied.tags) == ((), (1, 4, 5, 6), ())

    def test_between_kinds_of_stores(self, source: Path, tmp_path: Path) -> None:
        memory = MemoryStore()
        crf.copy_run(source, memory)
        crf.copy_run(memory, tmp_path / "copy")
        assert files(tmp_path / "copy") == files(source)


class TestOneCheckpoint:
    def test_its_chain_and_markers(self, source: Path, tmp_path: Path) -> None:
        copied = crf.copy_run(source, tmp_path / "copy", checkpoint=5)
        assert copied.checkpoints == (1, 4, 5)
        assert copied.tags == ()
        assert sequences(tmp_path / "copy") == [1, 4, 5]
        assert_same_values(source, tmp_path / "copy", 5)
        with pytest.raises(crf.PrunedError):
            crf.open_run(tmp_path / "copy")[3]
        assert crf.open_run(tmp_path / "copy").audit().problems == []

    def test_training_goes_on_from_the_copy(self, source: Path, tmp_path: Path) -> None:
        crf.copy_run(source, tmp_path / "copy", checkpoint=2)
        run = crf.open_run(tmp_path / "copy", "a")
        run.restore()
        save(run, 9, 11)
        assert sequences(tmp_path / "copy") == [1, 2, 3]

    def test_a_later_one_follows(self, source: Path, tmp_path: Path) -> None:
        crf.copy_run(source, tmp_path / "copy", checkpoint=5)
        assert crf.copy_run(source, tmp_path / "copy", checkpoint=6).checkpoints == (6,)
        assert_same_values(source, tmp_path / "copy", 6)

    def test_what_was_left_out_cannot_follow(self, source: Path, tmp_path: Path) -> None:
        crf.copy_run(source, tmp_path / "copy", checkpoint=4)
        run = crf.open_run(source, "a")
        run.rollback(3)  # no layer of the latest: copied as a base
        assert crf.copy_run(source, tmp_path / "copy", checkpoint=7).checkpoints == (7,)
        other = tmp_path / "other"
        crf.copy_run(source, other, checkpoint=1)
        (other / "00000002").mkdir()
        shutil.copy(tmp_path / "copy" / "00000002" / "zarr.json", other / "00000002")
        before = files(other)
        with pytest.raises(
            crf.InvalidInputError, match=r"checkpoint 2 was pruned, or left out, at .*, and checkpoint 3"
        ):
            crf.copy_run(source, other)
        assert files(other) == before

    def test_no_such_checkpoint(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(crf.CheckpointNotFoundError):
            crf.copy_run(source, tmp_path / "copy", checkpoint=9)
        assert not (tmp_path / "copy").exists()


class TestRefused:
    def test_another_run(self, source: Path, tmp_path: Path) -> None:
        save(crf.open_run(tmp_path / "copy", "a"), 1)
        before = files(tmp_path / "copy")
        with pytest.raises(crf.InvalidInputError, match="no copy of this run"):
            crf.copy_run(source, tmp_path / "copy")
        assert files(tmp_path / "copy") == before

    def test_a_copy_that_went_on(self, source: Path, tmp_path: Path) -> None:
        crf.copy_run(source, tmp_path / "copy")
        run = crf.open_run(tmp_path / "copy", "a")
        run.restore()
        save(run, 9, 11)
        with pytest.raises(crf.InvalidInputError, match="holds a checkpoint 7 that"):
            crf.copy_run(source, tmp_path / "copy")

    def test_other_things(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "thesis.tex").write_text("x")
        with pytest.raises(crf.NotARunError, match=r"thesis\.tex"):
            crf.copy_run(source, tmp_path / "copy")
        assert [path.name for path in (tmp_path / "copy").iterdir()] == ["thesis.tex"]

    def test_no_source(self, tmp_path: Path) -> None:
        with pytest.raises(crf.RunNotFoundError):
            crf.copy_run(tmp_path / "source", tmp_path / "copy")
        assert not (tmp_path / "copy").exists()


class TestInterrupted:
    @pytest.mark.parametrize("how", ["before", "after", "truncate"])
    def test_at_any_call_it_goes_on(self, source: Path, how: How) -> None:
        expected = MemoryStore()
        crf.copy_run(source, expected)
        numbers = [checkpoint.sequence for checkpoint in crf.open_run(source).log()]
        calls = (
            frozenset({"put"}) if how == "truncate" else EVERY_CALL
        )  # what is created is whole, or not there (STO-2)
        at, failed = 0, True
        while failed:
            at += 1
            flaky = FaultStore(memory := MemoryStore())
            flaky.arm(Fault(at=at, how=how, calls=calls))
            failed = False
            try:
                crf.copy_run(source, flaky)
            except crf.StorageError:
                failed = True
                flaky.arm(None)
                there = [c.sequence for c in crf.open_run(memory).log()] if "zarr.json" in memory.objects else []
                assert there == numbers[: len(there)]
                for number in there:
                    crf.open_run(memory)[number].load()
                crf.copy_run(source, flaky)
            assert memory.objects == expected.objects
        assert at > 40

    def test_a_damaged_chunk_is_not_copied(self, source: Path, tmp_path: Path) -> None:
        chunk = next(path for path in sorted((source / "00000003").rglob("c/*")) if path.is_file())
        data = bytearray(chunk.read_bytes())
        data[0] ^= 1
        chunk.write_bytes(data)
        with pytest.raises(crf.DamagedError, match="CRC-32C") as raised:
            crf.copy_run(source, tmp_path / "copy")
        assert raised.value.place == str(chunk.relative_to(source))
        assert sequences(tmp_path / "copy") == [1, 2]
        data[0] ^= 1
        chunk.write_bytes(data)
        crf.copy_run(source, tmp_path / "copy")
        assert files(tmp_path / "copy") == files(source)

    def test_a_missing_object(self, source: Path, tmp_path: Path) -> None:
        chunk = next(path for path in sorted((source / "00000003").rglob("c/*")) if path.is_file())
        data = chunk.read_bytes()
        chunk.unlink()
        with pytest.raises(crf.DamagedError, match="missing"):
            crf.copy_run(source, tmp_path / "copy")
        assert sequences(tmp_path / "copy") == [1, 2]
        chunk.write_bytes(data)


class TestCommand:
    def test_json(self, source: Path, tmp_path: Path) -> None:
        made = checkrun("copy", source, tmp_path / "copy", "--json")
        size = sum(c.stored_bytes for c in crf.open_run(source).log())
        assert made.document == {
            "source": str(source),
            "destination": str(tmp_path / "copy"),
            "checkpoints": [1, 2, 3, 4, 5, 6],
            "present": [],
            "tags": ["best"],
            "objects": made.document["objects"],
            "bytes": size,
        }
        assert files(tmp_path / "copy") == files(source)

    def test_a_tagged_one(self, source: Path, tmp_path: Path) -> None:
        made = checkrun("copy", source, tmp_path / "copy", "--checkpoint", "best")
        size = sum(c.stored_bytes for c in crf.open_run(tmp_path / "copy").log())
        assert made.stdout.startswith(f"2 checkpoints copied to {tmp_path / 'copy'}: ")
        assert made.stdout.endswith(f" objects, {size:,} bytes.\n")
        assert sequences(tmp_path / "copy") == [1, 2]
        assert checkrun("verify", tmp_path / "copy").stdout == "2 numbers checked: no problem.\n"

    def test_refused(self, source: Path, tmp_path: Path) -> None:
        missing = checkrun("copy", tmp_path / "none", tmp_path / "copy", code=3)
        assert missing.errors == [f"{tmp_path / 'none'} does not exist"]
        unknown = checkrun("copy", source, tmp_path / "copy", "--checkpoint", "worst", code=3)
        assert unknown.errors == ["there is no tag 'worst'; the run has best"]
        assert not (tmp_path / "copy").exists()
