"""The numbers of a run, what occupies them, and how checkpoints lie over one another (FORMAT.md COM-2, section 8)."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, overload

from checkrun_format import layout, manifest
from checkrun_format.chunks import ChunkReader
from checkrun_format.errors import (
    BurntError,
    BurntNumberWarning,
    CheckpointNotFoundError,
    DamagedError,
    HistoryPrunedError,
    NotARunError,
    PrunedError,
    RunNotFoundError,
)
from checkrun_format.manifest import Burnt, Commit, Pruned, TableEntry
from checkrun_format.reader import StoredCheckpoint
from checkrun_format.stores import AlreadyExistsError, Store
from checkrun_format.versions import FORMAT_VERSION
from checkrun_format.workers import Budget, ProcessLock

Layer: TypeAlias = tuple[StoredCheckpoint, TableEntry]
"""A checkpoint, and what it says of a table."""

_KEPT = 64
"""Checkpoints whose documents are kept in memory."""


class History:
    """The checkpoints of a run.

    Commits never change but by pruning, so what has been read of a committed checkpoint is kept.

    Parameters
    ----------
    store : Store
    budget : Budget
        Memory for each read that is given none of its own.
    """

    def __init__(self, store: Store, budget: Budget | None = None) -> None:
        self.store = store
        self._budget = budget or Budget()
        self.chunks = ChunkReader(store)
        self._checkpoints: OrderedDict[int, StoredCheckpoint] = OrderedDict()
        self._lock = ProcessLock()

    def budget(self, max_host_bytes: int | None) -> Budget:
        """The memory for a read that begins now; what is kept from earlier ones is cut to fit."""
        budget = self._budget if max_host_bytes is None else Budget(max_host_bytes)
        self.chunks.keep(budget.kept)
        return budget

    def check_run(self) -> None:
        """Read the run document.

        Raises
        ------
        RunNotFoundError, NotARunError, DamagedError, UnsupportedVersionError, UnsupportedFeatureError
        """
        data = self.store.get(layout.RUN_KEY)
        if data is not None:
            try:
                manifest.parse_run(data)
            except NotARunError as error:
                raise NotARunError(f"{self.store.url} holds no run: {error}") from error
            return
        names = self.store.folders()
        if names is None:
            raise RunNotFoundError(f"{self.store.url} does not exist")
        way_out = _if_lost(names)
        raise NotARunError(f"{self.store.url} holds no run: it has no {layout.RUN_KEY}{way_out and '; '}{way_out}")

    def create_run(self, document: bytes | None = None) -> None:
        """Create the run document if there is none (RUN-1): the one that is given, or a new one.

        Before, make sure that the store creates as STO-2 says.

        Raises
        ------
        NotARunError
            Something else is stored there.
        """
        self.store.prepare()
        if self.store.get(layout.RUN_KEY) is not None:
            return
        strangers = [name for name in self.store.folders() or () if not name.startswith(".")]
        if strangers and self.store.get(layout.RUN_KEY) is None:  # they may be of a run that was created just now
            way_out = _if_lost(strangers) or "give an empty folder"
            raise NotARunError(
                f"{self.store.url} holds no run but other things ({', '.join(sorted(strangers)[:3])}): {way_out}"
            )
        if document is None:
            document = layout.group_document({"kind": "run", "format_version": FORMAT_VERSION, "requires": []})
        with contextlib.suppress(AlreadyExistsError):  # another process created it just now: it is read next
            self.store.create(layout.RUN_KEY, document)

    def numbers(self) -> list[int]:
        """The numbers that have a folder, occupied or not, in ascending order (TRE-1)."""
        names = self.store.folders() or []
        return sorted(number for name in names if (number := layout.parse_folder(name)) is not None)

    def occupant(self, sequence: int) -> Commit | Pruned | Burnt | None:
        """What occupies a number, None if it is free (COM-2); errors as of `parse_occupant`."""
        data = self.store.get(layout.commit_key(sequence))
        if data is None:
            return None
        occupant = manifest.parse_occupant(data, sequence)
        if isinstance(occupant, Commit):
            with self._lock:
                if sequence not in self._checkpoints:
                    self._keep(sequence, occupant, data)
        return occupant

    def found(self, sequence: int, *, skip_damaged: bool) -> Commit | Pruned | Burnt | None:
        """What occupies a number; None also if it is damaged and may be skipped, else the error tells the ways out."""
        try:
            return self.occupant(sequence)
        except DamagedError as error:
            if skip_damaged:
                return None
            raise _explained(error, sequence) from error

    def head(self) -> int:
        """The highest occupied number, 0 in an empty run."""
        for number in reversed(self.numbers()):
            if self.store.get(layout.commit_key(number)) is not None:
                return number
        return 0

    def latest(self, *, skip_damaged: bool = False) -> int | None:
        """The highest committed number (HEA-5, COM-5)."""
        before: dict[int, Pruned | Burnt | None] | None = None
        while True:
            latest, passed = self._latest(skip_damaged=skip_damaged)
            # Pruning keeps the latest checkpoint: one that is pruned was the latest no more, so look again.
            if passed == before or not any(isinstance(occupant, Pruned) for occupant in passed.values()):
                where = "no checkpoint was committed" if latest is None else f"the latest checkpoint is {latest}"
                _warn_of_burnt([number for number, occupant in passed.items() if isinstance(occupant, Burnt)], where)
                return latest
            before = passed

    def _latest(self, *, skip_damaged: bool) -> tuple[int | None, dict[int, Pruned | Burnt | None]]:
        """The highest committed number, and what occupies those above it."""
        passed: dict[int, Pruned | Burnt | None] = {}
        for number in reversed(self.numbers()):
            occupant = self.found(number, skip_damaged=skip_damaged)
            if isinstance(occupant, Commit):
                return number, passed
            passed[number] = occupant
        return None, passed

    def get(self, sequence: int) -> StoredCheckpoint:
        """A committed checkpoint.

        Raises
        ------
        CheckpointNotFoundError, PrunedError, BurntError, DamagedError
        """
        with self._lock:
            return self._checkpoints.get(sequence) or self._read(sequence)

    def _keep(self, sequence: int, commit: Commit, data: bytes) -> StoredCheckpoint:
        stored = StoredCheckpoint(self.store, self.chunks, commit, manifest.commit_object(data))
        self._checkpoints[sequence] = stored
        if len(self._checkpoints) > _KEPT:
            self._checkpoints.popitem(last=False)
        return stored

    def forget(self, sequence: int) -> None:
        """Keep no more what was read of a checkpoint: it has been pruned."""
        with self._lock:
            self._checkpoints.pop(sequence, None)

    def _read(self, sequence: int) -> StoredCheckpoint:
        key = layout.commit_key(sequence)
        data = self.store.get(key)
        if data is None:
            raise CheckpointNotFoundError(f"{self.store.url} has no checkpoint {sequence}")
        occupant = manifest.parse_occupant(data, sequence)
        if isinstance(occupant, Pruned):
            raise PrunedError(f"checkpoint {sequence} was pruned")
        if isinstance(occupant, Burnt):
            raise BurntError(f"{key} is no commit: number {sequence} was burnt by a write that did not finish")
        return self._keep(sequence, occupant, data)

    def commits(self) -> Iterator[Commit]:
        """The commits from the lowest number to the highest; reads nothing else."""
        for number in self.numbers():
            occupant = self.occupant(number)
            if isinstance(occupant, Commit):
                yield occupant

    def parent(self, checkpoint: StoredCheckpoint) -> StoredCheckpoint | None:
        """The parent, its digest checked (MAN-2).

        Raises
        ------
        DamagedError, PrunedError
            The chain is broken.
        """
        sequence = checkpoint.commit.parent
        if sequence is None:
            return None
        sha256 = checkpoint.manifest.parent_sha256
        try:
            below = self.get(sequence)
        except (CheckpointNotFoundError, BurntError) as error:
            place = layout.commit_key(sequence)
            raise DamagedError(place, f"missing, but checkpoint {checkpoint.commit.sequence} needs it") from error
        except PrunedError as error:
            raise PrunedError(f"{error}, but checkpoint {checkpoint.commit.sequence} needs it") from error
        _check_meant(below, checkpoint, sha256)
        return below

    def chain(self, checkpoint: StoredCheckpoint) -> Iterator[StoredCheckpoint]:
        """A checkpoint, its parent, and so on down to a base."""
        below: StoredCheckpoint | None = checkpoint
        while below is not None:
            yield below
            below = self.parent(below)

    def layers(self, checkpoint: StoredCheckpoint, table: str) -> list[Layer]:
        """The layers of a table, newest first, down to the one that stores it full (9.3).

        Raises
        ------
        DamagedError
            A layer breaks LAY-2 or LAY-3.
        """
        return list(self.descent(checkpoint, table))

    def descent(self, checkpoint: StoredCheckpoint, table: str) -> Descent:
        """The same layers, each read and checked when somebody comes down to it."""
        return Descent(self._layers(checkpoint, table))

    def _layers(self, checkpoint: StoredCheckpoint, table: str) -> Iterator[Layer]:
        above: Layer | None = None
        for below in self.chain(checkpoint):
            if above is not None and not below.has(table):
                raise DamagedError(above[0].place("manifest.json"), f"table {table!r} is not in the parent (LAY-2)")
            entry = below.entry(table)
            problem = None if above is None else _layer_problem(above[1], entry)
            if above is not None and problem is not None:
                raise DamagedError(above[0].place("manifest.json"), f"table {table!r}: {problem}")
            yield (above := (below, entry))
            if entry.storage == "full":
                return
        assert above is not None
        raise DamagedError(above[0].place("manifest.json"), f"table {table!r} is not full in a base (LAY-2)")

    def predecessors(self, checkpoint: StoredCheckpoint, stop: int) -> Iterator[StoredCheckpoint]:
        """A checkpoint and those below it along `predecessor`, down to and excluding `stop` (CHG-1).

        Raises
        ------
        HistoryPrunedError
            One of them is pruned or missing, or the way does not meet `stop` (CHG-3).
        """
        below = checkpoint
        while below.commit.sequence > stop:
            yield below
            number = below.commit.predecessor
            if number == stop:
                return
            if number is None or number < stop:
                raise HistoryPrunedError(
                    f"checkpoint {stop} is not among the predecessors of {checkpoint.commit.sequence}: "
                    "what changed since is unknown; load the checkpoint as a whole"
                )
            above, sha256 = below, below.manifest.predecessor_sha256
            try:
                below = self.get(number)
            except (PrunedError, BurntError, CheckpointNotFoundError) as error:
                raise HistoryPrunedError(
                    f"what changed between {stop} and {checkpoint.commit.sequence} is unknown: {error}; "
                    "load the checkpoint as a whole"
                ) from error
            _check_meant(below, above, sha256)


class Descent(Sequence[Layer]):
    """The layers of a table, newest first, of a chain that is read only as far down as they are asked for.

    Parameters
    ----------
    layers : iterator
    """

    def __init__(self, layers: Iterator[Layer]) -> None:
        self._met: list[Layer] = []
        self._below = layers

    @overload
    def __getitem__(self, index: int) -> Layer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...

    def __getitem__(self, index: int | slice) -> Layer | list[Layer]:
        goes_down = not isinstance(index, int) or index < 0
        while goes_down or (isinstance(index, int) and index >= len(self._met)):
            layer = next(self._below, None)
            if layer is None:
                break
            self._met.append(layer)
        return self._met[index]

    def __len__(self) -> int:
        return len(self[:])


def _check_meant(below: StoredCheckpoint, checkpoint: StoredCheckpoint, sha256: str | None) -> None:
    """Refuse a checkpoint that is not the one over which, or after which, another was made (MAN-2)."""
    if below.commit.manifest.sha256 != sha256:
        place, above = layout.commit_key(below.commit.sequence), checkpoint.commit.sequence
        raise DamagedError(place, f"not the one that checkpoint {above} was laid over (MAN-2)")


def _layer_problem(above: TableEntry, below: TableEntry) -> str | None:
    if above.kind != below.kind:
        return "fields or addressing differ from the parent's (LAY-2)"
    if above.rows is not None and below.rows is not None and above.rows < below.rows:
        return f"{above.rows} rows over {below.rows} in the parent (LAY-3)"
    if above.storage == "unchanged" and above.rows != below.rows:
        return f"unchanged with {above.rows} rows over {below.rows} in the parent (LAY-3)"
    return None


def _explained(error: DamagedError, number: int) -> DamagedError:
    return DamagedError(
        error.place,
        f"{error.problem}. It may have been checkpoint {number}: repair it from a copy, open another checkpoint by "
        "its number, go back to an older one (rollback), or pass skip_damaged=True",
    )


def _warn_of_burnt(numbers: list[int], latest: str) -> None:
    if numbers:
        listed = ", ".join(layout.commit_key(number) for number in sorted(numbers))
        warnings.warn(f"{listed}: no commit, the number is burnt; {latest}", BurntNumberWarning, stacklevel=4)


def _if_lost(names: Iterable[str]) -> str:
    """What to do where checkpoints lie without the run document; nothing where there are none."""
    if all(layout.parse_folder(name) is None for name in names):
        return ""
    return (
        f"if these are checkpoints of a run that lost its {layout.RUN_KEY}, put that of a copy back, or that of a new "
        "run of the same release"
    )
