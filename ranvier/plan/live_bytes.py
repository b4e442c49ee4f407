"""Peak live bytes of a block's forward and of its backward, by running its code on the meta device.

Gradients of weights are left out: products of linear layers add to their sums in place, and the size of other gradients
does not grow with a microbatch (`ranvier.planner.count`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from ranvier.block import State
from ranvier.plan.kernel_count import INTO_WIDER, Counting, distinct_bytes, tensors_in
from ranvier.system.memory_tracker import MemoryTracker
from ranvier.tensor.autograd import Function
from ranvier.tensor.deferred_linear import DeferringForwards
from ranvier.tensor.weight_gradients import WeightGradients

_DRAWN_BYTES, _INDEX_BYTES = 24, 8
"""Bytes for each element, and in addition for each element of one sample, while an uncompiled CPU draws a dropout mask
(`keyed_random.dropped`)."""


class LiveBytes(MemoryTracker):
    """Counts live bytes on the meta device, including temporaries that only a CPU has: operands that it casts to the
    format of a product's result (`local_products`), and dropout masks that it draws.

    most_cast: bytes of the operands of one product.
    """

    def __init__(self, counting: Counting, dtype: torch.dtype) -> None:
        super().__init__(on_meta=True)
        self.most_cast, self._casts = 0, not counting.on_cuda
        # A mask counts as numbers in the kept bytes (`numeric_mask_bytes`), also while it is drawn.
        self._drawn_bytes = 0 if counting.on_cuda or counting.compiles else _DRAWN_BYTES - dtype.itemsize

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, passing = kwargs or {}, list[Tensor]()
        if self._casts and func in INTO_WIDER:
            passing = [kwargs["out"].new_empty(distinct_bytes(arg) // arg.element_size()) for arg in args[-3:-1]]
            self.most_cast = max(self.most_cast, sum(copy.nbytes for copy in passing))
        elif self._drawn_bytes and func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is torch.bool:
            passing = [torch.empty(prod(args[0]) * self._drawn_bytes + prod(args[0][1:]) * _INDEX_BYTES,
                                   dtype=torch.uint8, device="meta")]
        self.tag(passing, "passing")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Peaks(NamedTuple):
    """Peak live bytes, including what enters and what autograd keeps between the two."""

    forward: int
    backward: int


def block_peaks(module: nn.Module, tensors: Mapping[str, Tensor], entering: State, counting: Counting,
                dtype: torch.dtype, attention: Callable[[], AbstractContextManager[object]]) -> Peaks | None:
    """Peaks of a block with these parameters and buffers. entering: leaves. attention: a context in which it is
    computed. None if its backward needs values."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own = {name: nn.Parameter(tensor, tensor.requires_grad) if name in parameters else tensor
           for name, tensor in tensors.items()}
    linear = {weight for name, layer in module.named_modules() if isinstance(layer, nn.Linear)
              for weight in (f"{name}.weight".removeprefix("."),)}
    inputs = [own[name] for name in parameters if own[name].requires_grad and (name in linear or own[name].dim() < 2)]
    forwards = DeferringForwards([module], [], cast(WeightGradients, _Dropped()))
    forwards.install()
    try:
        with attention():
            return peaks_of(lambda state: functional_call(module, own, (state,), tie_weights=False), entering, inputs,
                            counting, dtype)
    finally:
        forwards.remove()


def peaks_of(compute: Callable[[State], object], entering: State, inputs: Sequence[Tensor], counting: Counting,
             dtype: torch.dtype) -> Peaks | None:
    """Peaks of `compute(entering)`, and of a backward to these inputs and leaves. None if the backward needs values."""
    inputs = [*inputs, *(leaf for leaf in tensors_in(entering) if leaf.requires_grad)]
    live = LiveBytes(counting, dtype)
    with live, torch.enable_grad():
        state = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, entering)
        ends = [end for end in tensors_in(compute(state)) if end.requires_grad]
        forward, first_bytes = live.peak_bytes(), sum(end.nbytes for end in ends)
        root = _FirstGradients.apply(*ends) if ends else None
        del state, ends
        live.reset_peak()
        if root is None or not inputs:
            return Peaks(forward, live.peak_bytes() + first_bytes)
        try:
            root.backward(inputs=inputs)
        except Exception:  # of torch or of the user's code: there are no values here
            return None
    return Peaks(forward, live.peak_bytes())



class _FirstGradients(Function):
    """A scalar whose backward makes the gradients with which a backward begins. They belong to autograd, as between
    blocks, and are freed when they are used."""

    @staticmethod
    def forward(ctx: Any, *ends: Tensor) -> Tensor:
        ctx.forms = [(end.shape, end.dtype) for end in ends]
        return ends[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.forms)


class _Dropped:
    """A stage's weight gradients, of which none is computed."""

    defers, forward_bytes = True, 0

    def in_pass(self) -> bool:
        return True

    def add(self, *product: object) -> None:
        pass
