"""Write the vectors of section 7 of FORMAT.md: packed codes and qparams, and the values that they decode to.

    python spec/make_vectors.py FOLDER

Values come from exact fractions, rounded as DEC-1 and DEC-2 say, not from any decoder. Bytes are in hex, little endian,
in C order. The committed copy is `spec/vectors/decoding.json`.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from checkrun_format.versions import FORMAT_VERSION

COLUMNS = (1, 3, 8, 13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float:
    """A binary format of IEEE 754, and bfloat16: how many bits its exponents and fractions have."""

    exponent: int
    fraction: int

    @property
    def lowest(self) -> int:
        """The exponent of the least normal number."""
        return 2 - (1 << (self.exponent - 1))

    def hex(self, bits: int) -> str:
        """The bytes of a number of these bits."""
        return bits.to_bytes((1 + self.exponent + self.fraction) // 8, "little").hex()

    def number(self, bits: int) -> Fraction:
        """The finite number of these bits."""
        sign, rest = divmod(bits, 1 << (self.exponent + self.fraction))
        exponent, fraction = divmod(rest, 1 << self.fraction)
        whole = fraction + ((1 << self.fraction) if exponent else 0)
        return Fraction(2) ** (max(exponent, 1) - 1 + self.lowest - self.fraction) * (-whole if sign else whole)

    def rounded(self, number: Fraction) -> int:
        """The bits of the nearest number, of two equally near ones of the even one; subnormal numbers are kept."""
        size = abs(number)
        exponent = self.lowest
        if size:
            exponent = max(self.lowest, math.floor(math.log2(size.numerator) - math.log2(size.denominator)) - 1)
            while size >= Fraction(2) ** (exponent + 1):
                exponent += 1
        steps = round(size / Fraction(2) ** (exponent - self.fraction))
        bits = ((exponent - self.lowest) << self.fraction) + steps
        if bits >= ((1 << self.exponent) - 1) << self.fraction:
            raise OverflowError(number)
        return bits | ((number < 0) << (self.exponent + self.fraction))


FLOATS = {
    "float16": Float(exponent=5, fraction=10),
    "bfloat16": Float(exponent=8, fraction=7),
    "float32": Float(exponent=8, fraction=23),
    "float64": Float(exponent=11, fraction=52),
}

SINGLE = FLOATS["float32"]


def single(number: Fraction) -> Fraction:
    """The nearest float32."""
    return SINGLE.number(SINGLE.rounded(number))


def decoded(code: int, scale: Fraction, bias: Fraction, dtype: str) -> int:
    """The bits of a value: product and sum rounded to float32 (DEC-1), then the cast (DEC-2)."""
    return FLOATS[dtype].rounded(single(single(code * scale) + bias))


def packed(codes: list[int], bits: int) -> str:
    """The bytes of a row's codes (PCK-1)."""
    stream = sum(code << (place * bits) for place, code in enumerate(codes))
    return stream.to_bytes(-(-len(codes) * bits // 8), "little").hex()


def case(
    name: str, dtype: str, qparams: str, bits: int, rows: list[tuple[list[int], int, int]], exact: dict[int, list[int]]
) -> dict[str, Any]:
    """Rows of (codes, bits of the scale, bits of the bias); those of `exact` as they are in bits of the dtype."""
    kind, pair = FLOATS[dtype], FLOATS[qparams]
    nan = ((1 << (pair.exponent + 1)) - 1) << (pair.fraction - 1)
    values = [
        exact.get(place) or [decoded(code, pair.number(scale), pair.number(bias), dtype) for code in codes]
        for place, (codes, scale, bias) in enumerate(rows)
    ]
    zeros = [0] * len(rows[0][0])
    stored = [(zeros, nan, nan) if place in exact else row for place, row in enumerate(rows)]
    return {
        "name": name,
        "dtype": dtype,
        "bits": bits,
        "columns": len(rows[0][0]),
        "rows": len(rows),
        "unpacked": [codes for codes, _, _ in stored],
        "codes": "".join(packed(codes, bits) for codes, _, _ in stored),
        "qparams_dtype": qparams,
        "qparams": "".join(pair.hex(one) for _, scale, bias in stored for one in (scale, bias)),
        "exact_index": sorted(exact),
        "exact_values": "".join(kind.hex(one) for place in sorted(exact) for one in exact[place]),
        "values": "".join(kind.hex(one) for row in values for one in row),
    }


def codes_of(bits: int, columns: int, seed: int) -> list[int]:
    """Codes that look like any: of a congruential generator."""
    found = []
    for _ in range(columns):
        seed = (seed * 1103515245 + 12345) % 2**31
        found.append((seed >> 16) % 2**bits)
    return found


def of_every_width() -> list[dict[str, Any]]:
    """Each number of bits and columns; scales of 2^-4, about 0.1, 0 and the least subnormal."""
    pairs = [(0x2C00, 0xB800), (0x2E66, 0x0000), (0x0000, 0x3C01), (0x0001, 0x8003), (0x3C00, 0x8000)]
    return [
        case(
            f"{bits} bits, {columns} columns",
            "float32",
            "float16",
            bits,
            [(codes_of(bits, columns, 100 * bits + 10 * columns + row), *pair) for row, pair in enumerate(pairs)],
            {},
        )
        for bits in range(1, 9)
        for columns in COLUMNS
    ]


def of_roundings() -> list[dict[str, Any]]:
    """Where flushing, fusing, and rounding once or away from even would show."""
    ramp = list(range(8))
    return [
        case("product and sum are rounded apart", "float32", "float32", 3, [(ramp, 0x3F800001, 0xC0400000)], {}),
        case("subnormal float32 are kept", "float32", "float32", 3, [(ramp, 0x00000001, 0x80000003)], {}),
        case("large float32", "float32", "float32", 3, [(ramp, 0x7D800000, 0xFF000000)], {}),
        case("ties to even in float16", "float16", "float16", 3, [(ramp, 0x1000, 0x3C00)], {}),
        case("subnormal and signed zero in float16", "float16", "float32", 3, [(ramp, 0x33000000, 0xB3800000)], {}),
        case("ties to even in bfloat16", "bfloat16", "float16", 3, [(ramp, 0x1C00, 0x3C00)], {}),
        case("float64 has the float32", "float64", "float16", 3, [(ramp, 0x2E66, 0xB266)], {}),
    ]


def of_exact_rows() -> list[dict[str, Any]]:
    """Bits that no codes represent: payloads of NaN, infinities, zeros below zero (EXA-1)."""
    odd = {
        "float32": [0x7FC01234, 0xFF800000, 0x80000000],
        "float16": [0x7E11, 0xFC00, 0x8000],
        "bfloat16": [0x7FD1, 0xFF80, 0x8000],
        "float64": [0x7FF8000000001234, 0xFFF0000000000000, 0x8000000000000000],
    }
    codes = [([1, 2, 3], 0x3800, 0x3C00), ([0, 0, 0], 0, 0), ([3, 0, 1], 0x3800, 0xBC00)]
    return [case(f"exact rows of {dtype}", dtype, "float16", 2, codes, {1: bits}) for dtype, bits in odd.items()]


def narrowed(stored: str, bits: list[int]) -> dict[str, Any]:
    """Values of a raw float32 field that are stored narrower (RAW-1)."""
    kind = FLOATS[stored]
    return {
        "name": f"float32 stored as {stored}",
        "stored": "".join(kind.hex(one) for one in bits),
        "stored_dtype": stored,
        "values": "".join(SINGLE.hex(SINGLE.rounded(kind.number(one))) for one in bits),
    }


def document() -> str:
    """All vectors as JSON, a case in each line."""
    cases = [*of_every_width(), *of_roundings(), *of_exact_rows()]
    raw = [
        narrowed("float16", [0x0001, 0x83FF, 0x3C01, 0x7BFF]),
        narrowed("bfloat16", [0x0001, 0x807F, 0x3F81, 0x7F7F]),
    ]
    lines = [",\n".join(json.dumps(one) for one in some) for some in (cases, raw)]
    return f'{{"format_version": "{FORMAT_VERSION}",\n"affine": [\n{lines[0]}],\n"narrowed": [\n{lines[1]}]}}\n'


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "decoding.json").write_text(document(), encoding="utf-8")
