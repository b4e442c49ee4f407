"""Labelled sentences and pairs: GLUE and other data sets on the hub, the sentiment dataset of a package, or files."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ranvier.config.run import Data
from ranvier.data.cache import Progress, fingerprint
from ranvier.data.named_files import check_is_file, is_data_set, read_bytes, readable_file
from ranvier.data.offline.fetch import fetch, python_package
from ranvier.data.subset import Part, check_parted, held_out, read_parts, split_held_out
from ranvier.data.tables import Row, Table, is_saved, no_column, open_dataset, open_file, read_known, text_of
from ranvier.errors import DataError


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text and its label. place: in the dataset, for errors. pair: the second text, if the dataset has pairs."""

    text: str
    label: str
    place: str
    pair: str | None = None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of the columns. text, label: None if the run does not name one: `sentence`, else `text`, and `label`."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None

    @staticmethod
    def from_settings(data: Data) -> Columns:
        """Columns that a run names."""
        return Columns(text=data.text_column, pair=data.pair_column, label=data.label_column)

    def find_in(self, table: Table) -> Columns:
        """The same, with the names in this table. DataError if a column is missing."""
        return Columns(text=table.column(self.text, ("sentence", "text"), "data.text-column"),
                       pair=None if self.pair is None else table.column(self.pair, (), "data.pair-column"),
                       label=table.column(self.label, ("label",), "data.label-column"))

    def names(self) -> list[str]:
        """The columns to read."""
        return [name for name in (self.text, self.pair, self.label) if name is not None]


@dataclass(frozen=True, kw_only=True)
class Glue:
    """A task of GLUE (Wang et al., 2019) on the hub: its columns, its classes by number, its evaluation split."""

    text: str
    pair: str | None = None
    classes: tuple[str, ...]
    eval_split: str = "validation"


_ENTAILMENT = ("entailment", "not_entailment")
GLUE: Mapping[str, Glue] = MappingProxyType({
    "cola": Glue(text="sentence", classes=("unacceptable", "acceptable")),
    "sst2": Glue(text="sentence", classes=("negative", "positive")),
    "mrpc": Glue(text="sentence1", pair="sentence2", classes=("not_equivalent", "equivalent")),
    "qqp": Glue(text="question1", pair="question2", classes=("not_duplicate", "duplicate")),
    "mnli": Glue(text="premise", pair="hypothesis", classes=("entailment", "neutral", "contradiction"),
                 eval_split="validation_matched"),
    "qnli": Glue(text="question", pair="sentence", classes=_ENTAILMENT),
    "rte": Glue(text="sentence1", pair="sentence2", classes=_ENTAILMENT),
    "wnli": Glue(text="sentence1", pair="sentence2", classes=("not_entailment", "entailment"))})
"""The tasks of GLUE with classes, by name."""


def table_sentences(table: Table, columns: Columns, class_names: Sequence[str] | None = None) -> list[Sentence]:
    """The rows of a table. class_names: names of numbered labels, if the table declares them. DataError for a row
    without text or label."""
    found = columns.find_in(table)
    return [_sentence(row, found, class_names) for row in table.rows(found.names())]


def _sentence(row: Row, columns: Columns, class_names: Sequence[str] | None) -> Sentence:
    assert columns.text is not None and columns.label is not None, "find_in has found them"
    if columns.label not in row.values:
        raise no_column(row.place, columns.label, row.values, "data.label-column")
    label = row.values[columns.label]
    if class_names is not None and isinstance(label, int):
        if not 0 <= label < len(class_names):  # -1 stands for a label that is not published
            raise DataError(f"has a label that is not a number of its {len(class_names)} classes",
                            code="label-not-in-classes", where=row.place, value=label,
                            remedy="Leave such rows out (dataset.filter of Hugging Face's datasets), or name "
                                   "another split.")
        label = class_names[label]
    text = text_of(row, columns.text, "data.text-column").strip()
    pair = None if columns.pair is None else text_of(row, columns.pair, "data.pair-column").strip()
    if isinstance(label, (float, list, tuple, dict)):
        raise row.error("label-not-class", "has a label that is neither the name nor the number of a class: regression "
                        "and several labels for one text are not supported", label,
                        "Give each text one class, or name another column in `--data.label-column`.")
    if not isinstance(label, (str, int)) or not str(label).strip() or not text or pair == "":
        empty = "label" if text and pair != "" else "text"
        raise row.error("sentence-empty", f"has no {empty}", dict(row.values),
                        "Leave such rows out, or name other columns.")
    return Sentence(text, str(label).strip(), row.place, pair)


NAMES = (*GLUE, "sentiment")
"""Datasets that are known by name."""

SENTIMENT = python_package(
    "vaderSentiment", "vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9")
"""Rated sentences of film reviews, from PyPI."""
SENTIMENT_HELD_OUT = 1000
"""Sentences of the sentiment dataset that are held out."""
_DEFAULT = Columns()
LEAST_RATING = 0.5
"""Ratings of the sentiment dataset are from -4 to 4; sentences with a smaller magnitude are left out."""

_RATED = ("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz",
          "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
_HUB = "nyu-mll/glue"
FORM = "sst2, sentiment, or a TSV file with the columns label and sentence"
"""Description of the accepted forms of data."""


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Training and held-out sentences. classes: names by number."""

    train: list[Sentence]
    eval: list[Sentence]
    classes: tuple[str, ...]


def open_part(name: str, setting: str, cache: Path, progress: Progress, columns: Columns = _DEFAULT) -> Part[Sentence]:
    """The dataset of this name: of GLUE, sentiment, on the Hugging Face hub, or in a file. DataError if it is none of
    them, or cannot be read. setting: train or eval."""
    if name in GLUE:
        return Part(name=name, fingerprint=fingerprint("hub", f"{_HUB}:{name}"), read=lambda: _glue(name, progress))
    if name == "sentiment":
        return Part(name=name, fingerprint=fingerprint("sentiment", SENTIMENT.sha256),
                    read=lambda: (_sentiment(fetch(SENTIMENT, cache, progress)), None))
    path = Path(os.path.expanduser(name))
    if is_data_set(name) or is_saved(path):
        return _hub_part(name, setting, columns)
    data = read_bytes(path, setting, FORM)
    with readable_file(path, setting, FORM):
        table = open_file(path, name, quoted_tabs=False)
        columns.find_in(table)
    same = fingerprint("table", hashlib.sha256(data).hexdigest(), columns)
    return Part(name=name, fingerprint=same, read=lambda: (_rows_of_file(table, path, setting, columns), None))


def _rows_of_file(table: Table, path: Path, setting: str, columns: Columns) -> list[Sentence]:
    with readable_file(path, setting, FORM):
        return table_sentences(table, columns)


def _hub_part(name: str, setting: str, columns: Columns) -> Part[Sentence]:
    """A data set of the package `datasets`: its split `train`, or, for data.eval, `validation`, else `test`."""
    splits, where = ("train",) if setting == "train" else ("validation", "test"), f"data.{setting}"
    for split in splits:
        try:
            table = open_dataset(name, split, where, FORM, streaming=False)
            break
        except DataError:
            if split == splits[-1]:
                raise
    found = columns.find_in(table)
    assert found.label is not None
    classes = table.class_names(found.label)
    return Part(name=name, fingerprint=fingerprint(table.fingerprint, columns),
                read=lambda: (table_sentences(table, columns, classes), None))


def read_sentences(train: Part[Sentence], held: Part[Sentence] | None) -> Sentences:
    """Both parts and their classes. Without a held-out part, every tenth sentence is held out, or 1,000 of the
    sentiment dataset, by the hash of their text. DataError for too few sentences, a single class, or an unknown
    label."""
    sentences, evaluated = read_parts(train, held)
    classes = class_names([sentence.label for sentence in sentences], train.name)
    if evaluated is None:
        count = SENTIMENT_HELD_OUT if train.fingerprint == fingerprint("sentiment", SENTIMENT.sha256) else None
        chosen = held_out([sentence.text for sentence in sentences], count)
        sentences, evaluated = split_held_out(sentences, chosen)
    unknown = next((sentence for sentence in evaluated if sentence.label not in classes), None)
    if unknown is not None:
        raise DataError("is not a label of the training data", code="unknown-label", where=unknown.place,
                        value=unknown.label, remedy=f"Use its labels: {_list_classes(classes)}.")
    check_parted(sentences, evaluated, "sentences", train.name)
    return Sentences(train=sentences, eval=evaluated, classes=classes)


def class_names(labels: Sequence[str], name: str) -> tuple[str, ...]:
    """Labels by the number of their class: integers in numerical order, words in alphabetical order. DataError for
    fewer than two."""
    found = set(labels)
    if len(found) < 2:
        raise DataError("has one class only, so there is nothing to learn" if found else "has no sentences",
                        code="one-class", where=f"data.train {name}", value=_list_classes(sorted(found)) or None,
                        remedy="Give sentences of two classes or more.")
    numbers = all(label.isascii() and label.removeprefix("-").isdigit() and len(label) < 19 for label in found)
    return tuple(sorted(found, key=(lambda label: (int(label), label)) if numbers else None))


def look_at_header(path: Path, setting: str, columns: Columns = _DEFAULT) -> None:
    """Check that a file has the columns, reading only its header or first row. DataError if it does not."""
    if is_saved(path):
        columns.find_in(open_dataset(str(path), "train" if setting == "train" else "validation", f"data.{setting}",
                                     FORM))
        return
    with readable_file(path, setting, FORM):
        check_is_file(path, setting, FORM)
        columns.find_in(open_file(path, str(path), quoted_tabs=False))


def _sentiment(path: Path) -> list[Sentence]:
    """Sentences of film reviews (Hutto and Gilbert, 2014) with the mean of 20 ratings; its sign is the class."""
    with tarfile.open(path, "r:gz") as outer, tarfile.open(
            fileobj=io.BytesIO(_member(outer, _RATED[0])), mode="r:gz") as inner:
        lines = _member(inner, _RATED[1]).decode().splitlines()
    rows = [(number, line.split("\t")) for number, line in enumerate(lines, start=1)]
    return [Sentence(text.strip(), "positive" if float(rating) > 0 else "negative", f"{_RATED[1]} line {number}")
            for number, (_, rating, text) in rows if abs(float(rating)) >= LEAST_RATING]


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, "the checksum of the archive was compared, so the member is a file"
    return file.read()


def _glue(name: str, progress: Progress) -> tuple[list[Sentence], list[Sentence]]:
    task = GLUE[name]
    train, held = read_known(
        f"{_HUB}:{name}", ("train", task.eval_split), progress, "a TSV file with the columns label and sentence",
        lambda split, rows: [Sentence(row[task.text].strip(), task.classes[row["label"]], f"{split} row {number}",
                                      row[task.pair].strip() if task.pair else None)
                             for number, row in enumerate(rows)])
    return train, held


def _list_classes(classes: Sequence[str]) -> str:
    return ", ".join(classes[:20]) + (", ..." if len(classes) > 20 else "")
