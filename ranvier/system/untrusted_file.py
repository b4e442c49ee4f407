"""Files that another user may have left: how they are opened, for reading, writing and locking.

    open_regular_file, read_bytes               a regular file, of limited size; neither a FIFO nor a device blocks
    read_json, read_toml                        the document in such a file
    parse_json, parse_toml                      a document of limited depth; they raise only ValueError
    is_unicode                                  a text that files and tokenizers accept
    member                                      a file of a folder, but no link that leads out of it
    new_file, append_file, open_lock            never through a symbolic link

Data files that the user names explicitly need none of this.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_DEPTH = 200
"""Nesting of objects and lists: far below what the interpreter can print, copy and write."""
_MOST_KEYS = 32
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
_DOTTED = re.compile(rf"(?<![\w\-\\])(?:{_PART}\.[ \t]*+){{{_MOST_KEYS}}}")
"""A name of more parts than `_MOST_KEYS`. For a name of n parts tomllib stores n * n / 2 names: gigabytes for 64
KiB."""


def open_regular_file(path: Path, *, links: bool = True, own: bool = False, unshared: bool = False) -> BinaryIO:
    """Open a regular file for reading, without ever blocking. Raises OSError if `path` is anything else.

    links: accept symbolic links. own: refuse symbolic links, and files of users other than this process's. unshared:
    refuse files of users other than this one and root, and those that everybody may write.
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
        if unshared and (problem := _writers(found)) is not None:
            raise OSError(errno.EPERM, problem, str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _writers(status: os.stat_result) -> str | None:
    """Description of others who may write a file; None if no others may. Its group may: that is the user's choice."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    return "may be written by everybody" if status.st_mode & stat.S_IWOTH else None


def read_bytes(path: Path, most_bytes: int, *, own: bool = False, unshared: bool = False) -> bytes:
    """Read all of a file; other arguments as for `open_regular_file`. Raises OSError, and ValueError if it is
    larger."""
    with open_regular_file(path, own=own, unshared=unshared) as file:
        parts, left = list[bytes](), most_bytes + 1
        while left and (part := file.read(min(left, 1 << 20))):  # read allocates as much memory as it may return
            parts.append(part)
            left -= len(part)
    if not left:
        raise ValueError(f"has more than {most_bytes:,} bytes")
    return b"".join(parts)


def read_json(path: Path, most_bytes: int, *, own: bool = False, unshared: bool = False) -> object:
    """Read the JSON document in a file. Raises as `read_bytes` and `parse_json`, and ValueError for half of a surrogate
    pair, which no library accepts as a character."""
    content = read_bytes(path, most_bytes, own=own, unshared=unshared)
    found = parse_json(content)
    may_have_half = b"\\ud" in content.lower() or b"\0" in content  # an escape, or UTF-16
    if may_have_half and not is_unicode(json.dumps(found, ensure_ascii=False)):
        raise ValueError("has half of a surrogate pair")
    return found


def json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """Read the JSON object in an optional file; empty if none can be read."""
    with suppress(OSError, ValueError):
        if isinstance(found := read_json(path, most_bytes), dict):
            return found
    return {}


def read_toml(path: Path, most_bytes: int, *, own: bool = False) -> dict[str, Any]:
    """Read the TOML document in a file. Raises as `read_bytes` and `parse_toml`."""
    return parse_toml(read_bytes(path, most_bytes, own=own).decode())


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which no text file can hold and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json(content: bytes | str) -> object:
    """Parse the JSON document in a text. Raises ValueError for text that is not JSON, or is nested too deeply."""
    return _parse(json.loads, content)


def parse_toml(content: str) -> dict[str, Any]:
    """Parse the TOML document in a text. Raises ValueError for text that is not TOML, or is nested too deeply."""
    if _DOTTED.search(content):
        raise ValueError(f"has a name of more than {_MOST_KEYS} parts")
    found: dict[str, Any] = _parse(tomllib.loads, content)
    return found


def _parse(parser: Callable[[Any], Any], content: bytes | str) -> Any:
    try:
        found = parser(content)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    level = [found] if isinstance(found, (dict, list)) else []
    for _ in range(_MOST_DEPTH):
        if not level:
            return found
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)
                 if isinstance(inner, (dict, list))]
    raise ValueError("is nested too deeply")


def member(folder: Path, name: str) -> Path:
    """The path of the regular file `name` of `folder`. Raises OSError if it is missing, is not a regular file, or is a
    link out of the folder; a snapshot in Hugging Face's cache may link to the cache's blobs."""
    path = folder / name
    try:
        target, home = path.resolve(), folder.resolve()  # a folder in `name` may be a link, too
        places = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
        if not any(target.is_relative_to(place) for place in places):
            raise OSError(errno.ELOOP, "is a link that leads out of its folder", str(path))
    except RuntimeError as error:  # a loop of links
        raise OSError(errno.ELOOP, "is a loop of links", str(path)) from error
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path


def new_file(path: Path) -> BinaryIO:
    """Create a file for writing. Raises OSError, also if the name exists, even as a link."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666), "wb")


def append_file(path: Path) -> TextIO:
    """Open a regular file to append UTF-8 text. Raises OSError, also for a link."""
    return os.fdopen(_open_for_writing(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")


def open_lock(path: Path) -> int:
    """Open the lock file `path`, which is created if it is missing. Raises OSError for a symbolic or hard link, and for
    anything but a regular file: the holder of the lock writes its name there."""
    return _open_for_writing(path, os.O_RDWR)


def _open_for_writing(path: Path, flags: int) -> int:
    handle = os.open(path, flags | os.O_CREAT | os.O_NONBLOCK | _SAFE, 0o644)
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "is not a regular file with one name", str(path))
