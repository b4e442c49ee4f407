"""Llama's architecture as a list of blocks: Llama 2 and 3, Mistral, Phi-3, Qwen 2 and 3, Gemma 1 to 3, OLMo 2 and 3,
SmolLM 2 and 3 and Granite are configurations of it (docs/models.md).

Shapes are in the names: B batch, S sequence, H hidden, N heads, K key-value heads, D width of a head, F inner
width of an MLP, V vocabulary, C scores. The carried state is one tensor: token ids_BS (int64) into the embedding, x_BSH
between blocks, logits_BSV or scores_BSC out of the head. Inputs with several packed samples are a dict, as in GPT.

    embedding -> layer0.attention -> layer0.mlp -> layer1.attention -> ... -> head

Each sublayer is x + f(norm(x)), with its residual inside the block (Touvron et al., 2023). Its RMS norm may be after f,
or on both sides. On a mesh with more columns than key-value heads, columns compute the keys that their queries need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.block import Initial, Model, State
from ranvier.config.run import Transformer
from ranvier.errors import ConfigError, RanvierError
from ranvier.models import family
from ranvier.models import packed_sequences as packed
from ranvier.models.decoding_cache import DecodingCache
from ranvier.tensor import layers as tensor
from ranvier.tensor.split.loss import LastTokenLoss, NextTokenLoss
from ranvier.tensor.split.preference_loss import RewardLoss

NORM_EPSILON = 1e-5
"""Epsilon of the norms of Llama 2 and 3."""


def kv_heads(config: Transformer) -> int:
    """K."""
    return config.kv_heads or config.heads


def head_dim(config: Transformer) -> int:
    """D."""
    return config.head_dim or config.hidden // config.heads


def window_of(config: Transformer, layer: int) -> int | None:
    """Number of tokens that a token of this layer attends to; None for all tokens before it."""
    is_full = (bool(config.full_every) and (layer + 1) % config.full_every == 0) or layer in config.full_layers
    return None if is_full else config.window


def rotary_of(config: Transformer, window: int | None) -> tensor.Rotary:
    """The rotary embeddings of layers with this window."""
    if window is not None and config.window_rope_base is not None:
        return tensor.Rotary(width=head_dim(config), base=config.window_rope_base)
    return tensor.Rotary(width=head_dim(config), base=config.rope_base, scaling=config.rope_scaling,
                         factor=config.rope_factor, positions=config.rope_positions or config.sequence,
                         limits=config.rope_limits, magnitude=config.rope_magnitude)


def _norm(config: Transformer, dtype: torch.dtype) -> tensor.RMSNorm:
    return tensor.RMSNorm(config.hidden, config.norm_epsilon or NORM_EPSILON, offset=config.norm_offset, dtype=dtype)


class Embedding(nn.Module):
    """Token embedding."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        match config.embedding_scale:
            case "one":
                self.scale = 1.0
            case "sqrt-hidden":  # rounded, as in Gemma
                self.scale = float(torch.tensor(config.hidden ** 0.5, dtype=dtype, device="cpu"))
            case factor:
                self.scale = factor
        self.token = tensor.Embedding(config.vocab, config.hidden, dtype=dtype)
        self.dropout = tensor.Dropout(config.dropout)

    def forward(self, inputs: State) -> State:
        ids_BS, segments_BS = (inputs["ids"], inputs["segments"]) if isinstance(inputs, dict) else (inputs, None)
        x_BSH = self.token(ids_BS)
        if self.scale != 1:
            x_BSH = x_BSH * self.scale
        dropped_BSH: Tensor = self.dropout(x_BSH)
        return dropped_BSH if segments_BS is None else {"hidden": dropped_BSH, "segments": segments_BS}


class Sublayer(nn.Module):
    """x + f(x) with the norms around f."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = _norm(config, dtype) if config.norms != "after" else None
        self.norm_after = _norm(config, dtype) if config.norms != "before" else None
        self.dropout = tensor.Dropout(config.dropout)
        self.multiplier = config.residual_multiplier

    def residual_branch(self, x_BSH: Tensor, segments_BS: Tensor | None) -> Tensor:
        """f of the normalized input."""
        raise NotImplementedError

    def forward(self, state: State) -> State:
        x_BSH, segments_BS = packed.hidden_and_segments(state)
        y_BSH = self.residual_branch(x_BSH if self.norm is None else self.norm(x_BSH), segments_BS)
        if self.norm_after is not None:
            y_BSH = self.norm_after(y_BSH)
        if self.multiplier != 1:
            y_BSH = y_BSH * self.multiplier
        return packed.with_hidden(state, self.dropout(y_BSH, onto=x_BSH))


class Attention(Sublayer):
    """Causal grouped-query attention with rotary embeddings, if the layer has them. window: number of tokens that a
    token attends to; None for all."""

    def __init__(self, config: Transformer, dtype: torch.dtype, window: int | None, has_rotary: bool) -> None:
        super().__init__(config, dtype)
        heads, keys, width = config.heads, kv_heads(config), head_dim(config)
        self.width, self.window, self.softcap = width, window, config.attention_softcap
        self.scale = (config.query_pre_attn_scalar or width) ** -0.5
        self.is_grouped = keys != heads
        self.rotary = rotary_of(config, window) if has_rotary else None
        self.qkv = tensor.SharedInputLinear(
            config.hidden, {"query": heads * width, "key": keys * width, "value": keys * width},
            units={"query": heads, "key": keys, "value": keys}, bias=config.bias != "none", dtype=dtype)
        self.projection = tensor.Linear(heads * width, config.hidden, bias=config.bias in ("attention", "all"),
                                        stationary="input", units=heads, dtype=dtype)
        self.norms_heads = config.qk_norm == "head"
        self.query_norm = _query_norm(config, heads, dtype)
        self.key_norm = _query_norm(config, keys, dtype)
        self.cache = DecodingCache()

    def residual_branch(self, x_BSH: Tensor, segments_BS: Tensor | None) -> Tensor:
        q_BSF, k_BSF, v_BSF = self.qkv(x_BSH)
        q_BNSD, k_BKSD, v_BKSD = (self._heads(q_BSF, self.query_norm), self._heads(k_BSF, self.key_norm),
                                  self._heads(v_BSF, None))
        y_BNSD = tensor.local_map(self._attend, q_BNSD, k_BKSD, v_BKSD, segments_BS)
        y_BSH: Tensor = self.projection(y_BNSD.transpose(1, 2).flatten(2))
        return y_BSH

    def _heads(self, x_BSF: Tensor, norm: nn.Module | None) -> Tensor:
        """[B, heads, S, D], normalized if there is a norm."""
        if norm is not None and not self.norms_heads:
            x_BSF = norm(x_BSF)
        x_BSND: Tensor = x_BSF.unflatten(-1, (-1, self.width))
        if norm is not None and self.norms_heads:
            x_BSND = norm(x_BSND)
        return x_BSND.transpose(1, 2)

    def _rotation(self, q_BNSD: Tensor, segments_BS: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The rotation of queries and keys at their positions: in a packed sample, or after the cached tokens."""
        length = q_BNSD.shape[2]
        before = self.cache.advance(length) if segments_BS is None else 0
        if self.rotary is None:
            return lambda x_BNSD: x_BNSD
        if segments_BS is not None:
            return partial(self.rotary, positions=packed.positions_of(segments_BS))
        if not before:
            return self.rotary
        positions = torch.arange(before, before + length, device=q_BNSD.device)[None]
        return partial(self.rotary, positions=positions, longest=before + length)

    def _attend(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, segments_BS: Tensor | None) -> Tensor:
        """Attention within the heads on this column, including the rotation of queries and keys."""
        turned = self._rotation(q_BNSD, segments_BS)
        q_BNSD = turned(q_BNSD)
        k_BKSD, v_BKSD = self.cache.extend(turned(k_BKSD), v_BKSD)
        mask = packed.attention_mask(q_BNSD, k_BKSD, segments_BS, window=self.window, needed=bool(self.softcap))
        if mask is not None and self.softcap:
            return self._attended_with_cap(q_BNSD, k_BKSD, v_BKSD, mask)
        return functional.scaled_dot_product_attention(
            q_BNSD, k_BKSD, v_BKSD, attn_mask=mask, is_causal=packed.is_whole_causal(q_BNSD, k_BKSD, mask),
            scale=self.scale, enable_gqa=self.is_grouped)

    def _attended_with_cap(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor) -> Tensor:
        """Attention with capped scores. No fused kernel caps scores, so all S x S of them are kept."""
        group = int(q_BNSD.shape[1] // k_BKSD.shape[1])
        if group > 1:
            k_BKSD, v_BKSD = (one.repeat_interleave(group, 1) for one in (k_BKSD, v_BKSD))
        scores_BNSS = tensor.softcap(q_BNSD.matmul(k_BKSD.transpose(2, 3)) * self.scale, self.softcap)
        scores_BNSS = scores_BNSS.masked_fill(~mask, float("-inf"))
        wide = torch.promote_types(q_BNSD.dtype, torch.float32)
        weights_BNSS = functional.softmax(scores_BNSS, dim=-1, dtype=wide).to(q_BNSD.dtype)
        return weights_BNSS.matmul(v_BKSD)


def _query_norm(config: Transformer, heads: int, dtype: torch.dtype) -> tensor.RMSNorm | None:
    """The norm of queries or keys with this many heads."""
    epsilon, width = config.norm_epsilon or NORM_EPSILON, head_dim(config)
    match config.qk_norm:
        case "head":
            return tensor.RMSNorm(width, epsilon, over="heads", offset=config.norm_offset, dtype=dtype)
        case "all":
            return tensor.RMSNorm(heads * width, epsilon, over="inner", offset=config.norm_offset, units=heads,
                                  dtype=dtype)
    return None


class MLP(Sublayer):
    """The gated perceptron: SwiGLU or GeGLU."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        width, bias = family.inner_width(config), config.bias == "all"
        self.activation = config.activation
        self.fc1 = tensor.SharedInputLinear(config.hidden, {"gate": width, "up": width}, bias=bias, dtype=dtype)
        self.fc2 = tensor.Linear(width, config.hidden, bias=bias, stationary="input", reuse_input=True, dtype=dtype)

    def residual_branch(self, x_BSH: Tensor, segments_BS: Tensor | None) -> Tensor:
        gate_BSF, up_BSF = self.fc1(x_BSH)
        y_BSH: Tensor = self.fc2(tensor.gated(gate_BSF, up_BSF, activation=self.activation))
        return y_BSH


class Head(nn.Module):
    """Final norm and the projection onto the vocabulary, without bias."""

    def __init__(self, config: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.softcap, self.divisor = config.logit_softcap, config.logits_scaling
        self.norm = _norm(config, dtype)
        self.projection = tensor.VocabularyLinear(config.hidden, config.vocab, dtype=dtype)

    def forward(self, state: State) -> Tensor:
        x_BSH, _ = packed.hidden_and_segments(state)
        logits_BSV: Tensor = self.projection(self.norm(x_BSH))
        if self.divisor != 1:
            logits_BSV = logits_BSV / self.divisor
        if self.softcap:
            logits_BSV = tensor.softcap(logits_BSV, self.softcap)
        return logits_BSV


class ScoreHead(nn.Module):
    """Final norm and scores of each token, without bias: [B, S, C]."""

    def __init__(self, config: Transformer, dtype: torch.dtype, num_scores: int) -> None:
        super().__init__()
        self.norm = _norm(config, dtype)
        self.score = tensor.ClassifierHead(config.hidden, num_scores, bias=False, token=None, dtype=dtype)

    def forward(self, state: State) -> Tensor:
        x_BSH, _ = packed.hidden_and_segments(state)
        scores_BSC: Tensor = self.score(self.norm(x_BSH))
        return scores_BSC


def num_scores(config: Transformer, head: str) -> int:
    """C of a `ScoreHead`: 1 for the head "score", and the number of classes for "classes"."""
    return 1 if head == "score" else family.num_classes(config)


def problems(config: Transformer) -> list[ConfigError]:
    """All problems of `config` for a Llama."""
    found = family.heads_problem(config, ", or `--model.head-dim`") if config.head_dim is None else []
    if not found and head_dim(config) % 2:
        found.append(ConfigError("is odd, and rotary embeddings rotate pairs of features", code="head-dim-odd",
                                 where="model.head-dim", value=head_dim(config),
                                 remedy=f"Set `--model.head-dim {head_dim(config) + 1}`."))
    if config.heads % kv_heads(config):
        near = next(heads for heads in range(min(kv_heads(config), config.heads), 0, -1) if config.heads % heads == 0)
        found.append(ConfigError(f"does not divide `model.heads` {config.heads}", code="kv-heads-do-not-divide",
                                 where="model.kv-heads", value=config.kv_heads,
                                 remedy=f"Set `--model.kv-heads {near}`."))
    if config.rope_scaling not in ("none", "linear") and config.rope_positions is None:
        found.append(ConfigError(f"is missing, and `model.rope-scaling` {config.rope_scaling} needs it",
                                 code="rope-positions-missing", where="model.rope-positions", value=None,
                                 remedy="Set it to the number of positions of the model before scaling."))
    if config.rope_limits is not None and config.rope_limits[0] >= config.rope_limits[1]:
        found.append(ConfigError("must be in ascending order", code="rope-limits-order", where="model.rope-limits",
                                 value=config.rope_limits, remedy="Give the lower limit first, for example 1,4."))
    return found


def initial(config: Transformer, name: str) -> Initial:
    """The initialization of one parameter: GPT-2's, except for the offset of norms."""
    if name.endswith(("norm.weight", "norm_after.weight")):
        return Initial("constant", 1.0 - config.norm_offset)
    return family.decoder_initial(config, name)


def flops_per_sequence(config: Transformer, *, recomputed: bool = False) -> float:
    """FLOPs of training on one sequence, forward and backward: 6 for each weight and token, and 12 S^2 N D of a layer's
    attention, which is counted in full even if it is causal or has a window. recomputed: with every layer's forward
    running twice; the head's runs once."""
    s, h, width = config.sequence, config.hidden, head_dim(config)
    weights = h * width * (2 * config.heads + 2 * kv_heads(config)) + 3 * h * family.inner_width(config)
    layer = 2 * s * weights + 4 * s * s * config.heads * width
    return float((4 if recomputed else 3) * config.num_layers * layer + 6 * s * h * config.vocab)


class _Llama:
    """The family `llama`: the head "tokens", inputs ids_BS and targets_BS int64; "classes", with the targets of
    `LastTokenLoss`; and "score", of pairs of answers, with those of `RewardLoss`."""

    def problems(self, settings: Transformer, head: str) -> list[RanvierError]:
        return [*family.wrong_head("llama", head, ("tokens", "classes", "score")), *problems(settings)]

    def model(self, settings: Transformer, head: str, *, dtype: torch.dtype = torch.float32) -> Model:
        stack = partial(family.stack_layers, settings, dtype, Embedding, Attention, MLP, initial=initial,
                        variant=lambda layer: (window_of(settings, layer), layer not in settings.nope_layers))
        if head == "tokens":
            tied = (("embedding.token.weight", "head.projection.weight"),) if settings.tied else ()
            return stack(Head, loss=NextTokenLoss(settings.vocab), tied=tied)
        return stack(partial(ScoreHead, num_scores=num_scores(settings, head)),
                     loss=RewardLoss() if head == "score" else LastTokenLoss())

    def sample(self, settings: Transformer, head: str, count: int) -> tuple[State, Tensor | dict[str, Tensor]]:
        ids_BS = torch.zeros(count, length := settings.sequence, dtype=torch.int64)
        if head == "score":
            return packed.two_segments(ids_BS), {"last": torch.tensor([length // 2, length]).repeat(count, 1) - 1}
        if head == "classes":
            zeros_B = torch.zeros_like(ids_BS[:, 0])
            return ids_BS, {"last": zeros_B + length - 1, "class": zeros_B}
        return ids_BS, ids_BS

    flops_per_sample = staticmethod(flops_per_sequence)

    def describe(self, settings: Transformer) -> family.ModelFacts:
        keys = kv_heads(settings)
        text = family.text_transformer_in_words("llama", settings)
        if keys != settings.heads:
            text = text.replace(f"{settings.heads} heads", f"{settings.heads} heads, {keys} key-value heads")
        return family.ModelFacts(text=text, tokens=settings.sequence)


LLAMA = _Llama()


def llama(config: Transformer, *, dtype: torch.dtype = torch.float32) -> Model:
    """The blocks of a Llama; see `family.build_blocks`."""
    return family.build_blocks(LLAMA, config, "tokens", dtype=dtype)
