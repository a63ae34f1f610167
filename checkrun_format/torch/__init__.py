"""Trainers in torch: find tables and their optimizer state, record which rows change, save and restore.

from checkrun_format.torch import Checkpointer

with Checkpointer("my-run", model, optimizer, bits=4, every=1000) as checkpointer:
    checkpointer.restore(missing_ok=True)
    for step, batch in enumerate(loader, checkpointer.step):
        train(batch)
        checkpointer.step_done(step)
"""

from checkrun_format.errors import SaveCancelledError
from checkrun_format.torch.checkpointer import Checkpointer, Restored
from checkrun_format.torch.inspection import Inspection, Missed
from checkrun_format.torch.lookups import Lookups, register_lookups
from checkrun_format.torch.optimizers import register_optimizer
from checkrun_format.torch.pending import PendingSave
from checkrun_format.torch.randomness import capture_rng, restore_rng
from checkrun_format.torch.readers import LimitedReader, ReaderBudget
from checkrun_format.torch.tracker import TouchedRows, Tracker

__all__ = [
    "Checkpointer",
    "Inspection",
    "LimitedReader",
    "Lookups",
    "Missed",
    "PendingSave",
    "ReaderBudget",
    "Restored",
    "SaveCancelledError",
    "TouchedRows",
    "Tracker",
    "capture_rng",
    "register_lookups",
    "register_optimizer",
    "restore_rng",
]
