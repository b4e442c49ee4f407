"""Held-out loss and the task's scores over all ranks and all held-out samples, and sample text of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from ranvier.comm.protocol import Group
from ranvier.config.resolve import ResolvedRun
from ranvier.data.task import Prepared
from ranvier.data.tokenizer import Tokenizer
from ranvier.inference.evaluation import evaluate as evaluate_samples
from ranvier.mesh import Mesh
from ranvier.models.generate import Sampling, next_token
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.activations import layout_of
from ranvier.train.events import EvalEvent
from ranvier.train.runtime import RankRuntime
from ranvier.train.setup import held_out_line


def evaluate(runtime: RankRuntime, data: Prepared, step: int) -> list[EvalEvent]:
    """One evaluation of the held-out data, and one of each named set: the same samples each time, without dropout.
    Collective; the same on every rank."""
    scorings = {"": data.scoring, **{name: one.scoring for name, one in data.eval_sets.items()}}
    events = []
    with runtime.engine.averaged() if runtime.run.train.eval_ema and runtime.run.optim.ema else nullcontext():
        for name, loader in runtime.eval_data.items():
            found = evaluate_samples(runtime.engine, runtime.ranks, loader, scorings[name])
            events.append(EvalEvent(step=step, loss=found.loss, tokens=found.weight, seconds=found.seconds,
                                    scores=found.scores, name=name))
    return events


_SAMPLING = Sampling(temperature=0.8, top_k=40)


def sample_text(engine: Engine, ranks: Group, run: ResolvedRun, data: Prepared, device: torch.device) -> str:
    """The prompt, and what the model makes of it, for the task lm. Collective."""
    tokenizer = data.tokenizer
    assert isinstance(tokenizer, Tokenizer)  # of the task lm
    prompt = tokenizer.encode_from_start(run.train.prompt) if run.train.prompt else held_out_line(data)
    by_positions = layout_of(run.tensor) == "sequence"
    tokens = continue_tokens(engine, ranks, run.mesh, device, prompt, seed=run.seed, count=run.train.sample_tokens,
                             longest=run.model.sequence, vocab=tokenizer.vocab,
                             multiple=run.mesh.feature_parts if by_positions else 1)
    return tokenizer.decode(tokens)


def continue_tokens(engine: Engine, ranks: Group, mesh: Mesh, device: torch.device, prompt: Sequence[int], *,
                    count: int, longest: int, vocab: int, seed: int, multiple: int = 1) -> list[int]:
    """`prompt` followed by `count` tokens of the model's. Collective: every rank calls it and gets the same.

    prompt: at least one token. longest: tokens that the model can see at once; the text slides past it.
    vocab: tokens that the tokenizer knows; the model may have more. multiple: of what the model's sequences must be;
    tokens that come later in a causal model do not matter, so the text is filled up with some.

    The last stage of replica 0 draws each token and tells the others; all replicas work on the same text.
    """
    tokens = list(prompt)
    root = engine.rank_of_outputs()
    chosen = torch.zeros(1, dtype=torch.int64)
    for _ in range(count):
        last = tokens[-longest:]
        filled = last + last[-1:] * (-len(last) % multiple)
        seen = torch.tensor([filled], dtype=torch.int64, device=device)
        outputs = engine.predict([Microbatch(inputs=seen if engine.is_first_stage else None,
                                             samples=torch.zeros(1, dtype=torch.int64))])
        if ranks.ranks[ranks.index] == root:
            assert outputs is not None and isinstance(outputs[0], torch.Tensor)  # the last stage of a language model
            logits_V = outputs[0][0, len(last) - 1, :vocab]
            chosen[0] = next_token(logits_V, replace(_SAMPLING, seed=seed), position=len(tokens))
        ranks.broadcast(chosen, root=ranks.ranks.index(root)).wait()
        tokens.append(int(chosen))
    return tokens
