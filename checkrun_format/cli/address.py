"""What a command is told: which run, which checkpoint, which rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from checkrun_format import layout
from checkrun_format.chain import History
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import DamagedError, InvalidInputError, NotFoundError
from checkrun_format.run import Run, open_run
from checkrun_format.stores import open_store
from checkrun_format.tags import Tags

_WITH_NUMBER = re.compile(r"(?P<url>.+)@(?P<sequence>[0-9]{1,16})", re.DOTALL)
_WITH_TAG = re.compile(r"(?P<url>.+)@(?P<tag>[^@/]+)", re.DOTALL)
_SLICE = re.compile(r"(-?[0-9]{1,19})?:(-?[0-9]{1,19})?", re.ASCII)

run_argument = click.argument("run", metavar="RUN", type=click.Path())
address_argument = click.argument("address", metavar="RUN[@SEQ]", type=click.Path())


def checkpoint_argument(
    name: str, metavar: str, **options: Any
) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """An argument that is the number of a checkpoint, or a tag; `number_of` finds the number of a tag."""
    return click.argument(name, metavar=metavar, type=NameType(), **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A run, and the number of a checkpoint if one is named."""

    url: str
    sequence: int | None


def parse(text: str) -> Address:
    """Tell RUN@SEQ from a run in a folder whose name ends so.

    Where both exist it is refused: `RUN/@SEQ` is always a checkpoint, `NAME@SEQ/` always a folder.

    Raises
    ------
    InvalidInputError
        It may mean either.
    """
    match = _WITH_NUMBER.fullmatch(text)
    if match is None:
        return _parse_tagged(text)
    url, sequence = match["url"], int(match["sequence"])
    is_run, is_checkpoint = _holds_run(text), _holds_run(url)
    if is_run and is_checkpoint:
        raise InvalidInputError(
            f"{text!r} may be checkpoint {sequence} of one run or the folder of another: write "
            f"{url + '/@' + match['sequence']!r} or {text + '/'!r}"
        )
    if is_run or (not is_checkpoint and open_store(text).folders() is not None):
        return Address(url=text, sequence=None)
    return Address(url=url, sequence=sequence)


def _parse_tagged(text: str) -> Address:
    """RUN@TAG, if RUN is a run and the whole is no folder; errors as of `parse`."""
    match = _WITH_TAG.fullmatch(text)
    if match is None or not layout.is_tag(match["tag"]) or not _holds_run(match["url"]):
        return Address(url=text, sequence=None)
    url, tag = match["url"], match["tag"]
    tags = Tags(History(open_store(url)))
    is_folder = open_store(text).folders() is not None
    if is_folder and tags.get(tag) is not None and _holds_run(text):
        raise InvalidInputError(
            f"{text!r} may be a checkpoint of one run by its tag, or the folder of another: write "
            f"{url + '/@' + tag!r} or {text + '/'!r}"
        )
    if is_folder and (tags.get(tag) is None or _holds_run(text)):
        return Address(url=text, sequence=None)
    return Address(url=url, sequence=number_of(tags, tag))


def number_of(tags: Tags, name: int | str) -> int:
    """The number of a checkpoint that is named by its number or by a tag.

    Raises
    ------
    NotFoundError
        There is no such tag.
    """
    number = name if isinstance(name, int) else tags.get(name)
    if number is None:
        known = ", ".join(tags.names()[:5]) or "none"
        raise NotFoundError(f"there is no tag {name!r}; the run has {known}")
    return number


def parse_run(text: str) -> str:
    """The address of a run, for commands that do not take a checkpoint; errors as of `parse`."""
    address = parse(text)
    if address.sequence is not None:
        raise InvalidInputError(f"{text!r} names a checkpoint; this command takes a run: {address.url!r}")
    return address.url


def _holds_run(url: str) -> bool:
    return open_store(url).get(layout.RUN_KEY) is not None


def checkpoint_at(text: str) -> Checkpoint:
    """The checkpoint at RUN[@SEQ], by default the latest."""
    address = parse(text)
    run = open_run(address.url)
    return _latest(run) if address.sequence is None else run[address.sequence]


def _latest(run: Run) -> Checkpoint:
    try:
        return run.latest()
    except DamagedError as error:
        found = error.__cause__  # the library's own way out is an argument in Python
        if isinstance(found, DamagedError):
            raise DamagedError(found.place, f"{found.problem}. RUN@SEQ names an older checkpoint") from error
        raise


class NameType(click.ParamType[int | str]):
    """The number of a checkpoint, or a tag."""

    name = "SEQ"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """A number, or the text of a tag."""
        if isinstance(value, int):
            return value
        if re.fullmatch(r"[0-9]{1,16}", value, re.ASCII):
            return int(value)
        if not layout.is_tag(value):
            self.fail(f"{value!r} is neither the number of a checkpoint nor a tag", param, ctx)
        return str(value)


class SliceType(click.ParamType[slice]):
    """A:B, as in Python."""

    name = "A:B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> slice:
        """A slice."""
        match = value if isinstance(value, slice) else _SLICE.fullmatch(value)
        if match is None:
            self.fail(f"{value!r} is not A:B, such as 0:100, :100 or -100:", param, ctx)
        if isinstance(match, slice):
            return match
        return slice(*(None if bound is None else int(bound) for bound in match.groups()))


class IdsType(click.ParamType[list[int]]):
    """Numbers with commas between."""

    name = "1,2,3"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """A list of numbers, at most 64 bits each."""
        if isinstance(value, list):
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(re.fullmatch(r"-?[0-9]{1,20}", word, re.ASCII) for word in words):
            self.fail(f"{value!r} is not a list of numbers, such as 1,2,3", param, ctx)
        ids = [int(word) for word in words]
        wrong = [number for number in ids if not -(2**63) <= number < 2**64]
        if wrong:
            self.fail(f"{wrong[0]} has more than 64 bits", param, ctx)
        return ids
