"""Locks of files whose holder names itself, and shows that it still runs.

    .x.lock    000000000012                                a heartbeat, which a thread of the holder counts
               {"host": "node3", "pid": 4711, ...}         the holder, as in a lease

The kernel's lock (flock) decides which process holds it, and ends with the process. A waiting process polls for it, so
that signals are handled. The work of a holder may take hours, so a wait has no time limit: it ends when the heartbeat
stops, as it does if the holder is stopped, or its machine is cut off.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ranvier.system.lease import HEARTBEAT_SECONDS, Owner, heartbeat_content, owner_in
from ranvier.system.untrusted_file import open_lock

EXPIRY_SECONDS = 120.0
"""A wait ends when the heartbeat has not changed for this time: file servers show a change after up to 60 seconds, and
a library may block the interpreter for a while."""
_SOON_SECONDS = 0.5
"""A shorter wait is not reported."""
_POLL_SECONDS = 0.02
_LONG_POLL_SECONDS = 0.2
_MOST_BYTES = 4096


class StaleLockError(Exception):
    """The holder of a lock has no heartbeat. holder: None if the file does not name it."""

    def __init__(self, holder: Owner | None, seconds: float) -> None:
        super().__init__(f"{holder or 'an unknown process'}, silent for {seconds:.0f} s")
        self.holder, self.seconds = holder, seconds


@contextmanager
def file_lock(path: Path, *, on_wait: Callable[[Owner | None], None], on_no_locks: Callable[[], None]
              ) -> Iterator[bool]:
    """Hold the lock of `path`, whose file is created if it is missing; yields False if there are no locks.

    Args:
        on_wait: called once with the holder, if the lock is not available soon.
        on_no_locks: called if the file system has no locks; then several processes may hold it.

    Raises OSError if the file cannot be opened; StaleLockError if the holder's heartbeat stops.
    """
    handle = open_lock(path)
    ended = threading.Event()
    beating = None
    try:
        if is_held := _acquire(handle, on_wait, on_no_locks):
            owner = Owner.this_process()
            _write(handle, 0, owner)
            beating = threading.Thread(target=_beat, args=(handle, owner, ended), name="ranvier-lock", daemon=True)
            beating.start()
        yield is_held
    finally:
        ended.set()
        if beating is not None:
            beating.join()
        os.close(handle)


def open_folder(folder: Path) -> int:
    """Open a handle of a folder, to be locked. Raises OSError."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def lock_now(handle: int, *, shared: bool) -> bool:
    """Lock an open file or folder without waiting; False if others hold a conflicting lock. Also True if the file
    system has no locks."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def remove_unlocked(folder: Path) -> None:
    """Remove a folder, unless a process holds its lock. Raises OSError."""
    handle = open_folder(folder)
    try:
        if lock_now(handle, shared=False):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _acquire(handle: int, on_wait: Callable[[Owner | None], None], on_no_locks: Callable[[], None]) -> bool:
    """Wait for the lock. Returns False if there are no locks."""
    began = seen_at = time.monotonic()
    seen, is_told = b"", False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError:
            on_no_locks()
            return False
        content, now = os.pread(handle, _MOST_BYTES, 0), time.monotonic()
        if content != seen:
            seen, seen_at = content, now
        if now - seen_at >= EXPIRY_SECONDS:
            raise StaleLockError(owner_in(seen), now - seen_at)
        if now - began >= _SOON_SECONDS and not is_told:
            is_told = True
            on_wait(owner_in(seen))
        time.sleep(_LONG_POLL_SECONDS if is_told else _POLL_SECONDS)


def _beat(handle: int, owner: Owner, ended: threading.Event) -> None:
    """Increment the heartbeat until the lock is released."""
    count = 0
    while not ended.wait(HEARTBEAT_SECONDS):
        count += 1
        _write(handle, count, owner)


def _write(handle: int, count: int, owner: Owner) -> None:
    content = heartbeat_content(count, owner)
    with suppress(OSError):  # a full disk, which must not stop the work
        os.ftruncate(handle, os.pwrite(handle, content, 0))
