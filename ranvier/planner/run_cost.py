"""Cost of a run's step: its settings and counted blocks as input of `ranvier.cost.step`.

It is above the pipeline and the models, which determine the recomputed blocks, the form of a sample, and the layers of
a block that are split over the tensor mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.cost.blocks import BlockCost, ById, Stages
from ranvier.cost.hardware import Cluster, Device
from ranvier.cost.memory import segment_bytes
from ranvier.cost.step import Cost, PipelineNumbers, StageWork, Step, step_cost, step_lower_bound, step_pipeline
from ranvier.models import families
from ranvier.optim.rules import averages_of, rules_of, states_per_element, update_flops
from ranvier.plan.block_costs import build_on_meta
from ranvier.plan.cut import global_parameters
from ranvier.plan.limits import Segments, run_limits
from ranvier.planner.conditions import conditions_of, element_bytes, split_layers, work_of
from ranvier.planner.count import recomputed_runs
from ranvier.precision import DTYPES, is_half
from ranvier.schedule.limits import Limits
from ranvier.schedule.policies import policy_named


def run_cost(run: ResolvedRun, cluster: Cluster, stages: Stages, *, exact: bool = True,
             as_published: bool = False, limits: Limits | None = None) -> Cost:
    """Cost of a run with these blocks on each stage, counted for its microbatch on its tensor mesh. exact,
    as_published: as for `step_cost`. limits: as for `step_of`."""
    return step_cost(step_of(run, stages, cluster, limits), cluster, exact=exact, as_published=as_published)


def unlimited_limits(run: ResolvedRun) -> Limits:
    """Limits that allow any number of microbatches in flight, which is not slower, and needs no simulation. The bounds
    of a pipeline's time do not depend on deferral; the time after the pipeline is shortest without deferral, since
    gradient sums overlap with the entire last backward."""
    return Limits(in_flight=run.num_microbatches, deferred=(0,) * run.mesh.pipeline_size)


def widest_limits(run: ResolvedRun) -> Limits:
    """The widest limits of a rank with several stages that `computed_limits` tries, whatever memory they need."""
    pipe = run.placement.num_ranks
    return Limits(in_flight=2 * pipe, deferred=(2 * pipe,) * pipe, max_stored=2 * run.placement.num_stages)


def sample_step(run: ResolvedRun, blocks: Sequence[BlockCost]) -> Step:
    """A step from which `least_run_seconds` derives those of other meshes and microbatches. run: on one rank, with
    microbatches of one sample, without recomputation. blocks: counted for this run.

    All layers except the largest are marked as recomputed, if they are large enough inside for `auto` to recompute
    them.
    """
    step = step_of(run, [blocks], limits=unlimited_limits(run))
    layers = recomputed_runs(replace(run, memory=replace(run.memory, recompute=1)), [blocks])[0]
    largest = max(layers, key=lambda places: sum(blocks[place].flops for place in places), default=range(0))
    gains = all(sum(blocks[place].operand_bytes for place in places) > 2 * blocks[places.start].input_bytes
                for places in layers)
    again = tuple(place for places in layers if places != largest for place in places) if gains else ()
    ends = tuple(places.stop - 1 for places in layers)
    return replace(step, stages=(StageWork(blocks=tuple(blocks), recomputed=again, ends=ends),),
                   split_layers=split_layers(run))


def least_run_seconds(run: ResolvedRun, cluster: Cluster, sample: Step) -> tuple[float, float]:
    """Lower bounds of the time of a run's step, without recomputation and under `auto`, by the operations of its
    products and the messages of its tensor mesh: as if devices did nothing else, at the full rate of large products,
    evenly divided. With several layers, or several microbatches in flight, `auto` recomputes every layer of a stage, so
    at most one layer of the model is computed only once. sample: from `sample_step`."""
    stages = (sample.stages[0], *(StageWork(blocks=()),) * (run.placement.num_stages - 1))
    ideal = replace(cluster, device=_without_latency(ById(cluster.device)))
    least, recomputing = step_lower_bound(replace(sample, run=run, stages=stages), ideal,
                                          part=run.batch.microbatch_size / run.mesh.stage_size)
    several = run.placement.num_stages == 1 or min(run.num_microbatches, run.mesh.pipeline_size) > 1
    return least, recomputing if several else least


@lru_cache(maxsize=64)
def _without_latency(device: ById[Device]) -> Device:
    """A device whose kernels take only the time of their operations at the full rate."""
    return replace(device.it, multiprocessors=None, memory_bandwidth=1e24, memory_share=1.0,
                   reduction_share=None, operation_seconds=0.0)


def run_pipeline(run: ResolvedRun, cluster: Cluster, stages: Stages, *, as_published: bool = False) -> PipelineNumbers:
    """Input of the simulator for such a run."""
    return step_pipeline(step_of(run, stages, cluster), cluster, as_published=as_published)


def step_of(run: ResolvedRun, stages: Stages, cluster: Cluster | None = None, limits: Limits | None = None) -> Step:
    """One step of the run. cluster: as for `conditions_of`. limits: the schedule's, if known."""
    recomputed = recomputed_runs(run, stages)
    limits = limits or run_limits(run, stages, recomputed, conditions_of(run, stages, recomputed, cluster))
    own, more = (families.flops_per_sample(run, recomputed=again) for again in (False, True))
    if run.memory.recompute in ("alternate", "selective"):
        each = recomputed_runs(replace(run, memory=replace(run.memory, recompute=1)), stages)
        more = own + (more - own) * sum(block.repeated_flops for block in _blocks_of(stages, recomputed)) / max(
            1, sum(block.flops for block in _blocks_of(stages, each)))
    return Step(
        run=run, policy=policy_named(run.pipeline.policy), limits=limits, bytes=element_bytes(run),
        stages=work_of(stages, recomputed),
        num_states=states_per_parameter(run), tokens=families.tokens_of(run),
        whole_tensors=rules_of(run.optim).tensors is not None, update_flops=_update_of(run)[1],
        flops_per_sample=own,
        recomputed_flops_per_sample=more,
        split_layers=split_layers(run) if run.mesh.stage_size > 1 else {})


def _blocks_of(stages: Stages, segments: Segments) -> list[BlockCost]:
    """The blocks in these segments."""
    return [blocks[place] for blocks, again in zip(stages, segments, strict=True) for places in again
            for place in places]


def states_per_parameter(run: ResolvedRun) -> float:
    """Average number of values that an update reads and writes per parameter: moments, averages and the master copy."""
    return _update_of(run)[0] + len(averages_of(run.optim)) + is_half(DTYPES[run.precision])


SAVED_BYTES_PER_SECOND = 2e9
"""Write speed of all ranks together, to a shared file system: cautious, so that a large checkpoint has enough time."""


def saved_bytes(run: ResolvedRun) -> float:
    """Bytes of a checkpoint of the run: its parameters, and the states of trained parameters."""
    model, sizes = families.model_of(run), element_bytes(run)
    states = sizes.state * states_per_parameter(run)
    return sum(one.numel * (sizes.parameter + states * one.trainable)
               for one in global_parameters(model, build_on_meta(model)) if one.is_owner)


def _update_of(run: ResolvedRun) -> tuple[float, float]:
    """Average number of values that the optimizer keeps per parameter of the run's model, and operations of one update
    in addition to those of every element."""
    rules = rules_of(run.optim)
    if rules.tensors is None:
        return len(rules.elementwise.states), 0.0
    return _update_of_tensors(replace(Run(), model=run.model, data=run.data, optim=run.optim))


@lru_cache(maxsize=32)
def _update_of_tensors(run: Run) -> tuple[float, float]:
    """Cost of an update, which depends on the run's model, task and optimizer alone."""
    model, rules = families.model_of(run), rules_of(run.optim)
    parameters = global_parameters(model, build_on_meta(model))
    return states_per_element(rules, parameters), update_flops(rules, parameters)


# --- least memory -----------------------------------------------------------------------------------------------------

# Lower bounds of the device memory of a rank, by arithmetic on counted blocks: fast, and below `Work.memory`.
#
# `least_device_bytes` uses the blocks of each stage as on its ranks, `least_bytes_of_any_cut` the blocks of the full
# model on one rank. They count parameters, gradients and optimizer states, and the activations that a stage stores
# under 1F1B, since no schedule stores less. All else (buffers, messages, products in progress) is left out.


def least_device_bytes(run: ResolvedRun, stages: Stages) -> tuple[float, float]:
    """Least bytes of the rank that needs most; and those of its optimizer states, all of which hybrid offload counts
    there. stages: the blocks of each stage, counted for the run."""
    optim, sizes, pipe = run.optim, element_bytes(run), run.mesh.pipeline_size
    states = 0.0 if optim.offload in ("stream", "host") else sizes.state * states_per_parameter(run) / (
        run.mesh.num_replicas if optim.shard else 1)
    of_each = sizes.parameter + (0 if optim.update_in_backward else sizes.gradient)
    frozen = 0 if run.lora.base_format != "precision" or run.model.tied else sizes.parameter
    again, in_flight = recomputed_runs(run, stages), run.pipeline.in_flight
    most = min(run.num_microbatches, pipe if in_flight == "auto" else in_flight)
    found = []
    for rank in range(pipe):
        held = run.placement.stages_of(rank)
        blocks = [block for stage in held for block in stages[stage]]
        activations = []
        for stage in held:
            inside = set(chain.from_iterable(again[stage]))
            kept = sum(block.kept_bytes + block.loss_bytes for place, block in enumerate(stages[stage])
                       if place not in inside)
            activations.append(kept + sum(segment_bytes(stages[stage], places) for places in again[stage] if places))
        stored = min(most, pipe - rank) if run.placement.per_rank == 1 else 1
        of_states = states * sum(block.num_owned for block in blocks)
        found.append((sum(block.num_owned * of_each + (block.num_parameters - block.num_trainable) * frozen
                          for block in blocks) + of_states
                      + stored * max(activations)
                      + (max(max(stages[stage][-1].backward_bytes - stages[stage][-1].loss_bytes,
                             stages[stage][-1].loss_forward_bytes) for stage in held)
                         if run.mesh.stage_size == 1 else 0), of_states))
    return max(found)


def least_bytes_of_any_cut(run: ResolvedRun, sample: Sequence[BlockCost]) -> float:
    """Least bytes of the rank that needs most, for any cut into stages, and with all optimizer states on the host.
    sample: all blocks, counted for one sample on one rank.

    If a block b needs w_r(b) on rank r, then for any factors f_r that add up to 1, the rank that needs most needs at
    least the sum over blocks of min over r of f_r w_r(b); here f_r is proportional to 1 / sum of w_r.
    """
    sizes, mesh = element_bytes(run), run.mesh
    of_each = (sizes.parameter + (0 if run.optim.update_in_backward else sizes.gradient)) / mesh.stage_size
    share = run.batch.microbatch_size / mesh.stage_size
    in_flight = mesh.pipeline_size if run.pipeline.in_flight == "auto" else run.pipeline.in_flight
    most = min(run.num_microbatches, in_flight) if run.placement.per_rank == 1 else 1
    kinds, kind_of = _kinds(ById(sample), str(run.memory.recompute))
    needs = [(of_each * owned, share * kept) for owned, kept in kinds]
    stored = Counter(min(most, mesh.pipeline_size - rank) for rank in range(mesh.pipeline_size))

    def total(values: Sequence[float]) -> float:
        """The sum over all blocks. values: of each kind of block."""
        return sum([values[kind] for kind in kind_of])

    sums = {count: total([fixed + count * kept for fixed, kept in needs]) or 1.0 for count in stored}
    return total([min((fixed + count * kept) / sums[count] for count in stored) for fixed, kept in needs]) / sum(
        ranks / sums[count] for count, ranks in stored.items())


@lru_cache(maxsize=64)
def _kinds(sample: ById[Sequence[BlockCost]], recompute: str) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """(parameters, kept bytes) of each kind of block; and the kind of each block."""
    kinds: dict[tuple[int, int], int] = {}
    kind_of = []
    for block in sample.it:
        kept = {"none": block.operand_bytes, "selective": block.input_bytes + block.repeated.kept_bytes}.get(
            recompute, 0)
        kind_of.append(kinds.setdefault((block.num_owned, kept), len(kinds)))
    return tuple(kinds), tuple(kind_of)
