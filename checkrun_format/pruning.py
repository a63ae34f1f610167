"""Pruning: what of a run goes by the rules of retention, and removing it (FORMAT.md 5.3).

A plan is made from the commits and listings alone. A checkpoint stays if a rule or a tag keeps it, if a save may be
laid over it, or if one that stays needs it; why is told. What is not known for what it is stays, too.
"""

from __future__ import annotations

import datetime as dt
import logging
import re
import threading
import warnings
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

from checkrun_format import layout, manifest
from checkrun_format.chain import History
from checkrun_format.errors import (
    DamagedError,
    InvalidInputError,
    PruneWarning,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)
from checkrun_format.manifest import Commit, Pruned
from checkrun_format.retention import Age, Decision, Keep, Leftover, Plan, checked_age
from checkrun_format.tags import Tags
from checkrun_format.versions import FORMAT_VERSION
from checkrun_format.workers import Workers

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
"""What a crash of the local store may leave beside a commit."""

_UNREADABLE = (DamagedError, UnsupportedVersionError, UnsupportedFeatureError)

_LOG = logging.getLogger("checkrun_format")


@dataclass(slots=True)
class _Census:
    """What the numbers of a run are occupied by."""

    commits: dict[int, Commit] = field(default_factory=dict)
    pruned: set[int] = field(default_factory=set)
    vacant: set[int] = field(default_factory=set)
    """Numbers that have a folder and no commit: free, or burnt."""
    unclear: dict[int, str] = field(default_factory=dict)
    """Numbers at which a commit stands, or may come to stand, that cannot be read; and why."""

    @property
    def known(self) -> set[int]:
        """Numbers of which nothing new is to be expected."""
        return {*self.commits, *self.pruned}


class Pruning:
    """Plans prunes of a run, and carries them out.

    It remembers commits, markers, and which folders hold nothing too much, so that the next plan reads what is new.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._store = history.store
        self._tags = Tags(history)
        self._occupants: dict[int, Commit | Pruned] = {}
        self._clean: set[int] = set()

    # Planning ---------------------------------------------------------------------------------------------------------

    def plan(self, keep: Keep, *, abandoned: Age | None = None, now: dt.datetime | None = None) -> Plan:
        """What a prune would do; writes nothing.

        Parameters
        ----------
        keep : Keep
        abandoned : timedelta or seconds
            Attempts at free and burnt numbers, whose save may still be going on, go too if nothing of them was written
            for so long.

        Raises
        ------
        DamagedError, UnsupportedVersionError
            A tag cannot be read, so that it is not known what it keeps.
        """
        age = None if abandoned is None else checked_age(abandoned, "abandoned")
        now = dt.datetime.now(dt.UTC) if now is None else now
        census = self._census()
        reasons = self._reasons(census, keep, now)
        decisions, leftovers, unknown = [], [], self._strangers()
        for number in sorted(census.known | census.vacant):
            commit = census.commits.get(number)
            found = self._folder(number, commit, census, None if age is None else (now - age).timestamp())
            if commit is not None:
                own = sum(item.bytes for item in found.leftovers if item.place == commit.prefix)
                found.leftovers = [item for item in found.leftovers if item.place != commit.prefix]
                size = own or commit.bytes
                decisions.append(Decision(commit=commit, reasons=tuple(reasons.get(number, ())), bytes=size))
            leftovers += found.leftovers
            unknown += found.unknown
        return Plan(
            url=self._store.url,
            known=frozenset(census.known),
            checkpoints=tuple(decisions),
            leftovers=tuple(leftovers),
            unknown=tuple(unknown),
        )

    def _census(self) -> _Census:
        census = _Census()
        for number in self._history.numbers():
            self._look_up(number, census)
        occupied = sorted({*census.commits, *census.pruned, *census.unclear})
        for number in occupied:
            census.unclear.setdefault(number + 1, f"a save may be going on at {number + 1}")
        for number in census.known:
            census.unclear.pop(number, None)
        return census

    def _look_up(self, number: int, census: _Census) -> None:
        try:
            occupant = self._occupants.get(number) or self._history.occupant(number)
        except _UNREADABLE as error:
            census.unclear[number] = f"{number} cannot be read ({error.kind})"
            return
        if isinstance(occupant, Commit):
            self._occupants[number] = census.commits[number] = occupant
        elif isinstance(occupant, Pruned):
            self._occupants[number] = occupant
            census.pruned.add(number)
        else:
            census.vacant.add(number)
            if occupant is not None:
                census.unclear[number] = f"{number} is burnt, or is being committed"

    def _reasons(self, census: _Census, keep: Keep, now: dt.datetime) -> dict[int, list[str]]:
        """For each checkpoint that stays, why."""
        found: dict[int, list[str]] = {}
        commits = census.commits
        if commits:
            found[max(commits)] = ["the latest"]
        for name, number in self._tags.read().items():
            found.setdefault(number, []).append(f"tag {name}")
        for number, reason in keep.reasons(commits, now):
            found.setdefault(number, []).append(reason)
        for number, reason in sorted(census.unclear.items()):
            # Whatever is, or will be, committed there lies over the chain of the one before it (COM-6).
            below = max((other for other in commits if other < number), default=None)
            if below is not None and below not in found:
                found[below] = [reason]
        for number in sorted(commits, reverse=True):
            parent = commits[number].parent
            if (
                number in found
                and parent is not None
                and not any(r.startswith("needed") for r in found.get(parent, ()))
            ):
                found.setdefault(parent, []).append(f"needed by {number}")
        return found

    def _folder(self, number: int, commit: Commit | None, census: _Census, limit: float | None) -> _Folder:
        """What lies in a checkpoint's folder beside its commit and the attempt that this names (TRE-2)."""
        found = _Folder()
        if number in self._clean:
            return found
        attempts: dict[str, list[tuple[str, int]]] = {}
        for key, size in sorted(self._store.list(layout.folder(number)).items()):
            name, _, inside = key.removeprefix(f"{layout.folder(number)}/").partition("/")
            if layout.is_attempt(name) and inside:
                attempts.setdefault(f"{layout.folder(number)}/{name}", []).append((key, size))
            elif _TEMPORARY.fullmatch(name) and not inside and (commit is not None or number in census.pruned):
                attempts[key] = [(key, size)]
            elif key != layout.commit_key(number):
                found.unknown.append(key)
        for place, objects in attempts.items():
            goes, reason = self._fate(number, commit, census, [key for key, _ in objects], limit)
            size = sum(size for _, size in objects)
            found.leftovers.append(
                Leftover(sequence=number, place=place, objects=len(objects), bytes=size, goes=goes, reason=reason)
            )
        alone = commit is None or not attempts.keys() - {commit.prefix}
        if (number in census.pruned and not attempts) or (commit is not None and alone):
            self._clean.add(number)
        return found

    def _fate(
        self, number: int, commit: Commit | None, census: _Census, keys: list[str], limit: float | None
    ) -> tuple[bool, str]:
        """Whether an attempt that no commit names goes, and why (PRU-3)."""
        if commit is not None:
            return True, f"lost number {number} to attempt {commit.attempt}"
        if number in census.pruned:
            return True, f"left over from pruning {number}"
        if limit is None:
            return False, "its save may be going on"
        times = [self._store.modified(key) for key in keys]
        if any(time is None or time > limit for time in times):
            return False, "its save may be going on: it is not as old as that, or nobody knows how old"
        written = dt.datetime.fromtimestamp(max(time for time in times if time is not None), dt.UTC)
        return True, f"abandoned, last written at {written.isoformat(timespec='seconds')}"

    def _strangers(self) -> list[str]:
        known = {layout.RUN_KEY, layout.TAGS}
        names = [name for name in self._store.folders() or () if layout.parse_folder(name) is None]
        return sorted(name for name in names if name not in known and not name.startswith("."))

    # Pruning ----------------------------------------------------------------------------------------------------------

    def prune(self, plan: Plan) -> None:
        """Carry out a plan.

        Children go before parents, and a marker takes the place of a commit before its data go (PRU-1): whenever this
        is interrupted, what is left is whole, and the next prune removes the rest.

        Raises
        ------
        InvalidInputError
            Something was committed or tagged since that needs what the plan removes: plan again.
        StorageError
        """
        if plan.url != self._store.url:
            raise InvalidInputError(f"this plan is of {plan.url}, not of {self._store.url}")
        goes = {decision.sequence: decision for decision in plan.checkpoints if decision.goes}
        self._check_commits(plan, goes.keys())
        for number in sorted(goes, reverse=True):
            self._remove(goes[number], goes.keys())
        for leftover in plan.leftovers:
            if leftover.goes:
                self._sweep(leftover)

    def _check_commits(self, plan: Plan, goes: AbstractSet[int]) -> None:
        """Refuse a plan if a commit that it does not know needs what it removes."""
        for number in self._history.numbers():
            if number in plan.known:
                continue
            try:
                occupant = self._history.occupant(number)
            except _UNREADABLE:
                continue  # what it needs is kept by every plan
            if isinstance(occupant, Commit) and occupant.parent in goes:
                raise InvalidInputError(
                    f"checkpoint {number}, committed since this plan was made, needs {occupant.parent}: plan again"
                )

    def _check_tags(self, goes: AbstractSet[int]) -> None:
        """Stop if somebody named a checkpoint that is to go."""
        for name, number in self._tags.read().items():
            if number in goes and not isinstance(self._occupants.get(number), Pruned):
                raise InvalidInputError(f"checkpoint {number} was tagged {name!r} since this plan was made: plan again")

    def _remove(self, decision: Decision, goes: AbstractSet[int]) -> None:
        """Prune one checkpoint (PRU-1), unless one that is to go has been tagged (TAG-2)."""
        number, key = decision.sequence, layout.commit_key(decision.sequence)
        marker = Pruned(kind="pruned", format_version=FORMAT_VERSION, sequence=number)
        occupant = self._history.occupant(number)
        if isinstance(occupant, Commit):
            self._check_tags(goes)
            self._store.replace(key, layout.group_document(manifest.as_object(marker)))
        elif not isinstance(occupant, Pruned):
            raise DamagedError(key, "it was a commit when this prune was planned: plan again")
        self._history.forget(number)
        self._occupants[number] = marker
        self._clean.discard(number)
        self._delete(decision.commit.prefix)

    def _sweep(self, leftover: Leftover) -> None:
        """Delete what belongs to no checkpoint, if it still does not."""
        occupant = self._history.occupant(leftover.sequence)
        if isinstance(occupant, Commit) and occupant.prefix == leftover.place:
            return  # its save was going on after all
        if layout.is_attempt(leftover.place.partition("/")[2]):
            self._delete(leftover.place)
        else:
            self._store.delete(leftover.place)

    def _delete(self, prefix: str) -> None:
        with Workers.of(self._store) as workers:
            for key in sorted(self._store.list(prefix)):
                workers.run(0, partial(self._store.delete, key))


@dataclass(slots=True)
class _Folder:
    """What a checkpoint's folder holds beside the checkpoint."""

    leftovers: list[Leftover] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class Pruner:
    """Prunes a run in the background, one prune at a time; it never stands in the way of a save.

    Parameters
    ----------
    history : History
    keep : Keep
    """

    def __init__(self, history: History, keep: Keep) -> None:
        self._pruning = Pruning(history)
        self._keep = keep
        self._lock = threading.Lock()
        self._is_due = False
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []

    def start(self) -> None:
        """Prune soon. Warns of prunes that failed before."""
        with self._lock:
            self._is_due = True
            if self._thread is None or not self._thread.is_alive():
                # Not a daemon: the interpreter waits for it at its end.
                self._thread = threading.Thread(target=self._work, name="checkrun-prune")
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads, or the interpreter is ending
                    self._thread = None
                    self._failures.append(str(error))
        self._tell()

    def settle(self) -> None:
        """Wait until no prune is going on. Warns of those that failed."""
        thread = self._thread
        if thread is not None:
            thread.join()
        self._tell()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                self._is_due = False
            try:
                self._pruning.prune(self._pruning.plan(self._keep))
            except Exception as error:  # noqa: BLE001 - told to the user by the next call, whatever it is
                _LOG.warning("a prune in the background failed: %s", error)
                self._failures.append(f"{type(error).__name__}: {error}")

    def _tell(self) -> None:
        failures, self._failures = self._failures, []
        for failure in failures:
            warnings.warn(
                f"a prune in the background failed, the next one goes on: {failure}", PruneWarning, stacklevel=4
            )
