"""Questions and contexts as windows of tokens: [CLS] question [SEP] part of the context [SEP], as in BERT.

A context that does not fit beside its question gives several windows, each `step_of` tokens after the one before. In a
window that does not contain the whole answer, the target of both its ends is [CLS] (Devlin et al., 2019, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ranvier.data.squad import Question
from ranvier.data.wordpiece import WordPiece
from ranvier.errors import DataError

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
        places [N, S, 2]     if with_places: first character of each token of the context, and the one after its last

    DataError if a question leaves no space for the context.
    """
    found: list[dict[str, npt.NDArray[Any]]] = []
    encoded = [ids[:MOST_QUESTION_TOKENS] for ids in tokenizer.encode([question.text for question in questions])]
    for number, context_ids, characters in _contexts(questions, tokenizer):
        for window in _of_question(number, questions[number], encoded[number], context_ids, characters, tokenizer,
                                   sequence):
            if not with_places:
                del window["places"]
            found.append(window)
    return {name: np.stack([window[name] for window in found]) for name in found[0]}


def _contexts(questions: Sequence[Question],
              tokenizer: WordPiece) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
    """Number of each question, its context's tokens, and their characters [tokens, 2]; contexts in a row once."""
    for start in range(0, len(questions), _CONTEXTS):
        part = questions[start:start + _CONTEXTS]
        texts = list(dict.fromkeys(question.context for question in part))
        tokens = {text: (np.array(ids, dtype=np.int32), np.array(places, dtype=np.int32).reshape(-1, 2))
                  for text, (ids, places) in zip(texts, tokenizer.encode_with_places(texts), strict=True)}
        for number, question in enumerate(part, start=start):
            yield number, *tokens[question.context]


def _of_question(number: int, question: Question, asked: list[int], context: npt.NDArray[np.int32],
                 characters: npt.NDArray[np.int32], tokenizer: WordPiece,
                 sequence: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    room = sequence - len(asked) - 3
    if room < 1:
        raise DataError(f"leaves no space for its context in {sequence} tokens", code="question-too-long",
                        where=question.place, value=f"{len(asked)} tokens",
                        remedy=f"Set `--model.sequence {len(asked) + 4}` or more, better three times as many.")
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
