"""Builds this rank's blocks from a layout, with their initial weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ranvier.block import Model, initialise
from ranvier.layout import Layout
from ranvier.mesh import Coordinates
from ranvier.pipeline.shared_objects import StageCopies, copy_of
from ranvier.plan.formats import BlockFormats
from ranvier.tensor.quantized_weight import QuantizedWeight


def build_stage(model: Model, layout: Layout, at: Coordinates, *, seed: int, dtype: torch.dtype,
                device: torch.device, copies: StageCopies
                ) -> tuple[list[tuple[int, str, nn.Module]], dict[str, torch.dtype]]:
    """This rank's blocks with their initial weights. Ends of a tie that have one key become one parameter, and those of
    different keys different ones. Weights that the model has quantized are, block by block, so that one block at a time
    is there in full.

    Weights of a model that declares `initial` depend on (seed, name, place) alone; others are what the builder made.
    copies: takes what is copied, because blocks of several stages share it.

    Returns the blocks, and buffers that have lost precision (full name -> format before).
    """
    names = list(model.blocks)
    blocks: list[tuple[int, str, nn.Module]] = []
    cast: dict[str, torch.dtype] = {}
    here: dict[str, nn.Parameter] = {}
    taken: set[nn.Parameter] = set()
    for stage in layout.stages.stages_of(at.pipeline_rank):
        copies.begin_stage()
        for number in layout.blocks(stage):
            block = names[number]
            with device:
                module = model.blocks[block]()
            before = BlockFormats.of(model, block, module, dtype).cast(module, device)
            cast |= {f"{block}.{name}": one for name, one in before.items()}
            module = copies.separate(block, module)
            blocks.append((number, block, module))
            for name, parameter in list(module.named_parameters()):
                full = f"{block}.{name}"
                whole = layout[full]
                owner, key = whole.owner, layout.key(whole)
                until_close = copies if parameter in taken else None
                if key in here:
                    if here[key] is not parameter:
                        _replace_parameter(module, name, here[key], until_close)
                    continue
                if until_close is not None:  # another stage has it, under another key
                    parameter = copy_of(parameter)
                    _replace_parameter(module, name, parameter, until_close)
                if model.initial is not None:
                    start = layout[owner].settings_name
                    initialise(parameter.data, start, model.initial(start), seed, whole.shape,
                               layout.box(whole, at.position))
                if whole.quantized is not None:
                    parameter = nn.Parameter(QuantizedWeight.of(parameter, whole.quantized), requires_grad=False)
                    _replace_parameter(module, name, parameter, None)
                here[key] = parameter
                taken.add(parameter)
    return blocks, cast


def _replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter, until_close: StageCopies | None) -> None:
    """Put `parameter` in the place of the one called `name`, under all the names that this has in `module`.
    until_close: takes what was there, where it comes back."""
    replaced = module.get_parameter(name)
    for other, present in list(module.named_parameters(remove_duplicate=False)):
        if present is replaced:
            path, _, leaf = other.rpartition(".")
            holder = module.get_submodule(path)
            if until_close is not None:
                until_close.replace(holder, leaf, parameter)
            else:
                setattr(holder, leaf, parameter)


def stage_parameters(layout: Layout, blocks: Sequence[tuple[int, str, nn.Module]]) -> dict[str, nn.Parameter]:
    """Key (see `Layout.key`) -> parameter of a stage's blocks, in model order."""
    return {layout.key(layout[f"{block}.{name}"]): parameter for _, block, module in reversed(blocks)
            for name, parameter in module.named_parameters()}
