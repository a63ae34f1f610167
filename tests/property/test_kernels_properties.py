"""The compiled kernels give the bits of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkrun_format.packing import pack
from checkrun_format.quantize import Quantized, decode_affine, encode, engine
from tests.property.test_quantize_properties import NUMPY, qparams_dtypes, tables, widths

Array = npt.NDArray[Any]
DTYPES = sorted(NUMPY)


@contextmanager
def compiled(*, yes: bool) -> Iterator[None]:
    kernels = engine.kernels(engine.COMPILED_FROM)
    assert kernels is not None, "numba is a dependency"
    with mock.patch.object(engine, "kernels", return_value=kernels if yes else None):
        yield


def both(values: Array, bits: int, encoder: str, qparams_dtype: str | None) -> tuple[Quantized, Quantized]:
    found = []
    for yes in (False, True):
        with compiled(yes=yes):
            found.append(encode(values, bits, encoder, qparams_dtype=qparams_dtype))
    return found[0], found[1]


def bits_of(quantized: Quantized) -> tuple[Any, ...]:
    arrays = (quantized.codes, quantized.qparams, quantized.exact_index, quantized.exact_values)
    return (*(array.tobytes() for array in arrays), quantized.qparams.dtype, quantized.error_bound)


class TestEncoding:
    @pytest.mark.parametrize("encoder", ["minmax", "symmetric", "refine", "greedy"])
    @given(values=tables(), bits=widths, dtype=qparams_dtypes)
    def test_same_bits(self, encoder: str, values: Array, bits: int, dtype: str | None) -> None:
        reference, fast = both(values, bits, encoder, dtype)
        assert bits_of(fast) == bits_of(reference)

    @given(tables(), widths, st.booleans(), st.booleans())
    def test_strides_and_read_only(self, values: Array, bits: int, turned: bool, swapped: bool) -> None:
        layout = values[::-1, ::-1] if turned else np.repeat(np.asfortranarray(values), 2, 1)[:, ::2]
        layout = layout.astype(layout.dtype.newbyteorder("S")) if swapped and layout.dtype.kind == "f" else layout
        layout.flags.writeable = False
        reference, fast = both(layout, bits, "minmax", None)
        assert bits_of(fast) == bits_of(reference)


class TestDecoding:
    """float32(code) * scale, rounded, + bias, rounded (DEC-1), for any qparams whatever; then the cast (DEC-2)."""

    @given(st.data())
    def test_any_qparams_and_destination(self, data: st.DataObject) -> None:
        bits, columns, rows = data.draw(widths), data.draw(st.integers(1, 130)), data.draw(st.integers(0, 9))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        codes = pack(rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8), bits)
        dtype = data.draw(st.sampled_from(["float16", "float32"]))
        noise = rng.integers(0, 256, (rows, 2 * np.dtype(dtype).itemsize), dtype=np.uint8)
        picked = data.draw(st.one_of(st.none(), st.lists(st.integers(0, rows - 1), max_size=12))) if rows else None
        positions = None if picked is None else np.array(picked, np.int64)
        count = rows if positions is None else len(positions)
        dest = rng.permutation(count + 3)[:count] if data.draw(st.booleans()) else None
        height = count if dest is None else count + 3
        logical = NUMPY[data.draw(st.sampled_from(DTYPES))]
        step, gap = data.draw(st.sampled_from([1, 2, -1])), data.draw(st.integers(0, 3))
        outs = []
        for yes in (False, True):
            wide = np.zeros((2 * height, columns + gap), logical)
            out = wide[: height * abs(step)][::step, gap:]
            with compiled(yes=yes):
                decode_affine(codes, noise.view(dtype), bits, columns, out, rows=positions, dest=dest)
            outs.append(wide)
        assert np.array_equal(outs[0].astype(np.float64), outs[1].astype(np.float64), equal_nan=True)
        numbers = ~np.isnan(outs[0].astype(np.float64))
        assert np.array_equal(np.signbit(outs[0])[numbers], np.signbit(outs[1])[numbers])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_large_arrays_on_several_threads(self, dtype: str) -> None:
        values = np.random.default_rng(3).normal(0, 0.1, (30_000, 50)).astype(NUMPY[dtype])
        values[[7, 29_999], 3] = np.nan
        for bits in (1, 3, 4, 8):
            reference, fast = both(values, bits, "minmax", None)
            assert bits_of(fast) == bits_of(reference)
            out = np.empty((2, 30_000, 50), NUMPY[dtype])
            for which, yes in enumerate((False, True)):
                with compiled(yes=yes):
                    decode_affine(fast.codes, fast.qparams, bits, 50, out[which])
            assert np.array_equal(out[0], out[1], equal_nan=True)

    def test_nothing_is_contracted_to_a_fused_multiply_add(self) -> None:
        """DEC-1: product and sum are rounded apart, also where a fused multiply-add gives other bits."""
        rng = np.random.default_rng(0)
        codes = rng.integers(0, 256, (200, 64), dtype=np.uint8)
        scale = (1 + rng.integers(0, 1 << 23, 200) * 2.0**-23).astype(np.float32)
        bias = -(scale * np.float32(100)) + rng.normal(0, 1e-3, 200).astype(np.float32)
        out = np.empty((200, 64), np.float32)
        with compiled(yes=True):
            decode_affine(codes, np.stack([scale, bias], 1), 8, 64, out)
        apart = codes.astype(np.float32) * scale[:, None] + bias[:, None]
        fused = (codes.astype(np.float64) * scale[:, None] + bias[:, None]).astype(np.float32)
        assert np.array_equal(out, apart)
        assert np.count_nonzero(apart != fused) > 1000
