"""Metrics of each step over all ranks, collected without stopping any of them.

A step's numbers are known only when all ranks have finished it, and waiting for them immediately would block every rank
until the slowest is done. So each step starts one small asynchronous sum over the ranks, which is read one step later:

    step n:    train_batch(n) . start the sum of n . read step n - 1 . train_batch(n + 1) ...

A rank's step lasts from the end of the previous step to the end of this one; time outside of steps (an evaluation, the
start) is excluded by calling `resume` after it. On CUDA the device's own times are read one step later, so a line has
the waits of the previous step.

The same sum tells all ranks at the same step whether any rank was asked to stop, and how long each replica computed,
which identifies a slow machine: in a gradient all-reduce all replicas wait for the last one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch

from ranvier.comm.protocol import Group, Work
from ranvier.cost.published_peaks import published_peak
from ranvier.launch.stop import StopRequest
from ranvier.mesh import Mesh
from ranvier.optim.loss_scale import LossScale
from ranvier.pipeline.result import BatchResult
from ranvier.precision import DTYPES
from ranvier.schedule.spans import StepWindow, Timeline
from ranvier.system.memory_tracker import forget_trials, peak_memory_bytes
from ranvier.train.events import StepEvent

_OWN = frozenset({"forward", "backward", "weight", "data"})
"""Categories of spans in which a rank computes, without its waits for others."""
TIMELINE_STEPS = 5
"""Latest steps whose spans stay in memory for the timeline, in addition to the first step: the timeline shows one of
the inner ones, at whose ends other ranks are in the steps before and after."""


@dataclass(kw_only=True)
class PendingStep:
    """A step whose numbers are still pending. `sums`, over ranks: step seconds, wait seconds, waited share, the number
    of ranks that were asked to stop, and to take another mesh; then, with several replicas, each replica's seconds of
    work, stage by stage. `num_replicas`: of the mesh. `memory`: the largest peak of a rank, in bytes."""

    step: int
    result: BatchResult
    learning_rate: float
    sums: torch.Tensor
    memory: torch.Tensor
    works: tuple[Work, Work]
    num_ranks: int
    num_replicas: int = 1
    eval_loss: float | None = None
    eval_scores: Mapping[str, float] = field(default_factory=dict)
    frozen_layers: int | None = None
    mesh: Mesh | None = None
    checkpoint_stall_seconds: float | None = None
    loss_scale: LossScale | None = None
    """Loss scale after this step, with fp16."""

    @property
    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop by the end of this step; the same on every rank. Waits, like `event`."""
        self._wait()
        return bool(self.sums[3] > 0)

    @property
    def resize_requested(self) -> bool:
        """Whether the run was asked to take another mesh; the same on every rank. Waits, like `event`."""
        self._wait()
        return bool(self.sums[4] > 0)

    def _wait(self) -> None:
        for work in self.works:
            work.wait()

    def event(self, flops_per_token: float, peak: PeakRate) -> StepEvent:
        """Wait for the numbers, and return them as an event, the same on every rank."""
        self._wait()
        seconds, waited, bubble = (self.sums[:3] / self.num_ranks).tolist()
        flops_per_second = flops_per_token * self.result.weight / seconds
        slowest, excess = slowest_replica(self.sums[5:].reshape(-1, self.num_replicas).tolist()) or (None, None)
        grad_norm = self.result.grad_norm
        assert grad_norm is not None  # of a training batch
        return StepEvent(step=self.step, loss=self.result.loss, tokens=self.result.weight, step_seconds=seconds,
                         wait_seconds=waited, bubble_fraction=bubble, grad_norm=grad_norm,
                         learning_rate=self.learning_rate, flops_per_second=flops_per_second,
                         model_flops_utilisation=flops_per_second / (peak.reference * self.num_ranks),
                         against_published_peak=peak.published is not None, num_ranks=self.num_ranks,
                         memory_bytes=int(self.memory),
                         slowest_replica=slowest, slowest_replica_ratio=excess,
                         stepped=self.result.stepped, eval_loss=self.eval_loss, eval_scores=self.eval_scores,
                         frozen_layers=self.frozen_layers, mesh=self.mesh,
                         checkpoint_stall_seconds=self.checkpoint_stall_seconds,
                         loss_scale=self.loss_scale.scale if self.loss_scale else None,
                         skipped_steps=self.loss_scale.skipped_steps if self.loss_scale else None)


def slowest_replica(work: Sequence[Sequence[float]]) -> tuple[int, float] | None:
    """The replica, of at least two, that is furthest behind in one of its stages, and its seconds there over the median
    of the others; None until all are known. work: for each stage, the seconds of each replica."""
    if not work or not all(seconds > 0 for stage in work for seconds in stage):
        return None
    ratio, replica = max((busy / median([*stage[:replica], *stage[replica + 1:]]), replica)
                         for stage in work for replica, busy in enumerate(stage))
    return replica, ratio


class Meter:
    """Times one rank's steps and keeps the spans that the timeline will show.

    ranks: a group of all ranks; they call `step` for the same steps, in the same order as its other collectives.
    device: this rank's device, whose peak memory is reported. mesh: the mesh of these ranks; by default one replica.
    stop: this rank's stop request, which is shared with all ranks in each step's numbers. resize_asked: whether this
    rank knows of a request for another mesh, which is shared too.
    """

    def __init__(self, timeline: Timeline, ranks: Group, device: torch.device, stop: StopRequest | None = None,
                 resize_asked: Callable[[], bool] | None = None, mesh: Mesh | None = None) -> None:
        self._timeline, self._ranks, self._device = timeline, ranks, device
        self._stop, self._resize_asked = stop, resize_asked
        self._num_replicas, self._slot, self._work = 1, 0, list[float]()
        if mesh is not None and mesh.num_replicas > 1:
            at, self._num_replicas = mesh.coordinates(ranks.index), mesh.num_replicas
            self._slot = at.pipeline_rank * mesh.num_replicas + at.replica
            self._work = [0.0] * (mesh.num_replicas * mesh.pipeline_size)
        self.busy: dict[str, float] = {}
        """Seconds in each category of span, in the steps on the current mesh except the first. The gradient norm is
        left out, since ranks wait for each other in it."""
        self.busy_steps, self._start_ns = -1, 0
        self._first: StepWindow | None = None
        self._latest: deque[StepWindow] = deque(maxlen=TIMELINE_STEPS)
        self.resume()

    def resume(self) -> None:
        """The next step starts now; spans since the last one belong to no step."""
        for window in self._timeline.begin_step():
            self._keep(window)
        self._start_ns = time.monotonic_ns()

    def step(self, number: int, result: BatchResult, learning_rate: float) -> PendingStep:
        """End step `number` on this rank, and start the next one. Never waits."""
        waited = share = 0.0
        for window in self._timeline.end_step(number):
            took = self._keep(window)
            waited, share = took.wait_seconds, min(1.0, took.wait_seconds / max(took.seconds, 1e-9))
            if self._work:
                self._work[self._slot] = sum(span.seconds for span in took.spans if span.category in _OWN)
        stop_ns = time.monotonic_ns()
        seconds, self._start_ns = (stop_ns - self._start_ns) * 1e-9, stop_ns
        stop = self._stop is not None and self._stop.requested
        resize = self._resize_asked is not None and self._resize_asked()
        sums = torch.tensor([seconds, waited, share, stop, resize, *self._work], dtype=torch.float64)
        memory = torch.tensor(peak_memory_bytes(self._device), dtype=torch.float64)
        return PendingStep(step=number, result=result, learning_rate=learning_rate, sums=sums, memory=memory,
                           works=(self._ranks.all_reduce(sums), self._ranks.all_reduce(memory, "max")),
                           num_ranks=len(self._ranks.ranks), num_replicas=self._num_replicas)

    def _keep(self, window: StepWindow) -> StepWindow:
        """Keep a complete step for the timeline, and add it to the busy times."""
        took = window.covered()
        self._first = self._first or took
        self._latest.append(took)
        self.busy_steps += 1
        if self.busy_steps:
            for span in window.spans:
                if span.label != "norm":
                    self.busy[span.category] = self.busy.get(span.category, 0.0) + span.seconds
        return took

    @property
    def kept_steps(self) -> list[StepWindow]:
        """The first step and the latest ones, each once."""
        latest = list(self._latest)
        return latest if self._first is None or self._first in latest else [self._first, *latest]


# --- peak rates of devices --------------------------------------------------------------------------------------------

# Peak FLOP/s of this rank's device: measured with a matrix product, and as its maker states it.
#
# Model FLOPs utilisation (MFU) is relative to the published rate, as other programs report it. A CPU, or a device that
# the table lacks, has none: there it is relative to the measured rate, and is called a share of matrix products.


def matrix_product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """FLOPs per second of this rank in a square matrix product of `dtype`: the best of the products in `seconds`.

    The operands are random: with constants a device needs less power, and runs up to 13 % faster. All ranks call this
    at the same time, so that ranks that share cores are measured as they will run.
    """
    size = 8192 if device.type == "cuda" else 512
    places = torch.arange(size, device=device, dtype=torch.float32)
    # A hash instead of a random generator, whose state belongs to the run.
    a, b = (torch.frac(torch.sin(torch.outer(places, places) * 12.9898 + shift) * 43758.5453).to(dtype)
            for shift in (0.0, 1.0))
    out = torch.mm(a, b)  # the first product loads libraries; it is not counted
    best, until = float("inf"), time.monotonic() + seconds
    while best == float("inf") or time.monotonic() < until:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


@dataclass(frozen=True)
class PeakRate:
    """Peak FLOP/s of one rank. published: from the data sheet of its device; None if there is no such figure."""

    measured: float
    published: float | None

    @property
    def reference(self) -> float:
        """The peak to which utilisation is relative."""
        return self.published or self.measured

    def facts(self) -> dict[str, Any]:
        """For summary.json: the peak to which model_flops_utilisation is relative, and both rates."""
        return {"model_flops_utilisation_of": "published peak" if self.published else "measured matrix products",
                "measured_peak_flops": self.measured, "published_peak_flops": self.published}


def peak_rate(ranks: Group, device: torch.device, precision: Literal["fp32", "bf16", "fp16", "fp64"]) -> PeakRate:
    """The rates of one rank while all of `ranks` compute only matrix products. Collective."""
    published = published_peak(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    measured = common_rate(ranks, device, DTYPES[precision])
    forget_trials(device)
    return PeakRate(measured, published)


def common_rate(ranks: Group, device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of one rank while all of `ranks` compute only matrix products: the mean. Collective."""
    ranks.barrier()
    total = torch.tensor([matrix_product_rate(device, dtype)], dtype=torch.float64)
    ranks.all_reduce(total).wait()
    return float(total) / len(ranks.ranks)
