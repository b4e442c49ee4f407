"""Construction of torch's TCPStore, only here: hosts one, or connects to one within a time limit.

TCPStore's own limits do not bound its constructor: a port that accepts connections but does not answer blocks it for
minutes, on the main thread without handling signals. So it is constructed on another thread, for which this one waits,
and only once something listens: for an unknown name or a port that refuses connections, TCPStore only reports a
timeout, after printing C++ stacks.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Collection
from concurrent.futures import wait as wait_for
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore

from ranvier.system.background import in_background

LOOPBACK = "127.0.0.1"
_GRACE_SECONDS = 1.0
"""Seconds after the store's own limit, whose error says more."""
_POLL_SECONDS = 0.2
_REFUSED_SECONDS = 2.0
TELL_SECONDS = 10.0
"""Seconds until a wait for other ranks is reported."""


def create_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Host a store in this process that listens on `address` only; port 0 picks a free one.

    timeout: of the store's blocking calls. OSError if it cannot listen.
    """
    listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False,
                    master_listen_fd=listener.detach())


def create_store_everywhere(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Host a store in this process that listens on all interfaces, if the one that others reach is unknown."""
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def print_missing(missing: Collection[int], size: int) -> None:
    """Print on standard error which ranks the start waits for."""
    names = ", ".join(map(str, sorted(missing)))
    print(f"ranvier: waits for {len(missing)} of {size} ranks: {names}", file=sys.stderr, flush=True)


def connect_store(host: str, port: int, timeout: timedelta, *, tells: bool = False, is_there: bool = False) -> TCPStore:
    """A connection to a store that may not be there yet. Signals are handled while it waits.

    timeout: of the connection, and of the store's blocking calls. tells: print why the wait is long. is_there: the
    store has been hosted before, so a port that refuses connections for `_REFUSED_SECONDS` has lost it. OSError if at
    the end the name is unknown, nothing listens, or the listener does not answer; RuntimeError as raised by TCPStore.
    """
    now = time.monotonic()
    end, tell = now + timeout.total_seconds(), now + TELL_SECONDS
    refused_end = min(end, now + _REFUSED_SECONDS) if is_there else end
    while True:
        try:
            wait = min(max(end - time.monotonic(), _POLL_SECONDS), TELL_SECONDS)  # for an address that does not answer
            socket.create_connection((host, port), timeout=wait).close()
            break
        except OSError as error:
            if time.monotonic() > (refused_end if isinstance(error, ConnectionRefusedError) else end):
                raise
            if tells and time.monotonic() > tell:
                print(f"ranvier: waits for rank 0's store at {host}:{port}: {error}", file=sys.stderr, flush=True)
                tells = False
        time.sleep(_POLL_SECONDS)
    made = in_background(partial(TCPStore, host, port, is_master=False, timeout=timeout, wait_for_workers=False),
                         "ranvier-connect")
    if wait_for((made,), timeout.total_seconds() + _GRACE_SECONDS).not_done:
        raise TimeoutError(f"it accepts connections and does not answer as a store for {timeout.total_seconds():g} s")
    return made.result()
