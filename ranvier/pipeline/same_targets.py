"""Whether the ranks of a replica were given the same targets.

The first stage takes the inputs that its rank was given, the last one the targets that its own was given. Where each
rank has drawn its samples with random numbers of its own, the two belong to different samples. So each of these ranks
adds a number made of its targets to the sums of the batch (`pipeline/statistics`), with factors whose sum is zero over
ranks that must agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ranvier.errors import ModelError
from ranvier.mesh import Coordinates, StagePlacement
from ranvier.pipeline.microbatch import Microbatch

_MAX_ELEMENTS = 2048
"""So many elements of a tensor are looked at."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> what reads its bits as a number."""
_NUMBER_BITS = 20
"""So short are the numbers of ranks that their sums over thousands of ranks are exact in fp64."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Its products with 1, 2, ... differ in all of their 64 bits, of which int64 keeps the lowest."""


class SameTargets:
    """The comparison on one rank. at: its place. placement: which ranks have the first and the last stage."""

    def __init__(self, at: Coordinates, placement: StagePlacement) -> None:
        mesh, first, last = at.mesh, placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
        size = len({first, last}) * mesh.feature_parts
        axes = mesh.over(splits_samples=True)
        leads = at.pipeline_rank == first and at.is_first_with_samples
        self._all = size * mesh.count(axes)
        self._takes_part = size > 1 and at.pipeline_rank in (first, last)
        self._factor = (1 + at.index(axes)) * (size - 1 if leads else -1)

    def numbers(self, batch: Sequence[Microbatch]) -> Tensor:
        """[2] fp64, what this rank adds: (its number, 1), zeros where it cannot say; on the targets' device."""
        leaves = [leaf for one in batch for leaf in tree_leaves(one.targets) if isinstance(leaf, Tensor)]
        if not self._takes_part or not leaves or any(
                type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device != leaves[0].device
                for leaf in leaves):
            return torch.zeros(2, dtype=torch.float64)
        bits = torch.cat([_bits(leaf) for leaf in leaves])
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        number = (bits * (places * _ODD)).sum() >> 64 - _NUMBER_BITS  # the highest bits, which depend on all others
        return torch.stack([number * self._factor, torch.ones_like(number)]).to(torch.float64)

    def check(self, sums: Tensor) -> None:
        """ModelError where `sums` over all ranks show different targets; says nothing where some rank could not."""
        difference, count = sums.tolist()
        if count == self._all and difference:
            raise ModelError("are of other samples on the last stage than on the first one, whose inputs they belong "
                             "to; nothing was updated", code="targets-differ", where="targets of the batch",
                             remedy="Draw each batch alike on all ranks of a replica, from a torch.Generator seeded "
                                    "with the step and engine.coordinates.data, or with ranvier.shard_loader: what "
                                    "torch draws without one differs from rank to rank.")


def _bits(leaf: Tensor) -> Tensor:
    """[n] int64: of at most about `_MAX_ELEMENTS` elements the bits."""
    flat = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).detach().reshape(-1)
    part = flat[::max(1, len(flat) // _MAX_ELEMENTS)].contiguous()
    return part.view(_INTEGERS[part.element_size()]).to(torch.int64)
