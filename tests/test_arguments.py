"""Errors in the words of whoever reads them: arguments for Python, flags for the command."""

import pytest
import torch
from torch import nn

import ranvier
from ranvier.arguments import in_python
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.run import Guard, Optim, TensorParallel
from ranvier.testing.ranks import run_ranks
from tests.pipeline.parity import squared


@pytest.mark.parametrize(("text", "expected"), [
    ("pipeline.in-flight", "Engine(in_flight=...)"), ("mesh.col 5", "mesh.col 5"),
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
    ("Use ranvier.tensor.loss.NextTokenLoss(vocab)", "Use ranvier.tensor.loss.NextTokenLoss(vocab)"),
    ("Give it torch.optim.SGD", "Give it torch.optim.SGD")])
def test_arguments_in_the_place_of_settings(text, expected):
    assert in_python(text, caller="Engine") == expected


def build(**options):
    return run_ranks(lambda world: Engine([nn.Linear(4, 4)], world, loss=squared, **{"mesh": Mesh(), **options}), 1)[0]


@pytest.mark.parametrize(("options", "message"), [
    ({"in_flight": 0}, r"Engine\(in_flight=\.\.\.\): must be at least 1"),
    ({"checkpoint": "often"}, r"Engine\(checkpoint=\.\.\.\): must be none, auto"),
    ({"policy": "2f2b"}, r"Engine\(policy=\.\.\.\): is not a policy"),
    ({"boundaries": (1,)}, r"Engine\(boundaries=\.\.\.\)"),
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
