"""with_pipelining.py for a model whose two ends share a weight, of which each stage has a copy of its own:
`torchrun --nproc-per-node 2 with_pipelining_and_ties.py nanogpt transformer.h.2`."""

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
shared = stage.submod.get_parameter("transformer.wte.weight" if rank == 0 else "lm_head.weight")
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
    dist.all_reduce(shared.grad)
    optimizer.step()
    if rank == 1:
        print(f"step {step}: loss {sum(losses) / 4:.4f}")
dist.destroy_process_group()
