"""What one process computes with plain PyTorch: the yardstick for every mesh, policy and freezing.

    reference = Reference(model, seed=0, dtype=torch.float64)
    loss = reference.forward_backward(microbatches)          # of the whole global batch
    relative_error(engine.gradients()[name], reference.gradients()[name])

No pipeline, no messages, no postponed gradients: all blocks in a row, one autograd pass, a torch optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ranvier import keyed_random
from ranvier.models.block import Loss, Model, State, as_model, initialise
from ranvier.pipeline.microbatch import Microbatch


class Reference:
    """A model on one device.

    Args:
        model, loss, seed, dtype, optimizer: as for `Engine`. Ready-made modules are changed in place, so give the
            reference its own copy.

    Parameters and gradients carry global names ("block.parameter"), tied ones their owner's.
    """

    def __init__(self, model: Model | nn.Sequential | Sequence[nn.Module], *, loss: Loss | None = None, seed: int = 0,
                 dtype: torch.dtype = torch.float32,
                 optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None) -> None:
        model = as_model(model, loss)
        self._loss, self._seed = model.loss, seed
        self.modules = {name: build().to(dtype=dtype) for name, build in model.blocks.items()}
        """Block name -> module, in order."""
        self.parameters: dict[str, nn.Parameter] = {}
        """Global name -> parameter, one entry for each tied group."""
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

    def _outputs(self, microbatch: Microbatch, training: bool) -> State:
        samples = microbatch.samples if microbatch.samples is not None else torch.zeros(0, dtype=torch.int64)
        state = microbatch.inputs
        for name, module in self.modules.items():
            module.train(training)
            with keyed_random.scope(self._seed, self._step, samples, name):
                state = module(state)
        return state

    def _sums(self, microbatches: Sequence[Microbatch | tuple], training: bool) -> tuple[Tensor, float]:
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for entry in microbatches:
            microbatch = entry if isinstance(entry, Microbatch) else Microbatch(*entry)
            loss, count = self._loss(self._outputs(microbatch, training), microbatch.targets)
            total, weight = total + loss.reshape(()), weight + float(count)
        return total, weight

    def forward_backward(self, microbatches: Sequence[Microbatch | tuple]) -> float:
        """Loss of the global batch: sum over valid targets over their number; nan, and no gradients, without any."""
        self._step += 1
        for parameter in self.parameters.values():
            parameter.grad = None
        total, weight = self._sums(microbatches, training=True)
        if not weight:
            return float("nan")
        if total.requires_grad:
            (total / weight).backward()
        return float(total.detach()) / weight

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of trainable parameters; zeros for those that took no part."""
        return {name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                for name, parameter in self.parameters.items() if parameter.requires_grad}

    def train_batch(self, microbatches: Sequence[Microbatch | tuple]) -> float:
        """One step: gradients and an update, unless the weight is zero. Parameters that took no part stay as they
        are."""
        loss = self.forward_backward(microbatches)
        if loss == loss and self._optimizer is not None:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to_dense()
            self._optimizer.step()
        return loss

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch | tuple]) -> float:
        """Loss without dropout; nan without a valid target."""
        total, weight = self._sums(microbatches, training=False)
        return float(total) / weight if weight else float("nan")

    @torch.no_grad()
    def predict(self, microbatches: Sequence[Microbatch | tuple]) -> list[State]:
        """What the last block returns for each microbatch."""
        return [self._outputs(entry if isinstance(entry, Microbatch) else Microbatch(*entry), training=False)
                for entry in microbatches]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`; the norm of `actual` where `expected` is zero."""
    norm = torch.linalg.vector_norm(expected).item()
    return torch.linalg.vector_norm(actual - expected).item() / (norm or 1.0)
