"""The page of `ranvier plan --out-html`: the best configuration, and why each other candidate lost."""

from __future__ import annotations

from collections.abc import Mapping

from ranvier.config.run import Run
from ranvier.pictures.report_page import Page, StepTimeline, Table, changed_settings
from ranvier.planner import report
from ranvier.planner.candidates import Candidate
from ranvier.planner.search import SearchResult
from ranvier.planner.simulation import Simulation
from ranvier.planner.training import Goal, columns, for_goal, training
from ranvier.schedule.schedule import Action
from ranvier.schedule.simulator import Simulated
from ranvier.schedule.spans import CATEGORIES, Span
from ranvier.system.terminal import memory_text, memory_unit, three_digits

_MAX_ROWS = 60


def page_of(plan: SearchResult, recipe: str, asked: Run, origins: Mapping[str, str], step: Simulation,
            goal: Goal | None = None, schedule: str = "") -> Page:
    """The page of a plan: figures of the best configuration, its explanation, the candidates (those that do not fit
    come last), and a timeline of its step. asked, origins: the settings before the search, and the origin of each.
    step: of the best configuration. goal: a training, whose days and cost are shown too. schedule: from
    `report.schedule_text`."""
    best = plan.best[0]
    dropped = sorted(plan.dropped, key=lambda one: one.cost.seconds)
    unit, unit_bytes = memory_unit(max(map(report.device_bytes, (*plan.best, *dropped))))
    rows = [_row(number, found, _why_slower(best, found), unit_bytes) for number, found in enumerate(plan.best, 1)]
    rows += [_row(0, found, found.reason or "does not fit", unit_bytes) for found in dropped]
    cost, lines = best.cost, [line for line in schedule.split("\n") if line]
    whole = {} if goal is None else columns([training(best, plan.cluster, goal, plan.measured_over_predicted)])
    axes = [f"{axis} {size}" for axis, size in best.run.mesh.sizes.items() if size > 1] or ["1 rank"]
    return Page(
        title=f"{recipe} on {plan.ranks:,} of {plan.cluster.num_devices:,} devices of {plan.cluster.name}",
        subtitle=f"predicted, {report.numbers(plan)}; {plan.considered:,} configurations considered",
        figures=[("mesh", " x ".join(axes)), ("seconds per step", report.four_digits(cost.seconds)),
                 ("tokens per second", f"{cost.tokens_per_second:,.0f}"),
                 ("MFU", f"{cost.model_utilisation:.1%}"), ("bubble", f"{report.step_bubble(cost):.1%}"),
                 ("memory per device", memory_text(report.device_bytes(best))),
                 *((name.replace("\n", " "), cell) for name, (cell,) in whole.items())],
        text=[*report.explanation(plan), *(line for line in lines if line[0] != " ")],
        fixed="\n".join(line for line in lines if line[0] == " "),
        candidates=Table(header=("", "configuration", "s/step", "tokens/s", "MFU", "bubble", f"{unit} per device",
                                 "why not"), rows=rows[:_MAX_ROWS], numbers=(2, 3, 4, 5, 6)),
        timeline=_timeline(step.step.shown),
        memory=[{"place": f"stage {entry.pipeline_rank}", "category": prefix + category, "predicted": size,
                 "measured": None, "whole": False}
                for entry in best.memory for prefix, sizes in (("", entry.device), ("host ", entry.host))
                for category, size in sizes.items() if size],
        settings=changed_settings(for_goal(plan, goal), asked, origins))


def _timeline(shown: Simulated) -> StepTimeline:
    """The timeline of one replica's actions, without what follows its pipeline."""
    def span(action: Action, start: float, stop: float) -> Span:
        return Span(CATEGORIES[action.kind], str(action), 1, round(start * 1e9), round(stop * 1e9))

    milliseconds = shown.seconds * 1e3
    return StepTimeline(
        title=f"The pipeline of a step, simulated: {milliseconds:{',.0f' if milliseconds >= 1000 else '.4g'}} ms",
        start_ns=0,
        stop_ns=round(shown.seconds * 1e9),
        rows=[(f"pipe {rank}", [span(*each) for each in actions]) for rank, actions in enumerate(shown.actions)])


def _row(number: int, candidate: Candidate, reason: str, unit_bytes: int) -> tuple[str, ...]:
    cost = candidate.cost
    return (str(number) if number else "", report.describe(candidate.run), report.four_digits(cost.seconds),
            f"{cost.tokens_per_second:,.0f}", f"{cost.model_utilisation:.1%}", f"{report.step_bubble(cost):.1%}",
            three_digits(report.device_bytes(candidate) / unit_bytes) if candidate.memory else "", reason)


def _why_slower(best: Candidate, candidate: Candidate) -> str:
    """The three largest differences between the step times of a candidate and of the best one."""
    if candidate is best:
        return "the fastest"
    more = {name: share * candidate.cost.seconds - report.shares(best.cost).get(name, 0.0) * best.cost.seconds
            for name, share in report.shares(candidate.cost).items()}
    parts = [f"{name} {seconds:+.3g} s" for name, seconds in sorted(more.items(), key=lambda part: -abs(part[1]))[:3]
             if abs(seconds) > 0.0005 * best.cost.seconds]
    return f"{candidate.cost.seconds / best.cost.seconds - 1:+.1%}" + (f": {', '.join(parts)}" if parts else "")
