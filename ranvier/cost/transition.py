"""Cost of a transition between two meshes in seconds and bytes, and whether it pays. Pure.

A transition costs seconds once (tensors are sent, groups and engines are built) and changes the seconds of each
remaining step. PipeTransformer (He et al., 2021, section 3.2) changes the pipeline whenever its memory criterion allows
it; Ranvier only when the gain is larger than the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ranvier.config.resolve import stage_placement
from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh

PRIOR_SECONDS = 1.0
"""Assumed fixed cost of a transition, before one was measured."""
PRIOR_BYTES_PER_SECOND = 500e6
"""Assumed rate at which a transition moves tensors, before one was measured."""


def prior_seconds(moved_bytes: int) -> float:
    """Seconds of a transition that moves `moved_bytes` from rank to rank, if none was measured."""
    return PRIOR_SECONDS + moved_bytes / PRIOR_BYTES_PER_SECOND


def transition_seconds(moved_bytes: int, measured: Sequence[tuple[float, int]] = ()) -> float:
    """Expected seconds of a transition that moves `moved_bytes`: the prior, scaled by the median ratio of measured
    seconds to their prior. measured: (seconds, moved bytes) of earlier transitions of any kind."""
    ratios = [seconds / prior_seconds(moved) for seconds, moved in measured]
    return prior_seconds(moved_bytes) * (median(ratios) if ratios else 1.0)


def moved_bytes(*, old: Mesh, old_boundaries: Sequence[int], new: Mesh, new_boundaries: Sequence[int],
                parameter_bytes: Sequence[int], state_bytes: Sequence[int], frozen_blocks: int, sharded: bool,
                pipeline: Pipeline) -> int:
    """Approximate bytes that a transition sends from rank to rank: for each block that a rank does not hold yet, its
    parameters and, if the block is still trained, its optimizer states.

    Args:
        old_boundaries, new_boundaries: first block of each stage after the first, before and after.
        parameter_bytes, state_bytes: of each full block.
        frozen_blocks: blocks of the prefix that is not trained after the transition; they have no states.
        sharded: each replica keeps its share of the states (optim.shard). pipeline: which stages each rank has.
    """
    holders = new.data if sharded else 1
    num_blocks = len(parameter_bytes)
    sizes = [weights + (states // holders if block >= frozen_blocks else 0)
             for block, (weights, states) in enumerate(zip(parameter_bytes, state_bytes, strict=True))]
    moved = 0
    for rank in range(new.size):
        held = _blocks(old_boundaries, old, rank, num_blocks, pipeline) if rank < old.size else set()
        moved += sum(sizes[block] for block in _blocks(new_boundaries, new, rank, num_blocks, pipeline) - held)
    return moved // new.stage_size


def _blocks(boundaries: Sequence[int], mesh: Mesh, rank: int, num_blocks: int, pipeline: Pipeline) -> set[int]:
    """The blocks of a rank on a mesh with this cut."""
    edges, stages = (0, *boundaries, num_blocks), stage_placement(mesh.pipeline_size, pipeline)
    return {block for stage in stages.stages_of(mesh.coordinates(rank).pipeline_rank)
            for block in range(edges[stage], edges[stage + 1])}
