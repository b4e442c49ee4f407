"""What blocks may do on one rank they may do wherever the model is cut, with the same gradients."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ranvier.block import as_named_tensors, from_named_tensors
from ranvier.config.run import Memory, Pipeline
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.testing.reference import Reference
from tests.covering import first
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_close, assert_parity, chain, gradients_on, on_mesh, points

CUTS = [(Mesh(), {}), (Mesh(pipe=2), {}), (Mesh(pipe=3), {}),
        (Mesh(pipe=2), {"pipeline": Pipeline(stages_per_rank=2)}), (Mesh(data=2, pipe=2), {})]


class Part(nn.Module):
    def __init__(self, run, trains=True):
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(trains)
        self._run = run

    def forward(self, state):
        return self._run(self.linear, state)


def straight(linear, x):
    return linear(x)


def added(linear, x):
    return linear(x.add_(1.0))


def relu(linear, x):
    return linear(nn.functional.relu(x, inplace=True))


def on_a_view(linear, x):
    x[:, 1:].mul_(3.0)
    return linear(x)


def in_a_dict(linear, state):
    return linear(state["hidden"].mul_(state["factor"])) + state["side"]


def makes_a_dict(linear, x):
    return {"hidden": linear(x), "factor": torch.arange(4.0, dtype=x.dtype).expand_as(x), "side": torch.sin(linear(x))}


def pair(linear, x):
    return linear(x), torch.sin(x)


def of_pair(linear, state):
    first, second = state
    assert type(state) is tuple
    return linear(first) * second


def nested(linear, x):
    y = linear(x)
    return [y, None, {"shape": y.shape, "pair": (torch.sin(y), len(y)), 3: True}, y.dtype, y.device]


def of_nested(linear, state):
    y, nothing, inner, dtype, device = state
    assert type(state) is list and nothing is None and inner["shape"] == y.shape and inner["pair"][1] == len(y)
    assert inner[3] is True and dtype is y.dtype and device == y.device
    return linear(y) + inner["pair"][0]


def waves(linear, x):
    return torch.fft.fft(linear(x))


def of_waves(linear, z):
    return linear((z * z.conj()).real + torch.fft.ifft(z).real)


def alias(linear, x):
    y = linear(x)
    return {"hidden": y, "residual": y}


def views(linear, x):
    """Views of one memory without common elements."""
    y = linear(torch.cat([x, x]))
    return {"hidden": y[:len(x)], "residual": y[len(x):]}


def changes_hidden(linear, state):
    return linear(state["hidden"].add_(1.0)) + state["residual"]


def passes_on(linear, state):
    return {**state, "other": linear(state["residual"])}


CHAINS = {"in place": (straight, added), "in-place relu": (straight, relu), "in place on a view": (straight, on_a_view),
          "in place of a view": (views, changes_hidden), "in place in a dict": (makes_a_dict, in_a_dict),
          "tuple": (pair, of_pair), "nested": (nested, of_nested), "complex": (waves, of_waves)}


@pytest.mark.parametrize("mesh, options", first(CUTS[2:4], CUTS), ids=str)
@pytest.mark.parametrize("kind", CHAINS)
def test_gradients_are_those_of_one_process(kind, mesh, options):
    parts = (straight, *CHAINS[kind], straight)
    make = partial(chain, *[partial(Part, run) for run in parts])
    assert_parity(make, points([[2, 3, 1]] * mesh.data), mesh, **options)


@pytest.mark.parametrize("kind", ["tuple", "nested", "complex"])
def test_recomputed_too(kind):
    parts = (*CHAINS[kind], straight)
    assert_parity(partial(chain, *[partial(Part, run) for run in parts]), points([[2, 3]]), Mesh(pipe=2),
                  memory=Memory(recompute=1))


@pytest.mark.parametrize("mesh, options", CUTS[:4], ids=str)
def test_what_shares_memory_is_not_changed_in_place(mesh, options):
    def make(*runs):
        return chain(*[partial(Part, run) for run in runs])

    for runs in ((straight, alias, changes_hidden, straight), (alias, passes_on, changes_hidden, straight)):
        with pytest.raises(ModelError) as refused:
            gradients_on(partial(make, *runs), points([[2, 3]]), mesh, **options)
        assert refused.value.where == 'tensor "hidden" of the carried state'


def slope(linear, x):
    """A gradient inside the forward, as of an energy."""
    x = x.detach().requires_grad_()
    found, = torch.autograd.grad(torch.tanh(linear(x)).sum(), x)
    return found


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2), Mesh(pipe=3)], ids=str)
def test_a_gradient_inside_of_a_frozen_block(mesh):
    def make():
        return chain(partial(Part, slope, False), partial(Part, straight, False), partial(Part, straight))

    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    batches = points([[2, 3]])
    reference.forward_backward(batches[0])
    assert_close(gradients_on(make, batches, mesh).gradients, reference.gradients())


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_a_complex_parameter_that_trains_is_refused(mesh):
    class Filter(nn.Module):
        def __init__(self, trains):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=trains)

        def forward(self, x):
            return torch.fft.ifft(torch.fft.fft(x) * self.weight).real

    with pytest.raises(ModelError) as refused:
        gradients_on(lambda: chain(partial(nn.Linear, 4, 4), partial(Filter, True)), points([[2]]), mesh)
    assert refused.value.where == "parameter b1.weight" and refused.value.value is torch.complex64
    frozen = replace(chain(partial(nn.Linear, 4, 4), partial(Filter, False)), initial=None)
    gradients_on(lambda: frozen, points([[2]]), mesh)


class Doubled(torch.Tensor):
    """A tensor subclass with an operation of its own."""

    def twice(self):
        return 2 * self


def of_a_class(linear, x):
    return linear(x).as_subclass(Doubled)


def of_doubled(linear, x):
    return linear(x.twice()).as_subclass(torch.Tensor)


def test_a_class_of_tensors_does_not_cross_a_cut():
    make, batches = partial(chain, partial(Part, straight), partial(Part, of_a_class), partial(Part, of_doubled),
                            partial(Part, straight)), points([[2, 3]])
    for boundary in (1, 3):
        assert_parity(make, batches, Mesh(pipe=2), pipeline=Pipeline(boundaries=(boundary,)))
    with raises("tensor-subclass-sent", "b1", value="Doubled"):
        gradients_on(make, batches, Mesh(pipe=2), pipeline=Pipeline(boundaries=(2,)))


@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_a_microbatch_that_wants_a_gradient_is_refused(what):
    """It would get no gradient, or that of another loss; an evaluation has no gradients to give."""
    def work(engine):
        one, = points([[2]])[0]
        wants = replace(one, **{what: getattr(one, what) * torch.ones((), requires_grad=True)})
        engine.evaluate([wants])
        with raises("microbatch-wants-gradient", where=f"{what} of microbatch 1"):
            engine.forward_backward([one, wants])
        engine.forward_backward([one])

    on_mesh(partial(chain, partial(Part, straight), partial(Part, straight)), Mesh(pipe=2), work)


def test_names_of_a_state_are_its_own():
    x = torch.ones(2, 3)
    for state in (x, {"a": x, "b": x}, (x, None), {"|a": x}, {3: x, "b": [x, x.shape]}):
        found = from_named_tensors(as_named_tensors(state, "here"))
        assert type(found) is type(state) and str(found) == str(state)
