"""Lines for people: plain in a pipe, aligned, never cut off."""

from __future__ import annotations

import io

import pytest

from checkrun_format.cli.page import Column, Page, Sheet, style_of


class Terminal(io.StringIO):
    """A narrow terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    return capsys


def test_a_pipe_gets_plain_text_whatever_the_environment_says(pipe: pytest.CaptureFixture[str]) -> None:
    Page().line("[bold]", ("red :smile:", "bold red"), " x" * 100, "\x1b[0m\n")
    assert pipe.readouterr().out == f"[bold]red :smile:{' x' * 100}\\x1b[0m\\n\n"


def test_a_sheet_aligns_by_what_is_seen(pipe: pytest.CaptureFixture[str]) -> None:
    sheet = Sheet(Page(), [Column("name"), Column("bytes", right=True), Column("note")])
    sheet.rows([["a", "1,234,567", ""], ["表表表", "5", "a note"], ["\x1b", "66", "x"]])
    assert pipe.readouterr().out.splitlines() == [
        "name        bytes  note",
        "a       1,234,567",
        "表表表          5  a note",
        "\\x1b           66  x",
    ]


def test_a_cell_that_is_too_wide_is_printed_whole(pipe: pytest.CaptureFixture[str]) -> None:
    sheet = Sheet(Page(), [Column("n", right=True, width=3), Column("x")])
    sheet.row(["123456789", "y"])
    sheet.row(["1", "y"])
    assert pipe.readouterr().out == "123456789  y\n  1  y\n"


@pytest.mark.parametrize("columns", ["5", "20", "80"])
def test_a_narrow_terminal_loses_no_digit(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    page = Page()
    page.line(("1,234,567,890" * 10, "bold"), " [red]end[/red]")
    assert stream.getvalue() == f"\x1b[1m{'1,234,567,890' * 10}\x1b[0m [red]end[/red]\n"


def test_a_terminal_gets_no_control_characters_but_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("NO_COLOR", "1")
    Page().line("a\x1b]0;title\x07\r\n\u202e", ("b\x9b2J", "red"))
    assert stream.getvalue() == "a\\x1b]0;title\\x07\\r\\n\\u202eb\\x9b2J\n"


def test_all_but_known_kinds_look_bad() -> None:
    assert [style_of(kind) for kind in ("increment", "damaged", "storage", "unsupported_version")] == ["", *["red"] * 3]
