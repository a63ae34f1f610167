"""Names and paths (FORMAT.md sections 3 and 4), and the Zarr documents that stand at them. Pure."""

from __future__ import annotations

import fnmatch
import json
import re
from typing import Any

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError

CONVENTION = {"uuid": "d5df0d53-d446-49ad-a4cd-95a3e6d6a63f", "name": "checkrun"}
"""The entry of `zarr_conventions` by which this format is known (DOC-3)."""

RUN_KEY = "zarr.json"
TAGS = "tags"
"""Prefix of all tags."""
MAX_SEQUENCE = 2**53 - 1
MAX_COMMIT_BYTES = 8192
MAX_INLINE_EXTRA = 64 * 1024

_SEQUENCE = re.compile(r"[0-9]{8}|[1-9][0-9]{8,15}")
_ATTEMPT = re.compile(r"[0-9a-f]{16,64}")
_FIELD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TAG = re.compile(r"(?![0-9]+\Z)[a-z0-9][a-z0-9._-]{0,63}")
_DIMENSIONS = {"codes": "byte", "qparams": "qparam"}


def folder(sequence: int) -> str:
    """Name of a checkpoint's folder (TRE-1)."""
    return f"{sequence:08d}"


def parse_folder(name: str) -> int | None:
    """The number that a folder's name stands for, None for a stranger (TRE-1)."""
    if _SEQUENCE.fullmatch(name) is None or not 0 < int(name) <= MAX_SEQUENCE:
        return None
    return int(name)


def commit_key(sequence: int) -> str:
    """Key of a checkpoint's commit."""
    return f"{folder(sequence)}/zarr.json"


def attempt_prefix(sequence: int, attempt: str) -> str:
    """Prefix of all objects of one attempt, without a slash at its end."""
    return f"{folder(sequence)}/{attempt}"


def is_attempt(name: str) -> bool:
    """Whether a name is that of an attempt (TRE-2)."""
    return _ATTEMPT.fullmatch(name) is not None


def tag_key(name: str) -> str:
    """Key of a tag (TAG-1)."""
    return f"{TAGS}/{name}.json"


def parse_tag_key(key: str) -> str | None:
    """The name of the tag that a key is of, None for a stranger (TAG-1)."""
    name = key.removeprefix(f"{TAGS}/").removesuffix(".json")
    return name if key == tag_key(name) and is_tag(name) else None


def is_tag(name: str) -> bool:
    """Whether a text may be the name of a tag (TAG-1)."""
    return _TAG.fullmatch(name) is not None


def check_tag_name(name: object) -> str:
    """Accept the name of a tag (TAG-1), or raise InvalidInputError."""
    if not isinstance(name, str) or not is_tag(name):
        raise InvalidInputError(
            f"tag name {name!r}: give 1 to 64 of a-z 0-9 . _ - that begin with a letter or digit and are no number"
        )
    return name


def part_file(writer: int) -> str:
    """Name of a writer's part file within its attempt."""
    return f"parts-{writer}.json.gz"


def block_group(writer: int, block: int) -> str:
    """Name of a block's group within its attempt."""
    return f"block-{writer}-{block}"


def dense_group(writer: int) -> str:
    """Name of the group of a writer's dense arrays within its attempt."""
    return f"dense-{writer}"


def chunk_count(rows: int, chunk_rows: int) -> int:
    """Number of chunks of an array of `rows` rows."""
    return -(-rows // chunk_rows)


def balanced_chunk_rows(rows: int, row_bytes: int, chunk_bytes: int) -> int:
    """Rows of a chunk so that all chunks are about equally full (ZAR-6)."""
    chunks = max(1, -(-rows * row_bytes // chunk_bytes))
    return max(1, -(-rows // chunks))


def chunk_name(index: int, dimensions: int) -> str:
    """Key of a chunk within its array (ZAR-2)."""
    return f"c/{index}" + "/0" * (dimensions - 1)


def check_name(name: object, what: str) -> str:
    """Accept a table, tensor or blob name (TRE-3), or raise InvalidInputError."""
    if not isinstance(name, str):
        raise InvalidInputError(f"{what} name {name!r} is not text")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{what} name {name!r} cannot be written as UTF-8") from error
    return name


def check_field_name(name: object, table: str) -> str:
    """Accept a field name (TRE-3), or raise InvalidInputError."""
    if not isinstance(name, str) or _FIELD.fullmatch(name) is None:
        raise InvalidInputError(f"table {table!r}: field name {name!r} does not match [a-z][a-z0-9_]{{0,63}}")
    return name


def matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern of `*` and `?`; a bracket is an ordinary character."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def to_json(document: Any) -> bytes:
    """UTF-8 JSON without white space; keys keep their order."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def group_document(checkrun: dict[str, Any] | None = None) -> bytes:
    """A Zarr v3 group, plain or carrying a document of this format (section 5)."""
    attributes = {} if checkrun is None else {"zarr_conventions": [CONVENTION], "checkrun": checkrun}
    return to_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


_COMPRESSORS: dict[str, Any] = {
    "zstd": lambda size: {"level": 1, "checksum": False},
    "blosc": lambda size: {"typesize": size, "cname": "zstd", "clevel": 5, "shuffle": "shuffle", "blocksize": 0},
}


def array_document(name: str, dtype: str, shape: tuple[int, ...], chunk_rows: int, compression: str | None) -> bytes:
    """The `zarr.json` of an array under the profile of FORMAT.md section 4."""
    size = dtypes.logical(dtype).itemsize
    codecs: list[dict[str, Any]] = [
        {"name": "bytes", "configuration": {"endian": "little"}} if size > 1 else {"name": "bytes"}
    ]
    if compression is not None:
        codecs.append({"name": compression, "configuration": _COMPRESSORS[compression](size)})
    codecs.append({"name": "crc32c"})
    second = _DIMENSIONS.get(name.rpartition(".")[2], "column")
    return to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk_rows, *shape[1:]]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _fill_value(dtype),
            "codecs": codecs,
            "attributes": {},
            "dimension_names": ["entry", second][: len(shape)],
        }
    )


def _fill_value(dtype: str) -> Any:
    return [0.0, 0.0] if dtype.startswith("complex") else 0.0 if dtype.startswith("float") else 0
