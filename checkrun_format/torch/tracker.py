"""Which rows changed since the last snapshot: one byte a row, set by hooks on the table's own device.

Hooks on modules note the rows that a forward reads. After a step the rows that gradients reached are noted, too: sparse
gradients name them, dense ones are looked through; large ones that lookups of the modules made only now and then.

A row's byte is 0 as long as nothing touched it, else the number of the optimizer step that it waited for when it was
last touched. So a snapshot can tell rows that were touched since the last step, whose change is yet to come: these stay
set. Numbers run from 2 to 255; then all that are set become 1, which is older than any.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import _is_functional_tensor, nn
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from checkrun_format.errors import InvalidInputError, TrackingWarning
from checkrun_format.torch.gradients import LookedUp, gradient_rows, is_cheap, reached
from checkrun_format.torch.lookups import FoundTable, Lookups, lookups_of
from checkrun_format.torch.optimizers import why_all_rows
from checkrun_format.torch.steps import StepHooks, uncompiled

_OLDEST: Final = 1
_LAST: Final = 255
_AUDITED_STEPS: Final = 3
_AUDIT_EVERY: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a snapshot took of a table's records.

    `rows` are the touched rows, ascending, int64 on the table's device; `whole` says why any row may have changed, None
    if only those did. `reached` are rows that have a gradient.
    """

    rows: torch.Tensor
    whole: str | None
    reached: torch.Tensor


class TouchedRows:
    """The records of one table.

    Attributes
    ----------
    bitmap : uint8 tensor (rows,)
        Not zero where a row was touched since the last snapshot; on the device of the table.
    whole : str or None
        Why any row may have changed.
    always : str or None
        Why any row may change in each step.
    by_gradient : bool
        Whether rows are taken from all gradients, because lookups were found that no hook sees.
    looked_up : LookedUp
        The gradients that lookups made, which hooks saw.
    """

    def __init__(
        self, found: FoundTable, states: Callable[[nn.Parameter], Sequence[torch.Tensor]], *, is_trained: bool
    ) -> None:
        self._is_trained = is_trained
        self.name = found.name
        self.parameter = found.parameter
        self.tracking = found.tracking
        self.always: str | None = "tables= says that any row may change" if found.tracking == "all" else None
        self.whole = self.always
        self.by_gradient = False
        self.looked_up = LookedUp(found.parameter)
        self._states = states
        self._number = _OLDEST + 1
        self._hold(torch.zeros(len(found.parameter), dtype=torch.uint8, device=found.parameter.device))
        self._noted: tuple[torch.Tensor, int] | None = None
        self._steps = 0
        self._seen: tuple[list[int], list[tuple[int, int]]] = ([], [])
        self._storages: list[StorageWeakRef] = []
        self.forget()

    # Touching ---------------------------------------------------------------------------------------------------------

    def touch(self, rows: torch.Tensor) -> None:
        """Note that rows were read by a forward, or reached by a gradient; they exist."""
        self._follow()
        if rows.is_nested:
            rows = rows.values()
        plain = not is_compiling() and type(rows) is torch.Tensor and rows.is_cpu
        if plain and self._host is not None and not _is_functional_tensor(rows):  # torch would export what is no memory
            self._host[np.from_dlpack(_Exported(rows))] = self._number
            self._noted = None if rows.is_inference() else (rows, rows._version)  # noqa: SLF001 - the only way
        else:
            self.bitmap[rows.reshape(-1).to(self.bitmap.device)] = self._current  # the rows may be of a replica

    def mark(self, rows: torch.Tensor) -> None:
        """Note that rows changed, or will with the next step of an optimizer, if there is one.

        Raises
        ------
        InvalidInputError
            No integers, or a row that is not there.
        """
        if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
            raise InvalidInputError(f"table {self.name!r}, mark: {rows.dtype} where row numbers are wanted")
        self._follow()
        if rows.numel():
            low, high = (int(end) for end in torch.aminmax(rows.to(torch.int64)))
            if low < 0 or high >= len(self.bitmap):
                wrong = low if low < 0 else high
                raise InvalidInputError(
                    f"table {self.name!r}, mark: row {wrong} is not in a table of {len(self.bitmap)} rows"
                )
            rows = rows.to(self.parameter.device, torch.int64)
            if self._is_trained:
                self.touch(rows)
            else:
                self.bitmap[rows.reshape(-1)] = _OLDEST

    def mark_all(self, reason: str) -> None:
        """Note that any row may have changed."""
        self.whole = self.whole or reason

    def stepped(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Note an optimizer step over a group that holds the table: what was touched so far has changed by now."""
        self._is_trained = True
        reason = why_all_rows(optimizer, group)
        if reason is not None:
            self.mark_all(reason)
        self._steps += 1
        if self._is_looked_through():
            self._touch_reached()
        elif self._steps <= _AUDITED_STEPS or self._steps % _AUDIT_EVERY == 0:
            self._audit(gradient_rows(self.parameter))
        self.looked_up.stepped()
        self._number += 1
        self._noted = None  # that was under the number before, which a snapshot forgets
        if self._number > _LAST:
            self.bitmap.clamp_(max=_OLDEST)
            self._number = _OLDEST + 1
        self._set_current(self._number)
        self.see()

    def _is_looked_through(self) -> bool:
        """Whether rows are taken from the gradient that is there now."""
        gradient = self.parameter.grad
        return self.by_gradient or gradient is None or is_cheap(gradient) or not self.looked_up.made(gradient)

    def _touch_reached(self) -> None:
        """Note the rows that have a gradient, whatever hooks saw; on a device nothing has to wait for it."""
        gradient = self.parameter.grad
        if gradient is None or self.whole is not None:  # then the next snapshot takes all
            return
        if gradient.layout == torch.sparse_coo:
            indices = gradient._indices()  # noqa: SLF001 - of an uncoalesced one, too
            if not self._has_noted(indices):
                self.touch(indices[0])
        else:
            self._follow()
            self.bitmap.masked_fill_(reached(gradient), self._current)

    def _has_noted(self, reached: torch.Tensor) -> bool:
        """Whether these are the rows noted last, in the same memory: `nn.EmbeddingBag` makes its gradient of them."""
        if self._noted is None:
            return False
        rows, version = self._noted  # it is held, so that nothing else can be where it is
        return (
            reached.data_ptr() == rows.data_ptr()
            and reached.numel() == rows.numel()
            and reached.dtype == rows.dtype
            and rows._version == version  # noqa: SLF001
            and reached.is_contiguous()
            and rows.is_contiguous()
        )

    def _audit(self, reached: torch.Tensor) -> None:
        """Look whether gradients reached rows that no hook saw."""
        if reached.numel() and self.whole is None and bool((self.bitmap[reached] == 0).any()):
            self.by_gradient = True
            self.mark_all("gradients reached rows past the hooks")
            missed = reached[self.bitmap[reached] == 0]
            warnings.warn(
                f"table {self.name!r}: a gradient reached row {int(missed[0])} ({len(missed)} such rows), which no "
                "lookup of its modules read: functional.embedding on the parameter, a module's forward() called "
                "directly, or a tied module. The next save stores it full; from now on rows are taken from the "
                "gradients, too, which takes a pass over dense ones in each step",
                TrackingWarning,
                stacklevel=4,
            )

    # Writes that no hook sees -----------------------------------------------------------------------------------------

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """The table and its state."""
        return self.parameter, *self._states(self.parameter)

    def _versions(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Which memory each is in; what becomes another with each write, but in place through `.data` or numpy."""
        memories, writes = [], []
        for tensor in self._tensors():
            is_strided = tensor.layout == torch.strided  # sparse ones are in several memories
            memories.append(tensor.untyped_storage()._cdata if is_strided else id(tensor))  # noqa: SLF001 - the only way
            version = -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - the only way
            writes.append((tensor.data_ptr() if is_strided else 0, version))
        return memories, writes

    def look(self) -> None:
        """Look whether something was written past the optimizers since the last look."""
        if self._versions() != self._seen:
            self.mark_all("it was written to outside of an optimizer step")
            self.see()

    def see(self) -> None:
        """All that was written so far is accounted for."""
        versions = self._versions()
        if versions[0] != self._seen[0]:  # held weakly, no address comes back in another use
            strided = [tensor for tensor in self._tensors() if tensor.layout == torch.strided]
            self._storages = [StorageWeakRef(t.untyped_storage()) for t in strided]  # type: ignore[no-untyped-call]
        self._seen = versions

    @property
    def waits_from(self) -> int:
        """The lowest number of rows whose change is yet to come."""
        return self._number

    # Snapshots --------------------------------------------------------------------------------------------------------

    def changed(self) -> Taken:
        """What changed since the last snapshot."""
        self._follow()
        self.look()
        if self.parameter.device.type == "cpu" and self.parameter.untyped_storage().is_shared():
            self.mark_all("it is in memory that other processes share, which may train it as well")
        waiting = gradient_rows(self.parameter)
        if self._is_looked_through():
            self.touch(waiting)
        else:
            self._audit(waiting)
        return Taken(rows=_nonzero(self.bitmap), whole=self.whole, reached=waiting)

    def clear(self, taken: Taken) -> None:
        """Forget what a snapshot took, apart from rows whose change is yet to come."""
        _keep_from(self.bitmap, self.waits_from)
        if taken.reached.numel():  # as long as a gradient is there, the next step may use it
            self.bitmap[taken.reached] = self.bitmap[taken.reached].clamp_(min=_OLDEST)
        self.whole = self.always
        self._steps = 0  # backward passes may come of graphs from before, whose rows are forgotten now
        self.looked_up.forget()

    def put_back(self, taken: Taken) -> None:
        """Put back what a snapshot took that was not saved."""
        self._follow()
        rows = taken.rows.to(self.bitmap.device)
        rows = rows[rows < len(self.bitmap)]
        self.bitmap[rows] = self.bitmap[rows].clamp_(min=_OLDEST)
        self.whole = self.whole or taken.whole

    def forget(self) -> None:
        """Nothing has changed: the table was just read from a checkpoint."""
        self._follow()
        self.bitmap.zero_()
        self._noted = None
        self.looked_up.forget(all_rows=True)
        self.bitmap[gradient_rows(self.parameter)] = _OLDEST
        self.whole = self.always
        self.see()

    def _follow(self) -> None:
        """Follow the table to another device, or to another number of rows."""
        if self.bitmap.device != self.parameter.device:
            self._hold(self.bitmap.to(self.parameter.device))
        if self.bitmap.shape[0] != self.parameter.shape[0]:  # in each lookup; `len` takes four times as long
            bitmap = self.bitmap.new_zeros(len(self.parameter))
            both = min(len(bitmap), len(self.bitmap))
            bitmap[:both] = self.bitmap[:both]
            self._hold(bitmap)
            self.mark_all("it has another number of rows")

    def _hold(self, bitmap: torch.Tensor) -> None:
        """Have the records here; on the CPU numpy writes them, which takes less than half of what torch takes."""
        self.bitmap = bitmap
        self._host = bitmap.numpy() if bitmap.is_cpu else None
        self._current = torch.tensor(self._number, dtype=torch.uint8, device=bitmap.device)
        self._set_current: Callable[[int], Any] = self._current.numpy().fill if bitmap.is_cpu else self._current.fill_


class _Exported:
    """A tensor on the CPU, for `np.from_dlpack`, which takes several times as long with the tensor itself.

    Torch may resize the tensor again, unlike after `tensor.numpy()`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU


def _nonzero(bitmap: torch.Tensor) -> torch.Tensor:
    """Places that are not zero. On the CPU by numpy: it wakes no threads, which cost more than this takes."""
    if bitmap.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(bitmap.numpy() != 0))  # of bool it takes a third of the time
    return torch.nonzero(bitmap).squeeze(1)


def _keep_from(bitmap: torch.Tensor, number: int) -> None:
    """Set every byte to zero that is below `number`."""
    if bitmap.device.type == "cpu":
        values = bitmap.numpy()
        np.multiply(values, values >= number, out=values)
    else:
        bitmap.mul_(bitmap >= number)


class Hook:
    """A hook on a module: notes which rows a forward reads. In a copy of the module, or one from a file, it idles."""

    def __init__(self, lookups: Lookups | None = None) -> None:
        self.lookups = lookups
        self.tables: dict[str, TouchedRows] = {}

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:  # noqa: ARG002 - as torch calls it
        """Where the forward itself writes: notice what was written before it."""
        for table in self.tables.values():
            table.look()

    def after(
        self,
        module: nn.Module,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        output: Any,
    ) -> None:
        """Note the rows; without gradients none of them changes, unless the forward renormalizes them."""
        lookups = self.lookups
        if lookups is None or not (torch.is_grad_enabled() or lookups.renormalizes):
            return
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return  # what is made there is another model, without hooks
        for local, rows in lookups.rows(arguments, named).items():
            table = self.tables.get(local)
            if table is not None and (table.parameter.requires_grad or lookups.renormalizes):
                try:
                    table.touch(rows)
                    if not (getattr(module, "sparse", False) or is_cheap(table.parameter) or is_compiling()):
                        table.looked_up.expect(output)
                except RuntimeError:  # within vmap, grad and the like nothing outside can be written
                    table.mark_all("it was looked up within a transform of torch.func")
                if lookups.renormalizes:
                    table.see()


class Tracker:
    """The records of all tables of a model, and the hooks that keep them.

    Parameters
    ----------
    found : sequence of FoundTable
    states : callable
        Gives the tensors of the optimizers' state of a parameter.
    optimizers : optimizers
        Those that are known; steps of all others are seen, too.
    """

    def __init__(
        self,
        found: Sequence[FoundTable],
        states: Callable[[nn.Parameter], Sequence[torch.Tensor]] = lambda _: (),
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        trained = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self.tables = {t.name: TouchedRows(t, states, is_trained=t.parameter in trained) for t in found}
        self._of = {table.parameter: self.tables[table.name] for table in found}
        self._handles: list[Any] = []
        self._groups: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[tuple[int, TouchedRows]]]] = (
            weakref.WeakKeyDictionary()
        )
        self._hook_modules(found)
        self._handles += [table.looked_up for table in self.tables.values()]
        weakref.finalize(self, _remove, self._handles)
        this = weakref.ref(self)  # hooks on all optimizers of the process must not keep a model alive
        self._steps: weakref.WeakKeyDictionary[Optimizer, StepHooks] = weakref.WeakKeyDictionary()
        meet = uncompiled(lambda optimizer, *_: _call(this, Tracker._meet, optimizer))
        self._handles.append(register_optimizer_step_pre_hook(meet))

    def _hook_modules(self, found: Sequence[FoundTable]) -> None:
        hooks: dict[nn.Module, Hook] = {}
        for table in found:
            for module, local in table.modules:
                if module not in hooks:
                    hooks[module] = Hook(lookups_of(module))
                hooks[module].tables[local] = self.tables[table.name]
        for module, hook in hooks.items():
            if hook.lookups is not None and hook.lookups.renormalizes:
                self._handles.append(module.register_forward_pre_hook(hook.before))
            self._handles.append(module.register_forward_hook(hook.after, with_kwargs=True))

    def add(self, records: Mapping[str, TouchedRows], handles: Iterable[Any]) -> None:
        """Records that are kept by other hooks, and these."""
        self.tables |= records
        self._handles += handles

    def close(self) -> None:
        """Take all hooks off."""
        _remove(self._handles)

    def changed(self) -> dict[str, Taken]:
        """What changed since the last snapshot, by table."""
        return {name: table.changed() for name, table in self.tables.items()}

    def clear(self, taken: Mapping[str, Taken]) -> None:
        """Forget what a snapshot took, apart from rows whose change is yet to come."""
        for name, some in taken.items():
            self.tables[name].clear(some)

    def put_back(self, taken: Mapping[str, Taken]) -> None:
        """Put back what was not saved."""
        for name, some in taken.items():
            self.tables[name].put_back(some)

    def take_from_gradients(self) -> None:
        """Note rows that gradients reach, too: with replicas they come from other ranks' lookups as well."""
        for table in self.tables.values():
            table.by_gradient = True

    def mark_all(self, reason: str, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Note that any row of the tables among these parameters, by default of all tables, may have changed."""
        for table in self.tables.values() if parameters is None else self._tables_of(parameters):
            table.mark_all(reason)

    def strangers(self, known: Iterable[Optimizer]) -> Iterator[tuple[str, str]]:
        """Optimizers that have trained tables and are none of `known`: the class, and a table of which it has state."""
        states = [id(optimizer.state) for optimizer in known]  # wrappers share it
        for optimizer, (_, held) in list(self._groups.items()):
            kept = [table.name for _, table in held if optimizer.state.get(table.parameter)]
            if kept and id(optimizer.state) not in states:
                yield type(optimizer).__name__, kept[0]

    def _tables_of(self, parameters: Iterable[nn.Parameter]) -> Iterator[TouchedRows]:
        return (self._of[parameter] for parameter in parameters if parameter in self._of)

    def _held(self, optimizer: Optimizer) -> list[tuple[int, TouchedRows]]:
        """The tables of an optimizer, with the places of their groups."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        known = self._groups.get(optimizer)
        if known is None or known[0] != sizes:
            held = [
                (place, table)
                for place, group in enumerate(optimizer.param_groups)
                for table in self._tables_of(group["params"])
            ]
            self._groups[optimizer] = (sizes, held)
            return held
        return known[1]

    def _meet(self, optimizer: Optimizer) -> None:
        """Have hooks of our own on an optimizer of tables, within those that it has by now."""
        if not self._held(optimizer):
            return
        if optimizer not in self._steps:
            this = weakref.ref(self)
            self._steps[optimizer] = StepHooks(
                optimizer,
                lambda optimizer: _call(this, Tracker._before_step, optimizer),
                lambda optimizer: _call(this, Tracker._after_step, optimizer),
            )
            self._handles.append(self._steps[optimizer])
        self._steps[optimizer].move_in(optimizer)

    def _before_step(self, optimizer: Optimizer) -> None:
        for _, table in self._held(optimizer):
            table.look()

    def _after_step(self, optimizer: Optimizer) -> None:
        for place, table in self._held(optimizer):
            table.stepped(optimizer, optimizer.param_groups[place])


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _call(tracker: weakref.ref[Tracker], method: Callable[[Tracker, Optimizer], None], optimizer: Optimizer) -> None:
    alive = tracker()
    if alive is not None:
        method(alive, optimizer)
