"""A model has thousands of tables; a checkpoint of it has a handful of objects (section 6, fault 124)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import checkrun_format as crf
from tests.conformance import independent_reader
from tests.property.strategies import same_fields, taken

MANY = 20_000


def fields(number: int, rows: int = 3) -> dict[str, np.ndarray]:
    weight = (np.arange(rows * 4, dtype=np.float32) + number).reshape(rows, 4)
    return {"weight": weight, "sum": np.full(rows, number, np.float32)}


def objects(run: Path, sequence: int) -> int:
    return sum(path.is_file() for path in (run / f"{sequence:08d}").rglob("*"))


@pytest.mark.timeout(300)
def test_twenty_thousand_tables(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("many")  # not `tmp_path`: the second reader takes its time for each table
    run = crf.open_run(path, mode="a", durable=False)
    tables = {f"table/{number}": crf.Table(fields(number)) for number in range(MANY)}
    run.save(crf.State(tables=tables))
    assert objects(path, 1) < 40
    checkpoint = crf.open_run(path).latest()
    assert len(checkpoint.tables) == MANY
    for number in (0, 1, 9_999, MANY - 1, *np.random.default_rng(0).integers(0, MANY, 50).tolist()):
        view = checkpoint.table(f"table/{number}")
        assert same_fields(view.read(), fields(number))
        assert same_fields(view.take([2, 0]), taken(fields(number), [2, 0]))

    for number in range(0, MANY, 4000):
        tables[f"table/{number}"].fields["sum"][1] = -1
    for name, table in tables.items():
        table.changed = [1] if int(name.partition("/")[2]) % 4000 == 0 else []
    increment = run.save(crf.State(tables=tables), parent="latest")
    assert objects(path, 2) < 40
    assert increment.stored_bytes < checkpoint.stored_bytes
    assert {change.table for change in increment.changes_since(1)} == {f"table/{n}" for n in range(0, MANY, 4000)}
    assert increment.table("table/4000").read()["sum"].tolist() == [4000, -1, 4000]
    assert increment.table("table/4001").read()["sum"].tolist() == [4001, 4001, 4001]
    assert same_fields(independent_reader.Checkpoint(path, 2).table("table/4000"), increment.table("table/4000").read())
    loaded = increment.load(tables=[f"table/{number}" for number in range(100)])
    assert all(same_fields(loaded.tables[name].fields, dict(tables[name].fields)) for name in loaded.tables)


def test_an_increment_of_five_hundred_tables(tmp_path_factory: pytest.TempPathFactory) -> None:
    """10 rows in each of 500 tables of two layouts, some of them keyed."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("tables")  # not `tmp_path`, as above
    run = crf.open_run(path, mode="a", encoder="minmax", bits={"small*": 4}, durable=False)
    names = [f"{'small' if number % 2 else 'raw'}{number}" for number in range(500)]
    values = {
        name: rng.normal(size=(50, 8 if number % 2 else 12)).astype(np.float32) for number, name in enumerate(names)
    }
    keys = np.arange(50) * 3
    keyed = set(names[::5])

    def state(changed: np.ndarray | None) -> crf.State:
        def table(name: str) -> crf.Table:
            ids = changed if changed is None or name not in keyed else keys[changed]
            return crf.Table({"weight": values[name]}, changed=ids, keys=keys if name in keyed else None)

        return crf.State(tables={name: table(name) for name in names})

    run.save(state(None))
    changed = rng.choice(50, 10, replace=False)
    for name in names:
        values[name][changed] += 1
    increment = run.save(state(changed), parent="latest")
    assert objects(path, 2) <= 50
    assert {increment.table(name).stored_rows for name in names} == {10}
    for name in names:
        found = increment.table(name).read()["weight"]
        if name.startswith("raw"):
            assert np.array_equal(found, values[name])
        else:
            spread = np.ptp(values[name], axis=1, keepdims=True)
            assert (np.abs(found - values[name]) <= 0.506 * spread / 15).all()
    changes = {change.table: change.rows.tolist() for change in increment.changes_since(1)}
    assert changes == {name: np.sort(keys[changed] if name in keyed else changed).tolist() for name in names}
    read = independent_reader.Checkpoint(path, 2)
    for name in names[::47]:
        found = read.table(name)
        found.pop("", None)  # keys
        assert same_fields(found, increment.table(name).read())
