"""Tables by the names that a user gives: a file, a folder or a pattern of files, a saved data set, or one of the hub.

    talks.jsonl   talks.json   talks.jsonl.gz   talks/   "talks/part-*.parquet"   OWNER/NAME[:CONFIGURATION][:SPLIT]
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from ranvier.data import tables
from ranvier.data.cache import fingerprint
from ranvier.data.named_files import is_data_set, readable_file
from ranvier.errors import DataError

FILES = f"a file of rows ({', '.join(tables.ROW_ENDINGS)}; .gz behind it), a folder or a pattern of such files"
"""Description of what is accepted beside the names of data sets."""


def open_source(name: str, setting: str, form: str) -> tables.Table:
    """The table of this name; of the hub's it is streamed. setting: train or eval, which takes the split validation.
    form: what may be given, for errors. DataError where there is no such table, or files of one have other columns."""
    if is_data_set(name) or tables.is_saved(Path(name).expanduser()):
        return tables.open_dataset(name, "train" if setting == "train" else "validation", f"data.{setting}", form)
    files = files_of(name)
    if not files:
        raise DataError("is not a table, and has none in it", code="not-a-table", where=f"data.{setting}", value=name,
                        remedy=f"Give {form}.")
    opened = []
    for path in files:
        with readable_file(path, setting, form):
            opened.append(tables.open_file(path, name if len(files) == 1 else str(path)))
            if not opened[-1].columns:
                raise tables.without_rows(str(path))
    return opened[0] if len(opened) == 1 else _joined(name, opened)


def files_of(name: str) -> list[Path]:
    """The files of rows that a name stands for, in the order of their paths."""
    path = Path(name).expanduser()
    if path.is_dir():
        found = [one for one in path.rglob("*") if one.is_file()]
    else:
        found = [path] if path.exists() else [Path(one) for one in glob.glob(str(path), recursive=True)]
    return sorted(one for one in found if tables.ending_of(one) in tables.ROW_ENDINGS)


def _joined(name: str, parts: Sequence[tables.Table]) -> tables.Table:
    """Several tables as one. DataError where they have other columns."""
    for table in parts:
        if set(table.columns) != set(parts[0].columns):
            raise DataError(f"has other columns than {parts[0].name}", code="other-columns", where=table.name,
                            value=", ".join(sorted(table.columns)), remedy="Give files with the same columns.")

    def rows(wanted: Sequence[str]) -> Iterator[tables.Row]:
        for table in parts:
            yield from table.rows(wanted)

    return tables.Table(name=name, columns=parts[0].columns, rows=rows,
                        fingerprint=fingerprint("tables", [table.fingerprint for table in parts]))
