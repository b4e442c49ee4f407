"""The task qa: the span of a text that answers a question. Samples are questions with windows of their texts.

    inputs    {"ids": [B, L], "mask": [B, L], "types": [B, L]} int64; types are 1 in the context, its [SEP] included
    targets   {"start": [B], "end": [B]} int64, places of the answer's first and last token; 0 where it is elsewhere

A sample is a window of tokens, as in BERT: [CLS] question [SEP] part of the context [SEP]. A context that does not fit
next to its question gives several windows, each `step_of` tokens after the previous one. In a window that does not
contain the full answer, the target of both its ends is [CLS] (Devlin et al., 2019, section 4.2).
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ranvier.block import State
from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED
from ranvier.data import run_tokenizer as tokenizers
from ranvier.data.arrays import Arrays, made_once, write_arrays
from ranvier.data.cache import Progress, cache_folder, fingerprint
from ranvier.data.named_files import first_looks, name_problems, text_only, training_name
from ranvier.data.padding import padding_of
from ranvier.data.run_tokenizer import run_tokenizer
from ranvier.data.squad import NAMES, Question, look_at_small, open_part, read_questions
from ranvier.data.subset import Subset, numbers_taken, subset_settings
from ranvier.data.task import Prepared, Task
from ranvier.data.token_samples import EncoderTexts
from ranvier.data.wordpiece import WordPiece
from ranvier.errors import DataError, RanvierError
from ranvier.tensor.split.loss import IGNORED

FORM = "squad or a JSON file in SQuAD 1.1's form"
"""Description of the accepted forms of data."""
SHORTEST_SEQUENCE = 5
"""[CLS], a question, [SEP], a token of the context, [SEP]."""


class Windows(EncoderTexts):
    """All windows of some questions; the context is the second text."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__(arrays)
        self._starts, self._ends, self.questions = (arrays.arrays[name] for name in ("starts", "ends", "questions"))
        self._places = arrays.arrays.get("places")

    def targets(self, samples: np.ndarray, length: int | None = None) -> dict[str, Tensor]:
        """length: has no effect, since an answer has a first and a last token."""
        return {"start": torch.from_numpy(self._starts[samples].astype(np.int64)),
                "end": torch.from_numpy(self._ends[samples].astype(np.int64))}

    def characters(self, window: int, first: int, last: int) -> tuple[int, int]:
        """Start and stop of these tokens' text in the context; for held-out windows."""
        assert self._places is not None, "training windows have no places of tokens"
        return int(self._places[window, first, 0]), int(self._places[window, last, 1])


class QuestionAnswering(Task):
    """The task `qa`: questions with windows of their texts."""

    form = SHIPPED["qa"]

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """Problems of the data settings that can be found without reading a large file."""
        found: list[RanvierError] = [
            *name_problems(run.data, NAMES, FORM), *first_looks(run.data, NAMES, look_at_small), *text_only(run.data),
            *tokenizers.problems(run)]
        if run.model.sequence < SHORTEST_SEQUENCE:
            found.append(DataError(
                "is too short for a question and a token of its context", code="sequence-too-short-for-question",
                where="model.sequence", value=run.model.sequence,
                remedy=f"Set `--model.sequence {SHORTEST_SEQUENCE}` or more, better 384."))
        return found

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Tokenised windows of this run (see ranvier.data.prepare). train_samples and eval_samples count questions."""
        cache, data, sequence = cache_folder(run), run.data, run.model.sequence
        train = open_part(training_name(data), "train", progress)
        held = None if data.eval is None else open_part(data.eval, "eval", progress)
        source = fingerprint(train.fingerprint, held and held.fingerprint)
        tokenizer = run_tokenizer(run, lambda: _texts(read_questions(train, held)[0]), source, progress)
        folder = cache / "qa" / fingerprint(source, tokenizer.fingerprint, sequence, step_of(sequence))

        def make() -> None:
            progress(f"tokenising {data.train}")
            _write(folder, *read_questions(train, held), tokenizer, sequence)

        arrays = made_once(folder, make, progress)
        whole = list(map(Windows, arrays))
        rows = [np.arange(len(part)) if taken is None else np.flatnonzero(np.isin(part.questions, taken))
                for part, taken in zip(whole, numbers_taken(run, [
                    int(part.questions[-1]) + 1 for part in whole]), strict=True)]
        used = list(map(Subset, whole, rows))
        numbers = [len(np.unique(part.questions[own])) for part, own in zip(whole, rows, strict=True)]
        return Prepared(
            train=used[0], eval=used[1], tokenizer=tokenizer, weight=1.0, padding=padding_of(used[0], run),
            scoring=_scoring(whole[1], rows[1], arrays[1]),
            transform=fingerprint(tokenizer.fingerprint, sequence, step_of(sequence)),
            fingerprint=fingerprint("qa", tokenizer.fingerprint, [part.digest for part in arrays],
                                    subset_settings(run)),
            about=f"{data.train}: {numbers[0]:,} questions in {len(used[0]):,} windows, "
                  f"{numbers[1]:,} in {len(used[1]):,} held out")


QA = QuestionAnswering()
"""The task; it has no state."""


def _texts(questions: list[Question]) -> list[str]:
    return [*dict.fromkeys(question.context for question in questions), *(question.text for question in questions)]


def _scoring(held: Windows, rows: np.ndarray, arrays: Arrays) -> Callable[[], Answers]:
    contexts, questions = arrays.names("contexts"), cast("list[dict[str, Any]]", arrays.facts["questions"])

    def text(window: int, first: int, last: int) -> tuple[int, str]:
        question = int(held.questions[rows[window]])
        start, stop = held.characters(rows[window], first, last)
        return question, contexts[questions[question]["context"]][start:stop]

    return partial(Answers, held.firsts[rows], held.sample_lengths[rows], text,
                   [question["answers"] for question in questions])


def _write(folder: Path, train: list[Question], held: list[Question], tokenizer: WordPiece, sequence: int) -> None:
    """Write the windows. Texts and correct answers are stored only for held-out questions: training does not need
    them."""
    contexts = {text: number for number, text in enumerate(dict.fromkeys(question.context for question in held))}
    write_arrays(folder / "eval", windows(held, tokenizer, sequence, with_places=True), {
        "contexts": list(contexts), "questions": [
            {"context": contexts[question.context], "answers": [text for text, _ in question.answers]}
            for question in held]})
    write_arrays(folder / "train", windows(train, tokenizer, sequence, with_places=False), {})


# --- windows ---------------------------------------------------------------------------------------------------------

MOST_QUESTION_TOKENS = 64
"""Longer questions are cut."""
_CONTEXTS = 500


def step_of(sequence: int) -> int:
    """Tokens from one window to the next: BERT's 128 for its 384 tokens, and a third of shorter sequences."""
    return max(1, min(128, sequence // 3))


def windows(questions: Sequence[Question], tokenizer: WordPiece, sequence: int, *,
            with_places: bool) -> dict[str, npt.NDArray[Any]]:
    """All windows of the questions, in their order. The first dim of each array is the windows, N; S is `sequence`:

        ids [N, S]           tokens, padded with [PAD]
        lengths [N]          number of tokens
        firsts [N]           place of the first token of the context
        starts, ends [N]     places of the first and last token of the answer, 0 if it is elsewhere
        questions [N]        number of the question
        places [N, S, 2]     if with_places: (start, stop) characters of each token of the context

    DataError if a question leaves no space for the context.
    """
    found: list[dict[str, npt.NDArray[Any]]] = []
    encoded = [ids[:MOST_QUESTION_TOKENS] for ids in tokenizer.encode([question.text for question in questions])]
    for number, context_ids, characters in _contexts(questions, tokenizer):
        for window in _question_samples(number, questions[number], encoded[number], context_ids, characters, tokenizer,
                                        sequence):
            if not with_places:
                del window["places"]
            found.append(window)
    return {name: np.stack([window[name] for window in found]) for name in found[0]}


def _contexts(questions: Sequence[Question],
              tokenizer: WordPiece) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
    """Number of each question, its context's tokens, and their characters [tokens, 2]; repeated contexts are encoded
    once."""
    for start in range(0, len(questions), _CONTEXTS):
        part = questions[start:start + _CONTEXTS]
        texts = list(dict.fromkeys(question.context for question in part))
        tokens = {text: (np.array(ids, dtype=np.int32), np.array(places, dtype=np.int32).reshape(-1, 2))
                  for text, (ids, places) in zip(texts, tokenizer.encode_with_places(texts), strict=True)}
        for number, question in enumerate(part, start=start):
            yield number, *tokens[question.context]


def _question_samples(number: int, question: Question, asked: list[int], context: npt.NDArray[np.int32],
                      characters: npt.NDArray[np.int32], tokenizer: WordPiece,
                      sequence: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    room = sequence - len(asked) - 3
    if room < 1:
        raise DataError(f"leaves no space for its context in {sequence} tokens", code="question-too-long",
                        where=question.place, value=f"{len(asked)} tokens",
                        remedy=f"Set `--model.sequence {len(asked) + 4}` or more, better three times that many.")
    text, first = question.answers[0]
    inside = np.flatnonzero((characters[:, 1] > first) & (characters[:, 0] < first + len(text)))
    answer = (int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1)
    begin, stop = 0, False
    while not stop:
        part = context[begin:begin + room]
        stop = begin + len(part) >= len(context)
        row = [tokenizer.cls, *asked, tokenizer.sep, *part.tolist(), tokenizer.sep]
        ids = np.full(sequence, tokenizer.pad, dtype=np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32)
        ids[:len(row)] = row
        offset = len(asked) + 2
        places = np.zeros((sequence, 2), dtype=np.int32)
        places[offset:offset + len(part)] = characters[begin:begin + len(part)]
        here = begin <= answer[0] and answer[1] < begin + len(part)
        ends = [end - begin + offset if here else 0 for end in answer]
        yield {"ids": ids, "places": places, **{name: np.array(value, dtype=np.int32) for name, value in (
            ("lengths", len(row)), ("firsts", offset), ("starts", ends[0]), ("ends", ends[1]), ("questions", number))}}
        begin += min(room, step_of(sequence))


# --- how answers are judged ------------------------------------------------------------------------------------------

# SQuAD 1.1's exact match and F1 (Rajpurkar et al., 2016), as fractions. In each window, the best span is searched among
# the 20 best first and 20 best last tokens of its context, at most 30 tokens long; the best span of all windows of a
# question is its answer.
BEST = 20
"""Number of first tokens, and of last tokens, that are tried."""
LONGEST = 30
"""Most tokens of an answer."""


class Answers:
    """F1 and exact match in one evaluation.

    firsts, lengths: of all windows, the place of the context's first token and the number of tokens. text: (window,
    first token, last token) -> the question's number and the text there. right: by question, its correct answers.
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
        """The scores over all questions with at least one window."""
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
    """Score (-inf without a span), first and last token of each window's [b] best span. The context's tokens are from
    `firsts` to `stops`, exclusive."""
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
    """An answer in lower case, without punctuation, articles and extra blanks, removed in this order."""
    plain = "".join(character for character in answer.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(answer: str, right: str) -> float:
    """1.0 if both are the same after normalisation, else 0.0."""
    return float(normalised(answer) == normalised(right))


def f1_score(answer: str, right: str) -> float:
    """Harmonic mean of precision and recall of words."""
    words, right_words = normalised(answer).split(), normalised(right).split()
    same = (Counter(words) & Counter(right_words)).total()
    return 2 * same / (len(words) + len(right_words)) if same else 0.0
