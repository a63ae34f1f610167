"""Whether several writers encoded a table alike: then whoever encodes one of its rows again gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from checkrun_format import quantize
from checkrun_format.blocks import FieldPlan
from checkrun_format.writer import PartList


def encoded_alike(table: str, plans: Sequence[FieldPlan], part_lists: Sequence[PartList]) -> list[FieldPlan] | None:
    """The plans of a table's fields, with the qparams that all writers chose; None if some row may differ.

    So it may where the writers chose several, took other bits or another encoder than planned, or where a quantized
    row was cut by columns: each piece has qparams of its own.

    Parameters
    ----------
    plans : sequence of FieldPlan
        As the run would encode whole rows; with `qparams` where they were given to the writers.
    """
    chosen = [_as_told(table, plan, part_lists) for plan in plans]
    if any(_is_otherwise(table, plan, part_lists) for plan in plans if plan.bits is not None):
        return None
    found = [plan for plan in chosen if plan is not None]
    return found if len(found) == len(chosen) else None


def _as_told(table: str, plan: FieldPlan, part_lists: Sequence[PartList]) -> FieldPlan | None:
    fields = [part_list.statistics.get(table, {}) for part_list in part_lists]
    told = [some[plan.name] for some in fields if plan.name in some]
    if plan.bits is None:
        return None if told else plan  # a writer narrowed or quantized it
    method = {**quantize.method(plan.encoder, plan.bits).told(), "bits": plan.bits}
    if any(one.get(key) != value for one in told for key, value in method.items()):
        return None
    qparams = {one["qparams"] for one in told} | ({plan.qparams} if plan.qparams else set())
    return replace(plan, qparams=qparams.pop()) if len(qparams) == 1 else None


def _is_otherwise(table: str, plan: FieldPlan, part_lists: Sequence[PartList]) -> bool:
    """Whether a part holds the field raw, by other bits, or not in all of its columns."""
    for document in (part_list.document for part_list in part_lists):
        for part in document.parts:
            if document.tables[part[0]] == table:
                for field, start in zip(document.blocks[part[1]].fields, part[8:], strict=True):
                    whole = (start, field.columns, field.bits) == (0, plan.columns, plan.bits)
                    if field.name == plan.name and not whole:
                        return True
    return False
