"""The messages between stages on a cluster, and how they change the schedule's limits."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from ranvier.cli.check import check
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Launch, Pipeline, TensorParallel, Transformer
from ranvier.cost.cluster_files import load_cluster, write_cluster
from ranvier.cost.hardware import Link
from ranvier.cost.stage_messages import SMALLEST_IN_PARTS, edge_links, edge_parts, edge_seconds, link_conditions
from ranvier.cost.step import step_cost
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.plan.limits import run_limits
from ranvier.plan.plan import make_for_run
from ranvier.planner.candidates import predict
from ranvier.planner.conditions import conditions_of
from ranvier.planner.count import recomputed_runs
from ranvier.planner.run_cost import run_cost, step_of
from ranvier.planner.work import Work
from ranvier.schedule.limits import Conditions

RUN = ResolvedRun(model=Transformer(num_layers=16, hidden=1024, heads=16, vocab=8192, sequence=512), precision="bf16",
                  batch=Batch(global_size=16, microbatch_size=1), mesh=Mesh(pipe=4), launch=Launch(device="cuda"),
                  pipeline=Pipeline(memory=2.0))
H100, WORK = load_cluster("h100"), Work()
H100 = replace(H100, device=replace(H100.device, operation_seconds=0.0))  # launches take longer than such small kernels


def linked(seconds):
    """A node for each device; a message takes `seconds`, whatever its size."""
    return replace(H100, nodes=64, devices_per_node=1, between=Link(bandwidth=1e24, latency_seconds=seconds))


def forward_seconds(run):
    """Forward seconds of the slowest stage."""
    return max(sum(H100.device.seconds(block.kernels, run.precision) for block in blocks)
               for blocks in WORK.stages(run))


def test_messages_are_those_of_the_slowest_edge_beside_the_slowest_stage():
    forward, bytes_ = forward_seconds(RUN), 2 * 512 * 1024
    assert link_conditions(RUN, WORK.stages(RUN), linked(0.3 * forward)) == Conditions(messages=0.3)
    slow = replace(linked(0.0), between=Link(bandwidth=bytes_ / (0.4 * forward)))
    assert link_conditions(RUN, WORK.stages(RUN), slow) == Conditions(messages=0.4)
    # Two nodes of two devices: one edge of three is between them.
    assert link_conditions(RUN, WORK.stages(RUN), replace(slow, devices_per_node=2)) == Conditions(messages=0.4)
    assert [link for link, _ in edge_links(RUN.mesh, replace(slow, devices_per_node=2))] == [
        slow.inside, slow.between, slow.inside]
    inside = link_conditions(RUN, WORK.stages(RUN), replace(slow, devices_per_node=4)).messages
    assert inside < 0.1
    for run, cluster in ((RUN, None), (replace(RUN, mesh=Mesh()), slow), (replace(RUN, precision="fp64"), replace(
            slow, device=replace(slow.device, rates={"bf16": slow.device.rates["bf16"]})))):
        assert conditions_of(run, WORK.stages(run), (), cluster) == Conditions()


@pytest.mark.parametrize(("mesh", "per_node", "parts"), [
    (Mesh(pipe=3, col=4), 4, [4, 4]), (Mesh(pipe=3, col=4), 8, [1, 4]), (Mesh(pipe=3, col=4), 2, [1, 1]),
    (Mesh(pipe=2, col=4), 8, [1]), (Mesh(pipe=4), 1, [1, 1, 1]), (Mesh(data=2, pipe=3, col=4), 8, [1, 1])], ids=str)
def test_columns_send_parts_where_a_message_leaves_the_node_that_they_share(mesh, per_node, parts):
    """Two replicas of three stages on nodes of two stages: at each edge only one replica's messages leave the node."""
    run, cluster = replace(RUN, mesh=mesh, tensor=TensorParallel(scheme="megatron")), replace(
        H100, devices_per_node=per_node)
    assert edge_parts(run, cluster) == parts
    for tensor in (TensorParallel(), TensorParallel(scheme="megatron", sequence_sharding=True)):
        assert set(edge_parts(replace(run, tensor=tensor), cluster)) == {1}
    assert set(edge_parts(run, replace(cluster, device=replace(H100.device, cores=8)))) == {1}


def test_parts_take_less_of_the_link_between_nodes_and_then_a_gather():
    megatron = replace(RUN, mesh=Mesh(pipe=2, col=4), tensor=TensorParallel(scheme="megatron"))
    whole = replace(megatron, tensor=TensorParallel())
    cluster, size = replace(H100, devices_per_node=4), 64 << 20
    (sent, latency), (all_sent, first) = (edge_seconds(run, [size], cluster)[0] for run in (megatron, whole))
    assert sent == pytest.approx(all_sent / 4) and all_sent == size / H100.between.rate(4)
    assert latency - first == pytest.approx(
        H100.collective_seconds + 3 * H100.inside.latency_seconds + 0.75 * size / H100.inside.rate())
    assert sent + latency < all_sent + first
    small = [SMALLEST_IN_PARTS - 1]
    assert edge_seconds(megatron, small, cluster) == edge_seconds(whole, small, cluster)


@pytest.mark.parametrize(("pipe", "memory", "gain"), [
    pytest.param(2, 2.0, 0.0, marks=pytest.mark.slow), (4, 2.0, 0.05),
    pytest.param(8, 2.0, 0.04, marks=pytest.mark.slow), (4, 1.1, 0.0)])
def test_slow_links_have_more_in_flight_and_no_slower_step(pipe, memory, gain):
    """memory: 1.1 times 1F1B's memory allows no more in flight. gain: of a step, over limits that ignore links; limits
    that consider them are chosen for varying times, and may be 3 % slower without delays."""
    run = replace(RUN, mesh=Mesh(pipe=pipe), pipeline=Pipeline(memory=memory))
    stages, forward = WORK.stages(run), forward_seconds(run)
    segments, limits = recomputed_runs(run, stages), []
    for cluster, less in ((linked(0.0), -0.03), (linked(1.25 * forward), gain)):
        step = step_of(run, stages, cluster)
        assert step.limits == run_limits(run, stages, segments, conditions_of(run, stages, segments, cluster))
        limits.append(step.limits)
        assumed = replace(step, limits=run_limits(run, stages, segments))
        assert step_cost(step, cluster).seconds <= (1 - less) * step_cost(assumed, cluster).seconds * (1 + 1e-3)
    assert (limits[1].in_flight > limits[0].in_flight) == (memory > 1.1)


def test_a_plans_memory_and_checks_are_of_the_same_limits(tmp_path):
    """More microbatches are in flight than for fast links, so more is stored."""
    slow = linked(forward_seconds(RUN))
    write_cluster(slow, tmp_path / "slow.toml")
    stored = {name: [entry.device["activations"] for entry in each] for name, each in (
        ("plan", predict(RUN, slow).memory), ("check", check(RUN, cluster=str(tmp_path / "slow.toml")).memory),
        ("fast", predict(RUN, linked(0.0)).memory))}
    assert stored["plan"] == stored["check"] and sum(stored["fast"]) < sum(stored["plan"])
    curve = check(RUN, cluster=str(tmp_path / "slow.toml")).schedule
    assert curve[0].limits == run_limits(RUN, WORK.stages(RUN), (), conditions_of(RUN, WORK.stages(RUN), (), slow))


@pytest.mark.parametrize("mesh", [Mesh(pipe=4, col=4), Mesh(pipe=4, row=2, col=2)], ids=str)
def test_weight_gradients_wait_on_a_tensor_mesh_only_where_that_pays(mesh):
    """By the cost model of steps; an engine decides the same if `launch.cluster` names the cluster, and otherwise as if
    nothing is known."""
    run = replace(RUN, mesh=mesh, tensor=TensorParallel(sequence_sharding=True), launch=replace(
        RUN.launch, cluster="h100"), batch=replace(RUN.batch, microbatch_size=RUN.batch.microbatch_size * mesh.row))
    stages, cluster = WORK.stages(run), load_cluster("h100")
    segments = recomputed_runs(run, stages)
    priced, unknown = step_of(run, stages, cluster), replace(run, launch=replace(run.launch, cluster=None))
    assert min(cost.backward + cost.weight for cost in conditions_of(run, stages, segments).deferral) > 0.1
    assert conditions_of(unknown, stages, segments).deferral == ()
    none = run_cost(replace(run, pipeline=replace(run.pipeline, defer_bytes=0)), cluster, stages)
    as_before = step_cost(replace(priced, limits=run_limits(run, stages, segments)), cluster)
    assert step_cost(priced, cluster).seconds < min(1.003 * none.seconds, 0.97 * as_before.seconds)
    model = families.model_of(run, dtype=torch.bfloat16)
    with torch.device("meta"):
        sample = families.sample_of(run, run.row_microbatch_size)
    for each, limits in ((run, priced.limits), (unknown, run_limits(run, stages, segments))):
        assert make_for_run(each, model, sample, conditions=partial(conditions_of, each)).limits == limits
