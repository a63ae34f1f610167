"""The folder of a demo: the run, and beside it what only the demo knows."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_MARK = "demo.json"


class FolderError(Exception):
    """The folder cannot be used for this demo; nothing in it has been touched."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Paths and small files of one demo.

    `demo.json` says that the folder is a demo's and which text it reads; `run/` is the run; `events.jsonl` tells what
    happened to the training processes, a line each; `reference.json` and `result.json` appear when the run without
    and with the crash are complete; `truth/` holds the trainer's last values, unquantized.
    """

    path: Path

    @property
    def run(self) -> Path:
        return self.path / "run"

    def claim(self, text: str) -> None:
        """Make the folder this demo's, or find that it is already.

        Parameters
        ----------
        text : str
            Digest of the corpus.

        Raises
        ------
        FolderError
            If it holds something else, or the demo of a Python with another text, or cannot be written.
        """
        try:
            self._claim(text)
        except OSError as error:
            raise FolderError(f"{error.filename or self.path}: {error.strerror}; choose another folder") from error

    def _claim(self, text: str) -> None:
        mark = self._read(_MARK)
        if mark is None:
            self._begin(text)
        elif mark.get("kind") != "checkrun-demo":
            raise FolderError(f"{self.path / _MARK} was not written by checkrun demo; choose another folder")
        elif mark.get("text") != text:
            raise FolderError(
                f"{self.path} was begun by Python {mark.get('python')}, whose text differs from this one's; "
                "continue with that Python, or choose another folder"
            )

    def _begin(self, text: str) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise FolderError(f"{self.path} is not a folder; choose another one")
        if self.path.exists() and any(found.name != _partial(_MARK) for found in self.path.iterdir()):
            raise FolderError(f"{self.path} holds something else than a demo; choose an empty or a new folder")
        self.path.mkdir(parents=True, exist_ok=True)
        self._write(_MARK, {"kind": "checkrun-demo", "text": text, "python": platform.python_version()})

    def note(self, event: str, **facts: Any) -> None:
        """Append an event, so that it outlives a killed process."""
        with (self.path / "events.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"event": event, **facts}) + "\n")

    def events(self, event: str) -> list[dict[str, Any]]:
        """The events of one name, oldest first."""
        path = self.path / "events.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        return [found for line in lines if (found := json.loads(line))["event"] == event]

    def reference(self) -> dict[str, Any] | None:
        """What the run without the crash ended with, once it is complete."""
        return self._read("reference.json")

    def write_reference(self, outcome: dict[str, Any]) -> None:
        self._write("reference.json", outcome)

    def result(self) -> dict[str, Any] | None:
        """What the run with the crash ended with, once it is complete."""
        return self._read("result.json")

    def write_result(self, outcome: dict[str, Any], truth: dict[str, npt.NDArray[Any]]) -> None:
        """Keep the outcome, and the trainer's own values to compare the last checkpoint with."""
        folder = self.path / "truth"
        folder.mkdir(exist_ok=True)
        for name, array in truth.items():
            np.save(folder / f"{name}.npy", array)
        self._write("result.json", outcome)

    def truth(self) -> dict[str, npt.NDArray[Any]]:
        """The trainer's last values by name, as `write_result` was given them."""
        return {path.stem: np.load(path) for path in sorted((self.path / "truth").glob("*.npy"))}

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            text = (self.path / name).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise FolderError(f"{self.path / name} was not written by checkrun demo; choose another folder")
        return document

    def _write(self, name: str, document: dict[str, Any]) -> None:
        partial = self.path / _partial(name)
        partial.write_text(json.dumps(document), encoding="utf-8")
        partial.replace(self.path / name)


def _partial(name: str) -> str:
    return f".{name}.partial"
