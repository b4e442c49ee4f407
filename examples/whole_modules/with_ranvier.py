"""The same on two stages: `python with_ranvier.py resnet layer3`, with the submodules at which blocks begin."""

import importlib
import sys

import torch
from torch.nn.functional import cross_entropy

import ranvier

example, cut = importlib.import_module(sys.argv[1]), sys.argv[2:]

world = ranvier.start(pipe=2)
torch.manual_seed(0)
model = example.build()
engine = ranvier.Engine(ranvier.blocks_of(model, cut), world,
                        loss=lambda outputs, y: (cross_entropy(outputs, y, reduction="sum"), y.numel()),
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
for step in range(6):
    inputs, targets = example.batch(step)
    result = engine.train_batch(ranvier.microbatches(inputs, targets, size=4))
    if world.rank == 0:
        print(f"step {step}: loss {result.loss:.4f}")
engine.close()
