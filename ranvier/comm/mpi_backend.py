"""The backend over MPI (mpi4py): on CPU the fastest way to communicate between processes.

Nothing here calls a blocking function of MPI, as these spin and take the core from the ranks that they wait for;
see `comm.mpi_polling`. Whoever initialises MPI finalises it: this backend, unless the program (or its
`import mpi4py.MPI`) has initialised it before.
"""

from __future__ import annotations

import ctypes
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import torch

from ranvier.comm.collectives import check_subset, locate_in_partition
from ranvier.comm.mpi_group import MPIGroup
from ranvier.comm.mpi_polling import poll_rounds
from ranvier.comm.mpi_transport import MPITransport
from ranvier.errors import LaunchError, MessageTimeout

if TYPE_CHECKING:
    from mpi4py import MPI

_CLOSE_SECONDS = 10.0
_SWITCHES = ("MPIR_CVAR_ENABLE_GPU", "OMPI_MCA_opal_cuda_support")
"""Of MPICH and of Open MPI: whether a library that was built for CUDA devices accepts their addresses."""


def _load_mpi() -> tuple[ModuleType, bool]:
    """The module mpi4py.MPI, initialised, and whether this call has initialised it.

    LaunchError if it cannot be loaded, or has been finalised already.
    """
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError("cannot be loaded", code="mpi4py-not-loadable", where="comm.transport mpi: mpi4py",
                          value=str(error).splitlines()[0],
                          remedy="pip install 'ranvier[mpi]', or set `--comm.transport torch`.") from error
    if MPI.Is_finalized():
        raise LaunchError("is finalised, and MPI can start only once in a process", code="mpi-finalised",
                          where="comm.transport mpi", remedy="Make one MPIBackend per process and close it last.")
    owns = not MPI.Is_initialized()
    if owns:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI, owns


def _cuda_aware(mpi: ModuleType) -> bool:
    """Whether the library accepts addresses on CUDA devices, as MPI 4.1 or Open MPI's and MPICH's extension reports,
    unless the environment switches that off."""
    if any(os.environ.get(name, "").lower() in ("0", "false") for name in _SWITCHES):
        return False
    if "cuda" in (mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""):
        return True
    query = getattr(ctypes.CDLL(str(mpi.__file__)), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


class MPIBackend:
    """A `protocol.Backend` over MPI; rank and size are those of `comm`.

    Args:
        device: of this rank.
        timeout_seconds: time limit of a collective.
        comm: the ranks; freed with the backend. None for all ranks of MPI's world.

    LaunchError if MPI cannot be loaded.
    """

    name: Literal["mpi"] = "mpi"

    def __init__(self, device: torch.device, timeout_seconds: float = 300.0, *, comm: MPI.Comm | None = None) -> None:
        self._mpi, owns = _load_mpi()
        self._owns = owns and comm is None
        self._device, self._timeout = device, timeout_seconds
        self._world = self._communicator(comm or self._mpi.COMM_WORLD.Dup())
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._transports: list[MPITransport] = []
        self._aware = device.type == "cuda" and self._all_are(_cuda_aware(self._mpi))
        self._groups: list[MPIGroup] = []
        self._closed = False

    def _communicator(self, comm: MPI.Comm) -> MPI.Comm:
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm

    def transport(self, purpose: str) -> MPITransport:
        """See `protocol.Backend`. MessageTimeout if not all ranks call in time, as for `group` and `subset`."""
        self._await_all(f"transport {purpose!r}")
        comm = self._communicator(self._world.Dup())
        self._transports.append(MPITransport(self._mpi, comm, purpose, self._device, self._aware))
        return self._transports[-1]

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> MPIGroup:
        """See `protocol.Backend`."""
        ranks, index = locate_in_partition(partition, self.rank, self.size, purpose)
        self._await_all(f"group {purpose!r}")
        comm = self._communicator(self._world.Split(min(ranks), index))
        self._groups.append(MPIGroup(self._mpi, comm, purpose, ranks, index, self._aware, self._timeout,
                                     direct=self._device.type == "cpu"))
        return self._groups[-1]

    def subset(self, count: int) -> MPIBackend | None:
        """See `protocol.Backend`."""
        check_subset(count, self.size)
        self._await_all(f"subset of {count}")
        member = self.rank < count
        comm = self._world.Split(0 if member else self._mpi.UNDEFINED, self.rank)
        return MPIBackend(self._device, self._timeout, comm=comm) if member else None

    def _all_are(self, mine: bool) -> bool:
        """Whether `mine` is true on every rank: who sends device addresses needs a peer that expects them."""
        least = array("i", [mine])
        request = self._world.Iallreduce(self._mpi.IN_PLACE, least, self._mpi.MIN)
        if not self._until(request.Test, self._timeout):
            raise MessageTimeout("was not started by all ranks in time", code="mpi-backend-start-late",
                                 where=f"MPI backend of rank {self.rank}", value=f"{self._timeout:g} s",
                                 remedy="See what the other ranks do, or raise `--comm.timeout-seconds`.")
        return bool(least[0])

    def _await_all(self, what: str) -> None:
        """Wait until all ranks are about to make `what`. MessageTimeout if one does not come in time.

        MPI's own collective call would wait forever for a stopped rank, and spin while others still compute.
        """
        if not self._until(self._world.Ibarrier().Test, self._timeout):
            raise MessageTimeout("was not requested by all ranks in time", code="mpi-request-late",
                                 where=f"{what} on rank {self.rank}", value=f"{self._timeout:g} s",
                                 remedy="See what the other ranks do, or raise `--comm.timeout-seconds`.")

    def abort(self, code: int) -> None:
        """End all ranks of MPI's world at once with exit code `code`. Does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        """See `protocol.Backend`. MessageTimeout if not all ranks close within 20 seconds."""
        if self._closed:
            return
        self._closed = True
        self._until(lambda: not any(transport.sends_in_flight for transport in self._transports), _CLOSE_SECONDS)
        barrier = self._world.Ibarrier()
        if not self._until(barrier.Test, 2 * _CLOSE_SECONDS):
            raise MessageTimeout("was not closed by all ranks", code="mpi-close-late",
                                 where=f"MPI backend of rank {self.rank}", value=f"{2 * _CLOSE_SECONDS:g} s",
                                 remedy="Close the backend on every rank.")
        parts: list[MPITransport | MPIGroup] = [*self._transports, *self._groups]
        for part in parts:
            part.close()
            part.comm.Free()
        self._world.Free()
        if self._owns:
            self._mpi.Finalize()

    def _until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        """Progress messages, so that the last sends complete, until `condition()`; whether it came true in time."""
        for _ in poll_rounds(timeout_seconds):
            if condition():
                return True
            for transport in self._transports:
                transport.advance()
        return False
