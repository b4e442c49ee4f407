"""Files that come whole and files that are what they seem: writing in one step, and opening without surprises.

A reader of a file that is written here sees the old content or the new one, whenever the writer dies. A FIFO or a
device under the name of a file that should be read neither blocks the reader nor is read.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name `path`, on the disk, when the block ends well; what was there stays until then.
    OSError when that cannot be."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with open(fresh, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step; text as UTF-8. OSError when it cannot be written, and `path` is as it was."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def open_plain(path: Path, *, links: bool = True, own: bool = False) -> BinaryIO:
    """Open a file for reading without ever blocking. OSError where it is no plain file; without `links` also where it
    is a link, with `own` where it is one or belongs to another user than this process's."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if own or not links else 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link", str(path)) from error
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        if own and found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "belongs to another user", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise
