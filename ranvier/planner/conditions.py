"""Conditions under which a run's pipeline runs on a cluster, which determine the limits of its schedule.

These are the times of messages between stages, and the cost of deferred weight gradients, by the law that predicts
steps. The engine of a run, `check`, `plan` and `simulate` all use this file. It is above the models, since they
determine which layers of a block are split over the tensor mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from torch import nn

from ranvier.block import meta_device
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.cost.blocks import Stages
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.hardware import Cluster
from ranvier.cost.stage_messages import link_conditions
from ranvier.cost.step import ElementBytes, StageWork, Step, deferral_costs
from ranvier.cost.volume import SplitLayer
from ranvier.models import families
from ranvier.plan.limits import Segments, may_defer
from ranvier.precision import DTYPES, reduce_dtype, sum_dtype, wide
from ranvier.schedule.limits import Conditions, rule_limits
from ranvier.schedule.policies import policy_named
from ranvier.tensor.layers import Embedding, Linear, SharedInputLinear, VocabularyLinear


def conditions_of(run: ResolvedRun, stages: Stages, segments: Segments, cluster: Cluster | None = None) -> Conditions:
    """The conditions of the run's pipeline with these blocks on each stage.

    Args:
        segments: as for `run_limits`.
        cluster: on which it runs; None for the one that `launch.cluster` names, or else an unknown one.
    """
    if run.mesh.pipeline_size == 1:
        return Conditions()
    cluster = cluster or (load_cluster(run.launch.cluster) if run.launch.cluster is not None else None)
    if cluster is None or run.precision not in cluster.device.rates:
        return Conditions()
    found, policy = link_conditions(run, stages, cluster), policy_named(run.pipeline.policy)
    if run.mesh.stage_size == 1 or not policy.defers or not may_defer(run.pipeline, run.optim):
        return found
    limits = rule_limits([any(block.num_trainable for block in blocks) for blocks in stages], run.placement)
    costs = deferral_costs(Step(
        run=run, policy=policy, limits=limits, bytes=element_bytes(run), stages=work_of(stages, segments),
        num_states=0.0, tokens=families.tokens_of(run), flops_per_sample=0.0, recomputed_flops_per_sample=0.0,
        split_layers=split_layers(run)), cluster)
    return replace(found, deferral=costs)


def work_of(stages: Stages, segments: Segments) -> tuple[StageWork, ...]:
    """The stages with these segments recomputed."""
    return tuple(StageWork(blocks=tuple(blocks), recomputed=tuple(place for places in again for place in places),
                           ends=tuple(places.stop - 1 for places in again))
                 for blocks, again in zip(stages, segments, strict=True))


def element_bytes(run: ResolvedRun) -> ElementBytes:
    """Bytes of an element in each number format of the run."""
    dtype, optim = DTYPES[run.precision], run.optim
    state_bytes = wide(dtype).itemsize
    return ElementBytes(
        parameter=dtype.itemsize, state=state_bytes, reduced=reduce_dtype(optim, dtype).itemsize,
        gradient=state_bytes if optim.accumulate == "fp32" else dtype.itemsize,
        summed=sum_dtype(run.tensor, dtype, run.device_type).itemsize)


def split_layers(run: Run) -> Mapping[str, tuple[SplitLayer, ...]]:
    """Each block of the run's model -> its split layers of `ranvier.tensor`, in order: a block's messages on a tensor
    mesh follow from its layers, whatever its name."""
    return _split_layers(replace(Run(), model=run.model, data=run.data))


@lru_cache(maxsize=32)
def _split_layers(run: Run) -> Mapping[str, tuple[SplitLayer, ...]]:
    """Split layers of each block, which depend on the run's model and task alone."""
    model = families.model_of(run)
    ends = {layer[-1] for layer in model.layers or [(name,) for name in model.blocks]}
    found: dict[str, tuple[SplitLayer, ...]] = {}
    for name, build in model.blocks.items():
        if (alike := model.alike.get(name)) in found:
            found[name] = found[alike]
            continue
        with meta_device():
            layers = [split for layer in build().modules() if (split := _split_layer(layer)) is not None]
        products = [place for place, layer in enumerate(layers) if layer.kind in ("output", "input")]
        if name in ends and products:
            layers[products[-1]] = replace(layers[products[-1]], ends_layer=True)
        found[name] = tuple(layers)
    return found


def _split_layer(layer: nn.Module) -> SplitLayer | None:
    match layer:
        case Linear():
            return SplitLayer(layer.stationary, layer.in_features, layer.out_features)
        case SharedInputLinear():
            return SplitLayer("output", layer.in_features, sum(layer.outputs.values()))
        case VocabularyLinear():
            return SplitLayer("vocabulary", layer.in_features, layer.out_features)
        case Embedding():
            return SplitLayer("embedding", layer.num_embeddings, layer.embedding_dim)
    return None
