"""Encoded rows, joined and cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from checkrun_format import blocks
from checkrun_format.blocks import EncodedField, EncodedRows, FieldLayout

LAYOUT = FieldLayout(name="x", dtype="float32", encoding="affine", columns=1, bits=8, qparams="float32")


def encoded(low: int, high: int, exact: Sequence[int], bound: float = 0.0) -> EncodedRows:
    """Rows low..high-1, whose codes and numbers tell which they are; some of them exact, and in the sample."""
    rows = np.arange(low, high)
    index = np.array([row - low for row in exact if low <= row < high], np.int64)
    field = EncodedField(
        layout=LAYOUT,
        arrays={"codes": rows[:, None].astype(np.uint8)},
        exact_index=index,
        exact_values=rows[index][:, None].astype(np.float32),
        error_bound=bound,
        sampled=index,
        l2=np.stack([rows[index], rows[index]], 1).astype(np.float64),
    )
    return EncodedRows(count=high - low, fields=[field], rows=1000 + rows)


@pytest.mark.parametrize("ends", [(0, 1, 12), (0, 4, 4, 8, 12), (0, 3, 11, 12), (0, 0, 12, 12)])
@pytest.mark.parametrize("count", [1, 4, 5, 12, 100])
def test_recut(ends: Sequence[int], count: int) -> None:
    exact = (0, 3, 4, 7, 8, 11)  # at the borders of pieces and of chunks
    pieces = [encoded(low, high, exact, high) for low, high in itertools.pairwise(ends)]
    chunks = list(blocks.recut(iter(pieces), count))
    assert [chunk.count for chunk in chunks] == [min(count, 12 - low) for low in range(0, 12, count)]
    for number, chunk in enumerate(chunks):
        low = number * count
        wanted, (found,) = encoded(low, low + chunk.count, exact), chunk.fields
        assert chunk.rows is not None and wanted.rows is not None
        assert chunk.rows.tolist() == wanted.rows.tolist()
        for name in ("exact_index", "exact_values", "sampled", "l2"):
            assert getattr(found, name).tolist() == getattr(wanted.fields[0], name).tolist()
        assert found.arrays["codes"].tolist() == wanted.fields[0].arrays["codes"].tolist()
        assert found.error_bound >= low + chunk.count


def test_recut_of_nothing() -> None:
    assert list(blocks.recut([], 3)) == []
    assert list(blocks.recut([encoded(5, 5, ())], 3)) == []
