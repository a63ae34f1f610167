"""Training processes: started, listened to, and never left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from checkrun_format.cli._demo.folder import Folder

_MODULE = "checkrun_format.cli._demo.worker"
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_PATIENCE = 5.0  # seconds


@contextmanager
def training(folder: Folder, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A training process, stopped at the end if it still runs.

    It has its own session, so that Ctrl-C reaches this process alone, and one thread for linear algebra, so that both
    runs add up in the same order and two of them do not compete for two cores.
    """
    command = [sys.executable, "-m", _MODULE, str(folder.path.absolute()), *options]
    environment = os.environ | dict.fromkeys(_THREADS, "1")
    with subprocess.Popen(  # noqa: S603 - this very Python, and a module of ours
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            _stop(process)


def told(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What a process says, until it ends; a line that its end cut short is left out."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):
            yield json.loads(line)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
