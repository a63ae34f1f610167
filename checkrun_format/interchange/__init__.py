"""Files of tensors in and out: safetensors, state dicts of `torch.save`, `.npz`, and rows for FBGEMM.

from checkrun_format.interchange import export_checkpoint, import_file

imported = import_file("model.safetensors", "my-run", bits=4)
export_checkpoint(imported.checkpoint, "copy.safetensors")
"""

from checkrun_format.interchange.exporter import Exported, export_checkpoint
from checkrun_format.interchange.fbgemm import Fused, Fusion, export_fused
from checkrun_format.interchange.importer import RAW, Imported, ImportedTable, import_file
from checkrun_format.interchange.kinds import KINDS

__all__ = [
    "KINDS",
    "RAW",
    "Exported",
    "Fused",
    "Fusion",
    "Imported",
    "ImportedTable",
    "export_checkpoint",
    "export_fused",
    "import_file",
]
