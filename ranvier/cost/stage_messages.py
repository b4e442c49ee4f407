"""The messages between the stages of a pipeline: over which link they travel, and how long they take beside the stages'
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
    """Cores that one rank of the mesh computes with; 1 where each rank has a device of its own."""
    cores = cluster.device.cores
    return 1.0 if cores is None else max(1.0, cores // min(cluster.devices_per_node, mesh.size))


def replica_offsets(mesh: Mesh, per_node: int) -> set[int]:
    """Positions on a node at which replicas begin: all wait for the one that is placed worst."""
    replica = mesh.pipeline_size * mesh.stage_size
    return {data * replica % per_node for data in range(min(mesh.num_replicas, per_node))}


SMALLEST_IN_PARTS = 4 << 20
"""Bytes of a tensor of which columns send parts: a smaller one travels between nodes in less time than its parts need
for their gather's start."""


def sends_parts(columns: Collection[int], others: Collection[int], node: Collection[int]) -> bool:
    """Whether columns that hold the same activations each send a part of them to the columns of another stage, which
    gather the parts: between nodes, where the ranks of a node are linked faster, and share what leaves it.

    columns, others: ranks. node: those on the node of one of `columns`.
    """
    return len(columns) > 1 and set(columns) <= set(node) and not set(others) & set(node)


def edge_parts(run: ResolvedRun, cluster: Cluster) -> list[int]:
    """For each edge between neighbouring ranks of a pipeline, the number of parts in which its columns send an
    activation."""
    if run.tensor.scheme != "megatron" or run.tensor.shards_sequence or cluster.device.cores is not None:
        return [1] * (run.mesh.pipeline_size - 1)
    return _parts_between_nodes(run.mesh, cluster.devices_per_node)


@lru_cache(maxsize=1024)  # a search asks the same of very many candidates
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
    """Seconds for which a message of so many bytes keeps each edge between neighbouring ranks busy, and until it is
    there after that."""
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
    """For each edge between neighbouring ranks of a pipeline, its link, and how many messages share that."""
    per_node = cluster.devices_per_node
    return [(cluster.between if crossing else cluster.inside, min(max(1, crossing), per_node))
            for crossing in _messages_between_nodes(mesh, per_node)]


@lru_cache(maxsize=1024)
def _messages_between_nodes(mesh: Mesh, per_node: int) -> list[int]:
    """For each edge between neighbouring ranks of a pipeline, the number of its messages that leave a node, of the
    replica that is placed worst."""
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
    """The conditions of a run's pipeline on a cluster, with messages as its slowest edge takes them. stages: the blocks
    of each, with their kernels."""
    device, threads = cluster.device, rank_threads(cluster, run.mesh)
    kernels = {id(block.kernels): block.kernels for blocks in stages for block in blocks}  # alike blocks share them
    seconds = {key: device.seconds(each, run.precision, threads) for key, each in kernels.items()}
    forward = run.placement.per_rank * max(sum(seconds[id(block.kernels)] for block in blocks) for blocks in stages)
    message = max(map(sum, edge_seconds(run, edge_bytes(run.placement, stages), cluster)))
    # One digit: limits are simulated anew for other messages, and a search has very many alike pipelines.
    return Conditions(messages=float(f"{message / forward:.0e}")) if forward else Conditions()
