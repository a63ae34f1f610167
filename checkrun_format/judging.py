"""What several writers stored, judged before it is committed (FORMAT.md 8, 9.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from checkrun_format.arranging import unchanged_entry, with_statistics
from checkrun_format.chunks import ChunkReader
from checkrun_format.commit import Claim
from checkrun_format.errors import DamagedError, InvalidInputError
from checkrun_format.ledger import Ledger
from checkrun_format.manifest import Commit, TableEntry, commit_object, parse_occupant
from checkrun_format.partlists import check_coverage, merged_statistics, merged_tables, table_entry
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.resolver import check_layer
from checkrun_format.rows import Ids, RowSet, union
from checkrun_format.stores import Store
from checkrun_format.tracking import Touched
from checkrun_format.writer import PartList


class Overlay:
    """The tables of a save by several writers, laid over a parent.

    Parameters
    ----------
    store : Store
    ledger : Ledger
        What the coordinator knows of the run.
    below : StoredCheckpoint or None
        The parent; None: the save is a base.
    """

    def __init__(self, store: Store, ledger: Ledger, below: StoredCheckpoint | None) -> None:
        self._store = store
        self._ledger = ledger
        self.below = below

    def entries(
        self, part_lists: Sequence[PartList], unchanged: Sequence[str], dropped: Sequence[str]
    ) -> list[TableEntry]:
        """The tables that the writers stored, checked against one another and against the parent."""
        statistics = merged_statistics(part_lists)
        entries = [table_entry(told, statistics.get(told["name"], {})) for told in merged_tables(part_lists)]
        entries = [_with_fields(entry, self.below) for entry in entries]
        entries += [_unchanged_over(self.below, name, entries) for name in unchanged]
        self._check_staged(entries, dropped)
        check_coverage(entries, part_lists)
        return entries

    def _check_staged(self, entries: Sequence[TableEntry], dropped: Sequence[str]) -> None:
        before = {entry.name: entry for entry in self._ledger.latest_tables()}
        names = Counter(entry.name for entry in entries)
        forgotten = sorted(before.keys() - names.keys() - set(dropped))
        if forgotten:
            raise InvalidInputError(
                f"table {forgotten[0]!r} of the latest checkpoint has no part; name it in unchanged= or dropped="
            )
        wrong = [name for name in dropped if name in names or name not in before]
        if wrong:
            raise InvalidInputError(f"dropped: table {wrong[0]!r} is not in the latest checkpoint, or is stored here")
        for entry in entries:
            if names[entry.name] > 1:
                raise InvalidInputError(f"unchanged: table {entry.name!r} is named twice")
            if entry.storage != "full":
                self.check_increment(entry, before.get(entry.name))

    def check_increment(self, entry: TableEntry, before: TableEntry | None) -> None:
        """Refuse a changed or unchanged table that must be full, or has more to store."""
        lower = None if self.below is None or not self.below.has(entry.name) else self.below.entry(entry.name)
        lowest = max((other.rows or 0 for other in (lower, before) if other is not None), default=0)
        fits = lower is not None and before is not None and entry.kind == lower.kind and (entry.rows or 0) >= lowest
        if not fits:
            raise InvalidInputError(
                f"table {entry.name!r} is new, was absent, shrank, or has other fields than in the parent: store it "
                "full (LAY-2, LAY-3)"
            )
        if entry.storage == "unchanged" and self.needed(entry).size:
            raise InvalidInputError(f"unchanged: table {entry.name!r} has rows that changed since the parent: put them")

    def needed(self, entry: TableEntry) -> Ids:
        """The rows or keys that parts must hold: of a changed table, what is new, stored since, or pending."""
        if entry.storage == "full" or self.below is None:
            return np.arange(entry.rows or 0)
        since = self._ledger.since(self.below, entry.name, entry.addressing)
        since.update(self._ledger.pending.get(entry.name, Touched.nothing(entry.addressing)))
        if since.everything:
            raise InvalidInputError(f"table {entry.name!r} changed as a whole since the parent: store it full")
        if isinstance(since.rows, RowSet):
            since.rows.add(np.arange(self.below.entry(entry.name).rows or 0, entry.rows or 0))
            return since.rows.ids(entry.rows)
        return union(since.rows.ids(), since.deleted.ids())

    def check_rows(self, claim: Claim, document: bytes) -> None:
        """Read back which rows the parts list, and refuse what a reader would refuse (LAY-1, LAY-3, LAY-4)."""
        committed = parse_occupant(document, claim.sequence)
        assert isinstance(committed, Commit)
        staged = StoredCheckpoint(self._store, ChunkReader(self._store), committed, commit_object(document))
        for entry in staged.manifest.tables:
            listed = any(part.first_row < 0 for part in staged.parts(entry.name))
            if listed or entry.storage == "changed":
                try:
                    check_layer(staged, entry, self.needed(entry))
                except DamagedError as error:
                    if "/c/" in error.place:  # an object that does not read back as it was written
                        raise
                    raise InvalidInputError(error.problem) from error


def _with_fields(entry: TableEntry, below: StoredCheckpoint | None) -> TableEntry:
    """A table of which nothing but tombstones was put has the fields that it has in the parent."""
    if not entry.fields and below is not None and below.has(entry.name):
        return msgspec.structs.replace(entry, fields=with_statistics(below.entry(entry.name), {}).fields)
    if not entry.fields:
        raise InvalidInputError(f"table {entry.name!r}: no writer put a field")
    return entry


def _unchanged_over(below: StoredCheckpoint | None, name: str, entries: Sequence[TableEntry]) -> TableEntry:
    if below is None or not below.has(name) or any(entry.name == name for entry in entries):
        raise InvalidInputError(f"unchanged: table {name!r} is not in the parent, or was given as parts too")
    return unchanged_entry(below.entry(name))
