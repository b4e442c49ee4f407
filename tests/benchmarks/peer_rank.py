"""One rank of every contender in turn, in one process; test_pipeline_contenders starts two of them.

    python -m tests.benchmarks.peer_rank PORT RANK RANKS      prints name -> losses, as JSON
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from benchmarks.pipeline.contender import TORCH_SCHEDULES, Contender, Place, contenders
from benchmarks.pipeline.rank import opener
from benchmarks.pipeline.workload import Workload

STEPS = 3
WORKLOAD = Workload(num_layers=3, hidden=32, heads=2, vocab=64, sequence=8, sequences=8, microbatches=4)
BOUNDARIES = {1: (5,), 2: (2, 4, 6)}
"""Stages per rank -> first block of each stage after the first, for two ranks."""


def losses(contender: Contender, workload: Workload, place: Place) -> list[float | None]:
    with opener(contender.kind)(workload, contender, place) as stepper:
        return [stepper.run(number)() for number in range(STEPS)]


def main(port: int, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    chosen = []
    for contender in contenders(ranks, cores=ranks, policies=("message-driven",)):
        several = contender.name in TORCH_SCHEDULES and "interleaved" in contender.name
        if contender.launch == "processes" and rank < contender.ranks:
            settings = {**contender.settings, "boundaries": BOUNDARIES[2 if several else 1]}
            chosen.append(Contender(name=contender.name, kind=contender.kind, ranks=contender.ranks, settings=settings))
    found = {contender.name: losses(contender, WORKLOAD, Place(
        rank=rank, size=contender.ranks, store=PrefixStore(contender.name, store))) for contender in chosen}

    all_reduce, dist.all_reduce = dist.all_reduce, lambda tensor, group=None: None
    (broken,) = (contender for contender in chosen if contender.name == "torch-1f1b")
    found["ends of the tie not summed"] = losses(broken, WORKLOAD, Place(
        rank=rank, size=ranks, store=PrefixStore("broken", store)))
    dist.all_reduce = all_reduce
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
