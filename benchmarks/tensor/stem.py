"""The work of every contender: a stack of GPT layers between given tensors, without embedding and head.

    x [B, S, H] -> layer0 -> layer1 -> ... -> y, then the gradients of x and of all parameters from a given dy

All contenders use the layers of `ranvier.models.gpt`, under the same names. A contender may shard them and its tensors
as its experts would, but sizes, weights, x and dy come from here. Biases and norms also start from random numbers, so
that none can be left out, or counted twice, unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ranvier import keyed_random
from ranvier.block import INITIAL_PIECE, Initial, initialise
from ranvier.config.run import Transformer
from ranvier.models.gpt import MLP, Attention


@dataclass(frozen=True, kw_only=True)
class Stem:
    """Sizes of the stack; `microbatch` is in sequences, of all ranks together."""

    num_layers: int = 4
    hidden: int = 512
    heads: int = 8
    sequence: int = 256
    microbatch: int = 4
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide hidden {self.hidden}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_parameters(self) -> int:
        return self.num_layers * (12 * self.hidden + 13) * self.hidden

    def network(self) -> Layers:
        """The full stack with its initial weights."""
        network = Layers(self)
        for name, parameter in network.named_parameters():
            initialise(parameter, name, Initial("normal", 0.02 if parameter.dim() > 1 else 0.1), self.seed)
            if name.endswith(".norm.weight"):
                parameter.data.add_(1.0)
        return network

    def inputs(self) -> Tensor:
        """x [B, S, H]."""
        return self._random("x")

    def output_gradients(self) -> Tensor:
        """dy [B, S, H]."""
        return self._random("dy")

    def _random(self, name: str) -> Tensor:
        shape = self.microbatch, self.sequence, self.hidden
        made = torch.empty(shape, dtype=self.torch_dtype)
        initialise(made, name, Initial("normal", 1.0), self.seed)
        return made


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config, dtype), MLP(config, dtype)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.mlp(self.attention(x_BSH))


class Layers(nn.Module):
    """The full stack: parameters are called layer0.attention.norm.weight and so on."""

    def __init__(self, stem: Stem) -> None:
        super().__init__()
        config = Transformer(num_layers=stem.num_layers, hidden=stem.hidden, heads=stem.heads, vocab=2,
                             sequence=stem.sequence)
        for number in range(stem.num_layers):
            self.add_module(f"layer{number}", Layer(config, stem.torch_dtype))

    def forward(self, x_BSH: Tensor) -> Tensor:
        for layer in self.children():
            x_BSH = layer(x_BSH)
        return x_BSH


def reference(stem: Stem) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """y, the gradient of x and the gradients of all parameters, by plain PyTorch on one process."""
    network, x = stem.network(), stem.inputs().requires_grad_()
    y = network(x)
    y.backward(stem.output_gradients())
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in network.named_parameters()}


def figures(y: Tensor, dx: Tensor, gradients: Iterable[tuple[str, Tensor]]) -> list[float]:
    """Sums of squares over y, over dx and over all gradients, in which positions have different weights."""
    return [_weighted("y", y), _weighted("dx", dx), sum(_weighted(name, tensor) for name, tensor in gradients)]


def _weighted(name: str, tensor: Tensor) -> float:
    key, total, start = keyed_random.key("figures", name), 0.0, 0
    for piece in tensor.detach().flatten().split(INITIAL_PIECE["cpu"]):
        weights = keyed_random.uniform(key, torch.arange(start, start + len(piece)))
        total += (weights * piece.double() ** 2).sum().item()
        start += len(piece)
    return total
