"""The backend over MPI (mpi4py): on CPU the fastest way to communicate between processes.

Nothing here calls a blocking function of MPI, as these spin and take the core from the ranks that they wait for;
see `comm.mpi_transport`. MPI is finalised by the code that initialised it: this backend, unless the program (or its
`import mpi4py.MPI`) initialised it before.
"""

from __future__ import annotations

import ctypes
import os
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ranvier.comm.collectives import SAME_CALLS, ChainedWork, CheckedGroup, check_subset, locate_in_partition
from ranvier.comm.mpi_transport import MPITransport, poll_rounds
from ranvier.comm.protocol import Reduction, Work
from ranvier.comm.sum_algorithms import DIRECT_MEMBERS, Library
from ranvier.errors import LaunchError, MessageTimeout, TransportError
from ranvier.system.processes import mapped_files

if TYPE_CHECKING:
    from mpi4py import MPI


_YIELD_SECONDS = 20e-3
"""Longer than for messages: the other members are about to join a collective, while a sender may still compute."""


_RUN_BYTES = 64 << 10
"""Pieces of shards of at least this many bytes are sent as separate messages; smaller ones are copied together."""


class MPIWork:
    """A `protocol.Work` that is done when all of `requests`, made by `group`, are done; None: not begun."""

    def __init__(self, requests: Sequence[MPI.Request] | None, group: MPIGroup) -> None:
        self._requests, self._group = None if requests is None else list(requests), group

    def begin(self, request: MPI.Request) -> None:
        """Note that the collective has begun with this request."""
        self._requests = [request]

    def done(self) -> bool:
        """See `protocol.Work`. TransportError if MPI reports one."""
        try:
            if self._requests is None:
                self._group.begin_ready()
            return self._requests is not None and bool(self._group.mpi.Request.Testall(self._requests))
        except self._group.mpi.Exception as error:
            raise self._group.convert_error(TransportError, str(error)) from error

    def wait(self) -> None:
        """See `protocol.Work`. MessageTimeout after the group's time limit."""
        if not any(self.done() for _ in poll_rounds(self._group.timeout_seconds, _YIELD_SECONDS)):
            raise self._group.convert_error(MessageTimeout, f"{self._group.timeout_seconds:g} s")


class MPIGroup(CheckedGroup):
    """A `protocol.Group` over one communicator, on the tensors' own memory: with MPI's non-blocking collectives, or, in
    a small group on CPU, with one round of messages between all pairs of members.

    Args:
        mpi: the module mpi4py.MPI.
        comm: a communicator of the members, with errors returned; freed by the caller after `close`.
        purpose, ranks, index: as for `CheckedGroup`.
        aware: whether MPI accepts addresses on CUDA devices; otherwise tensors are staged through pinned memory.
        timeout_seconds: time limit of a collective.
        direct: exchange directly in small groups.
    """

    def __init__(self, mpi: ModuleType, comm: MPI.Comm, purpose: str, ranks: Sequence[int], index: int, aware: bool,
                 timeout_seconds: float, direct: bool) -> None:
        super().__init__(purpose, ranks, index)
        self._direct = direct and len(ranks) <= DIRECT_MEMBERS
        self.mpi, self.comm, self._aware, self.timeout_seconds = mpi, comm, aware, timeout_seconds
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
        self._in_flight: list[tuple[MPIWork, tuple[Tensor, ...]]] = []
        self._to_begin: deque[tuple[torch.cuda.Event, MPIWork, Callable[[], MPI.Request]]] = deque()

    def convert_error(self, kind: type[TransportError], value: str) -> TransportError:
        """The error of class `kind` for a collective that failed, with `value` as its cause."""
        return kind("a collective did not end", code="mpi-collective-failed",
                    where=f"group {self.purpose!r} of ranks {list(self.ranks)}", value=value,
                    remedy=f"See what the other members do; the first error is in that rank's output. {SAME_CALLS}")

    def _start(self, call: Callable[..., MPI.Request], output: Tensor, *inputs: Tensor) -> Work:
        """Start `call` on the memory of these tensors, directly or staged through pinned host memory. On a CUDA device
        it begins when the device's earlier work has ended, in the order of calls."""
        if not output.is_cuda:
            return self._keep([call(output.numpy(), *(tensor.numpy() for tensor in inputs))], output, *inputs)
        used = [output, *inputs] if self._aware else [
            torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in (output, *inputs)]
        reached = torch.cuda.Event()
        reached.record(torch.cuda.current_stream(output.device))
        work = self._keep(None, *used)
        self._to_begin.append((reached, work, lambda: call(*(
            tensor if self._aware else tensor.numpy() for tensor in used))))
        self.begin_ready()
        return work if self._aware else ChainedWork(work, lambda: output.copy_(used[0], non_blocking=True))

    def begin_ready(self) -> None:
        """Begin the collectives whose tensors the device has made, in the order of calls, the same on all members."""
        while self._to_begin and self._to_begin[0][0].query():
            _, work, call = self._to_begin.popleft()
            work.begin(call())

    def _messages(self, places: Sequence[Iterable[Any]], pieces: Sequence[Iterable[Any]]) -> list[MPI.Request]:
        """Start to send the arrays `pieces[i]` to each other member i, and to receive `places[i]` from it.

        All members call in the same order, so messages match by their order and need no tags.
        """
        requests = []
        for source, destination in self._steps():
            requests += [self.comm.Irecv(place, source) for place in places[source] if place.size]
            requests += [self.comm.Isend(piece, destination) for piece in pieces[destination] if piece.size]
        return requests

    def _exchange_ranges(self, output: Tensor, received: Sequence[slice], tensor: Tensor, sent: Sequence[slice]
                         ) -> Work:
        """Send `tensor[sent[i]]` to member i, and receive `output[received[i]]` from member i."""
        into, of = output.numpy(), tensor.numpy()  # arrays, whose views cost less than a tensor's
        requests = self._messages([[into[one]] for one in received], [[of[one]] for one in sent])
        into[received[self.index]] = of[sent[self.index]]
        return self._keep(requests, output, tensor)

    def _exchanges_pieces(self, shard: Tensor, runs: int) -> bool:
        return self._direct and not shard.is_cuda and shard.nbytes >= runs * _RUN_BYTES

    def _exchange_pieces(self, output: Tensor, tensor: Tensor, *, own: bool) -> Work:
        places, pieces = output.view(torch.uint8).numpy(), tensor.view(torch.uint8).numpy()
        requests = self._messages(list(places), list(pieces))
        if own:
            places[self.index] = pieces[self.index]
        return self._keep(requests, output, tensor)

    def _keep(self, requests: Sequence[MPI.Request] | None, *tensors: Tensor) -> MPIWork:
        """Work for `requests`. The tensors stay alive until MPI has finished, even if the caller drops the work.

        mpi4py's requests keep the memory of sends and receives alive, but not that of in-place collectives.
        """
        self._in_flight = [(work, kept) for work, kept in self._in_flight if not work.done()]
        self._in_flight.append((MPIWork(requests, self), tensors))
        return self._in_flight[-1][0]

    def library(self, device_type: str) -> Library:
        """"mpi", for any device."""
        return "mpi"

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return self._start(lambda out: self.comm.Iallreduce(self.mpi.IN_PLACE, out, self._ops[op]), tensor)

    def _reduce(self, tensor: Tensor, root: int) -> Work:
        if self.index == root:
            return self._start(lambda out: self.comm.Ireduce(self.mpi.IN_PLACE, out, self.mpi.SUM, root), tensor)
        return self._start(lambda out: self.comm.Ireduce(out, None, self.mpi.SUM, root), tensor)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return self._start(lambda out, whole: self.comm.Ireduce_scatter_block(whole, out), output, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        if self._direct:
            members = len(self.ranks)
            return self._exchange_ranges(output, _ranges([tensor.numel()] * members), tensor, [slice(None)] * members)
        return self._start(lambda out, share: self.comm.Iallgather(share, out), output, tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._start(lambda out: self.comm.Ibcast(out, root), tensor)

    def _all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> Work:
        if self._direct:
            return self._exchange_ranges(output, _ranges(received), tensor, _ranges(sent))
        return self._start(lambda out, whole: self.comm.Ialltoallv([whole, sent], [out, received]), output, tensor)


def _ranges(sizes: Sequence[int]) -> list[slice]:
    """Consecutive ranges of these sizes."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


_CLOSE_SECONDS = 10.0
_SWITCHES = ("MPIR_CVAR_ENABLE_GPU", "OMPI_MCA_opal_cuda_support")
"""Variables of MPICH and of Open MPI that switch support for CUDA addresses on or off."""


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


def _unname_shared_memory() -> None:
    """Remove the name of MPICH's shared memory, which every rank of this machine has mapped: it is then freed with the
    last of them, however that ends. Without this, a killed rank left a megabyte of memory for each."""
    for name in mapped_files("/dev/shm/mpich_shm_"):
        with suppress(OSError):  # another rank was faster
            os.unlink(name)


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
        _unname_shared_memory()  # all ranks have initialised MPI: they take part in Dup
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._transports: list[MPITransport] = []
        self._aware = device.type == "cuda" and self._all_are(_cuda_aware(self._mpi))
        self._groups: list[MPIGroup] = []
        self._closed = False

    def _communicator(self, comm: MPI.Comm) -> MPI.Comm:
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm

    def transport(self, purpose: str, *, on_host: bool = False) -> MPITransport:
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
        """Whether `mine` is true on every rank: a sender of device addresses needs a peer that expects them."""
        least = array("i", [mine])
        request = self._world.Iallreduce(self._mpi.IN_PLACE, least, self._mpi.MIN)
        if not self._progress_until(request.Test, self._timeout):
            raise MessageTimeout("was not started by all ranks in time", code="mpi-backend-start-late",
                                 where=f"MPI backend of rank {self.rank}", value=f"{self._timeout:g} s",
                                 remedy="Check what the other ranks do, or raise `--comm.timeout-seconds`.")
        return bool(least[0])

    def _await_all(self, what: str) -> None:
        """Wait until all ranks are about to make `what`. MessageTimeout if one does not come in time.

        MPI's own collective call would wait forever for a stopped rank, and spin while others still compute.
        """
        if not self._progress_until(self._world.Ibarrier().Test, self._timeout):
            raise MessageTimeout("was not requested by all ranks in time", code="mpi-request-late",
                                 where=f"{what} on rank {self.rank}", value=f"{self._timeout:g} s",
                                 remedy="Check what the other ranks do, or raise `--comm.timeout-seconds`.")

    def abort(self, code: int) -> None:
        """End all ranks of MPI's world immediately with exit code `code`. Does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        """See `protocol.Backend`. MessageTimeout if not all ranks close within 20 seconds."""
        if self._closed:
            return
        self._closed = True
        self._progress_until(lambda: not any(transport.sends_in_flight for transport in self._transports),
                             _CLOSE_SECONDS)
        barrier = self._world.Ibarrier()
        if not self._progress_until(barrier.Test, 2 * _CLOSE_SECONDS):
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

    def _progress_until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        """Progress messages, so that the last sends complete, until `condition()`; returns whether that was in time."""
        for _ in poll_rounds(timeout_seconds):
            if condition():
                return True
            for transport in self._transports:
                transport.advance()
        return False
