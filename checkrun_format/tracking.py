"""Which rows changed: pending rows since the origin, and the rows that stored layers hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from checkrun_format.reader import StoredCheckpoint
from checkrun_format.resolver import stored_ids, tombstones
from checkrun_format.rows import Ids, KeySet, RowSet
from checkrun_format.state import All, TableSource


@dataclass(slots=True)
class Touched:
    """Rows or keys of one table that may differ between two states.

    Deleted keys are kept beside the others: which of them live is known only by the state that is saved.
    """

    rows: RowSet | KeySet
    everything: bool = False
    deleted: KeySet = field(default_factory=KeySet)

    @classmethod
    def nothing(cls, addressing: str) -> Touched:
        """No row at all."""
        return cls(RowSet() if addressing == "dense" else KeySet())

    @classmethod
    def whole(cls, addressing: str) -> Touched:
        """Every row."""
        touched = cls.nothing(addressing)
        touched.everything = True
        return touched

    def note(self, source: TableSource) -> None:
        """Add what a table says has changed."""
        if isinstance(source.changed, All):
            self.everything = True
        elif source.changed is not None:
            self.rows.add(source.changed)
        self.rows.add(source.deleted)
        self.deleted.add(source.deleted)

    def update(self, other: Touched) -> None:
        """Add all that another set holds."""
        self.everything |= other.everything
        self.deleted.update(other.deleted)
        if type(self.rows) is type(other.rows):
            self.rows.update(other.rows)  # type: ignore[arg-type]
        else:
            self.everything = True

    def copy(self) -> Touched:
        """An independent copy."""
        return Touched(self.rows.copy(), self.everything, self.deleted.copy())


def stored_by(layer: StoredCheckpoint, table: str) -> Touched:
    """The rows of a table that a checkpoint stores: those in which it may differ from its parent."""
    entry = layer.entry(table)
    if entry.storage == "full":
        return Touched.whole(entry.addressing)
    touched = Touched.nothing(entry.addressing)
    if entry.storage == "changed":
        for _, ids in stored_ids(layer, entry):
            touched.rows.add(ids)
        for keys in tombstones(layer, entry):
            touched.deleted.add(keys)
    return touched


def of_ids(addressing: str, ids: Ids, deleted: Ids) -> Touched:
    """Given rows or keys."""
    touched = Touched.nothing(addressing)
    touched.rows.add(ids)
    touched.deleted.add(deleted)
    return touched
