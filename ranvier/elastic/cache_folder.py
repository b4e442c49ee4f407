"""The folder of the cache: what all its files occupy, who holds which of them, and what may go.

Whoever uses a file holds a shared lock on it (flock), which ends with its process. A file is removed only by one who
gets the exclusive lock: then no process that lives uses it. The lock on the folder itself is held while entries are
written, so that the ranks of a node keep one quota together.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ranvier.elastic.cache_form import Unfit

_OURS = re.compile(r"\.?([0-9a-f]{32})\.(bin|json)(\.[0-9a-f]{12})?")
_SPARE_BYTES = 1 << 15
_SPARE_SHARE = 256
"""A file system's own records of where a file's parts are, which count as the file's: at most one part in so many."""
_POLL_SECONDS = 0.002


class Folder:
    """path: None for a folder of this user's on this machine, whose files go when no run uses them any more.
    quota_bytes: the most that all files of the cache in it may occupy."""

    def __init__(self, path: Path | None, quota_bytes: int) -> None:
        self.given = path is not None
        self.path = path or Path(tempfile.gettempdir()) / f"ranvier-cache-{os.getuid()}"
        self.quota_bytes = quota_bytes

    def make(self) -> None:
        """Make it where it is not there. OSError; Unfit when somebody else owns the one that nobody named."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o777 if self.given else 0o700)
        there = os.stat(self.path, follow_symlinks=self.given)
        if not self.given and (there.st_uid != os.getuid() or not self.path.is_dir() or self.path.is_symlink()):
            raise Unfit(f"{self.path} belongs to somebody else")

    def used_bytes(self) -> int:
        """What the files of the cache occupy: holes do not count."""
        return sum(512 * entry.st_blocks for _, _, entry in self._files())

    def room_bytes(self) -> int:
        """What may still be written."""
        used = self.used_bytes()
        return self.quota_bytes - used - used // _SPARE_SHARE - _SPARE_BYTES

    def drop_unheld(self, keep: Collection[str] = (), *, older_seconds: float = 0.0,
                    until_bytes: int | None = None) -> None:
        """Remove what no process holds, the oldest first, but for `keep` and what was written less than
        `older_seconds` ago; until there is room for `until_bytes`."""
        last: dict[str, float] = {}
        for key, _, entry in self._files():
            last[key] = max(last.get(key, 0.0), entry.st_mtime)
        for key in sorted(last, key=lambda key: last[key]):
            if until_bytes is not None and self.room_bytes() >= until_bytes:
                return
            if key not in keep and last[key] <= time.time() - older_seconds:
                self.drop(key)

    def drop(self, key: str) -> bool:
        """Remove the files of `key` unless a process holds them; whether they are gone."""
        binary = self.path / f"{key}.bin"
        try:
            file = os.open(binary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            with suppress(OSError):  # the folder may go meanwhile
                self._unlink(key)
            return True
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._unlink(key)
            binary.unlink(missing_ok=True)
            return True
        except OSError:
            return False
        finally:
            os.close(file)

    @contextmanager
    def alone(self, patience_seconds: float = 2.0) -> Iterator[bool]:
        """Inside is one writer of the node at a time; False when none of the others left within `patience_seconds`.
        Where the file system knows no locks on folders, several may be inside, and exceed the quota by what they write.
        OSError when there is no folder."""
        file = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield lock(file, exclusive=True, patience_seconds=patience_seconds)
        finally:
            os.close(file)

    def leave(self) -> None:
        """Remove the folder if it was not given, and nothing is in it."""
        if not self.given:
            with suppress(OSError):
                self.path.rmdir()

    def _unlink(self, key: str) -> None:
        """All of a key's files but the .bin, and the description first: what is half removed is unfinished."""
        self.path.joinpath(f"{key}.json").unlink(missing_ok=True)
        for path in self.path.glob(f".{key}.json.*"):
            path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[str, str, os.stat_result]]:
        """(key, name, stat) of every file of the cache."""
        try:
            found = list(os.scandir(self.path))
        except OSError:
            return
        for entry in found:
            if match := _OURS.fullmatch(entry.name):
                with suppress(OSError):
                    yield match[1], entry.name, entry.stat(follow_symlinks=False)


def lock(file: int, *, exclusive: bool, patience_seconds: float = 2.0) -> bool:
    """Lock an open file or folder; True, too, where the file system knows no locks, False when others kept theirs."""
    until = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
        except OSError:
            return True
        time.sleep(_POLL_SECONDS)
