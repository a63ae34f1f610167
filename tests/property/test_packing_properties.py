"""PCK-1 against a bit stream written bit by bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from checkrun_format.packing import pack, packed_width, padding_is_zero, unpack

U8 = npt.NDArray[np.uint8]


@st.composite
def codes_and_bits(draw: st.DrawFn) -> tuple[U8, int]:
    bits, columns, rows = draw(st.integers(1, 8)), draw(st.integers(1, 130)), draw(st.integers(0, 5))
    drawn = draw(st.binary(min_size=rows * columns, max_size=rows * columns))
    return np.frombuffer(drawn, np.uint8).reshape(rows, columns) & np.uint8((1 << bits) - 1), bits


def packed_bit_by_bit(row: list[int], bits: int) -> bytes:
    stream = [code >> t & 1 for code in row for t in range(bits)]
    packed = bytearray((len(stream) + 7) // 8)
    for t, bit in enumerate(stream):
        packed[t // 8] |= bit << t % 8
    return bytes(packed)


class TestStream:
    """Code j of a row occupies the bits j*bits .. (j+1)*bits - 1, least significant first; rows start anew."""

    @given(codes_and_bits())
    def test_bytes(self, given_codes: tuple[U8, int]) -> None:
        codes, bits = given_codes
        packed = pack(codes, bits)
        assert packed.shape == (len(codes), packed_width(codes.shape[1], bits))
        assert [bytes(row) for row in packed] == [packed_bit_by_bit(row, bits) for row in codes.tolist()]

    @given(codes_and_bits())
    def test_round_trip(self, given_codes: tuple[U8, int]) -> None:
        codes, bits = given_codes
        assert np.array_equal(unpack(pack(codes, bits), bits, codes.shape[1]), codes)


class TestPadding:
    """A row is padded with zero bits to a whole byte; a reader's codes do not depend on them."""

    @given(codes_and_bits(), st.integers(1, 255))
    def test_set_bits_are_found_and_ignored(self, given_codes: tuple[U8, int], noise: int) -> None:
        codes, bits = given_codes
        columns, packed = codes.shape[1], pack(codes, bits)
        assert padding_is_zero(packed, bits, columns)
        used = columns * bits % 8
        dirt = noise >> used << used & 0xFF if used else 0
        packed[-1:, -1] |= np.uint8(dirt)
        assert padding_is_zero(packed, bits, columns) == (not dirt or not len(codes))
        assert np.array_equal(unpack(packed, bits, columns), codes)
