"""The only place that makes torch's TCPStore: it hosts one, or connects to one within a limit.

TCPStore's own limits do not bound its constructor: a port that accepts connections and says nothing holds it for
minutes, on the main thread without regard to signals. So it is made on another thread, and this one waits for it.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_GRACE_SECONDS = 1.0
"""After the store's own limit, whose error says more."""


def create_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Host a store in this process that listens on `address` only; port 0 picks a free one.

    timeout: of the store's blocking calls. OSError if it cannot listen.
    """
    listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False,
                    master_listen_fd=listener.detach())


def create_store_everywhere(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Host a store in this process that listens on all interfaces, where the one that others reach is unknown."""
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def connect_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """A connection to a store that may not be there yet. Signals are handled while it waits.

    timeout: of the connection, and of the store's blocking calls. TimeoutError if nothing answers for so long; other
    OSError and RuntimeError as TCPStore raises them.
    """
    found: list[TCPStore | Exception] = []
    done = threading.Event()

    def call() -> None:
        try:
            found.append(TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False))
        except Exception as error:  # raised again where it is awaited
            found.append(error)
        finally:
            done.set()

    threading.Thread(target=call, name="ranvier-connect", daemon=True).start()
    if not done.wait(timeout.total_seconds() + _GRACE_SECONDS):
        raise TimeoutError(f"it accepts connections and does not answer as a store for {timeout.total_seconds():g} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
