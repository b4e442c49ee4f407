"""Time that one batch takes to pass through a pipeline: a lower bound in closed form, and the engine's schedule.

    T = max_i (sum_j<i (t_j + 2 hop_j) + m t_i)         m microbatches, stage i needs t_i for one

is reached by equal stages without messages. With weight gradients w_i that may wait it is the longer of

    T = max_i (sum_j<i (t_j - w_j) + m (t_i - w_i)) + w_0        nobody waits for one
    T = max_i (sum_j<i f_j + m t_i)                              a stage begins, and then never rests

(f_i for a forward), and with at most f in flight (m - 1) / f round trips come first, whole ones, and the rest of the
microbatches after them. The schedule itself is simulated, with few microbatches: once the pipeline is full, each
further one takes about the same time, so that two short simulations give the long one. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat
from operator import add
from typing import Literal

from ranvier.mesh import StagePlacement
from ranvier.schedule.schedule import Policy
from ranvier.schedule.simulator import Simulated, StageTimes, simulate


@dataclass(frozen=True, kw_only=True)
class Way:
    """The edges of a pipeline: seconds for which a message keeps edge i (between stages i and i + 1) busy, and seconds
    until it is there after that."""

    transfer: tuple[float, ...] = ()
    latency: tuple[float, ...] = ()

    def hop(self, source: int, destination: int) -> float:
        """Seconds of a message between two neighbours, after its edge is free again."""
        return self.latency[min(source, destination)] if self.latency else 0.0

    def busy(self, source: int, destination: int) -> float:
        """Seconds for which a message between two neighbours keeps their edge busy."""
        return self.transfer[min(source, destination)] if self.transfer else 0.0

    @property
    def round_trip(self) -> float:
        """Seconds of a microbatch's messages there and back."""
        return 2 * (sum(self.transfer) + sum(self.latency))


DIRECT = Way()
"""Messages take no time."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Predicted time of a batch. bubble_fraction: share of all stages' time in which they do nothing."""

    seconds: float
    bubble_fraction: float


def passage(stages: Sequence[StageTimes], num_microbatches: int, policy: Policy, in_flight: int, *, way: Way = DIRECT,
            defer_bytes: int | Sequence[int] | Literal["auto"] = "auto", exact: bool = True,
            cores: int | None = None, placement: StagePlacement | None = None, defer_last: int | None = None,
            max_stored: int | None = None, alternating: bool = False) -> Passage:
    """One batch of equal microbatches. exact: simulate; otherwise the closed form, which takes microseconds; of several
    stages on each rank it is a lower bound. cores: ranks that may compute at once, in a simulation. placement,
    defer_last, max_stored, alternating: as of `simulate`."""
    each = [stage.microbatch_seconds for stage in stages]
    limit = policy.in_flight(in_flight, num_microbatches)
    placement = placement or StagePlacement(num_ranks=len(stages))
    busy = num_microbatches * sum(each)
    if exact and len(stages) > 1:
        run = partial(simulate, stages, policy=policy, in_flight=limit, hop=way.hop, transfer=way.busy,
                      defer_bytes=defer_bytes, cores=cores, placement=placement, defer_last=defer_last,
                      max_stored=max_stored, alternating=alternating)
        seconds, busy = _simulated(run, num_microbatches, *_enough(len(stages), limit))
    elif placement.per_rank > 1:
        seconds = never_resting(stages, num_microbatches, placement)
    else:
        seconds = closed_form(each, num_microbatches, limit, way)
        if policy.defers and defer_bytes and len(stages) > 1:
            seconds = min(seconds, _deferring(stages, each, num_microbatches, limit, way))
    idle = max(0.0, 1.0 - busy / (seconds * placement.num_ranks)) if seconds else 0.0
    return Passage(seconds=seconds, bubble_fraction=idle)


def never_resting(stages: Sequence[StageTimes], num_microbatches: int, placement: StagePlacement) -> float:
    """Lower bound of a batch's time: each rank begins after the forwards of the stages before its first one, has work
    from then on, and where no weight gradient waits, their backwards follow its own."""
    begins = list(accumulate((stage.forward for stage in stages), initial=0.0))
    ends = list(accumulate((stage.backward for stage in stages), initial=0.0))
    found = []
    for rank in range(placement.num_ranks):
        held = placement.stages_of(rank)
        waits = any(stages[stage].weight and stages[stage].trains for stage in held)
        found.append(begins[held[0]] + (0.0 if waits else ends[held[0]])
                     + num_microbatches * sum(stages[stage].microbatch_seconds for stage in held))
    return max(found)


def _deferring(stages: Sequence[StageTimes], each: Sequence[float], num_microbatches: int, in_flight: int, way: Way
                ) -> float:
    """The closed form where weight gradients may wait."""
    waits = [stage.weight - stage.longer_backward if stage.trains else 0.0 for stage in stages]
    others = [total - wait for total, wait in zip(each, waits, strict=True)]
    begins = accumulate((stage.forward for stage in stages), initial=0.0)
    hops = accumulate((latency + transfer for latency, transfer in zip(way.latency, way.transfer, strict=True)),
                      initial=0.0) if way.latency else repeat(0.0)
    return max(closed_form(others, num_microbatches, in_flight, way) + waits[0],
               *(begin + hop + num_microbatches * total for begin, hop, total in zip(begins, hops, each, strict=False)))


def closed_form(each: Sequence[float], num_microbatches: int, in_flight: int, way: Way = DIRECT) -> float:
    """Lower bound of the seconds, from each stage's for one microbatch: a stage waits for the forwards before it, has
    all microbatches, and is followed by the backwards of the stages before it; an edge has all messages."""
    trips = [2 * (latency + transfer) for latency, transfer in zip(way.latency, way.transfer, strict=True)]
    before: list[float] = list(accumulate(map(add, each, trips or repeat(0.0)), initial=0.0))
    once = sum(each) + way.round_trip

    def passes(count: int) -> float:
        busy = max(first + count * seconds for first, seconds in zip(before, each, strict=False))
        return max(busy, once + (count - 1) * max(way.transfer, default=0.0))

    rounds, rest = divmod(num_microbatches - 1, in_flight)  # one begins when that `in_flight` before it has returned
    return max(passes(num_microbatches), rounds * once + passes(rest + 1))


def _simulated(run: Callable[[int], Simulated], num_microbatches: int, full: int, more: int) -> tuple[float, float]:
    """Seconds, and for how many of them ranks are busy, all together. run: simulates so many microbatches. full, more:
    as of `_enough`."""
    def measured(count: int) -> tuple[float, float]:
        made = run(count)
        return made.seconds, sum(stop - start for rank in made.actions for _, start, stop in rank)

    if num_microbatches <= full + more:
        return measured(num_microbatches)
    first, longer = measured(full), measured(full + more)
    times = (num_microbatches - full) / more
    return first[0] + times * (longer[0] - first[0]), first[1] + times * (longer[1] - first[1])


def _enough(num_stages: int, in_flight: int) -> tuple[int, int]:
    """Microbatches after which each further one takes the same time, and over how many that is measured: a multiple of
    the rounds in which a full pipeline repeats itself; uneven stages of a short pipeline need more of them."""
    depth = max(num_stages, in_flight)
    full, more = (8, 8) if depth <= 8 else (6, 4) if depth <= 16 else (3, 2)
    return full * depth, more * depth
