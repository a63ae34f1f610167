"""Servers that are killed, cut off, throttled, slow or full; servers that ignore conditions; other file systems."""

from __future__ import annotations

import functools
import http.server
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.stores import AlreadyExistsError, FilesystemStore, S3Store, open_store
from checkrun_format.stores.retries import Patience
from checkrun_format.testing import servers
from checkrun_format.testing.proxy import Proxy
from tests.conftest import Place
from tests.integration.test_kill import assert_same, state

PATIENT = Patience(seconds=90, at_first=90)


@pytest.fixture
def proxy(s3: Place) -> Iterator[Proxy]:
    with Proxy(s3.server.port) as running:
        yield running


def through(proxy: Proxy, s3: Place, **options: Any) -> S3Store:
    return S3Store(s3.url, storage_options=servers.storage_options(proxy.endpoint_url), **options)


def large(tag: int) -> crf.State:
    weight = np.full((40_000, 64), tag, np.float32)
    weight[:, 0] = np.arange(len(weight))
    return crf.State(tables={"t": crf.Table({"weight": weight}, changed=crf.ALL)}, extra=tag)


def tag_of(loaded: crf.State) -> int:
    """All of a state is of one save."""
    weight = loaded.tables["t"]["weight"]
    assert np.array_equal(weight[:, 0], np.arange(40_000))
    assert (weight[:, 1:] == loaded.extra).all()
    return int(loaded.extra)


# Connections ----------------------------------------------------------------------------------------------------------


def test_connections_that_are_reset_in_the_middle(s3: Place, proxy: Proxy) -> None:
    """Of bodies that go up and of bodies that come down: tried again, and every byte is checked."""
    run = crf.open_run(through(proxy, s3), "a", chunk_bytes=1 << 20)
    run.save(large(1), step=1)
    for upward in (True, False):
        proxy.reset()
        proxy.cut(200_000, times=4, upward=upward)
        if upward:
            run.save(large(2), step=2)
        else:
            assert tag_of(crf.open_run(through(proxy, s3)).load()) == 2
        assert proxy.cuts == (4 if upward else 8)
    assert tag_of(s3.open("r").load()) == 2
    assert s3.open("r").verify() == []


def test_a_server_that_throttles_for_seconds(s3: Place, proxy: Proxy) -> None:
    store = through(proxy, s3)
    run = crf.open_run(store, "a", chunk_bytes=1 << 20)
    run.save(large(1), step=1)
    seconds = float(os.environ.get("CHECKRUN_S3_THROTTLED", "3"))
    proxy.refuse(seconds)
    began = time.monotonic()
    run.save(large(2), step=2)
    assert time.monotonic() - began >= seconds * 0.8
    assert tag_of(s3.open("r").load()) == 2
    assert s3.open("r").verify() == []


def test_a_server_that_throttles_for_ever(s3: Place, proxy: Proxy) -> None:
    store = through(proxy, s3, patience=Patience(seconds=1, at_first=1))
    run = crf.open_run(store, "a")
    run.save(large(1), step=1)
    proxy.refuse(3600)
    with pytest.raises(crf.StorageError, match="SlowDown"):
        run.save(large(2), step=2)
    proxy.refuse(0)
    assert crf.open_run(store).latest().sequence == 1
    assert run.save(large(3), step=3).sequence == 2
    assert tag_of(s3.open("r").load()) == 3


def test_a_reader_that_is_slow(s3: Place, proxy: Proxy) -> None:
    """What a follower has not asked for yet is not in its memory, and no connection waits for it."""
    s3.open().save(large(1), step=1)
    s3.open(policy="full").save(large(2), step=2)
    batches = 0
    for change in crf.open_run(through(proxy, s3)).latest().changes_since(1, max_bytes=1 << 20):
        if change.dropped:
            continue
        batches += 1
        assert change.fields["weight"].nbytes <= 2 << 20
        if batches < 4:
            time.sleep(0.3)
            proxy.reset()
    assert batches >= 10


def test_memory_is_bounded(s3: Place) -> None:
    """Bytes in flight have a budget: a save and a load of 160 MiB within one of 32 MiB hold far less beside it."""
    assert S3Store.budget_bytes == 192 << 20
    rows, peaks = 320_000, []
    weight = np.ones((rows, 128), np.float32)
    out = crf.State(tables={"t": crf.Table({"weight": np.zeros((rows, 128), np.float32)})})
    stores = [s3.store(), s3.store()]
    for store in stores:
        store.budget_bytes = 32 << 20
    run = crf.open_run(stores[0], "a", chunk_bytes=8 << 20)
    tracemalloc.start()
    try:
        for what in ("save", "load"):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            if what == "save":
                run.save(crf.State(tables={"t": crf.Table({"weight": weight})}), step=1)
            else:
                crf.open_run(stores[1]).load(out=out)
            peaks.append((tracemalloc.get_traced_memory()[1] - before) / 2**20)
    finally:
        tracemalloc.stop()
    assert np.array_equal(out.tables["t"].fields["weight"], weight)
    assert max(peaks) < 80, peaks
    for key in s3.store().list("00000001"):
        s3.store().delete(key)


# Servers that die -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_and_comes_back(tmp_path: Path) -> None:
    """Saves and loads wait for it; nothing that was committed is lost."""
    with servers.SeaweedFS(tmp_path / "server") as server:
        url = f"s3://{server.bucket()}/run"
        options = servers.storage_options(server.endpoint_url)
        store = S3Store(url, storage_options=options, patience=PATIENT)
        run = crf.open_run(store, "a", chunk_bytes=256 << 10, policy="full")
        run.save(large(1), step=1)

        def restart(after: float) -> threading.Thread:
            def work() -> None:
                time.sleep(after)
                server.kill()
                time.sleep(0.5)
                server.start()

            thread = threading.Thread(target=work)
            thread.start()
            return thread

        thread = restart(0.05)
        saved = run.save(large(2), step=2)
        thread.join()
        assert saved.sequence == 2
        reader = crf.open_run(S3Store(url, storage_options=options, patience=PATIENT))
        thread = restart(0.05)
        tags = [tag_of(reader[number].load()) for number in (2, 1, 2)]
        thread.join()
        assert tags == [2, 1, 2]
        assert [p for p in crf.open_run(url, storage_options=options).verify() if p.kind != "litter"] == []
    shutil.rmtree(tmp_path / "server")


def test_a_server_that_has_no_space_left(tmp_path: Path) -> None:
    """What is committed stays, the error says what failed, and once there is space again the next save succeeds."""
    folder = tmp_path / "server"
    server = servers.Rclone(folder)
    with server:
        url = f"s3://{server.bucket()}/run"
        store = S3Store(
            url,
            storage_options=servers.storage_options(server.endpoint_url),
            single_writer=True,
            patience=Patience(seconds=1, at_first=1),
        )
        run = crf.open_run(store, "a", chunk_bytes=4 << 20)
        run.save(crf.State(extra=1), step=1)
        assert server.process is not None
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        with pytest.raises(crf.StorageError, match=r"s3://.*(HTTP 5|reached|InternalError)") as caught:
            run.save(large(2), step=2)
        assert "weight.values" in str(caught.value)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert crf.open_run(store).latest().extra == 1
        assert run.save(large(3), step=3).sequence == 2
        assert tag_of(crf.open_run(store).load()) == 3
    shutil.rmtree(folder)


# Writers that die -----------------------------------------------------------------------------------------------------


def _saves(s3: Place, opened: int) -> None:
    run = s3.open(policy="consecutive")
    os.write(opened, b".")
    step = 0 if run.latest(None) is None else int(run.restore().extra["step"]) + 1
    while True:
        run.save(state(step), step=step)
        os.write(opened, b".")
        step += 1


def test_a_writer_that_is_killed_at_random_times(s3: Place) -> None:
    """SIGKILL, then another one goes on: every checkpoint is whole, none is lost. CHECKRUN_S3_KILLS for more rounds."""
    rounds, chance = int(os.environ.get("CHECKRUN_S3_KILLS", "4")), random.Random(4)
    before = 0
    for round_ in range(rounds):
        opened, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _saves(s3, told)
            finally:
                os._exit(1)
        os.close(told)
        for _ in range(2 if round_ == 0 else 1):  # the first of them commits at least once
            assert os.read(opened, 1) == b"."
        time.sleep(chance.uniform(0, 1.5))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(opened)
        reader = s3.open("r")
        latest = reader.latest()
        assert latest.sequence >= max(1, before)
        for number in range(max(1, before), latest.sequence + 1):
            loaded = reader[number].load()
            assert_same(loaded, state(int(loaded.extra["step"])))
        before = latest.sequence
    assert [p for p in s3.open("r").verify() if p.kind != "litter"] == []
    run = s3.open()
    run.prune(run.plan_prune(crf.Keep(last=2), abandoned=0))
    assert s3.open("r").verify() == []
    run.restore()
    assert run.save(state(99), step=99).sequence == before + 1


# Servers that ignore conditions ---------------------------------------------------------------------------------------


def test_a_server_that_ignores_conditions(rclone: servers.Server) -> None:
    """STO-2: refused before anything is written; allowed to a single writer."""
    url = f"s3://{rclone.bucket()}/a run"
    options = servers.storage_options(rclone.endpoint_url)
    with pytest.raises(crf.InvalidInputError, match=r"ignores.*single_writer=True"):
        crf.open_run(url, "a", storage_options=options)
    assert open_store(url, storage_options=options).list("") == {}
    run = crf.open_run(url, "a", storage_options=options, single_writer=True, policy="consecutive")
    for step in range(3):
        run.save(state(step), step=step)
    assert_same(crf.open_run(url, storage_options=options).load(), state(2))
    assert run.rollback(1).sequence == 4
    run.prune(run.plan_prune(crf.Keep(last=1)))
    assert crf.open_run(url, storage_options=options).verify() == []
    late = S3Store(url, storage_options=options, single_writer=True)
    with pytest.raises(AlreadyExistsError):
        late.create("00000004/zarr.json", b"{}")


def test_commands_of_a_single_writer(rclone: servers.Server) -> None:
    """A command is told so by its environment."""
    url = f"s3://{rclone.bucket()}/run"
    options = servers.storage_options(rclone.endpoint_url)
    run = crf.open_run(url, "a", storage_options=options, single_writer=True)
    run.save(crf.State(extra=1), step=1)
    environment = os.environ | servers.environment(rclone.endpoint_url)
    program = servers.found_program("checkrun")
    asked = functools.partial(subprocess.run, [program, "rollback", url, "1"], capture_output=True, text=True)
    refused = asked(env=environment, check=False)
    assert refused.returncode == 2 and "single_writer=True" in refused.stderr
    assert asked(env=environment | {"CHECKRUN_SINGLE_WRITER": "1"}, check=False).returncode == 0
    assert crf.open_run(url, storage_options=options).latest().sequence == 2


# Other file systems of fsspec -----------------------------------------------------------------------------------------


def test_a_run_in_the_memory_of_fsspec() -> None:
    url = f"memory://a run {time.monotonic_ns()}/é"
    with pytest.raises(crf.RunNotFoundError):
        crf.open_run(url)
    run = crf.open_run(url, "a", policy="consecutive")
    for step in range(3):
        run.save(state(step), step=step)
    reader = crf.open_run(url)
    assert_same(reader.load(), state(2))
    assert reader.verify() == []
    other = crf.open_run(url, "a", takeover=True)
    with pytest.raises(crf.ConcurrentCommitError):
        run.save(state(3), step=3)
    other.tag("best", 2)
    other.prune(other.plan_prune(crf.Keep(last=1)))
    assert [c.sequence for c in crf.open_run(url).log()] == [1, 2, 3, 4]  # 4 lies over all of them
    store = open_store(url)
    assert isinstance(store, FilesystemStore)
    assert store.get("nothing") is None and store.modified("nothing") is None
    store.delete("nothing")
    with pytest.raises(AlreadyExistsError):
        store.create("zarr.json", b"")
    group = crf.open_run(url)[1].zarr()
    assert group["dense-0"].attrs.asdict() == {}


def test_a_run_behind_http_is_read(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "a run", "a", durable=False, policy="consecutive")
    for step in range(3):
        run.save(state(step), step=step)
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/a run"
        try:
            reader = crf.open_run(url)
            assert reader.latest().sequence == 3
            assert_same(reader.load(), state(2))
            with pytest.raises(crf.InvalidInputError, match="can be read only"):
                crf.open_run(url, "a")
            with pytest.raises(crf.RunNotFoundError):
                crf.open_run(f"{url}-nothing")
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_a_file_system_that_is_not_known_to_create_exactly() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"local://{folder}/run"
        with pytest.raises(crf.InvalidInputError, match=r"single_writer=True"):
            crf.open_run(url, "a")
        options = {"auto_mkdir": True}
        run = crf.open_run(url, "a", single_writer=True, storage_options=options)
        run.save(crf.State(extra=1), step=1)
        assert crf.open_run(url).latest().extra == 1
        assert crf.open_run(f"{folder}/run").verify() == []
