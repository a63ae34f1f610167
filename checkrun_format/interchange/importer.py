"""A file of tensors as the next checkpoint of a run: of a table only rows that changed are stored."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from checkrun_format import dtypes
from checkrun_format.blocks import FieldPlan
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import BurntNumberWarning, InvalidInputError, NotARunError, RunNotFoundError
from checkrun_format.extra import extra_json
from checkrun_format.integers import whole
from checkrun_format.interchange import inventory, kinds
from checkrun_format.interchange.comparison import compare, recorded_bits, recorded_plans, same_bits
from checkrun_format.interchange.contents import Contents
from checkrun_format.interchange.inventory import FileTable, Inventory
from checkrun_format.rows import Ids
from checkrun_format.run import Run, open_run
from checkrun_format.saving import checked_step
from checkrun_format.state import ALL, All, State, Table
from checkrun_format.stores import Store
from checkrun_format.view import TableView

RAW: Final = "raw"
"""`bits=RAW`: not quantized."""

Width: TypeAlias = "int | Literal['raw'] | None"
Advance: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTable:
    """What became of one table.

    Attributes
    ----------
    rows : int
        Rows in the file.
    changed : int
        Rows that differ from the checkpoint before, new ones included; all of a table that it did not have.
    bits : int or None
        Of its field `weight`, or its only one; None if raw.
    replaced : bool
        The checkpoint before has another table of this name: of other fields, columns or dtypes.
    """

    name: str
    rows: int
    changed: int
    bits: int | None
    replaced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import did.

    Attributes
    ----------
    checkpoint : Checkpoint
        The one that was committed; if nothing changed, the latest one, which holds the contents of the file already.
    committed : bool
        False if nothing changed.
    file_bytes : int
        Bytes of the file, or of all files of an index.
    """

    checkpoint: Checkpoint
    committed: bool
    tables: Sequence[ImportedTable]
    dropped: Sequence[str]
    tensors: int
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Continued:
    """How a table goes on from the checkpoint before.

    `changed` is None for a table that it does not have, ALL where every row may differ; `settled` says how all rows
    but those that changed are encoded, if it is known; `touched` counts new rows too, None for all of the table.
    """

    changed: Ids | All | None
    plans: Mapping[str, FieldPlan]
    settled: list[FieldPlan] | None = None
    touched: int | None = None
    replaced: bool = False
    is_same: bool = False


def import_file(
    file: str | os.PathLike[str],
    url: str | os.PathLike[str] | Store,
    *,
    tables: Sequence[str] = (),
    bits: Width = None,
    step: int | None = None,
    kind: str | None = None,
    durable: bool = True,
    advance: Advance = lambda count: None,
) -> Imported:
    """Commit the contents of a file as the next checkpoint of a run, which is created if there is none.

    Tensors (rows, columns) that match become tables with the field `weight`, all others dense tensors; what is a table
    in the latest checkpoint stays one. Rows that changed since then are found by encoding all rows as they were
    encoded there (`comparison.compare`), some megabytes at a time, and only they are stored. If nothing changed,
    nothing is committed.

    Parameters
    ----------
    file : path
        Of a safetensors file, a state dict of `torch.save`, an `.npz`, or an index of the first two (`*.json`).
    tables : texts
        Names or patterns (`*`, `?`) of tensors that become tables; by default those of more than 10,000 rows.
    bits : None, 1..8 or "raw"
        How floating-point tables are quantized. None: as tables of their names in the latest checkpoint, whatever
        their dtypes and columns; raw if they are not there.
    step : int
        By default what the file says, if `export_checkpoint` wrote it.
    kind : "safetensors", "torch" or "npz"
        By default as the suffix says.
    advance : function
        Is told the bytes of rows that were read, as it goes.

    Raises
    ------
    NotFoundError
        There is no such file.
    InvalidInputError
        The file is not of its kind, or holds what cannot be stored; before anything is written.
    NotARunError, DamagedError, ConcurrentCommitError, StorageError
    """
    checked_step(step)
    known = _known_tables(url)
    with kinds.opened(Path(file), kind) as contents:
        with kinds.told(Path(file)):
            found = inventory.take(contents, tables, known)
            _check_bits(bits, found.tables.values())
            extra_json(found.extra)
            checked_step(found.step)
        run = open_run(url, mode="a", durable=durable)
        return _import(run, found, bits, step, contents, advance)


def _known_tables(url: str | os.PathLike[str] | Store) -> list[str]:
    try:
        latest = _latest(open_run(url))
    except (RunNotFoundError, NotARunError):
        return []  # whether a run can be created there is seen when it is
    return [] if latest is None else latest.tables


def _latest(run: Run) -> Checkpoint | None:
    """The latest checkpoint; opening the run for saving warns of burnt numbers, once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BurntNumberWarning)
        return run.latest(None)


def _check_bits(bits: Width, tables: Collection[FileTable]) -> None:
    if bits is None or bits == RAW:
        return
    whole(bits, f"bits {bits!r}; 1 to 8, or {RAW!r}", 1, 8)
    if not any(_fits(table) for table in tables):
        shown = ", ".join(f"{table.name!r} ({table.spec()[0][1]})" for table in list(tables)[:3]) or "none"
        raise InvalidInputError(f"{bits} bits: no table (rows, columns) of floating-point numbers; tables are: {shown}")


def _fits(table: FileTable) -> bool:
    return any(
        name == table.main_field and dtype in dtypes.FLOATING and columns is not None
        for name, dtype, columns in table.spec()
    )


def _import(
    run: Run, found: Inventory, bits: Width, step: int | None, contents: Contents, advance: Advance
) -> Imported:
    latest = _latest(run)
    before = {} if latest is None else {name: latest.table(name) for name in latest.tables}
    continued = {name: _continued(before.get(name), table, bits, advance) for name, table in found.tables.items()}
    dropped = [name for name in before if name not in found.tables]
    step = found.step if step is None else step
    told = [_told(table, continued[name]) for name, table in found.tables.items()]
    committed = latest is None or bool(dropped) or not _is_unchanged(latest, found, continued, step)
    contents.check()
    if committed:
        if latest is not None:
            settled = {name: c.settled for name, c in continued.items() if c.settled is not None}
            run.continue_from(latest.sequence, settled=settled)
        state = State(
            tables={name: _table(table, continued[name], contents, advance) for name, table in found.tables.items()},
            tensors=found.tensors,
            extra=found.extra,
            blobs=found.blobs,
        )
        latest = run.save(state, step=step, dropped=dropped)
        _check_committed(contents, latest)
    assert latest is not None
    return Imported(
        checkpoint=latest,
        committed=committed,
        tables=told,
        dropped=dropped,
        tensors=len(found.tensors),
        file_bytes=contents.file_bytes,
    )


def _check_committed(contents: Contents, committed: Checkpoint) -> None:
    """Values that were read last may have changed when no check could stop the commit any more."""
    try:
        contents.check()
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}; checkpoint {committed.sequence} may hold a mixture: roll it back") from error


def _continued(before: TableView | None, table: FileTable, bits: Width, advance: Advance) -> _Continued:
    fresh = _fresh_plans(table, bits)
    if before is None:
        return _Continued(changed=None, plans=fresh)
    layers = before.layers()
    if table.kind != layers[0][1].kind:
        kept = recorded_bits(layers, table.main_field) if bits is None else bits
        return _Continued(changed=ALL, plans=_fresh_plans(table, kept), replaced=True)
    recorded = recorded_plans(layers, table)
    plans = recorded if bits is None else {**recorded, **fresh}
    if any(_way(plans[name]) != _way(recorded[name]) for name in recorded):
        return _Continued(changed=ALL, plans=plans)
    compared = compare(layers, table, advance)
    return _Continued(
        changed=compared.changed,
        plans={**plans, **recorded},
        settled=compared.plans,
        touched=compared.changed.size + compared.new,
        is_same=not (compared.changed.size or compared.new or compared.gone),
    )


def _fresh_plans(table: FileTable, bits: Width) -> dict[str, FieldPlan]:
    """How the field is encoded that `bits` is about, without regard to the checkpoint before."""
    if bits is None or not _fits(table):
        return {}
    (plan,) = (
        FieldPlan(name=name, dtype=dtype, columns=columns, bits=None if bits == RAW else bits)
        for name, dtype, columns in table.spec()
        if name == table.main_field
    )
    return {plan.name: plan}


def _way(plan: FieldPlan) -> tuple[int | None, str | None]:
    return plan.bits, plan.store_as


def _told(table: FileTable, c: _Continued) -> ImportedTable:
    plan = c.plans.get(table.main_field)
    return ImportedTable(
        name=table.name,
        rows=table.rows,
        changed=table.rows if c.touched is None else c.touched,
        bits=None if plan is None else plan.bits,
        replaced=c.replaced,
    )


def _table(table: FileTable, c: _Continued, contents: Contents, advance: Advance) -> Table:
    def fetch(ids: Ids) -> dict[str, Any]:
        values = table.fetch(ids)
        contents.check()
        advance(len(ids) * table.row_bytes)
        return values

    return Table.from_function(
        fetch,
        rows=table.rows if table.keys is None else None,
        keys=table.keys,
        fields={name: (dtype, columns) for name, dtype, columns in table.spec()},
        changed=c.changed,
        bits={plan.name: plan.bits for plan in c.plans.values()},
        encoder={plan.name: plan.encoder for plan in c.plans.values() if plan.encoder is not None},
        store_as={plan.name: plan.store_as for plan in c.plans.values() if plan.store_as is not None},
    )


def _is_unchanged(latest: Checkpoint, found: Inventory, continued: Mapping[str, _Continued], step: int | None) -> bool:
    """Whether a checkpoint holds all that the file holds; a step that is not given is no difference."""
    return (
        step in (None, latest.step)
        and all(c.is_same for c in continued.values())
        and set(latest.tensors) == set(found.tensors)
        and all(same_bits(latest.tensor(name), array) for name, array in found.tensors.items())
        and {name: latest.blob(name) for name in latest.blobs} == dict(found.blobs)
        and extra_json(latest.extra) == extra_json(found.extra)
    )
