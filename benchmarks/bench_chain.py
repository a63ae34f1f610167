"""What a chain costs: restores, bytes read, single rows and memory, against a base that holds the same state.

    python benchmarks/bench_chain.py [--quick] [--folder DIR] [--no-results]

One table of float32, mostly of 32 columns at 4 bits. Each save changes 10 % of the rows: any of them alike (uniform),
or the more often the lower their rank, as in a power law (zipf). Files are in the page cache; every restore reads into
arrays that exist, and begin with a cache line, as tensors of torch do. First a restore after 0 to 24 saves, for each
policy. Then a base and 10 increments in a row beside one base of the same state, for tables of several sizes and kinds:
seconds of time and of processors, bytes read through the store, `take` of 1,000 random rows, and memory beside the
arrays that are read into; what a plain copy of the table takes; what reading and checking the chain's chunks takes
alone, and finding out which checkpoint has each row; and with which power of the number of rows each of them grows.
"""

from __future__ import annotations

import argparse
import collections
import functools
import io
import math
import shutil
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import measure
import numpy as np
import numpy.typing as npt

import checkrun_format as crf
from checkrun_format.resolver import pieces
from checkrun_format.rows import WantedRange
from checkrun_format.stores import LocalStore

CHANGED = 0.1
TAKEN = 1000
INCREMENTS = 10
POLICIES = ("one-shot", "consecutive", "intermittent")
WORKLOADS = ("uniform", "zipf")
SAVES = (0, 1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
TARGET = 1.3
"""Most times that a base and 10 increments may take what one base takes."""

Costs = list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a table holds."""

    columns: int = 32
    bits: int | None = 4
    sums: bool = False
    """Whether there is a float32 of optimizer state for each row, too."""

    def __str__(self) -> str:
        width = "float32" if self.bits is None else f"{self.bits} bits"
        return f"{self.columns} x {width}" + (" and sums" if self.sums else "")


KINDS = (Kind(columns=64, sums=True), Kind(columns=128), Kind(columns=64, bits=None, sums=True))
"""Of a million rows, beside the usual one."""


def aligned(rows: int, columns: int) -> npt.NDArray[np.float32]:
    """Memory to read into; it has been touched."""
    memory = np.ones(rows * columns + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + rows * columns].reshape(rows, columns)


def destination(rows: int, kind: Kind) -> dict[str, npt.NDArray[np.float32]]:
    """Arrays to read into."""
    sums = {"sum": aligned(rows, 1).reshape(-1)} if kind.sums else {}
    return {"weight": aligned(rows, kind.columns), **sums}


class CountingStore(LocalStore):
    """Counts the bytes of the objects that are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, durable=False)
        self.bytes_read = 0
        self._counting = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """An object, all of which counts."""
        data = super().get(key)
        with self._counting:
            self.bytes_read += len(data or b"")
        return data

    def open(self, key: str) -> io.RawIOBase | None:
        """An object, which is read to its end."""
        file = super().open(key)
        if file is not None:
            with self._counting:
                self.bytes_read += Path(self._path(key)).stat().st_size
        return file


# A training run -------------------------------------------------------------------------------------------------------


def chances(workload: str, rows: int, rng: np.random.Generator) -> npt.NDArray[np.float32] | float:
    """How likely each row changes between two saves: 10 % on average."""
    if workload == "uniform":
        return CHANGED
    weight = 1 / (rng.permutation(rows) + 1.0)
    low, high = 0.0, float(rows)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if -np.expm1(-middle * weight[:: 1 + rows // 65536]).mean() < CHANGED else (low, middle)
        )
    return -np.expm1(-high * weight).astype(np.float32)


class Trainer:
    """A table whose rows change, and the run that it is saved to."""

    def __init__(self, folder: Path, rows: int, workload: str, policy: str, kind: Kind) -> None:
        self.rng = np.random.default_rng(1)
        self.fields = {"weight": self.rng.standard_normal((rows, kind.columns), np.float32)}
        if kind.sums:
            self.fields["sum"] = self.rng.random(rows, np.float32)
        self.chances = chances(workload, rows, self.rng)
        self.run = crf.open_run(folder, "a", durable=False, policy=policy, bits=kind.bits)
        self.save(None)

    def save(self, changed: Any, **options: Any) -> None:
        """Save the table."""
        self.run.save(crf.State(tables={"t": crf.Table(self.fields, changed=changed)}), **options)

    def train(self) -> None:
        """Change rows, and save them."""
        changed = np.flatnonzero(self.rng.random(len(self.fields["weight"]), np.float32) < self.chances)
        for values in self.fields.values():
            values[changed] += np.float32(0.01)
        self.save(changed)


# Measurements ---------------------------------------------------------------------------------------------------------


def restore(folder: Path, number: int, out: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[str, float], int]:
    """Load a checkpoint into arrays, by somebody who has read nothing yet; and how many bytes were read."""
    store = CountingStore(folder)
    state = crf.State(tables={"t": crf.Table(dict(out))})
    cost = measure.cost_of(lambda: crf.open_run(store)[number].load(out=state))
    return measure.as_record(cost), store.bytes_read


def copied(out: Mapping[str, npt.NDArray[Any]]) -> dict[str, float]:
    """A plain copy of arrays like those that are read into, on as many threads: memcpy, the ceiling."""
    array = out["weight"]
    other = aligned(*array.shape)
    return measure.as_record(measure.cost_of(lambda: measure.memcpy(array, other)))


def planned(folder: Path, number: int) -> dict[str, float]:
    """Find out which checkpoint has each row, and read no values."""
    view = crf.open_run(folder)[number].table("t")
    wanted = WantedRange(0, len(view))
    return measure.as_record(measure.cost_of(lambda: collections.deque(pieces(view.layers(), wanted), maxlen=0)))


def plainly_read(folder: Path, numbers: Iterable[int]) -> dict[str, float]:
    """Read every chunk of some checkpoints into the same memory, and compute its checksum: what no reader can save."""
    files = [path for number in numbers for path in folder.glob(f"{number:08d}/*/block*/*/c/**/*") if path.is_file()]
    memory = np.empty(1 << 20, np.uint8)

    def read() -> None:
        for path in files:
            checksum = 0
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(memory.data):
                    checksum = google_crc32c.extend(checksum, memory[:count])

    return measure.as_record(measure.cost_of(read))


def take(folder: Path, number: int, ids: npt.NDArray[np.int64]) -> tuple[dict[str, float], int]:
    """Read some rows, likewise."""
    store = CountingStore(folder)
    cost = measure.cost_of(lambda: crf.open_run(store)[number].table("t").take(ids))
    return measure.as_record(cost), store.bytes_read


def repeated(rounds: int, *calls: Callable[[], tuple[dict[str, float], int]]) -> Iterator[dict[str, float]]:
    """Medians of each call, the bytes that it read, and its peak in a call of its own; the calls take turns."""
    found: list[list[tuple[dict[str, float], int]]] = [[] for _ in calls]
    for _ in range(rounds):
        for results, call in zip(found, calls, strict=True):
            results.append(call())
    for results, call in zip(found, calls, strict=True):
        told_by_all = {"bytes_read": float(results[-1][1]), "peak_mib": peak_of(call)}
        yield measure.medians([cost for cost, _ in results]) | told_by_all


def peak_of(call: Callable[[], object]) -> float:
    """MiB that a call holds at its highest: resident memory would hide what was freed before and is used again."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return peak


def by_length(folder: Path, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Restores after 0 to 24 saves, for each workload and policy."""
    found = []
    out = destination(rows, Kind())
    for workload in WORKLOADS:
        for policy in POLICIES:
            place = folder / f"{workload} {policy}"
            trainer = Trainer(place, rows, workload, policy, Kind())
            for saves in range(max(SAVES) + 1):
                if saves:
                    trainer.train()
                if saves in SAVES:
                    (cost,) = repeated(rounds, functools.partial(restore, place, saves + 1, out))
                    layers = chain_of(trainer.run, saves + 1)
                    found.append({"workload": workload, "policy": policy, "saves": saves, "layers": layers} | cost)
            told(f"{workload}, {policy}: {found[-1]['seconds']:.2f} s after {found[-1]['saves']} saves")
    return found


def chain_of(run: crf.Run, number: int | None) -> int:
    """How many checkpoints a restore reads."""
    layers = 0
    while number is not None:
        number, layers = run[number].parent, layers + 1
    return layers


def by_size(folder: Path, workload: str, rows: int, rounds: int, kind: Kind | None = None) -> dict[str, Any]:
    """A base and 10 increments in a row, beside one base of the same state."""
    kind = kind or Kind()
    place = folder / f"{workload} {rows} {kind}"
    trainer = Trainer(place, rows, workload, "consecutive", kind)
    saves: Costs = []
    for _ in range(INCREMENTS):
        saves.append(measure.as_record(measure.cost_of(trainer.train)))
    trainer.save([], parent=None)
    out = destination(rows, kind)
    ids = np.sort(trainer.rng.choice(rows, TAKEN, replace=False))
    one, other = INCREMENTS + 1, INCREMENTS + 2
    del trainer
    measure.warm_memory(0.5)
    chain, base = repeated(rounds, lambda: restore(place, one, out), lambda: restore(place, other, out))
    copy = measure.medians([copied(out) for _ in range(rounds)])
    plan = measure.medians([planned(place, one) for _ in range(rounds)])
    read = measure.medians([plainly_read(place, range(1, one + 1)) for _ in range(rounds)])
    few_of_chain, few_of_base = repeated(rounds, lambda: take(place, one, ids), lambda: take(place, other, ids))
    result = {
        "workload": workload,
        "rows": rows,
        "kind": str(kind),
        "ratio": chain["seconds"] / base["seconds"],
        "ratio_cpu": chain["cpu_seconds"] / base["cpu_seconds"],
        "plan": plan,
        "copy": copy,
        "read": read,
        "chain": chain,
        "base": base,
        "take_chain": few_of_chain,
        "take_base": few_of_base,
        "save": measure.medians(saves),
    }
    told(f"{workload}, {rows:,} rows of {kind}: {result['ratio']:.2f}x")
    shutil.rmtree(place)
    return result


def exponent(rows: Sequence[int], values: Sequence[float]) -> float:
    """The power of the number of rows with which something grows: the slope of a line through the logarithms."""
    if min(values) <= 0:
        return math.nan
    return float(np.polyfit(np.log(rows), np.log(values), 1)[0])


GROWING: Mapping[str, tuple[str, str]] = {
    "restore of the chain, s": ("chain", "seconds"),
    "restore of the base, s": ("base", "seconds"),
    "restore of the chain, memory": ("chain", "peak_mib"),
    f"take {TAKEN:,} of the chain, s": ("take_chain", "seconds"),
    f"take {TAKEN:,} of the chain, bytes": ("take_chain", "bytes_read"),
    f"take {TAKEN:,} of the chain, memory": ("take_chain", "peak_mib"),
    "save of 10 %, s": ("save", "seconds"),
}


def growth(sizes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The exponent of everything that grows with a table, of the uniform workload."""
    of = [size for size in sizes if (size["workload"], size["kind"]) == ("uniform", str(Kind()))]
    rows = [size["rows"] for size in of]
    return {name: exponent(rows, [size[part][key] for size in of]) for name, (part, key) in GROWING.items()}


# The page -------------------------------------------------------------------------------------------------------------


def page(results: Mapping[str, Any]) -> str:
    """The results as tables."""
    where, lengths, sizes = results["machine"], results["by_length"], results["by_size"]
    text = [
        f"{where['date']}, {where['cores']} cores of {where['cpu']}, Python {where['python']}",
        "",
        f"Restore of {results['rows']:,} rows of {Kind()}, ms (checkpoints read):",
        "",
        measure.table(["after saves", *map(str, SAVES)], length_rows(lengths)),
        "",
        f"Base and {INCREMENTS} increments against one base of the same state (target: {TARGET}x):",
        "",
        measure.table(
            [
                "rows",
                "chain, s",
                "base, s",
                "memcpy, s",
                "ratio",
                "ratio, processors",
                "of it: reading",
                "of it: which rows",
                "read / base's",
                "chain, MiB",
                "take, ms",
                "take, MB read",
                "take, MiB",
            ],
            [size_row(size) for size in sizes],
        ),
        "",
        "Grows with the number of rows to the power of:",
        "",
        measure.table(["what", "exponent"], [(name, f"{power:.2f}") for name, power in results["growth"].items()]),
    ]
    return "\n".join(text)


def length_rows(lengths: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """One row for each workload and policy."""
    for workload in WORKLOADS:
        for policy in POLICIES:
            of = [cost for cost in lengths if (cost["workload"], cost["policy"]) == (workload, policy)]
            yield [f"{workload}, {policy}", *(f"{cost['seconds'] * 1000:.0f} ({cost['layers']})" for cost in of)]


def size_row(size: Mapping[str, Any]) -> list[str]:
    """One row for each workload and size."""
    chain, base, few = size["chain"], size["base"], size["take_chain"]
    return [
        f"{size['rows']:,} {size['workload']}, {size['kind']}",
        f"{chain['seconds']:.3f}",
        f"{base['seconds']:.3f}",
        f"{size['copy']['seconds']:.3f}",
        f"{size['ratio']:.2f}" + ("" if size["ratio"] <= TARGET else " MISSED"),
        f"{size['ratio_cpu']:.2f}",
        f"{size['read']['cpu_seconds'] / base['cpu_seconds']:.2f}",
        f"{size['plan']['cpu_seconds'] / base['cpu_seconds']:.2f}",
        f"{chain['bytes_read'] / base['bytes_read']:.2f}",
        f"{chain['peak_mib']:.0f}",
        f"{few['seconds'] * 1000:.0f}",
        f"{few['bytes_read'] / 1e6:.1f}",
        f"{few['peak_mib']:.0f}",
    ]


def told(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr)


def main() -> None:
    """Measure, show, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--quick", action="store_true", help="small tables, nothing is kept: does it run?")
    parser.add_argument("--no-results", action="store_true", help="only print")
    options = parser.parse_args()
    million = 20_000 if options.quick else 1_000_000
    rounds = 3 if options.quick else 5
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        lengths = by_length(folder, million, rounds=3)
        sizes = [
            by_size(folder, "uniform", rows, rounds) for rows in (million, 4 * million, 16 * million, 20 * million)
        ]
        sizes.append(by_size(folder, "zipf", 4 * million, rounds))
        sizes += [by_size(folder, "uniform", million, rounds, kind) for kind in KINDS]
    results = {
        "machine": measure.machine(["checkrun-format", "numpy"]),
        "rows": million,
        "by_length": lengths,
        "by_size": sizes,
        "growth": growth(sizes),
    }
    text = page(results)
    print(text)
    if not (options.quick or options.no_results):
        measure.keep("bench_chain", results, text)


if __name__ == "__main__":
    main()
