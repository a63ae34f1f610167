"""Every requirement of FORMAT.md is cited by a test, and every citation is of a requirement that exists."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]

INFORMATIVE_OR_UNTESTABLE = {
    "CHK-2": "what readers should check: each number that it names is cited",
    "CHK-3": "what readers may leave out",
    "DEC-4": "informative: advice to writers of float32 qparams",
    "VER-3": "reserves names for later versions",
    "ZAR-6": "informative: what writers choose",
}


@functools.cache
def defined() -> tuple[str, ...]:
    """The numbers of the requirements as FORMAT.md defines them, in its order."""
    return tuple(re.findall(r"\*\*([A-Z]{3}-[0-9]+)\*\*", (ROOT / "FORMAT.md").read_text("utf-8")))


def cited(*folders: str) -> dict[str, set[str]]:
    """Each number cited in a file of these folders, whatever defines it, and the files that cite it."""
    found: dict[str, set[str]] = {}
    prefixes = "|".join(sorted({number[:3] for number in defined()}))
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if path != Path(__file__):
            for number in re.findall(rf"\b(?:{prefixes})-[0-9]+\b", path.read_text("utf-8")):
                found.setdefault(number, set()).add(str(path.relative_to(ROOT)))
    return found


def test_every_number_is_defined_once() -> None:
    assert len(defined()) > 50
    assert [number for number, times in Counter(defined()).items() if times > 1] == []


def test_numbers_count_up_from_one() -> None:
    for prefix in {number[:3] for number in defined()}:
        mine = [int(number[4:]) for number in defined() if number.startswith(prefix)]
        assert mine == list(range(1, len(mine) + 1)), prefix


def test_every_requirement_is_cited_by_a_test() -> None:
    claimed = cited("tests").keys() | INFORMATIVE_OR_UNTESTABLE.keys()
    missing = [number for number in defined() if number not in claimed]
    assert not missing, f"no test cites {', '.join(missing)}"


def test_every_exception_is_a_requirement() -> None:
    assert set(INFORMATIVE_OR_UNTESTABLE) <= set(defined())


def test_every_citation_is_of_a_requirement() -> None:
    citations = cited("checkrun_format", "tests", "spec", "benchmarks")
    assert citations
    assert {number: files for number, files in citations.items() if number not in defined()} == {}
