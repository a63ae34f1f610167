"""The trainer's side of a run: saves and restores a model and its optimizers, and knows which rows changed."""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import torch
from torch import distributed as dist
from torch import nn

from checkrun_format.arranging import Stage
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.checkpoints import number_of
from checkrun_format.errors import CheckpointNotFoundError, InvalidInputError, SaveCancelledError
from checkrun_format.integers import whole
from checkrun_format.run import Run
from checkrun_format.state import State, Table
from checkrun_format.torch.changes import Changes
from checkrun_format.torch.content import Content, Stateful, Told
from checkrun_format.torch.inspection import Inspection
from checkrun_format.torch.lookups import Tables, find_tables
from checkrun_format.torch.optimizers import Optimizers
from checkrun_format.torch.pending import PendingSave
from checkrun_format.torch.readers import ReaderBudget
from checkrun_format.torch.schedule import Schedule
from checkrun_format.torch.snapshot import Copier
from checkrun_format.torch.tracker import Tracker
from checkrun_format.torch.trainers import Alone, opened, taken_apart

if TYPE_CHECKING:
    from checkrun_format.torch.distributed.ranked import RankedRun

OnBusy: TypeAlias = Literal["wait", "skip", "cancel"]

_LOG = logging.getLogger("checkrun_format")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was restored.

    Attributes
    ----------
    checkpoint : Checkpoint
    step : int or None
        Its step.
    extra
        What the trainer gave as `extra`; on several ranks, what this one gave if as many ranks saved, else rank 0.
    extras : tuple
        What each rank that saved gave.
    problems : tuple of text
        What did not fit, and was left as it was; empty after a strict restore.
    """

    checkpoint: Checkpoint
    step: int | None
    extra: Any
    extras: tuple[Any, ...]
    problems: tuple[str, ...] = ()


class Checkpointer:
    """Saves and restores a model, its optimizers and more; records which rows change.

    Tables are found by themselves: the weight of each `nn.Embedding` and `nn.EmbeddingBag`, and of whatever
    `register_lookups` adds. A table has its name in the state dict and the fields `weight` and the optimizer's state of
    one value or row per row (`sum`, `exp_avg`, ...). All else are dense tensors, stored whole in each checkpoint. Of a
    `DistributedModelParallel` of TorchRec, the tables that it cut over the ranks are found, with the state of their
    fused optimizers (`momentum1`, ...); see `checkrun_format.torch.torchrec.ShardedModel`.

    Parameters
    ----------
    run : Run, or address of one
        A run opened with mode "a", or what `open_run` takes: then `options` are its options (`policy`, `bits`, ...).
    model : nn.Module
        Without the wrapper of replicas (`ddp.module`); a `DistributedModelParallel` as it is.
    optimizer : Optimizer, sequence of them, or mapping of names to them
        Those that train the model. Their parameters must be the model's. TorchRec's `CombinedOptimizer` and
        `KeyedOptimizerWrapper` are taken apart; fused optimizers need not be given.
    tables : names, or mapping of names to how their rows change
        Names: just these are tables. A mapping is for parameters that are not found by themselves, or not right:
        `"lookups"`, `"marked"` (you name the rows with `mark`), `"all"` (any row may change in each step), `"dense"`
        (no table).
    every : int or timedelta
        `step_done` saves every so many steps, or as soon as so much time has passed.
    stateful : mapping of name to object
        Others with `state_dict` and `load_state_dict`, of JSON-like values: schedulers, gradient scalers.
    budget : ReaderBudget
        Told after each save how far readers may read: up to the next.
    on_busy : "wait", "skip" or "cancel"
        What `save_async` does while an earlier save goes on: wait for it, do without this one (rows stay noted), or
        give that one up.
    process_group, timeout
        Where torch.distributed is initialized: the ranks that train together, and how long one waits for another. Each
        stores some of the rows (of replicas a range, of a table that is cut over the ranks its shards), rows that any
        of them saw change are stored, and rank 0 commits. All ranks make, save, restore and close at the same steps.
        `extra` and `stateful` are each rank's own: restored by as many ranks, each gets back what it gave; by another
        number, all get what rank 0 gave, and `Restored.extras` has all. Any number of ranks restores, in any sharding.
        For models that are cut otherwise (FSDP, DTensor): the plug-in for torch.distributed.checkpoint.

    Raises
    ------
    InvalidInputError

    Examples
    --------
    ::

        with Checkpointer("my-run", model, optimizer, bits=4, every=1000) as checkpointer:
            checkpointer.restore(missing_ok=True)
            for step, batch in enumerate(loader, checkpointer.step):
                train(batch)
                checkpointer.step_done(step)
    """

    def __init__(
        self,
        run: Run | str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        tables: Tables = None,
        every: int | dt.timedelta | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        budget: ReaderBudget | None = None,
        on_busy: OnBusy = "wait",
        process_group: dist.ProcessGroup | None = None,
        timeout: dt.timedelta = dt.timedelta(minutes=10),
        **options: Any,
    ) -> None:
        self._schedule = Schedule(every, budget)
        self._on_busy = _checked_on_busy(on_busy)
        sharded, model, named = taken_apart(model, optimizer)
        found = find_tables(model, tables)
        self._content = Content(model, named, found, stateful or {}, sharded)
        if isinstance(run, Run) and options:
            raise InvalidInputError(f"{min(options)}= belongs to open_run(), which opened this run")
        if isinstance(run, Run) and run.mode != "a":
            raise InvalidInputError("the run is open for reading; open_run(..., mode='a') is for saving and restoring")
        self._opened, self._closed = not isinstance(run, Run), False
        self.run: Run | RankedRun = opened(run, options, process_group, timeout, sharded)
        self._ranks: Alone | RankedRun = Alone() if isinstance(self.run, Run) else self.run
        optimizers = self._content.optimizers.optimizers.values()
        self.tracker = Tracker(found, self._content.optimizers.state_of, optimizers)
        if sharded is not None:
            self.tracker.add(sharded.records, sharded.hooks())
        if not isinstance(self.run, Run):  # gradients reach rows that another rank looked up
            self.tracker.take_from_gradients()
        self._changes = Changes(self.tracker, sharded, self._content.fields)
        self._optimizer_handles = [
            optimizer.register_load_state_dict_post_hook(self._optimizer_loaded) for optimizer in optimizers
        ]
        self.step = 0
        """Steps done so far; of the restored checkpoint, to begin with."""
        self._copier = Copier()
        self._pending: PendingSave | None = None
        self._dropped: tuple[str, ...] = ()
        self._origin: int | None = None
        self._schedule.allow(self.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"besides, a save in the background failed: {failure}")  # which the trainer's must not hide
            _LOG.exception("a save in the background failed")

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""
        return self._changes.tables

    # Which rows changed -----------------------------------------------------------------------------------------------

    def mark(self, table: str, rows: Any) -> None:
        """Say that rows of a table changed, or will with the next step.

        Parameters
        ----------
        table : name
        rows : integers of any shape (tensor, array or list), or checkrun_format.ALL
            Of the whole table, on whichever rank they are.

        Raises
        ------
        InvalidInputError
        """
        self._changes.mark(table, rows)

    def check(self) -> Inspection:
        """Compare the rows noted with those that really change while some steps are trained.

        Prints what was missed, and why. Holds a copy of all tables meanwhile.

        Examples
        --------
        ::

            with checkpointer.check() as found:
                train(batch)
            assert not found.missed
        """
        return Inspection(self.tracker, self._content.fields)

    def _optimizer_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.tracker.mark_all("its optimizer loaded a state", parameters)

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(self, step: int | None = None, *, extra: Any = None) -> Checkpoint:
        """Save, and return once the checkpoint is committed. Training has to wait.

        Parameters
        ----------
        step : int
            By default `self.step`.
        extra : JSON value, or callable that gives one
            Whatever else the trainer needs to go on.

        Raises
        ------
        CheckrunError
            As `Run.save`; or why an earlier save in the background failed. Changed rows are kept for the next one.
        """
        self._settle("wait")
        state, number = self._state(extra, copy=None), self._numbered(step)
        try:
            self._take(state)
            checkpoint = self.run.save(state, step=number, dropped=self._dropped)
        except BaseException:
            self._changes.put_back()
            raise
        self._saved(checkpoint)
        return checkpoint

    def save_async(
        self, step: int | None = None, *, extra: Any = None, on_busy: OnBusy | None = None
    ) -> PendingSave | None:
        """Begin a save, and return as soon as what it stores has been copied: training may go on.

        Parameters
        ----------
        step, extra
            As of `save`.
        on_busy : "wait", "skip" or "cancel"
            In place of the Checkpointer's own.

        Returns
        -------
        PendingSave or None
            None if it was skipped because an earlier one goes on.

        Raises
        ------
        CheckrunError
            Why this save was refused, or an earlier one failed.
        """
        if not self._settle(_checked_on_busy(on_busy or self._on_busy)):
            return None
        state, number = self._state(extra, copy=self._copier), self._numbered(step)

        def save(stage: Stage, check: Callable[[], None]) -> Checkpoint:
            try:
                return self.run.save(state, step=number, dropped=self._dropped, stage=stage, check=check)
            finally:
                self._copier.release()

        pending = PendingSave(number, save, lambda stored: self._copier.rows(stored, self._content.fields))
        try:
            self._take(state)
            self._pending = pending
            pending.start()
        except BaseException:
            pending.wait()
            self._changes.put_back()
            self._pending = None
            raise
        return pending

    def step_done(self, step: int, *, extra: Any = None) -> PendingSave | None:
        """Say that a step is done; begins a save if it is time, as `save_async` does.

        Parameters
        ----------
        step : int
            Number of the step, from 0 on; `self.step` is one more afterwards, and so is the checkpoint's.
        extra : JSON value, or callable that gives one
            Asked only if there is a save.
        """
        self.step = self._numbered(step) + 1
        try:
            if self._pending is not None and self._pending.done():
                self._settle("wait")
            due = self._schedule.is_due(self.step)
            due = self._ranks.agreed(due) if self._schedule.by_time else due
            return self.save_async(extra=extra) if due else None
        finally:
            self._schedule.allow(self.step)  # after a failure, too: whoever goes on must not wait for batches for ever

    @property
    def until_save(self) -> int | None:
        """Steps until `step_done` saves next; None if that is not known."""
        return self._schedule.until_save(self.step)

    def _numbered(self, step: int | None) -> int:
        number = self.step if step is None else step
        return whole(number, f"step {step!r}; a number from 0 on", least=0)

    def _state(self, extra: Any, copy: Copier | None) -> State:
        """The state to be saved; with `copy`, copied tensors (rows are copied when it is known which are stored)."""
        self._content.check()
        told = {"torch": self._content.document(), "extra": extra() if callable(extra) else extra}
        tensors = self._content.tensors()
        return State(
            tables={name: Table(self._content.fields(name)) for name in self.tracker.tables},
            tensors=tensors if copy is None else copy.tensors(tensors),
            extra=told,
        )

    def _take(self, state: State) -> None:
        self._schedule.begun()
        if isinstance(self.run, Run) and self.run.origin != self._origin:
            self._dropped = ()  # of what was restored, where another save than one of these has landed
            self.tracker.mark_all("its Run has saved or restored something else meanwhile")
        self._changes.take(state.tables)
        self._changes.warn_of_strangers(self._content.optimizers.optimizers.values())

    def _saved(self, checkpoint: Checkpoint) -> None:
        self._changes.saved()
        self._dropped, self._origin = (), checkpoint.sequence

    def _settle(self, on_busy: OnBusy) -> bool:
        """End the save that goes on, as told; False if it is left alone. What it failed of is raised once."""
        if self._closed:
            raise InvalidInputError("this Checkpointer is closed, and no longer knows which rows change: make another")
        pending = self._pending
        if pending is None:
            return True
        if on_busy == "skip" and not self._ranks.agreed(pending.done()):
            return False
        if on_busy == "cancel":
            pending.cancel()
        pending.wait()
        failure = pending.failure()
        if failure is None:
            self._saved(pending.result())
        else:
            self._changes.put_back()
        self._pending = None
        if failure is not None and not pending.reported and not isinstance(failure, SaveCancelledError):
            failure.add_note(f"in the save of step {pending.step}, which went on in the background")
            raise failure
        return True

    def close(self) -> None:
        """Wait for the save that goes on, have readers end, and take all hooks off.

        Raises
        ------
        CheckrunError
            Why that save failed.
        """
        if self._closed:
            return
        try:
            self._settle("wait")
        finally:
            self._closed = True
            self._schedule.close()
            self.tracker.close()
            for handle in self._optimizer_handles:
                handle.remove()
            if self._opened:
                self.run.close()

    # Restoring --------------------------------------------------------------------------------------------------------

    def restore(
        self,
        checkpoint: int | Checkpoint | None = None,
        *,
        strict: bool = True,
        missing_ok: bool = False,
        fallback: bool = False,
    ) -> Restored | None:
        """Read a checkpoint into the model and the optimizers as they are, and go on from there.

        Parameters
        ----------
        checkpoint : number or Checkpoint
            By default the latest.
        strict : bool
            Refuse a checkpoint that does not fit in each name, shape and dtype. False: read what fits; a table that
            grew is read into its first rows.
        missing_ok : bool
            Return None if there is no checkpoint yet, instead of raising.
        fallback : bool
            Take the newest checkpoint that is sound, as of `Run.restore`.

        Raises
        ------
        InvalidInputError
            It does not fit; nothing was changed.
        CheckpointNotFoundError
        DamagedError
            The model may hold anything.
        RankError
            Another rank failed; it says why.
        """
        self._settle("wait")
        self._content.check()
        chosen = self._chosen(checkpoint, missing_ok=missing_ok, fallback=fallback)
        if chosen is None:
            return None
        with self._ranks.together("restore"):
            told = Told.of(chosen.extra, self._ranks.rank, self._ranks.ranks)
            fit = self._content.fit(chosen, told)
            if strict:
                fit.refuse_problems(chosen.sequence)
        self.tracker.mark_all("a restore has failed")  # as long as it has not succeeded
        with self._ranks.together("restore"):
            self._content.restore(fit, chosen, told)
        self.run.restored_from(chosen)
        self._go_on_from(chosen, fit.partial)
        return Restored(
            checkpoint=chosen, step=chosen.step, extra=told.extra, extras=told.extras, problems=fit.problems
        )

    def _chosen(self, checkpoint: int | Checkpoint | None, *, missing_ok: bool, fallback: bool) -> Checkpoint | None:
        if checkpoint is not None:
            if fallback:
                raise InvalidInputError("fallback=True looks for the checkpoint itself: give no number")
            return self.run[number_of(checkpoint, "restore")]
        try:
            found: Checkpoint = self.run.newest_sound() if fallback else self.run.latest()
        except CheckpointNotFoundError:
            if missing_ok:
                return None
            raise
        return found

    def _go_on_from(self, checkpoint: Checkpoint, partial: Sequence[str]) -> None:
        self._changes.restored(partial)
        self._dropped = tuple(name for name in checkpoint.tables if name not in self.tables)
        self._origin = checkpoint.sequence
        self.step = checkpoint.step or 0
        self._schedule.begun()
        self._schedule.allow(self.step)


def _checked_on_busy(on_busy: OnBusy) -> OnBusy:
    if on_busy not in ("wait", "skip", "cancel"):
        raise InvalidInputError(f"on_busy={on_busy!r}; 'wait', 'skip' or 'cancel'")
    return on_busy
