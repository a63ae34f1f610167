"""The history of a run as a tree: which checkpoint's state each one continues, and what a rollback abandoned. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkrun_format.cli.census import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A number in the history.

    Attributes
    ----------
    number : Number
        Its kind is `missing` if a commit names it and it is not there.
    follows : int or None
        The number whose state it continues: the target of a rollback, else the predecessor; of a number without a
        commit the one below it, which is a guess.
    is_abandoned : bool
        It is a checkpoint, and the latest one does not continue it.
    abandoned_by : int or None
        The rollback that abandoned it.
    layers, chain_bytes : int or None
        Of its whole chain; None if that is broken, or if it is no checkpoint.
    depth : int
        In how many abandoned branches it lies, one within another.
    """

    number: Number
    follows: int | None
    is_abandoned: bool
    abandoned_by: int | None
    layers: int | None
    chain_bytes: int | None
    depth: int

    def as_object(self) -> dict[str, Any]:
        """The same as JSON values."""
        return self.number.as_object() | {
            "follows": self.follows,
            "abandoned": self.is_abandoned,
            "abandoned_by": self.abandoned_by,
            "layers": self.layers,
            "chain_bytes": self.chain_bytes,
        }


def lineage(numbers: Iterable[Number]) -> list[Node]:
    """All numbers as nodes, in the order of a drawing: an abandoned branch stands before what went on instead."""
    known = _with_missing({number.sequence: number for number in numbers})
    follows, chains = _follows(known), _chains(known)
    live = set(_down(follows, latest_of(known.values())))
    abandoned_by = _abandoned_by(known, follows)
    return [
        Node(
            number=known[sequence],
            follows=follows[sequence],
            is_abandoned=known[sequence].commit is not None and sequence not in live,
            abandoned_by=None if sequence in live else abandoned_by.get(sequence),
            layers=chains.get(sequence, (None, None))[0],
            chain_bytes=chains.get(sequence, (None, None))[1],
            depth=depth,
        )
        for sequence, depth in _in_order(known, follows, live)
    ]


def latest_of(numbers: Iterable[Number]) -> int | None:
    """The highest committed one."""
    return max((number.sequence for number in numbers if number.commit is not None), default=None)


def _with_missing(known: Mapping[int, Number]) -> dict[int, Number]:
    """The numbers in ascending order, with those that a commit names and that are not there."""
    commits = [number.commit for number in known.values() if number.commit is not None]
    named = {n for c in commits for n in (c.parent, c.predecessor, c.rollback_to) if n is not None}
    missing = {n: Number(sequence=n, kind="missing") for n in named - known.keys()}
    both = {**known, **missing}
    return {sequence: both[sequence] for sequence in sorted(both)}


def _follows(known: Mapping[int, Number]) -> dict[int, int | None]:
    follows: dict[int, int | None] = {}
    below: int | None = None
    for sequence, number in known.items():
        if number.commit is None:
            follows[sequence] = below
        else:
            target = number.commit.rollback_to
            follows[sequence] = number.commit.predecessor if target is None else target
        below = sequence
    return follows


def _down(follows: Mapping[int, int | None], start: int | None) -> Iterator[int]:
    """A number, the one that it follows, and so on."""
    while start is not None:
        yield start
        start = follows[start]


def _abandoned_by(known: Mapping[int, Number], follows: Mapping[int, int | None]) -> dict[int, int]:
    """For each number that a rollback passed over, the last that did."""
    found: dict[int, int] = {}
    for sequence, number in known.items():
        if number.commit is None or number.commit.rollback_to is None:
            continue
        for passed in _down(follows, number.commit.predecessor):
            if passed <= number.commit.rollback_to:
                break
            found[passed] = sequence
    return found


def _chains(known: Mapping[int, Number]) -> dict[int, tuple[int, int]]:
    """Layers and bytes of the chain of each checkpoint whose chain is whole."""
    chains: dict[int, tuple[int, int]] = {}
    for sequence, number in known.items():
        if number.commit is not None and number.broken_at is None:
            layers, size = (0, 0) if number.commit.parent is None else chains[number.commit.parent]
            chains[sequence] = (layers + 1, size + (number.bytes or 0))
    return chains


def _in_order(
    known: Mapping[int, Number], follows: Mapping[int, int | None], live: set[int]
) -> Iterator[tuple[int, int]]:
    """Numbers and their depths, depth first; of those that follow the same number, the one that goes on comes last."""
    children: dict[int | None, list[int]] = {}
    for sequence, below in follows.items():
        children.setdefault(below, []).append(sequence)
    for heirs in children.values():
        heirs.sort(key=lambda n: (n in live, known[n].commit is not None, n))
    waiting = _heirs(children.get(None, []), 0, known, children)
    while waiting:
        sequence, depth = waiting.pop()
        yield sequence, depth
        waiting += _heirs(children.get(sequence, []), depth, known, children)


def _heirs(
    heirs: Sequence[int], depth: int, known: Mapping[int, Number], children: Mapping[int | None, list[int]]
) -> list[tuple[int, int]]:
    """What follows a number, with depths, in the order of a stack: the one that goes on is below the others."""
    on_the_side = [(heir, depth + _branches_off(known[heir], children)) for heir in heirs[:-1]]
    return [(heir, depth) for heir in heirs[-1:]] + on_the_side[::-1]


def _branches_off(number: Number, children: Mapping[int | None, list[int]]) -> bool:
    """Whether a number that does not go on is drawn as a branch: not if nothing was ever committed there."""
    return number.commit is not None or number.sequence in children
