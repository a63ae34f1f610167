"""Rows of values to codes, qparams and exact rows, and back. Arrays in, arrays out."""

from checkrun_format.quantize.decode import decode, decode_affine, scatter_affine
from checkrun_format.quantize.encode import ENCODERS, Encoder, encode, recorded_method
from checkrun_format.quantize.engine import set_threads
from checkrun_format.quantize.measure import mean_l2, sampled_l2
from checkrun_format.quantize.method import Method, method
from checkrun_format.quantize.narrow import narrow
from checkrun_format.quantize.record import Quantized
from checkrun_format.quantize.tune import tune

__all__ = [
    "ENCODERS",
    "Encoder",
    "Method",
    "Quantized",
    "decode",
    "decode_affine",
    "encode",
    "mean_l2",
    "method",
    "narrow",
    "recorded_method",
    "sampled_l2",
    "scatter_affine",
    "set_threads",
    "tune",
]
