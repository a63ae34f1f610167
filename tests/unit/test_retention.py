"""Which checkpoints stay, why, and what of the rest of a run is touched (FORMAT.md 5.3)."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.chain import History
from checkrun_format.errors import InvalidInputError
from checkrun_format.pruning import Pruning
from checkrun_format.stores import LocalStore

DAY = dt.timedelta(days=1)
ALL_OLD = crf.Keep(newer_than=0)
LAST = crf.Keep(last=1)


def state(value: float = 0) -> crf.State:
    return crf.State(tables={"t": crf.Table({"weight": np.full((4, 2), value, np.float32)}, changed=[1])}, extra=value)


def make(folder: Path, *steps: int, base_every: int = 1) -> crf.Run:
    run = crf.open_run(folder, "a", durable=False, policy="consecutive")
    for place, step in enumerate(steps):
        run.save(state(place), step=step, parent="auto" if place % base_every else None)
    return run


def reasons(run: crf.Run, keep: crf.Keep, **options: Any) -> dict[int, tuple[str, ...]]:
    return {decision.sequence: decision.reasons for decision in run.plan_prune(keep, **options).checkpoints}


def keys(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def attempt_of(folder: Path, number: int) -> str:
    document = json.loads((folder / layout.commit_key(number)).read_bytes())
    return f"{number:08d}/{document['attributes']['checkrun']['attempt']}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


class TestRules:
    def test_last(self, folder: Path) -> None:
        run = make(folder, 10, 20, 30, 40)
        assert reasons(run, crf.Keep(last=2)) == {1: (), 2: (), 3: ("last 2",), 4: ("the latest", "last 2")}
        assert run.plan_prune(crf.Keep(last=99)).goes == []

    def test_every_keeps_the_first_from_each_multiple_on(self, folder: Path) -> None:
        run = make(folder, 0, 90, 110, 190, 200, 450)
        assert reasons(run, crf.Keep(every=100)) == {
            1: ("first from step 0 on",),
            2: (),
            3: ("first from step 100 on",),
            4: (),
            5: ("first from step 200 on",),
            6: ("the latest", "first from step 400 on"),
        }

    def test_every_after_the_trainer_went_back(self, folder: Path) -> None:
        """What came at a step before it was gone back behind that step does not count."""
        run = make(folder, 0, 100, 200, 50, 120, 130)
        assert run.plan_prune(crf.Keep(every=100)).stays == [1, 5, 6]

    def test_every_does_not_keep_what_has_no_step(self, folder: Path) -> None:
        run = make(folder, 0)
        for step in (None, 7, None):
            run.save(state(), step=step, parent=None)
        assert run.plan_prune(crf.Keep(every=5)).stays == [1, 3, 4]

    def test_newer_than(self, folder: Path) -> None:
        run = make(folder, 1, 2, 3)
        now = dt.datetime.now(dt.UTC)
        plan = Pruning(History(LocalStore(folder))).plan
        assert plan(crf.Keep(newer_than=DAY), now=now).stays == [1, 2, 3]
        assert plan(crf.Keep(newer_than=86_400), now=now + 2 * DAY).stays == [3]
        assert run.plan_prune(crf.Keep(newer_than=dt.timedelta.max)).stays == [1, 2, 3]
        first = run[1].commit.created
        exactly = dt.datetime.fromisoformat(first) + DAY
        assert plan(crf.Keep(newer_than=DAY), now=exactly).stays == [2, 3]

    def test_a_time_that_is_none_keeps(self, folder: Path) -> None:
        make(folder, 1, 2)
        for key in (folder / "00000001/zarr.json", next(folder.glob("00000001/*/manifest.json"))):
            key.write_bytes(re.sub(rb'"created":"[^"]*"', b'"created":"yesterday"', key.read_bytes()))
        run = crf.open_run(folder)
        assert reasons(run, ALL_OLD)[1] == ("created at 'yesterday', which is no time",)
        shutil.rmtree(folder)  # its digest is wrong now

    def test_they_are_combined(self, folder: Path) -> None:
        run = make(folder, 0, 1, 2, 3, 4, base_every=3)
        run.tag("best", 2)
        assert reasons(run, crf.Keep(last=1, every=100)) == {
            1: ("first from step 0 on", "needed by 2"),
            2: ("tag best",),
            3: (),
            4: ("needed by 5",),
            5: ("the latest", "last 1"),
        }

    @pytest.mark.parametrize(
        "rules",
        [
            *({}, {"last": 0}, {"last": True}, {"last": 1.5}, {"every": -1}),
            *({"newer_than": age} for age in (-1, "7d", float("nan"), -DAY, True)),
        ],
        ids=repr,
    )
    def test_rules_that_make_no_sense(self, rules: dict[str, Any]) -> None:
        with pytest.raises(InvalidInputError, match=next(iter(rules), "keep what")):
            crf.Keep(**rules)

    def test_numbers_of_numpy(self, folder: Path) -> None:
        run = make(folder, 10, 20, 30, 40)
        rules: list[dict[str, Any]] = [{"last": np.int32(2)}, {"every": np.uint8(30)}, {"newer_than": np.float32(1e9)}]
        for keep in rules:
            assert reasons(run, crf.Keep(**keep)) == reasons(run, crf.Keep(**{k: int(v) for k, v in keep.items()}))

    def test_an_empty_run(self, folder: Path) -> None:
        plan = make(folder).plan_prune(LAST)
        assert (plan.checkpoints, plan.leftovers, plan.unknown, plan.bytes) == ((), (), (), 0)


class TestWhatASaveMayNeed:
    """PRU-2: for each number at which a commit may stand or come to stand, the one below it and its chain."""

    def test_a_gap(self, folder: Path) -> None:
        """A writer whose head is 2 may still commit 3."""
        run = make(folder, 0, 1, base_every=2)
        (folder / "00000005").mkdir()
        (folder / "00000005/zarr.json").touch()
        with pytest.warns(crf.BurntNumberWarning):
            zombie = crf.open_run(folder, "a", durable=False)
        with pytest.warns(crf.BurntNumberWarning):
            zombie.restore()
        zombie._saver.ledger.head = 2
        with pytest.warns(crf.BurntNumberWarning):
            other = crf.open_run(folder, "a", durable=False)
        for _ in range(2):
            other.save(state(7), step=7, parent=None)
        run = crf.open_run(folder, "a", durable=False)
        plan = run.plan_prune(LAST)
        assert {d.sequence: d.reasons for d in plan.checkpoints} == {
            1: ("needed by 2",),
            2: ("a save may be going on at 3",),
            6: (),
            7: ("the latest", "last 1"),
        }
        run.prune(plan)
        assert zombie.save(state(9), step=9, parent="latest").parent == 2
        assert np.array_equal(crf.open_run(folder)[3].load().tables["t"]["weight"][1], [9, 9])
        assert {problem.kind for problem in crf.open_run(folder).verify()} == {"burnt"}

    @pytest.mark.parametrize("data", [b"", b"{", b'{"zarr_format":3,"node_type":"group"}'], ids=repr)
    def test_a_number_that_is_no_commit(self, folder: Path, data: bytes) -> None:
        make(folder, *range(6), base_every=2)
        key = folder / "00000003/zarr.json"
        key.write_bytes(data)
        before = keys(folder / "00000003")
        run = crf.open_run(folder, "a", durable=False)
        plan = run.plan_prune(LAST)
        assert (plan.stays, plan.goes) == ([1, 2, 5, 6], [4])
        assert "3 " in plan.checkpoints[1].reasons[0]
        run.prune(plan)
        assert keys(folder / "00000003") == before
        assert key.read_bytes() == data
        with pytest.raises(crf.PrunedError):
            run[4]

    def test_a_commit_of_another_version(self, folder: Path) -> None:
        make(folder, *range(6), base_every=2)
        key = folder / "00000004/zarr.json"
        key.write_bytes(key.read_bytes().replace(b'"format_version":"0.9"', b'"format_version":"1.0"'))
        plan = crf.open_run(folder).plan_prune(LAST)
        assert (plan.stays, plan.goes) == ([3, 5, 6], [1, 2])
        assert plan.checkpoints[2].reasons == ("4 cannot be read (unsupported_version)",)


class TestPlans:
    def test_a_plan_says_what_is_freed(self, folder: Path) -> None:
        run = make(folder, 0, 1, 2)
        plan = run.plan_prune(LAST)
        sizes = {
            n: sum(p.stat().st_size for p in (folder / attempt_of(folder, n)).rglob("*") if p.is_file()) for n in (1, 2)
        }
        assert {d.sequence: d.bytes for d in plan.checkpoints if d.goes} == sizes
        assert (plan.bytes, plan.url) == (sum(sizes.values()), str(folder))
        run.prune(plan)
        assert {key for key in keys(folder) if not key.startswith("00000003")} == {
            "zarr.json",
            "00000001/zarr.json",
            "00000002/zarr.json",
        }
        marker = json.loads((folder / "00000001/zarr.json").read_bytes())["attributes"]["checkrun"]
        assert marker == {"kind": "pruned", "format_version": "0.9", "sequence": 1}

    def test_a_plan_may_be_carried_out_twice_and_late(self, folder: Path) -> None:
        run = make(folder, *range(4), base_every=2)
        plan = run.plan_prune(LAST)
        for value in (5, 6):
            run.save(state(value), step=value)
        run.prune(plan)
        run.prune(plan)
        assert [c.sequence for c in run.log()] == [3, 4, 5, 6]
        assert run.verify() == []

    def test_a_commit_that_needs_what_goes(self, folder: Path) -> None:
        """No writer of this format lays it so (COM-6); another might."""
        run = make(folder, 0, 1, 2)
        plan = run.plan_prune(LAST)
        document = json.loads((folder / "00000003/zarr.json").read_bytes())
        document["attributes"]["checkrun"] |= {"sequence": 4, "parent": 2, "predecessor": 3}
        (folder / "00000004").mkdir()
        (folder / "00000004/zarr.json").write_text(json.dumps(document))
        with pytest.raises(InvalidInputError, match="checkpoint 4, committed since this plan was made, needs 2"):
            run.prune(plan)
        assert run.plan_prune(LAST).stays == [2, 4]
        shutil.rmtree(folder / "00000004")
        assert [c.sequence for c in run.log()] == [1, 2, 3]

    def test_a_tag_set_since(self, folder: Path) -> None:
        """TAG-2."""
        run = make(folder, 0, 1, 2)
        plan = run.plan_prune(LAST)
        run.tag("best", 2)
        with pytest.raises(InvalidInputError, match="checkpoint 2 was tagged 'best' since this plan was made"):
            run.prune(plan)
        assert [c.sequence for c in run.log()] == [1, 2, 3]

    def test_refused(self, folder: Path, tmp_path: Path) -> None:
        run = make(folder, 0, 1)
        plan = run.plan_prune(LAST)
        with pytest.raises(InvalidInputError, match="open for reading"):
            crf.open_run(folder).prune(plan)
        with pytest.raises(InvalidInputError, match="this plan is of"):
            make(tmp_path / "other", 0).prune(plan)
        with pytest.raises(InvalidInputError, match="a dict where a plan"):
            run.prune({})  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match=r"give a checkrun_format\.Keep"):
            run.plan_prune()
        for keep, mode in ((LAST, "r"), ({"last": 1}, "a")):
            with pytest.raises(InvalidInputError, match="keep="):
                crf.open_run(folder, mode, keep=keep)  # type: ignore[arg-type]
        assert [c.sequence for c in run.log()] == [1, 2]

    def test_the_rules_of_the_run(self, folder: Path) -> None:
        make(folder, 0, 1)
        run = crf.open_run(folder, "a", keep=LAST)
        assert run.plan_prune().goes == [1]
        assert run.plan_prune(crf.Keep(last=2)).goes == []


class TestLeftovers:
    """PRU-3: what belongs to no checkpoint."""

    @staticmethod
    def put(folder: Path, place: str, name: str = "x/y", *, age: float = 0) -> str:
        path = folder / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
        os.utime(path, (time.time() - age, time.time() - age))
        return place

    def told(self, plan: crf.Plan) -> dict[str, tuple[bool, str]]:
        return {leftover.place: (leftover.goes, leftover.reason) for leftover in plan.leftovers}

    def test_attempts_that_lost_and_what_a_prune_left(self, folder: Path) -> None:
        run = make(folder, 0, 1, 2)
        kept, attempts = keys(folder / "00000003"), [attempt_of(folder, number) for number in (1, 3)]
        run.prune(run.plan_prune(LAST))
        left = self.put(folder, attempts[0])
        lost = self.put(folder, f"00000003/{'ab' * 16}")
        temporary = ".0123456789abcdef.tmp"
        self.put(folder, "00000002", temporary)
        problems = {problem.place for problem in run.verify()}
        assert problems == {f"{left}/x/y", f"{lost}/x/y", f"00000002/{temporary}"}
        plan = run.plan_prune(LAST)
        assert self.told(plan) == {
            left: (True, "left over from pruning 1"),
            f"00000002/{temporary}": (True, "left over from pruning 2"),
            lost: (True, f"lost number 3 to attempt {attempts[1].partition('/')[2]}"),
        }
        assert plan.bytes == 15 and {(leftover.objects, leftover.bytes) for leftover in plan.leftovers} == {(1, 5)}
        run.prune(plan)
        assert run.verify() == []
        assert keys(folder / "00000003") == kept

    def test_an_attempt_whose_save_may_be_going_on(self, folder: Path) -> None:
        """Above the head, in a gap, under a burnt number: only on request, and only if it is old."""
        run = make(folder, 0)
        (folder / "00000003").mkdir()
        (folder / "00000003/zarr.json").touch()
        places = [f"{number:08d}/{'cd' * 8}" for number in (2, 3, 4)]
        for place in places:
            self.put(folder, place, age=7200)
            self.put(folder, place, "new", age=3600)
        for abandoned, goes in ((None, False), (3700, False), (dt.timedelta(seconds=3500), True)):
            plan = run.plan_prune(LAST, abandoned=abandoned)
            assert [(left.place, left.goes) for left in plan.leftovers] == [(place, goes) for place in places]
            assert ("may be going on" in plan.leftovers[0].reason) is not goes
        assert plan.leftovers[0].reason.startswith("abandoned, last written at 20")
        run.prune(plan)
        assert not (folder / "00000002").exists()
        assert keys(folder / "00000003") == {"zarr.json"}
        assert not (folder / "00000004").exists()

    def test_an_abandoned_attempt_that_commits_after_all_stays(self, folder: Path) -> None:
        run = make(folder, 0)
        save = run.begin(step=1, writers=1, parent=None)
        writer = save.writer(0)
        writer.put("t", {"weight": np.ones((4, 2), np.float32)}, rows=(0, 4), of=4)
        part_list = writer.finish()
        plan = run.plan_prune(LAST, abandoned=0)
        assert [left.goes for left in plan.leftovers] == [True]
        save.commit([part_list])
        run.prune(plan)
        assert run.verify() == []
        assert np.array_equal(run[2].load().tables["t"]["weight"], np.ones((4, 2)))

    def test_what_is_not_known_stays_and_is_named(self, folder: Path) -> None:
        run = make(folder, 0, 1)
        attempt = attempt_of(folder, 1)
        strangers = ["00000001/notes.txt", "00000001/ABCDEF0123456789ab/z", "00000002/dir/zarr.json"]
        strangers += [f"00000001/{'ab' * 8}", "00000003/.0123456789abcdef.tmp"]
        for key in strangers:
            self.put(folder, key.rpartition("/")[0], key.rpartition("/")[2])
        for name in ("notes", ".probe", "tags"):
            self.put(folder, name, "x")
        before = keys(folder)
        plan = run.plan_prune(LAST, abandoned=0)
        assert set(plan.unknown) == {*strangers, "notes"}
        assert plan.leftovers == ()
        run.prune(plan)
        assert before - keys(folder) == {key for key in before if key.startswith(f"{attempt}/")}
        assert {problem.kind for problem in run.verify()} == {"litter"}
        assert "tags/x" in {problem.place for problem in run.verify()}


class TestTags:
    def test_names_move_and_go(self, folder: Path) -> None:
        """TAG-1."""
        run = make(folder, 0, 1)
        run.tag("best", 1)
        run.tag("a.b-c_1", run[2])
        assert run.tags() == {"a.b-c_1": 2, "best": 1}
        assert json.loads((folder / "tags/best.json").read_bytes()) == {
            "kind": "tag",
            "format_version": "0.9",
            "name": "best",
            "sequence": 1,
        }
        run.tag("best", 2)
        run.untag("a.b-c_1")
        assert crf.open_run(folder).tags() == {"best": 2}
        assert run.verify() == []

    @pytest.mark.parametrize("name", ["", "7", "007", "Best", "-x", "a/b", "a b", "é", "a" * 65, ".x", "a\n", None, 7])
    def test_names_that_are_none(self, folder: Path, name: Any) -> None:
        run = make(folder, 0)
        with pytest.raises(InvalidInputError, match="tag name"):
            run.tag(name, 1)
        with pytest.raises(InvalidInputError, match="tag name"):
            run.untag(name)
        assert run.tags() == {}

    def test_refused(self, folder: Path) -> None:
        """TAG-2: a tag is of a checkpoint whose chain is whole."""
        run = make(folder, *range(4), base_every=2)
        run.prune(run.plan_prune(LAST))
        (folder / "00000005").mkdir()
        (folder / "00000005/zarr.json").touch()
        for number, kind in ((2, "pruned"), (5, "burnt"), (9, "checkpoint_not_found"), ("4", "invalid_input")):
            with pytest.raises(crf.CheckrunError) as caught:
                run.tag("best", number)  # type: ignore[arg-type]
            assert caught.value.kind == kind
        with pytest.raises(crf.NotFoundError, match="no tag 'best'"):
            run.untag("best")
        with pytest.raises(InvalidInputError, match="open for reading"):
            crf.open_run(folder).tag("best", 4)
        with pytest.raises(InvalidInputError, match="open for reading"):
            crf.open_run(folder).untag("best")
        (folder / "00000003/zarr.json").unlink()
        (folder / "00000005/zarr.json").unlink()
        with pytest.raises(crf.DamagedError):
            crf.open_run(folder, "a").tag("best", 4)
        assert not (folder / "tags").exists() and run.tags() == {}

    def test_the_older_tag_stays_if_the_new_checkpoint_is_pruned_meanwhile(self, folder: Path) -> None:
        """TAG-2: the commits are read again after the tag was put."""
        run = make(folder, 0, 1, 2)
        run.tag("best", 3)
        other = crf.open_run(folder, "a", durable=False)
        assert other[1].sequence == 1
        run.prune(run.plan_prune(LAST))
        for name in ("best", "other"):
            with pytest.raises(crf.PrunedError, match="checkpoint 1 was pruned"):
                other.tag(name, 1)
        assert run.tags() == {"best": 3}

    def test_a_tag_of_what_is_no_checkpoint_is_a_problem(self, folder: Path) -> None:
        """TAG-2: never another checkpoint; TAG-1: other names are ignored."""
        run = make(folder, 0, 1)
        for number, name in enumerate(("pruned", "fine", "missing"), 1):
            run.tag("fine", 2)
            text = (folder / "tags/fine.json").read_text().replace("fine", name).replace(":2}", f":{number}}}")
            (folder / f"tags/{name}.json").write_text(text)
        (folder / "tags/pruned.json").rename(folder / "tags/.hidden.json")
        run.prune(run.plan_prune(LAST))
        (folder / "tags/.hidden.json").rename(folder / "tags/pruned.json")
        (folder / "tags/7.json").write_text("{}")
        (folder / "tags/broken.json").write_text('{"kind": "tag"')
        (folder / "tags/twin.json").write_text((folder / "tags/fine.json").read_text())
        assert [(problem.kind, problem.place) for problem in run.verify()] == [
            ("litter", "tags/7.json"),
            ("damaged", "tags/broken.json"),
            ("checkpoint_not_found", "tags/missing.json"),
            ("pruned", "tags/pruned.json"),
            ("damaged", "tags/twin.json"),
        ]
        for call in (run.tags, lambda: run.plan_prune(LAST)):
            with pytest.raises(crf.DamagedError) as caught:
                call()
            assert caught.value.place in {"tags/broken.json", "tags/twin.json"}
        for name in ("broken", "twin"):
            run.untag(name)
        assert run.tags() == {"fine": 2, "missing": 3, "pruned": 1}
        assert run.plan_prune(LAST).goes == []


def test_a_run_that_was_pruned_knows_it(folder: Path) -> None:
    """PRU-1: also what it had read before."""
    run = make(folder, *range(4), base_every=2)
    assert run[1].extra == 0
    run.prune(run.plan_prune(LAST))
    with pytest.raises(crf.PrunedError):
        run[1]
    with pytest.raises(crf.HistoryPrunedError):
        list(run.latest().changes_since(1))
    assert [c.sequence for c in run.log()] == [3, 4]
