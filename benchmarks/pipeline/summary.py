"""From all measurements to a table: ratios within each round, then their spread over the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Least, middle and greatest over the rounds."""

    least: float
    middle: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.least:.3f}, {self.greatest:.3f}]"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender of one case. Ratios are of speeds: above 1 is faster than the reference."""

    name: str
    ranks: int
    microbatches: int
    seconds: float
    """Seconds of a step: the median over the rounds of each round's median."""
    to_ceiling: Spread | None
    to_one_process: Spread | None
    """Relative to the speed of one process times the number of used cores."""
    to_best_torch: Spread | None
    to_torch_1f1b: Spread | None
    to_own_1f1b: Spread | None
    """Relative to our 1F1B over the same transport."""
    bound_seconds: float | None
    to_bound: Spread | None
    peak_bytes: tuple[int, ...]
    """Peak per rank, over all rounds."""
    peak_above_imports_bytes: tuple[int, ...]
    cpu_seconds: float
    """CPU seconds of a step, all ranks together."""


def rows(case: dict) -> list[Row]:
    """The table of one case (as `run_case` returns it)."""
    seconds = {one["name"]: [entry["seconds"] for entry in one["rounds"]] for one in case["contenders"]}
    torch_names = [one["name"] for one in case["contenders"] if one["kind"] == "torch"]
    best_torch = min(torch_names, key=lambda name: median(seconds[name]), default=None)
    loops = min(case["ranks"], case["cores"])
    return [_row(case, one, seconds, best_torch, loops) for one in case["contenders"]]


def _row(case: dict, one: dict, seconds: dict[str, list[float]], best_torch: str | None, loops: int) -> Row:
    mine = seconds[one["name"]]
    bounds = [entry["bound_seconds"] for entry in one["rounds"]]
    known = None not in bounds
    transport = one["settings"].get("transport")
    single = [value / loops for value in seconds["one-process"]] if "one-process" in seconds else None

    def per_rank(what: str) -> tuple[int, ...]:
        return tuple(max(values) for values in zip(*(entry[what] for entry in one["rounds"]), strict=True))

    return Row(name=one["name"], ranks=one["ranks"], microbatches=case["workload"]["microbatches"],
               seconds=median(mine),
               to_ceiling=_ratio(seconds.get("ceiling"), mine), to_one_process=_ratio(single, mine),
               to_best_torch=_ratio(seconds.get(best_torch), mine),
               to_torch_1f1b=_ratio(seconds.get("torch-1f1b"), mine),
               to_own_1f1b=_ratio(seconds.get(f"ours-1f1b-{transport}"), mine) if transport else None,
               bound_seconds=median(bounds) if known else None, to_bound=_ratio(bounds, mine) if known else None,
               peak_bytes=per_rank("peak_bytes"), peak_above_imports_bytes=per_rank("peak_above_imports_bytes"),
               cpu_seconds=median(entry["cpu_seconds"] for entry in one["rounds"]))


def _ratio(theirs: Sequence[float] | None, mine: Sequence[float]) -> Spread | None:
    """Speed relative to theirs, round by round."""
    if theirs is None:
        return None
    ratios = [a / b for a, b in zip(theirs, mine, strict=True)]
    return Spread(least=min(ratios), middle=median(ratios), greatest=max(ratios))


def markdown(cases: Sequence[dict], head: str) -> str:
    """All tables, and where the time of our contenders goes."""
    parts = [head]
    for case in cases:
        table = rows(case)
        title = f"## {case['scenario']}: {case['ranks']} ranks, {case['workload']['microbatches']} microbatches"
        parts += [title, "", _table(table), ""]
        where = _where_time_goes(case)
        parts += [where, ""] if where else []
    return "\n".join(parts) + "\n"


def _table(table: Sequence[Row]) -> str:
    head = ("contender", "ranks", "micro-batches", "ms/step", "x of ceiling", "x of cores x one process",
            "to torch's best", "to torch 1F1B", "to our 1F1B", "bound ms", "x of bound", "peak MiB per rank",
            "above imports", "CPU s/step")
    body = [(row.name, str(row.ranks), str(row.microbatches), f"{1e3 * row.seconds:.1f}", _shown(row.to_ceiling),
             _shown(row.to_one_process), _shown(row.to_best_torch), _shown(row.to_torch_1f1b), _shown(row.to_own_1f1b),
             "-" if row.bound_seconds is None else f"{1e3 * row.bound_seconds:.1f}", _shown(row.to_bound),
             _mib(row.peak_bytes), _mib(row.peak_above_imports_bytes), f"{row.cpu_seconds:.3f}") for row in table]
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, body)])


def _shown(spread: Spread | None) -> str:
    return "-" if spread is None else str(spread)


def _mib(values: Sequence[int]) -> str:
    return " / ".join(str(round(value / _MIB)) for value in values)


def _where_time_goes(case: dict) -> str | None:
    """For each rank of ours: milliseconds of a step by category, of the median round."""
    lines = []
    for one in case["contenders"]:
        middle = sorted(one["rounds"], key=lambda entry: entry["seconds"])[len(one["rounds"]) // 2]
        for rank, seconds in enumerate(middle["seconds_by_category"]):
            if seconds:
                steps = len(middle["step_seconds"])
                told = "  ".join(f"{name} {1e3 * value / steps:.1f}" for name, value in sorted(seconds.items()))
                lines.append(f"    {one['name']:32} rank {rank}  {told}")
    return "\n".join(["Where the time of ours goes, ms a step:", "", *lines]) if lines else None
