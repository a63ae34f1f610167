"""Policies: history in, decision out; how a run follows them; and what they may rely on when saves fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

import checkrun_format as crf
from checkrun_format import ALL, Checkpoint, Failures, Run, State, Table
from checkrun_format.choosing import earlier
from checkrun_format.cli import main
from checkrun_format.errors import ConcurrentCommitError, InvalidInputError, StorageError
from checkrun_format.policy import (
    POLICIES,
    BaseRule,
    BitRule,
    Decision,
    Past,
    consecutive,
    full,
    intermittent,
    one_shot,
)
from checkrun_format.rows import RowSet
from checkrun_format.stores import LocalStore

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


def table(values: Array, changed: Any = None) -> State:
    return State(tables={"t": Table({"weight": values}, changed=changed)})


def parents(run: Run) -> list[int | None]:
    return [checkpoint.parent for checkpoint in run.log()]


def reasons(run: Run) -> list[str]:
    return [checkpoint.commit.policy.reason for checkpoint in run.log()]


class TestDecide:
    @pytest.mark.parametrize(
        ("name", "increments", "parent"),
        [
            ("full", [], None),
            ("full", [1, 2], None),
            ("consecutive", [], "latest"),
            ("consecutive", [900, 950], "latest"),
            ("one-shot", [], "base"),
            ("one-shot", [900, 950, 1000], "base"),
            ("intermittent", [], "base"),
            # With base 100 and S1 = 0.5: 1 + 0.5 > 2 * 0.5.
            ("intermittent", [50], "base"),
            # S1 = 1: 1 + 1 <= 2 * 1, the border itself.
            ("intermittent", [100], None),
            ("intermittent", [99], "base"),
            ("intermittent", [101], None),
            # 1 + 0.26 + 0.35 = 1.61 > 3 * 0.35 = 1.05.
            ("intermittent", [26, 35], "base"),
            # The modification trace of the paper: 26 % of the rows growing to 52 %.
            ("intermittent", [26, 35, 40], "base"),
            ("intermittent", [26, 35, 40, 44], "base"),
            # 1 + 2.37 = 3.37 <= 7 * 0.52 = 3.64, while one increment earlier 2.85 > 6 * 0.46 = 2.76.
            ("intermittent", [26, 35, 40, 44, 46], "base"),
            ("intermittent", [26, 35, 40, 44, 46, 52], None),
            # Shrinking increments never pay for a base.
            ("intermittent", [90, 10, 10, 10], "base"),
            ("intermittent", [0, 0], "base"),
        ],
    )
    def test_decide(self, name: str, increments: list[int], parent: str | None) -> None:
        """A base next iff 1 + S_1 + ... + S_i <= (i + 1) * S_i (Check-N-Run, section 5.3)."""
        past = Past(base_bytes=100, increments=tuple(increments))
        decision = POLICIES[name](past)
        assert decision.parent == parent
        assert decision.reason
        assert BaseRule(policy=name).decide(past) == BaseRule(policy=POLICIES[name]).decide(past) == decision

    def test_the_reason_tells_the_sums(self) -> None:
        past = Past(base_bytes=100, increments=(50, 80))
        assert intermittent(past).reason == "a new base pays: 1 + S1 + ... + S2 = 2.300, 3 * S2 = 2.400"
        assert intermittent(Past(base_bytes=100, increments=(50,))).reason.startswith("another increment pays: ")

    @pytest.mark.parametrize(
        ("every", "past", "parent"),
        [
            (1, Past(base_bytes=9), None),
            (2, Past(base_bytes=9), "latest"),
            (2, Past(base_bytes=9, increments=(1,), layers=2), None),
            (4, Past(base_bytes=9, increments=(1, 1), layers=3), "latest"),
            (4, Past(base_bytes=9, increments=(1, 1, 1), layers=2), None),
            # Two takeovers lie in the chain.
            (4, Past(base_bytes=9, increments=(1,), layers=4), None),
        ],
    )
    def test_every_caps_what_a_policy_says(self, every: int, past: Past, parent: str | None) -> None:
        decision = BaseRule(policy="consecutive", every=every).decide(past)
        assert decision.parent == parent
        assert decision.reason.startswith(f"a base every {every} checkpoints") == (parent is None)

    def test_names(self) -> None:
        for name, policy in POLICIES.items():
            assert BaseRule(policy=policy).name == BaseRule(policy=name).name == name
            assert BaseRule(policy=policy.__name__) == BaseRule(policy=name)

        class Weekly:
            def __call__(self, past: Past) -> Decision:
                return full(past)

        assert BaseRule(policy=Weekly()).name == "Weekly"


class TestExpectedRestores:
    def test_from_figures_of_failures(self) -> None:
        """L is probability x nodes x hours (Check-N-Run, section 4)."""
        assert float(Failures(probability=1e-4, nodes=16, hours=720)) == pytest.approx(1.152)
        assert BitRule(bits="auto", expected_restores=Failures(probability=0.5, nodes=2, hours=4)).reason(0) == (
            "4 bits, restores expected: 4"
        )

    @pytest.mark.parametrize(
        ("figures", "told"),
        [
            ({"probability": 1.5}, "probability=1.5; a number from 0 to 1"),
            ({"probability": -0.1}, "probability=-0.1"),
            ({"nodes": -1}, "nodes=-1; a number from 0 on"),
            ({"nodes": True}, "nodes=True"),
            ({"hours": float("nan")}, "hours=nan"),
            ({"hours": "720"}, "hours='720'"),
        ],
    )
    def test_no_figures(self, figures: dict[str, Any], told: str) -> None:
        with pytest.raises(InvalidInputError, match=told):
            Failures(**{"probability": 0.1, "nodes": 1, "hours": 1, **figures})

    @pytest.mark.parametrize(("hours", "bits"), [(0, 2), (10, 2), (11, 3), (30, 3), (31, 4), (200, 4), (201, 8)])
    def test_decide_the_bits(self, tmp_path: Path, hours: float, bits: int) -> None:
        expected = Failures(probability=0.05, nodes=2, hours=hours)
        run = crf.open_run(tmp_path, "a", durable=False, bits="auto", expected_restores=expected)
        (field,) = run.save(table(np.ones((3, 4), np.float32))).table("t").fields
        assert field.encoder is not None and field.encoder["bits"] == bits

    def test_more_restores_than_expected(self, tmp_path: Path) -> None:
        """8 bits for the rest of the run, through rollback, compaction and takeover; the reason says so."""
        values, used, told = np.ones((3, 4), np.float32), [], []

        def save(run: Run) -> None:
            made = run.save(table(values, ALL))
            (field,) = made.table("t").fields
            assert field.encoder is not None
            used.append((made.commit.restores, field.encoder["bits"]))
            told.append(made.commit.policy.reason.partition("; ")[2])

        options: dict[str, Any] = {"bits": "auto", "expected_restores": 1, "durable": False}
        save(crf.open_run(tmp_path, "a", **options))
        for _ in range(2):
            run = crf.open_run(tmp_path, "a", **options)
            run.restore()
            save(run)
        run.compact()
        run.rollback(1)
        save(run)
        save(crf.open_run(tmp_path, "a", takeover=True, **options))
        assert used == [(0, 2), (1, 2), (2, 8), (2, 8), (2, 8)]
        assert told == [
            "2 bits, restores expected: 1",
            "2 bits, restores expected: 1",
            *["8 bits, restores: 2, expected: 1"] * 3,
        ]

    def test_writers_of_one_save_agree(self, tmp_path: Path) -> None:
        """What a token carries is JSON, also of figures of failures."""
        expected = Failures(probability=0.5, nodes=2, hours=4)
        run = crf.open_run(tmp_path, "a", durable=False, bits="auto", expected_restores=expected)
        save = run.begin(writers=1)
        token = json.loads(json.dumps(save.token))
        writer = crf.join_save(token).writer(0)
        writer.put("t", {"weight": np.ones((3, 4), np.float32)}, rows=(0, 3), of=3)
        (field,) = save.commit([writer.finish()]).table("t").fields
        assert field.encoder is not None and field.encoder["bits"] == 4


TRACE_ROWS = 20_000


def trace(rows: int, intervals: int, seed: int) -> list[Ids]:
    """Rows touched in each interval: 26 % of them, 52 % in 11 intervals together, as in Check-N-Run.

    Each row is looked up at random at a rate that falls with its rank like a power law.
    """
    rng = np.random.default_rng(seed)
    rank = (rng.permutation(rows) + 0.5) / rows
    touched = -np.expm1(-0.0051566 * rank**-3.28175)
    return [np.flatnonzero(rng.random(rows) < touched) for _ in range(intervals)]


class TestTrace:
    """Twelve checkpoints of the paper's modification trace, at a small scale."""

    def follow(self, folder: Path, **options: Any) -> tuple[list[Checkpoint], list[Ids]]:
        run = crf.open_run(folder, "a", durable=False, bits=4, **options)
        touched = trace(TRACE_ROWS, 11, seed=5)
        values = np.random.default_rng(1).normal(0, 0.1, (TRACE_ROWS, 16)).astype(np.float32)
        run.save(table(values))
        for rows in touched:
            values[rows] += 0.01
            run.save(table(values, rows))
        state = run.load().tables["t"]["weight"]
        assert np.abs(state - values).max() < 0.05
        return list(run.log()), touched

    def test_is_the_papers(self) -> None:
        touched = trace(TRACE_ROWS, 11, seed=5)
        assert [len(rows) / TRACE_ROWS for rows in touched] == pytest.approx([0.26] * 11, abs=0.01)
        assert len(np.unique(np.concatenate(touched))) / TRACE_ROWS == pytest.approx(0.52, abs=0.01)

    def test_full(self, tmp_path: Path) -> None:
        made, _ = self.follow(tmp_path, policy="full")
        assert [checkpoint.parent for checkpoint in made] == [None] * 12
        assert {checkpoint.table("t").stored_rows for checkpoint in made} == {TRACE_ROWS}

    def test_one_shot(self, tmp_path: Path) -> None:
        made, touched = self.follow(tmp_path, policy=one_shot)
        assert [checkpoint.parent for checkpoint in made] == [None, *[1] * 11]
        since: set[int] = set()
        for checkpoint, rows in zip(made[1:], touched, strict=True):
            since |= set(rows.tolist())
            assert checkpoint.table("t").stored_rows == len(since)

    def test_consecutive(self, tmp_path: Path) -> None:
        made, touched = self.follow(tmp_path, policy=consecutive)
        assert [checkpoint.parent for checkpoint in made] == [None, *range(1, 12)]
        assert [checkpoint.table("t").stored_rows for checkpoint in made[1:]] == [len(rows) for rows in touched]
        size = sum(checkpoint.stored_bytes for checkpoint in made) / made[0].stored_bytes
        assert size == pytest.approx(1 + 11 * 0.26, abs=0.4)  # the paper: 4 times the model; row indices are on top

    def test_intermittent(self, tmp_path: Path) -> None:
        """A new base at the 8th interval after the base, as in the paper."""
        made, _ = self.follow(tmp_path)
        assert [checkpoint.parent for checkpoint in made] == [None, *[1] * 7, None, *[9] * 3]
        sizes = [checkpoint.stored_bytes for checkpoint in made]
        shares = [size / sizes[0] for size in sizes[1:8]]
        reason = made[8].commit.policy.reason
        assert reason == (f"a new base pays: 1 + S1 + ... + S7 = {1 + sum(shares):.3f}, 8 * S7 = {8 * shares[-1]:.3f}")
        assert 1 + sum(shares) <= 8 * shares[-1] and 1 + sum(shares[:-1]) > 7 * shares[-2]

    @pytest.mark.parametrize(
        ("policy", "wanted"),
        [
            ("intermittent", [None, 1, 1, 1, 1, None, 6, 6, 6, 6, None, 11]),
            ("consecutive", [None, 1, 2, 3, 4, None, 6, 7, 8, 9, None, 11]),
            ("full", [None] * 12),
        ],
    )
    def test_every(self, tmp_path: Path, policy: str, wanted: list[int | None]) -> None:
        made, _ = self.follow(tmp_path, policy=policy, every=5)
        assert [checkpoint.parent for checkpoint in made] == wanted

    def test_fewer_bytes_than_all_others(self, tmp_path: Path) -> None:
        """Less to write than one-shot and full, less to keep and to read than consecutive."""
        written, kept = {}, {}
        for name in POLICIES:
            made, _ = self.follow(tmp_path / name, policy=name)
            sizes = {checkpoint.sequence: checkpoint.stored_bytes for checkpoint in made}
            written[name] = sum(sizes.values())
            kept[name] = 0
            for checkpoint in made:
                chain, below = checkpoint.stored_bytes, checkpoint.parent
                while below is not None:
                    chain, below = chain + sizes[below], made[below - 1].parent
                kept[name] = max(kept[name], chain)
        assert written["consecutive"] < written["intermittent"] < written["one-shot"] < written["full"]
        assert kept["full"] < kept["intermittent"] < kept["one-shot"] < kept["consecutive"]


class TestOwnPolicy:
    def test_decides(self, tmp_path: Path) -> None:
        asked: list[Past] = []

        def every_other(past: Past) -> Decision:
            asked.append(past)
            return Decision(parent=None if past.increments else "latest", reason="two by two")

        run = crf.open_run(tmp_path, "a", durable=False, policy=every_other)
        values = np.ones((50, 3), np.float32)
        for number in range(5):
            run.save(table(values, None if number == 0 else [number]))
        assert parents(run) == [None, 1, None, 3, None]
        assert [(past.layers, len(past.increments)) for past in asked] == [(1, 0), (2, 1), (1, 0), (2, 1)]
        sizes = [c.stored_bytes for c in run.log()]
        assert (asked[1].base_bytes, asked[1].increments) == (sizes[0], (sizes[1],))
        assert {c.commit.policy.name for c in run.log()} == {"every_other"}
        assert reasons(run)[1:] == ["two by two"] * 4

    @pytest.mark.parametrize("answer", [None, "base", 1, ("newest", ""), (None, 3)])
    def test_returns_something_else(self, tmp_path: Path, answer: Any) -> None:
        if isinstance(answer, tuple):
            answer = Decision(parent=answer[0], reason=answer[1])
        run = crf.open_run(tmp_path, "a", durable=False, policy=lambda past: answer)
        run.save(table(np.ones((5, 3))))
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InvalidInputError, match="a Decision belongs here"):
            run.save(table(np.ones((5, 3)), [1]))
        assert sorted(tmp_path.rglob("*")) == before

    def test_raises(self, tmp_path: Path) -> None:
        def broken(_: Past) -> Decision:
            raise ZeroDivisionError

        run = crf.open_run(tmp_path, "a", durable=False, policy=broken)
        run.save(table(np.zeros((5, 3))))
        with pytest.raises(ZeroDivisionError):
            run.save(table(np.ones((5, 3)), [1, 2]))
        made = run.save(table(np.ones((5, 3)), []), parent="latest")
        assert made.table("t").stored_rows == 2


class TestForceFull:
    """For optimizers that move rows that no batch touched."""

    @pytest.mark.parametrize("policy", POLICIES)
    def test_everything_is_stored_and_recent(self, tmp_path: Path, policy: str) -> None:
        run = crf.open_run(tmp_path, "a", durable=False, policy=policy)
        values = np.arange(40, dtype=np.float32).reshape(10, 4)
        run.save(table(values))
        moved = values * np.float32(0.5)
        made = run.save(table(moved, [3]), force_full=True)
        assert (made.parent, made.table("t").storage) == (None, "full")
        assert made.commit.policy.name == "caller" and "force_full" in made.commit.policy.reason
        (change,) = made.changes_since(1)
        assert change.rows.tolist() == list(range(10))
        assert (change.fields["weight"] == moved).all()
        after = run.save(table(moved, [4]))
        assert after.parent == (None if policy == "full" else 2)
        assert [change.rows.tolist() for change in after.changes_since(2)] == [[4]]

    def test_changed_need_not_be_given(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        run.save(table(np.ones((4, 2))))
        assert run.save(table(np.zeros((4, 2))), force_full=True).table("t").read()["weight"].sum() == 0

    def test_is_remembered_when_the_save_fails(self, tmp_path: Path) -> None:
        store = FailingStore(tmp_path)
        run = crf.open_run(store, "a", policy="consecutive")
        run.save(table(np.ones((4, 2))))
        store.fails = True
        with pytest.raises(StorageError):
            run.save(table(np.zeros((4, 2)), []), force_full=True)
        store.fails = False
        made = run.save(table(np.zeros((4, 2)), []))
        assert made.table("t").storage == "full"
        assert [change.rows.tolist() for change in made.changes_since(1)] == [[0, 1, 2, 3]]

    @pytest.mark.parametrize("parent", ["latest", 1])
    def test_over_a_parent(self, tmp_path: Path, parent: Any) -> None:
        run = crf.open_run(tmp_path, "a", durable=False)
        run.save(table(np.ones((4, 2))))
        with pytest.raises(InvalidInputError, match="force_full saves a base"):
            run.save(table(np.ones((4, 2)), []), parent=parent, force_full=True)
        assert parents(run) == [None]


class TestWhatCounts:
    """The increments that a policy sees are those by which the state came from the base."""

    @staticmethod
    def seen(folder: Path, act: Callable[[Run, Callable[[Run, int], None]], Run]) -> Past:
        found: list[Past] = []

        def looks(past: Past) -> Decision:
            found.append(past)
            return consecutive(past)

        values = np.zeros((200, 4), np.float32)

        def save(run: Run, row: int) -> None:
            values[row] += 1
            run.save(table(values, [row]))

        run = crf.open_run(folder, "a", durable=False, policy=looks)
        run.save(table(values))
        save(run, 1)
        save(run, 2)
        save(act(run, save), 9)
        return found[-1]

    @staticmethod
    def sizes(folder: Path, *numbers: int) -> tuple[int, ...]:
        run = crf.open_run(folder)
        return tuple(run[n].stored_bytes for n in numbers)

    def test_a_line(self, tmp_path: Path) -> None:
        assert self.seen(tmp_path, lambda run, save: run).increments == self.sizes(tmp_path, 2, 3)

    def test_not_what_a_rollback_abandoned(self, tmp_path: Path) -> None:
        def back(run: Run, _: Any) -> Run:
            run.rollback(2)
            run.restore()
            return run

        past = self.seen(tmp_path, back)
        assert past.increments == self.sizes(tmp_path, 2)
        assert past.layers == 3

    def test_not_a_takeover(self, tmp_path: Path) -> None:
        def taken_over(run: Run, save: Callable[[Run, int], None]) -> Run:
            run.take_over()
            save(run, 5)
            return run

        assert self.seen(tmp_path, taken_over).increments == self.sizes(tmp_path, 2, 3, 5)

    def test_what_was_met_is_not_read_again(self, tmp_path: Path) -> None:
        """Also when it is pruned by now: what it cost has been spent."""
        store = CountingStore(tmp_path)
        run = crf.open_run(store, "a", policy=one_shot)
        values = np.zeros((200, 4), np.float32)
        run.save(table(values))
        for number in range(2, 9):
            run.save(table(values, [number]))
            run._history._checkpoints.clear()
            for low in range(2, number):
                (tmp_path / f"{low:08d}" / "zarr.json").unlink(missing_ok=True)
        store.read.clear()
        made = run.save(table(values, [9]))
        assert {key for key in store.read if key.endswith("zarr.json")} == {
            f"{number:08d}/zarr.json"
            for number in (1, 8, 9)  # the last to be returned
        }
        increments = run._saver.ledger.increments(run[1].commit)
        assert [commit.sequence for commit in increments] == list(range(2, made.sequence + 1))

    @pytest.mark.parametrize(
        ("told", "sizes"),
        [
            ({"increments": 3, "increments_bytes": 10}, [4, 3, 3]),
            ({"increments": 0, "increments_bytes": 0}, []),
            ({"increments": 8, "increments_bytes": 10}, []),  # more than there are numbers between
            ({"increments": 2**60, "increments_bytes": 10}, []),
            ({"increments": msgspec.UNSET}, []),
        ],
    )
    def test_what_is_pruned_counts_as_equally_large(self, tmp_path: Path, told: Any, sizes: list[int]) -> None:
        """COM-7: only the sum is known; nonsense is passed over."""
        run = crf.open_run(tmp_path, "a", durable=False, policy="one-shot")
        run.save(table(np.ones((4, 2))))
        commit = run.save(table(np.ones((4, 2)), [1])).commit
        assert (commit.policy.increments, commit.policy.increments_bytes) == (0, 0)
        lowest = msgspec.structs.replace(commit, sequence=9, policy=msgspec.structs.replace(commit.policy, **told))
        assert earlier(run[1].commit, [lowest]) == sizes

    def test_compaction_begins_anew(self, tmp_path: Path) -> None:
        def compacted(run: Run, _: Any) -> Run:
            run.compact()
            return run

        past = self.seen(tmp_path, compacted)
        assert (past.increments, past.base_bytes) == ((), *self.sizes(tmp_path, 4))


class CountingStore(LocalStore):
    """Remembers what was read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, durable=False)
        self.read: list[str] = []

    def get(self, key: str) -> bytes | None:
        self.read.append(key)
        return super().get(key)


class FailingStore(LocalStore):
    """Writes nothing as long as it is told to fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, durable=False)
        self.fails = False

    def put(self, key: str, buffers: Any) -> int:
        if self.fails and "block" in key:
            raise StorageError(5, "injected")
        return super().put(key, buffers)


class Cancelled(BaseException):
    """What a trainer that is told to stop raises in the middle of a save."""


@pytest.mark.parametrize("policy", POLICIES)
class TestBookkeeping:
    """A save that failed, was cancelled or lost its number keeps its rows for the next, under every policy."""

    VALUES = np.arange(12000, dtype=np.float32).reshape(4000, 3)

    def base(self, folder: Path, policy: str) -> tuple[FailingStore, Run, Array]:
        """A base and two increments: rows 1 and 2 differ from the base."""
        store = FailingStore(folder)
        run = crf.open_run(store, "a", policy=policy)
        values = self.VALUES.copy()
        run.save(table(values))
        for row in (1, 2):
            values[row] -= 1000
            run.save(table(values, [row]))
        return store, run, values

    def check(self, run: Run, values: Array, policy: str, *, stored: set[int], recent: set[int]) -> None:
        """The next save, which is told of row 9 only, holds these rows besides."""
        values[9] += 7
        before = run.latest().sequence
        made = run.save(table(values, [9]))
        assert made.parent == {"full": None, "consecutive": before}.get(policy, 1)
        assert made.table("t").stored_rows == (4000 if policy == "full" else len(stored))
        assert {row for change in made.changes_since(before) for row in change.rows.tolist()} == recent
        assert (crf.open_run(run.url).load().tables["t"]["weight"] == values).all()
        for number in range(1, before + 1):
            assert crf.open_run(run.url)[number].load().tables["t"]["weight"].shape == (4000, 3)

    def test_failed(self, tmp_path: Path, policy: str) -> None:
        store, run, values = self.base(tmp_path, policy)
        store.fails = True
        for row in (20, 30):
            values[row] += 5
            with pytest.raises(StorageError):
                run.save(table(values, [row]))
        store.fails = False
        told = {9, 20, 30}
        self.check(run, values, policy, stored=told if policy == "consecutive" else {1, 2, *told}, recent=told)

    def test_cancelled(self, tmp_path: Path, policy: str) -> None:
        _, run, values = self.base(tmp_path, policy)
        values[[4, 5]] += 5

        def stop(_: Ids) -> dict[str, Array]:
            raise Cancelled

        fields: dict[str, Any] = {"weight": (np.float32, 3)}
        state = State(tables={"t": Table.from_function(stop, rows=4000, fields=fields, changed=[4, 5])})
        with pytest.raises(Cancelled):
            run.save(state)
        told = {4, 5, 9}
        self.check(run, values, policy, stored=told if policy == "consecutive" else {1, 2, *told}, recent=told)

    def test_conflicting(self, tmp_path: Path, policy: str) -> None:
        """HEA-3: the rows stay with the Run that lost; opened anew, it has no origin and stores everything."""
        _, run, values = self.base(tmp_path, policy)
        other = crf.open_run(tmp_path, "a", durable=False)
        other.restore()
        other.save(table(values, [3]))
        values[[6, 7]] += 5
        for rows in ([6], [7]):
            with pytest.raises(ConcurrentCommitError):
                run.save(table(values, rows))
        pending = run._saver.ledger.pending["t"].rows
        assert isinstance(pending, RowSet)
        assert pending.ids().tolist() == [6]  # the second was refused before anything was noted
        again = crf.open_run(tmp_path, "a", durable=False, policy=policy)
        made = again.save(table(values, [7]))
        assert (made.sequence, made.parent, made.table("t").stored_rows) == (5, None, 4000)
        assert (crf.open_run(tmp_path).load().tables["t"]["weight"] == values).all()

    @pytest.mark.parametrize("fails", [False, True])
    def test_after_a_restore(self, tmp_path: Path, policy: str, *, fails: bool) -> None:
        """What changed since the base is known again from the stored layers."""
        self.base(tmp_path, policy)
        store = FailingStore(tmp_path)
        run = crf.open_run(store, "a", policy=policy)
        values = np.array(run.restore().tables["t"]["weight"])
        told = {9}
        if fails:
            store.fails = True
            values[11] += 5
            with pytest.raises(StorageError):
                run.save(table(values, [11]))
            store.fails, told = False, {9, 11}
        self.check(run, values, policy, stored=told if policy == "consecutive" else {1, 2, *told}, recent=told)


def test_checkrun_tree_shows_the_reason(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path, "a", durable=False, bits="auto", expected_restores=2, every=2)
    values = np.ones((30, 4), np.float32)
    run.save(table(values))
    run.save(table(values, [1]))
    run.save(table(values, [2]))
    wanted = [
        "a base: nothing is committed; 3 bits, restores expected: 2",
        "the first increment over the base; 3 bits, restores expected: 2",
        "a base every 2 checkpoints: 2 since the last; 3 bits, restores expected: 2",
    ]
    assert reasons(run) == wanted
    drawn = CliRunner().invoke(main, ["tree", str(tmp_path)], env={"COLUMNS": "300"}, terminal_width=300).output
    assert all(f"intermittent: {reason}" in drawn for reason in wanted)
