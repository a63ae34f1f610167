"""The decisions that Check-N-Run makes: when to take a base, and how many bits (its sections 2 and 4)."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, SupportsFloat, TypeAlias

import numpy as np

from checkrun_format import dtypes
from checkrun_format.errors import InvalidInputError
from checkrun_format.state import FieldSpec, Inherit

PolicyName: TypeAlias = Literal["full", "one-shot", "consecutive", "intermittent"]
POLICIES: tuple[str, ...] = ("full", "one-shot", "consecutive", "intermittent")

FieldBits: TypeAlias = "int | Mapping[str, int | None] | None"
Bits: TypeAlias = "FieldBits | Mapping[str, FieldBits] | Literal['auto']"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Base, or over which parent; and the reason as a sentence."""

    parent: Literal["base", "latest"] | None
    """None: take a base. `base`: over the base of the latest chain. `latest`: over the latest checkpoint."""
    reason: str


def decide(policy: str, base_bytes: int, increments: Sequence[int]) -> Decision:
    """Decide how the next checkpoint is stored.

    Parameters
    ----------
    policy : str
        One of `POLICIES`.
    base_bytes, increments
        Bytes of the base of the latest chain, and of the increments since then, oldest first.

    Notes
    -----
    `intermittent` (Check-N-Run, NSDI'22): with S_i the size of increment i over that of the base, take a base next iff
    1 + S_1 + ... + S_i <= (i + 1) * S_i.
    """
    if policy == "full":
        return Decision(parent=None, reason="the policy takes a base every time")
    if policy == "consecutive":
        return Decision(parent="latest", reason="over the latest checkpoint, as the policy says")
    if policy == "one-shot":
        return Decision(parent="base", reason="over the base, as the policy says")
    if not increments:
        return Decision(parent="base", reason="the first increment over the base")
    sizes = [size / base_bytes for size in increments]
    spent, ahead = 1 + sum(sizes), (len(sizes) + 1) * sizes[-1]
    sums = f"1 + S1 + ... + S{len(sizes)} = {spent:.3f}, {len(sizes) + 1} * S{len(sizes)} = {ahead:.3f}"
    if spent <= ahead:
        return Decision(parent=None, reason=f"a new base pays: {sums}")
    return Decision(parent="base", reason=f"another increment pays: {sums}")


def check_policy(policy: object) -> str:
    """Accept a policy's name."""
    if policy not in POLICIES:
        raise InvalidInputError(f"policy {policy!r}; one of {', '.join(POLICIES)}")
    return str(policy)


def recommended_bits(expected_restores: float) -> int:
    """Bits for a number of expected restores L: 2 up to 1, 3 up to 3, 4 up to 20, else 8 (Check-N-Run, section 4)."""
    for limit, bits in ((1, 2), (3, 3), (20, 4)):
        if expected_restores <= limit:
            return bits
    return 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BitRule:
    """How many bits each field of each table gets.

    Parameters
    ----------
    bits : None, 1..8, "auto", or mapping
        None: raw. A number: the field `weight`. A mapping: table name or pattern (`*`, `?`) to None, a number, or a
        mapping of field name to these; an exact name goes before patterns, patterns in their order; a table that
        matches none is raw.
    expected_restores : float, optional
        For "auto": restores expected over the whole run.
    """

    bits: Bits
    expected_restores: float | None = None

    def __post_init__(self) -> None:
        if self.bits == "auto":
            expected: object = self.expected_restores
            if isinstance(expected, bool) or not isinstance(expected, SupportsFloat) or not float(expected) >= 0:
                raise InvalidInputError(f"bits='auto' needs expected_restores=, a number from 0 on, not {expected!r}")
            return
        if isinstance(self.bits, Mapping):
            for pattern, value in self.bits.items():
                if not isinstance(pattern, str):
                    raise InvalidInputError(f"bits: {pattern!r} is no table name or pattern")
                _check_field_bits(value, f"bits of tables {pattern!r}")
        else:
            _check_bits(self.bits, "bits")

    def for_field(self, table: str, override: FieldBits | Inherit, field: FieldSpec, restores: int) -> int | None:
        """Bits of one field, None for raw.

        Raises
        ------
        InvalidInputError
            A field is named that cannot be quantized.
        """
        chosen = self._for_table(table, restores) if isinstance(override, Inherit) else override
        _check_field_bits(chosen, f"table {table!r}, bits")
        fits = field.dtype in dtypes.FLOATING and field.columns is not None
        if not isinstance(chosen, Mapping):
            return None if chosen is None or field.name != "weight" or not fits else int(chosen)
        bits = chosen.get(field.name)
        if bits is not None and not fits:
            raise InvalidInputError(
                f"table {table!r}, field {field.name!r}: only floating-point fields (rows, columns) are quantized; "
                f"this one is {field.dtype}{' (rows,)' if field.columns is None else ''}"
            )
        return None if bits is None else int(bits)

    def _for_table(self, table: str, restores: int) -> FieldBits:
        if self.bits == "auto":
            expected = self.expected_restores or 0.0
            return 8 if restores > expected else recommended_bits(expected)
        if not isinstance(self.bits, Mapping):
            return self.bits
        if table in self.bits:
            return self.bits[table]
        for pattern, value in self.bits.items():
            if fnmatch.fnmatchcase(table, pattern.replace("[", "[[]")):  # a bracket is an ordinary character
                return value
        return None


def _check_field_bits(value: object, what: str) -> None:
    if isinstance(value, Mapping):
        for name, bits in value.items():
            _check_bits(bits, f"{what}, field {name!r}")
    else:
        _check_bits(value, what)


def _check_bits(bits: object, what: str) -> None:
    if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int | np.integer) or not 1 <= bits <= 8):
        raise InvalidInputError(f"{what}: {bits!r}; give None or a number from 1 to 8")
