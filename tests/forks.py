"""Children of a test's process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def fork(work: Callable[[], int | None]) -> int:
    """The process id of a child that works and exits with what the work returned; with 99 if it failed."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        code = work() or 0
    except BaseException:  # noqa: BLE001 - nothing of the parent's may run in the child
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """How a child ended: its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
