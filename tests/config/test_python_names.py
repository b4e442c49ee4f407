"""Settings in errors, under the names that the reader uses: arguments in Python, flags of the command."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import ranvier
from ranvier.config.python_names import PythonNames
from ranvier.config.run import Guard, Memory, Optim, Pipeline, Run, TensorParallel
from ranvier.errors import ConfigError, RanvierError, parse
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import squared


@pytest.mark.parametrize(("text", "expected", "values"), [
    ("Set `--optim.clip-norm 0`, or leave it out.", "Set Optim(clip_norm=0), or leave it out.", {"optim.clip-norm": 0}),
    ("Set `--mesh.row 1` `--mesh.col 4`, or `--tensor.scheme stationary`.",
     "Set Mesh(row=1, col=4), or TensorParallel(scheme='stationary').",
     {"mesh.row": 1, "mesh.col": 4, "tensor.scheme": "stationary"}),
    ("change `--mesh.data` and `--mesh.pipe` so that", "change Mesh(data=...) and Mesh(pipe=...) so that",
     {"mesh.data": ..., "mesh.pipe": ...}),
    ("`--tensor.sequence-sharding false`.", "TensorParallel(sequence_sharding=False).",
     {"tensor.sequence-sharding": False}),
    ("raise `--comm.timeout-seconds`.", "raise Engine(timeout_seconds=...).", {"comm.timeout-seconds": ...}),
    ("Go on with `--resume auto`; if", "Go on with Checkpoints.load(); if", {"resume": "auto"}),
    ("by `--resume PATH`.", "by Checkpoints.load(path).", {"resume": ...}),
    ("Lower `--train.learning-rate`", "Lower Engine(learning_rate=...)", {"train.learning-rate": ...}),
    ("Set `--precision bf16`", "Set Engine(dtype=torch.bfloat16)", {"precision": "bf16"}),
    ("Set `--model.float8 false`", "Set Engine(float8=False)", {"model.float8": False}),
    ("Set `--launch.device cpu`.", "Set ranvier.start(device='cpu').", {"launch.device": "cpu"}),
    ("Set `--data.train FILE`.", "Set --data.train FILE.", {"data.train": ...}),
    ("`--pipeline.deferred none` or `--memory.recompute none`",
     "Pipeline(deferred=None) or Memory(recompute='none')", {"pipeline.deferred": "none", "memory.recompute": "none"}),
    ("`optim.clip-norm` is", "Optim(clip_norm=...) is", {"optim.clip-norm": ...}),
    ("Give it torch.optim.SGD and a `form`, or `ranvier doctor --measure`",
     "Give it torch.optim.SGD and a `form`, or `ranvier doctor --measure`", {})])
def test_settings_in_a_text(text, expected, values):
    assert PythonNames("Engine")(parse(text)) == expected
    error = ConfigError("x", where="y", remedy=text)
    assert error.settings == values
    assert error.remedy == (text.replace("`", "") if values else text)


def test_where_is_a_setting_or_anything_else():
    for where, expected in (("pipeline.in-flight", "Pipeline(in_flight=...)"), ("mesh.col 5", "mesh.col 5"),
                            ("block layer1.mlp", "block layer1.mlp")):
        error = ConfigError("x", where=where, remedy="z")
        assert error.where == where
        error.names = PythonNames("Engine")
        assert error.where == expected


def test_an_error_of_another_process_is_the_same():
    error = ConfigError("`mesh.row` is 2", code="a-code", where="mesh.row", value=2, remedy="Set `--mesh.row 1`.")
    error.names = PythonNames("Engine")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code, again.settings) == (ConfigError, str(error), "a-code", {"mesh.row": 1})
    assert str(ConfigError(**error.texts, value=2)) == "mesh.row: mesh.row is 2 (got 2). Set --mesh.row 1."


def build(**options):
    return run_ranks(lambda world: Engine([nn.Linear(4, 4)], world, loss=squared, **{"mesh": Mesh(), **options}), 1)[0]


@pytest.mark.parametrize(("options", "code", "where", "values"), [
    ({"pipeline": Pipeline(boundaries=(1,))}, "boundaries-count", "Pipeline(boundaries=...)", {}),
    ({"memory": Memory(recompute="auto")}, "recompute-needs-sample", "Memory(recompute=...)", {}),
    ({"optim": Optim(groups=("x",))}, "malformed-parameter-group", "Optim(groups=...)", {}),
    ({"optim": Optim(update_in_backward=True, clip_norm=1.0)}, "in-backward-clip", "Optim(update_in_backward=...)",
     {"optim.clip-norm": 0, "optim.clip-from": "previous-step"}),
    ({"optim": Optim(update_in_backward=True), "guard": Guard(bad_step="skip")}, "guard-with-in-backward",
     "Guard(bad_step=...)", {"guard.bad-step": "stop", "optim.update-in-backward": ...})])
def test_an_engine_that_is_built_in_python(options, code, where, values):
    with raises(code, where=where, settings=values) as caught:
        build(**options)
    assert "--" not in str(caught.value) and isinstance(caught.value, RanvierError)
    with raises(code) as caught:
        build(**options, flags=True)
    assert "=..." not in str(caught.value)


@pytest.mark.parametrize(("make", "code", "where"), [
    (lambda: Pipeline(in_flight=0), "malformed-argument", "Pipeline(in_flight=...)"),
    (lambda: Pipeline(policy="2f2b"), "malformed-argument", "Pipeline(policy=...)"),
    (lambda: Optim(betas=(0.9, 1.0)), "malformed-argument", "Optim(betas=...)"),
    (lambda: Guard(bad_step="continue"), "malformed-argument", "Guard(bad_step=...)"),
    (lambda: Run(pipeline=3), "malformed-argument", "Run(pipeline=...)"),
    (lambda: replace(Memory(), recompute=0), "malformed-argument", "Memory(recompute=...)"),
    (lambda: TensorParallel(sequence_parallel=True), "unknown-argument", "TensorParallel(sequence_parallel=...)")])
def test_a_section_with_a_value_that_does_not_fit(make, code, where):
    with raises(code, where=where) as caught:
        make()
    assert isinstance(caught.value, ConfigError) and caught.value.__cause__ is None


def test_an_argument_that_never_was():
    with pytest.raises(TypeError, match="unexpected keyword argument 'inflight'"):
        build(inflight=3)


def test_a_scheme_that_does_not_fit_its_mesh():
    def rank(world):
        Engine([nn.Linear(4, 4)], world, mesh=Mesh(row=2), loss=squared, tensor=TensorParallel(scheme="megatron"))

    with raises("megatron-with-rows", "Mesh(row=1, col=2)", where="TensorParallel(scheme=...)",
                settings={"mesh.row": 1, "mesh.col": 2, "tensor.scheme": "stationary"}):
        run_ranks(rank, 2)


def test_a_batch_that_does_not_fit():
    def rank(world):
        engine = Engine([nn.Linear(4, 4)], world, loss=squared, optim=Optim(update_in_backward=True))
        engine.train_batch([(torch.ones(1, 4), torch.ones(1, 4))] * 2)

    with raises("in-backward-batch", 2, where="Optim(update_in_backward=...)"):
        run_ranks(rank, 1)


def test_a_start_in_python():
    with raises("mesh-axis-size", where="Mesh(data=...)", value=0, settings={"mesh.data": 1}):
        ranvier.start(data=0)
    with raises("malformed-argument", where="ranvier.start(threads=...)", value=0):
        ranvier.start(data=1, threads=0)
    with raises("malformed-argument", where="ranvier.start(timeout_seconds=...)", value=0.0):
        ranvier.start(data=1, timeout_seconds=0.0)
