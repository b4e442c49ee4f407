"""Rows with named columns: JSONL, CSV, TSV and Parquet files, and data sets of the Hugging Face package `datasets`.

    open_file(path, name), open_dataset(name, ...) -> Table(columns, fingerprint, rows) -> Row(place, values)

Columns are looked up before rows are read, so that `ranvier check` names a missing column and the existing ones.
Parquet needs the package `pyarrow`, which comes with `datasets`.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from ranvier.data.cache import Progress, fingerprint
from ranvier.errors import DataError
from ranvier.system.untrusted_file import is_unicode, parse_json

JSON_LINES = (".jsonl", ".ndjson")
"""Endings of files with a JSON object on each line."""
SEPARATED = {".csv": ",", ".tsv": "\t"}
"""Endings of files whose first line names the columns, and their separators."""
PARQUET = (".parquet",)
"""Endings of Parquet files."""
JSON = ".json"
"""Ending of a file with one array of JSON objects."""
ENDINGS = (*JSON_LINES, *SEPARATED, *PARQUET)
"""Endings of the files that `open_file` reads."""
ROW_ENDINGS = (*ENDINGS, JSON)
"""Endings of files of rows; all but Parquet may be compressed, with .gz appended."""
_MOST_JSON_BYTES = 4 << 30
_MOST_LINE, _PIECE = 1 << 26, 1 << 20
INSTALL = "Run pip install 'ranvier[hub]'"
"""Remedy that installs the packages `datasets` and `pyarrow`."""

_Read = TypeVar("_Read")
_BATCH_ROWS = 1024
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a folder that `Dataset.save_to_disk` has written."""
_MOST_COLUMNS = 20
_TALKS = {"messages", "conversation", "conversations"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table. place: its file and line, or its number, for errors. values: by the name of the column.
    is_arrow: whether objects in the values have the keys of all rows, with None for keys that the row does not have."""

    place: str
    values: Mapping[str, object]
    is_arrow: bool = False

    def error(self, code: str, what: str, value: object, remedy: str) -> DataError:
        """The error for something in this row."""
        return DataError(what, code=code, where=self.place, value=repr(value)[:80], remedy=remedy)


_Rows = Callable[[Sequence[str]], Iterator[Row]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose rows have not been read yet.

    name: as the user gave it. columns: in their order. fingerprint: differs if the rows differ. rows: all rows with at
    least the given columns, the same rows in the same order each time; DataError for a row that is damaged. features:
    the types of columns that a data set declares.
    """

    name: str
    columns: tuple[str, ...]
    fingerprint: str
    rows: _Rows
    features: Mapping[str, Any] = field(default_factory=dict)

    def column(self, name: str | None, default: Sequence[str], setting: str) -> str:
        """The column `name`, or the first of `default` that the table has. DataError, with the existing columns, if it
        has none of them, or has it twice. setting: of the column, such as data.text-column."""
        wanted = default if name is None else (name,)
        found = next((column for column in wanted if column in self.columns), None)
        if found is None:
            raise no_column(self.name, wanted[0], self.columns, setting)
        if self.columns.count(found) > 1:
            raise DataError("has two columns with the same name", code="column-twice", where=self.name, value=found,
                            remedy=f"Rename one of them, or set --{setting} to another.")
        return found

    def class_names(self, column: str) -> tuple[str, ...] | None:
        """The names of the classes of a column with class numbers, if the data set declares them."""
        names = getattr(self.features.get(column), "names", None)
        return tuple(names) if names else None


def no_column(table: str, column: str, columns: Iterable[str], setting: str) -> DataError:
    """The error for a table without this column. columns: the existing ones."""
    names = sorted(columns)
    if not names:
        return without_rows(table)
    listed = ", ".join(names[:_MOST_COLUMNS]) + (", ..." if len(names) > _MOST_COLUMNS else "")
    return DataError(f"has no column `{column}`", code="column-missing", where=table, value=listed,
                     remedy="Give conversations as `--data.train`, with `--data.task chat`."
                     if setting == "data.text-column" and _TALKS & set(names) else
                     f"Set --{setting} to one of its columns, or give every row a `{column}`.")


def without_rows(table: str) -> DataError:
    """The error for an empty table, which has no columns either."""
    return DataError("has no rows", code="table-without-rows", where=table, remedy="Give a table with samples.")


def is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` has written this folder."""
    with suppress(OSError, ValueError):  # not a valid file name
        return path.is_dir() and any((path / name).is_file() for name in _SAVED)
    return False


def is_hub_name(name: str) -> bool:
    """Whether this may be the name of a data set on the Hugging Face hub: NAME, OWNER/NAME, or one of them with
    :CONFIGURATION, :SPLIT or both. Paths, names of files and URLs are not."""
    path = name.partition(":")[0]
    return bool(path) and not path.startswith((".", "~", os.sep)) and path.count("/") <= 1 and not path.endswith("/") \
        and "//" not in name and Path(path).suffix.lower() not in (*ROW_ENDINGS, ".txt", ".gz", ".tgz")


def open_file(path: Path, name: str, *, quoted_tabs: bool = True) -> Table:
    """The table in a file. Its header or first row is read. name: for errors. DataError if it is damaged, or needs a
    package that is missing; OSError and UnicodeDecodeError as raised by reading.

    quoted_tabs: whether quotes have a meaning in tab-separated files; if they are ordinary characters, as in GLUE's
    files, files with unknown endings are read as such files."""
    ending = ending_of(path)
    found = path.stat()
    same = fingerprint("table", str(path.resolve()), found.st_size, found.st_mtime_ns)
    if ending in PARQUET:
        columns, rows = _parquet(path, name)
    elif ending in SEPARATED or (not quoted_tabs and ending not in ROW_ENDINGS):
        separator = SEPARATED.get(ending, "\t")
        columns, rows = _read_separated(path, name, separator, quoted_tabs or separator != "\t")
    else:
        read = json_array if ending == JSON and not lines_of_objects(path) else json_rows
        first = next(read(path, name), None)
        columns = () if first is None else tuple(first.values)

        def rows(wanted: Sequence[str]) -> Iterator[Row]:
            return read(path, name)

    return Table(name=name, columns=columns, fingerprint=same, rows=rows)


def ending_of(path: Path) -> str:
    """The ending that determines the form of a file, in lower case: the one before .gz, if it is compressed."""
    return Path(path.stem if is_compressed(path) else path).suffix.lower()


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if it is compressed with gzip (.gz). DataError if the compressed data are damaged."""
    if not is_compressed(path):
        with open(path, "rb") as file:
            yield file
        return
    try:
        with gzip.open(path, "rb") as unpacked:
            yield cast(IO[bytes], unpacked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError("is not valid gzip", code="gzip-damaged", where=str(path), value=str(error),
                        remedy="Write it again, or give another file.") from error


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed with gzip, by its name."""
    return path.suffix.lower() == ".gz"


@contextmanager
def _text(path: Path, newline: str) -> Iterator[IO[str]]:
    """Open a text file, which may be compressed. Errors as of `open_bytes`."""
    with open_bytes(path) as file, io.TextIOWrapper(cast(Any, file), encoding="utf-8-sig", newline=newline) as text:
        yield text


def json_array(path: Path, name: str) -> Iterator[Row]:
    """The objects of a file with one JSON array. Errors as of `json_rows`."""
    remedy = "Write an array of objects, or one object a line in a file that ends in .jsonl."
    with _text(path, "") as file:
        text = "".join(islice(iter(partial(file.read, _PIECE), ""), _MOST_JSON_BYTES // _PIECE))  # read(n) allocates n
    try:
        found = parse_json(text)
    except ValueError as error:
        raise DataError("is not JSON", code="row-not-json", where=name, value=str(error)[:80], remedy=remedy) from error
    if not isinstance(found, list):
        raise DataError("is not a JSON array", code="not-an-array", where=name, value=type(found).__name__,
                        remedy=remedy)
    escaped = "\\ud" in text.lower()
    for number, values in enumerate(found):
        yield _object(values, f"{name} row {number}", None, escaped, remedy)


def lines_of_objects(path: Path) -> int:
    """The number of lines, counted up to 2, of a JSON file with an object on each line, as C4's and Dolma's shards
    have; 0 for any other file."""
    with _text(path, "\n") as file:
        lines = (line for line in iter(partial(file.readline, _MOST_LINE), "") if line.strip())
        first, second = next(lines, ""), next(lines, "")
    try:
        if second.lstrip()[:1] in ("", "{") and isinstance(parse_json(first), dict):
            return 2 if second else 1
    except ValueError:
        pass
    return 0


def json_rows(path: Path, name: str) -> Iterator[Row]:
    """The objects of a file of JSON lines; empty lines are left out. DataError, with the line number, for a line that
    is not an object; UnicodeDecodeError when the file is not UTF-8."""
    remedy = 'Write one JSON object a line, for example {"text": "..."}; name a file of plain text .txt.'
    with _text(path, "\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{name} line {number}"
            try:
                values = parse_json(line)
            except ValueError as error:
                raise DataError("is not JSON", code="row-not-json", where=where, value=line.strip()[:80],
                                remedy=remedy) from error
            yield _object(values, where, line.strip(), "\\ud" in line.lower(), remedy)


def _object(values: object, where: str, text: str | None, escaped: bool, remedy: str) -> Row:
    """The row of a JSON object. DataError for a value that is not an object, and for half of a surrogate pair, which no
    tokenizer accepts and no file can hold. text: of the row, if it has one. escaped: whether there may be such a
    half."""
    if not isinstance(values, dict):
        raise DataError("is not a JSON object", code="row-not-object", where=where, value=(text or repr(values))[:80],
                        remedy=remedy)
    try:
        if escaped:
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError("has half of a surrogate pair, which is not a character", code="row-half-surrogate",
                        where=where, value=ascii(error.object[error.start:error.end])[1:-1],
                        remedy="Write the full character, or U+FFFD instead.") from error
    return Row(where, values)


def _read_separated(path: Path, name: str, separator: str, is_quoted: bool) -> tuple[tuple[str, ...], _Rows]:
    """Header and rows of a file with a header line. is_quoted: whether fields may be quoted, as spreadsheets do."""
    def lines() -> Iterator[tuple[int, list[str]]]:
        with _text(path, "") as file:
            # Without `strict`, an unclosed quote makes one field of all rows up to the next quote.
            reader = csv.reader(file, delimiter=separator, strict=True,
                                quoting=csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE)
            first = 1  # line of the record that is read
            try:
                for values in reader:
                    yield reader.line_num, values
                    first = reader.line_num + 1
            except csv.Error as error:
                raise DataError("is not a table of separated values", code="not-separated-values",
                                where=f"{name} line {first}", value=str(error),
                                remedy='Quote fields with line breaks or quotes, as spreadsheets do, and write a quote '
                                       'in them as "", and no space next to a quoted field.') from error

    csv.field_size_limit(min(sys.maxsize, 1 << 31))  # texts may be longer than the 128 KiB of its default
    columns = tuple(next(lines(), (0, []))[1])

    def rows(wanted: Sequence[str]) -> Iterator[Row]:
        for number, values in islice(lines(), 1, None):
            if not values:
                continue
            if len(values) != len(columns):
                raise DataError(f"does not have {len(columns)} columns, as the header has",
                                code="row-column-count", where=f"{name} line {number}", value=len(values),
                                remedy="Quote fields that have the separator in them.")
            yield Row(f"{name} line {number}", dict(zip(columns, values, strict=True)))

    return columns, rows


def _parquet(path: Path, name: str) -> tuple[tuple[str, ...], _Rows]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise missing_package("pyarrow", name) from error

    def damaged(error: Exception) -> DataError:
        return DataError("is not a Parquet file", code="not-parquet", where=name, value=str(error).partition("\n")[0],
                         remedy="Write it again, or give another file.")

    try:
        columns = tuple(ParquetFile(path).schema_arrow.names)
    except ArrowException as error:
        raise damaged(error) from error

    def rows(wanted: Sequence[str]) -> Iterator[Row]:
        number = 0
        try:
            for batch in ParquetFile(path).iter_batches(batch_size=_BATCH_ROWS, columns=list(wanted)):
                for values in batch.to_pylist():
                    yield Row(f"{name} row {number}", values, is_arrow=True)
                    number += 1
        except ArrowException as error:
            raise damaged(error) from error

    return columns, rows


def load_split(name: str, split: str, setting: str, instead: str, *, streaming: bool = False) -> Any:
    """A split as the package `datasets` gives it: of a folder that `Dataset.save_to_disk` has written, or of
    NAME[:CONFIGURATION][:SPLIT] on the hub; a name that is not a configuration is a split.

    setting: the setting that names it, such as data.train; instead: what else may be given, for errors. streaming: rows
    are fetched while they are read. DataError if the package is missing, or the data set cannot be read.
    """
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", name, setting, instead) from error
    with readable_rows(name, setting, instead):
        if is_saved(Path(os.path.expanduser(name))):
            found = datasets.load_from_disk(str(Path(os.path.expanduser(name))))
            return found[split] if isinstance(found, datasets.DatasetDict) else found
        hub, *parts = re.split(r":(?![^\[]*\])", name)  # a split may be train[:10%]
        streamed = {"streaming": True} if streaming else {}
        if len(parts) == 2:
            return datasets.load_dataset(hub, parts[0], split=parts[1], **streamed)
        try:
            return datasets.load_dataset(hub, *(parts or [None]), split=split, **streamed)
        except ValueError as error:
            if len(parts) != 1 or "BuilderConfig" not in str(error):
                raise
        return datasets.load_dataset(hub, None, split=parts[0], **streamed)


@contextmanager
def readable_rows(name: str, setting: str, instead: str) -> Iterator[None]:
    """A context in which errors of `datasets`, the hub or the network become a DataError. Arguments as of
    `load_split`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        where = f"{setting} {name}"
        if is_saved(Path(os.path.expanduser(name))):
            raise DataError("could not be read by the package `datasets`", code="datasets-folder-unreadable",
                            where=where, value=reason, remedy="Save it again with Dataset.save_to_disk.") from error
        raise DataError("could not be read from the Hugging Face hub", code="hub-table-unreadable", where=where,
                        value=reason, remedy=f"Check the name and the connection, or give {instead}.") from error


def read_known(name: str, splits: Sequence[str], progress: Progress, instead: str, read: Callable[[str, Any], _Read]
               ) -> list[_Read]:
    """Results of `read` for each split (its name and its rows) of a data set on the hub that Ranvier has a name for.
    DataError if its rows are not as expected."""
    found = []
    for split in splits:
        progress(f"reading {name} ({split}) from the Hugging Face hub")
        rows = load_split(name, split, "data.train", instead)
        try:
            found.append(read(split, rows))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DataError("has rows in an unexpected format", code="hub-rows", where=f"data.train {name}",
                            value=f"{type(error).__name__}: {error}",
                            remedy="The dataset on the hub has changed: give a file in its format.") from error
    return found


def open_dataset(name: str, split: str, setting: str, instead: str, *, streaming: bool = True) -> Table:
    """The table of a split. Arguments and errors as of `load_split`."""
    found = load_split(name, split, setting, instead, streaming=streaming)
    with readable_rows(name, setting, instead):
        columns = found.column_names
        if columns is None:  # a stream without a description: the names are in its first row
            columns = list(next(iter(found)))

    def rows(wanted: Sequence[str]) -> Iterator[Row]:
        chosen = found.select_columns([column for column in wanted if column in columns])
        with readable_rows(name, setting, instead):
            for number, values in enumerate(chosen):
                yield Row(f"{name} {split} row {number}", values, is_arrow=True)

    same = getattr(found, "_fingerprint", None) if is_saved(Path(os.path.expanduser(name))) else name
    return Table(name=name, columns=tuple(columns), fingerprint=fingerprint("datasets", split, same), rows=rows,
                 features=getattr(found, "features", None) or {})


def missing_package(package: str, name: str, setting: str = "", instead: str = "a JSONL or CSV file") -> DataError:
    """The error for a table that needs a package which is not installed."""
    return DataError(f"needs the package `{package}`, which is not installed", code="table-package-missing",
                     where=f"{setting} {name}".strip(), remedy=f"{INSTALL}, or give {instead}.")


def has_package(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def text_of(row: Row, column: str, setting: str) -> str:
    """The text in a column of a row. DataError if the row has no text there."""
    if column not in row.values:
        raise no_column(row.place, column, row.values, setting)
    text: Any = row.values[column]
    if not isinstance(text, str):
        raise row.error("column-not-text", f"has a column `{column}` that is not a text", text,
                        f"Correct that row, or set --{setting} to a column of text.")
    if not is_unicode(text):
        raise DataError("has half of a surrogate pair, which is not a character", code="text-half-surrogate",
                        where=row.place, remedy="Give Unicode text.")
    return text
