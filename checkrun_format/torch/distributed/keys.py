"""How the keys of a state dict make tables: a weight, its optimizer state, and their fields."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from checkrun_format import layout
from checkrun_format.errors import InvalidInputError

Tables: TypeAlias = "Sequence[str] | Mapping[str, str | Mapping[str, str]]"

_FIELD = re.compile(r"[a-z][a-z0-9_]{0,63}")


def names_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether what DCP calls the id of a checkpoint is a step, which it is here."""
    return str(checkpoint_id).isdecimal()


def step_named(checkpoint_id: str | os.PathLike[str] | int | None) -> int | None:
    """The step that an id of DCP's is, None if none is given.

    Raises
    ------
    InvalidInputError
        It is something else.
    """
    if checkpoint_id is None:
        return None
    if not names_step(str(checkpoint_id)):
        raise InvalidInputError(f"checkpoint_id={checkpoint_id!r}: give the step, a whole number, or nothing")
    return int(str(checkpoint_id))


class Keys:
    """Which key of a flat state dict is which field of which table.

    Parameters
    ----------
    tables : list of keys, or mapping
        A key of a weight: it becomes the field `weight` of a table of the same name, and its optimizer state joins it.
        A mapping: table name to the key of its weight, or to a mapping of field names to keys, which is taken as it
        is.

    Notes
    -----
    Optimizer state of a weight is found by its key: somewhere in it stands `state.`, then the key of the weight or the
    end of it (without `model.`, say), then anything, and last the name of the field. So it is in
    `get_optimizer_state_dict` of torch (`optim.state.user.weight.exp_avg`) and in TorchRec
    (`optim.state.ebc.embedding_bags.user.weight.user.momentum1`). It must have the weight's rows, and one or two
    dimensions; all else, such as `step`, is a dense tensor. The state dict of a plain `Optimizer` names parameters by
    numbers: give a mapping.
    """

    def __init__(self, tables: Tables) -> None:
        if isinstance(tables, str):
            raise InvalidInputError(f"tables={tables!r}: give a list of names")
        given = tables if isinstance(tables, Mapping) else {name: name for name in tables}
        self._explicit: dict[str, tuple[str, str]] = {}
        self._weights: dict[str, str] = {}
        self.names = [layout.check_name(name, "table") for name in given]
        for name, told in given.items():
            fields = {"weight": told} if isinstance(told, str) else dict(told)
            if isinstance(told, str):
                self._weights[told] = name
            for field, key in fields.items():
                layout.check_field_name(field, name)
                if key in self._explicit:
                    raise InvalidInputError(f"tables: {key!r} is in two tables, or twice in {name!r}")
                self._explicit[key] = (name, field)

    def assign(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, str]]:
        """Key to (table, field), of those keys that belong to a table.

        Parameters
        ----------
        sizes : mapping
            Key of each tensor to its whole shape.
        """
        found = {key: self._explicit[key] for key in sizes if key in self._explicit}
        for key, size in sizes.items():
            belongs = None if key in self._explicit else self._found(key)
            if belongs is None or len(size) not in (1, 2):
                continue
            weight, field = belongs
            if weight not in sizes or sizes[weight][0] == size[0]:
                found[key] = (self._weights[weight], field)
        self._check(found, sizes)
        return found

    def check_complete(self, keys: Iterable[str]) -> None:
        """Refuse a state dict without a key that was named."""
        present = set(keys)
        for key, (table, field) in self._explicit.items():
            if key not in present:
                near = difflib.get_close_matches(key, present, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidInputError(f"table {table!r}, field {field!r}: no tensor {key!r} in the state dict{hint}")

    def _check(self, found: Mapping[str, tuple[str, str]], sizes: Mapping[str, Sequence[int]]) -> None:
        owners: dict[tuple[str, str], str] = {}
        for key, (table, field) in found.items():
            if len(sizes[key]) not in (1, 2):
                raise InvalidInputError(f"table {table!r}, field {field!r}: {key!r} has shape {tuple(sizes[key])}")
            other = owners.setdefault((table, field), key)
            if other != key:
                raise InvalidInputError(
                    f"table {table!r}, field {field!r}: both {other!r} and {key!r}; say which, as in "
                    f"tables={{{table!r}: {{'weight': ..., {field!r}: ...}}}}"
                )

    def _found(self, key: str) -> tuple[str, str] | None:
        """The weight whose optimizer state a key is, and its field: the weight of which the key names the most."""
        best: tuple[int, str, str] | None = None
        for tail in _after_state(key):
            field = tail.rpartition(".")[2]
            if not _FIELD.fullmatch(field) or field == "weight":
                continue
            for weight in self._weights:
                for end in _ends(weight):
                    if tail.startswith(f"{end}.") and (best is None or len(end) > best[0]):
                        best = (len(end), weight, field)
                    elif tail.startswith(f"{end}.") and best is not None and len(end) == best[0] and best[1] != weight:
                        raise InvalidInputError(
                            f"{key!r} may be optimizer state of {best[1]!r} or {weight!r}: give a mapping of "
                            "table names to mappings of field names to keys"
                        )
        return None if best is None else best[1:]


def _after_state(key: str) -> Iterator[str]:
    pieces = key.split(".")
    for place, piece in enumerate(pieces[:-1]):
        if piece == "state":
            yield ".".join(pieces[place + 1 :])


def _ends(weight: str) -> Iterator[str]:
    """The key of a weight, and its ends of two pieces and more."""
    pieces = weight.split(".")
    yield weight
    for place in range(1, len(pieces) - 1):
        yield ".".join(pieces[place:])
