"""The same with torch.distributed.pipelining: `torchrun --nproc-per-node 2 with_pipelining.py resnet layer3`."""

import importlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn.functional import cross_entropy

example, cut = importlib.import_module(sys.argv[1]), sys.argv[2:]

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = example.build()
pipe = pipeline(model, mb_args=(example.batch(0)[0].chunk(4)[0],),
                split_spec={name: SplitPoint.BEGINNING for name in cut})
stage = pipe.build_stage(rank, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=cross_entropy)
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
for step in range(6):
    inputs, targets = example.batch(step)
    optimizer.zero_grad()
    losses = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    optimizer.step()
    if rank == 1:
        print(f"step {step}: loss {sum(losses) / 4:.4f}")
dist.destroy_process_group()
