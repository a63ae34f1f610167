"""A trainer as a machine plays it: its tables, what happens to them, and what it tells a save."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from checkrun_format.state import ALL, State, Table
from checkrun_format.testing.choices import Edit, How
from checkrun_format.testing.model import Held, Rows, Snapshot
from checkrun_format.testing.tables import KEYS, Array, Kind, taken

NAMES = ("user", "ä/b", "", "zarr.json")
"""What the tables are called."""

MOST_ROWS = 15
"""How far a dense table grows."""

Some = set[int] | None
"""Rows or keys; None: any."""


@dataclass(kw_only=True)
class Trainer:
    """The tables that a trainer holds.

    Attributes
    ----------
    held : dict
        The tables.
    told : dict
        Kind and rows of each table at the last save.
    named : dict
        What that save named as changed.
    owed : dict
        For each table the rows that saves were told since the last commit: what the next one has to store.
    coarsest : dict
        The fewest bits that a table was ever stored with, None if always raw.
    counter : int
        How many saves were tried; their step.
    """

    held: dict[str, Held] = field(default_factory=dict)
    told: dict[str, tuple[Kind, set[int]]] = field(default_factory=dict)
    named: dict[str, Some] = field(default_factory=dict)
    owed: dict[str, Some] = field(default_factory=dict)
    coarsest: dict[str, int] = field(default_factory=dict)
    counter: int = 0

    # What happens to its tables ---------------------------------------------------------------------------------------

    def edit(self, edits: Iterable[Edit]) -> None:
        """Train, grow, shrink, begin and drop tables."""
        for operation, pick, count, seed in edits:
            absent = [name for name in NAMES if name not in self.held]
            if operation == "new" and absent:
                kind = Kind(key_dtype=[None, "int64", "uint64"][seed % 3], columns=1 + seed % 5, moments=seed % 2 > 0)
                self.held[absent[pick % len(absent)]] = Held.fresh(kind, count, seed)
            elif self.held:
                self.edit_table(sorted(self.held)[pick % len(self.held)], operation, count, seed)

    def edit_table(self, name: str, operation: str, count: int, seed: int) -> None:
        """One thing that happens to one table."""
        held, rng = self.held[name], np.random.default_rng(seed)
        some = rng.permutation(held.ids)[:count]
        if operation == "drop":
            del self.held[name]
        elif operation == "kind":
            self.held[name] = self.other_kind(held, seed)
        elif operation == "grow" and held.kind.keyed:
            held.put(np.sort(rng.permutation(np.array(KEYS))[:count]), seed)
        elif operation == "grow":
            held.put(np.arange(len(held.ids), min(len(held.ids) + count, MOST_ROWS)), seed)
        elif operation == "shrink" and held.kind.keyed:
            held.keep(~np.isin(held.ids, some))
        elif operation == "shrink":
            held.keep(slice(0, max(0, len(held.ids) - count)))
            held.gone = set()
        else:
            held.put(np.sort(some), seed)

    def other_kind(self, held: Held, seed: int) -> Held:
        """The table with other columns, dtype or addressing, all its values new."""
        old = held.kind
        which = seed % 4
        kind = Kind(
            key_dtype=(None if old.keyed else "int64") if which == 0 else old.key_dtype,
            weight=("float16" if old.weight == "float32" else "float32") if which == 1 else old.weight,
            columns=old.columns % 5 + 1 if which == 2 else old.columns,
            moments=not old.moments if which == 3 else old.moments,
        )
        fresh = Held.fresh(kind, len(held.ids), seed)
        if which:
            fresh.ids = held.ids
            fresh.touched, fresh.gone = set(held.ids.tolist()), held.gone
        return fresh

    def take_up(self, state: State, snapshot: Snapshot) -> None:
        """Go on from what was read of a checkpoint that holds this snapshot."""
        self.held, self.told, self.owed = {}, {}, {}
        for name, rows in snapshot.tables.items():
            table = state.tables[name]
            weight = table["weight"]
            kind = Kind(
                key_dtype=rows.key_dtype,
                weight=weight.dtype.name,
                columns=weight.shape[1],
                moments="moments" in table.fields,
            )
            self.held[name] = Held(kind=kind, ids=rows.ids.copy(), fields=dict(table.fields))
            self.told[name] = (kind, set(rows.ids.tolist()))

    # What it hands to a save ------------------------------------------------------------------------------------------

    def hand_over(self, how: How) -> tuple[State, Snapshot]:
        """The state as it is handed to a save, and what must then be read."""
        self.counter += 1
        rest: dict[str, Any] = {
            "tensors": {"t": np.arange(self.counter % 7, dtype=np.float32)},
            "extra": {"counter": self.counter},
        }
        tables = {name: self._table(name, held, how) for name, held in self.held.items()}
        if how.force_full:
            for table in tables.values():
                table.changed = None  # nothing need be named
        snapshot = Snapshot(
            tables={name: Rows.of(held) for name, held in self.held.items()}, step=self.counter, **copy.deepcopy(rest)
        )
        return State(tables=tables, **rest), snapshot

    def is_told(self, how: How, before: Iterable[str]) -> None:
        """A save was handed everything; `before` are the tables of the latest checkpoint."""
        for name in {*before, *self.held}:
            self._owe(name, None if how.force_full else self.changes(name))
        for held in self.held.values():
            held.touched, held.gone = set(), set()
        self.note_bits(how)
        self.told = {name: (held.kind, set(held.ids.tolist())) for name, held in self.held.items()}

    def note_bits(self, how: How) -> None:
        """The tables may be stored with so many bits from now on."""
        if how.bits is not None:
            self.coarsest |= {name: min(how.bits, self.coarsest.get(name, 8)) for name in self.held}

    def changes(self, name: str) -> Some:
        """The rows of a table that changed since a save was last told, and those that it named besides."""
        held, told, named = self.held.get(name), self.told.get(name), self.named.get(name, set())
        if held is None or told is None or told[0] != held.kind or named is None:
            return None
        return held.touched | held.gone | named | (told[1] ^ set(held.ids.tolist()))

    def _owe(self, name: str, some: Some) -> None:
        owed = self.owed.get(name, set())
        self.owed[name] = None if owed is None or some is None else owed | some

    def _table(self, name: str, held: Held, how: How) -> Table:
        """The table as it is handed to a save: rows in any order if keyed, changed rows in one of their forms."""
        rng = np.random.default_rng(how.seed)
        order = rng.permutation(len(held.ids)) if held.kind.keyed else np.arange(len(held.ids))
        keys = held.ids[order] if held.kind.keyed else None
        return Table(
            taken(copy.deepcopy(held.fields), order),
            keys=keys.view(held.kind.key_dtype) if keys is not None else None,
            changed=self._changed(name, held, how, order, rng),
            deleted=self._deleted(held, how, rng),
            bits=how.bits,
            store_as={} if how.store_as is None else {"slow": how.store_as},
        )

    def _changed(self, name: str, held: Held, how: How, order: Array, rng: np.random.Generator) -> Any:
        must = set(held.touched)
        told = self.told.get(name)
        if told is None or told[0] != held.kind:
            must = set(rng.permutation(list(must))[: how.more].tolist())  # all is new to a save: nothing need be named
        elif how.lazy:
            must &= told[1]  # new rows and keys need not be named
        more = rng.permutation(held.ids)[: how.more].tolist()
        named = np.array(sorted(must | set(more)), np.int64)
        self.named[name] = None if how.changed == "all" else set(named.tolist())
        if how.changed == "all":
            return ALL
        if how.changed == "mask":
            return np.isin(held.ids, named)[order]
        if how.changed == "set" and held.kind.key_dtype != "uint64":
            return set(named.tolist())
        shuffled = rng.permutation(named)
        return shuffled.view(np.uint64) if held.kind.key_dtype == "uint64" else shuffled

    def _deleted(self, held: Held, how: How, rng: np.random.Generator) -> Any:
        if not held.kind.keyed or how.lazy:
            return None  # that keys are gone is seen
        return rng.permutation(np.array(sorted(held.gone), np.int64)).view(held.kind.key_dtype)
