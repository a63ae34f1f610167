"""`checkrun export`: a checkpoint as a file of tensors."""

from __future__ import annotations

from typing import Any

import click

from checkrun_format.checkpoint import Checkpoint
from checkrun_format.cli import document
from checkrun_format.cli.address import address_argument, checkpoint_at
from checkrun_format.cli.document import json_option
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Column, Page, Sheet
from checkrun_format.cli.progress import progress
from checkrun_format.cli.text import count, quoted
from checkrun_format.interchange import KINDS, Exported, Fused, Fusion, export_checkpoint, export_fused
from checkrun_format.interchange.fbgemm import WIDTHS


@click.command(
    epilog=epilog(
        """
        A table of one field becomes a tensor of the table's name; the fields of
        another TABLE.FIELD, keys TABLE.keys, blobs blobs.NAME. The file also
        says what is a table, and holds the trainer's state: `checkrun import`
        makes the same checkpoint of it.
        """,
        """
        With --fbgemm each quantized table becomes uint8 (rows, bytes of a row):
        codes, then scale and bias, float32 at 8 bits and float16 at 4 and 2.
        Codes are copied as they are stored wherever this layout can hold them;
        how many rows could not be copied is printed.
        """,
        """
        With --json: {"checkpoint", "file", "file_bytes", "tensors", "tables",
        "blobs"}; with --fbgemm "tables" maps each fused one to "bits", "columns",
        "rows", "copied", "encoded" and the row numbers or keys "exact",
        "recoded" and "lost", and "plain" and "left_out" name the others.
        """,
        examples="""
        checkrun export my-run@42 model.safetensors
        checkrun export my-run serving.npz --fbgemm
        """,
    )
)
@address_argument
@click.argument("file", type=click.Path(readable=False))
@click.option("--fbgemm", is_flag=True, help="Tables as fused rows for FBGEMM.")
@click.option(
    "--bits",
    type=click.Choice(list(map(str, WIDTHS))),
    help="With --fbgemm: width of all tables, raw ones too. Default: the narrowest that holds the stored codes.",
)
@click.option("--format", "kind", type=click.Choice(list(KINDS)), help="What FILE is. Default: as its suffix says.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
def export(
    *, address: str, file: str, fbgemm: bool, bits: str | None, kind: str | None, force: bool, as_json: bool
) -> None:
    """Write a checkpoint as a file of tensors.

    FILE becomes a safetensors file, a state dict for torch.load, or an .npz, as its suffix says. The checkpoint is
    SEQ, by default the latest. Quantized tables are decoded. Written piece by piece, apart from state dicts, which
    take as much memory as the file has bytes. FILE appears when it is complete.
    """
    if bits is not None and not fbgemm:
        raise click.UsageError("--bits is for --fbgemm: without it tables are decoded")
    checkpoint = checkpoint_at(address)
    options: dict[str, Any] = {"kind": kind, "overwrite": force}
    with progress("export") as advance:
        if fbgemm:
            width = None if bits is None else int(bits)
            fused = export_fused(checkpoint, file, bits=width, advance=advance, **options)
        else:
            plain = export_checkpoint(checkpoint, file, advance=advance, **options)
    if fbgemm:
        _tell_fused(checkpoint, file, fused, as_json=as_json)
    else:
        _tell_plain(checkpoint, file, plain, as_json=as_json)


def _tell_plain(checkpoint: Checkpoint, file: str, done: Exported, *, as_json: bool) -> None:
    told = {"tables": done.tables, "tensors": done.tensors, "blobs": done.blobs}
    if as_json:
        head = {"checkpoint": checkpoint.sequence, "file": file, "file_bytes": done.file_bytes}
        document.whole(head | told)
        return
    held = (
        ", ".join(f"{number:,} {what[: -(number == 1) or None]}" for what, number in told.items() if number)
        or "nothing but its label"
    )
    Page().line(f"Checkpoint {checkpoint.sequence} in {file}: {held}; {done.file_bytes:,} bytes.")


def _tell_fused(checkpoint: Checkpoint, file: str, done: Fused, *, as_json: bool) -> None:
    if as_json:
        tables = {name: _fused(f) for name, f in done.tables.items()}
        head = {"checkpoint": checkpoint.sequence, "file": file, "file_bytes": done.file_bytes}
        held = {"tensors": done.tensors, "tables": tables, "plain": done.plain, "left_out": done.left_out}
        document.whole(head | held)
        return
    page = Page()
    titles = ("rows", "columns", "bits", "copied", "encoded", "exact", "recoded", "lost")
    rows = [
        [quoted(name), *map(count, (f.rows, f.columns, f.bits, f.copied, f.encoded)), *_counts(f)]
        for name, f in done.tables.items()
    ]
    Sheet(page, [Column("table"), *(Column(title, right=True) for title in titles)]).rows(rows)
    for what, listed in (("not fused, as they are not quantized", done.plain), ("left out", done.left_out)):
        if listed:
            page.line(f"{what}: {', '.join(map(quoted, listed))}")
    page.line(f"Checkpoint {checkpoint.sequence} in {file}: {done.file_bytes:,} bytes.")


def _fused(fusion: Fusion) -> dict[str, Any]:
    counts = {key: getattr(fusion, key) for key in ("bits", "columns", "rows", "copied", "encoded")}
    return counts | {key: getattr(fusion, key).tolist() for key in ("exact", "recoded", "lost")}


def _counts(fusion: Fusion) -> list[str]:
    return [count(len(ids)) for ids in (fusion.exact, fusion.recoded, fusion.lost)]
