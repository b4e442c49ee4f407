"""An engine that has failed refuses further calls, and a rank that ends its loop before others is named."""

import copy
import time
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.config.run import Memory, Optim
from ranvier.errors import ModelError, RanvierError, TransportError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.errors import check, raises
from tests.pipeline.parity import points, share, squared
from tests.pipeline.test_unusual_blocks import Plain


class Breaks(nn.Module):
    """Fails on a sample of NaN."""

    def forward(self, x):
        if x.isnan().any():
            raise ZeroDivisionError("sample 3 is empty")
        return x


def build(world, mesh=None, blocks=None):
    return Engine(blocks or [Plain(), Breaks(), Plain()], world, mesh=mesh or Mesh(), loss=squared, optim=Optim(),
                  dtype=torch.float64)


GOOD, BAD = points([[2, 1]])[0], [(torch.full((2, 4), float("nan"), dtype=torch.float64), torch.zeros(2, 4))]
CALLS = {
    "train_batch": lambda engine: engine.train_batch(GOOD), "evaluate": lambda engine: engine.evaluate(GOOD),
    "forward_backward": lambda engine: engine.forward_backward(GOOD), "predict": lambda engine: engine.predict(GOOD),
    "state_dict": lambda engine: engine.state_dict(), "load_state_dict": lambda engine: engine.load_state_dict({}),
    "compare_replicas": lambda engine: engine.compare_replicas(), "examine": lambda engine: engine.examine(GOOD),
    "report": lambda engine: engine.report("page.html"),
    "layer_gradient_norms": lambda engine: engine.layer_gradient_norms()}


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
            check(caught.value, "engine-failed", "ZeroDivisionError", "sample 3 is empty")
            assert caught.value.where.endswith(name)
        engine.close()
        engine.close()

    run_ranks(work, 1)


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_engine_says_so(call):
    def work(world):
        engine = build(world)
        engine.close()
        with raises("engine-closed", where=f"Engine.{call}"):
            CALLS[call](engine)

    run_ranks(work, 1)


X = torch.zeros(2, 4, dtype=torch.float64)
REFUSED = {"no batch": 3, "a tensor": X, "a number": [3], "four": [(X, X, None, None)], "nothing": [()],
           "no inputs": [(None, X)], "no targets": [(X, X), (X, None)]}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_what_is_refused_before_it_begins_breaks_nothing(mesh):
    """Nothing was sent or changed: the next call computes as in an engine that has seen no error."""
    blocks = [Plain(), Breaks(), Plain()]

    def losses(world, wrong):
        engine = build(world, mesh, copy.deepcopy(blocks))
        with raises("clip-without-gradients", value=1.0):
            engine.clip_grad_norm_(1.0)
        found = []
        for call in (engine.train_batch, engine.forward_backward, engine.evaluate, engine.predict, engine.train_batch):
            for name, batch in REFUSED.items() if wrong else ():
                is_known = name in ("no inputs", "no targets") and (
                    not (engine.is_first_stage if name == "no inputs" else engine.is_last_stage)
                    or (call == engine.predict and name == "no targets"))
                if not is_known:
                    with pytest.raises(ModelError):
                        call(batch)
            found.append(getattr(call(iter(share(engine, [GOOD]))), "loss", None))
            engine.zero_grad()
        found.append(engine.steps)
        engine.close()
        return found

    right = run_ranks(partial(losses, wrong=False), mesh.size)
    assert run_ranks(partial(losses, wrong=True), mesh.size) == right and right[0][-1] == 3


def test_a_hook_that_recomputation_refuses_may_be_removed():
    def work(world):
        block = Plain()
        engine = Engine([block, Plain()], world, mesh=Mesh(), loss=squared, optim=Optim(), dtype=torch.float64,
                        memory=Memory(recompute=1))
        hook = block.register_forward_hook(lambda *call: None)
        with pytest.raises(ModelError) as caught:
            engine.train_batch(GOOD)
        assert caught.value.where == "0"
        hook.remove()
        engine.train_batch(GOOD)
        engine.close()

    run_ranks(work, 1)


def test_a_failed_rank_closes_without_the_others():
    """`finally: engine.close()` lets the error through, and does not wait for ranks that wait for the failed rank."""
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
    check(caught.value, "ranks-differ-in-steps", f"{batches} batches")
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


@pytest.mark.parametrize("call", CALLS)
def test_a_call_amid_a_batch_is_refused(call):
    """As from `observe`: the batch would continue with what the call has left."""
    def rank(world):
        engine = build(world)
        with raises("engine-in-batch"):
            engine.evaluate(GOOD, observe=lambda number, outputs: CALLS[call](engine))
        engine.close()
        updated = Engine([Plain()], world, loss=squared, optimizer=partial(torch.optim.SGD, lr=0.1),
                         dtype=torch.float64)
        updated.optimizer.register_step_post_hook(lambda *arguments: CALLS[call](updated))
        for train in (updated.train_batch, lambda batch: updated.step(updated.forward_backward(batch))):
            with raises("engine-in-batch"):
                train(GOOD)
            updated._lifetime.failure = None
        updated.close()

    run_ranks(rank, 1)


def test_a_call_in_a_forked_process_is_refused():
    """Its threads and connections belong to the first process."""
    def rank(world):
        engine = build(world, Mesh(data=world.size))
        if world.rank == 0:
            with mock.patch("os.getpid", lambda: 1), nullcontext() if world.size == 1 else raises("engine-forked"):
                engine.check_usable("train_batch")
        engine.close()

    for size in (1, 2):
        run_ranks(rank, size)


def test_norms_of_layers_that_nobody_has_watched():
    def rank(world):
        engine = build(world)
        engine.train_batch(GOOD)
        with raises("layers-not-watched"):
            engine.layer_gradient_norms()
        engine.close()

    run_ranks(rank, 1)


def test_an_observer_that_modifies_outputs_before_the_loss_is_refused():
    def rank(world):
        engine = build(world)
        engine.predict(GOOD, observe=lambda number, outputs: outputs.zero_())
        with raises("observe-modifies"):
            engine.evaluate(GOOD, observe=lambda number, outputs: outputs.zero_())
        engine.close()

    run_ranks(rank, 1)
