"""Bytes on each rank, by category, from counted blocks and closed forms; and remedies if they do not fit.

    device   parameters   2 or 4 (8) bytes each        host   master      if states are offloaded
             gradients    in their accumulation dtype         moments
                                                              checkpoint  copies of a rank's share, while it is written
             master       fp32 copies of half-precision parameters
             moments      two of AdamW, one of SGD
             average      the moving average of parameters      copies      of the state after the last two steps
                          (optim.ema)                                       (launch.survive-losses)
             buckets      streamed states (optim.offload), and buffers for scaled gradients
             activations  of the microbatches that a stage stores
             deferred     operands of deferred weight gradients
             inputs       and targets of all microbatches of a step, on CUDA of two steps
             workspace    temporary memory of a forward and a backward, including that of a product in float8; or, at
                          the end of the step, copies of values that an update may have to leave unchanged
             messages     posted receives, and messages that arrive before their turn, such as gradients of ties
             tensor mesh  gather buffers of products on several rows and columns, and weights that stay gathered
             reduction    buffers of gradient sums between replicas, and buffers from which parameters are sent
             arriving     small sums of gradients, which all replicas gather

Parameters, gradients, states and buckets are what the run's optimizer allocates, built on the meta device
(`ranvier.planner.count`); the others are bounds, from the operations of one microbatch. Activations stored by a stage:
AxoNN (Singh and Bhatele, 2022), section V-A; streamed states: its section V-B. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from types import MappingProxyType
from typing import Literal

from ranvier.config.resolve import Facts, ResolvedRun, auto_offload_share, resolve
from ranvier.config.rules import recompute_problems
from ranvier.config.run import Memory
from ranvier.cost.blocks import BlockCost
from ranvier.errors import ConfigError
from ranvier.schedule.limits import Limits
from ranvier.schedule.policies import policy_named
from ranvier.schedule.schedule import Policy

PROCESS_BYTES = 330 << 20
"""Baseline host memory of a rank: interpreter, torch, this package (measured on Linux, CPU build)."""

KEPT_STEPS = 2
"""Number of finished steps whose state each rank keeps, if the run survives losses (ranvier.train.survival)."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Predicted peak bytes on each of the `ranks` ranks at a place in the pipeline: category -> bytes."""

    pipeline_rank: int
    ranks: int
    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """Bytes of all categories on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of all categories in the host's memory."""
        return sum(self.host.values())


@dataclass(frozen=True, kw_only=True)
class StoredMicrobatches:
    """Facts, besides its blocks, that decide the memory of a stage's activations."""

    run: ResolvedRun
    stage: int
    limits: Limits
    at_peak: tuple[int, float] | None = None
    """From a simulation: the number of microbatches that the stage stores when its rank needs the most memory, and the
    number of others whose weight gradients wait then."""

    @property
    def policy(self) -> Policy:
        """The policy of the run's schedule."""
        return policy_named(self.run.pipeline.policy)

    @property
    def deferred(self) -> int:
        """Number of microbatches whose weight gradients may wait."""
        return self.limits.deferred[self.run.placement.rank_of(self.stage)]

    @property
    def stored(self) -> int:
        """Number of microbatches whose activations the stage stores at the same time."""
        return self._stored_on(self.stage) if self.at_peak is None else self.at_peak[0]

    @property
    def stored_before(self) -> int:
        """Largest number of microbatches that the previous stage stores at the same time, which may have come here."""
        if self.at_peak is not None or self.run.placement.per_rank > 1 or not self.stage:
            return self.limits.in_flight
        return self._stored_on(self.stage - 1)

    def _stored_on(self, stage: int) -> int:
        """The number stored on `stage` by the policy; several stages of a rank have no separate bounds."""
        placement, count = self.run.placement, self.run.num_microbatches
        limit = self.policy.in_flight(self.limits.in_flight, count)
        most = self.policy.stored(limit, stage, placement.num_stages) if placement.per_rank == 1 else limit
        return min(most, count)

    @property
    def waiting(self) -> float:
        """Number of others whose weight gradients wait. Each of the last microbatches is stored or waits."""
        if self.at_peak is not None:
            return self.at_peak[1]
        count, last = self.run.num_microbatches, self.limits.last
        return max(0, min((count if last is None else min(last, count)) - self.stored, self.deferred))


@dataclass(frozen=True, kw_only=True)
class TiedGradients:
    """Gradients of tied parameters that a stage sends to their owners, and receives as an owner."""

    sent: Mapping[int, int] = field(default_factory=dict)
    """Place on the stage -> bytes that are sent when the backward of a batch has finished that block."""
    arriving: int = 0
    """Bytes that arrive when the last microbatch's backward begins on the stage of another end."""
    distance: int = 1
    """Number of stages from here to there. With stages of similar time this many microbatches are stored then."""


def activation_bytes(costs: Sequence[BlockCost], segments: Sequence[range], microbatches: StoredMicrobatches,
                     kept_again: Mapping[str, int], gradients: Sequence[int], ties: TiedGradients | None = None,
                     updates: Mapping[int, int] = MappingProxyType({}), buffers: Sequence[int] = ()
                     ) -> dict[str, int]:
    """Bytes that the microbatches in flight keep alive on a stage of these blocks, by category; "recomputed" are those
    of activations that a backward computes again.

    Args:
        costs: of one microbatch.
        segments: runs of blocks, as places on the stage, that are recomputed in their backward.
        kept_again: block -> bytes that it keeps when it is recomputed, if that differs.
        gradients: for each block, bytes that gradients of weights take before they are added to those of the batch.
        ties: gradients of tied parameters that the stage sends and receives.
        updates: place on the stage -> bytes of an update that runs after the backward of that block.
        buffers: for each block, bytes of its buffers, which the first forward of a segment copies.
    """
    ties = ties or TiedGradients()
    run, stored, defer_bytes = microbatches.run, microbatches.stored, microbatches.run.pipeline.defer_bytes
    inside = {place: kept_again.get(costs[place].name, costs[place].inside_bytes)
              for segment in segments for place in segment}
    outside = [cost for place, cost in enumerate(costs) if place not in inside]
    waiting, may_wait = 0, 0
    if microbatches.policy.defers and not run.optim.update_in_backward:
        may_wait = microbatches.deferred if defer_bytes == "auto" else defer_bytes
        operands = operand_bytes(outside, ends_model=microbatches.stage == run.placement.num_stages - 1)
        waiting = (round(microbatches.waiting * operands) if defer_bytes == "auto"
                   else min(defer_bytes, run.num_microbatches * operands))
    each = (sum(cost.kept_bytes for cost in outside) + sum(segment_bytes(costs, segment) for segment in segments)
            + costs[-1].loss_bytes)
    recomputed, workspace = _bytes_beyond_stored(costs, segments, inside, gradients, ties.sent, updates,
                                                 waits=bool(may_wait))
    for segment in segments if any(buffers) else ():
        copied = sum(buffers[place] for place in segment)
        behind = costs[-1].loss_bytes + sum(cost.kept_bytes for place, cost in enumerate(costs)
                                            if place >= segment.stop and place not in inside)
        forward = max(costs[place].forward_bytes + costs[place].kept_bytes for place in segment)
        workspace = max(workspace, copied + forward - behind - recomputed)
    arriving = max(0, ties.arriving - each * max(0, stored - ties.distance))
    return {"activations": stored * each,
            "recomputed": recomputed,
            "deferred": waiting,
            "workspace": workspace,
            "messages": _message_bytes(costs, microbatches, each) + arriving}


def _bytes_beyond_stored(costs: Sequence[BlockCost], segments: Sequence[range], inside: Mapping[int, int],
                         gradients: Sequence[int], sent: Mapping[int, int], updates: Mapping[int, int], *, waits: bool
                         ) -> tuple[int, int]:
    """Peak bytes that a forward or a backward needs besides those that one microbatch stores in all blocks: for blocks
    that are recomputed, and the rest. A forward reaches a block before later blocks store anything; a backward reaches
    it when their memory is freed, except for deferred operands.

    inside: place in a segment -> bytes that its second run keeps. gradients, updates: as for `activation_bytes`. sent:
    of `TiedGradients`. waits: whether products for weights' gradients may wait.
    """
    recomputed, most = 0, max(costs[-1].loss_forward_bytes, costs[-1].loss_backward_bytes)
    stored = left = gone = costs[-1].loss_bytes  # after a block: in total; freed in its backward, or if nothing waits
    sending = 0  # gradients of ties, which have all of their products
    segment_of = {place: segment for segment in segments for place in segment}
    for place in reversed(range(len(costs))):
        cost, segment = costs[place], segment_of.get(place, range(0))
        if place + 1 == segment.stop:
            again, leaving = sum(inside[each] for each in segment), cost.output_bytes
            recomputed = max(recomputed, again - left)
        backward = cost.backward_bytes + max(gradients[place] - left, sending - gone)
        if segment:
            most = max(most, again + backward, again + leaving + cost.forward_bytes - left)
            again -= inside[place]
        else:
            most = max(most, backward, cost.forward_bytes - stored)
        if not segment or place == segment.start:
            kept = segment_bytes(costs, segment) if segment else cost.kept_bytes
            stored, gone = stored + kept, gone + kept
            left += 0 if waits and cost.defers and not segment else kept
        most = max(most, updates.get(place, 0) + cost.input_bytes - gone)
        sending += sent.get(place, 0)
    return recomputed, max(0, max(most, sending - gone) - recomputed)


def _message_bytes(costs: Sequence[BlockCost], microbatches: StoredMicrobatches, each: int) -> int:
    """Bytes of messages to and from the neighbouring stages: a posted receive for each; messages that have arrived and
    are not stored yet, of which there are fewer if more is stored; the gradient of the current backward, and the next
    one.
    """
    stage, stored = microbatches.stage, microbatches.stored
    entering = costs[0].input_bytes if stage else 0
    leaving = costs[-1].output_bytes if stage < microbatches.run.placement.num_stages - 1 else 0
    early = max((microbatches.stored_before - stored) * entering, microbatches.stored_before * entering - stored * each)
    unsaved = stored * costs[0].unsaved_input_bytes if stage else 0
    return entering + early + unsaved + 3 * leaving


def segment_bytes(costs: Sequence[BlockCost], segment: Sequence[int]) -> int:
    """Bytes that one microbatch keeps of these blocks until they are recomputed: the input, and kept outputs."""
    return costs[segment[0]].input_bytes + sum(costs[place].kept_outputs_bytes for place in segment)


def operand_bytes(costs: Sequence[BlockCost], *, ends_model: bool) -> int:
    """Approximate bytes that the deferred weight gradients of one microbatch keep alive in these blocks.

    ends_model: whether the last one is the head, whose output's gradient is the largest tensor.
    """
    products = [cost for cost in costs if cost.flops]
    ends = ends_model and bool(products) and products[-1].defers
    return sum(cost.kept_bytes for cost in products if cost.defers) + (products[-1].output_bytes if ends else 0)


def checkpoint_bytes(sizes: Sequence[int], *, state_bytes: int, element_bytes: int, data: int, sharded: bool,
                     random_state_bytes: int, updated: int = 0, whole_bytes: int = 0, more_bytes: int = 0) -> int:
    """Most host bytes that a rank copies at the start of a checkpoint: replicas divide what all of them hold.

    sizes: elements of each parameter that the rank owns. state_bytes: of all its optimizer states. updated: elements
    that it updates, which it writes if states are sharded, even if they exceed its equal share. whole_bytes: of states
    with their own shape, which are written by the rank that writes a parameter's first element. more_bytes: of buffers,
    which the first rank writes, and of frozen parameters in fp32 beyond `element_bytes`.
    """
    share = max(sum(-(-size // data) for size in sizes), updated)
    states = state_bytes if sharded else -(-(state_bytes - whole_bytes) // data) + whole_bytes + 16 * len(sizes)
    return share * element_bytes + states + more_bytes + random_state_bytes


# ---------------------------------------------------------------------- comparison with available memory

def too_large(memory: Sequence[RankMemory], *, place: Literal["device", "host", "both"], processes: int,
              available_bytes: int, run: ResolvedRun, process_bytes: int = 0) -> ConfigError | None:
    """The error for ranks that need more memory than is available, with remedies, the least costly first; None if they
    fit.

    Args:
        memory: one entry for each rank that shares a machine.
        place: what is compared: the device of the rank that needs the most, the host for all ranks, or both (if the
            device is a CPU).
        processes: number of ranks that share `available_bytes`. process_bytes: memory of each besides its tensors.
    """
    def needed(entry: RankMemory) -> int:
        return (process_bytes + (entry.device_bytes if place != "host" else 0)
                + (entry.host_bytes if place != "device" else 0))

    worst = max(memory, key=needed)
    total = sum(map(needed, memory)) if processes > 1 else needed(worst)
    if total <= available_bytes:
        return None
    who = f"{processes} ranks here need" if processes > 1 else f"a rank of stage {worst.pipeline_rank} needs"
    return ConfigError(f"is too small: {who} {total / 2**20:,.0f} MiB, and there are "
                       f"{available_bytes / 2**20:,.0f}; of stage {worst.pipeline_rank}: {_table_line(worst, place)}",
                       code="memory-too-small", where=f"memory of the {'device' if place == 'device' else 'machine'}",
                       remedy="In this order: " + "; ".join(remedies(
                           run, shared=place == "both", on_host=place == "host")) + ".")


def _table_line(entry: RankMemory, place: Literal["device", "host", "both"]) -> str:
    parts = {**(entry.device if place != "host" else {}),
             **{f"host {name}": size for name, size in entry.host.items() if place != "device"}}
    return ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items() if size)


def remedies(run: ResolvedRun, *, shared: bool, on_host: bool = False) -> list[str]:
    """Remedies that reduce memory, the least costly first. shared: device and host are the same memory. on_host: the
    host's memory is too small."""
    found = [] if on_host else _smaller_activations(run)
    if run.mesh.num_replicas > 1 and not run.optim.shard:
        found.append("set `--optim.shard true`")
    if run.precision in ("fp32", "fp64"):
        found.append("set `--precision bf16`")
    if not shared and run.optim.offload in ("stream" if on_host else "none", "auto"):
        found.append("set `--optim.offload hybrid`")
    if run.num_microbatches == 1 and not (run.optim.update_in_backward or run.optim.clip_norm
                                          or run.precision == "fp16"):
        found.append("set `--optim.update-in-backward true`")
    if run.mesh.pipeline_size > 1 and policy_named(run.pipeline.policy).defers:
        if run.pipeline.memory is not None and run.pipeline.memory > 1:
            found.append(f"lower `--pipeline.memory` to 1 (it is {run.pipeline.memory:g})")
        else:
            found.append("set `--pipeline.policy 1f1b`")
    if run.launch.survive_losses:
        found.append("leave `--launch.survive-losses` out")
    if run.checkpoint.background and on_host:
        found.append("set `--checkpoint.background false`")
    found.append("raise `--mesh.pipe`, with more ranks")
    return found


def _smaller_activations(run: ResolvedRun) -> list[str]:
    """Remedies that reduce the memory of activations, the least costly first."""
    found, columns = [], run.mesh.count(run.mesh.over(splits_features=True))
    if run.tensor.scheme == "megatron" and columns > 1 and not (
            run.tensor.sequence_sharding or run.model.sequence % columns):
        found.append("set `--tensor.sequence-sharding true`")
    if run.batch.microbatch_size > 1:
        found.append(f"lower `--batch.microbatch-size` (it is {run.batch.microbatch_size})")
    if run.memory.recompute == "none" and not any(recompute_problems(
            Memory(recompute="selective"), run.mesh, compile=run.model.compile, float8=run.model.float8)):
        found.append("set `--memory.recompute selective`, or to auto if that is not enough")
    elif run.memory.recompute in ("none", "selective", "alternate"):
        found.append("set `--memory.recompute auto`")
    return found


# --- optimizer states in host memory ----------------------------------------------------------------------------------

# Share of the optimizer states that fits in a device's memory, while the others are streamed from the host (offload
# hybrid).
#
#     needed, no states on the host  |-- parameters, gradients, activations --|------------ states ------------|
#     free                           |----------------------------------------------------------|
#     share in host memory                                                                       |------------|


_LEAST = 1e-6
"""A share of one bucket, for which the streaming buffers exist."""


def with_offload_share(
    run: ResolvedRun, predict: Callable[[ResolvedRun], Sequence[RankMemory]], free_bytes: int, *,
    fits_without: bool | None = None
) -> ResolvedRun:
    """`run` with the share of its states in host memory resolved if it is auto: the smallest share with which the rank
    that needs the most memory fits in `free_bytes` of its device. predict: returns the memory of ranks. fits_without:
    whether it fits with no states there, if that is known."""
    if run.optim.offload != "hybrid" or run.optim.offload_share != "auto":
        return run

    def needed(share: float) -> int:
        there = replace(run, optim=replace(run.optim, offload_share=share))
        return max(entry.device_bytes for entry in predict(there))

    if run.launch.device != "cuda" or (needed(0.0) <= free_bytes if fits_without is None else fits_without):
        return resolve(run, Facts(offload_share=auto_offload_share(run.launch.device, 0, 1, free_bytes)))
    least = needed(_LEAST)
    leaves = max(1, least - needed(1.0))
    share = auto_offload_share("cuda", least, leaves, free_bytes)
    while share < 1.0 and (missing := needed(share) - free_bytes) > 0:  # states differ between buckets
        share = min(1.0, share + ceil(1000 * missing / leaves) / 1000)
    return resolve(run, Facts(offload_share=share))
