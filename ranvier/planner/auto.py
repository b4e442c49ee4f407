"""`auto` in a run: a search chooses the axes of the mesh and the microbatch size that the user leaves open.

If only rows and columns are open, they are chosen by bytes (`ranvier.cost.mesh_shape`). If data, pipe or the microbatch
size is open, all open settings are searched together, on the cluster that `launch.cluster` names.
"""

from __future__ import annotations

import re
from dataclasses import replace

import psutil
import torch

from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.config.run import MeshSettings, Run
from ranvier.cost.cluster_files import cluster_names, load_cluster
from ranvier.cost.hardware import Cluster
from ranvier.cost.mesh_shape import best_shape
from ranvier.cost.volume import volume_scheme
from ranvier.errors import ConfigError, RanvierError
from ranvier.launch.start import choose_device
from ranvier.planner.candidates import Setting
from ranvier.planner.problems import PREVENT_A_CUT, TOO_LARGE, cannot_be_laid_out, problems
from ranvier.planner.search import search
from ranvier.planner.trial import StartTrial
from ranvier.system.machine import available_cores, memory_limit_bytes


def with_pretrained(run: Run) -> tuple[Run, list[RanvierError]]:
    """The run with the sizes of its pretrained model, and why that may not be possible."""
    try:
        return resolve_pretrained(run), []
    except RanvierError as problem:
        return run, [problem]


def with_plan(run: Run, num_ranks: int | None, ranks_per_node: int | None = None, *, trial: StartTrial | None = None
              ) -> tuple[ResolvedRun, list[RanvierError]]:
    """The run with a number for each auto of mesh and microbatch, and errors if that is not possible, except those that
    `problems` reports for the run; the numbers are then 1.

    num_ranks: number of all ranks, according to their launcher or the user. trial: runs the best plans on this machine,
    and may choose a plan for a single rank.
    """
    open_axes, size = open_axes_of(run), run.batch.microbatch_size
    if size != "auto" and not {"data", "pipe"} & {*open_axes}:
        return _with_shape(run, num_ranks)
    if num_ranks is None and open_axes:
        return resolve_with_least(run), [_unknown_ranks(open_axes[0])]
    if any(problem.where.startswith(PREVENT_A_CUT) for problem in problems(resolve_with_least(run))):
        where = f"mesh.{open_axes[0]}" if open_axes else "batch.microbatch-size"
        return resolve_with_least(run), [ConfigError(
            "cannot be planned yet", code="not-planned-yet", where=where, value="auto",
            remedy="Fix the other errors first, or give a number.")]
    own = resolve_with_least(run).mesh.size
    try:  # a given mesh has its own number of ranks; another check reports if a different number was started
        return plan_run(run, own if num_ranks is None or not open_axes else num_ranks, ranks_per_node, trial), []
    except RanvierError as problem:
        alone = resolve_with_least(run)
        return alone, [] if str(problem) in map(str, problems(alone)) else [problem]
    except TOO_LARGE as error:
        return resolve_with_least(run), [cannot_be_laid_out(error)]


def plan_run(run: Run, ranks: int, ranks_per_node: int | None = None, trial: StartTrial | None = None) -> ResolvedRun:
    """The run with the fastest mesh and microbatch on `ranks` devices, as predicted or in a trial; settings other than
    auto stay. ConfigError if nothing is possible or fits, or if the mesh is open and the devices here are unknown. If
    only the microbatch size is open, a few sizes are compared, and unknown GPUs are treated like the H100."""
    searched: list[Setting] = ["mesh"] if open_axes_of(run) else []
    if run.batch.microbatch_size == "auto":
        searched.append("microbatch")
    cluster = cluster_for(run, ranks, ranks_per_node or _devices(run, ranks),
                          otherwise=None if open_axes_of(run) else "h100")
    best = search(run, cluster, ranks, searched).best
    found = best[0].run if trial is None else trial.choose(run, cluster, ranks, searched, best)
    return resolve(run, Facts(mesh=found.mesh, microbatch_size=found.batch.microbatch_size))


def resolve_with_least(run: Run) -> ResolvedRun:
    """The run with the least value for each auto: for runs that cannot be planned, but must still be checked."""
    open_axes, mesh = open_axes_of(run), run.mesh
    if isinstance(mesh, MeshSettings):
        mesh = replace(mesh, tile=None).with_sizes(**dict.fromkeys(open_axes, 1))
    pipeline = run.pipeline
    if "pipe" in open_axes:
        pipeline = replace(pipeline, boundaries=None, deferred=None, defer_last=None)
    size = run.batch.microbatch_size
    return resolve(replace(run, pipeline=pipeline),
                   Facts(mesh=mesh, microbatch_size=mesh.microbatch_parts if size == "auto" else size))


def open_axes_of(run: Run) -> tuple[str, ...]:
    """The axes of the mesh that are auto."""
    return run.mesh.open_axes if isinstance(run.mesh, MeshSettings) else ()


def _unknown_ranks(axis: str) -> ConfigError:
    return ConfigError("needs to know how many ranks there are", code="number-of-ranks-unknown", where=f"mesh.{axis}",
                       value="auto",
                       remedy="Start them with torchrun, mpiexec or srun (check and simulate: say `--ranks N`), or set "
                              f"`--mesh.{axis}`.")


def _with_shape(run: Run, num_ranks: int | None) -> tuple[ResolvedRun, list[RanvierError]]:
    """`with_plan` if only rows and columns are open: the mesh with the fewest bytes."""
    mesh, open_axes = run.mesh, open_axes_of(run)
    if not isinstance(mesh, MeshSettings) or not open_axes:
        return resolve(run), []
    alone, axis = resolve_with_least(run), open_axes[0]
    if num_ranks is None:
        return alone, [_unknown_ranks(axis)]
    taken = alone.mesh.size  # by the given axes, since the others are 1
    stage, rest = divmod(num_ranks, taken)
    if rest or not stage:
        return alone, [ConfigError(f"is not possible: {num_ranks} ranks are not a multiple of {taken}, which the other "
                                   "axes take", code="mesh-axis-not-possible", where=f"mesh.{axis}", value="auto",
                                   remedy="Change `--mesh.data`, `--mesh.pipe` or the number of ranks.")]
    try:
        if len(open_axes) == 1:
            return resolve(run, Facts(mesh=mesh.with_sizes(**{axis: stage}))), []
        row, col = best_shape(stage, batch=alone.batch.microbatch_size, sequence=run.model.sequence,
                              hidden=run.model.hidden, heads=run.model.heads, scheme=volume_scheme(run.tensor))
        return resolve(run, Facts(mesh=mesh.with_sizes(row=row, col=col))), []
    except ConfigError as problem:
        return alone, [problem]


def _devices(run: Run, ranks: int) -> int:
    """Number of ranks on a node, if the launcher does not give it: the number of its GPUs, else all ranks."""
    gpus = torch.cuda.device_count() if run.launch.device != "cpu" and torch.cuda.is_available() else 0
    return min(ranks, gpus) or ranks


def cluster_for(run: Run, ranks: int, ranks_per_node: int, *, otherwise: str | None = None) -> Cluster:
    """The cluster that `launch.cluster` names; else nominal figures of the devices here. otherwise: the shipped cluster
    whose figures are used for unknown GPUs; None for a ConfigError."""
    if run.launch.cluster is not None:
        return load_cluster(run.launch.cluster)
    def here(cluster: Cluster) -> Cluster:
        return replace(cluster, nodes=-(-ranks // ranks_per_node), devices_per_node=ranks_per_node, name="this machine")

    memory = psutil.virtual_memory().total  # total rather than free memory: all ranks must get the same result
    if choose_device(run.launch.device, ranks_per_node).value == "cpu":
        cluster = load_cluster("laptop")
        return here(replace(cluster, device=replace(cluster.device, cores=available_cores()), host=replace(
            cluster.host, memory_bytes=min(memory, memory_limit_bytes() or memory))))
    name = torch.cuda.get_device_name(0)
    if known := shipped_cluster_with(name) or otherwise:
        found = load_cluster(known)
        device = replace(found.device, memory_bytes=torch.cuda.get_device_properties(0).total_memory)
        return here(replace(found, device=device, host=replace(found.host, memory_bytes=memory)))
    raise ConfigError(f"is not set, and no shipped cluster has a {name}", code="cluster-needed", where="launch.cluster",
                      value=None,
                      remedy="Measure this machine: `ranvier doctor --measure --out here.toml`; then set "
                             "`--launch.cluster here.toml`.")


def shipped_cluster_with(name: str) -> str | None:
    """The name of a shipped cluster with the GPU that torch calls `name`."""
    return next((known for known in cluster_names() if _is_device(load_cluster(known), name)), None)


def _is_device(cluster: Cluster, name: str) -> bool:
    """Whether the cluster's GPUs are those that torch calls `name`."""
    kind = re.sub(r" \d+ GB$", "", cluster.device.name)
    return cluster.device.cores is None and re.search(rf"\b{kind}\b", name, re.IGNORECASE) is not None
