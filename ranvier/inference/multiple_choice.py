"""Accuracy of multiple choice, as lm-evaluation-harness defines it: the answer with the largest log-likelihood.

    {"context": "The sky is", "choices": ["green", "blue"], "answer": 1}

Each choice follows the context after one space. With l(c) the log-likelihood of a choice, of all choices of a question
the answer is the one with the largest

    acc          l(c)
    acc_norm     l(c) / characters of c
    acc_bytes    l(c) / bytes of c in UTF-8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ranvier.data.tables import json_rows
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import DataError
from ranvier.inference.likelihood import Request


@dataclass(frozen=True, kw_only=True)
class Question:
    """A context, what may follow it, and which of these (by number, from 0) is right."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSONL file. DataError, with the line, for one that is none."""
    try:
        questions = [_question(row.values, row.place) for row in json_rows(path, str(path))]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {getattr(error, 'strerror', None) or error}", code="choices-unreadable",
                        where="choices", value=str(path),
                        remedy="Name a JSONL file that exists and is readable.") from error
    if not questions:
        raise DataError("has no questions", code="choices-empty", where="choices", value=str(path),
                        remedy='Write {"context": "...", "choices": ["...", "..."], "answer": 0} in each line.')
    return questions


def _question(row: object, place: str) -> Question:
    values = row if isinstance(row, dict) else {}
    context, choices, answer = (values.get(name) for name in ("context", "choices", "answer"))
    problem = None
    if not isinstance(context, str):
        problem = "has no text `context`"
    elif not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        problem = "has no list `choices` of two or more texts"
    elif isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    elif not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        problem = "has no `answer` that is one of its choices, or the number of one, from 0"
    if problem is not None:
        raise DataError(problem, code="choices-malformed", where=place, value=repr(row)[:80],
                        remedy='Write {"context": "...", "choices": '
'["...", "..."], "answer": 0} in each line.')
    assert isinstance(context, str) and isinstance(choices, list) and isinstance(answer, int)  # as checked above
    return Question(context=context, choices=tuple(choices), answer=answer)


def requests_of(questions: Sequence[Question], tokenizer: Tokenizer) -> list[Request]:
    """One request for each choice of each question, in their order."""
    return [encode_pair(tokenizer, question.context, f" {choice}")
            for question in questions for choice in question.choices]


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """The tokens of a context and its continuation, cut where the context's own tokens end. Blanks at the end of the
    context belong to the continuation, as they do in the tokens of words."""
    stripped = context.rstrip()
    if not stripped:
        return list(tokenizer.nothing), tokenizer.encode(context + continuation)
    continuation = context[len(stripped):] + continuation
    first = tokenizer.encode_from_start(stripped)
    return first, tokenizer.encode_from_start(stripped + continuation)[len(first):]


def accuracies(questions: Sequence[Question], likelihoods: Sequence[float]) -> dict[str, float]:
    """acc, acc_norm, acc_bytes and count. likelihoods: of each choice, in the order of `requests_of`."""
    right, start = dict.fromkeys(("acc", "acc_norm", "acc_bytes"), 0), 0
    for question in questions:
        own = likelihoods[start:start + len(question.choices)]
        start += len(own)
        for name, sizes in (("acc", [1] * len(own)), ("acc_norm", [len(one) for one in question.choices]),
                            ("acc_bytes", [len(one.encode()) for one in question.choices])):
            best = max(range(len(own)), key=lambda place, sizes=sizes: own[place] / sizes[place])  # type: ignore[misc]
            right[name] += best == question.answer
    return {**{name: count / len(questions) for name, count in right.items()}, "count": float(len(questions))}
