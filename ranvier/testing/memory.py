"""Public name of the memory tracker, which runs use, too: see `ranvier.system.memory_tracker`."""

from ranvier.system.memory_tracker import Kind, MemoryTracker, Place

__all__ = ["Kind", "MemoryTracker", "Place"]
