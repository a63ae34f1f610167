"""Rows as the operators of FBGEMM and PyTorch take them: codes, then scale and bias, all in one row of bytes.

At 8 bits: a byte for each code, then scale and bias as float32; at 4 and 2 bits: codes packed from the lowest bits of
each byte on, as PCK-1 has them, then scale and bias as float16. Little endian. `embedding_bag_byte_unpack`,
`embedding_bag_4bit_unpack` and `embedding_bag_2bit_unpack` of `torch.ops.quantized` read them; at 8 bits in one fused
multiply-add, which gives the same bits as DEC-1 where a scale has at most 16 significant bits (DEC-4). They give
float32: what DEC-1 says, without the cast of DEC-2.
"""

from __future__ import annotations

import array
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format import dtypes, packing
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import InvalidInputError
from checkrun_format.interchange import exporter, kinds
from checkrun_format.interchange.contents import Array, Entry
from checkrun_format.interchange.exporter import Advance
from checkrun_format.interchange.inventory import WEIGHT, Label, label_table
from checkrun_format.manifest import Field
from checkrun_format.packing import U8
from checkrun_format.resolver import Layers, Piece, as_stored, live_keys, pieces
from checkrun_format.rows import Ids, Mask, Wanted, WantedIds, WantedRange, as_array
from checkrun_format.view import TableView

WIDTHS: Final = (2, 4, 8)
"""Bits that the fused layout knows."""

Numbers: TypeAlias = "array.array[int]"
"""Row numbers or keys, eight bytes each: there may be as many as a table has rows."""

_QPARAMS: Final = {2: "<f2", 4: "<f2", 8: "<f4"}


def fused_width(columns: int, bits: int) -> int:
    """Bytes of a fused row."""
    return packing.packed_width(columns, bits) + 2 * np.dtype(_QPARAMS[bits]).itemsize


@dataclass(slots=True, kw_only=True)
class Fusion:
    """One table in the fused layout, and how its rows came to be.

    Attributes
    ----------
    bits, columns, rows : int
        Its width, values and rows.
    copied : int
        Rows whose codes and qparams are those that are stored.
    encoded : int
        Rows that are stored raw, encoded with plain min/max.
    exact : sequence of int
        Rows or keys that are stored exactly beside the codes: encoded with plain min/max.
    recoded : sequence of int
        Rows or keys whose codes or qparams this layout lacks: their decoded values, encoded with plain min/max.
    lost : sequence of int
        Those of them whose values no scale and bias of this layout reach (NaN, infinities, beyond float16): all NaN.
    """

    bits: int
    columns: int
    rows: int
    copied: int = 0
    encoded: int = 0
    exact: Numbers
    recoded: Numbers
    lost: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """What an export for FBGEMM wrote.

    Attributes
    ----------
    tables : mapping
        What became of each table that was fused; complete, because the file is.
    plain : list
        Tables that are there as they are, because they are not quantized.
    left_out : list
        `TABLE.FIELD` that are not there: fields beside the one that was fused.
    """

    file_bytes: int
    tables: Mapping[str, Fusion]
    plain: Sequence[str]
    left_out: Sequence[str]
    tensors: int


def export_fused(
    checkpoint: Checkpoint,
    file: str | os.PathLike[str],
    *,
    bits: int | None = None,
    kind: str | None = None,
    overwrite: bool = False,
    advance: Advance = lambda count: None,
) -> Fused:
    """Write the quantized tables of a checkpoint in the fused layout, each as a tensor uint8 (rows, fused width).

    Where widths allow, codes and qparams are copied as they are stored; wider codes hold narrower ones exactly. The
    file's label tells of each: {"fbgemm": {table: {"bits", "columns", "rows"}}}.

    Parameters
    ----------
    bits : 2, 4 or 8
        Width of all tables, raw ones of floating-point numbers included. By default the narrowest that holds the codes
        of each quantized table; raw ones are then written as they are.
    kind, overwrite, advance
        As of `export_checkpoint`.

    Raises
    ------
    InvalidInputError
        Nothing is quantized and `bits` is not given; a table has several fields and none of them is `weight`; or as
        of `export_checkpoint`.
    """
    if bits not in (None, *WIDTHS):
        raise InvalidInputError(f"bits {bits!r}: the fused layout has 2, 4 or 8")
    path = Path(file)
    kind = kinds.kind_of(path, kind)
    entries, label, fusions, plain, left_out = exporter.dense_entries(checkpoint), {}, {}, [], []
    for name in checkpoint.tables:
        view = checkpoint.table(name)
        layers = view.layers()
        width = bits or _narrowest(layers, view)
        names = label_table(name, view.fields, keyed=view.addressing == "keyed")
        f = None if width is None else _fused_field(view)
        if f is None or width is None or f.columns is None:
            plain.append(name)
            entries += exporter.table_entries(view, names)
            continue
        fusions[name] = _fusion(view, f, width)
        entries.append(_entry(view, layers, f, fusions[name]))
        label[name] = {"bits": width, "columns": f.columns, "rows": len(view)}
        left_out += [f"{name}.{other.name}" for other in view.fields if other.name != f.name]
        if names.keys is not None:
            entries.append(exporter.keys_entry(view, names.keys))
    if not fusions:
        raise InvalidInputError("no table is quantized: --bits (2, 4 or 8) says how to encode them")
    size = exporter.write(path, kind, entries, Label(fbgemm=label), overwrite=overwrite, advance=advance)
    return Fused(file_bytes=size, tables=fusions, plain=plain, left_out=left_out, tensors=len(checkpoint.tensors))


def _narrowest(layers: Layers, view: TableView) -> int | None:
    """The narrowest width that holds the codes of a table; None if nothing in it is quantized."""
    main = _name_of_main(view)
    names = {f.name for f in view.fields}
    names = {main} & names or names
    stored = {
        f.bits or 0
        for layer, entry in layers
        for part in layer.parts(entry.name)
        for f in layer.block(part).entry.fields
        if f.encoding == "affine" and f.name in names
    }
    return next(width for width in WIDTHS if width >= max(stored)) if stored else None


def _name_of_main(view: TableView) -> str:
    return view.fields[0].name if len(view.fields) == 1 else WEIGHT


def _fused_field(view: TableView) -> Field | None:
    """The field of a table that is fused: its only one, or `weight`; None if it holds no rows of floating point."""
    found = next((f for f in view.fields if f.name == _name_of_main(view)), None)
    if found is None:
        raise InvalidInputError(
            f"table {view.name!r} has several fields, none of which is {WEIGHT!r}: none to be fused"
        )
    return found if found.columns is not None and found.dtype in dtypes.FLOATING else None


def _fusion(view: TableView, f: Field, bits: int) -> Fusion:
    assert f.columns is not None
    code = "Q" if view.addressing == "keyed" and view.keys().dtype.kind == "u" else "q"
    return Fusion(
        bits=bits,
        columns=f.columns,
        rows=len(view),
        exact=array.array(code),
        recoded=array.array(code),
        lost=array.array(code),
    )


def _entry(view: TableView, layers: Layers, f: Field, fusion: Fusion) -> Entry:
    shape = (fusion.rows, fused_width(fusion.columns, fusion.bits))

    def rows() -> Iterator[Array]:
        step = exporter.rows_at_a_time(f)
        keys = live_keys(layers) if view.addressing == "keyed" else None
        for low in range(0, fusion.rows, step):
            high = min(low + step, fusion.rows)
            wanted: Wanted = WantedRange(low, high) if keys is None else WantedIds(keys[low:high])
            yield _Rows(view, layers, f, fusion, wanted).fused()

    return Entry(name=view.name, dtype="uint8", shape=shape, pieces=rows)


class _Rows:
    """Some rows of a table on their way into the fused layout."""

    def __init__(self, view: TableView, layers: Layers, f: Field, fusion: Fusion, wanted: Wanted) -> None:
        self._view, self._layers, self._field, self._fusion, self._wanted = view, layers, f, fusion, wanted
        self._out: U8 = np.zeros((len(wanted), fused_width(fusion.columns, fusion.bits)), np.uint8)
        self._copied: Mask = np.zeros(len(wanted), np.bool_)
        self._exact: Mask = np.zeros(len(wanted), np.bool_)
        self._raw: Mask = np.zeros(len(wanted), np.bool_)

    def fused(self) -> U8:
        """The rows as bytes (n, fused width)."""
        for piece in pieces(self._layers, self._wanted):
            self._copy(piece)
        rest = np.flatnonzero(~self._copied)
        if rest.size:
            self._encode(rest)
        self._fusion.copied += int(np.count_nonzero(self._copied))
        return self._out

    def _copy(self, piece: Piece) -> None:
        """Take codes and qparams as they are stored, where this layout can hold them."""
        for f in piece.block.entry.fields:
            if f.name != self._field.name:
                continue
            if f.encoding == "raw":
                self._raw[piece.places] = True
            stored = as_stored(piece, f, self._field)
            self._exact[as_array(piece.places)[stored.exact_index]] = True
            if f.encoding == "affine" and f.columns == self._fusion.columns and (f.bits or 8) <= self._fusion.bits:
                self._put(as_array(piece.places), stored.arrays["codes"], stored.arrays["qparams"], f.bits or 8)

    def _put(self, places: Ids, codes: U8, qparams: Array, bits: int) -> None:
        columns, width = self._fusion.columns, self._fusion.bits
        with np.errstate(over="ignore"):
            narrow = qparams.astype(_QPARAMS[width])
        fits = (narrow.astype(np.float32) == qparams.astype(np.float32)).all(axis=1)  # NaN of exact rows do not
        chosen = codes[fits]
        if bits != width:
            chosen = packing.pack(packing.unpack(np.ascontiguousarray(chosen), bits, columns), width)
        self._out[places[fits]] = np.concatenate([chosen, _bytes_of(narrow[fits])], axis=1)
        self._copied[places[fits]] = True

    def _encode(self, rest: Ids) -> None:
        """Encode the rows that could not be copied, with plain min/max, and note them."""
        fusion, ids = self._fusion, self._wanted.ids()[rest]
        shown = ids.view(fusion.exact.typecode)
        values = self._view.take(shown, fields=[self._field.name])[self._field.name]
        for some in packing.row_pieces(*values.shape):
            codes, qparams = _plain_minmax(values[some].astype(np.float32), fusion.bits)
            self._out[rest[some]] = np.concatenate([packing.pack(codes, fusion.bits), _bytes_of(qparams)], axis=1)
            fusion.lost.frombytes(shown[some][np.isnan(qparams[:, 0])].tobytes())
        exact, raw = self._exact[rest], self._raw[rest]
        fusion.exact.frombytes(shown[exact].tobytes())
        fusion.recoded.frombytes(shown[~exact & ~raw].tobytes())
        fusion.encoded += int(np.count_nonzero(raw & ~exact))


def _bytes_of(qparams: Array) -> U8:
    return np.ascontiguousarray(qparams).view(np.uint8)


def _plain_minmax(values: npt.NDArray[np.float32], bits: int) -> tuple[U8, Array]:
    """Codes (n, columns) and qparams (n, 2) of rows from their extremes; NaN qparams where those cannot be had."""
    levels = (1 << bits) - 1
    with np.errstate(all="ignore"):
        low, high = values.min(axis=1), values.max(axis=1)
        qparams = np.empty((len(values), 2), _QPARAMS[bits])
        qparams[:, 1] = low
        bias = qparams[:, 1].astype(np.float64)
        qparams[:, 0] = np.maximum(high - bias, 0) / levels
        scale = qparams[:, 0].astype(np.float64)
        steps = (values - bias[:, None]) / np.where(scale > 0, scale, np.inf)[:, None]
        codes = np.clip(np.rint(steps), 0, levels).astype(np.uint8)
        lost = ~np.isfinite(qparams.astype(np.float32)).all(axis=1)
    codes[lost], qparams[lost] = 0, np.nan
    return codes, qparams
