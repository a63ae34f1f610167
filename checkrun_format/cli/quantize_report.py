"""`checkrun quantize-report`: what each encoder and width would make of one's own tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy.typing as npt

from checkrun_format import quantize
from checkrun_format.cli import document, graph
from checkrun_format.cli.document import json_option
from checkrun_format.cli.graph import Point
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Column, Page, Sheet
from checkrun_format.cli.progress import progress
from checkrun_format.cli.sample import Place, places
from checkrun_format.cli.text import count, escaped, quoted
from checkrun_format.interchange import KINDS

_WIDTHS = ("2", "3", "4", "8")

_WIDTHS_OF_TORCH = (2, 4, 8)
"""The widths of its operators."""

_WARM = 1 << 17
"""Elements that are encoded before the clock starts, so that kernels are compiled and loaded."""


@click.command(
    "quantize-report",
    epilog=epilog(
        """
        SOURCE is a file of tensors (safetensors, torch.save, .npz, or an index of
        shards), whose tables are chosen as `checkrun import` chooses them, or a
        checkpoint: RUN, RUN@SEQ or RUN@TAG, whose fields are decoded first: what
        is stored in 4 bits loses little more in 4 or 8.
        """,
        """
        The errors are means over the rows that the codes hold: of the l2 norm of
        decoded - original, and that over the mean l2 norm. Rows that codes cannot
        hold are kept exact, and counted. Bytes are those of codes, scale, bias and
        exact rows; the ratio is to the bytes that are there.
        """,
        """
        With --json: {"source", "tables"}, and for each field "table", "field",
        "dtype", "rows", "columns", "row_bytes", "sampled_rows" and "results":
        [{"bits", "encoder", "l2_error", "relative_l2_error", "exact_rows",
        "bytes_per_row", "ratio", "seconds"}]. An error is null where all rows are
        exact; a relative one of rows of zeros, too.
        """,
        examples="""
        checkrun quantize-report model.safetensors
        checkrun quantize-report my-run@42 --bits 4 --plot out.svg
        """,
    ),
)
@click.argument("source", type=click.Path())
@click.option(
    "--table", "tables", metavar="PATTERN", multiple=True, help="Only tables that match (*, ?); may be repeated."
)
@click.option(
    "--bits",
    type=click.Choice(list(map(str, range(1, 9)))),
    multiple=True,
    help="A width; may be repeated. Default: 2, 3, 4 and 8.",
)
@click.option(
    "--encoder",
    "encoders",
    type=click.Choice(sorted(quantize.ENCODERS)),
    multiple=True,
    help="An encoder; may be repeated. Default: all; torch_compat at the widths of torch.",
)
@click.option(
    "--rows",
    type=click.IntRange(1),
    metavar="N",
    default=100_000,
    show_default=True,
    help="Look at N evenly spread rows of a table at most.",
)
@click.option("--plot", type=click.Path(), metavar="FILE.svg", help="Draw error against bytes and against time.")
@click.option("--format", "kind", type=click.Choice(list(KINDS)), help="What kind of file SOURCE is.")
@json_option
def quantize_report(
    *,
    source: str,
    tables: tuple[str, ...],
    bits: tuple[str, ...],
    encoders: tuple[str, ...],
    rows: int,
    plot: str | None,
    kind: str | None,
    as_json: bool,
) -> None:
    """Tell what encoders and widths would cost.

    For each table, or field of one, and each width and encoder: the error of a row, absolute and relative, the bytes
    of a row, and the seconds that encoding a sample of its rows takes. Nothing is written but the plot.
    """
    if plot is not None:
        graph.check(Path(plot))
    pairs = list(_pairs(sorted(map(int, dict.fromkeys(bits or _WIDTHS))), list(dict.fromkeys(encoders))))
    with progress("quantize-report") as advance, places(source, tables, kind) as found:
        reports = [Report(place, place.sample(rows), pairs, advance) for place in found]
    if plot is not None:
        graph.draw([(report.title, list(report.points())) for report in reports], Path(plot))
    if as_json:
        document.whole(document.finite({"source": source, "tables": [report.as_object() for report in reports]}))
    else:
        page = Page()
        for report in reports:
            report.show(page)
        if plot is not None:
            page.line(f"Drawn in {plot}.")


def _pairs(widths: Sequence[int], encoders: Sequence[str]) -> Iterator[tuple[int, str]]:
    for bits in widths:
        for encoder in encoders or quantize.ENCODERS:
            if encoders or encoder != "torch_compat" or bits in _WIDTHS_OF_TORCH:
                yield bits, encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an encoder makes of a sample."""

    bits: int
    encoder: str
    l2_error: float | None
    relative_l2_error: float | None
    exact_rows: int
    bytes_per_row: float
    ratio: float
    seconds: float

    def cells(self) -> list[str]:
        """The same for people."""
        errors = ["-" if e is None else f"{e:.4g}" for e in (self.l2_error, self.relative_l2_error)]
        numbers = (count(self.exact_rows), f"{self.bytes_per_row:,.1f}", f"{self.ratio:.3f}", f"{self.seconds:.3g}")
        return [str(self.bits), self.encoder, *errors, *numbers]


class Report:
    """What encoders make of the rows of one field."""

    def __init__(
        self,
        place: Place,
        values: npt.NDArray[Any],
        pairs: Sequence[tuple[int, str]],
        advance: Callable[[int], None],
    ) -> None:
        self.place = place
        self.sampled_rows = len(values)
        self.results = []
        for bits, encoder in pairs:
            self.results.append(_result(place, values, bits, encoder))
            advance(values.nbytes)

    @property
    def title(self) -> str:
        """Which field it is."""
        return f"{escaped(quoted(self.place.table))}, {escaped(quoted(self.place.field))}"

    def points(self) -> Iterator[Point]:
        """What can be drawn."""
        for r in self.results:
            if r.relative_l2_error is not None:
                yield Point(
                    encoder=r.encoder,
                    bits=r.bits,
                    error=r.relative_l2_error,
                    bytes=r.bytes_per_row,
                    nanoseconds=r.seconds * 1e9 / (self.sampled_rows * self.place.columns),
                )

    def as_object(self) -> dict[str, Any]:
        """The same as JSON values."""
        place, names = self.place, Result.__dataclass_fields__
        return {
            "table": place.table,
            "field": place.field,
            "dtype": place.dtype,
            "rows": place.rows,
            "columns": place.columns,
            "row_bytes": place.row_bytes,
            "sampled_rows": self.sampled_rows,
            "results": [{name: getattr(result, name) for name in names} for result in self.results],
        }

    def show(self, page: Page) -> None:
        """Print it for people."""
        place = self.place
        about = (
            f"{count(self.sampled_rows)} of {count(place.rows)} rows, {count(place.columns)} columns of {place.dtype}"
        )
        page.line((self.title, "bold"), f": {about}, {count(place.row_bytes)} bytes a row")
        titles = ("l2 error", "relative", "exact rows", "bytes a row", "ratio", "seconds")
        columns = [Column("bits", right=True), Column("encoder"), *(Column(title, right=True) for title in titles)]
        Sheet(page, columns).rows([result.cells() for result in self.results])
        page.line()


def _result(place: Place, values: npt.NDArray[Any], bits: int, encoder: str) -> Result:
    quantize.encode(values[: -(-_WARM // place.columns)], bits, encoder)
    start = time.perf_counter()
    made = quantize.encode(values, bits, encoder)
    seconds = time.perf_counter() - start
    norms = quantize.mean_l2(values, made)
    error, norm = norms or (None, None)
    per_row = made.nbytes / len(values)
    return Result(
        bits=bits,
        encoder=encoder,
        l2_error=error,
        relative_l2_error=error / norm if error is not None and norm else None,
        exact_rows=len(made.exact_index),
        bytes_per_row=per_row,
        ratio=per_row / place.row_bytes,
        seconds=seconds,
    )
