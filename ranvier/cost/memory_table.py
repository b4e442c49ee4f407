"""Predicted memory as a table: for `ranvier check`, and for the report of a rank that ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ranvier.cost.memory import RankMemory

if TYPE_CHECKING:
    from rich.table import Table


def memory_table(memory: Sequence[RankMemory]) -> Table:
    """MiB per rank by stage and category; categories that no stage needs are left out."""
    from rich.table import Table

    names = [(place, name) for place in ("device", "host") for name in dict.fromkeys(
        name for entry in memory for name, size in getattr(entry, place).items() if size)]
    table = Table("stage", "ranks", *(name if place == "device" else f"host {name}" for place, name in names),
                  "MiB per rank", *(["and of the host"] if any(entry.host_bytes for entry in memory) else []), box=None,
                  header_style="bold")
    for entry in memory:
        sizes = [getattr(entry, place).get(name, 0) for place, name in names] + [entry.device_bytes]
        sizes += [entry.host_bytes] if len(table.columns) > len(names) + 3 else []
        table.add_row(str(entry.pipe), str(entry.ranks), *(f"{size / 2**20:,.1f}" for size in sizes))
    return table
