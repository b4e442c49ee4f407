"""Settings that change how a run computes change its predicted step: a walk over all of them, and what changes
nothing by name."""

from dataclasses import fields, replace

import pytest

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Launch, Optim, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.mesh import Mesh
from ranvier.planner.run_cost import run_cost
from ranvier.planner.work import Work

CLUSTER, WORK = load_cluster("h100"), Work()
RUN = ResolvedRun(precision="bf16", mesh=Mesh(data=2, pipe=2, row=2, col=2), launch=Launch(device="cuda"),
                  batch=Batch(global_size=32, microbatch_size=4), optim=Optim(shard=True),
                  model=Transformer(family="llama", num_layers=2, hidden=1024, heads=8, vocab=1024, sequence=512))
ALONE = replace(RUN, mesh=Mesh(), optim=Optim())
OTHER = {"model.compile": False, "model.float8": True, "model.attention_kernel": "math", "model.dropout": 0.1,
         "model.num_layers": 3, "model.hidden": 2048, "model.heads": 16, "model.vocab": 2048, "model.sequence": 256,
         "model.kv_heads": 4, "model.tied": True, "model.qk_norm": "head", "model.attention_softcap": 30.0,
         "memory.recompute": 1, "optim.shard": False, "optim.offload": "stream", "optim.accumulate": "half",
         "optim.ema": 0.9, "optim.chunk_buckets": 1, "optim.bucket_size": 4096, "optim.clip_norm": 0.0,
         "pipeline.policy": "gpipe", "pipeline.in_flight": 1, "pipeline.defer_bytes": 0, "pipeline.boundaries": (2,),
         "pipeline.stages_per_rank": 2, "tensor.sequence_sharding": True, "tensor.keep_weights": True,
         "tensor.panel_bytes": 1 << 18, "tensor.reduce_dtype": "fp32", "batch.global_size": 64,
         "batch.microbatch_size": 8}
"""Settings whose effect is asked for, with another value than theirs."""
UNSEEN = {
    "model.dropout": "masks are drawn where a key is, which counting has not",
    "optim.clip_norm": "the guard waits for the same norm",
    **dict.fromkeys(("optim.betas", "optim.epsilon", "optim.momentum", "optim.muon_scale", "optim.weight_decay",
                     "optim.decay", "optim.groups", "optim.initial_loss_scale", "optim.loss_scale_window"),
                    "numbers of an update, which takes as long with others"),
    **dict.fromkeys(("optim.algorithm", "optim.options", "optim.clip_from", "optim.reduce_dtype", "optim.offload_share",
                     "optim.buckets_in_flight", "optim.update_in_backward", "pipeline.partition", "pipeline.deferred",
                     "pipeline.defer_last", "pipeline.memory", "pipeline.placement", "tensor.scheme"),
                    "has its effect beside other settings than these"),
    "pipeline.look_ahead": "the host's waits are not predicted"}
"""Settings of which this run's prediction shows nothing, and why."""
_SECTIONS = ("batch", "memory", "optim", "pipeline", "tensor")


def seconds(run):
    return run_cost(run, CLUSTER, WORK.stages(run)).seconds


def changed(run, name, value):
    section, field = name.split(".")
    return replace(run, **{section: replace(getattr(run, section), **{field: value})})


@pytest.fixture(scope="module")
def before():
    return [(run, seconds(run)) for run in (RUN, ALONE)]


def effect(name, before):
    """The largest relative change of a step, on a mesh or on one rank."""
    runs = before[:1] if name == "pipeline.boundaries" else before
    return max(abs(seconds(changed(run, name, OTHER[name])) / expected - 1.0) for run, expected in runs)


@pytest.mark.parametrize("name", [name for name in OTHER if name not in UNSEEN])
def test_a_setting_changes_the_step(name, before):
    assert effect(name, before) > 1e-7


@pytest.mark.parametrize("name", [name for name in OTHER if name in UNSEEN])
def test_what_is_said_to_change_nothing_changes_nothing(name, before):
    assert effect(name, before) == 0.0


def test_every_setting_of_how_a_run_computes_is_asked_for():
    every = {f"{section}.{field.name}" for section in _SECTIONS for field in fields(getattr(RUN, section))}
    assert every <= {*OTHER, *UNSEEN}
    known = {f"model.{field.name}" for field in fields(RUN.model)} | every
    assert {*OTHER, *UNSEEN} <= known
