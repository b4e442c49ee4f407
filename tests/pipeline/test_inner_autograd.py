"""Blocks that call autograd inside the stage's backward or in its forward: gradients are plain torch's, and
bit-identical under every policy."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranvier.config.run import Memory, Pipeline
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.tensor import layers
from ranvier.testing.ranks import run_ranks
from tests.covering import covering, quick
from tests.errors import raises
from tests.pipeline.parity import assert_parity, chain, chunks_of, on_mesh, points, share, squared

POLICIES = [Pipeline(policy="message-driven", defer_bytes=1 << 20), Pipeline(policy="1f1b"), Pipeline(policy="gpipe"),
            Pipeline(policy="message-driven", deferred=(9, 9), defer_last=1)]

DEFERRING = [replace(policy, defer_bytes=1 << 20) for policy in POLICIES[:3]]
"""Policies with which a single stage defers products of plain layers, which it does only if the setting says so."""


class FixedPoint(nn.Module):
    """An implicit layer, as in the tutorial of Kolter, Duvenaud and Johnson: a hook solves for the gradient at the
    fixed point z = f(z, x)."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(self, z, x):
        return torch.tanh(0.3 * self.inner(z) + self.outer(x))

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(20):
                z = self.step(z, x)
        z = self.step(z, x)
        start = z.clone().detach().requires_grad_()
        end = self.step(start, x)

        def solve(gradient):
            y = gradient
            for _ in range(20):
                y = torch.autograd.grad(end, start, y, retain_graph=True)[0] + gradient
            return y

        z.register_hook(solve)
        return z


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return module.field(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module.field(x)
        wanted = [one for one in (x, *parameters) if one.requires_grad]
        found = dict(zip(wanted, torch.autograd.grad(y, wanted, gradient), strict=True))
        return None, *(found.get(one) for one in (x, *parameters))


class Adjoint(nn.Module):
    """A function whose backward recomputes the forward, as adjoints of differential equations do."""

    def __init__(self, also=False):
        super().__init__()
        self.linear, self.also = nn.Linear(4, 4), also

    def field(self, x):
        return x + torch.tanh(self.linear(x))

    def forward(self, x):
        y = _Adjoint.apply(self, x, *self.parameters())
        return y + self.linear(x) if self.also else y


class Checkpointed(nn.Module):
    """A layer inside reentrant checkpointing, which runs a backward in its backward; `also` also calls it outside."""

    def __init__(self, also=False):
        super().__init__()
        self.linear, self.also = nn.Linear(4, 4), also

    def forward(self, x):
        before = self.linear(x) if self.also else x
        return before + checkpoint(lambda x: torch.tanh(self.linear(x)), x, use_reentrant=True)


class Carries(nn.Module):
    """Carries a tensor for `Penalised`, and two outputs."""

    def __init__(self, first=False):
        super().__init__()
        self.left, self.right, self.first = nn.Linear(4, 4), nn.Linear(4, 4), first

    def forward(self, state):
        x, y, z = (state, state, state) if self.first else (state["x"], state["y"], state["z"])
        x = self.left(x) if self.first else x
        return {"x": x, "y": torch.tanh(self.left(y) + x), "z": torch.tanh(self.right(z))}


class Penalised(nn.Module):
    """Adds the gradient of one output with respect to an earlier block's output, which crosses block boundaries."""

    def forward(self, state):
        x, y, z = state["x"], state["y"], state["z"]
        return y + z + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]


linear = partial(nn.Linear, 4, 4)
BLOCKS = {"fixed point": FixedPoint, "adjoint": Adjoint, "adjoint and plain": partial(Adjoint, True),
          "checkpoint": Checkpointed, "checkpoint and plain": partial(Checkpointed, True)}


def alike(model, batches, mesh, policies=POLICIES, **options):
    first, *others = (assert_parity(model, batches, mesh, pipeline=policy, **options) for policy in policies)
    for other in others:
        wrong = [name for name, value in first.gradients.items() if not torch.equal(other.gradients[name], value)]
        assert not wrong


@pytest.mark.parametrize(("block", "place"), quick(3, covering(list(BLOCKS), [3, 1])))
def test_autograd_inside_the_backward(block, place):
    """Even if it is the last block of a stage, where a hook of the block runs before any other node."""
    blocks = [linear] * 6
    blocks[place - 1] = BLOCKS[block]
    alike(partial(chain, *blocks), points([[2, 3, 1]] * 2), Mesh(data=2, pipe=2))


def test_on_one_rank():
    model = partial(chain, linear, *BLOCKS.values(), linear)
    alike(model, points([[2, 3]]), Mesh(), DEFERRING)
    alike(model, points([[2, 3]]), Mesh(), POLICIES[1:3])


def test_a_gradient_within_the_forward_that_crosses_blocks():
    """It reaches only some tensors of a block boundary: the stage's own backward has not passed the block."""
    model = partial(chain, linear, partial(Carries, True), Carries, Carries, Penalised, linear)
    alike(model, points([[2, 3, 1]] * 2), Mesh(data=2), DEFERRING, optim=chunks_of(4))


@pytest.mark.parametrize(("mesh", "act"), [
    (Mesh(), lambda layer, x: layer(x.detach()).backward(torch.ones_like(x))),
    (Mesh(row=2), lambda layer, x: layer(x.detach()).backward(torch.ones_like(x))),
    (Mesh(), lambda layer, x: layer.zero_grad()),
], ids=["backward", "backward on rows", "zero_grad"])
def test_a_forward_that_changes_gradients_is_refused(mesh, act):
    """They are divided by the batch's weight later, and contain those of other microbatches."""
    class Acts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = layers.Linear(4, 4, stationary="output")

        def forward(self, x):
            act(self.linear, x)
            return self.linear(x)

    with raises("gradient-changed-in-forward", where="parameter b0.linear.weight"):
        on_mesh(partial(chain, Acts, partial(layers.Linear, 4, 4, stationary="output")), mesh,
                lambda engine: engine.forward_backward(share(engine, points([[4, 4, 4, 4]]))),
                pipeline=Pipeline(policy="message-driven", in_flight=1))


class Slope(nn.Module):
    """Adds the gradient of an energy with respect to its input, or with `own` to a view of the input."""

    def __init__(self, own=False):
        super().__init__()
        self.linear, self.own = nn.Linear(4, 4), own

    def forward(self, x):
        x = x.view_as(x) if self.own else x
        return x - torch.autograd.grad(torch.tanh(self.linear(x)).square().sum(), x, create_graph=True)[0]


HOOK_CUTS = [(Mesh(), None, None), (Mesh(), None, Memory(recompute=3)), (Mesh(pipe=2), (2,), None),
             (Mesh(pipe=2), (3,), None), (Mesh(pipe=4), (1, 2, 3), None), (Mesh(pipe=2), (3,), Memory(recompute=2))]


@pytest.mark.parametrize(("mesh", "boundaries", "memory"), HOOK_CUTS, ids=str)
def test_a_gradient_that_a_block_computes_of_a_tensor_with_another_blocks_hook(mesh, boundaries, memory):
    """In plain torch the hook would run for this gradient, and after a cut it would not: refused for every cut."""
    options = {"pipeline": Pipeline(boundaries=boundaries), "memory": memory}
    with pytest.raises(ModelError) as caught:
        assert_parity(partial(chain, linear, FixedPoint, nn.Identity, Slope), points([[2, 3]]), mesh, **options)
    assert caught.value.where == "the carried state" and "view_as" in caught.value.remedy
    assert_parity(partial(chain, linear, FixedPoint, nn.Identity, partial(Slope, True)), points([[2, 3]]), mesh,
                  **options)


class Around(nn.Module):
    """A block on one tensor of a state that is a tensor, a dict or a tuple."""

    def __init__(self, layer, gives):
        super().__init__()
        self.layer, self.gives = layer(), gives

    def forward(self, state):
        other, x = (state, state) if isinstance(state, torch.Tensor) else (
            state.values() if isinstance(state, dict) else state)
        x = self.layer(x)
        return {"tensor": x, "dict": {"other": other * 1, "x": x}, "tuple": (other * 1, x)}[self.gives]


@pytest.mark.parametrize("gives", ["tensor", "dict", "tuple"])
def test_hooks_are_found_in_any_state(gives):
    """Between two blocks of one stage, where plain tensors without hooks take a shortcut."""
    def model(own):
        kinds = [(linear, gives), (FixedPoint, gives), (nn.Identity, gives), (partial(Slope, own), "tensor")]
        return chain(*(partial(Around, *kind) for kind in kinds))

    with pytest.raises(ModelError) as caught:
        assert_parity(partial(model, False), points([[2, 3]]), Mesh())
    assert "view_as" in caught.value.remedy
    assert_parity(partial(model, True), points([[2, 3]]), Mesh())


class HookedNorm(nn.Module):
    """Puts a hook on the block's output."""

    def __init__(self):
        super().__init__()
        self.norm = layers.LayerNorm(4, dtype=torch.float64)

    def forward(self, x):
        y = self.norm(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y


class SquareSlope(nn.Module):
    def forward(self, x):
        return x - torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


def test_hooks_are_found_on_rows():
    """On a tensor mesh there is no such shortcut."""
    def rank(world):
        engine = Engine([HookedNorm(), SquareSlope()], world, mesh=Mesh(row=2), loss=squared, dtype=torch.float64)
        engine.forward_backward([(torch.ones(1, 2, 4, dtype=torch.float64), torch.zeros(1, 2, 4, dtype=torch.float64))])

    with pytest.raises(ModelError) as caught:
        run_ranks(rank, 2)
    assert caught.value.where == "the carried state" and "view_as" in caught.value.remedy


class SlopeOfLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = layers.Linear(4, 4, stationary="output", dtype=torch.float64)
        self.out = layers.Linear(4, 4, stationary="input", dtype=torch.float64)

    def forward(self, x):
        return x - torch.autograd.grad(self.out(torch.tanh(self.linear(x))).square().sum(), x, create_graph=True)[0]


def test_a_second_derivative_on_rows():
    def rank(world):
        engine = Engine([layers.LayerNorm(4, dtype=torch.float64), SlopeOfLayers()], world, mesh=Mesh(row=2),
                        loss=squared)
        engine.forward_backward([(torch.ones(2, 2, 4, dtype=torch.float64), torch.zeros(2, 2, 4, dtype=torch.float64))])

    with raises("second-derivative-on-rows", where="the backward of microbatch 0"):
        run_ranks(rank, 2)


class Looked(nn.Module):
    """An embedding inside reentrant checkpointing, and outside."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(200, 4)

    def forward(self, ids):
        zero = torch.zeros((), dtype=self.table.weight.dtype, requires_grad=True)
        again = checkpoint(lambda zero: self.table(ids.long().reshape(-1)) + zero, zero, use_reentrant=True)
        return again + self.table(ids.long().reshape(-1).flip(0))


def test_lookups_inside_the_backward():
    batches = points([[2, 3, 1]] * 2, width=1)
    for batch in batches:
        for one in batch:
            one.inputs.copy_(torch.arange(len(one.inputs)).view(-1, 1) * 7 % 200)
    alike(partial(chain, Looked, linear, linear), batches, Mesh(data=2, pipe=2))


class SlopeByInput(nn.Module):
    """Adds the gradient of the value with respect to the first block's input, which the value depends on only through
    earlier stages, or with `uses` also here."""

    def __init__(self, uses, **options):
        super().__init__()
        self.linear, self.uses, self.options = nn.Linear(4, 4), uses, options

    def forward(self, state):
        value = torch.tanh(self.linear(state["y"] + state["x"] if self.uses else state["y"]))
        slope, = torch.autograd.grad(value.sum(), state["x"], create_graph=True, **self.options)
        return value if slope is None else value + slope


@pytest.mark.parametrize(("uses", "option"), [(True, {}), (False, {}), (False, {"allow_unused": True}),
                                              (False, {"materialize_grads": True})], ids=repr)
def test_a_gradient_across_stages(uses, option):
    model = partial(chain, partial(Carries, True), partial(SlopeByInput, uses, **option))
    assert_parity(model, points([[2, 3]]), Mesh())
    with raises("partial-gradient", "boundaries"):
        assert_parity(model, points([[2, 3]]), Mesh(pipe=2))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return {"from": x, "value": layers.Dropout(0.5)(torch.tanh(self.linear(x)))}


class SlopeThenDropout(nn.Module):
    """Drops elements after a gradient through the previous blocks, which recomputation runs again for it."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), layers.Dropout(0.5)

    def forward(self, state):
        value = self.dropout(state["value"])
        slope, = torch.autograd.grad(value.sum(), state["from"], create_graph=True)
        return self.dropout(torch.tanh(self.linear(value + slope)))


def test_recomputed_for_a_gradient_in_a_later_forward():
    """A block runs again during another block's forward, whose random numbers continue as before."""
    linear = partial(nn.Linear, 4, 4)
    assert_parity(partial(chain, linear, linear, Noisy, SlopeThenDropout), points([[3, 2]]), Mesh(),
                  memory=Memory(recompute="alternate"))
