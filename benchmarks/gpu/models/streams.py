"""CUDA streams on a CPU: does the optimizer with offloaded states wait wherever it must?

    python -m benchmarks.gpu.models.streams [--seeds 12] [--without-waits]

The CUDA branches of `ranvier.optim.placement` run on host memory. `Runtime` takes the place of `torch.cuda` in that
module and follows the rules of the CUDA programming guide (chapter "Asynchronous Concurrent Execution"):

  - an operation on device memory is put into the queue of the current stream, and runs later
  - operations of one stream run in their order; between streams there is no order, but that of recorded events
  - a stream that waits for an event runs nothing until the event has been reached
  - the host waits only where it synchronizes, or where it copies without `non_blocking`

The model picks which stream runs its next operation: at random, or always the first in a random order of streams, which
holds the others back for as long as the program allows. So it tries legal orders that a device would rarely show. New
device memory is written by its last owner until the stream that allocates it gets there, which is the caching
allocator's rule; `record_stream` and the reuse of freed memory are not modelled.

For each placement and number format the table says in how many runs parameters and states were those of a run without
streams. With --without-waits each wait of the module is left out in turn, and the case that shows it is printed; none
is "unnoticed". `tests/stream_order.py` looks at the whole package, at what must run before what instead of numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import linecache
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.memory.program import table
from ranvier.config.run import Optim
from ranvier.optim import placement
from ranvier.optim.buckets import Bucket, Segment, buckets_of
from ranvier.optim.rules import rules_of
from ranvier.optim.state_places import StateOwner, StatePlaces

Site = tuple[int, int]
"""Where the modelled program waits: (line of the wait, line at which what it waits for was recorded, or 0)."""


class Deadlock(AssertionError):
    """No stream can run, and the host waits."""


def _line(skipped: Sequence[str] = ("_event",)) -> int:
    """The line of the modelled module that is running, outside of its functions `skipped`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename != placement.__file__ or frame.f_code.co_name in skipped):
        frame = frame.f_back
    return frame.f_lineno if frame is not None else 0


@dataclass(eq=False)
class Event:
    """As `torch.cuda.Event`. Before it is recorded, waiting for it does nothing."""

    runtime: Runtime
    recorded_at: int | None = None
    reached: bool = False

    def record(self, stream: Stream) -> None:
        self.recorded_at, self.reached = _line(), False
        stream.queue.append(("record", self))

    def synchronize(self) -> None:
        if self.recorded_at is not None and self.runtime.waits((_line(), self.recorded_at)):
            self.runtime.run_until(lambda: self.reached)

    def query(self) -> bool:
        return self.recorded_at is None or self.reached


@dataclass(eq=False)
class Stream:
    """As `torch.cuda.Stream`: a queue of operations, waits and events to record."""

    runtime: Runtime
    queue: list[tuple[str, Event | Callable[[], object]]] = field(default_factory=list)

    @property
    def blocked(self) -> bool:
        if not self.queue:
            return True
        kind, what = self.queue[0]
        return kind == "wait" and isinstance(what, Event) and not what.reached

    def wait_event(self, event: Event) -> None:
        if event.recorded_at is not None and self.runtime.waits((_line(), event.recorded_at)):
            self.queue.append(("wait", event))

    def wait_stream(self, other: Stream) -> None:
        if self.runtime.waits((_line(), 0)):
            event = Event(self.runtime)
            event.record(other)
            self.queue.append(("wait", event))

    def synchronize(self) -> None:
        if self.runtime.waits((_line(), 0)):
            self.drain()

    def drain(self) -> None:
        self.runtime.run_until(lambda: not self.queue)


class Runtime:
    """One device and its streams. left_out: a wait that the modelled program loses. sites: the waits that it made."""

    def __init__(self, seed: int, left_out: Site | None = None) -> None:
        self._random = random.Random(seed)
        self._left_out, self._fixed_order = left_out, seed % 3 != 0
        self._ranks: dict[Stream, float] = {}
        self.sites: set[Site] = set()
        self.default = self.current = self.new_stream()
        self._host_storages: set[int] = set()

    def new_stream(self, device: object = None) -> Stream:
        stream = Stream(self)
        self._ranks[stream] = self._random.random()
        return stream

    def waits(self, site: Site) -> bool:
        self.sites.add(site)
        return site != self._left_out

    # ------------------------------------------------------------------ the device's side

    def step(self) -> None:
        """Run the next entry of one stream."""
        ready = [stream for stream in self._ranks if not stream.blocked]
        if not ready:
            raise Deadlock("no stream can go on")
        stream = min(ready, key=self._ranks.__getitem__) if self._fixed_order else self._random.choice(ready)
        kind, what = stream.queue.pop(0)
        if isinstance(what, Event):
            what.reached |= kind == "record"
        else:
            with _disable_current_modes():
                what()

    def run_some(self) -> None:
        """What a device does while the host is busy: nothing, or a few entries."""
        for _ in range(self._random.choice((0, 0, 1, 2))):
            if any(not stream.blocked for stream in self._ranks):
                self.step()

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.step()

    # ------------------------------------------------------------------ the host's side

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._host_storages

    def _allocating(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
            tensor = make(*size, **options)
            if pin_memory:
                self._host_storages.add(tensor.untyped_storage().data_ptr())
            elif make is torch.empty:  # the memory's last owner may still be writing, on the current stream
                self.current.queue.append(("run", lambda: tensor.fill_(torch.nan)))
            return tensor
        return allocate

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the optimizer's placements take their weights for CUDA tensors and run on this device."""
        cuda = SimpleNamespace(Stream=self.new_stream, Event=lambda: Event(self), stream=self.stream,
                               current_stream=lambda device=None: self.current)
        fake: Any = _Torch(cuda=cuda, zeros=self._allocating(torch.zeros), empty=self._allocating(torch.empty))
        pinned = mock.patch.object(placement, "pinned_zeros", lambda size, dtype: fake.zeros(
            size, dtype=dtype, pin_memory=True))
        unused = mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None)
        with mock.patch.object(placement, "torch", fake), pinned, unused, _Queueing(self):
            yield


class _Torch:
    """torch, with some of its names replaced."""

    def __init__(self, **replaced: object) -> None:
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


class _OnDevice(Tensor):
    """A CPU tensor that says that it is on a CUDA device; views of it say so too."""

    is_cuda = True


class _Queueing(TorchDispatchMode):
    """Puts operations that write device memory into the current stream's queue."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._runtime = runtime

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # Scalars are AdamW's step counts, which are made anew for each update: they have no place of their own.
        places = {self._runtime.on_host(tensor) for tensor in tensors if tensor.dim()}
        if False not in places or function.is_view or "empty" in function._schema.name:
            return function(*args, **kwargs)  # the host's own work, or no work at all
        if not function._schema.is_mutable:  # a new tensor, whose memory exists only once it is computed
            self._runtime.current.drain()
            return function(*args, **kwargs)
        self._runtime.current.queue.append(("run", lambda: function(*args, **kwargs)))
        is_copy = function._schema.name == "aten::copy_"
        non_blocking = kwargs.get("non_blocking", args[2] if is_copy and len(args) > 2 else False)
        if len(places) == 2 and not (is_copy and non_blocking):
            self._runtime.current.drain()
        return args[0] if function._schema.returns else None


# ---------------------------------------------------------------------- the optimizer's step


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to hold optimizer states."""

    offload: str
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    in_flight: int

    def __str__(self) -> str:
        return f"{self.offload} {str(self.dtype).removeprefix('torch.')}, {self.in_flight} in flight"


CASES = tuple(Case(offload=offload, dtype=dtype, gradient_dtype=gradient_dtype, in_flight=in_flight)
              for offload in ("stream", "host")
              for dtype, gradient_dtype in ((torch.bfloat16, torch.float32), (torch.float16, torch.float16),
                                            (torch.float32, torch.float32))
              for in_flight in (1, 2, 3, 5))
ELEMENTS, CHUNK, BUCKET = 230, 96, 32


def train(case: Case, runtime: Runtime | None, steps: int = 5) -> dict[str, Tensor]:
    """Parameters and states after `steps` of AdamW, of which the second has no update and the fourth goes through the
    buckets backwards. Without a runtime: the same with states beside the parameters, and no stream."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(ELEMENTS, generator=generator).to(case.dtype)
    values = [torch.randn(ELEMENTS, generator=generator).to(case.gradient_dtype) for _ in range(steps)]
    gradients = torch.zeros(ELEMENTS, dtype=case.gradient_dtype)
    chunks = list(buckets_of([(0, CHUNK), (CHUNK, ELEMENTS)], BUCKET))
    buckets = [bucket for chunk in chunks for bucket in chunk]
    # Edges at multiples of 16: what a processor's vectors leave over is rounded in another way, and without streams
    # buckets are updated together.
    segments = [Segment(0, 48, 1.0, 0.1), Segment(48, 80, 1.0, 0.0), Segment(80, ELEMENTS, 0.5, 0.1)]
    with runtime.installed() if runtime else contextlib.nullcontext():
        held = _placement(case, weights, lambda bucket: gradients[bucket.start:bucket.stop], buckets, runtime)
        for step in range(steps):
            gradients.copy_(values[step])
            if step >= 3:
                chunks, buckets = [chunk[::-1] for chunk in chunks[::-1]], buckets[::-1]
            held.prefetch(buckets)
            if step == 1:  # a step that is skipped: its buckets were copied in for nothing
                continue
            update = placement.Update(step=step + 1, learning_rate=0.01, factor=0.5, segments=segments)
            for chunk in chunks:
                for _ in held.update(chunk, update):
                    if runtime:
                        runtime.run_some()
            if step == 0:
                held.synchronize()
        held.synchronize()
        states = {name: state.clone() for name, state in held.states.items()}  # what the host may read from now on
        if runtime:
            runtime.default.drain()
        with _disable_current_modes():
            return {"parameters": weights.clone(), **states}


def _placement(case: Case, weights: Tensor, gradients: placement.GradientsOf, buckets: Sequence[Bucket],
               runtime: Runtime | None) -> placement.Placement:
    rules = rules_of(Optim())
    places = StatePlaces(buckets, [StateOwner(0, len(weights), dict.fromkeys(rules.elementwise.states))])
    if runtime is None:
        return placement.Resident(rules, weights, gradients, buckets, places)
    weights = weights.as_subclass(_OnDevice)
    if case.offload == "stream":
        return placement.Streamed(rules, weights, gradients, buckets, places, case.in_flight)
    return placement.OnHost(rules, weights, gradients, buckets, places, case.in_flight,
                            gradient_dtype=case.gradient_dtype)


def differences(case: Case, seeds: Iterable[int], left_out: Site | None = None) -> tuple[Counter[str], set[Site]]:
    """What the runs came to ("equal", "other numbers", "deadlock"), and the waits that they made.

    The host's kernel rounds differently, so its parameters are compared with a tolerance.
    """
    expected, outcomes, sites = _without_streams(case), Counter[str](), set[Site]()
    for seed in seeds:
        runtime = Runtime(seed, left_out)
        try:
            found = train(case, runtime)
            outcomes["equal" if _agree(case, found, expected) else "other numbers"] += 1
        except Deadlock:
            outcomes["deadlock"] += 1
        sites |= runtime.sites
    return outcomes, sites


@cache
def _without_streams(case: Case) -> dict[str, Tensor]:
    return train(case, None)


def _agree(case: Case, found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    if case.offload == "stream":
        return all(torch.equal(found[name], value) for name, value in expected.items())
    return torch.allclose(found["parameters"].float(), expected["parameters"].float(), rtol=2e-2, atol=1e-3) and all(
        torch.allclose(found[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items()
        if name != "parameters")


def noticed(site: Site, cases: Iterable[Case], seeds: Sequence[int]) -> Case | None:
    """A case whose numbers change, or that does not end, when the wait at `site` is left out."""
    cases = list(cases)
    for seed in seeds:
        for case in cases:
            if differences(case, [seed], site)[0]["equal"] == 0:
                return case
    return None


def text_of(site: Site) -> str:
    """The wait as the module writes it, and what it waits for."""
    wait, recorded = (linecache.getline(placement.__file__, line).split("#")[0].strip() for line in site)
    return f"line {site[0]}: {wait}" + (f"   [line {site[1]}: {recorded}]" if site[1] else "")


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=12, help="runs of each case, each in another order")
    options.add_argument("--without-waits", action="store_true", help="leave out each wait in turn")
    chosen = options.parse_args(arguments)
    seeds, sites, wrong, rows = range(chosen.seeds), dict[Site, list[Case]](), 0, []
    for case in CASES:
        outcomes, made = differences(case, seeds)
        for site in made:
            sites.setdefault(site, []).append(case)
        wrong += chosen.seeds - outcomes["equal"]
        rows.append([case, *(outcomes[name] for name in ("equal", "other numbers", "deadlock"))])
    print(table(["case", "equal", "other numbers", "deadlock"], rows))
    if chosen.without_waits:
        print("\nleft out, and the case that shows it:")
        for site in sorted(sites):
            print(f"  {text_of(site)}  ->  {noticed(site, sites[site], seeds) or 'unnoticed'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
