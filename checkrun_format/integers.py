"""Whole numbers that a caller gives: of any kind, but no truth value and no span of time."""

from __future__ import annotations

import operator

from checkrun_format.errors import InvalidInputError


def whole(value: object, refusal: str, least: int | None = None, most: int | None = None) -> int:
    """A whole number within bounds: an int, or one of numpy's.

    Raises
    ------
    InvalidInputError
        `refusal`, which names the value and says what is wanted.

    Examples
    --------
    >>> whole(5, "a number from 1 on", least=1)
    5
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # whether it is one is the question
    except TypeError:
        raise InvalidInputError(refusal) from None
    if isinstance(value, bool) or (least is not None and number < least) or (most is not None and number > most):
        raise InvalidInputError(refusal)
    return number
