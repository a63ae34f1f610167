"""Files of tensors of every kind: what is read and written, and what is refused, with file and tensor named."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

import checkrun_format as crf
from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError, NotFoundError, StorageError
from checkrun_format.interchange import KINDS, kinds
from checkrun_format.interchange.contents import Array, Entry

ODD = "ads\n🚀/表.weight"
LABEL = json.dumps({"step": 7})


def entry(name: str, *pieces: Array) -> Entry:
    shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:]) if pieces[0].ndim else ()
    return Entry(name=name, dtype=dtypes.name_of(pieces[0].dtype), shape=shape, pieces=lambda: pieces)


def every_dtype() -> dict[str, Array]:
    """Arrays of every bit pattern, more or less."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for name in dtypes.STORED:
        dtype = dtypes.logical(name)
        raw = rng.integers(0, 256, 12 * dtype.itemsize).astype(np.uint8)
        arrays[name] = (raw & 1 if name == "bool" else raw).view(dtype).reshape(4, 3)
    return arrays


def read(path: Path, kind: str | None = None) -> dict[str, Array]:
    with kinds.opened(path, kind) as contents:
        return {name: array.copy() for name, array in contents.arrays.items()}


def refused(path: Path, message: str, kind: str | None = None, error: type[Exception] = InvalidInputError) -> None:
    with pytest.raises(error, match=re.escape(message)) as raised, kinds.opened(path, kind):
        pass
    assert str(path.parent) in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_there_and_back(kind: str, tmp_path: Path) -> None:
    arrays = every_dtype()
    lacking = {"safetensors": ("complex128", "datetime64", "timedelta64"), "torch": ("datetime64", "timedelta64")}
    arrays = {name: array for name, array in arrays.items() if not name.startswith(lacking.get(kind, ("none",)))}
    arrays |= {ODD: np.arange(6.0).reshape(3, 2), "scalar": np.array(0.5), "none": np.zeros((0, 3), np.int8)}
    path = tmp_path / "file"
    entries = [
        entry(name, array[:1], array[1:]) if array.ndim else entry(name, array) for name, array in arrays.items()
    ]
    size = kinds.write(path, kind, entries, LABEL, overwrite=False)
    assert size == path.stat().st_size
    found = read(path, kind)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
    with kinds.opened(path, kind) as contents:
        assert json.loads(contents.label or "")["step"] == 7
        assert (contents.extra, contents.file_bytes) == (None, size)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_overwritten_and_a_failed_write_leaves_nothing(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    with pytest.raises(InvalidInputError, match="file exists already"):
        kinds.write(path, kind, [entry("a", np.ones(3))], LABEL, overwrite=False)
    assert path.read_bytes() == b"mine"

    def broken() -> Any:
        yield np.ones(2)
        raise crf.DamagedError("00000001/zarr.json", "gone")

    failing = Entry(name="a", dtype="float64", shape=(4,), pieces=broken)
    with pytest.raises(crf.DamagedError):
        kinds.write(path, kind, [failing], LABEL, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"mine"
    kinds.write(path, kind, [entry("a", np.ones(3))], LABEL, overwrite=True)
    assert read(path, kind)["a"].tolist() == [1, 1, 1]
    with pytest.raises(NotFoundError, match="no such folder"):
        kinds.write(tmp_path / "no" / "file", kind, [], LABEL, overwrite=False)
    with pytest.raises(InvalidInputError, match="is a folder"):
        kinds.write(tmp_path, kind, [], LABEL, overwrite=True)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_none(kind: str, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole", tmp_path / "file"
    kinds.write(whole, kind, [entry("a", np.ones((1000, 2)))], LABEL, overwrite=False)
    data = whole.read_bytes()
    for wrong in (b"", b"garbage" * 100, data[: len(data) // 2], data[:-1]):
        path.write_bytes(wrong)
        refused(path, f"{path}: not a", kind)
    refused(tmp_path / "missing", "missing: no such file", kind, NotFoundError)
    refused(tmp_path, f"{tmp_path} is a folder", kind)
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file", kind)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.touch(mode=0)
    refused(path, "Permission denied", error=StorageError)


def test_the_suffix_tells_the_kind() -> None:
    found = {suffix: kinds.kind_of(Path(f"a{suffix}")) for suffix in (".safetensors", ".pt", ".BIN", ".ckpt", ".npz")}
    assert list(found.values()) == ["safetensors", "torch", "torch", "torch", "npz"]
    assert kinds.kind_of(Path("a.pt"), "npz") == "npz"
    with pytest.raises(InvalidInputError, match=r"a\.h5: the suffix does not tell"):
        kinds.kind_of(Path("a.h5"))
    with pytest.raises(InvalidInputError, match="unknown kind of file 'hdf5'"):
        kinds.kind_of(Path("a.npz"), "hdf5")


class TestSafetensors:
    def write(self, path: Path, header: object, values: bytes) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + values)
        return path

    def test_files_of_the_package(self, tmp_path: Path) -> None:
        tensors = {
            "b": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
            "f": torch.ones(3, dtype=torch.float8_e4m3fn),
            "x": torch.tensor([True, False]),
        }
        safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"format": "pt", "author": "me"})
        with kinds.opened(tmp_path / "a.safetensors") as contents:
            assert contents.extra == {"metadata": {"author": "me"}}
            assert {name: array.dtype.name for name, array in contents.arrays.items()} == {
                "b": "bfloat16",
                "f": "float8_e4m3fn",
                "x": "bool",
            }
            assert contents.arrays["b"].astype(int).tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_the_package_reads_what_is_written(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        arrays = [entry("half", np.ones(3, np.float16)), entry("b", np.ones((2, 2), ml_dtypes.bfloat16))]
        kinds.write(path, "safetensors", [entry("one", np.ones(1, np.int8)), *arrays], LABEL, overwrite=False)
        found = safetensors.torch.load_file(path)
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            "one": torch.int8,
            "half": torch.float16,
            "b": torch.bfloat16,
        }
        assert found["b"].tolist() == [[1, 1], [1, 1]]

    def test_values_at_odd_places(self, tmp_path: Path) -> None:
        header = {
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F64", "shape": [2], "data_offsets": [3, 19]},
        }
        text = json.dumps(header).encode()
        text += b" " * (1 - len(text) % 2)
        path = self.write(tmp_path / "a.safetensors", text, b"abc" + np.array([0.5, -2]).tobytes())
        assert read(path)["b"].tolist() == [0.5, -2]

    def test_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        one = b'"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
        refused(self.write(path, b"{" + one + b"," + one + b"}", bytes(4)), "the name 'x' is there twice")
        four_bits = {"x": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}
        refused(self.write(path, four_bits, bytes(8)), "tensor 'x': dtype F4 cannot be stored")
        refused(self.write(path, {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "not a safe")
        many = {"x": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}
        refused(self.write(path, many, bytes(4)), "tensor 'x': 65 dimensions; at most 64 can be stored")

    @pytest.mark.parametrize(
        ("name", "array", "message"),
        [("z", np.ones(2, np.complex128), "'z': a safetensors file cannot hold complex128"),
         ("__metadata__", np.ones(2), "cannot hold a tensor of the name '__metadata__'")],
    )  # fmt: skip
    def test_what_it_cannot_hold(self, name: str, array: Array, message: str, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match=message):
            kinds.write(tmp_path / "a", "safetensors", [entry(name, array)], LABEL, overwrite=False)
        assert list(tmp_path.iterdir()) == []


class TestNpz:
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_files_of_numpy(self, save: Callable[..., None], tmp_path: Path) -> None:
        arrays = {
            "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
            "big": np.arange(5, dtype=">i4"),
            "scalar": np.array(3),
            "none": np.zeros((0, 2)),
            "a/b": np.array([True, False]),
        }
        save(tmp_path / "a.npz", **arrays)
        found = read(tmp_path / "a.npz")
        assert {name: array.tolist() for name, array in found.items()} == {
            name: array.tolist() for name, array in arrays.items()
        }

    def test_numpy_reads_what_is_written(self, tmp_path: Path) -> None:
        pairs = [entry("b", np.ones(3, ml_dtypes.bfloat16)), entry("x", np.arange(4.0)[:2], np.arange(4.0)[2:])]
        kinds.write(tmp_path / "a.npz", "npz", pairs, LABEL, overwrite=False)
        with np.load(tmp_path / "a.npz") as file:
            assert set(file) == {"b", "x", "__checkrun__"}
            assert file["x"].tolist() == [0, 1, 2, 3]
            assert file["b"].view(ml_dtypes.bfloat16).tolist() == [1, 1, 1]
            assert json.loads(file["__checkrun__"].tobytes()) == {"step": 7, "dtypes": {"b": "bfloat16"}}

    def test_objects_are_never_unpickled(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", fine=np.ones(2), evil=np.array([print, None], object))
        refused(tmp_path / "a.npz", "tensor 'evil' holds Python objects")

    def test_an_altered_byte(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npz"
        for save in (np.savez, np.savez_compressed):
            save(path, x=np.zeros(5000))
            data = bytearray(path.read_bytes())
            with zipfile.ZipFile(path) as archive:
                size = archive.infolist()[0].compress_size
            data[60 + size // 2] ^= 1
            path.write_bytes(data)
            refused(path, "member 'x.npy' is damaged")

    def test_no_room_to_unpack(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        np.savez_compressed(tmp_path / "a.npz", x=np.zeros(5000))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9000))
        message = "member 'x.npy' unpacks to 40128 bytes, and "
        refused(tmp_path / "a.npz", message, error=StorageError)

    @pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_damage_that_a_codec_notices(self, method: int, tmp_path: Path) -> None:
        path = tmp_path / "a.npz"
        with zipfile.ZipFile(path, "w", method) as archive, archive.open("x.npy", "w") as member:
            np.lib.format.write_array(member, np.random.default_rng(0).random(5000))
        data = bytearray(path.read_bytes())
        data[40:80] = bytes(range(255, 215, -1))
        path.write_bytes(data)
        refused(path, "member 'x.npy' is damaged")

    @pytest.mark.parametrize(
        "label", [b"hello", b"\xff", b"[]", b'{"dtypes":5}', b'{"dtypes":{"x":["y"]}}', b"[" * 10**5]
    )
    def test_a_label_that_is_none(self, label: bytes, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=np.ones(2), __checkrun__=np.frombuffer(label, np.uint8))
        refused(tmp_path / "a.npz", "array '__checkrun__' is not what `checkrun export` writes")

    def test_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npz"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")
        refused(path, "member 'readme.txt' is no array")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", b"hello, I am no array at all")
        refused(path, "member 'x.npy' is no array")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", b"1")
            with pytest.warns(UserWarning, match="Duplicate name"):
                archive.writestr("x.npy", b"2")
        refused(path, "the name 'x.npy' is there twice")
        np.savez(tmp_path / "b.npz", x=np.ones(9))
        with zipfile.ZipFile(tmp_path / "b.npz") as whole, zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", whole.read("x.npy")[:-8])
        refused(path, "member 'x.npy' has 192 bytes where its header wants 200")
        for name in ("a\0b", "__checkrun__"):
            with pytest.raises(InvalidInputError, match="cannot hold an array of the name"):
                kinds.write(tmp_path / "c.npz", "npz", [entry(name, np.ones(1))], LABEL, overwrite=False)


class TestStateDict:
    def test_nested_tied_and_odd(self, tmp_path: Path) -> None:
        weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
        loaded = {
            "model": {"emb.weight": weight, "head.weight": weight, "half": torch.ones(2, dtype=torch.bfloat16)},
            "optimizer": {"state": {0: {"step": 3, "exp_avg": weight.detach().T}}, "param_groups": [{"lr": 0.5}]},
            "list": [torch.ones(1), "text"],
            "best": float("inf"),
            "rates": [0.5, float("-inf")],
            "empty": {},
        }
        torch.save(loaded, tmp_path / "a.pt")
        with kinds.opened(tmp_path / "a.pt") as contents:
            assert contents.extra == {
                "optimizer.state.0.step": 3,
                "optimizer.param_groups": [{"lr": 0.5}],
                "list.1": "text",
                "rates.0": 0.5,
                "empty": {},
            }
            arrays = {name: array.astype(float).tolist() for name, array in contents.arrays.items()}
            half = contents.arrays["model.half"]
        assert arrays == {
            "model.emb.weight": [[0, 1], [2, 3], [4, 5]],
            "model.head.weight": [[0, 1], [2, 3], [4, 5]],
            "model.half": [1, 1],
            "optimizer.state.0.exp_avg": [[0, 2, 4], [1, 3, 5]],
            "list.0": [1],
            "best": float("inf"),
            "rates.1": float("-inf"),
        }
        assert half.dtype == ml_dtypes.bfloat16

    def test_torch_reads_what_is_written(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        layer = torch.nn.Linear(2, 3)
        pairs = [entry(name, tensor.detach().numpy()) for name, tensor in layer.state_dict().items()]
        kinds.write(path, "torch", [*pairs], LABEL, overwrite=False)
        other = torch.nn.Linear(2, 3)
        other.load_state_dict(torch.load(path, weights_only=True))
        assert torch.equal(other.weight, layer.weight)

    def test_what_it_cannot_hold(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match="tensor 't': a state dict cannot hold datetime64_s; npz can"):
            kinds.write(tmp_path / "a.pt", "torch", [entry("t", np.zeros(2, "M8[s]"))], LABEL, overwrite=False)
        assert list(tmp_path.iterdir()) == []

    def test_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        torch.save({"a": Path("x")}, path)
        refused(
            path, "other objects than tensors and plain values (Unsupported global: GLOBAL pathlib.PosixPath): save"
        )
        path.write_bytes(b"hello")
        refused(path, "not a state dict that torch.load(weights_only=True, mmap=True) reads")
        endless: dict[str, Any] = {"a": torch.ones(2)}
        endless["b"] = endless
        torch.save(endless, path)
        refused(path, "what it holds is nested too deeply, or in itself")
        torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
        refused(path, "mmap can only be used with files saved with")
        torch.save(torch.ones(2), path)
        refused(path, "it holds a Tensor")
        torch.save({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}, path)
        refused(path, "the name 'a.b' is there twice")
        torch.save({"s": torch.ones(2, 2).to_sparse()}, path)
        refused(path, "tensor 's': a torch.sparse_coo tensor")
        torch.save({"q": torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, path)
        refused(path, "tensor 'q': torch dtype float4_e2m1fn_x2 cannot be stored")


class TestIndex:
    def index(self, folder: Path, **weight_map: Any) -> Path:
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
        return path

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        save_file({"a": np.ones(2), "b": np.zeros(3)}, tmp_path / "1.safetensors")
        torch.save({"c": torch.ones(4)}, tmp_path / "2.bin")
        return tmp_path

    def test_all_files_as_one(self, folder: Path) -> None:
        path = self.index(folder, c="2.bin", a="1.safetensors", b="1.safetensors")
        with kinds.opened(path) as contents:
            assert {name: array.tolist() for name, array in contents.arrays.items()} == {
                "c": [1, 1, 1, 1],
                "a": [1, 1],
                "b": [0, 0, 0],
            }
            assert contents.file_bytes == sum(file.stat().st_size for file in folder.iterdir())

    def test_refused(self, folder: Path) -> None:
        refused(self.index(folder, a="1.safetensors"), "file '1.safetensors' is not said to hold tensor 'b'")
        wrong = {"a": "1.safetensors", "b": "1.safetensors", "z": "1.safetensors"}
        refused(self.index(folder, **wrong), "file '1.safetensors' lacks tensor 'z'")
        for outside in ("../1.safetensors", "/etc/passwd", ""):
            refused(self.index(folder, a=outside), "is not beside it or below")
        refused(self.index(folder, a=1), 'it has no "weight_map"')
        with (
            pytest.raises(NotFoundError, match=r"3\.safetensors: no such file"),
            kinds.opened(self.index(folder, a="3.safetensors")),
        ):
            pass
        path = folder / "model.json"
        path.write_text('{"weight_map": {"a": "x", "a": "y"}}')
        refused(path, "the name 'a' is there twice")
        path.write_text("[")
        refused(path, "not JSON")
        path.write_text('{"weight_map": {"a": "\\ud800.safetensors"}}')
        refused(path, "surrogates not allowed")
        kinds.write(folder / "3.npz", "npz", [entry("a", np.ones(2))], LABEL, overwrite=False)
        refused(self.index(folder, a="3.npz"), "was written by `checkrun export`")


def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")

    monkeypatch.setattr("checkrun_format.interchange.safetensors._check", missing)
    (tmp_path / "a.safetensors").write_bytes(b"")
    refused(
        tmp_path / "a.safetensors",
        'safetensors files need the package safetensors: pip install "checkrun-format[safetensors]"',
    )
