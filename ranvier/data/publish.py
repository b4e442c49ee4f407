"""Files in the cache that appear only when they are complete, written by one process while others wait for it."""

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
from ranvier.system.atomic_file import replace_atomically
from ranvier.system.untrusted_file import open_lock

Progress = Callable[[str], None]
"""Takes one line of text about what is being done."""

_SOON_SECONDS = 0.5
"""A shorter wait is not reported."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class RunProgress:
    """The `Progress` of a rank, where several ranks prepare the same file. is_own: whether a process, by its
    `process_name`, is a rank of the same run."""

    tell: Progress
    is_own: Callable[[str], bool]

    def __call__(self, line: str) -> None:
        self.tell(line)


@dataclass(frozen=True, kw_only=True)
class PreparationProgress:
    """The `Progress` of `ranvier data prepare`. processes: that may work on the data. advance: takes (what is being
    done, bytes or samples that are done)."""

    tell: Progress
    processes: int = 1
    advance: Callable[[str, int], None] = lambda what, done: None

    def __call__(self, line: str) -> None:
        self.tell(line)


class NotInCache(Exception):
    """A file of the cache would have to be made, and whoever asked wants only what is there."""


@dataclass(frozen=True)
class CacheOnly:
    """The `Progress` of those who read what is prepared and make nothing: `NotInCache` is raised instead."""

    def __call__(self, line: str) -> None:
        """Lines are dropped."""


def processes_of(progress: Progress) -> int:
    """How many processes may work on the data."""
    return progress.processes if isinstance(progress, PreparationProgress) else 1


def advance(progress: Progress, what: str, done: int) -> None:
    """Report how much of `what` is done, where somebody shows it."""
    if isinstance(progress, PreparationProgress):
        progress.advance(what, done)


def process_name() -> str:
    """A name of this process that no other process has at the same time."""
    return f"{socket.gethostname()} {os.getpid()}"


@contextmanager
def one_writer(path: Path, progress: Progress) -> Iterator[None]:
    """A context in which one process (and one thread) is at a time for this `path`; check for the file again inside.

    The lock ends with its process. On a file system without locks several processes may be inside: they write the same,
    and `published` keeps their files complete. A wait for a process of another run is reported to `progress`.
    """
    if isinstance(progress, CacheOnly):
        raise NotInCache(str(path))
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path.with_name(f".{path.name}.lock"))
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
        progress(f"{path.parent} has no file locks: continuing without")
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
    """A context with a new file that gets the name `path`, complete and on disk, when it ends without an exception.

    DataError if it cannot be written.
    """
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as file:
            yield file


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError("could not be written", where=str(path), value=str(error),
                        remedy="Free space there, or choose another folder with --data.cache-dir.") from error
