"""What ranks do with a `RankSaver`; `test_rank_saver.py` says what must come of it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

import checkrun_format as crf
from checkrun_format.torch.distributed import RankSaver, Shard
from checkrun_format.torch.distributed.saver import row_slice
from tests.integration.ranks import Rank, main

ROWS, COLUMNS = 10, 4


def whole(rows: int = ROWS, add: float = 0.0) -> torch.Tensor:
    return torch.arange(float(rows * COLUMNS)).reshape(rows, COLUMNS) + add


def shards_of(values: torch.Tensor, low: int, high: int, table: str = "user") -> list[Shard]:
    """Two fields of a range of rows."""
    of = len(values)
    weight = Shard(
        table=table, field="weight", rows=(low, high), columns=(0, COLUMNS), of=of, width=COLUMNS, dtype="float32",
        values=values[low:high],
    )  # fmt: skip
    total = Shard(
        table=table, field="sum", rows=(low, high), columns=None, of=of, width=None, dtype="float32",
        values=values[low:high, 0],
    )  # fmt: skip
    return [weight, total]


def span(rank: Rank, rows: int = ROWS) -> tuple[int, int]:
    return rows * rank.number // rank.world, rows * (rank.number + 1) // rank.world


def opened(rank: Rank, **options: Any) -> crf.Run:
    """The run: rank 0 writes."""
    path = rank.folder / "run"
    if rank.number == 0:
        return crf.open_run(path, mode="a", policy="consecutive", **options)
    while not (path / "zarr.json").exists():
        time.sleep(0.01)
    return crf.open_run(path)


def read(rank: Rank, table: str = "user") -> dict[str, np.ndarray[Any, Any]]:
    found: dict[str, np.ndarray[Any, Any]] = crf.open_run(rank.folder / "run").latest().table(table).read()
    return found


def outcome(act: Callable[[], Any]) -> str:
    """What came of it."""
    try:
        act()
    except (crf.CheckrunError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def rows(rank: Rank) -> dict[str, Any]:
    """Each rank stores its own rows in its own blocks; rank 0 commits."""
    saver = RankSaver(opened(rank))
    low, high = span(rank)
    dense = {"top": torch.ones(3, dtype=torch.bfloat16) * (rank.number + 1)}
    dense |= {f"own-{rank.number}": torch.tensor([rank.number])}
    values = whole()
    first = saver.save(
        shards_of(values, low, high), {"user": crf.ALL}, tensors=dense, step=7, extra={"of": rank.number},
        blobs={f"b{rank.number}": b"x"},
    )  # fmt: skip
    values[low] += 1
    second = saver.save(shards_of(values, low, high), {"user": np.array([low])}, tensors=dense, step=8)
    files = sorted(p.name for p in (rank.folder / "run/00000001" / first.commit.attempt).iterdir())
    return {
        "numbers": [first.sequence, second.sequence, second.parent],
        "blocks": [name for name in files if name.startswith("block")],
        "stored": second.table("user").stored_rows,
        "right": bool((read(rank)["weight"][low] == values[low].numpy()).all()),
        "top": first.tensor("top").astype("float32").tolist(),
        "own": [first.tensor(f"own-{n}").tolist() for n in range(rank.world)],
        "blobs": first.blobs,
        "extra": first.extra,
        "step": second.step,
    }


def replicas(rank: Rank) -> dict[str, Any]:
    """All ranks hold all rows, each saw other rows change, and stores a range of them."""
    saver = RankSaver(opened(rank))
    values = whole()

    def mine() -> list[Shard]:
        return shards_of(values, *row_slice(ROWS, rank.number, rank.world))

    saver.save(mine(), {"user": crf.ALL})
    values[[1, 4, 8]] += 100
    told = {0: [8], 1: [1, 8], 2: [], 3: [4]}[rank.number]
    second = saver.save(mine(), {"user": np.array(told, np.int64)})
    changes = [int(row) for change in second.changes_since(1) for row in change.rows]
    return {"changes": changes, "right": bool((read(rank)["weight"] == values.numpy()).all())}


def empty(rank: Rank) -> dict[str, Any]:
    """More ranks than rows; a rank that holds nothing; a table without rows."""
    saver = RankSaver(opened(rank))
    few, none = whole(2), whole(0)
    found = []
    for told in (crf.ALL, np.zeros(0, np.int64)):
        held = shards_of(few, *span(rank, 2), table="few")
        no_rows = shards_of(none, 0, 0, table="none") if rank.number < 2 else []
        done = saver.save(held + no_rows, {"few": told, "none": told})
        found.append([done.table(name).storage for name in ("few", "none")])
    return {"storage": found, "few": read(rank, "few")["weight"].tolist(), "none": len(read(rank, "none")["weight"])}


def raises(rank: Rank) -> dict[str, Any]:
    """A rank is refused, or fails while it stores; all others name it; the next save has all rows."""
    saver = RankSaver(opened(rank), timeout=dt.timedelta(seconds=20))
    low, high = span(rank)
    values = whole()
    saver.save(shards_of(values, low, high), {"user": crf.ALL})
    values[low] += 5
    wrong = shards_of(values, low, high)
    if rank.number == 2:
        wrong = [dataclasses.replace(wrong[0], rows=(low, high + 1))]
    seen = [outcome(lambda: saver.save(wrong, {"user": np.array([low])}))]
    dist.barrier()  # as a trainer has collectives: without one, a slow rank would take part in the next save instead

    def fail() -> None:
        if rank.number == 1:
            raise OSError("no space left")

    seen.append(outcome(lambda: saver.begin(shards_of(values, low, high), {}).finish(fail)))
    dist.barrier()
    seen.append(outcome(lambda: saver.save(shards_of(values, low, high), {}, step=-1 if rank.number == 0 else 3)))
    dist.barrier()
    seen.append(outcome(lambda: saver.save(shards_of(values, low, high), {}, step=8 if rank.number == 3 else 7)))
    committed = [c.sequence for c in crf.open_run(rank.folder / "run").log()]
    dist.barrier()
    last = saver.save(shards_of(values, low, high), {})
    dist.barrier()
    right = read(rank)["weight"][low:high] == values[low:high].numpy()
    return {"seen": seen, "committed": committed, "stored": last.table("user").stored_rows, "right": bool(right.all())}


def background(rank: Rank) -> dict[str, Any]:
    """A save goes on in a thread while the trainer does collectives and changes every tensor."""
    saver = RankSaver(opened(rank))
    low, high = span(rank)
    values, dense = whole(), {"top": torch.zeros(2)}
    total = torch.zeros(1)
    for step in range(3):
        told = crf.ALL if step == 0 else np.array([low])
        save = saver.begin(shards_of(values, low, high), {"user": told}, tensors=dense, step=step, copy=True)
        thread = threading.Thread(target=save.finish)
        thread.start()
        values[low] += 1
        dense["top"] += 1
        for _ in range(20):
            dist.all_reduce(total.fill_(1))
        thread.join()
    latest = crf.open_run(rank.folder / "run").latest()
    found = latest.table("user").read()["weight"]
    lows = [ROWS * number // rank.world for number in range(rank.world)]
    return {
        "sum": float(total),
        "first": [float(found[row, 0] - COLUMNS * row) for row in lows],
        "top": latest.tensor("top").tolist(),
        "step": latest.step,
    }


def absent(rank: Rank) -> dict[str, Any]:
    """A rank leaves out a save: the others name it after the timeout; it takes part in the next."""
    saver = RankSaver(opened(rank), timeout=dt.timedelta(seconds=5))
    low, high = span(rank)
    values = whole()
    saver.save(shards_of(values, low, high), {"user": crf.ALL})
    values[low] += 5
    seen = "absent"
    if rank.number != 2:
        seen = outcome(lambda: saver.save(shards_of(values, low, high), {"user": np.array([low])}))
    dist.barrier()
    last = saver.save(shards_of(values, low, high), {"user": np.array([low])} if rank.number == 2 else {})
    return {"seen": seen, "number": last.sequence, "stored": last.table("user").stored_rows}


def killed(rank: Rank) -> dict[str, Any]:
    """Rank 2 is killed in the middle of a save; then rank 0, which keeps the store, too."""
    saver = RankSaver(opened(rank), timeout=dt.timedelta(seconds=5))
    low, high = span(rank)
    values = whole()
    saver.save(shards_of(values, low, high), {"user": crf.ALL})

    def die() -> None:
        if rank.number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    save = saver.begin(shards_of(values, low, high), {"user": crf.ALL}, copy=True)
    seen = [outcome(lambda: save.finish(die))]
    committed = [c.sequence for c in crf.open_run(rank.folder / "run").log()]
    if rank.number == 0:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    seen.append(outcome(lambda: saver.save(shards_of(values, low, high), {})))
    return {"seen": seen, "committed": committed}


SCENARIOS = {f.__name__: f for f in (rows, replicas, empty, raises, background, absent, killed)}

if __name__ == "__main__":
    main(SCENARIOS)
