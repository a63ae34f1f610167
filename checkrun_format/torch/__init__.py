"""Trainers in torch: find tables and their optimizer state, record which rows change, save and restore."""

from checkrun_format.torch.randomness import capture_rng, restore_rng

__all__ = ["capture_rng", "restore_rng"]
