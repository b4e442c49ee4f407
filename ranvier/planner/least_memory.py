"""Lower bounds of the device memory of a rank, by arithmetic on counted blocks: fast, and below `Work.memory`.

`least_device_bytes` has the blocks of each stage as its ranks have them, `least_bytes_of_any_cut` the blocks of the
whole model on one rank. Of the states parameters, gradients and the optimizer's own; of the activations what a stage
stores under 1F1B, than which no schedule stores less. What else there is (buffers, messages, products under way) is
left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.blocks import BlockCost, Same
from ranvier.cost.memory import segment_bytes
from ranvier.planner.conditions import element_bytes
from ranvier.planner.count import recomputed_runs
from ranvier.planner.run_cost import states_per_parameter


def least_device_bytes(run: ResolvedRun, stages: Sequence[Sequence[BlockCost]]) -> tuple[float, float]:
    """Least bytes of the rank that needs most; and the part of the optimizer's states, all of which hybrid offload
    keeps there. stages: the blocks of each, counted for the run."""
    optim, sizes, pipe = run.optim, element_bytes(run), run.mesh.pipeline_size
    states = 0.0 if optim.offload in ("stream", "host") else sizes.state * states_per_parameter(run) / (
        run.mesh.num_replicas if optim.shard else 1)
    of_each = sizes.parameter + (0 if optim.update_in_backward else sizes.gradient)
    frozen = 0 if run.lora.base_format != "precision" or run.model.tied else sizes.parameter
    again, in_flight = recomputed_runs(run, stages), run.pipeline.in_flight
    most = min(run.num_microbatches, pipe if in_flight == "auto" else in_flight)
    found = []
    for rank in range(pipe):
        held = run.placement.stages_of(rank)
        blocks = [block for stage in held for block in stages[stage]]
        activations = []
        for stage in held:
            inside = set(chain.from_iterable(again[stage]))
            kept = sum(block.kept_bytes + block.loss_bytes for place, block in enumerate(stages[stage])
                       if place not in inside)
            activations.append(kept + sum(segment_bytes(stages[stage], places) for places in again[stage] if places))
        stored = min(most, pipe - rank) if run.placement.per_rank == 1 else 1
        of_states = states * sum(block.num_owned for block in blocks)
        found.append((sum(block.num_owned * of_each + (block.num_parameters - block.num_trainable) * frozen
                          for block in blocks) + of_states
                      + stored * max(activations) + max(block.allocated_bytes for block in blocks), of_states))
    return max(found)


def least_bytes_of_any_cut(run: ResolvedRun, sample: Sequence[BlockCost]) -> float:
    """Least bytes of the rank that needs most, however the blocks are cut into stages, and with all states of the
    optimizer on the host. sample: all blocks, counted for one sample on one rank.

    Of w_r(b), what a block needs on rank r, and any factors f_r that add up to 1, the rank that needs most has at least
    the sum over blocks of the least f_r w_r(b); here f_r is in proportion to 1 / sum of w_r.
    """
    sizes, mesh = element_bytes(run), run.mesh
    of_each = (sizes.parameter + (0 if run.optim.update_in_backward else sizes.gradient)) / mesh.stage_size
    share = run.batch.microbatch_size / mesh.stage_size
    in_flight = mesh.pipeline_size if run.pipeline.in_flight == "auto" else run.pipeline.in_flight
    most = min(run.num_microbatches, in_flight) if run.placement.per_rank == 1 else 1
    kinds, kind_of = _kinds(Same(sample), str(run.memory.recompute))
    needs = [(of_each * owned, share * kept) for owned, kept in kinds]
    stored = Counter(min(most, mesh.pipeline_size - rank) for rank in range(mesh.pipeline_size))

    def total(values: Sequence[float]) -> float:
        """Of all blocks, one after the other. values: of each kind."""
        return sum([values[kind] for kind in kind_of])

    sums = {count: total([fixed + count * kept for fixed, kept in needs]) or 1.0 for count in stored}
    return total([min((fixed + count * kept) / sums[count] for count in stored) for fixed, kept in needs]) / sum(
        ranks / sums[count] for count, ranks in stored.items())


@lru_cache(maxsize=64)
def _kinds(sample: Same[Sequence[BlockCost]], recompute: str) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Parameters of each kind of block, and the bytes that it keeps; and the kind of each block."""
    kinds: dict[tuple[int, int], int] = {}
    kind_of = []
    for block in sample.it:
        kept = {"none": block.operand_bytes, "selective": block.input_bytes + block.repeated.kept_bytes}.get(
            recompute, 0)
        kind_of.append(kinds.setdefault((block.num_owned, kept), len(kinds)))
    return tuple(kinds), tuple(kind_of)
