"""The store over S3 against a real server: each operation, and what each failure says (FORMAT.md STO-1, STO-2)."""

from __future__ import annotations

import copy
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.stores import AlreadyExistsError, FilesystemStore, LocalStore, S3Store, open_store
from checkrun_format.stores.retries import Patience
from checkrun_format.testing import servers
from tests.conftest import Place


def test_an_object_is_what_was_put(s3: Place) -> None:
    store = s3.store()
    assert store.get("a/b") is None
    assert store.put("a/b", [b"12", np.arange(3, dtype=np.uint8), b"x"]) == 6
    assert store.get("a/b") == b"12\0\1\2x"
    assert store.put("a/nothing", []) == 0
    assert store.get("a/nothing") == b""
    file = store.open("a/b")
    assert file is not None and file.read() == b"12\0\1\2x"
    assert store.open("a") is None and store.get("a") is None
    assert dict(store.requests) == {"GetObject": 6, "PutObject": 2}


def test_replace_and_delete(s3: Place) -> None:
    store = s3.store()
    store.replace("tags/a.json", b"1")
    store.replace("tags/a.json", b"22")
    assert store.get("tags/a.json") == b"22"
    modified = store.modified("tags/a.json")
    assert modified is not None and abs(modified - time.time()) < 60
    store.delete("tags/a.json")
    store.delete("tags/a.json")
    assert store.get("tags/a.json") is None
    assert store.modified("tags/a.json") is None


def test_create_stores_once(s3: Place) -> None:
    """STO-2."""
    store = s3.store()
    store.create("00000001/zarr.json", b"one")
    with pytest.raises(AlreadyExistsError, match=r"00000001/zarr\.json"):
        store.create("00000001/zarr.json", b"two")
    assert store.get("00000001/zarr.json") == b"one"


def test_of_simultaneous_creations_exactly_one_succeeds(s3: Place) -> None:
    """STO-2."""
    stores = [s3.store() for _ in range(4)]
    for number in range(3):
        barrier, won = threading.Barrier(8), list[int]()

        def create(i: int, number: int = number, barrier: threading.Barrier = barrier, won: list[int] = won) -> None:
            barrier.wait()
            try:
                stores[i % 4].create(f"{number}", b"%d" % i)
            except AlreadyExistsError:
                return
            won.append(i)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(create, range(8)))
        assert len(won) == 1
        assert stores[0].get(f"{number}") == b"%d" % won[0]


NAMES = ["plain", "with space", "grüße", "名前", "plus+hash#question?percent%2F&=", "tab\tand\nline", "a" * 200]


@pytest.mark.parametrize("name", NAMES)
def test_any_prefix_is_taken_as_it_is(s3: Place, name: str) -> None:
    """STO-1."""
    store = S3Store(f"{s3.url}/{name}/", storage_options=s3.options)
    assert store.folders() is None
    store.put("00000001/x/c/0", [b"1"])
    store.put("00000001/zarr.json", [b"22"])
    store.put("00000010/x", [b"333"])
    store.put("zarr.json", [b"4444"])
    assert sorted(store.folders() or ()) == ["00000001", "00000010", "zarr.json"]
    assert store.list("00000001") == {"00000001/x/c/0": 1, "00000001/zarr.json": 2}
    assert store.list("0000000") == {}
    assert store.list("") == {"zarr.json": 4, "00000010/x": 3, **store.list("00000001")}
    assert store.get("00000001/x/c/0") == b"1"
    assert s3.store().list(name) == {
        f"{name}/00000001/x/c/0": 1,
        f"{name}/00000001/zarr.json": 2,
        f"{name}/00000010/x": 3,
        f"{name}/zarr.json": 4,
    }


def test_a_listing_has_any_number_of_pages(s3: Place) -> None:
    store = s3.store()
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda i: store.put(f"many/{i:04}", [b"."]), range(1100)))
    store.requests.clear()
    assert store.list("many") == {f"many/{i:04}": 1 for i in range(1100)}
    assert dict(store.requests) == {"ListObjectsV2": 2}
    assert store.folders() == ["many"]


def test_what_another_writer_stores_is_seen_at_once(s3: Place) -> None:
    """STO-1: nothing of a listing is remembered."""
    mine, theirs = s3.store(), s3.store()
    assert (mine.list("x"), mine.get("x/1"), mine.folders()) == ({}, None, None)
    theirs.put("x/1", [b"1"])
    assert (mine.list("x"), mine.get("x/1"), mine.folders()) == ({"x/1": 1}, b"1", ["x"])
    theirs.delete("x/1")
    assert (mine.list("x"), mine.get("x/1")) == ({}, None)


# Addresses and options ------------------------------------------------------------------------------------------------


def test_open_store_chooses_by_the_scheme() -> None:
    assert isinstance(open_store("s3://bucket/run"), S3Store)
    assert open_store("s3://bucket").url == "s3://bucket"
    assert open_store("s3a://bucket/run/").url == "s3://bucket/run"
    assert isinstance(open_store("memory://run"), FilesystemStore)
    assert isinstance(open_store("/run"), LocalStore)


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///run", "s3://bucket/a//b", "s3://bucket/../b", "s3://bucket/a\\b", "s3://bucket/" + "x" * 900],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(crf.InvalidInputError, match=r"s3://|prefix"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/run", "https://user:hunter2@host/run"])
def test_credentials_in_an_address_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(crf.InvalidInputError, match="storage_options") as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("key", "a str; give a dict"),
        ({"kye": "x"}, "s3fs knows no 'kye'"),
        ({"client_kwargs": {"endpoint": "x"}}, "unexpected keyword argument 'endpoint'"),
        ({"client_kwargs": {"endpoint_url": "no-http"}}, "Invalid endpoint: no-http"),
        ({"config_kwargs": {"nope": 1}}, "unexpected keyword argument 'nope'"),
    ],
)
def test_options_that_s3fs_refuses(options: Any, told: str) -> None:
    with pytest.raises(crf.InvalidInputError, match=f"storage_options.*{told}"):
        crf.open_run("s3://bucket/run", storage_options=options)


def test_options_that_are_of_no_use_are_refused() -> None:
    for url in ("/run", "file:///run", LocalStore("/run")):
        with pytest.raises(crf.InvalidInputError, match="storage_options"):
            open_store(url, storage_options={"key": "hunter2"})
    with pytest.raises(crf.InvalidInputError, match="no store here serves"):
        open_store("nonsense://run")
    with pytest.raises(crf.InvalidInputError, match="s3fs knows no 'secrets'") as caught:
        open_store("s3://bucket/run", storage_options={"secrets": "hunter2"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(crf.InvalidInputError, match="refuses them") as caught:
        open_store("s3://bucket/run", storage_options={"key": "hunter2", "username": "hunter3"})
    assert "hunter" not in str(caught.value)


# Failures -------------------------------------------------------------------------------------------------------------

QUICK = Patience(seconds=1.0, at_first=0.5)


def test_a_run_in_a_bucket_that_is_not_there(s3: Place) -> None:
    with pytest.raises(crf.BucketNotFoundError, match=r"s3://no-such-bucket-here/run.*no such bucket") as caught:
        crf.open_run("s3://no-such-bucket-here/run", storage_options=s3.options)
    assert caught.value.kind == "bucket_not_found"


def test_a_reader_may_read_and_nothing_else(s3: Place) -> None:
    """A run that may only be read is refused for writing when it is opened, before anything is staged."""
    run = s3.open()
    run.save(crf.State(tensors={"b": np.arange(3)}), step=1)
    options = servers.storage_options(s3.endpoint_url, servers.READER)
    reading = crf.open_run(s3.url, storage_options=options)
    assert reading.load().tensors["b"].tolist() == [0, 1, 2]
    before = s3.store().list("00000001")
    with pytest.raises(crf.AccessDeniedError, match="access denied") as caught:
        crf.open_run(s3.url, "a", storage_options=options)
    assert caught.value.kind == "access_denied"
    assert s3.store().list("00000001") == before


@pytest.mark.parametrize(
    ("change", "message"),
    [({"secret": "not-the-secret"}, "signature does not match"), ({"key": "nobody"}, "does not know this access key")],
)
def test_wrong_credentials(s3: Place, change: dict[str, str], message: str) -> None:
    store = S3Store(s3.url, storage_options={**s3.options, **change})
    with pytest.raises(crf.CredentialsError, match=message) as caught:
        store.get("x")
    assert caught.value.kind == "credentials"
    assert not any(secret in str(caught.value) for secret in ("not-the-secret", servers.WRITER.secret))
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


def test_no_credentials(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    options = {"client_kwargs": {"endpoint_url": s3.endpoint_url, "region_name": "us-east-1"}}
    store = S3Store(s3.url, storage_options=options)
    with pytest.raises(crf.CredentialsError, match=f" {re.escape(s3.url)}/x: no credentials"):
        store.get("x")
    with pytest.raises(crf.CredentialsError, match=f" {re.escape(s3.url)}: no credentials"):
        store.folders()


def test_what_is_no_secret_garbles_no_error(s3: Place) -> None:
    options = servers.storage_options(s3.endpoint_url, servers.Login(key="x", secret="e"))  # noqa: S106
    with pytest.raises(crf.CredentialsError, match="does not exist in our records") as caught:
        S3Store(s3.url, storage_options=options).get("x")
    assert "***" not in str(caught.value)


def test_the_environment_is_enough(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(s3.url)
    store.put("x", [b"1"])
    assert s3.store().get("x") == b"1"


def test_nobody_answers() -> None:
    """The address may be wrong: the time to find out is short."""
    endpoint_url = f"http://127.0.0.1:{servers.free_port()}"
    store = S3Store("s3://bucket/run", storage_options=servers.storage_options(endpoint_url), patience=QUICK)
    with pytest.raises(crf.StorageError, match="cannot be reached") as caught:
        store.get("x")
    assert "s3://bucket/run/x" in str(caught.value)
    assert store.requests["GetObject"] > 1


def test_addressing_style_and_region_are_options(s3: Place) -> None:
    options = servers.storage_options(s3.endpoint_url, s3={"addressing_style": "path"})
    store = S3Store(s3.url, storage_options=options)
    store.put("x", [b"1"])
    assert store.get("x") == b"1"


# Secrets --------------------------------------------------------------------------------------------------------------


def test_secrets_stand_nowhere(s3: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Not in a representation, not in the run, not in a token, not in a log, not in an error."""
    caplog.set_level("INFO")
    run = s3.open()
    save = run.begin(step=1, writers=1)
    texts = [repr(run), str(run.url), repr(run._store), repr(save.token), repr(vars(save)), caplog.text]
    writer = save.writer(0)
    writer.put("user", {"weight": np.ones((4, 2), np.float32)}, rows=(0, 4), of=4)
    save.commit([writer.finish()])
    store = s3.store()
    objects = [store.get(key) or b"" for name in store.folders() or () for key in store.list(name)]
    objects.append(store.get("zarr.json") or b"")
    for secret in (servers.WRITER.key, servers.WRITER.secret):
        assert not any(secret in text for text in texts)
        assert not any(secret.encode() in data for data in objects)
    assert len(objects) > 5
    with pytest.raises(TypeError, match="open the run in each process"):
        copy.deepcopy(store)  # as pickling does it
