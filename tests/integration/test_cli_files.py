"""`checkrun import` and `checkrun export`: what they print, how they end, and that a failure changes nothing."""

from __future__ import annotations

import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkrun_format as crf
from checkrun_format.interchange.contents import Array
from tests.integration.test_cli import ENVIRONMENT, ROOT, checkrun, on_a_terminal, program

ODD = "emb\n\x1b[31m🚀"


def arrays(**more: Array) -> dict[str, Array]:
    values = np.random.default_rng(1).normal(size=(20_000, 8)).astype(np.float32)
    return {"emb": values, "bias": np.ones(3, np.float32), **more}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(arrays(), path)
    return path


@pytest.fixture
def run(file: Path, tmp_path: Path) -> Path:
    """A run that has checkpoint 1."""
    checkrun("import", file, tmp_path / "run", "--bits", 4, "--step", 100)
    return tmp_path / "run"


class TestImport:
    def test_text(self, file: Path, tmp_path: Path) -> None:
        size = file.stat().st_size
        made = checkrun("import", file, tmp_path / "run", "--bits", 4, "--step", 1000)
        stored = crf.open_run(tmp_path / "run").latest().stored_bytes
        assert made.stderr == ""
        assert made.stdout.splitlines()[0] == "Checkpoint 1, a base, step 1,000."
        assert made.rows[1:3] == [["table", "rows", "changed", "bits"], ["emb", "20,000", "20,000", "4"]]
        assert made.stdout.splitlines()[3:] == [
            "1 dense tensor.",
            f"{size:,} bytes in the file, {stored:,} stored ({size / stored:.1f} to 1).",
        ]
        again = checkrun("import", file, tmp_path / "run")
        assert again.stdout == f"Nothing changed: checkpoint 1 holds all that is in {file}.\n"
        changed = arrays()
        changed["emb"][5] += 1
        del changed["bias"]
        save_file(changed, file)
        made = checkrun("import", file, tmp_path / "run")
        assert made.stdout.splitlines()[0] == "Checkpoint 2, an increment over 1."
        assert made.rows[2] == ["emb", "20,000", "1", "4"]

    def test_json(self, run: Path, file: Path) -> None:
        made = checkrun("import", file, run, "--step", 101, "--json")
        assert made.stderr == ""
        assert made.document == {
            "run": str(run),
            "file": str(file),
            "file_bytes": file.stat().st_size,
            "committed": True,
            "checkpoint": 2,
            "parent": 1,
            "step": 101,
            "stored_bytes": crf.open_run(run).latest().stored_bytes,
            "tensors": 1,
            "dropped": [],
            "tables": [{"table": "emb", "rows": 20_000, "changed": 0, "bits": 4, "replaced": False}],
        }
        again = checkrun("import", file, run, "--json").document
        assert (again["committed"], again["checkpoint"], again["stored_bytes"]) == (False, 2, 0)
        assert len(list(crf.open_run(run).log())) == 2

    def test_tables_that_go_and_are_replaced(self, tmp_path: Path) -> None:
        for number, tensors in enumerate(({ODD: np.ones((3, 2)), "b": np.ones((3, 2))}, {"b": np.ones((3, 4))})):
            save_file(tensors, tmp_path / f"{number}.safetensors")
        first = checkrun("import", tmp_path / "0.safetensors", tmp_path / "run", "--table", "*")
        assert "\x1b" not in first.stdout
        made = checkrun("import", tmp_path / "1.safetensors", tmp_path / "run", "--table", "*")
        assert made.rows[2] == ["b", "3", "3", "raw", "in the place of a table of other fields, columns or dtypes"]
        assert made.stdout.splitlines()[3] == f"0 dense tensors; dropped tables: {ODD!r}."

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [(["--table", "none*"], 2, "--table 'none*' matches no tensor"),
         (["--table", "bias"], 2, "tensor 'bias' has shape (3,)"),
         (["--bits", "9"], 2, "'9' is not one of"),
         (["--step", "-1"], 2, "-1 is not in the range"),
         (["--format", "npz"], 2, "not an npz file")],
    )  # fmt: skip
    def test_refused(self, file: Path, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
        made = checkrun("import", file, tmp_path / "run", *arguments, code=code)
        assert message in made.stderr
        assert made.stdout == ""
        assert not (tmp_path / "run").exists()

    def test_files_that_cannot_be_read(self, file: Path, run: Path, tmp_path: Path) -> None:
        assert checkrun("import", tmp_path / "no.npz", run, code=3).errors == [f"{tmp_path}/no.npz: no such file"]
        assert "is a folder" in checkrun("import", tmp_path, run, "--format", "npz", code=2).errors[0]
        assert "the suffix does not tell" in checkrun("import", tmp_path / "a.h5", run, code=2).errors[0]
        file.write_bytes(file.read_bytes()[:-5])
        (error,) = checkrun("import", file, run, code=2).errors
        assert error.startswith(f"{file}: not a safetensors file, or a truncated one: ")
        assert len(list(crf.open_run(run).log())) == 1

    def test_runs_that_are_none_or_damaged(self, file: Path, run: Path, tmp_path: Path) -> None:
        (tmp_path / "home" / "papers").mkdir(parents=True)
        assert "holds no run" in checkrun("import", file, tmp_path / "home", code=3).errors[0]
        assert "names a checkpoint" in checkrun("import", file, f"{run}@1", code=2).errors[0]
        (codes,) = run.glob("00000001/*/block-0-0/weight.codes/c/0/0")
        codes.unlink()
        assert "the object is missing" in checkrun("import", file, run, code=1).errors[0]
        (run / "00000001" / "zarr.json").write_text("{")
        assert "00000001/zarr.json" in checkrun("import", file, run, code=1).errors[0]


class TestExport:
    def test_there_and_back(self, run: Path, tmp_path: Path) -> None:
        for suffix in ("safetensors", "npz", "pt"):
            out = tmp_path / f"out.{suffix}"
            made = checkrun("export", run, out)
            size = out.stat().st_size
            assert made.stdout == f"Checkpoint 1 in {out}: 1 table, 1 tensor; {size:,} bytes.\n"
            made = checkrun("export", f"{run}@1", out, "--force", "--json")
            assert made.document == {
                "checkpoint": 1, "file": str(out), "file_bytes": size, "tables": 1, "tensors": 1, "blobs": 0,
            }  # fmt: skip
            assert "Nothing changed" in checkrun("import", out, run).stdout
        found = load_file(tmp_path / "out.safetensors")
        assert found["bias"].tolist() == [1, 1, 1]
        assert found["emb"].tobytes() == crf.open_run(run)[1].table("emb").read()["weight"].tobytes()
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == [
            "out.npz", "out.pt", "out.safetensors",
        ]  # fmt: skip

    def test_refused(self, run: Path, file: Path, tmp_path: Path) -> None:
        before = file.read_bytes()
        (error,) = checkrun("export", run, file, code=2).errors
        assert error == f"{file} exists already: name another file, or replace it by --force (overwrite=True)"
        assert file.read_bytes() == before
        assert "no checkpoint 9" in checkrun("export", f"{run}@9", tmp_path / "a.npz", code=3).errors[0]
        assert "does not exist" in checkrun("export", tmp_path / "none", tmp_path / "a.npz", code=3).errors[0]
        assert "no such folder" in checkrun("export", run, tmp_path / "no" / "a.npz", code=3).errors[0]
        assert "the suffix does not tell" in checkrun("export", run, tmp_path / "a.h5", code=2).errors[0]
        assert "--bits is for --fbgemm" in checkrun("export", run, tmp_path / "a.npz", "--bits", 4, code=2).stderr
        (codes,) = run.glob("00000001/*/block-0-0/weight.codes/c/0/0")
        codes.unlink()
        assert "the object is missing" in checkrun("export", run, tmp_path / "a.npz", code=1).errors[0]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]

    def test_fbgemm(self, run: Path, tmp_path: Path) -> None:
        made = checkrun("export", run, tmp_path / "a.npz", "--fbgemm")
        assert made.rows[:2] == [
            ["table", "rows", "columns", "bits", "copied", "encoded", "exact", "recoded", "lost"],
            ["emb", "20,000", "8", "4", "20,000", "0", "0", "0", "0"],
        ]
        document = checkrun("export", run, tmp_path / "b.npz", "--fbgemm", "--bits", 2, "--json").document
        fused = document["tables"]["emb"]
        assert (fused["bits"], fused["copied"], fused["recoded"][:3]) == (2, 0, [0, 1, 2])
        assert (document["plain"], document["left_out"], document["tensors"]) == ([], [], 1)


def test_the_commands_that_readme_shows(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "README.md").read_text("utf-8").partition("## Import and export")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    changed = arrays()
    changed["emb"][[3, 7]] += 1
    save_file(changed, tmp_path / "later.safetensors")
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [line[:2] for line in lines] == [
        ["checkrun", word] for word in ("import", "import", "changes", *["export"] * 2)
    ]
    printed = [checkrun(*line[1:]).rows for line in lines]
    assert printed[2][1][:2] == ["emb", "2"]
    assert load_file(lines[3][3])["emb"].shape == load_file(file)["emb"].shape
    assert printed[4][1] == ["emb", "20,000", "8", "4", "20,000", "0", "0", "0", "0"]


class TestProcesses:
    def test_a_pipe_gets_no_progress_and_torch_is_not_needed(self, file: Path, tmp_path: Path) -> None:
        hook = "import sys; sys.modules['torch'] = None; from checkrun_format.cli import main; main()"

        def without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", hook, *map(str, arguments)]
            return subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT)

        done = without_torch("import", file, tmp_path / "run")
        assert (done.returncode, done.stderr) == (0, "")
        done = without_torch("export", tmp_path / "run", tmp_path / "x.npz")
        assert (done.returncode, done.stderr) == (0, "")
        for arguments in (["export", tmp_path / "run", tmp_path / "x.pt"], ["import", file, tmp_path / "run"]):
            done = without_torch(*arguments, *(["--format", "torch"] if arguments[0] == "import" else []))
            assert done.returncode == 2
            assert 'torch files need the package torch: pip install "checkrun-format[torch]"' in done.stderr

    def test_progress_on_a_terminal(self, file: Path, tmp_path: Path) -> None:
        shown = on_a_terminal("import", file, tmp_path / "run")
        assert "import" in shown
        assert "1 dense tensor." in shown

    @pytest.mark.parametrize("suffix", ["safetensors", "npz", "pt"])
    def test_no_space(self, run: Path, file: Path, tmp_path: Path, suffix: str) -> None:
        """Neither a half of a file nor of a checkpoint stays; what was there is as it was."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

        options: dict[str, Any] = {"preexec_fn": limit, "env": ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"}}
        done = program("export", run, tmp_path / f"out.{suffix}", **options)
        assert (done.returncode, done.stdout) == (5, "")
        assert done.stderr.count("\n") == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]
        changed = arrays()
        changed["emb"] += 1
        save_file(changed, file)
        done = program("import", file, run, **options)
        assert (done.returncode, done.stdout) == (5, "")
        assert [c.sequence for c in crf.open_run(run).log()] == [1]
        assert crf.open_run(run).verify() == []
