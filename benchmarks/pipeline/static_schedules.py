"""The schedule that is chosen by simulation against the best known fixed orders, simulated: ZB-V, DualPipeV and 1F1B.

    python -m benchmarks.pipeline.static_schedules

ZB-V (Qi et al., 2024) and DualPipeV (DeepSeek-AI, 2024) are the orders that torch.distributed.pipelining makes for
these ranks and microbatches; each rank runs its list in order, as soon as it can. Ours and 1F1B run in the engine's own
simulator. All have the same blocks, times and messages:

    equal    2 p equal blocks, whose forward, backward and weight gradient take equal times
    gpt      an embedding, 4 p layers of attention and MLP, and a head that costs as much as two attentions

    one a rank, two a rank    ours, with one and two stages on each rank, within 1F1B's memory
    two, memory 1.1           within 1.1 times that; this is the default of pipeline.memory
    two, as ZB-V              within ZB-V's peak, or 1F1B's if that is less

    bubble   share of all ranks' time, until the last one is done, in which they wait
    peak     activations of the rank that has most at once, relative to 1F1B's: from a forward to its backward what a
             microbatch keeps, from there to its weight gradient what that needs. Parameters do not count
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal

from benchmarks.memory.program import table
from benchmarks.pipeline.bounds import Order, run_in_order
from benchmarks.record import results_file, write_results
from ranvier.mesh import StagePlacement
from ranvier.plan.partition import partition_for
from ranvier.schedule.computed_limits import StageLoad, computed_limits
from ranvier.schedule.limits import Limits
from ranvier.schedule.policies import MessageDriven, OneForwardOneBackward
from ranvier.schedule.schedule import Policy
from ranvier.schedule.simulator import PRODUCTS, StageTimes, simulate

_BYTES = 1000  # kept by the smallest block
OWN_HOP = 0.01
"""The hop of the simulation that chooses, with equal stages."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """hop: time of a message, in units of a rank's forward of one microbatch."""

    pipe: int
    microbatches: int
    blocks: Literal["equal", "gpt"]
    hop: float = OWN_HOP


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one schedule. seconds: of a step. peak: relative to 1F1B's."""

    bubble: float
    peak: float
    seconds: float


CASES = [Case(pipe=pipe, microbatches=microbatches, blocks=blocks, hop=hop) for hop, blocks, pipe, microbatches in
         product((OWN_HOP, 0.05), ("equal", "gpt"), (4, 8), (8, 16))]


def blocks_of(case: Case) -> list[StageLoad]:
    def load(forward: float, backward: float, weight: float, graph: float, operands: float) -> StageLoad:
        return StageLoad(forward=forward, backward=backward, weight=weight, trains=True, fixed=0.0,
                         graph=_BYTES * graph, operands=_BYTES * operands)

    if case.blocks == "equal":
        return [load(1.0, 1.0, 1.0, 1.0, 1.0)] * (2 * case.pipe)
    attention, mlp = load(1.0, 1.3, 0.67, 1.0, 0.6), load(1.5, 1.5, 1.4, 1.0, 0.8)
    return [load(0.05, 0.1, 0.0, 0.1, 0.0), *(attention, mlp) * (4 * case.pipe), load(2.0, 2.0, 2.0, 0.8, 1.2)]


def stages_of(case: Case, placement: StagePlacement) -> list[StageLoad]:
    """The blocks on stages, with the cut of a run."""
    blocks = blocks_of(case)
    cut = partition_for([block.forward + block.backward + block.weight for block in blocks], placement)
    return [StageLoad(trains=True, fixed=0.0, **{
        what: sum(getattr(block, what) for block in blocks[start:stop])
        for what in ("forward", "backward", "weight", "graph", "operands")})
        for start, stop in pairwise((0, *cut, len(blocks)))]


def static_order(schedule: str, pipe: int, microbatches: int) -> Order:
    """Actions of each rank in torch's schedule of that name; the two parts of an overlapped pair follow each other."""
    from torch.distributed.pipelining import schedules  # imports torch's compiler

    made: Any = object.__new__(getattr(schedules, schedule))  # the order needs no stages and no group of processes
    made.pp_group_size, made.num_stages, made._n_microbatches = pipe, 2 * pipe, microbatches
    return [[(one.stage_index, one.computation_type.value, one.microbatch_index)
             for action in made._calculate_single_rank_operations(rank) if action is not None
             for one in action.sub_actions or (action,)] for rank in range(pipe)]


def figures(case: Case, seconds: float, peak: float) -> Figures:
    work = case.microbatches * sum(block.forward + block.backward + block.weight for block in blocks_of(case))
    return Figures(bubble=1.0 - work / case.pipe / seconds, peak=peak / _peak_of_1f1b(case), seconds=seconds)


def static(case: Case, schedule: str) -> Figures:
    """Figures of torch's order with two stages a rank, in a v-shape."""
    stages = stages_of(case, StagePlacement(num_ranks=case.pipe, per_rank=2))
    order = static_order(schedule, case.pipe, case.microbatches)

    def takes(stage: int, kind: str) -> float:
        times = {"F": stages[stage].forward, "I": stages[stage].backward, "W": stages[stage].weight}
        return times[kind] if kind in times else times["I"] + times["W"]

    most = 0.0
    for actions in order:
        alive = 0.0
        for stage, kind, _ in actions:
            graph, operands = stages[stage].graph, stages[stage].operands
            alive += {"F": graph, "I": operands - graph, "W": -operands, "B": -graph}[kind]
            most = max(most, alive)
    return figures(case, max(run_in_order(order, takes, len(stages), _hop_seconds(case))), most)


def ours(case: Case, per_rank: int, memory: float) -> Figures:
    """Figures of the schedule that is chosen within `memory` times 1F1B's memory."""
    placement = StagePlacement(num_ranks=case.pipe, per_rank=per_rank)
    limits = computed_limits(stages_of(case, placement), MessageDriven(), memory=memory, placement=placement,
                             num_microbatches=case.microbatches)
    return figures(case, *_simulated(case, placement, MessageDriven(), limits))


def one_f_one_b(case: Case) -> Figures:
    placement = StagePlacement(num_ranks=case.pipe)
    return figures(case, *_simulated(case, placement, OneForwardOneBackward(), _none_waits(case)))


def _none_waits(case: Case) -> Limits:
    return Limits(in_flight=case.pipe, deferred=(0,) * case.pipe)


def _peak_of_1f1b(case: Case) -> float:
    return _simulated(case, StagePlacement(num_ranks=case.pipe), OneForwardOneBackward(), _none_waits(case))[1]


def _simulated(case: Case, placement: StagePlacement, policy: Policy, limits: Limits) -> tuple[float, float]:
    """Seconds and peak. The weight gradients of a stage are several products, between which a rank may run other
    actions."""
    stages = [StageTimes(forward=load.forward, backward=load.backward, weight=load.weight, products=PRODUCTS,
                         kept_bytes=load.graph, alive_bytes=round(load.operands))
              for load in stages_of(case, placement)]
    made = simulate(stages, case.microbatches, policy, limits.in_flight, hop=_hop_seconds(case), placement=placement,
                    defer_bytes=[waiting * sum(stages[stage].alive_bytes for stage in placement.stages_of(rank))
                                 for rank, waiting in enumerate(limits.deferred)], max_stored=limits.max_stored,
                    alternating=limits.alternating)
    return made.seconds, max(one.alive for one in made.held)


def _hop_seconds(case: Case) -> float:
    return case.hop * sum(block.forward for block in blocks_of(case)) / case.pipe


def compared(case: Case) -> dict[str, Figures]:
    """Schedule -> its figures. DualPipeV needs as many microbatches as stages. Ours, with one and two stages a rank:
    within the memory of 1F1B, the default of pipeline.memory, and the peaks of ZB-V and DualPipeV."""
    found = {"1F1B": one_f_one_b(case), "ZB-V": static(case, "ScheduleZBVZeroBubble")}
    if case.microbatches >= 2 * case.pipe:
        found["DualPipeV"] = static(case, "ScheduleDualPipeV")
    fixed = dict(list(found.items())[1:])
    return found | {"one a rank": ours(case, 1, 1.0), "two a rank": ours(case, 2, 1.0),
                    "two, memory 1.1": ours(case, 2, 1.1), "two, memory 1.5": ours(case, 2, 1.5)} | {
        f"two, as {name}": ours(case, 2, max(1.0, each.peak)) for name, each in fixed.items()}


def lines(results: Sequence[tuple[Case, dict[str, Figures]]]) -> str:
    """A table with one line for each case, and the bubble and peak of each schedule."""
    names = list(dict.fromkeys(name for _, found in results for name in found))
    return table(["blocks", "hop", "ranks", "microbatches", *names], [
        [case.blocks, f"{case.hop:g}", str(case.pipe), str(case.microbatches),
         *(f"{100 * found[name].bubble:.1f} % ({found[name].peak:.2f})" if name in found else "-" for name in names)]
        for case, found in results])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="by default benchmarks/results/pipeline/static-schedules-DATE.json")
    options = parser.parse_args(arguments)
    results = [(case, compared(case)) for case in CASES]
    print(lines(results))
    path = options.output or results_file("pipeline", "static-schedules")
    write_results(path, {"cases": [asdict(case) | {"schedules": {name: asdict(each) for name, each in found.items()}}
                                   for case, found in results]})
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
