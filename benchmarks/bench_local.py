"""The local path: save and load 1 GiB, beside safetensors, torch.save, torch.distributed.checkpoint and plain file I/O.

    python benchmarks/bench_local.py [--folder DIR] [--rounds 5] [--rows 4200000]

The state: 8 float32 tables of dim 64 (4.2 million rows), one float32 of row-wise optimizer state a row, and an MLP of
12 arrays (5 MB). Every method runs once a round, in random order, in a fresh process; the page cache is warm for loads,
and free memory has been touched before each call. The median of the rounds counts. "synced" is the call and an fsync of
every file that it wrote, unless the call does that itself. Needs safetensors and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure
import numpy as np

DIM = 64
SHARES = (2_000_000, 1_000_000, 500_000, 300_000, 200_000, 120_000, 60_000, 20_000)
MLP = ((512, 512), (512,)) * 4 + ((256, 512), (256,), (64, 256), (64,))

Arrays = dict[str, Any]


# The state -----------------------------------------------------------------------------------------------------------


def shapes(rows: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all arrays, for so many rows in all."""
    found: dict[str, tuple[int, ...]] = {}
    for index, share in enumerate(SHARES):
        count = max(1, share * rows // sum(SHARES))
        found |= {f"table{index}": (count, DIM), f"sum{index}": (count,)}
    return found | {f"mlp.{index}": shape for index, shape in enumerate(MLP)}


def make_state(path: Path, rows: int) -> None:
    """Write all values to one file: normal, times a log-normal scale for each row."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for shape in shapes(rows).values():
            values = rng.standard_normal(shape, np.float32) * np.float32(0.05)
            if len(shape) == 2:
                values *= rng.lognormal(0, 0.5, (shape[0], 1)).astype(np.float32)
            values.tofile(file)


def read_state(path: Path, rows: int) -> Arrays:
    """The values, each array in memory of its own."""
    with path.open("rb") as file:
        return {
            name: np.fromfile(file, np.float32, int(np.prod(shape))).reshape(shape)
            for name, shape in shapes(rows).items()
        }


def destinations(rows: int) -> Arrays:
    """Arrays of the same shapes whose memory has been touched."""
    return {name: np.full(shape, 7, np.float32) for name, shape in shapes(rows).items()}


# The methods: each makes of a folder a call that saves, or loads into existing arrays --------------------------------

Method = Callable[[Path, Arrays], Callable[[], object]]


def ours(folder: Path, arrays: Arrays, *, bits: int | None, encoder: str | None, durable: bool) -> Callable[[], object]:
    import checkrun_format as crf

    _load_kernels(bits, encoder)
    run = crf.open_run(folder / "run", "a", bits=bits, encoder=encoder, durable=durable)
    return lambda: run.save(_our_state(arrays), step=1)


def _load_kernels(bits: int | None, encoder: str | None = None) -> None:
    """A process compiles them, or finds them compiled, once: bench_quantize.py measures that."""
    import checkrun_format as crf

    if bits is not None:
        crf.quantize.decode(crf.quantize.encode(np.zeros((20_000, DIM), np.float32), bits, encoder))


def ours_load(folder: Path, arrays: Arrays) -> Callable[[], object]:
    import checkrun_format as crf

    _load_kernels(None if "raw" in folder.name else 4)
    return lambda: crf.open_run(folder / "run").latest().load(out=_our_state(arrays))


def ours_fresh(folder: Path, arrays: Arrays) -> Callable[[], object]:
    import checkrun_format as crf

    arrays.clear()
    return lambda: crf.open_run(folder / "run").latest().load()


def _our_state(arrays: Arrays) -> Any:
    import checkrun_format as crf

    tables = {
        f"table{i}": crf.Table({"weight": arrays[f"table{i}"], "sum": arrays[f"sum{i}"]}) for i in range(len(SHARES))
    }
    return crf.State(tables=tables, tensors={name: a for name, a in arrays.items() if name.startswith("mlp.")})


def plain(folder: Path, arrays: Arrays, *, threads: int) -> Callable[[], object]:
    def write(index: int) -> None:
        with (folder / f"plain{index}").open("wb", buffering=0) as file:
            for array in list(arrays.values())[index::threads]:
                _write_all(file, memoryview(array).cast("B"))

    return _on_threads(write, threads)


def _write_all(file: Any, view: memoryview) -> None:
    """In calls of 1 MiB: one call for hundreds of MiB may take ten times as long (large folios of Linux 6)."""
    while view:
        view = view[file.write(view[: 1 << 20]) :]


def plain_load(folder: Path, arrays: Arrays, *, threads: int) -> Callable[[], object]:
    def read(index: int) -> None:
        with (folder / f"plain{index}").open("rb", buffering=0) as file:
            for array in list(arrays.values())[index::threads]:
                view = memoryview(array).cast("B")
                while view:
                    view = view[file.readinto(view) :]

    return _on_threads(read, threads)


def _on_threads(call: Callable[[int], None], threads: int) -> Callable[[], object]:
    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(call, range(threads)))

    return run


def tensors(arrays: Arrays) -> Arrays:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def safetensors(folder: Path, arrays: Arrays) -> Callable[[], object]:
    from safetensors.torch import save_file

    state = tensors(arrays)
    return lambda: save_file(state, folder / "state.safetensors")


def safetensors_load(folder: Path, arrays: Arrays) -> Callable[[], object]:
    from safetensors.torch import load_file

    return _copied(lambda: load_file(folder / "state.safetensors"), tensors(arrays))


def torch_save(folder: Path, arrays: Arrays) -> Callable[[], object]:
    import torch

    state = tensors(arrays)
    return lambda: torch.save(state, folder / "state.pt")


def torch_load(folder: Path, arrays: Arrays) -> Callable[[], object]:
    import torch

    return _copied(lambda: torch.load(folder / "state.pt", mmap=True, weights_only=True), tensors(arrays))


def _copied(load: Callable[[], Arrays], into: Arrays) -> Callable[[], object]:
    def run() -> None:
        for name, tensor in load().items():
            into[name].copy_(tensor)

    return run


def dcp(folder: Path, arrays: Arrays, *, threads: int) -> Callable[[], object]:
    from torch.distributed import checkpoint

    state = tensors(arrays)
    writer = checkpoint.FileSystemWriter(folder / "dcp", thread_count=threads, sync_files=False)
    return lambda: checkpoint.save(state, storage_writer=writer, no_dist=True)


def dcp_load(folder: Path, arrays: Arrays) -> Callable[[], object]:
    from torch.distributed import checkpoint

    state = tensors(arrays)
    return lambda: checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(folder / "dcp"), no_dist=True)


def memcpy(folder: Path, arrays: Arrays, *, threads: int) -> Callable[[], object]:
    del folder
    copies = {name: np.full_like(array, 7) for name, array in arrays.items()}
    pieces = [(name, low) for name, array in arrays.items() for low in range(0, len(array), 1 << 16)]

    def copy(index: int) -> None:
        for name, low in pieces[index::threads]:
            copies[name][low : low + (1 << 16)] = arrays[name][low : low + (1 << 16)]

    return _on_threads(copy, threads)


def _variant(method: Callable[..., Callable[[], object]], **options: Any) -> Method:
    return lambda folder, arrays: method(folder, arrays, **options)


SAVES: dict[str, Method] = {
    f"checkrun {name}{'' if durable else ', not synced'}": _variant(ours, bits=bits, encoder=encoder, durable=durable)
    for name, bits, encoder in (
        ("raw", None, None),
        ("8 bits minmax", 8, "minmax"),
        ("4 bits minmax", 4, "minmax"),
        ("4 bits refine", 4, "refine"),
    )
    for durable in (False, True)
} | {
    "safetensors": safetensors,
    "torch.save": torch_save,
    "torch DCP, 1 thread": _variant(dcp, threads=1),
    "torch DCP, 2 threads": _variant(dcp, threads=2),
    "plain files, 1 thread": _variant(plain, threads=1),
    "plain files, 2 threads": _variant(plain, threads=2),
    "memcpy, 2 threads": _variant(memcpy, threads=2),
}

LOADS: dict[str, tuple[str, Method]] = {
    "checkrun raw": ("checkrun raw, not synced", ours_load),
    "checkrun 8 bits": ("checkrun 8 bits minmax, not synced", ours_load),
    "checkrun 4 bits": ("checkrun 4 bits refine, not synced", ours_load),
    "checkrun raw, into new arrays": ("checkrun raw, not synced", ours_fresh),
    "safetensors + copy": ("safetensors", safetensors_load),
    "torch.load mmap + copy": ("torch.save", torch_load),
    "torch DCP": ("torch DCP, 2 threads", dcp_load),
    "plain files, 1 thread": ("plain files, 1 thread", _variant(plain_load, threads=1)),
    "plain files, 2 threads": ("plain files, 2 threads", _variant(plain_load, threads=2)),
}
"""What is loaded, by which save it was made, and how."""


# One measurement, in a process of its own ----------------------------------------------------------------------------


def measure_save(name: str, work: Path, rows: int, *, keep: bool) -> dict[str, float]:
    arrays = read_state(work / "state.bin", rows)
    folder = work / f"save {name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    call = SAVES[name](folder, arrays)
    os.sync()
    measure.warm_memory()
    cost = measure.as_record(measure.cost_of(call))
    files = measure.files_below(folder)
    synced = measure.cost_of(lambda: measure.sync_files(files)).seconds if "checkrun" not in name else 0.0
    told = cost | {
        "synced_seconds": cost["seconds"] + synced,
        "megabytes": sum(path.stat().st_size for path in files) / 1e6,
        "files": len(files),
    }
    if not keep:
        shutil.rmtree(folder)
    return told


def measure_load(name: str, work: Path, rows: int) -> dict[str, float]:
    made_by, method = LOADS[name]
    arrays = destinations(rows)
    call = method(work / f"save {made_by}", arrays)
    for path in measure.files_below(work / f"save {made_by}"):
        path.read_bytes()
    measure.warm_memory()
    cost = measure.as_record(measure.cost_of(call))
    if name in ("checkrun raw", "safetensors + copy", "plain files, 2 threads"):
        wanted = read_state(work / "state.bin", rows)
        assert all(np.array_equal(arrays[key], values) for key, values in wanted.items())
    if name in ("checkrun 8 bits", "checkrun 4 bits"):
        wanted = read_state(work / "state.bin", rows)
        assert all(np.array_equal(arrays[key], values) for key, values in wanted.items() if values.ndim == 1)
        assert all(np.abs(arrays[key] - values).max() < np.abs(values).max() / 3 for key, values in wanted.items())
    return cost


def measure_many(what: str, work: Path) -> dict[str, float]:
    """Many tables: few objects, and seconds, not minutes."""
    import checkrun_format as crf

    rng = np.random.default_rng(0)
    folder = work / "many"
    shutil.rmtree(folder, ignore_errors=True)
    if what == "increment of 10 rows in each of 500 tables":
        wide = {f"a{i}": rng.random((1000, 32), np.float32) for i in range(250)}
        wide |= {f"b{i}": rng.random((1000, 16), np.float32) for i in range(250)}
        rows = [np.sort(rng.choice(1000, 10, replace=False)) for _ in wide]
        run = crf.open_run(folder, "a", bits=4, policy="consecutive")

        def state() -> crf.State:
            return crf.State(
                tables={n: crf.Table({"weight": w}, changed=r) for (n, w), r in zip(wide.items(), rows, strict=True)}
            )

        run.save(state(), step=0)
        before = len(measure.files_below(folder))
        measure.warm_memory(0.5)
        cost = measure.as_record(measure.cost_of(lambda: run.save(state(), step=1)))
        told = cost | {"objects": len(measure.files_below(folder)) - before}
    else:
        small = {f"t{i}": rng.random((10, 8), np.float32) for i in range(20_000)}
        run = crf.open_run(folder, "a", bits=4)
        state_of = crf.State(tables={name: crf.Table({"weight": w}) for name, w in small.items()})
        if what == "save 20,000 tables":
            told = measure.as_record(measure.cost_of(lambda: run.save(state_of, step=0)))
            told["objects"] = len(measure.files_below(folder))
        elif what == "open 20,000 tables":
            run.save(state_of, step=0)
            told = measure.as_record(measure.cost_of(lambda: crf.open_run(folder).latest().table("t19999").read()))
        else:
            run.save(state_of, step=0)
            told = measure.as_record(measure.cost_of(lambda: crf.open_run(folder).latest().load()))
    shutil.rmtree(folder)
    return told


MANY = (
    "increment of 10 rows in each of 500 tables",
    "save 20,000 tables",
    "open 20,000 tables",
    "load 20,000 tables",
)


# All of it -----------------------------------------------------------------------------------------------------------


def in_a_fresh_process(kind: str, name: str, options: argparse.Namespace, *, keep: bool = False) -> dict[str, float]:
    command = [sys.executable, __file__, "--folder", str(options.folder), "--rows", str(options.rows)]
    command += ["--one", kind, name, *(["--keep"] if keep else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} {name}: {done.stderr}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    make_state(options.folder / "state.bin", options.rows)
    for made_by in {made_by for made_by, _ in LOADS.values()}:
        in_a_fresh_process("save", made_by, options, keep=True)
        (options.folder / f"save {made_by}").rename(options.folder / f"kept {made_by}")
    for made_by in {made_by for made_by, _ in LOADS.values()}:
        (options.folder / f"kept {made_by}").rename(options.folder / f"save {made_by}")
    results: dict[str, dict[str, list[dict[str, float]]]] = {"load": {}, "save": {}, "many": {}}
    names = {"load": list(LOADS), "save": list(SAVES), "many": list(MANY)}
    for kind, found in results.items():  # loads first: a save removes what it finds
        for number in range(options.rounds):
            for name in random.sample(names[kind], len(names[kind])):
                told = in_a_fresh_process(kind, name, options)
                found.setdefault(name, []).append(told)
                print(f"{kind} {number + 1}/{options.rounds} {name}: {told['seconds']:.2f} s", file=sys.stderr)
    return results


def page(results: dict[str, Any], machine: dict[str, Any]) -> str:
    """The results as tables."""
    median = {kind: {name: measure.medians(costs) for name, costs in found.items()} for kind, found in results.items()}
    save, load, many = (median[kind] for kind in ("save", "load", "many"))
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    text = [
        f"{machine['date']}, {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, {versions}",
        "",
    ]
    text += ["Save:", ""]
    titles = ["method", "seconds", "fastest-slowest", "synced", "CPU s", "MB stored", "files", "peak MiB"]
    text += [measure.table(titles, [_save_row(name, save[name]) for name in SAVES if name in save]), ""]
    text += ["Load into existing arrays, page cache warm:", ""]
    titles = ["method", "seconds", "fastest-slowest", "CPU s", "peak MiB"]
    text += [measure.table(titles, [_load_row(name, load[name]) for name in LOADS if name in load]), ""]
    text += ["Many tables:", ""]
    rows = [(n, f"{many[n]['seconds']:.2f}", f"{many[n]['objects']:.0f}" if "objects" in many[n] else "") for n in many]
    text += [measure.table(["what", "seconds", "objects"], rows), "", "Against the targets:", ""]
    return "\n".join([*text, measure.table(["target", "wanted", "reached"], _targets(save, load, many))])


def _save_row(name: str, cost: dict[str, float]) -> list[str]:
    itself = name.startswith("checkrun") and "not synced" not in name
    call = "" if itself else f"{cost['seconds']:.2f}"
    synced = f"{cost['synced_seconds']:.2f}" if "not synced" not in name and cost["files"] else ""
    spread = f"{cost['fastest']:.2f}-{cost['slowest']:.2f}"
    return [
        name,
        call,
        spread,
        synced,
        f"{cost['cpu_seconds']:.2f}",
        f"{cost['megabytes']:.1f}",
        f"{cost['files']:.0f}",
        f"{cost['peak_mib']:.0f}",
    ]


def _load_row(name: str, cost: dict[str, float]) -> list[str]:
    spread = f"{cost['fastest']:.2f}-{cost['slowest']:.2f}"
    return [name, f"{cost['seconds']:.2f}", spread, f"{cost['cpu_seconds']:.2f}", f"{cost['peak_mib']:.0f}"]


def _targets(save: Any, load: Any, many: Any) -> list[list[str]]:
    peers = ("safetensors", "torch.save", "torch DCP, 1 thread", "torch DCP, 2 threads")
    synced = min(save[name]["synced_seconds"] for name in peers)
    increment = many[MANY[0]]
    peak = max(
        cost["peak_mib"]
        for name, cost in [*save.items(), *load.items()]
        if name.startswith("checkrun") and "new" not in name
    )
    return [
        [
            "raw save, not synced, against safetensors",
            ">= 0.9x as fast",
            f"{save['safetensors']['seconds'] / save['checkrun raw, not synced']['seconds']:.2f}x",
        ],
        [
            "raw save, synced, against the best synced peer",
            ">= 0.9x as fast",
            f"{synced / save['checkrun raw']['seconds']:.2f}x",
        ],
        [
            "raw load, checksums verified, against safetensors + copy",
            "<= 2x the time",
            f"{load['checkrun raw']['seconds'] / load['safetensors + copy']['seconds']:.2f}x",
        ],
        ["memory above the state", "<= 256 MiB", f"{peak:.0f} MiB"],
        [
            "4 bits minmax, save, synced, against the best synced peer",
            ">= 3.5x as fast",
            f"{synced / save['checkrun 4 bits minmax']['seconds']:.2f}x",
        ],
        [
            "4 bits refine, save, synced, against the best synced peer",
            ">= 2.5x as fast",
            f"{synced / save['checkrun 4 bits refine']['seconds']:.2f}x",
        ],
        [
            "4 bits, load, against safetensors + copy",
            "<= 1.3x the time",
            f"{load['checkrun 4 bits']['seconds'] / load['safetensors + copy']['seconds']:.2f}x",
        ],
        [MANY[0], "<= 50 objects, <= 0.3 s", f"{increment['objects']:.0f} objects, {increment['seconds']:.2f} s"],
        [
            "20,000 tables: save; open",
            "<= 5 s each",
            f"{many[MANY[1]]['seconds']:.2f} s; {many[MANY[2]]['seconds']:.2f} s",
        ],
    ]


def main() -> None:
    """Measure everything, or one thing in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=sum(SHARES))
    parser.add_argument("--one", nargs=2, metavar=("KIND", "NAME"), help="measure one thing, in this process")
    parser.add_argument("--keep", action="store_true", help="with --one: keep what was saved")
    parser.add_argument("--no-results", action="store_true", help="only print")
    options = parser.parse_args()
    if options.one:
        kind, name = options.one
        if kind == "save":
            told = measure_save(name, options.folder, options.rows, keep=options.keep)
        else:
            told = (
                measure_load(name, options.folder, options.rows)
                if kind == "load"
                else measure_many(name, options.folder)
            )
        print(json.dumps(told))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = Path(folder)
        results = run_all(options)
    where = measure.machine(["checkrun-format", "numpy", "safetensors", "torch"])
    text = page(results, where)
    print(text)
    if not options.no_results:
        measure.keep("local", {"machine": where, "rows": options.rows, "results": results}, text)


if __name__ == "__main__":
    main()
