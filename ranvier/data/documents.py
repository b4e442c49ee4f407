"""Documents, and the rows of tables as documents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ranvier.data.tables import (
    ENDINGS,
    JSON,
    JSON_LINES,
    SEPARATED,
    Row,
    Table,
    ending_of,
    json_rows,
    open_file,
    text_of,
)
from ranvier.errors import DataError

TEXT_COLUMN = "text"
"""Column of a table's texts, where the run does not name one."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text. name: for messages."""

    name: str
    text: str


def is_rows(path: Path, column: str | None) -> bool:
    """Whether each row of a file is a document. A CSV or TSV file without a column of texts is one plain text, as any
    other file, and so is a JSON file that is no array of objects, or of objects without texts."""
    ending = ending_of(path)
    if ending not in (*SEPARATED, JSON):
        return ending in ENDINGS
    try:
        columns = open_file(path, str(path)).columns if column is None or ending == JSON else (column,)
        return TEXT_COLUMN in columns if column is None else bool(columns)
    except (UnicodeDecodeError, DataError):  # whatever it is, it is not a table
        return False


def row_documents(path: Path, column: str | None) -> Iterator[Document]:
    """The text of each row of a table. column: data.text_column. DataError, with the place of the row, for one that has
    none; UnicodeDecodeError when the file is not UTF-8."""
    name = str(path)
    if ending_of(path) in JSON_LINES:
        rows, texts = json_rows(path, name), column or TEXT_COLUMN
    else:
        table = open_file(path, name)
        texts = table.column(column, (TEXT_COLUMN,), "data.text-column")
        rows = table.rows([texts])
    for row in rows:
        yield Document(row.place.removeprefix(f"{path.parent}{os.sep}"), field_text(row, texts, column))


def field_text(row: Row, name: str, column: str | None) -> str:
    """The text of a row. The error for one of JSON says how a line must be, where no column was named."""
    if column is not None:
        return text_of(row, name, "data.text-column")
    remedy = 'Write one JSON object a line, for example {"text": "..."}, or set `--data.text-column`.'
    if name not in row.values:
        raise DataError(f"has no field `{name}`", code="field-missing", where=row.place, value=sorted(row.values)[:20],
                        remedy=remedy)
    if not isinstance(row.values[name], str):
        raise DataError(f"has a field `{name}` that is no text", code="field-not-text", where=row.place,
                        value=repr(row.values[name])[:80], remedy=remedy)
    return text_of(row, name, "data.text-column")


def text_column(table: Table, column: str | None) -> str:
    """The column of a table's texts: `column`, else `text`, else its only column. DataError where it has none."""
    only = table.columns if len(table.columns) == 1 else ()
    return table.column(column, (TEXT_COLUMN, *only), "data.text-column")
