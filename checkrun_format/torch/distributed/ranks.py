"""A save by several ranks: what each tells, what the coordinator decides, and what each remembers until a commit."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from torch import distributed as dist

from checkrun_format import layout
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import CheckpointNotFoundError, CheckrunError, InvalidInputError, RankError
from checkrun_format.extra import extra_json
from checkrun_format.manifest import Record
from checkrun_format.rows import Ids, union
from checkrun_format.run import Run, open_run
from checkrun_format.staging import Save, StagedWriter, Token
from checkrun_format.state import ALL, All
from checkrun_format.torch.distributed.shards import Choice, Shard, held_rows, inside, shared_tables

_T = TypeVar("_T")

_NONE: Ids = np.zeros(0, np.int64)


def pack(ids: Ids) -> bytes:
    """Ascending ids as few bytes."""
    return zlib.compress(np.diff(ids, prepend=np.int64(0)).astype("<i8").tobytes(), 1)


def unpack(data: bytes) -> Ids:
    """The inverse of `pack`."""
    return np.cumsum(np.frombuffer(zlib.decompress(data), "<i8"), dtype=np.int64)


class Held(Record, frozen=True, kw_only=True):
    """A shard, without its values."""

    table: str
    field: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    of: int
    width: int | None
    dtype: str

    @classmethod
    def of_shard(cls, shard: Shard) -> Held:
        """What a shard is."""
        return cls(**{name: getattr(shard, name) for name in cls.__struct_fields__})

    def shard(self) -> Shard:
        """As a shard."""
        return Shard(**msgspec.structs.asdict(self))


class Report(Record, frozen=True, kw_only=True):
    """What one rank tells the coordinator before a save."""

    held: list[Held]
    whole: list[str]
    """Tables of which any row may have changed."""
    tensors: list[str]
    """Names of its dense tensors."""
    told: list[str] | None
    """Tables (None: all) of which `rows` has every changed row that is known; of others, those not held here."""
    rows: dict[str, bytes]
    step: int | None = None
    """At which it saves, if it says so."""
    extra: bytes | None = None
    """Its trainer's state as JSON, if those of all ranks are stored."""


class Order(Record, frozen=True, kw_only=True):
    """What the coordinator tells every rank."""

    token: Token
    storage: dict[str, str]
    of: dict[str, int]
    known: dict[str, int]
    """Rows of each table in the predecessor: those from there on are new."""
    exact: list[str]
    """Tables of which only rows that changed are recent."""
    shared: list[str]
    """Tables of which several ranks hold the same rows: each tells every changed row that it knows."""
    rows: dict[str, bytes]
    """Changed rows that were told."""
    holders: dict[str, list[int]]
    """The ranks that hold anything of a table."""
    owners: dict[str, int]
    """Which rank stores a dense tensor that rank 0 does not have: the lowest that has it."""


class Fields(dict[str, tuple[str, int | None]]):
    """The fields of a table, name to (dtype, columns), as all ranks describe them."""

    def __init__(self, table: str) -> None:
        super().__init__()
        self.table = table
        self.rows: int | None = None

    def add(self, rank: int, held: Held) -> None:
        """Add what a rank holds; all must agree."""
        told = (held.dtype, held.width)
        if self.rows not in (None, held.of) or self.setdefault(held.field, told) != told:
            raise InvalidInputError(
                f"table {self.table!r}, field {held.field!r}: rank {rank} has {held.of} rows of {told}, another "
                f"{self.rows} of {self.get(held.field)}"
            )
        self.rows = held.of


class Coordinator:
    """The one rank that begins and commits."""

    def __init__(self, save: Save, order: Order, dropped: Sequence[str], extra: Any) -> None:
        self._save = save
        self._dropped = dropped
        self._extra = extra
        self._extra_is_large = len(extra_json(extra)) > layout.MAX_INLINE_EXTRA
        self.order = order

    @classmethod
    def begin(
        cls,
        run: Run,
        reports: Sequence[Report],
        *,
        step: int | None = None,
        parent: int | str | None = "auto",
        dropped: Sequence[str] = (),
        extra: Any = None,
    ) -> Coordinator:
        """Begin a save of what all ranks told.

        Raises
        ------
        InvalidInputError, ConcurrentCommitError, StorageError
        """
        fields: dict[str, Fields] = {}
        for rank, report in enumerate(reports):
            if step is not None and report.step not in (None, step):
                raise InvalidInputError(
                    f"rank {rank} saves step {report.step}, rank 0 step {step}: call save at the same step on all ranks"
                )
            for held in report.held:
                fields.setdefault(held.table, Fields(held.table)).add(rank, held)
        save = run.begin(step=step, writers=len(reports), parent=parent)
        shared = shared_tables([[held.shard() for held in report.held] for report in reports])
        whole = {table for report in reports for table in report.whole}
        # Of a table found to be shared just now, ranks have not told all that they know.
        whole |= {table for table in shared for told in reports if told.told is not None and table not in told.told}
        cut = {h.table for report in reports for h in report.held if h.columns not in (None, (0, h.width))}
        storage, known, exact = {}, {}, []
        for table, told in fields.items():
            assert told.rows is not None
            outlook = save.outlook(table, rows=told.rows, fields=told)
            storage[table] = "full" if table in whole else outlook.storage
            known[table] = outlook.known_rows
            if outlook.continues and table not in whole and not (outlook.quantized and table in cut):
                exact.append(table)
        order = Order(
            token=save.token,
            storage=storage,
            of={table: told.rows or 0 for table, told in fields.items()},
            known=known,
            exact=exact,
            shared=sorted(shared),
            rows={table: pack(_union(reports, table)) for table in fields if any(table in r.rows for r in reports)},
            holders={
                table: [n for n, r in enumerate(reports) if any(h.table == table for h in r.held)] for table in fields
            },
            owners=_owners(reports),
        )
        return cls(save, order, dropped, extra)

    @property
    def token(self) -> Token:
        """The token of the save."""
        return self._save.token

    def writer(self, rank: int) -> StagedWriter:
        """The coordinator's own writer."""
        writer = self._save.writer(rank)
        if self._extra_is_large:
            writer.put_extra(self._extra)
        return writer

    def commit(self, part_lists: Sequence[Mapping[str, Any]], *, step: int | None = None) -> Checkpoint:
        """Commit what all ranks stored."""
        stored = {table["name"] for part_list in part_lists for table in part_list["tables"]}
        unchanged = [name for name, kind in self.order.storage.items() if kind == "changed" and name not in stored]
        extra = None if self._extra_is_large else self._extra
        return self._save.commit(part_lists, unchanged=unchanged, dropped=self._dropped, extra=extra, step=step)


def _owners(reports: Sequence[Report]) -> dict[str, int]:
    owners: dict[str, int] = {}
    for rank, report in reversed(list(enumerate(reports))):
        owners |= dict.fromkeys(report.tensors, rank)
    return {name: rank for name, rank in owners.items() if rank}


def _union(reports: Sequence[Report], table: str) -> Ids:
    return union(*(unpack(report.rows[table]) for report in reports if table in report.rows))


@dataclass(slots=True)
class Changed:
    """Rows of one table that changed."""

    rows: Ids = field(default_factory=_NONE.copy)
    everything: bool = False

    def add(self, rows: Ids | All) -> None:
        """Add rows."""
        if isinstance(rows, All):
            self.everything = True
        else:
            self.rows = union(self.rows, rows)

    def update(self, other: Changed) -> None:
        """Add all of another."""
        self.rows = union(self.rows, other.rows)
        self.everything |= other.everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What this rank stored of a table at a checkpoint: rows (None: all) among these ranges."""

    rows: Ids | None
    ranges: Sequence[tuple[int, int]]


class Member:
    """What one rank remembers between saves.

    Rows that it was told are handed to an attempt, and kept until that attempt is seen to be committed; rows that it
    stored are kept as long as their checkpoint may be laid under another.
    """

    def __init__(self) -> None:
        self._shared: set[str] | None = None  # unknown as long as there was no save
        self._pending: dict[str, Changed] = {}
        self._handed: dict[str, Changed] = {}
        self._attempt: Token | None = None
        self._storing: dict[str, Stored] = {}
        self._stored: dict[int, dict[str, Stored]] = {}

    @property
    def waits(self) -> bool:
        """Whether it has handed rows to an attempt of which it does not know how it ended."""
        return self._attempt is not None

    def tell(self, table: str, rows: Ids | All) -> None:
        """Remember rows (ascending) that changed since the origin; ALL where that is not known."""
        self._pending.setdefault(table, Changed()).add(rows)

    def settle(self, run: Run | None) -> None:
        """See whether the last attempt was committed: only then are its rows not pending any more."""
        if self._attempt is None:
            return
        sequence, parent = self._attempt["sequence"], self._attempt["parent"] or 0
        if run is not None and _committed(run, sequence, self._attempt["attempt"]):
            chain = {number: stored for number, stored in self._stored.items() if number <= parent}
            self._stored = {**chain, sequence: self._storing}
        else:
            for table, changed in self._handed.items():
                self._pending.setdefault(table, Changed()).update(changed)
        self._attempt, self._handed, self._storing = None, {}, {}

    def forget(self) -> None:
        """The state was restored: nothing is pending."""
        self._pending, self._handed, self._attempt, self._storing, self._stored = {}, {}, None, {}, {}

    def report(
        self, shards: Sequence[Shard], tensors: Iterable[str] = (), step: int | None = None, extra: bytes | None = None
    ) -> Report:
        """What this rank tells the coordinator."""
        ranges, rows = held_rows(shards), {}
        for table, changed in self._pending.items():
            known = changed.rows
            tells_all = self._shared is None or table in self._shared
            if not tells_all:
                known = known[~inside(known, ranges.get(table, ()))]
            if known.size or tells_all:
                rows[table] = pack(known)
        return Report(
            held=[Held.of_shard(shard) for shard in shards],
            tensors=list(tensors),
            whole=[table for table, changed in self._pending.items() if changed.everything],
            told=None if self._shared is None else sorted(self._shared),
            rows=rows,
            step=step,
            extra=extra,
        )

    def choices(self, order: Order, shards: Iterable[Shard], run: Run | None) -> dict[str, Choice]:
        """Which rows this rank stores; from now on they are handed to the attempt."""
        self._shared = set(order.shared)
        ranges, choices = held_rows(shards), {}
        for table, storage in order.storage.items():
            held = ranges.get(table, [])
            changed = self._pending.get(table, Changed()).rows
            if table in order.rows:
                changed = union(changed, unpack(order.rows[table]))
            changed = union(changed[changed < order.of[table]], np.arange(order.known[table], order.of[table]))
            changed = changed[inside(changed, held)]
            rows = None if storage == "full" else self._since(order, table, held, changed, run)
            exact = changed if table in order.exact else None
            choices[table] = Choice(storage=storage, of=order.of[table], rows=rows, recent=exact)
            self._storing[table] = Stored(rows=rows, ranges=held)
        self._attempt = order.token
        self._handed, self._pending = self._pending, {}
        return choices

    def _since(self, order: Order, table: str, held: Sequence[tuple[int, int]], changed: Ids, run: Run | None) -> Ids:
        """The rows among those held that the layers above the parent store, and those that changed since."""
        parent, predecessor = order.token["parent"], order.token["predecessor"]
        if not held or parent == predecessor:
            return changed
        assert run is not None
        found = [changed]
        layer: int | None = predecessor
        while layer is not None and layer != parent:
            own = self._stored.get(layer, {}).get(table)
            checkpoint = run[layer]
            if own is not None and own.rows is not None and _covers(own.ranges, held):
                found.append(own.rows)
            else:
                stored = checkpoint.stored_since(checkpoint.parent, table)
                if stored is None:
                    raise InvalidInputError(
                        f"table {table!r}: checkpoint {layer} stores it full, and lies above {parent}"
                    )
                found.append(stored)
            layer = checkpoint.parent
        rows = union(*found)
        return rows[inside(rows, held)]


def _covers(outer: Sequence[tuple[int, int]], inner: Sequence[tuple[int, int]]) -> bool:
    return all(any(low <= a and b <= high for low, high in outer) for a, b in inner)


def _committed(run: Run, sequence: int, attempt: str) -> bool:
    try:
        return run[sequence].commit.attempt == attempt
    except CheckpointNotFoundError:
        return False
    except CheckrunError:
        return False  # burnt, pruned or damaged: its rows are stored again


def opened(url: str | os.PathLike[str], options: Mapping[str, Any], *, commits: bool) -> Run:
    """A run as a rank opens it: the one that commits with mode "a", others to read, by the same options."""
    if commits:
        return open_run(url, "a", **options)
    return open_run(url, **{name: given for name, given in options.items() if name not in ("keep", "takeover")})


def by_first(group: dist.ProcessGroup | None, act: Callable[[], _T]) -> _T:
    """What rank 0 finds, or why it fails, on every rank of a group. A collective."""
    told: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            told = [act()]
        except CheckrunError as error:
            told = [error]
    dist.broadcast_object_list(told, group=group, group_src=0)
    if isinstance(told[0], CheckrunError):
        raise told[0]
    found: _T = told[0]
    return found


def failed(rank: int, error: BaseException) -> RankError:
    """What the other ranks raise when one has failed."""
    told = f"{type(error).__name__}: {error}"
    return RankError(f"rank {rank} failed, nothing was committed: {told}")


__all__ = ["ALL", "Coordinator", "Member", "Order", "Report", "failed", "opened", "pack", "unpack"]
