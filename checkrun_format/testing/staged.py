"""Several writers of one checkpoint, each of which stores some rows of a table, or some columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkrun_format.testing.choices import How
from checkrun_format.testing.model import Held
from checkrun_format.testing.tables import Array, Fields, Ids, taken


@dataclass(frozen=True, kw_only=True)
class PartsOfTable:
    """What writers have to store of a table.

    Attributes
    ----------
    storage : str
    ids : set
        Rows or keys to be stored.
    recent : set or None
        Those that changed since the predecessor; None: all.
    deleted : set
        Tombstones.
    """

    storage: str
    ids: set[int]
    recent: set[int] | None
    deleted: set[int]


def put_tables(
    run: Any,
    save: Any,
    tables: Mapping[str, PartsOfTable],
    held: Mapping[str, Held],
    how: How,
    tensors: Mapping[str, Array],
) -> list[Any]:
    """Store all parts by all writers of a save; their part lists, in any order, as they come from other processes."""
    rng = np.random.default_rng(how.seed)
    token = json.loads(json.dumps(save.token))
    joined = [save.writer(0), *(run.join(token).writer(rank) for rank in range(1, token["writers"]))]
    for name, parts in tables.items():
        if parts.storage != "unchanged":
            _put(joined, name, parts, held[name], how, rng)
    for name, values in tensors.items():
        joined[rng.integers(len(joined))].put_tensor(name, values)
    lists = [json.loads(json.dumps(writer.finish())) for writer in joined]
    return [lists[rank] for rank in rng.permutation(len(lists))]


def _put(
    writers: Sequence[Any], name: str, parts: PartsOfTable, held: Held, how: How, rng: np.random.Generator
) -> None:
    """One table: cut by rows, and now and then by columns."""
    ids = np.array(sorted(parts.ids), np.int64)
    cuts = np.sort(rng.integers(0, len(ids) + 1, len(writers) - 1)).tolist()
    deleted = _keys(sorted(parts.deleted), held) if held.kind.keyed else None
    ranks = rng.permutation(len(writers))
    for rank, low, high in zip(ranks, [0, *cuts], [*cuts, len(ids)], strict=True):
        if low == high and rank != ranks[0]:
            continue
        some = ids[low:high] if parts.storage == "full" and rng.random() < 0.5 else rng.permutation(ids[low:high])
        recent = True if parts.recent is None else np.isin(some, np.array(sorted(parts.recent), np.int64))
        fields = taken(held.fields, np.searchsorted(held.ids, some))
        for number, (columns, cut) in enumerate(_by_columns(fields, how, rng)):
            writers[(rank + number) % len(writers)].put(
                name,
                cut,
                **_which(some, low, high, held, parts),
                columns=columns,
                storage=parts.storage,
                recent=recent,
                deleted=deleted if number == 0 else None,
                bits=how.bits,
                store_as={"slow": how.store_as} if how.store_as is not None and "slow" in cut else None,
            )
        deleted = None


def _which(some: Ids, low: int, high: int, held: Held, parts: PartsOfTable) -> dict[str, Any]:
    """How the rows of a part are named: by keys, as a range where they are one, or by their numbers."""
    if held.kind.keyed:
        return {"keys": _keys(some, held)}
    ordered = parts.storage == "full" and np.array_equal(some, np.arange(low, high))
    return {"rows": (low, high) if ordered else some, "of": len(held.ids)}


def _keys(keys: Any, held: Held) -> Array:
    return np.asarray(keys, np.int64).view(np.dtype(held.kind.key_dtype))


def _by_columns(fields: Fields, how: How, rng: np.random.Generator) -> list[tuple[dict[str, tuple[int, int]], Fields]]:
    """All fields, or the columns of a raw weight in two pieces: of a quantized one each has exact rows of its own."""
    width = fields["weight"].shape[1]
    if width == 1 or how.bits is not None or rng.random() < 0.6:
        return [({}, fields)]
    cut = int(rng.integers(1, width))
    first, rest = {"weight": (0, cut)}, {"weight": (cut, width)}
    return [(first, {**fields, "weight": fields["weight"][:, :cut]}), (rest, {"weight": fields["weight"][:, cut:]})]
