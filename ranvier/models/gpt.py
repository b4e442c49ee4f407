"""GPT-2's architecture as a list of blocks, with its initial weights, its loss and its FLOP counts.

Shapes are in the names: B batch, S sequence, H hidden, N heads, D = H / N, F = 4 H, V vocabulary. The carried state is
one tensor: token ids_BS (int64) into the embedding, x_BSH between blocks, logits_BSV out of the head. Sequences of
several packed samples are a dict, {"ids": ids_BS, "segments": segments_BS} (`ranvier.models.packed_sequences`), and
then so is the state between blocks: {"hidden": x_BSH, "segments": segments_BS}.

    embedding -> layer0.attention -> layer0.mlp -> layer1.attention -> ... -> head

Each sublayer is x + projection(f(norm(x))), with its residual inside the block (Radford et al., 2019). Unless
`model.untied` says otherwise, the head's projection is tied to the token embedding: two parameters in two blocks,
declared as one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.block import Model, State
from ranvier.config.run import Transformer
from ranvier.errors import RanvierError
from ranvier.models import family
from ranvier.models import packed_sequences as packed
from ranvier.models.decoding_cache import DecodingCache
from ranvier.tensor import layers as tensor
from ranvier.tensor.split.loss import NextTokenLoss


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.longest = config.sequence
        self.token = tensor.Embedding(config.vocab, config.hidden, dtype=dtype)
        self.position = tensor.PositionEmbedding(config.sequence, config.hidden, dtype=dtype)
        self.dropout = tensor.Dropout(config.dropout)
        self.cache = DecodingCache()

    def forward(self, inputs: State) -> State:
        ids_BS, segments_BS = (inputs["ids"], inputs["segments"]) if isinstance(inputs, dict) else (inputs, None)
        before = self.cache.advance(ids_BS.shape[1])
        length = before + ids_BS.shape[1]
        family.check_length(length, self.longest)
        positions: int | Tensor = length if segments_BS is None else packed.positions_of(segments_BS)
        if before:
            positions = torch.arange(before, length, device=ids_BS.device).expand_as(ids_BS)
        x_BSH: Tensor = self.dropout(self.token(ids_BS) + self.position(positions))
        return x_BSH if segments_BS is None else {"hidden": x_BSH, "segments": segments_BS}


class Attention(family.FusedAttention):
    """Causal self-attention with its norm and residual."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, tensor.LayerNorm(config.hidden, dtype=dtype))
        self.cache = DecodingCache()

    def forward(self, state: State) -> State:
        x_BSH, segments_BS = packed.hidden_and_segments(state)
        y_BSH: Tensor = self.projection(tensor.local_map(self._attend, self.qkv(self.norm(x_BSH)), segments_BS))
        return packed.with_hidden(state, self.dropout(y_BSH, onto=x_BSH))

    def _attend(self, qkv_BSF: Tensor, segments_BS: Tensor | None) -> Tensor:
        """Attention within the heads on this column."""
        q_BNSD, k_BNSD, v_BNSD = self.heads(qkv_BSF)
        k_BNSD, v_BNSD = self.cache.extend(k_BNSD, v_BNSD)
        mask = packed.attention_mask(q_BNSD, k_BNSD, segments_BS)
        y_BNSD = functional.scaled_dot_product_attention(
            q_BNSD, k_BNSD, v_BNSD, attn_mask=mask, is_causal=packed.is_whole_causal(q_BNSD, k_BNSD, mask))
        return y_BNSD.transpose(1, 2).flatten(2)


class MLP(family.TwoLayerMLP):
    """The two-layer perceptron with its norm and residual; GELU by its tanh approximation, as in GPT-2."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, tensor.LayerNorm(config.hidden, dtype=dtype), 4 * config.hidden)

    def forward(self, state: State) -> State:
        x_BSH, _ = packed.hidden_and_segments(state)
        y_BSF = tensor.gelu(self.fc1(self.norm(x_BSH)))
        return packed.with_hidden(state, self.dropout(self.fc2(y_BSF), onto=x_BSH))


class Head(nn.Module):
    """Final norm and the projection onto the vocabulary, without bias."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = tensor.LayerNorm(config.hidden, dtype=dtype)
        self.projection = tensor.VocabularyLinear(config.hidden, config.vocab, dtype=dtype)

    def forward(self, state: State) -> Tensor:
        x_BSH, _ = packed.hidden_and_segments(state)
        logits_BSV: Tensor = self.projection(self.norm(x_BSH))
        return logits_BSV


def flops_per_sequence(config: Transformer, *, recomputed: bool = False) -> float:
    """FLOPs of training on one sequence, forward and backward; causal attention is counted in full.

    72 s l h^2 (1 + s / 6h + V / 12 l h), the model's own work. With `recomputed`, 96 s l h^2 (1 + s / 6h + V / 16 l h):
    the hardware's work when every layer's forward runs twice (Narayanan et al., 2021, equation 3).
    """
    s, layers, h, vocab = config.sequence, config.num_layers, config.hidden, config.vocab
    factor = 96 if recomputed else 72
    return factor * s * layers * h * h * (1 + s / (6 * h) + vocab / (factor / 6 * layers * h))


class _GPT:
    """The family `gpt`: the head "tokens", inputs ids_BS and targets_BS int64."""

    def problems(self, settings: Transformer, head: str) -> list[RanvierError]:
        return [*family.wrong_head("gpt", head, ("tokens",)), *family.heads_problem(settings)]

    def model(self, settings: Transformer, head: str, *, dtype: torch.dtype = torch.float32) -> Model:
        tied = () if settings.untied else (("embedding.token.weight", "head.projection.weight"),)
        return family.stack_layers(settings, dtype, Embedding, Attention, MLP, Head, loss=NextTokenLoss(settings.vocab),
                                   initial=family.decoder_initial, tied=tied)

    def sample(self, settings: Transformer, head: str, count: int) -> tuple[Tensor, Tensor]:
        ids_BS = torch.zeros(count, settings.sequence, dtype=torch.int64)
        return ids_BS, ids_BS

    flops_per_sample = staticmethod(flops_per_sequence)

    def describe(self, settings: Transformer) -> family.ModelFacts:
        return family.ModelFacts(text=family.text_transformer_in_words("gpt", settings), tokens=settings.sequence)


GPT = _GPT()


def gpt(config: Transformer, *, dtype: torch.dtype = torch.float32) -> Model:
    """The blocks of a GPT; see `family.build_blocks`."""
    return family.build_blocks(GPT, config, "tokens", dtype=dtype)
