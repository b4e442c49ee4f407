"""Predicted memory as a table: for `ranvier check`, and for the report of a rank that ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.cost.memory import RankMemory
from ranvier.system.terminal import TextTable, three_digits


def memory_table(memory: Sequence[RankMemory]) -> TextTable:
    """MiB per rank by stage: totals, then categories; categories that no stage needs are left out."""
    names = [(place, name) for place in ("device", "host") for name in dict.fromkeys(
        name for entry in memory for name, size in getattr(entry, place).items() if size)]
    has_host = any(entry.host_bytes for entry in memory)
    rows = []
    for entry in memory:
        sizes = [entry.device_bytes, *([entry.host_bytes] if has_host else []),
                 *(getattr(entry, place).get(name, 0) for place, name in names)]
        rows.append([str(entry.pipeline_rank), str(entry.ranks), *(three_digits(size / 2**20) for size in sizes)])
    return TextTable(header=["stage", "ranks", "device\nMiB", *(["host\nMiB"] if has_host else []),
                             *(name if place == "device" else f"host\n{name}" for place, name in names)], rows=rows)
