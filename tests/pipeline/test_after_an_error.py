"""An engine that has failed refuses further calls, and a rank that ends its loop before others is named."""

import time
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.config.run import Optim
from ranvier.errors import ConfigError, ModelError, RanvierError, TransportError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.pipeline.parity import points, share, squared
from tests.pipeline.test_unusual_blocks import Plain


class Breaks(nn.Module):
    """Fails on a sample of NaN."""

    def forward(self, x):
        if x.isnan().any():
            raise ZeroDivisionError("sample 3 is empty")
        return x


def build(world, mesh=None):
    return Engine([Plain(), Breaks(), Plain()], world, mesh=mesh or Mesh(), loss=squared, optim=Optim(),
                  dtype=torch.float64)


GOOD, BAD = points([[2, 1]])[0], [(torch.full((2, 4), float("nan"), dtype=torch.float64), torch.zeros(2, 4))]
CALLS = {
    "train_batch": lambda engine: engine.train_batch(GOOD), "evaluate": lambda engine: engine.evaluate(GOOD),
    "forward_backward": lambda engine: engine.forward_backward(GOOD), "predict": lambda engine: engine.predict(GOOD),
    "state_dict": lambda engine: engine.state_dict(), "load_state_dict": lambda engine: engine.load_state_dict({}),
    "compare_replicas": lambda engine: engine.compare_replicas(), "examine": lambda engine: engine.examine(GOOD)}


@pytest.mark.parametrize("failing", ["train_batch", "evaluate"])
def test_a_failed_engine_names_its_first_error(failing, tmp_path):
    def work(world):
        engine = build(world)
        checkpoints = Checkpoints(engine, tmp_path)
        engine.train_batch(GOOD)
        for _ in range(2):
            with pytest.raises((ZeroDivisionError, RanvierError)):
                getattr(engine, failing)(BAD)
        for name, call in {**CALLS, "Checkpoints.save": lambda engine: checkpoints.save(),
                           "Checkpoints.load": lambda engine: checkpoints.load()}.items():
            with pytest.raises(RanvierError) as caught:
                call(engine)
            assert caught.value.where.endswith(name) and "ZeroDivisionError: sample 3 is empty" in caught.value.what
        engine.close()
        engine.close()

    run_ranks(work, 1)


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_engine_says_so(call):
    def work(world):
        engine = build(world)
        engine.close()
        with pytest.raises(RanvierError) as caught:
            CALLS[call](engine)
        assert caught.value.where == f"Engine.{call}" and caught.value.what == "is closed"

    run_ranks(work, 1)


def test_what_is_refused_before_it_begins_breaks_nothing():
    def work(world):
        engine = build(world)
        for wrong, error in ((lambda: engine.train_batch([3]), ModelError),
                             (lambda: engine.clip_grad_norm_(1.0), ConfigError)):
            with pytest.raises(error):
                wrong()
        engine.train_batch(GOOD)
        engine.close()

    run_ranks(work, 1)


def test_a_failed_rank_closes_without_the_others():
    """`finally: engine.close()` lets the error through, and does not wait for ranks that wait for this one."""
    def work(world):
        engine = build(world, Mesh(pipe=2))
        try:
            engine.train_batch(share(engine, [GOOD]) if world.rank else BAD)
        finally:
            engine.close()

    with pytest.raises(ZeroDivisionError):
        run_ranks(work, 2)


@pytest.mark.parametrize(("mesh", "early", "batches"), [(Mesh(data=2), 1, 3), (Mesh(data=2, pipe=2), 2, 1)], ids=str)
def test_a_replica_that_stops_early_is_named(mesh, early, batches):
    def work(world):
        engine = build(world, mesh)
        at = engine.coordinates.data
        for _ in range(batches if world.rank == early or at == mesh.coordinates(early).data else batches + 1):
            engine.train_batch(share(engine, points([[2, 1]] * mesh.data)))
        engine.close()

    with pytest.raises(TransportError) as caught:
        run_ranks(work, mesh.size)
    assert f"ended its loop after {batches} batches, while rank " in caught.value.what
    first = {rank for rank in range(mesh.size) if mesh.coordinates(rank).data == mesh.coordinates(early).data}
    assert caught.value.where in {f"rank {rank}" for rank in first}


def test_ranks_may_close_at_different_times():
    def work(world, slow):
        engine = build(world, Mesh(data=2))
        engine.train_batch(share(engine, points([[2], [1]])))
        if world.rank == slow:
            time.sleep(1.2)
        engine.close()

    for slow in range(2):
        run_ranks(partial(work, slow=slow), 2)
