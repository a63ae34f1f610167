"""Over which checkpoint the next one is laid, who decides so, and why (FORMAT.md HEA-2, COM-7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from checkrun_format.chain import History
from checkrun_format.errors import InvalidInputError
from checkrun_format.integers import whole
from checkrun_format.ledger import Ledger
from checkrun_format.manifest import Commit, PolicyNote
from checkrun_format.policy import BaseRule, BitRule, Past
from checkrun_format.reader import StoredCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Over which checkpoint to save, None for a base; and who decided so, and why."""

    below: StoredCheckpoint | None
    note: PolicyNote


class Chooser:
    """Decides for a writer, by its rules or as the caller says."""

    def __init__(self, history: History, ledger: Ledger, base_rule: BaseRule, bit_rule: BitRule) -> None:
        self._history = history
        self._ledger = ledger
        self._base_rule = base_rule
        self._bit_rule = bit_rule

    def named(self, parent: int | str | None) -> StoredCheckpoint | None:
        """The checkpoint that the caller names; None for a base, or if the policy is to decide.

        Raises
        ------
        InvalidInputError
            Nothing may be laid over it.
        """
        if parent is None or parent == "auto":
            return None
        origin = self._ledger.legal_origin()
        if origin is None:
            raise InvalidInputError(
                f"parent={parent!r}: this Run's state does not stem from the latest checkpoint; restore it first, or "
                "save a base"
            )
        chain = [below.sequence for below in self._ledger.chain(origin)]
        refusal = f"parent={parent!r} is not in the chain of the latest checkpoint: {chain}"
        number = origin.commit.sequence if parent == "latest" else whole(parent, refusal)
        if number not in chain:
            raise InvalidInputError(refusal)
        return self._history.get(number)

    def decide(self, parent: int | str | None, *, force_full: bool = False) -> Decided:
        """Over which checkpoint to save, and why; parent and `force_full` as of `Run.save`."""
        below, name, reason = self._choose(parent, force_full=force_full)
        bits = self._bit_rule.reason(self._ledger.restores())
        note = PolicyNote(name=name, reason=reason if bits is None else f"{reason}; {bits}")
        origin = self._ledger.legal_origin()
        if below is not None and origin is not None:
            chain = [commit for commit in self._ledger.chain(origin) if commit.sequence <= below.commit.sequence]
            spent = self._past(chain).increments
            note = msgspec.structs.replace(note, increments=len(spent), increments_bytes=sum(spent))
        return Decided(below=below, note=note)

    def _choose(self, parent: int | str | None, *, force_full: bool) -> tuple[StoredCheckpoint | None, str, str]:
        origin, rule = self._ledger.legal_origin(), self._base_rule
        if origin is None:
            first = self._ledger.latest is None
            why = "nothing is committed" if first else "this Run does not continue the latest checkpoint"
            return None, rule.name, f"a base: {why}"
        if force_full:
            return None, "caller", "a base: every row may have changed, as the caller said (force_full)"
        if parent is None:
            return None, "caller", "a base, as the caller said"
        named = self.named(parent)
        if named is not None:
            return named, "caller", f"over checkpoint {named.commit.sequence}, as the caller said"
        chain = self._ledger.chain(origin)
        decision = rule.decide(self._past(chain))
        below = None if decision.parent is None else origin
        if decision.parent == "base":
            below = self._history.get(chain[-1].sequence)
        return below, rule.name, decision.reason

    def _past(self, chain: Sequence[Commit]) -> Past:
        base = chain[-1]
        known = self._ledger.increments(base)
        sizes = [increment.bytes for increment in known]
        return Past(base_bytes=base.bytes, increments=(*earlier(base, known), *sizes), layers=len(chain))


def earlier(base: Commit, known: Sequence[Commit]) -> list[int]:
    """Sizes of the increments before those that are known, which are pruned: they count as equally large (COM-7)."""
    if not known:
        return []
    count, total = known[0].policy.increments, known[0].policy.increments_bytes
    if not isinstance(count, int) or not isinstance(total, int) or not 0 < count < known[0].sequence - base.sequence:
        return []
    return [total // count + (place < total % count) for place in range(count)]
