"""Atomic writing of files.

A reader of a file that is written here sees either the old content or the new one, whenever the writer is killed. A
symbolic link at the path is replaced, and never followed; a device, such as /dev/null, is not replaced.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_atomically(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open a new binary file that replaces `path` when the block ends without an error; until then `path` is unchanged.

    The content is on the disk (fsync) before the rename. private: only this user may read it, from its first byte on.
    Raises OSError if it cannot be written.
    """
    fresh, mode = path.with_name(f".{path.name}.{secrets.token_hex(6)}"), 0o600 if private else 0o666
    if _is_device(path):
        raise OSError(errno.EINVAL, "it is a device")
    try:
        with open(fresh, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def clear_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what killed writers of `name` (a glob pattern) have left in `folder`; no other process may write it
    now."""
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 12}"):
        with suppress(OSError):
            path.unlink()


def _is_device(path: Path) -> bool:
    return path.absolute().parent == Path("/dev") or (  # the links there are streams, such as /dev/stdout
        not path.is_symlink() and (path.is_char_device() or path.is_block_device()))


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file atomically, text as UTF-8; `private` as above. Raises OSError if that fails; `path` is then
    unchanged."""
    with replace_atomically(path, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_problem(path: Path) -> str | None:
    """Why `write_atomically` could not write `path`; None if it can. Called before the work whose result the file will
    hold."""
    try:
        return "it is a folder" if path.is_dir() else "it is a device" if _is_device(path) else (
            "no such folder" if not path.absolute().parent.is_dir() else folder_problem(path.parent))
    except OSError as error:
        return error.strerror or str(error)


def folder_problem(folder: Path) -> str | None:
    """Why nothing could be written into `folder`, or into its nearest existing parent; None if a file can be written,
    which is tried: permissions alone are not sufficient."""
    folder = folder.absolute()
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
