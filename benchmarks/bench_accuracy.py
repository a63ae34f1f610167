"""What quantized restores cost a model: loss and AUC on held-out clicks, against the same training uninterrupted.

    python benchmarks/bench_accuracy.py [--quick] [--seeds N] [--batches N] [--processes N] [--no-results]
                                        [--log FILE] [--batch-size N] [--epochs N]

Trains `examples/train_dlrm.py` to the end with 0, 1, 3, 10 and 20 restores, evenly spread, at 2, 3, 4 and 8 bits and
raw. For each restore the model is saved and thrown away; a new one, initialised otherwise, reads the checkpoint and
goes on. A seed is an initialisation and an order of the batches; results are differences between two trainings of one
seed. Raw restores must end in the same bits as no restore at all. Two figures tell what a difference means: how much
seeds differ from each other, and what a single weight does that is off by its last bit at the start.

A fifth of the log is held out: of the generated one the last batches; of a file, which may be sorted by user or by
time, samples drawn at random, the same ones for every seed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from checkrun_format.torch import Checkpointer

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_dlrm import COLUMNS, Batch, FileLog, GeneratedLog, Reader, Trainer

WIDTHS = (2, 3, 4, 8, None)
RESTORES = (1, 3, 10, 20)
RECOMMENDED = {1: 2, 3: 3, 10: 4, 20: 4}
"""By expected restores, the width that Check-N-Run recommends for at most `THRESHOLD` of accuracy lost."""

THRESHOLD = 0.01
"""Percent."""

SCORES = {"loss": "Loss", "auc": "AUC"}

HELD_OUT = 5
"""One batch of so many is held out."""

GENERATED = 1000
"""Batches of a generated log."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training goes through."""

    path: Path | None
    """None: the generated log."""
    batches: int | None
    """None: all of a file."""
    batch_size: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one training ended."""

    seed: int
    bits: int | None
    restores: int
    nudged: bool
    loss: float
    auc: float


@dataclass(frozen=True)
class Data:
    """A log, of which the last batches are held out."""

    log: GeneratedLog | FileLog
    batches: list[Batch]
    held_out: list[Batch]
    epochs: int

    @classmethod
    def read(cls, plan: Plan) -> Data:
        """From a file, or generated."""
        if plan.path is None:
            log: GeneratedLog | FileLog = GeneratedLog(plan.batch_size)
            batches = list(Reader(log, 0, plan.batches or GENERATED))
        else:
            log = FileLog(plan.path, plan.batch_size)
            batches = shuffled(list(itertools.islice(log, plan.batches)), plan.batch_size)
        cut = len(batches) - len(batches) // HELD_OUT
        return cls(log, batches[:cut], batches[cut:], plan.epochs)

    def beside(self) -> dict[str, dict[str, float]]:
        """What a model knows at least, and at most: the share of clicks; the rule of a generated log."""
        clicks = torch.cat([batch.clicks for batch in self.held_out])
        share = torch.cat([batch.clicks for batch in self.batches]).mean()
        known = {"chance": scores(torch.full_like(clicks, torch.logit(share).item()), clicks)}
        if isinstance(self.log, GeneratedLog):
            truth = torch.cat([self.log.truth(batch.numbers, batch.categories) for batch in self.held_out])
            known["hidden truth"] = scores(truth, clicks)
        return known


def shuffled(batches: Sequence[Batch], size: int) -> list[Batch]:
    """The same samples in other batches."""
    columns = [torch.cat([getattr(batch, field.name) for batch in batches]) for field in fields(Batch)]
    order = torch.randperm(len(columns[0]), generator=torch.Generator().manual_seed(0))
    return [Batch(*(column[some] for column in columns)) for some in order.split(size)]


# Training -------------------------------------------------------------------------------------------------------------


def trained(data: Data, seed: int, bits: int | None, restores: int, *, nudged: bool = False) -> Trainer:
    """A model trained with all batches, saved and restored between them."""
    batches = data.batches
    torch.manual_seed(seed)
    order = torch.cat([torch.randperm(len(batches)) for _ in range(data.epochs)]).tolist()
    stops = [round(len(order) * (n + 1) / (restores + 1)) for n in range(restores)]
    with tempfile.TemporaryDirectory() as folder:
        for first, last in itertools.pairwise([0, *stops, len(order)]):
            trainer = Trainer(data.log.rows, data.log.numbers)
            if nudged:
                row = int(batches[0].categories[:, 0].mode().values)  # one that is looked up
                one = trainer.model.tables[0].weight.data[row : row + 1, :1]
                one.copy_(torch.nextafter(one, torch.tensor(2.0)))
            model, optimizers = trainer.model, trainer.optimizers
            with Checkpointer(folder, model, optimizers, bits=bits, durable=False) as checkpointer:
                checkpointer.restore(missing_ok=True)
                assert checkpointer.step == first
                for number in order[first:last]:
                    trainer.train(batches[number])
                if last in stops:
                    checkpointer.save(last)
    return trainer


def scores(logits: Tensor, clicks: Tensor) -> dict[str, float]:
    """Mean loss, and area under the ROC curve."""
    loss = nn.functional.binary_cross_entropy_with_logits(logits.double(), clicks.double())
    return {"loss": loss.item(), "auc": float(roc_auc_score(clicks.numpy(), logits.numpy()))}


def held_out_scores(trainer: Trainer, held_out: Sequence[Batch]) -> dict[str, float]:
    """Of a model, on batches that it was not trained with."""
    with torch.no_grad():
        logits = torch.cat([trainer.model(batch.numbers, batch.categories) for batch in held_out])
    return scores(logits, torch.cat([batch.clicks for batch in held_out]))


def tensors_of(trainer: Trainer) -> Iterator[Tensor]:
    """All that was trained: the model's tensors and the optimizers'."""
    yield from trainer.model.state_dict().values()
    for optimizer in trainer.optimizers.values():
        for _, state in sorted(optimizer.state_dict()["state"].items()):
            yield from (state[name] for name in sorted(state))


def outcomes(plan: Plan, seed: int) -> list[Outcome]:
    """All trainings of one seed."""
    torch.set_num_threads(1)
    data = Data.read(plan)
    found = []

    def outcome(trainer: Trainer, bits: int | None, restores: int, *, nudged: bool = False) -> Outcome:
        how = {"seed": seed, "bits": bits, "restores": restores, "nudged": nudged}
        found.append(Outcome(**how, **held_out_scores(trainer, data.held_out)))
        told(f"seed {seed}, {named(bits)}, {restores} restores: {found[-1].loss:.6f}, {found[-1].auc:.6f}")
        return found[-1]

    uninterrupted = trained(data, seed, None, 0)
    alone = outcome(uninterrupted, None, 0)
    outcome(trained(data, seed, None, 0, nudged=True), None, 0, nudged=True)
    for bits, restores in itertools.product(WIDTHS, RESTORES):
        trainer = trained(data, seed, bits, restores)
        ended = outcome(trainer, bits, restores)
        if bits is None:
            pairs = list(zip(tensors_of(trainer), tensors_of(uninterrupted), strict=True))
            assert len(pairs) > len(data.log.rows)
            assert all(torch.equal(one, other) for one, other in pairs), f"raw, {restores} restores: other bits"
            assert (ended.loss, ended.auc) == (alone.loss, alone.auc)
    return found


# What it means --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worse:
    """By how many percent a score is worse than uninterrupted: mean over seeds, and 95 % interval of that mean."""

    mean: float
    margin: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.margin:.4f}"

    @property
    def verdict(self) -> str:
        """Whether it is within the threshold of the paper."""
        if self.mean + self.margin <= THRESHOLD:
            return "confirmed"
        return "exceeded" if self.mean - self.margin > THRESHOLD else "undecided: noise"


def worse(runs: Sequence[Outcome], score: str, bits: int | None, restores: int, *, nudged: bool = False) -> Worse:
    """The difference that restores make, seed by seed."""
    sign = 1 if score == "loss" else -1
    alone = {run.seed: getattr(run, score) for run in runs if not (run.restores or run.nudged)}
    chosen = [run for run in runs if (run.bits, run.restores, run.nudged) == (bits, restores, nudged)]
    differences = [100 * sign * (getattr(run, score) / alone[run.seed] - 1) for run in chosen]
    return Worse(float(np.mean(differences)), margin(differences))


def margin(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean, by Student's distribution."""
    if len(values) < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def spread(runs: Sequence[Outcome], score: str) -> float:
    """The standard deviation between uninterrupted trainings of several seeds, in percent of their mean."""
    values = [getattr(run, score) for run in runs if not (run.restores or run.nudged)]
    return float(100 * np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else float("nan")


def named(bits: int | None) -> str:
    return "raw" if bits is None else f"{bits} bits"


# The page -------------------------------------------------------------------------------------------------------------


def page(results: Mapping[str, Any], runs: Sequence[Outcome]) -> str:
    """The results as tables."""
    where, seeds = results["machine"], sorted({run.seed for run in runs})
    alone = [run for run in runs if not (run.restores or run.nudged)]
    text = [
        f"{where['date']}, {where['cores']} cores of {where['cpu']}, torch {where['packages']['torch']}, one thread",
        "",
        (
            f"{results['trained_samples']:,} samples of the log {results['log']} in batches of "
            f"{results['batch_size']:,}, epochs: {results['epochs']}; {results['held_out_samples']:,} held out; "
            f"tables of {', '.join(f'{n:,}' for n in results['rows'])} rows of {COLUMNS}; {len(seeds)} seeds. "
            "What is learned:"
        ),
        "",
        measure.table(
            ["held out", "loss", "AUC"],
            [
                *((name, f"{of['loss']:.4f}", f"{of['auc']:.4f}") for name, of in results["beside"].items()),
                *((f"seed {run.seed}, uninterrupted", f"{run.loss:.5f}", f"{run.auc:.5f}") for run in alone),
                ("seeds differ by (standard deviation)", *(f"{spread(runs, s):.3f} %" for s in SCORES)),
            ],
        ),
    ]
    for score, name in SCORES.items():
        nudged = worse(runs, score, None, 0, nudged=True)
        text += [
            "",
            f"{name} worse than uninterrupted, in % (mean of paired differences, and its 95 % interval), by restores:",
            "",
            measure.table(
                ["stored", *map(str, RESTORES)],
                [[named(bits), *(worse(runs, score, bits, n) for n in RESTORES)] for bits in WIDTHS],
            ),
            "",
            f"One weight off by its last bit at the start, without a restore: {nudged} %.",
        ]
    text += [
        "",
        f"Check-N-Run's widths, against its threshold of {THRESHOLD} %:",
        "",
        measure.table(["restores", "bits", "loss worse, %", "", "AUC worse, %", ""], verdicts(runs)),
    ]
    return "\n".join(text)


def verdicts(runs: Sequence[Outcome]) -> Iterator[list[object]]:
    """One row for each recommendation; and one for 8 bits, which it recommends beyond 20 restores."""
    for restores, bits in [*RECOMMENDED.items(), (max(RESTORES), 8)]:
        found = [worse(runs, score, bits, restores) for score in SCORES]
        yield [restores, bits, *(cell for of in found for cell in (of, of.verdict))]


def draw(runs: Sequence[Outcome], path: Path) -> None:
    """The differences by restores, a line for each width."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "checkrun"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(13, 4.2), constrained_layout=True)
    places = np.arange(len(RESTORES))
    for panel, (score, name) in zip(panels, SCORES.items(), strict=True):
        noise = spread(runs, score)
        panel.axhspan(-noise, noise, color="0.93", label="seeds differ (1 standard deviation)")
        panel.axhline(THRESHOLD, color="k", ls="--", lw=1, label=f"{THRESHOLD} %")
        for number, bits in enumerate(WIDTHS):
            found = [worse(runs, score, bits, restores) for restores in RESTORES]
            bars = [of.margin for of in found]
            panel.errorbar(
                places + 0.06 * (number - 2),
                [of.mean for of in found],
                bars,
                fmt="o-",
                ms=4,
                capsize=2,
                label=named(bits),
            )
        panel.set_yscale("symlog", linthresh=THRESHOLD)
        panel.set_xticks(places, map(str, RESTORES))
        panel.set(title=f"{name}, held out", xlabel="restores", ylabel="worse than uninterrupted, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def told(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Train, show, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="a file of Criteo or MovieLens instead of the generated log")
    parser.add_argument(
        "--batches", type=int, help=f"of the log, one of {HELD_OUT} held out: {GENERATED} if generated, else all"
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1, help="seeds trained at a time")
    parser.add_argument("--quick", action="store_true", help="two seeds, few batches, nothing is kept: does it run?")
    parser.add_argument("--no-results", action="store_true", help="only print")
    options = parser.parse_args()
    count, seeds = (60, 2) if options.quick else (options.batches, options.seeds)
    plan = Plan(path=options.log, batches=count, batch_size=options.batch_size, epochs=options.epochs)
    data = Data.read(plan)
    results = {
        "machine": measure.machine(["checkrun-format", "torch", "numpy", "scikit-learn"]),
        "log": "generated" if options.log is None else options.log.name,
        "batch_size": plan.batch_size,
        "epochs": plan.epochs,
        "rows": data.log.rows,
        "trained_samples": sum(len(batch.clicks) for batch in data.batches),
        "held_out_samples": sum(len(batch.clicks) for batch in data.held_out),
        "beside": data.beside(),
    }
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        by_seed = pool.map(partial(outcomes, plan), range(seeds))
        runs = [run for found in by_seed for run in found]
    text = page(results, runs)
    print(text)
    if not (options.quick or options.no_results):
        name = "bench_accuracy" if plan.path is None else f"bench_accuracy-{plan.path.stem}"
        measure.keep(name, results | {"runs": [asdict(run) for run in runs]}, text)
        draw(runs, measure.RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main()
