"""What occupies each number of a run, from its commits alone; damage is told, not raised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from checkrun_format import layout
from checkrun_format.chain import History
from checkrun_format.cli import document
from checkrun_format.errors import CheckrunError, DamagedError, NotARunError
from checkrun_format.manifest import Burnt, Commit, Problem, Pruned
from checkrun_format.stores import open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number and what occupies it (COM-2).

    Attributes
    ----------
    sequence : int
    kind : str
        `base`, `increment`, `pruned`, `burnt`; if it cannot be read the kind of the error, such as `damaged`.
    commit : Commit or None
    problem : Problem or None
        Why it cannot be read.
    broken_at : int or None
        The number in its chain that is no checkpoint (any more), so that this one cannot be read either.
    """

    sequence: int
    kind: str
    commit: Commit | None = None
    problem: Problem | None = None
    broken_at: int | None = None

    @property
    def bytes(self) -> int | None:
        """Bytes of all objects of the checkpoint, the commit apart."""
        return None if self.commit is None else self.commit.bytes

    @property
    def note(self) -> str:
        """Policy and reason, or what is wrong."""
        if self.commit is None:
            return "" if self.problem is None else self.problem.message
        policy = f"{self.commit.policy.name}: {self.commit.policy.reason}"
        return policy if self.broken_at is None else f"UNREADABLE, its chain breaks at {self.broken_at}; {policy}"

    @property
    def is_unreadable(self) -> bool:
        """Whether damage keeps it from being read."""
        return self.problem is not None or self.broken_at is not None

    def as_object(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "sequence": self.sequence,
            "kind": self.kind,
            **commit_object(self.commit),
            "broken_at": self.broken_at,
            "problem": None if self.problem is None else document.problem(self.problem),
        }


def commit_object(commit: Commit | None) -> dict[str, Any]:
    """What a commit says, as JSON values; all null without one."""
    names = ("step", "parent", "predecessor", "rollback_to", "created", "restores", "attempt")
    told: dict[str, Any] = {name: getattr(commit, name, None) for name in names}
    if commit is None:
        return told | {"bytes": None, "policy": None}
    policy = {"name": commit.policy.name, "reason": commit.policy.reason}
    return told | {"bytes": commit.bytes, "policy": policy}


def open_history(url: str) -> tuple[History, list[Problem]]:
    """The history of a run, even if the run document is damaged or lost, which is then told as a problem.

    Raises
    ------
    RunNotFoundError, NotARunError, DamagedError, UnsupportedVersionError, UnsupportedFeatureError
    """
    history = History(open_store(url))
    try:
        history.check_run()
    except (NotARunError, DamagedError) as error:
        if all(number.commit is None for number in census(history)):
            raise
        return history, [Problem.of(error, layout.RUN_KEY)]
    return history, []


def census(history: History) -> Iterator[Number]:
    """Every occupied number in ascending order, one at a time."""
    broken_at: dict[int, int | None] = {}
    for sequence in history.numbers():
        number = look_up(history, sequence)
        if number is None:
            continue
        if number.commit is not None:
            number = _judged(number.commit, broken_at)
            broken_at[sequence] = number.broken_at
        yield number


def _judged(commit: Commit, broken_at: dict[int, int | None]) -> Number:
    """A committed number, given where the chains of those below it break."""
    where = None if commit.parent is None else broken_at.get(commit.parent, commit.parent)
    return Number(sequence=commit.sequence, kind=kind_of(commit), commit=commit, broken_at=where)


def kind_of(commit: Commit) -> str:
    """`base` or `increment`."""
    return "base" if commit.parent is None else "increment"


def look_up(history: History, sequence: int) -> Number | None:
    """What occupies one number, None if it is free; its chain is not looked at."""
    try:
        occupant = history.occupant(sequence)
    except CheckrunError as error:
        problem = Problem.of(error, layout.commit_key(sequence))
        return Number(sequence=sequence, kind=problem.kind, problem=problem)
    if occupant is None:
        return None
    if isinstance(occupant, Commit):
        return Number(sequence=sequence, kind=kind_of(occupant), commit=occupant)
    return Number(sequence=sequence, kind=_UNCOMMITTED[type(occupant)])


_UNCOMMITTED: dict[type[Pruned | Burnt], str] = {Pruned: "pruned", Burnt: "burnt"}
