"""How long a restore from few bits is felt: by samples trained after it, and by the length of the whole training.

    python benchmarks/bench_recovery.py [--seeds N] [--quick] [--no-results]

On the generated log of `examples/train_dlrm.py`, held-out loss against the same training uninterrupted: first with one
restore after 400 batches, at more and more batches after it; then with the widths and restores that Check-N-Run
recommends, evenly spread over trainings of 200 to 3,200 batches. `bench_accuracy.py` has all widths, at 800 batches.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import measure
import torch
from bench_accuracy import RECOMMENDED, Data, Worse, held_out_scores, margin, told, trained
from train_dlrm import Batch, GeneratedLog, Trainer

from checkrun_format.torch import Checkpointer

BATCH_SIZE = 1024
RESTORED_AT = 400
AFTER = (0, 10, 50, 100, 200, 400, 800, 1600)
WIDTHS = (2, 3, 4)
LENGTHS = (200, 800, 3200)
HELD_OUT = 100

Differences = dict[str, list[float]]
"""In percent of the uninterrupted loss, one a seed."""


def restored(trainer: Trainer, rows: tuple[int, ...], bits: int | None) -> Trainer:
    """Another trainer, restored from a checkpoint of this one."""
    other = Trainer(rows)
    with tempfile.TemporaryDirectory() as folder:
        with Checkpointer(folder, trainer.model, trainer.optimizers, bits=bits, durable=False) as checkpointer:
            checkpointer.save(0)
        with Checkpointer(folder, other.model, other.optimizers, bits=bits, durable=False) as checkpointer:
            checkpointer.restore()
    return other


def loss_of(trainer: Trainer, held_out: Sequence[Batch]) -> float:
    """On what it was not trained with."""
    return held_out_scores(trainer, held_out)["loss"]


def decay(data: Data, seed: int, after: Sequence[int]) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    """Batches after the restore, the uninterrupted loss, and by how many percent others are worse."""
    torch.manual_seed(seed)
    order = torch.randperm(len(data.batches)).tolist()
    alone = Trainer(data.log.rows)
    for number in order[:RESTORED_AT]:
        alone.train(data.batches[number])
    others = {f"{bits} bits": restored(alone, data.log.rows, bits) for bits in WIDTHS}
    for before, now in itertools.pairwise([0, *after]):
        for number in order[RESTORED_AT + before : RESTORED_AT + now]:
            for trainer in (alone, *others.values()):
                trainer.train(data.batches[number])
        loss = loss_of(alone, data.held_out)
        worse = {name: 100 * (loss_of(other, data.held_out) / loss - 1) for name, other in others.items()}
        told(f"seed {seed}, {now} batches after: {loss:.5f}, {worse}")
        yield now, loss, worse


def lengths(data: Data, seed: int) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    """Batches trained, the uninterrupted loss, and by how many percent trainings with restores are worse."""
    for length in LENGTHS:
        if length > len(data.batches):
            return
        short = Data(data.log, data.batches[:length], data.held_out, 1)
        loss = loss_of(trained(short, seed, None, 0), data.held_out)
        worse = {
            f"{restores} from {bits} bits": 100
            * (loss_of(trained(short, seed, bits, restores), data.held_out) / loss - 1)
            for restores, bits in RECOMMENDED.items()
        }
        told(f"seed {seed}, {length} batches: {loss:.5f}, {worse}")
        yield length, loss, worse


def rows_of(found: Mapping[int, Sequence[tuple[float, Mapping[str, float]]]]) -> Iterator[list[object]]:
    """One row of the table for each number of batches: samples, loss, and the means over seeds."""
    for batches, of_seeds in found.items():
        differences: Differences = defaultdict(list)
        for _, worse in of_seeds:
            for name, value in worse.items():
                differences[name].append(value)
        means = [Worse(sum(values) / len(values), margin(values)) for values in differences.values()]
        yield [f"{batches * BATCH_SIZE:,}", f"{sum(loss for loss, _ in of_seeds) / len(of_seeds):.4f}", *means]


def main() -> None:
    """Train, show, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two seeds, few batches, nothing is kept: does it run?")
    parser.add_argument("--no-results", action="store_true", help="only print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    after, length, seeds = (AFTER[:3], 450, 2) if options.quick else (AFTER, max(LENGTHS), options.seeds)
    log = GeneratedLog(BATCH_SIZE)
    data = Data(log, [log(n) for n in range(length)], [log(10**6 + n) for n in range(HELD_OUT)], 1)
    parts: dict[str, dict[int, list[tuple[float, Mapping[str, float]]]]] = {
        "decay": defaultdict(list),
        "lengths": defaultdict(list),
    }
    for seed in range(seeds):
        for part, found in (("decay", decay(data, seed, after)), ("lengths", lengths(data, seed))):
            for batches, loss, worse in found:
                parts[part][batches].append((loss, worse))
    machine = measure.machine(["checkrun-format", "torch"])
    text = "\n".join(
        [
            f"{machine['date']}, {machine['cores']} cores of {machine['cpu']}, torch {machine['packages']['torch']}",
            "",
            (
                f"Loss worse than uninterrupted, in % (mean of paired differences of {seeds} seeds, and its 95 % "
                f"interval), after one restore at {RESTORED_AT * BATCH_SIZE:,} samples:"
            ),
            "",
            measure.table(
                ["samples after the restore", "loss uninterrupted", *(f"{bits} bits" for bits in WIDTHS)],
                list(rows_of(parts["decay"])),
            ),
            "",
            "The same at the end of trainings of other lengths, with restores evenly spread:",
            "",
            measure.table(
                ["samples", "loss uninterrupted", *(f"{n} from {bits} bits" for n, bits in RECOMMENDED.items())],
                list(rows_of(parts["lengths"])),
            ),
        ]
    )
    print(text)
    if not (options.quick or options.no_results):
        measure.keep("bench_recovery", {"machine": machine, "seeds": seeds, **parts}, text)


if __name__ == "__main__":
    main()
