"""Reductions of gradients under the optimizer: what overlaps, and what it gains over k (AxoNN, Figures 7 and 8).

    python -m benchmarks.memory.overlap [--quick]

Gradients are averaged over two replicas in chunks of k buckets, and a chunk is updated while the next ones are still
being reduced. Large k starts late, small k costs many calls; k = all is the sequential variant, first the full
reduction, then the full update. The ranks are threads with a slow link between them (benchmarks.slow_links), whose
bandwidth is set so that the reduction takes as long as the update (`--reduce-share` of it): waiting costs no core, so
overlap shows on any machine.

`step end` is the time from the end of the last backward of any rank until every rank has all parameters. Variants take
turns within each round, alternately forwards and backwards through the list; times over the sequential variant's are
formed within each round. A reduction's span begins with its call and ends when the rank first finds it done. Pictures
next to the JSON: the spans of one step (.png), and step end over k (-curve.png).
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.memory.program import build_engine, parser, ratios, replica_batch, table, write
from benchmarks.pipeline.workload import Workload
from benchmarks.slow_links import Link, slowed
from ranvier.comm.protocol import Backend, Group, Reduction, Work
from ranvier.comm.sum_algorithms import ring_bytes
from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from ranvier.world import World

FULL = Workload(num_layers=6, hidden=256, vocab=8192, sequence=32, sequences=2, microbatches=2, tied=False)
QUICK = Workload(num_layers=2, hidden=128, heads=2, vocab=1024, sequence=16, sequences=2, microbatches=2, tied=False)
RANKS = 2
_COMPUTE = ("forward", "backward", "weight")
_TIMEOUT_SECONDS = 900.0


@dataclass
class Spans:
    """(name, start_ns, stop_ns) of collectives over `data` on one rank."""

    found: list[tuple[str, int, int]] = field(default_factory=list)


class RecordedBackend:
    """A backend whose `data` groups record when each collective is called and when it is found done."""

    def __init__(self, inner: Backend, spans: Spans) -> None:
        self._inner, self._spans = inner, spans

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> Group:
        group = self._inner.group(purpose, partition)
        return _RecordedGroup(group, self._spans) if purpose == "data" else group


class _RecordedGroup:
    def __init__(self, inner: Group, spans: Spans) -> None:
        self._inner, self._spans = inner, spans

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Work:
        started = time.monotonic_ns()
        if not tensor.is_floating_point():  # flags of a table's rows that have gradients
            return self._inner.all_reduce(tensor, op)
        return _RecordedWork(self._inner.all_reduce(tensor, op), "reduce", started, self._spans)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, buffer: Tensor | None = None, dim: int = 0) -> Work:
        started = time.monotonic_ns()
        return _RecordedWork(self._inner.reduce_scatter(output, tensor, buffer, dim), "reduce", started, self._spans)

    def all_gather(self, output: Tensor, tensor: Tensor, dim: int = 0, buffer: Tensor | None = None) -> Work:
        started = time.monotonic_ns()
        return _RecordedWork(self._inner.all_gather(output, tensor, dim, buffer), "gather", started, self._spans)


class _RecordedWork:
    def __init__(self, inner: Work, name: str, started: int, spans: Spans) -> None:
        self._inner, self._name, self._started, self._spans = inner, name, started, spans

    def done(self) -> bool:
        done = self._inner.done()
        if done:
            self._note()
        return done

    def wait(self) -> None:
        self._inner.wait()
        self._note()

    def _note(self) -> None:
        if self._started:
            self._spans.found.append((self._name, self._started, time.monotonic_ns()))
            self._started = 0


@dataclass
class Variant:
    """One engine of one rank; k = 0 stands for all buckets in one chunk."""

    k: int
    shard: bool
    engine: Engine
    spans: Spans


def one_step(workload: Workload, variant: Variant, number: int, together: threading.Barrier) -> dict[str, object]:
    """Times of the ends of the last backward and of the step, and spans of reductions and updates. Ranks start
    together, so that no rank computes the next batch on a core that another rank needs to end this one."""
    engine = variant.engine
    together.wait(60.0)
    result = engine.train_batch(replica_batch(workload, engine, number))
    engine.parameters()  # waits for parameters of the other replica
    stop_ns = time.monotonic_ns()
    loss = result.loss
    spans, moved = engine.timeline.take(), variant.spans.found[:]
    variant.spans.found.clear()
    return {"loss": loss, "stop_ns": stop_ns,
            "start_ns": max(span.stop_ns for span in spans if span.category in _COMPUTE), "moving": moved,
            "optimizer": [(span.label, span.start_ns, span.stop_ns) for span in spans if span.category == "optimizer"]}


def on_one_clock(ranks: Sequence[dict]) -> dict:
    """One step of all ranks: seconds of its end, and the spans of all ranks in milliseconds after the last backward."""
    zero = max(step["start_ns"] for step in ranks)

    def shown(rows):
        return [(name, 1e-6 * (begin - zero), 1e-6 * (end - zero)) for name, begin, end in rows]

    return {"seconds": 1e-9 * (max(step["stop_ns"] for step in ranks) - zero), "loss": ranks[0]["loss"],
            "ranks": [{what: shown(step[what]) for what in ("moving", "optimizer")} for step in ranks]}


def optim_of(k: int, shard: bool, options: argparse.Namespace, phi: int) -> Optim:
    buckets = k or -(-phi // options.bucket_size)
    return Optim(offload="stream", bucket_size=options.bucket_size, chunk_buckets=buckets, shard=shard)


def measure_rank(world: World, workload: Workload, options: argparse.Namespace, variants: list[tuple[int, bool]],
                 phi: int, together: threading.Barrier) -> list[dict]:
    """{"k", "shard", "rounds": [[step, ...], ...]} for every variant, on one rank."""
    opened = []
    for k, shard in variants:
        spans = Spans()
        recorded = replace(world, backend=RecordedBackend(world.backend, spans))
        opened.append(Variant(k, shard, build_engine(workload, recorded, Mesh(data=world.size),
                                                     optim_of(k, shard, options, phi)), spans))
    rounds: dict[tuple[int, bool], list] = {key: [] for key in variants}
    number = 0
    for turn in range(options.rounds + 1):
        for variant in opened if turn % 2 == 0 else reversed(opened):
            steps = [one_step(workload, variant, number + offset, together)
                     for offset in range(options.steps + 1)]
            if turn:  # the first round and the first step of each block do not count
                rounds[variant.k, variant.shard].append(steps[1:])
        number += options.steps + 1
    for variant in opened:
        variant.engine.close()
    return [{"k": k, "shard": shard, "rounds": rounds[k, shard]} for k, shard in variants]


def count_parameters(world: World, workload: Workload) -> int:
    engine = build_engine(workload, world, Mesh(data=world.size), Optim())
    phi = len(engine.flat_optimizer.weights)
    engine.close()
    return phi


def measure(options: argparse.Namespace) -> dict:
    workload = QUICK if options.quick else FULL
    phi = run_ranks(lambda world: count_parameters(world, workload), RANKS)[0]
    variants = [(k, shard) for shard in (False, True) for k in (*options.k, 0)]

    def run(link: Link | None, which: list[tuple[int, bool]]) -> list[list[dict]]:
        together = threading.Barrier(RANKS)

        def measured(world: World) -> list[dict]:
            return measure_rank(world, workload, options, which, phi, together)

        return run_ranks(slowed(measured, link), RANKS, timeout_seconds=_TIMEOUT_SECONDS)

    unthrottled = run(None, [(0, False)])[0][0]["rounds"]
    update_seconds = median(1e-9 * sum(end - begin for _, begin, end in step["optimizer"])
                            for steps in unthrottled for step in steps)
    rate = ring_bytes("all_reduce", RANKS, 4 * phi) / (update_seconds * options.reduce_share)
    ranks = run(Link(bytes_per_second=rate), variants)
    rows = [summary(*both) for both in zip(*ranks, strict=True)]
    by_variant = {(row["k"], row["shard"]): row for row in rows}
    for row in rows:
        sequential = by_variant[0, row["shard"]]
        row["of_sequential"] = asdict(ratios(row["round_seconds"], sequential["round_seconds"]))
        row["shown"] = str(ratios(row["round_seconds"], sequential["round_seconds"]))
    print(f"{phi} parameters in buckets of {options.bucket_size}; link of {rate / 1e6:.0f} MB/s: an update takes "
          f"{1e3 * update_seconds:.1f} ms alone, a reduction {1e3 * update_seconds * options.reduce_share:.1f} ms")
    print(table(("k", "sharded", "step end ms", "of sequential", "moving ms", "optimizer ms", "overlap ms"),
                [(row["k"] or "all", "yes" if row["shard"] else "no", f"{1e3 * row['seconds']:.2f}", row["shown"],
                  *(f"{row[name]:.2f}" for name in ("moving_ms", "optimizer_ms", "overlap_ms"))) for row in rows]))
    results = {"workload": asdict(workload), "phi": phi, "bucket_size": options.bucket_size, "bytes_per_second": rate,
               "update_seconds": update_seconds, "rows": rows}
    path = write(options, "overlap", results)
    shown_k = options.k[len(options.k) // 2]
    draw_timeline({f"k = {row['k'] or 'all'}": row["example"] for row in rows
                   if row["k"] in (0, shown_k) and not row["shard"]}, path.with_suffix(".png"))
    draw_curve(rows, -(-phi // options.bucket_size), path.with_name(path.stem + "-curve.png"))
    return results


def summary(*ranks: dict) -> dict:
    """Summary of one variant from its ranks."""
    rounds = [[on_one_clock(steps) for steps in zip(*same, strict=True)]
              for same in zip(*(rank["rounds"] for rank in ranks), strict=True)]
    steps = sorted((step for row in rounds for step in row), key=lambda step: step["seconds"])
    seconds = [median(step["seconds"] for step in row) for row in rounds]
    apart = [(covered(one["moving"]), covered(one["optimizer"]), covered([*one["moving"], *one["optimizer"]]))
             for step in steps for one in step["ranks"]]
    return {"k": ranks[0]["k"], "shard": ranks[0]["shard"], "round_seconds": seconds, "seconds": median(seconds),
            "losses": [step["loss"] for row in rounds for step in row],
            "moving_ms": median(moving for moving, _, _ in apart),
            "optimizer_ms": median(updating for _, updating, _ in apart),
            "overlap_ms": median(moving + updating - both for moving, updating, both in apart),
            "example": steps[len(steps) // 2]["ranks"]}


def covered(spans: Sequence[tuple[str, float, float]]) -> float:
    """Milliseconds after the last backward that are covered by at least one of `spans`."""
    total = reached = 0.0
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def draw_timeline(examples: dict[str, list[dict]], path: Path) -> None:
    figure = Figure(figsize=(10, 2.2 * len(examples) + 0.6))
    for place, (axes, (name, ranks)) in enumerate(zip(
            figure.subplots(len(examples), 1, sharex=True, squeeze=False)[:, 0], examples.items(), strict=True)):
        labels = []
        for rank, step in enumerate(ranks):
            for what, colour in (("moving", "tab:orange"), ("optimizer", "tab:green")):
                for number, (_, begin, end) in enumerate(step[what]):
                    axes.barh(len(labels), end - begin, left=begin, height=0.8, color=colour, alpha=0.55 + 0.3 *
                              (number % 2), edgecolor="white", linewidth=0.5)
                labels.append(f"rank {rank} {'reductions' if what == 'moving' else what}")
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_title(name, loc="left")
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if place == len(examples) - 1:
            axes.set_xlabel("milliseconds after the last backward")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def draw_curve(rows: list[dict], num_buckets: int, path: Path) -> None:
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for shard, colour in ((False, "tab:blue"), (True, "tab:red")):
        mine = [row for row in rows if row["shard"] == shard]
        name = "sharded" if shard else "unsharded"
        xs = [row["k"] or num_buckets for row in mine]
        middle = [1e3 * row["seconds"] for row in mine]
        least = [1e3 * min(row["round_seconds"]) for row in mine]
        greatest = [1e3 * max(row["round_seconds"]) for row in mine]
        axes.plot(xs, middle, "o-", color=colour, label=name)
        axes.fill_between(xs, least, greatest, color=colour, alpha=0.15)
        axes.axhline(middle[-1], color=colour, linestyle=":", linewidth=1, label=f"{name}, sequential (k = all)")
    ticks = [row["k"] or num_buckets for row in rows if not row["shard"]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [*map(str, ticks[:-1]), "all"])
    axes.set(xlabel="k: buckets that are averaged in one piece", ylabel="step end, milliseconds", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--k", type=int, nargs="+", help="buckets in a chunk; all is always there")
    made.add_argument("--rounds", type=int)
    made.add_argument("--steps", type=int, help="counted steps of each variant in a round")
    made.add_argument("--bucket-size", type=int, help="parameters in a bucket")
    made.add_argument("--reduce-share", type=float, default=1.0, help="time of the reduction over that of the update")
    options = made.parse_args(arguments)
    options.k = options.k or ([1, 4] if options.quick else [1, 2, 4, 8, 16])
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.steps = options.steps or (2 if options.quick else 6)
    options.bucket_size = options.bucket_size or (32768 if options.quick else 262144)
    return options


if __name__ == "__main__":
    measure(parse())
