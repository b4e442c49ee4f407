"""NCCL's point-to-point rule on a CPU: can ranks block each other's devices?

    python -m benchmarks.gpu.models.nccl [--seeds 100]

Ranks, as threads, run `ranvier.comm.nccl_transport.NcclTransport` itself; a model replaces torch.cuda and the process
groups. The rules of the model:

  - a send is a kernel that occupies its stream until the peer has posted the matching receive (NCCL user guide,
    "Point-to-point communication"); the same holds for a receive, and for a collective, which all members must launch
  - a rank's main stream runs its collectives and copies in order, and an event there is reached after what is before it
  - a device-wide synchronization ends only when every kernel that this rank has launched has ended. It occurs in
    `torch.cuda.synchronize`, in cudaFree when the allocator gives memory back, and when a kernel's code is loaded at
    its first use (CUDA programming guide, "Lazy loading")
  - only the main thread of a rank may allocate device memory, or send and receive memory of torch's allocator, which is
    told so (`record_stream`): another thread would wait for the allocator, which holds its lock during a cudaFree

First both ranks of a pair send at the same time, one a forward and the other a backward, as neighbouring stages do in
every step. Then each rank either waits for its message or first synchronizes its device:

    received      the rank got its message
    synchronized  its device-wide synchronization ended, then the rank got its message
    blocked       neither rank can ever continue: each device waits for a receive that the other host has not posted

Then four ranks (two stages of two ranks each) run random programs of sends, receives, collectives within a stage, and
device-wide synchronizations at random places. Each program has an order in which it ends without synchronizations, so
that it must end with them.

There is no clock in the model. Ranks count as blocked when all of them wait and nothing has happened for ten seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import random
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from benchmarks.memory.program import table
from ranvier.comm import nccl_transport
from ranvier.comm.edges import EdgesOfRank
from ranvier.comm.message import Message, MessageKind, decode
from ranvier.comm.nccl_transport import NcclTransport

PATIENCE_SECONDS = 60.0
QUIET_SECONDS = 10.0
"""If all ranks wait, and nothing has happened for this long, they are blocked."""


class Blocked(Exception):
    """No rank can continue."""


@dataclass(eq=False)
class Kernel:
    """A send, a receive or a collective on a rank's device; also the `Work` that torch.distributed returns for it."""

    rank: int
    payload: Tensor | None = None
    ended: bool = False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        """For works of NCCL this only orders streams; the host continues."""


@dataclass(eq=False)
class Event:
    """Like `torch.cuda.Event`, on a rank's main stream."""

    devices: Devices
    reached: bool = False

    def record(self, stream: int) -> None:
        self.devices.enqueue(stream, self)

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.devices.wait_for(lambda: self.reached)


class Devices:
    """The devices of `size` ranks, each with a main thread, and the kernels that they have launched."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._kernels: dict[int, list[Kernel]] = defaultdict(list)
        self._unmatched: dict[tuple[str, int, int], deque[Kernel]] = defaultdict(deque)
        self._streams: dict[int, deque[Event | tuple[tuple[int, ...], Kernel]]] = defaultdict(deque)
        self._waiting: set[int] = set()
        self._latest = time.monotonic()
        self._local = threading.local()
        self.violations: list[str] = []
        """Calls that are not allowed on a device."""

    # ------------------------------------------------------------------ kernels and streams

    def _launch(self, kind: str, rank: int, source: int, destination: int, tensor: Tensor) -> Kernel:
        if not hasattr(self._local, "rank") and tensor.untyped_storage().resizable():  # as only an allocator's is
            self.violations.append(f"{threading.current_thread().name} tells the allocator of a {kind}")
        with self._changed:
            kernel = Kernel(rank, tensor)
            self._kernels[rank].append(kernel)
            self._unmatched[kind, source, destination].append(kernel)
            sends, receives = (self._unmatched[one, source, destination] for one in ("send", "receive"))
            while sends and receives:
                send, receive = sends.popleft(), receives.popleft()
                assert send.payload is not None and receive.payload is not None
                receive.payload.copy_(send.payload)
                send.ended = receive.ended = True
            self._happened()
            return kernel

    def isend(self, tensor: Tensor, *, group_dst: int, group: Any) -> Kernel:
        return self._launch("send", group.rank, group.rank, group_dst, tensor)

    def irecv(self, tensor: Tensor, *, group_src: int, group: Any) -> Kernel:
        return self._launch("receive", group.rank, group_src, group.rank, tensor)

    def enqueue(self, rank: int, entry: Event | tuple[tuple[int, ...], Kernel]) -> None:
        """Put an event, or (members, collective), into the main stream of `rank`."""
        with self._changed:
            self._streams[rank].append(entry)
            self._run_streams()
            self._happened()

    def collective(self, members: Sequence[int]) -> None:
        """Launch a collective of `members`, which include this rank; the host continues."""
        kernel = Kernel(self._local.rank)
        with self._changed:
            self._kernels[kernel.rank].append(kernel)
        self.enqueue(kernel.rank, (tuple(members), kernel))

    def _run_streams(self) -> None:
        """Run the main streams as far as they get. The caller holds the lock."""
        moved = True
        while moved:
            moved = False
            for stream in list(self._streams.values()):
                if not stream:
                    continue
                head = stream[0]
                if isinstance(head, Event):
                    stream.popleft()
                    head.reached = moved = True
                elif all(self._streams[member] and self._is_collective(self._streams[member][0], head[0])
                         for member in head[0]):
                    for member in head[0]:
                        entry = self._streams[member].popleft()
                        assert not isinstance(entry, Event)
                        entry[1].ended = moved = True

    @staticmethod
    def _is_collective(entry: Event | tuple[tuple[int, ...], Kernel], members: tuple[int, ...]) -> bool:
        return not isinstance(entry, Event) and entry[0] == members

    # ------------------------------------------------------------------ waiting

    def _happened(self) -> None:
        self._latest = time.monotonic()
        self._changed.notify_all()

    def wait_for(self, condition: Any) -> None:
        """Wait on this thread, which is not a main thread."""
        with self._changed:
            while not condition():
                self._changed.wait(1.0)
                if time.monotonic() - self._latest > PATIENCE_SECONDS:
                    return

    def synchronize(self, device: object = None) -> None:
        """Wait for all kernels of this rank's device. Raises Blocked if all ranks wait and none can continue."""
        rank = self._local.rank
        with self._changed:
            mine = list(self._kernels[rank])
            self._waiting.add(rank)
            self._changed.notify_all()
            while not all(kernel.ended for kernel in mine):
                if len(self._waiting) == self._size and time.monotonic() - self._latest > QUIET_SECONDS:
                    raise Blocked
                self._changed.wait(0.5)
            self._waiting.discard(rank)
            self._kernels[rank] = [kernel for kernel in self._kernels[rank] if not kernel.ended]

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Inside, this thread is the main thread of that rank; after its end, no rank may depend on it."""
        self._local.rank = rank
        try:
            yield
        finally:
            with self._changed:
                self._waiting.add(rank)
                self._changed.notify_all()

    def _empty(self, *size: int, **options: Any) -> Tensor:
        if not hasattr(self._local, "rank"):
            self.violations.append(f"{threading.current_thread().name} allocates device memory")
        return torch.empty(*size, **options)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, `NcclTransport` runs on these devices."""
        cuda = SimpleNamespace(Stream=lambda device: None, stream=lambda chosen: contextlib.nullcontext(),
                               current_stream=lambda device: self._local.rank, synchronize=self.synchronize,
                               Event=lambda blocking=False: Event(self))
        fake = SimpleNamespace(cuda=cuda, zeros=torch.zeros, empty=self._empty, tensor=torch.tensor, uint8=torch.uint8,
                               int64=torch.int64)
        with mock.patch.object(nccl_transport, "torch", fake), mock.patch.object(nccl_transport, "dist", self), \
                mock.patch.object(nccl_transport, "_CLOSE_SECONDS", 0.01):
            yield


class _OnDevice(Tensor):
    """A CPU tensor that claims to be on a CUDA device."""

    is_cuda = True


class _Host(EdgesOfRank):
    """Messages between threads in place of Gloo's transport."""

    def __init__(self, rank: int, boxes: Sequence[queue.SimpleQueue[Message]]) -> None:
        super().__init__("pipeline", rank, len(boxes))
        self._boxes = boxes

    def connect(self, sources: Sequence[int], destinations: Sequence[int], capacity_bytes: int) -> None:
        self.open(sources, destinations, capacity_bytes)

    def send(self, destination: int, message: Message) -> None:
        wire = self.outgoing(destination, message)
        self._boxes[destination].put(decode(torch.cat(wire), self.rank))

    def wait(self, timeout_seconds: float) -> Message | None:
        self.check_open()
        try:
            return self._boxes[self.rank].get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def flush(self, timeout_seconds: float) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


# ---------------------------------------------------------------------- programs


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation of a rank. peers: the ranks to which it sends or from which it receives; members of a
    collective."""

    kind: Literal["send", "receive", "collective", "synchronize"]
    rank: int
    peers: tuple[int, ...] = ()
    elements: int = 0


EDGES = ((0, 2), (2, 0), (1, 3), (3, 1))
STAGES = ((0, 1), (2, 3))


def random_program(seed: int, length: int = 24) -> list[Step]:
    """Steps in an order in which they end if no rank synchronizes; all sent messages are received."""
    generator = random.Random(seed)
    steps: list[Step] = []
    sent: dict[tuple[int, int], int] = Counter()

    def receive(edge: tuple[int, int]) -> None:
        sent[edge] -= 1
        steps.append(Step(kind="receive", rank=edge[1], peers=(edge[0],)))

    for _ in range(length):
        match generator.choices(("send", "receive", "collective", "synchronize"), (5, 4, 2, 4))[0]:
            case "send":
                source, destination = generator.choice(EDGES)
                sent[source, destination] += 1
                steps.append(Step(kind="send", rank=source, peers=(destination,),
                                  elements=generator.choice((1, 5_000, 40_000))))
            case "receive":
                open_edges = sorted(edge for edge, count in sent.items() if count)
                if open_edges:
                    receive(generator.choice(open_edges))
            case "collective":
                stage = generator.choice(STAGES)
                steps += [Step(kind="collective", rank=rank, peers=stage) for rank in stage]
            case _:
                ranks = generator.sample(range(4), generator.choice((1, 2, 4)))
                steps += [Step(kind="synchronize", rank=rank) for rank in ranks]
    for edge in sorted(sent):
        while sent[edge]:
            receive(edge)
    return steps


@dataclass
class _Rank:
    """Messages that one rank has sent and received: peer -> count, and how it has ended."""

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    arrived: dict[int, deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    outcome: str = "no end"


def _run_rank(rank: int, steps: Sequence[Step], transport: NcclTransport, devices: Devices, mine: _Rank) -> None:
    """Run this rank's steps. Each message contains its number on its edge."""
    for step in steps:
        match step.kind:
            case "send":
                (peer,) = step.peers
                tensor = torch.full((step.elements,), float(mine.sent[peer])).as_subclass(_OnDevice)
                transport.send(peer, Message(MessageKind.FORWARD, 1, mine.sent[peer], {"": tensor}))
                mine.sent[peer] += 1
            case "receive":
                (peer,) = step.peers
                while not mine.arrived[peer]:
                    message = transport.wait(PATIENCE_SECONDS)
                    if message is None:
                        mine.outcome = "no message"
                        return
                    mine.arrived[message.source].append(message)
                message = mine.arrived[peer].popleft()
                number = mine.received[peer]
                mine.received[peer] += 1
                if message.microbatch != number or not bool((message.tensors[""] == number).all()):
                    mine.outcome = "another message"
                    return
            case "collective":
                devices.collective(step.peers)
            case "synchronize":
                devices.synchronize()
    mine.outcome = "ended" if transport.flush(PATIENCE_SECONDS) else "not flushed"


def _run_threads(size: int, target: Any) -> None:
    threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_SECONDS)


def _transport(rank: int, boxes: Sequence[queue.SimpleQueue[Message]], kind: type[NcclTransport]) -> NcclTransport:
    host: Any = _Host(rank, boxes)
    group: Any = SimpleNamespace(rank=rank)  # all that the model needs of a process group: an edge is a pair of ranks
    return kind(host, torch.device("cpu"), rising=group, falling=group)


def run_program(steps: Sequence[Step], kind: type[NcclTransport] = NcclTransport) -> Counter[str]:
    """Number of ranks by how they end: "ended", or a description of the problem."""
    devices, ranks = Devices(4), [_Rank() for _ in range(4)]
    boxes: list[queue.SimpleQueue[Message]] = [queue.SimpleQueue() for _ in range(4)]
    connected = threading.Barrier(4, timeout=PATIENCE_SECONDS)

    def run(rank: int) -> None:
        with devices.as_rank(rank):
            transport = _transport(rank, boxes, kind)
            peer = next(destination for source, destination in EDGES if source == rank)
            try:
                transport.connect([peer], [peer], 1 << 16)
                connected.wait()
                _run_rank(rank, [step for step in steps if step.rank == rank], transport, devices, ranks[rank])
            except Blocked:
                ranks[rank].outcome = "blocked"
            connected.wait()
            transport.close()

    with devices.installed():
        _run_threads(4, run)
    return Counter([rank.outcome for rank in ranks] + devices.violations)


def exchange(synchronizing: Sequence[int], kind: type[NcclTransport] = NcclTransport) -> list[str]:
    """How the two ranks end if those of `synchronizing` wait for their entire device after they have sent."""
    devices, outcomes = Devices(2), ["", ""]
    boxes: list[queue.SimpleQueue[Message]] = [queue.SimpleQueue() for _ in range(2)]
    sent = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def run(rank: int) -> None:
        with devices.as_rank(rank):
            transport = _transport(rank, boxes, kind)
            transport.connect([1 - rank], [1 - rank], 1 << 16)
            sent.wait()
            tensor = torch.ones(1000).as_subclass(_OnDevice)
            transport.send(1 - rank, Message((MessageKind.FORWARD, MessageKind.BACKWARD)[rank], 1, 0, {"": tensor}))
            try:
                while not transport._destinations[1 - rank].posted:
                    time.sleep(1e-4)
                sent.wait()
                if rank in synchronizing:
                    devices.synchronize()
                received = transport.wait(PATIENCE_SECONDS) is not None
                outcomes[rank] = ("synchronized" if rank in synchronizing else "received") if received else "no message"
            except Blocked:
                outcomes[rank] = "blocked"
            sent.wait()
            transport.close()

    with devices.installed():
        _run_threads(2, run)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=100, help="random programs")
    seeds = options.parse_args(arguments).seeds
    cases: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (0, 1))
    found = [(case, exchange(case)) for case in cases]
    print(table(["ranks that synchronize", "rank 0", "rank 1"],
                [[", ".join(map(str, case)) or "none", *outcomes] for case, outcomes in found]))
    outcomes = sum((run_program(random_program(seed)) for seed in range(seeds)), Counter[str]())
    print(f"ranks of {seeds} random programs: " + ", ".join(f"{count} {what}" for what, count in outcomes.items()))
    return int(any("blocked" in pair for _, pair in found) or set(outcomes) - {"ended"} != set())


if __name__ == "__main__":
    sys.exit(main())
