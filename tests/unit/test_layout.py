"""Names, paths and the Zarr documents that stand at them."""

from __future__ import annotations

import json

import pytest

from checkrun_format import dtypes, layout
from checkrun_format.chunks import object_names, row_bytes
from checkrun_format.errors import InvalidInputError
from checkrun_format.manifest import ArrayEntry

NAMES = {
    "empty": "",
    "slashes": "a/b//c/",
    "backslash": "a\\b",
    "dots": "..",
    "emoji": "🧨 embeddings 🇺🇳",
    "combining": "e\u0301",
    "composed": "\u00e9",
    "nul": "a\0b",
    "globs": "t[0]*?{a,b}",
    "long": "n" * 300,
    "zarr": "zarr.json",
    "newline": "a\nb",
    "beyond the basic plane": "\U0010ffff",
    "line separator": "\u2028",
}


class TestFolders:
    """TRE-1: a number in decimal, at least 8 digits, zero-padded, without further leading zeros."""

    @pytest.mark.parametrize(
        ("number", "name"),
        [
            (1, "00000001"),
            (41, "00000041"),
            (99_999_999, "99999999"),
            (100_000_000, "100000000"),
            (2**53 - 1, "9007199254740991"),
        ],
    )
    def test_there_and_back(self, number: int, name: str) -> None:
        assert layout.folder(number) == name
        assert layout.parse_folder(name) == number

    @pytest.mark.parametrize(
        "stranger",
        [
            *("", "1", "0000001", "00000000", "000000001", "0100000000", "9007199254740992", "99999999999999999"),
            *("-0000001", "+0000001", " 0000001", "00000001 ", "0000000a", "0x000001", "1_000_000", "00000001\n"),
            *(
                "\u0660" * 7 + "\u0661",
                "\u06600000001",
                "\u00b90000000",
                "tags",
                ".probe",
                "zarr.json",
                "00000001.bak",
                "0000.0001",
            ),
        ],
    )
    def test_strangers_are_no_checkpoints(self, stranger: str) -> None:
        assert layout.parse_folder(stranger) is None

    def test_are_compared_as_numbers(self) -> None:
        names = ["900000000", "00000010", "1000000000", "00000009"]
        numbers = [layout.parse_folder(name) for name in names]
        assert sorted(number or 0 for number in numbers) == [9, 10, 900_000_000, 1_000_000_000]


def test_keys_of_objects() -> None:
    assert layout.commit_key(42) == "00000042/zarr.json"
    assert layout.attempt_prefix(42, "9f2c") == "00000042/9f2c"
    assert [layout.part_file(3), layout.block_group(3, 12), layout.dense_group(3)] == [
        "parts-3.json.gz",
        "block-3-12",
        "dense-3",
    ]


class TestChunks:
    """ZAR-2, ZAR-4, ZAR-6: only the first dimension is cut, into chunks that are about equally full."""

    def test_names(self) -> None:
        assert [layout.chunk_name(7, 1), layout.chunk_name(7, 2)] == ["c/7", "c/7/0"]
        assert layout.chunk_name(2**40, 2) == "c/1099511627776/0"

    @pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 16 << 20])
    @pytest.mark.parametrize("row_bytes", [1, 3, 256, 3204])
    @pytest.mark.parametrize("rows", [1, 2, 3, 1000, 65_537])
    def test_are_balanced(self, rows: int, row_bytes: int, chunk_bytes: int) -> None:
        chunk_rows = layout.balanced_chunk_rows(rows, row_bytes, chunk_bytes)
        count = layout.chunk_count(rows, chunk_rows)
        assert 1 <= chunk_rows <= rows
        assert (count - 1) * chunk_rows < rows <= count * chunk_rows
        wanted = -(-rows * row_bytes // chunk_bytes)
        assert count <= wanted
        assert chunk_rows == 1 or layout.chunk_count(rows, chunk_rows - 1) > wanted

    def test_no_rows_are_no_chunks(self) -> None:
        """A table without rows asks for chunks of at least one row, and for none of them."""
        assert layout.balanced_chunk_rows(0, 12, 16 << 20) == 1
        assert layout.chunk_count(0, 1) == 0

    @pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**31 + 1, 2**33 + 5, 2**62])
    def test_counts_are_wider_than_32_bits(self, rows: int) -> None:
        """FORMAT.md section 11: rows * columns is never computed in 32 bits."""
        chunk_rows = layout.balanced_chunk_rows(rows, 128 * 4, 16 << 20)
        count = layout.chunk_count(rows, chunk_rows)
        assert count == -(-rows * 512 // (16 << 20))
        assert (rows - 1) // chunk_rows == count - 1
        entry = ArrayEntry(dtype="float32", shape=[rows, 2**33], chunk_rows=chunk_rows, compression=None)
        assert row_bytes(entry) == 2**35
        assert layout.chunk_name(count - 1, 2) == f"c/{count - 1}/0"

    def test_every_object_of_an_array_is_named(self) -> None:
        entry = ArrayEntry(dtype="uint8", shape=[10, 3], chunk_rows=4, compression=None)
        assert object_names("block-0-0/weight.codes", entry) == [
            "block-0-0/weight.codes/zarr.json",
            "block-0-0/weight.codes/c/0/0",
            "block-0-0/weight.codes/c/1/0",
            "block-0-0/weight.codes/c/2/0",
        ]


class TestNames:
    """TRE-3: table, tensor and blob names are any text that UTF-8 can carry; field names have a pattern."""

    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_any_text(self, name: str) -> None:
        assert layout.check_name(name, "table") == name
        assert json.loads(layout.to_json({"name": name})) == {"name": name}

    @pytest.mark.parametrize("name", ["\ud800", "a\udfff", "\udc80b", None, 3, b"bytes", ("a",)])
    def test_no_text_of_utf_8(self, name: object) -> None:
        with pytest.raises(InvalidInputError, match="tensor name"):
            layout.check_name(name, "tensor")

    @pytest.mark.parametrize("name", ["a", "weight", "exp_avg_sq", "a0_", "z" * 64])
    def test_fields(self, name: str) -> None:
        assert layout.check_field_name(name, "user") == name

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "Weight",
            "0a",
            "_a",
            "a-b",
            "a.b",
            "a/b",
            "wéight",
            "a" * 65,
            "a\n",
            " a",
            "a b",
            "\uff41",
            3,
            None,
            b"a",
        ],
    )
    def test_no_fields(self, name: object) -> None:
        with pytest.raises(InvalidInputError, match=r"table 'user': field name .* does not match"):
            layout.check_field_name(name, "user")


class TestDocuments:
    def test_a_plain_group(self) -> None:
        """ZAR-1: a group of Zarr v3, nothing of this format in it."""
        assert json.loads(layout.group_document()) == {"zarr_format": 3, "node_type": "group", "attributes": {}}

    def test_a_group_that_carries_a_document(self) -> None:
        """DOC-3."""
        document = json.loads(layout.group_document({"kind": "run"}))
        assert document == {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {
                "zarr_conventions": [{"uuid": "d5df0d53-d446-49ad-a4cd-95a3e6d6a63f", "name": "checkrun"}],
                "checkrun": {"kind": "run"},
            },
        }

    @pytest.mark.parametrize("dtype", sorted(set(dtypes.STORED.values())))
    @pytest.mark.parametrize("compression", [None, "zstd", "blosc"])
    def test_an_array_follows_the_profile(self, dtype: str, compression: str | None) -> None:
        """ZAR-2, ZAR-3: `bytes` little endian, at most one compression, then `crc32c`; fill value zero."""
        document = json.loads(layout.array_document("weight.values", dtype, (10, 3), 4, compression))
        size = dtypes.logical(dtype).itemsize
        names = [codec["name"] for codec in document["codecs"]]
        assert names == ["bytes", *([compression] if compression else []), "crc32c"]
        assert document["codecs"][0].get("configuration") == ({"endian": "little"} if size > 1 else None)
        assert (document["shape"], document["data_type"]) == ([10, 3], dtype)
        assert document["chunk_grid"] == {"name": "regular", "configuration": {"chunk_shape": [4, 3]}}
        assert document["chunk_key_encoding"] == {"name": "default", "configuration": {"separator": "/"}}
        assert document["fill_value"] == ([0.0, 0.0] if dtype.startswith("complex") else 0)
        assert document["attributes"] == {}
        assert "storage_transformers" not in document

    @pytest.mark.parametrize(
        ("name", "shape", "dimensions"),
        [
            ("weight.codes", (5, 2), ["entry", "byte"]),
            ("weight.qparams", (5, 2), ["entry", "qparam"]),
            ("weight.exact_values", (5, 2), ["entry", "column"]),
            ("rows", (5,), ["entry"]),
        ],
    )
    def test_dimensions_have_names(self, name: str, shape: tuple[int, ...], dimensions: list[str]) -> None:
        assert json.loads(layout.array_document(name, "uint8", shape, 5, None))["dimension_names"] == dimensions

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", object()])
    def test_what_json_cannot_carry_is_not_written(self, value: object) -> None:
        with pytest.raises((ValueError, TypeError)):
            layout.to_json({"value": value})

    def test_json_is_compact_utf_8_in_the_order_given(self) -> None:
        assert layout.to_json({"b": "é🧨", "a": [1, 2.5, None, True]}) == '{"b":"é🧨","a":[1,2.5,null,true]}'.encode()
