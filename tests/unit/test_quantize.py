"""Encoding, decoding and narrowing of rows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from checkrun_format import quantize
from checkrun_format.errors import InvalidInputError
from checkrun_format.packing import pack, padding_is_zero, unpack
from checkrun_format.quantize import Quantized, decode, decode_affine, narrow
from checkrun_format.quantize.decode import nearest_codes

Array = npt.NDArray[Any]
encode = partial(quantize.encode, encoder="minmax")
F32 = np.float32
WIDTHS = range(1, 9)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LOGICAL = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]
MIB = 1 << 20


def weights(rows: int = 40, columns: int = 7, dtype: npt.DTypeLike = F32) -> Array:
    return np.random.default_rng(1).normal(0, 0.1, (rows, columns)).astype(dtype)


def bits_of(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def same(a: Quantized, b: Quantized) -> bool:
    arrays = ("codes", "qparams", "exact_index", "exact_values")
    return a.error_bound == b.error_bound and all(
        getattr(a, name).dtype == getattr(b, name).dtype and bits_of(getattr(a, name)) == bits_of(getattr(b, name))
        for name in arrays
    )


def promised(values: Array, bits: int) -> Array:
    """DEC-5 for float32 rows, as `encode` states it."""
    low, high = values.min(1).astype(np.float64), values.max(1).astype(np.float64)
    bound: Array = 0.505 * (high - low) / ((1 << bits) - 1) + 2.0**-20 * np.maximum(np.abs(low), np.abs(high))
    return bound


class TestDecoding:
    """float32(code) * scale, rounded to float32, + bias, rounded to float32 (DEC-1); then cast (DEC-2)."""

    @staticmethod
    def step_by_step(codes: Array, qparams: Array) -> Array:
        rows = []
        for row, (scale, bias) in zip(codes, qparams, strict=True):
            with np.errstate(all="ignore"):
                rows.append([F32(F32(F32(code) * F32(scale)) + F32(bias)) for code in row])
        return np.array(rows, F32)

    @pytest.mark.parametrize("bits", WIDTHS)
    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_float32(self, bits: int, dtype: str) -> None:
        rng = np.random.default_rng(bits)
        codes = rng.integers(0, 1 << bits, (60, 9), dtype=np.uint8)
        qparams = (rng.normal(size=(60, 2)) * 10.0 ** rng.integers(-8, 5, (60, 2))).astype(dtype)
        qparams[:, 0] = np.abs(qparams[:, 0])
        out = np.empty((60, 9), F32)
        decode_affine(pack(codes, bits), qparams, bits, 9, out)
        assert bits_of(out) == bits_of(self.step_by_step(codes, qparams))

    def test_subnormal_halves_are_widened_exactly(self) -> None:
        qparams = np.array([[2.0**-24, 3 * 2.0**-24], [0, -(2.0**-24)], [1022 * 2.0**-24, 1]], np.float16)
        out = np.empty((3, 2), F32)
        decode_affine(pack(np.array([[1, 15]] * 3, np.uint8), 4), qparams, 4, 2, out)
        tiny = 2.0**-24
        assert out.tolist() == [[4 * tiny, 18 * tiny], [-tiny, -tiny], [1 + 1022 * tiny, 1 + 15330 * tiny]]

    def test_product_and_sum_are_rounded_apart(self) -> None:
        scale, bias = F32(1 + 2.0**-23), F32(-3)
        fused = F32(3 * float(scale) + float(bias))
        out = np.empty((1, 1), F32)
        decode_affine(np.array([[3]], np.uint8), np.array([[scale, bias]], F32), 8, 1, out)
        assert out[0, 0] == F32(2.0**-21) and fused == F32(3 * 2.0**-23)

    def test_nothing_is_flushed_to_zero(self) -> None:
        out = np.empty((1, 2), F32)
        decode_affine(pack(np.array([[0, 3]], np.uint8), 2), np.array([[1e-45, -1e-44]], F32), 2, 2, out)
        assert out.view(np.int32).tolist() == [[-(2**31) + 7, -(2**31) + 4]]

    def test_casts_round_to_nearest_even(self) -> None:
        codes, qparams = np.array([[0, 1, 2, 3]], np.uint8), np.array([[2.0**-9, 1]], F32)
        wanted = {"bfloat16": [1, 1, 1, 1 + 2.0**-7], "float64": [1 + n * 2.0**-9 for n in range(4)]}
        for name, expected in wanted.items():
            out = np.empty((1, 4), name)
            decode_affine(pack(codes, 2), qparams, 2, 4, out)
            assert out.astype(np.float64).tolist() == [expected]
        half = np.empty((1, 4), np.float16)
        decode_affine(pack(codes, 2), np.array([[2.0**-12, 1]], F32), 2, 4, half)
        assert half.tolist() == [[1, 1, 1, 1 + 2.0**-10]]

    def test_exact_rows_that_are_forgotten_are_nan(self) -> None:
        """EXA-1: a reader that forgets an exact row sees NaN."""
        q = encode(np.array([[1, 16], [np.inf, 3]], F32), 4)
        out = np.empty((2, 2), F32)
        decode_affine(q.codes, q.qparams, 4, 2, out)
        assert out[0].tolist() == [1, 16] and np.isnan(out[1]).all()

    def test_out_may_be_a_column_range(self) -> None:
        q = encode(weights(20_000, 5), 3)
        wide = np.full((20_000, 9), 7, np.float64)
        decode_affine(q.codes, q.qparams, 3, 5, wide[:, 2:7])
        assert np.array_equal(wide[:, 2:7], decode(q).astype(np.float64))
        assert (wide[:, :2] == 7).all() and (wide[:, 7:] == 7).all()

    @pytest.mark.parametrize("dtype", LOGICAL, ids=str)
    def test_rows(self, dtype: np.dtype[Any]) -> None:
        values = weights(5000, 40, dtype)
        values[[3, 4, 4999], 1] = np.nan
        q = encode(values, 5)
        whole = decode(q)
        assert whole.dtype == dtype and q.exact_index.tolist() == [3, 4, 4999]
        for rows in (slice(2, 5), slice(None, None, -1), slice(4998, 2, -7), slice(5, 3), slice(-2, None)):
            assert bits_of(decode(q, rows=rows)) == bits_of(whole[rows])
        listed = np.array([4999, 0, 4, 4, 2], np.uint16)
        out = np.zeros((5, 80), dtype)[:, ::2]
        assert decode(q, out=out, rows=listed) is out
        assert bits_of(out) == bits_of(whole[listed])
        many = np.tile(np.arange(5000), 2)[::-1]
        assert bits_of(decode(q, rows=many)) == bits_of(whole[many])
        assert decode(q, rows=listed[:0]).shape == (0, 40)

    @pytest.mark.parametrize("rows", [40, 20_000])
    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_arrays_of_any_kind(self, rows: int, dtype: Any) -> None:
        """Another order of bytes, numbers between two words, a subclass, narrow integers: the kernels take none."""
        q = encode(weights(rows, 32), 4, qparams_dtype=dtype)
        whole = decode(q)
        between = np.zeros(q.qparams.nbytes + 1, np.uint8)[1:].view(dtype).reshape(q.qparams.shape)
        between[:] = q.qparams
        for qparams in (
            between,
            q.qparams.astype(q.qparams.dtype.newbyteorder()),
            q.qparams.view(np.matrix),
            q.qparams,
        ):
            out = np.zeros(whole.shape, F32).view(np.matrix)
            decode_affine(q.codes.view(np.matrix), qparams, np.int8(4), np.int16(32), out)  # type: ignore[arg-type]
            assert bits_of(np.asarray(out)) == bits_of(whole)
            narrow = replace(q, qparams=qparams, bits=np.uint8(4), columns=np.int16(32))  # type: ignore[arg-type]
            assert bits_of(decode(narrow)) == bits_of(whole)
        codes = np.zeros(q.codes.shape, np.uint8).view(np.matrix)
        assert bits_of(decode(encode(weights(rows, 32), 4, qparams_dtype=dtype, codes=codes))) == bits_of(whole)

    @pytest.mark.parametrize(
        ("call", "told"),
        [
            (lambda q: decode(q, rows=np.array([0, 40])), "rows must be from 0 to 39, found 40"),
            (lambda q: decode(q, rows=np.array([-1])), "found -1"),
            (lambda q: decode(q, rows=np.ones(40, bool)), "a slice or an integer array"),
            (lambda q: decode(q, rows=[1, 2]), "a slice or an integer array"),  # type: ignore[arg-type]
            (lambda q: decode(q, out=np.empty((40, 7))), "dtype float32, not float64"),
            (lambda q: decode(q, out=np.empty((39, 7), F32)), r"shape \(40, 7\)"),
            (lambda q: decode_affine(q.codes[1:], q.qparams, 4, 7, np.empty((40, 7))), "qparams of 39 rows"),
            (lambda q: decode_affine(q.codes, q.qparams, 5, 7, np.empty((40, 7))), "codes of 7 columns at 5 bits"),
            (lambda q: decode_affine(q.codes, q.qparams.astype("f8"), 4, 7, np.empty((40, 7))), "cannot be float64"),
            (lambda q: decode_affine(q.codes, q.qparams, 4, 7, np.empty((40, 7), int)), "cannot be int64"),
            (lambda q: decode_affine(None, q.qparams, 4, 7, np.empty((40, 7))), "codes must be a numpy array of two"),  # type: ignore[arg-type]
            (lambda q: decode_affine(np.array(3), q.qparams, 4, 7, np.empty((40, 7))), "codes must be a numpy array"),
            (lambda q: decode_affine(q.codes, [[1, 2]], 4, 7, np.empty((40, 7))), "qparams must be a numpy array"),  # type: ignore[arg-type]
            (lambda q: decode_affine(q.codes, q.qparams, 4, 7, None), "out must be a numpy array of two dimensions"),  # type: ignore[arg-type]
            (lambda q: decode_affine(q.codes, q.qparams, 4, 7.5, np.empty((40, 7))), "columns must be a whole number"),  # type: ignore[arg-type]
            (lambda q: decode(q, rows=slice("a", "b")), "rows=slice.*integers"),
            (lambda q: decode(q, rows=slice(0, 4, 0)), "rows=slice.*zero"),
        ],
    )
    def test_refusals(self, call: Callable[[Quantized], object], told: str) -> None:
        with pytest.raises(InvalidInputError, match=told):
            call(encode(weights(), 4))


class TestExactRows:
    """Rows that an encoder cannot represent faithfully MUST be exact (EXA-2), codes 0 and qparams NaN (EXA-1)."""

    @staticmethod
    def check_exact(q: Quantized, values: Array, index: list[int]) -> None:
        assert q.exact_index.tolist() == index
        assert bits_of(q.exact_values) == bits_of(values[index])
        assert not q.codes[index].any() and np.isnan(q.qparams[index]).all()
        assert np.isfinite(np.delete(q.qparams, index, 0)).all()
        assert bits_of(decode(q)[index]) == bits_of(values[index])

    @pytest.mark.parametrize("dtype", LOGICAL, ids=str)
    @pytest.mark.parametrize("bits", [1, 3, 8])
    def test_nan_and_infinities(self, dtype: np.dtype[Any], bits: int) -> None:
        values = weights(7, 3, dtype)
        values[1, 2], values[2, 0], values[4, 1], values[5, :2] = np.nan, np.inf, -np.inf, [np.inf, -np.inf]
        self.check_exact(encode(values, bits, qparams_dtype="float32"), values, [1, 2, 4, 5])

    def test_nan_payloads_survive(self) -> None:
        values = np.full((3, 4), 0x7FA00001, np.uint32).view(F32)
        values[1] = np.array([0xFFC12345] * 4, np.uint32).view(F32)
        self.check_exact(encode(values, 4), values, [0, 1, 2])
        halves = np.array([[0x7D01, 0xFE55]], np.uint16)
        for dtype in (np.dtype(np.float16), BFLOAT16):
            self.check_exact(encode((halves | 0x7F80).view(dtype), 2), (halves | 0x7F80).view(dtype), [0])

    def test_all_rows_exact(self) -> None:
        values = np.full((300, 5), np.nan, F32)
        q = encode(values, 4)
        self.check_exact(q, values, list(range(300)))
        assert q.error_bound == 0 and q.qparams.dtype == np.float16

    @pytest.mark.parametrize("dtype", LOGICAL, ids=str)
    def test_negative_zeros(self, dtype: np.dtype[Any]) -> None:
        values = np.array([[-0.0, -0.0], [0.0, -0.0], [-0.0, 0.0], [0.0, 0.0], [-0.0, 15.0]], dtype)
        q = encode(values, 4)
        self.check_exact(q, values, [0])
        assert bits_of(q.qparams[1:4]) == bytes(12)
        assert np.array_equal(decode(q), values)
        assert np.signbit(decode(q)).tolist() == [[True, True], *[[False, False]] * 4]

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_beyond_the_range_of_halves(self, bits: int) -> None:
        values = np.array([[-7e4, 0, 1, 2], [7e4, 7e4, 7e4, 7e4]], F32)
        q = encode(values, bits)
        assert q.qparams.dtype == np.float32 and not len(q.exact_index)
        assert (np.abs(decode(q) - values).max(1) <= promised(values, bits)).all()
        assert decode(q)[1].tolist() == [7e4] * 4
        self.check_exact(encode(values, bits, qparams_dtype="float16"), values, [0, 1])

    def test_ranges_beyond_float32(self) -> None:
        values = np.array([[-3e38, 3e38], [-1.5e38, 1.5e38], [3e38, 3.4e38]], F32)
        q = encode(values, 8)
        self.check_exact(q, values, [0])
        assert (np.abs(decode(q)[1:].astype(np.float64) - values[1:]).max(1) <= promised(values[1:], 8)).all()

    def test_float64_beyond_float32(self) -> None:
        values = np.array([[1e300, 0], [1, 16], [1e-300, 0]])
        q = encode(values, 4, qparams_dtype="float32")
        self.check_exact(q, values, [0])
        assert decode(q)[1:].tolist() == [[1, 16], [0, 0]]
        tiny = encode(np.array([[1e-300, 0], [1e-46, 1e-46]]), 4, qparams_dtype="float32")
        assert not decode(tiny).any() and 1e-46 <= tiny.error_bound <= 2.0**-149

    @pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
    @pytest.mark.parametrize("bits", WIDTHS)
    def test_casts_do_not_overflow(self, dtype: np.dtype[Any], bits: int) -> None:
        """DEC-2: writers MUST NOT store a row that overflows in the cast."""
        largest = {"float16": 65504.0, "bfloat16": 255 * 2.0**120}[dtype.name]
        values = np.array([[f * largest, g * largest] for f in (0, 0.3, 0.9, 1) for g in (0.5, 1)], dtype)
        decoded = decode(encode(values, bits)).astype(np.float64)
        assert np.isfinite(decoded).all()
        spread = np.abs(values[:, 0].astype(np.float64) - values[:, 1].astype(np.float64))
        cast = largest * (2.0**-11 if dtype == np.float16 else 2.0**-8)
        assert (np.abs(decoded - values).max(1) <= 0.505 * spread / ((1 << bits) - 1) + 1.01 * cast).all()

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_denormals(self, bits: int) -> None:
        smallest = 2.0**-149
        values = np.array([[0, smallest, smallest], [0, 1e-38, 2e-38], [1e-40, 1e-40, 1e-40]], F32)
        q = encode(values, bits)
        decoded = decode(q)
        assert np.isfinite(decoded).all() and q.qparams.dtype == np.float32
        assert decoded[0].tolist() == values[0].tolist() and decoded[2].tolist() == values[2].tolist()
        assert np.abs(decoded[1] - values[1]).max() <= 0.505 * 2e-38 / ((1 << bits) - 1) + 2.0**-149

    def test_offsets_that_swamp_the_spread(self) -> None:
        values = np.linspace(1000.30, 1000.37, 8, dtype=F32)[None]
        self.check_exact(encode(values, 4, qparams_dtype="float16"), values, [0])
        q = encode(values, 4)
        assert q.qparams.dtype == np.float32 and not len(q.exact_index)
        assert np.abs(decode(q) - values).max() <= promised(values, 4)[0] < 0.004
        assert len(np.unique(decode(q))) == 8

    def test_constants(self) -> None:
        values = np.full((1, 5), 0.1, F32)
        q = encode(values, 4)
        assert bits_of(decode(q)) == bits_of(values)
        assert q.qparams.dtype == F32 and q.error_bound == 0 and not q.codes.any() and not len(q.exact_index)
        self.check_exact(encode(values, 4, qparams_dtype="float16"), values, [0])
        half = encode(np.full((1, 5), 0.25, F32), 4)
        assert half.qparams.tolist() == [[0, 0.25]] and half.qparams.dtype == np.float16

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_one_column(self, bits: int) -> None:
        values = weights(300, 1)
        q = encode(values, bits)
        assert bits_of(decode(q)) == bits_of(values)
        assert q.qparams.dtype == np.float32 and q.codes.shape == (300, 1) and not q.codes.any()

    def test_one_outlier(self) -> None:
        values = np.full((1, 64), 1e-3, F32)
        values[0, 7] = 1000
        q = encode(values, 8)
        assert q.codes[0].tolist() == [255 if column == 7 else 0 for column in range(64)]
        assert np.abs(decode(q) - values).max() <= promised(values, 8)[0]


class TestMinmax:
    """minmax keeps |decoded - original| <= 0.505 * (max - min) / (2^bits - 1), plus float32 rounding (DEC-5)."""

    @pytest.mark.parametrize("bits", WIDTHS)
    @pytest.mark.parametrize("qparams_dtype", ["float16", "float32"])
    def test_weights(self, bits: int, qparams_dtype: str) -> None:
        values = weights(3000, 64)
        q = encode(values, bits, qparams_dtype=qparams_dtype)
        error = np.abs(decode(q).astype(np.float64) - values)
        assert not len(q.exact_index) and q.qparams.dtype == qparams_dtype
        assert (error.max(1) <= promised(values, bits)).all()
        assert 0.9 * q.error_bound < error.max() <= q.error_bound <= promised(values, bits).max()
        assert padding_is_zero(q.codes, bits, 64)
        assert (q.bits, q.columns, q.dtype, q.encoder, q.rows) == (bits, 64, "float32", "minmax", 3000)
        assert q.nbytes == 3000 * (8 * bits + 2 * q.qparams.itemsize)

    def test_small_example_by_hand(self) -> None:
        q = encode(np.array([[-1, -0.5, 0, 2]], F32), 2)
        assert q.qparams.tolist() == [[1, -1]]
        assert unpack(q.codes, 2, 4).tolist() == [[0, 0, 1, 3]]
        assert decode(q).tolist() == [[-1, -1, 0, 2]]

    @pytest.mark.parametrize(("bits", "excess"), [(4, 1.02), (8, 1.49)])
    def test_error_bound_covers_the_cast_to_16_bits(self, bits: int, excess: float) -> None:
        values = np.arange(0x3F81, dtype=np.uint16).view(BFLOAT16)[None]
        q = encode(values, bits, qparams_dtype="float32")
        error = np.abs(decode(q).astype(np.float64) - values.astype(np.float64)).max()
        assert (values.min(), values.max(), len(q.exact_index)) == (0, 1, 0)
        assert excess * 0.5 / ((1 << bits) - 1) < error <= q.error_bound

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_float32_scales_multiply_exactly(self, bits: int) -> None:
        """DEC-4: with 16 significant bits in the scale, each product with a code is exact in float32."""
        values = (weights(500, 8).astype(np.float64) * 10.0 ** np.linspace(-44, 37, 500)[:, None]).astype(F32)
        q = encode(values, bits, qparams_dtype="float32")
        scale = q.qparams[~np.isnan(q.qparams[:, 0]), :1]
        codes = np.arange(1 << bits, dtype=F32)
        assert len(scale) > 400
        assert np.array_equal((codes * scale).astype(np.float64), codes.astype(np.float64) * scale.astype(np.float64))

    @pytest.mark.parametrize("rows", [2, 5000])
    @pytest.mark.parametrize("encoder", ["minmax", "symmetric", "refine"])
    def test_rows_whose_scale_has_no_normal_reciprocal_are_exact(self, rows: int, encoder: str) -> None:
        """In numpy, compiled, and in torch; also where the processor is told to take numbers below 2^-126 for 0."""
        codes = np.arange(16) % 3 - 1 if encoder == "symmetric" else np.arange(16) % 4 - 1.5
        scales = 2.0 ** np.array([-127, -126, 0, 126, 126.25])
        values = np.tile((codes * scales[:, None]).astype(F32), (rows, 1))
        try:
            for flush in (False, True):
                expected = [n for n in range(5 * rows) if n % 5 == 4 or (n % 5 == 0 and not flush)]
                for given in (values, torch.from_numpy(values)):
                    torch.set_flush_denormal(flush)
                    q = quantize.encode(given, 2, encoder, "float32")
                    torch.set_flush_denormal(False)
                    exact = q.exact_index[(q.exact_index % 5 != 0) | (not flush)]  # some threads may not be told
                    assert exact.tolist() == expected
                    assert bits_of(decode(q)[expected]) == bits_of(values[expected])
        finally:
            torch.set_flush_denormal(False)

    def test_qparams_widen_at_more_than_one_exact_row_in_a_hundred(self) -> None:
        values = weights(200, 8)
        values[:2] = 0.1
        q = encode(values, 4)
        assert (q.qparams.dtype.name, q.exact_index.tolist()) == ("float16", [0, 1])
        values[150] = 0.1
        q = encode(values, 4)
        assert (q.qparams.dtype.name, q.exact_index.tolist()) == ("float32", [])

    def test_qparams_stay_halves_where_float32_saves_no_row(self) -> None:
        values = weights(20_000, 8)
        values[::3, 5] = np.nan
        q = encode(values, 4)
        assert q.qparams.dtype == np.float16 and q.exact_index.tolist() == list(range(0, 20_000, 3))
        values[19_999] = 0.1
        assert encode(values, 4).qparams.dtype == F32

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_decoded_rows_encode_alike(self, bits: int) -> None:
        """As the notes of `encode` claim: end codes used, halves, abs(bias) <= 2048 * scale."""
        once = encode(weights(3000, 64), bits, qparams_dtype="float16")
        again = encode(decode(once), bits, qparams_dtype="float16")
        codes = unpack(once.codes, bits, 64)
        ends = (codes.min(1) == 0) & (codes.max(1) == (1 << bits) - 1)
        assert ends.mean() > 0.9
        assert np.array_equal(once.codes[ends], again.codes[ends])
        assert np.array_equal(once.qparams[ends], again.qparams[ends])


class TestInputs:
    @pytest.mark.parametrize("dtype", LOGICAL, ids=str)
    @pytest.mark.parametrize("columns", [1, 6, 250])
    def test_layout_of_memory_does_not_matter(self, dtype: np.dtype[Any], columns: int) -> None:
        values = weights(500, columns, dtype)
        values[7, 0], values[9] = np.nan, -0.0
        values.flags.writeable = False
        wide = np.zeros((1000, 2 * columns), dtype)
        wide[::-2, ::-2] = values
        expected = encode(values, 3)
        layouts = [wide[::-2, ::-2], np.asfortranarray(values), np.ascontiguousarray(values[::-1])[::-1]]
        if dtype.kind == "f":
            layouts.append(values.astype(dtype.newbyteorder(">")))
        for layout in layouts:
            assert same(encode(layout, 3), expected)
        assert expected.exact_values.dtype == dtype

    def test_zeros_in_any_order(self) -> None:
        values = np.zeros((64, 64), F32)
        values[np.arange(64), np.arange(64)] = -0.0
        assert bits_of(encode(values, 2).qparams) == bytes(256)

    def test_rows_do_not_depend_on_their_neighbours(self) -> None:
        values = weights(3000, 64)
        values[::97] = np.inf
        q = encode(values, 4)
        for row in (0, 1, 97, 1228, 1229, 2999):
            alone = encode(values[row : row + 1], 4, qparams_dtype="float16")
            assert bits_of(alone.codes) == bits_of(q.codes[row])
            assert bits_of(alone.qparams) == bits_of(q.qparams[row])

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_no_rows(self, bits: int) -> None:
        q = encode(np.empty((0, 5), F32), bits)
        assert (q.rows, q.qparams.shape, q.exact_values.shape, q.error_bound) == (0, (0, 2), (0, 5), 0)
        assert decode(q).shape == (0, 5) and decode(q).dtype == F32

    def test_the_result_is_a_copy(self) -> None:
        values = np.full((2, 2), np.nan, F32)
        q = encode(values, 4)
        values[:] = 1
        assert np.isnan(q.exact_values).all()

    def test_callers_error_state_does_not_matter(self) -> None:
        values = np.array([[np.nan, 1], [3e38, -3e38], [1e-45, 1e-40], [7e4, -7e4]], F32)
        with np.errstate(all="raise"):
            q = encode(values, 8)
            assert np.abs(decode(q)[2:] - values[2:]).max() < 300
            decode_affine(q.codes, q.qparams, 8, 2, np.empty((4, 2), np.float16))

    @pytest.mark.parametrize(
        ("call", "told"),
        [
            (lambda: encode(weights(), 0), "bits must be a whole number from 1 to 8, not 0"),
            (
                lambda: encode(weights(), 4, encoder="best"),
                "unknown encoder 'best'; known are greedy, minmax",
            ),
            (lambda: encode(weights(), 4, qparams_dtype="bfloat16"), "one of float16, float32, not 'bfloat16'"),
            (lambda: encode(weights()[0], 4), "two dimensions"),
            (lambda: encode([[1.0]], 4), "numpy array"),
            (lambda: encode(np.zeros((3, 0), F32), 4), "columns must be a whole number of at least 1"),
            (lambda: encode(np.zeros((3, 2), np.int32), 4), "bfloat16, float16, float32, float64, not int32"),
            (lambda: encode(np.zeros((3, 2), ml_dtypes.float8_e5m2), 4), "not float8_e5m2"),
            (lambda: encode(np.zeros((3, 2), np.longdouble), 4), "cannot be stored"),
        ],
    )
    def test_refusals(self, call: Callable[[], object], told: str) -> None:
        with pytest.raises(InvalidInputError, match=told):
            call()

    def test_encoders_plug_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An encoder is one function; what no qparams can express is kept exact without its help."""

        def halves(values: Array, low: Array, _high: Array, _bits: int, qparams_dtype: str) -> tuple[Array, ...]:
            qparams = np.stack([np.full(len(values), 0.5), low], axis=1).astype(qparams_dtype)
            return ((values - low[:, None]) * 2).astype(np.uint8) & 3, qparams, values[:, 0] == 1

        monkeypatch.setitem(quantize.ENCODERS, "halves", halves)
        values = np.array([[0, 0.5], [1, 1.5], [np.nan, 0], [-0.0, -0.0], [0, np.inf], [-3e38, 3e38]], F32)
        q = encode(values, 2, encoder="halves", qparams_dtype="float32")
        assert (q.encoder, q.exact_index.tolist()) == ("halves", [1, 2, 3, 4, 5])
        assert bits_of(decode(q)) == bits_of(values)

    def test_scales_are_not_negative(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """DEC-3: the scale is at least +0."""

        def mirrored(values: Array, *_: Any) -> tuple[Array, ...]:
            qparams = np.array([[-1, 3], [-0.0, 3], [0, 3]], np.float16)
            return np.zeros(values.shape, np.uint8), qparams, np.zeros(len(values), bool)

        monkeypatch.setitem(quantize.ENCODERS, "mirrored", mirrored)
        q = encode(np.full((3, 2), 3, F32), 2, encoder="mirrored", qparams_dtype="float16")
        assert q.exact_index.tolist() == [0, 1]

    @pytest.mark.parametrize("bits", WIDTHS)
    def test_codes_stay_in_range(self, bits: int) -> None:
        qparams = np.array([[1, 0], [0, 1], [1e-45, 0]], F32)
        values = np.array([[-2, 999], [-2, 999], [-1e38, 1e38]], F32)
        with np.errstate(over="ignore"):
            codes = nearest_codes(values, qparams, bits)
        assert codes.tolist() == [[0, (1 << bits) - 1], [0, 0], [0, (1 << bits) - 1]]


class TestRecord:
    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"codes": np.zeros((40, 5), np.uint8)}, r"codes is uint8 \(40, 5\), not uint8 \(40, 4\)"),
            ({"qparams": np.zeros((39, 2), np.float16)}, r"qparams is float16 \(39, 2\), not float16 or float32"),
            ({"exact_values": np.zeros((1, 7), F32)}, r"exact_values is float32 \(1, 7\), not float32 \(0, 7\)"),
            ({"exact_index": np.zeros(0, np.int32)}, "exact_index is int32"),
            ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, float64, not 'int8'"),
            ({"bits": 9}, "bits must be"),
        ],
    )
    def test_contradictions_are_refused(self, change: dict[str, Any], told: str) -> None:
        with pytest.raises(InvalidInputError, match=told):
            replace(encode(weights(), 4), **change)

    def test_every_contradiction_is_told(self) -> None:
        with pytest.raises(InvalidInputError, match=r"codes is .*; qparams is "):
            replace(encode(weights(), 4), codes=np.zeros((40, 5), np.uint8), qparams=np.zeros((40, 1), F32))


class TestMemory:
    """Memory beyond the result does not grow with the number of rows. The inputs repeat one row without holding it."""

    @staticmethod
    def peak_of(call: Callable[[], Any]) -> tuple[int, Any]:
        tracemalloc.start()
        try:
            result = call()
            return tracemalloc.get_traced_memory()[1], result
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("dtype", LOGICAL, ids=str)
    def test_encode_and_decode(self, dtype: np.dtype[Any]) -> None:
        values = np.broadcast_to(np.linspace(-1, 1, 64).astype(dtype), (1 << 18, 64))
        peak, q = self.peak_of(lambda: encode(values, 4))
        assert peak - q.nbytes < 6 * MIB < values.nbytes // 4
        out = np.empty((1 << 18, 64), dtype)
        assert self.peak_of(lambda: decode(q, out=out))[0] < 4 * MIB
        assert bits_of(out[-1]) == bits_of(decode(q, rows=slice(0, 1)))

    def test_exact_rows(self) -> None:
        values = np.broadcast_to(np.full(64, np.nan, F32), (1 << 17, 64))
        peak, q = self.peak_of(lambda: encode(values, 8))
        assert q.rows == len(q.exact_index) and peak - q.nbytes < 4 * MIB

    def test_widened_qparams(self) -> None:
        values = np.broadcast_to(np.full(4, 0.1, F32), (1 << 20, 4))
        peak, q = self.peak_of(lambda: encode(values, 8))
        assert q.qparams.dtype == F32 and peak - q.nbytes < 4 * MIB

    def test_narrow(self) -> None:
        values = np.broadcast_to(np.linspace(-1, 1, 64, dtype=F32), (1 << 18, 64))
        peak, (narrowed, index) = self.peak_of(lambda: narrow(values, "float16"))
        assert not len(index) and peak - narrowed.nbytes < 4 * MIB


class TestNarrow:
    """Finite, and within the relative error 2^-11 (float16) or 2^-8 (bfloat16); else NaN and exact (RAW-1)."""

    @pytest.mark.parametrize(
        ("value", "half", "brain"),
        [
            (0.0, True, True),
            (-0.0, True, True),
            (0.1, True, True),
            (65519.0, True, True),
            (65520.0, False, True),
            (3.4e38, False, False),
            (3.38e38, False, True),
            (2.0**-24, True, True),
            (1.5 * 2.0**-24, False, True),
            (2.0**-126, False, True),
            (2.0**-133, False, True),
            (1.5 * 2.0**-133, False, False),
            (2.0**-149, False, False),
            (np.inf, False, False),
            (-np.inf, False, False),
            (np.nan, False, False),
        ],
    )
    def test_which_values_fit(self, value: float, half: bool, brain: bool) -> None:
        for store_as, fits in (("float16", half), ("bfloat16", brain)):
            narrowed, index = narrow(np.array([value, 1], F32), store_as)
            assert index.tolist() == ([] if fits else [0])
            assert narrowed.dtype == store_as and narrowed[1] == 1
            wanted = float(np.array(value, F32).astype(narrowed.dtype)) if fits else np.nan
            assert bits_of(narrowed[0].astype(F32)) == bits_of(F32(wanted))

    def test_rounding_is_to_even(self) -> None:
        values = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11], F32)
        assert narrow(values, "float16")[0].tolist() == [1, 1 + 2.0**-9]
        values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8], F32)
        assert narrow(values, "bfloat16")[0].tolist() == [1, 1 + 2.0**-6]

    def test_one_misfit_takes_its_row_along(self) -> None:
        values = np.array([[1, 2], [3, 1e9], [np.nan, 4], [5, 6]], F32)
        narrowed, index = narrow(values, "float16")
        assert index.tolist() == [1, 2] and index.dtype == np.int64
        assert np.isnan(narrowed[[1, 2]]).all() and narrowed[[0, 3]].tolist() == [[1, 2], [5, 6]]

    @pytest.mark.parametrize("store_as", ["float16", "bfloat16"])
    def test_layout_of_memory_does_not_matter(self, store_as: str) -> None:
        values = 1 + weights(40_000, 3)
        values[[5, 39_999], 1] = 3.4e38
        narrowed, index = narrow(values, store_as)
        assert index.tolist() == [5, 39_999]
        for layout in (np.asfortranarray(values), np.repeat(values, 2, 0)[::2], values.astype(">f4")):
            again, index_again = narrow(layout, store_as)
            assert bits_of(again) == bits_of(narrowed) and index_again.tolist() == index.tolist()
        column, column_index = narrow(values[:, 1], store_as)
        assert column.shape == (40_000,) and column_index.tolist() == index.tolist()
        kept = np.delete(np.arange(40_000), index)
        assert bits_of(column[kept]) == bits_of(narrowed[kept, 1])

    @pytest.mark.parametrize("shape", [(0,), (0, 3)])
    def test_no_rows(self, shape: tuple[int, ...]) -> None:
        narrowed, index = narrow(np.empty(shape, F32), "bfloat16")
        assert narrowed.shape == shape and narrowed.dtype == BFLOAT16 and index.shape == (0,)

    @pytest.mark.parametrize(
        ("call", "told"),
        [
            (lambda: narrow(weights(), "float8_e5m2"), "one of float16, bfloat16, not 'float8_e5m2'"),
            (lambda: narrow(weights(dtype=np.float64), "float16"), "only float32 arrays"),
            (lambda: narrow(np.zeros((2, 2, 2), F32), "float16"), "one or two dimensions"),
            (lambda: narrow(np.zeros((2, 0), F32), "float16"), "columns must be"),
        ],
    )
    def test_refusals(self, call: Callable[[], object], told: str) -> None:
        with pytest.raises(InvalidInputError, match=told):
            call()
