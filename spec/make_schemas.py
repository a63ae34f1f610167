"""Write the JSON Schemas of all documents, generated from the records in `checkrun_format.manifest`.

    python spec/make_schemas.py FOLDER

The committed copies in `spec/schemas/` are read by a person before they are replaced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from checkrun_format.manifest import DOCUMENTS
from checkrun_format.versions import FORMAT_VERSION


def schema_text(name: str) -> str:
    """The schema of one document as JSON text."""
    (schema,), components = msgspec.json.schema_components([DOCUMENTS[name]], ref_template="#/$defs/{name}")
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
