"""Files in the cache that appear whole or not at all, made by one process while others wait for it."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ranvier.errors import DataError

Progress = Callable[[str], None]
"""Takes one line about what is being done."""


@contextmanager
def one_writer(path: Path, progress: Progress) -> Iterator[None]:
    """Inside is one process (and one thread) at a time for this `path`; whoever enters later looks again for the file.

    The lock dies with its process. Where the file system knows no locks, several may be inside: `published` keeps what
    they write whole, and they write the same.
    """
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is preparing {path.name}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            progress(f"{path.parent} knows no file locks: going on without")
        yield
    finally:
        os.close(lock)


@contextmanager
def published(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path`, on disk and whole, when the block ends without an exception.

    DataError when it cannot be written.
    """
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        try:
            with open(unfinished, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError("could not be written", where=str(path), value=str(error),
                        remedy="Free space there, or choose another folder with --data.cache-dir.") from error
