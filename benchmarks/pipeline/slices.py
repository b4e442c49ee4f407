"""Do weight-gradient products that are cut into deferrable slices make a step shorter? A simulation.

    python -m benchmarks.pipeline.slices

The engine's own schedule runs on a simulated clock, within the limits that `auto` takes, for GPT-like pipelines: two
layers a rank, whose attention has a quarter of an MLP's products, and a head that costs as much as two or eight
attention forwards. A product of the head is one action; cut into slices (of the vocabulary) it is several, between
which a rank runs what has arrived. Slices take no additional time here, and keep alive as much as the full product
until the last one has run.

    gain         share of the bound (all work, divided by the ranks, over the time of a step) with slices, less that
                 without
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import mean, median

from benchmarks.memory.program import table
from ranvier.mesh import StagePlacement
from ranvier.plan.partition import partition_for
from ranvier.schedule.computed_limits import StageLoad, computed_limits
from ranvier.schedule.policies import MessageDriven
from ranvier.schedule.schedule import Action
from ranvier.schedule.simulator import StageTimes, simulate

_HOP, _UNIT = 0.02, 1e6


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Numbers of slices into which the head's product, and every other product, are cut."""

    head: int = 1
    others: int = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """head: time of its forward, in units of an attention's forward. memory: as pipeline.memory."""

    pipe: int
    per_rank: int
    microbatches: int
    head: float
    memory: float


CASES = [Case(pipe=pipe, per_rank=per_rank, microbatches=microbatches, head=head, memory=memory)
         for pipe, per_rank, microbatches, head, memory in product(
             (2, 4, 8), (1, 2), (8, 16), (2.0, 8.0), (1.0, 1.1, 1.5))]
WAYS = [Slices(head=2), Slices(head=4), Slices(head=8), Slices(head=8, others=4)]


def share(case: Case, slices: Slices) -> float:
    """The time of all work divided by the ranks, over that of a simulated step."""
    layers, head = 2 * case.pipe, case.head
    forward = [0.05, *(1.0, 1.5) * layers, head]
    backward = [0.1, *(1.3, 1.5) * layers, head]
    weight = [0.0, *(0.67, 1.4) * layers, head]
    pieces = [0, *(2 * slices.others,) * (2 * layers), slices.head]  # attention and MLP have two products each
    graph = [0.1, *(1.0,) * (2 * layers), 0.4 * head]
    operands = [0.0, *(0.6, 0.8) * layers, 0.6 * head]
    placement = StagePlacement(num_ranks=case.pipe, per_rank=case.per_rank)
    edges = (0, *partition_for([sum(each) for each in zip(forward, backward, weight, strict=True)], placement),
             len(forward))
    loads, stages, products = [], [], []
    for start, stop in pairwise(edges):
        products.append([weight[block] / pieces[block] for block in reversed(range(start, stop))
                         for _ in range(pieces[block])])
        loads.append(StageLoad(
            forward=sum(forward[start:stop]), backward=sum(backward[start:stop]), weight=sum(weight[start:stop]),
            trains=True, fixed=20.0, graph=sum(graph[start:stop]), operands=sum(operands[start:stop])))
        stages.append(StageTimes(
            forward=loads[-1].forward, backward=loads[-1].backward, weight=loads[-1].weight,
            products=max(1, len(products[-1])), alive_bytes=round(_UNIT * loads[-1].operands)))
    limits = computed_limits(loads, MessageDriven(), memory=case.memory, placement=placement)
    held = [placement.stages_of(rank) for rank in range(case.pipe)]

    def unequal(rank: int, action: Action) -> float:
        """Corrects the times of the simulator, which takes the products of a stage to be equal."""
        stage = held[rank][action.turn]
        return 1.0 if action.kind != "W" else (
            products[stage][action.product] / stages[stage].weight * stages[stage].products)

    ran = simulate(stages, case.microbatches, MessageDriven(), limits.in_flight, hop=_HOP, placement=placement,
                   jitter=unequal, defer_bytes=[waiting * sum(stages[stage].alive_bytes for stage in held[rank])
                                                for rank, waiting in enumerate(limits.deferred)],
                   max_stored=limits.max_stored)
    return case.microbatches * sum(map(sum, (forward, backward, weight))) / case.pipe / ran.seconds


def rows(cases: Sequence[Case], ways: Sequence[Slices]) -> list[list[str]]:
    whole, found = [share(case, Slices()) for case in cases], []
    for way in ways:
        gains = [share(case, way) - before for case, before in zip(cases, whole, strict=True)]
        found.append([f"{way.head}", f"{way.others}", *(f"{gain:+.3f}" for gain in (
            median(gains), mean(gains), min(gains), max(gains)))])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
                            ).parse_args(arguments)
    head = ["slices of the head", "of others", "median gain", "mean", "least", "most"]
    for ranks in ((2,), (4,), (8,), (2, 4, 8)):
        print(table([f"{' and '.join(map(str, ranks))} ranks: {head[0]}", *head[1:]],
                    rows([case for case in CASES if case.pipe in ranks], WAYS)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
