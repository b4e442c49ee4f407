"""Search for the fastest configuration on a cluster, with the reasons why others lose.

This is a best-first search. Each configuration waits in a queue with the least time that it can take, by what is known
so far, and is examined more closely when its turn comes:

    bound        the operations of its products and the messages of its tensor mesh, at the device's full rates; of
                 those whose weights, gradients and stored operands need too much, with every layer recomputed
    counted      its blocks' kernels on one rank, as if no stage rested once it has begun
    limited      within the limits of its schedule, which are simulated, by the closed form
    simulated    by the engine's schedule, if its memory fits

Each time is no shorter than the previous one, so the first simulated configuration in the queue is the fastest of all
that fit, and most configurations are never counted. Memory is bounded from below, and predicted if the bound fits;
otherwise variants that save memory (activation recomputation, offload), which take longer, are queued with their own
times. The remaining choices (stages per rank, the in-flight limit, chunks) are tried on the best. If layers freeze, the
best are ranked by the entire run, with and without packing and the cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from math import inf
from typing import Literal

from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.config.run import Memory, Run
from ranvier.cost.device_overhead import usable_bytes
from ranvier.cost.hardware import Cluster
from ranvier.cost.step import Step
from ranvier.errors import ConfigError, RanvierError, counted
from ranvier.mesh import Mesh
from ranvier.planner import candidates
from ranvier.planner.candidates import NO_COST, SEARCHED, Candidate, Setting
from ranvier.planner.elastic_plan import course, elastic_variants
from ranvier.planner.problems import problems
from ranvier.planner.run_cost import (
    least_bytes_of_any_cut,
    least_device_bytes,
    least_run_seconds,
    run_cost,
    sample_step,
    unlimited_limits,
    widest_limits,
)
from ranvier.planner.work import Work
from ranvier.schedule.computed_limits import are_searched

_WANTED = 12
"""Least number of configurations that are simulated, if this many fit."""
_LOOKED_AT = 400
"""Number of configurations that do not fit after which the search gives up, if the most frugal ones do not fit
either."""
_REPORTED = 50
"""Number of configurations that are examined between two lines of progress."""
_NEAR = 2.0
"""Multiple of the existing memory: configurations that need more than this are not reported."""
_COMPARED = 3
"""Number of configurations that do not fit but are simulated like the others."""
_TUNED = 4
"""Number of fitting configurations for which other in-flight limits are tried."""
_WORTH = 0.995
"""Largest time of a step with other settings of its schedule, relative to the present time, that is worth the
change."""
_AMPLE = 1.06
"""Most time of a step with the `widest_limits`, relative to that with the limits found: 0.80 to 1.052 in 40 cases."""
_FOLLOWED = 6
"""Number of fitting configurations whose entire run is predicted if layers freeze."""
_ALIKE = 1.03
"""Ratio of times below which plans count as equal if ranks share cores. Of such plans the one whose ranks wait for the
fewest others comes first, since waiting costs more there than the model predicts."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search: the configurations that fit, the chosen one first and then by time; those that would be
    faster but do not fit; and the number of all configurations."""

    cluster: Cluster
    ranks: int
    best: tuple[Candidate, ...]
    dropped: tuple[Candidate, ...]
    considered: int
    measured_over_predicted: float = 1.0
    """Median of measured over predicted time, if any configurations were measured."""
    interrupted: bool = False
    """Whether Ctrl-C ended the search before it had examined all configurations that could be faster."""


def search(run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting] = SEARCHED, *, work: Work | None = None,
           progress: Callable[[str], None] = lambda line: None, interruptible: bool = False) -> SearchResult:
    """The fastest configurations of the run's model and global batch on `ranks` devices. work: counts of earlier
    searches. interruptible: KeyboardInterrupt ends the search with the best so far, if any fits.

    ConfigError if nothing is possible, with the shortage and the nearest change that works.
    """
    if ranks > cluster.num_devices:
        raise ConfigError(f"is more than the {cluster.num_devices} devices of {cluster.name}",
                          code="ranks-above-cluster", where="ranks", value=ranks,
                          remedy=f"Take {cluster.num_devices} or less, or a larger cluster.")
    if "mesh" not in searched and isinstance(run.mesh, Mesh) and run.mesh.size != ranks:
        raise ConfigError(f"has {counted(run.mesh.size, 'rank')}, not {ranks}, and may not change",
                          code="mesh-not-searched", where="mesh", value=str(run.mesh),
                          remedy=f"Search mesh, too, or plan for {counted(run.mesh.size, 'rank')}.")
    if "precision" not in searched:
        check_precision(run, cluster)
    base, work = candidates.on_cluster(run, cluster), work or Work()
    queue = _Queue(cluster, work, searched)
    for candidate in candidates.possible(base, cluster, ranks, searched):
        queue.add(candidate, _Known.BOUND)
    progress(f"searching {queue.added:,} combinations of mesh and microbatch size")
    fitting: list[Candidate] = []
    dropped: list[Candidate] = []
    interrupted = False
    try:
        _explore(queue, fitting, dropped, progress,
                 any_fits=partial(candidates.any_fits, base, cluster, ranks, work),
                 memory_saving=lambda run: candidates.memory_saving_variants(run, cluster, searched))
        if fitting and "stages-per-rank" in searched:
            progress("trying several stages per rank")
            _add_more_stages(fitting, cluster, work)
    except KeyboardInterrupt:
        if not (fitting and interruptible):
            raise
        progress("interrupted: this is the best so far")
        interrupted, searched = True, ()
    dropped += queue.least_of_too_large()
    if not fitting:
        raise (candidates.does_not_fit(run, cluster, ranks, dropped, work) if dropped else
               candidates.no_mesh(base, cluster, ranks, searched))
    best = _tune_best(fitting, cluster, work, searched)
    slowest = max(found.cost.seconds for found in best)
    dropped = [found for found in dropped if found.cost.seconds < slowest]
    dropped = [found for found in dropped if not queue.least_excess(found.run, _NEAR)] or dropped
    dropped.sort(key=lambda found: found.cost.seconds)
    dropped[:_COMPARED] = [candidates.with_memory(_simulate(found, cluster, work), cluster, work)
                           for found in dropped[:_COMPARED]]
    return SearchResult(cluster=cluster, ranks=ranks, best=tuple(best), considered=queue.added,
                        dropped=tuple(dropped), interrupted=interrupted)


def _explore(queue: _Queue, fitting: list[Candidate], dropped: list[Candidate], progress: Callable[[str], None],
             any_fits: Callable[[], bool], memory_saving: Callable[[ResolvedRun], Iterable[ResolvedRun]]) -> None:
    """Examine the queue in order of least possible time, until the best is proven. Adds configurations to `fitting` and
    `dropped`."""
    looked_at, is_proven = 0, False
    while queue.waiting and not (is_proven and len(fitting) >= _WANTED):
        known, found, is_first = queue.next()
        looked_at += 1
        if looked_at % _REPORTED == 0:
            progress(f"{looked_at:,} looks at {queue.added:,} configurations, {len(fitting)} fit" + (
                f", the best takes {min(each.cost.seconds for each in fitting):.4g} s" if fitting else ""))
        if known is _Known.SIMULATED:
            is_proven = True  # all that wait take longer
        elif found is not None and found.fits:
            fitting.append(found)
        elif found is not None:
            dropped.append(found)
            if len(dropped) == _LOOKED_AT and not fitting and not any_fits():
                return
            for frugal in memory_saving(found.run) if is_first else ():
                queue.add(frugal, _Known.COUNTED)


def _tune_best(fitting: Sequence[Candidate], cluster: Cluster, work: Work, searched: Sequence[Setting]
               ) -> list[Candidate]:
    """The fitting configurations, the chosen one first and then by time: the fastest with tuned limits, chunks and
    optimizer states, and with the prediction of the entire run if layers freeze."""
    best = sorted(fitting, key=lambda found: found.cost.seconds)
    best[:_TUNED] = [_tune(found, cluster, work, "in-flight", searched) for found in best[:_TUNED]]
    least = inf
    for place, found in enumerate(best):
        if found.cost.pipeline_seconds < least:  # changed by neither chunks nor unsharded states
            best[place] = _tune_reduction(found, cluster, work, searched)
            least = min(least, best[place].cost.seconds)
    best.sort(key=lambda found: found.cost.seconds)
    best[:_FOLLOWED] = sorted((_follow_freezing(found, cluster, work, searched) for found in best[:_FOLLOWED]),
                              key=Candidate.ranked_seconds)
    if best[0].course:  # the times of the others are of steps, not of runs
        best = [found for found in best if found.course]
    if cluster.device.cores is not None:
        alike = [found for found in best if found.ranked_seconds() <= _ALIKE * best[0].ranked_seconds()]
        simplest = min(alike, key=lambda found: found.run.mesh.pipeline_size * found.run.mesh.stage_size)
        best.insert(0, best.pop(best.index(simplest)))
    return best


def check_precision(run: Run, cluster: Cluster) -> None:
    """ConfigError if the cluster's file has no rate for the run's number format."""
    if run.precision not in cluster.device.rates:
        raise ConfigError(f"has no rate on {cluster.device.name}", code="precision-without-rate", where="precision",
                          value=run.precision,
                          remedy=f"Set `--precision {next(iter(cluster.device.rates))}`, or add the rate to its file.")


class _Known(IntEnum):
    """How the time of a configuration is known."""

    BOUND = 0
    COUNTED = 1
    LIMITED = 2
    SIMULATED = 3


_Waiting = tuple[float, int, _Known, Candidate, bool]
"""Seconds, number, how the seconds are known, configuration, and whether it is the first of its mesh and microbatch."""


class _Queue:
    """Configurations in order of the least time that each can take, then of their number, without impossible ones."""

    def __init__(self, cluster: Cluster, work: Work, searched: Sequence[Setting]) -> None:
        self.cluster, self.work, self._searched = cluster, work, searched
        self.waiting: list[_Waiting] = []
        self._samples: dict[object, Step] = {}
        self.too_large: list[tuple[float, int, ResolvedRun]] = []
        """Configurations that fit only with recomputation, by their bounds without it."""
        self.added = 0

    def add(self, run: ResolvedRun, known: _Known) -> None:
        """Add a configuration: the first of its mesh and microbatch by its bound, memory saving variants by their
        counted time, unless even their least memory is too much."""
        self.added += 1
        with suppress(RanvierError):
            if known is _Known.BOUND:
                found, seconds = Candidate(run=run, cost=NO_COST), self._lower_bound(run)
            elif self.least_excess(run):
                return
            else:
                found = self._count(run)
                seconds = found.cost.seconds
            heapq.heappush(self.waiting, (seconds, self.added, known, found, known is _Known.BOUND))

    def next(self) -> tuple[_Known, Candidate | None, bool]:
        """Examine the first configuration more closely; returns how its time was known, and the configuration once it
        is known whether it fits."""
        least, number, known, found, is_first = heapq.heappop(self.waiting)
        run, settled = found.run, False
        try:
            match known:
                case _Known.BOUND:
                    if problems(run):
                        return known, None, is_first
                    if self._is_too_large(run):
                        heapq.heappush(self.too_large, (least, number, run))
                        if "recompute" in self._searched and run.memory.recompute == "none":
                            self.add(replace(run, memory=Memory(recompute="auto")), _Known.BOUND)
                        return known, None, is_first
                    found = self._count(run)
                case _Known.COUNTED:
                    if reason := self.least_excess(run):
                        return known, replace(found, reason=reason), is_first
                    if run.placement.per_rank == 1:  # for several stages no more is known before the simulation
                        found = self._count(run, limited=True)
                case _Known.LIMITED:
                    fits_without = False if self._with_least_share(run).optim.offload_share != 0.0 else None
                    run = candidates.with_share(run, self.cluster, self.work, fits_without=fits_without)
                    if run.optim.offload == "hybrid" and run.optim.offload_share in (0.0, 1.0) and not is_first:
                        return known, None, is_first  # same as none or stream, which are in the queue
                    found = candidates.with_memory(replace(found, run=run), self.cluster, self.work, exact=False)
                    if not found.fits:
                        return known, found, is_first
                    found, settled = _simulate(found, self.cluster, self.work), True
                case _Known.SIMULATED:
                    return known, found, is_first
        except RanvierError:
            return known, None, is_first
        heapq.heappush(self.waiting, (max(least, found.cost.seconds), number, _Known(known + 1), found, is_first))
        return known, found if settled else None, is_first

    def least_of_too_large(self) -> list[Candidate]:
        """A few of the configurations that were never counted, with their times, to show what more memory would
        gain."""
        found = [Candidate(run=run, cost=self._count(run).cost, reason=self.least_excess(run))
                 for _, _, run in heapq.nsmallest(_COMPARED, self.too_large)]
        return [each for each in found if each.reason]

    def _is_too_large(self, run: ResolvedRun) -> bool:
        """Whether the run cannot fit by what is known before its blocks are counted; if recomputation is searched, not
        even with selective recomputation."""
        if self.cluster.device.cores is not None:
            return False
        memories = [run.memory] if "recompute" not in self._searched or run.memory.recompute != "none" else [
            run.memory, Memory(recompute="selective")]
        sample = self._sample(run).stages[0].blocks
        return all(least_bytes_of_any_cut(replace(run, memory=memory), sample) > usable_bytes(self.cluster.device)
                   for memory in memories)

    def _sample(self, run: ResolvedRun) -> Step:
        """The step of one sample on one rank, by all settings on which it depends in a search."""
        key = run.tensor, run.precision
        if key not in self._samples:
            alone = resolve(replace(run, memory=Memory(), pipeline=replace(
                run.pipeline, boundaries=None, deferred=None, defer_last=None)), Facts(mesh=Mesh(), microbatch_size=1))
            self._samples[key] = sample_step(alone, self.work.blocks(alone))
        return self._samples[key]

    def _lower_bound(self, run: ResolvedRun) -> float:
        least, recomputing = least_run_seconds(run, self.cluster, self._sample(run))
        return recomputing if run.memory.recompute == "auto" else least

    def _count(self, run: ResolvedRun, *, limited: bool = False) -> Candidate:
        return Candidate(run=run, cost=run_cost(self._with_least_share(run), self.cluster, self.work.stages(run),
                                                exact=False, limits=None if limited else unlimited_limits(run)))

    def _with_least_share(self, run: ResolvedRun) -> ResolvedRun:
        """The run with the least share of the states in host memory for which a rank fits, if that share is open."""
        if run.optim.offload_share != "auto":
            return run
        share = 0.0
        if run.optim.offload == "hybrid" and self.cluster.device.cores is None:
            least, states = least_device_bytes(run, self.work.stages(run))
            share = min(1.0, max(0.0, least - usable_bytes(self.cluster.device)) / max(1.0, states))
        return replace(run, optim=replace(run.optim, offload_share=share))

    def least_excess(self, run: ResolvedRun, times: float = 1.0) -> str:
        """Description of the least memory of a rank, if it exceeds the device's; else empty."""
        if self.cluster.device.cores is not None:
            return ""
        (least, states), usable = least_device_bytes(run, self.work.stages(run)), usable_bytes(self.cluster.device)
        if run.optim.offload == "hybrid":
            share = run.optim.offload_share
            least -= states * (1.0 if share == "auto" else share)
        return "" if least <= times * usable else (
            f"a rank needs at least {least / 2**20:,.0f} MiB of its device, and there are {usable / 2**20:,.0f}")


def _simulate(candidate: Candidate, cluster: Cluster, work: Work) -> Candidate:
    return replace(candidate, cost=run_cost(candidate.run, cluster, work.stages(candidate.run)))


def _follow_freezing(candidate: Candidate, cluster: Cluster, work: Work, searched: Sequence[Setting]) -> Candidate:
    """The candidate with the fastest of its possible courses, if its layers freeze."""
    run = candidate.run
    runs = elastic_variants(run) if "elastic" in searched and run.elastic.freeze != "none" else [run]
    followed = [replace(candidate, run=run, course=course(run, cluster, work)) for run in runs]
    return min(followed, key=Candidate.ranked_seconds) if followed[0].course else candidate


def _add_more_stages(fitting: list[Candidate], cluster: Cluster, work: Work) -> None:
    """Add candidates with two or four stages per rank that are faster than all others. The limits of many stages take
    seconds to find, so only the fastest candidate of each mesh and microbatch is tried, in order of the times with
    ample limits, and only while these are short enough."""
    best, waiting = min(each.cost.seconds for each in fitting), list[tuple[float, int, Candidate]]()
    fastest, faster, given = dict[object, Candidate](), dict[object, Candidate](), tuple(fitting)
    for candidate in sorted(fitting, key=lambda candidate: candidate.cost.seconds):
        fastest.setdefault(_group(candidate), candidate)
    for candidate in fastest.values():
        for run in candidates.stage_variants(candidate.run):
            stages = work.stages(run)
            seconds = run_cost(run, cluster, stages, exact=False, limits=unlimited_limits(run)).seconds
            if seconds < best and are_searched(run.placement):
                seconds = run_cost(run, cluster, stages, limits=widest_limits(run)).seconds / _AMPLE
            waiting.append((seconds, len(waiting), replace(candidate, run=run)))
    for seconds, _, candidate in sorted(waiting):
        if seconds >= _WORTH * best:
            break
        other = candidates.with_memory(_simulate(candidate, cluster, work), cluster, work)
        if other.fits and other.cost.seconds < _WORTH * best:
            faster[_group(candidate)] = other
            best = other.cost.seconds
            fitting[:] = [*given, *faster.values()]


def _group(candidate: Candidate) -> object:
    return candidate.run.mesh, candidate.run.batch.microbatch_size, candidate.run.tensor, candidate.run.precision


def _tune_reduction(candidate: Candidate, cluster: Cluster, work: Work, searched: Sequence[Setting]) -> Candidate:
    """The candidate with another size of chunks, and with unsharded optimizer states, if that is worth it."""
    best = _tune(candidate, cluster, work, "chunks", searched)
    if "shard" in searched and candidate.run.optim.shard:
        run = replace(candidate.run, optim=replace(candidate.run.optim, shard=False))
        whole = _simulate(replace(candidate, run=run), cluster, work)
        best = _better_of(best, _tune(whole, cluster, work, "chunks", searched), cluster, work)
    return best


def _tune(candidate: Candidate, cluster: Cluster, work: Work, name: Literal["in-flight", "chunks"],
          searched: Sequence[Setting]) -> Candidate:
    """The candidate with another in-flight limit, or size of chunks, if that is worth it."""
    variants = candidates.in_flight_variants if name == "in-flight" else candidates.chunk_variants
    for run in variants(candidate.run) if name in searched else ():
        candidate = _better_of(candidate, _simulate(replace(candidate, run=run), cluster, work), cluster, work)
    return candidate


def _better_of(found: Candidate, other: Candidate, cluster: Cluster, work: Work) -> Candidate:
    """`other` if it fits and is worth it, else `found`."""
    if other.cost.seconds >= _WORTH * found.cost.seconds:
        return found
    other = candidates.with_memory(other, cluster, work)  # this may choose slower limits of the schedule
    return other if other.fits and other.cost.seconds < _WORTH * found.cost.seconds else found
