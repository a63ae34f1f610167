"""Whether the rows that are noted are all that change: of a sample by itself, of all rows on request."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from checkrun_format.torch.gradients import gradient_rows
from checkrun_format.torch.tracker import Taken, TouchedRows, Tracker

Tensor = torch.Tensor
Fields = Callable[[str], Mapping[str, Tensor]]

_SAMPLED_ROWS = 4096
_SAMPLED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """Rows of a table that changed without being noted.

    `rows` are int64, ascending; `fields` are those in which they changed; `cause` is a guess at why.
    """

    rows: Tensor
    fields: tuple[str, ...]
    cause: str


class Sample:
    """Some rows of each table as they were."""

    def __init__(self, tables: Mapping[str, TouchedRows], fields: Fields) -> None:
        self._rows: dict[str, Tensor] = {}
        self._values: dict[str, dict[str, Tensor]] = {}
        generator = torch.Generator().manual_seed(0)  # of its own: the trainer's numbers go on as if nothing had been
        for name, table in tables.items():
            given, count = fields(name), len(table.bitmap)
            width = sum(values[:1].numel() * values.element_size() for values in given.values()) or 1
            most = max(1, min(_SAMPLED_ROWS, _SAMPLED_BYTES // len(tables) // width))
            rows = torch.arange(count) if count <= most else torch.randint(count, (most,), generator=generator)
            self._rows[name] = rows.to(table.bitmap.device)
            self._values[name] = {field: values[self._rows[name]] for field, values in given.items()}

    def missed(self, taken: Mapping[str, Taken], fields: Fields) -> list[str]:
        """The tables of which a row of the sample changed without being among those taken."""
        found = []
        for name, rows in self._rows.items():
            if taken[name].whole is None:
                now = {field: values[rows] for field, values in fields(name).items()}
                changed = rows[_differing(self._values[name], now)]
                noted = taken[name].rows
                places = torch.searchsorted(noted, changed).clamp_(max=max(0, len(noted) - 1))
                if len(changed) and (not len(noted) or bool((noted[places] != changed).any())):
                    found.append(name)
        return found


class Inspection:
    """A comparison of what is noted with what changes; from `Checkpointer.check`.

    Attributes
    ----------
    missed : dict of text to Missed
        By table, once it is left.
    """

    def __init__(self, tracker: Tracker, fields: Fields) -> None:
        self.missed: dict[str, Missed] = {}
        self._tracker = tracker
        self._fields = fields
        self._before: dict[str, dict[str, Tensor]] = {}

    def __enter__(self) -> Self:
        for name in self._tracker.tables:
            self._before[name] = {field: values.clone() for field, values in self._fields(name).items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for name, table in self._tracker.tables.items():
                self._compare(name, table)
            sys.stdout.write(self.report() + "\n")
        self._before = {}

    def _compare(self, name: str, table: TouchedRows) -> None:
        table.look()
        now = self._fields(name)
        differing = {f: _differing_rows(b, now[f]) for f, b in self._before[name].items() if f in now}
        changed = torch.stack(list(differing.values())).any(0)
        if table.whole is None:
            rows = torch.nonzero(changed & (table.bitmap == 0)).squeeze(1)
            if len(rows):
                fields = tuple(f for f, mask in differing.items() if bool(mask[rows].any()))
                self.missed[name] = Missed(rows=rows, fields=fields, cause=_cause(table, rows, fields))

    def report(self) -> str:
        """What was found, in words."""
        lines = [
            f"table {name!r}: {len(missed.rows)} rows changed without being noted, {missed.rows[:5].tolist()} "
            f"{'first' if len(missed.rows) > 5 else 'in all'}, in {', '.join(missed.fields)}: {missed.cause}"
            for name, missed in self.missed.items()
        ]
        return "\n".join(lines) or f"all rows that changed were noted, in {len(self._tracker.tables)} tables"


def _cause(table: TouchedRows, rows: Tensor, fields: tuple[str, ...]) -> str:
    if bool(torch.isin(rows, gradient_rows(table.parameter)).all()):
        return (
            "a gradient reached them past the hooks: functional.embedding on the parameter, a module's forward() "
            "called directly, or a tied module (give tables= and mark(), or call the module)"
        )
    if "weight" not in fields:
        return "something wrote into the optimizer's state"
    return (
        "written past the optimizers where torch does not see it: through .data, a numpy view, or a kernel of its own"
    )


def _differing(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Tensor:
    """Which rows differ in any field; a field that is new differs in none."""
    masks = [_differing_rows(values, now[field]) for field, values in before.items() if field in now]
    return torch.stack(masks).any(0)


def _differing_rows(before: Tensor, now: Tensor) -> Tensor:
    """Which rows differ in any bit."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()]
    differs = before.contiguous().view(words) != now.contiguous().view(words)
    return differs.reshape(len(before), math.prod(before.shape[1:])).any(1)
