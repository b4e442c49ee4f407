"""Freeze policies get the norms of one process's raw gradients, however the parameters are laid out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ranvier.config.run import Optim
from ranvier.data.lm import Sequences
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.checkpoint.anywhere import CONFIG, GLOBAL_SIZE, SEED, TOKENS
from tests.covering import quick

SAMPLES = Sequences(TOKENS, CONFIG.sequence)


def norms(mesh, frozen=0, microbatch=2, **optim):
    model = replace(gpt(replace(CONFIG, dropout=0.0), dtype=torch.float64), tied=())

    def work(world):
        engine = Engine(model, world, mesh=mesh, seed=SEED, dtype=torch.float64, learning_rate=1e-2, frozen=frozen,
                        nominal_weight=3.0, optim=Optim(bucket_size=64, chunk_buckets=2, **optim))
        at = engine.coordinates
        loader = Loader(SAMPLES, Sampler(len(SAMPLES), SEED), global_size=GLOBAL_SIZE, microbatch_size=microbatch,
                        replica=at.data, num_replicas=mesh.data, part=at.row, num_parts=mesh.row,
                        needs_inputs=engine.is_first_stage, needs_targets=engine.is_last_stage)
        engine.train_batch(loader.microbatches(0))
        engine.watch_layers()
        result = engine.train_batch(loader.microbatches(1))
        found = engine.layer_gradient_norms()
        engine.watch_layers(False)
        engine.train_batch(loader.microbatches(2))
        whole = result.grad_norm
        engine.close()
        return found, whole

    results = run_ranks(work, mesh.size, timeout_seconds=60.0)
    assert all(other == results[0] for other in results)
    return results[0]


def plainly(frozen=0, clip_norm=0.0):
    """The same two steps with plain torch in one process."""
    model = replace(gpt(replace(CONFIG, dropout=0.0), dtype=torch.float64), tied=())

    def work(world):
        engine = Engine(model, world, seed=SEED, dtype=torch.float64, learning_rate=1e-2, frozen=frozen,
                        optim=Optim(bucket_size=64, clip_norm=clip_norm))
        loader = Loader(SAMPLES, Sampler(len(SAMPLES), SEED), global_size=GLOBAL_SIZE, microbatch_size=GLOBAL_SIZE)
        engine.train_batch(loader.microbatches(0))
        (whole,) = loader.microbatches(1)
        parameters = {name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
                      for name, parameter in engine.named_parameters().items()}
        engine.close()
        modules = {name: build() for name, build in model.blocks.items()}
        state = whole.inputs
        for block, module in modules.items():
            own = {name: parameters[f"{block}.{name}"] for name, _ in module.named_parameters()}
            state = torch.func.functional_call(module.double(), own, (state,))
        loss, weight = model.loss(state, whole.targets)
        (loss / weight).backward()
        return [float(sum((parameter.grad ** 2).sum() for name, parameter in parameters.items()
                          if parameter.grad is not None and name.rpartition(".")[0].startswith(tuple(layer)))) ** 0.5
                for layer in model.layers]

    return run_ranks(work, 1)[0]


@pytest.mark.parametrize(("mesh", "optim"), quick(2, [
    (Mesh(), {}), (Mesh(pipe=2, data=2), {}), (Mesh(data=4), {"shard": True}), (Mesh(row=2, col=2), {}),
    (Mesh(pipe=4), {"clip_norm": 0.01}), (Mesh(data=2, col=2), {"offload": "stream", "shard": True})]), ids=str)
def test_norms_of_layers_are_those_of_one_process(mesh, optim):
    found, whole = norms(mesh, **optim)
    assert found == pytest.approx(plainly(clip_norm=optim.get("clip_norm", 0.0)), rel=1e-9)
    assert 0 < sum(norm ** 2 for norm in found) < whole ** 2  # embedding and head are in no layer


def test_with_updates_in_the_backward():
    assert norms(Mesh(), microbatch=GLOBAL_SIZE, update_in_backward=True)[0] == pytest.approx(plainly(), rel=1e-9)


def test_frozen_layers_have_none():
    found, _ = norms(Mesh(pipe=2), frozen=1)
    assert found[0] == 0.0
    assert found == pytest.approx(plainly(frozen=1), rel=1e-9)
