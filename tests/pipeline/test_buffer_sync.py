"""Buffers that a forward changes: which values replicas have after a batch, and where they are used."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.checkpoint import state
from ranvier.config.run import Optim
from ranvier.elastic.transition import hand_over, take
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from tests.covering import covering
from tests.errors import raises
from tests.pipeline.parity import SEED, chain, on_mesh, points, share, squared

SGD = partial(torch.optim.SGD, lr=0.1)
NORMED = partial(chain, partial(nn.Linear, 4, 4), partial(nn.BatchNorm1d, 4), partial(nn.Linear, 4, 4),
                 partial(nn.BatchNorm1d, 4))


def buffers_of(engine):
    return {name: value.clone() for name, value in engine.named_buffers().items()}


def by_replicas_of_torch(batches, how):
    """The result in torch: a copy of the model for each replica, buffers synchronised before each batch, and gradients
    of the mean over all samples."""
    def engine_weights(engine):
        return {name: value.clone() for name, value in engine.named_parameters().items()}

    start = on_mesh(NORMED, Mesh(), engine_weights)[0]
    blocks = nn.ModuleDict({f"b{number}": module.double() for number, module in enumerate(
        [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)])})
    with torch.no_grad():
        for name, parameter in blocks.named_parameters():
            parameter.copy_(start[name])
    replicas = [blocks, copy.deepcopy(blocks)]
    for batch in batches:
        total, weight = 0.0, 0.0
        for replica, microbatches in zip(replicas, batch, strict=True):
            for one in microbatches:
                x = one.inputs
                for block in replica.values():
                    x = block(x)
                losses, count = squared(x, one.targets)
                total, weight = total + losses, weight + count
        (total / weight).backward()
        with torch.no_grad():
            for one, two in zip(*(replica.parameters() for replica in replicas), strict=True):
                one -= 0.1 * (one.grad + two.grad)
                two.copy_(one)
                one.grad = two.grad = None
            for one, two in zip(*(replica.buffers() for replica in replicas), strict=True):
                if how == "average" and one.is_floating_point():
                    one.copy_((one + two) / 2)
                if how != "local":
                    two.copy_(one)
    return [dict(replica.named_buffers()) for replica in replicas]


@pytest.mark.parametrize(("how", "mesh"), covering(
    ["broadcast", "average", "local", None], [Mesh(data=2), Mesh(data=2, pipe=2)]), ids=str)
def test_buffers_are_those_of_torchs_replicas(mesh, how):
    """By default as with DistributedDataParallel: after training, in an evaluation, in a checkpoint."""
    batches = [points([[3, 2], [4, 3]], seed=seed) for seed in range(3)]
    expected = by_replicas_of_torch(batches, how or "broadcast")

    def work(engine):
        for batch in batches:
            engine.train_batch(share(engine, batch))
        pieces = {piece.name: piece.tensor.clone() for piece in state.pieces_to_write(engine) if piece.kind == "buffer"}
        alike = points([[2], [2]])[0]
        return buffers_of(engine), pieces, engine.evaluate(share(engine, [alike, alike])).loss

    found = on_mesh(NORMED, mesh, work, optimizer=SGD, **({} if how is None else {"buffers": how}))
    for rank, (buffers, pieces, _) in enumerate(found):
        mine = expected[mesh.coordinates(rank).data]
        for name, value in buffers.items():
            torch.testing.assert_close(value, mine[name], rtol=1e-12, atol=1e-14)
        assert set(pieces) == (set(buffers) if mesh.coordinates(rank).data == 0 else set())
        assert all(torch.equal(value, buffers[name]) for name, value in pieces.items())


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_buffers_are_alike_whatever_travels_beside_them(dtype, shard):
    """Half-precision gradients, gathers and buffers use one group, in the same order on all replicas, even if one has
    no microbatch."""
    def rank(world):
        engine = Engine(NORMED(), world, mesh=Mesh(data=2), seed=SEED, dtype=dtype,
                        optim=Optim(shard=shard, bucket_size=8, chunk_buckets=1), buffers="average")
        for counts in ([[3, 2], [2]], [[3], []]):
            batch = [(one.inputs.to(dtype), one.targets.to(dtype)) for one in points(counts)[world.rank]]
            engine.train_batch(batch)
        found = buffers_of(engine)
        engine.close()
        return found

    one, two = run_ranks(rank, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_transition_takes_the_shared_buffers_along():
    """From two replicas on two stages to one replica on three: every rank has the first replica's buffers."""
    def rank(world):
        def build(mesh):
            backend = world.backend.subset(mesh.size)
            if backend is None:
                return None, None
            here = type(world)(**{**vars(world), "backend": backend, "mesh": mesh})
            return Engine(NORMED(), here, mesh=mesh, seed=SEED, dtype=torch.float64, optim=Optim()), backend

        engine, backend = build(Mesh(data=2, pipe=2))
        engine.train_batch(share(engine, points([[3, 2], [4, 3]])))
        held, before = take(engine), buffers_of(engine)
        engine.close()
        backend.close()
        engine, backend = build(Mesh(pipe=3))
        hand_over(held, engine, world.backend, timeout_seconds=30.0)
        after = {}
        if engine is not None:
            after = buffers_of(engine)
            engine.close()
            backend.close()
        return before, after

    found = run_ranks(rank, 4)
    before = {name: value for ranks, _ in found[:2] for name, value in ranks.items()}
    after = {name: value for _, ranks in found for name, value in ranks.items()}
    assert set(after) == set(before) and all(torch.equal(after[name], before[name]) for name in before)


class Observed(nn.Linear):
    """Observes its inputs in evaluations too, as a quantization observer does; the table keeps its values."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        self.table = torch.ones(4, dtype=x.dtype)
        return super().forward(x / (1 + self.largest.clone())) * self.table


@pytest.mark.parametrize(("block", "mesh", "how", "warns"), [
    (Observed, Mesh(data=2), "broadcast", True), (Observed, Mesh(data=2), "local", False),
    (Observed, Mesh(pipe=2), "broadcast", False), (partial(nn.BatchNorm1d, 4), Mesh(data=2), "broadcast", False)],
    ids=["two replicas", "buffers of their own", "one replica", "BatchNorm"])
def test_a_buffer_that_evaluations_change_is_named_once(block, mesh, how, warns):
    def work(engine):
        batch = share(engine, points([[2], [2]][:mesh.data]))
        engine.train_batch(batch)
        for _ in range(2):
            engine.evaluate(batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_mesh(partial(chain, block, partial(nn.Linear, 4, 4)), mesh, work, optimizer=SGD, buffers=how)
    found = [str(one.message) for one in caught if "evaluations change buffer" in str(one.message)]
    assert len(found) == warns and all("b0.largest" in text for text in found)


def test_a_buffer_that_grows_is_named():
    class Remembers(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(0), persistent=False)

        def forward(self, x):
            self.seen = x.detach().new_zeros(len(x))
            return super().forward(x)

    def train(**options):
        on_mesh(partial(chain, Remembers), Mesh(data=2),
                lambda engine: engine.train_batch(share(engine, points([[3], [2]]))), optimizer=SGD, **options)

    with raises("buffer-shape-changed", "b0.seen", 0):
        train()
    train(buffers="local")


def test_an_expanded_buffer():
    """Torch does not write into an expanded tensor. A checkpoint does, as into any other buffer."""
    def work(world):
        layer = nn.Linear(4, 4, dtype=torch.float64)
        layer.register_buffer("scales", torch.tensor([[2.0], [3.0]], dtype=torch.float64)[world.rank].expand(4))
        layer.register_forward_hook(lambda layer, _, output: output * layer.scales)
        engine = Engine([layer], world, mesh=Mesh(data=2), loss=squared, optimizer=SGD)
        engine.train_batch(share(engine, points([[3], [2]])))
        engine.load_state_dict(copy.deepcopy(engine.state_dict()))
        return layer.scales.tolist()

    assert run_ranks(work, 2) == [[2.0] * 4] * 2


@pytest.mark.parametrize(("make", "mesh", "why"), [(NORMED, Mesh(pipe=2), "there is one replica"),
                                                   (partial(chain, partial(nn.Linear, 4, 4)), Mesh(data=2),
                                                    "no block has a buffer")])
def test_a_choice_without_effect_is_told(make, mesh, why):
    with pytest.warns(UserWarning, match=rf"Engine\(buffers='average'\) has no effect: {why}"):
        on_mesh(make, mesh, lambda engine: None, buffers="average")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_mesh(make, mesh, lambda engine: None)


def test_a_buffer_that_the_step_changes_keeps_that():
    """As with an average of weights that a hook of the optimizer updates."""
    def rank(world):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].register_buffer("target", torch.zeros(4))

        def optimizer(parameters):
            made = SGD(parameters)
            made.register_step_post_hook(lambda *_: model[0].target.add_(1.0))
            return made

        engine = Engine(model, world, mesh=Mesh(data=2), loss=squared, optimizer=optimizer)
        for _ in range(2):
            engine.train_batch([(torch.ones(2, 4), torch.ones(2, 4))])
        return model[0].target

    assert all(torch.equal(target, torch.full((4,), 2.0)) for target in run_ranks(rank, 2))
