"""Only plain containers are taken apart, so nothing that a container itself has is lost silently."""

import copy

import pytest
import torch
from torch import nn

from ranvier.block import as_model, contents_besides_modules
from ranvier.errors import ModelError, RanvierError
from ranvier.mesh import Mesh
from ranvier.models.blocks_of import blocks_of
from ranvier.models.from_transformers import from_transformers
from ranvier.pipeline.engine import Engine
from ranvier.testing.blocks import check_blocks
from ranvier.testing.ranks import run_ranks
from ranvier.testing.split import check_split
from tests.errors import raises
from tests.pipeline.parity import squared


class Scaled(nn.Sequential):
    """A sequence with its own parameter and forward."""

    def __init__(self, width=4):
        super().__init__(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.scale = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, x):
        return super().forward(x) * self.scale


class Residual(nn.ModuleList):
    def forward(self, x):
        for module in self:
            x = x + module(x)
        return x


class Named(nn.ModuleDict):
    def forward(self, x):
        return self["last"](torch.tanh(self["first"](x)))


def linears(count=2):
    return [nn.Linear(4, 4) for _ in range(count)]


def hooked(kind):
    model = nn.Sequential(*linears())
    getattr(model, f"register_{kind}")(lambda *_: None)
    return model


def with_buffer():
    model = nn.Sequential(*linears())
    model.register_buffer("scale", torch.ones(1))
    return model


def with_forward():
    model = nn.ModuleList(linears())
    model.forward = lambda x: model[1](model[0](x))
    return model


OWN = {
    "subclass": (Scaled, ["the class Scaled", "the parameter scale"]),
    "list": (lambda: Residual(linears()), ["the class Residual"]),
    "dict": (lambda: Named(dict(zip(("first", "last"), linears(), strict=True))), ["the class Named"]),
    "buffer": (with_buffer, ["the buffer scale"]),
    "forward": (with_forward, ["a forward"]),
    "forward hook": (lambda: hooked("forward_hook"), ["forward hooks"]),
    "forward pre-hook": (lambda: hooked("forward_pre_hook"), ["forward pre hooks"]),
    "backward hook": (lambda: hooked("full_backward_hook"), ["backward hooks"]),
    "backward pre-hook": (lambda: hooked("full_backward_pre_hook"), ["backward pre hooks"]),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_container_with_something_of_its_own_is_refused(kind):
    make, own = OWN[kind]
    assert contents_besides_modules(make()) == own
    with raises("model-holds-more-than-modules", *own, "ranvier.blocks_of", where="model", value=type(make()).__name__):
        as_model(make(), squared)


@pytest.mark.parametrize("make", [nn.Sequential, lambda *modules: nn.ModuleList(modules),
                                  lambda *modules: nn.ModuleDict({str(i): one for i, one in enumerate(modules)})])
def test_plain_containers_are_taken_apart(make):
    first, second = linears()
    model = make(first, second, first) if make is nn.Sequential else make(first, second)
    assert [build() for build in as_model(model, squared).blocks.values()] == list(model._modules.values())


@pytest.mark.parametrize("make", [Scaled, OWN["list"][0], OWN["dict"][0]])
def test_blocks_of_takes_them(make):
    model = make()
    blocks = blocks_of(model)
    assert len(blocks) == 2 and check_blocks(model, blocks, torch.randn(3, 4)) < 1e-12


def test_gradients_of_a_subclass_on_two_stages():
    torch.manual_seed(0)
    model = Scaled().double()
    x, y = torch.randn(2, 3, 4, dtype=torch.float64)
    copies = [copy.deepcopy(model) for _ in range(2)]
    (squared(model(x), y)[0] / 12).backward()
    expected = {name.rpartition(".")[2] + name[0]: one.grad for name, one in model.named_parameters()}

    def rank(world):
        engine = Engine(blocks_of(copies[world.rank]), world, mesh=Mesh(pipe=2), loss=squared, dtype=torch.float64)
        engine.forward_backward([(x, y)])
        found = {name.rpartition(".")[2] + name.split(".")[1][0]: one.clone()
                 for name, one in engine.gradients().items()}
        engine.close()
        return found

    first, second = run_ranks(rank, 2)
    for name, gradient in (first | second).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=0)
    assert len(first | second) == len(expected)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inner(x))


def test_a_container_inside_of_a_module_is_one_block_where_it_has_something_of_its_own():
    assert list(blocks_of(Around(Scaled()))) == ["inner", "last"]
    assert list(blocks_of(Around(hooked("full_backward_hook")))) == ["inner", "last"]
    assert list(blocks_of(Around(nn.Sequential(*linears())))) == ["inner.0", "inner.1", "last"]
    assert list(blocks_of(Around(Residual(linears())), cut=["inner", "last"])) == ["inner", "last"]


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook", "forward_hook", "forward_pre_hook"])
def test_hooks_on_code_that_is_traced_are_refused(kind):
    for model, where in ((Around(hooked(kind)), "inner"), (hooked(kind), "Sequential")):
        with pytest.raises(ModelError) as refused:
            blocks_of(model, cut=["inner.0", "inner.1"] if where == "inner" else ["0", "1"])
        assert refused.value.where == where


@pytest.mark.parametrize("path", ["", "model"])
def test_hooks_around_the_layers_of_a_transformers_model_are_refused(path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=8, intermediate_size=8, num_attention_heads=2,
                                      vocab_size=11, max_position_embeddings=8)
    model = transformers.LlamaForCausalLM(config)
    from_transformers(model)
    model.get_submodule(path).register_full_backward_hook(lambda *_: None)
    with raises("model-with-hooks", where=path or "LlamaForCausalLM"):
        from_transformers(model)


def test_check_split_runs_a_subclass_as_a_whole():
    """If it were taken apart, it would be compared without its parameter, and agree."""
    with pytest.raises(RanvierError) as refused:
        check_split(Scaled(), torch.randn(2, 3, 4), meshes=((1, 2),))
    assert "block.scale" in str(refused.value)


def test_ranks_that_are_threads_trace_at_once():
    """torch.fx patches the call of every module while it traces, which must not affect other ranks."""
    def rank(world):
        for _ in range(8):
            model = Scaled()
            blocks_of(model)
            assert isinstance(model(torch.ones(2, 4)), torch.Tensor)

    run_ranks(rank, 3)
