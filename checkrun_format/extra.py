"""The trainer's own small state: any JSON value."""

from __future__ import annotations

import json
import math
from typing import Any

from checkrun_format import layout
from checkrun_format.errors import InvalidInputError


def extra_json(extra: object) -> bytes:
    """`extra` as UTF-8 JSON.

    Raises
    ------
    InvalidInputError
        Naming the place of the first value that JSON cannot carry.
    """
    _check_json(extra, "extra", 0)
    try:
        return layout.to_json(extra)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"extra is not JSON: {error}") from error


def _check_json(value: object, place: str, depth: int) -> None:
    if depth > 200:
        raise InvalidInputError(f"{place} is nested deeper than 200 levels, or contains itself")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InvalidInputError(f"{place}: key {key!r} is not text; JSON objects have text keys only")
            _check_json(inner, f"{place}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_json(inner, f"{place}[{index}]", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidInputError(f"{place} is {value}, which JSON cannot carry")
    elif not isinstance(value, str | int | float | None):
        advice = (
            "blobs= takes bytes" if isinstance(value, bytes | bytearray) else "convert it: int(), float(), tolist()"
        )
        raise InvalidInputError(f"{place} is of type {type(value).__name__}, which JSON cannot carry; {advice}")


def parse_json(data: bytes) -> Any:
    """The inverse of `extra_json`."""
    return json.loads(data)
