"""A custom model, written with the layers of `ranvier.tensor`, on every mesh: existing modules, a gated unit, heads of
another width, a classification head, and a plain loss."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from ranvier.config.run import Memory, Optim
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor import layers
from ranvier.testing.reference import Reference, relative_error
from tests.covering import chosen, quick
from tests.tensor.split_parity import (
    SEED,
    TOLERANCE,
    assemble,
    assert_close,
    every,
    gradients_on,
    legal,
    on_mesh,
    random,
    share,
    weights_of,
)

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = layers.Embedding(29, 12)
        self.position = layers.PositionEmbedding(8, 12)
        self.dropout = layers.Dropout(0.2)

    def forward(self, ids):
        return self.dropout(self.token(ids) + self.position(ids.shape[1]))


class Mix(nn.Module):
    """Attention without a mask, whose heads have their own widths, and products without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNorm(12, eps=1e-3)
        self.query = layers.Linear(12, 12, bias=False, stationary="output", units=4)
        self.key = layers.Linear(12, 12, bias=False, stationary="output", units=4)
        self.value = layers.Linear(12, 20, stationary="output", units=4)
        self.back = layers.Linear(20, 12, stationary="input", units=4)

    def forward(self, x):
        y = self.norm(x)
        query, key = (layer(y).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.query, self.key))
        value = self.value(y).unflatten(-1, (-1, 5)).transpose(1, 2)
        scores = (query @ key.transpose(-1, -2) / 3 ** 0.5).softmax(-1)
        return x + self.back((scores @ value).transpose(1, 2).flatten(2))


class Gate(nn.Module):
    """A gated unit: two products of the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNorm(12)
        self.gate = layers.Linear(12, 24, stationary="output")
        self.up = layers.Linear(12, 24, stationary="output")
        self.down = layers.Linear(24, 12, bias=False, stationary="input")
        self.dropout = layers.Dropout(0.2)

    def forward(self, x):
        y = self.norm(x)
        return x + self.dropout(self.down(functional.silu(self.gate(y)) * self.up(y)))


class Classes(nn.Module):
    def __init__(self, token: int) -> None:
        super().__init__()
        self.norm = layers.LayerNorm(12)
        self.head = layers.ClassifierHead(12, 5, token=token)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(x)))


def class_loss(scores, targets):
    return functional.cross_entropy(scores, targets, reduction="sum"), len(targets)


def classifier(token=0):
    """Modules with seeded values, not from torch's generator, which ranks that are threads share."""
    model = nn.Sequential(Words(), Mix(), Gate(), Classes(token)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, seed=number) / parameter.shape[-1] ** 0.5)
    return model


def sentences(mesh, count=2):
    generator = torch.Generator().manual_seed(0)
    return [[Microbatch(torch.randint(0, 29, (2 * mesh.row, 8), generator=generator),
                        torch.randint(0, 5, (2 * mesh.row,), generator=generator),
                        torch.arange(2 * mesh.row) + 100 * (replica * count + number)) for number in range(count)]
            for replica in range(mesh.data)]


@pytest.mark.parametrize(("rows", "cols", "scheme", "token"), chosen(
    [(2, 2, "stationary", 0), (1, 4, "sequence", 5)], legal([(2, 2), (1, 4), (3, 2)]), [0, 5]))
def test_gradients(rows, cols, scheme, token):
    mesh = Mesh(row=rows, col=cols)
    batches = sentences(mesh)
    reference = Reference(classifier(token), loss=class_loss, seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward(every(batches))
    outcome = gradients_on(partial(classifier, token), batches, mesh, scheme=scheme, loss=class_loss)
    assert_close(outcome.gradients, reference.gradients())
    assert outcome.losses == pytest.approx([loss] * mesh.size, rel=1e-12)
    assert outcome.weights == [sum(len(one.targets) for one in every(batches))] * mesh.size
    norm = sum(float((gradient ** 2).sum()) for gradient in reference.gradients().values()) ** 0.5
    assert outcome.norms == pytest.approx([norm] * mesh.size, rel=1e-10)


@pytest.mark.parametrize(("mesh", "checkpoint"), quick(1, [
    (Mesh(row=2, col=2), "none"), (Mesh(row=2, col=2), 2), (Mesh(data=2, pipe=2, row=2, col=2), "none"),
    (Mesh(pipe=3, col=2), 1)]), ids=str)
def test_training(mesh, checkpoint):
    """Steps, evaluation and predictions; copies of the head's bias stay bit-identical."""
    batches = sentences(mesh)
    reference = Reference(classifier(), loss=class_loss, seed=SEED, dtype=torch.float64, optimizer=ADAMW)
    losses = [reference.evaluate(every(batches)), *(reference.train_batch(every(batches)) for _ in range(2))]
    scores = [reference.predict(replica) for replica in batches]

    def work(engine):
        mine = share(engine, batches)
        found = [engine.evaluate(mine).loss, *(engine.train_batch(mine).loss for _ in range(2))]
        predicted = engine.predict(mine)
        for one, whole in zip(predicted or (), scores[engine.coordinates.data], strict=engine.is_last_stage):
            assert relative_error(one, whole.chunk(mesh.row)[engine.coordinates.row]) <= 1e-8
        return found, weights_of(engine), engine.layout

    found, weights, layouts = zip(*on_mesh(classifier, mesh, work, loss=class_loss, learning_rate=1e-2,
                                           memory=Memory(recompute=checkpoint), optim=Optim(weight_decay=0.01)),
                                   strict=True)
    assert all(mine == pytest.approx(losses, rel=1e-9) for mine in found)
    assert_close(assemble(weights, layouts[0]), reference.parameters, 1e-8)


def test_ready_made_modules_are_not_changed():
    """Ranks that are threads, or several engines in turn, may get the same modules."""
    model = classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = Mesh(row=2, col=2)
    batches = sentences(mesh)
    first, second = (gradients_on(lambda: model, batches, mesh, loss=class_loss).gradients for _ in range(2))
    assert_close(first, second, TOLERANCE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(model[1].query, layers.Linear)
