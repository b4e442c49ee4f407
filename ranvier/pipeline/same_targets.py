"""Whether the ranks of a replica were given the same targets.

The first stage takes the inputs that its rank was given, the last one the targets that its own was given. Where each
rank has drawn its samples with random numbers of its own, the two belong to different samples. So each of these ranks
adds a number made of its targets to the sums of the batch (`pipeline/statistics`), with factors whose sum is zero over
ranks that must agree. Evaluation updates nothing, and only ranks that read its loss would notice: it compares none.
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
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
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
        """[2] fp64, what this rank adds: (its number, 1), zeros where it cannot say; on the targets' device.

        Only integers take part, since ranks may compute real numbers on their own, with rounding of their own. A leaf
        whose elements are all equal in the whole batch may stand in for targets that the rank has not: it cannot say.
        """
        leaves = [(place, leaf) for one in batch for place, leaf in enumerate(tree_leaves(one.targets))
                  if isinstance(leaf, Tensor) and leaf.dtype in _INTEGERS] if self._takes_part else []
        if not leaves or any(
                type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device != leaves[0][1].device
                for _, leaf in leaves):
            return torch.zeros(2, dtype=torch.float64)
        of_place: dict[int, list[Tensor]] = {}
        for place, leaf in leaves:
            of_place.setdefault(place, []).append(_some(leaf))
        columns = [torch.cat(parts) for parts in of_place.values()]
        says = torch.stack([(column != column[:1]).any() for column in columns]).all()  # stays on the device
        values = torch.cat(columns)
        places = torch.arange(1, len(values) + 1, device=values.device)
        number = (values * (places * _ODD)).sum() >> 64 - _NUMBER_BITS  # the highest bits, which depend on all others
        return (torch.stack([number * self._factor, torch.ones_like(number)]) * says).to(torch.float64)

    def check(self, sums: Tensor) -> None:
        """ModelError where `sums` over all ranks show different targets; says nothing where some rank could not."""
        difference, count = sums.tolist()
        if count == self._all and difference:
            raise ModelError("are of other samples on the last stage than on the first one, whose inputs they belong "
                             "to; nothing was updated", code="targets-differ", where="targets of the batch",
                             remedy="Draw each batch alike on all ranks of a replica, from a torch.Generator seeded "
                                    "with the step and engine.coordinates.data, or with ranvier.shard_loader: what "
                                    "torch draws without one differs from rank to rank.")


def _some(leaf: Tensor) -> Tensor:
    """[n] int64: at most about `_MAX_ELEMENTS` of the elements."""
    flat = leaf.reshape(-1)
    return flat[::max(1, len(flat) // _MAX_ELEMENTS)].to(torch.int64)
