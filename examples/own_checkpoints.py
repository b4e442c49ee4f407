"""Checkpoints in a loop of your own: run it, end it at any moment, and run it again on another mesh.

    python examples/own_checkpoints.py                  two replicas
    python examples/own_checkpoints.py --pipe 3         three stages continue at the same step
"""

import argparse

import torch
from torch import nn

import ranvier

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=int, default=1)
parser.add_argument("--pipe", type=int, default=1)
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()
if options.data * options.pipe == 1:
    options.data = 2

world = ranvier.start(data=options.data, pipe=options.pipe)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
engine = ranvier.Engine(model, world, loss=lambda y, t: (((y - t) ** 2).sum(), t.numel()),
                        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
checkpoints = ranvier.Checkpoints(engine, "runs/own-checkpoints", keep=2)
loaded = checkpoints.load()
if world.rank == 0:
    print(f"goes on after step {loaded.step}" if loaded else "from the start")
while engine.steps < options.steps:
    inputs = torch.rand(256, 2, generator=torch.Generator().manual_seed(engine.steps))
    mine = inputs.chunk(options.data)[engine.coordinates.data]
    result = engine.train_batch(ranvier.microbatches(mine, mine[:, :1] * mine[:, 1:], 32))
    if engine.steps % 25 == 0:
        checkpoints.save()  # returns after a copy; the rest is done while training goes on
        if world.rank == 0:
            print(f"step {engine.steps}: loss {result.loss:.5f}")
for written in checkpoints.wait():
    if written.error and world.rank == 0:
        print(f"step {written.step} could not be saved: {written.error}")
engine.close()
