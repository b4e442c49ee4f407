"""Which of all configurations is fastest on a cluster, and why the others are not.

Every mesh of the ranks with every microbatch gets a lower bound of its time: the closed form, as if memory were plenty
and as many microbatches in flight as any limit allows, for which nothing is simulated. From the lowest bound on it is
asked whether the schedule that needs least fits. What does gets its limits and its own time, with which it waits for
its turn; of what does not, the ways to save memory (activation recomputation, offload) wait for theirs. So the first
one that has its time and fits is the fastest of all that fit, however many do not. When enough of them do they are
simulated and ranked, and what is left to choose (the in-flight limit, chunks) is tried on the best. Where layers freeze
the best are ranked by the whole run, with and without packing and the cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.cost.hardware import Cluster
from ranvier.cost.run_cost import run_cost
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import Mesh
from ranvier.plan.fitting import schedules
from ranvier.planner.candidates import (
    SEARCHED,
    Candidate,
    Setting,
    chunk_variants,
    in_flight_variants,
    memory_saving_variants,
    on_cluster,
    variants,
    with_memory,
    with_share,
)
from ranvier.planner.elastic_plan import course, elastic_variants
from ranvier.planner.nothing_fits import any_fits, does_not_fit, no_mesh
from ranvier.planner.work import Work, excess

_WANTED = 12
"""Configurations that fit, before the search simulates them."""
_LOOKED_AT = 400
"""Configurations that do not fit, before the search asks whether the most frugal ones do, where none has yet."""
_REPORTED = 200
"""Candidates between two lines of progress."""
_COMPARED = 3
"""Of those that do not fit, how many are simulated as the others are."""
_TUNED = 4
"""Of those that fit, for how many other in-flight limits are tried."""
_FOLLOWED = 6
"""Of those that fit, how many are followed through a run whose layers freeze."""
_LEFT_OUT: tuple[Literal["activations", "products"] | None, ...] = ("activations", "products", None)
"""Of memory, where it is asked whether the rest alone is too much: what takes least time to find comes first."""
_ALIKE = 1.03
"""Where ranks share cores, times that differ by less are alike: of such plans that comes first whose ranks wait for
each other least, since waiting costs more there than the model knows."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search has found: those that fit, the chosen one first and then by time; those that would be faster and do
    not fit; and how many there were."""

    cluster: Cluster
    ranks: int
    best: tuple[Candidate, ...]
    dropped: tuple[Candidate, ...]
    considered: int
    measured_over_predicted: float = 1.0
    """Where some were measured: the median over those."""
    interrupted: bool = False
    """Whether Ctrl-C ended it before it had looked at all that could be faster."""


def search(run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting] = SEARCHED, *, work: Work | None = None,
           progress: Callable[[str], None] = lambda line: None) -> SearchResult:
    """The fastest configurations of the run's model and global batch on `ranks` devices. work: of searches before.

    After Ctrl-C those that have been found; KeyboardInterrupt where there are none yet. ConfigError where nothing is
    possible, with what is missing and the nearest thing that works.
    """
    if ranks > cluster.num_devices:
        raise ConfigError(f"is more than the {cluster.num_devices} devices of {cluster.name}",
                          code="ranks-above-cluster", where="ranks", value=ranks,
                          remedy=f"Take {cluster.num_devices} or less, or a larger cluster.")
    if "mesh" not in searched and isinstance(run.mesh, Mesh) and run.mesh.size != ranks:
        raise ConfigError(f"has {run.mesh.size} ranks, not {ranks}, and may not change", code="mesh-not-searched",
                          where="mesh", value=str(run.mesh),
                          remedy=f"Search mesh, too, or plan for {run.mesh.size} ranks.")
    if "precision" not in searched:
        check_precision(run, cluster)
    work, considered = work or Work(), 0
    queue: list[_Queued] = []
    base = on_cluster(run, cluster)
    for candidate in variants(base, cluster, ranks, searched):
        _push(queue, considered, candidate, cluster, work)
        considered += 1
        if considered % _REPORTED == 0:
            progress(f"{considered} meshes and microbatches so far, the last {candidate.mesh}")
    progress(f"{considered} meshes and microbatches are possible")
    fitting: list[Candidate] = []
    dropped: list[Candidate] = []
    interrupted = False
    try:
        while queue and len(fitting) < _WANTED:
            seconds, number, found, is_first, has_time = heapq.heappop(queue)
            if not has_time and (found := _with_least(found, cluster, work)).fits:
                if (timed := _timed(found.run, cluster, work, is_first)) is not None:
                    heapq.heappush(queue, (max(seconds, timed.cost.seconds), number, timed, is_first, True))
                continue
            if has_time:
                found = with_memory(found, cluster, work, exact=False)
            (fitting if found.fits else dropped).append(found)
            if (len(fitting) + len(dropped)) % _REPORTED == 0:
                progress(f"{len(fitting)} fit of {len(fitting) + len(dropped)}, the last {found.run.mesh}")
            if len(dropped) == _LOOKED_AT and not fitting and not any_fits(base, cluster, ranks, work):
                break
            if is_first and not found.fits:
                for frugal in memory_saving_variants(found.run, cluster, searched):
                    _push(queue, considered, frugal, cluster, work, is_first=False)
                    considered += 1
    except KeyboardInterrupt:
        if not fitting:
            raise
        interrupted, searched = True, ()
        progress("interrupted: the best so far")
    if not fitting:
        raise does_not_fit(run, cluster, ranks, dropped, work) if dropped else no_mesh(base, cluster, ranks, searched)
    best = sorted((_simulated(found, cluster, work) for found in fitting), key=lambda found: found.cost.seconds)
    best[:_TUNED] = [_tuned(found, cluster, work, "in-flight", searched) for found in best[:_TUNED]]
    best.sort(key=lambda found: found.cost.seconds)
    best[:_FOLLOWED] = sorted((_followed(found, cluster, work, searched) for found in best[:_FOLLOWED]),
                              key=Candidate.ranked_seconds)
    if best[0].course:  # the times of others are of steps, not of whole runs
        best = [found for found in best if found.course]
    if cluster.device.cores is not None:
        alike = [found for found in best if found.ranked_seconds() <= _ALIKE * best[0].ranked_seconds()]
        simplest = min(alike, key=lambda found: found.run.mesh.pipeline_size * found.run.mesh.stage_size)
        best.insert(0, best.pop(best.index(simplest)))
    best[0] = _followed(_tuned(best[0], cluster, work, "chunks", searched), cluster, work, ())
    slowest = max(found.cost.seconds for found in best)
    dropped = [found for found in dropped if found.cost.seconds < slowest]
    dropped[:_COMPARED] = [_simulated(found, cluster, work) for found in dropped[:_COMPARED]]
    return SearchResult(cluster=cluster, ranks=ranks, best=tuple(best), considered=considered, dropped=tuple(dropped),
                        interrupted=interrupted)


def check_precision(run: Run, cluster: Cluster) -> None:
    """ConfigError where the cluster's file does not say how fast it computes in the run's number format."""
    if run.precision not in cluster.device.rates:
        raise ConfigError(f"has no rate on {cluster.device.name}", code="precision-without-rate", where="precision",
                          value=run.precision,
                          remedy=f"Set `--precision {next(iter(cluster.device.rates))}`, or add the rate to its file.")


_Queued = tuple[float, int, Candidate, bool, bool]
"""Seconds, number, the candidate, whether it is the first variant of its mesh and microbatch, and whether the seconds
are those of its own limits, not a bound of them."""


def _push(queue: list[_Queued], number: int, run: ResolvedRun, cluster: Cluster, work: Work, *, is_first: bool = True
          ) -> None:
    """Into the queue by the bound, of equal ones by number; what cannot be cut is left out."""
    try:
        found = Candidate(run=run, cost=run_cost(_loosest(run), cluster, work.stages(run), exact=False))
    except RanvierError:
        return
    heapq.heappush(queue, (found.cost.seconds, number, found, is_first, False))


def _loosest(run: ResolvedRun) -> ResolvedRun:
    """The run with limits of its schedule that none chosen for it exceed, and with all its states on the device, where
    that is open: its closed form is a lower bound. Limits of several stages on a rank stay as they are."""
    pipeline, optim = run.pipeline, run.optim
    if optim.offload == "hybrid" and optim.offload_share == "auto":
        optim = replace(optim, offload_share=0.0)
    if run.placement.per_rank == 1:
        most = 2 * run.mesh.pipeline_size if pipeline.in_flight == "auto" else pipeline.in_flight
        pipeline = replace(pipeline, memory=None, in_flight=most)
    return replace(run, optim=optim, pipeline=pipeline)


def _with_least(found: Candidate, cluster: Cluster, work: Work) -> Candidate:
    """With what it exceeds, if even the plainest schedule, with all states in host memory where their share is open,
    does not fit. Nothing is simulated."""
    run = schedules(found.run)[-1]
    if run.optim.offload == "hybrid" and run.optim.offload_share == "auto":
        run = replace(run, optim=replace(run.optim, offload_share=1.0))
    try:
        for without in _LEFT_OUT[:3 if run.placement.per_rank == 1 else 1]:
            memory = work.memory(run, without=without, cluster=cluster)
            if reason := excess(run, cluster, memory):
                return replace(found, memory=memory, reason=reason)
    except RanvierError as problem:
        return replace(found, reason=str(problem))
    return found


def _timed(run: ResolvedRun, cluster: Cluster, work: Work, is_first: bool) -> Candidate | None:
    """With its own limits and share of states in host memory, and the closed form's time. None where the share is one
    that another variant has: no states, or all."""
    try:
        run = with_share(run, cluster, work)
        if not is_first and run.optim.offload == "hybrid" and run.optim.offload_share in (0.0, 1.0):
            return None
        return Candidate(run=run, cost=run_cost(run, cluster, work.stages(run), exact=False))
    except RanvierError:
        return None


def _simulated(found: Candidate, cluster: Cluster, work: Work) -> Candidate:
    return replace(found, cost=run_cost(found.run, cluster, work.stages(found.run)))


def _followed(found: Candidate, cluster: Cluster, work: Work, searched: Sequence[Setting]) -> Candidate:
    """Through the whole run, the fastest way of those that it may take, where its layers freeze."""
    runs = elastic_variants(found.run) if "elastic" in searched and found.run.elastic.freeze != "none" else [found.run]
    followed = [replace(found, run=run, course=course(run, cluster, work)) for run in runs]
    return min(followed, key=Candidate.ranked_seconds) if followed[0].course else found


def _tuned(found: Candidate, cluster: Cluster, work: Work, name: Literal["in-flight", "chunks"],
           searched: Sequence[Setting]) -> Candidate:
    """With another in-flight limit, or size of chunks, where that is at least 0.5 % faster."""
    for run in {"in-flight": in_flight_variants, "chunks": chunk_variants}[name](found.run) if name in searched else ():
        other = replace(found, run=run, cost=run_cost(run, cluster, work.stages(run)))
        if other.cost.seconds < 0.995 * found.cost.seconds and (other := with_memory(other, cluster, work)).fits:
            found = other
    return found
