"""The planner against real runs here: step times and memory of more than 30 configurations on 1, 2 and 4 ranks.

    python -m benchmarks.planner.measured [--cluster FILE] [--again FILE] [--layers 4] [--hidden 256] [--steps 9]
        [--rounds 2] [--memory FILE]

One model and one global batch; configurations differ in mesh, microbatch, policy, checkpointing and sharding. The
cluster is measured first unless --cluster names its file. Each configuration is run in separate real processes, once in
each round, so that other load of the machine affects all equally: the median of the rounds' median steps counts; one
more run of two steps counts the bytes. The agreement of the first and the last round limits that of any prediction. The
table has predicted and measured seconds and bytes of each; below are the rank correlation (Spearman), the median
errors, and how far the choice of a search over meshes, microbatches and checkpoints is from the best configuration
measured with as many ranks.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
from pydantic import TypeAdapter

from benchmarks.record import results_file, write_results
from ranvier.config import read
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Checkpoint, Data, Train, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.hardware import Cluster
from ranvier.launch.mpiexec import mpi_available
from ranvier.mesh import Mesh
from ranvier.planner.candidates import predict
from ranvier.planner.measure import measure
from ranvier.planner.search import search
from ranvier.planner.work import Work
from ranvier.testing.ranks import run_processes
from ranvier.world import World

_WARMUP = 3


def configurations(base: ResolvedRun, quick: bool = False) -> list[ResolvedRun]:
    """The configurations that are run."""
    found = []

    def add(mesh: Mesh, size: int, policy: str = "message-driven", checkpoint: object = "none", shard: bool = False
            ) -> None:
        found.append(replace(base, mesh=mesh, batch=replace(base.batch, microbatch_size=size),
                             pipeline=replace(base.pipeline, policy=policy),
                             memory=replace(base.memory, recompute=checkpoint),
                             optim=replace(base.optim, shard=shard)))

    meshes = [Mesh(), Mesh(data=2), Mesh(pipe=2), Mesh(col=2), Mesh(data=4), Mesh(pipe=4), Mesh(data=2, pipe=2),
              Mesh(row=2, col=2), Mesh(pipe=2, col=2), Mesh(data=2, col=2)]
    if quick:
        meshes = [Mesh(), Mesh(pipe=2)]
    for mesh in meshes:
        for size in (2, 4, 8):
            if not quick or size == 4:
                add(mesh, size)
    if quick:
        return found
    for mesh in (Mesh(), Mesh(pipe=2), Mesh(pipe=4), Mesh(data=2, pipe=2)):
        add(mesh, 4, checkpoint=1)
    for mesh in (Mesh(pipe=2), Mesh(pipe=4)):
        for policy in ("1f1b", "gpipe"):
            add(mesh, 4, policy=policy)
    add(Mesh(data=4), 8, shard=True)
    return found


def train_on_rank(world: World, path: str) -> None:
    """One rank of one configuration, with as many threads as `ranvier train` would give it."""
    from ranvier.system.machine import threads_per_rank
    from ranvier.train.loop import train

    torch.set_num_threads(threads_per_rank(world.backend.size))
    train(read.merge([read.load(path)[1]]).run, "measured", world, stream=io.StringIO())


def step_seconds(run: ResolvedRun, transport: str) -> float:
    """Median of the steps of a run."""
    with _trained(run, transport) as folder:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return median(line["step_seconds"] for line in lines[_WARMUP:])


def peak_bytes(run: ResolvedRun, transport: str) -> int:
    """Peak bytes of the rank that has most, in a run of two steps in which each storage is counted."""
    with _trained(replace(run, memory_report=True, train=replace(run.train, steps=2)), transport) as folder:
        memory = json.loads((folder / "summary.json").read_text())["memory"]
    return max(sum(rank["device"].values()) for rank in memory)


@contextmanager
def _trained(run: ResolvedRun, transport: str) -> Iterator[Path]:
    """The folder of results of a run in separate processes."""
    with tempfile.TemporaryDirectory(prefix="planner-") as name:
        yield _run(run, Path(name), transport)


def _run(run: ResolvedRun, folder: Path, transport: str) -> Path:
    read.write(replace(run, run_dir=None), folder / "job.toml")
    text = (folder / "job.toml").read_text()
    (folder / "job.toml").write_text(f"run_dir = {json.dumps(str(folder / 'run'))}\n{text}")
    run_processes("benchmarks.planner.measured:train_on_rank", run.mesh.size, transport,
                  args=[str(folder / "job.toml")], timeout_seconds=600.0)
    return folder / "run"


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation, for values without ties."""
    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(place) for place in range(len(values))]

    count = len(first)
    apart = sum((a - b) ** 2 for a, b in zip(ranks(first), ranks(second), strict=True))
    return 1.0 - 6.0 * apart / (count * (count * count - 1)) if count > 1 else 1.0


def describe(run: ResolvedRun) -> str:
    extra = [f"mb {run.batch.microbatch_size}", run.pipeline.policy if run.mesh.pipe > 1 else "",
             f"checkpoint {run.memory.recompute}" if run.memory.recompute != "none" else "",
             "sharded" if run.optim.shard else ""]
    return f"{run.mesh}, {', '.join(filter(None, extra))}"


def compare(base: ResolvedRun, cluster: Cluster, runs: Sequence[ResolvedRun], transport: str, known: Mapping[str, dict],
            rounds: int, counted: Mapping[str, int]) -> dict:
    """known: earlier measurements, by configuration. counted: only bytes."""
    work, rows, runs, chosen = Work(), [], list(runs), {}
    for count in sorted({run.mesh.size for run in runs} - {1}):
        run = search(base, cluster, count, ("mesh", "microbatch", "checkpoint"), work=work).best[0].run
        chosen[count] = describe(run)
        if chosen[count] not in map(describe, runs):
            runs.append(run)
    seconds: dict[str, list[float]] = {name: list(row["rounds"]) for name, row in known.items()}
    fresh = [run for run in runs if describe(run) not in known]
    for number in range(rounds):
        for place, run in enumerate(fresh):
            seconds.setdefault(describe(run), []).append(step_seconds(run, transport))
            print(f"round {number + 1}, {place + 1} of {len(fresh)}, {describe(run)}: "
                  f"{1e3 * seconds[describe(run)][-1]:.0f} ms", flush=True)
    for run in runs:
        name, found = describe(run), predict(run, cluster, work)
        peak = counted[name] if name in counted else peak_bytes(run, transport)
        rows.append({"configuration": name, "ranks": run.mesh.size, "predicted": found.cost.seconds,
                     "measured": median(seconds[name]), "rounds": seconds[name], "peak_bytes": peak,
                     "predicted_bytes": max(entry.device_bytes for entry in found.memory)})
        row = rows[-1]
        print(f"{name}: predicted {1e3 * row['predicted']:.0f} ms, measured {1e3 * row['measured']:.0f} ms "
              f"({row['predicted'] / row['measured'] - 1:+.0%}); {row['predicted_bytes'] / 2**20:.1f} MiB, "
              f"{peak / 2**20:.1f} ({row['predicted_bytes'] / peak - 1:+.1%})", flush=True)
    first, last = ([row["rounds"][place] for row in rows] for place in (0, -1))
    predicted, real = [[row[name] for row in rows] for name in ("predicted", "measured")]
    errors = [abs(one / other - 1.0) for one, other in zip(predicted, real, strict=True)]
    memory = [abs(row["predicted_bytes"] / row["peak_bytes"] - 1.0) for row in rows]
    return {"rows": rows, "correlation": spearman(predicted, real), "median_error": median(errors),
            "rounds": None if any(len(row["rounds"]) == 1 for row in rows) else {
                "correlation": spearman(first, last), "median_difference": median(
                    abs(one / other - 1.0) for one, other in zip(first, last, strict=True))},
            "memory_median_error": median(memory), "memory_largest_error": max(memory),
            "choices": [_choice(rows, count, name) for count, name in chosen.items()],
            "model": asdict(base.model), "batch": base.batch.global_size}


def _choice(rows: Sequence[dict], count: int, name: str) -> dict:
    """The choice of the search for `count` ranks, and its time over the least that was measured with as many."""
    seconds = {row["configuration"]: row["measured"] for row in rows if row["ranks"] == count}
    best = min(seconds, key=seconds.get)
    return {"ranks": count, "choice": name, "best": best, "choice_over_best": seconds[name] / seconds[best]}


def together(results: Sequence[dict]) -> dict:
    """The configurations that all of several results have, with all their rounds; the cluster is that of the last
    result."""
    if not results:
        return {"rows": [], "cluster": None}
    *others, last = ({row["configuration"]: row for row in one["rows"]} for one in results)
    rows = [{**row, "rounds": [seconds for one in (*others, last) for seconds in one[name]["rounds"]]}
            for name, row in last.items() if all(name in one for one in others)]
    return {"rows": rows, "cluster": results[-1]["cluster"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="a cluster file of this machine; by default it is measured first")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--again", type=Path, nargs="+", default=[], help="files of results: predict anew what was "
                        "measured there, on the last one's cluster; rounds of several are put together")
    parser.add_argument("--memory", type=Path, help="file of results: bytes, which no two runs differ in, are as there")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    before = together([json.loads(path.read_text()) for path in options.again])
    counted = {row["configuration"]: row["peak_bytes"] for row in (
        json.loads(options.memory.read_text()) if options.memory else before)["rows"]}
    cluster = load_cluster(options.cluster) if options.cluster else (
        TypeAdapter(Cluster).validate_python(before["cluster"]) if options.again else measure(print))
    base = ResolvedRun(batch=Batch(global_size=32, microbatch_size=4), checkpoint=Checkpoint(every=0),
               train=Train(steps=_WARMUP + (2 if options.quick else options.steps), sample_tokens=0, eval_sequences=4),
               model=Transformer(num_layers=options.layers, hidden=options.hidden, heads=4, vocab=2048, sequence=128),
               data=Data(max_bytes=2_000_000))
    transport = "torch" if mpi_available() is not None else "mpi"
    results = compare(base, cluster, configurations(base, options.quick), transport,
                      {row["configuration"]: row for row in before["rows"]}, options.rounds, counted)
    print(f"rank correlation {results['correlation']:.3f}, median error {results['median_error']:.1%}, of memory "
          f"{results['memory_median_error']:.1%} (at most {results['memory_largest_error']:.1%})")
    if results["rounds"] is not None:
        print(f"the first and the last round: rank correlation {results['rounds']['correlation']:.3f}, median "
              f"difference {results['rounds']['median_difference']:.1%}")
    for one in results["choices"]:
        print(f"{one['ranks']} ranks: the search chooses {one['choice']}, which takes {one['choice_over_best']:.3f} of "
              f"the time of the best measured ({one['best']})")
    path = options.output or results_file("planner", "measured", quick=options.quick)
    write_results(path, {"cluster": asdict(cluster), "transport": transport, **results,
                         "measured_in": [path.name for path in options.again]})
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
