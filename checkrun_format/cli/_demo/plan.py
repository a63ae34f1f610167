"""How long the demo trains, when it saves, and when it is killed."""

from __future__ import annotations

from typing import Final

SAVES: Final = 14
INTERVAL: Final = 200
"""Steps from one save to the next."""

STEPS: Final = SAVES * INTERVAL
BITS: Final = 4
"""Width of the weights' codes."""

KILLED_IN: Final = 6
"""The save that the first training process does not survive."""
