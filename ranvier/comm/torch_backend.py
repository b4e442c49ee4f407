"""The backend over torch.distributed: Gloo between host memories, NCCL between CUDA devices."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from ranvier.comm.collectives import check_subset, locate_in_partition
from ranvier.comm.gloo_transport import GlooTransport
from ranvier.comm.nccl_transport import NcclTransport
from ranvier.comm.protocol import Transport
from ranvier.comm.signed_store import clone_store
from ranvier.comm.torch_group import TorchGroup, WaitRegistry, error_cause
from ranvier.errors import LaunchError, TransportError
from ranvier.system.background import in_background

_CLOSE_SECONDS = 10.0
_ABORT_SECONDS = 2.0
_SEVERED_SECONDS = 0.1


class TorchBackend:
    """A `protocol.Backend` over torch.distributed.

    If the user's program has initialised torch.distributed, it is used, and left initialised at the end.

    Args:
        rank, size: of this rank. LaunchError if torch.distributed has been initialised with others.
        store: for the rendezvous, unless torch.distributed is initialised.
        device: of this rank; a CUDA device adds NCCL.
        timeout_seconds: time limit of a collective. The callers of `Transport.wait` limit the wait for messages.
        initialise: initialise torch.distributed if it is not initialised; False for a subset of ranks.
    """

    name: Literal["torch"] = "torch"

    def __init__(self, rank: int, size: int, store: Store, device: torch.device, timeout_seconds: float, *,
                 initialise: bool = True) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._timeout = timedelta(seconds=timeout_seconds)
        self.waits = WaitRegistry(timeout_seconds)
        """The current blocking waits of this process, also those in subsets."""
        self.sockets = PeerSockets()
        """The connections of this process to other ranks, and to the store for connecting, with those of subsets."""
        self._kinds = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._owns = initialise and not dist.is_initialized()
        if self._owns:
            with self.sockets.opening():
                dist.init_process_group(self._kinds, store=PrefixStore("ranvier", store), rank=rank, world_size=size,
                                        timeout=self._timeout)
        elif initialise and (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise LaunchError("is initialised with another rank or size", code="torch-distributed-other-rank",
                              where=f"torch.distributed on rank {rank}", value=(dist.get_rank(), dist.get_world_size()),
                              remedy=f"Initialise it as rank {rank} of {size}, or leave that to Ranvier.")
        self._store, self._subsets = store, 0
        self._transports: list[GlooTransport] = []
        self._groups: list[TorchGroup] = []
        self._nccl_groups: list[ProcessGroup | None] = []
        self._closed = False

    def subset(self, count: int) -> _TorchSubset | None:
        """See `protocol.Backend`."""
        check_subset(count, self.size)
        self._subsets += 1
        if self.rank >= count:
            return None
        with self.sockets.opening():  # a connecting rank waits for the others in the store
            store = PrefixStore(f"ranvier/subset/{self._subsets}", clone_store(self._store))
        subset = _TorchSubset(self.rank, count, store, self._device, self._timeout.total_seconds())
        subset.waits, subset.sockets = self.waits, self.sockets
        return subset

    def transport(self, purpose: str, *, on_host: bool = False) -> Transport:
        """See `protocol.Backend`. TransportError if a rank does not answer, as for `group`."""
        everyone = range(self.size)
        # The limit is for connecting: the transport's waits have their own.
        gloo_group = self._new_group(purpose, everyone, self._timeout, "gloo") if self.size > 1 else None
        host = GlooTransport(gloo_group, purpose, self.rank, self.size)
        self._transports.append(host)
        if on_host or self._device.type != "cuda" or gloo_group is None:
            return host
        rising, falling = (self._new_group(purpose, everyone, self._timeout, "nccl") for _ in range(2))
        assert rising is not None and falling is not None, "all ranks are members"
        self._nccl_groups += [rising, falling]
        return NcclTransport(host, self._device, rising=rising, falling=falling, on_lost=self.waits.lose)

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> TorchGroup:
        """See `protocol.Backend`."""
        ranks, index = locate_in_partition(partition, self.rank, self.size, purpose)
        # Every rank makes every group: torch names a group by the number of groups that the rank has made before, and
        # the members must agree on the name.
        process_groups = {tuple(members): self._new_group(purpose, members, self._timeout, self._kinds)
                          for members in partition if len(members) > 1}
        self._warm_up(process_groups.get(ranks))
        self._groups.append(TorchGroup(process_groups.get(ranks), purpose, ranks, index, self.waits))
        return self._groups[-1]

    def _warm_up(self, process_group: ProcessGroup | None) -> None:
        """On CUDA, run one collective of the members, so that NCCL builds its communicator here and not inside a step,
        where it would allocate memory and wait for the device."""
        if process_group is not None and self._device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self._device), group=process_group)
            torch.cuda.current_stream(self._device).synchronize()

    def _new_group(self, purpose: str, members: Sequence[int], timeout: timedelta, kinds: str) -> ProcessGroup | None:
        """A new process group; a subset returns None on ranks that are not members. Collective over all ranks.

        TransportError if one of the ranks does not answer.
        """
        try:
            with self.sockets.opening(), _unbound():
                process_group: ProcessGroup = dist.new_group(list(members), timeout=timeout, backend=kinds)
        except RuntimeError as error:
            raise self._no_answer(purpose, error) from error
        return process_group

    def _no_answer(self, purpose: str, error: Exception) -> TransportError:
        return TransportError("cannot connect its ranks: one of them is gone or does not answer "
                              f"({error_cause(error)})", code="group-not-connected",
                              where=f"group '{purpose}' of rank {self.rank}",
                              remedy="Check which rank has stopped or is behind, and start again with `--resume auto`.")

    def _destroy(self, process_group: ProcessGroup | None) -> None:
        if process_group is not None and dist.is_initialized():
            dist.destroy_process_group(process_group)

    def abort(self, code: int) -> None:
        """End this process immediately with exit code `code`. Other ranks find their connections to it broken."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.abort_communicators()
        os._exit(code)

    def abort_communicators(self) -> None:
        """End NCCL's kernels on this device, which otherwise wait for peers until the driver ends the process."""
        if self._device.type != "cuda":
            return

        def abort() -> None:
            for process_group in (*self._nccl_groups, *(group.process_group for group in self._groups)):
                if process_group is not None:
                    with suppress(RuntimeError, AttributeError):  # a communicator that is already broken
                        process_group._get_backend(self._device).abort()

        wait((in_background(abort, "ranvier-abort"),), _ABORT_SECONDS)  # NCCL may itself wait for a peer

    def close(self) -> None:
        """See `protocol.Backend`. Waits at most 10 seconds for the peers to close their edges."""
        if self._closed:
            return
        self._closed = True
        for transport in self._transports:
            transport.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for transport in self._transports:
            transport.join(deadline)
        attached: list[TorchGroup | GlooTransport] = [*self._groups, *self._transports]
        for one in attached:
            self._destroy(one.detach_process_group())
        for process_group in self._nccl_groups:
            self._destroy(process_group)
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _unbound() -> Iterator[None]:
    """Inside, new process groups are not bound to a device, as the user's program's group may be (`device_id`). All
    messages of a bound group share a communicator and a stream, so that edges would wait for each other."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def torch_generation(name: str, rank: int, size: int, store: Store, device: torch.device, timeout_seconds: float, *,
                     connect_seconds: float, before: TorchBackend | None = None) -> TorchBackend:
    """A backend that replaces `before` with a different set of ranks: remaining ranks, and new ranks, which had no
    backend, make it at the same time, with the same unique `name`.

    TransportError if one of them does not answer within `connect_seconds`; nothing of the backend is then left.
    """
    sockets = PeerSockets() if before is None else before.sockets
    with sockets.opening():
        place = PrefixStore(f"ranvier/generation/{name}", clone_store(store))
    made = _TorchSubset(rank, size, place, device, timeout_seconds)
    made.sockets = sockets
    if before is not None:
        made.waits = before.waits
    made.connect(connect_seconds)
    return made


class _TorchSubset(TorchBackend):
    """Ranks that may differ from those with which torch.distributed was initialised: only the first of them, or more.
    `dist.new_group` needs a call on every initialised rank. So this builds process groups from their parts, over a
    separate store."""

    def __init__(self, rank: int, size: int, store: Store, device: torch.device, timeout_seconds: float) -> None:
        self._num_groups = 0
        super().__init__(rank, size, store, device, timeout_seconds, initialise=False)

    def _new_group(self, purpose: str, members: Sequence[int], timeout: timedelta, kinds: str) -> ProcessGroup | None:
        self._num_groups += 1
        if self.rank not in members:
            return None
        store = PrefixStore(f"{self._num_groups}/{min(members)}", self._store)
        if self._device.type == "cuda":  # a separate thread would have another current device
            return self._build(purpose, store, members, timeout, kinds)
        return self._unless_severed(purpose, lambda: self._build(purpose, store, members, timeout, kinds))

    def _unless_severed(self, purpose: str, build: Callable[[], ProcessGroup]) -> ProcessGroup:
        """`build()` on a separate thread, which is abandoned once ranks are lost: inside Gloo nothing wakes a rank that
        waits for a dead rank to connect."""
        built = in_background(build, "ranvier-connect")
        while not wait((built,), _SEVERED_SECONDS).done:
            if self.sockets.severed:
                raise self._no_answer(purpose, RuntimeError("ranks are lost"))
        return built.result()

    def _build(self, purpose: str, store: Store, members: Sequence[int], timeout: timedelta, kinds: str
               ) -> ProcessGroup:
        index = members.index(self.rank)
        group = ProcessGroup(store, index, len(members))
        try:
            if "gloo" in kinds:
                with self.sockets.opening():
                    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), index, len(members), timeout)
                gloo._set_sequence_number_for_group()
                group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
                group._set_default_backend(ProcessGroup.BackendType.GLOO)
            if "nccl" in kinds:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), index, len(members), options)
                nccl._set_sequence_number_for_group()
                group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
                if "gloo" not in kinds:
                    group._set_default_backend(ProcessGroup.BackendType.NCCL)
        except RuntimeError as error:
            raise self._no_answer(purpose, error) from error
        return group

    def connect(self, seconds: float) -> None:
        """Connect all ranks once. TransportError if one does not answer within `seconds`."""
        everyone = range(self.size)
        group = self._new_group("joining", everyone, timedelta(seconds=seconds), "gloo")
        # kept: a rank that closes it may disturb others that still connect
        self._groups.append(TorchGroup(group, "joining", everyone, self.rank, self.waits))

    def _destroy(self, process_group: ProcessGroup | None) -> None:
        if process_group is not None:
            process_group.shutdown()


# --- connections ------------------------------------------------------------------------------------------------------

# Ends the connections of Gloo from outside, so that threads that wait for a peer wake with an error.
#
# A rank that waits inside Gloo for a living peer does not notice that a third rank has gone: it waits until its time
# limit, up to minutes, and aborting, shutting down or destroying the process group does not wake it. Shutting down a
# socket ends it for both sides immediately, so all of their waits fail. Gloo does not expose its sockets; those that
# appear while a process group connects are Gloo's. Pure bookkeeping until `sever`; without /dev/fd none are found.


_FOLDER = "/dev/fd"


class PeerSockets:
    """The sockets of this process's process groups, and those over which the groups connect."""

    def __init__(self) -> None:
        self._own: set[tuple[int, int]] = set()
        self.severed = False
        """Whether ranks are lost, so that new connections among the others would wait for them."""

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Inside, newly connected sockets are recorded as those of a process group."""
        before = _connected_sockets()
        yield
        now = _connected_sockets()
        self._own = (self._own & now) | (now - before)

    def sever(self) -> int:
        """Shut down the sockets that are still open; returns their number. From any thread; each end sees the end of
        the other's data."""
        self.severed = True
        own, self._own = self._own, set()
        for descriptor, number in own:
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == number:  # otherwise another file has the descriptor by now
                    with socket.socket(fileno=os.dup(descriptor)) as copy:
                        copy.shutdown(socket.SHUT_RDWR)
        return len(own)


def _connected_sockets() -> set[tuple[int, int]]:
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
