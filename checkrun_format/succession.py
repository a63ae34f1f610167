"""What a checkpoint says of the ones before it, and whether that is so; for audits (FORMAT.md COM-6, 5.4, LAY-3)."""

from __future__ import annotations

import itertools

from checkrun_format import layout
from checkrun_format.chain import History
from checkrun_format.errors import CheckrunError, DamagedError, HistoryPrunedError
from checkrun_format.manifest import TableEntry
from checkrun_format.reader import StoredCheckpoint


def check_succession(history: History, stored: StoredCheckpoint) -> None:
    """Compare a checkpoint with its predecessor, while that is committed and can be read.

    Raises
    ------
    DamagedError
        It is another predecessor than was meant (MAN-2), the parent is not of its chain (COM-6), or `dropped` or the
        storage of a table is not what 5.4, LAY-3 and LAY-7 say.
    """
    before = _predecessor(history, stored)
    if before is None:
        return
    _check_parent(history, stored, before)
    try:
        tables = {entry.name: entry for entry in before.manifest.tables}
    except CheckrunError:
        return  # told of its own number
    place = stored.place("manifest.json")
    strangers = [name for name in stored.manifest.dropped if name not in tables]
    if strangers:
        raise DamagedError(place, f"dropped: its predecessor has no table {strangers[0]!r} (5.4)")
    if stored.commit.rollback_to is None:
        problem = _problem(stored, tables)
        if problem:
            raise DamagedError(place, problem)


def _predecessor(history: History, stored: StoredCheckpoint) -> StoredCheckpoint | None:
    """The predecessor, while it is committed, checked to be the one that was meant (MAN-2)."""
    number = stored.commit.predecessor
    if number is None:
        return None
    try:
        history.get(number)
    except CheckrunError:
        return None  # told of its own number
    try:
        return next(itertools.islice(history.predecessors(stored, 0), 1, None), None)
    except HistoryPrunedError:
        return None


def _check_parent(history: History, stored: StoredCheckpoint, before: StoredCheckpoint) -> None:
    parent, met = stored.commit.parent, before.commit.sequence
    if parent is None:
        return
    try:
        for layer in history.chain(before):
            met = layer.commit.sequence
            if met <= parent:
                break
    except CheckrunError:
        return  # told of its own number
    if met != parent:
        problem = f"its parent {parent} is not in the chain of its predecessor {before.commit.sequence} (COM-6)"
        raise DamagedError(layout.commit_key(stored.commit.sequence), problem)


def _problem(stored: StoredCheckpoint, before: dict[str, TableEntry]) -> str | None:
    ours = {entry.name: entry for entry in stored.manifest.tables}
    for name, entry in before.items():
        continued = name in ours and ours[name].kind == entry.kind
        if not continued and name not in stored.manifest.dropped:
            return f"table {name!r} of the predecessor is not continued, and not in dropped (5.4)"
    for name, entry in ours.items():
        if entry.storage == "full":
            continue
        other = before.get(name)
        if other is None or other.kind != entry.kind:
            return f"table {name!r} is {entry.storage}, and its predecessor has no such table (LAY-3, LAY-7)"
        if entry.rows is not None and other.rows is not None and entry.rows < other.rows:
            return f"table {name!r} is {entry.storage}, with {entry.rows} rows after {other.rows} (LAY-3)"
    return None
