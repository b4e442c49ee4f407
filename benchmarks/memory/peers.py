"""Our optimizer against PyTorch's own, on the same model, data and steps, in one run.

    python -m benchmarks.memory.peers [--quick]

    one rank     torch.optim.AdamW(fused=True) in a plain loop, and our engine with offload none, stream and host
    two ranks    DistributedDataParallel with ZeroRedundancyOptimizer over Gloo, and ours on data 2, sharded and not

Settings that save memory must not cost much time, and must train the same. Contenders are processes that stay alive;
they take turns in blocks of timed steps, alternately forwards and backwards through the list, and sleep between their
turns. Each block begins with an untimed step. Ratios are of speeds, above 1 is faster than the peer, formed within each
round. The losses of the warm-up must agree to 1e-4 with those of the plain loop, otherwise no ratio is printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.memory.program import MIB, build_engine, parser, ratios, replica_batch, state_bytes, table, write
from benchmarks.pipeline.workload import Workload, whole_network
from benchmarks.rank_team import RankTeam
from ranvier.comm.torch_backend import TorchBackend
from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.world import World

FULL = Workload(num_layers=4, hidden=256, vocab=8192, sequence=64, sequences=8, microbatches=4)
QUICK = Workload(num_layers=2, hidden=64, heads=2, vocab=512, sequence=32, sequences=4, microbatches=4)
_CPU = torch.device("cpu")
_TIMEOUT = timedelta(seconds=300)
_AGREE = 1e-4

Step = Callable[[int], Callable[[], float]]
"""Training step `number`; returns a function that reads this rank's share of its loss."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """kind: plain, zero or ours. peer: the contender with whose speed it is compared."""

    name: str
    kind: str
    ranks: int
    peer: str
    optim: dict[str, object]


def contenders(bucket_size: int) -> list[Contender]:
    def ours(name: str, ranks: int, peer: str, **optim) -> Contender:
        return Contender(name=name, kind="ours", ranks=ranks, peer=peer, optim={"bucket_size": bucket_size, **optim})

    return [
        Contender(name="torch AdamW", kind="plain", ranks=1, peer="torch AdamW", optim={}),
        *(ours(f"ours {offload}", 1, "torch AdamW", offload=offload) for offload in ("none", "stream", "host")),
        Contender(name="DDP + ZeRO", kind="zero", ranks=2, peer="DDP + ZeRO", optim={}),
        ours("ours data 2", 2, "DDP + ZeRO", offload="none", shard=False),
        ours("ours data 2 sharded", 2, "DDP + ZeRO", offload="none", shard=True)]


# ---------------------------------------------------------------------- one rank


@contextmanager
def open_torch(workload: Workload, contender: Contender, rank: int, store: dist.Store
               ) -> Iterator[tuple[Step, Callable[[], int]]]:
    """PyTorch's own: a plain loop, or DDP with ZeRO. Yields a step and a function that counts the optimizer's bytes."""
    model, size = workload.model(), contender.ranks
    network = whole_network(workload, model)
    if contender.kind == "zero":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        network = DistributedDataParallel(network, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=workload.learning_rate,
                                            fused=True)
        inner = optimizer.optim
    else:
        optimizer = inner = workload.optimizer(network.parameters())
    share, pieces = workload.sequences // size, workload.microbatches // size

    def step(number: int) -> Callable[[], float]:
        inputs, targets = (tensor[rank * share:(rank + 1) * share] for tensor in workload.batch(number))
        optimizer.zero_grad()
        sums = []
        for piece, (part, wanted) in enumerate(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)):
            with network.no_sync() if size > 1 and piece < pieces - 1 else nullcontext():
                total, _ = model.loss(network(part), wanted)
                (total * (size / workload.tokens_per_step)).backward()
            sums.append(total.detach())
        optimizer.step()
        return lambda: float(sum(sums)) / workload.tokens_per_step

    yield step, lambda: sum(tensor.nbytes for state in inner.state.values() for tensor in state.values()
                            if isinstance(tensor, torch.Tensor))
    if contender.kind == "zero":
        dist.destroy_process_group()


@contextmanager
def open_ours(workload: Workload, contender: Contender, rank: int, store: dist.Store
              ) -> Iterator[tuple[Step, Callable[[], int]]]:
    backend = TorchBackend(rank, contender.ranks, store, _CPU, _TIMEOUT.total_seconds())
    world = World(backend=backend, store=store, launcher="benchmark", device=_CPU, local_rank=rank,
                  local_size=contender.ranks)
    engine = build_engine(workload, world, Mesh(data=contender.ranks), Optim(**contender.optim))

    def step(number: int) -> Callable[[], float]:
        result = engine.train_batch(replica_batch(workload, engine, number))
        engine.timeline.take()
        return lambda: result.loss if rank == 0 else 0.0

    yield step, lambda: state_bytes(engine)
    engine.close()
    backend.close()


def serve(commands: Connection, workload: Workload, contender: Contender, rank: int, port: int, warmup: int) -> None:
    """Process of one rank: warm up, then run as many steps as the driver sends, until it sends 0."""
    torch.set_num_threads(1)
    store = dist.PrefixStore(contender.name, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT))
    opened = open_ours if contender.kind == "ours" else open_torch
    with opened(workload, contender, rank, store) as (step, count_bytes):
        commands.send([step(number)() for number in range(warmup)])
        number = warmup
        while (steps := commands.recv()) > 0:
            marks, read = [], step(number)
            for following in range(number + 1, number + 1 + steps):
                marks.append(time.monotonic())
                previous, read = read, step(following)
                previous()
            read()
            marks.append(time.monotonic())
            number += 1 + steps
            commands.send({"marks": marks, "state_bytes": count_bytes(), "peak_rss_bytes": peak_rss_bytes()})


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return psutil.Process().memory_info().rss


# ---------------------------------------------------------------------- the driver


class Team(RankTeam):
    """The processes of one contender."""

    def __init__(self, context, workload: Workload, contender: Contender, port: int, warmup: int) -> None:
        super().__init__(context, contender.name, contender.ranks, serve,
                         lambda rank: (workload, contender, rank, port, warmup))
        self.contender = contender

    def losses(self) -> list[float]:
        """Losses of the warm-up steps, over all ranks."""
        return [sum(shares) for shares in zip(*self.answers(), strict=True)]

    def run(self, steps: int) -> dict[str, object]:
        """Run one timed block: seconds of each step until its last rank is done; bytes by rank."""
        answers = self.ask(steps)
        marks = [max(times) for times in zip(*(answer["marks"] for answer in answers), strict=True)]
        return {"seconds": [later - sooner for sooner, later in pairwise(marks)],
                "state_bytes": [answer["state_bytes"] for answer in answers],
                "peak_rss_bytes": [answer["peak_rss_bytes"] for answer in answers]}


def measure(options: argparse.Namespace) -> list[dict]:
    workload = QUICK if options.quick else FULL
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.memory.program", "torch.distributed.optim"])
    teams = [Team(context, workload, contender, store.port, options.warmup)
             for contender in contenders(options.bucket_size)]
    rows = {team.contender.name: {**asdict(team.contender), "losses": team.losses(), "rounds": []} for team in teams}
    for number in range(options.rounds):
        for team in teams if number % 2 == 0 else reversed(teams):
            rows[team.contender.name]["rounds"].append(team.run(options.steps))
    for team in teams:
        team.end()
    reference = rows["torch AdamW"]["losses"]
    for row in rows.values():
        row["largest_loss_difference"] = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], reference, strict=True))
    middles = {name: [median(entry["seconds"]) for entry in row["rounds"]] for name, row in rows.items()}
    agree = all(row["largest_loss_difference"] <= _AGREE for row in rows.values())
    lines = []
    for name, row in rows.items():
        row["milliseconds"] = 1e3 * median(middles[name])
        row["speed_over_peer"] = asdict(ratios(middles[row["peer"]], middles[name])) if agree else None
        last = row["rounds"][-1]
        lines.append((name, row["ranks"], f"{row['milliseconds']:.1f}",
                      str(ratios(middles[row["peer"]], middles[name])) if agree else "losses differ", row["peer"],
                      " / ".join(f"{size / MIB:.2f}" for size in last["state_bytes"]),
                      " / ".join(f"{size / MIB:.0f}" for size in last["peak_rss_bytes"]),
                      f"{row['largest_loss_difference']:.1e}"))
    print(table(("contender", "ranks", "ms/step", "speed over peer", "peer", "states MiB by rank",
                 "peak RSS MiB by rank", "loss differs by"), lines))
    write(options, "peers", {"workload": asdict(workload), "warmup": options.warmup, "steps": options.steps,
                             "bucket_size": options.bucket_size, "contenders": list(rows.values())})
    return list(rows.values())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, help="blocks of each contender")
    made.add_argument("--steps", type=int, help="timed steps in a block")
    made.add_argument("--warmup", type=int, default=4, help="steps before the first block, whose losses are compared")
    made.add_argument("--bucket-size", type=int, help="parameters in a bucket of ours")
    options = made.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 6)
    options.steps = options.steps or (2 if options.quick else 8)
    options.bucket_size = options.bucket_size or (16384 if options.quick else 262144)
    return options


if __name__ == "__main__":
    measure(parse())
