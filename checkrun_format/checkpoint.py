"""A committed checkpoint, as the user sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from checkrun_format import dtypes
from checkrun_format.chain import History
from checkrun_format.changes import Changes, changes
from checkrun_format.dlpack import Array
from checkrun_format.errors import InvalidInputError, NotFoundError
from checkrun_format.integers import whole
from checkrun_format.manifest import Commit
from checkrun_format.placement import Placement
from checkrun_format.readahead import reading_ahead
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.rows import Ids, RowSet
from checkrun_format.state import ArrayLike, State, Table
from checkrun_format.tracking import stored_by
from checkrun_format.view import TableView, telling
from checkrun_format.workers import Workers

if TYPE_CHECKING:
    import zarr

__all__ = ["Checkpoint", "TableView"]


class Checkpoint:
    """A committed, immutable checkpoint.

    Opening one reads its commit and its manifest (OPN-1); everything else is read when it is asked for.
    """

    def __init__(self, history: History, stored: StoredCheckpoint) -> None:
        self._history = history
        self._stored = stored

    def __repr__(self) -> str:
        return f"<checkpoint {self.sequence}, step {self.step}, of {self._history.store.url}>"

    @property
    def commit(self) -> Commit:
        """The commit (FORMAT.md 5.2)."""
        return self._stored.commit

    @property
    def sequence(self) -> int:
        """Its number."""
        return self.commit.sequence

    @property
    def step(self) -> int | None:
        """The trainer's step."""
        return self.commit.step

    @property
    def parent(self) -> int | None:
        """The number of its parent; None in a base."""
        return self.commit.parent

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects of the checkpoint, the manifest included, the commit apart."""
        return self.commit.bytes

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""
        return [entry.name for entry in self._stored.manifest.tables]

    def table(self, name: str) -> TableView:
        """One table.

        Raises
        ------
        TableNotFoundError, UnsupportedFeatureError
        """
        return TableView(self._history, self._stored, name)

    @property
    def tensors(self) -> list[str]:
        """Names of the dense tensors."""
        return [entry.name for entry in self._stored.manifest.tensors]

    @property
    def tensor_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Logical dtype and shape of each dense tensor."""
        return {entry.name: (entry.dtype, tuple(entry.shape)) for entry in self._stored.manifest.tensors}

    @telling
    def tensor(self, name: str, *, framework: str | None = None, device: object = None) -> Any:
        """One dense tensor, as a new array; options as of `load`."""
        placement = Placement(framework, device)
        array = self._tensor_destination(name, None, placement)
        with placement, Workers.of(self._history.store, self._history.budget(None)) as workers:
            self._stored.read_tensor(self._stored.tensor_entry(name), array, workers)
        return placement.given(array)

    @property
    def extra(self) -> Any:
        """The trainer's state."""
        return self._stored.extra()

    @property
    def blobs(self) -> list[str]:
        """Names of the blobs."""
        return [entry.name for entry in self._stored.manifest.blobs]

    @telling
    def blob(self, name: str) -> bytes:
        """One blob."""
        entry = next((b for b in self._stored.manifest.blobs if b.name == name), None)
        if entry is None:
            raise NotFoundError(f"checkpoint {self.sequence} has no blob {name!r}")
        return self._stored.blob(entry)

    @telling
    def load(
        self,
        *,
        tables: Sequence[str] | None = None,
        out: State | None = None,
        framework: str | None = None,
        device: object = None,
        max_host_bytes: int | None = None,
    ) -> State:
        """Read the whole checkpoint, or some of its tables.

        Parameters
        ----------
        tables : names
            By default all. With `tables=[]` only tensors, extra and blobs.
        out : State
            Existing arrays to read into, of the right shapes and dtypes, of any framework, on the CPU or on a device:
            tables that `out` has are read into its arrays (its fields only), and tensors that it has into its tensors.
            The rest is returned in new arrays. After an error the arrays may hold anything. On the CPU, decoded rows
            are written fastest where arrays begin at a multiple of 64 bytes, as those of torch and new ones here do.
        framework : "numpy", "torch", "jax" or "cupy"
            Of new arrays. By default numpy, with a device torch.
        device : str or torch.device
            Where new arrays are, as torch names it: "cuda", "cuda:1". Rows go there as they are stored, by way of two
            pinned buffers, and are decoded there, to the bits that the CPU gives. "cpu" goes the same way, to show it;
            without a device the CPU is faster.
        max_host_bytes : int
            About how much memory to use beside what is read into, documents and the keys of keyed tables; by default
            what the run was opened with. It bounds how much is on its way, and of how many rows at a time it is
            decided which checkpoint has them: a quarter of it in rows. The less, the more often a chunk whose rows lie
            further apart is read. A chunk is read whole, even if it is larger. Values are the same for any number.

        Returns
        -------
        State
            Tables hold every field as an array, and `keys` (of numpy) if keyed.

        Raises
        ------
        InvalidInputError
            Before anything is read: also if `out` has what the checkpoint lacks, the framework is not installed, the
            device is not there, or the framework lacks a dtype (jax narrows 64 bits unless its option jax_enable_x64 is
            set).
        """
        if isinstance(tables, str):
            raise InvalidInputError(f"tables={tables!r}: give a list of names")
        placement = Placement(framework, device)
        views = {name: self.table(name) for name in (self.tables if tables is None else tables)}
        given = out or State()
        self._check_known(given)
        into = {name: table.fields for name, table in given.tables.items()}
        for name, view in views.items():
            if name not in into:
                view.check(placement)
        for name in self.tensors:
            if name not in given.tensors:
                self._check_tensor(name, placement)
        budget = self._history.budget(max_host_bytes)
        read = {name: view.destinations(into.get(name), placement) for name, view in views.items()}
        dense = {name: self._tensor_destination(name, given.tensors.get(name), placement) for name in self.tensors}
        ahead = reading_ahead(self._history, self._stored, set(views))
        with placement, ahead, Workers.of(self._history.store, budget) as workers:
            for name, view in views.items():
                view.begin(read[name], workers, budget)
            for name, array in dense.items():
                self._stored.read_tensor(self._stored.tensor_entry(name), array, workers)
        fields = {name: into.get(name) or _given(placement, arrays) for name, arrays in read.items()}
        return State(
            tables={name: Table(fields[name], keys=_keys(view)) for name, view in views.items()},
            tensors={n: given.tensors[n] if n in given.tensors else placement.given(a) for n, a in dense.items()},
            extra=self.extra,
            blobs={name: self.blob(name) for name in self.blobs},
        )

    def _check_known(self, out: State) -> None:
        """Refuse arrays that nothing would be read into: they would keep what they hold."""
        for given, known, what in ((out.tables, self.tables, "table"), (out.tensors, self.tensors, "tensor")):
            unknown = sorted(set(given) - set(known))
            if unknown:
                told = f"checkpoint {self.sequence} has no {what} {unknown[0]!r}: leave it out"
                raise InvalidInputError(f"out: {told} ({len(unknown)} such {what}s in all)")

    def _check_tensor(self, name: str, placement: Placement) -> None:
        placement.check(self._stored.tensor_entry(name).dtype, f"tensor {name!r}")

    def _tensor_destination(self, name: str, into: ArrayLike | None, placement: Placement) -> Array:
        entry = self._stored.tensor_entry(name)
        shape = tuple(entry.shape)
        if into is None:
            self._check_tensor(name, placement)
            return placement.empty(shape, entry.dtype)
        target = placement.into(into, f"out tensor {name!r}")
        if target.shape != shape or dtypes.name_of(target.dtype) != entry.dtype:
            raise InvalidInputError(
                f"out tensor {name!r}: {target.dtype} {target.shape} where {entry.dtype} {shape} is read"
            )
        return target

    def stored_since(self, parent: int | None, table: str) -> Ids | None:
        """The rows of a dense table that the layers from this one down to, but without, `parent` store.

        None if one of them may hold any row: it stores the table full, or lacks it.
        """
        rows = RowSet()
        for layer in self._history.chain(self._stored):
            if layer.commit.sequence == parent:
                break
            if not layer.has(table):
                return None
            touched = stored_by(layer, table)
            if touched.everything or not isinstance(touched.rows, RowSet):
                return None
            rows.update(touched.rows)
        return rows.ids()

    def changes_since(
        self, other: int | Checkpoint, *, raw: bool = False, max_bytes: int = 64 << 20
    ) -> Iterator[Changes]:
        """Exactly the rows and tombstones that changed since an earlier checkpoint, in bounded batches.

        Parameters
        ----------
        other : number or Checkpoint
            An earlier checkpoint; it may itself be pruned by now.
        raw : bool
            Fields as `StoredField`: codes and qparams as they are stored, not decoded.
        max_bytes : int
            Decoded bytes of one batch, about; at least one row.

        Raises
        ------
        HistoryPrunedError
            A checkpoint on the way is gone; load the whole instead.
        """
        since = other.sequence if isinstance(other, Checkpoint) else other
        number = whole(
            since, f"changes since {since!r}: give the number of a checkpoint up to {self.sequence}", 1, self.sequence
        )
        size = whole(max_bytes, f"max_bytes {max_bytes!r}; at least 1", 1)
        return changes(self._history, self._stored, number, size, raw=raw)

    def zarr(self) -> zarr.Group:
        """The checkpoint's arrays as a read-only Zarr group, exactly as they are stored."""
        import zarr

        store = self._history.store.zarr_store(self._stored.prefix)
        return zarr.open_group(store, mode="r", zarr_format=3, use_consolidated=False)


def _given(placement: Placement, arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: placement.given(array) for name, array in arrays.items()}


def _keys(view: TableView) -> npt.NDArray[Any] | None:
    return view.keys() if view.addressing == "keyed" else None
