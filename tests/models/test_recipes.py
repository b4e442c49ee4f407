"""The shipped recipes are runs without problems, and those of papers have the papers' settings."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

import ranvier.config.recipes
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Run
from ranvier.data.prepare import prepare
from ranvier.data.prepare import problems as data_problems
from ranvier.mesh import Mesh
from ranvier.models.family import heads_problem as model_problems
from ranvier.models.gpt import gpt
from ranvier.optim.learning_rate import learning_rate
from ranvier.planner.auto import resolve_with_least
from ranvier.testing.ranks import run_ranks
from ranvier.train.runtime import build_runtime

FILES = sorted(path for folder in ranvier.config.recipes.__path__ for path in Path(folder).glob("*.toml"))

# AxoNN, Tables I and II: GPUs, layers, hidden, heads, G_inter, G_data, microbatch.
PAPER = {
    "gpt-12b": (12, 48, 48, 4512, 24, 6, 8, 8),
    "gpt-24b": (24, 96, 48, 6336, 36, 12, 8, 4),
    "gpt-50b": (50, 192, 96, 6528, 48, 24, 8, 4),
    "gpt-100b": (100, 384, 96, 9360, 60, 48, 8, 2),
}


def recipe(path: Path) -> ResolvedRun:
    """The recipe, with the smallest microbatches if they are auto."""
    return resolve_with_least(TypeAdapter(Run).validate_python(tomllib.loads(path.read_text())))


def num_parameters(run: Run) -> int:
    """Number of parameters, tied ones once, counted on the meta device."""
    model = gpt(run.model)
    with torch.device("meta"):
        layer = [model.blocks[name]() for name in ("layer0.attention", "layer0.mlp")]
        ends = [model.blocks[name]() for name in ("embedding", "head")]
    count = {True: sum(p.numel() for block in layer for p in block.parameters()),
             False: sum(p.numel() for block in ends for p in block.parameters())}
    return count[True] * run.model.num_layers + count[False] - run.model.vocab * run.model.hidden


def test_all_names_are_there():
    assert {path.stem for path in FILES} == {"gpt-tiny", "llama-tiny", "gpt2-small", "bert-sentiment", "vit-cifar10",
                                             "smollm2-sft",
                                             *PAPER}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recipes_are_runs_without_problems(path):
    run = recipe(path)
    assert model_problems(run.model) == [] and data_problems(run) == []
    assert run.mesh.pipe <= 2 * run.model.num_layers + 2
    assert run.batch.global_size % (run.mesh.data * run.batch.microbatch_size) == 0


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings(name):
    run = recipe(next(path for path in FILES if path.stem == name))
    billions, gpus, layers, hidden, heads, pipe, data, microbatch = PAPER[name]
    assert (run.mesh.size, run.mesh.pipe, run.mesh.data) == (gpus, pipe, data)
    assert (run.model.num_layers, run.model.hidden, run.model.heads) == (layers, hidden, heads)
    assert (run.model.sequence, run.model.vocab, run.batch.global_size) == (512, 51200, 16384)
    assert (run.batch.microbatch_size, run.train.steps, run.data.corpus) == (microbatch, 11, "wikitext-103")
    assert (run.train.learning_rate, run.optim.betas, run.optim.weight_decay) == (0.001, (0.9, 0.999), 0.01)
    assert (run.precision, run.optim.offload, run.optim.bucket_size, run.optim.chunk_buckets,
            run.memory.recompute) == ("fp16", "stream", 4_000_000, 4, "axonn")
    assert math.isclose(num_parameters(run), billions * 1e9, rel_tol=0.04)


def test_gpt2_small_is_the_real_ones_size():
    run = recipe(next(path for path in FILES if path.stem == "gpt2-small"))
    assert num_parameters(run) == 124_439_808


@pytest.mark.slow
def test_the_smallest_recipes_loss_falls_from_the_start():
    """With too short a warmup the residual stream's bias flips, and a step's loss is a nat above the previous one."""
    run = replace(recipe(next(path for path in FILES if path.stem == "gpt-tiny")), mesh=Mesh())

    def rank(world):
        formation, losses = build_runtime(run, world, prepare(run)), []
        for step in range(1, 31):
            formation.engine.learning_rate = learning_rate(run.train, step)
            losses.append(formation.engine.train_batch(formation.train_data.microbatches(step - 1)).loss)
        return losses

    losses, = run_ranks(rank, 1, timeout_seconds=250)
    assert losses[-1] < losses[0] - 0.5
    assert all(loss < min(losses[:step]) + 0.3 for step, loss in enumerate(losses) if step)
