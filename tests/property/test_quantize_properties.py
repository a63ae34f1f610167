"""Sections 7.2 and 7.3 of FORMAT.md, over rows of every magnitude, width and dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from checkrun_format import quantize
from checkrun_format.packing import pack, padding_is_zero, unpack
from checkrun_format.quantize import Quantized, decode, decode_affine, narrow

Array = npt.NDArray[Any]
encode = partial(quantize.encode, encoder="minmax")
F32 = np.float32
DTYPES = ("float16", "bfloat16", "float32", "float64")
NUMPY = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES}
KINDS = ("spread", "offset", "constant", "zeros", "outlier", "denormal", "special")
HALF_UNITS = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


def one_row(kind: str, columns: int, exponent: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    row = np.ldexp(rng.uniform(-2, 2, columns), exponent)
    if kind == "offset":
        row = np.ldexp(1 + np.ldexp(rng.uniform(-1, 1, columns), -int(rng.integers(1, 30))), exponent)
    elif kind == "constant":
        row[:] = row[0]
    elif kind == "zeros":
        row = np.where(rng.random(columns) < rng.choice([0, 0.5, 1]), -0.0, 0.0)
    elif kind == "outlier":
        row = np.ldexp(rng.uniform(-2, 2, columns), -20)
        row[rng.integers(columns)] = np.ldexp(1.5, exponent)
    elif kind == "denormal":
        row = np.ldexp(rng.integers(-9, 9, columns).astype(np.float64), int(rng.integers(-149, -120)))
    elif kind == "special":
        row[rng.integers(columns)] = rng.choice([np.nan, np.inf, -np.inf])
    return row


@st.composite
def tables(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> Array:
    """Rows (n, columns) of one dtype; each of its own kind and magnitude."""
    columns, rows = draw(st.integers(1, 130)), draw(st.integers(0, 5))
    drawn = [
        one_row(draw(st.sampled_from(KINDS)), columns, draw(st.integers(-149, 127)), draw(st.integers(0, 2**32 - 1)))
        for _ in range(rows)
    ]
    with np.errstate(all="ignore"):
        return np.array(drawn).reshape(rows, columns).astype(NUMPY[draw(st.sampled_from(dtypes))])


widths = st.integers(1, 8)
qparams_dtypes = st.sampled_from([None, "float16", "float32"])


@dataclass(frozen=True, kw_only=True)
class Case:
    values: Array
    quantized: Quantized

    @property
    def coded(self) -> npt.NDArray[np.int64]:
        return np.setdiff1d(np.arange(self.quantized.rows), self.quantized.exact_index)

    def errors(self) -> list[Fraction]:
        """Largest |decoded - original| of each row that is not exact, without any rounding."""
        decoded = decode(self.quantized)
        return [
            max(abs(Fraction(float(a)) - Fraction(float(b))) for a, b in zip(decoded[n], self.values[n], strict=True))
            for n in self.coded
        ]


cases = st.builds(
    lambda values, bits, dtype: Case(values=values, quantized=encode(values, bits, qparams_dtype=dtype)),
    tables(),
    widths,
    qparams_dtypes,
)


def raw(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


class TestBound:
    """|decoded - original| <= 0.505 * (max - min) / (2^bits - 1), plus float32 rounding, unless exact (DEC-5)."""

    @given(cases)
    def test_promise(self, case: Case) -> None:
        dtype, levels = case.quantized.dtype, (1 << case.quantized.bits) - 1
        for n, error in zip(case.coded, case.errors(), strict=True):
            low, high = (Fraction(float(end)) for end in (case.values[n].min(), case.values[n].max()))
            bound = Fraction(505, 1000) * (high - low) / levels + Fraction(2) ** -20 * max(abs(low), abs(high))
            if dtype == "float64":
                bound += Fraction(2) ** -149
            if dtype in HALF_UNITS:
                relative, absolute = (Fraction(unit) for unit in HALF_UNITS[dtype])
                bound += min(bound, relative * (max(abs(low), abs(high)) + bound) + absolute)
            assert error <= bound

    @given(cases)
    def test_error_bound(self, case: Case) -> None:
        """`error_bound` is an upper bound of |decoded - original| over all values stored here (section 5.4)."""
        assert max(case.errors(), default=Fraction(0)) <= Fraction(case.quantized.error_bound)

    @given(tables(("float32",)), widths, qparams_dtypes)
    def test_constant_float32_rows_keep_their_value(self, values: Array, bits: int, dtype: str | None) -> None:
        decoded = decode(encode(values, bits, qparams_dtype=dtype))
        constant = values.min(1) == values.max(1)
        assert np.array_equal(decoded[constant], values[constant])


class TestExactRows:
    """An exact row has its values bit for bit, codes 0 and qparams NaN, which stand nowhere else (EXA-1, DEC-3)."""

    @given(cases)
    def test_marks(self, case: Case) -> None:
        q = case.quantized
        codes = unpack(q.codes, q.bits, q.columns)
        assert padding_is_zero(q.codes, q.bits, q.columns)
        assert not codes[q.exact_index].any() and np.isnan(q.qparams[q.exact_index]).all()
        coded = q.qparams[case.coded]
        assert np.isfinite(coded).all() and not np.signbit(coded[:, 0]).any()
        assert (np.diff(q.exact_index) > 0).all()

    @given(cases)
    def test_values(self, case: Case) -> None:
        q = case.quantized
        assert q.exact_values.dtype == case.values.dtype
        assert raw(q.exact_values) == raw(case.values[q.exact_index]) == raw(decode(q)[q.exact_index])

    @given(cases)
    def test_who_must_be_exact(self, case: Case) -> None:
        """EXA-2: those with NaN or infinite values, and those all of -0.0."""
        must = ~np.isfinite(case.values).all(1) | ((case.values == 0) & np.signbit(case.values)).all(1)
        assert np.isin(np.flatnonzero(must), case.quantized.exact_index).all()
        assert np.isfinite(decode(case.quantized)[case.coded]).all()

    @given(tables(), widths)
    def test_float32_qparams_leave_only_what_they_cannot_express(self, values: Array, bits: int) -> None:
        """Rows of moderate size are not kept exact without need."""
        q = encode(values, bits, qparams_dtype="float32")
        for row in values[q.exact_index].astype(np.float64):
            if np.isfinite(row).all():
                low, high = row.min(), row.max()
                overflows = max(-low, high) > (0.98 * 65504 if q.dtype == "float16" else 3.3e38) or high - low > 3.3e38
                negative_zeros = np.signbit(row).all() and not row.astype(F32).any()
                step = (high - low) / ((1 << bits) - 1)
                assert overflows or negative_zeros or not 1.01 * 2.0**-126 < step < 0.99 * 2.0**126


class TestChoice:
    """float16, unless more than one row in a hundred must be exact and float32 saves one of them from it."""

    @given(tables(), widths)
    def test_qparams_dtype(self, values: Array, bits: int) -> None:
        half, single = (encode(values, bits, qparams_dtype=dtype) for dtype in ("float16", "float32"))
        m, saved = len(half.exact_index), np.setdiff1d(half.exact_index, single.exact_index)
        wanted = single if 100 * m > len(values) and saved.size else half
        chosen = encode(values, bits)
        assert chosen.qparams.dtype == wanted.qparams.dtype
        assert (raw(chosen.codes), raw(chosen.qparams)) == (raw(wanted.codes), raw(wanted.qparams))
        for row in values[np.setdiff1d(single.exact_index, half.exact_index)].astype(np.float64):
            assert np.ptp(row) / ((1 << bits) - 1) < 1.01 * 2.0**-126  # no scale that is normal


class TestLayout:
    @given(cases, st.randoms(use_true_random=False))
    def test_order_and_strides_do_not_matter(self, case: Case, random: Any) -> None:
        q = case.quantized
        order = np.array(random.sample(range(q.rows), q.rows), np.int64)
        wide = np.zeros((q.columns, 2 * q.rows), case.values.dtype)
        wide[::-1, ::2] = case.values[order].T
        again = encode(wide[::-1, ::2].T, q.bits, qparams_dtype=q.qparams.dtype.name)
        assert raw(again.codes) == raw(q.codes[order]) and raw(again.qparams) == raw(q.qparams[order])
        assert again.error_bound == q.error_bound

    @given(cases, st.data())
    def test_some_rows(self, case: Case, data: st.DataObject) -> None:
        q, whole = case.quantized, decode(case.quantized)
        part = data.draw(st.slices(q.rows))
        assert raw(decode(q, rows=part)) == raw(whole[part])
        listed = np.array(data.draw(st.lists(st.integers(0, q.rows - 1), max_size=9) if q.rows else st.just([])), int)
        assert raw(decode(q, rows=listed)) == raw(whole[listed])


class TestDecoding:
    """float32(code) * scale, rounded, + bias, rounded (DEC-1), for any qparams whatever; then the cast (DEC-2)."""

    @given(widths, st.sampled_from(["float16", "float32"]), st.sampled_from(DTYPES), st.binary(min_size=1), st.data())
    def test_step_by_step(self, bits: int, qparams_dtype: str, dtype: str, noise: bytes, data: st.DataObject) -> None:
        codes = np.frombuffer(noise, np.uint8)[None] & np.uint8((1 << bits) - 1)
        size = 2 * np.dtype(qparams_dtype).itemsize
        qparams = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), qparams_dtype)[None]
        out = np.empty(codes.shape, NUMPY[dtype])
        decode_affine(pack(codes, bits), qparams, bits, codes.shape[1], out)
        with np.errstate(all="ignore"):
            scale, bias = (F32(q) for q in qparams[0])
            expected = np.array([F32(F32(F32(code) * scale) + bias) for code in codes[0]]).astype(NUMPY[dtype])
        assert np.array_equal(out[0].astype(np.float64), expected.astype(np.float64), equal_nan=True)
        assert np.array_equal(np.signbit(out[0])[~np.isnan(out[0])], np.signbit(expected)[~np.isnan(expected)])

    @given(cases)
    def test_products_are_exact(self, case: Case) -> None:
        """DEC-4: so a fused multiply-add gives the same bits."""
        q = case.quantized
        codes = np.arange(1 << q.bits).astype(F32)
        scale = q.qparams[case.coded, :1].astype(F32)
        assert np.array_equal((codes * scale).astype(np.float64), codes.astype(np.float64) * scale.astype(np.float64))

    @given(tables(("float32", "float64")), widths)
    def test_decoded_rows_encode_alike(self, values: Array, bits: int) -> None:
        """As the notes of `encode` claim."""
        once = encode(values, bits, qparams_dtype="float16")
        again = encode(decode(once), bits, qparams_dtype="float16")
        codes, (scale, bias) = unpack(once.codes, bits, once.columns), once.qparams.astype(np.float64).T
        for n in np.setdiff1d(np.arange(once.rows), once.exact_index):
            if codes[n].min() == 0 and codes[n].max() == (1 << bits) - 1 and abs(bias[n]) <= 2048 * scale[n]:
                assert raw(again.codes[n]) == raw(once.codes[n])
                assert raw(again.qparams[n]) == raw(once.qparams[n])


class TestNarrow:
    """A row is narrowed only if every value is finite and stays within 2^-11 (float16) or 2^-8 (bfloat16) (RAW-1)."""

    @given(tables(("float32",)), st.sampled_from(["float16", "bfloat16"]))
    def test_which_rows_fit(self, values: Array, store_as: str) -> None:
        narrowed, index = narrow(values, store_as)
        allowed = Fraction(1, 2**11 if store_as == "float16" else 2**8)
        with np.errstate(all="ignore"):
            rounded = values.astype(NUMPY[store_as])

        def fits(value: float, near: float) -> bool:
            if not math.isfinite(value) or not math.isfinite(near):
                return False
            return abs(Fraction(near) - Fraction(value)) <= allowed * abs(Fraction(value))

        for n, row in enumerate(values):
            fit = all(fits(float(a), float(b)) for a, b in zip(row, rounded[n], strict=True))
            assert fit == (n not in index)
            assert raw(narrowed[n]) == raw(rounded[n]) if fit else np.isnan(narrowed[n]).all()
