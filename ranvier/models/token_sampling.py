"""Sampling of the next token from logits, keyed so that a text can be generated again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier import keyed_random
from ranvier.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for drawing a token from softmax(logits / temperature).

    Attributes:
        temperature: 0 takes the most likely token (greedy decoding).
        top_k: number of the most likely tokens to draw from, with those as likely as the last of them; None for all.
        top_p: draw only from the most likely tokens whose probabilities sum to this (Holtzman et al., 2020).
        repetition_penalty: divides positive logits of tokens that are already in the text, and multiplies negative ones
            (Keskar et al., 2019).
        seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise a ConfigError for invalid values."""
        for name, value, wrong, remedy in (
                ("temperature", self.temperature, not 0 <= self.temperature < float("inf"), "Use 0 or more."),
                ("top-k", self.top_k, self.top_k is not None and self.top_k < 1, "Use 1 or more, or leave it out."),
                ("top-p", self.top_p, not 0 < self.top_p <= 1, "Use more than 0, and at most 1."),
                ("repetition-penalty", self.repetition_penalty, not 0 < self.repetition_penalty < float("inf"),
                 "Use more than 0; 1 is no penalty.")):
            if wrong:
                raise ConfigError("cannot be sampled with", code="sampling-value", where=name, value=value,
                                  remedy=remedy)


def next_token(logits_V: Tensor, sampling: Sampling, *, position: int, text: int = 0,
               earlier: Collection[int] = ()) -> int:
    """One token number.

    logits_V: [V], those of the tokenizer's tokens. earlier: the tokens of the text, for the penalty. The draw depends
    on (seed, text, position) alone. It uses the Gumbel-max trick: the largest of logits plus Gumbel noise.
    """
    scores_V = logits_V.detach().to("cpu", torch.float64)
    if sampling.repetition_penalty != 1:
        repeated = torch.tensor([token for token in set(earlier) if token < len(scores_V)], dtype=torch.int64)
        scores = scores_V[repeated]
        scores_V = scores_V.index_copy(0, repeated, torch.where(
            scores < 0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty))
    if sampling.temperature == 0:
        return int(scores_V.argmax())
    scores_V = scores_V / sampling.temperature
    order = scores_V.argsort(descending=True, stable=True)
    if sampling.top_k is not None:
        order = order[scores_V[order] >= scores_V[order[:sampling.top_k][-1]]]
    probabilities = scores_V[order].softmax(0)
    order = order[probabilities.cumsum(0) - probabilities < sampling.top_p]
    kept_V = torch.full_like(scores_V, -torch.inf).index_copy(0, order, scores_V[order])
    name = ("next token", sampling.seed, position) if text == 0 else ("next token", sampling.seed, position, text)
    chance_V = keyed_random.uniform(keyed_random.key(*name), torch.arange(len(scores_V)))
    return int((kept_V - (-chance_V.log()).log()).argmax())
