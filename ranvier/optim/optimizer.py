"""The optimizer of a rank: flat parameters and flat gradients, updated bucket by bucket as chunks are reduced.

    optimizer = FlatOptimizer(optim, gradients, offload="stream", bucket_size=4_194_304)
    optimizer.prefetch()                       # states of the first buckets are copied in
    optimizer.begin(learning_rate)
    for chunk in gradients.reduced():          # while later chunks are still being reduced
        for _ in optimizer.update(chunk, factor): ...
    optimizer.finish()                         # with `shard`: the parameters that others update have arrived

Parameters become views of one flat buffer, laid out as their gradients are, so that a bucket is one piece of memory
whatever shapes it holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ranvier.comm.protocol import Work
from ranvier.config.parameter_groups import group_of
from ranvier.config.resolve import auto_offload, auto_offload_share
from ranvier.config.run import Optim
from ranvier.optim.buckets import Bucket, Segment, StateOwner, StatePlaces, buckets_of, join_buckets, split_by_share
from ranvier.optim.chunks import Chunk, GradientSpec
from ranvier.optim.gradients import Gradients
from ranvier.optim.masters import Watch
from ranvier.optim.placement import Hybrid, OnHost, Placement, Resident, Streamed, Update
from ranvier.optim.reduction import MAX_COLLECTIVES
from ranvier.optim.rules import EMA, Rules, check_state_name, rules_of
from ranvier.originals.same_memory import (
    ViewsOfParameters,
    mark_as_engines,
    refuse_parameters_over_one_memory,
    storage_of,
)
from ranvier.system.memory_tracker import free_bytes
from ranvier.tensor.quantized_weight import stored_tensors

Offload = Literal["none", "stream", "host", "hybrid"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StateSlice:
    """The states of elements [start, stop) of a flattened parameter: name -> [stop - start], views of the live states.

    whole: states of the whole parameter with their own shape, which `TensorRule`s have.
    """

    parameter: str
    start: int
    stop: int
    states: Mapping[str, Tensor]
    whole: Mapping[str, Tensor] = field(default_factory=dict)


class FlatOptimizer:
    """The update rules of `optim.algorithm` over the parameters that a rank owns.

    Args:
        optim: the settings; with offload hybrid, `offload_share` is a number.
        offload: where states are stored; `optim.offload` resolved (not auto).
        gradients: their buffer, which need not be allocated yet. Parameters are moved into a flat one in its order.
            With `optim.shard` each member of a chunk's group updates its share.
        bucket_size: parameters that are updated in one piece.
    """

    def __init__(self, optim: Optim, gradients: Gradients, *, offload: Offload, bucket_size: int) -> None:
        self._optim, self._gradients = optim, gradients
        views = ViewsOfParameters(gradients.places)
        self.weights = _flatten(gradients)
        """[gradients.size]: all trainable parameters of this rank, in the same places."""
        self._watch = Watch(self.weights.device.type)
        views.follow()
        self.views = views
        """Tensors that shared memory with parameters before; some do not share the new memory."""
        self._chunks = [chunk for chunk in gradients.chunks if not chunk.sent_to_owner]
        self.offload, self.offload_share = offload, optim.offload_share
        self.sharded = optim.shard and any(len(chunk.group.ranks) > 1 for chunk in self._chunks)
        self.scatters = self.sharded and all(chunk.shares is None for chunk in self._chunks)
        """Whether each member of a group needs only the sums of its share. If whole tensors have owners, shares are not
        equal, and all members get all sums."""
        shares = [chunk.share if self.sharded else (chunk.start, chunk.stop) for chunk in self._chunks]
        self._rules = rules_of(optim, self.weights.dtype)
        buckets = buckets_of(shares, bucket_size, uncut_places(gradients))
        self._homes: tuple[list[Bucket], list[Bucket]] = [], []
        if offload == "hybrid":
            assert optim.offload_share != "auto", "the share of the states in host memory is resolved by now"
            self._homes = split_by_share([bucket for group in buckets for bucket in group], optim.offload_share)
            placed = {bucket.number: bucket for home in self._homes for bucket in home}
            buckets = [[placed[bucket.number] for bucket in group] for group in buckets]
        self.buckets = [bucket for group in buckets for bucket in group]
        """All buckets of this rank, in the order in which they are updated."""
        self._buckets = dict(zip(map(id, self._chunks), buckets, strict=True))
        self._chunk_of = {bucket.number: chunk for chunk in self._chunks for bucket in self._buckets[id(chunk)]}
        self._missed: dict[str, int] = {}
        self._missed_now: set[str] = set()
        # All parameters that are updated here, in their order in the buffer.
        self._groups = sorted(((spec, self._segment(spec)) for spec in self._gradients.owned_specs()),
                      key=lambda item: (item[1].start, item[1].stop))
        self._here = {spec.name for chunk, share in zip(self._chunks, shares, strict=True) for spec in chunk.specs
                      if _overlap(gradients.places[spec.parameter], share)}
        """The parameters with elements that this rank updates: with sharded states not all that it holds."""
        places = state_places(gradients, self._rules, self.buckets)
        for name in places.sizes:
            check_state_name(name, optim.algorithm)
        self.placement = self._place(places)
        self._note_versions()
        self._steps = 0
        self._undecided: Callable[[], bool] | None = None
        self._update = Update(step=0, learning_rate=0.0, factor=1.0, segments=())
        self._trained: list[Segment] = []
        self._gathers: deque[Work] = deque()
        self._gathered = 0
        self._sent: dict[int, Tensor] = {}

    def _place(self, places: StatePlaces) -> Placement:
        in_flight, ema = self._optim.buckets_in_flight, self._optim.ema
        gradients, chunk_of = self._gradients, self._chunk_of  # not this object, which holds the placement

        def of_bucket(bucket: Bucket) -> Tensor:
            return gradients.flat_slice(chunk_of[bucket.number], bucket.start, bucket.stop)

        if self.offload == "hybrid":
            return Hybrid(self._rules, self.weights, of_bucket, on_device=self._homes[0], on_host=self._homes[1],
                          places=lambda buckets: state_places(self._gradients, self._rules, buckets),
                          in_flight=in_flight, ema=ema)
        given = self._rules, self.weights, of_bucket, self.buckets, places
        match self.offload:
            case "none":
                return Resident(*given, ema=ema)
            case "stream":
                return Streamed(*given, in_flight, ema=ema)
            case "host":
                return OnHost(*given, in_flight, gradient_dtype=self._gradients.dtype, ema=ema)

    @property
    def steps(self) -> int:
        """Updates so far; skipped steps do not count. Waits for the device if it decides about the last step."""
        undecided, self._undecided = self._undecided, None
        if undecided is not None and not undecided():
            self._steps -= 1
            for name in self._missed_now:
                self._missed[name] -= 1
            self._missed_now = set()
        return self._steps

    @property
    def missed_updates(self) -> dict[str, int]:
        """Parameter with elements that are updated here -> number of updates that skipped it, if not 0, because it was
        frozen or no loss reached it. Waits as `steps` does."""
        assert self.steps >= 0
        return {name: count for name, count in self._missed.items() if count and name in self._here}

    @property
    def largest_piece(self) -> int:
        """Largest number of elements that a rule updates in one call: those of a bucket, or of an entire chunk."""
        return max((len(piece) for buckets in self._buckets.values() for piece in join_buckets(buckets)), default=0)

    @property
    def on_device(self) -> bool:
        """Whether updates run on a CUDA device: a step's numbers may stay there, and can skip a step without a
        synchronization."""
        return self.weights.is_cuda and self.offload != "host"

    # ------------------------------------------------------------------ one step

    def prefetch(self) -> None:
        """Start copying in the states of the first buckets: the next updates are those of a full step."""
        self.follow_parameters(by_value=self._watch.should_compare())
        self.placement.prefetch(self.buckets)

    def follow_parameters(self, *, by_value: bool) -> None:
        """Make parameters that were written since the last step (in place, as load_state_dict does, or with new memory,
        as `parameter.data = ...` does) views of the flat buffer again, and update their master copies. by_value: also
        those whose versions have not changed."""
        base, size = self.weights.data_ptr(), self.weights.element_size()
        replaced = {parameter for parameter, (start, stop) in self._gradients.places.items()
                    if start < stop and (parameter.data_ptr() != base + start * size or not parameter.is_contiguous())}
        if replaced:
            refuse_parameters_over_one_memory({spec.name: spec.parameter for chunk in self._chunks
                                               for spec in chunk.specs})
        views = ViewsOfParameters(replaced)
        _move_into(self.weights, {parameter: self._gradients.places[parameter] for parameter in replaced})
        if not views.left:  # otherwise they are views of one tensor that the program writes into
            views.follow()
        for spec, segment in self._groups:
            parameter = spec.parameter
            if by_value or parameter in replaced or parameter._version != self._versions[parameter]:
                self._versions[parameter] = parameter._version
                self._watch.note_comparison(self.placement.take_parameters(segment.start, segment.stop) and by_value)

    def _note_versions(self) -> None:
        """Note that parameters agree with their master copies."""
        self._versions = {spec.parameter: spec.parameter._version for spec, _ in self._groups}

    def begin(self, learning_rate: float, *, skip: Tensor | None = None,
              undecided: Callable[[], bool] | None = None) -> None:
        """Begin a step that is not skipped; after `prefetch`. skip, undecided: used if only the device knows whether it
        is skipped (`on_device`): `skip` as in `Update.skip`; `undecided`, called later, whether the step was taken."""
        self._steps = self.steps + 1
        self._undecided, self._missed_now = undecided, set()
        self._trained = self._segments(set())
        self._update = Update(step=self._steps, learning_rate=learning_rate, factor=1.0, segments=self._trained,
                              skip=skip)

    def update(self, chunk: Chunk, factor: float | Tensor) -> Iterator[Bucket]:
        """Update the parameters of a reduced chunk from its gradients times `factor`, yielding after each bucket."""
        not_updated = self._gradients.not_updated(chunk)
        self._update.factor = factor
        self._update.segments = self._segments(not_updated) if not_updated else self._trained
        # A parameter may be in several chunks, but misses an update only once.
        for spec in chunk.specs:
            if spec.parameter in not_updated and spec.name in self._here and spec.name not in self._missed_now:
                self._missed_now.add(spec.name)
                self._missed[spec.name] = self._missed.get(spec.name, 0) + 1
        yield from self.placement.update(self._buckets[id(chunk)], self._update)
        self._gather(chunk)

    def _gather(self, chunk: Chunk) -> None:
        """Start gathering the parameters of a chunk from the ranks that update them. They are sent from memory that a
        few chunks use in turn; owners of whole tensors broadcast them in place."""
        if not self.sharded or len(chunk.group.ranks) == 1:
            return
        if chunk.shares is not None:
            for member, (start, stop) in enumerate(chunk.shares):
                if start < stop:
                    self._gathers.append(chunk.group.broadcast(self.weights[start:stop], member))
            return
        while len(self._gathers) >= MAX_COLLECTIVES:
            self._gathers.popleft().wait()
        turn, self._gathered = self._gathered % MAX_COLLECTIVES, self._gathered + 1
        if turn not in self._sent:
            self._sent[turn] = self.weights.new_empty(_largest_share(self._chunks))
        start, stop = chunk.share
        sent = self._sent[turn][:stop - start].copy_(self.weights[start:stop])
        self._gathers.append(chunk.group.all_gather(self.weights[chunk.start:chunk.stop], sent))

    def progress(self) -> None:
        """Let gathers of parameters that others update progress."""
        while self._gathers and self._gathers[0].done():
            self._gathers.popleft()

    def finish(self) -> None:
        """Wait for the parameters that others have updated."""
        while self._gathers:
            self._gathers.popleft().wait()
        self._gathered = 0

    def take_averages(self) -> Tensor:
        """Set parameters to their moving averages, on all ranks that hold them; returns the old values. Collective."""
        self.finish()
        self.placement.synchronize()
        self.follow_parameters(by_value=self._watch.is_on)
        before = self.weights.clone()
        if self.steps:
            for bucket in self.buckets:
                average = self.placement.states_of(bucket, bucket.start, bucket.stop)[EMA]
                self.weights[bucket.start:bucket.stop].copy_(average)
            for chunk in self._chunks:
                self._gather(chunk)
            self.finish()
        return before

    @property
    def gather_buffers(self) -> list[Tensor]:
        """Buffers from which this rank's shares of parameters are sent."""
        return list(self._sent.values())

    # ------------------------------------------------------------------ state for checkpoints

    def slices(self) -> Iterator[StateSlice]:
        """The states that this rank keeps, by parameter; including "master" if parameters have master copies.

        They may be read and written between steps; after writing, call `restore_counters`.
        """
        self.placement.synchronize()
        self.follow_parameters(by_value=self._watch.is_on)
        for chunk in self._chunks:
            for spec in chunk.specs:
                first, last = self._gradients.places[spec.parameter]
                for bucket in self._buckets[id(chunk)]:
                    start, stop = max(first, bucket.start), min(last, bucket.stop)
                    if start < stop:
                        yield self._slice(spec, bucket, start, stop, first)

    def _slice(self, spec: GradientSpec, bucket: Bucket, start: int, stop: int, first: int) -> StateSlice:
        """The states of elements [start, stop) of the buffer, which are in `bucket`; `spec` begins at `first`."""
        states = self.placement.states_of(bucket, start, stop)
        shapes = self._rules.state_shapes(spec.rule_name, spec.whole_shape, in_layer=spec.in_layer)
        found = {name: states[name] for name in ("master", EMA) if name in states}
        found |= {name: states[name] for name, shape in shapes.items() if shape is None}
        return StateSlice(parameter=spec.name, start=start - first, stop=stop - first, states=found, whole={
            name: states[name].view(shape) for name, shape in shapes.items() if shape is not None})

    def restore_counters(self, steps: int, missed_updates: Mapping[str, int]) -> None:
        """Restore counters after parameters and `slices` have been written as they were after `steps` updates."""
        self._steps, self._undecided = steps, None
        self._missed, self._missed_now = dict(missed_updates), set()
        self._note_versions()

    def _segment(self, spec: GradientSpec) -> Segment:
        """The segment of a parameter: its place, and how it is updated."""
        start, stop = self._gradients.places[spec.parameter]
        group = group_of(self._optim, spec.rule_name, spec.parameter.dim())
        whole = self._rules.needs_whole(spec.rule_name, spec.whole_shape, in_layer=spec.in_layer)
        return Segment(start, stop, group.learning_rate_factor, group.weight_decay, spec if whole else None)

    def _segments(self, not_updated: set[nn.Parameter]) -> list[Segment]:
        """Segments that are updated now: all except those of `Gradients.not_updated`."""
        return [replace(segment, missed_updates=missed) if (missed := self._missed.get(spec.name)) else segment
                for spec, segment in self._groups if spec.parameter not in not_updated]


def _overlap(interval: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(interval[0], other[0]) < min(interval[1], other[1])


def uncut_places(gradients: Gradients) -> list[tuple[int, int]]:
    """Elements of the buffer that buckets must not cut: gradients whose update needs the full tensor, in order."""
    return sorted(gradients.places[spec.parameter] for spec in gradients.owned_specs()
                  if spec.whole and spec.parameter.numel())


def state_places(gradients: Gradients, rules: Rules, buckets: Sequence[Bucket]) -> StatePlaces:
    """Places of the states of these buckets. With one rule for all elements padding has states too, so that states
    begin where buckets do."""
    if rules.tensors is None:
        return StatePlaces(buckets, [StateOwner(0, gradients.size, dict.fromkeys(rules.elementwise.states))])
    owners = [StateOwner(*gradients.places[spec.parameter],
                         rules.state_shapes(spec.rule_name, spec.whole_shape, in_layer=spec.in_layer))
              for spec in gradients.owned_specs()]
    return StatePlaces(buckets, sorted(owners, key=lambda owner: (owner.start, owner.stop)))


def resolve_offload(optim: Optim, gradients: Gradients, device: torch.device) -> tuple[Optim, Offload]:
    """`optim` with the share of hybrid resolved, and its offload with auto replaced according to the size of the states
    (`ranvier.config.resolve`), for an engine without predicted memory. Half of the free memory is left for
    activations."""
    free = free_bytes(device) if device.type == "cuda" else 0
    if optim.offload == "hybrid" and optim.offload_share == "auto":
        states = 12 * gradients.size
        optim = replace(optim, offload_share=auto_offload_share(device.type, states, states, free // 2))
    if optim.offload != "auto":
        return optim, optim.offload
    return optim, auto_offload(device.type, 2 * 12 * gradients.size, free)


def gather_bytes(gradients: Gradients, itemsize: int) -> int:
    """Bytes of the buffers from which shares of parameters are sent, if members of a chunk's group update their own."""
    chunks = [chunk for chunk in gradients.chunks if not chunk.sent_to_owner]
    gathered = sum(len(chunk.group.ranks) > 1 and chunk.shares is None for chunk in chunks)
    return min(MAX_COLLECTIVES, gathered) * _largest_share(chunks) * itemsize


def _largest_share(chunks: Sequence[Chunk]) -> int:
    """Elements of the largest share that is gathered."""
    return max((chunk.share[1] - chunk.share[0] for chunk in chunks
                if len(chunk.group.ranks) > 1 and chunk.shares is None), default=0)


def _flatten(gradients: Gradients) -> Tensor:
    """All trainable parameters as views of one new buffer."""
    first = next(iter(gradients.places), None)
    if first is None:
        return torch.empty(0)
    weights = torch.zeros(gradients.size, dtype=first.dtype, device=first.device)
    mark_as_engines(weights)
    _move_into(weights, gradients.places)
    return weights


def _move_into(weights: Tensor, places: Mapping[nn.Parameter, tuple[int, int]]) -> None:
    """Make parameters views of `weights`, with their values copied. They may have the places of each other."""
    values = {parameter: parameter.detach().clone() for parameter in places
              if storage_of(parameter) == storage_of(weights)}
    for parameter, (start, stop) in places.items():
        place = weights[start:stop].view(parameter.shape)
        place.copy_(values.get(parameter, parameter.detach()))
        parameter.data = place


def tensors_by_category(parameters: Sequence[Tensor], gradients: Gradients,
                        optimizer: FlatOptimizer | None) -> dict[str, dict[str, list[Tensor]]]:
    """Tensors that persist between steps: {"device": {category: tensors}, "host": {...}}.

    Frozen parameters and those outside the flat buffer count as parameters too. If the device is a CPU, offloaded
    states count as the host's.
    """
    device = {"parameters": [*parameters, *([optimizer.weights] if optimizer else [])], "gradients": [gradients.flat]}
    host: dict[str, list[Tensor]] = {}
    if optimizer is not None:
        placement = optimizer.placement
        for place, states in placement.homes():
            home = device if place == "device" else host
            home["master"] = [state for name, state in states.items() if name == "master"]
            home["moments"] = [state for name, state in states.items() if name not in ("master", EMA)]
            if EMA in states:
                home["average"] = [states[EMA]]
        device["buckets"] = list(placement.workspace.values())
        host["staging"] = list(placement.staging)
    device["reduction"] = [*gradients.reductions.buffers, *(optimizer.gather_buffers if optimizer else [])]
    return {"device": device, "host": host}


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of `tensors`, each counted once."""
    storages = [stored.untyped_storage() for tensor in tensors for stored in stored_tensors(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
