"""Messages between ranks over the store of torch.distributed: no collectives, so from any thread, with a timeout."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
import uuid
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from checkrun_format.errors import CheckrunError, RankError, SaveCancelledError
from checkrun_format.manifest import Record

T = TypeVar("T")

_SHORTEST, _LONGEST = 0.001, 0.05
"""Seconds between two looks. A look does not block the store's other users, as waiting in it would."""


_RESULTS_KEPT = 100


class Failure(Record, frozen=True, kw_only=True, tag=True):
    """What a rank sends in place of its message."""

    rank: int
    message: str
    kind: str = ""
    missing: tuple[int, ...] = ()
    """Ranks that did not answer."""

    def error(self) -> CheckrunError:
        """What those who wait for the message raise."""
        if self.kind == SaveCancelledError.kind:
            return SaveCancelledError(f"rank {self.rank}: {self.message}")
        prefix = "" if self.message.startswith("rank ") else f"rank {self.rank} failed, nothing was committed: "
        return RankError(f"{prefix}{self.message}")


class Message(Record, frozen=True, kw_only=True, tag=True):
    """What a rank sends."""

    body: bytes


class Exchange:
    """The ranks of a group, and the saves that they do together, one after another.

    Making one is a collective. Every save has a number that rank 0 announces: a rank that missed one, because it raised
    before, takes part in the next.

    Parameters
    ----------
    group : ProcessGroup, optional
    timeout : timedelta
        How long a rank waits for another.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: dt.timedelta) -> None:
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._timeout = timeout.total_seconds()
        name: list[str | None] = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, group=group, group_src=0)
        self._prefix = f"checkrun/{name[0]}"
        self._store = _get_default_store()
        self._number = 0

    # One save after another -------------------------------------------------------------------------------------------

    def announce(self) -> int:
        """Begin the next save, as rank 0; its number."""
        self._forget(self._number - 1)
        self._number += 1
        self._store.set(f"{self._prefix}/head", str(self._number))
        return self._number

    def follow(self) -> int:
        """The number of the next save that rank 0 announces; not one that ended because this rank did not answer.

        Raises
        ------
        RankError
        """
        head = f"{self._prefix}/head"
        end = time.monotonic() + 2 * self._timeout
        pause = _SHORTEST
        while time.monotonic() < end:
            if self._is_there(head):
                number = int(self._store.get(head))
                if number > self._number and not self._missed(number):
                    self._number = number
                    return number
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        raise RankError(f"rank 0 did not begin a save within {2 * self._timeout:g} s: it died, hangs, or does not save")

    def _missed(self, number: int) -> bool:
        """Whether a save ended because this rank did not answer."""
        if not self._is_there(self._key(number, "result", 0)):
            return False
        ended = self._message(number, "result", 0)
        return isinstance(ended, Failure) and self.rank in ended.missing

    def _forget(self, number: int) -> None:
        """Remove the messages of a save that has ended: part lists may be large. How it ended can be read for long."""
        old = [self._key(number - _RESULTS_KEPT, "result", 0)]
        old += [self._key(number, what, rank) for what in ("report", "order", "parts") for rank in range(self.ranks)]
        for key in old:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(key)

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, number: int, what: str, body: object) -> None:
        """Send a message to all who wait for it."""
        self._send(number, what, Message(body=msgspec.msgpack.encode(body)))

    def send_failure(self, number: int, what: str, error: BaseException) -> None:
        """Send, in place of a message, why there is none."""
        told = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        missing = error.missing if isinstance(error, RankError) else ()
        kind = error.kind if isinstance(error, CheckrunError) else ""
        self._send(number, what, Failure(rank=self.rank, message=told, kind=kind, missing=missing))

    def _send(self, number: int, what: str, message: Message | Failure) -> None:
        self._store.set(self._key(number, what, self.rank), msgspec.msgpack.encode(message))  # type: ignore[arg-type]  # bytes, too

    def receive(self, number: int, what: str, kind: type[T], *, times: int = 2) -> T:
        """The message of rank 0.

        Raises
        ------
        RankError
            It failed, another did and it says so, or it did not answer.
        """
        return self._received(number, what, [0], kind, times)[0]

    def gather(self, number: int, what: str, kind: type[T]) -> list[T]:
        """The messages of all ranks.

        Raises
        ------
        RankError
            As soon as one failed; or one did not answer.
        """
        return self._received(number, what, range(self.ranks), kind, 1)

    def _received(self, number: int, what: str, ranks: Sequence[int], kind: type[T], times: int) -> list[T]:
        """The messages of some ranks, waiting `times` the timeout; the first failure ends it."""
        latest = time.monotonic() + times * self._timeout
        missing, found, pause = list(ranks), {}, _SHORTEST
        while True:
            for rank in list(missing):
                if self._is_there(self._key(number, what, rank)):
                    found[rank] = self._read(number, what, rank, kind)
                    missing.remove(rank)
            if not missing:
                return [found[rank] for rank in ranks]
            self._raise_failed(number)
            if time.monotonic() > latest:
                end = "whether the save was committed is not known" if what == "result" else "nothing was committed"
                error = RankError(
                    f"rank {', '.join(map(str, missing))} did not answer within {times * self._timeout:g} s: it died, "
                    f"hangs, or takes longer; {end}"
                )
                error.missing = tuple(missing)
                raise error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _raise_failed(self, number: int) -> None:
        """Raise why a save has ended without a commit."""
        if self._is_there(self._key(number, "result", 0)):
            ended = self._message(number, "result", 0)
            if isinstance(ended, Failure):
                raise ended.error()

    def _read(self, number: int, what: str, rank: int, kind: type[T]) -> T:
        message = self._message(number, what, rank)
        if isinstance(message, Failure):
            raise message.error()
        return msgspec.msgpack.decode(message.body, type=kind)

    def _message(self, number: int, what: str, rank: int) -> Message | Failure:
        data = self._store.get(self._key(number, what, rank))
        return msgspec.msgpack.decode(data, type=Message | Failure)

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise RankError(f"the store of torch.distributed is gone, and with it probably rank 0: {error}") from error

    def _key(self, number: int, what: str, rank: int) -> str:
        return f"{self._prefix}/{number}/{what}/{rank}"
