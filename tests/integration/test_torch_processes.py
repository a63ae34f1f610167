"""Trainers that end in every way that a process can end: what they leave behind is whole, and they do end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import checkrun_format as crf

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/train_dlrm.py"

TRAINER = """
import os, signal, sys, time
import torch
import checkrun_format as crf
from checkrun_format.stores import LocalStore
from checkrun_format.torch import Checkpointer

class Slow(LocalStore):
    slow = False
    def put(self, key, buffers):
        if self.slow:
            time.sleep(0.05)
        return super().put(key, buffers)

torch.manual_seed(0)
model = torch.nn.Embedding(60_000, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
store = Slow(sys.argv[1])
checkpointer = Checkpointer(crf.open_run(store, "a", chunk_bytes=1 << 18), model, optimizer)

def train(row):
    optimizer.zero_grad()
    model(torch.arange(row, row + 20_000)).sum().backward()
    optimizer.step()

train(0)
checkpointer.save(1)
train(100)
store.slow = True
"""

IN_A_BLOCK = "with checkpointer:\n    checkpointer.save_async(2)\n    "
ENDINGS = {
    "the end of the program": ("checkpointer.save_async(2)", 0),
    "an exception": ("checkpointer.save_async(2); raise ZeroDivisionError", 1),
    "an exception in a with block": (IN_A_BLOCK + "raise ZeroDivisionError", 1),
    "SIGINT": (IN_A_BLOCK + "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
    "SIGKILL": ("checkpointer.save_async(2); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


def ran(program: str, run: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, run],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_endings(tmp_path: Path, ending: str) -> None:
    program, code = ENDINGS[ending]
    done = ran(TRAINER + program, tmp_path / "run")
    assert done.returncode == code, done.stderr
    assert ("ZeroDivisionError" in done.stderr) == ("exception" in ending), done.stderr
    run, is_saved = crf.open_run(tmp_path / "run"), ending != "SIGKILL"  # Python waits for what goes on
    assert [problem for problem in run.verify() if problem.kind != "litter"] == []
    assert run.latest().step == (2 if is_saved else 1), done.stderr
    weight = run.latest().table("weight").read()["weight"]
    first = run[1].table("weight").read()["weight"]
    assert (weight != first).any(1).sum() == (20_000 if is_saved else 0)


MEMORY = """
import sys
from pathlib import Path
import torch
from checkrun_format.torch import Checkpointer, memory

memory._KEPT_BYTES = 0

def resident(what, file="status"):
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024

model = torch.nn.Embedding(800_000, 64)
model.weight.data.fill_(1)
with Checkpointer(sys.argv[1], model, durable=False) as checkpointer:
    checkpointer.save(0)
    level = resident("VmRSS")
    for step in (1, 2):
        checkpointer.mark("weight", torch.randperm(800_000)[:208_000])
        Path("/proc/self/clear_refs").write_text("5")
        pending = checkpointer.save_async(step)
        assert 150_000 < pending.result().table("weight").stored_rows < 400_000
        given_back = resident("LazyFree", "smaps_rollup")
        print(resident("VmHWM") - level, resident("VmRSS") - given_back - level)
"""


def test_memory_above_the_model(tmp_path: Path) -> None:
    """A table of 195 MiB of which 51 (then, over the base, up to 93) change: not another copy of the table.

    After a save the system may take back what was copied into.
    """
    done = ran(MEMORY, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (first, left_by_first), (second, left_by_second) = (map(float, line.split()) for line in done.stdout.splitlines())
    assert first < 51 + 100
    assert second < 93 + 100
    assert left_by_first < 51
    assert left_by_second < 51
    shutil.rmtree(tmp_path / "run")  # the second reader would take its time


def trained(path: Path) -> list[tuple[int, list[int]]]:
    """Steps and their samples."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(step), [int(sample) for sample in samples]) for step, *samples in lines]


def test_the_example_trains_each_sample_once(tmp_path: Path) -> None:
    """Killed, resumed, finished: each batch is trained once in the history that counts."""
    run = tmp_path / "run"
    options = ["--steps", "50", "--every", "10", "--batch-size", "16", "--bits", "8"]
    histories = []
    for number, more in enumerate((["--crash-at", "27"], [])):
        log = tmp_path / f"trained-{number}"
        done = subprocess.run(
            [sys.executable, EXAMPLE, run, "--resume", *options, "--trained", log, *more],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == (-signal.SIGKILL if more else 0), done.stderr
        histories.append(trained(log))
    killed, resumed = histories
    start = resumed[0][0]
    assert (killed[0][0], killed[-1][0]) == (0, 26)
    assert start in (10, 20), "the save of step 20 may not have been committed"
    counted = [*killed[:start], *resumed]
    assert [step for step, _ in counted] == list(range(50))
    assert [sample for _, samples in counted for sample in samples] == list(range(50 * 16))
    assert "step 50: done" in done.stdout
    finished = crf.open_run(run)
    assert [problem for problem in finished.verify() if problem.kind != "litter"] == []
    assert (finished.latest().step, finished.latest().commit.restores) == (50, 1)
    assert {t for t in finished.latest().tables if t.startswith("tables.")} == {f"tables.{n}.weight" for n in range(6)}
