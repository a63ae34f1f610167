"""What the documents of a run and of a checkpoint say, as JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from checkrun_format import layout, manifest
from checkrun_format.chain import History
from checkrun_format.cli import document
from checkrun_format.cli.census import Number, commit_object, kind_of, look_up
from checkrun_format.errors import CheckrunError
from checkrun_format.manifest import Commit, Field, Manifest, Problem, TableEntry
from checkrun_format.reader import StoredCheckpoint


class Description:
    """What the documents of a run say, as JSON values; what is damaged goes to `problems`."""

    def __init__(self, history: History, problems: list[Problem]) -> None:
        self._history = history
        self._problems = problems
        self._latest: Commit | None = None

    def of_run(self) -> dict[str, Any]:
        """Version, head and latest checkpoint; damaged numbers above the latest one are problems (COM-5)."""
        head = 0
        for sequence in reversed(self._history.numbers()):
            number = look_up(self._history, sequence)
            if number is not None:
                head = head or sequence
                self._note(number)
                if number.commit is not None:
                    self._latest = number.commit
                    break
        return {
            "run": self._history.store.url,
            "format_version": self._version(),
            "head": head,
            "latest": None if self._latest is None else self._latest.sequence,
        }

    def _note(self, number: Number) -> None:
        if number.problem is not None:
            self._problems.append(number.problem)

    def _version(self) -> str | None:
        try:
            return manifest.parse_run(self._history.store.get(layout.RUN_KEY) or b"").format_version
        except CheckrunError:
            return None  # already a problem of `open_history`

    def of_checkpoint(self, sequence: int | None) -> dict[str, Any] | None:
        """A checkpoint, by default the latest; None if there is none.

        Raises
        ------
        CheckpointNotFoundError, PrunedError, BurntError, DamagedError
            There is none of this number.
        """
        if sequence is None and self._latest is None:
            return None
        stored = self._history.get(self._latest.sequence if sequence is None and self._latest else sequence or 0)
        commit = stored.commit
        chain, broken_at = self._chain(commit)
        return {
            "sequence": commit.sequence,
            "kind": kind_of(commit),
            **commit_object(commit),
            "format_version": commit.format_version,
            "requires": commit.requires,
            "chain": [below.sequence for below in chain],
            "chain_bytes": sum(below.bytes for below in chain),
            "broken_at": broken_at,
            **self._contents(stored),
        }

    def _chain(self, commit: Commit) -> tuple[list[Commit], int | None]:
        """The commits of a chain, and the number at which it breaks."""
        chain = [commit]
        while chain[-1].parent is not None:
            number = look_up(self._history, chain[-1].parent)
            if number is None or number.commit is None:
                what = "missing" if number is None else number.kind
                problem = f"checkpoint {chain[-1].parent} of its chain is {what}"
                place = layout.commit_key(commit.sequence)
                self._problems.append(Problem(place=place, kind="damaged", message=problem))
                return chain, chain[-1].parent
            chain.append(number.commit)
        return chain, None

    def _contents(self, stored: StoredCheckpoint) -> dict[str, Any]:
        try:
            contents = stored.manifest
        except CheckrunError as error:
            self._problems.append(Problem.of(error, stored.place("manifest.json")))
            return dict.fromkeys(("writers", "tables", "dropped", "tensors", "extra", "blobs"))
        return {
            "writers": len(contents.writers),
            "tables": list(self._tables(stored, contents)),
            "dropped": contents.dropped,
            "tensors": [{"name": t.name, "dtype": t.dtype, "shape": t.shape} for t in contents.tensors],
            "extra": _extra(contents),
            "blobs": [{"name": blob.name, "bytes": blob.bytes} for blob in contents.blobs],
        }

    def _tables(self, stored: StoredCheckpoint, contents: Manifest) -> Iterator[dict[str, Any]]:
        parts_known = True
        try:
            stored.stored_parts()
        except CheckrunError as error:
            self._problems.append(Problem.of(error, stored.place("manifest.json")))
            parts_known = False
        for entry in contents.tables:
            told = _table(entry)
            if parts_known:
                try:
                    told |= _stored(stored, entry)
                except CheckrunError as error:
                    problem = Problem.of(error, stored.place("manifest.json"))
                    self._problems.append(problem)
                    told |= {"problem": document.problem(problem)}
            yield told


def _table(entry: TableEntry) -> dict[str, Any]:
    """A table as the manifest tells it."""
    return {
        "name": entry.name,
        "addressing": entry.addressing,
        "key_dtype": entry.key_dtype,
        "rows": entry.rows,
        "storage": entry.storage,
        "requires": entry.requires,
        "stored_rows": None,
        "fields": [_field(field) | {"encodings": None} for field in entry.fields],
        "problem": None,
    }


def _field(field: Field) -> dict[str, Any]:
    return {"name": field.name, "dtype": field.dtype, "columns": field.columns, "encoder": field.encoder}


def _stored(stored: StoredCheckpoint, entry: TableEntry) -> dict[str, Any]:
    """What the part files add: rows, and how each field is encoded."""
    found: dict[str, list[dict[str, Any]]] = {field.name: [] for field in entry.fields}
    for part in stored.parts(entry.name):
        for f in stored.block(part).entry.fields:
            encoding = {"encoding": f.encoding, "bits": f.bits, "dtype": f.dtype}
            if encoding not in found[f.name]:
                found[f.name].append(encoding)
    return {
        "stored_rows": stored.stored_rows(entry.name),
        "fields": [_field(field) | {"encodings": found[field.name]} for field in entry.fields],
    }


def _extra(contents: Manifest) -> dict[str, Any]:
    """The trainer's state if it stands in the manifest, else its size."""
    if contents.extra_blob is not None:
        return {"bytes": contents.extra_blob.bytes, "value": None, "in_blob": True}
    size = len(json.dumps(contents.extra, ensure_ascii=False, separators=(",", ":")).encode())
    return {"bytes": size, "value": contents.extra, "in_blob": False}
