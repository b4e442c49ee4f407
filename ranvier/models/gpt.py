"""GPT-2's architecture as a list of blocks, with its initial weights, its loss and its FLOP counts.

Shapes are in the names: B batch, S sequence, H hidden, N heads, D = H / N, F = 4 H, V vocabulary. The carried state is
one tensor: token ids_BS (int64) into the embedding, x_BSH between blocks, logits_BSV out of the head.

    embedding -> layer0.attention -> layer0.mlp -> layer1.attention -> ... -> head

Each sublayer is x + projection(f(norm(x))), with its residual inside the block (Radford et al., 2019). The head's
projection is tied to the token embedding: two parameters in two blocks, declared as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranvier import keyed_random
from ranvier.errors import ConfigError, ModelError
from ranvier.models.block import Initial, Model
from ranvier.run import GPT

IGNORED = -100
"""Target of a position that does not count in the loss."""


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, config: GPT, dtype: torch.dtype) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.token = nn.Embedding(config.vocab, config.hidden, dtype=dtype)
        self.position = nn.Embedding(config.sequence, config.hidden, dtype=dtype)

    def forward(self, ids_BS: Tensor) -> Tensor:
        length, longest = ids_BS.shape[1], self.position.num_embeddings
        if length > longest:
            raise ModelError("is longer than the model has positions for", where="sequence of the inputs", value=length,
                             remedy=f"Feed at most {longest} tokens, or set --model.sequence {length}.")
        x_BSH = self.token(ids_BS) + self.position.weight[:length]
        return keyed_random.dropout(x_BSH, self.dropout, self.training)


class Attention(nn.Module):
    """Causal self-attention with its norm and residual.

    `qkv` has the rows of one head's query, key and value together (N, 3, D), so that a range of heads is one slice.
    """

    def __init__(self, config: GPT, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.norm = nn.LayerNorm(config.hidden, dtype=dtype)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, dtype=dtype)
        self.projection = nn.Linear(config.hidden, config.hidden, dtype=dtype)

    def forward(self, x_BSH: Tensor) -> Tensor:
        qkv_BSN3D = self.qkv(self.norm(x_BSH)).unflatten(-1, (self.heads, 3, -1))
        q_BNSD, k_BNSD, v_BNSD = (part.transpose(1, 2) for part in qkv_BSN3D.unbind(3))
        y_BNSD = functional.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)
        y_BSH = self.projection(y_BNSD.transpose(1, 2).flatten(2))
        return x_BSH + keyed_random.dropout(y_BSH, self.dropout, self.training)


class MLP(nn.Module):
    """The two-layer perceptron with its norm and residual; GELU by its tanh approximation, as GPT-2."""

    def __init__(self, config: GPT, dtype: torch.dtype) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.norm = nn.LayerNorm(config.hidden, dtype=dtype)
        self.fc1 = nn.Linear(config.hidden, 4 * config.hidden, dtype=dtype)
        self.fc2 = nn.Linear(4 * config.hidden, config.hidden, dtype=dtype)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSF = functional.gelu(self.fc1(self.norm(x_BSH)), approximate="tanh")
        return x_BSH + keyed_random.dropout(self.fc2(y_BSF), self.dropout, self.training)


class Head(nn.Module):
    """Final norm and the projection onto the vocabulary, without bias."""

    def __init__(self, config: GPT, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden, dtype=dtype)
        self.projection = nn.Linear(config.hidden, config.vocab, bias=False, dtype=dtype)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.projection(self.norm(x_BSH))


def gpt(config: GPT, *, dtype: torch.dtype = torch.float32) -> Model:
    """The blocks of a GPT. Builders honour `torch.device(...)` contexts, "meta" included; ConfigError as `problems`."""
    for problem in problems(config):
        raise problem
    blocks = {"embedding": partial(Embedding, config, dtype)}
    layers = tuple((f"layer{index}.attention", f"layer{index}.mlp") for index in range(config.num_layers))
    for attention, mlp in layers:
        blocks[attention] = partial(Attention, config, dtype)
        blocks[mlp] = partial(MLP, config, dtype)
    blocks["head"] = partial(Head, config, dtype)
    return Model(blocks=blocks, loss=next_token_loss, layers=layers, initial=partial(initial, config),
                 tied=(("embedding.token.weight", "head.projection.weight"),))


def problems(config: GPT) -> list[ConfigError]:
    """Everything in `config` that no GPT can have."""
    found = []
    if config.hidden % config.heads:
        near = next(heads for heads in range(config.heads, 0, -1) if config.hidden % heads == 0)
        found.append(ConfigError(f"does not divide model.hidden {config.hidden}", where="model.heads",
                                 value=config.heads, remedy=f"Set --model.heads {near}."))
    return found


def initial(config: GPT, name: str) -> Initial:
    """GPT-2's start of one parameter: projections into the residual stream are smaller by sqrt(2 num_layers)."""
    if name.endswith(".bias"):
        return Initial("constant", 0.0)
    if name.endswith(".norm.weight"):
        return Initial("constant", 1.0)
    into_residual = name.endswith((".attention.projection.weight", ".mlp.fc2.weight"))
    return Initial("normal", 0.02 / (2 * config.num_layers) ** 0.5 if into_residual else 0.02)


def flops_per_sequence(config: GPT, *, recomputed: bool = False) -> float:
    """FLOPs of training on one sequence, forward and backward; causal attention is counted in full.

    72 s l h^2 (1 + s / 6h + V / 12 l h), the model's own work. With `recomputed`, 96 s l h^2 (1 + s / 6h + V / 16 l h):
    what the hardware does when every layer's forward runs twice (Narayanan et al., 2021, equation 3).
    """
    s, layers, h, vocab = config.sequence, config.num_layers, config.hidden, config.vocab
    factor = 96 if recomputed else 72
    return factor * s * layers * h * h * (1 + s / (6 * h) + vocab / (factor / 6 * layers * h))


def next_token_loss(logits_BSV: Tensor, targets: object) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of the targets that count, and their number.

    targets: [B, S] int64, `IGNORED` where none. The sum is fp32 for half-precision logits, else in their dtype.
    The backward overwrites the logits with their gradient, so it runs once; whatever else needs the logits after the
    backward takes a copy (autograd raises a RuntimeError where it would see changed values). Evaluation, where nothing
    requires a gradient, leaves them as they are.
    ModelError when the shapes do not fit.
    """
    if not isinstance(targets, Tensor) or targets.shape != logits_BSV.shape[:-1]:
        shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise ModelError(f"do not fit logits of shape {tuple(logits_BSV.shape)}", where="targets", value=shape,
                         remedy="Give int64 targets of shape [batch, sequence].")
    return _NextTokenLoss.apply(logits_BSV, targets), (targets != IGNORED).sum()


class _NextTokenLoss(torch.autograd.Function):
    """Cross-entropy that keeps nothing but the logits and hands their own memory back as the gradient.

    Row blocks go through one scratch block, so no second tensor of the logits' size ever exists.
    """

    @staticmethod
    def forward(ctx, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        logits_RV, targets_R = logits_BSV.flatten(0, -2), targets_BS.flatten()
        counted_R = targets_R != IGNORED
        index_R1 = targets_R.where(counted_R, 0).unsqueeze(1)
        scratch = _scratch(logits_RV)
        loss_R1 = scratch.new_empty(index_R1.shape)
        for rows, block in _row_blocks(logits_RV, scratch):
            torch.log_softmax(logits_RV[rows], dim=1, dtype=scratch.dtype, out=block)
            loss_R1[rows] = -block.gather(1, index_R1[rows])
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits_BSV, targets_BS)
        return loss_R1.squeeze(1).where(counted_R, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        logits_BSV, targets_BS = ctx.saved_tensors
        logits_RV, targets_R = logits_BSV.flatten(0, -2), targets_BS.flatten()
        counted_R = targets_R != IGNORED
        index_R1 = targets_R.where(counted_R, 0).unsqueeze(1)
        scratch = _scratch(logits_RV)
        scale_R1 = grad.to(scratch.dtype).where(counted_R, 0).unsqueeze(1)
        for rows, block in _row_blocks(logits_RV, scratch):
            torch.softmax(logits_RV[rows], dim=1, dtype=scratch.dtype, out=block)
            block.scatter_add_(1, index_R1[rows], block.new_full((len(block), 1), -1.0))
            torch.mul(block, scale_R1[rows], out=logits_RV[rows])
        return logits_RV.view_as(logits_BSV), None


def _scratch(logits_RV: Tensor) -> Tensor:
    """An empty block of rows: of a size that stays in a CPU's cache, or that makes few launches on a GPU."""
    elements = 1 << 18 if logits_RV.device.type == "cpu" else 1 << 24
    rows, vocab = logits_RV.shape
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    return logits_RV.new_empty((min(rows, max(1, elements // vocab)), vocab), dtype=wide)


def _row_blocks(logits_RV: Tensor, scratch: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Consecutive blocks of rows, each with as many rows of `scratch`."""
    total, size = len(logits_RV), max(1, len(scratch))
    for start in range(0, total, size):
        stop = min(start + size, total)
        yield slice(start, stop), scratch[:stop - start]
