"""`checkrun ls, info, tree, cat, changes, verify` on runs that are whole, damaged, long and oddly named."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import checkrun_format as crf
from checkrun_format import layout
from checkrun_format.cli import main
from checkrun_format.stores import LocalStore
from checkrun_format.versions import FORMAT_VERSION

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "COLUMNS": "40"}
PROGRAM = [sys.executable, "-m", "checkrun_format.cli"]
COMMANDS = (
    *("cat", "changes", "compact", "copy", "demo", "diff", "export", "import", "info"),
    *("ls", "prune", "quantize-report", "rollback", "tag", "tree", "verify"),
)
ODD = "ads\n\x1b[31m🚀 / 表"
GONE = "gone"


class Output:
    """What a command printed."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr
        assert stdout.replace("\n", "").isprintable() and stderr.replace("\n", "").isprintable()
        assert "Traceback" not in stderr

    @property
    def document(self) -> Any:
        return json.loads(self.stdout, parse_constant=_refuse)

    @property
    def objects(self) -> list[Any]:
        return [json.loads(line, parse_constant=_refuse) for line in self.stdout.splitlines()]

    @property
    def rows(self) -> list[list[str]]:
        """Cells of each line, which stand at least two spaces apart."""
        return [re.split(r" {2,}", line.strip()) for line in self.stdout.splitlines()]

    @property
    def errors(self) -> list[str]:
        lines = self.stderr.splitlines()
        assert all(line.startswith("checkrun: ") for line in lines), lines
        return [line.removeprefix("checkrun: ") for line in lines]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def checkrun(*arguments: object, code: int = 0) -> Output:
    """Run a command in this process."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="checkrun")
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    return Output(result.exit_code, result.stdout, result.stderr)


class Trainer:
    """Two tables and what else a trainer saves; every value is known."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(7)
        options: dict[str, Any] = {"bits": {"user": 4}, "policy": "consecutive", "chunk_bytes": 512}
        self.run = crf.open_run(folder, mode="a", durable=False, **options)
        self.weight = rng.normal(size=(40, 6)).astype(np.float32)
        self.sum = np.arange(40, dtype=np.float64)
        self.keys = np.array([-3, 0, 8, 2**62])
        self.vectors = rng.normal(size=(4, 2)).astype(ml_dtypes.bfloat16)

    def save(self, step: int, *rows: int, keys: Sequence[int] = (), deleted: Sequence[int] = (), **more: Any) -> int:
        first = step == 100
        self.weight[list(rows)] += 1
        changed = None if first else list(keys)
        user = crf.Table({"weight": self.weight, "sum": self.sum}, changed=None if first else list(rows))
        odd = crf.Table({"v": self.vectors}, keys=self.keys, changed=changed, deleted=list(deleted))
        tables = {"user": user, ODD: odd}
        if first:
            tables[GONE] = crf.Table({"x": np.ones(3, np.int8)})
        state = crf.State(
            tables=tables,
            tensors={"mlp.0": np.ones((2, 3), np.float32), "temperature": np.array(0.5)},
            extra={"batch": step, "loss": [0.5]},
            blobs={"rng\t": b"12345"},
        )
        return self.run.save(state, step=step, **more).sequence


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 base; 2, 3, 4 increments; 5 back to 2; 6 an increment; 7 compacted; 8 an increment."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    trainer = Trainer(folder)
    trainer.save(100)
    trainer.sum[3], trainer.sum[4] = np.nan, -np.inf
    trainer.save(200, 3, 4, keys=(8,), dropped=[GONE])
    trainer.save(300, 5, 20)
    trainer.keys, trainer.vectors = trainer.keys[1:], trainer.vectors[1:]
    trainer.save(400, 5, 39, deleted=(-3,))
    trainer.run.rollback(2)
    state = trainer.run.restore()
    trainer.weight, trainer.sum = (np.asarray(state.tables["user"].fields[name]) for name in ("weight", "sum"))
    trainer.keys = np.asarray(state.tables[ODD].keys)
    trainer.vectors = np.asarray(state.tables[ODD].fields["v"])
    trainer.save(301, 9)
    trainer.run.compact()
    trainer.save(401, 10)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The same run, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def commit_path(run: Path, sequence: int) -> Path:
    return run / f"{sequence:08d}" / "zarr.json"


def put_commit(run: Path, sequence: int, **changed: Any) -> None:
    """A commit like that of checkpoint 1, whose other objects are not there."""
    document = json.loads(commit_path(run, 1).read_text())
    document["attributes"]["checkrun"] |= {"sequence": sequence, **changed}
    commit_path(run, sequence).parent.mkdir(exist_ok=True)
    commit_path(run, sequence).write_text(json.dumps(document))


def prune(run: Path, sequence: int) -> None:
    """Prune as PRU-1 says."""
    marker = {"kind": "pruned", "format_version": FORMAT_VERSION, "sequence": sequence}
    commit_path(run, sequence).write_bytes(layout.group_document(marker))
    for attempt in commit_path(run, sequence).parent.iterdir():
        if attempt.is_dir():
            shutil.rmtree(attempt)


def chunk_of(run: Path, sequence: int, array: str) -> Path:
    (found,) = (path for path in (run / f"{sequence:08d}").glob(f"*/block-*/{array}/c/**/0") if path.is_file())
    return found


def error_bound(run: Path, sequence: int) -> float:
    """That of the first field of the first table, as the manifest has it."""
    (manifest,) = commit_path(run, sequence).parent.glob("*/manifest.json")
    bound: float = json.loads(manifest.read_text())["tables"][0]["fields"][0]["encoder"]["error_bound"]
    return bound


class TestLs:
    def test_text(self, whole: Path) -> None:
        made = checkrun("ls", whole)
        assert made.stderr == ""
        header, *rows = made.rows
        assert header == ["number", "kind", "step", "parent", "bytes", "created", "restores", "policy and reason"]
        log = list(crf.open_run(whole).log())
        assert [row[:5] for row in rows] == [
            [
                str(c.sequence),
                "base" if c.parent is None else "increment",
                f"{c.step:,}",
                "-" if c.parent is None else str(c.parent),
                f"{c.stored_bytes:,}",
            ]
            for c in log
        ]
        assert [row[6] for row in rows] == ["0", "0", "0", "0", "0", "1", "1", "1"]
        assert rows[4][7] == "rollback: back to checkpoint 2"
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row[5]) for row in rows)

    def test_json(self, whole: Path) -> None:
        made = checkrun("ls", whole, "--json")
        assert made.stderr == ""
        document = made.document
        assert (document["run"], document["problems"], document["unreadable"]) == (str(whole), [], 0)
        for told, checkpoint in zip(document["numbers"], crf.open_run(whole).log(), strict=True):
            commit = checkpoint.commit
            assert told == {
                "sequence": commit.sequence,
                "kind": "base" if commit.parent is None else "increment",
                "step": commit.step,
                "parent": commit.parent,
                "predecessor": commit.predecessor,
                "rollback_to": commit.rollback_to,
                "created": commit.created,
                "restores": commit.restores,
                "attempt": commit.attempt,
                "bytes": checkpoint.stored_bytes,
                "policy": {"name": commit.policy.name, "reason": commit.policy.reason},
                "broken_at": None,
                "problem": None,
            }

    def test_shows_what_is_pruned_burnt_and_damaged_and_the_rest(self, copy: Path) -> None:
        prune(copy, 3)  # 4 lies over it: that is against PRU-2
        commit_path(copy, 7).write_bytes(b"\x00 a flipped\x1b[31m bit")
        commit_path(copy, 9).parent.mkdir()
        commit_path(copy, 9).touch()
        (copy / "00000010" / "0123456789abcdef").mkdir(parents=True)  # an attempt that may be alive: free
        put_commit(copy, 11, format_version="7.0", predecessor=8)
        made = checkrun("ls", copy, "--json", code=1)
        assert {n["sequence"]: (n["kind"], n["broken_at"]) for n in made.document["numbers"]} == {
            1: ("base", None),
            2: ("increment", None),
            3: ("pruned", None),
            4: ("increment", 3),
            5: ("increment", None),
            6: ("increment", None),
            7: ("damaged", None),
            8: ("increment", 7),
            9: ("burnt", None),
            11: ("unsupported_version", None),
        }
        assert made.document["unreadable"] == 4
        problem = next(n["problem"] for n in made.document["numbers"] if n["sequence"] == 7)
        assert (problem["place"], problem["kind"]) == ("00000007/zarr.json", "damaged")
        assert made.errors == ["4 of these numbers cannot be read"]
        text = checkrun("ls", copy, code=1)
        kinds = {row[0]: row[1] for row in text.rows[1:]}
        assert [kinds[n] for n in ("3", "5", "7", "9")] == ["pruned", "increment", "damaged", "burnt"]
        assert text.rows[4][-1].startswith("UNREADABLE, its chain breaks at 3; consecutive: ")

    def test_an_empty_run(self, tmp_path: Path) -> None:
        crf.open_run(tmp_path / "run", mode="a", durable=False)
        assert checkrun("ls", tmp_path / "run").stdout.count("\n") == 1
        assert checkrun("ls", tmp_path / "run", "--json").document["numbers"] == []

    def test_a_long_run_is_quick_and_needs_its_commits_only(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for number in range(9, 1001):
            put_commit(copy, number, predecessor=number - 1, parent=number - 1 if number % 100 else None)
        read: list[str] = []
        get = LocalStore.get

        def noted(store: LocalStore, key: str) -> bytes | None:
            read.append(key)
            return get(store, key)

        monkeypatch.setattr(LocalStore, "get", noted)
        monkeypatch.setattr(LocalStore, "list", None)
        made = checkrun("ls", copy)
        assert made.rows[-1][0] == "1000" and len(made.rows) == 1001
        assert read == ["zarr.json", *(f"{number:08d}/zarr.json" for number in range(1, 1001))]
        tree = checkrun("tree", copy, "--json").document
        assert [n["layers"] for n in tree["numbers"] if n["sequence"] in (899, 900, 999)] == [100, 1, 100]
        assert {key.rpartition("/")[2] for key in read} == {"zarr.json"}

    @pytest.mark.parametrize("options", [[], ["--json"]])
    def test_a_long_run_takes_no_more_memory(self, copy: Path, options: list[str]) -> None:
        """A few hundred bytes for each number: its name in the listing, and the number."""
        peaks = []
        for last in (10, 100, 300):
            for number in range(9, last + 1):
                put_commit(copy, number, predecessor=number - 1)
            tracemalloc.start()
            with (copy / "out").open("w") as out:
                _print_into(out, "ls", copy, *options)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert peaks[2] - peaks[1] < 200 * 400


def _print_into(out: Any, *arguments: object) -> None:
    before, sys.stdout = sys.stdout, out
    try:
        main([str(argument) for argument in arguments], standalone_mode=False)
    finally:
        sys.stdout = before


class TestTree:
    def test_text(self, whole: Path) -> None:
        made = checkrun("tree", whole)
        sizes = {c.sequence: c.stored_bytes for c in crf.open_run(whole).log()}
        lines = [line for line in made.stdout.splitlines() if re.match(r"[^\w]*\d+ +(base|over)", line)]
        assert [re.split(r" {2,}", line)[:2] for line in lines] == [
            ["■ 1", "base"],
            ["├ 2", "over 1"],
            ["│ ✗ 3", "over 2, abandoned by 5"],
            ["│ ✗ 4", "over 3, abandoned by 5"],
            ["├ 5", "over 2, back to 2"],
            ["├ 6", "over 5"],
            ["■ 7", "base"],
            ["├ 8", "over 7"],
        ]
        six = re.split(r" {2,}", lines[5])
        assert six[3:6] == [f"{sizes[6]:,}", "4", f"{sizes[1] + sizes[2] + sizes[5] + sizes[6]:,}"]
        assert made.stdout.splitlines()[-3:] == [
            f"8 checkpoints, {sum(sizes.values()):,} bytes.",
            f"Abandoned: 2 of them, {sizes[3] + sizes[4]:,} bytes.",
            f"The chain of the latest, 8: 2 layers, {sizes[7] + sizes[8]:,} bytes.",
        ]

    def test_json(self, whole: Path) -> None:
        document = checkrun("tree", whole, "--json").document
        assert (document["latest"], document["unreadable"], document["problems"]) == (8, 0, [])
        told = document["numbers"]
        assert [n["sequence"] for n in told] == list(range(1, 9))
        assert [n["follows"] for n in told] == [None, 1, 2, 3, 2, 5, 6, 7]
        assert [n["abandoned_by"] for n in told] == [None, None, 5, 5, None, None, None, None]
        assert [n["abandoned"] for n in told] == [False, False, True, True, False, False, False, False]
        assert [n["layers"] for n in told] == [1, 2, 3, 4, 3, 4, 1, 2]
        assert told[3]["chain_bytes"] == sum(n["bytes"] for n in told[:4])

    def test_a_damaged_run(self, copy: Path) -> None:
        commit_path(copy, 2).write_bytes(b"{")
        shutil.rmtree(commit_path(copy, 7).parent)
        made = checkrun("tree", copy, code=1)
        marks = [line.split()[:3] for line in made.stdout.splitlines()[1:9]]
        assert marks[1] == ["!", "2", "damaged"] and marks[6] == ["!", "7", "missing"]
        assert made.stdout.count("UNREADABLE, its chain breaks at 2") == 4
        assert made.errors == ["6 of these numbers cannot be read"]

    def test_an_empty_run(self, tmp_path: Path) -> None:
        crf.open_run(tmp_path / "run", mode="a", durable=False)
        assert checkrun("tree", tmp_path / "run").stdout.splitlines()[-1] == "No checkpoint yet."
        document = checkrun("tree", tmp_path / "run", "--json").document
        assert (document["latest"], document["numbers"]) == (None, [])


class TestInfo:
    def test_json(self, whole: Path) -> None:
        document = checkrun("info", f"{whole}@2", "--json").document
        checkpoint = crf.open_run(whole)[2]
        told = document.pop("checkpoint")
        assert document == {"run": str(whole), "format_version": "0.9", "head": 8, "latest": 8, "problems": []}
        tables = {table["name"]: table for table in told.pop("tables")}
        assert told["bytes"] == checkpoint.stored_bytes and told["policy"]["name"] == "consecutive"
        assert (told["sequence"], told["kind"], told["step"], told["parent"]) == (2, "increment", 200, 1)
        assert (told["chain"], told["broken_at"], told["dropped"], told["writers"]) == ([2, 1], None, [GONE], 1)
        assert told["tensors"] == [
            {"name": "mlp.0", "dtype": "float32", "shape": [2, 3]},
            {"name": "temperature", "dtype": "float64", "shape": []},
        ]
        assert told["extra"] == {"bytes": 26, "value": {"batch": 200, "loss": [0.5]}, "in_blob": False}
        assert told["blobs"] == [{"name": "rng\t", "bytes": 5}]
        assert list(tables) == ["user", ODD]
        user, odd = tables["user"], tables[ODD]
        assert (user["addressing"], user["rows"], user["storage"], user["stored_rows"]) == ("dense", 40, "changed", 2)
        weight, sums = user["fields"]
        assert (weight["name"], weight["dtype"], weight["columns"]) == ("weight", "float32", 6)
        assert weight["encodings"] == [{"encoding": "affine", "bits": 4, "dtype": None}]
        bound = error_bound(whole, 2)
        errors = [weight["encoder"].pop(name) for name in ("l2_error", "relative_l2_error")]
        assert 0 < errors[0] < bound * 6**0.5 and 0 < errors[1] < 0.2
        assert weight["encoder"] == {
            "name": "refine",
            "version": 1,
            "bits": 4,
            "exact_rows": 0,
            "qparams": "float16",
            "error_bound": bound,
        }
        assert 0 < bound < 1
        assert sums["encodings"] == [{"encoding": "raw", "bits": None, "dtype": "float64"}]
        assert (odd["addressing"], odd["key_dtype"], odd["rows"], odd["stored_rows"]) == ("keyed", "int64", None, 1)

    def test_text(self, whole: Path) -> None:
        made = checkrun("info", whole)
        facts = {line[:16].strip(): line[16:] for line in made.stdout.split("\ntable ")[0].splitlines() if line}
        assert facts["run"] == str(whole) and facts["format version"] == "0.9"
        assert facts["head"] == "8" and facts["latest"] == "8"
        assert facts["checkpoint"] == "8, an increment over 7" and facts["step"] == "401"
        assert facts["chain"].startswith("8, 7 (2 layers, ") and facts["restores"] == "1"
        assert facts["extra"] == '{"batch": 401, "loss": [0.5]}'
        bound = str(error_bound(whole, 8))
        assert ["user", "40", "changed", "1", "weight", "float32", "6", "4 bits", "refine", "0", bound] in made.rows
        assert ["sum", "float64", "-", "raw float64", "-", "-", "-"] in made.rows
        assert [repr(ODD), "keyed int64", "unchanged", "0", "v", "bfloat16", "2", "-", "-", "-", "-"] in made.rows
        assert ["mlp.0", "float32", "2 x 3"] in made.rows and ["temperature", "float64", "scalar"] in made.rows
        assert ["'rng\\t'", "5"] in made.rows

    def test_large_extra_is_told_by_its_size(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "run", mode="a", durable=False)
        extra = {"a\n": "x" * 1000, "b": [1]}
        run.save(crf.State(extra=extra))
        run.save(crf.State(extra={"c": "x" * 100_000}))
        size = len(json.dumps(extra, separators=(",", ":")))
        assert f"extra           {size:,} bytes of JSON: 'a\\n', b" in checkrun("info", f"{run.url}@1").stdout
        assert "extra           100,008 bytes of JSON\n" in checkrun("info", f"{run.url}@2").stdout
        told = checkrun("info", f"{run.url}@2", "--json").document["checkpoint"]["extra"]
        assert told == {"bytes": 100_008, "value": None, "in_blob": True}

    def test_an_empty_run(self, tmp_path: Path) -> None:
        crf.open_run(tmp_path / "run", mode="a", durable=False)
        assert "no checkpoint yet" in checkrun("info", tmp_path / "run").stdout
        document = checkrun("info", tmp_path / "run", "--json").document
        assert (document["head"], document["latest"], document["checkpoint"]) == (0, None, None)

    def test_what_is_damaged_is_told_and_the_rest_shown(self, copy: Path) -> None:
        prune(copy, 1)
        commit_path(copy, 9).parent.mkdir()
        commit_path(copy, 9).write_bytes(b"[]")
        (manifest,) = commit_path(copy, 8).parent.glob("*/manifest.json")
        manifest.unlink()
        made = checkrun("info", copy, "--json", code=1)
        document = made.document
        assert (document["head"], document["latest"], document["checkpoint"]["step"]) == (9, 8, 401)
        assert document["checkpoint"]["tables"] is None and document["checkpoint"]["chain"] == [8, 7]
        places = [problem["place"] for problem in document["problems"]]
        assert places == ["00000009/zarr.json", str(manifest.relative_to(copy))]
        assert [error.partition(": damaged: ")[0] for error in made.errors] == places
        made = checkrun("info", f"{copy}@2", code=1)
        assert "2, 1 (2 layers" not in made.stdout and "BROKEN at 1" in made.stdout and "'rng\\t'" in made.stdout
        assert made.errors[1] == "00000002/zarr.json: damaged: checkpoint 1 of its chain is pruned"

    def test_a_damaged_part_file_costs_only_what_it_says(self, copy: Path) -> None:
        (parts,) = commit_path(copy, 2).parent.glob("*/parts-0.json.gz")
        parts.write_bytes(b"no gzip")
        made = checkrun("info", f"{copy}@2", "--json", code=1)
        user = made.document["checkpoint"]["tables"][0]
        assert (user["rows"], user["stored_rows"], user["fields"][0]["encodings"]) == (40, None, None)
        assert [problem["place"] for problem in made.document["problems"]] == [str(parts.relative_to(copy))]
        row = next(row for row in checkrun("info", f"{copy}@2", code=1).rows if row[0] == "user")
        assert row[:9] == ["user", "40", "changed", "?", "weight", "float32", "6", "?", "refine"]


class TestCat:
    def test_text(self, whole: Path) -> None:
        made = checkrun("cat", f"{whole}@2", "user", "--rows", "2:5", "--columns", "1:3")
        values = crf.open_run(whole)[2].table("user").read(slice(2, 5), columns=slice(1, 3))
        assert made.rows == [
            ["row", "weight[1]", "weight[2]", "sum"],
            *([str(2 + i), *(str(x) for x in values["weight"][i]), str(values["sum"][i])] for i in range(3)),
        ]
        assert [row[3] for row in made.rows[1:]] == ["2.0", "nan", "-inf"]

    def test_json_is_exact(self, whole: Path) -> None:
        made = checkrun("cat", whole, "user", "--json").objects
        values = crf.open_run(whole).latest().table("user").read()
        assert [row["row"] for row in made] == list(range(40))
        weight = np.array([row["fields"]["weight"] for row in made]).astype(np.float32)
        assert weight.tobytes() == values["weight"].tobytes()
        assert [made[3]["fields"]["sum"], made[4]["fields"]["sum"]] == ["NaN", "-Infinity"]

    @pytest.mark.parametrize(
        ("given", "meant"),
        [("0:3", [0, 1, 2]), ("-2:", [38, 39]), (":1", [0]), ("38:99", [38, 39]), ("5:5", []), ("9:2", [])],
    )
    def test_rows_are_as_in_python(self, whole: Path, given: str, meant: list[int]) -> None:
        made = checkrun("cat", whole, "user", "--rows", given, "--field", "sum")
        assert [row[0] for row in made.rows] == ["row", *map(str, meant)]
        made = checkrun("cat", whole, "user", "--rows", given, "--field", "sum", "--json")
        assert [row["row"] for row in made.objects] == meant

    def test_ids_in_any_order(self, whole: Path) -> None:
        made = checkrun("cat", whole, "user", "--ids", "39,0,39", "--field", "sum", "--json").objects
        assert made == [{"row": n, "fields": {"sum": float(n)}} for n in (39, 0, 39)]

    def test_fields_and_columns(self, whole: Path) -> None:
        made = checkrun("cat", whole, "user", "--rows", ":1", "--field", "sum", "--field", "weight", "--columns", "-1:")
        assert made.rows[0] == ["row", "weight[5]", "sum"] or made.rows[0] == ["row", "sum", "weight[5]"]
        assert checkrun("cat", whole, "user", "--rows", ":1", "--columns", "0:0").rows[0] == ["row", "sum"]

    def test_a_keyed_table_of_bfloat16_with_an_odd_name(self, whole: Path) -> None:
        view = crf.open_run(whole).latest().table(ODD)
        made = checkrun("cat", whole, ODD, "--json").objects
        assert [row["key"] for row in made] == [-3, 0, 8, 2**62]
        assert [row["fields"]["v"] for row in made] == view.read()["v"].astype(np.float64).tolist()
        made = checkrun("cat", whole, ODD, "--ids", "4611686018427387904,-3", "--json").objects
        assert [row["key"] for row in made] == [2**62, -3]
        assert [row[0] for row in checkrun("cat", whole, ODD, "--rows", "1:3").rows] == ["key", "0", "8"]

    def test_unsigned_keys(self, tmp_path: Path) -> None:
        run = crf.open_run(tmp_path / "run", mode="a", durable=False)
        keys = np.array([5, 2**64 - 1], np.uint64)
        run.save(crf.State(tables={"t": crf.Table({"x": np.array([1, 2], np.int8)}, keys=keys)}))
        assert sorted(row["key"] for row in checkrun("cat", run.url, "t", "--json").objects) == [5, 2**64 - 1]
        made = checkrun("cat", run.url, "t", "--ids", str(2**64 - 1), "--json").objects
        assert made == [{"key": 2**64 - 1, "fields": {"x": 2}}]
        assert "-1 is no uint64" in checkrun("cat", run.url, "t", "--ids", "-1", code=2).errors[0]

    def test_damaged_rows_are_named_and_the_others_printed(self, copy: Path) -> None:
        chunk = chunk_of(copy, 2, "weight.codes")
        chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
        made = checkrun("cat", f"{copy}@2", "user", "--json", code=1)
        assert [row["row"] for row in made.objects] == [n for n in range(40) if n not in (3, 4)]
        place = f"{chunk.relative_to(copy)}: damaged: "
        assert len(made.errors) == 1 and made.errors[0].startswith(place)
        assert made.errors[0].endswith("; needed for 2 rows from 3 to 4")
        text = checkrun("cat", f"{copy}@2", "user", "--rows", "2:6", code=1)
        assert [row[0] for row in text.rows] == ["row", "2", "5"]
        intact = checkrun("cat", f"{copy}@2", "user", "--field", "sum")
        assert len(intact.rows) == 41

    def test_a_broken_chain(self, copy: Path) -> None:
        prune(copy, 1)
        assert "pruned" in checkrun("cat", f"{copy}@2", "user", code=3).errors[0]
        commit_path(copy, 1).unlink()
        made = checkrun("cat", f"{copy}@2", "user", code=1)
        assert made.stdout == "" and len(made.errors) == 1
        assert made.errors[0].endswith("missing, but checkpoint 2 needs it; needed for 40 rows from 0 to 39")

    def test_a_damaged_latest_number_is_not_passed_over(self, copy: Path) -> None:
        """COM-5."""
        commit_path(copy, 8).write_bytes(b"?")
        made = checkrun("cat", copy, "user", code=1)
        assert made.stdout == "" and len(made.errors) == 1
        assert made.errors[0].startswith("00000008/zarr.json: ") and "RUN@SEQ" in made.errors[0]
        assert "skip_damaged" not in made.errors[0]
        assert len(checkrun("cat", f"{copy}@7", "user").rows) == 41

    def test_a_burnt_number_above_the_latest_is_told(self, copy: Path) -> None:
        commit_path(copy, 9).parent.mkdir()
        commit_path(copy, 9).touch()
        made = checkrun("cat", copy, "user", "--rows", ":1")
        assert len(made.rows) == 2
        burnt = "00000009/zarr.json: no commit, the number is burnt"
        assert made.errors == [f"warning: {burnt}; the latest checkpoint is 8"]


class TestChanges:
    def test_counts(self, whole: Path) -> None:
        assert checkrun("changes", whole, 1, 4).rows == [
            ["table", "changed", "deleted", "table rows"],
            [repr(ODD), "1", "1", "-"],
            [GONE, "0", "0", "-", "dropped"],
            ["user", "5", "0", "40"],
        ]

    def test_json(self, whole: Path) -> None:
        document = checkrun("changes", whole, 1, 4, "--json").document
        assert document == {
            "run": str(whole),
            "since": 1,
            "until": 4,
            "tables": [
                {"table": ODD, "changed": 1, "deleted": 1, "table_rows": None, "dropped": False},
                {"table": GONE, "changed": 0, "deleted": 0, "table_rows": None, "dropped": True},
                {"table": "user", "changed": 5, "deleted": 0, "table_rows": 40, "dropped": False},
            ],
            "problems": [],
        }

    def test_values_as_json_lines_bring_one_checkpoint_to_the_other(self, whole: Path) -> None:
        held = {row["row"]: row["fields"] for row in checkrun("cat", f"{whole}@1", "user", "--json").objects}
        keyed = {row["key"]: row["fields"] for row in checkrun("cat", f"{whole}@1", ODD, "--json").objects}
        for change in checkrun("changes", whole, 1, 4, "--values", "--json").objects:
            if "deleted" in change:
                assert change["table"] == ODD
                del keyed[change["deleted"]]
            elif "row" in change:
                assert change["table"] == "user"
                held[change["row"]] = change["fields"]
            elif "key" in change:
                keyed[change["key"]] = change["fields"]
            else:
                assert change in (
                    {"table": ODD, "table_rows": None},
                    {"table": "user", "table_rows": 40},
                    {"table": GONE, "dropped": True},
                )
        assert held == {row["row"]: row["fields"] for row in checkrun("cat", f"{whole}@4", "user", "--json").objects}
        assert keyed == {row["key"]: row["fields"] for row in checkrun("cat", f"{whole}@4", ODD, "--json").objects}

    def test_values_as_text(self, whole: Path) -> None:
        made = checkrun("changes", whole, 3, 4, "--values")
        value = crf.open_run(whole)[4].table("user").take([39])["weight"][0, 0]
        lines = made.rows
        assert lines[0] == [f"table {ODD!r}"] and lines[1] == ["deleted -3"]
        assert lines[2] == ["table user, 40 rows now"] and lines[3][:2] == ["row", "weight[0]"]
        assert [line[0] for line in lines[4:]] == ["5", "39"] and lines[5][1] == str(value)

    def test_one_table(self, whole: Path) -> None:
        assert [row[0] for row in checkrun("changes", whole, 1, 4, "--table", "user").rows] == ["table", "user"]
        assert checkrun("changes", whole, 1, 4, "--table", GONE).rows[1] == [GONE, "0", "0", "-", "dropped"]
        assert checkrun("changes", whole, 7, 8, "--table", ODD, "--json").document["tables"] == []
        assert "no table 'none'" in checkrun("changes", whole, 1, 4, "--table", "none", code=3).errors[0]

    def test_across_a_rollback(self, whole: Path) -> None:
        tables = checkrun("changes", whole, 4, 6, "--json").document["tables"]
        assert {t["table"]: t["changed"] for t in tables} == {"user": 4, ODD: 1}

    def test_nothing_changed(self, whole: Path) -> None:
        assert checkrun("changes", whole, 4, 4).rows == [["table", "changed", "deleted", "table rows"]]

    def test_between_tags(self, copy: Path) -> None:
        checkrun("tag", copy, "first", 1)
        checkrun("tag", copy, "fourth", 4)
        wanted = checkrun("changes", copy, 1, 4, "--json").document
        assert checkrun("changes", copy, "first", "fourth", "--json").document == wanted
        assert "no tag 'fifth'" in checkrun("changes", copy, "first", "fifth", code=3).errors[0]
        assert "up to 4" in checkrun("changes", copy, 0, 4, code=2).errors[0]

    def test_what_cannot_be_told(self, copy: Path) -> None:
        assert "give the number of a checkpoint up to 1" in checkrun("changes", copy, 4, 1, code=2).errors[0]
        assert "no checkpoint 99" in checkrun("changes", copy, 1, 99, code=3).errors[0]
        prune(copy, 3)
        assert "load the checkpoint as a whole" in checkrun("changes", copy, 1, 4, code=3).errors[0]

    def test_damage_ends_it_and_is_told(self, copy: Path) -> None:
        chunk = chunk_of(copy, 4, "weight.codes")
        chunk.unlink()
        made = checkrun("changes", copy, 3, 4, "--json", code=1)
        assert [table["table"] for table in made.document["tables"]] == [ODD]
        assert made.document["problems"][0]["place"] == str(chunk.relative_to(copy))
        assert made.errors[0].endswith("what changed beyond is not shown")


class TestVerify:
    def test_a_whole_run(self, whole: Path) -> None:
        assert checkrun("verify", whole).stdout == "8 numbers checked: no problem.\n"
        document = checkrun("verify", f"{whole}@3", "--json").document
        head = {"run": str(whole), "sequence": 3, "fast": False, "problems": [], "checked": 1, "counts": {}}
        assert document == head | {"safe": None, "affected": None}
        document = checkrun("verify", whole, "--json", "--fast").document
        assert document == head | {
            "sequence": None,
            "fast": True,
            "checked": 8,
            "safe": [1, 2, 3, 4, 5, 6, 7, 8],
            "affected": [],
        }

    def test_every_problem_has_its_kind_and_place(self, copy: Path) -> None:
        chunk = chunk_of(copy, 4, "weight.codes")
        chunk.unlink()
        commit_path(copy, 7).write_bytes(b"?")
        commit_path(copy, 9).parent.mkdir()
        commit_path(copy, 9).touch()
        (copy / "00000001" / "note\n.txt").write_text("litter")
        made = checkrun("verify", copy, "--json", code=1)
        problems = [(problem["kind"], problem["place"]) for problem in made.document["problems"]]
        assert ("damaged", str(chunk.relative_to(copy))) in problems
        assert ("damaged", "00000007/zarr.json") in problems
        assert ("burnt", "00000009/zarr.json") in problems
        assert ("litter", "00000001/note\n.txt") in problems
        told = [(p["kind"], p["place"], p["message"]) for p in made.document["problems"]]
        assert len(set(told)) == len(told), "a problem is told once"
        assert sum(made.document["counts"].values()) == len(told) and made.document["checked"] == 9
        text = checkrun("verify", copy, code=1).stdout.splitlines()
        assert f"{chunk.relative_to(copy)}: damaged: the object is missing" in text
        assert "00000001/note\\n.txt: litter: no checkpoint needs it" in text
        assert re.fullmatch(r"9 numbers checked: 1 burnt, \d+ damaged, .*\d+ litter\.", text[-3])
        assert text[-2:] == ["Affected: 4, 7, 8.", "Safe: 1-3, 5-6."]
        assert made.document["safe"] == [1, 2, 3, 5, 6]
        assert made.document["affected"] == [{"sequence": n, "broken_at": n} for n in (4, 7, 8)]

    def test_what_lies_over_damage_is_affected(self, copy: Path) -> None:
        """A chunk of 2: of 3 and 4, which lie over it in a row, and of 5 and 6, which went back to it."""
        chunk = chunk_of(copy, 2, "weight.codes")
        data = bytearray(chunk.read_bytes())
        data[0] ^= 1
        chunk.write_bytes(data)
        assert checkrun("verify", copy, "--fast").stdout == "8 numbers checked: no problem.\n"
        text = checkrun("verify", copy, code=1).stdout.splitlines()
        assert text[-2:] == ["Affected: 2, 3 (by 2), 4 (by 2), 5 (by 2), 6 (by 2).", "Safe: 1, 7-8."]
        chunk.unlink()
        made = checkrun("verify", copy, "--fast", "--json", code=1).document
        assert {"place": str(chunk.relative_to(copy)), "kind": "damaged", "message": "the object is missing"} in made[
            "problems"
        ]
        assert (made["safe"], len(made["affected"])) == ([1, 7, 8], 5)
        assert made["affected"][1] == {"sequence": 3, "broken_at": 2}

    def test_a_commit_that_is_gone(self, copy: Path) -> None:
        """Nothing lies over it, but the next one names it, and a prune would have left a marker (PRU-1)."""
        shutil.rmtree(copy / "00000004")
        assert checkrun("verify", copy, "--fast", code=1).stdout.splitlines() == [
            "00000004/zarr.json: damaged: the commit is missing: checkpoint 5 follows it",
            "7 numbers checked: 1 damaged.",
            "Affected: 4.",
            "Safe: 1-3, 5-8.",
        ]

    def test_litter_alone_is_fine(self, copy: Path) -> None:
        (copy / "00000003" / "left-over").write_text("litter")
        made = checkrun("verify", copy, "--json")
        assert made.document["counts"] == {"litter": 1}
        assert checkrun("verify", f"{copy}@3").stdout.endswith("1 number checked: 1 litter.\n")
        for number in range(3):
            (copy / "00000003" / f"left-{number}").write_text("litter")
        text = checkrun("verify", copy).stdout
        assert text == "00000003/: litter: no checkpoint needs it (4 objects)\n8 numbers checked: 4 litter.\n"
        assert len(checkrun("verify", copy, "--json").document["problems"]) == 4
        pruned = checkrun("prune", copy, "--keep-last", "8").stdout
        assert "00000003/: stays: nobody knows what it is (4 objects)\n" in pruned
        assert checkrun("verify", f"{copy}@2").stdout == "1 number checked: no problem.\n"

    def test_a_number_that_is_not_there(self, copy: Path) -> None:
        assert "no checkpoint 99" in checkrun("verify", f"{copy}@99", code=3).errors[0]
        prune(copy, 4)
        assert checkrun("verify", f"{copy}@4").stdout == "1 number checked: no problem.\n"


class TestDamagedRunDocument:
    @pytest.mark.parametrize(("data", "kind"), [(None, "not_a_run"), (b"", "not_a_run"), (b"{broken", "damaged")])
    def test_the_checkpoints_are_shown_all_the_same(self, copy: Path, data: bytes | None, kind: str) -> None:
        (copy / "zarr.json").unlink()
        if data is not None:
            (copy / "zarr.json").write_bytes(data)
        for command, key in (("ls", "numbers"), ("tree", "numbers"), ("info", "checkpoint"), ("verify", "problems")):
            made = checkrun(command, copy, "--json", code=1).document
            assert made["problems"][0]["kind"] == kind and made["problems"][0]["place"] == "zarr.json"
            assert made[key]
        assert len(checkrun("ls", copy, code=1).rows) == 9

    def test_a_version_that_is_not_known(self, copy: Path) -> None:
        text = (copy / "zarr.json").read_text()
        (copy / "zarr.json").write_text(text.replace('"0.9"', '"3.0"'))
        for arguments in (["ls", copy], ["info", copy], ["verify", copy], ["cat", copy, "user"]):
            made = checkrun(*arguments, code=4)
            assert made.stdout == "" and "format version 3.0" in made.errors[0]


class TestErrors:
    @pytest.mark.parametrize("command", ["ls", "tree", "info", "verify"])
    def test_nothing_there(self, tmp_path: Path, command: str) -> None:
        made = checkrun(command, tmp_path / "no\nne", code=3)
        assert made.stdout == "" and made.errors == [f"{tmp_path}/no\\nne does not exist"]
        assert "holds no run" in checkrun(command, tmp_path, code=3).errors[0]
        (tmp_path / "20240131").mkdir()
        assert "holds no run" in checkrun(command, tmp_path, code=3).errors[0]
        assert "bogus://bucket/run" in checkrun(command, "bogus://bucket/run", code=2).errors[0]

    def test_not_found(self, whole: Path) -> None:
        assert "no checkpoint 99" in checkrun("cat", f"{whole}@99", "user", code=3).errors[0]
        assert "no checkpoint 0" in checkrun("info", f"{whole}@0", code=3).errors[0]
        assert "no table 'x\\ny'" in checkrun("cat", whole, "x\ny", code=3).errors[0]
        assert "no row 40" in checkrun("cat", whole, "user", "--ids", "1,40", code=3).errors[0]
        assert "no key 5" in checkrun("cat", whole, ODD, "--ids", "5", code=3).errors[0]

    def test_refused(self, whole: Path) -> None:
        assert "no field 'x'" in checkrun("cat", whole, "user", "--field", "x", code=2).errors[0]
        made = checkrun("cat", whole, "user", "--ids", 2**64 - 1, code=2)
        assert made.errors == ["--ids: 18446744073709551615 is no int64, as the ids of table 'user' are"]
        assert "not both" in checkrun("cat", whole, "user", "--ids", "1", "--rows", "1:2", code=2).stderr
        assert "is not A:B" in checkrun("cat", whole, "user", "--rows", "1", code=2).stderr
        assert "names a checkpoint" in checkrun("ls", f"{whole}@1", code=2).errors[0]

    def test_pruned_and_burnt(self, copy: Path) -> None:
        prune(copy, 4)
        commit_path(copy, 9).parent.mkdir()
        commit_path(copy, 9).touch()
        assert "was pruned" in checkrun("info", f"{copy}@4", code=3).errors[0]
        assert "was burnt" in checkrun("cat", f"{copy}@9", "user", code=3).errors[0]

    def test_a_run_in_a_folder_that_looks_like_a_checkpoint(self, whole: Path, tmp_path: Path) -> None:
        twin = shutil.copytree(whole, tmp_path / "run@3")
        assert checkrun("info", twin, "--json").document["checkpoint"]["sequence"] == 8
        shutil.copytree(whole, tmp_path / "run")
        assert "run/@3" in checkrun("info", twin, code=2).errors[0]
        assert checkrun("info", f"{tmp_path}/run/@3", "--json").document["checkpoint"]["sequence"] == 3
        assert checkrun("info", f"{twin}/", "--json").document["checkpoint"]["sequence"] == 8
        assert checkrun("info", f"{twin}@2", "--json").document["checkpoint"]["sequence"] == 2


class TestHelp:
    def test_the_commands_and_exit_codes(self) -> None:
        made = checkrun("--help")
        assert re.findall(r"^  ([a-z][a-z-]*)  ", made.stdout, re.MULTILINE) == list(COMMANDS)
        assert re.findall(r"^    (\d+)  ", made.stdout, re.MULTILINE) == ["0", "1", "2", "3", "4", "5", "130", "141"]

    @pytest.mark.parametrize("command", COMMANDS)
    def test_each_command_has_an_example_and_fits_a_terminal(self, command: str) -> None:
        lines = checkrun(command, "--help").stdout.splitlines()
        assert lines[0].startswith(f"Usage: checkrun {command} [OPTIONS]")
        assert any(line.strip().startswith(f"checkrun {command} ") for line in lines[lines.index("  Example:") :])
        assert max(map(len, lines)) <= 80 or command == "demo"


def program(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *map(str, arguments)], check=False, capture_output=True, text=True, **options)


class TestProcesses:
    def test_a_pipe_gets_plain_full_lines_without_torch(self, whole: Path) -> None:
        hook = "import sys; sys.modules['torch'] = None; from checkrun_format.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", hook, "ls", whole],
            check=True,
            capture_output=True,
            text=True,
            env=ENVIRONMENT | {"FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"},
        )
        assert done.stderr == "" and done.stdout == checkrun("ls", whole).stdout

    def test_an_encoding_without_the_marks_of_a_tree(self, whole: Path) -> None:
        done = program("tree", whole, env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"})
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split()[:2] for line in done.stdout.splitlines()[1:4]] == [["#", "1"], ["+", "2"], ["|", "x"]]

    @pytest.mark.parametrize("reads", ["head -c 1", "true"])
    def test_a_pipe_that_breaks_is_quiet(self, whole: Path, reads: str) -> None:
        line = f'set -o pipefail; "$@" | {reads} >/dev/null'
        much = ["cat", str(whole), "user", "--json", "--ids", ",".join(["1"] * 2000)]
        done = subprocess.run(
            ["bash", "-c", line, "bash", *PROGRAM, *much], check=False, capture_output=True, text=True, env=ENVIRONMENT
        )
        assert (done.returncode, done.stderr) == (141, "")

    def test_a_full_disk_and_a_closed_output(self, whole: Path) -> None:
        line = '"$@" >/dev/full; echo $?; "$@" >&-; echo $?'
        done = subprocess.run(
            ["bash", "-c", line, "bash", *PROGRAM, "ls", str(whole)],
            check=True,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
        )
        assert done.stdout == "5\n0\n"
        assert done.stderr == "checkrun: standard output: No space left on device\n"

    def test_help_on_a_full_disk_and_an_error_that_cannot_be_told(self, whole: Path) -> None:
        lines = ('"$@" --help >/dev/full', '"$@" ls --help >/dev/full', f'"$@" ls {whole}/no 2>/dev/full')
        done = subprocess.run(
            ["bash", "-c", "; echo $?; ".join([*lines, ""]), "bash", *PROGRAM],
            check=True,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
        )
        assert done.stdout == "5\n5\n3\n"
        assert done.stderr == "checkrun: standard output: No space left on device\n" * 2

    def test_a_narrow_terminal(self, whole: Path) -> None:
        shown = on_a_terminal("tree", whole)
        assert "\x1b[" in shown
        assert re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r\n", "\n") == checkrun("tree", whole).stdout

    def test_a_terminal_that_says_it_has_no_columns(self, whole: Path) -> None:
        shown = on_a_terminal("ls", whole, columns=0)
        assert re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r\n", "\n") == checkrun("ls", whole).stdout

    def test_progress_on_a_terminal(self, whole: Path) -> None:
        shown = on_a_terminal("verify", whole)
        assert "8/8" in shown and "8 numbers checked: no problem." in shown


def on_a_terminal(*arguments: object, columns: int = 30) -> str:
    """What a narrow terminal gets."""
    master, slave = pty.openpty()
    environment = ENVIRONMENT | {"COLUMNS": str(columns), "LINES": "10", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [*PROGRAM, *map(str, arguments)]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        with os.fdopen(master, "rb", buffering=0) as terminal:
            found = b"".join(_read_until_closed(terminal))
        assert process.wait() == 0
    return found.decode()


def _read_until_closed(terminal: FileIO) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # EIO: how a terminal says that nobody writes any more
        while data := terminal.read(65536):
            yield data
