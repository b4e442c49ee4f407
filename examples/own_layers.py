"""Tensor parallelism for a model of your own: `python examples/own_layers.py`, or under torchrun or mpiexec.

The blocks are plain PyTorch except for their layers, and run on one rank too. On four ranks (2 rows x 2 columns) each
holds a quarter of every large weight and of every activation. `ranvier check --split own_layers:sample`, in this
folder, compares the model on several meshes and in every scheme with the same model on one rank.
"""

import torch
from torch import nn
from torch.nn import functional

import ranvier
from ranvier.tensor import layers as tensor

HIDDEN, HEADS, VOCAB, LENGTH = 32, 4, 16, 12


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = tensor.Embedding(VOCAB, HIDDEN), tensor.PositionEmbedding(LENGTH, HIDDEN)

    def forward(self, ids):
        return self.token(ids) + self.position(ids.shape[1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = tensor.RMSNorm(HIDDEN)
        self.qkv = tensor.Linear(HIDDEN, 3 * HIDDEN, stationary="output", units=HEADS)
        self.query_norm = tensor.RMSNorm(HIDDEN // HEADS, over="heads")
        self.out = tensor.Linear(HIDDEN, HIDDEN, stationary="input", units=HEADS)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, HIDDEN // HEADS))  # -1: the heads of this column
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(3))
        mixed = functional.scaled_dot_product_attention(self.query_norm(query), key, value)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = tensor.LayerNorm(HIDDEN)
        self.into = tensor.Linear(HIDDEN, 4 * HIDDEN, stationary="output")
        self.out = tensor.Linear(4 * HIDDEN, HIDDEN, stationary="input")
        self.gate = tensor.ClassifierHead(HIDDEN, 1, token=None)  # one score per token, replicated over columns

    def forward(self, x):
        return x + self.out(functional.relu(self.into(self.norm(x)))) * torch.sigmoid(self.gate(x))


class Head(nn.Module):
    """Logits for the question whether there is a token 0."""

    def __init__(self):
        super().__init__()
        self.norm, self.score = tensor.LayerNorm(HIDDEN), tensor.ClassifierHead(HIDDEN, 2, token=0)

    def forward(self, x):
        return self.score(self.norm(x))


def loss(scores, answers):
    return functional.cross_entropy(scores, answers, reduction="sum"), len(answers)


def questions(seed, row, rows):
    """This row's share of 64 questions, in microbatches of 16."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (64, LENGTH), generator=generator)
    answers = (ids == 0).any(1).long()
    return [ranvier.Microbatch(*(part.chunk(rows)[row] for part in (ids[start:start + 16], answers[start:start + 16])))
            for start in range(0, 64, 16)]


def model():
    torch.manual_seed(0)
    return [Embedding(), Attention(), MLP(), Attention(), MLP(), Head()]


def sample():
    """For `ranvier check --split`: the model, inputs with targets, and the loss."""
    return model(), (torch.arange(4 * LENGTH).view(4, LENGTH) % VOCAB, torch.tensor([1, 0, 1, 0])), loss


def main():
    world = ranvier.start(row=2, col=2)
    engine = ranvier.Engine(model(), world, loss=loss, tensor=ranvier.TensorParallel(scheme="stationary"),
                            optim=ranvier.Optim(), learning_rate=3e-3)
    place = engine.coordinates.row, engine.mesh.row
    for step in range(100):
        result = engine.train_batch(questions(step, *place))
        if step % 25 == 0 and world.rank == 0:
            print(f"step {step}: loss {result.loss:.4f}")
    held_out = engine.evaluate(questions(1_000_000, *place))
    if world.rank == 0:
        print(f"held out: loss {held_out.loss:.4f}")
    engine.close()


if __name__ == "__main__":
    main()
