"""`ranvier plan` and `ranvier simulate`: from a run and a cluster's name to printed, written and drawn results."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

from ranvier.config import read
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.config.task_form import form_of
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.hardware import Cluster
from ranvier.errors import ConfigError, RanvierError
from ranvier.pictures.report_page import Page
from ranvier.planner import report
from ranvier.planner.auto import open_axes_of, resolve_with_least, with_plan, with_pretrained
from ranvier.planner.candidates import SEARCHED, Setting, predict
from ranvier.planner.job_files import Launcher, job_not_writable, job_path, nodes_of, start_command, write_job
from ranvier.planner.page import page_of
from ranvier.planner.problems import TOO_LARGE, cannot_be_laid_out
from ranvier.planner.problems import problems as find_problems
from ranvier.planner.run_cost import SAVED_BYTES_PER_SECOND, run_cost, run_pipeline
from ranvier.planner.search import SearchResult, check_precision, search
from ranvier.planner.simulation import STEADY, Goodput, Noise, Simulation, goodput, simulate_step
from ranvier.planner.training import (
    Goal,
    changed_cluster,
    check_finite,
    check_goal,
    failures_of,
    fewest_devices,
    for_goal,
    training,
)
from ranvier.planner.training import columns as training_columns
from ranvier.planner.trial import measure_plan
from ranvier.planner.work import Work
from ranvier.schedule.policies import policy_named
from ranvier.system.atomic_file import write_atomically, write_problem
from ranvier.system.terminal import Screen, TextTable, terminal_width, wrap_text


def ranks_for(run: Run, cluster: Cluster, ranks: int | None) -> int:
    """Number of ranks to plan for: the requested devices; else the ranks of the run's mesh, or all devices if it has
    one rank; on CPUs one per core."""
    if ranks is not None:
        return ranks
    size = 1 if open_axes_of(run) else resolve_with_least(run).mesh.size
    cores = cluster.device.cores
    most = cluster.num_devices if cores is None else min(cluster.num_devices, max(1, int(cores)) * cluster.nodes)
    return min(cluster.num_devices, size) if size > 1 else most


def settings_of(text: str | None) -> tuple[Setting, ...]:
    """The settings that may change, from a flag. ConfigError for an unknown name."""
    if text is None:
        return SEARCHED
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in get_args(Setting)]
    if unknown or not names:
        raise ConfigError("cannot be searched", code="unknown-search", where="--search",
                          value=unknown[0] if unknown else text,
                          remedy=f"Name some of: {', '.join(get_args(Setting))}.")
    return cast("tuple[Setting, ...]", names)  # all are valid: others were refused


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of `ranvier plan` except the recipe and the clusters. ranks: devices; None for those of the recipe's mesh
    or of the cluster. nodes, price: of each cluster, and per device and hour, instead of the cluster file's. searched:
    settings that may change. takes_bf16: whether the plan uses bf16 if that is faster, since the user chose no number
    format. measure: number of plans that are run here. goal: an entire training. what_if: factors on numbers of the
    cluster. out: the run file, next to which the job file for `launcher` is written. out_html: the page; origins: the
    origin of each setting, for the page."""

    ranks: int | None = None
    nodes: int | None = None
    price: float | None = None
    searched: str | None = None
    takes_bf16: bool = False
    measure: int = 0
    goal: Goal | None = None
    what_if: Sequence[str] = ()
    out: Path | None = None
    out_html: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    launcher: Launcher | None = None
    explain: bool = False
    as_json: bool = False


def plan(name: str, run: Run, cluster_names: Sequence[str], request: Request) -> SearchResult:
    """Search, run the best `measure` plans for some steps here, print, and write the best plan as a run file. Returns
    the result for the first cluster."""
    _check(request, len(cluster_names))
    clusters = [replace(cluster, nodes=request.nodes or cluster.nodes,
                        price_per_hour=request.price or cluster.price_per_hour)
                for cluster in map(load_cluster, cluster_names)]
    run, problems = with_pretrained(run)
    for problem in (*problems,
                    *(problem for problem in find_problems(resolve_with_least(run))
                      if problem.where.startswith("model."))):
        raise problem
    if len(clusters) > 1 or request.what_if:
        return _compare(name, run, clusters, request)
    if request.launcher is not None and request.ranks is not None:
        nodes_of(request.ranks, clusters[0])
    tried = _search_plans(run, clusters[0], request)
    found, goal = tried[-1], request.goal
    if request.measure:
        found = measure_plan(found, request.measure, _progress)
    best, job = found.best[0], None
    if request.out is not None:
        _write(replace(for_goal(found, goal), launch=run.launch, run_dir=None), request.out, request.origins)
        if request.launcher is not None:
            job = write_job(request.launcher, best.run, found.cluster, request.out, best.cost.seconds)
    if request.out_html is not None:
        choices = report.schedule_of(found) if request.explain else ()
        _write_page(page_of(found, name, run, request.origins, simulation(best.run, found.cluster), goal,
                            report.schedule_text(choices, best.cost) if choices else ""), request.out_html)
    if request.as_json:
        print(json.dumps(report.document(found, name, goal), indent=1))
        return found
    if len(tried) > 1:
        Screen(sys.stdout).print(comparison(tried, goal))
        print()
    print_plan(found, name, request.explain, goal)
    screen = Screen(sys.stdout)
    if best.run.precision != run.precision and request.searched is None:
        screen.print(f"\nThe plan uses {best.run.precision}, in which this device computes faster, because the recipe "
                     f"sets no precision. For {run.precision}: --precision {run.precision}.")
    for line in report.course_lines(best):
        screen.print(line)
    freezes = run.elastic.freeze != "none" and not run.elastic.dry_run
    if best.course is None and freezes:
        screen.print("\nThe gain from freezing is not predicted: the number of steps per epoch is unknown. " + (
            "Set --elastic.every and --train.steps." if "data.train_samples" in form_of(run.data).unused else
            "Set --data.train-samples."))
    if request.out is not None:
        out = shlex.quote(str(request.out))
        start = f"ranvier train {out}" if job is None or request.launcher is None else start_command(
            request.launcher, job, nodes_of(best.run.mesh.size, found.cluster)[0])
        print(f"\nwritten to {request.out}{'' if job is None else f' and {job}'}; now: {start}\n"
              f"or first: ranvier check {out} --cluster {shlex.quote(cluster_names[0])}")
    return found


def _progress(line: str) -> None:
    print(f"ranvier: {line}", file=sys.stderr, flush=True)


class Progress:
    """Progress of a search, on standard error: on a terminal one line that is overwritten; elsewhere only the first."""

    def __init__(self) -> None:
        self._on_terminal, self._shown = sys.stderr.isatty(), 0

    def show(self, line: str) -> None:
        """Show `line` instead of the previous one."""
        if self._on_terminal:
            width = terminal_width() - 1
            print(f"\r{f'ranvier: {line}'[:width]:{min(width, self._shown)}}", end="", file=sys.stderr, flush=True)
        elif not self._shown:
            _progress(line)
        self._shown = len(f"ranvier: {line}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal and self._shown:
            print(file=sys.stderr, flush=True)


def _check(request: Request, num_clusters: int) -> None:
    """ConfigError for incompatible options."""
    check_finite("--price", request.price)
    if request.price is not None and request.goal is None:
        raise ConfigError("needs a number of tokens", code="goal-without-tokens", where="--price", value=request.price,
                          remedy="Also give, for example, `--tokens 300B`.")
    several = num_clusters > 1 or bool(request.what_if)
    for where, value in (("--out", request.out), ("--out-html", request.out_html), ("--measure", request.measure)):
        if several and value:
            raise ConfigError("is for one plan, and several are compared (`--cluster` more than once, or `--what-if`)",
                              code="comparison-with-output", where=where, value=str(value),
                              remedy="Leave it out here, and plan again for the one that you choose.")
    if request.launcher is not None and request.out is None:
        raise ConfigError("needs a run file to start", code="launcher-without-out", where="--launcher",
                          value=request.launcher, remedy="Also give `--out FILE.toml`.")
    if request.out is not None:
        if request.out_html is not None and request.out.resolve() == request.out_html.resolve():
            raise ConfigError("is also the file of `--out`", code="page-over-plan", where="--out-html",
                              value=str(request.out_html), remedy="Name another file.")
        read.check_out(request.out)
        if request.launcher is not None and (reason := write_problem(job_path(request.launcher, request.out))):
            raise job_not_writable(job_path(request.launcher, request.out), reason)
    if request.out_html is not None and (reason := write_problem(request.out_html)) is not None:
        raise _no_page(request.out_html, reason)


def _search(run: Run, cluster: Cluster, ranks: int, request: Request) -> SearchResult:
    rates = cluster.device.rates
    if request.takes_bf16 and request.searched is None and "bf16" in rates and run.precision in rates and (
            rates["bf16"].peak_flops * rates["bf16"].share > rates[run.precision].peak_flops * rates[
                run.precision].share):
        run = replace(run, precision="bf16")
    try:
        with Progress() as progress:
            return search(run, cluster, ranks, settings_of(request.searched), progress=progress.show,
                          interruptible=True)
    except RanvierError:  # some are ValueErrors
        raise
    except TOO_LARGE as error:
        raise cannot_be_laid_out(error) from error


def _search_plans(run: Run, cluster: Cluster, request: Request) -> list[SearchResult]:
    """The plan; if a deadline or a budget leaves the number of devices open, preceded by plans for fewer devices."""
    goal = request.goal
    if goal is not None and goal.budget is not None and cluster.price_per_hour is None:
        raise ConfigError(f"needs to know what a device of {cluster.name} costs", code="budget-without-price",
                          where="--budget", value=goal.budget,
                          remedy="Give `--price`, the dollars of a device and hour, or write price_per_hour into "
                                 "the cluster's file.")
    if goal is None or request.ranks is not None or (goal.deadline_days is None and goal.budget is None):
        found = _search(run, cluster, ranks_for(run, cluster, request.ranks), request)
        if goal is not None:
            check_goal(found, goal)
        return [found]
    return [result for result, _ in fewest_devices(
        run, cluster, goal, lambda count: _search(run, cluster, count, request))]


def _compare(name: str, run: Run, clusters: Sequence[Cluster], request: Request) -> SearchResult:
    """Print plans for several clusters, and for clusters with changed numbers, side by side; returns the first plan.
    For a cluster without a plan the reason is shown. RanvierError, that of the first cluster, if none has a plan."""
    changed = [changed_cluster(cluster, text) for cluster in clusters for text in request.what_if]
    results: list[SearchResult] = []
    without: list[tuple[Cluster, RanvierError]] = []
    for cluster in (*clusters, *changed):
        try:
            results.append(_search_plans(run, cluster, request)[-1])
        except RanvierError as problem:
            without.append((cluster, problem))
    if not results:
        raise without[0][1]
    if request.as_json:
        print(json.dumps({"recipe": name, "plans": [report.document(each, name, request.goal) for each in results],
                          "without": [{"cluster": cluster.name, "code": problem.code, "reason": str(problem)}
                                      for cluster, problem in without]}, indent=1))
    else:
        screen = Screen(sys.stdout)
        screen.print(f"{name}, {report.numbers(results[0])}")
        screen.print()
        screen.print(comparison(results, request.goal, without))
    return results[0]


def comparison(results: Sequence[SearchResult], goal: Goal | None,
               without: Sequence[tuple[Cluster, RanvierError]] = ()) -> TextTable:
    """The best plan of each search, one per line. without: clusters without a plan, and why."""
    best = [each.best[0] for each in results]
    longer = [one.expected_seconds(each.measured_over_predicted) / one.cost.seconds
              for one, each in zip(best, results, strict=True)]
    columns = {"cluster": [each.cluster.name for each in results], "devices": [f"{each.ranks:,}" for each in results],
               "best": [report.describe(one.run) for one in best],
               "s/step": [f"{one.cost.seconds * factor:.4g}" for one, factor in zip(best, longer, strict=True)],
               "tokens/s": [f"{one.cost.tokens_per_second / factor:,.0f}"
                            for one, factor in zip(best, longer, strict=True)],
               "MFU": [f"{one.cost.model_utilisation / factor:.1%}" for one, factor in zip(best, longer, strict=True)]}
    if goal is not None:
        columns |= training_columns([training(one, each.cluster, goal, each.measured_over_predicted)
                                     for one, each in zip(best, results, strict=True)])
    rows = [*zip(*columns.values(), strict=True), *(
        (cluster.name, "none", f"{problem.where}: {problem.what}", *[""] * (len(columns) - 3))
        for cluster, problem in without)]
    return TextTable(header=list(columns), rows=rows, words=(0, 2), keys=1)


def _write(run: Run, path: Path, origins: Mapping[str, str]) -> None:
    try:
        read.write_changes(run, path, origins)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", code="plan-not-writable", where="--out",
                          value=str(path), remedy="Name a .toml file in a folder you own.") from error


def _write_page(page: Page, path: Path) -> None:
    try:
        write_atomically(path, page.html())
    except OSError as error:
        raise _no_page(path, error.strerror or str(error)) from error


def _no_page(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot be written: {reason}", code="plan-page-not-writable", where="--out-html",
                       value=str(path), remedy="Name a file in a folder you own.")


def print_plan(result: SearchResult, name: str, explain: bool, goal: Goal | None = None) -> None:
    """Print the plan on standard output."""
    screen = Screen(sys.stdout)
    screen.print(f"{name} on {result.ranks} of the {result.cluster.num_devices:,} devices of {result.cluster.name} "
                  f"({result.cluster.device.name}), {report.numbers(result)}")
    if goal is not None:
        whole = training(result.best[0], result.cluster, goal, result.measured_over_predicted)
        screen.print(f"a training on {goal.tokens:,.0f} tokens has {whole.steps:,} steps")
        if whole.best_checkpoint_steps is not None:
            given = f"; given is --checkpoint.every {whole.checkpoint_steps}" * goal.keeps_interval
            screen.print(f"a checkpoint every {whole.best_checkpoint_steps} steps, written at "
                         f"{SAVED_BYTES_PER_SECOND / 1e9:g} GB/s, loses least{given}")
    if same := report.common_settings(result):
        screen.print(same)
    screen.print()
    screen.print(report.table(result, goal=goal))
    if result.measured_over_predicted != 1.0:
        screen.print(f"\nMeasured steps take {result.measured_over_predicted:.2f} times the predicted time (median).")
    screen.print()
    first, limits, *more, memory = report.explanation(result)
    faster = any(one.cost.seconds < result.best[0].cost.seconds for one in result.dropped)
    for line in (first, limits, *(more if explain else ()), *([memory] if explain or faster else ())):
        screen.print(line)
    if explain and (choices := report.schedule_of(result)):
        screen.print(report.schedule_text(choices, result.best[0].cost))


# --- simulate --------------------------------------------------------------------------------------------------------


def simulate(name: str, run: Run, cluster_name: str, *, ranks: int | None = None, jitter: float = 0.0,
             slow: Sequence[str] = (), mtbf_hours: float | None = None, draw: Path | None = None, as_json: bool = False,
             as_published: bool = False) -> Simulation:
    """Simulate a step on the run's own mesh, print it, and draw it. as_published: as for `step_cost`."""
    if draw is not None:
        from ranvier.planner.picture import check_picture, draw_simulation

        check_picture(draw)
    cluster = load_cluster(cluster_name)
    check_finite("--jitter", jitter)
    check_finite("--mtbf-hours", mtbf_hours)
    run, problems = with_pretrained(replace(run, launch=replace(run.launch, cluster=cluster_name)))
    run, unplanned = with_plan(run, ranks)
    for problem in (*problems, *unplanned, *find_problems(run, ranks)):
        raise problem
    if run.mesh.size > cluster.num_devices:
        raise ConfigError(f"needs {run.mesh.size} devices, and {cluster.name} has {cluster.num_devices}",
                          code="cluster-too-small-for-mesh", where="mesh", value=str(run.mesh),
                          remedy="Take a smaller mesh, or a larger cluster.")
    check_precision(run, cluster)
    noise = Noise(jitter=jitter, slow=dict(_slow(text, run) for text in slow), seed=run.seed)
    try:
        found = simulation(run, cluster, noise, as_published=as_published)
    except RanvierError:
        raise
    except TOO_LARGE as error:
        raise cannot_be_laid_out(error) from error
    failures = None if mtbf_hours is None else failures_of(found.run, cluster, found.memory, mtbf_hours)
    lost = None if failures is None else goodput(found.seconds, run.mesh.size, failures)
    document = _document(name, found, lost)
    if draw is not None:
        draw_simulation(found, draw)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _print(found, lost, name)
        if draw is not None:
            print(f"drawn in {draw}")
    return found


def simulation(run: ResolvedRun, cluster: Cluster, noise: Noise = STEADY, work: Work | None = None, *,
               as_published: bool = False) -> Simulation:
    """Simulate one step. as_published: as for `ranvier.cost.step.step_cost`."""
    work = work or Work()
    one = predict(run, cluster, work, exact=True)
    run = one.run
    if as_published:
        one = replace(one, cost=run_cost(run, cluster, work.stages(run), exact=True, as_published=True))
    pipeline = run_pipeline(run, cluster, work.stages(run), as_published=as_published)
    step = simulate_step(pipeline.times, pipeline.num_microbatches, policy_named(run.pipeline.policy),
                         pipeline.in_flight, replicas=run.mesh.num_replicas, stage_size=run.mesh.stage_size,
                         edges=pipeline.edges, defer_bytes=pipeline.defer_bytes, noise=noise, cores=pipeline.at_once,
                         placement=run.placement, defer_last=pipeline.defer_last, max_stored=pipeline.max_stored,
                         alternating=pipeline.alternating)
    after = one.cost.seconds - one.cost.pipeline_seconds
    seconds = max(step.seconds - one.cost.partial_seconds, one.cost.cores_seconds)
    return Simulation(run=run, cluster=cluster, cost=one.cost, step=step, excess=one.reason, memory=one.memory,
                      pipeline_seconds=seconds, seconds=seconds + after)


def _slow(text: str, run: ResolvedRun) -> tuple[tuple[int, int], float]:
    """"3:1:2.5" is stage 1 of replica 3 at 2.5 times its time."""
    replicas, stages = run.mesh.num_replicas, run.mesh.pipeline_size
    try:
        replica, stage, factor = text.split(":")
        found = (int(replica), int(stage)), float(factor)
        if not (0 <= found[0][0] < replicas and 0 <= found[0][1] < stages and 0 < found[1] < 1e6):
            raise ValueError
    except ValueError:
        raise ConfigError("must be REPLICA:STAGE:FACTOR, with an existing replica and stage",
                          code="malformed-slow-stage", where="--slow", value=text,
                          remedy=f"There are {replicas} replicas of {stages} stages, numbered from 0; for example "
                                 "`--slow 0:0:1.5`.") from None
    return found


def _document(name: str, simulation: Simulation, lost: Goodput | None) -> dict[str, object]:
    shown = simulation.step.shown  # the slowest replica with a slow stage, else the first
    return {"recipe": name, "cluster": simulation.cluster.name, "ranks": simulation.run.mesh.size,
            "step_seconds": simulation.seconds, "pipeline_seconds": simulation.pipeline_seconds,
            "bubble_fraction": simulation.step.bubble_fraction, "replicas": simulation.step.replicas,
            "replicas_simulated": simulation.step.sampled, "replica_seconds": list(simulation.step.replica_seconds),
            "excess": simulation.excess, "predicted": report.cost_dict(simulation.cost),
            "goodput": None if lost is None else {"share": lost.share, "failures_per_day": lost.failures_per_day,
                                                  "best_checkpoint_steps": lost.best_steps},
            "stages": [{"stage": rank, "busy_seconds": sum(stop - start for _, start, stop in actions),
                        "most_stored": max(shown.most_stored[stage]
                                           for stage in simulation.run.placement.stages_of(rank)),
                        "actions": " ".join(str(action) for action, _, _ in actions)}
                       for rank, actions in enumerate(shown.actions)]}


def _print(simulation: Simulation, lost: Goodput | None, name: str) -> None:
    step, run, screen = simulation.step, simulation.run, Screen(sys.stdout)
    screen.print(f"{name} on {run.mesh.size:,} devices of {simulation.cluster.name}: {report.describe(run)}")
    if simulation.excess:
        screen.print(f"it would not fit: {simulation.excess}")
    pipeline = simulation.pipeline_seconds
    screen.print(f"a step takes {simulation.seconds:.4g} s: the pipeline {pipeline:.4g} s "
                 f"({step.bubble_fraction:.1%} of it bubble), then averaging and update "
                 f"{simulation.seconds - pipeline:.3g} s")
    if pipeline > step.seconds:
        screen.print(f"stages share cores: with one core each, the pipeline would take {step.seconds:.4g} s")
    if step.sampled > 1:
        screen.print(f"{step.sampled} of {step.replicas:,} replicas were simulated, {min(step.replica_seconds):.4g} to "
                     f"{max(step.replica_seconds):.4g} s; the step takes the expected time of the slowest of all")
    if lost is not None:
        screen.print(f"{lost.failures_per_day:.2g} failures a day: with a checkpoint every "
                     f"{run.checkpoint.every or run.train.steps} steps {lost.share:.1%} of the time is useful work; "
                     f"the best interval is {lost.best_steps:,} step{'s' * (lost.best_steps != 1)}, if checkpoints are "
                     f"written at {SAVED_BYTES_PER_SECOND / 1e9:g} GB/s")
    screen.print("\nmilliseconds per microbatch; averaging and update per step:")
    screen.print(report.stage_table(simulation.cost))
    if len(simulation.cost.stages) > 16:
        screen.print(f"  ... {len(simulation.cost.stages) - 16} more stages")
    screen.print()
    for stage, actions in list(enumerate(step.shown.actions))[:8]:
        text = " ".join(str(action) for action, _, _ in actions[:24])
        screen.print(wrap_text(f"stage {stage}: {text}{' ...' if len(actions) > 24 else ''}", terminal_width()))
