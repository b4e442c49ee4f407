"""A rank's full state as one dict of tensors and numbers, and back: `Engine.state_dict` and `load_state_dict`.

    {"format": 1, "layout": ...,                 the mesh, this rank, and the elements that it holds and updates
     "parameters": {key: tensor}, "buffers": {name: tensor}, "frozen": [key, ...],
     "optimizer": {"kind": "ranvier adamw", "steps": 7, "states": {key: [{"start", "stop", "exp_avg": [n], ...}, ...]}}
               or {"kind": "AdamW", "states": of torch's state_dict, "masters": {key: tensor}}, or None,
     "steps": 8, "learning_rate": 1e-3, "loss_scale": {...} or None, "nominal_weight": 1.0, ...}

Keys are those of `Engine.named_parameters`. Every tensor has the shape that this rank holds, so the dict fits only the
same rank of the same layout; `ranvier.Checkpoints` has full tensors by name, and fits any layout.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ranvier.comm.protocol import Group
from ranvier.errors import CheckpointError
from ranvier.layout import box_size, index_of, whole_box
from ranvier.tensor.quantized_weight import dense

if TYPE_CHECKING:
    from ranvier.pipeline.engine import Engine

FORMAT = 1
_CHECKPOINTS = ("Load it with the model, mesh and settings that it was taken with, or use ranvier.Checkpoints, which "
                "fit any mesh: Checkpoints(engine, folder).save() there, and .load() here.")
StateDict = dict[str, Any]


def take_state(engine: Engine) -> StateDict:
    """The state of this rank between two steps. As with torch's state_dict, the tensors are the live ones: copy those
    that must not change (`copy.deepcopy`, `torch.save`). Gradients and torch's random generators are left out."""
    parameters, scale = engine.named_parameters(), engine.loss_scale
    nominal_weight, is_agreed = engine.nominal_weight
    return {
        "format": FORMAT, "layout": _layout_of(engine),
        "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
        "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad],
        "buffers": {name: buffer.detach() if isinstance(buffer, Tensor) else buffer
                    for name, buffer in engine.named_buffers().items()},
        "optimizer": _optimizer_state(engine), "steps": engine.steps, "learning_rate": engine.learning_rate,
        "loss_scale": None if scale is None else asdict(scale), "last_norm": engine.last_norm,
        "nominal_weight": nominal_weight, "nominal_weight_is_agreed": is_agreed,
        "bad_steps": None if engine.bad_steps is None else engine.bad_steps.state()}


def load_state(engine: Engine, state: Mapping[str, Any]) -> None:
    """Write what `take_state` has taken on the same rank of the same layout. Raises CheckpointError, before anything is
    written, for a state of another layout, model or optimizer."""
    _check(engine, state)
    with torch.no_grad():
        for name, parameter in engine.named_parameters().items():
            parameter.copy_(state["parameters"][name])
            parameter.requires_grad_(engine.layout[name].trainable and name not in state["frozen"])
        for name, buffer in engine.named_buffers().items():
            if isinstance(buffer, Tensor):
                buffer.copy_(state["buffers"][name])
        set_extra_states(engine, state["buffers"])
        _load_optimizer(engine, state["optimizer"])
    if engine.flat_optimizer is not None:
        engine.learning_rate = state["learning_rate"]
    optimizer = state["optimizer"] or {}
    engine.restore_counters(state["steps"], optimizer_steps=optimizer.get("steps"), loss_scale=state["loss_scale"],
                            last_norm=state.get("last_norm"), missed_updates=optimizer.get("missed_updates"))
    engine.nominal_weight = state["nominal_weight"], state["nominal_weight_is_agreed"]
    if engine.bad_steps is not None and state["bad_steps"] is not None:
        engine.bad_steps.load(state["bad_steps"])


def set_extra_states(engine: Engine, states: Mapping[str, Any]) -> None:
    """Give modules of this rank what their `get_extra_state` has returned. states: by the names of `named_buffers`."""
    for block, module in engine.blocks.items():
        for path, part in module.named_modules(prefix=block):
            if (name := f"{path}._extra_state") in states:
                part.set_extra_state(copy.deepcopy(states[name]))


def _layout_of(engine: Engine) -> dict[str, Any]:
    """Facts that must be equal for a state's tensors to fit this rank."""
    layout, rank, at = engine.layout, engine.world.rank, engine.coordinates
    ends = layout.ends_on(at.pipeline_rank)
    updated: dict[str, list[list[int]]] = {}
    for piece in sorted(layout.updated_slices(rank), key=lambda piece: (piece.parameter, piece.interval)):
        intervals, (start, stop) = updated.setdefault(piece.parameter, []), piece.interval
        if intervals and intervals[-1][1] == start:
            start = intervals.pop()[0]
        intervals.append([start, stop])
    return {"mesh": str(layout.mesh), "rank": rank, "boundaries": list(layout.boundaries),
            "held": {name: [list(edges) for edges in layout.box(end, at.position)] for name, end in ends.items()},
            "dtypes": {name: str(parameter.dtype) for name, parameter in engine.named_parameters().items()},
            "buffers": {name: list(buffer.shape) for name, buffer in engine.named_buffers().items()
                        if isinstance(buffer, Tensor)},
            "updated": updated, "optimizer": engine.optimizer_name}


_WHAT_DIFFERS = {"mesh": "was taken on the mesh {was}, and this engine's is {now}",
                 "rank": "was taken on rank {was}, and this is rank {now}",
                 "boundaries": "was taken with the boundaries {was} of stages, and this engine has {now}",
                 "held": "has other parameters than this rank, or other parts of them",
                 "dtypes": "has parameters of another number format",
                 "buffers": "has other buffers",
                 "optimizer": "was taken with the optimizer {was}, and this engine has {now}",
                 "updated": "has the optimizer's states of other elements"}


def _check(engine: Engine, state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise CheckpointError("is not a state_dict of an engine", code="not-a-state-dict", where="load_state_dict",
                              value=type(state).__name__, remedy="Give what Engine.state_dict() returned on this rank.")
    was, now = state["layout"], _layout_of(engine)
    for key, what in _WHAT_DIFFERS.items():
        if was[key] != now[key]:
            raise CheckpointError(what.format(was=was[key], now=now[key]), code="state-dict-of-another-engine",
                                  where="load_state_dict", remedy=_CHECKPOINTS)
    if engine.optimizer is not None:
        groups = engine.optimizer.param_groups
        sizes, own = ([len(group["params"]) for group in groups] for groups in (
            state["optimizer"]["states"].get("param_groups", groups), groups))
        if sizes != own:
            raise CheckpointError(f"has groups of {sizes} parameters of the optimizer, and this engine of {own}",
                                  code="state-dict-of-other-groups", where="load_state_dict", remedy=_CHECKPOINTS)


def _optimizer_state(engine: Engine) -> StateDict | None:
    if engine.flat_optimizer is not None:
        states: dict[str, list[StateDict]] = {}
        for part in engine.flat_optimizer.slices():
            states.setdefault(part.parameter, []).append(
                {"start": part.start, "stop": part.stop, **part.states, **part.whole})
        return {"kind": engine.optimizer_name, "steps": engine.flat_optimizer.steps, "states": states,
                "missed_updates": engine.flat_optimizer.missed_updates}
    if engine.optimizer is None:
        return None
    engine.unsaved.warn()
    masters = {name: updated.detach() for name, parameter in engine.named_parameters().items()
               if (updated := engine.updated(parameter)) is not parameter}
    return {"kind": engine.optimizer_name, "states": engine.optimizer.state_dict(), "masters": masters}


def _load_optimizer(engine: Engine, state: StateDict | None) -> None:
    """Load the optimizer, after the parameters: master copies follow these if the state has none."""
    if state is None:
        return
    if engine.optimizer is not None:
        engine.optimizer.load_state_dict(copy.deepcopy(state["states"]))  # torch would continue to use these tensors
        for name, parameter in engine.named_parameters().items():
            if (updated := engine.updated(parameter)) is not parameter:
                updated.copy_(state["masters"][name])
    elif engine.flat_optimizer is not None:
        for part in engine.flat_optimizer.slices():
            for saved in state["states"][part.parameter]:
                for kind, target in part.whole.items():  # the only slice of a parameter that is updated in full
                    target.copy_(saved[kind])
                start, stop = max(part.start, saved["start"]), min(part.stop, saved["stop"])
                for kind, target in part.states.items() if start < stop else ():
                    if kind in saved:  # master copies exist if parameters are in half precision or offloaded
                        target[start - part.start:stop - part.start].copy_(
                            saved[kind][start - saved["start"]:stop - saved["start"]])


# --- the state of the full model --------------------------------------------------------------------------------------

# All parameters and buffers of a model as full tensors on rank 0, gathered from all ranks.
#
# The layout tells every rank which rank owns which slice, so slices need no description: their owners broadcast them
# one after the other, and rank 0 keeps them. Slices that rank 0 has itself are not sent.


def gather_full_state(engine: Engine, ranks: Group) -> dict[str, Tensor] | None:
    """Name -> full tensor on the CPU, on rank 0; None on other ranks. Collective over all ranks, the group `ranks`."""
    parameters = _gather_parameters(engine, ranks) | _gather_buffers(engine, ranks)
    if engine.world.rank:
        return None
    found = {parameter.name: parameters[parameter.owner] for parameter in engine.layout.parameters} | parameters
    return {own: tensor for name, tensor in found.items() for own in engine.names_in_whole.get(name, (name,))}


def _gather_parameters(engine: Engine, ranks: Group) -> dict[str, Tensor]:
    """Gather the parameters on rank 0, by their owners' names; the result of other ranks is meaningless."""
    layout, parameters = engine.layout, engine.named_parameters()
    formats = {name: dtype for rank in ranks.gather_objects({
        name: str(parameter.dtype).removeprefix("torch.") for name, parameter in parameters.items()}) for name, dtype
        in rank.items()}
    found: dict[str, Tensor] = {}
    whole = {one.parameter for one in layout.held_slices(0) if one.box == whole_box(layout[one.parameter].shape)}
    for parameter in (parameter for parameter in layout.parameters if parameter.is_owner):
        if engine.world.rank == 0:
            found[parameter.name] = torch.empty(parameter.shape, dtype=getattr(torch, formats[parameter.name]))
            if parameter.name in whole:
                found[parameter.name].copy_(dense(parameters[parameter.name].detach()))
    for rank in range(engine.mesh.size):
        for piece in layout.owned_slices(rank):
            if piece.parameter in whole:
                continue
            held = dense(parameters[piece.parameter].detach()) if engine.world.rank == rank else None
            for box in filter(box_size, piece.boxes()):
                part = torch.empty([stop - start for start, stop in box], device=engine.world.device,
                                   dtype=getattr(torch, formats[piece.parameter]))
                if held is not None:
                    part.copy_(held[index_of(box, piece.box)])
                ranks.broadcast(part, rank).wait()
                if engine.world.rank == 0:
                    found[piece.parameter][index_of(box, whole_box(layout[piece.parameter].shape))] = part.cpu()
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
