"""How fast a table goes from a device into a checkpoint, and back, beside what plain copies take.

    python benchmarks/bench_device.py [--device cuda] [--mebibytes 1024] [--rounds 3] [--folder DIR]

GB of float32 values in a second, the fastest of the rounds. Saved is a table of 64 columns that is on the device, as a
base; it is read into a tensor on the device by the device's decoder (chunks go over as they are stored), and by the
CPU's with a copy of the values afterwards. Files are not synced and are in the page cache. With `--device cpu` it shows
what the same code does without a GPU, where the CPU's own decoder is the better one.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measure
import numpy as np
import torch

import checkrun_format as crf

COLUMNS = 64
WIDTHS: tuple[tuple[int | None, str | None], ...] = (
    (None, None),
    (8, "minmax"),
    (4, "refine"),
    (4, "minmax"),
    (2, "refine"),
)


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    rows = options.mebibytes * 2**20 // (4 * COLUMNS)
    weight = torch.randn(rows, COLUMNS, device=device)
    print(f"{options.device}, torch {torch.__version__}, {options.mebibytes} MiB of float32\n")
    ceilings = copies(weight, options.rounds)
    print(measure.table(["plain copy", "GB/s"], ceilings.items()) + "\n")
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        found = [measured(folder, weight, bits, encoder, options.rounds) for bits, encoder in WIDTHS]
    finally:
        shutil.rmtree(folder)
    titles = ["stored as", "save", "read on the device", "read by the CPU, then copied", "the same bits"]
    print(measure.table(titles, found))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    return parser.parse_args()


def rate(call: Callable[[], object], weight: torch.Tensor, rounds: int) -> str:
    seconds = []
    for _ in range(rounds):
        settle(weight.device)
        start = time.perf_counter()
        call()
        settle(weight.device)
        seconds.append(time.perf_counter() - start)
    return f"{weight.nbytes / min(seconds) / 1e9:.2f}"


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copies(weight: torch.Tensor, rounds: int) -> dict[str, str]:
    """Within the host's memory, and from it to the device, pinned and not."""
    host = torch.empty(weight.shape, device="cpu")
    other = torch.empty(weight.shape, device="cpu")
    found = {"host to host": rate(lambda: other.copy_(host), weight, rounds)}
    if weight.device.type == "cuda":
        there = torch.empty_like(weight)
        pinned = host.pin_memory()
        found["host to device"] = rate(lambda: there.copy_(host), weight, rounds)
        found["pinned to device"] = rate(lambda: there.copy_(pinned, non_blocking=True), weight, rounds)
        found["device to pinned"] = rate(lambda: pinned.copy_(weight, non_blocking=True), weight, rounds)
    return found


def measured(folder: Path, weight: torch.Tensor, bits: int | None, encoder: str | None, rounds: int) -> list[str]:
    run = crf.open_run(folder / f"{bits}-{encoder}", "a", durable=False, bits=bits, encoder=encoder, policy="full")

    def save() -> None:
        run.save(crf.State(tables={"t": crf.Table({"weight": weight}, changed=crf.ALL)}))

    saved = rate(save, weight, 2)  # the first one compiles, and touches memory
    out, host = torch.empty_like(weight), torch.empty(weight.shape, device="cpu")
    view = run.latest().table("t")
    there = rate(lambda: view.read(out={"weight": out}, device=weight.device), weight, rounds)
    found = torch.empty_like(weight)

    def by_the_cpu() -> None:
        view.read(out={"weight": host})
        found.copy_(host)

    here = rate(by_the_cpu, weight, rounds)
    same = bool(np.array_equal(out.cpu().numpy().view(np.uint32), host.numpy().view(np.uint32)))
    shutil.rmtree(folder / f"{bits}-{encoder}")
    name = "raw" if bits is None else f"{bits} bits, {encoder}"
    return [name, saved, there, here, "yes" if same else "NO"]


if __name__ == "__main__":
    main()
