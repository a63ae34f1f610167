"""The encoders and the decoder for torch tensors, on whatever device these are. Imported with the first of them.

What leaves the device are codes, qparams and exact rows. Every operation is one of torch's, so products and sums are
rounded apart (DEC-1). `minmax` and `symmetric` give the codes and qparams of the numpy reference; `refine` and `greedy`
sum over columns in another order. Rows go in pieces, so memory on the device does not grow with the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.packing import checked_bits, checked_columns, packed_width
from checkrun_format.quantize.greedy import steps_of
from checkrun_format.quantize.method import Method, method
from checkrun_format.quantize.minmax import TOLERANCE
from checkrun_format.quantize.record import PRECISIONS, Quantized, nan_rows
from checkrun_format.quantize.trials import COSINE, LEVEL, MOVING_BITS, NARROWEST, SHIFTS, SINE, risk, trials

Tensor = torch.Tensor

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}

_PIECE = {"cpu": 3 << 15}
_PIECE_ON_DEVICE = 1 << 24
_HALVES = {torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 2.0**-134)}


def encode_tensor(
    values: Tensor, bits: int, encoder: str | Method | None = None, qparams_dtype: str | None = None
) -> Quantized:
    """Quantize a tensor where it is; parameters, result and errors are those of `encode`.

    Raises
    ------
    InvalidInputError
        Also for `torch_compat`, which is there for arrays alone.
    """
    chosen = method(encoder, checked_bits(bits))
    if chosen.name not in ("minmax", "symmetric", "refine", "greedy"):
        raise InvalidInputError(f"the encoder {chosen.name!r} takes no tensors: give it a numpy array")
    if values.ndim != 2 or values.dtype not in DTYPES:
        raise InvalidInputError(f"values must be a floating tensor of two dimensions, not {values.dtype} {values.ndim}")
    rows, columns = values.shape
    checked_columns(columns)
    values = values.detach()
    for dtype in ("float16", "float32") if qparams_dtype is None else (qparams_dtype,):
        codes = np.empty((rows, packed_width(columns, bits)), np.uint8)
        qparams = np.empty((rows, 2), dtype)
        bound = 0.0
        for piece in _pieces(values):
            packed, pairs, largest = _encoded(values[piece], bits, chosen, half=dtype == "float16")
            codes[piece] = packed.cpu().numpy()
            qparams[piece] = pairs.cpu().numpy()
            bound = max(bound, largest)
        exact = int(np.count_nonzero(np.isnan(qparams[:, 0])))
        if qparams_dtype is not None or exact <= rows // 100 or not _float32_saves(values, qparams, bits, chosen):
            break
    index = nan_rows(qparams[:, 0], exact)
    return Quantized(
        codes=codes,
        qparams=qparams,
        exact_index=index,
        exact_values=on_host(values[torch.from_numpy(index).to(values.device)]),
        bits=int(bits),
        columns=columns,
        dtype=DTYPES[values.dtype],
        encoder=chosen.name,
        error_bound=bound,
    )


def decode_tensor(quantized: Quantized, out: Tensor) -> Tensor:
    """Decode into a tensor (n, columns) of the logical dtype, of any strides, where it is (DEC-1, DEC-2).

    Raises
    ------
    InvalidInputError
        If `out` has another shape or dtype.
    """
    q = quantized
    if out.shape != (q.rows, q.columns) or DTYPES.get(out.dtype) != q.dtype:
        raise InvalidInputError(f"out must be {q.dtype} {(q.rows, q.columns)}, not {out.dtype} {tuple(out.shape)}")
    for piece in _pieces(out):
        codes, qparams = (torch.from_numpy(a[piece]).to(out.device) for a in (q.codes, q.qparams))
        decode_affine(codes, qparams, q.bits, out[piece])
    if len(q.exact_index):
        out[torch.from_numpy(q.exact_index).to(out.device)] = _from_host(q.exact_values).to(out.device)
    return out


def decode_affine(codes: Tensor, qparams: Tensor, bits: int, out: Tensor, dest: Tensor | None = None) -> None:
    """Write `code * scale + bias` (DEC-1), cast to the dtype of `out` (DEC-2); all are on one device.

    Parameters
    ----------
    codes : uint8 tensor (n, packed_width)
    qparams : float16 or float32 tensor (n, 2)
    out : floating tensor (n, columns), of any strides; with `dest` it may have more rows
    dest : int64 tensor (n,), optional
        The rows of `out` that receive them; all different.
    """
    columns = out.shape[1]
    for piece in _pieces(out, len(codes)):
        pairs = qparams[piece].to(torch.float32)
        values = _unpacked(codes[piece], bits, columns).to(torch.float32) * pairs[:, :1] + pairs[:, 1:]
        out[piece if dest is None else dest[piece]] = values.to(out.dtype)


def narrow_tensor(values: Tensor, store_as: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """`narrow` for a float32 tensor where it is: what leaves the device are 16 bits a value (RAW-1)."""
    if values.dtype != torch.float32 or values.ndim not in (1, 2):
        raise InvalidInputError("only float32 tensors of one or two dimensions are stored narrower")
    wide = values.detach().reshape(len(values), -1)
    narrowed = np.empty(wide.shape, dtypes.logical(store_as))
    for piece in _pieces(wide):
        given = wide[piece]
        out = given.to(getattr(torch, store_as))
        error = (out.to(torch.float32) - given).abs() * PRECISIONS[store_as]
        out[~(error <= given.abs()).all(1)] = torch.nan
        narrowed[piece] = on_host(out)
    marks = narrowed[:, 0] if wide.shape[1] else np.zeros(0, narrowed.dtype)
    return narrowed.reshape(tuple(values.shape)), np.flatnonzero(np.isnan(marks))


def taken_rows(values: Tensor, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Some rows of a tensor, gathered where it is, as an array in memory."""
    return on_host(values.detach()[torch.from_numpy(rows).to(values.device)])


def _pieces(values: Tensor, count: int | None = None) -> Iterator[slice]:
    rows = len(values) if count is None else count
    step = max(1, _PIECE.get(values.device.type, _PIECE_ON_DEVICE) // (values.shape[1] + 16))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def on_host(values: Tensor) -> npt.NDArray[Any]:
    """The values as an array in memory."""
    if values.dtype is torch.bfloat16:
        return values.contiguous().view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    found: npt.NDArray[Any] = values.contiguous().cpu().numpy()
    return found


def _from_host(values: npt.NDArray[Any]) -> Tensor:
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(values).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(values))


def _float32_saves(values: Tensor, qparams: npt.NDArray[Any], bits: int, chosen: Method) -> bool:
    index = torch.from_numpy(np.flatnonzero(np.isnan(qparams[:, 0]))).to(values.device)
    return any(
        not bool(torch.isnan(_encoded(values[some], bits, chosen, half=False)[1][:, 0]).all())
        for some in torch.split(index, 1 << 14)
    )


def _encoded(given: Tensor, bits: int, chosen: Method, *, half: bool) -> tuple[Tensor, Tensor, float]:
    """Packed codes, qparams with NaN in exact rows, and the error bound of the others."""
    values = given.to(torch.float32)
    low, high = values.amin(1) + 0.0, values.amax(1) + 0.0
    levels = (1 << bits) - 1
    first, last, steps = low, high, levels
    if chosen.name == "symmetric":
        last = torch.maximum(high, -low) + 0.0
        first, steps = 0.0 - last, max(levels - 1, 1)
    step = (last.double() - first) / steps
    scale, bias = _stored_scale(step, half=half), _stored_bias(first.double(), half=half)
    exact = ~(_reach(low, high, scale, bias, levels) <= TOLERANCE * step)
    if chosen.name in ("refine", "greedy"):
        scale, bias = _searched(values, (low, high), (scale, bias), bits, chosen, half=half)
    exact = exact | _inexpressible(values, (low, high), (scale, bias), levels, given.dtype)
    bound = _bound(low, high, scale, bias, levels, given.dtype)[~exact]
    codes = (values - bias[:, None]) * torch.where(scale == 0, 0.0, scale.reciprocal())[:, None]
    codes = codes.round().clamp(0, levels)
    codes[exact] = 0
    pairs = torch.stack([scale, bias], 1)
    pairs[exact] = torch.nan
    packed = _packed(codes.to(torch.uint8), bits)
    return packed, pairs.to(torch.float16 if half else torch.float32), float(bound.max()) if bound.numel() else 0.0


def _stored_scale(scale: Tensor, *, half: bool) -> Tensor:
    """`stored_scale`; torch rounds float64 to float16 by way of float32, so twice."""
    if half:
        return _half(scale).float()
    bits = scale.view(torch.int64)
    short = (bits + ((1 << 36) - 1) + ((bits >> 37) & 1)) & ~((1 << 37) - 1)
    return short.view(torch.float64).float()


def _stored_bias(bias: Tensor, *, half: bool) -> Tensor:
    return _half(bias).float() if half else bias.float()


def _half(values: Tensor) -> Tensor:
    magnitude = values.abs()
    bits = magnitude.view(torch.int64)
    normal = ((bits + ((1 << 41) - 1) + ((bits >> 42) & 1)) & ~((1 << 42) - 1)).view(torch.float64)
    small = (magnitude + 402653184.0) - 402653184.0  # 1.5 * 2^28: doubles there are 2^-24 apart
    rounded = torch.where(magnitude < 2.0**-14, small, normal)
    return torch.where(rounded > 65504.0, torch.inf, rounded).copysign(values)


def _reach(low: Tensor, high: Tensor, scale: Tensor, bias: Tensor, levels: int) -> Tensor:
    wide, start = scale.double(), bias.double()
    return torch.maximum(0.5 * wide, torch.maximum(start - low, high - (start + wide * levels)))


def _inexpressible(
    values: Tensor, ends: tuple[Tensor, Tensor], pair: tuple[Tensor, Tensor], levels: int, dtype: torch.dtype
) -> Tensor:
    (low, high), (scale, bias) = ends, pair
    top = scale * levels + bias
    fits = (
        torch.isfinite(high - torch.minimum(low, bias)) & torch.isfinite(bias.to(dtype)) & torch.isfinite(top.to(dtype))
    )
    zeros = (low == 0) & (high == 0)
    negative = zeros & torch.signbit(values).all(1)
    invertible = (scale == 0) | ((scale >= 2.0**-126) & (scale <= 2.0**126))
    return ~fits | ~invertible | torch.signbit(scale) | negative


def _bound(low: Tensor, high: Tensor, scale: Tensor, bias: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    unit = 2.0**-20
    largest = torch.maximum(high, -low).double()
    bounds = _reach(low, high, scale, bias, levels) * (1 + unit)
    rounded = (scale > 0) | (dtype is torch.float64)
    bounds = bounds + torch.where(rounded, unit * torch.maximum(largest, bias.double().abs()), 0.0)
    bounds = bounds + (2.0**-149 if dtype is torch.float64 else 0.0)
    if dtype in _HALVES:
        relative, absolute = _HALVES[dtype]
        bounds = bounds + torch.minimum(bounds, relative * (largest + bounds) + absolute)
    return bounds


def _searched(
    values: Tensor,
    ends: tuple[Tensor, Tensor],
    plain: tuple[Tensor, Tensor],
    bits: int,
    chosen: Method,
    *,
    half: bool,
) -> tuple[Tensor, Tensor]:
    """`searched`, with sums in torch's order; exact rows may become anything."""
    low, high = ends
    levels = float((1 << bits) - 1)
    inverse = levels / (high - low)
    steps = ((values - low[:, None]) * inverse[:, None]).T.contiguous()  # (columns, n): so sums are fast
    find = _greedy if chosen.name == "greedy" else _by_moves if bits <= MOVING_BITS else _by_waves
    origin, width, error, pivot = find(steps, levels, bits, chosen)
    step = (high.double() - low) / levels
    scale = _stored_scale(width * step, half=half)
    origin = (pivot + (origin - pivot) * (scale / (width * step))).float()
    bias = _stored_bias(low + origin * step, half=half)
    bias = torch.where((low >= 0) & (bias <= 0), 0.0, bias)
    in_steps = [(s * inverse, (b - low) * inverse) for s, b in ((scale, bias), plain)]
    moved = (in_steps[0][1] - origin).abs() + levels * (in_steps[0][0] - width).abs()
    fits = (high - low > float(NARROWEST)) & (width > 0)
    new, old = (_squared_error(steps, b, s, levels) for s, b in in_steps)
    better = fits & ((moved * moved * len(steps) < float(risk(bits)) * error) | (new <= old))
    return torch.where(better, scale, plain[0]), torch.where(better, bias, plain[1])


def _codes(steps: Tensor, origin: Tensor, width: Tensor, levels: float) -> Tensor:
    return ((steps - origin) * width.reciprocal()).clamp(0, levels).round()


def _sums(values: Tensor) -> Tensor:
    """Sums of columns by pairs: a row's bits depend neither on the device nor on the rows beside it (LAY-7)."""
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[half : 2 * half]
        if len(values) % 2:
            folded[0] += values[-1]
        values = folded
    return values[0]


def _squared_error(steps: Tensor, origin: Tensor, width: Tensor, levels: float) -> Tensor:
    error = steps - (_codes(steps, origin, width, levels) * width + origin)
    return _sums(error * error)


_Found = tuple[Tensor, Tensor, Tensor]


def _better(best: _Found, tried: _Found) -> _Found:
    less = tried[2] < best[2]
    origin, width, error = (torch.where(less, new, old) for new, old in zip(tried, best, strict=True))
    return origin, width, error


def _none(like: Tensor) -> _Found:
    return torch.zeros_like(like), torch.ones_like(like), torch.full_like(like, torch.inf)


def _by_moves(steps: Tensor, levels: float, bits: int, chosen: Method) -> tuple[Tensor, ...]:  # noqa: ARG001
    total = _sums(steps)
    best = _none(total)
    for shift, factor in [(0.0, 1.0), *trials(bits, len(steps)).tolist()]:
        origin, width, _ = best
        best = _better(best, _regressed(steps, levels, total, origin + shift * (levels * width), width * factor))
    return *best, total / len(steps)


def _by_waves(steps: Tensor, levels: float, bits: int, chosen: Method) -> tuple[Tensor, ...]:  # noqa: ARG001
    total = _sums(steps)
    best = _none(total)
    for trial in trials(bits, len(steps)).tolist():
        best = _better(best, _wave(steps, trial))
    origin, width, error = best[0], best[1], torch.full_like(total, torch.inf)
    for _ in range(2):
        origin, width, error = _better((origin, width, error), _regressed(steps, levels, total, origin, width))
    return origin, width, error, total / len(steps)


def _regressed(steps: Tensor, levels: float, total: Tensor, origin: Tensor, width: Tensor) -> _Found:
    count, codes = len(steps), _codes(steps, origin, width, levels)
    rest = steps - codes
    sums = _sums(codes)
    rests = total - sums
    mean_code = sums / count
    variance = _sums(codes * codes) - sums * mean_code
    covariance = _sums(rest * codes) - rests * mean_code
    varied = variance > 0
    slope = torch.where(varied, covariance / variance, 0.0)
    error = _sums(rest * rest) - rests * (rests / count) - covariance * slope
    fitted = torch.where(varied, 1 + slope, width)
    return total / count - fitted * mean_code, fitted, error


def _wave(steps: Tensor, trial: list[float]) -> _Found:
    inverse, middle, *outside = trial
    rest = steps * inverse + middle
    rest = rest - rest.round()
    square = rest * rest
    cosine, sine = ((square * c + b) * square + a for a, b, c in (COSINE.tolist(), SINE.tolist()))
    sine = sine * rest
    amounts = _sums(sine * cosine), _sums(cosine * cosine) - len(steps) / 2, _sums(sine), _sums(cosine)
    least, best = torch.full_like(amounts[0], torch.inf), torch.zeros_like(amounts[0])
    for (shift, *factors), cut in zip(SHIFTS.tolist(), outside, strict=True):
        error = cut + sum(amount * factor for amount, factor in zip(amounts, factors, strict=True))
        less = error < least
        least, best = torch.where(less, error, least), torch.where(less, shift, best)
    width = 1 / inverse
    return (best + middle) * -width, torch.full_like(least, width), (least + len(steps) * float(LEVEL)) * width**2


def _greedy(steps: Tensor, levels: float, bits: int, chosen: Method) -> tuple[Tensor, ...]:
    step, count = steps_of(bits, chosen.num_bins or 0, chosen.ratio or 0.0)
    low = torch.zeros(steps.shape[1], device=steps.device)
    high = torch.full_like(low, levels)
    width = torch.ones_like(low)
    best = low, width, _squared_error(steps, low, width, levels)
    for _ in range(count):
        raised, lowered = low + float(step), high - float(step)
        without_low = _squared_error(steps, raised, (high - raised) / levels, levels)
        without_high = _squared_error(steps, low, (lowered - low) / levels, levels)
        up = without_low < without_high
        low, high = torch.where(up, raised, low), torch.where(up, high, lowered)
        best = _better(best, (low, (high - low) / levels, torch.where(up, without_low, without_high)))
    return *best, best[0]


def _packed(codes: Tensor, bits: int) -> Tensor:
    """`pack`: eight codes make `bits` bytes, by way of one 64-bit number."""
    if bits == 8:
        return codes
    width = packed_width(codes.shape[1], bits)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).view(len(codes), -1, 8).to(torch.int64)
    places = torch.arange(8, device=codes.device)
    words = (padded << (places * bits)).sum(2, keepdim=True)
    octets = (words >> (8 * places[:bits])) & 255
    return octets.to(torch.uint8).flatten(1)[:, :width].contiguous()


def _unpacked(packed: Tensor, bits: int, columns: int) -> Tensor:
    if bits == 8:
        return packed
    if bits in (1, 2, 4):  # several times as fast, in an eighth of the memory
        starts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return ((packed.unsqueeze(2) >> starts) & ((1 << bits) - 1)).flatten(1)[:, :columns]
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[1] % bits)).view(len(packed), -1, bits).to(torch.int64)
    places = torch.arange(8, device=packed.device)
    words = (padded << (8 * places[:bits])).sum(2, keepdim=True)
    return ((words >> (bits * places)) & ((1 << bits) - 1)).flatten(1)[:, :columns]
