"""Your own blocks, loss and loop on four ranks: `python examples/own_model.py`, or under torchrun or mpiexec."""

import torch
from torch import nn

import ranvier


def squared_error(outputs, targets):
    """A loss returns its sum and its weight; gradients are of sum / weight over the whole global batch."""
    return ((outputs - targets) ** 2).sum(), targets.numel()


def points(seed, replica, replicas):
    """This replica's share of 256 points of a function, in microbatches of 32."""
    inputs = torch.rand(256, 2, generator=torch.Generator().manual_seed(seed)).chunk(replicas)[replica]
    return ranvier.microbatches(inputs, torch.sin(6 * inputs[:, :1]) * inputs[:, 1:], 32)


world = ranvier.start(data=2, pipe=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
engine = ranvier.Engine(model, world, loss=squared_error,
                        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
replica = engine.coordinates.data, engine.mesh.data
for step in range(200):
    result = engine.train_batch(points(step, *replica))
    if step % 50 == 0 and world.rank == 0:
        print(f"step {step}: loss {result.loss:.4f}")
held_out = engine.evaluate(points(1_000_000, *replica))
if world.rank == 0:
    print(f"held out: loss {held_out.loss:.4f}")
engine.close()
