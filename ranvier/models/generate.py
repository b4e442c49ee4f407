"""Which token comes next: sampling from logits, keyed so that a text can be written again."""

from __future__ import annotations

import torch
from torch import Tensor

from ranvier import keyed_random


def next_token(logits_V: Tensor, *, seed: int, position: int, temperature: float = 1.0,
               top_k: int | None = None) -> int:
    """One token number, drawn from softmax(logits / temperature) over the `top_k` largest logits (all by default).

    logits_V: [V], those of tokens that the tokenizer knows. Temperature 0 takes the most likely token. The draw
    depends on (seed, position) alone. It is the Gumbel-max trick: the largest of logits plus Gumbel noise.
    ValueError for a negative temperature or a `top_k` below 1.
    """
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature {temperature} must not be negative and top_k {top_k} must be at least 1")
    scores_V = logits_V.detach().to("cpu", torch.float64)
    if temperature == 0:
        return int(scores_V.argmax())
    if top_k is not None and top_k < len(scores_V):
        kept = scores_V.topk(top_k).indices
        scores_V = torch.full_like(scores_V, -torch.inf).index_copy(0, kept, scores_V[kept])
    chance_V = keyed_random.uniform(keyed_random.key("next token", seed, position), torch.arange(len(scores_V)))
    return int((scores_V / temperature - (-chance_V.log()).log()).argmax())
