"""`checkrun import`: a file of tensors as the next checkpoint of a run."""

from __future__ import annotations

from typing import Any

import click

from checkrun_format.cli import document
from checkrun_format.cli.address import parse_run, run_argument
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Column, Page, Sheet
from checkrun_format.cli.progress import progress
from checkrun_format.cli.text import count, quoted
from checkrun_format.interchange import KINDS, RAW, Imported, ImportedTable, import_file


@click.command(
    "import",
    epilog=epilog(
        """
        Tensors (rows, columns) that match --table become tables with the field
        "weight", all others dense tensors. By default those of more than 10,000
        rows; in a file of `checkrun export` those that were tables. What is a
        table in the latest checkpoint stays one.
        """,
        """
        With --json: {"run", "file", "file_bytes", "committed", "checkpoint",
        "parent", "step", "stored_bytes", "tensors", "dropped", "tables"}, and
        for each table "table", "rows", "changed", "bits" and "replaced".
        """,
        examples="""
        checkrun import model.safetensors my-run --bits 4
        checkrun import epoch-2.pt my-run --table 'emb.*' --step 2000
        """,
    ),
)
@click.argument("file", type=click.Path(readable=False))
@run_argument
@click.option(
    "--table", "tables", metavar="PATTERN", multiple=True, help="Tensors that become tables (*, ?); may be repeated."
)
@click.option(
    "--bits",
    type=click.Choice([*map(str, range(1, 9)), RAW]),
    help="Quantize floating-point tables. Default: as in the latest checkpoint, raw in a new run.",
)
@click.option("--step", type=click.IntRange(0, 2**63 - 1), metavar="N", help="The trainer's step.")
@click.option("--format", "kind", type=click.Choice(list(KINDS)), help="What FILE is. Default: as its suffix says.")
@json_option
def import_(
    *,
    file: str,
    run: str,
    tables: tuple[str, ...],
    bits: str | None,
    step: int | None,
    kind: str | None,
    as_json: bool,
) -> None:
    """Commit a file of tensors as a checkpoint.

    FILE is a safetensors file, a state dict that torch.save wrote, or an .npz; or the index of a sharded one
    (*.index.json). RUN is created if it is not there. Of its tables only rows are stored that changed since the
    latest checkpoint: those that encode to other bits than are stored. If nothing changed, nothing is committed.
    """
    url = parse_run(run)
    width: Any = bits if bits in (None, RAW) else int(bits)
    with progress("import") as advance:
        done = import_file(file, url, tables=tables, bits=width, step=step, kind=kind, advance=advance)
    if as_json:
        document.whole(_document(url, file, done))
    else:
        _show(Page(), file, done)


def _document(url: str, file: str, done: Imported) -> dict[str, Any]:
    commit = done.checkpoint.commit
    return {
        "run": url,
        "file": file,
        "file_bytes": done.file_bytes,
        "committed": done.committed,
        "checkpoint": commit.sequence,
        "parent": commit.parent,
        "step": commit.step,
        "stored_bytes": done.checkpoint.stored_bytes if done.committed else 0,
        "tensors": done.tensors,
        "dropped": list(done.dropped),
        "tables": [_table(t) for t in done.tables],
    }


def _table(t: ImportedTable) -> dict[str, Any]:
    return {"table": t.name, "rows": t.rows, "changed": t.changed, "bits": t.bits, "replaced": t.replaced}


def _show(page: Page, file: str, done: Imported) -> None:
    commit = done.checkpoint.commit
    if not done.committed:
        page.line(f"Nothing changed: checkpoint {commit.sequence} holds all that is in {file}.")
        return
    over = "a base" if commit.parent is None else f"an increment over {commit.parent}"
    step = "" if commit.step is None else f", step {commit.step:,}"
    page.line((f"Checkpoint {commit.sequence}, {over}{step}.", "bold"))
    _show_tables(page, done)
    names = ", ".join(map(quoted, done.dropped))
    tensors = f"{done.tensors:,} dense tensor{'s' * (done.tensors != 1)}"
    page.line(f"{tensors}{f'; dropped tables: {names}' if names else ''}.")
    stored = done.checkpoint.stored_bytes
    page.line(f"{done.file_bytes:,} bytes in the file, {stored:,} stored ({done.file_bytes / stored:.1f} to 1).")


def _show_tables(page: Page, done: Imported) -> None:
    columns = [Column("table"), *(Column(title, right=True) for title in ("rows", "changed", "bits")), Column("")]
    if done.tables:
        Sheet(page, columns).rows([_cells(t) for t in done.tables])


def _cells(t: ImportedTable) -> list[str]:
    bits = RAW if t.bits is None else str(t.bits)
    note = "in the place of a table of other fields, columns or dtypes" if t.replaced else ""
    return [quoted(t.name), count(t.rows), count(t.changed), bits, note]
