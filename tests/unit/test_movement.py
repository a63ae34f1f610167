"""Claims, listings and scatters against numpy, compiled and not."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from checkrun_format import quantize
from checkrun_format.movement import Claims, TwiceError, engine, listed, prepare, scatter
from checkrun_format.packing import aligned_empty
from checkrun_format.quantize import engine as quantize_engine
from checkrun_format.rows import Moves, Selection

WANTED = 5000


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    prepare(1 << 40)
    with unittest.mock.patch.object(engine, "_FROM_ROWS", 1 if request.param == "compiled" else 1 << 40):
        yield request.param


def test_the_compiled_way_is_compiled(way: str) -> None:
    assert (engine.kernels(1) is not None) == (way == "compiled")


def some_places(rng: np.random.Generator, start: int, stop: int) -> Selection:
    """A run of places, or some of them."""
    if rng.integers(0, 2):
        return slice(start, stop)
    return np.flatnonzero(rng.random(stop - start) < rng.random()) + start


@pytest.mark.parametrize("seed", range(4))
def test_claims_equal_a_replay(seed: int) -> None:
    """Each row is claimed by the newest layer that has it; of many layers, more than a byte can number."""
    rng = np.random.default_rng(seed)
    claims = Claims(WANTED)
    undecided = np.ones(WANTED, np.bool_)
    for layer in range(300):
        claims.begin()
        middle = int(rng.integers(1, WANTED)) if layer % 100 else WANTED // 2
        for start, stop in ((0, min(middle, 16 * layer)), (middle, middle + (WANTED - middle) // 3)):
            places = some_places(rng, start, max(start, stop))
            kept = claims.claim(places)
            assert np.array_equal(np.ones_like(undecided[places]) if kept is None else kept, undecided[places])
            undecided[places] = False
        deleted = np.sort(rng.choice(WANTED, 3, replace=False))
        claims.decide(deleted)
        undecided[deleted] = False
        assert np.array_equal(claims.undecided(), undecided)
        assert claims.left == np.count_nonzero(undecided)
        if claims.left:
            assert claims.first_undecided() == np.flatnonzero(undecided)[0]
    claims.decide(undecided)
    assert claims.left == 0


@pytest.mark.parametrize("again", [slice(3, 4), np.array([3]), np.array([0, 3]), slice(0, 10)], ids=str)
@pytest.mark.parametrize("before", [False, True])
def test_a_row_that_a_layer_has_twice_is_found(again: Selection, before: bool) -> None:
    """LAY-1: whether a newer layer has it or not."""
    claims = Claims(10)
    if before:
        claims.begin()
        claims.claim(np.array([3]))
    claims.begin()
    claims.claim(np.array([3, 7]))
    with pytest.raises(TwiceError):
        claims.claim(again)


@pytest.mark.parametrize("places", [slice(100, 140), np.arange(0, 80, 2)], ids=["run", "listed"])
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0, None], ids=str)
def test_listing_equals_moves(places: Selection, chance: float | None) -> None:
    rng = np.random.default_rng(3)
    kept = np.arange(40) // 10 == 2 if chance is None else rng.random(40) < chance
    for given in (slice(11, 51), np.arange(11, 91, 2)):
        for moves in (Moves(given, places, kept), Moves(given, places)):
            found = [np.arange(200)[selection].tolist() for selection in listed(moves)]
            assert found == [np.arange(200)[selection].tolist() for selection in (moves.positions, moves.places)]


def plainly(way: str) -> contextlib.AbstractContextManager[object]:
    """Decoding without the kernels, where they are not what is tested."""
    if way == "compiled":
        return contextlib.nullcontext()
    return unittest.mock.patch.object(quantize_engine, "kernels", return_value=None)


def large(rng: np.random.Generator, rows: int, columns: int, offset: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Random bytes as rows that begin `offset` elements after a cache line."""
    kind = np.dtype(dtype)
    memory = random_values(rng, (rows * columns + offset,), kind)
    return memory[offset:].reshape(rows, columns)


@pytest.mark.parametrize("columns", [8, 16, 32, 48, 64])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("bits", range(1, 9))
def test_decoded_rows_are_scattered_as_numpy_does(columns: int, offset: int, bits: int, way: str) -> None:
    """Into a large array, whose rows are whole cache lines or not; from some rows of the codes, and some of those."""
    rng = np.random.default_rng(columns)
    q = quantize.encode(rng.standard_normal((3000, columns), np.float32), bits=bits)
    values = quantize.decode(q)
    out = large(rng, 40_000, columns, offset, np.float32)
    listed_rows, places = np.arange(0, 3000, 2), np.sort(rng.choice(40_000, 1500, replace=False))
    for rows in (listed_rows, slice(1500, 3000)):
        for dest in (places, slice(17_000, 18_500)):
            for kept in (None, rng.random(1500) < 0.4, np.zeros(1500, np.bool_)):
                wanted, which = out.copy(), slice(None) if kept is None else kept
                wanted[np.arange(40_000)[dest][which]] = values[rows][which]
                with plainly(way):
                    quantize.scatter_affine(q.codes, q.qparams, bits, columns, out, rows=rows, dest=dest, kept=kept)
                assert out.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 7, 32, 50])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_decoded_rows_in_a_row_touch_nothing_beside_them(dtype: str, columns: int, offset: int, way: str) -> None:
    """Into a large array, from any element on: lines that are not whole keep what else is in them."""
    rng = np.random.default_rng(columns)
    q = quantize.encode(rng.standard_normal((9000, columns), np.float32), bits=4)
    values = quantize.decode(q)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    out = large(rng, 30_000 + 2**20 // columns, columns, offset, kind)
    for start, stop in ((0, 9000), (5000, 5001), (20_001, 29_001)):
        wanted = out.copy()
        wanted[start:stop] = values[: stop - start].astype(kind)
        with plainly(way):
            rows = slice(0, stop - start)
            quantize.scatter_affine(q.codes, q.qparams, 4, columns, out, rows=rows, dest=slice(start, stop))
        assert out.tobytes() == wanted.tobytes()


DTYPES = ["float32", "float64", "uint8", "int16", "bool", "complex128", "bfloat16", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [None, 1, 3, 16, 64])
@pytest.mark.parametrize("listed", [False, True])
def test_scatter_equals_assignment(dtype: str, columns: int | None, listed: bool) -> None:
    """Into arrays large and small, whole or a few columns of wider ones; nothing beside the rows is touched."""
    rng = np.random.default_rng(columns or 0)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    shape = () if columns is None else (columns,)
    for rows, of, offset in ((7, 20, 0), (500, 40_000, 0), (500, 900, 2)):
        values = random_values(rng, (rows, *shape), kind)
        positions: Selection = (
            np.sort(rng.choice(rows, rows // 2, replace=False)) if listed else slice(2, 2 + rows // 2)
        )
        places = np.sort(rng.choice(of, rows // 2, replace=False))
        wide = random_values(rng, (of, *(n + 2 * offset for n in shape)), kind)
        out = wide if columns is None else wide[:, offset : offset + columns]
        wanted = wide.copy()
        (wanted if columns is None else wanted[:, offset : offset + columns])[places] = values[positions]
        scatter(values, positions, out, places)
        assert wide.tobytes() == wanted.tobytes()


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if dtype == np.bool_:
        return rng.integers(0, 2, shape, np.uint8).view(np.bool_)
    out = aligned_empty(shape, dtype)
    out.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, out.nbytes, np.uint8)
    return out


def test_scatter_casts_and_turns() -> None:
    """What no kernel does: another dtype, negative strides."""
    values, places = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 2, 3])
    out = np.zeros((4, 2), np.float64)
    scatter(values, slice(0, 3), out, places)
    assert out.tolist() == [[0, 1], [0, 0], [2, 3], [4, 5]]
    turned = np.zeros((4, 2), np.float32)[::-1, ::-1]
    scatter(values, np.array([2, 1, 0]), turned, places)
    assert turned.tolist() == [[4, 5], [0, 0], [2, 3], [0, 1]]
    run = np.zeros((4, 2), np.float32)
    scatter(values, slice(1, 3), run, slice(2, 4))
    assert run.tolist() == [[0, 0], [0, 0], [2, 3], [4, 5]]


def test_large_arrays_begin_with_a_cache_line() -> None:
    for shape in ((1000, 1000), (3,), (0, 4)):
        array = aligned_empty(shape, np.dtype(np.float32))
        assert array.shape == shape
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
    assert all(aligned_empty((1 << 20, n), np.dtype(np.float32)).ctypes.data % 64 == 0 for n in range(1, 5))
