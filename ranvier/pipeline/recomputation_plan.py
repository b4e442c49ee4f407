"""Which blocks of each stage are computed again in their backward, and how gradients are cut for that.

Every rank works this out for all stages, from what all know alike, so the layout can say who updates what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ranvier.config.resolve import chunk_size
from ranvier.config.run import Optim
from ranvier.errors import ConfigError
from ranvier.layout import Chunking, Layout, box_size
from ranvier.optim.rules import rules_of
from ranvier.pipeline.build import StageTable
from ranvier.pipeline.recomputation import Recompute, recomputed_segments
from ranvier.pipeline.stage import runs_of
from ranvier.schedule.schedule import Policy


@dataclass(frozen=True, kw_only=True)
class RecomputationPlan:
    """layers: as `Model.layers`. in_flight: most microbatches of a replica under way, as set or by the rule: simulated
    limits follow from what is recomputed. recompute: as `Memory.recompute`. Raises ConfigError for auto where no costs
    were counted."""

    layout: Layout
    table: StageTable
    layers: Sequence[Sequence[str]]
    policy: Policy
    in_flight: int
    recompute: Recompute

    def __post_init__(self) -> None:
        if self.recompute == "auto" and self.table.costs is None:
            raise ConfigError("needs a sample to count activations with", code="recompute-needs-sample",
                              where="memory.recompute", value=self.recompute,
                              remedy="Give the engine sample=, a microbatch of the usual shape, or set an interval.")

    def segments(self, stage: int) -> list[range]:
        """Runs of a stage's blocks, by their places on it, that keep what enters them alone."""
        own, costs = self.layout.blocks(stage), self.table.costs or ()
        return recomputed_segments(self.recompute, self.table.rows[stage].blocks, self.layers,
                                   costs[own.start:own.stop], self.policy, self.in_flight,
                                   (stage, self.layout.stages.num_stages))

    def chunking(self, optim: Optim, device: str, *, own: bool) -> Chunking:
        """How gradients are cut on every rank. device: its type. own: whether Ranvier's optimizer updates from them."""
        runs = {}
        placement = self.layout.stages
        for pipe in range(placement.pipe) if optim.update_in_backward else ():
            runs[pipe] = tuple(range(blocks.start + run.start, blocks.start + run.stop)
                               for stage in placement.stages_of(pipe) for blocks in [self.layout.blocks(stage)]
                               for run, _ in runs_of(len(blocks), self.segments(stage)))
        return Chunking(chunk_size=chunk_size(optim, device), runs=runs, shard=optim.shard and own,
                        whole=whole_parameters(optim, self.layout) if own else frozenset())


def whole_parameters(optim: Optim, layout: Layout) -> frozenset[str]:
    """The trainable parameters whose update needs whole tensors. ConfigError where a rank holds nothing of one, so that
    it could not take part in its update."""
    rules, found = rules_of(optim), []
    for parameter in layout.parameters:
        if not (parameter.is_owner and parameter.trainable and rules.needs_whole(
                parameter.settings_name, parameter.shape, in_layer=parameter.in_layer)):
            continue
        if min(box_size(layout.box(parameter, row, col)) for row in range(layout.mesh.row)
               for col in range(layout.mesh.col)) == 0:
            raise ConfigError(f"needs whole tensors, and some of the rows and columns hold nothing of {parameter.name}",
                              code="algorithm-needs-whole-tensors", where="optim.algorithm", value=optim.algorithm,
                              remedy="Use fewer rows and columns, or an algorithm such as adamw.")
        found.append(parameter.name)
    return frozenset(found)
