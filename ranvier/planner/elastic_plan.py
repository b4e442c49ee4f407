"""What freezing would make of a run: the mesh and the time of each depth, the transitions, and the run as a whole.

The policy is asked as in the run; `gradient-norm`, whose norms nobody knows yet, freezes as much as its cap allows. As
layers freeze the mesh changes where the run says so (elastic.auto_pipe, elastic.auto_dp); frozen layers whose outputs
are cached (elastic.cache) are read from the host's memory after the epoch that follows their freezing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ranvier import check
from ranvier.elastic.freezing import Cap, Facts, Manual, decide, policy_of
from ranvier.layout import frozen_blocks
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.pipeline.partition import BlockCost
from ranvier.planner.costs import cost
from ranvier.planner.hardware import Cluster
from ranvier.run import Run

if TYPE_CHECKING:
    from ranvier.planner.search import Work

_START_SECONDS = 1.0
"""What a transition takes beside moving state: engines and communicators are built anew."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """Steps with one depth and mesh. transition_seconds: of the transition that begins it."""

    first_step: int
    steps: int
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
    """Of a configuration that a search has chosen; None where the run freezes nothing, and where an epoch has as many
    steps as the data allows, which nobody knows before reading it."""
    if run.elastic.freeze == "none" or run.elastic.dry_run or _steps(run) is None:
        return None
    run = replace(run, train=replace(run.train, steps=_steps(run), epochs=None))
    depths, periods, mesh = list(_depths(run)), [], run.mesh
    whole = cost(run, cluster, work.stages(run)).seconds
    every = _every(run)
    for place, (step, frozen) in enumerate(depths):
        stop = depths[place + 1][0] if place + 1 < len(depths) else run.train.steps
        before, mesh = mesh, _best_mesh(replace(run, mesh=mesh), cluster, work, frozen) if frozen else mesh
        moved = _moved_seconds(run, cluster, work) if frozen and mesh != before else 0.0
        now = replace(run, mesh=mesh)
        cached = depths[place - 1][1] if run.elastic.cache and place else 0
        first = min(every, stop - step) if frozen and run.elastic.cache else stop - step  # an epoch computes and writes
        periods.append(Period(first_step=step, steps=first, frozen=frozen, mesh=mesh, transition_seconds=moved,
                              step_seconds=_seconds(now, cluster, work, frozen, cached)))
        if stop - step > first:
            periods.append(Period(first_step=step + first, steps=stop - step - first, frozen=frozen, mesh=mesh,
                                  step_seconds=_seconds(now, cluster, work, frozen,
                                                        frozen if run.elastic.cache else 0)))
    return Course(periods=tuple(periods), unfrozen_seconds=whole * run.train.steps)


def ways(run: Run) -> list[Run]:
    """A run whose layers freeze, as it is and with what may be made of it: the mesh stays or packs and replicates,
    outputs are cached or not. Accuracy is the same for all, but for the rounding of what is cached."""
    found = [run]
    for packs in (False, True):
        for cache in (False, True):
            other = replace(run, elastic=replace(run.elastic, auto_pipe=packs, auto_dp=packs, cache=cache))
            if other not in found and not check.problems(other):
                found.append(other)
    return found


def _epoch_steps(run: Run) -> int | None:
    samples = run.data.train_samples
    return None if samples is None else max(1, samples // run.batch.global_size)


def _steps(run: Run) -> int | None:
    """Of the whole run."""
    epoch = _epoch_steps(run)
    if run.train.epochs is None:
        return run.train.steps
    return None if epoch is None else epoch * run.train.epochs


def _every(run: Run) -> int:
    """Steps between evaluations of the policy: by default an epoch, and the whole run where that is not known."""
    return run.elastic.every or _epoch_steps(run) or run.train.steps


def _depths(run: Run) -> Iterator[tuple[int, int]]:
    """(step, frozen layers) of each change, the start first."""
    layers, frozen = run.model.num_layers, 0
    yield 0, 0
    policy = Cap(run.elastic.alpha) if run.elastic.freeze == "gradient-norm" else policy_of(run.elastic)
    every = 1 if isinstance(policy, Manual) else _every(run)
    for evaluation, step in enumerate(range(every, run.train.steps, every), 1):
        facts = Facts(step=step, evaluation=evaluation, frozen=frozen, num_layers=layers,
                      gradient_norms=tuple(float(layer >= frozen) for layer in range(layers)))
        deeper = decide(policy, facts)
        if deeper > frozen:
            frozen = deeper
            yield step, frozen


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


def _best_mesh(run: Run, cluster: Cluster, work: Work, frozen: int) -> Mesh:
    """Of all divisors of the ranks, as AutoPipe and AutoDP may choose; the present one where they may not."""
    elastic, mesh = run.elastic, run.mesh
    if not elastic.auto_pipe:
        return mesh
    ranks = mesh.data * mesh.pipe
    found = [mesh]
    for pipe in range(1, mesh.pipe):
        if mesh.pipe % pipe == 0 and pipe <= families.num_blocks(run):
            data = ranks // pipe if elastic.auto_dp else mesh.data
            other = replace(mesh, data=data, pipe=pipe)
            if run.batch.global_size >= data and not check.problems(replace(run, mesh=other, pipeline=replace(
                    run.pipeline, boundaries=None))):
                found.append(other)
    return min(found, key=lambda one: _seconds(replace(run, mesh=one, pipeline=replace(
        run.pipeline, boundaries=None if one != mesh else run.pipeline.boundaries)), cluster, work, frozen, 0,
        exact=False))


def _moved_seconds(run: Run, cluster: Cluster, work: Work) -> float:
    """Of a transition: the largest stage's parameters and states leave a rank and arrive at another."""
    largest = max(sum(block.num_parameters for block in blocks) for blocks in work.stages(run))
    return _START_SECONDS + cluster.between.seconds(16 * largest) if run.mesh.size > cluster.devices_per_node else \
        _START_SECONDS + cluster.inside.seconds(16 * largest)
