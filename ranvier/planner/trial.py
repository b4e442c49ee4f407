"""Runs plans here for a few steps: before a run starts, to choose the fastest plan, and for `plan --measure`.

Predictions use nominal figures of the devices. They order meshes well, but cannot tell whether on this machine one rank
with all cores is faster than one rank per core.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired

from ranvier.config import read
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Checkpoint, Elastic, Log, Run
from ranvier.cost.hardware import Cluster
from ranvier.data.prepare import prepare
from ranvier.errors import LaunchError, RanvierError
from ranvier.mesh import mesh_text
from ranvier.planner.candidates import Candidate, Setting
from ranvier.planner.elastic_plan import known_steps
from ranvier.planner.search import SearchResult, search
from ranvier.system import child

_TRIAL_STEPS, _TRIAL_WARMUP = 7, 3
"""Steps of each trial before a run, and those at its start that do not count."""
_START_SECONDS = 10.0
"""Approximate seconds until the ranks of a trial have started and loaded their data."""
_LARGEST_SHARE = 0.1
"""Largest share of the run's predicted time: a longer trial costs more than it is likely to save."""
_ALIKE = 1.03
"""Times that differ by less count as equal: the plan with the best prediction is chosen."""

Measure = Callable[[ResolvedRun], float]
"""Measures seconds of a step of a run. LaunchError if it cannot be run."""


def measured_here(run: ResolvedRun) -> float:
    """A `Measure` that starts its own ranks."""
    with tempfile.TemporaryDirectory(prefix="ranvier-trial-") as folder:
        return step_seconds(run, Path(folder) / "run", steps=_TRIAL_STEPS, warmup=_TRIAL_WARMUP)


class StartTrial:
    """Chooses among the plans of a run by running them.

    tell: receives the results, line by line. read: reads a run's data, which comes first: without data no trial can
    run, and all trials then find it in the cache.
    """

    def __init__(self, tell: Callable[[str], None], measure: Measure = measured_here,
                 read: Callable[[ResolvedRun, Callable[[str], None]], object] = prepare) -> None:
        self._tell, self._measure, self._read = tell, measure, read

    def choose(self, run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting],
               best: Sequence[Candidate]) -> ResolvedRun:
        """Choose one of the plans `best` (best prediction first) for `ranks` devices, or a plan for one rank with all
        cores. searched: settings in which the plans differ. DataError if the run's data cannot be read."""
        first = best[0].run
        tried = _different(best, run.launch.trial)
        if cluster.device.cores is not None and ranks > 1 and "mesh" in searched:
            tried = [*tried[:max(1, run.launch.trial - 1)], *_plan_single_rank(run, cluster, searched)]
        if run.launch.trial < 2 or len(tried) < 2:
            return first
        seconds = sum(_START_SECONDS + _TRIAL_STEPS * found.cost.seconds for found in tried)
        steps = known_steps(run)
        if steps is not None and seconds > _LARGEST_SHARE * steps * best[0].cost.seconds:
            self._tell(f"no trial of meshes: {len(tried)} would take about {seconds:.0f} s, but the run only about "
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
    """The best plan of each mesh; if the mesh is given, the best microbatches."""
    meshes = {str(found.run.mesh): found for found in reversed(best)}
    return sorted(meshes.values(), key=best.index)[:count] if len(meshes) > 1 else list(best[:count])


def _plan_single_rank(run: Run, cluster: Cluster, searched: Sequence[Setting]) -> list[Candidate]:
    """The best plan for one rank, if a single rank is allowed and fits."""
    try:
        return list(search(run, replace(cluster, nodes=1, devices_per_node=1), 1, searched).best[:1])
    except RanvierError:
        return []


def _text(run: ResolvedRun) -> str:
    return f"{mesh_text(run.mesh)}, microbatches of {run.batch.microbatch_size}"


# --- plans that are measured ------------------------------------------------------------------------------------------

# Runs the best few configurations of a plan for some steps on this machine, and corrects the plan by their times.
#
# What the model omits is similar for neighbours in a plan, so the median of measured over predicted time corrects the
# others, too.


STEPS, WARMUP = 10, 4
"""Steps of each run, and those at its start that do not count."""
_SECONDS = 600.0
_EVALUATED = 32
"""Samples of the final evaluation, for tasks that count samples: it is not measured."""


def measure_plan(plan: SearchResult, count: int, progress: Callable[[str], None] = lambda line: None) -> SearchResult:
    """The plan with measured seconds of a step for its first `count` configurations: the fastest of these first, the
    rest in order of the measured time, or else of the prediction times the median of measured over predicted.
    LaunchError if a run fails."""
    tried = []
    with tempfile.TemporaryDirectory(prefix="ranvier-plan-") as folder:
        for number, found in enumerate(plan.best[:count]):
            seconds = step_seconds(found.run, Path(folder) / str(number))
            progress(f"{found.run.mesh}, microbatch {found.run.batch.microbatch_size}: {found.cost.seconds:.4g} s per "
                     f"step predicted, {seconds:.4g} s measured")
            tried.append(replace(found, measured_seconds=seconds))
    factor = median(found.expected_seconds(1.0) / found.cost.seconds for found in tried)
    first, *rest = sorted(tried, key=lambda found: found.ranked_seconds(factor))
    rest = sorted((*rest, *plan.best[count:]), key=lambda found: found.ranked_seconds(factor))
    return replace(plan, best=(first, *rest), measured_over_predicted=factor)


def step_seconds(run: Run, folder: Path, *, steps: int = STEPS, warmup: int = WARMUP) -> float:
    """The median step time of a short run in separate processes, without the first `warmup` steps. LaunchError if the
    run fails."""
    folder.mkdir(parents=True)
    run = replace(run, run_dir=None, resume="none", checkpoint=Checkpoint(every=0), elastic=Elastic(), log=Log(),
                  launch=replace(run.launch, trial=0), max_restarts=0,
                  data=replace(run.data, eval_samples=min(run.data.eval_samples or _EVALUATED, _EVALUATED)),
                  train=replace(run.train, steps=steps, epochs=None, warmup_steps=0, eval_every=0, eval_sequences=1,
                                sample_tokens=0))
    read.write(run, folder / "run.toml")
    try:
        done = child.run(child.python("-m", "ranvier", "train", str(folder / "run.toml"), "--allow-code", "--run-dir",
                                      str(folder / "results"), "--launch.launcher", "local"), seconds=_SECONDS)
        lines = (folder / "results" / "metrics.jsonl").read_text().splitlines() if done.returncode == 0 else []
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    except TimeoutExpired:
        lines, said = [], [f"{steps} steps take longer than {_SECONDS:.0f} s"]
    if not lines:
        raise LaunchError(f"could not be measured: {said[0]}", code="trial-failed", where="mesh", value=str(run.mesh),
                          remedy="Plan for devices that are here, or leave out `--measure` and `--launch.trial`.")
    return median(float(json.loads(line)["step_seconds"]) for line in lines[warmup:])
