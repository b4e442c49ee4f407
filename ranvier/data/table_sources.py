"""Tables by the names that a user gives: a file, a folder or a pattern of files, a saved data set, or one of the hub.

    talks.jsonl   talks.json   talks.jsonl.gz   talks/   "talks/part-*.parquet"   OWNER/NAME[:CONFIGURATION][:SPLIT]
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from ranvier.data.cache import fingerprint
from ranvier.data.named_files import is_data_set, readable_file
from ranvier.data.tables import (
    ROW_ENDINGS,
    Row,
    Table,
    ending_of,
    is_saved,
    open_dataset,
    open_file,
    without_rows,
)
from ranvier.errors import DataError

FILES = f"a file of rows ({', '.join(ROW_ENDINGS)}; .gz behind it), a folder or a pattern of such files"
"""Description of what is accepted beside the names of data sets."""


def open_source(name: str, setting: str, form: str) -> Table:
    """The table of this name; of the hub's it is streamed. setting: train or eval, which takes the split validation.
    form: what may be given, for errors. DataError where there is no such table, or files of one have other columns."""
    if is_data_set(name) or is_saved(Path(name).expanduser()):
        return open_dataset(name, "train" if setting == "train" else "validation", f"data.{setting}", form)
    files = files_of(name)
    if not files:
        raise DataError("is not a table, and has none in it", code="not-a-table", where=f"data.{setting}", value=name,
                        remedy=f"Give {form}.")
    tables = []
    for path in files:
        with readable_file(path, setting, form):
            tables.append(open_file(path, name if len(files) == 1 else str(path)))
            if not tables[-1].columns:
                raise without_rows(str(path))
    return tables[0] if len(tables) == 1 else _joined(name, tables)


def files_of(name: str) -> list[Path]:
    """The files of rows that a name stands for, in the order of their paths."""
    path = Path(name).expanduser()
    if path.is_dir():
        found = [one for one in path.rglob("*") if one.is_file()]
    else:
        found = [path] if path.exists() else [Path(one) for one in glob.glob(str(path), recursive=True)]
    return sorted(one for one in found if ending_of(one) in ROW_ENDINGS)


def _joined(name: str, tables: Sequence[Table]) -> Table:
    """Several tables as one. DataError where they have other columns."""
    for table in tables:
        if set(table.columns) != set(tables[0].columns):
            raise DataError(f"has other columns than {tables[0].name}", code="other-columns", where=table.name,
                            value=", ".join(sorted(table.columns)), remedy="Give files with the same columns.")

    def rows(wanted: Sequence[str]) -> Iterator[Row]:
        for table in tables:
            yield from table.rows(wanted)

    return Table(name=name, columns=tables[0].columns, rows=rows,
                 fingerprint=fingerprint("tables", [table.fingerprint for table in tables]))
