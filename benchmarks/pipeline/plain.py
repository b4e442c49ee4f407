"""A plain PyTorch training loop on one process. Several of them at the same time are the ceiling of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.pipeline.contender import Contender, Place
from benchmarks.pipeline.workload import Loss, Stepper, Workload, whole_network


@contextmanager
def plain_loop(workload: Workload, contender: Contender, place: Place) -> Iterator[Stepper]:
    """Each rank trains its own full model on its own tokens, without communication.

    Setting `whole_batch`: one forward and backward over all sequences instead of one for each microbatch.
    """
    model = workload.model()
    network = whole_network(workload, model)
    optimizer = workload.optimizer(network.parameters())
    pieces = 1 if contender.settings.get("whole_batch") else workload.microbatches

    def step(number: int) -> Loss:
        inputs, targets = workload.batch(number, replica=place.rank)
        optimizer.zero_grad()
        sums = []
        for part, wanted in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            total, _ = model.loss(network(part), wanted)
            (total / workload.tokens_per_step).backward()
            sums.append(total.detach())
        optimizer.step()
        return lambda: sum(sums).item() / workload.tokens_per_step if place.rank == 0 else None

    yield Stepper(run=step)
