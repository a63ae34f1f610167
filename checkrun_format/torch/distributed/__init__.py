"""Several ranks: the plug-in for torch.distributed.checkpoint, and saves by ranks without it."""

from checkrun_format.torch.distributed.reader import CheckrunReader
from checkrun_format.torch.distributed.saver import RankSave, RankSaver
from checkrun_format.torch.distributed.shards import Shard
from checkrun_format.torch.distributed.writer import CheckrunWriter

__all__ = ["CheckrunReader", "CheckrunWriter", "RankSave", "RankSaver", "Shard"]
