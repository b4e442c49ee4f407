"""Public name of the memory tracker, which runs also use: see `ranvier.system.memory_tracker`."""

from ranvier.system.memory_tracker import MemoryPlace, MemoryTracker, StorageKind

__all__ = ["MemoryPlace", "MemoryTracker", "StorageKind"]
