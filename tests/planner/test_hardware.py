"""Times of links, devices and collectives against values worked out by hand; groups as the mesh places them."""

from dataclasses import replace

import pytest

from ranvier.cost.collectives import GroupPlacement, all_reduce_seconds, place_groups, received_seconds, tree_seconds
from ranvier.cost.hardware import Cluster, Device, Host, Link, Rate
from ranvier.cost.kernels import Access, Kernel, backward_of, weight_gradients_of
from ranvier.mesh import Mesh

INSIDE, BETWEEN = Link(bandwidth=100.0, latency_seconds=1.0), Link(bandwidth=20.0, share=0.5, latency_seconds=2.0)


def cluster(nodes=4, devices=4, **changes):
    return Cluster(**{
        "name": "test", "nodes": nodes, "devices_per_node": devices, "host": Host(memory_bytes=1000),
        "device": Device(name="d", memory_bytes=100, rates={"fp32": Rate(peak_flops=1000.0, share=0.5)},
                         memory_bandwidth=100.0, memory_share=0.5, operation_seconds=0.25),
        "inside": INSIDE, "between": BETWEEN, "host_link": Link(bandwidth=50.0), **changes})


def test_links_share_their_bandwidth():
    assert BETWEEN.rate() == 10.0 and BETWEEN.seconds(30.0) == 5.0 and BETWEEN.seconds(30.0, together=2) == 8.0
    capped = Link(bandwidth=20.0, single=4.0)
    assert [capped.rate(together) for together in (1, 4, 5, 10)] == [4.0, 4.0, 4.0, 2.0]


def test_a_kernel_is_computing_or_moving_and_its_launch():
    device, moved = cluster().device, (Access(0, 100, 100),)
    product, copy = Kernel(kind="product", flops=1500, reads=moved), Kernel(kind="copy", reads=moved)
    assert device.seconds([product, copy], "fp32") == 1500 / 500 + 100 / 50 + 0.5
    assert device.update_seconds(100.0) == 2.0


def test_a_gpu_launches_more_than_is_counted():
    """A product also launches zeros, and the sum for a bias's gradient also a cast and an addition."""
    moved = (Access(0, 100, 100),)
    product = Kernel(kind="product", reads=moved, writes=moved, shape=(1, 4, 4, 4), weight="trains", has_bias=True)
    kernels = weight_gradients_of([product], 4)
    assert [kernel.launches for kernel in (product, *kernels)] == [2, 2, 4]
    attention = backward_of([Kernel(kind="attention", reads=moved, writes=moved)])
    assert [kernel.launches for kernel in attention] == [4]
    gpu, cpu = replace(cluster().device, multiprocessors=1, reduction_share=0.25), cluster().device
    (_, bias) = kernels
    assert gpu.kernel_seconds(bias, "fp32") == 100 / 25 + 4 * 0.25
    assert cpu.kernel_seconds(bias, "fp32") == 100 / 50 + 0.25
    (backward,) = attention
    assert gpu.attention_backward_overhead_seconds(100) == 200 / 25 + 300 / 50
    more = replace(backward, flops=10_000)
    assert gpu.kernel_seconds(more, "fp32") == 10_000 / 500 + 14 + 4 * 0.25
    assert cpu.kernel_seconds(more, "fp32") == 10_000 / 500 + 0.25


def test_sums_over_a_dim_reach_a_share_of_their_own():
    """If the device's file has such a share."""
    device = cluster().device
    copy = Kernel(kind="pointwise", reads=(Access(0, 100, 100),))
    total = replace(copy, is_reduction=True)
    assert device.seconds([total], "fp32") == device.seconds([copy], "fp32") == 100 / 50 + 0.25
    slower = replace(device, reduction_share=0.25)
    assert (slower.seconds([total], "fp32"), slower.seconds([copy], "fp32")) == (100 / 25 + 0.25, 100 / 50 + 0.25)


@pytest.mark.parametrize(("mesh", "axis", "per_node", "found"), [
    (Mesh(data=8, pipe=6), "data", 6, GroupPlacement(members=8, inside=1, together=6)),  # AxoNN: a replica is a node
    (Mesh(data=2, pipe=24), "data", 6, GroupPlacement(members=2, inside=1, together=6)),
    (Mesh(data=4, pipe=2), "data", 8, GroupPlacement(members=4, inside=4, together=0)),
    (Mesh(data=8, pipe=2), "data", 8, GroupPlacement(members=8, inside=4, together=2)),
    (Mesh(row=4, col=4), "col", 4, GroupPlacement(members=4, inside=4, together=0)),
    (Mesh(row=4, col=4), "row", 4, GroupPlacement(members=4, inside=1, together=4)),
    (Mesh(row=4, col=4, tile=(2, 2)), "col", 4, GroupPlacement(members=4, inside=2, together=2)),  # Optimus, Figure 8
    (Mesh(row=4, col=4, tile=(2, 2)), "row", 4, GroupPlacement(members=4, inside=2, together=2)),
    (Mesh(pipe=3), "data", 4, GroupPlacement(members=1, inside=1, together=0)),
], ids=str)
def test_where_groups_lie(mesh, axis, per_node, found):
    assert place_groups(mesh, axis, per_node) == found


def test_collectives():
    one = GroupPlacement(members=4, inside=4, together=0)
    assert all_reduce_seconds(400.0, one, cluster()) == 6 * (1 + 1)
    across = GroupPlacement(members=4, inside=2, together=2)
    assert all_reduce_seconds(400.0, across, cluster()) == 2 * (2 + 1) + 400 / 5  # a pair of trees over two nodes
    assert all_reduce_seconds(400.0, across, cluster(), scatters=True) == 6 * (3 / 2 + 100 / 5)
    four_nodes = GroupPlacement(members=8, inside=2, together=2)
    assert all_reduce_seconds(400.0, four_nodes, cluster()) == 14 * ((2 + 1) / 2 + 50 / 5)  # every second hop is inside
    assert all_reduce_seconds(4.0, four_nodes, cluster()) == 2 * (2 * 2 + 1) + 2 * 4 / 5  # two trees over four nodes
    assert all_reduce_seconds(4.0, four_nodes, cluster(collective_seconds=5.0), pieces=3) == 3 * (5 + 10) + 8 / 5
    assert all_reduce_seconds(4.0, four_nodes, cluster(), pieces=3, scatters=True) == pytest.approx(
        3 * 14 * 3 / 2 + 14 * 4 / 8 / 5)
    assert all_reduce_seconds(400.0, one, cluster(collective_seconds=5.0)) == 5 + 12
    assert all_reduce_seconds(400.0, GroupPlacement(members=1), cluster(collective_seconds=5.0)) == 0
    assert received_seconds(300.0, 3, one, cluster()) == 3 * 1 + 3 and received_seconds(1.0, 1,
                                                                                        GroupPlacement(members=1),
                                                                                        cluster()) == 0
    assert tree_seconds(300.0, across, cluster()) == 400 / 100 + 400 / 5


def test_a_ring_waits_for_its_slowest_link_and_each_hop_has_its_latency():
    slow_inside = cluster(inside=Link(bandwidth=2.0))
    across = GroupPlacement(members=8, inside=2, together=1)
    assert all_reduce_seconds(400.0, across, slow_inside) == 14 * (2 / 2 + 50 / 2)
    assert received_seconds(0.0, 7, replace(across, inside=4), cluster()) == 7 * (2 + 3 * 1) / 4
    assert received_seconds(0.0, 7, replace(across, inside=1), cluster()) == 7 * 2
