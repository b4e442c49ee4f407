"""Text from the model that was just trained: the proof of it that a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ranvier.comm.protocol import Group
from ranvier.mesh import Coordinates, Mesh
from ranvier.models.block import State
from ranvier.models.generate import next_token
from ranvier.pipeline.microbatch import Microbatch

_TEMPERATURE, _TOP_K = 0.8, 40


class Predictor(Protocol):
    """What sampling asks of the engine."""

    is_first_stage: bool
    is_last_stage: bool

    def predict(self, microbatches: Sequence[Microbatch]) -> list[State] | None: ...


def continue_tokens(engine: Predictor, ranks: Group, mesh: Mesh, device: torch.device, prompt: Sequence[int], *,
                    count: int, longest: int, vocab: int, seed: int, multiple: int = 1) -> list[int]:
    """`prompt` followed by `count` tokens of the model's. Collective: every rank calls it and gets the same.

    prompt: at least one token. longest: tokens that the model can see at once; the text slides past it.
    vocab: tokens that the tokenizer knows; the model may have more. multiple: of what the model's sequences must be;
    tokens that come later in a causal model do not matter, so the text is filled up with some.

    The last stage of replica 0 draws each token and tells the others; all replicas work on the same text.
    """
    tokens = list(prompt)
    root = mesh.rank(Coordinates(pipe=mesh.pipe - 1))
    chosen = torch.zeros(1, dtype=torch.int64)
    for _ in range(count):
        last = tokens[-longest:]
        filled = last + last[-1:] * (-len(last) % multiple)
        seen = torch.tensor([filled], dtype=torch.int64, device=device)
        outputs = engine.predict([Microbatch(inputs=seen if engine.is_first_stage else None,
                                             samples=torch.zeros(1, dtype=torch.int64))])
        if ranks.ranks[ranks.index] == root:
            logits_V = outputs[0][0, len(last) - 1, :vocab]
            chosen[0] = next_token(logits_V, seed=seed, position=len(tokens), temperature=_TEMPERATURE, top_k=_TOP_K)
        ranks.broadcast(chosen, root=ranks.ranks.index(root)).wait()
        tokens.append(int(chosen))
    return tokens
