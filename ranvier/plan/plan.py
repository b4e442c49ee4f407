"""The specification of an engine, made before the engine: plain data, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ranvier.arguments import check_arguments
from ranvier.block import Model
from ranvier.config import parameter_groups
from ranvier.config.resolve import ResolvedRun, bucket_size, chunk_size, stage_placement
from ranvier.config.rules import schedule_problems, tensor_problems
from ranvier.config.run import Memory, Optim, Pipeline, TensorParallel
from ranvier.cost.blocks import Stages, selectively
from ranvier.errors import ConfigError, ModelError, counted
from ranvier.layout import Chunking, Layout, box_size
from ranvier.mesh import Mesh
from ranvier.optim.rules import rules_of
from ranvier.plan.block_costs import build_on_meta
from ranvier.plan.cut import Sample, StageTable, cut, global_parameters
from ranvier.plan.kernel_count import AS_WRITTEN, Counting, counting_of
from ranvier.plan.limits import Segments, pipeline_limits
from ranvier.plan.recomputation import Recompute, recomputed_segments, runs_of
from ranvier.precision import DTYPES
from ranvier.schedule.computed_limits import UNKNOWN
from ranvier.schedule.limits import Conditions, Limits, rule_limits
from ranvier.schedule.policies import policy_named
from ranvier.schedule.schedule import Policy, check_policy_object


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan by which a model trains on a mesh: `ranvier.plan.plan.make` makes one, `Engine(model, world, plan=plan)`
    uses it.

    It has no model, loss, optimizer or policy. `str()` shows the decisions.
    """

    mesh: Mesh
    stages: StageTable
    """The cut, and what the blocks cost."""
    layout: Layout
    """Placement of each parameter: the ranks that hold, update and own it; and the chunks in which gradients are
    reduced."""
    recomputed: tuple[tuple[range, ...], ...]
    """Per stage, the runs of its blocks (places on the stage) that are recomputed in the backward."""
    limits: Limits
    """The in-flight limit, and the weight gradients that may wait."""
    policy: str
    """Name of the policy for which limits and recomputation are chosen."""
    pipeline: Pipeline
    """With the plan's boundaries and limits."""
    tensor: TensorParallel
    memory: Memory
    optim: Optim
    """With a number for the bucket size."""
    own_optimizer: bool
    """Whether Ranvier's optimizer updates, as `optim` says, and not a user's."""
    dtype: torch.dtype
    """Number format of parameters and activations."""

    def check(self, model: Model, num_ranks: int, dtype: torch.dtype, *, has_optimizer: bool) -> None:
        """Raise ConfigError if the plan is for another number of ranks, number format or kind of optimizer, or has been
        edited so that its parts contradict each other; ModelError if it is for another model."""
        for name, what in _contradictions(self, len(model.blocks)):
            raise ConfigError(what, code="plan-contradicts-itself", where=f"Engine(plan=...), plan.{name}",
                              remedy="Make the plan with other settings (ranvier.plan.plan.make), or change its limits "
                                     "by plan.with_limits.")
        for what, own, other in (("ranks", self.mesh.size, num_ranks), ("dtype", self.dtype, dtype),
                                 ("own_optimizer", self.own_optimizer, self.own_optimizer and not has_optimizer)):
            if own != other:
                raise ConfigError(f"is made for {what} {own}, and this engine has {other}",
                                  code="plan-for-other-engine", where="Engine(plan=...)", value=other,
                                  remedy="Make the plan with the same settings as the engine.")
        parts = {each.name: each for each in global_parameters(model, build_on_meta(model))}
        planned = {each.name: replace(each, summed=()) if self.mesh.stage_size > 1 else each
                   for each in self.layout.parameters}
        if parts != planned:
            name = next(name for name in {**parts, **planned} if parts.get(name) != planned.get(name))
            raise ModelError("is for a model with other parameters", code="plan-of-other-model",
                             where="Engine(plan=...)", value=name,
                             remedy="Make the plan from this model, with the same number of frozen layers.")

    @property
    def chunking(self) -> Chunking:
        """Chunks in which gradients are reduced."""
        assert self.layout.chunking is not None  # `make` gives it one
        return self.layout.chunking

    def with_limits(self, limits: Limits) -> Plan:
        """Return the same plan with other limits, chosen by measured times: the second and last decision. Raises
        ConfigError for limits that do not fit this pipeline."""
        if not _are_limits(limits, self.mesh.pipeline_size):
            raise ConfigError(f"needs ranvier.Limits, of counts above 0, and of deferred microbatches {_ONE_EACH}",
                              code="limits-of-other-pipeline", where="Plan.with_limits", value=limits,
                              remedy="Change plan.limits: dataclasses.replace(plan.limits, in_flight=4).")
        return replace(self, limits=limits, pipeline=replace(
            self.pipeline, in_flight=limits.in_flight, deferred=limits.deferred, defer_last=limits.last))

    def __str__(self) -> str:
        limits, lines = self.limits, [f"mesh       {self.mesh}", *str(self.stages).splitlines()]
        lines.append(f"schedule   {self.policy}: at most {counted(limits.in_flight, 'microbatch')} in flight, deferred "
                     f"weight gradients by rank: {limits.deferred_text}"
                     + (", in 1F1B's order" if limits.alternating else ""))
        if any(self.recomputed):
            lines.append("recomputed " + "; ".join(
                f"stage {stage}: " + (", ".join(f"blocks {run.start} to {run.stop - 1}" for run in runs) or "nothing")
                for stage, runs in enumerate(self.recomputed)))
        if self.mesh.stage_size > 1:
            lines.append(f"tensor     {self.tensor.scheme}" + (", sequence sharded" if self.tensor.sequence_sharding
                                                               else ""))
        if self.own_optimizer:
            lines.append(f"optimizer  {self.optim.algorithm}, {self.optim.bucket_size:,} parameters at once, "
                         f"reductions of {self.chunking.chunk_size:,}" + (", sharded" if self.optim.shard else ""))
        return "\n".join(lines)


def _contradictions(plan: Plan, num_blocks: int) -> Iterator[tuple[str, str]]:
    """Yield (field, what is wrong with it) if parts of a plan do not fit each other, or the model's number of
    blocks."""
    for name, kind in _KINDS.items():
        if not isinstance(value := getattr(plan, name), kind):
            yield name, f"is a {type(value).__name__}, not a {kind.__name__}"
            return
    layout, stages, pipeline = plan.layout, plan.stages, plan.pipeline
    if layout.mesh != plan.mesh:
        yield "mesh", f"is {plan.mesh}, and the layout's is {layout.mesh}"
        return
    for name, count in (("layout", layout.num_blocks), ("stages", len(stages.costs or range(num_blocks)))):
        if count != num_blocks:
            yield name, f"is of {count} blocks, and the model has {num_blocks}"
            return
    placement = stage_placement(plan.mesh.pipeline_size, pipeline)
    if not placement == layout.stages == stages.placement:
        yield "pipeline", "places stages differently from the layout"
        return
    if stages.boundaries != layout.boundaries or pipeline.boundaries not in (None, layout.boundaries):
        yield "stages", f"is cut differently from the layout, whose boundaries are {layout.boundaries}"
    if not _are_limits(plan.limits, placement.num_ranks):
        yield "limits", f"needs counts above 0, and of deferred microbatches {_ONE_EACH}"
    if len(plan.recomputed) != placement.num_stages or not all(
            _are_apart(runs, len(layout.blocks(stage))) for stage, runs in enumerate(plan.recomputed)):
        yield "recomputed", "needs for each stage ranges of places of its blocks, which do not overlap"
    elif (chunking := layout.chunking) is None or chunking.chunk_size < 1 or chunking != replace(
            _chunking(plan.optim, layout, plan.recomputed, "cpu", own=plan.own_optimizer),
            chunk_size=chunking.chunk_size):
        yield "layout", "cuts gradients differently from what plan.optim needs"


def _are_limits(limits: object, num_ranks: int) -> bool:
    """Whether these are limits of a pipeline of `num_ranks` ranks."""
    return isinstance(limits, Limits) and isinstance(limits.deferred, (tuple, list)) and (
        len(limits.deferred) == num_ranks) and all(type(count) is int and count >= least for least, count in (
            (1, limits.in_flight), (1, 1 if limits.last is None else limits.last),
            *((0, count) for count in limits.deferred)))


def _are_apart(runs: object, num_blocks: int) -> bool:
    """Whether these are ranges of consecutive places below `num_blocks`, no place in two of them."""
    if not isinstance(runs, tuple) or not all(isinstance(run, range) and run.step == 1 for run in runs):
        return False
    places = [place for run in runs for place in run]
    return len({*places}) == len(places) and all(0 <= place < num_blocks for place in places)


_ONE_EACH = "one for each rank of the pipeline"
_KINDS = {"mesh": Mesh, "stages": StageTable, "layout": Layout, "recomputed": tuple, "limits": Limits, "policy": str,
          "pipeline": Pipeline, "tensor": TensorParallel, "memory": Memory, "optim": Optim, "own_optimizer": bool}


def refuse_settings_beside(**settings: object) -> None:
    """Raise ConfigError if an engine is given a plan and also settings that the plan contains. settings: None means not
    given."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise ConfigError("is part of the plan", code="setting-of-the-plan", where=f"Engine({given[0]}=...)",
                          remedy=f"Give either plan= or {given[0]}=; a plan is made with it.")


# --- how a plan is made -----------------------------------------------------------------------------------------------

# Makes a plan from a model, a mesh and settings: every decision of an engine, each from those before it.
#
#     checks of the settings -> the cut -> what is recomputed -> limits of the schedule -> how gradients are cut
#
# The engine, a run and its prediction of memory all make their plan here, so they agree.


ConditionsOf = Callable[[Stages, Segments], Conditions]
_AUTO = Pipeline(), TensorParallel(), Memory()


def make(model: Model, mesh: Mesh, *, sample: Sample | None = None, pipeline: Pipeline = _AUTO[0],
         tensor: TensorParallel = _AUTO[1], memory: Memory = _AUTO[2], optim: Optim | None = None,
         own_optimizer: bool | None = None, policy: Policy | None = None, dtype: torch.dtype = torch.float32,
         device: str = "cpu", num_microbatches: int | None = None, counting: Counting = AS_WRITTEN,
         conditions: ConditionsOf = lambda stages, segments: UNKNOWN) -> Plan:
    """Make the plan of `model`, whose layers may be frozen, on `mesh`. The same on every rank.

    Args:
        sample: inputs and targets of a microbatch of the usual shape; with several rows, one row's share of it. Their
            values do not matter. Without it blocks cost their numbers of parameters, and the limits follow a rule.
        own_optimizer: whether Ranvier's optimizer updates; by default if `optim` is given.
        policy: used instead of `pipeline.policy`.
        device: its type. num_microbatches: of a batch on one replica, if known. counting: what the device fuses.
        conditions: function from the costs of blocks on each stage, and the recomputed segments, to conditions.

    Raises ConfigError for settings that cannot be combined, ModelError for a model that cannot be cut.
    """
    check_arguments(make, locals(), but=("sample", "policy"))
    if policy is not None:
        check_policy_object(policy, "make(policy=...)")
    if sample is not None and not (isinstance(sample, (tuple, list)) and len(sample) == 2):
        raise ConfigError("must be the inputs and targets of a microbatch", code="sample-form",
                          where="make(sample=...)", value=type(sample).__name__, remedy="Give (inputs, targets).")
    mesh.require_known_axes("the engine")
    own = optim is not None if own_optimizer is None else own_optimizer
    policy, placement = policy or policy_named(pipeline.policy), stage_placement(mesh.pipeline_size, pipeline)
    for problem in (*tensor_problems(mesh, tensor), *schedule_problems(placement, policy.name, pipeline.deferred)):
        raise problem
    stages, layout = cut(model, mesh, boundaries=pipeline.boundaries, how=pipeline.partition, sample=sample,
                         dtype=dtype, device=device, tensor=tensor, placement=placement, counting=counting)
    if memory.recompute == "selective" and stages.costs is not None:
        stages = replace(stages, costs=tuple(selectively(stages.costs)))
    rule = rule_limits([bool(row.num_trainable) for row in stages.rows], placement).with_user_limits(
        pipeline.in_flight, pipeline.deferred, pipeline.defer_last)
    recomputed = _recomputed_segments(memory.recompute, stages, model.layers, policy, rule)
    limits = rule if stages.costs is None else pipeline_limits(
        stages.stage_costs(), recomputed, pipeline, policy, optim, device=device, element_bytes=dtype.itemsize,
        placement=placement, num_microbatches=num_microbatches, conditions=conditions(stages.stage_costs(), recomputed))
    optim = optim or Optim()
    for problem in parameter_groups.problems(optim, [each.settings_name for each in layout.parameters]):
        raise problem
    plan = Plan(mesh=mesh, stages=stages, recomputed=tuple(map(tuple, recomputed)), limits=limits, policy=policy.name,
                layout=replace(layout, chunking=_chunking(optim, layout, recomputed, device, own=own)),
                pipeline=replace(pipeline, boundaries=stages.boundaries or None), tensor=tensor, memory=memory,
                optim=replace(optim, bucket_size=bucket_size(optim, device)), own_optimizer=own, dtype=dtype)
    return plan.with_limits(limits)


def make_for_run(run: ResolvedRun, model: Model, sample: Sample, *, conditions: ConditionsOf, mesh: Mesh | None = None,
                 device: str | None = None) -> Plan:
    """Make the plan of a run for its model, whose layers may be frozen. conditions: as for `make`. mesh: another number
    of replicas, which changes neither cut nor limits. device: its type, by default the one that the run names."""
    device = device or run.device_type
    return make(model, mesh or run.mesh, sample=sample, pipeline=run.pipeline, tensor=run.tensor, memory=run.memory,
                optim=run.optim, dtype=DTYPES[run.precision], num_microbatches=run.num_microbatches, device=device,
                counting=counting_of(run, device=device, stage_size=run.mesh.stage_size), conditions=conditions)


def _recomputed_segments(recompute: Recompute, stages: StageTable, layers: Sequence[Sequence[str]], policy: Policy,
                         rule: Limits) -> list[list[range]]:
    """Segments of each stage that are recomputed, by the rule's limits: simulated limits depend on what is
    recomputed."""
    if recompute == "auto" and stages.costs is None:
        raise ConfigError("needs a sample to count activations with", code="recompute-needs-sample",
                          where="memory.recompute", value=recompute,
                          remedy="Give the engine sample=, a microbatch of the usual shape, or set an interval.")
    costs = [()] * len(stages.rows) if stages.costs is None else stages.stage_costs()
    return [recomputed_segments(recompute, row.blocks, layers, costs[row.stage], policy, rule.in_flight,
                                (row.stage, len(stages.rows))) for row in stages.rows]


def _chunking(optim: Optim, layout: Layout, recomputed: Sequence[Sequence[range]], device: str, *, own: bool
              ) -> Chunking:
    """The chunks of every rank's gradients."""
    runs = {pipe: tuple(range(blocks.start + run.start, blocks.start + run.stop)
                        for stage in layout.stages.stages_of(pipe) for blocks in [layout.blocks(stage)]
                        for run, _ in runs_of(len(blocks), recomputed[stage]))
            for pipe in range(layout.stages.num_ranks)} if optim.update_in_backward else {}
    return Chunking(chunk_size=chunk_size(optim, device), runs=runs, shard=optim.shard and own,
                    whole=whole_parameters(optim, layout) if own else frozenset())


def whole_parameters(optim: Optim, layout: Layout) -> frozenset[str]:
    """The trainable parameters whose update needs full tensors. Raises ConfigError if a rank holds nothing of one, so
    that it could not take part in its update."""
    rules, found = rules_of(optim), []
    for parameter in layout.parameters if rules.tensors is not None else ():
        if not (parameter.is_owner and parameter.trainable and rules.needs_whole(
                parameter.settings_name, parameter.shape, in_layer=parameter.in_layer)):
            continue
        if min(box_size(layout.box(parameter, position)) for position in layout.mesh.positions) == 0:
            raise ConfigError(f"needs whole tensors, and some of the rows and columns hold nothing of {parameter.name}",
                              code="algorithm-needs-whole-tensors", where="optim.algorithm", value=optim.algorithm,
                              remedy="Use fewer rows and columns, or an algorithm such as adamw.")
        found.append(parameter.name)
    return frozenset(found)
