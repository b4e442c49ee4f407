"""A loss that is a module is trained on the last stage, as in a plain loop."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.block import Initial, Model
from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.config.run import Memory, Optim, Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import covering
from tests.errors import raises
from tests.pipeline.parity import assert_close, merge, points, share
from tests.pipeline.test_unusual_blocks import Plain

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class Uncertain(nn.Module):
    """A learned variance, a projection, and a buffer that each batch changes."""

    def __init__(self, weight=None):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(4))
        self.project = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        if weight is not None:
            self.project.weight = weight

    def forward(self, outputs, targets):
        if self.training:
            self.seen += len(outputs)
        errors = (self.project(outputs) - targets) ** 2
        return (errors * torch.exp(-self.log_variance) + self.log_variance).sum(), targets.numel()


def built(kind):
    """Blocks and their loss."""
    torch.manual_seed(3)
    blocks = [Plain() for _ in range(4)]
    if kind == "model":
        return Model(blocks={str(number): lambda block=block: block for number, block in enumerate(blocks)},
                     loss=Uncertain()), None
    return blocks, Uncertain(blocks[1].linear.weight if kind == "tied" else None)


@pytest.mark.parametrize(("mesh", "kind", "pipeline", "options"), covering(
    [Mesh(), Mesh(pipe=2), Mesh(data=2, pipe=2), Mesh(data=2)], ["list", "tied", "model"],
    [Pipeline(), Pipeline(stages_per_rank=1), Pipeline(stages_per_rank=2, placement="interleaved")],
    [{"optimizer": ADAMW}, {"optim": Optim(weight_decay=0.1, shard=True)},
     {"optimizer": ADAMW, "sample": Microbatch(torch.zeros(2, 4), torch.zeros(2, 4))}]), ids=str)
def test_it_trains(mesh, kind, pipeline, options):
    batches = [points([[2, 1], [1, 2]][:mesh.data], seed=seed) for seed in range(2)]
    model, loss = built(kind)
    reference = Reference(model, loss=loss, dtype=torch.float64, optimizer=ADAMW)
    expected = []
    for batch in batches:
        reference.train_batch([one for replica in batch for one in replica])
        expected.append(reference.gradients())
    held_out = reference.evaluate(batches[0][0])
    models = [built(kind) for _ in range(mesh.size)]

    def rank(world):
        model, loss = models[world.rank]
        engine = Engine(model, world, mesh=mesh, loss=loss, dtype=torch.float64, learning_rate=1e-2,
                        pipeline=pipeline if mesh.pipe > 1 else None, **options)
        found = []
        for batch in batches:
            result = engine.forward_backward(share(engine, batch))
            found.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
            engine.step(result)
        result = engine.evaluate(share(engine, [batches[0][0]] * mesh.data)).loss
        buffers = engine.named_buffers()
        engine.close()
        return found, result, buffers

    ranks = run_ranks(rank, mesh.size)
    for number, gradients in enumerate(expected):
        assert_close(merge([found[number] for found, _, _ in ranks], mesh), gradients)
    assert {"loss.loss.log_variance", "loss.loss.project.bias"} < set(expected[0])
    assert all(result == pytest.approx(held_out, rel=1e-10) for _, result, _ in ranks)
    seen = [float(buffers["loss.loss.seen"]) for _, _, buffers in ranks if "loss.loss.seen" in buffers]
    assert seen == [3.0 * len(batches)] * mesh.data


def test_it_is_not_recomputed_with_the_blocks_before_it():
    def rank(world):
        blocks, loss = built("list")
        engine = Engine(blocks[:3], world, loss=loss, optimizer=ADAMW, memory=Memory(recompute=2))
        engine.train_batch([(torch.ones(2, 4), torch.zeros(2, 4))])
        engine.close()
        return float(loss.seen)

    assert run_ranks(rank, 1) == [2.0]


def test_checkpoints_have_it(tmp_path):
    def rank(world, load):
        blocks, loss = built("list")
        engine = Engine(blocks, world, mesh=Mesh(pipe=world.size), loss=loss, optimizer=ADAMW)
        checkpoints = Checkpoints(engine, tmp_path)
        if load:
            checkpoints.load()
            return loss.log_variance.detach().clone(), float(loss.seen)
        for _ in range(2):
            engine.train_batch([(torch.ones(2, 4), torch.zeros(2, 4))])
        checkpoints.save()
        checkpoints.wait()
        checkpoints.close()
        return loss.log_variance.detach().clone(), float(loss.seen)

    (_, saved), (loaded,) = run_ranks(partial(rank, load=False), 2), run_ranks(partial(rank, load=True), 1)
    assert saved[0].any() and torch.equal(saved[0], loaded[0]) and saved[1] == loaded[1] == 4.0


def test_names_that_are_taken():
    def rank(world):
        engine = Engine({"loss": Plain(), "head": Plain()}, world, loss=Uncertain())
        return engine.block_names

    assert run_ranks(rank, 1) == [["loss", "head", "loss_"]]


def test_a_start_that_does_not_know_it_is_refused():
    model = Model(blocks={"a": Plain}, loss=Uncertain(), initial=lambda name: Initial("constant", 0.0))
    with raises("loss-with-parameters", where="loss", value="Uncertain"):
        run_ranks(lambda world: Engine(model, world), 1)


def test_on_columns_it_is_refused():
    with raises("layer-cannot-be-split", "loss.loss.log_variance"):
        run_ranks(lambda world: Engine([nn.Tanh()], world, mesh=Mesh(col=2), loss=Uncertain()), 2)
