"""The decisions that Check-N-Run makes: when to take a base, and how many bits (its sections 2 and 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat, TypeAlias

from checkrun_format import dtypes, layout
from checkrun_format.errors import InvalidInputError
from checkrun_format.integers import whole
from checkrun_format.state import FieldSpec, Inherit

FieldBits: TypeAlias = "int | Mapping[str, int | None] | None"
Bits: TypeAlias = "FieldBits | Mapping[str, FieldBits] | Literal['auto']"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a policy decides on: what the base of the latest chain cost, and each save since then.

    Parameters
    ----------
    base_bytes : int
        Bytes of the base: all its objects but the commit itself.
    increments : tuple of int
        The same of each increment since the base, oldest first. What a rollback abandoned is none of them, nor are
        rollbacks and takeovers: no training lies behind their bytes. Of those that are pruned only the sum may be
        known: they count as equally large.
    layers : int
        Checkpoints in the chain of the latest one, itself included: what a restore reads.
    """

    base_bytes: int
    increments: tuple[int, ...] = ()
    layers: int = 1

    @property
    def sizes(self) -> list[float]:
        """S_1 ... S_i: the increments over the size of the base."""
        return [size / self.base_bytes for size in self.increments]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Base, or over which parent; and the reason as a sentence, which `checkrun tree` shows."""

    parent: Literal["base", "latest"] | None
    """None: take a base. `base`: over the base of the latest chain. `latest`: over the latest checkpoint."""
    reason: str


Policy: TypeAlias = Callable[[Past], Decision]
"""Decides how the next checkpoint is stored, from nothing but the past; asked only where an increment is legal."""


def full(past: Past) -> Decision:  # noqa: ARG001 - as every policy
    """A base every time."""
    return Decision(parent=None, reason="the policy takes a base every time")


def one_shot(past: Past) -> Decision:  # noqa: ARG001
    """All that changed since one base: increments grow, a restore reads two checkpoints."""
    return Decision(parent="base", reason="over the base, as the policy says")


def consecutive(past: Past) -> Decision:  # noqa: ARG001
    """What changed since the latest checkpoint: increments are small, a restore reads all of them."""
    return Decision(parent="latest", reason="over the latest checkpoint, as the policy says")


def intermittent(past: Past) -> Decision:
    """One-shot, with a new base as soon as that is expected to pay.

    Notes
    -----
    Check-N-Run, NSDI'22: take a base next iff 1 + S_1 + ... + S_i <= (i + 1) * S_i. On the left is what i + 1 more
    checkpoints cost if the history since the base repeats itself after a new one, on the right what they cost if each
    increment is at least as large as the last.
    """
    sizes = past.sizes
    if not sizes:
        return Decision(parent="base", reason="the first increment over the base")
    spent, ahead = 1 + sum(sizes), (len(sizes) + 1) * sizes[-1]
    sums = f"1 + S1 + ... + S{len(sizes)} = {spent:.3f}, {len(sizes) + 1} * S{len(sizes)} = {ahead:.3f}"
    if spent <= ahead:
        return Decision(parent=None, reason=f"a new base pays: {sums}")
    return Decision(parent="base", reason=f"another increment pays: {sums}")


POLICIES: Mapping[str, Policy] = {
    "full": full,
    "one-shot": one_shot,
    "consecutive": consecutive,
    "intermittent": intermittent,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRule:
    """When a base is taken: as a policy says, but at the latest every so many checkpoints.

    Parameters
    ----------
    policy : name or callable
        One of `POLICIES`, or a policy of one's own.
    every : int, optional
        Most checkpoints from one base to the next, and so in a chain.
    """

    policy: str | Policy
    every: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.policy, str):  # `one_shot` is the function's name
            object.__setattr__(self, "policy", self.policy.replace("_", "-"))
        if not callable(self.policy) and (not isinstance(self.policy, str) or self.policy not in POLICIES):
            raise InvalidInputError(f"policy {self.policy!r}; one of {', '.join(POLICIES)}, or a callable")
        if self.every is not None:
            whole(self.every, f"every={self.every!r}; a number of checkpoints from 1 on, or None", least=1)

    @property
    def name(self) -> str:
        """The policy's name."""
        if not callable(self.policy):
            return self.policy
        known = [name for name, policy in POLICIES.items() if policy is self.policy]
        return known[0] if known else str(getattr(self.policy, "__name__", type(self.policy).__name__))

    def decide(self, past: Past) -> Decision:
        """Decide how the next checkpoint is stored.

        Raises
        ------
        InvalidInputError
            A policy of one's own returned something else than a Decision.
        """
        since = max(1 + len(past.increments), past.layers)
        if self.every is not None and since >= self.every:
            return Decision(parent=None, reason=f"a base every {self.every} checkpoints: {since} since the last")
        decision = (self.policy if callable(self.policy) else POLICIES[self.policy])(past)
        if (
            not isinstance(decision, Decision)
            or decision.parent not in (None, "base", "latest")
            or not isinstance(decision.reason, str)
        ):
            raise InvalidInputError(
                f"policy {self.name!r} returned {decision!r}; a Decision belongs here, its parent None, 'base' or "
                "'latest', its reason a sentence"
            )
        return decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How many restores to expect, from figures of failures (Check-N-Run, section 4).

    Parameters
    ----------
    probability : float
        That one node fails within one hour.
    nodes : int
        How many nodes train; each failure restarts all of them.
    hours : float
        How long the run will take.
    """

    probability: float
    nodes: int
    hours: float

    def __post_init__(self) -> None:
        for name, most in (("probability", 1.0), ("nodes", math.inf), ("hours", math.inf)):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, SupportsFloat) or not 0 <= float(value) <= most:
                raise InvalidInputError(f"Failures: {name}={value!r}; a number from 0 {'on' if most > 1 else 'to 1'}")

    def __float__(self) -> float:
        return float(self.probability) * float(self.nodes) * float(self.hours)


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
        None: raw. A number: the field `weight`. A mapping: field name to None or a number; table name or pattern (`*`,
        `?`) to None, which is the whole table, a number, or a mapping of field name to these. A table's own name goes
        before patterns, patterns in their order, and what the first that fits does not say of a field, its name says;
        a field that nothing is said of is raw. A table's own name may not name a field that the table lacks.
    expected_restores : number or Failures, optional
        For "auto": restores expected over the whole run.
    """

    bits: Bits
    expected_restores: SupportsFloat | None = None

    def __post_init__(self) -> None:
        if self.bits == "auto":
            expected: object = self.expected_restores
            if isinstance(expected, bool) or not isinstance(expected, SupportsFloat) or not float(expected) >= 0:
                raise InvalidInputError(
                    f"bits='auto' needs expected_restores=, not {expected!r}: a number from 0 on, or "
                    "checkrun_format.Failures(probability=, nodes=, hours=)"
                )
            return
        if isinstance(self.bits, Mapping):
            for pattern, value in self.bits.items():
                if not isinstance(pattern, str):
                    raise InvalidInputError(f"bits: {pattern!r} is no table name or pattern")
                _check_field_bits(value, f"bits[{pattern!r}]")
        else:
            _check_bits(self.bits, "bits")
        object.__setattr__(self, "bits", _plain(self.bits))

    @property
    def quantizes(self) -> bool:
        """Whether it gives bits to anything at all."""
        said = self.bits.values() if isinstance(self.bits, Mapping) else [self.bits]
        return any(any(value.values()) if isinstance(value, Mapping) else value for value in said)

    @property
    def _expected(self) -> float:
        return float(self.expected_restores or 0)

    def reason(self, restores: int) -> str | None:
        """Why "auto" chooses the bits that it does, None for other rules."""
        if self.bits != "auto":
            return None
        if restores > self._expected:
            return f"8 bits, restores: {restores}, expected: {self._expected:g}"
        return f"{recommended_bits(self._expected)} bits, restores expected: {self._expected:g}"

    def for_field(self, table: str, override: FieldBits | Inherit, field: FieldSpec, restores: int) -> int | None:
        """Bits of one field, None for raw.

        Raises
        ------
        InvalidInputError
            A field is named that cannot be quantized.
        """
        chosen = self._said(table, field.name, restores) if isinstance(override, Inherit) else override
        _check_field_bits(chosen, f"table {table!r}, bits")
        fits = can_be_quantized(field)
        if not isinstance(chosen, Mapping):
            return None if chosen is None or field.name != "weight" or not fits else int(chosen)
        bits = chosen.get(field.name)
        if bits is not None and not fits:
            raise InvalidInputError(
                f"table {table!r}, field {field.name!r}: only floating-point fields (rows, columns) are quantized; "
                f"this one is {field.dtype}{' (rows,)' if field.columns is None else ''}"
            )
        return None if bits is None else int(bits)

    def check_fields(self, table: str, fields: Collection[str]) -> None:
        """Refuse a field that is named for this very table, which lacks it; a pattern may be for other tables.

        Raises
        ------
        InvalidInputError
        """
        chosen = self.bits.get(table) if isinstance(self.bits, Mapping) else None
        unknown = set(chosen) - set(fields) if isinstance(chosen, Mapping) else None
        if unknown:
            raise InvalidInputError(
                f"bits of table {table!r}: the table has no field {min(unknown)!r}; it has {', '.join(fields)}"
            )

    def _said(self, table: str, field: str, restores: int) -> FieldBits:
        """What is said of a table, or else of fields of this name."""
        if self.bits == "auto":
            return 8 if restores > self._expected else recommended_bits(self._expected)
        if not isinstance(self.bits, Mapping):
            return self.bits
        said = self._said_of(table)
        if said is None or (field in said if isinstance(said, Mapping) else field == "weight"):
            return said
        by_name = self.bits.get(field)
        return None if isinstance(by_name, Mapping) else {field: by_name}

    def _said_of(self, table: str) -> FieldBits:
        assert isinstance(self.bits, Mapping)
        if table in self.bits:
            return self.bits[table]
        for pattern, value in self.bits.items():
            if layout.matches(table, pattern):
                return value
        return {}


def can_be_quantized(field: FieldSpec) -> bool:
    """Whether the values of a field can be codes."""
    return field.dtype in dtypes.FLOATING and field.columns is not None


def _plain(bits: Any) -> Any:
    """The same in numbers of Python, which JSON knows: tokens of saves by several writers carry it."""
    if isinstance(bits, Mapping):
        return {name: _plain(value) for name, value in bits.items()}
    return None if bits is None else int(bits)


def _check_field_bits(value: object, what: str) -> None:
    if isinstance(value, Mapping):
        for name, bits in value.items():
            _check_bits(bits, f"{what}, field {name!r}")
    else:
        _check_bits(value, what)


def _check_bits(bits: object, what: str) -> None:
    if bits is not None:
        whole(bits, f"{what}: {bits!r}; give None or a number from 1 to 8", 1, 8)
