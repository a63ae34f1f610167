"""One table at one checkpoint, as the user sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from checkrun_format import dlpack, dtypes
from checkrun_format.chain import History
from checkrun_format.dlpack import Array
from checkrun_format.errors import DamagedError, InvalidInputError, RowNotFoundError
from checkrun_format.manifest import Field, copied
from checkrun_format.placement import Placement
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.resolver import Layers, check_rows, fill, live_keys
from checkrun_format.rows import Ids, Wanted, WantedIds, WantedRange, as_ids, is_in_sorted, of_other_sign
from checkrun_format.state import ArrayLike
from checkrun_format.workers import Budget, Workers

Cut: TypeAlias = tuple[int, int]
"""A range of columns."""

_MANY_ROWS = 1 << 16
"""Rows from which on it is asked first whether they are stored, before there is memory for them."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def telling(read: Callable[_P, _T]) -> Callable[_P, _T]:
    """A method that reads: with damage that it meets goes what was read, and the ways out."""

    @functools.wraps(read)
    def told(*args: _P.args, **options: _P.kwargs) -> _T:
        try:
            return read(*args, **options)
        except DamagedError as error:
            error.add_note(
                f"met in reading {args[0]!r}; Run.verify() names all that is damaged, Run.restore(fallback=True) takes "
                "the newest checkpoint that is sound"
            )
            raise

    return told


class TableView:
    """One table at one checkpoint; reading resolves the chain for just the rows that are asked for."""

    def __init__(self, history: History, stored: StoredCheckpoint, name: str) -> None:
        self._history = history
        self._stored = stored
        self._entry = stored.entry(name)
        self.name = name

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name}: {f.dtype} {'' if f.columns is None else f.columns}".strip() for f in self.fields)
        return f"<table {self.name!r} of checkpoint {self._stored.commit.sequence}: {fields}>"

    @property
    def fields(self) -> tuple[Field, ...]:
        """Names, logical dtypes and columns of the fields."""
        place = self._stored.place("manifest.json")
        return tuple(msgspec.structs.replace(f, encoder=copied(f.encoder, place)) for f in self._entry.fields)

    @property
    def addressing(self) -> str:
        """`dense` or `keyed`."""
        return self._entry.addressing

    @property
    def storage(self) -> str:
        """How this checkpoint itself stores the table: `full`, `changed` or `unchanged`."""
        return self._entry.storage

    @property
    def stored_rows(self) -> int:
        """Rows that this checkpoint itself stores."""
        return self._stored.stored_rows(self.name)

    def layers(self) -> Layers:
        """The layers of the table, newest first (9.3); for tools that read rows as they are stored."""
        return self._history.layers(self._stored, self.name)

    @telling
    def keys(self) -> npt.NDArray[Any]:
        """The live keys of a keyed table, ascending as signed int64; int64 or uint64 (n,)."""
        if self._entry.addressing != "keyed":
            raise InvalidInputError(f"table {self.name!r} is dense: its rows are 0 to {len(self) - 1}")
        return self._live_keys.view(np.dtype(self._entry.key_dtype)).copy()

    @functools.cached_property
    def _live_keys(self) -> Ids:
        return live_keys(self.layers())

    def __len__(self) -> int:
        return len(self._live_keys) if self._entry.rows is None else self._entry.rows

    @telling
    def read(
        self,
        rows: slice | None = None,
        *,
        columns: slice | None = None,
        fields: Sequence[str] | None = None,
        out: Mapping[str, ArrayLike] | None = None,
        framework: str | None = None,
        device: object = None,
        max_host_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Read consecutive rows.

        Parameters
        ----------
        rows : slice
            As for a numpy array, step 1; in a keyed table: places in the order of `keys()`.
        columns : slice
            Of the fields with columns; likewise.
        fields : names
            By default all.
        out : mapping of field name to array
            Writable arrays of the right shape and dtype to read into, of any framework, on the CPU or on a device; then
            only these fields are read. After an error they may hold anything.
        framework, device
            Of new arrays; as of `Checkpoint.load`.
        max_host_bytes : int
            As of `Checkpoint.load`.

        Returns
        -------
        dict
            Field name to an array (rows, columns) or (rows,), in `out` if given; in numpy, bfloat16 is the dtype of
            `ml_dtypes`.
        """
        placement = Placement(framework, device)
        low, high = _range(rows, len(self), f"rows of table {self.name!r}")
        wanted = WantedRange(low, high) if self._entry.rows is not None else WantedIds(self._live_keys[low:high])
        return self._read(wanted, columns, fields, out, placement, max_host_bytes)

    @telling
    def take(
        self,
        ids: ArrayLike,
        *,
        columns: slice | None = None,
        fields: Sequence[str] | None = None,
        out: Mapping[str, ArrayLike] | None = None,
        framework: str | None = None,
        device: object = None,
        max_host_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Read rows by number, or by key in a keyed table; in any order, repeats allowed.

        Options are those of `read`. With repeats, or in another order than ascending, the rows are held twice.

        Raises
        ------
        RowNotFoundError
            Naming the first row or key that is not there.
        """
        placement = Placement(framework, device)
        given = dlpack.to_numpy(ids, "ids")
        wanted = as_ids(given, "ids")
        strangers = of_other_sign(given, wanted, self._entry.key_dtype)
        if strangers.size:
            raise RowNotFoundError(f"table {self.name!r} has no row or key {strangers[0]}")
        unique, inverse = np.unique(wanted, return_inverse=True)
        self._check_present(unique)
        if np.array_equal(unique, wanted):
            return self._read(WantedIds(unique), columns, fields, out, placement, max_host_bytes)
        budget, cut = self._history.budget(max_host_bytes), self._cut(columns, fields, out)
        targets = {} if out is None else self._targets(out, wanted.size, cut, placement)
        found = self._beside(targets, unique.size) if targets else self._fresh(cut, unique.size, placement)
        with placement, Workers.of(self._history.store, budget) as workers:
            self._fill(WantedIds(unique), cut, found, workers, budget)
        if out is None:
            return {name: placement.given(array[inverse]) for name, array in found.items()}
        with placement:
            for name, target in targets.items():
                target[...] = found[name][inverse]
        return dict(out)

    def _check_present(self, ids: Ids) -> None:
        if self._entry.rows is None:
            missing = ids[~is_in_sorted(ids, self._live_keys)]
        else:
            missing = ids[(ids < 0) | (ids >= self._entry.rows)]
        if missing.size:
            what = "key" if self._entry.rows is None else "row"
            shown = missing[:1].view(self._entry.key_dtype or np.int64)[0]
            raise RowNotFoundError(f"table {self.name!r} has no {what} {shown} ({missing.size} are missing in all)")

    def _read(
        self,
        wanted: Wanted,
        columns: slice | None,
        names: Sequence[str] | None,
        out: Mapping[str, ArrayLike] | None,
        placement: Placement,
        max_host_bytes: int | None,
    ) -> dict[str, Any]:
        budget, cut = self._history.budget(max_host_bytes), self._cut(columns, names, out)
        targets = self._destinations(len(wanted), cut, out, placement)
        with placement, Workers.of(self._history.store, budget) as workers:
            self._fill(wanted, cut, targets, workers, budget)
        return {name: placement.given(array) for name, array in targets.items()} if out is None else dict(out)

    def destinations(self, out: Mapping[str, ArrayLike] | None, placement: Placement) -> dict[str, Array]:
        """Arrays of `placement`, or of `out`, that all rows can be read into."""
        return self._destinations(len(self), self._cut(None, None, out), out, placement)

    def begin(self, targets: Mapping[str, Array], workers: Workers, budget: Budget) -> None:
        """Have all rows read into `destinations`; they are there when `workers` and their placement are done."""
        rows = WantedIds(self._live_keys) if self._entry.rows is None else WantedRange(0, len(self))
        self._fill(rows, self._cut(None, list(targets), None), targets, workers, budget)

    def _fill(
        self, wanted: Wanted, cut: Mapping[str, Cut], targets: Mapping[str, Array], workers: Workers, budget: Budget
    ) -> None:
        fill(self.layers(), wanted, targets, cut, workers, budget.rows)

    def _cut(self, columns: slice | None, names: Sequence[str] | None, out: object) -> dict[str, Cut]:
        """The columns of each field that is read."""
        return {f.name: _columns(f, columns) for f in self._chosen(_names(names, out))}

    def _destinations(
        self, count: int, cut: Mapping[str, Cut], out: Mapping[str, ArrayLike] | None, placement: Placement
    ) -> dict[str, Array]:
        if count == self._entry.rows and count > _MANY_ROWS:
            check_rows(self.layers())
        return self._fresh(cut, count, placement) if out is None else self._targets(out, count, cut, placement)

    def _chosen(self, names: Sequence[str] | None) -> list[Field]:
        by_name = {f.name: f for f in self._entry.fields}
        unknown = [name for name in names or () if name not in by_name]
        if unknown:
            raise InvalidInputError(f"table {self.name!r} has no field {unknown[0]!r}; it has {', '.join(by_name)}")
        return [by_name[name] for name in (by_name if names is None else names)]

    def _shape(self, field: Field, count: int, cut: Cut) -> tuple[int, ...]:
        return (count,) if field.columns is None else (count, cut[1] - cut[0])

    def check(self, placement: Placement, names: Iterable[str] | None = None) -> None:
        """Refuse fields that new arrays cannot hold."""
        for f in self._entry.fields:
            if names is None or f.name in names:
                placement.check(f.dtype, f"table {self.name!r}, field {f.name!r}")

    def _fresh(self, cut: Mapping[str, Cut], count: int, placement: Placement) -> dict[str, Array]:
        self.check(placement, cut)
        chosen = [f for f in self._entry.fields if f.name in cut]
        return {f.name: placement.empty(self._shape(f, count, cut[f.name]), f.dtype) for f in chosen}

    def _targets(
        self, out: Mapping[str, ArrayLike], count: int, cut: Mapping[str, Cut], placement: Placement
    ) -> dict[str, Array]:
        targets = {}
        for f in self._chosen(list(out)):
            what = f"out[{f.name!r}] of table {self.name!r}"
            targets[f.name] = placement.into(out[f.name], what)
            shape, dtype = self._shape(f, count, cut[f.name]), dtypes.logical(f.dtype)
            if targets[f.name].shape != shape or targets[f.name].dtype != dtype:
                got = targets[f.name]
                raise InvalidInputError(f"{what}: {got.dtype} {got.shape} where {f.dtype} {shape} is read")
        return targets

    def _beside(self, targets: Mapping[str, Array], count: int) -> dict[str, Array]:
        return {name: dlpack.empty_like(target, (count, *target.shape[1:])) for name, target in targets.items()}


def _names(fields: Sequence[str] | None, out: object) -> Sequence[str] | None:
    """Names of the fields to be read."""
    if out is None:
        return fields
    if not isinstance(out, Mapping):
        raise InvalidInputError("out: give a mapping of field names to arrays")
    return list(out)


def _range(rows: slice | None, count: int, what: str) -> tuple[int, int]:
    if rows is None:
        return 0, count
    if not isinstance(rows, slice):
        raise InvalidInputError(f"{what}: give a slice; take() reads single rows")
    try:
        low, high, step = rows.indices(count)
    except TypeError as error:
        raise InvalidInputError(f"{what}: {error}") from error
    if step != 1:
        raise InvalidInputError(f"{what}: step {step}; only consecutive ones are read")
    return low, max(low, high)


def _columns(field: Field, columns: slice | None) -> tuple[int, int]:
    return _range(columns, field.columns or 1, f"columns of field {field.name!r}") if field.columns else (0, 1)
