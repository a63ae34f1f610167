"""Write the JSON Schemas of all documents, generated from the records in `checkrun_format.manifest`.

    python spec/make_schemas.py FOLDER

The committed copies in `spec/schemas/` are read by a person before they are replaced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from checkrun_format.manifest import DOCUMENTS
from checkrun_format.versions import FORMAT_VERSION


def _when(given: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """If these keys are there and so, then those are so."""
    return {"if": {"properties": given, "required": list(given)}, "then": {"properties": then}}


def _is(value: Any) -> dict[str, Any]:
    return {"const": value}


_NULL, _NOT_NULL = _is(None), {"not": _is(None)}


def _like(name: str) -> list[dict[str, Any]]:
    """A digest is null exactly if the number in the commit is."""
    given = {"properties": {name: _NOT_NULL}, "required": [name]}
    return [
        _when({"commit": given}, {f"{name}_sha256": _NOT_NULL}),
        _when({"commit": {"not": given}}, {f"{name}_sha256": _NULL}),
    ]


RULES: dict[str, dict[str, Any]] = {
    "Manifest": {
        "allOf": [
            *_like("parent"),
            *_like("predecessor"),
            _when({"extra_blob": _NOT_NULL}, {"extra": _NULL}),
        ]
    },
    "TableEntry": {
        "allOf": [
            _when(
                {"addressing": _is("dense")}, {"key_dtype": {"not": {"enum": ["int64", "uint64"]}}, "rows": _NOT_NULL}
            ),
            _when({"addressing": _is("keyed")}, {"key_dtype": _NOT_NULL, "rows": _NULL}),
        ]
    },
    "PartFile": {"properties": {"tables": {"uniqueItems": True}}},
    "BlockEntry": {
        "allOf": [
            _when({"rows": _is(0)}, {"fields": {"maxItems": 0}}),
            _when({"rows": {"minimum": 1}}, {"fields": {"minItems": 1}}),
        ]
    },
    "BlockField": {
        "allOf": [
            _when({"encoding": _is("raw")}, {"bits": _NULL, "dtype": _NOT_NULL}),
            _when(
                {"encoding": _is("affine")},
                {"columns": _NOT_NULL, "bits": {"minimum": 1, "maximum": 8, "type": "integer"}, "dtype": _NULL},
            ),
        ]
    },
}
"""What the records cannot say: keys that depend on others (FORMAT.md 5.4, 5.5, TAB-1)."""


def merged(one: Any, other: Any) -> Any:
    """Two JSON objects as one, and so those within."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other
    return one | {key: merged(one.get(key), value) for key, value in other.items()}


def schema_text(name: str) -> str:
    """The schema of one document as JSON text."""
    (schema,), components = msgspec.json.schema_components([DOCUMENTS[name]], ref_template="#/$defs/{name}")
    components = {name: merged(component, RULES.get(name, {})) for name, component in components.items()}
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:checkrun-format:{FORMAT_VERSION}:{name}",
        **schema,
        "$defs": components,
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in DOCUMENTS:
        (folder / f"{name}.schema.json").write_text(schema_text(name), encoding="utf-8")
