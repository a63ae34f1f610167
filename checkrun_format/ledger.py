"""What a writer knows of the run it writes: head, latest checkpoint, origin, and what changed since (FORMAT.md 9.1)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from checkrun_format.blocks import FieldPlan
from checkrun_format.chain import History
from checkrun_format.errors import (
    CheckrunError,
    ConcurrentCommitError,
    DamagedError,
    InvalidInputError,
    PrunedError,
    StorageError,
)
from checkrun_format.manifest import Commit, TableEntry
from checkrun_format.planning import Below
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.resolver import live_keys
from checkrun_format.rows import Ids
from checkrun_format.state import TableSource
from checkrun_format.tracking import Touched, stored_by

TAKEOVER = "takeover"
"""Who decided about a checkpoint that was committed unchanged (HEA-4)."""


class Ledger:
    """A writer's books.

    Attributes
    ----------
    head : int
        The expected head (HEA-1).
    latest : Commit or None
        The latest checkpoint: the predecessor of the next.
    origin : int or None
        The checkpoint that the trainer's state equals, apart from `pending`.
    pending : dict
        For each table, the rows changed since the origin that no save has committed.
    attempts : dict
        Attempts of this writer that may have landed unseen, and whether each was a save of the trainer's state.
    restored : bool
        A restore waits to be counted by the next commit.
    lost : str or None
        Why this writer may not save any more.
    settled : dict
        Tables that this writer stored full and has encoded alike ever since, and how: only there does a row that has
        not changed get the same bits when it is stored again.
    lossy : set
        Tables that this writer stored, since its last restore, otherwise than the trainer has them.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self.head = history.head()
        latest = history.latest(skip_damaged=True)
        self.latest: Commit | None = None if latest is None else history.get(latest).commit
        self.origin: int | None = None
        self.pending: dict[str, Touched] = {}
        self.attempts: dict[str, bool] = {}
        self.restored = False
        self.lost: str | None = None
        self.settled: dict[str, list[FieldPlan]] = {}
        self.lossy: set[str] = set()
        self._layers: dict[int, dict[str, Touched]] = {}
        self._ours: dict[int, Commit] = {}
        self._chain: list[Commit] = []
        self._keys: dict[str, Ids] = {}

    def copy(self) -> Ledger:
        """Books of the same content, to be written into without consequences."""
        other = copy.copy(self)
        other.attempts, other.settled, other.lossy = dict(self.attempts), dict(self.settled), set(self.lossy)
        other.pending = {name: touched.copy() for name, touched in self.pending.items()}
        return other

    # What may be laid over what ---------------------------------------------------------------------------------------

    def check_may_save(self) -> None:
        """Refuse a writer that lost its number to another."""
        if self.lost is not None:
            raise ConcurrentCommitError(f"this Run may not save any more: {self.lost}")

    @property
    def has_legal_origin(self) -> bool:
        """Whether the origin is the latest checkpoint, be it that it has been pruned since."""
        return self.latest is not None and self.origin == self.latest.sequence

    def legal_origin(self) -> StoredCheckpoint | None:
        """The origin, if it is the latest checkpoint (HEA-2)."""
        return self._history.get(self.latest.sequence) if self.latest is not None and self.has_legal_origin else None

    def chain(self, origin: StoredCheckpoint) -> list[Commit]:
        """The commits of a legal origin's chain, newest first; what this writer has read or written of it is known."""
        if not self._chain or self._chain[0].sequence != origin.commit.sequence:
            self._chain = [below.commit for below in self._history.chain(origin)]
        return self._chain

    def restores(self) -> int:
        """The count of restores that the next commit carries (5.2)."""
        before = 0 if self.latest is None else self.latest.restores
        return before + (1 if self.restored else 0)

    def latest_tables(self) -> list[TableEntry]:
        """Tables of the latest checkpoint; none if they cannot be read (then the save is a base)."""
        if self.latest is None:
            return []
        try:
            return self._history.get(self.latest.sequence).manifest.tables
        except (DamagedError, PrunedError):
            return []

    def continuing(self, entries: Sequence[TableEntry]) -> list[TableEntry]:
        """The tables of a save that continue the predecessor's.

        None without an origin; nor a keyed one of which everything may have changed: who knows which keys are gone?
        """
        if not self.has_legal_origin:
            return []
        unknown = {name for name, touched in self.pending.items() if touched.everything}
        return [entry for entry in entries if entry.addressing == "dense" or entry.name not in unknown]

    def dropped(self, entries: Sequence[TableEntry]) -> list[str]:
        """Tables of the predecessor that these entries do not continue (5.4)."""
        ours = {entry.name: entry for entry in entries}
        before = self.latest_tables()
        return [entry.name for entry in before if entry.name not in ours or entry.kind != ours[entry.name].kind]

    def check_tables(self, sources: Mapping[str, TableSource], dropped: Sequence[str]) -> None:
        """Refuse a state that forgets a table, or what changed in one."""
        known = {entry.name for entry in self.latest_tables()}
        wrong = [name for name in dropped if name in sources or name not in known]
        if wrong:
            where = "is in the state" if wrong[0] in sources else "is not in the latest checkpoint"
            raise InvalidInputError(f"dropped: table {wrong[0]!r} {where}")
        forgotten = sorted(known - set(sources) - set(dropped))
        if forgotten:
            new = sorted(set(sources) - known)
            mistaken = f"; or is it what the state calls {', '.join(map(repr, new[:3]))}?" if new else ""
            raise InvalidInputError(
                f"table {forgotten[0]!r} of the latest checkpoint is not in the state; if it is gone for good, name it "
                f"in dropped=[...] (tables missing in all: {len(forgotten)}){mistaken}"
            )
        origin = self.legal_origin()
        for name, source in sources.items():
            if origin is not None and origin.has(name) and source.changed is None:
                raise InvalidInputError(
                    f"table {name!r} has been saved before: give changed= (row ids, a mask, or checkrun_format.ALL)"
                )

    def increments(self, base: Commit) -> list[Commit]:
        """The increments by which the state came from a base, oldest first.

        What was abandoned by a rollback is none of them, nor are rollbacks and takeovers themselves: they hold no rows.
        """
        met: dict[int, Commit] = {}
        below = self.latest
        while below is not None and below.sequence > base.sequence:
            met[below.sequence] = below
            number = below.predecessor if below.rollback_to is None else below.rollback_to
            try:
                below = None if number is None else self._ours.get(number) or self._history.get(number).commit
            except StorageError:
                raise
            except CheckrunError:
                break  # pruned or damaged: what is left of the history decides
        self._ours = met
        return [c for c in reversed(met.values()) if c.rollback_to is None and c.policy.name != TAKEOVER]

    # What changed -----------------------------------------------------------------------------------------------------

    def note(self, sources: Mapping[str, TableSource], dropped: Sequence[str]) -> None:
        """Remember what changed, until a save commits: all of a table that does not continue the origin's."""
        origin = self.legal_origin()
        if origin is None:
            return
        for name in dropped:
            self.pending[name] = Touched.whole("dense")
        for name, source in sources.items():
            entry = origin.entry(name) if origin.has(name) else None
            noted = Touched.nothing(source.addressing)
            if entry is None or source.kind != entry.kind:
                noted.everything = True
            else:
                noted.note(source)
                noted.rows.add(np.arange(source.rows, entry.rows or 0))  # gone for now: new if the table grows again
                if source.keys is not None and not noted.everything:
                    self._compare_keys(origin, source.name, source.keys, noted)
            if name in self.pending:
                noted.update(self.pending[name])
            self.pending[name] = noted

    def _compare_keys(self, origin: StoredCheckpoint, name: str, keys: Ids, noted: Touched) -> None:
        """Note the keys that came or went since the origin, whether the trainer named them or not."""
        try:
            if name not in self._keys:
                self._keys = {**self._keys, name: live_keys(self._history.layers(origin, name))}
        except (DamagedError, PrunedError):
            noted.everything = True  # the origin cannot be read: nothing is laid over it
            return
        before = self._keys[name]
        gone = np.setdiff1d(before, keys, assume_unique=True)
        noted.rows.add(np.setdiff1d(keys, before, assume_unique=True))
        noted.rows.add(gone)
        noted.deleted.add(gone)

    def below(self, source: TableSource, parent: StoredCheckpoint | None) -> Below | None:
        """What a table would be laid over; None without an origin."""
        origin, name = self.legal_origin(), source.name
        if origin is None:
            return None
        in_origin = origin.entry(name) if origin.has(name) else None
        in_parent = parent.entry(name) if parent is not None and parent.has(name) else None
        since = Touched.nothing(source.addressing)
        if in_parent is not None and parent is not None:
            since = self.since(parent, name, source.addressing)
        pending = self.pending.get(name, Touched.nothing(source.addressing))
        return Below(parent=in_parent, origin=in_origin, since_parent=since, pending=pending)

    def since(self, parent: StoredCheckpoint, name: str, addressing: str) -> Touched:
        """The rows that the layers above a parent hold: those in which the origin may differ from it."""
        origin, touched = self.legal_origin(), Touched.nothing(addressing)
        assert origin is not None
        for layer in self._history.chain(origin):
            if layer.commit.sequence == parent.commit.sequence or touched.everything:
                break
            known = self._layers.setdefault(layer.commit.sequence, {})
            if name not in known:
                known[name] = stored_by(layer, name) if layer.has(name) else Touched.whole(addressing)
            touched.update(known[name])
        return touched

    # What happened ----------------------------------------------------------------------------------------------------

    def restored_from(self, sequence: int) -> None:
        """The trainer's state now equals a checkpoint, and stems no more from attempts made before."""
        self.origin, self.pending, self._layers, self.restored = sequence, {}, {}, True
        self.settled, self.lossy, self._keys = {}, set(), {}
        self.attempts = dict.fromkeys(self.attempts, False)

    def compared_with(self, sequence: int, settled: Mapping[str, list[FieldPlan]]) -> None:
        """The state was compared with a checkpoint and equals it but for rows that the next save names (HEA-2).

        It equals what was encoded, not what is read: of tables that are not settled, any row may get other bits.
        """
        self.origin, self.pending, self._layers, self._keys = sequence, {}, {}, {}
        names = {entry.name for entry in self._history.get(sequence).manifest.tables}
        self.settled, self.lossy = dict(settled), names - settled.keys()
        self.attempts = dict.fromkeys(self.attempts, False)

    def as_before(self, name: str, plans: Sequence[FieldPlan]) -> list[FieldPlan] | None:
        """The plans by which a table is encoded to the same bits as before; None if that cannot be."""
        settled = self.settled.get(name)
        if settled is None or [replace(f, qparams=None) for f in settled] != list(plans):
            return None
        return settled

    def saved(
        self,
        committed: Commit,
        stored: Mapping[str, Touched] | None = None,
        settled: Mapping[str, list[FieldPlan]] | None = None,
        keys: Mapping[str, Ids] | None = None,
    ) -> None:
        """The trainer's state was committed; with the rows that it holds, and the live keys, if they are at hand."""
        self._move_head(committed)
        self.settled, self._keys = dict(settled or {}), dict(keys or {})
        self.origin, self.pending, self.attempts = committed.sequence, {}, {}
        if stored is not None:
            self._layers[committed.sequence] = dict(stored)
        chain = {committed.sequence, *(number for number in self._layers if number <= (committed.parent or 0))}
        self._layers = {number: rows for number, rows in self._layers.items() if number in chain}

    def copied(self, committed: Commit) -> None:
        """A checkpoint was committed again: the origin moves along, unless it was rolled back (RBK-2, CMP-1)."""
        continues = committed.rollback_to is None and self.origin == committed.predecessor
        self._move_head(committed)
        self.origin = committed.sequence if continues else None
        self.settled = self.settled if continues else {}
        self.pending = self.pending if continues else {}
        self._keys = self._keys if continues else {}
        self.attempts, self._layers = {}, {}

    def landed(self, committed: Commit) -> None:
        """An attempt that was given up has landed after all (HEA-3): its rows stay pending."""
        continues = self.attempts[committed.attempt] and self.has_legal_origin
        self._move_head(committed)
        self.origin = committed.sequence if continues else None
        self.settled, self._layers, self._keys = {}, {}, {}

    def _move_head(self, committed: Commit) -> None:
        """Go on from a commit of ours; a restore that it counts is counted."""
        if committed.restores > (0 if self.latest is None else self.latest.restores):
            self.restored = False
        self.head, self.latest = committed.sequence, committed
        self._ours[committed.sequence] = committed
        chain = [below for below in self._chain if below.sequence <= (committed.parent or 0)]
        known = committed.parent is None or (bool(chain) and chain[0].sequence == committed.parent)
        self._chain = [committed, *chain] if known else []
