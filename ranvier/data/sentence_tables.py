"""Labelled texts, single or in pairs, as rows of a table, and the columns that the GLUE tasks have them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ranvier.config.run import Data
from ranvier.data.tables import Row, Table, no_column, text_of
from ranvier.errors import DataError


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text and its label. place: in the dataset, for errors. pair: the second text, where the dataset has pairs."""

    text: str
    label: str
    place: str
    pair: str | None = None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of the columns. text, label: None where the run does not name one: `sentence`, else `text`, and `label`."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None

    @staticmethod
    def of(data: Data) -> Columns:
        """Those that a run names."""
        return Columns(text=data.text_column, pair=data.pair_column, label=data.label_column)

    def in_table(self, table: Table) -> Columns:
        """The same with the names that the table has. DataError where a column is missing."""
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
"""The tasks of GLUE that have classes, by name."""


def table_sentences(table: Table, columns: Columns, class_names: Sequence[str] | None = None) -> list[Sentence]:
    """The rows of a table. class_names: names of numbered labels, where the table declares them. DataError for a row
    without text or label."""
    found = columns.in_table(table)
    return [_sentence(row, found, class_names) for row in table.rows(found.names())]


def _sentence(row: Row, columns: Columns, class_names: Sequence[str] | None) -> Sentence:
    assert columns.text is not None and columns.label is not None, "in_table has found them"
    if columns.label not in row.values:
        raise no_column(row.place, columns.label, row.values, "data.label-column")
    label = row.values[columns.label]
    if class_names is not None and isinstance(label, int) and 0 <= label < len(class_names):
        label = class_names[label]
    text = text_of(row, columns.text, "data.text-column").strip()
    pair = None if columns.pair is None else text_of(row, columns.pair, "data.pair-column").strip()
    if not isinstance(label, (str, int)) or not str(label).strip() or not text or pair == "":
        empty = "label" if text and pair != "" else "text"
        raise DataError(f"has no {empty}", code="sentence-empty", where=row.place, value=repr(dict(row.values))[:80],
                        remedy="Leave such rows out, or name other columns.")
    return Sentence(text, str(label).strip(), row.place, pair)
