"""What a command is told: RUN[@SEQ], A:B, 1,2,3."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

import checkrun_format as crf
from checkrun_format.cli.address import Address, IdsType, SliceType, parse, parse_run
from checkrun_format.errors import InvalidInputError


def make_run(folder: Path) -> str:
    crf.open_run(folder, mode="a", durable=False)
    return str(folder)


def test_a_run_without_a_number(tmp_path: Path) -> None:
    assert parse(str(tmp_path)) == Address(url=str(tmp_path), sequence=None)


@pytest.mark.parametrize(
    ("text", "sequence"), [("@3", 3), ("@00000003", 3), ("@0", 0), ("@9007199254740991", 2**53 - 1)]
)
def test_a_number_of_a_run(tmp_path: Path, text: str, sequence: int) -> None:
    url = make_run(tmp_path / "run")
    assert parse(url + text) == Address(url=url, sequence=sequence)


@pytest.mark.parametrize("text", ["@", "@X", "@-1", "@³", "@99999999999999999", "@3/"])
def test_what_is_no_number_belongs_to_the_name(tmp_path: Path, text: str) -> None:
    url = make_run(tmp_path / "run")
    assert parse(url + text) == Address(url=url + text, sequence=None)


def test_the_last_number_counts(tmp_path: Path) -> None:
    url = make_run(tmp_path / "run@7")
    assert parse(f"{url}@3") == Address(url=url, sequence=3)


def test_a_folder_that_is_named_so(tmp_path: Path) -> None:
    url = make_run(tmp_path / "run@3")
    assert parse(url) == Address(url=url, sequence=None)


def test_a_folder_that_is_named_so_and_holds_no_run(tmp_path: Path) -> None:
    (tmp_path / "run@3").mkdir()
    assert parse(f"{tmp_path}/run@3") == Address(url=f"{tmp_path}/run@3", sequence=None)
    url = make_run(tmp_path / "run")
    assert parse(f"{tmp_path}/run@3") == Address(url=url, sequence=3)


def test_where_both_exist_it_is_refused_and_there_is_a_way_to_say_either(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "run@3")
    with pytest.raises(InvalidInputError) as caught:
        parse(other)
    assert f"{run}/@3" in str(caught.value) and f"{other}/" in str(caught.value)
    assert parse(f"{run}/@3") == Address(url=f"{run}/", sequence=3)
    assert parse(f"{other}/") == Address(url=f"{other}/", sequence=None)


def test_a_file_url(tmp_path: Path) -> None:
    url = f"file://{make_run(tmp_path / 'run')}"
    assert parse(f"{url}@12") == Address(url=url, sequence=12)


def test_a_command_of_runs_takes_no_checkpoint(tmp_path: Path) -> None:
    url = make_run(tmp_path / "run")
    assert parse_run(url) == url
    with pytest.raises(InvalidInputError, match="names a checkpoint"):
        parse_run(f"{url}@1")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("0:10", slice(0, 10)),
        (":5", slice(None, 5)),
        ("-5:", slice(-5, None)),
        (":", slice(None)),
        ("7:-2", slice(7, -2)),
    ],
)
def test_slices(text: str, meant: slice) -> None:
    assert SliceType().convert(text, None, None) == meant


@pytest.mark.parametrize("text", ["", "5", "1:2:3", "a:b", "1,2", "1.0:2", "²:3", "9" * 5000 + ":"])
def test_slices_that_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not A:B"):
        SliceType().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("5", [5]), ("3,1, 3", [3, 1, 3]), ("-9223372036854775808,18446744073709551615", [-(2**63), 2**64 - 1])],
)
def test_ids(text: str, meant: list[int]) -> None:
    assert IdsType().convert(text, None, None) == meant


@pytest.mark.parametrize("text", ["", "1,", "a", "1.5", "0x10", "1 2", "18446744073709551616", "9" * 5000])
def test_ids_that_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        IdsType().convert(text, None, None)


def make_tagged(folder: Path) -> str:
    run = crf.open_run(folder, mode="a", durable=False)
    for _ in range(2):
        run.save(crf.State())
    run.tag("best", 1)
    run.tag("v1.0", 2)
    return str(folder)


@pytest.mark.parametrize(("text", "sequence"), [("@best", 1), ("@v1.0", 2), ("/@best", 1)])
def test_a_tag_of_a_run(tmp_path: Path, text: str, sequence: int) -> None:
    """TAG-1."""
    url = make_tagged(tmp_path / "run")
    assert parse(url + text) == Address(url=url + "/" * text.startswith("/"), sequence=sequence)


@pytest.mark.parametrize("tag", ["worst", "1.0"])
def test_a_tag_that_is_not_there(tmp_path: Path, tag: str) -> None:
    url = make_tagged(tmp_path / "run")
    with pytest.raises(crf.NotFoundError, match=f"no tag '{tag}'; the run has best, v1.0"):
        parse(f"{url}@{tag}")
    assert parse(f"{tmp_path}/nothing@{tag}") == Address(url=f"{tmp_path}/nothing@{tag}", sequence=None)


def test_a_tag_and_a_folder_of_the_same_name(tmp_path: Path) -> None:
    run = make_tagged(tmp_path / "run")
    (tmp_path / "run@best").mkdir()
    assert parse(f"{run}@best") == Address(url=run, sequence=1)
    other = make_run(tmp_path / "run@other")
    assert parse(other) == Address(url=other, sequence=None)
    both = make_run(tmp_path / "run@best")
    with pytest.raises(InvalidInputError) as caught:
        parse(both)
    assert f"{run}/@best" in str(caught.value) and f"{both}/" in str(caught.value)
    assert parse(f"{run}/@best") == Address(url=f"{run}/", sequence=1)
    assert parse(f"{both}/") == Address(url=f"{both}/", sequence=None)
