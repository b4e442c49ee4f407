"""Ranvier's engine, with any policy, over MPI or Gloo; slowed down if a scenario asks for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.pipeline.contender import Contender, Place
from benchmarks.pipeline.slowed import slow_down, slowness
from benchmarks.pipeline.workload import Loss, Stepper, Workload
from benchmarks.slow_links import Link, throttled
from ranvier.comm.mpi_backend import MPIBackend
from ranvier.comm.protocol import Backend
from ranvier.comm.torch_backend import TorchBackend
from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch, microbatches
from ranvier.world import World

_CPU = torch.device("cpu")
_TIMEOUT_SECONDS = 300.0


@contextmanager
def open_ours(workload: Workload, contender: Contender, place: Place) -> Iterator[Stepper]:
    """Settings: `policy`, `transport` (mpi or gloo), `boundaries`; optionally `in_flight`, `defer_bytes`, `memory`,
    `stages_per_rank` (more than one are cut by cost), `placement`, `latency_seconds` (of every message), `slowness`
    (see benchmarks.pipeline.slowed)."""
    settings = contender.settings
    backend = _backend(place, settings)
    world = World(backend=backend, store=place.store, launcher="benchmark", device=_CPU, local_rank=place.rank,
                  local_size=place.size)
    inputs, targets = workload.batch(0)
    per_rank = settings.get("stages_per_rank", 1)
    engine = Engine(
        workload.model(), world, mesh=Mesh(pipe=place.size), optimizer=workload.optimizer,
        pipeline=Pipeline(policy=settings["policy"], in_flight=settings.get("in_flight", "auto"),
                          boundaries=settings["boundaries"] if per_rank == 1 else None, stages_per_rank=per_rank,
                          placement=settings.get("placement", "v-shape"),
                          defer_bytes=settings.get("defer_bytes", "auto"),
                          memory=settings.get("memory", Pipeline().memory)),
        seed=workload.seed, nominal_weight=workload.tokens_per_step,
        sample=Microbatch(inputs[:workload.microbatch_size], targets[:workload.microbatch_size]))
    if "slowness" in settings:
        slow_down(engine, slowness(settings["slowness"]))

    def step(number: int) -> Loss:
        result = engine.train_batch(microbatches(*workload.batch(number), workload.microbatch_size))
        return lambda: result.loss if place.rank == 0 else None

    yield Stepper(run=step, report=lambda: {"seconds": _seconds_by_category(engine)})
    engine.close()
    backend.close()


def _backend(place: Place, settings) -> Backend:
    if settings["transport"] == "mpi":
        backend: Backend = MPIBackend(_CPU, _TIMEOUT_SECONDS)
    else:
        backend = TorchBackend(place.rank, place.size, place.store, _CPU, _TIMEOUT_SECONDS)
    latency = settings.get("latency_seconds", 0.0)
    return throttled(backend, Link(latency_seconds=latency)) if latency else backend


def _seconds_by_category(engine: Engine) -> dict[str, float]:
    """Category -> seconds since the last call."""
    seconds: dict[str, float] = defaultdict(float)
    for span in engine.timeline.take():
        seconds[span.category] += span.seconds
    return dict(seconds)
