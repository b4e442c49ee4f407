"""Objects that blocks of several stages share by identity: parameters, modules, buffers.

    blocks = [Embed(table), *layers, Head(table)]           a parameter of two blocks
    blocks = [Embed(embed), layer, layer, Head(embed)]      modules of several blocks

Stages exchange the gradients and values of tied parameters, so each needs Parameter objects of its own. Blocks on
different ranks have them, since each rank has a model of its own. Of blocks on two stages of one rank the later stage
gets copies, until the engine closes.

A buffer that several stages change has no one value: stages run microbatches in an order of their own. Shared batch
norms are refused before the first step, and other modules that change a buffer before the first update. Of other values
see `left_values`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ranvier.errors import ModelError
from ranvier.originals.same_memory import ByMemory
from ranvier.plan.reached_objects import reached_from
from ranvier.plan.shared_buffers import shared_buffer_error

_BATCHES_BY_VALUE = 2


class StageCopies:
    """Copies, on one rank, of what an earlier stage of the rank has already.

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
        """The module of `block`, in which modules with parameters that an earlier stage has are copies. Copies have the
        same parameters and buffers; `build_stage` replaces the parameters. ModelError for a module that cannot be
        copied."""
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
        problem = "a tensor lies over the memory of one of its parameters" if _has_views(block, module) else None
        try:
            if problem is None:
                return copy.deepcopy(module, self._copies)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        raise ModelError(f"has a module in common with block {self._earlier[module]}, on another stage of this "
                         f"rank, and it cannot be copied: {problem}",
                         code="shared-module-not-copied", where=f"block {block}", value=type(module).__name__,
                         remedy="Set `--pipeline.stages-per-rank 1`, or give each block a module of its own and "
                                "tie their parameters: one.weight = other.weight.")

    def replace(self, module: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
        """Put `value` in the place of the child or parameter `name` of `module`, until `restore`."""
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def restore(self) -> None:
        """Blocks share again what they have shared."""
        while self._replaced:
            module, name, value = self._replaced.pop()
            setattr(module, name, value)


def _has_views(block: str, module: nn.Module) -> bool:
    """Whether it computes with a tensor over a parameter of its own, which is none of its copy's."""
    tensors = [*module.buffers(), *(one.value for one in reached_from(block, module) if isinstance(one.value, Tensor))]
    trained = ByMemory((None, one) for one in module.parameters() if one.requires_grad)
    return any(map(trained.over, tensors))


def copy_of(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter like `parameter`, with its hooks."""
    own = copy.deepcopy(parameter)
    for hook in (parameter._backward_hooks or {}).values():
        own.register_hook(hook)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        own.register_post_accumulate_grad_hook(hook)
    return own


class SharedBufferChanges:
    """Notices buffers of several stages that a training batch changes.

    shared: as `buffers_of_several_stages` returns it. blocks: (number in the model, name, module) of this rank's.
    """

    def __init__(self, shared: Mapping[str, str], blocks: Sequence[tuple[int, str, nn.Module]]) -> None:
        self._shared, self._blocks = shared, blocks if shared else ()
        self._buffers: dict[str, tuple[Tensor, int]] = {}
        self._values: dict[str, Tensor] = {}
        """In the first batches: kernels of running statistics leave no trace of a change but the values."""
        self._batches = 0

    def _buffers_now(self) -> Iterable[tuple[str, Tensor]]:
        for _, block, module in self._blocks:
            for name, buffer in module.named_buffers(remove_duplicate=False):
                if f"{block}.{name}" in self._shared:
                    yield f"{block}.{name}", buffer

    def begin(self) -> None:
        """A training batch begins."""
        self._buffers = {name: (buffer, buffer._version) for name, buffer in self._buffers_now()}
        self._batches += 1
        self._values = {name: buffer.clone() for name, (buffer, _) in self._buffers.items()
                        } if self._batches <= _BATCHES_BY_VALUE else {}

    def check(self) -> None:
        """The batch has run. ModelError for a buffer that it has changed."""
        for name, buffer in self._buffers_now():
            before, version = self._buffers.get(name, (None, 0))
            known = self._values.get(name)
            if buffer is not before or buffer._version != version or (
                    known is not None and not torch.equal(known, buffer)):
                raise shared_buffer_error(name, self._shared[name], None)
