"""Questions about texts: SQuAD 1.1 (Rajpurkar et al., 2016) from the hub, or files in its format.

    {"data": [{"paragraphs": [{"context": TEXT, "qas": [
        {"question": TEXT, "answers": [{"text": TEXT, "answer_start": PLACE}, ...]}, ...]}, ...]}, ...]}
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from ranvier.data.cache import Progress, fingerprint
from ranvier.data.named_files import read_bytes
from ranvier.data.subset import Part, check_parted, held_out, read_parts, split_held_out
from ranvier.data.tables import read_known
from ranvier.errors import DataError
from ranvier.system.untrusted_file import is_unicode, parse_json

NAMES = ("squad",)
"""Datasets that are known by name."""
_Kind = TypeVar("_Kind")
_HUB = "rajpurkar/squad"
_SMALL_BYTES = 64 << 20
_FORMAT = "squad or a JSON file in the format of SQuAD 1.1"


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its context. answers: (text, place of its first character in the context); the first one is the
    target, any of them is correct. place: in the dataset, for errors."""

    text: str
    context: str
    answers: tuple[tuple[str, int], ...]
    place: str


def open_part(name: str, setting: str, progress: Progress) -> Part[Question]:
    """The dataset squad, or the dataset in a file. DataError if it is neither, or cannot be read. setting: train or
    eval."""
    if name == "squad":
        return Part(name=name, fingerprint=fingerprint("hub", _HUB), read=lambda: _hub(progress))
    data = read_bytes(Path(os.path.expanduser(name)), setting, _FORMAT)
    return Part(name=name, fingerprint=fingerprint("squad", hashlib.sha256(data).hexdigest()),
                read=lambda: (parse(data, name), None))


def read_questions(train: Part[Question], held: Part[Question] | None) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions. Without a held-out part the questions of every tenth context are held out, by
    the hash of its text; with a single context, every tenth question. DataError if there are too few."""
    questions, evaluated = read_parts(train, held)
    if evaluated is None:
        contexts = list(dict.fromkeys(question.context for question in questions))
        if len(contexts) > 1:
            out = {text for text, here in zip(contexts, held_out(contexts), strict=True) if here}
            chosen = np.array([question.context in out for question in questions])
        else:
            chosen = held_out([question.text for question in questions])
        questions, evaluated = split_held_out(questions, chosen)
    check_parted(questions, evaluated, "questions", train.name)
    return questions, evaluated


def parse(data: bytes, name: str) -> list[Question]:
    """The questions of a file. DataError, with the place in the document, if it is not in the format."""
    try:
        document = parse_json(data)
    except ValueError as error:
        raise DataError("is not JSON", code="squad-not-json", where=name, value=str(error)[:200],
                        remedy=f"Give {_FORMAT}.") from error
    return list(_questions(document, name))


def look_at_small(path: Path, setting: str) -> None:
    """Check the format of a file as `parse` does; large files are not read. DataError if it is wrong."""
    if not path.is_file() or path.stat().st_size <= _SMALL_BYTES:
        parse(read_bytes(path, setting, _FORMAT), str(path))


def _questions(document: object, name: str) -> Iterator[Question]:
    for article, at in _enumerate_items(_get(document, "data", list, name), f"{name} data"):
        for paragraph, here in _enumerate_items(_get(article, "paragraphs", list, at), f"{at}.paragraphs"):
            context = _get(paragraph, "context", str, here)
            for entry, place in _enumerate_items(_get(paragraph, "qas", list, here), f"{here}.qas"):
                answers = tuple((_get(answer, "text", str, there), _get(answer, "answer_start", int, there))
                                for answer, there
                                in _enumerate_items(_get(entry, "answers", list, place), f"{place}.answers"))
                yield _check_question(Question(_get(entry, "question", str, place), context, answers, place))


def _enumerate_items(items: list[object], at: str) -> Iterator[tuple[object, str]]:
    for number, item in enumerate(items):
        yield item, f"{at}[{number}]"


def _get(holder: object, key: str, kind: type[_Kind], at: str) -> _Kind:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        name = {list: "list", str: "text", int: "whole number"}[kind]
        raise DataError(f"has no {name} {key!r}", code="squad-lacks-field", where=at,
                        value=None if value is None else repr(value)[:80], remedy=f"Give {_FORMAT}.")
    return value


def _check_question(question: Question) -> Question:
    """The question. DataError if it has no answer, an answer that is not in the context, or invalid Unicode."""
    if not question.answers:
        raise DataError("has no answer; unanswerable questions, as in SQuAD 2.0, are not supported",
                        code="question-without-answer", where=question.place, remedy="Remove such questions.")
    for text, start in question.answers:
        if not text.strip() or start < 0 or question.context[start:start + len(text)] != text:
            raise DataError("has an answer that is not at its place in the context", code="answer-not-in-context",
                            where=question.place, value=(text[:80], start),
                            remedy="Let answer_start count characters, from 0.")
    if not is_unicode(question.text + question.context):
        raise DataError("has half of a surrogate pair, which is not a character", code="question-not-unicode",
                        where=question.place, remedy="Give Unicode text.")
    return question


def _hub(progress: Progress) -> tuple[list[Question], list[Question]]:
    train, held = read_known(
        _HUB, ("train", "validation"), progress, "a JSON file in the format of SQuAD 1.1",
        lambda split, rows: [_check_question(Question(
            row["question"], row["context"],
            tuple(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)),
            f"{_HUB} {split} row {number}")) for number, row in enumerate(rows)])
    return train, held
