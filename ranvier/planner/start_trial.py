"""A short trial before a run starts: the best predicted meshes for a few steps each, of which the fastest is taken.

Predictions know the devices by nominal figures. They order meshes well, and do not know whether, on this machine, one
rank with all cores is faster than a rank for each core.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.cost.hardware import Cluster
from ranvier.data.prepare import prepare
from ranvier.errors import RanvierError
from ranvier.mesh import mesh_text
from ranvier.planner.candidates import Candidate, Setting
from ranvier.planner.elastic_plan import known_steps
from ranvier.planner.search import search
from ranvier.planner.trial import step_seconds

STEPS, WARMUP = 7, 3
"""Steps of each trial, and those at its start that do not count."""
_START_SECONDS = 10.0
"""Until the ranks of a trial have started and loaded their data, about."""
_LARGEST_SHARE = 0.1
"""Largest share of the run's predicted time: a longer trial costs more than it is likely to save."""
_ALIKE = 1.03
"""Times that differ by less are alike: the best predicted of them is taken."""

Measure = Callable[[ResolvedRun], float]
"""Seconds of a step of this run, measured. LaunchError where it cannot be run."""


def measured_here(run: ResolvedRun) -> float:
    """A `Measure` that starts ranks of its own."""
    with tempfile.TemporaryDirectory(prefix="ranvier-trial-") as folder:
        return step_seconds(run, Path(folder) / "run", steps=STEPS, warmup=WARMUP)


class StartTrial:
    """Chooses among the plans of a run by running them.

    tell: takes what is found, line by line. read: reads a run's data, which comes before everything else: without it no
    trial can run, and all of them find it in the cache.
    """

    def __init__(self, tell: Callable[[str], None], measure: Measure = measured_here,
                 read: Callable[[ResolvedRun, Callable[[str], None]], object] = prepare) -> None:
        self._tell, self._measure, self._read = tell, measure, read

    def choose(self, run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting],
               best: Sequence[Candidate]) -> ResolvedRun:
        """One of the plans `best` (the best predicted first) for `ranks` devices, or of those for one rank with all
        cores. searched: what the plans differ in. DataError where the run's data cannot be read."""
        first = best[0].run
        tried = _different(best, run.launch.trial)
        if cluster.device.cores is not None and ranks > 1 and "mesh" in searched:
            tried = [*tried[:max(1, run.launch.trial - 1)], *_alone(run, cluster, searched)]
        if run.launch.trial < 2 or len(tried) < 2:
            return first
        seconds = sum(_START_SECONDS + STEPS * found.cost.seconds for found in tried)
        steps = known_steps(run)
        if steps is not None and seconds > _LARGEST_SHARE * steps * best[0].cost.seconds:
            self._tell(f"no trial of meshes: {len(tried)} would take about {seconds:.0f} s, and the run about "
                       f"{steps * best[0].cost.seconds:.0f} s; {_text(first)} is predicted to be the fastest")
            return first
        self._read(first, self._tell)
        times: list[tuple[float, ResolvedRun]] = []
        for found in tried:
            try:
                times.append((self._measure(found.run), found.run))
            except RanvierError as problem:
                self._tell(f"trial of {_text(found.run)}: {problem}")
                continue
            self._tell(f"trial of {_text(found.run)}: {times[-1][0]:.3g} s per step "
                       f"({found.cost.seconds:.3g} predicted)")
        if not times:
            return first
        least = min(seconds for seconds, _ in times)
        chosen = next(found for seconds, found in times if seconds <= _ALIKE * least)
        self._tell(f"chosen: {_text(chosen)}")
        return chosen


def _different(best: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best of each mesh; where the mesh is given, the best microbatches."""
    meshes = {str(found.run.mesh): found for found in reversed(best)}
    return sorted(meshes.values(), key=best.index)[:count] if len(meshes) > 1 else list(best[:count])


def _alone(run: Run, cluster: Cluster, searched: Sequence[Setting]) -> list[Candidate]:
    """The best plan for one rank, where it may be alone and fits."""
    try:
        return list(search(run, replace(cluster, nodes=1, devices_per_node=1), 1, searched).best[:1])
    except RanvierError:
        return []


def _text(run: ResolvedRun) -> str:
    return f"{mesh_text(run.mesh)}, microbatches of {run.batch.microbatch_size}"
