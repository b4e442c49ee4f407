"""How answers to questions are judged: SQuAD 1.1's exact match and F1 (Rajpurkar et al., 2016), as fractions.

In each window the best span is looked for among the 20 best first and 20 best last tokens of its context, at most 30
tokens long; of a question's windows the one with the best span answers.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ranvier.block import State
from ranvier.tensor.split.loss import IGNORED

BEST = 20
"""First and last tokens that are tried, the best of each."""
LONGEST = 30
"""Tokens of an answer."""


class Answers:
    """F1 and exact match in one evaluation.

    firsts, lengths: of all windows, the place of the context's first token and the number of tokens.
    text: (window, first token, last token) -> the question's number and what the window's text has there.
    right: by question, its right answers.
    """

    def __init__(self, firsts: np.ndarray, lengths: np.ndarray, text: Callable[[int, int, int], tuple[int, str]],
                 right: Sequence[Sequence[str]]) -> None:
        self._firsts, self._lengths, self._text, self._right = firsts, lengths, text, right
        self._found: list[tuple[Tensor, ...]] = []

    def add(self, output: State, targets: dict[str, Tensor], samples: Tensor) -> None:
        """output: [b, S, 2] scores of being the first and the last token, or a dict of this one tensor."""
        logits = output if isinstance(output, Tensor) else next(iter(output.values()))
        numbers = samples.cpu().numpy()
        context = torch.from_numpy(np.stack([self._firsts[numbers], self._lengths[numbers] - 1])).to(logits.device)
        score, first, last = best_spans(logits, *context)
        counts = (targets["start"] != IGNORED) & (targets["end"] != IGNORED)
        self._found.append((samples, counts, score, first, last))

    def part(self) -> list[list[float | None]]:
        """[window, score, first token, last token] of each window; without a span the score is null."""
        return [[window, score if math.isfinite(score) else None, first, last]
                for batch in self._found
                for window, counts, score, first, last in zip(*(tensor.tolist() for tensor in batch), strict=True)
                if counts]

    def total(self, parts: Sequence[list[list[Any]]]) -> dict[str, float]:
        """Over the questions of which any window was seen."""
        best: dict[int, tuple[float, int, str]] = {}
        for window, score, first, last in (entry for part in parts for entry in part):
            question, text = self._text(window, first, last)
            found = (-math.inf, -window, "") if score is None else (score, -window, text)
            best[question] = max(best.get(question, found), found)
        exact, f1 = (sum(max(metric(text, answer) for answer in self._right[question])
                         for question, (_, _, text) in best.items()) / len(best) if best else math.nan
                     for metric in (exact_match, f1_score))
        return {"eval_accuracy": exact, "eval_exact_match": exact, "eval_f1": f1, "eval_count": len(best)}


def best_spans(logits: Tensor, firsts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each window [b] the best span's score (-inf where there is none), first and last token. The context's tokens
    are from `firsts` up to before `stops`."""
    place = torch.arange(logits.shape[1], device=logits.device)
    outside = (place < firsts[:, None]) | (place >= stops[:, None])
    scores = torch.nan_to_num(logits.float(), nan=-math.inf).masked_fill(outside[..., None], -math.inf)
    count = min(BEST, logits.shape[1])
    (first_scores, first), (last_scores, last) = (ends.topk(count, dim=1) for ends in scores.unbind(-1))
    length = last[:, None, :] - first[:, :, None]
    both = (first_scores[:, :, None] + last_scores[:, None, :]).masked_fill((length < 0) | (length >= LONGEST),
                                                                            -math.inf)
    score, which = both.flatten(1).max(1)
    take = torch.stack([which // count, which % count])
    return score, first.gather(1, take[0, :, None])[:, 0], last.gather(1, take[1, :, None])[:, 0]


def normalised(answer: str) -> str:
    """Lower case, without punctuation, articles and blanks that say nothing, in this order."""
    plain = "".join(character for character in answer.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(answer: str, right: str) -> float:
    """1.0 where both are the same once they are normalised, else 0.0."""
    return float(normalised(answer) == normalised(right))


def f1_score(answer: str, right: str) -> float:
    """Harmonic mean of precision and recall of words."""
    said, wanted = normalised(answer).split(), normalised(right).split()
    same = (Counter(said) & Counter(wanted)).total()
    return 2 * same / (len(said) + len(wanted)) if same else 0.0
