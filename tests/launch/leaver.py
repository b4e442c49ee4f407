"""A user's own script, in which one rank exits early without an error: `leaver.py WHERE TRANSPORT`."""

import sys

import torch
from torch import nn

import ranvier

where, transport = sys.argv[1:]
world = ranvier.start(pipe=2, transport=transport, device="cpu")


class Leaves(nn.Linear):
    def forward(self, x):
        if where == "forward":
            sys.exit(0)
        return super().forward(x)


engine = ranvier.Engine([nn.Linear(4, 4), Leaves(4, 4)], world, loss=lambda output, targets: (output.sum(), 2.0),
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
if where == "raise" and world.rank == 1:
    raise SystemExit(3)  # no handler of Ranvier sees it
world.gather_objects(world.rank)
for _step in range(3):
    engine.train_batch([(torch.ones(2, 4), torch.ones(2))])
    if where == "loop" and world.rank == 1:
        sys.exit(0)
if where == "end" and world.rank == 1:
    sys.exit(0)
if where == "end":
    torch.manual_seed(0)  # not a call that other ranks take part in
