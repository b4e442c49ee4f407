"""Moving averages of parameters: equal to torch.optim.swa_utils on every mesh, in checkpoints, and in commands."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ranvier.checkpoint import state
from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.checkpoint.manifest import Saved
from ranvier.cli.main import run_command
from ranvier.config import rules
from ranvier.config.resolve import resolve
from ranvier.config.run import Elastic, Optim, Run
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.planner.count import laid_out
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference, relative_error
from tests.checkpoint.anywhere import CONFIG, GLOBAL_SIZE, SAMPLES, SEED, engine_on, on, train
from tests.covering import first
from tests.errors import raises

DECAY = 0.9
OPTIM = {"bucket_size": 200, "chunk_buckets": 2, "weight_decay": 0.1, "ema": DECAY}


@pytest.fixture(scope="module")
def expected():
    """Averages after each of four steps by torch, over the full model."""
    reference = Reference(gpt(CONFIG, dtype=torch.float64), seed=SEED, dtype=torch.float64, optimizer=lambda p:
                          torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))
    parameters = nn.ParameterList(reference.parameters.values())
    averaged = AveragedModel(parameters, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    loader = Loader(SAMPLES, Sampler(len(SAMPLES), SEED), global_size=GLOBAL_SIZE, microbatch_size=2)
    found = []
    for step in range(4):
        reference.train_batch(loader.microbatches(step))
        averaged.update_parameters(parameters)
        found.append({name: value.detach().clone() for name, value in zip(
            reference.parameters, averaged.module, strict=True)})
    return found


def averages(folder):
    saved = Saved(folder)
    return {name: saved.read("ema", name) for name in saved.manifest.tensors["ema"]}


def saved_after(folder, mesh, steps, *, resumes=False, dtype=torch.float64, **options):
    def work(engine):
        checkpoints = Checkpoints(engine, folder)
        if resumes:
            checkpoints.load()
        train(engine, steps)
        checkpoints.save()
        error = [one.error for one in checkpoints.wait()]
        checkpoints.close()
        return error

    assert on(mesh, work, dtype=dtype, **{**OPTIM, **options}) == [[None]] * mesh.size


CASES = [(Mesh(), "none", False), (Mesh(data=2), "none", True), (Mesh(pipe=2), "stream", False),
         (Mesh(col=2), "host", False), (Mesh(pipe=2), "hybrid", True),
         (Mesh(data=2, pipe=2), "stream", True), (Mesh(data=2, col=2), "none", True),
         (Mesh(row=2, col=2), "host", True)]


@pytest.mark.parametrize(("mesh", "offload", "shard"), first(
    [(Mesh(), "none", False), (Mesh(col=2), "host", False), (Mesh(pipe=2), "hybrid", True)], CASES), ids=str)
def test_averages_are_those_of_torch(expected, tmp_path, mesh, offload, shard):
    saved_after(tmp_path, mesh, 3, offload=offload, shard=shard)
    found = averages(tmp_path / "step-3")
    assert set(found) == set(expected[2])
    for name, value in found.items():
        assert relative_error(value, expected[2][name]) < 1e-10, name


def test_they_are_resumed_on_another_mesh(expected, tmp_path):
    saved_after(tmp_path, Mesh(data=2, col=2), 2, shard=True)
    saved_after(tmp_path, Mesh(pipe=2), 2, resumes=True, offload="stream")
    for name, value in averages(tmp_path / "step-4").items():
        assert relative_error(value, expected[3][name]) < 1e-10, name


def test_one_that_begins_later_begins_with_the_parameters(tmp_path):
    saved_after(tmp_path, Mesh(), 2, ema=0.0)
    saved_after(tmp_path, Mesh(), 1, resumes=True)
    before, after = (Saved(tmp_path / f"step-{step}") for step in (2, 3))
    for name, value in averages(tmp_path / "step-3").items():
        mixed = DECAY * before.read("parameter", name) + (1 - DECAY) * after.read("parameter", name)
        assert relative_error(value, mixed) < 1e-12


def test_a_parameter_with_memory_of_its_own_is_its_average_inside():
    def work(world):
        engine = Engine([nn.Linear(2, 1, bias=False)], world, loss=lambda y, t: (y.sum(), 1), optim=Optim(ema=DECAY))
        parameter = engine.named_parameters()["0.weight"]
        engine.train_batch([(torch.ones(1, 2), torch.ones(1))])
        average = parameter.detach().clone()
        parameter.data = edited = 2 * average
        with engine.averaged():
            assert torch.equal(parameter, average)
        assert torch.equal(parameter, edited)
        engine.close()

    run_ranks(work, 1)


@pytest.mark.parametrize(("mesh", "offload", "shard"), first(
    [(Mesh(data=2), "none", True)], CASES[:-1]), ids=str)
def test_parameters_are_their_averages_inside_and_themselves_afterwards(tmp_path, mesh, offload, shard):
    """Training afterwards is the same as without the evaluation inside; ends of ties are averaged, too."""
    def work(engine, looks):
        train(engine, 2)
        loader = Loader(SAMPLES, Sampler(len(SAMPLES), None), global_size=8, microbatch_size=2, total=8,
                        replica=engine.coordinates.data, num_replicas=mesh.data, part=engine.coordinates.row,
                        num_parts=mesh.row, needs_inputs=engine.is_first_stage, needs_targets=engine.is_last_stage)
        inside = None
        if looks:
            with engine.averaged():
                inside = engine.evaluate(loader.microbatches(0)).loss
            with engine.averaged():
                for call in (engine.train_batch, engine.forward_backward):
                    with raises("step-inside-averages"):
                        call(loader.microbatches(0))
                for call in (engine.averaged().__enter__, engine.state_dict, Checkpoints(engine, tmp_path).save):
                    with raises("step-inside-averages"):
                        call()
        return inside, engine.evaluate(loader.microbatches(0)).loss, train(engine, 2)

    options = {"dtype": torch.float64, **OPTIM, "offload": offload, "shard": shard}
    found, plain = (on(mesh, lambda engine, looks=looks: work(engine, looks), **options) for looks in (True, False))
    assert [one[1:] for one in found] == [one[1:] for one in plain]
    saved_after(tmp_path, mesh, 2, offload=offload, shard=shard)
    averaged = averages(tmp_path / "step-2")

    def alone(engine):
        state.set_parameters(engine, averaged.get)
        return engine.evaluate(Loader(SAMPLES, Sampler(len(SAMPLES), None), global_size=8, microbatch_size=2,
                                      total=8).microbatches(0)).loss

    expected, = on(Mesh(), alone, dtype=torch.float64, **OPTIM)
    assert [one[0] for one in found] == pytest.approx([expected] * mesh.size, rel=1e-12)


def test_half_precision_averages_the_master_copies(tmp_path):
    saved_after(tmp_path, Mesh(), 1, dtype=torch.bfloat16)
    saved = Saved(tmp_path / "step-1")
    for name, value in averages(tmp_path / "step-1").items():
        assert value.dtype is torch.float32 and value.equal(saved.read("master", name))


def test_before_the_first_step_they_are_the_parameters():
    def work(world):
        engine = engine_on(world, Mesh(), dtype=torch.float64, **OPTIM)
        found = [(piece.name, piece.tensor.clone(), piece.box) for piece in state.pieces_to_write(engine)
                 if piece.kind == "ema"]
        assert found
        for name, value, box in found:
            held = engine.named_parameters()[name].detach()
            assert value.equal(held[tuple(slice(*one) for one in box)])

    run_ranks(work, 1)


def test_memory_counts_them():
    run = resolve(Run(optim=Optim(ema=0.9)))
    device = laid_out(run)[1][0].device
    without = laid_out(resolve(Run()))[1][0].device
    assert device["average"] == device["moments"] // 2 and "average" not in without

    def work(world):
        engine = engine_on(world, Mesh(), **OPTIM)
        return {name: sum(tensor.nbytes for tensor in tensors)
                for name, tensors in engine._updater.tensors([])["device"].items()}

    found, = run_ranks(work, 1)
    assert found["average"] == found["moments"] // 2 > 0


def test_refusals():
    run = resolve(Run(optim=Optim(ema=0.9), elastic=Elastic(freeze="cap")))
    assert any(problem.where == "optim.ema" for problem in rules.elastic_problems(run))

    def work(world):
        engine = engine_on(world, Mesh())
        with raises("ema-not-kept"), engine.averaged():
            pass
        with raises("ema-with-own-optimizer"):
            Engine(gpt(CONFIG), world, mesh=Mesh(), optim=Optim(ema=0.9), optimizer=torch.optim.AdamW)

    run_ranks(work, 1)


def test_the_commands_take_them(tmp_path, capsys):
    """An exported average evaluates as the run does with its averages, and not as it does with its parameters."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    (tmp_path / "recipe.toml").write_text("")
    run, out, text = str(tmp_path / "run"), str(tmp_path / "out"), str(tmp_path / "text.txt")
    cache = ["--data.cache-dir", str(tmp_path / "cache")]
    assert run_command(["train", str(tmp_path / "recipe.toml"), "--run-dir", run, "--data.corpus", text, "--optim.ema",
                        "0.8", "--train.eval-ema", "--train.steps", "3", "--train.sample-tokens", "0",
                        "--model.num-layers", "1", "--model.hidden", "16", "--model.heads", "2",
                        "--model.sequence", "16", "--model.vocab", "280",
                        *cache]) == 0
    assert run_command(["export", run, out, "--ema"]) == 0
    evaluated = json.loads((tmp_path / "run" / "summary.json").read_text())["eval_loss"]
    capsys.readouterr()
    assert run_command(["evaluate", run, "--ema", "--json", *cache]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["held-out"]["loss"] == pytest.approx(evaluated, rel=1e-6)
    losses = []
    for args in ([run, "--ema"], [out], [run]):
        capsys.readouterr()
        assert run_command(["evaluate", *args, "--data", text, "--model.sequence", "16", "--json", *cache]) == 0
        losses.append([one["loss"] for one in json.loads(capsys.readouterr().out)["results"].values()])
    assert losses[0] == losses[1] != losses[2]
    assert run_command(["generate", run, "--ema", "--prompt", "the", "--max-tokens", "3"]) == 0
    assert Path(out, "model.safetensors").exists()
