"""All features of a run on an S3 server: what holds on disk holds there."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.stores import LocalStore, S3Store
from checkrun_format.testing import Fault, FaultStore, servers
from checkrun_format.testing.machine import ChainMachine, machine_settings
from tests.conftest import Place
from tests.forks import ended, fork
from tests.integration.test_cli import Trainer, checkrun
from tests.integration.test_kill import assert_same, state

ROOT = Path(__file__).parents[2]


def by_value(checkpoint: crf.Checkpoint) -> dict[str, Any]:
    loaded = checkpoint.load()
    return {name: {f: v.tobytes() for f, v in table.fields.items()} for name, table in loaded.tables.items()}


# One writer -----------------------------------------------------------------------------------------------------------


def test_a_run_lives_on_s3(s3: Place) -> None:
    run = s3.open(policy="consecutive")
    for step in range(4):
        run.save(state(step), step=step)
    again = s3.open("r")
    for number in range(1, 5):
        assert_same(again[number].load(), state(number - 1))
    assert [(c.sequence, c.step, c.parent) for c in again.log()] == [(1, 0, None), (2, 1, 1), (3, 2, 2), (4, 3, 3)]
    assert again.at(step=2).sequence == 3
    user = again.latest().table("rows")
    rows = [39, 0, 7, 7]
    assert user.take(rows)["weight"].tobytes() == state(3).tables["rows"]["weight"][rows].tobytes()
    assert user.read(rows=slice(3, 9))["sum"].tobytes() == state(3).tables["rows"]["sum"][3:9].tobytes()
    changed = {change.table: change.rows.tolist() for change in again.latest().changes_since(3)}
    assert changed["rows"] == np.flatnonzero((np.arange(40) + 6) % 5 == 0).tolist()

    assert run.rollback(2).sequence == 5
    assert_same(s3.open("r").load(), state(1))
    assert_same(run.restore(), state(1))
    assert run.compact().sequence == 6
    assert_same(s3.open("r").load(), state(1))
    assert s3.open("r").verify() == []

    run.tag("best", 2)
    run.prune(run.plan_prune(crf.Keep(last=1)))
    assert [c.sequence for c in s3.open("r").log()] == [1, 2, 6]
    with pytest.raises(crf.PrunedError):
        s3.open("r")[4].load()
    assert s3.open("r").verify() == []
    assert run.save(state(2), step=2).sequence == 7


def test_restore_continues_and_follow_sees_it(s3: Place) -> None:
    writer = s3.open(policy="consecutive")
    writer.save(state(0), step=0)
    reader, seen, stop = s3.open("r"), list[int](), threading.Event()

    def follow() -> None:
        for checkpoint in reader.follow(poll=0.05, stop=stop):
            seen.append(checkpoint.sequence)
            if checkpoint.sequence == 3:
                stop.set()

    thread = threading.Thread(target=follow)
    thread.start()
    for step in (1, 2):
        resumed = s3.open(policy="consecutive")
        assert_same(resumed.restore(), state(step - 1))
        assert resumed.save(state(step), step=step).parent == step
    thread.join(30)
    assert not thread.is_alive() and seen[-1] == 3 and seen == sorted(seen)
    assert s3.open("r").latest().commit.restores == 2


def test_zarr_python_reads_a_checkpoint(s3: Place) -> None:
    """README, Read it without this library: through the FsspecStore of zarr-python."""
    run = s3.open()
    weight = np.random.default_rng(1).random((100, 4), np.float32)
    run.save(crf.State(tables={"t": crf.Table({"weight": weight})}), step=1)
    group: Any = run.latest().zarr()
    try:
        assert np.array_equal(group["block-0-0/weight.values"][:], weight)
        with pytest.raises(ValueError, match="read-only"):
            group.create_group("x")
    finally:
        filesystem = group.store.fs
        from zarr.core.sync import sync  # noqa: TID251 - closes the connections that zarr-python keeps

        sync(filesystem._s3.close())


def test_a_copy_by_other_tools_is_the_same_run(s3: Place, tmp_path: Path) -> None:
    """STO-4: object by object, to S3 and back."""
    run = crf.open_run(tmp_path / "run", "a", durable=False, policy="consecutive")
    for step in range(3):
        run.save(state(step), step=step)
    options = s3.options
    client = boto3.client(
        "s3",
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        **options["client_kwargs"],
    )
    bucket, _, prefix = s3.url.removeprefix("s3://").partition("/")
    for path in sorted((tmp_path / "run").rglob("*")):
        if path.is_file():
            client.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(tmp_path / 'run')}")
    there = s3.open("r")
    assert there.verify() == []
    assert there.latest().sequence == 3
    assert_same(there.load(), state(2))
    s3.open(policy="consecutive").restore()
    store, back = s3.store(), LocalStore(tmp_path / "back", durable=False)
    for name in store.folders() or ():
        for key in [name] if name == layout.RUN_KEY else store.list(name):
            back.put(key, [store.get(key) or b""])
    home = crf.open_run(tmp_path / "back")
    assert home.verify() == []
    assert_same(home.load(), state(2))
    client.close()


def test_a_run_is_copied_to_s3_and_back(s3: Place, tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", "a", durable=False, policy="consecutive")
    for step in range(3):
        run.save(state(step), step=step)
    crf.copy_run(tmp_path / "run", s3.store())
    assert s3.open("r").verify() == []
    assert_same(s3.open("r").load(), state(2))
    crf.copy_run(s3.store(), tmp_path / "back")
    assert_same(crf.open_run(tmp_path / "back").load(), state(2))


def test_strangers_around_a_run(s3: Place) -> None:
    """Objects beside the run do not matter, and a place that holds other things is no place for one."""
    outside = S3Store(s3.url.rpartition("/")[0], storage_options=s3.options)
    name = s3.url.rpartition("/")[2]
    for i in range(30):
        outside.put(f"{name}-other/{i}", [b"1"])
        outside.put(f"{name}{i}", [b"1"])
    run = s3.open()
    run.save(state(0), step=0)
    assert s3.open("r").latest().sequence == 1
    assert s3.open("r").verify() == []
    with pytest.raises(crf.NotARunError, match="other things"):
        crf.open_run(s3.url + "-other", "a", storage_options=s3.options)
    with pytest.raises(crf.NotARunError):
        crf.open_run(s3.url + "-other", storage_options=s3.options)
    with pytest.raises(crf.RunNotFoundError):
        crf.open_run(s3.url + "-nothing", storage_options=s3.options)
    assert S3Store(s3.url + "-nothing", storage_options=s3.options).folders() is None


# Requests -------------------------------------------------------------------------------------------------------------


def requests_of(run: crf.Run) -> dict[str, int]:
    assert isinstance(run._store, S3Store)
    found = dict(run._store.requests)
    run._store.requests.clear()
    return found


def many(tables: int, rows: Any, changed: Any = None) -> crf.State:
    weight = np.random.default_rng(0).random((rows, 16), np.float32)
    return crf.State(
        tables={f"t{i}": crf.Table({"weight": weight + i, "sum": weight[:, 0]}, changed=changed) for i in range(tables)}
    )


def test_requests_of_a_save_and_a_load(s3: Place) -> None:
    """Three GETs and one LIST lead to the latest checkpoint; an increment takes as many objects as it has layouts."""
    run = s3.open(bits=4, policy="consecutive")
    requests_of(run)
    run.save(many(500, 20), step=0)
    first = requests_of(run)
    assert set(first) == {"PutObject", "GetObject"} and sum(first.values()) <= 64
    run.save(many(500, 20, changed=np.arange(10)), step=1)
    increment = requests_of(run)
    assert set(increment) == {"PutObject", "GetObject"} and sum(increment.values()) <= 64
    objects = len(s3.store().list(layout.folder(2)))
    assert increment["PutObject"] == objects

    reader = s3.open("r")
    assert requests_of(reader) == {"GetObject": 1}  # the run itself
    latest = reader.latest()
    assert requests_of(reader) == {"ListObjectsV2": 1, "GetObject": 2}  # commit, manifest
    assert latest.table("t7").stored_rows == 10
    assert requests_of(reader) == {"GetObject": 1}  # part list
    loaded = latest.load()
    chunks = sum("/c/" in key for number in (1, 2) for key in s3.store().list(layout.folder(number)))
    found = requests_of(reader)
    assert set(found) == {"GetObject"}
    assert found["GetObject"] <= chunks + 3  # of the base: commit, manifest, part list; not one for an array's metadata
    assert len(loaded.tables) == 500
    assert np.abs(loaded.tables["t499"]["weight"] - many(500, 20).tables["t499"]["weight"]).max() < 0.05


def test_requests_of_a_rank(s3: Place) -> None:
    """An increment of 10 rows in each of 500 tables: at most 24 requests from each of 8 ranks."""
    run = s3.open(bits=4, policy="consecutive")
    run.save(many(500, 80), step=0)
    values = many(500, 80)
    save = run.begin(step=1, writers=8)
    lists = []
    for rank in range(8):
        joined = crf.join_save(save.token, storage_options=s3.options)
        writer = joined.writer(rank)
        for name, table in values.tables.items():
            ids = np.arange(rank * 10, rank * 10 + 10)
            fields = {field: array[ids] for field, array in table.fields.items()}
            writer.put(name, fields, rows=ids, of=80)
        lists.append(writer.finish())
        store = joined._store
        assert isinstance(store, S3Store)
        assert set(store.requests) == {"PutObject"} and store.requests["PutObject"] <= 24
    requests_of(run)
    done = save.commit(lists)
    assert requests_of(run)["ListObjectsV2"] == 1
    assert done.load().tables["t3"]["weight"].shape == (80, 16)


# Several writers ------------------------------------------------------------------------------------------------------


RANK = """
import json, sys
import numpy as np, checkrun_format as crf
token, rank = json.loads(sys.argv[1]), int(sys.argv[2])
writer = crf.join_save(token).writer(rank)
rows = np.arange(rank * 10, rank * 10 + 10)
weight = np.repeat(rows[:, None], 4, 1).astype(np.float32)
writer.put("user", {"weight": weight}, rows=(rank * 10, rank * 10 + 10), of=20)
print(json.dumps(writer.finish()))
"""


def test_ranks_in_processes_of_their_own(s3: Place) -> None:
    run = s3.open()
    save = run.begin(step=5, writers=2)
    text = json.dumps(save.token)
    assert servers.WRITER.secret not in text
    lists = []
    for rank in range(2):
        command = [sys.executable, "-W", "error", "-c", RANK, text, str(rank)]
        environment = os.environ | s3.environment | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        lists.append(json.loads(done.stdout))
    save.commit(lists)
    found = s3.open("r").load()
    assert found.tables["user"]["weight"][:, 3].tolist() == list(range(20))


def small(tag: int) -> crf.State:
    return crf.State(tensors={"tag": np.full(3, tag)}, extra=tag)


ROUNDS = int(os.environ.get("CHECKRUN_S3_ROUNDS", "6"))


def test_eight_processes_commit_at_once(s3: Place) -> None:
    """HEA-3, STO-2: of eight that claim one number, one wins, and the others are told. CHECKRUN_S3_ROUNDS for more."""
    s3.open().save(small(0), step=0)
    context = multiprocessing.get_context("fork")
    barriers = [context.Barrier(8) for _ in range(ROUNDS)]

    def work(number: int) -> int:
        wins = 0
        for barrier in barriers:
            run = s3.open()
            barrier.wait(60)
            try:
                run.save(small(number), step=number)
                wins += 1
            except crf.ConcurrentCommitError:
                with pytest.raises(crf.ConcurrentCommitError):
                    run.save(small(number), step=number)
            barrier.wait(60)
        return wins

    children = [fork(partial(work, number)) for number in range(8)]
    wins = [ended(child) for child in children]
    assert sum(wins) == ROUNDS and all(0 <= count <= ROUNDS for count in wins)
    run = s3.open("r")
    assert [c.sequence for c in run.log()] == list(range(1, ROUNDS + 2))
    assert run.verify() == []


# The rules of commits -------------------------------------------------------------------------------------------------


def test_a_zombie_cannot_commit_over_its_successor(s3: Place) -> None:
    """HEA-1."""
    zombie = s3.open()
    zombie.save(small(1), step=1)
    successor = s3.open(takeover=True)
    with pytest.raises(crf.ConcurrentCommitError, match="taken"):
        zombie.save(small(2), step=2)
    assert successor.save(small(3), step=3).sequence == 3
    assert s3.open("r").load().extra == 3


@pytest.mark.parametrize("how", ["after", "before"])
def test_an_acknowledgement_that_is_lost(s3: Place, how: Any) -> None:
    """HEA-3: a commit that landed is adopted; one that did not is not there."""
    store = FaultStore(s3.store())
    run = crf.open_run(store, "a")
    run.save(small(1), step=1)
    store.arm(Fault(at=1, how=how, calls=frozenset({"create"})))
    if how == "after":
        assert run.save(small(2), step=2).sequence == 2
    else:
        with pytest.raises(crf.StorageError):
            run.save(small(2), step=2)
        assert s3.open("r").latest().sequence == 1
        store.arm(None)
        assert run.save(small(2), step=2).sequence == 2
    assert s3.open("r").load().extra == 2
    assert {problem.kind for problem in s3.open("r").verify()} <= {"litter"}


def test_a_commit_that_lands_late(s3: Place) -> None:
    """HEA-3: an earlier attempt of this Run holds the number: the save goes on at the next one."""
    store = FaultStore(s3.store())
    run = crf.open_run(store, "a")
    run.save(small(1), step=1)
    store.arm(Fault(how="late"))
    with pytest.raises(crf.StorageError):
        run.save(small(2), step=2)
    assert store.land() == layout.commit_key(2)
    assert run.save(small(3), step=3).sequence == 3
    assert [c.extra for c in s3.open("r").log()] == [1, 2, 3]


def test_burnt_and_pruned_numbers_are_never_used_again(s3: Place) -> None:
    """HEA-4, PRU-1."""
    run = s3.open()
    for tag in range(3):
        run.save(small(tag), step=tag)
    run.prune(run.plan_prune(crf.Keep(last=1)))
    s3.store().create(layout.commit_key(4), layout.group_document())
    with pytest.warns(crf.BurntNumberWarning):
        again = s3.open()
    assert again.save(small(9), step=9).sequence == 5
    with pytest.raises(crf.PrunedError):
        s3.open("r")[1]
    with pytest.raises(crf.BurntError):
        s3.open("r")[4]
    assert s3.open("r").load().extra == 9


class OnS3(ChainMachine):
    """The machine's rules, each store call a request to a server."""

    place: Place

    def make_store(self) -> S3Store:
        url = f"{self.place.url}/{time.monotonic_ns()}"
        return S3Store(url, storage_options=self.place.options)


def test_the_chain_machine_on_s3(s3: Place) -> None:
    """A short profile of what tests/stateful does in memory; CHECKRUN_S3_EXAMPLES for more."""
    examples = int(os.environ.get("CHECKRUN_S3_EXAMPLES", "3"))

    class Here(OnS3):
        place = s3

    from hypothesis import HealthCheck
    from hypothesis.stateful import run_state_machine_as_test

    options: dict[str, Any] = {
        "max_examples": examples,
        "stateful_step_count": 12,
        "deadline": None,
        "database": None,
        "derandomize": examples == 3,
        "suppress_health_check": list(HealthCheck),
    }
    run_state_machine_as_test(Here, settings=machine_settings(Here, **options))


# Processes that read --------------------------------------------------------------------------------------------------


def test_forked_readers(s3: Place) -> None:
    """A run that the parent opened and read works in its forked children, beside the parent."""
    run = s3.open()
    run.save(state(0), step=0)
    reader = s3.open("r")
    assert_same(reader.load(), state(0))

    def work(number: int) -> int:
        table = reader.latest().table("rows")
        found = table.take([number, 39])["weight"].tobytes()
        assert found == state(0).tables["rows"]["weight"][[number, 39]].tobytes()
        assert_same(reader.load(), state(0))
        return 7

    children = [fork(partial(work, number)) for number in range(4)]
    assert [ended(child) for child in children] == [7] * 4
    assert_same(reader.load(), state(0))


def test_a_loader_of_torch_reads(s3: Place) -> None:
    """Forked workers of a DataLoader, each with the dataset's run."""
    from torch.utils.data import DataLoader, Dataset

    s3.open().save(state(0), step=0)
    reader = s3.open("r")
    sums = state(0).tables["rows"]["sum"].view(np.int32)
    assert len(reader.load().tables) == 2

    class Rows(Dataset[int]):
        def __len__(self) -> int:
            return len(sums)

        def __getitem__(self, row: int) -> int:
            return int(reader.latest().table("rows").take([row])["sum"].view(np.int32)[0])

    loader = DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert [value for batch in loader for value in batch.tolist()] == sums.tolist()


def _spawned(url: str, rows: list[int], results: Any) -> None:
    results.put(crf.open_run(url).latest().table("rows").take(rows)["sum"].tobytes())


def test_spawned_readers(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """They open the run themselves; what cannot travel says so at once."""
    run = s3.open()
    run.save(state(0), step=0)
    with pytest.raises(TypeError, match="open the run in each process"):
        copy.deepcopy(run)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_spawned, args=(s3.url, [3, 1], results))
    process.start()
    assert results.get(timeout=60) == state(0).tables["rows"]["sum"][[3, 1]].tobytes()
    process.join(30)
    assert process.exitcode == 0


def test_reading_from_within_a_running_loop(s3: Place) -> None:
    """As in a notebook: the store's requests are on another thread's loop."""
    import asyncio

    s3.open().save(small(4), step=4)

    async def read() -> int:
        found: int = s3.open("r").load().extra
        return found

    assert asyncio.run(read()) == 4


# Commands -------------------------------------------------------------------------------------------------------------


def test_commands(s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials come from the environment, and every command works on s3:// as on a path."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(s3.url)  # type: ignore[arg-type]
    trainer.save(100)
    trainer.save(200, 1, 2, dropped=["gone"])
    trainer.save(300, 3)
    url = s3.url
    assert [line["sequence"] for line in checkrun("ls", url, "--json").document["numbers"]] == [1, 2, 3]
    assert checkrun("info", f"{url}@2", "--json").document["checkpoint"]["sequence"] == 2
    assert checkrun("tree", url, "--json").document["latest"] == 3
    assert checkrun("verify", url, "--json").document["problems"] == []
    assert checkrun("cat", url, "user", "--rows", "1:3", "--json").code == 0
    assert checkrun("changes", url, "1", "2", "--json").code == 0
    assert checkrun("diff", url, "1", "1", "--json").document["equal"] is True
    assert checkrun("tag", url, "best", "1").code == 0
    assert checkrun("info", f"{url}@best", "--json").document["checkpoint"]["sequence"] == 1
    assert checkrun("rollback", url, "2").code == 0
    assert checkrun("compact", url).code == 0
    assert checkrun("prune", url, "--keep-last", "1", "--yes").code == 0
    assert [c.sequence for c in crf.open_run(url).log()] == [1, 5]
    file = tmp_path / "out.npz"
    assert checkrun("export", f"{url}@5", file).code == 0
    assert checkrun("import", file, f"{url} copy").code == 0
    assert by_value(crf.open_run(f"{url} copy").latest())["user"] == by_value(crf.open_run(url).latest())["user"]
    missing = checkrun("ls", f"{url}-nothing", code=3)
    assert "does not exist" in missing.stderr
    assert "no such bucket" in checkrun("ls", "s3://no-such-bucket-anywhere/run", code=5).stderr
