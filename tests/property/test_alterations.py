"""Whatever is altered in a run: an error of ours, or the same values; nothing crashes, hangs, or takes all memory.

A first test alters objects as faulty storage would. A second makes checksums and digests fit afterwards, as a faulty or
hostile writer would, so that what is behind them has to be checked: then other values may be meant, but what `verify`
calls sound can be read, and what cannot be read, `verify` reports.
"""

from __future__ import annotations

import functools
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.testing import MemoryStore
from tests.property.alterations import (
    LAST,
    Objects,
    altered_bytes,
    altered_chunks,
    altered_documents,
    arrays_in,
    build,
    prefix_of,
    sealed,
)

SECONDS, BYTES = 20, 3 << 30
"""What an example may take: a small part of a second and of a mebibyte is usual."""

HARMLESS = ("litter", "burnt")


@functools.cache
def run_objects() -> Objects:
    return build()


def frozen(value: Any) -> Any:
    """A value that compares by its bits, its dtype and its shape."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return tuple(sorted((name, frozen(inner)) for name, inner in value.items()))
    return repr(value)


def load(run: crf.Run, number: int) -> Any:
    state = run[number].load()
    tables = {name: (frozen(table.fields), frozen(table.keys)) for name, table in state.tables.items()}
    return tables, frozen(state.tensors), frozen(state.blobs), frozen(state.extra)


def table(run: crf.Run, number: int, name: str) -> Any:
    view = run[number].table(name)
    some = (view.keys() if view.addressing == "keyed" else np.arange(len(view)))[::5]
    return frozen(view.take(some)), frozen(view.read(slice(1, 4))), view.storage, view.stored_rows


def changes(run: crf.Run, number: int, since: int, *, raw: bool) -> Any:
    found = []
    for batch in run[number].changes_since(since, raw=raw):
        fields = {n: frozen(f.decode()) if raw else frozen(f) for n, f in batch.fields.items()}
        told = (batch.table, frozen(batch.rows), fields, frozen(batch.deleted), batch.table_rows, batch.dropped)
        found.append(told)
    return found


def restored(run: crf.Run) -> Any:
    with run:
        state = run.restore(fallback=True)
    return frozen(state.extra), {name: frozen(t.fields) for name, t in state.tables.items()}


Operation = Callable[[crf.Run], Any]


@functools.cache
def operations() -> dict[str, tuple[int | None, Operation]]:
    """What can be read, and of which checkpoint."""
    found: dict[str, tuple[int | None, Operation]] = {
        "latest": (None, lambda run: run.latest().commit),
        "log": (None, lambda run: [c.commit for c in run.log()]),
        "tags": (None, lambda run: run.tags()),
    }
    run = opened(run_objects())
    for number in range(1, LAST + 1):
        found[f"load {number}"] = (number, functools.partial(load, number=number))
        for name in run[number].tables:
            found[f"table {name} of {number}"] = (number, functools.partial(table, number=number, name=name))
        for since in sorted({1, number - 1} - {0, number}):
            for raw in (False, True):
                read = functools.partial(changes, number=number, since=since, raw=raw)
                found[f"changes of {number} since {since}, {raw}"] = (number, read)
    return found


def opened(objects: Objects, mode: str = "r") -> crf.Run:
    store = MemoryStore()
    store.objects = dict(objects)
    return crf.open_run(store, mode, durable=False)


@contextmanager
def bounded() -> Iterator[None]:
    """With so much memory and time only; what exceeds the one is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, before[1]))
    start = time.process_time()  # what waits for ever is stopped by the test's timeout
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", crf.BurntNumberWarning)
            warnings.simplefilter("ignore", crf.FallbackWarning)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - start < SECONDS


def outcomes(objects: Objects, key: str = "") -> dict[str, Any]:
    """What comes of the operations that may read an object: a value, or an error of ours."""
    found: dict[str, Any] = {}
    first = layout.parse_folder(key.partition("/")[0]) or 0
    try:
        run = opened(objects)
    except crf.CheckrunError as error:
        return dict.fromkeys(operations(), error)
    for name, (number, operation) in operations().items():
        if number is not None and number < first:
            continue
        try:
            found[name] = operation(run)
        except crf.CheckrunError as error:
            found[name] = error
    return found


@functools.cache
def intact() -> dict[str, Any]:
    found = outcomes(run_objects())
    assert not [value for name, value in found.items() if isinstance(value, crf.CheckrunError)]
    return found


def is_document(key: str) -> bool:
    return key.endswith((".json", ".gz"))


@st.composite
def alterations(draw: st.DrawFn, *, whole: bool) -> tuple[str, bytes | None]:
    """A key, and what stands there then; of a chunk with a checksum that fits, if it is to look `whole`."""
    objects = run_objects()
    kinds = {
        "documents": [key for key in objects if is_document(key) and not key.endswith("/zarr.json")],
        "commits": [layout.commit_key(number) for number in range(1, LAST + 1)],
        "metadata": [key for key in objects if key.count("/") > 1 and key.endswith("/zarr.json")],
        "chunks": [key for key in objects if "/c/" in key],
        "others": ["zarr.json", "tags/best.json"],
    }
    kind = draw(st.sampled_from(["documents", "documents", "documents", "chunks", "commits", "metadata", "others"]))
    key = draw(st.sampled_from(sorted(kinds[kind])))
    if draw(st.integers(0, 9)) == 0:
        data: bytes | None = objects[draw(st.sampled_from(sorted(kinds[kind])))]
    elif is_document(key) and draw(st.integers(0, 3)):
        data = draw(altered_documents(key, objects[key]))
    elif whole and "/c/" in key:
        prefix = prefix_of(objects, int(key[:8]))
        (entry,) = (entry for array, entry, _ in arrays_in(objects, prefix) if key.startswith(f"{array}/c/"))
        data = draw(altered_chunks(objects[key], entry))
    else:
        data = draw(altered_bytes(objects[key]))
    event(kind)
    return key, data


def altered(key: str, data: bytes | None) -> dict[str, bytes]:
    """The run with another object in one place, or none."""
    objects = dict(run_objects())
    del objects[key]
    return objects if data is None else objects | {key: data}


@pytest.mark.timeout(600)
@given(alterations(whole=False))
def test_altered_objects_are_errors_or_change_nothing(change: tuple[str, bytes | None]) -> None:
    """CHK-1, MAN-1, ZAR-3 to ZAR-5, COM-2: damage is an error that names it, never another value."""
    objects = altered(*change)
    expected = intact()
    with bounded():
        found = outcomes(objects, change[0])
        try:
            problems = bool(opened(objects).verify())
        except crf.CheckrunError:
            problems = True
        try:
            restored(opened(objects, "a"))
        except crf.CheckrunError:
            event("restore fails")
    failed = [name for name, outcome in found.items() if isinstance(outcome, crf.CheckrunError)]
    for name in set(found) - set(failed) - {"latest", "log", "tags"}:
        assert found[name] == expected[name], name
    if failed:
        assert problems, (failed[0], found[failed[0]])
    event("noticed" if failed else "not noticed")


@pytest.mark.timeout(600)
@given(alterations(whole=True))
def test_what_a_faulty_writer_makes_is_read_or_reported(change: tuple[str, bytes | None]) -> None:
    """CHK-1, CHK-2: no crash, no hang; what `verify` finds nothing wrong with can be read, and the reverse."""
    objects = sealed(altered(*change), change[0])
    with bounded():
        found = outcomes(objects, change[0])
        try:
            audit = opened(objects).audit()
        except crf.CheckrunError:
            event("does not open")
            return
        try:
            restored(opened(objects, "a"))
        except crf.CheckrunError:
            event("restore fails")
    for name, (number, _) in operations().items():
        error = found.get(name)
        if isinstance(error, crf.CheckrunError) and number in audit.safe and not is_expected(name, error):
            raise AssertionError(f"{name}: {error!r}, but {number} is said to be sound")
    event("noticed" if audit.problems else "not noticed")


def is_expected(name: str, error: crf.CheckrunError) -> bool:
    """Whether a sound checkpoint may refuse this: another was altered, or it has another history or other tables."""
    return isinstance(error, crf.HistoryPrunedError | crf.TableNotFoundError) or name.startswith("changes")
