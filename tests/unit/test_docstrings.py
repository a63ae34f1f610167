"""The examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIP = doctest.OPTIONFLAGS_BY_NAME["SKIP"]


def modules() -> list[str]:
    """The modules that have an example."""
    paths = [path for path in sorted((ROOT / "checkrun_format").rglob("*.py")) if ">>> " in path.read_text("utf-8")]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def test_there_are_examples() -> None:
    assert len(modules()) >= 10


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert found
    for test in found:
        told: list[str] = []
        results = doctest.DocTestRunner(verbose=False).run(test, out=told.append)
        assert results.failed == 0, "".join(told)
        skipped = sum(example.options.get(SKIP, False) for example in test.examples)
        assert results.attempted == len(test.examples) - skipped > 0 or skipped == len(test.examples)
