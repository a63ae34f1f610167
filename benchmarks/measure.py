"""What the benchmarks share: fair measurements on a shared machine, and results as JSON and as tables."""

from __future__ import annotations

import datetime as dt
import json
import mmap
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format.quantize import engine

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call took."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    """Resident memory at its highest, above the level just before the call; of that, pages that the system may take at
    any time (LazyFree) do not count."""


def warm_memory(gib: float = 2.5) -> None:
    """Touch free memory and give it back, so that the measured call does not pay for the host's page faults."""
    size = int(gib * 2**30)
    with mmap.mmap(-1, size) as memory:
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1


def cost_of(call: Callable[[], object]) -> Cost:
    """Call once and measure."""
    reset_peak()
    before, cpu, start = resident_mib(), _cpu(), time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return Cost(seconds, _cpu() - cpu, max(0.0, memory_kib("VmHWM") / 1024 - before))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory_kib(what: str, file: str = "status") -> int:
    """A line of a file of /proc/self, in KiB."""
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1])
    raise LookupError(what)


def resident_mib() -> float:
    """Resident memory, without what the system may take at any time."""
    return (memory_kib("VmRSS") - memory_kib("LazyFree", "smaps_rollup")) / 1024


def reset_peak() -> None:
    """Let the highest resident memory (VmHWM) begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def memcpy(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """A copy of rows on the threads that encode."""

    def copy(piece: slice) -> None:
        np.copyto(target[piece], source[piece])

    engine.spread(copy, *source.shape)


def sync_files(paths: Iterable[Path]) -> None:
    """fsync, one file after another."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def files_below(folder: Path) -> list[Path]:
    """All files, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """Where and with what it was measured."""
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
    }


def _cpu_name() -> str:
    """With the widest vectors that it has: by them, more than by its name, computing is faster or slower."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    known = {name.strip(): value.strip() for name, _, value in lines}
    flags = known.get("flags", "").split()
    vectors = [told for flag, told in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags]
    return " with ".join([known.get("model name", "unknown"), *vectors[:1]])


def medians(costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each number the median, and of the seconds the extremes."""
    told = {name: statistics.median(cost[name] for cost in costs) for name in costs[0]}
    seconds = [cost["seconds"] for cost in costs]
    return told | {"fastest": min(seconds), "slowest": max(seconds)}


def as_record(cost: Cost) -> dict[str, float]:
    """A cost as JSON values."""
    return asdict(cost)


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    lines = [list(titles), ["---", *["---:"] * (len(titles) - 1)], *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def keep(name: str, document: Mapping[str, Any], page: str) -> None:
    """Keep raw results and their table under `results/`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(page + "\n")
