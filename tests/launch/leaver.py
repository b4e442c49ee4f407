"""A user's own script, in which one rank leaves in the middle as if all were well: `leaver.py WHERE TRANSPORT`."""

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
    raise SystemExit(3)  # which no handler of Ranvier's sees
world.gather_objects(world.rank)
for _step in range(3):
    engine.train_batch([(torch.ones(2, 4), torch.ones(2))])
    if where == "loop" and world.rank == 1:
        sys.exit(0)
if where == "end" and world.rank == 1:
    sys.exit(0)
if where == "end":
    torch.manual_seed(0)  # no call that others have a part in
