"""JSON for programs: valid whatever is in it, ASCII only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from checkrun_format.cli import document


def test_numbers_that_json_lacks_become_words() -> None:
    given: dict[str, Any] = {
        "a": [float("nan"), float("inf"), -float("inf"), 1.5],
        "b": {"c": True, "d": None, "e": 2**70},
    }
    made = document.finite(given)
    assert made == {"a": ["NaN", "Infinity", "-Infinity", 1.5], "b": {"c": True, "d": None, "e": 2**70}}
    assert given["a"][3] == 1.5


def test_text_is_ascii_and_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"name": "\x1b[31m表\n🚀\udc80\u2028"}
    document.line(value)
    printed = capsys.readouterr().out
    assert printed.isascii() and printed.count("\n") == 1 and "\x1b" not in printed
    assert json.loads(printed) == value


def test_a_number_that_was_forgotten_is_an_error_and_no_document() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        document.encode(float("nan"))


@pytest.mark.parametrize("items", [[], [{"a": 1}], [{"a": 1}, {"b": [2]}]])
def test_a_listing_is_one_document(capsys: pytest.CaptureFixture[str], items: list[Any]) -> None:
    document.listing({"run": "x", "n": None}, "items", iter(items), lambda: {"count": len(items), "end": True})
    assert json.loads(capsys.readouterr().out) == {
        "run": "x",
        "n": None,
        "items": items,
        "count": len(items),
        "end": True,
    }


def test_a_listing_holds_one_item_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []

    def items() -> Iterator[dict[str, int]]:
        for number in range(3):
            printed.append(capsys.readouterr().out)
            yield {"n": number}

    document.listing({}, "items", items(), lambda: {"asked": len(printed)})
    assert [text.count('"n"') for text in printed] == [0, 1, 1]
    whole = "".join(printed) + capsys.readouterr().out
    assert json.loads(whole) == {"items": [{"n": 0}, {"n": 1}, {"n": 2}], "asked": 3}
