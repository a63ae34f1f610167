"""Codes to bit streams and back (FORMAT.md section 7.1, PCK-1).

Eight codes of b bits fill b bytes exactly; at 1, 2 and 4 bits fewer codes fill one. So the bytes of the codes are
taken as words of eight (or of as many as fill a byte), which are folded together pairwise: 8 x b bits, 4 x 2b, 2 x 4b,
1 x 8b.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from checkrun_format.errors import InvalidInputError
from checkrun_format.integers import whole

U8 = npt.NDArray[np.uint8]
_Words = npt.NDArray[Any]

LINE = 64
"""Bytes of a cache line, and of its alignment."""

FAR = 1 << 20
"""Bytes of an array from which on its lines are in no cache near by: they are written past it."""

PIECE_ELEMENTS = 3 << 15
"""Elements of one piece of rows: 384 KiB as float32, which stay in a second-level cache."""


def row_pieces(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cut `rows` rows of `columns` elements into pieces that stay in cache; each has a row at least.

    Examples
    --------
    >>> list(row_pieces(1000, 100))
    [slice(0, 847, None), slice(847, 1000, None)]
    """
    per_row = columns + 16
    step = max(1, PIECE_ELEMENTS // per_row)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def packed_width(columns: int, bits: int) -> int:
    """Bytes of a packed row: ceil(columns * bits / 8).

    Raises
    ------
    InvalidInputError
        If `bits` is not from 1 to 8 or `columns` is below 1.

    Examples
    --------
    >>> packed_width(64, 4), packed_width(5, 3)
    (32, 2)
    """
    return -(-checked_columns(columns) * checked_bits(bits) // 8)


def pack(codes: U8, bits: int, out: U8 | None = None) -> U8:
    """Pack the codes of each row into a bit stream, least significant bit first (PCK-1).

    Parameters
    ----------
    codes : uint8 array (n, columns)
        From 0 to 2^bits - 1; any strides.
    bits : int
        1 to 8.
    out : uint8 array (n, packed_width), optional
        Receives the bytes; any strides. It must not overlap `codes`.

    Returns
    -------
    uint8 array (n, packed_width)
        `out` if given. Padding bits are zero.

    Raises
    ------
    InvalidInputError
        For another dtype, shape or width, or a code above 2^bits - 1.

    Examples
    --------
    >>> pack(np.array([[5, 2, 7, 0, 1]], np.uint8), 3).tobytes().hex()
    'd511'
    """
    rows, columns = _shape_of(codes, "codes")
    bits = checked_bits(bits)
    width = packed_width(columns, bits)
    if codes.max(initial=0) >> bits:
        raise InvalidInputError(f"codes must be from 0 to {2**bits - 1} at {bits} bits, found {codes.max()}")
    packed = checked_out(out, (rows, width), np.dtype(np.uint8))
    for piece in row_pieces(rows, columns):
        packed[piece] = codes[piece] if bits == 8 else _pack_piece(codes[piece], bits)[:, :width]
    return packed


def unpack(packed: U8, bits: int, columns: int, out: U8 | None = None) -> U8:
    """Read the codes back from packed rows; padding bits are not looked at.

    Parameters
    ----------
    packed : uint8 array (n, packed_width)
        Any strides.
    bits : int
        1 to 8.
    columns : int
        Codes in a row, at least 1.
    out : uint8 array (n, columns), optional
        Receives the codes; any strides. It must not overlap `packed`.

    Returns
    -------
    uint8 array (n, columns)
        `out` if given.

    Raises
    ------
    InvalidInputError
        For another dtype, shape or width.

    Examples
    --------
    >>> unpack(np.frombuffer(bytes.fromhex("d511"), np.uint8)[None], 3, 5)
    array([[5, 2, 7, 0, 1]], dtype=uint8)
    """
    bits, columns = checked_bits(bits), checked_columns(columns)
    rows = _packed_rows(packed, bits, columns)
    codes = checked_out(out, (rows, columns), np.dtype(np.uint8))
    for piece in row_pieces(rows, columns):
        codes[piece] = packed[piece] if bits == 8 else _unpack_piece(packed[piece], bits)[:, :columns]
    return codes


def padding_is_zero(packed: U8, bits: int, columns: int) -> bool:
    """Whether the bits after the last code of every row are zero, as PCK-1 demands.

    Parameters and errors are those of `unpack`.

    Examples
    --------
    >>> padding_is_zero(np.array([[0xD5, 0x11], [0xD5, 0x91]], np.uint8), 3, 5)
    False
    """
    bits, columns = checked_bits(bits), checked_columns(columns)
    _packed_rows(packed, bits, columns)
    used = columns * bits % 8
    return not used or not int(packed[:, -1].max(initial=0)) >> used


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A new array; one that is large begins with a cache line, so that rows are put into it fast."""
    size = math.prod(shape) * dtype.itemsize
    if size < FAR:
        return np.empty(shape, dtype)
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def checked_bits(bits: int) -> int:
    """`bits` as an int from 1 to 8, or `InvalidInputError`."""
    return whole(bits, f"bits must be a whole number from 1 to 8, not {bits!r}", 1, 8)


def checked_columns(columns: int) -> int:
    """`columns` as an int of at least 1, or `InvalidInputError`."""
    return whole(columns, f"columns must be a whole number of at least 1, not {columns!r}", least=1)


def checked_out(out: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """`out` if it has this shape and dtype and can be written, a new array if it is None, or `InvalidInputError`."""
    if out is None:
        return aligned_empty(shape, dtype)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != dtype or not out.flags.writeable:
        raise InvalidInputError(f"out must be a writable array of shape {shape} and dtype {dtype}, not {_told(out)}")
    return out


def _shape_of(array: object, name: str) -> tuple[int, int]:
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype != np.uint8:
        raise InvalidInputError(f"{name} must be a uint8 array of two dimensions, not {_told(array)}")
    return array.shape[0], array.shape[1]


def _packed_rows(packed: U8, bits: int, columns: int) -> int:
    rows, width = _shape_of(packed, "packed")
    wanted = packed_width(columns, bits)
    if width != wanted:
        raise InvalidInputError(f"a row of {columns} codes at {bits} bits takes {wanted} bytes, not {width}")
    return rows


def _told(given: object) -> str:
    return f"{given.dtype} {given.shape}" if isinstance(given, np.ndarray) else type(given).__name__


def _word_bytes(bits: int) -> int:
    """Codes of one word: as many as fill one byte, where some number does, else the eight that fill `bits` bytes."""
    return 8 // bits if bits in (1, 2, 4) else 8


def _folds(bits: int) -> list[tuple[int, int, int]]:
    """Per lane width: how far odd lanes move, and the masks of even and odd lanes once they hold their bits."""
    word = 8 * _word_bytes(bits)
    folds = []
    for lane in (width for width in (8, 16, 32) if width < word):
        filled = bits * lane // 8
        even = sum(((1 << filled) - 1) << start for start in range(0, word, 2 * lane))
        folds.append((lane - filled, even, even << lane))
    return folds


def _pack_piece(codes: U8, bits: int) -> U8:
    size = _word_bytes(bits)
    words: _Words = _padded(codes, size).view(f"<u{size}")
    for shift, even, odd in _folds(bits):
        moved = words & odd
        moved >>= shift
        words = words & even
        words |= moved
    if size * bits == 8:
        return words.astype(np.uint8)
    return words.view(np.uint8).reshape(*words.shape, 8)[:, :, :bits].reshape(len(words), -1)


def _unpack_piece(packed: U8, bits: int) -> U8:
    size = _word_bytes(bits)
    if size * bits == 8:
        words: _Words = packed.astype(f"<u{size}", order="C")
    else:
        words = _eight_byte_words(_padded(packed, bits), bits)
    for shift, even, odd in reversed(_folds(bits)):
        moved = words << shift
        moved &= odd
        words &= even
        words |= moved
    return words.view(np.uint8)


def _eight_byte_words(packed: U8, bits: int) -> _Words:
    groups = packed.reshape(len(packed), -1, bits)
    loaded = np.zeros((*groups.shape[:2], 8), np.uint8)
    for byte in range(bits):
        loaded[:, :, byte] = groups[:, :, byte]
    return loaded.view("<u8")[:, :, 0]


def _padded(array: U8, multiple: int) -> U8:
    """The rows in one run of memory, with zero bytes up to a multiple of `multiple`."""
    rows, width = array.shape
    extra = -width % multiple
    if not extra:
        return np.ascontiguousarray(array)
    padded = np.zeros((rows, width + extra), np.uint8)
    padded[:, :width] = array
    return padded
