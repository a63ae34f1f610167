"""Retention: which checkpoints the rules keep, and what a plan says of all of them (FORMAT.md 5.3). Pure."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from checkrun_format.errors import InvalidInputError
from checkrun_format.integers import whole
from checkrun_format.manifest import Commit

Age = dt.timedelta | float
"""A time span: a timedelta, or seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Rules of retention: what any of them keeps stays.

    And so do, whatever the rules, the latest checkpoint, those that have a tag, and the chains of all that stay.

    Attributes
    ----------
    last : int
        The last n checkpoints, by number.
    every : int
        The first checkpoint at or after each multiple of so many steps. Where the trainer went back to an earlier step,
        what it did since counts.
    newer_than : timedelta or seconds
        Those committed in this time, by the clocks of their writers.

    Raises
    ------
    InvalidInputError
        No rule is given, or one makes no sense.
    """

    last: int | None = None
    every: int | None = None
    newer_than: Age | None = None

    def __post_init__(self) -> None:
        if self.last is None and self.every is None and self.newer_than is None:
            raise InvalidInputError("keep what? give last=, every= or newer_than=; Keep(last=1) keeps the latest only")
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is not None:
                whole(value, f"keep: {name}={value!r}; a number from 1 on", least=1)
        if self.newer_than is not None:
            checked_age(self.newer_than, "newer_than")

    def reasons(self, commits: dict[int, Commit], now: dt.datetime) -> Iterator[tuple[int, str]]:
        """The numbers that these rules keep, and why; of commits in ascending order."""
        if self.last is not None:
            for number in list(commits)[-self.last :]:
                yield number, f"last {self.last:,}"
        if self.every is not None:
            for number, multiple in _milestones(commits, self.every):
                yield number, f"first from step {multiple:,} on"
        if self.newer_than is not None:
            limit = now - checked_age(self.newer_than, "newer_than")
            for number, commit in commits.items():
                created = _time(commit.created)
                if created is None:
                    yield number, f"created at {commit.created!r}, which is no time"
                elif created > limit:
                    yield number, f"newer than {checked_age(self.newer_than, 'newer_than')}"


def checked_age(age: object, what: str) -> dt.timedelta:
    """Accept a time span, or raise InvalidInputError."""
    if isinstance(age, np.integer | np.floating):
        age = age.item()
    if isinstance(age, int | float) and not isinstance(age, bool) and math.isfinite(age):
        age = dt.timedelta(seconds=max(-1.0, min(age, 1e10)))
    if not isinstance(age, dt.timedelta) or age < dt.timedelta(0):
        raise InvalidInputError(f"{what}={age!r}; give a datetime.timedelta, or seconds")
    return min(age, dt.timedelta(days=100 * 365))


def _milestones(commits: dict[int, Commit], every: int) -> list[tuple[int, int]]:
    """For each multiple of `every` the first checkpoint at or after it, before which nobody has gone back since."""
    found: dict[int, int] = {}
    lowest = math.inf
    for number, commit in reversed(commits.items()):
        if commit.step is None:
            continue
        multiple = commit.step - commit.step % every
        if multiple <= lowest:
            found[multiple] = number
        lowest = min(lowest, commit.step)
    return [(number, multiple) for multiple, number in found.items()]


def _time(text: str) -> dt.datetime | None:
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a checkpoint.

    Attributes
    ----------
    commit : Commit
    reasons : tuple of text
        Why it stays; none: it goes.
    bytes : int
        What it takes; of one that goes, what is freed.
    """

    commit: Commit
    reasons: tuple[str, ...]
    bytes: int

    @property
    def goes(self) -> bool:
        """Whether it is removed."""
        return not self.reasons

    @property
    def sequence(self) -> int:
        """Its number."""
        return self.commit.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Objects in a checkpoint's folder that belong to no checkpoint: an attempt, or a temporary file.

    Attributes
    ----------
    sequence : int
    place : str
        Prefix of the attempt, or key of the file.
    objects, bytes : int
    goes : bool
    reason : str
        Why it goes, or why it stays.
    """

    sequence: int
    place: str
    objects: int
    bytes: int
    goes: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a prune will do. What is committed later is not its business.

    Attributes
    ----------
    url : str
    known : set of int
        The numbers that were committed or pruned.
    checkpoints : tuple of Decision
        One for each checkpoint, in ascending order.
    leftovers : tuple of Leftover
    unknown : tuple of text
        What is no part of the run, as far as one can tell; it stays.
    """

    url: str
    known: frozenset[int]
    checkpoints: tuple[Decision, ...]
    leftovers: tuple[Leftover, ...]
    unknown: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes that are freed."""
        freed = sum(decision.bytes for decision in self.checkpoints if decision.goes)
        return freed + sum(leftover.bytes for leftover in self.leftovers if leftover.goes)

    @property
    def goes(self) -> list[int]:
        """Numbers of the checkpoints that are removed, in ascending order."""
        return [decision.sequence for decision in self.checkpoints if decision.goes]

    @property
    def stays(self) -> list[int]:
        """Numbers of the checkpoints that stay, in ascending order."""
        return [decision.sequence for decision in self.checkpoints if not decision.goes]
