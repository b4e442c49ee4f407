"""Benefit of the saved memory: fewer stages and more replicas on the same ranks (AxoNN, Figures 5 and 6).

    python -m benchmarks.memory.saved [--quick]

States in host memory make room on the device, so that the same ranks can hold the model in fewer stages: shorter fills
and drains of the pipeline, against reductions and an optimizer that streams. Shown for 4 ranks:

    pipe 4, states on the device, against data 2 x pipe 2, states streamed: where the time of a batch goes (.png)
    data x pipe = 4 x 1, 2 x 2, 1 x 4, states streamed: time over pipe (-pipe.png)

All meshes run in the same processes, over MPI if there is an mpiexec and over Gloo otherwise, one after the other
within each round; each is built again, warms up, and is timed. (With --quick the ranks are threads.) Ratios are of
speeds within a round. Phases are means over the ranks: pipeline (forward, backward, weight gradients, waits for
messages), reduction (only the waits for it), optimizer, and other. The losses of all meshes must agree to 1e-4,
otherwise no ratio is printed.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from matplotlib.figure import Figure

from benchmarks.memory.program import MIB, build_engine, parser, ratios, replica_batch, table, write
from benchmarks.pipeline.workload import Workload
from ranvier.config.run import Optim
from ranvier.launch.mpiexec import mpi_available
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_processes, run_ranks
from ranvier.world import World

FULL = Workload(num_layers=8, hidden=256, vocab=8192, sequence=64, sequences=16, microbatches=16)
QUICK = Workload(num_layers=2, hidden=64, heads=2, vocab=512, sequence=16, sequences=8, microbatches=8)
RANKS = 4
CASES = ((4, "none"), (4, "stream"), (2, "stream"), (1, "stream"))
"""(pipe, offload)."""
PHASES = {"forward": "pipeline", "backward": "pipeline", "weight": "pipeline", "wait": "pipeline",
          "reduce": "reduction", "optimizer": "optimizer"}
COLOURS = {"pipeline": "tab:blue", "reduction": "tab:orange", "optimizer": "tab:green", "other": "lightgrey"}
_AGREE = 1e-4
_TIMEOUT_SECONDS = 1800.0


def name_of(pipe: int, offload: str) -> str:
    return f"data {RANKS // pipe} x pipe {pipe}, {offload}"


def measure_rank(world: World, workload: dict, rounds: int, warmup: int, steps: int, bucket_size: int) -> dict:
    """Name -> one entry for each round: time after each step, seconds of a step by phase, losses, bytes."""
    sizes = Workload(**workload)
    found: dict[str, list[dict]] = {name_of(*case): [] for case in CASES}
    for turn in range(rounds):
        for case in CASES if turn % 2 == 0 else reversed(CASES):
            found[name_of(*case)].append(_one_round(world, sizes, *case, warmup, steps, bucket_size))
    return found


def _one_round(world: World, workload: Workload, pipe: int, offload: str, warmup: int, steps: int, bucket_size: int
               ) -> dict:
    engine = build_engine(workload, world, Mesh(data=world.size // pipe, pipe=pipe),
                          Optim(offload=offload, bucket_size=bucket_size))
    losses, marks = [], []
    for number in range(warmup + steps):
        if number == warmup:
            engine.timeline.take()
            marks.append(time.monotonic())
        losses.append(engine.train_batch(replica_batch(workload, engine, number)))
        if number >= warmup:
            marks.append(time.monotonic())
    seconds: dict[str, float] = defaultdict(float)
    for span in engine.timeline.take():
        seconds[PHASES[span.category]] += span.seconds / steps
    memory = engine.memory()
    entry = {"marks": marks, "phases": dict(seconds), "losses": [result.loss for result in losses],
             "device_bytes": sum(memory["device"].values()), "host_bytes": sum(memory["host"].values())}
    engine.close()
    return entry


def summary(name: str, ranks: list[list[dict]]) -> dict:
    """Summary of one case from its ranks: a step is done when its last rank is done."""
    rounds = []
    for entries in zip(*ranks, strict=True):
        marks = [max(times) for times in zip(*(entry["marks"] for entry in entries), strict=True)]
        phases = {phase: mean(entry["phases"].get(phase, 0.0) for entry in entries)
                  for phase in ("pipeline", "reduction", "optimizer")}
        whole = (marks[-1] - marks[0]) / (len(marks) - 1)
        rounds.append({"seconds": median(later - sooner for sooner, later in pairwise(marks)),
                       "phases": {**phases, "other": max(0.0, whole - sum(phases.values()))}})
    middle = sorted(rounds, key=lambda entry: entry["seconds"])[len(rounds) // 2]
    last = [entries[-1] for entries in ranks]
    return {"name": name, "seconds": median(entry["seconds"] for entry in rounds), "phases": middle["phases"],
            "rounds": rounds, "losses": last[0]["losses"],
            "device_bytes": [entry["device_bytes"] for entry in last],
            "host_bytes": [entry["host_bytes"] for entry in last]}


def measure(options: argparse.Namespace) -> list[dict]:
    workload = QUICK if options.quick else FULL
    transport = options.transport
    if transport == "auto":
        transport = "gloo" if mpi_available() else "mpi"
    arguments = (asdict(workload), options.rounds, options.warmup, options.steps, options.bucket_size)
    if transport == "threads":
        ranks = run_ranks(lambda world: measure_rank(world, *arguments), RANKS, timeout_seconds=_TIMEOUT_SECONDS)
    else:
        ranks = run_processes("benchmarks.memory.saved:measure_rank", RANKS, "mpi" if transport == "mpi" else "torch",
                              args=arguments, timeout_seconds=_TIMEOUT_SECONDS)
    rows = [summary(name, [found[name] for found in ranks]) for name in ranks[0]]
    reference = rows[0]
    for row in rows:
        row["largest_loss_difference"] = max(abs(a - b) / abs(b) for a, b in
                                             zip(row["losses"], reference["losses"], strict=True))
    agree = all(row["largest_loss_difference"] <= _AGREE for row in rows)
    for row in rows:
        over = ratios([entry["seconds"] for entry in reference["rounds"]],
                      [entry["seconds"] for entry in row["rounds"]])
        row["speed_over_pipe_4"] = asdict(over) if agree else None
        row["shown"] = str(over) if agree else "losses differ"
    print(table(("mesh, states", "batch ms", f"speed over {reference['name']}", *COLOURS, "device MiB a rank",
                 "host MiB a rank", "loss differs by"),
                [(row["name"], f"{1e3 * row['seconds']:.1f}", row["shown"],
                  *(f"{1e3 * row['phases'][phase]:.1f}" for phase in COLOURS),
                  *(f"{max(row[place]) / MIB:.1f}" for place in ("device_bytes", "host_bytes")),
                  f"{row['largest_loss_difference']:.1e}") for row in rows]))
    path = write(options, "saved", {"workload": asdict(workload), "transport": transport, "steps": options.steps,
                                    "bucket_size": options.bucket_size, "rows": rows})
    by_name = {row["name"]: row for row in rows}
    draw_phases([by_name[name_of(4, "none")], by_name[name_of(2, "stream")]], path.with_suffix(".png"))
    draw_pipe({pipe: by_name[name_of(pipe, "stream")] for pipe in (1, 2, 4)}, path.with_name(path.stem + "-pipe.png"))
    return rows


def draw_phases(rows: Sequence[dict], path: Path) -> None:
    figure = Figure(figsize=(6, 4.5))
    axes = figure.subplots()
    bottom = [0.0] * len(rows)
    for phase, colour in COLOURS.items():
        heights = [1e3 * row["phases"][phase] for row in rows]
        axes.bar([row["name"] for row in rows], heights, 0.5, bottom=bottom, color=colour, label=phase)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("milliseconds of a batch, mean over ranks")
    axes.set_title(f"{RANKS} ranks: where a batch's time goes")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def draw_pipe(rows: dict[int, dict], path: Path) -> None:
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    middle = [1e3 * row["seconds"] for row in rows.values()]
    least = [1e3 * min(entry["seconds"] for entry in row["rounds"]) for row in rows.values()]
    greatest = [1e3 * max(entry["seconds"] for entry in row["rounds"]) for row in rows.values()]
    axes.plot(list(rows), middle, "o-")
    axes.fill_between(list(rows), least, greatest, alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(rows), [f"{pipe}\n(data {RANKS // pipe})" for pipe in rows])
    axes.set(xlabel="pipe", ylabel="milliseconds of a batch", ylim=(0, None),
             title=f"{RANKS} ranks, states streamed")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--transport", choices=("auto", "mpi", "gloo", "threads"),
                      help="auto, the default without --quick, is MPI where it can be used")
    made.add_argument("--rounds", type=int)
    made.add_argument("--warmup", type=int, default=2, help="steps of each mesh in a round that are not timed")
    made.add_argument("--steps", type=int, help="timed steps of each mesh in a round")
    made.add_argument("--bucket-size", type=int, help="parameters in a bucket")
    options = made.parse_args(arguments)
    options.transport = options.transport or ("threads" if options.quick else "auto")
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.steps = options.steps or (2 if options.quick else 5)
    options.bucket_size = options.bucket_size or (16384 if options.quick else 262144)
    return options


if __name__ == "__main__":
    measure(parse())
