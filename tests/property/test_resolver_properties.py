"""Resolution equals a plain replay, over random layers written by several writers in parts of any cut."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import checkrun_format as crf
from checkrun_format import writer
from checkrun_format.resolver import fill
from checkrun_format.rows import WantedIds, WantedRange
from checkrun_format.workers import Workers
from tests.conformance import independent_changes, independent_reader
from tests.property.strategies import (
    KEYS,
    Fields,
    Ids,
    MemoryStore,
    check_raw_changes,
    joined,
    same_bits,
    same_fields,
    taken,
)

WEIGHTS = 5
"""Columns of `weight`: its values survive 1, 2, 4 and 8 bits exactly, so that parts may differ in width (LAY-6)."""

COUNTS = 3
"""Columns of `counts`, which is raw."""


@dataclass(frozen=True, kw_only=True)
class PartOf:
    """Some rows of a layer, and which columns of them: (low, high) by field; `sum` is there or not."""

    places: Ids
    columns: dict[str, tuple[int, int]]
    sum: bool
    writer: int
    bits: int | None
    ranged: bool
    recent: Any
    deleted: Ids


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One checkpoint of the table."""

    parent: int | None
    """Place in the chain of the latest checkpoint; None for a base."""
    rows: int
    ids: Ids
    fields: Fields
    parts: list[PartOf]
    writers: int
    unchanged: bool

    @property
    def recent(self) -> set[int]:
        """Rows that are recent in any part (LAY-7), and tombstones."""
        found: set[int] = set()
        for part in self.parts:
            mask = np.full(len(part.places), part.recent) if isinstance(part.recent, bool) else part.recent
            found |= set(self.ids[part.places[mask]].tolist()) | set(part.deleted.tolist())
        return found

    @property
    def deleted(self) -> set[int]:
        return {key for part in self.parts for key in part.deleted.tolist()}


def fields_of(rng: np.random.Generator, count: int) -> Fields:
    weight = rng.choice([0.0, 255.0], (count, WEIGHTS)).astype(np.float32)
    weight[rng.integers(0, 8, count) == 0, 1] = np.nan
    return {
        "weight": weight,
        "counts": rng.integers(-(2**31), 2**31, (count, COUNTS), np.int32),
        "sum": rng.integers(0, 2**32, count, np.uint32).view(np.float32),
    }


def cuts(rng: np.random.Generator, size: int) -> list[tuple[int, int]]:
    inner = sorted(rng.choice(np.arange(1, size), rng.integers(0, min(3, size)), replace=False).tolist())
    return list(zip([0, *inner], [*inner, size], strict=True))


def parts_of(rng: np.random.Generator, ids: Ids, deleted: Ids, writers: int, *, keyed: bool) -> list[PartOf]:
    """Rows cut at random into groups; each group's fields and columns cut at random into parts."""
    groups = rng.integers(0, rng.integers(1, 5), len(ids))
    parts = []
    for group in np.unique(groups):
        places = np.flatnonzero(groups == group)
        ranged = not keyed and (np.diff(ids[places]) == 1).all() and rng.integers(0, 2) > 0
        weights, counts = cuts(rng, WEIGHTS), cuts(rng, COUNTS)
        for index in range(max(len(weights), len(counts))):
            columns = {name: cut[index] for name, cut in (("weight", weights), ("counts", counts)) if index < len(cut)}
            mask = rng.integers(0, 2, len(places)) > 0
            parts.append(
                PartOf(
                    places=places,
                    columns=columns,
                    sum=index == 0,
                    writer=int(rng.integers(0, writers)),
                    bits=[None, 1, 2, 4, 8][rng.integers(0, 5)] if "weight" in columns else None,
                    ranged=bool(ranged),
                    recent=[True, False, mask][rng.integers(0, 3)],
                    deleted=np.zeros(0, np.int64),
                )
            )
    for some in np.array_split(deleted, rng.integers(1, 3)):
        alone = PartOf(
            places=np.zeros(0, np.int64), columns={}, sum=False, writer=int(rng.integers(0, writers)), bits=None,
            ranged=False, recent=True, deleted=some,
        )  # fmt: skip
        parts += [alone] if len(some) else []
    return [parts[place] for place in rng.permutation(len(parts))]


@st.composite
def histories(draw: st.DrawFn, *, keyed: bool) -> list[Layer]:
    layers: list[Layer] = []
    rows = draw(st.integers(0, 20))
    for _ in range(draw(st.integers(1, 5))):
        parent = draw(st.none() | st.integers(0, 5)) if layers else None
        rng = np.random.default_rng(draw(st.integers(0, 2**20)))
        rows = max(rows, int(rng.integers(0, 24)))
        every = np.sort(rng.permutation(np.array(KEYS))[: rng.integers(0, 16)]) if keyed else np.arange(rows)
        writers = draw(st.integers(1, 4))
        layers.append(layer_of(rng, parent, rows, every, writers, keyed=keyed))
    return layers


def layer_of(
    rng: np.random.Generator, parent: int | None, rows: int, every: Ids, writers: int, *, keyed: bool
) -> Layer:
    ids = every if parent is None or keyed else every[rng.integers(0, 3, len(every)) == 0]
    deleted = np.sort(rng.permutation(np.array(KEYS))[: rng.integers(0, 6)]) if keyed else ids[:0]
    return Layer(
        parent=parent,
        rows=rows,
        ids=ids,
        fields=fields_of(rng, len(ids)),
        parts=parts_of(rng, ids, deleted, writers, keyed=keyed),
        writers=writers,
        unchanged=parent is not None and bool(rng.integers(0, 5) == 0),
    )


def write(run: crf.Run, layer: Layer, parent: int | None, *, keyed: bool) -> int:
    """Commit a layer; its number."""
    save = run.begin(writers=layer.writers, parent=parent)
    writers = [save.writer(rank) for rank in range(layer.writers)]
    storage = "full" if parent is None else "changed"
    if not layer.unchanged:
        for part in layer.parts:
            put(writers[part.writer], layer, part, storage, keyed=keyed)
        nothing = taken(layer.fields, slice(0, 0))  # a table of no rows or keys is told all the same
        where: dict[str, Any] = {"keys": layer.ids[:0]} if keyed else {"rows": (0, 0), "of": layer.rows}
        writers[-1].put("t", nothing, storage=storage, **where)
    committed = save.commit([w.finish() for w in writers], unchanged=["t"] if layer.unchanged else [])
    assert committed.parent == parent
    assert committed.table("t").storage == ("unchanged" if layer.unchanged else storage)
    return committed.sequence


def put(staged: crf.StagedWriter, layer: Layer, part: PartOf, storage: str, *, keyed: bool) -> None:
    fields = {name: layer.fields[name][part.places, low:high] for name, (low, high) in part.columns.items()}
    if part.sum:
        fields["sum"] = layer.fields["sum"][part.places]
    ids = layer.ids[part.places]
    where: dict[str, Any] = {"keys": ids} if keyed else {"rows": ids, "of": layer.rows}
    if part.ranged:
        where["rows"] = (int(ids[0]), int(ids[-1]) + 1)
    staged.put(
        "t",
        fields,
        columns=part.columns,
        storage=storage,
        recent=part.recent,
        deleted=part.deleted if len(part.deleted) else None,
        bits={"weight": part.bits} if part.bits else None,
        **where,
    )


State = dict[int, Fields]


def replayed(below: State, layer: Layer, *, full: bool) -> State:
    """9.3, row by row: tombstones before rows (LAY-5)."""
    state = {} if full else {key: row for key, row in below.items() if key not in layer.deleted}
    return state | {int(key): taken(layer.fields, place) for place, key in enumerate(layer.ids)}


def arrays(state: State) -> tuple[Ids, Fields]:
    ids = np.array(sorted(state), np.int64)
    nothing = fields_of(np.random.default_rng(0), 0)
    rows = [{name: values[np.newaxis] for name, values in state[key].items()} for key in ids.tolist()]
    return ids, joined([nothing, *rows])


@dataclass
class History:
    """A run, and what the replay says of each of its checkpoints."""

    run: crf.Run
    states: dict[int, State] = field(default_factory=dict)
    layers: dict[int, Layer] = field(default_factory=dict)

    def add(self, drawn: Layer, chain: list[int], *, keyed: bool) -> list[int]:
        """Commit one more layer over one of the chain; the new chain."""
        place = None if drawn.parent is None else drawn.parent % len(chain)
        parent = None if place is None else chain[place]
        layer = drawn if parent is None else self.over(drawn, parent, chain[:place], keyed=keyed)
        number = write(self.run, layer, parent, keyed=keyed)
        below = {} if parent is None else self.states[parent]
        self.states[number] = below if layer.unchanged else replayed(below, layer, full=parent is None)
        self.layers[number] = layer
        return [number, *([] if place is None else chain[place:])]

    def over(self, drawn: Layer, parent: int, above: list[int], *, keyed: bool) -> Layer:
        """The layer as it must be over a parent: with new rows, and all that was stored since (LAY-2, LAY-3)."""
        since = [self.layers[number] for number in above if not self.layers[number].unchanged]
        new = np.arange(0 if keyed else self.layers[parent].rows, 0 if keyed else drawn.rows)
        deleted = [key for layer in since for key in layer.deleted]
        needed = np.concatenate([new, *(layer.ids for layer in since), np.array(deleted, np.int64)])
        if drawn.unchanged and not len(needed):
            return replace(drawn, rows=self.layers[parent].rows, parts=[])
        rng = np.random.default_rng(len(needed) + 1000 * parent)
        ids = np.union1d(drawn.ids, needed)
        gone = ids[rng.integers(0, 3, len(ids)) == 0] if keyed else ids[:0]
        ids = np.setdiff1d(ids, gone[::2])
        return replace(
            drawn,
            ids=ids,
            fields=fields_of(rng, len(ids)),
            parts=parts_of(rng, ids, gone, drawn.writers, keyed=keyed),
            unchanged=False,
        )


SIZES = st.fixed_dictionaries(
    {
        "small": st.sampled_from([0, 100, 4 << 20]),
        "pool": st.sampled_from([1, 300, 64 << 20]),
        "piece": st.sampled_from([1, 100, 16 << 20]),
        "chunk_bytes": st.sampled_from([1, 24, 64, 64, 300, 300, 4096]),
    }
)


def check(layers: list[Layer], sizes: dict[str, int], seed: int, *, keyed: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_SMALL_BYTES", sizes["small"])
        patch.setattr(writer, "_POOL_BYTES", sizes["pool"])
        patch.setattr(writer, "_PIECE_BYTES", sizes["piece"])
        history = History(run=crf.open_run(MemoryStore(), mode="a", chunk_bytes=sizes["chunk_bytes"]))
        chain: list[int] = []
        for layer in layers:
            chain = history.add(layer, chain, keyed=keyed)
        compacted = history.run.compact().sequence
        history.states[compacted] = history.states[max(history.states)]
        history.layers[compacted] = replace(layers[-1], parts=[])
        for number, state in history.states.items():
            check_reads(history.run[number].table("t"), *arrays(state), np.random.default_rng(seed))
            check_a_few_at_a_time(history.run[number].table("t"), *arrays(state), np.random.default_rng(seed))
            check_changes(history, number, seed)
        assert history.run.verify() == []
        check_by_the_independent_reader(history, compacted - 1 - seed % compacted % 2, seed)


def check_by_the_independent_reader(history: History, number: int, seed: int) -> None:
    """RES-1, CHG-2: two implementations of one page. It wants files: in some of the examples."""
    if not number or seed % 16 != 3:
        return
    ids, wanted = arrays(history.states[number])
    since = seed % number + 1
    touched = {row for n in range(since + 1, number + 1) for row in history.layers[n].recent}
    with tempfile.TemporaryDirectory() as folder:
        assert isinstance(history.run._store, MemoryStore)
        history.run._store.dump(Path(folder))
        found = independent_reader.Checkpoint(folder, number).table("t")
        changed, deleted = independent_changes.changes(folder, since, number)[0]["t"]
    keys = found.pop("", None)
    assert keys is None or same_bits(keys, ids)
    assert same_fields(found, wanted)
    assert set(changed.tolist()) == touched & set(ids.tolist())
    assert set(deleted.tolist()) == touched - set(ids.tolist())


def check_reads(view: crf.TableView, ids: Ids, wanted: Fields, rng: np.random.Generator) -> None:
    """RES-1: all, a slice, some columns, and a take with repeats, in any order."""
    assert same_fields(view.read(), wanted)
    if view.addressing == "keyed":
        assert same_bits(view.keys(), ids)
    low, high = sorted(rng.integers(0, len(ids) + 1, 2).tolist())
    left, right = sorted(rng.integers(0, WEIGHTS + 1, 2).tolist())
    part = view.read(slice(low, high), columns=slice(left, right), fields=["weight"])
    assert same_fields(part, {"weight": wanted["weight"][low:high, left:right]})
    there = view.read(slice(low, high), columns=slice(left, right), fields=["weight"], device="cpu")
    assert same_fields({"weight": there["weight"].numpy()}, part)
    places = rng.integers(0, len(ids), rng.integers(0, 8)) if len(ids) else ids
    assert same_fields(view.take(ids[places]), taken(wanted, places))


def check_a_few_at_a_time(view: crf.TableView, ids: Ids, wanted: Fields, rng: np.random.Generator) -> None:
    """RES-1: what `max_host_bytes` bounds changes no value. These tables are too small for it, so fewer are told."""
    every = WantedIds(ids) if view.addressing == "keyed" else WantedRange(0, len(ids))
    out = {name: np.empty_like(values) for name, values in wanted.items()}
    with Workers(int(rng.integers(1, 4)), budget_bytes=1) as workers:
        columns = {f.name: (0, f.columns or 1) for f in view.fields}
        fill(view.layers(), every, out, columns, workers, at_a_time=int(rng.integers(1, 9)))
    assert same_fields(out, wanted)
    assert same_fields(view.read(max_host_bytes=1), wanted)


def check_changes(history: History, number: int, seed: int) -> None:
    """CHG-1, CHG-2: the union of recent rows and tombstones on the way, each with its value in c."""
    since = seed % number + 1
    touched = {row for n in range(since + 1, number + 1) for row in history.layers[n].recent}
    state = history.states[number]
    check_raw_changes(history.run[number], since, 1 + seed % 400)
    found: State = {}
    deleted: set[int] = set()
    for change in history.run[number].changes_since(since, max_bytes=1 + seed % 400):
        assert not change.dropped
        deleted |= set(change.deleted.tolist())
        for place, key in enumerate(change.rows.tolist()):
            assert key not in found, "in one batch only"
            found[key] = taken(change.fields, place)
    assert set(found) == touched & set(state)
    assert deleted == touched - set(state)
    for key, fields in found.items():
        assert all(same_bits(np.asarray(fields[name]), np.asarray(state[key][name])) for name in fields)


class TestReplay:
    """RES-1, LAY-1, LAY-3 to LAY-7, PRT-1 to PRT-4, BLK-1 to BLK-5."""

    @given(layers=histories(keyed=False), sizes=SIZES, seed=st.integers(0, 2**16))
    def test_dense(self, layers: list[Layer], sizes: dict[str, int], seed: int) -> None:
        check(layers, sizes, seed, keyed=False)

    @given(layers=histories(keyed=True), sizes=SIZES, seed=st.integers(0, 2**16))
    def test_keyed(self, layers: list[Layer], sizes: dict[str, int], seed: int) -> None:
        check(layers, sizes, seed, keyed=True)
