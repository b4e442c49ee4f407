"""Typical user modules: on rows, columns and shared sequences each is exact in fp64, or is refused by name."""

from __future__ import annotations

import math
import random
import warnings
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.config.run import Optim
from ranvier.errors import ModelError
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.tensor import layers
from ranvier.testing import SplitError, check_split
from ranvier.testing.ranks import run_processes, run_ranks
from tests.errors import raises, reports

HIDDEN, HEADS, WIDTH, INNER, LENGTH, WORDS = 16, 4, 4, 32, 8, 20
IDS = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = layers.Embedding(WORDS, HIDDEN)

    def forward(self, ids):
        return self.token(ids)


class MLP(nn.Module):
    """A gated unit and a router, whose block computes with `compute(block, x)`."""

    def __init__(self, compute=None, prepare=None) -> None:
        super().__init__()
        self.up, self.down = into(INNER), back(INNER)
        self.gate, self.act, self.compute = layers.ClassifierHead(HIDDEN, 3, token=None), nn.GELU(), compute
        self.alpha, self.scale = layers.Scalar(0.5), layers.Scale(HIDDEN, 0.1)
        self.register_buffer("table", torch.linspace(0, 1, INNER, dtype=torch.float64), persistent=False)
        if prepare is not None:
            prepare(self)

    def forward(self, x):
        return self.compute(self, x)

    def method(self, x, factor=1):
        return self.down(self.up(x)) * factor


class Attention(nn.Module):
    def __init__(self, compute=None, prepare=None, groups=HEADS) -> None:
        super().__init__()
        self.norm, self.compute = layers.RMSNorm(HIDDEN), compute
        self.query, self.out = into(HEADS * WIDTH, HEADS), back(HEADS * WIDTH, HEADS)
        self.key, self.value = into(groups * WIDTH, groups), into(groups * WIDTH, groups)
        self.distances, self.temperature = layers.BiasTable(9, HEADS), layers.Scalar(1.5)
        if prepare is not None:
            prepare(self)

    def forward(self, x):
        return self.compute(self, x)

    def heads(self, x):
        y = self.norm(x)
        return [layer(y).view(*x.shape[:-1], -1, WIDTH).transpose(1, 2) for layer in (self.query, self.key, self.value)]

    def attend(self, x, scores, value):
        return x + self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(*x.shape[:2], -1))


def into(width, units=None):
    return layers.Linear(HIDDEN, width, stationary="output", units=units)


def back(width, units=None):
    return layers.Linear(width, HIDDEN, stationary="input", units=units)


def steps(length=LENGTH):
    return torch.arange(length)[None] - torch.arange(length)[:, None]


def on_inner(function):
    return lambda block, x: x + block.down(function(block.up(x)))


def on_scores(function):
    def compute(block, x):
        query, key, value = block.heads(x)
        return block.attend(x, function(block, query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])), value)
    return compute


# ---------------------------------------------------------------------- exact on every mesh

def four_sizes(block, x):
    batch, length, width = x.size()
    query, key, value = (layer(block.norm(x)).view(batch, length, HEADS, width // HEADS).transpose(1, 2)
                         for layer in (block.query, block.key, block.value))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return x + block.out(mixed.transpose(1, 2).contiguous().view(batch, length, width))


def repeated_groups(block, x):
    query, key, value = block.heads(x)

    def repeat(y):
        batch, heads, length, width = y.shape
        return y[:, :, None].expand(batch, heads, 2, length, width).reshape(batch, 2 * heads, length, width)

    return block.attend(x, query @ repeat(key).mT, repeat(value))


def rotary(block, x):
    query, key, value = block.heads(x)
    angles = torch.outer(torch.arange(x.shape[1]), 100 ** (-torch.arange(0, WIDTH, 2) / WIDTH)).to(x.dtype)
    cosine, sine = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))

    def turn(y):
        first, second = y[..., :WIDTH // 2], y[..., WIDTH // 2:]
        return y * cosine + torch.cat((-second, first), -1) * sine

    return block.attend(x, turn(query) @ turn(key).mT, value)


def mixture(block, x):
    weights, chosen = block.gate(x).softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(3):
        y = y + block.method(x, expert) * (weights * (chosen == expert)).sum(-1, keepdim=True)
    return x + y


def recurrence(block, x):
    inner, found = block.up(x), []
    carry = inner.new_zeros(inner.shape[0], inner.shape[2])
    for step in range(inner.size(1)):
        carry = 0.9 * carry + inner[:, step]
        found.append(carry)
    return x + block.down(torch.stack(found, 1))


def branch_on_sizes(block, x):
    inner = block.up(x)
    if inner.shape[-1] == INNER == block.up.out_features and len(x) == x.shape[0]:
        inner = inner * np.sqrt(inner.shape[-1]) / divmod(inner.size(-1), 5)[0]
    return x + block.down(inner) * torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)


def linear_attention(block, x):
    query, key, value = block.heads(x)
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    sums = torch.einsum("bhsd,bhse->bhsde", key, value).cumsum(2)
    mixed = torch.einsum("bhsd,bhsde->bhse", query, sums) / (query * key.cumsum(2)).sum(-1, keepdim=True)
    return x + block.out(mixed.transpose(1, 2).flatten(2))


def flattened_tokens(block, x):
    tokens = x.flatten(0, 1)
    weights = block.gate(tokens).softmax(-1)
    inner = functional.gelu(block.up(tokens)) * weights[:, :1]
    return (tokens + block.alpha() * block.scale(block.down(inner))).view_as(x)


def heads_in_the_batch(block, x):
    batch, length = x.shape[:2]
    query, key, value = (part.reshape(-1, length, WIDTH) for part in block.heads(x))
    slopes = (2.0 ** -torch.arange(1, HEADS + 1))[None, :, None, None] * steps(length)
    scores = query @ key.mT + slopes.expand(batch, -1, -1, -1).reshape(batch * HEADS, length, length)
    return x + block.out((scores.softmax(-1) @ value).view(batch, HEADS, length, WIDTH).transpose(1, 2).flatten(2))


def tokens_first(block, x):
    batch, length = x.shape[:2]
    query, key, value = (layer(block.norm(x)).transpose(0, 1).contiguous().view(length, -1, WIDTH).transpose(0, 1)
                         for layer in (block.query, block.key, block.value))
    mixed = torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)
    return x + block.out(mixed.transpose(0, 1).contiguous().view(length, batch, -1).transpose(0, 1))


def checkpointed(block, x):
    return x + torch.utils.checkpoint.checkpoint(block.method, x, use_reentrant=False)


EXACT = {
    "view with all sizes": Attention(four_sizes),
    "grouped queries": Attention(repeated_groups, groups=2),
    "rotary": Attention(rotary),
    "alibi": Attention(on_scores(
        lambda block, a: a - 2.0 ** -torch.arange(1, a.shape[1] + 1)[:, None, None] * steps())),
    "T5 bias": Attention(on_scores(lambda block, a: a + block.distances(steps().clamp(-4, 4) + 4).permute(2, 0, 1))),
    "soft cap, temperature": Attention(on_scores(lambda block, a: torch.tanh(a / 5) * 5 * block.temperature())),
    "a mask made inside": Attention(on_scores(
        lambda block, a: a.masked_fill(torch.ones_like(a, dtype=torch.bool).triu(1), float("-inf")))),
    "linear attention": Attention(linear_attention),
    "experts": MLP(mixture),
    "LayerScale, ReZero": MLP(lambda block, x: x + block.alpha() * block.scale(block.method(x))),
    "recurrence": MLP(recurrence),
    "sizes": MLP(branch_on_sizes),
    "means over tokens": MLP(on_inner(lambda h: h * torch.sigmoid(h.mean(1, keepdim=True)) + h.cumsum(1))),
    "a buffer": MLP(lambda block, x: x + block.down(block.up(x) * block.table)),
    "straight through": MLP(on_inner(lambda h: h + (h.round() - h).detach())),
    "NumPy numbers": MLP(on_inner(lambda h: torch.from_numpy(np.tril(np.ones((LENGTH, LENGTH)))) @ h * np.float64(2))),
    "flattened tokens": MLP(flattened_tokens),
    "heads in the batch": Attention(heads_in_the_batch),
    "tokens first, as in fairseq": Attention(tokens_first),
    "checkpoint": MLP(checkpointed),
    "layers in a list": MLP(lambda block, x: x + block.pair[1](block.pair[0](x)),
                            lambda block: setattr(block, "pair", [block.up, block.down])),
    "layers in a tuple in a dict": MLP(lambda block, x: x + block.by["a"][1](block.by["a"][0](x)),
                                       lambda block: setattr(block, "by", {"a": (block.up, block.down)})),
    "a part of a method": MLP(lambda block, x: x + block.run(x),
                              lambda block: setattr(block, "run", partial(block.method, factor=3))),
    "a branch on a replicated value": MLP(lambda block, x: x + block.method(x, 2 if block.gate(x)[0, 0, 0] > 9 else 3))}


IN_PARTS = ("means over tokens", "tokens first, as in fairseq", "heads in the batch", "flattened tokens", "recurrence")
"""Modules that join or mix tokens, of which each column has only a part with stationary-sequence."""


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("meshes", [[(2, 2)], pytest.param([(2, 1), (1, 2), (2, 2)], marks=pytest.mark.slow)], ids=len)
def test_exact(name, meshes):
    check_split([Words(), EXACT[name]], IDS, meshes=meshes, schemes=["stationary", "stationary-sequence"]
                if len(meshes) > 1 or name in IN_PARTS else ["stationary"])


# ---------------------------------------------------------------------- refused by name

class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return -dy / dy.norm()


class Holder:
    def __init__(self, block):
        self.block = block


def hooked(block, x):
    inner = block.up(x)
    inner.register_hook(lambda gradient: gradient / gradient.norm())
    return x + block.down(inner)


def reentrant(block, x):
    return x + torch.utils.checkpoint.checkpoint(block.method, x, use_reentrant=True)


def branch_on_values(block, x):
    inner = block.up(x)
    return x + block.down(inner * 2 if inner.abs().max().item() > 0.1 else inner)


REFUSED_ON_COLUMNS = {
    "halves of features": (MLP(on_inner(lambda h: torch.cat(h.chunk(2, -1)[::-1], -1))), "chunk along dim 2"),
    "softmax of features": (MLP(on_inner(lambda h: h.softmax(-1))), "softmax along dim 2"),
    "an own function": (MLP(on_inner(Negated.apply)), "autograd.Function Negated"),
    "a hook": (MLP(hooked), "register_hook"),
    "a module's hook": (MLP(lambda block, x: x + block.down(block.act(block.up(x))),
                            lambda block: block.act.register_full_backward_hook(lambda *_: None)), "a backward hook"),
    "vmap": (Attention(on_scores(lambda block, a: torch.vmap(torch.tanh)(a))), "past torch's Python functions"),
    "a reentrant checkpoint": (MLP(reentrant), "use_reentrant=False"),
    "NumPy of activations": (MLP(on_inner(lambda h: h * torch.from_numpy(h.detach().numpy()))), "numpy"),
    "a branch on values": (MLP(branch_on_values), "max over all dims"),
    "tokens of a shared sequence": (MLP(lambda block, x: x + x[:, :1] * block.gate(x).mean(1, keepdim=True)[..., :1]
                                        + block.method(x.sum(-1, keepdim=True) * x)), "dim"),
    "talking heads": (Attention(on_scores(lambda block, a: a - a.mean(1, keepdim=True))), "mean along dim 1")}


@pytest.mark.parametrize("name", REFUSED_ON_COLUMNS)
def test_refused_on_columns(name):
    block, what = REFUSED_ON_COLUMNS[name]
    for scheme in ("stationary", "stationary-sequence"):
        with reports("not-over-columns"), pytest.raises(SplitError, match=what):
            check_split([Words(), block], IDS, meshes=[(1, 2)], schemes=[scheme])


def test_chosen_tokens_of_a_shared_sequence_name_its_setting():
    """As a mixture of experts chooses them from the flat [B x S, H]; choosing full sequences needs no setting."""
    block = MLP(lambda block, x: block.method(x) + x.flatten(0, 1)[torch.arange(3)].mean(0) * 0.1)
    with pytest.raises(SplitError, match=r"sequence[-_]sharding"):
        check_split([Words(), block], IDS, meshes=[(1, 2)], schemes=["stationary-sequence"])
    check_split([Words(), block], IDS, meshes=[(1, 2)], schemes=["stationary"])


def hook_of(block):
    block.up.weight.register_hook(lambda gradient: gradient / gradient.norm())


REFUSED = {
    "a weight": (MLP(lambda block, x: block.method(x) * block.up.weight.norm()), "weight of a layer that is split"),
    "a weight, detached": (MLP(lambda block, x: block.method(x) * block.up.weight.data.norm()), "weight of a layer"),
    "a weight by its dict": (MLP(lambda block, x: block.method(x) * block.up._parameters.get("weight").norm()),
                             "weight of a layer"),
    "a copied dict": (MLP(lambda block, x: block.method(x) * block.up._parameters.copy()["bias"].norm()), "parameters"),
    "a dict": (MLP(lambda block, x: block.method(x) * dict(block.up._parameters)["weight"].norm()), "weight of"),
    "unpacked": (MLP(lambda block, x: block.method(x) * {**block.up._parameters}["weight"].norm()), "weight of"),
    "the method of dict": (MLP(lambda block, x: block.method(x) * dict.__getitem__(
        block.up._parameters, "weight").norm()), "dict' objects doesn't apply"),
    "all weights": (MLP(lambda block, x: block.method(x) * sum(p.norm() for p in block.parameters())), "parameters"),
    "another's parameter": (MLP(lambda block, x: x * block.own, lambda block: setattr(
        block, "own", nn.Parameter(torch.ones(HIDDEN)))), "parameter 1.own"),
    "weights in a list": (MLP(lambda block, x: block.method(x) * block.kept[0].norm(),
                              lambda block: setattr(block, "kept", [block.up.weight])), "1.kept: keeps a parameter"),
    "a view of a weight": (MLP(lambda block, x: block.method(x) * block.kept.norm(), lambda block: setattr(
        block, "kept", block.up.weight.data.t())), "1.kept: keeps a parameter"),
    "a view as a buffer": (MLP(lambda block, x: block.method(x) * block.kept.norm(), lambda block: (
        block.register_buffer("kept", block.up.weight.detach()[:2]))), "1.kept: keeps a parameter"),
    "a closure": (MLP(lambda block, x: block.run(x), lambda block: setattr(
        block, "run", lambda x: block.method(x))), "1.run: has a function that would run the layers of the whole"),
    "an object": (MLP(lambda block, x: block.holder.block.method(x), lambda block: setattr(
        block, "holder", Holder(block))), "1.holder: has a function"),
    "a hook that runs layers": (MLP(lambda block, x: block.act(x), lambda block: block.act.register_forward_hook(
        lambda module, args, y: block.method(y))), "1.act.forward_hooks: has a function"),
    "a hook of a layer": (MLP(lambda block, x: block.method(x), lambda block: block.up.register_forward_hook(
        lambda module, args, y: y * 2)), "1.up: has hooks"),
    "a hook of a weight": (MLP(lambda block, x: block.method(x), hook_of), "1.up: has a hook on a parameter"),
    "torch.rand": (MLP(lambda block, x: x + block.method(x) * torch.rand(len(x), 1, 1)), "draws random numbers"),
    "random": (MLP(lambda block, x: block.method(x, random.random())), "draws random numbers"),
    "NumPy's random": (MLP(lambda block, x: block.method(x, np.random.rand())), "draws random numbers"),
    "dropout": (MLP(lambda block, x: block.down(functional.dropout(block.up(x)))), "draws random numbers|dropout")}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_rows_alone_too(name):
    block, what = REFUSED[name]
    for mesh in ((2, 1), (1, 2)):
        kept = reports("layer-parameter-kept") if "keeps a parameter" in what else nullcontext()
        with kept, pytest.raises(ModelError, match=what):
            check_split([Words(), block], IDS, meshes=[mesh], schemes=["stationary"])


class Child(nn.Module):
    """A block's part that runs a layer of the block."""

    def __init__(self, reference) -> None:
        super().__init__()
        self.down, self.reference = back(INNER), reference

    def forward(self, x):
        parent = self.reference() if isinstance(self.reference, weakref.ref) else self.reference[0]
        return x + self.down(parent.up(x))


@pytest.mark.parametrize("reference", [weakref.ref, lambda parent: (parent,)], ids=["weak", "tuple"])
def test_a_part_that_refers_to_its_block(reference):
    """The fault that this notices: rows silently trained the layers of the full model."""
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = into(INNER)
            self.child = Child(reference(self))

        def forward(self, x):
            return self.child(x)

    def rank(world):
        torch.manual_seed(0)
        block = Parent()
        before = block.up.weight.detach().clone()
        engine = Engine([Words(), block], world, mesh=Mesh(row=2), loss=lambda y, t: (y.square().sum(), len(t)),
                        optimizer=partial(torch.optim.SGD, lr=0.1))
        engine.train_batch([(IDS.chunk(2)[world.rank], IDS.chunk(2)[world.rank])])
        changed = engine.blocks["1"].up.weight.detach() if isinstance(engine.blocks, dict) \
            else engine.blocks[1].up.weight.detach()
        part = before.chunk(2, 1)[world.rank]
        assert changed.shape == part.shape and not torch.equal(changed, part) and torch.equal(block.up.weight, before)
        engine.close()

    run_ranks(rank, 2)


# ---------------------------------------------------------------------- hooks on an engine's layers

def centred(x):
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize("hook", [
    lambda layer, _: layer.register_forward_pre_hook(lambda module, args: (centred(args[0]),)),
    lambda layer, _: layer.register_forward_hook(lambda module, args, y: y + args[0].detach().mean()),
    lambda layer, _: setattr(layer, "forward", lambda x, forward=layer.forward: centred(forward(x))),
    lambda layer, _: layer.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.mean(),)),
    lambda _, block: block.register_forward_hook(lambda block, args, y: y * block.up.weight.detach().mean()),
    lambda _, block: block.register_forward_pre_hook(lambda block, args: args[0] * block.up.weight.detach().mean(),
                                                     prepend=True)],
    ids=["input", "input of a hook", "forward", "weight", "weight behind a block", "weight before a block"])
def test_a_hook_on_a_running_layer_or_block_sees_no_part_as_a_whole(hook):
    def rank(world):
        engine = Engine([Words(), MLP(MLP.method), Scores()], world, mesh=Mesh(col=2), loss=summed,
                        optimizer=partial(torch.optim.SGD, lr=0.1))
        hook(engine.blocks["1"].up, engine.blocks["1"])
        with raises("not-over-columns"):
            engine.train_batch([(IDS, IDS)])
        engine.close()

    run_ranks(rank, 2)


# ---------------------------------------------------------------------- the modules that an engine was built from

@pytest.mark.parametrize("mesh", [Mesh(row=2), Mesh(col=2)], ids=str)
def test_the_modules_of_a_split_model_warn_of_old_values(mesh):
    """They are in no engine: training them again raises an error, and saving them warns."""
    def rank(world):
        torch.manual_seed(0)
        mlp = MLP(MLP.method)
        blocks = nn.Sequential(Words(), mlp, mlp, Scores())
        build = partial(Engine, world=world, mesh=mesh, loss=summed, optimizer=partial(torch.optim.SGD, lr=0.1))
        batch = [(IDS.chunk(mesh.row)[world.rank % mesh.row],) * 2]
        engine = build(blocks)
        for _ in range(2):
            engine.train_batch(batch)
        again = build(blocks)
        with raises("parameter-trained-elsewhere"):
            again.train_batch(batch)
        state = engine.full_state_dict() or {}
        engine.close()
        caught = []
        if world.rank == 0:  # ranks are threads, which share the filters of warnings
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                blocks.state_dict()
                blocks.load_state_dict(state)
                blocks.state_dict()
        return ["full_state_dict" in str(one.message) for one in caught]

    assert run_ranks(rank, 2) == [[True], []]


def set_a_number(blocks):
    blocks[1].factor = 0.5


def set_a_layers_number(blocks):
    blocks[1].up.out_features += 1


def add_a_hook(blocks):
    blocks[1].register_forward_hook(lambda module, args, y: 0.5 * y)


def replace_a_layer(blocks):
    blocks[1].act = nn.Tanh()


def freeze_a_weight(blocks):
    blocks[1].up.weight.requires_grad_(False)


def write_a_weight(blocks):
    blocks[1].down.bias.data.add_(1.0)


def load_other_values(blocks):
    blocks[1].load_state_dict({name: 2 * value for name, value in blocks[1].state_dict().items()})


def set_a_losss_number(blocks):
    blocks[-1].factor = 3.0


def change_nothing(blocks):
    blocks.eval()
    blocks.train()


CHANGES = {set_a_number: "1.factor", set_a_layers_number: "1.up.out_features", add_a_hook: "1.forward_hooks",
           replace_a_layer: "1.act", freeze_a_weight: "1.up.weight", write_a_weight: "1.down.bias",
           load_other_values: "1.", set_a_losss_number: "loss.factor", change_nothing: None}


class Penalty(nn.Module):
    def forward(self, scores, targets):
        return summed(scores, targets)


@pytest.mark.parametrize("mesh", [pytest.param(Mesh(row=2), marks=pytest.mark.slow), Mesh(col=2)], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_the_users_modules_are_told_of_where_copies_of_them_train(change, mesh):
    """Such changes have no effect. Loading the engine's state into the modules is not a change."""
    def rank(world):
        blocks, penalty = nn.Sequential(Words(), MLP(MLP.method), Scores()), Penalty()
        engine = Engine(blocks, world, mesh=mesh, loss=penalty, optimizer=partial(torch.optim.SGD, lr=0.1))
        batch = [(IDS.chunk(mesh.row)[engine.coordinates.row],) * 2]
        engine.train_batch(batch)
        if (state := engine.full_state_dict()) is not None:
            blocks.load_state_dict(state)
        change([*blocks, penalty] if CHANGES[change] else blocks)
        for _ in range(2):
            engine.train_batch(batch)
        engine.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(rank, 2)
    told = [str(one.message) for one in caught if "changed in the model" in str(one.message)]
    assert len(told) == (2 if CHANGES[change] else 0) and all(one.startswith(CHANGES[change]) for one in told)


def test_a_hook_of_all_modules_is_told_of_where_others_stand_for_them():
    def rank(world):
        engine = Engine([Words(), MLP(MLP.method), Scores()], world, mesh=Mesh(col=2), loss=summed)
        for _ in range(2):
            engine.forward_backward([(IDS, IDS)])
        engine.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, y: 0.5 * y if isinstance(module, nn.Linear) else None)
        try:
            run_ranks(rank, 2)
        finally:
            hook.remove()
    assert len([one for one in caught if "a hook of all modules" in str(one.message)]) == 2


class Still(MLP):
    def forward(self, x):
        return self.method(x, 2 if self.training else 3)


@pytest.mark.parametrize("mesh", [Mesh(row=2), Mesh(col=2)], ids=str)
def test_copies_follow_the_modes_of_the_users_modules(mesh):
    def rank(world, mode):
        blocks = nn.Sequential(Words(), Still(), Scores())
        engine = Engine(blocks, world, mesh=mesh, loss=summed, optimizer=partial(torch.optim.SGD, lr=0.0))
        batch, losses = [(IDS.chunk(mesh.row)[engine.coordinates.row],) * 2], []
        for block in (blocks[1], nn.Identity(), nn.Identity()):
            losses.append(engine.train_batch(batch).loss)
            block.train(mode)
        modes = [one.training for one in engine.blocks["1"].modules()]
        engine.close()
        return losses[1] == losses[2], losses[0] == losses[1], set(modes)

    for mode in (True, False):
        assert run_ranks(partial(rank, mode=mode), 2) == [(True, mode, {mode})] * 2


@pytest.mark.parametrize("name", ["norm", "head"])
def test_numbers_of_a_running_layer_are_its_own(name):
    def rank(world):
        block = nn.Sequential(layers.LayerNorm(HIDDEN), layers.ClassifierHead(HIDDEN, 1, token=0))
        engine = Engine([Words(), block], world, mesh=Mesh(col=2), loss=summed,
                        optimizer=partial(torch.optim.SGD, lr=0.1))
        losses = [engine.evaluate([(IDS, IDS)]).loss]
        setattr(engine.blocks["1"][int(name == "head")], *(("eps", 10.0) if name == "norm" else ("token", 3)))
        losses.append(engine.evaluate([(IDS, IDS)]).loss)
        engine.close()
        return losses

    first, second = run_ranks(rank, 2)[0]
    assert first != second


# ---------------------------------------------------------------------- parameters that are initialized again

@pytest.mark.parametrize("options", [{"optimizer": partial(torch.optim.SGD, lr=0.1)}, {"optim": Optim()}], ids=str)
@pytest.mark.parametrize("initialize", [nn.init.xavier_normal_, nn.init.orthogonal_, nn.init.normal_])
def test_a_part_of_a_weight_is_not_initialized_as_a_whole_one(initialize, options):
    def rank(world):
        engine = Engine([Words(), MLP(MLP.method), Scores()], world, mesh=Mesh(col=2), loss=summed, **options)
        weight, named = engine.blocks["1"].up.weight, getattr(nn.init, initialize.__name__)
        with raises("initialized-part") as error:
            named(weight.data[2:])
        assert error.value.value == (INNER // 2 - 2, HIDDEN)
        nn.init.zeros_(weight)
        named(torch.empty(4, 4))
        engine.close()

    run_ranks(rank, 2)


@pytest.mark.parametrize("options", [{"optimizer": partial(torch.optim.SGD, lr=0.1)}, {"optim": Optim()}],
                         ids=["torch", "ranvier"])
@pytest.mark.parametrize("mesh", [Mesh(row=2), Mesh(col=2), Mesh(pipe=2)], ids=str)
def test_the_norm_of_a_part_warns(mesh, options):
    def rank(world):
        make = [Words(), MLP(MLP.method), Scores()] if mesh.pipe == 1 else [nn.Embedding(20, 4), nn.Linear(4, 1)]
        engine = Engine(make, world, mesh=mesh, loss=summed, **options)
        ids = IDS.chunk(mesh.row)[engine.coordinates.row]
        engine.forward_backward([(ids, ids)])
        if world.rank:  # ranks are threads, which share the filters of warnings
            engine.gradients()
            return engine.close()
        weight = max(engine.parameters(), key=torch.numel)
        compiled = torch.compile(lambda x: x.norm(), fullgraph=True, backend="eager")
        found = []
        for norm in (weight.grad.norm, weight.grad.data.norm, weight.norm, weight.data.norm, torch.ones(3).norm,
                     partial(weight.norm, dim=0), partial(compiled, torch.ones(3)),
                     partial(torch.vmap(Tensor.norm), torch.ones(2, 3))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                norm()
            found.append(any("rows and columns" in str(one.message) for one in caught))
        engine.close()
        return found

    assert run_ranks(rank, 2)[0] == [mesh.pipe == 1] * 4 + [False] * 4


# ---------------------------------------------------------------------- columns that diverge at random

class Parting(nn.Module):
    """Calls a layer that depends on its rank, or draws a number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.other, self.down = into(INNER), into(INNER), back(INNER)
        self.kind, self.rank = kind, 0

    def forward(self, x):
        if self.kind == "layers":
            return x + self.down((self.one if self.rank else self.other)(x))
        inner = self.one(x) + self.other(x)
        return x + self.down(inner) * torch.rand(())


def parted(world, seed_by_rank):
    torch.manual_seed(world.rank * seed_by_rank)
    engine = Engine([Words(), Parting("torch"), Scores()], world, mesh=Mesh(col=2), loss=summed,
                    optimizer=partial(torch.optim.SGD, lr=0.1))
    try:
        return engine.train_batch([(IDS, IDS)]).loss
    except ModelError as error:
        return f"{error.where}: {error.what}"
    finally:
        engine.close()
        world.backend.close()


def summed(y, targets):
    return y.square().sum(), len(targets)


@pytest.mark.slow
@pytest.mark.parametrize("seed_by_rank", [False, True])
def test_columns_draw_alike_or_are_refused(seed_by_rank):
    first, second = run_processes("tests.tensor.test_user_modules:parted", 2, "torch", args=[seed_by_rank],
                                  timeout_seconds=60)
    assert first == second and (first == "columns of a row: draw different random numbers") == seed_by_rank


def test_columns_that_call_other_layers_are_found():
    def rank(world):
        block = Parting("layers")
        block.rank = world.rank
        engine = Engine([Words(), block, Scores()], world, mesh=Mesh(col=2), optimizer=partial(torch.optim.SGD, lr=0.1),
                        loss=summed)
        with raises("layer-call-counts-differ") as error:
            engine.train_batch([(IDS, IDS)])
        assert set(error.value.value.values()) == {0, 1}
        engine.close()

    run_ranks(rank, 2)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = layers.ClassifierHead(HIDDEN, 1, token=None)

    def forward(self, x):
        return self.score(x)
