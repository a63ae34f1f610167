"""The one error tree. Every error has a stable `kind` (FORMAT.md section 10).

CheckrunError
├── InvalidInputError        invalid_input        (also a ValueError)
├── NotFoundError            not_found            (also a LookupError)
│   ├── RunNotFoundError     run_not_found
│   ├── NotARunError         not_a_run
│   ├── CheckpointNotFoundError  checkpoint_not_found
│   ├── TableNotFoundError   table_not_found
│   └── RowNotFoundError     row_not_found
├── PrunedError              pruned
├── BurntError               burnt
├── DamagedError             damaged
├── UnsupportedVersionError  unsupported_version
├── UnsupportedFeatureError  unsupported_feature
├── ConcurrentCommitError    concurrent_commit
├── HistoryPrunedError       history_pruned
├── RankError                rank_failed
├── SaveCancelledError       save_cancelled
└── StorageError             storage              (also an OSError)
    ├── AccessDeniedError    access_denied
    ├── BucketNotFoundError  bucket_not_found
    └── CredentialsError     credentials
"""

from __future__ import annotations

from typing import ClassVar


class CheckrunError(Exception):
    """Base of all errors that this library raises on purpose."""

    kind: ClassVar[str] = "error"


class InvalidInputError(CheckrunError, ValueError):
    """A value given by the caller is refused; nothing has been written."""

    kind = "invalid_input"


class NotFoundError(CheckrunError, LookupError):
    """What was asked for is not there."""

    kind = "not_found"


class RunNotFoundError(NotFoundError):
    """Nothing is stored at the address of the run."""

    kind = "run_not_found"


class NotARunError(NotFoundError):
    """Something is stored at the address, but it is no run."""

    kind = "not_a_run"


class CheckpointNotFoundError(NotFoundError):
    """No checkpoint has this number or step."""

    kind = "checkpoint_not_found"


class TableNotFoundError(NotFoundError):
    """The checkpoint has no table of this name."""

    kind = "table_not_found"


class RowNotFoundError(NotFoundError):
    """The table has no such row or key."""

    kind = "row_not_found"


class PrunedError(CheckrunError):
    """The checkpoint was removed by a retention rule; its marker remains."""

    kind = "pruned"


class BurntError(CheckrunError):
    """The number is occupied by an object that is no commit."""

    kind = "burnt"


class DamagedError(CheckrunError):
    """A stored object is missing, altered or truncated, or contradicts another.

    Attributes
    ----------
    place : str
        Key of the object, relative to the run.
    """

    kind = "damaged"

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")
        self.place = place
        self.problem = problem

    def __reduce__(self) -> tuple[type[DamagedError], tuple[str, str]]:
        return type(self), (self.place, self.problem)


class UnsupportedVersionError(CheckrunError):
    """The document was written by a format version that this library does not read."""

    kind = "unsupported_version"


class UnsupportedFeatureError(CheckrunError):
    """The run, checkpoint or table needs a feature that this library does not know."""

    kind = "unsupported_feature"


class ConcurrentCommitError(CheckrunError):
    """Another writer committed the number that this save claimed."""

    kind = "concurrent_commit"


class HistoryPrunedError(CheckrunError):
    """What changed cannot be told: a checkpoint on the way was pruned."""

    kind = "history_pruned"


class RankError(CheckrunError):
    """Another rank of the same save or restore failed, or did not answer in time; nothing was committed.

    Attributes
    ----------
    missing : tuple of int
        The ranks that did not answer.
    """

    kind = "rank_failed"
    missing: tuple[int, ...] = ()


class SaveCancelledError(CheckrunError):
    """A save was given up before its commit, as the caller wished; its changed rows are kept for the next one."""

    kind = "save_cancelled"


class StorageError(CheckrunError, OSError):
    """The store failed: permission, space, network."""

    kind = "storage"


class AccessDeniedError(StorageError):
    """The store knows who asks, and refuses."""

    kind = "access_denied"


class BucketNotFoundError(StorageError):
    """There is no bucket of this name."""

    kind = "bucket_not_found"


class CredentialsError(StorageError):
    """Credentials are missing, unknown, expired or signed by a clock that is wrong."""

    kind = "credentials"


class BurntNumberWarning(UserWarning):
    """Numbers above the latest checkpoint are occupied by objects that are no commits."""


class FallbackWarning(UserWarning):
    """A restore passed over newer checkpoints, because they are damaged."""


class PruneWarning(UserWarning):
    """A prune in the background failed; nothing that it should keep is touched, and the next one goes on."""


class UnquantizedWarning(UserWarning):
    """Bits are given, but fit no field of what is saved, so that all of it is stored raw."""


class TrackingWarning(UserWarning):
    """Rows change that no lookup read, so that saves store the table full or take more pains; or state is not saved."""
