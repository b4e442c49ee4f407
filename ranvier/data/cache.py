"""The cache of fetched files, tokenizers and prepared samples, which runs of one user share: its location, names of
content, and files that appear only when they are complete, written by one process while others wait for it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import platformdirs

from ranvier.config.run import Run
from ranvier.errors import DataError
from ranvier.system.atomic_file import clear_unfinished, replace_atomically
from ranvier.system.file_lock import StaleLockError, file_lock
from ranvier.system.lease import Owner

Progress = Callable[[str], None]
"""Takes one line of text about what is being done."""


def cache_folder(run: Run) -> Path:
    """`data.cache_dir`, or the cache folder of the user."""
    return Path(os.path.expanduser(run.data.cache_dir)) if run.data.cache_dir else user_cache_folder()


def user_cache_folder() -> Path:
    """The cache folder of the user."""
    return Path(platformdirs.user_cache_dir("ranvier"))


def fingerprint(*parts: object) -> str:
    """A short text that differs if the `repr` of the parts differs, such as corpora, tokenizers and settings: 16
    hexadecimal digits."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class PreparationProgress:
    """The `Progress` of data preparation. processes: how many may work on it. advance: takes (what is being done, bytes
    or samples done). is_own: whether a process, by its `process_name`, is a rank of the same run, if several ranks
    prepare the same file."""

    tell: Progress
    processes: int = 1
    advance: Callable[[str, int], None] = lambda what, done: None
    is_own: Callable[[str], bool] = lambda process: False

    def __call__(self, line: str) -> None:
        self.tell(line)


class NotInCache(Exception):
    """A file is not in the cache, and the caller wants only existing files."""


@dataclass(frozen=True)
class CacheOnly:
    """The `Progress` of readers that make nothing: `NotInCache` is raised if a file would have to be made."""

    def __call__(self, line: str) -> None:
        """Lines are dropped."""


def processes_of(progress: Progress) -> int:
    """Number of processes that may work on the data."""
    return progress.processes if isinstance(progress, PreparationProgress) else 1


def advance(progress: Progress, what: str, done: int) -> None:
    """Report how much of `what` is done, if `progress` shows it."""
    if isinstance(progress, PreparationProgress):
        progress.advance(what, done)


def process_name() -> str:
    """A name of this process that no other process has at the same time."""
    return name_of(Owner.this_process())


def name_of(process: Owner) -> str:
    """The same for any process."""
    return f"{process.host} {process.pid}"


@contextmanager
def one_writer(path: Path, progress: Progress) -> Iterator[bool]:
    """A context that only one process (and one thread) at a time can be in for this `path`; check for the file again
    inside.

    The lock ends with its process. On a file system without locks (False) several processes may be inside: they write
    the same, and `publish_file` keeps their files complete. A wait for a process of another run is reported to
    `progress`, with that process. DataError if that process shows no sign of life.
    """
    if isinstance(progress, CacheOnly):
        raise NotInCache(str(path))

    def on_wait(holder: Owner | None) -> None:
        if not (isinstance(progress, PreparationProgress) and holder is not None and progress.is_own(name_of(holder))):
            progress(f"{_describe_holder(holder)} is preparing {path.name}: waiting for it")

    lock = file_lock(path.with_name(f".{path.name}.lock"), on_wait=on_wait, on_no_locks=lambda: progress(
        f"{path.parent} has no file locks: continuing without"))
    with ExitStack() as stack:
        try:
            with _writable(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                is_alone = stack.enter_context(lock)
        except StaleLockError as error:
            holder = error.holder
            kill = f" (kill {holder.pid} on {holder.host})" if holder is not None and holder.has_known_pid else ""
            raise DataError(f"is being prepared by {_describe_holder(holder)}, which has shown no life for "
                            f"{error.seconds:.0f} s", code="data-preparation-stalled", where=str(path),
                            value=None if holder is None else str(holder),
                            remedy=f"Let that process continue, or end it{kill}, or choose another folder with "
                                   "`--data.cache-dir`.") from error
        yield is_alone


def make_once(path: Path, is_there: Callable[[], bool], make: Callable[[], None], progress: Progress,
              folders: Sequence[Path] = ()) -> None:
    """Have one process (`one_writer`) make what does not exist yet, in `folders` that no other program writes to."""
    if not is_there():
        with one_writer(path, progress) as is_alone:
            if not is_there():
                for folder in folders if is_alone else ():
                    clear_unfinished(folder)
                make()


def _describe_holder(holder: Owner | None) -> str:
    """Description of the holder of a lock, and since when it holds it."""
    if holder is None:
        return "another process"
    return f"{holder} (since {holder.since})" if holder.since else str(holder)


@contextmanager
def publish_file(path: Path) -> Iterator[BinaryIO]:
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
        raise DataError("could not be written", code="data-not-writable", where=str(path), value=str(error),
                        remedy="Free space there, or choose another folder with `--data.cache-dir`.") from error
