"""What is read of one checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import checkrun_format as crf
from checkrun_format import reader
from checkrun_format.movement import engine, prepare
from checkrun_format.packing import aligned_empty
from checkrun_format.quantize import engine as quantize_engine
from checkrun_format.testing import MemoryStore


def test_the_caller_owns_what_is_read(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    run.save(crf.State(tables={"t": crf.Table({"w": np.arange(4, dtype=np.float32)})}, tensors={"x": np.zeros(2)}))
    view = run.latest().table("t")
    view.read()["w"][:] = 9
    run.latest().tensor("x")[:] = 9
    assert view.read()["w"].tolist() == [0, 1, 2, 3]
    assert run.latest().tensor("x").tolist() == [0, 0]


@pytest.mark.parametrize("bits", [None, 1, 2, 3, 4, 5, 6, 7, 8])
def test_large_tables_are_resolved_to_the_bits_of_numpy(bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of whole cache lines, which kernels write past the cache: a chain, in slices that cut chunks and gaps."""
    rng = np.random.default_rng(bits or 0)
    weight = rng.standard_normal((9000, 32), np.float32)
    run = crf.open_run(MemoryStore(), "a", policy="consecutive", bits=bits, chunk_bytes=30_000)
    run.save(crf.State(tables={"t": crf.Table({"weight": weight})}))
    for share in (0.3, 0.02, 0.9):
        changed = np.flatnonzero(rng.random(9000) < share)
        weight[changed] = rng.standard_normal((changed.size, 32), np.float32)
        weight[changed[0]] = np.nan  # an exact row
        run.save(crf.State(tables={"t": crf.Table({"weight": weight}, changed=changed)}))
    ids = np.flatnonzero(rng.random(9000) < 0.95)
    with monkeypatch.context() as plainly:
        plainly.setattr(quantize_engine, "kernels", lambda _: None)
        wanted = run.latest().table("t").read()["weight"]
    if bits is None:
        assert wanted.tobytes() == weight.tobytes()
    prepare(1 << 40)
    monkeypatch.setattr(engine, "_FROM_ROWS", 1)
    monkeypatch.setattr(reader, "_READ_ROWS", 700)
    for offset, width in ((0, 32), (4, 32), (0, 48), (16, 64)):
        memory = aligned_empty((9000 * width + 16,), np.dtype(np.float32))
        memory[:] = -1
        whole = memory[offset : offset + 9000 * width].reshape(9000, width)
        run.latest().load(out=crf.State(tables={"t": crf.Table({"weight": whole[:, :32]})}))
        assert whole[:, :32].tobytes() == wanted.tobytes()
        assert (whole[:, 32:] == -1).all()
        assert (memory[:offset] == -1).all()
        assert (memory[offset + 9000 * width :] == -1).all()
    assert run.latest().table("t").take(ids)["weight"].tobytes() == wanted[ids].tobytes()
    part = run.latest().table("t").read(rows=slice(100, 8900), columns=slice(16, 32))["weight"]
    assert part.tobytes() == wanted[100:8900, 16:32].tobytes()
