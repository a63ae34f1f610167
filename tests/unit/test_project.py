"""The project's own files agree with each other, and what README shows runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from checkrun_format import errors
from checkrun_format.versions import __version__

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "FORMAT.md")


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def commands() -> dict[str, str]:
    """README's commands by name."""
    return dict(re.findall(r"^<!-- command: (\w+) -->\n```bash\n(.+)\n```$", text("README.md"), re.MULTILINE))


def project() -> dict[str, object]:
    found = tomllib.loads(text("pyproject.toml"))["project"]
    assert isinstance(found, dict)
    return found


def pins() -> dict[str, str]:
    """The pinned version of each package of constraints.txt, by its normalized name."""
    lines = [line for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    split = [re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9a-z.]*)", line) for line in lines]
    assert all(split), [line for line, match in zip(lines, split, strict=True) if not match]
    return {normalized(match[1]): match[2] for match in split if match}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_readme_has_the_two_commands() -> None:
    assert list(commands()) == ["demo", "test"]
    assert commands()["demo"] == "pip install -c constraints.txt . && checkrun demo"
    assert commands()["test"] == 'pip install -c constraints.txt -e ".[test]" && pytest'


def test_ci_runs_the_commands_of_readme() -> None:
    printed = subprocess.run(
        ["bash", ROOT / ".ci/run", "commands"], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert printed.stdout.splitlines() == list(commands().values())
    assert not [command for command in commands().values() if command in text(".ci/run")]


def test_ci_refuses_a_readme_without_its_commands(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text(text(".ci/run"))
    (tmp_path / "README.md").write_text(text("README.md").replace("command: test", "command: tests"))
    done = subprocess.run(["bash", tmp_path / ".ci/run", "commands"], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "<!-- command: test -->" in done.stderr
    assert not done.stdout


def test_changelog_starts_with_this_version() -> None:
    newest = text("CHANGELOG.md").split("\n## ")[1]
    assert newest.startswith(f"[{__version__}] - ")
    assert re.findall(r"^### (.+)$", newest, re.MULTILINE) == ["Format", "Library"]


def test_constraints_pin_every_direct_dependency() -> None:
    extras = project()["optional-dependencies"]
    direct = project()["dependencies"]
    assert isinstance(extras, dict)
    assert isinstance(direct, list)
    assert direct
    wanted = {
        re.match(r"[A-Za-z0-9._-]+", line) for line in [*direct, *(line for one in extras.values() for line in one)]
    }
    assert {normalized(match[0]) for match in wanted if match} <= set(pins())
    assert pins()["torch"] == "2.13.0"


@pytest.mark.parametrize("page", PAGES)
def test_links_between_files_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text(page))
    assert links or page != "README.md"
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_within_a_page_lead_somewhere(page: str) -> None:
    headings = re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)
    places = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(#([^)]+)\)", text(page))
    assert links or page != "README.md"
    assert set(links) <= places


def test_every_folder_of_tests_is_described() -> None:
    described = set(re.findall(r"^\| `tests/(\w+)/`", text("CONTRIBUTING.md"), re.MULTILINE))
    present = {path.parent.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/*/**/test_*.py")}
    assert present
    assert present <= described


def test_the_code_that_readme_shows_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", text("README.md"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    check = """
fields = first.tables["user"].fields
assert decoded.dtype == np.float32
assert np.array_equal(decoded, fields["weight"])
assert np.array_equal(values, fields["sum"])
"""
    program = tmp_path / "readme.py"
    program.write_text("\n".join([*blocks, check]))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = []
    for _ in range(2):  # as a trainer that is started again
        done = subprocess.run(
            [sys.executable, program], cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    assert printed[0][0] == "user [] [  3   5 100 200] (4, 64) 1000"
    assert [line.split()[0] for line in printed[0][1:5]] == ["1", "2", "3", "4"]
    assert [line.split()[0] for line in printed[1][1:9]] == [str(number) for number in range(1, 9)]
    assert printed[0][5] == "user [  3   5 100 200] (4, 32) float16"


def rows_below(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table that begins with a heading."""
    table = text(page).partition(heading)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_errors_of_encoders_are_those_of_the_results() -> None:
    """What README says of each encoder, against the result file that it names."""
    (table,) = json.loads(text("benchmarks/results/encoders.json"))["tables"]
    errors = {(r["encoder"], r["bits"]): r["l2_error"] for r in table["results"]}
    rows = rows_below("README.md", "| encoder | what it does |")
    assert {row[0].strip("`") for row in rows} == {name for name, _ in errors}
    for name, _, shown in rows:
        for bits, figure in zip((2, 3, 4, 8), shown.split(), strict=True):
            error = errors.get((name.strip("`"), bits))
            assert (figure == "-") is (error is None)
            assert error is None or abs(error / errors["minmax", bits] - float(figure)) <= 0.0051


def test_the_bytes_of_policies_are_those_of_the_results() -> None:
    """What benchmarks/README.md says of the paper's modification trace."""
    outcomes = json.loads(text("benchmarks/results/bench_policies.json"))["outcomes"]
    full = {o["sums"]: o for o in outcomes if o["policy"] == "full"}
    found = {(o["policy"], str(o["bits"]), "lossless" if o["sums"] else "no"): o for o in outcomes}
    rows = rows_below("benchmarks/README.md", "| policy | bits | row-wise sums |")
    assert {tuple(row[:3]) for row in rows} == {key for key in found if key[0] != "full"}
    for policy, bits, sums, written, target, kept, target_kept in rows:
        outcome = found[policy, bits, sums]
        for name, shown, wanted in (("written", written, target), ("kept", kept, target_kept)):
            ratio = full[outcome["sums"]][name] / outcome[name]
            digits = len(shown.rstrip("x").partition(".")[2])
            assert round(ratio, digits) == float(shown.rstrip("x"))
            assert not wanted or ratio >= float(wanted.partition("x")[0])
    index = {round(o["index_bytes_per_row"], 2) for o in outcomes if o["index_bytes_per_row"]}
    assert index == {0.91}
    assert "takes 0.91 bytes a row" in text("benchmarks/README.md")


def test_every_kind_of_error_is_told() -> None:
    """In section 10 of the format, and in the tree that the module draws."""
    found = {name: kind for name, kind in vars(errors).items() if name.endswith("Error") and name != "CheckrunError"}
    kinds = {name: kind.kind for name, kind in found.items()}
    assert len(kinds) >= 20
    section = text("FORMAT.md").partition("## 10. Errors")[2].partition("\n## ")[0]
    rows = "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows)) == set(kinds.values())
    drawn = re.findall(r"^[│├└─ ]+(\w+) +(\w+)", str(errors.__doc__), re.MULTILINE)
    assert dict(drawn) == kinds
