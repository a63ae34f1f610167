"""Tensors on a CUDA device: the bits of the numpy reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from checkrun_format.quantize import decode, encode, tensors

pytestmark = pytest.mark.gpu


def values() -> torch.Tensor:
    drawn = np.random.default_rng(0).standard_t(4, (3000, 40)).astype(np.float32)
    drawn[:40] *= np.float32(1e-38)
    drawn[40:80] += 100
    drawn[80, 3], drawn[81, 2], drawn[82], drawn[83] = np.nan, -np.inf, -0.0, 0.1
    return torch.from_numpy(drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("encoder", ["minmax", "symmetric"])
def test_codes_and_qparams(encoder: str, dtype: torch.dtype) -> None:
    given = values().to(dtype)
    for bits in range(1, 9):
        wanted, found = encode(given, bits, encoder), encode(given.cuda(), bits, encoder)
        for name in ("codes", "qparams", "exact_index", "exact_values"):
            assert getattr(found, name).tobytes() == getattr(wanted, name).tobytes()
        assert found.error_bound == wanted.error_bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_decoding(dtype: torch.dtype) -> None:
    """DEC-1: also with float32 qparams no fused multiply-add changes a bit."""
    given = values().to(dtype)
    for bits in range(1, 9):
        for qparams_dtype in ("float16", "float32"):
            q = encode(given, bits, qparams_dtype=qparams_dtype)
            out = tensors.decode_tensor(q, torch.zeros(given.shape, dtype=dtype, device="cuda"))
            assert tensors.on_host(out).tobytes() == decode(q).tobytes()


@pytest.mark.parametrize("encoder", ["refine", "greedy"])
def test_errors_of_searches(encoder: str) -> None:
    given = values()[100:]
    for bits in (2, 4):
        errors = [
            np.sqrt(((decode(encode(x, bits, encoder)).astype(np.float64) - given.numpy()) ** 2).sum(1)).mean()
            for x in (given, given.cuda())
        ]
        assert errors[1] == pytest.approx(errors[0], rel=1e-3)
