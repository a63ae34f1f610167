"""The tree of a history: what follows what, what was abandoned, and in which order it is drawn."""

from __future__ import annotations

from checkrun_format.cli.census import Number
from checkrun_format.cli.lineage import Node, latest_of, lineage
from checkrun_format.manifest import Commit, Digest, PolicyNote


def committed(
    sequence: int,
    *,
    parent: int | None = None,
    predecessor: int | None = None,
    back_to: int | None = None,
    broken_at: int | None = None,
) -> Number:
    """A checkpoint of 100 * sequence bytes; by default it follows the number below."""
    below = sequence - 1 or None if predecessor is None else predecessor
    commit = Commit(
        kind="checkpoint",
        format_version="0.9",
        requires=[],
        sequence=sequence,
        step=sequence,
        created="",
        attempt="0" * 16,
        parent=parent,
        predecessor=below,
        rollback_to=back_to,
        restores=0,
        policy=PolicyNote(name="p", reason="r"),
        stored_bytes=100 * sequence - 1,
        manifest=Digest(bytes=1, sha256="0" * 64),
    )
    kind = "base" if parent is None else "increment"
    return Number(sequence=sequence, kind=kind, commit=commit, broken_at=broken_at)


def other(sequence: int, kind: str) -> Number:
    return Number(sequence=sequence, kind=kind)


def drawn(nodes: list[Node]) -> list[tuple[int, int]]:
    return [(node.number.sequence, node.depth) for node in nodes]


def abandoned(nodes: list[Node]) -> dict[int, int | None]:
    return {node.number.sequence: node.abandoned_by for node in nodes if node.is_abandoned}


def test_nothing() -> None:
    assert lineage([]) == []
    assert latest_of([other(1, "burnt")]) is None


def test_a_line() -> None:
    nodes = lineage([committed(1), committed(2, parent=1), committed(3, parent=2), committed(4)])
    assert drawn(nodes) == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert [node.follows for node in nodes] == [None, 1, 2, 3]
    assert [(node.layers, node.chain_bytes) for node in nodes] == [(1, 100), (2, 300), (3, 600), (1, 400)]
    assert abandoned(nodes) == {}


def test_a_rollback_leaves_a_branch() -> None:
    nodes = lineage(
        [
            committed(1),
            *(committed(n, parent=n - 1) for n in (2, 3, 4)),
            committed(5, parent=2, back_to=2),
            committed(6),
        ]
    )
    assert drawn(nodes) == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 0), (6, 0)]
    assert abandoned(nodes) == {3: 5, 4: 5}
    assert next(node.follows for node in nodes if node.number.sequence == 5) == 2


def test_rollbacks_one_after_another_to_the_same_place() -> None:
    nodes = lineage([committed(1), committed(2), committed(3, back_to=1), committed(4), committed(5, back_to=1)])
    assert drawn(nodes) == [(1, 0), (2, 1), (3, 1), (4, 1), (5, 0)]
    assert abandoned(nodes) == {2: 3, 3: 5, 4: 5}


def test_a_branch_within_a_branch() -> None:
    nodes = lineage([committed(1), committed(2), committed(3), committed(4, back_to=2), committed(5, back_to=1)])
    assert drawn(nodes) == [(1, 0), (2, 1), (3, 2), (4, 1), (5, 0)]
    assert abandoned(nodes) == {2: 5, 3: 4, 4: 5}


def test_going_back_into_an_abandoned_branch_makes_it_live_again() -> None:
    nodes = lineage([committed(1), committed(2), committed(3), committed(4, back_to=1), committed(5, back_to=2)])
    assert drawn(nodes) == [(1, 0), (4, 1), (2, 0), (3, 1), (5, 0)]
    assert abandoned(nodes) == {3: 4, 4: 5}


def test_numbers_without_a_commit_are_no_branch_and_not_abandoned() -> None:
    numbers = [
        other(1, "pruned"),
        committed(2),
        other(3, "burnt"),
        committed(4, predecessor=2),
        committed(5, parent=4),
        other(6, "damaged"),
        committed(7, parent=4, predecessor=5, back_to=4),
        other(8, "burnt"),
    ]
    nodes = lineage(numbers)
    assert drawn(nodes) == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 1), (7, 0), (8, 0)]
    assert abandoned(nodes) == {5: 7}
    assert latest_of(numbers) == 7


def test_numbers_that_are_named_and_not_there_are_missing() -> None:
    nodes = lineage([committed(3, parent=2, broken_at=2), committed(4)])
    assert [(node.number.sequence, node.number.kind) for node in nodes] == [
        (2, "missing"),
        (3, "increment"),
        (4, "base"),
    ]
    assert [(node.layers, node.chain_bytes) for node in nodes] == [(None, None), (None, None), (1, 400)]


def test_a_history_of_thousands_is_no_matter_of_recursion() -> None:
    numbers = [committed(1), *(committed(n, parent=n - 1) for n in range(2, 5001))]
    nodes = lineage(numbers)
    assert drawn(nodes) == [(n, 0) for n in range(1, 5001)]
    assert (nodes[-1].layers, nodes[-1].chain_bytes) == (5000, 100 * 5000 * 5001 // 2)


def test_as_an_object() -> None:
    made = lineage([committed(1), committed(2), committed(3, back_to=1)])[1].as_object()
    assert made["sequence"] == 2 and made["bytes"] == 200 and made["policy"] == {"name": "p", "reason": "r"}
    assert (made["follows"], made["abandoned"], made["abandoned_by"]) == (1, True, 3)
