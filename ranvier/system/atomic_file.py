"""Atomic writing of files, and opening that accepts regular files only.

A reader of a file that is written here sees either the old content or the new one, whenever the writer is killed. A
FIFO or a device in place of a file neither blocks its reader nor is read.
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
def replace_atomically(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A new binary file that replaces `path` when the block ends without an error; until then `path` is unchanged.

    The content is on the disk (fsync) before the rename. private: only this user may read it, from its first byte on.
    OSError if it cannot be written.
    """
    fresh, mode = path.with_name(f".{path.name}.{secrets.token_hex(6)}"), 0o600 if private else 0o666
    try:
        with open(fresh, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file atomically, text as UTF-8; `private` as above. OSError if that fails; `path` is then unchanged."""
    with replace_atomically(path, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def open_regular_file(path: Path, *, links: bool = True, own: bool = False) -> BinaryIO:
    """Open a regular file for reading, without ever blocking. OSError if `path` is anything else.

    links: accept symbolic links. own: refuse symbolic links, and files of other users than that of this process.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if own or not links else 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from error
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if own and found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "belongs to another user", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise
