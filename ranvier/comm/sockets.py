"""Ends the connections of Gloo from outside, so that threads that wait for a peer wake with an error.

A rank that waits inside Gloo for a living peer does not notice that a third one has gone: it waits until its time
limit, up to minutes, and aborting, shutting down or destroying the process group does not wake it. A socket that is
shut down is at its end for both sides at once, so all of their waits fail. Gloo does not tell its sockets; those that
appear while a process group connects are its own. Pure bookkeeping until `sever`; without /dev/fd nothing is found.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FOLDER = "/dev/fd"


class PeerSockets:
    """The sockets of this process's process groups, and those over which these find each other."""

    def __init__(self) -> None:
        self._own: set[tuple[int, int]] = set()
        self.severed = False
        """Whether ranks are lost, and connections to be made among the others would wait for them."""

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Connected sockets that appear inside belong to a process group."""
        before = _connected()
        yield
        now = _connected()
        self._own = (self._own & now) | (now - before)

    def sever(self) -> int:
        """Shut down those that are still open; their number. From any thread; each end sees the end of the other's
        data."""
        self.severed = True
        own, self._own = self._own, set()
        for descriptor, number in own:
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == number:  # else another file has the descriptor by now
                    with socket.socket(fileno=os.dup(descriptor)) as copy:
                        copy.shutdown(socket.SHUT_RDWR)
        return len(own)


def _connected() -> set[tuple[int, int]]:
    """Descriptor and number of each connected Internet socket of this process."""
    found = set()
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return set()
    for descriptor in map(int, filter(str.isdigit, names)):
        with suppress(OSError):
            about = os.fstat(descriptor)
            if stat.S_ISSOCK(about.st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    copy.getpeername()
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        found.add((descriptor, about.st_ino))
    return found
