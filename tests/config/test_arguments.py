"""Errors in the words of whoever reads them: arguments for Python, flags for the command."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import ranvier
from ranvier.config.arguments import in_python
from ranvier.config.run import Guard, Memory, Optim, Pipeline, Run, TensorParallel
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.pipeline.parity import squared


@pytest.mark.parametrize(("text", "expected"), [
    ("pipeline.in-flight", "Pipeline(in_flight=...)"), ("mesh.col 5", "mesh.col 5"),
    ("Set --optim.clip-norm 0, or leave it out.", "Set Optim(clip_norm=0), or leave it out."),
    ("Set --mesh.row 1 --mesh.col 4, or --tensor.scheme stationary.",
     "Set Mesh(row=1, col=4), or TensorParallel(scheme='stationary')."),
    ("change --mesh.data and --mesh.pipe so that", "change Mesh(data=...) and Mesh(pipe=...) so that"),
    ("--tensor.sequence-sharding false.", "TensorParallel(sequence_sharding=False)."),
    ("See which rank is behind, or raise --comm.timeout-seconds.",
     "See which rank is behind, or raise Engine(timeout_seconds=...)."),
    ("Go on with --resume auto; if", "Go on with Checkpoints.load(); if"),
    ("Lower --train.learning-rate", "Lower Engine(learning_rate=...)"),
    ("Set --precision bf16", "Set Engine(dtype=torch.bfloat16)"),
    ("Set --launch.device cpu.", "Set ranvier.start(device='cpu')."),
    ("Use ranvier.tensor.split.loss.NextTokenLoss(vocab)", "Use ranvier.tensor.split.loss.NextTokenLoss(vocab)"),
    ("Give it torch.optim.SGD", "Give it torch.optim.SGD")])
def test_arguments_in_the_place_of_settings(text, expected):
    assert in_python(text, caller="Engine") == expected


def build(**options):
    return run_ranks(lambda world: Engine([nn.Linear(4, 4)], world, loss=squared, **{"mesh": Mesh(), **options}), 1)[0]


@pytest.mark.parametrize(("options", "message"), [
    ({"pipeline": Pipeline(boundaries=(1,))}, r"Pipeline\(boundaries=\.\.\.\)"),
    ({"memory": Memory(recompute="auto")}, r"Memory\(recompute=\.\.\.\): needs a sample"),
    ({"optim": Optim(groups=("x",))}, r"Optim\(groups=\.\.\.\): is not PATTERN:FACTOR:DECAY"),
    ({"optim": Optim(update_in_backward=True, clip_norm=1.0)},
     r"Optim\(update_in_backward=\.\.\.\): cannot clip .*Set Optim\(clip_norm=0\)"),
    ({"optim": Optim(update_in_backward=True), "guard": Guard(bad_step="skip")},
     r"Guard\(bad_step=\.\.\.\): .*Set Guard\(bad_step='stop'\), or leave Optim\(update_in_backward=\.\.\.\) out")])
def test_an_engine_that_is_built_in_python(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(**options)
    assert "--" not in str(caught.value) and isinstance(caught.value, RanvierError)
    with pytest.raises(ConfigError) as caught:
        build(**options, flags=True)
    assert "=..." not in str(caught.value)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Pipeline(in_flight=0), r"Pipeline\(in_flight=\.\.\.\): must be a whole number of at least 1, or auto "
                                    r"\(got 0\)\. Give a value of this form, or leave it out for 'auto'\."),
    (lambda: Pipeline(policy="2f2b"), r"Pipeline\(policy=\.\.\.\): must be message-driven, 1f1b or gpipe"),
    (lambda: Optim(betas=(0.9, 1.0)),
     r"Optim\(betas=\.\.\.\): must be 2 values, each a number of at least 0 and below 1"),
    (lambda: Guard(bad_step="continue"), r"Guard\(bad_step=\.\.\.\): must be stop, skip, rollback or none"),
    (lambda: Run(pipeline=3), r"Run\(pipeline=\.\.\.\): must be a Pipeline \(got 3\)"),
    (lambda: replace(Memory(), recompute=0),
     r"Memory\(recompute=\.\.\.\): must be none, auto or axonn, or a whole number"),
    (lambda: TensorParallel(sequence_parallel=True),
     r"TensorParallel\(sequence_parallel=\.\.\.\): is not an argument of TensorParallel .*Choose among scheme, ")])
def test_a_section_with_a_value_that_does_not_fit(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert isinstance(caught.value, RanvierError) and caught.value.__cause__ is None


def test_an_argument_that_never_was():
    with pytest.raises(TypeError, match="unexpected keyword argument 'inflight'"):
        build(inflight=3)


def test_a_scheme_that_does_not_fit_its_mesh():
    def rank(world):
        Engine([nn.Linear(4, 4)], world, mesh=Mesh(row=2), loss=squared, tensor=TensorParallel(scheme="megatron"))

    with pytest.raises(ConfigError, match=r"TensorParallel\(scheme=\.\.\.\): splits blocks over columns only, and "
                                          r"mesh\.row is 2 .*Set Mesh\(row=1, col=2\)"):
        run_ranks(rank, 2)


def test_a_batch_that_does_not_fit():
    def rank(world):
        engine = Engine([nn.Linear(4, 4)], world, loss=squared, optim=Optim(update_in_backward=True))
        engine.train_batch([(torch.ones(1, 4), torch.ones(1, 4))] * 2)

    with pytest.raises(ConfigError, match=r"Optim\(update_in_backward=\.\.\.\): needs batches of one microbatch"):
        run_ranks(rank, 1)


def test_a_start_in_python():
    with pytest.raises(ConfigError, match=r"Mesh\(data=\.\.\.\)"):
        ranvier.start(data=0)
    with pytest.raises(ConfigError, match=r"mesh\.data"):
        ranvier.start(data=0, flags=True)
