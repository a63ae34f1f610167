"""Plans of saves: the decision is the save's own, sizes are close to what is then stored, and nothing happens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import checkrun_format as crf
from checkrun_format import ALL, Checkpoint, Run, SavePlan, State, Table, forecast
from checkrun_format.errors import ConcurrentCommitError, InvalidInputError
from checkrun_format.ledger import Ledger
from checkrun_format.stores import LocalStore

Array = npt.NDArray[Any]


def weights(rows: int, columns: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.1, (rows, columns)).astype(np.float32)


def objects(folder: Path, sequence: int) -> list[Path]:
    return [path for path in (folder / f"{sequence:08d}").rglob("*") if path.is_file()]


def books(ledger: Ledger) -> dict[str, Any]:
    told = {name: value for name, value in vars(ledger).items() if name not in ("_history", "_layers")}
    told["pending"] = {
        name: (touched.rows.ids().tolist(), touched.everything, touched.deleted.ids().tolist())
        for name, touched in ledger.pending.items()
    }
    told["_keys"] = {name: keys.tolist() for name, keys in ledger._keys.items()}
    return copy.deepcopy(told)


def planned_and_saved(run: Run, state: State, folder: Path, **options: Any) -> tuple[SavePlan, Checkpoint]:
    """A plan, held against what the save then does."""
    before, files = books(run._saver.ledger), sorted(folder.rglob("*"))
    plan = run.plan_save(state, **options)
    assert books(run._saver.ledger) == before
    assert sorted(folder.rglob("*")) == files
    made = run.save(state, **options)
    commit = made.commit
    assert (plan.sequence, plan.parent) == (made.sequence, made.parent)
    assert plan.kind == ("base" if made.parent is None else "increment")
    assert (plan.policy, plan.reason) == (commit.policy.name, commit.policy.reason)
    assert [(t.name, t.storage, t.stored_rows) for t in plan.tables] == [
        (name, made.table(name).storage, made.table(name).stored_rows) for name in made.tables
    ]
    return plan, made


def scenes(folder: Path) -> Iterator[tuple[str, SavePlan, Checkpoint]]:
    """Saves of many kinds, each planned before."""
    run = crf.open_run(
        folder, "a", durable=False, policy="consecutive", bits={"*": 4, "raw": None}, chunk_bytes=1 << 18
    )
    keys = np.arange(0, 30_000, 7)
    large, small, raw = weights(40_000, 32), weights(500, 8), weights(3000, 4)

    def state(changed: Any, live: Array) -> State:
        return State(
            tables={
                "large": Table({"weight": large, "sum": large[:, 0]}, changed=changed),
                "small": Table({"weight": small}, changed=None if changed is None else [3, 4]),
                "raw": Table({"weight": raw.astype(np.float16)}, changed=None if changed is None else []),
                "keyed": Table(
                    {"weight": weights(len(live), 8)}, keys=live, changed=None if changed is None else live[:9]
                ),
            },
            tensors={"mlp": np.ones((64, 33), np.float32), "empty": np.zeros((0, 3))},
            extra={"batch": 7},
            blobs={"reader": b"x" * 1000},
        )

    rng = np.random.default_rng(2)
    yield "base", *planned_and_saved(run, state(None, keys), folder, step=1)
    yield "increment", *planned_and_saved(run, state(np.flatnonzero(rng.random(40_000) < 0.26), keys[5:]), folder)
    yield "little", *planned_and_saved(run, state([5], keys[5:]), folder, parent=1)
    yield "everything", *planned_and_saved(run, state([5], keys[5:]), folder, force_full=True)
    run.restore()
    yield "restored", *planned_and_saved(run, state(rng.random(40_000) < 0.5, keys), folder, parent="latest")


def test_sizes_are_those_that_are_stored(tmp_path: Path) -> None:
    """Codes of 3 bits and more, and raw values, have known sizes; lists of rows were short enough to be compressed."""
    met = []
    for what, plan, made in scenes(tmp_path):
        stored = objects(tmp_path, made.sequence)
        assert plan.objects == len(stored), what
        assert plan.stored_bytes == pytest.approx(made.stored_bytes, rel=0.004, abs=64), what
        met.append(what)
    assert met == ["base", "increment", "little", "everything", "restored"]


def test_the_tables_are_told(tmp_path: Path) -> None:
    told = {what: {table.name: table for table in plan.tables} for what, plan, _ in scenes(tmp_path)}
    assert {table.storage for table in told["base"].values()} == {"full"}
    increment = told["increment"]
    assert [increment[name].storage for name in ("large", "small", "raw", "keyed")] == [
        "changed", "changed", "unchanged", "changed",
    ]  # fmt: skip
    assert (increment["keyed"].deleted, increment["keyed"].stored_rows) == (5, 9)
    assert (increment["raw"].rows, increment["raw"].stored_rows) == (3000, 0)
    assert told["little"]["large"].stored_rows > 10_000  # over checkpoint 1: what changed before is in there


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_long_lists_of_rows_are_judged_by_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(forecast, "_SAMPLE", 10_000)
    run = crf.open_run(tmp_path, "a", durable=False, bits=bits, policy="one-shot")
    values = weights(150_000, 16)
    run.save(State(tables={"t": Table({"weight": values})}))
    changed = np.flatnonzero(np.random.default_rng(3).random(len(values)) < 0.26)
    plan, made = planned_and_saved(run, State(tables={"t": Table({"weight": values}, changed=changed)}), tmp_path)
    assert plan.objects == len(objects(tmp_path, 2))
    assert made.stored_bytes * 0.99 < plan.stored_bytes < made.stored_bytes * 1.12  # codes of 1 and 2 bits get smaller


def test_pending_rows_stay_with_the_next_save(tmp_path: Path) -> None:
    """Planning consumes nothing, and tells nothing: what only a plan was told is not pending."""
    run = crf.open_run(tmp_path, "a", durable=False, policy="consecutive")
    values = weights(50, 3)
    run.save(State(tables={"t": Table({"weight": values})}))
    for rows in ([1, 2], ALL, [7]):
        run.plan_save(State(tables={"t": Table({"weight": values}, changed=rows)}))
    plan = run.plan_save(State(tables={"t": Table({"weight": values}, changed=[4])}))
    assert plan.tables[0].stored_rows == 1
    assert run.save(State(tables={"t": Table({"weight": values}, changed=[4])})).table("t").stored_rows == 1


def test_rows_of_a_save_that_failed_are_planned(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path, "a", durable=False, policy="consecutive")
    values = weights(50, 3)
    run.save(State(tables={"t": Table({"weight": values})}))

    def stop(_: Any) -> dict[str, Array]:
        raise KeyboardInterrupt

    table = Table.from_function(stop, rows=50, fields={"weight": (np.float32, 3)}, changed=[1, 2])
    assert run.plan_save(State(tables={"t": table})).tables[0].stored_rows == 2  # the function is not called
    with pytest.raises(KeyboardInterrupt):
        run.save(State(tables={"t": table}))
    plan, _ = planned_and_saved(run, State(tables={"t": Table({"weight": values}, changed=[9])}), tmp_path)
    assert plan.tables[0].stored_rows == 3


def test_an_empty_run(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path, "a", durable=False, bits="auto", expected_restores=1)
    plan = run.plan_save(State())
    assert (plan.kind, plan.sequence, plan.parent, plan.tables) == ("base", 1, None, ())
    assert plan.reason == "a base: nothing is committed; 2 bits, restores expected: 1"
    planned_and_saved(run, State(), tmp_path)


def test_room(tmp_path: Path) -> None:
    class Small(LocalStore):
        left: int | None = 10_000

        def free_bytes(self) -> int | None:
            return self.left

    store = Small(tmp_path / "run", durable=False)
    run = crf.open_run(store, "a")
    state = State(tables={"t": Table({"weight": weights(1000, 4)})})
    plan = run.plan_save(state)
    assert (plan.free_bytes, plan.fits) == (10_000, False)
    store.left = plan.stored_bytes + 100
    assert run.plan_save(state).fits is True
    store.left = None
    assert run.plan_save(state).fits is None
    local = LocalStore(tmp_path / "not" / "there").free_bytes()
    assert local is not None and local > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_a_save_refuses_a_plan_refuses(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path, "a", durable=False)
    values = weights(20, 3)
    run.save(State(tables={"t": Table({"weight": values})}))
    before = books(run._saver.ledger)
    for state, options, told in (
        (State(tables={"t": Table({"weight": values})}), {}, "give changed="),
        (State(), {}, "name it in dropped="),
        (State(tables={"t": Table({"weight": values}, changed=[20])}), {}, "row 20 is not in"),
        (State(tables={"t": Table({"weight": values}, changed=[])}), {"parent": 7}, "parent=7 is not in the chain"),
        (State(tables={"t": Table({"weight": values}, changed=[])}), {"step": -1}, "step -1"),
    ):
        with pytest.raises(InvalidInputError, match=told):
            run.plan_save(state, **options)  # type: ignore[arg-type]
    assert books(run._saver.ledger) == before
    with pytest.raises(InvalidInputError, match="open for reading"):
        crf.open_run(tmp_path).plan_save(State())
    other = crf.open_run(tmp_path, "a", durable=False)
    other.save(State(tables={"t": Table({"weight": values})}))
    with pytest.raises(ConcurrentCommitError):
        run.save(State(tables={"t": Table({"weight": values}, changed=[])}))
    with pytest.raises(ConcurrentCommitError):
        run.plan_save(State(tables={"t": Table({"weight": values}, changed=[])}))
