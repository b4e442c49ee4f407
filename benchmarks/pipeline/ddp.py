"""DistributedDataParallel over Gloo: every rank has a full model, and gradients are averaged while the last backward
runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pipeline.contender import Contender, Place
from benchmarks.pipeline.workload import Loss, Stepper, Workload, whole_network


@contextmanager
def open_ddp(workload: Workload, contender: Contender, place: Place) -> Iterator[Stepper]:
    """Each rank takes its share of the batch in microbatches of the usual size; only the last one is followed by
    communication. DDP averages over ranks, so each rank divides its loss by its own share of the tokens."""
    if workload.microbatches % place.size:
        raise ValueError(f"{place.size} ranks do not divide {workload.microbatches} microbatches")
    dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.size)
    model = workload.model()
    network = DistributedDataParallel(whole_network(workload, model), gradient_as_bucket_view=True)
    optimizer = workload.optimizer(network.parameters())
    pieces = workload.microbatches // place.size
    share = workload.sequences // place.size
    mine = slice(place.rank * share, (place.rank + 1) * share)

    def step(number: int) -> Loss:
        inputs, targets = (tensor[mine] for tensor in workload.batch(number))
        optimizer.zero_grad()
        sums = []
        for piece, (part, wanted) in enumerate(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)):
            with network.no_sync() if piece < pieces - 1 else nullcontext():
                total, _ = model.loss(network(part), wanted)
                (total * (place.size / workload.tokens_per_step)).backward()
            sums.append(total.detach())
        optimizer.step()
        return lambda: sum(sums).item() / workload.tokens_per_step

    yield Stepper(run=step)
    dist.barrier()  # a rank that closes its connections early can leave the other's destructors waiting
    dist.destroy_process_group()
