"""Cost of one step on a cluster: seconds by phase, and bytes over each link.

    pipeline     stages compute and exchange activations; with row x col > 1 their products exchange operands
    reduction    gradients are averaged between replicas, chunk by chunk
    update       the optimizer: bytes through the device's memory, or over the link to the host's

Work is the kernels of one rank's part of each block: those of its forward as counted, and those that follow for the
backward and for the gradients of trained weights (`ranvier.cost.kernels`); recomputed kernels count once more; leading
frozen blocks have no backward. On devices that compute while they transfer, messages of the tensor mesh count as far as
the products between their start and their end do not hide them; gradients are then also summed over replicas during the
last backward. Work after the pipeline is exposed, except where sums, updates and gathers of chunks overlap. The ends of
a tied parameter on two stages exchange while the pipeline fills and drains, which is left out.

The schedule is AxoNN's (Singh and Bhatele, 2022, sections III and IV), the exchanges of the tensor mesh those of Xu et
al., 2021 (Optimus, section 3), Shoeybi et al., 2019 (Megatron-LM, section 3) and Korthikanti et al., 2022. Pure:
`ranvier.planner.run_cost` makes a `Step` from a run's settings and counted blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from operator import mul
from typing import NamedTuple

from ranvier.config.resolve import ResolvedRun, chunk_size
from ranvier.cost.blocks import BlockCost, ById
from ranvier.cost.collectives import (
    all_reduce_seconds,
    place_groups,
    received_seconds,
    reduced_seconds,
    tree_latency,
    tree_seconds,
)
from ranvier.cost.hardware import Cluster, Device, Precision
from ranvier.cost.kernels import (
    Kernel,
    backward_of,
    map_distinct,
    weight_gradients_of,
    without_fused_loss,
    without_panels,
)
from ranvier.cost.stage_messages import edge_bytes, edge_links, edge_seconds, rank_threads, replica_offsets, sent_bytes
from ranvier.cost.volume import (
    Bytes,
    LayerTransfers,
    SplitLayer,
    Transfer,
    Volume,
    block_volume,
    layer_transfers,
    volume_scheme,
)
from ranvier.schedule.limits import Deferral, Limits
from ranvier.schedule.schedule import Policy
from ranvier.schedule.simulator import DIRECT, PRODUCTS, EdgeTimes, StageTimes, predict_batch_time

_MESSAGES = {"summa": (4, 8), "stationary": (4, 6), "megatron": (2, 2),
             "stationary-sequence": (4, 6), "megatron-sequence": (4, 6)}
"""Number of collectives of one layer along an axis, forward and backward; each is a message to every other member."""
_ALIKE = 0.05
"""Largest relative difference of columns' parts, if columns do not divide a size."""
_NORM_MESSAGES = {"summa": 2, "stationary": 2}
"""Number of messages of a layer's two norms along col in the forward, and again in the backward, if the hidden
dimension is sharded."""


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """The blocks of one stage, as on one of its ranks, and the places of blocks that are recomputed in the backward.
    ends: places of the last blocks of recomputed segments."""

    blocks: tuple[BlockCost, ...]
    recomputed: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ElementBytes:
    """Bytes of one element, in each number format of a run."""

    parameter: int
    """Bytes of an element of a parameter or an activation."""
    state: int
    """Bytes of an element of the optimizer's state: a moment, or a master copy."""
    gradient: int
    """Bytes of an element of a gradient, in the format in which it accumulates."""
    reduced: int
    """Bytes of an element of a gradient, in the format in which it is sent between replicas."""
    summed: int
    """Bytes of an element of a sum that is sent on the tensor mesh."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a run, with values that its settings alone do not determine."""

    run: ResolvedRun
    stages: tuple[StageWork, ...]
    policy: Policy
    limits: Limits
    """The in-flight limit, and the bounds on deferred weight gradients."""
    bytes: ElementBytes
    num_states: float
    """Average number of state values per parameter that an update reads and writes: moments, and the master copy."""
    tokens: int
    """Number of positions of one sample."""
    whole_tensors: bool = False
    """Whether updates need whole tensors."""
    update_flops: float = 0.0
    """FLOPs of one update of all parameters, in addition to the cost of every element."""
    flops_per_sample: float
    """FLOPs of forward and backward, without recomputation."""
    recomputed_flops_per_sample: float
    """The same including recomputation, if there is any."""
    split_layers: Mapping[str, tuple[SplitLayer, ...]]
    """Block -> its layers that are split over the tensor mesh."""

    @property
    def waits_for_gradient_status(self) -> bool:
        """Whether updates begin only when the full gradient is reduced, because loss scaling, clipping or a guard
        checks it."""
        clips = self.run.optim.clip_norm and self.run.optim.clip_from == "step"
        return bool(self.run.precision == "fp16" or clips
                    or self.run.guard.bad_step in ("stop", "skip", "rollback"))


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One rank of a stage. Seconds are for one microbatch, except reduction and update, which are for the step."""

    stage: int
    forward_seconds: float
    backward_seconds: float
    """Seconds of the gradients that cannot be deferred, recomputation included."""
    weight_seconds: float
    """Seconds of weight gradients that may be deferred."""
    exchange_seconds: float
    """The part of these three times that messages of the tensor mesh take."""
    reduction_seconds: float
    update_seconds: float
    after_seconds: float
    """Seconds from the last backward to the end of the step: the part of reduction and update that does not overlap."""

    @property
    def microbatch_seconds(self) -> float:
        """Seconds of all three phases of one microbatch."""
        return self.forward_seconds + self.backward_seconds + self.weight_seconds


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one step. Phases are those of the stage that ends last."""

    seconds: float
    pipeline_seconds: float
    bubble_fraction: float
    reduction_seconds: float
    update_seconds: float
    stages: tuple[StageCost, ...]
    link_bytes: Mapping[str, float]
    """Bytes that the busiest rank sends in a step, by axis, and over its link to the host."""
    sequences: int
    tokens: int
    model_flops: float
    """FLOPs of forward and backward, without recomputation."""
    hardware_flops: float
    """The same including recomputation."""
    peak_flops: float
    """Peak FLOP/s of all devices together."""
    edge_seconds: float = 0.0
    """Seconds for which one microbatch's message keeps the slowest edge between two stages busy."""
    partial_seconds: float = 0.0
    """Seconds that the pipeline saves because the last microbatch is smaller."""
    cores_seconds: float = 0.0
    """Lower bound of the pipeline's seconds if ranks share cores: all cores compute all the time."""

    @property
    def tokens_per_second(self) -> float:
        """Positions per second, over all replicas."""
        return self.tokens / self.seconds

    @property
    def model_utilisation(self) -> float:
        """Share of the peak that the model's own FLOPs reach."""
        return self.model_flops / self.seconds / self.peak_flops

    @property
    def hardware_utilisation(self) -> float:
        """The same including recomputation."""
        return self.hardware_flops / self.seconds / self.peak_flops

    def days(self, tokens: float = 3e11) -> float:
        """Days to train on this many tokens."""
        return tokens / self.tokens_per_second / 86400


def step_cost(step: Step, cluster: Cluster, *, exact: bool = True, as_published: bool = False) -> Cost:
    """The cost of a step on a cluster.

    Args:
        exact: simulate the schedule; otherwise use the closed form.
        as_published: as AxoNN, Megatron-LM, DeepSpeed and Optimus were published: products are not cut into panels, a
            weight's gradient is added by a separate kernel, the loss is a cast and a softmax, ranks of a stage that
            hold the same activations each send a part of them, a segment's last product is recomputed, too, and a
            stage does not compute while it sends or receives, on the tensor mesh or between stages. The message-driven
            policy with one stage on each rank is AxoNN, whose messages between stages delay nothing.
    """
    return _StepCost(step, cluster, as_published).cost(exact)


def step_lower_bound(step: Step, cluster: Cluster, *, part: float) -> tuple[float, float]:
    """Lower bounds of a step's time for any cut of its blocks into stages, for the pipeline alone with blocks spread
    evenly: without recomputation, and with it. Below `step_cost` if the blocks' seconds are. step: all blocks on its
    first stage. part: the share of these blocks' work that one rank does for one microbatch."""
    return _StepCost(step, cluster, part=part).lower_bound()


@dataclass(frozen=True, kw_only=True)
class PipelineNumbers:
    """Input of the simulator for a step."""

    times: tuple[StageTimes, ...]
    num_microbatches: int
    edges: EdgeTimes
    """The edges between ranks."""
    in_flight: int
    defer_bytes: int | Sequence[int]
    """Bound on the bytes that deferred products keep alive, for all ranks of a pipeline or for each."""
    at_once: int | None
    """Number of ranks of a pipeline that may compute at the same time, if ranks share cores."""
    defer_last: int | None
    max_stored: int | None
    alternating: bool
    """These three as in `Limits`."""


def step_pipeline(step: Step, cluster: Cluster, *, as_published: bool = False) -> PipelineNumbers:
    """The pipeline of a step on a cluster, for the simulator. as_published: as in `step_cost`."""
    made = _StepCost(step, cluster, as_published)
    times = tuple(made.times([made.stage(stage) for stage in range(len(step.stages))]))
    return PipelineNumbers(times=times, num_microbatches=made.count, edges=made.edge_times(),
                           in_flight=step.limits.in_flight, defer_bytes=made.defer(times),
                           at_once=made.max_running_stages(), defer_last=made.defer_last,
                           max_stored=step.limits.max_stored, alternating=step.limits.alternating)


def deferral_costs(step: Step, cluster: Cluster) -> tuple[Deferral, ...]:
    """The cost of deferring weight gradients, for each stage; empty if it is zero. To two digits: other values need a
    new simulation of limits, and a search has very many similar pipelines."""
    made, found = _StepCost(step, cluster), list[Deferral]()
    for stage in range(len(step.stages)):
        longer, weight = made.waiting(stage), made.weight_seconds(stage)
        found.append(Deferral(*(round(seconds / weight, 2) for seconds in longer)) if weight else Deferral())
    return tuple(found) if any(map(any, found)) else ()


def update_seconds(step: Step, cluster: Cluster, count: float, *, local: int, threads: float = 1.0,
                   crowded: float = 1.0) -> float:
    """Seconds in which one rank updates `count` parameters: transfers through the device's memory, over the link to the
    host (AxoNN, section V-B), or through the host's memory.

    Args:
        local: ranks on a node. threads: cores that a rank computes with. crowded: factor by which a rank takes longer
            if it shares its cores.
    """
    itemsize, states, gradient, optim = step.bytes.state, step.num_states, step.bytes.gradient, step.run.optim
    has_masters = itemsize > step.bytes.parameter
    moved = count * (2 * itemsize * states + gradient + step.bytes.parameter * (1 if has_masters else 2))
    match optim.offload:
        case "stream" | "hybrid":
            share = 1.0 if optim.offload == "stream" else 0.5 if optim.offload_share == "auto" else optim.offload_share
            moving = cluster.host_link.seconds(share * count * itemsize * states)
            parts = [moving, moving, cluster.device.update_seconds(moved)]
            return sum(parts) if optim.buckets_in_flight == 1 else max(parts)  # in, out and update at the same time
        case "host":
            sent = cluster.host_link.seconds(count * max(gradient, step.bytes.parameter))
            return max(sent, moved * local / cluster.host.memory_bandwidth)
        case _:
            return cluster.device.update_seconds(moved) / threads * crowded


_ROW, _COL = "row", "col"
_GROUPED = ("data", _ROW, _COL)


class _Seconds(NamedTuple):
    """Seconds of one microbatch in a block, without messages."""

    forward: float
    backward: float
    """Seconds of the gradients of activations."""
    weight: float
    """Seconds of the gradients of trained weights."""


_NO_SECONDS = _Seconds(0.0, 0.0, 0.0)


@lru_cache(maxsize=1024)  # a search asks this for very many candidates
def _block_seconds(kernels: ById[tuple[Kernel, ...]], device: ById[Device], precision: Precision, threads: float,
                   bytes: ElementBytes, as_published: bool) -> _Seconds:
    """Times of one microbatch in a block with these kernels. as_published: as in `step_cost`."""
    forward = without_fused_loss(without_panels(kernels.it)) if as_published else kernels.it
    backward = backward_of(forward)
    weights = weight_gradients_of(forward, bytes.gradient, bytes.parameter if as_published else None)

    def seconds(kernels: Sequence[Kernel]) -> float:
        return device.it.seconds(kernels, precision, threads)

    return _Seconds(*map(seconds, (forward, backward, weights)))


@lru_cache(maxsize=1024)
def _repeated_seconds(kernels: ById[tuple[Kernel, ...]], device: ById[Device], precision: Precision, threads: float,
                      num_repeated: int | None = None) -> _Seconds:
    """Times of one microbatch in a second run with the first `num_repeated` of these kernels."""
    return _NO_SECONDS._replace(forward=device.it.seconds(kernels.it[:num_repeated], precision, threads))


class _DeferralDelays(NamedTuple):
    """Seconds for which messages delay a block whose weight gradients are deferred."""

    backward: float
    """Of the backward, minus those of a backward without deferral."""
    weight: float
    """Of the deferred gradients."""
    weight_alone: float
    """Of the deferred gradients, without sums over rows."""
    sums: list[tuple[float, float]]
    """For each deferred product, in order, seconds of its sum over rows, and of the product itself."""


_Products = tuple[float, float, float]
"""Seconds of a layer's products: y, dX and dW."""


@lru_cache(maxsize=1024)
def _layer_seconds(kernels: ById[tuple[Kernel, ...]], layers: ById[tuple[SplitLayer, ...]], col: int,
                   device: ById[Device], precision: Precision, bytes: ElementBytes) -> tuple[_Products, ...]:
    """For each of these layers its products, as the block computes them on one of `col` columns: with the full input of
    an output-stationary layer or the full output of an input-stationary one, and a part of the other side. A product
    belongs to the layer with the nearest size, and is shared evenly by layers of the same size."""
    whole = [(layer.outputs, layer.inputs / col) if layer.kind == "input" else (layer.inputs, layer.outputs / col)
             for layer in layers.it]
    found = [[0.0, 0.0, 0.0] for _ in layers.it]

    def shared(kernel: Kernel) -> tuple[list[int], list[float]]:
        """The layers of a product, and the seconds of each for y, dX and dW."""
        if kernel.kind != "product" or kernel.weight == "none":
            return [], []
        _, _, n, k = kernel.shape
        near: dict[float, list[int]] = {}
        for place, (layer, (size, part)) in enumerate(zip(layers.it, whole, strict=True)):
            own, cut = (n, k) if layer.kind == "input" else (k, n)
            if layer.kind != "embedding" and own == size and cut > (1.0 - _ALIKE) * part:
                near.setdefault(abs(cut - part) * size, []).append(place)
        places = near[min(near)] if near else []
        return places, [device.it.seconds([each for each in kernels if each.kind == "product"], precision) / len(places)
                        for kernels in ([kernel], backward_of([kernel]), weight_gradients_of(
                            [kernel], bytes.gradient, None)) if places]

    for places, seconds in map_distinct(kernels.it, shared):
        for place in places:
            for which, each in enumerate(seconds):
                found[place][which] += each
    return tuple((y, dx, dw) for y, dx, dw in found)


@lru_cache(maxsize=64)  # a search has one sample for very many candidates
def _first_alike(work: ById[StageWork], layers: ById[Mapping[str, tuple[SplitLayer, ...]]], begins: int
                 ) -> tuple[int, ...]:
    """For each block of a stage the place of the first block that takes the same time. begins: the place of the first
    block with a backward."""
    first: dict[object, int] = {}
    return tuple(first.setdefault((
        id(block.kernels), id(block.repeated.kernels), block.num_repeated, block.is_selective, block.num_trainable > 0,
        layers.it.get(block.name), place >= begins, place in work.it.recomputed, place in work.it.ends), place)
        for place, block in enumerate(work.it.blocks))


class _StepCost:
    """The shared values and methods for the parts of a cost."""

    def __init__(self, step: Step, cluster: Cluster, as_published: bool = False, *, part: float | None = None) -> None:
        mesh = step.run.mesh
        self.placement = step.run.placement
        assert len(step.stages) == self.placement.num_stages
        self.step, self.run, self.cluster, self.mesh = step, step.run, cluster, mesh
        self.size, self.data = mesh.stage_size, mesh.num_replicas
        self.scheme = volume_scheme(step.run.tensor)
        self.stages = [stage.blocks for stage in step.stages]
        self._starts = list(accumulate(map(len, self.stages), initial=0))
        self.as_published, self.part = as_published, part
        self._agains: dict[int, list[int]] = {}
        self._of_kernels: dict[tuple[int, bool], _Seconds] = {}
        self._volumes: dict[tuple[int, bool], Volume] = {}
        self._sent_seconds: dict[object, tuple[float, float]] = {}
        self._known_deferral_delays: dict[object, _DeferralDelays] = {}
        self.held = [self.placement.stages_of(rank) for rank in range(mesh.pipeline_size)]
        """The stages of each rank of a pipeline."""
        self.trained = [sum(block.num_owned for stage in held for block in self.stages[stage]) for held in self.held]
        """Parameters that each rank updates."""
        flags = [block.num_trainable > 0 for blocks in self.stages for block in blocks]
        self.begins = flags.index(True) if True in flags else len(flags)
        """The model's first trained block: blocks before it have no backward."""
        self.local = min(cluster.devices_per_node, self.mesh.size)
        self.count, self.last = step.run.num_microbatches, step.run.last_microbatch_fraction
        self.groups = {axis: place_groups(self.mesh, axis, cluster.devices_per_node) for axis in _GROUPED}

    def cost(self, exact: bool) -> Cost:
        step = self.step
        rows = [self.stage(stage) for stage in range(len(self.stages))]
        times = self.times(rows)
        edges = self.edge_times()
        passed = predict_batch_time(times, self.count, step.policy, step.limits.in_flight, edges=edges, exact=exact,
                                    defer_bytes=self.defer(times), cores=self.max_running_stages(),
                                    placement=self.placement, defer_last=self.defer_last,
                                    max_stored=step.limits.max_stored, alternating=step.limits.alternating)
        partial = (1.0 - self.last) * max(sum(rows[stage].microbatch_seconds for stage in held) for held in self.held)
        shared = self._shared_cores(rows)
        pipeline = max(passed.seconds - partial, shared)
        slack, last = 0.0, (-inf, rows[0])
        # the first of each rank; later ones end earlier, since their last backward continues
        for row in rows[:self.mesh.pipeline_size]:
            last = max(last, (pipeline - slack + row.after_seconds, row), key=lambda pair: pair[0])
            slack += row.backward_seconds
        total, ends = last
        again = (step.recomputed_flops_per_sample - step.flops_per_sample) * self._repeated_share()
        size = self.run.batch.global_size
        blocks = [block for stage in self.stages for block in stage]
        left_out = sum(block.flops - (block.weight_flops if block.num_trainable else 0)
                       for block in blocks[self.begins:])  # gradients of frozen weights, after trained ones
        unneeded = step.flops_per_sample / 3 * left_out / max(1, sum(block.flops for block in blocks))
        rate = self.cluster.device.rates[self.run.precision]
        return Cost(
            seconds=total, pipeline_seconds=pipeline, bubble_fraction=passed.bubble_fraction,
            reduction_seconds=ends.reduction_seconds, update_seconds=ends.update_seconds, stages=tuple(rows),
            link_bytes=self._link_bytes(), sequences=size, tokens=size * step.tokens,
            model_flops=size * (step.flops_per_sample - unneeded),
            hardware_flops=size * (step.flops_per_sample + again - unneeded),
            peak_flops=self._ranks_worth() * rate.peak_flops, cores_seconds=shared, partial_seconds=partial,
            edge_seconds=max(edges.transfer, default=0.0))

    def _repeated_share(self) -> float:
        """Share of the operations of recomputed blocks that run again; 0 if no block is recomputed."""
        whole = left_out = 0
        for stage, work in enumerate(self.step.stages):
            for place in self._recomputed_blocks(stage):
                block = work.blocks[place]
                whole += block.repeated_flops
                if place in work.ends and not (block.is_selective or block.num_repeated is None or self.as_published):
                    left_out += sum(kernel.flops for kernel in block.kernels[block.num_repeated:])
        return 1.0 - left_out / whole if whole else 0.0

    def lower_bound(self) -> tuple[float, float]:
        """Result of `step_lower_bound`. Stage i begins after the forwards of earlier stages, and then processes all
        microbatches: if forwards take at least a share r of the blocks' time, m microbatches that one stage would
        process in t take at least r t / (1 - (1 - r / m)^p) on p stages. If a batch's last microbatch is not full, the
        bound is lower."""
        forward, both, again = list[float](), list[float](), dict.fromkeys(self._recomputed_blocks(0), 1.0)
        alike = _first_alike(ById(self.step.stages[0]), ById(self.step.split_layers), self.begins)
        for place, (block, first) in enumerate(zip(self.stages[0], alike, strict=True)):
            if first < place:
                forward.append(forward[first])
                both.append(both[first])
                if place in again:
                    again[place] = again[first]
                continue
            own, trains = self._seconds(block), place >= self.begins
            sent = self._sent(block, False, has_backward=trains) if self.size > 1 else (0.0, 0.0)
            forward.append(own.forward + sent[0])
            both.append(forward[-1] + sent[1] + (own.backward + own.weight if trains else 0.0))
            if place in again:
                again[place] = self._recompute_seconds(block, place in self.step.stages[0].ends).forward
        return self._bound_of(forward, both), self._bound_of(forward, [
            seconds + again.get(place, 0.0) for place, seconds in enumerate(both)])

    def _bound_of(self, forward: Sequence[float], both: Sequence[float]) -> float:
        """The bound for blocks with these forward times, and these times both ways, of a microbatch."""
        pipe, total = self.mesh.pipeline_size, sum(both)
        share = min((before / each for before, each in zip(forward, both, strict=True) if each), default=0.0)
        if pipe == 1 or self.last < 1.0 or self.placement.per_rank > 1 or share < 1e-3:
            return (self.count - 1 + self.last) * total / pipe
        return share * total / (1.0 - (1.0 - share / self.count) ** pipe)

    def times(self, rows: Sequence[StageCost]) -> list[StageTimes]:
        """Times of the stages, for the simulator."""
        held_up = [0.0] * (len(rows) + 1)
        is_axonn = self.step.policy.defers and self.placement.per_rank == 1
        if self.as_published and not is_axonn and (edges := self._edges()):
            ranks = [self.placement.rank_of(stage) for stage in range(len(rows))]
            held_up[1:-1] = [sum(edges[min(one, other)]) if one != other else 0.0 for one, other in pairwise(ranks)]
        waiting = [self.waiting(row.stage) for row in rows]
        return [StageTimes(forward=row.forward_seconds + behind, backward=row.backward_seconds + before,
                           weight=row.weight_seconds, products=PRODUCTS, longer_backward=longer,
                           deferred_factor=1.0 + (later / row.weight_seconds if row.weight_seconds else 0.0),
                           alive_bytes=max(1, sum(block.kept_bytes for block in self.stages[row.stage])
                                           ) if row.weight_seconds else 0,
                           trains=self._first(row.stage) < len(self.stages[row.stage]))
                for row, before, behind, (longer, later) in zip(rows, held_up, held_up[1:], waiting, strict=False)]

    # --- stages ------------------------------------------------------------------------------------------------------

    def stage(self, stage: int) -> StageCost:
        """The cost of one rank of a stage."""
        costs, first, again = self.stages[stage], self._first(stage), self._recomputed_blocks(stage)
        seconds = [self._seconds(cost) for cost in costs]
        forward = sum([each.forward for each in seconds])
        ends = set(self.step.stages[stage].ends)
        recomputed = sum(self._recompute_seconds(costs[place], place in ends).forward for place in again)
        weight = self.weight_seconds(stage)
        both = sum([each.backward + each.weight for each in seconds[first:]])
        backward = both - weight + recomputed
        sent_forward, sent_backward = self._exposed_seconds(stage)
        rank = self.placement.rank_of(stage)
        sums, gathers, update = *self._reduction(rank), self._update(rank)
        waits = weight > 0 and self._defers(rank)
        beside = self._beside_sums(weight if waits else backward + sent_backward + weight)
        return StageCost(stage=stage, forward_seconds=forward + sent_forward,
                         backward_seconds=backward + sent_backward, weight_seconds=weight,
                         exchange_seconds=sent_forward + sent_backward, reduction_seconds=sums + gathers,
                         update_seconds=update, after_seconds=self._tail_seconds(sums, gathers, update, rank, beside))

    def weight_seconds(self, stage: int) -> float:
        """Seconds of one microbatch's weight gradients that may be deferred."""
        return sum(self._seconds(cost).weight for cost in self._deferring(stage))

    def _first(self, stage: int) -> int:
        """The place of the stage's first block that has a backward."""
        return min(max(0, self.begins - self._starts[stage]), len(self.stages[stage]))

    def _recomputed_blocks(self, stage: int) -> list[int]:
        """Places of the blocks that are recomputed, which excludes leading frozen blocks."""
        if stage not in self._agains:
            first = self._first(stage)
            self._agains[stage] = [place for place in self.step.stages[stage].recomputed if place >= first]
        return self._agains[stage]

    def _deferring(self, stage: int) -> list[BlockCost]:
        """Blocks whose weight gradients may be deferred: not those that are recomputed, nor the model's last one."""
        costs, first, again = self.stages[stage], self._first(stage), set(self._recomputed_blocks(stage))
        stop = len(costs) - (stage == len(self.stages) - 1)
        return [cost for place, cost in enumerate(costs[:stop])
                if place >= first and place not in again and cost.num_trainable and cost.defers]

    def _seconds(self, cost: BlockCost) -> _Seconds:
        """Times of one microbatch in a block."""
        key = id(cost.kernels), cost.num_trainable > 0
        if key not in self._of_kernels:
            found = _block_seconds(ById(cost.kernels), ById(self.cluster.device), self.run.precision, self._threads(),
                                   self.step.bytes, self.as_published)
            if self.part is not None:
                found = _Seconds(*(self.part * seconds for seconds in found))
            self._of_kernels[key] = found if cost.num_trainable else found._replace(weight=0.0)
        return self._of_kernels[key]

    def _recompute_seconds(self, cost: BlockCost, ends: bool) -> _Seconds:
        """Times of the second run of a block that is recomputed. ends: it is the last one of its segment."""
        if not cost.is_selective and (self.as_published or not ends):
            return self._seconds(cost)
        kernels, count = (cost.repeated.kernels, None) if cost.is_selective else (cost.kernels, cost.num_repeated)
        found = _repeated_seconds(ById(kernels), ById(self.cluster.device), self.run.precision, self._threads(), count)
        return found if self.part is None else _Seconds(*(self.part * seconds for seconds in found))

    def _threads(self) -> float:
        return rank_threads(self.cluster, self.mesh)

    def _core_sharing_factor(self) -> float:
        """Factor by which a rank takes longer if it shares its cores with others."""
        cores = self.cluster.device.cores
        return 1.0 if cores is None else max(1.0, self.local * self._threads() / cores)

    def max_running_stages(self) -> int | None:
        """Number of stages of a replica for which there are cores; None if each rank has a device."""
        cores = self.cluster.device.cores
        if cores is None:
            return None
        nodes = max(1, self.mesh.size / self.local)
        return max(1, int(cores * nodes / (self.data * self.size * self._threads())))

    def _ranks_worth(self) -> float:
        """Number of devices counted in the peak: for shared cores, the number that the ranks use."""
        cores = self.cluster.device.cores
        return self.mesh.size if cores is None else min(cores, self.mesh.size * self._threads())

    def _shared_cores(self, rows: Sequence[StageCost]) -> float:
        """Seconds that the work of all ranks of a node keeps its cores busy, if they share them. If there are more
        ranks than cores they take turns, in copying messages as well, and a tensor mesh as a whole waits for the copies
        and for members that are not running."""
        cores, crowded = self.cluster.device.cores, self._core_sharing_factor()
        if cores is None:
            return 0.0
        microbatches = self.count - 1 + self.last
        exchanged = microbatches * sum(row.exchange_seconds for row in rows)
        computed = microbatches * sum(row.microbatch_seconds for row in rows) - exchanged
        busy = computed * self.data * self.size * self._threads() / cores / max(
            1, self.mesh.size / self.local)
        if crowded == 1.0:
            return busy
        turns = microbatches * sum(self._collectives(row.stage) for row in rows) * self.cluster.device.turn_seconds
        nodes = max(1, self.mesh.pipeline_size * self.size / self.local)  # of a replica
        return busy / self.cluster.device.crowded_share + (exchanged * crowded + turns) / nodes

    # --- messages ----------------------------------------------------------------------------------------------------

    def _exposed_seconds(self, stage: int) -> tuple[float, float]:
        """Seconds for which messages of the tensor mesh delay one microbatch's forward and backward."""
        if self.size == 1:
            return 0.0, 0.0
        first, recomputed = self._first(stage), set(self._recomputed_blocks(stage))
        ends = set(self.step.stages[stage].ends)
        sent = [self._sent(block, place in recomputed, has_backward=place >= first, ends=place in ends)
                for place, block in enumerate(self.stages[stage])]
        return sum(forward for forward, _ in sent), sum(backward for _, backward in sent)

    def waiting(self, stage: int) -> tuple[float, float]:
        """With deferred weight gradients: seconds by which messages of the tensor mesh delay a microbatch's backward
        more (or less, if negative) than without deferral, and for which they delay these gradients; their sum is not
        negative."""
        blocks = self._deferring(stage) if self.size > 1 and self._overlaps_messages else []
        found = [self._deferral_delays(block) for block in blocks]
        longer = sum(each.backward for each in found)
        weight = max(sum(each.weight for each in found),
                     sum(each.weight_alone for each in found) + self._late_sum_seconds(blocks))
        return longer, max(weight, -longer)

    def _late_sum_seconds(self, blocks: Sequence[BlockCost]) -> float:
        """Seconds for which sums of deferred weight gradients over rows end later than the product that follows each:
        the next product but one takes its memory. The last sum overlaps the work after all of them."""
        queue = [pair for block in reversed(blocks) for pair in self._deferral_delays(block).sums]
        return sum(max(0.0, seconds - product) for (seconds, _), (_, product) in pairwise(queue))

    def _deferral_delays(self, block: BlockCost) -> _DeferralDelays:
        """The delays of one block with deferred weight gradients."""
        key = id(self.step.split_layers[block.name]), id(block.kernels)
        if key not in self._known_deferral_delays:
            volume, layers = self._block_volume(block.name, False), self._share_of_layer(block.name)
            own, transfers = self._seconds(block), self._layer_messages(block, False, waits=True)
            later = Bytes(sum(transfer.bytes for each, _ in transfers for transfer in each.weight),
                          max(0.0, volume.backward.weights - volume.forward.weights))
            first = Bytes(volume.backward.activations - later.activations, volume.backward.weights - later.weights)
            backward = self._message_delay(first, layers, 1, [(each.backward, seconds) for each, seconds in transfers],
                                           own.backward)
            gathers = [(each.weight, seconds) for each, seconds in transfers]
            weight, alone = (self._message_delay(weights, layers, 1, gathers, own.weight) - self._norms(layers)
                             for weights in (later, replace(later, weights=0.0)))
            summed = self._receive_seconds(replace(later, activations=0.0), layers, 1) if later.weights else 0.0
            sizes = [layer.inputs * layer.outputs for layer in self.step.split_layers[block.name]]
            self._known_deferral_delays[key] = _DeferralDelays(
                backward - self._sent(block, False, has_backward=True)[1], weight, alone,
                [(summed * size / sum(sizes), products[2]) for size, (_, products) in reversed(
                    list(zip(sizes, transfers, strict=True)))] if summed else [])
        return self._known_deferral_delays[key]

    def _sent(self, block: BlockCost, recomputed: bool, *, has_backward: bool, ends: bool = False
              ) -> tuple[float, float]:
        """`_exposed_seconds` of one block. ends: as in `_recompute_seconds`."""
        key = (id(self.step.split_layers[block.name]), id(block.kernels), block.num_trainable > 0, recomputed,
               has_backward, ends)
        if key not in self._sent_seconds:
            sends_again = recomputed and not block.is_selective
            volume, layers = self._block_volume(block.name, sends_again), self._share_of_layer(block.name)
            own, again = self._seconds(block), self._recompute_seconds(block, ends) if recomputed else _NO_SECONDS
            transfers = self._layer_messages(block, sends_again) if self._overlaps_messages else []
            self._sent_seconds[key] = (
                self._message_delay(volume.forward, layers, 0, [(each.forward, seconds) for each, seconds in transfers],
                                    own.forward),
                self._message_delay(volume.backward, layers, 1,
                                    [(each.backward, seconds) for each, seconds in transfers],
                                    own.backward + own.weight + again.forward) if has_backward else 0.0)
        return self._sent_seconds[key]

    @property
    def _overlaps_messages(self) -> bool:
        """Whether messages are sent while products are computed: not if cores copy them, nor if a broadcast's root
        depends on the rank."""
        return self.cluster.device.cores is None and self.scheme != "summa" and not self.as_published

    def _message_delay(self, sizes: Bytes, layers: float, way: int,
                       transfers: Sequence[tuple[Sequence[Transfer], _Products]], computing: float) -> float:
        """Seconds for which a block's messages delay it: activations overlap the products of their layer, except for
        the panels during which nothing is computed, and weights overlap all of the block's computation. Hidden messages
        slow down the computation that they overlap (`Device.message_share`).

        Args:
            sizes, layers, way: as in `_receive_seconds`. transfers: of each layer, with its products. computing:
                seconds.
        """
        if not self._overlaps_messages:
            return self._norms(layers) + self._receive_seconds(sizes, layers, way)
        activations = self._receive_seconds(replace(sizes, weights=0.0), layers, way) if sizes.activations else 0.0
        weights = self._receive_seconds(replace(sizes, activations=0.0), layers, way) if sizes.weights else 0.0
        each_byte = activations / sizes.activations if sizes.activations else 0.0
        alone = late = 0.0
        for several, products in transfers:
            for transfer in several:
                alone += transfer.alone * each_byte
                beside = sum(map(mul, transfer.beside, products))
                late += (1.0 - transfer.alone / transfer.bytes) * max(0.0, transfer.bytes * each_byte - beside)
        hidden = activations - alone + weights
        slower = self.cluster.device.message_share * hidden  # computation that overlaps messages takes longer
        return self._norms(layers) + alone + max(slower, late, hidden - computing)

    def _norms(self, layers: float) -> float:
        """Seconds of the small sums of a block's norms, which are not hidden."""
        group, count = self.groups["col"], _NORM_MESSAGES.get(self.scheme, 0) * layers
        steps = count * (group.members - 1)
        return count * self.cluster.collective_seconds * (group.members > 1) + received_seconds(
            0.0, round(steps), group, self.cluster)

    def _layer_messages(self, block: BlockCost, recomputed: bool, *,
                        waits: bool = False) -> list[tuple[LayerTransfers, _Products]]:
        """The transfers of the activations of each layer of a block, and its products."""
        layers, col = self.step.split_layers[block.name], self.mesh.col if self.part is None else 1
        seconds = _layer_seconds(ById(block.kernels), ById(layers), col, ById(self.cluster.device), self.run.precision,
                                 self.step.bytes)
        if self.part is not None:
            seconds = tuple((self.part * y, self.part * dx, self.part * dw) for y, dx, dw in seconds)
        elements = self.run.batch.microbatch_size * self.step.tokens
        return [(layer_transfers(layer, self.scheme, row=self.mesh.row, col=self.mesh.col, elements=elements,
                                 itemsize=self.step.bytes.parameter, sum_itemsize=self.step.bytes.summed,
                                 panel_bytes=self.run.tensor.panel_bytes, recomputed=recomputed,
                                 trains=block.num_trainable > 0, waits=waits), products)
                for layer, products in zip(layers, seconds, strict=True)]

    def _share_of_layer(self, block: str) -> float:
        """Share of a transformer layer's collectives that a block has, by its products. A block without products counts
        like one with two: its norm and its small layers exchange, too."""
        return max(2, len(self.step.split_layers[block])) / 4

    def _block_volume(self, block: str, recomputed: bool) -> Volume:
        layers = self.step.split_layers[block]
        key = id(layers), recomputed
        if key not in self._volumes:
            self._volumes[key] = block_volume(
                layers, self.scheme, row=self.mesh.row, col=self.mesh.col, batch=self.run.batch.microbatch_size,
                sequence=self.step.tokens, hidden=self.run.model.hidden, itemsize=self.step.bytes.parameter,
                sum_itemsize=self.step.bytes.summed, last=not self.as_published,
                recompute="none" if not recomputed else "again" if self.as_published else "kept",
                weights_kept_for=self.count if self.run.tensor.keep_weights else None,
                gradient_itemsize=self.step.bytes.gradient)
        return self._volumes[key]

    def _receive_seconds(self, sizes: Bytes, layers: float, way: int) -> float:
        """Seconds in which a block receives these bytes, without its norms' sums. layers: its part of a layer. way: 0
        forward, 1 backward."""
        messages = _MESSAGES[self.scheme][way] * layers
        both = [(size, self.groups[axis], messages) for size, axis in (
            (sizes.activations, _COL), (sizes.weights, _ROW)) if size]
        starts = self.cluster.collective_seconds * sum(count for _, group, count in both if group.members > 1)
        if self.scheme == "summa":
            roots = [each.members * tree_latency(each, self.cluster) for _, each, _ in both if each.members > 1]
            return starts + messages * sum(roots) + sum(
                tree_seconds(size, each, self.cluster) for size, each, _ in both)
        received = reduced_seconds if self.scheme == "megatron" else received_seconds
        return starts + sum(received(size, round(count * (group.members - 1)), group, self.cluster)
                            for size, group, count in both)

    def _collectives(self, stage: int) -> float:
        """Number of collectives of one microbatch on the tensor mesh, forward and backward."""
        axes = [group.members for group in (self.groups["row"], self.groups["col"]) if group.members > 1]
        if not axes:
            return 0.0
        each = sum(axes) if self.scheme == "summa" else len(axes)
        of_norms = _NORM_MESSAGES.get(self.scheme, 0) * (self.groups["col"].members > 1)
        shares = [self._share_of_layer(block.name) for block in self.stages[stage]]
        forward, backward = (each * count + of_norms for count in _MESSAGES[self.scheme])
        return forward * sum(shares) + backward * sum(shares[self._first(stage):])

    def edge_times(self) -> EdgeTimes:
        """The edges of the pipeline, with messages that overlap computing."""
        if self.as_published:
            return DIRECT
        transfer, latency = zip(*self._edges(), strict=True) if self.mesh.pipeline_size > 1 else ((), ())
        return EdgeTimes(transfer=transfer, latency=latency)

    def _edges(self) -> list[tuple[float, float]]:
        """Seconds for which one message keeps each edge between neighbouring ranks busy, and further seconds until it
        arrives; if several stages send over one edge, the largest message counts."""
        sizes = edge_bytes(self.placement, self.stages)
        if not self.as_published:
            return edge_seconds(self.run, sizes, self.cluster)
        group, size = self.groups["col"], self.size
        return [(sent / size / link.rate(together) + received_seconds(sent * (size - 1) / size, size - 1, group,
                                                                      self.cluster), link.latency_seconds)
                for (link, together), sent in zip(edge_links(self.mesh, self.cluster), sizes, strict=True)]

    def defer(self, times: Sequence[StageTimes]) -> int | Sequence[int]:
        """Bytes of deferred weight gradients, on all ranks or on each."""
        if not self.step.policy.defers or self.run.optim.update_in_backward:
            return 0
        asked = self.run.pipeline.defer_bytes
        return asked if asked != "auto" else [
            sum(times[stage].alive_bytes for stage in held) * count
            for held, count in zip(self.held, self.step.limits.deferred, strict=True)]

    @property
    def defer_last(self) -> int | None:
        """`Limits.last`, if the limits decide what is deferred."""
        return self.step.limits.last if self.run.pipeline.defer_bytes == "auto" else None

    # --- after the pipeline ------------------------------------------------------------------------------------------

    def _bytes_both_ways(self) -> tuple[float, float]:
        """Bytes of each element in the sums of gradients and in the gathers of parameters, both ways of an all-reduce:
        if states are sharded, gradients are reduce-scattered in their dtype (all-reduced if whole tensors are updated),
        and parameters gathered in theirs."""
        gradient = self.step.bytes.reduced
        if not self.run.optim.shard:
            return gradient, 0.0
        return gradient if self.step.whole_tensors else gradient / 2, self.step.bytes.parameter / 2

    def _reduction(self, rank: int) -> tuple[float, float]:
        """Seconds in which gradients are summed over replicas, and in which updated parameters are gathered."""
        group = self.groups["data"]
        if group.members == 1:
            return 0.0, 0.0
        size = self._beside(rank) if group.crosses else self.trained[rank]
        chunks, optim, (summed, gathered) = self._chunks(rank), self.run.optim, self._bytes_both_ways()
        both = (chunks - 1) * self.cluster.chunk_seconds + all_reduce_seconds(
            size * (summed + gathered), group, self.cluster, pieces=chunks,
            scatters=optim.shard and not self.step.whole_tensors)
        return both * summed / (summed + gathered), both * gathered / (summed + gathered)

    def _beside(self, place: int) -> float:
        """Average number of parameters of the ranks on the node of this pipeline rank, which take turns on its link."""
        size, per_node = self.size, self.cluster.devices_per_node
        found = []
        for first in replica_offsets(self.mesh, per_node):
            node = (first + place * size) // per_node
            replicas = {(rank - first) // size for rank in range(node * per_node, (node + 1) * per_node)
                        if 0 <= rank - first < size * self.mesh.pipeline_size}
            found.append(max(sum(self.trained[other] for other in replicas), self.trained[place]) / len(replicas))
        return max(found)

    def _chunks(self, rank: int) -> int:
        size = chunk_size(self.run.optim, "cuda" if self.cluster.device.cores is None else "cpu")
        return max(1, -(-round(self.trained[rank]) // size))

    def _update(self, rank: int) -> float:
        count = self.trained[rank] / (self.data if self.run.optim.shard else 1)
        moving = update_seconds(self.step, self.cluster, count, local=self.local, threads=self._threads(),
                                crowded=self._core_sharing_factor())
        # rows and columns all compute with the same whole tensors
        flops = self.step.update_flops * count / max(1, sum(self.trained)) / self._threads()
        rate = self.cluster.device.rates[self.run.precision]
        return moving + flops / (rate.peak_flops * rate.share) * self._core_sharing_factor()

    def _defers(self, rank: int) -> bool:
        """Whether products of the last microbatch's weight gradients wait until its backward has finished."""
        asked = self.run.pipeline.defer_bytes
        return self.step.policy.defers and not self.run.optim.update_in_backward and bool(
            self.step.limits.deferred[rank] if asked == "auto" else asked)

    def _beside_sums(self, computing: float) -> float:
        """Seconds for which a rank computes while complete chunks can be summed; 0 if sums are not hidden. computing:
        of the last microbatch, on one stage. An interleaved stage is complete when it and one stage of every other rank
        have processed all microbatches in flight."""
        if self.cluster.device.cores is not None or self.as_published:
            return 0.0
        turns = self.placement.per_rank - 1
        if self.placement.how == "interleaved":
            turns *= min(self.mesh.pipeline_size, self.count)
        return (turns + self.last) * computing

    def _tail_seconds(self, sums: float, gathers: float, update: float, rank: int, beside: float) -> float:
        """Seconds of sums, updates and gathers after the last backward. A chunk is summed when the backward has
        finished with it, during the work that follows, which takes `beside` in total and is slowed down. It is updated
        while the next chunk is summed, and gathered while the next is updated; if an update depends on the norm of all
        gradients (loss scaling, clipping, a guard), updates begin when all chunks are summed."""
        part = 1.0 / self._chunks(rank)
        hidden = (1.0 - part) * min(sums, beside)
        sums -= hidden * (1.0 - self.cluster.device.message_share)
        if not self.step.waits_for_gradient_status:
            return max(sums + gathers, update) + min(sums + gathers, update) * part
        return sums + (max(gathers, update) + min(gathers, update) * part if beside else gathers + update)

    def _link_bytes(self) -> dict[str, float]:
        optim, mesh = self.run.optim, self.mesh
        found: dict[str, float] = {}
        if sent := sent_bytes(self.placement, self.stages):
            found["pipe"] = self.count * max(sum(size for edge, size in sent if rank in edge)
                                             for rank in range(mesh.pipeline_size))
        volumes = [[self._block_volume(block.name, self.run.memory.recompute not in ("none", "selective"))
                    for block in blocks]
                   for blocks in self.stages] if self.size > 1 else []
        if mesh.col > 1:
            found["col"] = self.count * max(sum(volume.forward.activations + volume.backward.activations
                                                for stage in held for volume in volumes[stage]) for held in self.held)
        if mesh.row > 1:
            found["row"] = self.count * max(sum(volume.forward.weights + volume.backward.weights
                                                for stage in held for volume in volumes[stage]) for held in self.held)
        if self.data > 1:
            found["data"] = 2 * (self.data - 1) / self.data * sum(self._bytes_both_ways()) * max(self.trained)
        if optim.offload in ("stream", "host"):
            size = self.step.bytes
            each = size.state * self.step.num_states if optim.offload == "stream" else size.gradient
            found["host"] = each * max(self.trained) / (self.data if optim.shard else 1)
        return found
