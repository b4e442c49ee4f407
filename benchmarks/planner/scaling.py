"""A trillion parameters on up to 100,000 devices, on paper: the plan, strong and weak scaling, and what limits them.

    python -m benchmarks.planner.scaling [--ranks 1024 2048 ...] [--quick]

Megatron-LM's trillion-parameter shape (Narayanan et al., 2021, Table 1: 128 layers of 25600, 160 heads, sequences of
2048) on nodes of eight H100. Strong scaling keeps a batch of 12,288 sequences (25 million tokens), weak scaling has 0.6
sequences a device. Each point is the best plan of its policy, then a step of that plan simulated under four conditions:
unchanged; with jitter (each action of each rank takes a random time, 20 % deviation); with links between nodes eight
times slower; with both. With slow links the plan is that for fast ones: a cluster that turned out worse.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.record import results_file, write_results
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Launch, Memory, Optim, Pipeline, TensorParallel, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.hardware import Cluster
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.pictures.figures import INK, new_figure, remove_frame
from ranvier.planner import report
from ranvier.planner.plan import simulation
from ranvier.planner.search import search
from ranvier.planner.simulation import STEADY, Noise
from ranvier.planner.work import Work

RANKS = (5120, 10240, 25600, 102400)
STRONG_BATCH, WEAK_SHARE = 12288, 0.6
POLICIES = ("1f1b", "message-driven")
JITTER, SLOWER = 0.2, 8
CONDITIONS = ("as it is", "jitter", "slow links", "both")
_COLOURS = dict(zip(CONDITIONS, ("#222222", "#2B6CB0", "#E8912D", "#C0659B"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One plan. seconds: of a step, by condition. limit: what takes most time besides computing, and its share."""

    scaling: str
    policy: str
    ranks: int
    batch: int
    plan: str
    seconds: dict[str, float]
    utilisation: dict[str, float]
    device_gib: float
    days: float
    limit: str
    search_seconds: float


def trillion(batch: int, policy: str) -> ResolvedRun:
    """The run to be planned."""
    return ResolvedRun(mesh=Mesh(), precision="bf16", batch=Batch(global_size=batch, microbatch_size=1),
               model=Transformer(num_layers=128, hidden=25600, heads=160, vocab=51200, sequence=2048),
               tensor=TensorParallel(scheme="megatron", sequence_sharding=True), memory=Memory(recompute="none"),
               optim=Optim(shard=True), launch=Launch(device="cuda"), pipeline=Pipeline(policy=policy))


def points(ranks: Sequence[int], cluster: Cluster) -> Iterator[Point]:
    """Points in the order of the page, computed by as many processes as there are cores."""
    cases = [(scaling, count, policy) for scaling in ("strong", "weak") for count in ranks for policy in POLICIES]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for case, found in zip(cases, pool.map(planned, cases, [cluster] * len(cases)), strict=True):
            if isinstance(found, RanvierError):
                print(f"{case[0]}, {case[1]} devices, {case[2]}: {found}", flush=True)
            else:
                yield found


def planned(case: tuple[str, int, str], cluster: Cluster) -> Point | RanvierError:
    """One point, or the error if there is none."""
    scaling, count, policy = case
    batch = STRONG_BATCH if scaling == "strong" else round(WEAK_SHARE * count)
    try:
        return point(scaling, count, trillion(batch, policy), cluster, Work())
    except RanvierError as problem:
        return problem


def point(scaling: str, count: int, run: ResolvedRun, cluster: Cluster, work: Work) -> Point:
    cluster = replace(cluster, nodes=-(-count // cluster.devices_per_node))
    began = time.monotonic()
    plan = search(run, cluster, count, ("mesh", "microbatch", "checkpoint", "in-flight"), work=work)
    took = time.monotonic() - began
    best = plan.best[0]
    slow = replace(cluster, between=replace(cluster.between, bandwidth=cluster.between.bandwidth / SLOWER))
    noise = Noise(jitter=JITTER)
    cases = dict(zip(CONDITIONS, ((cluster, STEADY), (cluster, noise), (slow, STEADY), (slow, noise)), strict=True))
    seconds = {name: simulation(best.run, where, how, work).seconds for name, (where, how) in cases.items()}
    lost = {name: share for name, share in report.shares(best.cost).items() if name != "computing"}
    worst = max(lost, key=lost.get)
    return Point(scaling=scaling, policy=run.pipeline.policy, ranks=count, batch=run.batch.global_size,
                 plan=report.describe(best.run), seconds=seconds, days=best.cost.days(),
                 utilisation={name: best.cost.model_flops / each / best.cost.peak_flops
                              for name, each in seconds.items()},
                 device_gib=report.device_bytes(best) / 2**30, limit=f"{worst} {lost[worst]:.0%}", search_seconds=took)


def markdown(found: Sequence[Point]) -> str:
    lines = ["| scaling | devices | batch | policy | plan | s a step | utilisation | with jitter | slow links | both | "
             "GiB | days to 3e11 tokens | lost most to |",
             "| --- | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for one in found:
        shares = " | ".join(f"{100 * one.utilisation[name]:.1f} %" for name in CONDITIONS)
        lines.append(f"| {one.scaling} | {one.ranks:,} | {one.batch:,} | {one.policy} | {one.plan} | "
                     f"{one.seconds[CONDITIONS[0]]:.3g} | {shares} | {one.device_gib:.0f} | {one.days:.2f} | "
                     f"{one.limit} |")
    return "\n".join(lines) + "\n"


def draw(found: Sequence[Point], path: Path) -> None:
    """Draw utilisation over devices, strong and weak, for each policy and condition."""
    figure = new_figure(12, 4.6)
    for axes, scaling in zip(figure.subplots(1, 2, sharey=True), ("strong", "weak"), strict=True):
        for policy, style in zip(POLICIES, ("--", "-"), strict=True):
            mine = [one for one in found if one.scaling == scaling and one.policy == policy]
            for name in CONDITIONS:
                axes.plot([one.ranks for one in mine], [100 * one.utilisation[name] for one in mine], style,
                          color=_COLOURS[name], marker="o", markersize=3, linewidth=1.4, label=f"{policy}, {name}")
        axes.set_xscale("log")
        axes.set_xlabel("devices")
        axes.set_title(f"{scaling} scaling, " + (f"batch {STRONG_BATCH:,}" if scaling == "strong" else
                                                 f"{WEAK_SHARE} sequences a device"), color=INK, fontsize=10)
        axes.set_ylim(bottom=0)
        remove_frame(axes)
    axes.legend(fontsize=7, loc="lower left", handlelength=4)
    figure.axes[0].set_ylabel("model FLOPs utilisation, %")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", help=f"by default {' '.join(map(str, RANKS))}")
    parser.add_argument("--cluster", default="h100", help="its nodes are as many as are needed")
    parser.add_argument("--quick", action="store_true", help="one number of ranks")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    ranks = options.ranks or (RANKS[:1] if options.quick else RANKS)
    found = []
    for one in points(ranks, load_cluster(options.cluster)):
        found.append(one)
        print(markdown([one]).splitlines()[-1], flush=True)
    path = options.output or results_file("planner", "scaling", quick=options.quick)
    write_results(path, {"points": [asdict(one) for one in found]})
    path.with_suffix(".md").write_text(markdown(found))
    draw(found, path.with_suffix(".png"))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
