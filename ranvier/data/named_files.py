"""Checks of the names in --data.train and --data.eval, and readers of the user's own files and of tables by name."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ranvier.config.run import Data
from ranvier.data import tables
from ranvier.data.cache import fingerprint
from ranvier.errors import DataError

MOST_BYTES = 4 << 30
"""Size of the largest text file."""
TO_UTF8 = "Other text is converted by iconv -f LATIN1 -t UTF-8 FILE."
"""Remedy for text in another encoding."""


def _given_files(data: Data) -> list[tuple[str, str]]:
    """(name, setting) of --data.train and --data.eval, as far as they are given."""
    return [(name, setting) for setting, name in (("train", data.train), ("eval", data.eval)) if name is not None]


def name_problems(data: Data, names: Sequence[str], form: str) -> list[DataError]:
    """Problems of the names: a name is missing, or is neither known nor an existing path.

    form: what may be given, in words.
    """
    if not data.train:
        return [DataError(f"is missing: the task {data.task} has no data without it", code="train-data-missing",
                          where="data.train", remedy=f"Give {form}.")]
    return [DataError("is neither a known name nor a path that exists", code="unknown-data", where=f"data.{setting}",
                      value=name, remedy=f"Give {form}.")
            for name, setting in _given_files(data) if name not in names and not _exists(name)]


def table_name_problems(data: Data, names: Sequence[str], form: str, *, elsewhere: bool) -> list[DataError]:
    """The problems of `name_problems`, for names that may also be data sets on the Hugging Face hub. elsewhere: the
    package that reads it may be on another machine."""
    hub = tuple(name for name, _ in _given_files(data) if is_data_set(name))
    found = name_problems(data, (*names, *hub), form)
    if hub and not elsewhere and not tables.has_package("datasets"):
        found.append(tables.missing_package("datasets", hub[0], "data.train", form))
    return found


def is_data_set(name: str) -> bool:
    """Whether this is the name of a data set on the hub, as OWNER/NAME or with :CONFIGURATION, and not of a file
    here."""
    return tables.is_hub_name(name) and ("/" in name or ":" in name) and not _exists(name)


@contextmanager
def readable_file(path: Path, setting: str, form: str) -> Iterator[None]:
    """A context in which a file that cannot be read is a DataError. setting: train or eval; form: what may be given."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError("is not UTF-8 text", code="data-not-utf8", where=f"data.{setting}",
                        value=f"{path}: {error.reason}", remedy=f"Give {form}. {TO_UTF8}") from error
    except OSError as error:
        raise DataError("cannot be read", code="data-unreadable", where=f"data.{setting}", value=f"{path}: {error}",
                        remedy=f"Give {form}.") from error


def training_name(data: Data) -> str:
    """data.train, which `name_problems` requires."""
    assert data.train is not None, "name_problems has been asked"
    return data.train


def text_only(data: Data) -> list[DataError]:
    """Problems of image settings with a task that has no images."""
    if data.augment == "none" and not data.augment_repeats:
        return []
    return [DataError(f"has no effect with the task {data.task}", code="augment-without-images", where="data.augment",
                      value=data.augment,
                      remedy="Leave `--data.augment` and `--data.augment-repeats` out; only images have it.")]


def refusals(look: Callable[[], object]) -> list[DataError]:
    """The DataError that `look` raises, if it does."""
    try:
        look()
    except DataError as problem:
        return [problem]
    return []


def first_looks(data: Data, names: Sequence[str], look: Callable[[Path, str], None]) -> list[DataError]:
    """The DataErrors that `look` of (path, setting), which does not read everything, raises for the existing files and
    folders that --data.train and --data.eval name."""
    return [problem for name, setting in _given_files(data) if name not in names and _exists(name)
            for problem in refusals(partial(look, Path(os.path.expanduser(name)), setting))]


def first_rows(data: Data, names: Sequence[str], form: str, rows: Callable[[str, str], Iterator[object]], *,
               elsewhere: bool) -> list[DataError]:
    """`table_name_problems`, or, if there are none, the errors that `rows` of (name, setting) raises for the first row
    of each data set that is not on the hub."""
    def look(name: str, setting: str) -> None:
        next(rows(name, setting), None)

    return table_name_problems(data, names, form, elsewhere=elsewhere) or [
        problem for name, setting in _given_files(data) if not is_data_set(name)
        for problem in refusals(partial(look, name, setting))]


def check_is_file(path: Path, setting: str, form: str) -> None:
    """DataError if it is not a file. setting: train or eval; form: what may be given, in words."""
    if not path.is_file():
        raise DataError("is not a file", code="data-not-file", where=f"data.{setting}", value=str(path),
                        remedy=f"Give {form}.")


def read_bytes(path: Path, setting: str, form: str) -> bytes:
    """The content of a text file. DataError if it is not a file, cannot be read, or is larger than 4 GiB. Arguments as
    of `check_is_file`."""
    with readable_file(path, setting, form):
        check_is_file(path, setting, form)
        if path.stat().st_size > MOST_BYTES:
            raise DataError("is larger than 4 GiB, the limit for a text file", code="data-file-too-large",
                            where=f"data.{setting}", value=str(path), remedy="Give a part of it.")
        return path.read_bytes()


def visible_files(root: Path, enter: Callable[[str], bool] | None = None) -> Iterator[Path]:
    """All files under `root` whose names do not begin with a dot. enter: whether to enter a folder, by its name; by
    default, all folders whose names do not begin with a dot are entered once, also through links."""
    seen = {home := root.resolve()}

    def is_new(path: Path) -> bool:
        place = path.resolve()
        if place in seen or (path.is_symlink() and place.is_relative_to(home)):
            return False
        seen.add(place)
        return True

    for folder, folders, files in os.walk(root, followlinks=enter is None):
        folders[:] = filter(enter, folders) if enter else [
            name for name in sorted(filter(_is_visible, folders)) if is_new(Path(folder, name))]
        yield from (Path(folder, file) for file in files if _is_visible(file))


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _exists(name: str) -> bool:
    try:
        path = Path(os.path.expanduser(name))
        return bool(name) and (path.exists() or bool(glob.glob(str(path), recursive=True)))
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, "~name" of an unknown user
        return False


# --- tables -----------------------------------------------------------------------------------------------------------

# Tables by the names that a user gives: a file, a folder or a pattern of files, a saved data set, or one on the hub.
#
#     talks.jsonl   talks.json   talks.jsonl.gz   talks/   "talks/part-*.parquet"   OWNER/NAME[:CONFIGURATION][:SPLIT]


FILES = f"a file of rows ({', '.join(tables.ROW_ENDINGS)}; .gz appended), a folder or a pattern of such files"
"""Description of what is accepted in addition to the names of data sets."""
_UNREAD = re.compile(rf"({'|'.join(map(re.escape, tables.ROW_ENDINGS))})\.(7z|bz2|lz4|xz|zip|zst)$|\.arrow$")
"""Names of files that contain rows but are not read."""


def open_source(name: str, setting: str, form: str) -> tables.Table:
    """Open the table of this name; a table on the hub is streamed. setting: train or eval (the split validation). form:
    what may be given, for errors. DataError if there is no such table, or if its files have different columns."""
    if is_data_set(name) or tables.is_saved(Path(os.path.expanduser(name))):
        return tables.open_dataset(name, "train" if setting == "train" else "validation", f"data.{setting}", form)
    files = files_of(name)
    if not files:
        raise DataError("is not a table, and contains none", code="not-a-table", where=f"data.{setting}", value=name,
                        remedy=f"Give {form}.")
    opened = []
    for path in files:
        with readable_file(path, setting, form):
            opened.append(tables.open_file(path, name if len(files) == 1 else str(path)))
            if not opened[-1].columns:
                raise tables.without_rows(str(path))
    return opened[0] if len(opened) == 1 else _join_tables(name, opened)


def files_of(name: str) -> list[Path]:
    """The files of rows that a name stands for, in the order of their paths. DataError for a folder with rows in a file
    that is not read: they must not go missing."""
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        found = [file for file in visible_files(path) if file.is_file()]
        other = next((file for file in sorted(found) if _UNREAD.search(file.name.lower())), None)
        if other is not None:
            raise DataError("has a file of rows in a form that is not read", code="folder-with-unread-rows", where=name,
                            value=str(other.relative_to(path)),
                            remedy="Unpack or convert it, or give a pattern of the files that are meant.")
    else:
        found = [path] if path.exists() else [Path(file) for file in glob.glob(str(path), recursive=True)]
    return sorted(file for file in found if tables.ending_of(file) in tables.ROW_ENDINGS)


def _join_tables(name: str, parts: Sequence[tables.Table]) -> tables.Table:
    """Several tables as one. DataError if their columns differ."""
    for table in parts:
        if set(table.columns) != set(parts[0].columns):
            raise DataError(f"has other columns than {parts[0].name}", code="other-columns", where=table.name,
                            value=", ".join(sorted(table.columns)), remedy="Give files with the same columns.")

    def rows(columns: Sequence[str]) -> Iterator[tables.Row]:
        for table in parts:
            yield from table.rows(columns)

    return tables.Table(name=name, columns=parts[0].columns, rows=rows,
                        fingerprint=fingerprint("tables", [table.fingerprint for table in parts]))
