"""Modules cut into blocks have the module's outputs and raw gradients of plain PyTorch on every mesh."""

import copy
import enum
import gc
import logging
import operator
import random
import sys
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ranvier.block import as_model
from ranvier.mesh import Mesh
from ranvier.models import forward_trace
from ranvier.models.blocks_of import blocks_of
from ranvier.originals.read_attributes import variables_of
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing import check_blocks
from ranvier.testing.ranks import run_ranks
from tests.covering import covering, quick
from tests.errors import raises
from tests.pipeline.parity import assert_close, gradients_on

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "whole_modules"))

MESHES = [Mesh(), Mesh(pipe=2), Mesh(pipe=4), Mesh(data=2, pipe=2)]


def summed(outputs, targets):
    """The loss used by all examples."""
    return functional.cross_entropy(outputs, targets, reduction="sum"), targets.numel()


def plain_gradients(module, batches, loss):
    """Gradients of plain PyTorch, by their names in the module."""
    module.train().zero_grad()
    total, weight = 0.0, 0.0
    for one in (one for replica in batches for one in replica):
        part, count = loss(module(**one.inputs) if isinstance(one.inputs, dict) else module(one.inputs), one.targets)
        total, weight = total + part, weight + count
    (total / weight).backward()
    return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in module.named_parameters()}


def assert_gradients(module, blocks, batches, mesh, loss=summed):
    """Check that the blocks have the module's gradients on `mesh`."""
    expected = plain_gradients(copy.deepcopy(module), batches, loss)
    made = gradients_on(lambda: as_model(copy.deepcopy(blocks), loss), batches, mesh).gradients
    names = {id(one): name for name, one in module.named_parameters()}
    found = {}
    for block, part in blocks.items():
        for name, one in part.named_parameters():
            if f"{block}.{name}" in made:  # the owner, if several blocks share it
                found[names[id(one)]] = made[f"{block}.{name}"]
    assert_close(found, expected)


def batches_of(example, mesh):
    """Two microbatches of unequal size for each replica, with its own samples."""
    def one(seed, count):
        inputs, targets = example.batch(seed)
        return Microbatch(inputs[:count].double() if inputs.is_floating_point() else inputs[:count], targets[:count])

    return [[one(2 * replica, 5), one(2 * replica + 1, 3)] for replica in range(mesh.data)]


EXAMPLES = {
    "resnet": (["layer2", "layer3.*", "fc"], "auto"),
    "nanogpt": (["transformer.h.*", "lm_head"], "auto"),
    "lstm": ("auto",),
    "unet": (["down2", "middle", "up2", "up1"], "auto"),
}


@pytest.mark.parametrize(("name", "cut", "mesh"), quick(4, covering(
    [(name, cut) for name, cuts in EXAMPLES.items() for cut in cuts], [MESHES[at] for at in (3, 1, 2, 0)])), ids=str)
def test_gradients_of_whole_modules(name, cut, mesh):
    example = __import__(name)
    torch.manual_seed(0)
    module = example.build().double()
    for one in module.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0  # each process would draw from its own generator
    assert_gradients(module, blocks_of(module, cut), batches_of(example, mesh), mesh)


@pytest.mark.parametrize(("name", "training"), covering(list(EXAMPLES), [True, False]))
def test_blocks_equal_the_module_with_dropout_and_buffers(name, training):
    example = __import__(name)
    module = example.build()
    before = copy.deepcopy(module.state_dict())
    for cut in EXAMPLES[name]:
        check_blocks(module, blocks_of(module, cut), example.batch(0)[0], training=training)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_names_of_blocks_and_parameters():
    module = __import__("resnet").build()
    blocks = blocks_of(module, ["layer2", "layer?.0.conv2", "fc"])
    assert list(blocks) == ["conv1", "layer1.0.conv2", "layer2", "layer2.0.conv2", "layer3.0.conv2", "layer4.0.conv2",
                            "fc"]
    assert {name for name, _ in blocks["layer2.0.conv2"].named_parameters()} == {
        "layer2.0.conv2.weight", "layer2.0.bn2.weight", "layer2.0.bn2.bias", "layer3.0.conv1.weight",
        "layer3.0.bn1.weight", "layer3.0.bn1.bias", "layer3.0.downsample.0.weight", "layer3.0.downsample.1.weight",
        "layer3.0.downsample.1.bias"}
    assert dict(blocks["fc"].named_parameters())["fc.weight"] is module.fc.weight


# --- values between blocks -------------------------------------------------------------------------------------------


class Many(nn.Module):
    """Returns every kind of value that can be sent."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return {"pair": (y, [y + 1, None]), "size": y.shape[1:], "number": len(y), "flag": True, "dtype": y.dtype,
                "device": y.device, "mask": y > 0}


class User(nn.Module):
    def forward(self, found):
        first, (second, nothing) = found["pair"]
        assert nothing is None and found["flag"] is True and found["dtype"] is first.dtype
        assert type(found["size"]) is torch.Size and found["device"] == first.device and found["number"] == len(first)
        return (first * found["mask"] + second).reshape(found["number"], *found["size"])


class Carrying(nn.Module):
    """Its second block passes on values that it does not use, and a size that the third block uses too."""

    def __init__(self):
        super().__init__()
        self.many, self.middle, self.user, self.last = Many(), nn.Linear(4, 4), User(), nn.Linear(4, 4)

    def forward(self, x):
        batch, width = x.shape
        found = self.many(x)
        y = self.middle(x)
        return self.last(self.user(found) + y).view(batch, width)


def vectors(mesh, count=3):
    generator = torch.Generator().manual_seed(0)
    return [[Microbatch(torch.randn(count - number, 4, generator=generator, dtype=torch.float64),
                        torch.randint(0, 4, (count - number,), generator=generator)) for number in range(2)]
            for _ in range(mesh.data)]


@pytest.mark.parametrize("mesh", [Mesh(pipe=3), Mesh(data=2, pipe=2)], ids=str)
def test_all_kinds_of_values_are_sent(mesh):
    module = Carrying().double()
    assert_gradients(module, blocks_of(module, ["middle", "last"]), vectors(mesh), mesh)


class Own(nn.Module):
    """Parameters and buffers of the module itself that several blocks use; a submodule that is called twice; an unused
    parameter; random numbers, and dropout that depends on the mode."""

    def __init__(self):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2))
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("constant", torch.randn(4), persistent=False)
        self.plain = torch.tensor(2.0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input, noise=0.0, filter=None):  # torch.fx renames values that are named like Python's builtins
        x = self.b(self.a(input) * self.scale + self.constant) * self.plain + self.shift
        if self.training:
            x = x + noise * torch.rand(4)
        x = functional.dropout(self.c(x), 0.0, self.training) * self.scale[:4] + self.constant * self.shift
        x = self.b(x.tanh())
        return x if filter is None else x * filter


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2), Mesh(data=2, pipe=2)], ids=str)
def test_what_belongs_to_the_module_itself(mesh):
    module = Own().double()
    module.plain = module.plain.double()
    blocks = blocks_of(module, ["c"])
    assert list(blocks) == ["a", "c"] and "unused" in dict(blocks["c"].named_parameters())
    assert_gradients(module, blocks, vectors(mesh), mesh)


@pytest.mark.parametrize("training", [True, False])
def test_inputs_modes_and_random_numbers(training):
    module = Own()
    x, mask = torch.randn(3, 4), torch.rand(3, 4)
    blocks = blocks_of(module, ["c"], inputs=["input", "noise", "filter"])
    check_blocks(module, blocks, {"input": x, "noise": torch.tensor(0.5), "filter": mask}, training=training)
    with raises("block-given-one-tensor"):
        blocks["a"](x)
    with raises("input-missing", "input filter of", "noise"):
        blocks["a"]({"input": x, "noise": mask})
    assert list(blocks_of(module)) == ["a", "c"], "b is called twice, so no block begins there"


class Masked(nn.Module):
    """A mask of the input's size, made in the forward."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.layers = mask, nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        mask = self.mask(x.shape[1])
        for layer in self.layers:
            x = mask.to(x.dtype) @ layer(x)
        return x


@pytest.mark.parametrize("mask", [
    lambda size: torch.triu(torch.ones(size, size, dtype=torch.bool), 1),
    lambda size: torch.zeros(size, size).index_fill(1, torch.tensor([2]), 1.0) > 0,
    lambda size: torch.empty(size, size).fill_(1.0) > 0,
    lambda size: torch.rand(size, size) > 0.5,
    lambda size: torch.randn(size, size) > 0.5,
], ids=["ones", "zeros", "empty", "rand", "randn"])
def test_sizes_of_the_input_given_number_by_number(mask):
    module, before = Masked(mask), {name: getattr(torch, name) for name in ("ones", "zeros", "empty", "rand", "randn")}
    blocks = blocks_of(module, ["layers.*"])
    assert all(getattr(torch, name) is one for name, one in before.items())
    for size in (4, 5):
        check_blocks(module, blocks, torch.rand(2, size, 6))


def test_a_check_that_fails_names_the_tensor():
    module = Own()
    blocks = blocks_of(module, ["c"])
    blocks["a"].a = nn.Linear(4, 4)
    with raises("blocks-differ"):
        check_blocks(module, blocks, torch.randn(3, 4))
    other = blocks_of(module, ["c"], output=lambda found: {"y": found})
    with raises("blocks-return-others"):
        check_blocks(module, other, torch.randn(3, 4))


def test_a_hugging_face_model_is_cut_at_its_layers():
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2))
    blocks = blocks_of(model)
    assert list(blocks) == ["embedding", "layer0", "layer1", "head"]
    check_blocks(model, blocks, {"input_ids": torch.randint(0, 31, (2, 5))}, output=lambda found: found.logits,
                 training=False)
    with raises("cut-hugging-face-model"):
        blocks_of(model, ["transformer.h.1"])


# --- what cannot be cut ----------------------------------------------------------------------------------------------


class Forward(nn.Module):
    """Two linear layers, with the test's code around them."""

    def __init__(self, run):
        super().__init__()
        self.a, self.b, self.run = nn.Linear(4, 4), nn.Linear(4, 4), run

    def forward(self, x, other=None):
        return self.run(self, x)


def branches(m, x):
    x = m.a(x)
    if x.sum() > 0:
        x = -x
    return m.b(x)


def raises_where_both(m, x):
    if x.shape[0] > 4 and x.shape[1] > 4:
        raise ValueError("too large")
    return m.b(m.a(x))


def asks_type(m, x):
    return m.b(x if isinstance(m.a(x), torch.Tensor) else -x)


def loops(m, x):
    for row in m.a(x):
        x = m.b(row)
    return x


def counts(m, x):
    for step in range(x.shape[1]):
        x = x + step
    return m.b(m.a(x))


def measures(m, x):
    return m.b(m.a(x) * len(x))


def no_grad(m, x):
    with torch.no_grad():
        x = x * 2
    return m.b(m.a(x))


def autocasts(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.b(m.a(x) * 2)


def reads(m, x):
    return m.b(m.a(x) * float(x.sum()))


def stores(m, x):
    m.state = m.a(x)
    return m.b(m.state)


def counts_calls(m, x):
    m.calls += 1
    return m.b(m.a(x)) * m.calls


def keeps(m, x):
    m.kept.append(m.a(x).mean())
    return m.b(x)


def replaces_a_buffer(m, x):
    m.mean = m.mean * 0.9 + m.a(x).detach().mean(0)
    return m.b(x - m.mean)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_that_python_draws_are_refused(draw):
    """A layer that is skipped at random would be skipped always or never."""
    with raises("forward-draws-numbers", where="forward of Forward"):
        blocks_of(Forward(lambda m, x: m.b(m.a(x) * (draw() < 0.5))), ["b"])


@pytest.mark.parametrize(("run", "attribute"), [(stores, "state"), (counts_calls, "calls"), (keeps, "kept"),
                                                (replaces_a_buffer, "mean")])
def test_code_that_changes_attributes_is_named(run, attribute):
    """A number would be a constant of the graph, and a stored value would exist on one stage only."""
    module = Forward(run)
    module.calls, module.kept = 0, []
    module.register_buffer("mean", torch.zeros(4))
    mean = module.mean
    with raises("forward-stores-attribute", where=f"Forward.{attribute}"):
        blocks_of(module, ["b"])
    assert module.mean is mean and (module.calls, module.kept) == (0, []) and not hasattr(module, "state")


LOSSES, CONSTANT = [], torch.ones(4)


class Storing(nn.Module):
    """Stores the mean of its output, as layers of experts store their auxiliary loss."""

    def __init__(self, store):
        super().__init__()
        self.linear, self.store, self.state = nn.Linear(4, 4), store, SimpleNamespace(loss=0.0)
        self.loss, self.losses, self.zero = 0.0, [], torch.ones(())

    def forward(self, x):
        y = self.linear(x)
        self.store(self, y.mean())
        return y

    def current(self):
        return self.loss + sum(LOSSES)


@pytest.mark.parametrize(("store", "read", "where"), [
    (lambda m, value: setattr(m, "loss", value), lambda m: m.loss, "attribute a.loss"),
    (lambda m, value: setattr(m, "loss", value), lambda m: m.current(), "attribute a.loss"),
    (lambda m, value: setattr(m, "late", value), lambda m: getattr(m, "late", 0.0), "attribute a.late"),
    (lambda m, value: setattr(m, "zero", value), lambda m: m.zero, "attribute a.zero"),
    (lambda m, value: m.losses.append(value), lambda m: sum(m.losses), "attribute a.losses"),
    (lambda m, value: setattr(m.state, "loss", value), lambda m: m.state.loss, "attribute a.state"),
    (lambda m, value: LOSSES.append(value), lambda m: m.current(), "variable LOSSES of Storing.current"),
], ids=["number", "by a method", "new", "tensor", "list", "object", "global"])
@pytest.mark.parametrize("cut", [["a", "b"], ["b"]], ids=["another block", "the same block"])
def test_what_a_forward_leaves_for_traced_code_is_refused(store, read, where, cut):
    """The graph would use the value from when the module was cut."""
    LOSSES.clear()
    module = Forward(lambda m, x: m.b(m.a(x) + read(m.a)))
    module.a = Storing(store)

    def rank(world):
        engine = Engine(blocks_of(module, cut), world, loss=lambda y, t: ((y - t).square().sum(), t.numel()))
        batch = [(torch.ones(2, 4), torch.zeros(2, 4))] * 2
        with raises("traced-attribute-stored", where=where):
            engine.forward_backward(batch)

    run_ranks(rank, 1)


class Logging(nn.Linear):
    def forward(self, x):
        logging.getLogger(__name__).debug("in a layer")
        return super().forward(x)


def test_a_logger_may_be_used_by_layers_too():
    """A logger caches for which levels it is enabled."""
    module, log = Forward(lambda m, x: (log.info("around"), m.b(m.a(x)))[1]), logging.getLogger(__name__)
    module.a = Logging(4, 4)

    def rank(world):
        engine = Engine(blocks_of(module), world, loss=lambda y, t: ((y - t).square().sum(), t.numel()))
        batch = [(torch.ones(2, 4), torch.zeros(2, 4))]
        log.manager._clear_cache()  # as logging.disable does
        assert engine.forward_backward(batch).weight == engine.evaluate(batch).weight == 8

    run_ranks(rank, 1)


def test_a_module_that_is_dropped_during_a_forward():
    """Blocks keep their submodules alive, but not the module that was cut."""
    module = Forward(lambda m, x: m.b(m.a(x)))
    known, blocks = ref(module), blocks_of(module)
    module.a.register_forward_hook(lambda *_: (kept.clear(), gc.collect())[0])
    kept = [module]
    del module

    def rank(world):
        engine = Engine(blocks, world, loss=lambda y, t: ((y - t).square().sum(), t.numel()))
        assert engine.evaluate([(torch.ones(2, 4), torch.zeros(2, 4))]).weight == 8 and known() is None

    run_ranks(rank, 1)


SCALE = 1.0


class Scales:
    def scale(self):
        return SCALE


class Kinds(Forward):
    """Reads the scale through functions of every kind."""

    holder = Scales()
    by_property = property(lambda self: SCALE)

    @classmethod
    def by_class(cls):
        return SCALE

    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


@pytest.mark.parametrize(("run", "where"), [
    (lambda m, x: m.b(m.a(x)) * m.by_property, "Kinds.<lambda>"),
    (lambda m, x: m.b(m.a(x)) * m.by_class(), "Kinds.by_class"),
    (lambda m, x: m.b(m.a(x)) * m.holder.scale(), "Scales.scale"),
    (lambda m, x: m.b(m.a(x)) * Scales().scale(), "Scales.scale"),
    (partial(lambda scale, m, x: m.b(m.a(x)) * SCALE * scale, 2.0), "<lambda>"),
], ids=["property", "class method", "method of an object", "method of a class", "partial"])
@pytest.mark.parametrize("is_partial", [False, True])
def test_a_global_that_is_read_by_any_kind_of_function(run, where, is_partial, monkeypatch):
    module = Kinds(run)
    if is_partial:
        module.forward = partial(module.forward, scale=2.0)

    def rank(world):
        engine = Engine(blocks_of(module, inputs=["x"]), world, loss=lambda y, t: (y.sum(), t.numel()))
        batch = [(torch.ones(2, 4), torch.zeros(2, 4))]
        engine.evaluate(batch)
        monkeypatch.setitem(globals(), "SCALE", 2.0)
        with raises("traced-attribute-changed", where=f"variable SCALE of {where}"):
            engine.evaluate(batch)

    run_ranks(rank, 1)


def test_functions_that_name_many_others():
    """Each function is visited once, however many paths lead to it."""
    names = {"__name__": None}
    for number in reversed(range(60)):
        exec(f"def f{number}(x): return (f{number + 1}, g{number + 1}, x)", names)
        exec(f"def g{number}(x): return (f{number + 1}, g{number + 1}, x)", names)
    assert len(variables_of([names["f0"]])) == 2 + 2 * 2 * 58


class Tables(nn.Module):
    """Slices plain tensors to the size of its input, as models do that were written before buffers existed."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.places = torch.randn(9, 4)
        self.mask = torch.ones(9, 9, dtype=torch.bool).tril()

    def forward(self, x):
        x = self.a(x) + self.places[:x.shape[1]]
        scores = x @ x.transpose(1, 2)
        return self.b(scores.masked_fill(~self.mask[:x.size(1), :x.size(1)], 0.0) @ x)


def test_parts_of_plain_tensors():
    module = Tables()
    blocks = blocks_of(module)
    for size in (3, 5):
        check_blocks(module, blocks, torch.randn(2, size, 4))


def asserts(m, x):
    assert x.shape[1] <= 4 and x.shape[2] == 4
    return m.b(m.a(x))


def raises_itself(m, x):
    if x.shape[1] > 4 or x.shape[2] != 4:
        raise ValueError("too long")
    return m.b(m.a(x))


def raises_unless(m, x):
    if not 0 < x.shape[1] <= 4:
        raise ValueError("too long")
    return m.b(m.a(x))


def raises_or_goes_on(m, x):
    if x.shape[2] != 4:
        raise ValueError("too wide")
    elif x.shape[1] > 4:
        raise ValueError("too long")
    elif m.training:
        x = x * 2
    else:
        x = x * 3
    return m.b(m.a(x))


@pytest.mark.parametrize("run", [asserts, raises_itself, raises_unless, raises_or_goes_on])
def test_a_condition_whose_only_effect_is_an_error_is_checked_in_the_blocks(run):
    module = Forward(run)
    blocks = blocks_of(module, ["b"])
    check_blocks(module, blocks, torch.randn(2, 3, 4))
    with pytest.raises(AssertionError, match="test_blocks_of"):
        blocks["a"](torch.randn(2, 5, 4))


def sets_items(m, x):
    x = m.a(x).clone()
    x[:, 0] = 0.0
    return m.b(x)


def test_items_that_traced_code_sets():
    module = Forward(sets_items)
    check_blocks(module, blocks_of(module, ["b"]), torch.randn(2, 3, 4))


def adds_in_place(m, x):
    x = m.a(x)
    same, rows = x, x.shape[1]
    fixed = rows
    x += 1
    x[..., 1] *= 2
    rows += 1
    return m.b(x + same / fixed + rows)


@pytest.mark.parametrize("cut", [["b"], ["a", "b"]])
def test_operators_in_place_change_what_other_names_have(cut):
    module = Forward(adds_in_place)
    check_blocks(module, blocks_of(module, cut), torch.randn(2, 3, 4))


def adds_embeddings(m, x):
    tokens, places = m.a(x), m.b(torch.ones_like(x))
    tokens += places
    return tokens


@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift",
                                  "irshift"])
def test_an_operator_in_place_has_the_value_of_the_one_that_is_not(name):
    value, other = torch.tensor([5, 6]), torch.tensor([3, 2])
    found = forward_trace._out_of_place(name, value, other)
    assert value.tolist() == [5, 6]
    assert torch.equal(found, getattr(operator, name)(value, other)) and found.dtype is value.dtype


def keeps_what_it_adds_to(m, x):
    tokens = m.a(x)
    tokens, kept = tokens.view(2, 4), tokens.view(-1)
    places = m.b(torch.ones_like(x))
    tokens += places
    return m.c(tokens.clone()) + kept.sum()


def test_operators_in_place_on_what_an_earlier_block_gives():
    """They run out of place, unless that would change the result."""
    module = Forward(adds_embeddings)
    check_blocks(module, blocks_of(module, ["b"]), torch.randn(2, 4))
    module = Forward(keeps_what_it_adds_to)
    module.c = nn.Linear(4, 4)
    with raises("block-changes-input", where="block b"):
        check_blocks(module, blocks_of(module, ["b", "c"]), torch.randn(2, 4))


class Fixed(OrderedDict):
    """Like the configuration of diffusers' models."""

    def update(self, *_):
        raise TypeError("cannot be written")


def test_attributes_that_cannot_be_written():
    module = Forward(lambda m, x: m.b(m.a(x) * m.sizes["width"]))
    module.sizes = OrderedDict.__new__(Fixed)
    OrderedDict.update(module.sizes, width=4)
    assert blocks_of(module, ["b"]) and dict(module.sizes) == {"width": 4}


def test_numbers_that_another_thread_draws_meanwhile():
    draws = iter([random.random, random.random])

    def run(m, x):  # draws of another thread, at known places of the trace
        next(draws, int)()
        return m.b(m.a(x))

    assert blocks_of(Forward(run), ["b"])


class Sign(enum.Enum):
    PLUS = 1
    MINUS = -1


class Annealed(nn.Module):
    """Reads numbers from every kind of place, and has others that its forward does not read."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.alpha, self.settings, self.steps = 0.5, {"scale": [1.0, 2.0]}, 0
        self.config, self.factor, self.sign = SimpleNamespace(shift=0.0), torch.ones(4), Sign.PLUS

    def forward(self, x):
        x = self.first(x) * self.alpha * self.sign.value + self.config.shift
        return self.second(x) * self.settings["scale"][1] * self.factor


@pytest.mark.parametrize("change", ["alpha", "settings", "factor", "sign"])
def test_a_number_of_traced_code_that_changes_between_batches_is_refused(change):
    module = Annealed()
    batch = [(torch.ones(2, 4), torch.zeros(2, 4))]

    def rank(world):
        engine = Engine(blocks_of(module), world, loss=lambda y, t: ((y - t).square().sum(), t.numel()))
        engine.evaluate(batch)
        module.steps += 1
        module.factor.fill_(3.0)
        module.alpha = float(module.alpha)
        found = engine.evaluate(batch).loss
        assert found == pytest.approx(module(batch[0][0]).square().mean().item())
        before = module.settings["scale"], getattr(module, change)
        module.settings["scale"] = [1.0, 2.0 + (change == "settings")]
        if change != "settings":
            setattr(module, change, Sign.MINUS if change == "sign" else 2.0 * getattr(module, change))
        for call in (engine.evaluate, engine.forward_backward):
            with raises("traced-attribute-changed", where=f"attribute {change}"):
                call(batch)
        module.settings["scale"], module.config.shift = before[0], 0.0
        setattr(module, change, before[1])
        assert engine.forward_backward(batch).loss == pytest.approx(found)

    run_ranks(rank, 1)


class Token(nn.Module):
    """Has its own parameter and buffer in addition to its submodules; no block contains the module itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.token = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.second(self.first(x) * self.token * self.scale) + self.token


def assigns(module):
    module.load_state_dict({name: 2 * one.detach() for name, one in module.state_dict().items()}, assign=True)


def replaces(module):
    module.token, module.scale = nn.Parameter(2 * module.token.detach()), 4 * module.scale


def writes(module):
    module.scale.mul_(4.0)


@pytest.mark.parametrize("write", [assigns, replaces, writes])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2)], ids=str)
def test_what_is_written_into_the_module_is_in_its_blocks(mesh, write):
    """The blocks are fp64, unlike the module's own buffers."""
    batch = [Microbatch(torch.ones(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64))]

    def loss(outputs, targets):
        return (outputs - targets).square().sum(), targets.numel()

    torch.manual_seed(0)
    modules = [Token() for _ in range(mesh.size + 1)]
    for one in modules[1:]:
        one.load_state_dict(modules[0].state_dict())
    write(modules[0])
    expected = plain_gradients(modules[0].double(), [batch], loss)

    def rank(world):
        module = modules[world.rank + 1]
        engine = Engine(blocks_of(module), world, mesh=mesh, loss=loss, dtype=torch.float64,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        held = engine.named_parameters()
        write(module)
        result = engine.forward_backward(batch)
        found = {engine.names_in_whole[name][0]: one.clone() for name, one in engine.gradients().items()}
        engine.step(result)
        assert engine.named_parameters().keys() == held.keys()
        assert all(one is held[name] for name, one in engine.named_parameters().items())
        assert all(module.token is one for name, one in held.items() if name.endswith("token"))
        return found

    found = {name: one for part in run_ranks(rank, mesh.size) for name, one in part.items()}
    assert_close(found, expected)


class Seen(nn.Module):
    """Changes its own buffer in traced code."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.mul_(0.5).add_(x.detach().mean(0))
        return self.second(self.first(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_users_module_does_to_a_buffer_adds_to_training(dtype):
    module, ones = Seen(), torch.ones(2, 4, dtype=dtype)

    def rank(world):
        engine = Engine(blocks_of(module), world, loss=lambda y, t: (y.sum(), 1), dtype=dtype)
        seen = []
        for _ in range(2):
            engine.forward_backward([(ones, ones)])
            seen.append(engine.full_state_dict()["seen"][0].item())
            module(5 * ones)
            seen.append(module.seen[0].item())
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the buffer is cast
        assert run_ranks(rank, 1) == [[1.0, 5.5, 3.75, 6.875]]


def test_a_buffer_that_only_the_user_writes_stays_the_users_own():
    """It keeps its own number format, and may be another tensor later."""
    module, ones = Token(), torch.ones(2, 4, dtype=torch.bfloat16)

    def rank(world):
        engine = Engine(blocks_of(module), world, loss=lambda y, t: (y.sum(), 1), dtype=torch.bfloat16)
        kept, losses = module.scale, []
        for _ in range(20):
            engine.forward_backward([(ones, ones)])
            module.scale.add_(0.001)
        for value in (0.0, 2.0):
            kept.fill_(value)
            losses.append(engine.evaluate([(ones, ones)]).loss)
        module.scale = mine = torch.ones(4)
        engine.evaluate([(ones, ones)])
        mine.fill_(2.0)
        return kept is not mine, module.scale.dtype, *losses, engine.evaluate([(ones, ones)]).loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the buffer is cast
        (apart, dtype, at_zero, at_two, again), = run_ranks(rank, 1)
    assert apart and dtype is torch.float32 and at_zero != at_two == again


def test_a_buffer_of_another_shape_is_refused():
    module = Token()

    def rank(world):
        engine = Engine(blocks_of(module), world, loss=lambda y, t: (y.sum(), 1))
        module.scale = torch.ones(1)
        engine.evaluate([(torch.ones(2, 4), torch.zeros(2, 4))])

    with raises("buffer-replaced-by-other-shape", "(1,)", "(4,)", where="buffer scale of Token"):
        run_ranks(rank, 1)


def test_an_attribute_that_is_set_to_what_it_is_does_not_count():
    def run(m, x):
        m.scale = float(m.width) ** -0.5
        return m.b(m.a(x) * m.scale)

    module = Forward(run)
    module.width, module.scale = 7, 7.0 ** -0.5
    assert blocks_of(module, ["b"])


@pytest.mark.parametrize(("run", "error"), [
    (branches, ("forward-not-traceable", 0)),
    (raises_where_both, ("forward-not-traceable",)),
    (asks_type, ("forward-not-traceable",)),
    (loops, ("forward-not-traceable",)),
    (counts, ("forward-not-traceable",)),
    (measures, ("forward-not-traceable", "x.shape[0]")),
    (no_grad, ("forward-not-traceable",)),
    (autocasts, ("forward-not-traceable",)),
    (reads, ("forward-not-traceable",)),
    (lambda m, x: nn.Linear(4, 4)(x), ("forward-not-traceable",)),
    (lambda m, x: m.b(m.a(x) + CONSTANT), ("forward-not-traceable", "register_buffer")),
    (lambda m, x: (m.a(x), m.b(x)), ("forward-returns-several", 2)),
])
def test_code_that_cannot_be_traced_is_named(run, error):
    module = Forward(run)
    with raises(*error):
        blocks_of(module, ["b"])
    assert module.training
    assert isinstance(module.a(torch.randn(2, 4)), torch.Tensor), "torch's functions are restored"


def test_a_module_whose_own_code_cannot_be_traced_is_named():
    """The error names the module with a cut inside; without that cut the module is called unchanged."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    module = Forward(lambda m, x: m.b(m.encoder(m.a(x), src_key_padding_mask=torch.zeros(2, 3))))
    module.encoder = nn.TransformerEncoder(layer, 2)
    with raises("forward-not-traceable", "encoder"):
        blocks_of(module, ["encoder.layers.*"])
    assert set(blocks_of(module, ["encoder"])) == {"a", "encoder"}


@pytest.mark.parametrize(("options", "error"), [
    ({"cut": ["layer"]}, ("cut-unknown-submodule",)),
    ({"cut": "a"}, ("cut-form",)),
    ({"cut": None}, ("cut-form",)),
    ({"cut": [3]}, ("cut-form", 3)),
    ({"cut": ["list"]}, ("cut-at-list",)),
    ({"cut": ["list.0"]}, ("cut-not-called-once",)),
    ({"cut": ["c"]}, ("cut-not-called-once", 2)),
    ({"inputs": ["y"]}, ("unknown-input",)),
    ({"inputs": ["other"]}, ("input-left-out",)),
    ({"inputs": "x"}, ("inputs-form",)),
])
def test_wrong_arguments(options, error):
    module = Forward(lambda m, x: m.c(m.c(m.b(m.a(x)))))
    module.list, module.c = nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)
    with raises(*error):
        blocks_of(module, **options)


def test_inputs_of_a_forward_that_takes_any():
    class Any(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, **batch):
            return self.b(self.a(batch["x"]) * batch["mask"])

    with raises("forward-without-inputs", "inputs="):
        blocks_of(Any())
    module = Any()
    check_blocks(module, blocks_of(module, inputs=["x", "mask"]), {"x": torch.randn(3, 4), "mask": torch.rand(3, 4)})


def test_modules_that_have_no_blocks():
    with raises("cut-not-module", "function"):
        blocks_of(lambda x: x)
    hooked = Forward(lambda m, x: m.b(m.a(x)))
    hooked.register_forward_hook(lambda *_: None)
    with raises("cut-module-with-hooks"):
        blocks_of(hooked)

    class NoInput(nn.Linear):
        def forward(self, x=None):
            return x

    with raises("forward-without-inputs"):
        blocks_of(NoInput(2, 2))
    with raises("forward-without-inputs", "model.module"):
        blocks_of(nn.DataParallel(NoInput(2, 2)))
    modes = Forward(lambda m, x: m.b(m.a(x)) if m.training else m.a(m.b(x)))
    with raises("cut-order-by-mode"):
        blocks_of(modes, ["a", "b"])


def run_all(blocks, state):
    """As on stages, each block gets leaf tensors."""
    for block in blocks.values():
        state = block(state.clone() if isinstance(state, torch.Tensor) else {
            name: one.detach().requires_grad_(one.is_floating_point()) for name, one in state.items()})
    return state


class InPlace(nn.Module):
    def __init__(self, leave):
        super().__init__()
        self.a, self.relu, self.b, self.c = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4)
        self.leave = leave

    def forward(self, x):
        x = self.a(x)
        y = self.b(self.relu(x))
        return self.c(y + x if self.leave else y)


def test_changes_in_place_across_a_cut_are_refused():
    with raises("block-changes-input"):
        run_all(blocks_of(InPlace(False), ["relu", "c"]), torch.randn(2, 4))
    with torch.no_grad(), raises("block-changes-input"):
        state = torch.randn(2, 4)
        for block in blocks_of(InPlace(True), ["relu", "c"]).values():
            state = block(state)


@pytest.mark.parametrize(("value", "kind"), [(0.5, "float"), (-1, "int"), ("text", "str")])
def test_values_that_cannot_be_sent(value, kind):
    class Returns(nn.Linear):
        def forward(self, x):
            return super().forward(x), value

    module = Forward(lambda m, x: use(m, m.first(x)))
    module.first, module.last = Returns(4, 4), Ignores(4, 4)

    def use(m, pair):
        return m.last(m.b(pair[0]), pair)

    with raises("value-cannot-be-sent"):
        run_all(blocks_of(module, ["b", "last"]), torch.randn(2, 4))


class Ignores(nn.Linear):
    def forward(self, x, other):
        return super().forward(x)


def test_frozen_blocks_in_evaluation_send_what_they_have():
    module = Forward(lambda m, x: m.b(x + m.a(x) if m.training else m.a(x)))
    blocks = blocks_of(module, ["b"])
    blocks["a"].eval()
    with raises("value-not-sent"):
        run_all(blocks, torch.randn(2, 4))
