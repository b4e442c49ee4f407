"""The vision transformer as a list of blocks, with its initial weights, its loss and its FLOP counts.

Shapes are in the names: B batch, I image size, P patch size, S = (I / P)^2 + 1 tokens, H hidden, N heads, D = H / N,
F = intermediate (4 H by default), C classes. The inputs are images [B, 3, I, I] of floats. The carried state is one
tensor: images into the embedding, x_BSH between blocks, logits_BC out of the head.

    embedding -> layer0.attention -> layer0.mlp -> layer1.attention -> ... -> head

An image's patches, row by row, are its tokens 1, 2, ...; token 0 is learnt and is read by the head. Each sublayer is
x + projection(f(norm(x))), with its residual inside the block (Dosovitskiy et al., 2021). DINOv2's scales of sublayer
outputs are folded into `projection` and `fc2` here, which is equivalent; its classifier, which in transformers reads
token 0 and the mean of all patches, reads only token 0 here. Attention probabilities have no dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ranvier.block import Model
from ranvier.config.run import Transformer
from ranvier.errors import ConfigError, ModelError, RanvierError
from ranvier.models import family
from ranvier.tensor import layers as tensor
from ranvier.tensor.split.loss import ClassLoss

NORM_EPSILON = 1e-6
"""Epsilon of the norms in the paper's own code."""
CHANNELS = 3


def num_tokens(config: Transformer) -> int:
    """Number of tokens of one image: its patches, and token 0."""
    return (config.image_size // config.patch_size) ** 2 + 1


def patches_of(images_BCII: Tensor, size: int) -> Tensor:
    """[B, (I / P)^2, C P P]: patches row by row, each with its pixels in the order (channel, row, column)."""
    cut_BCGGPP = images_BCII.unfold(2, size, size).unfold(3, size, size)
    return cut_BCGGPP.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def _norm(config: Transformer, dtype: torch.dtype) -> tensor.LayerNorm:
    return tensor.LayerNorm(config.hidden, eps=config.norm_epsilon or NORM_EPSILON, dtype=dtype)


class Embedding(nn.Module):
    """Token 0 and projected patches, plus positions; dropout."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.image_size, self.patch_size = config.image_size, config.patch_size
        self.patch = tensor.PatchEmbedding(CHANNELS * config.patch_size ** 2, config.hidden,
                                           length=num_tokens(config), dtype=dtype)
        self.position = tensor.PositionEmbedding(num_tokens(config), config.hidden, dtype=dtype)
        self.dropout = tensor.Dropout(config.dropout)

    def forward(self, images_BCII: Tensor) -> Tensor:
        if images_BCII.shape[1:] != (CHANNELS, self.image_size, self.image_size):
            raise ModelError(f"must be [batch, {CHANNELS}, {self.image_size}, {self.image_size}]",
                             code="image-shape", where="shape of the images", value=tuple(images_BCII.shape),
                             remedy="Pass images of model.image_size, or set `--model.image-size`.")
        patches = patches_of(images_BCII, self.patch_size)
        patch_BSH = self.patch(patches.to(self.patch.weight.dtype))
        x_BSH: Tensor = self.dropout(patch_BSH + self.position(patches.shape[1] + 1))
        return x_BSH


class Attention(family.FusedAttention):
    """Self-attention of every token to all tokens, with its norm and residual."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, _norm(config, dtype), ("query", "key", "value"))

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSF = tensor.local_map(self.attend, self.qkv(self.norm(x_BSH)))
        y_BSH: Tensor = self.dropout(self.projection(y_BSF), onto=x_BSH)
        return y_BSH


class MLP(family.TwoLayerMLP):
    """The two-layer perceptron with its norm and residual; exact GELU."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, _norm(config, dtype), family.inner_width(config))

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSF = tensor.gelu(self.fc1(self.norm(x_BSH)), approximate="none")
        y_BSH: Tensor = self.dropout(self.fc2(y_BSF), onto=x_BSH)
        return y_BSH


class Head(nn.Module):
    """Final norm and the classifier on token 0: logits_BC."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = _norm(config, dtype)
        self.classifier = tensor.ClassifierHead(config.hidden, family.num_classes(config), token=0, dtype=dtype)

    def forward(self, x_BSH: Tensor) -> Tensor:
        logits_BC: Tensor = self.classifier(self.norm(x_BSH))
        return logits_BC


def problems(config: Transformer) -> list[ConfigError]:
    """All problems of `config` for a ViT."""
    found = family.heads_problem(config)
    if config.image_size % config.patch_size:
        near = max(1, round(config.image_size / config.patch_size)) * config.patch_size
        found.append(ConfigError(f"is not a multiple of model.patch_size {config.patch_size}",
                                 code="image-size-not-patches", where="model.image_size", value=config.image_size,
                                 remedy=f"Set `--model.image-size {near}`."))
    return found


def flops_per_sequence(config: Transformer, *, recomputed: bool = False) -> float:
    """FLOPs of training on one image, forward and backward.

    The layers' products are counted, 8 s h^2 + 4 s h f for weights and 4 s^2 h for attention in one layer's forward,
    three times, or with `recomputed` four times, since every layer's forward runs twice; and the projection of patches,
    whose inputs need no gradient, twice. The head, which reads one token, is left out.
    """
    s, h, f = num_tokens(config), config.hidden, family.inner_width(config)
    layer = 8 * s * h * h + 4 * s * h * f + 4 * s * s * h
    patches = 2 * (s - 1) * CHANNELS * config.patch_size ** 2 * h
    return (4 if recomputed else 3) * config.num_layers * layer + 2 * patches


class _ViT:
    """The family `vit`: the head "classes", inputs images_BCII and targets_B int64."""

    def problems(self, settings: Transformer, head: str) -> list[RanvierError]:
        return [*family.wrong_head("vit", head, ("classes",)), *problems(settings)]

    def model(self, settings: Transformer, head: str, *, dtype: torch.dtype = torch.float32) -> Model:
        return family.stack_layers(settings, dtype, Embedding, Attention, MLP, Head, loss=ClassLoss(),
                                   initial=family.initial)

    def sample(self, settings: Transformer, head: str, count: int) -> tuple[Tensor, Tensor]:
        images_BCII = torch.zeros(count, CHANNELS, settings.image_size, settings.image_size)
        return images_BCII, torch.zeros(count, dtype=torch.int64)

    flops_per_sample = staticmethod(flops_per_sequence)

    def describe(self, settings: Transformer) -> family.ModelFacts:
        text = (f"{family.transformer_in_words('vit', settings)}, images of {settings.image_size} in patches of "
                f"{settings.patch_size}")
        return family.ModelFacts(text=text, tokens=num_tokens(settings))


VIT = _ViT()


def vit(config: Transformer, *, dtype: torch.dtype = torch.float32) -> Model:
    """The blocks of a ViT with a classifier; see `family.build_blocks`."""
    return family.build_blocks(VIT, config, "classes", dtype=dtype)
