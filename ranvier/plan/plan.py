"""The specification of an engine, made before the engine: plain data, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ranvier.block import Model
from ranvier.config.run import Memory, Optim, Pipeline, TensorParallel
from ranvier.errors import ConfigError, ModelError
from ranvier.layout import Chunking, Layout
from ranvier.mesh import Mesh
from ranvier.plan.block_costs import build_on_meta
from ranvier.plan.cut import StageTable, global_parameters
from ranvier.schedule.limits import Limits


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan by which a model trains on a mesh: `ranvier.plan.make.make` makes one, `Engine(model, world, plan=plan)`
    builds it.

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
    """Its name, for which limits and recomputation are chosen."""
    pipeline: Pipeline
    """With the plan's boundaries and limits."""
    tensor: TensorParallel
    memory: Memory
    optim: Optim
    """With a number for the bucket size."""
    own_optimizer: bool
    """Whether Ranvier's optimizer updates, as `optim` says, and not one of the user's."""
    dtype: torch.dtype
    """Number format of parameters and activations."""

    def check(self, model: Model, num_ranks: int, dtype: torch.dtype, *, has_optimizer: bool) -> None:
        """ConfigError where the plan is for another number of ranks, number format or kind of optimizer, ModelError
        where it is for another model."""
        for what, own, other in (("ranks", self.mesh.size, num_ranks), ("dtype", self.dtype, dtype),
                                 ("own_optimizer", self.own_optimizer, self.own_optimizer and not has_optimizer)):
            if own != other:
                raise ConfigError(f"is made for {what} {own}, and this engine has {other}",
                                  code="plan-for-other-engine", where="Engine(plan=...)", value=other,
                                  remedy="Make the plan with the same settings as the engine.")
        parts, planned = ({each.name: (each.shape, each.trainable, each.owner) for each in several} for several in (
            global_parameters(model, build_on_meta(model)), self.layout.parameters))
        if parts != planned:
            name = next(name for name in {**parts, **planned} if parts.get(name) != planned.get(name))
            raise ModelError("is for a model with other parameters", code="plan-of-other-model",
                             where="Engine(plan=...)", value=name,
                             remedy="Make the plan from this model, with as many frozen layers.")

    @property
    def chunking(self) -> Chunking:
        """Chunks in which gradients are reduced."""
        assert self.layout.chunking is not None  # `make` gives it one
        return self.layout.chunking

    def with_limits(self, limits: Limits) -> Plan:
        """The same with other limits, which measured times have led to: the second decision, and the last."""
        return replace(self, limits=limits, pipeline=replace(
            self.pipeline, in_flight=limits.in_flight, deferred=limits.deferred, defer_last=limits.last))

    def __str__(self) -> str:
        limits, lines = self.limits, [f"mesh       {self.mesh}", *str(self.stages).splitlines()]
        lines.append(f"schedule   {self.policy}: at most {limits.in_flight} microbatches in flight, deferred weight "
                     f"gradients by rank: {limits.deferred_text}" + (", in 1F1B's order" if limits.alternating else ""))
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


def refuse_settings_beside(**settings: object) -> None:
    """ConfigError where an engine that is given a plan is given what a plan has, too. settings: None is not given."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise ConfigError("is part of the plan", code="setting-of-the-plan", where=f"Engine({given[0]}=...)",
                          remedy=f"Give either plan= or {given[0]}=; a plan is made with it.")

