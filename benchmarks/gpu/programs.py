"""Training programs that run the same on CPU and CUDA ranks, from a specification that JSON can represent.

`losses` and `kill_target` are for `ranvier.testing.ranks.run_processes`, which several ranks on one device need;
`on_one_rank` runs a specification in this process.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ranvier.comm.inprocess import InProcessWorld
from ranvier.config.run import Guard, Launch, Memory, Optim, Pipeline, TensorParallel, Transformer
from ranvier.launch.failures import install_error_handlers
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.precision import DTYPES
from ranvier.testing.ranks import run_processes
from ranvier.world import World

RANKS_SECONDS, COMPILED_SECONDS = 50.0, 150.0
"""Time limit for the start, training and end of ranks that share a device, and of those that compile; their parent has
a longer limit, to report which ranks hang."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A GPT, its mesh, and how it trains. The dicts are keyword arguments of the configuration's sections."""

    layers: int = 2
    hidden: int = 32
    heads: int = 2
    vocab: int = 64
    sequence: int = 16
    dropout: float = 0.0
    precision: str = "fp32"
    mesh: dict[str, int] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    tensor: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    float8: bool = False
    steps: int = 3
    microbatches: int = 2
    """Microbatches of all replicas together."""
    samples: int = 2
    """Samples in a microbatch."""
    seed: int = 1

    @property
    def transformer(self) -> Transformer:
        return Transformer(num_layers=self.layers, hidden=self.hidden, heads=self.heads, vocab=self.vocab,
                           sequence=self.sequence, dropout=self.dropout)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Program:
        """The program of which `asdict` has made `row`."""
        return cls(**{one.name: row[one.name] for one in fields(cls) if one.name in row})

    @property
    def flops_per_token(self) -> float:
        """Forward and backward, attention counted in full: 72 l h^2 (1 + s/6h + V/12lh), as in Megatron's papers."""
        return 72 * self.layers * self.hidden**2 * (
            1 + self.sequence / (6 * self.hidden) + self.vocab / (12 * self.layers * self.hidden))


def world_of_one(device: torch.device) -> World:
    """The world of a single rank."""
    return World(backend=InProcessWorld(1).backend(0), store=dist.HashStore(), launcher="benchmark", device=device,
                 local_rank=0, local_size=1)


def batches(program: Program, mesh: Mesh, rank: int) -> Iterator[list[Microbatch]]:
    """The share of `rank` of each step's microbatches: the same samples on any mesh."""
    at = mesh.coordinates(rank)
    rows = range(at.row * program.samples // mesh.row, (at.row + 1) * program.samples // mesh.row)
    numbers = range(at.data * program.microbatches // mesh.data, (at.data + 1) * program.microbatches // mesh.data)
    for step in range(program.steps):
        generator = torch.Generator().manual_seed(1000 * program.seed + step)
        tokens = torch.randint(program.vocab, (program.microbatches, program.samples, program.sequence + 1),
                               generator=generator)
        yield [Microbatch(tokens[number, rows, :-1].contiguous(), tokens[number, rows, 1:].contiguous(),
                          torch.tensor([number * program.samples + row for row in rows])) for number in numbers]


@contextmanager
def engine_of(program: Program, world: World) -> Iterator[Engine]:
    """The program's engine on this rank."""
    dtype, mesh = DTYPES[program.precision], Mesh(**program.mesh)
    rows = program.samples // mesh.row
    tokens = torch.zeros(rows, program.sequence, dtype=torch.int64)
    sample = Microbatch(tokens, tokens, torch.arange(rows))
    engine = Engine(gpt(program.transformer, dtype=dtype), world, mesh=mesh, optim=Optim(**program.optim),
                    learning_rate=1e-3, dtype=dtype, memory=Memory(**program.memory), seed=program.seed, sample=sample,
                    pipeline=Pipeline(**program.pipeline), tensor=TensorParallel(**program.tensor), guard=Guard(),
                    timeout_seconds=60.0, compile=program.compile, float8=program.float8)
    yield engine
    engine.close()


def losses(world: World, row: dict[str, Any]) -> list[list[float]]:
    """Train; returns [loss, gradient norm] of each step, the same on all ranks."""
    program = Program.of(row)
    found = []
    with engine_of(program, world) as engine:
        for batch in batches(program, engine.mesh, world.rank):
            result = engine.train_batch(batch)
            found.append([result.loss, float(result.grad_norm or 0.0)])
    return found


def on_one_rank(program: Program, device: torch.device) -> list[list[float]]:
    """`losses` in this process."""
    world = world_of_one(device)
    found = losses(world, asdict(program))
    world.backend.close()
    return found


def kill_target(world: World, row: dict[str, Any], victim: int, step: int, folder: str) -> int:
    """Trains until rank `victim` kills itself in `step`; the other ranks should end on their own. The file RANK in
    `folder` has the last step that this rank has begun."""
    program = Program.of(row)
    if world.device.type == "cuda":
        os.environ.update(one_device_environment(world.rank))
    backend: Any = world.backend
    world.lost = backend.waits.lost_peer
    world.mesh = Mesh(**program.mesh)
    install_error_handlers(world, Launch(stopped_seconds=0.0, hang_seconds=0.0), timeout_seconds=300.0)
    with engine_of(program, world) as engine:
        for number, batch in enumerate(batches(program, engine.mesh, world.rank)):
            (Path(folder) / str(world.rank)).write_text(str(number))
            if number == step and world.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.train_batch(batch)
    return program.steps


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Inside, processes start with these variables."""
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


def losses_on_shared_device(program: Program, transport: Literal["torch", "mpi+torch"] = "torch"
                            ) -> list[list[list[float]]]:
    """`losses` of each rank of the program's mesh, which share one device. Kernels are loaded when a process first uses
    the device, before its program can choose how."""
    with environment(CUDA_MODULE_LOADING="EAGER"):
        return run_processes("benchmarks.gpu.programs:on_shared_device", Mesh(**program.mesh).size, transport,
                             args=[asdict(program)], device="cuda",
                             timeout_seconds=COMPILED_SECONDS if program.compile else RANKS_SECONDS)


def seconds_after_kill(program: Program, device: str, step: int = 2) -> float:
    """Seconds from the start of two stages until one kills itself in `step` and the other has ended on its own.
    RuntimeError if a rank ended before that step; `RanksFailed` if one stays."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with environment(CUDA_MODULE_LOADING="EAGER"):
            run_processes("benchmarks.gpu.programs:kill_target", 2, "torch", args=[asdict(program), 1, step, folder],
                          may_fail=[0, 1], device=device, timeout_seconds=RANKS_SECONDS)
        seconds = time.monotonic() - began
        reached = [int(path.read_text()) if (path := Path(folder) / str(rank)).exists() else -1 for rank in range(2)]
    if reached[1] != step or reached[0] < step - 1:
        raise RuntimeError(f"the kill was to be in step {step}; the last steps that the ranks began are {reached}")
    return seconds


def one_device_environment(rank: int) -> dict[str, str]:
    """Environment in which several NCCL ranks share one device: NCCL takes them for different hosts, so it does not
    refuse a device that it sees twice, and uses sockets of the loopback interface. A trick for tests, which NCCL does
    not guarantee."""
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1"}


def on_shared_device(world: World, row: dict[str, Any]) -> list[list[float]]:
    """`losses`, for ranks that share a device; `run_processes` calls it before the first communicator is made."""
    os.environ.update(one_device_environment(world.rank))
    return losses(world, row)
