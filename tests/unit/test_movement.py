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
from checkrun_format.movement import Claims, TwiceError, aligned_empty, engine, prepare, scatter, within
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
@pytest.mark.parametrize("step", [1, 7, 100])
def test_listing_equals_moves(places: Selection, chance: float | None, step: int) -> None:
    rng = np.random.default_rng(3)
    kept = np.arange(40) // 10 == 2 if chance is None else rng.random(40) < chance
    for given in (slice(11, 51), np.arange(11, 91, 2)):
        moves, found = Moves(given, places, kept), []
        for low in range(0, 100, step):
            some, to = within(moves, low, low + step)
            numbers = [np.arange(100_000)[selection].tolist() for selection in (some, to)]
            wanted = [np.arange(100_000)[selection].tolist() for selection in moves.within(low, low + step)]
            assert numbers == wanted
            found += numbers[1]
        assert found == np.arange(100_000)[moves.places].tolist()


@pytest.mark.parametrize("columns", [8, 16, 32, 48, 64])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("bits", [4, 3])
def test_decoded_rows_are_scattered_as_numpy_does(columns: int, offset: int, bits: int, way: str) -> None:
    """Into a large array, whose rows are whole cache lines or not; and from some rows of the codes."""
    rng = np.random.default_rng(columns)
    q = quantize.encode(rng.random((500, columns), np.float32), bits=bits)
    memory = aligned_empty((30_000 * columns + offset,), np.dtype(np.float32))
    memory[:] = -1
    out = memory[offset:].reshape(30_000, columns)
    positions, places = np.arange(0, 500, 2), np.sort(rng.choice(30_000, 250, replace=False))
    wanted = np.full_like(out, -1)
    wanted[places] = quantize.decode(q)[positions]
    with (
        contextlib.nullcontext()
        if way == "compiled"
        else unittest.mock.patch.object(quantize_engine, "kernels", return_value=None)
    ):
        quantize.scatter_affine(q.codes, q.qparams, bits, columns, out, rows=positions, dest=places)
        assert np.array_equal(out, wanted)
        quantize.scatter_affine(q.codes, q.qparams, bits, columns, out, rows=slice(250, 500), dest=places)
    wanted[places] = quantize.decode(q)[250:]
    assert np.array_equal(out, wanted)


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
