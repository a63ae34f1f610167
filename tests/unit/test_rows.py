"""Sets of rows, and where stored rows fall among wanted ones, against Python's own sets and lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from checkrun_format.errors import InvalidInputError
from checkrun_format.rows import (
    Ids,
    KeySet,
    Moves,
    RowSet,
    Selection,
    WantedIds,
    WantedRange,
    as_ids,
    as_slice,
    ascending,
    check_bounds,
    is_in_sorted,
    length,
    pick,
    shifted,
    sorted_ids,
    union,
)

LOW, HIGH = -(2**63), 2**63 - 1
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4", ">u8", "longlong"]


_S = TypeVar("_S", bound=RowSet | KeySet)


def ids(*values: int) -> Ids:
    return np.array(values, np.int64)


def listed(selection: Selection) -> list[int]:
    return list(range(selection.start, selection.stop)) if isinstance(selection, slice) else selection.tolist()


def some_ids(random: np.random.Generator, most: int) -> Ids:
    """Ascending, each once, from a small range, so that sets meet."""
    return np.flatnonzero(random.random(most) < random.random()).astype(np.int64)


def holding(rows: _S, some: Ids) -> _S:
    """A set, with these added."""
    rows.add(some)
    return rows


class TestIds:
    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_of_every_integer_dtype(self, dtype: str) -> None:
        found = sorted_ids(np.array([5, 0, 3], dtype), "ids")
        assert found.dtype == np.int64 and found.dtype.isnative and found.tolist() == [0, 3, 5]

    def test_uint64_keeps_its_bits_and_is_ordered_as_int64(self) -> None:
        """PRT-3: strictly increasing as signed int64."""
        given = np.array([0, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
        assert as_ids(given, "ids").tolist() == [0, HIGH, LOW, -1]
        assert sorted_ids(given, "ids").tolist() == [LOW, -1, 0, HIGH]
        assert sorted_ids(given.astype(">u8"), "ids").view(np.uint64).tolist() == [2**63, 2**64 - 1, 0, 2**63 - 1]

    def test_signed_ends(self) -> None:
        assert sorted_ids(ids(HIGH, LOW, 0), "ids").tolist() == [LOW, 0, HIGH]

    @pytest.mark.parametrize("empty", [np.zeros(0), np.zeros(0, bool), np.zeros(0, np.uint64)], ids=lambda a: a.dtype)
    def test_none_at_all(self, empty: npt.NDArray[Any]) -> None:
        assert sorted_ids(empty, "ids").dtype == np.int64 and sorted_ids(empty, "ids").size == 0

    @pytest.mark.parametrize(
        ("values", "told"),
        [
            (np.array([4, 1, 9, 4]), "changed: 4 is there more than once"),
            (np.array([7, 7]), "changed: 7 is there more than once"),
            (np.array([2**64 - 1, 0, 2**64 - 1], np.uint64), "more than once"),
            (np.array([[1, 2]]), "changed: 2 dimensions"),
            (np.array(3), "changed: 0 dimensions"),
            (np.array([1.0, 2.0]), "changed: float64 where integers are wanted"),
            (np.array([True, False]), "changed: bool where integers are wanted"),
        ],
    )
    def test_refused(self, values: npt.NDArray[Any], told: str) -> None:
        with pytest.raises(InvalidInputError, match=told):
            sorted_ids(values, "changed")

    def test_what_is_sorted_is_not_copied(self) -> None:
        given = ids(1, 2, 9)
        assert np.shares_memory(sorted_ids(given, "ids"), given)

    def test_ascending_tells_the_order(self) -> None:
        given = ids(9, 2, 5)
        ordered, order = ascending(given, "keys")
        assert ordered.tolist() == [2, 5, 9] and order is not None and order.tolist() == [1, 2, 0]
        again, order = ascending(ordered, "keys")
        assert again.tolist() == [2, 5, 9] and order is None and not np.shares_memory(again, ordered)
        for twice in (ids(3, 3), ids(4, 1, 4)):
            with pytest.raises(InvalidInputError, match=r"keys: [34] is there more than once"):
                ascending(twice, "keys")

    def test_the_input_is_never_changed(self) -> None:
        given = ids(9, 2, 1)
        assert sorted_ids(given, "ids").tolist() == [1, 2, 9] and given.tolist() == [9, 2, 1]

    @pytest.mark.parametrize("good", [ids(), ids(0), ids(4), ids(0, 4)])
    def test_within_bounds(self, good: Ids) -> None:
        check_bounds(good, 5, "changed")
        assert ((good >= 0) & (good < 5)).all()

    @pytest.mark.parametrize(
        ("wrong", "rows", "told"),
        [
            (ids(-1, 0), 5, "row -1 is not in a table of 5 rows"),
            (ids(0, 5), 5, "row 5 is not in a table of 5 rows"),
            (ids(0), 0, "row 0 is not in a table of 0 rows"),
            (ids(LOW, HIGH), 5, f"row {LOW} is not"),
            (ids(2**31 + 1), 2**31 + 1, "row 2147483649 is not"),
        ],
    )
    def test_outside_bounds(self, wrong: Ids, rows: int, told: str) -> None:
        with pytest.raises(InvalidInputError, match=f"changed: {told}"):
            check_bounds(wrong, rows, "changed")


@pytest.mark.parametrize("kind", [RowSet, KeySet])
class TestSets:
    @pytest.mark.parametrize("seed", range(15))
    def test_equal_a_python_set(self, kind: type[RowSet | KeySet], seed: int) -> None:
        random = np.random.default_rng(seed)
        model: set[int] = set()
        rows = kind()
        for _ in range(6):
            added = random.permutation(some_ids(random, int(random.integers(1, 60))))
            before = rows.copy()
            rows.add(added)
            assert before.ids().tolist() == sorted(model)
            model |= set(added.tolist())
            assert rows.ids().tolist() == sorted(model) and len(rows) == len(model)
        asked = np.arange(80)
        assert rows.contains(asked).tolist() == [n in model for n in range(80)]
        assert rows.contains(ids()).tolist() == []

    def test_union(self, kind: type[RowSet | KeySet]) -> None:
        for one, other in ((ids(1, 9), ids(3)), (ids(3), ids(1, 9)), (ids(), ids(1)), (ids(1), ids())):
            rows: Any = holding(kind(), one)
            rows.update(holding(kind(), other))
            assert rows.ids().tolist() == sorted({*one.tolist(), *other.tolist()})

    def test_twice_is_once(self, kind: type[RowSet | KeySet]) -> None:
        rows = holding(kind(), ids(5, 2, 5))
        rows.add(ids(2))
        assert rows.ids().tolist() == [2, 5] and len(rows) == 2


def test_rows_below() -> None:
    assert [holding(RowSet(), ids(1, 4, 7)).ids(rows).tolist() for rows in (0, 4, 5, 99)] == [
        [],
        [1],
        [1, 4],
        [1, 4, 7],
    ]


@pytest.mark.parametrize("rows", [0, 4, 5, 8, 10])
def test_added_to_a_mask_of_any_length(rows: int) -> None:
    mask = np.zeros(rows, np.bool_)
    mask[:3] = True
    holding(RowSet(), ids(1, 4, 7)).add_to(mask)
    assert np.flatnonzero(mask).tolist() == [row for row in (0, 1, 2, 4, 7) if row < rows]


def test_keys_are_any_int64() -> None:
    keys = holding(KeySet(), ids(HIGH, LOW, -1))
    assert keys.ids().tolist() == [LOW, -1, HIGH]
    assert keys.contains(ids(-1, 0, LOW, HIGH)).tolist() == [True, False, True, True]


@pytest.mark.parametrize("seed", range(20))
def test_union_equals_a_set(seed: int) -> None:
    """Of arrays in any order, with repeats, and none at all."""
    drawn = np.random.default_rng(seed)
    ends = np.array([-(2**63), -1, 0, 2**63 - 1])
    arrays = [drawn.choice(np.append(ends, np.arange(-20, 20)), drawn.integers(0, 30)) for _ in range(seed % 4)]
    found = union(*arrays)
    assert found.dtype == np.int64
    assert found.tolist() == sorted({int(number) for array in arrays for number in array})


class TestWanted:
    """Among stored rows, those that are wanted and their places: as a loop finds them."""

    @staticmethod
    def slow(stored: Sequence[int], wanted: Sequence[int]) -> tuple[list[int], list[int]]:
        pairs = [(position, wanted.index(row)) for position, row in enumerate(stored) if row in wanted]
        return [position for position, _ in pairs], [place for _, place in pairs]

    @pytest.mark.parametrize("seed", range(40))
    def test_equal_a_loop(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        stored = some_ids(random, 40)
        first, count = (int(n) for n in random.integers(0, 30, 2))
        low, high = sorted(int(n) for n in random.integers(0, 40, 2))
        for wanted in (WantedRange(low, high), WantedIds(some_ids(random, 40))):
            rows = wanted.ids().tolist()
            assert len(wanted) == len(rows)
            positions, places = wanted.among_ids(stored)
            assert (listed(positions), listed(places)) == self.slow(stored.tolist(), rows)
            positions, places = wanted.among_range(first, count)
            assert (listed(positions), listed(places)) == self.slow(range(first, first + count), rows)
            assert length(positions) == length(places)
            for start, stop in ((first, first + count), (0, 0), (39, 45), (45, 60)):
                assert wanted.touches(start, stop) == any(start <= row <= stop for row in rows)

    def test_far_beyond_32_bits(self) -> None:
        far = 2**40
        wanted = WantedRange(far - 2, far + 2)
        assert wanted.among_ids(ids(far - 3, far - 1, far + 2)) == (slice(1, 2), ids(1))
        positions, places = wanted.among_range(2**39, 2**40)
        assert (positions, places) == (slice(2**39 - 2, 2**39 + 2), slice(0, 4))
        found = WantedIds(ids(5, far)).among_range(2**31, far)
        assert [listed(selection) for selection in found] == [[far - 2**31], [1]]

    def test_ends_of_the_keys(self) -> None:
        wanted = WantedIds(ids(LOW, HIGH))
        assert wanted.touches(LOW, LOW) and wanted.touches(HIGH, HIGH) and not wanted.touches(LOW + 1, HIGH - 1)
        positions, places = wanted.among_ids(ids(LOW, 0, HIGH))
        assert (listed(positions), listed(places)) == ([0, 2], [0, 1])


@pytest.mark.parametrize("seed", range(10))
def test_membership_equals_a_set(seed: int) -> None:
    random = np.random.default_rng(seed)
    ordered, asked = some_ids(random, 30), random.integers(-5, 40, 50)
    assert is_in_sorted(asked, ordered).tolist() == [n in set(ordered.tolist()) for n in asked.tolist()]


@pytest.mark.parametrize("selection", [slice(4, 8), ids(4, 5, 6, 7), ids(1, 3, 9, 20)], ids=str)
@pytest.mark.parametrize("bits", [0b0000, 0b1111, 0b0101, 0b1000])
def test_pick(selection: Selection, bits: int) -> None:
    kept = as_slice(ids(*(n for n in range(4) if bits >> n & 1)))
    wanted = [listed(selection)[n] for n in listed(kept)]
    assert listed(pick(selection, kept)) == wanted
    assert length(pick(selection, kept)) == len(wanted)
    assert listed(shifted(selection, 5)) == [position + 5 for position in listed(selection)]


@pytest.mark.parametrize("positions", [slice(4, 8), ids(1, 3, 9, 20)], ids=str)
@pytest.mark.parametrize("places", [slice(10, 14), ids(0, 2, 5, 6)], ids=str)
@pytest.mark.parametrize("bits", [None, 0b0000, 0b1111, 0b0101, 0b0110])
def test_moves(positions: Selection, places: Selection, bits: int | None) -> None:
    """Slices of any length, taken one after another, have every position that goes, with its place."""
    mask = None if bits is None else np.array([bool(bits >> n & 1) for n in range(4)])
    moves = Moves(positions, places, mask)
    every = zip(listed(positions), listed(places), [True] * 4 if mask is None else mask.tolist(), strict=True)
    pairs = [(position, place) for position, place, goes in every if goes]
    assert list(zip(listed(moves.positions), listed(moves.places), strict=True)) == pairs
    assert list(zip(listed(moves.shifted(7).positions), listed(moves.shifted(7).places), strict=True)) == [
        (position, place + 7) for position, place in pairs
    ]
    assert moves.span == (listed(positions)[0], listed(positions)[-1] + 1)
    assert moves.nbytes == sum(x.nbytes for x in (positions, places, mask) if isinstance(x, np.ndarray))
    for step in (1, 3, 30):
        found = []
        for start in range(0, 30, step):
            some = moves.within(start, start + step)
            found += list(zip([start + at for at in listed(some.positions)], listed(some.places), strict=True))
            assert all(0 <= at < step for at in listed(some.positions))
        assert found == pairs


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (ids(3, 4, 5), slice(3, 6)),
        (ids(7), slice(7, 8)),
        (slice(2, 5), slice(2, 5)),
        (ids(), None),
        (ids(3, 5), None),
        (ids(5, 4, 3), None),
        (ids(3, 5, 5), None),
        (ids(1, 1, 3), None),
    ],
    ids=str,
)
def test_a_run_of_positions_is_a_slice(given: Selection, wanted: slice | None) -> None:
    found = as_slice(given)
    assert found == wanted if wanted is not None else found is given
    assert listed(found) == listed(given)
