"""The work of every contender: one model from one start on one stream of tokens.

A contender may arrange the work as its experts would, but the sizes, the initial weights, the tokens, the loss and the
optimizer come from here, so the loss of the first steps is the same number for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ranvier.block import Model, initialise
from ranvier.config.run import Transformer
from ranvier.models.gpt import gpt

Loss = Callable[[], float | None]
"""Reads this rank's share of one step's loss: the shares of all ranks add up; None is no share."""

_DISTINCT_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """A contender that is ready to train."""

    run: Callable[[int], Loss]
    """Training step `number`, from 0."""
    report: Callable[[], dict] = dict
    """Report on the steps since the last call, as JSON can represent it; never called within a timed span."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of the model and of a step. `microbatches` is the number of microbatches in a global batch."""

    num_layers: int = 8
    hidden: int = 256
    heads: int = 8
    vocab: int = 8192
    sequence: int = 128
    sequences: int = 32
    microbatches: int = 8
    tied: bool = True
    seed: int = 0
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.sequences % self.microbatches:
            raise ValueError(f"{self.microbatches} microbatches do not divide {self.sequences} sequences")

    @property
    def microbatch_size(self) -> int:
        """Sequences in a microbatch."""
        return self.sequences // self.microbatches

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.sequence

    @property
    def num_blocks(self) -> int:
        return 2 * self.num_layers + 2

    def model(self) -> Model:
        model = gpt(Transformer(num_layers=self.num_layers, hidden=self.hidden, heads=self.heads, vocab=self.vocab,
                        sequence=self.sequence))
        return model if self.tied else replace(model, tied=())

    def batch(self, step: int, replica: int = 0) -> tuple[Tensor, Tensor]:
        """Random inputs and targets, each [sequences, sequence] int64; a few distinct batches repeat in turn.

        `replica` distinguishes independent copies of a contender, which train on their own tokens.
        """
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 101 * replica + step % _DISTINCT_BATCHES)
        tokens = torch.randint(self.vocab, (self.sequences, self.sequence + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, fused=True)


def build_blocks(workload: Workload, model: Model, numbers: range) -> dict[str, nn.Module]:
    """Blocks `numbers` of the model with their initial weights; both ends of a tie among them are one parameter."""
    names = list(model.blocks)[numbers.start:numbers.stop]
    owners = {name: group[0] for group in model.tied for name in group}
    blocks = {name: model.blocks[name]() for name in names}
    shared: dict[str, nn.Parameter] = {}
    for block, module in blocks.items():
        for name, parameter in list(module.named_parameters()):
            owner = owners.get(f"{block}.{name}", f"{block}.{name}")
            if owner in shared:
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, shared[owner])
            else:
                shared[owner] = parameter
                initialise(parameter.data, owner, model.initial(owner), workload.seed)
    return blocks


def whole_network(workload: Workload, model: Model) -> nn.Sequential:
    """All blocks in one module."""
    return nn.Sequential(*build_blocks(workload, model, range(workload.num_blocks)).values())
