"""A run in a local folder: what each operation does, and what it leaves behind when it fails."""

from __future__ import annotations

import copy
import errno
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from checkrun_format.errors import CheckrunError, StorageError
from checkrun_format.stores import AlreadyExistsError, Buffer, LocalStore
from checkrun_format.stores.local import _ADVICE, _NO_LINK

Operation = Callable[[LocalStore], object]

WRITES: dict[str, Operation] = {
    "put": lambda store: store.put("00000001/new/a", [b"data"]),
    "create": lambda store: store.create("00000001/zarr.json", b"data"),
    "replace": lambda store: store.replace("00000001/old", b"data"),
}
"""Each way to write; the store holds `00000001/old` before."""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    store.put("00000001/old", [b"before"])
    return store


def files(store: LocalStore) -> dict[str, bytes]:
    """Every file below the run, hidden ones included."""
    root = Path(store.root)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if not path.is_dir()}


def refuse(number: int) -> Callable[..., NoReturn]:
    def refused(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return refused


# What is stored, and found again --------------------------------------------------------------------------------------


def test_put_stores_the_buffers_one_after_another(store: LocalStore) -> None:
    """STO-1: atomic put of a whole object, get."""
    buffers: list[Buffer] = [b"ab", np.arange(3, dtype=np.uint8), b"", b"c"]
    assert store.put("00000001/x/c/0", buffers) == 6
    assert store.get("00000001/x/c/0") == b"ab\x00\x01\x02c"
    assert store.put("00000001/empty", []) == 0
    assert store.get("00000001/empty") == b""


def test_put_takes_more_buffers_than_one_call_of_the_system(store: LocalStore) -> None:
    buffers = [bytes([number % 251]) * (number % 5) for number in range(1500)]
    assert store.put("many", buffers) == len(b"".join(buffers))
    assert store.get("many") == b"".join(buffers)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_put_goes_on_after_a_short_write(store: LocalStore, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    whole = os.writev

    def short(descriptor: int, buffers: list[memoryview]) -> int:
        return whole(descriptor, [buffers[0][:most]])

    monkeypatch.setattr(os, "writev", short)
    assert store.put("a", [b"0123456789", np.arange(100, dtype=np.uint8), b"x"]) == 111
    assert store.get("a") == b"0123456789" + bytes(range(100)) + b"x"


def test_put_never_overwrites(store: LocalStore) -> None:
    with pytest.raises(StorageError, match=r"00000001/old.*[Ff]ile exists"):
        store.put("00000001/old", [b"after"])
    assert files(store) == {"00000001/old": b"before"}


@pytest.mark.parametrize("key", ["nothing", "00000001/nothing", "00000001", "00000001/old/below", "nothing/below"])
def test_what_is_no_object_is_none(store: LocalStore, key: str) -> None:
    assert store.get(key) is None


def test_create_stores_once(store: LocalStore) -> None:
    """STO-2: create-if-absent; the one that comes too late learns it."""
    store.create("00000002/zarr.json", b"first")
    with pytest.raises(AlreadyExistsError):
        store.create("00000002/zarr.json", b"second")
    with pytest.raises(AlreadyExistsError):
        store.create("00000001/old", b"second")
    assert files(store) == {"00000001/old": b"before", "00000002/zarr.json": b"first"}


@pytest.mark.parametrize("links", [True, False], ids=["link", "exclusive create"])
@pytest.mark.timeout(60)
def test_create_has_one_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool) -> None:
    """STO-2: of any number of simultaneous creations of one key exactly one succeeds, the others learn it."""
    if not links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    store = LocalStore(tmp_path / "run", durable=False)
    with ThreadPoolExecutor(16) as pool:
        for round_ in range(10):
            start = threading.Barrier(16)
            outcomes = list(pool.map(_racer(store, f"{round_:08d}/zarr.json", start), range(16)))
            assert [outcomes.count(what) for what in ("won", "lost")] == [1, 15]
            assert store.get(f"{round_:08d}/zarr.json") == bytes([outcomes.index("won")]) * 2000
    assert len(files(store)) == 10


def _racer(store: LocalStore, key: str, start: threading.Barrier) -> Callable[[int], str]:
    def race(number: int) -> str:
        start.wait(30)
        try:
            store.create(key, bytes([number]) * 2000)
        except AlreadyExistsError:
            return "lost"
        return "won"

    return race


@pytest.mark.parametrize("number", sorted(_NO_LINK))
def test_create_works_where_link_is_refused(store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """STO-2: where `link` is refused, an exclusive create."""
    monkeypatch.setattr(os, "link", refuse(number))
    store.create("00000002/zarr.json", b"first")
    with pytest.raises(AlreadyExistsError):
        store.create("00000002/zarr.json", b"second")
    assert files(store) == {"00000001/old": b"before", "00000002/zarr.json": b"first"}


def test_the_refusals_of_link_are_told_from_failures() -> None:
    """A failing disk is no file system without links."""
    assert {errno.EPERM, errno.ENOTSUP} <= _NO_LINK
    assert not _NO_LINK & {errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EEXIST, errno.ENOENT}


def test_replace_stores_over_another_and_anew(store: LocalStore) -> None:
    """PRU-1 overwrites a commit; tags are objects in a folder that may not be there yet (TAG-1, VER-4)."""
    store.replace("00000001/old", b"after")
    store.replace("tags/best.json", b"{}")
    assert files(store) == {"00000001/old": b"after", "tags/best.json": b"{}"}


@pytest.mark.timeout(60)
def test_a_reader_sees_all_of_a_replaced_object_or_all_of_the_old_one(tmp_path: Path) -> None:
    """STO-1: readers see all of an object or none of it."""
    store = LocalStore(tmp_path, durable=False)
    versions = [bytes([number]) * 50_000 for number in range(40)]
    store.put("a", [versions[0]])
    done = threading.Event()
    torn: list[bytes | None] = []

    def read() -> None:
        while not done.is_set():
            seen = store.get("a")
            if seen not in versions:
                torn.append(seen)

    reader = threading.Thread(target=read)
    reader.start()
    for version in versions:
        store.replace("a", version)
    done.set()
    reader.join()
    assert torn == []
    assert store.get("a") == versions[-1]


def test_delete_removes_the_object_and_the_folders_that_it_leaves_empty(store: LocalStore) -> None:
    store.put("00000002/attempt/a/c/0", [b"x"])
    store.delete("00000002/attempt/a/c/0")
    assert store.folders() == ["00000001"]
    store.delete("00000001/old")
    assert store.folders() == []
    assert Path(store.root).is_dir()


def test_delete_leaves_folders_that_hold_something(store: LocalStore) -> None:
    store.put("00000001/a/b", [b"x"])
    store.delete("00000001/old")
    assert files(store) == {"00000001/a/b": b"x"}


@pytest.mark.parametrize("key", ["nothing", "nothing/below", "00000001/old/below"])
def test_deleting_nothing_is_no_error(store: LocalStore, key: str) -> None:
    store.delete(key)
    assert files(store) == {"00000001/old": b"before"}


def test_list_shows_every_object_below_a_prefix_and_its_size(store: LocalStore) -> None:
    """STO-1: a listing of a prefix shows every object whose put has returned."""
    store.put("00000001/attempt/a/c/0/0", [b"123"])
    store.put("00000001/attempt/.hidden", [b"1"])
    store.put("00000012/b", [b""])
    below = {"00000001/attempt/a/c/0/0": 3, "00000001/attempt/.hidden": 1}
    assert store.list("00000001/attempt") == below
    assert store.list("00000001") == below | {"00000001/old": 6}
    assert store.list("") == below | {"00000001/old": 6, "00000012/b": 0}
    assert store.list("00000099") == {}


def test_folders_are_the_names_directly_below_the_run(store: LocalStore) -> None:
    store.put("zarr.json", [b"{}"])
    store.put("00000002/a/b", [b""])
    assert sorted(store.folders() or ()) == ["00000001", "00000002", "zarr.json"]


def test_reading_creates_nothing(tmp_path: Path) -> None:
    """RUN-1: opening for reading creates nothing."""
    store = LocalStore(tmp_path / "no" / "run")
    assert store.folders() is None
    assert store.get("zarr.json") is None
    assert store.list("00000001") == {}
    store.delete("zarr.json")
    assert list(tmp_path.iterdir()) == []


def test_the_run_may_lie_in_the_home_folder_or_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert LocalStore("~/run").root == LocalStore("run").root == LocalStore(Path("run")).url == str(tmp_path / "run")


def test_a_store_is_opened_in_each_process_anew(store: LocalStore) -> None:
    with pytest.raises(TypeError, match="open the run in each process"):
        copy.copy(store)


# Modes ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
@pytest.mark.parametrize("links", [True, False], ids=["link", "exclusive create"])
def test_the_umask_decides_who_may_read(
    tmp_path: Path,
    umask: Callable[[int], int],
    monkeypatch: pytest.MonkeyPatch,
    mask: int,
    file_mode: int,
    folder_mode: int,
    *,
    links: bool,
) -> None:
    """Temporary files are often made for their owner alone; a commit must not be (fault 128)."""
    umask(mask)
    if not links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    store = LocalStore(tmp_path / "a" / "run")
    store.create("zarr.json", b"")
    store.put("00000001/attempt/c/0", [b""])
    store.create("00000001/zarr.json", b"")
    store.replace("00000001/zarr.json", b"x")
    store.create("00000002/zarr.json", b"")
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert len(found) == 9
    assert {mode for path, mode in found.items() if path.is_file()} == {file_mode}
    assert {mode for path, mode in found.items() if path.is_dir()} == {folder_mode}


# Syncs ----------------------------------------------------------------------------------------------------------------


def _every_write(store: LocalStore) -> None:
    store.create("zarr.json", b"{}")
    store.put("00000001/attempt/c/0", [b"data"])
    store.sync("00000001/attempt")
    store.create("00000001/zarr.json", b"{}")
    store.replace("00000001/zarr.json", b"[]")
    store.delete("00000001/attempt/c/0")


@pytest.mark.parametrize("links", [True, False], ids=["link", "exclusive create"])
def test_without_durable_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, links: bool) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError("a sync")

    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, never)
    if not links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    store = LocalStore(tmp_path / "run", durable=False)
    _every_write(store)
    assert files(store) == {"zarr.json": b"{}", "00000001/zarr.json": b"[]"}


def test_durable_is_the_default_and_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    _every_write(LocalStore(tmp_path / "run"))
    assert len(synced) >= 10


# Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", WRITES)
@pytest.mark.parametrize("number", sorted({*_ADVICE, errno.EIO}))
def test_a_failing_write_names_the_file_and_the_way_out(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    """`storage`: the store failed: permission, space, network (section 10)."""
    monkeypatch.setattr(os, "writev", refuse(number))
    with pytest.raises(StorageError) as caught:
        WRITES[operation](store)
    assert isinstance(caught.value, CheckrunError)
    assert isinstance(caught.value, OSError)
    assert caught.value.kind == "storage"
    assert caught.value.errno == number
    assert f"{store.root}/00000001/" in str(caught.value)
    assert _ADVICE.get(number, os.strerror(number)) in str(caught.value)


def test_the_advice_says_what_to_do() -> None:
    assert "free some space" in _ADVICE[errno.ENOSPC]
    assert "free some space" in _ADVICE[errno.EDQUOT]
    assert "permission" in _ADVICE[errno.EACCES]
    assert "read-only" in _ADVICE[errno.EROFS]


@pytest.mark.parametrize("operation", ["create", "replace"])
@pytest.mark.parametrize("fails", ["writev", "fsync", "link", "replace", "close"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_no_temporary_is_left_behind(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, operation: str, fails: str, error: BaseException
) -> None:
    """A failed creation leaves the key free, a failed replacement the old object (faults 20, 22)."""
    before = files(store)
    whole: Callable[..., Any] = getattr(os, fails)
    calls: list[object] = []

    def broken(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if fails == "close":
            whole(*arguments)
        if len(calls) == 1:
            raise error
        return None if fails == "close" else whole(*arguments, **options)

    monkeypatch.setattr(os, fails, broken)
    if (operation, fails) in {("create", "replace"), ("replace", "link")}:
        WRITES[operation](store)
        assert not calls
        return
    with pytest.raises(StorageError if isinstance(error, OSError) else type(error)):
        WRITES[operation](store)
    assert calls
    assert files(store) == before


def test_a_creation_that_could_not_be_made_durable_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last sync is of the folder: the object is there, but the caller must not believe that it stays."""
    folders: list[int] = []
    whole = os.fsync

    def broken(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            folders.append(descriptor)
            raise OSError(errno.EIO, "broken")
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageError, match="00000001"):
        store.create("00000001/zarr.json", b"data")
    assert len(folders) == 1
    assert store.get("00000001/zarr.json") == b"data"


@pytest.mark.parametrize(
    ("operation", "patched"),
    [
        (lambda store: store.folders(), "listdir"),
        (lambda store: store.list("00000001"), "scandir"),
        (lambda store: store.put("00000001/old", [b""]), "open"),
        (lambda store: store.sync("00000001"), "fsync"),
        (lambda store: store.delete("00000001/old"), "unlink"),
        (lambda store: store.put("00000001/new/a", [b""]), "mkdir"),
        (lambda store: store.create("00000002/a", b""), "mkdir"),
        (lambda store: store.create("00000001/a", b""), "link"),
        (lambda store: store.replace("00000001/old", b""), "replace"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_every_operation_that_fails_raises_a_storage_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, operation: Operation, patched: str, number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, patched, refuse(number))
        with pytest.raises(StorageError) as caught:
            operation(store)
    assert caught.value.errno == number
    assert store.root in str(caught.value)
    assert files(store) == {"00000001/old": b"before"}


def synced(store: LocalStore, prefix: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that a sync syncs, relative to the run."""
    paths: list[str] = []
    whole = os.open

    def recorded(path: str, flags: int, mode: int = 0o777) -> int:
        paths.append(os.path.relpath(path, store.root))
        return whole(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", recorded)
        store.sync(prefix)
    return paths


def test_a_sync_is_of_the_folders_in_which_something_was_put(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("00000002/attempt/block/codes/c/0", [b"x"])
    store.put("00000002/attempt/zarr.json", [b"x"])
    store.put("00000003/other/zarr.json", [b"x"])
    above = ["00000002/attempt", "00000002", "."]
    assert synced(store, "00000002/att", monkeypatch) == []
    assert synced(store, "00000002/attempt/block", monkeypatch) == [
        "00000002/attempt/block/codes/c",
        "00000002/attempt/block/codes",
        "00000002/attempt/block",
        *above,
    ]
    assert synced(store, "00000002/attempt", monkeypatch) == above
    assert synced(store, "00000002/attempt", monkeypatch) == []


def test_a_sync_that_failed_is_made_up_for(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("00000002/attempt/zarr.json", [b"x"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse(errno.EIO))
        with pytest.raises(StorageError, match="00000002"):
            store.sync("00000002/attempt")
    assert synced(store, "00000002/attempt", monkeypatch) == ["00000002/attempt", "00000002", "."]


def test_what_is_deleted_needs_no_sync(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("00000002/attempt/zarr.json", [b"x"])
    store.delete("00000002/attempt/zarr.json")
    assert synced(store, "00000002/attempt", monkeypatch) == []


def test_a_path_that_is_too_long_is_named(store: LocalStore) -> None:
    with pytest.raises(StorageError, match="the path is too long"):
        store.put("x" * 300, [b""])
    with pytest.raises(StorageError, match="the path is too long"):
        store.get("x" * 300)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("operation", ["get", "folders", "list", *WRITES])
@pytest.mark.timeout(30)
def test_a_folder_of_somebody_else_is_permission_denied(store: LocalStore, operation: str) -> None:
    """Really another user, in a child process (fault 128): never taken for an empty run."""
    calls: dict[str, Operation] = {
        "get": lambda s: s.get("00000001/old"),
        "folders": lambda s: s.folders(),
        "list": lambda s: s.list("00000001"),
        **WRITES,
    }
    Path(store.root).chmod(0o700)
    child = os.fork()
    if child == 0:
        outcome = 9
        try:
            os.setgid(65534)
            os.setuid(65534)
            calls[operation](store)
        except StorageError as error:
            outcome = 0 if error.errno == errno.EACCES and "permission denied" in str(error) else 8
        finally:
            os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert files(store) == {"00000001/old": b"before"}


# Reading large objects ------------------------------------------------------------------------------------------------

LARGE = np.random.default_rng(0).integers(0, 256, (3 << 20) + 5, dtype=np.uint8)


def read_all(file: io.RawIOBase | io.BytesIO | None, step: int) -> bytes:
    assert file is not None
    found = bytearray()
    with file:
        while count := file.readinto(piece := bytearray(step)):
            found += piece[:count]
    return bytes(found)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, len(LARGE)])
@pytest.mark.parametrize("step", [4099, 1 << 20, 5 << 20])
def test_open_reads_what_was_put(store: LocalStore, size: int, step: int) -> None:
    store.put("a", [LARGE[:size]])
    assert read_all(store.open("a"), step) == LARGE[:size].tobytes()


def test_open_finds_none_as_get_does(store: LocalStore) -> None:
    assert store.open("none") is None
    assert store.open("00000001") is None
    assert store.open("00000001/old/deeper") is None


def test_a_file_that_is_cut_while_it_is_read_ends_there(store: LocalStore) -> None:
    """And the process goes on: were it mapped, pages that are gone would end it by a signal."""
    store.put("a", [LARGE])
    file = store.open("a")
    assert file is not None
    piece = bytearray(1 << 20)
    assert file.readinto(piece) == 1 << 20
    os.truncate(Path(store.root, "a"), 1 << 20)
    assert file.readinto(piece) == 0
    file.close()
