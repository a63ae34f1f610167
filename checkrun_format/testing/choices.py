"""What a machine chooses from: how a save is made, how a store fails, what happens to tables, what is kept."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from hypothesis import strategies as st

from checkrun_format.errors import StorageError
from checkrun_format.retention import Keep
from checkrun_format.testing.stores import EVERY_CALL, WRITES, Fault
from checkrun_format.testing.tables import seeds


class Interrupted(BaseException):
    """A KeyboardInterrupt that cannot be confused with a real one."""


def _disk_full() -> StorageError:
    return StorageError(errno.ENOSPC, "the disk is full")


def faults() -> st.SearchStrategy[Fault]:
    """A call fails, before or after it took effect or halfway; the store is gone; or an acknowledgement is lost."""
    at, error = st.integers(1, 12) | st.integers(1, 150), st.sampled_from([_disk_full, Interrupted])
    calls = st.sampled_from([EVERY_CALL, WRITES])
    some = st.builds(Fault, at=at, how=st.sampled_from(["before", "after", "down"]), calls=calls, error=error)
    halves = st.builds(Fault, at=at, how=st.just("truncate"), calls=st.just(frozenset({"put"})), error=error)
    return some | halves | st.just(Fault(how="late"))


@dataclass(frozen=True, kw_only=True)
class How:
    """The choices of one save."""

    force_full: bool
    parent: str | int | None
    changed: str
    more: int
    bits: int | None
    store_as: str | None
    lazy: bool
    seed: int


def hows() -> st.SearchStrategy[How]:
    """Any choices."""
    return st.builds(
        How,
        force_full=st.sampled_from([False] * 9 + [True]),
        parent=st.sampled_from(["auto", "latest", None, 0, 1, 2, 3, -1]),
        changed=st.sampled_from(["ids", "ids", "mask", "set", "all"]),
        more=st.integers(0, 3),
        bits=st.sampled_from([None, 1, 2, 3, 4, 5, 8]),
        store_as=st.sampled_from([None, "float16", "bfloat16"]),
        lazy=st.booleans(),
        seed=seeds(),
    )


def keeps() -> st.SearchStrategy[Keep]:
    """Rules of retention that let go of much."""
    last, every = st.integers(1, 3), st.integers(2, 9)
    some = st.builds(Keep, last=last) | st.builds(Keep, every=every) | st.builds(Keep, last=last, every=every)
    return some | st.just(Keep(newer_than=0)) | st.just(Keep(newer_than=1e9))


Edit = tuple[str, int, int, int]
"""What happens to one table: operation, table, how many rows, seed."""


def edits() -> st.SearchStrategy[list[Edit]]:
    """What happens to the tables between two saves."""
    operations = ["update", "update", "grow", "grow", "shrink", "shrink", "new", "drop", "kind"]
    edit = st.tuples(st.sampled_from(operations), st.integers(0, 3), st.integers(0, 6), seeds())
    return st.lists(edit, max_size=4)
