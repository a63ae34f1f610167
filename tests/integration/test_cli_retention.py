"""`checkrun prune, tag, diff, compact, rollback`: what they print and what they do."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from tests.integration.test_cli import ODD, Output, Trainer, checkrun


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 base; 2, 3 increments over it in a row; 4 compacted; 5 an increment over 4."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    trainer = Trainer(folder)
    trainer.save(100)
    trainer.save(200, 3, 4, keys=(8,), dropped=["gone"])
    trainer.save(300, 5, 20)
    trainer.run.compact()
    trainer.save(400, 5, 39)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def sizes(run: Path) -> dict[int, int]:
    return {checkpoint.sequence: checkpoint.stored_bytes for checkpoint in crf.open_run(run).log()}


def numbers(run: Path) -> list[int]:
    return [checkpoint.sequence for checkpoint in crf.open_run(run).log()]


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


class TestPrune:
    def test_a_dry_run_changes_nothing(self, run: Path) -> None:
        before, size = files(run), sizes(run)
        freed = size[1] + size[2] + size[3]
        made = checkrun("prune", run, "--keep-last", 1)
        assert made.rows == [
            ["number", "kind", "step", "bytes", "fate", "why"],
            ["1", "base", "100", f"{size[1]:,}", "goes", "no rule keeps it"],
            ["2", "increment", "200", f"{size[2]:,}", "goes", "no rule keeps it"],
            ["3", "increment", "300", f"{size[3]:,}", "goes", "no rule keeps it"],
            ["4", "base", "300", f"{size[4]:,}", "stays", "needed by 5"],
            ["5", "increment", "400", f"{size[5]:,}", "stays", "the latest, last 1"],
            [""],
            [f"Would remove 3 checkpoints: {freed:,} bytes. Stays: 2."],
            ["Nothing was removed; --yes does it."],
        ]
        assert files(run) == before

    def test_yes_does_it(self, run: Path) -> None:
        crf.open_run(run, "a").tag("best", 2)
        size = sizes(run)
        made = checkrun("prune", run, "--keep-last", 1, "--yes")
        assert made.rows[1:4] == [
            ["1", "base", "100", f"{size[1]:,}", "stays", "needed by 2"],
            ["2", "increment", "200", f"{size[2]:,}", "stays", "tag best"],
            ["3", "increment", "300", f"{size[3]:,}", "removed", "no rule keeps it"],
        ]
        assert made.rows[-1] == [f"Removed 1 checkpoint: {size[3]:,} bytes. Stays: 4."]
        assert numbers(run) == [1, 2, 4, 5]
        assert "was pruned" in checkrun("info", f"{run}@3", code=3).errors[0]
        assert checkrun("prune", run, "--keep-last", 1).rows[-1] == ["Would remove 0 checkpoints: 0 bytes. Stays: 4."]
        assert checkrun("verify", run).stdout == "5 numbers checked: no problem.\n"

    def test_json(self, run: Path) -> None:
        size, log = sizes(run), {c.sequence: c.commit for c in crf.open_run(run).log()}
        lost = run / "00000001" / ("ab" * 8) / "x"
        lost.parent.mkdir()
        lost.write_bytes(b"1234567")
        (run / "00000002/note").touch()
        made = checkrun("prune", run, "--keep-every", 200, "--keep-newer-than", "0s", "--json", "--yes").document
        reasons = {1: ["first from step 0 on", "needed by 2"], 2: ["first from step 200 on"], 3: []}
        reasons |= {4: ["needed by 5"], 5: ["the latest", "first from step 400 on"]}
        assert made == {
            "run": str(run),
            "done": True,
            "bytes": size[3] + 7,
            "checkpoints": [
                {
                    "sequence": number,
                    "kind": "base" if number in (1, 4) else "increment",
                    "step": log[number].step,
                    "created": log[number].created,
                    "bytes": size[number],
                    "goes": not reasons[number],
                    "reasons": reasons[number],
                }
                for number in reasons
            ],
            "leftovers": [
                {
                    "place": f"00000001/{'ab' * 8}",
                    "objects": 1,
                    "bytes": 7,
                    "goes": True,
                    "reason": f"lost number 1 to attempt {log[1].attempt}",
                }
            ],
            "unknown": ["00000002/note"],
        }
        assert not lost.parent.exists() and (run / "00000002/note").exists()
        assert numbers(run) == [1, 2, 4, 5]

    def test_abandoned(self, run: Path) -> None:
        attempt = f"00000006/{'cd' * 8}"
        path = run / attempt / "zarr.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"{}")
        os.utime(path, (time.time() - 7200, time.time() - 7200))
        keep = ("prune", run, "--keep-last", 9, "--yes")
        assert f"{attempt}: stays, 1 object of 2 bytes: its save may be going on" in checkrun(*keep).stdout
        checkrun(*keep, "--abandoned", "--older-than", "3h")
        assert path.exists()
        made = checkrun(*keep, "--abandoned", "--older-than", "1h")
        assert f"{attempt}: removed, 1 object of 2 bytes: abandoned" in made.stdout
        assert made.rows[-1] == ["Removed 0 checkpoints and 1 leftover: 2 bytes. Stays: 5."]
        assert not path.parent.parent.exists() and numbers(run) == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ([], "give --keep-last, --keep-every or --keep-newer-than"),
            (["--keep-last", "0"], "0 is not in the range"),
            (["--keep-newer-than", "7"], "'7' is no age, such as 7d"),
            (["--keep-newer-than", "-7d"], "'-7d' is no age"),
            (["--keep-last", "1", "--abandoned"], "--abandoned and --older-than together"),
            (["--keep-last", "1", "--older-than", "1d"], "--abandoned and --older-than together"),
        ],
    )
    def test_refused(self, whole: Path, options: list[str], told: str) -> None:
        assert told in checkrun("prune", whole, *options, "--yes", code=2).stderr
        assert numbers(whole) == [1, 2, 3, 4, 5]

    def test_what_is_no_run(self, tmp_path: Path) -> None:
        for command in ("prune", "compact", "tag"):
            options = ("--keep-last", 1, "--yes") if command == "prune" else ()
            assert "does not exist" in checkrun(command, tmp_path / "nothing", *options, code=3).errors[0]
        assert list(tmp_path.iterdir()) == []


class TestTag:
    def test_set_list_move_delete(self, run: Path) -> None:
        assert checkrun("tag", run).stdout == "No tags.\n"
        assert checkrun("tag", run, "best", 2).stdout == "Checkpoint 2 is 'best'.\n"
        assert checkrun("tag", run, "copy", "best").stdout == "Checkpoint 2 is 'copy'.\n"
        checkrun("tag", run, "best", 5)
        assert checkrun("tag", run).rows == [
            ["tag", "number", "kind", "step"],
            ["best", "5", "increment", "400"],
            ["copy", "2", "increment", "200"],
        ]
        assert checkrun("tag", run, "--delete", "copy").stdout == "No checkpoint is 'copy' any more.\n"
        assert checkrun("tag", run, "--json").document == {
            "run": str(run),
            "tags": [{"name": "best", "sequence": 5, "kind": "increment", "step": 400}],
            "problems": [],
        }

    def test_a_tag_names_a_checkpoint_wherever_a_number_does(self, run: Path) -> None:
        checkrun("tag", run, "best", 2)
        for command in (["info"], ["cat", "user", "--ids", "3"], ["verify"]):
            name, rest = command[0], command[1:]
            by_tag = checkrun(name, f"{run}@best", *rest).stdout
            assert by_tag == checkrun(name, f"{run}@2", *rest).stdout
        made = checkrun("info", f"{run}@worst", code=3)
        assert made.errors == ["there is no tag 'worst'; the run has best"]
        assert "names a checkpoint" in checkrun("ls", f"{run}@best", code=2).errors[0]

    def test_refused(self, run: Path) -> None:
        assert "no checkpoint 99" in checkrun("tag", run, "best", 99, code=3).errors[0]
        assert "no tag 'x'" in checkrun("tag", run, "best", "x", code=3).errors[0]
        assert "tag name '7'" in checkrun("tag", run, "7", 1, code=2).errors[0]
        assert "neither the number of a checkpoint nor a tag" in checkrun("tag", run, "best", "X Y", code=2).stderr
        assert "no tag 'best'" in checkrun("tag", run, "--delete", "best", code=3).errors[0]
        for arguments in (["best"], ["best", 1, "--delete", "best"]):
            assert "give NAME and SEQ" in checkrun("tag", run, *arguments, code=2).stderr
        checkrun("prune", run, "--keep-last", 1, "--yes")
        assert checkrun("tag", run, "best", 2, code=3).errors == ["checkpoint 2 was pruned"]
        assert not (run / "tags").exists()

    def test_damage_is_told(self, run: Path) -> None:
        checkrun("tag", run, "best", 2)
        (run / "tags/fine.json").write_text((run / "tags/best.json").read_text().replace("best", "fine"))
        (run / "tags/best.json").write_text("{")
        (run / "tags/gone.json").write_text(
            (run / "tags/fine.json").read_text().replace("fine", "gone").replace("2", "9")
        )
        made = checkrun("tag", run, code=1)
        assert made.rows[1:] == [["fine", "2", "increment", "200"], ["gone", "9", "missing", "-"]]
        assert [error.partition(":")[0] for error in made.errors] == ["tags/best.json", "tags/gone.json"]
        assert "tags/best.json" in checkrun("prune", run, "--keep-last", 1, code=1).errors[0]
        text = checkrun("verify", run, code=1).stdout.splitlines()
        assert text[1].startswith("tags/gone.json: checkpoint_not_found: ") and len(text) == 3


class TestDiff:
    def test_what_differs(self, run: Path) -> None:
        states = [crf.open_run(run)[number].load().tables["user"] for number in (1, 3)]
        gap = np.abs(states[0]["weight"].astype(float) - states[1]["weight"]).max()
        made = checkrun("diff", run, 1, 3)
        assert [row for row in made.rows if row != [""]] == [
            [
                "table",
                *("rows in A", "rows in B", "only in A", "only in B", "rows differ"),
                "field",
                "rows differ",
                "largest difference",
            ],
            ["user", "40", "40", "0", "0", "4", "weight", "4", f"{gap:.6g}"],
            ["sum", "0", "0"],
            [repr(ODD), "4", "4", "0", "0", "0", "v", "0", "0"],
            ["gone", "3", "-", "3", "0", "0", "-", "-", "-"],
            ["tensor", "differ", "largest difference"],
            ["mlp.0", "0", "0"],
            ["temperature", "0", "0"],
            ["blob 'rng\\t': equal"],
            ["extra: differs in batch"],
            ["A and B differ."],
        ]

    def test_json(self, run: Path) -> None:
        made = checkrun("diff", run, 3, 5, "--table", "user", "--json").document
        (user,) = made.pop("tables")
        assert made == {
            "run": str(run),
            "a": 3,
            "b": 5,
            "equal": False,
            "tensors": [],
            "extra": {"equal": True, "keys": []},
            "blobs": [],
            "problems": [],
        }
        weight, sums = user.pop("fields")
        assert user == {
            "table": "user",
            "equal": False,
            "rows_a": 40,
            "rows_b": 40,
            "only_a": 0,
            "only_b": 0,
            "differ": 2,
            "other_fields": [],
        }
        assert (weight["field"], weight["differ"], sums) == (
            "weight",
            2,
            {"field": "sum", "differ": 0, "max_difference": 0},
        )
        assert 0.8 < weight["max_difference"] < 1.2

    def test_equal_states(self, run: Path) -> None:
        checkrun("tag", run, "best", 3)
        made = checkrun("diff", run, "best", 4)
        assert made.stdout.endswith("extra: equal\nA and B are equal.\n")
        document = checkrun("diff", run, 4, "best", "--json").document
        assert document["equal"] and (document["a"], document["b"]) == (4, 3)
        assert all(table["equal"] for table in document["tables"])

    def test_damage_is_told_and_the_rest_is_compared(self, run: Path) -> None:
        for path in (run / "00000005").glob("*/block-*/weight.codes/c/**/0"):
            if path.is_file():
                path.write_bytes(b"x")
        made = checkrun("diff", run, 4, 5, "--json", code=1)
        assert [table["table"] for table in made.document["tables"]] == [ODD]
        assert made.document["problems"][0]["kind"] == "damaged" and not made.document["equal"]
        assert "weight.codes" in made.errors[0]
        assert checkrun("diff", run, 4, 5, code=1).stdout.splitlines()[-1] == "What is damaged was not compared."

    def test_not_found(self, run: Path) -> None:
        assert "no checkpoint 99" in checkrun("diff", run, 1, 99, code=3).errors[0]
        assert "no tag 'x'" in checkrun("diff", run, "x", 1, code=3).errors[0]
        assert "neither checkpoint has a table 'x'" in checkrun("diff", run, 1, 2, "--table", "x", code=3).errors[0]


def told(made: Output, run: Path) -> dict[str, Any]:
    """The document of a commit, but for what chance decides."""
    document: dict[str, Any] = made.document
    assert document.pop("run") == str(run)
    assert document.pop("created").endswith("Z") and len(document.pop("attempt")) == 32
    return document


class TestSuccessors:
    def test_compact(self, run: Path) -> None:
        size = sizes(run)
        made = checkrun("compact", run, "--json")
        assert told(made, run) == {
            "sequence": 6,
            "kind": "base",
            "step": 400,
            "parent": None,
            "predecessor": 5,
            "rollback_to": None,
            "restores": 0,
            "bytes": sizes(run)[6],
            "policy": {"name": "compact", "reason": "checkpoint 5 as one base"},
            "from": 5,
            "layers": 2,
            "chain_bytes": size[4] + size[5],
        }
        size = sizes(run)
        (line,) = checkrun("compact", run).stdout.splitlines()
        source = f"with the state of checkpoint 6 (1 layer, {size[6]:,} bytes)"
        assert line == f"Checkpoint 7: a base of {sizes(run)[7]:,} bytes, {source}."
        assert checkrun("diff", run, 5, 7, "--json").document["equal"]

    def test_rollback(self, run: Path) -> None:
        size = sizes(run)
        checkrun("tag", run, "best", 4)
        (line,) = checkrun("rollback", run, "best").stdout.splitlines()
        source = f"with the state of checkpoint 4 (1 layer, {size[4]:,} bytes)"
        assert line == f"Checkpoint 6: over 4 of {sizes(run)[6]:,} bytes, {source}."
        document = told(checkrun("rollback", run, 2, "--json"), run)
        assert (document["sequence"], document["rollback_to"], document["from"]) == (7, 2, 2)
        assert (document["kind"], document["layers"], document["chain_bytes"]) == ("base", 2, size[1] + size[2])
        assert checkrun("diff", run, 2, 7, "--json").document["equal"]
        assert crf.open_run(run, "a").restore().extra["batch"] == 200

    def test_refused(self, run: Path, tmp_path: Path) -> None:
        assert "no checkpoint 99" in checkrun("rollback", run, 99, code=3).errors[0]
        assert "no tag 'x'" in checkrun("rollback", run, "x", code=3).errors[0]
        crf.open_run(tmp_path / "empty", "a")
        assert "nothing to commit again" in checkrun("compact", tmp_path / "empty", code=2).errors[0]
        assert numbers(run) == [1, 2, 3, 4, 5]

    def test_a_trainer_that_has_the_run_open_is_told(self, run: Path) -> None:
        trainer = crf.open_run(run, "a")
        state = trainer.restore()
        checkrun("rollback", run, 1)
        with pytest.raises(crf.ConcurrentCommitError):
            trainer.save(crf.State(extra=state.extra), dropped=["user", ODD])
