"""A model family of your own: the command trains, checks, plans and resumes it like the shipped ones.

    ranvier check examples.own_family:recipe
    ranvier train examples.own_family:recipe --train.steps 20 --run-dir runs/own-family
    ranvier train examples.own_family:recipe --train.steps 30 --mesh.data 1 --resume auto --run-dir runs/own-family
    ranvier plan examples.own_family:recipe --cluster laptop --ranks 4

The model is a causal convolutional language model: each layer mixes every channel over the last `kernel` tokens, and
then the channels of each token. `ranvier.testing.families.check_family` checks that a family implements the
protocol.

Shapes are in the names: B batch, S sequence, H hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from ranvier.block import Initial, Model, all_like_first
from ranvier.errors import ConfigError
from ranvier.models.family import ModelFacts, ModelFamily


class Mixer(nn.Module):
    """x_BSH + a causal convolution of each channel, then x_BSH + an MLP of each token."""

    def __init__(self, hidden, kernel, gated, dtype):
        super().__init__()
        self.kernel, self.gated = kernel, gated
        self.first_norm, self.second_norm = nn.LayerNorm(hidden, dtype=dtype), nn.LayerNorm(hidden, dtype=dtype)
        self.over_tokens = nn.Conv1d(hidden, hidden, kernel, groups=hidden, dtype=dtype)
        self.into = nn.Linear(hidden, 2 * hidden * (1 + gated), dtype=dtype)
        self.out = nn.Linear(2 * hidden, hidden, dtype=dtype)

    def forward(self, x_BSH):
        y_BHS = functional.pad(self.first_norm(x_BSH).transpose(1, 2), (self.kernel - 1, 0))  # sees no later token
        x_BSH = x_BSH + self.over_tokens(y_BHS).transpose(1, 2)
        y_BSF = self.into(self.second_norm(x_BSH))
        return x_BSH + self.out(functional.glu(y_BSF) if self.gated else functional.gelu(y_BSF))


class Head(nn.Module):
    """logits_BSV."""

    def __init__(self, hidden, vocab, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(hidden, dtype=dtype)
        self.projection = nn.Linear(hidden, vocab, bias=False, dtype=dtype)

    def forward(self, x_BSH):
        return self.projection(self.norm(x_BSH))


def loss(logits_BSV, targets_BS):
    """The sum over targets, and how many there are."""
    total = functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets_BS != -100).sum()


def initial(name):
    """The initial value of one parameter, drawn from the run's seed: the same on every mesh."""
    if name.endswith("norm.weight"):
        return Initial("constant", 1.0)
    return Initial("constant", 0.0) if name.endswith(".bias") else Initial("normal", 0.05)


@dataclass(frozen=True)
class Convolutional(ModelFamily):
    """The fields are its settings: `--model.options kernel=8,gated=true`."""

    kernel: int = 4
    gated: bool = False

    def problems(self, settings, head):
        found = []
        if head != "tokens":
            found.append(ConfigError("predicts tokens only", where="model.family", value=head,
                                     remedy="Set --data.task lm."))
        if not 1 <= self.kernel <= settings.sequence:
            found.append(ConfigError(f"must be 1 to model.sequence {settings.sequence}", where="model.options",
                                     value=f"kernel={self.kernel}", remedy="Set --model.options kernel=4."))
        return found

    def model(self, settings, head, *, dtype):
        hidden, layers = settings.hidden, [f"layer{number}" for number in range(settings.num_layers)]
        blocks: dict[str, Callable[[], nn.Module]] = {
            "embedding": partial(nn.Embedding, settings.vocab, hidden, dtype=dtype),
            **{layer: partial(Mixer, hidden, self.kernel, self.gated, dtype) for layer in layers},
            "head": partial(Head, hidden, settings.vocab, dtype)}
        of_one_block = tuple((layer,) for layer in layers)
        return Model(blocks=blocks, loss=loss, initial=initial, layers=of_one_block, alike=all_like_first(of_one_block))

    def sample(self, settings, head, count):
        ids_BS = torch.zeros(count, settings.sequence, dtype=torch.int64)
        return ids_BS, ids_BS

    def flops_per_sample(self, settings, *, recomputed=False):
        h, s = settings.hidden, settings.sequence
        layer = 2 * s * h * (self.kernel + (4 + 2 * self.gated) * h)
        return (4 if recomputed else 3) * (settings.num_layers * layer + 2 * s * h * settings.vocab)

    def describe(self, settings):
        return ModelFacts(text=f"convolutional, {settings.num_layers} layers, hidden {settings.hidden}, kernel "
                               f"{self.kernel}, vocabulary {settings.vocab}", tokens=settings.sequence)


def recipe():
    """Four ranks: two replicas of two stages."""
    return {"mesh": {"data": 2, "pipe": 2}, "batch": {"global_size": 16, "microbatch_size": 4},
            "model": {"family": "examples.own_family:Convolutional", "options": ["kernel=6", "gated=true"],
                      "num_layers": 3, "hidden": 48, "vocab": 512, "sequence": 64},
            "data": {"max_bytes": 1_000_000},
            "train": {"steps": 20, "learning_rate": 3e-3, "eval_sequences": 16, "sample_tokens": 40}}
