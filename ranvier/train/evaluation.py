"""Held-out loss and the task's scores over all ranks and all held-out samples; sample text of a language model, and
what a reader can expect of it.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from ranvier.comm.protocol import Group
from ranvier.config.resolve import ResolvedRun
from ranvier.data.task import Dataset, Prepared
from ranvier.data.tokenizer import Tokenizer
from ranvier.inference.evaluation import evaluate as evaluate_samples
from ranvier.inference.evaluation import length_multiple
from ranvier.inference.generate import token_batch
from ranvier.models.token_sampling import Sampling, next_token
from ranvier.pipeline.engine import Engine
from ranvier.tensor.split.loss import IGNORED
from ranvier.train.events import EvalEvent
from ranvier.train.runtime import RankRuntime
from ranvier.train.setup import held_out_line

COUNTED_TOKENS = 1 << 18
"""Training tokens that `frequency_entropy` counts, at most about."""


def evaluate(runtime: RankRuntime, data: Prepared, step: int) -> list[EvalEvent]:
    """One evaluation of the held-out data, and one of each named set: the same samples each time, without dropout.
    Collective; the same on every rank."""
    scorings = {"": data.scoring, **{name: eval_set.scoring for name, eval_set in data.eval_sets.items()}}
    events = []
    averaged = runtime.engine.averaged() if runtime.run.train.eval_ema and runtime.run.optim.ema else nullcontext()
    with runtime.measured.step(), averaged:
        for name, loader in runtime.eval_data.items():
            found = evaluate_samples(runtime.engine, runtime.ranks, loader, scorings[name])
            events.append(EvalEvent(step=step, loss=found.loss, tokens=found.weight, seconds=found.seconds,
                                    scores=found.scores, name=name))
    return events


_SAMPLING = Sampling(temperature=0.8, top_k=40)


def sample_text(engine: Engine, ranks: Group, run: ResolvedRun, data: Prepared) -> str:
    """The prompt and the model's continuation, for the task lm; text longer than the model's context uses a sliding
    window. Collective: every rank calls this and gets the same text.

    The last stage of replica 0 samples each token and broadcasts it; all replicas work on the same text.
    """
    tokenizer = data.tokenizer
    assert isinstance(tokenizer, Tokenizer)  # of the task lm
    tokens = list(tokenizer.encode_from_start(run.train.prompt) if run.train.prompt else held_out_line(data))
    root, multiple = engine.rank_of_outputs(), length_multiple(run)
    chosen = torch.zeros(1, dtype=torch.int64)
    for _ in range(run.train.sample_tokens):
        seen = tokens[-run.model.sequence:]
        # Later tokens do not matter in a causal model, so the text is padded with repeats of its last one.
        outputs = engine.predict([token_batch(engine, seen + seen[-1:] * (-len(seen) % multiple), 0)])
        if ranks.ranks[ranks.index] == root:
            assert outputs is not None and isinstance(outputs[0], torch.Tensor)  # the last stage of a language model
            logits_V = outputs[0][0, len(seen) - 1, :tokenizer.vocab]  # the model may have more outputs
            chosen[0] = next_token(logits_V, replace(_SAMPLING, seed=run.seed), position=len(tokens))
        ranks.broadcast(chosen, root=ranks.ranks.index(root)).wait()
        tokens.append(int(chosen))
    return tokenizer.decode(tokens)


def frequency_entropy(data: Dataset) -> float:
    """Entropy in nats of the frequencies of single tokens, over samples from all of `data`, whose targets are tokens.

    A model with this loss has learned how frequent each token is, and nothing about their order.
    """
    first = data.targets(np.zeros(1, np.int64))
    assert isinstance(first, torch.Tensor)  # of a task that writes text
    samples = np.unique(np.linspace(0, len(data) - 1, max(1, COUNTED_TOKENS // first.numel())).astype(np.int64))
    targets = data.targets(samples)
    assert isinstance(targets, torch.Tensor)
    counts = torch.bincount(targets[targets != IGNORED])
    frequencies = counts[counts > 0].double() / counts.sum()
    return -float((frequencies * frequencies.log()).sum())


def expectation(loss: float | None, entropy: float) -> str:
    """The sentence above the sample text. loss: held-out loss in nats per token. entropy: from `frequency_entropy`."""
    if loss is None or not math.isfinite(loss):
        return "sample text (no held-out loss says how good it can be):"
    if loss >= entropy:
        return (f"sample text: expect random tokens. The held-out loss is {loss:.2f} per token, and the frequencies of "
                f"single tokens alone give {entropy:.2f}: the model has not learned their order yet; train longer.")
    return (f"sample text: the held-out loss is {loss:.2f} per token, as uncertain as a choice among "
            f"{math.exp(loss):,.0f} tokens; the frequencies of single tokens alone give {entropy:.2f}.")
