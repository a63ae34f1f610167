"""A checkpoint that a command commits from what is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checkrun_format.chain import History
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.cli.census import commit_object, kind_of
from checkrun_format.cli.text import count
from checkrun_format.manifest import Commit
from checkrun_format.run import Run, open_run
from checkrun_format.stores import open_store

AS_OBJECT = """
With --json: the new checkpoint, as of `checkrun ls`, and "run", "from"
(the checkpoint whose state it has), "layers" and "chain_bytes" of that one.
"""
"""For the help of the commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """What was committed, and the chain of the checkpoint whose state it has."""

    url: str
    committed: Commit
    chain: list[Commit]

    @classmethod
    def make(cls, url: str, act: Callable[[Run], Checkpoint]) -> Successor:
        """Open a run, let it commit a checkpoint, and look at that."""
        open_run(url)  # which creates nothing
        opened = open_run(url, "a")
        committed, history = act(opened).commit, History(open_store(url))
        source = committed.predecessor if committed.rollback_to is None else committed.rollback_to
        chain = [below.commit for below in history.chain(history.get(source or 0))]
        return cls(url=opened.url, committed=committed, chain=chain)

    def as_object(self) -> dict[str, Any]:
        """The same as JSON values."""
        committed = {"sequence": self.committed.sequence, "kind": kind_of(self.committed)}
        about = {"from": self.chain[0].sequence, "layers": len(self.chain), "chain_bytes": self._chain_bytes}
        return {"run": self.url, **committed, **commit_object(self.committed), **about}

    @property
    def _chain_bytes(self) -> int:
        return sum(commit.bytes for commit in self.chain)

    def description(self) -> str:
        """The same as a phrase."""
        size = self.committed.bytes
        parent = self.committed.parent
        kind = "a base" if parent is None else f"over {parent}"
        layers = f"{len(self.chain):,} layer{'s' * (len(self.chain) > 1)}"
        source = f"checkpoint {self.chain[0].sequence} ({layers}, {count(self._chain_bytes)} bytes)"
        return f"{kind} of {count(size)} bytes, with the state of {source}"
