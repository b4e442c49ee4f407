"""Seconds of collectives on groups of ranks that are spread over nodes.

    ring    n members, n - 1 steps of size / n each (all-gather, reduce-scatter), twice that for an all-reduce
    tree    ceil(log2 n) steps of the full size (broadcast, reduce)
    trees   an all-reduce over nodes (NCCL's double binary trees): log2 nodes hops up and down, and a chain inside each
            node. Nearly twice the size leaves a node, as in a ring; with two nodes (each a root), just the size

The members of a group that share a node are neighbours in the ring, so that in each step one message leaves the node
for each group with members there; these groups take turns on the node's link. The slowest link bounds the bytes; a
piece's latency is that of the hops on its way, most of them inside nodes. Algorithms: Thakur et al., 2005. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, log2

from ranvier.cost.hardware import Cluster, Link
from ranvier.mesh import Mesh

_NODES_SEEN = 64
"""Number of nodes on which a placement is examined; the pattern of ranks repeats long before."""


@dataclass(frozen=True, kw_only=True)
class GroupPlacement:
    """A group's placement on nodes. inside: number of its members on one node; together: number of groups of its kind
    that send out of one node at the same time, 0 if all members are on one node."""

    members: int
    inside: int = 1
    together: int = 1

    @property
    def crosses(self) -> bool:
        """Whether its members are on several nodes."""
        return self.inside < self.members


@lru_cache(maxsize=1024)  # a search asks this for very many candidates
def place_groups(mesh: Mesh, axes: str | tuple[str, ...], ranks_per_node: int) -> GroupPlacement:
    """Placement on nodes of the groups along `axes` of the mesh, with `ranks_per_node` consecutive ranks on each node:
    that of the node that sends the most."""
    axes = (axes,) if isinstance(axes, str) else axes
    members = mesh.count(axes)
    worst = GroupPlacement(members=members, inside=members, together=0)
    if members == 1:
        return worst
    others = [axis for axis in mesh if axis not in axes]
    nodes, seen = min(_NODES_SEEN, -(-mesh.size // ranks_per_node)), set[tuple[int, int]]()
    for node in range(nodes):
        ranks = range(node * ranks_per_node, min(mesh.size, (node + 1) * ranks_per_node))
        alike = ranks.start % (mesh.pipeline_size * mesh.stage_size), len(ranks)
        if alike in seen:  # the same places of another replica
            continue
        seen.add(alike)
        groups = Counter(tuple(at[axis] for axis in others) for at in map(mesh.coordinates, ranks))
        leaving = [count for count in groups.values() if count < members]
        if len(leaving) > worst.together or (len(leaving) == worst.together and leaving
                                             and min(leaving) < worst.inside):
            worst = GroupPlacement(members=members, inside=min(leaving), together=len(leaving))
    return worst


def all_reduce_seconds(size: float, group: GroupPlacement, cluster: Cluster, *, pieces: int = 1, scatters: bool = False
                       ) -> float:
    """Seconds of all-reduces of `size` bytes in total, in `pieces` pieces one after another: by rings, or over several
    nodes by trees if that is faster. scatters: each is a reduce-scatter and an all-gather, which are rings."""
    if group.members == 1:
        return 0.0
    link, together = slowest(group, cluster)
    ring = ring_seconds(size, group.members, lambda piece: pieces * hop_latency(group, cluster)
                        + piece / link.rate(together))
    trees = inf if scatters else _trees_seconds(size, group, cluster, pieces)
    return pieces * cluster.collective_seconds + (min(ring, trees) if size else 0.0)


def ring_seconds(size: float, members: int, step_seconds: Callable[[float], float]) -> float:
    """Seconds of an all-reduce of `size` bytes around a ring (Thakur et al., 2005), which takes 2 (members - 1) steps
    with one member's piece each. step_seconds: seconds of a step, by the bytes of its piece."""
    return 2 * (members - 1) * step_seconds(size / members)


def _trees_seconds(size: float, group: GroupPlacement, cluster: Cluster, pieces: int = 1) -> float:
    """Seconds of the same all-reduces by trees over nodes."""
    if not group.crosses:
        return inf
    nodes = -(-group.members // group.inside)
    latency = 2 * (ceil(log2(nodes)) * cluster.between.latency_seconds
                   + (group.inside - 1) * cluster.inside.latency_seconds)
    leaving = size if nodes == 2 else 2 * size
    inside = 2 * size / cluster.inside.rate() if group.inside > 1 else 0.0
    return pieces * latency + max(leaving / cluster.between.rate(group.together), inside)


def hop_latency(group: GroupPlacement, cluster: Cluster) -> float:
    """Mean latency of the hops of a ring along the group: one of the `inside` hops from a node's members leads to the
    next node."""
    if not group.crosses:
        return cluster.inside.latency_seconds
    return cluster.inside.latency_seconds + (
        cluster.between.latency_seconds - cluster.inside.latency_seconds) / group.inside


def received_seconds(size: float, steps: int, group: GroupPlacement, cluster: Cluster) -> float:
    """Seconds of collectives along `group` in which each member receives `size` bytes in total, in `steps` messages."""
    if group.members == 1:
        return 0.0
    link, together = slowest(group, cluster)
    return steps * hop_latency(group, cluster) + size / link.rate(together)


def reduced_seconds(size: float, steps: int, group: GroupPlacement, cluster: Cluster) -> float:
    """Seconds of all-reduces, in which each member of a ring receives `size` bytes in total, in `steps` messages."""
    ring = received_seconds(size, steps, group, cluster)
    whole = size / 2 * group.members / max(1, group.members - 1)
    return min(ring, _trees_seconds(whole, group, cluster)) if size else ring


def tree_seconds(size: float, group: GroupPlacement, cluster: Cluster) -> float:
    """Seconds of broadcasts and reductions along trees, in which each member receives `size` bytes in total from the
    others: every level passes on all bytes, first between nodes, then inside them (Optimus)."""
    if group.members == 1:
        return 0.0
    whole = size * group.members / (group.members - 1)
    found = log2(group.inside) * whole / cluster.inside.rate()
    if group.crosses:
        found += log2(group.members / group.inside) * whole / cluster.between.rate(group.together)
    return found


def tree_latency(group: GroupPlacement, cluster: Cluster) -> float:
    """Seconds of one small message down the tree."""
    found = ceil(log2(group.inside)) * cluster.inside.latency_seconds
    return found + ceil(log2(group.members / group.inside)) * cluster.between.latency_seconds * group.crosses


def slowest(group: GroupPlacement, cluster: Cluster) -> tuple[Link, float]:
    """The slowest link of a ring along the group, and the number of rings that share it."""
    if not group.crosses:
        return cluster.inside, 1.0
    if group.inside > 1 and cluster.inside.rate() < cluster.between.rate(group.together):
        return cluster.inside, 1.0
    return cluster.between, float(group.together)
