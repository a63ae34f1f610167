"""checkrun-format: checkpoints of recommendation models, incremental and quantized, on Zarr v3.

import checkrun_format as crf

run = crf.open_run("runs/dlrm", mode="a", bits=4)
run.save(crf.State(tables={"user": crf.Table({"weight": weight, "sum": sums})}), step=0)
run.save(crf.State(tables={"user": crf.Table({"weight": weight, "sum": sums}, changed=ids)}), step=1000)
state = run.latest().load()
"""

from checkrun_format import policy, quantize
from checkrun_format.changes import Changes, StoredField
from checkrun_format.checkpoint import Checkpoint
from checkrun_format.copying import Copied, copy_run
from checkrun_format.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    BurntError,
    BurntNumberWarning,
    CheckpointNotFoundError,
    CheckrunError,
    ConcurrentCommitError,
    CredentialsError,
    DamagedError,
    FallbackWarning,
    HistoryPrunedError,
    InvalidInputError,
    NotARunError,
    NotFoundError,
    PrunedError,
    PruneWarning,
    RankError,
    RowNotFoundError,
    RunNotFoundError,
    SaveCancelledError,
    StorageError,
    TableNotFoundError,
    UnquantizedWarning,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)
from checkrun_format.forecast import SavePlan, TablePlanned
from checkrun_format.manifest import Problem
from checkrun_format.policy import Failures
from checkrun_format.quantize import set_threads
from checkrun_format.retention import Decision, Keep, Leftover, Plan
from checkrun_format.run import Run, open_run
from checkrun_format.staging import Save, StagedWriter, join_save
from checkrun_format.state import ALL, INHERIT, State, Table
from checkrun_format.verify import Audit
from checkrun_format.versions import FORMAT_VERSION, __version__
from checkrun_format.view import TableView

__all__ = [
    "ALL",
    "FORMAT_VERSION",
    "INHERIT",
    "AccessDeniedError",
    "Audit",
    "BucketNotFoundError",
    "BurntError",
    "BurntNumberWarning",
    "Changes",
    "Checkpoint",
    "CheckpointNotFoundError",
    "CheckrunError",
    "ConcurrentCommitError",
    "Copied",
    "CredentialsError",
    "DamagedError",
    "Decision",
    "Failures",
    "FallbackWarning",
    "HistoryPrunedError",
    "InvalidInputError",
    "Keep",
    "Leftover",
    "NotARunError",
    "NotFoundError",
    "Plan",
    "Problem",
    "PruneWarning",
    "PrunedError",
    "RankError",
    "RowNotFoundError",
    "Run",
    "RunNotFoundError",
    "Save",
    "SaveCancelledError",
    "SavePlan",
    "StagedWriter",
    "State",
    "StorageError",
    "StoredField",
    "Table",
    "TableNotFoundError",
    "TablePlanned",
    "TableView",
    "UnquantizedWarning",
    "UnsupportedFeatureError",
    "UnsupportedVersionError",
    "__version__",
    "copy_run",
    "join_save",
    "open_run",
    "policy",
    "quantize",
    "set_threads",
]
