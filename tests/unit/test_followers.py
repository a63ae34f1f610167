"""Whoever applies `changes_since` has the bits of a direct read, however rows were encoded again (LAY-7, CHG-2)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import checkrun_format as crf
from checkrun_format import chain
from checkrun_format.stores import LocalStore
from tests.property.strategies import check_raw_changes

Floats = npt.NDArray[np.float32]


def weights(rows: int = 500) -> Floats:
    return np.random.default_rng(0).standard_normal((rows, 8)).astype(np.float32)


def state(weight: Floats, changed: list[int] | None = None, **options: Any) -> crf.State:
    return crf.State(tables={"t": crf.Table({"weight": weight}, changed=changed, **options)})


def follow(run: crf.Run, since: int, number: int) -> tuple[Floats, int]:
    """The state of `since` with the changes up to `number`, and how many rows these were."""
    held: Floats = run[since].load().tables["t"]["weight"]
    check_raw_changes(run[number], since)
    count = 0
    for change in run[number].changes_since(since):
        held[change.rows] = change.fields["weight"]
        count += len(change.rows)
    return held, count


def read(run: crf.Run, number: int) -> Floats:
    values: Floats = run[number].load().tables["t"]["weight"]
    return values


class TestFollow:
    """`Run.follow`: the latest checkpoint, whenever there is a new one."""

    def test_what_is_there_comes_at_once_and_is_passed_over_in_favour_of_the_latest(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "run", mode="a")
        for _ in range(3):
            run.save(state(weights(), []))
        assert next(run.follow(poll=60)).sequence == 3
        assert next(crf.open_run(tmp_path / "run").follow(2, poll=60)).sequence == 3

    def test_a_server_that_follows_ends_with_the_bits_of_a_load(self, tmp_path: Path) -> None:
        run, weight = crf.open_run(tmp_path / "run", mode="a", bits=4, policy="intermittent"), weights()
        run.save(state(weight))
        reader, stop = crf.open_run(tmp_path / "run"), threading.Event()
        held: Floats = reader[1].load().tables["t"]["weight"]
        seen: list[int] = []

        def serve() -> None:
            since = 1
            for checkpoint in reader.follow(since, poll=0.001, stop=stop):
                for change in checkpoint.changes_since(since):
                    held[change.rows] = change.fields["weight"]
                since = checkpoint.sequence
                seen.append(since)

        thread = threading.Thread(target=serve)
        thread.start()
        for number in range(2, 12):
            weight[number * 7 : number * 9] += 1
            run.save(state(weight, list(range(number * 7, number * 9))))
        while seen[-1:] != [11]:
            thread.join(0.001)
        stop.set()
        thread.join(10)
        assert seen == sorted(set(seen)) and not thread.is_alive()
        assert held.tobytes() == read(run, 11).tobytes()

    def test_it_ends_when_it_is_told_to(self, tmp_path: Path) -> None:
        run, stop = crf.open_run(tmp_path / "run", mode="a"), threading.Event()
        threading.Timer(0.02, stop.set).start()
        assert list(run.follow(poll=60, stop=stop)) == []

    def test_what_makes_no_sense_is_refused_at_once(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "run", mode="a")
        with pytest.raises(crf.InvalidInputError, match="poll -1"):
            run.follow(poll=-1)
        with pytest.raises(crf.InvalidInputError, match="follow: 'x' is not the number"):
            run.follow("x")  # type: ignore[arg-type]
        with pytest.raises(crf.InvalidInputError, match="poll 'x'"):
            run.follow(poll="x")  # type: ignore[arg-type]

    def test_it_may_look_only_once(self, tmp_path: Path) -> None:
        run, stop = crf.open_run(tmp_path / "run", mode="a"), threading.Event()
        threading.Timer(0.02, stop.set).start()
        assert list(run.follow(poll=float("inf"), stop=stop)) == []


@pytest.mark.parametrize("keyed", [False, True])
def test_a_refresh_after_each_increment_reads_one_layer_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keyed: bool
) -> None:
    """Not the whole chain again, however long: what a refresh reads, and what a save reads, grows with what is new."""
    monkeypatch.setattr(chain, "_KEPT", 3)
    writer, reader = CountingStore(tmp_path / "run"), CountingStore(tmp_path / "run")
    run, weight = crf.open_run(writer, mode="a", policy="consecutive", bits=8), weights(4000)
    keys = np.arange(4000) * 10 if keyed else None
    run.save(crf.State(tables={"t": crf.Table({"weight": weight}, keys=keys)}))
    follower = crf.open_run(reader)
    held: Floats = follower[1].load().tables["t"]["weight"]
    counts = []
    for number in range(2, 26):
        rows = np.arange(number * 50, number * 50 + 10)
        weight[rows] += 1
        writer.keys.clear()
        changed = rows if keys is None else keys[rows]
        run.save(crf.State(tables={"t": crf.Table({"weight": weight}, keys=keys, changed=changed)}))
        reader.keys.clear()
        for change in follower[number].changes_since(number - 1):
            held[change.rows if keys is None else change.rows // 10] = change.fields["weight"]
        counts.append((len(writer.keys), len(reader.keys)))
    assert held.tobytes() == read(run, 25).tobytes()
    assert max(writes for writes, _ in counts[1:]) <= counts[0][0] + 2  # the base's documents are gone from memory once
    assert max(reads for _, reads in counts) == counts[0][1]


def test_what_a_follower_remembers_of_a_pruned_checkpoint_is_pruned_history(tmp_path: Path) -> None:
    """CHG-3: be it that its documents are still in memory, or that it is pruned between two batches."""
    run = crf.open_run(tmp_path / "run", mode="a", policy="full")
    for number in range(4):
        run.save(state(weights(), [number]))
    reader = crf.open_run(tmp_path / "run")
    third = reader[3]
    batches = third.changes_since(1, max_bytes=1)
    assert next(batches).rows.tolist() == [1]
    assert [len(list(reader[number].changes_since(number - 1))) for number in (2, 4)] == [1, 1]
    run.prune(run.plan_prune(crf.Keep(last=1)))
    told = "what changed between 1 and {} is unknown: checkpoint {} was pruned.*; load"
    with pytest.raises(crf.HistoryPrunedError, match=told.format(3, 3)):
        list(batches)
    with pytest.raises(crf.HistoryPrunedError, match=told.format(4, 3)):
        list(reader[4].changes_since(1))
    assert [change.rows.tolist() for change in reader[4].changes_since(3)] == [[3]]


class CountingStore(LocalStore):
    """Notes what is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.keys: list[str] = []

    def get(self, key: str) -> bytes | None:
        self.keys.append(key)
        return super().get(key)

    def open(self, key: str) -> Any:
        self.keys.append(key)
        return super().open(key)


def test_another_width_makes_every_row_recent(tmp_path: Path) -> None:
    run, weight = crf.open_run(tmp_path / "run", mode="a"), weights()
    run.save(state(weight, bits=2))
    weight[0] += 1
    run.save(state(weight, [0], bits=8), parent=None)
    held, count = follow(run, 1, 2)
    assert count == 500
    assert held.tobytes() == read(run, 2).tobytes()


@pytest.mark.parametrize("policy", ["full", "one-shot", "consecutive"])
def test_a_row_that_needs_wider_qparams_leaves_the_others_alone(tmp_path: Path, policy: Any) -> None:
    run, weight = crf.open_run(tmp_path / "run", mode="a", bits=4, policy=policy), weights()
    run.save(state(weight))
    weight[0] = [1e6] * 7 + [1.0001e6]
    run.save(state(weight, [0]))
    weight[1] += 1
    run.save(state(weight, [1]))
    for since, rows in ((1, 2), (2, 1)):
        held, count = follow(run, since, 3)
        assert count == rows
        assert held.tobytes() == read(run, 3).tobytes()
    assert abs(read(run, 3)[0] - weight[0]).max() <= 0.505 * 100 / 15 + 1


def test_rows_that_are_encoded_again_after_a_restore(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a", bits=8)
    run.save(state(weights()))
    again = crf.open_run(tmp_path / "run", mode="a", bits=8)
    weight = again.restore().tables["t"]["weight"]
    weight[0] += 1
    again.save(state(weight, [0]), parent=None)
    assert follow(again, 1, 2)[0].tobytes() == read(again, 2).tobytes()
    weight[1] += 1
    again.save(state(weight, [1]), parent=None)
    held, count = follow(again, 2, 3)
    assert count == 1
    assert held.tobytes() == read(again, 3).tobytes()


def test_another_narrow_dtype_makes_every_row_recent(tmp_path: Path) -> None:
    run, weight = crf.open_run(tmp_path / "run", mode="a"), weights()
    run.save(state(weight, store_as={"weight": "bfloat16"}))
    weight[0] += 1
    run.save(state(weight, [0]), parent=None)
    held, count = follow(run, 1, 2)
    assert held.tobytes() == read(run, 2).tobytes() == weight.tobytes()
    assert count == 500


def test_what_several_writers_quantized_is_recent_when_it_is_stored_raw(tmp_path: Path) -> None:
    run, weight = crf.open_run(tmp_path / "run", mode="a"), weights()
    save = run.begin(writers=1)
    writer = save.writer(0)
    writer.put("t", {"weight": weight}, rows=(0, 500), of=500, bits=2)
    save.commit([writer.finish()])
    run.save(state(weight, []), parent=None)
    held, count = follow(run, 1, 2)
    assert count == 500
    assert held.tobytes() == read(run, 2).tobytes() == weight.tobytes()


def test_two_threads_lose_no_row(tmp_path: Path) -> None:
    """Each thread changes its own rows and saves; saves of one Run follow one another."""
    run, weight = crf.open_run(tmp_path / "run", mode="a", policy="consecutive", durable=False), weights()
    run.save(state(weight))

    def work(rows: range) -> None:
        for row in rows:
            weight[row] = row
            run.save(state(weight, [row]))

    threads = [threading.Thread(target=work, args=(range(first, 20, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [c.sequence for c in run.log()] == list(range(1, 22))
    assert read(run, 21)[:20].tolist() == [[row] * 8 for row in range(20)]


def test_subclasses_of_arrays_are_stored_as_arrays(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(np.arange(12.0).reshape(3, 4))
    run.save(crf.State(tensors={"m": matrix}))
    assert run.load().tensors["m"].tolist() == np.arange(12.0).reshape(3, 4).tolist()


def test_big_endian_keys_of_a_staged_part(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    save = run.begin(writers=1)
    writer = save.writer(0)
    writer.put("t", {"v": np.arange(2.0)}, keys=np.array([1, 2**64 - 1], ">u8"))
    save.commit([writer.finish()])
    assert run.latest().table("t").keys().tolist() == [2**64 - 1, 1]


def test_keys_of_the_other_sign_are_not_there(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    values = {"v": np.arange(2.0)}
    run.save(
        crf.State(
            tables={
                "signed": crf.Table(values, keys=np.array([-1, 5])),
                "unsigned": crf.Table(values, keys=np.array([2**64 - 1, 5], np.uint64)),
            }
        )
    )
    signed, unsigned = run.latest().table("signed"), run.latest().table("unsigned")
    assert signed.take([-1])["v"].tolist() == [0]
    assert unsigned.take(np.array([2**64 - 1], np.uint64))["v"].tolist() == [0]
    with pytest.raises(crf.RowNotFoundError, match="18446744073709551615"):
        signed.take(np.array([2**64 - 1], np.uint64))
    with pytest.raises(crf.RowNotFoundError, match="-1"):
        unsigned.take([-1])


def test_a_function_may_change_the_ids_that_it_is_given(tmp_path: Path) -> None:
    def fetch(ids: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.float64]]:
        values: npt.NDArray[np.float64] = ids.astype(np.float64) * 10
        ids[:] = 0
        return {"v": values}

    run = crf.open_run(tmp_path / "run", mode="a")
    run.save(crf.State(tables={"t": crf.Table.from_function(fetch, fields={"v": (np.float64, None)}, keys=[3, 1, 2])}))
    assert run.latest().table("t").keys().tolist() == [1, 2, 3]
    assert run.latest().table("t").read()["v"].tolist() == [10, 20, 30]


def test_rows_that_reach_into_one_another_are_no_destination(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    values = np.arange(12.0).reshape(4, 3)
    run.save(crf.State(tensors={"x": values}))
    memory = np.zeros(60)  # steps reach 12 back from the middle, and 25 on
    for steps in ((1, 1), (2, 1), (-2, 1), (1, 3), (3, 0)):
        out = np.lib.stride_tricks.as_strided(memory[30:], (4, 3), tuple(8 * step for step in steps))
        with pytest.raises(crf.InvalidInputError, match="overlaps itself"):
            run.load(out=crf.State(tensors={"x": out}))
    for steps in ((3, 1), (-4, 1), (1, 4), (7, 2), (-3, -1)):
        out = np.lib.stride_tricks.as_strided(memory[30:], (4, 3), tuple(8 * step for step in steps))
        run.load(out=crf.State(tensors={"x": out}))
        assert out.tolist() == values.tolist()


def test_what_a_checkpoint_lacks_is_no_destination(tmp_path: Path) -> None:
    """It would keep what it holds, and nobody would know."""
    run = crf.open_run(tmp_path / "run", mode="a")
    run.save(crf.State(tables={"t": crf.Table({"v": np.ones(3)})}, tensors={"x": np.arange(3.0)}))
    held = np.full(3, 7.0)
    for out, told in (
        (crf.State(tables={"u": crf.Table({"v": held})}), "table 'u'"),
        (crf.State(tensors={"x": held, "y": held}), "tensor 'y'"),
    ):
        with pytest.raises(crf.InvalidInputError, match=f"out: checkpoint 1 has no {told}: leave it out"):
            run.load(out=out)
        with pytest.raises(crf.InvalidInputError, match=told):
            run.restore(out=out)
    assert held.tolist() == [7, 7, 7]


def test_a_destination_that_overlaps_itself_is_refused(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    run.save(crf.State(tensors={"x": np.arange(3.0)}))
    with pytest.raises(crf.InvalidInputError, match="overlaps itself"):
        run.load(out=crf.State(tensors={"x": torch.zeros(1, dtype=torch.float64).expand(3)}))


@pytest.mark.parametrize("name", ["changed", "deleted"])
def test_keys_of_the_other_sign_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    for keys, wrong, told in (
        (np.array([-1, 5]), np.array([2**64 - 1], np.uint64), f"{name}: {2**64 - 1} is no key of int64"),
        (np.array([2**64 - 1, 5], np.uint64), np.array([-1]), f"{name}: -1 is no key of uint64"),
    ):
        options: dict[str, Any] = {name: wrong}
        with pytest.raises(crf.InvalidInputError, match=told):
            run.save(crf.State(tables={"t": crf.Table({"v": np.arange(2.0)}, keys=keys, **options)}))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["zarr.json"]
