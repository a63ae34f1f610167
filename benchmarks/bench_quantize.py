"""Speed and error of the encoders and the decoder, beside memcpy on the same threads, numpy and torch's operators.

    python benchmarks/bench_quantize.py [--quick] [--threads N] [--table FILE.safetensors:TENSOR] [--seed N]

prints tables and keeps them, the raw results and a graph under benchmarks/results/. Needs torch; and matplotlib for the
graph, safetensors for a table. Every number is the median of rounds in which all methods take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else torch's threads spin and take the second core

import measure
import ml_dtypes
import numpy as np
import numpy.typing as npt

from checkrun_format.quantize import Method, decode, encode, engine, set_threads

Array = npt.NDArray[Any]
RESULTS = Path(__file__).parent / "results"
KINDS = ("normal", "laplace", "student", "uniform", "skewed")
WIDTHS = (2, 3, 4)
BINS = (6, 10, 16, 25, 45, 90)
RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


def rows(kind: str, count: int, columns: int, seed: int) -> Array:
    """Rows of one distribution, each with a scale of its own."""
    rng, shape = np.random.default_rng(seed), (count, columns)
    drawn = {
        "normal": lambda: rng.standard_normal(shape, np.float32),
        "laplace": lambda: rng.laplace(0, 1, shape),
        "student": lambda: rng.standard_t(4, shape),
        "uniform": lambda: rng.uniform(-1, 1, shape),
        "skewed": lambda: rng.lognormal(0, 0.5, shape),
    }[kind]()
    return (0.05 * drawn * rng.lognormal(0, 0.5, (count, 1))).astype(np.float32)


def medians(jobs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each job: all once to warm up, then all in turn, forwards and backwards."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for number in range(rounds):
        for name in list(jobs)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            jobs[name]()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def l2(values: Array, bits: int, method: str | Method) -> float:
    """The mean l2 error of the rows."""
    error = decode(encode(values, bits, method)).astype(np.float64) - values
    return float(np.sqrt((error**2).sum(1)).mean())


# ---- speed


def speeds(columns: int, megabytes: int, rounds: int, seed: int) -> dict[str, float]:
    """GB/s of float32, by method."""
    values = rows("normal", megabytes * 1_000_000 // 4 // columns, columns, seed)
    out = np.zeros_like(values)
    jobs: dict[str, Callable[[], object]] = {"memcpy": lambda: measure.memcpy(values, out)}
    for bits in (8, 4, 3, 2):
        coded = encode(values, bits, "minmax")
        into = np.zeros_like(coded.codes)
        jobs[f"minmax {bits}"] = lambda b=bits, c=into: encode(values, b, "minmax", codes=c)  # type: ignore[misc]
        jobs[f"decode {bits}"] = lambda q=coded: decode(q, out=out)  # type: ignore[misc]
        if bits < 8:
            jobs[f"refine {bits}"] = lambda b=bits, c=into: encode(values, b, "refine", codes=c)  # type: ignore[misc]
    return {name: values.nbytes / seconds / 1e9 for name, seconds in medians(jobs, rounds).items()}


def dtype_speeds(megabytes: int, rounds: int, seed: int) -> dict[str, float]:
    """Giga-elements/s at 64 columns, by source and destination dtype."""
    values = rows("normal", megabytes * 1_000_000 // 4 // 64, 64, seed)
    jobs: dict[str, Callable[[], object]] = {}
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        given = values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
        for bits in (8, 4):
            coded = encode(given, bits, "minmax")
            into, out = np.zeros_like(coded.codes), np.zeros_like(given)
            jobs[f"minmax {bits} {dtype}"] = lambda g=given, b=bits, c=into: encode(g, b, "minmax", codes=c)  # type: ignore[misc]
            jobs[f"decode {bits} {dtype}"] = lambda q=coded, o=out: decode(q, out=o)  # type: ignore[misc]
    return {name: values.size / seconds / 1e9 for name, seconds in medians(jobs, rounds).items()}


def peers(megabytes: int, rounds: int, seed: int, threads: int) -> dict[str, float]:
    """GB/s of float32 at 64 columns: the compiled kernels, the numpy reference, torch's operators.

    What would take minutes is given fewer rows.
    """
    import torch

    torch.set_num_threads(threads)
    values = rows("normal", megabytes * 1_000_000 // 4 // 64, 64, seed)
    few = values[: len(values) // 32]
    given, some = torch.from_numpy(values), torch.from_numpy(few)

    def reference(method: str, bits: int) -> None:
        with mock.patch.object(engine, "kernels", return_value=None):
            encode(few, bits, method)

    operators = torch.ops.quantized
    jobs: dict[str, tuple[Any, Callable[[], object]]] = {
        "minmax 8": (values, lambda: encode(values, 8, "minmax")),
        "minmax 4": (values, lambda: encode(values, 4, "minmax")),
        "torch byte_prepack": (values, lambda: operators.embedding_bag_byte_prepack(given)),
        "torch 4bit_prepack": (values, lambda: operators.embedding_bag_4bit_prepack(given)),
        "numpy minmax 8": (few, lambda: reference("minmax", 8)),
        "numpy refine 4": (few, lambda: reference("refine", 4)),
    }
    for bits, bins, ratio in ((4, 45, 0.2), (4, 45, 1.0), (2, 25, 0.5)):
        name = f"greedy {bits} bits, {bins} bins, ratio {ratio}"
        operator = getattr(operators, f"embedding_bag_{bits}bit_prepack")
        method = Method("greedy", bins, ratio)
        jobs[name] = (values, lambda b=bits, m=method: encode(values, b, m))  # type: ignore[misc]
        jobs[f"torch {name[7:]}"] = (some, lambda o=operator, n=bins, r=ratio: o(some, True, n, r))  # type: ignore[misc] # noqa: FBT003
    seconds = medians({name: job for name, (_, job) in jobs.items()}, rounds)
    return {name: v.nbytes / seconds[name] / 1e9 for name, (v, _) in jobs.items()}


def cold_start() -> dict[str, float]:
    """Seconds of a first encoding and decoding in a new process: nothing compiled yet, and compiled earlier."""
    program = """
import time, numpy as np
import checkrun_format.quantize as q
x = np.random.default_rng(0).standard_normal((100_000, 64), np.float32)
start = time.perf_counter(); coded = q.encode(x, 4); print(time.perf_counter() - start)
start = time.perf_counter(); q.decode(coded); print(time.perf_counter() - start)
"""
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        for state in ("nothing compiled", "compiled earlier"):
            ran = subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "NUMBA_CACHE_DIR": folder},
                check=True,
                capture_output=True,
                text=True,
            )
            told[f"encode, {state}"], told[f"decode, {state}"] = (float(line) for line in ran.stdout.split())
    return told


# ---- error against time


def best_ratio(values: Array, bits: int, bins: int) -> tuple[float, float]:
    """The smallest ratio within 0.1 % of the least error of all, and its error."""
    errors = {ratio: l2(values, bits, Method("greedy", bins, ratio)) for ratio in RATIOS if int(bins * ratio + 1e-9)}
    least = min(errors.values())
    ratio = min(ratio for ratio, error in errors.items() if error <= 1.001 * least)
    return ratio, errors[ratio]


def curve(values: Array, bits: int, rounds: int, bins: tuple[int, ...]) -> dict[str, Any]:
    """Error relative to `minmax`, and nanoseconds an element, of `refine` and of `greedy` at its best ratios."""
    plain = l2(values, bits, "minmax")
    points = {"refine": ("refine", l2(values, bits, "refine")), "minmax": ("minmax", plain)}
    for count in bins:
        ratio, error = best_ratio(values, bits, count)
        points[f"greedy {count} {ratio}"] = (Method("greedy", count, ratio), error)  # type: ignore[assignment]
    jobs = {name: (lambda m=method: encode(values, bits, m)) for name, (method, _) in points.items()}  # type: ignore[misc]
    seconds = medians(jobs, rounds)
    return {name: [error / plain, seconds[name] / values.size * 1e9] for name, (_, error) in points.items()}


def eight_bits(values: Array, rounds: int) -> dict[str, float]:
    """At 8 bits: errors relative to `minmax`, and how much faster `refine` is than `greedy` with 45 bins."""
    methods: dict[str, str | Method] = {"refine": "refine", "greedy": Method("greedy", 45, 1.0)}
    jobs = {name: (lambda m=method: encode(values, 8, m)) for name, method in methods.items()}  # type: ignore[misc]
    seconds, plain = medians(jobs, rounds), l2(values, 8, "minmax")
    told = {name: l2(values, 8, method) / plain for name, method in methods.items()}
    some = values[: max(50, 20_000 // values.shape[1])]
    return {**told, "least": least(some) / l2(some, 8, "minmax"), "faster": seconds["greedy"] / seconds["refine"]}


def least(values: Array) -> float:
    """The mean over rows of the least l2 error at 8 bits in 1,681 ranges, each end moved by up to four codes."""
    low, step = values.min(1, keepdims=True), np.ptp(values, axis=1, keepdims=True) / np.float32(255)
    best = np.full(len(values), np.inf)
    for start, end in itertools.product(np.linspace(-4, 4, 41, dtype=np.float32), repeat=2):
        width, origin = step * ((255 - start - end) / np.float32(255)), low + start * step
        error = np.clip(np.rint((values - origin) / width), 0, 255) * width + origin - values
        best = np.minimum(best, np.einsum("ij,ij->i", error, error))
    return float(np.sqrt(best).mean())


def verdict(points: Mapping[str, list[float]]) -> dict[str, float]:
    """How much faster `refine` is than the fastest `greedy` of no more error, and its error over that at equal time."""
    error, nanoseconds = points["refine"]
    others = [point for name, point in points.items() if name.startswith("greedy")]
    as_good = [t for e, t in others if e <= 1.0005 * error]
    as_fast = [e for e, t in others if t <= nanoseconds] or [points["minmax"][0]]
    return {
        "faster": min(as_good) / nanoseconds if as_good else float("inf"),
        "error": error / min(as_fast),
        "45 bins": error / min(e for name, (e, _) in points.items() if name.startswith("greedy 45 ")),
    }


# ---- what is printed and kept


def table(head: list[str], body: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]
    return "\n".join(lines) + "\n"


def report(found: dict[str, Any]) -> str:
    """The results as tables."""
    machine = found["machine"]
    text = f"{machine['date']}, {machine['threads']} threads, {machine['cpu']}, Python {machine['python']}, "
    text += f"numpy {machine['packages']['numpy']}, load average before {machine['load']:.1f}\n\n"
    text += "GB/s of float32 in or out, and relative to memcpy on the same threads in the same rounds:\n\n"
    names = [name for name in next(iter(found["speeds"].values())) if name != "memcpy"]
    body = [
        [columns, f"{by['memcpy']:.1f}", *(f"{by[name]:.1f} ({by[name] / by['memcpy']:.2f})" for name in names)]
        for columns, by in found["speeds"].items()
    ]
    text += table(["columns", "memcpy", *names], body)
    text += "\nGiga-elements/s at 64 columns, by dtype of source or destination:\n\n"
    text += table(["", "G/s"], [[name, f"{value:.2f}"] for name, value in found["dtypes"].items()])
    text += "\nGB/s of float32 at 64 columns, beside numpy and torch:\n\n"
    text += table(["", "GB/s"], [[name, f"{value:.4g}"] for name, value in found["peers"].items()])
    text += "\nSeconds of the first call in a process:\n\n"
    text += table(["", "s"], [[name, f"{value:.2f}"] for name, value in found["cold"].items()])
    text += (
        "\n`refine` against `greedy`, each with its best ratio for a number of bins; errors are mean l2 of rows:\n\n"
    )
    head = ["rows", "columns", "bits", "error / minmax", "error / greedy 45", "times faster", "error at equal time"]
    body = []
    for name, points in found["curves"].items():
        judged = verdict(points)
        shown = (
            f"{points['refine'][0]:.3f}",
            f"{judged['45 bins']:.3f}",
            f"{judged['faster']:.1f}",
            f"{judged['error']:.3f}",
        )
        body.append([*name.split(), *shown])
    text += table(head, body)
    text += "\nAt 8 bits, `refine`, the best of many ranges and `greedy` with 45 bins and all of the range:\n\n"
    head = ["rows", "columns", "error / minmax", "least of 1,681 ranges", "greedy", "times faster"]
    body = [[*name.split(), *(f"{e[n]:.3f}" for n in ("refine", "least", "greedy")), f"{e['faster']:.1f}"]
            for name, e in found["eight"].items()]  # fmt: skip
    text += table(head, body)
    text += "\nTargets:\n\n" + table(["target", "met", "worst"], targets(found))
    return text


def targets(found: Mapping[str, Any]) -> list[list[str]]:
    """Which targets are met, by the worst case."""
    speed = {
        n: min(by[n] / by["memcpy"] for by in found["speeds"].values()) for n in next(iter(found["speeds"].values()))
    }
    judged = [verdict(points) for points in found["curves"].values()]
    below = [j for j in judged if j["faster"] >= 1.5 or j["error"] <= 0.98]
    peer, dtype = found["peers"], found["dtypes"]
    searches = [name for name in peer if name.startswith("greedy")]
    gains = [peer[name] / peer[f"torch {name[7:]}"] for name in searches]
    narrow = [
        dtype[f"{job} {bits} {name}"] / dtype[f"{job} {bits} float32"]
        for job in ("minmax", "decode") for bits in (8, 4) for name in ("float16", "bfloat16")
    ]  # fmt: skip
    lines = [(f"refine at {bits} bits >= 0.2 of memcpy", speed[f"refine {bits}"], 0.2) for bits in WIDTHS] + [
        ("minmax at 8 bits >= 0.6 of memcpy", speed["minmax 8"], 0.6)
    ]
    lines += [(f"decode at {bits} bits >= 1.0 of memcpy", speed[f"decode {bits}"], 1.0) for bits in (2, 3, 4, 8)]
    lines += [("greedy >= 40 times torch at the same bins and ratio", min(gains), 40.0)]
    lines += [("float16, bfloat16 >= 1.0 of float32 in elements/s", min(narrow), 1.0)]
    lines += [("refine below the curve of greedy, of all cases", len(below) / len(judged), 1.0)]
    made = [[name, "yes" if value >= bound else "no", f"{value:.2f}"] for name, value, bound in lines]
    worst = max(j["45 bins"] for j in judged), max(e["refine"] for e in found["eight"].values())
    told = ("error of refine <= greedy with 45 bins", 1.0), ("error of refine at 8 bits <= 0.96 of minmax", 0.96)
    return [
        *made,
        *([name, "yes" if value <= bound else "no", f"{value:.4f}"]
          for value, (name, bound) in zip(worst, told, strict=True)),
    ]  # fmt: skip


def draw(curves: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    """Error against time, one panel for each width, for rows of 64 columns."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "checkrun"
    import matplotlib.pyplot as plt

    shown = {name: points for name, points in curves.items() if name.split()[1] in ("64", "384")}
    figure, panels = plt.subplots(1, len(WIDTHS), figsize=(13, 4.2), constrained_layout=True)
    for bits, panel in zip(WIDTHS, panels, strict=True):
        for color, (name, points) in enumerate((n, p) for n, p in shown.items() if n.endswith(f" {bits}")):
            searched = [point for at, point in points.items() if at.startswith("greedy")]
            panel.plot(
                *zip(*[(t, e) for e, t in searched], strict=True), "o-", ms=3, color=f"C{color}", label=name.split()[0]
            )
            panel.plot(points["refine"][1], points["refine"][0], "*", ms=12, color=f"C{color}")
        panel.set(title=f"{bits} bits", xlabel="ns an element", xscale="log")
    panels[0].set_ylabel("mean l2 error / minmax")
    panels[-1].legend(title="lines: greedy, 6 to 90 bins\nstars: refine")
    figure.savefig(path, metadata={"Date": None})


def real_table(address: str, count: int, seed: int) -> Array:
    """Some rows of a tensor of a safetensors file."""
    from safetensors import safe_open

    file, _, name = address.rpartition(":")
    with safe_open(file, "np") as opened:
        values: Array = opened.get_tensor(name)
    chosen = np.random.default_rng(seed).permutation(len(values))[:count]
    return np.ascontiguousarray(values[chosen], np.float32)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All results."""
    quick, seed = options.quick, options.seed
    rounds, megabytes = (3, 32) if quick else (9, 128)
    dims = (16, 64, 200) if quick else (16, 24, 48, 64, 96, 128, 200)
    found: dict[str, Any] = {
        "machine": measure.machine(["numpy"]) | {"threads": engine.threads(), "load": os.getloadavg()[0]},
        "speeds": {str(columns): speeds(columns, megabytes, rounds, seed) for columns in dims},
        "dtypes": dtype_speeds(megabytes, rounds, seed),
        "peers": peers(megabytes, 3, seed, engine.threads()),
        "cold": cold_start(),
        "curves": {},
        "eight": {},
    }
    cases = [(kind, columns) for kind in KINDS for columns in ((64,) if quick else (16, 24, 48, 64, 96, 128, 200))]
    given = {f"{kind} {columns}": rows(kind, 200_000 // columns, columns, seed + 1) for kind, columns in cases}
    if options.table:
        values = real_table(options.table, 1000, seed)
        given[f"table {values.shape[1]}"] = values
    for name, values in given.items():
        found["eight"][name] = eight_bits(values, 3)
        for bits in WIDTHS:
            found["curves"][f"{name} {bits}"] = curve(values, bits, 5, BINS[2:5] if quick else BINS)
    return found


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer dims, bins and rounds; nothing is kept")
    parser.add_argument("--threads", type=int, help="default: all that the process may use")
    parser.add_argument("--table", metavar="FILE.safetensors:TENSOR", help="a real table, too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    set_threads(options.threads)
    start = time.perf_counter()
    found = measured(options)
    found["seconds"] = time.perf_counter() - start
    text = report(found)
    print(text)
    print(f"{found['seconds']:.0f} s")
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "quantize.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        (RESULTS / "quantize.md").write_text(text, "utf-8")
        draw(found["curves"], RESULTS / "quantize.svg")


if __name__ == "__main__":
    main()
