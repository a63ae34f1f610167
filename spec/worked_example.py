"""Print the worked example of FORMAT.md: a base and two increments, from bytes to resolved rows.

    python spec/worked_example.py

`tests/conformance/test_worked_example.py` compares what this prints with the page.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import checkrun_format as crf

WEIGHT = np.array([[0, 5, 15], [-7.5, -2.5, 0], [1, 1, 1], [np.nan, 0, 0]], np.float32)
SUM = np.array([1, 2, 3, 4], np.float32)


def write_example(folder: str) -> None:
    """Write the run: checkpoint 1 is a base, 2 lies over 1, 3 over 2."""
    run = crf.open_run(folder, mode="a", bits=4, encoder="minmax", policy="consecutive")
    weight, total = WEIGHT.copy(), SUM.copy()
    run.save(crf.State(tables={"user": crf.Table({"weight": weight, "sum": total})}), step=10)
    weight[1], weight[3], total[[1, 3]] = [0, 15, 30], [2, 3, 17], [20, 40]
    weight, total = np.vstack([weight, np.float32([[-15, 0, 0]])]), np.append(total, np.float32(5))
    run.save(crf.State(tables={"user": crf.Table({"weight": weight, "sum": total}, changed=[1, 3])}), step=20)
    weight[3], total[3] = [0, 0, 60], 400
    run.save(crf.State(tables={"user": crf.Table({"weight": weight, "sum": total}, changed=[3])}), step=30)


def example_text(folder: str) -> str:
    """What lies in the run, and what it resolves to."""
    lines = []
    for sequence in (1, 2, 3):
        commit = json.loads((Path(folder) / f"{sequence:08d}" / "zarr.json").read_bytes())["attributes"]["checkrun"]
        attempt = Path(folder) / f"{sequence:08d}" / commit["attempt"]
        parts = json.loads(gzip.decompress((attempt / "parts-0.json.gz").read_bytes()))
        table = json.loads((attempt / "manifest.json").read_bytes())["tables"][0]
        lines.append(f"checkpoint {sequence}: parent {commit['parent']}, {table['storage']}, {table['rows']} rows")
        lines.append(f"  part          {parts['parts'][0]}")
        for name, entry in sorted(parts["blocks"][0]["arrays"].items()):
            lines.append(f"  {name:<19} {_shape(entry):<14} {_chunk(attempt / 'block-0-0' / name, entry)}")
        lines.append("")
    view = crf.open_run(folder).latest().table("user")
    lines.append("resolved at checkpoint 3")
    rows = view.read()
    lines += [
        f"  row {row}: weight {rows['weight'][row].tolist()}, sum {rows['sum'][row]}, from checkpoint {source}"
        for row, source in enumerate([1, 2, 1, 3, 2])
    ]
    return "\n".join(lines) + "\n"


def _shape(entry: dict[str, object]) -> str:
    return f"{entry['dtype']} {entry['shape']}".replace(" ", "").replace("[", " [")


def _chunk(array: Path, entry: dict[str, object]) -> str:
    data = (array / ("c/0/0" if len(entry["shape"]) == 2 else "c/0")).read_bytes()  # type: ignore[arg-type]
    if entry["compression"] is not None:
        return f"({entry['compression']}) {_decoded(array)}"
    return f"{data[:-4].hex()} {data[-4:].hex()}"


def _decoded(array: Path) -> list[int]:
    import zarr

    values: list[int] = np.asarray(zarr.open_array(array, mode="r")[:]).tolist()
    return values


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        write_example(temporary)
        sys.stdout.write(example_text(temporary))
