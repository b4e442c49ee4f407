"""What freezing would make of a run: the mesh and the time of each depth, the transitions, and the run as a whole.

The policy is asked as in the run, with gradients that are smaller the nearer they are to the output: `gradient-norm`,
whose norms nobody knows yet, then freezes as much as it may. As layers freeze the mesh changes where the run says so
(elastic.auto_pipe, elastic.auto_dp), that fits, and it pays in the steps that are left; frozen layers whose outputs are
cached (elastic.cache) are read from the host's memory after the epoch that follows their freezing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ranvier import check
from ranvier.elastic.freezing import Facts, FreezePolicy, Manual, decide, policy_of
from ranvier.layout import frozen_blocks
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.pipeline.partition import BlockCost
from ranvier.planner.costs import cost
from ranvier.planner.hardware import Cluster
from ranvier.refit import on_mesh
from ranvier.run import Run

if TYPE_CHECKING:
    from ranvier.planner.search import Work

_START_SECONDS = 1.0
"""What a transition takes beside moving state: engines and communicators are built anew."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """Steps with one depth, mesh and global size. transition_seconds: of the transition that begins it."""

    first_step: int
    steps: int
    global_size: int
    frozen: int
    mesh: Mesh
    step_seconds: float
    transition_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds + self.transition_seconds


@dataclass(frozen=True, kw_only=True)
class Course:
    """A whole run, and the same run without freezing."""

    periods: tuple[Period, ...]
    unfrozen_seconds: float

    @property
    def seconds(self) -> float:
        return sum(period.seconds for period in self.periods)

    @property
    def speedup(self) -> float:
        return self.unfrozen_seconds / self.seconds


def course(run: Run, cluster: Cluster, work: Work) -> Course | None:
    """Of a configuration that a search has chosen; None where the run freezes nothing, and where it takes or freezes
    with epochs of which nobody knows how many steps they have before the data is read."""
    if run.elastic.freeze == "none" or run.elastic.dry_run or _steps(run) is None:
        return None
    policy = policy_of(run.elastic)
    if not isinstance(policy, Manual) and not run.elastic.every and _epoch_samples(run) is None:
        return None
    steps = _steps(run)
    total, whole = steps * run.batch.global_size, cost(run, cluster, work.stages(run)).seconds
    now, periods = _Now(run), []
    began, cached, moved = 0, 0, 0.0
    while now.samples < total:
        now.go(min(-(-(total - now.samples) // now.size), now.until_asked(policy)))
        deeper = now.asked(policy) if now.samples < total else now.frozen
        if deeper == now.frozen and now.samples < total:
            continue
        count = now.step - began
        first = min(now.epoch, count) if now.frozen and run.elastic.cache else count  # an epoch computes and writes
        for start, length, read in ((began, first, cached), (began + first, count - first, now.frozen)):
            if length:
                periods.append(Period(
                    first_step=start, steps=length, global_size=now.size, frozen=now.frozen, mesh=now.run.mesh,
                    step_seconds=_seconds(now.run, cluster, work, now.frozen, read),
                    transition_seconds=moved if start == began else 0.0))
        if now.samples >= total:
            break
        if run.elastic.cache and count >= now.epoch:
            cached = now.frozen
        began, next_run = now.step, _packed(now.run, run, cluster, work, deeper, total - now.samples)
        moved = _moved_seconds(now.run, cluster, work, next_run.mesh) if now.samples else 0.0
        now.frozen, now.run = deeper, next_run
    return Course(periods=tuple(periods), unfrozen_seconds=whole * steps)


class _Now:
    """A run on its way through its data."""

    def __init__(self, run: Run) -> None:
        self.run, self.step, self.samples, self.frozen, self._times = run, 0, 0, 0, 0

    @property
    def size(self) -> int:
        """Samples of a step."""
        return self.run.batch.global_size

    @property
    def epoch(self) -> int:
        """Steps of one; all there are where that is not known."""
        samples = _epoch_samples(self.run)
        return _steps(self.run) if samples is None else -(-samples // self.size)

    def until_asked(self, policy: FreezePolicy) -> int:
        """Steps until the policy is asked next."""
        if isinstance(policy, Manual):
            return min((at - self.step for at, _ in policy.depths if at > self.step or not self._times),
                       default=_steps(self.run))
        if not self.run.elastic.every:
            epoch = _epoch_samples(self.run)
            return -(-(epoch - self.samples % epoch) // self.size)
        return self.run.elastic.every - self.step % self.run.elastic.every

    def go(self, steps: int) -> None:
        self.step, self.samples = self.step + steps, self.samples + steps * self.size

    def asked(self, policy: FreezePolicy) -> int:
        """The depth from here on."""
        layers, self._times = self.run.model.num_layers, self._times + 1
        return decide(policy, Facts(step=self.step, evaluation=self._times, frozen=self.frozen, num_layers=layers,
                                    gradient_norms=tuple(float(layers - layer) for layer in range(layers))))


def ways(run: Run) -> list[Run]:
    """A run whose layers freeze, as it is and with what may be made of it: the mesh stays or packs and replicates,
    outputs are cached or not. Accuracy is the same for all, but for the rounding of what is cached, and where the
    global batch grows with the replicas."""
    found = [run]
    for packs in (False, True):
        for cache in (False, True):
            other = replace(run, elastic=replace(run.elastic, auto_pipe=packs, auto_dp=packs, cache=cache))
            if other not in found and not check.problems(other):
                found.append(other)
    return found


def _epoch_samples(run: Run) -> int | None:
    """Of texts nobody says how many sequences they have."""
    return None if run.data.task == "lm" else run.data.train_samples


def _steps(run: Run) -> int | None:
    """Of the whole run, in batches of the size that it has now."""
    samples = _epoch_samples(run)
    if run.train.epochs is None:
        return run.train.steps
    return None if samples is None else -(-samples * run.train.epochs // run.batch.global_size)


def _seconds(run: Run, cluster: Cluster, work: Work, frozen: int, cached: int, *, exact: bool = True) -> float:
    stages = work.stages(run, frozen)
    names = [block.name for blocks in stages for block in blocks]
    layers = tuple((f"layer{index}.attention", f"layer{index}.mlp") for index in range(run.model.num_layers))
    known = min(frozen_blocks(layers, names, cached), len(stages[0]))  # the cache is the first stage's
    if known:
        device = cluster.device
        read = cluster.host_link.seconds(stages[0][known - 1].output_bytes)  # as bytes of the device's memory
        read = round(read * device.memory_bandwidth * device.memory_share)
        stages[0] = [_nothing(block) for block in stages[0][:known - 1]] + [
            replace(_nothing(stages[0][known - 1]), moved_bytes=read)] + stages[0][known:]
    return cost(run, cluster, stages, exact=exact).seconds


def _nothing(block: BlockCost) -> BlockCost:
    return replace(block, flops=0, written_bytes=0, allocated_bytes=0, moved_bytes=0, operations=0, kept_bytes=0)


def _packed(run: Run, first: Run, cluster: Cluster, work: Work, frozen: int, samples: int) -> Run:
    """The run, which began as `first`, with the mesh for so many frozen layers: of all divisors of the ranks, as
    AutoPipe and AutoDP may choose (without AutoDP of the first number of stages), that with the most samples a second
    that fits the memory and pays on the samples that are left. The run as it is where it may not change."""
    elastic, mesh, found = run.elastic, run.mesh, []
    if not elastic.auto_pipe:
        return run
    ranks = mesh.data * mesh.pipe if elastic.auto_dp else first.mesh.pipe
    for pipe in (pipe for pipe in range(1, ranks + 1) if ranks % pipe == 0 and pipe <= families.num_blocks(run)):
        other = replace(mesh, data=ranks // pipe if elastic.auto_dp else mesh.data, pipe=pipe)
        size = first.batch.global_size
        if elastic.global_batch != "keep":
            size = max(1, size * other.data // first.mesh.data)
        there = on_mesh(replace(first, batch=replace(first.batch, global_size=size)), other)
        if other != mesh and size >= other.data and not check.problems(there):
            found.append((_seconds(there, cluster, work, frozen, 0, exact=False) / size, pipe, there))
    now = _seconds(run, cluster, work, frozen, 0, exact=False) / run.batch.global_size
    for each, _, there in sorted(found, key=lambda one: one[:2]):
        gain = (now - each) * samples
        if gain > _moved_seconds(run, cluster, work, there.mesh) and not work.excess(there, cluster, frozen):
            return there
    return run


def _moved_seconds(run: Run, cluster: Cluster, work: Work, mesh: Mesh) -> float:
    """Of a transition to `mesh`: where that is another one, the largest stage's parameters and states leave a rank and
    arrive at another."""
    if mesh == run.mesh:
        return _START_SECONDS
    largest = max(sum(block.num_parameters for block in blocks) for blocks in work.stages(run))
    link = cluster.between if run.mesh.size > cluster.devices_per_node else cluster.inside
    return _START_SECONDS + link.seconds(16 * largest)
