"""Trains a network in one process: `python plain.py resnet`, or nanogpt, lstm or unet."""

import importlib
import sys

import torch
from torch.nn.functional import cross_entropy

example = importlib.import_module(sys.argv[1])

torch.manual_seed(0)
model = example.build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    inputs, targets = example.batch(step)
    optimizer.zero_grad()
    losses = []
    for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        losses.append(cross_entropy(model(x), y))
        (losses[-1] / 4).backward()
    optimizer.step()
    print(f"step {step}: loss {sum(losses) / 4:.4f}")
