"""Several writers of one checkpoint: begin, put parts, finish, and one coordinator commits (FORMAT.md 9.1)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from checkrun_format import dlpack, layout
from checkrun_format.blocks import FieldPlan
from checkrun_format.commit import Claim
from checkrun_format.encodings import field_plans
from checkrun_format.errors import InvalidInputError
from checkrun_format.extra import extra_json
from checkrun_format.fields import array_fetch, checked_encoders, checked_store_as, common_rows, field_arrays, spec_of
from checkrun_format.integers import whole
from checkrun_format.manifest import TableEntry
from checkrun_format.partlists import add_table, parsed_part_lists, table_entry
from checkrun_format.parts import Held, deleted_keys, first_columns, held_rows, recent_rows
from checkrun_format.policy import BitRule, FieldBits
from checkrun_format.quantize import Method
from checkrun_format.state import INHERIT, All, ArrayLike, EncoderChoice, Inherit
from checkrun_format.stores import Store, open_store
from checkrun_format.writer import PartSource, Writer

if TYPE_CHECKING:
    from checkrun_format.checkpoint import Checkpoint

Token = dict[str, Any]
"""JSON-able: what another process needs to be a writer of the same save."""

_TOKEN = frozenset(
    {
        "url",
        "durable",
        "sequence",
        "attempt",
        "writers",
        "chunk_bytes",
        "bits",
        "encoder",
        "expected_restores",
        "restores",
        "qparams",
    }
)


class StagedWriter:
    """One of the writers of a save. Values are read, encoded and kept before each call returns."""

    def __init__(self, store: Store, token: Token, rank: int) -> None:
        most = token["writers"] - 1
        self.rank = whole(rank, f"writer {rank!r}; this save has writers 0 to {most}", 0, most)
        self._token = token
        self._encoder = None if token["encoder"] is None else Method(*token["encoder"])
        self._rule = BitRule(bits=token["bits"], expected_restores=token["expected_restores"])
        claim = Claim(sequence=token["sequence"], attempt=token["attempt"])
        self._writer = Writer(store, claim.prefix, self.rank, chunk_bytes=token["chunk_bytes"])
        self._tables: dict[str, dict[str, Any]] = {}
        self._finished = False

    def put(
        self,
        table: str,
        fields: Mapping[str, ArrayLike],
        *,
        rows: tuple[int, int] | slice | ArrayLike | None = None,
        of: int | None = None,
        keys: ArrayLike | None = None,
        columns: tuple[int, int] | Mapping[str, tuple[int, int]] | None = None,
        storage: str = "full",
        recent: bool | All | ArrayLike = True,
        deleted: ArrayLike | None = None,
        bits: FieldBits | Inherit = INHERIT,
        encoder: EncoderChoice = None,
        store_as: Mapping[str, str] | None = None,
    ) -> None:
        """Store one part: some rows, and for each field some columns, of one table.

        Parameters
        ----------
        fields : mapping
            Field name to the values of just these rows and columns: (n, width) or (n,).
        rows : (low, high), slice, or ids
            Which rows of a dense table: a range, or row numbers, each once.
        of : int
            Rows of the whole table (dense).
        keys : array (n,)
            The rows of a keyed table, in place of `rows` and `of`.
        columns : (low, high), or mapping of field name to it
            Which columns these are; a pair holds for every two-dimensional field. By default from 0 on.
        storage : "full" or "changed"
            The same in all parts of a table. The parts of all writers together hold each row and column once: of the
            whole table if full, of the listed rows if changed.
        recent : bool, ALL or mask (n,)
            Which rows changed since the predecessor; in doubt, all.
        deleted : keys
            Tombstones of a keyed table.
        bits, encoder, store_as
            As for `Table`.

        Raises
        ------
        InvalidInputError
        """
        if self._finished:
            raise InvalidInputError(f"writer {self.rank} has finished")
        name = layout.check_name(table, "table")
        arrays = field_arrays(name, fields) if fields else {}
        count = common_rows(name, arrays) if arrays else 0
        held = held_rows(name, rows, of, keys, count)
        specs = [spec_of(field_name, array) for field_name, array in arrays.items()]
        plans = field_plans(
            name,
            specs,
            first_columns(name, arrays, columns),
            rule=self._rule,
            bits=bits,
            encoders=checked_encoders(name, encoder, specs),
            encoder=self._encoder,
            store_as=checked_store_as(name, store_as, specs),
            restores=self._token["restores"],
        )
        pinned = self._token["qparams"].get(name, {})
        plans = [replace(plan, qparams=pinned.get(plan.name)) if plan.bits is not None else plan for plan in plans]
        fetch = array_fetch(arrays, held.order)
        source = PartSource(
            table=name,
            plans=plans,
            count=count,
            fetch=lambda low, high: fetch(slice(low, high)),
            first_row=held.first,
            rows=held.ids,
            recent=recent_rows(name, recent, count, held.order),
            deleted=deleted_keys(name, deleted, held.key_dtype),
        )
        self._describe(name, storage, held, plans)
        self._writer.put_part(source)
        self._writer.wait()

    def put_tensor(self, name: str, values: ArrayLike) -> None:
        """Store a dense tensor; names are unique over all writers."""
        array = dlpack.to_array(values, f"tensor {name!r}")
        self._writer.put_tensor(layout.check_name(name, "tensor"), dlpack.copied(array))

    def put_blob(self, name: str, data: bytes) -> None:
        """Store opaque bytes; names are unique over all writers."""
        self._writer.put_blob(layout.check_name(name, "blob"), bytes(data))

    def put_extra(self, extra: Any) -> None:
        """Store the trainer's state, any JSON value, by one of the writers: `Save.commit` takes up to 64 KiB of it.

        Raises
        ------
        InvalidInputError
            It is no JSON.
        """
        self._writer.put_extra(extra_json(extra))

    def finish(self) -> dict[str, Any]:
        """Write what remains and make it durable; return the part list, JSON-able, for the coordinator."""
        if self._finished:
            raise InvalidInputError(f"writer {self.rank} has finished")
        self._finished = True
        with self._writer:
            part_list: dict[str, Any] = msgspec.to_builtins(self._writer.finish(list(self._tables.values())))
        return part_list

    def _describe(self, name: str, storage: str, held: Held, plans: Sequence[FieldPlan]) -> None:
        """Note what the coordinator must know of a table."""
        if storage not in ("full", "changed"):
            raise InvalidInputError(f"table {name!r}: storage {storage!r}; 'full' or 'changed'")
        fields = {p.name: (p.dtype, None if p.columns is None else p.start + p.columns) for p in plans}
        told = {"name": name, "storage": storage, "rows": held.of, "key_dtype": held.key_dtype, "fields": fields}
        add_table(self._tables, told, "in this part")


class JoinedSave:
    """A save that another process began."""

    def __init__(self, store: Store, token: Token) -> None:
        self._store = store
        self.token = token

    def writer(self, rank: int) -> StagedWriter:
        """Writer number `rank`; each number is used by one process only."""
        return StagedWriter(self._store, self.token, rank)


def join_save(
    token: Token,
    url: str | os.PathLike[str] | Store | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> JoinedSave:
    """Take part in a save that another process began; where that run is open here, `Run.join` does it.

    Parameters
    ----------
    token : dict
        `Save.token` of the process that began it.
    url : str, path or Store, optional
        Where the run is for this process, if not where it is for that one.
    storage_options : mapping
        As of `open_run`; a token holds none.
    """
    missing = _TOKEN - token.keys() if isinstance(token, Mapping) else _TOKEN
    if missing:
        raise InvalidInputError(f"not the token of a save: it has no {min(missing)!r}")
    store = open_store(url or token["url"], durable=token["durable"], storage_options=storage_options)
    return JoinedSave(store, token)


Committer = Callable[..., "Checkpoint"]
Judge = Callable[[TableEntry], "Outlook"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """How a save may store a table."""

    storage: str
    """`changed` where that is legal, else `full`."""
    continues: bool
    """Whether rows that are stored and did not change since the predecessor keep their bits: they are not recent."""
    known_rows: int
    """Rows of the table in the predecessor; those from here on are new."""
    quantized: bool = False
    """Whether they do so only where no writer cuts them by columns, or takes `bits` or an encoder of its own."""


class Save:
    """A save by several writers, as its coordinator sees it; from `Run.begin`."""

    def __init__(self, store: Store, token: Token, committer: Committer, judge: Judge) -> None:
        self._store = store
        self._committer = committer
        self._judge = judge
        self.token = token

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaving without a commit abandons the attempt; what was stored is litter."""

    @property
    def sequence(self) -> int:
        """The number that it claims."""
        return int(self.token["sequence"])

    def writer(self, rank: int) -> StagedWriter:
        """Writer number `rank` in this process."""
        return StagedWriter(self._store, self.token, rank)

    def outlook(self, table: str, *, rows: int, fields: Mapping[str, tuple[str, int | None]]) -> Outlook:
        """How a dense table of so many rows and these fields, name to (dtype, columns), may be stored."""
        told = {"name": table, "key_dtype": None, "rows": rows, "storage": "changed", "fields": fields}
        return self._judge(table_entry(told, {}))

    def commit(
        self,
        part_lists: Sequence[Mapping[str, Any]],
        *,
        unchanged: Sequence[str] = (),
        dropped: Sequence[str] = (),
        extra: Any = None,
        step: int | None = None,
    ) -> Checkpoint:
        """Commit, after every writer has finished.

        Parameters
        ----------
        part_lists : sequence
            What `finish` gave in every writer, in any order.
        unchanged : names
            Tables of the parent of which no row changed.
        dropped : names
            Tables of the predecessor that are gone.
        extra : JSON value
            The trainer's state, unless a writer has stored it.
        step : int, optional
            In place of the one that the save began with.

        Raises
        ------
        InvalidInputError
            A writer is missing, parts contradict one another or do not cover a table, a table is forgotten.
        DamagedError
            An object that a writer finished is not in the store.
        ConcurrentCommitError
            Another process committed this number.
        """
        parsed = parsed_part_lists(part_lists, self.token["attempt"], self.token["writers"])
        return self._committer(parsed, unchanged, dropped, extra, step)
