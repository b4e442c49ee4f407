"""Placement of optimizer states while parameters are updated bucket by bucket.

    Resident   states on the device: bucket after bucket, nothing is copied
    Streamed   states in host memory; up to d buckets of them on the device at a time:

                   copy in     | 0 | 1 | 2 | 3 |
                   update          | 0 | 1 | 2 | 3 |          three streams on CUDA, one after the other on CPU
                   copy out            | 0 | 1 | 2 | 3 |

    OnHost     states and a master copy in host memory, updated there; gradients are copied out, new parameters in
    Hybrid     states of some buckets are Resident, those of the others Streamed

(AxoNN, section V-B, has the second with one bucket in flight.) All give the same numbers: for each bucket the same
rule sees the same values. If the device is a CPU, the copies are real copies, so that memory and order are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal, cast

import torch
from torch import Tensor

from ranvier.optim.buckets import Bucket, Segment, StatePlaces, join_buckets, within
from ranvier.optim.chunks import GradientSpec
from ranvier.optim.masters import take_written_elements
from ranvier.optim.rules import EMA, Rules, SkippingRule, skips_by_itself, update_average
from ranvier.optim.tensor_update import TensorUpdate
from ranvier.precision import is_half, wide
from ranvier.system.pinned_memory import pinned_zeros


@dataclass(kw_only=True)
class Update:
    """Values that all buckets of one step share."""

    step: int
    learning_rate: float
    factor: float | Tensor
    """Factor of every gradient; a zero-dimensional tensor if only the device knows it."""
    skip: Tensor | None = None
    """If only the device knows whether there is an update: fp32, zero-dimensional, 1 for none."""
    segments: Sequence[Segment]


GradientsOf = Callable[[Bucket], Tensor]
_FOLLOWED, _FOLLOWED_ON_CPU = 1 << 22, 1 << 14
"""Number of elements of master copies that are compared with their parameters at a time, in unpredicted memory."""


def _undo_if_skipped(skip: Tensor | None, written: Sequence[Tensor], call: Callable[..., None], *args: object,
                     **named: object) -> None:
    """Run `call`, and restore `written` if `skip` is 1: for rules that cannot skip. The same operations run either way,
    so there is no synchronization, and a step that is not skipped is bit-identical."""
    if skip is None:
        call(*args, **named)
        return
    before = [tensor.clone() for tensor in written]
    call(*args, **named)
    for tensor, old in zip(written, before, strict=True):
        torch.where(skip > 0, old, tensor, out=tensor)


class _Flat:
    """Flat parameters and gradients of a rank, and its states in one place.

    weights: [all elements], on the device. gradients: returns those of a bucket, also on the device. places: of all
    states except copies of parameters. ema: decay of the moving average; 0 for none. master: whether even parameters
    that are not in half precision have master copies.
    """

    def __init__(self, rules: Rules, weights: Tensor, gradients: GradientsOf, buckets: Sequence[Bucket],
                 places: StatePlaces, *, ema: float = 0.0, master: bool = False, on_host: bool = False) -> None:
        self._rules, self._weights, self._gradients, self._places = rules, weights, gradients, places
        self._home: Literal["device", "host"] = "host" if on_host else "device"
        self._ema, self._copies = ema, ("master",) * (master or is_half(weights.dtype)) + (EMA,) * bool(ema)
        self._names, self._dtype = self._copies + tuple(places.sizes), wide(weights.dtype)
        self._largest = max((bucket.stop - bucket.start for bucket in buckets), default=0)
        self._pieces = join_buckets(buckets)
        size = sum(len(piece) for piece in self._pieces)
        device = _host_of(weights) if on_host else weights.device
        sizes = dict.fromkeys(self._copies, size) | places.sizes
        self.states = {name: pinned_zeros(sizes[name], self._dtype) if on_host and weights.is_cuda
                       else torch.zeros(sizes[name], dtype=self._dtype, device=device) for name in self._names}
        """Name -> [elements with this state], by `StatePlaces`; copies of parameters: [elements of all buckets]."""
        self.workspace: dict[str, Tensor] = {}
        """Device memory in addition to parameters, gradients and resident states."""
        self.staging: Sequence[Tensor] = ()
        """Host memory in addition to the states."""
        for name in self._copies:  # before the first update an average is the parameters
            for piece in self._pieces:
                self._bucket_state(piece, name).copy_(weights[piece.start:piece.stop])

    def states_of(self, bucket: Bucket, start: int, stop: int) -> dict[str, Tensor]:
        """Name -> the states of elements [start, stop), which are in `bucket`; "master" if parameters have master
        copies, and "ema" if they are averaged. Views of the live states."""
        at = bucket.state + start - bucket.start
        return {name: self.states[name][at:at + stop - start] for name in self._copies} | {
            name: self.states[name][self._places.slice_of(name, start, stop)] for name in self._places.sizes}

    def homes(self) -> Sequence[tuple[Literal["device", "host"], Mapping[str, Tensor]]]:
        """Places of the states: (place, name -> all states there)."""
        return [(self._home, self.states)]

    def take_parameters(self, start: int, stop: int) -> bool:
        """Update master copies of elements [start, stop) from written parameters; returns whether any were written."""
        found = False
        for piece in self._pieces if "master" in self.states else ():
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                at = piece.state + first - piece.start
                copies = self.states["master"][at:at + last - first]
                values = self._weights[first:last]
                size = _FOLLOWED if values.is_cuda else _FOLLOWED_ON_CPU
                found |= any([*map(take_written_elements, copies.split(size), values.split(size))])
        return found

    def _bucket_state(self, bucket: Bucket, name: str) -> Tensor:
        return self.states[name][self._part(bucket, name)]

    def _part(self, bucket: Bucket, name: str) -> slice:
        """The part of a state that belongs to a bucket."""
        if name in self._copies:
            return slice(bucket.state, bucket.state + len(bucket))
        return self._places.slice_of(name, bucket.start, bucket.stop)

    def _apply(self, bucket: Bucket, update: Update, parameters: Tensor, gradients: Tensor,
               states: Mapping[str, Tensor]) -> None:
        """Apply the rules to each segment of a bucket. All tensors hold the bucket's elements, from 0. states: those of
        the bucket, by name."""
        rules = self._rules
        firsts = {name: self._part(bucket, name).start for name in self._places.sizes}
        tensors: dict[str, TensorUpdate] = {}
        for segment in within(update.segments, bucket.start, bucket.stop):
            here = slice(segment.start - bucket.start, segment.stop - bucket.start)
            found = {}
            for name, first in firsts.items():
                place = self._places.slice_of(name, segment.start, segment.stop)
                found[name] = states[name][place.start - first:place.stop - first]
            rate = update.learning_rate * segment.learning_rate_factor
            if segment.tensor is None:
                rule, own = rules.elementwise, {name: found[name] for name in rules.elementwise.states}
                run = partial(_undo_if_skipped, update.skip, (parameters[here], *own.values()), rule.update)
                if update.skip is not None and isinstance(rule, SkippingRule):
                    run = partial(rule.update_unless, update.skip)
                run(parameters[here], gradients[here], own, step=update.step - segment.missed_updates,
                    learning_rate=rate, weight_decay=segment.weight_decay)
                continue
            spec = cast(GradientSpec, segment.tensor)
            shape = spec.parameter.shape
            shapes = rules.state_shapes(spec.rule_name, spec.whole_shape, in_layer=spec.in_layer)
            tensors[spec.name] = TensorUpdate(
                shape=spec.whole_shape, parameter=parameters[here].view(shape), gradient=gradients[here].view(shape),
                states={name: found[name].view(own or shape) for name, own in shapes.items()},
                step=update.step - segment.missed_updates, learning_rate=rate, weight_decay=segment.weight_decay,
                split=spec.split)
        if tensors and rules.tensors is not None:
            written = [one for tensor in tensors.values() for one in (tensor.parameter, *tensor.states.values())]
            _undo_if_skipped(update.skip, written, rules.tensors.update_tensors, tensors)

    def share_workspace(self, other: _Flat) -> None:
        """Let both widen gradients in the same memory, one after the other on the device's main stream."""
        self.workspace = other.workspace
        self._largest = other._largest = max(self._largest, other._largest)

    def _scaled_gradients(self, bucket: Bucket, factor: float | Tensor) -> Tensor:
        """The bucket's gradients times `factor` in the states' dtype: in place if they already have it."""
        gradients = self._gradients(bucket)
        if gradients.dtype is not self._dtype:
            if "gradients" not in self.workspace:
                self.workspace["gradients"] = gradients.new_empty(self._largest, dtype=self._dtype)
            gradients = self.workspace["gradients"][:len(bucket)].copy_(gradients)
        return gradients.mul_(factor) if isinstance(factor, Tensor) or factor != 1.0 else gradients

    def _finish_bucket(self, bucket: Bucket, update: Update, states: dict[str, Tensor]) -> None:
        """Compute the update on the device, from states that are there."""
        weights = self._weights[bucket.start:bucket.stop]
        gradients = self._scaled_gradients(bucket, update.factor)
        self._apply(bucket, update, states.get("master", weights), gradients, states)
        if EMA in states:
            _undo_if_skipped(update.skip, [states[EMA]], update_average, states[EMA], states.get("master", weights),
                             step=update.step, decay=self._ema)
        if "master" in states:
            _copy_updated(weights, states["master"], bucket, update)

    def prefetch(self, buckets: Sequence[Bucket]) -> None:
        """Announce that these buckets are updated next, in this order; replaces an earlier call. Nothing to do here:
        states are where they are updated."""

    def synchronize(self) -> None:
        """Return when states may be read and written by the host. Nothing to do here: states are in host memory, or on
        the device in order with updates."""


def _copy_updated(weights: Tensor, master: Tensor, bucket: Bucket, update: Update, *, non_blocking: bool = False
                  ) -> None:
    """Copy master copies to new parameters. Frozen ones stay unchanged: they may have been set after freezing."""
    for segment in within(update.segments, bucket.start, bucket.stop):
        span = slice(segment.start - bucket.start, segment.stop - bucket.start)
        weights[span].copy_(master[span], non_blocking=non_blocking)


class Resident(_Flat):
    """States on the device."""

    def update(self, buckets: Sequence[Bucket], update: Update) -> Iterator[Bucket]:
        """Update `buckets`, whose gradients are reduced, one for each iteration of the caller's loop. On the device's
        main stream their parameters are new from then on."""
        # In one piece where possible: fewer launches, and a CPU gains nothing from buckets that fit its cache.
        # Gradients that must be widened first, and backups for a step that may be skipped, have memory for one bucket
        # only.
        copies = update.skip is not None and (bool(self._ema) or not skips_by_itself(self._rules))
        whole = bool(buckets) and not copies and self._gradients(buckets[0]).dtype is self._dtype
        for bucket in join_buckets(buckets) if whole else buckets:
            self._finish_bucket(bucket, update, {name: self._bucket_state(bucket, name) for name in self._names})
            yield bucket


@dataclass(eq=False)
class _Slot:
    """Device memory for one bucket's states, and the event after which it may be reused."""

    tensors: dict[str, Tensor]
    bucket: int | None = None
    loaded: torch.cuda.Event | None = None
    stored: torch.cuda.Event | None = None


class Streamed(_Flat):
    """States in host memory, with `in_flight` buckets of them on the device at a time."""

    def __init__(self, rules: Rules, weights: Tensor, gradients: GradientsOf, buckets: Sequence[Bucket],
                 places: StatePlaces, in_flight: int, *, ema: float = 0.0) -> None:
        super().__init__(rules, weights, gradients, buckets, places, ema=ema, on_host=True)
        in_flight = max(1, min(in_flight, len(buckets)))
        largest = dict.fromkeys(self._copies, self._largest) | places.largest(buckets)
        room = {name: torch.empty(in_flight * largest[name], dtype=self._dtype, device=weights.device)
                for name in self._names}
        self.workspace.update({f"bucket {name}": tensor for name, tensor in room.items()})
        self._slots = [_Slot({name: tensor[place * largest[name]:(place + 1) * largest[name]]
                              for name, tensor in room.items()}) for place in range(in_flight)]
        self._in, self._out = _stream(weights), _stream(weights)
        for stream in (self._in, self._out):
            if stream is not None:
                for tensor in room.values():  # a copy may still be in flight when this object is dropped
                    tensor.record_stream(stream)
        self._queue: list[Bucket] = []

    def prefetch(self, buckets: Sequence[Bucket]) -> None:
        """Copy in as many as there are slots for; the rest follow as slots become free."""
        if self._in is not None and self._out is not None:
            self._in.wait_stream(self._out)  # the last step's writes are read again
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
        with _stream_context(self._in):
            if slot.stored is not None and self._in is not None:
                self._in.wait_event(slot.stored)
            for name, tensor in slot.tensors.items():
                state = self._bucket_state(bucket, name)
                tensor[:len(state)].copy_(state, non_blocking=True)
            slot.loaded = _event(self._in)

    def update(self, buckets: Sequence[Bucket], update: Update) -> Iterator[Bucket]:
        """See `Resident`."""
        for bucket in buckets:
            self._update_one(bucket, update)
            yield bucket

    def _update_one(self, bucket: Bucket, update: Update) -> None:
        slot = next((slot for slot in self._slots if slot.bucket == bucket.number), None)
        assert slot is not None, f"bucket {bucket.number} is updated out of the order of prefetch"
        if slot.loaded is not None:
            torch.cuda.current_stream(self._weights.device).wait_event(slot.loaded)
        states = {name: tensor[:len(self._bucket_state(bucket, name))] for name, tensor in slot.tensors.items()}
        self._finish_bucket(bucket, update, states)
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self._weights.device))
        with _stream_context(self._out):
            for name, tensor in states.items():
                self._bucket_state(bucket, name).copy_(tensor, non_blocking=True)
            slot.stored = _event(self._out)
        slot.bucket = None
        self._load_next(slot)

    def take_parameters(self, start: int, stop: int) -> bool:
        """See `Resident`."""
        self.synchronize()
        return super().take_parameters(start, stop)

    def synchronize(self) -> None:
        """See `Resident`."""
        for stream in (self._in, self._out):
            if stream is not None:
                stream.synchronize()


class Hybrid:
    """States of the buckets `on_device` are resident, those of the buckets `on_host` streamed. Each list has its own
    places, and states numbered from 0 (`split_by_share`)."""

    def __init__(self, rules: Rules, weights: Tensor, gradients: GradientsOf, *, on_device: Sequence[Bucket],
                 on_host: Sequence[Bucket], places: Callable[[Sequence[Bucket]], StatePlaces], in_flight: int,
                 ema: float = 0.0) -> None:
        self._resident = Resident(rules, weights, gradients, on_device, places(on_device), ema=ema)
        self._streamed = Streamed(rules, weights, gradients, on_host, places(on_host), in_flight, ema=ema)
        self._resident.share_workspace(self._streamed)
        self._on_host = {bucket.number for bucket in on_host}
        self.workspace = self._streamed.workspace
        self.staging: Sequence[Tensor] = ()

    def _part(self, bucket: Bucket) -> Resident | Streamed:
        return self._streamed if bucket.number in self._on_host else self._resident

    def states_of(self, bucket: Bucket, start: int, stop: int) -> dict[str, Tensor]:
        """See `Resident`."""
        return self._part(bucket).states_of(bucket, start, stop)

    def homes(self) -> Sequence[tuple[Literal["device", "host"], Mapping[str, Tensor]]]:
        """See `Resident`."""
        return [*self._resident.homes(), *self._streamed.homes()]

    def take_parameters(self, start: int, stop: int) -> bool:
        """See `Resident`."""
        return any([each.take_parameters(start, stop) for each in (self._resident, self._streamed)])

    def prefetch(self, buckets: Sequence[Bucket]) -> None:
        """See `Resident`."""
        self._streamed.prefetch([bucket for bucket in buckets if bucket.number in self._on_host])

    def update(self, buckets: Sequence[Bucket], update: Update) -> Iterator[Bucket]:
        """See `Resident`."""
        for part, together in groupby(buckets, self._part):
            yield from part.update(list(together), update)

    def synchronize(self) -> None:
        """See `Resident`."""
        self._streamed.synchronize()


@dataclass(eq=False)
class _Staging:
    """Pinned host memory through which one bucket's gradients and new parameters pass."""

    gradients: Tensor
    weights: Tensor
    arrived: torch.cuda.Event | None = None
    """Event of the gradients' arrival. Their copy has waited for the device's main stream, so the parameters that were
    in this memory before have been copied out, too."""


class OnHost(_Flat):
    """States and master copies in host memory, updated by the host's cores."""

    def __init__(self, rules: Rules, weights: Tensor, gradients: GradientsOf, buckets: Sequence[Bucket],
                 places: StatePlaces, in_flight: int, *, gradient_dtype: torch.dtype, ema: float = 0.0) -> None:
        super().__init__(rules, weights, gradients, buckets, places, ema=ema, master=True, on_host=True)
        pinned = weights.is_cuda

        def host(dtype: torch.dtype) -> Tensor:
            return torch.empty(self._largest, dtype=dtype, device=_host_of(weights), pin_memory=pinned)

        self._stagings = [_Staging(host(gradient_dtype), host(weights.dtype))
                          for _ in range(max(1, min(in_flight, len(buckets))))]
        self._scaled = host(self._dtype) if gradient_dtype is not self._dtype else None
        self.staging = [tensor for staging in self._stagings for tensor in (staging.gradients, staging.weights)]
        self.staging += [] if self._scaled is None else [self._scaled]
        self._out = _stream(weights)

    def update(self, buckets: Sequence[Bucket], update: Update) -> Iterator[Bucket]:
        """Copy out the gradients of the next buckets while the host updates this one."""
        depth = len(self._stagings)
        for place, bucket in enumerate(buckets):
            for ahead in buckets[place + depth - 1 if place else 0:place + depth]:
                staging = self._stagings[ahead.number % len(self._stagings)]
                if self._out is not None:
                    self._out.wait_stream(torch.cuda.current_stream(self._weights.device))
                with _stream_context(self._out):
                    staging.gradients[:len(ahead)].copy_(self._gradients(ahead), non_blocking=True)
                    staging.arrived = _event(self._out)
            self._update_one(bucket, update)
            yield bucket

    def _update_one(self, bucket: Bucket, update: Update) -> None:
        staging = self._stagings[bucket.number % len(self._stagings)]
        if staging.arrived is not None:
            staging.arrived.synchronize()  # the host computes next, so it is the host that waits
        gradients = staging.gradients[:len(bucket)]
        if self._scaled is not None:
            gradients = self._scaled[:len(bucket)].copy_(gradients)
        if (factor := float(update.factor)) != 1.0:
            gradients.mul_(factor)
        master = self._bucket_state(bucket, "master")
        self._apply(bucket, update, master, gradients, {name: self._bucket_state(bucket, name) for name in self._names})
        if self._ema:
            update_average(self._bucket_state(bucket, EMA), master, step=update.step, decay=self._ema)
        new = staging.weights[:len(bucket)].copy_(master)
        _copy_updated(self._weights[bucket.start:bucket.stop], new, bucket, update, non_blocking=True)


Placement = Resident | Streamed | OnHost | Hybrid
"""Holds the states of one rank's buckets."""


def _host_of(weights: Tensor) -> torch.device:
    """Device of offloaded states: host memory, or meta if the weights have no data."""
    return weights.device if weights.is_meta else torch.device("cpu")


def _stream(weights: Tensor) -> torch.cuda.Stream | None:
    """A new stream on the device of `weights`; None on a CPU, where copies need none."""
    return torch.cuda.Stream(weights.device) if weights.is_cuda else None


def _stream_context(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event
