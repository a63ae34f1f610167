"""A save that goes on while its trainer trains."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

from checkrun_format.arranging import Stored
from checkrun_format.state import State
from checkrun_format.testing.choices import Interrupted


def save_in_the_background(
    run: Any, state: State, options: dict[str, Any], train: Callable[[], object], cancel_at: int
) -> Any:
    """Save a state whose arrays are overwritten as soon as what is to be stored was copied.

    Parameters
    ----------
    run : Run
    state : State
    options : dict
        Of `Run.save`.
    train : callable
        Called then, while the save goes on.
    cancel_at : int
        The save is given up at its so many-th look whether it should be, by an `Interrupted`; never if 0.

    Returns
    -------
    Checkpoint
        What the save raised is raised here.
    """
    rows = {name: copy.deepcopy(dict(table.fields)) for name, table in state.tables.items()}
    staged, looks = threading.Event(), iter(range(1, cancel_at))
    ended: dict[str, Any] = {}

    def stage(stored: Mapping[str, Stored]) -> dict[str, dict[str, Any]]:
        given = {name: {f: a[what.rows].copy() for f, a in rows[name].items()} for name, what in stored.items()}
        staged.set()
        return given

    def check() -> None:
        if cancel_at and next(looks, None) is None:
            raise Interrupted

    def work() -> None:
        try:
            ended["checkpoint"] = run.save(state, stage=stage, check=check, **options)
        except BaseException as error:  # noqa: BLE001 - it is raised where the save was asked for
            ended["error"] = error
        finally:
            staged.set()

    thread = threading.Thread(target=work, name="machine-save")
    thread.start()
    staged.wait()
    for table in state.tables.values():
        for array in table.fields.values():
            array.view("u1").fill(0xA5)
    train()
    thread.join()
    if "error" in ended:
        raise ended["error"]
    return ended["checkpoint"]
