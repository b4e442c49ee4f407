"""Labelled sentences by name: SST-2, the sentiment set that a package carries, or tab-separated files."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranvier.data import hub
from ranvier.data.corpus import fingerprint
from ranvier.data.fetch import check, fetch, python_package
from ranvier.data.named_files import read_bytes
from ranvier.data.publish import Progress
from ranvier.data.subset import held_out
from ranvier.errors import DataError

NAMES = ("sst2", "sentiment")

SENTIMENT = python_package(
    "vaderSentiment", "vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9")
SENTIMENT_HELD_OUT = 1000
_LONGEST_HEADER = 1 << 20
LEAST_RATING = 0.5
"""Ratings of the sentiment set go from -4 to 4; sentences rated less in either direction are left out."""

_RATED = ("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz",
          "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
_SST2, _SST2_CLASSES = "nyu-mll/glue:sst2", ("negative", "positive")


@dataclass(frozen=True, slots=True)
class Sentence:
    """place: where it stands, for messages."""

    text: str
    label: str
    place: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """One set of sentences. fingerprint: differs where the sentences differ, and is known without parsing them.
    read: (training, held out); held out is None where the set has no such part."""

    name: str
    fingerprint: str
    read: Callable[[], tuple[list[Sentence], list[Sentence] | None]]


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """classes: names by number."""

    train: list[Sentence]
    eval: list[Sentence]
    classes: tuple[str, ...]


def open_part(name: str, setting: str, cache: Path, progress: Progress) -> Part:
    """The set of this name: sst2, sentiment, or a file. DataError when it is none of them, or out of reach."""
    if name == "sst2":
        return Part(name=name, fingerprint=fingerprint("hub", _SST2), read=lambda: _sst2(progress))
    if name == "sentiment":
        return Part(name=name, fingerprint=fingerprint("sentiment", SENTIMENT.sha256),
                    read=lambda: (_sentiment(fetch(SENTIMENT, cache, progress)), None))
    path = Path(name).expanduser()
    if path.name == SENTIMENT.filename:
        check(SENTIMENT, path)
        return Part(name=name, fingerprint=fingerprint("sentiment", SENTIMENT.sha256),
                    read=lambda: (_sentiment(path), None))
    data = read_bytes(path, setting, "a TSV file with the columns label and sentence, sst2 or sentiment")
    return Part(name=name, fingerprint=fingerprint("tsv", hashlib.sha256(data).hexdigest()),
                read=lambda: (parse(data, name), None))


def read_sentences(train: Part, held: Part | None) -> Sentences:
    """Both parts and their classes. Without a held-out part every tenth sentence is held out, and of the sentiment set
    1,000, by the hash of their text. DataError when there is too little, one class, or an unknown label."""
    sentences, own = train.read()
    if held is not None:
        first, second = held.read()
        evaluated = first if second is None else second
    elif own is not None:
        evaluated = own
    else:
        count = SENTIMENT_HELD_OUT if train.fingerprint == fingerprint("sentiment", SENTIMENT.sha256) else None
        chosen = held_out([sentence.text for sentence in sentences], count)
        evaluated = [sentence for sentence, here in zip(sentences, chosen, strict=True) if here]
    classes = class_names([sentence.label for sentence in sentences], train.name)
    if held is None and own is None:
        sentences = [sentence for sentence, here in zip(sentences, chosen, strict=True) if not here]
    unknown = next((sentence for sentence in evaluated if sentence.label not in classes), None)
    if unknown is not None:
        raise DataError("is no label of the training data", where=unknown.place, value=unknown.label,
                        remedy=f"Use its labels: {_listed(classes)}.")
    if not sentences or not evaluated:
        raise DataError("has too few sentences to train on some and hold out others", where=f"data.train {train.name}",
                        value=len(sentences) + len(evaluated), remedy="Give at least two, or more in --data.eval.")
    return Sentences(train=sentences, eval=evaluated, classes=classes)


def class_names(labels: Sequence[str], name: str) -> tuple[str, ...]:
    """Labels by the number of their class: whole numbers in their order, else words in alphabetical order. DataError
    with fewer than two."""
    found = set(labels)
    if len(found) < 2:
        raise DataError("has one class only, so there is nothing to learn" if found else "has no sentences",
                        where=f"data.train {name}", value=_listed(sorted(found)) or None,
                        remedy="Give sentences of two classes or more.")
    numbers = all(label.isascii() and label.removeprefix("-").isdigit() and len(label) < 19 for label in found)
    return tuple(sorted(found, key=(lambda label: (int(label), label)) if numbers else None))


def parse(data: bytes, name: str) -> list[Sentence]:
    """A TSV file: UTF-8, a header with the columns label and sentence among others, one sentence a line, no quoting.

    DataError, with the number of the line, for one that is not so.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _wrong("is no UTF-8 text", name, data.count(b"\n", 0, error.start) + 1, str(error.reason)) from error
    lines = enumerate((line.removesuffix("\r") for line in text.split("\n")), start=1)
    _, header = next(lines)
    columns = header.split("\t")
    for column in ("label", "sentence"):
        if columns.count(column) != 1:
            raise _wrong(f"has no column {column}" if column not in columns else f"has the column {column} twice",
                         name, 1, columns[:20])
    return list(_rows(lines, columns, name))


def look_at_header(path: Path, setting: str) -> None:
    """DataError where a TSV file has not the columns that are needed; only its first line is read."""
    if path.name == SENTIMENT.filename:
        return
    form = "a TSV file with the columns label and sentence, sst2 or sentiment"
    try:
        if not path.is_file():
            raise DataError("is no file", where=f"data.{setting}", value=str(path), remedy=f"Give {form}.")
        with path.open("rb") as file:
            parse(file.readline(_LONGEST_HEADER), str(path))
    except OSError as error:
        raise DataError("cannot be read", where=f"data.{setting}", value=f"{path}: {error}",
                        remedy=f"Give {form}.") from error


def _rows(lines: Iterator[tuple[int, str]], columns: list[str], name: str) -> Iterator[Sentence]:
    label_at, text_at = columns.index("label"), columns.index("sentence")
    for number, line in lines:
        if not line.strip():
            continue
        if "\0" in line:
            raise _wrong("has a NUL character", name, number, line[:80])
        fields = line.split("\t")
        if len(fields) != len(columns):
            raise _wrong(f"has not {len(columns)} columns as the header", name, number, len(fields))
        label, text = fields[label_at].strip(), fields[text_at].strip()
        if not label or not text:
            raise _wrong("has no label" if not label else "has no sentence", name, number, line[:80])
        yield Sentence(text, label, f"{name} line {number}")


def _wrong(what: str, name: str, line: int, value: object) -> DataError:
    return DataError(what, where=f"{name} line {line}", value=value,
                     remedy="Give tab-separated UTF-8 text with a header line that has the columns label and sentence, "
                            "and one sentence a line.")


def _sentiment(path: Path) -> list[Sentence]:
    """Sentences of film reviews with the mean of 20 ratings each; the class is its sign."""
    with tarfile.open(path, "r:gz") as outer, \
            tarfile.open(fileobj=io.BytesIO(outer.extractfile(_RATED[0]).read()), mode="r:gz") as inner:
        lines = inner.extractfile(_RATED[1]).read().decode().splitlines()
    rows = [(number, line.split("\t")) for number, line in enumerate(lines, start=1)]
    return [Sentence(text.strip(), "positive" if float(rating) > 0 else "negative", f"{_RATED[1]} line {number}")
            for number, (_, rating, text) in rows if abs(float(rating)) >= LEAST_RATING]


def _sst2(progress: Progress) -> tuple[list[Sentence], list[Sentence]]:
    parts = []
    for split in ("train", "validation"):
        rows = hub.load_split(_SST2, split, progress, "a TSV file with the columns label and sentence")
        with hub.readable(_SST2):
            parts.append([Sentence(row["sentence"].strip(), _SST2_CLASSES[row["label"]], f"{split} row {number}")
                          for number, row in enumerate(rows)])
    return parts[0], parts[1]


def _listed(classes: Sequence[str]) -> str:
    return ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
