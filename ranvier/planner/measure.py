"""The cluster file of this machine, measured in under a minute (`ranvier doctor --measure`).

On a CPU one process per core (at most 16) computes at the same time, each with one thread, as ranks do: a single
process would have all of the memory bandwidth and a higher clock. Transformer blocks of several widths are timed
forward and backward, and the three constants of `Device.kernel_seconds` are fitted to all of them by relative errors,
in fp32; other number formats have their own rate and the same other two constants. On a GPU each kind of kernel is
timed separately (`ranvier.planner.microbenchmarks`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
import psutil
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ranvier.comm.message import Message, MessageKind
from ranvier.comm.protocol import Group
from ranvier.config.run import Optim, Run, Transformer
from ranvier.cost.cluster_files import first_fault
from ranvier.cost.hardware import Cluster, Device, Format, Host, Link, Rate
from ranvier.cost.kernels import backward_of, weight_gradients_of
from ranvier.errors import ConfigError
from ranvier.launch.mpiexec import mpi_available
from ranvier.launch.rank_processes import RanksFailed, run_processes
from ranvier.models import families
from ranvier.optim.rules import AdamW
from ranvier.plan.block_costs import block_costs
from ranvier.planner.microbenchmarks import CLOCK_SECONDS, GPU, measured_device, time_call
from ranvier.precision import DTYPES
from ranvier.system.machine import affinity, available_cores, memory_limit_bytes
from ranvier.tensor import float8
from ranvier.world import World

_SHAPES = ((64, 32, 4), (128, 128, 2), (256, 64, 8), (256, 128, 4), (384, 64, 4), (512, 128, 2), (768, 64, 2))
"""(width, tokens, sequences) of the blocks that are timed."""
_PRODUCT = 768
_MESSAGES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
_CROWD_SHAPE = (256, 128, 4)
_BETWEEN = (512, 256)
"""Rows and width of the product between two timed collectives: about a millisecond, as between two collectives of a
tensor mesh."""
_MOST_PROCESSES = 16
_FORMATS: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
"""Number formats of a CPU."""
Sample = tuple[Sequence[tuple[float, float]], float]
"""FLOPs and bytes moved of each kernel, and the seconds of all kernels together."""
_ROUNDS = 20
"""Most rounds until it is settled for each kernel whether FLOPs or bytes bound it."""


def measure(progress: Callable[[str], None] = lambda line: None) -> Cluster:
    """Measure this machine as a cluster of one node. Starts processes, which have ended when it returns."""
    cuda = torch.cuda.is_available()
    transport: Literal["torch", "mpi"] = "torch" if cuda or mpi_available() is not None else "mpi"
    if cuda:
        progress("computing, on one device")
        with torch.device("cuda", 0):
            found = _gpu()
        devices = torch.cuda.device_count()
    else:
        devices = min(available_cores(), _MOST_PROCESSES)
        progress(f"computing, on {devices} cores at the same time")
        found = _slowest(_on_ranks("compute_on_rank", devices, "torch"))
        progress(f"computing and exchanging, twice as many ranks on {devices} cores")
        alone, crowded = (_on_ranks("crowd_on_rank", count, transport, args=[devices])
                          for count in (devices, 2 * devices))
        found |= _core_sharing_slowdown(alone, crowded)
    progress("messages between two ranks")
    links = _on_ranks("messages_on_rank", 2, transport, device="cuda" if devices > 1 and cuda else "cpu")[0]
    return make_cluster(found, links, devices, "cuda" if cuda else "cpu")


def _on_ranks(function: str, count: int, transport: Literal["torch", "mpi"], **more: Any) -> list[Any]:
    """Results of a function of this file on each of `count` ranks. ConfigError if they fail, or take too long."""
    try:
        return run_processes(f"ranvier.planner.measure:{function}", count, transport, timeout_seconds=120.0, **more)
    except RanksFailed as error:
        raise ConfigError(f"could not be measured: {str(error).splitlines()[0]}", code="measurement-failed",
                          where="this machine",
                          remedy="Measure again while the machine has nothing else to do.") from error


def make_cluster(measured: Mapping[str, Any], links: Mapping[str, Any], devices: int, kind: str) -> Cluster:
    """The cluster with these measurements. ConfigError if no machine can have them."""
    try:
        return _cluster(measured, links, devices, kind)
    except ValidationError as error:
        raise first_fault(error, "what was measured here") from error
    except (ArithmeticError, np.linalg.LinAlgError) as error:
        raise ConfigError("cannot be made of what was measured here", code="measurement-not-a-cluster", where="cluster",
                          value=str(error), remedy="Measure again while the machine has nothing else to do.") from error


def _cluster(measured: Mapping[str, Any], links: Mapping[str, Any], devices: int, kind: str) -> Cluster:
    memory = min(psutil.virtual_memory().total, memory_limit_bytes() or 1 << 62)
    device = measured["device"] if kind == "cuda" else _core(measured, memory)
    latency, rate = line([(size, links["messages"][str(size)]) for size in _MESSAGES])
    link = Link(bandwidth=rate, latency_seconds=latency)
    return Cluster(
        name=socket.gethostname(), nodes=1, devices_per_node=devices if kind == "cuda" else 16 * devices,
        device=device, host=Host(memory_bytes=memory, memory_bandwidth=devices * measured["update_bandwidth"]
                                 if kind == "cpu" else measured["host_bandwidth"]),
        inside=link, between=link, host_link=Link(bandwidth=measured["host_link"]),
        collective_seconds=max(0.0, links["collective"] - 2 * latency),
        source=f"measured by ranvier doctor --measure, torch {torch.__version__}")


def _core(measured: Mapping[str, Any], memory: int) -> Device:
    """One core of this machine's CPU."""
    _, moved, operation = fit(measured["precisions"][_FORMATS[0]]["samples"])
    rates = dict[Format, Rate]()
    for name, one in measured["precisions"].items():
        flops = seconds_of_a_flop(one["samples"], moved, operation)
        reached = 1.0 / flops if flops else one["product_flops"]
        peak = max(one["product_flops"], reached)
        rates[name] = Rate(peak_flops=peak, share=reached / peak)
    return Device(name="one core", cores=available_cores(), rates=rates, memory_bytes=memory, memory_share=1.0,
                  memory_bandwidth=1.0 / moved if moved else measured["update_bandwidth"],
                  update_bandwidth=measured["update_bandwidth"], operation_seconds=operation,
                  crowded_share=measured.get("crowded_share", 1.0), turn_seconds=measured.get("turn_seconds", 0.0))


# --- computing -------------------------------------------------------------------------------------------------------


def compute_on_rank(world: World) -> dict[str, Any]:
    """Measure compute on one of several processes that compute at the same time."""
    torch.set_num_threads(1)
    world.backend.group("control", [range(world.size)]).barrier()
    return _compute()


def crowd_on_rank(world: World, cores: int) -> dict[str, Any]:
    """Seconds of one process's blocks while all processes compute on `cores` cores; and the seconds that a collective
    of two ranks adds to computing, for ranks with a partner."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # there may be more cores than are measured
        os.sched_setaffinity(0, affinity()[:cores])
    world.backend.group("control", [range(world.size)]).barrier()
    blocks = sum(seconds for *_, seconds in _blocks(_CROWD_SHAPE, "fp32", lambda step: time_call(step, 1.0, fmean)))
    return {"blocks": blocks, "collective": _collective(world)}


def _collective(world: World) -> float | None:
    """Seconds that an all-reduce of a few numbers between two ranks adds to the computation before it, including the
    wait of the faster rank. All pairs are measured at the same time; the pairs change, since two ranks that take turns
    on one core wait longest. None without a partner."""
    everyone = world.backend.group("control", [range(world.size)])
    rows, width = _BETWEEN
    first, second = (torch.randn(size, width, device=world.device) for size in (rows, width))
    few = torch.zeros(64, device=world.device)

    def seconds(pair: Group | None, count: int = 100) -> float:
        everyone.barrier()
        began = time.perf_counter()
        for _ in range(count):
            first @ second
            if pair is not None:
                pair.all_reduce(few).wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return max((time.perf_counter() - began) / count, CLOCK_SECONDS)

    found = []
    for apart in (1, 2, 3):
        pairs = {tuple(sorted({rank, rank ^ apart if rank ^ apart < world.size else rank}))
                 for rank in range(world.size)}
        pair = world.backend.group("pairs", sorted(pairs))
        seconds(pair, 20)
        both, alone = zip(*((seconds(pair), seconds(None)) for _ in range(4)), strict=True)
        if len(pair.ranks) == 2:
            found.append(fmean(both) - fmean(alone))
    everyone.barrier()
    return max(0.0, fmean(found)) if found else None


def _core_sharing_slowdown(alone: Sequence[Mapping[str, Any]], crowded: Sequence[Mapping[str, Any]]
                           ) -> dict[str, float]:
    """Slowdown if two ranks take turns on each core: of the rates, and the additional seconds of a collective, once for
    each turn. On one core a collective never runs without turns: they are part of all its measurements."""
    blocks = [fmean(one["blocks"] for one in ranks) for ranks in (alone, crowded)]
    by_itself, in_turns = ([one["collective"] for one in ranks if one["collective"] is not None]
                           for ranks in (alone, crowded))
    waited = fmean(in_turns) - 2 * fmean(by_itself) if by_itself else 0.0
    return {"crowded_share": min(1.0, 2.0 * blocks[0] / blocks[1]), "turn_seconds": max(0.0, waited)}


def _compute() -> dict[str, Any]:
    return {
        "precisions": {name: {"samples": [sample for shape in _SHAPES for sample in _blocks(shape, name)],
                              "product_flops": _product(name, _PRODUCT)} for name in _FORMATS},
        "update_bandwidth": _update("cpu"), "host_link": _copy("cpu"),
    }


def _gpu() -> dict[str, Any]:
    """Measurements of the first device, with its link to the host."""
    facts, update = torch.cuda.get_device_properties(0), _update("cuda")
    formats: list[Format] = ["bf16", "fp16", "fp32"]
    if torch.cuda.get_device_capability(0) >= float8.CAPABILITY:
        formats.append("fp8")
    device = measured_device(torch.cuda.get_device_name(0), formats, memory_bytes=facts.total_memory,
                             multiprocessors=facts.multi_processor_count, update_bandwidth=update, sizes=GPU)
    return {"device": device, "host_link": _copy("cuda"), "host_bandwidth": _update("cpu")}


def _blocks(shape: tuple[int, int, int], precision: Literal["fp32", "bf16"],
            seconds: Callable[[Callable[[], object]], float] = time_call) -> list[Sample]:
    """Measurements of attention, MLP and head of one shape, forward and backward."""
    hidden, sequence, count = shape
    run = Run(precision=precision, model=Transformer(num_layers=1, hidden=hidden, heads=max(1, hidden // 64),
                                                     vocab=2048, sequence=sequence))
    dtype = DTYPES[precision]
    model = families.model_of(run, dtype=dtype)
    with torch.device("meta"):
        inputs, targets = families.sample_of(run, count)
    costs = {cost.name: cost for cost in block_costs(model, inputs, targets, dtype)}
    state = torch.randn(count, sequence, hidden, dtype=dtype).requires_grad_()
    found: list[Sample] = []
    for name in (*model.layers[0], "head"):
        block = model.blocks[name]()

        def step(block: nn.Module = block) -> None:
            out = block(state)
            out.backward(torch.ones_like(out))
            state.grad = None
            for parameter in block.parameters():
                parameter.grad = None

        forward = costs[name].kernels
        kernels = (*forward, *backward_of(forward), *weight_gradients_of(forward, dtype.itemsize))
        found.append(([(float(kernel.flops), float(kernel.moved_bytes)) for kernel in kernels], seconds(step)))
    return found


def _product(precision: str, size: int) -> float:
    """FLOPs per second of a large square product."""
    first, second = (torch.randn(size, size).to(DTYPES[precision]) for _ in range(2))
    return 2 * size ** 3 / time_call(lambda: first @ second)


def _update(kind: str) -> float:
    """Bytes per second that the optimizer moves: 28 for each parameter."""
    size = 1 << (21 if kind == "cpu" else 26)
    parameters, gradients, first, second = (torch.zeros(size, device=kind) for _ in range(4))
    rule = AdamW(Optim())
    return 28 * size / time_call(lambda: rule.update(
        parameters, gradients, {"exp_avg": first, "exp_avg_sq": second}, step=1, learning_rate=1e-3, weight_decay=0.0))


def _copy(kind: str) -> float:
    """Bytes per second from the device to the host's memory."""
    size = 1 << 24
    source = torch.zeros(size // 4, device=kind)
    target = torch.zeros(size // 4, device="cpu", pin_memory=kind == "cuda")
    return size / time_call(lambda: target.copy_(source))


def _slowest(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that all ranks reach: the mean of their times."""
    merged = dict(measured[0])
    merged["precisions"] = {
        name: {"samples": [(rows[0][0], sum(seconds for _, seconds in rows) / len(rows)) for rows in zip(
            *(one["precisions"][name]["samples"] for one in measured), strict=True)],
            "product_flops": min(one["precisions"][name]["product_flops"] for one in measured)}
        for name in measured[0]["precisions"]}
    merged["update_bandwidth"] = min(one["update_bandwidth"] for one in measured)
    return merged


# --- messages ---------------------------------------------------------------------------------------------------------


def messages_on_rank(world: World) -> dict[str, Any]:
    """One-way seconds of a message of each size, and the seconds that a collective adds to computing."""
    other, group = 1 - world.rank, world.backend.group("pair", [range(2)])
    transport = world.backend.transport("messages")
    transport.connect([other], [other], _MESSAGES[-1] + 4096)

    def exchange(tensor: Tensor) -> None:
        for turn in (0, 1):
            if world.rank == turn:
                transport.send(other, Message(MessageKind.FORWARD, 0, 0, {"": tensor}))
            elif transport.wait(30.0) is None:
                raise RuntimeError("a message did not come")

    found = {}
    for size in _MESSAGES:
        tensor = torch.zeros(size // 4, device=world.device)
        group.barrier()
        times = []
        for _ in range(30 if size < 1 << 20 else 12):
            start = time.perf_counter()
            exchange(tensor)
            times.append((time.perf_counter() - start) / 2)
        found[str(size)] = max(median(times), CLOCK_SECONDS)
    transport.flush()
    return {"messages": found, "collective": _collective(world)}


# --- from measurements to constants -----------------------------------------------------------------------------------


def fit(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Seconds of a FLOP, of a byte moved and of a launch, fitted to the samples by least squares of relative errors;
    none is negative. Each kernel takes the longer of the times of its FLOPs and its bytes, which depends on the
    constants: the fit is repeated until that does not change."""
    best, least = (0.0, 0.0, 0.0), float("inf")
    flop, byte = 1.0, 0.0  # initially all compute kernels are bound by FLOPs
    seen: set[tuple[bool, ...]] = set()
    for _ in range(_ROUNDS):
        computes = tuple(flop * flops >= byte * moved and flops > 0 for kernels, _ in samples
                         for flops, moved in kernels)
        if computes in seen:
            break
        seen.add(computes)
        kinds, rows = iter(computes), []
        for kernels, seconds in samples:
            row = [0.0, 0.0, float(len(kernels))]
            for flops, moved in kernels:
                is_product = next(kinds)
                row[0 if is_product else 1] += flops if is_product else moved
            rows.append([each / seconds for each in row])
        found = _least_squares(np.array(rows))
        flop, byte, _ = found
        if (error := _error(samples, found)) < least:
            least, best = error, found
    return best


def _least_squares(rows: Any) -> tuple[float, float, float]:
    """Nonnegative constants that bring the sum of each row's terms nearest to 1."""
    best, least = (0.0, 0.0, 0.0), float("inf")
    for count in (3, 2, 1):
        for columns in combinations(range(3), count):
            scale = np.linalg.norm(rows[:, columns], axis=0)
            if not scale.all():
                continue
            found = np.linalg.lstsq(rows[:, columns] / scale, np.ones(len(rows)), rcond=None)[0] / scale
            error = float(np.square(rows[:, columns] @ found - 1.0).sum())
            if (found > 0).all() and error < least:
                each = [float(found[columns.index(place)]) if place in columns else 0.0 for place in range(3)]
                least, best = error, (each[0], each[1], each[2])
    return best


def _error(samples: Sequence[Sample], constants: tuple[float, float, float]) -> float:
    flop, byte, launch = constants
    return sum((sum(max(flop * flops, byte * moved) + launch for flops, moved in kernels) / seconds - 1.0) ** 2
               for kernels, seconds in samples)


def seconds_of_a_flop(samples: Sequence[Sample], byte: float, launch: float) -> float:
    """Seconds of a FLOP by the same fit, for given times of a byte and a launch; 0 if these explain all of the time."""
    flop = float("inf")
    for _ in range(_ROUNDS):
        rows = []
        for kernels, seconds in samples:
            computing = [flops for flops, moved in kernels if flops and flop * flops >= byte * moved]
            others = sum(byte * moved for flops, moved in kernels if not flops or flop * flops < byte * moved)
            rows.append((sum(computing) / seconds, 1.0 - (others + launch * len(kernels)) / seconds))
        squares = sum(each * each for each, _ in rows)
        found = max(0.0, sum(each * left for each, left in rows) / squares) if squares else 0.0
        if found == flop:
            break
        flop = found
    return flop


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds of zero bytes, bytes per second) of a line fitted to (bytes, seconds) by relative errors."""
    rows = np.array([[1.0 / seconds, size / seconds] for size, seconds in points])
    latency, each = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    return max(0.0, float(latency)), 1.0 / max(float(each), 1e-15)
