"""The store that all ranks share (rendezvous): which process hosts it, on which address, and its secret.

    local            the supervisor hosts it on the loopback address; ranks get the secret in their environment
    torchrun         torchrun's agent hosts it, on all interfaces, and keeps it when it starts the ranks again: each
                     start has its own keys
    mpiexec, srun    rank 0 hosts it on the address that the others reach; address and secret travel through MPI
    ... with MASTER_ADDR, or srun without MPI: rank 0, on that name's address; see below for the secret

If the launcher has no channel for a secret, it is taken from the environment variable RANVIER_SECRET, which a job
script may export; without that, values are not signed (docs/security.md).
"""

from __future__ import annotations

import errno
import math
import secrets
import socket
import time
from datetime import timedelta
from importlib.util import find_spec
from ipaddress import ip_address

from torch.distributed import PrefixStore, Store, TCPStore

from ranvier.comm.signed_store import SharedStore, sign_store
from ranvier.errors import LaunchError
from ranvier.launch import stores
from ranvier.launch.launchers import Started
from ranvier.system.machine import address_towards

_REMEDY = "Set MASTER_ADDR and MASTER_PORT, the same for all ranks, to a free port of rank 0's machine."
_TORCHRUN_REMEDY = "Give torchrun on each machine --local-addr and the address by which the others reach that machine."
_POLL_SECONDS = 0.02


def new_secret() -> str:
    """A random secret of 256 bits, in hexadecimal."""
    return secrets.token_hex(32)


def open_store(started: Started, timeout_seconds: float) -> tuple[Store, SharedStore]:
    """Host or connect to the store; returns the store for torch's own use, and the signed one for Ranvier's.

    LaunchError if rank 0's address is unknown or cannot be reached within `timeout_seconds`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if started.master is None:
        return _open_through_mpi(started, timeout)
    host, port = started.master
    hosts = started.rank == 0 and not started.agent_store
    remedy = _TORCHRUN_REMEDY if started.agent_store and started.launcher == "torchrun" else _REMEDY
    try:
        store = _host_store(host, port, started, timeout) if hosts else stores.connect_store(
            host, port, timeout, tells=not started.local_rank, is_there=started.agent_store)
    except Exception as error:
        if started.agent_store and isinstance(error, ConnectionRefusedError):
            raise _launcher_is_gone(started, host, port) from None
        what = "cannot listen there" if hosts else "rank 0 cannot be reached there"
        raise LaunchError(f"{what}: {str(error).partition(chr(10))[0]}", code="store-unreachable", where="launch",
                          value=f"{host}:{port}", remedy=remedy) from error
    if started.launcher == "local":
        return sign_store(store, started.secret)
    below = PrefixStore("ranvier", store)
    if started.launcher == "torchrun":
        _, starts = sign_store(PrefixStore("starts", below), started.secret)
        below = PrefixStore(agree_on_start(started.rank, started.size, starts, timeout_seconds), below)
    return sign_store(below, started.secret)


def agree_on_start(rank: int, size: int, store: SharedStore, timeout_seconds: float) -> str:
    """A token that all ranks of this start get, and no rank of another start that used the same store.

    torchrun's count of restarts is not such a token: it stays the same when a machine joins, and the agent of a machine
    that joins later counts from 0. Each rank therefore writes a random question, and rank 0 answers under that
    question until all ranks have confirmed. It also answers questions of earlier starts, which no rank confirms.

    LaunchError if a rank is missing for `timeout_seconds`.
    """
    word = secrets.token_hex(8)
    if rank > 0:
        store.set(f"question/{rank}", word)
        try:
            answer = store.get(f"answer/{word}").decode()
        except RuntimeError as error:
            raise _missing(0, error) from error
        store.set(f"{answer}/{rank}", "confirmed")
        return answer
    missing, answered = set(range(1, size)), set[str]()
    now = time.monotonic()
    end, tell = now + timeout_seconds, now + stores.TELL_SECONDS
    while missing:
        for other in sorted(missing):
            if store.check([f"{word}/{other}"]):
                missing.remove(other)
            elif store.check([f"question/{other}"]):
                question = store.get(f"question/{other}").decode()
                if question not in answered:
                    store.set(f"answer/{question}", word)
                    answered.add(question)
        if missing and time.monotonic() > end:
            raise _missing(min(missing), f"{timeout_seconds:g} s")
        if missing and time.monotonic() > tell:
            stores.print_missing(missing, size)
            tell = math.inf
        time.sleep(_POLL_SECONDS if missing else 0)
    return word


def _missing(rank: int, value: object) -> LaunchError:
    return LaunchError("did not start in time", code="rank-start-late", where=f"rank {rank}",
                       value=str(value).partition("\n")[0],
                       remedy="Check why that rank has not started, or raise `--comm.timeout-seconds`.")


def _launcher_is_gone(started: Started, host: str, port: int) -> LaunchError:
    """The error if nothing listens, although the launcher hosted the store before it started the ranks. A launcher that
    is killed before a rank has checked its parent is noticed only here."""
    if started.rank != started.local_rank and _is_loopback(host):
        return LaunchError("means this machine itself here, but rank 0 is on another one",
                           code="master-address-is-local", where="MASTER_ADDR", value=host, remedy=_TORCHRUN_REMEDY)
    return LaunchError("the launcher that hosted the ranks' store is gone", code="launcher-gone", where="launch",
                       value=f"{host}:{port}", remedy="Start the ranks again.")


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # unknown name: TCPStore reports it
        return False
    return all(ip_address(str(address[0])).is_loopback for *_, address in found)


def _host_store(host: str, port: int, started: Started, timeout: timedelta) -> TCPStore:
    """Host rank 0's store on the address of `host`.

    It listens on all interfaces if that address is useless: the loopback address although ranks are on other machines,
    or an address that is not this machine's (a forwarded address).
    """
    addresses = [str(found[4][0]) for found in sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))]
    alone = started.local_size == started.size
    for address in addresses:
        if alone or not (address.startswith("127.") or address == "::1"):
            try:
                return stores.create_store(address, port, timeout)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    return stores.create_store_everywhere(host, port, timeout)


def check_mpi(started: Started, rank: int, size: int) -> None:
    """LaunchError unless MPI's `rank` and `size` are the launcher's."""
    if (rank, size) != (started.rank, started.size):
        raise LaunchError(f"contradicts the launcher: {started}, but MPI says rank {rank} of {size}. The launcher "
                          "belongs to another MPI", code="mpi-contradicts-launcher", where="comm.transport",
                          value="mpi",
                          remedy="Use the mpiexec of the MPI library that mpi4py loads, or set `--comm.transport "
                                 "torch`.")


def _open_through_mpi(started: Started, timeout: timedelta) -> tuple[Store, SharedStore]:
    if not started.mpi or find_spec("mpi4py") is None:
        raise LaunchError(f"{started.launcher} does not give the address of rank 0, and mpi4py, which could, is not "
                          "installed", code="rank-0-address-unknown", where="launch", remedy=_REMEDY)
    from mpi4py import MPI

    check_mpi(started, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    hosts = MPI.COMM_WORLD.gather(socket.gethostname())
    store: TCPStore | None = None
    contact: tuple[str, int, str] | None = None
    if hosts is not None:  # on rank 0, the root of the gather
        other = next((host for host in hosts if host != hosts[0]), None)
        address = stores.LOOPBACK if other is None else address_towards(other)
        # If the route to the other machine is unknown, listen on all interfaces, under this machine's name.
        host = address or socket.getfqdn()
        store = (stores.create_store if address else stores.create_store_everywhere)(host, 0, timeout)
        contact = (host, store.port, new_secret())
    contact = MPI.COMM_WORLD.bcast(contact)
    assert contact is not None, "rank 0 sends it"
    host, port, secret = contact
    return sign_store(store or stores.connect_store(host, port, timeout), secret)
