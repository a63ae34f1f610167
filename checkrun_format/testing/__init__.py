"""A kit for testing stores, trainers, and other implementations of the format.

`MemoryStore` is a store in memory, `FaultStore` wraps any store and lets a chosen call fail. `testing.machine` holds
the Hypothesis machine that drives a run against a dictionary of numpy arrays; it, and what it is made of (`model`,
`tables`), need the package hypothesis (`pip install checkrun-format[testing]`), nothing else here does.
"""

from checkrun_format.testing.stores import EVERY_CALL, WRITES, Fault, FaultStore, MemoryStore

__all__ = ["EVERY_CALL", "WRITES", "Fault", "FaultStore", "MemoryStore"]
