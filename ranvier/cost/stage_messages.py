"""The messages between the stages of a pipeline: the link that carries them, and their time relative to the stages'
work. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.blocks import Stages
from ranvier.cost.collectives import place_groups, received_seconds
from ranvier.cost.hardware import Cluster, Link
from ranvier.mesh import Mesh, StagePlacement
from ranvier.schedule.limits import Conditions


def rank_threads(cluster: Cluster, mesh: Mesh) -> float:
    """Number of cores that one rank of the mesh computes with; 1 if each rank has its own device."""
    cores = cluster.device.cores
    return 1.0 if cores is None else max(1.0, cores // min(cluster.devices_per_node, mesh.size))


def replica_offsets(mesh: Mesh, per_node: int) -> set[int]:
    """Positions on a node at which replicas begin: all replicas wait for the one with the worst placement."""
    replica = mesh.pipeline_size * mesh.stage_size
    return {data * replica % per_node for data in range(min(mesh.num_replicas, per_node))}


SMALLEST_IN_PARTS = 4 << 20
"""Smallest bytes of a tensor that columns send in parts: a smaller one is sent between nodes in less time than starting
the gather of its parts takes."""


def sends_parts(columns: Collection[int], others: Collection[int], node: Collection[int]) -> bool:
    """Whether columns that hold the same activations each send a part of them to the columns of another stage, which
    gather the parts: between nodes, since the ranks of a node have faster links, and share the link out of it.

    columns, others: ranks. node: those on the node of one of `columns`.
    """
    return len(columns) > 1 and set(columns) <= set(node) and not set(others) & set(node)


def edge_parts(run: ResolvedRun, cluster: Cluster) -> list[int]:
    """For each edge between neighbouring ranks of a pipeline, the number of parts in which its columns send an
    activation."""
    if run.tensor.scheme != "megatron" or run.tensor.shards_sequence or cluster.device.cores is not None:
        return [1] * (run.mesh.pipeline_size - 1)
    return _parts_between_nodes(run.mesh, cluster.devices_per_node)


@lru_cache(maxsize=1024)  # a search asks this for very many candidates
def _parts_between_nodes(mesh: Mesh, per_node: int) -> list[int]:
    """`edge_parts` of columns that hold the same activations."""
    size, axes, found = mesh.stage_size, mesh.over(splits_features=True), list[int]()
    groups, offsets = {mesh.group(rank, *axes) for rank in range(size)}, replica_offsets(mesh, per_node)
    for place in range(mesh.pipeline_size - 1):  # ranks of a stage are numbered as those of the first
        parts = all(
            sends_parts([first + rank for rank in group], [first + rank + size for rank in group],
                        range(node := (first + group[0]) // per_node * per_node, node + per_node))
            for group in groups for first in (offset + place * size for offset in offsets))
        found.append(mesh.count(axes) if parts else 1)
    return found


def edge_seconds(run: ResolvedRun, sizes: Sequence[float], cluster: Cluster) -> list[tuple[float, float]]:
    """Seconds for which a message of these bytes keeps each edge between neighbouring ranks busy, and further seconds
    until it arrives."""
    group, found = place_groups(run.mesh, run.mesh.over(splits_features=True), cluster.devices_per_node), []
    for (link, together), parts, size in zip(edge_links(run.mesh, cluster), edge_parts(run, cluster), sizes,
                                             strict=True):
        if size < SMALLEST_IN_PARTS:
            parts = 1
        gathered = 0.0 if parts == 1 else cluster.collective_seconds + received_seconds(
            size * (parts - 1) / parts, parts - 1, group, cluster)
        found.append((size / parts / link.rate(together), link.latency_seconds + gathered))
    return found


def edge_links(mesh: Mesh, cluster: Cluster) -> list[tuple[Link, int]]:
    """For each edge between neighbouring ranks of a pipeline, its link, and the number of messages that share it."""
    per_node = cluster.devices_per_node
    return [(cluster.between if crossing else cluster.inside, min(max(1, crossing), per_node))
            for crossing in _messages_between_nodes(mesh, per_node)]


@lru_cache(maxsize=1024)
def _messages_between_nodes(mesh: Mesh, per_node: int) -> list[int]:
    """For each edge between neighbouring ranks of a pipeline, the number of its messages that leave a node, for the
    replica with the worst placement."""
    size, offsets = mesh.stage_size, replica_offsets(mesh, per_node)
    return [max(sum([rank // per_node != (rank + size) // per_node
                     for rank in range(first + place * size, first + (place + 1) * size)]) for first in offsets)
            for place in range(mesh.pipeline_size - 1)]


def sent_bytes(placement: StagePlacement, stages: Stages) -> list[tuple[tuple[int, int], int]]:
    """(Rank, rank) and bytes of the message of one microbatch over each boundary of stages that crosses ranks."""
    ends = [(placement.rank_of(stage), placement.rank_of(stage + 1)) for stage in range(len(stages) - 1)]
    return [(edge, blocks[-1].output_bytes) for edge, blocks in zip(ends, stages, strict=False) if edge[0] != edge[1]]


def edge_bytes(placement: StagePlacement, stages: Stages) -> list[int]:
    """For each edge between neighbouring ranks, the bytes of the largest message that stages send over it."""
    sent = sent_bytes(placement, stages)
    return [max(size for edge, size in sent if min(edge) == place) for place in range(placement.num_ranks - 1)]


def link_conditions(run: ResolvedRun, stages: Stages, cluster: Cluster) -> Conditions:
    """The conditions of a run's pipeline on a cluster, with the message time of its slowest edge. stages: the blocks of
    each stage, with their kernels."""
    device, threads = cluster.device, rank_threads(cluster, run.mesh)
    kernels = {id(block.kernels): block.kernels for blocks in stages for block in blocks}  # equal blocks share them
    seconds = {key: device.seconds(each, run.precision, threads) for key, each in kernels.items()}
    forward = run.placement.per_rank * max(sum(seconds[id(block.kernels)] for block in blocks) for blocks in stages)
    message = max(map(sum, edge_seconds(run, edge_bytes(run.placement, stages), cluster)))
    # One digit: other messages need a new simulation of limits, and a search has very many similar pipelines.
    return Conditions(messages=float(f"{message / forward:.0e}")) if forward else Conditions()
