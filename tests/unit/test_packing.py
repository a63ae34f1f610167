"""Codes to bit streams and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from checkrun_format.errors import InvalidInputError
from checkrun_format.packing import pack, packed_width, padding_is_zero, row_pieces, unpack

U8 = npt.NDArray[np.uint8]
WIDTHS = range(1, 9)


def some_codes(rows: int, columns: int, bits: int) -> U8:
    return np.random.default_rng(bits).integers(0, 1 << bits, (rows, columns), dtype=np.uint8)


@pytest.mark.parametrize(
    ("codes", "bits", "expected"),
    [
        ([5, 2, 7, 0, 1], 3, "d511"),
        ([1, 2, 3], 4, "2103"),
        ([0, 1, 2, 3], 2, "e4"),
        ([1, 0, 0, 0, 0, 0, 0, 0, 1], 1, "0101"),
        ([31, 0, 31], 5, "1f7c"),
        ([7, 255], 8, "07ff"),
    ],
)
def test_worked_examples(codes: list[int], bits: int, expected: str) -> None:
    """PCK-1 and its examples."""
    row = np.array([codes], np.uint8)
    assert pack(row, bits).tobytes().hex() == expected
    assert unpack(np.frombuffer(bytes.fromhex(expected), np.uint8)[None], bits, len(codes)).tolist() == [codes]


@pytest.mark.parametrize(("columns", "bits", "width"), [(1, 1, 1), (8, 1, 1), (9, 1, 2), (5, 3, 2), (801, 3, 301)])
def test_packed_width(columns: int, bits: int, width: int) -> None:
    assert packed_width(columns, bits) == width
    assert packed_width(np.int64(columns), np.uint8(bits)) == width  # type: ignore[arg-type]


def test_packed_width_of_more_than_32_bits() -> None:
    assert packed_width(2**40 + 1, 8) == 2**40 + 1


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("columns", [1, 3, 8, 130])
def test_strides_do_not_matter(bits: int, columns: int) -> None:
    codes = some_codes(7, columns, bits)
    packed = pack(codes, bits)
    wide = np.zeros((14, 2 * columns), np.uint8)
    wide[::-2, ::2] = codes
    for same in (wide[::-2, ::2], np.asfortranarray(codes), codes[::-1][::-1], codes[:, ::-1].copy()[:, ::-1]):
        assert np.array_equal(pack(same, bits), packed)
    for same in (np.asfortranarray(packed), np.repeat(packed, 2, axis=1)[:, ::2], packed[::-1].copy()[::-1]):
        assert np.array_equal(unpack(same, bits, columns), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_out_may_be_a_view(bits: int) -> None:
    codes = some_codes(5, 11, bits)
    wide = np.full((5, 40), 0xAA, np.uint8)
    target = wide[:, 3 : 3 + packed_width(11, bits)]
    assert pack(codes, bits, out=target) is target
    assert np.array_equal(target, pack(codes, bits))
    back = wide[::-1, 20:31]
    assert unpack(target, bits, 11, out=back) is back
    assert np.array_equal(wide[::-1, 20:31], codes)
    assert (wide[:, :3] == 0xAA).all() and (wide[:, 31:] == 0xAA).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_no_rows(bits: int) -> None:
    empty = pack(np.empty((0, 5), np.uint8), bits)
    assert empty.shape == (0, packed_width(5, bits))
    assert unpack(empty, bits, 5).shape == (0, 5)
    assert padding_is_zero(empty, bits, 5)


@pytest.mark.parametrize("bits", WIDTHS)
def test_pieces_meet(bits: int) -> None:
    codes = some_codes(20_011, 3, bits)
    packed = pack(codes, bits)
    assert len(list(row_pieces(*codes.shape))) > 2
    assert np.array_equal(packed[-5:], pack(codes[-5:], bits))
    assert np.array_equal(unpack(packed, bits, 3), codes)


def test_inputs_are_only_read() -> None:
    codes = some_codes(4, 16, 4)
    codes.flags.writeable = False
    packed = pack(codes, 4)
    packed.flags.writeable = False
    assert np.array_equal(unpack(packed, 4, 16), codes)


def test_padding_is_checked_bit_by_bit() -> None:
    """PCK-1: a row is padded with zero bits to a whole byte."""
    packed = pack(some_codes(3, 5, 3), 3)
    assert padding_is_zero(packed, 3, 5)
    for bit in range(16):
        flipped = packed.copy()
        flipped[1, bit // 8] |= 1 << bit % 8
        assert padding_is_zero(flipped, 3, 5) == (bit < 15)
    packed[1, 1] |= 0x80
    assert np.array_equal(unpack(packed, 3, 5), some_codes(3, 5, 3))
    assert padding_is_zero(np.full((2, 3), 255, np.uint8), 3, 8)


ROW = np.zeros((2, 4), np.uint8)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: pack(ROW, 0), "bits must be a whole number from 1 to 8, not 0"),
        (lambda: pack(ROW, 9), "not 9"),
        (lambda: packed_width(4, bits=True), "not True"),
        (lambda: packed_width(4, 2.0), "not 2.0"),  # type: ignore[arg-type]
        (lambda: packed_width(0, 4), "columns must be a whole number of at least 1, not 0"),
        (lambda: pack(np.zeros((2, 0), np.uint8), 4), "not 0"),
        (lambda: pack(ROW + np.uint8(4), 2), "codes must be from 0 to 3 at 2 bits, found 4"),
        (lambda: pack(np.zeros((2, 4)), 4), "codes must be a uint8 array of two dimensions, not float64"),  # type: ignore[arg-type]
        (lambda: pack(np.zeros(4, np.uint8), 4), "two dimensions"),
        (lambda: unpack(ROW, 4, 9), "a row of 9 codes at 4 bits takes 5 bytes, not 4"),
        (lambda: padding_is_zero(ROW, 3, 5), "takes 2 bytes, not 4"),
        (lambda: pack(ROW, 4, out=np.empty((2, 3), np.uint8)), r"out must be .* \(2, 2\)"),
        (lambda: unpack(ROW, 4, 8, out=np.empty((2, 8), np.int8)), "dtype uint8, not int8"),
        (lambda: unpack(ROW, 8, 4, out=np.broadcast_to(ROW[:1], (2, 4))), "writable"),
    ],
)
def test_refusals(call: Any, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told) as refusal:
        call()
    assert refusal.value.kind == "invalid_input"


@pytest.mark.parametrize(("bits", "name"), [(4, "embedding_bag_4bit"), (2, "embedding_bag_2bit")])
def test_layout_is_that_of_torch(bits: int, name: str) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32))
    fused = getattr(torch.ops.quantized, f"{name}_prepack")(weight).numpy()
    width = packed_width(64, bits)
    codes = unpack(fused[:, :width], bits, 64)
    scale, bias = fused[:, width:].copy().view(np.float16).astype(np.float32).T
    decoded = codes * scale[:, None] + bias[:, None]
    theirs = getattr(torch.ops.quantized, f"{name}_unpack")(torch.from_numpy(fused)).numpy()
    assert np.array_equal(decoded, theirs)
    assert np.array_equal(pack(codes, bits), fused[:, :width])
    assert int(codes.max()) == (1 << bits) - 1


@pytest.mark.parametrize("bits", WIDTHS)
def test_narrow_integers_are_numbers(bits: int) -> None:
    """Rows and columns are not counted in an int8, whoever gives one."""
    codes = some_codes(5000, 100, bits)
    packed = pack(codes, np.int8(bits))  # type: ignore[arg-type]
    assert np.array_equal(packed, pack(codes, bits))
    assert np.array_equal(unpack(packed, np.int8(bits), np.int8(100)), codes)  # type: ignore[arg-type]
    assert padding_is_zero(packed, np.int8(bits), np.int8(100))  # type: ignore[arg-type]
