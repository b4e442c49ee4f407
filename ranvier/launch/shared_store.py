"""The store that all ranks share (rendezvous): which process hosts it, on which address, and its secret.

    local            the supervisor hosts it on the loopback address; ranks get the secret in their environment
    torchrun         torchrun's agent hosts it, on all interfaces; Ranvier uses keys below a prefix for this attempt
    mpiexec, srun    rank 0 hosts it on the address that the others reach; address and secret travel through MPI
    ... with MASTER_ADDR, or srun without MPI: rank 0, on that name's address; see below for the secret

Where the launcher has no channel for a secret, it is taken from the environment variable RANVIER_SECRET, which a job
script may export; without that, values are not signed (docs/security.md).
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from datetime import timedelta
from importlib.util import find_spec

from torch.distributed import PrefixStore, Store, TCPStore

from ranvier.comm.signed_store import SharedStore, signed
from ranvier.errors import LaunchError
from ranvier.launch.launchers import Started
from ranvier.system.machine import address_towards

_REMEDY = "Set MASTER_ADDR and MASTER_PORT, the same for all ranks, to a free port of rank 0's machine."
_LOOPBACK = "127.0.0.1"
_REFUSED_SECONDS = 2.0


def new_secret() -> str:
    """A random secret of 256 bits, in hexadecimal."""
    return secrets.token_hex(32)


def create_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Host a store in this process that listens on `address` only; port 0 picks a free one.

    timeout: of the store's blocking calls. OSError if it cannot listen.
    """
    listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False,
                    master_listen_fd=listener.detach())


def open_store(started: Started, timeout_seconds: float) -> tuple[Store, SharedStore]:
    """Host or connect to the store: that for torch's own use, and the signed one for Ranvier's.

    LaunchError if rank 0's address is unknown or cannot be reached within `timeout_seconds`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if started.master is None:
        return _open_through_mpi(started, timeout)
    host, port = started.master
    hosts = started.rank == 0 and not started.agent_store
    if started.agent_store:
        _await_launchers_store(host, port, timeout_seconds)
    try:
        store = _host_store(host, port, started, timeout) if hosts else TCPStore(
            host, port, is_master=False, timeout=timeout)
    except Exception as error:
        what = "cannot listen there" if hosts else "rank 0 cannot be reached there"
        raise LaunchError(f"{what}: {str(error).partition(chr(10))[0]}", where="launch", value=f"{host}:{port}",
                          remedy=_REMEDY) from error
    return signed(store if started.launcher == "local" else PrefixStore(f"ranvier/{started.attempt}", store),
                  started.secret)


def _await_launchers_store(host: str, port: int, timeout_seconds: float) -> None:
    """LaunchError if nothing listens there for `_REFUSED_SECONDS`.

    The launcher hosted this store before it started the ranks, so it is gone; TCPStore would retry for
    `timeout_seconds`. A launcher that is killed before a rank has looked at its parent is noticed here alone.
    """
    end = time.monotonic() + min(_REFUSED_SECONDS, timeout_seconds)
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_seconds).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise LaunchError("the launcher that hosted the ranks' store is gone", where="launch",
                                  value=f"{host}:{port}", remedy="Start the ranks again.") from None
            time.sleep(0.1)
        except OSError:  # TCPStore says what is wrong
            return


def _host_store(host: str, port: int, started: Started, timeout: timedelta) -> TCPStore:
    """Rank 0's store, on the address of `host`.

    On all interfaces if that address is useless: the loopback's although ranks are on other machines, or not one of
    this machine's (a forwarded address).
    """
    addresses = [str(found[4][0]) for found in sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))]
    alone = started.local_size == started.size
    for address in addresses:
        if alone or not (address.startswith("127.") or address == "::1"):
            try:
                return create_store(address, port, timeout)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def _open_through_mpi(started: Started, timeout: timedelta) -> tuple[Store, SharedStore]:
    if not started.mpi or find_spec("mpi4py") is None:
        raise LaunchError(f"{started.launcher} does not give the address of rank 0, and mpi4py, which could, is not "
                          "installed", where="launch", remedy=_REMEDY)
    from mpi4py import MPI

    hosts = MPI.COMM_WORLD.gather(socket.gethostname())
    store: TCPStore | None = None
    contact: tuple[str, int, str] | None = None
    if hosts is not None:  # on rank 0, the root of the gather
        other = next((host for host in hosts if host != hosts[0]), None)
        address = _LOOPBACK if other is None else address_towards(other)
        # If the route to the other machine is unknown: on all interfaces, under this machine's name.
        store = create_store(address, 0, timeout) if address else TCPStore(socket.getfqdn(), 0, is_master=True,
                                                                           timeout=timeout, wait_for_workers=False)
        contact = (address or socket.getfqdn(), store.port, new_secret())
    contact = MPI.COMM_WORLD.bcast(contact)
    assert contact is not None, "rank 0 sends it"
    host, port, secret = contact
    return signed(store or TCPStore(host, port, is_master=False, timeout=timeout), secret)
