"""A rank's share of the optimizer's states, copied to the next replica: with sharded states nobody else has it.

Each message is the length of its head (8 bytes), the head (JSON: kind, name, shape, box and number format of each
piece, and which parameters have missed updates) and the elements of all pieces, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ranvier.checkpoint import state
from ranvier.checkpoint.state import Piece
from ranvier.comm.protocol import Group
from ranvier.elastic.transition import Held

_LENGTH_BYTES = 8


def with_states_of_neighbour(held: Held, group: Group) -> Held:
    """Send what of `held` is no parameter or buffer to the next member of `group`, the first after the last; `held`
    with that of the member before. Collective. `held` itself in a group of one."""
    size, index = len(group.ranks), group.index
    if size == 1:
        return held
    own = _packed([piece for piece in held.pieces if piece.kind not in state.NO_STATES], held.missed_updates)
    sizes = group.gather_number(own.numel())
    before, after = (index - 1) % size, (index + 1) % size
    found = torch.empty(sizes[before], dtype=torch.uint8)
    group.all_to_all(found, own, [sizes[before] if other == before else 0 for other in range(size)],
                     [own.numel() if other == after else 0 for other in range(size)]).wait()
    pieces, missed_updates = _unpacked(found)
    return replace(held, pieces=[*held.pieces, *pieces], missed_updates={**missed_updates, **held.missed_updates})


def _packed(pieces: Sequence[Piece], missed_updates: Mapping[str, int]) -> Tensor:
    head = json.dumps([missed_updates, [[piece.kind, piece.name, piece.shape, piece.box, state.dtype_name(piece.tensor),
                                         tuple(piece.tensor.shape)] for piece in pieces]]).encode()
    parts = [torch.tensor([len(head)]).view(torch.uint8), torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    return torch.cat([*parts, *(piece.tensor.reshape(-1).view(torch.uint8) for piece in pieces)])


def _unpacked(message: Tensor) -> tuple[list[Piece], dict[str, int]]:
    """The pieces, each with memory of its own, which is aligned; and which parameters have missed updates."""
    length = int(message[:_LENGTH_BYTES].clone().view(torch.int64))
    start, pieces = _LENGTH_BYTES + length, []
    missed_updates, described = json.loads(message[_LENGTH_BYTES:start].numpy().tobytes())
    for kind, name, shape, box, dtype, held in described:
        number_format = getattr(torch, dtype)
        numel = torch.Size(held).numel()
        stop = start + numel * number_format.itemsize
        tensor = torch.empty(held, dtype=number_format)
        tensor.view(-1).view(torch.uint8).copy_(message[start:stop])
        pieces.append(Piece(kind=kind, name=name, shape=tuple(shape), box=tuple(map(tuple, box)), tensor=tensor))
        start = stop
    return pieces, missed_updates
