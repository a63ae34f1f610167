"""Tags: names that people give to checkpoints, and that keep them (FORMAT.md 5.6)."""

from __future__ import annotations

from checkrun_format import layout, manifest
from checkrun_format.chain import History
from checkrun_format.errors import NotFoundError, PrunedError
from checkrun_format.manifest import Commit, Pruned
from checkrun_format.versions import FORMAT_VERSION


class Tags:
    """The tags of a run; each call reads the store."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._store = history.store

    def read(self) -> dict[str, int]:
        """Name to number of every tag, by name.

        Raises
        ------
        DamagedError, UnsupportedVersionError
            A tag cannot be read: nobody knows what it is of.
        """
        found = {name: self.get(name) for name in self.names()}
        return {name: number for name, number in found.items() if number is not None}

    def names(self) -> list[str]:
        """The names of all tags, in order; they are not read."""
        return sorted(filter(None, map(layout.parse_tag_key, self._store.list(layout.TAGS))))

    def get(self, name: str) -> int | None:
        """The number that a tag is of, None if there is no such tag; errors as of `read`."""
        data = self._store.get(layout.tag_key(layout.check_tag_name(name)))
        return None if data is None else manifest.parse_tag(data, name).sequence

    def put(self, name: str, sequence: int) -> None:
        """Name a checkpoint, be it that the name was another's before (TAG-2).

        Raises
        ------
        InvalidInputError, CheckpointNotFoundError, PrunedError, BurntError, DamagedError
            There is no such checkpoint, or its chain is not whole.
        """
        key = layout.tag_key(layout.check_tag_name(name))
        chain = [below.commit.sequence for below in self._history.chain(self._history.get(sequence))]
        before = self._store.get(key)
        tag = manifest.Tag(kind="tag", format_version=FORMAT_VERSION, name=name, sequence=sequence)
        self._store.replace(key, layout.to_json(manifest.as_object(tag)))
        gone = [number for number in chain if not isinstance(self._history.occupant(number), Commit)]
        if gone:
            self._undo(key, before)
            self._history.forget(gone[0])
            raise PrunedError(f"checkpoint {gone[0]} was pruned, but checkpoint {sequence} needs it: no tag was set")

    def _undo(self, key: str, before: bytes | None) -> None:
        if before is None:
            self._store.delete(key)
        else:
            self._store.replace(key, before)

    def delete(self, name: str) -> None:
        """Forget a name; the checkpoint is no longer kept because of it.

        Raises
        ------
        NotFoundError
        """
        key = layout.tag_key(layout.check_tag_name(name))
        if self._store.get(key) is None:
            raise NotFoundError(f"{self._store.url} has no tag {name!r}")
        self._store.delete(key)

    def check(self, name: str) -> None:
        """Refuse a tag that is of no checkpoint (TAG-2).

        Raises
        ------
        DamagedError, PrunedError, BurntError, CheckpointNotFoundError, UnsupportedVersionError
        """
        sequence = self.get(name)
        if sequence is not None and isinstance(self._history.occupant(sequence), Pruned):
            raise PrunedError(f"tag {name!r} is of checkpoint {sequence}, which was pruned")
        if sequence is not None:
            self._history.get(sequence)
