"""What a command is told: which run, which checkpoint, which rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import click

from checkrun_format import layout
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import DamagedError, InvalidInputError
from checkrun_format.run import Run, open_run
from checkrun_format.stores import open_store

_WITH_NUMBER = re.compile(r"(?P<url>.+)@(?P<sequence>[0-9]{1,16})", re.DOTALL)
_SLICE = re.compile(r"(-?[0-9]{1,19})?:(-?[0-9]{1,19})?", re.ASCII)

run_argument = click.argument("run", metavar="RUN", type=click.Path())
address_argument = click.argument("address", metavar="RUN[@SEQ]", type=click.Path())


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
        return Address(url=text, sequence=None)
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
        latest: Checkpoint = run.latest()
    except DamagedError as error:
        found = error.__cause__  # the library's own way out is an argument in Python
        if isinstance(found, DamagedError):
            raise DamagedError(found.place, f"{found.problem}. RUN@SEQ names an older checkpoint") from error
        raise
    return latest


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
