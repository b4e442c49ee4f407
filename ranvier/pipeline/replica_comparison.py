"""Compares the bits of parameters that several ranks hold, and names the ranks that differ.

Replicas start identical, sum their gradients to the same bits and apply the same rule, so any difference is a fault: a
broken device, memory that flips a bit, a program that writes weights on one rank only. Nothing else would show it,
since the loss remains a mean over all replicas.

    parameter   -> bits as integers, times odd weights by place, summed modulo 2^64      a checksum per parameter
    stage       all ranks with the same blocks gather checksums; those with the same part of a parameter must agree
    mesh        one reduction shows whether any stage has found something; only then texts are gathered

An odd weight is invertible modulo 2^64, so a change of one element always changes the sum; changes of several cancel
with a probability near 2^-63.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ranvier.comm.protocol import Group
from ranvier.errors import RanvierError
from ranvier.keyed_random import bits
from ranvier.layout import Layout
from ranvier.world import World

PIECE = 1 << 18
"""Elements that are summed together: their int64 temporaries are 2 MiB each."""
_PIECES_FACTOR = 0x2545F4914F6CDD1D
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor, weights: Tensor) -> Tensor:
    """A checksum of the bits of `tensor`, zero-dimensional int64, for any values, including nan.

    weights: odd int64, at least as many as the smaller of PIECE and the number of elements.
    """
    plain = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(plain, PIECE):
        total = total * _PIECES_FACTOR + torch.sum(piece.to(torch.int64) * weights[:len(piece)])
    return total


class ReplicaComparison:
    """Compares the parameters of one stage over all ranks that have it. Making one is collective; so is `compare`.

    everyone: a group of all ranks.
    """

    def __init__(self, layout: Layout, world: World, everyone: Group) -> None:
        self._layout, self._everyone, self._device = layout, everyone, world.device
        self._stage = world.backend.group("replicas", layout.mesh.groups(*layout.mesh.over(orders_stages=False)))
        self._weights = torch.empty(0, dtype=torch.int64)

    def compare(self, parameters: Mapping[str, Tensor]) -> None:
        """Compare parameters: those of this rank by key, up to date. Raises RanvierError on every rank if copies
        differ."""
        names = [parameter.name for parameter in self._layout.parameters if parameter.name in parameters]
        found = self._gather_checksums([parameters[name] for name in names])
        found_here = differences(self._layout, self._stage.ranks, names, found)
        wrong = torch.tensor([len(found_here)], dtype=torch.int64)
        self._everyone.all_reduce(wrong).wait()
        if int(wrong) == 0:
            return
        texts = self._everyone.gather_objects(found_here if self._stage.index == 0 else [])
        (name, what), *others = [text for each in texts for text in each]
        more = f"; {len(others)} more {'parameters differ' if len(others) > 1 else 'parameter differs'}"
        raise RanvierError(f"{what}{more if others else ''}", code="replicas-differ", where=f"parameter {name}",
                           remedy="Resume from the last checkpoint (`--resume auto`), or by its path from one before "
                                  "the last good comparison; if the same rank is named again, replace its device.")

    def close(self) -> None:
        """Close the group of the stage."""
        self._stage.close()

    def _gather_checksums(self, parameters: Sequence[Tensor]) -> list[list[int]]:
        """Checksums of each rank of the stage, in the order of `parameters`."""
        longest = min(PIECE, max((parameter.numel() for parameter in parameters), default=0))
        if len(self._weights) < longest:
            self._weights = (bits(0, torch.arange(longest)) | 1).to(self._device)
        checksums = [checksum(parameter, self._weights) for parameter in parameters]
        if not checksums:
            return [[] for _ in self._stage.ranks]
        sums = torch.stack(checksums)
        gathered = sums.new_empty(len(self._stage.ranks) * len(sums))
        self._stage.all_gather(gathered, sums).wait()
        return gathered.view(len(self._stage.ranks), -1).tolist()


def differences(layout: Layout, ranks: Sequence[int], names: Sequence[str],
                checksums: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """(parameter, which ranks differ) for each parameter that differs between ranks with the same part of it.

    ranks: those of one stage. names: their parameters. checksums: of each rank, in the order of `names`.
    """
    found_here = []
    for column, name in enumerate(names):
        alike: dict[object, dict[int, int]] = {}
        for rank, sums in zip(ranks, checksums, strict=True):
            at = layout.mesh.coordinates(rank)
            alike.setdefault(layout.box(layout[name], at.position), {})[rank] = sums[column]
        found_here += [(name, _describe_odd_ranks(layout, sums)) for sums in alike.values()
                       if len(set(sums.values())) > 1]
    return found_here


def _describe_odd_ranks(layout: Layout, sums: Mapping[int, int]) -> str:
    """Describe the ranks in the minority if most ranks agree, else all of them. sums: rank -> checksum."""
    (common, count), *_ = Counter(sums.values()).most_common()
    odd = [rank for rank, value in sums.items() if value != common]
    if 2 * count > len(sums):
        verb = "has" if len(odd) == 1 else "have"
        return f"{_ranks(layout, odd)} {verb} other bits than the other {count} ranks that hold it"
    return f"differs between {_ranks(layout, list(sums))}, and too few agree to tell which is right"


def _ranks(layout: Layout, ranks: Sequence[int]) -> str:
    """"replica 1 (rank 3) and replica 2 (rank 5)", with row and column if there are several."""
    named = []
    for rank in ranks:
        at = layout.mesh.coordinates(rank)
        place = f", {at.position_text}" if layout.mesh.stage_size > 1 else ""
        named.append(f"replica {at.replica}{place} (rank {rank})")
    return " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
