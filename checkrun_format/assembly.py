"""A save by several writers as their coordinator sees it, from its claim to its commit (FORMAT.md 9.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from checkrun_format import layout
from checkrun_format.arranging import is_lossy
from checkrun_format.attempts import Attempts, LandedError
from checkrun_format.choosing import Decided
from checkrun_format.commit import (
    Claim,
    Content,
    NumberTakenError,
    check_ground,
    check_objects,
    commit,
    open_attempt,
    seal,
)
from checkrun_format.encodings import Encodings
from checkrun_format.errors import ConcurrentCommitError, InvalidInputError
from checkrun_format.extra import extra_json, parse_json
from checkrun_format.judging import Overlay
from checkrun_format.ledger import Ledger
from checkrun_format.manifest import Commit, TableEntry
from checkrun_format.staging import Outlook, Token
from checkrun_format.stores import Store
from checkrun_format.writer import PartList


class Assembly:
    """One save: claims the next number when it is made.

    Parameters
    ----------
    store : Store
    ledger : Ledger
    attempts : Attempts
    encodings : Encodings
    decided : Decided
        Over which checkpoint.
    step : int or None
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        attempts: Attempts,
        encodings: Encodings,
        *,
        decided: Decided,
        step: int | None,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._attempts = attempts
        self._encodings = encodings
        self._decided = decided
        self._step = step
        self._claim = Claim.of(ledger.head + 1)
        ledger.attempts[self._claim.attempt] = False
        self._group_bytes = open_attempt(store, self._claim)
        self._overlay = Overlay(store, ledger, decided.below)

    def token(self, writers: int, chunk_bytes: int) -> Token:
        """What the writers need to know."""
        below, latest = self._decided.below, self._ledger.latest
        rule, encoder = self._encodings.rule, self._encodings.encoder
        expected = rule.expected_restores
        return {
            "url": self._store.url,
            "durable": getattr(self._store, "durable", True),
            "sequence": self._claim.sequence,
            "attempt": self._claim.attempt,
            "writers": writers,
            "parent": None if below is None else below.commit.sequence,
            "predecessor": None if latest is None else latest.sequence,
            "chunk_bytes": chunk_bytes,
            "bits": rule.bits,
            "encoder": None if encoder is None else list(astuple(encoder)),
            "expected_restores": None if expected is None else float(expected),
            "restores": self._ledger.restores(),
            "qparams": self._encodings.pinned(),
        }

    def outlook(self, entry: TableEntry) -> Outlook:
        """How a save over the parent may store a table of which only some rows changed."""
        before = {other.name: other for other in self._ledger.latest_tables()}.get(entry.name)
        plans = self._encodings.of_fields(entry.name, entry.fields)
        quantized = is_lossy(plans)
        keeps = not quantized and entry.name not in self._ledger.lossy
        continues = keeps or self._ledger.as_before(entry.name, plans) is not None
        continues = continues and bool(self._ledger.continuing([entry]))
        continues = continues and before is not None and entry.kind == before.kind
        try:
            self._overlay.check_increment(entry, before)
            self._overlay.needed(entry)
            storage = "changed"
        except InvalidInputError:
            storage = "full"
        known_rows = 0 if before is None else before.rows or 0
        return Outlook(storage=storage, continues=continues, known_rows=known_rows, quantized=quantized)

    def commit(
        self, part_lists: list[PartList], unchanged: Sequence[str], dropped: Sequence[str], extra: Any, step: int | None
    ) -> Commit:
        """Check what the writers stored and commit it; see `staging.Save.commit`."""
        try:
            with self._attempts.losing(self._claim):
                return self._commit(part_lists, unchanged, dropped, extra, self._step if step is None else step)
        except LandedError as error:
            raise ConcurrentCommitError(
                f"number {self._claim.sequence} is taken by an earlier attempt of this Run, which had landed after "
                "all: begin the save anew"
            ) from error

    def _commit(
        self, part_lists: list[PartList], unchanged: Sequence[str], dropped: Sequence[str], extra: Any, step: int | None
    ) -> Commit:
        ledger, store, claim, below = self._ledger, self._store, self._claim, self._decided.below
        self._check_still_next()
        entries = self._overlay.entries(part_lists, unchanged, dropped)
        content = Content(
            step=step,
            tables=entries,
            policy=self._decided.note,
            parent=below,
            predecessor=ledger.latest,
            restores=ledger.restores(),
            dropped=ledger.dropped(ledger.continuing(entries)),
            **_extra_of(extra, part_lists),
        )
        alike = self._encodings.alike(entries, part_lists)
        check_objects(store, claim, part_lists)
        check_ground(store, below)
        document = seal(store, claim, content, part_lists, self._group_bytes)
        self._overlay.check_rows(claim, document)
        try:
            committed = commit(store, claim, document)
        except NumberTakenError as loss:
            self._attempts.adopt_or_lose(claim, loss)
            raise LandedError from loss
        ledger.saved(committed, settled=alike)
        ledger.lossy.update(e.name for e in entries if any(f.encoder is not None for f in e.fields))
        return committed

    def _check_still_next(self) -> None:
        self._ledger.check_may_save()
        if self._claim.sequence != self._ledger.head + 1:
            raise InvalidInputError(
                f"checkpoint {self._ledger.head} was committed since this save began: begin it anew"
            )


def _extra_of(extra: object, part_lists: Sequence[PartList]) -> dict[str, Any]:
    """The trainer's state, or where one of the writers has stored it."""
    spans = [part_list.extra for part_list in part_lists if part_list.extra is not None]
    if len(spans) + (extra is not None) > 1:
        raise InvalidInputError("extra is given twice: by one writer (put_extra), or to commit()")
    data = extra_json(extra)
    if len(data) > layout.MAX_INLINE_EXTRA:
        raise InvalidInputError(f"extra takes {len(data)} bytes; let one of the writers store it, by put_extra()")
    return {"extra": parse_json(data), "extra_blob": spans[0] if spans else None}
