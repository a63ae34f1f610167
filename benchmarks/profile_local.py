"""Where the CPU time of saving and loading 1 GiB goes: the state of bench_local.py, raw and at 4 bits, not synced.

    python benchmarks/profile_local.py [--folder DIR]

CPU seconds of the threads inside `write`, `read` and the CRC-32C; what is left of the whole is encoding, decoding and
Python.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_local
import google_crc32c
import measure

from checkrun_format.stores import local

ROWS = sum(bench_local.SHARES)

_spent: Counter[str] = Counter()
_lock = threading.Lock()


def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def counting(*args: Any) -> Any:
        start = time.thread_time()
        try:
            return call(*args)
        finally:
            with _lock:
                _spent[name] += time.thread_time() - start

    return counting


def watch() -> None:
    """Count what the local store and the chunks spend."""
    local.os = SimpleNamespace(**{**vars(os), "writev": counted("write", os.writev)})
    local.LocalFile.readinto = counted("read", local.LocalFile.readinto)
    google_crc32c.extend = counted("crc32c", google_crc32c.extend)


def profile(call: Callable[[], object]) -> dict[str, float]:
    measure.warm_memory()
    _spent.clear()
    cost = measure.cost_of(call)
    return {"cpu_seconds": cost.cpu_seconds, "seconds": cost.seconds, **_spent}


def profiles(folder: Path) -> dict[str, dict[str, float]]:
    bench_local.make_state(folder / "state.bin", ROWS)
    arrays, found = bench_local.read_state(folder / "state.bin", ROWS), {}
    for name, bits, encoder in (("raw", None, None), ("4 bits refine", 4, "refine"), ("4 bits minmax", 4, "minmax")):
        (folder / name).mkdir()
        found[f"save {name}"] = profile(
            bench_local.ours(folder / name, arrays, bits=bits, encoder=encoder, durable=False)
        )
    into = bench_local.destinations(ROWS)
    for name in ("raw", "4 bits refine"):
        found[f"load {name}"] = profile(bench_local.ours_load(folder / name, into))
    return found


def page(found: dict[str, dict[str, float]]) -> str:
    titles = ["call", "seconds", "CPU s", "write", "read", "CRC-32C", "all else"]
    rows = []
    for name, told in found.items():
        parts = [told.get(part, 0.0) / told["cpu_seconds"] for part in ("write", "read", "crc32c")]
        shares = [f"{share:.0%}" for share in [*parts, max(0.0, 1 - sum(parts))]]
        rows.append([name, f"{told['seconds']:.2f}", f"{told['cpu_seconds']:.2f}", *shares])
    return measure.table(titles, rows)


def main() -> None:
    """Profile, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    options = parser.parse_args()
    watch()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = profiles(Path(folder))
    print(page(found))
    machine = measure.machine(["checkrun-format", "numpy"])
    measure.keep("profile_local", json.loads(json.dumps({"machine": machine, "profiles": found})), page(found))


if __name__ == "__main__":
    main()
