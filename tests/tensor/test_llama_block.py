"""A Llama written with the layers of `ranvier.tensor`: RMSNorm, rotary embeddings, grouped queries and SwiGLU, with
separate and with fused projections, and heads whose width is not hidden / heads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor import layers
from ranvier.tensor.split.loss import NextTokenLoss
from ranvier.testing.reference import Reference
from tests.covering import first
from tests.errors import raises
from tests.tensor.split_parity import SEED, assert_close, every, gradients_on, legal, random

HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, VOCAB, LENGTH = 24, 6, 2, 6, 40, 61, 8


def rotated(x_BNSD):
    """Rotary embeddings: the two halves of each head are rotated by an angle that grows with the position."""
    half = x_BNSD.shape[-1] // 2
    frequencies = 10000 ** (-torch.arange(half, dtype=x_BNSD.dtype) / half)
    angles = torch.arange(x_BNSD.shape[2], dtype=x_BNSD.dtype)[:, None] * frequencies
    a, b = x_BNSD[..., :half], x_BNSD[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def leading(features, units=None):
    return layers.Linear(HIDDEN, features, bias=False, stationary="output", units=units)


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norm = layers.RMSNorm(HIDDEN)
        if fused:  # for each head of keys: its queries, key and value
            self.qkv = leading((HEADS + 2 * KV_HEADS) * WIDTH, KV_HEADS)
        else:
            self.query = leading(HEADS * WIDTH, HEADS)
            self.key, self.value = leading(KV_HEADS * WIDTH, KV_HEADS), leading(KV_HEADS * WIDTH, KV_HEADS)
        self.back = layers.Linear(HEADS * WIDTH, HIDDEN, bias=False, stationary="input", units=HEADS)
        self.fused = fused

    def heads(self, x):
        """Queries, keys and values [B, N, S, D]."""
        if not self.fused:
            return (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        groups = self.qkv(x).unflatten(-1, (-1, HEADS // KV_HEADS + 2, WIDTH)).permute(0, 2, 3, 1, 4)
        return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]

    def forward(self, x):
        query, key, value = self.heads(self.norm(x))
        mixed = functional.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True,
                                                        enable_gqa=True)
        return x + self.back(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norm = layers.RMSNorm(HIDDEN)
        if fused:
            self.both = leading(2 * INNER, INNER)
        else:
            self.gate, self.up = leading(INNER), leading(INNER)
        self.down = layers.Linear(INNER, HIDDEN, bias=False, stationary="input")
        self.fused = fused

    def forward(self, x):
        y = self.norm(x)
        gate, up = self.both(y).unflatten(-1, (-1, 2)).unbind(-1) if self.fused else (self.gate(y), self.up(y))
        return x + self.down(functional.silu(gate) * up)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = layers.RMSNorm(HIDDEN), layers.VocabularyLinear(HIDDEN, VOCAB)

    def forward(self, x):
        return self.out(self.norm(x))


def llama(fused):
    model = nn.Sequential(layers.Embedding(VOCAB, HIDDEN), Attention(fused), SwiGLU(fused), Attention(fused),
                          SwiGLU(fused), Head()).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                parameter.copy_(random(*parameter.shape, seed=number) / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(1 + random(*parameter.shape, seed=number) / 10)
    return model


def masked_batches(rows):
    """Two microbatches with some ignored targets; in the first, all targets of the last row's samples are ignored."""
    generator, found = torch.Generator().manual_seed(0), []
    for number in range(2):
        ids = torch.randint(0, VOCAB, (2 * rows, LENGTH + 1), generator=generator)
        targets = ids[:, 1:].masked_fill(torch.rand(2 * rows, LENGTH, generator=generator) < 0.3, -100)
        if number == 0 and rows > 1:
            targets[-2:] = -100
        found.append(Microbatch(ids[:, :-1].contiguous(), targets, torch.arange(2 * rows) + 10 * number))
    return [found]


@pytest.mark.parametrize(("rows", "cols", "scheme", "pipe", "fused"), first([
    (2, 2, "stationary", 2, True), (2, 1, "stationary", 1, False), (1, 2, "megatron", 1, False),
    (1, 2, "summa", 1, True)], [
    (2, 2, "stationary", 2, True), (2, 2, "summa", 1, False), (2, 1, "stationary", 1, False),
    *((*one, 1, fused) for one, fused in zip(legal([(1, 2)]), (True, True, False, True, False), strict=True))]))
def test_gradients(rows, cols, scheme, pipe, fused):
    batches = masked_batches(rows)
    reference = Reference(llama(fused), loss=NextTokenLoss(VOCAB), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward(every(batches))
    outcome = gradients_on(partial(llama, fused), batches, Mesh(row=rows, col=cols, pipe=pipe), scheme=scheme,
                           loss=NextTokenLoss(VOCAB))
    assert_close(outcome.gradients, reference.gradients())
    assert all(found == pytest.approx(loss, rel=1e-12) for found in outcome.losses if found is not None)


def test_more_columns_than_heads_of_keys():
    """The error names the layer and the sizes."""
    with raises("layer-not-divisible", "1.key", "mesh.col", 3, 2):
        gradients_on(partial(llama, False), masked_batches(1), Mesh(col=3), loss=NextTokenLoss(VOCAB))
