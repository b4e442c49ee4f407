"""Messages over MPI, collectives over torch.distributed: AxoNN's pairing (Singh and Bhatele, 2022, section IV).

MPI delivers a message between two ranks with less latency than Gloo and without occupying a CUDA device, as NCCL does.
NCCL reduces between devices faster than MPI. On CPUs the same pairing is MPI with Gloo.

MPI moves data only inside its calls. A rank that waits for a collective of MPI calls it all the time; a rank that waits
for a collective of torch does not, and its peer may need a message from it before joining the collective. So a thread
calls MPI while sends are in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from ranvier.comm.mpi_backend import MPIBackend
from ranvier.comm.mpi_transport import MPITransport
from ranvier.comm.torch_backend import TorchBackend
from ranvier.comm.torch_group import TorchGroup
from ranvier.errors import LaunchError, TransportError

_BUSY_SECONDS, _IDLE_SECONDS = 100e-6, 2e-3
"""Seconds that the thread sleeps while sends are in flight, and while none are."""


class MixedBackend:
    """A `protocol.Backend` that combines two, for the same ranks.

    Args:
        messages: makes the transports. collectives: makes the groups. Both are closed with this backend.

    LaunchError if they number the ranks differently.
    """

    name: Literal["mpi"] = "mpi"

    def __init__(self, messages: MPIBackend, collectives: TorchBackend) -> None:
        if (messages.rank, messages.size) != (collectives.rank, collectives.size):
            raise LaunchError("numbers the ranks differently from torch.distributed", code="mpi-numbering",
                              where="comm.transport mpi",
                              value=f"rank {messages.rank} of {messages.size} instead of {collectives.rank} of "
                                    f"{collectives.size}",
                              remedy="Start all ranks with one mpiexec, or set `--comm.collectives mpi`.")
        self._messages, self._collectives = messages, collectives
        self.rank, self.size = messages.rank, messages.size
        self.waits = collectives.waits
        """The blocking waits of this process for collectives."""
        self._transports: list[MPITransport] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._advance, name="ranvier-mpi-progress", daemon=True)
        self._thread.start()

    def _advance(self) -> None:
        """Let the sends of all transports progress."""
        while not self._ended.is_set():
            busy = [transport for transport in list(self._transports) if transport.sends_in_flight]
            for transport in busy:
                with suppress(TransportError):  # the engine's thread gets it at its own next call
                    transport.advance_sends()
            time.sleep(_BUSY_SECONDS if busy else _IDLE_SECONDS)

    def transport(self, purpose: str, *, on_host: bool = False) -> MPITransport:
        """See `protocol.Backend`."""
        self._transports.append(self._messages.transport(purpose, on_host=on_host))
        return self._transports[-1]

    def group(self, purpose: str, partition: Sequence[Sequence[int]]) -> TorchGroup:
        """See `protocol.Backend`."""
        return self._collectives.group(purpose, partition)

    def subset(self, count: int) -> MixedBackend | None:
        """See `protocol.Backend`."""
        messages, collectives = self._messages.subset(count), self._collectives.subset(count)
        return None if messages is None or collectives is None else MixedBackend(messages, collectives)

    def abort(self, code: int) -> None:
        """See `protocol.Backend`. Ends NCCL's kernels on this rank's device first."""
        self._collectives.abort_communicators()
        self._messages.abort(code)

    def close(self) -> None:
        """See `protocol.Backend`."""
        self._ended.set()
        self._thread.join()
        self._messages.close()
        self._collectives.close()
