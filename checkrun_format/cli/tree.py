"""`checkrun tree`: how the checkpoints of a run lie over one another, and what was abandoned."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from checkrun_format.cli import document, endings
from checkrun_format.cli.address import parse_run, run_argument
from checkrun_format.cli.census import census, open_history
from checkrun_format.cli.document import json_option
from checkrun_format.cli.lineage import Node, latest_of, lineage
from checkrun_format.cli.manual import epilog
from checkrun_format.cli.page import Column, Page, Sheet, style_of
from checkrun_format.cli.text import count

_DRAWN = {"base": "■", "increment": "├", "abandoned": "✗", "lane": "┊", "trunk": "│", "none": "·", "bad": "!"}
_ASCII = {"base": "#", "increment": "+", "abandoned": "x", "lane": ":", "trunk": "|", "none": ".", "bad": "!"}

_DEEPEST = 10
"""Abandoned branches within one another that are drawn apart."""


@click.command(
    epilog=epilog(
        """
        Marks: ■ a base, at which a chain begins; ├ an increment; ✗ abandoned;
        · pruned or burnt; ! damaged or missing.
        """,
        """
        With --json: {"run", "latest", "problems", "unreadable", "numbers"}; each
        number as of `checkrun ls`, and "follows" (the number whose state it
        continues), "abandoned", "abandoned_by", "layers" and "chain_bytes".
        """,
        examples="""
        checkrun tree my-run
        checkrun tree my-run --json | jq '.numbers[] | select(.abandoned)'
        """,
    )
)
@run_argument
@json_option
def tree(run: str, *, as_json: bool) -> None:
    """Draw the history of a run.

    A line for each number: what it is, over which parent it lies, bytes of this layer, layers and bytes of its whole
    chain, and who decided so and why. What a rollback abandoned is an indented branch before the rollback. Reads
    commits only.
    """
    history, problems = open_history(parse_run(run))
    nodes = lineage(census(history))
    unreadable = sum(node.number.is_unreadable for node in nodes)
    if as_json:
        head = {
            "run": history.store.url,
            "latest": latest_of(node.number for node in nodes),
            "problems": [document.problem(p) for p in problems],
            "unreadable": unreadable,
        }
        in_order = sorted(nodes, key=lambda node: node.number.sequence)
        document.listing(head, "numbers", (node.as_object() for node in in_order))
    else:
        _show(Page(), nodes)
    endings.conclude(problems, unreadable=unreadable)


def _show(page: Page, nodes: Sequence[Node]) -> None:
    marks = _marks()
    sheet = Sheet(
        page,
        [
            Column("number"),
            Column("kind"),
            Column("step", right=True),
            Column("bytes", right=True),
            Column("layers", right=True),
            Column("chain bytes", right=True),
            Column("policy and reason"),
        ],
    )
    rows = [_cells(node, marks) for node in nodes]
    sheet.fit([[*row[:-1], ""] for row in rows])
    sheet.header()
    for node, row in zip(nodes, rows, strict=True):
        sheet.row(row, _style(node))
    for line in _totals(nodes):
        page.line(line)


def _marks() -> dict[str, str]:
    try:
        "".join(_DRAWN.values()).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return _ASCII
    return _DRAWN


def _cells(node: Node, marks: dict[str, str]) -> list[str]:
    number = node.number
    depth = min(node.depth, _DEEPEST)
    lanes = f"{marks['trunk']} " * (depth > 0) + f"{marks['lane']} " * (depth - 1)
    return [
        f"{lanes}{marks[_mark(node)]} {number.sequence}",
        _kind(node),
        count(None if number.commit is None else number.commit.step),
        count(number.bytes),
        count(node.layers),
        count(node.chain_bytes),
        number.note,
    ]


def _mark(node: Node) -> str:
    if node.is_abandoned:
        return "abandoned"
    if node.number.kind in ("base", "increment"):
        return node.number.kind
    return "none" if node.number.kind in ("pruned", "burnt") else "bad"


def _kind(node: Node) -> str:
    commit = node.number.commit
    if commit is None:
        return node.number.kind
    kind = "base" if commit.parent is None else f"over {commit.parent}"
    if commit.rollback_to is not None:
        kind += f", back to {commit.rollback_to}"
    if node.is_abandoned:
        kind += ", abandoned" if node.abandoned_by is None else f", abandoned by {node.abandoned_by}"
    return kind


def _style(node: Node) -> str:
    if node.number.is_unreadable or node.number.kind == "missing":
        return "red"
    return "dim" if node.is_abandoned else style_of(node.number.kind)


def _totals(nodes: Sequence[Node]) -> list[str]:
    committed = [node for node in nodes if node.number.commit is not None]
    if not committed:
        return ["No checkpoint yet."]
    latest = max(committed, key=lambda node: node.number.sequence)
    abandoned = [node for node in committed if node.is_abandoned]
    lines = ["", f"{len(committed):,} checkpoints, {_bytes(committed)} bytes."]
    if abandoned:
        lines.append(f"Abandoned: {len(abandoned):,} of them, {_bytes(abandoned)} bytes.")
    if latest.layers is not None:
        size = f"{latest.layers:,} layer{'s' * (latest.layers != 1)}, {count(latest.chain_bytes)} bytes"
        lines.append(f"The chain of the latest, {latest.number.sequence}: {size}.")
    return lines


def _bytes(nodes: Sequence[Node]) -> str:
    return f"{sum(node.number.bytes or 0 for node in nodes):,}"
