"""Backwards in a thread of their own, as autograd runs them for a CUDA device: thread-local state of blocks, layers and
recomputation in the engine's thread is not available there."""

import threading
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from benchmarks.gpu.programs import Program, losses
from ranvier.config.run import Memory, Optim
from ranvier.pipeline.engine import Engine
from ranvier.tensor import weight_gradients
from ranvier.testing.ranks import run_ranks
from tests.covering import without
from tests.pipeline.parity import squared

PROGRAM = Program(layers=1, dropout=0.2, microbatches=2, steps=2, optim={"clip_norm": 0.1})
VARIANTS = {
    "deferred": {}, "recomputed": {"memory": {"recompute": 1}},
    "selective": {"memory": {"recompute": "selective"}}, "stages": {"mesh": {"pipe": 2}, "memory": {"recompute": 1}},
    "updated meanwhile": {"microbatches": 1, "optim": {"update_in_backward": True}},
    "rows and columns": {"steps": 1, "mesh": {"row": 2, "col": 2}, "memory": {"recompute": "selective"}}}


@pytest.fixture
def threads(monkeypatch):
    """One entry for each backward that has run in a thread."""
    run, inside, ended = torch.autograd._engine_run_backward, threading.local(), []

    def in_a_thread(*args, **kwargs):
        if getattr(inside, "autocast", None) is not None:  # autograd calls of a backward stay in its thread
            return run(*args, **kwargs)
        autocast, found = torch.is_autocast_enabled("cpu"), []

        def work():
            # Autograd passes on whether autocast is on, but not its dtype.
            inside.autocast = autocast
            torch.set_autocast_enabled("cpu", autocast)
            torch.set_autocast_dtype("cpu", torch.float16)
            try:
                found.append((run(*args, **kwargs), None))
            except BaseException as error:
                found.append((None, error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        ended.append(1)
        result, error = found.pop()
        if error is not None:
            raise error
        return result

    for module in (torch.autograd, weight_gradients):
        monkeypatch.setattr(module, "_engine_run_backward", in_a_thread)
    return ended


@pytest.mark.parametrize("name", without(["rows and columns"], VARIANTS))
def test_losses_and_norms_are_those_of_one_thread(name, threads, monkeypatch):
    program = replace(PROGRAM, **VARIANTS[name])
    size = 1
    for ranks in program.mesh.values():
        size *= ranks
    found = run_ranks(lambda world: losses(world, asdict(program)), size)
    assert threads
    monkeypatch.undo()
    assert found == run_ranks(lambda world: losses(world, asdict(program)), size)


@pytest.mark.parametrize("recompute", [1, "selective"])
def test_a_second_forward_has_the_autocast_of_the_first(recompute, threads):
    seen = []

    class Noted(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append((torch.is_autocast_enabled("cpu"), y.dtype))
            return y.tanh()  # its backward needs all results before it

    def rank(world):
        engine = Engine([Noted(4, 4), Noted(4, 4)], world, loss=squared, optim=Optim(), autocast=torch.bfloat16,
                        memory=Memory(recompute=recompute))
        engine.train_batch([(torch.ones(2, 4), torch.zeros(2, 4))])
        engine.close()

    run_ranks(rank, 1)
    assert threads and seen == [(True, torch.bfloat16)] * 4
