"""A detector of data races between CUDA streams and the host: a fake device that tracks which operations are ordered.

    with OrderedCuda(devices=2) as cuda:
        program()
    assert not cuda.races              # accesses to the same bytes, one of them a write, without a wait between

Each stream, each NCCL channel and each host thread has a vector clock (Mattern 1989). An operation joins the clock of
the host thread that launches it; `record`, `wait_event`, `wait_stream`, `synchronize`, `query` and copies that the
host waits for join clocks as the CUDA programming guide says ("Asynchronous Concurrent Execution"). Each access to
device memory and to pinned host memory is kept with its clock. Two accesses conflict if no chain of waits orders them,
even if this run did not show it. So one run represents all orders in which a device may run it, and a wait that is left
out (`left_out`) is noticed unless other waits imply it.

Freeing device memory while another stream uses it is a race too, because the caching allocator may immediately give it
to the stream that allocated it, unless `record_stream` was called. New memory counts as written by that stream.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ranvier
from benchmarks.gpu.models import nccl
from tests.fake_cuda import FakeCuda, FakeEvent, FakeStream, tensors_in

ROOT = Path(ranvier.__file__).parent
Clock = dict[object, int]
Site = tuple[str, int, int]
"""A wait: (file below ranvier/, its line, the line that recorded what it waits for, or 0)."""
_NO_ACCESS = ("aten::empty", "aten::new_empty", "aten::set_", "aten::detach", "aten::_unsafe_view", "aten::lift_fresh")


def join(clock: Clock, other: Clock) -> None:
    for agent, time in other.items():
        if clock.get(agent, 0) < time:
            clock[agent] = time


def place() -> tuple[str, int]:
    """The file below ranvier/ and the line that is running."""
    frame = sys._getframe(1)
    while frame is not None and _file_below(frame.f_code.co_filename) is None:
        frame = frame.f_back
    # `_event` records on behalf of its caller, whose line is the one to report
    if frame is not None and frame.f_code.co_name == "_event":
        frame = frame.f_back
    return ("", 0) if frame is None else (_file_below(frame.f_code.co_filename) or "", frame.f_lineno)


@cache
def _file_below(name: str) -> str | None:
    """The file's name below ranvier/; None for files elsewhere."""
    return str(Path(name).relative_to(ROOT)) if name.startswith(f"{ROOT}/") else None


@dataclass(frozen=True)
class Access:
    start: int
    stop: int
    writes: bool
    agent: object
    time: int
    where: tuple[str, int]


class _Stream(FakeStream):
    def __init__(self, cuda: OrderedCuda, device: object = None, priority: int = 0) -> None:
        super().__init__(device, priority)
        self._cuda, self.clock = cuda, Clock()
        cuda.streams.append(self)

    def wait_stream(self, other: Any) -> None:
        if self._cuda.waits(0):
            join(self.clock, other.clock)

    def wait_event(self, event: Any) -> None:
        if event.clock is not None and self._cuda.waits(event.line):
            join(self.clock, event.clock)

    def synchronize(self) -> None:
        if self._cuda.waits(0):
            join(self._cuda.host, self.clock)


class _Event(FakeEvent):
    def __init__(self, cuda: OrderedCuda, enable_timing: bool = False, blocking: bool = False) -> None:
        super().__init__(enable_timing, blocking)
        self._cuda, self.clock, self.line = cuda, None, 0

    clock: Clock | None

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        join(stream.clock, self._cuda.host)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        self.clock, self.line = dict(stream.clock), place()[1]

    def synchronize(self) -> None:
        if self.clock is not None and self._cuda.waits(self.line):
            join(self._cuda.host, self.clock)

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, other: Any) -> float:
        for event in (self, other):
            if any(self._cuda.host.get(agent, 0) < time for agent, time in event.clock.items()
                   if isinstance(agent, _Stream)):
                self._cuda.races.append("the time of an event is read, and the host has not waited for it")
        return super().elapsed_time(other)


class OrderedCuda(FakeCuda):
    """`FakeCuda` that tracks the order of streams. left_out: a wait that has no effect."""

    def __init__(self, devices: int = 2, left_out: Site | None = None) -> None:
        super().__init__(devices)
        self.left_out, self.sites = left_out, set[Site]()
        self.races: list[str] = []
        self.streams: list[_Stream] = []
        self._accesses: dict[int, list[Access]] = {}
        self._makers: dict[int, _Stream] = {}
        self._recorded: dict[int, set[object]] = {}
        self._pinned: set[int] = set()
        self._aliases: dict[int, int] = {}

    # ------------------------------------------------------------------ clocks

    @property
    def host(self) -> Clock:
        """The clock of this thread; a new thread starts with the clock of the thread that started it."""
        found = vars(self._local).get("clock")
        if found is None:
            found = self._local.clock = dict(getattr(threading.current_thread(), "clock_at_start", {}))
        return found

    def waits(self, recorded: int) -> bool:
        """Whether the current wait has an effect."""
        site = (*place(), recorded)
        self.sites.add(site)
        return site != self.left_out

    def require_idle(self, why: str) -> None:
        """Record a race if a stream may still be working, judged by the waits of this thread."""
        host = self.host
        if any(host.get(stream, 0) < stream.clock.get(stream, 0) for stream in self.streams):
            self._race(f"{why} while the device is busy")

    def _race(self, what: str) -> None:
        self.races.append(what)  # without raising: a thread that ends here would stop the others

    # ------------------------------------------------------------------ accesses

    def access(self, tensor: Tensor, agent: object, clock: Clock, *, writes: bool) -> None:
        """Record that `agent`, whose clock is `clock`, reads or writes this tensor now."""
        if tensor.is_meta or tensor.is_sparse or not tensor.numel():
            return
        key = self._key(tensor)
        if key not in self._makers and key not in self._pinned:
            return
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        stop = start + size + size * sum((length - 1) * stride for length, stride in zip(
            tensor.shape, tensor.stride(), strict=True))
        new = Access(start, stop, writes, agent, clock.get(agent, 0), place())
        with self._lock:
            kept = []
            for old in self._accesses.get(key, []):
                ordered = old.agent == agent or clock.get(old.agent, 0) >= old.time
                if not ordered and (writes or old.writes) and old.start < stop and start < old.stop:
                    self._race(f"{_verb(new)} of bytes {start} to {stop} at {_line(new)} conflicts with the "
                               f"{_verb(old)} at {_line(old)}")
                covered = start <= old.start and old.stop <= stop and (writes or not old.writes)
                if not (ordered and covered):
                    kept.append(old)
            self._accesses[key] = [*kept, new]

    def _key(self, tensor: Tensor) -> int:
        """The key of the tensor's memory; from_numpy and DLPack create another storage for it."""
        storage = tensor.untyped_storage()
        return self._aliases.get(storage.data_ptr(), storage._cdata)

    def shared(self, tensor: Tensor) -> Tensor:
        made, key = super().shared(tensor), self._key(tensor)
        storage = made.untyped_storage()
        address = storage.data_ptr()
        self._aliases[address] = key
        weakref.finalize(storage, self._aliases.pop, address, None).atexit = False
        return made

    def _made(self, tensor: Tensor, stream: _Stream) -> None:
        storage, key = tensor.untyped_storage(), self._key(tensor)
        with self._lock:
            if key in self._makers:
                return

            def freed() -> None:
                known = dict(stream.clock)
                join(known, self.host)
                recorded = self._recorded.pop(key, set())
                self._makers.pop(key, None)
                for old in self._accesses.pop(key, []):
                    if old.agent is not stream and known.get(old.agent, 0) < old.time and old.agent not in recorded:
                        self.races.append(f"memory is freed that the {_verb(old)} at {_line(old)} may still use")

            self._makers[key] = stream
            weakref.finalize(storage, freed).atexit = False
        # The last owner of the memory may still be writing on this stream: torch's allocator promises no more.
        join(stream.clock, self.host)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        whole = Access(0, storage.nbytes(), True, stream, stream.clock[stream], place())
        self._accesses[key] = [whole]

    def keep_for(self, tensor: Tensor, stream: _Stream) -> None:
        """Once this tensor is freed, do not reuse its memory before `stream` has finished with it."""
        self._recorded.setdefault(self._key(tensor), set()).add(stream)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Mark this host tensor as pinned memory, which copies use while the host continues."""
        storage = tensor.untyped_storage()
        key, address = storage._cdata, storage.data_ptr()

        def freed() -> None:
            self._aliases.pop(address, None)
            self._pinned.discard(key)  # torch's allocator waits for copies before it reuses such memory
            self._accesses.pop(key, None)

        self._pinned.add(key)
        self._aliases[address] = key
        weakref.finalize(storage, freed).atexit = False
        return tensor

    def follow(self, tensor: Tensor) -> None:
        """From now on, track this host tensor, which is used by others than the host."""
        if tensor.untyped_storage()._cdata not in self._pinned:
            self.pinned(tensor)

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of the dispatcher."""
        name, pins = function._schema.name, bool(kwargs.get("pin_memory"))
        tensors = tensors_in((args, kwargs))
        result = super().run(function, args, kwargs)
        results = tensors_in(result)
        if pins:
            for tensor in results:
                self.pinned(tensor)
        places = {self.place(tensor) for tensor in (*tensors, *results)} - {None}
        if places:
            self._on_device(places.pop(), function, args, kwargs, tensors, results)
        elif not function.is_view and not name.startswith(_NO_ACCESS):
            self._on_host(function, args, kwargs, tensors)
        return result

    def _on_host(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        clock, me, written = self.host, threading.get_ident(), self._written(function, args, kwargs)
        clock[me] = clock.get(me, 0) + 1
        for tensor in tensors:
            self.access(tensor, me, clock, writes=id(tensor) in written)

    def _on_device(self, index: int, function: Any, args: Any, kwargs: Any, tensors: list[Tensor],
                   results: list[Tensor]) -> None:
        stream, host, me = self.current_stream(index), self.host, threading.get_ident()
        for tensor in results:
            if self.place(tensor) is not None:
                self._made(tensor, stream)
        name = function._schema.name
        if function.is_view or name.startswith(_NO_ACCESS):
            return
        written = self._written(function, args, kwargs)
        host[me] = host.get(me, 0) + 1
        join(stream.clock, host)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        inputs = {id(tensor) for tensor in tensors}
        for tensor in (*tensors, *(one for one in results if id(one) not in inputs)):
            writes = id(tensor) in written or id(tensor) not in inputs
            on_device = self.place(tensor) is not None
            if on_device or tensor.untyped_storage()._cdata in self._pinned:
                self.access(tensor, stream, stream.clock, writes=writes)
        if self._blocks(name, args, kwargs, tensors, results):
            join(host, stream.clock)

    def _blocks(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]) -> bool:
        """Whether the host waits for the operation."""
        if name == "aten::_local_scalar_dense":
            return True
        if name not in ("aten::copy_", "aten::_to_copy"):
            return False
        target, source = (tensors[0], tensors[1]) if name == "aten::copy_" else (results[0], tensors[0])
        ends = (self.place(target), self.place(source))
        if (ends[0] is None) == (ends[1] is None):
            return False
        non_blocking = kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
        # For copies into pageable memory the host always waits. From it, CUDA first copies to its own buffer.
        to_pageable = ends[0] is None and target.untyped_storage()._cdata not in self._pinned
        return not non_blocking or to_pageable

    @staticmethod
    def _written(function: Any, args: Any, kwargs: Any) -> set[int]:
        """Which of the arguments' tensors the operation writes, by id."""
        found = set()
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                found |= {id(leaf) for leaf in tensors_in(value)}
        return found

    # ------------------------------------------------------------------ what programs call

    def current_stream(self, index: int) -> Any:
        before = self.calls["current_stream", index]
        stream = self._stream_of(torch.device("cuda", index))
        self.calls["current_stream", index] = before
        return stream

    def new_stream(self, device: torch.device) -> FakeStream:
        return _Stream(self, device)

    def _synchronize(self, device: object = None) -> None:
        index = self._index("synchronize", device)
        if self.waits(0):
            for stream in self.streams:
                if stream.device.index == index:
                    join(self.host, stream.clock)

    def _functions(self) -> dict[str, Any]:
        return {**super()._functions(), "Stream": partial(_Stream, self), "Event": partial(_Event, self),
                "synchronize": self._synchronize}

    def read_by_host(self, tensor: Tensor, *, writes: bool = False) -> None:
        """Record an access of the host that torch does not see: by numpy, MPI, or a file."""
        host, me = self.host, threading.get_ident()
        host[me] = host.get(me, 0) + 1
        self.access(tensor, me, host, writes=writes)

    def __enter__(self) -> OrderedCuda:
        super().__enter__()
        inner = self._context
        stack = contextlib.ExitStack()
        stack.push(inner)
        numpy, tolist, pin, start = Tensor.numpy, Tensor.tolist, Tensor.pin_memory, threading.Thread.start

        def record_stream(tensor: Tensor, stream: _Stream) -> None:
            if self.waits(0):
                self.keep_for(tensor, stream)

        def start_thread(thread: Any) -> None:
            thread.clock_at_start = dict(self.host)
            start(thread)

        def reading(call: Any) -> Any:
            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                place = self.place(tensor)
                if place is not None:  # first copied to the host, which waits
                    join(self.host, self.current_stream(place).clock)
                self.read_by_host(tensor)
                return call(tensor, *args, **kwargs)
            return read

        for name, function in (("numpy", reading(numpy)), ("tolist", reading(tolist)), ("record_stream", record_stream),
                               ("pin_memory", lambda tensor: self.pinned(pin(tensor)))):
            stack.enter_context(mock.patch.object(Tensor, name, function, create=True))
        stack.enter_context(mock.patch.object(threading.Thread, "start", start_thread))
        self._context = stack
        return self


def _verb(access: Access) -> str:
    return "write" if access.writes else "read"


def _line(access: Access) -> str:
    return f"{access.where[0]}:{access.where[1]}"


# ---------------------------------------------------------------------- threads and NCCL


class OrderedQueue:
    """A queue between threads; taking an item joins the clock of its sender."""

    def __init__(self, cuda: OrderedCuda) -> None:
        self._cuda, self._items = cuda, queue.SimpleQueue[Any]()

    def put(self, item: Any) -> None:
        self._items.put((item, dict(self._cuda.host)))

    def get(self, *args: Any, **kwargs: Any) -> Any:
        item, clock = self._items.get(*args, **kwargs)
        join(self._cuda.host, clock)
        return item

    def empty(self) -> bool:
        return self._items.empty()


class OrderedLock:
    """A lock; taking it joins the clock of its last holder."""

    def __init__(self, cuda: OrderedCuda) -> None:
        self._cuda, self._lock, self._clock = cuda, threading.Lock(), Clock()

    def __enter__(self) -> None:
        self._lock.acquire()
        join(self._cuda.host, self._clock)

    def __exit__(self, *error: object) -> None:
        self._clock = dict(self._cuda.host)
        self._lock.release()


class OrderedKernel(nccl.Kernel):
    """A send or a receive, on the stream of its communicator."""

    cuda: OrderedCuda
    clock: Clock

    def is_completed(self) -> bool:
        if self.ended:
            if self.cuda.waits(0):
                join(self.cuda.host, self.clock)
            self.payload = None  # freeing it is then ordered after its end
        return self.ended

    def wait(self) -> None:
        join(self.cuda.current_stream(DEVICE.index).clock, self.clock)


DEVICE = torch.device("cuda", 1)


class OrderedDevices(nccl.Devices):
    """The model of NCCL; its kernels read and write on their own streams, after earlier work of the caller's stream."""

    def __init__(self, size: int, cuda: OrderedCuda) -> None:
        super().__init__(size)
        self._cuda = cuda
        self._channels: dict[tuple[str, int, int], _Stream] = {}

    def _launch(self, kind: str, rank: int, source: int, destination: int, tensor: Tensor) -> nccl.Kernel:
        channel = self._channels.setdefault((kind, source, destination), _Stream(self._cuda, DEVICE))
        join(channel.clock, self._cuda.current_stream(DEVICE.index).clock)
        join(channel.clock, self._cuda.host)
        channel.clock[channel] = channel.clock.get(channel, 0) + 1
        self._cuda.access(tensor, channel, channel.clock, writes=kind == "receive")
        if tensor.untyped_storage().resizable():  # torch keeps NCCL's tensors alive if its own allocator made them
            self._cuda.keep_for(tensor, channel)
        with torch.utils._python_dispatch._disable_current_modes():
            kernel: Any = super()._launch(kind, rank, source, destination, tensor)
        kernel.__class__ = OrderedKernel
        kernel.cuda, kernel.clock = self._cuda, dict(channel.clock)
        return kernel


@contextlib.contextmanager
def ordered_transport(cuda: OrderedCuda, module: Any, size: int) -> Iterator[list[Any]]:
    """Within the block, the NCCL transport's own locks and queues order its threads. Yields each rank's message box."""
    threads = SimpleNamespace(Lock=lambda: OrderedLock(cuda), Event=threading.Event, Thread=threading.Thread)
    queues = SimpleNamespace(SimpleQueue=lambda: OrderedQueue(cuda), Empty=queue.Empty)
    with mock.patch.object(module, "dist", OrderedDevices(size, cuda)), mock.patch.object(module, "queue", queues), \
            mock.patch.object(module, "threading", threads), mock.patch.object(module, "_CLOSE_SECONDS", 0.01):
        yield [OrderedQueue(cuda) for _ in range(size)]
