"""A rank's share of the optimizer's states, copied to the next replica: with sharded states nobody else has it.

Each message is the length of its head (8 bytes), the head (JSON: kind, name, shape, box and number format of each
piece) and the elements of all pieces, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier.checkpoint import state
from ranvier.checkpoint.state import Piece
from ranvier.comm.protocol import Group

_LENGTH_BYTES = 8


def states_of_neighbour(pieces: Sequence[Piece], group: Group) -> list[Piece]:
    """Send what of `pieces` (in host memory) is no parameter or buffer to the next member of `group`, the first after
    the last; the pieces of the member before. Collective. Empty in a group of one."""
    size, index = len(group.ranks), group.index
    if size == 1:
        return []
    own = _packed([piece for piece in pieces if piece.kind not in state.NO_STATES])
    sizes = group.gather_number(own.numel())
    before, after = (index - 1) % size, (index + 1) % size
    found = torch.empty(sizes[before], dtype=torch.uint8)
    group.all_to_all(found, own, [sizes[before] if other == before else 0 for other in range(size)],
                     [own.numel() if other == after else 0 for other in range(size)]).wait()
    return _unpacked(found)


def _packed(pieces: Sequence[Piece]) -> Tensor:
    head = json.dumps([[piece.kind, piece.name, piece.shape, piece.box, state.dtype_name(piece.tensor),
                        tuple(piece.tensor.shape)] for piece in pieces]).encode()
    parts = [torch.tensor([len(head)]).view(torch.uint8), torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    return torch.cat([*parts, *(piece.tensor.reshape(-1).view(torch.uint8) for piece in pieces)])


def _unpacked(message: Tensor) -> list[Piece]:
    """The pieces; each with memory of its own, which is aligned."""
    length = int(message[:_LENGTH_BYTES].clone().view(torch.int64))
    start, pieces = _LENGTH_BYTES + length, []
    for kind, name, shape, box, dtype, held in json.loads(message[_LENGTH_BYTES:start].numpy().tobytes()):
        number_format = getattr(torch, dtype)
        numel = torch.Size(held).numel()
        stop = start + numel * number_format.itemsize
        tensor = torch.empty(held, dtype=number_format)
        tensor.view(-1).view(torch.uint8).copy_(message[start:stop])
        pieces.append(Piece(kind=kind, name=name, shape=tuple(shape), box=tuple(map(tuple, box)), tensor=tensor))
        start = stop
    return pieces
