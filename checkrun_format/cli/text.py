"""Text that is safe to show: whatever a run or a path contains, a terminal gets no control character."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator


def escaped(text: str) -> str:
    r"""The text with escapes such as `\x1b` in the place of characters that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(name: str) -> str:
    """A name as it is if it stands out as one word, else in quotes, with escapes."""
    plain = name.isprintable() and name and not set(name) & set(" '\"\\")
    return name if plain else repr(name)


def count(number: int | None) -> str:
    """A number with its thousands apart; `-` for none."""
    return "-" if number is None else f"{number:,}"


def folded(keys: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Keys of objects, those in a row that lie in one attempt, or beside the attempts of one number, as its folder.

    Yields
    ------
    place : str
        The key of a single object; else the folder, with a slash at its end.
    objects : int
        How many there are.
    """
    for folder, found in itertools.groupby(keys, _folder):
        together = list(found)
        yield (together[0] if len(together) == 1 else folder), len(together)


def _folder(key: str) -> str:
    """Where an object lies, no deeper than an attempt; the object itself if it is in no folder."""
    folders = key.split("/")[:-1][:2]
    return "/".join([*folders, ""]) if folders else key
