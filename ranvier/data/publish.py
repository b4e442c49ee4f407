"""Files in the cache that appear whole or not at all, made by one process while others wait for it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ranvier.errors import DataError
from ranvier.plain_file import replacing

Progress = Callable[[str], None]
"""Takes one line about what is being done."""

_SOON_SECONDS = 0.5
"""A wait that is no longer is not told."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class RunProgress:
    """A `Progress` of one rank of several that prepare the same thing. is_own: whether a process, by `process_name`, is
    a rank of the same run."""

    tell: Progress
    is_own: Callable[[str], bool]

    def __call__(self, line: str) -> None:
        self.tell(line)


def process_name() -> str:
    """This process, by a name that no other has at the same time."""
    return f"{socket.gethostname()} {os.getpid()}"


@contextmanager
def one_writer(path: Path, progress: Progress) -> Iterator[None]:
    """Inside is one process (and one thread) at a time for this `path`; whoever enters later looks again for the file.

    The lock dies with its process. Where the file system knows no locks, several may be inside: `published` keeps what
    they write whole, and they write the same. A wait for a process that is no rank of the same run is told.
    """
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(lock, path, progress)
        yield
    finally:
        os.close(lock)


def _acquire(lock: int, path: Path, progress: Progress) -> None:
    """Wait for the lock; its file then names this process."""
    try:
        if not _acquired_soon(lock):
            holder = os.pread(lock, 1000, 0).decode(errors="replace")
            if not (isinstance(progress, RunProgress) and progress.is_own(holder)):
                progress(f"another process is preparing {path.name}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        progress(f"{path.parent} knows no file locks: going on without")
        return
    os.ftruncate(lock, 0)
    os.pwrite(lock, process_name().encode(), 0)


def _acquired_soon(lock: int) -> bool:
    deadline = time.monotonic() + _SOON_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)


@contextmanager
def published(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path`, on disk and whole, when the block ends without an exception.

    DataError when it cannot be written.
    """
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            yield file


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError("could not be written", where=str(path), value=str(error),
                        remedy="Free space there, or choose another folder with --data.cache-dir.") from error
