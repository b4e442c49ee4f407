"""The best few of a plan, each run for some steps on this machine, and the plan as they show it.

What the model leaves out is much the same for neighbours in a plan, so that the median of measured over predicted
corrects the others, too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired

from ranvier.config import read
from ranvier.config.run import Checkpoint, Elastic, Log, Run
from ranvier.errors import LaunchError
from ranvier.planner.search import SearchResult
from ranvier.system import child

STEPS, WARMUP = 10, 4
"""Steps of each run, and those at its start that do not count."""
_SECONDS = 600.0
_EVALUATED = 32
"""Samples of the evaluation at the end, of tasks that have samples: it is not measured."""


def measured(plan: SearchResult, count: int, progress: Callable[[str], None] = lambda line: None) -> SearchResult:
    """The plan with the seconds of a step of its first `count` configurations: the fastest of them first, then ordered
    by what was measured and, where nothing was, by the prediction times the median of measured over predicted.
    LaunchError where a run fails."""
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
    """The median step of a short run of its own processes; the first `warmup` do not count. LaunchError where it
    fails."""
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
