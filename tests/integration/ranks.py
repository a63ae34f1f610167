"""Several real processes of one torch.distributed group: each runs all scenarios of a file and writes down what it saw.

Starting torch takes seconds, so one group serves all tests of a file. A scenario takes a `Rank` and returns JSON; it is
called on every rank, in the order of the file, with a barrier after each.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

KILLS = {"killed"}
"""Scenarios that leave no group behind: the last of their file."""

Told = dict[str, list[Any]]
"""Scenario to what each rank returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Where a scenario runs."""

    number: int
    world: int
    folder: Path
    """The same for all ranks, of this scenario alone."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(file: str, folder: Path, world: int, names: str = "") -> list[subprocess.Popen[str]]:
    """Start a group."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, ROOT / "tests/integration" / file, folder, str(rank), str(world), port, names],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
        )
        for rank in range(world)
    ]  # fmt: skip


def collect(
    processes: list[subprocess.Popen[str]], folder: Path, timeout: float = 220, killed: Collection[int] = ()
) -> Told:
    """Wait for a group; scenario to what each rank returned that was not to be killed.

    Raises AssertionError with all that the processes printed if one failed.
    """
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.poll() not in (None, 0, -9) for process in processes):
            end = min(end, time.monotonic() + 3)
        time.sleep(0.05)
    for process in processes:
        process.kill()
    printed = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [-9 if rank in killed else 0 for rank in range(len(codes))], f"{codes}\n" + "\n".join(printed)
    alive = [rank for rank in range(len(processes)) if rank not in killed]
    told = [json.loads((folder / f"told-{rank}.json").read_text("utf-8")) for rank in alive]
    return {name: [one[name] for one in told] for name in told[0]}


def run_group(file: str, folder: Path, world: int, names: str = "") -> Told:
    """All scenarios of a file, in so many processes."""
    return collect(start(file, folder, world, names), folder)


def main(scenarios: Mapping[str, Callable[[Rank], Any]], *, quiet: bool = False) -> None:
    """What each process does; `quiet` where other packages warn of themselves."""
    from torch import distributed as dist

    warnings.simplefilter("ignore" if quiet else "error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*(barrier|_get_pg_default_device|TORCH_DISTRIBUTED).*")
    folder, number, world, port, names = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=int(number),
        world_size=int(world),
        timeout=dt.timedelta(seconds=60),
    )
    told = {}
    for name, scenario in scenarios.items():
        if names and name not in names.split(","):
            continue
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        try:
            told[name] = scenario(Rank(number=int(number), world=int(world), folder=place))
        except BaseException:  # noqa: BLE001 - whatever it is, the process ends
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(3)  # the others notice at their next exchange
        (Path(folder) / f"told-{number}.json").write_text(json.dumps(told), "utf-8")
        if name in KILLS:
            sys.stdout.flush()
            os._exit(0)  # the group is no more
        dist.barrier()
    dist.destroy_process_group()
