"""Questions about texts, by name: SQuAD 1.1 from the hub, or files in its form (Rajpurkar et al., 2016).

    {"data": [{"paragraphs": [{"context": TEXT, "qas": [
        {"question": TEXT, "answers": [{"text": TEXT, "answer_start": PLACE}, ...]}, ...]}, ...]}, ...]}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ranvier.data import hub
from ranvier.data.corpus import fingerprint
from ranvier.data.named_files import read_bytes
from ranvier.data.publish import Progress
from ranvier.data.subset import held_out
from ranvier.errors import DataError

NAMES = ("squad",)
_HUB = "rajpurkar/squad"
_SMALL_BYTES = 64 << 20
_FORM = "squad or a JSON file in SQuAD 1.1's form"


@dataclass(frozen=True, slots=True)
class Question:
    """answers: (text, its first character in the context); the first one is learnt, any of them is right."""

    text: str
    context: str
    answers: tuple[tuple[str, int], ...]
    place: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """One set of questions. fingerprint: differs where they differ, and is known without parsing them.
    read: (training, held out); held out is None where the set has no such part."""

    name: str
    fingerprint: str
    read: Callable[[], tuple[list[Question], list[Question] | None]]


def open_part(name: str, setting: str, progress: Progress) -> Part:
    """The set of this name: squad, or a file. DataError when it is neither, or out of reach."""
    if name == "squad":
        return Part(name=name, fingerprint=fingerprint("hub", _HUB), read=lambda: _hub(progress))
    data = read_bytes(Path(name).expanduser(), setting, _FORM)
    return Part(name=name, fingerprint=fingerprint("squad", hashlib.sha256(data).hexdigest()),
                read=lambda: (parse(data, name), None))


def read_questions(train: Part, held: Part | None) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions. Without a held-out part those of every tenth context are held out, by the hash
    of its text; of one context every tenth question. DataError where there are too few."""
    questions, own = train.read()
    if held is not None:
        first, second = held.read()
        evaluated = first if second is None else second
    elif own is not None:
        evaluated = own
    else:
        contexts = list(dict.fromkeys(question.context for question in questions))
        if len(contexts) > 1:
            out = {text for text, here in zip(contexts, held_out(contexts), strict=True) if here}
            chosen = np.array([question.context in out for question in questions])
        else:
            chosen = held_out([question.text for question in questions])
        evaluated = [question for question, here in zip(questions, chosen, strict=True) if here]
        questions = [question for question, here in zip(questions, chosen, strict=True) if not here]
    if not questions or not evaluated:
        raise DataError("has too few questions to train on some and hold out others", where=f"data.train {train.name}",
                        value=len(questions) + len(evaluated), remedy="Give at least two, or more in --data.eval.")
    return questions, evaluated


def parse(data: bytes, name: str) -> list[Question]:
    """A file's questions. DataError, with the place in the document, for one that is not in the form."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError("is no JSON text", where=name, value=str(error)[:200], remedy=f"Give {_FORM}.") from error
    return list(_questions(document, name))


def look_at_small(path: Path, setting: str) -> None:
    """DataError where a file is not in the form, as `parse`; large ones are not read."""
    if not path.is_file() or path.stat().st_size <= _SMALL_BYTES:
        parse(read_bytes(path, setting, _FORM), str(path))


def _questions(document: object, name: str) -> Iterator[Question]:
    for article, at in _each(_get(document, "data", list, name), f"{name} data"):
        for paragraph, here in _each(_get(article, "paragraphs", list, at), f"{at}.paragraphs"):
            context = _get(paragraph, "context", str, here)
            for entry, place in _each(_get(paragraph, "qas", list, here), f"{here}.qas"):
                answers = tuple((_get(answer, "text", str, there), _get(answer, "answer_start", int, there))
                                for answer, there in _each(_get(entry, "answers", list, place), f"{place}.answers"))
                yield _checked(Question(_get(entry, "question", str, place), context, answers, place))


def _each(items: list, at: str) -> Iterator[tuple[object, str]]:
    for number, item in enumerate(items):
        yield item, f"{at}[{number}]"


def _get(holder: object, key: str, kind: type, at: str):
    value = holder.get(key) if isinstance(holder, dict) else None
    if type(value) is not kind:
        name = {list: "list", str: "text", int: "whole number"}[kind]
        raise DataError(f"has no {name} {key!r}", where=at, value=None if value is None else repr(value)[:80],
                        remedy=f"Give {_FORM}.")
    return value


def _checked(question: Question) -> Question:
    """DataError for a question without an answer, one whose answer is elsewhere, or what is no text."""
    if not question.answers:
        raise DataError("has no answer; what cannot be answered, as in SQuAD 2.0, is not known here",
                        where=question.place, remedy="Leave such questions out.")
    for text, start in question.answers:
        if not text or start < 0 or question.context[start:start + len(text)] != text:
            raise DataError("has an answer that is not at its place in the context", where=question.place,
                            value=(text[:80], start), remedy="Let answer_start count characters, from 0.")
    try:
        (question.text + question.context).encode()
    except UnicodeEncodeError as error:
        raise DataError("has half of a surrogate pair, which is no character", where=question.place,
                        remedy="Give Unicode text.") from error
    return question


def _hub(progress: Progress) -> tuple[list[Question], list[Question]]:
    parts = []
    for split in ("train", "validation"):
        rows = hub.load_split(_HUB, split, progress, "a JSON file in SQuAD 1.1's form")
        with hub.readable(_HUB):
            parts.append([_checked(Question(
                row["question"], row["context"],
                tuple(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)),
                f"{_HUB} {split} row {number}")) for number, row in enumerate(rows)])
    return parts[0], parts[1]
