"""The picture of a simulation: what each stage does when, and how the bubble grows with depth, limit and jitter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ranvier.errors import ConfigError
from ranvier.pictures.figures import COLOURS, new_figure, remove_frame, write_title
from ranvier.planner.simulation import STEADY, Noise, Simulation, simulate_step
from ranvier.schedule.computed_limits import StageLoad, computed_limits
from ranvier.schedule.limits import Conditions
from ranvier.schedule.policies import POLICIES
from ranvier.schedule.schedule import Policy
from ranvier.schedule.simulator import EdgeTimes, Simulated, StageTimes
from ranvier.schedule.spans import CATEGORIES
from ranvier.system.atomic_file import write_problem

_LABELS = {"F": "forward", "B": "backward", "W": "weight gradient"}
_MOST_ACTIONS = 100
"""Most actions of a stage in a picture."""
_MOST_STAGES = 24
_UNIT = 1 << 20  # bytes, in units of which products are given


def check_picture(path: Path) -> None:
    """ConfigError if no picture can be written to `path`."""
    formats = new_figure(1, 1).canvas.get_supported_filetypes()
    if (problem := write_problem(path)) is not None:
        raise _not_writable(path, problem)
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise _not_writable(path, f"{path.suffix} is not a picture format")


def _not_writable(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"cannot be written: {problem}", code="picture-not-writable", where="--draw", value=str(path),
                       remedy="Name a .png file in a folder you own.")


def draw_simulation(simulation: Simulation, path: Path) -> None:
    """Draw the simulated step, and how its bubble depends on the pipeline's parameters; a PNG unless `path` ends
    otherwise."""
    figure = new_figure(13, 8.5)
    top, *below = figure.subplot_mosaic([["all"] * 3, ["depth", "limit", "jitter"]]).values()
    draw_actions(top, simulation.step.shown)
    run = simulation.run
    write_title(top,
                f"{simulation.cluster.name}: {run.mesh}, {run.pipeline.policy}, a step of {simulation.seconds:.4g} s")
    stage = mean_stage([StageTimes(forward=row.forward_seconds, backward=row.backward_seconds,
                                   weight=row.weight_seconds) for row in simulation.cost.stages])
    pipe = max(2, run.mesh.pipeline_size)
    draw_bubbles(below, stage, pipe, min(64, max(run.num_microbatches, 4)), hop=0.1 * stage.forward)
    try:
        figure.savefig(path, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise _not_writable(path, getattr(error, "strerror", None) or str(error)) from error


def draw_actions(axes: Axes, shown: Simulated) -> None:
    """One row for each stage, the first on top (Figure 1 of the AxoNN paper)."""
    stages = shown.actions[:_MOST_STAGES]
    end = min((stage[_MOST_ACTIONS - 1][2] for stage in stages if len(stage) > _MOST_ACTIONS), default=shown.seconds)
    for row, actions in enumerate(stages):
        for kind, name in CATEGORIES.items():
            spans = [(start, stop - start) for action, start, stop in actions if action.kind == kind and start < end]
            axes.broken_barh(spans, (row - 0.42, 0.84), facecolors=COLOURS[name], edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(stages)), [f"stage {row}" for row in range(len(stages))])
    axes.set_xlim(0, end)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a replica's schedule" + (
        "" if end >= shown.seconds else f": the first {end:.3g} of {shown.seconds:.4g}") + (
        "" if len(stages) == len(shown.actions) else f"; the first {len(stages)} of {len(shown.actions)} stages"))
    axes.legend(handles=[Patch(color=COLOURS[name], label=_LABELS[kind]) for kind, name in CATEGORIES.items()], ncols=3,
                loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, frameon=False)
    remove_frame(axes)


def mean_stage(stages: Sequence[StageTimes]) -> StageTimes:
    """A stage with the average times."""
    return StageTimes(forward=mean(stage.forward for stage in stages), backward=mean(
        stage.backward for stage in stages), weight=mean(stage.weight for stage in stages))


def bubble(stage: StageTimes, pipe: int, count: int, policy: Policy, *, in_flight: int | None = None, hop: float = 0.0,
           noise: Noise = STEADY) -> float:
    """Bubble of `pipe` equal stages and `count` microbatches, with the limits that `auto` chooses within 1F1B's memory,
    or within the memory of `in_flight` microbatches. Deferred products of a microbatch keep half of its activations."""
    load = StageLoad(forward=stage.forward, backward=stage.backward, weight=stage.weight, trains=True, fixed=0.0,
                     graph=1.0, operands=0.5)
    memory = max(1.0, (in_flight or pipe) / pipe)
    limits = computed_limits([load] * pipe, policy, memory=memory, in_flight=in_flight, num_microbatches=count,
                             conditions=Conditions(messages=hop / stage.forward, variation=noise.jitter))
    edges = EdgeTimes(transfer=(0.0,) * (pipe - 1), latency=(hop,) * (pipe - 1))
    return simulate_step([replace(stage, alive_bytes=_UNIT)] * pipe, count, policy, limits.in_flight, edges=edges,
                         noise=noise, alternating=limits.alternating, defer_last=limits.last,
                         defer_bytes=[waiting * _UNIT for waiting in limits.deferred]).bubble_fraction


def draw_bubbles(axes: Sequence[Axes], stage: StageTimes, pipe: int, count: int, hop: float) -> None:
    """Draw the bubble by depth, in-flight limit and jitter, for each policy."""
    pipe = min(pipe, 16)
    depths = [depth for depth in (1, 2, 4, 8, 12, 16) if depth <= max(4, 2 * pipe)]
    limits = sorted({max(1, round(pipe * factor)) for factor in (0.5, 1, 1.5, 2, 3)})
    jitters = (0.0, 0.1, 0.2, 0.4, 0.6)
    for number, policy in enumerate(POLICIES):
        drawn = partial(Axes.plot, linestyle="-", marker="o", label=policy.name + (
            ", in 1F1B's memory" if policy.defers else ""),
            linewidth=4 - 1.2 * number, markersize=8 - 2 * number)  # a curve below an equal one remains visible
        drawn(axes[0], depths, [100 * bubble(stage, depth, count, policy, hop=hop) for depth in depths])
        drawn(axes[1], limits, [100 * bubble(stage, pipe, count, policy, in_flight=limit, hop=hop) for limit in limits])
        drawn(axes[2], jitters, [100 * mean(bubble(stage, pipe, count, policy, hop=hop, noise=Noise(
            jitter=jitter, seed=seed)) for seed in range(4 if jitter else 1)) for jitter in jitters])
    for axis, what in zip(axes, ("stages", f"microbatches in flight ({pipe} stages)",
                                 f"jitter: deviation / mean time ({pipe} stages)"), strict=True):
        axis.set_xlabel(what)
        if axis is not axes[2]:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel("bubble, %")
        axis.set_ylim(bottom=0)
        remove_frame(axis)
    legend = axes[2].legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, frameon=False)
    legend.set_in_layout(False)  # it is wider than its axes; the title of the first axes already leaves space for it
    axes[0].set_title(f"{count} microbatches; a message takes 0.1 of a forward", fontsize="medium", loc="left")
