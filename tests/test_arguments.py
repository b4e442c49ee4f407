"""Arguments of public functions: each is checked against its annotation before anything else happens."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import numpy
import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ranvier
from ranvier.arguments import describe, fits
from ranvier.block import as_model
from ranvier.config.run import Checkpoint, Lora, Memory, Optim, Pipeline, Train
from ranvier.errors import ConfigError, RanvierError
from ranvier.plan.plan import make
from ranvier.tensor.layers import Dropout, Linear, Rotary
from ranvier.testing import check_blocks, check_split
from ranvier.testing.freezing import check_freeze_policy
from ranvier.testing.policies import check_policy
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import squared


def words(value):
    """The test's ID for a parameter."""
    return "" if isinstance(value, (tuple, dict)) else str(value)


Rate = Annotated[float, Ge(0), Lt(math.inf)]
ARRAY = numpy.ones((2, 3))


@pytest.mark.parametrize(("annotation", "good", "bad"), [
    (int, (3, -1, numpy.int64(3), torch.tensor(3)), (True, 1.5, 3.0, "3", None, math.nan, torch.tensor(1.5), ARRAY)),
    (Annotated[int, Ge(1), Le(3)], (1, 3), (0, 4)),
    (float, (3, 1.5, math.inf, numpy.float32(1.5), torch.tensor(1.5)), (True, "1.5", None, math.nan, ARRAY, 1j)),
    (Rate, (0, 1e9), (-1, math.inf, torch.ones(2), torch.ones((), device="meta"))),
    (Annotated[float, Gt(0)] | Literal["auto"], (1, "auto"), (0, "Auto", None)),
    (bool, (True, numpy.bool_(False)), (0, 1, "true", None, torch.tensor(True))),
    (bool | Literal["auto"], (False, "auto"), (1, "on")),
    (str, ("", "x"), (b"x", None, Path("x"))),
    (Path | str, (Path("x"), "x"), (b"x", 3, None)),
    (str | Sequence[str], ("x", ["x"], ("x", "y"), set()), ([3], {"x": 1}, None, (one for one in "xy"))),
    (Sequence[int], ([1], (), numpy.array([1, 2]), range(3)), ("12", 3, [1.5], [True], torch.tensor(3))),
    (Sequence[tuple[int, int]], ([(1, 2)], [[1, 2]]), ([(1,)], [1, 2], [(1, "2")])),
    (Mapping[str, int] | None, ({}, {"x": 1}, None), ({1: 1}, {"x": "y"}, [("x", 1)])),
    (Callable[[int], int] | None, (abs, int, None), (3, "abs", [])),
    (torch.dtype, (torch.float32,), ("float32", torch.float32.itemsize, numpy.float32)),
    (nn.Module, (nn.Linear(1, 1),), (nn.Linear, None)),
    (Any, (None, 3), ())], ids=words)
def test_what_fits(annotation, good, bad):
    assert [value for value in good if not fits(value, annotation)] == []
    assert [value for value in bad if fits(value, annotation)] == []
    assert describe(annotation) if bad else True


def alone(run: Callable[[ranvier.World], object]) -> object:
    return run_ranks(run, 1)[0]


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


LOADER = DataLoader(TensorDataset(torch.ones(4, 4), torch.ones(4, 4)), batch_size=2)
ON_A_RANK = {
    ranvier.Engine: lambda world: {"model": blocks(), "world": world, "loss": squared},
    ranvier.Checkpoints: lambda world: {"engine": ranvier.Engine(blocks(), world, loss=squared), "folder": "x"},
    ranvier.shard_loader: lambda world: {"loader": LOADER, "world": world, "microbatch_size": 2}}
ANYWHERE = {
    ranvier.Model: {"blocks": {"a": nn.Identity}, "loss": squared},
    ranvier.Initial: {"kind": "constant", "scale": 1.0},
    ranvier.blocks_of: {"module": nn.Linear(4, 4)},
    ranvier.from_transformers: {"model": nn.Linear(4, 4)},
    ranvier.with_adapters: {"model": blocks(), "lora": Lora(rank=1), "loss": squared},
    ranvier.start: {}, partial(ranvier.run, len): {},
    make: {"model": as_model(blocks(), squared), "mesh": ranvier.Mesh()},
    Linear: {"in_features": 4, "out_features": 4, "stationary": "input"}, Dropout: {"probability": 0.1},
    Rotary: {"width": 4},
    run_ranks: {"fn": len, "size": 1}, check_policy: {"policy": None}, check_freeze_policy: {"make": len},
    check_blocks: {"module": nn.Linear(4, 4), "blocks": {}, "sample": torch.ones(2, 4)},
    check_split: {"model": nn.Linear(4, 4), "sample": torch.ones(2, 4)}}
NOT_CHECKED = {"rerun", "sample", "policy", "stream"}
"""Arguments of the functions above that are not checked before their use."""


@pytest.mark.parametrize("door", [*ON_A_RANK, *ANYWHERE], ids=lambda door: getattr(door, "__name__", "run"))
def test_every_argument_is_checked(door, monkeypatch):
    monkeypatch.setattr("ranvier.launch.failures.install_start_error_handlers", lambda rank: None)
    names = [name for name in inspect.signature(door).parameters if name not in (
        NOT_CHECKED if door not in (ranvier.Engine, make) else ()) and name not in ("function", "args")]

    def ask(valid):
        for name in names:
            with pytest.raises(RanvierError) as caught:
                door(**valid | {name: object()})
            assert name in str(caught.value) and "\n" not in str(caught.value)

    alone(lambda world: ask(ON_A_RANK[door](world))) if door in ON_A_RANK else ask(ANYWHERE[door])


@pytest.mark.parametrize(("options", "where"), [
    *(({name: value}, f"Engine({name}=...)") for name, values in {
        "world": (None, "x", ranvier.Mesh()), "loss": (3,), "frozen": ("x", None), "keep_fp32": (None, [None], b"x"),
        "dtype": ("bf16",), "memory": ({"recompute": 1},), "guard": ("skip",), "plan": ({},), "buffers": ("first",),
        "learning_rate": (math.nan, math.inf, -0.1, "0.1", None), "compile": ("true", 1, None), "seed": (1.5,),
        "nominal_weight": (0, -1.0, math.nan, math.inf, "all", None), "timeout_seconds": (0, math.inf),
        "frozen_above": ("12", 3)}.items() for value in values)], ids=words)
def test_an_argument_of_an_engine(options, where):
    with raises("malformed-argument", where=where):
        alone(lambda world: ranvier.Engine(**{"model": blocks(), "world": world, "loss": squared, **options}))


@pytest.mark.parametrize(("call", "code"), [
    (lambda: ranvier.Model(blocks={"a": nn.Identity}, loss=nn.MSELoss), "loss-is-class"),
    (lambda: ranvier.start("data=2"), "mesh-of-other-type"),
    (lambda: ranvier.run(len, mesh=4), "mesh-of-other-type"),
    (lambda: make(as_model(blocks(), squared), ranvier.Mesh(), sample=torch.ones(2, 4)), "sample-form"),
    (lambda: Pipeline(in_flight=True), "malformed-argument"), (lambda: Memory(recompute=True), "malformed-argument"),
    (lambda: Train(learning_rate=math.inf), "malformed-argument"), (lambda: Checkpoint(dir=""), "malformed-argument"),
    (lambda: Optim(clip_norm=math.nan), "malformed-argument"),
    (lambda: alone(lambda world: ranvier.Engine(ranvier.Model(
        blocks={"a": partial(nn.Linear, 4, 4)}, loss=squared, initial=lambda name: None), world)), "initial-result"),
    (lambda: alone(lambda world: ranvier.Checkpoints(ranvier.Engine(blocks(), world, loss=squared), "x", keep=0)),
     "malformed-argument")])
def test_other_calls(call, code, monkeypatch):
    monkeypatch.setattr("ranvier.launch.failures.install_start_error_handlers", lambda rank: None)
    with raises(code):
        call()


def test_the_message():
    with pytest.raises(ConfigError) as caught:
        ranvier.Engine(blocks(), SimpleNamespace(), loss=squared)
    assert str(caught.value) == ("Engine(world=...): must be a World (got namespace()). Give a value of this form.")
    with pytest.raises(ConfigError) as caught:
        Dropout(2)
    assert str(caught.value) == ("Dropout(probability=...): must be a number of at least 0 and of at most 1 (got 2). "
                                 "Give a value of this form.")


def test_numbers_of_numpy_on_several_ranks():
    """Such numbers are compared between ranks as text."""
    def work(world):
        engine = ranvier.Engine(blocks(), world, mesh=ranvier.Mesh(pipe=2), loss=squared, optim=Optim(),
                                seed=numpy.int64(3), frozen=numpy.int64(0), nominal_weight=numpy.float32(2.0),
                                learning_rate=numpy.float64(0.1), check_order=numpy.bool_(True),
                                timeout_seconds=numpy.float32(60))
        found = engine.train_batch(ranvier.microbatches(torch.ones(4, 4), torch.ones(4, 4), numpy.int64(2))).loss
        engine.close()
        return found

    first, second = run_ranks(work, 2)
    assert first == second
