"""Text that is safe to show: whatever a run or a path contains, a terminal gets no control character."""

from __future__ import annotations


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
