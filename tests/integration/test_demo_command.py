"""`checkrun demo` as a user runs it: real processes, a real kill, a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format.cli._demo.plan import INTERVAL, KILLED_IN, SAVES, STEPS
from tests.conformance.agreement import assert_agreement

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
COMMAND = [sys.executable, "-m", "checkrun_format.cli", "demo"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A finished invocation."""

    folder: Path
    stdout: str
    seconds: float

    @property
    def table(self) -> list[list[str]]:
        return [line.split() for line in self.stdout.splitlines() if re.match(r" *\d+ +(base|increment|killed) ", line)]

    @property
    def run(self) -> Path:
        return self.folder / "run"


def invoke(*arguments: str | Path, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *arguments], check=False, capture_output=True, text=True, env=ENVIRONMENT, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo") / 'my "first" run'
    begin = time.monotonic()
    done = invoke(folder)
    assert done.stderr == ""
    return Demo(folder=folder, stdout=done.stdout, seconds=time.monotonic() - begin)


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_takes_less_than_a_minute(demo: Demo) -> None:
    assert demo.seconds < 60


def test_a_pipe_gets_plain_lines(demo: Demo) -> None:
    assert {character for character in demo.stdout if not character.isprintable()} == {"\n"}


def test_the_table_has_every_checkpoint_and_the_killed_save(demo: Demo) -> None:
    assert [number(line[0]) for line in demo.table] == sorted([*range(1, SAVES + 1), KILLED_IN])
    assert next(line[1] for line in demo.table if number(line[0]) == KILLED_IN) == "killed"
    assert [line[1] for line in demo.table].count("killed") == 1
    assert [number(line[3]) for line in demo.table if line[1] != "killed"] == list(range(INTERVAL, STEPS + 1, INTERVAL))


def test_the_table_tells_what_the_run_holds(demo: Demo) -> None:
    run = crf.open_run(demo.run, mode="r")
    lines = {number(line[0]): line for line in demo.table if line[1] != "killed"}
    kinds = [lines[checkpoint.sequence][1] for checkpoint in run.log()]
    assert kinds.count("base") >= 1
    assert kinds.count("increment") >= 8
    assert kinds[0] == "base"
    for checkpoint in run.log():
        _, kind, over, step, changed, rows, stored, plain, seconds = lines[checkpoint.sequence]
        assert (kind == "base", over) == (checkpoint.parent is None, str(checkpoint.parent or "-"))
        assert number(step) == checkpoint.step
        assert number(stored) == checkpoint.stored_bytes
        assert number(plain) == sum(array.nbytes for array in truth(demo).values())
        assert number(rows) == sum(checkpoint.table(name).stored_rows for name in ("in", "out"))
        assert number(changed) <= number(rows)
        assert float(seconds) < 10


def test_a_fraction_of_the_rows_changes_between_checkpoints(demo: Demo) -> None:
    lines = [line for line in demo.table if line[1] != "killed"]
    changed, rows = [number(line[4]) for line in lines], len(truth(demo)["in.weight"]) + len(truth(demo)["out.weight"])
    assert 0.1 * rows < min(changed[1:])
    assert max(changed[1:]) < 0.6 * rows
    increments = [number(line[6]) for line in lines if line[1] == "increment"]
    bases = [number(line[6]) for line in lines if line[1] == "base"]
    assert max(increments) < min(bases)
    assert sum(increments + bases) < sum(number(line[7]) for line in lines) / 8


def test_the_killed_save_left_litter_and_no_commit(demo: Demo) -> None:
    checkpoint = crf.open_run(demo.run, mode="r")[KILLED_IN]
    folders = [path for path in (demo.run / f"{KILLED_IN:08d}").iterdir() if path.is_dir()]
    litter = [path for path in folders if path.name != checkpoint.commit.attempt]
    assert len(folders) == 2
    assert len(litter) == 1
    assert not (litter[0] / "manifest.json").exists()
    size = sum(path.stat().st_size for path in litter[0].rglob("*") if path.is_file())
    assert [number(line[6]) for line in demo.table if line[1] == "killed"] == [size]
    assert size > 0


def test_exactly_one_restore_is_counted(demo: Demo) -> None:
    restores = [checkpoint.commit.restores for checkpoint in crf.open_run(demo.run, mode="r").log()]
    assert restores == [0] * (KILLED_IN - 1) + [1] * (SAVES - KILLED_IN + 1)


def truth(demo: Demo) -> dict[str, Any]:
    return {path.stem: np.load(path) for path in (demo.folder / "truth").glob("*.npy")}


def test_lossless_values_come_back_bit_for_bit_and_weights_nearly(demo: Demo) -> None:
    state = crf.open_run(demo.run, mode="r").latest().load()
    true = truth(demo)
    for name in ("in", "out"):
        assert np.array_equal(state.tables[name].fields["sum"], true[f"{name}.sum"])
        error = np.linalg.norm(state.tables[name].fields["weight"] - true[f"{name}.weight"])
        assert 0 < error < 0.15 * np.linalg.norm(true[f"{name}.weight"])
    assert np.array_equal(state.tensors["projection"], true["projection"])
    assert state.extra["step"] == STEPS
    assert "bit-identical to the trainer's." in demo.stdout


def test_the_crash_and_quantization_cost_little_loss(demo: Demo) -> None:
    found = re.search(r"Loss with the crash: ([\d.]+)\. Without: ([\d.]+) ", demo.stdout)
    assert found is not None
    with_crash, without = map(float, found.groups())
    assert 1.5 < without < 2.8
    assert abs(with_crash / without - 1) < 0.05


def test_what_happened_is_told_in_order(demo: Demo) -> None:
    told = [line.split(",")[0] for line in demo.stdout.splitlines() if re.match("Saved|Killed with|Restored", line)]
    killed = [line for line in told if line.startswith("Killed")]
    saved = [f"Saved checkpoint {n}" for n in range(1, SAVES + 1)]
    restored = f"Restored checkpoint {KILLED_IN - 1}; training goes on at step {(KILLED_IN - 1) * INTERVAL:}"
    assert len(killed) == 1
    assert [line.partition(" at step")[0] for line in told] == [
        *saved[: KILLED_IN - 1], *killed, restored.partition(" at step")[0], *saved[KILLED_IN - 1 :],
    ]  # fmt: skip


def test_the_second_reader_resolves_the_run_to_the_same_bits(demo: Demo) -> None:
    assert assert_agreement(demo.run, checkpoints=SAVES) == 2 * SAVES


def test_the_commands_that_it_shows_run(demo: Demo) -> None:
    lines = [line for line in demo.stdout.splitlines() if line.startswith(("  python -c ", "  checkrun "))]
    programs = {"python": [sys.executable], "checkrun": [sys.executable, "-m", "checkrun_format.cli"]}
    printed = {}
    for words in map(shlex.split, lines):
        command = [*programs[words[0]], *words[1:]]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        printed[words[1]] = done.stdout
    assert list(printed) == ["ls", "tree", "cat", "changes", "verify", "-c"]
    assert len(printed["ls"].splitlines()) == SAVES + 1
    assert len(printed["cat"].splitlines()) == 5 + 1
    assert all(f"{KILLED_IN:08d}/" in line for line in printed["verify"].splitlines()[:-1])
    assert "weight.codes" in printed["-c"]


def test_a_second_invocation_shows_the_same_table_and_changes_nothing(demo: Demo) -> None:
    before = contents(demo.folder)
    again = Demo(folder=demo.folder, stdout=invoke(demo.folder).stdout, seconds=0)
    assert again.table == demo.table
    assert again.stdout.startswith(f"{demo.folder} is complete.")
    assert again.stdout.splitlines()[-1] == f"To start afresh: name another DIR, or delete {demo.folder}."
    assert contents(demo.folder) == before


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_by_default_it_works_in_checkrun_demo_and_refuses_a_foreign_one(tmp_path: Path) -> None:
    (tmp_path / "checkrun-demo").mkdir()
    (tmp_path / "checkrun-demo/mine.txt").write_text("mine")
    done = invoke(code=2, cwd=tmp_path)
    assert "Error: checkrun-demo holds something else than a demo" in done.stderr
    assert [path.name for path in (tmp_path / "checkrun-demo").iterdir()] == ["mine.txt"]


@contextlib.contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that has saved two checkpoints more than it found, and still runs."""
    with subprocess.Popen(
        [*COMMAND, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        saved = 0
        while saved < 2:
            saved += process.stdout.readline().startswith("Saved")
        try:
            yield process
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    return True


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while not all(map(is_gone, pids)):
        assert time.monotonic() < end, "training processes were left behind"
        time.sleep(0.05)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds child processes in /proc")
def test_continues_after_a_kill_and_an_interruption(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with started(folder) as process:
        pids = children(process.pid)
        process.kill()
        wait_until_gone(pids)
    assert pids
    first = json.loads((folder / "demo.json").read_text())

    with started(folder) as process:
        pids = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == (
            "Interrupted. The same command continues from the latest checkpoint."
        )
        assert all(map(is_gone, pids))
    assert pids

    done = Demo(folder=folder, stdout=invoke(folder).stdout, seconds=0)
    assert "Restored checkpoint" in done.stdout
    assert [line[1] for line in done.table].count("killed") == 1
    assert number(done.table[-1][3]) == STEPS
    assert "bit-identical to the trainer's." in done.stdout
    assert json.loads((folder / "demo.json").read_text()) == first
