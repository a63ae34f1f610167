"""`checkrun info`: what a run is, and what a checkpoint of it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from checkrun_format.cli import document, endings
from checkrun_format.cli.address import address_argument, parse
from checkrun_format.cli.census import open_history
from checkrun_format.cli.description import Description
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Column, Page, Sheet
from checkrun_format.cli.text import count, quoted

_SHORT = 200
"""Characters of `extra` that are shown to people as they are."""

_LONG = 20
"""Layers of a chain that are listed to people one by one."""


@click.command(
    epilog=epilog(
        """
        With --json: {"run", "format_version", "head", "latest", "checkpoint",
        "problems"}. The format does not store how many keys a keyed table has:
        its "rows" is null.
        """,
        examples="""
        checkrun info my-run@42
        checkrun info my-run --json | jq -r '.checkpoint.tables[].name'
        """,
    )
)
@address_argument
@json_option
def info(address: str, *, as_json: bool) -> None:
    """Show what a run and a checkpoint hold.

    The checkpoint is SEQ, by default the latest. Of it are shown: its tables (rows, fields, dtypes, how this
    checkpoint stores them, the error bound of its encoder), tensors, the trainer's state, blobs, bytes, chain,
    restores, and who decided how it was stored, and why. Reads documents only, no arrays.
    """
    where = parse(address)
    history, problems = open_history(where.url)
    about = Description(history, problems)
    told = about.of_run() | {"checkpoint": about.of_checkpoint(where.sequence)}
    if as_json:
        document.whole(document.finite(told | {"problems": [document.problem(p) for p in problems]}))
    else:
        _show(Page(), told)
    endings.conclude(problems)


def _show(page: Page, told: dict[str, Any]) -> None:
    _facts(page, [("run", told["run"]), ("format version", told["format_version"] or "unknown")])
    _facts(page, [("head", str(told["head"])), ("latest", str(told["latest"] or "no checkpoint yet"))])
    if told["checkpoint"] is not None:
        page.line()
        _show_checkpoint(page, told["checkpoint"])


def _facts(page: Page, facts: list[tuple[str, str]]) -> None:
    for name, value in facts:
        page.line((f"{name:16}", "bold"), value)


def _show_checkpoint(page: Page, told: dict[str, Any]) -> None:
    over = "a base" if told["parent"] is None else f"an increment over {told['parent']}"
    facts = [
        ("checkpoint", f"{told['sequence']}, {over}"),
        ("step", count(told["step"])),
        ("created", told["created"]),
        ("bytes", count(told["bytes"])),
        ("chain", _chain_line(told)),
        ("predecessor", str(told["predecessor"] or "-")),
        ("rollback to", str(told["rollback_to"] or "-")),
        ("restores", str(told["restores"])),
        ("policy", f"{told['policy']['name']}: {told['policy']['reason']}"),
        ("attempt", told["attempt"]),
    ]
    if told["tables"] is None:
        _facts(page, facts)
        return
    dropped = ", ".join(map(quoted, told["dropped"])) or "-"
    _facts(page, [*facts, ("writers", str(told["writers"])), ("dropped tables", dropped)])
    _facts(page, [("extra", _extra_line(told["extra"]))])
    _show_tables(page, told["tables"])
    tensors = [[quoted(t["name"]), t["dtype"], " x ".join(map(str, t["shape"])) or "scalar"] for t in told["tensors"]]
    _show_list(page, "tensors", [Column("tensor"), Column("dtype"), Column("shape")], tensors)
    blobs = [[quoted(blob["name"]), count(blob["bytes"])] for blob in told["blobs"]]
    _show_list(page, "blobs", [Column("blob"), Column("bytes", right=True)], blobs)


def _chain_line(told: dict[str, Any]) -> str:
    numbers = list(map(str, told["chain"]))
    if len(numbers) > _LONG:
        numbers[_LONG // 2 : -_LONG // 2] = ["..."]
    layers = f"{len(told['chain']):,} layer{'s' * (len(told['chain']) > 1)}"
    chain = f"{', '.join(numbers)} ({layers}, {count(told['chain_bytes'])} bytes)"
    return chain if told["broken_at"] is None else f"{chain}; BROKEN at {told['broken_at']}"


def _extra_line(extra: dict[str, Any]) -> str:
    text, value = json.dumps(extra["value"]), extra["value"]
    if not extra["in_blob"] and len(text) <= _SHORT:
        return text
    size = f"{count(extra['bytes'])} bytes of JSON"
    if not isinstance(value, dict):
        return size
    names = ", ".join(map(quoted, value))
    return f"{size}: {names}" if len(names) <= _SHORT else f"{size}: {len(value)} names"


def _show_list(page: Page, title: str, columns: list[Column], rows: list[list[str]]) -> None:
    page.line()
    if rows:
        Sheet(page, columns).rows(rows)
    else:
        page.line((f"no {title}", "dim"))


def _show_tables(page: Page, tables: list[dict[str, Any]]) -> None:
    titles = ("table", "rows", "storage", "stored rows", "field", "dtype", "columns", "encoding", "encoder")
    right = {"rows", "stored rows", "columns"}
    columns = [Column(title, right=title in right) for title in titles]
    columns += [Column("exact rows", right=True), Column("error bound", right=True)]
    _show_list(page, "tables", columns, [row for table in tables for row in _table_rows(table)])


def _table_rows(table: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each field; what is said of the table stands in the first one."""
    rows = count(table["rows"]) if table["key_dtype"] is None else f"{table['addressing']} {table['key_dtype']}"
    first = [quoted(table["name"]), rows, table["storage"], _known(table["stored_rows"])]
    for field in table["fields"]:
        yield [*first, *_field_cells(field)]
        first = [""] * len(first)


def _field_cells(field: dict[str, Any]) -> list[str]:
    encoder = field["encoder"] or {}
    return [
        field["name"],
        field["dtype"],
        count(field["columns"]),
        "?" if field["encodings"] is None else ", ".join(map(_encoding, field["encodings"])) or "-",
        str(encoder.get("name", "-")),
        str(encoder.get("exact_rows", "-")),
        str(encoder.get("error_bound", "-")),
    ]


def _encoding(encoding: dict[str, Any]) -> str:
    if encoding["encoding"] == "affine":
        return f"{encoding['bits']} bits"
    return f"{encoding['encoding']} {encoding['dtype'] or ''}".strip()


def _known(number: int | None) -> str:
    return "?" if number is None else count(number)
