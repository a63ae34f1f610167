"""Whatever a run or a path contains, a terminal gets no control character."""

from __future__ import annotations

import pytest

from checkrun_format.cli.text import count, escaped, folded, quoted

HOSTILE = "\x1b[31mred\x1b[0m\n\r\t\x07\x9b31m\u202eabc\u200b\udc80"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("user/ads.v2", "user/ads.v2"),
        ("größe 表 🚀", "größe 表 🚀"),
        ("a\nb", "a\\nb"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b", "\\x9b"),
        ("\u202eabc", "\\u202eabc"),
        ("\udc80", "\\udc80"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_nothing_that_is_shown_controls_a_terminal() -> None:
    everything = "".join(map(chr, [*range(0x3000), *range(0xD7F0, 0xE010), *range(0xFE00, 0x10000)]))
    for text in (HOSTILE, everything):
        assert escaped(text).isprintable()
        assert quoted(text).isprintable()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("user", "user"),
        ("🚀/表", "🚀/表"),
        ("", "''"),
        ("two words", "'two words'"),
        ("it's", '"it\'s"'),
        ("back\\slash", "'back\\\\slash'"),
        ("a\nb", "'a\\nb'"),
    ],
)
def test_quoted_tells_where_a_name_begins_and_ends(name: str, shown: str) -> None:
    assert quoted(name) == shown


def test_count() -> None:
    assert [count(None), count(0), count(1234567)] == ["-", "0", "1,234,567"]


def test_folded() -> None:
    """Neighbours in one attempt, or beside the attempts of one number; what stands alone keeps its name."""
    keys = ["x", "y", "1/note", "1/a/zarr.json", "1/a/block-0-0/rows/c/0", "1/b/c/d", "2/m", "2/n", "1/a/z", "tags/t"]
    assert list(folded(keys)) == [
        ("x", 1), ("y", 1), ("1/note", 1), ("1/a/", 2), ("1/b/c/d", 1), ("2/", 2), ("1/a/z", 1), ("tags/t", 1)
    ]  # fmt: skip
    assert list(folded([])) == []
