"""Many rows at once: which of them a layer supplies, and putting them where they belong. Arrays in, arrays out."""

from checkrun_format.movement.claims import Claims, TwiceError
from checkrun_format.movement.engine import prepare
from checkrun_format.movement.listing import within
from checkrun_format.movement.scatter import aligned_empty, scatter

__all__ = ["Claims", "TwiceError", "aligned_empty", "prepare", "scatter", "within"]
