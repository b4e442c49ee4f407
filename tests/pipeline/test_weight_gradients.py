"""The queue of deferred products: their order, what they keep alive, and what remains after a failure."""

from functools import partial

import pytest
import torch
from torch import nn

from ranvier.config.run import Pipeline
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.schedule.schedule import Product
from ranvier.tensor.deferred_linear import DeferringForwards
from ranvier.tensor.layers import ReplicatedLinear
from ranvier.tensor.weight_gradients import WeightGradients, root_of
from ranvier.testing.ranks import run_ranks
from tests.errors import raises
from tests.pipeline.parity import assert_parity, chain, on_mesh, points, share, squared


class Log:
    """A queue of one block's products, and what it reports."""

    def __init__(self, block, others=(), after=lambda action: action()):
        self.names = {parameter: name for name, parameter in block.named_parameters()}
        self.said = []
        self.queue = WeightGradients(self.queued, lambda chunks: self.said.append(("added", chunks)), after=after)
        self.forwards = DeferringForwards([block], others, self.queue)
        self.forwards.install()

    def queued(self, parameters):
        names = [self.names[parameter] for parameter in parameters]
        self.said.append(("queued", *names))
        return list(map(len, names))

    def backward(self, loss, microbatch=0, *, defer=True):
        return self.queue.backward_pass(microbatch, [root_of(loss)], [torch.ones_like(loss)], defer)


def linear_pair():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False)).double()


def gradients(block):
    return {name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in
            block.named_parameters()}


def test_deferred_products_are_those_of_autograd():
    x, plain, block = torch.randn(4, 3, dtype=torch.float64), linear_pair(), linear_pair()
    log = Log(block)
    plain(x).square().sum().backward()
    loss = block(x).square().sum()
    products = log.backward(loss, 7)
    assert gradients(block) == {"0.weight": None, "0.bias": None, "1.weight": None}
    assert len(log.queue) == 2
    assert log.said == [("queued", "1.weight"), ("queued", "0.weight", "0.bias")]
    for number in range(len(products)):
        log.queue.run(7, number)
    assert log.said[2:] == [("added", [len("1.weight")]), ("added", [len("0.weight"), len("0.bias")])]
    assert len(log.queue) == 0
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(gradients(block)[name], expected, rtol=1e-14, atol=0)


def test_nothing_is_queued_where_nothing_is_deferred():
    log = Log(block := linear_pair())
    assert log.backward(block(torch.ones(1, 3).double()).sum(), defer=False) == []
    assert log.said == [] and len(log.queue) == 0
    assert all(gradient is not None for gradient in gradients(block).values())


def test_sums_do_not_depend_on_when_products_run():
    """Two microbatches, products run in between or afterwards: sums are bit-identical."""
    torch.manual_seed(1)
    inputs, found = torch.randn(2, 4, 3, dtype=torch.float64), []
    for order in ["at once", "each", "after"]:
        log = Log(block := linear_pair())
        for number, x in enumerate(inputs):
            products = log.backward(block(x).square().sum(), number, defer=order != "at once")
            if order == "each":
                for product in range(len(products)):
                    log.queue.run(number, product)
        if order == "after":
            for number, product in [(0, 1), (1, 1), (0, 0), (1, 0)]:
                log.queue.run(number, product)
        found.append(gradients(block))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_what_products_free():
    """The first layer's input is 4 x 3, its output's gradient and the second's input 4 x 5, the last gradient 4 x 2."""
    log = Log(block := linear_pair())
    x = torch.randn(4, 3, dtype=torch.float64)
    products = log.backward(block(x).square().sum())
    assert products == [Product((4 * 5 + 4 * 2) * 8, len("1.weight")), Product((4 * 3 + 4 * 5) * 8, len("0.bias"))]
    assert log.queue.forward_bytes == sum(product.alive_bytes for product in products)


def test_small_products_of_a_chunk_run_together_on_a_stage_of_one_rank():
    torch.manual_seed(0)
    x, narrow = torch.randn(64, 8), partial(nn.Linear, 8, 8)
    log = Log(block := nn.Sequential(narrow(), narrow(bias=False), narrow(bias=False), nn.Linear(8, 600, bias=False)),
              after=None)
    products = log.backward(block(x).square().sum())
    assert products == [Product(64 * 608 * 4, 8), Product(2 * 64 * 16 * 4, 8), Product(64 * 16 * 4, 6)]
    for number in range(len(products)):
        log.queue.run(0, number)
    assert log.said[4:] == [("added", [8]), ("added", [8]), ("added", [8]), ("added", [8, 6])]
    found = gradients(block)
    block.zero_grad()
    log.forwards.remove()
    block(x).square().sum().backward()
    for name, expected in gradients(block).items():
        torch.testing.assert_close(found[name], expected)


def test_what_is_shared_is_freed_by_the_last_that_holds_it():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.left(x) + self.right(x)  # one input, and one gradient of both outputs

    log = Log(block := Shared().double())
    x = torch.randn(4, 3, dtype=torch.float64)
    first, second = log.backward(block(x).square().sum())
    assert first.alive_bytes == 0 and second.alive_bytes == (4 * 3 + 4 * 2) * 8


def test_a_part_of_something_larger_is_copied():
    log, large = Log(block := linear_pair()), torch.randn(1000, 3, dtype=torch.float64)
    log.backward(block(large[:4]).square().sum())
    assert all(tensor.untyped_storage().data_ptr() != large.untyped_storage().data_ptr()
               for product in log.queue._waiting.values() for operands in product for tensor in operands.tensors)


def test_an_operand_that_is_written_again_is_refused():
    block, x = linear_pair(), torch.randn(4, 3, dtype=torch.float64)
    log = Log(block)
    log.backward(block(x).square().sum())
    x.add_(1.0)
    log.queue.run(0, 0)
    with raises("waiting-operand-changed", "(5, 3)"):
        log.queue.run(0, 1)


def test_a_frozen_bias_or_weight():
    block = linear_pair()
    log = Log(block)
    block[0].bias.requires_grad_(False)
    block[1].weight.requires_grad_(False)
    products = log.backward(block(torch.ones(1, 3).double()).sum())
    assert [word for word, _ in log.said] == ["queued"] and len(products) == 1
    log.queue.run(0, 0)
    assert {name for name, gradient in gradients(block).items() if gradient is not None} == {"0.weight"}


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, switch):
        ctx.switch = switch
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.switch:
            raise ValueError("broken")
        return gradient, None


def test_a_backward_that_breaks_leaves_nothing_behind():
    log = Log(block := linear_pair())
    x, switch = torch.ones(1, 3).double(), [True]
    loss = block[1](Breaks.apply(block[0](x), switch)).sum()
    with pytest.raises(ValueError, match="broken"):
        log.backward(loss, 0)
    assert not log.queue.in_pass()
    log.queue.clear()
    assert len(log.queue) == 0
    switch.clear()
    products = log.backward(block[1](Breaks.apply(block[0](x), switch)).sum())
    assert len(products) == 2 and len(log.queue) == 2


def test_a_batch_that_broke_leaves_nothing_stored_and_an_engine_that_refuses_more():
    """It fails in the backward of microbatch 1, while the products of microbatch 0 are queued."""
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return Breaks.apply(torch.tanh(self.linear(x)), len(x) == 3)

    def rank(world):
        engine = Engine([Block(), Block(), Block()], world, mesh=Mesh(), loss=squared, dtype=torch.float64,
                        pipeline=Pipeline(defer_bytes=1 << 30))
        stages, waited = engine._stages, []
        clear = stages.clear

        def clearing():
            waited.append(len(stages.first._weights))
            clear()

        stages.clear = clearing
        engine.forward_backward(points([[2, 2, 2]])[0])
        with pytest.raises(ValueError, match="broken"):
            engine.forward_backward(points([[2, 3, 2]])[0])
        assert waited == [3] and len(stages.first._weights) == 0 and not stages.first._graphs
        with pytest.raises(RanvierError) as caught:
            engine.forward_backward(points([[2, 2, 2]])[0])
        assert caught.value.where == "Engine.forward_backward" and "ValueError: broken" in caught.value.what
        engine.close()

    run_ranks(rank, 1)


def test_which_layers_are_taken():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    patched = nn.Linear(3, 3)
    patched.forward = lambda x: x
    tied = nn.Linear(3, 3)
    outside = nn.Linear(3, 3)
    outside.weight = tied.weight
    both = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    both[1].weight = both[0].weight
    block = nn.ModuleList([nn.Linear(3, 3), Own(3, 3), patched, nn.Bilinear(3, 3, 3), tied, *both])
    log = Log(block, others=[outside])
    taken = [number for number, module in enumerate(block) if type(module.__dict__.get("forward")).__name__ ==
             "_DeferrableForward"]
    assert taken == [0, 5, 6]
    log.forwards.remove()
    assert ["forward" in module.__dict__ for module in block] == [False, False, True, False, False, False, False]


def test_what_a_block_computes_inside_the_backward_is_not_queued():
    """A hook on the loss, the first that autograd calls, calls autograd inside; its layer's product is not deferred."""
    log = Log(block := linear_pair())
    x, seen = torch.ones(1, 3, dtype=torch.float64), []
    inner = block(x).sum()
    loss = block(x).sum()

    loss.register_hook(lambda gradient: seen.append(torch.autograd.grad(inner, block[0].weight)[0]))
    expected = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    assert [len(log.backward(loss)), len(log.queue)] == [0, 0]
    for name, gradient in zip(gradients(block), expected, strict=True):
        torch.testing.assert_close(gradients(block)[name], gradient)
    torch.testing.assert_close(seen[0], expected[0])


def patched(engine):
    """Names of linear layers that have a forward of Ranvier's during a batch."""
    seen, names = set(), {module: f"{block}.{name}" for block, whole in engine.blocks.items()
                          for name, module in whole.named_modules() if isinstance(module, nn.Linear)}
    for module in engine.blocks.values():
        module.register_forward_pre_hook(
            lambda *call: seen.update(name for module, name in names.items() if "forward" in module.__dict__))
    engine.forward_backward(share(engine, points([[2, 1]])))
    return seen


@pytest.mark.parametrize(("mesh", "pipeline", "plain"), [
    (Mesh(), Pipeline(), False), (Mesh(), Pipeline(stages_per_rank=2), False),
    (Mesh(), Pipeline(defer_bytes=0), False), (Mesh(), Pipeline(deferred=(0,), defer_last=1), False),
    (Mesh(), Pipeline(defer_bytes=1 << 20), True), (Mesh(), Pipeline(deferred=(1,), defer_last=1), True),
    (Mesh(pipe=2), Pipeline(), True), (Mesh(pipe=2), Pipeline(policy="1f1b"), True)], ids=str)
def test_plain_layers_stay_as_they_are_where_nothing_may_wait(mesh, pipeline, plain):
    """On one stage nothing is deferred unless the caller asks for it; Ranvier's own layers add as they do elsewhere."""
    model = partial(chain, partial(nn.Linear, 4, 4), partial(ReplicatedLinear, 4, 4), partial(nn.Linear, 4, 4))
    found = set().union(*on_mesh(model, mesh, patched, pipeline=pipeline))
    assert found == ({"b0.", "b1.", "b2."} if plain else {"b1."})
    assert_parity(model, points([[2, 1]]), mesh, pipeline=pipeline)
