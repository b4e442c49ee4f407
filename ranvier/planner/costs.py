"""What one step of a run costs on a cluster: seconds by phase, and bytes over each link.

    pipeline     stages compute and exchange activations; with row x col > 1 their products exchange operands
    reduction    gradients are averaged between replicas, chunk by chunk
    update       the optimizer: bytes through the device's memory, or over the link to the host's

Work is what `BlockCost` counts of one rank's part of each block: a forward; a backward is twice that, half of it the
weights' gradients; what is recomputed counts once more; frozen blocks in front have none. What follows the pipeline
is exposed, but for what the optimizer hides of the reduction. What the ends of a tied parameter on two stages exchange
goes on while the pipeline fills and drains, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Literal

from ranvier.models import families
from ranvier.pipeline.checkpointing import stage_segments
from ranvier.pipeline.partition import BlockCost
from ranvier.pipeline.policies import MANY, auto_in_flight, policy_named
from ranvier.planner.collectives import (
    Placed,
    placed,
    received_seconds,
    reduced_seconds,
    seconds,
    tree_latency,
    tree_seconds,
)
from ranvier.planner.hardware import Cluster
from ranvier.planner.pipeline_time import DIRECT, Way, passage
from ranvier.planner.simulator import StageTimes
from ranvier.precision import DTYPES, is_half, reduce_dtype
from ranvier.run import Run
from ranvier.tensor.volume import Bytes, Scheme, Volume, embedding_volume, head_volume, layer_volume

_MESSAGES = {"summa": (4, 8), "stationary": (4, 6), "megatron": (2, 2), "megatron-sequence": (4, 6)}
"""Collectives of one layer along an axis, forward and backward; each is one message to every other member."""
_NOTHING_SENT = Volume(forward=Bytes(), backward=Bytes())
_UPDATED = {"adamw": 2, "sgd": 1}


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One rank of a stage. Seconds are of one microbatch, but for reduction and update, which are of the step."""

    stage: int
    forward_seconds: float
    backward_seconds: float
    """Of the gradients that cannot wait, with what is recomputed for them."""
    weight_seconds: float
    """Of weights' gradients that may be postponed."""
    exchange_seconds: float
    """What of these three the tensor mesh spends on messages."""
    reduction_seconds: float
    update_seconds: float
    after_seconds: float
    """From the last backward to the end of the step: of reduction and update what does not overlap."""

    @property
    def microbatch_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.weight_seconds


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One step. Phases are those of the stage that ends last."""

    seconds: float
    pipeline_seconds: float
    bubble_fraction: float
    reduction_seconds: float
    update_seconds: float
    stages: tuple[StageCost, ...]
    link_bytes: Mapping[str, float]
    """What the busiest rank sends in a step, by axis, and over its link to the host."""
    sequences: int
    tokens: int
    model_flops: float
    """Of forward and backward, nothing recomputed."""
    hardware_flops: float
    """With what is recomputed."""
    peak_flops: float
    """Of all devices together, in a second."""
    edge_seconds: float = 0.0
    """For which one microbatch's message keeps the slowest edge between two stages busy."""
    partial_seconds: float = 0.0
    """What the pipeline takes less because the last microbatch is not whole."""
    cores_seconds: float = 0.0
    """Where ranks share cores: what the pipeline takes at least, all of them computing all the time."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def model_utilisation(self) -> float:
        return self.model_flops / self.seconds / self.peak_flops

    @property
    def hardware_utilisation(self) -> float:
        return self.hardware_flops / self.seconds / self.peak_flops

    def days(self, tokens: float = 3e11) -> float:
        """To train on so many tokens."""
        return tokens / self.tokens_per_second / 86400


def cost(run: Run, cluster: Cluster, stages: Sequence[Sequence[BlockCost]], *, exact: bool = True,
         others: bool = False) -> Cost:
    """Of a run with these blocks on each stage, counted for its microbatch on its tensor mesh. exact: simulate the
    schedule; otherwise the closed form. others: as Megatron-LM, DeepSpeed and Optimus were published, where a stage
    does not compute while it sends or receives, ranks of a stage that hold the same activations each send a part of
    them, and a layer's last product is recomputed with the others."""
    return _Maker(run, cluster, stages, others).cost(exact)


def pipeline_of(run: Run, cluster: Cluster, stages: Sequence[Sequence[BlockCost]]
                ) -> tuple[list[StageTimes], int, Way, int | Literal["auto"], int | None]:
    """What the simulator needs of such a run: each stage's times, the number of microbatches, the edges, bytes of
    postponed weight gradients, and how many stages of a replica may compute at once."""
    made = _Maker(run, cluster, stages)
    return made.times([made.stage(stage) for stage in range(run.mesh.pipe)]), made.count, made.way(), \
        made.defer(), made.at_once()


class _Maker:
    """Everything that the parts of a cost need."""

    def __init__(self, run: Run, cluster: Cluster, stages: Sequence[Sequence[BlockCost]], others: bool = False
                 ) -> None:
        assert len(stages) == run.mesh.pipe
        self.run, self.cluster, self.mesh = run, cluster, run.mesh
        self.stages = [tuple(blocks) for blocks in stages]
        self.others = others
        self.layers = tuple((f"layer{index}.attention", f"layer{index}.mlp") for index in range(run.model.num_layers))
        self._agains: dict[int, list[int]] = {}
        self._volumes: dict[tuple[str, bool], Volume] = {}
        self.trained = [sum(block.num_owned for block in blocks) for blocks in self.stages]
        flags = [block.num_trainable > 0 for blocks in self.stages for block in blocks]
        self.begins = flags.index(True) if True in flags else len(flags)
        """The model's first block that trains: those before it have no backward."""
        self.local = min(cluster.devices_per_node, self.mesh.size)
        self.policy = policy_named(run.pipeline.policy)
        share = -(-run.batch.global_size // self.mesh.data)
        self.count = -(-share // run.batch.microbatch_size)
        self.last = share / run.batch.microbatch_size - (self.count - 1)
        """What the last microbatch is of a whole one."""
        self.in_flight = run.pipeline.in_flight if run.pipeline.in_flight != "auto" else auto_in_flight(
            self.mesh.pipe, sum(not any(block.num_trainable for block in blocks) for blocks in self.stages))
        self.groups = {axis: placed(self.mesh, axis, cluster.devices_per_node) for axis in ("data", "row", "col")}

    def cost(self, exact: bool) -> Cost:
        rows = [self.stage(stage) for stage in range(self.mesh.pipe)]
        passed = passage(self.times(rows), self.count, self.policy, self.in_flight, way=self.way(), exact=exact,
                         defer_bytes=self.defer(), cores=self.at_once())
        partial = (1.0 - self.last) * max(row.microbatch_seconds for row in rows)
        shared = self._shared_cores(rows)
        pipeline = max(passed.seconds - partial, shared)
        slack, last = 0.0, (-inf, rows[0])
        for row in rows:  # later stages end earlier: their last backward is passed on
            last = max(last, (pipeline - slack + row.after_seconds, row), key=lambda pair: pair[0])
            slack += row.backward_seconds
        total, ends = last
        run = self.run
        recomputed = any(self._again(stage) for stage in range(self.mesh.pipe))
        size = run.batch.global_size
        flops = families.flops_per_sample(run)
        rate = self.cluster.device.rates[run.precision]
        return Cost(
            seconds=total, pipeline_seconds=pipeline, bubble_fraction=passed.bubble_fraction,
            reduction_seconds=ends.reduction_seconds, update_seconds=ends.update_seconds, stages=tuple(rows),
            link_bytes=self._link_bytes(), sequences=size, tokens=size * families.tokens_of(run),
            model_flops=size * flops,
            hardware_flops=size * families.flops_per_sample(run, recomputed=recomputed),
            peak_flops=self._ranks_worth() * rate.peak_flops, cores_seconds=shared, partial_seconds=partial,
            edge_seconds=max(self.way().transfer, default=0.0))

    def times(self, rows: Sequence[StageCost]) -> list[StageTimes]:
        """As the simulator takes them."""
        held_up = [0.0, *(transfer + latency for transfer, latency in self._edges()), 0.0] if self.others else [
            0.0] * (len(rows) + 1)
        return [StageTimes(forward=row.forward_seconds + behind, backward=row.backward_seconds + before,
                           weight=row.weight_seconds,
                           alive_bytes=max(1, sum(block.kept_bytes for block in self.stages[row.stage])
                                           ) if row.weight_seconds else 0,
                           trains=self._first(row.stage) < len(self.stages[row.stage]))
                for row, before, behind in zip(rows, held_up, held_up[1:], strict=False)]

    # --- stages ------------------------------------------------------------------------------------------------------

    def stage(self, stage: int) -> StageCost:
        """One rank of it."""
        costs, first, again = self.stages[stage], self._first(stage), self._again(stage)
        behind = costs[first:]
        forward = self._seconds(costs)
        recomputed = self._seconds([costs[place] for place in again])
        weight = self._seconds(self._postponing(costs, first, again))
        weights = self._seconds([cost for cost in behind if cost.num_trainable])
        backward = self._seconds(behind) + weights - weight + recomputed
        sent_forward, sent_backward = self._exchanged([cost.name for cost in costs], first, again)
        reduction, update = self._reduction(stage), self._update(stage)
        return StageCost(stage=stage, forward_seconds=forward + sent_forward,
                         backward_seconds=backward + sent_backward, weight_seconds=weight,
                         exchange_seconds=sent_forward + sent_backward, reduction_seconds=reduction,
                         update_seconds=update, after_seconds=self._after(reduction, update, stage))

    def _first(self, stage: int) -> int:
        """The place of the stage's first block that has a backward."""
        before = sum(len(blocks) for blocks in self.stages[:stage])
        return min(max(0, self.begins - before), len(self.stages[stage]))

    def _again(self, stage: int) -> list[int]:
        """Places of the blocks that are recomputed, which frozen ones in front are not."""
        if stage not in self._agains:
            costs, first = self.stages[stage], self._first(stage)
            places = self._recomputed([cost.name for cost in costs], costs, stage)
            self._agains[stage] = [place for place in places if place >= first]
        return self._agains[stage]

    def _postponing(self, costs: Sequence[BlockCost], first: int, again: Sequence[int]) -> list[BlockCost]:
        """Blocks whose weights' gradients may wait: not those that are recomputed, nor the head."""
        return [cost for place, cost in enumerate(costs) if place >= first and place not in again
                and cost.num_trainable and cost.name != "head"]

    def _seconds(self, costs: Sequence[BlockCost]) -> float:
        """Of one microbatch's forward through these blocks."""
        threads = self._threads()
        return self.cluster.device.seconds(
            sum(each.flops for each in costs) / threads, sum(each.moved_bytes for each in costs) / threads,
            sum(each.operations for each in costs), self.run.precision)

    def _recomputed(self, blocks: Sequence[str], costs: Sequence[BlockCost], stage: int) -> list[int]:
        if self.run.memory.checkpoint == "none":
            return []
        stored = self.policy.stored(self.policy.in_flight(self.in_flight, MANY), stage, self.mesh.pipe)
        segments = stage_segments(self.run.memory.checkpoint, blocks, self.layers, [each.kept_bytes for each in costs],
                                  [each.input_bytes for each in costs], stored)
        return [place for segment in segments for place in segment]

    def _threads(self) -> float:
        """Cores that one rank computes with."""
        cores = self.cluster.device.cores
        return 1.0 if cores is None else max(1.0, cores // self.local)

    def _crowded(self) -> float:
        """How many times as long a rank takes that shares its cores with others."""
        cores = self.cluster.device.cores
        return 1.0 if cores is None else max(1.0, self.local * self._threads() / cores)

    def at_once(self) -> int | None:
        """Stages of a replica for which there are cores; none where each rank has a device."""
        cores = self.cluster.device.cores
        if cores is None:
            return None
        nodes = max(1, self.mesh.size / self.local)
        return max(1, int(cores * nodes / (self.mesh.data * self.mesh.stage_size * self._threads())))

    def _ranks_worth(self) -> float:
        """Devices that the peak counts: of shared cores, those that the ranks use."""
        cores = self.cluster.device.cores
        return self.mesh.size if cores is None else min(cores, self.mesh.size * self._threads())

    def _shared_cores(self, rows: Sequence[StageCost]) -> float:
        """Seconds that the work of all ranks of a node keeps its cores busy, where they share them. Where there are
        more ranks than cores they take turns, in copying messages as well, and a tensor mesh as a whole waits for them
        and for members that are not running."""
        cores, crowded = self.cluster.device.cores, self._crowded()
        if cores is None:
            return 0.0
        microbatches = self.count - 1 + self.last
        exchanged = microbatches * sum(row.exchange_seconds for row in rows)
        computed = microbatches * sum(row.microbatch_seconds for row in rows) - exchanged
        busy = computed * self.mesh.data * self.mesh.stage_size * self._threads() / cores / max(
            1, self.mesh.size / self.local)
        if crowded == 1.0:
            return busy
        turns = microbatches * sum(self._collectives(row.stage) for row in rows) * self.cluster.device.turn_seconds
        nodes = max(1, self.mesh.pipe * self.mesh.stage_size / self.local)  # of a replica
        return busy / self.cluster.device.crowded_share + (exchanged * crowded + turns) / nodes

    # --- messages ----------------------------------------------------------------------------------------------------

    def _scheme(self) -> Scheme:
        tensor = self.run.tensor
        return "megatron-sequence" if tensor.scheme == "megatron" and tensor.sequence_sharding else tensor.scheme

    def _exchanged(self, blocks: Sequence[str], first: int, again: Sequence[int]) -> tuple[float, float]:
        """Seconds that one microbatch's forward and backward spend on messages of the tensor mesh."""
        if self.mesh.stage_size == 1:
            return 0.0, 0.0
        recomputed = set(again)
        forward = backward = 0.0
        for place, block in enumerate(blocks):
            one = self._block_volume(block, place in recomputed)
            forward += self._received(one.forward, 0)
            backward += self._received(one.backward, 1) if place >= first else 0.0
        return forward, backward

    def _block_volume(self, block: str, recomputed: bool) -> Volume:
        """Blocks of one kind have one name but for the layer's number."""
        kind = block.rpartition(".")[2], recomputed
        if kind not in self._volumes:
            self._volumes[kind] = self._volume_of(*kind)
        return self._volumes[kind]

    def _volume_of(self, block: str, recomputed: bool) -> Volume:
        run, model = self.run, self.run.model
        shape = {"row": self.mesh.row, "col": self.mesh.col, "batch": run.batch.microbatch_size,
                 "sequence": families.tokens_of(run), "hidden": model.hidden,
                 "itemsize": DTYPES[run.precision].itemsize, "sum_itemsize": reduce_dtype(
                     run.tensor, DTYPES[run.precision]).itemsize}
        if block == "embedding":
            return _NOTHING_SENT if families.family_of(run) == "vit" else embedding_volume(
                self._scheme(), vocab=model.vocab, **shape)
        if block == "head":  # of a few classes it is nothing
            return _NOTHING_SENT if run.data.task != "lm" else head_volume(self._scheme(), vocab=model.vocab, **shape)
        again = "again" if self.others else "kept"
        layer = layer_volume(self._scheme(), recompute=again if recomputed else "none", last=not self.others, **shape)
        names = ("qkv", "projection") if block == "attention" else ("fc1", "fc2")
        parts = [layer.products[name] for name in names]
        forward, backward = (sum((getattr(part, way) for part in parts), Bytes()) for way in ("forward", "backward"))
        if run.tensor.keep_weights:  # they are gathered once a step, and not again for the backward
            backward = replace(backward, weights=max(0.0, backward.weights - forward.weights))
            forward = replace(forward, weights=forward.weights / self.count)
        return Volume(forward=forward, backward=backward)

    def _received(self, sizes: Bytes, way: int) -> float:
        messages = _MESSAGES[self._scheme()][way] / 2  # a layer is two blocks
        both = [(sizes.activations, self.groups["col"]), (sizes.weights, self.groups["row"])]
        starts = messages * self.cluster.collective_seconds * sum(group.members > 1 for _, group in both)
        if self._scheme() == "summa":
            roots = [each.members * tree_latency(each, self.cluster) for _, each in both if each.members > 1]
            return starts + messages * sum(roots) + sum(tree_seconds(size, each, self.cluster) for size, each in both)
        received = reduced_seconds if self._scheme() == "megatron" else received_seconds
        return starts + sum(received(size, round(messages * (group.members - 1)), group, self.cluster)
                            for size, group in both)

    def _collectives(self, stage: int) -> float:
        """Of one microbatch on the tensor mesh, forward and backward: how many."""
        axes = [group.members for group in (self.groups["row"], self.groups["col"]) if group.members > 1]
        forward, backward = (count / 2 * (sum(axes) if self._scheme() == "summa" else len(axes))
                             for count in _MESSAGES[self._scheme()])  # a layer is two blocks
        blocks = len(self.stages[stage])
        return blocks * forward + (blocks - self._first(stage)) * backward

    def way(self) -> Way:
        """The edges of the pipeline, as messages beside the computing."""
        if self.others:
            return DIRECT
        transfer, latency = zip(*self._edges(), strict=True) if self.mesh.pipe > 1 else ((), ())
        return Way(transfer=transfer, latency=latency)

    def _edges(self) -> list[tuple[float, float]]:
        """Seconds for which one message keeps each edge busy, and until it is there after that."""
        pipe, size, per_node = self.mesh.pipe, self.mesh.stage_size, self.cluster.devices_per_node
        edges = []
        for stage in range(pipe - 1):
            crossing = max(sum(rank // per_node != (rank + size) // per_node
                               for rank in range(first + stage * size, first + (stage + 1) * size))
                           for first in self._offsets())
            link = self.cluster.between if crossing else self.cluster.inside
            together = min(max(1, crossing), per_node)
            sent, gathered = self.stages[stage][-1].output_bytes, 0.0
            if self.others:
                group = self.groups["col"]
                sent, gathered = sent / size, received_seconds(sent * (size - 1) / size, size - 1, group, self.cluster)
            edges.append((sent / link.rate(together) + gathered, link.latency_seconds))
        return edges

    def _offsets(self) -> set[int]:
        """Where replicas begin on a node: they all wait for the one that lies worst."""
        replica, per_node = self.mesh.pipe * self.mesh.stage_size, self.cluster.devices_per_node
        return {data * replica % per_node for data in range(min(self.mesh.data, per_node))}

    def defer(self) -> int | Literal["auto"]:
        """Bytes of postponed weight gradients."""
        return 0 if not self.policy.defers or self.run.optim.update_in_backward else self.run.pipeline.defer_bytes

    # --- after the pipeline ------------------------------------------------------------------------------------------

    def _gradient_bytes(self) -> int:
        return reduce_dtype(self.run.optim, DTYPES[self.run.precision]).itemsize

    def _reduction(self, stage: int) -> float:
        group = self.groups["data"]
        if group.members == 1:
            return 0.0
        size = self._beside(stage) if group.crosses else self.trained[stage]
        return seconds("all-reduce", size * self._gradient_bytes(), group, self.cluster) \
            + (self._chunks(stage) - 1) * self._chunk_start(group)

    def _beside(self, stage: int) -> float:
        """Parameters of a rank on the node of this stage's first one, on average: they take turns on its link."""
        size, per_node = self.mesh.stage_size, self.cluster.devices_per_node
        found = []
        for first in self._offsets():
            node = (first + stage * size) // per_node
            here = {(rank - first) // size for rank in range(node * per_node, (node + 1) * per_node)
                    if 0 <= rank - first < size * self.mesh.pipe}
            found.append(max(sum(self.trained[other] for other in here), self.trained[stage]) / len(here))
        return max(found)

    def _chunk_start(self, group: Placed) -> float:
        link = self.cluster.between if group.crosses else self.cluster.inside
        return self.cluster.chunk_seconds + self.cluster.collective_seconds + 2 * (
            group.members - 1) * link.latency_seconds

    def _chunks(self, stage: int) -> int:
        optim = self.run.optim
        size = optim.bucket_size if optim.bucket_size != "auto" else (
            262_144 if self.cluster.device.cores is not None else 4_194_304)
        return max(1, -(-round(self.trained[stage]) // (size * optim.chunk_buckets)))

    def _update(self, stage: int) -> float:
        run, cluster = self.run, self.cluster
        count = self.trained[stage] / (self.mesh.data if run.optim.shard else 1)
        dtype = DTYPES[run.precision]
        half = is_half(dtype)
        wide = 4 if half else dtype.itemsize
        states = _UPDATED[run.optim.algorithm] + half
        gradient = wide if run.optim.accumulate == "fp32" and half else dtype.itemsize
        moved = count * (2 * wide * states + gradient + dtype.itemsize * (1 if half else 2))
        match run.optim.offload:
            case "stream":
                parts = [cluster.host_link.seconds(count * wide * states)] * 2 + [cluster.device.update_seconds(moved)]
                return sum(parts) if run.optim.buckets_in_flight == 1 else max(parts)  # in, out and update at once
            case "host":
                sent = cluster.host_link.seconds(count * max(gradient, dtype.itemsize))
                return max(sent, moved * self.local / cluster.host.memory_bandwidth)
            case _:
                return cluster.device.update_seconds(moved) / self._threads() * self._crowded()

    def _after(self, reduction: float, update: float, stage: int) -> float:
        """With a verdict on the whole gradient (loss scaling, clipping, a guard) updates begin when all is reduced;
        otherwise each chunk is updated while the next is reduced."""
        run, chunks = self.run, self._chunks(stage)
        if run.precision == "fp16" or run.optim.clip_norm or run.guard.bad_step in ("stop", "skip", "back"):
            return reduction + update
        return max(reduction, update) + min(reduction, update) / chunks

    def _link_bytes(self) -> dict[str, float]:
        mesh, run = self.mesh, self.run
        found: dict[str, float] = {}
        edges = [blocks[-1].output_bytes for blocks in self.stages[:-1]]
        if edges:
            ends = [0, *edges, 0]
            found["pipe"] = self.count * max(left + right for left, right in pairwise(ends))
        for axis, part in (("col", "activations"), ("row", "weights")):
            if getattr(mesh, axis) > 1:
                found[axis] = self.count * max(
                    sum(getattr(volume.forward, part) + getattr(volume.backward, part) for volume in (
                        self._block_volume(block.name, run.memory.checkpoint != "none") for block in blocks))
                    for blocks in self.stages)
        if mesh.data > 1:
            found["data"] = 2 * (mesh.data - 1) / mesh.data * self._gradient_bytes() * max(self.trained)
        if run.optim.offload in ("stream", "host"):
            states = _UPDATED[run.optim.algorithm] + is_half(DTYPES[run.precision])
            each = 4 * states if run.optim.offload == "stream" else DTYPES[run.precision].itemsize
            found["host"] = each * max(self.trained) / (mesh.data if run.optim.shard else 1)
        return found
