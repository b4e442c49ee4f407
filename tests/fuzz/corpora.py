"""Folders like those of users, and names of data sets that do not exist."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from ranvier.config.run import Data, Run, Transformer
from ranvier.data.corpus import open_corpus
from ranvier.data.prepare import prepare
from tests.fuzz.inputs import try_all

KINDS = ("text", "bytes", "empty", "latin", "long line", "sparse", "pipe", "link to nothing", "link to itself",
         "link to zeros", "link to the folder", "socket", "folder", "unreadable")
NAMES = st.one_of(st.sampled_from(["a.txt", "b", ".hidden", "ä.md", "x" * 200, "sp ace", "-", "new\nline", "c.tgz"]),
                  st.binary(min_size=1, max_size=4).filter(lambda name: b"/" not in name and b"\0" not in name).map(
                      os.fsdecode).filter(lambda name: name not in (".", "..")))
ENTRIES = st.dictionaries(NAMES, st.tuples(st.sampled_from(KINDS), st.text(max_size=40), st.binary(max_size=40)),
                          max_size=6)
LIMITS = st.sampled_from([1, 7, 100, 1 << 20, 1 << 40, (1 << 62) - 1])


def put(path: Path, kind: str, text: str, data: bytes) -> str | None:
    """Make an entry of this kind; returns its text if it is a document."""
    if kind in ("text", "long line"):
        text = text.replace("\0", "") * (20_000 if kind == "long line" else 1)
        path.write_text(text, encoding="utf-8", errors="ignore", newline="")
        return path.read_bytes().decode("utf-8-sig")
    if kind in ("bytes", "latin", "unreadable"):
        path.write_bytes(b"\xe9\xff" + data if kind == "latin" else b"\0" + data if kind == "bytes" else data)
        if kind == "unreadable":
            path.chmod(0)
            return _decoded(data) if os.geteuid() == 0 else None
    elif kind == "empty":
        path.write_bytes(b"")
        return ""
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(1 << 26)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        _socket(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"nothing": "/no/such", "itself": path.name, "zeros": "/dev/zero", "folder": "."}[
            kind.rpartition(" ")[2]])
    return None


def _decoded(data: bytes) -> str | None:
    try:
        return None if b"\0" in data else data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        try:
            made.bind(os.fspath(path))
        except OSError:  # its path is too long for a socket
            os.mkfifo(path)


def folders(folder: Path, count: int) -> int:
    """The documents are exactly those of the files that are text."""
    def work(value):
        entries, limit = value
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        expected = {}
        for name, entry in entries.items():
            text = put(folder / name, *entry)
            if text and not name.startswith("."):
                expected[name] = text
        lines: list[str] = []
        found = list(open_corpus(str(folder), folder.parent / "cache", lines.append).documents(limit))
        for document in found:
            data = (folder / document.name).read_bytes().removeprefix(b"\xef\xbb\xbf")
            assert document.text and data.startswith(document.text.encode())
        assert sum(len(document.text.encode()) for document in found) <= limit
        if limit > 1 << 20:
            assert {document.name: document.text for document in found} == expected

    return try_all(st.tuples(ENTRIES, LIMITS), work, count)


def single_files(folder: Path, count: int) -> int:
    """Prepare one file for a run: its tokens decode to its text, or there is an error."""
    def work(value):
        kind, text, data, vocab = value
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        expected = put(folder / "a.txt", kind, text, data)
        run = Run(model=Transformer(vocab=vocab, sequence=8), data=Data(corpus=str(folder / "a.txt"),
                                                                cache_dir=folder / "cache"))
        prepared = prepare(run)
        train, held = (part.tokens.head(len(part.tokens)) for part in (prepared.train, prepared.eval))
        assert expected is not None
        assert prepared.tokenizer.decode(train[:-1]) + prepared.tokenizer.decode(held[:-1]) == expected

    return try_all(st.tuples(st.sampled_from(KINDS), st.text(max_size=300), st.binary(max_size=60),
                             st.sampled_from([256, 257, 300])), work, count)


_WORDS = st.sampled_from(["a/b", "json", "text", "wikitext", "imdb:x", "owner/set:train", "hub://x", "~nobody/x",
                          "..", "/dev/zero", "/dev/null", "/proc/self/mem", "x" * 300, "a\0b", "/" + "y" * 5000,
                          "", " ", "file.txt", "C:\\x", "a//b", "https://x/y", "\ud800", "sotu2", "a:b:c"])


def names(folder: Path, count: int) -> int:
    """Names of data sets that do not exist. The hub is unreachable."""
    folder.mkdir(parents=True, exist_ok=True)

    def work(name):
        if name != "python-stdlib" and name != "sotu":
            for number, _ in enumerate(open_corpus(name, folder / "cache", lambda line: None).documents(10)):
                assert number < 10

    return try_all(st.one_of(_WORDS, st.text(max_size=9).map(lambda text: f"none-{text}"),
                             st.text(min_size=1, max_size=5).map(lambda text: f"{text}/none")), work, count)


FUZZERS: dict[Callable[[Path, int], int], int] = {folders: 8, single_files: 4, names: 3}
"""Fuzzer -> its number of inputs in a round."""
