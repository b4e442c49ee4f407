"""A plan for people and for programs: the table, the bottleneck in words, and a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.collectives import place_groups
from ranvier.cost.step import Cost
from ranvier.errors import counted
from ranvier.mesh import mesh_text
from ranvier.plan.limits import MemoryChoice
from ranvier.planner.candidates import Candidate
from ranvier.planner.count import laid_out, memory_curve
from ranvier.planner.elastic_plan import Course
from ranvier.planner.search import SearchResult
from ranvier.planner.training import Goal, training
from ranvier.planner.training import columns as columns_of
from ranvier.system.terminal import TextTable, memory_unit, three_digits

_ALIKE = 0.01
"""Relative difference below which step times count as equal: far less than prediction errors."""


def four_digits(seconds: float) -> str:
    """Seconds with four significant digits: 5.800, 1235."""
    return f"{seconds:#.4g}".removesuffix(".")


def table(plan: SearchResult, rows: int = 8, goal: Goal | None = None) -> TextTable:
    """The fastest configurations, one per line, with the settings in which they differ (`common_settings` has the
    others). Rates are measured if possible. goal: a training, whose days and cost are shown for each."""
    shown = alternatives(plan)[:rows]
    axes = [axis for axis in shown[0].run.mesh.sizes
            if axis in ("data", "pipe") or any(found.run.mesh.sizes[axis] > 1 for found in shown)]
    head = " x ".join(axes[:2]) + "".join(f"\nx {' x '.join(axes[2:])}" if axes[2:] else "")
    columns = {"": [str(place + 1) for place in range(len(shown))],
               head: [" x ".join(str(found.run.mesh.sizes[axis]) for axis in axes) for found in shown]}
    columns |= {name: cells for name, cells in _settings(shown).items() if len(shown) == 1 or len({*cells}) > 1}
    unit, unit_bytes = memory_unit(max(map(device_bytes, shown)))
    rates: dict[str, list[str]] = {}
    for found in shown:
        cost = found.cost
        longer = found.expected_seconds(plan.measured_over_predicted) / cost.seconds
        for name, cell in {"s/step": four_digits(cost.seconds),
                           "tokens/s": f"{cost.tokens_per_second / longer:,.0f}",
                           "MFU": f"{cost.model_utilisation / longer:.1%}",
                           "HFU": f"{cost.hardware_utilisation / longer:.1%}",
                           "TFLOP/s\nper device": f"{model_flops_per_device(found) / longer / 1e12:,.3g}",
                           f"{unit} per\ndevice": three_digits(device_bytes(found) / unit_bytes)}.items():
            rates.setdefault(name, []).append(cell)
    if goal is not None:
        rates |= columns_of([training(found, plan.cluster, goal, plan.measured_over_predicted) for found in shown])
    if rates["HFU"] == rates["MFU"]:
        del rates["HFU"]
    further = {name: cells for name, cells in _further(shown).items() if len({*cells}) > 1}
    columns |= {name: cells for name, cells in further.items() if name in _WORDS} | rates | further
    words = [place for place, name in enumerate(columns) if name in _WORDS or name == head]
    return TextTable(header=list(columns), rows=list(zip(*columns.values(), strict=True)), words=words, keys=2)


def alternatives(plan: SearchResult) -> list[Candidate]:
    """The configurations except those that differ from a faster one only in the placement of optimizer states and in
    whether weight gradients are deferred; all if nothing else differs."""
    first: dict[object, Candidate] = {}
    for found in plan.best:
        run = found.run
        first.setdefault((run.mesh, run.batch, run.memory, run.tensor, run.precision, run.optim.shard,
                          run.placement), found)
    return list(first.values()) if len(first) > 1 else list(plan.best)


def common_settings(plan: SearchResult, rows: int = 8) -> str:
    """The settings that are the same in all rows of `table`, in words; empty for one row, which shows all."""
    shown = alternatives(plan)[:rows]
    same = [f"{name} {cells[0]}" for name, cells in _settings(shown).items() if len({*cells}) == 1]
    return f"the same in all rows: {', '.join(same)}" if same and len(shown) > 1 else ""


def _settings(shown: Sequence[Candidate]) -> dict[str, list[str]]:
    runs = [found.run for found in shown]
    return {"microbatch": [str(run.batch.microbatch_size) for run in runs],
            "in flight": [str(run.pipeline.in_flight) for run in runs],
            "recompute": [str(run.memory.recompute) for run in runs], "offload": [offload_text(run) for run in runs],
            "shard": ["yes" if run.optim.shard else "no" for run in runs]}


_WORDS = ("recompute", "offload", "shard", "deferred", "precision", "scheme")


def numbers(plan: SearchResult) -> str:
    """Numbers that all configurations share: the batch, and the number format if only one was searched."""
    run, tokens = plan.best[0].run, plan.best[0].cost.tokens
    formats = {found.run.precision for found in plan.best}
    parts = [f"batch {run.batch.global_size} of {tokens // run.batch.global_size:,} tokens",
             *(formats if len(formats) == 1 else ())]
    if formats == {"fp32"} and "bf16" in plan.cluster.device.rates:
        parts[-1] += " (faster here with --precision bf16)"
    return ", ".join(parts)


def _further(shown: Sequence[Candidate]) -> dict[str, list[str]]:
    """Columns that the table has only if its rows differ in them."""
    return {"stages per rank": [_stages(found.run) for found in shown],
            "deferred": ["no" if found.run.pipeline.defer_bytes == 0 else "yes" for found in shown],
            "precision": [found.run.precision for found in shown], "scheme": [scheme(found.run) for found in shown],
            "s the run": [four_digits(found.course.seconds) if found.course else "" for found in shown],
            "s measured": [four_digits(found.measured_seconds) if found.measured_seconds else "" for found in shown]}


def _stages(run: ResolvedRun) -> str:
    per_rank, how = run.placement.per_rank, run.placement.how
    return str(per_rank) if per_rank == 1 or how == "v-shape" else f"{per_rank} {how}"


def scheme(run: ResolvedRun) -> str:
    """The scheme of the tensor mesh's products; empty if a stage is one rank."""
    if run.mesh.stage_size == 1:
        return ""
    return run.tensor.scheme + " by sequence" * run.tensor.shards_sequence


def model_flops_per_device(candidate: Candidate) -> float:
    """The model's own FLOPs of a step, per second and device."""
    return candidate.cost.model_flops / candidate.cost.seconds / candidate.run.mesh.size


def device_bytes(candidate: Candidate) -> int:
    """Bytes of the rank that needs the most device memory."""
    return max((entry.device_bytes for entry in candidate.memory), default=0)


def step_bubble(cost: Cost) -> float:
    """The share of a step in which stages wait for each other."""
    return cost.bubble_fraction * cost.pipeline_seconds / cost.seconds


def shares(cost: Cost) -> dict[str, float]:
    """Shares of a step's time on the slowest stage; they add up to 1."""
    slowest = max(cost.stages, key=lambda stage: stage.microbatch_seconds)
    busy = 1.0 - cost.bubble_fraction
    pipeline = cost.pipeline_seconds / cost.seconds
    exchange = slowest.exchange_seconds / slowest.microbatch_seconds if slowest.microbatch_seconds else 0.0
    after = cost.reduction_seconds + cost.update_seconds
    rest = 1.0 - pipeline
    return {"computing": pipeline * busy * (1.0 - exchange), "messages of the tensor mesh": pipeline * busy * exchange,
            "the bubble": step_bubble(cost),
            "averaging gradients": rest * cost.reduction_seconds / after if after else 0.0,
            "the optimizer": rest * cost.update_seconds / after if after else 0.0}


NOT_MEMORY = "Memory is not a bottleneck: configurations that need more would not be faster by 0.1%."
PUBLISHED_STEPS, PUBLISHED_ERROR, LONGER_THAN_PREDICTED = 212, 0.07, 0.81
"""Accuracy of predictions for GPUs (`benchmarks/planner/standing`): rows, their median error, and the share of them
that took longer."""


def explanation(plan: SearchResult) -> list[str]:
    """The bottleneck, and what memory excludes, as sentences."""
    best, *others = alternatives(plan)
    second = others[0] if others else None
    cost = best.cost
    parts = shares(cost)
    named = ", ".join(f"{part:.0%} {name}" for name, part in sorted(parts.items(), key=lambda pair: -pair[1])
                      if part >= 0.005)
    factor = plan.measured_over_predicted
    seconds = best.expected_seconds(factor)
    lines = [f"{describe(best.run)} takes {four_digits(seconds)} s per step: {named}."]
    lost = {name: part for name, part in parts.items() if name != "computing"}
    worst = max(lost, key=lambda name: lost[name])
    lines.append(("After computing, the" if 0.05 <= lost[worst] < parts["computing"] else "The")
                 + _bottleneck(worst, lost[worst], best, plan))
    if second is not None:
        longer = second.ranked_seconds(factor) / best.ranked_seconds(factor) - 1
        why = "it was not measured" if best.measured_seconds else "more of its ranks wait for each other"
        lines.append(f"Next is {describe(second.run)}, " + (
            f"{longer:.1%} slower" + (", which is less than the prediction error." if longer < _ALIKE else ".")
            if longer >= 0 else f"{-longer:.1%} faster by the prediction, but {why}."))
    if plan.cluster.device.cores is None:
        lines.append(f"For {PUBLISHED_STEPS} published steps on A100s and H100s the median error of predictions is "
                     f"{PUBLISHED_ERROR:.0%}; {LONGER_THAN_PREDICTED:.0%} of these steps took longer than predicted.")
    if plan.dropped:
        tempting = min(plan.dropped, key=lambda found: found.cost.seconds)
        more = sum(found.cost.seconds < cost.seconds for found in plan.dropped) - 1
        lines.append(f"Memory is a bottleneck, too: {describe(tempting.run)} would take {tempting.cost.seconds:.4g} s "
                     f"({1 - tempting.cost.seconds / cost.seconds:.1%} less), but {tempting.reason}."
                     + (" Others would be faster and do not fit either." if more else "")
                     if 1 - tempting.cost.seconds / cost.seconds >= 0.001 else NOT_MEMORY)
    else:
        lines.append(NOT_MEMORY)
    return lines


def _bottleneck(worst: str, share: float, best: Candidate, plan: SearchResult) -> str:
    mesh, cluster = best.run.mesh, plan.cluster
    if share < 0.05:
        return (f" bottleneck is computing: nothing else takes more than {max(share, 0.01):.0%}. A device that "
                "computes faster would help, or larger products.")
    match worst:
        case "the bubble" if waits_for_link(best.cost):
            sent = best.cost.link_bytes.get("pipe", 0) / 1e9
            return (" bottleneck is the link between stages: a microbatch's activations take longer on it than a "
                    f"stage computes, {sent:.2f} GB per rank and step. Fewer stages send less.")
        case "the bubble":
            return (f" bottleneck is the bubble: {mesh.pipeline_size} stages wait for each other {share:.0%} of the "
                    "step. A larger global batch has more microbatches to fill it.")
        case "averaging gradients":
            crossing = "between" if place_groups(mesh, "data", cluster.devices_per_node).crosses else "inside"
            return (f" bottleneck is the link {crossing} nodes: averaging the gradients sends "
                    f"{best.cost.link_bytes.get('data', 0) / 1e9:.2f} GB per rank and step. With a larger global batch "
                    "this happens less often.")
        case "messages of the tensor mesh":
            sizes = [best.cost.link_bytes.get(axis, 0.0) for axis in ("row", "col")]
            return (f" bottleneck is the links of the tensor mesh: {sum(sizes) / 1e9:.2f} GB per rank and step. "
                    "Fewer rows and columns send less, and need more memory on each device.")
        case _:
            where = "the host's link" if best.run.optim.offload != "none" else "the device's memory"
            return f" bottleneck is the optimizer, at {where}. With a larger global batch it runs less often."


def schedule_text(choices: Sequence[MemoryChoice], step: Cost | None = None) -> str:
    """The schedule of the run, and how more or less memory would change it. step: the cost of an entire step, whose
    bubble is smaller than that of the few microbatches that are simulated for a choice; None if unknown."""
    own, *others = choices
    max_stored = own.limits.max_stored
    some = "" if own.num_microbatches == own.step_microbatches else f" of the step's {own.step_microbatches:,}"
    rows = [("pipeline.memory", *(f"{each.memory:g}" for each in others)),
            ("in flight", *(str(each.in_flight) for each in others)),
            ("most deferred", *(str(max(each.limits.deferred)) for each in others)),
            ("of the last", *("all" if each.limits.last is None else str(each.limits.last) for each in others)),
            ("peak memory", *(f"{each.peak_memory:.2f}" for each in others)),
            ("bubble", *(f"{each.bubble_fraction:.1%}" for each in others)),
            ("step time", *(f"{each.step:.3f}" for each in others))]
    if all(each.limits.last is None for each in others):
        rows = [row for row in rows if row[0] != "of the last"]
    return "\n".join([f"\nschedule: at most {counted(own.in_flight, 'microbatch')} in flight; microbatches with "
                      f"deferred weight gradients, by rank: {own.limits.deferred_text}; "
                      + ("" if max_stored is None else f"the stages of a rank hold at most {max_stored}; ")
                      + ("forwards and backwards run in 1F1B's order; " if own.limits.alternating else "")
                      + f"chosen by a simulation of {own.num_microbatches}{some} microbatches, whose bubble is "
                      f"{own.bubble_fraction:.1%}"
                      + (f" ({step_bubble(step):.1%} of the step)" if some and step is not None else "")
                      + (f"\nof these {own.num_microbatches}, relative to a step without a bubble:" if others else ""),
                      *(f"{name:>16}" + "".join(f"{value:>8}" for value in row) for name, *row in rows)])


def schedule_of(plan: SearchResult) -> tuple[MemoryChoice, ...]:
    """Memory against speed for the fastest configuration; empty if `pipeline.memory` has no effect on it."""
    return memory_curve(plan.best[0].run, laid_out(plan.best[0].run)[0], plan.cluster)


def waits_for_link(cost: Cost) -> bool:
    """Whether stages wait for the messages between them rather than for each other."""
    return cost.edge_seconds > max(stage.microbatch_seconds for stage in cost.stages)


def offload_text(run: ResolvedRun) -> str:
    """Placement of the optimizer states, with the share in host memory if only a part is there."""
    share = run.optim.offload_share
    return f"hybrid {share:.1%}" if run.optim.offload == "hybrid" and share != "auto" else run.optim.offload


def describe(run: ResolvedRun) -> str:
    """A configuration in a few words."""
    parts = [f"{axis} {size}" for axis, size in run.mesh.sizes.items()
             if size > 1] or ["one rank"]
    extra = [f"microbatch {run.batch.microbatch_size}"]
    if run.placement.per_rank > 1:
        extra.append(f"{run.placement.per_rank} {run.placement.how} stages per rank")
    if run.memory.recompute != "none":
        extra.append(f"recompute {run.memory.recompute}")
    if run.optim.offload not in ("none", "auto"):
        extra.append(f"offload {offload_text(run)}")
    if run.optim.shard:
        extra.append("sharded")
    if run.pipeline.defer_bytes == 0 and run.mesh.pipeline_size > 1:
        extra.append("nothing deferred")
    extra += [run.precision, *([scheme(run)] if run.mesh.stage_size > 1 else [])]
    return f"{' x '.join(parts)} ({', '.join(extra)})"


def document(plan: SearchResult, recipe: str, goal: Goal | None = None) -> dict[str, object]:
    """The plan for JSON. goal: a training, described in "training"."""
    whole = None if goal is None else training(plan.best[0], plan.cluster, goal, plan.measured_over_predicted)
    return {"training": None if goal is None or whole is None else {"tokens": goal.tokens, **asdict(whole)},
            "recipe": recipe, "cluster": plan.cluster.name, "ranks": plan.ranks, "considered": plan.considered,
            "plans": [as_dict(found) for found in plan.best],
            "dropped": [as_dict(found) for found in sorted(plan.dropped, key=lambda one: one.cost.seconds)],
            "elastic": course_dict(plan.best[0].course),
            "schedule": [asdict(choice) for choice in schedule_of(plan)],
            "explanation": explanation(plan), "measured_over_predicted": plan.measured_over_predicted,
            "interrupted": plan.interrupted}


def as_dict(candidate: Candidate) -> dict[str, object]:
    """One configuration."""
    run, cost = candidate.run, candidate.cost
    return {"mesh": run.mesh.document(), "microbatch_size": run.batch.microbatch_size,
            "in_flight": run.pipeline.in_flight, "checkpoint": run.memory.recompute, "offload": run.optim.offload,
            "offload_share": run.optim.offload_share if run.optim.offload == "hybrid" else None,
            "defer_bytes": run.pipeline.defer_bytes, "sequence_sharding": run.tensor.sequence_sharding,
            "shard": run.optim.shard, "chunk_buckets": run.optim.chunk_buckets, "precision": run.precision,
            "scheme": run.tensor.scheme, "reason": candidate.reason, **cost_dict(cost),
            "measured_seconds": candidate.measured_seconds,
            "device_bytes": device_bytes(candidate) if candidate.memory else None,
            "memory": [{"pipe": entry.pipeline_rank, "ranks": entry.ranks, "device": dict(entry.device),
                        "host": dict(entry.host)} for entry in candidate.memory]}


def cost_dict(cost: Cost) -> dict[str, object]:
    """A step's phases and rates."""
    return {"step_seconds": cost.seconds, "pipeline_seconds": cost.pipeline_seconds,
            "bubble_fraction": cost.bubble_fraction, "reduction_seconds": cost.reduction_seconds,
            "update_seconds": cost.update_seconds, "tokens_per_second": cost.tokens_per_second,
            "model_flops_utilisation": cost.model_utilisation,
            "hardware_flops_utilisation": cost.hardware_utilisation, "days_to_3e11_tokens": cost.days(),
            "model_flops_per_second": cost.model_flops / cost.seconds, "link_bytes": dict(cost.link_bytes),
            "shares": shares(cost)}


def course_dict(course: Course | None) -> dict[str, object] | None:
    """An elastic run, period by period."""
    if course is None:
        return None
    return {"seconds": course.seconds, "unfrozen_seconds": course.unfrozen_seconds, "speedup": course.speedup,
            "periods": [{**asdict(period), "mesh": period.mesh.document(), "seconds": period.seconds}
                        for period in course.periods]}


def course_lines(candidate: Candidate) -> list[str]:
    """Lines about a run whose layers freeze; none if nothing freezes."""
    course, elastic = candidate.course, candidate.run.elastic
    if course is None:
        return []
    used = [text for text, is_used in (("a mesh that packs", elastic.auto_pipe), ("cached outputs", elastic.cache))
            if is_used]
    with_what = " and ".join(used) or "the mesh as it is"
    lines = ["", f"Layers freeze as elastic.freeze says: with {with_what} the run takes {course.seconds:.4g} s "
                 f"instead of {course.unfrozen_seconds:.4g} s, {course.speedup:.2f} times as fast."]
    grows = len({period.global_size for period in course.periods}) > 1
    for period in course.periods:
        batch = f", batch {period.global_size}" if grows else ""
        lines.append(f"  from step {period.first_step}: {period.frozen} frozen, {mesh_text(period.mesh)}"
                     f"{batch}, {period.step_seconds:.4g} s per step")
    return lines


def stage_table(cost: Cost, rows: int = 16) -> TextTable:
    """Milliseconds of the first stages: per microbatch, and for averaging and update per step."""
    shown = [[str(row.stage), *(f"{1e3 * seconds:.3f}" for seconds in (
        row.forward_seconds, row.backward_seconds, row.weight_seconds, row.exchange_seconds, row.reduction_seconds,
        row.update_seconds))] for row in cost.stages[:rows]]
    return TextTable(header=["stage", "forward", "backward", "weights", "of it\nmessages", "averaging", "update"],
                     rows=shown)
