"""Builds this rank's blocks from a layout, with their initial weights.

Blocks of several stages may share objects by identity:

    blocks = [Embed(table), *layers, Head(table)]           a parameter of two blocks
    blocks = [Embed(embed), layer, layer, Head(embed)]      modules of several blocks

Stages exchange the gradients and values of tied parameters, so each needs its own Parameter objects. Blocks on
different ranks have them, since each rank has its own model. If blocks are on two stages of one rank, the later stage
gets copies until the engine closes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from ranvier.block import Initial, Model, initialise
from ranvier.errors import ModelError
from ranvier.layout import Layout
from ranvier.mesh import Coordinates
from ranvier.originals.same_memory import ByMemory
from ranvier.plan.formats import BlockFormats, Moved
from ranvier.plan.reached_objects import reached_from, tensors_in
from ranvier.tensor.quantized_weight import QuantizedWeight


def build_stage(model: Model, layout: Layout, at: Coordinates, *, seed: int, dtype: torch.dtype,
                device: torch.device, copies: StageCopies
                ) -> tuple[list[tuple[int, str, nn.Module]], dict[str, torch.dtype]]:
    """Build this rank's blocks with their initial weights. Ends of a tie with the same key become one parameter, ends
    with different keys become separate ones. Quantized weights are quantized block by block, so that only one block at
    a time exists in full.

    Weights of a model that declares `initial` depend on (seed, name, place) alone; others are what the builder made.
    copies: receives objects that are copied because blocks of several stages share them.

    Returns the blocks, and buffers that have lost precision (full name -> format before).
    """
    names = list(model.blocks)
    blocks: list[tuple[int, str, nn.Module]] = []
    cast: dict[str, torch.dtype] = {}
    here: dict[str, nn.Parameter] = {}
    taken: set[nn.Parameter] = set()
    for stage in layout.stages.stages_of(at.pipeline_rank):
        copies.begin_stage()
        moved: Moved = {}
        for number in layout.blocks(stage):
            block = names[number]
            with device:
                module = model.blocks[block]()
            before = BlockFormats.from_block(model, block, module, dtype).cast(module, device, moved)
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
                    values = model.initial(start)
                    if not isinstance(values, Initial):
                        raise ModelError("must return a ranvier.Initial", code="initial-result",
                                         where=f"Model(initial=...) of {start}", value=type(values).__name__,
                                         remedy='Return one for every name, such as Initial("constant", 1.0).')
                    initialise(parameter.data, start, values, seed, whole.shape, layout.box(whole, at.position))
                if whole.quantized is not None:
                    parameter = nn.Parameter(QuantizedWeight.from_values(parameter, whole.quantized),
                                             requires_grad=False)
                    _replace_parameter(module, name, parameter, None)
                here[key] = parameter
                taken.add(parameter)
    return blocks, cast


def _replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter, until_close: StageCopies | None) -> None:
    """Replace the parameter called `name` by `parameter`, under all names that it has in `module`. until_close: records
    the replaced parameter, if it is to be restored."""
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


# --- copies of what stages share --------------------------------------------------------------------------------------


class StageCopies:
    """Copies, on one rank, of objects that an earlier stage of the rank already has.

    Call `begin_stage` before the blocks of each stage, then `separate` for each block.
    """

    def __init__(self) -> None:
        self._earlier: dict[nn.Module, str] = {}
        self._here: dict[nn.Module, str] = {}
        self._copies: dict[int, object] = {}
        self._replaced: list[tuple[nn.Module, str, nn.Module | nn.Parameter]] = []

    def begin_stage(self) -> None:
        """The next blocks belong to a later stage."""
        self._earlier |= self._here
        self._here, self._copies = {}, {}

    def separate(self, block: str, module: nn.Module) -> nn.Module:
        """Return the module of `block`, with copies of those modules whose parameters an earlier stage has. Copies have
        the same parameters and buffers; `build_stage` replaces the parameters. Raises ModelError for a module that
        cannot be copied."""
        if module in self._earlier and next(module.parameters(), None) is not None:
            return self._copy(block, module)
        if module not in self._here:
            self._here[module] = block
            for name, child in list(module._modules.items()):  # named_children() leaves out a child's second name
                if child is not None and (own := self.separate(block, child)) is not child:
                    self.replace(module, name, own)
        return module

    def _copy(self, block: str, module: nn.Module) -> nn.Module:
        inside = set(module.modules())
        self._copies |= {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self._copies |= {id(other): other for other in self._earlier if other not in inside}
        problem = "a tensor shares the memory of one of its parameters" if _has_views(block, module) else None
        try:
            if problem is None:
                return copy.deepcopy(module, self._copies)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        raise ModelError(f"has a module in common with block {self._earlier[module]}, on another stage of this "
                         f"rank, and it cannot be copied: {problem}",
                         code="shared-module-not-copied", where=f"block {block}", value=type(module).__name__,
                         remedy="Set `--pipeline.stages-per-rank 1`, or give each block its own module and "
                                "tie their parameters: one.weight = other.weight.")

    def replace(self, module: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
        """Replace the child or parameter `name` of `module` by `value`, until `restore`."""
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def restore(self) -> None:
        """Undo all replacements, so that blocks share objects again."""
        while self._replaced:
            module, name, value = self._replaced.pop()
            setattr(module, name, value)


def _has_views(block: str, module: nn.Module) -> bool:
    """Whether the module computes with a tensor in the memory of one of its parameters, which no parameter of a copy
    shares."""
    trained = ByMemory((None, parameter) for parameter in module.parameters() if parameter.requires_grad)
    return any(trained.overlapping(tensor) for _, tensor in tensors_in(reached_from(block, module)))


def copy_of(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter like `parameter`, with its hooks."""
    own = copy.deepcopy(parameter)
    for hook in (parameter._backward_hooks or {}).values():
        own.register_hook(hook)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        own.register_post_accumulate_grad_hook(hook)
    return own
