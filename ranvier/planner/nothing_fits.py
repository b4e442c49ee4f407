"""The error of a search that finds nothing: what is missing, and the nearest mesh, cluster or model that would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Literal

from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.config.run import Run
from ranvier.cost.device_overhead import usable_bytes
from ranvier.cost.hardware import Cluster
from ranvier.cost.mesh_shape import divisors
from ranvier.cost.step import Cost
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import AXES, Mesh
from ranvier.models import families
from ranvier.planner.candidates import LARGEST_STAGE, Candidate, Setting, on_cluster, variants, with_memory, with_share
from ranvier.planner.problems import problems
from ranvier.planner.work import Work
from ranvier.precision import DTYPES

_NEAR = 64
"""Numbers of ranks, up and down, of which the nearest are named for which there is a mesh."""


def no_mesh(run: Run, cluster: Cluster, ranks: int, searched: Sequence[Setting]) -> RanvierError:
    """Why there is nothing to compare, and the nearest numbers of ranks for which there is."""
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
    """The error where nothing fits: what is missing, and the nearest change that would fit."""
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
                       f"one that needs least ({_short(least.run)}): {least.reason}", code="nothing-fits",
                       where="model", remedy=" ".join(remedies) or "Take a smaller model, or more memory.")


def _share_needed(found: Candidate, cluster: Cluster) -> tuple[float, int]:
    """The share of a device's or a host's memory, whichever is scarcer, that the most demanding rank needs; and the
    microbatch, since only the states are predicted where they alone exceed the memory."""
    device, host = (max((getattr(entry, name) for entry in found.memory), default=1 << 62)
                    for name in ("device_bytes", "host_bytes"))
    of_host = cluster.devices_per_node / cluster.host.memory_bytes
    share = (device + host) * of_host if cluster.device.cores is not None else max(
        device / usable_bytes(cluster.device), host * of_host)
    return share, found.run.batch.microbatch_size


def _short(run: ResolvedRun) -> str:
    return (f"{run.mesh}, microbatch {run.batch.microbatch_size}, recompute {run.memory.recompute}, offload "
            f"{run.optim.offload}{', sharded' if run.optim.shard else ''}"
            f"{', nothing deferred' if run.pipeline.defer_bytes == 0 else ''}")


def _larger_cluster(run: Run, cluster: Cluster, ranks: int, work: Work) -> str:
    """The fewest devices on such nodes that would do, of meshes without rows whose stages and replicas are powers of
    two, or all blocks."""
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
            continue  # parameters and gradients alone are too much
        if _sparing(run, replace(cluster, nodes=nodes), Mesh(data=data, pipe=pipe, col=col), work).fits:
            return (f"It fits {count:,} devices ({nodes:,} nodes) as data {data} x pipe {pipe} x col {col}, with "
                    f"{_SPARING}.")
    return ""


def _smaller_model(run: Run, cluster: Cluster, ranks: int) -> str:
    """The number of layers of this width that would fit, or of half, a quarter ... of it."""
    model = run.model
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
    """The run on a mesh with all that saves memory."""
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
