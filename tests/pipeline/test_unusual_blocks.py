"""Unusual but valid blocks: linear layers used, hooked, packed and patched in every way keep their gradients."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference, relative_error
from tests.covering import covering
from tests.pipeline.parity import assert_parity, chain, chunks_of, on_mesh, points, share, squared


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Twice(Plain):
    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


class BesideItsWeight(Plain):
    def forward(self, x):
        return self.linear(x) + F.linear(torch.sin(x), self.linear.weight)


class Doubles(nn.Parameter):
    """A weight that doubles a linear layer's product."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return 2 * result if function is F.linear else result


class OwnProduct(Plain):
    def __init__(self):
        super().__init__()
        self.linear.weight = Doubles(self.linear.weight.detach())


class NoFeatures(Plain):
    """Layers without features between two products, as `nn.AdaptiveLogSoftmaxWithLoss` has for rare classes."""

    def __init__(self):
        super().__init__()
        self.none = nn.Sequential(nn.Linear(4, 0, bias=False), nn.Linear(0, 4))

    def forward(self, x):
        return self.none(x) + super().forward(x)


class Keyword(Plain):
    def forward(self, x):
        return self.linear(input=x)


class RowByRow(Plain):
    def forward(self, x):
        return torch.stack([self.linear(row) for row in x])


class FourDims(Plain):
    def forward(self, x):
        return self.linear(x.view(-1, 1, 1, 4)).transpose(0, 2).reshape(-1, 4)


class NotContiguous(Plain):
    def forward(self, x):
        return self.linear(torch.cat([x, x + 1], 1)[:, ::2])


class Expanded(Plain):
    def forward(self, x):
        return x + self.linear(x[:, :1].expand(-1, 4)).sum(1, keepdim=True)


class InPlaceAfter(Plain):
    def forward(self, x):
        y = self.linear(x)
        y.mul_(2.0)
        return y.relu_() + x


class InPlaceAfterMoreDims(Plain):
    def forward(self, x):
        y = self.linear(x.unsqueeze(0))
        y.mul_(2.0).tanh_()
        return y.squeeze(0)


class InPlaceOnTheInput(Plain):
    def forward(self, x):
        x = x + 0.0
        return x.add_(torch.tanh(self.linear(x * 1.0)))


class FourTimesLarger(nn.Linear):
    """A subclass with its own forward."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return 4.0 * super().forward(x)


class Assigned(Plain):
    """A forward that was assigned over the layer's own, as adapters do."""

    def __init__(self):
        super().__init__()
        before = self.linear.forward
        self.linear.forward = lambda x: 2.0 * before(x)


class WeightHook(Plain):
    def __init__(self):
        super().__init__()
        self.linear.weight.register_hook(lambda gradient: 3.0 * gradient)


class BiasHook(Plain):
    def __init__(self):
        super().__init__()
        self.linear.bias.register_hook(lambda gradient: 3.0 * gradient)


class WeightNorm(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.linear = wrap(nn.Linear(4, 4))

    def forward(self, x):
        return self.linear(x)


class Checkpointed(Plain):
    def __init__(self, use_reentrant):
        super().__init__()
        self._use_reentrant = use_reentrant

    def forward(self, x):
        return x + checkpoint(lambda v: torch.tanh(self.linear(v)), x, use_reentrant=self._use_reentrant)


class SavedElsewhere(Plain):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(self.linear(x))


class DifferentiatesInside(Plain):
    """x minus the gradient of an energy of x, as energy-based models and physics do."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = (torch.tanh(self.linear(x)) ** 2).sum()
            slope, = torch.autograd.grad(energy, x, create_graph=self.training)
        return x - slope


class DifferentiatesAside(Plain):
    """Uses a gradient as a number, and must leave no trace in the gradients of others."""

    def forward(self, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            slope, = torch.autograd.grad(self.linear(y).sum(), y)
        return x * slope + self.linear(x)


class Detached(Plain):
    def forward(self, x):
        return super().forward(x).detach()


class Unused(Plain):
    def forward(self, x):
        return x * 2.0


class Unchanged(nn.Module):
    def forward(self, x):
        return x


class Buffered(Plain):
    """A constant buffer, an integer buffer, and a count that its forward updates."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.linspace(0.5, 2.0, 4))
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.linear(x)[:, self.order] * self.factor


class Attention(nn.Module):
    """PyTorch's attention, which uses its output projection's weight without calling the layer."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(1)
        return (x + self.attention(x, x, x, need_weights=False)[0]).squeeze(1)


class SparseGradient(Plain):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 4, sparse=True)

    def forward(self, x):
        return self.linear(x) + self.embedding((x[:, 0] > 0).long())


BLOCKS = {block.__name__: block for block in (
    Twice, BesideItsWeight, NoFeatures, Keyword, RowByRow, FourDims, NotContiguous, Expanded, InPlaceAfter,
    InPlaceAfterMoreDims, InPlaceOnTheInput, OwnProduct, FourTimesLarger, Assigned, WeightHook, BiasHook,
    SavedElsewhere, DifferentiatesInside, DifferentiatesAside, Detached, Unused, Unchanged, Buffered, Attention,
    SparseGradient)} | {
    "weight norm": partial(WeightNorm, nn.utils.parametrizations.weight_norm),
    "old weight norm": partial(WeightNorm, nn.utils.weight_norm),
    "checkpoint": partial(Checkpointed, False), "reentrant checkpoint": partial(Checkpointed, True)}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:.*weight_norm.*:FutureWarning",
                            "ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("block", "policy", "mesh"), covering(list(BLOCKS), [
    ("message-driven", Mesh(data=2, pipe=3)), ("message-driven", Mesh()), ("1f1b", Mesh(pipe=2))]), ids=str)
def test_block(block, mesh, policy):
    """In the middle of a chain, where its products are deferred."""
    assert_parity(partial(chain, Plain, BLOCKS[block], Plain, Plain), points([[3, 2, 3]] * mesh.data), mesh,
                  pipeline=Pipeline(policy=policy),
                  optim=chunks_of(5))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("block", "place"), covering(
    [Twice, Detached, Unchanged, DifferentiatesInside, Unused, InPlaceAfter, partial(Checkpointed, False)], [0, 3]))
def test_block_at_the_ends(block, place):
    builders = [Plain] * 3
    builders.insert(place, block)
    assert_parity(partial(chain, *builders), points([[3, 2, 3]]), Mesh(pipe=4))


def test_a_linear_layer_takes_sparse_inputs():
    class Sparse(Plain):
        def forward(self, x):
            return super().forward(x) + self.linear(x.detach().to_sparse())

    assert_parity(partial(chain, Plain, Sparse, Plain), points([[3, 2]]), Mesh(pipe=3))


def test_hooks_after_accumulation_are_called():
    seen = []

    class Listening(Plain):
        def __init__(self):
            super().__init__()
            self.linear.weight.register_post_accumulate_grad_hook(seen.append)

    on_mesh(partial(chain, Listening, Plain), Mesh(),
            lambda engine: engine.forward_backward(share(engine, points([[2, 2, 2]]))))
    assert len(seen) == 3


def test_hooks_of_modules_are_called():
    seen = []

    class Watched(Plain):
        def __init__(self):
            super().__init__()
            self.linear.register_forward_hook(lambda *call: seen.append("forward"))
            self.linear.register_full_backward_hook(lambda *call: seen.append("backward"))

    assert_parity(partial(chain, Plain, Watched, Plain), points([[2]]), Mesh(pipe=3))
    assert seen == ["forward", "backward"] * 2  # once in the engine, once in the reference


@pytest.mark.parametrize("policy", ["message-driven", "1f1b"])
def test_autocast_inside_a_block(policy):
    """In fp32, since autocast does not cast fp64, and as close as bfloat16's eight bits allow."""
    class Cast(Plain):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x).float()

    batch = [type(one)(one.inputs.float(), one.targets.float()) for one in points([[3, 2]])[0]]
    make = partial(chain, Plain, Cast, Plain)
    reference = Reference(make(), seed=3)
    reference.forward_backward(batch)

    def rank(world):
        engine = Engine(make(), world, mesh=Mesh(), seed=3, pipeline=Pipeline(policy=policy), nominal_weight=20.0)
        engine.forward_backward(batch)
        return {name: gradient.clone() for name, gradient in engine.gradients().items()}

    found, = run_ranks(rank, 1)
    assert max(relative_error(found[name], one) for name, one in reference.gradients().items()) < 1e-3


def test_batch_norm_sees_microbatches_one_after_another():
    """Its statistics and running averages are those of a process that runs the same microbatches."""
    make = partial(chain, Plain, lambda: nn.BatchNorm1d(4), Plain)
    batches = points([[3, 4, 2]])
    reference = Reference(make(), seed=3, dtype=torch.float64)
    reference.forward_backward(batches[0])
    assert_parity(make, batches, Mesh(pipe=3))

    def work(engine):
        engine.forward_backward(share(engine, batches))
        engine.evaluate(share(engine, batches))
        return [buffer.clone() for _, _, module in engine._stages.blocks for buffer in module.buffers()]

    found = on_mesh(make, Mesh(pipe=3), work)[1]
    for buffer, expected in zip(found, reference.modules["b1"].buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2), Mesh(pipe=5)], ids=str)
def test_one_module_as_two_blocks(mesh):
    """A sequence that contains a module twice is complete; the two blocks are tied."""
    def make():
        torch.manual_seed(0)
        same = nn.Linear(4, 4)
        return nn.Sequential(same, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), same)

    models, plain, batch = [make() for _ in range(mesh.size)], make().double(), points([[2, 3]])[0]
    loss = sum(squared(plain(one.inputs), one.targets)[0] for one in batch) / 20
    loss.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=mesh, loss=squared, dtype=torch.float64)
        result = engine.forward_backward(share(engine, [batch]))
        return result.loss, {name: gradient.clone() for name, gradient in engine.gradients().items()}

    losses, gradients = zip(*run_ranks(rank, mesh.size), strict=True)
    found = {name: gradient for one in gradients for name, gradient in one.items()}
    assert set(found) == set(expected) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert losses[0] == pytest.approx(loss.item(), rel=1e-12)
    assert all(relative_error(found[name], gradient) < 1e-12 for name, gradient in expected.items())


@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_plain_between_batches(fails):
    """Also after a batch that failed."""
    linear, patched, inside = nn.Linear(4, 4), Assigned(), []
    theirs = patched.linear.forward

    def loss(output, targets):
        inside.append("forward" in linear.__dict__)
        if fails:
            raise ValueError("on purpose")
        return squared(output, targets)

    def rank(world):
        engine = Engine([linear, patched, nn.Linear(4, 4)], world, mesh=Mesh(), loss=loss,
                        pipeline=Pipeline(defer_bytes=1 << 20))
        engine.forward_backward([(torch.ones(2, 4), torch.ones(2, 4))])

    with pytest.raises(ValueError, match="on purpose") if fails else nullcontext():
        run_ranks(rank, 1)
    assert inside == [True]
    assert "forward" not in linear.__dict__ and patched.linear.forward is theirs


def test_two_engines_one_after_another_on_the_same_modules():
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), points([[2, 2]])[0]

    def rank(world):
        found = []
        for _ in range(2):  # the first engine is never closed
            engine = Engine(model, world, mesh=Mesh(), loss=squared, dtype=torch.float64)
            engine.forward_backward(batch)
            found.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
        return found

    (first, second), = run_ranks(rank, 1)
    assert all(torch.equal(first[name], second[name]) and first[name].any() for name in first)
