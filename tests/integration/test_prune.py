"""Prunes that end in the middle; prunes between the store calls of saves, reads and tags, and the other way round."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.chain import History
from checkrun_format.pruning import Pruning
from checkrun_format.stores import LocalStore, Store
from checkrun_format.testing import Fault
from checkrun_format.testing import FaultStore as Flaky
from tests.integration import test_kill
from tests.integration.test_kill import FaultStore, assert_same, objects_in, strike

LAST = crf.Keep(last=1)


class MemoryStore(test_kill.MemoryStore):
    """Objects in a dictionary; like a local folder it fails where somebody has removed what is to be synced."""

    def sync(self, prefix: str) -> None:
        if not self.list(prefix):
            raise crf.StorageError(errno.ENOENT, prefix)


def state(step: int) -> crf.State:
    """The state after a step; row r last changed in the last step that leaves r when divided by six."""
    rows = np.arange(6)
    weight = (step - (step - rows) % 6).clip(0)[:, None] * 10 + rows[:, None] + np.zeros(2, np.float32)
    table = crf.Table({"weight": weight.astype(np.float32)}, changed=[step % 6])
    return crf.State(tables={"t": table}, extra={"step": step})


# Histories ------------------------------------------------------------------------------------------------------------


def build(store: Store, steps: int, *, base_every: int = 3) -> crf.Run:
    """Checkpoint n holds step n - 1; a base now and then, and increments over it in a row."""
    run = crf.open_run(store, "a", policy="consecutive")
    for step in range(steps):
        run.save(state(step), step=step, parent=None if step % base_every == 0 else "auto")
    return run


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """Checkpoints 1 to 8; bases are 1, 4, 7."""
    store = MemoryStore({})
    run = build(store, 8)
    assert [c.parent for c in run.log()] == [None, 1, 2, None, 4, 5, None, 7]
    return store.objects


def check_all(store: Store, *, litter: bool = False) -> list[int]:
    """Every checkpoint that is listed loads bit for bit, and nothing is wrong; their numbers."""
    run = crf.open_run(store)
    numbers = []
    for checkpoint in run.log():
        assert checkpoint.step is not None
        assert_same(checkpoint.load(), state(checkpoint.step))
        numbers.append(checkpoint.sequence)
    problems = run.verify()
    assert {problem.kind for problem in problems} <= ({"litter"} if litter else set()), problems
    return numbers


def below(store: MemoryStore, number: int) -> set[str]:
    return {key for key in store.objects if key.startswith(f"{number:08d}/")}


# Interrupted ----------------------------------------------------------------------------------------------------------


def calls_of(objects: dict[str, bytes], act: Callable[[Store], object]) -> list[str]:
    store = FaultStore(MemoryStore(objects))
    store.fault = lambda *_: None
    act(store)
    return store.calls


def prune_now(store: Store, keep: crf.Keep = LAST) -> None:
    run = crf.open_run(store, "a")
    run.prune(run.plan_prune(keep))


def failing() -> crf.StorageError:
    return crf.StorageError(errno.EIO, "struck")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("error", "and_on"), [(failing, False), (KeyboardInterrupt, True)], ids=["once", "from then on"]
)
def test_struck_at_every_call_of_the_store(
    objects: dict[str, bytes], when: str, error: Callable[[], BaseException], *, and_on: bool
) -> None:
    """PRU-1, PRU-2: whatever call fails, what is left is whole; the next prune removes the rest."""
    keep = crf.Keep(last=2, every=4)  # 8 and 7; step 0 is 1, step 4 is 5, which needs 4
    calls = calls_of(objects, partial(prune_now, keep=keep))
    assert {"replace", "delete", "list"} <= set(calls)
    assert calls.count("replace") == 3
    for call in range(1, len(calls) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        store.fault = strike(when, call, error, and_on=and_on)
        with pytest.raises(type(error())):
            prune_now(store, keep)
        assert set(check_all(inner, litter=True)) >= {1, 4, 5, 7, 8}
        prune_now(inner, keep)
        assert check_all(inner) == [1, 4, 5, 7, 8]
        for number in (2, 3, 6):
            assert below(inner, number) == {f"{number:08d}/zarr.json"}


def test_data_go_only_after_their_marker_and_parents_after_children(objects: dict[str, bytes]) -> None:
    """PRU-1."""
    store = FaultStore(MemoryStore(objects))
    seen: list[tuple[str, int]] = []

    def note(when: str, _number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if when == "before" and name in ("replace", "delete"):
            seen.append((name, int(arguments[0][:8])))

    store.fault = note
    prune_now(store)
    assert [number for name, number in seen if name == "replace"] == [6, 5, 4, 3, 2, 1]
    first = {number: seen.index(("delete", number)) for number in range(1, 7)}
    assert all(seen.index(("replace", number)) < first[number] for number in first)


def test_what_it_costs_follows_what_is_removed() -> None:
    """Nothing is read of what stays but commits and listings; a prune that removes nothing writes nothing."""
    calls: dict[int, list[str]] = {}
    for steps in (8, 20):
        store = FaultStore(inner := MemoryStore({}))
        build(inner, steps)
        run = crf.open_run(store, "a")
        plan = run.plan_prune(crf.Keep(last=steps - 2))
        assert plan.goes == []
        plan = run.plan_prune(crf.Keep(last=steps - 3))
        store.fault = lambda *_: None
        run.prune(plan)
        calls[steps] = list(store.calls)
    assert calls[8].count("replace") == calls[20].count("replace") == 3
    assert calls[8] == calls[20]


def test_in_the_background_a_plan_reads_what_is_new_and_no_more() -> None:
    calls: dict[int, list[str]] = {}
    for steps in (8, 20):
        store = FaultStore(inner := MemoryStore({}))
        run = build(inner, steps)
        pruning = Pruning(History(store))
        keep = crf.Keep(last=steps - 3)
        for _ in range(2):
            pruning.prune(pruning.plan(keep))
        save_next(run, steps, parent=None)
        store.fault = lambda *_: None
        pruning.plan(keep)
        calls[steps] = list(store.calls)
    assert calls[8] == calls[20] == ["folders", "get", "list", "folders", "list"]


# Between the calls of others ------------------------------------------------------------------------------------------


def interleaved(
    store: FaultStore, act: Callable[[], object], call: int, other: Callable[[], object]
) -> Iterator[crf.CheckrunError]:
    """Do the other before the call of this number; the error that the first ends with, if it is one of ours."""

    def fault(when: str, number: int, _name: str, _arguments: tuple[Any, ...]) -> None:
        if when == "before" and number == call:
            store.fault = None
            other()
            store.fault = lambda *_: None

    store.fault = fault
    try:
        act()
    except crf.CheckrunError as error:
        yield error
    finally:
        store.fault = None


def save_next(run: crf.Run, step: int, **options: Any) -> None:
    run.save(state(step), step=step, **options)


def restored(store: Store) -> crf.Run:
    run = crf.open_run(store, "a", policy="consecutive")
    run.restore()
    return run


@pytest.mark.parametrize("parent", ["auto", None, 7])
def test_a_prune_at_every_call_of_a_save(objects: dict[str, bytes], parent: int | str | None) -> None:
    """PRU-2: the save commits with its whole chain present."""
    run = restored(store := FaultStore(MemoryStore(objects)))
    store.fault = lambda *_: None
    save_next(run, 8, parent=parent)
    for call in range(1, len(store.calls) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        run = restored(store)
        assert (
            list(interleaved(store, partial(save_next, run, 8, parent=parent), call, partial(prune_now, inner))) == []
        )
        numbers = check_all(inner)
        assert numbers[-1] == 9
        assert set(numbers) <= {7, 8, 9}
        save_next(run, 9)
        assert check_all(inner)[-1] == 10


COPIES: dict[str, tuple[Callable[[crf.Run], object], int]] = {
    "rollback to the chain": (lambda run: run.rollback(7), 6),
    "rollback to what goes": (lambda run: run.rollback(6), 5),
    "compact": (lambda run: run.compact(), 7),
    "takeover": (lambda run: run.take_over(), 7),
}
"""What commits a state again, and the step of that state."""


@pytest.mark.parametrize("copy", COPIES)
def test_a_prune_at_every_call_of_a_copy(objects: dict[str, bytes], copy: str) -> None:
    """PRU-2, RBK-1, CMP-1: it commits with its whole chain present; or it was of what went, and fails by name."""
    act, step = COPIES[copy]
    refused = 0
    for call in range(1, len(calls_of(objects, lambda store: act(restored(store)))) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        run = restored(store)
        errors = list(interleaved(store, partial(act, run), call, partial(prune_now, inner)))
        if errors:
            assert [error.kind for error in errors] == ["pruned"]
            assert copy == "rollback to what goes"
            assert check_all(inner) == [7, 8]
            refused += 1
        else:
            assert check_all(inner)[-1] == 9
            assert crf.open_run(inner).latest().step == step
        run = restored(inner)
        save_next(run, (run.latest().step or 0) + 1)
        assert check_all(inner)[-1] == run.latest().sequence == 10 - bool(errors)
    assert (refused > 5) == (copy == "rollback to what goes")


def test_a_prune_at_every_call_of_opening_and_restoring(objects: dict[str, bytes]) -> None:
    """HEA-1, HEA-5: whatever others commit and prune meanwhile, the save has its chain, or fails by name."""

    def succeed(inner: Store) -> None:
        save_next(restored(inner), 8, parent=None)
        prune_now(inner)

    def work(store: Store) -> None:
        run = crf.open_run(store, "a", policy="consecutive")
        save_next(run, run.restore().extra["step"] + 1)

    kinds = set()
    for call in range(1, len(calls_of(objects, restored)) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        errors = list(interleaved(store, partial(work, store), call, partial(succeed, inner)))
        kinds |= {error.kind for error in errors} or {"saved"}
        assert check_all(inner, litter=True)[-1] == (9 if errors else 10)
    assert kinds == {"saved", "concurrent_commit", "pruned"}


def test_a_save_at_every_call_of_a_prune(objects: dict[str, bytes]) -> None:
    """PRU-2: what is committed meanwhile stays, with its chain."""
    for call in range(1, len(calls_of(objects, prune_now)) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        run = restored(inner)
        assert list(interleaved(store, partial(prune_now, store), call, partial(save_next, run, 8))) == []
        assert check_all(inner) == [7, 8, 9]


def test_a_save_that_is_too_late_fails_by_name(objects: dict[str, bytes]) -> None:
    """HEA-3, PRU-2: at each call of a save another process commits a base, and what lies below is pruned."""

    def succeed(inner: Store) -> None:
        save_next(restored(inner), 8, parent=None)
        prune_now(inner)

    store = FaultStore(MemoryStore(objects))
    run = restored(store)
    store.fault = lambda *_: None
    save_next(run, 8)
    create = store.calls.index("create") + 1
    kinds = set()
    for call in range(1, len(store.calls) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        run = restored(store)
        errors = list(interleaved(store, partial(save_next, run, 8), call, partial(succeed, inner)))
        if call > create:  # it had committed, and is told so, or that its checkpoint is gone by now
            assert [error.kind for error in errors] in ([], ["pruned"])
            assert check_all(inner) == [10]
        else:
            kinds |= {error.kind for error in errors}
            assert len(errors) == 1
            with pytest.raises(crf.ConcurrentCommitError):
                save_next(run, 8)
            assert check_all(inner, litter=True) == [9]
            prune_now(inner)
            assert check_all(inner) == [9]
    assert kinds <= {"concurrent_commit", "pruned"}


@pytest.mark.parametrize("when", ["before it begins", "before it commits"])
def test_a_staged_save_that_is_too_late_fails_by_name(objects: dict[str, bytes], when: str) -> None:
    """HEA-3, PRU-3: another process commits its number, and a prune removes its objects and its chain."""
    run = restored(inner := MemoryStore(objects))

    def succeed() -> None:
        save_next(restored(inner), 8, parent=None)
        prune_now(inner)

    if when == "before it begins":
        succeed()
    save = run.begin(writers=1, parent="latest")
    writer = save.writer(0)
    writer.put("t", {"weight": np.ones((6, 2), np.float32)}, rows=(0, 6), of=6, recent=True)
    part_list = writer.finish()
    if when == "before it commits":
        succeed()
    with pytest.raises(crf.ConcurrentCommitError, match="number 9 is taken"):
        save.commit([part_list])
    with pytest.raises(crf.ConcurrentCommitError):
        save_next(run, 8)
    assert check_all(inner, litter=True) == [9]
    prune_now(inner)
    assert check_all(inner) == [9]


@pytest.mark.parametrize("call", ["save", "plan_save", "begin", "compact"])
def test_a_writer_that_remembers_nothing_of_what_is_pruned_is_told_that_it_is_late(
    objects: dict[str, bytes], call: str
) -> None:
    """HEA-3: the number is taken, whatever it finds missing first; told twice it says the same.

    Wherever the store fails meanwhile, that is told: nobody knows then why something is missing.
    """
    late, failed = (crf.ConcurrentCommitError, "number 9 is taken"), (crf.StorageError, "injected")
    told: list[str] = []
    for at in range(100):
        run = restored(store := Flaky(inner := MemoryStore(objects)))
        save_next(restored(inner), 8, parent=None)
        prune_now(inner)
        run._history._checkpoints.clear()
        acts: dict[str, Callable[[], object]] = {
            "save": partial(save_next, run, 8),
            "plan_save": partial(run.plan_save, state(8), step=8),
            "begin": partial(run.begin, writers=1, parent="latest"),
            "compact": run.compact,
        }
        store.arm(Fault(at=at))
        with pytest.raises(crf.CheckrunError) as caught:
            acts[call]()
        assert any(isinstance(caught.value, kind) and text in str(caught.value) for kind, text in (late, failed))
        told.append(caught.value.kind)
        struck = store.fired
        store.arm(None)
        with pytest.raises(crf.ConcurrentCommitError):
            save_next(run, 8)
        assert check_all(inner, litter=True) == [9]
        if at and not struck:
            break
    assert told[0] == told[-1] == "concurrent_commit"
    assert "storage" in told


@pytest.mark.parametrize("call", ["save", "begin"])
def test_what_landed_after_all_and_then_was_all_that_others_left(objects: dict[str, bytes], call: str) -> None:
    """HEA-3: a writer goes on from its own attempt, though a prune has removed what it thinks is the latest."""
    store = Flaky(MemoryStore(objects), Fault(how="late"))
    run = restored(store)
    with pytest.raises(crf.StorageError):
        save_next(run, 8, parent=None)
    assert store.land() == "00000009/zarr.json"
    prune_now(store.store)
    assert check_all(store.store) == [9]
    run._history._checkpoints.clear()
    if call == "save":
        save_next(run, 9)
    else:
        save = run.begin(writers=1, step=9)
        assert (save.sequence, save.token["parent"]) == (10, 9)
        writer = save.writer(0)
        writer.put("t", {"weight": state(9).tables["t"]["weight"]}, rows=(0, 6), of=6)
        save.commit([writer.finish()], extra={"step": 9})
    assert check_all(store.store) == [9, 10]


def test_a_reader_between_the_calls_of_a_prune_reads_the_same_bits_or_says_pruned(objects: dict[str, bytes]) -> None:
    """PRU-1, HEA-5: never `damaged`, never other values, never an older checkpoint as the latest."""
    read: set[str] = set()

    def look(inner: Store, run: crf.Run) -> None:
        assert run.latest().sequence == crf.open_run(inner).latest().sequence == 8
        for number in range(1, 9):
            try:
                assert_same(run[number].load(), state(number - 1))
                read.add("read")
            except crf.PrunedError:
                assert number < 7
                read.add("pruned")

    for call in range(1, len(calls_of(objects, prune_now)) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        run = crf.open_run(inner)
        opened = [run[number] for number in range(1, 9)]
        assert list(interleaved(store, partial(prune_now, store), call, partial(look, inner, run))) == []
        for checkpoint in opened[:6]:
            with pytest.raises(crf.PrunedError):
                checkpoint.load()
    assert read == {"read", "pruned"}


def test_an_audit_and_a_log_between_whose_calls_a_prune_comes(objects: dict[str, bytes]) -> None:
    """What is pruned meanwhile is no problem, and no checkpoint."""

    def look(store: Store) -> None:
        run = crf.open_run(store)
        assert {problem.kind for problem in run.verify()} <= {"litter"}
        assert [checkpoint.sequence for checkpoint in run.log()] == [7, 8]

    for call in range(1, len(calls_of(objects, lambda store: crf.open_run(store).verify())) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        assert list(interleaved(store, partial(look, store), call, partial(prune_now, inner))) == []
    for call in range(1, len(calls_of(objects, lambda store: list(crf.open_run(store).log()))) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        found: list[int] = []
        log = crf.open_run(store).log
        act = partial(lambda found, log: found.extend(c.sequence for c in log()), found, log)
        assert list(interleaved(store, act, call, partial(prune_now, inner))) == []
        assert found == sorted(found) and found[-2:] == [7, 8]


def test_the_latest_is_not_older_because_of_a_prune_while_it_is_looked_for(objects: dict[str, bytes]) -> None:
    """HEA-5: at each call of `latest`, others commit a base and prune all below it but what has a tag."""

    def succeed(inner: Store) -> None:
        save_next(restored(inner), 8, parent=None)
        prune_now(inner)

    objects = dict(objects)
    tagged = MemoryStore(objects)
    crf.open_run(tagged, "a").tag("old", 4)
    for call in range(1, 4):
        store = FaultStore(inner := MemoryStore(tagged.objects))
        run = crf.open_run(store)
        found: list[int] = []
        errors = list(
            interleaved(store, lambda: found.append(run.latest().sequence), call, partial(succeed, inner))  # noqa: B023
        )
        assert found in ([9], [8]) or [error.kind for error in errors] == ["pruned"]
        assert check_all(inner) == [4, 9]


def test_a_tag_at_every_call_of_a_prune(objects: dict[str, bytes]) -> None:
    """TAG-2: the checkpoint that was named stays, or the tag is refused; but at the marker itself nothing is torn."""
    ends = set()
    calls = calls_of(objects, prune_now)
    for call in range(1, len(calls) + 1):
        store = FaultStore(inner := MemoryStore(objects))
        tagger = crf.open_run(inner, "a")
        refused: list[crf.PrunedError] = []

        def tag(run: crf.Run = tagger, refused: list[crf.PrunedError] = refused) -> None:
            try:
                run.tag("best", 3)
            except crf.PrunedError as error:
                refused.append(error)

        errors = list(interleaved(store, partial(prune_now, store), call, tag))
        numbers = check_if_tagged(inner, numbers_of_marker_race := calls[call - 1] == "replace")
        if refused:
            assert errors == [] and numbers == [7, 8] and tagger.tags() == {}
            ends.add("refused")
        elif errors:
            assert "was tagged 'best' since" in str(errors[0]) and set(numbers) >= {1, 2, 3, 7, 8}
            ends.add("stopped")
        else:
            assert numbers_of_marker_race or set(numbers) >= {1, 2, 3}
            ends.add("kept")
    assert ends >= {"refused", "stopped", "kept"}


def check_if_tagged(store: Store, may_dangle: bool) -> list[int]:
    run = crf.open_run(store)
    kinds = {problem.kind for problem in run.verify()}
    assert kinds <= ({"litter", "pruned"} if may_dangle else {"litter"})
    return [checkpoint.sequence for checkpoint in run.log()]


# Killed ---------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_killed_at_a_random_time(objects: dict[str, bytes], tmp_path: Path) -> None:
    """PRU-1: SIGKILL in a pruning process; survivors are whole, and the next prune leaves nothing behind."""
    chance, calls = random.Random(5), calls_of(objects, prune_now)
    markers, left = [number for number, name in enumerate(calls, 1) if name == "replace"], []
    for number in sorted({*range(1, len(calls), 9), *markers[::2], len(calls) - 1}):
        folder = write(tmp_path / str(number), objects)
        test_kill.kill_in_call(number, folder, prune_now, chance)
        numbers = check_all(LocalStore(folder), litter=True)
        assert numbers == [*range(1, numbers.index(7) + 1), 7, 8]
        pruned = 8 - len(numbers)
        assert sum(marker < number for marker in markers) <= pruned <= sum(marker <= number for marker in markers)
        left.append(pruned)
        prune_now(LocalStore(folder))
        assert check_all(LocalStore(folder)) == [7, 8]
        keys = {key for key in objects_in(folder) if not key.startswith(("00000007/", "00000008/"))}
        assert keys == {"zarr.json", *(f"{number:08d}/zarr.json" for number in range(1, 7))}
    assert left == sorted(left) and left[0] == 0 and left[-1] == 6


def write(folder: Path, objects: dict[str, bytes]) -> Path:
    for key, data in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


# In the background ----------------------------------------------------------------------------------------------------


def test_a_run_prunes_after_each_commit(tmp_path: Path) -> None:
    """`open_run(keep=)`: what is committed is there at once, what is not kept is gone after `close`."""
    with crf.open_run(tmp_path / "run", "a", durable=False, policy="full", keep=crf.Keep(last=2)) as run:
        for step in range(6):
            assert run.save(state(step), step=step).sequence == step + 1
        run.tag("best", 6)
        run.close()
        assert check_all(LocalStore(tmp_path / "run")) == [5, 6]
        run.compact()
        run.rollback(6)
    assert [c.sequence for c in crf.open_run(tmp_path / "run").log()] == [6, 7, 8]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("policy", "every"), [("one-shot", 5), ("intermittent", None), ("consecutive", 5)])
def test_the_policy_decides_as_if_nothing_were_pruned(policy: str, every: int | None, restarts: bool) -> None:
    """COM-7: increments that are gone still count, in the process that wrote them and in those that go on from them."""
    parents = []
    for keep in (None, LAST):
        store = MemoryStore({})
        run = crf.open_run(store, "a", policy=policy, every=every, keep=keep)
        weight, made = np.zeros((60, 8), np.float32), []
        for step in range(14):
            if restarts and step % 3 == 1:
                run = crf.open_run(store, "a", policy=policy, every=every, keep=keep)
                run.restore()
            rows = np.arange((step * 5) % 60, (step * 5) % 60 + 5)
            weight[rows] = step
            made.append(
                run.save(crf.State(tables={"t": crf.Table({"weight": weight}, changed=rows)}), step=step).parent
            )
            run.close()
        parents.append(made)
    assert parents[0] == parents[1]
    assert len(set(parents[0])) > 1


def test_a_prune_in_the_background_that_fails_is_a_warning_and_never_loses_a_save(objects: dict[str, bytes]) -> None:
    store = FaultStore(inner := MemoryStore(objects))
    run = crf.open_run(store, "a", policy="full", keep=LAST)
    run.restore()

    def fault(when: str, _number: int, name: str, _arguments: tuple[Any, ...]) -> None:
        if (when, name) == ("before", "replace"):
            raise crf.StorageError(errno.EIO, "struck")

    def wait() -> None:
        assert run._pruner is not None
        while run._pruner._thread is not None:
            time.sleep(0.001)

    store.fault = fault
    assert run.save(state(8), step=8).sequence == 9
    wait()
    with pytest.warns(crf.PruneWarning, match="StorageError: .*struck"):
        assert run.save(state(9), step=9).sequence == 10
    wait()
    store.fault = None
    assert set(check_all(inner)) >= {9, 10}
    with pytest.warns(crf.PruneWarning):
        run.close()
    run.close()
    assert run.save(state(10), step=10).sequence == 11
    run.close()
    assert check_all(inner) == [11]


def test_the_end_of_the_interpreter_waits_for_a_prune(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys, numpy as np, checkrun_format as crf\n"
        "run = crf.open_run(sys.argv[1], 'a', durable=False, policy='full', keep=crf.Keep(last=1))\n"
        "for step in range(4):\n"
        "    table = crf.Table({'weight': np.full((9, 2), step, np.float32)}, changed=crf.ALL)\n"
        "    run.save(crf.State(tables={'t': table}), step=step)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program, tmp_path / "run"], check=True, timeout=60)
    run = crf.open_run(tmp_path / "run")
    assert [c.sequence for c in run.log()] == [4]
    assert run.verify() == []
    assert np.array_equal(run.load().tables["t"]["weight"], np.full((9, 2), 3))
