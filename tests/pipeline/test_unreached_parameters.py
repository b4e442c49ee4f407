"""Parameters that no loss reaches stay unchanged, as torch's optimizers leave parameters whose gradient is None."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from ranvier.config.run import Memory, Optim, Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.layers import gated, gelu
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import covering
from tests.errors import raises
from tests.pipeline.parity import SEED, chain, on_mesh, points, share

EXPERTS = 3


class Routed(nn.Module):
    """Each microbatch goes to the expert given by its first number; one parameter is never used."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(EXPERTS)])
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.experts[int(x[0, 0].abs().round()) % EXPERTS](x)


def routed(*steps):
    """steps[step][replica][microbatch]: number of the expert."""
    found = []
    for number, step in enumerate(steps):
        batch = points([[2] * len(replica) for replica in step], seed=number)
        for replica, microbatches in zip(step, batch, strict=True):
            for expert, one in zip(replica, microbatches, strict=True):
                one.inputs[0, 0] = expert
        found.append(batch)
    return found


MODEL = partial(chain, Routed, partial(nn.Linear, 4, 4))
STEPS = routed([[0, 1], [0]], [[0], [2, 2]], [[1], [1]], [[1], []])
"""One expert is reached only on replica 1, each is unreached in some step, and a replica may have no microbatch."""


def trained(engine, batches):
    for batch in batches:
        engine.train_batch(share(engine, batch))
    return {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}


def expected(optimizer, batches=STEPS, model=MODEL):
    reference = Reference(model(), seed=SEED, dtype=torch.float64, optimizer=optimizer)
    for batch in batches:
        reference.train_batch([one for replica in batch for one in replica])
    return {name: parameter.detach() for name, parameter in reference.parameters.items()}


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
OWN = partial(Optim, algorithm="sgd", momentum=0.9, weight_decay=0.1, bucket_size=7, chunk_buckets=2)


@pytest.mark.parametrize(("options", "mesh", "defer_bytes"), covering(
    [{}, {"shard": True}, {"offload": "stream"}, {"offload": "host", "shard": True}, {"clip_norm": 1e6},
     {"offload": "hybrid", "bucket_size": 16}],
    [Mesh(data=2), Mesh(data=2, pipe=2)], [0, 1 << 20]), ids=str)
def test_own_optimizer(options, mesh, defer_bytes):
    """Neither weight decay nor momentum changes parameters that no replica reaches in a step."""
    theirs = expected(SGD)
    assert torch.equal(theirs["b0.unused"], expected(SGD, ())["b0.unused"]), "torch does not change it"
    for mine in on_mesh(MODEL, mesh, partial(trained, batches=STEPS), optim=OWN(**options), learning_rate=0.1,
                        pipeline=Pipeline(defer_bytes=defer_bytes)):
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=2, pipe=2)], ids=str)
@pytest.mark.parametrize("apart", [False, True])
def test_a_users_optimizer(mesh, apart):
    """AdamW counts steps for each parameter separately."""
    adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    theirs = expected(adamw)

    def work(engine):
        if not apart:
            return trained(engine, STEPS)
        for batch in STEPS:
            engine.step(engine.forward_backward(share(engine, batch)))
        return trained(engine, ())

    for mine in on_mesh(MODEL, mesh, work, optimizer=adamw):
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-10, atol=1e-13)


def add_noise(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad + 0.1


@pytest.mark.parametrize("options", [{"optimizer": SGD}, {"optim": OWN()}, {"optim": OWN(shard=True)}], ids=str)
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=2, pipe=2)], ids=str)
def test_a_program_that_changes_the_gradients_that_there_are(mesh, options):
    """Between forward_backward and step, and between two accumulated calls of forward_backward."""
    groups = [STEPS[:1], STEPS[1:3], STEPS[3:]]
    reference = Reference(MODEL(), seed=SEED, dtype=torch.float64)
    optimizer = SGD(reference.parameters.values())
    for group in groups:
        reference.forward_backward([one for batch in group for replica in batch for one in replica])
        reached = {name for name, parameter in reference.parameters.items() if parameter.grad is not None}
        add_noise(reference.parameters.values())
        optimizer.step()

    def work(engine):
        for group in groups:
            for batch in group:
                result = engine.forward_backward(share(engine, batch))
            found = {name for name, gradient in engine.gradients().items() if gradient.any()}
            assert all(parameter.grad is not None for name, parameter in engine.named_parameters().items()
                       if name in found)
            add_noise(engine.parameters())
            engine.step(result)
        return found, trained(engine, ())

    for found, mine in on_mesh(MODEL, mesh, work, learning_rate=0.1, **options):
        assert found <= reached
        for name, value in mine.items():
            torch.testing.assert_close(value, reference.parameters[name].detach(), rtol=1e-10, atol=1e-13)


def test_updates_in_the_backward():
    batches = routed([[0]], [[1]], [[1]])
    theirs = expected(SGD, batches)
    (mine,) = on_mesh(MODEL, Mesh(), partial(trained, batches=batches), learning_rate=0.1,
                      optim=OWN(update_in_backward=True))
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-10, atol=1e-13)


class WithoutGradient(torch.autograd.Function):
    """Its backward returns None, as a function that stops gradients may do."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return None


class Stops(nn.Module):
    def __init__(self, rows, stops=True, activation=None):
        super().__init__()
        self.table, self.stops, self.activation = nn.Embedding(rows, 4), stops, activation
        self.linear, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.linear(x + self.table(x[:, 0].abs().long()))
        if self.activation is not None:
            hidden = self.activation(hidden)
        return self.last(WithoutGradient.apply(hidden) if self.stops else hidden)


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(pipe=2)], ids=str)
def test_a_backward_that_returns_none(mesh):
    """Autograd then calls earlier functions without a gradient, which zeros must not replace: within a stage, through
    the beginning of one, and on both of two replicas."""
    model, batches = partial(chain, partial(Stops, 5, stops=False), partial(Stops, 1100)), [points([[2]] * mesh.data)]
    theirs = expected(SGD, batches, model)
    for mine in on_mesh(model, mesh, partial(trained, batches=batches), optim=OWN(), learning_rate=0.1):
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("own", "plain"), [
    (gelu, partial(functional.gelu, approximate="tanh")),
    (lambda x: gated(x, x), lambda x: functional.silu(x) * x)])
def test_a_backward_that_returns_none_behind_a_function_with_its_own_backward(own, plain):
    """On rows and columns zeros do replace it, so that all ranks of a stage run the same layers."""
    batches = [points([[2]])]
    theirs = expected(SGD, batches, partial(chain, partial(Stops, 5, activation=plain)))
    (mine,) = on_mesh(partial(chain, partial(Stops, 5, activation=own)), Mesh(), partial(trained, batches=batches),
                      optim=OWN(), learning_rate=0.1)
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("accumulate", ["fp32", "half"])
@pytest.mark.parametrize("users", [False, True])
def test_half_precision(users, accumulate):
    """Gradients are sent as halves, with the sign of zero, and master copies stay unchanged."""
    batches = [[[Microbatch(one.inputs.bfloat16(), one.targets.bfloat16()) for one in replica] for replica in batch]
               for batch in routed([[0], [1]], [[1], [1]])]
    options = {"optim": OWN(accumulate=accumulate), "learning_rate": 0.1} if not users else {
        "optim": Optim(accumulate=accumulate), "optimizer": SGD}

    def run(world):
        engine = Engine(MODEL(), world, mesh=Mesh(data=2), seed=SEED, dtype=torch.bfloat16, **options)
        found = [trained(engine, batch) for batch in ((), batches[:1], batches[1:])]
        engine.close()
        return found

    (start, first, second), others = run_ranks(run, 2)
    assert all(torch.equal(second[name], others[2][name]) for name in second)
    for expert, moves in ((0, (True, False)), (1, (True, True)), (2, (False, False))):
        name = f"b0.experts.{expert}.weight"
        assert (not torch.equal(start[name], first[name]), not torch.equal(first[name], second[name])) == moves


def test_a_gradient_that_is_zero_is_one():
    """A parameter that is reached with gradient 0 decays, on every replica, as in torch."""
    class Zeroed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x):
            y = self.linear(x)
            return y + 0.0 * self.scale if x[0, 0] > 0 else y

    model = partial(chain, Zeroed)
    batch = points([[2], [2]])
    for replica, microbatches in enumerate(batch):
        microbatches[0].inputs[0, 0] = 1.0 if replica else -1.0
    theirs = expected(SGD, [batch] * 2, model)
    for mine in on_mesh(model, Mesh(data=2), partial(trained, batches=[batch] * 2), optim=OWN(), learning_rate=0.1):
        torch.testing.assert_close(mine["b0.scale"], theirs["b0.scale"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("reached", [(), (0,), (1,), (0, 1)], ids=str)
def test_the_ends_of_a_tie(reached):
    """A tie that no end reaches stays unchanged; one reached end is enough to train it."""
    class End(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.weight, self.linear, self.number = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), number

        def forward(self, x):
            y = self.linear(x)
            return y * self.weight if self.number in reached else y

    model = partial(chain, partial(End, 0), partial(nn.Linear, 4, 4), partial(End, 1),
                    tied=(("b0.weight", "b2.weight"),))
    batch = points([[2, 1], [2]])
    theirs = expected(SGD, [batch] * 2, model)
    for mine in on_mesh(model, Mesh(data=2, pipe=3), partial(trained, batches=[batch] * 2), optim=OWN(),
                        learning_rate=0.1):
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
@pytest.mark.parametrize("recompute", ["none", 1])
def test_a_loss_without_a_gradient_is_refused(mesh, recompute):
    """A plain loop fails at its backward. If nothing counts, or if the loss is 0 as for samples without any pair, it
    may be constant, and an evaluation needs no gradient."""
    def loss(outputs, targets):
        if not len(targets):
            return torch.zeros((), dtype=torch.float64), outputs.shape[0] - 2
        return ((outputs.detach() - targets) ** 2).sum(), targets.numel()

    def work(engine):
        ones = torch.ones(2, 4, dtype=torch.float64)
        engine.evaluate([(ones, ones)])
        for samples in (2, 3):
            engine.forward_backward([(torch.ones(samples, 4, dtype=torch.float64), ones[:0])])
        engine.train_batch([(ones, ones)])

    model = partial(chain, partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 4), loss=loss)
    with raises("loss-without-gradient", where="loss"):
        on_mesh(model, mesh, work, optimizer=SGD, memory=Memory(recompute=recompute))


@pytest.mark.parametrize("weight", [-3, float("inf")])
def test_a_weight_of_the_batch_that_is_no_count_is_refused(weight):
    model = partial(chain, partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 4),
                    loss=lambda outputs, targets: (outputs.sum(), weight))
    ones = torch.ones(2, 4, dtype=torch.float64)
    with raises("loss-weight-range", where="loss"):
        on_mesh(model, Mesh(pipe=2), lambda engine: engine.train_batch([(ones, ones)]), optimizer=SGD)
