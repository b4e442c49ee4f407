"""The store that all ranks share: who keeps it, on which address it listens, and by which secret its values count.

    local            the supervisor keeps it, on the loopback address; the secret comes with the ranks' environment
    torchrun         torchrun keeps it, on all interfaces, and nothing of it is ours; below a key of this attempt
    mpiexec, srun    rank 0 keeps it, on the address that the others reach; address and secret travel through MPI
    ... with MASTER_ADDR, or srun without MPI: on that name's address; see below for the secret

Where no channel of the launcher's carries a secret, one is taken from RANVIER_SECRET, which a job script may export;
without that, values are not signed (docs/security.md).
"""

from __future__ import annotations

import errno
import secrets
import socket
from datetime import timedelta
from importlib.util import find_spec

from torch.distributed import PrefixStore, Store, TCPStore

from ranvier.comm.signed_store import SignedStore, signed
from ranvier.errors import LaunchError
from ranvier.launchers import Started
from ranvier.machine import address_towards

_REMEDY = "Set MASTER_ADDR and MASTER_PORT, the same for all ranks, to a free port of rank 0's machine."
_LOOPBACK = "127.0.0.1"


def new_secret() -> str:
    """256 bits that nobody can guess, as text."""
    return secrets.token_hex(32)


def keep_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store of this process that listens on `address` alone; port 0 is any that is free. OSError where it cannot."""
    listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False,
                    master_listen_fd=listener.detach())


def open_store(started: Started, timeout_seconds: float) -> tuple[Store, Store | SignedStore]:
    """The store for torch's own use, and for ours. LaunchError where rank 0 cannot be told or reached."""
    timeout = timedelta(seconds=timeout_seconds)
    if started.master is None:
        return _open_through_mpi(started, timeout)
    host, port = started.master
    keeps = started.rank == 0 and not started.agent_store
    try:
        store = _keep(started, timeout) if keeps else TCPStore(host, port, is_master=False, timeout=timeout)
    except Exception as error:
        what = "cannot listen there" if keeps else "rank 0 cannot be reached there"
        raise LaunchError(f"{what}: {str(error).partition(chr(10))[0]}", where="launch", value=f"{host}:{port}",
                          remedy=_REMEDY) from error
    return signed(store if started.launcher == "local" else PrefixStore(f"ranvier/{started.attempt}", store),
                  started.secret)


def _keep(started: Started, timeout: timedelta) -> TCPStore:
    """Rank 0's store on the address that its machine's name has. On all of its interfaces where that says nothing: it
    is an address of the loopback although ranks are on other machines, or that of somebody who passes on."""
    host, port = started.master
    addresses = [found[4][0] for found in sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))]
    alone = started.local_size == started.size
    for address in addresses:
        if alone or not (address.startswith("127.") or address == "::1"):
            try:
                return keep_store(address, port, timeout)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)


def _open_through_mpi(started: Started, timeout: timedelta) -> tuple[Store, Store | SignedStore]:
    if not started.mpi or find_spec("mpi4py") is None:
        raise LaunchError(f"{started.launcher} does not say where rank 0 is, and without mpi4py MPI cannot",
                          where="launch", remedy=_REMEDY)
    from mpi4py import MPI

    hosts = MPI.COMM_WORLD.gather(socket.gethostname())
    store = found = None
    if started.rank == 0:
        other = next((host for host in hosts if host != hosts[0]), None)
        address = _LOOPBACK if other is None else address_towards(other)
        # Without a way to the other's name: on all interfaces, under this machine's name.
        store = keep_store(address, 0, timeout) if address else TCPStore(socket.getfqdn(), 0, is_master=True,
                                                                         timeout=timeout, wait_for_workers=False)
        found = (address or socket.getfqdn(), store.port, new_secret())
    host, port, secret = MPI.COMM_WORLD.bcast(found)
    return signed(store or TCPStore(host, port, is_master=False, timeout=timeout), secret)
