"""What several property tests draw from: the kit's tables and stores, and ways to cut rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from hypothesis import strategies as st

from checkrun_format.stores import Buffer
from checkrun_format.testing import MemoryStore
from checkrun_format.testing.model import check_raw_changes
from checkrun_format.testing.tables import (
    KEYS,
    Array,
    Fields,
    Ids,
    Kind,
    joined,
    kinds,
    same_bits,
    same_fields,
    seeds,
    taken,
    values,
)

__all__ = [
    "KEYS",
    "Array",
    "Fields",
    "Ids",
    "Kind",
    "MemoryStore",
    "SlowStore",
    "check_raw_changes",
    "cuts",
    "joined",
    "kinds",
    "same_bits",
    "same_fields",
    "seeds",
    "taken",
    "values",
]


class SlowStore(MemoryStore):
    """Takes an object's bytes a while after it was given them."""

    def put(self, key: str, buffers: Iterable[Buffer]) -> int:
        time.sleep(0.003)
        return super().put(key, buffers)


@st.composite
def cuts(draw: st.DrawFn, size: int, most: int) -> list[tuple[int, int]]:
    """Ranges that follow one another and cover 0..size-1; some may be empty."""
    inner = sorted(draw(st.lists(st.integers(0, size), max_size=most - 1)))
    bounds = [0, *inner, size]
    return list(itertools.pairwise(bounds))
