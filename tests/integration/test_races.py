"""Several writers of one run, writers that come too late, answers that get lost, and numbers that are no checkpoint."""

from __future__ import annotations

import datetime as dt
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import checkrun_format as crf
from checkrun_format import commit, layout
from checkrun_format.stores import AlreadyExistsError, Buffer, LocalStore, Store
from tests.forks import ended, fork

RACERS = 16
ROWS = 12

Array = npt.NDArray[np.float32]


# Helpers --------------------------------------------------------------------------------------------------------------


def tagged(tag: int, changed: Any = crf.ALL) -> crf.State:
    """A state in which every value tells who made it."""
    return crf.State(
        tables={
            "raw": crf.Table({"weight": np.full((ROWS, 3), tag, np.float32)}, changed=changed),
            "8-bit": crf.Table({"weight": np.full((ROWS, 3), tag, np.float32)}, bits=8, changed=changed),
            "keyed": crf.Table({"sum": np.full(3, tag, np.int64)}, keys=np.arange(3) + tag, changed=changed),
        },
        tensors={"bias": np.full(4, tag, np.float64)},
        blobs={"who": str(tag).encode()},
        extra=tag,
    )


def tag_of(state: crf.State) -> int:
    """Who made a state; all its values agree."""
    tag = state.extra
    assert isinstance(tag, int)
    expected = tagged(tag)
    for name, table in expected.tables.items():
        for field, array in table.fields.items():
            assert np.array_equal(state.tables[name][field], array)
    assert np.asarray(state.tables["keyed"].keys).tolist() == [tag, tag + 1, tag + 2]
    assert np.array_equal(state.tensors["bias"], np.full(4, tag))
    assert state.blobs == {"who": str(tag).encode()}
    return tag


def rows_of(weight: Array, changed: Any = None) -> crf.State:
    return crf.State(tables={"t": crf.Table({"weight": weight}, changed=changed)})


def weight_of(state: crf.State) -> list[float]:
    """The first column of the one table of `rows_of`."""
    return [float(value) for value in state.tables["t"]["weight"][:, 0]]


def open_writer(where: Path | Store, **options: Any) -> crf.Run:
    return crf.open_run(where, "a", durable=False, policy="consecutive", **options)


def objects_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def numbers(run: crf.Run) -> list[int]:
    return [checkpoint.sequence for checkpoint in run.log()]


class InterceptedStore(LocalStore):
    """A local store whose calls can be replaced, one kind at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, durable=False)
        self.on_create: Callable[[str, bytes], None] | None = None
        self.on_get: Callable[[str], bytes | None] | None = None

    def create(self, key: str, data: bytes) -> None:
        (self.on_create or super().create)(key, data)

    def get(self, key: str) -> bytes | None:
        return (self.on_get or super().get)(key)

    def really_create(self, key: str, data: bytes) -> None:
        super().create(key, data)

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        return super().put(key, buffers)


def broken(*_: object) -> Any:
    raise crf.StorageError(errno.EIO, "no answer")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


# Many processes -------------------------------------------------------------------------------------------------------


def race(work: Callable[[int, Callable[[], None]], int]) -> list[int]:
    """Run 16 processes; each gets ready, waits for the others, and goes on when all are. Their exit codes."""
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()

    def in_child(rank: int) -> int:
        os.close(go_write)

        def wait() -> None:
            os.write(ready_write, b".")
            os.read(go_read, 1)

        return work(rank, wait)

    children = [fork(partial(in_child, rank)) for rank in range(RACERS)]
    os.close(ready_write)
    arrived = b""
    while len(arrived) < RACERS and (some := os.read(ready_read, RACERS)):
        arrived += some
    os.close(go_write)
    codes = [ended(child) for child in children]
    os.close(ready_read)
    os.close(go_read)
    return codes


def commit_as(folder: Path, round_: int, rank: int, wait: Callable[[], None]) -> int:
    run = open_writer(folder)
    if run.latest(None) is not None:
        run.restore()
    wait()
    try:
        run.save(tagged(100 * round_ + rank), step=rank)
    except crf.ConcurrentCommitError as error:
        assert f"number {round_ + 1} is taken" in str(error)  # noqa: PT017 - pytest.raises wants it always
        return 10
    return 0


@pytest.mark.timeout(120)
def test_exactly_one_of_16_processes_commits_a_number(folder: Path) -> None:
    """HEA-1, STO-2: one winner, 15 concurrent commits, the winner's state unmixed, no litter; six times over."""
    open_writer(folder)
    for round_ in range(6):
        codes = race(partial(commit_as, folder, round_))
        assert sorted(codes) == [0] + [10] * (RACERS - 1)
        latest = crf.open_run(folder).latest()
        assert latest.sequence == round_ + 1
        assert tag_of(latest.load()) == 100 * round_ + codes.index(0)
    run = crf.open_run(folder)
    assert numbers(run) == [1, 2, 3, 4, 5, 6]
    assert [checkpoint.commit.restores for checkpoint in run.log()] == [0, 1, 2, 3, 4, 5]
    assert run.verify() == []


def open_as(folder: Path, _rank: int, wait: Callable[[], None]) -> int:
    wait()
    return len(numbers(open_writer(folder)))


@pytest.mark.timeout(120)
def test_16_processes_create_a_run_together(tmp_path: Path) -> None:
    """RUN-1: created if absent; all of them then have it open."""
    for round_ in range(5):
        folder = tmp_path / str(round_) / "run"
        assert race(partial(open_as, folder)) == [0] * RACERS
        assert list(objects_in(folder)) == ["zarr.json"]


def test_a_run_that_appears_while_it_is_created_is_opened(folder: Path) -> None:
    """RUN-1: another process creates it, and saves, between our look for its document and the one for strangers."""
    store = InterceptedStore(folder)

    def late(key: str) -> bytes | None:
        store.on_get = None
        found = store.get(key)
        open_writer(folder).save(tagged(7))
        return found

    store.on_get = late
    run = open_writer(store)
    assert numbers(run) == [1]
    assert run.save(tagged(8)).sequence == 2


@pytest.mark.timeout(120)
def test_a_reader_that_polls_sees_whole_checkpoints_only(folder: Path) -> None:
    """STO-1, COM-1: never an error and never a mix, while another process saves 30 times (faults 16, 113)."""
    run = open_writer(folder)
    run.save(tagged(0))
    codes = race_reader(folder)
    for tag in range(1, 31):
        run.save(tagged(tag, changed=crf.ALL if tag % 7 == 0 else np.arange(3)), step=tag)
    assert ended(codes) >= 3, "the reader saw too few checkpoints for the test to mean anything"
    assert numbers(crf.open_run(folder)) == list(range(1, 32))


def race_reader(folder: Path) -> int:
    """A child that reads until the writer is done; its exit code is how many different checkpoints it saw."""

    def read() -> int:
        kept = crf.open_run(folder)
        seen: set[int] = set()
        newest = 0
        while newest < 31:
            for run in (kept, crf.open_run(folder)):
                latest = run.latest()
                assert latest.sequence >= newest
                newest = latest.sequence
                state = latest.load()
                assert state.extra == newest - 1
                assert float(state.tables["raw"]["weight"][0, 0]) == newest - 1
                assert state.blobs == {"who": str(newest - 1).encode()}
                seen.add(newest)
        return min(len(seen), 90)

    return fork(read)


# A successor, and the writer that it replaces -------------------------------------------------------------------------


SUCCESSORS: dict[str, Callable[[Path], Any]] = {
    "takeover": lambda folder: open_writer(folder, takeover=True),
    "save": lambda folder: open_writer(folder).save(tagged(50)),
    "rollback": lambda folder: open_writer(folder).rollback(1),
    "compact": lambda folder: open_writer(folder).compact(),
}

ATTEMPTS: dict[str, Callable[[crf.Run], Any]] = {
    "save": lambda run: run.save(tagged(3)),
    "rollback": lambda run: run.rollback(1),
    "compact": lambda run: run.compact(),
    "takeover": lambda run: run.take_over(),
    "staged": lambda run: staged(run, 3),
}


def staged(run: crf.Run, value: float) -> crf.Checkpoint:
    """A save by one staged writer, of `rows_of`'s table only."""
    save = run.begin(writers=1, parent=None)
    writer = save.writer(0)
    writer.put("t", {"weight": np.full((ROWS, 2), value, np.float32)}, rows=(0, ROWS), of=ROWS)
    tables = [] if run.latest(None) is None else run.latest().tables
    return save.commit([writer.finish()], dropped=[name for name in tables if name != "t"])


@pytest.mark.parametrize("successor", SUCCESSORS)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_zombie_is_refused(folder: Path, successor: str, attempt: str) -> None:
    """HEA-3: a writer whose expected number was taken by another commits nothing, and may not save again."""
    zombie = open_writer(folder)
    zombie.save(tagged(1))
    zombie.save(tagged(2))
    SUCCESSORS[successor](folder)
    held = objects_in(folder)
    with pytest.raises(crf.ConcurrentCommitError, match=r"number 3 is taken by attempt [0-9a-f]{32}, committed at 20"):
        ATTEMPTS[attempt](zombie)
    left = {path: data for path, data in objects_in(folder).items() if path not in held}
    assert objects_in(folder) == held | left
    assert not left or attempt == "staged"
    for again in ATTEMPTS.values():
        with pytest.raises(crf.ConcurrentCommitError, match=r"may not save any more.*open the run anew"):
            again(zombie)
    assert objects_in(folder) == held | left
    assert {problem.place for problem in crf.open_run(folder).verify()} == left.keys()
    assert zombie.latest().sequence == 3


def test_a_zombie_stays_one_until_it_opens_the_run_anew(folder: Path) -> None:
    """HEA-3: a restore by the refused Run is no way around; a fresh one goes on, and no row is lost."""
    zombie = open_writer(folder)
    weight = np.zeros((ROWS, 2), np.float32)
    zombie.save(rows_of(weight))
    weight[3] = 1
    zombie.save(rows_of(weight, [3]))
    open_writer(folder, takeover=True)
    weight[4] = 2
    for _ in range(2):
        with pytest.raises(crf.ConcurrentCommitError):
            zombie.save(rows_of(weight, [4]))
    assert weight_of(zombie.restore()) == [0, 0, 0, 1] + [0] * 8
    with pytest.raises(crf.ConcurrentCommitError):
        zombie.save(rows_of(weight, [4]))
    fresh = open_writer(folder)
    fresh.restore()
    checkpoint = fresh.save(rows_of(weight, [4]))
    assert (checkpoint.sequence, checkpoint.parent) == (4, 3)
    assert checkpoint.table("t").stored_rows == 1
    assert weight_of(crf.open_run(folder).load()) == [0, 0, 0, 1, 2] + [0] * 7


def test_a_writer_that_restored_after_its_successor_committed_is_refused(folder: Path) -> None:
    """HEA-1: the expected head is read when the run is opened, and advanced by a writer's own commits only."""
    late = open_writer(folder)
    late.save(tagged(1))
    open_writer(folder).save(tagged(2))
    assert tag_of(late.restore()) == 2
    with pytest.raises(crf.ConcurrentCommitError, match="number 2 is taken"):
        late.save(tagged(3))
    assert numbers(crf.open_run(folder)) == [1, 2]


def test_taking_over_commits_an_unchanged_checkpoint(folder: Path) -> None:
    """HEA-4, and what it must not change: state, step, restores, and what changed since."""
    first = open_writer(folder)
    first.save(tagged(1), step=10)
    first.save(tagged(2, changed=[0, 1]), step=20)
    stored = first.latest().stored_bytes
    run = open_writer(folder, takeover=True)
    latest = run.latest()
    assert (latest.sequence, latest.parent, latest.commit.predecessor, latest.step) == (3, 2, 2, 20)
    assert (latest.commit.policy.name, latest.commit.restores, latest.commit.rollback_to) == ("takeover", 0, None)
    assert {latest.table(name).storage for name in latest.tables} == {"unchanged"}
    assert latest.stored_bytes < stored
    assert list(latest.changes_since(2)) == []
    assert np.array_equal(latest.load().tables["raw"]["weight"], run[2].load().tables["raw"]["weight"])
    run.restore()
    checkpoint = run.save(tagged(4, changed=[5]), step=30)
    assert (checkpoint.sequence, checkpoint.parent, checkpoint.commit.restores) == (4, 3, 1)
    assert open_writer(folder.with_name("empty"), takeover=True).latest(None) is None


def test_taking_over_in_the_middle_of_a_save_fences_it_off(folder: Path) -> None:
    """HEA-4: all is staged, the commit alone is missing, when the successor takes the number."""
    store = InterceptedStore(folder)
    old = open_writer(store)
    old.save(tagged(1))

    def too_late(key: str, data: bytes) -> None:
        open_writer(folder, takeover=True)
        store.really_create(key, data)

    store.on_create = too_late
    with pytest.raises(crf.ConcurrentCommitError, match="number 2 is taken"):
        old.save(tagged(2))
    run = crf.open_run(folder)
    assert numbers(run) == [1, 2]
    assert tag_of(run.load()) == 1
    assert run.verify() == []


# Lost answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [crf.StorageError(errno.ETIMEDOUT, "lost"), AlreadyExistsError("412")], ids=repr)
@pytest.mark.parametrize("attempt", [*ATTEMPTS, "first save"])
def test_a_lost_acknowledgement_is_a_success(folder: Path, error: Exception, attempt: str) -> None:
    """HEA-3: occupied by this very attempt (fault 114)."""
    store = InterceptedStore(folder)
    run = open_writer(store)
    if attempt != "first save":
        run.save(tagged(1))

    def lost(key: str, data: bytes) -> None:
        store.really_create(key, data)
        store.on_create = None
        raise error

    store.on_create = lost
    checkpoint = ATTEMPTS.get(attempt, ATTEMPTS["save"])(run)
    assert checkpoint.sequence == (1 if attempt == "first save" else 2)
    assert crf.open_run(folder).verify() == []
    after = run.save(
        rows_of(np.ones((ROWS, 2), np.float32), crf.ALL), dropped=[name for name in checkpoint.tables if name != "t"]
    )
    assert (after.sequence, after.commit.predecessor) == (checkpoint.sequence + 1, checkpoint.sequence)
    assert crf.open_run(folder).verify() == []


def test_an_acknowledgement_lost_to_somebody_else_is_a_concurrent_commit(folder: Path) -> None:
    """HEA-3: the store failed, and meanwhile another writer took the number."""
    store = InterceptedStore(folder)
    run = open_writer(store)
    run.save(tagged(1))

    def lost(_key: str, _data: bytes) -> None:
        store.on_create = None
        open_writer(folder).save(tagged(9))
        broken()

    store.on_create = lost
    with pytest.raises(crf.ConcurrentCommitError, match="number 2 is taken by attempt"):
        run.save(tagged(2))
    assert tag_of(crf.open_run(folder).load()) == 9
    assert crf.open_run(folder).verify() == []


@pytest.mark.parametrize("lands", ["at once", "later"])
def test_an_attempt_that_landed_after_all_is_ours(folder: Path, lands: str) -> None:
    """HEA-3: by an earlier attempt of this writer: the head advances, its rows stay pending, the next is used."""
    store = InterceptedStore(folder)
    run = open_writer(store)
    weight = np.zeros((ROWS, 2), np.float32)
    run.save(rows_of(weight), step=0)
    weight[1] = 1
    run.save(rows_of(weight, [1]), step=1)
    held: list[tuple[str, bytes]] = []

    def vanishes(key: str, data: bytes) -> None:
        held.append((key, data))
        if lands == "at once":
            store.really_create(key, data)
        store.on_get = broken
        broken()

    store.on_create = vanishes
    weight[2] = 2
    with pytest.raises(crf.StorageError, match="no answer"):
        run.save(rows_of(weight, [2]), step=2)
    store.on_create = store.on_get = None
    if lands == "later":
        store.really_create(*held[0])
    weight[3] = 3
    checkpoint = run.save(rows_of(weight, [3]), step=3)
    assert (checkpoint.sequence, checkpoint.parent, checkpoint.commit.predecessor) == (4, 3, 3)
    assert checkpoint.table("t").stored_rows == 2
    reader = crf.open_run(folder)
    assert [(c.sequence, c.step) for c in reader.log()] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert weight_of(reader[3].load()) == [0, 1, 2] + [0] * 9
    assert weight_of(reader[4].load()) == [0, 1, 2, 3] + [0] * 8
    (batch,) = reader[4].changes_since(2)
    assert batch.rows.tolist() == [2, 3]
    assert reader.verify() == []
    weight[4] = 4
    assert run.save(rows_of(weight, [4])).table("t").stored_rows == 1


@pytest.mark.parametrize("landed", ["rollback", "compact", "takeover", "staged", "first save"])
def test_whatever_landed_after_all_is_ours(folder: Path, landed: str) -> None:
    """HEA-3, for every kind of commit: what is saved next stands at the next number and holds the whole state."""
    store = InterceptedStore(folder)
    run = open_writer(store)
    if landed != "first save":
        for tag in (1, 2):
            run.save(rows_of(np.full((ROWS, 2), tag, np.float32), crf.ALL))
    head = 0 if landed == "first save" else 2

    def vanishes(key: str, data: bytes) -> None:
        store.really_create(key, data)
        store.on_get = broken
        broken()

    store.on_create = vanishes
    first = partial(run.save, rows_of(np.full((ROWS, 2), 8, np.float32)))
    with pytest.raises(crf.StorageError, match="no answer"):
        first() if landed == "first save" else ATTEMPTS[landed](run)
    store.on_create = store.on_get = None
    weight = np.full((ROWS, 2), 2, np.float32)
    weight[5] = 5
    checkpoint = run.save(rows_of(weight, [5]))
    assert (checkpoint.sequence, checkpoint.commit.predecessor) == (head + 2, head + 1)
    assert weight_of(crf.open_run(folder).load()) == [2, 2, 2, 2, 2, 5] + [2] * 6
    assert crf.open_run(folder).verify() == []
    assert numbers(run) == list(range(1, head + 3))


def test_a_staged_save_whose_number_an_earlier_attempt_took(folder: Path) -> None:
    """HEA-3: its parts cannot be staged again here, but the writer is not fenced off: it begins anew."""
    store = InterceptedStore(folder)
    run = open_writer(store)
    run.save(rows_of(np.zeros((ROWS, 2), np.float32)))

    def vanishes(key: str, data: bytes) -> None:
        store.really_create(key, data)
        store.on_get = broken
        broken()

    store.on_create = vanishes
    with pytest.raises(crf.StorageError, match="no answer"):
        run.save(rows_of(np.ones((ROWS, 2), np.float32), crf.ALL))
    store.on_create = store.on_get = None
    with pytest.raises(crf.ConcurrentCommitError, match=r"number 2.*begin"):
        staged(run, 3)
    assert staged(run, 7).sequence == 3
    assert weight_of(crf.open_run(folder).load()) == [7] * ROWS


def test_a_staged_save_that_was_overtaken_by_a_save_of_the_same_run(folder: Path) -> None:
    """HEA-1: it claims a number that this writer used itself; that is no other process, and saving goes on."""
    run = open_writer(folder)
    run.save(rows_of(np.zeros((ROWS, 2), np.float32)))
    save = run.begin(writers=1, parent=None)
    writer = save.writer(0)
    writer.put("t", {"weight": np.full((ROWS, 2), 5, np.float32)}, rows=(0, ROWS), of=ROWS)
    run.save(rows_of(np.ones((ROWS, 2), np.float32), crf.ALL))
    with pytest.raises(crf.CheckrunError, match="begin"):
        save.commit([writer.finish()])
    assert weight_of(crf.open_run(folder).load()) == [1] * ROWS
    assert run.save(rows_of(np.full((ROWS, 2), 2, np.float32), crf.ALL)).sequence == 3


def test_a_restore_is_counted_once_however_often_its_save_is_tried(folder: Path) -> None:
    """`restores`: the predecessor's value, plus 1 if the writer started from a restore that no commit counts yet."""
    open_writer(folder).save(tagged(1))
    store = InterceptedStore(folder)
    run = open_writer(store)
    run.restore()

    def vanishes(key: str, data: bytes) -> None:
        store.really_create(key, data)
        store.on_get = broken
        broken()

    store.on_create = vanishes
    with pytest.raises(crf.StorageError):
        run.save(tagged(2))
    store.on_create = store.on_get = None
    assert [run.save(tagged(tag)).commit.restores for tag in (3, 4)] == [1, 1]
    assert [checkpoint.commit.restores for checkpoint in crf.open_run(folder).log()] == [0, 1, 1, 1]


# Burnt numbers --------------------------------------------------------------------------------------------------------


def empty_file(folder: Path, number: int) -> None:
    (folder / layout.folder(number)).mkdir(exist_ok=True)
    (folder / layout.commit_key(number)).touch()


def implicit_group(folder: Path, number: int) -> None:
    """What zarr-python leaves above an array that is created by its path (TRE-4)."""
    import zarr

    before = (folder / "zarr.json").read_bytes()
    zarr.create_array(str(folder), name=f"{layout.folder(number)}/x/values", shape=(3,), dtype="f4")
    assert (folder / "zarr.json").read_bytes() == before
    assert json.loads((folder / layout.commit_key(number)).read_bytes())["node_type"] == "group"


BURNT = {"empty file": empty_file, "implicit group": implicit_group}


@pytest.mark.parametrize("burn", BURNT)
def test_burnt_numbers_are_passed_over_when_a_run_is_opened(folder: Path, burn: str) -> None:
    """COM-2, HEA-4, COM-5: never reused, never taken for a checkpoint, and a reader warns of them above the latest."""
    first = open_writer(folder)
    first.save(tagged(1))
    first.save(tagged(2))
    BURNT[burn](folder, 3)
    BURNT[burn](folder, 5)
    with pytest.warns(crf.BurntNumberWarning, match=r"00000003/zarr\.json, 00000005/zarr\.json.*checkpoint is 2"):
        assert tag_of(crf.open_run(folder).load()) == 2
    for number in (3, 5):
        with pytest.raises(crf.BurntError, match=f"0000000{number}/zarr.json"):
            crf.open_run(folder)[number]
    with pytest.raises(crf.CheckpointNotFoundError):
        crf.open_run(folder)[4]
    with pytest.warns(crf.BurntNumberWarning):
        run = open_writer(folder)
    with pytest.warns(crf.BurntNumberWarning):
        run.restore()
    checkpoint = run.save(tagged(4, changed=[1]))
    assert (checkpoint.sequence, checkpoint.parent, checkpoint.commit.predecessor) == (6, 2, 2)
    assert numbers(crf.open_run(folder)) == [1, 2, 6]
    assert crf.open_run(folder).latest().sequence == 6
    kinds = {problem.place: problem.kind for problem in crf.open_run(folder).verify() if problem.kind != "litter"}
    assert kinds == {"00000003/zarr.json": "burnt", "00000005/zarr.json": "burnt"}


@pytest.mark.parametrize("burn", BURNT)
def test_a_number_that_is_burnt_in_mid_run_refuses_the_save(folder: Path, burn: str) -> None:
    """HEA-4: burnt numbers are passed over only when a run is opened."""
    run = open_writer(folder)
    run.save(tagged(1))
    BURNT[burn](folder, 2)
    before = objects_in(folder)
    with pytest.raises(crf.ConcurrentCommitError, match="number 2 is taken by an object that is no commit"):
        run.save(tagged(2))
    with pytest.raises(crf.ConcurrentCommitError, match="may not save any more"):
        run.save(tagged(2))
    assert objects_in(folder) == before
    with pytest.warns(crf.BurntNumberWarning):
        assert open_writer(folder).save(tagged(3)).sequence == 3


def test_a_run_of_burnt_numbers_only_has_no_checkpoint(folder: Path) -> None:
    """COM-5: the one checkpoint that there was may have been emptied: starting anew must not go by in silence."""
    open_writer(folder)
    empty_file(folder, 7)
    with pytest.warns(crf.BurntNumberWarning, match=r"00000007/zarr\.json.*no checkpoint was committed"):
        assert crf.open_run(folder).latest(None) is None
    with pytest.warns(crf.BurntNumberWarning), pytest.raises(crf.CheckpointNotFoundError):
        crf.open_run(folder).latest()
    with pytest.warns(crf.BurntNumberWarning):
        run = open_writer(folder)
    assert run.save(tagged(1)).sequence == 8


# Pruned markers -------------------------------------------------------------------------------------------------------


def prune(folder: Path, number: int) -> None:
    """As FORMAT.md 5.3 and PRU-1 say: the marker first, then the data."""
    key = folder / layout.commit_key(number)
    attempt = json.loads(key.read_bytes())["attributes"]["checkrun"]["attempt"]
    marker = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {
            "zarr_conventions": [{"uuid": "d5df0d53-d446-49ad-a4cd-95a3e6d6a63f", "name": "checkrun"}],
            "checkrun": {"kind": "pruned", "format_version": "0.9", "sequence": number},
        },
    }
    LocalStore(folder).replace(layout.commit_key(number), json.dumps(marker).encode())
    shutil.rmtree(key.parent / attempt)


@pytest.fixture
def history(folder: Path) -> Path:
    """Checkpoints 1 to 5, of which 1 is a base, 2 and 3 lie over it in a row, 4 is a base and 5 lies over it."""
    run = open_writer(folder)
    weight = np.zeros((ROWS, 2), np.float32)
    for number, parent in enumerate((None, "latest", "latest", None, "latest"), 1):
        weight[number] = number
        run.save(rows_of(weight, [number]), step=10 * number, parent=parent)
    assert [checkpoint.parent for checkpoint in run.log()] == [None, 1, 2, None, 4]
    return folder


def test_a_pruned_checkpoint_says_so(history: Path) -> None:
    """PRU-1: the marker stays, so that a reader that loses its data says pruned, not damaged."""
    for number in (1, 2, 3):
        prune(history, number)
    run = crf.open_run(history)
    for number in (1, 2, 3):
        with pytest.raises(crf.PrunedError, match=f"checkpoint {number} was pruned") as caught:
            run[number]
        assert caught.value.kind == "pruned"
    assert numbers(run) == [4, 5]
    assert weight_of(run.latest().load()) == [0, 1, 2, 3, 4, 5] + [0] * 6
    with pytest.raises(crf.CheckpointNotFoundError):
        run.at(step=20)
    assert run.verify() == []


def test_a_pruned_number_is_never_used_again(history: Path) -> None:
    """PRU-1, HEA-1: also where it is the highest one (which a pruning tool keeps)."""
    prune(history, 5)
    assert crf.open_run(history).latest().sequence == 4
    run = open_writer(history)
    run.restore()
    checkpoint = run.save(rows_of(np.ones((ROWS, 2), np.float32), crf.ALL))
    assert (checkpoint.sequence, checkpoint.commit.predecessor) == (6, 4)


def test_a_number_that_is_pruned_in_mid_run_refuses_the_save(folder: Path) -> None:
    """HEA-3: a successor committed and pruned before we came to save."""
    zombie = open_writer(folder)
    zombie.save(tagged(1))
    other = open_writer(folder)
    other.save(tagged(2))
    other.save(tagged(3))
    prune(folder, 2)
    with pytest.raises(crf.ConcurrentCommitError, match="number 2 is taken by a pruned marker"):
        zombie.save(tagged(4))


def test_what_changed_across_a_pruned_checkpoint_is_not_told(history: Path) -> None:
    """CHG-3: never a partial answer; that the checkpoint since which is asked is pruned does not matter."""
    prune(history, 3)
    run = crf.open_run(history)
    for since in (1, 2):
        with pytest.raises(crf.HistoryPrunedError, match=r"checkpoint 3.*load the checkpoint as a whole"):
            list(run[5].changes_since(since))
    assert [batch.rows.tolist() for batch in run[5].changes_since(3)] == [[4, 5]]
    assert [batch.rows.tolist() for batch in run[5].changes_since(4)] == [[5]]


def test_what_changed_across_a_missing_checkpoint_is_not_told(history: Path) -> None:
    """CHG-3: the same where it is missing."""
    (history / "00000003/zarr.json").unlink()
    with pytest.raises(crf.HistoryPrunedError, match=r"no checkpoint 3.*load the checkpoint as a whole"):
        list(crf.open_run(history)[5].changes_since(1))


def test_what_changed_across_a_damaged_checkpoint_is_damage(history: Path) -> None:
    """CHG-3 is for what was removed; an altered commit is damage, and named (section 10)."""
    commit = history / "00000003/zarr.json"
    commit.write_bytes(commit.read_bytes().replace(b'"step":30', b'"step":31'))
    with pytest.raises(crf.DamagedError) as caught:
        list(crf.open_run(history)[5].changes_since(1))
    assert caught.value.place == "00000003/zarr.json"
    commit.write_bytes(commit.read_bytes()[:50])
    with pytest.raises(crf.DamagedError) as caught:
        list(crf.open_run(history)[5].changes_since(1))
    assert caught.value.place == "00000003/zarr.json"


@pytest.mark.parametrize("pruned", [2, 3, 4, 5])
def test_what_changed_across_a_rollback_over_pruned_checkpoints_is_not_told(history: Path, pruned: int) -> None:
    """CHG-1 needs what the rollback undid, CHG-3 says what happens when it is gone."""
    run = open_writer(history)
    run.rollback(1)
    prune(history, pruned)
    for since in (1, 5):
        with pytest.raises(crf.HistoryPrunedError, match="load the checkpoint as a whole"):
            list(crf.open_run(history)[6].changes_since(since))


def test_a_chain_whose_parent_is_pruned_says_so(history: Path) -> None:
    """9.3: a parent that is missing, pruned or damaged is an error. A pruning tool keeps whole chains (PRU-2)."""
    prune(history, 2)
    run = crf.open_run(history)
    with pytest.raises(crf.PrunedError, match="checkpoint 2 was pruned, but checkpoint 3 needs it"):
        run[3].load()
    assert weight_of(run[1].load()) == [0, 1] + [0] * 10
    assert weight_of(run[5].load()) == [0, 1, 2, 3, 4, 5] + [0] * 6
    problems = [problem for problem in run.verify() if problem.kind == "pruned"]
    assert problems
    assert {problem.place.partition("/")[0] for problem in problems} == {"00000003"}
    with pytest.raises(crf.PrunedError):
        open_writer(history).rollback(2)


def test_a_reader_that_loses_its_data_says_pruned(history: Path) -> None:
    """PRU-1: also when it has the checkpoint open since before."""
    run = crf.open_run(history)
    opened, loaded = run[3], run[2]
    assert weight_of(loaded.load()) == [0, 1, 2] + [0] * 9
    for number in (1, 2, 3):
        prune(history, number)
    for checkpoint in (opened, loaded):
        with pytest.raises(crf.PrunedError, match="was pruned"):
            checkpoint.load()
    assert weight_of(run.latest().load()) == [0, 1, 2, 3, 4, 5] + [0] * 6


def test_a_writer_goes_on_over_pruned_checkpoints(history: Path) -> None:
    """PRU-2 keeps the latest checkpoint and its chain; what lies below may go while a writer has the run open."""
    run = open_writer(history)
    state = run.restore()
    for number in (1, 2, 3):
        prune(history, number)
    weight = state.tables["t"]["weight"]
    weight[9] = 9
    checkpoint = run.save(rows_of(weight, [9]))
    assert (checkpoint.sequence, checkpoint.parent) == (6, 5)
    assert weight_of(crf.open_run(history).load()) == [0, 1, 2, 3, 4, 5, 0, 0, 0, 9, 0, 0]
    assert crf.open_run(history).verify() == []


# Damaged commits ------------------------------------------------------------------------------------------------------


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[: len(data) // 2],
    "a bit": lambda data: data.replace(b'"checkrun":{', b'"cheskrun":{'),
    "another number": lambda data: data.replace(b'"sequence":3', b'"sequence":2'),
    "not JSON": lambda _: b"\xff\xfe",
    "a list": lambda _: b"[]",
    "another's group": lambda _: b'{"zarr_format":3,"node_type":"group","attributes":{"multiscales":[]}}',
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_commit_above_the_latest_is_not_passed_over_in_silence(folder: Path, how: str) -> None:
    """COM-5: the reader fails, names the object and the ways out; told to, it goes on."""
    first = open_writer(folder)
    for tag in (1, 2, 3):
        first.save(tagged(tag), step=tag)
    commit = folder / "00000003/zarr.json"
    commit.write_bytes(DAMAGE[how](commit.read_bytes()))
    run = crf.open_run(folder)
    for read in (run.latest, run.load, lambda: run.latest(None), lambda: run.at(step=2)):
        with pytest.raises(crf.DamagedError) as caught:
            read()
        assert caught.value.place == "00000003/zarr.json"
    with pytest.raises(crf.DamagedError, match=r"checkpoint 3.*by its number.*skip_damaged=True"):
        run.latest()
    assert tag_of(run.latest(skip_damaged=True).load()) == 2
    assert tag_of(run.at(step=2, skip_damaged=True).load()) == 2
    assert tag_of(run[2].load()) == 2
    assert [(problem.place, problem.kind) for problem in run.verify(3)] == [("00000003/zarr.json", "damaged")]
    writer = open_writer(folder)
    with pytest.raises(crf.DamagedError):
        writer.restore()
    assert tag_of(writer.restore(skip_damaged=True)) == 2
    checkpoint = writer.save(tagged(4, changed=[1]))
    assert (checkpoint.sequence, checkpoint.parent, checkpoint.commit.predecessor) == (4, 2, 2)
    assert crf.open_run(folder).latest().sequence == 4


@pytest.mark.parametrize("how", DAMAGE)
def test_a_log_names_a_damaged_commit_and_goes_on_if_it_is_told_to(folder: Path, how: str) -> None:
    """COM-5: as `checkrun ls` does, which lists it as damaged."""
    writer = open_writer(folder)
    for tag in (1, 2, 3, 4):
        writer.save(tagged(tag), step=tag, parent=None)
    commit = folder / "00000003/zarr.json"
    commit.write_bytes(DAMAGE[how](commit.read_bytes()))
    run, found = crf.open_run(folder), list[int]()
    with pytest.raises(crf.DamagedError, match=r"checkpoint 3.*by its number.*skip_damaged=True") as caught:
        found.extend(checkpoint.sequence for checkpoint in run.log())
    assert (found, caught.value.place) == ([1, 2], "00000003/zarr.json")
    assert [checkpoint.sequence for checkpoint in run.log(skip_damaged=True)] == [1, 2, 4]
    assert [tag_of(checkpoint.load()) for checkpoint in run.log(skip_damaged=True)] == [1, 2, 4]
    assert run.latest().sequence == 4
    with pytest.raises(crf.DamagedError, match="skip_damaged=True"):
        run.at(step=1)
    assert run.at(step=1, skip_damaged=True).sequence == 1


def test_a_number_that_is_damaged_in_mid_run_refuses_the_save(folder: Path) -> None:
    """HEA-4: damaged numbers are passed over only when a run is opened."""
    run = open_writer(folder)
    run.save(tagged(1))
    (folder / "00000002").mkdir()
    (folder / "00000002/zarr.json").write_bytes(b'{"zarr_format":3,')
    with pytest.raises(crf.ConcurrentCommitError, match="number 2 is taken by a damaged object"):
        run.save(tagged(2))
    assert open_writer(folder).save(tagged(3)).sequence == 3


@pytest.mark.parametrize("damage", ["cut", "emptied", "exchanged"])
def test_nothing_is_laid_over_a_commit_that_is_damaged_by_now(folder: Path, damage: str) -> None:
    """Whoever writes knows what it committed, but readers would not; a base needs none of it, and no row is lost."""
    weight = np.zeros((ROWS, 3), np.float32)
    run = open_writer(folder)
    run.save(rows_of(weight))
    key = folder / "00000001/zarr.json"
    data = key.read_bytes()
    altered = {"cut": data[:-1], "emptied": b"", "exchanged": data.replace(b'"step":null', b'"step":1234')}[damage]
    assert altered != data
    key.write_bytes(altered)
    weight[3] = 1
    with pytest.raises(crf.DamagedError, match=r"00000001/zarr\.json: .* save a base \(parent=None\)"):
        run.save(rows_of(weight, [3]))
    assert not (folder / "00000002").exists()
    weight[5] = 2
    saved = run.save(rows_of(weight, [5]), parent=None)
    assert (saved.sequence, saved.parent) == (2, None)
    assert weight_of(crf.open_run(folder)[2].load()) == [0, 0, 0, 1, 0, 2, *[0] * (ROWS - 6)]


def test_a_commit_of_another_version_is_not_passed_over(folder: Path) -> None:
    """COM-2: it is committed; reading it is `unsupported_version`, and skipping damage does not skip it."""
    run = open_writer(folder)
    run.save(tagged(1))
    run.save(tagged(2))
    commit = folder / "00000002/zarr.json"
    commit.write_bytes(commit.read_bytes().replace(b'"format_version":"0.9"', b'"format_version":"1.0"'))
    for skip in (False, True):
        with pytest.raises(crf.UnsupportedVersionError, match=r"00000002/zarr\.json.*1\.0"):
            crf.open_run(folder).latest(skip_damaged=skip)
    assert tag_of(crf.open_run(folder)[1].load()) == 1


def test_the_clock_decides_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """STO-3, `created`: no rule depends on it (fault 48)."""
    run = open_writer(folder)
    for tag, offset in ((1, 0), (2, -(10**8)), (3, 10**6)):
        with monkeypatch.context() as patch:
            now = dt.datetime.fromtimestamp(1.7e9 + offset, dt.UTC)
            clock = SimpleNamespace(UTC=dt.UTC, datetime=SimpleNamespace(now=lambda _, now=now: now))
            patch.setattr(commit, "dt", clock)
            assert run.save(tagged(tag)).commit.created.startswith(now.isoformat()[:19])
        os.utime(folder / layout.commit_key(tag), (1e9 - tag, 1e9 - tag))
    assert tag_of(crf.open_run(folder).load()) == 3
