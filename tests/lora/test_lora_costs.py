"""With adapters, check, plans and the memory table count no gradients, states and products of frozen weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ranvier.cli.check import check
from ranvier.cli.main import run_command
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Lora, Optim, Pipeline, Run, TensorParallel, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.planner.count import laid_out
from ranvier.planner.run_cost import run_cost
from ranvier.planner.work import Work

RUN = ResolvedRun(model=Transformer(family="llama", num_layers=2, hidden=64, heads=4, vocab=300, sequence=32),
                  batch=Batch(global_size=8, microbatch_size=2), optim=Optim(bucket_size=100), mesh=Mesh(pipe=2))
LORA = Lora(rank=2, targets=("attention.*", "mlp.*"))


def num_adapters(run, rank):
    """rank * (in + out), summed over the adapters of one layer."""
    hidden, inner = run.model.hidden, 4 * run.model.hidden
    return rank * (4 * 2 * hidden + 3 * (hidden + inner))


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_memory_counts_adapters_only(method):
    lora = replace(LORA, method=method)
    stages, memory = laid_out(replace(RUN, lora=lora))
    _, plain = laid_out(RUN)
    for row, with_adapters, without in zip(stages.rows, memory, plain, strict=True):
        trained = num_adapters(RUN, 2) + (0 if method == "lora" else 5 * 64 + 2 * 4 * 64)
        assert row.num_trainable == trained
        assert with_adapters.device["gradients"] == 4 * trained < without.device["gradients"] / 5
        assert with_adapters.device["moments"] == 8 * trained
        assert with_adapters.device["parameters"] == without.device["parameters"] + 4 * trained
        assert with_adapters.device["deferred"] == 0


def test_the_kept_activations_are_less_without_weight_gradients():
    few = replace(RUN, lora=Lora(rank=2, targets=("query",)))
    (_, memory), (_, plain) = laid_out(few), laid_out(RUN)
    assert memory[1].device["activations"] < plain[1].device["activations"]


def test_a_step_has_no_products_for_frozen_weights():
    whole = replace(RUN, model=replace(RUN.model, hidden=512, sequence=256), mesh=Mesh())
    run, cluster = replace(whole, lora=LORA), load_cluster("laptop")
    found, plain = Work().stages(run), Work().stages(whole)
    for block, before in zip(found[0], plain[0], strict=True):
        if block.num_trainable:
            assert before.weight_share == 1.0 and before.defers and not block.defers
            assert 0.001 < block.weight_share < (0.4 if "attention" in block.name else 0.2)
    costs = [run_cost(run, cluster, found), run_cost(whole, cluster, plain)]
    assert costs[0].seconds < 0.95 * costs[1].seconds
    assert 0.6 < costs[0].model_flops / costs[1].model_flops < 0.8


@pytest.mark.parametrize("scheme", ["stationary", "megatron"])
def test_sharding_the_sequence_has_as_few_products_for_weights(scheme):
    """Products over panels of a sequence are batched."""
    shares = []
    for is_sharded in (False, True):
        run = replace(RUN, lora=LORA, model=replace(RUN.model, hidden=512, sequence=256), mesh=Mesh(col=2),
                      tensor=TensorParallel(scheme=scheme, sequence_sharding=is_sharded, panel_bytes=1 << 16))
        shares.append([block.weight_share for block in Work().stages(run)[0] if block.num_trainable])
    assert shares[1] == pytest.approx(shares[0], abs=0.01)


def test_check_and_plan_of_a_run_with_adapters(tmp_path, capsys):
    flags = ["--lora.rank", "4", "--lora.targets", "query,value", "--mesh.pipe", "2"]
    assert run_command(["check", "llama-tiny", "--ranks", "4", "--all", *flags]) == 0
    assert "gradients" in capsys.readouterr().out
    assert run_command(["check", "llama-tiny", "--ranks", "4", *flags, "--lora.base-format", "int8"]) == 0
    assert "lora.base-format" in capsys.readouterr().out
    assert run_command(["plan", "llama-tiny", "--cluster", "laptop", "--ranks", "2", "--search", "mesh",
                        *flags[:4]]) == 0


@pytest.mark.parametrize(("lora", "where"), [
    (Lora(rank=2, targets=("qkv",)), "lora.targets"), (Lora(rank=0, alpha=3.0), None)])
def test_problems_and_warnings(lora, where):
    run = Run(model=replace(RUN.model), lora=lora, pipeline=Pipeline())
    problems = families.problems(run)
    assert [problem.where for problem in problems] == ([where] if where else [])
    if where is None:
        assert any(warning.where == "lora.alpha" and "rank is 0" in warning.what for warning in check(run).warnings)


def test_auto_targets_and_heads():
    def trained(run):
        return {name.partition(".")[2] for block, build in families.model_of(run).blocks.items()
                for name, parameter in build().named_parameters(block) if parameter.requires_grad}

    tiny = Transformer(num_layers=1, hidden=16, heads=2, vocab=300, sequence=8)
    assert trained(Run(model=tiny, lora=Lora(rank=1))) == {"attention.qkv.lora.A", "attention.qkv.lora.B"}
    classifier = trained(replace(Run(model=tiny, lora=Lora(rank=1)), data=replace(Run().data, task="classification")))
    assert classifier == {f"attention.qkv.{part}.lora.{kind}" for part in ("query", "value") for kind in "AB"} | {
        f"{layer}.{kind}" for layer in ("pooler", "classifier") for kind in ("weight", "bias")}
