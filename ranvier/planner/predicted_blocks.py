"""The facts that the choice of a mesh depends on, as a cluster's constants predict them: what a run measures instead is
in `ranvier.train.measured_blocks`."""

from __future__ import annotations

from dataclasses import replace

from ranvier.config.resolve import ResolvedRun
from ranvier.cost.hardware import Cluster
from ranvier.cost.kernels import backward_of, weight_gradients_of
from ranvier.cost.stage_messages import rank_threads
from ranvier.cost.step import update_seconds
from ranvier.elastic.inputs import LINKS, BlockFacts, ElasticRules, PresentMesh
from ranvier.elastic.mesh_candidates import with_present_seconds
from ranvier.elastic.microbatch_profile import MicrobatchProfile
from ranvier.mesh import Mesh
from ranvier.planner.run_cost import step_of
from ranvier.planner.work import Work


def predicted_blocks(run: ResolvedRun, cluster: Cluster, work: Work, present: PresentMesh,
                     profile: MicrobatchProfile | None = None) -> BlockFacts:
    """Facts of the blocks of `run`, which is on the present mesh: seconds of one sample in each block on one rank, and
    bytes.

    Links are the nominal ones by which a run decides (`ranvier.elastic.inputs.LINKS`), not the cluster's.
    """
    mesh, size = run.mesh, run.batch.microbatch_size
    stages = work.stages(run, present.frozen)
    step = step_of(run, stages, cluster)
    threads, local = rank_threads(cluster, mesh), min(cluster.devices_per_node, mesh.size)
    blocks = [block for blocks in stages for block in blocks]
    known = {id(block.kernels): [cluster.device.seconds(kernels, run.precision, threads) / size for kernels in (
        block.kernels, backward_of(block.kernels), weight_gradients_of(block.kernels, step.bytes.gradient),
        block.repeated_kernels, block.last_repeated_kernels)]
        for block in {id(block.kernels): block for block in blocks}.values()}
    forward, backward, weight, repeated, last = zip(*(known[id(block.kernels)] for block in blocks), strict=True)
    again = [0.0 if place not in stage.recomputed else ended if place in stage.ends else inside
             for (stage, place), inside, ended in zip(
                 ((stage, place) for stage in step.stages for place in range(len(stage.blocks))), repeated, last,
                 strict=True)]
    outputs = [block.output_bytes for block in blocks]
    alone = replace(run, mesh=Mesh(), batch=replace(run.batch, microbatch_size=1))
    parameters = tuple(block.num_owned for block in work.blocks(alone))
    update = 0.0 if run.optim.update_in_backward else update_seconds(
        step, cluster, max(1, sum(parameters)) / mesh.stage_size, local=local, threads=threads
    ) / max(1, sum(parameters))
    cores, nodes = cluster.device.cores, -(-mesh.size // cluster.devices_per_node)
    usual = "torch" if cores is None else "mpi"
    bandwidth, latency = LINKS[usual if run.comm.transport == "auto" else run.comm.transport]
    facts = BlockFacts(
        forward_seconds=forward,
        backward_seconds=tuple(of_inputs + of_weights * (block.num_trainable > 0) + second_run
                               for block, of_inputs, of_weights, second_run in zip(
                                   blocks, backward, weight, again, strict=True)),
        update_seconds=tuple(update * count for count in parameters),
        output_bytes=tuple(-(-sent // max(1, size // mesh.microbatch_parts)) for sent in outputs),
        num_parameters=parameters,
        parameter_bytes=tuple(step.bytes.parameter * count for count in parameters),
        state_bytes=tuple(round(step.bytes.state * step.num_states) * count for count in parameters),
        cores=None if cores is None else cores * nodes / threads / mesh.stage_size, bandwidth=bandwidth,
        latency_seconds=latency)
    return with_present_seconds(facts, ElasticRules(run), present, profile)
