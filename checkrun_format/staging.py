"""Several writers of one checkpoint: begin, put parts, finish, and one coordinator commits (FORMAT.md 9.1)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from checkrun_format import dlpack, layout, quantize
from checkrun_format.blocks import FieldPlan
from checkrun_format.commit import Claim
from checkrun_format.dlpack import Array
from checkrun_format.errors import InvalidInputError
from checkrun_format.extra import extra_json
from checkrun_format.fields import checked_encoders, checked_store_as, field_arrays, spec_of
from checkrun_format.integers import whole
from checkrun_format.manifest import Field, TableEntry
from checkrun_format.policy import BitRule, FieldBits
from checkrun_format.quantize import Method
from checkrun_format.rows import Ids, Mask, as_ids, check_bounds, check_sign, union
from checkrun_format.state import INHERIT, All, ArrayLike, EncoderChoice, FieldSpec, Inherit
from checkrun_format.stores import Store, open_store
from checkrun_format.writer import PartList, PartSource, Writer, add_statistics

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


def field_plans(
    table: str,
    specs: Sequence[FieldSpec],
    starts: Mapping[str, int],
    *,
    rule: BitRule,
    bits: FieldBits | Inherit,
    encoders: Mapping[str, Method],
    encoder: Method | None,
    store_as: Mapping[str, str],
    restores: int,
) -> list[FieldPlan]:
    """How each field is to be encoded; by `encoder` where `encoders` has none for it.

    Raises
    ------
    InvalidInputError
        Bits for a field that cannot be quantized, or both bits and store_as.
    """
    if isinstance(bits, Mapping):
        unknown = set(bits) - {spec.name for spec in specs}
        if unknown:
            raise InvalidInputError(f"table {table!r}, bits: the table has no field {min(unknown)!r}")
    plans = []
    for spec in specs:
        chosen = rule.for_field(table, bits, spec, restores)
        narrow = store_as.get(spec.name)
        if chosen is not None and narrow is not None:
            raise InvalidInputError(f"table {table!r}, field {spec.name!r}: both bits and store_as; give one")
        method = None if chosen is None else quantize.method(encoders.get(spec.name, encoder), chosen)
        if spec.device is not None and method is not None and method.name == "torch_compat":
            raise InvalidInputError(
                f"table {table!r}, field {spec.name!r}: torch_compat encodes arrays on the CPU, not on {spec.device}"
            )
        plans.append(
            FieldPlan(
                name=spec.name,
                dtype=spec.dtype,
                columns=spec.columns,
                start=starts.get(spec.name, 0),
                bits=chosen,
                encoder=method,
                store_as=narrow,
                device=spec.device,
            )
        )
    return plans


class StagedWriter:
    """One of the writers of a save. Values are read, encoded and kept before each call returns."""

    def __init__(self, store: Store, token: Token, rank: int) -> None:
        self.rank = checked_integer(rank, "writer")
        if not 0 <= self.rank < token["writers"]:
            raise InvalidInputError(f"writer {rank}; this save has writers 0 to {token['writers'] - 1}")
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
        arrays = _same_length(name, field_arrays(name, fields)) if fields else {}
        count = len(next(iter(arrays.values()))) if arrays else 0
        of = None if of is None else checked_integer(of, f"table {name!r}, of")
        ids, first_row, key_dtype = _which(name, rows, of, keys, count)
        starts = _starts(name, arrays, columns)
        specs = [spec_of(field_name, array) for field_name, array in arrays.items()]
        plans = field_plans(
            name,
            specs,
            starts,
            rule=self._rule,
            bits=bits,
            encoders=checked_encoders(name, encoder, specs),
            encoder=self._encoder,
            store_as=checked_store_as(name, store_as, specs),
            restores=self._token["restores"],
        )
        pinned = self._token["qparams"].get(name, {})
        plans = [replace(plan, qparams=pinned.get(plan.name)) if plan.bits is not None else plan for plan in plans]
        order = None if ids is None or bool((ids[1:] > ids[:-1]).all()) else np.argsort(ids, kind="stable")
        if ids is not None:
            ids = ids.copy() if order is None else ids[order]
            if bool((ids[1:] == ids[:-1]).any()):
                raise InvalidInputError(f"table {name!r}: {int(ids[:-1][ids[1:] == ids[:-1]][0])} is given twice")
        if ids is not None and of is not None:
            check_bounds(ids, of, f"table {name!r}")
        self._describe(name, storage, of, key_dtype, plans)
        self._writer.put_part(
            PartSource(
                table=name,
                plans=plans,
                count=count,
                fetch=_fetch(arrays, order),
                first_row=first_row,
                rows=ids,
                recent=_recent(name, recent, count, order),
                deleted=_deleted(name, deleted, key_dtype),
            )
        )
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

    def _describe(
        self, name: str, storage: str, of: int | None, key_dtype: str | None, plans: Sequence[FieldPlan]
    ) -> None:
        """Note what the coordinator must know of a table."""
        if storage not in ("full", "changed"):
            raise InvalidInputError(f"table {name!r}: storage {storage!r}; 'full' or 'changed'")
        told = self._tables.setdefault(
            name, {"name": name, "storage": storage, "rows": of, "key_dtype": key_dtype, "fields": {}}
        )
        if (told["storage"], told["rows"], told["key_dtype"]) != (storage, of, key_dtype):
            raise InvalidInputError(f"table {name!r}: storage, of or keys differ from those of an earlier part")
        merge_fields(
            name, told["fields"], {p.name: [p.dtype, None if p.columns is None else p.start + p.columns] for p in plans}
        )


def merge_fields(table: str, told: dict[str, list[Any]], fields: Mapping[str, Sequence[Any]]) -> None:
    """Merge field name -> [dtype, end of columns] of another part."""
    for name, (dtype, end) in fields.items():
        known = told.setdefault(name, [dtype, end])
        if known[0] != dtype or (known[1] is None) != (end is None):
            raise InvalidInputError(f"table {table!r}, field {name!r}: its parts differ in dtype or dimensions")
        if end is not None:
            known[1] = max(known[1], end)


def _same_length(table: str, arrays: dict[str, Array]) -> dict[str, Array]:
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise InvalidInputError(f"table {table!r}: its fields have different numbers of rows: {counts}")
    return arrays


def _which(
    table: str, rows: Any, of: int | None, keys: ArrayLike | None, count: int
) -> tuple[Ids | None, int, str | None]:
    """Ids (None for a range), first row (-1 if listed), key dtype (None if dense)."""
    if keys is not None:
        if rows is not None or of is not None:
            raise InvalidInputError(f"table {table!r}: give either keys, or rows and of")
        given = dlpack.to_numpy(keys, f"table {table!r}, keys")
        ids = as_ids(given, f"table {table!r}, keys")
        dtype = "uint64" if (given.dtype.kind, given.dtype.itemsize) == ("u", 8) else "int64"
        return _counted(table, ids, count), -1, dtype
    if rows is None or of is None:
        raise InvalidInputError(f"table {table!r}: give rows and of, or keys")
    if isinstance(rows, slice) and rows.step in (None, 1):
        rows = (rows.start or 0, of if rows.stop is None else rows.stop)
    if not isinstance(rows, tuple):
        return _counted(table, as_ids(dlpack.to_numpy(rows, f"table {table!r}, rows"), "rows"), count), -1, None
    low, high = _pair(rows, f"table {table!r}, rows")
    if not 0 <= low <= high <= of or high - low != count:
        raise InvalidInputError(f"table {table!r}: {count} rows given for the range {low} to {high} of {of}")
    return None, low, None


def _counted(table: str, ids: Ids, count: int) -> Ids:
    if ids.size != count:
        raise InvalidInputError(f"table {table!r}: {ids.size} rows or keys for {count} rows of values")
    return ids


def _starts(table: str, arrays: Mapping[str, Array], columns: Any) -> dict[str, int]:
    if columns is None:
        return {}
    wide = {name: array.shape[1] for name, array in arrays.items() if array.ndim == 2}
    given = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(wide, columns)
    pairs = {name: _pair(pair, f"table {table!r}, columns of field {name!r}") for name, pair in given.items()}
    for name, (low, high) in pairs.items():
        if name not in wide or low < 0 or high - low != wide[name]:
            raise InvalidInputError(
                f"table {table!r}, field {name!r}: columns {low} to {high} given for {wide.get(name, 'no')} columns"
            )
    return {name: low for name, (low, _) in pairs.items()}


def checked_integer(value: object, what: str) -> int:
    """Accept a whole number, numpy's too."""
    return whole(value, f"{what}: {value!r} is no whole number")


def _pair(value: object, what: str) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidInputError(f"{what}: {value!r}; give (low, high)")
    return checked_integer(value[0], what), checked_integer(value[1], what)


def _recent(table: str, recent: ArrayLike, count: int, order: Ids | None) -> bool | Mask:
    if isinstance(recent, All):
        return True
    if isinstance(recent, bool):
        return recent
    mask = dlpack.to_numpy(recent, f"table {table!r}, recent")
    if mask.dtype != np.bool_ or mask.shape != (count,):
        raise InvalidInputError(f"table {table!r}, recent: {mask.dtype} {mask.shape} where bool ({count},) belongs")
    return np.array(mask) if order is None else mask[order]


def _deleted(table: str, deleted: ArrayLike | None, key_dtype: str | None) -> Ids:
    if deleted is None:
        return np.zeros(0, np.int64)
    if key_dtype is None:
        raise InvalidInputError(f"table {table!r}: only a keyed table has deleted keys")
    what = f"table {table!r}, deleted"
    given = dlpack.to_numpy(deleted, what)
    ids = as_ids(given, what)
    check_sign(given, ids, key_dtype, what)
    return union(ids)


def _fetch(arrays: Mapping[str, Array], order: Ids | None) -> Callable[[int, int], dict[str, Array]]:
    def fetch(low: int, high: int) -> dict[str, Array]:
        at = slice(low, high) if order is None else order[low:high]
        return {name: array[at] for name, array in arrays.items()}

    return fetch


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
        told = [
            Field(name=name, dtype=dtype, columns=columns, encoder=None) for name, (dtype, columns) in fields.items()
        ]
        return self._judge(
            TableEntry(
                name=table, requires=[], addressing="dense", key_dtype=None, rows=rows, storage="changed", fields=told
            )
        )

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
        return self._committer(parsed_part_lists(part_lists, self.token), unchanged, dropped, extra, step)


def parsed_part_lists(part_lists: Sequence[Mapping[str, Any]], token: Token) -> list[PartList]:
    """The part lists as records in the order of their writers; all there, all of this attempt."""
    try:
        parsed = [msgspec.convert(part_list, PartList) for part_list in part_lists]
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidInputError(f"not a part list: {error}") from error
    writers = sorted(part.document.writer for part in parsed)
    if writers != list(range(token["writers"])):
        raise InvalidInputError(f"part lists of writers {writers}; there are writers 0 to {token['writers'] - 1}")
    for part in parsed:
        if part.document.attempt != token["attempt"]:
            raise InvalidInputError(f"the part list of writer {part.document.writer} is of another attempt")
    _check_unique("tensor", [tensor["name"] for part in parsed for tensor in part.tensors])
    _check_unique("blob", [blob["name"] for part in parsed for blob in part.blobs])
    return sorted(parsed, key=lambda part: part.document.writer)


def _check_unique(what: str, names: Sequence[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise InvalidInputError(f"{what} {twice[0]!r} is stored twice; names are unique over all writers")


def merged_tables(part_lists: Sequence[PartList]) -> list[dict[str, Any]]:
    """What all writers said of each table, as one; parts must agree."""
    merged: dict[str, dict[str, Any]] = {}
    for part in part_lists:
        for table in part.tables:
            told = merged.setdefault(table["name"], {**table, "fields": {}})
            for key in ("storage", "rows", "key_dtype"):
                if told[key] != table[key]:
                    raise InvalidInputError(
                        f"table {table['name']!r}: {key} is {table[key]!r} at writer {part.document.writer} and "
                        f"{told[key]!r} at another"
                    )
            merge_fields(table["name"], told["fields"], table["fields"])
    return list(merged.values())


def table_entry(told: Mapping[str, Any], statistics: Mapping[str, Mapping[str, Any]]) -> TableEntry:
    """The manifest's entry of a table."""
    return TableEntry(
        name=told["name"],
        requires=[],
        addressing="dense" if told["key_dtype"] is None else "keyed",
        key_dtype=told["key_dtype"],
        rows=told["rows"],
        storage=told["storage"],
        fields=[
            Field(name=name, dtype=dtype, columns=end, encoder=dict(statistics[name]) if name in statistics else None)
            for name, (dtype, end) in told["fields"].items()
        ],
    )


def merged_statistics(part_lists: Sequence[PartList]) -> dict[str, dict[str, dict[str, Any]]]:
    """Encoder statistics of each table and field over all writers."""
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for part in part_lists:
        for table, fields in part.statistics.items():
            for name, told in fields.items():
                first = {
                    key: value for key, value in told.items() if key not in ("exact_rows", "error_bound", "sample")
                }
                add_statistics(merged.setdefault(table, {}).setdefault(name, first), told)
    for fields in merged.values():
        for told in fields.values():
            sample = told.pop("sample", {"rows": 0})
            if sample["rows"]:
                told["l2_error"] = sample["l2_error"] / sample["rows"]
                told["relative_l2_error"] = sample["l2_error"] / sample["l2"] if sample["l2"] else 0.0
    return merged


def check_coverage(entries: Sequence[TableEntry], part_lists: Sequence[PartList]) -> None:
    """Refuse parts that do not hold each row and column of a full dense table once (LAY-1), of others in all fields.

    Ranges are checked exactly, listed rows by their number: which they are is seen when they are read back.

    Raises
    ------
    InvalidInputError
    """
    cells: dict[tuple[str, str], int] = {}
    spans: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
    for document in (part_list.document for part_list in part_lists):
        for part in document.parts:
            for f, start in zip(document.blocks[part[1]].fields, part[8:], strict=True):
                key, width = (document.tables[part[0]], f.name), f.columns or 1
                cells[key] = cells.get(key, 0) + part[3] * width
                if part[4] >= 0:
                    spans.setdefault(key, []).append((part[4], part[4] + part[3], start, start + width))
    for entry in entries:
        if entry.storage != "unchanged":
            _check_counts(entry, {f.name: cells.get((entry.name, f.name), 0) for f in entry.fields})
    for (table, name), rectangles in spans.items():
        _check_disjoint(table, name, rectangles)


def _check_counts(entry: TableEntry, cells: Mapping[str, int]) -> None:
    rows = {f.name: cells[f.name] / (f.columns or 1) for f in entry.fields}
    wanted = float(entry.rows) if entry.storage == "full" and entry.rows is not None else max(rows.values())
    for name, count in rows.items():
        if count != wanted:
            raise InvalidInputError(
                f"table {entry.name!r}, field {name!r}: the parts hold {count:g} rows where {wanted:g} belong (LAY-1)"
            )


def _check_disjoint(table: str, name: str, spans: list[tuple[int, int, int, int]]) -> None:
    """Refuse rectangles of rows and columns that overlap: sweep over the rows, keep the open column ranges."""
    open_spans: list[tuple[int, int, int, int]] = []
    for span in sorted(spans):
        open_spans = [other for other in open_spans if other[1] > span[0]]
        for other in open_spans:
            if other[2] < span[3] and span[2] < other[3]:
                raise InvalidInputError(
                    f"table {table!r}, field {name!r}: rows from {span[0]} on are given by two parts (LAY-1)"
                )
        open_spans.append(span)
