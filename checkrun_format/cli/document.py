"""JSON for programs. ASCII only, so that no name in it can do anything to a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from checkrun_format import manifest
from checkrun_format.cli import stream
from checkrun_format.manifest import Problem

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; all else goes to standard error.")


def encode(value: Any) -> str:
    """A JSON value as one line."""
    return json.dumps(value, allow_nan=False)


def finite(value: Any) -> Any:
    """The same value with the words NaN, Infinity and -Infinity in the place of numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return value


def line(value: Any) -> None:
    """Print one value on one line."""
    stream.write(encode(value) + "\n")


def whole(document: Mapping[str, Any]) -> None:
    """Print a document, indented."""
    stream.write(json.dumps(document, allow_nan=False, indent=2) + "\n")


def listing(
    head: Mapping[str, Any], name: str, items: Iterable[Any], tail: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Print one document that ends in a list, an item a line, without holding all of it.

    Parameters
    ----------
    head : mapping
        Members before the list.
    name : str
        Of the list.
    tail : function
        Gives the members after it, once the items are exhausted.
    """
    stream.write("{" + "".join(f"{_member(key, value)},\n " for key, value in head.items()))
    stream.write(f"{encode(name)}: [")
    for index, item in enumerate(items):
        stream.write(("," if index else "") + "\n  " + encode(item))
    stream.write("]" + "".join(f",\n {_member(key, value)}" for key, value in tail().items()) + "}\n")


def _member(key: str, value: Any) -> str:
    return f"{encode(key)}: {encode(value)}"


def problem(record: Problem) -> dict[str, Any]:
    """A problem as a JSON value."""
    return manifest.as_object(record)
