"""The tables as a picture: speed as bars with their spread, and memory next to it; for a curve, speed against
memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.pipeline.summary import Row, Spread, rows

_COLOURS = {"ours": "#d1495b", "torch": "#30638e", "ddp": "#8fa998", "plain": "#b8b8b8"}


def draw(cases: Sequence[dict], path: Path) -> None:
    """One line of panels for each case."""
    figure = Figure(figsize=(13, sum(1.2 + 0.32 * len(case["contenders"]) for case in cases)))
    grid = figure.subplots(len(cases), 2, squeeze=False,
                           height_ratios=[1.2 + 0.32 * len(case["contenders"]) for case in cases])
    for case, (left, right) in zip(cases, grid, strict=True):
        table = rows(case)
        colours = [_COLOURS[one["kind"]] for one in case["contenders"]]
        if case["scenario"] == "curve":
            _trade(table, colours, left)
        else:
            _speed(table, colours, left)
        _memory(table, colours, right)
        left.set_title(f"{case['scenario']}: {case['ranks']} ranks, {case['workload']['microbatches']} microbatches",
                       loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _measure(row: Row) -> tuple[str, Spread | None]:
    """The reference of the shown speed: the ceiling if it was measured, otherwise the bound."""
    return ("speed, x of the ceiling", row.to_ceiling) if row.to_ceiling else ("speed, x of the bound", row.to_bound)


def _speed(table: Sequence[Row], colours: Sequence[str], axes) -> None:
    known = [(row, colour, *_measure(row)) for row, colour in zip(table, colours, strict=True) if _measure(row)[1]]
    for place, (_, colour, _, spread) in enumerate(known):
        axes.barh(place, spread.middle, color=colour, height=0.7)
        axes.plot([spread.least, spread.greatest], [place, place], color="black", linewidth=1)
        axes.text(0.01, place, f"{spread.middle:.3f}", va="center", color="white", fontsize=8)
    _finish(axes, [row.name for row, *_ in known], known[0][2] if known else "")
    axes.axvline(1.0, color="black", linewidth=0.6, linestyle=":")


def _memory(table: Sequence[Row], colours: Sequence[str], axes) -> None:
    for place, (row, colour) in enumerate(zip(table, colours, strict=True)):
        height = 0.7 / len(row.peak_above_imports_bytes)
        for rank, value in enumerate(row.peak_above_imports_bytes):
            axes.barh(place - 0.35 + (rank + 0.5) * height, value / 2**20, color=colour, height=0.9 * height)
    _finish(axes, [row.name for row in table], "peak memory of each rank above the imports, MiB")


def _finish(axes, names: Sequence[str], label: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _trade(table: Sequence[Row], colours: Sequence[str], axes) -> None:
    """Draw speed against the memory of the rank that needs most."""
    for row, colour in zip(table, colours, strict=True):
        label, spread = _measure(row)
        if spread is None:
            continue
        memory = max(row.peak_above_imports_bytes) / 2**20
        axes.errorbar(memory, spread.middle, yerr=[[spread.middle - spread.least], [spread.greatest - spread.middle]],
                      fmt="o", color=colour, linewidth=0.8, markersize=4)
        axes.annotate(row.name.replace("ours-message-driven-", ""), (memory, spread.middle), fontsize=6,
                      xytext=(3, 3), textcoords="offset points")
        axes.set_ylabel(label, fontsize=8)
    axes.set_xlabel("peak memory above the imports, dearest rank, MiB", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
