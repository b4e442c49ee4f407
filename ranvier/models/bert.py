"""BERT's architecture as a list of blocks, with its initial weights, its losses and its FLOP counts.

Shapes are in the names: B batch, S sequence, H hidden, N heads, D = H / N, F = intermediate (4 H by default), C
classes. The inputs are a dict: "ids" and "types" (0 or 1: which of two texts a token belongs to), both [B, S] int64,
and "mask" [B, S], bool or int64, which is 1 for tokens and 0 for padding. The carried state is a dict, too: "hidden"
x_BSH and "mask" [B, S] bool.

    embedding -> layer0.attention -> layer0.mlp -> layer1.attention -> ... -> head

Each sublayer is norm(x + dropout(projection(f(x)))): the norm follows the residual sum (Devlin et al., 2019). Tokens
attend to all tokens that are not padding. The first token ([CLS]) never counts as padding, so that a sample of padding
alone gives finite numbers, too. Attention probabilities have no dropout.

Heads: "classes" is a pooler on the first token and a classifier, [B, C]; "span" has two scores for each token, for
being an answer's first and its last, [B, S, 2]. Scores of padding are the smallest finite number, so that no answer
begins or ends there, and the loss ignores padding (transformers does not).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ranvier.block import Model
from ranvier.config.run import Transformer
from ranvier.errors import RanvierError
from ranvier.models import family
from ranvier.tensor import layers as tensor
from ranvier.tensor.split.loss import ClassLoss, SpanLoss

NORM_EPSILON = 1e-12
"""Epsilon of the norms of the published BERT."""
NUM_TYPES = 2
"""Number of texts that one input may consist of."""
State = dict[str, Tensor]


def _norm(config: Transformer, dtype: torch.dtype) -> tensor.LayerNorm:
    return tensor.LayerNorm(config.hidden, eps=config.norm_epsilon or NORM_EPSILON, dtype=dtype)


class Embedding(nn.Module):
    """Sum of the embeddings of tokens, positions and types; norm; dropout."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.longest = config.sequence
        self.token = tensor.Embedding(config.vocab, config.hidden, dtype=dtype)
        self.position = tensor.PositionEmbedding(config.sequence, config.hidden, dtype=dtype)
        self.token_type = tensor.TokenTypeEmbedding(NUM_TYPES, config.hidden, dtype=dtype)
        self.norm = _norm(config, dtype)
        self.dropout = tensor.Dropout(config.dropout)

    def forward(self, inputs: State) -> State:
        ids_BS, mask_BS = inputs["ids"], inputs["mask"].bool()
        length = ids_BS.shape[1]
        family.check_length(length, self.longest)
        x_BSH = self.token(ids_BS) + self.position(length) + self.token_type(inputs["types"])
        is_first_S = torch.arange(length, device=mask_BS.device) == 0
        return {"hidden": self.dropout(self.norm(x_BSH)), "mask": mask_BS | is_first_S}


class Attention(family.FusedAttention):
    """Self-attention of every token to all tokens that are not padding, with its residual and norm."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, None, ("query", "key", "value"))
        self.norm = _norm(config, dtype)

    def forward(self, state: State) -> State:
        x_BSH, mask_BS = state["hidden"], state["mask"]
        y_BSH = self.projection(tensor.local_map(self.attend, self.qkv(x_BSH), mask_BS))
        return {"hidden": self.norm(self.dropout(y_BSH, onto=x_BSH)), "mask": mask_BS}


class MLP(family.TwoLayerMLP):
    """The two-layer perceptron with its residual and norm; exact GELU."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, None, family.inner_width(config))
        self.norm = _norm(config, dtype)

    def forward(self, state: State) -> State:
        x_BSH = state["hidden"]
        y_BSH = self.fc2(tensor.gelu(self.fc1(x_BSH), approximate="none"))
        return {"hidden": self.norm(self.dropout(y_BSH, onto=x_BSH)), "mask": state["mask"]}


class ClassHead(nn.Module):
    """Pooler (dense and tanh) on the first token, dropout, classifier: logits_BC."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.pooler = tensor.ClassifierHead(config.hidden, config.hidden, token=0, dtype=dtype)
        self.dropout = tensor.Dropout(config.dropout, whole=True)
        self.classifier = tensor.ReplicatedLinear(config.hidden, family.num_classes(config), dtype=dtype)

    def forward(self, state: State) -> Tensor:
        logits_BC: Tensor = self.classifier(self.dropout(torch.tanh(self.pooler(state["hidden"]))))
        return logits_BC


class SpanHead(nn.Module):
    """Scores of each token as an answer's first and last: logits_BS2."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.span = tensor.ClassifierHead(config.hidden, 2, token=None, dtype=dtype)

    def forward(self, state: State) -> Tensor:
        logits_BS2: Tensor = self.span(state["hidden"])
        return logits_BS2.masked_fill(~state["mask"][..., None], torch.finfo(logits_BS2.dtype).min)


def flops_per_sequence(config: Transformer, *, recomputed: bool = False) -> float:
    """FLOPs of training on one sequence of model.sequence tokens, padding counted as tokens, forward and backward.

    The layers' products are counted, 8 s h^2 + 4 s h f for weights and 4 s^2 h for attention in one layer's forward,
    three times; with `recomputed` four times, since every layer's forward runs twice. Heads are left out: they read one
    token, or are two features wide.
    """
    s, h, f = config.sequence, config.hidden, family.inner_width(config)
    return (4 if recomputed else 3) * config.num_layers * (8 * s * h * h + 4 * s * h * f + 4 * s * s * h)


class _BERT:
    """The family `bert`: the heads "classes", targets_B int64, and "span", {"start": [B], "end": [B]} int64."""

    def problems(self, settings: Transformer, head: str) -> list[RanvierError]:
        return [*family.wrong_head("bert", head, ("classes", "span")), *family.heads_problem(settings)]

    def model(self, settings: Transformer, head: str, *, dtype: torch.dtype = torch.float32) -> Model:
        last, loss = (ClassHead, ClassLoss()) if head == "classes" else (SpanHead, SpanLoss())
        return family.stack_layers(settings, dtype, Embedding, Attention, MLP, last, loss=loss, initial=family.initial)

    def sample(self, settings: Transformer, head: str, count: int) -> tuple[State, Tensor | dict[str, Tensor]]:
        """Inputs and targets without padding."""
        ids_BS = torch.zeros(count, settings.sequence, dtype=torch.int64)
        inputs = {"ids": ids_BS, "mask": torch.ones_like(ids_BS), "types": torch.zeros_like(ids_BS)}
        targets_B = torch.zeros(count, dtype=torch.int64)
        return inputs, targets_B if head == "classes" else {"start": targets_B, "end": targets_B.clone()}

    flops_per_sample = staticmethod(flops_per_sequence)

    def describe(self, settings: Transformer) -> family.ModelFacts:
        return family.ModelFacts(text=family.text_transformer_in_words("bert", settings), tokens=settings.sequence)


BERT = _BERT()


def bert(config: Transformer, head: str, *, dtype: torch.dtype = torch.float32) -> Model:
    """The blocks of a BERT with the head "classes" or "span"; see `family.build_blocks`."""
    return family.build_blocks(BERT, config, head, dtype=dtype)
