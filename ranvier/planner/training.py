"""Cost of an entire training with a plan: days, device hours, dollars and kilowatt hours for a number of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, isfinite
from typing import Any

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.cost.cluster_files import cluster_of
from ranvier.cost.hardware import Cluster
from ranvier.cost.memory import RankMemory
from ranvier.errors import ConfigError
from ranvier.models import families
from ranvier.planner.auto import resolve_with_least
from ranvier.planner.candidates import Candidate
from ranvier.planner.run_cost import SAVED_BYTES_PER_SECOND, saved_bytes
from ranvier.planner.search import SearchResult
from ranvier.planner.simulation import Failures, goodput

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_MOST_TOKENS = 1e18


def tokens_of(text: str) -> float:
    """Parse a number of tokens: 15T, 300B, 2e9. ConfigError for other text."""
    value = _number(text)
    if not 1 <= value <= _MOST_TOKENS:
        raise ConfigError("is not a number of tokens", code="malformed-tokens", where="--tokens", value=text,
                          remedy="Give one, such as 300B, 15T or 2e9.")
    return value


def dollars_of(text: str) -> float:
    """Parse a sum of dollars: 2M, 500k, 1250.50. ConfigError for other text."""
    value = _number(text)
    if not 0 < value <= _MOST_TOKENS:
        raise ConfigError("is not a sum of dollars", code="malformed-budget", where="--budget", value=text,
                          remedy="Give one, such as 2M, 500k or 1250.")
    return value


def _number(text: str) -> float:
    """Parse a number with a unit of _UNITS; 0 for other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.strip().lower())
    return float(found[1]) * _UNITS[found[2]] if found else 0.0


def check_finite(where: str, value: float | None) -> None:
    """ConfigError for an option that is NaN or infinite."""
    if value is not None and not isfinite(value):
        raise ConfigError("must be a finite number", code="not-finite-option", where=where, value=value,
                          remedy="Give a number, or leave the option out.")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Goal of a training. tokens: of all steps together. deadline_days, budget (in dollars): None for no limit.
    mtbf_hours: mean time between failures of one rank; None for no failures. keeps_interval: whether the run's own
    checkpoint.every stays; else the plan has the best interval."""

    tokens: float
    deadline_days: float | None = None
    budget: float | None = None
    mtbf_hours: float | None = None
    keeps_interval: bool = False


def goal_of(tokens: str | None, deadline: float | None, budget: float | None, mtbf_hours: float | None, *,
            flags: Collection[str] = (), keeps_interval: bool = False) -> Goal | None:
    """The goal that options describe. flags: settings given in addition. ConfigError if an option needs a number of
    tokens, or if a flag sets another length."""
    for where, value in (("--deadline", deadline), ("--budget", budget), ("--mtbf-hours", mtbf_hours)):
        check_finite(where, value)
        if value is not None and tokens is None:
            raise ConfigError("needs a number of tokens", code="goal-without-tokens", where=where, value=value,
                              remedy="Also give, for example, `--tokens 300B`.")
    for name in ("train.steps", "train.epochs"):
        if tokens is not None and name in flags:
            raise ConfigError(f"sets another length of the run than `--{name}`", code="tokens-beside-length",
                              where="--tokens", value=tokens, remedy="Give one of them.")
    return None if tokens is None else Goal(tokens=tokens_of(tokens), deadline_days=deadline, budget=budget,
                                            mtbf_hours=mtbf_hours, keeps_interval=keeps_interval)


@dataclass(frozen=True, kw_only=True)
class Training:
    """An entire training with one configuration. goodput: share of its time in steps that count; 1 without failures.
    best_checkpoint_steps: checkpoint interval that loses the least time; None without failures. checkpoint_steps: the
    run's interval. dollars, kilowatt_hours: None if the cluster's file has no price or power. steps: of the plan's
    batch."""

    devices: int
    steps: int
    days: float
    device_hours: float
    goodput: float
    best_checkpoint_steps: int | None
    checkpoint_steps: int
    dollars: float | None
    kilowatt_hours: float | None

    def meets(self, goal: Goal) -> bool:
        """Whether it ends in time and within the budget."""
        return ((goal.deadline_days is None or self.days <= goal.deadline_days)
                and (goal.budget is None or self.dollars is None or self.dollars <= goal.budget))


def training(candidate: Candidate, cluster: Cluster, goal: Goal, measured_over_predicted: float = 1.0) -> Training:
    """Cost of training on `goal.tokens` with a configuration."""
    longer = candidate.expected_seconds(measured_over_predicted) / candidate.cost.seconds
    devices, share, best_steps = candidate.run.mesh.size, 1.0, None
    steps = ceil(goal.tokens / candidate.cost.tokens)
    interval = candidate.run.checkpoint.every
    if goal.mtbf_hours is not None:
        failures = failures_of(candidate.run, cluster, candidate.memory, goal.mtbf_hours, steps=steps)
        lost = goodput(candidate.cost.seconds * longer, devices, failures)
        best_steps = min(lost.best_steps, steps)
        if not goal.keeps_interval:
            interval = best_steps
            lost = goodput(candidate.cost.seconds * longer, devices, replace(failures, checkpoint_steps=interval))
        share = lost.share
    days = candidate.cost.days(goal.tokens) * longer / max(share, 1e-9)
    hours = days * 24 * devices
    price, watts = cluster.price_per_hour, cluster.device.watts
    return Training(devices=devices, steps=steps, days=days, device_hours=hours,
                    goodput=share, best_checkpoint_steps=best_steps, checkpoint_steps=interval,
                    dollars=None if price is None else hours * price,
                    kilowatt_hours=None if watts is None else hours * watts / 1000)


def for_goal(result: SearchResult, goal: Goal | None) -> ResolvedRun:
    """The best plan's run, with the number of steps for the goal's tokens, and the interval of its checkpoints."""
    run = result.best[0].run
    if goal is None:
        return run
    whole = training(result.best[0], result.cluster, goal, result.measured_over_predicted)
    return replace(run, train=replace(run.train, epochs=None, steps=whole.steps),
                   checkpoint=replace(run.checkpoint, every=whole.checkpoint_steps))


def failures_of(run: ResolvedRun, cluster: Cluster, memory: Sequence[RankMemory], mtbf_hours: float, *,
                steps: int | None = None) -> Failures:
    """Cost of failures for a run. memory: predicted for its stages, including the copies that a checkpoint makes.
    steps: of the entire run; None for its own number."""
    copied = max((entry.host.get("checkpoint", 0) for entry in memory), default=0)
    writing = saved_bytes(run) / SAVED_BYTES_PER_SECOND
    return Failures(mtbf_seconds=mtbf_hours * 3600, checkpoint_steps=run.checkpoint.every or steps or run.train.steps,
                    stall_seconds=cluster.host_link.seconds(copied) if run.checkpoint.background else writing,
                    write_seconds=writing if run.checkpoint.background else 0.0)


def columns(several: list[Training]) -> dict[str, list[str]]:
    """Header -> cells of a table, one per training; without columns for which nothing is known."""
    table = {"days": [_days(training.days) for training in several],
             "device\nhours": [f"{training.device_hours:,.0f}" for training in several]}
    if any(training.dollars is not None for training in several):
        table["dollars"] = ["" if training.dollars is None else f"{training.dollars:,.0f}" for training in several]
    if any(training.kilowatt_hours is not None for training in several):
        table["kWh"] = ["" if training.kilowatt_hours is None else f"{training.kilowatt_hours:,.0f}"
                        for training in several]
    if any(training.goodput < 1.0 for training in several):
        table["goodput"] = [f"{training.goodput:.1%}" for training in several]
    return table


def _days(days: float) -> str:
    """Days as text, with two significant digits if one decimal place is not enough."""
    return f"{days:,.1f}" if days >= 1 else f"{days:.2g}"


def check_goal(result: SearchResult, goal: Goal) -> None:
    """ConfigError if the fastest plan for a given number of devices does not meet the goal."""
    found = training(result.best[0], result.cluster, goal, result.measured_over_predicted)
    if not found.meets(goal):
        raise _unmet(result.cluster, goal, [(result, found)])


# --- how many devices ------------------------------------------------------------------------------------------------


def fewest_devices(run: Run, cluster: Cluster, goal: Goal, search: Callable[[int], SearchResult]
                   ) -> list[tuple[SearchResult, Training]]:
    """The plans for 1, 2, 4, ... nodes, up to the first that meets the goal: more devices cost more, since they wait
    for each other more. Numbers of devices that could not meet the deadline even at their peak are skipped. ConfigError
    if the cluster has too few devices, or if those that meet the deadline cost too much; if no number has a plan, the
    search's own error for the most devices."""
    tried: list[tuple[SearchResult, Training]] = []
    refused: ConfigError | None = None
    for count in _counts(run, cluster, goal):
        try:
            result = search(count)
        except ConfigError as error:  # it does not fit this few devices, or has no mesh of this many
            refused = error
            continue
        tried.append((result, training(result.best[0], cluster, goal, result.measured_over_predicted)))
        if goal.deadline_days is None or tried[-1][1].days <= goal.deadline_days:
            break
    if refused is not None and not tried:
        raise refused
    if not tried or not tried[-1][1].meets(goal):
        raise _unmet(cluster, goal, tried, _least_days(run, cluster, goal, cluster.num_devices))
    return tried


def _counts(run: Run, cluster: Cluster, goal: Goal) -> Iterator[int]:
    nodes = 1
    while nodes <= cluster.nodes:
        count = nodes * cluster.devices_per_node
        if goal.deadline_days is None or _least_days(run, cluster, goal, count) <= goal.deadline_days:
            yield count
        nodes = nodes * 2 if nodes * 2 <= cluster.nodes or nodes == cluster.nodes else cluster.nodes


def _least_days(run: Run, cluster: Cluster, goal: Goal, devices: int) -> float:
    """A lower bound of the days, for every number format that a plan may choose: at the devices' peak, without a
    backward for frozen weights."""
    alone = resolve_with_least(run)
    flops = families.flops_per_sample(alone) / families.tokens_of(alone) * goal.tokens
    if run.lora.rank or run.elastic.freeze != "none":
        flops /= 3
    peak = max(rate.peak_flops for name, rate in cluster.device.rates.items() if name != "fp8" or run.model.float8)
    return flops / (peak * devices) / 86400


def _unmet(cluster: Cluster, goal: Goal, tried: list[tuple[SearchResult, Training]], least_days: float = 0.0
           ) -> ConfigError:
    last = tried[-1][1] if tried else None
    if last is not None and (goal.deadline_days is None or last.days <= goal.deadline_days):
        said, code = ((f"{last.devices:,} devices", "budget-too-small") if goal.deadline_days is None else
                      (f"{last.devices:,} devices, the fewest that are in time,", "budget-of-deadline"))
        return ConfigError(f"is not enough: {said} cost {last.dollars:,.0f} dollars in {_days(last.days)} days",
                           code=code, where="--budget", value=goal.budget,
                           remedy="Take fewer `--tokens`, or a larger budget" + (
                               "." if goal.deadline_days is None else ", or give more days with `--deadline`."))
    devices, days = ((cluster.num_devices, f"{_days(least_days)} days at their peak already") if last is None else
                     (last.devices, f"{_days(last.days)} days"))
    more = "more nodes with `--nodes`" if devices == cluster.num_devices else "no `--ranks`, for as many as are needed"
    return ConfigError(f"cannot be met on {devices:,} devices of {cluster.name}: {days}", code="deadline-too-early",
                       where="--deadline", value=goal.deadline_days,
                       remedy=f"Give more days, fewer `--tokens`, or {more}.")


# --- what if ---------------------------------------------------------------------------------------------------------


def changed_cluster(cluster: Cluster, text: str) -> Cluster:
    """The cluster with one number multiplied: "between.bandwidth=2". ConfigError for a number that it does not have."""
    key, _, factor = text.partition("=")
    tree: dict[str, Any] = asdict(cluster)
    *path, last = key.strip().split(".")
    place: Any = tree
    try:
        for name in path:
            place = place[name]
        value, times = place[last], float(factor)
    except (KeyError, TypeError, ValueError):
        value, times = None, 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-9 <= times <= 1e9:
        raise ConfigError("is not KEY=FACTOR of a number in the cluster's file", code="malformed-what-if",
                          where="--what-if", value=text,
                          remedy=f"Numbers of {cluster.name} are, for example: {', '.join(_numbers(tree))}.")
    place[last] = type(value)(value * times)
    return replace(cluster_of(tree, f"--what-if {text}"), name=f"{cluster.name}, {key.strip()} x {times:g}")


def _numbers(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(prefix + name)
    return found
