"""Cases of `benchmarks.gpu.suite`: does it work on the device, and are the numbers right?"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from benchmarks.gpu.case import Finding, Findings, Options, attempt, synchronize
from benchmarks.gpu.programs import (
    Program,
    batches,
    engine_of,
    environment,
    losses,
    losses_on_shared_device,
    on_one_rank,
    one_device_environment,
    seconds_after_kill,
    world_of_one,
)
from ranvier.launch.mpiexec import mpi_available
from ranvier.mesh import Mesh
from ranvier.testing.ranks import RanksFailed, run_processes, run_ranks
from ranvier.train.determinism import deterministic_algorithms
from ranvier.world import World

SMALL = Program(layers=2, hidden=64, heads=2, vocab=256, sequence=32, steps=6, microbatches=4, samples=4)
TINY = Program(layers=1, steps=2)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "stream": {"optim": {"offload": "stream"}}, "host": {"optim": {"offload": "host"}},
    "hybrid": {"optim": {"offload": "hybrid", "offload_share": 0.5, "bucket_size": 4096}},
    "recompute": {"memory": {"recompute": 1}}, "dropout": {"dropout": 0.1}, "clip": {"optim": {"clip_norm": 1.0}},
    "one microbatch": {"microbatches": 1}, "no deferral": {"pipeline": {"defer_bytes": 0}},
    "update in backward": {"microbatches": 1, "optim": {"update_in_backward": True}},
    "update in backward, hybrid, clipped by the norm before": {"microbatches": 1, "optim": {
        "update_in_backward": True, "offload": "hybrid", "offload_share": 0.5, "bucket_size": 4096, "clip_norm": 0.1,
        "clip_from": "previous-step"}}}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True}, "compiled, dropout": {"compile": True, "dropout": 0.1},
    "compiled, recompute": {"compile": True, "memory": {"recompute": 1}}}
"""Variants that take minutes to compile."""
LIMITS = {"fp32": 2e-4, "fp64": 1e-11, "bf16": 3e-2, "fp16": 1e-2}
"""Precision -> the largest relative difference from the CPU that is not an error."""
STARTS = (("LAZY", "none", 10), ("EAGER", "none", 3), ("LAZY", "synchronize", 3), ("EAGER", "free", 3))
"""How kernels are loaded, what is forced after each send, and the number of such starts."""
BETWEEN_MESHES = {"fp32": 1e-3, "bf16": 3e-2}
"""Like LIMITS, between ranks that share the device and one rank on it."""
MESHES: dict[str, dict[str, Any]] = {
    "pipe 2": {"mesh": {"pipe": 2}}, "data 2": {"mesh": {"data": 2}}, "col 2": {"mesh": {"col": 2}},
    "pipe 2, tied ends": {"mesh": {"pipe": 2}, "layers": 1},
    "pipe 2 x data 2": {"mesh": {"pipe": 2, "data": 2}}, "row 2 x col 2": {"mesh": {"row": 2, "col": 2}},
    "row 2 x col 2, bf16": {"mesh": {"row": 2, "col": 2}, "precision": "bf16"},
    "col 2, compiled": {"mesh": {"col": 2}, "compile": True, "dropout": 0.1, "memory": {"recompute": 1}}}
"""Only a device multiplies half precision into the fp32 sums that travel along rows and columns, and runs the compiled
chains of a backward in a thread of autograd's."""


def furthest(found: list[list[float]], expected: list[list[float]]) -> float:
    """The largest relative difference of a loss or a gradient norm."""
    return max(abs(one - two) / max(abs(two), 1e-12)
               for row, other in zip(found, expected, strict=True) for one, two in zip(row, other, strict=True))


def parity(options: Options, *variants: str) -> Findings:
    """Losses and norms compared with those of the CPU, with every setting that has its own code on a device."""
    def compare(program: Program) -> Finding:
        expected = on_one_rank(replace(program, compile=False), torch.device("cpu"))
        found = on_one_rank(program, options.device)
        apart = furthest(found, expected)
        return {"apart": apart, "ok": apart < LIMITS[program.precision], "loss": [found[0][0], found[-1][0]],
                "expected": [expected[0][0], expected[-1][0]]}

    base, known = options.sized(SMALL, TINY), VARIANTS | COMPILED
    for precision in options.sized(list(LIMITS), ["bf16"]):
        for name in variants or VARIANTS:
            program = replace(base, precision=precision, **known[name])
            program = replace(program, compile=options.sized(program.compile, False))
            yield {"precision": precision, "variant": name, **attempt(partial(compare, program))}


def placements(options: Options) -> Findings:
    """The placement of optimizer states changes no bit."""
    def losses_with(optim: dict[str, Any]) -> list[list[float]]:
        return on_one_rank(replace(options.sized(SMALL, TINY), precision="bf16", optim=optim), options.device)

    resident = losses_with({"offload": "none"})

    def compare(name: str) -> Finding:
        same = losses_with(VARIANTS[name]["optim"]) == resident
        return {"same_bits": same, "ok": same}

    for name in ("stream", "hybrid"):
        yield {"placement": name, **attempt(partial(compare, name))}


def repeat(options: Options) -> Findings:
    """Whether the same run has the same bits twice, without and with deterministic algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    base = replace(options.sized(replace(SMALL, sequence=512, hidden=256), TINY), precision="bf16")

    def compare(offload: str, wanted: bool) -> Finding:
        with deterministic_algorithms(wanted):
            one, two = (on_one_rank(replace(base, optim={"offload": offload}), options.device) for _ in range(2))
        return {"same_bits": one == two, "ok": one == two or not wanted}

    for offload in options.sized(("none", "stream"), ("stream",)):
        for wanted in (False, True):
            yield {"offload": offload, "deterministic": wanted, **attempt(partial(compare, offload, wanted))}


@dataclass(frozen=True)
class HostWaits:
    """Waits of the host, by line of code."""

    operations: Counter[str] = field(default_factory=Counter)
    """Operations that wait for all work of the device, as torch's debug mode reports them."""
    events: Counter[str] = field(default_factory=Counter)
    """Waits for an event, a stream or the device, which that mode does not report."""


@contextmanager
def host_waits() -> Iterator[HostWaits]:
    """Records the waits of the host inside."""
    found = HostWaits()

    def counting(wait: Any) -> Any:
        def counted(*args: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            found.events[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1
            return wait(*args, **named)
        return counted

    with ExitStack() as patches, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("Event.synchronize", "Stream.synchronize", "synchronize"):
            patches.enter_context(mock.patch(f"torch.cuda.{name}", counting(attrgetter(name)(torch.cuda))))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found.operations.update(f"{Path(one.filename).name}:{one.lineno}" for one in caught
                                    if "synchronizing" in str(one.message))


def syncs(options: Options) -> Findings:
    """Host waits in a step of four microbatches, by the line that waits; with clipping, the default guard, and inputs
    on the device."""
    program = replace(options.sized(SMALL, TINY), precision="bf16", steps=3, microbatches=4, optim={"clip_norm": 1.0})
    waits = HostWaits()
    with engine_of(program, world_of_one(options.device)) as engine:
        for step, given in enumerate(batches(program, engine.mesh, 0)):
            batch = [replace(one, inputs=torch.as_tensor(one.inputs, device=options.device),
                             targets=torch.as_tensor(one.targets, device=options.device)) for one in given]
            synchronize(options.device)
            if step < 2 or options.dry_run:
                engine.train_batch(batch)
                continue
            with host_waits() as waits:
                engine.train_batch(batch)
    yield {"operations": dict(waits.operations), "events": dict(waits.events), "ok": not waits.operations,
           "says": f"{waits.operations.total()} operations in a step wait for the device, and "
                   f"{waits.events.total()} calls for an event"}


def ranks(options: Options, mesh: str, transport: Literal["torch", "mpi+torch"] = "torch") -> Findings:
    """Ranks that share the device, against one rank on it; in a dry run threads. mpi+torch: messages over MPI, through
    pinned memory, and collectives over NCCL."""
    if transport != "torch" and not options.dry_run and (problem := mpi_available()) is not None:
        yield {"mesh": mesh, "transport": transport, "says": f"not run: {problem}"}
        return
    program = replace(options.sized(SMALL, TINY), **{"precision": "fp32", **MESHES[mesh]})
    program = replace(program, compile=options.sized(program.compile, False))
    expected = on_one_rank(replace(program, mesh={}, compile=False), options.device)
    began = time.monotonic()
    if options.dry_run:
        found = run_ranks(lambda world: losses(world, asdict(program)), Mesh(**program.mesh).size)
    else:
        found = losses_on_shared_device(program, transport)
    apart = max(furthest(one, expected) for one in found)
    yield {"mesh": mesh, "transport": transport, "apart": apart, "ok": apart < BETWEEN_MESHES[program.precision],
           "seconds": time.monotonic() - began}


def lazy(options: Options, *starts: tuple[str, str, int]) -> Findings:
    """Starts that may hang: kernels loaded at their first use, forced waits after each send, cudaFree in the step."""
    program = replace(TINY, mesh={"pipe": 2}, steps=3, microbatches=4)
    for loading, stress, times in starts or STARTS:
        # memory in separate segments is given back without a cudaFree
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"} if stress == "free" else {}
        for _ in range(options.sized(times, 1)):
            try:
                with environment(CUDA_MODULE_LOADING=loading, **allocator):
                    _stressed_ranks(program, stress, options)
                found: Finding = {"ended": "well", "ok": True}
            except RanksFailed as error:
                found = {"ended": "hung" if error.hung else "crashed", "ok": False, "error": str(error)[-1500:]}
            yield {"loading": loading, "stress": stress, **found}


def _stressed_ranks(program: Program, stress: str, options: Options) -> None:
    if options.dry_run:
        run_ranks(lambda world: stressed(world, asdict(program), stress), 2)
    else:
        run_processes("benchmarks.gpu.cases_correctness:stressed", 2, "torch", device="cuda",
                      args=[asdict(program), stress], timeout_seconds=30.0)


def stressed(world: World, row: dict[str, Any], stress: str) -> list[list[float]]:
    """`losses`, with a wait for the entire device after each message (synchronize), or with memory that is given back
    to the driver at each allocation (free)."""
    if world.device.type == "cuda":
        os.environ.update(one_device_environment(world.rank))
    make = world.backend.transport

    def transport(purpose: str, *, on_host: bool = False) -> Any:
        made = make(purpose, on_host=on_host)
        send = made.send

        def send_and_wait(destination: int, message: Any) -> None:
            send(destination, message)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
                if stress == "free":
                    torch.cuda.empty_cache()
        made.send = send_and_wait
        return made

    if stress != "none":
        world.backend.transport = transport  # only of this object
    return losses(world, row)


def kill(options: Options) -> Findings:
    """Seconds in which two ranks start, one is killed in a step, and the other one ends on its own."""
    program = replace(options.sized(SMALL, TINY), precision="fp32", mesh={"pipe": 2}, steps=200)
    seconds = seconds_after_kill(program, options.device.type)
    yield {"ended_after": seconds, "says": f"start, kill and end took {seconds:.1f} s"}
