"""A single-process reference in plain PyTorch, for comparison with every mesh, policy and frozen prefix.

    reference = Reference(model, seed=0, dtype=torch.float64)
    loss = reference.forward_backward(microbatches)          # of the whole global batch
    relative_error(engine.gradients()[name], reference.gradients()[name])

No pipeline, no messages, no deferred weight gradients: all blocks in order, one autograd pass, a torch optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ranvier import keyed_random
from ranvier.block import Loss, Model, Modules, State, as_model, initialise
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.rank_stages import put_in_evaluation, restore
from ranvier.plan.formats import BlockFormats
from ranvier.tensor.quantized_weight import QuantizedWeight

Example = tuple[Any, ...]
"""Arguments of `Microbatch`: inputs, targets and, if dropout needs them, sample numbers."""


class Reference:
    """A model on one device.

    Args:
        model, loss, seed, dtype, optimizer: as for `Engine`. Modules are changed in place, so pass a copy.

    Parameters and gradients have global names ("block.parameter"); tied ones have the name of their owner.
    """

    def __init__(self, model: Model | Modules, *, loss: Loss | None = None, seed: int = 0,
                 dtype: torch.dtype = torch.float32,
                 optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None) -> None:
        model = as_model(model, loss)
        self._loss, self._seed = model.loss, seed
        self.modules = {name: build() for name, build in model.blocks.items()}
        """Block name -> module, in order."""
        for name, module in self.modules.items():
            BlockFormats.from_block(model, name, module, dtype).cast(module, torch.device("cpu"))
        self.parameters: dict[str, nn.Parameter] = {}
        """Global name -> parameter, with one entry for each group of tied parameters."""
        self._share_and_initialise(model)
        trainable = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        self._optimizer = optimizer(trainable) if optimizer is not None and trainable else None
        self._step = 0

    def _share_and_initialise(self, model: Model) -> None:
        owner_of = {name: group[0] for group in model.tied for name in group}
        found = {f"{block}.{name}": (module, name, parameter) for block, module in self.modules.items()
                 for name, parameter in module.named_parameters(remove_duplicate=False)}
        seen: dict[int, str] = {}
        for full, (module, name, parameter) in found.items():
            owner = seen[id(parameter)] = owner_of.get(full) or seen.get(id(parameter), full)
            shared = found[owner][2]
            if shared is not parameter:
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, shared)
            if owner not in self.parameters and model.initial is not None:
                initialise(shared.data, owner, model.initial(owner), self._seed)
            self.parameters[owner] = shared
        for name, weight_format in model.quantized.items():
            weight = self.parameters[name]
            weight.data.copy_(QuantizedWeight.from_values(weight, weight_format).values())

    def _outputs(self, microbatch: Microbatch) -> State:
        samples = microbatch.samples if microbatch.samples is not None else torch.zeros(0, dtype=torch.int64)
        assert microbatch.inputs is not None, "a reference needs inputs in every microbatch"
        state = microbatch.inputs
        for name, module in self.modules.items():
            with keyed_random.scope(self._seed, self._step, samples, name):
                state = module(state)
        return state

    def _sums(self, microbatches: Sequence[Microbatch | Example]) -> tuple[Tensor, float]:
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for entry in microbatches:
            microbatch = entry if isinstance(entry, Microbatch) else Microbatch(*entry)
            loss, count = self._loss(self._outputs(microbatch), microbatch.targets)
            total, weight = total + loss.reshape(()), weight + float(count)
        return total, weight

    def forward_backward(self, microbatches: Sequence[Microbatch | Example]) -> float:
        """Mean loss over the valid targets of the global batch, after backward; NaN, without gradients, if all are
        invalid."""
        self._step += 1
        for parameter in self.parameters.values():
            parameter.grad = None
        total, weight = self._sums(microbatches)
        if not weight:
            return float("nan")
        if total.requires_grad:
            (total / weight).backward()
        return float(total.detach()) / weight

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of trainable parameters by global name; zeros for unused ones."""
        return {name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                for name, parameter in self.parameters.items() if parameter.requires_grad}

    def train_batch(self, microbatches: Sequence[Microbatch | Example]) -> float:
        """Take one step; returns the loss. Unused parameters are not updated; if no target is valid, none is
        updated."""
        loss = self.forward_backward(microbatches)
        if loss == loss and self._optimizer is not None:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to_dense()
            self._optimizer.step()
        return loss

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch | Example]) -> float:
        """Mean loss without dropout; NaN without a valid target."""
        with self._evaluation():
            total, weight = self._sums(microbatches)
        return float(total) / weight if weight else float("nan")

    @torch.no_grad()
    def predict(self, microbatches: Sequence[Microbatch | Example]) -> list[State]:
        """Output of the last block for each microbatch, without dropout."""
        with self._evaluation():
            return [self._outputs(entry if isinstance(entry, Microbatch) else Microbatch(*entry))
                    for entry in microbatches]

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        modes = put_in_evaluation(list(self.modules.values()))
        try:
            yield
        finally:
            restore(modes)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference divided by the norm of `expected`; the norm of `actual` if `expected` is zero."""
    norm = float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(actual - expected)) / (norm or 1.0)
