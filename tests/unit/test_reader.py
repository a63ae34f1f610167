"""What is read of one checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import checkrun_format as crf


def test_the_caller_owns_what_is_read(tmp_path: Path) -> None:
    run = crf.open_run(tmp_path / "run", mode="a")
    run.save(crf.State(tables={"t": crf.Table({"w": np.arange(4, dtype=np.float32)})}, tensors={"x": np.zeros(2)}))
    view = run.latest().table("t")
    view.read()["w"][:] = 9
    run.latest().tensor("x")[:] = 9
    assert view.read()["w"].tolist() == [0, 1, 2, 3]
    assert run.latest().tensor("x").tolist() == [0, 0]
