"""Blocks on their way to the store: layouts, encoded rows, pools of small parts (FORMAT.md section 6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format import dlpack, dtypes, packing, quantize
from checkrun_format.dlpack import Array
from checkrun_format.rows import Ids, Mask

Values: TypeAlias = "Array | quantize.Quantized"
"""Rows of a field, as they are or quantized already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPlan:
    """How one field of one part is to be encoded."""

    name: str
    dtype: str
    """Logical dtype of the table's field."""
    columns: int | None
    """Width that the part holds."""
    start: int = 0
    """First column that the part holds."""
    bits: int | None = None
    encoder: quantize.Method | None = None
    """None: the default of the width."""
    store_as: str | None = None
    qparams: str | None = None
    """Dtype of the qparams; None: the encoder chooses."""
    device: str | None = None
    """Where its values are, and are encoded; None: the CPU. The same values may have other codes elsewhere."""

    @property
    def lossy(self) -> bool:
        """Whether what is stored may differ from what is given."""
        return self.bits is not None or self.store_as is not None

    @property
    def stored(self) -> str:
        """Logical dtype of the values of a raw field."""
        return self.store_as or self.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row before encoding."""
        return dtypes.logical(self.dtype).itemsize * (self.columns or 1)

    def having(self, **changed: Any) -> FieldPlan:
        """The plan with these attributes; mostly it has them already, and a model has thousands."""
        return (
            self if all(getattr(self, name) == value for name, value in changed.items()) else replace(self, **changed)
        )

    def layout(self, qparams: str | None = None) -> FieldLayout:
        """The arrays that come of it; `qparams` is the dtype that the encoder chose."""
        return FieldLayout(
            name=self.name,
            dtype=self.dtype,
            encoding="raw" if self.bits is None else "affine",
            columns=self.columns,
            bits=self.bits,
            stored=self.stored if self.bits is None else None,
            qparams=None if self.bits is None else qparams or self.qparams,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldLayout:
    """What the arrays of one field of a block look like."""

    name: str
    dtype: str
    encoding: str
    columns: int | None
    bits: int | None = None
    stored: str | None = None
    qparams: str | None = None

    @property
    def widest(self) -> int:
        """Bytes of one row of its widest array."""
        if self.encoding == "affine":
            return max(packing.packed_width(self.columns or 1, self.bits or 8), 8)
        return dtypes.logical(self.stored or self.dtype).itemsize * (self.columns or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """What all parts of a block have in common."""

    fields: tuple[FieldLayout, ...]
    listed: bool

    @property
    def widest(self) -> int:
        """Bytes of one row of the widest row-aligned array."""
        return max([8 * self.listed, *(f.widest for f in self.fields), 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedField:
    """Rows of one field as they are stored."""

    layout: FieldLayout
    arrays: dict[str, npt.NDArray[Any]]
    """`codes` and `qparams`, or `values`; in the dtypes that are stored."""
    exact_index: Ids
    exact_values: npt.NDArray[Any]
    """In the dtype that stores the field's logical dtype."""
    error_bound: float = 0.0
    sampled: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    """Rows of a sample, ascending."""
    l2: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))
    """Of those, the norms of what the encoder changed, and of what was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Some rows of a part, encoded."""

    count: int
    fields: list[EncodedField]
    rows: Ids | None
    """Row numbers or keys, None in a range."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        listed = 0 if self.rows is None else self.rows.nbytes
        return listed + sum(
            array.nbytes for f in self.fields for array in (*f.arrays.values(), f.exact_index, f.exact_values)
        )

    @property
    def layout(self) -> BlockLayout:
        """The layout of a block that can hold them."""
        return BlockLayout(fields=tuple(f.layout for f in self.fields), listed=self.rows is not None)


@dataclass(slots=True, kw_only=True)
class Encoder:
    """Encodes rows of one part piece by piece; the first piece settles the dtype of the qparams."""

    plans: Sequence[FieldPlan]
    _qparams: dict[str, str] = field(default_factory=dict)

    def encode(self, values: Mapping[str, Values], rows: Ids | None) -> EncodedRows:
        """Encode one piece."""
        fields = [self._field(plan, values[plan.name]) for plan in self.plans]
        first = values[self.plans[0].name]
        count = first.rows if isinstance(first, quantize.Quantized) else len(first)
        return EncodedRows(count=count, fields=fields, rows=rows)

    def _field(self, plan: FieldPlan, values: Values) -> EncodedField:
        if isinstance(values, quantize.Quantized):
            return _quantized(plan, values)
        if plan.bits is not None:
            return self._affine(plan, values)
        return _narrowed(plan, values) if plan.stored != plan.dtype else _raw(plan, values)

    def _affine(self, plan: FieldPlan, values: Array) -> EncodedField:
        given = dlpack.as_quantized(values)
        q = quantize.encode(given, plan.bits or 0, plan.encoder, self._qparams.get(plan.name, plan.qparams))
        self._qparams.setdefault(plan.name, q.qparams.dtype.name)
        sampled, l2 = quantize.sampled_l2(given, q)
        return replace(_quantized(plan, q), sampled=sampled, l2=l2)


def _quantized(plan: FieldPlan, q: quantize.Quantized) -> EncodedField:
    return EncodedField(
        layout=plan.layout(q.qparams.dtype.name),
        arrays={"codes": q.codes, "qparams": q.qparams},
        exact_index=q.exact_index,
        exact_values=dtypes.to_stored(q.exact_values),
        error_bound=q.error_bound,
    )


def _raw(plan: FieldPlan, values: Array) -> EncodedField:
    stored = dtypes.to_stored(dlpack.on_host(values))
    return EncodedField(
        layout=plan.layout(),
        arrays={"values": stored},
        exact_index=np.zeros(0, np.int64),
        exact_values=stored[:0],
    )


def _narrowed(plan: FieldPlan, values: Array) -> EncodedField:
    narrowed, exact_index = quantize.narrow(dlpack.as_quantized(values), plan.stored)
    return EncodedField(
        layout=plan.layout(),
        arrays={"values": dtypes.to_stored(narrowed)},
        exact_index=exact_index,
        exact_values=dtypes.to_stored(np.ascontiguousarray(dlpack.on_host(values[exact_index]))),
    )


def join(pieces: Sequence[EncodedRows]) -> EncodedRows:
    """Pieces of one layout as one, in their order."""
    if len(pieces) == 1:
        return pieces[0]
    starts = np.cumsum([0, *(piece.count for piece in pieces)])
    fields = [_join_field([piece.fields[i] for piece in pieces], starts) for i in range(len(pieces[0].fields))]
    rows = None if pieces[0].rows is None else np.concatenate([p.rows for p in pieces if p.rows is not None])
    return EncodedRows(count=int(starts[-1]), fields=fields, rows=rows)


def _join_field(parts: Sequence[EncodedField], starts: Iterable[int]) -> EncodedField:
    return EncodedField(
        layout=parts[0].layout,
        arrays={name: np.concatenate([p.arrays[name] for p in parts]) for name in parts[0].arrays},
        exact_index=np.concatenate([p.exact_index + start for p, start in zip(parts, starts, strict=False)]),
        exact_values=np.concatenate([p.exact_values for p in parts]),
        error_bound=max(p.error_bound for p in parts),
        sampled=np.concatenate([p.sampled + start for p, start in zip(parts, starts, strict=False)]),
        l2=np.concatenate([p.l2 for p in parts]),
    )


def cut(encoded: EncodedRows, low: int, high: int) -> EncodedRows:
    """Rows low..high-1 of them."""
    if low == 0 and high == encoded.count:
        return encoded
    rows = None if encoded.rows is None else encoded.rows[low:high]
    return EncodedRows(count=high - low, fields=[_cut_field(f, low, high) for f in encoded.fields], rows=rows)


def _cut_field(f: EncodedField, low: int, high: int) -> EncodedField:
    first, last = np.searchsorted(f.exact_index, [low, high])
    begin, end = np.searchsorted(f.sampled, [low, high])
    return EncodedField(
        layout=f.layout,
        arrays={name: array[low:high] for name, array in f.arrays.items()},
        exact_index=f.exact_index[first:last] - low,
        exact_values=f.exact_values[first:last],
        error_bound=f.error_bound,
        sampled=f.sampled[begin:end] - low,
        l2=f.l2[begin:end],
    )


def recut(pieces: Iterable[EncodedRows], count: int) -> Iterator[EncodedRows]:
    """Pieces of one layout, so many rows at a time; fewer only in the last one."""
    waiting: list[EncodedRows] = []
    missing = count
    for piece in pieces:
        low = 0
        while low < piece.count:
            high = min(low + missing, piece.count)
            waiting.append(cut(piece, low, high))
            missing -= high - low
            low = high
            if not missing:
                yield join(waiting)
                waiting, missing = [], count
    if waiting:
        yield join(waiting)


def copied(encoded: EncodedRows) -> EncodedRows:
    """The same without any memory of the caller's."""
    fields = [
        EncodedField(
            layout=f.layout,
            arrays={name: np.array(array) for name, array in f.arrays.items()},
            exact_index=f.exact_index,
            exact_values=np.array(f.exact_values),
            error_bound=f.error_bound,
        )
        for f in encoded.fields
    ]
    rows = None if encoded.rows is None else np.array(encoded.rows)
    return EncodedRows(count=encoded.count, fields=fields, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRows:
    """Rows of a small part that wait to be encoded together with others of the same plans."""

    count: int
    values: dict[str, Array]
    rows: Ids | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One part of a pool."""

    table: str
    first_row: int
    count: int
    columns: Sequence[int]
    recent: bool | Mask
    deleted: Ids

    @property
    def code(self) -> int:
        """How the part file says which rows are recent: none, all, or by bits (5.5)."""
        if isinstance(self.recent, bool):
            return int(self.recent)
        return 1 if self.recent.all() else 2 if self.recent.any() else 0


@dataclass(slots=True, kw_only=True)
class Pool:
    """Small parts that will share a block: of the same plans and yet to be encoded, or encoded in the same layout."""

    plans: Sequence[FieldPlan]
    members: list[Member] = field(default_factory=list)
    plain: list[PlainRows] = field(default_factory=list)
    encoded: deque[EncodedRows] = field(default_factory=deque)
    bytes: int = 0

    def taken(self) -> Iterator[EncodedRows]:
        """What was encoded when it came, piece by piece, each given away."""
        while self.encoded:
            yield self.encoded.popleft()

    def whole(self) -> EncodedRows:
        """What was not, encoded as one."""
        if not self.plain:
            return EncodedRows(count=0, fields=[], rows=None)
        values = {name: dlpack.concatenated([p.values[name] for p in self.plain]) for name in self.plain[0].values}
        listed = [p.rows for p in self.plain if p.rows is not None]
        rows = np.concatenate(listed) if listed else None
        return Encoder(plans=self.plans).encode(values, rows)
