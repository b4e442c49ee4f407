"""Candidates of a search: every mesh and microbatch, and variants of one that need less memory or less time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Literal, TypeVar

from ranvier.config.resolve import Facts, ResolvedRun, resolve, stage_placement
from ranvier.config.resolve import bucket_size as resolve_bucket_size
from ranvier.config.rules import recompute_problems
from ranvier.config.run import Memory, MeshSettings, Run, TensorParallel
from ranvier.cost.device_overhead import usable_bytes, with_overhead
from ranvier.cost.hardware import Cluster
from ranvier.cost.memory import RankMemory, with_offload_share
from ranvier.cost.step import Cost
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import AXES, Mesh, divisors
from ranvier.models import families
from ranvier.plan.limits import first_that_fits
from ranvier.planner.elastic_plan import Course
from ranvier.planner.problems import problems
from ranvier.planner.run_cost import run_cost
from ranvier.planner.work import Work, excess
from ranvier.precision import DTYPES
from ranvier.schedule.policies import policy_named

Setting = Literal["mesh", "microbatch", "in-flight", "recompute", "offload", "shard", "chunks", "elastic", "scheme",
                  "stages-per-rank", "precision"]
SEARCHED: tuple[Setting, ...] = ("mesh", "microbatch", "in-flight", "recompute", "offload", "shard", "chunks",
                                 "elastic", "scheme", "stages-per-rank")
"""Settings that are searched by default; the run's precision stays."""
AnyRun = TypeVar("AnyRun", bound=Run)
LARGEST_STAGE = 64
"""Most ranks of one tensor mesh."""
_LARGEST_MICROBATCH = 64
"""Most samples of a microbatch on one row."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration. reason: why it is impossible; empty if it fits. measured_seconds: of a step, if it was run.
    course: of the entire run, if its layers freeze."""

    run: ResolvedRun
    cost: Cost
    memory: tuple[RankMemory, ...] = ()
    reason: str = ""
    measured_seconds: float | None = None
    course: Course | None = None

    def expected_seconds(self, measured_over_predicted: float) -> float:
        """Seconds of a step: measured, else predicted and corrected."""
        return self.measured_seconds or measured_over_predicted * self.cost.seconds

    def ranked_seconds(self, measured_over_predicted: float = 1.0) -> float:
        """Seconds of the entire run, if its layers freeze, else of a step: measured, else predicted and corrected."""
        step = self.expected_seconds(measured_over_predicted)
        return self.course.seconds * step / self.cost.seconds if self.course else step

    @property
    def fits(self) -> bool:
        """Whether it can be run on the cluster."""
        return not self.reason


def predict(run: ResolvedRun, cluster: Cluster, work: Work | None = None, *, exact: bool = True) -> Candidate:
    """The prediction for one configuration without variants, with its memory."""
    work = work or Work()
    run = with_share(on_cluster(run, cluster), cluster, work)
    found = Candidate(run=run, cost=run_cost(run, cluster, work.stages(run), exact=exact))
    return with_memory(found, cluster, work, exact=exact)


def with_memory(candidate: Candidate, cluster: Cluster, work: Work, *, exact: bool = True) -> Candidate:
    """The candidate with the memory that `ranvier check` predicts, and the reason if it exceeds the cluster's; with
    schedule limits that need less memory, if these make it fit."""
    try:
        run, memory = first_that_fits(candidate.run, partial(work.memory, cluster=cluster),
                                      lambda run, memory: not excess(run, cluster, memory))
    except RanvierError as problem:
        return replace(candidate, reason=str(problem))
    cost = candidate.cost if run is candidate.run else run_cost(run, cluster, work.stages(run), exact=exact)
    return replace(candidate, run=run, cost=cost, memory=memory, reason=excess(run, cluster, memory))


def with_share(run: ResolvedRun, cluster: Cluster, work: Work, *, fits_without: bool | None = None) -> ResolvedRun:
    """The run with the share of its states in host memory that is needed to fit the cluster's devices, including
    allocator overhead: a plan that fills the device must be able to start. fits_without: see `with_offload_share`."""
    return with_offload_share(run, lambda run: [with_overhead(entry) for entry in work.memory(run, cluster=cluster)],
                              cluster.device.memory_bytes - cluster.device.reserved_bytes, fits_without=fits_without)


def variants(run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting] = SEARCHED
             ) -> Iterator[ResolvedRun]:
    """The `possible` runs whose settings are compatible."""
    return (candidate for candidate in possible(run, cluster, ranks, searched) if not problems(candidate))


def possible(run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting] = SEARCHED) -> Iterator[ResolvedRun]:
    """Every mesh and microbatch, with the least memory saving; not all have compatible settings."""
    if isinstance(run.mesh, Mesh):
        run.mesh.require_known_axes("the planner")
    meshes = [run.mesh] if "mesh" not in searched and isinstance(run.mesh, Mesh) else list(_meshes(run, ranks))
    precisions = [name for name in ("bf16", "fp16", "fp32") if name in cluster.device.rates
                  ] if "precision" in searched else [run.precision]
    for mesh in meshes:
        if run.batch.global_size < mesh.num_replicas:
            continue
        size = run.batch.microbatch_size
        sizes = _microbatches(run, mesh) if "microbatch" in searched or size == "auto" else [size]
        tensors = _schemes(run, mesh) if "scheme" in searched else [run.tensor]
        for tensor, precision, size in product(tensors, precisions, sizes):
            yield resolve(replace(
                run, tensor=tensor, precision=precision,
                memory=replace(run.memory, recompute="none") if "recompute" in searched else run.memory,
                optim=replace(run.optim, offload="none" if "offload" in searched else run.optim.offload,
                              shard=mesh.num_replicas > 1 and ("shard" in searched or run.optim.shard)),
                pipeline=run.pipeline if run.mesh.pipe in (mesh.pipe, "auto") else replace(
                    run.pipeline, boundaries=None, in_flight="auto", deferred=None, defer_last=None)),
                Facts(mesh=mesh, microbatch_size=size))


def memory_saving_variants(run: ResolvedRun, cluster: Cluster, searched: Sequence[Setting]) -> Iterator[ResolvedRun]:
    """The same mesh and microbatch with more memory saving. With recomputation no weight gradient is deferred."""
    memories = [run.memory]  # the first is the run's own, which is tried already
    if "recompute" in searched and run.memory.recompute == "none":
        memories = [memory for memory in (Memory(), Memory(recompute="selective"), Memory(recompute="auto")) if not any(
            recompute_problems(memory, run.mesh, compile=run.model.compile, float8=run.model.float8))]
    offloads = [run.optim.offload]
    if cluster.device.cores is None and "offload" in searched:
        offloads = ["none", "stream", "host", "hybrid"]
    elif cluster.device.cores is None and run.optim.offload == "auto":  # auto streams if it must
        offloads = ["auto", "stream"]
    deferred = [run.pipeline.defer_bytes]
    if "in-flight" in searched and policy_named(run.pipeline.policy).defers and run.mesh.pipeline_size > 1:
        deferred.append(0)
    for memory, offload, defer_bytes in list(product(memories, offloads, dict.fromkeys(deferred)))[1:]:
        if memory.recompute != "none" and defer_bytes != deferred[0]:
            continue
        yield replace(run, memory=memory,
                      optim=replace(run.optim, offload=offload,
                                    offload_share=run.optim.offload_share if "offload" not in searched else "auto"),
                      pipeline=replace(run.pipeline, defer_bytes=defer_bytes))


def _meshes(run: Run, ranks: int) -> Iterator[Mesh]:
    """All meshes of `ranks` ranks that agree with the run's given axes."""
    given = MeshSettings(data="auto", pipe="auto", row="auto", col="auto") if isinstance(run.mesh, Mesh) else run.mesh
    for pipe in divisors(ranks):
        for stage in divisors(ranks // pipe):
            if stage_placement(pipe, run.pipeline).num_stages > families.num_blocks(run) or stage > LARGEST_STAGE:
                continue
            for row in divisors(stage):
                sizes = {"data": ranks // pipe // stage, "pipe": pipe, "row": row, "col": stage // row}
                if all(getattr(given, axis) in (size, "auto") for axis, size in sizes.items()):
                    with suppress(ConfigError):  # a tile that does not divide this one
                        yield given.with_sizes(**sizes)


def _microbatches(run: Run, mesh: Mesh) -> list[int]:
    """Microbatch sizes: powers of two times the rows, and divisors of a replica's share of the batch; at most 64 per
    row."""
    share = -(-run.batch.global_size // mesh.num_replicas)  # for `mesh`, which is not the run's yet
    most = min(share, _LARGEST_MICROBATCH * mesh.microbatch_parts)
    powers = {mesh.microbatch_parts << power for power in range(share.bit_length())}
    return [size for size in range(mesh.microbatch_parts, most + 1, mesh.microbatch_parts)
            if size in powers or share % size == 0]


def _schemes(run: Run, mesh: Mesh) -> list[TensorParallel]:
    """Schemes that compute differently on this mesh: with rows alone all schemes are the same as stationary, SUMMA is
    for rows and columns, and Megatron-LM's is for columns alone."""
    if mesh.stage_size == 1:
        return [run.tensor]
    names: list[Literal["stationary", "summa", "megatron"]] = ["stationary"]
    if mesh.col > 1:
        names.append("megatron" if mesh.row == 1 else "summa")
    shardings = [False, True] if mesh.col > 1 and run.model.sequence % mesh.col == 0 else [False]
    return [replace(run.tensor, scheme=name, sequence_sharding=sharding)
            for name in names for sharding in (shardings if name != "summa" else [False])]


def on_cluster(run: AnyRun, cluster: Cluster) -> AnyRun:
    """The run on the cluster's kind of device."""
    return replace(run, launch=replace(run.launch, device="cpu" if cluster.device.cores is not None else "cuda"))


def in_flight_variants(run: ResolvedRun) -> list[ResolvedRun]:
    """The run with other in-flight limits."""
    if run.mesh.pipeline_size == 1 or run.pipeline.policy == "gpipe":
        return []
    return [replace(run, pipeline=replace(run.pipeline, in_flight=factor * run.mesh.pipeline_size))
            for factor in (2, 3)]


def stage_variants(run: ResolvedRun) -> list[ResolvedRun]:
    """The run with two or four stages on each rank of its pipeline, if it has one stage per rank, in its own placement
    and interleaved."""
    pipe = run.mesh.pipeline_size
    if pipe == 1 or run.placement.per_rank > 1:
        return []
    placements = dict.fromkeys((run.pipeline.placement, "interleaved"))
    found = [replace(run, pipeline=replace(run.pipeline, boundaries=None, in_flight="auto", deferred=None,
                                           defer_last=None, stages_per_rank=count, placement=placement))
             for count in (2, 4) if count * pipe <= families.num_blocks(run) for placement in placements]
    return [one for one in found if not problems(one)]


def chunk_variants(run: ResolvedRun) -> list[ResolvedRun]:
    """The run with other sizes of buckets and numbers of buckets in a chunk."""
    if run.mesh.num_replicas == 1:
        return []
    optim, size = run.optim, resolve_bucket_size(run.optim, run.launch.device)
    other = [(bucket, count) for bucket in (size, size // 4, 4 * size) for count in (1, 2, 4, 8, 16)]
    return [replace(run, optim=replace(optim, bucket_size=optim.bucket_size if bucket == size else bucket,
                                       chunk_buckets=count))
            for bucket, count in other if bucket and (bucket, count) != (size, optim.chunk_buckets)]


# --- a search that finds nothing --------------------------------------------------------------------------------------

# The error of a search that finds nothing: it names the shortage, and the nearest mesh, cluster or model that would
# fit.


_NEAR = 64
"""Range of numbers of ranks, up and down, in which the nearest ones with a mesh are named."""


def no_mesh(run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting]) -> RanvierError:
    """The error if no mesh is possible, with the nearest numbers of ranks that have one."""
    alone = resolve(replace(run, pipeline=replace(run.pipeline, boundaries=None, deferred=None, defer_last=None)),
                    Facts(mesh=Mesh(), microbatch_size=1))
    if found := problems(alone):
        return found[0]
    if "mesh" not in searched and isinstance(run.mesh, Mesh):
        size = run.mesh.microbatch_parts if run.batch.microbatch_size == "auto" else run.batch.microbatch_size
        given = resolve(run, Facts(microbatch_size=size))
        if found := problems(given):
            return found[0]
        try:
            Work().stages(given)
        except RanvierError as problem:
            return problem
    near = [next((count for count in numbers if next(variants(run, cluster, count, searched), None)), None)
            for numbers in (range(ranks - 1, max(0, ranks - _NEAR), -1), range(ranks + 1, ranks + _NEAR))]
    works = [str(count) for count in near if count is not None]
    fixed = [] if isinstance(run.mesh, Mesh) else [
        f"{axis} {getattr(run.mesh, axis)}" for axis in AXES if axis not in run.mesh.open_axes]
    having = " with " + " and ".join(fixed) if fixed else ""
    return ConfigError(f"cannot be made of {ranks} ranks{having}: of their divisors none suits the model's "
                       f"{families.num_blocks(run)} blocks, its {run.model.heads} heads and a batch of "
                       f"{run.batch.global_size}", code="no-mesh", where="mesh", value=f"{ranks} ranks",
                       remedy=f"{' and '.join(works)} ranks would do." if works else
                       "Take another number of ranks, or another batch.")


def does_not_fit(run: Run, cluster: Cluster, ranks: int, dropped: Sequence[Candidate], work: Work) -> ConfigError:
    """The error if nothing fits: the shortage, and the nearest change that would fit."""
    frugal = list(_frugal(run, cluster, ranks, work))
    fits = next((found for found in frugal if found.fits), None)
    least = min((found for found in (*dropped, *frugal) if not found.fits), key=lambda found: _share_needed(
        found, cluster))
    if fits is not None:  # a configuration that was not searched
        remedies = [f"It would fit as {_short(fits.run)}."]
    else:
        remedies = [text for text in (_larger_cluster(run, cluster, ranks, work), _smaller_model(run, cluster, ranks))
                    if text]
    return ConfigError(f"does not fit {ranks} devices of {cluster.name} in any of {len(dropped)} configurations; the "
                       f"one that needs least ({_short(least.run)}): {least.reason}", code="nothing-fits",
                       where="model", remedy=" ".join(remedies) or "Take a smaller model, or more memory.")


def _share_needed(candidate: Candidate, cluster: Cluster) -> tuple[float, int]:
    """The share of a device's or a host's memory, whichever is scarcer, that the most demanding rank needs; and the
    microbatch size, since only the states are predicted if they alone exceed the memory."""
    device, host = (max((getattr(entry, name) for entry in candidate.memory), default=1 << 62)
                    for name in ("device_bytes", "host_bytes"))
    of_host = cluster.devices_per_node / cluster.host.memory_bytes
    share = (device + host) * of_host if cluster.device.cores is not None else max(
        device / usable_bytes(cluster.device), host * of_host)
    return share, candidate.run.batch.microbatch_size


def _short(run: ResolvedRun) -> str:
    return (f"{run.mesh}, microbatch {run.batch.microbatch_size}, recompute {run.memory.recompute}, offload "
            f"{run.optim.offload}{', sharded' if run.optim.shard else ''}"
            f"{', nothing deferred' if run.pipeline.defer_bytes == 0 else ''}")


def _larger_cluster(run: Run, cluster: Cluster, ranks: int, work: Work) -> str:
    """The fewest devices on such nodes that suffice, for meshes without rows whose numbers of stages and replicas are
    powers of two, or with one stage per block."""
    run, blocks = on_cluster(run, cluster), families.num_blocks(run)
    pipes = {blocks, *(1 << power for power in range(blocks.bit_length()) if 1 << power < blocks)}
    datas = [1 << power for power in range(run.batch.global_size.bit_length())]
    alone = resolve(run, Facts(mesh=Mesh(), microbatch_size=1))
    parameters = sum(block.num_parameters for block in work.blocks(alone))
    for shape in sorted(product(datas, pipes, _cols(run)), key=lambda shape: (prod(shape), shape)):
        (data, pipe, col), count = shape, prod(shape)
        nodes = -(-count // cluster.devices_per_node)
        memory = nodes * cluster.host.memory_bytes if cluster.device.cores is not None else (
            count * cluster.device.memory_bytes)
        if count <= ranks or 2 * data * DTYPES[run.precision].itemsize * parameters > memory:
            continue  # parameters and gradients alone need too much
        if _sparing(run, replace(cluster, nodes=nodes), Mesh(data=data, pipe=pipe, col=col), work).fits:
            return (f"It fits {count:,} devices ({nodes:,} nodes) as data {data} x pipe {pipe} x col {col}, with "
                    f"{_SPARING}.")
    return ""


def _smaller_model(run: Run, cluster: Cluster, ranks: int) -> str:
    """The number of layers of this width that would fit, or of half, a quarter ... of it; empty for a pretrained model,
    whose weights determine its sizes."""
    model = run.model
    if model.pretrained is not None:
        return ""
    for halvings in range(8):
        narrow = 2 ** halvings
        if model.heads % narrow or model.hidden % narrow:
            return ""
        width = replace(model, heads=model.heads // narrow, hidden=model.hidden // narrow)
        layers = model.num_layers if narrow > 1 else model.num_layers // 2
        while layers:
            if any_fits(replace(run, model=replace(width, num_layers=layers)), cluster, ranks, Work()):
                text = f"`--model.num-layers {layers}`"
                if narrow > 1:
                    text += f" `--model.hidden {width.hidden}` `--model.heads {width.heads}`"
                return f"With {text} it fits here, with {_SPARING}."
            layers //= 2
    return ""


def any_fits(run: Run, cluster: Cluster, ranks: int, work: Work) -> bool:
    """Whether one of the frugal configurations fits."""
    return any(found.fits for found in _frugal(run, cluster, ranks, work))


def _frugal(run: Run, cluster: Cluster, ranks: int, work: Work) -> Iterator[Candidate]:
    """Candidates with as many stages as possible, on one column or many."""
    run = on_cluster(run, cluster)
    widest = [col for col in _cols(run) if ranks % col == 0]
    for col in dict.fromkeys((1, *widest[-2:])):
        for pipe in [pipe for pipe in divisors(ranks // col) if pipe <= families.num_blocks(run)][:-4:-1]:
            if ranks // pipe // col <= run.batch.global_size:
                yield _sparing(run, cluster, Mesh(data=ranks // pipe // col, pipe=pipe, col=col), work)


def _cols(run: Run) -> list[int]:
    """Numbers of columns that divide the run's heads."""
    return [col for col in divisors(run.model.heads) if col <= LARGEST_STAGE]


def _sparing(run: Run, cluster: Cluster, mesh: Mesh, work: Work) -> Candidate:
    """The run on a mesh with all memory savings."""
    offload: Literal["none", "hybrid"] = "none" if cluster.device.cores is not None else "hybrid"
    tried = resolve(replace(run, memory=replace(run.memory, recompute="auto"),
                            optim=replace(run.optim, offload=offload, shard=mesh.num_replicas > 1),
                            pipeline=replace(run.pipeline, boundaries=None, in_flight="auto", deferred=None,
                                             defer_last=None, defer_bytes=0)),
                    Facts(mesh=mesh, microbatch_size=1))
    if found := problems(tried):
        return Candidate(run=tried, cost=NO_COST, reason=str(found[0]))
    try:
        tried = with_share(tried, cluster, work)
    except RanvierError as problem:
        return Candidate(run=tried, cost=NO_COST, reason=str(problem))
    return with_memory(Candidate(run=tried, cost=NO_COST), cluster, work)


_SPARING = "microbatches of 1 and all that saves memory"

NO_COST = Cost(seconds=1.0, pipeline_seconds=1.0, bubble_fraction=0.0, reduction_seconds=0.0, update_seconds=0.0,
                stages=(), link_bytes={}, sequences=0, tokens=0, model_flops=0.0, hardware_flops=0.0, peak_flops=1.0)
