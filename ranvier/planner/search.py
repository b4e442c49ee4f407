"""Which of all configurations is fastest on a cluster, and why the others are not.

Every mesh of the ranks with every microbatch gets the closed form's time, as if memory were plenty. From the fastest
on, memory is predicted; where it does not suffice, the ways to save it (checkpoints, offload), which take longer, wait
for their turn with their own times. So the first that fits is the fastest of all that fit. When enough of them do they
are simulated and ranked, and what is left to choose (the in-flight limit, chunks) is tried on the best. Where layers
freeze the best are ranked by the whole run, with and without packing and the cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import isqrt, prod
from typing import Literal

import torch

from ranvier import check
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import AXES, Mesh
from ranvier.models import families
from ranvier.models.block import Model, freeze
from ranvier.optim.optimizer import resolve_bucket_size
from ranvier.pipeline.build import Parts, meta_mesh, split_model
from ranvier.pipeline.partition import BlockCost, block_costs, check_boundaries, partition, uniform
from ranvier.pipeline.policies import policy_named
from ranvier.planner.costs import Cost, cost
from ranvier.planner.elastic_plan import Course, course, ways
from ranvier.planner.hardware import Cluster
from ranvier.planner.memory import PROCESS_BYTES, RankMemory, device_kind, too_large
from ranvier.planner.memory import predict as predict_memory
from ranvier.precision import DTYPES
from ranvier.run import Run

Setting = Literal["mesh", "microbatch", "in-flight", "checkpoint", "offload", "shard", "chunks", "elastic", "scheme",
                  "precision"]
SEARCHED: tuple[Setting, ...] = ("mesh", "microbatch", "in-flight", "checkpoint", "offload", "shard", "chunks",
                                 "elastic")
"""What is chosen by default; scheme and precision stay as the run has them."""
_LARGEST_STAGE = 64
"""Ranks of one tensor mesh, at most."""
_LARGEST_MICROBATCH = 64
"""Samples of a microbatch on one row, at most."""
_WANTED = 12
"""Configurations that fit, before the search goes on to simulate them."""
_LOOKED_AT = 400
"""Configurations that do not fit, before the search ends with what does; where nothing does it goes on, unless the
most frugal ones do not fit either."""
_NEAR = 64
"""Numbers of ranks, up and down, of which the nearest are named for which there is a mesh."""
_TOLD = 200
"""Candidates between two lines of progress."""
_COMPARED = 3
"""Of those that do not fit, how many are simulated as the others are."""
_TUNED = 4
"""Of those that fit, for how many other in-flight limits are tried."""
_FOLLOWED = 6
"""Of those that fit, how many are followed through a run whose layers freeze."""
_ALIKE = 1.03
"""Where ranks share cores, times that differ by less are alike: of such plans that comes first whose ranks wait for
each other least, since waiting costs more there than the model knows."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One configuration. reason: why it cannot be; empty where it can. measured_seconds: of a step, if it was run.
    course: of the whole run, if its layers freeze."""

    run: Run
    cost: Cost
    memory: tuple[RankMemory, ...] = ()
    reason: str = ""
    measured_seconds: float | None = None
    course: Course | None = None

    def expected_seconds(self, measured_over_predicted: float) -> float:
        """Of a step: as measured, else as predicted and corrected."""
        return self.measured_seconds or measured_over_predicted * self.cost.seconds

    def ranked_seconds(self, measured_over_predicted: float = 1.0) -> float:
        """Of the whole run, if its layers freeze, else of a step: as measured, else as predicted and corrected."""
        step = self.expected_seconds(measured_over_predicted)
        return self.course.seconds * step / self.cost.seconds if self.course else step

    @property
    def fits(self) -> bool:
        return not self.reason


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a search has found: those that fit, the chosen one first and then by time; those that would be faster and do
    not fit; and how many there were."""

    cluster: Cluster
    ranks: int
    best: tuple[Found, ...]
    dropped: tuple[Found, ...]
    considered: int
    measured_over_predicted: float = 1.0
    """Where some were measured: the median over those."""


class Work:
    """The blocks of a run's model, counted once for each tensor mesh and scaled to any microbatch: operations,
    bytes and FLOPs grow with it by equal amounts."""

    def __init__(self) -> None:
        self._counted: dict[object, tuple[list[BlockCost], list[BlockCost]]] = {}
        self._scaled: dict[object, list[BlockCost]] = {}
        self._cuts: dict[object, tuple[int, ...]] = {}
        self._parts: dict[object, tuple[Model, Parts]] = {}
        self._needs: dict[object, dict] = {}

    def blocks(self, run: Run, frozen: int = 0) -> list[BlockCost]:
        """Each block's cost on one rank of the run's tensor mesh, for its microbatch."""
        share = -(-run.batch.microbatch_size // run.mesh.row)
        key = _kind(run), frozen
        if key not in self._counted:
            self._counted[key] = _count(run, 1, frozen), _count(run, 2, frozen)
        if (key, share) not in self._scaled:
            self._scaled[key, share] = [_scaled(one, two, share) for one, two in zip(*self._counted[key], strict=True)]
        return self._scaled[key, share]

    def stages(self, run: Run, frozen: int = 0) -> list[list[BlockCost]]:
        """The blocks of each stage, by the run's own cut."""
        blocks = self.blocks(run, frozen)
        return [blocks[start:stop] for start, stop in pairwise([0, *self._edges(run, frozen), len(blocks)])]

    def memory(self, run: Run, frozen: int = 0, *, states_only: bool = False) -> tuple[RankMemory, ...]:
        """What `ranvier check` predicts, with the blocks that are counted already. states_only: what lives from step to
        step, which takes far less time to find."""
        kind = _kind(run), frozen
        if kind not in self._parts:
            model = freeze(families.model_of(run, dtype=DTYPES[run.precision]), frozen)
            self._parts[kind] = model, Parts(model, run.mesh, run.tensor, device_kind(run))
        model, parts = self._parts[kind]
        table, layout = parts.cut(replace(run.mesh, data=1), None if states_only else self.blocks(run, frozen),
                                  boundaries=self._edges(run, frozen), how="cost")
        return predict_memory(run, model, table, layout, self._needs.setdefault(kind, {}))

    def excess(self, run: Run, cluster: Cluster, frozen: int = 0) -> str:
        """What does not suffice for it; empty where it fits."""
        try:
            return _excess(run, cluster, self.memory(run, frozen))
        except RanvierError as problem:
            return str(problem)

    def _edges(self, run: Run, frozen: int) -> tuple[int, ...]:
        """First block of each stage after the first."""
        key = _kind(run), frozen, run.batch.microbatch_size, run.mesh.pipe, run.pipeline, run.launch.device
        if key not in self._cuts:
            self._cuts[key] = _edges(run, self.blocks(run, frozen), frozen > 0)
        return self._cuts[key]


def _kind(run: Run) -> object:
    """What one rank's part of each block depends on, the microbatch aside."""
    return run.mesh.row, run.mesh.col, run.tensor, run.precision, run.model, run.data.task, device_kind(run)


def _edges(run: Run, blocks: Sequence[BlockCost], freezes: bool) -> tuple[int, ...]:
    """freezes: as AutoPipe cuts, for which a block without a backward costs a third."""
    if run.pipeline.boundaries is not None:
        return check_boundaries(run.pipeline.boundaries, len(blocks), run.mesh.pipe)
    if run.pipeline.partition == "uniform":
        return uniform(len(blocks), run.mesh.pipe)
    device = device_kind(run)
    begins = next((place for place, block in enumerate(blocks) if block.num_trainable), len(blocks)) if freezes else 0
    return partition([block.weight(device) / (3 if place < begins else 1) for place, block in enumerate(blocks)],
                     run.mesh.pipe)


def _count(run: Run, share: int, frozen: int) -> list[BlockCost]:
    with torch.device("meta"):
        inputs, targets = families.sample_of(run, share)
    model = freeze(families.model_of(run, dtype=DTYPES[run.precision]), frozen)
    if run.mesh.stage_size > 1:
        model = split_model(model, meta_mesh(run.mesh, run.tensor, device_kind(run)))
    return block_costs(model, inputs, targets, DTYPES[run.precision])


_GROWING = ("flops", "written_bytes", "allocated_bytes", "moved_bytes", "kept_bytes", "input_bytes", "output_bytes")


def _scaled(one: BlockCost, two: BlockCost, share: int) -> BlockCost:
    return replace(one, **{name: getattr(one, name) + (share - 1) * (getattr(two, name) - getattr(one, name))
                           for name in _GROWING})


def predict(run: Run, cluster: Cluster, work: Work | None = None, *, exact: bool = True) -> Found:
    """One configuration as it is, with its memory."""
    run, work = _on(run, cluster), work or Work()
    found = Found(run=run, cost=cost(run, cluster, work.stages(run), exact=exact))
    return with_memory(found, cluster, work)


def search(run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting] = SEARCHED, *, work: Work | None = None,
           progress: Callable[[str], None] = lambda line: None) -> Plan:
    """The fastest configurations of the run's model and global batch on `ranks` devices. work: of searches before.

    ConfigError where nothing is possible, with what is missing and the nearest thing that works.
    """
    if ranks > cluster.num_devices:
        raise ConfigError(f"is more than the {cluster.num_devices} devices of {cluster.name}", where="ranks",
                          value=ranks, remedy=f"Take {cluster.num_devices} or less, or a larger cluster.")
    if "mesh" not in searched and not run.mesh.is_open and run.mesh.size != ranks:
        raise ConfigError(f"has {run.mesh.size} ranks, not {ranks}, and may not change", where="mesh",
                          value=str(run.mesh), remedy=f"Search mesh, too, or plan for {run.mesh.size} ranks.")
    if "precision" not in searched:
        check_precision(run, cluster)
    work, queue, considered = work or Work(), [], 0
    base = _on(run, cluster)
    for candidate in candidates(base, cluster, ranks, searched):
        _push(queue, considered, candidate, cluster, work)
        considered += 1
        if considered % _TOLD == 0:
            progress(f"{considered} meshes and microbatches so far, the last {candidate.mesh}")
    progress(f"{considered} meshes and microbatches are possible")
    fitting, dropped = [], []
    while queue and len(fitting) < _WANTED and (not fitting or len(dropped) < _LOOKED_AT):
        *_, found, is_first = heapq.heappop(queue)
        found = with_memory(found, cluster, work)
        (fitting if found.fits else dropped).append(found)
        if len(dropped) == _LOOKED_AT and not fitting and not _any_fits(base, cluster, ranks, work):
            break
        if is_first and not found.fits:
            for frugal in _more_frugal(found.run, cluster, searched):
                _push(queue, considered, frugal, cluster, work, is_first=False)
                considered += 1
    if not fitting:
        raise _does_not_fit(run, cluster, ranks, dropped, work) if dropped else _no_mesh(base, cluster, ranks, searched)
    best = sorted((_simulated(found, cluster, work) for found in fitting), key=lambda found: found.cost.seconds)
    best[:_TUNED] = [_tuned(found, cluster, work, "in-flight", searched) for found in best[:_TUNED]]
    best.sort(key=lambda found: found.cost.seconds)
    best[:_FOLLOWED] = sorted((_followed(found, cluster, work, searched) for found in best[:_FOLLOWED]),
                              key=Found.ranked_seconds)
    if best[0].course:  # the times of others are of steps, not of whole runs
        best = [found for found in best if found.course]
    if cluster.device.cores is not None:
        alike = [found for found in best if found.ranked_seconds() <= _ALIKE * best[0].ranked_seconds()]
        simplest = min(alike, key=lambda found: found.run.mesh.pipe * found.run.mesh.stage_size)
        best.insert(0, best.pop(best.index(simplest)))
    best[0] = _followed(_tuned(best[0], cluster, work, "chunks", searched), cluster, work, ())
    slowest = max(found.cost.seconds for found in best)
    dropped = [found for found in dropped if found.cost.seconds < slowest]
    dropped[:_COMPARED] = [_simulated(found, cluster, work) for found in dropped[:_COMPARED]]
    return Plan(cluster=cluster, ranks=ranks, best=tuple(best), considered=considered, dropped=tuple(dropped))


def check_precision(run: Run, cluster: Cluster) -> None:
    """ConfigError where the cluster's file does not say how fast it computes in the run's number format."""
    if run.precision not in cluster.device.rates:
        raise ConfigError(f"has no rate on {cluster.device.name}", where="precision", value=run.precision,
                          remedy=f"Set --precision {next(iter(cluster.device.rates))}, or add the rate to its file.")


def _push(queue: list, number: int, run: Run, cluster: Cluster, work: Work, *, is_first: bool = True) -> None:
    """Into the queue by the closed form's time, of equal ones by number; what cannot be cut is left out."""
    try:
        found = Found(run=run, cost=cost(run, cluster, work.stages(run), exact=False))
    except RanvierError:
        return
    heapq.heappush(queue, (found.cost.seconds, number, found, is_first))


def candidates(run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting] = SEARCHED) -> Iterator[Run]:
    """Every mesh and microbatch whose settings can be together, with the least that saves memory."""
    meshes = list(_meshes(run, ranks)) if "mesh" in searched or run.mesh.is_open else [run.mesh]
    schemes = _schemes(run) if "scheme" in searched else [run.tensor]
    precisions = [name for name in ("bf16", "fp16", "fp32") if name in cluster.device.rates
                  ] if "precision" in searched else [run.precision]
    for mesh, tensor, precision in product(meshes, schemes, precisions):
        if run.batch.global_size < mesh.data or (mesh.stage_size == 1 and tensor is not schemes[0]):
            continue
        size = run.batch.microbatch_size
        sizes = _microbatches(run, mesh) if "microbatch" in searched or size == "auto" else [size]
        for size in sizes:
            candidate = replace(
                run, mesh=mesh, tensor=tensor, precision=precision, batch=replace(run.batch, microbatch_size=size),
                memory=replace(run.memory, checkpoint="none") if "checkpoint" in searched else run.memory,
                optim=replace(run.optim, offload="none" if "offload" in searched else run.optim.offload,
                              shard=mesh.data > 1 if "shard" in searched else run.optim.shard and mesh.data > 1),
                pipeline=run.pipeline if run.mesh.pipe in (mesh.pipe, "auto") else replace(
                    run.pipeline, boundaries=None, in_flight="auto"))
            if not check.problems(candidate):
                yield candidate


def _more_frugal(run: Run, cluster: Cluster, searched: Sequence[Setting]) -> Iterator[Run]:
    """The same mesh and microbatch with more that saves memory."""
    checkpoints = ["none", "auto"] if "checkpoint" in searched else [run.memory.checkpoint]  # what is first is tried
    offloads = [run.optim.offload]
    if cluster.device.cores is None and "offload" in searched:
        offloads = ["none", "stream", "host"]
    elif cluster.device.cores is None and run.optim.offload == "auto":  # which streams where it must
        offloads = ["auto", "stream"]
    postponed = [run.pipeline.defer_bytes]
    if "in-flight" in searched and policy_named(run.pipeline.policy).defers and run.mesh.pipe > 1:
        postponed.append(0)
    for checkpoint, offload, defer_bytes in list(product(checkpoints, offloads, dict.fromkeys(postponed)))[1:]:
        yield replace(run, memory=replace(run.memory, checkpoint=checkpoint),
                      optim=replace(run.optim, offload=offload),
                      pipeline=replace(run.pipeline, defer_bytes=defer_bytes))


def _meshes(run: Run, ranks: int) -> Iterator[Mesh]:
    """All of them; of a mesh that is open in some axes those that it can become."""
    given = run.mesh if run.mesh.is_open else Mesh(data="auto", pipe="auto", row="auto", col="auto")
    for pipe in _divisors(ranks):
        for stage in _divisors(ranks // pipe):
            if pipe > families.num_blocks(run) or stage > _LARGEST_STAGE:
                continue
            for row in _divisors(stage):
                shape = ranks // pipe // stage, pipe, row, stage // row
                if all(size in (found, "auto") for size, found in zip(given.shape, shape, strict=True)):
                    with suppress(ConfigError):  # a tile that does not divide this one
                        yield replace(given, **dict(zip(AXES, shape, strict=True)))


def _divisors(number: int) -> list[int]:
    """All of them, rising."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def _microbatches(run: Run, mesh: Mesh) -> list[int]:
    """Powers of two times the rows, and what divides a replica's share of the batch; at most 64 for each row."""
    share = -(-run.batch.global_size // mesh.data)
    most = min(share, _LARGEST_MICROBATCH * mesh.row)
    powers = {mesh.row << power for power in range(share.bit_length())}
    divisors = {size for size in _divisors(share) if size % mesh.row == 0}
    return sorted(size for size in powers | divisors if size <= most)


def _schemes(run: Run):
    return [replace(run.tensor, scheme=scheme, sequence_sharding=sharding) for scheme, sharding in (
        ("stationary", False), ("summa", False), ("megatron", False), ("megatron", True))]


def _on(run: Run, cluster: Cluster) -> Run:
    """The run on the cluster's kind of device."""
    return replace(run, launch=replace(run.launch, device="cpu" if cluster.device.cores is not None else "cuda"))


def _simulated(found: Found, cluster: Cluster, work: Work) -> Found:
    return replace(found, cost=cost(found.run, cluster, work.stages(found.run)))


def _followed(found: Found, cluster: Cluster, work: Work, searched: Sequence[Setting]) -> Found:
    """Through the whole run, the fastest way of those that it may take, where its layers freeze."""
    runs = ways(found.run) if "elastic" in searched and found.run.elastic.freeze != "none" else [found.run]
    followed = [replace(found, run=run, course=course(run, cluster, work)) for run in runs]
    return min(followed, key=Found.ranked_seconds) if followed[0].course else found


def with_memory(found: Found, cluster: Cluster, work: Work) -> Found:
    """With the prediction that `ranvier check` prints, and what it exceeds. Where states alone exceed it they are all
    that is predicted."""
    for states_only in (True, False):
        try:
            memory = work.memory(found.run, states_only=states_only)
        except RanvierError as problem:
            return replace(found, reason=str(problem))
        reason = _excess(found.run, cluster, memory)
        if reason:
            break
    return replace(found, memory=memory, reason=reason)


def _excess(run: Run, cluster: Cluster, memory: Sequence[RankMemory]) -> str:
    """What these ranks need more than there is; empty where they fit."""
    on_cpu, device, problem = cluster.device.cores is not None, cluster.device, None
    if not on_cpu:
        problem = too_large(memory, place="device", processes=1, run=run,
                            available_bytes=device.memory_bytes - device.reserved_bytes)
    for here in _on_nodes(run.mesh, cluster.devices_per_node):
        problem = problem or too_large([memory[stage] for stage in here], place="both" if on_cpu else "host", run=run,
                                       processes=len(here), available_bytes=cluster.host.memory_bytes,
                                       process_bytes=PROCESS_BYTES)
    return f"{problem.where} {problem.what}" if problem is not None else ""


def _on_nodes(mesh: Mesh, per_node: int) -> set[tuple[int, ...]]:
    """The stages of the ranks of a node, for every kind of node that there is."""
    found, seen, first = set(), set(), 0
    while first < mesh.size and (place := first % (mesh.pipe * mesh.stage_size)) not in seen:
        seen.add(place)
        ranks = range(first, min(first + per_node, mesh.size))
        found.add(tuple(sorted(rank // mesh.stage_size % mesh.pipe for rank in ranks)))
        first += per_node
    return found


def _tuned(found: Found, cluster: Cluster, work: Work, name: Literal["in-flight", "chunks"],
           searched: Sequence[Setting]) -> Found:
    """With another in-flight limit, or size of chunks, where that is at least 0.5 % faster."""
    for run in {"in-flight": _in_flights, "chunks": _chunks}[name](found.run) if name in searched else ():
        other = replace(found, run=run, cost=cost(run, cluster, work.stages(run)))
        if other.cost.seconds < 0.995 * found.cost.seconds and (other := with_memory(other, cluster, work)).fits:
            found = other
    return found


def _in_flights(run: Run) -> list[Run]:
    if run.mesh.pipe == 1 or run.pipeline.policy == "gpipe":
        return []
    return [replace(run, pipeline=replace(run.pipeline, in_flight=factor * run.mesh.pipe)) for factor in (2, 3)]


def _chunks(run: Run) -> list[Run]:
    """Other sizes of buckets and numbers of them in a chunk."""
    if run.mesh.data == 1:
        return []
    optim, size = run.optim, resolve_bucket_size(run.optim, run.launch.device)
    other = [(bucket, count) for bucket in (size, size // 4, 4 * size) for count in (1, 2, 4, 8, 16)]
    return [replace(run, optim=replace(optim, bucket_size=optim.bucket_size if bucket == size else bucket,
                                       chunk_buckets=count))
            for bucket, count in other if bucket and (bucket, count) != (size, optim.chunk_buckets)]


# --- nothing fits ----------------------------------------------------------------------------------------------------


def _no_mesh(run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting]) -> RanvierError:
    """Why there is nothing to compare, and the nearest numbers of ranks for which there is."""
    alone = replace(run, mesh=Mesh(), batch=replace(run.batch, microbatch_size=1),
                    pipeline=replace(run.pipeline, boundaries=None))
    if found := check.problems(alone):
        return found[0]
    if "mesh" not in searched and not run.mesh.is_open:
        size = run.mesh.row if run.batch.microbatch_size == "auto" else run.batch.microbatch_size
        given = replace(run, batch=replace(run.batch, microbatch_size=size))
        if found := check.problems(given):
            return found[0]
        try:
            Work().stages(given)
        except RanvierError as problem:
            return problem
    near = [next((count for count in numbers if next(candidates(run, cluster, count, searched), None)), None)
            for numbers in (range(ranks - 1, max(0, ranks - _NEAR), -1), range(ranks + 1, ranks + _NEAR))]
    works = [str(count) for count in near if count is not None]
    fixed = [f"{axis} {size}" for axis, size in zip(AXES, run.mesh.shape, strict=True) if size != "auto"
             ] if run.mesh.is_open else []
    given = " with " + " and ".join(fixed) if fixed else ""
    return ConfigError(f"cannot be made of {ranks} ranks{given}: of their divisors none suits the model's "
                       f"{families.num_blocks(run)} blocks, its {run.model.heads} heads and a batch of "
                       f"{run.batch.global_size}", where="mesh", value=f"{ranks} ranks",
                       remedy=f"{' and '.join(works)} ranks would do." if works else
                       "Take another number of ranks, or another batch.")


def _does_not_fit(run: Run, cluster: Cluster, ranks: int, dropped: Sequence[Found], work: Work) -> ConfigError:
    """What is missing where nothing fits, and the nearest thing that would."""
    frugal = list(_frugal(run, cluster, ranks, work))
    fits = next((found for found in frugal if found.fits), None)
    least = min((found for found in (*dropped, *frugal) if not found.fits), key=lambda found: _share_needed(
        found, cluster))
    if fits is not None:  # which was not looked for
        remedies = [f"It would fit as {_short(fits.run)}."]
    else:
        remedies = [text for text in (_larger_cluster(run, cluster, ranks, work), _smaller_model(run, cluster, ranks))
                    if text]
    return ConfigError(f"does not fit {ranks} devices of {cluster.name} in any of {len(dropped)} configurations; the "
                       f"one that needs least ({_short(least.run)}): {least.reason}", where="model",
                       remedy=" ".join(remedies) or "Take a smaller model, or more memory.")


def _share_needed(found: Found, cluster: Cluster) -> tuple[float, int]:
    """Of the memory of a device or of a host, whichever is shorter, what the dearest rank needs; and the microbatch,
    since where states alone exceed the memory nothing else has been predicted."""
    device, host = (max((getattr(entry, name) for entry in found.memory), default=1 << 62)
                    for name in ("device_bytes", "host_bytes"))
    of_host = cluster.devices_per_node / cluster.host.memory_bytes
    share = (device + host) * of_host if cluster.device.cores is not None else max(
        device / (cluster.device.memory_bytes - cluster.device.reserved_bytes), host * of_host)
    return share, found.run.batch.microbatch_size


def _short(run: Run) -> str:
    return (f"{run.mesh}, microbatch {run.batch.microbatch_size}, checkpoint {run.memory.checkpoint}, offload "
            f"{run.optim.offload}{', sharded' if run.optim.shard else ''}"
            f"{', nothing postponed' if run.pipeline.defer_bytes == 0 else ''}")


def _larger_cluster(run: Run, cluster: Cluster, ranks: int, work: Work) -> str:
    """The fewest devices on such nodes that would do, of meshes without rows whose stages and replicas are powers of
    two, or all blocks."""
    run, blocks = _on(run, cluster), families.num_blocks(run)
    pipes = {blocks, *(1 << power for power in range(blocks.bit_length()) if 1 << power < blocks)}
    datas = [1 << power for power in range(run.batch.global_size.bit_length())]
    alone = replace(run, mesh=Mesh(), batch=replace(run.batch, microbatch_size=1))
    parameters = sum(block.num_parameters for block in work.blocks(alone))
    for shape in sorted(product(datas, pipes, _cols(run)), key=lambda shape: (prod(shape), shape)):
        (data, pipe, col), count = shape, prod(shape)
        nodes = -(-count // cluster.devices_per_node)
        memory = nodes * cluster.host.memory_bytes if cluster.device.cores is not None else (
            count * cluster.device.memory_bytes)
        if count <= ranks or 2 * data * DTYPES[run.precision].itemsize * parameters > memory:
            continue  # parameters and gradients alone are too much
        if _sparing(run, replace(cluster, nodes=nodes), Mesh(data=data, pipe=pipe, col=col), work).fits:
            return (f"It fits {count:,} devices ({nodes:,} nodes) as data {data} x pipe {pipe} x col {col}, with "
                    f"{_SPARING}.")
    return ""


def _smaller_model(run: Run, cluster: Cluster, ranks: int) -> str:
    """How many layers of this width would do, or of half, a quarter ... of it."""
    model = run.model
    for halvings in range(8):
        narrow = 2 ** halvings
        if model.heads % narrow or model.hidden % narrow:
            return ""
        width = replace(model, heads=model.heads // narrow, hidden=model.hidden // narrow)
        layers = model.num_layers if narrow > 1 else model.num_layers // 2
        while layers:
            if _any_fits(replace(run, model=replace(width, num_layers=layers)), cluster, ranks, Work()):
                text = f"--model.num-layers {layers}"
                if narrow > 1:
                    text += f" --model.hidden {width.hidden} --model.heads {width.heads}"
                return f"With {text} it fits here, with {_SPARING}."
            layers //= 2
    return ""


def _any_fits(run: Run, cluster: Cluster, ranks: int, work: Work) -> bool:
    """Whether one of the frugal configurations fits."""
    return any(found.fits for found in _frugal(run, cluster, ranks, work))


def _frugal(run: Run, cluster: Cluster, ranks: int, work: Work) -> Iterator[Found]:
    """Those of as many stages as can be, on one column or many."""
    run = _on(run, cluster)
    widest = [col for col in _cols(run) if ranks % col == 0]
    for col in dict.fromkeys((1, *widest[-2:])):
        for pipe in [pipe for pipe in _divisors(ranks // col) if pipe <= families.num_blocks(run)][:-4:-1]:
            if ranks // pipe // col <= run.batch.global_size:
                yield _sparing(run, cluster, Mesh(data=ranks // pipe // col, pipe=pipe, col=col), work)


def _cols(run: Run) -> list[int]:
    """By how many columns the run's heads can be divided."""
    return [col for col in _divisors(run.model.heads) if col <= _LARGEST_STAGE]


def _sparing(run: Run, cluster: Cluster, mesh: Mesh, work: Work) -> Found:
    """The run on a mesh with all that saves memory."""
    offload = "none" if cluster.device.cores is not None else "stream"
    tried = replace(run, mesh=mesh, batch=replace(run.batch, microbatch_size=1),
                    memory=replace(run.memory, checkpoint="auto"),
                    optim=replace(run.optim, offload=offload, shard=mesh.data > 1),
                    pipeline=replace(run.pipeline, boundaries=None, in_flight="auto", defer_bytes=0))
    if problems := check.problems(tried):
        return Found(run=tried, cost=_NOTHING, reason=str(problems[0]))
    return with_memory(Found(run=tried, cost=_NOTHING), cluster, work)


_SPARING = "microbatches of 1 and all that saves memory"

_NOTHING = Cost(seconds=1.0, pipeline_seconds=1.0, bubble_fraction=0.0, reduction_seconds=0.0, update_seconds=0.0,
                stages=(), link_bytes={}, sequences=0, tokens=0, model_flops=0.0, hardware_flops=0.0, peak_flops=1.0)
