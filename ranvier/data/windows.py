"""Questions and texts as windows of tokens: [CLS] question [SEP] a run of the context [SEP], as BERT has it.

A context that is longer than what the question leaves free gives several windows, each `step` tokens after the one
before. An answer that is not wholly in a window has both its ends at [CLS] there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ranvier.data.squad import Question
from ranvier.data.wordpiece import WordPiece
from ranvier.errors import DataError

MOST_QUESTION_TOKENS = 64
_CONTEXTS = 500


def step_of(sequence: int) -> int:
    """Tokens from one window to the next: BERT's 128 for its 384 tokens, and a third of shorter sequences."""
    return max(1, min(128, sequence // 3))


def windows(questions: Sequence[Question], tokenizer: WordPiece, sequence: int, *,
            with_places: bool) -> dict[str, np.ndarray]:
    """All windows of the questions, in their order. Each array's first dim is the windows, N:

    ids [N, S] filled up with [PAD]; lengths [N] tokens; firsts [N] place of the first token of the context; starts,
    ends [N] places of the answer's first and last token, 0 where it is elsewhere; questions [N] number of the question;
    places [N, S, 2] first character and the one after the last, of each token of the context, where they are wanted.
    DataError when a question leaves no room for the context.
    """
    found: list[dict[str, np.ndarray]] = []
    encoded = [ids[:MOST_QUESTION_TOKENS] for ids in tokenizer.encode([question.text for question in questions])]
    for number, context_ids, characters in _contexts(questions, tokenizer):
        for window in _of_question(number, questions[number], encoded[number], context_ids, characters, tokenizer,
                                   sequence):
            if not with_places:
                del window["places"]
            found.append(window)
    return {name: np.stack([window[name] for window in found]) for name in found[0]}


def _contexts(questions: Sequence[Question], tokenizer: WordPiece) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Number of each question, its context's tokens, and their characters [tokens, 2]; contexts in a row once."""
    for start in range(0, len(questions), _CONTEXTS):
        part = questions[start:start + _CONTEXTS]
        texts = list(dict.fromkeys(question.context for question in part))
        tokens = {text: (np.array(ids, dtype=np.int32), np.array(places, dtype=np.int32).reshape(-1, 2))
                  for text, (ids, places) in zip(texts, tokenizer.encode_with_places(texts), strict=True)}
        for number, question in enumerate(part, start=start):
            yield number, *tokens[question.context]


def _of_question(number: int, question: Question, asked: list[int], context: np.ndarray, characters: np.ndarray,
                 tokenizer: WordPiece, sequence: int) -> Iterator[dict[str, np.ndarray]]:
    room = sequence - len(asked) - 3
    if room < 1:
        raise DataError(f"leaves no room for its context in {sequence} tokens", where=question.place,
                        value=f"{len(asked)} tokens", remedy=f"Set --model.sequence {len(asked) + 4} or more, better "
                        "three times as many.")
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
        yield {"ids": ids, "places": places, **{name: np.int32(value) for name, value in (
            ("lengths", len(row)), ("firsts", offset), ("starts", ends[0]), ("ends", ends[1]), ("questions", number))}}
        begin += min(room, step_of(sequence))
