"""Faults that released code for two-dimensional meshes has had; a falling loss would reveal none of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ranvier import keyed_random
from ranvier.block import Initial, initialise
from ranvier.config.run import Memory, Optim, Pipeline
from ranvier.mesh import Mesh
from ranvier.tensor import layers
from ranvier.tensor.split.layers import split_layers
from ranvier.testing.reference import Reference, relative_error
from tests.covering import covering, first, quick
from tests.tensor.split_parity import (
    SCHEMES,
    SEED,
    TOLERANCE,
    assemble,
    assert_close,
    every,
    gradients_of,
    gradients_on,
    legal,
    on_mesh,
    on_tensor_mesh,
    random,
    samples_of,
    share,
    stream_part,
    tiny_gpt,
    token_batches,
    weights_of,
)

MESHES = legal([(2, 1), (1, 2), (2, 2)]) + legal([(2, 3)], ["stationary"])
SGD = partial(torch.optim.SGD, lr=0.3)


# ---------------------------------------------------------------------- the loss is averaged in each row, biases are
# not initialised or are added by several ranks, sums overwrite autograd's own gradients

def with_biases(name: str) -> Initial:
    return Initial("normal", 0.3)


@pytest.mark.parametrize(("rows", "cols", "scheme"), first(
    [(2, 1, "stationary"), (1, 2, "megatron"), (2, 2, "stationary-sequence")], MESHES))
def test_one_engine_on_every_mesh(rows, cols, scheme):
    """All parameters, also biases and norms, start as parts of one random tensor. Gradients are those of one process; a
    loss averaged in each row would multiply them by the number of rows, and a bias added by several ranks would count
    several times. A second pass has the same results, so the first has overwritten nothing."""
    mesh = Mesh(row=rows, col=cols)

    def make():
        return replace(tiny_gpt(), initial=with_biases)

    batches = token_batches(mesh)
    kept = [[tensor.clone() for tensor in (one.inputs, one.targets, one.samples)] for one in batches[0]]
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward(every(batches))

    def work(engine):
        expected = {}
        for parameter in engine.layout.parameters:
            whole = torch.full(parameter.shape, torch.nan, dtype=torch.float64)
            initialise(whole, parameter.name, with_biases(parameter.name), SEED)
            box = engine.layout.box(parameter, engine.coordinates.position)
            expected[parameter.name] = whole[tuple(slice(*edges) for edges in box)]
        before, found, mine = weights_of(engine), [], share(engine, batches)
        assert set(before) == set(expected)
        wrong = [name for name in before if not torch.equal(before[name], expected[name])]
        assert not wrong
        assert sum(name.endswith("bias") for name in before) == 7
        for _ in range(2):
            engine._step = 0  # for the same dropout
            assert engine.forward_backward(mine).loss == pytest.approx(loss, rel=1e-12)
            found.append(gradients_of(engine))
        assert all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
        return found[0], engine.layout

    gradients, layouts = zip(*on_mesh(make, mesh, work, scheme=scheme), strict=True)
    assert_close(assemble(gradients, layouts[0]), reference.gradients())
    assert all(torch.equal(tensor, old) for one, olds in zip(batches[0], kept, strict=True)
               for tensor, old in zip((one.inputs, one.targets, one.samples), olds, strict=True))


@pytest.mark.parametrize(("rows", "cols", "scheme"), first(
    [(2, 1, "stationary"), (1, 2, "stationary-sequence")], MESHES))
def test_steps_of_sgd_are_not_longer_on_more_rows(rows, cols, scheme):
    """The length of an SGD step, unlike AdamW's, depends on the gradient norm. Rows have unequal numbers of targets."""
    mesh = Mesh(row=rows, col=cols)
    batches = [token_batches(mesh, seed=seed) for seed in range(2)]
    reference = Reference(tiny_gpt(), seed=SEED, dtype=torch.float64, optimizer=SGD)
    losses = [reference.train_batch(every(batch)) for batch in batches]

    def work(engine):
        return [engine.train_batch(share(engine, batch)).loss for batch in batches], weights_of(engine), engine.layout

    found, weights, layouts = zip(*on_mesh(
        tiny_gpt, mesh, work, scheme=scheme, learning_rate=0.3, nominal_weight=17.0,
        optim=Optim(algorithm="sgd", momentum=0.0, weight_decay=0.0)), strict=True)
    assert all(mine == pytest.approx(losses, rel=1e-10) for mine in found)
    assert_close(assemble(weights, layouts[0]), reference.parameters)


@pytest.mark.parametrize(("rows", "cols", "scheme"), first(
    [(2, 1, "stationary"), (2, 2, "summa"), (3, 2, "stationary-sequence")], legal([(2, 1), (2, 2), (3, 2)])))
def test_a_rows_loss_weighs_as_many_targets_as_it_has(rows, cols, scheme):
    """One row with a single target, the others with all of theirs."""
    mesh = Mesh(row=rows, col=cols)
    batches = token_batches(mesh, count=1, per_row=2)
    one = batches[0][0]
    one.targets.copy_(one.inputs)
    one.targets[:2] = -100
    one.targets[0, 3] = 5
    reference = Reference(tiny_gpt(), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward([one])
    outcome = gradients_on(tiny_gpt, batches, mesh, scheme=scheme)
    assert_close(outcome.gradients, reference.gradients())
    assert outcome.losses == pytest.approx([loss] * mesh.size, rel=1e-12)


# ---------------------------------------------------------------------- all devices drop the same elements

@pytest.mark.parametrize(("rows", "cols", "scheme"), [one for one in MESHES if one[2] != "megatron"])
def test_ranks_do_not_share_a_dropout_mask(rows, cols, scheme):
    """Generators with the same seed on all ranks would drop the same places of every rank's part."""
    x = torch.ones(2 * rows, 12, 36, dtype=torch.float64)

    def work(mesh):
        dropout = split_layers(layers.Dropout(0.5), mesh, "block")
        with keyed_random.scope(SEED, 1, samples_of(len(x)).chunk(rows)[mesh.row], "block"):
            return dropout(stream_part(mesh, x)) != 0

    masks = on_tensor_mesh(rows, cols, SCHEMES[scheme], work)
    for rank, mask in enumerate(masks):
        assert 0.4 < mask.double().mean() < 0.6
        for other in masks[:rank]:
            assert 0.35 < (mask == other).double().mean() < 0.65, "masks are correlated"


def test_megatrons_columns_share_a_dropout_mask():
    """Columns have the same activations, and would diverge with different masks."""
    x = random(2, 12, 36)

    def work(mesh):
        dropout = split_layers(layers.Dropout(0.5), mesh, "block")
        with keyed_random.scope(SEED, 1, samples_of(2), "block"):
            return dropout(x)

    first, *others = on_tensor_mesh(1, 4, SCHEMES["megatron"], work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("rows", "cols", "scheme"), first(
    [(2, 1, "stationary"), (1, 2, "sequence"), (2, 2, "stationary-sequence")], MESHES))
def test_heavy_dropout_drops_what_one_process_drops(rows, cols, scheme):
    mesh = Mesh(row=rows, col=cols)
    make, batches = partial(tiny_gpt, dropout=0.5), token_batches(mesh)
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    losses = [reference.forward_backward(every(batches)) for _ in range(2)]
    assert losses[0] != losses[1], "the second step has the masks of the first"

    def work(engine):
        found = []
        for _ in range(2):
            found.append(engine.forward_backward(share(engine, batches)).loss)
            engine.zero_grad()
        return found

    assert all(found == pytest.approx(losses, rel=1e-12) for found in on_mesh(make, mesh, work, scheme=scheme))


# ---------------------------------------------------------------------- a norm of some shards, or of copies

@pytest.mark.parametrize(("rows", "cols", "scheme", "big"), covering(
    [(1, 2, "sequence"), (2, 2, "summa"), (1, 2, "megatron"), (2, 2, "stationary")],
    ["embedding.token.weight", "embedding.position.weight", "layer0.attention.qkv.weight", "layer0.attention.qkv.bias",
     "layer0.attention.projection.weight", "layer0.attention.projection.bias", "layer0.mlp.fc2.bias",
     "layer0.mlp.norm.weight", "head.norm.bias", "head.projection.weight"]))
def test_the_norm_counts_each_element_once(rows, cols, scheme, big):
    """One parameter trains at a time: a shard that is left out or a copy that counts twice makes the norm wrong."""
    def make():
        model = tiny_gpt()

        def freezing(block, build):
            module = build()
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(f"{block}.{name}" == big)
            return module

        return replace(model, blocks={block: partial(freezing, block, build) for block, build in model.blocks.items()})

    mesh = Mesh(row=rows, col=cols)
    batches = token_batches(mesh, count=1)
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    reference.forward_backward(every(batches))
    norm = float(reference.gradients()[big].norm())
    assert gradients_on(make, batches, mesh, scheme=scheme).norms == pytest.approx([norm] * mesh.size, rel=1e-10)


# ---------------------------------------------------------------------- gradients that have several users

class Branches(nn.Module):
    """A residual, two products of the same input, and a sum of two outputs: gradients that several consumers use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNorm(12, dtype=torch.float64)
        self.left = layers.Linear(12, 24, stationary="output", dtype=torch.float64)
        self.right = layers.Linear(12, 24, stationary="output", dtype=torch.float64)
        self.back = layers.Linear(24, 12, stationary="input", dtype=torch.float64)
        self.again = layers.Linear(24, 12, stationary="input", dtype=torch.float64)

    def forward(self, x):
        y = self.norm(x)
        inner = self.left(y) + self.right(y)
        return x + self.back(inner) + self.again(inner) + y


@pytest.mark.parametrize(("rows", "cols", "scheme"), quick(5, MESHES))
def test_a_gradient_that_several_consumers_share(rows, cols, scheme):
    """In x + linear(x) one tensor is the gradient of the sum, of the product's output and a part of x's: reducing it in
    place for one consumer changes it for the others."""
    def branches():
        block = Branches()
        with torch.no_grad():
            for number, parameter in enumerate(block.parameters()):
                parameter.copy_(random(*parameter.shape, seed=number))
        return block

    x, dy = random(2 * rows, 12, 12, seed=50).requires_grad_(), random(2 * rows, 12, 12, seed=51)
    whole = branches()
    whole(x).backward(dy)

    def work(mesh):
        block = split_layers(branches(), mesh, "block")
        mine = stream_part(mesh, x).detach().contiguous().requires_grad_()
        given = stream_part(mesh, dy).contiguous()
        kept = given.clone()
        y = block(mine)
        y.backward(given, retain_graph=True)
        first = mine.grad.clone()
        assert torch.equal(given, kept)
        mine.grad = None
        y.backward(given)
        assert torch.equal(mine.grad, first), "a second backward of the same graph differs"
        errors = [relative_error(first, stream_part(mesh, x.grad))]
        for name in ("left", "right", "back", "again"):
            weight = whole.get_submodule(name).weight
            box = whole.get_submodule(name).splits(mesh.settings)["weight"].box(
                weight.shape, (mesh.num_rows, mesh.num_cols), (mesh.row, mesh.col))
            errors.append(relative_error(block.get_submodule(name).weight.grad,
                                         2 * weight.grad[tuple(slice(*edges) for edges in box)]))
        return max(errors)

    assert max(on_tensor_mesh(rows, cols, SCHEMES[scheme], work)) < TOLERANCE


class Shared(nn.Module):
    """A block that uses one layer twice."""

    def __init__(self, stationary: str) -> None:
        super().__init__()
        self.into = layers.Linear(36, 24, stationary="output")
        self.back = layers.Linear(24, 36, stationary="input")
        self.twice = stationary

    def forward(self, x):
        if self.twice == "output":
            return x + self.back(self.into(x) * torch.tanh(self.into(x + x)))
        y = torch.tanh(self.into(x))
        return x + self.back(y) + torch.tanh(self.back(y * y))


@pytest.mark.parametrize(("rows", "cols", "scheme", "twice", "defer_bytes"), quick(4, covering(
    MESHES, [("output", 0), ("input", 1 << 40), ("output", 1 << 40), ("input", 0)])))
def test_a_layer_that_is_used_twice(rows, cols, scheme, twice, defer_bytes):
    def make():
        model = replace(tiny_gpt(), layers=(), initial=lambda name: Initial("normal", 0.1))
        blocks = {"embedding": model.blocks["embedding"], "shared": lambda: Shared(twice).double()}
        return replace(model, blocks=blocks | {"head": model.blocks["head"]})

    mesh = Mesh(row=rows, col=cols)
    batches = token_batches(mesh)
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    reference.forward_backward(every(batches))
    outcome = gradients_on(make, batches, mesh, scheme=scheme, pipeline=Pipeline(defer_bytes=defer_bytes))
    assert_close(outcome.gradients, reference.gradients())


# ---------------------------------------------------------------------- training that needs checkpointing

@pytest.mark.parametrize(("rows", "cols", "scheme"), first(
    [(1, 2, "stationary-sequence")], MESHES))
def test_training_is_the_same_without_checkpointing(rows, cols, scheme):
    """If the forward passes of layers shared buffers, operands would be right only if they are recomputed."""
    mesh = Mesh(row=rows, col=cols)
    batches = [token_batches(mesh, seed=seed) for seed in range(2)]
    reference = Reference(tiny_gpt(), seed=SEED, dtype=torch.float64, optimizer=SGD)
    for batch in batches:
        reference.train_batch(every(batch))

    def work(engine):
        for batch in batches:
            engine.train_batch(share(engine, batch))
        return weights_of(engine), engine.layout

    for checkpoint in ("none", 1):
        weights, layouts = zip(*on_mesh(tiny_gpt, mesh, work, scheme=scheme, memory=Memory(recompute=checkpoint),
                                        optimizer=SGD),
                               strict=True)
        assert_close(assemble(weights, layouts[0]), reference.parameters)


@pytest.mark.parametrize(("rows", "cols", "scheme"), first([(2, 2, "summa")], sorted(MESHES, key=lambda one: one[2])))
def test_microbatches_in_flight_do_not_share_memory(rows, cols, scheme):
    """All forwards run before the first backward, so nothing that they save may be in a workspace."""
    mesh = Mesh(pipe=2, row=rows, col=cols)
    batches = token_batches(mesh, count=3)
    reference = Reference(tiny_gpt(), seed=SEED, dtype=torch.float64)
    reference.forward_backward(every(batches))
    outcome = gradients_on(tiny_gpt, batches, mesh, scheme=scheme, pipeline=Pipeline(policy="gpipe"))
    assert_close(outcome.gradients, reference.gradients())
