"""Replacements for modules in other blocks, in the model's own code around its layers.

    embedding    the model's forward, with recorders instead of its layers, and nothing after them
    head         the model's forward, with stand-ins before the layers, and injectors instead of the layers
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ranvier.errors import ModelError

REMEDY = "Write its blocks by hand: pass a list of modules to ranvier.Engine (docs/extending.md)."


class ModuleElsewhere(nn.Module):
    """Replaces a module of another block. Its attributes are that module's; parameters, buffers and submodules that are
    read for the sample become its own too, so that they are tied, or refused if stages would not agree on them.

    shares: whether it may have parameters of the other block; parameters of a layer belong to the layer only.
    """

    def __init__(self, module: nn.Module, name: str, *, shares: bool) -> None:
        super().__init__()
        self._module, self._name, self._shares = (module,), name, shares  # in a tuple, so that it is not a submodule
        self.knows = False
        """Whether all reads of attributes for the sample have been made."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module, = self._module
            value = getattr(module, name)
        if isinstance(value, types.MethodType) and value.__self__ is module:
            return types.MethodType(value.__func__, self)
        if isinstance(value, (Tensor, nn.Module)):
            has_parameters = isinstance(value, nn.Parameter) or (
                isinstance(value, nn.Module) and any(True for _ in value.parameters()))
            is_kept = isinstance(value, (nn.Parameter, nn.Module)) or name in module._buffers
            if self.knows or not is_kept or (has_parameters and not self._shares):
                raise ModelError("is read in another block than the module's own" + (
                    ", but was not for the sample" if self.knows else ""), code="attribute-of-another-block",
                    where=f"{self._name}.{name}", value=type(value).__name__, remedy=REMEDY)
            for places in ("_parameters", "_buffers", "_modules"):  # setattr would read the attribute again
                if name in vars(module)[places]:
                    vars(self)[places][name] = value
            self._non_persistent_buffers_set |= module._non_persistent_buffers_set & {name}
        return value


class Recorder(ModuleElsewhere):
    """Replaces a layer in the embedding: passes its arguments to `record`, and returns the hidden states from it. size:
    number of values that the layer returns."""

    def __init__(self, layer: nn.Module, name: str, record: Callable[[tuple[object, ...], dict[str, object]], Tensor],
                 size: int) -> None:
        super().__init__(layer, name, shares=False)
        self._record, self._size = record, size

    def forward(self, *args: object, **kwargs: object) -> object:
        return _layer_outputs(self._record(args, kwargs), self._size)


class Injector(ModuleElsewhere):
    """Replaces a layer in the head: returns the hidden states of the last layer."""

    def __init__(self, layer: nn.Module, name: str, state: list[Tensor], size: int) -> None:
        super().__init__(layer, name, shares=False)
        self._state, self._size = state, size

    def forward(self, *args: object, **kwargs: object) -> object:
        hidden, = self._state
        return _layer_outputs(hidden, self._size)


class StandIn(ModuleElsewhere):
    """Replaces a module that runs before the layers: returns tensors in the shapes of its output, with the sample's
    sizes replaced by those of the hidden states; filled with NaN, so that no output can depend on them, and zeros for
    integers. output: `shapes_of` its output. layer: `shapes_of` a layer's output. samples: of the sample."""

    def __init__(self, module: nn.Module, name: str, output: object, layer: object, state: list[Tensor],
                 samples: int) -> None:
        super().__init__(module, name, shares=True)
        self._output, self._state, self._samples = output, state, samples
        self._hidden = next((leaf.shape for leaf in tree_leaves(layer) if isinstance(leaf, _Shape)), torch.Size())

    def forward(self, *args: object, **kwargs: object) -> object:
        hidden, = self._state
        number = next((leaf for leaf in tree_leaves(self._output) if isinstance(leaf, (int, float))), None)
        if number is not None:
            raise ModelError("returns a number in addition to tensors, which the head has from the sample only",
                             code="number-beside-tensors", where=self._name, value=number, remedy=REMEDY)

        def without_values(leaf: object) -> object:
            if not isinstance(leaf, _Shape):
                return leaf
            fill, dtype = (torch.nan, hidden.dtype) if leaf.dtype.is_floating_point else (0, leaf.dtype)
            return hidden.new_full((), fill, dtype=dtype).expand(self._sizes(leaf.shape, hidden.shape))

        return tree_map(without_values, self._output, is_leaf=lambda leaf: isinstance(leaf, _Shape))

    def _sizes(self, sample: torch.Size, hidden: torch.Size) -> Sequence[int]:
        """The sizes of the hidden states, or `sample` with their numbers of samples and tokens, as for pair biases."""
        if len(sample) == len(hidden) and sample[-1] == hidden[-1] and sample[0] in (1, self._samples):
            return hidden
        tokens = self._hidden[1] if len(self._hidden) > 2 else None
        return [hidden[0] if place == 0 and size == self._samples else
                hidden[1] if place < len(sample) - 1 and size == tokens else size for place, size in enumerate(sample)]


@dataclass(frozen=True)
class _Shape:
    shape: torch.Size
    dtype: torch.dtype


def shapes_of(output: object) -> object:
    """A module's output with shapes in place of tensors."""
    return tree_map(lambda leaf: _Shape(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf, output)


class LaterModule(ModuleElsewhere):
    """Replaces a module that runs after the layers."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name, shares=True)

    def forward(self, *args: object, **kwargs: object) -> object:
        raise ModelError("runs before the layers, but did not for the sample", code="other-order-than-sample",
                         where=self._name, remedy=REMEDY)


def _layer_outputs(hidden: Tensor, size: int) -> object:
    """Hidden states in the output format of a layer that returns `size` values, 0 for a bare tensor."""
    return (hidden, *[None] * (size - 1)) if size else hidden
