"""A closed engine leaves nothing behind: its parameters, states and buffers are freed without Python's collector."""

import gc
import threading
from dataclasses import replace

import pytest
import torch
import torch._dynamo  # its first import keeps the importer's frames alive until the collector runs
from torch import nn

from ranvier.config.run import Memory, Optim, Pipeline, TensorParallel
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.system.memory_tracker import MemoryTracker
from ranvier.testing.ranks import run_ranks
from tests.covering import without
from tests.pipeline.parity import chain, points, share, small_gpt, tokens


class Breaks(nn.Module):
    """Its forward fails on a sample of NaN, its backward on one of infinity."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        if x.isnan().any():
            raise ZeroDivisionError("in the forward")
        y = self.inner(x)
        if x.isinf().any():
            y.register_hook(fail)
        return y


def fail(gradient):
    raise ZeroDivisionError("in the backward")


GPT = tokens([[2, 1], [1, 2]])
"""Microbatches of two replicas."""


def train(engine, batches=GPT):
    for _ in range(2):
        engine.train_batch(share(engine, batches))


def train_and_evaluate(engine, batches=GPT):
    train(engine, batches)
    for call in (engine.forward_backward, engine.evaluate, engine.predict):
        call(share(engine, batches))


def break_with(value):
    def work(engine):
        batches = points([[2, 1]] * engine.mesh.data)
        train(engine, batches)
        bad = [replace(one, inputs=None if one.inputs is None else torch.full_like(one.inputs, value))
               for one in share(engine, batches)]
        with pytest.raises(ZeroDivisionError):
            engine.train_batch(bad)
    return work


def two_layers():
    return small_gpt(2)


def one_layer():
    return small_gpt(1)


def of_breaking_blocks():
    return chain(Breaks, Breaks, Breaks)


SMALL = dict(bucket_size=300)
CASES = {
    "one rank": (Mesh(), {}),
    "evaluation": (Mesh(), dict(work=train_and_evaluate)),
    "an optimizer of torch": (Mesh(), dict(optim=None, optimizer=lambda p: torch.optim.AdamW(p), work=train)),
    "half precision": (Mesh(), dict(dtype=torch.bfloat16)),
    "loss scale": (Mesh(), dict(dtype=torch.float16, optim=Optim(clip_norm=1.0))),
    "recomputation": (Mesh(), dict(memory=Memory(recompute=1))),
    **{f"offload {offload}": (Mesh(), dict(optim=Optim(offload=offload, offload_share=0.5, **SMALL)))
       for offload in ("stream", "host", "hybrid")},
    "update in the backward": (Mesh(data=2), dict(optim=Optim(update_in_backward=True), batches=[tokens([[2], [1]])])),
    "sharded states": (Mesh(data=2), dict(optim=Optim(shard=True, **SMALL))),
    "sums in half precision": (Mesh(data=2), dict(dtype=torch.bfloat16, optim=Optim(accumulate="half", **SMALL))),
    "pipeline": (Mesh(pipe=2), dict(work=train_and_evaluate)),
    "several stages a rank": (Mesh(pipe=2), dict(pipeline=Pipeline(stages_per_rank=2))),
    "rows": (Mesh(row=2), dict(make=one_layer, batches=[tokens([[2, 2]])])),
    "evaluation of rows": (Mesh(row=2), dict(make=one_layer, batches=[tokens([[2, 2]])], work=train_and_evaluate)),
    "columns": (Mesh(col=2), dict(make=one_layer, work=train_and_evaluate)),
    "columns with sequence parallelism": (Mesh(col=2), dict(make=one_layer,
                                                         tensor=TensorParallel(scheme="megatron"))),
    "pipeline of rows and columns": (Mesh(pipe=2, row=2, col=2), dict(make=one_layer, batches=[tokens([[2, 2]])])),
    "an error in the forward": (Mesh(), dict(make=of_breaking_blocks, work=break_with(float("nan")))),
    "an error in the backward": (Mesh(), dict(make=of_breaking_blocks, work=break_with(float("inf")))),
    "an error under recomputation": (Mesh(), dict(make=of_breaking_blocks, work=break_with(float("inf")),
                                                  memory=Memory(recompute=1)))}


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


def left_alive(mesh, make=two_layers, work=train, batches=(), **options):
    """Bytes of each rank's tensors alive after its engine is closed and dropped, and while it existed."""
    done = threading.Barrier(mesh.size)

    def rank(world):
        with MemoryTracker() as tracker:
            engine = Engine(make(), world, mesh=mesh, **{"optim": Optim(), "dtype": torch.float64} | options)
            work(engine, *batches)
            before = sum(tracker.live.values())
            engine.close()
            del engine
            done.wait()  # messages are freed by their receivers
            return sum(tracker.live.values()), before

    return run_ranks(rank, mesh.size)


@pytest.mark.parametrize("name", without([
    "evaluation of rows", "pipeline of rows and columns", "columns", "offload stream"], CASES))
def test_nothing_of_a_closed_engine_is_alive(name, no_collector):
    mesh, options = CASES[name]
    for after, before in left_alive(mesh, **options):
        assert after == 0 and before > 1000


def test_parameters_of_modules_that_somebody_has_stay_alive(no_collector):
    """Only they stay: gradients and states are freed."""
    blocks = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)]
    parameters = sum(parameter.nbytes for block in blocks for parameter in block.parameters())
    make = lambda: chain(*(lambda block=block: block for block in blocks))  # noqa: E731
    work = lambda engine: train(engine, points([[2, 1]]))  # noqa: E731
    for after, before in left_alive(Mesh(), make=make, work=work):
        assert parameters <= after < 1.2 * parameters and before > 3 * parameters
