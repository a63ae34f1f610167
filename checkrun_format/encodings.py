"""How a writer encodes tables, and which it has encoded alike ever since: what is stored again gets the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from checkrun_format import quantize
from checkrun_format.alike import encoded_alike
from checkrun_format.blocks import FieldPlan
from checkrun_format.errors import InvalidInputError, UnquantizedWarning
from checkrun_format.ledger import Ledger
from checkrun_format.manifest import Field, TableEntry
from checkrun_format.policy import BitRule, FieldBits, can_be_quantized
from checkrun_format.quantize import Method
from checkrun_format.state import INHERIT, FieldSpec, Inherit, TableSource
from checkrun_format.writer import PartList


def field_plans(
    table: str,
    specs: Sequence[FieldSpec],
    starts: Mapping[str, int],
    *,
    rule: BitRule,
    bits: FieldBits | Inherit,
    encoders: Mapping[str, Method],
    encoder: Method | None,
    store_as: Mapping[str, str],
    restores: int,
) -> list[FieldPlan]:
    """How each field is to be encoded; by `encoder` where `encoders` has none for it.

    Raises
    ------
    InvalidInputError
        Bits for a field that cannot be quantized, or both bits and store_as.
    """
    if isinstance(bits, Mapping):
        unknown = set(bits) - {spec.name for spec in specs}
        if unknown:
            raise InvalidInputError(f"table {table!r}, bits: the table has no field {min(unknown)!r}")
    plans = []
    for spec in specs:
        chosen = rule.for_field(table, bits, spec, restores)
        narrow = store_as.get(spec.name)
        if chosen is not None and narrow is not None:
            raise InvalidInputError(f"table {table!r}, field {spec.name!r}: both bits and store_as; give one")
        method = None if chosen is None else quantize.method(encoders.get(spec.name, encoder), chosen)
        if spec.device is not None and method is not None and method.name == "torch_compat":
            raise InvalidInputError(
                f"table {table!r}, field {spec.name!r}: torch_compat encodes arrays on the CPU, not on {spec.device}"
            )
        plans.append(
            FieldPlan(
                name=spec.name,
                dtype=spec.dtype,
                columns=spec.columns,
                start=starts.get(spec.name, 0),
                bits=chosen,
                encoder=method,
                store_as=narrow,
                device=spec.device,
            )
        )
    return plans


class Encodings:
    """The plans of a writer's tables.

    Parameters
    ----------
    ledger : Ledger
        Knows how tables were encoded before.
    rule : BitRule
    encoder : Method or None
        Where a table names none; None: the default of the width.
    """

    def __init__(self, ledger: Ledger, rule: BitRule, encoder: Method | None) -> None:
        self._ledger = ledger
        self.rule = rule
        self.encoder = encoder

    def of_sources(self, sources: Mapping[str, TableSource]) -> dict[str, list[FieldPlan]]:
        """How tables are encoded, as they and the run say.

        Raises
        ------
        InvalidInputError
            A field is named that a table lacks, or that cannot be encoded so.

        Warns
        -----
        UnquantizedWarning
            The run's bits fit no field, although one could be quantized.
        """
        plans = {name: self._of_source(source) for name, source in sources.items()}
        heirs = [source for source in sources.values() if isinstance(source.bits, Inherit)]
        if self.rule.quantizes and not any(plan.bits for source in heirs for plan in plans[source.name]):
            left = [
                f.name
                for source in heirs
                for f in source.fields
                if can_be_quantized(f) and f.name not in source.store_as
            ]
            if left:
                _warn_of_unused_bits(self.rule, min(left))
        return plans

    def _of_source(self, source: TableSource) -> list[FieldPlan]:
        if isinstance(source.bits, Inherit):
            self.rule.check_fields(source.name, [field.name for field in source.fields])
        return field_plans(
            source.name,
            source.fields,
            {},
            rule=self.rule,
            bits=source.bits,
            encoders=source.encoders,
            encoder=self.encoder,
            store_as=source.store_as,
            restores=self._ledger.restores(),
        )

    def of_fields(self, name: str, fields: Iterable[Field | FieldPlan]) -> list[FieldPlan]:
        """How the run encodes whole rows of a table that it knows these fields of; in the order of their names."""
        return field_plans(
            name,
            sorted((FieldSpec(name=f.name, dtype=f.dtype, columns=f.columns) for f in fields), key=lambda f: f.name),
            {},
            rule=self.rule,
            bits=INHERIT,
            encoders={},
            encoder=self.encoder,
            store_as={},
            restores=self._ledger.restores(),
        )

    def settled(
        self, entries: Sequence[TableEntry], plans: Mapping[str, Sequence[FieldPlan]]
    ) -> dict[str, list[FieldPlan]]:
        """The tables that are encoded alike since they were stored full, by the qparams that were then chosen."""
        found = {}
        for entry in entries:
            chosen = self._ledger.as_before(entry.name, plans[entry.name])
            if entry.storage == "full":
                told = {f.name: f.encoder or {} for f in entry.fields}
                chosen = [f.having(qparams=told[f.name].get("qparams")) for f in plans[entry.name]]
                if any(f.bits is not None and f.qparams is None for f in chosen):
                    continue
            if chosen is not None:
                found[entry.name] = chosen
        return found

    def alike(self, entries: Sequence[TableEntry], part_lists: Sequence[PartList]) -> dict[str, list[FieldPlan]]:
        """The tables that all writers encoded alike, and as they have been since they were stored full."""
        found = {}
        for entry in entries:
            plans: list[FieldPlan] | None = self.of_fields(entry.name, entry.fields)
            if entry.storage != "full":
                plans = self._ledger.as_before(entry.name, plans or ())
            plans = None if plans is None else encoded_alike(entry.name, plans, part_lists)
            if plans is not None:
                found[entry.name] = plans
        return found

    def pinned(self) -> dict[str, dict[str, str]]:
        """The dtype of qparams by which writers encode rows to the same bits as before, by table and field."""
        found = {}
        for name, settled in self._ledger.settled.items():
            plans = self._ledger.as_before(name, self.of_fields(name, settled)) or ()
            found[name] = {plan.name: plan.qparams for plan in plans if plan.qparams is not None}
        return found


def _warn_of_unused_bits(rule: BitRule, example: str) -> None:
    warnings.warn(
        f"bits={rule.bits!r} fits no field of any table: all of them are stored raw. A number is for fields named "
        f"'weight'; others are given by their names, as in bits={{{example!r}: 8}}",
        UnquantizedWarning,
        stacklevel=6,
    )
