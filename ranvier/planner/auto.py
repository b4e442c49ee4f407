"""`auto` in a run: what a search chooses for the axes of the mesh and the microbatch that the user leaves open.

Rows and columns alone are a matter of bytes (`ranvier.tensor.shape`); as soon as data, pipe or the microbatch is open,
all that is open is searched together, on the cluster that `launch.cluster` names.
"""

from __future__ import annotations

import re
from dataclasses import replace

import psutil
import torch

from ranvier.errors import ConfigError
from ranvier.launch import choose_device
from ranvier.machine import available_cores, memory_limit_bytes
from ranvier.mesh import AXES
from ranvier.planner.cluster_files import cluster_names, load_cluster
from ranvier.planner.hardware import Cluster
from ranvier.planner.search import Setting, search
from ranvier.run import Run


def planned(run: Run, ranks: int, ranks_per_node: int | None = None) -> Run:
    """The run with the fastest mesh and microbatch on `ranks` devices; what is not auto stays. ConfigError where
    nothing is possible or fits, or where nothing is known of the devices here."""
    searched: list[Setting] = ["mesh"] if run.mesh.is_open else []
    if run.batch.microbatch_size == "auto":
        searched.append("microbatch")
    cluster = cluster_for(run, ranks, ranks_per_node or _devices(run, ranks))
    found = search(run, cluster, ranks, searched).best[0].run
    return replace(run, mesh=found.mesh, batch=found.batch)


def closed(run: Run) -> Run:
    """The run with the least in the place of each auto: for what cannot be planned, and must be looked at all the
    same."""
    mesh = replace(run.mesh, tile=None, **{axis: 1 for axis in AXES if getattr(run.mesh, axis) == "auto"})
    size = mesh.row if run.batch.microbatch_size == "auto" else run.batch.microbatch_size
    boundaries = None if run.mesh.pipe == "auto" else run.pipeline.boundaries
    return replace(run, mesh=mesh, batch=replace(run.batch, microbatch_size=size),
                   pipeline=replace(run.pipeline, boundaries=boundaries))


def _devices(run: Run, ranks: int) -> int:
    """Ranks on a node, where their launcher does not say: as many as it has GPUs, else all."""
    gpus = torch.cuda.device_count() if run.launch.device != "cpu" and torch.cuda.is_available() else 0
    return min(ranks, gpus) or ranks


def cluster_for(run: Run, ranks: int, ranks_per_node: int) -> Cluster:
    """What `launch.cluster` names; else nominal figures of the devices here."""
    if run.launch.cluster is not None:
        return load_cluster(run.launch.cluster)
    here = {"nodes": -(-ranks // ranks_per_node), "devices_per_node": ranks_per_node, "name": "this machine"}
    memory = psutil.virtual_memory().total  # not what is free now: all ranks must come to the same
    if choose_device(run.launch.device, ranks_per_node).value == "cpu":
        cluster = load_cluster("laptop")
        return replace(cluster, device=replace(cluster.device, cores=available_cores()),
                       host=replace(cluster.host, memory_bytes=min(memory, memory_limit_bytes() or memory)), **here)
    name = torch.cuda.get_device_name()
    for known in map(load_cluster, cluster_names()):
        kind = re.sub(r" \d+ GB$", "", known.device.name)
        if known.device.cores is None and re.search(rf"\b{kind}\b", name, re.IGNORECASE):
            device = replace(known.device, memory_bytes=torch.cuda.get_device_properties(0).total_memory)
            return replace(known, device=device, host=replace(known.host, memory_bytes=memory), **here)
    raise ConfigError(f"is not told, and no shipped cluster has a {name}", where="launch.cluster", value=None,
                      remedy="Measure this machine: ranvier doctor --measure --out here.toml; then set "
                             "--launch.cluster here.toml.")
