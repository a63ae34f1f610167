"""Answers that go wrong: what is tried again, what is told, and that a commit is one whatever becomes of its answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.stores import AlreadyExistsError, S3Store
from checkrun_format.stores.retries import Patience, persist
from checkrun_format.testing import servers
from tests.integration.test_kill import assert_same, state
from tests.s3.flaky import Fault, FlakyS3

PATIENT, QUICK = Patience(seconds=30, at_first=30), Patience(seconds=1.5, at_first=1.5)


@pytest.fixture(scope="module")
def moto() -> Iterator[FlakyS3]:
    with FlakyS3() as server:
        yield server


@pytest.fixture
def store(moto: FlakyS3) -> S3Store:
    moto.arm()
    options = servers.storage_options(moto.endpoint_url)
    return S3Store(f"s3://{moto.bucket()}/run", storage_options=options, patience=PATIENT)


PASSING = [
    Fault(code="SlowDown", status=503),
    Fault(code="TooManyRequests", status=429),
    Fault(code="InternalError", status=500),
    Fault(code="RequestTimeout", status=400),
    Fault(code="", status=502),
    Fault(code="OperationAborted", status=409),
    Fault(how="drop"),
    Fault(how="lose"),
]


def deleted(store: S3Store, key: str) -> bool:
    store.delete(key)
    return True


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.code or f"{fault.how}{fault.status}")
def test_what_passes_is_tried_again(moto: FlakyS3, store: S3Store, fault: Fault) -> None:
    store.put("there", [b"12345678"])
    calls: list[Callable[[], Any]] = [
        lambda: store.get("there") == b"12345678",
        lambda: store.put("new", [b"123"]) == 3,
        lambda: store.get("new") == b"123",
        lambda: store.list("") is not None,
        lambda: sorted(store.folders() or ()) == ["new", "there"],
        lambda: fault.status == 400 or (store.modified("there") or 0) > 0,  # an answer to HEAD has no code
        lambda: deleted(store, "new"),
        lambda: store.get("new") is None,
    ]
    for call in calls:
        moto.arm(Fault(how=fault.how, code=fault.code, status=fault.status, times=2))
        assert call()
        assert len(moto.happened) == 2 or fault.status == 400


def test_a_body_that_breaks_off_is_read_again(moto: FlakyS3, store: S3Store) -> None:
    data = random.Random(1).randbytes(300_000)
    store.put("there", [data])
    moto.arm(Fault(how="half", method="GET", times=2))
    assert store.get("there") == data
    assert store.requests["GetObject"] == 3
    store._patience = QUICK
    moto.arm(Fault(how="half", method="GET", times=99))
    with pytest.raises(crf.StorageError, match=r"s3://.*there: the server (failed|cannot be reached)"):
        store.get("there")


def test_a_deadline_ends_it(moto: FlakyS3, store: S3Store) -> None:
    """No attempt begins later than `seconds` after the first failure; the error names the cause."""
    store._patience = QUICK
    moto.arm(Fault(code="SlowDown", message="Please reduce your request rate.", times=10_000))
    began = time.monotonic()
    with pytest.raises(crf.StorageError, match=r"too much of it.*SlowDown, HTTP 503, Please reduce") as caught:
        store.get("x")
    assert QUICK.seconds * 0.9 < time.monotonic() - began < 60
    assert caught.value.kind == "storage"
    assert len(moto.happened) >= 2


def test_pauses_grow_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponential backoff with full jitter, cut at the deadline."""
    clock, pauses, longest = [0.0], list[float](), list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    def uniform(low: float, high: float) -> float:
        longest.append(high)
        return high * 0.75 + low

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(random, "uniform", uniform)

    async def attempt() -> int:
        raise ConnectionError

    async def persisted() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            with pytest.raises(ConnectionError):
                await persist(attempt, lambda _: True, lambda: 60.0)

    asyncio.run(persisted())
    assert longest[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    assert sum(pauses) == pytest.approx(60.0)
    assert pauses[:3] == pytest.approx([0.075, 0.15, 0.3])


LASTING: list[tuple[Fault, type[crf.StorageError], str]] = [
    (Fault(code="AccessDenied", status=403), crf.AccessDeniedError, "access denied"),
    (Fault(code="NoSuchBucket", status=404), crf.BucketNotFoundError, "no such bucket"),
    (Fault(code="ExpiredToken", status=400), crf.CredentialsError, "credentials have expired"),
    (Fault(code="InvalidAccessKeyId", status=403), crf.CredentialsError, "does not know this access key"),
    (Fault(code="SignatureDoesNotMatch", status=403), crf.CredentialsError, "signature does not match"),
    (Fault(code="RequestTimeTooSkewed", status=403), crf.CredentialsError, "clock of this machine"),
    (Fault(code="IllegalLocationConstraintException", status=400), crf.StorageError, "another region"),
    (Fault(code="QuotaExceeded", status=507), crf.StorageError, "server is full"),
]


@pytest.mark.parametrize(("fault", "kind", "message"), LASTING, ids=lambda value: getattr(value, "code", None))
def test_what_lasts_is_told_at_once(
    moto: FlakyS3, store: S3Store, fault: Fault, kind: type[crf.StorageError], message: str
) -> None:
    secret = servers.WRITER.secret
    for call in (
        lambda: store.get("x"),
        lambda: store.put("x", [b"1"]),
        lambda: store.create("x", b"1"),
        store.folders,
    ):
        said = f"the server repeats {secret}"
        moto.arm(Fault(code=fault.code, status=fault.status, message=said, times=100))
        with pytest.raises(kind, match=message) as caught:
            call()
        assert type(caught.value) is kind
        assert len([line for line in moto.happened if not line.startswith("HEAD")]) == 1  # botocore asks where it is
        assert secret not in str(caught.value) and "repeats ***" in str(caught.value)


def test_credentials_that_expire_while_a_save_goes_on(moto: FlakyS3, store: S3Store) -> None:
    """Nothing half is visible, and the next save goes on from there."""
    run = crf.open_run(store, "a", policy="consecutive")
    run.save(state(0), step=0)
    moto.arm(Fault(code="ExpiredToken", status=400, method="PUT", key="block", times=10_000))
    with pytest.raises(crf.CredentialsError, match="expired"):
        run.save(state(1), step=1)
    moto.arm()
    assert crf.open_run(store).latest().sequence == 1
    assert run.save(state(1), step=1).parent == 1
    assert_same(crf.open_run(store).load(), state(1))
    assert crf.open_run(store).verify() == []


# Commits --------------------------------------------------------------------------------------------------------------


COMMIT = layout.commit_key(2)


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(how="lose", method="PUT", key=COMMIT)],
        [Fault(how="lose", method="PUT", key=COMMIT), Fault(code="SlowDown", method="PUT", key=COMMIT, times=2)],
        [Fault(code="ConditionalRequestConflict", status=409, method="PUT", key=COMMIT, times=2)],
        [Fault(code="InternalError", status=500, method="PUT", key=COMMIT, times=3)],
        [Fault(how="lose", method="PUT", key=COMMIT), Fault(how="drop", method="GET", key=COMMIT, times=2)],
    ],
    ids=["lost", "lost then throttled", "conflict", "failed", "lost, and not readable at first"],
)
def test_a_commit_whose_answer_goes_wrong(moto: FlakyS3, store: S3Store, faults: list[Fault]) -> None:
    """HEA-3: whether it landed is told by reading it back."""
    run = crf.open_run(store, "a", policy="consecutive")
    run.save(state(0), step=0)
    moto.arm(*faults)
    assert run.save(state(1), step=1).sequence == 2
    assert len(moto.happened) == sum(fault.times for fault in faults)
    moto.arm()
    assert run.save(state(2), step=2).parent == 2
    again = crf.open_run(store)
    assert [c.sequence for c in again.log()] == [1, 2, 3]
    assert_same(again[2].load(), state(1))
    assert again.verify() == []


def test_a_commit_that_lost_is_told_from_one_that_won(moto: FlakyS3, store: S3Store) -> None:
    """409 and 412 of another's commit are a lost race, whatever came before them."""
    mine, theirs = crf.open_run(store, "a"), crf.open_run(store, "a")
    theirs.save(crf.State(tensors={"b": np.ones(2)}), step=7)
    commit = layout.commit_key(1)
    moto.arm(Fault(code="ConditionalRequestConflict", status=409, method="PUT", key=commit, times=2))
    with pytest.raises(crf.ConcurrentCommitError, match="taken by attempt"):
        mine.save(crf.State(tensors={"b": np.zeros(2)}), step=8)
    assert crf.open_run(store).latest().step == 7


def test_create_without_an_answer_at_all(moto: FlakyS3, store: S3Store) -> None:
    """The store gives up, and does not know; who created it reads it back."""
    store._patience = QUICK
    moto.arm(Fault(how="lose", method="PUT", times=1), Fault(code="SlowDown", method="PUT", times=10_000))
    with pytest.raises(crf.StorageError, match="SlowDown"):
        store.create("x", b"1")
    moto.arm()
    assert store.get("x") == b"1"
    with pytest.raises(AlreadyExistsError):
        store.create("x", b"2")


def test_a_server_that_refuses_conditions(moto: FlakyS3, store: S3Store) -> None:
    """501: found out when the run is opened, before anything is written."""
    moto.arm(Fault(code="NotImplemented", status=501, method="PUT", key=".probe", times=100))
    with pytest.raises(crf.InvalidInputError, match="single_writer=True"):
        crf.open_run(store, "a")
    moto.arm()
    assert store.folders() is None
