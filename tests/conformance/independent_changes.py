"""What changed since a checkpoint (section 9.4), by the independent reader and from FORMAT.md alone."""

from pathlib import Path

import numpy as np

from tests.conformance.independent_reader import NO_ROWS, Array, Block, Checkpoint, guard, must, sequences


def way(first: Checkpoint, stop: int, states: dict[int, str]) -> list[Checkpoint]:
    """A checkpoint and those below it along `predecessor`, down to and excluding `stop` (CHG-1, CHG-3)."""
    met = [first]
    while (n := met[-1].commit["predecessor"]) != stop:
        must(states.get(n) in ("committed", "damaged"), met[-1].place, f"no way on to {stop}", "history_pruned")
        met.append(met[-1].below("predecessor"))
    return met


def recent(block: Block, part: list[int], rows: Array) -> Array:
    """The recent ones of the rows or keys of a part (5.5, BLK-4)."""
    if part[5] < 2:
        return rows[: len(rows) * part[5]]
    bits = np.unpackbits(block.array("recent", "uint8", -(-block.n // 8)), bitorder="little")
    chosen: Array = rows[bits[part[2] : part[2] + part[3]] == 1]
    return chosen


def touched(at: Checkpoint, name: str) -> list[Array]:
    """The recent rows or keys that a checkpoint stores of a table, and its tombstones."""
    found: list[Array] = []
    for block, part in at.parts.get(name, []):
        with guard(block.folder):
            rows, deleted = block.contents(part, at.entries["tables"][name])
            found += [recent(block, part, rows), deleted]
    return found


def changes(run_path: str | Path, p: int, c: int) -> tuple[dict[str, tuple[Array, Array]], list[str]]:
    """For each table of c the rows or keys changed since p and the keys deleted; and the tables dropped."""
    last, states, answer = Checkpoint(run_path, c), sequences(run_path), {}
    todo, met = way(last, p, states) if p != c else [], dict[int, Checkpoint]()
    dropped, whole = set[str](), set[str]()
    while todo:
        if (at := todo.pop()).n in met:
            continue
        with guard(at.place):
            met[at.n], r, has = at, at.commit["rollback_to"], at.entries["tables"]
            back = way(at, r, states)[1:] if r is not None else []
            todo += back
            dropped |= {*at.manifest["dropped"]} | (has.keys() - {*last.tables()})
            for other in back:
                had = other.entries["tables"]
                dropped |= had.keys() - has.keys()
                whole |= {name for name in had.keys() & has.keys() if had[name]["rows"] != has[name]["rows"]}
    for name in last.tables():
        entry, keys, _ = last.resolve(name)
        key_dtype, found = entry["key_dtype"], [one for at in met.values() for one in touched(at, name)]
        stored = keys if name in whole | dropped else np.concatenate([NO_ROWS, *found])
        changed, deleted = np.intersect1d(keys, stored), np.setdiff1d(stored, keys) if key_dtype else NO_ROWS
        answer[name] = changed.view(key_dtype or "int64"), deleted.view(key_dtype or "int64")
    return answer, sorted(dropped)
