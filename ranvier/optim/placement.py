"""Where optimizer states live while parameters are updated bucket by bucket.

    Resident   states on the device: bucket after bucket, nothing moves
    Streamed   states in host memory; up to d buckets of them on the device at once:

                   copy in     | 0 | 1 | 2 | 3 |
                   update          | 0 | 1 | 2 | 3 |          three streams on CUDA, one after the other on CPU
                   copy out            | 0 | 1 | 2 | 3 |

    OnHost     states and a master copy in host memory, updated there; gradients go out, new parameters come in

(AxoNN, section V-B, has the second with one bucket in flight.) All hold the same numbers: bucket for bucket the same
rule sees the same values. With a CPU as the device the copies are real copies, so that memory and order are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ranvier.optim.buckets import Bucket, Segment, within
from ranvier.optim.rules import Rule
from ranvier.precision import is_half, wide


@dataclass(kw_only=True)
class Update:
    """What all buckets of one step have in common."""

    step: int
    learning_rate: float
    factor: float
    """What every gradient is multiplied by first."""
    segments: Sequence[Segment]


GradientsOf = Callable[[Bucket], Tensor]


class Placement(Protocol):
    """Holds the states of one rank's buckets."""

    states: dict[str, Tensor]
    """Name -> [elements of all buckets], "master" among them where parameters have a copy of their own."""
    workspace: dict[str, Tensor]
    """Device memory beside parameters, gradients and resident states."""
    staging: Sequence[Tensor]
    """Host memory beside the states."""

    def take_parameters(self, start: int, stop: int) -> None:
        """Master copies of elements [start, stop) become what the parameters are now."""

    def prefetch(self, buckets: Sequence[Bucket]) -> None:
        """These buckets, in this order, are the next that will be updated. What was told before is forgotten."""

    def update(self, buckets: Sequence[Bucket], update: Update) -> Iterator[Bucket]:
        """Update `buckets`, whose gradients are reduced, one for each turn of the caller's loop. On the device's own
        stream their parameters are new from then on."""

    def synchronize(self) -> None:
        """Return when `states` may be read by the host."""


def _apply(rule: Rule, bucket: Bucket, update: Update, parameters: Tensor, gradients: Tensor,
           states: dict[str, Tensor]) -> None:
    """The rule on each segment of a bucket. All tensors hold the bucket's elements, from 0."""
    for segment in within(update.segments, bucket.start, bucket.stop):
        here = slice(segment.start - bucket.start, segment.stop - bucket.start)
        rule.update(parameters[here], gradients[here], {name: state[here] for name, state in states.items()},
                    step=update.step, learning_rate=update.learning_rate * segment.learning_rate_factor,
                    weight_decay=segment.weight_decay)


class _Flat:
    """Flat parameters and gradients of a rank, and its states in one place.

    weights: [all elements], on the device. gradients: gives those of a bucket, on the device too.
    """

    def __init__(self, rule: Rule, weights: Tensor, gradients: GradientsOf, buckets: Sequence[Bucket],
                 names: Sequence[str], *, on_host: bool) -> None:
        self._rule, self._weights, self._gradients = rule, weights, gradients
        self._names, self._dtype = tuple(names), wide(weights.dtype)
        self._largest = max((len(bucket) for bucket in buckets), default=0)
        self._buckets, size = tuple(buckets), sum(len(bucket) for bucket in buckets)
        device = torch.device("cpu") if on_host else weights.device
        self.states = {name: torch.zeros(size, dtype=self._dtype, device=device,
                                         pin_memory=on_host and weights.is_cuda) for name in names}
        self.workspace: dict[str, Tensor] = {}
        self.staging: Sequence[Tensor] = ()
        self.take_parameters(0, len(weights))

    def take_parameters(self, start: int, stop: int) -> None:
        """Master copies of elements [start, stop) become what the parameters are now."""
        for bucket in self._buckets if "master" in self.states else ():
            first, last = max(start, bucket.start), min(stop, bucket.stop)
            if first < last:
                at = bucket.state + first - bucket.start
                self.states["master"][at:at + last - first].copy_(self._weights[first:last])

    def _of(self, bucket: Bucket, name: str) -> Tensor:
        return self.states[name][bucket.state:bucket.state + len(bucket)]

    def _scaled_gradients(self, bucket: Bucket, factor: float) -> Tensor:
        """The bucket's gradients times `factor` in the states' format: in place where they have it already."""
        gradients = self._gradients(bucket)
        if gradients.dtype is not self._dtype:
            if "gradients" not in self.workspace:
                self.workspace["gradients"] = gradients.new_empty(self._largest, dtype=self._dtype)
            gradients = self.workspace["gradients"][:len(bucket)].copy_(gradients)
        return gradients.mul_(factor) if factor != 1.0 else gradients

    def _finish_bucket(self, bucket: Bucket, update: Update, states: dict[str, Tensor]) -> None:
        """The update itself, on the device, from states that are there."""
        weights = self._weights[bucket.start:bucket.stop]
        gradients = self._scaled_gradients(bucket, update.factor)
        moments = {name: state for name, state in states.items() if name != "master"}
        _apply(self._rule, bucket, update, states.get("master", weights), gradients, moments)
        if "master" in states:
            _copy_updated(weights, states["master"], bucket, update)

    def prefetch(self, buckets: Sequence[Bucket]) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _copy_updated(weights: Tensor, master: Tensor, bucket: Bucket, update: Update, *, non_blocking: bool = False
                  ) -> None:
    """New parameters from their master copies. Frozen ones stay as they are: whoever froze them may have set them."""
    for segment in within(update.segments, bucket.start, bucket.stop):
        here = slice(segment.start - bucket.start, segment.stop - bucket.start)
        weights[here].copy_(master[here], non_blocking=non_blocking)


class Resident(_Flat):
    """States on the device."""

    def __init__(self, rule: Rule, weights: Tensor, gradients: GradientsOf, buckets: Sequence[Bucket]) -> None:
        names = (("master",) if is_half(weights.dtype) else ()) + rule.states
        super().__init__(rule, weights, gradients, buckets, names, on_host=False)

    def update(self, buckets: Sequence[Bucket], update: Update) -> Iterator[Bucket]:
        for bucket in buckets:
            self._finish_bucket(bucket, update, {name: self._of(bucket, name) for name in self._names})
            yield bucket


@dataclass(eq=False)
class _Slot:
    """Room for one bucket's states on the device, and when it may be used again."""

    tensors: dict[str, Tensor]
    bucket: int | None = None
    loaded: torch.cuda.Event | None = None
    stored: torch.cuda.Event | None = None


class Streamed(_Flat):
    """States in host memory, with `in_flight` buckets of them on the device at once."""

    def __init__(self, rule: Rule, weights: Tensor, gradients: GradientsOf, buckets: Sequence[Bucket],
                 in_flight: int) -> None:
        names = (("master",) if is_half(weights.dtype) else ()) + rule.states
        super().__init__(rule, weights, gradients, buckets, names, on_host=True)
        in_flight = max(1, min(in_flight, len(buckets)))
        room = {name: torch.empty(in_flight * self._largest, dtype=self._dtype, device=weights.device)
                for name in names}
        self.workspace.update({f"bucket {name}": tensor for name, tensor in room.items()})
        self._slots = [_Slot({name: tensor[place * self._largest:(place + 1) * self._largest]
                              for name, tensor in room.items()}) for place in range(in_flight)]
        self._in, self._out = ((torch.cuda.Stream(weights.device), torch.cuda.Stream(weights.device))
                               if weights.is_cuda else (None, None))
        self._queue: list[Bucket] = []

    def prefetch(self, buckets: Sequence[Bucket]) -> None:
        """Copies in as many as there is room for; the rest follow as slots become free."""
        if self._in is not None:
            self._in.wait_stream(self._out)  # what the last step has written is read again
            self._in.wait_stream(torch.cuda.current_stream(self._weights.device))
        for slot in self._slots:
            slot.bucket = None
        self._queue = list(buckets)
        for slot in self._slots:
            self._load_next(slot)

    def _load_next(self, slot: _Slot) -> None:
        if not self._queue:
            return
        bucket = self._queue.pop(0)
        slot.bucket = bucket.number
        with _on(self._in):
            if slot.stored is not None:
                self._in.wait_event(slot.stored)
            for name, tensor in slot.tensors.items():
                tensor[:len(bucket)].copy_(self._of(bucket, name), non_blocking=True)
            slot.loaded = _event(self._in)

    def update(self, buckets: Sequence[Bucket], update: Update) -> Iterator[Bucket]:
        for bucket in buckets:
            self._update_one(bucket, update)
            yield bucket

    def _update_one(self, bucket: Bucket, update: Update) -> None:
        slot = next((slot for slot in self._slots if slot.bucket == bucket.number), None)
        assert slot is not None, f"bucket {bucket.number} is updated out of the order that prefetch was told"
        if slot.loaded is not None:
            torch.cuda.current_stream(self._weights.device).wait_event(slot.loaded)
        here = {name: tensor[:len(bucket)] for name, tensor in slot.tensors.items()}
        self._finish_bucket(bucket, update, here)
        if self._out is not None:
            self._out.wait_event(_event(torch.cuda.current_stream(self._weights.device)))
        with _on(self._out):
            for name, tensor in here.items():
                self._of(bucket, name).copy_(tensor, non_blocking=True)
            slot.stored = _event(self._out)
        slot.bucket = None
        self._load_next(slot)

    def synchronize(self) -> None:
        if self._out is not None:
            self._out.synchronize()


@dataclass(eq=False)
class _Staging:
    """Pinned host memory through which one bucket's gradients and new parameters pass."""

    gradients: Tensor
    weights: Tensor
    arrived: torch.cuda.Event | None = None
    left: torch.cuda.Event | None = None


class OnHost(_Flat):
    """States and master copies in host memory, updated by the host's cores."""

    def __init__(self, rule: Rule, weights: Tensor, gradients: GradientsOf, buckets: Sequence[Bucket],
                 in_flight: int, *, gradient_dtype: torch.dtype) -> None:
        super().__init__(rule, weights, gradients, buckets, ("master", *rule.states), on_host=True)
        pinned = weights.is_cuda

        def host(dtype: torch.dtype) -> Tensor:
            return torch.empty(self._largest, dtype=dtype, device="cpu", pin_memory=pinned)

        self._stagings = [_Staging(host(gradient_dtype), host(weights.dtype))
                          for _ in range(max(1, min(in_flight, len(buckets))))]
        self._scaled = host(self._dtype) if gradient_dtype is not self._dtype else None
        self.staging = [tensor for one in self._stagings for tensor in (one.gradients, one.weights)]
        self.staging += [] if self._scaled is None else [self._scaled]
        self._out = torch.cuda.Stream(weights.device) if weights.is_cuda else None

    def update(self, buckets: Sequence[Bucket], update: Update) -> Iterator[Bucket]:
        """The gradients of the next buckets go out while the host updates this one."""
        depth = len(self._stagings)
        for place, bucket in enumerate(buckets):
            for ahead in buckets[place + depth - 1 if place else 0:place + depth]:
                self._send_gradients(ahead)
            self._update_one(bucket, update)
            yield bucket

    def _send_gradients(self, bucket: Bucket) -> None:
        staging = self._stagings[bucket.number % len(self._stagings)]
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._weights.device))
        with _on(self._out):
            staging.gradients[:len(bucket)].copy_(self._gradients(bucket), non_blocking=True)
            staging.arrived = _event(self._out)

    def _update_one(self, bucket: Bucket, update: Update) -> None:
        staging = self._stagings[bucket.number % len(self._stagings)]
        for event in (staging.arrived, staging.left):
            if event is not None:
                event.synchronize()  # the host computes next, so it is the host that waits
        gradients = staging.gradients[:len(bucket)]
        if self._scaled is not None:
            gradients = self._scaled[:len(bucket)].copy_(gradients)
        if update.factor != 1.0:
            gradients.mul_(update.factor)
        master = self._of(bucket, "master")
        moments = {name: self._of(bucket, name) for name in self._names if name != "master"}
        _apply(self._rule, bucket, update, master, gradients, moments)
        new = staging.weights[:len(bucket)].copy_(master)
        _copy_updated(self._weights[bucket.start:bucket.stop], new, bucket, update, non_blocking=True)
        if self._out is not None:
            staging.left = _event(torch.cuda.current_stream(self._weights.device))

    def synchronize(self) -> None:
        for staging in self._stagings:
            if staging.left is not None:
                staging.left.synchronize()


def _on(stream: torch.cuda.Stream | None):
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event
