"""What an encoder makes of the rows of a field (FORMAT.md sections 6 and 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.packing import checked_bits, checked_columns, packed_width, row_pieces

QPARAMS_DTYPES = ("float16", "float32")
"""Dtypes in which scale and bias may be stored (BLK-1)."""

PRECISIONS = {"float16": 2**11, "bfloat16": 2**8}
"""The reciprocal of the relative error that RAW-1 allows, by the dtype of the stored values."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """Rows of one field as codes, qparams and exact rows.

    Attributes
    ----------
    codes : uint8 array (n, packed_width(columns, bits))
        Packed codes (PCK-1); 0 in exact rows.
    qparams : float16 or float32 array (n, 2)
        Scale and bias of each row; NaN in exact rows (EXA-1).
    exact_index : int64 array (m,)
        Positions of the exact rows, strictly increasing (BLK-5).
    exact_values : array (m, columns) of `dtype`
        Their values, bit for bit.
    bits : int
        Width of a code, 1 to 8.
    columns : int
        Values in a row.
    dtype : str
        Logical dtype of the values: float16, bfloat16, float32 or float64.
    encoder : str
        Name of the encoder.
    error_bound : float
        Upper bound of abs(decoded - original) over all values; 0.0 if all rows are exact.

    Raises
    ------
    InvalidInputError
        If shapes or dtypes contradict one another. The contents are not looked at.

    Examples
    --------
    >>> from checkrun_format.quantize import encode
    >>> q = encode(np.array([[0, 1, 3], [0, 1, np.inf]], np.float32), bits=2)
    >>> q.codes.tolist(), q.qparams.tolist(), q.exact_index.tolist()
    ([[52], [0]], [[1.0, 0.0], [nan, nan]], [1])
    """

    codes: npt.NDArray[np.uint8]
    qparams: Array
    exact_index: npt.NDArray[np.int64]
    exact_values: Array
    bits: int
    columns: int
    dtype: str
    encoder: str
    error_bound: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", checked_bits(self.bits))
        object.__setattr__(self, "columns", checked_columns(self.columns))
        wrong = [
            f"{name} is {array.dtype} {array.shape}, not {' or '.join(allowed)} {shape}"
            for name, array, allowed, shape in self._wanted()
            if array.shape != shape or array.dtype.name not in allowed
        ]
        if wrong:
            raise InvalidInputError("; ".join(wrong))

    @property
    def rows(self) -> int:
        """Number of rows, exact ones included."""
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        """Bytes of the four arrays."""
        return self.codes.nbytes + self.qparams.nbytes + self.exact_index.nbytes + self.exact_values.nbytes

    def cut(self, low: int, high: int) -> Quantized:
        """Rows low..high-1, as views."""
        first, last = np.searchsorted(self.exact_index, [low, high])
        return dataclasses.replace(
            self,
            codes=self.codes[low:high],
            qparams=self.qparams[low:high],
            exact_index=self.exact_index[first:last] - low,
            exact_values=self.exact_values[first:last],
        )

    def _wanted(self) -> list[tuple[str, Array, tuple[str, ...], tuple[int, ...]]]:
        n, m = len(self.codes), len(self.exact_index)
        if self.dtype not in dtypes.FLOATING:
            raise InvalidInputError(f"dtype must be one of {', '.join(sorted(dtypes.FLOATING))}, not {self.dtype!r}")
        return [
            ("codes", self.codes, ("uint8",), (n, packed_width(self.columns, self.bits))),
            ("qparams", self.qparams, QPARAMS_DTYPES, (n, 2)),
            ("exact_index", self.exact_index, ("int64",), (m,)),
            ("exact_values", self.exact_values, (self.dtype,), (m, self.columns)),
        ]


def join(pieces: Sequence[Quantized]) -> Quantized:
    """Pieces that were encoded alike as one, in their order."""
    starts = np.cumsum([0, *(piece.rows for piece in pieces)])
    return dataclasses.replace(
        pieces[0],
        codes=np.concatenate([piece.codes for piece in pieces]),
        qparams=np.concatenate([piece.qparams for piece in pieces]),
        exact_index=np.concatenate([p.exact_index + start for p, start in zip(pieces, starts, strict=False)]),
        exact_values=np.concatenate([piece.exact_values for piece in pieces]),
        error_bound=max(piece.error_bound for piece in pieces),
    )


def nan_rows(marks: Array, count: int) -> npt.NDArray[np.int64]:
    """Positions of the NaN in `marks` (n,), of which there are `count`: the exact rows, by EXA-1 and RAW-1."""
    index = np.empty(count, np.int64)
    found = 0
    for piece in row_pieces(len(marks) if count else 0, 1):
        here = np.flatnonzero(np.isnan(marks[piece]))
        index[found : found + len(here)] = here
        index[found : found + len(here)] += piece.start
        found += len(here)
    return index
