"""Cases of `benchmarks.gpu.suite`, block 1: does it work on the device, and are the numbers right?"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.case import Options, synchronize
from benchmarks.gpu.programs import Program, batches, engine_of, losses, on_one_rank, seconds_after_kill, world_of_one
from ranvier.launch.mpiexec import mpi_available
from ranvier.testing.ranks import RanksFailed, run_processes, run_ranks
from ranvier.world import World

ROOT = Path(__file__).parents[2]
SMALL = Program(layers=4, hidden=256, heads=4, vocab=1024, sequence=128, steps=20, microbatches=4, samples=4)
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
"""Variants that take minutes to compile: for pytest -m gpu."""
MESHES: dict[str, dict[str, Any]] = {
    "pipe 2": {"mesh": {"pipe": 2}}, "data 2": {"mesh": {"data": 2}}, "col 2": {"mesh": {"col": 2}},
    "pipe 2, tied ends": {"mesh": {"pipe": 2}, "layers": 1},
    "pipe 2 x data 2": {"mesh": {"pipe": 2, "data": 2}}, "row 2 x col 2": {"mesh": {"row": 2, "col": 2}}}


def gpu_tests(options: Options) -> dict[str, Any]:
    """`pytest -m gpu`; a dry run looks whether there are such tests."""
    folders = ["tests/gpu", "tests/optim/test_optimizer_on_cuda.py", "tests/models/test_next_token_loss.py",
               "tests/elastic/test_cache_forward.py", "tests/tensor/test_dropout_kernel.py",
               "tests/test_keyed_random.py", "tests/train/test_attention.py"]
    assert all((ROOT / folder).exists() for folder in folders)
    if options.dry_run:
        return {"says": "not run"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu and not mpi", "-q", "-p", "no:cacheprovider",
                           *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    tail = done.stdout.splitlines()[-12:]
    if done.returncode:
        raise RuntimeError("\n".join(tail))
    return {"says": tail[-1]}


def furthest(found: list[list[float]], expected: list[list[float]]) -> float:
    """The largest relative difference of a loss or a gradient norm."""
    return max(abs(one - two) / max(abs(two), 1e-12)
               for row, other in zip(found, expected, strict=True) for one, two in zip(row, other, strict=True))


def parity(options: Options) -> dict[str, Any]:
    """Losses and norms against those of the CPU, in fp64 and fp32, with every setting that has code of its own here."""
    base = options.sized(SMALL, TINY)
    apart: dict[str, float] = {}
    for precision, limit in (("fp64", 1e-11), ("fp32", 2e-4)):
        for name in options.sized(list(VARIANTS), ["dropout"]):
            program = replace(base, precision=precision, **VARIANTS[name])
            found, expected = (on_one_rank(program, device) for device in (options.device, torch.device("cpu")))
            apart[f"{precision} {name}"] = furthest(found, expected)
            if apart[f"{precision} {name}"] > limit:
                raise RuntimeError(f"{precision} {name} differs by {apart[f'{precision} {name}']:.2g}: {found}, not "
                                   f"{expected}")
    resident, *others = (on_one_rank(replace(base, precision="bf16", optim=optim), options.device)
                         for optim in ({"offload": "none"}, VARIANTS["stream"]["optim"], VARIANTS["hybrid"]["optim"]))
    for other in others:
        if other != resident:
            raise RuntimeError(f"offload gives {other}, none {resident}")
    return {"differences": apart, "says": f"at most {max(apart.values()):.1e} from the CPU"}


def repeat(options: Options) -> dict[str, Any]:
    """Whether the same run has the same bits twice, without and with deterministic algorithms."""
    program = replace(options.sized(SMALL, TINY), precision="bf16")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    same = {}
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            same[deterministic] = on_one_rank(program, options.device) == on_one_rank(program, options.device)
        finally:
            torch.use_deterministic_algorithms(False)
    if not same[True]:
        raise RuntimeError("two runs differ with deterministic algorithms")
    return {"same_bits": same[False], "same_bits_deterministic": same[True],
            "says": f"bit-identical without deterministic algorithms: {same[False]}; with: {same[True]}"}


def syncs(options: Options) -> dict[str, Any]:
    """Host waits in a step of four microbatches, by the line that waits; with clipping and the default guard, from
    inputs on the device."""
    program = replace(options.sized(SMALL, TINY), precision="bf16", steps=3, microbatches=4, optim={"clip_norm": 1.0})
    world = world_of_one(options.device)
    counts: Counter[str] = Counter()
    with engine_of(program, world) as engine:
        for step, given in enumerate(batches(program, engine.mesh, 0)):
            batch = [replace(one, inputs=one.inputs.to(options.device), targets=one.targets.to(options.device))
                     for one in given]
            synchronize(options.device)
            if step < 2 or options.dry_run:
                engine.train_batch(batch)
                continue
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    engine.train_batch(batch)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            counts.update(f"{Path(one.filename).name}:{one.lineno}" for one in caught)
    return {"waits": dict(counts), "says": f"{sum(counts.values())} host waits in a step: {dict(counts)}"}


def _on_ranks(program: Program, size: int, options: Options, target: str = "on_shared_device", *more: object
              ) -> list[Any]:
    """The program on ranks that share the device; in a dry run on threads."""
    if options.dry_run:
        return run_ranks(lambda world: losses(world, asdict(program)), size)
    return run_processes(f"benchmarks.gpu.programs:{target}", size, "torch", args=[asdict(program), *more],
                         device="cuda", timeout_seconds=60.0)


def nccl_one_gpu(options: Options) -> dict[str, Any]:
    """Meshes of two and four ranks that share the device, against one rank on it."""
    base = replace(options.sized(SMALL, TINY), steps=options.sized(10, 2))
    apart, failed = {}, {}
    for name in options.sized(list(MESHES), ["pipe 2"]):
        program = replace(base, **MESHES[name])
        expected = on_one_rank(replace(program, mesh={}), options.device)
        size = 1
        for count in program.mesh.values():
            size *= count
        try:
            apart[name] = max(furthest(found, expected) for found in _on_ranks(program, size, options))
        except RanksFailed as error:
            failed[name] = str(error)[-600:]
    if failed or max(apart.values()) > 1e-3:
        raise RuntimeError(f"{failed or apart}")
    return {"differences": apart, "says": f"at most {max(apart.values()):.1e} from one rank"}


def mpi_one_gpu(options: Options) -> dict[str, Any]:
    """Two stages that share the device: messages over MPI, through pinned memory, and collectives over NCCL."""
    problem = mpi_available()
    if problem is not None and not options.dry_run:
        return {"says": f"not run: {problem}"}
    program = replace(options.sized(SMALL, TINY), steps=options.sized(10, 2), mesh={"pipe": 2})
    expected = on_one_rank(replace(program, mesh={}), options.device)
    if options.dry_run:
        rows = run_ranks(lambda world: losses(world, asdict(program)), 2)
    else:
        rows = run_processes("benchmarks.gpu.programs:on_shared_device", 2, "mpi+torch", args=[asdict(program)],
                             device="cuda", timeout_seconds=90.0)
    apart = max(furthest(found, expected) for found in rows)
    if apart > 1e-3:
        raise RuntimeError(f"{apart} from one rank")
    return {"difference": apart, "says": f"{apart:.1e} from one rank"}


@contextmanager
def _environment(**variables: str) -> Any:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def lazy(options: Options) -> dict[str, Any]:
    """Starts that may hang: kernels loaded at their first use, forced waits after each send, cudaFree in the step."""
    program = replace(TINY, mesh={"pipe": 2}, steps=3, microbatches=4)
    ended: Counter[str] = Counter()
    ways = (("LAZY", "none", options.sized(10, 1)), ("EAGER", "none", options.sized(3, 1)),
            ("LAZY", "synchronize", options.sized(3, 1)), ("EAGER", "free", options.sized(3, 1)))
    for loading, stress, times in ways:
        with _environment(CUDA_MODULE_LOADING=loading):
            for _ in range(times):
                try:
                    if options.dry_run:
                        run_ranks(lambda world, stress=stress: stressed(world, asdict(program), stress), 2)
                    else:
                        run_processes("benchmarks.gpu.cases_correctness:stressed", 2, "torch", device="cuda",
                                      args=[asdict(program), stress], timeout_seconds=30.0)
                    ended[f"{loading} {stress}: ended"] += 1
                except RanksFailed:
                    ended[f"{loading} {stress}: HUNG"] += 1
    if any("HUNG" in name for name in ended):
        raise RuntimeError(str(dict(ended)))
    return {"ended": dict(ended), "says": str(dict(ended))}


def stressed(world: World, row: dict[str, Any], stress: str) -> list[list[float]]:
    """`losses`, with a wait for the whole device after each message (synchronize), or memory that is given back to the
    driver at each allocation (free)."""
    from benchmarks.gpu.programs import one_device_environment

    if world.device.type == "cuda":
        os.environ.update({name: value for name, value in one_device_environment(world.rank).items()
                           if name != "CUDA_MODULE_LOADING"})
    make = world.backend.transport

    def transport(purpose: str) -> Any:
        made = make(purpose)
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
        world.backend.transport = transport  # type: ignore[method-assign]  # of this object only
    return losses(world, row)


def kill(options: Options) -> dict[str, Any]:
    """Seconds from the kill of a rank in a step until the other one has ended by itself."""
    seconds = seconds_after_kill(replace(options.sized(SMALL, TINY), mesh={"pipe": 2}, steps=200), options.device.type)
    return {"ended_after": seconds, "says": f"start, kill and end took {seconds:.1f} s"}
