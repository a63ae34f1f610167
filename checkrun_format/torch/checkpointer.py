"""The trainer's side of a run: saves and restores a model and its optimizers, and knows which rows changed."""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from checkrun_format.checkpoint import Checkpoint
from checkrun_format.errors import InvalidInputError, SaveCancelledError, TrackingWarning
from checkrun_format.run import Run, open_run
from checkrun_format.saving import Stage
from checkrun_format.state import ALL, State, Table
from checkrun_format.torch.content import Content, Stateful
from checkrun_format.torch.inspection import Inspection, Sample
from checkrun_format.torch.lookups import Tables, find_tables
from checkrun_format.torch.optimizers import Optimizers, named_optimizers
from checkrun_format.torch.pending import PendingSave
from checkrun_format.torch.readers import ReaderBudget
from checkrun_format.torch.snapshot import Copier
from checkrun_format.torch.tracker import Taken, Tracker

if TYPE_CHECKING:
    from checkrun_format.torch.distributed.replicas import ReplicatedRun

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
        What the trainer gave as `extra`.
    problems : tuple of text
        What did not fit, and was left as it was; empty after a strict restore.
    """

    checkpoint: Checkpoint
    step: int | None
    extra: Any
    problems: tuple[str, ...] = ()


class Checkpointer:
    """Saves and restores a model, its optimizers and more; records which rows change.

    Tables are found by themselves: the weight of each `nn.Embedding` and `nn.EmbeddingBag`, and of whatever
    `register_lookups` adds. A table has its name in the state dict and the fields `weight` and the optimizer's state of
    one value or row per row (`sum`, `exp_avg`, ...). All else are dense tensors, stored whole in each checkpoint.

    Parameters
    ----------
    run : Run, or address of one
        A run opened with mode "a", or what `open_run` takes: then `options` are its options (`policy`, `bits`, ...).
    model : nn.Module
    optimizer : Optimizer, sequence of them, or mapping of names to them
        Those that train the model. Their parameters must be the model's.
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
        Where torch.distributed is initialized: the ranks that train replicas of the model, and how long one waits for
        another. Each stores some of the rows, rows that any of them saw change are stored, rank 0 commits, and its
        `extra` counts. All ranks make, save, restore and close at the same steps. Give the model without its wrapper
        (`ddp.module`). For models that are cut over the ranks: `checkrun_format.torch.torchrec`, or the plug-in for
        torch.distributed.checkpoint.
    keep_memory : bool
        Keep the memory that `save_async` copies into: as much as the model takes, once a base was saved. A base then
        stalls training for less time, since touching fresh memory takes longer than the copy.

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
        keep_memory: bool = False,
        **options: Any,
    ) -> None:
        self._every = _checked_interval(every, budget)
        self._on_busy = _checked_on_busy(on_busy)
        found = find_tables(model, tables)
        self._content = Content(model, named_optimizers(optimizer), found, stateful or {})
        if isinstance(run, Run) and options:
            raise InvalidInputError(f"{min(options)}= belongs to open_run(), which opened this run")
        self._opened, self._closed = not isinstance(run, Run), False
        self.run: Run | ReplicatedRun = _of_ranks(run, options, process_group, timeout)
        optimizers = self._content.optimizers.optimizers.values()
        self.tracker = Tracker(found, self._content.optimizers.state_of, optimizers)
        if self._has_replicas:  # gradients reach rows that another rank looked up
            self.tracker.take_from_gradients()
        self._optimizer_handles = [
            optimizer.register_load_state_dict_post_hook(self._optimizer_loaded) for optimizer in optimizers
        ]
        self.step = 0
        """Steps done so far; of the restored checkpoint, to begin with."""
        self._budget = budget
        self._copier = Copier(keep=keep_memory)
        self._pending: PendingSave | None = None
        self._taken: dict[str, Taken] = {}
        self._dropped: tuple[str, ...] = ()
        self._continues = False
        self._origin: int | None = None
        self._sample: Sample | None = None
        self._sampled = False
        self._warned: set[str] = set()
        self._saved_at = time.monotonic()
        self._allow_readers()

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
        return list(self.tracker.tables)

    # Which rows changed -----------------------------------------------------------------------------------------------

    def mark(self, table: str, rows: Any) -> None:
        """Say that rows of a table changed, or will with the next step.

        Parameters
        ----------
        table : name
        rows : integers of any shape (tensor, array or list), or checkrun_format.ALL

        Raises
        ------
        InvalidInputError
        """
        if table not in self.tracker.tables:
            raise InvalidInputError(f"mark: there is no table {table!r}; there are {', '.join(self.tables) or 'none'}")
        if rows is ALL:
            self.tracker.tables[table].mark_all("mark() said so")
        else:
            try:
                given = torch.as_tensor(rows)
            except (TypeError, ValueError, RuntimeError) as error:
                raise InvalidInputError(f"table {table!r}, mark: no row numbers: {error}") from error
            self.tracker.tables[table].mark(given if given.numel() else given.to(torch.int64))

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
            self._put_back()
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
            return self.run.save(state, step=number, dropped=self._dropped, stage=stage, check=check)

        pending = PendingSave(number, save, lambda stored: self._copier.rows(stored, self._content.fields))
        try:
            self._take(state)
            self._pending = pending
            pending.start()
        except BaseException:
            pending.wait()
            self._put_back()
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
            return self.save_async(extra=extra) if self._is_due() else None
        finally:
            self._allow_readers()  # after a failure, too: whoever goes on must not wait for batches for ever

    def _is_due(self) -> bool:
        if isinstance(self._every, dt.timedelta):
            return self._agreed(time.monotonic() - self._saved_at >= self._every.total_seconds())
        return self._every is not None and self.step % self._every == 0

    @property
    def _has_replicas(self) -> bool:
        return not isinstance(self.run, Run)

    def _agreed(self, decision: object) -> bool:
        """What all ranks decide: rank 0's decision."""
        return bool(decision if isinstance(self.run, Run) else self.run.agreed(decision))

    @property
    def until_save(self) -> int | None:
        """Steps until `step_done` saves next; None if that is not known."""
        return self._every - self.step % self._every if isinstance(self._every, int) else None

    def _allow_readers(self) -> None:
        if self._budget is not None and self.until_save is not None:
            self._budget.allow(self.step + self.until_save)

    def _numbered(self, step: int | None) -> int:
        number = self.step if step is None else step
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
            raise InvalidInputError(f"step {step!r}; a number from 0 on")
        return int(number)

    def _state(self, extra: Any, copy: Copier | None) -> State:
        """The state to be saved; with `copy`, copied tensors (rows are copied when it is known which are stored)."""
        self._content.check()
        told = {"torch": self._content.document(), "extra": extra() if callable(extra) else extra}
        tensors = self._content.tensors()
        return State(
            tables={name: Table(self._content.fields(name)) for name in self.tables},
            tensors=tensors if copy is None else copy.tensors(tensors),
            extra=told,
        )

    def _take(self, state: State) -> None:
        """Take what changed since the last save, and tell the state."""
        self._saved_at = time.monotonic()
        if isinstance(self.run, Run) and self.run.origin != self._origin:
            self._dropped = ()  # of what was restored, where another save than one of these has landed
            self.tracker.mark_all("its Run has saved or restored something else meanwhile")
        self._taken = self.tracker.changed()
        self.tracker.clear(self._taken)  # whatever interrupts this: all of it is put back
        if self._sample is not None:
            for name in self._sample.missed(self._taken, self._content.fields):
                reason = "a sample of its rows changed without being noted; Checkpointer.check() tells more"
                self._taken[name] = dataclasses.replace(self._taken[name], whole=reason)
            self._sample, self._sampled = None, True
        elif not self._sampled:
            self._sample = Sample(self.tracker.tables, self._content.fields)
        for name, table in state.tables.items():
            taken = self._taken[name]
            table.changed = ALL if taken.whole is not None else taken.rows.cpu().numpy()
        for kind, name in self.tracker.strangers(self._content.optimizers.optimizers.values()):
            reason = f"{kind} trains table {name!r} and was not given to the Checkpointer: its state is not saved"
            if reason not in self._warned:
                self._warned.add(reason)
                warnings.warn(reason, TrackingWarning, stacklevel=4)
        if self._continues:
            self._warn()

    def _warn(self) -> None:
        """Say, once for each reason, which tables are stored full."""
        tables: dict[str, list[str]] = {}
        for name, taken in self._taken.items():
            if taken.whole is not None and self.tracker.tables[name].tracking != "all":
                tables.setdefault(taken.whole, []).append(name)
        for reason, names in tables.items():
            if reason not in self._warned:
                self._warned.add(reason)
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                warnings.warn(
                    f"stored full, table {', '.join(map(repr, names[:3]))}{more}: {reason}",
                    TrackingWarning,
                    stacklevel=4,
                )

    def _put_back(self) -> None:
        self.tracker.put_back(self._taken)
        self._taken = {}

    def _saved(self, checkpoint: Checkpoint) -> None:
        """What was taken is committed: go on from there."""
        self._continues, self._taken, self._dropped, self._origin = True, {}, (), checkpoint.sequence

    def _settle(self, on_busy: OnBusy) -> bool:
        """End the save that goes on, as told; False if it is left alone. What it failed of is raised once."""
        if self._closed:
            raise InvalidInputError("this Checkpointer is closed, and no longer knows which rows change: make another")
        pending = self._pending
        if pending is None:
            return True
        if on_busy == "skip" and not self._agreed(pending.done()):
            return False
        if on_busy == "cancel":
            pending.cancel()
        pending.wait()
        failure = pending.failure()
        if failure is None:
            self._saved(pending.result())
        else:
            self._put_back()
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
            if self._budget is not None:
                self._budget.close()
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
        """
        self._settle("wait")
        self._content.check()
        chosen = self._chosen(checkpoint, missing_ok=missing_ok, fallback=fallback)
        if chosen is None:
            return None
        extra, document = _taken_apart(chosen.extra)
        fit = self._content.fit(chosen, document)
        if strict and fit.problems:
            raise InvalidInputError(
                f"checkpoint {chosen.sequence} does not fit: {'; '.join(fit.problems[:10])}"
                + (f"; and {len(fit.problems) - 10} more" if len(fit.problems) > 10 else "")
                + " (strict=False reads what fits)"
            )
        self.tracker.mark_all("a restore has failed")  # as long as it has not succeeded
        out = self._content.prepare(fit, chosen, document)
        state = self.run.restore(chosen, tables=list(out.tables), out=out)
        self._content.finish(state, document)
        self._go_on_from(chosen, fit.partial)
        return Restored(checkpoint=chosen, step=chosen.step, extra=extra, problems=fit.problems)

    def _chosen(self, checkpoint: int | Checkpoint | None, *, missing_ok: bool, fallback: bool) -> Checkpoint | None:
        if fallback and checkpoint is not None:
            raise InvalidInputError("fallback=True looks for the checkpoint itself: give no number")
        if checkpoint is None and missing_ok and self.run.latest(default=None) is None:
            return None
        if fallback:
            return self.run.newest_sound()
        if checkpoint is None:
            latest: Checkpoint = self.run.latest()
            return latest
        return checkpoint if isinstance(checkpoint, Checkpoint) else self.run[checkpoint]

    def _go_on_from(self, checkpoint: Checkpoint, partial: Sequence[str]) -> None:
        for table in self.tracker.tables.values():
            table.forget()
        for name in partial:
            self.tracker.tables[name].mark_all("it was not restored as a whole")
        self._dropped = tuple(name for name in checkpoint.tables if name not in self.tracker.tables)
        self._sample, self._sampled = Sample(self.tracker.tables, self._content.fields), False
        self._continues, self._origin = True, checkpoint.sequence
        self.step = checkpoint.step or 0
        self._saved_at = time.monotonic()
        self._allow_readers()


def _of_ranks(
    run: Run | str | os.PathLike[str],
    options: Mapping[str, Any],
    process_group: dist.ProcessGroup | None,
    timeout: dt.timedelta,
) -> Run | ReplicatedRun:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
        from checkrun_format.torch.distributed.replicas import ReplicatedRun

        return ReplicatedRun(run, options, process_group, timeout)
    return run if isinstance(run, Run) else open_run(run, "a", **options)


def _taken_apart(extra: Any) -> tuple[Any, Mapping[str, Any]]:
    """What the trainer gave as `extra`, and the document beside it; none in a checkpoint of somebody else."""
    if isinstance(extra, dict) and isinstance(extra.get("torch"), dict) and "optimizers" in extra["torch"]:
        return extra.get("extra"), extra["torch"]
    return extra, {}


def _checked_interval(every: object, budget: object) -> int | dt.timedelta | None:
    whole = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if every is not None and not whole and not isinstance(every, dt.timedelta):
        raise InvalidInputError(f"every={every!r}; a number of steps from 1 on, a timedelta, or None")
    if budget is not None and not whole:
        raise InvalidInputError("budget= needs every= in steps: readers are told how many batches there are until then")
    assert every is None or isinstance(every, int | dt.timedelta)
    return every


def _checked_on_busy(on_busy: OnBusy) -> OnBusy:
    if on_busy not in ("wait", "skip", "cancel"):
        raise InvalidInputError(f"on_busy={on_busy!r}; 'wait', 'skip' or 'cancel'")
    return on_busy
