"""Many rows at once: which of them a layer supplies, and putting them where they belong. Arrays in, arrays out."""

from checkrun_format.movement.claims import Claims, TwiceError
from checkrun_format.movement.engine import prepare
from checkrun_format.movement.listing import listed
from checkrun_format.movement.scatter import scatter

__all__ = ["Claims", "TwiceError", "listed", "prepare", "scatter"]
