"""One evaluation of a model on held-out samples, over all ranks: the mean loss, and the scores of the task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ranvier.block import State
from ranvier.comm.protocol import Group
from ranvier.config.resolve import ResolvedRun
from ranvier.data.loader import Loader
from ranvier.data.preference import answer_log_p
from ranvier.data.sampler import Sampler
from ranvier.data.task import Dataset, Scoring, sample_lengths
from ranvier.data.token_samples import TokenSamples
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.activations import layout_of
from ranvier.tensor.split.loss import IGNORED

SAMPLES_AT_ONCE = 256
"""Samples of a replica that are in memory at the same time in an evaluation."""
_TELL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Result of an evaluation; the same on every rank.

    loss: sum of losses over the valid targets, over their weight; NaN if nothing was valid.
    weight: of the valid targets. scores: "eval_accuracy", "eval_count", ..., as the task's scoring names them.
    """

    loss: float
    weight: float
    seconds: float
    scores: dict[str, float] = field(default_factory=dict)


def evaluate(engine: Engine, ranks: Group, loader: Loader, scoring: Callable[[], Scoring] | None,
             tell: Callable[[str], None] = lambda line: None) -> Evaluated:
    """Go through the samples of `loader` once, without dropout. Collective over `ranks`, those of the engine.

    scoring: makes the scoring of one evaluation; None for only the loss. tell: takes a line every ten seconds.
    """
    began = reported = time.monotonic()
    own_scoring = scoring() if scoring is not None and engine.is_last_stage else None
    assert loader.total is not None  # held-out samples are read once
    total = weight = 0.0
    for number in range(-(-loader.total // loader.global_size)):
        batch = loader.microbatches(number)

        def observe(place: int, output: State, batch: Sequence[Microbatch] = batch) -> None:
            samples = batch[place].samples
            assert own_scoring is not None and samples is not None  # the loader numbers them
            own_scoring.add(output, batch[place].targets, samples)

        result = engine.evaluate(batch, observe if own_scoring is not None else None)
        if result.weight:
            total, weight = total + result.loss * result.weight, weight + result.weight
        if time.monotonic() - reported > _TELL_SECONDS:
            reported = time.monotonic()
            tell(f"{min(loader.total, (number + 1) * loader.global_size):,} of {loader.total:,} samples evaluated")
    scores: dict[str, float] = {}
    if scoring is not None:
        # all columns of a row have the same outputs, so only the first counts
        part = own_scoring.part() if own_scoring is not None and engine.coordinates.is_first_with_samples else None
        scores = scoring().total([one for one in ranks.gather_objects(part) if one is not None])
    return Evaluated(loss=total / weight if weight else float("nan"), weight=weight, scores=scores,
                     seconds=time.monotonic() - began)


def evaluation_loader(run: ResolvedRun, engine: Engine, data: Dataset, total: int, *, at_once: int) -> Loader:
    """This rank's microbatches of the first `total` samples, in batches of `at_once` samples over all replicas."""
    return Loader(data, Sampler(len(data), None), global_size=min(at_once, total), total=total,
                  lengths=padded_lengths(run, data),
                  **loader_options(engine, run.batch.microbatch_size, length_multiple(run)))


def loader_options(engine: Engine, microbatch_size: int, length_multiple: int = 1) -> dict[str, Any]:
    """Arguments of a `Loader` that follow from the mesh and this rank's place on it."""
    at = engine.coordinates
    return {"microbatch_size": microbatch_size, "replica": at.batch_share, "num_replicas": engine.mesh.batch_shares,
            "part": at.microbatch_part, "num_parts": engine.mesh.microbatch_parts, "device": engine.world.device,
            "needs_inputs": engine.is_first_stage, "needs_targets": engine.is_last_stage,
            "length_multiple": length_multiple}


def lengths_of(run: ResolvedRun, data: Dataset) -> np.ndarray | None:
    """Lengths of samples by which batches are grouped; None if all are padded to the maximum."""
    return None if run.data.padding == "maximum" else sample_lengths(data)


def padded_lengths(run: ResolvedRun, data: Dataset) -> np.ndarray | None:
    """Lengths of samples by which microbatches are padded. With a cache and sequence parallelism all are padded to the
    maximum, in the same groups, since a rank's part of a sample would otherwise depend on the microbatch."""
    return None if run.elastic.cache and length_multiple(run) > 1 else lengths_of(run, data)


def length_multiple(run: ResolvedRun) -> int:
    """Number that must divide the length of a microbatch: the columns that share it, with sequence parallelism."""
    shares = layout_of(run.tensor) == "sequence"
    return run.mesh.feature_parts if shares else 1


# --- likelihood -------------------------------------------------------------------------------------------------------

# Log-likelihoods of continuations under a decoder, on any mesh, as lm-evaluation-harness needs them, and of the answers
# of pairs, for the reference of preference tuning.
# A request is a context and a continuation, as tokens. Each rank of the last stage computes log p(continuation |
# context) for its samples, so that logits never leave the rank that has them.


Request = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context, at least one, and of its continuation."""


def loglikelihoods(engine: Engine, ranks: Group, requests: Sequence[Request], *, longest: int,
                   microbatch_size: int = 4) -> list[tuple[float, bool]]:
    """(log-likelihood, whether greedy decoding generates it) of each continuation. Collective over `ranks`, those of
    the engine; all ranks get the same result.

    longest: the model's context length in tokens. The first tokens of a longer request's context are left out.
    microbatch_size: requests in one forward; a multiple of the mesh's rows.

    DataError for a request without a context, or with a continuation that is longer than `longest`.
    """
    for number, (context, continuation) in enumerate(requests):
        if not context or len(continuation) > longest:
            what = "has no context" if not context else f"is longer than the {longest} tokens that the model sees"
            raise DataError(what, code="request-length", where=f"request {number + 1}",
                            value=f"{len(continuation)} tokens",
                            remedy="Give the separator of texts as the context of a full text, and score long texts "
                                   "in windows.")
    found = [(0.0, True)] * len(requests)
    scored = [number for number, (_, continuation) in enumerate(requests) if continuation]
    if not scored:
        return found
    data = _dataset([requests[number] for number in scored], longest)
    loader = Loader(data, Sampler(len(data), None), total=len(data), lengths=data.sample_lengths,
                    global_size=min(len(data), SAMPLES_AT_ONCE * engine.mesh.num_replicas),
                    **loader_options(engine, microbatch_size))
    scores: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    _predict_all(engine, loader, lambda samples, logits, targets: scores.append(
        (samples, *continuation_scores(logits, targets))))
    counts = engine.coordinates.is_first_with_samples
    part = [entry for scores in scores for entry in _entries(*scores)] if counts else []
    for number, total, is_greedy in chain.from_iterable(ranks.gather_objects(part)):
        found[scored[number]] = total, is_greedy
    return found


def _predict_all(engine: Engine, loader: Loader, see: Callable[[Tensor, Tensor, Any], None]) -> None:
    """Predict all samples of `loader` once. see: takes (samples, logits, targets) of each microbatch."""
    for step in range(-(-len(loader.data) // loader.global_size)):
        batch = loader.microbatches(step)

        def observe(place: int, output: State, batch: Sequence[Microbatch] = batch) -> None:
            samples = batch[place].samples
            assert isinstance(output, Tensor) and samples is not None  # of a decoder
            see(samples, output, batch[place].targets)

        engine.predict(batch, observe)


def _dataset(requests: Sequence[Request], longest: int) -> TokenSamples:
    """Requests as samples of different lengths, whose targets are the continuations."""
    runs = [[*context, *continuation][-(longest + 1):] for context, continuation in requests]
    stops = np.array(list(accumulate(map(len, runs))), dtype=np.int64)
    lengths = np.array([len(run) for run in runs], dtype=np.int64)
    is_target = np.concatenate([np.arange(len(run)) >= len(run) - len(continuation)
                                for run, (_, continuation) in zip(runs, requests, strict=True)])
    return TokenSamples(np.array(list(chain.from_iterable(runs)), dtype=np.int64), stops - lengths, stops,
                        int(lengths.max()) - 1, is_target)


def continuation_scores(logits_BSV: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each sample [B]: the sum of log p over its targets, in fp32 or the logits' wider format; the number of
    targets; and how many of them have the largest logit. The softmax is over the full vocabulary of the model."""
    counts_BS = targets_BS != IGNORED
    rows = counts_BS.nonzero()[:, 0]
    logits_NV = logits_BSV[counts_BS]
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    targets_N = targets_BS[counts_BS]
    log_p_N = wide_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0]
    total_B = log_p_N.new_zeros(len(targets_BS)).index_add(0, rows, log_p_N)
    right_B = counts_BS.new_zeros(len(targets_BS), dtype=torch.int64).index_add(
        0, rows, (logits_NV.argmax(-1) == targets_N).long())
    return total_B, counts_BS.sum(1), right_B


def _entries(samples: Tensor, total: Tensor, count: Tensor, right: Tensor) -> Iterator[tuple[int, float, bool]]:
    """(sample, log-likelihood, whether it is greedy); samples without targets, which only fill up a row, are left
    out."""
    for sample, value, wanted, found in zip(samples.tolist(), total.tolist(), count.tolist(), right.tolist(),
                                            strict=True):
        if wanted:
            yield sample, value, wanted == found


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """The tokens of a context and its continuation, cut where the context's own tokens end. Blanks at the end of the
    context belong to the continuation, as words' tokens begin with a blank."""
    stripped = context.rstrip()
    if not stripped:
        return list(tokenizer.nothing), tokenizer.encode(context + continuation)
    continuation = context[len(stripped):] + continuation
    first = tokenizer.encode_from_start(stripped)
    return first, tokenizer.encode_from_start(stripped + continuation)[len(first):]


def windows(tokens: Sequence[int], prefix: Sequence[int], longest: int) -> Iterator[Request]:
    """A full text as requests whose continuations have each of its tokens once, in disjoint windows of at most
    `longest` tokens: the rolling log-likelihood of lm-evaluation-harness with a context of one token. prefix: the
    context of the first token, `Tokenizer.nothing`."""
    if not tokens:
        return
    first = min(longest, len(tokens))
    yield list(prefix), tokens[:first]
    for start in range(first, len(tokens), longest):
        stop = min(start + longest, len(tokens))
        end_context = tokens[max(stop - longest - 1, 0):start]
        yield end_context, tokens[start:stop]


def log_p_of_pairs(engine: Engine, ranks: Group, loader: Loader) -> np.ndarray:
    """[pairs, 2] float64: log p of the chosen and the rejected answer of each pair, without dropout. Collective over
    `ranks`, those of the engine; all ranks get the same result. loader: gives all pairs once."""
    assert loader.total == len(loader.data)
    found = torch.zeros(len(loader.data), 2, dtype=torch.float64, device=engine.world.device)

    def add(samples: Tensor, logits_BSV: Tensor, targets: dict[str, Tensor]) -> None:
        is_pair_B1 = (targets["tokens"] != IGNORED).any(1, keepdim=True)  # other samples only fill up a row
        log_p_B2 = answer_log_p(logits_BSV, targets).double().where(is_pair_B1, 0)
        if engine.coordinates.is_first_with_samples:  # all columns have the same
            found.index_add_(0, samples.to(found.device), log_p_B2)

    _predict_all(engine, loader, add)
    ranks.all_reduce(found).wait()  # each pair is computed by one rank
    return found.cpu().numpy()
