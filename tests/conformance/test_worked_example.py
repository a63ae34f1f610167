"""The worked example of FORMAT.md is what the library writes and reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_is_stored(tmp_path: Path) -> None:
    """ZAR-3, PCK-1, DEC-1, EXA-1, BLK-3: bytes of codes, qparams, exact rows, rows and checksums."""
    example = load_script(ROOT / "spec" / "worked_example.py")
    example.write_example(str(tmp_path / "run"))
    text = example.example_text(str(tmp_path / "run"))
    page = (ROOT / "FORMAT.md").read_text("utf-8")
    assert page.count("```text\n") == 1
    assert page.partition("```text\n")[2].partition("```")[0] == text
