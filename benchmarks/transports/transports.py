"""Latency and bandwidth of messages and all-reduces between two ranks, 1 KB to 64 MB (AxoNN, Figures 3 and 4).

    python -m benchmarks.transports.transports [--quick]

Measured for Gloo and MPI, each raw (the library's own calls on one buffer) and through our Transport and Group, in
turns within one run. The raw calls are the bound: the difference is the price of messages that carry their own shapes,
of any-source arrival, and of ranks that sleep instead of spinning. Times are one-way, half of a ping-pong.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.record import results_file, write_results
from ranvier.comm.message import Message, MessageKind
from ranvier.comm.protocol import Group, Transport
from ranvier.launch.mpiexec import mpi_available
from ranvier.testing.ranks import run_processes
from ranvier.world import World

SIZES = [1 << power for power in range(10, 27, 2)]
QUICK_SIZES = [1 << 10, 1 << 16, 1 << 20]


def timed(call: Callable[[], object], barrier: Callable[[], object], budget_seconds: float) -> dict[str, float]:
    """Best and median seconds of `call`; both ranks make the same number of calls."""
    barrier()
    for _ in range(3):
        call()
    started = time.perf_counter()
    call()
    one = torch.tensor([budget_seconds / max(time.perf_counter() - started, 1e-6)])
    dist.all_reduce(one, dist.ReduceOp.MIN)
    seconds = []
    for _ in range(max(5, min(2000, int(one)))):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return {"best": min(seconds), "median": median(seconds)}


def measure(world: World, sizes: list[int], budget_seconds: float) -> dict:
    """{"raw" or "ours": {"point-to-point" or "all-reduce": {size: {"best", "median"}}}}, on every rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.PrefixStore("count", world.store), rank=world.rank,
                                world_size=world.size)
    other, group = 1 - world.rank, world.backend.group("data", [range(2)])
    transport = world.backend.transport("pipe")
    transport.connect([other], [other], sizes[-1] + 4096)
    raw_exchange, raw_reduce = _raw(world, other)
    found: dict = {kind: {"point-to-point": {}, "all-reduce": {}} for kind in ("raw", "ours")}
    for size in sizes:
        tensor, received = torch.zeros(size // 4), torch.zeros(size // 4)
        calls = {"raw": (partial(raw_exchange, tensor, received), partial(raw_reduce, tensor)),
                 "ours": (partial(_exchange, transport, world.rank, tensor), partial(_reduce, group, tensor))}
        for kind, (exchange, reduce) in calls.items():
            both = timed(exchange, group.barrier, budget_seconds)
            found[kind]["point-to-point"][size] = {name: seconds / 2 for name, seconds in both.items()}
            found[kind]["all-reduce"][size] = timed(reduce, group.barrier, budget_seconds)
    transport.flush()
    return found


def _exchange(transport: Transport, rank: int, tensor: torch.Tensor) -> None:
    if rank == 0:
        transport.send(1, Message(MessageKind.FORWARD, 0, 0, {"": tensor}))
    while transport.wait(60.0) is None:
        pass
    if rank == 1:
        transport.send(0, Message(MessageKind.FORWARD, 0, 0, {"": tensor}))


def _reduce(group: Group, tensor: torch.Tensor) -> None:
    group.all_reduce(tensor).wait()


def _raw(world: World, other: int) -> tuple[Callable, Callable]:
    """The library's own blocking ping-pong and all-reduce."""
    if world.backend.name == "mpi":
        from mpi4py import MPI
        comm = MPI.COMM_WORLD.Dup()

        def exchange(tensor, received):
            if world.rank == 0:
                comm.Send(tensor.numpy(), other)
            comm.Recv(received.numpy(), other)
            if world.rank == 1:
                comm.Send(tensor.numpy(), other)

        return exchange, lambda tensor: comm.Allreduce(MPI.IN_PLACE, tensor.numpy())

    def exchange(tensor, received):
        if world.rank == 0:
            dist.send(tensor, other)
        dist.recv(received, other)
        if world.rank == 1:
            dist.send(tensor, other)

    return exchange, dist.all_reduce


def table(found: dict[str, dict]) -> str:
    lines = []
    for what in ("point-to-point", "all-reduce"):
        columns = [(transport, kind) for transport in found for kind in ("raw", "ours")]
        lines.append(f"{what}: best us (MB/s)".ljust(30) + "".join(f"{' '.join(column):>22}" for column in columns)
                     + "   ours/raw " + ", ".join(found))
        for size in next(iter(found.values()))["raw"][what]:
            best = {column: found[column[0]][column[1]][what][size]["best"] for column in columns}
            cells = "".join(f"{1e6 * one:.1f} ({int(size) / one / 1e6:.0f})".rjust(22) for one in best.values())
            ratios = ", ".join(f"{best[transport, 'ours'] / best[transport, 'raw']:.2f}" for transport in found)
            lines.append(f"{int(size) // 1024:>10} KB".ljust(30) + cells + "   " + ratios)
    return "\n".join(lines)


def picture(found: dict[str, dict], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(2, 2, figsize=(11, 8), sharex=True)
    for row, what in zip(rows, ("point-to-point", "all-reduce"), strict=True):
        for transport in found:
            for kind, style in (("raw", "--"), ("ours", "-")):
                sizes = [int(size) for size in found[transport][kind][what]]
                best = [one["best"] for one in found[transport][kind][what].values()]
                colour = "tab:blue" if transport == "torch" else "tab:orange"
                label = f"{'Gloo' if transport == 'torch' else 'MPI'} {kind}"
                row[0].plot(sizes, [1e6 * seconds for seconds in best], style, color=colour, label=label)
                row[1].plot(sizes, [size / seconds / 1e9 for size, seconds in zip(sizes, best, strict=True)], style,
                            color=colour, label=label)
        row[0].set(xscale="log", yscale="log", title=f"{what}: time", ylabel="microseconds", xlabel="bytes")
        row[1].set(xscale="log", title=f"{what}: bandwidth", ylabel="GB/s", xlabel="bytes")
        row[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three sizes and short times")
    options = parser.parse_args()
    sizes, budget = (QUICK_SIZES, 0.1) if options.quick else (SIZES, 1.0)
    transports = ["torch"] + (["mpi"] if (reason := mpi_available()) is None else [])
    if reason:
        print(f"MPI left out: {reason}")
    here = "benchmarks.transports.transports:measure"
    found = {transport: run_processes(here, 2, transport, args=[sizes, budget], timeout_seconds=900)[0]
             for transport in transports}
    print(table(found))
    path = results_file("transports", "transports", quick=options.quick)
    write_results(path, {"seconds": found})
    picture(found, path.with_suffix(".png"))
    print(f"wrote {path} and .png")


if __name__ == "__main__":
    main()
