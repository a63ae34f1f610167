"""Arrays of other libraries come in as views, and values go out into them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from checkrun_format import dlpack, dtypes
from checkrun_format.errors import InvalidInputError

Array = npt.NDArray[Any]
TORCH = {name: getattr(torch, name) for name in sorted(dtypes.STORED) if hasattr(torch, name)}


def tensor_of(name: str, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    """Any bits at all; of bool the two that it has."""
    size = dtypes.logical(name).itemsize * int(np.prod(shape))
    raw = np.random.default_rng(1).integers(0, 2 if name == "bool" else 256, size, dtype=np.uint8)
    return torch.from_numpy(raw).view(TORCH[name]).reshape(shape) if size else torch.empty(shape, dtype=TORCH[name])


def bits_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(value).tobytes()


class Exchange:
    """An array of a library that speaks DLPack and nothing else."""

    def __init__(self, array: Array, device: tuple[int, int] = (1, 0)) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class TestTorch:
    def test_knows_every_logical_dtype(self) -> None:
        times = {name for name in dtypes.STORED if name.startswith(("datetime64_", "timedelta64_"))}
        assert len(times) == 26 and set(TORCH) == set(dtypes.STORED) - times

    @pytest.mark.parametrize("name", TORCH)
    def test_every_dtype_comes_as_a_view_of_the_same_bits(self, name: str) -> None:
        """TYP-1."""
        tensor = tensor_of(name)
        array = dlpack.to_numpy(tensor, "x")
        assert array.dtype == dtypes.logical(name) and array.shape == (5, 3)
        assert bits_of(array) == bits_of(tensor)
        tensor.view(torch.uint8)[0, 0] ^= 1
        assert bits_of(array) == bits_of(tensor)

    @pytest.mark.parametrize("name", TORCH)
    @pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1, 1, 1)])
    def test_every_shape(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = tensor_of(name, shape)
        assert dlpack.to_numpy(tensor, "x").shape == shape
        assert bits_of(dlpack.to_numpy(tensor, "x")) == bits_of(tensor)

    @pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "float8_e5m2", "complex64"])
    def test_strides_do_not_matter(self, name: str) -> None:
        for tensor in (
            tensor_of(name).T,
            tensor_of(name)[::2],
            tensor_of(name)[:, 1],
            tensor_of(name)[:1].expand(4, 3),
        ):
            assert bits_of(dlpack.to_numpy(tensor, "x")) == bits_of(tensor)

    @pytest.mark.parametrize("name", TORCH)
    def test_what_is_written_reaches_the_tensor(self, name: str) -> None:
        tensor = torch.zeros((5, 3 * dtypes.logical(name).itemsize), dtype=torch.uint8).view(TORCH[name])
        values = dlpack.to_numpy(tensor_of(name), "x")
        dlpack.to_writable(tensor, "x")[...] = values
        assert bits_of(tensor) == bits_of(values)

    def test_a_parameter_is_read_and_written_without_its_gradient(self) -> None:
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        dlpack.on_host(dlpack.to_writable(parameter, "x"))[0, 1] = 7
        assert parameter.tolist() == [[0, 7], [0, 0]]
        assert dlpack.to_numpy(parameter, "x").tolist() == [[0, 7], [0, 0]]

    def test_lazy_conjugates_and_negatives_are_resolved(self) -> None:
        value = torch.tensor([1 + 2j])
        assert dlpack.to_numpy(value.conj(), "x").tolist() == [1 - 2j]
        assert dlpack.to_numpy(value.conj().imag, "x").tolist() == [-2]

    @pytest.mark.parametrize(
        ("tensor", "told"),
        [
            (torch.eye(3).to_sparse(), "'x': a torch.sparse_coo tensor"),
            (torch.empty(3, device="meta"), "'x': .*meta"),
            (torch.empty(3, dtype=torch.uint8).view(torch.bits8), "'x': torch dtype bits8 cannot be stored"),
            (torch.empty(3, dtype=torch.float4_e2m1fn_x2), "'x': torch dtype float4_e2m1fn_x2 cannot be stored"),
        ],
        ids=["sparse", "meta", "bits", "float4"],
    )
    def test_refused(self, tensor: torch.Tensor, told: str) -> None:
        with pytest.raises(InvalidInputError, match=told):
            dlpack.to_numpy(tensor, "'x'")


class TestOthers:
    def test_numpy_comes_as_it_is(self) -> None:
        array = np.arange(6.0)
        assert dlpack.to_numpy(array, "x") is array
        assert dlpack.to_writable(array, "x") is array

    @pytest.mark.parametrize("dtype", ["float32", "int8", "uint64", "complex64", "bool", "float16"])
    def test_dlpack_comes_as_a_view(self, dtype: str) -> None:
        array = np.ones((3, 2), dtype)
        view = dlpack.to_numpy(Exchange(array), "x")
        array[1, 1] = 0
        assert view.dtype == array.dtype and view.tolist() == array.tolist()

    def test_dlpack_is_written_through(self) -> None:
        array = np.zeros(3)
        dlpack.on_host(dlpack.to_writable(Exchange(array), "x"))[:] = [1, 2, 3]
        assert array.tolist() == [1, 2, 3]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="these devices are not there only without CUDA")
    @pytest.mark.parametrize("device", [(2, 0), (10, 1)])
    def test_devices_that_are_not_there_are_refused(self, device: tuple[int, int]) -> None:
        with pytest.raises(InvalidInputError, match="table 't': torch cannot take it from its device, copy it to the"):
            dlpack.to_array(Exchange(np.zeros(3), device), "table 't'")

    def test_memory_of_the_cpu_is_not_taken_for_a_device(self) -> None:
        with pytest.raises(InvalidInputError, match="table 't': its DLPack names a device and gives memory of the CPU"):
            dlpack.to_array(Exchange(np.zeros(3), (14, 0)), "table 't'")

    @pytest.mark.parametrize("device", [(1, 0), (3, 0), (11, 0)])
    def test_memory_that_the_cpu_reads_is_accepted(self, device: tuple[int, int]) -> None:
        assert dlpack.to_numpy(Exchange(np.arange(3), device), "x").tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        ("given", "dtype", "values"),
        [
            ([[1.5, 2], [3, 4]], "float64", [[1.5, 2], [3, 4]]),
            ((1, 2), "int64", [1, 2]),
            (range(3), "int64", [0, 1, 2]),
            (3.5, "float64", 3.5),
            (memoryview(b"ab"), "uint8", [97, 98]),
            ([True, False], "bool", [True, False]),
            (np.float32(0.5), "float32", 0.5),
            (ml_dtypes.bfloat16(0.5), "bfloat16", 0.5),
        ],
    )
    def test_what_numpy_itself_reads(self, given: Any, dtype: str, values: Any) -> None:
        array = dlpack.to_numpy(given, "x")
        assert array.dtype == dtypes.logical(dtype) and array.tolist() == values

    @pytest.mark.parametrize(
        "given",
        [
            None,
            "text",
            b"ab",
            object(),
            [[1], [1, 2]],
            [object()],
            {"a": 1},
            {1, 2},
            np.array(["a"]),
            [1, "a"],
            [2**70],
        ],
        ids=lambda given: type(given).__name__,
    )
    def test_what_is_no_array_is_refused(self, given: Any) -> None:
        with pytest.raises(InvalidInputError, match="tensor 'mlp'"):
            dlpack.to_numpy(given, "tensor 'mlp'")

    def test_an_array_that_refuses_to_be_one_is_refused(self) -> None:
        class Broken:
            def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
                raise RuntimeError("gone")

        with pytest.raises(InvalidInputError, match="'x': Broken cannot be read as an array: gone"):
            dlpack.to_numpy(Broken(), "'x'")

    @pytest.mark.parametrize("given", [[1, 2], 3, None, b"bytes", "text"])
    def test_only_arrays_are_written_to(self, given: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"'x': .* is no array that can be written to"):
            dlpack.to_writable(given, "'x'")

    def test_read_only_arrays_are_not_written_to(self) -> None:
        array = np.zeros(3)
        array.flags.writeable = False
        with pytest.raises(InvalidInputError, match="'x' is read-only"):
            dlpack.to_writable(array, "'x'")
        assert dlpack.to_numpy(array, "'x'") is array
