"""Logical dtypes and what stores them, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError

Array = npt.NDArray[Any]
NAMES = sorted(dtypes.STORED)


def random_bits(name: str, shape: tuple[int, ...]) -> Array:
    """Any bits at all, NaN payloads among them; of bool the two that it has."""
    dtype = dtypes.logical(name)
    random = np.random.default_rng(1)
    if name == "bool":
        return random.integers(0, 2, shape).astype(np.bool_)
    raw = random.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def bits_of(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


class TestStorage:
    """TYP-1: a stored value has exactly the bits that the writer was given."""

    def test_the_list_is_that_of_the_format(self) -> None:
        assert len(NAMES) == 20 + 2 * 13
        changed = {name: stored for name, stored in dtypes.STORED.items() if name != stored}
        assert changed == {
            "bool": "uint8",
            "bfloat16": "uint16",
            "float8_e4m3fn": "uint8",
            "float8_e5m2": "uint8",
            "float8_e4m3fnuz": "uint8",
            "float8_e5m2fnuz": "uint8",
            "float8_e8m0fnu": "uint8",
            **{name: "int64" for name in NAMES if name.startswith(("datetime64_", "timedelta64_"))},
        }

    def test_names_become_folders_and_differ_in_more_than_case(self) -> None:
        assert len({name.lower() for name in NAMES}) == len(NAMES)

    @pytest.mark.parametrize(
        ("unit", "code"),
        [
            *[("year", "Y"), ("month", "M"), ("week", "W"), ("day", "D"), ("hour", "h"), ("minute", "m")],
            *[(unit, unit) for unit in ("s", "ms", "us", "ns", "ps", "fs", "as")],
        ],
    )
    def test_times_of_every_unit(self, unit: str, code: str) -> None:
        values = np.array([-1, 0, 1, 2**62, -(2**63)], f"M8[{code}]")
        assert dtypes.name_of(values.dtype) == f"datetime64_{unit}"
        assert dtypes.name_of(f"m8[{code}]") == f"timedelta64_{unit}"
        assert dtypes.to_stored(values).tolist() == [-1, 0, 1, 2**62, -(2**63)]
        back = dtypes.from_stored(dtypes.to_stored(values), f"datetime64_{unit}")
        assert np.isnat(back).tolist() == [False] * 4 + [True] and back.dtype == f"M8[{code}]"

    @pytest.mark.parametrize("name", NAMES)
    def test_bits_survive(self, name: str) -> None:
        values = random_bits(name, (40, 7))
        stored = dtypes.to_stored(values)
        assert stored.dtype == np.dtype(dtypes.STORED[name]) and stored.shape == values.shape
        assert bits_of(stored) == bits_of(values)
        back = dtypes.from_stored(stored, name)
        assert back.dtype == dtypes.logical(name) and bits_of(back) == bits_of(values)

    @pytest.mark.parametrize("name", NAMES)
    def test_no_copy_where_it_can_be_avoided(self, name: str) -> None:
        values = random_bits(name, (6, 4))
        assert np.shares_memory(dtypes.to_stored(values), values)
        assert np.shares_memory(dtypes.from_stored(dtypes.to_stored(values), name), values)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("cut", [np.s_[::-1], np.s_[:, ::2], np.s_[3:3], np.s_[1, 2], np.s_[::2, ::-1]], ids=str)
    def test_strides_do_not_matter(self, name: str, cut: Any) -> None:
        values = np.asarray(random_bits(name, (6, 4))[cut])
        assert bits_of(dtypes.to_stored(values)) == bits_of(values)
        assert dtypes.to_stored(values).shape == values.shape

    @pytest.mark.parametrize("name", [n for n in NAMES if np.dtype(dtypes.logical(n)).newbyteorder(">").str[0] == ">"])
    def test_byte_order_does_not_matter(self, name: str) -> None:
        values = random_bits(name, (5, 3))
        swapped = values.astype(values.dtype.newbyteorder(">"))
        assert dtypes.name_of(swapped.dtype) == name
        assert bits_of(dtypes.to_stored(swapped)) == bits_of(values)

    def test_some_dtypes_have_a_byte_order(self) -> None:
        swapped = [n for n in NAMES if np.dtype(dtypes.logical(n)).newbyteorder(">").str[0] == ">"]
        assert {"float32", "complex128", "uint16"} <= set(swapped)


class TestNames:
    @pytest.mark.parametrize("name", NAMES)
    def test_of_every_logical_dtype(self, name: str) -> None:
        assert dtypes.name_of(dtypes.logical(name)) == name

    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ("longlong", "int64"),
            ("ulonglong", "uint64"),
            ("intc", "int32"),
            (int, "int64"),
            (float, "float64"),
            (complex, "complex128"),
            (bool, "bool"),
            ("?", "bool"),
            (">f2", "float16"),
            (np.float32, "float32"),
            (ml_dtypes.bfloat16, "bfloat16"),
            (ml_dtypes.float8_e5m2, "float8_e5m2"),
            (">M8[s]", "datetime64_s"),
            ("m8[1us]", "timedelta64_us"),
        ],
    )
    def test_of_equal_dtypes(self, given: Any, name: str) -> None:
        assert dtypes.name_of(given) == name

    @pytest.mark.parametrize(
        "refused",
        [
            *("O", "S3", "U4", "V8", "M8", "m8", "M8[25s]", "T", "longdouble", "clongdouble", "bfloat17", "", None, 3),
            *([("a", "f4")], np.dtype((np.float32, (2,))), ["f4"], {"a": 1}, ml_dtypes.int4, ml_dtypes.float8_e3m4),
            *(ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float4_e2m1fn, "torch.float32"),
        ],
        ids=str,
    )
    def test_of_others_there_are_none(self, refused: Any) -> None:
        with pytest.raises(InvalidInputError, match="dtype"):
            dtypes.name_of(refused)

    @pytest.mark.parametrize(
        ("refused", "advice"),
        [
            ("O", "never pickled"),
            ("S3", "a blob"),
            ("U4", "`extra`"),
            ("T", "`extra`"),
            ([("a", "f4")], "each field"),
            ("g", "give float64"),
            ("G", "give complex128"),
            ("M8[25s]", "without a multiple"),
        ],
        ids=str,
    )
    def test_the_error_tells_the_way_out(self, refused: Any, advice: str) -> None:
        with pytest.raises(InvalidInputError, match=advice):
            dtypes.name_of(refused)

    def test_floating_ones_may_be_quantized(self) -> None:
        assert {"float16", "bfloat16", "float32", "float64"} == dtypes.FLOATING
        assert set(NAMES) > dtypes.FLOATING


def test_any_true_is_stored_as_one() -> None:
    """TYP-1 and the table of dtypes: a bool is 0 or 1, though numpy takes every byte but 0 for True."""
    given = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    assert dtypes.to_stored(given).tolist() == [0, 1, 1, 1]
    assert dtypes.to_stored(given.reshape(2, 2)[:, 1]).tolist() == [1, 1]
