"""All parameters and buffers of a model as whole tensors on rank 0, gathered from all ranks.

Every rank knows by the layout who owns which slice, so slices need no description: their owners broadcast them one
after the other, and rank 0 keeps them. What rank 0 computes with itself is not sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ranvier.comm.protocol import Group
from ranvier.layout import box_size, index_of, whole
from ranvier.tensor.quantized_weight import dense

if TYPE_CHECKING:
    from ranvier.pipeline.engine import Engine


def gather_full_state(engine: Engine, ranks: Group) -> dict[str, Tensor] | None:
    """Name -> whole tensor on the CPU, on rank 0; None on other ranks. Collective over all ranks, which `ranks` has."""
    parameters = _gather_parameters(engine, ranks) | _gather_buffers(engine, ranks)
    if engine.world.rank:
        return None
    found = {one.name: parameters[one.owner] for one in engine.layout.parameters} | parameters
    return {own: tensor for name, tensor in found.items() for own in engine.names_in_whole.get(name, (name,))}


def _gather_parameters(engine: Engine, ranks: Group) -> dict[str, Tensor]:
    """Gather the parameters on rank 0, by their owners' names; the result of other ranks is meaningless."""
    layout, mine = engine.layout, engine.named_parameters()
    formats = {name: dtype for rank in ranks.gather_objects({
        name: str(parameter.dtype).removeprefix("torch.") for name, parameter in mine.items()}) for name, dtype
        in rank.items()}
    found: dict[str, Tensor] = {}
    here = {one.parameter for one in layout.held(0) if one.box == whole(layout[one.parameter].shape)}
    for one in (one for one in layout.parameters if one.is_owner):
        if engine.world.rank == 0:
            found[one.name] = torch.empty(one.shape, dtype=getattr(torch, formats[one.name]))
            if one.name in here:
                found[one.name].copy_(dense(mine[one.name].detach()))
    for rank in range(engine.mesh.size):
        for piece in layout.owned(rank):
            if piece.parameter in here:
                continue
            held = dense(mine[piece.parameter].detach()) if engine.world.rank == rank else None
            for box in filter(box_size, piece.boxes()):
                part = torch.empty([stop - start for start, stop in box], device=engine.world.device,
                                   dtype=getattr(torch, formats[piece.parameter]))
                if held is not None:
                    part.copy_(held[index_of(box, piece.box)])
                ranks.broadcast(part, rank).wait()
                if engine.world.rank == 0:
                    found[piece.parameter][index_of(box, whole(layout[piece.parameter].shape))] = part.cpu()
    return found


def _gather_buffers(engine: Engine, ranks: Group) -> dict[str, Tensor]:
    """Gather the first replica's buffers on rank 0; the result of other ranks is meaningless."""
    at = engine.coordinates
    mine = {name: buffer.detach() for name, buffer in engine.named_buffers().items()
            if isinstance(buffer, Tensor) and at.is_first_on_pipeline_rank}
    described = ranks.gather_objects([[name, list(buffer.shape), str(buffer.dtype).removeprefix("torch.")]
                                      for name, buffer in mine.items()])
    found: dict[str, Tensor] = {}
    for rank, buffers in enumerate(described):
        for name, shape, dtype in buffers:
            part = mine[name].clone() if engine.world.rank == rank else torch.empty(
                shape, dtype=getattr(torch, dtype), device=engine.world.device)
            flat = part.reshape(-1).view(torch.uint8)
            ranks.broadcast(flat, rank).wait()
            found[name] = flat.view(part.dtype).view(shape).cpu()
    return found
