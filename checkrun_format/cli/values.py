"""Values of arrays as cells for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format.cli import document
from checkrun_format.cli.page import Column, Page, Sheet

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Field name to an array (n, columns) or (n,)."""

_SAMPLE = 100
"""Rows that settle how wide columns are."""


def plain(values: npt.NDArray[Any]) -> Any:
    """An array as JSON values."""
    if values.dtype.kind in "biu":
        return values.tolist()
    if values.dtype.kind == "c":
        return plain(np.stack([values.real, values.imag], axis=-1))
    if values.dtype.kind in "mM":
        return _times(values)
    wide = values.astype(np.float64)
    return wide.tolist() if np.isfinite(wide).all() else document.finite(wide.tolist())


def _times(values: npt.NDArray[Any]) -> Any:
    """Times as ISO 8601, spans as counts of their unit, null for what is no time."""
    told = (np.datetime_as_string(values) if values.dtype.kind == "M" else values.astype(np.int64)).astype(object)
    told[np.isnat(values)] = None
    return told.tolist()


def objects(key: str, ids: Sequence[int], arrays: Arrays) -> Iterator[dict[str, Any]]:
    """A JSON object for each row: its number under `key`, and its fields."""
    columns = {name: plain(array) for name, array in arrays.items()}
    for place, number in enumerate(ids):
        yield {key: number, "fields": {name: values[place] for name, values in columns.items()}}


class Grid:
    """Rows of values, printed as they come.

    Parameters
    ----------
    page : Page
    key : str
        Title of the first column: `row` or `key`.
    first_column : mapping
        For each field that is not read from its first column on, where it starts.
    """

    def __init__(self, page: Page, key: str, first_column: Mapping[str, int] | None = None) -> None:
        self._page = page
        self._key = key
        self._first_column = first_column or {}
        self._sheet: Sheet | None = None

    def add(self, ids: Sequence[int], arrays: Arrays) -> None:
        """Print some rows; the first ones settle the columns."""
        if self._sheet is None:
            titles = [self._key, *(title for name, array in arrays.items() for title in self._titles(name, array))]
            self._sheet = Sheet(self._page, [Column(title, right=True) for title in titles])
            self._sheet.fit(_cells(ids[:_SAMPLE], arrays))
            self._sheet.header()
        for row in _cells(ids, arrays):
            self._sheet.row(row)

    def _titles(self, name: str, array: npt.NDArray[Any]) -> list[str]:
        start = self._first_column.get(name, 0)
        return [name] if array.ndim == 1 else [f"{name}[{start + column}]" for column in range(array.shape[1])]


def _cells(ids: Sequence[int], arrays: Arrays) -> Iterator[list[str]]:
    wide = [array if array.ndim == 2 else array[:, None] for array in arrays.values()]
    for place, number in enumerate(ids):
        yield [str(number), *(str(value) for array in wide for value in array[place])]
