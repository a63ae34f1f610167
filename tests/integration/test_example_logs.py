"""The logs of clicks that `examples/train_dlrm.py` reads, in the formats that MovieLens and Criteo come in."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import checkrun_format as crf

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/train_dlrm.py"

RATINGS = [("196", "242", "3"), ("186", "302", "4"), ("22", "377", "4.5"), ("244", "302", "0.5"), ("166", "346", "5")]
MOVIELENS = {
    "ml-100k/u.data": ("", "\t"),
    "ml-1m/ratings.dat": ("", "::"),
    "ml-25m/ratings.csv": ("userId,movieId,rating,timestamp\n", ","),
    "recbole's ml-100k.inter": ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n", "\t"),
}
CRITEO_NUMBERS = [["1", "", "-2", "16", *["81"] * 9], ["5", "3", "0", "20000", *[""] * 9]]
CRITEO_CATEGORIES = [["68fd1e64", "", *["fb936136"] * 24], ["287e684f", "0a519c5c", *[""] * 24]]
CRITEO = {
    "train.txt": ("", "\t"),
    "with a header": (
        ",".join(["label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]) + "\n",
        ",",
    ),
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    return importlib.import_module(EXAMPLE.stem)


def hashed(names: list[str]) -> list[int]:
    return [zlib.crc32(name.encode()) % 50_000 for name in names]


@pytest.mark.parametrize("name", MOVIELENS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_movielens(tmp_path: Path, example: ModuleType, name: str, end: str) -> None:
    header, separator = MOVIELENS[name]
    lines = [separator.join([*rating, "881250949"]) + end for rating in RATINGS]
    (tmp_path / "log").write_bytes((header + "".join(lines)).encode())
    log = example.FileLog(tmp_path / "log", batch_size=3)
    assert (log.rows, log.numbers) == ((50_000, 50_000), 1)
    first, second = log
    assert first.categories.tolist() == [hashed([user, film]) for user, film, _ in RATINGS[:3]]
    assert second.categories.tolist() == [hashed([user, film]) for user, film, _ in RATINGS[3:]]
    assert (first.clicks.tolist(), second.clicks.tolist()) == ([0, 1, 1], [0, 1])
    assert (first.ids.tolist(), second.ids.tolist()) == ([0, 1, 2], [3, 4])
    assert torch.equal(first.numbers, torch.zeros(3, 1))


@pytest.mark.parametrize("name", CRITEO)
def test_criteo(tmp_path: Path, example: ModuleType, name: str) -> None:
    header, separator = CRITEO[name]
    lines = [
        separator.join([label, *numbers, *categories]) + "\n"
        for label, numbers, categories in zip("01", CRITEO_NUMBERS, CRITEO_CATEGORIES, strict=True)
    ]
    (tmp_path / "log").write_text(header + "".join(lines))
    log = example.FileLog(tmp_path / "log", batch_size=8)
    assert (log.rows, log.numbers) == ((50_000,) * 26, 13)
    (batch,) = log
    assert batch.categories.tolist() == [hashed(categories) for categories in CRITEO_CATEGORIES]
    assert batch.clicks.tolist() == [0, 1]
    expected = torch.tensor([[1, 0, 0, 2, *[3] * 9], [5**0.25, 3**0.25, 0, 10, *[0] * 9]])
    assert torch.allclose(batch.numbers, expected, rtol=1e-6, atol=0)
    assert example.Trainer(log.rows, log.numbers).train(batch) > 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has 1 fields: Criteo's logs have 40"),
        ("1\t2\t3\t4\t5\n", "has 5 fields: Criteo's logs have 40"),
        ("1,2,3,4\n1,2,3\n", "has a line of 3 fields, not 4: '1,2,3"),
    ],
)
def test_other_files(tmp_path: Path, example: ModuleType, text: str, problem: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=problem):
        list(example.FileLog(tmp_path / "log", batch_size=2))


def test_it_trains_to_the_end_of_a_file(tmp_path: Path) -> None:
    log, run, trained = tmp_path / "ratings.dat", tmp_path / "run", tmp_path / "trained"
    log.write_text("".join(f"{n % 7}::{n % 11}::{n % 5 + 1}::{n}\n" for n in range(100)))
    options: list[str | Path] = ["--log", log, "--batch-size", "16", "--every", "3", "--trained", trained]
    done = subprocess.run(
        [sys.executable, EXAMPLE, run, *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step 7: done" in done.stdout
    steps = [line.split() for line in trained.read_text().splitlines()]
    assert [int(sample) for _, *samples in steps for sample in samples] == list(range(100))
    latest = crf.open_run(run).latest()
    assert latest.step == 7
    assert len(latest.table("tables.1.weight").read()["weight"]) == 50_000
